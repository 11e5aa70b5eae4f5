// test_cuda_cpu.cpp: tests that the emulator computes correctly and detects mistakes as promised.
//
// Uses the harness in dev/test/harness.h, which describes arguments and output. A death test makes
// a mistake in a child process and expects exit code 86 and a certain message. The tests do not
// show how real GPUs behave.
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cublasLt.h>
#include <nccl.h>
#include <algorithm>
#include "../test/harness.h"

typedef __nv_bfloat16 bf16;

// --- Device arrays -------------------------------------------------------------------------------
// Arrays live until the test ends. A test continues after a failed expectation.

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

// --- Shared memory and seeds ---------------------------------------------------------------------
// Correct kernels give the same bits for every seed; results of incorrect ones differ.

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
    int *ok = device(std::vector<int>(1, 1));
    launch(k_shared<float>, 3, 64, 400, 0, ok);
    launch(k_shared<unsigned char>, 3, 40, 400, 0, ok);
    expect(host(ok, 1)[0] == 1);
}

// Each lane passes a number to its neighbor through shared memory, twice. Without the second warp
// barrier, a fast lane overwrites a value that a slow one has yet to read.
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
// A missing warp barrier is found by some of eight seeds; README.md shows a block's.
TEST(seeds) {
    int differ[2] = {0, 0};
    for (long seed = 0; seed < 8; seed++) {
        Setting s(emu::set.seed, seed);
        for (int barrier : {0, 1}) {
            float *out = device<float>(256);
            launch(barrier ? k_neighbours<true> : k_neighbours<false>, 1, 256, 0, 0, out);
            const std::vector<float> got = host(out, 256);
            differ[barrier] += std::count(got.begin(), got.end(), 30.0f) < 256;
        }
    }
    expect(differ[0] >= 3 && differ[1] == 0);
    detail = text("detected by %d of 8 seeds", differ[0]);
}

// Records the order in which threads reach three places: before a warp operation, after it, and
// after a barrier. `order` receives all threads of each place; `count` starts as a 0 for each.
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
    return host(order, PLACES * S_ALL);
}
// Returns how often a thread, warp or block (of `size` threads) arrives after its successor.
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
// Every seed gives a different order, and reverses a fair share of all neighboring lanes, warps and
// blocks. Without a seed, the same measure finds nothing reversed.
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
    detail = text("at least %d %% of neighbors reversed; 50 expected", least);
}

// --- Memory and streams --------------------------------------------------------------------------

TEST(memory) {  // new memory is NaN; EMU_GPU_MEM can be allocated to the last byte
    Setting limit(emu::set.gpu_mem, (long)emu::allocated_bytes + 1000);
    float *p = device<float>(200), *q;
    for (float x : host(p, 200)) {
        expect(x != x);
    }
    expect(cudaMalloc((void **)&q, 201) == cudaErrorMemoryAllocation && q == nullptr);
    expect(cudaGetLastError() == cudaErrorMemoryAllocation && cudaGetLastError() == cudaSuccess);
    OK(cudaMalloc((void **)&q, 200));
    OK(cudaFree(p));
    expect(cudaFree(p) == cudaErrorInvalidValue && cudaGetLastError() != cudaSuccess);
    OK(cudaFree(q));
}

static __global__ void k_add(int *x, int y) { *x += y; }
static __global__ void k_copy(int *to, const int *from) { *to = *from; }

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

// Eight numbers are streamed through one slot, like a layer's weights: a copy stream writes each,
// and the compute stream uses it. Either wait can be left out: without `arrived`, the kernel may
// run before its number is there; without `gone`, the next number may overwrite it.
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
    OK(cudaStreamDestroy(compute));
    OK(cudaStreamDestroy(copies));
    OK(cudaEventDestroy(arrived));
    OK(cudaEventDestroy(gone));
    OK(cudaFreeHost(pinned));
    return result;
}
// With both waits, every order is correct. A missing wait is found by its order and by some seeds.
TEST(orders) {
    enum { SEEDS = 16 };
    int right = 0, seen_arrived = 0, seen_gone = 0;
    for (int i = 0; i < TRANSFERS; i++) {
        right += (i + 1) << i;
    }
    for (long order = emu::EARLY; order <= SEEDS; order++) {
        Setting o(emu::set.order, order);
        expect(transfers(true, true) == right);
        const bool no_arrived = transfers(false, true) != right;
        const bool no_gone = transfers(true, false) != right;
        seen_arrived += order > 0 && no_arrived;
        seen_gone += order > 0 && no_gone;
        expect(order > 0 || no_arrived == (order == emu::LATE));
        expect(order > 0 || no_gone == (order == emu::EARLY));
    }
    expect(seen_arrived >= SEEDS / 4 && seen_gone >= SEEDS / 4);
    detail = text("no wait for arrival: late and %d, for departure: early and %d of "
             "%d", seen_arrived, seen_gone, SEEDS);
}

