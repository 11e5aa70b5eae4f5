// bench.cu -- speed of each kernel and each matmul of a training step, compared with this GPU's
// limits.
//
// Prints a line for each: ms, TB/s, TFLOP/s, and the percentage of its limit. The limit is the
// larger of two times: for its bytes, at the bandwidth of a plain copy, measured at startup; and
// for its FLOPs, at the dense peak in the GPU's table row. Arrays hold random numbers, because
// zeros draw less power and thus allow a higher clock. Successive launches use different buffers,
// enough to fill the L2 cache twice.
//
// Build:  make build/bench             for the GPUs of this machine (others: ARCH=90a)
//         make build/bench_cuda_cpu    the same on the CPU, to check that it runs
// Run:    build/bench                  124M at -b 64 and 1558M at -b 16, one table each
//         build/bench -e d24 -b 8 attention matmul    cases whose names start with these words
// Options as of train_gpt2cu: -e, -b, -t, --dtype, and -x for the number of measurements (9).
// Attention is timed with the default kernels and, below them, with each variant for this GPU
// ("attention_forward wgmma"); the sum excludes the variants. The last lines are the rate, in each
// direction, of AdamW with moments and master weights in host memory, as with --offload.

#define GPT2_NO_MAIN 1
#include "../../train_gpt2.cu"
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

// How a kernel uses an array. Each byte is counted once per necessary transfer over the memory bus,
// without intermediate results between the kernels of a launcher.
enum Use { SCRATCH = 0, READ = 1, WRITE = 1, READ_WRITE = 2 };
enum Fill { NOISE, POSITIVE, INTS };

struct Array {
    size_t bytes;
    Use use;
    Fill fill = NOISE;
    const int *ints = nullptr;  // for INTS
    size_t touched = 0;         // bytes that a launch accesses; 0: all of them
};

struct AnyPointer {  // converts to a pointer to any type
    char *p;
    template <class T> operator T *() const { return (T *)(void *)p; }
};
typedef std::vector<AnyPointer> Buffers;  // one per array
struct Case {
    std::string name;
    int launches;  // per micro-step; 0: only in the update
    double flops;  // 0: always bound by memory
    std::vector<Array> arrays;
    std::function<void(const Buffers &)> run;
};

static struct {
    int rounds;
    std::vector<const char *> what;
    double peak_flops, bytes_per_ms, ms_sum;
    size_t cache_bytes, arena_bytes;
    char *arena, *noise[2];  // arena: all arrays; noise: patterns to fill them with
    cudaStream_t stream;
} bench;

enum { PATTERN = CUDA_CPU ? 1 << 16 : 1 << 24 };  // bytes of a pattern

// Fills the patterns with numbers of type E between -1 and 1, and between 1/4 and 1. A pair of
// 16-bit numbers read as one fp32 is in that range too, because its upper half determines it.
template <class E> static void bench_patterns() {
    std::vector<E> host(PATTERN / sizeof(E));
    for (int positive = 0; positive < 2; positive++) {
        for (size_t i = 0; i < host.size(); i++) {
            double x = rng_uniform(1, 0, (uint32_t)positive, i);
            host[i] = from_float<E>((float)(positive ? 0.25 + 0.75 * x : 2 * x - 1));
        }
        cuda_check(cudaMalloc((void **)&bench.noise[positive], PATTERN));
        copy_sync(bench.noise[positive], host.data(), PATTERN, bench.stream);
    }
}

static size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Fills one array; NOISE and POSITIVE repeat their pattern.
static void array_fill(char *to, const Array &array) {
    if (array.fill == INTS) {
        copy_sync(to, array.ints, array.bytes, bench.stream);
        return;
    }
    for (size_t at = 0; at < array.bytes; at += PATTERN) {
        size_t bytes = (size_t)min_i64((int64_t)(array.bytes - at), PATTERN);
        cuda_check(cudaMemcpyAsync(to + at, bench.noise[array.fill], bytes,
                                   cudaMemcpyDeviceToDevice, bench.stream));
    }
}

