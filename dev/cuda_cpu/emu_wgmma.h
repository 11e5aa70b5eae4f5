// emu_wgmma.h: CPU versions of train_gpt2.cu's PTX wrappers for Hopper's asynchronous warpgroup
// products, wgmma.mma_async (chapter Tensor-core toolbox), under the same names.
//
// Each warp computes its own 16 rows of a product, independently of other warps. Products are
// queued and computed at the wait that covers them, as late as the ISA allows. Behavior that is
// undefined on a GPU produces an error or NaN here:
//  - From issue to wait, an accumulator holds a signalling NaN, which must still be there at the
//    wait. Arithmetic makes it a quiet NaN, so reading an accumulator early makes the results NaN.
//    Before the wait, changing one or passing it to settle() ends the program.
//  - Products read a shadow copy of shared memory, which represents the async proxy's view. It is
//    NaN at the start of a block and where a cp.async is issued; fence_async() copies to it the
//    data of the calling thread's cp.async operations that the thread has waited for. So a missing
//    fence, wait or barrier makes the results NaN. Plain stores to shared memory never reach the
//    shadow copy, so overwriting a tile with them while products read it is not detected.
//  - Operands in shared memory are read at the wait, so a tile that is refilled too early makes the
//    results NaN. An operand A in registers is read at issue, as ptxas keeps those registers.
//  - A descriptor is decoded bit by bit. Layouts other than 128-byte swizzled rows, a base offset,
//    and addresses beyond dynamic shared memory end the program.
//  - The program ends if a product is issued without a wgmma_fence() since the last wait, if lanes
//    or warps of a warpgroup issue different products, or if a block ends with products under way.
// Source: PTX ISA 9.0, section 9.7.15, "Asynchronous Warpgroup Level Matrix Instructions".
#pragma once
#include "emu_ptx.h"

// --- State ---------------------------------------------------------------------------------------
// The state of the running block, created by its first call of a function in this file.

