// test_gpt2.cu -- the numbers of train_gpt2: every chapter that computes, checked from inside.
//
// What it is: one program, one table of tests (dev/test/harness.h). A test runs in a process of its
// own, inside a folder of its own, and prints one line: what was compared at the worst place found,
// its error and the tolerance, how much of it was used, ok or FAILED. Naive twins of the fast code
// live here; they compute in a wider type and bring the tolerance of every element with them.
//
// What it refuses to be: tuned. A tolerance is an error model (sum_error, below) or stands beside
// the sentence that derives it, and is never loosened until a test passes. NaN fails everywhere.
// Nor does it drive the programs as a user does: dev/test/*.cpp do, with the programs as built.
//
// Build:  make test_gpt2 test_gpt2_double test_gpt2_asan            Volume I
//         make test_gpt2cu_cpu test_gpt2cu_cpu_asan test_gpt2cu     Volume II: the chapters from
//         Kernels on
//
// Run:    build/test_gpt2             every test, or those whose names begin with an argument
//         build/test_gpt2 --list      the names; the exit status is 0 only when no test failed
//
// Contents
//   1  Harness
//   2  The parts

#define GPT2_NO_MAIN 1
#ifndef TEST_CUDA
#define TEST_CUDA 0
#endif
#if TEST_CUDA
#include "train_gpt2.cu"
#else
#include "train_gpt2.c"
#endif
// The builds, a bit each: what one leaves out runs in another with the same input. THIS_BUILD is a
// macro because harness.h reads it. EMULATED: only what the emulated device makes possible.
enum {
    FLOAT = 1,
    DOUBLE = 2,
    ASAN = 4,
    HOST = FLOAT | ASAN,
    ALL = FLOAT | DOUBLE | ASAN,
    CUDA = 8,
    CUDA_ASAN = 16,
    CUDA_ALL = CUDA | CUDA_ASAN,
    NO_BUILD = 32
};
#define THIS_BUILD                                                                                 \
    (TEST_CUDA ? (TEST_ASAN ? CUDA_ASAN : CUDA) : GPT2_DOUBLE ? DOUBLE : TEST_ASAN ? ASAN : FLOAT)
#if TEST_CUDA
enum { EMULATED = CUDA_CPU ? CUDA : NO_BUILD, EMULATED_ALL = CUDA_CPU ? CUDA_ALL : NO_BUILD };
#endif
#include <array>
#include <malloc.h>
#include "dev/test/files.h"
#if TEST_ASAN
#include <sanitizer/asan_interface.h>
#endif
#include <algorithm>
#include <functional>
#include <map>

// -------------------------------------------------------------------------------------------------
// 1. Harness
// What dev/test/harness.h cannot know: the type that the program computes in, and the whole program
// as a function, for what no built program can be made to do.

typedef std::vector<real> Reals;
#if GPT2_DOUBLE
typedef long double wide;  // of the naive twins
static const double unit = 0x1p-53, smallest = 0x1p-1022;
#else
typedef double wide;
static const double unit = 0x1p-24, smallest = 0x1p-126;  // of a rounding; normal number
#endif

// Equal to the bit; NaN equals itself.
static int same_bits(const Reals &a, const Reals &b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(real)) == 0;
}

// Error of a sum of n rounded products over the sum of their sizes: rounding errors that do not all
// point one way grow with sqrt(n) (Higham and Mary, SIAM J. Sci. Comput. 41, 2019); four standard
// deviations, and four roundings on the way in and out.
static double sum_error(double n) { return (4 * sqrt(n) + 4) * unit; }

// Numbers in (-1.7, 1.7) x scale with deviation `scale`, a function of (seed, index).
static Reals noise(size_t n, double scale, uint64_t seed) {
    Reals out(n);
    for (size_t i = 0; i < n; i++) {
        out[i] = (real)((random_unit(seed, i) - 0.5) * 3.4641016 * scale);
    }
    return out;
}

// As harness.h's, for numbers of this file's lines.
static void near_at(int line, wide got, wide want, double tol, const Text &where) {
    near_at(__FILE__, line, got, want, tol, where);
}

// The whole program in a child of this process; `other` replaces train_gpt2_main's engine.
static Outcome in_process(const Text &arguments, const Program *other = NULL) {
    return outcome(spawn([&] {
        Words words = split(arguments.c_str());
        std::vector<char *> argv = arguments_of(&words);
        exit(other ? program_main(other, (int)argv.size(), argv.data())
                   : train_gpt2_main((int)argv.size(), argv.data()));
    }));
}

// -------------------------------------------------------------------------------------------------
// 2. The parts
// One file for each part of the programs, in their order.

#include "dev/test/unit/ground.h"
#include "dev/test/unit/plan.h"
#include "dev/test/unit/system.h"
#include "dev/test/unit/budget.h"
#include "dev/test/unit/data.h"
#include "dev/test/unit/layers.h"
#include "dev/test/unit/network.h"
#include "dev/test/unit/optimizer.h"
#include "dev/test/unit/output.h"
#include "dev/test/unit/files.h"
#if TEST_CUDA
#include "dev/test/unit/kernels.h"
#include "dev/test/unit/gpu_network.h"
#endif

int main(int argc, char **argv) {
#if TEST_ASAN
    plan_mark = mark_for_asan;
#endif
#if TEST_CUDA
    switches = order_switches;
#endif
    return harness_main(argc, argv);
}