// Returns enough sets of arrays to fill the cache twice, or as many as fit in the arena, even none.
static std::vector<Buffers> case_buffers(const Case &c) {
    size_t set_bytes = 0;
    for (const Array &array : c.arrays) {
        set_bytes += aligned(array.bytes);
    }
    if (set_bytes > bench.arena_bytes) {
        printf("%s: needs %zu MiB, this GPU has %zu MiB left\n", c.name.c_str(), set_bytes >> 20,
               bench.arena_bytes >> 20);
        return {};
    }
    size_t sets = 2 * bench.cache_bytes / set_bytes + 1;
    sets = sets < bench.arena_bytes / set_bytes ? sets : bench.arena_bytes / set_bytes;
    std::vector<Buffers> buffers(sets < 64 ? sets : 64);
    char *at = bench.arena;
    for (Buffers &set : buffers) {
        for (const Array &array : c.arrays) {
            array_fill(at, array);
            set.push_back({at});
            at += aligned(array.bytes);
        }
    }
    return buffers;
}

// Returns the minimum number of bytes that a case must read and write.
static double case_bytes(const Case &c) {
    double bytes = 0;
    for (const Array &array : c.arrays) {
        bytes += (double)(array.touched ? array.touched : array.bytes) * array.use;
    }
    return bytes;
}

static bool is_asked(const std::string &name) {
    return bench.what.empty() || std::any_of(bench.what.begin(), bench.what.end(), [&](auto *word) {
        return name.compare(0, strlen(word), word) == 0;
    });
}

// Times a case and prints one line; "-" if a limit is not known.
static void bench_case(const Case &c) {
    const auto buffers = is_asked(c.name) ? case_buffers(c) : decltype(case_buffers(c))();
    if (buffers.empty()) {
        return;
    }
    const double bytes = case_bytes(c), ms = gpu_time_ms(bench.rounds, bench.stream, [&](int i) {
        c.run(buffers[(size_t)i % buffers.size()]);
    });
    double limit_ms = fmax(bytes / bench.bytes_per_ms,
                           bench.peak_flops > 0 ? c.flops / bench.peak_flops * 1e3 : 0);
    char percent[16] = "-";
    if (c.flops == 0 || bench.peak_flops > 0) {
        snprintf(percent, sizeof percent, "%.0f", 100 * limit_ms / ms);
    }
    printf("%-28s %5d %10.4f %8.3f %9.2f %8s\n", c.name.c_str(), c.launches, ms,
           bytes / ms * 1e-9, c.flops / ms * 1e-9, percent);
    fflush(stdout);
    bench.ms_sum += ms * c.launches;
}

// Type of the matrices' gradients in a run of type E with default options.
template <class E> using Grad = std::conditional_t<traits<E>.small_range, float, E>;

