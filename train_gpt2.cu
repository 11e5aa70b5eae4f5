// train_gpt2.cu -- GPT-2 training on NVIDIA GPUs.
//
// Every layer of GPT-2 forward and backward as CUDA kernels and cuBLASLt matmuls in bf16, fp16 or
// fp32; flash attention; AdamW with a split master copy; activation checkpointing of whole blocks;
// offload and ZeRO; and the engine that the training loop of train_gpt2.c drives. Options, plan,
// data, checkpoints and the CPU reference that checks every kernel are those of train_gpt2.c.
//
// No float atomics and no order that depends on scheduling: the same input gives the same bits. No
// allocation on the device after start-up. The host waits once per step for the loss, and in each
// micro-step for the upload of two micro-steps earlier.
//
// Build:  make train_gpt2cu        with nvcc, for the GPUs of this machine (others: ARCH=90a)
//         make train_gpt2cu_cpu    the same kernels on the CPU (dev/cuda_cpu), for tests
// Run:    ./train_gpt2cu -r 1
//
// Contents
// Part F. The device
//  24  CUDA prelude
//  25  Warp and block toolbox
//  26  Tensor-core toolbox
// Part G. Kernels
//  27  Embedding
//  28  LayerNorm and residual
//  29  GELU and bias
//  30  Matmul
//  31  Flash attention forward
//  32  Flash attention backward
//  33  Classifier
//  34  AdamW and gradient norm
// Part H. Memory and streams
//  35  Device memory
//  36  Offload: copies and streams
// Part I. Many GPUs
//  37  Starting and watching the ranks
//  38  Exchange between ranks
// Part J. GPT-2 on the GPU
//  39  The network on the GPU
//  40  Steps and update
// Part K. Service
//  41  Timed matmul algorithms
//  42  Kernel trials
//  43  States in and out
//  44  Opening and warm-up
//  45  Peaks, --check and --compare
//  46  main

#include <cuda_runtime.h>

// All of train_gpt2.c. It contains everything that does not depend on the GPU: options, memory
// plan, data, output, checkpoints and the training loop. Its fp32 layers are the reference that
// kernels are compared with in the same process (--check). Its functions are static and its main is
// excluded; it is written in the common subset of C and C++ so that it can be included here.
#define HOST_DEVICE __host__ __device__
#define GPT2_CUDA 1
#include "train_gpt2.c"

// =================================================================================================
// Part F. The device

// -------------------------------------------------------------------------------------------------
// 24. CUDA prelude
// Errors, launches, shared memory, and the element types. The same source is compiled by nvcc and
// by a host compiler that uses dev/cuda_cpu as its CUDA headers (CUDA_CPU is then 1). All code that
// differs between the two is in this chapter and in chapter Tensor-core toolbox; the CPU versions
// in dev/cuda_cpu have the same names.
// 1. Every CUDA and cuBLASLt call goes through cuda_check or cublas_check: an error ends the run.
// 2. E is the element type of weights and activations (bf16, fp16 or fp32), G the type of the
//    gradients of matrices (E or fp32). Arithmetic is in fp32; E is only the storage type. In
//    kernels of 16-bit types every multiply-add is written as fmaf: nvcc contracts nothing itself,
//    so an expression has the same bits in every kernel and on the CPU. Only these kernels use the
//    approximations ex2_approx and rcp_approx (chapter Tensor-core toolbox). AdamW, the split
//    master and the sum of the losses use neither fmaf nor approximations, so their bits are those
//    of separate operations.
// 3. Global memory is read and written 16 bytes at a time: a row of E is a multiple of 16 bytes
//    long and starts at a multiple of 16. Each launcher asserts this for all its arguments
//    (check_rows).
// 4. The limits of kernels are named constants: launchers assert them, and gpu_settings_check
//    reports violations to the user before the run.

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <algorithm>
#include <float.h>
#include <initializer_list>
#include <iterator>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <type_traits>
// GPT2_MPI=1 builds with MPI, which the ranks started by mpirun use to find each other; only the
// GPU program uses it.
#ifndef GPT2_MPI
#define GPT2_MPI 0
#endif
#if GPT2_MPI
#define OMPI_SKIP_MPICXX 1   // MPI's old C++ interface needs another library
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#endif

#ifndef CUDA_CPU
#define CUDA_CPU 0
#endif

// Returns advice on a CUDA error; `call` is the source text of the failed call.
static const char *cuda_hint(cudaError_t error, const char *call) {
    switch (error) {
    case cudaErrorMemoryAllocation:
        return strstr(call, "cudaHost") || strstr(call, "cudaMallocHost")
                   ? "this machine cannot pin more memory: see free -m and, in a container, a "
                     "batch job or WSL, its memory limit"
                   : "GPU memory is exhausted: see --plan; -r block or a smaller -b need less";
    case cudaErrorNoDevice:
        return "no NVIDIA GPU found: check nvidia-smi and CUDA_VISIBLE_DEVICES; train_gpt2 runs on "
               "the CPU";
    case cudaErrorInsufficientDriver:
        return "the driver is older than this program's CUDA: nvidia-smi shows its version";
    case cudaErrorSystemDriverMismatch:
        return "the driver was updated while running: reload its kernel modules or reboot";
    case cudaErrorSystemNotReady:
        return "the GPUs of an HGX or DGX machine need nvidia-fabricmanager: is it running?";
    case cudaErrorNoKernelImageForDevice:
        return "this program was built for another GPU: run make on this machine";
    case cudaErrorDevicesUnavailable:
        return "another process holds the GPU in exclusive mode: see nvidia-smi";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorLaunchFailure:
        return "an earlier kernel failed: run with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer";
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidValue:
        return "a size exceeds the limits of this GPU: try a smaller model, -b or -t";
    default:
        return "check the GPU with nvidia-smi and dmesg";
    }
}

static void cuda_check_at(cudaError_t error, const char *call, const char *file, int line) {
    if (error != cudaSuccess) {
        die("%s:%d: %s: %s (%s); %s%s", file, line, call, cudaGetErrorString(error),
            cudaGetErrorName(error), cuda_hint(error, call),
            error == cudaErrorMemoryAllocation ? available_limit : "");
    }
}

static void cublas_check_at(cublasStatus_t status, const char *call, const char *file, int line) {
    if (status != CUBLAS_STATUS_SUCCESS) {
        cuda_check_at(cudaGetLastError(), call, file, line);  // an earlier kernel error
        die("%s:%d: %s: %s; cuBLASLt is out of memory or does not support this matmul",
            file, line, call, cublasLtGetStatusName(status));
    }
}

// GPT2_NCCL=1 if the build found NCCL. Without NCCL the program trains on one GPU; no NCCL call is
// compiled or reached.
#if CUDA_CPU
#include <nccl.h>
#define GPT2_NCCL EMU_NCCL
#elif !defined(GPT2_NCCL)
#define GPT2_NCCL 0
#endif
#if GPT2_NCCL
#include <nccl.h>
#if NCCL_VERSION_CODE < 21700
#error "NCCL before 2.17 cannot limit its blocks; `make NCCL=` builds without it, for one GPU"
#endif
// Returns advice on an NCCL error, because NCCL's own messages rarely name the cause (NCCL user
// guide, Troubleshooting: Docker gives a container 64 MB of shared memory; NVIDIA/nccl#1066).
static const char *nccl_hint(void) {
    struct statvfs shm;
    int count = 0;
    if (this_rank.local_ranks > 1 && statvfs("/dev/shm", &shm) == 0 &&
        shm.f_bavail * shm.f_frsize < 256u << 20) {
        return "/dev/shm has less than 256 MiB: a container needs --shm-size=1g or --ipc=host";
    }
    if (this_rank.local_ranks > 1 && cudaGetDeviceCount(&count) == cudaSuccess && count == 1) {
        return "this rank sees a single GPU, which some versions of NCCL cannot connect to "
               "others; with srun, use --gpus-per-node and --gpu-bind=none";
    }
    return "set NCCL_DEBUG=INFO for details";
}

static void nccl_check_at(ncclResult_t result, const char *call, const char *file, int line) {
    if (result != ncclSuccess) {
        die("%s:%d: %s: %s; %s (%s)", file, line, call, ncclGetErrorString(result),
            ncclGetLastError(NULL), nccl_hint());
    }
}
#define nccl_check(...) nccl_check_at((__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)

// Ends the run if NCCL has failed asynchronously: NCCL's own threads detect network errors while
// its kernels keep waiting. Often the cause is that another rank has ended. die() therefore waits
// for a grace period, so that the process that detects that rank's end can report it first.
static void nccl_ask(ncclComm_t comm) {
    ncclResult_t result;
    nccl_check(ncclCommGetAsyncError(comm, &result));
    if (result != ncclSuccess && result != ncclInProgress) {
        grace_ms = rank_grace_ms();
        die("%sNCCL: %s; %s (set NCCL_DEBUG=INFO for details)", this_rank.rank ? "" : "rank 0: ",
            ncclGetErrorString(result), ncclGetLastError(comm));
    }
}
#else
typedef struct ncclComm *ncclComm_t;
#define nccl_check(...) die("this program was built without NCCL")
#define nccl_ask(comm) nccl_check(comm)
#endif

#define cuda_check(...) cuda_check_at((__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)
#define cublas_check(...) cublas_check_at((__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)

// launch(kernel, grid, block, shared_memory_bytes, stream, arguments...) launches a kernel and
// converts its arguments as in a function call. Kernel templates are named with all their template
// arguments. SHARED(type, name, [dims]) declares static shared memory, DYN_SHARED(type, name) the
// dynamic shared memory whose size is given at the launch, and DYN_TILES the same, starting at a
// multiple of 1024 bytes, for tiles that wgmma reads. UNROLL precedes long loops whose counter
// must be a compile-time constant so that an array stays in registers. After FORGET the compiler
// assumes nothing about a variable's value.
#if !CUDA_CPU
template <class... P, class... A>
static void launch_at(const char *file, int line, const char *name, void (*kernel)(P...), dim3 grid,
                      dim3 block, size_t shared_bytes, cudaStream_t stream, A... arguments) {
    static_assert(sizeof...(P) == sizeof...(A), "wrong number of kernel arguments");
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    cuda_check_at(cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...), name, file,
                  line);
}

#define launch(kernel, ...) launch_at(__FILE__, __LINE__, "launch of " #kernel, kernel, __VA_ARGS__)
#define SHARED(type, name, ...) __shared__ type name __VA_ARGS__
#define DYN_SHARED(type, name)                                                                     \
    extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];                        \
    type *name = reinterpret_cast<type *>(dynamic_shared_memory)
#define DYN_TILES(type, name)                                                                      \
    extern __shared__ __align__(1024) unsigned char dynamic_tiles[];                               \
    type *name = reinterpret_cast<type *>(dynamic_tiles)
#define UNROLL _Pragma("unroll")
#define FORGET(word) asm volatile("" : "+r"(word))
#else
#undef launch
#define launch(kernel, ...)                                                                        \
    (cuda_check_at(emu_launch_error(__LINE__), "launch of " #kernel, __FILE__, __LINE__),          \
     emu::launch_kernel(#kernel ", " #__VA_ARGS__, kernel, __VA_ARGS__))
#define DYN_TILES DYN_SHARED
#define UNROLL
#define FORGET(word) (void)(word)
#endif

// Properties of an element type. A type without a specialization of `traits` does not compile.
struct Element {
    const char *name;
    Type type;                 // type in the memory plan
    cudaDataType_t cuda_type;  // type in cuBLASLt
    int capability;            // minimum compute capability of its kernels, without the dot
    double unit;               // maximum relative error of rounding to nearest
    bool narrow;  // small exponent range: needs a loss scale, fp32 gradients and fp32 master
};
template <class E> constexpr Element traits = E::has_no_row_here;
template <> constexpr Element traits<float> = {"fp32", TYPE_FP32, CUDA_R_32F, 0, 0x1p-24, false};
template <> constexpr Element traits<__half> = {"fp16", TYPE_FP16, CUDA_R_16F, 75, 0x1p-11, true};
template <>
constexpr Element traits<__nv_bfloat16> = {"bf16", TYPE_BF16, CUDA_R_16BF, 80, 0x1p-8, false};
template <class E> constexpr bool is_fp32 = traits<E>.type == TYPE_FP32;  // otherwise 16 bits

// Calls f(E()), where E is the element type named by `type`. A run can train in these three types.
template <class F> static void with_type(Type type, F f) {
    check(type <= TYPE_FP16, "unknown element type %d", (int)type);
    type == TYPE_FP32 ? f(float()) : type == TYPE_BF16 ? f(__nv_bfloat16()) : f(__half());
}

// Calls f(E(), G()) for the run's types of weights and of matrix gradients. No function but these
// two maps a run's settings to C++ types.
template <class F> static void with_types(const Settings *s, F f) {
    with_type(s->dtype, [&](auto element) {
        std::conditional_t<traits<decltype(element)>.narrow, float, decltype(element)> same{};
        s->grad_dtype == s->dtype ? f(element, same) : f(element, float());
    });
}

// Conversion to E rounds to nearest, ties to even.
__host__ __device__ inline float to_float(float x) { return x; }
__host__ __device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__host__ __device__ inline float to_float(__half x) { return __half2float(x); }

template <class E> __host__ __device__ inline E from_float(float x) {
    if constexpr (is_fp32<E>) {
        return x;
    } else if constexpr (std::is_same_v<E, __nv_bfloat16>) {
        return __float2bfloat16_rn(x);
    } else {
        return __float2half_rn(x);
    }
}

// A pack is 16 bytes of E, loaded or stored by one instruction.
template <class E> struct alignas(16) Pack {
    static constexpr int size = 16 / (int)sizeof(E);
    E x[size];
};

template <class E> __device__ inline Pack<E> pack_from_bits(uint4 bits) {
    Pack<E> pack;
    memcpy(&pack, &bits, sizeof(bits));
    return pack;
}

template <class E> __device__ inline uint4 pack_to_bits(const Pack<E> &pack) {
    uint4 bits;
    memcpy(&bits, &pack, sizeof(bits));
    return bits;
}

// Prevents the compiler from reusing values already converted from a pack, so that registers hold
// the pack's 16 bytes and not the same values as fp32, which need twice the space.
template <class E> __device__ inline void pack_forget(Pack<E> &pack) {
    uint4 bits = pack_to_bits(pack);
    FORGET(bits.x);
    FORGET(bits.y);
    FORGET(bits.z);
    FORGET(bits.w);
    pack = pack_from_bits<E>(bits);
}

template <class E> __device__ inline Pack<E> pack_load(const E *address) {
    return pack_from_bits<E>(*reinterpret_cast<const uint4 *>(address));
}

template <class E> __device__ inline void pack_store(E *address, const Pack<E> &pack) {
    *reinterpret_cast<uint4 *>(address) = pack_to_bits(pack);
}

// Convert a bf16 number to its bits and back. They use memcpy, because CUDA 12.0 and 12.1 provide
// __bfloat16_as_ushort and __ushort_as_bfloat16 only from sm_80 on, and the code must compile for
// sm_75 even if it traps there.
__device__ __forceinline__ uint16_t bf16_bits(__nv_bfloat16 x) {
    uint16_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

__device__ __forceinline__ __nv_bfloat16 bf16_from_bits(uint16_t bits) {
    __nv_bfloat16 x;
    memcpy((void *)&x, &bits, sizeof x);
    return x;
}

// pack2: rounds two floats to nearest even and packs them into one register, lo in the low half
// (one cvt.rn.bf16x2.f32 or cvt.rn.f16x2.f32 from sm_80 on).
template <class E> __device__ __forceinline__ uint32_t pack2(float lo, float hi) {
    uint32_t bits;
    if constexpr (std::is_same_v<E, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
        memcpy(&bits, &pair, sizeof bits);
    } else {
        const __half2 pair = __floats2half2_rn(lo, hi);
        memcpy(&bits, &pair, sizeof bits);
    }
    return bits;
}

// unpack2: converts the two numbers in a register to floats. For bf16 it uses a shift and a mask;
// with an element-wise conversion the compiler would first move each upper half down.
template <class E>
__device__ __forceinline__ void unpack2(float *lo, float *hi, uint32_t bits) {
    if constexpr (std::is_same_v<E, __nv_bfloat16>) {
        *lo = __uint_as_float(bits << 16);
        *hi = __uint_as_float(bits & 0xffff0000u);
    } else {
        *lo = __half2float(__ushort_as_half((unsigned short)bits));
        *hi = __half2float(__ushort_as_half((unsigned short)(bits >> 16)));
    }
}

// pack_to_floats converts a pack to floats; pack_round rounds floats to a pack. Both convert 16-bit
// types two at a time.
template <class E>
__device__ inline void pack_to_floats(float (&x)[Pack<E>::size], const Pack<E> &pack) {
    if constexpr (is_fp32<E>) {
        UNROLL
        for (int i = 0; i < Pack<E>::size; i++) {
            x[i] = pack.x[i];
        }
    } else {
        const uint4 bits = pack_to_bits(pack);
        unpack2<E>(&x[0], &x[1], bits.x);
        unpack2<E>(&x[2], &x[3], bits.y);
        unpack2<E>(&x[4], &x[5], bits.z);
        unpack2<E>(&x[6], &x[7], bits.w);
    }
}

template <class E> __device__ inline Pack<E> pack_round(const float (&x)[Pack<E>::size]) {
    if constexpr (is_fp32<E>) {
        Pack<E> pack;
        UNROLL
        for (int i = 0; i < Pack<E>::size; i++) {
            pack.x[i] = x[i];
        }
        return pack;
    } else {
        return pack_from_bits<E>(make_uint4(pack2<E>(x[0], x[1]), pack2<E>(x[2], x[3]),
                                            pack2<E>(x[4], x[5]), pack2<E>(x[6], x[7])));
    }
}

// max2: applies fmaxf to the low halves and to the high halves of two registers. It is one HMNMX2
// instruction from sm_80 on; for older GPUs CUDA 12.0 and 12.1 provide __hmax2 only for fp16.
template <class E> __device__ __forceinline__ uint32_t max2(uint32_t a, uint32_t b) {
    constexpr bool is_bf16 = std::is_same_v<E, __nv_bfloat16>;
#if CUDA_CPU
    constexpr bool has_hmax2 = false;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    constexpr bool has_hmax2 = true;
#else
    constexpr bool has_hmax2 = !is_bf16;
#endif
    if constexpr (has_hmax2) {
        std::conditional_t<is_bf16, __nv_bfloat162, __half2> x, y;
        memcpy(&x, &a, sizeof x);
        memcpy(&y, &b, sizeof y);
        x = __hmax2(x, y);
        memcpy(&a, &x, sizeof a);
        return a;
    } else {
        float low_a, high_a, low_b, high_b;
        unpack2<E>(&low_a, &high_a, a);
        unpack2<E>(&low_b, &high_b, b);
        return pack2<E>(fmaxf(low_a, low_b), fmaxf(high_a, high_b));
    }
}

// Sets top[i] = max(top[i], pack[i]) for every element i.
template <class E> __device__ inline void pack_raise(Pack<E> &top, const Pack<E> &pack) {
    if constexpr (is_fp32<E>) {
        UNROLL
        for (int i = 0; i < Pack<E>::size; i++) {
            top.x[i] = fmaxf(top.x[i], pack.x[i]);
        }
    } else {
        const uint4 a = pack_to_bits(top), b = pack_to_bits(pack);
        top = pack_from_bits<E>(make_uint4(max2<E>(a.x, b.x), max2<E>(a.y, b.y),
                                           max2<E>(a.z, b.z), max2<E>(a.w, b.w)));
    }
}

// Returns the largest element of a pack.
template <class E> __device__ inline float pack_max(const Pack<E> &pack) {
    if constexpr (is_fp32<E>) {
        return fmaxf(fmaxf(pack.x[0], pack.x[1]), fmaxf(pack.x[2], pack.x[3]));
    } else {
        const uint4 bits = pack_to_bits(pack);
        float low, high;
        unpack2<E>(&low, &high, max2<E>(max2<E>(bits.x, bits.y), max2<E>(bits.z, bits.w)));
        return fmaxf(low, high);
    }
}

// Keeps a pack's first n elements and replaces the others by minus infinity; n may be negative or
// exceed the pack's size.
template <class E> __device__ inline void pack_keep(Pack<E> &pack, int n) {
    if constexpr (is_fp32<E>) {
        for (int i = 0; i < Pack<E>::size; i++) {
            pack.x[i] = i < n ? pack.x[i] : -INFINITY;
        }
    } else {
        const uint32_t none = pack2<E>(-INFINITY, -INFINITY);
        uint4 bits = pack_to_bits(pack);
        auto keep = [&](uint32_t &word, int from) {
            const uint32_t low = (word & 0xffffu) | (none & 0xffff0000u);
            word = n > from + 1 ? word : n > from ? low : none;
        };
        keep(bits.x, 0);
        keep(bits.y, 2);
        keep(bits.z, 4);
        keep(bits.w, 6);
        pack = pack_from_bits<E>(bits);
    }
}

// vector_load loads n numbers of type T at `address` as floats; vector_store rounds n floats to T
// and stores them. Both use n / Pack<T>::size accesses of 16 bytes.
template <class T, int n> __device__ inline void vector_load(float (&x)[n], const T *address) {
    static_assert(n % Pack<T>::size == 0, "not a multiple of 16 bytes");
    UNROLL
    for (int i = 0; i < n; i += Pack<T>::size) {
        float part[Pack<T>::size];
        pack_to_floats(part, pack_load(address + i));
        UNROLL
        for (int k = 0; k < Pack<T>::size; k++) {
            x[i + k] = part[k];
        }
    }
}

template <class T, int n> __device__ inline void vector_store(T *address, const float (&x)[n]) {
    static_assert(n % Pack<T>::size == 0, "not a multiple of 16 bytes");
    UNROLL
    for (int i = 0; i < n; i += Pack<T>::size) {
        float part[Pack<T>::size];
        UNROLL
        for (int k = 0; k < Pack<T>::size; k++) {
            part[k] = x[i + k];
        }
        pack_store(address + i, pack_round<T>(part));
    }
}

// Polls NCCL for errors ten times a second until query() of a stream or event reports completion,
// because after an NCCL failure a rank would otherwise wait forever inside CUDA. Must run in the
// thread that makes all other NCCL calls: only one thread at a time may use a communicator (NCCL
// user guide, "Thread Safety"). A launch into a full queue blocks without polling; --timeout then
// ends the run.
static ncclComm_t nccl_open;  // null: this process has no communicator
template <class Query> static void nccl_look(Query query) {
    double asked_ms = now_ms();
    cudaError_t result = cudaSuccess;
    while (nccl_open && (result = query()) == cudaErrorNotReady) {
        (void)cudaGetLastError();  // clear cudaErrorNotReady, which CUDA records as an error
        if (now_ms() - asked_ms > 100) {
            nccl_ask(nccl_open);
            asked_ms = now_ms();
        }
        sched_yield();
    }
    cuda_check_at(result, "cudaStreamQuery or cudaEventQuery", __FILE__, __LINE__);
}

// Waits until all work on the stream has completed.
static void stream_wait(cudaStream_t stream) {
    nccl_look([=] { return cudaStreamQuery(stream); });
    cuda_check(cudaStreamSynchronize(stream));
}

// Copies `bytes` bytes between a buffer in device or pinned host memory and pageable host memory,
// in stream order, and returns when the copy is complete. (cudaMemcpy would run on the default
// stream, with which our stream does not synchronize; a host-to-host copy may not wait for earlier
// work even on its own stream.)
static void copy_wait(void *to, const void *from, size_t bytes, cudaStream_t stream) {
    stream_wait(stream);
    cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
    stream_wait(stream);
}

// Returns how many milliseconds one call of work(i), i = 0, 1, ..., takes on the stream: the median
// of `rounds` (1 to 99) measurements. Each measurement is the mean of enough calls to take about
// half a millisecond, at most 32. The first call warms up and the second determines the number of
// calls per measurement; neither is included.
template <class Work> static double gpu_time_ms(int rounds, cudaStream_t stream, Work work) {
    double ms[99];
    cudaEvent_t begin, end;
    int calls = 0, each = 1;
    check(rounds >= 1 && rounds <= 99, "%d rounds", rounds);
    cuda_check(cudaEventCreate(&begin));
    cuda_check(cudaEventCreate(&end));
    work(calls++);
    for (int round = -1; round < rounds; round++) {
        float elapsed = 0;
        cuda_check(cudaEventRecord(begin, stream));
        for (int i = 0; i < each; i++) {
            work(calls++);
        }
        cuda_check(cudaEventRecord(end, stream));
        cuda_check(cudaEventSynchronize(end));
        cuda_check(cudaEventElapsedTime(&elapsed, begin, end));
        if (round < 0) {
            each = elapsed > 0.5 / 32 ? (int)ceil(0.5 / elapsed) : 32;
        } else {
            ms[round] = elapsed / each;
        }
    }
    cuda_check(cudaEventDestroy(begin));
    cuda_check(cudaEventDestroy(end));
    return median(ms, rounds);
}

// check_rows(E, columns, pointers...): checks that rows of `columns` numbers of E are multiples of
// 16 bytes and that every pointer is 16-byte aligned. A null pointer (an omitted operand) passes.
#define check_rows(E, columns, ...)                                                                \
    check_rows_at<E>(__func__, columns, #__VA_ARGS__, {__VA_ARGS__})
template <class E>
static void check_rows_at(const char *launcher, size_t columns, const char *names,
                          std::initializer_list<const void *> pointers) {
    check(columns % Pack<E>::size == 0, "%s: a row of %zu numbers is not a multiple of 16 bytes",
          launcher, columns);
    int number = 0;
    for (const void *pointer : pointers) {
        number++;
        check((uintptr_t)pointer % 16 == 0, "%s: pointer %d of (%s) is not a multiple of 16 bytes",
              launcher, number, names);
    }
}

constexpr int CHANNELS_MAX = 4096;  // one block of LayerNorm's backward spans a row, even in fp32
constexpr int CHANNELS_UNIT = 8;    // 16 bytes of a 16-bit type; also the unit of AdamW's ranges
constexpr int GRID_YZ_MAX = 65535;  // maximum grid size in y and z (CUDA C++ Programming Guide)
constexpr int LENGTH_MAX = 4 * GRID_YZ_MAX;  // tokens: fp32 attention processes four rows per block

// -------------------------------------------------------------------------------------------------
// 25. Warp and block toolbox
// Sums and maxima over a warp and over a thread block.
// 1. The order of every sum is fixed by the shape alone, so the same input gives the same bits in
//    every run; this file contains no float atomics.
// 2. All threads of a warp or block participate, and all of them get the result.
// 3. Random numbers on the device are computed by the same function as on the CPU, philox4x32 of
//    chapter Random numbers.

constexpr int WARP = 32;
constexpr int BLOCK_MAX = 1024;
constexpr unsigned ALL_LANES = 0xffffffffu;

// Butterfly reduction over 16, 8, 4, 2, 1: every lane computes the same sum in the same order.
__device__ inline float warp_sum(float x) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
        x += __shfl_xor_sync(ALL_LANES, x, lanes);
    }
    return x;
}

__device__ inline float warp_max(float x) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, lanes));
    }
    return x;
}

// Reduces each of n numbers over the blockDim.x threads (a multiple of WARP) of a row of the thread
// block; the blockDim.y rows are reduced independently. nothing: identity element of `combine`.
// Rows of a single warp need no barrier, so they may diverge; otherwise every thread of the block
// must call this. WARPS: blockDim.x / WARP if that is known at compile time, else 0. With nonzero
// WARPS the warps' values are combined in order; with 0 they are combined by a butterfly as within
// a warp, which is faster for many warps.
template <int WARPS, int n, class F>
__device__ inline void row_combine(float (&x)[n], float nothing, F combine) {
    SHARED(float, values, [n][BLOCK_MAX / WARP]);
    const int warps = WARPS ? WARPS : blockDim.x / WARP, first = threadIdx.y * warps;
    const int lane = threadIdx.x % WARP;
    auto butterfly = [&](float y) {
        for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
            y = combine(y, __shfl_xor_sync(ALL_LANES, y, lanes));
        }
        return y;
    };
    UNROLL
    for (int i = 0; i < n; i++) {
        x[i] = butterfly(x[i]);
        if (warps > 1 && lane == 0) {
            values[i][first + threadIdx.x / WARP] = x[i];
        }
    }
    if (warps == 1) {
        return;
    }
    __syncthreads();  // all warps' values are written
    UNROLL
    for (int i = 0; i < n; i++) {
        if constexpr (WARPS) {
            x[i] = values[i][first];
            for (int warp = 1; warp < warps; warp++) {
                x[i] = combine(x[i], values[i][first + warp]);
            }
        } else {
            x[i] = butterfly(lane < warps ? values[i][first + lane] : nothing);
        }
    }
    __syncthreads();  // all values are read: the next call may overwrite them
}

template <int WARPS = 0, int n> __device__ inline void row_sum(float (&x)[n]) {
    row_combine<WARPS>(x, 0.0f, [](float a, float b) { return a + b; });
}

__device__ inline float row_sum(float x) {
    float sum[1] = {x};
    row_sum(sum);
    return sum[0];
}

__device__ inline float row_max(float x) {
    float maximum[1] = {x};
    row_combine<0>(maximum, -INFINITY, [](float a, float b) { return fmaxf(a, b); });
    return maximum[0];
}

// Returns the total of four partial sums. Kernels add element i of a pack to sums[i % 4], because
// additions to four independent sums need not wait for each other.
__device__ inline float add_four(const float (&sums)[4]) {
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Sums each of a thread's `n` numbers over threadIdx.y, in the order of y; the threads with y = 0
// get the sums. buffer: blockDim.x * blockDim.y * n floats of shared memory, which may be reused
// when the call returns.
template <int n> __device__ inline void column_sum(float (&x)[n], float *buffer) {
    if (blockDim.y == 1) {
        return;
    }
    int stride = blockDim.x;
    UNROLL
    for (int i = 0; i < n; i++) {
        buffer[(threadIdx.y * n + i) * stride + threadIdx.x] = x[i];
    }
    __syncthreads();  // all numbers are written
    if (threadIdx.y == 0) {
        UNROLL
        for (int i = 0; i < n; i++) {
            for (int y = 1; y < (int)blockDim.y; y++) {
                x[i] += buffer[(y * n + i) * stride + threadIdx.x];
            }
        }
    }
    __syncthreads();  // all numbers are read: the buffer may be used again
}

// Returns the sum of f(i) for i = first, first + step, ... below `end`, in that order. The loads of
// four calls are in flight together, so that a kernel with few threads waits for memory a quarter
// as often.
template <class F>
__device__ inline float sum_strided(int first, int step, int end, F f) {
    constexpr int AHEAD = 4;
    float sum = 0.0f;
    for (int i = first; i < end; i += AHEAD * step) {
        float x[AHEAD];
        UNROLL
        for (int k = 0; k < AHEAD; k++) {
            x[k] = i + k * step < end ? f(i + k * step) : 0.0f;  // sum is never -0, so + 0 is exact
        }
        UNROLL
        for (int k = 0; k < AHEAD; k++) {
            sum += x[k];
        }
    }
    return sum;
}

// Second stage of sums over rows, for up to three tables: adds to sums.x[k][column] the sum of
// partials[k][part][column] over the parts, k = blockIdx.y. Thread y adds the parts y, y +
// blockDim.y, ...; then the threads' sums are added in order of y. partials (tables, parts,
// columns) fp32. Grid (columns / 32, tables), block (32, 1..32).
struct ColumnSums {
    float *x[3];  // (columns) each; the first null pointer ends the list
};

// budget: threads 1024 shared 4096 regs 38 blocks 1 test gpu_layernorm
static __global__ void partials_add_kernel(ColumnSums sums, const float *partials, int parts,
                                           int columns) {
    DYN_SHARED(float, buffer);
    int column = blockIdx.x * WARP + threadIdx.x;
    partials += (size_t)blockIdx.y * parts * columns + column;
    float sum[1] = {0.0f};
    if (column < columns) {
        sum[0] = sum_strided(threadIdx.y, blockDim.y, parts,
                             [&](int part) { return partials[(size_t)part * columns]; });
    }
    column_sum(sum, buffer);
    if (threadIdx.y == 0 && column < columns) {
        sums.x[blockIdx.y][column] += sum[0];
    }
}

// Adds to each table in `sums` the sum over the parts of partials (tables, parts, columns).
static void gpu_partials_add(ColumnSums sums, const float *partials, int parts, int columns,
                             cudaStream_t stream) {
    int slices = ceil_div(parts, 8) < WARP ? ceil_div(parts, 8) : WARP;
    int tables = sums.x[2] ? 3 : sums.x[1] ? 2 : 1;
    launch(partials_add_kernel, dim3(ceil_div(columns, WARP), tables), dim3(WARP, slices),
           WARP * slices * sizeof(float), stream, sums, partials, parts, columns);
}

// -------------------------------------------------------------------------------------------------
// 26. Tensor-core toolbox
// Each PTX instruction that this program uses is wrapped here once; no other chapter issues one.
// 1. Lane l of a warp is described by g = l / 4 and t = l % 4, as in the PTX ISA's fragment
//    figures.
// 2. A 32-bit register holds two 16-bit elements; the low half is the lower row, column or k.
// 3. E is __nv_bfloat16 or __half; sm_75 supports only __half. The features introduced with sm_80,
//    an mma with k = 16 and asynchronous copies that bypass registers, trap on older GPUs. mma_k16,
//    copy_16, copy_commit and copy_wait fall back to sm_75's features there, so kernels that call
//    these have one source for all GPUs.
// 4. On the CPU, functions of the same names in dev/cuda_cpu/emu_ptx.h and emu_wgmma.h follow the
//    ISA exactly, except that cp.async and wgmma run as late as allowed and that ex2 and rcp are
//    correctly rounded.
// 5. The wgmma functions exist on sm_90a only, and trap elsewhere.

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

#if !CUDA_CPU
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define BEFORE_SM80 true
#define NEEDS_SM80(...) __trap()
#else
#define BEFORE_SM80 false
#define NEEDS_SM80(...) asm volatile(__VA_ARGS__)
#endif

// mma_m16n8k16: d = a b + c for one warp; a is 16x16, b 16x8, c and d 16x8 in fp32.
// With g = lane / 4 and t = lane % 4, a lane holds
//   a[j]: row g + 8 (j % 2), columns 2t + 8 (j / 2) and the next;  b[j]: rows 2t + 8j and the next,
//   column g;  c[i], d[i]: row g + 8 (i / 2), column 2t + i % 2. Hence the accumulators of two
//   neighbouring n8 tiles, packed, are the operand a of an mma that sums over their columns.
// numerics: exact products, fp32 sums in an order chosen by the hardware (always the same).
// source: PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions: mma" and "Matrix Fragments
//   for mma.m16n8k16 with floating point type".
template <class E>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2], const float (&c)[4]) {
    if constexpr (std::is_same_v<E, __nv_bfloat16>) {
        NEEDS_SM80("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                   "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
                   : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]),
                     "f"(c[1]), "f"(c[2]), "f"(c[3]));
    } else {
        static_assert(std::is_same_v<E, __half>, "tensor cores here take bf16 and fp16");
        NEEDS_SM80("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                   "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
                   : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]),
                     "f"(c[1]), "f"(c[2]), "f"(c[3]));
    }
}

// mma_m16n8k8: the same for fp16 with a of 16x8 and b of 8x8: a[j] row g + 8j, columns 2t and the
//   next;  b k = 2t and the next, column g. It is half of mma_m16n8k16, with a[0], a[1] and b[0] or
//   with a[2], a[3] and b[1]. From sm_75 on.
// source: PTX ISA, "Matrix Fragments for mma.m16n8k8".
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b,
                                            const float (&c)[4]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// ldmatrix_x4: loads four 8x8 matrices of 16-bit elements from shared memory. Lane l passes the
// address of row l % 8 of matrix l / 8, `offset` bytes from `tile`: 16 bytes, 16-byte aligned. r[j]
// receives row g, columns 2t and 2t + 1 of matrix j; with TRANS, rows 2t and 2t + 1 of column g. A
// constant part of `offset` is free: it becomes the instruction's immediate offset.
// source: PTX ISA, "Warp-level matrix load instruction: ldmatrix".
template <bool TRANS>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void *tile, uint32_t offset) {
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(tile) + offset;
    if constexpr (TRANS) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    }
}

// Starts an asynchronous copy of 16 bytes from global to shared memory, bypassing registers and the
// L1 cache; both addresses are 16-byte aligned. If `valid` is false, zeros are written and src is
// not read (src-size). The bytes may be read after a commit, a wait that covers the group and, for
// bytes copied by other threads, a barrier. Source: PTX ISA, "Data Movement and Conversion:
// cp.async".
__device__ __forceinline__ void cp_async_16_zfill(void *dst, const void *src, bool valid) {
    NEEDS_SM80("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   (uint32_t)__cvta_generic_to_shared(dst)),
               "l"(src), "r"(valid ? 16 : 0)
               : "memory");
}

// Commits the copies that this thread has started since its last commit, as one group.
// source: PTX ISA, "cp.async.commit_group".
__device__ __forceinline__ void cp_async_commit() {
    NEEDS_SM80("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the N most recent groups of this thread are still in flight.
// source: PTX ISA, "cp.async.wait_group".
template <int N> __device__ __forceinline__ void cp_async_wait() {
    NEEDS_SM80("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ex2_approx: 2^x, relative error at most 2^-22; flushes denormal x and results to 0; 2^-inf = 0.
// source: PTX ISA, "Floating Point Instructions: ex2" (ex2.approx.ftz.f32).
__device__ __forceinline__ float ex2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// rcp_approx: 1 / x, relative error at most 2^-23; flushes denormal x and results to 0; 1 / inf =
// 0.
// source: PTX ISA, "Floating Point Instructions: rcp" (rcp.approx.ftz.f32).
__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#undef NEEDS_SM80

// Hopper's warpgroup matrix products, which read shared memory by themselves and run
// asynchronously. From its issue until a wait covers it, nothing may read or write a product's
// accumulators, or write the shared memory that it reads. All 128 threads of a warpgroup issue the
// same products, with the same descriptors, and never diverge in between.
// source: PTX ISA 9.0, section 9.7.15, "Asynchronous Warpgroup Level Matrix Instructions".
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define NEEDS_SM90A(...) asm volatile(__VA_ARGS__)
#else
#define NEEDS_SM90A(...) __trap()
#endif

// Returns the address that instructions use for shared memory.
__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

// Makes this thread's writes to shared memory, its finished cp.async included, visible to products
// that any thread issues after the next barrier.
// source: PTX ISA, section 9.7.15.4, "Async Proxy"; "membar / fence", fence.proxy.async.
__device__ __forceinline__ void fence_async() {
    NEEDS_SM90A("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders this thread's accesses to registers before the products that use them. Needed before the
// first product, and after each wait.
__device__ __forceinline__ void wgmma_fence() {
    NEEDS_SM90A("wgmma.fence.sync.aligned;" ::: "memory");
}

// Commits the products issued since the last commit, as one group.
__device__ __forceinline__ void wgmma_commit() {
    NEEDS_SM90A("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the N most recent groups are still in flight.
template <int N> __device__ __forceinline__ void wgmma_wait() {
    NEEDS_SM90A("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler, which does not know that a product may still be writing accumulators, from
// moving their uses before the wait that precedes this call.
__device__ __forceinline__ void settle(float (&d)[1][8][4]) {
    UNROLL
    for (int i = 0; i < 32; i++) {
        asm volatile("" : "+f"(d[0][i / 4][i % 4])::"memory");
    }
}

// wgmma: d (64,64) fp32 = a b or, with ADD, += a b, for bf16 a (64,16), b (16,64). Warp w of the
// warpgroup holds rows 16w to 16w + 15 of d, laid out as mma_m16n8k16's d for eight n8 tiles.
//   a: a descriptor of a K-major tile, or registers laid out as mma_m16n8k16's a;
//   b: a descriptor of a K-major tile (its rows are columns of b) or, with MN, of one whose rows
//   are k.
// source: PTX ISA, sections 9.7.15.5.1.1, "Register Fragments", and 9.7.15.5.2, "wgmma.mma_async".
#define D4(n) "+f"(d[0][n][0]), "+f"(d[0][n][1]), "+f"(d[0][n][2]), "+f"(d[0][n][3])
#define D32 D4(0), D4(1), D4(2), D4(3), D4(4), D4(5), D4(6), D4(7)
#define D32_LIST                                                                                   \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "  \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
template <bool ADD>
__device__ __forceinline__ void wgmma(float (&d)[1][8][4], uint64_t a, uint64_t b) {
    NEEDS_SM90A("{.reg .pred add; setp.ne.b32 add, %34, 0;\n"
                "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " D32_LIST
                "%32, %33, add, 1, 1, 0, 0;}"
                : D32
                : "l"(a), "l"(b), "n"(ADD));
}

template <bool ADD, bool MN>
__device__ __forceinline__ void wgmma(float (&d)[1][8][4], const uint32_t (&a)[4], uint64_t b) {
    NEEDS_SM90A("{.reg .pred add; setp.ne.b32 add, %37, 0;\n"
                "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " D32_LIST
                "{%32, %33, %34, %35}, %36, add, 1, 1, %38;}"
                : D32
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ADD), "n"(MN));
}
#undef D4
#undef D32
#undef D32_LIST
#undef NEEDS_SM90A
#else
#define BEFORE_SM80 (emu::set.cc < 80)  // the emulated GPU's capability is a setting
#endif

// mma_k16: mma_m16n8k16 or, before sm_80, its two halves one after the other.
// numerics: before sm_80 a sum of sixteen products is rounded once more in the middle, so its last
// bits may differ from sm_80's; on the CPU, which adds product by product, they are the same.
template <class E>
__device__ __forceinline__ void mma_k16(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2], const float (&c)[4]) {
    if (std::is_same_v<E, __half> && BEFORE_SM80) {
        mma_m16n8k8(d, {a[0], a[1]}, b[0], c);
        mma_m16n8k8(d, {a[2], a[3]}, b[1], d);
    } else {
        mma_m16n8k16<E>(d, a, b, c);
    }
}

// copy_16, copy_commit, copy_wait: versions of cp_async_16_zfill, cp_async_commit and cp_async_wait
// for every GPU. Before sm_80 the copy goes through registers and is synchronous; only the barrier
// is still needed before other threads read it. The thread stalls on the load, while other thread
// blocks of the SM compute.
__device__ __forceinline__ void copy_16(void *dst, const void *src, bool valid) {
    if (BEFORE_SM80) {
        *(uint4 *)dst = valid ? *(const uint4 *)src : make_uint4(0, 0, 0, 0);
    } else {
        cp_async_16_zfill(dst, src, valid);
    }
}

__device__ __forceinline__ void copy_commit() {
    if (!BEFORE_SM80) {
        cp_async_commit();
    }
}

template <int N> __device__ __forceinline__ void copy_wait() {
    if (!BEFORE_SM80) {
        cp_async_wait<N>();
    }
}

// tile_descriptor: returns wgmma's descriptor of a tile in shared memory, `offset` bytes from
// `tile`. Its rows are 128 bytes of 64 16-bit elements, swizzled like tile_offset<64>; it starts at
// a multiple of 1024 bytes, as the swizzle does. columns64: bytes from 64 columns to the next 64,
// used by MN-major tiles wider than that. Adding DESCRIPTOR_K advances it by 16 columns,
// DESCRIPTOR_MN by 16 rows.
//   bits 0..13 start >> 4   16..29 columns64 >> 4   32..45 bytes from 8 rows to the next 8, >> 4
//   62..63 1: 128-byte swizzle
// source: PTX ISA, sections 9.7.15.5.1.2.2, "Matrix Descriptor Format", and "Strides"; NVIDIA's
//   cutlass, include/cute/arch/mma_sm90_desc.hpp, agrees.
constexpr int DESCRIPTOR_K = 32 >> 4, DESCRIPTOR_MN = 2048 >> 4;

__device__ __forceinline__ uint64_t tile_descriptor(const void *tile, uint32_t offset,
                                                    uint32_t columns64 = 16) {
    const uint32_t at = shared_address(tile) + offset;
    return (uint64_t)1 << 62 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)(columns64 >> 4) << 16 |
           (at & 0x3ffff) >> 4;
}

// d (64,64) = A B^T: the 64 columns of a K-major tile a, 64 rows, times those of tile b.
__device__ __forceinline__ void wgmma_abt(float (&d)[1][8][4], uint64_t a, uint64_t b) {
    wgmma<false>(d, a, b);
    wgmma<true>(d, a + DESCRIPTOR_K, b + DESCRIPTOR_K);
    wgmma<true>(d, a + 2 * DESCRIPTOR_K, b + 2 * DESCRIPTOR_K);
    wgmma<true>(d, a + 3 * DESCRIPTOR_K, b + 3 * DESCRIPTOR_K);
}

// d (64,64) += p B: p (64,64), fragments of 16 columns in registers, times the 64 rows of tile b.
__device__ __forceinline__ void wgmma_add(float (&d)[1][8][4], const uint32_t (&p)[4][4],
                                          uint64_t b) {
    wgmma<true, true>(d, p[0], b);
    wgmma<true, true>(d, p[1], b + DESCRIPTOR_MN);
    wgmma<true, true>(d, p[2], b + 2 * DESCRIPTOR_MN);
    wgmma<true, true>(d, p[3], b + 3 * DESCRIPTOR_MN);
}

// Returns which warpgroup of the block this is. The shuffle tells the compiler that the number is
// the same in a whole warp, so that descriptors are computed in uniform registers. Traps if tiles
// do not start at a multiple of 1024, because wgmma would read another swizzle.
__device__ __forceinline__ int warpgroup_index(const void *tiles) {
    if (shared_address(tiles) % 1024 != 0) {
        __trap();
    }
    return __shfl_sync(ALL_LANES, (int)threadIdx.x / (4 * WARP), 0);
}

// Returns 1 / x, accurate if E is fp32. Otherwise it is the hardware's approximation, since the
// result is rounded to 16 bits anyway.
template <class E> __device__ inline float reciprocal(float x) {
    return is_fp32<E> ? 1.0f / x : rcp_approx(x);
}

// =================================================================================================
// Part G. Kernels

// -------------------------------------------------------------------------------------------------
// 27. Embedding
// The forward pass is a gather. The backward pass uses sums in a fixed order, without atomics: the
// gradient of a position is the sum of its rows over the batch; a token's rows are grouped by a
// counting sort of the batch's tokens, done on the host when the batch is prepared and uploaded
// with it.
// 1. The sort is stable, so a token's rows are added in batch order.
// 2. The gradient of wte is read and written once for each token that occurs. It already contains
//    the gradient from the classifier, whose weight is also wte.

constexpr int EMBEDDING_THREADS = 256;
constexpr int EMBEDDING_ROWS = 8;  // maximum blockDim.y of the kernels here
constexpr int POSITIONS_MAX = INT_MAX - 8 * EMBEDDING_THREADS;  // limit of int indices into wpe

// The token plan of a batch, in one array of 3 N + 1 ints so that a single copy uploads it.
//   order (N): the rows, grouped by token; start (N + 1): segment s is order[start[s]] ..
//   order[start[s+1]-1]; token (N): the token of segment s.
struct EmbeddingPlan {
    int *order, *start, *token;
};

static int embedding_plan_ints(int N) { return 3 * N + 1; }

static EmbeddingPlan embedding_plan(int *ints, int N) {
    return EmbeddingPlan{ints, ints + N, ints + 2 * N + 1};
}

// Fills the token plan of tokens (N), each below V, and returns its number of segments.
// counts (V): scratch.
static int embedding_sort(int *ints, int *counts, const Token *tokens, int N, int V) {
    EmbeddingPlan plan = embedding_plan(ints, N);
    memset(counts, 0, V * sizeof(int));
    for (int i = 0; i < N; i++) {
        counts[tokens[i]]++;
    }
    int segments = 0, rows = 0;
    for (int v = 0; v < V; v++) {
        if (counts[v] > 0) {
            plan.start[segments] = rows;
            plan.token[segments++] = v;
            rows += counts[v];
            counts[v] = plan.start[segments - 1];  // now the position of the token's next row
        }
    }
    plan.start[segments] = N;
    for (int i = 0; i < N; i++) {
        plan.order[counts[tokens[i]]++] = i;
    }
    return segments;
}

// out[row] = wte[tokens[row]] + wpe[row % T]. out (B,T,C), wte (Vp,C), wpe (T or more,C) of E;
// tokens (B,T). Block (32 packs of a row, rows), grid (B T / rows, C / (32 packs)). Exact except
// for the rounding to fp32 and E.
// budget: <bf16> threads 256 regs 24 blocks 6 test gpu_embedding
template <class E>
__global__ void embedding_forward_kernel(E *out, const int *tokens, const E *wte, const E *wpe,
                                         int N, int T, int C) {
    constexpr int size = Pack<E>::size;
    int c = (blockIdx.y * WARP + threadIdx.x) * size, row = blockIdx.x * blockDim.y + threadIdx.y;
    if (c < C && row < N) {
        float x[size], position[size];
        vector_load(x, wte + (size_t)tokens[row] * C + c);
        vector_load(position, wpe + (size_t)(row % T) * C + c);
        for (int i = 0; i < size; i++) {
            x[i] += position[i];
        }
        vector_store(out + (size_t)row * C + c, x);
    }
}

// Each thread block handles up to EMBEDDING_ROWS rows. C must be a multiple of the pack size.
template <class E>
static void gpu_embedding_forward(E *out, const int *tokens, const E *wte, const E *wpe, int B,
                                  int T, int C, cudaStream_t stream) {
    constexpr int size = Pack<E>::size;
    check_rows(E, C, out, wte, wpe);
    int N = B * T, rows = N < EMBEDDING_ROWS ? N : EMBEDDING_ROWS;
    launch(embedding_forward_kernel<E>, dim3(ceil_div(N, rows), ceil_div(C, WARP * size)),
           dim3(WARP, rows), 0, stream, out, tokens, wte, wpe, N, T, C);
}

// dwpe[t] = (if `first`) or += the sum over b of dout[b][t], b ascending, t < T; with `first`, rows
// T .. max_T - 1 are set to zero.
//   dwpe (max_T,C) of G, dout (B,T,C) of E. One thread per 16 bytes of a row of dout.
// budget: <bf16> threads 256 regs 40 blocks 6 test gpu_embedding
template <class E, class G>
__global__ void embedding_backward_position_kernel(G *dwpe, const E *dout, int B, int T, int C,
                                                   int max_T, bool first) {
    constexpr int size = Pack<E>::size;
    int at = (blockIdx.x * blockDim.x + threadIdx.x) * size;
    if (at >= (first ? max_T : T) * C) {
        return;
    }
    float sum[size] = {};
    if (!first) {
        vector_load(sum, dwpe + at);
    }
    for (int b = 0; b < B && at < T * C; b++) {
        float d[size];
        vector_load(d, dout + (size_t)b * T * C + at);
        for (int i = 0; i < size; i++) {
            sum[i] += d[i];
        }
    }
    vector_store(dwpe + at, sum);
}

// dwte[token] += sum of dout[row] over the token's rows, for each token of the plan.
//   dwte (Vp,C) of G, dout (N,C) of E. Grid (segments, C / (32 packs)), block (32, 1..8): thread y
//   adds the rows y, y + blockDim.y, ... of the segment, then the threads' sums are added in order.
// budget: <bf16> threads 256 shared 8192 regs 40 blocks 6 test gpu_embedding
template <class E, class G>
__global__ void embedding_backward_token_kernel(G *dwte, const E *dout, const int *order,
                                                const int *start, const int *token, int C) {
    DYN_SHARED(float, buffer);
    constexpr int size = Pack<E>::size;
    int c = (blockIdx.y * WARP + threadIdx.x) * size, end = start[blockIdx.x + 1];
    float sum[size] = {};
    for (int i = start[blockIdx.x] + threadIdx.y; i < end && c < C; i += blockDim.y) {
        float d[size];
        vector_load(d, dout + (size_t)order[i] * C + c);
        for (int k = 0; k < size; k++) {
            sum[k] += d[k];
        }
    }
    column_sum(sum, buffer);
    if (threadIdx.y == 0 && c < C) {
        float d[size];
        G *row = dwte + (size_t)token[blockIdx.x] * C + c;
        vector_load(d, row);
        for (int k = 0; k < size; k++) {
            d[k] += sum[k];
        }
        vector_store(row, d);
    }
}

// Computes the gradients of the embedding: dwte (Vp,C) += and dwpe (max_T,C) = (if `first`) or +=,
// both of G; dout (B,T,C) of E. plan_ints: device copy of the ints that embedding_sort wrote for
// the same tokens; segments: the number it returned.
template <class E, class G>
static void gpu_embedding_backward(G *dwte, G *dwpe, const E *dout, int *plan_ints, int segments,
                                   int B, int T, int C, int max_T, bool first,
                                   cudaStream_t stream) {
    constexpr int size = Pack<E>::size;
    check_rows(E, C, dwte, dwpe, dout);
    check((int64_t)max_T * C <= POSITIONS_MAX, "%d positions of %d channels", max_T, C);
    int N = B * T, packs = (first ? max_T : T) * (C / size);
    int threads = packs < EMBEDDING_THREADS ? ceil_div(packs, WARP) * WARP : EMBEDDING_THREADS;
    launch(embedding_backward_position_kernel<E, G>, ceil_div(packs, threads), threads, 0, stream,
           dwpe, dout, B, T, C, max_T, first);
    EmbeddingPlan plan = embedding_plan(plan_ints, N);
    int rows = ceil_div(N, segments) < EMBEDDING_ROWS ? ceil_div(N, segments) : EMBEDDING_ROWS;
    launch(embedding_backward_token_kernel<E, G>, dim3(segments, ceil_div(C, WARP * size)),
           dim3(WARP, rows), WARP * rows * size * sizeof(float), stream, dwte, dout, plan.order,
           plan.start, plan.token, C);
}

// -------------------------------------------------------------------------------------------------
// 28. LayerNorm and residual
// Residual additions are fused into kernels that process the data anyway. In the forward pass the
// preceding matmul writes inp weight^T + bias + residual (chapter Matmul), so LayerNorm itself
// reads one tensor and writes one. In the backward pass LayerNorm adds its gradient to the
// residual's.
// 1. A row is normalised in fp32; its mean and variance are computed in two passes over registers.
// 2. The number of partial sums depends on the shape alone, never on the GPU.

constexpr int LAYERNORM_PACKS = 4;      // 16-byte loads held by a thread of the forward kernel
constexpr int LAYERNORM_ROWS = 8;       // one-warp rows per block of the forward kernel
constexpr int LAYERNORM_PARTS = 256;    // maximum number of partial sums of dweight and dbias
constexpr int LAYERNORM_THREADS = 384;  // per block of the backward kernel, unless a row needs more
constexpr float LAYERNORM_EPS = 1e-5f;

// Calls f(C) with C as a compile-time constant if it is the width of a preset, so that kernels of
// 16-bit types know all loop bounds. Otherwise calls f(0), and the kernels take C at run time.
template <class E, class F> static void with_channels(int C, F f) {
    if constexpr (!is_fp32<E>) {
        switch (C) {
        case 768: return f(std::integral_constant<int, 768>());
        case 1024: return f(std::integral_constant<int, 1024>());
        case 1280: return f(std::integral_constant<int, 1280>());
        case 1600: return f(std::integral_constant<int, 1600>());
        default: break;
        }
    }
    f(std::integral_constant<int, 0>());
}

// out = (inp - mean) * rstd * weight + bias for each row, rstd = 1 / sqrt(variance + 1e-5).
//   out, inp (N,C), weight, bias (C) of E; mean, rstd (N) fp32.
// Block (32 or more threads per row, rows). If C is a compile-time constant (CC), one warp
// processes a row and a block has eight rows. Otherwise (CC = 0) a thread holds up to
// LAYERNORM_PACKS packs: one warp processes a row of up to 1024 16-bit elements, and up to eight
// such rows share a block; each longer row has its own block. Bytes: reads and writes every row
// once. Errors relative to the tensor's norm, measured on the CPU layer, C 48..1600: fp32 out
// 1.1e-7, mean 1.5e-7, rstd 7e-8; bf16 the rounding error of the output.
// budget: <bf16, 0> threads 256 regs 64 blocks 4 test gpu_layernorm
// budget: <bf16, 768> threads 256 regs 48 blocks 5 instr/elem 13.2 of 24 test gpu_layernorm
// budget: <bf16, 1024> threads 256 regs 63 blocks 4 instr/elem 12.2 of 32 test gpu_layernorm
// budget: <bf16, 1280> threads 256 regs 64 blocks 4 instr/elem 11.3 of 40 test gpu_layernorm
// budget: <bf16, 1600> threads 256 regs 76 blocks 3 instr/elem 12.4 of 50 test gpu_layernorm
// budget: <fp16, 768> sm 75 threads 256 regs 64 blocks 4 instr/elem 13.9 of 24 test gpu_layernorm
template <class E, int CC>
__global__ void __launch_bounds__(CC ? LAYERNORM_ROWS * WARP : BLOCK_MAX)
    // NOLINTNEXTLINE(readability-function-size): the row stays in registers
    layernorm_forward_kernel(E *out, float *mean, float *rstd, const E *inp, const E *weight,
                             const E *bias, int N, int channels) {
    constexpr int size = Pack<E>::size;
    constexpr int packs = CC ? (CC + size * WARP - 1) / (size * WARP) : LAYERNORM_PACKS;
    const int C = CC ? CC : channels, row_threads = CC ? WARP : blockDim.x;
    const float inverse_C = 1.0f / (float)C;
    auto row_mean_of = [&](float x) { return (CC ? warp_sum(x) : row_sum(x)) * inverse_C; };
    // Returns whether this thread has a pack k, which starts at column c. Only a row's last packs
    // can be missing.
    auto has = [&](int k, int c) { return (k + 1) * WARP * size <= CC || c < C; };
    int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= N) {
        return;  // a whole warp; blocks of several rows contain no barrier
    }
    inp += (size_t)row * C;
    out += (size_t)row * C;
    // 1. Load the row into registers.
    float x[packs][size] = {};
    UNROLL
    for (int k = 0; k < packs; k++) {
        int c = (k * row_threads + threadIdx.x) * size;
        if (has(k, c)) {
            vector_load(x[k], inp + c);
        }
    }
    // 2. Compute the mean, then the variance; x becomes x - mean.
    float sums[4] = {}, squares[4] = {};
    UNROLL
    for (int k = 0; k < packs; k++) {
        for (int i = 0; i < size; i++) {
            sums[i % 4] += x[k][i];
        }
    }
    const float row_mean = row_mean_of(add_four(sums));
    UNROLL
    for (int k = 0; k < packs; k++) {
        if (has(k, (k * row_threads + threadIdx.x) * size)) {
            for (int i = 0; i < size; i++) {
                x[k][i] -= row_mean;
                squares[i % 4] = fmaf(x[k][i], x[k][i], squares[i % 4]);
            }
        }
    }
    const float row_rstd = 1.0f / sqrtf(row_mean_of(add_four(squares)) + LAYERNORM_EPS);
    if (threadIdx.x == 0) {
        mean[row] = row_mean;
        rstd[row] = row_rstd;
    }
    // 3. Normalise and write.
    UNROLL
    for (int k = 0; k < packs; k++) {
        int c = (k * row_threads + threadIdx.x) * size;
        if (has(k, c)) {
            float w[size], b[size];
            vector_load(w, weight + c);
            vector_load(b, bias + c);
            for (int i = 0; i < size; i++) {
                x[k][i] = fmaf(x[k][i] * row_rstd, w[i], b[i]);
            }
            vector_store(out + c, x[k]);
        }
    }
}

// Launches the forward kernel. Unless C is one of its compile-time constants, a row gets as many
// warps as it needs with LAYERNORM_PACKS packs per thread; one-warp rows share a block.
template <class E>
static void gpu_layernorm_forward(E *out, float *mean, float *rstd, const E *inp, const E *weight,
                                  const E *bias, int N, int C, cudaStream_t stream) {
    constexpr int size = Pack<E>::size;
    static_assert(CHANNELS_MAX <= LAYERNORM_PACKS * size * BLOCK_MAX, "a block spans a row");
    check_rows(E, C, out, inp, weight, bias);
    check(C <= CHANNELS_MAX, "LayerNorm of %d channels", C);
    int warps = ceil_div(C, LAYERNORM_PACKS * size * WARP);
    int rows = warps > 1 ? 1 : N < LAYERNORM_ROWS ? N : LAYERNORM_ROWS;
    with_channels<E>(C, [&](auto constant) {
        constexpr int CC = decltype(constant)::value;
        const dim3 block = CC ? dim3(WARP, LAYERNORM_ROWS) : dim3(warps * WARP, rows);
        launch((layernorm_forward_kernel<E, CC>), ceil_div(N, (int)block.y), block, 0, stream, out,
               mean, rstd, inp, weight, bias, N, C);
    });
}

// With norm = (inp - mean) * rstd and dnorm = dout * weight, for each row:
//   dinp = addend + rstd * (dnorm - average(dnorm) - norm * average(dnorm * norm));
//   partials = this block's sums over its rows of dout * norm, for dweight, of dout, for dbias, and
//   of dinp as rounded to E: the gradient of the bias of the matmul that produced inp.
//   dinp, dout, inp, addend (N,C), weight (C) of E; addend may be null, dinp may be addend or dout;
//   mean, rstd (N) and partials (3, gridDim.x, C) fp32.
// Block (one thread per 16 bytes of a row, rows): each thread keeps the same columns while the
// block iterates over rows, so the sums over rows stay in registers; if C is a compile-time
// constant (CC), the block has two rows in flight. Bytes: reads dout, inp and addend, writes dinp,
// once. Errors relative to the tensor's norm, measured on the CPU layer, C 48..1600: column sums
// 1.5e-7; dinp 1e-7 in fp32, the rounding error of the type in bf16.
// budget: <bf16, 0> threads 384 shared 12288 regs 64 blocks 2 test gpu_layernorm
// budget: <bf16, 768> threads 384 shared 12288 regs 80 blocks 2 instr/elem 30.3 of 16 loop
//   test gpu_layernorm
// budget: <bf16, 1024> threads 384 shared 12288 regs 80 blocks 2 instr/elem 30.7 of 16 loop
//   test gpu_layernorm
// budget: <bf16, 1280> threads 320 shared 10240 regs 80 blocks 2 instr/elem 31.3 of 16 loop
//   test gpu_layernorm
// budget: <bf16, 1600> threads 224 regs 80 blocks 3 instr/elem 32.3 of 16 loop
//   test gpu_layernorm
// budget: <fp16, 768> sm 75 threads 384 shared 12288 regs 80 blocks 2 instr/elem 30.2 of 16 loop
//   test gpu_layernorm
template <class E, int CC>
__global__ void __launch_bounds__(CC ? LAYERNORM_THREADS : BLOCK_MAX, CC ? 2 : 1)
    // NOLINTNEXTLINE(readability-function-size): the row stays in registers
    layernorm_backward_kernel(E *dinp, float *partials, const E *dout, const E *inp,
                              const E *weight, const float *mean, const float *rstd,
                              const E *addend, int N, int channels) {
    DYN_SHARED(float, buffer);
    constexpr int size = Pack<E>::size, ROWS = CC ? 2 : 1;
    constexpr int WARPS = (CC + size * WARP - 1) / (size * WARP);
    const int C = CC ? CC : channels, c = threadIdx.x * size;
    const float inverse_C = 1.0f / (float)C;
    float dweight[size] = {}, dbias[size] = {}, before[size] = {};
    // All threads execute every iteration, because row_sum requires it, even those without a row.
    for (int first = blockIdx.x * ROWS * blockDim.y; first < N;
         first += gridDim.x * ROWS * blockDim.y) {
        float d[ROWS][size] = {}, norm[ROWS][size] = {}, sums[2 * ROWS] = {};
        Pack<E> residual[ROWS] = {};
        bool active[ROWS];
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            const int row = first + r * blockDim.y + threadIdx.y;
            const size_t at = (size_t)row * C + c;
            active[r] = c < C && row < N;
            if (active[r]) {
                vector_load(d[r], dout + at);
                vector_load(norm[r], inp + at);
                if (addend) {
                    residual[r] = pack_load(addend + at);
                }
            }
        }
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            if (active[r]) {
                const int row = first + r * blockDim.y + threadIdx.y;
                const float row_mean = mean[row], row_rstd = rstd[row];
                float w[size];
                vector_load(w, weight + c);  // from the cache, as registers are scarce here
                for (int i = 0; i < size; i++) {
                    norm[r][i] = (norm[r][i] - row_mean) * row_rstd;
                    dweight[i] = fmaf(d[r][i], norm[r][i], dweight[i]);
                    dbias[i] += d[r][i];
                    d[r][i] *= w[i];
                    sums[2 * r] += d[r][i];
                    sums[2 * r + 1] = fmaf(d[r][i], norm[r][i], sums[2 * r + 1]);
                }
            }
        }
        row_sum<WARPS>(sums);
        int again = first;  // else row addresses would occupy registers across row_sum
        FORGET(again);
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            if (active[r]) {
                const float average = sums[2 * r] * inverse_C, slope = sums[2 * r + 1] * inverse_C;
                float add[size];
                const int row = again + r * blockDim.y + threadIdx.y;
                const float row_rstd = rstd[row];  // from the cache, like the weights
                pack_to_floats(add, residual[r]);
                for (int i = 0; i < size; i++) {
                    const float rest = d[r][i] - fmaf(norm[r][i], slope, average);
                    d[r][i] = fmaf(row_rstd, rest, add[i]);
                }
                const Pack<E> rounded = pack_round<E>(d[r]);
                pack_store(dinp + (size_t)row * C + c, rounded);
                pack_to_floats(add, rounded);
                for (int i = 0; i < size; i++) {
                    before[i] += add[i];
                }
            }
        }
    }
    column_sum(dweight, buffer);
    column_sum(dbias, buffer);
    column_sum(before, buffer);
    if (threadIdx.y == 0 && c < C) {
        vector_store(partials + (size_t)blockIdx.x * C + c, dweight);
        vector_store(partials + (size_t)(gridDim.x + blockIdx.x) * C + c, dbias);
        vector_store(partials + (size_t)(2 * gridDim.x + blockIdx.x) * C + c, before);
    }
}

// Returns the scratch bytes that gpu_layernorm_backward needs.
static size_t gpu_layernorm_backward_bytes(int N, int C) {
    return (size_t)(N < LAYERNORM_PARTS ? N : LAYERNORM_PARTS) * 3 * C * sizeof(float);
}

// dinp = addend (null: 0) + the gradient of inp; dweight, dbias and dbefore (null: skip), all (C)
// fp32, are accumulated (+=); dbefore is the gradient of the bias that was added to inp. dinp may
// be addend or dout.
template <class E>
static void gpu_layernorm_backward(E *dinp, float *dweight, float *dbias, float *dbefore,
                                   const E *dout, const E *inp, const E *weight, const float *mean,
                                   const float *rstd, const E *addend, float *scratch, int N, int C,
                                   cudaStream_t stream) {
    constexpr int size = Pack<E>::size;
    static_assert(CHANNELS_MAX <= size * BLOCK_MAX, "a block spans a row");
    check_rows(E, C, dinp, dout, inp, weight, addend, scratch);
    check(C <= CHANNELS_MAX, "LayerNorm of %d channels", C);
    int row_threads = ceil_div(C, size * WARP) * WARP;
    int rows = row_threads < LAYERNORM_THREADS ? LAYERNORM_THREADS / row_threads : 1, parts = 0;
    rows = rows < N ? rows : N;
    with_channels<E>(C, [&](auto constant) {
        constexpr int CC = decltype(constant)::value;
        const int rounds = ceil_div(N, rows * (CC ? 2 : 1));
        parts = rounds < LAYERNORM_PARTS ? rounds : LAYERNORM_PARTS;
        launch((layernorm_backward_kernel<E, CC>), parts, dim3(row_threads, rows),
               rows > 1 ? row_threads * rows * size * sizeof(float) : 0, stream, dinp, scratch,
               dout, inp, weight, mean, rstd, addend, N, C);
    });
    gpu_partials_add({{dweight, dbias, dbefore}}, scratch, parts, C, stream);
}

// -------------------------------------------------------------------------------------------------
// 29. GELU and bias
// GELU in its tanh form, written with the logistic function: 0.5 (1 + tanh(u)) = s = 1 / (1 +
// exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3). This avoids cancellation for x < 0 and needs only
// one exponential and one division.
// 1. GELU is never fused into a matmul, so recomputation gives the same bits.
// 2. The gradient of a bias is a sum over all rows, in two stages of fixed order. For the MLP's
//    first matmul it is computed by GELU's backward kernel, which has the values in registers
//    anyway.

constexpr float GELU_SCALE = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float GELU_CUBIC = 0.044715f;
constexpr int BIAS_ROWS = 4;      // rows that a thread loads before adding
constexpr int BIAS_PARTS = 128;   // maximum number of partial sums per column
constexpr int BIAS_BLOCKS = 768;  // enough blocks to keep the largest GPUs busy

// Returns exp(-2u), from which s = 1 / (1 + exp(-2u)); for 16-bit types it is computed as a power
// of two with folded constants.
template <class E> __device__ inline float gelu_power(float x) {
    constexpr float linear = -2.0f * GELU_SCALE * (is_fp32<E> ? 1.0f : LOG2_E);
    float exponent = x * fmaf(linear * GELU_CUBIC, x * x, linear);
    return is_fp32<E> ? expf(exponent) : ex2_approx(exponent);
}

// out = x s(x), elementwise. out, inp (n) of E. A thread processes two packs, blockDim.x packs
// apart. Errors relative to the norm, measured on the CPU layer: fp32 5e-8; bf16 the rounding error
// of the output.
// budget: <bf16> threads 256 regs 32 blocks 6 instr/elem 11.2 of 16 test gpu_gelu
// budget: <fp16> sm 75 threads 256 regs 32 blocks 4 instr/elem 11.8 of 16 test gpu_gelu
template <class E> __global__ void gelu_forward_kernel(E *out, const E *inp, size_t n) {
    constexpr int size = Pack<E>::size;
    Pack<E> x[2];
    size_t at[2];
    UNROLL
    for (int k = 0; k < 2; k++) {
        at[k] = (((size_t)blockIdx.x * 2 + k) * blockDim.x + threadIdx.x) * size;
        if (at[k] < n) {
            x[k] = pack_load(inp + at[k]);
        }
    }
    UNROLL
    for (int k = 0; k < 2; k++) {
        if (at[k] < n) {
            float y[size];
            pack_to_floats(y, x[k]);
            for (int i = 0; i < size; i++) {
                y[i] *= reciprocal<E>(1.0f + gelu_power<E>(y[i]));
            }
            vector_store(out + at[k], y);
        }
    }
}

// Launches the forward kernel for a tensor of any shape with n elements, a multiple of the pack
// size, in thread blocks of at most 256 threads.
template <class E>
static void gpu_gelu_forward(E *out, const E *inp, size_t n, cudaStream_t stream) {
    check_rows(E, n, out, inp);
    size_t packs = n / Pack<E>::size;
    int threads = packs < 256 ? ceil_div((int)packs, 2 * WARP) * WARP : 256;
    launch(gelu_forward_kernel<E>, (unsigned)((packs + 2 * threads - 1) / (2 * threads)), threads,
           0, stream, out, inp, n);
}

// Returns gelu'(x) = s + x s (1 - s) 2 du/dx. 1 - s is computed as exp(-2u) s, which keeps full
// precision if s is close to 1. It is exactly 0, and so is its product with x^3, if exp(-2u)
// underflows or overflows; fminf avoids inf * 0 in the latter case.
template <class E> __device__ inline float gelu_slope(float x) {
    constexpr float flat = 2.0f * GELU_SCALE, square = 3.0f * flat * GELU_CUBIC;
    float power = gelu_power<E>(x), s = reciprocal<E>(1.0f + power);
    return fmaf(x * s * (fminf(power, FLT_MAX) * s), fmaf(square, x * x, flat), s);
}

// partials[blockIdx.y][column] = sum over this block's rows of dout or, with GELU, of dinp = dout
// gelu'(inp) as rounded to E, which the kernel also writes.
//   dinp, dout, inp (N,OC) of E; dinp may be dout; partials (gridDim.y, OC) fp32. Without GELU:
//   dinp and inp are not touched.
// Grid (columns / (32 packs), parts), block (32, up to 8 rows). Reads and writes every element
// once. Errors relative to the norm, measured on the CPU layer: column sums 1.4e-7; dinp 3.4e-7 in
// fp32, the rounding error of the type in bf16.
// budget: <bf16, true> threads 256 shared 8192 regs 72 blocks 3 instr/elem 20.9 of 32 loop
//   test gpu_gelu
// budget: <fp16, true> sm 75 threads 256 shared 8192 regs 72 blocks 3 instr/elem 21.5 of 32 loop
//   test gpu_gelu
template <class E, bool GELU>
__global__ void bias_backward_kernel(E *dinp, float *partials, const E *dout, const E *inp, int N,
                                     int OC) {
    DYN_SHARED(float, buffer);
    constexpr int size = Pack<E>::size;
    int c = (blockIdx.x * WARP + threadIdx.x) * size;
    float sums[size] = {};
    int block_rows = BIAS_ROWS * blockDim.y;
    for (int first = blockIdx.y * block_rows; first < N && c < OC;
         first += gridDim.y * block_rows) {
        size_t at = (size_t)(first + threadIdx.y) * OC + c, step = (size_t)blockDim.y * OC;
        Pack<E> d[BIAS_ROWS], x[BIAS_ROWS];
        UNROLL
        for (int k = 0; k < BIAS_ROWS; k++) {
            int row = first + k * blockDim.y + threadIdx.y;
            if (row < N) {
                d[k] = pack_load(dout + at + k * step);
                if constexpr (GELU) {
                    x[k] = pack_load(inp + at + k * step);
                }
            }
        }
        UNROLL
        for (int k = 0; k < BIAS_ROWS; k++) {
            int row = first + k * blockDim.y + threadIdx.y;
            if (row < N) {
                float gradient[size];
                pack_to_floats(gradient, d[k]);
                if constexpr (GELU) {
                    float value[size];
                    pack_to_floats(value, x[k]);
                    for (int i = 0; i < size; i++) {
                        gradient[i] *= gelu_slope<E>(value[i]);
                    }
                    d[k] = pack_round<E>(gradient);
                    pack_store(dinp + at + k * step, d[k]);
                    pack_to_floats(gradient, d[k]);  // sum the rounded values
                }
                for (int i = 0; i < size; i++) {
                    sums[i] += gradient[i];
                }
            }
        }
    }
    column_sum(sums, buffer);
    if (threadIdx.y == 0 && c < OC) {
        vector_store(partials + (size_t)blockIdx.y * OC + c, sums);
    }
}

// Returns the scratch bytes that gpu_bias_backward and gpu_gelu_backward need.
static size_t gpu_bias_backward_bytes(int N, int OC) {
    return (size_t)(N < BIAS_PARTS ? N : BIAS_PARTS) * OC * sizeof(float);
}

// dbias (OC) fp32 += column sums of dout (N,OC) or, with GELU, of dinp = dout gelu'(inp). Two
// stages: bias_backward_kernel writes partial sums to `scratch`, which are then added in a fixed
// order.
template <class E, bool GELU>
static void column_sums(E *dinp, float *dbias, const E *dout, const E *inp, float *scratch, int N,
                        int OC, cudaStream_t stream) {
    constexpr int size = Pack<E>::size;
    check_rows(E, OC, dinp, dout, inp, scratch);
    int columns = ceil_div(OC, WARP * size), rows = ceil_div(N, BIAS_ROWS);
    rows = rows < 8 ? rows : 8;
    int parts = ceil_div(N, rows * BIAS_ROWS), enough = ceil_div(BIAS_BLOCKS, columns);
    parts = parts < enough ? parts : enough;
    parts = parts < BIAS_PARTS ? parts : BIAS_PARTS;
    launch(bias_backward_kernel<E, GELU>, dim3(columns, parts), dim3(WARP, rows),
           rows * WARP * size * sizeof(float), stream, dinp, scratch, dout, inp, N, OC);
    gpu_partials_add({{dbias}}, scratch, parts, OC, stream);
}

// dbias (OC) fp32 += column sums of dout (N,OC), fp32 only: for 16-bit types the kernel that
// produces dout sums its columns as it writes them.
static void gpu_bias_backward(float *dbias, const float *dout, float *scratch, int N, int OC,
                              cudaStream_t stream) {
    column_sums<float, false>(nullptr, dbias, dout, nullptr, scratch, N, OC, stream);
}

// dinp = dout gelu'(inp), all (N,OC); dinp may be dout. dbias (OC) fp32 += column sums of dinp,
// which is the gradient of the bias of the matmul that produced inp.
template <class E>
static void gpu_gelu_backward(E *dinp, float *dbias, const E *dout, const E *inp, float *scratch,
                              int N, int OC, cudaStream_t stream) {
    column_sums<E, true>(dinp, dbias, dout, inp, scratch, N, OC, stream);
}

// -------------------------------------------------------------------------------------------------
// 30. Matmul
// All matmuls use cuBLASLt, which assumes column-major matrices: our row-major X (rows, columns) is
// its X^T with leading dimension `columns`, so for out = inp weight^T we request out^T = weight
// inp^T, and so on.
// 1. A plan (descriptor, layouts, algorithm) is created at the first use of a GEMM and kept for the
//    run: after the warm-up nothing is created or searched for.
// 2. The library gets one fixed workspace.
// 3. Products are summed in fp32 (fp32 inputs too: no TF32), and partial sums of a split-K GEMM are
//    added in fp32, in the workspace.
// 4. The only epilogue used is a bias; residuals and gradient accumulation use beta = 1.
// 5. A different algorithm may give different bits, so the algorithm is chosen once for each
//    combination of GPU, library, workspace and GEMM, cached in a file, and recorded in
//    checkpoints.
// 6. An algorithm is identified by a hash of its 64 bytes, not by its index in the heuristic's
//    list, whose order is not guaranteed to be reproducible. An algorithm that fails for its GEMM
//    during the warm-up is replaced by the next one; after the warm-up a failure ends the run.

// Identifies a GEMM. adds: beta is 1; out_of_place: beta is 1 and D is not C.
struct MatmulKey {
    int m, n, k, transpose_a, transpose_b, has_bias, adds, out_of_place, input_type, output_type;
};

struct MatmulPlan {
    MatmulKey key;
    cublasLtMatmulDesc_t description;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
};

// A model has about thirty distinct GEMMs: four of a transformer block and the classifier's, in
// three passes, with weight gradients both overwritten and accumulated.
constexpr int MATMUL_PLANS = 64;
constexpr int MATMUL_ALGORITHMS = 16;  // entries of the heuristic's list considered
// Split-K candidates: the first SPLIT_BASES entries of a weight gradient's list, with the sum over
// k split into this many parts of at least SPLIT_STEPS terms each. A weight gradient has few tiles,
// and the heuristic lists few of the splits that would fill a GPU.
constexpr int32_t SPLITS[] = {2, 3, 4, 6, 8, 12};
constexpr int SPLIT_BASES = 4, SPLIT_STEPS = 64;
constexpr int MATMUL_CANDIDATES =
    MATMUL_ALGORITHMS + SPLIT_BASES * (int)(sizeof SPLITS / sizeof SPLITS[0]);

static struct {
    cublasLtHandle_t handle;
    void *workspace;
    size_t workspace_bytes;
    int plans, timed;  // timed: number of plans whose algorithms this run has timed
    bool settled;      // the warm-up is over: algorithms are no longer replaced
    MatmulPlan plan[MATMUL_PLANS];
    char where[160];            // GPU, library and workspace that the choices apply to
    char choices[MATMUL_TEXT];  // of all plans, as text: matmul_choices_export
} matmul_library;

// Initializes cuBLASLt. `workspace` is device memory from the memory plan, 256-byte aligned; all
// GEMMs share it, so they all run on one stream.
static void gpu_matmul_open(void *workspace, size_t workspace_bytes) {
    check((uintptr_t)workspace % 256 == 0, "the workspace of cuBLASLt must be 256-byte aligned");
    cublas_check(cublasLtCreate(&matmul_library.handle));
    matmul_library.workspace = workspace;
    matmul_library.workspace_bytes = workspace_bytes;
    // The best algorithm depends on the number of SMs and on the workspace size, so both are
    // recorded.
    int device;
    cudaDeviceProp gpu;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaGetDeviceProperties(&gpu, device));
    snprintf(matmul_library.where, sizeof matmul_library.where,
             "%.64s, %d SMs, cuBLASLt %zu, workspace %zu", gpu.name, gpu.multiProcessorCount,
             cublasLtGetVersion(), workspace_bytes);
}

static void gpu_matmul_close(void) {
    for (int i = 0; i < matmul_library.plans; i++) {
        MatmulPlan *plan = &matmul_library.plan[i];
        cublas_check(cublasLtMatrixLayoutDestroy(plan->a));
        cublas_check(cublasLtMatrixLayoutDestroy(plan->b));
        cublas_check(cublasLtMatrixLayoutDestroy(plan->d));
        cublas_check(cublasLtMatmulDescDestroy(plan->description));
    }
    cublas_check(cublasLtDestroy(matmul_library.handle));
    matmul_library = {};
}

template <class T>
static void matmul_attribute(const MatmulPlan *plan, cublasLtMatmulDescAttributes_t attribute,
                             T value) {
    cublas_check(
        cublasLtMatmulDescSetAttribute(plan->description, attribute, &value, sizeof(value)));
}

template <class T>
static void matmul_preference(cublasLtMatmulPreference_t preference,
                              cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    cublas_check(
        cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
}

// Returns true if the algorithm reports that it can write D to a different buffer than C, and false
// if it does not say.
static bool matmul_writes_out_of_place(const cublasLtMatmulAlgo_t *algorithm) {
    int32_t out_of_place = 0;
    size_t written = 0;
    return cublasLtMatmulAlgoCapGetAttribute(
               algorithm, CUBLASLT_ALGO_CAP_OUT_OF_PLACE_RESULT_SUPPORT, &out_of_place,
               sizeof out_of_place, &written) == CUBLAS_STATUS_SUCCESS &&
           out_of_place;
}

// Stores in `results` the heuristic's algorithms for a GEMM that need at most workspace_bytes, best
// first, and returns their number (0 to MATMUL_ALGORITHMS). If there are none, *status is
// CUBLAS_STATUS_NOT_SUPPORTED, not success with an empty list. For an out-of-place GEMM (D is not
// C), stores only algorithms that report support for it. If none of them does, stores all: then
// only the status of the launch can tell whether an algorithm works.
static int matmul_algorithms(cublasLtMatmulHeuristicResult_t *results, cublasStatus_t *status,
                             const MatmulPlan *plan, size_t workspace_bytes) {
    int found = 0;
    cublasLtMatmulPreference_t preference = NULL;
    memset((void *)results, 0, MATMUL_ALGORITHMS * sizeof *results);  // unset bytes are hashed
    if (plan->key.has_bias) {
        // The heuristic derives an alignment from this address. Always pass an address with 16-byte
        // alignment: the bias pointer left by the last launch could have another one, and the list
        // would then differ between calls.
        matmul_attribute(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                         (const void *)((const char *)matmul_library.workspace + 16));
    }
    cublas_check(cublasLtMatmulPreferenceCreate(&preference));
    matmul_preference(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
    matmul_preference(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                      (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    // Tensors start at multiples of 16 bytes; by default the library assumes 256.
    matmul_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)16);
    matmul_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)16);
    matmul_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, (uint32_t)16);
    matmul_preference(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, (uint32_t)16);
    *status = cublasLtMatmulAlgoGetHeuristic(matmul_library.handle, plan->description, plan->a,
                                             plan->b, plan->d, plan->d, preference,
                                             MATMUL_ALGORITHMS, results, &found);
    cublas_check(cublasLtMatmulPreferenceDestroy(preference));
    found = *status == CUBLAS_STATUS_SUCCESS ? found : 0;
    auto writes_out_of_place = [](const cublasLtMatmulHeuristicResult_t &result) {
        return result.state == CUBLAS_STATUS_SUCCESS && matmul_writes_out_of_place(&result.algo);
    };
    const bool select =
        plan->key.out_of_place && std::any_of(results, results + found, writes_out_of_place);
    int usable = 0;
    for (int i = 0; i < found; i++) {
        if (select ? writes_out_of_place(results[i]) : results[i].state == CUBLAS_STATUS_SUCCESS) {
            results[usable++] = results[i];
        }
    }
    return usable;
}

// Returns the hash that identifies an algorithm in the cache and in checkpoints. NVIDIA's header
// says that the 64 bytes of an algorithm may be stored and used again with the same version of the
// library (cublasLt.h, cublasLtMatmulAlgo_t).
static uint64_t matmul_algorithm_hash(const cublasLtMatmulAlgo_t *algorithm) {
    return fnv1a(fnv1a_start, algorithm, sizeof *algorithm);
}

// Returns true for the gradient of a weight: the sum over k runs over tokens, and k is the slow
// index of both operands.
static bool matmul_is_weight_gradient(const MatmulKey *k) {
    return !k->transpose_a && k->transpose_b;
}

// Stores in `results` (MATMUL_CANDIDATES) the algorithms that a GEMM may use, and returns their
// number: the heuristic's list, then its split-K candidates. The library checks each split-K
// candidate and computes its workspace (cublasLtMatmulAlgoCheck).
static int matmul_candidates(cublasLtMatmulHeuristicResult_t *results, const MatmulPlan *plan) {
    const size_t workspace = matmul_library.workspace_bytes;
    cublasStatus_t status;
    int found = matmul_algorithms(results, &status, plan, workspace);
    const int bases = matmul_is_weight_gradient(&plan->key) ? min_int(found, SPLIT_BASES) : 0;
    const uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    auto set = [](cublasLtMatmulAlgo_t *algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute,
                  const auto &value) {
        return cublasLtMatmulAlgoConfigSetAttribute(algorithm, attribute, &value, sizeof value) ==
               CUBLAS_STATUS_SUCCESS;
    };
    for (int i = 0; i < bases; i++) {
        for (const int32_t &splits : SPLITS) {
            cublasLtMatmulHeuristicResult_t *to = &results[found];
            *to = results[i];
            auto is_same = [to](const cublasLtMatmulHeuristicResult_t &other) {
                return memcmp(&other.algo, &to->algo, sizeof to->algo) == 0;
            };
            found += plan->key.k >= splits * SPLIT_STEPS &&
                     set(&to->algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, splits) &&
                     set(&to->algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, scheme) &&
                     std::none_of(results, to, is_same) &&
                     cublasLtMatmulAlgoCheck(matmul_library.handle, plan->description, plan->a,
                                             plan->b, plan->d, plan->d, &to->algo,
                                             to) == CUBLAS_STATUS_SUCCESS &&
                     to->workspaceSize <= workspace;
        }
    }
    return found;
}

// Sets the plan's algorithm to the candidate with this hash. Returns false and changes nothing if
// there is none.
static bool matmul_plan_take(MatmulPlan *plan, uint64_t hash) {
    cublasLtMatmulHeuristicResult_t results[MATMUL_CANDIDATES];
    const int found = matmul_candidates(results, plan);
    for (int i = 0; i < found; i++) {
        if (matmul_algorithm_hash(&results[i].algo) == hash) {
            plan->algorithm = results[i].algo;
            return true;
        }
    }
    return false;
}

// Advances the plan to the next algorithm in the heuristic's list, or to the first if the current
// one is a split-K candidate. Returns false if there is none.
static bool matmul_plan_next(MatmulPlan *plan) {
    cublasLtMatmulHeuristicResult_t results[MATMUL_ALGORITHMS];
    cublasStatus_t status;
    const uint64_t own = matmul_algorithm_hash(&plan->algorithm);
    const int found = matmul_algorithms(results, &status, plan, matmul_library.workspace_bytes);
    int next = 0;
    for (int i = 0; i < found; i++) {  // the last match, in case of duplicates
        next = matmul_algorithm_hash(&results[i].algo) == own ? i + 1 : next;
    }
    if (next < found) {
        plan->algorithm = results[next].algo;
    }
    return next < found;
}

// Creates the plan of the GEMM `key`: descriptor, layouts and the heuristic's first algorithm.
static void matmul_plan_create(MatmulPlan *plan, MatmulKey key) {
    cudaDataType_t input_type = (cudaDataType_t)key.input_type;
    cudaDataType_t output_type = (cudaDataType_t)key.output_type;
    int m = key.m, n = key.n, k = key.k;
    plan->key = key;
    cublas_check(cublasLtMatmulDescCreate(&plan->description, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublasOperation_t operation_a = key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t operation_b = key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    matmul_attribute(plan, CUBLASLT_MATMUL_DESC_TRANSA, operation_a);
    matmul_attribute(plan, CUBLASLT_MATMUL_DESC_TRANSB, operation_b);
    if (key.has_bias) {
        matmul_attribute(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    }
    int a_rows = key.transpose_a ? k : m, a_columns = key.transpose_a ? m : k;
    int b_rows = key.transpose_b ? n : k, b_columns = key.transpose_b ? k : n;
    cublas_check(cublasLtMatrixLayoutCreate(&plan->a, input_type, a_rows, a_columns, a_rows));
    cublas_check(cublasLtMatrixLayoutCreate(&plan->b, input_type, b_rows, b_columns, b_rows));
    cublas_check(cublasLtMatrixLayoutCreate(&plan->d, output_type, m, n, m));
    cublasLtMatmulHeuristicResult_t results[MATMUL_ALGORITHMS];
    cublasStatus_t status;
    if (matmul_algorithms(results, &status, plan, matmul_library.workspace_bytes) == 0) {
        die("cuBLASLt cannot multiply (%d x %d) by (%d x %d), %s input, %s output: %s", m, k,
            k, n, input_type == CUDA_R_32F ? "fp32" : "16 bits",
            output_type == CUDA_R_32F ? "fp32" : "16 bits", cublasLtGetStatusName(status));
    }
    plan->algorithm = results[0].algo;
}

static MatmulPlan *matmul_plan_find(MatmulKey key) {
    for (int i = 0; i < matmul_library.plans; i++) {
        if (memcmp(&matmul_library.plan[i].key, &key, sizeof(key)) == 0) {
            return &matmul_library.plan[i];
        }
    }
    check(matmul_library.plans < MATMUL_PLANS, "more distinct matmuls than MATMUL_PLANS");
    MatmulPlan *plan = &matmul_library.plan[matmul_library.plans++];
    matmul_plan_create(plan, key);
    return plan;
}

// matmul_launch launches a plan's GEMM with these operands and returns the status. The bias is null
// if the plan has none; c may be any address if beta is 0. The plan's key determines whether beta
// is 0 or 1: another factor would require another plan, and nothing here needs one.
struct MatmulOperands {
    void *d;
    const void *a, *b, *bias, *c;
};
static cublasStatus_t matmul_launch(MatmulPlan *plan, const MatmulOperands &x,
                                    cudaStream_t stream) {
    const float alpha = 1.0f, beta = plan->key.adds ? 1.0f : 0.0f;
    if (x.bias) {
        matmul_attribute(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, x.bias);
    }
    return cublasLtMatmul(matmul_library.handle, plan->description, &alpha, x.a, plan->a, x.b,
                          plan->b, &beta, x.c, plan->d, x.d, plan->d, &plan->algorithm,
                          matmul_library.workspace, matmul_library.workspace_bytes, stream);
}

// Name of a GEMM in the cache, in checkpoints and in messages.
struct MatmulName {
    char s[72];
};
static MatmulName matmul_key_text(const MatmulKey *k) {
    MatmulName text;
    snprintf(text.s, sizeof text.s, "%dx%dx%d:%d%d%d%d%d:%d>%d", k->m, k->n, k->k, k->transpose_a,
             k->transpose_b, k->has_bias, k->adds, k->out_of_place, k->input_type, k->output_type);
    return text;
}

// Computes D = op(A) op(B) + bias (null: none) + beta C in column-major terms: D and C (m,n), op(A)
// (m,k), op(B) (k,n), every matrix dense. C may be D. bias (m), of D's type, is added to every
// column.
//   A and B have type E; C and D have type O, which is E or fp32.
// Limits: a column of A, B or D (column-major) is a multiple of 16 bytes, and so is every leading
// dimension; pointers are 16-byte aligned.
template <class E, class O>
static void matmul_run(O *d, const E *a, const E *b, const O *bias, const O *c, float beta,
                       bool transpose_a, bool transpose_b, int m, int n, int k,
                       cudaStream_t stream) {
    int a_rows = transpose_a ? k : m, b_rows = transpose_b ? n : k;
    check_rows(E, a_rows, a);
    check_rows(E, b_rows, b);
    check_rows(O, m, d, bias, c);
    check(beta == 0 || beta == 1, "beta is %g, must be 0 or 1", beta);
    MatmulKey key = {m,         n,                    k, transpose_a, transpose_b, bias != nullptr,
                     beta != 0, beta != 0 && c != d,  traits<E>.cuda_type, traits<O>.cuda_type};
    MatmulPlan *plan = matmul_plan_find(key);
    const MatmulOperands operands = {d, a, b, bias, c};
    cublasStatus_t status = matmul_launch(plan, operands, stream);
    while (status != CUBLAS_STATUS_SUCCESS && !matmul_library.settled && matmul_plan_next(plan)) {
        (void)cudaGetLastError();  // clear the failed launch's error for later checks
        fprintf(stderr, "%s: cuBLASLt's algorithm for matmul %s failed: %s; trying the next "
                "one\n", program_name, matmul_key_text(&key).s,
                cublasLtGetStatusName(status));
        status = matmul_launch(plan, operands, stream);
    }
    cublas_check_at(status, "cublasLtMatmul", __FILE__, __LINE__);
}

// out = addend (null: 0) + bias (null: 0) + inp weight^T. out, addend (N,OC), inp (N,C), weight
// (OC,C), bias (OC) of E; out may be addend. Error relative to the norm, measured on the CPU layer,
// whose sums are plain fp32: 7.5e-7 at C = 768, less for smaller C; bf16 the rounding error of the
// output.
template <class E>
static void gpu_matmul_forward(E *out, const E *inp, const E *weight, const E *bias,
                               const E *addend, int N, int C, int OC, cudaStream_t stream) {
    matmul_run<E, E>(out, weight, inp, bias, addend ? addend : out, addend ? 1.0f : 0.0f, true,
                     false, OC, N, C, stream);
}

// Computes two gradients, in this order: dweight (OC,C) of G = (if `first`) or += dout^T inp; dinp
// (N,C) of E = dout weight. dinp may be inp. dout (N,OC), inp (N,C), weight (OC,C) of E. With
// `first` the old dweight is not read, so it needs no memset. The gradient of the bias is summed by
// the kernel that produces dout.
template <class E, class G>
static void gpu_matmul_backward(E *dinp, G *dweight, const E *dout, const E *inp, const E *weight,
                                int N, int C, int OC, bool first, cudaStream_t stream) {
    matmul_run<E, G>(dweight, inp, dout, nullptr, dweight, first ? 0.0f : 1.0f, false, true, C, OC,
                     N, stream);
    matmul_run<E, E>(dinp, weight, dout, nullptr, dinp, 0.0f, false, false, C, N, OC, stream);
}

// -------------------------------------------------------------------------------------------------
// 31. Flash attention forward
// Causal attention over packed qkv (B,T,3,NH,HS), read in place; HS = C / NH.
// 1. No T x T matrix is ever stored: a thread block processes one tile of scores at a time, in
//    registers.
// 2. The row statistic is LSE2 = log2 of the sum of 2^(c s), s = q.k, c = log2(e) / sqrt(HS): fp32,
//    (B,NH,T). With it the backward pass has P = 2^(c s - LSE2), without a maximum or a sum.
// 3. 16-bit types use tensor cores at head size 64 or 128 (HD); a smaller HS, a multiple of 8, is
//    padded with zeros in shared memory. fp32 uses simple kernels, written for correctness rather
//    than speed.
// 4. Every sum has a fixed order and every output has one writer, so results are bitwise
//    reproducible.
// Errors given below are relative: the norm of the difference to a reference in double, divided by
// the norm of the reference. They were measured on the CPU layer with T 63 to 600, HS 16 to 128,
// |q|, |k|, |v| < 2.5; in bf16 they equal those of a naive bf16 implementation.
// source: Dao et al. 2022, "FlashAttention", algorithm 1; Dao 2023, "FlashAttention-2", section 3.

// The 16-bit kernels have two variants, which differ in how tiles are multiplied. With mma.sync, a
// warp multiplies its own rows. With WGMMA, for bf16 heads of 64 channels on Hopper, the 64 rows of
// a warpgroup are multiplied together, by products that read shared memory and run asynchronously:
// 1. Each thread calls fence_async for its own copies before the barrier, which makes the tile
//    visible to products.
// 2. With three places for the tiles of the other side ("late wait") a step's last products run on
//    during the next step's barrier and scores, and the wait for those scores covers them. With two
//    they are waited for at the end of the step.
// 3. Warps never diverge inside the loop: conditions are the same in a whole warpgroup.

// Tile sizes by type and head size (64 or 128). A warp owns 16 MT rows of queries (of keys, for dK
// and dV), and its thread block iterates over tiles of the other side. With MT = 2 each fragment
// read from shared memory feeds two mma instructions, which A100 and H100 need to keep their tensor
// cores busy; at HD = 128 there are not enough registers for MT = 2. The fp16 tiles are chosen for
// sm_75, which has 64 KiB of shared memory per SM and whose tensor cores are kept busy by one mma
// per fragment: at HD 64 two blocks fit in an SM, so one block's loads overlap the other's matmuls.
// GPUs with bf16 support use the same fp16 tiles, and run them slower than bf16. None of these
// sizes spills (dev/notes).
template <class E, int HD, bool WGMMA> struct AttentionTiles {
    enum {
        SMALL = std::is_same_v<E, __half>,
        WARPS = WGMMA ? 8 : 4,
        MT = HD == 64 && !SMALL && !WGMMA ? 2 : 1,
        OWN_ROWS = 16 * MT * WARPS,                        // 128 or 64
        TOGETHER = WGMMA ? 64 : 16 * MT,                   // own rows that are multiplied together
        FORWARD_ROWS = SMALL ? 2048 / HD : 64,             // keys per step of the forward kernel
        DQ_ROWS = SMALL || (HD == 64 && !WGMMA) ? 32 : 64, // keys per step of the dQ kernel
        DKV_ROWS = SMALL ? 16 : WGMMA ? 64 : 32,           // queries per step of the dK, dV kernel
        STATS = WGMMA ? 2 * DKV_ROWS : WARPS * WARP,       // a step's LSE2 and D, and unused ones
        PLACES = WGMMA ? 3 : 2,  // for the tiles of a step; dQ: 2
        // Dynamic shared memory of the three kernels.
        FORWARD_BYTES = 2 * HD * (OWN_ROWS + 2 * PLACES * FORWARD_ROWS),
        DQ_BYTES = 4 * HD * (OWN_ROWS + 2 * DQ_ROWS),
        DKV_BYTES = 4 * HD * (OWN_ROWS + PLACES * DKV_ROWS) + 4 * PLACES * STATS
    };
};

// Minimum number of resident blocks per SM for the forward kernel at head size 64: three if shared
// memory suffices (not on sm_86, 89, 120). This leaves 168 registers per thread, just enough.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900)
constexpr int ATTENTION_BLOCKS = 3;
#else
constexpr int ATTENTION_BLOCKS = 2;
#endif

// Work assignment of one thread block. The grid is 1-D, split into sections of `section` heads
// (counted across all sequences) whose K and V together fit in L2. Within a section, the blocks of
// all heads for one row tile run before those of the next tile, so a head's K and V are read from
// DRAM once, not once per tile. Each kernel maps tile 0 to its longest tile. The order does not
// affect results.
struct AttentionBlock {
    int head, batch, tile;
    size_t qkv_at, out_at, stat_at;  // offsets of the head in qkv, in out, in LSE2 and D
};

__device__ inline AttentionBlock attention_block(int section, int heads, int T, int NH, int HS) {
    const int tiles = gridDim.x / heads, in_section = section * tiles;
    const int first = (int)(blockIdx.x / in_section) * section, rest = blockIdx.x % in_section;
    const int count = min(section, heads - first), pair = first + rest % count;
    AttentionBlock block = {pair % NH, pair / NH, rest / count, 0, 0, 0};
    const size_t C = (size_t)NH * HS, tokens = (size_t)block.batch * T;
    block.qkv_at = tokens * 3 * C + (size_t)block.head * HS;
    block.out_at = tokens * C + (size_t)block.head * HS;
    block.stat_at = (size_t)pair * T;
    return block;
}

// tile_offset: byte offset of 16-byte chunk `chunk` of row `row` in a shared tile, whose rows have
// HD 16-bit elements. Chunk c of row r is stored at position c ^ (r % 8) of its row. This avoids
// bank conflicts both when ldmatrix reads the same chunk of eight rows and when copies write the
// chunks of one row. A row 8 n further down is 16 HD n bytes further, and the offset of chunk c ^ d
// is this offset ^ 16 d, so loops over rows and chunks only add and XOR constants.
template <int HD> __device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
    return 2 * (row * HD + 8 * (chunk ^ (row & 7)));
}

template <int HD, class E> __device__ __forceinline__ E *tile_chunk(E *tile, int row, int chunk) {
    return tile + tile_offset<HD>(row, chunk) / 2;
}

// tile_load: starts asynchronous copies of rows row0 .. row0 + ROWS - 1 of one head into a shared
// tile; rows from T on and columns from HS on are zero-filled. src: row 0 of the head, rows
// `stride` apart. The offset into src is 32-bit, because two more registers would spill;
// check_attention asserts the range.
template <int HD, int ROWS, int WARPS, class E>
__device__ __forceinline__ void tile_load(E *tile, const E *src, uint32_t stride, int row0, int T,
                                          int HS) {
    constexpr int CHUNKS = HD / 8, STEP = WARPS * WARP / CHUNKS;
    static_assert(ROWS % STEP == 0, "whole passes of the block over the tile");
    const int chunk = (int)threadIdx.x % CHUNKS, first = (int)threadIdx.x / CHUNKS;
    const E *from = src + ((uint32_t)(row0 + first) * stride + 8 * (uint32_t)chunk);
    UNROLL
    for (int row = first; row < first + ROWS; row += STEP, from += (size_t)STEP * stride) {
        const bool valid = row0 + row < T && 8 * chunk < HS;
        copy_16(tile_chunk<HD>(tile, row, chunk), from, valid);
    }
}

// each_element: calls f(i, n, e) for every element acc[i][n][e] of MT (m16) by N8 (n8) accumulator
// tiles: lane 4g + t holds row 16 i + 8 (e / 2) + g, column 8 n + 2t + e % 2 (chapter Tensor-core
// toolbox).
template <int MT, int N8, class F> __device__ __forceinline__ void each_element(F f) {
    UNROLL
    for (int x = 0; x < MT * N8 * 4; x++) {
        f(x / (N8 * 4), x / 4 % N8, x % 4);
    }
}

// mma_n16: acc[i][n], acc[i][n + 1] += fa[i] times the 16 columns of fb, for every m16 tile i.
template <class E, int MT, int N8>
__device__ __forceinline__ void mma_n16(float (&acc)[MT][N8][4], int n, const uint32_t (&fa)[MT][4],
                                        const uint32_t (&fb)[4]) {
    UNROLL
    for (int i = 0; i < MT; i++) {
        mma_k16<E>(acc[i][n], fa[i], {fb[0], fb[1]}, acc[i][n]);
        mma_k16<E>(acc[i][n + 1], fa[i], {fb[2], fb[3]}, acc[i][n + 1]);
    }
}

// warp_mul_abt: acc (16 MT, 8 N8) = A B^T, computed by one warp. A is the 16 MT rows of tile a
// from a_row on, B the 8 N8 rows of tile b; the sum runs over HD columns.
template <int HD, class E, int MT, int N8>
__device__ __forceinline__ void warp_mul_abt(float (&acc)[MT][N8][4], E *a, int a_row, E *b) {
    const int lane = threadIdx.x % WARP;
    const uint32_t at_a = tile_offset<HD>(lane % 16, lane / 16);
    const uint32_t at_b = tile_offset<HD>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    a += a_row * HD;
    each_element<MT, N8>([&](int i, int n, int e) { acc[i][n][e] = 0.0f; });
    UNROLL
    for (int k = 0; k < HD / 8; k += 2) {
        uint32_t fa[MT][4], fb[4];
        UNROLL
        for (int i = 0; i < MT; i++) {
            ldmatrix_x4<false>(fa[i], a, (at_a ^ 16 * k) + 32 * HD * i);
        }
        UNROLL
        for (int n = 0; n < N8; n += 2) {
            ldmatrix_x4<false>(fb, b, (at_b ^ 16 * k) + 16 * HD * n);
            mma_n16<E>(acc, n, fa, fb);
        }
    }
}

// warp_mul_add: acc (16 MT, HD) += p (16 MT, 8 K8) times the 8 K8 rows of tile b, computed by one
// warp. p is rounded to E here and goes directly from accumulators to fragments, in registers
// (chapter Tensor-core toolbox, mma).
template <int HD, class E, int MT, int K8>
__device__ __forceinline__ void warp_mul_add(float (&acc)[MT][HD / 8][4],
                                             const float (&p)[MT][K8][4], E *b) {
    const uint32_t at = tile_offset<HD>(threadIdx.x % 16, threadIdx.x % WARP / 16);
    UNROLL
    for (int k = 0; k < K8; k += 2) {
        uint32_t fa[MT][4], fb[4];
        each_element<MT, 1>([&](int i, int, int j) {
            const float *pair = p[i][k + j / 2] + j % 2 * 2;
            fa[i][j] = pack2<E>(pair[0], pair[1]);
        });
        UNROLL
        for (int n = 0; n < HD / 8; n += 2) {
            ldmatrix_x4<true>(fb, b, (at ^ 16 * n) + 16 * HD * k);
            mma_n16<E>(acc, n, fa, fb);
        }
    }
}

// mask_future: causal mask; sets scores with key > query to `value`. Rows of s are queries starting
// at query0, columns are keys starting at key0; swapped if `keys_are_rows`.
template <int MT, int N8>
__device__ __forceinline__ void mask_future(float (&s)[MT][N8][4], int query0, int key0,
                                            bool keys_are_rows, float value = -INFINITY) {
    const int row = (int)threadIdx.x % WARP / 4, col = (int)threadIdx.x % 4 * 2;
    const int ahead = key0 - query0 + (keys_are_rows ? row - col : col - row);
    each_element<MT, N8>([&](int i, int n, int e) {
        const int step = 8 * n + e % 2 - 16 * i - e / 2 * 8;
        if (ahead + (keys_are_rows ? -step : step) > 0) {
            s[i][n][e] = value;
        }
    });
}

// warp_store_rows: writes scale * acc, rounded to E, to rows row0 .. row0 + 16 MT - 1 of one head;
// rows from T on and columns from HS on are skipped. The rows are staged in rows tile_row .. of a
// shared tile, which only this warp still uses, so that global memory is written in 16-byte chunks
// of whole rows. With SUM, those rows of the tile finally hold column sums, as 256 / HD rows of HD
// floats: one row for each group of lanes that together cover a row, each summing the rows it
// stored.
template <int HD, bool SUM, class E, int MT>
__device__ __forceinline__ void warp_store_rows(E *dst, size_t stride, int row0, int T, int HS,
                                                E *tile, int tile_row, float scale,
                                                const float (&acc)[MT][HD / 8][4]) {
    int thread = threadIdx.x;
    FORGET(thread);  // compute what follows here, not before a loop that has no registers to spare
    const int lane = thread % WARP, chunk = lane % (HD / 8);
    __syncwarp();  // all lanes have read their last fragments of these rows
    each_element<MT, HD / 8>([&](int i, int n, int e) {
        if (e % 2 == 0) {
            E *to = tile_chunk<HD>(tile, tile_row + 16 * i + 4 * e + lane / 4, n) + lane % 4 * 2;
            *(uint32_t *)to = pack2<E>(acc[i][n][e] * scale, acc[i][n][e + 1] * scale);
        }
    });
    __syncwarp();  // rows are complete before other lanes store them
    float sums[8] = {};  // over this lane's rows, for its chunk
    for (int row = lane / (HD / 8); row < 16 * MT; row += WARP / (HD / 8)) {
        if (row0 + row < T && 8 * chunk < HS) {
            const Pack<E> pack = pack_load(tile_chunk<HD>(tile, tile_row + row, chunk));
            pack_store(dst + (size_t)(row0 + row) * stride + 8 * chunk, pack);
            if constexpr (SUM) {
                float x[8];
                pack_to_floats(x, pack);
                for (int i = 0; i < 8; i++) {
                    sums[i] += x[i];
                }
            }
        }
    }
    if constexpr (SUM) {
        __syncwarp();  // all lanes have read the staged rows
        vector_store((float *)(tile + tile_row * HD) + 8 * lane, sums);
    }
}

// sums_place: returns the offset of a block's column sums in sums (parts, 3C), which has one part
// for each tile of ROWS rows of each sequence. A row of sums is as long as a row of qkv, so the
// offset is that of qkv_at with row batch * tiles + tile (the part) in place of row batch * T (the
// sequence's first token). Computing it this way keeps no further value in registers across the
// preceding loop.
template <int ROWS>
__device__ __forceinline__ size_t sums_place(const AttentionBlock &block, int T, size_t C) {
    const int64_t rows = (int64_t)block.batch * (ceil_div(T, ROWS) - T) + block.tile;
    return block.qkv_at + (size_t)rows * 3 * C;
}

// head_column_sums: to[c] = the sum, in order of the warps, of the column sums that warp_store_rows
// left in the tile rows of each warp of the block, c < HS. The caller must place a block barrier
// between warp_store_rows and this.
template <int HD, int WARPS, class E>
__device__ __forceinline__ void head_column_sums(float *to, const E *tile, int warp_rows, int HS) {
    for (int c = threadIdx.x; c < HS; c += WARPS * WARP) {
        float sum = 0.0f;
        UNROLL
        for (int i = 0; i < WARPS * 256 / HD; i++) {
            const int warp = i / (256 / HD), row = i % (256 / HD);
            sum += ((const float *)(tile + warp * warp_rows * HD))[row * HD + c];
        }
        to[c] = sum;
    }
}

// online_softmax: a step of the softmax of a warp's rows over tiles of scores. s: scores, replaced
// by P; o: the sums of P V so far, rescaled to the new maximum; m, l: maximum (times c) and sum of
// each of the thread's rows, r: acc[r / 2], e / 2 = r % 2. Four lanes share a row, and l is this
// lane's part. After the first step m is finite in every row, so -inf + inf cannot occur.
template <int MT, int N8, int O8>
__device__ __forceinline__ void online_softmax(float (&s)[MT][N8][4], float (&o)[MT][O8][4],
                                               float (&m)[2 * MT], float (&l)[2 * MT], float c) {
    UNROLL
    for (int r = 0; r < 2 * MT; r++) {
        const int i = r / 2, e = r % 2 * 2;
        float top = -INFINITY;
        UNROLL
        for (int n = 0; n < N8; n++) {
            top = fmaxf(top, fmaxf(s[i][n][e], s[i][n][e + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
        top = fmaxf(m[r], fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2)) * c);
        const float rescale = ex2_approx(m[r] - top);
        m[r] = top;
        l[r] *= rescale;
        UNROLL
        for (int n = 0; n < N8; n++) {
            s[i][n][e] = ex2_approx(fmaf(s[i][n][e], c, -top));
            s[i][n][e + 1] = ex2_approx(fmaf(s[i][n][e + 1], c, -top));
            l[r] += s[i][n][e] + s[i][n][e + 1];
        }
        UNROLL
        for (int n = 0; n < O8; n++) {
            o[i][n][e] *= rescale;
            o[i][n][e + 1] *= rescale;
        }
    }
}

// softmax_end: adds l across the four lanes of a row, divides o by it, and writes LSE2 of the rows
// from `first` on, below T, to lse.
template <int MT, int O8>
__device__ __forceinline__ void softmax_end(float (&o)[MT][O8][4], float *lse, float (&m)[2 * MT],
                                            float (&l)[2 * MT], int first, int T) {
    const int lane = threadIdx.x % WARP;
    UNROLL
    for (int r = 0; r < 2 * MT; r++) {
        l[r] += __shfl_xor_sync(ALL_LANES, l[r], 1);
        l[r] += __shfl_xor_sync(ALL_LANES, l[r], 2);
        const int row = first + 8 * r + lane / 4;
        if (lane % 4 == 0 && row < T) {
            lse[row] = m[r] + log2f(l[r]);
        }
        l[r] = 1.0f / l[r];
    }
    each_element<MT, O8>([&](int i, int n, int e) { o[i][n][e] *= l[2 * i + e / 2]; });
}

// tile_ready: waits until the copies of all threads are complete and, with WGMMA, visible to
// products.
template <bool WGMMA> __device__ __forceinline__ void tile_ready() {
    copy_wait<0>();
    if (WGMMA) {
        fence_async();
    }
    __syncthreads();
}

// next_place: returns the place of tile j, where `place` is that of tile j - 1. Two places are
// addressed by j alone, which costs no register.
template <int PLACES> __device__ __forceinline__ int next_place(int place, int j) {
    return PLACES == 2 ? j % 2 : place == PLACES - 1 ? 0 : place + 1;
}

// fragments: rounds scores s to bf16, as the operand a of wgmma_add.
__device__ __forceinline__ void fragments(uint32_t (&p)[4][4], const float (&s)[1][8][4]) {
    UNROLL
    for (int i = 0; i < 16; i++) {
        const float *pair = s[0][i / 2] + i % 2 * 2;
        p[i / 4][i % 4] = pack2<__nv_bfloat16>(pair[0], pair[1]);
    }
}

// attention_forward_kernel: out = softmax(mask(Q K^T / sqrt(HS))) V and LSE2, for 16-bit types.
//   For each query row, over tiles of keys:  m' = max(m, c max_j s_j),  p_j = 2^(c s_j - m'),
//   l = l 2^(m - m') + sum_j p_j,  o = o 2^(m - m') + sum_j p_j v_j;  finally
//   out = o / l,  LSE2 = m + log2(l).
// out (B,T,NH,HS), lse (B,NH,T), qkv (B,T,3,NH,HS); rows 16-byte aligned; c as in invariant 2.
// HS is head_size or, if WHOLE, the compile-time constant HD. grid B NH ceil(T / BM), mapped by
// AttentionBlock, BM = OWN_ROWS queries per block, last (longest) rows first; block 32 WARPS;
// dynamic shared memory FORWARD_BYTES: Q, and K and V in PLACES places.
// stages: 1 start the copies of Q and of the first K, V   2 wait for a tile, start the next
//   3 S = Q K^T   4 mask   5 online softmax   6 O += P V   7 write out and LSE2
// numerics: fp32 except P, rounded to E for stage 6 (l sums p before). bf16: out 2.0e-3, LSE2 6e-8.
// source: FlashAttention-2, algorithm 1 and section 3.3 (each warp owns rows of Q).
// budget: <bf16, 64, true, false> threads 128 shared 49152 regs 219 blocks 2
//   instr/elem 12.8 of 64 loop test gpu_attention
// budget: <bf16, 64, true, false> sm 80 threads 128 shared 49152 regs 168 blocks 3
//   test gpu_attention
// budget: <bf16, 64, true, false> sm 90a threads 128 shared 49152 regs 168 blocks 3
//   test gpu_attention
// budget: <bf16, 64, true, true> sm 90a threads 256 shared 65536 regs 111 blocks 2
//   instr/elem 11.5 of 32 loop hgmma 8 test gpu_attention
// budget: <bf16, 64, false> threads 128 shared 49152 regs 224 blocks 2 test gpu_attention
// budget: <bf16, 128> threads 128 shared 81920 regs 184 blocks 1 instr/elem 21.1 of 32 loop
//   test gpu_attention
// budget: <fp16, 64> sm 75 threads 128 shared 24576 regs 116 blocks 2 instr/elem 23.2 of 16 loop
//   test gpu_attention
// budget: <fp16, 128> sm 75 threads 128 shared 32768 regs 146 blocks 2 instr/elem 45.4 of 8 loop
//   test gpu_attention
template <class E, int HD, bool WHOLE, bool WGMMA>
__global__ void __launch_bounds__(AttentionTiles<E, HD, WGMMA>::WARPS *WARP,
                                  WGMMA ? 2 : WHOLE ? ATTENTION_BLOCKS : 1)
    // NOLINTNEXTLINE(readability-function-size): tiles stay in registers
    attention_forward_kernel(E *out, float *lse, const E *qkv, int B, int T, int NH, int head_size,
                             int section) {
    DYN_TILES(E, tile_q);
    using A = AttentionTiles<E, HD, WGMMA>;
    constexpr int MT = A::MT, BM = A::OWN_ROWS, BN = A::FORWARD_ROWS, TILE = BN * HD;
    E *tile_k = tile_q + BM * HD, *tile_v = tile_k + A::PLACES * TILE;
    const int HS = WHOLE ? HD : head_size;
    const AttentionBlock block = attention_block(section, B * NH, T, NH, HS);
    const int row0 = (ceil_div(T, BM) - 1 - block.tile) * BM;
    const int warp_row = (int)threadIdx.x / WARP * 16 * MT, own = row0 + warp_row;
    const int first = WGMMA ? row0 + 64 * warpgroup_index(tile_q) : own;
    const float c = LOG2_E / sqrtf((float)HS);
    const uint32_t C = NH * HS, stride = 3 * C;
    const E *q = qkv + block.qkv_at, *k = q + C, *v = k + C;

    auto load_keys = [&](int j, int place) {
        tile_load<HD, BN, A::WARPS>(tile_k + place * TILE, k, stride, j * BN, T, HS);
        tile_load<HD, BN, A::WARPS>(tile_v + place * TILE, v, stride, j * BN, T, HS);
        copy_commit();
    };

    // 1. Start copying Q and the first K and V.
    tile_load<HD, BM, A::WARPS>(tile_q, q, stride, row0, T, HS);
    load_keys(0, 0);
    float o[MT][HD / 8][4] = {}, m[2 * MT], l[2 * MT] = {};
    UNROLL
    for (int r = 0; r < 2 * MT; r++) {
        m[r] = -INFINITY;
    }
    const uint64_t q_rows = tile_descriptor(tile_q, 2 * HD * (first - row0));

    const int tiles = ceil_div(min(row0 + BM, T), BN);
    for (int j = 0, count = 0, next; j < tiles; j++, count = next) {
        // 2. The barrier makes all threads' copies of tile j (and of Q) visible to the block, and
        //    ensures that all warps are done with the tile whose place tile j + 1 reuses.
        const int place = A::PLACES == 2 ? j % 2 : count;
        next = next_place<A::PLACES>(place, j + 1);
        tile_ready<WGMMA>();
        if (j + 1 < tiles) {
            load_keys(j + 1, next);
        }
        if (j * BN >= first + A::TOGETHER || first >= T) {  // fully masked, or past T
            if (WGMMA) {
                wgmma_wait<0>();  // the tile before is about to be overwritten
            }
            continue;
        }

        // 3. Scores. The wait also covers the previous step's P V.
        float s[MT][BN / 8][4];
        if constexpr (WGMMA) {
            wgmma_fence();
            wgmma_abt(s, q_rows, tile_descriptor(tile_k, 2 * TILE * place));
            wgmma_commit();
            wgmma_wait<0>();
            settle(s);
            settle(o);
        } else {
            warp_mul_abt<HD>(s, tile_q, warp_row, tile_k + place * TILE);
        }

        // 4. Only tiles that extend past the diagonal of the first row contain future keys. The
        //    mask also covers keys from T on: they are in the future of every row that is written.
        if ((j + 1) * BN > first + 1) {
            mask_future(s, own, j * BN, false);
        }

        // 5. P overwrites S.
        online_softmax(s, o, m, l, c);

        // 6. P, rounded to E, times V. With WGMMA this runs until the wait of the next stage 3.
        if constexpr (WGMMA) {
            uint32_t p[4][4];
            fragments(p, s);
            wgmma_fence();
            wgmma_add(o, p, tile_descriptor(tile_v, 2 * TILE * place));
            wgmma_commit();
        } else {
            warp_mul_add<HD>(o, s, tile_v + place * TILE);
        }
    }
    if constexpr (WGMMA) {
        wgmma_wait<0>();
        settle(o);
    }

    // 7. Each warp stages its output in its own rows of Q.
    softmax_end(o, lse + block.stat_at, m, l, own, T);
    if (WGMMA) {
        __syncthreads();  // all warps' products have read Q
    }
    warp_store_rows<HD, false>(out + block.out_at, C, own, T, HS, tile_q, warp_row, 1.0f, o);
}

// The simple fp32 kernels: one warp per row, four rows per block, 32 rows of the other side per
// iteration. A lane first computes the whole dot product with one of those rows, then handles
// columns lane, lane + 32, ... of the output.
enum { ROW_WARPS = 4 };

// row_dot: returns the sum over d < n of a[d] b[d], added in order of d.
__device__ inline float row_dot(const float *a, const float *b, int n) {
    float sum = 0.0f;
    for (int d = 0; d < n; d++) {
        sum = fmaf(a[d], b[d], sum);
    }
    return sum;
}

// attention_forward_rows_kernel: as attention_forward_kernel, but in fp32 and for any HS.
// grid (NH, B, ceil(T / ROW_WARPS)), block 32 ROW_WARPS; dynamic shared memory
// ROW_WARPS (HS + 32) floats: o and p of each warp.
// numerics: fp32 with exp2f; out within 5e-7, LSE2 9e-8.
// budget: threads 128 shared 1536 regs 56 blocks 9 test gpu_attention
__global__ void __launch_bounds__(ROW_WARPS *WARP)
    attention_forward_rows_kernel(float *out, float *lse, const float *qkv, int T, int NH, int HS) {
    DYN_SHARED(float, shared);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int t = (int)blockIdx.z * ROW_WARPS + warp;
    if (t >= T) {
        return;  // the whole warp exits; no block barrier follows
    }
    float *o = shared + warp * (HS + WARP), *p = o + HS, m = -INFINITY, l = 0.0f;
    const float c = LOG2_E / sqrtf((float)HS);
    const size_t C = (size_t)NH * HS, stride = 3 * C, at = (size_t)blockIdx.x * HS;
    const float *rows = qkv + (size_t)blockIdx.y * T * stride + at, *q = rows + t * stride;
    for (int j0 = 0; j0 <= t; j0 += WARP) {
        const int count = min(WARP, t + 1 - j0);
        const float *k = rows + j0 * stride + C, *v = k + C;
        const float s = lane < count ? row_dot(q, k + lane * stride, HS) * c : -INFINITY;
        const float top = fmaxf(m, warp_max(s)), rescale = exp2f(m - top);
        __syncwarp();  // all lanes have read p of the previous iteration
        p[lane] = exp2f(s - top);
        l = l * rescale + warp_sum(p[lane]);
        m = top;
        __syncwarp();  // all lanes have written p
        for (int d = lane; d < HS; d += WARP) {
            float sum = j0 == 0 ? 0.0f : o[d] * rescale;
            for (int j = 0; j < count; j++) {
                sum = fmaf(p[j], v[j * stride + d], sum);
            }
            o[d] = sum;
        }
    }
    for (int d = lane; d < HS; d += WARP) {
        out[((size_t)blockIdx.y * T + t) * C + at + d] = o[d] / l;
    }
    if (lane == 0) {
        lse[((size_t)blockIdx.y * NH + blockIdx.x) * T + t] = m + log2f(l);
    }
}

constexpr int HEAD_MAX = 128, HEAD_UNIT = 8;  // head sizes of the 16-bit kernels
constexpr int HEAD_MAX_FP32 = 512;            // each warp keeps a row in shared memory

// check_attention: asserts the limits of the attention kernels, for the forward and backward pass.
template <class E> static void check_attention(int B, int T, int C, int NH) {
    static_assert(LENGTH_MAX <= GRID_YZ_MAX * ROW_WARPS, "one block per four rows");
    static_assert((uint64_t)LENGTH_MAX * 3 * CHANNELS_MAX < UINT32_MAX, "tile_load's offsets");
    check(B >= 1 && B <= GRID_YZ_MAX && T >= 1 && T <= LENGTH_MAX && NH >= 1 && C % NH == 0,
          "attention of batch %d, length %d, %d channels in %d heads", B, T, C, NH);
    const int HS = C / NH;
    check(is_fp32<E> ? HS <= HEAD_MAX_FP32 : HS % HEAD_UNIT == 0 && HS <= HEAD_MAX,
          "attention of heads of %d channels", HS);
}

// attention_section: returns the number of heads whose K and V (for dK and dV: Q and dO) share the
// L2 cache. They may fill half of it; the other half is left for the tensors that a block reads or
// writes once.
static int attention_cache_bytes;  // size of L2, queried at the first launch; tests override it

static int attention_section(size_t head_bytes, int heads) {
    if (attention_cache_bytes == 0) {
        int device;
        cuda_check(cudaGetDevice(&device));
        cuda_check(cudaDeviceGetAttribute(&attention_cache_bytes, cudaDevAttrL2CacheSize, device));
    }
    const size_t section = (size_t)attention_cache_bytes / 2 / head_bytes;
    return section < 1 ? 1 : section < (size_t)heads ? (int)section : heads;
}

// cache_append_kernel: copies keys and values of `rows` tokens from qkv (rows,3,NH,HS) to positions
// first, first + 1, ... of cache (2,NH,positions,HS), all of E. Exact. Grid ceil(2 rows C / 256),
// block 256, one element per thread: a token has too few elements for vectorized copies to pay off.
// budget: <bf16> threads 256 regs 16 blocks 6 test gpu_cached
template <class E>
__global__ void cache_append_kernel(E *cache, const E *qkv, int positions, int first, int rows,
                                    int NH, int HS) {
    const int C = NH * HS, i = blockIdx.x * blockDim.x + threadIdx.x;
    const int row = i / (2 * C), at = i % (2 * C);
    if (row < rows) {
        cache[((size_t)(at / HS) * positions + first + row) * HS + at % HS] =
            qkv[(size_t)row * 3 * C + C + at];
    }
}

constexpr int CACHED_WARPS = 8, CACHED_KEYS = 8;

// A warp's partial results for one query: m, the largest score; l, the sum of 2^(score - m); o, the
// sum of the values weighted by these powers. A lane holds channels lane, lane + 32, ....
template <int D> struct CachedSums {
    float o[D], m, l;
};

// Returns 2^x. 16-bit types use the hardware approximation, whose error is below their rounding
// error.
template <class E> __device__ inline float cached_power(float x) {
    if constexpr (is_fp32<E>) {
        return exp2f(x);
    } else {
        return ex2_approx(x);
    }
}

// Returns channel lane + 32 i of a row of HS channels, or 0 if that is past the row's end or
// `there` is false.
template <class E> __device__ inline float cached_channel(const E *row, int i, int HS, bool there) {
    const int d = i * WARP + threadIdx.x % WARP;
    return there && d < HS ? to_float(row[d]) : 0.0f;
}

// Processes the warp's next CACHED_KEYS keys; the causal mask hides all but the first `keys` of
// them (which may exceed CACHED_KEYS). Computes the scores, reduced across the lanes, then updates
// maximum, sum and values as in the kernels above.
template <class E, int D>
__device__ inline void cached_round(CachedSums<D> &sums, const float (&q)[D], const E *key,
                                    const E *value, int keys, int HS) {
    float s[CACHED_KEYS], top = sums.m;
    UNROLL
    for (int k = 0; k < CACHED_KEYS; k++) {
        s[k] = 0.0f;
        UNROLL
        for (int i = 0; i < D; i++) {
            s[k] = fmaf(q[i], cached_channel(key + (size_t)k * HS, i, HS, k < keys), s[k]);
        }
    }
    UNROLL
    for (int k = 0; k < CACHED_KEYS; k++) {
        s[k] = warp_sum(s[k]);
        s[k] = k < keys ? s[k] : -INFINITY;
        top = fmaxf(top, s[k]);
    }
    const float rescale = cached_power<E>(sums.m - top);
    sums.m = top;
    sums.l *= rescale;
    UNROLL
    for (int i = 0; i < D; i++) {
        sums.o[i] *= rescale;
    }
    UNROLL
    for (int k = 0; k < CACHED_KEYS; k++) {
        const float p = cached_power<E>(s[k] - top);
        sums.l += p;
        UNROLL
        for (int i = 0; i < D; i++) {
            sums.o[i] = fmaf(p, cached_channel(value + (size_t)k * HS, i, HS, k < keys), sums.o[i]);
        }
    }
}

// attention_cached_kernel: out (rows,NH,HS) = softmax(q K^T / sqrt(HS)) V for the queries of qkv
// (rows,3,NH,HS) at positions first, first + 1, ..., over the keys and values of cache (2,NH,
// positions,HS) up to each query's own position. All tensors are of E; sums are in fp32.
// Grid (NH, rows), block CACHED_WARPS warps; HS <= 32 D.
// 1. A warp processes CACHED_KEYS keys at a time, so that their loads are in flight together: the
//    kernel is bound by memory latency, not by arithmetic (cached_round).
// 2. The warps' sums are rescaled to the largest maximum and added in order of the warps.
// Error, measured in test gpu_cached: fp32 1.6e-7 for values of magnitude 1; in 16-bit types the
// rounding error of the type. Source: Dao et al., "Flash-Decoding for long-context inference"
// (2023), restricted to one thread block per head and query.
// budget: <bf16, 2> threads 256 shared 2112 regs 96 blocks 2 test gpu_cached
// budget: <bf16, 4> threads 256 shared 4160 regs 128 blocks 2 test gpu_cached
template <class E, int D>
__global__ void attention_cached_kernel(E *out, const E *qkv, const E *cache, int positions,
                                        int first, int NH, int HS) {
    SHARED(float, all, [CACHED_WARPS][WARP * D]);
    SHARED(float, tops, [CACHED_WARPS]);
    SHARED(float, totals, [CACHED_WARPS]);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, h = blockIdx.x;
    const int C = NH * HS, seen = first + blockIdx.y + 1;
    const float c = 1.44269504f / sqrtf((float)HS);  // scales scores to powers of 2
    const E *keys = cache + (size_t)h * positions * HS;
    const E *values = cache + (size_t)(NH + h) * positions * HS;
    CachedSums<D> sums = {{}, -INFINITY, 0.0f};
    float q[D];
    UNROLL
    for (int i = 0; i < D; i++) {
        q[i] = cached_channel(qkv + (size_t)blockIdx.y * 3 * C + h * HS, i, HS, true) * c;
    }
    for (int j = warp * CACHED_KEYS; j < seen; j += CACHED_WARPS * CACHED_KEYS) {  // 1
        cached_round<E, D>(sums, q, keys + (size_t)j * HS, values + (size_t)j * HS, seen - j, HS);
    }
    UNROLL
    for (int i = 0; i < D; i++) {
        all[warp][i * WARP + lane] = sums.o[i];
    }
    if (lane == 0) {
        tops[warp] = sums.m;
        totals[warp] = sums.l;
    }
    __syncthreads();  // all warps' sums are written
    for (int d = threadIdx.x; d < HS; d += CACHED_WARPS * WARP) {  // 2
        float top = tops[0], total = 0.0f, sum = 0.0f;
        for (int w = 1; w < CACHED_WARPS; w++) {
            top = fmaxf(top, tops[w]);
        }
        for (int w = 0; w < CACHED_WARPS; w++) {
            const float weight = cached_power<E>(tops[w] - top);
            total = fmaf(weight, totals[w], total);
            sum = fmaf(weight, all[w][d], sum);
        }
        out[(size_t)blockIdx.y * C + h * HS + d] = from_float<E>(sum / total);
    }
}

// gpu_attention_cached: appends the keys and values of `rows` tokens at positions first, first + 1,
// ... to the cache, then computes the attention of these tokens; see the kernels. out (rows,C), qkv
// (rows,3,NH,HS), cache (2,NH,positions,HS) of E.
template <class E>
static void gpu_attention_cached(E *out, E *cache, const E *qkv, int positions, int first,
                                 int rows, int C, int NH, cudaStream_t stream) {
    const int HS = C / NH;
    check_attention<E>(1, positions, C, NH);
    check(first >= 0 && rows >= 1 && first + rows <= positions && rows <= GRID_YZ_MAX,
          "positions %d to %d of %d", first, first + rows - 1, positions);
    launch(cache_append_kernel<E>, ceil_div(2 * rows * C, 256), 256, 0, stream, cache, qkv,
           positions, first, rows, NH, HS);
    auto start = [&](auto *kernel) {
        launch(kernel, dim3(NH, rows), CACHED_WARPS * WARP, 0, stream, out, qkv, cache, positions,
               first, NH, HS);
    };
    if (HS <= 2 * WARP) {
        start(attention_cached_kernel<E, 2>);
    } else if (HS <= HEAD_MAX) {
        start(attention_cached_kernel<E, HEAD_MAX / WARP>);
    } else if constexpr (is_fp32<E>) {
        start(attention_cached_kernel<E, HEAD_MAX_FP32 / WARP>);
    }
}

// -------------------------------------------------------------------------------------------------
// 32. Flash attention backward
// Two kernels without atomics: in one each block owns rows of dQ, in the other rows of dK and dV.
// Each recomputes P from LSE2, which costs 7 tile matmuls instead of 5 but gives bitwise
// reproducible results.
//   P = 2^(c Q K^T - LSE2) (0 for future keys)      D = rowsum(dO * O)      dS = P * (dO V^T - D)
//   dQ = dS K / sqrt(HS)      dK = dS^T Q / sqrt(HS)      dV = P^T dO
// 1. dqkv (B,T,3,NH,HS) is overwritten, each element by one thread. sums (parts, 3C), fp32,
//    receives the column sums of dqkv after rounding to E, one part per tile of each sequence. The
//    kernels form them as they write dqkv, so dqkv is not read back.
// 2. drow (B,NH,T) passes D from the dQ kernel to the dK/dV kernel, so they must run in this order.
// 3. P and dS are converted from accumulators to fragments in registers, rounded to E, and never
//    stored.
// 4. Rows past T need no mask: queries from T on have Q = dO = 0, D = 0 and LSE2 = inf, so P = 0.
// source: "FlashAttention-2", algorithm 2, with a separate kernel for dQ instead of its atomic
// sums.

// row_statistics: computes D of a head's rows from `first` on, below T, and writes it to drow;
// loads their LSE2. out, dout: row 0 of the head, rows `stride` apart. The four lanes that will
// hold a row of scores share the computation of its D: lane t takes packs t, t + 4, .... All loads
// are issued before the first value is used.
template <int HD, class E, int MT>
__device__ __forceinline__ void row_statistics(float (&d)[2 * MT], float (&lse2)[2 * MT],
                                               float *drow, const float *lse, const E *out,
                                               const E *dout, uint32_t stride, int first, int T,
                                               int HS) {
    const int lane = threadIdx.x % WARP;
    Pack<E> a[2 * MT][HD / 32], b[2 * MT][HD / 32];
    auto each_pack = [&](auto f) {
        UNROLL
        for (int x = 0; x < 2 * MT * (HD / 32); x++) {
            const int r = x / (HD / 32), p = x % (HD / 32), chunk = lane % 4 + 4 * p;
            const int row = first + 8 * r + lane / 4;
            if (row < T && 8 * chunk < HS) {
                f(r, a[r][p], b[r][p], row * stride + 8 * chunk);
            }
        }
    };
    each_pack([&](int, Pack<E> &in_out, Pack<E> &in_dout, size_t at) {
        in_out = pack_load(out + at);
        in_dout = pack_load(dout + at);
    });
    each_pack([&](int r, Pack<E> &in_out, Pack<E> &in_dout, size_t) {
        float x[8], y[8];
        pack_to_floats(x, in_out);
        pack_to_floats(y, in_dout);
        UNROLL
        for (int i = 0; i < 8; i++) {
            d[r] = fmaf(x[i], y[i], d[r]);
        }
    });
    UNROLL
    for (int r = 0; r < 2 * MT; r++) {
        const int row = first + 8 * r + lane / 4;
        d[r] += __shfl_xor_sync(ALL_LANES, d[r], 1);
        d[r] += __shfl_xor_sync(ALL_LANES, d[r], 2);
        lse2[r] = row < T ? lse[row] : INFINITY;
        if (lane % 4 == 0 && row < T) {
            drow[row] = d[r];
        }
    }
}

// attention_backward_dq_kernel: computes dQ and D, for 16-bit types.
// dqkv, qkv (B,T,3,NH,HS), dout, out (B,T,NH,HS), drow, lse (B,NH,T); c as in chapter Flash
// attention forward.
// grid B NH ceil(T / BM), mapped by AttentionBlock, BM = OWN_ROWS queries, last rows first; block
// 32 WARPS; dynamic shared memory DQ_BYTES: Q, dO, and double-buffered K and V.
// stages: 1 start the copies of Q, dO and of the first K, V   2 D of the warp's rows
//   3 wait for a tile, start the next   4 S = Q K^T, dP = dO V^T   5 mask, P, dS
//   6 dQ += dS K   7 write dQ
// With WGMMA, P is computed while dP is still under way. Each step ends with the wait for dQ: with
// a late wait the fragments of dS, kept until then, would leave too few registers.
// numerics: fp32 except dS, rounded to E for stage 6. bf16: dQ 3.3e-3, D (of the rounded out)
// 2.3e-3.
// budget: <bf16, 64, true, false> threads 128 shared 49152 regs 230 blocks 2
//   instr/elem 13.8 of 32 loop test gpu_attention
// budget: <bf16, 64, false> threads 128 shared 49152 regs 230 blocks 2 instr/elem 13.8 of 32 loop
//   test gpu_attention
// budget: <bf16, 64, true, true> sm 90a threads 256 shared 65536 regs 122 blocks 2
//   instr/elem 10.6 of 32 loop hgmma 12 overlap 32 test gpu_attention
// budget: <bf16, 128> threads 128 shared 98304 regs 230 blocks 1 instr/elem 21.1 of 32 loop
//   test gpu_attention
// budget: <fp16, 64> sm 75 threads 128 shared 32768 regs 148 blocks 2 instr/elem 22.4 of 16 loop
//   test gpu_attention
// budget: <fp16, 128> sm 75 threads 128 shared 65536 regs 188 blocks 1 instr/elem 33 of 16 loop
//   test gpu_attention
template <class E, int HD, bool WHOLE, bool WGMMA>
__global__ void __launch_bounds__(AttentionTiles<E, HD, WGMMA>::WARPS *WARP, 2)
    // NOLINTNEXTLINE(readability-function-size): tiles stay in registers
    attention_backward_dq_kernel(E *dqkv, float *sums, float *drow, const E *dout, const E *qkv,
                                 const E *out, const float *lse, int B, int T, int NH,
                                 int head_size, int section) {
    DYN_TILES(E, tile_q);
    using A = AttentionTiles<E, HD, WGMMA>;
    constexpr int MT = A::MT, BM = A::OWN_ROWS, BN = A::DQ_ROWS, TILE = BN * HD;
    E *tile_do = tile_q + BM * HD, *tile_k = tile_do + BM * HD, *tile_v = tile_k + 2 * TILE;
    const int HS = WHOLE ? HD : head_size;
    const AttentionBlock block = attention_block(section, B * NH, T, NH, HS);
    const int row0 = (ceil_div(T, BM) - 1 - block.tile) * BM;
    const int warp_row = (int)threadIdx.x / WARP * 16 * MT, own = row0 + warp_row;
    const int first = WGMMA ? row0 + 64 * warpgroup_index(tile_q) : own;
    const float c = LOG2_E / sqrtf((float)HS), scale = 1.0f / sqrtf((float)HS);
    const uint32_t C = NH * HS, stride = 3 * C;
    const size_t q_at = block.qkv_at, o_at = block.out_at, stat_at = block.stat_at;
    const E *k = qkv + q_at + C, *v = k + C;

    auto load_keys = [&](int j) {
        tile_load<HD, BN, A::WARPS>(tile_k + j % 2 * TILE, k, stride, j * BN, T, HS);
        tile_load<HD, BN, A::WARPS>(tile_v + j % 2 * TILE, v, stride, j * BN, T, HS);
        copy_commit();
    };

    // 1. Start copying Q, dO and the first K and V.
    tile_load<HD, BM, A::WARPS>(tile_q, qkv + q_at, stride, row0, T, HS);
    tile_load<HD, BM, A::WARPS>(tile_do, dout + o_at, C, row0, T, HS);
    load_keys(0);

    // 2. D.
    float dq[MT][HD / 8][4] = {}, d[2 * MT] = {}, lse2[2 * MT];
    row_statistics<HD, E, MT>(d, lse2, drow + stat_at, lse + stat_at, out + o_at, dout + o_at, C,
                              own, T, HS);
    const uint64_t q_rows = tile_descriptor(tile_q, 2 * HD * (first - row0));
    const uint64_t do_rows = tile_descriptor(tile_do, 2 * HD * (first - row0));

    const int tiles = ceil_div(min(row0 + BM, T), BN);
    for (int j = 0; j < tiles; j++) {
        // 3. The barrier makes all threads' copies of tile j (and of Q, dO) visible to the block,
        //    and ensures that all warps are done with tile j - 1, whose place tile j + 1 reuses.
        tile_ready<WGMMA>();
        if (j + 1 < tiles) {
            load_keys(j + 1);
        }
        if (j * BN >= first + A::TOGETHER || first >= T) {
            continue;  // fully masked, or past T
        }
        float s[MT][BN / 8][4], dp[MT][BN / 8][4];
        E *keys = tile_k + j % 2 * TILE, *values = tile_v + j % 2 * TILE;
        const bool masked = (j + 1) * BN > first + 1;
        if constexpr (WGMMA) {
            // 4. Scores, and the gradient of P, both under way.
            const uint64_t key_rows = tile_descriptor(tile_k, j % 2 * 2 * TILE);
            uint32_t ds[4][4];
            wgmma_fence();
            wgmma_abt(s, q_rows, key_rows);
            wgmma_commit();
            wgmma_abt(dp, do_rows, tile_descriptor(tile_v, j % 2 * 2 * TILE));
            wgmma_commit();
            wgmma_wait<1>();
            settle(s);

            // 5. P, masked after the exponentials: without a branch between these and the second
            //    wait, ptxas would move the wait before them. Then dS.
            each_element<1, 8>([&](int, int n, int e) {
                s[0][n][e] = ex2_approx(fmaf(s[0][n][e], c, -lse2[e / 2]));
            });
            settle(s);
            if (masked) {
                mask_future(s, own, j * BN, false, 0.0f);
            }
            wgmma_wait<0>();
            settle(dp);
            each_element<1, 8>([&](int, int n, int e) { s[0][n][e] *= dp[0][n][e] - d[e / 2]; });

            // 6. dS, rounded to bf16, times K.
            fragments(ds, s);
            wgmma_fence();
            wgmma_add(dq, ds, key_rows);
            wgmma_commit();
            wgmma_wait<0>();
            settle(dq);
        } else {
            warp_mul_abt<HD>(s, tile_q, warp_row, keys);
            warp_mul_abt<HD>(dp, tile_do, warp_row, values);
            if (masked) {
                mask_future(s, own, j * BN, false);
            }
            each_element<MT, BN / 8>([&](int i, int n, int e) {
                const float p = ex2_approx(fmaf(s[i][n][e], c, -lse2[2 * i + e / 2]));
                s[i][n][e] = p * (dp[i][n][e] - d[2 * i + e / 2]);
            });
            warp_mul_add<HD>(dq, s, keys);
        }
    }

    // 7. Each warp stages dQ in its own rows of Q.
    if (WGMMA) {
        __syncthreads();  // all warps' products have read Q
    }
    warp_store_rows<HD, true>(dqkv + q_at, stride, own, T, HS, tile_q, warp_row, scale, dq);
    __syncthreads();  // all warps have written their sums
    head_column_sums<HD, A::WARPS>(sums + sums_place<BM>(block, T, C), tile_q, 16 * MT, HS);
}

// attention_backward_dkv_kernel: computes dK and dV, for 16-bit types; arguments as for the dQ
// kernel.
// grid B NH ceil(T / BN), BN = OWN_ROWS keys, first (longest) rows first; block 32
// WARPS; dynamic shared memory DKV_BYTES: K, V, and double-buffered Q, dO, LSE2 and D.
// stages: 1 start the copies of K, V and of the first Q, dO, LSE2, D   2 wait for a tile, start the
//   next   3 S^T = K Q^T   4 mask, P^T   5 dP^T = V dO^T, dS^T   6 dV += P^T dO   7 dK += dS^T Q
//   8 store the next LSE2 and D   9 write dK and dV
// numerics: fp32 except P and dS, rounded to E for stages 6 and 7. bf16: dK 3.1e-3, dV 2.4e-3.
// budget: <bf16, 64> threads 128 shared 50176 regs 247 blocks 2 instr/elem 16.7 of 32 loop
//   test gpu_attention
// budget: <bf16, 128> threads 128 shared 66560 regs 247 blocks 1 instr/elem 30.7 of 16 loop
//   test gpu_attention
// budget: <fp16, 64> sm 75 threads 128 shared 25600 regs 127 blocks 2 instr/elem 35.5 of 8 loop
//   test gpu_attention
// budget: <fp16, 128> sm 75 threads 128 shared 50176 regs 232 blocks 1 instr/elem 50.9 of 8 loop
//   test gpu_attention
template <class E, int HD, bool WHOLE>
__global__ void __launch_bounds__(AttentionTiles<E, HD, false>::WARPS *WARP)
    // NOLINTNEXTLINE(readability-function-size): tiles stay in registers
    attention_backward_dkv_kernel(E *dqkv, float *sums, const float *drow, const E *dout,
                                  const E *qkv, const float *lse, int B, int T, int NH,
                                  int head_size, int section) {
    DYN_SHARED(E, tile_k);
    using A = AttentionTiles<E, HD, false>;
    constexpr int WARPS = A::WARPS, MT = A::MT, BN = A::OWN_ROWS, BM = A::DKV_ROWS;
    static_assert(2 * BM <= WARPS * WARP, "a thread carries one row statistic");
    E *tile_v = tile_k + BN * HD, *tile_q = tile_v + BN * HD, *tile_do = tile_q + 2 * BM * HD;
    float *stats = (float *)(tile_do + 2 * BM * HD);  // (2 stages, threads)
    const int HS = WHOLE ? HD : head_size, lane = threadIdx.x % WARP;
    const AttentionBlock block = attention_block(section, B * NH, T, NH, HS);
    const int row0 = block.tile * BN;
    const int warp_row = (int)threadIdx.x / WARP * 16 * MT, first = row0 + warp_row;
    const float c = LOG2_E / sqrtf((float)HS), scale = 1.0f / sqrtf((float)HS);
    const size_t C = (size_t)NH * HS, stride = 3 * C;
    const size_t q_at = block.qkv_at;
    const E *q = qkv + q_at, *d_o = dout + block.out_at;

    auto load_queries = [&](int j) {
        tile_load<HD, BM, WARPS>(tile_q + j % 2 * BM * HD, q, stride, j * BM, T, HS);
        tile_load<HD, BM, WARPS>(tile_do + j % 2 * BM * HD, d_o, C, j * BM, T, HS);
        copy_commit();
    };
    // Threads 0 .. BM - 1 load LSE2 of a tile's queries, all others D (only BM of those are used).
    const float *stat = ((int)threadIdx.x < BM ? lse : drow) + block.stat_at;
    auto load_stat = [&](int j) {
        const int query = j * BM + (int)threadIdx.x % BM;
        return query < T ? stat[query] : (int)threadIdx.x < BM ? INFINITY : 0.0f;
    };

    // 1. Start copying K, V and the tile of queries on the diagonal.
    const int start = row0 / BM, end = ceil_div(T, BM);
    tile_load<HD, BN, WARPS>(tile_k, q + C, stride, row0, T, HS);
    tile_load<HD, BN, WARPS>(tile_v, q + 2 * C, stride, row0, T, HS);
    load_queries(start);
    stats[start % 2 * WARPS * WARP + threadIdx.x] = load_stat(start);

    float dk[MT][HD / 8][4] = {}, dv[MT][HD / 8][4] = {};
    for (int j = start; j < end; j++) {
        // 2. The barrier makes all threads' copies and statistics of tile j (and K, V) visible to
        //    the block, and ensures that all warps are done with tile j - 1, whose buffer tile
        //    j + 1 reuses.
        copy_wait<0>();
        __syncthreads();
        if (j + 1 < end) {
            load_queries(j + 1);
        }
        const float next_stat = load_stat(j + 1);
        const int now = j % 2 * BM * HD;

        if ((j + 1) * BM > first && first < T) {  // otherwise all queries precede the keys
            // 3. Scores, one row per key.
            float s[MT][BM / 8][4], dp[MT][BM / 8][4];
            warp_mul_abt<HD>(s, tile_k, warp_row, tile_q + now);

            // 4. P overwrites S.
            if (j * BM < first + 16 * MT - 1) {
                mask_future(s, j * BM, first, true);
            }
            const float *lse2 = stats + j % 2 * WARPS * WARP + lane % 4 * 2, *d = lse2 + BM;
            each_element<MT, BM / 8>([&](int i, int n, int e) {
                s[i][n][e] = ex2_approx(fmaf(s[i][n][e], c, -lse2[8 * n + e % 2]));
            });

            // 5. dS overwrites dP.
            warp_mul_abt<HD>(dp, tile_v, warp_row, tile_do + now);
            each_element<MT, BM / 8>([&](int i, int n, int e) {
                dp[i][n][e] = s[i][n][e] * (dp[i][n][e] - d[8 * n + e % 2]);
            });

            // 6. P, rounded to E, times dO (doing this right after P would make ptxas spill on
            //    sm_80).
            // 7. dS, rounded to E, times Q.
            warp_mul_add<HD>(dv, s, tile_do + now);
            warp_mul_add<HD>(dk, dp, tile_q + now);
        }

        // 8. Tile j - 1's statistics, overwritten here, were last read before this iteration's
        //    barrier.
        stats[(j + 1) % 2 * WARPS * WARP + threadIdx.x] = next_stat;
    }

    // 9. Only this warp touches its rows of K and V in shared memory, so it stages dK and dV there.
    dqkv += q_at + C;
    warp_store_rows<HD, true>(dqkv, stride, first, T, HS, tile_k, warp_row, scale, dk);
    warp_store_rows<HD, true>(dqkv + C, stride, first, T, HS, tile_v, warp_row, 1.0f, dv);
    __syncthreads();  // all warps have written their sums
    sums += sums_place<BN>(block, T, C) + C;
    head_column_sums<HD, WARPS>(sums, tile_k, 16 * MT, HS);
    head_column_sums<HD, WARPS>(sums + C, tile_v, 16 * MT, HS);
}

// attention_backward_dkv_wgmma_kernel: as attention_backward_dkv_kernel; E is bf16 and HS 64.
// It is a kernel of its own because in a common one ptxas gives the mma.sync instances more
// registers. grid B NH ceil(T / BN), BN = OWN_ROWS keys, first (longest) rows first; block 32
// WARPS; dynamic shared memory DKV_BYTES: K, V, and Q, dO, LSE2 and D in PLACES places.
// stages: as above, but 5 starts before 4: P^T is computed while dP^T is still under way. The
// products of stages 6 and 7 run until the first wait of the next step.
// numerics: as above: bf16: dK 3.1e-3, dV 2.4e-3.
// budget: sm 90a threads 256 shared 83456 regs 194 blocks 1 instr/elem 12.5 of 32 loop hgmma 16
//   overlap 32 test gpu_attention
__global__ void __launch_bounds__(AttentionTiles<__nv_bfloat16, 64, true>::WARPS *WARP, 1)
    // NOLINTNEXTLINE(readability-function-size): tiles stay in registers
    attention_backward_dkv_wgmma_kernel(__nv_bfloat16 *dqkv, float *sums, const float *drow,
                                        const __nv_bfloat16 *dout, const __nv_bfloat16 *qkv,
                                        const float *lse, int B, int T, int NH, int, int section) {
    DYN_TILES(__nv_bfloat16, tile_k);
    constexpr int HS = 64;
    using A = AttentionTiles<__nv_bfloat16, HS, true>;
    constexpr int BN = A::OWN_ROWS, BM = A::DKV_ROWS, TILE = BM * HS;
    __nv_bfloat16 *tile_v = tile_k + BN * HS, *tile_q = tile_v + BN * HS;
    __nv_bfloat16 *tile_do = tile_q + A::PLACES * TILE;
    float *stats = (float *)(tile_do + A::PLACES * TILE);  // (PLACES, LSE2 and D, BM)
    const AttentionBlock block = attention_block(section, B * NH, T, NH, HS);
    const int row0 = block.tile * BN, group = warpgroup_index(tile_k);
    const int first = row0 + 64 * group;  // row of the warpgroup
    const int thread = threadIdx.x, warp_row = thread / WARP * 16;
    const float c = LOG2_E / sqrtf((float)HS), scale = 1.0f / sqrtf((float)HS);
    const uint32_t C = NH * HS, stride = 3 * C;
    const __nv_bfloat16 *q = qkv + block.qkv_at, *d_o = dout + block.out_at;

    auto load_queries = [&](int j, int place) {
        tile_load<HS, BM, A::WARPS>(tile_q + place * TILE, q, stride, j * BM, T, HS);
        tile_load<HS, BM, A::WARPS>(tile_do + place * TILE, d_o, C, j * BM, T, HS);
        copy_commit();
    };
    // Threads 0 .. BM - 1 load LSE2 of a tile's queries, the others D (only BM of those are used).
    // Without a branch: after one, the compiler might no longer treat the warp as converged.
    const float *stat = (thread < BM ? lse : drow) + block.stat_at;
    auto load_stat = [&](int j) {
        const int query = j * BM + thread % BM;
        const float x = stat[min(query, T - 1)];
        return query < T ? x : thread < BM ? INFINITY : 0.0f;
    };
    auto store_stat = [&](int place, float x) {
        if (thread < 2 * BM) {
            stats[place * 2 * BM + thread] = x;
        }
    };

    // 1. Start copying K, V and the tile of queries on the diagonal.
    const int start = row0 / BM, end = ceil_div(T, BM);
    tile_load<HS, BN, A::WARPS>(tile_k, q + C, stride, row0, T, HS);
    tile_load<HS, BN, A::WARPS>(tile_v, q + 2 * C, stride, row0, T, HS);
    load_queries(start, 0);
    store_stat(0, load_stat(start));

    float dk[1][8][4] = {}, dv[1][8][4] = {};
    const uint64_t k_rows = tile_descriptor(tile_k, 2 * TILE * group);
    const uint64_t v_rows = tile_descriptor(tile_v, 2 * TILE * group);
    for (int j = start, place = 0; j < end; j++) {
        // 2. The barrier makes all threads' copies of tile j (and of K, V) visible to the block's
        //    products, and their statistics to the block, and ensures that the products of tile
        //    j - 2, whose place tile j + 1 reuses, are complete.
        copy_wait<0>();
        fence_async();
        __syncthreads();
        const int next = next_place<A::PLACES>(place, j + 1);
        if (j + 1 < end) {
            load_queries(j + 1, next);
        }
        const float next_stat = load_stat(j + 1);
        if ((j + 1) * BM <= first || first >= T) {
            // All queries precede the keys, so nothing is added; tile j - 1 is overwritten next.
            wgmma_wait<0>();
        } else {
            // 3. Scores, one row per key, and dP^T, both under way. The wait also covers the
            //    previous step's products.
            float s[1][8][4], dp[1][8][4];
            uint32_t p[4][4], ds[4][4];
            const uint64_t queries = tile_descriptor(tile_q, 2 * TILE * place);
            const uint64_t gradients = tile_descriptor(tile_do, 2 * TILE * place);
            wgmma_fence();
            wgmma_abt(s, k_rows, queries);
            wgmma_commit();
            wgmma_abt(dp, v_rows, gradients);
            wgmma_commit();
            wgmma_wait<1>();
            settle(s);

            // 4. P overwrites S; masked after the exponentials, as in the dQ kernel.
            const float *lse2 = stats + place * 2 * BM + thread % 4 * 2, *d = lse2 + BM;
            each_element<1, 8>([&](int, int n, int e) {
                s[0][n][e] = ex2_approx(fmaf(s[0][n][e], c, -lse2[8 * n + e % 2]));
            });
            settle(s);
            if (j * BM < first + 63) {
                mask_future(s, j * BM, row0 + warp_row, true, 0.0f);
            }

            // 5. dS overwrites dP.
            wgmma_wait<0>();
            settle(dp);
            each_element<1, 8>([&](int, int n, int e) {
                dp[0][n][e] = s[0][n][e] * (dp[0][n][e] - d[8 * n + e % 2]);
            });

            // 6. P, rounded to bf16, times dO.   7. dS, rounded to bf16, times Q.
            fragments(p, s);
            fragments(ds, dp);
            wgmma_fence();
            wgmma_add(dv, p, gradients);
            wgmma_add(dk, ds, queries);
            wgmma_commit();
        }

        // 8. This place's statistics, those of tile j - 2, were last read before this iteration's
        //    barrier.
        store_stat(next, next_stat);
        place = next;
    }
    wgmma_wait<0>();
    settle(dk);
    settle(dv);

    // 9. Each warp stages dK and dV in its own rows of K and V.
    __syncthreads();  // all warps' products have read K and V
    dqkv += block.qkv_at + C;
    warp_store_rows<HS, true>(dqkv, stride, row0 + warp_row, T, HS, tile_k, warp_row, scale, dk);
    warp_store_rows<HS, true>(dqkv + C, stride, row0 + warp_row, T, HS, tile_v, warp_row, 1.0f, dv);
    __syncthreads();  // all warps have written their sums
    sums += sums_place<BN>(block, T, C) + C;
    head_column_sums<HS, A::WARPS>(sums, tile_k, 16, HS);
    head_column_sums<HS, A::WARPS>(sums + C, tile_v, 16, HS);
}

// attention_backward_rows_kernel: computes the same in fp32 and for any HS. It is launched twice:
// first for dQ and D with one warp per query, then with `keys` for dK and dV with one warp per key.
// The warp's own row is a pair (a, b): (q, dO) or, with `keys`, (k, v). The far rows are those of
// the other side, (k, v) or, with `keys`, (q, dO); in both cases
//   p = 2^(c a.far_a - LSE2),  ds = p (b.far_b - D),  da = scale sum ds far_a,  db = sum p far_b.
// grid (NH, B, ceil(T / ROW_WARPS)), block 32 ROW_WARPS; dynamic shared memory
// ROW_WARPS (2 HS + 64) floats: da, db, p and ds of each warp.
// numerics: fp32 with exp2f; dQ, dK, dV within 7e-7, more if |LSE2| is large, because 2^x amplifies
// its rounding error.
// budget: threads 128 shared 3072 regs 78 blocks 6 test gpu_attention
__global__ void __launch_bounds__(ROW_WARPS *WARP)
    attention_backward_rows_kernel(float *dqkv, float *drow, const float *dout, const float *qkv,
                                   const float *out, const float *lse, int T, int NH, int HS,
                                   bool keys) {
    DYN_SHARED(float, shared);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int t = (int)blockIdx.z * ROW_WARPS + warp;
    if (t >= T) {
        return;  // the whole warp exits; no block barrier follows
    }
    float *da = shared + warp * (2 * HS + 2 * WARP), *db = da + HS, *p = db + HS, *ds = p + WARP;
    const float c = LOG2_E / sqrtf((float)HS), scale = 1.0f / sqrtf((float)HS);
    const size_t C = (size_t)NH * HS, stride = 3 * C, at = (size_t)blockIdx.x * HS;
    const size_t head = (size_t)blockIdx.y * NH + blockIdx.x, row0 = (size_t)blockIdx.y * T;
    const float *q = qkv + row0 * stride + at, *d_o = dout + row0 * C + at;
    const float *a = q + t * stride + (keys ? C : 0), *b = keys ? a + C : d_o + t * C;
    const size_t far_stride = keys ? C : stride;  // row stride of far_b; far_a's is `stride`
    const float *far_a = keys ? q + t * stride : q + C, *far_b = keys ? d_o + t * C : q + 2 * C;
    const float d = keys ? 0.0f : row_dot(b, out + (row0 + t) * C + at, HS);
    if (!keys && lane == 0) {
        drow[head * T + t] = d;
    }
    const int start = keys ? t : 0, end = keys ? T : t + 1;
    for (int j0 = start; j0 < end; j0 += WARP, far_a += WARP * stride, far_b += WARP * far_stride) {
        const int count = min(WARP, end - j0), query = keys ? j0 + lane : t;
        __syncwarp();  // all lanes have read p and ds of the previous iteration
        if (lane < count) {
            const float s = row_dot(a, far_a + lane * stride, HS);
            const float dp = row_dot(b, far_b + lane * far_stride, HS);
            p[lane] = exp2f(fmaf(s, c, -lse[head * T + query]));
            ds[lane] = p[lane] * (dp - (keys ? drow[head * T + query] : d));
        }
        __syncwarp();  // all lanes have written p and ds
        for (int i = lane; i < HS; i += WARP) {
            float sum_a = j0 == start ? 0.0f : da[i], sum_b = j0 == start ? 0.0f : db[i];
            for (int r = 0; r < count; r++) {
                sum_a = fmaf(ds[r], far_a[r * stride + i], sum_a);
                sum_b = fmaf(p[r], far_b[r * far_stride + i], sum_b);
            }
            da[i] = sum_a;
            db[i] = sum_b;
        }
    }
    float *to = dqkv + (row0 + t) * stride + at + (keys ? C : 0);
    for (int i = lane; i < HS; i += WARP) {
        to[i] = da[i] * scale;
        if (keys) {
            to[C + i] = db[i];
        }
    }
}

// Returns the number of parts of `sums`: one for each tile of OWN_ROWS rows of each sequence.
template <class E> static int attention_parts(int B, int T, int HS) {
    const int wide = AttentionTiles<E, 128, false>::OWN_ROWS;
    const int narrow = AttentionTiles<E, 64, false>::OWN_ROWS;
    return B * ceil_div(T, HS > 64 ? wide : narrow);
}

// Returns the scratch bytes that gpu_attention_backward needs.
template <class E> static size_t gpu_attention_backward_bytes(int B, int T, int C, int NH) {
    const size_t bytes = (size_t)attention_parts<E>(B, T, C / NH) * 3 * C * sizeof(float);
    const size_t fp32 = gpu_bias_backward_bytes(B * T, 3 * C);
    return bytes > fp32 ? bytes : fp32;
}

// The arguments of a pass of flash attention. Each kernel uses some of them; its comment says how.
template <class E> struct AttentionArgs {
    const E *qkv, *dout;       // (B,T,3,NH,HS), (B,T,NH,HS)
    E *out, *dqkv;             // (B,T,NH,HS), (B,T,3,NH,HS)
    float *lse, *drow, *sums;  // (B,NH,T), (B,NH,T), (parts,3C)
    int B, T, NH, HS;
    cudaStream_t stream;
};
enum AttentionKernel { ATTENTION_FORWARD, ATTENTION_DQ, ATTENTION_DKV, ATTENTION_KERNELS };
static const char *const attention_names[] = {"forward", "dQ", "dK and dV"};

// Launches an instance of one of the 16-bit kernels, and raises its dynamic shared memory limit
// before the first launch. tensors: pointer arguments, passed first; B, T, NH, HS and `section`,
// the number of heads per section of the grid (AttentionBlock), follow them.
template <class Kernel, class E, class... Tensors>
static void attention_start(Kernel *kernel, int own_rows, int warps, int bytes,
                            const AttentionArgs<E> &a, Tensors... tensors) {
    static Kernel *told = nullptr;
    const int64_t blocks = (int64_t)a.B * a.NH * ceil_div(a.T, own_rows);
    check(blocks <= INT_MAX, "attention of %d sequences of %d tokens in %d heads", a.B, a.T, a.NH);
    if (told != kernel) {
        const auto limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
        cuda_check(cudaFuncSetAttribute(kernel, limit, bytes));
        told = kernel;
    }
    const int section = attention_section((size_t)a.T * a.HS * 4, a.B * a.NH);
    launch(kernel, dim3((unsigned)blocks), warps * WARP, bytes, a.stream, tensors..., a.B, a.T,
           a.NH, a.HS, section);
}

// Launches an instance of KERNEL.
template <int KERNEL, int HD, bool WHOLE, bool WGMMA, class E>
static void attention_launch(const AttentionArgs<E> &a) {
    using A = AttentionTiles<E, HD, WGMMA>;
    constexpr int rows = AttentionTiles<E, HD, false>::OWN_ROWS;
    static_assert(!WGMMA || (int)A::OWN_ROWS == rows, "all variants have the same parts of `sums`");
    if constexpr (KERNEL == ATTENTION_FORWARD) {
        attention_start(attention_forward_kernel<E, HD, WHOLE, WGMMA>, A::OWN_ROWS, A::WARPS,
                        A::FORWARD_BYTES, a, a.out, a.lse, a.qkv);
    } else if constexpr (KERNEL == ATTENTION_DQ) {
        attention_start(attention_backward_dq_kernel<E, HD, WHOLE, WGMMA>, A::OWN_ROWS, A::WARPS,
                        A::DQ_BYTES, a, a.dqkv, a.sums, a.drow, a.dout, a.qkv, a.out, a.lse);
    } else {
        auto start = [&](auto *kernel) {
            attention_start(kernel, A::OWN_ROWS, A::WARPS, A::DKV_BYTES, a, a.dqkv, a.sums, a.drow,
                            a.dout, a.qkv, a.lse);
        };
        if constexpr (WGMMA) {
            start(attention_backward_dkv_wgmma_kernel);
        } else {
            start(attention_backward_dkv_kernel<E, HD, WHOLE>);
        }
    }
}

// Launches the instance of KERNEL with mma.sync for the head size.
template <int KERNEL, class E> static void attention_mma(const AttentionArgs<E> &a) {
    a.HS == 64  ? attention_launch<KERNEL, 64, true, false>(a)
    : a.HS < 64 ? attention_launch<KERNEL, 64, false, false>(a)
                : attention_launch<KERNEL, 128, false, false>(a);
}

#if CUDA_CPU
// The candidate that EMU_KERNELS adds on the emulated device (chapter Kernel trials): runs row 0
// with a mistake in the last token's out or dQ or in the first token's dK and dV.
template <int KERNEL> static void attention_planted(const AttentionArgs<__nv_bfloat16> &a) {
    const bool forward = KERNEL == ATTENTION_FORWARD;
    const size_t C = (size_t)a.NH * a.HS, step = forward ? C : 3 * C;
    __nv_bfloat16 *end = (forward ? a.out : a.dqkv) + (size_t)a.B * a.T * step;
    __nv_bfloat16 *first = KERNEL == ATTENTION_DKV ? a.dqkv + C : end - step;
    emu::planted_kernel(a.stream, KERNEL, first, KERNEL == ATTENTION_DKV ? 2 * C : C, a.HS, end,
                        a.qkv, (size_t)a.T * 3 * C, [&] { attention_mma<KERNEL>(a); });
}
#endif

// The variants of the bf16 kernels. They compute the same function but round differently, so a run
// must not change its choice. Row 0 runs on every GPU and for every shape. All variants write one
// part of `sums` for each OWN_ROWS rows, and LSE2 and D mean the same in all, so the kernels' rows
// are chosen independently.
struct AttentionVariant {
    const char *name;
    int capability, HS;  // of the GPUs and heads it is for: these only, or 0 for all
    void (*start[ATTENTION_KERNELS])(const AttentionArgs<__nv_bfloat16> &);
};
static const AttentionVariant attention_variants[] = {
    {"mma.sync", 0, 0,
     {attention_mma<ATTENTION_FORWARD>, attention_mma<ATTENTION_DQ>, attention_mma<ATTENTION_DKV>}},
    {"wgmma", 90, 64,
     {attention_launch<ATTENTION_FORWARD, 64, true, true>,
      attention_launch<ATTENTION_DQ, 64, true, true>,
      attention_launch<ATTENTION_DKV, 64, true, true>}},
#if CUDA_CPU
    {"planted", 0, 0,
     {attention_planted<ATTENTION_FORWARD>, attention_planted<ATTENTION_DQ>,
      attention_planted<ATTENTION_DKV>}},
#endif
};
enum { ATTENTION_VARIANTS = sizeof attention_variants / sizeof attention_variants[0] };
static int attention_choice[ATTENTION_KERNELS];  // rows of the table

// Launches the chosen variant of KERNEL: row 0 for other types than bf16, or if the chosen one does
// not support the shape.
template <int KERNEL, class E> static void attention_run(const AttentionArgs<E> &a) {
    if constexpr (std::is_same_v<E, __nv_bfloat16>) {
        const AttentionVariant &chosen = attention_variants[attention_choice[KERNEL]];
        (chosen.HS && chosen.HS != a.HS ? attention_variants[0] : chosen).start[KERNEL](a);
    } else {
        attention_mma<KERNEL>(a);
    }
}

// gpu_attention_forward: computes out (B,T,C) and lse (B,NH,T) from qkv (B,T,3,NH,HS); see the
// kernels.
template <class E>
static void gpu_attention_forward(E *out, float *lse, const E *qkv, int B, int T, int C, int NH,
                                  cudaStream_t stream) {
    check_attention<E>(B, T, C, NH);
    const int HS = C / NH;
    if constexpr (is_fp32<E>) {
        launch(attention_forward_rows_kernel, dim3(NH, B, ceil_div(T, ROW_WARPS)), ROW_WARPS * WARP,
               ROW_WARPS * (HS + WARP) * sizeof(float), stream, out, lse, qkv, T, NH, HS);
    } else {
        check_rows(E, HS, out, qkv);
        attention_run<ATTENTION_FORWARD, E>({qkv, nullptr, out, nullptr, lse, nullptr, nullptr, B,
                                             T, NH, HS, stream});
    }
}

// gpu_attention_backward: computes dqkv (B,T,3,NH,HS), which is overwritten, from dout (B,T,C), the
// forward pass's input qkv and its outputs out (B,T,C) and lse (B,NH,T). dbias (3C) fp32 += column
// sums of dqkv, which is the bias gradient of the matmul that produced qkv. drow (B,NH,T) is
// scratch.
template <class E>
static void gpu_attention_backward(E *dqkv, float *dbias, float *drow, const E *dout, const E *qkv,
                                   const E *out, const float *lse, float *scratch, int B, int T,
                                   int C, int NH, cudaStream_t stream) {
    check_attention<E>(B, T, C, NH);
    const int HS = C / NH;
    if constexpr (is_fp32<E>) {
        const size_t bytes = ROW_WARPS * (2 * HS + 2 * WARP) * sizeof(float);
        for (int keys = 0; keys < 2; keys++) {
            launch(attention_backward_rows_kernel, dim3(NH, B, ceil_div(T, ROW_WARPS)),
                   ROW_WARPS * WARP, bytes, stream, dqkv, drow, dout, qkv, out, lse, T, NH, HS,
                   keys == 1);
        }
        gpu_bias_backward(dbias, dqkv, scratch, B * T, 3 * C, stream);
    } else {
        check_rows(E, HS, dqkv, dout, qkv, out);
        AttentionArgs<E> a = {qkv,  dout,    const_cast<E *>(out), dqkv, const_cast<float *>(lse),
                              drow, scratch, B, T, NH, HS, stream};
        attention_run<ATTENTION_DQ>(a);
        attention_run<ATTENTION_DKV>(a);
        gpu_partials_add({{dbias}}, scratch, attention_parts<E>(B, T, HS), 3 * C, stream);
    }
}

// -------------------------------------------------------------------------------------------------
// 33. Classifier
// Softmax, cross-entropy and their gradient for a chunk of rows of logits, in place: each row is
// read from memory once, held in registers and written once. The logits of a whole batch are never
// in memory at the same time.

constexpr int CLASSIFIER_VOCABULARY = 65536;  // maximum columns: tokens are 16-bit on disk
constexpr int CLASSIFIER_GPT2 = 800;          // threads for the 50304 columns of GPT-2
template <class E>                            // 16-byte loads per thread
constexpr int CLASSIFIER_PACKS = CLASSIFIER_VOCABULARY / (BLOCK_MAX * Pack<E>::size);

// For each row i of logits (rows,Vp) of E, whose columns from V on are padding with arbitrary
// values:
//   losses[i] = log(sum over v < V of exp(logits[v])) - logits[targets[i]], fp32; with BACKWARD
//   logits become (softmax(logits) - onehot(targets[i])) * dloss, and zero in the padding; if E
//   is narrow, dloss is multiplied by *loss_scale, which is not read otherwise.
// One thread block per row, with as few warps as can hold the row in registers: 25 for 50304
// columns, one for up to 2048; the fp32 instance, used only for checking, spills. THREADS: the
// block size if it is a constant and all but each thread's last pack are known to contain no
// padding. The target's logit is read outside the loops, and the thread that holds its pack
// overwrites its gradient after them, so no loop has to test each element against the target.
// Numerics: maximum subtracted, sum in fp32. Errors relative to the norm, measured on the CPU layer
// with V 5..65536: losses 1.2e-7; dlogits 8e-8 in fp32, the rounding error of the type in bf16.
// budget: <bf16, true, 0> threads 800 regs 64 blocks 1 test gpu_classifier
// budget: <bf16, false, 0> threads 800 regs 64 blocks 1 test gpu_classifier
// budget: <bf16, true, 800> threads 800 regs 72 blocks 1 instr/elem 12 of 64 test gpu_classifier
// budget: <bf16, false, 800> threads 800 regs 72 blocks 1 instr/elem 7.5 of 64 test gpu_classifier
// budget: <fp16, true, 800> sm 75 threads 800 regs 72 blocks 1 instr/elem 16.3 of 64
//   test gpu_classifier
// budget: <fp16, false, 800> sm 75 threads 800 regs 72 blocks 1 instr/elem 10.8 of 64
//   test gpu_classifier
template <class E, bool BACKWARD, int THREADS>
__global__ void __launch_bounds__(THREADS ? THREADS : BLOCK_MAX, 1)
    // NOLINTNEXTLINE(readability-function-size): the row stays in registers
    classifier_kernel(float *losses, E *logits, const int *targets, float dloss,
                      const float *loss_scale, int V, int Vp) {
    constexpr int size = Pack<E>::size, packs = CLASSIFIER_PACKS<E>;
    const int threads = THREADS ? THREADS : blockDim.x, thread = threadIdx.x;
    E *row = logits + (size_t)blockIdx.x * Vp;
    const int target = targets[blockIdx.x];
    const bool is_targets_thread = target / size % threads == thread;
    const float target_logit = is_targets_thread ? to_float(row[target]) : 0.0f;
    // Calls f(column, pack, whole) for every pack of this thread; whole: the pack contains no
    // padding.
    Pack<E> x[packs];
    auto each_pack = [&](auto f) {
        UNROLL
        for (int k = 0; k < packs; k++) {
            const int c = (k * threads + thread) * size;
            const bool whole = THREADS && k < packs - 1;
            if (whole || c < Vp) {
                f(c, x[k], whole);
            }
        }
    };
    // 1. Load the row into registers.
    each_pack([&](int c, Pack<E> &pack, bool) { pack = pack_load(row + c); });
    // 2. Find the maximum; padding becomes minus infinity, so its exponential and gradient are
    //    zero.
    Pack<E> top = {};
    pack_keep(top, 0);  // minus infinity
    each_pack([&](int c, Pack<E> &pack, bool whole) {
        if (!whole) {
            pack_keep(pack, V - c);
        }
        pack_raise(top, pack);
        pack_forget(pack);
    });
    const float maximum = row_max(pack_max(top));
    // 3. Sum the exponentials; in 16-bit types as 2^(LOG2_E logit - shift). pack_forget keeps the
    //    compiler from holding the converted values in registers across loops.
    float sums[4] = {-0.0f, -0.0f, -0.0f, -0.0f};  // adding -0 needs no instruction
    const float shift = is_fp32<E> ? maximum : maximum * LOG2_E;
    auto power = [&](float logit) {
        return is_fp32<E> ? expf(logit - shift) : ex2_approx(fmaf(logit, LOG2_E, -shift));
    };
    each_pack([&](int, Pack<E> &pack, bool) {
        float logit[size];
        pack_to_floats(logit, pack);
        for (int i = 0; i < size; i++) {
            sums[i % 4] += power(logit[i]);
        }
        pack_forget(pack);
    });
    const float sum = row_sum(add_four(sums));
    // 4. Write the gradient; the target's thread writes the loss and overwrites the target's
    //    gradient.
    dloss = BACKWARD && traits<E>.narrow ? dloss * *loss_scale : dloss;
    const float scale = dloss * reciprocal<E>(sum);
    if constexpr (BACKWARD) {
        each_pack([&](int c, Pack<E> &pack, bool) {
            float gradient[size];
            pack_to_floats(gradient, pack);
            for (int i = 0; i < size; i++) {
                gradient[i] = power(gradient[i]) * scale;
            }
            vector_store(row + c, gradient);
        });
    }
    if (is_targets_thread) {
        losses[blockIdx.x] = logf(sum) + (is_fp32<E> ? shift : shift * LN_2) - target_logit;
        if constexpr (BACKWARD) {
            row[target] = from_float<E>(fmaf(power(target_logit), scale, -dloss));
        }
    }
}

// Computes losses (rows), fp32, and with `backward` replaces logits (rows,Vp) of E by their
// gradient; targets (rows) in 0 .. V-1.
template <class E>
static void gpu_classifier(float *losses, E *logits, const int *targets, float dloss,
                           const float *loss_scale, int rows, int V, int Vp, bool backward,
                           cudaStream_t stream) {
    constexpr int size = Pack<E>::size, packs = CLASSIFIER_PACKS<E>;
    check_rows(E, Vp, logits);
    check(V <= Vp && Vp <= CLASSIFIER_VOCABULARY, "logits of %d tokens in %d columns", V, Vp);
    int threads = ceil_div(Vp, packs * size * WARP) * WARP;
    auto kernel = backward ? classifier_kernel<E, true, 0> : classifier_kernel<E, false, 0>;
    if constexpr (!is_fp32<E>) {
        if (threads == CLASSIFIER_GPT2 && V >= (packs - 1) * threads * size) {
            kernel = backward ? classifier_kernel<E, true, CLASSIFIER_GPT2>
                              : classifier_kernel<E, false, CLASSIFIER_GPT2>;
        }
    }
    launch(kernel, rows, threads, 0, stream, losses, logits, targets, dloss, loss_scale, V, Vp);
}

// -------------------------------------------------------------------------------------------------
// 34. AdamW and gradient norm
// A table of ranges gives the location of each tensor's parameters and gradients; one launch
// processes the whole table.
// 1. Norm, clip factor and the decision to skip stay in device memory, so no step waits for the
//    host.
// 2. AdamW is fp32 arithmetic without fused multiply-adds, so the split master is bit-identical to
//    an fp32 AdamW on the CPU.
// 3. Weights and moments that are kept only in 16 bits are rounded stochastically, with random
//    numbers keyed by (seed, step, tensor, index in the tensor), independent of which part of the
//    tensor this rank owns.
// 4. With fp16 all gradients are scaled by the loss scale, a power of two: the classifier
//    multiplies by it, the norm and AdamW divide by it, both exactly.

constexpr int UPDATE_THREADS = 256;
constexpr int UPDATE_CHUNK = 8192;  // elements of a range that one block handles
constexpr int NORM_BLOCKS = 1024;   // maximum number of partial sums of the norm
constexpr uint32_t ROUND_MOMENT1 = 16, ROUND_MOMENT2 = 32;  // added to the stream of the weights
static_assert(TENSORS <= ROUND_MOMENT1, "a stream of random numbers for each tensor and state");

// A tensor, or this rank's shard of it. Offsets and count are in elements, all multiples of 8.
struct ParamRange {
    size_t param;  // offset in the parameters
    size_t state;  // offset in the low halves of the master weights and in the moments
    size_t grad;   // offset in the gradients of matrices or the fp32 gradients of vectors
    size_t index;  // number of its first element in the whole tensor: counter of the random numbers
    size_t count;
    uint32_t stream;      // random stream of the tensor's weights
    int two_dimensional;  // weight decay applies; the gradient is of type G
    int first_chunk;      // number of chunks before this range, set by param_ranges_chunk
    int in_store;         // PARAM_IN_STORE, GRAD_IN_STORE: what is in a backing store
};
enum { PARAM_IN_STORE = 1, GRAD_IN_STORE = 2 };

// Device memory that persists across steps.
struct UpdateState {
    float square_sum;  // of all gradients
    float norm;
    float scale;       // factor on the gradients: min(1, clip / norm) / loss scale
    uint32_t skip;     // 1: this step's update is skipped
    uint32_t skipped;  // updates skipped so far
    float loss_scale;  // of the next step; from here on for narrow types (fp16) only
    int good_steps;    // steps with finite gradients since the scale changed
    int scale_grows;   // good steps after which the scale doubles; 0: no loss scale
    int scale_moved;   // by the last update: 1 doubled, -1 halved, 0 unchanged
};

// Numbers the chunks of all ranges and returns their count.
static int param_ranges_chunk(ParamRange *ranges, int count) {
    int chunks = 0;
    for (int i = 0; i < count; i++) {
        const ParamRange *r = &ranges[i];
        check((r->param | r->state | r->grad | r->index | r->count) % 8 == 0,
              "a range starts and ends at a multiple of eight elements");
        ranges[i].first_chunk = chunks;
        chunks += (int)((ranges[i].count + UPDATE_CHUNK - 1) / UPDATE_CHUNK);
    }
    return chunks;
}

// Returns the range that contains a chunk: the last range whose first_chunk is at most `chunk`.
__device__ inline ParamRange param_range_find(const ParamRange *ranges, int count, int chunk) {
    int low = 0, high = count - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (ranges[middle].first_chunk <= chunk) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return ranges[low];
}

// Returns this thread's part of the sum of squares of grads[begin .. end).
template <class T> __device__ inline float square_sum(const T *grads, size_t begin, size_t end) {
    constexpr int size = Pack<T>::size;
    float sum = 0.0f;
    for (size_t i = begin + threadIdx.x * size; i < end; i += blockDim.x * size) {
        float g[size];
        vector_load(g, grads + i);
        for (int k = 0; k < size; k++) {
            sum += g[k] * g[k];
        }
    }
    return sum;
}

// partials[block] = sum of squares of the chunks block, block + gridDim.x, ...
//   grads_2d and grads_store of G, grads_1d and partials (gridDim.x) fp32.
// budget: <bf16> threads 256 regs 31 blocks 6 test gpu_norm
template <class G>
__global__ void grad_square_sum_kernel(float *partials, const G *grads_2d, const float *grads_1d,
                                       const G *grads_store, const ParamRange *ranges,
                                       int range_count, int chunks) {
    float sum = 0.0f;
    for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        ParamRange range = param_range_find(ranges, range_count, chunk);
        size_t begin = (size_t)(chunk - range.first_chunk) * UPDATE_CHUNK;
        size_t end = begin + UPDATE_CHUNK < range.count ? begin + UPDATE_CHUNK : range.count;
        const G *grads = range.in_store & GRAD_IN_STORE ? grads_store : grads_2d;
        sum += range.two_dimensional ? square_sum(grads + range.grad, begin, end)
                                     : square_sum(grads_1d + range.grad, begin, end);
    }
    sum = row_sum(sum);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = sum;
    }
}

// state->square_sum = sum of partials (parts), added in a fixed order by one thread block.
// budget: threads 256 regs 33 blocks 6 test gpu_norm
static __global__ void grad_square_sum_finish_kernel(UpdateState *state, const float *partials,
                                                     int parts) {
    const float sum = row_sum(sum_strided(threadIdx.x, blockDim.x, parts,
                                          [&](int part) { return partials[part]; }));
    if (threadIdx.x == 0) {
        state->square_sum = sum;
    }
}

// Updates the loss scale after a step: halved if gradients overflowed, doubled after scale_grows
// steps without overflow. It stays finite and at least 2, because exponent 0 in a checkpoint means
// that there is no loss scale; gradients that overflow even at 2 cannot be fixed by scaling.
// source: torch.amp.GradScaler, with its defaults (including the first scale, LOSS_SCALE_LOG2);
//   the minimum scale is an addition.
__device__ inline void loss_scale_update(UpdateState *state, bool finite) {
    const bool grows = finite && ++state->good_steps >= state->scale_grows;
    const float next = state->loss_scale * (grows ? 2.0f : finite ? 1.0f : 0.5f);
    const bool takes = next >= 2.0f && next <= FLT_MAX;
    state->scale_moved = takes && !finite ? -1 : takes && grows;
    state->good_steps = grows || !finite ? 0 : state->good_steps;
    state->loss_scale = takes ? next : state->loss_scale;
}

// Computes norm, scale and skip for AdamW from the sum of squares, which by now covers all ranks.
// The squares are those of scaled gradients: a sum of 2^26 products of fp16 numbers is below 2^58,
// so its square is far below the fp32 maximum; if the sum of squares overflows anyway, that also
// lowers the loss scale.
// budget: threads 1 regs 24 blocks 24 test gpu_norm
static __global__ void update_decide_kernel(UpdateState *state, float clip, float skip_above) {
    const bool scaled = state->scale_grows > 0;
    const float unscale = scaled ? 1.0f / state->loss_scale : 1.0f;
    float norm = sqrtf(state->square_sum) * unscale;
    bool skip = !(norm <= skip_above) || isinf(norm);  // a NaN norm skips too
    state->norm = norm;
    state->scale = (clip > 0.0f && norm > clip ? clip / norm : 1.0f) * unscale;
    state->skip = skip;
    state->skipped += skip;
    if (scaled) {
        loss_scale_update(state, norm <= FLT_MAX);
    }
}

// Returns the scratch bytes that gpu_grad_square_sum needs.
static size_t gpu_grad_square_sum_bytes(void) { return NORM_BLOCKS * sizeof(float); }

// state->square_sum = sum of squares of all gradients in the table (ranges: in device memory;
// chunks: result of param_ranges_chunk). Measured on the CPU layer, 1e5 elements: the norm's
// relative error is 9e-8.
template <class G>
static void gpu_grad_square_sum(UpdateState *state, float *scratch, const G *grads_2d,
                                const float *grads_1d, const G *grads_store,
                                const ParamRange *ranges, int range_count, int chunks,
                                cudaStream_t stream) {
    // param_ranges_chunk has checked the offsets of the ranges. With very many ranks and a small
    // model, a rank may own nothing: one thread block then runs without a chunk, because a grid
    // cannot be empty.
    check_rows(G, 0, grads_2d, grads_1d, grads_store);
    int parts = chunks < 1 ? 1 : chunks < NORM_BLOCKS ? chunks : NORM_BLOCKS;
    launch(grad_square_sum_kernel<G>, parts, UPDATE_THREADS, 0, stream, scratch, grads_2d, grads_1d,
           grads_store, ranges, range_count, chunks);
    launch(grad_square_sum_finish_kernel, 1, parts < 256 ? ceil_div(parts, WARP) * WARP : 256, 0,
           stream, state, scratch, parts);
}

// Computes norm, clip factor (clip 0: no clipping) and skip, which is set if the norm is not finite
// or exceeds skip_above (INFINITY: no limit).
static void gpu_update_decide(UpdateState *state, float clip, float skip_above,
                              cudaStream_t stream) {
    launch(update_decide_kernel, 1, 1, 0, stream, state, clip, skip_above);
}

// Updates one parameter with the operations of chapter Optimizer and schedules, in the same order.
__device__ inline void adamw_element(float *p, float *m, float *v, float g, float weight_decay,
                                     const AdamW &adamw) {
    *m = adamw.beta1 * *m + (1.0f - adamw.beta1) * g;
    *v = adamw.beta2 * *v + (1.0f - adamw.beta2) * (g * g);
    float root = sqrtf(*v / adamw.correction2);
    *p -= adamw.lr * (*m / adamw.correction1 / (root + adamw.eps) + weight_decay * *p);
}

// Rounds stochastically: x, a fraction f of the way from one bf16 number to the next larger in
// magnitude, becomes the larger one with probability f, else the smaller. random: 16 random bits.
__device__ inline __nv_bfloat16 bf16_round_stochastic(float x, uint32_t random) {
    uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7f800000u) == 0x7f800000u) {
        return from_float<__nv_bfloat16>(x);  // infinities and NaN have no neighbours to round to
    }
    return bf16_from_bits((uint16_t)((bits + random) >> 16));
}

// The key of a step's random numbers.
struct UpdateRandom {
    uint64_t seed;
    uint32_t step;
};

// Stores elements index .. index + n - 1 of a tensor at `address`: exact in fp32, rounded
// stochastically in bf16.
template <class T, int n>
__device__ inline void state_store(T *address, const float (&x)[n], UpdateRandom key, size_t index,
                                   uint32_t stream) {
    if constexpr (is_fp32<T>) {
        vector_store(address, x);
    } else {
        static_assert(n == 8, "one call of Philox gives the sixteen bits of eight elements");
        uint32_t random[4];
        philox4x32(random, key.seed, index / 8, key.step, stream);
        Pack<T> pack;
        for (int i = 0; i < n; i++) {
            pack.x[i] = bf16_round_stochastic(x[i], random[i / 2] >> (i % 2 * 16) & 0xffff);
        }
        pack_store(address, pack);
    }
}

// The split master stores the bits u of an fp32 number as weight = (u + 0x8000) >> 16 and low = u &
// 0xffff, from which u can be restored. A NaN is stored as the weight MASTER_NAN and read back as a
// NaN. Without this exception the addition would carry into the sign bit: 0x7fffffff, the NaN that
// a GPU computes, would become -0 and go unnoticed in the forward pass.
template <int n>
__device__ inline void split_load(float (&p)[n], const __nv_bfloat16 *params, const uint16_t *low) {
    Pack<__nv_bfloat16> weight = pack_load(params);
    Pack<uint16_t> rest = pack_load(low);
    for (int i = 0; i < n; i++) {
        uint32_t high = (uint32_t)bf16_bits(weight.x[i]) - (rest.x[i] >> 15);
        p[i] = __uint_as_float(high << 16 | rest.x[i]);
    }
}

template <int n>
__device__ inline void split_store(__nv_bfloat16 *params, uint16_t *low, const float (&p)[n]) {
    Pack<__nv_bfloat16> weight;
    Pack<uint16_t> rest;
    for (int i = 0; i < n; i++) {
        uint32_t bits = __float_as_uint(p[i]);
        const uint32_t high = isnan(p[i]) ? (uint32_t)MASTER_NAN : (bits + 0x8000u) >> 16;
        weight.x[i] = bf16_from_bits((uint16_t)high);
        rest.x[i] = (uint16_t)bits;
    }
    pack_store(params, weight);
    pack_store(low, rest);
}

// The element type of the master. fp16 is not the upper half of an fp32 number, so its master is
// the whole fp32 number; the weight is its rounding.
template <class E> using Master = std::conditional_t<traits<E>.narrow, float, uint16_t>;
template <int n>
__device__ inline void split_load(float (&p)[n], const __half *, const float *master) {
    vector_load(p, master);
}

template <int n>
__device__ inline void split_store(__half *params, float *master, const float (&p)[n]) {
    vector_store(params, p);
    vector_store(master, p);
}

// AdamW on every range, one thread block per chunk; does nothing if state->skip is set.
//   params of E; low, with SPLIT, their master; moment1, moment2 of M: fp32, or bf16 if E is too;
//   grads_2d of G and grads_1d fp32, to be multiplied by state->scale; params_store and grads_store
//   for ranges with in_store flags. Any of these may be in pinned host memory: no byte is
//   transferred more than once per direction.
// Bits: with SPLIT or fp32 parameters, and fp32 moments, identical to AdamW on the CPU.
// Bytes: each array is read once and, except the gradients, written once.
// budget: <bf16, bf16, float> threads 256 regs 74 blocks 3 instr/elem 98 of 8 loop test gpu_adamw
// budget: <bf16> threads 256 regs 74 blocks 3 instr/elem 127.5 of 8 loop test gpu_adamw
template <class E, class G, class M, bool SPLIT>
__global__ void __launch_bounds__(UPDATE_THREADS)
    adamw_kernel(E *params, Master<E> *low, M *moment1, M *moment2, const G *grads_2d,
                 const float *grads_1d, E *params_store, const G *grads_store,
                 const ParamRange *ranges, int range_count, AdamW adamw, UpdateRandom key,
                 const UpdateState *state) {
    constexpr int size = Pack<E>::size;
    if (state->skip) {
        return;
    }
    float scale = state->scale;
    ParamRange range = param_range_find(ranges, range_count, blockIdx.x);
    float weight_decay = range.two_dimensional ? adamw.weight_decay : 0.0f;
    E *param = (range.in_store & PARAM_IN_STORE ? params_store : params) + range.param;
    const G *matrix = (range.in_store & GRAD_IN_STORE ? grads_store : grads_2d) + range.grad;
    size_t begin = (size_t)(blockIdx.x - range.first_chunk) * UPDATE_CHUNK;
    size_t end = begin + UPDATE_CHUNK < range.count ? begin + UPDATE_CHUNK : range.count;
    for (size_t i = begin + threadIdx.x * size; i < end; i += UPDATE_THREADS * size) {
        size_t own = range.state + i, index = range.index + i;
        float p[size], m[size], v[size], g[size];
        if constexpr (SPLIT) {
            split_load(p, param + i, low + own);
        } else {
            vector_load(p, param + i);
        }
        vector_load(m, moment1 + own);
        vector_load(v, moment2 + own);
        if (range.two_dimensional) {
            vector_load(g, matrix + i);
        } else {
            vector_load(g, grads_1d + range.grad + i);
        }
        for (int k = 0; k < size; k++) {
            adamw_element(&p[k], &m[k], &v[k], scale * g[k], weight_decay, adamw);
        }
        if constexpr (SPLIT) {
            split_store(param + i, low + own, p);
        } else {
            state_store(param + i, p, key, index, range.stream);
        }
        state_store(moment1 + own, m, key, index, range.stream + ROUND_MOMENT1);
        state_store(moment2 + own, v, key, index, range.stream + ROUND_MOMENT2);
    }
}

// Runs one AdamW step over the table (ranges: in device memory); low is null without SPLIT.
template <class E, class G, class M, bool SPLIT>
static void gpu_adamw(E *params, Master<E> *low, M *moment1, M *moment2, const G *grads_2d,
                      const float *grads_1d, E *params_store, const G *grads_store,
                      const ParamRange *ranges, int range_count, int chunks, AdamW adamw,
                      UpdateRandom key, const UpdateState *state, cudaStream_t stream) {
    check_rows(E, 0, params, low, moment1, moment2, grads_2d, grads_1d, params_store, grads_store);
    launch(adamw_kernel<E, G, M, SPLIT>, chunks, UPDATE_THREADS, 0, stream, params, low, moment1,
           moment2, grads_2d, grads_1d, params_store, grads_store, ranges, range_count, adamw, key,
           state);
}

// =================================================================================================
// Part H. Memory and streams

// -------------------------------------------------------------------------------------------------
// 35. Device memory
// The plan's device buffers are one cudaMalloc of exactly the planned bytes. Its host buffers are
// one pinned mapping, which kernels access at the same address. Memory taken by libraries and
// modules is not planned but measured after a warm-up and reported separately; the CUDA context
// exists before that and is not included in the figure.
// 1. The driver's free bytes decide whether the plan fits, before anything is allocated. The query
//    itself creates the CUDA context, so the context's memory is already subtracted.
// 2. Test builds poison a buffer (fill it with NaN) when its lifetime begins and, in the emulator,
//    when it ends. This is done in stream order, so that accesses outside a lifetime are detected.

struct DeviceMemory {
    size_t free_bytes;     // as the driver reports them before the arena is allocated
    size_t library_bytes;  // taken by libraries since then, without the CUDA context
    size_t nccl_bytes;     // then taken by NCCL; the plan reserves it (nccl_estimate_bytes)
};

static DeviceMemory device_memory;

// Writes the cache key of this GPU's library memory: its name, number of SMs, and cuBLASLt's
// version. Returns 0 if there is no GPU.
static int library_key(char key[128], int *capability) {
    int device = 0, count = 0;
    cudaDeviceProp gpu;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        return 0;
    }
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaGetDeviceProperties(&gpu, device));
    *capability = 10 * gpu.major + gpu.minor;
    snprintf(key, 128, "%.64s, %d SMs, cuBLASLt %zu", gpu.name, gpu.multiProcessorCount,
             cublasLtGetVersion());
    return 1;
}

// Returns how many bytes libraries (cuBLASLt's code and kernels) will allocate after a run has
// queried the free bytes: the most that earlier runs on this GPU have measured, or else an
// estimate. The CUDA context is not counted: its memory is allocated before the query.
static uint64_t device_library_bytes(int *measured) {
    char key[128], line[256];
    int capability = 0;
    uint64_t bytes = 0;
    FILE *f = library_key(key, &capability) ? cache_open("library", "r") : NULL;
    const size_t n = f ? strlen(key) : 0;
    while (f && fgets(line, sizeof line, f)) {
        const uint64_t kept = strncmp(line, key, n) == 0 && line[n] == '\t'
                                  ? strtoull(line + n, NULL, 10) : 0;
        bytes = kept <= UINT64_C(8) << 30 && kept > bytes ? kept : bytes;
    }
    if (f) {
        fclose(f);
    }
    *measured = bytes > 0;
#if CUDA_CPU
    return *measured ? bytes : (uint64_t)emu::set.library;
#else
    int mib = 512;
    for (const CardLine &line_of_cards : card_lines) {
        mib = line_of_cards.capability == capability ? line_of_cards.library_mib : mib;
    }
    return *measured ? bytes : (uint64_t)mib << 20;
#endif
}

// Saves the measured library memory for later runs and plans on this GPU if it exceeds all earlier
// measurements.
static void library_keep(uint64_t bytes) {
    char key[128];
    int capability, measured;
    const uint64_t before = device_library_bytes(&measured);
    if (bytes == 0 || (measured && bytes <= before) || !library_key(key, &capability)) {
        return;
    }
    FILE *f = cache_open("library", "a");
    if (f) {
        fprintf(f, "%s\t%" PRIu64 "\n", key, bytes);
        fclose(f);
    }
}

#if GPT2_POISON
static cudaStream_t arena_stream;
// Plan.mark on a GPU: fills a buffer with NaN when its lifetime begins; the emulator also poisons
// it when its lifetime ends. The work is queued on the stream rather than done immediately, because
// kernels that use the buffer may still be running.
static void device_mark(void *memory, size_t bytes, int alive) {
#if CUDA_CPU
    alive ? emu_unpoison(memory, bytes, arena_stream) : emu_poison(memory, bytes, arena_stream);
#endif
    if (alive) {
        cuda_check(cudaMemsetAsync(memory, 0xff, bytes, arena_stream));
    }
}
#endif

// Gets the name of the current GPU. Returns 0 if there is no GPU or driver (`name` is then empty),
// or if the driver is too old (`name` then says so).
static int device_name(char name[96]) {
    int driver = 0, count = 0, device = 0;
    cudaDeviceProp properties;
    name[0] = 0;
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
        return 0;
    }
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaErrorInsufficientDriver) {
        snprintf(name, 96, "the driver supports CUDA %d.%d, too old for this program's CUDA %d.%d",
                 driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
                 CUDART_VERSION % 1000 / 10);
    }
    if (error != cudaSuccess || count == 0) {
        return 0;
    }
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaGetDeviceProperties(&properties, device));
    snprintf(name, 96, "%.90s", properties.name);
    return 1;
}

// Returns true if there is a GPU and it has no bf16 instructions, which require compute capability
// 8.0.
static int device_lacks_bf16(void) {
    char name[96];
    int device = 0, major = 0;
    if (!device_name(name)) {
        return 0;
    }
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major < 8;
}

// Makes the GPU with the rank's index on this machine, modulo the number of GPUs, the current
// device. Ends the run if the machine has no driver or no GPU.
static void device_select(int local_rank) {
    int driver = 0, count = 0;
    cuda_check(cudaDriverGetVersion(&driver));  // 0: no driver
    if (driver == 0) {
        die("no NVIDIA driver found; train_gpt2 runs on the CPU");
    }
    cuda_check(cudaGetDeviceCount(&count));
    cuda_check(cudaSetDevice(local_rank % count));
}

// Returns how the GPUs of `ranks` ranks on this machine are connected. They use NVLink if each has
// native atomic operations on every other's memory (CUDA Runtime API, cudaDeviceP2PAttr); with more
// than four GPUs, this takes an NVSwitch.
static Link device_link(int ranks) {
    int count = 0, all = 1;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count < ranks) {
        return LINK_UNKNOWN;
    }
    for (int b = 1; b < ranks; b++) {
        for (int a = 0, native; a < b; a++) {
            cuda_check(cudaDeviceGetP2PAttribute(&native, cudaDevP2PAttrNativeAtomicSupported, a,
                                                 b));
            all &= native;
        }
    }
    return all && ranks > 1 ? LINK_NVLINK : LINK_PCIE;
}

// Returns the memory of this rank's GPU in bytes, or 0 if there is none. Creates no CUDA context.
static uint64_t device_total(void) {
    cudaDeviceProp gpu;
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
                   cudaGetDeviceProperties(&gpu, this_rank.local_rank % count) == cudaSuccess
               ? gpu.totalGlobalMem : 0;
}

// Selects this rank's GPU as the current device and returns its free memory in bytes.
static size_t device_available(void) {
    size_t total_bytes;
    device_select(this_rank.local_rank);
    cuda_check(cudaMemGetInfo(&device_memory.free_bytes, &total_bytes));
    if (!available_limit[0]) {  // on later calls this run's own memory would be included
        snprintf(available_limit, sizeof available_limit,
                 " (%s of %s were in use at start-up by this program's CUDA context and by "
                 "other processes; see nvidia-smi)",
                 bytes_text((double)(total_bytes - device_memory.free_bytes)).s,
                 bytes_text((double)total_bytes).s);
    }
    return device_memory.free_bytes;
}

// Returns the NUMA node to which a PCI device is attached, or -1 if the machine has none or does
// not report it. CUDA writes bus ids in upper case, sysfs in lower case. `root`: a folder that
// replaces / in tests, else "".
static int pci_node(const char *root, const char *bus) {
    char path[PATH_BYTES], place[32] = "";
    for (size_t i = 0; bus[i] && i + 1 < sizeof place; i++) {
        place[i] = (char)(bus[i] | 32);  // lower case; leaves digits and punctuation unchanged
    }
    path_print(path, "%s/sys/bus/pci/devices/%s/numa_node", root, place);
    return (int)file_number(path, "", -1);
}

// Requests that the untouched pages of a mapping be allocated on `node` while it has free memory.
// Only an optimisation: if the system refuses, as in some containers, pages are allocated on any
// node.
static void memory_near(void *memory, size_t bytes, int node) {
    enum { NODES = 1024, PREFERRED = 1, BITS = 8 * sizeof(unsigned long) };  // mbind(2)
    unsigned long nodes[NODES / BITS + 1] = {0};
    if (bytes > 0 && node >= 0 && node < NODES) {
        nodes[node / BITS] = 1ul << node % BITS;
        (void)syscall(SYS_mbind, memory, bytes, PREFERRED, nodes, (unsigned long)NODES, 0);
    }
}

// Returns true if host memory registered by the program has the same address on the GPU, which is
// not the case under WSL (from sgl-project/sglang#40232). Memory allocated by CUDA itself has the
// same address everywhere.
static bool pinned_in_place(void) {
    int device, same;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaDeviceGetAttribute(&same, cudaDevAttrCanUseHostPointerForRegisteredMem, device));
    return same != 0;
}

// Returns the NUMA node to which the current GPU is attached, or -1 if it is unknown.
static int device_node(const char *root) {
    char bus[32];
    int device;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaDeviceGetPCIBusId(bus, sizeof bus, device));
    return pci_node(root, bus);
}

// Allocates `bytes` of zeroed, pinned host memory. Without pinning, copies would not overlap with
// kernels and kernels could not access it. If pinned_in_place(), the memory is mapped, touched by
// all threads and then registered: cudaMallocHost, which clears every page in one thread, takes
// five times as long (0.49 s per GiB, from rapidsai/cudf#23457). The GPU accesses memory of its own
// NUMA node, `node`, faster. Ends the run if that much cannot be pinned.
static char *pinned_open(size_t bytes, int node) {
    constexpr int64_t PART = 2 << 20;  // a huge page
    const bool in_place = pinned_in_place();
    char *memory = in_place ? plan_map(bytes) : nullptr;
    memory_near(memory, in_place ? bytes : 0, node);
    cudaError_t error = in_place ? cudaSuccess : cudaMallocHost((void **)&memory, bytes);
    if (error == cudaSuccess) {
        #pragma omp parallel for schedule(static)
        for (int64_t part = 0; part < ceil_div_i64((int64_t)bytes, PART); part++) {
            memset(memory + part * PART, 0, (size_t)min_i64(PART, (int64_t)bytes - part * PART));
        }
        error = in_place ? cudaHostRegister(memory, bytes, cudaHostRegisterMapped) : error;
    }
    if (error != cudaSuccess) {  // the error code varies, but the cause is a memory limit
        die("cannot pin %s of host memory: %s; %s", bytes_text((double)bytes).s,
            cudaGetErrorString(error), cuda_hint(cudaErrorMemoryAllocation, "cudaMallocHost"));
    }
    return memory;
}

static void pinned_close(char *memory, size_t bytes) {
    if (pinned_in_place()) {
        cuda_check(cudaHostUnregister(memory));
        munmap(memory, bytes);
    } else {
        cuda_check(cudaFreeHost(memory));
    }
}

// Allocates the plan's device memory and its pinned host memory.
static void arena_open(Plan *p, cudaStream_t stream) {
    cuda_check(cudaMalloc((void **)&p->base[PLACE_DEVICE], p->device_bytes));
    p->base[PLACE_HOST] = pinned_open(p->host_bytes, device_node(""));
#if GPT2_POISON
    arena_stream = stream;
    p->mark = device_mark;
    p->mark(p->base[PLACE_DEVICE], p->device_bytes, 0);
    p->mark(p->base[PLACE_HOST], p->host_bytes, 0);
#endif
    plan_tick(p, 0);
    cuda_check(cudaStreamSynchronize(stream));
}

// arena_lend makes the device memory available for other uses until arena_return; the contents of
// the plan's buffers there are lost. Test builds check that no buffer of the plan is used in
// between, and fill the buffers with NaN afterwards.
static void arena_lend(Plan *p) {
    plan_tick(p, -1);
#if GPT2_POISON
    p->mark(p->base[PLACE_DEVICE], p->device_bytes, 1);
#endif
}

static void arena_return(Plan *p) {
#if GPT2_POISON
    p->mark(p->base[PLACE_DEVICE], p->device_bytes, 0);
#endif
    plan_tick(p, 0);
}

// Frees device and host memory but not the plan itself, like plan_close. Test builds unpoison the
// memory first, so that the next allocation may use it.
static void arena_close(Plan *p) {
#if GPT2_POISON
    p->mark(p->base[PLACE_DEVICE], p->device_bytes, 1);
    p->mark(p->base[PLACE_HOST], p->host_bytes, 1);
    cuda_check(cudaStreamSynchronize(arena_stream));
#endif
    cuda_check(cudaFree(p->base[PLACE_DEVICE]));
    pinned_close(p->base[PLACE_HOST], p->host_bytes);
    p->base[PLACE_DEVICE] = p->base[PLACE_HOST] = nullptr;
}

// -------------------------------------------------------------------------------------------------
// 36. Offload: copies and streams
// Copies streamed buffers (chapter Sharding and offload) between the device and their backing store
// in host memory while kernels compute. One stream uploads and one downloads, since a GPU has a
// copy engine for each direction.
// 1. Accesses to a slot (a device buffer that different blocks use in turn) are synchronised only
//    through the compute stream: a copy waits for an event that compute records after the last use
//    of the bytes that the copy overwrites or stores, and compute waits for the event recorded
//    after the copy.
// 2. Moments and master weights are not streamed: AdamW reads and writes them in pinned memory. It
//    does the same with weights and gradients of blocks whose backing store is in host memory.

struct RankComm;  // chapter Exchange between ranks
struct OffloadStreams {
    cudaStream_t compute, up, down;
    const RankComm *ranks;
    cudaEvent_t now;                                      // where compute is when a copy is queued
    cudaEvent_t ready[KINDS][SLOTS], gone[KINDS][SLOTS];  // recorded after a fetch, a store
};

// Makes work queued on `later` from now on wait for all work queued on `earlier` so far.
static void stream_after(cudaStream_t later, cudaStream_t earlier, cudaEvent_t event) {
    cuda_check(cudaEventRecord(event, earlier));
    cuda_check(cudaStreamWaitEvent(later, event, 0));
}

// Queues one phase of a transfer: the implementation of Plan.transfer on one GPU.
static void gpu_transfer(Plan *p, int phase, const Transfer *v, void *slot, void *store,
                         size_t bytes) {
    const OffloadStreams *s = (const OffloadStreams *)p->transfer_context;
    cudaEvent_t ready = s->ready[v->kind][v->slot], gone = s->gone[v->kind][v->slot];
    if (phase == FETCH && store) {
        stream_after(s->up, s->compute, s->now);
        cuda_check(cudaMemcpyAsync(slot, store, bytes, cudaMemcpyHostToDevice, s->up));
        cuda_check(cudaEventRecord(ready, s->up));
    } else if (phase == FETCH_WAIT) {
        cuda_check(cudaStreamWaitEvent(s->compute, ready, 0));
    } else if (phase == STORE) {
        stream_after(s->down, s->compute, s->now);
        cuda_check(cudaMemcpyAsync(store, slot, bytes, cudaMemcpyDeviceToHost, s->down));
        cuda_check(cudaEventRecord(gone, s->down));
    } else if (phase == STORE_WAIT) {
        cuda_check(cudaStreamWaitEvent(s->compute, gone, 0));
    }
}

// Calls f for every event.
template <class F> static void offload_each_event(OffloadStreams *s, F f) {
    f(&s->now);
    for (int i = 0; i < KINDS * SLOTS; i++) {
        f(&s->ready[i / SLOTS][i % SLOTS]);
        f(&s->gone[i / SLOTS][i % SLOTS]);
    }
}

// Creates the streams and events that transfer the streamed buffers of plan `p` concurrently with
// the stream `compute`, which the caller continues to own.
static void offload_open(OffloadStreams *s, Plan *p, cudaStream_t compute, const RankComm *ranks) {
    p->transfer_context = s;
    s->compute = compute;
    s->ranks = ranks;
    cuda_check(cudaStreamCreateWithFlags(&s->up, cudaStreamNonBlocking));
    cuda_check(cudaStreamCreateWithFlags(&s->down, cudaStreamNonBlocking));
    offload_each_event(s, [](cudaEvent_t *event) {
        cuda_check(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    });
}

// Destroys the streams and events. No copy is in flight: compute has waited for all copies by the
// end of a micro-step, and is idle.
static void offload_close(OffloadStreams *s) {
    offload_each_event(s, [](cudaEvent_t *event) { cuda_check(cudaEventDestroy(*event)); });
    cuda_check(cudaStreamDestroy(s->up));
    cuda_check(cudaStreamDestroy(s->down));
}

// =================================================================================================
// Part I. Many GPUs

// -------------------------------------------------------------------------------------------------
// 37. Starting and watching the ranks
// A run on several GPUs consists of several processes, the ranks, one per GPU. Either the program
// forks them itself (--gpus N) and stays as their parent, or a launcher starts them: torchrun and
// srun, whose ranks find each other over TCP (MASTER_ADDR), or mpirun, over MPI. In both cases
// every rank sends its RankInfo to all others once, when the run starts: the handshake. The
// communication during training is in chapter Exchange between ranks.
// 1. The parent uses neither CUDA nor OpenMP, before or after the fork, because neither survives a
//    fork.
// 2. If a rank dies, the run ends: the parent ends the others and reports in one line which rank
//    died and how, unless the rank has already reported it. Under a launcher, this is the
//    launcher's job.
// 3. If one rank receives a signal, all ranks act on it at the same point of the run (Ranks.stop);
//    otherwise the remaining ranks would wait forever for those that have left.
// 4. A rank that hangs or is stopped makes all others wait inside CUDA. So each rank publishes its
//    progress in a Heartbeat, and a watchdog ends a run without progress for --timeout. The
//    watchdog is the parent, which sees all ranks, or, under a launcher, a thread of each rank,
//    which sees only that rank.

// The operations in which ranks wait for each other, and their names.
enum { RANK_HANDSHAKE, RANK_CONNECTION, RANK_EXCHANGE, RANK_GATHER, RANK_BROADCAST };
static const char *const rank_calls[] = {"the handshake", "NCCL's initialization", "Send/Recv",
                                         "AllGather", "Broadcast"};

// Numbers the next collective, of kind `call` (RANK_*), and returns its state. A call in which the
// host itself waits for other ranks writes that state to the heartbeat with rank_wait_begin() and
// rank_wait_end().
static CollectiveState collective_next(int call) {
    const uint64_t done = heartbeat->calls++;
    const CollectiveState note = {done + 1, done, call};
    return note;
}
static void rank_wait_begin(int call) { heartbeat->note = collective_next(call); }
static void rank_wait_end(void) { heartbeat->note.done = heartbeat->note.begun; }

enum { RANK_PAGES = 1 << 16 };
static char *rank_pages;                                     // heartbeats of all ranks visible here

static Heartbeat *heartbeat_at(int r) {
    return (Heartbeat *)(void *)(rank_pages + (size_t)r * RANK_PAGES);
}

// Allocates `rows` heartbeats in memory shared with the processes forked later.
static void ranks_share(int rows) {
    rank_pages = (char *)mmap(NULL, (size_t)rows * RANK_PAGES, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (rank_pages == MAP_FAILED) {
        die("no memory for %d ranks: %s", rows, strerror(errno));
    }
}

// Makes this process a rank, which publishes its progress in the heartbeat `row`. An error that
// occurs on all ranks is reported once: die() on ranks other than 0 waits for a grace period, in
// which rank 0 reports the error and the run is ended.
static void ranks_begin(Ranks r, Heartbeat *row) {
    static char name[64];
    this_rank = r;
    heartbeat = row;
    progress_count = &row->count;
    slow_count = &row->slow;
    rank_phase("starting", RANK_STARTS);
    if (r.rank > 0) {
        snprintf(name, sizeof name, "%s: rank %d", program_name, r.rank);
        program_name = name;
        grace_ms = rank_grace_ms();
    }
}

// Limits the OpenMP threads of a rank to its share of the cores, unless OMP_NUM_THREADS is set. The
// cores shared are those available to the parent or, under a launcher, all of the machine's,
// because a launcher may already have given each rank its own cores.
static void ranks_share_cores(void) {
#ifdef _OPENMP
    if (!getenv("OMP_NUM_THREADS")) {
        const int mine = omp_get_max_threads();
        const int all = this_rank.launched ? (int)sysconf(_SC_NPROCESSORS_ONLN) : mine;
        omp_set_num_threads((int)max_i64(1, min_int(mine, all / this_rank.local_ranks)));
    }
#endif
}

// Sends or receives `bytes` through a socket. Returns 0 if the peer has closed the connection or
// the socket's timeout has expired.
static int socket_move(int fd, void *data, size_t bytes, int sending) {
    char *at = (char *)data;
    while (bytes > 0) {
        const ssize_t n = sending ? send(fd, at, bytes, MSG_NOSIGNAL) : recv(fd, at, bytes, 0);
        if (n == 0 || (n < 0 && errno != EINTR)) {
            return 0;
        }
        at += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
    }
    return 1;
}

// Sockets for the handshake without MPI. Rank 0 has one to each other rank; each other rank has
// one, rank_links[0], to rank 0.
static int *rank_links;

static void *link_move(int r, void *data, size_t bytes, int sending) {
    if (!socket_move(rank_links[r], data, bytes, sending)) {
        grace_ms = rank_grace_ms();  // the lost rank, or its parent, reports first
        die("rank %d ended before all ranks were connected", r);
    }
    return data;
}

// All-gather through rank 0: all (ranks, bytes) = `own` of every rank. All ranks must call it.
static void ranks_gather(void *all, void *own, size_t bytes) {
    const int ranks = this_rank.ranks;
#if GPT2_MPI
    if (!rank_links) {
        MPI_Allgather(own, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD);
        return;
    }
#endif
    if (this_rank.rank > 0) {
        link_move(0, own, bytes, 1);
        link_move(0, all, (size_t)ranks * bytes, 0);
        return;
    }
    memcpy(all, own, bytes);
    for (int sending = 0; sending < 2; sending++) {
        for (int r = 1; r < ranks; r++) {
            char *at = (char *)all + (sending ? 0 : (size_t)r * bytes);
            link_move(r, at, sending ? (size_t)ranks * bytes : bytes, sending);
        }
    }
}

// The parent's record of a rank.
typedef struct {
    pid_t pid;  // 0: the rank has ended
    int alive;  // pipe that closes when the rank ends; -1: it is closed
} Child;

// Sends signal `number` to all ranks that are still running.
static void children_signal(const Child *children, int ranks, int number) {
    for (int r = 0; r < ranks; r++) {
        if (children[r].pid > 0) {
            kill(children[r].pid, number);
        }
    }
}

// Collects the exit status of rank r, whose pipe has closed, and reports how it ended. If the
// status is one of die()'s, the rank has printed an error, and nothing more is printed. Returns the
// exit status for the whole run, or -1 if the process has not ended yet: the system takes time to
// free a GPU, and may never finish if the GPU hangs.
static int child_reap(Child *child, int r, int quiet) {
    int status = 0;
    if (waitpid(child->pid, &status, WNOHANG) == 0) {
        return -1;
    }
    child->pid = 0;
    const int number = WIFSIGNALED(status) ? WTERMSIG(status) : 0, code = WEXITSTATUS(status);
    if (number && !quiet) {
        fprintf(stderr, "%s: rank %d was ended by signal %d (%s): the run ends\n", program_name, r,
                number, strsignal(number));
    } else if (code > 1 && code != STATUS_TOO_LARGE && !quiet) {
        fprintf(stderr, "%s: rank %d ended with status %d: the run ends\n", program_name, r, code);
    }
    return number ? 1 : code;
}

// State of the watchdog: the progress of all its ranks at its last look (a call of watchdog_look).
typedef struct {
    uint64_t moves;
    double processor_ms, last_ms, still_ms;
} Watchdog;

// Returns for how many milliseconds none of the remaining ranks has made progress. One look counts
// for at most one second: the watchdog may have been stopped together with all ranks, as by Ctrl-Z
// in a shell, and then all continue together.
static double watchdog_look(Watchdog *w, const Child *children, int ranks) {
    // A blocked standard output, as after Ctrl-S, is not a hang of a rank: see write_blocks below.
    const double now = now_ms(), passed = fmin(now - w->last_ms, 1000);
    double processor_ms = 0;
    uint64_t moves = 0;
    for (int r = 0; r < ranks; r++) {
        const volatile Heartbeat *row = heartbeat_at(r);
        clockid_t clock;
        struct timespec t;
        moves += children[r].pid ? row->count + row->note.begun + row->note.done : 0;
        if (children[r].pid && row->work != RANK_RUNS && row->note.begun == row->note.done &&
            clock_getcpuclockid(children[r].pid, &clock) == 0 && clock_gettime(clock, &t) == 0) {
            processor_ms += (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
        }
    }
    // In the phases before RANK_RUNS, CPU time counts as progress: a driver that compiles kernels
    // uses more than a tenth of a core, its idle threads that poll use less.
    const int moved = moves != w->moves || processor_ms - w->processor_ms > 0.1 * passed ||
                      write_blocks(STDOUT_FILENO);
    const Watchdog seen = {moves, processor_ms, now, moved ? 0 : w->still_ms + passed};
    *w = seen;
    return w->still_ms;
}

// Returns the limit on the time without progress: ten times --timeout while a rank is in a call
// known to be slow, because a file server that fails over or NCCL's initialisation is not a hang.
static double watch_limit_ms(const Child *children, int ranks) {
    int slow = 0;
    for (int r = 0; r < ranks; r++) {
        slow |= children[r].pid && __atomic_load_n(&heartbeat_at(r)->slow, __ATOMIC_SEQ_CST) > 0;
    }
    return rank_timeout_ms * (slow ? 10 : 1);
}

// Returns true if a rank is in the collectives of the warm-up, after its engine has opened and
// before anything is loaded. At that point all ranks have the same amount of work.
static int row_in_warm_up(const Heartbeat *row) {
    return row->work == RANK_STARTS && row->note.call > RANK_CONNECTION;
}

// Reasons why a rank makes no progress, the most serious first.
enum { RANK_STOPPED, RANK_HANGS, RANK_WAITS, RANK_REASONS };

// Prints what rank r is doing if `reason` is why it makes no progress; returns whether it printed.
// `named`: how many ranks have been printed before.
static int watchdog_explain_rank(FILE *f, int reason, const Child *child, int r, int named) {
    const Heartbeat *row = heartbeat_at(r);
    const CollectiveState *note = &row->note;
    siginfo_t info;
    memset(&info, 0, sizeof info);
    (void)waitid(P_PID, (id_t)child->pid, &info, WSTOPPED | WNOHANG | WNOWAIT);
    const int ending = child->alive < 0;
    if (child->pid == 0 || reason != (info.si_pid || ending        ? RANK_STOPPED
                                      : note->begun == note->done ? RANK_HANGS
                                                                  : RANK_WAITS)) {
        return 0;
    }
    // Under a launcher the watchdog sees only its own rank.
    fprintf(f, "%s rank %d ", named ? "," : ":", this_rank.ranks > 1 ? this_rank.rank : r);
    if (ending) {
        fprintf(f, "has exited, but the system has not ended it");
        return 1;
    }
    if (reason == RANK_STOPPED) {
        fprintf(f, "is stopped by signal %d (%s)", info.si_status, strsignal(info.si_status));
        return 1;
    }
    fprintf(f, reason == RANK_HANGS ? "hangs while %s" : "waits for others while %s", row->doing);
    if (note->begun) {
        fprintf(f, ", %s %s #%" PRIu64, reason == RANK_HANGS ? "after" : "in",
                rank_calls[note->call], note->begun);
    }
    return 1;
}

// Prints why there is no progress: the ranks that are stopped; if none is, the ranks that hang; if
// all wait for others, the collective in which each waits.
static void watchdog_explain(const Watchdog *w, const Child *children, int ranks) {
    char *text;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);  // one write: others may print at the same time
    check(f, "no memory for a message");
    fprintf(f, "%s: no progress for %.0f s (--timeout)", program_name, w->still_ms * 1e-3);
    int first = 0;
    for (int reason = RANK_STOPPED, named = 0; reason < RANK_REASONS && !named; reason++) {
        for (int r = 0; r < ranks; r++) {
            const int waits = watchdog_explain_rank(f, reason, &children[r], r, named);
            named += waits;
            first |= waits && reason == RANK_WAITS && row_in_warm_up(heartbeat_at(r));
        }
    }
    fputs(first ? ": the first collective does not complete; if the GPUs cannot access each "
                  "other's memory, NCCL_P2P_DISABLE=1 helps; the run ends\n"
                : ": the run ends\n", f);
    fclose(f);
    fputs(text, stderr);
    free(text);
}

// Main loop of the parent: forwards a signal to the ranks, ends the others when a rank fails, and
// ends all when none makes progress. Returns the exit status of the run. A second signal ends the
// parent and all ranks, as it would end a single process.
static int children_attend(Child *children, int ranks) {
    enum { LOOK_MS = 250, END_MS = 4000 };  // after SIGKILL: a disk may have to wake up
    struct pollfd *fds = (struct pollfd *)alloc_zero((size_t)ranks, sizeof *fds);
    int left = ranks, passed_on = 0, result = 0, ending = 0;
    Watchdog watch = {0, 0, now_ms(), 0};
    double ended_ms = HUGE_VAL;
    for (int r = 0; r < ranks; r++) {
        fds[r].fd = children[r].alive;
    }
    while (left > 0 && now_ms() < ended_ms + END_MS) {
        const int ready = poll(fds, (nfds_t)ranks, ending ? 1 : LOOK_MS), before = result;
        if (stop_signal && !passed_on) {
            children_signal(children, ranks, SIGUSR1);
            passed_on = 1;
        }
        ending = 0;
        for (int r = 0; r < ranks; r++) {
            if (ready > 0 && fds[r].revents != 0) {
                fds[r].fd = children[r].alive = -1;
            }
            const int gone = fds[r].fd < 0 && children[r].pid;
            const int status = gone ? child_reap(&children[r], r, result != 0) : -1;
            ending |= gone && status < 0;
            left -= status >= 0;
            result = result || status < 0 ? result : status;
        }
        if (!result && left > 0 && watchdog_look(&watch, children, ranks) >
                                          watch_limit_ms(children, ranks)) {
            watchdog_explain(&watch, children, ranks);
            result = 1;
        }
        if (result && !before) {
            children_signal(children, ranks, SIGKILL);
            ended_ms = now_ms();
        }
    }
    free(fds);
    return result;
}

// Keeps this rank's ends of the sockets between rank 0 and every rank q, links[q] = {rank 0's end,
// rank q's end}, and closes the others.
static void links_take(int (*links)[2], int rank, int ranks) {
    rank_links = (int *)alloc_zero((size_t)ranks, sizeof(int));
    for (int q = 1; q < ranks; q++) {
        for (int end = 0; end < 2; end++) {
            if (end == (rank > 0) && (rank == 0 || rank == q)) {
                rank_links[rank ? 0 : q] = links[q][end];
            } else {
                close(links[q][end]);
            }
        }
    }
    free(links);
}

// Forks the ranks of --gpus. Returns in each rank; the parent runs children_attend and exits. If
// the parent is killed, the system kills its ranks too (PR_SET_PDEATHSIG).
static void ranks_fork(int ranks) {
    Child *children = (Child *)alloc_zero((size_t)ranks, sizeof(Child));
    int (*links)[2] = (int (*)[2])alloc_zero((size_t)ranks, sizeof *links);
    const pid_t parent = getpid();
    int failed = 0;
    signal(SIGCHLD, SIG_DFL);  // if a shell set it to be ignored, exit statuses would be lost
    ranks_share(ranks);
    fflush(NULL);
    for (int q = 1; q < ranks; q++) {
        failed |= socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, links[q]);
    }
    for (int r = 0; r < ranks; r++) {
        int ends[2];
        if (failed || pipe2(ends, O_CLOEXEC) != 0 || (children[r].pid = fork()) < 0) {
            children[r].pid = 0;
            children_signal(children, ranks, SIGKILL);
            die("--gpus: cannot start rank %d of %d: %s", r, ranks, strerror(errno));
        }
        if (children[r].pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent) {
                _exit(1);
            }
            for (int other = 0; other < r; other++) {
                close(children[other].alive);
            }
            close(ends[0]);
            free(children);
            links_take(links, r, ranks);
            const Ranks mine = {r, ranks, r, ranks, 0, 0, 0, 0};
            ranks_begin(mine, heartbeat_at(r));
            ranks_share_cores();
            return;
        }
        close(ends[1]);
        children[r].alive = ends[0];
    }
    for (int q = 1; q < ranks; q++) {
        close(links[q][0]);
        close(links[q][1]);
    }
    stop_grace = GRACE_UNLIMITED;  // each rank has its own limit; the parent watches them
    free(links);
    const int status = children_attend(children, ranks);
    free(children);
    exit(status);
}

// The watchdog thread of a rank started by a launcher. It cannot see the other ranks, which may be
// in a slow call. So while its rank waits for others outside the warm-up, the limit is ten times
// --timeout. A waiting rank also adds 2 s, so that ranks that are not waiting report first.
static void *rank_watchdog(void *nothing) {
    const Child own = {getpid(), 0};
    Watchdog watch = {0, 0, now_ms(), 0};
    double over;
    do {
        usleep(250000);
        const double still = watchdog_look(&watch, &own, 1);
        const int waits = heartbeat->note.begun != heartbeat->note.done;
        const int patient = waits && !row_in_warm_up(heartbeat);
        over = still - (patient ? 10 * rank_timeout_ms : watch_limit_ms(&own, 1));
        over -= waits ? 2000 : 0;
    } while (over <= 0);
    watchdog_explain(&watch, &own, 1);
    _exit(1);
    return nothing;
}

// Starts the watchdog thread with all signals blocked: they must interrupt calls of the main
// thread.
static void rank_watchdog_start(void) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&thread, NULL, rank_watchdog, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        die("cannot start the watchdog thread of this rank: %s", strerror(error));
    }
}

// The first message that a rank sends and expects. It keeps a rank from mistaking another process
// that connects to the port, or answers on it, for a rank.
typedef struct {
    char magic[16];
    int32_t rank, ranks;
    char machine[RANK_TEXT];
} RankHello;
static const char rank_magic[16] = "train_gpt2 rank";

// Sets how long a single call on a socket may wait.
static void socket_limit(int fd, double ms) {
    const int64_t us = (int64_t)(1e3 * ms);
    const struct timeval limit = {(time_t)(us / 1000000), (suseconds_t)(us % 1000000)};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);  // for connect() too: socket(7)
}

// Returns the milliseconds until the time `end_ms`, at most `most`, or 0 if that time has passed.
// Ends the run if a signal has been received.
static double meeting_left(double end_ms, double most) {
    if (stop_signal) {
        die("stopped by a signal before all ranks were connected");
    }
    return fmin(fmax(end_ms - now_ms(), 0), most);
}

// Opens rank 0's listening socket on every address of this machine: the address that the other
// ranks resolve from MASTER_ADDR may not be the one resolved here (Debian maps a machine's own name
// to 127.0.1.1).
static int meeting_listen(const Launcher *l) {
    const int yes = 1, no = 0;
    struct addrinfo hints, *any = NULL;
    int fd = -1;
    errno = 0;
    for (int ipv6 = 1; ipv6 >= 0 && fd < 0 && errno != EADDRINUSE; ipv6--) {
        memset(&hints, 0, sizeof hints);
        hints.ai_family = ipv6 ? AF_INET6 : AF_INET;  // an IPv6 socket accepts IPv4 too
        hints.ai_socktype = SOCK_STREAM;
        hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
        if (getaddrinfo(NULL, l->port, &hints, &any) != 0) {
            continue;
        }
        fd = socket(hints.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd >= 0) {
            setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
            // A run that has just ended on this port leaves it in TIME_WAIT.
            setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
            if (bind(fd, any->ai_addr, any->ai_addrlen) != 0 || listen(fd, SOMAXCONN) != 0) {
                const int error = errno;
                close(fd);
                errno = error;
                fd = -1;
            }
        }
        freeaddrinfo(any);
    }
    if (fd < 0) {
        die("rank 0 cannot listen on port %s (MASTER_PORT): %s", l->port, strerror(errno));
    }
    return fd;
}

// Accepts connections on rank 0 until all other ranks have connected. Ends the run if one is
// missing at `end_ms`.
static void meeting_open(const Launcher *l, double end_ms) {
    enum { HELLO_MS = 5000 };
    const int listener = meeting_listen(l);
    for (int there = 1; there < l->copies;) {
        RankHello hello;
        struct pollfd ready = {listener, POLLIN, 0};
        const double left = meeting_left(end_ms, 1000);
        if (left <= 0) {
            int absent = 1;
            while (rank_links[absent] >= 0) {
                absent++;
            }
            die("only %d of %d ranks connected to port %s within %.0f s (--timeout); rank %d is "
                "missing", there, l->copies, l->port, rank_timeout_ms * 1e-3, absent);
        }
        if (poll(&ready, 1, (int)left + 1) <= 0) {
            continue;
        }
        const int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0) {
            continue;
        }
        socket_limit(fd, HELLO_MS);
        if (!socket_move(fd, &hello, sizeof hello, 0) ||
            memcmp(hello.magic, rank_magic, sizeof rank_magic) != 0) {
            close(fd);  // not a rank: a port scanner, for example
            continue;
        }
        if (hello.ranks != l->copies) {
            die("rank %d was started as one of %d ranks, rank 0 as one of %d (%s)", hello.rank,
                hello.ranks, l->copies, l->variable);
        }
        if (hello.rank < 1 || hello.rank >= l->copies || rank_links[hello.rank] >= 0) {
            die("two processes were started as rank %d of %d", hello.rank, l->copies);
        }
        rank_links[hello.rank] = fd;
        there++;
    }
    close(listener);
}

// Connects another rank to rank 0 as soon as that listens. Ends the run if it does not by `end_ms`.
static void meeting_join(const Launcher *l, RankHello *hello, double end_ms) {
    enum { TRY_MS = 2000, PAUSE_US = 20000 };
    char why[128] = "";
    for (double left; rank_links[0] < 0;) {
        struct addrinfo hints, *found = NULL;
        memset(&hints, 0, sizeof hints);
        hints.ai_socktype = SOCK_STREAM;
        const int unknown = getaddrinfo(l->address, l->port, &hints, &found);
        if (unknown) {
            snprintf(why, sizeof why, "%s", gai_strerror(unknown));
        }
        for (struct addrinfo *a = found; a && rank_links[0] < 0; a = a->ai_next) {
            const int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
            socket_limit(fd, meeting_left(end_ms, TRY_MS) + 1);
            if (connect(fd, a->ai_addr, a->ai_addrlen) == 0) {
                rank_links[0] = fd;
                break;
            }
            snprintf(why, sizeof why, "%s",
                     errno == EINPROGRESS ? "no answer; a firewall may block the port"
                                          : strerror(errno));
            close(fd);
        }
        if (found) {
            freeaddrinfo(found);
        }
        left = meeting_left(end_ms, TRY_MS);
        if (left <= 0 && rank_links[0] < 0) {
            die("cannot connect to rank 0 at %s, port %s (MASTER_ADDR, MASTER_PORT), within %.0f s "
                "(--timeout): %s", l->address, l->port, rank_timeout_ms * 1e-3, why);
        }
        usleep(rank_links[0] < 0 ? PAUSE_US : 0);
    }
    socket_limit(rank_links[0], rank_timeout_ms + 5000);  // rank 0 may still be waiting for others
    if (!socket_move(rank_links[0], hello, sizeof *hello, 1)) {
        die("rank 0 at %s, port %s, has closed the connection", l->address, l->port);
    }
}

// Connects this rank to rank 0 over TCP or, on rank 0, to all other ranks.
static void meeting_find(const Launcher *l, RankHello *hello) {
    const double end_ms = now_ms() + rank_timeout_ms;
    rank_links = (int *)alloc_zero((size_t)l->copies, sizeof(int));
    for (int r = 0; r < l->copies; r++) {
        rank_links[r] = -1;
    }
    if (l->rank == 0) {
        meeting_open(l, end_ms);
    } else {
        meeting_join(l, hello, end_ms);
    }
}

// Connects the ranks started by a launcher, and counts the ranks on each machine, which share its
// memory and cores.
static void ranks_join(const Launcher *l, void (*select)(int local_rank)) {
    Ranks r = {l->rank, l->copies, 0, 1, 1, 0, 0, 0};
    RankHello hello, *all;
    grace_ms = l->rank > 0 ? rank_grace_ms() : 0;
#if GPT2_MPI
    if (!l->address) {
        int level;
        if (l->local_rank >= 0) {
            select(l->local_rank);  // before MPI_Init: CUDA-aware MPI uses the current GPU
        }
        // The watchdog thread makes no MPI calls.
        MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level);
        MPI_Comm_rank(MPI_COMM_WORLD, &r.rank);
        MPI_Comm_size(MPI_COMM_WORLD, &r.ranks);
        if (r.ranks != l->copies) {
            die("%s is %d, but MPI finds %d: set MASTER_ADDR and MASTER_PORT, as "
                "dev/slurm/train.sh does; or srun needs --mpi=pmix, or the pmi2 of this MPI",
                l->variable, l->copies, r.ranks);
        }
    }
#else
    (void)select;
    if (!l->address) {
        die("%s is %d, but MASTER_ADDR is not set, and this program was built without MPI: the "
            "processes cannot connect; on one machine, --gpus %d starts them", l->variable,
            l->copies, l->copies);
    }
#endif
    ranks_share(1);
    ranks_begin(r, heartbeat_at(0));
    rank_watchdog_start();
    rank_wait_begin(RANK_HANDSHAKE);
    memset(&hello, 0, sizeof hello);
    memcpy(hello.magic, rank_magic, sizeof rank_magic);
    hello.rank = r.rank;
    hello.ranks = r.ranks;
    gethostname(hello.machine, sizeof hello.machine - 1);
    if (l->address) {
        meeting_find(l, &hello);
    }
    all = (RankHello *)alloc_zero((size_t)r.ranks, sizeof *all);
    ranks_gather(all, &hello, sizeof hello);
    if (memcmp(all[0].magic, rank_magic, sizeof rank_magic) != 0) {
        die("the process that answers at %s, port %s, is not rank 0 of this program; does another "
            "program use MASTER_PORT?", l->address, l->port);
    }
    this_rank.local_ranks = 0;
    for (int q = 0; q < r.ranks; q++) {
        const int here = strcmp(all[q].machine, hello.machine) == 0;
        this_rank.local_rank += here && q < r.rank;
        this_rank.local_ranks += here;
    }
    this_rank.local_rank = l->local_rank < 0 ? this_rank.local_rank : l->local_rank;
    for (int q = 0; rank_links && q < (r.rank ? 1 : r.ranks); q++) {
        socket_limit(rank_links[q], 0);  // no timeout: the watchdog now detects hangs
    }
    free(all);
    rank_wait_end();
    ranks_share_cores();
}

// All-gathers the RankInfo of every rank into `cards` (ranks), once in a run, on all ranks. Then
// finalises MPI or closes the links, which are not used again.
static void ranks_exchange_info(RankInfo *cards) {
    rank_wait_begin(RANK_HANDSHAKE);
    ranks_gather(cards, &rank_info, sizeof rank_info);
    for (int q = this_rank.rank == 0; rank_links && q < (this_rank.rank ? 1 : this_rank.ranks);
         q++) {
        close(rank_links[q]);
    }
#if GPT2_MPI
    if (!rank_links) {
        MPI_Finalize();
    }
#endif
    free(rank_links);
    rank_links = NULL;
    rank_wait_end();
}

// Returns a fingerprint of the program's executable file, because ranks of different builds may
// compute different results.
static uint64_t fingerprint_program(void) {
    uint64_t print = 0;
    Mapping map;
    if (mapping_open(&map, "/proc/self/exe") == 0) {
        print = fnv1a(map.size, map.bytes, map.size);
        mapping_close(&map);
    }
    return print;
}

// The handshake: compares the RankInfo of all ranks. Ends the run, with an error printed by rank 0,
// if they cannot train together. Otherwise rank_info receives rank 0's NCCL id, batch and kernel
// verdicts, a rank whose GPU or driver differs from rank 0's (kernels_unlike), and the smallest
// memory and number of thread blocks of any rank.
static void ranks_handshake(void) {
    const size_t n = (size_t)this_rank.ranks;
    static const struct {
        size_t offset;
        const char *what;
    } alike[] = {{offsetof(RankInfo, program), "runs a different build of this program"},
                 {offsetof(RankInfo, options), "was given different options"},
                 {offsetof(RankInfo, data), "reads different data"},
                 {offsetof(RankInfo, settings), "has a different model"}};
    int unlike = 0;
    RankInfo *cards = (RankInfo *)alloc_zero(n, sizeof(RankInfo));
    // For tests: from version 2.30.7 on, NCCL lets ranks share a GPU if this is set (NCCL user
    // guide, Environment Variables). Each rank then plans as if all of the GPU's free memory were
    // its own.
    const char *sharing = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    const int shared = sharing && strcmp(sharing, "1") == 0;
    rank_info.program = fingerprint_program();
    ranks_exchange_info(cards);
    for (size_t r = 1; r < n; r++) {
        cards[0].device = cards[r].device < cards[0].device ? cards[r].device : cards[0].device;
        cards[0].host = cards[r].host < cards[0].host ? cards[r].host : cards[0].host;
        cards[0].total = cards[r].total < cards[0].total ? cards[r].total : cards[0].total;
        unlike = unlike || cards[r].kernels_where == cards[0].kernels_where ? unlike : (int)r;
        cards[0].ctas = cards[r].ctas < cards[0].ctas ? cards[r].ctas : cards[0].ctas;
        for (size_t i = 0; i < sizeof alike / sizeof alike[0]; i++) {
            if (memcmp((char *)&cards[0] + alike[i].offset, (char *)&cards[r] + alike[i].offset,
                       sizeof(uint64_t)) != 0) {
                die("rank %zu %s from rank 0; all ranks must use the same", r, alike[i].what);
            }
        }
        for (size_t other = 0; other < r; other++) {
            if (!shared && strcmp(cards[other].gpu, cards[r].gpu) == 0) {
                die("ranks %zu and %zu would share one GPU, %s; start as many ranks on a machine "
                    "as it has GPUs%s", other, r, cards[r].gpu, !this_rank.launched ? "" :
                    ", and have srun show all of them to each: --gpus-per-node with "
                    "--gpu-bind=none");
            }
        }
    }
    memcpy(rank_info.id, cards[0].id, RANK_ID);
    memcpy(rank_info.kernels, cards[0].kernels, RANK_KERNELS);
    rank_info.kernels_unlike = unlike;
    rank_info.device = cards[0].device;
    rank_info.host = cards[0].host;
    rank_info.total = cards[0].total;
    rank_info.batch = cards[0].batch;
    rank_info.ctas = cards[0].ctas;
    free(cards);
}

// Writes a name of this rank's GPU that is unique across machines and, on rank 0, the run's NCCL
// id. The id must be created in rank 0's process, because NCCL waits there for the other ranks.
// Machines may share a host name, and their GPUs a bus id, so the name ends with the first digits
// of the UUID as printed by nvidia-smi -L.
static void rank_handshake(char gpu[RANK_TEXT], char id[RANK_ID]) {
    // A bus id takes 13 bytes. The host name is not truncated, because clusters number machines at
    // its end.
    char bus[14], machine[HOST_NAME_MAX + 1] = "";
    int device = 0;
    cudaDeviceProp properties;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaGetDeviceProperties(&properties, device));
    cuda_check(cudaDeviceGetPCIBusId(bus, sizeof bus, device));
    gethostname(machine, sizeof machine - 1);
    const unsigned char *uuid = (const unsigned char *)properties.uuid.bytes;
    snprintf(gpu, RANK_TEXT, "%s of %s, GPU-%02x%02x%02x%02x", bus, machine, uuid[0], uuid[1],
             uuid[2], uuid[3]);
#if GPT2_NCCL
    if (this_rank.rank == 0) {
        ncclUniqueId unique;
        static_assert(sizeof unique == RANK_ID, "RANK_ID is the size of an NCCL id");
        nccl_check(ncclGetUniqueId(&unique));
        memcpy(id, &unique, RANK_ID);
    }
#else
    (void)id;
#endif
}

// Program.ranks_start: this process becomes one of the ranks that launcher `l` has started, or
// forks `gpus` ranks. CUDA is first used after that.
static void ranks_start(const Launcher *l, int gpus) {
    if (l->copies > 1) {
        ranks_join(l, device_select);
    } else {
        ranks_fork(gpus);
    }
    machine_link = device_link(this_rank.local_ranks);
}

// Program.ranks_handshake: fills in this rank's GPU and, on rank 0, the id of the communicator,
// then compares the RankInfo of all ranks.
static void ranks_shake_hands(void) {
    rank_handshake(rank_info.gpu, rank_info.id);
    ranks_handshake();
}

// -------------------------------------------------------------------------------------------------
// 38. Exchange between ranks
// The collectives between ranks: reduce-scatter of gradients and all-gather of weights, in buckets
// (chapter Sharding and offload of train_gpt2.c). For the matrices of blocks they depend on the
// ZeRO stage:
//   --zero  sharded            gradients                              weights
//   0       nothing            last micro-step: reduce-scatter,       -
//                              all-gather (that is, an all-reduce)
//   1       moments, master    last micro-step: reduce-scatter        after the update: all-gather
//   2       gradients too      every micro-step: reduce-scatter       after the update: all-gather
//   3       weights too        every micro-step: reduce-scatter       every fetch: all-gather
// wte and wpe are exchanged as at stage 1 at all stages above 0; vectors as at stage 0 at all
// stages.
// 1. NCCL only moves bytes. One of our kernels adds them in fp32, groups of eight ranks in rank
//    order and then the groups in order, and rounds once. So a sum depends only on the number of
//    ranks, not on NCCL's version, its algorithm, the interconnect or the machines that the ranks
//    run on, and the exchange gives the same bits on the CPU as on GPUs.
// 2. There is one communicator with one stream. The order of its calls is a function of the
//    settings and of the engine methods called, so it is the same on all ranks. Compute and
//    exchange wait for each other by events; the host waits for neither.
// 3. No kernel is launched for the first time while NCCL's kernels wait for other ranks: loading it
//    may wait for NCCL's kernels while they wait for it, which is a deadlock. The warm-up runs all
//    kernels with `on` 0 first, and then NCCL.
// 4. After the update each bucket of weights is gathered as soon as its shards are updated, while
//    compute updates the next ones and begins the next forward; a block waits for its own bucket.
// 5. Before and after every collective, the stream records its progress in the Heartbeat, where the
//    watchdog can read it: the host cannot tell a rank that waits for others from one whose own
//    kernels hang.

// This rank's connection to the other ranks.
struct RankComm {
    ncclComm_t comm;
    cudaStream_t stream;  // high priority: an exchange starts as soon as possible
    cudaEvent_t event;    // each record is followed by its wait, so one is enough
    int rank, ranks;
    int on;  // 0: run only the kernels, no collectives; see 3
    cudaEvent_t *gathered;  // one per bucket of weights (BUCKET_*): recorded after its gather
    bool *awaits;           // one per bucket: compute has not waited for its gather yet
    CollectiveState *note;  // device pointer into the heartbeat
    char *staging;          // receives the other ranks' parts of a bucket
    size_t capacity;        // of staging, in bytes
};

// A rank's status at the end of a step. Every rank adds up the statuses of all ranks in rank order,
// so that all ranks have the same gradient norm and clip factor, and take the same decisions to
// skip the update or to stop the run. The number of bytes is the same at every ZeRO stage.
struct StepStatus {
    float square_sum;  // over this rank's shards of the gradients
    float loss_sum;
    int stop, fault;   // signal received; 1 + the rank that cannot continue, or 0
};
static_assert(sizeof(StepStatus) <= RANK_STATUS_BYTES, "the plan's buffer holds a status");

// sum (rows, count) = round(the numbers of all `ranks` ranks or groups, added in their order), or
// with `adds` round(sum + that total). Row i is blockIdx.y.
//   own: row i of this rank's numbers is at own + i stride; sum may be that row. others (ranks - 1,
//   rows, count): those of rank q at index q if q < rank, at q - 1 if q > rank.
// Numerics: sums in fp32, rounded once. Bytes: each number is read once. grid: count / 2048 blocks
// (fp32: 1024), rows.
// budget: <bf16, bf16> threads 256 regs 38 blocks 6 test gpu_exchange
template <class In, class Out>
static __global__ void __launch_bounds__(256)
    rank_sum_kernel(Out *sum, const In *own, size_t stride, const In *others, int rank, int ranks,
                    size_t count, bool adds) {
    constexpr int size =
        Pack<In>::size > Pack<Out>::size ? Pack<In>::size : Pack<Out>::size;
    const size_t i = ((size_t)blockIdx.x * 256 + threadIdx.x) * size;
    if (i >= count) {
        return;
    }
    const In *mine = own + blockIdx.y * stride + i;
    const In *other = others + blockIdx.y * count + i;
    Out *to = sum + blockIdx.y * count + i;
    float all[size], x[size];
    vector_load(all, rank == 0 ? mine : other);
    for (int q = 1; q < ranks; q++) {
        vector_load(x, q == rank ? mine : other + (size_t)(q - (q > rank)) * gridDim.y * count);
        for (int k = 0; k < size; k++) {
            all[k] += x[k];
        }
    }
    if (adds) {
        vector_load(x, to);
        for (int k = 0; k < size; k++) {
            all[k] = x[k] + all[k];
        }
    }
    vector_store(to, all);
}

// Writes this rank's status: its sums are already on the device, the rest is passed by the host.
// budget: threads 1 regs 16 blocks 24 test gpu_exchange
static __global__ void step_status_kernel(StepStatus *status, const UpdateState *update,
                                        const float *loss_sum, int stop, int fault) {
    *status = {update->square_sum, *loss_sum, stop, fault};
}

// total = the statuses (ranks, RANK_STATUS_BYTES) added in rank order. update->square_sum becomes
// the total's sum of squares, or NaN if a rank cannot continue, so that no rank changes its
// weights.
// budget: threads 1 regs 24 blocks 24 test gpu_exchange
static __global__ void step_statuses_kernel(StepStatus *total, UpdateState *update,
                                            const char *statuses, int ranks) {
    StepStatus sum = {0.0f, 0.0f, 0, 0};
    for (int r = 0; r < ranks; r++) {
        const StepStatus *status =
            (const StepStatus *)(const void *)(statuses + r * RANK_STATUS_BYTES);
        sum.square_sum += status->square_sum;
        sum.loss_sum += status->loss_sum;
        sum.stop |= status->stop;
        sum.fault = sum.fault ? sum.fault : status->fault;
    }
    update->square_sum = sum.fault ? NAN : sum.square_sum;
    *total = sum;
}

// Records how far the stream of collectives has progressed. This is a kernel rather than an event,
// so that it can be read without calling CUDA: the watchdog thread must not depend on CUDA while
// the main thread is blocked inside it, and the parent must never call CUDA.
// budget: threads 1 regs 16 blocks 24 test gpu_exchange
static __global__ void collective_state_kernel(CollectiveState *to, CollectiveState note) {
    *to = note;
    __threadfence_system();  // the parent reads while the stream continues
}

// Queues collective `name`, an index of rank_calls, and records its state before and after it (see
// 5). Does nothing if `on` is 0.
template <class Call> static void rank_call(const RankComm *c, int name, Call call) {
    if (c->on) {  // otherwise the call is not counted either: all ranks must count the same
        CollectiveState note = collective_next(name);
        launch(collective_state_kernel, 1, 1, 0, c->stream, c->note, note);
        call();
        note.done = note.begun;
        launch(collective_state_kernel, 1, 1, 0, c->stream, c->note, note);
    }
}

// All-gather: all (ranks, bytes) = `own` of every rank. `own` may be this rank's part of `all`.
static void rank_gather_from(const RankComm *c, void *all, const void *own, size_t bytes) {
    rank_call(c, RANK_GATHER, [&] {
        nccl_check(ncclAllGather(own, all, bytes, ncclUint8, c->comm, c->stream));
    });
}

// In-place all-gather of `all` (ranks, bytes), which holds this rank's part on entry.
static void rank_gather(const RankComm *c, void *all, size_t bytes) {
    rank_gather_from(c, all, (char *)all + (size_t)c->rank * bytes, bytes);
}

// Launches rank_sum_kernel: its arguments, and the number of rows.
template <class In, class Out>
static void rank_sum(Out *sum, const In *own, size_t stride, const In *others, int rank, int ranks,
                     size_t count, int rows, bool adds, cudaStream_t stream) {
    constexpr size_t BLOCK = 256 * std::max(Pack<In>::size, Pack<Out>::size);  // elements
    check_rows(In, 0, own, others);
    check_rows(Out, 0, sum);
    launch(rank_sum_kernel<In, Out>, dim3((unsigned)((count + BLOCK - 1) / BLOCK), (unsigned)rows),
           256, 0, stream, sum, own, stride, others, rank, ranks, count, adds);
}

// Returns the rank that adds part `part` of a bucket for group `group`: see parts_added().
static int part_adder(int ranks, int group, int part) {
    return group * RANK_GROUP + part % RANK_GROUP % group_members(ranks, group);
}

// What a rank adds, in pieces of `count` elements of each part, and the layout of the staging
// buffer. It begins with the data received: first the parts from the group's other members (members
// - 1, parts, count) of G and, later in their place, the sums of the other groups (groups - 1,
// count) in fp32. If there are several groups, the sums of this group (parts, count) in fp32
// follow. Parts are in the order of their columns, part % RANK_GROUP.
struct ReducePieces {
    int group, groups, member, members, parts;
    size_t received, bytes;  // staging bytes per element of a piece: for data received; in all
};
static ReducePieces reduce_pieces(int ranks, int rank, size_t element) {
    const int group = rank / RANK_GROUP, members = group_members(ranks, group);
    ReducePieces p = {group, rank_groups(ranks), rank % RANK_GROUP, members,
                      parts_added(ranks, rank), 0, 0};
    p.received = std::max((size_t)((members - 1) * p.parts) * element,
                          (size_t)(p.groups - 1) * sizeof(float));
    p.bytes = p.received + (p.groups > 1 ? p.parts * sizeof(float) : 0);
    return p;
}

// Adds up pieces of the parts within the group; each member receives those that it adds. Writes
// this rank's `sum` if there is only one group, otherwise group_sums (parts, count).
template <class G>
static void reduce_in_group(const RankComm *c, const ReducePieces &p, G *sum, float *group_sums,
                            const G *grads, size_t part, size_t count, bool adds) {
    const int columns = min_int(RANK_GROUP, c->ranks), others = p.members - 1;
    G *received = (G *)(void *)c->staging;
    // Calls visit(column, the rank that adds it, rows, where they are received, parts before it).
    auto each_column = [&](auto visit) {
        for (int column = 0, before = 0; column < columns; column++) {
            const int rows = (c->ranks - column + RANK_GROUP - 1) / RANK_GROUP;
            const int adder = part_adder(c->ranks, p.group, column);
            visit(column, adder, rows, received + (size_t)(others * before) * count, before);
            before += adder == c->rank ? rows : 0;
        }
    };
    // In one NCCL group, so that no two ranks deadlock waiting for each other's receive.
    rank_call(c, RANK_EXCHANGE, [&] {
        nccl_check(ncclGroupStart());
        each_column([&](int column, int adder, int rows, G *to, int) {
            for (int row = 0; row < rows; row++) {
                const G *from = grads + (size_t)(column + row * RANK_GROUP) * part;
                if (adder != c->rank) {
                    nccl_check(ncclSend(from, count * sizeof(G), ncclUint8, adder, c->comm,
                                        c->stream));
                }
                for (int m = 0; m < p.members && adder == c->rank; m++) {
                    if (m != p.member) {
                        nccl_check(ncclRecv(
                            to + (size_t)((m - (m > p.member)) * rows + row) * count,
                            count * sizeof(G), ncclUint8, p.group * RANK_GROUP + m, c->comm,
                            c->stream));
                    }
                }
            }
        });
        nccl_check(ncclGroupEnd());
    });
    each_column([&](int column, int adder, int rows, const G *from, int before) {
        const G *own = grads + (size_t)column * part;
        if (adder == c->rank && p.groups == 1) {
            rank_sum(sum, own, 0, from, p.member, p.members, count, rows, adds, c->stream);
        } else if (adder == c->rank) {
            rank_sum(group_sums + (size_t)before * count, own, RANK_GROUP * part, from, p.member,
                     p.members, count, rows, false, c->stream);
        }
    });
}

// Sends the group's sums to the ranks that own the parts, and adds those of this rank's part.
template <class G>
static void reduce_between_groups(const RankComm *c, const ReducePieces &p, G *sum,
                                  const float *group_sums, size_t count, bool adds) {
    float *received = (float *)(void *)c->staging;
    const float *own = group_sums + (size_t)p.group * count;  // of this rank's first column
    rank_call(c, RANK_EXCHANGE, [&] {
        nccl_check(ncclGroupStart());
        for (int column = 0; column < RANK_GROUP; column++) {
            for (int q = column; q < c->ranks; q += RANK_GROUP) {
                if (part_adder(c->ranks, p.group, q) == c->rank) {
                    if (q != c->rank) {
                        nccl_check(ncclSend(group_sums, count * sizeof(float), ncclUint8, q,
                                            c->comm, c->stream));
                    }
                    group_sums += count;
                }
            }
        }
        for (int group = 0; group < p.groups; group++) {
            if (group != p.group) {
                nccl_check(ncclRecv(received + (size_t)(group - (group > p.group)) * count,
                                    count * sizeof(float), ncclUint8,
                                    part_adder(c->ranks, group, c->rank), c->comm, c->stream));
            }
        }
        nccl_check(ncclGroupEnd());
    });
    rank_sum(sum, own, 0, received, p.group, p.groups, count, 1, adds, c->stream);
}

// Reduce-scatters a bucket of gradients, grads (ranks, part): sum (part) = row `rank` of `grads`
// summed over all ranks, plus the old value of `sum` if `adds` is set. `sum` may be that row of
// this rank's `grads`. part: elements of G per rank.
template <class G>
static void rank_reduce(const RankComm *c, G *sum, const G *grads, size_t part, bool adds) {
    const ReducePieces p = reduce_pieces(c->ranks, c->rank, sizeof(G));
    // All ranks use the piece size of the rank that needs the most memory per element, which is the
    // first member of a group.
    const int last = (p.groups - 1) * RANK_GROUP;
    const size_t bytes = std::max(reduce_pieces(c->ranks, 0, sizeof(G)).bytes,
                                  reduce_pieces(c->ranks, last, sizeof(G)).bytes);
    const size_t most = c->capacity / bytes / 8 * 8;
    check(most > 0, "the staging buffer cannot hold a piece of %d ranks", c->ranks);
    for (size_t from = 0; from < part; from += most) {
        const size_t count = part - from < most ? part - from : most;
        float *group_sums = (float *)(void *)(c->staging + p.received * count);
        reduce_in_group(c, p, sum + from, group_sums, grads + from, part, count, adds);
        if (p.groups > 1) {
            reduce_between_groups(c, p, sum + from, group_sums, count, adds);
        }
    }
}

// Implements Plan.transfer on several ranks. For sharded buffers a fetch is an all-gather of
// weights from the shards into the slot (the device buffer that kernels use), and a store is a
// reduce-scatter of gradients from the slot into the shards; both run on the ranks' stream. All
// other transfers are passed to gpu_transfer.
template <class G>
static void rank_transfer(Plan *p, int phase, const Transfer *v, void *slot, void *store,
                          size_t bytes) {
    const OffloadStreams *s = (const OffloadStreams *)p->transfer_context;
    const RankComm *c = s->ranks;
    const size_t part = bytes / (size_t)c->ranks;
    if (phase == FETCH && store && v->in & PLACE_SHARD) {
        stream_after(c->stream, s->compute, s->now);
        if (v->in & PLACE_HOST) {  // NCCL gets no pinned memory: upload the shard to the slot
            char *own = (char *)slot + (size_t)c->rank * part;
            cuda_check(cudaMemcpyAsync(own, store, part, cudaMemcpyHostToDevice, c->stream));
            store = own;
        }
        rank_gather_from(c, slot, store, part);
        cuda_check(cudaEventRecord(s->ready[v->kind][v->slot], c->stream));
    } else if (phase == STORE && v->out & PLACE_SHARD) {
        stream_after(c->stream, s->compute, s->now);
        rank_reduce<G>(c, (G *)store, (const G *)slot, part / sizeof(G), p->adds != 0);
        cuda_check(cudaEventRecord(s->gone[v->kind][v->slot], c->stream));
    } else {
        // Weights stored whole in host memory are gathered there after the update: wait for that.
        const int bucket = BUCKET_BLOCKS + v->block;
        if (phase == FETCH && v->kind == KIND_WEIGHTS && c->ranks > 1 && c->awaits[bucket]) {
            cuda_check(cudaStreamWaitEvent(s->up, c->gathered[bucket], 0));
        }
        gpu_transfer(p, phase, v, slot, store, bytes);
    }
}

// Gives all ranks the same sum of squared gradients, sum of losses and decision whether to stop:
// each rank writes its status, the statuses are all-gathered, and every rank adds them up. Kernels
// are queued on `compute` and the all-gather on the ranks' stream; each waits for the other.
static void rank_statuses(const RankComm *c, StepStatus *total, UpdateState *update, char *statuses,
                       const float *loss_sum, cudaStream_t compute) {
    launch(step_status_kernel, 1, 1, 0, compute,
           (StepStatus *)(void *)(statuses + c->rank * RANK_STATUS_BYTES), update, loss_sum,
           (int)(stop_signal != 0), this_rank.failed ? c->rank + 1 : 0);
    stream_after(c->stream, compute, c->event);
    rank_gather(c, statuses, RANK_STATUS_BYTES);
    stream_after(compute, c->stream, c->event);
    launch(step_statuses_kernel, 1, 1, 0, compute, total, update, statuses, c->ranks);
}

// Adds a hash of the 64-bit integers words (count) to *sum. The sum is of integers, so the order of
// additions does not matter.
// grid: any number of blocks of 256.
// budget: threads 256 regs 22 blocks 6 test gpu_exchange
static __global__ void replica_hash_kernel(unsigned long long *sum, const uint64_t *words,
                                           size_t count) {
    unsigned long long own = 0;
    for (size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; i < count; i += gridDim.x * 256) {
        uint64_t x = words[i] ^ (i + 1) * 0x9E3779B97F4A7C15u;  // then mixed as in splitmix64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
        own += x ^ x >> 31;
    }
    atomicAdd(sum, own);
}

static int model_buckets(const Model *m) { return BUCKET_BLOCKS + m->L; }

// Creates the stream and the events, and maps this rank's heartbeat for kernels. NCCL is
// initialized later, in rank_connect, after the warm-up has launched every kernel once: loading a
// kernel while NCCL's kernels wait for other ranks could deadlock. The heartbeat is a page outside
// the plan's pinned memory because it is shared with the parent process.
static void rank_open(RankComm *c, const Settings *s) {
    int least, most;
    *c = {nullptr, nullptr, nullptr, s->rank, s->ranks, 0, nullptr, nullptr, nullptr, nullptr, 0};
    c->gathered = (cudaEvent_t *)alloc_zero((size_t)model_buckets(&s->model), sizeof(cudaEvent_t));
    c->awaits = (bool *)alloc_zero((size_t)model_buckets(&s->model), sizeof(bool));
    for (int bucket = 0; bucket < model_buckets(&s->model); bucket++) {
        cuda_check(cudaEventCreateWithFlags(&c->gathered[bucket], cudaEventDisableTiming));
    }
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &most));
    cuda_check(cudaStreamCreateWithPriority(&c->stream, cudaStreamNonBlocking, most));
    cuda_check(cudaEventCreateWithFlags(&c->event, cudaEventDisableTiming));
    cuda_check(cudaHostRegister(heartbeat, sizeof *heartbeat, cudaHostRegisterMapped));
    cuda_check(cudaHostGetDevicePointer((void **)&c->note, &heartbeat->note, 0));
    launch(collective_state_kernel, 1, 1, 0, c->stream, c->note, heartbeat->note);  // see 3
}

// Creates the NCCL communicator, which waits for all ranks. NCCL's buffers grow with its number of
// thread blocks, which is therefore limited: see settings_nccl.
static void rank_connect(RankComm *c, int ctas) {
#if GPT2_NCCL
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.maxCTAs = ctas;
    memcpy(&id, rank_info.id, sizeof id);
    // Other ranks may arrive minutes later, if they have more kernels to compile: the watchdog must
    // see that this rank waits for them.
    rank_wait_begin(RANK_CONNECTION);
    slow_begin();
    nccl_check(ncclCommInitRankConfig(&c->comm, c->ranks, id, c->rank, &config));
    slow_end();
    rank_wait_end();
#endif
    nccl_open = c->comm;
    c->on = 1;
}

// Waits for queued collectives, which other ranks depend on, and destroys the communicator. The
// ranks do not wait for each other after that.
static void rank_close(RankComm *c, const Settings *s) {
    stream_wait(c->stream);
    for (int bucket = 0; bucket < model_buckets(&s->model); bucket++) {
        cuda_check(cudaEventDestroy(c->gathered[bucket]));
    }
    free(c->gathered);
    free(c->awaits);
    if (c->on) {
        nccl_open = nullptr;
        nccl_check(ncclCommDestroy(c->comm));
    }
    cuda_check(cudaHostUnregister(heartbeat));
    cuda_check(cudaStreamDestroy(c->stream));
    cuda_check(cudaEventDestroy(c->event));
}

// =================================================================================================
// Part J. GPT-2 on the GPU

// -------------------------------------------------------------------------------------------------
// 39. The network on the GPU
// The network of train_gpt2.c with kernels as layers. The plan, the loop over stages (run_stages)
// and the stages are the same, and in the same order, so that the two can be read side by side.
// Everything runs on one stream, except the copies of streamed buffers and the exchange between
// ranks.
// 1. E is the element type of weights and activations, G that of matrix gradients. Statistics,
//    losses and vector gradients are fp32, because they are small and many numbers are summed in
//    each.
// 2. Gradient accumulation: the first micro-step of a step overwrites matrix gradients; later ones
//    add in fp32 and round the sum to G, once per matmul (for wte, per chunk of logits and for the
//    embedding). Vector gradients are zeroed first, because their kernels only add, in fp32.
// 3. With several ranks, these differ: the sequences they read (batch_position), reductions during
//    backward (gpu_reduce), the sums of norm and loss (rank_statuses), the weights gathered after
//    the update (gpu_gather_weights), sharded states (chapter Sharding and offload) and access to
//    other ranks' shards (rank_read).

// Contents of BUF_STATE: the device state that outlives a step.
struct GpuState {
    UpdateState update;
    float loss_sum;  // of the step's micro-batches
    StepStatus all;    // the sum of all ranks' statuses
    unsigned long long replica;  // hash computed by gpu_replica
};
static_assert(sizeof(GpuState) <= GPU_STATE_BYTES, "the plan's buffer holds the state");
static_assert(sizeof(ParamRange) <= GPU_TENSOR_ROW_BYTES, "the plan's buffer holds the table");

// A batch in one array of batch_ints(N) ints, so that a single copy uploads it.
struct GpuBatch {
    int *inputs, *targets;  // (N)
    int *sorted;            // the inputs grouped by token, embedding_plan_ints(N)
};
static GpuBatch batch_at(int *memory, int N) { return {memory, memory + N, memory + 2 * N}; }

// Ranges that AdamW updates in one launch: with sharded moments those of one bucket, otherwise all.
struct UpdateSlice {
    int first, count, chunks;
};

// The GPU engine: the plan, the compute stream, and the host memory that feeds it.
struct GpuNetwork {
    Plan *plan;
    void (*stage)(void *pass, int stage, int layer);  // gpu_stage in the run's types
    cudaStream_t stream;
    GpuBatch pinned[2];       // one is filled while the other is uploaded
    cudaEvent_t uploaded[2];  // recorded after an upload: the slot may then be refilled
    int slot;                 // the slot filled last
    int prepared;             // segments of the next micro-step's batch if prefetched, or 0
    int *counts;              // scratch of the token sort, V ints
    GpuState *result;         // pinned: the state after a step
    OffloadStreams transfers;
    ParamRange *ranges;
    int range_count;
    UpdateSlice *slices;          // of `ranges`, one per launch of AdamW
    int slice_count;
    int norm_count, norm_chunks;  // the norm's table; several ranks: own shards, after AdamW's
    int accum_steps;              // micro-steps of the current step
    RankComm ranks;
};

// Returns buffer `id` (BUF_*), which occurs once in a plan, as an array of type N, or null if this
// run's plan lacks it. BUF_GRADS holds only matrices, BUF_GRADS_1D only vectors.
template <class N> static N *gpu_buffer(const GpuNetwork *net, int id) {
    return net->plan->single[id] < 0 ? nullptr : (N *)plan_single(net->plan, id);
}

// The accessors of train_gpt2.c for one block of the transformer, or for tensors outside the
// blocks. There everything has one type; here weights and activations are E, statistics fp32,
// matrix gradients G and vector gradients fp32.
template <class E, class G> struct GpuBlock {
    const GpuNetwork *net;
    int layer;
    E *act(int id) const { return (E *)plan_act(net->plan, id, layer); }
    float *stat(int id) const { return (float *)plan_act(net->plan, id, layer); }
    E *dact(int id) const { return (E *)plan_grad(net->plan, id, layer); }
    E *weight(int tensor) const { return tensor_as<E>(KIND_WEIGHTS, tensor); }
    G *dmatrix(int tensor) const { return tensor_as<G>(KIND_GRADIENTS, tensor); }
    float *dvector(int tensor) const { return tensor_as<float>(KIND_GRADIENTS, tensor); }
    // The gradient of the bias that was added to the block's input, or null: the embedding has no
    // bias.
    float *bias_of_input() const {
        return layer > 0 ? GpuBlock{net, layer - 1}.dvector(FCPROJB) : nullptr;
    }
    template <class N> N *tensor_as(Kind state, int tensor) const {
        const Location location = tensor_location(net->plan, state, tensor, layer);
        return gpu_buffer<N>(net, location.buffer) + location.offset;
    }
};

// The arguments of one run_stages call, like Pass in chapter The network.
struct GpuPass {
    GpuNetwork *net;
    GpuBatch batch;  // on the device; targets null: only the logits after input `row`
    int segments;    // distinct tokens of the batch
    int row, B, T;
    float dloss;  // 0: no gradients
    bool first;   // gradients and the sum of losses are written, not added to
    int position;  // of the first token; nonzero only with a KV cache
    bool last;    // last micro-step: reduce each block's gradients after its backward
};

// Runs one forward stage of transformer block `l`, in the forward pass or as recomputation, like
// block_forward in chapter The network.
template <class E, class G>
static void gpu_block_forward(const GpuPass *pass, int stage, int l) {
    const GpuBlock<E, G> b = {pass->net, l};
    const Model *m = &pass->net->plan->settings.model;
    const int B = pass->B, T = pass->T, N = B * T, C = m->C, NH = m->NH;
    cudaStream_t stream = pass->net->stream;
    switch (stage) {
    case F_LN1:
        gpu_layernorm_forward<E>(b.act(ACT_LN1), b.stat(ACT_LN1_MEAN), b.stat(ACT_LN1_RSTD),
                                 b.act(ACT_X), b.weight(LN1W), b.weight(LN1B), N, C, stream);
        break;
    case F_QKV:
        gpu_matmul_forward<E>(b.act(ACT_QKV), b.act(ACT_LN1), b.weight(QKVW), b.weight(QKVB),
                              nullptr, N, C, 3 * C, stream);
        break;
    case F_ATT:
        if (b.net->plan->settings.cache) {
            const int positions = b.net->plan->settings.T;
            gpu_attention_cached<E>(b.act(ACT_ATT),
                                    gpu_buffer<E>(b.net, BUF_CACHE) + (size_t)l * 2 * positions * C,
                                    b.act(ACT_QKV), positions, pass->position, N, C, NH, stream);
            break;
        }
        gpu_attention_forward<E>(b.act(ACT_ATT), b.stat(ACT_LSE), b.act(ACT_QKV), B, T, C, NH,
                                 stream);
        break;
    case F_ATTPROJ:
        gpu_matmul_forward<E>(b.act(ACT_RES2), b.act(ACT_ATT), b.weight(ATTPROJW),
                              b.weight(ATTPROJB), b.act(ACT_X), N, C, C, stream);
        break;
    case F_LN2:
        gpu_layernorm_forward<E>(b.act(ACT_LN2), b.stat(ACT_LN2_MEAN), b.stat(ACT_LN2_RSTD),
                                 b.act(ACT_RES2), b.weight(LN2W), b.weight(LN2B), N, C, stream);
        break;
    case F_FC:
        gpu_matmul_forward<E>(b.act(ACT_FCH), b.act(ACT_LN2), b.weight(FCW), b.weight(FCB),
                              nullptr, N, C, 4 * C, stream);
        break;
    case F_GELU:
        gpu_gelu_forward<E>(b.act(ACT_GELU), b.act(ACT_FCH), (size_t)N * 4 * C, stream);
        break;
    case F_FCPROJ:
        gpu_matmul_forward<E>((E *)plan_act(b.net->plan, ACT_X, l + 1), b.act(ACT_GELU),
                              b.weight(FCPROJW), b.weight(FCPROJB), b.act(ACT_RES2), N, 4 * C, C,
                              stream);
        break;
    }
}

// Runs one backward stage of transformer block `l`, like block_backward in chapter The network.
// Bias gradients are summed where the values are in registers anyway: fc's in GELU's backward,
// qkv's in attention's, attproj's in LN2's, and fcproj's in that of the LayerNorm after the block.
template <class E, class G>
static void gpu_block_backward(const GpuPass *pass, int stage, int l) {
    const GpuBlock<E, G> b = {pass->net, l};
    const Model *m = &pass->net->plan->settings.model;
    const int B = pass->B, T = pass->T, N = B * T, C = m->C, NH = m->NH;
    // If gradients are sharded, those of each micro-step are reduce-scattered, so the slot contains
    // none to add to.
    const bool first =
        pass->first || b.net->plan->settings.placement[KIND_GRADIENTS] & PLACE_SHARD;
    cudaStream_t stream = pass->net->stream;
    E *dres = gpu_buffer<E>(b.net, BUF_DRES);
    float *scratch = gpu_buffer<float>(b.net, BUF_PARTIALS);
    switch (stage) {
    case B_FCPROJ:
        gpu_matmul_backward<E, G>(b.dact(GRAD_MLP), b.dmatrix(FCPROJW), dres, b.act(ACT_GELU),
                                  b.weight(FCPROJW), N, 4 * C, C, first, stream);
        break;
    case B_GELU:
        gpu_gelu_backward<E>(b.dact(GRAD_MLP), b.dvector(FCB), b.dact(GRAD_MLP), b.act(ACT_FCH),
                             scratch, N, 4 * C, stream);
        break;
    case B_FC:
        gpu_matmul_backward<E, G>(b.dact(GRAD_LN2), b.dmatrix(FCW), b.dact(GRAD_MLP),
                                  b.act(ACT_LN2), b.weight(FCW), N, C, 4 * C, first, stream);
        break;
    case B_LN2:
        gpu_layernorm_backward<E>(dres, b.dvector(LN2W), b.dvector(LN2B), b.dvector(ATTPROJB),
                                  b.dact(GRAD_LN2), b.act(ACT_RES2), b.weight(LN2W),
                                  b.stat(ACT_LN2_MEAN), b.stat(ACT_LN2_RSTD), dres, scratch, N, C,
                                  stream);
        break;
    case B_ATTPROJ:
        gpu_matmul_backward<E, G>(b.dact(GRAD_ATT), b.dmatrix(ATTPROJW), dres, b.act(ACT_ATT),
                                  b.weight(ATTPROJW), N, C, C, first, stream);
        break;
    case B_ATT:
        gpu_attention_backward<E>(b.dact(GRAD_QKV), b.dvector(QKVB),
                                  gpu_buffer<float>(b.net, BUF_ATT_D), b.dact(GRAD_ATT),
                                  b.act(ACT_QKV), b.act(ACT_ATT), b.stat(ACT_LSE), scratch, B, T, C,
                                  NH, stream);
        break;
    case B_QKV:
        gpu_matmul_backward<E, G>(b.dact(GRAD_LN1), b.dmatrix(QKVW), b.dact(GRAD_QKV),
                                  b.act(ACT_LN1), b.weight(QKVW), N, C, 3 * C, first, stream);
        break;
    case B_LN1:
        gpu_layernorm_backward<E>(dres, b.dvector(LN1W), b.dvector(LN1B), b.bias_of_input(),
                                  b.dact(GRAD_LN1), b.act(ACT_X), b.weight(LN1W),
                                  b.stat(ACT_LN1_MEAN), b.stat(ACT_LN1_RSTD), dres, scratch, N, C,
                                  stream);
        break;
    }
}

// *sum = (first) or += the sum of losses (N), in a fixed order. One thread block, because the order
// across several would not be fixed, and reading N numbers takes little time compared with the
// classifier.
// budget: threads 256 regs 33 blocks 6 test gpu_losses
static __global__ void loss_sum_kernel(float *sum, const float *losses, int N, bool first) {
    const float x = row_sum(
        sum_strided(threadIdx.x, blockDim.x, N, [&](int i) { return losses[i]; }));
    if (threadIdx.x == 0) {
        *sum = first ? x : *sum + x;
    }
}

// Runs the classifier in chunks of rows, like network_head in chapter The network. The sum of
// losses stays on the device: returning it here would make the host wait in every micro-step.
template <class E, class G> static void gpu_head(const GpuPass *pass) {
    const GpuNetwork *net = pass->net;
    const GpuBlock<E, G> b = {net, 0};
    const Settings *s = &net->plan->settings;
    const int C = s->model.C, V = s->model.V, Vp = s->model.Vp;
    const int *targets = pass->batch.targets;
    const int begin = targets ? 0 : pass->row, end = targets ? pass->B * pass->T : begin + 1;
    cudaStream_t stream = net->stream;
    E *logits = gpu_buffer<E>(net, BUF_LOGITS);
    float *losses = gpu_buffer<float>(net, BUF_LOSSES);
    for (int row = begin; row < end; row += s->logit_rows) {
        int rows = (int)min_i64(s->logit_rows, end - row);
        E *lnf = gpu_buffer<E>(net, BUF_LNF) + (size_t)row * C;
        gpu_matmul_forward<E>(logits, lnf, b.weight(WTE), nullptr, nullptr, rows, C, Vp, stream);
        if (targets) {
            gpu_classifier<E>(losses + row, logits, targets + row, pass->dloss,
                              &gpu_buffer<GpuState>(net, BUF_STATE)->update.loss_scale, rows, V,
                              Vp, pass->dloss != 0, stream);
        }
        if (pass->dloss != 0) {  // the first chunk of a step writes dwte, the others add
            gpu_matmul_backward<E, G>(lnf, b.dmatrix(WTE), logits, lnf, b.weight(WTE), rows, C, Vp,
                                      pass->first && row == 0, stream);
        }
    }
    if (targets) {
        launch(loss_sum_kernel, 1, 256, 0, stream, &gpu_buffer<GpuState>(net, BUF_STATE)->loss_sum,
               losses, end, pass->first);
    }
}

// Sums bucket `bucket` of the gradients, which is complete on the compute stream, over all ranks:
// an in-place reduce-scatter on the ranks' stream, which overlaps with compute. Without ZeRO every
// rank updates all parameters, so an all-gather follows.
template <class G> static void gpu_reduce(const GpuNetwork *net, int bucket) {
    const Settings *s = &net->plan->settings;
    const RankComm *c = &net->ranks;
    const Bucket b = bucket_at(&s->model, s->ranks, bucket);
    const size_t part = (size_t)b.part, own = (size_t)s->rank * part;
    // Only the ranks' stream waits. Compute continues with the next block's backward, which writes
    // other gradients, and only the ranks' stream uses the staging buffer, for one bucket at a
    // time.
    stream_after(c->stream, net->stream, c->event);
    // All ranks update the vectors, so their whole sum is all-gathered.
    if (bucket == BUCKET_VECTORS) {
        float *grads = gpu_buffer<float>(net, BUF_GRADS_1D);
        rank_reduce<float>(c, grads + own, grads, part, false);
        rank_gather(c, grads, part * sizeof(float));
        return;
    }
    G *grads =
        gpu_buffer<G>(net, BUF_GRADS) + (b.offset - bucket_at(&s->model, s->ranks, BUCKET_WTE)
                                                        .offset);
    rank_reduce<G>(c, grads + own, grads, part, false);
    if (!(s->placement[KIND_MOMENTS] & PLACE_SHARD)) {
        rank_gather(c, grads, part * sizeof(G));
    }
}

// Reduces the remaining buckets, which all blocks share, at the end of a step's last micro-step.
// They are complete only now: wte's gradient is written by the classifier and by the embedding, the
// vectors' by every layer. Compute waits until every sum is complete.
template <class G> static void gpu_join(const GpuNetwork *net) {
    for (int bucket : {BUCKET_WTE, BUCKET_WPE, BUCKET_VECTORS}) {
        gpu_reduce<G>(net, bucket);
    }
    stream_after(net->stream, net->ranks.stream, net->ranks.event);
}

// All-gathers a bucket of weights whose shards have just been updated, each on its rank, and
// records the event that its next reader waits for. Weights that are gathered on use (ZeRO 3) are
// left out, and so are vectors, which all ranks have updated alike: the same operations on the same
// numbers give the same bits. Blocks stored whole in host memory are gathered in the staging
// buffer, because NCCL is not given pinned memory.
static void gpu_gather_weights(const GpuNetwork *net, int bucket) {
    const Settings *s = &net->plan->settings;
    const RankComm *c = &net->ranks;
    const int placement = bucket < BUCKET_BLOCKS ? 0 : s->placement[KIND_WEIGHTS];
    const Bucket b = bucket_at(&s->model, s->ranks, bucket);
    const size_t bytes = type_bytes(s->dtype), part = b.part * bytes, own = c->rank * part;
    if (bucket == BUCKET_VECTORS || placement & PLACE_SHARD) {
        return;
    }
    stream_after(c->stream, net->stream, c->event);
    if (!placement) {
        rank_gather(c, gpu_buffer<char>(net, BUF_WEIGHTS) + b.offset * bytes, part);
    } else if (c->on) {
        // If `on` is 0 nothing is gathered, and the other ranks' parts, including padding, would
        // be copied from whatever the staging buffer held.
        const int64_t at = (bucket - BUCKET_BLOCKS) * b.count;
        char *whole = gpu_buffer<char>(net, BUF_WEIGHTS_STORE) + at * bytes;
        cuda_check(cudaMemcpyAsync(c->staging + own, whole + own, part, cudaMemcpyHostToDevice,
                                   c->stream));
        rank_gather(c, c->staging, part);
        cuda_check(cudaMemcpyAsync(whole, c->staging, s->ranks * part, cudaMemcpyDeviceToHost,
                                   c->stream));
    }
    cuda_check(cudaEventRecord(c->gathered[bucket], c->stream));
    c->awaits[bucket] = true;
}

// Makes compute wait for the gather of a bucket of weights, if it has not done so yet.
static void gpu_await_weights(const GpuNetwork *net, int bucket) {
    const RankComm *c = &net->ranks;
    if (c->ranks > 1 && c->awaits[bucket]) {
        cuda_check(cudaStreamWaitEvent(net->stream, c->gathered[bucket], 0));
        c->awaits[bucket] = false;
    }
}

// Makes compute wait for the gathers of all weights, for readers other than a forward pass.
static void gpu_await_all_weights(const GpuNetwork *net) {
    for (int bucket = 0; bucket < model_buckets(&net->plan->settings.model); bucket++) {
        gpu_await_weights(net, bucket);
    }
}

// Computes one stage of a GpuPass: the function that run_stages calls.
template <class E, class G> static void gpu_stage(void *self, int stage, int layer) {
    const GpuPass *pass = (const GpuPass *)self;
    const GpuNetwork *net = pass->net;
    const GpuBlock<E, G> b = {net, 0};
    const Model *m = &net->plan->settings.model;
    const int B = pass->B, T = pass->T, C = m->C;
    cudaStream_t stream = net->stream;
    switch (stage) {
    case EMBED:
        gpu_await_weights(net, BUCKET_WTE);
        gpu_await_weights(net, BUCKET_WPE);
        gpu_embedding_forward<E>(b.act(ACT_X), pass->batch.inputs, b.weight(WTE),
                                 b.weight(WPE) + (size_t)pass->position * C, B, T, C, stream);
        break;
    case LNF:
        gpu_layernorm_forward<E>(gpu_buffer<E>(net, BUF_LNF), gpu_buffer<float>(net, BUF_LNF_MEAN),
                                 gpu_buffer<float>(net, BUF_LNF_RSTD), gpu_buffer<E>(net, BUF_XF),
                                 b.weight(LNFW), b.weight(LNFB), B * T, C, stream);
        break;
    case HEAD:
        gpu_head<E, G>(pass);
        break;
    case D_LNF:
        gpu_layernorm_backward<E>(
            gpu_buffer<E>(net, BUF_DRES), b.dvector(LNFW), b.dvector(LNFB),
            GpuBlock<E, G>{net, m->L}.bias_of_input(), gpu_buffer<E>(net, BUF_LNF),
            gpu_buffer<E>(net, BUF_XF), b.weight(LNFW),
            gpu_buffer<float>(net, BUF_LNF_MEAN), gpu_buffer<float>(net, BUF_LNF_RSTD), nullptr,
            gpu_buffer<float>(net, BUF_PARTIALS), B * T, C, stream);
        break;
    case D_EMBED:
        // The tokens are sorted, so every row of dwte has one writer and no atomics are needed.
        gpu_embedding_backward<E, G>(b.dmatrix(WTE), b.dmatrix(WPE), gpu_buffer<E>(net, BUF_DRES),
                                     pass->batch.sorted, pass->segments, B, T, C, m->maxT,
                                     pass->first, stream);
        break;
    case JOIN:  // run_stages has waited for all stores
        if (pass->last && net->plan->settings.ranks > 1) {
            gpu_join<G>(net);
        }
        break;
    default:  // a stage of a block
        if (stage == F_QKV) {  // the first that uses a matrix
            gpu_await_weights(net, BUCKET_BLOCKS + layer);
        }
        (stage < F_STAGES ? gpu_block_forward<E, G> : gpu_block_backward<E, G>)(pass, stage, layer);
        if (stage == B_QKV && pass->last && net->plan->settings.ranks > 1 &&
            !net->plan->settings.placement[KIND_GRADIENTS]) {
            gpu_reduce<G>(net, BUCKET_BLOCKS + layer);  // its matrix gradients are complete
        }
    }
}

// -------------------------------------------------------------------------------------------------
// 40. Steps and update
// The engine methods that compute.
// 1. A micro-step only queues work. The batch is uploaded through two pinned slots, and the host
//    waits only for a slot that it filled two micro-steps earlier. The first batch of a step is
//    prefetched, if possible, before the host waits for the loss of the previous step.
// 2. If ranks gather the weights, AdamW runs bucket by bucket, so that each gather starts early.
// 3. The update reads the gradient norm, the clip factor and the decision to skip from device
//    memory; the host waits once, at its end, for the values it reports.

// Queues the upload of a batch through the next pinned slot, and makes it the batch of the pass. If
// gradients are wanted, the tokens sorted for the embedding's backward are uploaded with it.
static void gpu_upload(GpuPass *pass, const Token *inputs, const Token *targets) {
    GpuNetwork *net = pass->net;
    const Settings *s = &net->plan->settings;
    const int N = s->B * settings_rows(s), slot = 1 - net->slot;
    GpuBatch host = net->pinned[slot];
    int ints = 2 * N;  // inputs and targets; sorted tokens follow, so one copy suffices
    net->slot = slot;
    net->prepared = 0;  // this upload overwrites it
    // The copy queued two micro-steps ago may still be reading the slot; normally it finished long
    // ago.
    nccl_look([=] { return cudaEventQuery(net->uploaded[slot]); });
    cuda_check(cudaEventSynchronize(net->uploaded[slot]));
    memcpy(host.inputs, inputs, N * sizeof(int));
    memcpy(host.targets, targets, N * sizeof(int));
    // Backward needs sorted tokens. The host sorts while the GPU computes the previous micro-step.
    if (pass->dloss != 0) {
        pass->segments = embedding_sort(host.sorted, net->counts, inputs, N, s->model.V);
        ints = (int)batch_ints(N);
    }
    pass->batch = batch_at(gpu_buffer<int>(net, BUF_BATCH), N);
    cuda_check(cudaMemcpyAsync(pass->batch.inputs, host.inputs, ints * sizeof(int),
                               cudaMemcpyHostToDevice, net->stream));
    cuda_check(cudaEventRecord(net->uploaded[slot], net->stream));
}

// Engine.prepare: prefetches a batch. The copy is queued after the micro-step that still reads the
// previous batch.
static void gpu_prepare(Engine *e, const Token *inputs, const Token *targets) {
    GpuNetwork *net = (GpuNetwork *)e->self;
    GpuPass pass = {net, {}, 0, 0, 0, 0, 1.0f, false, 0, false};
    gpu_upload(&pass, inputs, targets);
    net->prepared = pass.segments;
}

// Engine.micro_step: forward and backward; gradients are accumulated on the device.
static void gpu_micro_step(Engine *e, const Token *inputs, const Token *targets, int accum_step,
                           int accum_steps) {
    GpuNetwork *net = (GpuNetwork *)e->self;
    Plan *p = net->plan;
    const Settings *s = &p->settings;
    const float dloss = (float)(1.0 / ((double)(s->B * s->T) * accum_steps * s->ranks));
    const bool last = accum_step + 1 == accum_steps;
    GpuPass pass = {net, {}, 0, 0, s->B, s->T, dloss, accum_step == 0, 0, last};
    net->accum_steps = accum_steps;
    if (net->prepared) {
        pass.batch = batch_at(gpu_buffer<int>(net, BUF_BATCH), s->B * s->T);
        pass.segments = net->prepared;
        net->prepared = 0;
    } else {
        gpu_upload(&pass, inputs, targets);
    }
    if (pass.first) {  // kernels only add to these (The network on the GPU, 2)
        cuda_check(cudaMemsetAsync(gpu_buffer<float>(net, BUF_GRADS_1D), 0,
                                   p->buffers[p->single[BUF_GRADS_1D]].bytes, net->stream));
    }
    run_stages(p, tick_join(s), accum_step > 0, net->stage, &pass);
}

// Runs AdamW on a slice of the table with M as the type of the moments and, if SPLIT, fp32 master
// weights stored as two 16-bit halves. `updates`: the number of updates before this one.
template <class E, class G, class M, bool SPLIT>
static void gpu_adamw_slice(GpuNetwork *net, const UpdateSlice &slice, const AdamW &adamw,
                            const Options *o, int64_t updates) {
    UpdateRandom key = {(uint64_t)o->seed, (uint32_t)updates};
    gpu_adamw<E, G, M, SPLIT>(
        gpu_buffer<E>(net, BUF_WEIGHTS), SPLIT ? gpu_buffer<Master<E>>(net, BUF_MASTER) : nullptr,
        gpu_buffer<M>(net, BUF_M), gpu_buffer<M>(net, BUF_V), gpu_buffer<G>(net, BUF_GRADS),
        gpu_buffer<float>(net, BUF_GRADS_1D), gpu_buffer<E>(net, BUF_WEIGHTS_STORE),
        gpu_buffer<G>(net, BUF_GRADS_STORE),
        gpu_buffer<ParamRange>(net, BUF_TENSORS) + slice.first, slice.count, slice.chunks, adamw,
        key, &gpu_buffer<GpuState>(net, BUF_STATE)->update, net->stream);
}

// Runs AdamW on a slice in the run's types.
static void gpu_adamw_types(GpuNetwork *net, const UpdateSlice &slice, const AdamW &adamw,
                            const Options *o, int64_t updates) {
    const Settings *s = &net->plan->settings;
    with_types(s, [&](auto element, auto grad) {
        using E = decltype(element);
        using G = decltype(grad);
        if constexpr (is_fp32<E> || traits<E>.narrow) {
            gpu_adamw_slice<E, G, float, traits<E>.narrow>(net, slice, adamw, o, updates);
        } else {
            auto update = [&](auto moment) {
                using M = decltype(moment);
                s->split_master ? gpu_adamw_slice<E, G, M, true>(net, slice, adamw, o, updates)
                                : gpu_adamw_slice<E, G, M, false>(net, slice, adamw, o, updates);
            };
            s->moment_dtype == TYPE_FP32 ? update(float()) : update(E());
        }
    });
}

// Engine.update; see 3.
static StepResult gpu_update(Engine *e, const Options *o, double lr, double limit,
                             int64_t updates) {
    GpuNetwork *net = (GpuNetwork *)e->self;
    const Settings *s = &net->plan->settings;
    plan_tick(net->plan, tick_update(s));
    transfers_forget_weights(net->plan);
    gpu_await_all_weights(net);  // of the last update, if no forward pass has followed it
    GpuState *state = gpu_buffer<GpuState>(net, BUF_STATE);
    const ParamRange *ranges = gpu_buffer<ParamRange>(net, BUF_TENSORS);
    // With several ranks, each sums only its own shards at every ZeRO stage, so the norm is bitwise
    // identical across stages.
    with_types(s, [&](auto, auto grad) {
        using G = decltype(grad);
        gpu_grad_square_sum<G>(&state->update, gpu_buffer<float>(net, BUF_PARTIALS),
                               gpu_buffer<G>(net, BUF_GRADS), gpu_buffer<float>(net, BUF_GRADS_1D),
                               gpu_buffer<G>(net, BUF_GRADS_STORE),
                               s->ranks > 1 ? ranges + net->range_count : ranges, net->norm_count,
                               net->norm_chunks, net->stream);
    });
    if (s->ranks > 1) {
        rank_statuses(&net->ranks, &state->all, &state->update,
                      gpu_buffer<char>(net, BUF_RANK_STATUS), &state->loss_sum, net->stream);
    }
    gpu_update_decide(&state->update, (float)o->clip, (float)limit, net->stream);
    // The clip factor is applied on the device, so the host passes a gradient scale of 1.
    AdamW adamw = adamw_at(o, lr, updates, 1);
    // With sharded moments, slice i is bucket i, which is gathered while compute continues.
    for (int i = 0; i < net->slice_count; i++) {
        if (net->slices[i].chunks > 0) {
            gpu_adamw_types(net, net->slices[i], adamw, o, updates);
        }
        if (s->placement[KIND_MOMENTS] & PLACE_SHARD) {
            gpu_gather_weights(net, i);
        }
    }
    cuda_check(
        cudaMemcpyAsync(net->result, state, sizeof *state, cudaMemcpyDeviceToHost, net->stream));
    stream_wait(net->stream);
    float loss_sum = net->result->loss_sum;
    if (s->ranks > 1) {
        loss_sum = net->result->all.loss_sum;
        this_rank.stop = net->result->all.stop;
        this_rank.fault = net->result->all.fault;
    }
    // loss_sum has one loss per token; the step's loss is the mean over its tokens.
    const double tokens = (double)s->B * s->T * net->accum_steps * s->ranks;
    const UpdateState *u = &net->result->update;
    StepResult result = {loss_sum / tokens, u->norm, (int)u->skip, 0, u->good_steps,
                         u->scale_moved};
    result.scale_log2 = u->scale_grows ? ilogbf(u->loss_scale) : 0;
    return result;
}

// Engine.replica: returns a hash of the weights, master weights (or their low halves) and moments,
// except sharded parts, so all ranks must get the same value. Buffers are in bucket order: vectors
// first, then wte and wpe, the matrices of blocks last.
static uint64_t gpu_replica(Engine *e) {
    const GpuNetwork *net = (const GpuNetwork *)e->self;
    const Settings *s = &net->plan->settings;
    const int64_t vectors = bucket_at(&s->model, s->ranks, BUCKET_VECTORS).count;
    const int64_t singles = bucket_at(&s->model, s->ranks, BUCKET_BLOCKS).offset;
    const struct {
        int buffer;
        Kind state;
        int64_t whole;  // elements that every rank has even if the state is sharded
    } rows[] = {{BUF_WEIGHTS, KIND_WEIGHTS, singles}, {BUF_WEIGHTS_STORE, KIND_WEIGHTS, 0},
                {BUF_MASTER, KIND_MASTER, vectors}, {BUF_M, KIND_MOMENTS, vectors},
                {BUF_V, KIND_MOMENTS, vectors}};
    unsigned long long *sum = &gpu_buffer<GpuState>(net, BUF_STATE)->replica;
    gpu_await_all_weights(net);
    // Gaps between tensors are hashed too: they are zero from the start and never written. Buffers
    // in host memory are read over the bus, which costs little once in 100 steps.
    cuda_check(cudaMemsetAsync(sum, 0, sizeof *sum, net->stream));
    for (const auto &row : rows) {
        if (net->plan->single[row.buffer] >= 0) {  // some plans have no master weights
            const Buffer *b = &net->plan->buffers[net->plan->single[row.buffer]];
            const size_t whole = (size_t)row.whole * type_bytes(b->type);
            const size_t statuses = (s->placement[row.state] & PLACE_SHARD ? whole : b->bytes) / 8;
            launch(replica_hash_kernel, statuses < 1 << 18 ? (unsigned)(statuses / 256 + 1) : 1024,
                   256, 0, net->stream, sum, gpu_buffer<uint64_t>(net, row.buffer), statuses);
        }
    }
    copy_wait(&net->result->replica, sum, sizeof *sum, net->stream);
    return net->result->replica;
}

// Engine.forward_loss: runs the stages up to the head, without gradients.
static double gpu_forward_loss(Engine *e, real *losses, const Token *inputs, const Token *targets) {
    static_assert(sizeof(real) == sizeof(float), "losses are copied without conversion");
    GpuNetwork *net = (GpuNetwork *)e->self;
    const Settings *s = &net->plan->settings;
    const int N = s->B * s->T;
    // GpuPass.first (true) resets the sum of losses; the training step's sum has been read before.
    GpuPass pass = {net, {}, 0, 0, s->B, s->T, 0.0f, true, 0, false};
    gpu_upload(&pass, inputs, targets);
    run_stages(net->plan, tick_head(&s->model), 0, net->stage, &pass);
    const float *sum = &gpu_buffer<GpuState>(net, BUF_STATE)->loss_sum;
    cuda_check(cudaMemcpyAsync(&net->result->loss_sum, sum, sizeof(float), cudaMemcpyDeviceToHost,
                               net->stream));
    if (losses) {
        cuda_check(cudaMemcpyAsync(losses, gpu_buffer<float>(net, BUF_LOSSES), N * sizeof(float),
                                   cudaMemcpyDeviceToHost, net->stream));
    }
    stream_wait(net->stream);
    return net->result->loss_sum / (double)N;
}

// Reads the first row of BUF_LOGITS as floats. Waits for the stages that compute it, because the
// next input is sampled from it.
static void gpu_read_logits(const GpuNetwork *net, real *out) {
    const int V = net->plan->settings.model.V;
    with_type(net->plan->settings.dtype, [&](auto element) {
        using E = decltype(element);
        E *host = (E *)alloc_zero((size_t)V, sizeof(E));
        copy_wait(host, gpu_buffer<E>(net, BUF_LOGITS), V * sizeof(E), net->stream);
        for (int v = 0; v < V; v++) {
            out[v] = to_float(host[v]);
        }
        free(host);
    });
}

// Engine.extend. Tokens are processed in chunks of settings_rows(), and the remainder one by one.
// So each matmul has only two shapes, and the warm-up has run both.
static void gpu_extend(Engine *e, real *out, const Token *tokens, int first, int n) {
    GpuNetwork *net = (GpuNetwork *)e->self;
    const Settings *s = &net->plan->settings;
    const int most = settings_rows(s);
    Token *padded = (Token *)alloc_zero(2 * (size_t)most, sizeof(Token));
    for (int i = 0, rows; i < n; i += rows) {
        rows = n - i >= most ? most : 1;
        const int end = i + rows == n ? tick_head(&s->model) : tick_lnf(&s->model) - 1;
        GpuPass pass = {net, {}, 0, rows - 1, 1, rows, 0.0f, true, first + i, false};
        memcpy(padded, tokens + i, (size_t)rows * sizeof(Token));
        gpu_upload(&pass, padded, padded + most);
        pass.batch.targets = nullptr;  // as in gpu_logits
        run_stages(net->plan, end, 0, net->stage, &pass);
    }
    free(padded);
    gpu_read_logits(net, out);
}

// Engine.logits. Always runs one sequence of T tokens, so that no matmul has a new shape. The
// tokens after the first n are padding, which the causal mask hides from the first n.
static void gpu_logits(Engine *e, real *out, const Token *tokens, int n) {
    GpuNetwork *net = (GpuNetwork *)e->self;
    const Settings *s = &net->plan->settings;
    const int N = s->B * s->T;
    GpuPass pass = {net, {}, 0, n - 1, 1, s->T, 0.0f, true, 0, false};
    Token *padded = (Token *)alloc_zero(2 * (size_t)N, sizeof(Token));
    memcpy(padded, tokens, (size_t)n * sizeof(Token));
    gpu_upload(&pass, padded, padded + N);
    pass.batch.targets = nullptr;  // uploaded with the batch, but not used
    run_stages(net->plan, tick_head(&s->model), 0, net->stage, &pass);
    free(padded);
    gpu_read_logits(net, out);
}

// =================================================================================================
// Part K. Service

// -------------------------------------------------------------------------------------------------
// 41. Timed matmul algorithms
// The heuristic's first algorithm is not always the fastest, so the algorithms of each matmul and
// the split-K candidates of weight gradients are timed at start-up. The operands are random (zeros
// draw less power and run 13 % faster) and, as far as memory allows, there are more copies of them
// than the L2 cache holds. The first algorithm whose results are right, compared with sums in
// double, is the reference. Another one replaces it if it is over 2 % faster, gives the same bits
// twice, agrees with the reference and is itself right. The choice depends on timing, hence on
// chance if two algorithms are equally fast. It is therefore kept in a file; without the file, two
// runs may have different bits.

constexpr int TUNE_ROUNDS = 7;            // measurements of an algorithm; the median is used
constexpr double TUNE_GAIN = 0.98;        // a smaller gain may be measurement noise
// An algorithm is not timed if its checking launch takes longer than TUNE_SLOW times the fastest
// time so far plus TUNE_LAUNCH_MS, the overhead of a launch.
constexpr double TUNE_SLOW = 1.3, TUNE_LAUNCH_MS = 0.02;
constexpr size_t TUNE_NOISE = 16 * 8191;  // bytes of random numbers; 8191 is prime, rows are not
constexpr size_t TUNE_SAMPLE = TUNE_NOISE / 4;  // elements compared at either end of D
constexpr int PROOF_ELEMENTS = 64;  // elements of D compared with sums in double
constexpr int PROOF_TAIL = 64;      // last steps of k, also checked alone: see MatmulProof

// Finds the choice for a matmul in `choices`, a line "where| key=hHASH key=hHASH ..."; `where` must
// be this run's, and HASH is matmul_algorithm_hash in sixteen hexadecimal digits. Returns false if
// there is none.
static bool matmul_choice_find(uint64_t *hash, const char *choices, const MatmulKey *key) {
    char word[96];
    const size_t length = strlen(matmul_library.where);
    if (strncmp(choices, matmul_library.where, length) != 0 || choices[length] != '|') {
        return false;
    }
    snprintf(word, sizeof word, " %s=h", matmul_key_text(key).s);
    const char *at = strstr(choices + length, word);
    at = at ? at + strlen(word) : "";
    *hash = strtoull(at, nullptr, 16);
    return strspn(at, "0123456789abcdef") == 16;
}

// Writes the choices of all plans into matmul_library.choices.
static void matmul_choices_export(void) {
    char *text = matmul_library.choices;
    int n = text_add(text, MATMUL_TEXT, 0, "%s|", matmul_library.where);
    for (int i = 0; i < matmul_library.plans; i++) {
        const MatmulPlan *plan = &matmul_library.plan[i];
        n = text_add(text, MATMUL_TEXT, n, " %s=h%016" PRIx64, matmul_key_text(&plan->key).s,
                     matmul_algorithm_hash(&plan->algorithm));
    }
    check(n < MATMUL_TEXT - 1, "the choices of %d matmuls do not fit", matmul_library.plans);
}

// Imports another run's choices. Returns false if they are for another GPU, library or workspace,
// lack a matmul of this run, or name an algorithm that the library does not offer. Nothing changes
// then, because a run with a partial import would have the bits of neither run.
static bool matmul_choices_import(const char *choices) {
    cublasLtMatmulAlgo_t was[MATMUL_PLANS];
    bool taken = true;
    for (int i = 0; i < matmul_library.plans; i++) {
        MatmulPlan *plan = &matmul_library.plan[i];
        uint64_t hash;
        was[i] = plan->algorithm;
        taken = taken && matmul_choice_find(&hash, choices, &plan->key) &&
                matmul_plan_take(plan, hash);
    }
    for (int i = 0; i < matmul_library.plans && !taken; i++) {
        matmul_library.plan[i].algorithm = was[i];
    }
    matmul_choices_export();
    return taken;
}

// The file of choices in the user's cache has one line per matmul,
//   NVIDIA H200, 132 SMs, cuBLASLt 130100, workspace 134217728| 768x65536x3072:10111:14>14=hHASH
// which names the GPU, library version and workspace that the choice is for, then the matmul
// (matmul_key_text) and its choice. A line that cannot be parsed is ignored.

// Finds the file's choice for a matmul; returns false if there is none. The first line counts: a
// line that another run appended later, while this one was timing, is never used.
static bool matmul_cache_find(uint64_t *hash, const MatmulKey *key) {
    FILE *file = cache_open("matmul", "r");
    char line[512];
    bool known = false;
    while (file && !known && fgets(line, sizeof line, file)) {
        known = strchr(line, '\n') && matmul_choice_find(hash, line, key);
    }
    if (file) {
        fclose(file);
    }
    return known;
}

// Appends a plan's choice to the file in one write, so that lines of concurrent runs do not mix.
static void matmul_cache_add(const MatmulPlan *plan) {
    FILE *file = cache_open("matmul", "a");
    if (file) {
        fprintf(file, "%s| %s=h%016" PRIx64 "\n", matmul_library.where,
                matmul_key_text(&plan->key).s, matmul_algorithm_hash(&plan->algorithm));
        fclose(file);
    }
}

// Memory in which matmuls are timed, and the random numbers ("noise") that fill it: bf16 between -1
// and 1. Two of them read as one fp32 number are also between -1 and 1, with the sign and nearly
// the size of the upper half. So the same noise serves operands of every type, at any address.
struct MatmulBench {
    char *memory;
    size_t bytes, cache_bytes;
    __nv_bfloat16 noise[TUNE_NOISE / 2];
    cudaStream_t stream;
    cudaEvent_t begin, end;  // around the matmul of a sample
};

// Fills the first `bytes` of the bench's memory with noise.
static void matmul_noise(const MatmulBench *bench, size_t bytes) {
    copy_wait(bench->memory, bench->noise, bytes < TUNE_NOISE ? bytes : TUNE_NOISE, bench->stream);
    for (size_t done = TUNE_NOISE; done < bytes; done *= 2) {  // doubles what is there
        cuda_check(cudaMemcpyAsync(bench->memory + done, bench->memory,
                                   done < bytes - done ? done : bytes - done,
                                   cudaMemcpyDeviceToDevice, bench->stream));
    }
}

// Operands of the plan in the bench's memory from `at` on; *bytes receives how many bytes they
// take. They are laid out as in a run: each at a multiple of 256 bytes, C equal to D unless the
// plan is out of place, and a bias only if the matmul has one.
static MatmulOperands matmul_operands(const MatmulBench *bench, const MatmulPlan *plan, size_t at,
                                      size_t *bytes) {
    const MatmulKey *k = &plan->key;
    const size_t m = (size_t)k->m, n = (size_t)k->n, inner = (size_t)k->k;
    const size_t in = k->input_type == CUDA_R_32F ? 4 : 2;
    const size_t out = k->output_type == CUDA_R_32F ? 4 : 2;
    const size_t sizes[5] = {m * n * out, m * inner * in, inner * n * in, m * out, m * n * out};
    char *places[5];
    *bytes = 0;
    for (int i = 0; i < 5; i++) {
        places[i] = bench->memory + at + *bytes;
        *bytes += i == 4 && !k->out_of_place ? 0 : (sizes[i] + 255) / 256 * 256;
    }
    return {places[0], places[1], places[2], k->has_bias ? places[3] : nullptr,
            k->out_of_place ? places[4] : places[0]};
}

// Runs the plan's matmul once and returns both ends of D, at most TUNE_SAMPLE elements each; *ms
// receives the time. Both ends are first reset to noise, which an accumulating matmul (beta = 1)
// reads. Returns null if cuBLASLt refuses the algorithm.
static char *matmul_sample(const MatmulBench *bench, MatmulPlan *plan, const MatmulOperands &x,
                           size_t *bytes, float *ms) {
    const size_t element = plan->key.output_type == CUDA_R_32F ? 4 : 2;
    const size_t all = (size_t)plan->key.m * plan->key.n * element;
    const size_t end = min_i64((int64_t)all, (int64_t)(TUNE_SAMPLE * element));
    char *sample = (char *)alloc_zero(2, end), *d = (char *)x.d;
    // An algorithm that writes nothing leaves the noise, which agrees with no result.
    for (char *at : {d, d + all - end}) {
        copy_wait(at, bench->noise, end, bench->stream);
    }
    cuda_check(cudaEventRecord(bench->begin, bench->stream));
    if (matmul_launch(plan, x, bench->stream) != CUBLAS_STATUS_SUCCESS) {
        (void)cudaGetLastError();
        free(sample);
        return nullptr;
    }
    cuda_check(cudaEventRecord(bench->end, bench->stream));
    copy_wait(sample, d, end, bench->stream);
    copy_wait(sample + end, d + all - end, end, bench->stream);
    cuda_check(cudaEventElapsedTime(ms, bench->begin, bench->end));
    *bytes = 2 * end;
    return sample;
}

// Returns element i of an array of cuBLASLt's `type`.
static double matmul_number(const void *numbers, int type, size_t i) {
    auto number = [&](auto element) {
        memcpy((void *)&element, (const char *)numbers + i * sizeof element, sizeof element);
        return (double)to_float(element);
    };
    return type == CUDA_R_32F   ? number(float())
           : type == CUDA_R_16F ? number(__half())
                                : number(__nv_bfloat16());
}

// Returns the tolerance, relative to the norm, for the difference between two results of a matmul
// of output `type` that are summed in different orders. 16-bit results may differ by twice the
// type's rounding unit. fp32 results may differ by the effect of the order of a long sum: about
// sqrt(65,536) roundings of 6e-8 each, with a margin of six.
static double matmul_error_most(int type) {
    return type == CUDA_R_32F   ? 1e-4
           : type == CUDA_R_16F ? 2 * traits<__half>.unit
                                : 2 * traits<__nv_bfloat16>.unit;
}

// Returns the norm of the difference of two samples of cuBLASLt's `type`, divided by the norm of
// `want`. A NaN in either gives NaN, which exceeds every tolerance.
static double sample_error(const char *got, const char *want, size_t bytes, int type) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < bytes / (type == CUDA_R_32F ? 4 : 2); i++) {
        const double wanted = matmul_number(want, type, i);
        const double d = matmul_number(got, type, i) - wanted;
        difference += d * d;
        norm += wanted * wanted;
    }
    return sqrt(difference / norm);
}

// Returns true if the plan's algorithm gives `want` up to rounding, gives the same bits twice, and
// takes at most slowest_ms. The second launch is the one timed: the first may load the kernel.
static bool matmul_agrees(const MatmulBench *bench, MatmulPlan *plan, const MatmulOperands &x,
                          const char *want, double slowest_ms) {
    size_t bytes = 0;
    float ms = 0;
    const int type = plan->key.output_type;
    char *first = matmul_sample(bench, plan, x, &bytes, &ms);
    char *second = first ? matmul_sample(bench, plan, x, &bytes, &ms) : nullptr;
    const bool agrees = second && memcmp(first, second, bytes) == 0 && ms <= slowest_ms &&
                        sample_error(first, want, bytes, type) <= matmul_error_most(type);
    free(first);
    free(second);
    return agrees;
}

// Selected elements of a plan's D and their values, computed in double from the noise in the
// operands: the corners, more of the last row and the last column, where tiles are cut off, and
// some at random. `tail` holds their values for an A that is zero except in the last PROOF_TAIL
// steps of k. It is checked because cuBLASLt's split sums have left out the last k % 64 steps
// (triton-lang's fork facebookexperimental/triton, pull request 2767): one product in a sum of
// 65,536 is a 256th of its norm, less than the rounding of bf16; in a sum of 64 it is an eighth.
struct MatmulProof {
    size_t at[PROOF_ELEMENTS];
    double whole[PROOF_ELEMENTS], tail[PROOF_ELEMENTS];
};

// Returns true if the tail is checked too. Only weight gradients are summed over more than a few
// thousand steps, so only their sums are split.
static bool matmul_proves_tail(const MatmulKey *k) {
    return matmul_is_weight_gradient(k) && k->k > PROOF_TAIL;
}

// Computes element `at` of D in double: the sum over k from index `first` on, plus C and bias.
static double matmul_exact(const MatmulBench *bench, const MatmulKey *key,
                           const MatmulOperands &x, size_t at, size_t first) {
    const size_t m = (size_t)key->m, n = (size_t)key->n, k = (size_t)key->k;
    const size_t row = at % m, column = at / m;
    auto noise = [&](const void *operand, int type, size_t i) {
        const size_t place = (size_t)((const char *)operand - bench->memory);
        const size_t byte = (place + i * (type == CUDA_R_32F ? 4 : 2)) % TUNE_NOISE;
        return matmul_number((const char *)bench->noise + byte, type, 0);
    };
    double sum = (x.bias ? noise(x.bias, key->output_type, row) : 0) +
                 (key->adds ? noise(x.c, key->output_type, at) : 0);
    for (size_t i = first; i < k; i++) {
        sum += noise(x.a, key->input_type, key->transpose_a ? row * k + i : i * m + row) *
               noise(x.b, key->input_type, key->transpose_b ? i * n + column : column * k + i);
    }
    return sum;
}

// Chooses the elements and computes their values; the main cost is 64 sums over all of k.
static void matmul_proof_make(MatmulProof *proof, const MatmulBench *bench,
                              const MatmulPlan *plan) {
    const MatmulKey *key = &plan->key;
    const size_t m = (size_t)key->m, n = (size_t)key->n;
    const int tail = matmul_proves_tail(key);
    size_t bytes;
    const MatmulOperands x = matmul_operands(bench, plan, 0, &bytes);
    #pragma omp parallel for schedule(static)
    for (int i = 0; i < PROOF_ELEMENTS; i++) {
        const size_t row = (size_t)(rng_uniform(1, 0, 1, (uint64_t)i) * (double)m);
        const size_t column = (size_t)(rng_uniform(1, 0, 2, (uint64_t)i) * (double)n);
        proof->at[i] = i < 4    ? (i % 2) * (m - 1) + (i / 2) * (n - 1) * m
                       : i < 24 ? m - 1 + column * m
                       : i < 44 ? row + (n - 1) * m
                                : row + column * m;
        proof->whole[i] = matmul_exact(bench, key, x, proof->at[i], 0);
        proof->tail[i] =
            tail ? matmul_exact(bench, key, x, proof->at[i], (size_t)(key->k - PROOF_TAIL)) : 0;
    }
}

// Returns true if the plan's algorithm computes the elements of the proof correctly, both for all
// of k and, if it is checked, for the tail alone. Overwrites the first copy of the operands with
// noise, and its D with the matmul's result.
static bool matmul_right(const MatmulBench *bench, MatmulPlan *plan, const MatmulProof *proof) {
    const MatmulKey *key = &plan->key;
    const size_t element = key->output_type == CUDA_R_32F ? 4 : 2;
    size_t bytes;
    const MatmulOperands x = matmul_operands(bench, plan, 0, &bytes);
    for (int tail = matmul_proves_tail(key); tail >= 0; tail--) {
        const double *want = tail ? proof->tail : proof->whole;
        double difference = 0, norm = 0;
        matmul_noise(bench, bytes);
        if (tail) {
            const size_t zero = (size_t)(key->k - PROOF_TAIL) * (size_t)key->m;
            cuda_check(cudaMemsetAsync((void *)x.a, 0,
                                       zero * (key->input_type == CUDA_R_32F ? 4 : 2),
                                       bench->stream));
        }
        if (matmul_launch(plan, x, bench->stream) != CUBLAS_STATUS_SUCCESS) {
            (void)cudaGetLastError();
            return false;
        }
        for (int i = 0; i < PROOF_ELEMENTS; i++) {
            float got;  // large enough for an element of any type
            copy_wait(&got, (const char *)x.d + proof->at[i] * element, element, bench->stream);
            const double d = matmul_number(&got, key->output_type, 0) - want[i];
            difference += d * d;
            norm += want[i] * want[i];
        }
        if (!(sqrt(difference / norm) <= matmul_error_most(key->output_type))) {
            return false;
        }
    }
    return true;
}

// Reports that no algorithm of a plan's matmul is right.
static void matmul_report(const MatmulPlan *plan) {
    fprintf(stderr, "%s: %s: no cuBLASLt algorithm gives this program's own result for matmul "
            "%s; the run continues with the first one. Please report this line\n",
            program_name, matmul_library.where, matmul_key_text(&plan->key).s);
}

// Times the algorithms of a plan's matmul and selects the best: the first one that is right, unless
// another takes less than TUNE_GAIN of its time. The plan keeps its algorithm if the operands do
// not fit into the bench's memory, or if no algorithm is right, which is reported at every start.
static void matmul_plan_time(const MatmulBench *bench, MatmulPlan *plan) {
    size_t each, bytes;
    matmul_operands(bench, plan, 0, &each);
    const size_t capacity = bench->bytes / each, wanted = 2 * bench->cache_bytes / each + 1;
    const int copies = (int)(capacity < wanted ? capacity : wanted);
    if (copies == 0) {
        return;
    }
    cublasLtMatmulHeuristicResult_t results[MATMUL_CANDIDATES];
    const int found = matmul_candidates(results, plan);
    const cublasLtMatmulAlgo_t was = plan->algorithm;
    MatmulProof proof;
    matmul_proof_make(&proof, bench, plan);
    auto is_right = [&](int i) {
        plan->algorithm = results[i].algo;
        return matmul_right(bench, plan, &proof);
    };
    int reference = 0;
    while (reference < found && !is_right(reference)) {
        reference++;
    }
    if (reference == found) {
        plan->algorithm = was;
        matmul_report(plan);
        return;
    }
    matmul_noise(bench, (size_t)copies * each);  // earlier matmuls have written to it
    // Launches cycle through the copies, so that none finds its operands in the cache.
    auto operands = [&](int i) {
        return matmul_operands(bench, plan, (size_t)(i % copies) * each, &bytes);
    };
    auto time_ms = [&] {
        return gpu_time_ms(TUNE_ROUNDS, bench->stream, [&](int call) {
            cublas_check(matmul_launch(plan, operands(call), bench->stream));
        });
    };
    float once_ms;
    char *want = matmul_sample(bench, plan, operands(0), &bytes, &once_ms);
    double fastest_ms = time_ms(), best_ms = TUNE_GAIN * fastest_ms;
    int best = reference;
    // An algorithm is run twice to check its results before it is timed: a fast but wrong one must
    // not be chosen.
    for (int i = 0; i < found; i++) {
        plan->algorithm = results[i].algo;
        if (i == reference || !matmul_agrees(bench, plan, operands(0), want,
                                             TUNE_SLOW * fastest_ms + TUNE_LAUNCH_MS)) {
            continue;
        }
        const double ms = time_ms();
        if (ms < best_ms && is_right(i)) {
            best = i;
            best_ms = fastest_ms = ms;
        }
        matmul_noise(bench, each);  // is_right may have zeroed A except its tail
    }
    free(want);
    plan->algorithm = results[best].algo;
    matmul_cache_add(plan);
    matmul_library.timed++;
}

// Sets the plan's algorithm to the file's choice. Returns false if the file has none for the plan,
// or names an algorithm that the library does not offer.
static bool matmul_plan_load(MatmulPlan *plan) {
    uint64_t hash;
    return matmul_cache_find(&hash, &plan->key) && matmul_plan_take(plan, hash);
}

// Sets the algorithm of every plan to the file's choice. Returns the number of plans for which the
// file has none.
static int matmul_choices_load(void) {
    int unknown = 0;
    for (int i = 0; i < matmul_library.plans; i++) {
        unknown += !matmul_plan_load(&matmul_library.plan[i]);
    }
    return unknown;
}

// The emulated device has no clock; tests give it a table of times instead.
#if CUDA_CPU
static bool matmul_can_time(void) { return emu::set.lt_times != 0; }
#else
static bool matmul_can_time(void) { return true; }
#endif

// Times the algorithms of all matmul plans that have no entry in the cache file. memory: unused
// device memory, aligned to 256 bytes, as scratch space; its contents are overwritten.
static void matmul_tune(char *memory, size_t bytes, cudaStream_t stream) {
    MatmulBench *bench = (MatmulBench *)alloc_zero(1, sizeof *bench);
    int device, cache;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, device));
    bench->memory = memory;
    bench->bytes = bytes;
    bench->cache_bytes = (size_t)cache;
    bench->stream = stream;
    cuda_check(cudaEventCreate(&bench->begin));
    cuda_check(cudaEventCreate(&bench->end));
    for (size_t i = 0; i < TUNE_NOISE / 2; i++) {
        bench->noise[i] = from_float<__nv_bfloat16>((float)(2 * rng_uniform(1, 0, 0, i) - 1));
    }
    for (int i = 0; i < matmul_library.plans; i++) {
        progress();
        if (!matmul_plan_load(&matmul_library.plan[i])) {
            matmul_plan_time(bench, &matmul_library.plan[i]);
        }
    }
    cuda_check(cudaStreamSynchronize(stream));
    cuda_check(cudaEventDestroy(bench->begin));
    cuda_check(cudaEventDestroy(bench->end));
    free(bench);
}

// -------------------------------------------------------------------------------------------------
// 42. Kernel trials
// Some kernels have variants (AttentionVariant). A run uses another row of such a table than row 0
// only if this machine has executed that row, found it right and measured it more than 2 % faster.
// So a kernel that has never run on a GPU of this kind cannot harm a run: in case of any doubt, and
// with --tune 0, the run uses row 0.
// 1. The trial (--prove) is a process of its own, started before this one creates a CUDA context:
//    an illegal instruction ends the context of its process, and a kernel that hangs ends only with
//    its process.
// 2. Verdicts are cached for this GPU, driver, program and shape, the number of sequences included.
//    A candidate whose process was ended from outside has no verdict and is tried again at the next
//    start.
// 3. Variants round differently, so a run keeps its rows: they are recorded in checkpoints, and all
//    ranks adopt rank 0's verdicts.
// 4. On the emulated device nothing is tried unless EMU_KERNELS is set.

constexpr int TRIAL_ROWS = 4;            // rows of the table, at most
// A trial has at most TRIAL_TOKENS tokens, and TRIAL_NUMBERS tokens times channels: this limits its
// memory on the GPU to 2 GB, and its work on a host with few threads.
constexpr int TRIAL_TOKENS = CUDA_CPU ? 256 : 65536;
constexpr int TRIAL_NUMBERS = 65536 * 768;
constexpr int TRIAL_LENGTH_MIN = 16;     // shorter sequences are not worth a trial
constexpr int TRIAL_LENGTH_CPU = 1024;   // longer ones are not computed on the CPU
constexpr int TRIAL_NOISE = 8 * 8191;    // numbers; 8191 is prime, so rows differ
constexpr int TRIAL_GUARD_ROWS = 128;    // rows of qkv before and after an output: a tile of rows
constexpr int TRIAL_UNWRITTEN = 0xff;    // these bytes, and all memory before a kernel: NaN
constexpr int TRIAL_REPEATS = CUDA_CPU ? 1 : 16;  // of each case, for the same bits
constexpr int TRIAL_START_LINES = 3;     // time limit of the first line, in limits of the others
constexpr int TRIAL_END_S = 10;          // how long a killed process may take to end
#if CUDA_CPU
static double trial_limit_s(void) { return (double)emu::set.kernel_limit_s; }
static bool trial_allows(const char *name) {
    return emu::set.kernels && (strcmp(name, "planted") == 0) == emu::plants_kernel();
}
#else
static double trial_limit_s(void) { return 60; }
static bool trial_allows(const char *) { return true; }
#endif

struct TrialShape {
    int HS, T, NH, B;
};

// A verdict is a text: "right 1.432" with the default's time divided by the candidate's; "wrong",
// "crashed", "hung" or "absent", each with ": WHY"; or, if there is none yet, "".
struct KernelVerdict {
    char s[72];
};
typedef KernelVerdict KernelVerdicts[ATTENTION_KERNELS][TRIAL_ROWS];
static_assert(sizeof(KernelVerdicts) <= RANK_KERNELS, "the verdicts fit into a RankInfo");
static_assert((int)ATTENTION_VARIANTS <= TRIAL_ROWS, "and have room for all variants");
static const char *const kernel_words[] = {"forward", "dq", "dkv"};

// Returns the ratio of the times of a candidate that is right, otherwise 0.
static double verdict_ratio(const char *verdict) {
    char *end = nullptr;
    const double ratio = strncmp(verdict, "right ", 6) == 0 ? strtod(verdict + 6, &end) : 0;
    return ratio > 0 && ratio < 1e6 && *end == 0 ? ratio : 0;
}

// Returns true if a text read from the cache or from a trial is a verdict.
static bool verdict_is(const char *text) {
    for (const char *word : {"wrong: ", "crashed: ", "hung: ", "absent: "}) {
        if (strncmp(text, word, strlen(word)) == 0) {
            return true;
        }
    }
    return verdict_ratio(text) > 0;
}

// Calls f(kernel, row, name) for every candidate for the shape on a GPU of this capability.
template <class F> static void each_candidate(const TrialShape &x, int capability, F f) {
    for (int i = 0; i < ATTENTION_KERNELS * ATTENTION_VARIANTS; i++) {
        const int row = i % ATTENTION_VARIANTS;
        const AttentionVariant &v = attention_variants[row];
        if (row > 0 && (!v.capability || v.capability == capability) && (!v.HS || v.HS == x.HS) &&
            x.T >= TRIAL_LENGTH_MIN && trial_allows(v.name)) {
            f(i / ATTENTION_VARIANTS, row, v.name);
        }
    }
}

// --prove, the process of the trial.

// The outputs of the kernels: rows of `parts` x C numbers or, for 0, one number per token and head.
enum { TRIAL_OUT, TRIAL_LSE, TRIAL_DQKV, TRIAL_DROW, TRIAL_SUMS, TRIAL_OUTPUTS };
static const struct {
    int parts;
    size_t bytes;  // of a number
} trial_outputs[TRIAL_OUTPUTS] = {{1, 2}, {0, 4}, {3, 2}, {0, 4}, {3, 4}};

// The results of each kernel and their largest allowed errors, relative to the norm: `error` from
// the CPU reference (0: not compared), `apart` from the default kernel.
struct TrialResult {
    const char *name;
    int kernel, output, part;
    double error, apart;
};
static const TrialResult trial_results[] = {
    {"out", ATTENTION_FORWARD, TRIAL_OUT, 0, 5e-3, 1e-2},
    {"LSE2", ATTENTION_FORWARD, TRIAL_LSE, 0, 1e-5, 1e-4},
    {"dQ", ATTENTION_DQ, TRIAL_DQKV, 0, 8e-3, 1e-2},
    {"D", ATTENTION_DQ, TRIAL_DROW, 0, 1e-5, 1e-4},
    {"the sum of dQ", ATTENTION_DQ, TRIAL_SUMS, 0, 0, 1e-2},
    {"dK", ATTENTION_DKV, TRIAL_DQKV, 1, 8e-3, 1e-2},
    {"dV", ATTENTION_DKV, TRIAL_DQKV, 2, 8e-3, 1e-2},
    {"the sum of dK", ATTENTION_DKV, TRIAL_SUMS, 1, 0, 1e-2},
    {"the sum of dV", ATTENTION_DKV, TRIAL_SUMS, 2, 0, 1e-2},
};

// The cases. `whole`: the run's sequences, else one whose length is not a multiple of the tile
// size; q and k are multiplied by `scale` (4: softmax close to one-hot; 8: scores that overflow 2^x
// unless the maximum is subtracted), dO by `gradient`; `lost`: the last of several sequences is
// NaN, which must not reach the others and must not vanish. Times are measured in the last case.
struct TrialCase {
    bool whole;
    float scale, gradient;
    bool lost;
};
static const TrialCase trial_cases[] = {
    {false, 1, 1, false}, {false, 4, 1, false}, {true, 8, 1.0f / (1 << 20), true},
    {true, 1, 1, false}};

// Sets of outputs on the device: the default kernels', the candidate's, those of its repetitions,
// and those of default kernels that run at the same time. The host has copies of the first two and
// the CPU reference's, as real.
enum { TRIAL_DEFAULT, TRIAL_CANDIDATE, TRIAL_AGAIN, TRIAL_BESIDE, TRIAL_SETS };
enum { TRIAL_CPU = TRIAL_CANDIDATE + 1, TRIAL_COPIES };

struct Trial {
    TrialShape shape, now;  // the given shape; the current case, with B and T of its own
    size_t guard;           // bytes before and after an output
    __nv_bfloat16 noise[TRIAL_NOISE], *inputs[2];  // inputs: qkv and dout on the device
    real *host[2];                                 // and on the host
    char *outputs[TRIAL_SETS][TRIAL_OUTPUTS];      // on the device, between two guards
    char *copies[TRIAL_COPIES][TRIAL_OUTPUTS];
    unsigned *differ;                              // two counts on the device
    cudaStream_t stream, beside;
};

static size_t trial_rows(const TrialShape &x, int output) {
    const size_t tokens = (size_t)x.B * x.T;
    return output == TRIAL_SUMS ? (size_t)attention_parts<__nv_bfloat16>(x.B, x.T, x.HS)
                                : tokens * (trial_outputs[output].parts ? 1 : x.NH);
}

static size_t trial_columns(const TrialShape &x, int output) {
    const int parts = trial_outputs[output].parts;
    return parts ? (size_t)parts * x.NH * x.HS : 1;
}

// Returns the bytes of an output with its guards.
static size_t trial_bytes(const Trial *t, const TrialShape &x, int output) {
    return trial_rows(x, output) * trial_columns(x, output) * trial_outputs[output].bytes +
           2 * t->guard;
}

// differ_kernel: *count += the number of words in which a and b, n words each, differ. Grid up to
// 1024, block 256: each thread compares every gridDim.x blockDim.x-th word. Exact.
// budget: threads 256 regs 16 blocks 6 test gpu_differ
static __global__ void differ_kernel(unsigned *count, const unsigned *a, const unsigned *b,
                                     size_t n) {
    unsigned differ = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        differ += a[i] != b[i];
    }
    if (differ > 0) {
        atomicAdd(count, differ);
    }
}

// Launches differ_kernel.
static void gpu_differ(unsigned *count, const void *a, const void *b, size_t bytes,
                       cudaStream_t stream) {
    check(bytes % 4 == 0, "%zu bytes are not whole words", bytes);
    launch(differ_kernel, (unsigned)min_i64(ceil_div_i64((int64_t)bytes / 4, 256), 1024), 256, 0,
           stream, count, (const unsigned *)a, (const unsigned *)b, bytes / 4);
}

// Launches a kernel, whose outputs are in a set. It reads what the default's earlier kernels have
// written.
static void trial_launch(const Trial *t, int kernel, int row, int set, cudaStream_t stream) {
    const TrialShape &x = t->now;
    auto at = [&](int output, bool own) {
        return (void *)(t->outputs[own ? set : TRIAL_DEFAULT][output] + t->guard);
    };
    const bool forward = kernel == ATTENTION_FORWARD, dq = kernel == ATTENTION_DQ;
    attention_variants[row].start[kernel](
        {t->inputs[0], t->inputs[1], (__nv_bfloat16 *)at(TRIAL_OUT, forward),
         (__nv_bfloat16 *)at(TRIAL_DQKV, true), (float *)at(TRIAL_LSE, forward),
         (float *)at(TRIAL_DROW, dq), (float *)at(TRIAL_SUMS, true), x.B, x.T, x.NH, x.HS,
         stream});
#if CUDA_CPU
    const int changed = forward ? TRIAL_OUT : TRIAL_DQKV;
    emu::planted_trial(stream, row, at(changed, true), trial_bytes(t, x, changed) - 2 * t->guard);
#endif
}

// Fills a set of outputs with NaN.
static void trial_clear(const Trial *t, int set) {
    for (int output = 0; output < TRIAL_OUTPUTS; output++) {
        cuda_check(cudaMemsetAsync(t->outputs[set][output], TRIAL_UNWRITTEN,
                                   trial_bytes(t, t->now, output), t->stream));
    }
}

// Waits for the kernels and copies a set to the host. Ends the process if a kernel has failed.
static void trial_copy(const Trial *t, int set) {
    for (cudaStream_t stream : {t->beside, t->stream}) {
        const cudaError_t error = cudaStreamSynchronize(stream);
        if (error != cudaSuccess) {
            printf("crashed: %.50s\n", cudaGetErrorString(error));
            fflush(stdout);
            _exit(1);
        }
    }
    for (int output = 0; output < TRIAL_OUTPUTS; output++) {
        copy_wait(t->copies[set][output], t->outputs[set][output],
                  trial_bytes(t, t->now, output), t->stream);
    }
}

// Counts the words in which the outputs of two sets differ.
static void trial_compare(const Trial *t, unsigned *count, int a, int b) {
    for (int output = 0; output < TRIAL_OUTPUTS; output++) {
        gpu_differ(count, t->outputs[a][output], t->outputs[b][output],
                   trial_bytes(t, t->now, output), t->stream);
    }
}

// Computes the CPU reference of a case of one sequence. As on the GPU, the backward pass gets the
// forward pass's rounded output.
static void trial_reference(Trial *t) {
    const int T = t->now.T, NH = t->now.NH, HS = t->now.HS, C = NH * HS;
    real *reference[TRIAL_OUTPUTS], *out = (real *)alloc_zero((size_t)T * C, sizeof(real));
    const char *rounded = t->copies[TRIAL_DEFAULT][TRIAL_OUT] + t->guard;
    for (int i = 0; i < T * C; i++) {
        out[i] = (real)matmul_number(rounded, CUDA_R_16BF, (size_t)i);
    }
    for (int output = 0; output < TRIAL_OUTPUTS; output++) {
        reference[output] = (real *)(void *)t->copies[TRIAL_CPU][output];
    }
    #pragma omp parallel
    #pragma omp single
    {
        attention_forward(reference[TRIAL_OUT], reference[TRIAL_LSE], t->host[0], 1, T, C, NH);
        #pragma omp taskwait
        attention_backward(reference[TRIAL_DQKV], t->host[1], t->host[0], out,
                           reference[TRIAL_LSE], 1, T, C, NH);
    }
    for (int i = 0; i < NH * T; i++) {  // LSE2 and D
        double sum = 0;
        for (int d = 0; d < HS; d++) {
            const int at = i % T * C + i / T * HS + d;
            sum += (double)t->host[1][at] * (double)out[at];
        }
        reference[TRIAL_DROW][i] = (real)sum;
        reference[TRIAL_LSE][i] *= (real)LOG2_E;
    }
    free(out);
}

// Begins a case: fills the inputs, followed by NaN, and runs row 0 of the kernels up to `kernel`.
static void trial_begin(Trial *t, const TrialCase &c, int kernel) {
    const TrialShape &x = t->shape;
    const int T = min_int(x.T, TRIAL_LENGTH_CPU) - (x.T > 128 ? 37 : 3);
    const size_t C = (size_t)x.NH * x.HS;
    t->now.B = c.whole ? x.B : 1;
    t->now.T = c.whole ? x.T : T - (T % 64 == 0);
    const size_t tokens = (size_t)t->now.B * t->now.T;
    const size_t finite = c.lost && x.B > 1 ? tokens - t->now.T : tokens;
    for (int i = 0; i < 2; i++) {
        const size_t columns = i ? C : 3 * C, all = (size_t)x.B * x.T * columns;
        __nv_bfloat16 *rounded = (__nv_bfloat16 *)alloc_zero(all, sizeof *rounded);
        memset((void *)rounded, TRIAL_UNWRITTEN, all * sizeof *rounded);
        #pragma omp parallel for schedule(static)
        for (size_t k = 0; k < finite * columns; k++) {
            const float number = to_float(t->noise[(k + i * TRIAL_NOISE / 2) % TRIAL_NOISE]);
            const float factor = i ? c.gradient : k % columns < 2 * C ? c.scale : 1;
            rounded[k] = from_float<__nv_bfloat16>(factor * number);
            t->host[i][k] = to_float(rounded[k]);
        }
        copy_wait(t->inputs[i], rounded, all * sizeof *rounded, t->stream);
        free(rounded);
    }
    trial_clear(t, TRIAL_DEFAULT);
    for (int k = 0; k <= kernel; k++) {
        trial_launch(t, k, 0, TRIAL_DEFAULT, t->stream);
    }
    trial_copy(t, TRIAL_DEFAULT);
    if (!c.whole) {
        trial_reference(t);
    }
}

// Returns number i of a copy of an output.
static double trial_number(const Trial *t, int copy, int output, size_t i) {
    const char *bytes = t->copies[copy][output];
    if (copy == TRIAL_CPU) {
        return ((const real *)(const void *)bytes)[i];
    }
    return matmul_number(bytes + t->guard,
                         trial_outputs[output].bytes == 2 ? CUDA_R_16BF : CUDA_R_32F, i);
}

// Returns whether a result is near in two copies: NaN in the same places, the norm of their
// difference at most `most` times the norm of `want` and, unless `want` is the CPU reference, each
// head's row differs by at most 5 % of its own norm plus 1 % of the mean norm. If not, `why`
// receives the reason.
static bool trial_near(const Trial *t, const TrialResult &r, int got, int want, double most,
                       char why[64]) {
    const size_t C = (size_t)t->shape.NH * t->shape.HS, step = trial_columns(t->now, r.output);
    const size_t columns = step > 1 ? C : 1, unit = step > 1 ? (size_t)t->shape.HS : 1;
    const size_t heads = trial_rows(t->now, r.output) * columns / unit;
    double norm = 0, apart = 0, mean = 0;
    int far = 0;
    for (int pass = 0; pass < 2; pass++) {
        double sum = 0;
        #pragma omp parallel for reduction(+ : norm, apart, sum, far)
        for (size_t head = 0; head < heads; head++) {
            double own = 0, difference = 0;
            for (size_t i = head * unit; i < (head + 1) * unit; i++) {
                const size_t at = i / columns * step + (size_t)r.part * C + i % columns;
                const double wanted = trial_number(t, want, r.output, at);
                const double number = trial_number(t, got, r.output, at), d = number - wanted;
                own += isnan(wanted) ? 0 : wanted * wanted;
                difference += !isnan(wanted) ? d * d : isnan(number) ? 0 : HUGE_VAL;
            }
            norm += own;
            apart += difference;
            sum += sqrt(own);
            far += pass && !(sqrt(difference) <= 0.05 * sqrt(own) + 0.01 * mean);
        }
        mean = sum / (double)heads;
    }
    const double error = sqrt(apart / norm);
    const bool near = error <= most, rows = want == TRIAL_CPU || far == 0;
    if (!near) {
        snprintf(why, 64, "%s differs from the %s by %.1e", r.name,
                 want == TRIAL_CPU ? "CPU's" : "default's", error);
    } else if (!rows) {
        snprintf(why, 64, "%s differs in %d rows of heads", r.name, far);
    }
    return near && rows;
}

// Returns whether all results of a kernel are near in two copies.
static bool trial_all_near(const Trial *t, int kernel, int got, int want, char why[64]) {
    return std::all_of(std::begin(trial_results), std::end(trial_results),
                       [&](const TrialResult &r) {
        const double most = want == TRIAL_CPU ? r.error : r.apart;
        return r.kernel != kernel || most == 0 || trial_near(t, r, got, want, most, why);
    });
}

// Returns true if the candidate has changed nothing in its set but its results. Clears these in the
// copy.
static bool trial_stays_inside(const Trial *t, int kernel) {
    const size_t C = (size_t)t->shape.NH * t->shape.HS;
    size_t changed = 0;
    for (const TrialResult &r : trial_results) {
        const size_t each = trial_outputs[r.output].bytes, step = trial_columns(t->now, r.output);
        for (size_t row = 0; r.kernel == kernel && row < trial_rows(t->now, r.output); row++) {
            memset(t->copies[TRIAL_CANDIDATE][r.output] + t->guard +
                       (row * step + (size_t)r.part * C) * each,
                   TRIAL_UNWRITTEN, (step > 1 ? C : 1) * each);
        }
    }
    for (int output = 0; output < TRIAL_OUTPUTS; output++) {
        const size_t bytes = trial_bytes(t, t->now, output);
        const char *at = t->copies[TRIAL_CANDIDATE][output];
        changed += bytes - (size_t)std::count(at, at + bytes, (char)TRIAL_UNWRITTEN);
    }
    return changed == 0;
}

// Returns true if the candidate is right in a case; otherwise writes the reason to `why`. It runs
// once, then again and again while default kernels run at the same time, which finds races. These
// also show afterwards whether it has changed what they read.
static bool trial_is_right(Trial *t, const TrialCase &c, int kernel, int row, char why[64]) {
    unsigned differ[2] = {0, 0};
    trial_begin(t, c, kernel);
    if (!c.whole && !trial_all_near(t, kernel, TRIAL_DEFAULT, TRIAL_CPU, why)) {
        printf("default: %s\n", why);
        return false;
    }
    for (int output = 0; output < TRIAL_OUTPUTS; output++) {
        cuda_check(cudaMemcpyAsync(t->outputs[TRIAL_BESIDE][output],
                                   t->outputs[TRIAL_DEFAULT][output],
                                   trial_bytes(t, t->now, output), cudaMemcpyDeviceToDevice,
                                   t->stream));
    }
    cuda_check(cudaMemsetAsync(t->differ, 0, sizeof differ, t->stream));
    trial_clear(t, TRIAL_CANDIDATE);
    trial_launch(t, kernel, row, TRIAL_CANDIDATE, t->stream);
    for (int i = 0; i < TRIAL_REPEATS; i++) {
        trial_launch(t, kernel, 0, TRIAL_BESIDE, t->beside);
        trial_clear(t, TRIAL_AGAIN);
        trial_launch(t, kernel, row, TRIAL_AGAIN, t->stream);
        trial_compare(t, &t->differ[0], TRIAL_CANDIDATE, TRIAL_AGAIN);
    }
    trial_copy(t, TRIAL_CANDIDATE);
    trial_launch(t, kernel, 0, TRIAL_BESIDE, t->stream);
    trial_compare(t, &t->differ[1], TRIAL_DEFAULT, TRIAL_BESIDE);
    copy_wait(differ, t->differ, sizeof differ, t->stream);
    if (differ[1] || differ[0]) {
        snprintf(why, 64, differ[1] ? "it changes the default's inputs or outputs"
                                    : "not the same bits twice");
        return false;
    }
    if ((!c.whole && !trial_all_near(t, kernel, TRIAL_CANDIDATE, TRIAL_CPU, why)) ||
        !trial_all_near(t, kernel, TRIAL_CANDIDATE, TRIAL_DEFAULT, why)) {
        return false;
    }
    snprintf(why, 64, "it writes outside its outputs");
    return trial_stays_inside(t, kernel);
}

// Tries a candidate: prints "try KERNEL NAME" before its first launch, then the verdict. Returns
// false if it is wrong.
static bool trial_verdict(Trial *t, int kernel, int row) {
    const AttentionVariant &v = attention_variants[row];
    cudaFuncAttributes built = {};
    char why[64] = "";
    printf("try %s %s\n", kernel_words[kernel], v.name);
    if (cudaFuncGetAttributes(&built, (const void *)differ_kernel) != cudaSuccess ||
        built.ptxVersion < v.capability) {  // the same for all kernels of a build
        (void)cudaGetLastError();
        printf("absent: this program is built for other GPUs\n");
        return true;
    }
    fflush(stdout);
    for (const TrialCase &c : trial_cases) {
        if (!trial_is_right(t, c, kernel, row, why)) {
            printf("wrong: %s\n", why);
            fflush(stdout);
            return false;
        }
    }
    double ms[2][TUNE_ROUNDS];
    for (int i = 0; i < 2 * TUNE_ROUNDS; i++) {  // in turn
        ms[i % 2][i / 2] = gpu_time_ms(1, t->stream, [&](int) {
            trial_launch(t, kernel, i % 2 ? row : 0, i % 2, t->stream);
        });
    }
    printf("right %.3f\n", median(ms[0], TUNE_ROUNDS) / median(ms[1], TUNE_ROUNDS));
    fflush(stdout);
    return true;
}

// Returns true if a list such as ",dq=wgmma,dkv=wgmma" names the variant of a kernel.
static bool kernel_is_named(const char *list, char before, int kernel, const char *name) {
    char word[64];
    const int n = snprintf(word, sizeof word, "%c%s=%s", before, kernel_words[kernel], name);
    const char *at = strstr(list, word);
    return at && (at[n] == before || at[n] == 0);
}

// Returns the sequences of T tokens and C channels that a trial has: B, or as many as TRIAL_TOKENS
// and TRIAL_NUMBERS allow.
static int trial_batch(int B, int T, int C) {
    const int tokens = min_int(TRIAL_TOKENS, TRIAL_NUMBERS / C);
    return min_int(B, (int)max_i64(tokens / T, 1));
}

// Parses HS,T,NH,B; returns the text after it. Ends the program if it is not a shape of the
// kernels.
static const char *trial_shape_parse(TrialShape *x, const char *text) {
    int n = 0;
    if (sscanf(text, "%d,%d,%d,%d%n", &x->HS, &x->T, &x->NH, &x->B, &n) != 4 ||
        (text[n] && !strchr(&text[n], '=')) || x->HS < HEAD_UNIT || x->HS > HEAD_MAX ||
        x->HS % HEAD_UNIT != 0 || x->T < TRIAL_LENGTH_MIN || x->T > LENGTH_MAX || x->NH < 1 ||
        (int64_t)x->NH * x->HS > CHANNELS_MAX || x->B < 1) {
        die("--prove: '%s' is not HS,T,NH,B: the head size, a multiple of %d up to %d; %d to %d "
            "tokens; heads with at most %d channels in all; sequences", text, HEAD_UNIT, HEAD_MAX,
            TRIAL_LENGTH_MIN, LENGTH_MAX, CHANNELS_MAX);
    }
    x->B = trial_batch(x->B, x->T, x->NH * x->HS);
    return &text[n];
}

// Allocates the memory of a trial and fills in the noise.
static void trial_open(Trial *t) {
    const TrialShape &x = t->shape;
    cuda_check(cudaStreamCreateWithFlags(&t->stream, cudaStreamNonBlocking));
    cuda_check(cudaStreamCreateWithFlags(&t->beside, cudaStreamNonBlocking));
    cuda_check(cudaMalloc((void **)&t->differ, 2 * sizeof *t->differ));
    matmul_workspace = (real *)alloc_zero(matmul_workspace_bytes(thread_count()), 1);
    t->guard = (size_t)TRIAL_GUARD_ROWS * 3 * x.NH * x.HS * sizeof t->noise[0];
    for (size_t i = 0; i < TRIAL_NOISE; i++) {  // q, k, v and dO between -2 and 2
        t->noise[i] = from_float<__nv_bfloat16>((float)(4 * rng_uniform(1, 0, 3, i) - 2));
    }
    for (int i = 0; i < 2; i++) {
        const size_t numbers = (size_t)x.B * x.T * (i ? 1 : 3) * x.NH * x.HS;
        cuda_check(cudaMalloc((void **)&t->inputs[i], numbers * sizeof *t->inputs[i]));
        t->host[i] = (real *)alloc_zero(numbers, sizeof(real));
    }
    for (int output = 0; output < TRIAL_OUTPUTS; output++) {
        const size_t bytes = trial_bytes(t, x, output);
        for (int i = 0; i < TRIAL_SETS; i++) {
            cuda_check(cudaMalloc((void **)&t->outputs[i][output], bytes));
        }
        for (int i = 0; i < TRIAL_COPIES; i++) {
            t->copies[i][output] = (char *)alloc_zero(bytes, i == TRIAL_CPU ? sizeof(real) : 1);
        }
    }
}

// Program.prove: tries the candidates for heads of HS channels, T tokens, NH heads and B sequences
// on the first GPU: all, or those in a list after the shape. Returns the exit status: 0 if all are
// right or absent.
static int kernels_prove(const char *shape) {
    Trial *t = (Trial *)alloc_zero(1, sizeof *t);
    const char *list = trial_shape_parse(&t->shape, shape);
    cudaDeviceProp gpu;
    int candidates = 0, wrong = 0;
    t->now = t->shape;
    device_select(0);
    cuda_check(cudaGetDeviceProperties(&gpu, 0));
    auto each_named = [&](auto f) {
        each_candidate(t->shape, 10 * gpu.major + gpu.minor, [&](int kernel, int row,
                                                                 const char *name) {
            if (!list[0] || kernel_is_named(list, ',', kernel, name)) {
                f(kernel, row);
            }
        });
    };
    each_named([&](int, int) { candidates++; });
    printf("gpu %.64s: %d candidates\n", gpu.name, candidates);
    fflush(stdout);
    if (candidates == 0) {
        return 0;
    }
    trial_open(t);
    each_named([&](int kernel, int row) { wrong += !trial_verdict(t, kernel, row); });
    fflush(stdout);
    _exit(wrong > 0);  // frees nothing: a kernel may have harmed this process
}

// The run: its child process, the cache and the choice.

// Starts --prove for the shape and the candidates without a verdict. Returns the process, whose
// standard output is *pipe, or -1 if it could not be started. Only async-signal-safe functions are
// called between fork and exec, because this process may have other threads. The child is in a
// process group of its own, so that Ctrl-C ends it only through this process; if this process is
// killed, the system kills it too.
static pid_t trial_start(int *pipe, const TrialShape &x, int capability,
                         const KernelVerdicts &verdicts) {
    char shape[512];
    int ends[2], n = snprintf(shape, sizeof shape, "%d,%d,%d,%d", x.HS, x.T, x.NH, x.B);
    const char *const arguments[] = {program_name, "--prove", shape, nullptr};
    const pid_t parent = getpid();
    each_candidate(x, capability, [&](int kernel, int row, const char *name) {
        n = verdicts[kernel][row].s[0] ? n : text_add(shape, sizeof shape, n, ",%s=%s",
                                                      kernel_words[kernel], name);
    });
    signal(SIGCHLD, SIG_DFL);  // if a shell set it to be ignored, the exit status would be lost
    if (pipe2(ends, O_CLOEXEC) != 0) {
        return -1;
    }
    const pid_t child = fork();
    *pipe = ends[0];
    if (child == 0) {
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(ends[1], STDOUT_FILENO);
        dup2(open("/dev/null", O_WRONLY | O_CLOEXEC), STDERR_FILENO);
        if (getppid() == parent) {
            execv("/proc/self/exe", (char *const *)arguments);
        }
        _exit(127);
    }
    close(ends[1]);
    return child;
}

// Fills in the verdicts in a trial's output; prints its line about the default kernel. Returns the
// verdict of the candidate that was tried last, if the output has none for it, or null.
static char *trial_parse(char *text, KernelVerdicts *verdicts, const TrialShape &x,
                         int capability) {
    char *tried = nullptr, *end;
    for (char *line = text; (end = strchr(line, '\n')) != nullptr; line = end + 1) {
        *end = 0;
        if (strncmp(line, "try ", 4) == 0) {
            each_candidate(x, capability, [&](int kernel, int row, const char *name) {
                char word[64];
                snprintf(word, sizeof word, "%s %s", kernel_words[kernel], name);
                tried = strcmp(line + 4, word) == 0 ? (*verdicts)[kernel][row].s : tried;
            });
        } else if (strncmp(line, "default: ", 9) == 0) {
            fprintf(stderr, "%s: attention's default kernel is wrong on this GPU or in this trial: "
                    "%s; the run continues with it. Please report this line\n", program_name,
                    line + 9);
        } else if (tried && verdict_is(line)) {
            snprintf(tried, sizeof(KernelVerdict), "%.71s", line);
            tried = nullptr;
        }
    }
    return tried;
}

// Waits for the child and returns the status of waitpid. Ends the run if the child does not end.
static int trial_end(pid_t child) {
    int status = 0;
    for (double since_ms = now_ms(); waitpid(child, &status, WNOHANG) == 0; usleep(1000)) {
        progress();
        if (now_ms() - since_ms > 1e3 * TRIAL_END_S) {
            die("the trial of kernels, process %d, cannot be ended: nvidia-smi and dmesg show the "
                "state of the GPU; --tune 0 starts no trial", (int)child);
        }
    }
    return status;
}

// Runs the trial and fills in the verdicts it finds. Returns false if a signal has ended it. A
// candidate at which the child hung, or ended by itself, has that as its verdict; one at which the
// user or the system killed the child, or the ranks' time ran out, has none.
static bool trial_supervise(KernelVerdicts *verdicts, const TrialShape &x, int capability) {
    enum { LOOK_MS = 100 };
    const int faults[] = {0, SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP, SIGSYS};
    // The other ranks wait for the whole trial, so it must end before --timeout, and a candidate
    // that hangs must be known as such before that.
    const double most_ms = this_rank.ranks > 1 ? 0.8 * rank_timeout_ms : HUGE_VAL;
    const double limit_ms = fmin(1e3 * trial_limit_s(), most_ms / 2);
    double look_ms = now_ms(), all_ms = 0, line_ms = 0;
    char text[4096];
    size_t n = 0;
    int pipe;
    const pid_t child = trial_start(&pipe, x, capability, *verdicts);
    if (child < 0) {
        return true;
    }
    bool open = true, late = false;
    while (open && !late && all_ms <= most_ms && !stop_signal) {
        struct pollfd ready = {pipe, POLLIN, 0};
        ssize_t got = 1;
        if (poll(&ready, 1, LOOK_MS) > 0) {
            got = read(pipe, &text[n], sizeof text - 1 - n);
            open = got > 0 || (got < 0 && errno == EINTR);
        }
        // A look counts for one second at most: both processes may be stopped, as by Ctrl-Z.
        const double now = now_ms(), passed = fmin(now - look_ms, 1000);
        const bool line = ready.revents && got > 0 && memchr(&text[n], '\n', (size_t)got);
        n += ready.revents && got > 0 ? (size_t)got : 0;
        look_ms = now;
        all_ms += passed;
        line_ms = line ? 0 : line_ms + passed;
        late = line_ms > limit_ms * (memchr(text, '\n', n) ? 1 : TRIAL_START_LINES);
        progress();
    }
    if (open) {
        kill(child, SIGKILL);  // the driver then ends the context and whatever hangs in it
    }
    close(pipe);
    const int status = trial_end(child), number = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    text[n] = 0;
    char *tried = trial_parse(text, verdicts, x, capability);
    if (tried && late) {
        snprintf(tried, sizeof(KernelVerdict), "hung: no answer in %.0f s", line_ms * 1e-3);
    } else if (tried && !open && std::count(faults, std::end(faults), number)) {
        snprintf(tried, sizeof(KernelVerdict),
                 number ? "crashed: signal %d" : "crashed: exit status %d",
                 number ? number : WEXITSTATUS(status));
    }
    return !stop_signal;
}

// Reads or, with `before`, writes the cache of verdicts. It has one line per candidate,
//   GPU, 132 SMs, driver 13000 580.65, build 0123456789abcdef| dq:64,1024,12,64=wgmma right 1.432
// A line that cannot be parsed is ignored; of two for the same candidate, the first counts. Writes
// those that `before` lacks.
static void trial_cache(KernelVerdicts *verdicts, const KernelVerdicts *before, const char *where,
                        const TrialShape &x, int capability) {
    FILE *file = cache_open("kernels", before ? "a" : "r");
    char line[512] = "";
    while (file && (before ? !line[0] : fgets(line, sizeof line, file) != nullptr)) {
        each_candidate(x, capability, [&](int kernel, int row, const char *name) {
            char head[352], *verdict = (*verdicts)[kernel][row].s;
            const int n = snprintf(head, sizeof head, "%s| %s:%d,%d,%d,%d=%s ", where,
                                   kernel_words[kernel], x.HS, x.T, x.NH, x.B, name);
            const size_t end = strcspn(line, "\n");
            if (before && verdict[0] && !(*before)[kernel][row].s[0]) {
                fprintf(file, "%s%s\n", head, verdict);
            } else if (!before && !verdict[0] && line[end] && strncmp(line, head, (size_t)n) == 0) {
                line[end] = 0;
                const bool fits = strlen(line + n) < sizeof(KernelVerdict);
                snprintf(verdict, sizeof(KernelVerdict), "%.71s",
                         fits && verdict_is(line + n) ? line + n : "");
            }
        });
        line[0] = 1;
    }
    if (file) {
        fclose(file);
    }
}

// What a trial's verdicts are for.
struct TrialPlace {
    TrialShape shape;
    int capability, candidates;
    size_t gpu;       // length of the first part of `where`, the GPU and driver
    char where[256];  // in the cache
};

// Sets the shape, GPU, driver and program that the trials for these settings are for. Calls nothing
// that creates a CUDA context. Returns false if there are none.
static bool trial_place(TrialPlace *place, const Settings *s) {
    cudaDeviceProp gpu;
    char version[64] = "";
    int driver = 0, count = 0;
    memset((void *)place, 0, sizeof *place);
    place->shape = {s->model.C / s->model.NH, s->T, s->model.NH,
                    trial_batch(s->B, s->T, s->model.C)};
    if (!s->tune || s->dtype != TYPE_BF16 || s->cache ||
        cudaGetDeviceCount(&count) != cudaSuccess || count == 0 ||
        cudaGetDeviceProperties(&gpu, this_rank.local_rank % count) != cudaSuccess ||
        cudaDriverGetVersion(&driver) != cudaSuccess) {
        return false;
    }
    place->capability = 10 * gpu.major + gpu.minor;
    FILE *file = fopen("/sys/module/nvidia/version", "r");
    if (file) {
        version[fread(version, 1, sizeof version - 1, file)] = 0;
        version[strcspn(version, "\n")] = 0;
        fclose(file);
    }
    char *where = place->where;
    place->gpu = (size_t)snprintf(where, sizeof place->where, "%.64s, %d SMs, driver %d %s",
                                  gpu.name, gpu.multiProcessorCount, driver, version);
    text_add(where, sizeof place->where, (int)place->gpu, ", build %016" PRIx64,
             fingerprint_program());
    each_candidate(place->shape, place->capability,
                   [&](int, int, const char *) { place->candidates++; });
    return place->candidates > 0;
}

// Program.try_kernels: writes a fingerprint of this rank's GPU and driver to rank_info and, on rank
// 0, the verdicts, from the cache or from a trial. Never tries under MPS, whose server ends the
// kernels of all its clients after a fault of one (CUDA Multi-Process Service, "Error
// Containment").
static void kernels_try(const Settings *s) {
    KernelVerdicts verdicts = {}, before;
    TrialPlace place;
    int unknown = 0;
    if (!trial_place(&place, s)) {
        return;
    }
    const TrialShape &x = place.shape;
    rank_info.kernels_where = fnv1a(fnv1a_start, place.where, place.gpu);
    if (this_rank.rank > 0) {
        return;
    }
    trial_cache(&verdicts, nullptr, place.where, x, place.capability);
    memcpy(&before, &verdicts, sizeof before);
    each_candidate(x, place.capability, [&](int kernel, int row, const char *) {
        unknown += !verdicts[kernel][row].s[0];
    });
    if (unknown && this_rank.local_rank == 0 && !getenv("CUDA_MPS_PIPE_DIRECTORY") &&
        access("/tmp/nvidia-mps/control", F_OK) != 0) {
        trial_supervise(&verdicts, x, place.capability)
            ? trial_cache(&verdicts, &before, place.where, x, place.capability)
            : (void)memcpy(&verdicts, &before, sizeof verdicts);
    }
    each_candidate(x, place.capability, [&](int kernel, int row, const char *) {
        KernelVerdict *v = &verdicts[kernel][row];
        *v = v->s[0] ? *v : KernelVerdict{"not tried"};
    });
    memcpy(rank_info.kernels, &verdicts, sizeof verdicts);
}

// Program.predict: the rates of the GPU's entry in the table of cards, with the gains that earlier
// trials have cached.
static const char *kernels_predict(Speed *speed, const Settings *s) {
    static const double tiles[] = {2, 3, 4};  // matmuls of a tile in each kernel
    KernelVerdicts verdicts = {};
    TrialPlace place;
    cudaDeviceProp gpu;
    double gain[ATTENTION_KERNELS] = {};  // 0: not tried
    const GpuEntry *card = nullptr;
    int device;
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaGetDeviceProperties(&gpu, device));
    for (const GpuEntry &entry : gpu_table) {
        const bool named = strstr(card_key(gpu.name).s, card_key(entry.name).s) != nullptr;
        const double share = (double)gpu.totalGlobalMem / 0x1p30 / entry.gib;
        card = named && gpu.multiProcessorCount == (int)entry.sms && fabs(share - 1) < 0.05
                   ? &entry : card;
    }
    if (!card || s->dtype == TYPE_FP32) {
        return nullptr;
    }
    const bool tries = trial_place(&place, s);
    if (tries) {
        trial_cache(&verdicts, nullptr, place.where, place.shape, place.capability);
    }
    for (int i = 0; i < ATTENTION_KERNELS * ATTENTION_VARIANTS; i++) {
        const char *verdict = verdicts[i / ATTENTION_VARIANTS][i % ATTENTION_VARIANTS].s;
        const double ratio = verdict_ratio(verdict), used = ratio > 1 / TUNE_GAIN ? ratio : 1;
        double *to = &gain[i / ATTENTION_VARIANTS];
        *to = verdict[0] || !tries ? fmax(*to, used) : *to;
    }
    const double back = tiles[1] / gain[1] + tiles[2] / gain[2];  // infinite if one is not tried
    const double gains[] = {gain[0], (tiles[1] + tiles[2]) / back};
    Rates rates = card_rates(card);
    const int unproved = rates_prove(&rates, card, s, gains);
    *speed = speed_predict(&rates, s);
    return unproved ? to_prove : "predicted for this GPU, not measured";
}

// Chooses each kernel's row: the fastest that is right or, if `wanted` is not null, the one that a
// checkpoint names (" forward=wgmma dq=wgmma"; row 0 is not named), however fast, if it is right
// here. Sets the engine's texts. Returns false if the choice is not the wanted one.
static bool kernels_choose(Engine *e, const char *wanted) {
    static char chosen[128], line[512];
    KernelVerdicts verdicts;
    const int unlike = rank_info.kernels_unlike;
    int k = 0, n = snprintf(line, sizeof line,
                            unlike   ? "attention; rank %d has another GPU or driver than rank 0:"
                            : wanted ? "attention, as in the checkpoint:"
                                     : "attention, tried once on this GPU:", unlike);
    memcpy(&verdicts, rank_info.kernels, sizeof verdicts);
    chosen[0] = 0;
    for (int kernel = 0; kernel < ATTENTION_KERNELS; kernel++) {
        double best = 1 / TUNE_GAIN;
        int choice = 0;
        char why[128] = "";
        for (int row = 1; row < ATTENTION_VARIANTS; row++) {
            const char *verdict = unlike ? "" : verdicts[kernel][row].s;
            const double ratio = verdict_ratio(verdict);
            const char *name = attention_variants[row].name;
            const bool named = wanted && kernel_is_named(wanted, ' ', kernel, name);
            if (wanted ? named && ratio > 0 : ratio > best) {
                best = ratio;
                choice = row;
                snprintf(why, sizeof why, ", %.2fx", ratio);
            } else if (verdict[0] && !choice) {
                snprintf(why, sizeof why, " (%s %s)", name, verdict);
            }
        }
        attention_choice[kernel] = choice;
        if (choice) {
            k = text_add(chosen, sizeof chosen, k, " %s=%s", kernel_words[kernel],
                         attention_variants[choice].name);
        }
        n = text_add(line, sizeof line, n, "%s %s %s%s", kernel ? ";" : "",
                     attention_names[kernel], attention_variants[choice].name, why);
    }
    e->kernels = chosen;
    e->kernels_line = rank_info.kernels_where || unlike ? line : nullptr;
    return !wanted || strcmp(chosen, wanted) == 0;
}

// -------------------------------------------------------------------------------------------------
// 43. States in and out
// States (weights, moments and gradients) are read and written as fp32 whatever their type on the
// device, so a checkpoint does not depend on a run's types. A StateView describes how a state is
// stored in memory, so that reading and writing are each implemented once.

// An array of `type` on the device. If `split`, it holds bf16 numbers, the high halves of fp32
// ones; the low halves are at `low` or, if that is null, on another rank.
struct StateView {
    Type type;
    char *data;
    uint16_t *low;
    bool split;
};

// A state used only in this chapter: the fp32 master weights kept in addition to weights of a
// narrow type. Weights are read from the master; writes go to the master and, rounded, to the
// weights.
enum { STATE_MASTER = STATE_GRADS + 1 };
static bool has_whole_master(const Settings *s) {
    return settings_has_master(s) && !s->split_master;
}

// Returns the buffer (BUF_*) that holds `state` (STATE_*) when it is in device memory.
static int state_buffer(int state) {
    static const int buffers[] = {BUF_WEIGHTS, BUF_M, BUF_V, BUF_GRADS, BUF_MASTER};
    return buffers[state];
}

// Returns a view of a span (a range of elements of one tensor) of `state` (STATE_*) in its backing
// store, the place where it is stored between uses.
static StateView gpu_state(const GpuNetwork *net, int state, const TensorSpan *span) {
    const Plan *p = net->plan;
    const Settings *s = &p->settings;
    const Kind kind = state == STATE_MASTER ? KIND_MASTER : state_kinds[state];
    Location location = tensor_store(s, kind, span->tensor, span->layer);
    location.buffer = state == STATE_V ? BUF_V : location.buffer;
    StateView v = {p->buffers[p->single[location.buffer]].type,
                   gpu_buffer<char>(net, location.buffer), nullptr,
                   state == STATE_WEIGHTS && s->split_master};
    v.data += (location.offset + span->first) * (int64_t)type_bytes(v.type);
    if (v.split) {
        const Location low = tensor_store(s, KIND_MASTER, span->tensor, span->layer);
        v.low = gpu_buffer<uint16_t>(net, low.buffer) + low.offset + span->first;
    }
    return v;
}

// Converts `count` numbers of `type` to real. If `low` is not null, the numbers are bf16 high
// halves of fp32 numbers, which are first joined with the low halves at `low`.
static void state_values(real *out, Type type, const char *numbers, const uint16_t *low,
                         int64_t count) {
    with_type(type, [&](auto element) {
        const decltype(element) *x = (const decltype(element) *)(const void *)numbers;
        for (int64_t i = 0; i < count; i++) {
            out[i] = low ? master_join(to_float(x[i]), low[i]) : to_float(x[i]);
        }
    });
}

// Reads `count` elements of the view as real.
static void state_read(real *out, const StateView &v, int64_t count, cudaStream_t stream) {
    const size_t bytes = count * type_bytes(v.type);
    char *host = (char *)alloc_zero(bytes, 1);
    uint16_t *low = v.low ? (uint16_t *)alloc_zero((size_t)count, sizeof(uint16_t)) : nullptr;
    copy_wait(host, v.data, bytes, stream);
    if (low) {
        copy_wait(low, v.low, count * sizeof *low, stream);
    }
    state_values(out, v.type, host, low, count);
    free(host);
    free(low);
}

// Writes `values` to the view, rounded to its type. A split master is kept bit for bit, so that a
// resumed run continues from the same fp32 weights.
static void state_write(const StateView &v, const real *values, int64_t count,
                        cudaStream_t stream) {
    const size_t bytes = count * type_bytes(v.type);
    char *host = (char *)alloc_zero(bytes, 1);
    uint16_t *low = v.low ? (uint16_t *)alloc_zero((size_t)count, sizeof(uint16_t)) : nullptr;
    with_type(v.type, [&](auto element) {
        for (int64_t i = 0; i < count; i++) {
            const float value = (float)values[i];
            if (v.split) {
                uint32_t bits;
                memcpy(&bits, &value, sizeof bits);
                ((uint16_t *)(void *)host)[i] = master_high(value);
                if (low) {
                    low[i] = (uint16_t)bits;
                }
            } else {
                ((decltype(element) *)(void *)host)[i] = from_float<decltype(element)>(value);
            }
        }
    });
    copy_wait(v.data, host, bytes, stream);
    if (low) {
        copy_wait(v.low, low, count * sizeof *low, stream);
    }
    free(host);
    free(low);
}

// A buffer with the layout of weights or of moments on several ranks. Vectors are whole on every
// rank.
struct RankState {
    int buffer;
    size_t bytes;  // of an element
    bool sharded;  // a rank holds only its own shards of the matrices
};

// Returns the location in the backing store of the first element of `r`, the range of a tensor's
// weights or gradients that this rank holds. If the store is sharded, it holds only this rank's
// shard of every block.
static Location range_location(const Settings *s, Kind state, int tensor, int layer,
                        const TensorRange *r) {
    Location location = tensor_store(s, state, tensor, layer);
    location.offset += r->first;
    if (tensor_divided(s, state, tensor)) {
        const Bucket b = bucket_at(&s->model, s->ranks, BUCKET_BLOCKS);
        location.offset -= layer * (b.count - b.part) + s->rank * b.part;
    }
    return location;
}

// Returns the address of element `first` of the span's tensor, which must be in `r`, in buffer `b`.
// Weights of blocks may be in BUF_WEIGHTS_STORE instead.
static char *rank_state_at(const Plan *p, const RankState &b, const TensorSpan &span,
                           const TensorRange &r, int64_t first) {
    Location location = {b.buffer, r.state};
    if (b.buffer == BUF_WEIGHTS) {
        location = range_location(&p->settings, KIND_WEIGHTS, span.tensor, span.layer, &r);
    }
    return (char *)plan_single(p, location.buffer) +
           (location.offset + first - r.first) * (int64_t)b.bytes;
}

// Reads the elements of a span into `host` from the ranks that hold them. The ranks broadcast their
// elements one after another, so all ranks must make the same call. With `own`, the elements are
// read from this rank, which must hold all of them.
static void rank_fetch(GpuNetwork *net, const RankState &b, const TensorSpan &span, bool own,
                       char *host) {
    Settings s = net->plan->settings;
    const RankComm *c = &net->ranks;
    if (own || !b.sharded || !tensor_is_matrix(span.tensor)) {
        const TensorRange r = own ? tensor_update_range(&s, span.tensor, span.layer)
                                  : tensor_range(&s, span.tensor, span.layer, 1);
        copy_wait(host, rank_state_at(net->plan, b, span, r, span.first),
                  (size_t)span.count * b.bytes, net->stream);
        return;
    }
    plan_tick(net->plan, 0);  // the staging buffer is alive at tick 0
    char *staging = gpu_buffer<char>(net, BUF_EXCHANGE);
    const size_t capacity = net->plan->buffers[net->plan->single[BUF_EXCHANGE]].bytes;
    stream_after(c->stream, net->stream, c->event);
    // A shard may begin or end anywhere in the span, and the span may be longer than the staging
    // buffer: all ranks loop over the same pieces, and each piece is sent by the rank that holds
    // it.
    for (int q = 0; q < c->ranks; q++) {
        s.rank = q;
        const TensorRange r = tensor_update_range(&s, span.tensor, span.layer);
        const int64_t end = min_i64(span.first + span.count, r.first + r.count);
        for (int64_t at = max_i64(span.first, r.first), n; at < end; at += n) {
            n = min_i64(end - at, (int64_t)(capacity / b.bytes));
            if (q == c->rank) {  // staged, because NCCL is not given pinned memory
                cuda_check(cudaMemcpyAsync(staging, rank_state_at(net->plan, b, span, r, at),
                                           (size_t)n * b.bytes, cudaMemcpyDefault, c->stream));
            }
            rank_call(c, RANK_BROADCAST, [&] {
                nccl_check(ncclBroadcast(staging, staging, (size_t)n * b.bytes, ncclUint8, q,
                                         c->comm, c->stream));
            });
            copy_wait(host + (at - span.first) * (int64_t)b.bytes, staging, (size_t)n * b.bytes,
                      c->stream);
        }
    }
}

// Reads a span of weights or moments on several ranks, as state_read does on one. Buffers are in
// bucket order, and other ranks' shards are fetched unless all of the span is this rank's `own`.
static void rank_read(GpuNetwork *net, int state, const TensorSpan &span, bool own, real *out) {
    const Settings *s = &net->plan->settings;
    const StateView v = gpu_state(net, state, &span);
    const bool sharded = (s->placement[KIND_MOMENTS] & PLACE_SHARD) != 0;
    const bool divided = tensor_divided(s, KIND_WEIGHTS, span.tensor) != 0;
    const RankState high = {state_buffer(state), type_bytes(v.type),
                            state == STATE_WEIGHTS ? divided : sharded};
    const RankState low = {BUF_MASTER, sizeof(uint16_t), sharded};
    char *host = (char *)alloc_zero((size_t)span.count, high.bytes);
    uint16_t *rest = v.split ? (uint16_t *)alloc_zero((size_t)span.count, sizeof *rest) : nullptr;
    rank_fetch(net, high, span, own, host);
    if (rest) {
        rank_fetch(net, low, span, own, (char *)rest);
    }
    state_values(out, v.type, host, rest, span.count);
    free(host);
    free(rest);
}

// Writes the elements of a span that this rank holds, from values that every rank has: all ranks
// read initial weights, files and checkpoints, so nothing needs to be sent.
static void rank_write(GpuNetwork *net, int state, const TensorSpan &span, const real *values) {
    const Plan *p = net->plan;
    const TensorRange own = tensor_update_range(&p->settings, span.tensor, span.layer);
    const TensorRange all = tensor_range(&p->settings, span.tensor, span.layer, 1);
    // Every rank holds the weights whole unless they are sharded; their low halves, like moments,
    // exist only for this rank's own shard. Weights outside it are written without low halves, but
    // rounded as if they had them.
    const bool divided = tensor_divided(&p->settings, KIND_WEIGHTS, span.tensor);
    const TensorRange *r = state == STATE_WEIGHTS && !divided ? &all : &own;
    const int64_t end = min_i64(r->first + r->count, span.first + span.count);
    for (int64_t at = max_i64(r->first, span.first), n; at < end; at += n) {
        const bool has = at >= own.first && at < own.first + own.count;
        n = min_i64(end, has ? own.first + own.count : at < own.first ? own.first : end) - at;
        StateView v = gpu_state(net, state, &span);
        const RankState high = {state_buffer(state), type_bytes(v.type), false};
        const RankState low = {BUF_MASTER, sizeof(uint16_t), false};
        v.data = rank_state_at(p, high, span, *r, at);
        v.low = v.split && has ? (uint16_t *)(void *)rank_state_at(p, low, span, own, at) : nullptr;
        state_write(v, values + at - span.first, n, net->stream);
    }
}

// Returns the divisor that unscales the gradients: the loss scale they were computed with, or 1 if
// the run has no loss scale. Do not call it between an update and the next step, because the update
// may have changed the loss scale.
static float gpu_loss_scale(const GpuNetwork *net) {
    float scale = 1;
    if (net->plan->settings.dtype == TYPE_FP16) {
        copy_wait(&scale, &gpu_buffer<GpuState>(net, BUF_STATE)->update.loss_scale, sizeof scale,
                  net->stream);
    }
    return scale;
}

// Engine.scale_loss: sets the loss scale to 2^log2, after `good_steps` steps with finite gradients.
// Sets all other fields of UpdateState to 0, such as the number of skipped updates, except
// scale_grows.
static void gpu_scale_loss(Engine *e, int log2, int64_t good_steps) {
    GpuNetwork *net = (GpuNetwork *)e->self;
    const UpdateState state = {0, 0, 0, 0, 0, ldexpf(1, log2), (int)good_steps,
                               e->scale_loss ? LOSS_SCALE_GROWS : 0, 0};
    copy_wait(&gpu_buffer<GpuState>(net, BUF_STATE)->update, &state, sizeof state, net->stream);
}

// Engine.read and Engine.read_own; gpu_write below is Engine.write. Gradients can only be read.
template <bool OWN>
static void gpu_read(Engine *e, int state, int64_t offset, real *out, int64_t count) {
    GpuNetwork *net = (GpuNetwork *)e->self;
    TensorSpan span = {};
    progress();
    gpu_await_all_weights(net);
    const real scale = state == STATE_GRADS ? gpu_loss_scale(net) : 1;
    const bool whole = state == STATE_WEIGHTS && has_whole_master(&net->plan->settings);
    state = whole ? (int)STATE_MASTER : state;
    memset(out, 0, (size_t)count * sizeof(real));
    while (span_next(&net->plan->settings.model, offset, count, &span)) {
        if (net->ranks.ranks > 1 && state != STATE_GRADS) {
            rank_read(net, state, span, OWN, out + span.at);
        } else {
            state_read(out + span.at, gpu_state(net, state, &span), span.count, net->stream);
        }
    }
    for (int64_t i = 0; i < count && scale != 1; i++) {
        out[i] /= scale;
    }
}

static void gpu_write(Engine *e, int state, int64_t offset, const real *values, int64_t count) {
    GpuNetwork *net = (GpuNetwork *)e->self;
    TensorSpan span = {};
    progress();
    gpu_await_all_weights(net);
    transfers_forget_weights(net->plan);
    e->zero = 0;
    if (state == STATE_WEIGHTS && has_whole_master(&net->plan->settings)) {
        gpu_write(e, STATE_MASTER, offset, values, count);
    }
    while (span_next(&net->plan->settings.model, offset, count, &span)) {
        if (net->ranks.ranks > 1) {
            rank_write(net, state, span, values + span.at);
        } else {
            state_write(gpu_state(net, state, &span), values + span.at, span.count, net->stream);
        }
    }
}

// Engine.gather: an all-gather of `mine` on the ranks' stream, in pieces of RANK_STATUS_BYTES. It
// carries the few numbers on which ranks agree between steps, so the host may wait for it.
static void gpu_gather(Engine *e, void *all, const void *mine, size_t bytes) {
    const GpuNetwork *net = (GpuNetwork *)e->self;
    const RankComm *c = &net->ranks;
    char *statuses = gpu_buffer<char>(net, BUF_RANK_STATUS);
    char *host = (char *)alloc_zero((size_t)c->ranks, RANK_STATUS_BYTES);
    for (size_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < RANK_STATUS_BYTES ? bytes - at : (size_t)RANK_STATUS_BYTES;
        copy_wait(statuses + c->rank * RANK_STATUS_BYTES, (const char *)mine + at, n, c->stream);
        rank_gather(c, statuses, RANK_STATUS_BYTES);
        copy_wait(host, statuses, (size_t)c->ranks * RANK_STATUS_BYTES, c->stream);
        for (int r = 0; r < c->ranks; r++) {
            memcpy((char *)all + (size_t)r * bytes + at, host + r * RANK_STATUS_BYTES, n);
        }
    }
    free(host);
}

// -------------------------------------------------------------------------------------------------
// 44. Opening and warm-up
// Opening the engine allocates memory, fills the tables, and runs every kernel and collective once
// as a warm-up.

// Frees everything except the plan. Queued work must finish first, because it uses the memory.
static void gpu_close(Engine *e) {
    GpuNetwork *net = (GpuNetwork *)e->self;
    stream_wait(net->stream);
    gpu_matmul_close();
    if (net->ranks.ranks > 1) {
        rank_close(&net->ranks, &net->plan->settings);
    }
    for (int i = 0; i < 2; i++) {
        cuda_check(cudaEventDestroy(net->uploaded[i]));
    }
    offload_close(&net->transfers);
    arena_close(net->plan);
    cuda_check(cudaStreamDestroy(net->stream));
    free(net->counts);
    free(net->ranges);
    free(net->slices);
    free(net);
    e->self = nullptr;
}

// Fills a table with one range per tensor and layer, of bucket `bucket` or, if that is -1, of all:
// the elements that AdamW updates on this rank or, with `parts`, this rank's own shard at any ZeRO
// stage. Empty ranges are left out. Returns the number of ranges.
static int ranges_fill(ParamRange *ranges, const Settings *s, bool parts, int bucket) {
    const Model *m = &s->model;
    int count = 0;
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            const TensorRange r =
                parts ? tensor_range(s, tensor, l, 0) : tensor_update_range(s, tensor, l);
            const Location param = range_location(s, KIND_WEIGHTS, tensor, l, &r);
            const Location grad = range_location(s, KIND_GRADIENTS, tensor, l, &r);
            ParamRange *range = &ranges[count];
            range->param = (size_t)param.offset;
            range->state = (size_t)r.state;
            range->grad = (size_t)grad.offset;
            range->index = (size_t)(l * tensor_size(m, tensor) + r.first);
            range->count = (size_t)r.count;
            range->stream = (uint32_t)(RNG_ROUND + tensor);
            range->two_dimensional = tensor_is_matrix(tensor);
            range->in_store = (param.buffer == BUF_WEIGHTS_STORE ? PARAM_IN_STORE : 0) |
                             (grad.buffer == BUF_GRADS_STORE ? GRAD_IN_STORE : 0);
            int64_t at;
            const bool here = bucket < 0 || tensor_bucket(m, tensor, l, &at) == bucket;
            count += here && r.count > 0;
        }
    }
    return count;
}

// Builds the tables of ranges for AdamW and for the norm, which gpu_begin copies to BUF_TENSORS; on
// a single rank they are one table.
static void gpu_ranges_open(GpuNetwork *net) {
    const Settings *s = &net->plan->settings;
    net->ranges = (ParamRange *)alloc_zero(2 * (size_t)model_tensors(&s->model) + 1,
                                           sizeof(ParamRange));
    const int sharded = s->placement[KIND_MOMENTS] & PLACE_SHARD;
    net->slice_count = sharded ? model_buckets(&s->model) : 1;
    net->slices = (UpdateSlice *)alloc_zero((size_t)net->slice_count, sizeof(UpdateSlice));
    for (int i = 0; i < net->slice_count; i++) {
        UpdateSlice *slice = &net->slices[i];
        slice->first = net->range_count;
        slice->count = ranges_fill(net->ranges + slice->first, s, false, sharded ? i : -1);
        slice->chunks = param_ranges_chunk(net->ranges + slice->first, slice->count);
        net->range_count += slice->count;
    }
    net->norm_count = net->range_count;
    net->norm_chunks = net->slices[0].chunks;
    if (s->ranks > 1) {
        net->norm_count = ranges_fill(net->ranges + net->range_count, s, true, -1);
        net->norm_chunks = param_ranges_chunk(net->ranges + net->range_count, net->norm_count);
    }
}

// Initialises device memory for the first step: uploads the table of tensor ranges, and zeroes
// weights, master weights and moments. The warm-up leaves them at zero: its weights are zero, so
// every gradient is. Pinned memory is zero already, except in test builds, which fill it with NaN.
static void gpu_begin(GpuNetwork *net) {
    gpu_await_all_weights(net);
    // With several ranks the norm has its own table, after AdamW's.
    const int norm_rows = net->plan->settings.ranks > 1 ? net->norm_count : 0;
    copy_wait(gpu_buffer<ParamRange>(net, BUF_TENSORS), net->ranges,
              (net->range_count + norm_rows) * sizeof(ParamRange), net->stream);
    for (int id : {BUF_WEIGHTS, BUF_WEIGHTS_STORE, BUF_MASTER, BUF_M, BUF_V, BUF_STATE,
                   BUF_RANK_STATUS, BUF_EXCHANGE}) {
        const int at = net->plan->single[id];
        if (at >= 0 && (net->plan->buffers[at].placement == PLACE_DEVICE || GPT2_POISON)) {
            cuda_check(cudaMemsetAsync(gpu_buffer<char>(net, id), 0, net->plan->buffers[at].bytes,
                                       net->stream));
        }
    }
}

// Chooses the matmuls' algorithms (chapter Matmul, 5) after the warm-up has run every matmul once.
// Timing uses the part of the arena before or after the workspace, whichever is larger, and no
// other memory; gpu_begin restores the contents.
static void gpu_tune(Engine *e) {
    GpuNetwork *net = (GpuNetwork *)e->self;
    Plan *p = net->plan;
    if (p->settings.tune && matmul_can_time() && matmul_choices_load() > 0) {
        const Buffer *workspace = &p->buffers[p->single[BUF_MATMUL]];
        const size_t end = (workspace->offset + workspace->bytes + 255) / 256 * 256;
        const size_t after = p->device_bytes > end ? p->device_bytes - end : 0;
        char *base = p->base[PLACE_DEVICE];
        if (!p->settings.quiet) {  // keeps generated text on stdout clean
            FILE *to = p->settings.forward ? stderr : stdout;
            fprintf(to, "timing matmul algorithms for this GPU, once\n");
            fflush(to);
        }
        cuda_check(cudaDeviceSynchronize());  // the warm-up's transfers may be in flight
        arena_lend(p);
        workspace->offset > after ? matmul_tune(base, workspace->offset, net->stream)
                                  : matmul_tune(base + end, after, net->stream);
        arena_return(p);
        transfers_forget_weights(p);
        gpu_begin(net);
    }
    matmul_choices_export();
    e->matmul = matmul_library.choices;
}

// Runs a step of two micro-steps, an evaluation and a sample on all-zero inputs. There are two
// micro-steps because an accumulating matmul (beta = 1) may use a different cuBLASLt kernel from
// one that overwrites its output (beta = 0).
static void gpu_warm_up_step(Engine *e) {
    GpuNetwork *net = (GpuNetwork *)e->self;
    const Settings *s = &net->plan->settings;
    Token *zeros = (Token *)alloc_zero(2 * (size_t)s->B * s->T, sizeof(Token));
    real *logits = (real *)alloc_zero((size_t)s->model.V, sizeof(real));
    Options o;
    options_default(&o);
    if (s->cache) {  // a chunk of a prompt, then one token
        gpu_extend(e, logits, zeros, 0, settings_rows(s));
        gpu_extend(e, logits, zeros, settings_rows(s) - 1, 1);
    } else {
        if (!s->forward) {
            gpu_micro_step(e, zeros, zeros, 0, 2);
            gpu_micro_step(e, zeros, zeros, 1, 2);
            gpu_update(e, &o, 0, HUGE_VAL, 0);
        }
        gpu_forward_loss(e, nullptr, zeros, zeros);
        gpu_logits(e, logits, zeros, 1);
    }
    if (s->ranks > 1) {
        gpu_replica(e);
    }
    if (s->ranks > 1 && !s->forward) {  // as when saving: makes NCCL connect and allocate
        gpu_read<false>(e, STATE_M, tensor_offset(&s->model, WTE, 0), logits, 1);
    }
    free(zeros);
    free(logits);
}

// With several ranks, runs newly chosen kernels once without collectives: see 3 of chapter Exchange
// between ranks.
static void rank_rehearse(Engine *e) {
    GpuNetwork *net = (GpuNetwork *)e->self;
    if (net->ranks.ranks > 1) {
        gpu_begin(net);  // otherwise the data gathered last would be read as step statuses
        net->ranks.on = 0;
        gpu_warm_up_step(e);
        net->ranks.on = 1;
        gpu_scale_loss(e, LOSS_SCALE_LOG2, 0);  // gpu_begin has cleared the loss scale
    }
}

// Engine.set_algorithms and Engine.set_kernels.
static int gpu_set_algorithms(Engine *e, const char *choices) {
    const bool taken = matmul_choices_import(choices);
    rank_rehearse(e);
    return taken;
}

static int gpu_set_kernels(Engine *e, const char *kernels) {
    const bool taken = kernels_choose(e, kernels);
    rank_rehearse(e);
    return taken;
}

// Makes all ranks adopt rank 0's matmul algorithms: a checkpoint stores one rank's choices, and a
// run resumed from it must have the bits of an uninterrupted one. Timings differ slightly between
// GPUs, so ranks that choose for themselves may choose differently. Even if no rank has timed any,
// choices loaded from the file have not been run yet, and each rank must first run them by itself.
static void rank_choices_share(Engine *e) {
    GpuNetwork *net = (GpuNetwork *)e->self;
    char *all = (char *)alloc_zero((size_t)net->ranks.ranks, MATMUL_TEXT);
    gpu_gather(e, all, matmul_library.choices, MATMUL_TEXT);
    const bool met = !net->plan->settings.tune || !matmul_can_time();
    if ((!met || strcmp(all, matmul_library.choices) != 0) && !gpu_set_algorithms(e, all)) {
        fprintf(stderr, "%s: rank 0's matmul algorithms are for another GPU or cuBLASLt: this rank "
                "keeps its own, and a resumed run may differ in rounding\n", program_name);
    }
    free(all);
}

// Loads every kernel by launching it, and plans every matmul, so that the memory taken by libraries
// can be measured and failures occur before the run. With several ranks, each does this once by
// itself, so that no kernel is loaded while a collective waits for other ranks, and once together
// with the others, so that NCCL has allocated all of its memory.
static void gpu_warm_up(Engine *e) {
    GpuNetwork *net = (GpuNetwork *)e->self;
    const Settings *s = &net->plan->settings;
    static size_t before;  // free bytes before the first engine; libraries outlive engines
    size_t free_bytes, with_nccl, total_bytes;
    before = before ? before : device_memory.free_bytes;
    gpu_begin(net);
    gpu_scale_loss(e, LOSS_SCALE_LOG2, 0);
    gpu_warm_up_step(e);
    gpu_tune(e);  // before memory is measured: timing loads kernels too
    cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes));
    if (s->ranks > 1) {
        rank_connect(&net->ranks, s->ctas);
        rank_choices_share(e);
        gpu_warm_up_step(e);
    }
    gpu_scale_loss(e, LOSS_SCALE_LOG2, 0);  // resets the counters that the warm-up advanced
    cuda_check(cudaMemGetInfo(&with_nccl, &total_bytes));
    device_memory.library_bytes = size_less(before, free_bytes + net->plan->device_bytes);
    device_memory.nccl_bytes = size_less(free_bytes, with_nccl);
    library_keep(device_memory.library_bytes);
    matmul_library.settled = true;
}

// Sets the engine's methods and capabilities.
static void gpu_methods(Engine *e, GpuNetwork *net) {
    const Settings *s = &net->plan->settings;
    e->self = net;
    e->states = s->forward ? STATE_WEIGHTS + 1 : STATES;
    e->zero = 1;  // gpu_begin zeroes all states
    e->micro_step = gpu_micro_step;
    e->prepare = gpu_prepare;
    e->update = gpu_update;
    e->forward_loss = gpu_forward_loss;
    e->logits = gpu_logits;
    e->extend = gpu_extend;
    if (s->dtype == TYPE_FP16) {
        e->scale_loss = gpu_scale_loss;
        e->weight_most = FP16_MOST;
    }
    e->read = gpu_read<false>;
    e->read_own = gpu_read<true>;
    e->write = gpu_write;
    e->close = gpu_close;
    e->set_algorithms = gpu_set_algorithms;
    e->set_kernels = gpu_set_kernels;
    if (s->ranks > 1) {
        e->gather = gpu_gather;
        e->replica = gpu_replica;
    }
}

// Opens the engine and allocates the plan's memory on the current GPU. The caller owns the plan,
// which outlives the engine.
static void gpu_open(Engine *e, Plan *p) {
    GpuNetwork *net = (GpuNetwork *)alloc_zero(1, sizeof *net);
    const Settings *s = &p->settings;
    const int rows = settings_rows(s);
    const int64_t N = (int64_t)s->B * rows, C = s->model.C;
    net->plan = p;
    plan_refuse(net->plan, net->plan->device_bytes, device_available());
    // A stream that does not synchronise with the default stream, on which libraries may queue
    // work.
    cuda_check(cudaStreamCreateWithFlags(&net->stream, cudaStreamNonBlocking));
    arena_open(net->plan, net->stream);
    offload_open(&net->transfers, net->plan, net->stream, &net->ranks);
    with_types(s, [&](auto element, auto grad) {
        using E = decltype(element);
        net->stage = gpu_stage<E, decltype(grad)>;
        p->transfer = rank_transfer<decltype(grad)>;  // on one rank like gpu_transfer
        // train_gpt2.c plans without knowing the kernels; here the plan is checked against them.
        const size_t partials = p->buffers[p->single[BUF_PARTIALS]].bytes;
        check(gpu_layernorm_backward_bytes((int)N, (int)C) <= partials &&
                  gpu_bias_backward_bytes((int)N, (int)(4 * C)) <= partials &&
                  gpu_attention_backward_bytes<E>(s->B, rows, (int)C, s->model.NH) <= partials &&
                  gpu_grad_square_sum_bytes() <= partials,
              "the plan's buffer for partial sums is too small");
    });
    gpu_matmul_open(gpu_buffer<char>(net, BUF_MATMUL), (size_t)s->workspace);
    int *pinned = gpu_buffer<int>(net, BUF_PINNED);
    check(batch_ints(N) == 2 * N + (int64_t)embedding_plan_ints((int)N),
          "batch_ints and embedding_plan_ints disagree");
    for (int i = 0; i < 2; i++) {
        net->pinned[i] = batch_at(pinned + i * batch_ints(N), (int)N);
        cuda_check(cudaEventCreateWithFlags(&net->uploaded[i], cudaEventDisableTiming));
    }
    net->result = (GpuState *)(void *)(pinned + 2 * batch_ints(N));
    // Kept for the run: nothing is allocated between steps.
    net->counts = (int *)alloc_zero((size_t)s->model.V, sizeof(int));
    gpu_ranges_open(net);
    net->ranks.ranks = s->ranks;
    if (s->ranks > 1) {
        rank_open(&net->ranks, s);
        net->ranks.staging = gpu_buffer<char>(net, BUF_EXCHANGE);
        net->ranks.capacity = p->buffers[p->single[BUF_EXCHANGE]].bytes;
    }
    gpu_methods(e, net);
    // Last, when all methods are set: failures occur here, before the run begins.
    gpu_warm_up(e);
}

// -------------------------------------------------------------------------------------------------
// 45. Peaks, --check and --compare
// The peak throughput of this GPU, for "% of peak": dense operations of the run's type per clock
// and SM, 16-bit types summed in fp32 (NVIDIA's architecture white papers; for sm_86, 89 and 120
// the rate of GeForce cards, half that of workstation cards; for sm_75 the rate of a T4, twice that
// of GeForce cards; for 110, Thor, and 121, GB10, a quarter of the data sheets' dense fp4), times
// the number of SMs, times the highest clock that the driver reports. A data sheet may assume a
// lower clock: an H100 reports 1,980 MHz, which gives 1,070 TFLOP/s in bf16, but its data sheet
// says 989.

struct PeakRow {
    int capability;              // 10 * major + minor
    int half_flops, fp32_flops;  // per SM and clock; a fused multiply-add is two
};
static const PeakRow peak_rows[] = {
    {75, 1024, 128}, {80, 2048, 128},  {86, 512, 256},   {87, 1024, 256}, {89, 512, 256},
    {90, 4096, 256}, {100, 8192, 256}, {103, 8192, 256}, {110, 8192, 256}, {120, 512, 256},
    {121, 1024, 256},
};

// Writes the name of the current GPU, the run's type and the peak throughput for it to the engine.
// Ends the run if the GPU has no instructions for that type.
static void device_describe(Engine *e, const Settings *s) {
    int device = 0, clock_khz = 0, peak = 0;
    cudaDeviceProp properties;
    Element type;
    with_type(s->dtype, [&](auto element) { type = traits<decltype(element)>; });
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaGetDeviceProperties(&properties, device));
    cuda_check(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device));
    const int capability = 10 * properties.major + properties.minor;
    if (capability < type.capability) {
        die("--dtype %s: %s (compute capability %d.%d) does not support it; use --dtype %s",
            type.name, properties.name, properties.major, properties.minor,
            capability < traits<__half>.capability ? "fp32" : "fp16");
    }
    for (const PeakRow &row : peak_rows) {
        if (row.capability == capability) {
            peak = type.type == TYPE_FP32 ? row.fp32_flops : row.half_flops;
        }
    }
    e->peak_flops = 1e3 * clock_khz * peak * properties.multiProcessorCount * s->ranks;
    e->peak_source = peak ? "dense matmuls at this GPU's maximum clock"
                          : "this GPU is not in the table of peaks";
    snprintf(e->device, sizeof e->device, "%.44s (sm_%d%d), %s", properties.name, properties.major,
             properties.minor, type.name);
}

// Returns the norm of got - want, n numbers each, divided by the norm of `want` unless that is 0. A
// NaN in either array gives NaN.
static double relative_error(const real *got, const real *want, int64_t n) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        difference += ((double)got[i] - (double)want[i]) * ((double)got[i] - (double)want[i]);
        norm += (double)want[i] * (double)want[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

// Copies state `state` of all tensors from one engine to the other, rounded to `type`.
static void engine_copy(Engine *to, Engine *from, int state, const Model *m, Type type) {
    int64_t all = tensor_offset(m, TENSORS, 0);
    real *piece = (real *)alloc_zero(PIECE, sizeof(real));
    for (int64_t i = 0; i < all; i += PIECE) {
        int64_t count = min_i64(PIECE, all - i);
        from->read(from, state, i, piece, count);
        with_type(type, [&](auto element) {
            for (int64_t k = 0; k < count; k++) {
                piece[k] = to_float(from_float<decltype(element)>((float)piece[k]));
            }
        });
        to->write(to, state, i, piece, count);
    }
    free(piece);
}

// Returns the relative error, compared with engine `want`, of the gradient of `tensor` in engine
// `got`, all layers together.
static double gradient_error(Engine *got, Engine *want, const Model *m, int tensor) {
    int64_t size = tensor_size(m, tensor), copies = tensor_copies(m, tensor);
    real *a = (real *)alloc_zero((size_t)(size * copies), sizeof(real));
    real *b = (real *)alloc_zero((size_t)(size * copies), sizeof(real));
    for (int l = 0; l < copies; l++) {
        got->read(got, STATE_GRADS, tensor_offset(m, tensor, l), a + l * size, size);
        want->read(want, STATE_GRADS, tensor_offset(m, tensor, l), b + l * size, size);
    }
    double error = relative_error(a, b, size * copies);
    free(a);
    free(b);
    return error;
}

// --check: runs one batch of the run's data through the GPU and through the CPU reference, from the
// same weights. Prints the relative difference of the loss and of every gradient; returns 1 if one
// exceeds the type's tolerance: fp32 1e-5, fp16 1e-2, bf16 5e-2. These detect errors in the
// mathematics, which are larger than rounding. (The tests are stricter: for both 16-bit types they
// allow at most twice the error of a naive computation in that type.)
static int command_check(Run *run, const Program *program) {
    const Model *m = &run->s.model;
    const Type type = run->s.dtype;
    const double tolerance = type == TYPE_FP32 ? 1e-5 : type == TYPE_FP16 ? 1e-2 : 5e-2;
    Settings reference = run->s;
    Plan reference_plan;
    Engine cpu;
    int failed = 0;
    reference.gpu = reference.split_master = 0;
    memset(reference.placement, 0, sizeof reference.placement);
    settings_recompute(&reference, RECOMPUTE_NONE, m->L);
    reference.dtype = reference.grad_dtype = reference.moment_dtype = TYPE_REAL;
    plan_build(&reference_plan, &reference);
    program->open(&run->engine, &run->plan);
    cpu_open(&cpu, &reference_plan);
    engine_initialise(&run->engine, m, (uint64_t)run->o.seed);
    engine_copy(&cpu, &run->engine, STATE_WEIGHTS, m, run->s.dtype);
    if (!dataset_batch(&run->train, 0, run->s.B, run->inputs, run->targets)) {
        die("%s", run->train.problem);
    }
    run->engine.micro_step(&run->engine, run->inputs, run->targets, 0, 1);
    cpu.micro_step(&cpu, run->inputs, run->targets, 0, 1);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        double error = gradient_error(&run->engine, &cpu, m, tensor);
        bool ok = error <= tolerance;
        printf("check  d%-10s relative difference %.2e  tolerance %.0e  %s\n",
               tensor_table[tensor].name, error, tolerance, ok ? "ok" : "FAILED");
        failed += !ok;
    }
    double gpu_loss = run->engine.update(&run->engine, &run->o, 0, HUGE_VAL, 0).loss;
    double cpu_loss = cpu.update(&cpu, &run->o, 0, HUGE_VAL, 0).loss,
           error = fabs(gpu_loss / cpu_loss - 1);
    bool ok = error <= tolerance;
    printf("check  loss        %.6f, CPU %.6f: relative difference %.2e  %s\n", gpu_loss,
           cpu_loss, error, ok ? "ok" : "FAILED");
    cpu.close(&cpu);
    run->engine.close(&run->engine);
    plan_free(&reference_plan);
    plan_free(&run->plan);
    return failed || !ok;
}

// --compare: runs the same steps with -r none and with -r block (or the levels given by the user).
// Prints planned and library memory, and the median time of a step, as a table or as JSON.
static int command_compare(Run *run, const Program *program) {
    enum { WARM = 2, STEPS = 9 };
    const Model *m = &run->s.model;
    Settings two[2] = {run->s, run->s};
    settings_recompute(&two[0], RECOMPUTE_NONE, m->L);
    if (recompute_cost(&two[1]) == 0) {
        settings_recompute(&two[1], RECOMPUTE_BLOCK, m->L);
    }
    double middle[2], tokens = (double)run->s.B * run->s.T;
    size_t bytes[2];
    const bool json = run->o.json;
    json ? printf("{\"query\":\"compare\",\"runs\":[")
         : printf("%-14s %14s %14s %10s %12s\n", "", "planned", "libraries", "ms/step", "tokens/s");
    for (int k = 0; k < 2; k++) {
        double ms[WARM + STEPS];
        run->s = two[k];
        plan_free(&run->plan);
        plan_build(&run->plan, &run->s);
        bytes[k] = run->plan.device_bytes;
        program->open(&run->engine, &run->plan);
        engine_initialise(&run->engine, m, (uint64_t)run->o.seed);
        for (int i = 0; i < WARM + STEPS; i++) {
            double start = now_ms();
            if (!dataset_batch(&run->train, (int64_t)i * run->s.B % run->train.windows, run->s.B,
                               run->inputs, run->targets)) {
                die("%s", run->train.problem);
            }
            run->engine.micro_step(&run->engine, run->inputs, run->targets, 0, 1);
            run->engine.update(&run->engine, &run->o, run->o.lr, HUGE_VAL, i);
            ms[i] = now_ms() - start;
        }
        run->engine.close(&run->engine);
        middle[k] = median(ms + WARM, STEPS);
        const int64_t rate = (int64_t)(tokens / middle[k] * 1e3);
        if (json) {
            printf("%s\n{\"recompute\":\"%s\",\"device_bytes\":%" PRIu64
                   ",\"library_bytes\":%" PRIu64 ",\"ms_per_step\":%.3f,\"tokens_per_s\":%" PRId64
                   "}", k ? "," : "", recompute_text(&run->s).s, (uint64_t)bytes[k],
                   (uint64_t)device_memory.library_bytes, middle[k], rate);
            continue;
        }
        printf("-r %-11s %14s %14s %10.2f %12s\n", recompute_text(&run->s).s,
               bytes_text((double)bytes[k]).s, bytes_text((double)device_memory.library_bytes).s,
               middle[k], count_text(rate).s);
    }
    const double memory = (double)bytes[1] / (double)bytes[0], time = middle[1] / middle[0];
    if (json) {
        printf("],\"memory_ratio\":%.4f,\"time_ratio\":%.4f}\n", memory, time);
    } else {
        printf("-r %s takes %.1f %% of the memory and %.2f x the time (median of %d steps)\n",
               recompute_text(&run->s).s, 100 * memory, time, STEPS);
    }
    plan_free(&run->plan);
    return 0;
}

static int gpu_command(Run *run, const Program *program) {
    return run->o.check ? command_check(run, program) : command_compare(run, program);
}

// -------------------------------------------------------------------------------------------------
// 46. main
// The program of train_gpt2.c with the GPU engine and two commands of its own: --check compares one
// batch with the CPU reference, --compare runs the same steps with and without recomputation.

// Opens the engine and completes its description.
static void gpu_engine_open(Engine *e, Plan *p) {
    const Settings *s = &p->settings;
    memset(e, 0, sizeof *e);
    device_describe(e, s);
    kernels_choose(e, nullptr);
    gpu_open(e, p);
    size_t length = strlen(e->device);
    snprintf(e->device + length, sizeof e->device - length,
             "; cuBLASLt %zu; libraries took about %s", cublasLtGetVersion(),
             bytes_text((double)device_memory.library_bytes).s);
    length = strlen(e->device);
    if (s->ranks > 1) {
        snprintf(e->device + length, sizeof e->device - length, ", NCCL %s of %s reserved",
                 bytes_text((double)device_memory.nccl_bytes).s,
                 bytes_text((double)nccl_estimate_bytes(s)).s);
    }
}

// Ends the run if the kernels do not support its settings, before anything is opened or measured.
static void gpu_settings_check(const Settings *s) {
    const Model *m = &s->model;
    const int HS = m->C / m->NH;
    if (m->C % CHANNELS_UNIT != 0 || m->C > CHANNELS_MAX ||
        (s->dtype != TYPE_FP32 && (HS % HEAD_UNIT != 0 || HS > HEAD_MAX)) || HS > HEAD_MAX_FP32) {
        die("--model (-e): %d channels in %d heads: on a GPU, channels must be a multiple of %d, "
            "at most %d, in heads of at most %d; with 16 bits of at most %d, a multiple of %d",
            m->C, m->NH, CHANNELS_UNIT, CHANNELS_MAX, HEAD_MAX_FP32, HEAD_MAX, HEAD_UNIT);
    }
    if ((int64_t)m->maxT * m->C > POSITIONS_MAX) {
        die("--model (-e): %d positions x %d channels, more than the %d elements supported on a "
            "GPU", m->maxT, m->C, POSITIONS_MAX);
    }
    if (settings_rows(s) > LENGTH_MAX) {
        die("--seq-len (-t): %d tokens, more than the %d supported on a GPU", s->T, LENGTH_MAX);
    }
    if (s->B > GRID_YZ_MAX) {
        die("--batch (-b): %d sequences, more than the %d supported on a GPU", s->B, GRID_YZ_MAX);
    }
}

int train_gpt2cu_main(int argc, char **argv);
// The GPU program. Returns the exit status.
int train_gpt2cu_main(int argc, char **argv) {
    static char built[64];
    snprintf(built, sizeof built, "CUDA %d.%d%s%s%s", CUDART_VERSION / 1000,
             CUDART_VERSION % 1000 / 10, CUDA_CPU ? " emulated on the CPU" : "",
             GPT2_NCCL ? ", NCCL" : "", GPT2_MPI ? ", MPI" : "");
    static const Program program = {
        .name = CUDA_CPU ? "train_gpt2cu_cpu" : "train_gpt2cu",
        .default_model = "d12",
        .gpu = 1,
        .open = gpu_engine_open,
        .available = device_available,
        .total = device_total,
        .library = device_library_bytes,
        .command = gpu_command,
        .prove = kernels_prove,
        .try_kernels = kernels_try,
        .predict = kernels_predict,
        .refuse = gpu_settings_check,
        .built = built,
        .device = device_name,
        .lacks_bf16 = device_lacks_bf16,
        .ranks_start = GPT2_NCCL ? ranks_start : nullptr,
        .ranks_handshake = ranks_shake_hands,
        .alone = "this program was built without NCCL",
        .link = device_link,
        .starts = CUDA_CPU ? "emulated: try -e l2h2c64t64" : "starting CUDA",
    };
    return program_main(&program, argc, argv);
}

#if !GPT2_NO_MAIN
int main(int argc, char **argv) {
    // With lazy loading, a kernel is loaded at its first launch. The warm-up launches every kernel
    // that the run uses, and the many others are never loaded, which saves time and device memory.
    // CUDA reads this variable when its first function is called; drivers before 12.2 load
    // everything at once by default (CUDA C++ Programming Guide, "Lazy Loading").
    setenv("CUDA_MODULE_LOADING", "LAZY", 0);
    threads_start(argv);
    return train_gpt2cu_main(argc, argv);
}
#endif
