// emu_fail.h: makes one call of CUDA, cuBLASLt or NCCL fail once.
//
//     EMU_CALLS=FILE              appends a line "PROCESS FUNCTION LINE" to FILE for every call
//     EMU_FAIL="P FUNCTION L N"   in process P, call N (from 1) of this function on line L of the
//                                 source does nothing and returns an error
//
// Process 0 is the initial process, and process p * 16 + k the k-th child that process p forks. A
// launch counts as a call to cudaLaunchKernel. Functions that cannot fail (cudaGetErrorString) and
// cudaGetLastError are not counted. dev/check/faults.py makes each call of a run fail.
//
// Each function is wrapped in a macro of the same name, which records the line of the call. Within
// these headers, which precede the macros, the functions call each other directly.
#pragma once
#include "emu_core.h"
#include <map>
#include <mutex>
#include <pthread.h>
#include <string>
#include <sys/file.h>

namespace emu {

struct Failures {
    const char *fail = getenv("EMU_FAIL"), *calls = getenv("EMU_CALLS");
    int process = 0, forked = 0, fd = -1;
    std::map<std::string, long> counts;  // calls by "PROCESS FUNCTION LINE"
    std::mutex lock;                     // a program's watchdog thread makes calls too
    Failures();
};
inline Failures failures;
inline Failures::Failures() {
    if (calls) {
        fd = open(calls, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    }
    if (fail || calls) {
        pthread_atfork([] { failures.lock.lock(); failures.forked++; },
                       [] { failures.lock.unlock(); },
                       [] {
                           failures.process = failures.process * 16 + failures.forked;
                           failures.forked = 0;
                           failures.counts.clear();
                           failures.lock.unlock();
                       });
    }
}

// Counts a call. Returns true if it is the one that must fail.
inline bool fails(const char *function, int line) {
    Failures &f = failures;
    if (!f.fail && !f.calls) {
        return false;
    }
    std::lock_guard<std::mutex> locked(f.lock);
    const std::string call =
        std::to_string(f.process) + " " + function + " " + std::to_string(line);
    if (f.fd >= 0 && write(f.fd, (call + "\n").c_str(), call.size() + 1) < 0) {
        fail("cannot write %s,", f.calls);
    }
    return f.fail && call + " " + std::to_string(++f.counts[call]) == f.fail;
}

// Returns a function that takes a call's arguments and returns `error`. The compiler must assume
// that it writes to the memory they point to, or it would warn about uninitialized variables.
template <class E> inline auto failure(E error) {
    return [error](auto... arguments) {
        const void *each[] = {nullptr, (const void *)&arguments...};
        asm volatile("" : : "r"(each) : "memory");
        return error;
    };
}

}  // namespace emu

// Returns the error of a launch on this line, for a program that checks launches.
inline cudaError_t emu_launch_error(int line) {
    return emu::fails("cudaLaunchKernel", line) ? emu::remember(cudaErrorUnknown) : cudaSuccess;
}

#define EMU_CALL(error, function, ...)                                                             \
    (emu::fails(#function, __LINE__) ? emu::failure(error)(__VA_ARGS__) : function(__VA_ARGS__))
#define EMU_CUDA(...) EMU_CALL(emu::remember(cudaErrorUnknown), __VA_ARGS__)
#define cudaMalloc(...) EMU_CUDA(cudaMalloc, __VA_ARGS__)
#define cudaFree(...) EMU_CUDA(cudaFree, __VA_ARGS__)
#define cudaMallocHost(...) EMU_CUDA(cudaMallocHost, __VA_ARGS__)
#define cudaFreeHost(...) EMU_CUDA(cudaFreeHost, __VA_ARGS__)
#define cudaMemGetInfo(...) EMU_CUDA(cudaMemGetInfo, __VA_ARGS__)
#define cudaMemcpyAsync(...) EMU_CUDA(cudaMemcpyAsync, __VA_ARGS__)
#define cudaMemcpy(...) EMU_CUDA(cudaMemcpy, __VA_ARGS__)
#define cudaMemsetAsync(...) EMU_CUDA(cudaMemsetAsync, __VA_ARGS__)
#define cudaMemset(...) EMU_CUDA(cudaMemset, __VA_ARGS__)
#define cudaDeviceGetStreamPriorityRange(...) \
    EMU_CUDA(cudaDeviceGetStreamPriorityRange, __VA_ARGS__)
#define cudaStreamCreateWithPriority(...) EMU_CUDA(cudaStreamCreateWithPriority, __VA_ARGS__)
#define cudaStreamCreateWithFlags(...) EMU_CUDA(cudaStreamCreateWithFlags, __VA_ARGS__)
#define cudaStreamSynchronize(...) EMU_CUDA(cudaStreamSynchronize, __VA_ARGS__)
#define cudaStreamQuery(...) EMU_CUDA(cudaStreamQuery, __VA_ARGS__)
#define cudaStreamDestroy(...) EMU_CUDA(cudaStreamDestroy, __VA_ARGS__)
#define cudaDeviceSynchronize(...) EMU_CUDA(cudaDeviceSynchronize, __VA_ARGS__)
#define cudaEventCreateWithFlags(...) EMU_CUDA(cudaEventCreateWithFlags, __VA_ARGS__)
#define cudaEventCreate(...) EMU_CUDA(cudaEventCreate, __VA_ARGS__)
#define cudaEventRecord(...) EMU_CUDA(cudaEventRecord, __VA_ARGS__)
#define cudaEventSynchronize(...) EMU_CUDA(cudaEventSynchronize, __VA_ARGS__)
#define cudaEventQuery(...) EMU_CUDA(cudaEventQuery, __VA_ARGS__)
#define cudaEventDestroy(...) EMU_CUDA(cudaEventDestroy, __VA_ARGS__)
#define cudaStreamWaitEvent(...) EMU_CUDA(cudaStreamWaitEvent, __VA_ARGS__)
#define cudaEventElapsedTime(...) EMU_CUDA(cudaEventElapsedTime, __VA_ARGS__)
#define cudaGetDeviceCount(...) EMU_CUDA(cudaGetDeviceCount, __VA_ARGS__)
#define cudaSetDevice(...) EMU_CUDA(cudaSetDevice, __VA_ARGS__)
#define cudaGetDevice(...) EMU_CUDA(cudaGetDevice, __VA_ARGS__)
#define cudaDeviceGetPCIBusId(...) EMU_CUDA(cudaDeviceGetPCIBusId, __VA_ARGS__)
#define cudaDriverGetVersion(...) EMU_CUDA(cudaDriverGetVersion, __VA_ARGS__)
#define cudaGetDeviceProperties(...) EMU_CUDA(cudaGetDeviceProperties, __VA_ARGS__)
#define cudaDeviceGetP2PAttribute(...) EMU_CUDA(cudaDeviceGetP2PAttribute, __VA_ARGS__)
#define cudaFuncSetAttribute(...) EMU_CUDA(cudaFuncSetAttribute, __VA_ARGS__)