// Returns the kernels of a micro-step that use tokens, with their arrays and number of launches.
template <class E> static std::vector<Case> token_cases(const Settings *s) {
    const Model *m = &s->model;
    const int B = s->B, T = s->T, N = B * T, C = m->C, V = m->V, Vp = m->Vp;
    const int rows = (int)min_i64(s->logit_rows, N), chunks = ceil_div(N, rows);
    static std::vector<int> tokens, plan, targets;
    std::vector<int> counts((size_t)V);
    tokens.resize((size_t)N), targets.resize((size_t)N), plan.resize(embedding_plan_ints(N));
    for (int i = 0; i < N; i++) {
        tokens[i] = (int)(rng_uniform(1, 1, 0, (uint64_t)i) * V);
        targets[i] = (int)(rng_uniform(1, 1, 1, (uint64_t)i) * V);
    }
    const int segments = embedding_sort(plan.data(), counts.data(), tokens.data(), N, V);
    const size_t n = (size_t)N * C * sizeof(E), positions = (size_t)T * C * sizeof(E);
    const size_t table = (size_t)Vp * C * sizeof(E), used = (size_t)segments * C * sizeof(E);
    const size_t wider = sizeof(Grad<E>) / sizeof(E);
    const size_t logits = (size_t)rows * Vp * sizeof(E), losses = N * sizeof(float);
    auto ints = [](const std::vector<int> &x) {
        return Array{x.size() * sizeof(int), READ, INTS, x.data()};
    };
    cudaStream_t stream = bench.stream;
    const float dloss = 1.0f / (float)N;
    return {
        {"embedding_forward", 1, 0,
         {{n, WRITE}, ints(tokens), {table, READ, NOISE, nullptr, used}, {positions, READ}},
         [=](const Buffers &p) {
             gpu_embedding_forward<E>(p[0], p[1], p[2], p[3], B, T, C, stream);
         }},
        {"embedding_backward", 1, 0,
         {{wider * table, READ_WRITE, NOISE, nullptr, wider * used},
          {wider * positions, READ_WRITE},
          {n, READ_WRITE}, ints(plan)},  // dout: read by both of its kernels
         [=](const Buffers &p) {
             gpu_embedding_backward<E, Grad<E>>(p[0], p[1], p[2], p[3], segments, B, T, C, T, false,
                                                stream);
         }},
        {"classifier", chunks, 0,
         {{losses, WRITE}, {logits, READ_WRITE}, ints(targets),
          {sizeof(float), SCRATCH, POSITIVE}},  // fp16's scale
         [=](const Buffers &p) {
             gpu_classifier<E>(p[0], p[1], p[2], dloss, p[3], rows, V, Vp, true, stream);
         }},
        {"loss_sum", 1, 0, {{sizeof(GpuState), WRITE}, {losses, READ}},
         [=](const Buffers &p) {
             launch(sum_kernel, 1, 256, 0, stream, p[0], p[1], N, true);
         }},
    };
}

template <class E> static std::vector<Case> layer_cases(const Settings *s) {
    const int N = s->B * s->T, C = s->model.C, L = s->model.L;
    const size_t n = (size_t)N * C * sizeof(E), stat = N * sizeof(float);
    const size_t partials = 4 * partial_count(s->B, s->T, C, s->model.NH, 0);
    const Array in = {n, READ}, out = {n, WRITE};
    const Array in4 = {4 * n, READ}, out4 = {4 * n, WRITE};
    const Array weight = {C * sizeof(E), READ};
    const Array sums = {4 * C * sizeof(float), READ_WRITE};
    const Array stat_in = {stat, READ, POSITIVE}, stat_out = {stat, WRITE};
    const Array scratch = {partials, SCRATCH};
    cudaStream_t stream = bench.stream;
    return {
        {"layernorm_forward", 2 * L + 1, 0, {out, stat_out, stat_out, in, weight, weight},
         [=](const Buffers &p) {
             gpu_layernorm_forward<E>(p[0], p[1], p[2], p[3], p[4], p[5], N, C, stream);
         }},
        {"layernorm_backward", 2 * L + 1, 0,
         {out, sums, sums, sums, in, in, weight, stat_in, stat_in, in, scratch},
         [=](const Buffers &p) {
             gpu_layernorm_backward<E>(p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9],
                                       p[10], N, C, stream);
         }},
        {"gelu_forward", L, 0, {out4, in4},
         [=](const Buffers &p) { gpu_gelu_forward<E>(p[0], p[1], (size_t)N * 4 * C, stream); }},
        {"gelu_backward", L, 0, {out4, sums, in4, in4, scratch},
         [=](const Buffers &p) {
             gpu_gelu_backward<E>(p[0], p[1], p[2], p[3], p[4], N, 4 * C, stream);
         }},
    };
}

