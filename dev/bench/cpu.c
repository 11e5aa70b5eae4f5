// cpu.c: speed of the CPU program's parts, compared with oneDNN.
//
// Prints, from one run: the matmuls of a training step of GPT-2 124M at 256 and at 1024 rows and
// those of a small character model, ours and oneDNN's, in fp32 and in bf16 (repetitions
// interleaved, medians); exp, tanh and GELU; attention; the whole step, in fp32 and with bf16
// matmuls; then generation compared with a loop that only reads. Quote ratios: absolute times mean
// something only together with the machine, and neither means anything if other programs use its
// cores.
//
// Build: make bench. By hand, without oneDNN (with it: -DBENCH_DNNL=1, and -ldnnl at the end):
//   gcc -std=c11 -O3 -march=native -ffp-contract=off -fno-math-errno -fopenmp dev/bench/cpu.c
//       -o bench_cpu -lm

#define GPT2_NO_MAIN 1
#include "../../train_gpt2.c"

#ifndef BENCH_DNNL
#define BENCH_DNNL 0
#endif
#if BENCH_DNNL
#include "oneapi/dnnl/dnnl.h"
#endif

enum { MAX_REPEATS = 15, BIGGEST = 50304, CHANNELS = 768, MOST_ROWS = 1024 };

// A linear layer inp(rows,C) -> (rows,OC) and how often it occurs in a step.
typedef struct {
    const char *name;
    int C, OC, per_step;
} LayerShape;

static const LayerShape layers_124m[] = {
    {"qkv", 768, 2304, 12},    {"attproj", 768, 768, 12},       {"fc", 768, 3072, 12},
    {"fcproj", 3072, 768, 12}, {"classifier", 768, BIGGEST, 1},
};

static const LayerShape layers_characters[] = {
    {"qkv", 128, 384, 4},    {"attproj", 128, 128, 4},    {"fc", 128, 512, 4},
    {"fcproj", 512, 128, 4}, {"classifier", 128, 384, 1},
};

enum { FORWARD, DINP, DWEIGHT, MATMULS };

static const char *const matmul_names[MATMULS] = {"forward", "dinp", "dweight"};

// The arrays that all benchmarks use: activations, their gradients, weights.
static real *bench_x, *bench_y, *bench_w;

static real *bench_array(size_t n) {
    real *p = (real *)aligned_alloc(64, (n * sizeof(real) + 63) / 64 * 64);
    if (!p) {
        fprintf(stderr, "bench_cpu: no memory for %zu numbers\n", n);
        exit(1);
    }
    for (size_t i = 0; i < n; i++) {
        p[i] = (real)0.01 * (real)(int)(i % 13) - (real)0.06;
    }
    return p;
}

// One matmul of a linear layer: forward writes y, dinp writes y from x, dweight adds to w.
typedef struct {
    Operand a, b;  // rows along k of the benchmark's arrays
    real *out;
    const real *addend;
    int M, N, K;
} Matmul;

static Matmul matmul_of(int which, int rows, int C, int OC) {
    real *x = bench_x, *y = bench_y, *w = bench_w;
    const size_t c = (size_t)C, oc = (size_t)OC;
    const Matmul all[MATMULS] = {
        {operand(x, c, 1), operand(w, c, 1), y, NULL, rows, OC, C},
        {operand(x, oc, 1), operand(w, 1, c), y, NULL, rows, C, OC},
        {operand(x, 1, oc), operand(y, 1, c), w, w, OC, C, rows},
    };
    return all[which];
}

// Times our matmul with a team of threads that are awake, as in a step. Returns ms.
static double time_ours(const Matmul *p, int bf16) {
    double ms = 0;
#if BF16_DOTS
    matmul_bf16 = bf16;
#endif
    (void)bf16;
    #pragma omp parallel
    #pragma omp master
    {
        for (double began = now_ms(), start = began; ms == 0 || start < began + 0.2;) {
            start = now_ms();
            matmul(p->out, p->a, p->b, NULL, p->addend, p->M, p->N, p->K);
            tasks_wait();
            ms = now_ms() - start;
        }
    }
#if BF16_DOTS
    matmul_bf16 = 0;
#endif
    return ms;
}

