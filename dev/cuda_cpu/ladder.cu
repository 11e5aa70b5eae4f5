// ladder.cu -- LayerNorm and causal attention in five versions each, from the definition to the
// kernels of train_gpt2.cu.
//
// Each version changes one thing. `make kernels` runs all of them on the CPU, compares them with a
// reference in double, and prints what they ask of memory:
//   requests   load and store instructions, counted once per warp
//   asked      KiB that threads load and store
//   moved      KiB of the 32-byte sectors that the requests touch, without caches
//   barriers   __syncthreads, counted once per block
//   warp ops   shuffles, tensor-core instructions and the like, counted once per warp
//   H100 ms    measured for the program's kernels: GPT-2 124M, batch 64 (dev/notes/gpu.md);
//              the other versions have not been measured
// These are counts (dev/cuda_cpu/emu_count.h), not times. Built with nvcc, for example nvcc
// -std=c++17 -arch=sm_90a ladder.cu -lcublasLt, the program only checks the results. Storage is
// bf16, arithmetic fp32. Functions without a definition here are train_gpt2.cu's.

#define GPT2_NO_MAIN 1
#include "../../train_gpt2.cu"
#if CUDA_CPU
#include <emu_count.h>
#endif
#include <vector>

typedef __nv_bfloat16 E;
typedef std::vector<double> Doubles;
enum { HS = 64, STRIDE = 3 * HS, KEYS = 64 };  // channels of a head, of q, k and v; keys of a tile

// --- LayerNorm: out = (inp - mean) / sqrt(variance + 1e-5) * weight + bias for each row. ---------

struct Norm {
    E *out, *inp, *weight, *bias;  // (N,C), (N,C), (C), (C)
    int N, C;
};

// A thread has `count` columns of a row: first, first + step, ... x(i) is the i-th value; sum adds
// over the threads that share the row.
template <class Sum, class X>
__device__ inline void norm_row(Norm a, int row, int first, int step, int count, Sum sum, X x) {
    float values = 0.0f, squares = 0.0f;
    UNROLL
    for (int i = 0; i < count; i++) {
        values += x(i);
    }
    const float mean = sum(values) / a.C;
    UNROLL
    for (int i = 0; i < count; i++) {
        squares = fmaf(x(i) - mean, x(i) - mean, squares);
    }
    const float rstd = 1.0f / sqrtf(sum(squares) / a.C + LAYERNORM_EPS);
    UNROLL
    for (int i = 0, c = first; i < count; i++, c += step) {
        const float y = fmaf((x(i) - mean) * rstd, to_float(a.weight[c]), to_float(a.bias[c]));
        a.out[row * a.C + c] = from_float<E>(y);
    }
}

// Versions 1 to 3 read the row three times: for the mean, the variance and the result.
template <class Sum>
__device__ inline void norm_reread(Norm a, int row, int first, int step, Sum sum) {
    const E *inp = a.inp + row * a.C + first;
    norm_row(a, row, first, step, a.C / step, sum, [&](int i) { return to_float(inp[i * step]); });
}

// 1. One thread per row, straight from the definition. Neighboring threads read addresses a row
// apart: a request for 32 values of 2 bytes moves 32 sectors, 16 times the bytes that it needs.
__global__ void norm_1(Norm a) {
    norm_reread(a, blockIdx.x * blockDim.x + threadIdx.x, 0, 1, [](float x) { return x; });
}

// 2. One block of 256 threads per row. Neighboring threads read neighboring values, which share
// sectors. The price is the sum over a block, in rounds of half as many threads: ten barriers.
__global__ void norm_2(Norm a) {
    SHARED(float, part, [256]);
    norm_reread(a, blockIdx.x, threadIdx.x, 256, [&](float x) {
        part[threadIdx.x] = x;
        for (unsigned half = 128; half > 0; half /= 2) {
            __syncthreads();  // the previous round is written
            if (threadIdx.x < half) {
                part[threadIdx.x] += part[threadIdx.x + half];
            }
        }
        __syncthreads();
        x = part[0];
        __syncthreads();  // all threads have read part[0], which the next sum overwrites
        return x;
    });
}

// 3. One warp per row, four rows per block. A warp adds by five shuffles between registers. No warp
// waits for another, so there is no barrier.
__global__ void norm_3(Norm a) {
    norm_reread(a, blockIdx.x * 4 + threadIdx.y, threadIdx.x, WARP, warp_sum);
}

