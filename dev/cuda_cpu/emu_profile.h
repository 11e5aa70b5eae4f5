// emu_profile.h: bytes that kernels read and write in device memory, counted access by access.
//
// What it is: the hooks that a compiler calls before every load and store when it is told
// -fsanitize=thread. Here they count what lies in device memory and is done by a kernel's thread;
// the sanitizer's own library is not linked. So a program is compiled and linked in two steps:
//     g++ -fsanitize=thread -c FILE.cu -o FILE.o && g++ FILE.o -o FILE
// and EMU_PROFILE=1 prints, when it ends, a line for each kernel.
// What it refuses to be: a model of caches. A byte that is asked for twice counts twice, whether or
// not a GPU would find it in its cache the second time, and a byte that a barrier's or a product's
// own code touches does not count.
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
// Of each kernel, by its name. Hooks and what they call have no hooks themselves.

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

// A kernel's launches so far, and the bytes that its threads asked for.
struct Profile {
    const char *kernel;
    uint64_t launches, read, written;
};
enum { PROFILES = 256, PROFILE_RANGES = 256 };
inline Profile profiles[PROFILES];
inline Profile *profiled = nullptr;  // of the kernel that runs; null: none, or nobody asks

// Device memory while a kernel runs: plain arrays, since a hook may call nothing that has hooks.
struct ProfileRange { uintptr_t from, to; };
inline ProfileRange profile_ranges[PROFILE_RANGES];
inline int profile_range_count = 0, profile_last = 0;

// Before (its name) and after (null) every launch.
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
            const int name = (int)strcspn(p.kernel, "<,");  // of the text of the launch
            fprintf(stderr, "[emu] profile  %-36.*s launches %5llu  read %12llu  written %12llu\n",
                    name, p.kernel, (unsigned long long)p.launches, (unsigned long long)p.read,
                    (unsigned long long)p.written);
        }
    }
}

// Counts an access of n bytes, if it goes to device memory. Blocks run one at a time here.
EMU_UNCOUNTED inline void profile_count(const void *p, size_t n, bool writes) {
    Profile *to = profiled;
    if (to == nullptr || profile_range_count == 0) {
        return;
    }
    const uintptr_t at = (uintptr_t)p;
    const ProfileRange *r = &profile_ranges[profile_last];
    for (int i = 0; at < r->from || at >= r->to; i++) {
        if (i == profile_range_count) {
            return;  // shared memory, a thread's stack, the host's
        }
        profile_last = i;
        r = &profile_ranges[i];
    }
    (writes ? to->written : to->read) += n;
}

inline const bool profile_is_on = [] {
    if (set.profile) {
        set.threads = 1;
        launch_hook = profile_launch;
        atexit(profile_print);
    }
    return set.profile != 0;
}();

}  // namespace emu

// -------------------------------------------------------------------------------------------------
// 2. Hooks
// By the names that GCC and clang give them. What else such a build asks for is a link error.

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
// Atomic loads, of flags of the emulator and of the C++ library's static variables; then what
// atomics of kernels, and counters of the host, are made of.
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