#if BENCH_DNNL
static double time_sgemm(const Matmul *p) {
    const int a_plain = p->a.k_step == 1, b_plain = p->b.k_step != 1;
    const double start = now_ms();
    dnnl_sgemm(a_plain ? 'N' : 'T', b_plain ? 'N' : 'T', p->M, p->N, p->K, 1, p->a.data,
               (dnnl_dim_t)(a_plain ? p->a.row_step : p->a.k_step), p->b.data,
               (dnnl_dim_t)(b_plain ? p->b.k_step : p->b.row_step), p->addend ? 1 : 0, p->out,
               p->N);
    return now_ms() - start;
}
#else
static double time_sgemm(const Matmul *p) {
    (void)p;
    return 0;
}
#endif

// oneDNN's matmul of operands that are already bf16, with fp32 sums: a bound for any version that
// rounds on the way. Uses the interface of versions 1 and 2; with another one the times are 0.
#if BENCH_DNNL && DNNL_VERSION_MAJOR < 3
static dnnl_engine_t bench_engine;
static dnnl_stream_t bench_stream;

static dnnl_memory_desc_t dnnl_matrix(int rows, int cols, size_t row_step, size_t col_step,
                                      dnnl_data_type_t type) {
    dnnl_memory_desc_t d;
    const dnnl_dims_t dims = {rows, cols};
    const dnnl_dims_t steps = {(dnnl_dim_t)row_step, (dnnl_dim_t)col_step};
    dnnl_memory_desc_init_by_strides(&d, 2, dims, type, steps);
    return d;
}

// Creates its primitive once for all repetitions. Returns ms of one execution.
static double time_bf16(const Matmul *p, dnnl_primitive_t *made, dnnl_exec_arg_t args[3]) {
    if (!*made) {
        const dnnl_memory_desc_t d[3] = {
            dnnl_matrix(p->M, p->K, p->a.row_step, p->a.k_step, dnnl_bf16),
            dnnl_matrix(p->K, p->N, p->b.k_step, p->b.row_step, dnnl_bf16),
            dnnl_matrix(p->M, p->N, (size_t)p->N, 1, dnnl_f32)};
        const int names[3] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST};
        void *data[3] = {(void *)p->a.data, (void *)p->b.data, p->out};
        dnnl_matmul_desc_t m;
        dnnl_primitive_desc_t pd;
        if (!bench_engine) {
            dnnl_engine_create(&bench_engine, dnnl_cpu, 0);
            dnnl_stream_create(&bench_stream, bench_engine, dnnl_stream_default_flags);
        }
        if (dnnl_matmul_desc_init(&m, &d[0], &d[1], NULL, &d[2]) != dnnl_success ||
            dnnl_primitive_desc_create(&pd, &m, NULL, bench_engine, NULL) != dnnl_success ||
            dnnl_primitive_create(made, pd) != dnnl_success) {
            return 0;  // not supported on this CPU
        }
        dnnl_primitive_desc_destroy(pd);
        for (int i = 0; i < 3; i++) {
            args[i].arg = names[i];
            dnnl_memory_create(&args[i].memory, &d[i], bench_engine, data[i]);
        }
    }
    const double start = now_ms();
    dnnl_primitive_execute(*made, bench_stream, 3, args);
    dnnl_stream_wait(bench_stream);
    return now_ms() - start;
}

static void bf16_done(dnnl_primitive_t made, dnnl_exec_arg_t args[3]) {
    for (int i = 0; made && i < 3; i++) {
        dnnl_memory_destroy(args[i].memory);
    }
    if (made) {
        dnnl_primitive_destroy(made);
    }
}
#else
typedef void *dnnl_primitive_t;
typedef struct {
    int arg;
} dnnl_exec_arg_t;
static double time_bf16(const Matmul *p, dnnl_primitive_t *made, dnnl_exec_arg_t args[3]) {
    (void)p, (void)made, (void)args;
    return 0;
}
static void bf16_done(dnnl_primitive_t made, dnnl_exec_arg_t args[3]) { (void)made, (void)args; }
#endif

// The variants of a matmul that are timed in turn; one column of the table each.
enum { OURS, DNNL, OURS_BF16, DNNL_BF16, TIMES };