// 4. The row stays in registers, C / 32 values per lane. It is read once instead of three times.
// C is a compile-time constant, because registers cannot be indexed at run time.
template <int C> __global__ void norm_4(Norm a) {
    const int row = blockIdx.x * 4 + threadIdx.y;
    float x[C / WARP];
    UNROLL
    for (int i = 0; i < C / WARP; i++) {
        x[i] = to_float(a.inp[row * C + i * WARP + threadIdx.x]);
    }
    norm_row(a, row, threadIdx.x, WARP, C / WARP, warp_sum, [&](int i) { return x[i]; });
}

// 5. The program's layernorm_forward_kernel moves the same bytes with an eighth of the requests: a
// lane loads and stores 16 bytes at a time. It also stores mean and rstd for the backward pass.

// --- Causal attention of one head: out[t] = sum over j <= t of softmax_j(q[t] . k[j] / 8) v[j]. --

struct Attention {
    E *out, *qkv;         // (T,HS), (T,3,HS)
    float *scores, *lse;  // (T,T), (T)
    int T;
};

// 1. One thread per query, straight from the definition. The scores go through memory. Their T x T
// numbers do not fit in a cache, and neighboring threads access them a row apart.
__global__ void attention_1(Attention a) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x;
    const E *q = a.qkv + t * STRIDE, *k = a.qkv + HS, *v = k + HS;
    float *s = a.scores + t * a.T, top = -INFINITY, sum = 0.0f, o[HS] = {};
    for (int j = 0; j <= t; j++) {
        float dot = 0.0f;
        for (int d = 0; d < HS; d++) {
            dot = fmaf(to_float(q[d]), to_float(k[j * STRIDE + d]), dot);
        }
        s[j] = dot / 8;
        top = fmaxf(top, dot / 8);
    }
    for (int j = 0; j <= t; j++) {
        const float p = expf(s[j] - top);
        sum += p;
        for (int d = 0; d < HS; d++) {
            o[d] = fmaf(p, to_float(v[j * STRIDE + d]), o[d]);
        }
    }
    for (int d = 0; d < HS; d++) {
        a.out[t * HS + d] = from_float<E>(o[d] / sum);
    }
}

// 2. The online softmax needs no second pass: a larger maximum rescales the sums. So no score is
// stored, and a query is read once.
// 3. With TILES, a block's 64 queries share tiles of 64 keys and values in shared memory. A key is
// read once per block, 16 bytes at a time, instead of once per warp, 2 bytes at a time. A tile
// costs two barriers. Only Q and out are still accessed a row apart.
template <bool TILES> __global__ void attention_online(Attention a) {
    SHARED(Pack<E>, tile, [2][KEYS][HS / 8]);
    const int t = blockIdx.x * KEYS + threadIdx.x;
    float q[HS], o[HS] = {}, top = -INFINITY, sum = 0.0f;
    for (int d = 0; d < HS; d++) {
        q[d] = to_float(a.qkv[t * STRIDE + d]);
    }
    for (int j0 = 0; j0 <= t; j0 += KEYS) {
        for (int i = threadIdx.x; TILES && i < 2 * KEYS * HS / 8; i += KEYS) {
            const int row = i / 8 % KEYS, which = i / (KEYS * 8);
            const E *from = a.qkv + (j0 + row) * STRIDE + (1 + which) * HS + i % 8 * 8;
            tile[which][row][i % 8] = pack_load(from);
        }
        TILES ? __syncthreads() : (void)0;  // the tile is written
        for (int j = 0; j < KEYS && j0 + j <= t; j++) {
            const E *k = TILES ? tile[0][j][0].x : a.qkv + (j0 + j) * STRIDE + HS;
            const E *v = TILES ? tile[1][j][0].x : k + HS;
            float dot = 0.0f;
            for (int d = 0; d < HS; d++) {
                dot = fmaf(q[d], to_float(k[d]), dot);
            }
            const float larger = fmaxf(top, dot / 8), rescale = expf(top - larger);
            const float p = expf(dot / 8 - larger);
            top = larger;
            sum = fmaf(sum, rescale, p);
            for (int d = 0; d < HS; d++) {
                o[d] = fmaf(o[d], rescale, p * to_float(v[d]));
            }
        }
        TILES ? __syncthreads() : (void)0;  // the tile is read
    }
    for (int d = 0; d < HS; d++) {
        a.out[t * HS + d] = from_float<E>(o[d] / sum);
    }
}

