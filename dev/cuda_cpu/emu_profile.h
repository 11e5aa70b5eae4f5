// emu_profile.h: counts the bytes that kernels read and write in device memory, access by access.
//
// Defines the hooks that a compiler inserts before every load and store with -fsanitize=thread.
// Here they count accesses to device memory by threads of a kernel. The sanitizer's library is not
// linked, so a program is compiled and linked in two steps:
//     g++ -fsanitize=thread -c FILE.cu -o FILE.o && g++ FILE.o -o FILE
// With EMU_PROFILE=1 it prints a line for each kernel when it ends.
// Caches are not modelled: a byte accessed twice counts twice, whether or not a GPU would hit its
// cache the second time. Bytes accessed by the emulator's own code, as in barriers and matmuls, are
// not counted.
//
// Contents
//   1  Counts
//   2  Hooks
//
// Copyright (c) 2026 the train_gpt2 authors. SPDX-License-Identifier: MIT
#pragma once
#include "emu_runtime.h"

// -------------------------------------------------------------------------------------------------
// 1. Counts
// Per kernel name. Hooks and the functions that they call are not instrumented themselves.

#if defined(__SANITIZE_THREAD__)
#define EMU_PROFILING 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define EMU_PROFILING 1
#endif
#endif
#ifndef EMU_PROFILING
#define EMU_PROFILING 0
#endif

#if EMU_PROFILING
#define EMU_UNCOUNTED __attribute__((no_sanitize("thread")))
namespace emu {

// Launches of a kernel so far, and the bytes that its threads accessed.
struct Profile {
    const char *kernel;
    uint64_t launches, read, written;
};
enum { PROFILES = 256, PROFILE_RANGES = 256 };
inline Profile profiles[PROFILES];
inline Profile *profiled = nullptr;  // of the running kernel; null: none, or profiling is off

// Device memory during a kernel, in plain arrays because a hook may only call uninstrumented code.
struct ProfileRange { uintptr_t from, to; };
inline ProfileRange profile_ranges[PROFILE_RANGES];
inline int profile_range_count = 0, profile_last = 0;

// Called before (with the kernel's name) and after (null) every launch.
EMU_UNCOUNTED inline void profile_launch(const char *kernel) {
    profiled = nullptr;
    if (kernel == nullptr) {
        return;
    }
    profile_range_count = profile_last = 0;
    for (const Alloc &a : allocs) {
        if (!a.host && profile_range_count < PROFILE_RANGES) {
            profile_ranges[profile_range_count++] = {(uintptr_t)a.p, (uintptr_t)a.p + a.n};
        }
    }
    for (Profile &p : profiles) {
        if (p.kernel == nullptr || strcmp(p.kernel, kernel) == 0) {
            p.kernel = kernel;
            p.launches++;
            profiled = &p;
            return;
        }
    }
    fail("EMU_PROFILE: more than %d kernels,", (int)PROFILES);
}

inline void profile_clear() { memset((void *)profiles, 0, sizeof profiles); }
inline void profile_print() {
    for (const Profile &p : profiles) {
        if (p.kernel != nullptr) {
            const int name = (int)strcspn(p.kernel, "<,");  // the kernel's name ends there
            fprintf(stderr, "[emu] profile  %-36.*s launches %5llu  read %12llu  written %12llu\n",
                    name, p.kernel, (unsigned long long)p.launches, (unsigned long long)p.read,
                    (unsigned long long)p.written);
        }
    }
}

// Counts an access of n bytes if it is in device memory. Blocks run one at a time here.
EMU_UNCOUNTED inline void profile_count(const void *p, size_t n, bool writes) {
    Profile *to = profiled;
    if (to == nullptr || profile_range_count == 0) {
        return;
    }
    const uintptr_t at = (uintptr_t)p;
    const ProfileRange *r = &profile_ranges[profile_last];
    for (int i = 0; at < r->from || at >= r->to; i++) {
        if (i == profile_range_count) {
            return;  // shared memory, a thread's stack, or host memory
        }
        profile_last = i;
        r = &profile_ranges[i];
    }
    (writes ? to->written : to->read) += n;
}

inline const bool profile_is_on = [] {
    if (set.profile) {
        launch_hook = profile_launch;
        atexit(profile_print);
    }
    return set.profile != 0;
}();

}  // namespace emu

// -------------------------------------------------------------------------------------------------
// 2. Hooks
// Named as GCC and clang call them. A hook that is missing here is a link error.

#define EMU_HOOK(name, bytes, writes)                                                          \
    EMU_API EMU_UNCOUNTED void __tsan_##name(void *p) { emu::profile_count(p, bytes, writes); }
#define EMU_HOOKS(bytes)                                                                       \
    EMU_HOOK(read##bytes, bytes, false)                                                        \
    EMU_HOOK(write##bytes, bytes, true)                                                        \
    EMU_HOOK(unaligned_read##bytes, bytes, false)                                              \
    EMU_HOOK(unaligned_write##bytes, bytes, true)
EMU_HOOKS(1)
EMU_HOOKS(2)
EMU_HOOKS(4)
EMU_HOOKS(8)
EMU_HOOKS(16)
EMU_API EMU_UNCOUNTED void __tsan_read_range(void *p, unsigned long n) {
    emu::profile_count(p, n, false);
}
EMU_API EMU_UNCOUNTED void __tsan_write_range(void *p, unsigned long n) {
    emu::profile_count(p, n, true);
}
EMU_API EMU_UNCOUNTED void __tsan_init() { }
EMU_API EMU_UNCOUNTED void __tsan_func_entry(void *) { }
EMU_API EMU_UNCOUNTED void __tsan_func_exit() { }
EMU_API EMU_UNCOUNTED void __tsan_vptr_read(void **) { }
EMU_API EMU_UNCOUNTED void __tsan_vptr_update(void **, void *) { }
EMU_API EMU_UNCOUNTED void __tsan_atomic_thread_fence(int) { }
// Atomic loads of the emulator's flags and of the C++ library's static variables; then the
// operations that kernels' atomics and the host's counters consist of.
EMU_API EMU_UNCOUNTED uint8_t __tsan_atomic8_load(const volatile uint8_t *p, int) { return *p; }
EMU_API EMU_UNCOUNTED uint64_t __tsan_atomic64_load(const volatile uint64_t *p, int) { return *p; }
EMU_API EMU_UNCOUNTED uint64_t __tsan_atomic64_fetch_add(volatile uint64_t *p, uint64_t n, int) {
    return __atomic_fetch_add(p, n, __ATOMIC_SEQ_CST);
}
EMU_API EMU_UNCOUNTED uint32_t __tsan_atomic32_load(const volatile uint32_t *p, int) { return *p; }
EMU_API EMU_UNCOUNTED uint32_t __tsan_atomic32_fetch_add(volatile uint32_t *p, uint32_t n, int) {
    return __atomic_fetch_add(p, n, __ATOMIC_SEQ_CST);
}
EMU_API EMU_UNCOUNTED uint32_t __tsan_atomic32_fetch_sub(volatile uint32_t *p, uint32_t n, int) {
    return __atomic_fetch_sub(p, n, __ATOMIC_SEQ_CST);
}
EMU_API EMU_UNCOUNTED bool __tsan_atomic64_compare_exchange_strong(volatile uint64_t *p,
                                                                   uint64_t *was, uint64_t value,
                                                                   int, int) {
    emu::profile_count((void *)p, 8, false);
    emu::profile_count((void *)p, 8, true);
    return __atomic_compare_exchange_n(p, was, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
#undef EMU_HOOK
#undef EMU_HOOKS
#endif