// Times one matmul; medians in ms, 0 for what is not available.
static void time_matmul(double ms[TIMES], int which, int rows, int C, int OC) {
    double t[TIMES][MAX_REPEATS], flops = 2.0 * rows * C * OC;
    const int repeats = flops > 5e10 ? 3 : flops > 5e9 ? 7 : MAX_REPEATS, bf16 = !bf16_missing();
    const Matmul p = matmul_of(which, rows, C, OC);
    dnnl_primitive_t made = NULL;
    dnnl_exec_arg_t args[3];
    // Repeated sums would grow to infinities and denormals, which slow down any matmul. The bits of
    // 0.0499878 are the same bf16 number twice, so oneDNN's bf16 operands are ordinary too.
    size_t used = (size_t)rows * (size_t)(C > OC ? C : OC);
    const uint32_t twice = 0x3d4c3d4cu;
    for (size_t i = 0; i < used; i++) {
        memcpy(&bench_x[i], &twice, sizeof twice);
        memcpy(&bench_y[i], &twice, sizeof twice);
    }
    for (int r = 0; r < repeats; r++) {
        t[OURS][r] = time_ours(&p, 0);
        t[DNNL][r] = time_sgemm(&p);
        t[OURS_BF16][r] = bf16 ? time_ours(&p, 1) : 0;
        t[DNNL_BF16][r] = bf16 ? time_bf16(&p, &made, args) : 0;
    }
    for (int k = 0; k < TIMES; k++) {
        ms[k] = median(t[k], repeats);
    }
    bf16_done(made, args);
}

// Returns the quotient, or 0 if there is nothing to compare with.
static double quotient(double a, double b) { return b > 0 ? a / b : 0; }

// Prints the table of one model's matmuls at one row count, the sum over a step, and the worst
// ratio to oneDNN. `sum`: ms of the step.
static void bench_matmuls(double sum[TIMES], const char *title, const LayerShape *layers, int n,
                          int rows) {
    double flops = 0, worst = 0;
    memset(sum, 0, TIMES * sizeof *sum);
    printf("\n%s, %d rows: ms\n", title, rows);
    printf("%-11s %-8s %9s %9s %6s %8s   %9s %9s %6s\n", "layer", "matmul", "ours", "oneDNN",
           "ratio", "GFLOP/s", "ours bf16", "oneDNN", "ratio");
    for (int l = 0; l < n; l++) {
        for (int p = 0; p < MATMULS; p++) {
            double ms[TIMES], work = 2.0 * rows * layers[l].C * layers[l].OC;
            time_matmul(ms, p, rows, layers[l].C, layers[l].OC);
            printf("%-11s %-8s %9.3f %9.3f %6.2f %8.0f   %9.3f %9.3f %6.2f\n", layers[l].name,
                   matmul_names[p], ms[OURS], ms[DNNL], quotient(ms[OURS], ms[DNNL]),
                   1e-6 * work / ms[OURS], ms[OURS_BF16], ms[DNNL_BF16],
                   quotient(ms[OURS_BF16], ms[DNNL_BF16]));
            fflush(stdout);
            for (int k = 0; k < TIMES; k++) {
                sum[k] += ms[k] * layers[l].per_step;
            }
            flops += work * layers[l].per_step;
            worst = fmax(worst, quotient(ms[OURS], ms[DNNL]));
        }
    }
    printf("%-20s %9.1f %9.1f %6.2f %8.0f   %9.1f %9.1f %6.2f   worst fp32 %.2f\n", "step",
           sum[OURS], sum[DNNL], quotient(sum[OURS], sum[DNNL]), 1e-6 * flops / sum[OURS],
           sum[OURS_BF16], sum[DNNL_BF16], quotient(sum[OURS_BF16], sum[DNNL_BF16]), worst);
}

// Times exp and GELU on arrays that stay in the cache, with all threads.
static void bench_maths(void) {
    enum { COUNT = 1 << 16, REPEATS = 9, PASSES = 64 };
    double t[3][REPEATS];
    for (int r = 0; r < REPEATS; r++) {
        for (int f = 0; f < 3; f++) {
            double start = now_ms();
            for (int pass = 0; pass < PASSES; pass++) {
                if (f == 1) {
                    gelu_forward(bench_y, bench_x, COUNT);
                } else if (f == 2) {
                    gelu_backward(bench_y, bench_w, bench_x, COUNT);
                } else {
                    #pragma omp taskloop num_tasks(pieces())
                    for (int i = 0; i < COUNT; i += BLOCK) {
                        memcpy(bench_y + i, bench_x + i, BLOCK * sizeof(real));
                        exponentials(bench_y + i, 1, 0, BLOCK);
                    }
                }
            }
            t[f][r] = now_ms() - start;
        }
    }
    const char *names[] = {"exp", "gelu forward", "gelu backward"};
    printf("\nmaths, numbers in the cache\n");
    for (int f = 0; f < 3; f++) {
        printf("%-20s %9.2f ns/number\n", names[f], 1e6 * median(t[f], REPEATS) / COUNT / PASSES);
    }
}