// Attention. Its FLOPs are those of the causal half, without the matmuls that backward repeats.
template <class E> static std::vector<Case> attention_cases(const Settings *s) {
    const int B = s->B, T = s->T, N = B * T, C = s->model.C, L = s->model.L, NH = s->model.NH;
    const size_t n = (size_t)N * C * sizeof(E), lse = (size_t)N * NH * sizeof(float);
    const double attention = 2.0 * N * T * C;  // two matmuls of T x T / 2 by HS, per head
    const Array in = {n, READ}, out = {n, WRITE};
    const Array in3 = {3 * n, READ}, out3 = {3 * n, WRITE};
    cudaStream_t stream = bench.stream;
    std::vector<Case> cases = {
        {"attention_forward", L, attention, {out, {lse, WRITE}, in3},
         [=](const Buffers &p) {
             gpu_attention_forward<E>(p[0], p[1], p[2], B, T, C, NH, stream);
         }},
        {"attention_backward", L, 2.5 * attention,
         {out3, {3 * C * sizeof(float), READ_WRITE}, {lse, SCRATCH}, in, in3, in,
          {lse, READ, POSITIVE},
          {4 * (size_t)partial_count(B, T, C, NH, s->dtype == TYPE_FP16), SCRATCH}},
         [=](const Buffers &p) {
             gpu_attention_backward<E>(p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], B, T, C, NH,
                                       stream);
         }},
    };
    // The cases above use the default kernels; add those with wgmma if this GPU supports it.
    for (int i = 0; i < 2 && gpu_present()->capability == 90 && C / NH == 64 &&
                    std::is_same_v<E, __nv_bfloat16>; i++) {
        Case c = cases[(size_t)i];
        c.name += " wgmma";
        c.launches = 0;
        c.run = [run = c.run](const Buffers &p) {
            std::fill(attention_fast, std::end(attention_fast), true);
            run(p);
            std::fill(attention_fast, std::end(attention_fast), false);
        };
        cases.push_back(c);
    }
    return cases;
}

// Applies AdamW to `count` elements, with fp32 master weights.
template <class E, class M>
static void adamw_launch(E *weights, Master<E> *master, M *m, M *v, const Grad<E> *grads,
                         const UpdateState *state, size_t count) {
    constexpr bool SPLIT = sizeof(E) == 2;
    launch((adamw_kernel<E, Grad<E>, M, SPLIT>),
           (unsigned)((count + UPDATE_CHUNK - 1) / UPDATE_CHUNK), UPDATE_THREADS, 0, bench.stream,
           weights, SPLIT ? master : nullptr, m, v, grads, count, (size_t)0,
           AdamW{1e-4f, 0.9f, 0.95f, 0.1f, 0.05f, 1e-8f, 0.1f, 1.0f}, UpdateRandom{1, 1}, state);
}

// Times AdamW with moments of type M and the master in host memory. Each of their bytes is
// transferred once in each direction.
template <class E, class M> static void bench_host_update() {
    const char *name = is_fp32<M> ? "adamw host fp32" : "adamw host bf16";
    const size_t count = CUDA_CPU ? 1 << 16 : 1 << 26, low = sizeof(E) == 2 ? sizeof(Master<E>) : 0;
    const size_t bytes = count * (low + 2 * sizeof(M)), all = count * (sizeof(E) + sizeof(Grad<E>));
    const UpdateState state = {1, 1, 1, 0, 0};
    char *host, *device = bench.arena;
    if (!is_asked(name) || all + 256 > bench.arena_bytes) {
        return;
    }
    cuda_check(cudaMallocHost((void **)&host, bytes));
    memset(host, 0, bytes);
    cuda_check(cudaMemsetAsync(device, 0, all, bench.stream));
    copy_sync(device + all, &state, sizeof state, bench.stream);
    const double ms = gpu_time_ms(bench.rounds, bench.stream, [&](int) {
        AnyPointer m = {host}, v = {host + count * sizeof(M)};
        AnyPointer master = {host + 2 * count * sizeof(M)};
        AnyPointer weights = {device}, grads = {device + count * sizeof(E)};
        AnyPointer decided = {device + all};
        adamw_launch<E, M>(weights, master, m, v, grads, decided, count);
    });
    printf("%-28s %5d %10.4f  %.2f GB/s up and down\n", name, 0, ms, (double)bytes / ms * 1e-6);
    cuda_check(cudaFreeHost(host));
}

