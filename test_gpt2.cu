// test_gpt2.cu -- unit tests of train_gpt2, compiled together with its source.
//
// This program has a table of tests; dev/test/harness.h describes its arguments and output. Naive
// reference implementations compute in a wider type and give every element a tolerance.
//
// Tolerances are not tuned: each follows from an error model (sum_error, below) or is derived in a
// comment next to it, and none is ever relaxed to make a test pass. NaN always fails. Tests that
// run the built programs as a user would are in dev/test/*.py.
//
// Build:  make test_gpt2 test_gpt2_double test_gpt2_asan test_gpt2_avx2   train_gpt2.c
//         make test_gpt2cu_cpu test_gpt2cu_cpu_asan test_gpt2cu     train_gpt2.cu
//
// Run:    build/test_gpt2             run all tests, or those whose names start with an argument;
//                                     the exit status is 0 only if no test failed
//         build/test_gpt2 --list      list the tests' names
//
// Contents
// 1 Harness; 2 The parts

#define GPT2_NO_MAIN 1
#ifndef TEST_CUDA
#define TEST_CUDA 0
#endif
#if TEST_CUDA
#include "train_gpt2.cu"
#else
#include "train_gpt2.c"
#endif
// The builds, one bit each. A test skipped in one build runs in another with the same input.
// THIS_BUILD is a macro because harness.h reads it. EMULATED marks tests of the emulated device.
enum { FLOAT = 1, DOUBLE = 2, ASAN = 4, HOST = FLOAT | ASAN, ALL = FLOAT | DOUBLE | ASAN,
       CUDA = 8, CUDA_ASAN = 16, CUDA_ALL = CUDA | CUDA_ASAN, NO_BUILD = 32 };
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
#include <numeric>

// -------------------------------------------------------------------------------------------------
// 1. Harness
// Adds to dev/test/harness.h the type that the program computes in, and in_process(), which runs
// the whole program in situations that cannot be produced by running the built program.

typedef std::vector<real> Reals;
#if GPT2_DOUBLE
typedef long double wide;  // type of the naive references
static const double unit = 0x1p-53, smallest = 0x1p-1022;
#else
typedef double wide;
static const double unit = 0x1p-24, smallest = 0x1p-126;  // unit roundoff; smallest normal number
#endif

// True if bitwise equal; a NaN equals itself.
static int same_bits(const Reals &a, const Reals &b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(real)) == 0;
}

// Returns a bound on the error of a sum of n rounded products, relative to the sum of their
// magnitudes. Rounding errors with random signs grow with sqrt(n) (Higham and Mary, SIAM J. Sci.
// Comput. 41, 2019); this is four standard deviations, plus four roundings of inputs and output.
static double sum_error(double n) { return (4 * sqrt(n) + 4) * unit; }

// Returns n uniform random numbers between -1.7 `scale` and 1.7 `scale`, so that their standard
// deviation is `scale`. Element i depends only on seed and i.
static Reals noise(size_t n, double scale, uint64_t seed) {
    Reals out(n);
    for (size_t i = 0; i < n; i++) {
        out[i] = (real)((random_unit(seed, i) - 0.5) * 3.4641016 * scale);
    }
    return out;
}

// Like harness.h's expect_near_at, with this file's name.
static void expect_near_at(int line, wide got, wide want, double tol, const Text &where) {
    expect_near_at(__FILE__, line, got, want, tol, where);
}

// Runs the whole program in a child process; `other` replaces train_gpt2_main's engine.
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
// One file per part of the programs, in the same order.

#include "dev/test/unit/ground.h"
#include "dev/test/unit/plan.h"
#include "dev/test/unit/system.h"
#include "dev/test/unit/budget.h"
#include "dev/test/unit/data.h"
#include "dev/test/unit/layers.h"
#include "dev/test/unit/network.h"
#include "dev/test/unit/optimizer.h"
#include "dev/test/unit/output.h"
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