static void bench_attention(int B, int T, int NH, int HS) {
    enum { REPEATS = 9 };
    int C = NH * HS;
    size_t out_size = (size_t)B * T * C;
    real *qkv = bench_x, *dqkv = bench_y;
    real *out = bench_w, *dout = out + out_size, *lse = dout + out_size;
    double forward[REPEATS], backward[REPEATS];
    for (size_t i = 0; i < 3 * out_size; i++) {
        qkv[i] = (real)0.01 * (real)(int)(i % 11) - (real)0.05;
    }
    for (int r = 0; r < REPEATS; r++) {
        double start = now_ms();
        attention_forward(out, lse, qkv, B, T, C, NH);
        double middle = now_ms();
        attention_backward(dqkv, dout, qkv, out, lse, B, T, C, NH);
        forward[r] = middle - start;
        backward[r] = now_ms() - middle;
    }
    // Half of the T x T scores count, because the causal mask skips the rest.
    double f = median(forward, REPEATS), b = median(backward, REPEATS);
    double flops = 2.0 * B * NH * HS * T * T;
    printf("attention B%d T%d NH%d HS%d: forward %.3f ms (%.0f GFLOP/s), backward %.3f ms (%.0f)\n",
           B, T, NH, HS, f, 1e-6 * flops / f, b, 2.5e-6 * flops / b);
}

// Parses the model `name` and derives the settings of a run from it and `o`.
static void bench_settings(Settings *s, Model *m, const Options *o, const char *name) {
    const int bpe = model_parse(m, name) == MODEL_PRESET;
    model_set_vocabulary(m, bpe ? (int)GPT2_VOCABULARY : (int)BYTE_VOCABULARY);
    settings_from_options(s, o, m, 0);
}

// Opens an engine for these settings with its own plan and initial weights.
static void bench_open(Engine *e, Plan *p, const Settings *s) {
    plan_build(p, s);
    cpu_open(e, p);
    engine_initialise(e, &s->model, 1);
}

// Times training steps of a model at B x T with its own plan. Prints tokens/s, the update's time,
// and the ratio to a lower bound, which is dnnl_ms (all matmuls in oneDNN) plus a single pass of
// AdamW over the states. Returns the ms of a step.
static double bench_step(const char *name, int B, int T, int bf16, double dnnl_ms) {
    enum { WARM = 1, STEPS = 5 };
    double step[STEPS], update[STEPS], adamw[STEPS];
    Options o;
    Model m;
    Settings s;
    Plan p;
    Engine e;
    options_default(&o);
    o.batch = B;
    o.seq_len = T;
    o.matmul = bf16 ? MATMUL_BF16 : MATMUL_FP32;
    bench_settings(&s, &m, &o, name);
    bench_open(&e, &p, &s);
    Token *tokens = (Token *)alloc_zero((size_t)B * (size_t)T, sizeof(Token));
    for (int i = 0; i < B * T; i++) {
        tokens[i] = (Token)((unsigned)i * 7919u % (unsigned)m.V);
    }
    for (int k = -WARM; k < STEPS; k++) {
        double start = now_ms();
        e.micro_step(&e, tokens, tokens, 0, 1);
        double middle = now_ms();
        e.update(&e, &o, 1e-4, HUGE_VAL, k + WARM);
        double end = now_ms();
        AdamW a = adamw_at(&o, 1e-4, k + WARM, 1);
        #pragma omp parallel
        adamw_update(buffer(&p, BUF_WEIGHTS), buffer(&p, BUF_M), buffer(&p, BUF_V),
                     buffer(&p, BUF_GRADS), &a, 0, tensor_offset(&m, TENSORS, 0));
        if (k >= 0) {
            step[k] = end - start;
            update[k] = end - middle;
            adamw[k] = now_ms() - end;
        }
    }
    double ms = median(step, STEPS), floor_ms = dnnl_ms + median(adamw, STEPS);
    printf("%s B %d T %d %s: step %.1f ms, %.0f tokens/s; update %.1f ms, AdamW alone %.1f ms",
           name, B, T, bf16 ? "bf16" : "fp32", ms, 1e3 * B * T / ms, median(update, STEPS),
           median(adamw, STEPS));
    if (dnnl_ms > 0) {
        printf("; floor %.1f ms: %.0f %% of it", floor_ms, 100 * floor_ms / ms);
    }
    printf("\n");
    fflush(stdout);
    free(tokens);
    e.close(&e);
    plan_free(&p);
    return ms;
}