namespace emu {
enum { WARPGROUP_WARPS = 4, PRODUCT_COLUMNS = 64, PRODUCT_K = 16 };
const uint32_t UNDER_WAY = 0xffbfffffu;  // the signalling NaN
typedef float Vec8 __attribute__((vector_size(32)));
struct Rows { Vec8 row[16][PRODUCT_COLUMNS / 8]; };  // 16 rows of 64 numbers

// One warp's rows of an accumulator. Element i of lane 4g + t is in row g + 8 (i / 2 % 2), column
// 8 (i / 4) + 2t + i % 2 (PTX ISA, figure "WGMMA .m64nNk16 register fragment layout for D").
struct Accumulator {
    float *lane[32];  // if lane[0] is null, no product uses it
    Rows value;
    int products;     // number under way
    template <class F> static void each(F f) {
        for (int l = 0; l < 32; l++) {
            for (int i = 0; i < PRODUCT_COLUMNS / 2; i++) {
                f(l, i, l / 4 + 8 * (i / 2 % 2), 8 * (i / 4) + l % 4 * 2 + i % 2);
            }
        }
    }
    float &at(int row, int column) { return ((float *)value.row[row])[column]; }
};
struct AsyncProduct {
    size_t accumulator;
    uint64_t a, b;             // descriptors
    bool in_registers, add, mn_major;
    int group;
    uint32_t fragment[32][4];  // A in registers
};
struct AsyncWarp {
    std::vector<Accumulator> accumulators;
    std::vector<AsyncProduct> queue;
    size_t issued;
};
struct AsyncState {
    std::vector<char> shadow;
    AsyncWarp warp[MAX_WARPS];
    std::vector<uint64_t> issued[MAX_WARPS / WARPGROUP_WARPS];  // a hash of each product
    bool fenced[MAX_THREADS];
    int groups[MAX_THREADS];  // number committed
};
inline AsyncState *async_state = nullptr;  // reused by every block

// Checks, at the end of a block that used wgmma, that no product is under way and that all warps of
// a warpgroup have issued the same number.
inline void async_end(Block *b) {
    for (int i = 0; i < b->n / 32; i++) {
        if (!async_state->warp[i].queue.empty()) {
            fail("wgmma: warp %d ended with products under way,", i);
        }
        if (async_state->warp[i].issued != async_state->issued[i / WARPGROUP_WARPS].size()) {
            fail("wgmma: warp %d issued fewer products than others of its warpgroup,", i);
        }
    }
}

// Returns the state. Ends the process with code 86 on devices other than compute capability 9.0,
// and in a block that is not made of whole warpgroups.
inline AsyncState &async(const char *what, Loc loc) {
    Block *b = caller(what)->block;
    if (set.cc != 90 || b->n % (32 * WARPGROUP_WARPS) != 0) {
        fail("%s: needs compute capability 9.0 and whole warpgroups (%s:%d)", what, loc.file,
             loc.line);
    }
    if (async_state == nullptr) {
        async_state = new AsyncState();
    }
    AsyncState &s = *async_state;
    if (b->shadow == nullptr) {
        s.shadow.resize(SMEM_ARENA);
        fill_nan(s.shadow.data(), SMEM_ARENA);
        b->shadow = s.shadow.data();
        b->at_end = async_end;
        for (AsyncWarp &w : s.warp) {
            w.accumulators.clear();
            w.queue.clear();
            w.issued = 0;
        }
        for (auto &list : s.issued) {
            list.clear();
        }
        memset(s.fenced, 0, sizeof s.fenced);
        memset(s.groups, 0, sizeof s.groups);
    }
    return s;
}

// --- Descriptors ---------------------------------------------------------------------------------
// Bits 0..13 start >> 4, 16..29 leading offset >> 4, 32..45 stride offset >> 4, 49..51 base offset,
// 62..63 swizzle, 1 = 128 bytes; all others 0. In that swizzle, bits 4..6 of an address are XORed
// with bits 7..9. Source: PTX ISA, "Matrix Descriptor Format", "Strides", tables of layouts.

// Reads the 16-byte chunk at byte `at`, before the swizzle, as eight floats.
inline void read_chunk(float *to, uint64_t descriptor, uint32_t at) {
    const Block *b = current->block;
    at ^= (at >> 7 & 7) << 4;
    if (at + 16 > b->slots[0].n) {
        fail("wgmma: descriptor %016llx reaches beyond dynamic shared memory,",
             (unsigned long long)descriptor);
    }
    uint16_t x[8];
    memcpy(x, b->shadow + at, sizeof x);
    for (int i = 0; i < 8; i++) {
        to[i] = widen<__nv_bfloat16>(x[i]);
    }
}

// Reads 16 steps of k of the operand that a descriptor names, in `rows` rows (of m or n) from
// `first` on. Stores them as (rows,16) if the operand is K-major, otherwise as (16,rows).
inline void read_operand(float *to, uint64_t descriptor, bool mn_major, int first, int rows) {
    const uint32_t start = (uint32_t)(descriptor & 0x3fff) << 4;
    const uint32_t leading = (uint32_t)(descriptor >> 16 & 0x3fff) << 4;
    const uint32_t stride = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
    if ((descriptor & ~(0x3fffull | 0x3fffull << 16 | 0x3fffull << 32)) != 1ull << 62) {
        fail("wgmma: descriptor %016llx: only a 128-byte swizzle without base offset is known,",
             (unsigned long long)descriptor);
    }
    if (mn_major) {
        for (int k = 0; k < PRODUCT_K; k++) {
            for (int n = first; n < first + rows; n += 8, to += 8) {
                const uint32_t row = (uint32_t)(k / 8) * stride + (uint32_t)k % 8 * 128;
                read_chunk(to, descriptor, start + (uint32_t)n / 64 * leading + row +
                                               (uint32_t)n % 64 * 2);
            }
        }
    } else {
        for (int n = first; n < first + rows; n++, to += PRODUCT_K) {
            const uint32_t row = (uint32_t)n / 8 * stride + (uint32_t)n % 8 * 128;
            read_chunk(to, descriptor, start + row);
            read_chunk(to + 8, descriptor, start + row + 16);
        }
    }
}

// --- Products ------------------------------------------------------------------------------------

inline void product_run(AsyncWarp &w, int warp, const AsyncProduct &x) {
    Accumulator &sum = w.accumulators[x.accumulator];
    float a[16][PRODUCT_K], b[PRODUCT_COLUMNS][PRODUCT_K];
    Rows columns;  // (k, n)
    if (x.in_registers) {
        for (int r = 0; r < 16; r++) {
            for (int k = 0; k < PRODUCT_K; k++) {
                const uint32_t pair = x.fragment[r % 8 * 4 + k % 8 / 2][r / 8 + 2 * (k / 8)];
                a[r][k] = widen<__nv_bfloat16>((uint16_t)(pair >> 16 * (k % 2)));
            }
        }
    } else {
        read_operand(a[0], x.a, false, warp % WARPGROUP_WARPS * 16, 16);
    }
    if (x.mn_major) {
        read_operand((float *)columns.row, x.b, true, 0, PRODUCT_COLUMNS);
    } else {
        read_operand(b[0], x.b, false, 0, PRODUCT_COLUMNS);
        for (int k = 0; k < PRODUCT_K; k++) {
            for (int n = 0; n < PRODUCT_COLUMNS; n++) {
                ((float *)columns.row[k])[n] = b[n][k];
            }
        }
    }
    for (int r = 0; r < 16; r++) {
        for (Vec8 &v : sum.value.row[r]) {
            const long n = &v - sum.value.row[r];
            Vec8 d = x.add ? v : Vec8{};
            for (int k = 0; k < PRODUCT_K; k++) {
                d += a[r][k] * columns.row[k][n];
            }
            v = d;
        }
    }
    sum.products--;
}

// Computes all but the newest `keep` of `groups` groups; returns their accumulators to the threads.
inline void products_finish(AsyncWarp &w, int warp, int groups, int keep) {
    size_t done = 0;
    while (done < w.queue.size() && w.queue[done].group < groups - keep) {
        product_run(w, warp, w.queue[done++]);
    }
    w.queue.erase(w.queue.begin(), w.queue.begin() + (long)done);
    for (Accumulator &sum : w.accumulators) {
        if (sum.lane[0] != nullptr && sum.products == 0) {
            Accumulator::each([&](int l, int i, int row, int column) {
                // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): a mark, not a number
                if (memcmp(&sum.lane[l][i], &UNDER_WAY, 4) != 0) {
                    fail("wgmma: accumulator %d of lane %d changed while a product was under way,",
                         i, l);
                }
                sum.lane[l][i] = sum.at(row, column);
            });
            sum.lane[0] = nullptr;
        }
    }
}

// Returns the index of the accumulator in `lane`'s registers; loads them if no product uses it.
struct AsyncArgs { float *d; const uint32_t *a; uint64_t a_descriptor, b; };
inline size_t accumulator_of(AsyncWarp &w, AsyncArgs **lane) {
    size_t unused = w.accumulators.size();
    for (size_t i = 0; i < w.accumulators.size(); i++) {
        if (w.accumulators[i].lane[0] == lane[0]->d) {
            return i;
        }
        unused = w.accumulators[i].lane[0] == nullptr ? i : unused;
    }
    w.accumulators.resize(std::max(w.accumulators.size(), unused + 1));
    Accumulator &sum = w.accumulators[unused];
    sum.products = 0;
    Accumulator::each([&](int l, int i, int row, int column) {
        sum.lane[l] = lane[l]->d;
        sum.at(row, column) = lane[l]->d[i];
        memcpy(&lane[l]->d[i], &UNDER_WAY, 4);
    });
    return unused;
}

inline void product_issue(AsyncArgs &mine, bool add, bool mn_major, Loc loc) {
    async("wgmma", loc);
    warp_op(OP_WGMMA, ~0u, mine, loc, [=](AsyncArgs **lane, uint32_t) {
        AsyncState &s = *async_state;
        const int thread = current->id / 32 * 32, warp = thread / 32;
        AsyncWarp &w = s.warp[warp];
        AsyncProduct x = {0, lane[0]->a_descriptor, lane[0]->b, lane[0]->a != nullptr, add,
                          mn_major, s.groups[thread], {}};
        for (int l = 0; l < 32; l++) {
            if (!s.fenced[thread + l]) {
                fail("wgmma: lane %d has not called wgmma_fence since its last wait (%s:%d)", l,
                     loc.file, loc.line);
            }
            if (lane[l]->a_descriptor != x.a || lane[l]->b != x.b ||
                s.groups[thread + l] != x.group) {
                fail("wgmma: lanes 0 and %d differ in a descriptor or their groups (%s:%d)", l,
                     loc.file, loc.line);
            }
            if (x.in_registers) {
                memcpy(x.fragment[l], lane[l]->a, sizeof x.fragment[l]);
            }
        }
        std::vector<uint64_t> &issued = s.issued[warp / WARPGROUP_WARPS];
        const uint64_t hash = ((x.a * 31 + x.b) * 31 + (uint64_t)loc.line) * 2 + add;
        if (w.issued == issued.size()) {
            issued.push_back(hash);
        }
        if (issued[w.issued++] != hash) {
            fail("wgmma: warps of a warpgroup issue different products (%s:%d)", loc.file,
                 loc.line);
        }
        x.accumulator = accumulator_of(w, lane);
        w.accumulators[x.accumulator].products++;
        w.queue.push_back(x);
    });
}
}  // namespace emu

