// test_cuda_cpu.cpp: tests that the emulator computes correctly and detects what it promises.
//
// Tests for the harness of dev/test/harness.h, which describes their arguments and output. A death
// test runs a mistake in a child process and expects exit code 86 and a text. The tests do not show
// how real GPUs behave.
//
//     g++ -std=c++17 -O1 -Idev/cuda_cpu -isystem <CUDA>/include test_cuda_cpu.cpp
//
// Contents
//   1  Device arrays
//   2  Threads, barriers, warps
//   3  Shared memory and seeds
//   4  Memory, streams, events, devices
//   5  Tensor cores, cp.async and wgmma
//   6  cublasLt
//   7  NCCL
//   8  Injected bugs
//
// Copyright (c) 2026 the train_gpt2 authors. SPDX-License-Identifier: MIT
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cublasLt.h>
#include <nccl.h>
#include <algorithm>
#include "../test/harness.h"

typedef __nv_bfloat16 bf16;

// -------------------------------------------------------------------------------------------------
// 1. Device arrays
// They live until the test ends, which runs in a process of its own. A test continues after a
// failed expectation.

#define OK(call) expect((call) == 0)  // cudaSuccess, CUBLAS_STATUS_SUCCESS and ncclSuccess are 0

struct Setting {                // changes a setting until the end of a scope
    long &field, old;
    Setting(long &f, long value) : field(f), old(f) { f = value; }
    ~Setting() { field = old; }
};

// Allocates device arrays and copies them to and from the host.
template <class T> static T *device(size_t n) {
    static auto &all = *new std::vector<void *>;  // reachable, so no leak
    all.push_back(nullptr);
    OK(cudaMalloc(&all.back(), n * sizeof(T)));
    return (T *)all.back();
}
template <class T> static T *device(const std::vector<T> &v) {
    T *p = device<T>(v.size());
    OK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}
template <class T> static std::vector<T> host(const T *p, size_t n) {
    std::vector<T> v(n);
    OK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
}
static float uniform() {  // in [-1, 1), always the same sequence
    static uint64_t s = 1;
    return (float)(int32_t)(emu::random_bits(s) >> 32) / 2147483648.0f;
}

// Returns a flag that is true until a kernel clears it.
static int *true_flag() { return device(std::vector<int>(1, 1)); }

// -------------------------------------------------------------------------------------------------
// 2. Threads, barriers, warps
// Each kernel runs with several seeds.