// Compares the forecast step times of ten runs with the measured medians, for various model widths,
// batch sizes, sequence lengths and recompute levels. Prints the worst error last.
static void bench_forecast(void) {
    static const char *const runs[][4] = {  // -e, -b, -t, -r
        {"l4h4c128t64", "4", "64", "none"},    {"l4h4c128t64", "12", "64", "block"},
        {"l6h6c384t256", "4", "256", "none"},  {"l6h6c384t256", "2", "256", "mlp"},
        {"l8h8c512t128", "8", "128", "norm"},  {"l12h4c256t512", "1", "512", "none"},
        {"l2h16c1024t64", "2", "64", "qkv"},   {"d12", "4", "64", "none"},
        {"d12", "2", "128", "block"},          {"l3h5c320t1024", "1", "1024", "gelu"}};
    enum { RUNS = sizeof runs / sizeof runs[0] };
    static const Program program = {
        .name = "train_gpt2", .default_model = "", .open = cpu_open,
        .available = host_memory_available, .built = "", .alone = ""};
    double worst = 0;
    printf("%-14s %4s %5s %-6s %12s %12s\n", "model", "B", "T", "-r", "forecast ms", "measured ms");
    for (int i = 0; i < RUNS; i++) {
        double update;
        Options o;
        Model m;
        Settings s;
        Speed v;
        options_default(&o);
        o.batch = atoi(runs[i][1]);
        o.seq_len = atoi(runs[i][2]);
        o.recompute = runs[i][3];
        bench_settings(&s, &m, &o, runs[i][0]);
        speed_measure(&v, &program, &s, SIZE_MAX, 4e11);
        const double forecast = 1e3 * forecast_step(&v, &s, 1);
        const double measured = 1e3 * (engine_seconds(&program, &s, &update) + update);
        printf("%-14s %4d %5d %-6s %12.2f %12.2f  %+.1f %%\n", runs[i][0], s.B, s.T, runs[i][3],
               forecast, measured, 100 * (forecast / measured - 1));
        fflush(stdout);
        worst = fmax(worst, fabs(forecast / measured - 1));
    }
    printf("worst forecast: %.1f %% off\n", 100 * worst);
}

// Reads n numbers with all threads. Returns their sum, so that the compiler keeps the reads.
static double bench_read(const real *data, int64_t n) {
    double total = 0;
    #pragma omp parallel for schedule(static) reduction(+ : total)
    for (int64_t block = 0; block < n / (64 * VL); block++) {
        const Vector zero = {0};
        Vector sums[4] = {zero, zero, zero, zero};
        for (int i = 0; i < 64; i++) {
            Vector v;
            __builtin_prefetch(data + (block * 64 + i + 128) * VL);
            memcpy(&v, data + (block * 64 + i) * VL, sizeof v);
            sums[i % 4] += v;
        }
        total += (double)(sums[0] + sums[1] + sums[2] + sums[3])[0];
    }
    return total;
}