// --- Wrappers ------------------------------------------------------------------------------------

// Returns the address that instructions use for shared memory: its offset in the block's arena.
inline uint32_t shared_address(const void *p, EMU_LOC) {
    emu::caller("shared_address");
    if (!emu::in_shared(p, 1)) {
        emu::fail("shared_address: address %p is not in shared memory (%s:%d)", p, file_, line_);
    }
    return (uint32_t)((const char *)p - emu::current->block->arena);
}

// Must be called between accesses to registers and the products that use them.
inline void wgmma_fence(EMU_LOC) {
    emu::async("wgmma_fence", EMU_HERE).fenced[emu::current->id] = true;
}

// Commits the products issued since the last commit as one group.
inline void wgmma_commit(EMU_LOC) {
    emu::async("wgmma_commit", EMU_HERE).groups[emu::current->id]++;
}

// Waits until at most the N most recent groups are still under way.
template <int N> inline void wgmma_wait(EMU_LOC) {
    emu::AsyncState &s = emu::async("wgmma_wait", EMU_HERE);
    s.fenced[emu::current->id] = false;  // registers may be accessed now
    emu::warp_op(emu::OP_WGMMA_WAIT, ~0u, s.groups[emu::current->id], EMU_HERE,
                 [&](int **groups, uint32_t) {
                     for (int l = 0; l < 32; l++) {
                         if (*groups[l] != *groups[0]) {
                             emu::fail("wgmma_wait: lanes 0 and %d have committed %d and %d groups"
                                       " (%s:%d)", l, *groups[0], *groups[l], file_, line_);
                         }
                     }
                     const int warp = emu::current->id / 32;
                     emu::products_finish(s.warp[warp], warp, *groups[0], N);
                 });
}