TEST(failing_call) {  // EMU_FAIL: the second call on a line fails as if the runtime had failed
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

// --- cp.async and wgmma --------------------------------------------------------------------------
// The results are compared with sums in double.

static bf16 small_range(float x) { return __float2bfloat16_rn(x); }

// Tests groups (a wait leaves the newest; a copy in no group never completes) and zero fill.
static __global__ void k_copy_async(const float4 *in, float4 *out) {
    SHARED(float4, s, [3]);
    copy_16(&s[0], in, true);
    copy_commit();
    copy_16(&s[1], in + 1, false);
    copy_commit();
    copy_16(&s[2], in + 2, true);  // in no group: stays outstanding
    copy_wait<1>();
    out[0] = s[0];
    out[1] = s[1];
    copy_wait<0>();
    out[2] = s[1];
    out[3] = s[2];
}
TEST(copy_async) {
    float4 *in = device(std::vector<float4>(3, make_float4(7, 7, 7, 7))), *out = device<float4>(4);
    launch(k_copy_async, 1, 1, 0, 0, in, out);
    std::vector<float4> v = host(out, 4);
    expect(v[0].x == 7 && std::isnan(v[1].x) && v[2].x == 0 && v[2].w == 0 && std::isnan(v[3].x));
}

// Possible bugs in a kernel that uses asynchronous products; each is caught below.
enum WgmmaBug {
    CORRECT,
    NO_WAIT,         // no wait before the scores are used
    NO_ASYNC_FENCE,
    TWO_PLACES,      // two buffers for three tiles
    NO_FENCE,
    NO_BARRIER,
    EARLY_RESCALE,   // an accumulator is rescaled before the wait
    NO_COPY_WAIT,
    BASE_OFFSET,     // a descriptor has a base offset
    NO_SWIZZLE_BIT,
    FAR,             // a descriptor beyond dynamic shared memory
    LANES_DIFFER,
    WARPS_DIFFER,
    WARP_STOPS,      // one warp skips the last product
    UNFINISHED       // no wait at the end
};

// Computes out (128,64): for each tile B_j (64,64) of b, O = O / 2 + bf16(A B_j^T) B_j, where A is
// (128,64). As in attention, there are two warpgroups and three buffers for B, and the products
// for O continue during the next step.
template <int BUG>
static __global__ void k_wgmma(float *out, const bf16 *a, const bf16 *b, int tiles) {
    DYN_SHARED(bf16, tile_a);
    bf16 *tile_b = tile_a + 128 * 64;
    const int thread = (int)threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int places = BUG == TWO_PLACES ? 2 : 3;
    auto load = [&](bf16 *to, const bf16 *from, int rows) {
        for (int i = thread; i < rows * 8; i += 256) {
            const int row = i / 8, chunk = i % 8 ^ (row & 7);
            copy_16(to + row * 64 + 8 * chunk, from + i * 8, true);
        }
    };
    auto descriptor = [&](const bf16 *tile) {
        return (uint64_t)(BUG != NO_SWIZZLE_BIT) << 62 | (uint64_t)(BUG == BASE_OFFSET) << 49 |
               (uint64_t)1024 >> 4 << 32 | 1 << 16 | shared_address(tile) >> 4;
    };
    load(tile_a, a, 128);
    load(tile_b, b, 64);
    copy_commit();
    float o[1][8][4] = {}, s[1][8][4];
    const uint64_t at_a = descriptor(tile_a + warp / 4 * 64 * 64);
    for (int j = 0, place = 0; j < tiles; j++) {
        if (BUG != NO_COPY_WAIT) {
            copy_wait<0>();
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
            copy_commit();
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
            const bf16 both[2] = {small_range(pair[0]), small_range(pair[1])};
            memcpy(&p[i / 4][i % 4], both, 4);
        }
        for (int i = 0; i < 32; i++) {
            o[0][i / 4][i % 4] *= 0.5f;
        }
        wgmma_fence();
        for (int k = 0; k < (BUG == WARP_STOPS && j + 1 == tiles && warp == 3 ? 3 : 4); k++) {
            wgmma<true, true>(o, p[k], at_b + 128 * k);
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
// Returns the kernel's relative error compared with sums in double, or NaN if its result contains a
// NaN. P may be rounded to bf16 differently where the sum is close to halfway between two numbers.
template <int BUG> static double wgmma_error() {
    const int tiles = 4;
    std::vector<bf16> A(128 * 64), B((size_t)tiles * 64 * 64);
    for (bf16 &x : A) { x = small_range(uniform()); }
    for (bf16 &x : B) { x = small_range(uniform()); }
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
                    o[k] += (double)(float)small_range((float)s) * (double)(float)row[k];
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

// --- NCCL ----------------------------------------------------------------------------------------
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
            OK(ncclCommInitRankConfig(&comm, n, id, r, nullptr));
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

static ncclResult_t gathers(float *x, size_t count, ncclComm_t comm, int rank) {
    return ncclAllGather(x + (size_t)rank * count, x, count, ncclFloat32, comm, 0);
}
static void rank_mismatch(ncclComm_t comm, int rank, int) {
    float *x = device<float>(400000);
    OK(gathers(x, 1000, comm, rank));
    if (rank == 1) {
        OK(gathers(x, 10, comm, rank));
    }
    OK(gathers(x, 100000, comm, rank));
}
static void rank_count(ncclComm_t comm, int rank, int) {
    float *x = device<float>(30);
    OK(gathers(x, (size_t)(rank == 2 ? 9 : 10), comm, rank));
}
static void rank_dies(ncclComm_t comm, int rank, int) {
    float *x = device<float>(300);
    OK(gathers(x, 100, comm, rank));
    if (rank == 1) {
        _exit(86);
    }
    OK(gathers(x, 100, comm, rank));
}
static void rank_hangs(ncclComm_t comm, int rank, int) {
    float *x = device<float>(300);
    if (rank == 2) {
        usleep(4000000);        // longer than the others wait
        _exit(86);
    }
    OK(gathers(x, 100, comm, rank));
}
static void rank_nothing(ncclComm_t, int, int) { }
// Rank 1 exits. With EMU_NCCL_HANG=1, as with NCCL on a single machine, this is not reported, and
// the others wait until they are killed.
static void rank_silence(ncclComm_t comm, int rank, int) {
    float *x = device<float>(30);
    emu::set.nccl_hang = 1;
    OK(gathers(x, 10, comm, rank));
    if (rank == 1) {
        _exit(0);
    }
    signal(SIGALRM, [](int) { _exit(failures ? 1 : 55); });
    alarm(1);
    OK(gathers(x, 10, comm, rank));
}

// k_copy is loaded after the host has waited for the collective. k_use is loaded while another may
// be waiting for other ranks, which in turn wait for this rank to load it.
static void rank_handshakes(ncclComm_t comm, int rank, int) {
    int *x = device<int>(5);
    OK(ncclAllGather(x + rank, x, 1, ncclInt32, comm, 0));
    OK(cudaStreamSynchronize(0));
    launch(k_copy, 1, 1, 0, 0, x, x + 1);
    OK(ncclAllGather(x + rank, x, 1, ncclInt32, comm, 0));
    launch(k_copy, 1, 1, 0, 0, x, x + 1);
    launch(k_use, 1, 1, 0, 0, x, x + 1, 1);
}

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
    run_ranks(rank_silence, 3, 3);
    expect(rank_codes == (std::vector<int>{55, 0, 55}), "a silent end: %s", rank_text.c_str());
    Setting timeout(emu::set.nccl_timeout_s, 2);
    expect_ranks_die(rank_hangs, 3, "rank 2 did not reach AllGather #1 within 2 s", "on rank 1");
    expect_ranks_die(rank_nothing, 4, "rank 3 did not reach CommInit", "on rank 0");
}
#endif

// --- Injected bugs -------------------------------------------------------------------------------
// Each ends with code 86 and a line with the information needed to find the bug. If a sanitizer
// detects it first, the sanitizer's report is expected instead.

static __global__ void k_write(float *x, int i) {
    if (blockIdx.x == 1 && threadIdx.x == 3) {
        x[i] = 1;
    }
}
static void write_at(int i) {  // writes one of 100 floats; a gap follows the first 32
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
static __global__ void k_mma() {
    const uint32_t a[4] = {}, b[2] = {};
    float d[4] = {};
    mma_m16n8k16<__half>(d, a, b, d);
}
static __global__ void k_ldmatrix_off(char *out) {
    uint32_t r[4];
    ldmatrix_x4<false>(r, out);
}
static void launch_pageable() {
    int x = 0;
    launch(k_add, 1, 1, 0, 0, &x, 1);
}
static void matmul_past_end() {  // D (64,8) = A (64,16) B (16,8), of which one number is missing
    cublasLtHandle_t handle;
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    OK(cublasLtCreate(&handle));
    OK(cublasLtMatmulDescInit(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    OK(cublasLtMatrixLayoutInit(&a, CUDA_R_32F, 64, 16, 64));
    OK(cublasLtMatrixLayoutInit(&b, CUDA_R_32F, 16, 8, 16));
    OK(cublasLtMatrixLayoutInit(&d, CUDA_R_32F, 64, 8, 64));
    float *to = device<float>(64 * 8), one = 1, zero = 0;
    cublasLtMatmul(handle, &product, &one, device<float>(64 * 16), &a, device<float>(8 * 16 - 1),
                   &b, &zero, to, &d, to, &d, nullptr, nullptr, 0, 0);
}
#if EMU_NCCL
static ncclComm_t own_communicator() {
    ncclUniqueId id;
    ncclComm_t comm;
    OK(ncclGetUniqueId(&id));
    OK(ncclCommInitRankConfig(&comm, 1, id, 0, nullptr));
    return comm;
}
static void nccl_past_end() {  // passes sizeof(float) as element count
    float *x = device<float>(1);
    OK(ncclAllGather(x, x, sizeof(float), ncclFloat32, own_communicator(), 0));
}
static void nccl_pinned() {
    ncclComm_t comm = own_communicator();
    float *x;
    OK(cudaMallocHost((void **)&x, sizeof *x));
    OK(ncclAllGather(x, device<float>(1), 1, ncclFloat32, comm, 0));
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
// Waits for an event that was never recorded. CUDA accepts both waits: the host's returns at once;
// a stream's has no effect, which is surely a bug, so the emulator rejects it.
static void wait_never_recorded() {
    cudaEvent_t e;
    OK(cudaEventCreate(&e));
    OK(cudaEventQuery(e));
    OK(cudaEventSynchronize(e));
    if (failures == 0) {
        cudaStreamWaitEvent(nullptr, e, 0);
    }
}
struct Bug { void (*run)(); const char *what, *where, *asan; };  // asan: ASan's report
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
    {nccl_pinned, "is host memory", "ncclAllGather"},
#endif
    {fork_after_query, "CUDA is used in a process that was forked from one", "in host code"},
    {[] { launch(k_ldmatrix_off, 1, 32, 0, 0, device<char>(16)); }, "is not in shared memory",
     "k_ldmatrix_off"},
    {[] {  // instructions and shared memory that devices of capability 7.5 lack
         emu::set.cc = 75;
         launch(k_mma, 1, 32, 0, 0);
     }, "mma.m16n8k16: needs compute capability 8.0", "EMU_CC=75"},
    {[] {
         emu::set.cc = 100;
         wgmma_error<CORRECT>();
     }, "fence_async: needs compute capability 9.0", "k_wgmma"},
    {run_wgmma<NO_WAIT>, "settle: a product that writes these accumulators", "k_wgmma"},
    {run_wgmma<NO_ASYNC_FENCE>, "wrong results", ""},
    {run_wgmma<TWO_PLACES>, "wrong results", ""},
    {run_wgmma<NO_FENCE>, "has not called wgmma_fence since its last wait", "k_wgmma"},
    {run_wgmma<NO_BARRIER>, "wrong results", ""},
    {run_wgmma<EARLY_RESCALE>, "accumulator 31 of lane 0 changed while a product was under way",
     "k_wgmma"},
    {run_wgmma<NO_COPY_WAIT>, "wrong results", ""},
    {run_wgmma<BASE_OFFSET>, "only a 128-byte swizzle without base offset", "k_wgmma"},
    {run_wgmma<NO_SWIZZLE_BIT>, "only a 128-byte swizzle without base offset", "k_wgmma"},
    {run_wgmma<FAR>, "reaches beyond dynamic shared memory", "k_wgmma"},
    {run_wgmma<LANES_DIFFER>, "lanes 0 and 31 differ in a descriptor", "k_wgmma"},
    {run_wgmma<WARPS_DIFFER>, "warps of a warpgroup issue different products", "k_wgmma"},
    {run_wgmma<WARP_STOPS>, "warp 3 issued fewer products than others", "k_wgmma"},
    {run_wgmma<UNFINISHED>, "ended with products under way", "k_wgmma"},
    {[] {  // the limit is raised while another device is set
         const cudaFuncAttribute limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
         OK(cudaFuncSetAttribute(k_copy_async, limit, 80 << 10));
         emu::set.cc = 75;
         launch(k_copy_async, 1, 1, 80 << 10, 0, device<float4>(3), device<float4>(3));
     }, "more dynamic shared memory", "k_copy_async"},
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