// Norm and AdamW, over all parameters as one bucket; in 16 bits, with a master and fp32 moments.
template <class E> static std::vector<Case> update_cases(const Settings *s) {
    using G = Grad<E>;
    constexpr bool SPLIT = sizeof(E) == 2;
    const size_t count = (size_t)(model_parameters(&s->model) / 8 * 8);
    static const UpdateState state = {1, 1, 1, 0, 0};
    const Array decided = {sizeof state, READ, INTS, (const int *)(const void *)&state};
    const Array grads = {count * sizeof(G), READ};
    const Array partials = {NORM_BLOCKS * sizeof(float), SCRATCH};
    const Array weights = {count * sizeof(E), READ_WRITE};
    const Array low = {SPLIT ? count * sizeof(Master<E>) : 256, READ_WRITE};
    const Array moment = {count * sizeof(float), READ_WRITE, POSITIVE};
    cudaStream_t stream = bench.stream;
    return {
        {"grad_norm", 0, 0, {decided, partials, grads},
         [=](const Buffers &p) {
             gpu_grad_square_sum<G>(p[0], p[1], p[2], count, true, stream);
         }},
        {"adamw", 0, 0, {weights, low, moment, moment, grads, decided},
         [=](const Buffers &p) {
             adamw_launch<E, float>(p[0], p[1], p[2], p[3], p[4], p[5], count);
         }},
    };
}

// A layer inp (rows,C) -> (rows,OC). Its matmuls are forward with bias and addend, dinp, and
// dweight, both overwritten and accumulated, as in gpu_matmul_forward and gpu_matmul_backward.
struct LayerShape {
    const char *name;
    int rows, C, OC, launches;
    bool bias, addend;
};

template <class E> static std::vector<Case> matmul_cases(const LayerShape &l) {
    const size_t C = (size_t)l.C, OC = (size_t)l.OC, N = (size_t)l.rows;
    const Array inp = {N * C * sizeof(E), READ};
    const Array out = {N * OC * sizeof(E), READ};  // or WRITE: counted once
    const Array weight = {OC * C * sizeof(E), READ};
    const Array bias = {OC * sizeof(E), READ};
    const double flops = 2.0 * (double)N * (double)C * (double)OC;
    const std::string name = std::string("matmul ") + l.name + " ";
    const int rows = l.rows, c = l.C, oc = l.OC;
    cudaStream_t stream = bench.stream;
    std::vector<Array> forward = {out, inp, weight, bias};
    if (l.addend) {
        forward.push_back(out);
    }
    std::vector<Case> cases = {
        {name + "forward", l.launches, flops, forward,
         [=](const Buffers &p) {
             E *none = nullptr, *b = p[3], *addend = p.back();
             gpu_matmul_forward<E>(p[0], p[1], p[2], l.bias ? b : none, l.addend ? addend : none,
                                   rows, c, oc, stream);
         }},
        {name + "dinp", l.launches, flops, {inp, weight, out},
         [=](const Buffers &p) {
             matmul_run<E, E>(p[0], p[1], p[2], nullptr, p[0], 0, false, false, c, rows, oc,
                              stream);
         }},
    };
    for (int adds = 0; adds < 2; adds++) {  // the first micro-step overwrites, others accumulate
        Array dweight = weight;
        dweight.bytes *= sizeof(Grad<E>) / sizeof(E);
        dweight.use = adds ? READ_WRITE : WRITE;
        cases.push_back({name + (adds ? "dweight +=" : "dweight ="), adds ? l.launches : 0, flops,
                         {dweight, inp, out}, [=](const Buffers &p) {
                             matmul_run<E, Grad<E>>(p[0], p[1], p[2], nullptr, p[0], adds, false,
                                                    true, c, oc, rows, stream);
                         }});
    }
    return cases;
}