// Makes data from the calling thread's finished cp.async operations visible to products.
inline void fence_async(EMU_LOC) {
    emu::AsyncState &s = emu::async("fence_async", EMU_HERE);
    emu::Thread *t = emu::current;
    for (const void *p : t->unfenced) {
        memcpy(&s.shadow[(size_t)((const char *)p - t->block->arena)], p, 16);
    }
    t->unfenced.clear();
}

// Must be called after a wait, with the accumulators that the code uses next. Ends the process with
// code 86 if a product that writes them is still under way.
inline void settle(float (&d)[1][8][4], EMU_LOC) {
    // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): a mark, not a number
    if (memcmp(d, &emu::UNDER_WAY, 4) == 0) {
        emu::fail("settle: a product that writes these accumulators is under way (%s:%d)", file_,
                  line_);
    }
}

// wgmma.mma_async.m64n64k16 of bf16: d (64,64) (+)= a (64,16) b (16,64); a in shared memory.
template <bool ADD>
inline void wgmma(float (&d)[1][8][4], uint64_t a, uint64_t b, EMU_LOC) {
    emu::AsyncArgs mine = {d[0][0], nullptr, a, b};
    emu::product_issue(mine, ADD, false, EMU_HERE);
}
// Like the above with a in registers; with MN, b is stored with one row for each k.
template <bool ADD, bool MN>
inline void wgmma(float (&d)[1][8][4], const uint32_t (&a)[4], uint64_t b, EMU_LOC) {
    emu::AsyncArgs mine = {d[0][0], a, 0, b};
    emu::product_issue(mine, ADD, MN, EMU_HERE);
}
