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
//   3  The table

#define GPT2_NO_MAIN 1
#ifndef TEST_CUDA
#define TEST_CUDA 0
#endif
#if TEST_CUDA
#include "train_gpt2.cu"
#else
#include "train_gpt2.c"
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

// -------------------------------------------------------------------------------------------------
// 3. The table
// One row a test, in the order of the volumes; BUILDS says which of the builds run it. What a build
// leaves out runs in another one with the same input.

enum {
    FLOAT = 1,
    DOUBLE = 2,
    ASAN = 4,
    HOST = FLOAT | ASAN,
    ALL = FLOAT | DOUBLE | ASAN,
    CUDA = 8,  // with Volume II
    CUDA_ASAN = 16,
    CUDA_ALL = CUDA | CUDA_ASAN,
    THIS_BUILD = TEST_CUDA     ? TEST_ASAN ? CUDA_ASAN : CUDA
                 : GPT2_DOUBLE ? DOUBLE
                 : TEST_ASAN   ? ASAN
                               : FLOAT
};
#define T(name, builds)                                                                            \
    { #name, test_##name, (builds) & THIS_BUILD }
static const Test tests[] = {
    T(philox, ALL),
    T(rng_normal, ALL),
    T(permute_index, HOST),
    T(texts, HOST),
    T(options_table, HOST),
    T(options_text, HOST),
    T(model_sizes, HOST),
    T(stages, HOST),
    T(plan_layout, ALL),
    T(plan_monotone, FLOAT),
    T(parts, HOST),
    T(visits, HOST),
    T(traffic, FLOAT),
    T(plan_ranks, FLOAT),
    T(plan_allocation, FLOAT | DOUBLE),
    T(host_memory, HOST),
    T(host_cores, HOST),
    T(plan_refuse, HOST),
    T(levels_fit, FLOAT),
    T(remedies, FLOAT),
    T(auto, HOST),
    T(forecast, HOST),
    T(forecast_ranks, HOST),
    T(fit_sizes, FLOAT),
    T(fit_ranks, FLOAT),
    T(arena, ALL),
    T(rank_positions, HOST),
    T(prompts, HOST),
    T(loader_problems, HOST),
    T(loader_coverage, HOST),
    T(loader_large, FLOAT),
    T(tokenizer, HOST),
    T(fast_maths, ALL),
    T(matmul_forward, ALL),
    T(matmul_backward, ALL),
    T(matmul_bf16, HOST),
    T(gelu, ALL),
    T(embedding, ALL),
    T(layernorm, ALL),
    T(attention, ALL),
    T(classifier, ALL),
#if GPT2_DOUBLE
    T(derivatives_linear, DOUBLE),
    T(derivatives_layernorm, DOUBLE),
    T(derivatives_attention, DOUBLE),
    T(derivatives_gelu, DOUBLE),
    T(derivatives_classifier, DOUBLE),
    T(derivatives_network, DOUBLE),
#endif
    T(recompute_bits, ALL),
    T(offload_bits, ALL),
    T(slots, HOST),
    T(thread_bits, ALL),
    T(bf16_steps, HOST),
    T(accumulation, ALL),
    T(network_facts, ALL),
    T(kv_cache, ALL),
    T(generated_tokens, ALL),
    T(initialise, ALL),
    T(adamw, ALL),
    T(update, ALL),
    T(norm, ALL),
    T(schedules, HOST),
    T(sampling, ALL),
    T(log, HOST),
    T(read_or_stop, HOST),
    T(stop_overdue, HOST),
    T(folder_lock, HOST),
    T(cache_open, HOST),
    T(eval_scores, ALL),
    T(eval_network, ALL),
    T(eval_learnt, ALL),
    T(eval_plan, ALL | CUDA_ALL),
    T(skipped_step, HOST),
    T(model_accepted, HOST),
    T(llmc_model, HOST),
    T(model_saved, HOST),
    T(state_file, HOST),
#if TEST_CUDA
    T(rank_agreement, CUDA_ALL),
    T(gpu_embedding, CUDA_ALL),
    T(gpu_layernorm, CUDA_ALL),
    T(gpu_gelu, CUDA_ALL),
    T(gpu_matmul, CUDA_ALL),
    T(gpu_attention, CUDA_ALL),
    T(gpu_cached, CUDA_ALL),
    T(gpu_classifier, CUDA_ALL),
    T(gpu_adamw, CUDA_ALL),
    T(gpu_adamw_nan, CUDA_ALL),
    T(gpu_rounding, CUDA_ALL),
    T(gpu_norm, CUDA_ALL),
    T(gpu_clip, CUDA_ALL),
    T(gpu_loss_scale, CUDA_ALL),
    T(gpu_exchange, CUDA_ALL),
    T(gpu_rounding_streams, CUDA_ALL),
    T(gpu_rounding_places, CUDA_ALL),
    T(gpu_misaligned, CUDA),
#if CUDA_CPU
    T(gpu_algorithms, CUDA_ALL),
    T(gpu_refused_algorithm, CUDA_ALL),
    T(gpu_huge, CUDA),
#endif
    T(gpu_gradients_fp32, CUDA_ALL),
    T(gpu_gradients_16, CUDA_ALL),
    T(gpu_steps, CUDA_ALL),
    T(gpu_bits, CUDA_ALL),
    T(gpu_losses, CUDA_ALL),
    T(gpu_sampling, CUDA_ALL),
    T(gpu_kv_cache, CUDA_ALL),
    T(gpu_skip, CUDA_ALL),
    T(gpu_overflow, CUDA_ALL),
    T(gpu_rounding_updates, CUDA_ALL),
    T(gpu_micro_steps, CUDA_ALL),
    T(gpu_batches, CUDA_ALL),
    T(gpu_gaps, CUDA_ALL),
    T(gpu_wte_rounding, CUDA_ALL),
#if CUDA_CPU
#if GPT2_NCCL
    T(gpu_rank_wte, CUDA),
    T(gpu_rank_host, CUDA),
#endif
    T(gpu_peak, CUDA_ALL),
    T(gpu_pinned, CUDA_ALL),
    T(gpu_allocation, CUDA_ALL),
    T(gpu_allocation_random, CUDA),
    T(gpu_offload, CUDA_ALL),
    T(gpu_host_read, CUDA_ALL),
    T(gpu_rank_names, CUDA_ALL),
    T(gpu_pinned_node, CUDA_ALL),
    T(gpu_offload_mixed, CUDA_ALL),
    T(gpu_zero_states, CUDA_ALL),
    T(gpu_tuning, CUDA_ALL),
    T(gpu_tuning_proof, CUDA_ALL),
    T(gpu_tuning_file, CUDA_ALL),
    T(gpu_lifetimes, CUDA_ALL),
#endif
#endif
};
#undef T

int main(int argc, char **argv) {
#if TEST_ASAN
    plan_mark = mark_for_asan;
#endif
#if TEST_CUDA
    switches = order_switches;
#endif
    return harness_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
