// emu_count.h: counts the accesses of kernels to device and pinned memory.
//
// For programs compiled with -fsanitize=thread but not linked with its library: the compiler calls
// the functions below before every access to memory. nvcc may merge or split accesses differently.
//  - A request is one load or store of a warp: lanes at the same instruction for the same time in
//    their block. Lanes that repeat an inner loop a different number of times are not matched.
//  - It moves the 32-byte sectors that its lanes touch: 1 if all read one number, 32 if they read
//    addresses a row apart. Caches are not modeled.
// Copyright (c) 2026 the train_gpt2 authors. SPDX-License-Identifier: MIT
#pragma once
#include "emu_runtime.h"
#include <array>
#include <unordered_map>
#include <unordered_set>

namespace emu {

inline bool counting = false;       // count_access itself causes calls
inline uint64_t counted_block = 0;  // the block that these belong to:
inline std::unordered_map<uint64_t, std::array<uint64_t, MAX_THREADS>> times;  // by instruction
inline std::unordered_set<uint64_t> seen;  // requests, and requests with a sector

inline void count_access(const void *p, size_t n, uint64_t instruction) {
    const uint64_t many = 0x9E3779B97F4A7C15u, sector = (uintptr_t)p / 32 + 1;
    const uint64_t block = (launches << 32) + blockIdx.x + (uint64_t)gridDim.x * blockIdx.y;
    if (find(p) == nullptr) {
        return;  // shared memory, a stack, or the emulator's data
    }
    if (counted_block != block) {
        counted_block = block;
        seen.clear();
        times.clear();
    }
    const uint64_t time = times[instruction][current->id]++;
    const uint64_t request = (instruction << 32 ^ time << 5 ^ (uint64_t)current->id / 32) * many;
    counts.asked += n;
    counts.requests += seen.insert(request).second;
    counts.sectors += seen.insert((request ^ request >> 32 ^ sector) * many).second;
}

}  // namespace emu

#define EMU_HOOK extern "C" __attribute__((used, noinline, no_sanitize("thread")))
#define EMU_COUNT_AT(name, n)                                                                  \
    EMU_HOOK void name(const void *p) {                                                        \
        if (emu::current != nullptr && !emu::counting) {                                       \
            emu::counting = true;                                                              \
            emu::count_access(p, n, (uint64_t)__builtin_return_address(0));                    \
            emu::counting = false;                                                             \
        }                                                                                      \
    }
#define EMU_COUNT(n)                                                                           \
    EMU_COUNT_AT(__tsan_read##n, n) EMU_COUNT_AT(__tsan_unaligned_read##n, n)                  \
    EMU_COUNT_AT(__tsan_write##n, n) EMU_COUNT_AT(__tsan_unaligned_write##n, n)
EMU_COUNT(1) EMU_COUNT(2) EMU_COUNT(4) EMU_COUNT(8) EMU_COUNT(16)
// Accesses of host code only.
EMU_HOOK void __tsan_init() { }
EMU_HOOK void __tsan_func_entry(void *) { }
EMU_HOOK void __tsan_func_exit() { }
EMU_HOOK void __tsan_vptr_read(void **) { }
EMU_HOOK void __tsan_vptr_update(void **, void *) { }
EMU_HOOK void __tsan_read_range(const void *, size_t) { }
EMU_HOOK void __tsan_write_range(const void *, size_t) { }
EMU_HOOK uint8_t __tsan_atomic8_load(const uint8_t *p, int) { return *p; }
EMU_HOOK uint64_t __tsan_atomic64_load(const uint64_t *p, int) { return *p; }
EMU_HOOK uint64_t __tsan_atomic64_fetch_add(uint64_t *p, uint64_t v, int) { return (*p += v) - v; }