// The products D (n,m) = B (n,k) A (m,k)^T of a block's layer in fp8, and the conversion of inp.
static std::vector<Case> fp8_cases(const LayerShape &l) {
    typedef __nv_bfloat16 E;
    const size_t N = (size_t)l.rows, C = (size_t)l.C, OC = (size_t)l.OC;
    const std::string name = std::string("matmul fp8 ") + l.name + " ";
    cudaStream_t stream = bench.stream;
    const Array x = {N * C + 16, READ};  // the matrix and its factor
    std::vector<Case> cases = {{name + "convert", 0, 0, {{N * C * 2, READ_WRITE}, x, x, {4, READ}},
                                [=](const Buffers &p) {
        unsigned *largest = p[3];
        gpu_fp8_largest(largest, p[0], N * C, stream);
        gpu_fp8(p[1], p[2], largest, p[0], (int)N, (int)C, stream);
    }}};
    const struct { const char *what; size_t m, n, k; bool bias; } products[] = {
        {"forward", OC, N, C, true}, {"dinp", C, N, OC, false}, {"dweight =", C, OC, N, false}};
    for (const auto &s : products) {
        cases.push_back({name + s.what, 0, 2.0 * (double)(s.m * s.n * s.k),
                         {{s.m * s.n * 2, WRITE}, {s.m * s.k + 16, READ}, {s.n * s.k + 16, READ},
                          {s.m * 2, READ}}, [=](const Buffers &p) {
            const Fp8 *A = p[1], *B = p[2];
            const E *bias = p[3];
            matmul_run<Fp8, E>(p[0], A, B, s.bias ? bias : nullptr, bias, false, true, false,
                               (int)s.m, (int)s.n, (int)s.k, stream);
        }});
    }
    return cases;
}

template <class E> static void bench_model(const Settings *s) {
    const Model *m = &s->model;
    const int N = s->B * s->T, C = m->C, L = m->L, rows = (int)min_i64(s->logit_rows, N);
    const LayerShape layers[] = {{"qkv", N, C, 3 * C, L, true, false},
                                 {"attproj", N, C, C, L, true, true},
                                 {"fc", N, C, 4 * C, L, true, false},
                                 {"fcproj", N, 4 * C, C, L, true, true},
                                 {"head", rows, C, m->Vp, ceil_div(N, rows), false, false}};
    bench_patterns<E>();
    bench.ms_sum = 0;
    printf("%-28s %5s %10s %8s %9s %8s\n", "kernel", "times", "ms", "TB/s", "TFLOP/s", "% limit");
    for (auto *cases : {token_cases<E>, layer_cases<E>, attention_cases<E>, update_cases<E>}) {
        for (const Case &c : cases(s)) {
            bench_case(c);
        }
    }
    for (const LayerShape &layer : layers) {
        for (const Case &c : matmul_cases<E>(layer)) {
            bench_case(c);
        }
    }
    const bool fp8 = traits<E>.type == TYPE_BF16 && gpu_present()->capability >= FP8_CAPABILITY &&
                     N % FP8_UNIT == 0 && C % FP8_UNIT == 0;
    for (int i = 0; i < 4 * fp8; i++) {
        for (const Case &c : fp8_cases(layers[i])) {
            bench_case(c);
        }
    }
    if (bench.what.empty()) {
        printf("sum of a micro-step that adds gradients: %.3f ms, %.0f tokens/s\n", bench.ms_sum,
               N / bench.ms_sum * 1e3);
    }
    bench_host_update<E, float>();
    if constexpr (std::is_same_v<E, __nv_bfloat16>) {
        bench_host_update<E, E>();
    }
    cuda_check(cudaFree(bench.noise[0]));
    cuda_check(cudaFree(bench.noise[1]));
}