// Every thread of a 3-D grid of 3-D blocks runs once, with its own indices.
static __global__ void k_index(int *out) {
    int block = (int)((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x);
    int thread = (int)((threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x);
    out[block * (int)(blockDim.x * blockDim.y * blockDim.z) + thread] += block * 1000 + thread;
}
TEST(index) {
    for (long seed = 0; seed < 3; seed++) {
        Setting s(emu::set.seed, seed);
        int *out = device<int>(24 * 105);
        OK(cudaMemset(out, 0, 24 * 105 * 4));
        launch(k_index, dim3(2, 3, 4), dim3(5, 7, 3), 0, 0, out);
        std::vector<int> v = host(out, 24 * 105);
        for (int i = 0; i < 24 * 105; i++) {
            expect(v[i] == i / 105 * 1000 + i % 105);
        }
    }
}

template <int A, int B> static __global__ void k_convert(long *out, float x, unsigned char c) {
    out[0] = A + B;
    out[1] = (long)(x * 2);
    out[2] = c;
}
TEST(launch) {  // template arguments with a comma, arguments that convert
    long *out = device<long>(3);
    launch(k_convert<30, 12>, 1, 1, 0, nullptr, out, 7, 65);
    std::vector<long> v = host(out, 3);
    expect(v[0] == 42 && v[1] == 14 && v[2] == 65);
    expect(emu::name_length("k<a, b>, 1, 2") == 7 && emu::name_length("k, 1") == 1);
}

// Sum over a block of 256 threads: warp shuffles, then one partial sum per warp.
static __global__ void k_reduce(const float *in, float *out, int n) {
    SHARED(float, part, [8]);
    float sum = 0;
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) {
        sum += in[i];
    }
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
    }
    if (threadIdx.x % 32 == 0) {
        part[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0;
        for (int w = 0; w < (int)blockDim.x / 32; w++) {
            sum += part[w];
        }
        out[blockIdx.x] = sum;
    }
}
TEST(reduce) {  // the same bits for every seed
    std::vector<float> x(1000);
    for (float &v : x) {
        v = uniform();
    }
    float *in = device(x), *out = device<float>(4), first = 0;
    for (long seed = 0; seed < 6; seed++) {
        Setting s(emu::set.seed, seed);
        launch(k_reduce, 4, 256, 0, 0, in, out, 1000);
        std::vector<float> v = host(out, 4);
        first = seed == 0 ? v[0] : first;
        expect(v[0] == first && v[1] == first && v[3] == first && fabsf(first) < 1000);
    }
}

// Tests all shuffles, with a whole warp and with parts of one, and the result of reading outside a
// segment.
static __global__ void k_shuffle(int *ok) {
    int l = (int)threadIdx.x % 32;
    unsigned all = ~0u;
    int good = __shfl_sync(all, l, 9) == 9 && __shfl_sync(all, l, 9, 8) == (l & ~7) + 1;
    good &= __shfl_xor_sync(all, l, 5) == (l ^ 5);
    good &= __shfl_xor_sync(all, l, 4, 4) == ((l ^ 4) > (l | 3) ? l : l ^ 4);
    good &= __shfl_up_sync(all, l, 3) == (l < 3 ? l : l - 3);
    good &= __shfl_down_sync(all, l, 2, 8) == (l % 8 < 6 ? l + 2 : l);
    good &= __shfl_sync(all, 1.5 * l, 31) == 46.5;
    bf16 b = __shfl_xor_sync(all, __float2bfloat16((float)l), 1);
    good &= __bfloat162float(b) == (float)(l ^ 1);
    if (l % 2 == 0) {
        good &= __shfl_sync(0x55555555u, l, 4) == 4;
    } else {
        good &= __shfl_xor_sync(0xaaaaaaaau, l, 2) == (l ^ 2);
    }
    __syncwarp();
    if (!good) {
        atomicExch(ok, 0);
    }
}
TEST(shuffle) {
    for (long seed = 0; seed < 4; seed++) {
        Setting s(emu::set.seed, seed);
        int *ok = true_flag();
        launch(k_shuffle, 3, 96, 0, 0, ok);
        expect(host(ok, 1)[0] == 1);
    }
}

// Integer atomics over 5 blocks of 64 threads; exactly one thread wins the compare-and-swap.
static __global__ void k_atomic(unsigned *x, int *y) {
    int t = (int)threadIdx.x;
    atomicAdd(x, 1u);
    atomicMax(y, t);
    if (atomicCAS(y + 1, 0, 7) == 0) {
        atomicExch(y + 2, 5);
        atomicAdd(x + 1, 1u);
    }
    __threadfence();
}
TEST(atomic) {
    unsigned *x = device(std::vector<unsigned>(2, 0));
    int *y = device(std::vector<int>(3, 0));
    launch(k_atomic, 5, 64, 0, 0, x, y);
    expect(host(x, 2) == (std::vector<unsigned>{320, 1}));
    expect(host(y, 3) == (std::vector<int>{63, 7, 5}));
}

// Streaming loads and stores, bit casts, and functions with exact results.
static __global__ void k_words(const float4 *in, float4 *out, int *ok) {
    float4 v = __ldcs(in);
    __stcs(out, make_float4(v.w, v.z, v.y, v.x));
    uint4 bits = __ldg((const uint4 *)(const void *)in);
    int good = bits.x == __float_as_uint(v.x) && __uint_as_float(bits.y) == v.y;
    good &= __popc(0xf0u) == 4 && __ffs(8) == 4 && __clz(1) == 31 && __clz(0) == 32;
    good &= __umulhi(0x80000000u, 6u) == 3 && max(3, 2u) == 3 && min(1.5f, 2) == 1.5f;
    good &= rsqrtf(4) == 0.5f && __fmaf_rn(2, 3, 1) == 7 && __fdividef(1, 4) == 0.25f;
    good &= ex2_approx(3) == 8 && ex2_approx(-140) == 0 && ex2_approx(-INFINITY) == 0;
    good &= rcp_approx(-4) == -0.25f && rcp_approx(INFINITY) == 0 && rcp_approx(2e38f) == 0 &&
            rcp_approx(1e-40f) == INFINITY;
    if (!good) {
        *ok = 0;
    }
}
static __global__ void k_half(int *ok) {  // 16-bit types: rounding to nearest even, both halves
    int good = __bfloat162float(__float2bfloat16_rn(1.00390625f)) == 1.0f;
    good &= __bfloat162float(__float2bfloat16_rn(1.01171875f)) == 1.015625f;
    good &= __half2float(__float2half_rn(1.00048828125f)) == 1.0f;
    good &= std::isinf(__half2float(__float2half_rn(70000.0f)));
    __nv_bfloat162 pair = __floats2bfloat162_rn(1.0f, -2.0f);
    good &= emu::bits<unsigned>(pair) == 0xc0003f80u;
#if CUDART_VERSION >= 12020     // older headers have the arithmetic of pairs only under nvcc
    float2 two = __bfloat1622float2(__hadd2(pair, pair));
    good &= two.x == 2.0f && two.y == -4.0f && __hmul(pair.x, pair.y) == pair.y;
#endif
    __half2 h = __floats2half2_rn(0.5f, 3.0f);
    good &= __high2float(h) == 3.0f && __low2float(h) == 0.5f;
    good &= __bfloat16_as_ushort(pair.x) == 0x3f80 && __ushort_as_bfloat16(0x4000) == bf16(2.0f);
    good &= __half_as_ushort(__float2half_rn(1.0f)) == 0x3c00;
    for (unsigned i = 0; i < 1 << 16; i += 7) {
        float x = __half2float(__ushort_as_half((unsigned short)i));
        good &= emu::widen<__half>((uint16_t)i) == x || x != x;
    }
    if (!good) {
        *ok = 0;
    }
}
TEST(words) {
    float4 *in = device(std::vector<float4>(1, make_float4(1, 2, 3, 4)));
    float4 *out = device<float4>(1);
    int *ok = true_flag();
    launch(k_words, 1, 1, 0, 0, in, out, ok);
    launch(k_half, 1, 1, 0, 0, ok);
    expect(host(ok, 1)[0] == 1 && host(out, 1)[0].x == 4 && host(out, 1)[0].w == 1);
}

// -------------------------------------------------------------------------------------------------
// 3. Shared memory and seeds
// Correct kernels give the same bits for every seed; for incorrect ones the results differ.

// One dynamic and three static variables; each template instance has its own.
template <class T> static __global__ void k_shared(int *ok) {
    DYN_SHARED(float, dynamic);
    SHARED(T, grid, [3][5]);
    SHARED(int, one);
    SHARED(float, tail, [7]);
    int good = sizeof grid == 15 * sizeof(T) && (uintptr_t)dynamic % 128 == 0;
    good &= (uintptr_t)tail % 128 == alignof(float);  // no better aligned than its type requires
    if (threadIdx.x == 0) {
        good &= dynamic[99] != dynamic[99] && tail[6] != tail[6];  // new memory is NaN
        grid[2][4] = (T)blockIdx.x;
        one = 5;
        dynamic[99] = tail[6] = 1;
    }
    __syncthreads();
    good &= grid[2][4] == (T)blockIdx.x && one == 5 && dynamic[99] == tail[6];
    if (!good) {
        *ok = 0;
    }
}
TEST(shared) {
    int *ok = true_flag();
    launch(k_shared<float>, 3, 64, 400, 0, ok);
    launch(k_shared<unsigned char>, 3, 40, 400, 0, ok);
    expect(host(ok, 1)[0] == 1);
}

// A block sum; without its first barrier, the partial sums of slow warps are read too early.
template <bool BARRIER> static __global__ void k_block_sum(float *out) {
    SHARED(float, part, [8]);
    if (threadIdx.x % 32 == 0) {
        part[threadIdx.x / 32] = 1;
    }
    if (BARRIER) {
        __syncthreads();
    }
    float sum = 0;
    for (int w = 0; w < 8; w++) {
        sum += part[w];
    }
    out[threadIdx.x] = sum;
}
// Two phases with one buffer; without the second barrier a fast warp overwrites what a slow one has
// yet to read. Filling new memory with NaN does not reveal this; the order of warps does.
template <bool BARRIER> static __global__ void k_two_phases(float *out) {
    SHARED(float, value);
    for (int i = 0; i < 2; i++) {
        if (threadIdx.x == (unsigned)i * 32) {
            value = (float)i;
        }
        __syncthreads();
        out[threadIdx.x] = i == 0 ? value : out[threadIdx.x];
        if (BARRIER) {
            __syncthreads();
        }
    }
}
// Each lane passes a number to its neighbour through shared memory, twice. Without the second warp
// barrier a fast lane overwrites what a slow one has yet to read.
template <bool BARRIER> static __global__ void k_neighbours(float *out) {
    SHARED(float, value, [256]);
    int t = (int)threadIdx.x;
    float sum = 0;
    for (int i = 0; i < 2; i++) {
        value[t] = i == 0 ? 3.0f : 5.0f;
        __syncwarp();
        sum += (i == 0 ? 5.0f : 3.0f) * value[t ^ 1];
        if (BARRIER) {
            __syncwarp();
        }
    }
    out[t] = sum;
}
// Returns the number of seeds, out of eight, with a result different from that of the correct
// kernel.
static int seeds_that_differ(void (*kernel)(float *), float expected) {
    int differ = 0;
    for (long seed = 0; seed < 8; seed++) {
        Setting s(emu::set.seed, seed);
        float *out = device<float>(256);
        launch(kernel, 1, 256, 0, 0, out);
        for (float x : host(out, 256)) {
            if (x != expected) {
                differ++;
                break;
            }
        }
    }
    return differ;
}
TEST(seeds) {
    int early = seeds_that_differ(k_block_sum<false>, 8), reuse, lanes;
    reuse = seeds_that_differ(k_two_phases<false>, 0);
    lanes = seeds_that_differ(k_neighbours<false>, 30);
    expect(early == 8 && reuse >= 3 && lanes >= 3);
    expect(seeds_that_differ(k_block_sum<true>, 8) == 0);
    expect(seeds_that_differ(k_two_phases<true>, 0) == 0);
    expect(seeds_that_differ(k_neighbours<true>, 30) == 0);
    detail = text("missing barriers seen by %d, %d and, of a warp, %d of 8 seeds",
             early, reuse, lanes);
}

// Records the order in which threads reach a place: before a warp operation, after it, and after a
// barrier. order: for each place, the threads of all blocks in their order; count: one 0 per place.
enum { PLACES = 3, S_BLOCKS = 8, S_THREADS = 128, S_ALL = S_BLOCKS * S_THREADS };
static __global__ void k_order(int *order, int *count) {
    int me = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    order[atomicAdd(count, 1)] = me;
    __syncwarp();
    order[S_ALL + atomicAdd(count + 1, 1)] = me;
    __syncthreads();
    order[2 * S_ALL + atomicAdd(count + 2, 1)] = me;
}
static std::vector<int> order_of(long seed, uint64_t launch_no) {
    Setting s(emu::set.seed, seed);
    emu::launches = launch_no;
    int *order = device<int>(PLACES * S_ALL), *count = device(std::vector<int>(PLACES, 0));
    launch(k_order, S_BLOCKS, S_THREADS, 0, 0, order, count);
    std::vector<int> v = host(order, PLACES * S_ALL);
    return v;
}
// Returns how often a thread, warp or block (size: its threads) arrives after its successor.
static int inversions(const int *order, int size) {
    std::vector<int> place(S_ALL / size, -1);
    int n = 0;
    for (int i = 0; i < S_ALL; i++) {
        int &p = place[(size_t)(order[i] / size)];
        p = p < 0 ? i : p;      // first arrival of any of its threads
    }
    for (size_t i = 1; i < place.size(); i++) {
        n += place[i] < place[i - 1];
    }
    return n;
}
// Seeds shuffle: a fair share of all neighbouring lanes, warps and blocks is reversed, in a
// different order for each seed. Without a seed nothing is reversed, by the same measure.
TEST(shuffled) {
    enum { SEEDS = 8 };
    const int sizes[] = {1, 32, S_THREADS};
    std::vector<std::vector<int>> seen;
    int least = 100;
    for (long seed = 0; seed < SEEDS; seed++) {
        std::vector<int> order = order_of(seed, 7000);
        for (const std::vector<int> &other : seen) {
            expect(order != other);
        }
        for (int p = 0; p < PLACES; p++) {
            std::vector<int> sorted(order.begin() + p * S_ALL, order.begin() + (p + 1) * S_ALL);
            std::sort(sorted.begin(), sorted.end());
            for (int i = 0; i < S_ALL; i++) {
                expect(sorted[(size_t)i] == i);  // every thread arrived once
            }
        }
        seen.push_back(order);
    }
    for (int p = 0; p < PLACES; p++) {
        for (int size : sizes) {
            int pairs = S_ALL / size - 1, turned = 0;
            for (int seed = 1; seed < SEEDS; seed++) {
                turned += inversions(&seen[(size_t)seed][(size_t)p * S_ALL], size);
            }
            int percent = 100 * turned / (pairs * (SEEDS - 1));
            least = std::min(least, percent);
            expect(percent >= 25 && percent <= 75);
            expect(p > 0 || inversions(&seen[0][0], size) == 0);
        }
    }
    expect(order_of(SEEDS - 1, 7000) == seen[SEEDS - 1]);  // a seed is reproducible
    expect(order_of(SEEDS - 1, 7001) != seen[SEEDS - 1]);  // another launch has another order
    detail = text("at least %d %% of neighbours turned round, of 50 expected", least);
}

// -------------------------------------------------------------------------------------------------
// 4. Memory, streams, events, devices
// Results of the API without errors, and its error codes.

// Tests that new memory is NaN, that EMU_GPU_MEM can be allocated to the last byte, and that errors
// stay until they are queried.
TEST(memory) {
    Setting limit(emu::set.gpu_mem, (long)emu::allocated_bytes + 1000);
    size_t free_bytes, total;
    float *p = device<float>(200), *q;
    for (float x : host(p, 200)) {
        expect(x != x);
    }
    expect((uintptr_t)p % 256 == 0);
    OK(cudaMemGetInfo(&free_bytes, &total));
    expect(free_bytes == 200 && total == (size_t)emu::set.gpu_mem);
    {                           // a context, and a library once opened, use memory
        Setting context(emu::set.context, 120), library(emu::set.library, 50);
        cublasLtHandle_t handle;
        OK(cudaMemGetInfo(&free_bytes, &total));
        expect(free_bytes == 80 && total == (size_t)emu::set.gpu_mem);
        expect(cudaMalloc((void **)&q, 81) == cudaErrorMemoryAllocation);
        OK(cublasLtCreate(&handle));
        OK(cudaMemGetInfo(&free_bytes, &total));
        expect(free_bytes == 30 && cudaMalloc((void **)&q, 31) == cudaErrorMemoryAllocation);
        OK(cudaMalloc((void **)&q, 30));
        OK(cudaFree(q));
        OK(cublasLtDestroy(handle));
        emu::library_bytes = 0;
    }
    expect(cudaMalloc((void **)&q, 201) == cudaErrorMemoryAllocation && q == nullptr);
    expect(strcmp(cudaGetErrorString(cudaGetLastError()), "out of memory") == 0);
    expect(cudaGetLastError() == cudaSuccess);
    OK(cudaMallocHost((void **)&q, 5000));  // pinned memory does not count
    OK(cudaFree(p));
    expect(cudaFree(p) == cudaErrorInvalidValue && cudaGetLastError() != cudaSuccess);
    expect(emu::peak_bytes >= 800 && cudaFree(nullptr) == cudaSuccess);
    expect(cudaFree(q) == cudaErrorInvalidValue && cudaGetLastError() != cudaSuccess);
    OK(cudaFreeHost(q));
}

// Tests copies in all directions; a direction that contradicts the pointers is an error.
TEST(copies) {
    std::vector<int> v = {1, 2, 3, 4};
    int *a = device(v), *b = device<int>(4), *pinned;
    OK(cudaMallocHost((void **)&pinned, 16));
    OK(cudaMemcpy(b, a, 16, cudaMemcpyDeviceToDevice));
    OK(cudaMemset(a, 0, 8));
    OK(cudaMemcpy(pinned, b, 16, cudaMemcpyDeviceToHost));
    expect(host(b, 4) == v && host(a, 4)[1] == 0 && host(a, 4)[2] == 3 && pinned[3] == 4);
    // cudaMemcpyDefault: the addresses tell the direction.
    OK(cudaMemcpy(pinned, a, 16, cudaMemcpyDefault));
    expect(pinned[1] == 0 && pinned[2] == 3);
    OK(cudaMemcpy(b, pinned, 16, cudaMemcpyDefault));
    expect(host(b, 4) == host(a, 4));
    expect(cudaMemcpy(pinned, b, 16, cudaMemcpyHostToDevice) == cudaErrorInvalidMemcpyDirection);
    expect(cudaMemcpy(b, a, 16, cudaMemcpyHostToDevice) == cudaErrorInvalidMemcpyDirection);
    cudaGetLastError();
    OK(cudaFree(a));
    OK(cudaFree(b));
    OK(cudaFreeHost(pinned));
}

static __global__ void k_add(int *x, int y) { *x += y; }
static __global__ void k_copy(int *to, const int *from) { *to = *from; }

// Tests pinned memory, allocated and registered: EMU_HOST_MEM can be used to the last byte, kernels
// can access it, and registered memory still belongs to the program.
TEST(pinned) {
    Setting limit(emu::set.host_mem, (long)emu::pinned_bytes + 1000);
    size_t before = emu::pinned_bytes, on_device = emu::allocated_bytes;
    int *a, *b, *seen;
    std::vector<int> mine(100, 3);
    OK(cudaMallocHost((void **)&a, 400));
    OK(cudaMallocHost((void **)&b, 200));
    expect(cudaMallocHost((void **)&seen, 401) == cudaErrorMemoryAllocation && seen == nullptr);
    OK(cudaHostRegister(mine.data(), 400, cudaHostRegisterDefault));
    expect(emu::pinned_bytes == before + 1000 && emu::allocated_bytes == on_device);
    expect(cudaHostRegister(&limit, 1, 0) == cudaErrorMemoryAllocation);
    expect(cudaHostRegister(&mine[99], 8, 0) == cudaErrorHostMemoryAlreadyRegistered);
    expect(cudaHostRegister(a, 4, 0) == cudaErrorHostMemoryAlreadyRegistered);
    OK(cudaHostGetDevicePointer((void **)&seen, &mine[1], 0));
    expect(seen == &mine[1] && cudaHostGetDevicePointer((void **)&b, &limit, 0) != cudaSuccess);
    launch(k_add, 1, 1, 0, 0, seen, 4);
    OK(cudaMemcpy(a, mine.data(), 400, cudaMemcpyHostToHost));
    expect(mine[0] == 3 && mine[1] == 7 && a[1] == 7);
    {
        Setting alias(emu::set.alias, 1);
        int same = 1;
        OK(cudaDeviceGetAttribute(&same, cudaDevAttrCanUseHostPointerForRegisteredMem, 0));
        OK(cudaHostGetDevicePointer((void **)&seen, mine.data(), 0));
        expect(!same && seen != mine.data());
        launch(k_add, 1, 1, 0, 0, a, 4);  // memory allocated by CUDA works as before
        expect(a[0] == 7);
    }
    expect(cudaFreeHost(mine.data()) == cudaErrorInvalidValue);
    expect(cudaHostUnregister(a) == cudaErrorHostMemoryNotRegistered);
    OK(cudaHostUnregister(mine.data()));
    expect(cudaHostUnregister(mine.data()) == cudaErrorHostMemoryNotRegistered);
    expect(cudaGetLastError() != cudaSuccess && mine[99] == 3);
    OK(cudaFreeHost(a));
    OK(cudaFreeHost(b));
    expect(emu::pinned_bytes == before);
}

TEST(late) {  // streams run as late as allowed
    Setting order(emu::set.order, emu::LATE);
    cudaStream_t s, t;
    cudaEvent_t e;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    int *x = device(std::vector<int>(2, 0)), *pinned;
    OK(cudaMallocHost((void **)&pinned, 8));
    pinned[0] = 10;
    OK(cudaMemcpyAsync(x, pinned, 4, cudaMemcpyHostToDevice, s));
    pinned[0] = 20;             // too early: the copy has not run yet
    launch(k_add, 1, 1, 0, s, x, 1);
    launch(k_copy, 1, 1, 0, t, x + 1, x);  // no event: reads before s has run
    OK(cudaStreamSynchronize(t));
    OK(cudaStreamSynchronize(s));
    expect(host(x, 2) == (std::vector<int>{21, 0}));
    launch(k_add, 1, 1, 0, s, x, 1);
    OK(cudaEventRecord(e, s));
    launch(k_add, 1, 1, 0, s, x, 100);  // after the event
    OK(cudaStreamWaitEvent(t, e, 0));
    launch(k_copy, 1, 1, 0, t, x + 1, x);
    OK(cudaStreamSynchronize(t));
    expect(host(x, 2) == (std::vector<int>{22, 22}));
    OK(cudaDeviceSynchronize());
    expect(host(x, 1)[0] == 122);
    launch(k_add, 1, 1, 0, s, pinned, 1);
    OK(cudaMemcpyAsync(pinned + 1, pinned, 4, cudaMemcpyDefault, s));  // host to host: at once
    OK(cudaStreamSynchronize(s));
    expect(pinned[0] == 21 && pinned[1] == 20);
    OK(cudaStreamDestroy(s));
    OK(cudaStreamDestroy(t));
    OK(cudaEventDestroy(e));
    OK(cudaFreeHost(pinned));
}

// Eight numbers are streamed through one slot, like a layer's weights: a copy stream writes each
// one, the compute stream uses it. Either wait can be left out: `arrived`, without which the kernel
// may run before its number is there, or `gone`, without which the next number may overwrite it.
static __global__ void k_use(int *sum, const int *slot, int weight) { *sum += weight * *slot; }
enum { TRANSFERS = 8 };
static int transfers(bool wait_arrived, bool wait_gone) {
    cudaStream_t compute, copies;
    cudaEvent_t arrived, gone;
    OK(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithPriority(&copies, cudaStreamNonBlocking, -1));
    OK(cudaEventCreateWithFlags(&arrived, cudaEventDisableTiming));
    OK(cudaEventCreateWithFlags(&gone, cudaEventDisableTiming));
    int *device_memory = device(std::vector<int>(2, 0)), *sum = device_memory, *slot = sum + 1;
    int *pinned;
    OK(cudaMallocHost((void **)&pinned, TRANSFERS * sizeof(int)));
    launch(k_add, 1, 1, 0, compute, sum, 0);
    for (int i = 0; i < TRANSFERS; i++) {
        pinned[i] = i + 1;
        if (wait_gone && i > 0) {
            OK(cudaStreamWaitEvent(copies, gone, 0));
        }
        OK(cudaMemcpyAsync(slot, pinned + i, sizeof(int), cudaMemcpyHostToDevice, copies));
        OK(cudaEventRecord(arrived, copies));
        if (wait_arrived) {
            OK(cudaStreamWaitEvent(compute, arrived, 0));
        }
        launch(k_use, 1, 1, 0, compute, sum, slot, 1 << i);
        OK(cudaEventRecord(gone, compute));
    }
    while (cudaEventQuery(gone) == cudaErrorNotReady) {
        cudaGetLastError();
    }
    OK(cudaStreamQuery(compute));  // the event was its last operation
    int result = host(sum, 1)[0];
    for (cudaStream_t s : {compute, copies}) {
        OK(cudaStreamDestroy(s));
    }
    OK(cudaEventDestroy(arrived));
    OK(cudaEventDestroy(gone));
    OK(cudaFreeHost(pinned));
    return result;
}
// With both waits every order is correct. A missing wait is detected in the order meant for it, and
// by some seeds.
TEST(orders) {
    enum { SEEDS = 16 };
    int right = 0, seen_arrived = 0, seen_gone = 0;
    for (int i = 0; i < TRANSFERS; i++) {
        right += (i + 1) << i;
    }
    for (long order = emu::EARLY; order <= SEEDS; order++) {
        Setting o(emu::set.order, order);
        expect(transfers(true, true) == right);
        bool no_arrived = transfers(false, true) != right,
             no_gone = transfers(true, false) != right;
        if (order > 0) {
            seen_arrived += no_arrived;
            seen_gone += no_gone;
        } else {
            expect(no_arrived == (order == emu::LATE));
            expect(no_gone == (order == emu::EARLY));
        }
    }
    expect(seen_arrived >= SEEDS / 4 && seen_gone >= SEEDS / 4);
    detail = text("no wait for arrival: late and %d, for departure: early and %d of "
             "%d", seen_arrived, seen_gone, SEEDS);
}

TEST(events) {
    cudaEvent_t a, b, untimed;
    float ms = -1;
    OK(cudaEventCreate(&a));
    OK(cudaEventCreate(&b));
    OK(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    expect(cudaEventElapsedTime(&ms, a, b) == cudaErrorInvalidResourceHandle);
    OK(cudaEventRecord(a, 0));
    usleep(3000);
    OK(cudaEventRecord(b, 0));
    OK(cudaEventRecord(untimed, 0));
    OK(cudaEventSynchronize(b));
    OK(cudaEventElapsedTime(&ms, a, b));
    expect(ms >= 2.9f && ms < 1000 && cudaEventQuery(b) == cudaSuccess);
    expect(cudaEventElapsedTime(&ms, a, untimed) == cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    for (cudaEvent_t e : {a, b, untimed}) {
        OK(cudaEventDestroy(e));
    }
}

static __global__ void k_big(float *out) {
    DYN_SHARED(float, s);
    s[threadIdx.x] = 1;
    out[threadIdx.x] = s[threadIdx.x];
}
// Tests all rows of the capability table, and a machine without a GPU.
TEST(device) {
    for (const emu::Capability &c : emu::CAPABILITIES) {
        Setting cc(emu::set.cc, c.cc);
        cudaDeviceProp p;
        int major, optin;
        OK(cudaGetDeviceProperties(&p, 0));
        OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
        OK(cudaDeviceGetAttribute(&optin, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
        expect(p.major * 10 + p.minor == c.cc && major == p.major);
        expect(optin == c.smem_optin_kb << 10 && p.sharedMemPerBlockOptin == (size_t)optin);
        cudaFuncAttribute max_dynamic = cudaFuncAttributeMaxDynamicSharedMemorySize;
        expect(cudaFuncSetAttribute(k_big, max_dynamic, optin + 1) == cudaErrorInvalidValue);
        OK(cudaFuncSetAttribute(k_big, max_dynamic, optin));
        float *out = device<float>(32);
        launch(k_big, 1, 32, (size_t)optin, 0, out);
        expect(host(out, 1)[0] == 1);
    }
    int n;
    OK(cudaDriverGetVersion(&n));
    OK(cudaSetDevice(3));
    OK(cudaGetDevice(&n));
    expect(n == 3 && cudaSetDevice(0) == cudaSuccess);
    Setting none(emu::set.gpus, 0);
    expect(cudaGetDeviceCount(&n) == cudaErrorNoDevice && n == 0);
    expect(cudaSetDevice(0) == cudaErrorInvalidDevice && cudaGetLastError() != cudaSuccess);
    expect(strcmp(cudaGetErrorName(cudaErrorNoDevice), "cudaErrorNoDevice") == 0);
}

TEST(failing_call) {  // EMU_FAIL: the second call in one line fails, as the runtime would report it
    const int line = __LINE__ + 1;
    auto count = [] { int n = 0; return cudaGetDeviceCount(&n); };
    char chosen[64];
    snprintf(chosen, sizeof chosen, "0 cudaGetDeviceCount %d 2", line);
    emu::failures.fail = chosen;
    expect(count() == cudaSuccess && count() == cudaErrorUnknown);
    expect(cudaGetLastError() == cudaErrorUnknown && count() == cudaSuccess);
    int n;
    expect(cudaGetDeviceCount(&n) == cudaSuccess && cudaGetDeviceCount(&n) == cudaSuccess);
    emu::failures.fail = nullptr;
}

TEST(gaps) {  // accesses next to a gap or a dead buffer are allowed
    float *row = device<float>(300);
    emu_gap(row + 100, 400);
    OK(cudaMemset(row, 0, 400));
    OK(cudaMemset(row + 200, 0, 400));
    emu_poison(row, 400);
    emu_unpoison(row, 400);
    std::vector<float> v = host(row, 100);
    expect(v[0] != v[0] && v[99] != v[99] && host(row + 200, 100)[99] == 0);
    OK(cudaFree(row));
    expect(emu::gaps.empty());
}

// -------------------------------------------------------------------------------------------------
// 5. Tensor cores, cp.async and wgmma
// Compared with sums in double, element by element, with the fragments as drawn in the PTX ISA.

template <class E> static E narrow(float x);
template <> float narrow<float>(float x) { return x; }
template <> bf16 narrow<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> __half narrow<__half>(float x) { return __float2half_rn(x); }

template <class E> static std::vector<E> random_matrix(size_t n) {
    std::vector<E> v(n);
    for (E &x : v) {
        x = narrow<E>(uniform());
    }
    return v;
}

// D (16,8) = A (16,16) B (16,8) + C in steps of K, 16 or 8; the fragments are loaded element by
// element as in the ISA.
template <class E, int K>
static __global__ void k_mma(const E *A, const E *B, const float *C, float *D) {
    int g = (int)threadIdx.x / 4, t = 2 * ((int)threadIdx.x % 4);
    uint32_t a[K / 4], b[K / 8];
    float c[4];
    for (int i = 0; i < 4; i++) {
        c[i] = C[(g + 8 * (i / 2)) * 8 + t + i % 2];
    }
    for (int k = 0; k < 16; k += K) {
        for (int i = 0; i < K / 4; i++) {
            memcpy(&a[i], &A[(g + 8 * (i % 2)) * 16 + k + t + 8 * (i / 2)], 4);
        }
        for (int i = 0; i < K / 8; i++) {
            E pair[2] = {B[(k + t + 8 * i) * 8 + g], B[(k + t + 8 * i + 1) * 8 + g]};
            memcpy(&b[i], pair, 4);
        }
        if constexpr (K == 16) {
            mma_m16n8k16<E>(c, a, b, c);
        } else {
            mma_m16n8k8(c, a, b[0], c);
        }
    }
    for (int i = 0; i < 4; i++) {
        D[(g + 8 * (i / 2)) * 8 + t + i % 2] = c[i];
    }
}
// Returns the largest error of a kernel's result compared with a sum in double.
template <class E, int K> static double mma_error() {
    std::vector<E> A = random_matrix<E>(256), B = random_matrix<E>(128);
    std::vector<float> C = random_matrix<float>(128);
    float *d = device<float>(128);
    launch(k_mma<E, K>, 1, 32, 0, 0, device(A), device(B), device(C), d);
    std::vector<float> D = host(d, 128);
    double worst = 0;
    for (int i = 0; i < 128; i++) {
        double sum = C[i];
        for (int k = 0; k < 16; k++) {
            sum += (double)(float)A[i / 8 * 16 + k] * (double)(float)B[k * 8 + i % 8];
        }
        double error = fabs(sum - D[i]);
        worst = !(error <= worst) ? error : worst;
    }
    return worst;
}
TEST(mma) {
    double e16 = mma_error<bf16, 16>(), h16 = mma_error<__half, 16>();
    emu::set.cc = 75;
    double h8 = mma_error<__half, 8>();
    expect(e16 < 2e-6 && h16 < 2e-6 && h8 < 2e-6);
    detail = text("max err bf16 %.1e, fp16 %.1e, over k8 %.1e", e16, h16, h8);
}

static __global__ void k_ldmatrix(int *ok) {
    SHARED(uint4, rows, [32]);  // matrix j, row i: elements 100 j + 10 i + 0..7
    int l = (int)threadIdx.x, g = l / 4, t = 2 * (l % 4);
    uint16_t row[8];
    for (int i = 0; i < 8; i++) {
        row[i] = (uint16_t)(100 * (l / 8) + 10 * (l % 8) + i);
    }
    memcpy(&rows[l], row, 16);
    __syncwarp();
    uint32_t r[4], s[4];
    ldmatrix_x4<false>(r, &rows[l]);
    ldmatrix_x4<true>(s, &rows[l]);
    for (int j = 0; j < 4; j++) {
        uint32_t plain = (uint32_t)(100 * j + 10 * g + t);
        uint32_t turned = (uint32_t)(100 * j + 10 * t + g);
        if (r[j] != (plain | (plain + 1) << 16) || s[j] != (turned | (turned + 10) << 16)) {
            *ok = 0;
        }
    }
}
TEST(ldmatrix) {
    int *ok = true_flag();
    launch(k_ldmatrix, 1, 32, 0, 0, ok);
    expect(host(ok, 1)[0] == 1);
}

// Groups: a wait keeps the newest; a copy in no group never completes; zero fill.
static __global__ void k_copy_async(const float4 *in, float4 *out) {
    SHARED(float4, s, [3]);
    cp_async_16(&s[0], in);
    cp_async_commit();
    cp_async_16_zfill(&s[1], in + 1, false);
    cp_async_commit();
    cp_async_16(&s[2], in + 2);  // in no group: stays outstanding
    cp_async_wait<1>();
    out[0] = s[0];
    out[1] = s[1];
    cp_async_wait<0>();
    out[2] = s[1];
    out[3] = s[2];
}
TEST(copy_async) {
    float4 *in = device(std::vector<float4>(3, make_float4(7, 7, 7, 7))), *out = device<float4>(4);
    launch(k_copy_async, 1, 1, 0, 0, in, out);
    std::vector<float4> v = host(out, 4);
    expect(v[0].x == 7 && std::isnan(v[1].x) && v[2].x == 0 && v[2].w == 0 && std::isnan(v[3].x));
}

// What can go wrong in a kernel of asynchronous products; each bug is caught below.
enum WgmmaBug {
    CORRECT,
    NO_WAIT,         // before the scores are used
    NO_ASYNC_FENCE,
    SWIZZLE,         // chunks are XORed with row % 4
    TWO_PLACES,      // for three tiles
    MN_STEP,         // a step along k as in a K-major tile
    NO_FENCE,
    NO_BARRIER,
    EARLY_RESCALE,   // of an accumulator under way
    NO_COPY_WAIT,
    STRIDE,          // 512 bytes from eight rows to the next
    BASE_OFFSET,     // in a descriptor
    NO_SWIZZLE_BIT,
    FAR,             // a descriptor beyond dynamic shared memory
    LANES_DIFFER,
    WARPS_DIFFER,
    WARP_STOPS,      // one warp skips the last product
    UNFINISHED       // no wait at the end
};

// out (128,64): over the tiles B_j (64,64) of b, O = O / 2 + bf16(A B_j^T) B_j for A (128,64). As
// in attention, there are two warpgroups and three places for B, and the products of O continue
// during the next step.
template <int BUG>
static __global__ void k_wgmma(float *out, const bf16 *a, const bf16 *b, int tiles) {
    DYN_SHARED(bf16, tile_a);
    bf16 *tile_b = tile_a + 128 * 64;
    const int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int places = BUG == TWO_PLACES ? 2 : 3;
    auto load = [&](bf16 *to, const bf16 *from, int rows) {
        for (int i = thread; i < rows * 8; i += 256) {
            const int row = i / 8, chunk = i % 8 ^ (row & (BUG == SWIZZLE ? 3 : 7));
            cp_async_16(to + row * 64 + 8 * chunk, from + i * 8);
        }
    };
    auto descriptor = [&](const bf16 *tile) {
        const uint64_t stride = BUG == STRIDE ? 512 : 1024;
        return (uint64_t)(BUG != NO_SWIZZLE_BIT) << 62 | (uint64_t)(BUG == BASE_OFFSET) << 49 |
               stride >> 4 << 32 | 1 << 16 | shared_address(tile) >> 4;
    };
    load(tile_a, a, 128);
    load(tile_b, b, 64);
    cp_async_commit();
    float o[1][8][4] = {}, s[1][8][4];
    const uint64_t at_a = descriptor(tile_a + warp / 4 * 64 * 64);
    for (int j = 0, place = 0; j < tiles; j++) {
        if (BUG != NO_COPY_WAIT) {
            cp_async_wait<0>();
        }
        if (BUG != NO_ASYNC_FENCE) {
            fence_async();
        }
        if (BUG != NO_BARRIER) {
            __syncthreads();
        }
        const int next = (place + 1) % places;
        if (j + 1 < tiles) {
            load(tile_b + next * 64 * 64, b + (j + 1) * 64 * 64, 64);
            cp_async_commit();
        }
        const uint64_t at_b = descriptor(tile_b + place * 64 * 64) + (BUG == FAR ? 4096 : 0);
        const uint64_t mine = at_a + (BUG == LANES_DIFFER ? lane / 31 * 2 : 0) +
                              (BUG == WARPS_DIFFER ? warp / 7 * 2 : 0);
        if (BUG != NO_FENCE) {
            wgmma_fence();
        }
        wgmma<false>(s, mine, at_b);
        for (int k = 1; k < 4; k++) {
            wgmma<true>(s, mine + 2 * k, at_b + 2 * k);
        }
        wgmma_commit();
        if (BUG != NO_WAIT) {
            wgmma_wait<0>();
        }
        settle(s);
        settle(o);
        uint32_t p[4][4];
        for (int i = 0; i < 16; i++) {
            const float *pair = s[0][i / 2] + i % 2 * 2;
            const bf16 both[2] = {narrow<bf16>(pair[0]), narrow<bf16>(pair[1])};
            memcpy(&p[i / 4][i % 4], both, 4);
        }
        for (int i = 0; i < 32; i++) {
            o[0][i / 4][i % 4] *= 0.5f;
        }
        wgmma_fence();
        for (int k = 0; k < (BUG == WARP_STOPS && j + 1 == tiles && warp == 3 ? 3 : 4); k++) {
            wgmma<true, true>(o, p[k], at_b + (BUG == MN_STEP ? 2 : 128) * k);
        }
        wgmma_commit();
        if (BUG == EARLY_RESCALE) {
            o[0][7][3] *= 0.5f;
        }
        place = next;
    }
    if (BUG != UNFINISHED) {
        wgmma_wait<0>();
    }
    for (int i = 0; i < 32; i++) {
        const int row = warp * 16 + lane / 4 + 8 * (i / 2 % 2);
        out[row * 64 + 8 * (i / 4) + lane % 4 * 2 + i % 2] = o[0][i / 4][i % 4];
    }
}
// Returns the relative error of the kernel's result compared with sums in double, NaN if the result
// contains one. P may be rounded to bf16 differently where the sum is close to halfway between two
// numbers.
template <int BUG> static double wgmma_error() {
    const int tiles = 4;
    std::vector<bf16> A(128 * 64), B((size_t)tiles * 64 * 64);
    for (bf16 &x : A) { x = narrow<bf16>(uniform()); }
    for (bf16 &x : B) { x = narrow<bf16>(uniform()); }
    bf16 *a = device(A), *b = device(B);
    float *out = device<float>(128 * 64);
    OK(cudaFuncSetAttribute(k_wgmma<BUG>, cudaFuncAttributeMaxDynamicSharedMemorySize, 40 << 10));
    launch(k_wgmma<BUG>, 1, 256, 40 << 10, 0, out, a, b, tiles);
    std::vector<float> got = host(out, 128 * 64);
    double error = 0, norm = 0;
    for (int m = 0; m < 128; m++) {
        double o[64] = {};
        for (int j = 0; j < tiles; j++) {
            for (double &x : o) {
                x /= 2;
            }
            for (int n = 0; n < 64; n++) {
                const bf16 *row = &B[(size_t)(j * 64 + n) * 64];
                double s = 0;
                for (int k = 0; k < 64; k++) {
                    s += (double)(float)A[m * 64 + k] * (double)(float)row[k];
                }
                for (int k = 0; k < 64; k++) {
                    o[k] += (double)(float)narrow<bf16>((float)s) * (double)(float)row[k];
                }
            }
        }
        for (int k = 0; k < 64; k++) {
            error += pow(got[m * 64 + k] - o[k], 2);
            norm += o[k] * o[k];
        }
    }
    return sqrt(error / norm);
}
TEST(wgmma) {
    double worst = 0;
    for (long seed = 0; seed < 3; seed++) {
        Setting s(emu::set.seed, seed);
        worst = std::max(worst, wgmma_error<CORRECT>());
    }
    expect(worst < 1e-3);
    detail = text("max err %.1e", worst);
}
// Ends the process with code 86 if the results are wrong, whatever the seed.
template <int BUG> static void run_wgmma() {
    for (long seed = 0; seed < 3; seed++) {
        emu::set.seed = seed;
        if (wgmma_error<BUG>() < 1e-2) {
            return;
        }
    }
    fprintf(stderr, "wrong results\n");
    fflush(stderr);
    _exit(86);
}

// -------------------------------------------------------------------------------------------------
// 6. cublasLt
// Compared with sums in double: types, transposes, padding, bias, beta and C = D.

struct Lt {                     // one matmul: descriptors and the first algorithm
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, c, d;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found[4];
    int n_found;
    cublasStatus_t status;
};
struct Shape { int m, n, k, ta, tb, pad; };  // pad: extra elements in leading dimensions

template <class E> static cudaDataType_t type_of();
template <> cudaDataType_t type_of<float>() { return CUDA_R_32F; }
template <> cudaDataType_t type_of<bf16>() { return CUDA_R_16BF; }
template <> cudaDataType_t type_of<__half>() { return CUDA_R_16F; }

// Creates a column-major layout, with padding in the leading dimension.
static cublasLtMatrixLayout_t make_layout(cudaDataType_t type, int rows, int cols, const Shape &s) {
    cublasLtMatrixLayout_t l;
    OK(cublasLtMatrixLayoutCreate(&l, type, (uint64_t)rows, (uint64_t)cols, rows + s.pad));
    return l;
}
static Lt make_lt(cudaDataType_t in, cudaDataType_t out, const Shape &s, const void *bias) {
    Lt x = {};
    int ta = s.ta ? CUBLAS_OP_T : CUBLAS_OP_N, tb = s.tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    OK(cublasLtCreate(&x.handle));
    OK(cublasLtMatmulDescCreate(&x.desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    OK(cublasLtMatmulDescSetAttribute(x.desc, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof ta));
    OK(cublasLtMatmulDescSetAttribute(x.desc, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof tb));
    if (bias != nullptr) {
        cublasLtEpilogue_t e = CUBLASLT_EPILOGUE_BIAS;
        OK(cublasLtMatmulDescSetAttribute(x.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &e, sizeof e));
        OK(cublasLtMatmulDescSetAttribute(x.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, 8));
    }
    x.a = make_layout(in, s.ta ? s.k : s.m, s.ta ? s.m : s.k, s);
    x.b = make_layout(in, s.tb ? s.n : s.k, s.tb ? s.k : s.n, s);
    x.c = make_layout(out, s.m, s.n, s);
    x.d = make_layout(out, s.m, s.n, s);
    size_t workspace = 1 << 20;
    OK(cublasLtMatmulPreferenceCreate(&x.preference));
    OK(cublasLtMatmulPreferenceSetAttribute(
        x.preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
    x.status = cublasLtMatmulAlgoGetHeuristic(x.handle, x.desc, x.a, x.b, x.c, x.d, x.preference, 4,
                                              x.found, &x.n_found);
    return x;
}
static void drop_lt(const Lt &x) {
    for (cublasLtMatrixLayout_t l : {x.a, x.b, x.c, x.d}) {
        OK(cublasLtMatrixLayoutDestroy(l));
    }
    OK(cublasLtMatmulPreferenceDestroy(x.preference));
    OK(cublasLtMatmulDescDestroy(x.desc));
    OK(cublasLtDestroy(x.handle));
}

// Returns the largest error of D = 0.5 op(A) op(B) + beta C + bias, in place (C = D) or out of
// place, compared with sums in double, in units of the error allowed for rounding to O and for fp32
// sums.
template <class E, class O>
static double lt_error(const Shape &s, float beta, bool with_bias, bool in_place) {
    size_t lda = (size_t)(s.ta ? s.k : s.m) + s.pad, ldb = (size_t)(s.tb ? s.n : s.k) + s.pad;
    size_t ldd = (size_t)s.m + s.pad, na = lda * (s.ta ? s.m : s.k), nb = ldb * (s.tb ? s.k : s.n);
    size_t nd = ldd * s.n;
    std::vector<E> A = random_matrix<E>(na), B = random_matrix<E>(nb);
    std::vector<O> C = random_matrix<O>(nd), bias = random_matrix<O>((size_t)s.m);
    E *a = device(A), *b = device(B);
    O *c = device(C), *d = in_place ? c : device<O>(nd), *dbias = device(bias);
    void *workspace = device<char>(1 << 20);
    Lt x = make_lt(type_of<E>(), type_of<O>(), s, with_bias ? dbias : nullptr);
    expect(x.status == CUBLAS_STATUS_SUCCESS && x.n_found >= 1);
    float alpha = 0.5f;
    std::vector<O> D, first;
    for (int i = x.n_found - 1; i >= 0; i--) {  // every algorithm, the same bits
        int32_t out_of_place = -1;
        size_t written = 0;
        OK(cublasLtMatmulAlgoCapGetAttribute(&x.found[i].algo,
                                             CUBLASLT_ALGO_CAP_OUT_OF_PLACE_RESULT_SUPPORT,
                                             &out_of_place, sizeof out_of_place, &written));
        expect(out_of_place == (i >= 1) && written == sizeof out_of_place);
        if (!in_place && !out_of_place) {
            continue;
        }
        if (in_place) {
            OK(cudaMemcpy(c, C.data(), nd * sizeof(O), cudaMemcpyHostToDevice));
        }
        OK(cublasLtMatmul(x.handle, x.desc, &alpha, a, x.a, b, x.b, &beta, c, x.c, d, x.d,
                          &x.found[i].algo, workspace, 1 << 20, 0));
        D = host(d, nd);
        expect(s.pad || first.empty() || memcmp(D.data(), first.data(), nd * sizeof(O)) == 0);
        first = D;
    }
    double worst = 0, ulp = sizeof(O) == 4 ? 6e-8 : type_of<O>() == CUDA_R_16F ? 5e-4 : 4e-3;
    for (int i = 0; i < s.n * s.m; i++) {
        int col = i / s.m, row = i % s.m;
        double sum = 0;
        for (int k = 0; k < s.k; k++) {
            size_t ia = s.ta ? row * lda + k : k * lda + row;
            size_t ib = s.tb ? k * ldb + col : col * ldb + k;
            sum += (double)(float)A[ia] * (double)(float)B[ib];
        }
        size_t at = col * ldd + row;
        sum = 0.5 * sum + (beta != 0 ? beta * (double)(float)C[at] : 0)
            + (with_bias ? (double)(float)bias[row] : 0);
        double error = fabs(sum - (double)(float)D[at]) / (ulp * fabs(sum) + 6e-8 * s.k);
        worst = !(error <= worst) ? error : worst;
    }
    drop_lt(x);
    return worst;
}
TEST(cublasLt) {
    const Shape shapes[] = {
        {64, 8, 16, 0, 0, 0}, {72, 5, 33, 1, 0, 8}, {40, 24, 8, 0, 1, 0}, {136, 9, 40, 1, 1, 8},
        {8, 1, 1, 1, 0, 0},
    };
    double worst = 0;
    int runs = 0;
    for (const Shape &s : shapes) {
        for (int i = 0; i < 8; i++) {
            float beta = i & 1 ? 1.0f : 0.0f;
            bool bias = i & 2, in_place = i & 4;
            worst = std::max(worst, lt_error<float, float>(s, beta, bias, in_place));
            worst = std::max(worst, lt_error<bf16, bf16>(s, beta, bias, in_place));
            worst = std::max(worst, lt_error<bf16, float>(s, beta, bias, in_place));
            worst = std::max(worst, lt_error<__half, __half>(s, beta, bias, in_place));
            worst = std::max(worst, lt_error<__half, float>(s, beta, bias, in_place));
            runs += 5;
        }
    }
    expect(worst < 1.01);
    detail = text("%d matmuls, worst %.0f %% of the tolerance", runs, 100 * worst);
}

// Tests split-K: an algorithm needs a reduction scheme and a workspace for the parts; the last
// algorithm does not support it.
template <class Run> static void lt_splits(const Lt &x, const Lt &other, Run run) {
    const size_t parts = 4 * 64 * 8 * sizeof(float);
    auto check = [&](const Lt &l, cublasLtMatmulHeuristicResult_t *result) {
        return cublasLtMatmulAlgoCheck(l.handle, l.desc, l.a, l.b, l.c, l.d, &result->algo, result);
    };
    for (int i = 0; i < 3; i++) {
        cublasLtMatmulHeuristicResult_t result = x.found[i];
        const int32_t splits = 4;
        const uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        OK(check(x, &result));
        expect(result.workspaceSize == x.found[i].workspaceSize);
        OK(cublasLtMatmulAlgoConfigSetAttribute(&result.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM,
                                                &splits, sizeof splits));
        expect(check(x, &result) == CUBLAS_STATUS_NOT_SUPPORTED);  // no scheme
        OK(cublasLtMatmulAlgoConfigSetAttribute(
            &result.algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme));
        expect(check(other, &result) == CUBLAS_STATUS_INVALID_VALUE);
        expect((check(x, &result) == CUBLAS_STATUS_SUCCESS) == (i < 2));
        const size_t bytes = x.found[i].workspaceSize + parts;
        expect(i == 2 || result.workspaceSize == bytes);
        expect(run(&result.algo, bytes - 16) != 0);
        expect((run(&result.algo, bytes) == CUBLAS_STATUS_SUCCESS) == (i < 2));
    }
}

// Tests that what cuBLASLt would reject returns a status, not a result.
static void lt_refusals() {
    Shape s = {64, 8, 16, 0, 0, 0}, other = {64, 16, 16, 0, 0, 0};
    Lt x = make_lt(CUDA_R_16BF, CUDA_R_16BF, s, nullptr);
    Lt y = make_lt(CUDA_R_16BF, CUDA_R_16BF, other, nullptr);
    Lt z = make_lt(CUDA_R_32F, CUDA_R_16BF, s, nullptr);
    expect(x.n_found == 3 && z.n_found == 0 && z.status == CUBLAS_STATUS_NOT_SUPPORTED);
    {
        Setting largest(emu::set.lt_max, 63);
        Lt large = make_lt(CUDA_R_16BF, CUDA_R_16BF, s, nullptr);  // m is 64
        expect(large.n_found == 0 && large.status == CUBLAS_STATUS_NOT_SUPPORTED);
    }
    bf16 *a = device<bf16>(4096), *b = device<bf16>(4096), *d = device<bf16>(4096);
    void *workspace = device<char>(1 << 20);
    float one = 1, zero = 0;
    auto out_of_place = [&](const Lt &layouts, int algorithm) {
        bf16 *c = device<bf16>(4096);
        return cublasLtMatmul(x.handle, x.desc, &one, a, layouts.a, b, x.b, &zero, c, layouts.c, d,
                              layouts.d, &x.found[algorithm].algo, workspace, 1 << 20, 0);
    };
    auto run = [&](const bf16 *pa, bf16 *pd, const Lt &layouts, const cublasLtMatmulAlgo_t *algo,
                   size_t bytes) {
        return cublasLtMatmul(x.handle, x.desc, &one, pa, layouts.a, b, x.b, &zero, pd, layouts.c,
                              pd, layouts.d, algo, workspace, bytes, 0);
    };
    OK(run(a, d, x, nullptr, 0));
    OK(run(a, d, x, &x.found[0].algo, 0));
    expect(run(a + 1, d, x, nullptr, 0) != 0);                  // misaligned
    expect(run(a + 8, d, x, &x.found[0].algo, 0) != 0);         // 16-byte address, 256 assumed
    expect(run(a, d, x, &y.found[0].algo, 1 << 20) != 0);       // chosen for another shape
    expect(run(a, d, x, &x.found[2].algo, 1 << 10) != 0);       // workspace too small
    expect(run(a, a, x, nullptr, 0) != 0);                      // D on A
    expect(out_of_place(x, 0) == CUBLAS_STATUS_NOT_SUPPORTED);   // not supported
    OK(out_of_place(x, 1));
    lt_splits(x, z, [&](const cublasLtMatmulAlgo_t *algo, size_t bytes) {
        return run(a, d, x, algo, bytes);
    });
    Setting none(emu::set.lt_in_place, emu::ALGORITHMS);
    expect(out_of_place(x, 2) == CUBLAS_STATUS_NOT_SUPPORTED);
    expect(run(a, d, z, nullptr, 0) != 0);                      // types
    expect(run(a, d, y, nullptr, 0) != 0);                      // shapes
    expect(strcmp(cublasLtGetStatusName(CUBLAS_STATUS_NOT_SUPPORTED),
                  "CUBLAS_STATUS_NOT_SUPPORTED") == 0);
}
TEST(cublasLt_refusals) {
    const Outcome o = outcome(spawn([] {  // the reasons are printed on stderr
        lt_refusals();
        fflush(NULL);
        _exit(failures != 0);             // its memory is freed with the process
    }));
    expect(o.status == 0 && has(o.err, "rejects: the shapes"), "%s%s",
           o.out.c_str(), o.err.c_str());
}

// -------------------------------------------------------------------------------------------------
// 7. NCCL
// Ranks are child processes; the id is created before the fork, as a launcher would distribute it.

#if EMU_NCCL
typedef void Rank(ncclComm_t comm, int rank, int ranks);
static std::vector<int> rank_codes;  // exit codes of the last run_ranks
static Text rank_text;        // their stderr
static struct { Rank *body; int ranks, claimed; } ranks_job;

// Starts the ranks and prints their exit codes on stderr, where the test reads them.
static void rank_parent() {
    ncclUniqueId id;
    OK(ncclGetUniqueId(&id));
    std::vector<pid_t> children;
    for (int r = 0; r < ranks_job.ranks; r++) {
        children.push_back(fork());
        if (children.back() == 0) {
            ncclComm_t comm;
            int n = r == 0 ? ranks_job.ranks : ranks_job.claimed;
            OK(ncclCommInitRank(&comm, n, id, r));
            ranks_job.body(comm, r, n);
            OK(ncclCommDestroy(comm));
            fflush(stdout);
            _exit(failures != 0);
        }
    }
    for (pid_t child : children) {
        int status;
        waitpid(child, &status, 0);
        fprintf(stderr, "code %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
    }
}
// Runs `ranks` processes; ranks other than 0 report `claimed` as the number of ranks.
static void run_ranks(Rank *body, int ranks, int claimed) {
    ranks_job = {body, ranks, claimed};
    rank_codes.clear();
    const Outcome o = outcome(spawn(rank_parent));
    rank_text = o.err + o.out;
    for (size_t at = 0; (at = rank_text.find("code ", at)) != Text::npos; at++) {
        rank_codes.push_back(atoi(rank_text.c_str() + at + 5));
    }
    expect((int)rank_codes.size() == ranks);
}
static void expect_codes(int code) {
    for (int c : rank_codes) {
        expect(c == code, "exit code %d instead of %d: %s", c, code, rank_text.c_str());
    }
}

static float part_of(int rank, size_t i) { return (float)(1000 * rank) + (float)(i % 97); }

// Tests AllGather out of place and in place, where the input is the rank's own part of the output,
// with more data than a socket's buffer holds.
static void rank_gathers(ncclComm_t comm, int rank, int ranks) {
    const size_t n = 70001;
    std::vector<float> own(n), want(n * (size_t)ranks);
    for (size_t i = 0; i < want.size(); i++) {
        want[i] = part_of((int)(i / n), i % n);
    }
    std::copy_n(&want[n * (size_t)rank], n, own.begin());
    float *in = device(own), *all = device<float>(want.size());
    OK(ncclAllGather(in, all, n, ncclFloat32, comm, 0));
    expect(host(all, want.size()) == want);
    OK(cudaMemset(all, 0, want.size() * sizeof(float)));
    OK(cudaMemcpy(all + n * (size_t)rank, own.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    OK(ncclAllGather(all + n * (size_t)rank, all, n, ncclFloat32, comm, 0));
    expect(host(all, want.size()) == want);
    unsigned char *bytes = device(std::vector<unsigned char>(3, (unsigned char)(rank + 5)));
    OK(ncclBroadcast(bytes, bytes, 3, ncclUint8, ranks - 1, comm, 0));
    expect(host(bytes, 3)[2] == ranks + 4);
}
// A group on a stream that runs late, and a second communicator whose id is broadcast through the
// first.
static void rank_group(ncclComm_t comm, int rank, int ranks) {
    emu::set.order = emu::LATE;
    cudaStream_t s;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    int *x = device(std::vector<int>((size_t)ranks + 1, 1));
    ncclUniqueId id = {}, *ids = device<ncclUniqueId>(1);
    launch(k_add, 1, 1, 0, s, x + rank, rank);
    OK(ncclGroupStart());
    OK(ncclAllGather(x + rank, x, 1, ncclInt32, comm, s));
    OK(ncclBroadcast(x, x + ranks, 1, ncclInt32, ranks - 1, comm, s));
    expect(host(x, 1)[0] == 1);
    OK(ncclGroupEnd());
    OK(cudaStreamSynchronize(s));
    for (int r = 0; r < ranks; r++) {
        expect(host(x, (size_t)ranks)[(size_t)r] == r + 1);
    }
    expect(host(x + ranks, 1)[0] == 1 && ncclGroupEnd() == ncclInvalidUsage);
    if (rank == 0) {
        OK(ncclGetUniqueId(&id));
        OK(cudaMemcpy(ids, &id, sizeof id, cudaMemcpyHostToDevice));
    }
    OK(ncclBroadcast(ids, ids, sizeof id, ncclInt8, 0, comm, s));
    OK(cudaStreamSynchronize(s));
    ncclComm_t second;
    OK(ncclCommInitRank(&second, ranks, host(ids, 1)[0], rank));
    OK(ncclBroadcast(x, x, 1, ncclInt32, 0, second, s));
    OK(ncclCommDestroy(second));
    expect(host(x, 1)[0] == 1);
}
// The k-th piece that rank a sends to rank b: n numbers that start with a unique one.
enum { PIECES = 2 };
static size_t piece_count(int a, int b, int k) { return (size_t)(20000 * k + 10 * a + b + 1); }
static int piece_value(int a, int b, int k) { return 1000 * a + 100 * b + k; }
// Every rank sends two pieces to every rank, including itself, in one group; then a ring, call by
// call. The bytes that each rank sends to others are counted.
static void rank_exchange(ncclComm_t comm, int rank, int ranks) {
    const long before = comm->sent_bytes;
    long want = 0;
    std::vector<int *> received;
    OK(ncclGroupStart());
    for (int peer = 0; peer < ranks; peer++) {
        for (int k = 0; k < PIECES; k++) {
            const size_t out = piece_count(rank, peer, k), in = piece_count(peer, rank, k);
            received.push_back(device<int>(in));
            OK(ncclRecv(received.back(), in, ncclInt32, peer, comm, 0));
            int *x = device(std::vector<int>(out, piece_value(rank, peer, k)));
            OK(ncclSend(x, out, ncclInt32, peer, comm, 0));
            want += peer == rank ? 0 : 4 * (long)out;
        }
    }
    OK(ncclGroupEnd());
    expect(comm->sent_bytes - before == want, "%ld of %ld", comm->sent_bytes - before, want);
    for (int i = 0; i < ranks * PIECES; i++) {
        const int peer = i / PIECES, k = i % PIECES;
        const size_t n = piece_count(peer, rank, k);
        expect(host(received[(size_t)i], n) == std::vector<int>(n, piece_value(peer, rank, k)));
    }
    ncclResult_t error = ncclInternalError;
    OK(ncclCommGetAsyncError(comm, &error));
    OK(error);  // no rank exits before this rank's next call
    int *x = device(std::vector<int>(2, rank));
    OK(ncclGroupStart());
    OK(ncclSend(x, 1, ncclInt32, (rank + 1) % ranks, comm, 0));
    OK(ncclRecv(x + 1, 1, ncclInt32, (rank + ranks - 1) % ranks, comm, 0));
    OK(ncclGroupEnd());
    expect(host(x, 2)[1] == (rank + ranks - 1) % ranks);
    expect(ncclSend(x, 1, ncclInt32, ranks, comm, 0) == ncclInvalidArgument);
}
// A communicator with a config; the emulator rejects a non-blocking one. NCCL's memory is allocated
// when it is first needed: by the first collective, and by the first exchange with each rank of
// this machine; ranks of other machines share the first one's.
static void rank_config(ncclComm_t comm, int rank, int ranks) {
    ncclUniqueId id = {}, *ids = device<ncclUniqueId>(1);
    if (rank == 0) {
        OK(ncclGetUniqueId(&id));
        OK(cudaMemcpy(ids, &id, sizeof id, cudaMemcpyHostToDevice));
    }
    OK(ncclBroadcast(ids, ids, sizeof id, ncclInt8, 0, comm, 0));
    emu::set.nccl = 3000;
    emu::set.nvlink = 1;
    emu::set.machine = rank == 3;
    ncclComm_t second;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.maxCTAs = 4;
    float *x = device(std::vector<float>((size_t)ranks, (float)rank));
    const size_t before = emu::free_bytes(), one = 4 * 3000, nvls = 16000;
    auto taken = [&] { return before - emu::free_bytes(); };
    auto ring = [&](int by) {  // every rank sends to rank + by
        OK(ncclGroupStart());
        OK(ncclSend(x, 1, ncclFloat32, (rank + by) % ranks, second, 0));
        OK(ncclRecv(x, 1, ncclFloat32, (rank + ranks - by) % ranks, second, 0));
        OK(ncclGroupEnd());
    };
    OK(ncclCommInitRankConfig(&second, ranks, host(ids, 1)[0], rank, &config));
    expect(taken() == 0);
    OK(ncclAllGather(x + rank, x, 1, ncclFloat32, second, 0));
    expect(host(x, (size_t)ranks)[(size_t)ranks - 1] == (float)(ranks - 1));
    expect(ranks == 1 || taken() == one + nvls, "%zu", taken());
    OK(ncclAllGather(x + rank, x, 1, ncclFloat32, second, 0));
    for (int by = 1; by < ranks; by++) {
        ring(by);
        ring(by);
    }
    // Of four ranks the last one is on a machine of its own.
    const int near = ranks < 4 ? ranks - 1 : rank == 3 ? 0 : 2;
    expect(ranks == 1 || taken() == (1 + (size_t)near) * one + nvls, "%zu", taken());
    OK(ncclCommDestroy(second));
    expect(taken() == 0);
    config.blocking = 0;
    expect(ncclCommInitRankConfig(&second, ranks, id, rank, &config) == ncclInvalidArgument);
    // Too little memory is an error of the first collective, which is then not queued on any rank.
    emu::set.nccl = emu::set.gpu_mem / 32 + 1;
    comm->connected.assign((size_t)ranks + 1, false);
    expect(ranks == 1 ||
           ncclAllGather(x + rank, x, 1, ncclFloat32, comm, 0) == ncclUnhandledCudaError);
}

// The root of a broadcast of more data than a socket's buffer holds returns before the others call
// it, and may overwrite its data. Two ranks exchange data without the third.
static void rank_early(ncclComm_t comm, int rank, int ranks) {
    const size_t n = 1 << 21;
    int *x = device(std::vector<int>(n, rank == 1 ? 7 : 0));
    if (rank != 1) {
        usleep(400000);
    }
    const double began = wall_ms();
    OK(ncclBroadcast(x, x, n, ncclInt32, 1, comm, 0));
    OK(cudaStreamSynchronize(0));
    expect(rank != 1 || wall_ms() - began < 300, "%.0f ms", wall_ms() - began);
    expect(host(x, n) == std::vector<int>(n, 7));
    OK(cudaMemset(x, 0, n * sizeof(int)));
    if (rank == ranks - 1) {
        usleep(400000);
    } else if (rank == 0) {
        OK(ncclSend(x, 1, ncclInt32, 1, comm, 0));
    } else {
        OK(ncclRecv(x, 1, ncclInt32, 0, comm, 0));
    }
}

TEST(nccl) {
    for (int ranks = 1; ranks <= 4; ranks++) {
        for (Rank *body : {rank_gathers, rank_group, rank_exchange, rank_config}) {
            run_ranks(body, ranks, ranks);
            expect_codes(0);
        }
    }
    run_ranks(rank_early, 3, 3);
    expect_codes(0);
    detail = text("1 to 4 ranks");
}

// Injected faults: rank 1 calls another collective, a rank passes a different count, a rank exits,
// a rank sleeps, two ranks send to each other outside a group, the ranks disagree on their number.
static void rank_mismatch(ncclComm_t comm, int rank, int) {
    float *x = device<float>(400000);
    OK(ncclAllGather(x, x, 1000, ncclFloat32, comm, 0));
    if (rank == 1) {
        OK(ncclAllGather(x, x, 10, ncclFloat32, comm, 0));
    }
    OK(ncclAllGather(x, x, 100000, ncclFloat32, comm, 0));
}
static void rank_count(ncclComm_t comm, int rank, int) {
    float *x = device<float>(30);
    OK(ncclAllGather(x, x, (size_t)(rank == 2 ? 9 : 10), ncclFloat32, comm, 0));
}
static void rank_dies(ncclComm_t comm, int rank, int) {
    float *x = device<float>(300);
    OK(ncclAllGather(x, x, 100, ncclFloat32, comm, 0));
    if (rank == 1) {
        _exit(86);
    }
    OK(ncclAllGather(x, x, 100, ncclFloat32, comm, 0));
}
static void rank_hangs(ncclComm_t comm, int rank, int) {
    float *x = device<float>(300);
    if (rank == 2) {
        usleep(4000000);        // longer than the others wait
        _exit(86);
    }
    OK(ncclAllGather(x, x, 100, ncclFloat32, comm, 0));
}
static void rank_nothing(ncclComm_t, int, int) { }
// Rank 2 sends rank 1 one element more than rank 1 expects. No other rank is involved, so only rank
// 1 fails.
static void rank_pieces(ncclComm_t comm, int rank, int) {
    float *x = device<float>(10);
    OK(ncclGroupStart());
    if (rank == 2) {
        OK(ncclSend(x, 10, ncclFloat32, 1, comm, 0));
    } else if (rank == 1) {
        OK(ncclRecv(x, 9, ncclFloat32, 2, comm, 0));
    }
    OK(ncclGroupEnd());
}
static void rank_ungrouped(ncclComm_t comm, int rank, int) {
    float *x = device<float>(10);
    if (rank < 2) {
        OK(ncclSend(x, 10, ncclFloat32, 1 - rank, comm, 0));
    }
    OK(ncclRecv(x, 10, ncclFloat32, rank == 0 ? 1 : 0, comm, 0));
}
// Rank 1 exits, which is not reported if it is on the same machine; the others wait until they are
// killed.
static void rank_silence(ncclComm_t comm, int rank, int) {
    float *x = device<float>(30);
    ncclResult_t error = ncclSuccess;
    emu::set.nccl_hang = 1;
    OK(ncclAllGather(x, x, 10, ncclFloat32, comm, 0));
    if (rank == 1) {
        _exit(0);
    }
    usleep(300000);
    OK(ncclCommGetAsyncError(comm, &error));
    expect(error == ncclSuccess);
    comm->machine[1] = 1;  // reached over a network
    OK(ncclCommGetAsyncError(comm, &error));
    expect(error == ncclRemoteError);
    signal(SIGALRM, [](int) { _exit(failures ? 1 : 55); });
    alarm(1);
    OK(ncclAllGather(x, x, 10, ncclFloat32, comm, 0));
}

// Rank 1's second collective fails: it never completes, and NCCL reports an error.
static void rank_fails(ncclComm_t comm, int rank, int) {
    int *x = device<int>(3);
    ncclResult_t error = ncclInternalError;
    emu::set.nccl_hang = emu::set.fault_rank = 1;
    emu::set.fault_async = 2;
    OK(ncclAllGather(x, x, 1, ncclInt32, comm, 0));
    OK(cudaStreamQuery(0));
    if (rank == 1) {
        OK(ncclAllGather(x, x, 1, ncclInt32, comm, 0));
        OK(cudaMemsetAsync(x, 0, sizeof *x, 0));
        expect(cudaStreamQuery(0) == cudaErrorNotReady);
        OK(ncclCommGetAsyncError(comm, &error));
        expect(error == ncclRemoteError && comm->failed);
        signal(SIGALRM, [](int) { _exit(failures ? 1 : 55); });
        alarm(1);
        OK(cudaStreamSynchronize(0));
    }
}

// k_copy is loaded after the host has waited for the collective. k_use is loaded while one may be
// waiting for other ranks, which in turn wait for this rank to load it.
static void rank_handshakes(ncclComm_t comm, int rank, int) {
    int *x = device<int>(5);
    OK(ncclAllGather(x + rank, x, 1, ncclInt32, comm, 0));
    OK(cudaStreamSynchronize(0));
    launch(k_copy, 1, 1, 0, 0, x, x + 1);
    OK(ncclAllGather(x + rank, x, 1, ncclInt32, comm, 0));
    launch(k_copy, 1, 1, 0, 0, x, x + 1);
    launch(k_use, 1, 1, 0, 0, x, x + 1, 1);
}

// Expects that all three ranks end with code 86 and that their output contains both texts.
static void expect_ranks_die(Rank *body, int claimed, const char *a, const char *b) {
    run_ranks(body, 3, claimed);
    expect_codes(86);
    expect(has(rank_text, a) && has(rank_text, b),
           "no '%s' and '%s' in: %s", a, b, rank_text.c_str());
}
TEST(nccl_deaths) {
    expect_ranks_die(rank_mismatch, 3, "rank 0 calls AllGather #2 (count 100000",
                     "rank 1 calls AllGather #2 (count 10,");
    expect_ranks_die(rank_count, 3, "rank 0 calls AllGather #1 (count 10,",
                     "rank 2 calls AllGather #1 (count 9,");
    expect_ranks_die(rank_dies, 3, "rank 1 is gone (its process ended) before AllGather #2",
                     "on rank 2");
    expect_ranks_die(rank_handshakes, 3, "k_use is called for the first time",
                     "collective is pending");
    expect_ranks_die(rank_ungrouped, 3, "send to each other outside a group", "on rank 2");
    run_ranks(rank_pieces, 3, 3);
    expect(rank_codes == (std::vector<int>{0, 86, 0}) &&
               has(rank_text, "rank 2 sends 40 bytes to rank 1, which expects 36"),
           "pieces: %s", rank_text.c_str());
    run_ranks(rank_fails, 3, 3);
    expect(rank_codes == (std::vector<int>{0, 55, 0}), "a failure: %s", rank_text.c_str());
    run_ranks(rank_silence, 3, 3);
    expect(rank_codes == (std::vector<int>{55, 0, 55}), "a silent end: %s", rank_text.c_str());
    Setting timeout(emu::set.nccl_timeout_s, 2);
    expect_ranks_die(rank_hangs, 3, "rank 2 did not reach AllGather #1 within 2 s", "on rank 1");
    expect_ranks_die(rank_nothing, 4, "with 4 ranks, and rank 0 with 3", "CommInit");
}
#endif

// -------------------------------------------------------------------------------------------------
// 8. Injected bugs
// Each ends with code 86 and a line that names what a user needs to find the bug. If a sanitizer
// detects it first, the sanitizer's report counts.

static __global__ void k_write(float *x, int i) {
    if (blockIdx.x == 1 && threadIdx.x == 3) {
        x[i] = 1;
    }
}
static void write_at(int i) {  // of 100 floats, with a gap after the first 32
    float *x = device<float>(100);
    emu_gap(x + 32, 128);
    launch(k_write, 2, 32, 0, 0, x, i);
    OK(cudaFree(x));
}
static float *write_guarded(int i) {  // guard pages also identify the thread
    emu::set.guard = 1;
    float *x = device<float>(100);
    launch(k_write, 2, 32, 0, 0, x, i);
    return x;
}
static __global__ void k_past_shared(float *out, int i) {
    SHARED(float, part, [4]);
    part[threadIdx.x + (unsigned)i] = 1;
    out[threadIdx.x] = part[threadIdx.x];
}
// Barriers that not every thread reaches, or that are at different lines.
static __global__ void k_half_block() {
    if (threadIdx.x < 32) {
        __syncthreads();
    }
}
static __global__ void k_two_barriers() {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}
// Masks with lanes that do not arrive, have returned, or do not exist.
static __global__ void k_half_warp(float *out) {
    if (threadIdx.x < 16) {
        out[0] = __shfl_xor_sync(~0u, out[0], 1);
    } else {
        __syncthreads();
    }
}
static __global__ void k_returned_lane(float *out) {
    if (threadIdx.x >= 16) {
        return;
    }
    out[0] = __shfl_xor_sync(~0u, out[0], 1);
}
static __global__ void k_mask(float *out, unsigned mask, int from) {
    out[0] = __shfl_sync(mask, out[0], from);
}
static __global__ void k_mixed_ops(float *out) {
    if (threadIdx.x < 16) {
        out[0] = __shfl_xor_sync(~0u, out[0], 1);
    } else {
        __syncwarp();
    }
}
static __global__ void k_lane_outside(float *out) {
    if (threadIdx.x < 16) {
        out[0] = __shfl_sync(0xffffu, out[0], 20);
    }
}
static __global__ void k_endless(volatile int *flag) {
    while (*flag == 0) {
    }
}
static __global__ void k_null(int *p) { *(volatile int *)p = 1; }
static __attribute__((noinline)) int deep(volatile int *p, int n) {
    volatile char stack[1000];
    stack[n % 1000] = (char)n;
    return n == 0 ? *p : deep(p, n - 1) + stack[n % 1000];
}
static __global__ void k_deep(volatile int *p) { *p = deep(p, 100000); }
static __global__ void k_static() { SHARED(float, s, [13000]); s[0] = 1; }
static __global__ void k_ldmatrix_off(char *out) {
    uint32_t r[4];
    ldmatrix_x4<false>(r, out);
}
static void launch_pageable() {
    int x = 0;
    launch(k_add, 1, 1, 0, 0, &x, 1);
}
static void matmul_past_end() {
    Shape s = {64, 8, 16, 0, 0, 0};
    Lt x = make_lt(CUDA_R_32F, CUDA_R_32F, s, nullptr);
    float *a = device<float>(64 * 16), *b = device<float>(8 * 16 - 1), *d = device<float>(64 * 8);
    float one = 1, zero = 0;
    cublasLtMatmul(x.handle, x.desc, &one, a, x.a, b, x.b, &zero, d, x.c, d, x.d, nullptr, nullptr,
                   0, 0);
}
#if EMU_NCCL
static ncclComm_t own_communicator() {
    ncclUniqueId id;
    ncclComm_t comm;
    OK(ncclGetUniqueId(&id));
    OK(ncclCommInitRank(&comm, 1, id, 0));
    return comm;
}
static void nccl_past_end() {  // sizeof(float) as element count
    float *x = device<float>(1);
    OK(ncclAllGather(x, x, sizeof(float), ncclFloat32, own_communicator(), 0));
}
static void nccl_pinned() {
    ncclComm_t comm = own_communicator();
    float *x;
    OK(cudaMallocHost((void **)&x, sizeof *x));
    OK(ncclGroupStart());
    OK(ncclSend(x, 1, ncclFloat32, 0, comm, 0));
    OK(ncclRecv(device<float>(1), 1, ncclFloat32, 0, comm, 0));
    OK(ncclGroupEnd());
}
#endif
static void fork_after_query() {
    int n, status;
    OK(cudaGetDeviceCount(&n));
    const pid_t child = fork();
    if (child == 0) {
        OK(cudaSetDevice(0));
        device<int>(1);
        _exit(0);
    }
    waitpid(child, &status, 0);
    _exit(WEXITSTATUS(status));
}
static cudaStream_t late_stream() {
    emu::set.order = emu::LATE;
    cudaStream_t s;
    OK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
}
static void wait_in_circle() {
    cudaStream_t s = late_stream(), t = late_stream();
    emu::enqueue_wait(s, t, 1);
    emu::enqueue_wait(t, s, 1);
    OK(cudaStreamSynchronize(s));
}
// Waits for an event that was never recorded. CUDA accepts both waits: the host's returns at once,
// a stream's has no effect and is surely a bug, so the emulator rejects it.
static void wait_never_recorded() {
    cudaEvent_t e;
    OK(cudaEventCreate(&e));
    OK(cudaEventQuery(e));
    OK(cudaEventSynchronize(e));
    if (failures == 0) {
        cudaStreamWaitEvent(nullptr, e, 0);
    }
}
static void unregister_early() {  // before a copy from the memory has run
    std::vector<int> mine(100, 3);
    cudaStream_t s = late_stream();
    OK(cudaHostRegister(mine.data(), 400, 0));
    OK(cudaMemcpyAsync(device<int>(100), mine.data(), 400, cudaMemcpyHostToDevice, s));
    OK(cudaHostUnregister(mine.data()));
    OK(cudaStreamSynchronize(s));
}

struct Bug { void (*run)(); const char *what, *where, *asan; };  // asan: its report instead
static const Bug bugs[] = {
    {[] { write_at(101); }, "wrote at offset 404 of an allocation of 400 bytes", "k_write",
     "poison"},
    {[] { write_at(-3); }, "wrote at offset -12 of an allocation of 400 bytes", "k_write",
     "poison"},
    {[] { write_at(40); }, "into a gap: byte 32 of 128, offset 160", "k_write", "poison"},
    {[] { write_guarded(100); }, "Segmentation fault",
     "k_write, block (1,0,0) of (2,1,1), thread (3,0,0)", "SEGV"},
    {[] { *(volatile float *)write_guarded(99) = 1; }, "host code accesses device memory",
     "in host code", "SEGV"},
#if EMU_ASAN  // without it a dead buffer is NaN but not guarded
    {[] {
         float *x = device<float>(100);
         emu_poison(x + 40, 100);
         launch(k_write, 2, 32, 0, 0, x, 45);
     }, "", "", "k_write, block (1,0,0) of (2,1,1), thread (3,0,0)"},
#endif
    {[] { launch(k_past_shared, 1, 4, 0, 0, device<float>(4), 1); },
     "wrote at offset 16 of a shared variable", "k_past_shared", "k_past_shared, b"},
    {[] { launch(k_half_block, 1, 64, 0, 0); }, "deadlock", "threads 32-63 have returned"},
    {[] { launch(k_two_barriers, 1, 64, 0, 0); }, "divergent barrier", "k_two_barriers"},
    {[] { launch(k_half_warp, 1, 32, 0, 0, device<float>(1)); }, "deadlock",
     "threads 0-15 wait in __shfl_sync, mask ffffffff"},
    {[] { launch(k_returned_lane, 1, 32, 0, 0, device<float>(1)); }, "in kernel k_returned_lane",
     "threads 16-31 have returned"},
    {[] { launch(k_mask, 1, 8, 0, 0, device<float>(1), ~0u, 0); },
     "mask ffffffff names lanes that do not exist", "k_mask"},
    {[] { launch(k_mask, 1, 32, 0, 0, device<float>(1), 0xffffu, 0); },
     "mask 0000ffff does not name the calling lane", "thread (16,0,0)"},
    {[] { launch(k_mixed_ops, 1, 32, 0, 0, device<float>(1)); },
     "is in __syncwarp mask ffffffff", "is in __shfl_sync mask ffffffff"},
    {[] { launch(k_lane_outside, 1, 32, 0, 0, device<float>(1)); },
     "reads lane 20, which is not in mask 0000ffff", "k_lane_outside"},
    {[] {
         emu::set.timeout = 1;
         launch(k_endless, 1, 1, 0, 0, (volatile int *)device(std::vector<int>(1, 0)));
     }, "EMU_TIMEOUT=1", "k_endless"},
    {[] { launch(k_null, 1, 1, 0, 0, nullptr); }, "Segmentation fault", "k_null", "k_null"},
    {[] { launch(k_deep, 1, 1, 0, 0, (volatile int *)device<int>(1)); }, "EMU_STACK", "k_deep",
     "stack-overflow"},
    {launch_pageable, "argument 0 of k_add", "is not device or pinned memory"},
    {[] {  // the host address of registered memory on a GPU with a different device address
         emu::set.alias = 1;
         static int mine[100];
         OK(cudaHostRegister(mine, sizeof mine, cudaHostRegisterMapped));
         launch(k_add, 1, 1, 0, 0, mine, 4);
     }, "argument 0 of k_add", "is not device or pinned memory"},
    {[] {  // a report lists switches that differ from their defaults
         emu::set.seed = 5;
         emu::set.order = emu::EARLY;
         emu::set.cc = 80;
         launch_pageable();
     }, "(in host code)", "; again with EMU_SEED=5 EMU_ORDER=early EMU_CC=80\n"},
    {[] { launch(k_two_barriers, 1, 1025, 0, 0); },
     "launch of k_two_barriers refused: block size", ""},
    {[] { launch(k_shared<int>, 1, 1, 50 << 10, 0, nullptr); }, "more dynamic shared memory",
     "k_shared<int>"},
    {[] { launch(k_static, 1, 1, 0, 0); }, "52000 static", "k_static"},
    {[] { OK(cudaMemset(device<char>(100), 0, 101)); }, "101 bytes at offset 0 run 1 bytes past",
     "cudaMemset"},
    {[] {
         char *x = device<char>(1000);
         emu_gap(x + 500, 16);
         OK(cudaMemset(x, 0, 1000));
     }, "run into the gap at offset 500", "cudaMemset"},
    {matmul_past_end, "run 4 bytes past the end", "cublasLtMatmul B"},
#if EMU_NCCL
    {nccl_past_end, "run 12 bytes past the end", "ncclAllGather"},
    {nccl_pinned, "is host memory", "ncclSend"},
#endif
    {fork_after_query, "CUDA is used in a process that was forked from one", "in host code"},
    {[] { launch(k_ldmatrix_off, 1, 32, 0, 0, device<char>(16)); }, "is not in shared memory",
     "k_ldmatrix_off"},
    {[] {  // instructions and shared memory that a device of capability 7.5 does not have
         emu::set.cc = 75;
         mma_error<__half, 16>();
     }, "mma.m16n8k16: needs compute capability 8.0", "EMU_CC=75"},
    {[] {
         emu::set.cc = 75;
         launch(k_copy_async, 1, 1, 0, 0, device<float4>(3), device<float4>(3));
     }, "cp.async: needs compute capability 8.0", "k_copy_async"},
    {[] {
         emu::set.cc = 100;
         wgmma_error<CORRECT>();
     }, "fence_async: needs compute capability 9.0", "k_wgmma"},
    {run_wgmma<NO_WAIT>, "settle: a product that writes these accumulators", "k_wgmma"},
    {run_wgmma<NO_ASYNC_FENCE>, "wrong results", ""},
    {run_wgmma<SWIZZLE>, "wrong results", ""},
    {run_wgmma<TWO_PLACES>, "wrong results", ""},
    {run_wgmma<MN_STEP>, "wrong results", ""},
    {run_wgmma<NO_FENCE>, "has not called wgmma_fence since its last wait", "k_wgmma"},
    {run_wgmma<NO_BARRIER>, "wrong results", ""},
    {run_wgmma<EARLY_RESCALE>, "accumulator 31 of lane 0 changed while a product was under way",
     "k_wgmma"},
    {run_wgmma<NO_COPY_WAIT>, "wrong results", ""},
    {run_wgmma<STRIDE>, "wrong results", ""},
    {run_wgmma<BASE_OFFSET>, "only a 128-byte swizzle without base offset", "k_wgmma"},
    {run_wgmma<NO_SWIZZLE_BIT>, "only a 128-byte swizzle without base offset", "k_wgmma"},
    {run_wgmma<FAR>, "reaches beyond dynamic shared memory", "k_wgmma"},
    {run_wgmma<LANES_DIFFER>, "lanes 0 and 31 differ in a descriptor", "k_wgmma"},
    {run_wgmma<WARPS_DIFFER>, "warps of a warpgroup issue different products", "k_wgmma"},
    {run_wgmma<WARP_STOPS>, "warp 3 issued fewer products than others", "k_wgmma"},
    {run_wgmma<UNFINISHED>, "ended with products under way", "k_wgmma"},
    {[] {  // the limit was raised while another device was set
         const cudaFuncAttribute limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
         OK(cudaFuncSetAttribute(k_copy_async, limit, 80 << 10));
         emu::set.cc = 75;
         launch(k_copy_async, 1, 1, 80 << 10, 0, device<float4>(3), device<float4>(3));
     }, "more dynamic shared memory", "k_copy_async"},
    {unregister_early, "is not device or pinned memory", "cudaMemcpy source"},
    {wait_never_recorded, "the event was never recorded", "cudaStreamWaitEvent"},
    {wait_in_circle, "wait for each other in a cycle", ""},
    {[] { cudaStream_t s; OK(cudaStreamCreateWithFlags(&s, cudaStreamDefault)); },
     "streams that wait for the default stream are not emulated", ""},
};
TEST(bugs) {
    int n = 0;
    for (const Bug &b : bugs) {
        const bool instead = EMU_ASAN && b.asan != nullptr;
        const char *what = instead ? b.asan : b.what, *where = instead ? "" : b.where;
        const Outcome o = outcome(spawn(b.run));
        expect(o.status == 86 && has(o.err, what) && has(o.err, where),
               "exit status %d; wanted '%s' and '%s' in: %s", o.status, what, where, o.err.c_str());
        n++;
    }
    detail = text("%d of %d caught with exit code 86", n - failures, n);
}

int main(int argc, char **argv) {
    return harness_main(argc, argv);
}