// 4. Tensor cores multiply tiles: a warp's 16 queries by 64 keys, then 16 x 64 weights by values.
// Scores and outputs are fragments in registers. Q and out move 16 bytes at a time as well, and
// copies to shared memory (cp.async) do not pass through registers. The block waits for each copy.
__global__ void __launch_bounds__(4 * WARP) attention_4(Attention a) {
    DYN_SHARED(E, tile_q);
    E *tile_k = tile_q + KEYS * HS, *tile_v = tile_k + KEYS * HS;
    const int row0 = blockIdx.x * KEYS, warp_row = threadIdx.x / WARP * 16;
    float o[1][HS / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
    tile_load<HS, KEYS, 4>(tile_q, a.qkv, STRIDE, row0, a.T, HS);
    for (int j0 = 0; j0 <= row0; j0 += KEYS) {
        tile_load<HS, KEYS, 4>(tile_k, a.qkv + HS, STRIDE, j0, a.T, HS);
        tile_load<HS, KEYS, 4>(tile_v, a.qkv + 2 * HS, STRIDE, j0, a.T, HS);
        copy_commit();
        copy_wait<0>();
        __syncthreads();  // all threads' copies are complete
        float s[1][KEYS / 8][4];
        warp_mul_abt<HS>(s, tile_q, warp_row, tile_k);
        if (j0 == row0) {
            mask_future(s, row0 + warp_row, j0, false);
        }
        online_softmax(s, o, m, l, LOG2_E / 8);
        warp_mul_add<HS>(o, s, tile_v);
        __syncthreads();  // all warps have read the tile
    }
    softmax_end(o, a.lse, m, l, row0 + warp_row, a.T);
    warp_store_rows<HS, false>(a.out, HS, row0 + warp_row, a.T, HS, tile_q, warp_row, 1.0f, o);
}

// 5. The program's attention_forward_kernel gives a block 128 queries, so a tile is read half as
// often. The next tile is copied into a second buffer while this one is multiplied. That leaves one
// barrier per tile and hides the copy. On Hopper, wgmma reads its operands from shared memory.

// --- References in double, arrays and the table. -------------------------------------------------

static Doubles norm_reference(const Norm &a) {
    Doubles out(a.N * a.C);
    for (int row = 0; row < a.N; row++) {
        double *x = &out[row * a.C], mean = 0, square = 0;
        for (int c = 0; c < a.C; c++) {
            x[c] = to_float(a.inp[row * a.C + c]);
            mean += x[c] / a.C;
            square += x[c] * x[c] / a.C;
        }
        for (int c = 0; c < a.C; c++) {
            x[c] = (x[c] - mean) / sqrt(square - mean * mean + 1e-5);
            x[c] = x[c] * to_float(a.weight[c]) + to_float(a.bias[c]);
        }
    }
    return out;
}

static Doubles attention_reference(const Attention &a) {
    Doubles out(a.T * HS);
    for (int t = 0; t < a.T; t++) {
        double sum = 0, dot;
        for (int j = 0; j <= t; j++, sum += exp(dot / 8)) {
            const E *q = a.qkv + t * STRIDE, *k = a.qkv + j * STRIDE + HS, *v = k + HS;
            dot = 0;
            for (int d = 0; d < HS; d++) {
                dot += (double)to_float(q[d]) * to_float(k[d]);
            }
            for (int d = 0; d < HS; d++) {
                out[t * HS + d] += exp(dot / 8) * to_float(v[d]);
            }
        }
        for (int d = 0; d < HS; d++) {
            out[t * HS + d] /= sum;
        }
    }
    return out;
}

// Returns n random numbers between low and low + 2 in pinned memory, for the host and kernels.
template <class T = E> static T *array(size_t n, double low = 0, uint64_t seed = 0) {
    T *p;
    cuda_check(cudaMallocHost((void **)&p, n * sizeof(T)));
    for (size_t i = 0; i < n; i++) {
        p[i] = from_float<T>((float)(low + 2 * rng_uniform(seed, 0, 0, i)));
    }
    return p;
}

static int wrong = 0;

// Prints a row of the table: a version that has just written `out`, with the counts since the last
// call. asked, moved (in bytes) and barriers: the right counts, derived by hand.
static void report(const char *name, const char *h100, E *out, const Doubles &want,
                   [[maybe_unused]] size_t asked, [[maybe_unused]] size_t moved,
                   [[maybe_unused]] size_t barriers) {
    double error = 0, norm = 0;
    cuda_check(cudaDeviceSynchronize());
    for (size_t i = 0; i < want.size(); i++) {
        error += (to_float(out[i]) - want[i]) * (to_float(out[i]) - want[i]);
        norm += want[i] * want[i];
        out[i] = from_float<E>(NAN);  // for the next version
    }
    error = sqrt(error / norm);
    bool right = error < 4e-3;  // about twice the error of rounding the output to bf16
    printf("%-36s", name);
#if CUDA_CPU
    const auto n = emu::counts;
    printf("%9lu %8.1f %8.1f %8lu %8lu", n.requests, n.asked / 1024.0, n.sectors / 32.0,
           n.barriers, n.warp_ops);
    right = right && n.asked == asked && n.barriers == barriers;
#ifndef __clang__  // which splits stores of 16 bytes
    right = right && 32 * n.sectors == moved;
#endif
    emu::counts = {};
#endif
    printf("  %.1e  %s%s\n", error, h100, right ? "" : "  WRONG");
    wrong += !right;
}
#define VERSION(name, h100, asked, moved, barriers, ...)                                           \
    (__VA_ARGS__, report(name, h100, a.out, want, asked, moved, barriers))

int main() {
    printf("%-36s%s    error  H100 ms\n", "LayerNorm of 64 rows, 768 channels",
           CUDA_CPU ? " requests    asked    moved barriers warp ops" : "");
    {
        constexpr int N = 64, C = 768, ROW = 2 * C, ALL = N * ROW;
        const Norm a = {array(N * C), array(N * C, 0, 1), array(C, 0, 2), array(C, -1, 3), N, C};
        const Doubles want = norm_reference(a);
        const dim3 warps(WARP, 4);
        float *mean = array<float>(N), *rstd = array<float>(N);
        VERSION("1 thread per row", "-", 6 * ALL, 64 * ALL + 2 * 2 * C * 32, 0,
                launch(norm_1, N / 32, 32, 0, 0, a));
        VERSION("2 block per row", "-", 6 * ALL, 6 * ALL, 20 * N, launch(norm_2, N, 256, 0, 0, a));
        VERSION("3 warp per row", "-", 6 * ALL, 6 * ALL, 0, launch(norm_3, N / 4, warps, 0, 0, a));
        VERSION("4 row in registers", "-", 4 * ALL, 4 * ALL, 0,
                launch(norm_4<C>, N / 4, warps, 0, 0, a));
        VERSION("5 program: 16-byte accesses", "0.0722", 4 * ALL + 8 * N, 4 * ALL + 64 * N, 0,
                gpu_layernorm_forward(a.out, mean, rstd, a.inp, a.weight, a.bias, N, C, 0));
    }
    // PAIRS: of a query and a key; STEPS: of a warp's queries and a key; APART: bytes that move if
    // every query accesses HS elements a row apart.
    constexpr int T = 128, ROW = 2 * HS, PAIRS = T * (T + 1) / 2, STEPS = 32 + 64 + 96 + 128;
    constexpr int APART = 32 * T * HS, TILE = 2 * KEYS * ROW, IO = 2 * T * ROW, LSE = 4 * T;
    const Attention a = {array(T * HS), array(T * STRIDE, -1, 4), array<float>(T * T),
                         array<float>(T), T};
    const Doubles want = attention_reference(a);
    puts("Attention, 128 tokens, one head");
    VERSION("1 scores in memory", "-", PAIRS * (3 * ROW + 8) + IO / 2,
            32 * (PAIRS * (HS + 2) + STEPS * 2 * HS) + APART, 0,
            launch(attention_1, 2, 64, 0, 0, a));
    VERSION("2 online softmax", "-", PAIRS * 2 * ROW + IO, 32 * STEPS * 2 * HS + 2 * APART, 0,
            launch(attention_online<false>, 2, 64, 0, 0, a));
    VERSION("3 tiles in shared memory", "-", 3 * TILE + IO, 3 * TILE + 2 * APART, 6,
            launch(attention_online<true>, 2, 64, 0, 0, a));
    VERSION("4 tensor cores", "-", 3 * TILE + IO + LSE, 3 * TILE + IO + LSE, 6,
            launch(attention_4, 2, 128, 3 * KEYS * ROW, 0, a));
    VERSION("5 program: copies run ahead", "0.4088", 2 * TILE + IO + LSE, 2 * TILE + IO + LSE, 2,
            gpu_attention_forward(a.out, a.lse, a.qkv, 1, T, HS, 1, 0));
#if CUDA_CPU
    attention_fast[ATTENTION_FORWARD] = true;  // the emulated device is a Hopper GPU
    VERSION("  the same with wgmma", "0.3228", 2 * TILE + IO + LSE, 2 * TILE + IO + LSE, 3,
            gpu_attention_forward(a.out, a.lse, a.qkv, 1, T, HS, 1, 0));
#endif
    return wrong ? 1 : 0;
}