// Generates one token at a time after `position` others in the KV cache, alternating with a loop
// that only reads the same weights. A token needs all weights except wpe's rows, and the cache; the
// memory bound is the time to read as many bytes at the loop's rate.
static void bench_generate(const char *name, int position) {
    enum { TOKENS = 21 };
    double token[TOKENS], read[TOKENS], kept = 0;
    Options o;
    Model m;
    Settings s;
    Plan p;
    Engine e;
    options_default(&o);
    bench_settings(&s, &m, &o, name);
    settings_generate(&s);
    bench_open(&e, &p, &s);
    const int64_t numbers = tensor_offset(&m, TENSORS, 0);
    const int64_t needed = numbers - tensor_size(&m, WPE) + 2LL * m.L * m.C * position;
    real *logits = (real *)alloc_zero((size_t)m.V, sizeof(real));
    Token *tokens = (Token *)alloc_zero((size_t)m.maxT, sizeof(Token));
    const double start = now_ms();
    e.extend(&e, logits, tokens, 0, position);
    const double prompt = now_ms() - start;
    for (int k = 0; k < TOKENS; k++) {
        const double began = now_ms();
        e.extend(&e, logits, tokens, position, 1);
        const double middle = now_ms();
        kept += bench_read(weight(&p, WTE, 0), numbers);
        token[k] = middle - began;
        read[k] = now_ms() - middle;
    }
    const double ms = median(token, TOKENS), read_ms = median(read, TOKENS);
    printf("%s, token %d: %.2f ms, %.1f tokens/s; memory read at %.1f GB/s allows %.2f ms: %.2f of "
           "that; prompt %.0f tokens/s%s\n", name, position + 1, ms, 1e3 / ms,
           1e-6 * (double)numbers * sizeof(real) / read_ms,
           read_ms * (double)needed / (double)numbers,
           read_ms * (double)needed / (double)numbers / ms, 1e3 * position / prompt,
           isnan(kept) ? " (NaN)" : "");
    fflush(stdout);
    free(logits);
    free(tokens);
    e.close(&e);
    plan_free(&p);
}

int main(int argc, char **argv) {
    threads_start(argv);
    if (argc > 1 && strcmp(argv[1], "forecast") == 0) {
        bench_forecast();
        return 0;
    }
    if (argc > 1 && strcmp(argv[1], "generate") == 0) {
        bench_generate("d12", 16);
        bench_generate("d12", 1000);
        return 0;
    }
    enum { COUNT_124M = sizeof layers_124m / sizeof layers_124m[0] };
    enum { COUNT_CHARACTERS = sizeof layers_characters / sizeof layers_characters[0] };
    matmul_workspace = bench_array(matmul_workspace_bytes(thread_count()) / sizeof(real));
    bench_x = bench_array((size_t)MOST_ROWS * BIGGEST);
    bench_y = bench_array((size_t)MOST_ROWS * BIGGEST);
    bench_w = bench_array((size_t)CHANNELS * BIGGEST);
    printf("%d threads, peak of our multiply-add loop %.0f GFLOP/s\n", thread_count(),
           1e-9 * matmul_peak_flops());
    if (!BENCH_DNNL) {
        printf("built without oneDNN: its columns and the ratios are 0\n");
    }
    double sums[3][TIMES];
    bench_matmuls(sums[0], "GPT-2 124M", layers_124m, COUNT_124M, 256);
    bench_matmuls(sums[1], "GPT-2 124M", layers_124m, COUNT_124M, MOST_ROWS);
    bench_matmuls(sums[2], "characters L4 C128", layers_characters, COUNT_CHARACTERS, 768);
    #pragma omp parallel
    #pragma omp master
    {
        bench_maths();
        printf("\n");
        bench_attention(4, 64, 12, 64);
        bench_attention(1, 1024, 12, 64);
        bench_attention(12, 64, 4, 32);
        printf("\n");
    }
    static const struct {
        const char *model;
        int B, T;
    } steps[3] = {{"d12", 4, 64}, {"d12", 1, 1024}, {"l4h4c128t64", 12, 64}};
    for (int i = 0; i < 3; i++) {
        const double fp32 = bench_step(steps[i].model, steps[i].B, steps[i].T, 0, sums[i][DNNL]);
        if (!bf16_missing()) {
            const double bf16 =
                bench_step(steps[i].model, steps[i].B, steps[i].T, 1, sums[i][DNNL_BF16]);
            printf("%s B %d T %d: bf16 matmuls %.2f x as fast as fp32\n", steps[i].model,
                   steps[i].B, steps[i].T, fp32 / bf16);
        }
    }
    printf("\n");
    bench_generate("d12", 16);
    bench_generate("d12", 1000);
    printf("\n");
    bench_forecast();
    return 0;
}