// Sets the GPU's peak, copy bandwidth and arena in `bench`.
static void bench_open(const Settings *s) {
    const size_t workspace_bytes = (size_t)s->workspace;  // as in a run
    size_t free_bytes = device_available();
    const Device *gpu = gpu_present();
    bench.peak_flops = gpu->card && s->dtype != TYPE_FP32 ? 1e12 * gpu->card->tflops : 0;
    bench.cache_bytes = (size_t)gpu->cache_bytes;
    cuda_check(cudaStreamCreateWithFlags(&bench.stream, cudaStreamNonBlocking));
    char *workspace;
    cuda_check(cudaMalloc((void **)&workspace, workspace_bytes));
    gpu_matmul_open(workspace, workspace_bytes);
    bench.arena_bytes = (size_t)(0.9 * (double)(free_bytes - workspace_bytes)) / 4096 * 4096;
    cuda_check(cudaMalloc((void **)&bench.arena, bench.arena_bytes));
    size_t half = bench.arena_bytes / 2 < (1u << 30) ? bench.arena_bytes / 2 : 1u << 30;
    half = CUDA_CPU ? 1 << 20 : half;
    double ms = gpu_time_ms(bench.rounds, bench.stream, [&](int) {
        cuda_check(cudaMemcpyAsync(bench.arena, bench.arena + half, half, cudaMemcpyDeviceToDevice,
                                   bench.stream));
    });
    bench.bytes_per_ms = 2.0 * (double)half / ms;
    printf("\n%s\ncopies %.3f TB/s; peak %.1f TFLOP/s; cuBLASLt %zu\n", gpu->name,
           bench.bytes_per_ms * 1e-9, bench.peak_flops * 1e-12, cublasLtGetVersion());
}

static void bench_run(Options o, const char *model, int batch) {
    Model m;
    Settings s;
    o.model = model;
    o.batch = batch;
    const ModelKind kind = model_parse(&m, model);
    if (kind == MODEL_FILE) {
        die("-e: '%s' is neither a preset (d12 d24 d36 d48) nor a shape such as l4h4c128t256",
            model);
    }
    model_set_vocabulary(&m, kind == MODEL_PRESET ? (int)GPT2_VOCABULARY : (int)BYTE_VOCABULARY);
    settings_from_options(&s, &o, &m, 1);
    gpu_settings_check(&s);
    bench_open(&s);
    printf("%s, -b %d -t %d, %s\n", model, s.B, s.T, choice_text(dtypes, (int)o.dtype).s);
    with_type(s.dtype, [&](auto element) { bench_model<decltype(element)>(&s); });
    cuda_check(cudaStreamSynchronize(bench.stream));
    cuda_check(cudaFree(bench.arena));
    void *workspace = gemms.workspace;
    gpu_matmul_close();
    cuda_check(cudaFree(workspace));
    cuda_check(cudaStreamDestroy(bench.stream));
}

int main(int argc, char **argv) {
    Options o;
    std::vector<char *> options = {argv[0]};
    program_name = "bench";
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-') {
            bench.what.push_back(argv[i]);
            continue;
        }
        options.push_back(argv[i]);
        if (i + 1 < argc) {
            options.push_back(argv[++i]);
        }
    }
    options_parse(&o, (int)options.size(), options.data());
    if (!o.dtype) {
        o.dtype = gpu_present()->capability < 80 ? DTYPE_FP16 : DTYPE_BF16;
    }
    bench.rounds = o.steps ? (int)o.steps : 9;
    for (const char *model : {"d12", "d48"}) {
        const int batch = !o.model && model[1] == '1' ? 64 : 16;
        bench_run(o, o.model ? o.model : model, option_given(&o, "batch") ? (int)o.batch : batch);
        if (o.model) {
            break;
        }
    }
    return 0;
}
