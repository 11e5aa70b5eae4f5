// train_gpt2.c -- GPT-2 training on the CPU, and everything the GPU program shares with it.
//
// Options, model, memory plan, data, the layers of GPT-2 forward and backward in fp32 (the CPU
// reference that the CUDA kernels are checked against), AdamW, checkpoints, sampling and the one
// training loop. It is a complete program, train_gpt2; train_gpt2.cu includes this file and adds
// the same program for GPUs. This file includes data/files.c, tokens.c, weights.c and checkpoint.c.
//
// It is not a framework: one model family, one loop, no dropout, no Python at run time. No matrix
// of size T x T exists anywhere, every buffer of a run is in the memory plan (chapter Memory plan),
// and the same input gives the same bits for any number of threads and any recomputation level.
//
// To see how GPT-2 trains, read The model, part C, Data, and Training and output; parts B and E can
// be skipped.
//
// Build:  make train_gpt2   (the Makefile explains its flags)
// Run:    ./train_gpt2      trains a small character model;  ./train_gpt2 --help lists every option
//
// This file is also C++17 and is read by nvcc: no restrict, no VLA, casts on malloc, designators in
// order.
//
// Contents
// Part A. Foundations
//   1  Prelude
//   2  Random numbers
//   3  Options
//   4  The model
//   5  The system
// Part B. Memory and time
//   6  Memory plan
//   7  Sharding and offload
//   8  Step time
//   9  Settings
// Part C. GPT-2 on the CPU
//  10  Matmul and fast maths
//  11  Layers
//  12  The network
//  13  Optimizer and schedules
//  14  The engine
// Part D. The run
//  15  Data
//  16  Weights and checkpoints
//  17  Sampling and generation
//  18  Training and output
//  19  Evaluation
// Part E. The program
//  20  Plan report and remedies
//  21  Searches: --fit, --minimum, --largest, all cards
//  22  Measured speed
//  23  Start-up and main

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef _OPENMP
#include <omp.h>
#endif

// Build switches: GPT2_DOUBLE=1 builds the CPU reference in double (for central differences);
// GPT2_POISON=1 adds gaps and poisoning to the memory plan's allocations (for tests);
// GPT2_NO_MAIN=1 omits main, for files that include this one.
#ifndef GPT2_DOUBLE
#define GPT2_DOUBLE 0
#endif
#ifndef GPT2_POISON
#define GPT2_POISON 0
#endif
#ifndef GPT2_NO_MAIN
#define GPT2_NO_MAIN 0
#endif
#ifndef GPT2_CUDA
#define GPT2_CUDA 0
#endif
#ifndef HOST_DEVICE
#define HOST_DEVICE
#endif

// =================================================================================================
// Part A. Foundations

// -------------------------------------------------------------------------------------------------
// 1. Prelude
// Includes two of the four files of data/ and defines the number type of the CPU reference.

// Errors, checked memory, hashes, JSON, the tokenizer and file formats do not depend on the model,
// so they are in files of their own, which data/tokenize.c also includes. Everything is static: the
// program is one translation unit, and `cc train_gpt2.c -lm` builds it.
#include "data/files.c"
#include "data/tokens.c"

// The CPU reference computes in float. Tests also build it in double, because central differences
// of a loss need the precision.
#if GPT2_DOUBLE
typedef double real;
#else
typedef float real;
#endif

HOST_DEVICE static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

// Returns the median of values[0..n), which it sorts in place.
static double median(double *values, int n) {
    qsort(values, (size_t)n, sizeof(double), compare_doubles);
    return values[n / 2];
}

// -------------------------------------------------------------------------------------------------
// 2. Random numbers
// A counter-based generator: each number is a pure function of (seed, stream, step, index), so it
// does not depend on the order of calls, on threads, on ranks or on whether the run was resumed.
// The generator is Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
// (SC 2011); the tests compare it with the published known answers.

// Each use of random numbers has its own stream, so two uses never share a number. RNG_INIT and
// RNG_ROUND are the first of sixteen streams each, one for each tensor.
enum { RNG_INIT = 0, RNG_SHUFFLE = 64, RNG_SAMPLE = 65, RNG_WINDOW = 66, RNG_ROUND = 128 };

// Computes four random 32-bit words, block `index` of (seed, stream, step), into `out`. The paper
// recommends ten rounds, three more than the number that passed all its tests; the constants below
// are its multipliers and key increments. The GPU computes the same bits.
HOST_DEVICE static inline void philox4x32(uint32_t out[4], uint64_t seed, uint64_t index,
                                          uint32_t step, uint32_t stream) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)index, c1 = (uint32_t)(index >> 32), c2 = step, c3 = stream;
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53u * c0, product1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ key0;
        c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ key1;
        c3 = (uint32_t)product0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

// Returns a uniform number in [0, 1), with 53 random bits.
static double rng_uniform(uint64_t seed, uint32_t stream, uint32_t step, uint64_t index) {
    uint32_t r[4];
    philox4x32(r, seed, index, step, stream);
    return (double)(((uint64_t)r[0] << 32 | r[1]) >> 11) * 0x1p-53;
}

// Fills out[0..count) with normal numbers N(0, std); out[i] is number `first + i` of the random
// stream `stream`. Box-Muller, one Philox call per pair of numbers, in double, so that rounding to
// float hides differences between maths libraries.
static void rng_normal(real *out, int64_t count, double std, uint64_t seed, uint32_t stream,
                       int64_t first) {
    #pragma omp parallel for schedule(static)
    for (int64_t pair = first / 2; pair <= (first + count - 1) / 2; pair++) {
        uint32_t r[4];
        philox4x32(r, seed, (uint64_t)pair, 0, stream);
        double u = ((double)(((uint64_t)r[0] << 32 | r[1]) >> 11) + 1) * 0x1p-53;  // (0, 1]
        double angle = (double)r[2] * (6.283185307179586 * 0x1p-32),
               radius = std * sqrt(-2 * log(u));
        double value[2] = {radius * cos(angle), radius * sin(angle)};
        for (int k = 0; k < 2; k++) {
            int64_t i = 2 * pair + k - first;
            if (i >= 0 && i < count) {
                out[i] = (real)value[k];
            }
        }
    }
}

// Maps `position`, 0 <= position < n, to an index by a pseudorandom permutation of 0..n-1 that
// needs no table; `seed` and `epoch` select the permutation. A Feistel network over the next power
// of four, with Philox as its round function, applied repeatedly until the result is below n (cycle
// walking). Four rounds are the minimum for a strong pseudorandom permutation (Luby and Rackoff,
// 1988). The power of four is at most 4 n, so at most four applications are expected.
static int64_t permute_index(int64_t position, int64_t n, uint64_t seed, uint32_t epoch) {
    int half = 1;
    while (((int64_t)1 << 2 * half) < n) {
        half++;
    }
    uint64_t mask = ((uint64_t)1 << half) - 1, x = (uint64_t)position;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (uint64_t round = 0; round < 4; round++) {
            uint32_t r[4];
            philox4x32(r, seed, right | round << 32, epoch, RNG_SHUFFLE);
            uint64_t next = left ^ (r[0] & mask);
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

// -------------------------------------------------------------------------------------------------
// 3. Options
// A table with one row per option. Parsing, --help, the start-up box, the first line of the log,
// checkpoints and the comparison of options on resume are loops over this table. A new option needs
// a row and a field; a new choice needs a word in its list and a name in its enum; both need the
// code that implements them.
// 1. A value outside its range or choices, an unknown option and a repeated option each end the
//    run; nothing is clamped.
// 2. Options that contradict each other are rejected by name (options_contradict).
// 3. Letters that llm.c uses keep its meaning, except -h (help) and -r (level 1 recomputes the
//    whole block).

typedef struct {
    const char *model, *train_data, *val_data, *tokenizer, *output, *prompt, *recompute, *eval;
    const char *gpu, *prove;
    int64_t schedule, dtype, moments, master, grad_dtype, matmul;  // number of the choice
    int64_t offload;                                               // bits 1 << KIND_*
    int64_t seq_len, seed, shuffle, batch, tokens_per_step, steps, overfit, warmup;
    int64_t val_every, val_batches, sample_every, sample_tokens, top_k;
    int64_t generate, samples;
    int64_t max_skips, save_every, keep, log_every, resume, quiet, logit_rows, workspace, tune;
    int64_t check_data;
    int64_t gpus, zero, timeout, gpu_mem;
    int64_t plan, fit, minimum, largest, json, check, compare, version, help;
    double lr, final_lr, weight_decay, beta1, beta2, eps, clip, skip_zscore, temperature, top_p;
    char given[80];  // for each row of the table: whether the user has given the option
} Options;

// The choices of an option, in the order of the enum above each list. Choices are numbered from 1;
// 0 means that the program decides. "a=b": b is another spelling of a.
enum { SCHEDULE_COSINE = 1, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD };
static const char schedules[] = "cosine|linear|constant|wsd";
enum { DTYPE_BF16 = 1, DTYPE_FP16, DTYPE_FP32 };
static const char dtypes[] = "bf16|fp16|fp32";
enum { GRADS_BF16 = 1, GRADS_FP32 };
static const char grad_dtypes[] = "bf16|fp32";
enum { MATMUL_FP32 = 1, MATMUL_BF16 };
static const char matmul_types[] = "fp32|bf16";
enum { MOMENTS_FP32 = 1, MOMENTS_BF16 };
static const char moment_dtypes[] = "fp32|bf16";
enum { MASTER_SPLIT = 1, MASTER_NONE };
static const char masters[] = "split=1|none=0";
// Any of these except none and auto may be combined, separated by commas. The bits are 1 << KIND_*.
static const char offloads[] = "none|weights|gradients|moments|master|residuals|auto";
enum { OFFLOAD_AUTO = 1 << 5 };  // never combined with others: the bit after those of KIND_*
enum { FIT_BITS = 1, FIT_ANY, FIT_ALL };
static const char fits[] = "bits|any|all";
enum { LARGEST_BATCH = 1, LARGEST_SEQ_LEN };
static const char largests[] = "batch|seq-len";

// OPT_SWITCH takes 0 or 1, OPT_FLAG takes no value, OPT_BYTES a size such as 16GiB.
typedef enum {
    OPT_TEXT, OPT_CHOICE, OPT_SET, OPT_INT, OPT_REAL, OPT_SWITCH, OPT_FLAG, OPT_BYTES
} OptionType;

// Whether a resumed run may have a value that differs from its checkpoint's. ANY: yes, and the
// difference is reported. SAME: no. OWN: yes, without a report, because the option belongs to the
// command and not to the run.
typedef enum { ANY, SAME, OWN } OptionOnResume;

// Flags of a row. GENERATES: --generate uses the option; it rejects options without this flag.
// LEAST: --minimum rejects the option, because it chooses the value or does not depend on it.
enum { GENERATES = 1, LEAST = 2 };

typedef struct {
    const char *name;
    char letter;  // 0: none
    OptionType type;
    size_t offset;        // of the field in Options
    const char *value;    // default, as a user would type it; NULL: the program or model decides
    double low, high;     // allowed range of a number; for a text, low 1 means not empty
    const char *choices;  // OPT_CHOICE and OPT_SET: the list; OPT_INT: a word that means 0, or NULL
    OptionOnResume on_resume;
    int commands;  // GENERATES, LEAST
    const char *subject, *help;
} OptionRow;

// Ranges exclude values that are certainly mistakes or would overflow later: integers stay below
// 9e15, so that a double holds them exactly, B x T below 2^31, the step number within the eight
// digits of a checkpoint's name, and 1 - beta^t above 0.
#define FIELD(name) offsetof(Options, name)
static const OptionRow option_rows[] = {
    {"model", 'e', OPT_TEXT, FIELD(model), NULL, 1, 0, NULL, OWN, GENERATES, "Model",
     "d12 d24 d36 d48 (gpt2, gpt2-medium, gpt2-large, gpt2-xl), a shape: l4h4c128t64, or "
     "weights: a folder with model.safetensors and config.json, or an llm.c .bin; "
     "l4h4c128t64v8192 also sets the vocabulary size, by default the data's"},
    {"seq-len", 't', OPT_INT, FIELD(seq_len), NULL, 1, 1 << 20, NULL, ANY, GENERATES, "Model",
     "tokens in a sequence, T; default: the model's"},
    {"seed", 0, OPT_INT, FIELD(seed), "42", 0, 9e15, NULL, SAME, GENERATES, "Model",
     "seed of the random numbers for initialisation, shuffling and sampling"},
    {"train-data", 'i', OPT_TEXT, FIELD(train_data), NULL, 1, 0, NULL, ANY, 0, "Data",
     "token shards to train on, a glob pattern; default: tinyshakespeare in data/, else the "
     "generated stories"},
    {"val-data", 'j', OPT_TEXT, FIELD(val_data), NULL, 1, 0, NULL, ANY, 0, "Data",
     "token shards to validate on"},
    {"tokenizer", 0, OPT_TEXT, FIELD(tokenizer), "", 0, 0, NULL, ANY, GENERATES, "Data",
     "the tokenizer's merges: GPT-2's vocab.bpe, llm.c's gpt2_tokenizer.bin or a merges.txt; "
     "default: in data/ for GPT-2's tokens, else PREFIX_merges.txt next to the shards"},
    {"check-data", 0, OPT_FLAG, FIELD(check_data), "0", 0, 1, NULL, OWN, 0, "Data",
     "read all data before training: a token outside the vocabulary, or a shard whose SHA-256 is "
     "not the one in its header or in the checkpoint, ends the run"},
    {"shuffle", 0, OPT_SWITCH, FIELD(shuffle), "1", 0, 1, NULL, SAME, 0, "Data",
     "read the windows of an epoch in random order"},
    {"batch", 'b', OPT_INT, FIELD(batch), "4", 1, 65536, "auto", ANY, LEAST, "Batch",
     "sequences in a micro-batch, B; auto (the default with -d on a GPU): the most that divide the "
     "step and fit without recomputation, at most 65,536 tokens"},
    {"tokens-per-step", 'd', OPT_INT, FIELD(tokens_per_step), NULL, 1, 1e12, NULL, ANY, 0, "Batch",
     "tokens in an optimizer step, a multiple of B x T; default: B x T"},
    {"steps", 'x', OPT_INT, FIELD(steps), NULL, 1, 99999999, NULL, ANY, 0, "Batch",
     "optimizer steps; default: one epoch"},
    {"overfit", 'a', OPT_SWITCH, FIELD(overfit), "0", 0, 1, NULL, ANY, 0, "Batch",
     "train on the first batch only, repeatedly"},
    {"lr", 'l', OPT_REAL, FIELD(lr), "3e-4", 0, 100, NULL, ANY, 0, "Optimizer",
     "peak learning rate"},
    {"schedule", 'k', OPT_CHOICE, FIELD(schedule), "cosine", 0, 0, schedules, ANY, 0, "Optimizer",
     "shape of the learning rate's decay after warmup (wsd: constant, then 1 - sqrt over the "
     "last fifth)"},
    {"warmup", 'u', OPT_INT, FIELD(warmup), "0", 0, 1e9, NULL, ANY, 0, "Optimizer",
     "steps of linear warmup from 0"},
    {"final-lr", 'q', OPT_REAL, FIELD(final_lr), "0", 0, 1, NULL, ANY, 0, "Optimizer",
     "final learning rate, as a fraction of the peak"},
    {"weight-decay", 'c', OPT_REAL, FIELD(weight_decay), "0", 0, 100, NULL, ANY, 0, "Optimizer",
     "decoupled weight decay, applied to two-dimensional tensors only"},
    {"beta1", 0, OPT_REAL, FIELD(beta1), "0.9", 0, 0.9999999, NULL, ANY, 0, "Optimizer",
     "decay rate of AdamW's first moment"},
    {"beta2", 0, OPT_REAL, FIELD(beta2), "0.95", 0, 0.9999999, NULL, ANY, 0, "Optimizer",
     "decay rate of AdamW's second moment"},
    {"eps", 0, OPT_REAL, FIELD(eps), "1e-8", 1e-30, 1, NULL, ANY, 0, "Optimizer", "AdamW epsilon"},
    {"clip", 0, OPT_REAL, FIELD(clip), "1", 0, 1e9, NULL, ANY, 0, "Optimizer",
     "clip gradients to this norm; 0: no clipping"},
    {"skip-zscore", 0, OPT_REAL, FIELD(skip_zscore), "0", 0, 1e9, NULL, ANY, 0, "Optimizer",
     "skip a step if its gradient norm exceeds the mean of the last 128 by this many standard "
     "deviations; 0: never"},
    {"max-skips", 0, OPT_INT, FIELD(max_skips), "20", 0, 1e9, NULL, ANY, 0, "Optimizer",
     "end the run as failed after this many consecutive skipped steps; 0: never. Steps skipped "
     "because fp16's loss scale overflowed do not count"},
    {"val-every", 'v', OPT_INT, FIELD(val_every), "250", 0, 1e9, NULL, ANY, 0, "Validation",
     "steps between validations; 0: never"},
    {"val-batches", 'm', OPT_INT, FIELD(val_batches), "20", 0, 1e9, NULL, ANY, 0, "Validation",
     "batches per validation, at most as many as the data has; 0: all"},
    {"sample-every", 's', OPT_INT, FIELD(sample_every), "0", 0, 1e9, NULL, ANY, 0, "Samples",
     "steps between samples, with one more after the last step; 0: never"},
    {"sample-tokens", 'g', OPT_INT, FIELD(sample_tokens), "256", 1, 1e6, NULL, ANY, GENERATES,
     "Samples", "tokens in a sample"},
    {"prompt", 0, OPT_TEXT, FIELD(prompt), "", 0, 0, NULL, ANY, GENERATES, "Samples",
     "text that samples continue; empty: start from the end-of-text token; with --generate, - "
     "reads one prompt per line of stdin and ends at the first that is too long"},
    {"temperature", 0, OPT_REAL, FIELD(temperature), "1", 0, 100, NULL, ANY, GENERATES, "Samples",
     "softmax temperature of samples; 0: always the most likely token"},
    {"top-k", 0, OPT_INT, FIELD(top_k), "0", 0, 1e6, NULL, ANY, GENERATES, "Samples",
     "sample from the k most likely tokens; 0: from all"},
    {"top-p", 0, OPT_REAL, FIELD(top_p), "1", 1e-6, 1, NULL, ANY, GENERATES, "Samples",
     "sample from the most likely tokens whose probabilities sum to p"},
    {"generate", 0, OPT_FLAG, FIELD(generate), "0", 0, 1, NULL, OWN, GENERATES, "Samples",
     "print the prompt and the model's continuation, up to its end-of-text token or at most -g "
     "tokens, and exit; needs memory for the weights and a KV cache only. Beyond T positions the "
     "window slides, as in samples of a training run, and each token recomputes the window"},
    {"samples", 0, OPT_INT, FIELD(samples), "1", 1, 1e6, NULL, OWN, GENERATES, "Samples",
     "with --generate: samples per prompt, separated by a line ---"},
    {"output", 'o', OPT_TEXT, FIELD(output), "", 1, 0, NULL, OWN, 0, "Output",
     "folder for log.jsonl and checkpoints; default: none"},
    {"save-every", 'n', OPT_INT, FIELD(save_every), "0", 0, 1e9, NULL, ANY, 0, "Output",
     "steps between checkpoints; 0: only the one at the end"},
    {"keep", 0, OPT_INT, FIELD(keep), "0", 0, 1e6, NULL, ANY, 0, "Output",
     "number of newest checkpoints to keep; 0: all"},
    {"log-every", 0, OPT_INT, FIELD(log_every), "1", 1, 1e9, NULL, ANY, 0, "Output",
     "steps between lines on the terminal and in log.jsonl; skipped steps and the last one are "
     "always logged"},
    {"resume", 'y', OPT_SWITCH, FIELD(resume), "0", 0, 1, NULL, OWN, 0, "Output",
     "resume from the newest complete checkpoint in the output folder, if there is one"},
    {"quiet", 0, OPT_FLAG, FIELD(quiet), "0", 0, 1, NULL, OWN, GENERATES, "Output",
     "print only errors and the score of --eval; log.jsonl is written as usual"},
    {"recompute", 'r', OPT_TEXT, FIELD(recompute), "auto", 0, 0, NULL, ANY, LEAST, "Memory",
     "activation checkpointing: what backward recomputes, one of the levels below. LEVEL:K: in "
     "the first K blocks only; LEVEL:K,LEVEL: a second level in the other blocks; auto: the least "
     "that fits"},
    {"logit-rows", 0, OPT_INT, FIELD(logit_rows), "0", 0, 1 << 30, NULL, ANY, LEAST, "Memory",
     "rows of logits in memory at a time (changes rounding); 0: as many as fit in 64 MiB, on a GPU "
     "one eighth of the micro-batch's rows, at least 2560 and at most 8192"},
    {"matmul", 0, OPT_CHOICE, FIELD(matmul), "fp32", 0, 0, matmul_types, ANY, 0, "Memory",
     "CPU: number type of matmul operands; sums and everything else stay fp32"},
    {"workspace", 0, OPT_BYTES, FIELD(workspace), "0", 0, 0, NULL, ANY, 0, "Memory",
     "device memory that cuBLASLt may use for partial sums (changes rounding); 0: 128MiB, or 32MiB "
     "for small models"},
    {"dtype", 0, OPT_CHOICE, FIELD(dtype), NULL, 0, 0, dtypes, ANY, GENERATES, "Memory",
     "number type of weights and activations; default: fp32 on the CPU, bf16 on a GPU that "
     "supports it, else fp16"},
    {"grad-dtype", 0, OPT_CHOICE, FIELD(grad_dtype), NULL, 0, 0, grad_dtypes, ANY, 0, "Memory",
     "number type of the gradients of matrices; default: bf16 if --dtype is bf16, else fp32"},
    {"moments", 0, OPT_CHOICE, FIELD(moments), "fp32", 0, 0, moment_dtypes, ANY, LEAST, "Memory",
     "number type of AdamW's two moments"},
    {"master", 'w', OPT_CHOICE, FIELD(master), "split", 0, 0, masters, ANY, LEAST, "Memory",
     "with bf16 weights: keep the low halves of fp32 master weights (split), or round "
     "stochastically (none)"},
    {"offload", 0, OPT_SET, FIELD(offload), "auto", 0, 0, offloads, ANY, LEAST, "Memory",
     "states kept in host memory, separated by commas; auto: only what does not fit on the GPU"},
    {"gpus", 0, OPT_INT, FIELD(gpus), "1", 1, 1024, NULL, ANY, 0, "Many GPUs",
     "GPUs of this machine to train on, each with a part of the batch; torchrun, srun and "
     "mpirun start ranks on several machines; with --plan, any number"},
    {"zero", 'z', OPT_INT, FIELD(zero), "0", 0, 3, NULL, ANY, 0, "Many GPUs",
     "ZeRO stage: what is sharded across GPUs. 0: nothing, 1: moments and master, 2: gradients "
     "too, 3: weights too"},
    {"timeout", 0, OPT_INT, FIELD(timeout), "60", 1, 1e6, NULL, OWN, 0, "Many GPUs",
     "end the run after this many seconds without progress and name the GPU that hangs, is "
     "stopped or waits; must exceed the time of two micro-batches"},
    {"plan", 0, OPT_FLAG, FIELD(plan), "0", 0, 1, NULL, OWN, GENERATES, "Plan and checks",
     "print the memory plan and what each setting would save, and exit"},
    {"eval", 0, OPT_TEXT, FIELD(eval), NULL, 1, 0, NULL, OWN, 0, "Plan and checks",
     "score the model on a multiple-choice file in llm.c's format (HellaSwag, MMLU), and exit"},
    {"json", 0, OPT_FLAG, FIELD(json), "0", 0, 1, NULL, OWN, GENERATES, "Plan and checks",
     "with --plan, --fit, --minimum, --largest, --compare or --eval: print JSON; dev/report.py "
     "draws plans"},
    {"fit", 0, OPT_CHOICE, FIELD(fit), NULL, 0, 0, fits, OWN, 0, "Plan and checks",
     "print the fastest settings that fit, varying those that are not given, and exit. bits: "
     "batch, recomputation and offload; any: number types too; all: every setting that no other "
     "beats in device memory, host memory and speed"},
    {"minimum", 0, OPT_FLAG, FIELD(minimum), "0", 0, 1, NULL, OWN, 0, "Plan and checks",
     "print the least memory in which the model can be trained, with the settings, and exit"},
    {"largest", 0, OPT_CHOICE, FIELD(largest), NULL, 0, 0, largests, OWN, 0, "Plan and checks",
     "print the largest --batch or --seq-len that fits, and exit; other options as given, by "
     "default -r auto --offload none"},
    {"gpu", 0, OPT_TEXT, FIELD(gpu), "", 0, 0, NULL, OWN, GENERATES, "Plan and checks",
     "with --plan, --fit, --minimum, --largest: plan for this card, one of those below; all, with "
     "--plan: print one line for each card"},
    {"gpu-mem", 0, OPT_BYTES, FIELD(gpu_mem), "0", 0, 9e15, NULL, OWN, GENERATES | LEAST,
     "Plan and checks",
     "with --plan, --fit, --largest: plan for this much device memory (16GiB); a run on a GPU uses "
     "no more than a card of this size has"},
    {"check", 0, OPT_FLAG, FIELD(check), "0", 0, 1, NULL, OWN, 0, "Plan and checks",
     "GPU program: compare the loss and every gradient of one batch with the CPU reference"},
    {"compare", 0, OPT_FLAG, FIELD(compare), "0", 0, 1, NULL, OWN, 0, "Plan and checks",
     "GPU program: compare memory and time of a step with and without recomputation"},
    {"prove", 0, OPT_TEXT, FIELD(prove), NULL, 1, 0, NULL, OWN, 0, "Plan and checks",
     "GPU program: try each faster kernel on this GPU for HS,T,NH,B (head size, tokens, heads, "
     "sequences), as a run does once by itself, print whether its results are correct and its "
     "speed-up, and exit"},
    {"tune", 0, OPT_SWITCH, FIELD(tune), "1", 0, 1, NULL, OWN, GENERATES, "Plan and checks",
     "GPU program: time cuBLASLt's algorithms and try faster kernels at start-up, and cache the "
     "choice for this GPU in ~/.cache/train_gpt2; 0: use the heuristic's first algorithm and the "
     "default kernels"},
    {"version", 0, OPT_FLAG, FIELD(version), "0", 0, 1, NULL, OWN, 0, "Plan and checks",
     "print version, compiler and enabled features"},
    {"help", 'h', OPT_FLAG, FIELD(help), "0", 0, 1, NULL, OWN, GENERATES, "Plan and checks",
     "print this text"},
};
#undef FIELD
enum { OPTION_ROWS = sizeof option_rows / sizeof option_rows[0] };
static_assert(OPTION_ROWS <= sizeof ((Options *)NULL)->given, "`given` has one entry per row");

// Parses a size such as "16GiB", "512M", "1e9" or "38000000" into bytes; -1 if it is not a size.
// Units are powers of 1024 in every spelling, because that is how the memory of GPUs is sold and
// reported.
static int64_t parse_bytes(const char *text) {
    char *end;
    errno = 0;
    double value = strtod(text, &end);
    if (end == text || errno != 0 || !(value >= 0)) {
        return -1;
    }
    static const char units[] = "KMGT";
    const char *unit = strchr(units, *end >= 'a' && *end <= 'z' ? *end - 32 : *end);
    if (unit && *unit) {
        value *= (double)((int64_t)1 << 10 * (unit - units + 1));
        end++;
        end += *end == 'i';
    }
    end += *end == 'B' || *end == 'b';
    return *end == 0 && value < 9e15 ? (int64_t)value : -1;
}

// Returns the number, from 1, of the choice whose spelling is `word` (n bytes); 0 if there is none.
// In a list such as "cpu,cpuacct" every word has the number 1.
static int choice_find(const char *choices, const char *word, size_t n) {
    int number = 1;
    for (const char *c = choices; *c; c += *c != 0) {
        size_t length = strcspn(c, "=|,");
        if (length == n && memcmp(c, word, n) == 0) {
            return number;
        }
        c += length;
        number += *c == '|';
    }
    return 0;
}

// Returns the first spelling of choice `number`, which must be in the list.
static ShortText choice_text(const char *choices, int64_t number) {
    ShortText text;
    for (; number > 1 && *choices; number--) {
        choices += strcspn(choices, "|");
        choices += *choices == '|';
    }
    snprintf(text.s, sizeof text.s, "%.*s", (int)strcspn(choices, "=|"), choices);
    return text;
}

// Parses a list such as "moments,master" into bits. The second choice is bit 0; the first choice
// means none and cannot be combined with others. Returns -1 if the list is not valid.
static int64_t set_parse(const char *choices, const char *list) {
    int64_t bits = 0;
    const char *word = list, *end;
    do {
        end = word + strcspn(word, ",");
        bits |= (int64_t)1 << choice_find(choices, word, (size_t)(end - word));
        word = end + 1;
    } while (*end);
    return bits == 2 ? 0 : bits & 3 ? -1 : bits >> 2;
}

// Sets one option from its text; ends the run if the row does not allow the value. The whole text
// must be the value: `-b 4x` is a typo, not 4.
static void option_set(Options *o, const OptionRow *row, const char *text) {
    char *field = (char *)o + row->offset, *end = NULL, name[40], allowed[96];
    int64_t number = 0;
    double value = 0;
    int right = 1;
    errno = 0;
    snprintf(allowed, sizeof allowed, "%s %s", row->type == OPT_SET ? "a list of" : "one of",
             row->choices ? row->choices : "");
    switch (row->type) {
        case OPT_TEXT: *(const char **)(void *)field = text; return;
        case OPT_CHOICE:
            number = choice_find(row->choices, text, strlen(text));
            right = number > 0;
            break;
        case OPT_SET:
            number = set_parse(row->choices, text);
            right = number >= 0;
            break;
        case OPT_BYTES:
            number = parse_bytes(text);
            right = number >= 0;
            snprintf(allowed, sizeof allowed, "a size such as 16GiB or 512M");
            break;
        case OPT_REAL:
            value = strtod(text, &end);
            right = end != text && *end == 0 && value >= row->low && value <= row->high;
            snprintf(allowed, sizeof allowed, "a number from %.9g to %.9g", row->low, row->high);
            break;
        default:
            number = strtoll(text, &end, 10);
            value = (double)number;
            right = end != text && *end == 0 && value >= row->low && value <= row->high;
            if (row->choices && strcmp(text, row->choices) == 0) {  // one word: 0
                number = 0;
                right = 1;
            }
            snprintf(allowed, sizeof allowed, "a whole number from %.0f to %.0f%s%s", row->low,
                     row->high, row->choices ? " or " : "", row->choices ? row->choices : "");
    }
    if (!right || errno == ERANGE) {
        snprintf(name, sizeof name, row->letter ? "--%s (-%c)" : "--%s", row->name, row->letter);
        die("%s: '%s' is not %s", name, text, allowed);
    }
    if (row->type == OPT_REAL) {
        *(double *)(void *)field = value;
    } else {
        *(int64_t *)(void *)field = number;
    }
}

// Returns the value of an option as a user would type it, so that parsing the text gives the same
// value; "" if the program decides.
static const char *option_text(char text[64], const Options *o, const OptionRow *row) {
    const char *field = (const char *)o + row->offset;
    if (row->type == OPT_TEXT) {
        const char *value = *(const char *const *)(const void *)field;
        return value ? value : "";
    }
    memset(text, 0, 64);
    if (row->type == OPT_REAL) {  // the fewest digits that parse to the same value
        const double value = *(const double *)(const void *)field;
        int digits = 6;
        do {
            snprintf(text, 64, "%.*g", digits, value);
        } while (strtod(text, NULL) != value && digits++ < 17);
        return text;
    }
    int64_t number = *(const int64_t *)(const void *)field;
    if (row->type == OPT_CHOICE && number) {
        snprintf(text, 64, "%s", choice_text(row->choices, number).s);
    } else if (row->type == OPT_SET) {
        snprintf(text, 64, "%s", number ? "" : choice_text(row->choices, 1).s);
        for (int i = 0; number >> i; i++) {
            size_t n = strlen(text);
            if (number >> i & 1) {
                snprintf(text + n, 64 - n, "%s%s", n ? "," : "",
                         choice_text(row->choices, i + 2).s);
            }
        }
    } else if (row->choices && row->type == OPT_INT && !number) {
        snprintf(text, 64, "%s", row->choices);
    } else if (row->type != OPT_CHOICE) {
        snprintf(text, 64, "%" PRId64, number);
    }
    return text;
}

static void recompute_print_help(void);  // chapter Memory plan
static void gpu_print_help(void);        // chapter Step time

// Prints `text` and a newline, wrapped at spaces to 80 columns. The first line continues at column
// `column`; the others are indented by `indent`. UNBROKEN is printed as a space but is never a line
// break.
#define UNBROKEN '\037'
static void text_wrap(const char *text, int column, int indent) {
    enum { WIDTH = 80 };
    for (int space = 0; *text;) {
        const int n = (int)strcspn(text, " ");
        if (column + space + n > WIDTH && column > indent) {
            printf("\n%*s", indent, "");
            column = indent;
            space = 0;
        }
        column += printf("%*s", space, "") + n;
        for (int i = 0; i < n; i++) {
            putchar(text[i] == UNBROKEN ? ' ' : text[i]);
        }
        space = 1;
        text += n + (text[n] != 0);
    }
    printf("\n");
}

// Prints formatted text with text_wrap(), from column 0 on.
__attribute__((format(printf, 2, 3))) static void print_wrapped(int indent, const char *format,
                                                                ...) {
    char text[4096];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    text_wrap(text, 0, indent);
}

// Prints --help: the table by subject, with the choices and the default of every option.
static void options_print_help(const char *default_model) {
    enum { HELP_COLUMN = 26 };
    printf("usage: %s [options]\n\n"
           "Trains GPT-2. Without options: model %s on the data in data/.\n"
           "Options take a value unless they are marked (flag); --name value and\n"
           "--name=value are the same.\n",
           program_name, default_model);
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        if (i == 0 || strcmp(row->subject, option_rows[i - 1].subject) != 0) {
            printf("\n%s\n", row->subject);
        }
        const char *choices = row->choices ? row->choices : "", *value = row->value;
        char letter[8] = "    ", text[512];
        if (row->letter) {
            snprintf(letter, sizeof letter, "-%c, ", row->letter);
        }
        if (row->type == OPT_FLAG) {
            snprintf(text, sizeof text, "%s (flag)", row->help);
        } else if (row->choices || (value && value[0])) {
            snprintf(text, sizeof text, "%s [%s%s%s]", row->help, choices,
                     row->choices && value ? "; " : "", value ? value : "");
        } else {
            snprintf(text, sizeof text, "%s", row->help);
        }
        printf("  %s--%-17s ", letter, row->name);
        text_wrap(text, HELP_COLUMN, HELP_COLUMN);
        if (row->letter == 'r') {
            recompute_print_help();
        }
        if (strcmp(row->name, "gpu") == 0) {
            gpu_print_help();
        }
    }
}

// Returns the row of the option `name`, which must be in the table.
static const OptionRow *option_find(const char *name) {
    int row = 0;
    while (row < OPTION_ROWS && strcmp(option_rows[row].name, name) != 0) {
        row++;
    }
    check(row < OPTION_ROWS, "no option is called %s", name);
    return &option_rows[row];
}

// Returns whether the user has given the option, even if with its default value.
static int option_given(const Options *o, const char *name) {
    return o->given[option_find(name) - option_rows];
}

// Returns whether the command only plans, and needs neither the data nor the machine of the run.
static int options_plan(const Options *o) {
    return o->plan || o->fit || o->minimum || o->largest;
}

static int options_all_cards(const Options *o) { return strcmp(o->gpu, "all") == 0; }

// Ends the run if options contradict each other or require others that are missing: an option that
// would have no effect is reported as a mistake rather than ignored. Conditions that involve the
// model, the data or the machine are checked at the place of use.
static void options_contradict(const Options *o) {
    if (o->json && !options_plan(o) && !o->eval && !o->compare) {
        die("--json needs --plan, --fit, --minimum, --largest, --compare or --eval");
    }
    if (!!o->eval + !!o->prove + o->plan + !!o->fit + o->minimum + !!o->largest + o->check +
            o->compare > 1) {
        die("--eval, --prove, --plan, --fit, --minimum, --largest, --check and --compare are "
            "commands: give one");
    }
    if (o->eval && o->output[0]) {
        die("--eval writes no files and scores what --model (-e) names: leave --output (-o) out");
    }
    if (o->eval && o->zero == 3) {  // all-gathers need all ranks in the same batch
        die("--eval: each GPU scores its own examples; --zero (-z) 3 is for training");
    }
    if (o->check_data && (options_plan(o) || o->eval)) {
        die("--check-data reads the data of a training run: leave it out");
    }
    if (o->samples > 1 && !o->generate) {
        die("--samples needs --generate");
    }
    if (o->generate && options_plan(o) && !o->plan) {
        die("--generate: --plan prints the memory that it takes; --fit, --minimum and --largest "
            "are for training");
    }
    if (o->gpu[0] && !options_plan(o)) {
        die("--gpu needs --plan, --fit, --minimum or --largest: it only plans for the card that "
            "it names");
    }
    if (options_all_cards(o) && (!o->plan || o->generate)) {
        die("--gpu all needs --plan, for training: it prints one line for each card");
    }
    if (o->gpu_mem > 0 && o->gpu_mem < 1 << 20) {
        die("--gpu-mem: %" PRId64 " bytes are less than 1 MiB; did you mean %" PRId64 "GiB?",
            o->gpu_mem, o->gpu_mem);
    }
    if ((o->largest == LARGEST_BATCH && option_given(o, "batch")) ||
        (o->largest == LARGEST_SEQ_LEN && o->seq_len)) {
        die("--largest %s finds the largest value: leave --%s out",
            choice_text(largests, o->largest).s, choice_text(largests, o->largest).s);
    }
    if (o->offload & OFFLOAD_AUTO && o->offload != OFFLOAD_AUTO) {
        die("--offload auto cannot be combined with other states: it chooses them itself");
    }
    int64_t wants = o->resume ? o->resume : o->save_every ? o->save_every : o->keep;
    if (wants && !o->output[0]) {
        die("%s %" PRId64 " needs --output (-o): the folder of the checkpoints",
            o->resume ? "--resume (-y)" : o->save_every ? "--save-every (-n)" : "--keep", wants);
    }
    if (o->val_data && !o->train_data) {
        die("--val-data (-j) needs --train-data (-i): the default data includes validation data");
    }
}

// Ends the run if an option is given that --generate would ignore, or that --minimum decides.
static void options_of_command(const Options *o) {
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        if (o->given[i] && o->generate && !(row->commands & GENERATES)) {
            die("--generate neither trains nor writes files: leave --%s out", row->name);
        }
        if (o->given[i] && o->minimum && row->commands & LEAST) {
            die("--minimum finds the least memory by itself: leave --%s out", row->name);
        }
    }
}

// Sets the defaults of the table; an option without a default is 0 or NULL, and the program or the
// model decides.
static void options_default(Options *o) {
    memset(o, 0, sizeof *o);
    for (int i = 0; i < OPTION_ROWS; i++) {
        if (option_rows[i].value) {
            option_set(o, &option_rows[i], option_rows[i].value);
        }
    }
}

// Fills `o` from the defaults and argv; its texts point into argv. Ends the run at the first
// invalid argument. An option given twice is an error, because only one of its values could take
// effect. With --help or --version, contradictions are not checked.
static void options_parse(Options *o, int argc, char **argv) {
    options_default(o);
    for (int a = 1; a < argc; a++) {
        const char *word = argv[a], *value = NULL;
        const OptionRow *row = NULL;
        int is_long = word[0] == '-' && word[1] == '-';
        size_t length = is_long ? strcspn(word + 2, "=") : 0;
        for (int i = 0; i < OPTION_ROWS && !row; i++) {
            const OptionRow *r = &option_rows[i];
            if (is_long ? strlen(r->name) == length && memcmp(r->name, word + 2, length) == 0
                        : word[0] == '-' && r->letter && word[1] == r->letter && word[2] == 0) {
                row = r;
            }
        }
        if (!row) {
            die("unknown option '%s'; --help lists all of them", word);
        }
        if (o->given[row - option_rows]++) {
            die("--%s is given twice", row->name);
        }
        if (is_long && word[2 + length] == '=') {
            value = word + 3 + length;
        }
        if (row->type == OPT_FLAG) {
            if (value) {
                die("--%s takes no value, found '%s'", row->name, value);
            }
            value = "1";
        } else if (!value) {
            if (a + 1 == argc) {
                die("--%s needs a value; --help says which", row->name);
            }
            value = argv[++a];
        }
        if (row->type == OPT_TEXT && row->low > 0 && !value[0]) {
            die("--%s: the value is empty", row->name);
        }
        option_set(o, row, value);
    }
    if (!o->help && !o->version) {
        options_of_command(o);
        options_contradict(o);
    }
}

// -------------------------------------------------------------------------------------------------
// 4. The model
// Sizes: L layers, NH heads of HS = C / NH channels, C channels, maxT positions, V tokens, and Vp,
// which is V rounded up to a multiple of 128, so that the classifier's matmul has no partial tiles.
// One table lists the sixteen tensors and their names in Hugging Face's files. Weights of linear
// layers are (out, in); in Hugging Face's files they are (in, out). wte is also the classifier's
// weight (tied).
// 1. The flat parameter buffer is block-major: wte, wpe, then the twelve tensors of each block,
//    then the last LayerNorm. So all parameters of a block are one range of bytes.
// 2. Every tensor starts at a multiple of 64 elements, 128 bytes or more, so that vector loads of
//    any width are aligned on the CPU and on a GPU. On the CPU the gaps are zero, so the norm of
//    the gradients can include them.
// 3. Rows V..Vp-1 of wte are always zero.

typedef struct {
    int L, NH, C, maxT, V, Vp;
} Model;

enum {
    WTE, WPE, LN1W, LN1B, QKVW, QKVB, ATTPROJW, ATTPROJB, LN2W, LN2B, FCW, FCB, FCPROJW, FCPROJB,
    LNFW, LNFB, TENSORS
};
typedef enum { DIM_1, DIM_C, DIM_3C, DIM_4C, DIM_V, DIM_T } Dim;
// INIT_NORMAL: N(0, 0.02); INIT_RESIDUAL: N(0, 0.02 / sqrt(2 L)), because the outputs of 2 L of
// these matmuls are added to the residual stream, whose variance should not grow with the depth.
typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL, INIT_RESIDUAL } Init;
typedef struct {
    const char *name, *hf_name;
    Dim rows, cols;  // cols DIM_1: a vector, which AdamW does not decay
    int per_layer;
    int transposed;  // in Hugging Face's files
    Init init;
} TensorEntry;

static const TensorEntry tensor_table[TENSORS] = {
    {"wte",      "wte.weight",          DIM_V,  DIM_C,  0, 0, INIT_NORMAL},
    {"wpe",      "wpe.weight",          DIM_T,  DIM_C,  0, 0, INIT_NORMAL},
    {"ln1w",     "ln_1.weight",         DIM_C,  DIM_1,  1, 0, INIT_ONE},
    {"ln1b",     "ln_1.bias",           DIM_C,  DIM_1,  1, 0, INIT_ZERO},
    {"qkvw",     "attn.c_attn.weight",  DIM_3C, DIM_C,  1, 1, INIT_NORMAL},
    {"qkvb",     "attn.c_attn.bias",    DIM_3C, DIM_1,  1, 0, INIT_ZERO},
    {"attprojw", "attn.c_proj.weight",  DIM_C,  DIM_C,  1, 1, INIT_RESIDUAL},
    {"attprojb", "attn.c_proj.bias",    DIM_C,  DIM_1,  1, 0, INIT_ZERO},
    {"ln2w",     "ln_2.weight",         DIM_C,  DIM_1,  1, 0, INIT_ONE},
    {"ln2b",     "ln_2.bias",           DIM_C,  DIM_1,  1, 0, INIT_ZERO},
    {"fcw",      "mlp.c_fc.weight",     DIM_4C, DIM_C,  1, 1, INIT_NORMAL},
    {"fcb",      "mlp.c_fc.bias",       DIM_4C, DIM_1,  1, 0, INIT_ZERO},
    {"fcprojw",  "mlp.c_proj.weight",   DIM_C,  DIM_4C, 1, 1, INIT_RESIDUAL},
    {"fcprojb",  "mlp.c_proj.bias",     DIM_C,  DIM_1,  1, 0, INIT_ZERO},
    {"lnfw",     "ln_f.weight",         DIM_C,  DIM_1,  0, 0, INIT_ONE},
    {"lnfb",     "ln_f.bias",           DIM_C,  DIM_1,  0, 0, INIT_ZERO},
};
enum { TENSOR_ALIGN = 64 };

// Returns the size of a dimension of the table in model `m`; `sizes` is in the order of Dim.
static int64_t dim_size(const Model *m, Dim dim) {
    const int64_t C = m->C;
    const int64_t sizes[] = {1, C, 3 * C, 4 * C, m->V, m->maxT};
    return sizes[dim];
}

// Returns the number of rows of one tensor (of one layer), without wte's padding rows.
static int64_t tensor_rows(const Model *m, int tensor) {
    return dim_size(m, tensor_table[tensor].rows);
}

static int64_t tensor_cols(const Model *m, int tensor) {
    return dim_size(m, tensor_table[tensor].cols);
}

// Returns the number of elements of one tensor (of one layer) in a buffer, including wte's padding
// rows.
static int64_t tensor_size(const Model *m, int tensor) {
    int padded = tensor_table[tensor].rows == DIM_V;
    return (padded ? m->Vp : tensor_rows(m, tensor)) * tensor_cols(m, tensor);
}

static int tensor_is_matrix(int tensor) { return tensor_table[tensor].cols != DIM_1; }
static int tensor_copies(const Model *m, int tensor) {
    return tensor_table[tensor].per_layer ? m->L : 1;
}

// A flat buffer holds all tensors, or only the matrices or only the vectors (gradients on a GPU).
enum { ALL_TENSORS, MATRICES, VECTORS };

// Returns the number of elements that one tensor (of one layer) occupies in a flat buffer of
// `subset`, including the gap after it; 0 if the tensor is not in the subset.
static int64_t tensor_padded_size(const Model *m, int tensor, int subset) {
    if (subset != ALL_TENSORS && tensor_is_matrix(tensor) != (subset == MATRICES)) {
        return 0;
    }
    return round_up_i64(tensor_size(m, tensor), TENSOR_ALIGN);
}

// Returns the offset, in elements, of a tensor in the flat buffer of a subset; `layer` is ignored
// for wte, wpe, lnfw and lnfb. With `tensor` = TENSORS, returns the size of the buffer, in
// elements.
static int64_t subset_offset(const Model *m, int tensor, int layer, int subset) {
    // Elements before the tensor that are outside the blocks; those inside its block; the size of a
    // block.
    int64_t outside = 0, inside = 0, block = 0;
    for (int i = 0; i < TENSORS; i++) {
        int64_t size = tensor_padded_size(m, i, subset), before = i < tensor ? size : 0;
        block += tensor_table[i].per_layer ? size : 0;
        inside += tensor_table[i].per_layer ? before : 0;
        outside += tensor_table[i].per_layer ? 0 : before;
    }
    if (tensor < TENSORS && tensor_table[tensor].per_layer) {
        return outside + layer * block + inside;
    }
    return outside + (inside ? m->L * block : 0);  // before or after all blocks
}

static int64_t tensor_offset(const Model *m, int tensor, int layer) {
    return subset_offset(m, tensor, layer, ALL_TENSORS);
}

// The intersection of one tensor with a range of a flat buffer of all tensors.
typedef struct {
    int next;  // number of the next tensor, in the order of offsets; 0 at first
    int tensor, layer;
    int64_t first, count;  // elements first .. first + count - 1 of the tensor
    int64_t at;            // offset of element `first` in the range
} TensorSpan;
enum { PER_BLOCK = LNFW - LN1W };  // tensors of a block

// Advances `span`, initially {0}, to the next tensor with elements in [offset, offset + count).
// Returns 0 if none is left.
static int span_next(const Model *m, int64_t offset, int64_t count, TensorSpan *span) {
    const int tensors = TENSORS - PER_BLOCK + m->L * PER_BLOCK;
    const int64_t blocks = tensor_offset(m, LN1W, 0), block = tensor_offset(m, LN1W, 1) - blocks;
    if (span->next == 0 && offset >= blocks) {  // within a block, or after all blocks
        span->next = LN1W + PER_BLOCK * (int)min_i64((offset - blocks) / block, m->L);
    }
    while (span->next < tensors) {
        const int n = span->next++, inside = n - LN1W, after = inside - m->L * PER_BLOCK;
        span->layer = inside >= 0 && after < 0 ? inside / PER_BLOCK : 0;
        span->tensor = inside < 0 ? n : after < 0 ? LN1W + inside % PER_BLOCK : LNFW + after;
        const int64_t begin = tensor_offset(m, span->tensor, span->layer);
        const int64_t end = begin + tensor_size(m, span->tensor);
        if (begin >= offset + count) {
            break;
        }
        if (end > offset) {
            span->first = max_i64(offset - begin, 0);
            span->at = begin + span->first - offset;
            span->count = min_i64(end, offset + count) - begin - span->first;
            return 1;
        }
    }
    return 0;
}

// Returns the number of tensors, counting those of every layer.
static int model_tensors(const Model *m) {
    int n = 0;
    for (int i = 0; i < TENSORS; i++) {
        n += tensor_copies(m, i);
    }
    return n;
}

// Returns the number of elements of all tensors, including padded vocabulary rows but not alignment
// gaps.
static int64_t model_elements(const Model *m) {
    int64_t n = 0;
    for (int i = 0; i < TENSORS; i++) {
        n += tensor_size(m, i) * tensor_copies(m, i);
    }
    return n;
}

// Returns the number of parameters as it is usually quoted, without padding: 124,439,808 for the
// smallest GPT-2.
static int64_t model_parameters(const Model *m) {
    return model_elements(m) - (int64_t)(m->Vp - m->V) * m->C;
}

// Returns the FLOPs per training token, forward and backward: 6 for every parameter, including
// padding, and 6 L C T for causal attention. This is llm.c's convention, so that utilisation can be
// compared.
static double model_flops_per_token(const Model *m, int T) {
    return 6 * (double)model_elements(m) + 6.0 * m->L * m->C * T;
}

typedef struct {
    const char *name, *alias;
    int L, NH, C;
} Preset;
static const Preset presets[] = {
    {"d12", "gpt2", 12, 12, 768},
    {"d24", "gpt2-medium", 24, 16, 1024},
    {"d36", "gpt2-large", 36, 20, 1280},
    {"d48", "gpt2-xl", 48, 25, 1600},
};

enum { MAX_LAYERS = 400 };
static int model_is_allowed(const Model *m) {
    return m->L >= 1 && m->L <= MAX_LAYERS && m->NH >= 1 && m->C >= 1 && m->C <= 65536 &&
           m->C % m->NH == 0 && m->maxT >= 1 && m->maxT <= 1 << 20;
}

// The kind of value given to -e. It determines the vocabulary: a preset uses GPT-2's, a shape the
// data's unless it names one, a file (data/weights.c) its own.
typedef enum { MODEL_PRESET, MODEL_SHAPE, MODEL_FILE } ModelKind;

static void model_set_vocabulary(Model *m, int V) {
    m->V = V;
    m->Vp = (int)round_up_i64(V, 128);
}

// Parses -e into every field of *m; the vocabulary is 0 unless a shape names it. If the text is
// neither a preset nor a shape, it is the name of a file. Ends the run if a shape is out of range.
static ModelKind model_parse(Model *m, const char *text) {
    memset(m, 0, sizeof *m);
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        if (strcmp(text, presets[i].name) == 0 || strcmp(text, presets[i].alias) == 0) {
            m->L = presets[i].L;
            m->NH = presets[i].NH;
            m->C = presets[i].C;
            m->maxT = 1024;
            return MODEL_PRESET;
        }
    }
    int end = 0, V = 0, more = 0;
    if (strlen(text) > 40 || text[strspn(text, "lhctv-0123456789")] != 0 ||  // %d skips spaces
        sscanf(text, "l%5dh%5dc%6dt%8d%n", &m->L, &m->NH, &m->C, &m->maxT, &end) != 4) {
        return MODEL_FILE;
    }
    const int named = sscanf(text + end, "v%8d%n", &V, &more) == 1;
    if (text[end + more] != 0) {
        return MODEL_FILE;
    }
    if (!model_is_allowed(m) || (named && (V < 2 || V > MAX_VOCABULARY))) {
        die("--model (-e): '%s': allowed are 1-400 layers, 1-65536 channels in equal heads, "
            "1-1048576 positions, a vocabulary of 2-65535",
            text);
    }
    model_set_vocabulary(m, V);
    return MODEL_SHAPE;
}

// -------------------------------------------------------------------------------------------------
// 5. The system
// Interfaces to Linux: threads, signals, memory and core limits, ranks, the terminal, and how the
// program was built. If /proc or /sys gives no information, no limit is assumed.

// Threads: those of OpenMP, or a single one in a build without it.

#ifdef _OPENMP
static int thread_count(void) { return omp_get_max_threads(); }
static int thread_index(void) { return omp_get_thread_num(); }
#else
static int thread_count(void) { return 1; }
static int thread_index(void) { return 0; }
#endif

// Signals. A handler only records the request; the run acts on it at the next safe point. A paused
// pager or Ctrl-S blocks a write forever, so the handlers also make sure that this point is
// reached.

// The signal that asked the program to stop at the next safe point (0: none), and the line that
// on_signal() then prints: a whole line, or "".
static volatile sig_atomic_t stop_signal;
static const char *volatile stop_line = "";

// The first signal requests a stop and prints a line at once, because the next safe point may be
// seconds away; the second one exits immediately with status 128 + its number. SIGHUP and SIGUSR1
// only ever request a stop: a closing terminal sends SIGHUP twice, and SIGUSR1 may arrive in
// addition to another signal (chapter Starting and watching the ranks). Calls only
// async-signal-safe functions (POSIX, signal-safety).
static void on_signal(int number) {
    const int error = errno;
    if (stop_signal && stop_signal != SIGUSR1 && number != SIGHUP && number != SIGUSR1) {
        _exit(128 + number);
    }
    if (!stop_signal && write(STDERR_FILENO, stop_line, strlen(stop_line)) < 0) {
        stop_line = "";  // stderr cannot be written; the program stops all the same
    }
    stop_signal = number == SIGUSR1 && stop_signal ? stop_signal : number;
    errno = error;
}

// Makes writes to a closed pipe or beyond `ulimit -f` return an error instead of ending the
// program.
static void writes_return_errors(void) {
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
}

// Returns whether a write to `fd` would block now.
static int write_blocks(int fd) {
    struct pollfd out = {fd, POLLOUT, 0};
    return poll(&out, 1, 0) == 0;
}

// Grace period after SIGTERM. During start-up: 30 s in all, because nothing would be lost. While
// computing: until there has been no progress for 30 s, for example because a device hangs. While
// saving: unlimited, because the file system decides how long that takes.
enum { GRACE_SHORT, GRACE_PROGRESS, GRACE_UNLIMITED, GRACE_S = 30 };
static volatile sig_atomic_t stop_grace = GRACE_SHORT;

// Ends the program if it does not stop in time after SIGTERM. Called every second after the first
// signal. Counts calls instead of measuring time, because a program suspended by Ctrl-Z makes no
// progress but does not hang.
static void stop_overdue(void) {
    static const char line[] = "no progress for 30 s after SIGTERM: ended without saving\n";
    static uint64_t count;
    static int seconds;
    const uint64_t now = __atomic_load_n(progress_count, __ATOMIC_RELAXED);
    const int moves = stop_grace == GRACE_PROGRESS && now != count;
    seconds = stop_signal != SIGTERM || stop_grace == GRACE_UNLIMITED || moves ? 0 : seconds + 1;
    count = now;
    if (seconds > GRACE_S) {
        if (!write_blocks(STDERR_FILENO) && write(STDERR_FILENO, line, sizeof line - 1) < 0) {
            stop_line = "";  // stderr cannot be written; the program ends all the same
        }
        _exit(128 + SIGTERM);
    }
}

// Checks every second after the first signal whether stdout and stderr still accept output. A
// stream that fails STALLED consecutive checks is replaced by /dev/null, which also takes the rest
// of a write that is blocked (SA_RESTART). Calls only async-signal-safe functions.
static void on_alarm(int number) {
    enum { STALLED = 3 };
    static int waited[STDERR_FILENO + 1];
    const int error = errno;
    for (int fd = STDOUT_FILENO; fd <= STDERR_FILENO; fd++) {
        waited[fd] = write_blocks(fd) ? waited[fd] + 1 : 0;
        const int null_fd = waited[fd] < STALLED ? -1 : open("/dev/null", O_WRONLY | O_CLOEXEC);
        if (null_fd >= 0) {
            dup2(null_fd, fd);
            close(null_fd);
        }
    }
    stop_overdue();
    alarm(1);
    errno = error;
    (void)number;
}

// Enables (1) or disables (0) on_alarm() in this thread. It is disabled during a save: some file
// systems, such as those of cloud storage, return EINTR from a call that a signal interrupts, which
// would make the save fail.
static void alarm_enable(int yes) {
    sigset_t alarms;
    stop_grace = yes ? GRACE_PROGRESS : GRACE_UNLIMITED;
    (void)(sigemptyset(&alarms), sigaddset(&alarms, SIGALRM));
    sigprocmask(yes ? SIG_UNBLOCK : SIG_BLOCK, &alarms, NULL);
}

// The pipe to which on_stop() writes a byte; -1: the program does not wait for input.
static int stop_pipe[2] = {-1, -1};

// Handles all signals that ask the program to stop. Prints no line if stderr would block, because
// the handler would not return and the next signal would not be handled.
static void on_stop(int number) {
    stop_line = write_blocks(STDERR_FILENO) ? "" : stop_line;
    on_signal(number);
    if (stop_pipe[1] >= 0 && write(stop_pipe[1], "", 1) < 0) {
        errno = 0;  // the pipe is full, which wakes the reader just as well
    }
    signal(SIGALRM, on_alarm);  // not before: the parent process may have set an alarm
    alarm(1);
}

// Installs the handlers of the signals that ask the program to stop. A SIGHUP that was ignored from
// the start (nohup) stays ignored.
static void stop_on_signals(void) {
    struct sigaction action, hangup;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_stop;
    action.sa_flags = SA_RESTART;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN) {
        sigaction(SIGHUP, &action, NULL);
    }
    // Launchers and batch systems send SIGUSR1 to ask for "save and stop", and so does a parent to
    // its ranks, because a terminal's signals reach both. It only requests a stop, even if sent
    // repeatedly.
    sigaction(SIGUSR1, &action, NULL);
}

// Reads at most `budget` bytes from a stream that may block, such as a terminal. Returns the number
// of bytes, 0 at the end of the input or if a signal asks to stop, and -1 (errno) for an error.
// poll() also waits for the pipe that the handler writes to, so it does not matter whether the
// signal arrives before or during the wait, or which thread receives it.
static ssize_t read_or_stop(int fd, char *out, size_t budget) {
    if (stop_pipe[0] < 0 && pipe2(stop_pipe, O_CLOEXEC | O_NONBLOCK) != 0) {
        return -1;
    }
    struct pollfd ready[2] = {{fd, POLLIN, 0}, {stop_pipe[0], POLLIN, 0}};
    while (!stop_signal) {
        ssize_t n = poll(ready, 2, -1);
        if (n > 0 && ready[1].revents) {
            break;
        }
        n = n > 0 ? read(fd, out, budget) : n;
        if (n >= 0 || (errno != EINTR && errno != EAGAIN)) {
            return n;
        }
    }
    return 0;
}

// Host memory. The memory still available to the process is the minimum of free memory, its cgroup
// limits and `ulimit`. A process that exceeds one of them is killed or its allocations fail, so a
// plan is checked against all of them first.

// Returns the number after `key` on the first line of the file `path` that starts with `key` and a
// number, or `otherwise` if there is none.
static int64_t file_number(const char *path, const char *key, int64_t otherwise) {
    char line[256];
    FILE *f = fopen(path, "r");
    for (int found = 0; f && !found && fgets(line, sizeof line, f);) {
        char *end = line, *text = line + strlen(key);
        int64_t number = strncmp(line, key, strlen(key)) == 0 ? strtoll(text, &end, 10) : 0;
        found = end > line && end != text;
        otherwise = found ? number : otherwise;
    }
    if (f) {
        fclose(f);
    }
    return otherwise;
}

// Memory available to this process, in bytes, and the name of the tightest limit; INT64_MAX and ""
// if no limit is known.
typedef struct {
    int64_t bytes;
    char limit[160];
} HostMemory;

// Lowers *h to `bytes` if that is less; the format and its arguments name the limit.
__attribute__((format(printf, 3, 4))) static void limit_memory(HostMemory *h, int64_t bytes,
                                                               const char *format, ...) {
    va_list args;
    va_start(args, format);
    // A cgroup without a limit reports about 2^63.
    if (bytes < h->bytes && bytes < (int64_t)1 << 60) {
        h->bytes = max_i64(bytes, 0);
        vsnprintf(h->limit, sizeof h->limit, format, args);
    }
    va_end(args);
}

// Calls f(out, version, folder, group) for the cgroup of `controller` that contains this
// process, and for all its ancestors. Any of them can be the tightest: Slurm and systemd set limits
// on the job, not on its processes. In a container the cgroup's path is that of the host, and only
// the root of the mount exists, which is the last folder tried. `root` is "", or a test's folder
// that contains its own /proc and /sys.
static void cgroups_each(const char *root, const char *controller,
                         void (*f)(void *out, int version, const char *folder, const char *group),
                         void *out) {
    static const struct {
        int version;
        const char *mount;
    } mounts[] = {{1, "/sys/fs/cgroup/"}, {2, "/sys/fs/cgroup"}, {2, "/sys/fs/cgroup/unified"}};
    char path[PATH_BYTES], line[2 * PATH_BYTES], folder[4 * PATH_BYTES];
    path_print(path, "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file)) {  // number:controllers:group
        line[strcspn(line, "\n")] = 0;
        char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
        if (!group) {
            continue;
        }
        *group++ = 0;
        const int version =
            names[1] == 0 ? 2 : choice_find(names + 1, controller, strlen(controller));
        for (char *end = group + strlen(group); end; end = strrchr(group, '/')) {
            *end = 0;
            for (int i = 0; i < 3; i++) {
                if (mounts[i].version == version) {
                    snprintf(folder, sizeof folder, "%s%s%s%s/", root, mounts[i].mount,
                             version == 1 ? controller : "", group);
                    f(out, version, folder, group[0] ? group : "/");
                }
            }
        }
    }
    if (file) {
        fclose(file);
    }
}

// Returns the number after `key` in the file `name` of a folder (see file_number()), or
// `otherwise`.
static int64_t folder_number(const char *folder, const char *name, const char *key,
                             int64_t otherwise) {
    char path[4 * PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s%s", folder, name);
    return file_number(path, key, otherwise);
}

// Applies the memory limits of one cgroup. Its usage includes cached files, which are subtracted
// because the kernel reclaims them before it kills a process.
static void cgroup_memory(void *out, int version, const char *folder, const char *group) {
    static const struct {
        const char *limits[2], *used, *cached;
    } rows[] = {{{"memory.limit_in_bytes", "memory.limit_in_bytes"}, "memory.usage_in_bytes",
                 "total_inactive_file "},
                {{"memory.max", "memory.high"}, "memory.current", "inactive_file "}};
    const int row = version - 1;
    const int64_t used = folder_number(folder, rows[row].used, "", -1);
    const int64_t cached = folder_number(folder, "memory.stat", rows[row].cached, -1);
    for (int k = 0; k < 2 && used >= 0 && cached >= 0; k++) {  // else the limit is unknown
        int64_t limit = folder_number(folder, rows[row].limits[k], "", INT64_MAX);
        limit_memory((HostMemory *)out, limit - (used - cached), "%s of cgroup %.90s",
                     rows[row].limits[k], group);
    }
}

// Returns the size in bytes of the stacks of threads not yet started, each as large as `ulimit -s`
// allows. There are as many threads as OpenMP's, but at least two, because saving a checkpoint uses
// two; `running` of them already exist.
static int64_t stacks_to_come(int64_t running) {
    struct rlimit r;
    const int known = getrlimit(RLIMIT_STACK, &r) == 0 && r.rlim_cur != RLIM_INFINITY;
    const int64_t to_come = max_i64(max_i64(thread_count(), 2) - running, 0);
    return to_come * (known ? (int64_t)r.rlim_cur : 2 << 20);
}

// Returns the memory available to this process, given free memory, cgroup limits and `ulimit`.
// `root` is "", or a test's folder that contains its own /proc and /sys.
static HostMemory host_memory(const char *root) {
    static const struct {
        const char *key, *name;
    } limits[] = {{"VmSize:", "ulimit -v"}, {"VmData:", "ulimit -d"}};
    HostMemory h = {INT64_MAX, ""};
    char path[PATH_BYTES];
    struct rlimit r;
    path_print(path, "%s/proc/meminfo", root);
    const int64_t kib = file_number(path, "MemAvailable:", -1);
    limit_memory(&h, kib < 0 ? INT64_MAX : kib << 10, "free memory of this machine");
    path_print(path, "%s/proc/self/status", root);
    const int64_t stacks = stacks_to_come(file_number(path, "Threads:", 1));
    for (int i = 0; i < 2; i++) {
        // The resources are not in the table: their type is an enum in C and an int in C++.
        int known = i == 0 ? getrlimit(RLIMIT_AS, &r) : getrlimit(RLIMIT_DATA, &r);
        if (known == 0 && r.rlim_cur != RLIM_INFINITY) {
            int64_t mapped = file_number(path, limits[i].key, 0) << 10;
            limit_memory(&h, (int64_t)r.rlim_cur - mapped - stacks, "%s%s", limits[i].name,
                         stacks ? " minus thread stacks" : "");
        }
    }
    cgroups_each(root, "memory", cgroup_memory, &h);
    return h;
}

// The limit that determined the last result of host_memory_available(), for messages; "" on a GPU,
// or if no limit is known.
static char available_limit[192];

static uint64_t host_memory_available(void) {
    const HostMemory h = host_memory("");
    if (h.limit[0]) {
        snprintf(available_limit, sizeof available_limit, " (%s)", h.limit);
    }
    return (uint64_t)h.bytes;
}

// Cores of the host: how many threads the program starts, and how they wait for work. Both are
// chosen so that other programs on the machine are not slowed down.

// Lowers *(int *)out to the number of cores that a cgroup's CPU quota allows.
static void cgroup_cores(void *out, int version, const char *folder, const char *group) {
    double quota = 0, period = 0;
    (void)group;
    if (version == 1) {
        quota = (double)folder_number(folder, "cpu.cfs_quota_us", "", -1);
        period = (double)folder_number(folder, "cpu.cfs_period_us", "", 0);
    } else {
        char path[4 * PATH_BYTES + 32];
        snprintf(path, sizeof path, "%scpu.max", folder);
        FILE *f = fopen(path, "r");
        if (f && fscanf(f, "%lf %lf", &quota, &period) != 2) {  // "max 100000": no limit
            quota = 0;
        }
        if (f) {
            fclose(f);
        }
    }
    if (quota > 0 && period > 0) {
        *(int *)out = min_int(*(int *)out, (int)ceil(fmin(quota / period, 1e6)));
    }
}

// Returns the number of cores, at most `cores`, that cgroup CPU quotas allow; more threads would
// only be throttled. Unused in a build without OpenMP, which has one thread.
__attribute__((unused)) static int host_cores(const char *root, int cores) {
    cgroups_each(root, "cpu", cgroup_cores, &cores);
    return cores;
}

// Sets up OpenMP; called at the start of main. Uses as many threads as this process has cores
// (OpenMP itself respects the affinity mask, but not quotas) and shortens the time that idle
// threads spin. GCC's OpenMP spins for milliseconds by default, and on a busy machine a spinning
// thread occupies the core that the thread it waits for needs: with one compiler running, a step
// took four times as long. 1,000 iterations are about ten microseconds, the time it takes to wake a
// thread. OpenMP reads the variable before main, so the program executes itself again, once, in the
// same process. A debugger follows this; valgrind does not and needs OMP_WAIT_POLICY=passive. The
// program does not execute itself again if the user has set one of these variables, if /proc is
// missing, or if it was started through the dynamic loader (ld.so PROGRAM). In the last case the
// executable of the process is the loader, which would interpret the program's arguments as its
// own.
static void threads_start(char **argv) {
    static const char *const variables[] = {"GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"};
    char self[PATH_BYTES];
#ifdef _OPENMP
    if (!getenv("OMP_NUM_THREADS")) {
        omp_set_num_threads(host_cores("", thread_count()));
    }
#endif
    struct stat exe, named;
    const char *name = (const char *)getauxval(AT_EXECFN);
    int chosen = thread_count() == 1;
    for (int i = 0; i < 3; i++) {
        chosen |= getenv(variables[i]) != NULL;
    }
    if (name && stat(name, &named) == 0 && stat("/proc/self/exe", &exe) == 0) {
        chosen |= named.st_dev != exe.st_dev || named.st_ino != exe.st_ino;
    }
    ssize_t length = chosen ? -1 : readlink("/proc/self/exe", self, sizeof self);
    if (length > 0 && length < (ssize_t)sizeof self) {
        self[length] = 0;
        setenv("GOMP_SPINCOUNT", "1000", 1);  // GCC's
        setenv("KMP_BLOCKTIME", "1", 1);      // clang's, in milliseconds
        execv(self, argv);
    }
}

// Ranks: the part of runs on several GPUs that both programs share. The GPU program starts the
// ranks, monitors them and exchanges their data; the CPU program only refuses to run as one of
// several copies.

// The rank of this process; without ranks it is rank 0 of 1. `stop` and `fault` are what all ranks
// agreed on when they last exchanged their status: `stop` is 1 if any rank was asked to stop;
// `fault` is 1 + the first rank that cannot continue, 0 if all can. `failed` is 1 if this rank
// cannot continue.
typedef struct {
    int rank, ranks;
    int local_rank, local_ranks;  // on this machine
    int launched;                 // by a launcher, not by --gpus
    int stop, fault, failed;
} Ranks;
static Ranks this_rank = {0, 1, 0, 1, 0, 0, 0, 0};

// The last collective that a rank has started. The GPU writes this record in stream order, because
// the host is ahead of the stream.
typedef struct {
    uint64_t begun, done;  // the last one started, the last one finished; equal: none pending
    int call;              // its kind: RANK_HANDSHAKE ... RANK_BROADCAST
} CollectiveState;

// Bytes of a GPU's name, of NCCL's id and of the verdicts on kernels.
enum { RANK_TEXT = 96, RANK_ID = 128, RANK_KERNELS = 1024 };

// Sent to the other ranks in the handshake, before any rank builds its plan. The four fingerprints
// must be equal on all ranks: with different options or data, ranks would train different models
// and wait forever for data of other sizes.
typedef struct {
    uint64_t program, options, data, settings;  // fingerprints
    uint64_t device, host;                      // bytes available for a plan
    uint64_t ctas;                              // thread blocks for NCCL
    uint64_t total;                             // bytes of the device, for -b auto
    int64_t batch;  // of the checkpoint that -b auto resumes; after the handshake rank 0's
    char gpu[RANK_TEXT], id[RANK_ID];
    // Verdicts on kernels (chapter Kernel trials) and a fingerprint of the GPU and driver that they
    // are for, 0: none. After the handshake the verdicts are rank 0's; kernels_unlike is then a
    // rank with another GPU or driver, or 0.
    uint64_t kernels_where;
    char kernels[RANK_KERNELS];
    int kernels_unlike;
} RankInfo;
static RankInfo rank_info;  // this rank's; updated by the handshake

// The phase of a run. RANK_STARTS: engines are opened; a driver may compile kernels for minutes, so
// that CPU time is the only sign of life. RANK_LOADS: weights and optimizer state are loaded; the
// same applies. RANK_RUNS: everything else.
enum { RANK_STARTS, RANK_LOADS, RANK_RUNS };

// Heartbeat of a rank, in pages of its own (a GPU maps whole pages) that are shared with the
// parent.
typedef struct {
    uint64_t count;     // *progress_count
    const char *doing;  // a string literal: ranks and parent are forks of one process
    int work;           // RANK_STARTS, RANK_LOADS or RANK_RUNS
    int slow;           // *slow_count
    uint64_t calls;     // collectives that the host has queued
    CollectiveState note;
} Heartbeat;
static Heartbeat heartbeat_alone, *heartbeat = &heartbeat_alone;  // this rank's
static double rank_timeout_ms = 60e3;

// Records in the heartbeat that a new phase of the run begins.
static void rank_phase(const char *doing, int work) {
    heartbeat->doing = doing;
    heartbeat->work = work;
    progress();
}

// Returns whether the run has been asked to stop. Training, validation, sampling and evaluation
// check this before each batch or token; loading and saving are completed first.
static int run_stopping(void) { return this_rank.ranks > 1 ? this_rank.stop : stop_signal != 0; }

// The environment variables in which launchers pass a process the number of copies, its rank and
// its rank on its machine: those of torchrun (PyTorch documentation, "torchrun", Environment
// Variables), of mpirun from Open MPI ("Environment variables set for MPI applications") and from
// MPICH and Intel MPI (Hydra), and of srun (srun(1), "Output environment variables"). SLURM_NTASKS
// is not suitable: sbatch and salloc also set it in shells, in which a program is started once.
enum { LAUNCH_COPIES, LAUNCH_RANK, LAUNCH_LOCAL_RANK, LAUNCH_COLUMNS };
static const char *const launchers[][LAUNCH_COLUMNS] = {
    {"WORLD_SIZE", "RANK", "LOCAL_RANK"},
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"},
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"}};

// The information that launchers give this process. An unknown rank or local_rank is -1.
typedef struct {
    const char *variable;  // the one that gives the number of copies; NULL: none is set
    int copies, rank, local_rank;
    const char *address, *port;  // MASTER_ADDR and port of rank 0; NULL: ranks use MPI
} Launcher;

// Returns the number in an environment variable, or -1 if it is not set. Ends the run if it is not
// a number in range.
static int launcher_number(const char *variable) {
    const char *text = getenv(variable);
    char *end = NULL;
    const long number = text && text[0] ? strtol(text, &end, 10) : -1;
    if (end && (*end || number < 0 || number > 1 << 20)) {
        die("%s is '%s', expected a number from 0 to %d", variable, text, 1 << 20);
    }
    return (int)number;
}

// Writes the number of the first variable of a column that is set to *number; returns its row, or
// -1 if none is set.
static int launcher_first(int column, int *number) {
    const int rows = (int)(sizeof launchers / sizeof launchers[0]);
    for (int row = 0; row < rows; row++) {
        if ((*number = launcher_number(launchers[row][column])) >= 0) {
            return row;
        }
    }
    return -1;
}

// Finds the rank of this process among those that a launcher started. A launcher within another
// one, such as torchrun in a task of srun, sets both the count and the rank in its own row of the
// table. If the count and the rank are found in different rows, for example because a script for
// srun sets WORLD_SIZE, the counts of both rows must be equal.
static Launcher launcher_find(void) {
    static char port[8];
    Launcher l;
    memset(&l, 0, sizeof l);
    const int row = launcher_first(LAUNCH_COPIES, &l.copies);
    const int ranks_row = launcher_first(LAUNCH_RANK, &l.rank);
    launcher_first(LAUNCH_LOCAL_RANK, &l.local_rank);
    l.variable = row < 0 ? NULL : launchers[row][LAUNCH_COPIES];
    l.copies = l.copies > 1 ? l.copies : 1;
    if (row >= 0 && ranks_row > row) {
        const char *other = launchers[ranks_row][LAUNCH_COPIES];
        const int others = launcher_number(other);
        if (others >= 0 && others != l.copies) {
            die("%s is %d, but %s is %d: both count the processes of this run", l.variable,
                l.copies, other, others);
        }
    }
    l.address = getenv("MASTER_ADDR");
    if (l.copies == 1 || !l.address || !l.address[0]) {
        l.address = NULL;
        return l;
    }
    if (l.rank < 0 || l.rank >= l.copies) {
        die("%s is %d, but %s: ranks are numbered from 0", l.variable, l.copies,
            l.rank < 0 ? "RANK is not set" : "this process has a higher rank");
    }
    // torchrun sets this variable to "True" if its own store listens on MASTER_PORT; PyTorch's rank
    // 0 then does not listen (torch/distributed/rendezvous.py). Here rank 0 uses the next port.
    const char *store = getenv("TORCHELASTIC_USE_AGENT_STORE");
    const int number = launcher_number("MASTER_PORT") + (store && strcmp(store, "True") == 0);
    if (number < 1 || number > 65535) {
        die("MASTER_ADDR is %s, but MASTER_PORT is %s: rank 0 listens there, on a port from 1 to "
            "65535", l.address, number < 1 ? "not set" : "too high");
    }
    snprintf(port, sizeof port, "%d", number);
    l.port = port;
    return l;
}

// Returns how many milliseconds a rank waits before it exits after another rank has failed, so that
// the failed rank can print its message first. The watchdog waits longer.
static int rank_grace_ms(void) { return (int)fmin(4000, rank_timeout_ms / 2); }

// Status that a rank sends the others between steps: a number, and whether the rank was asked to
// stop or cannot continue.
typedef struct {
    double value;
    int32_t stop, failed;
} RankStatus;

// Combines the statuses of all ranks into the same decision on every rank.
static void ranks_agree(const RankStatus *statuses) {
    this_rank.stop = this_rank.fault = 0;
    for (int r = this_rank.ranks - 1; r >= 0; r--) {
        this_rank.stop |= statuses[r].stop;
        this_rank.fault = statuses[r].failed ? r + 1 : this_rank.fault;
    }
}

// Terminals. A line that is rewritten in place must fit the terminal. Bytes from data or a command
// line must not be interpreted, neither by a terminal that shows them nor by a shell that they are
// pasted into.

// Returns whether a line can be rewritten in place. Open MPI's mpirun gives every process a
// pseudo-terminal but forwards its output to mpirun's own stdout, which may be a file; other
// launchers mix the lines of several processes.
static int terminal_rewrites(void) {
    return isatty(STDOUT_FILENO) && !this_rank.launched && !getenv("OMPI_COMM_WORLD_SIZE");
}

// Returns the number of columns of the terminal at stdout, queried on each call because a window
// may be resized; 80 if unknown.
static int terminal_columns(void) {
    struct winsize size;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// Returns the length in bytes of the character at `text` if a terminal displays it; 0 for a byte
// that is not UTF-8, and for control characters (C0, DEL and C1), which a terminal would interpret.
static int shown_bytes(const char *text, size_t left) {
    uint32_t c;
    const int bytes = utf8_decode(&c, (const unsigned char *)text, left);
    return c < 32 || (c >= 127 && c < 160) || c == UINT32_MAX ? 0 : bytes;
}

// Prints arbitrary bytes: to a file unchanged, to a terminal with \xNN for each byte that cannot be
// displayed, except newlines and tabs. A text may be printed in several calls: the first bytes of
// an incomplete character are held until the rest is printed, or until the newline that ends every
// text.
static void text_print(const char *text, size_t n) {
    static char held[4];
    static size_t count;
    if (!isatty(STDOUT_FILENO)) {
        fwrite(text, 1, n, stdout);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        held[count++] = text[i];
        while (count) {
            const int lead = (unsigned char)held[0], plain = lead == '\n' || lead == '\t';
            const size_t whole = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : lead >= 0xC0 ? 2 : 1;
            const size_t bytes = plain ? 1 : (size_t)shown_bytes(held, count);
            if (!bytes && count < whole && (count == 1 || (held[count - 1] & 0xC0) == 0x80)) {
                break;
            }
            if (bytes) {
                fwrite(held, 1, bytes, stdout);
            } else {
                printf("\\x%02x", lead);
            }
            const size_t used = bytes ? bytes : 1;
            memmove(held, held + used, count -= used);
        }
    }
}

// Prints a word so that a shell reads it back unchanged: in quotes if necessary, and in the form
// $'...' (bash, zsh, POSIX.1-2024) if it contains bytes that a terminal would interpret.
static void shell_print(const char *word) {
    const size_t n = strlen(word);
    int plain = n > 0, shown = 1;
    for (size_t i = 0; i < n; i++) {
        const int c = (unsigned char)word[i];
        plain &= (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') ||
                 strchr("_@%+=:,./-", c) != NULL;
    }
    for (size_t i = 0, bytes; i < n; i += bytes) {
        bytes = (size_t)shown_bytes(word + i, n - i);
        shown &= bytes > 0;
        bytes += bytes == 0;
    }
    fputs(plain ? "" : shown ? "'" : "$'", stdout);
    for (size_t i = 0, bytes; i < n; i += bytes) {
        bytes = (size_t)shown_bytes(word + i, n - i);
        if (word[i] == '\'') {
            fputs(shown ? "'\\''" : "\\'", stdout);
        } else if (bytes == 0 || (word[i] == '\\' && !shown)) {
            printf("\\%03o", (unsigned char)word[i]);
        } else {
            fwrite(word + i, 1, bytes, stdout);
        }
        bytes += bytes == 0;
    }
    fputs(plain ? "" : "'", stdout);
}

// Joins the tab-separated parts of a line to at most `width` columns. As long as the line is too
// wide, the parts whose numbers are listed in `spare` (terminated by -1) are left out one by one;
// then the end is cut off. Parts are ASCII; an empty part takes no space.
static void line_fit(char line[256], char *parts, const int *spare, int width) {
    enum { PARTS = 16 };
    char *part[PARTS];
    int count = 0, columns = -2, n = 0;
    for (; count < PARTS && parts; count++) {
        part[count] = strsep(&parts, "\t");
        columns += part[count][0] ? 2 + (int)strlen(part[count]) : 0;
    }
    for (; *spare >= 0 && *spare < count && columns > width; spare++) {
        columns -= part[*spare][0] ? 2 + (int)strlen(part[*spare]) : 0;
        part[*spare][0] = 0;
    }
    line[0] = 0;
    for (int i = 0; i < count && n < 255; i++) {
        n += part[i][0] ? snprintf(line + n, (size_t)(256 - n), "%s%s", n ? "  " : "", part[i]) : 0;
    }
    line[min_int(width, 255)] = 0;
}

// The build: information that a bug report should contain. The version number is defined here and
// not taken from git, because the program may be built from an archive or from a single file.

#define PROGRAM_VERSION "1.0"

// Prints the text of --version; `more` lists further features that are built in.
static void version_print(const char *name, const char *more) {
#ifdef __clang__
    static const char compiler[] = "clang " __clang_version__;
#else
    static const char compiler[] = "gcc " __VERSION__;
#endif
    static const char *const built[] = {
#ifdef _OPENMP
        "OpenMP",
#else
        "no OpenMP: one thread",
#endif
#ifdef __AVX512F__
        "AVX-512",
#endif
#ifdef __FMA__
        "FMA",
#endif
#ifdef __ARM_NEON
        "NEON",
#endif
    };
    printf("%s " PROGRAM_VERSION "\ncompiler  %s\nbuilt in  ", name, compiler);
    for (size_t i = 0; i < sizeof built / sizeof built[0]; i++) {
        printf("%s%s", i ? ", " : "", built[i]);
    }
    printf("%s%s\n", more[0] ? ", " : "", more);
}

// =================================================================================================
// Part B. Memory and time

// -------------------------------------------------------------------------------------------------
// 6. Memory plan
// The plan lists every buffer of a run: name, group, number and type of elements, and the first and
// last tick of its lifetime. The planner turns settings into buffers (by act_table, grad_table and
// single_buffers()), buffers into offsets (buffers whose lifetimes do not overlap may share memory)
// and offsets into one size in bytes. The run makes one allocation of exactly that size and takes
// every pointer from the plan.
// 1. Time is a sequence of ticks, the stages of one micro-step: embed, 8 per block forward, 3 for
//    the head, 15 per block backward (7 that recompute, 8 that differentiate), embed backward, join
//    (only with several ranks or streamed buffers, see settings_joins()) and update. A forward-only
//    pass (validation, sampling) runs the same ticks up to the head.
// 2. buffer_pointer() rejects a buffer that is not alive at the current tick, in every build. Test
//    builds (GPT2_POISON) also fill a buffer with NaN when its lifetime begins, poison it when its
//    lifetime ends, and keep a poisoned gap after each buffer.
// 3. A recomputed activation has two buffers: one whose lifetime ends in forward, and one that
//    lives in backward.
// 4. Buffers in host memory have an allocation of their own. On the CPU it is a second mapping, so
//    that every transfer between host and device that a GPU run makes is also made by the CPU
//    program and is tested without a GPU.

// Types of a buffer's elements. TYPE_REAL is the CPU reference's `real`, TYPE_U16 the low half of
// an fp32 weight whose high half is the bf16 weight, TYPE_U8 raw memory whose layout is private to
// one function.
typedef enum { TYPE_FP32, TYPE_BF16, TYPE_FP16, TYPE_I32, TYPE_U16, TYPE_REAL, TYPE_U8 } Type;
static size_t type_bytes(Type type) {
    static const size_t bytes[] = {4, 2, 2, 4, 2, sizeof(real), 1};
    return bytes[type];
}

// Groups by which a printed plan sums its buffers. Kept activations live from forward to backward;
// the working set lives for a few stages.
typedef enum {
    GROUP_WEIGHTS, GROUP_GRADIENTS, GROUP_MOMENTS, GROUP_MASTER, GROUP_KEPT, GROUP_WORKING,
    GROUP_LOGITS, GROUP_WORKSPACE, GROUP_BATCH, GROUP_CACHE, GROUPS
} Group;
static const char *const group_names[GROUPS] = {
    "weights", "gradients", "moments", "master", "activations kept", "working set", "logits",
    "workspaces", "batch", "KV cache"
};

// Where a buffer is stored (Placement), and the states (weights, gradients, moments, master copy,
// residuals) whose placement the settings choose (Kind). A buffer belongs to one of these states
// or, from KINDS on, to a kind with a fixed placement. A state's placement is a set of flags;
// PLACE_SHARD means that each rank stores only its shard (chapter Sharding and offload).
typedef enum { PLACE_DEVICE, PLACE_HOST, PLACE_SHARD } Placement;
typedef enum {
    KIND_WEIGHTS, KIND_GRADIENTS, KIND_MOMENTS, KIND_MASTER, KIND_RESIDUALS, KINDS,
    ON_DEVICE = KINDS, ON_HOST
} Kind;
static_assert((int)OFFLOAD_AUTO == 1 << (int)KINDS, "the bit after the last state's");

// Everything that the plan depends on, and two flags that it ignores: `tune` and `quiet`.
typedef struct {
    Model model;
    int B, T, threads;
    int logit_rows;             // rows of a classifier chunk
    int forward;                // 1: a forward-only run; the plan ends at the head
    int cache;                  // 1: a run that generates, with a KV cache of T positions
    int64_t workspace;          // GPU: bytes of the matmul workspace
    int tune, quiet;            // time matmul algorithms at the start; print nothing
    uint8_t level[MAX_LAYERS];  // recomputation level of each block, RECOMPUTE_*
    int gpu;                    // 0: the CPU program (fp32 or the build's real), 1: the GPU program
    Type dtype, grad_dtype, moment_dtype;
    int split_master;
    uint8_t placement[KINDS];  // of each state: 0, PLACE_HOST, PLACE_SHARD or both
    int rank, ranks;           // of the processes that share the step's micro-batches
    int nvlink, ctas;          // the GPUs are connected by NVLink; NCCL's limit of thread blocks
    int matmul_bf16;           // CPU: matmul operands are rounded to bf16 as they are packed
} Settings;

// Returns the maximum number of tokens of a sequence in one pass: T or, with a KV cache, 64. A
// prompt is processed in chunks of this many tokens, enough for an efficient packed matmul.
static int settings_rows(const Settings *s) { return s->cache ? min_int(s->T, 64) : s->T; }

// Returns the type of statistics and losses: fp32 on a GPU, `real` on the CPU.
static Type settings_real(const Settings *s) { return s->gpu ? TYPE_FP32 : TYPE_REAL; }

// Returns whether the run has a master copy, which holds the precision that 16-bit weights lose.
// For bf16 it is the low halves of the fp32 weights and is optional (--master). An fp16 number is
// not the high half of an fp32 number, so training in fp16 always has complete fp32 weights.
static int settings_has_master(const Settings *s) {
    return s->split_master || (s->dtype == TYPE_FP16 && !s->forward);
}

static int settings_offloads(const Settings *s) {
    int placements = 0;
    for (int kind = 0; kind < KINDS; kind++) {
        placements |= s->placement[kind];
    }
    return (placements & PLACE_HOST) != 0;
}

// Returns whether a step waits for other streams before its update: for the exchange between ranks,
// or for transfers of streamed buffers.
static int settings_joins(const Settings *s) {
    int streamed = 0;
    for (int kind = 0; kind < KINDS; kind++) {  // all except the states updated in place
        streamed |= kind != KIND_MOMENTS && kind != KIND_MASTER ? s->placement[kind] : 0;
    }
    return s->ranks > 1 || streamed;
}

// Stages: what a tick computes. A block has eight stages in forward. In backward the first seven
// may be repeated to recompute activations, followed by eight stages of backward's own.
enum {
    F_LN1, F_QKV, F_ATT, F_ATTPROJ, F_LN2, F_FC, F_GELU, F_FCPROJ, F_STAGES,
    B_FCPROJ = F_STAGES, B_GELU, B_FC, B_LN2, B_ATTPROJ, B_ATT, B_QKV, B_LN1, BLOCK_STAGES,
    EMBED = BLOCK_STAGES, LNF, HEAD, D_LNF, D_EMBED, JOIN, UPDATE, STAGES
};
static const char *const stage_names[STAGES] = {
    "ln1",   "qkv",   "att",       "attproj", "ln2",   "fc",    "gelu",  "fcproj", "d_fcproj",
    "d_gelu", "d_fc", "d_ln2",     "d_attproj", "d_att", "d_qkv", "d_ln1", "embed", "lnf",
    "head",  "d_lnf", "d_embed",   "join",    "update",
};

// Ticks of the stages. Only these functions and their inverse, tick_at(), define the order: blocks
// run from 0 to L-1 in forward, from L-1 to 0 in backward.
enum { BACK_TICKS = BLOCK_STAGES - 1 };  // ticks of one block in backward
static int tick_forward(int layer, int stage) { return 1 + layer * F_STAGES + stage; }
static int tick_lnf(const Model *m) { return 1 + m->L * F_STAGES; }
static int tick_head(const Model *m) { return tick_lnf(m) + 1; }
static int tick_lnf_backward(const Model *m) { return tick_lnf(m) + 2; }
static int tick_backward(const Model *m, int layer, int stage) {
    return tick_lnf(m) + 3 + (m->L - 1 - layer) * BACK_TICKS + stage - (stage > F_GELU);
}
static int tick_embed_backward(const Model *m) { return tick_backward(m, -1, 0); }
// Returns the last tick before update: join, or embed backward if there is nothing to join.
static int tick_join(const Settings *s) {
    return tick_embed_backward(&s->model) + settings_joins(s);
}
static int tick_update(const Settings *s) { return tick_join(s) + 1; }

// The stage that a tick runs.
typedef struct {
    int stage, layer;  // layer is -1 for stages outside the blocks
    int again;         // 1: a forward stage, repeated in backward
} Tick;

// Returns the stage and layer of a tick; the inverse of the functions above. A block's ticks in
// backward are the seven forward stages that may be repeated (the output of F_FCPROJ is the next
// block's x and is kept), then the eight backward stages.
static Tick tick_at(const Settings *s, int tick) {
    const Model *m = &s->model;
    const int forward = tick - 1, head = tick - tick_lnf(m);
    const int backward = tick - tick_backward(m, m->L - 1, 0);
    Tick t = {EMBED, -1, 0};
    if (tick >= tick_embed_backward(m)) {
        t.stage = tick == tick_update(s) ? UPDATE : D_EMBED + tick - tick_embed_backward(m);
    } else if (backward >= 0) {
        int stage = backward % BACK_TICKS;
        t.layer = m->L - 1 - backward / BACK_TICKS;
        t.again = stage <= F_GELU;
        t.stage = t.again ? stage : stage + 1;
    } else if (head >= 0) {
        t.stage = LNF + head;
    } else if (forward >= 0) {
        t.layer = forward / F_STAGES;
        t.stage = forward % F_STAGES;
    }
    return t;
}

// Recomputation levels (activation checkpointing): the stages of a block's forward pass that are
// repeated in its backward pass; their outputs are discarded in between. A block computes 16 C
// numbers per token, including its input: `none` keeps all 16 C, `gelu` 12 C, `norm` 10 C, `mlp`
// 6 C, `qkv` 3 C and `block` C, the input only. Cheap stages are recomputed first: GELU and
// LayerNorm need no matmul. The last matmul is never repeated, because its output is the next
// block's input.
enum {
    RECOMPUTE_NONE, RECOMPUTE_GELU, RECOMPUTE_NORM, RECOMPUTE_MLP, RECOMPUTE_QKV, RECOMPUTE_BLOCK,
    RECOMPUTE_LEVELS
};
typedef struct {
    const char *name, *alias;  // as values of -r; alias may be NULL
    int stages;                // bit set of the stages that are repeated
    const char *help;
} LevelEntry;
enum { ALL_BUT_LAST = (1 << F_FCPROJ) - 1, ATTENTION = 1 << F_ATT | 1 << F_ATTPROJ };
static const LevelEntry level_table[RECOMPUTE_LEVELS] = {
    {"none", "0", 0, "nothing"},
    {"gelu", NULL, 1 << F_GELU, "GELU"},
    {"norm", NULL, 1 << F_GELU | 1 << F_LN1 | 1 << F_LN2, "GELU and both LayerNorms"},
    {"mlp", NULL, ALL_BUT_LAST & ~(ATTENTION | 1 << F_QKV), "these and the MLP's first matmul"},
    {"qkv", NULL, ALL_BUT_LAST & ~ATTENTION, "these and the QKV matmul"},
    {"block", "1", ALL_BUT_LAST, "the whole block except its last matmul"},
};

// Sets the first `blocks` blocks to `level` and the others to no recomputation.
static void settings_recompute(Settings *s, int level, int blocks) {
    memset(s->level, RECOMPUTE_NONE, sizeof s->level);
    memset(s->level, level, (size_t)blocks);
}

// Returns whether backward repeats a stage of a block's forward.
static int plan_recomputes(const Settings *s, int stage, int layer) {
    return level_table[s->level[layer]].stages >> stage & 1;
}

// Activations of a block: the stage that computes each of them, and the last stages that use it in
// forward and in backward. Sizes are per token: a multiple of C, one number per head (lse), or one
// number (mean, rstd).
enum {
    ACT_X, ACT_LN1, ACT_LN1_MEAN, ACT_LN1_RSTD, ACT_QKV, ACT_ATT, ACT_LSE, ACT_RES2, ACT_LN2,
    ACT_LN2_MEAN, ACT_LN2_RSTD, ACT_FCH, ACT_GELU, ACTS
};
enum { PER_TOKEN = 0, PER_HEAD = -1 };
typedef struct {
    const char *name;
    int channels;               // x C, or PER_TOKEN, PER_HEAD (fp32 statistics)
    int made, used, used_back;  // stages: forward, forward, backward
} ActEntry;
static const ActEntry act_table[ACTS] = {
    // computed by the previous block or by embed; never recomputed
    {"x", 1, F_FCPROJ, F_ATTPROJ, B_LN1},
    {"ln1", 1, F_LN1, F_QKV, B_QKV},
    {"ln1.mean", PER_TOKEN, F_LN1, F_LN1, B_LN1},
    {"ln1.rstd", PER_TOKEN, F_LN1, F_LN1, B_LN1},
    {"qkv", 3, F_QKV, F_ATT, B_ATT},
    {"att", 1, F_ATT, F_ATTPROJ, B_ATT},
    {"lse", PER_HEAD, F_ATT, F_ATT, B_ATT},
    {"res2", 1, F_ATTPROJ, F_FCPROJ, B_LN2},
    {"ln2", 1, F_LN2, F_FC, B_FC},
    {"ln2.mean", PER_TOKEN, F_LN2, F_LN2, B_LN2},
    {"ln2.rstd", PER_TOKEN, F_LN2, F_LN2, B_LN2},
    {"fch", 4, F_FC, F_GELU, B_GELU},
    {"gelu", 4, F_GELU, F_FCPROJ, B_FCPROJ},
};

// Gradients of activations inside one block's backward. d_mlp is the gradient of the GELU's output
// and, in place, of its input. The gradient of the residual stream is one buffer shared by all
// blocks: every block adds to it in place.
enum { GRAD_MLP, GRAD_LN2, GRAD_ATT, GRAD_QKV, GRAD_LN1, GRADS };
typedef struct {
    const char *name;
    int channels, first, last;
} GradEntry;
static const GradEntry grad_table[GRADS] = {
    {"d_mlp", 4, B_FCPROJ, B_FC}, {"d_ln2", 1, B_FC, B_LN2},  {"d_att", 1, B_ATTPROJ, B_ATT},
    {"d_qkv", 3, B_ATT, B_QKV},   {"d_ln1", 1, B_QKV, B_LN1},
};

typedef struct {
    char name[24];
    Group group;
    Type type;
    int64_t count;
    int first, last;         // lifetime in ticks, both ends included
    Placement placement;     // PLACE_HOST: not part of the device allocation
    uint64_t bytes, offset;  // bytes without the gap
    int alive;               // maintained in test builds only
} Buffer;

// Sizes of the scratch memory that GPU kernels need besides tensors; train_gpt2.cu checks that they
// are sufficient.
enum { GPU_TENSOR_ROW_BYTES = 56, GPU_STATE_BYTES = 256, GPU_PARTIAL_BLOCKS = 256 };
// Bytes of a rank's status in one exchange (chapter Exchange between ranks of train_gpt2.cu).
enum { RANK_STATUS_BYTES = 64 };

// Returns the number of ints in a batch as it is uploaded to a GPU: inputs (N), targets (N), and
// the tokens sorted for the backward pass of the embedding (3 N + 1).
static int64_t batch_ints(int64_t N) { return 5 * N + 1; }

static size_t matmul_workspace_bytes(int threads);  // chapter Matmul and fast maths

enum { SLOTS = 2 };  // device buffers of one block each, per kind of streamed data
// Buffers that exist once, in the order of the table that single_buffers() fills. The others are
// found by (activation, layer) and (gradient, layer).
enum {
    BUF_WEIGHTS, BUF_GRADS, BUF_GRADS_1D, BUF_M, BUF_V, BUF_MASTER, BUF_WEIGHTS_STORE,
    BUF_GRADS_STORE, BUF_X_STORE, BUF_WEIGHTS_SLOT, BUF_GRADS_SLOT = BUF_WEIGHTS_SLOT + SLOTS,
    BUF_X_SLOT = BUF_GRADS_SLOT + SLOTS, BUF_EXCHANGE = BUF_X_SLOT + SLOTS, STATE_BUFFERS,
    BUF_LOSSES = STATE_BUFFERS, BUF_MATMUL, BUF_BATCH, BUF_TENSORS, BUF_STATE, BUF_RANK_STATUS,
    BUF_PARTIALS, BUF_PINNED, BUF_XF, BUF_LNF, BUF_LNF_MEAN, BUF_LNF_RSTD, BUF_LOGITS, BUF_DRES,
    BUF_ATT_D, BUF_CACHE, SINGLES
};
typedef struct {
    Group group;
    const char *name;
    Type type;
    int64_t count;
    int first, last;
    Kind kind;
} BufferEntry;

// Fills the first rows of the table: weights, gradients, moments, master copy and backing stores,
// and the slots and staging memory used to stream them.
static void state_buffers(BufferEntry rows[STATE_BUFFERS], const Settings *s);  // next chapter

// Fills the table for a run with settings `s`. Rows without elements are not part of its plan.
static void single_buffers(BufferEntry buffers[SINGLES], const Settings *s) {
    const Model *m = &s->model;
    const int end = tick_update(s), x = tick_forward(m->L - 1, F_FCPROJ), lnf = tick_lnf(m);
    const int head = tick_head(m), back = tick_lnf_backward(m), back_end = tick_embed_backward(m);
    // GPU-only buffers have no elements in the CPU program: their counts are multiplied by gpu (0
    // or 1).
    const int rows_per_pass = settings_rows(s);
    const int64_t N = (int64_t)s->B * rows_per_pass, NC = N * m->C, batch = batch_ints(N);
    const int64_t gpu = s->gpu;
    const int64_t matmul = gpu ? s->workspace : (int64_t)matmul_workspace_bytes(s->threads);
    // On one GPU the norm and AdamW use the same table. With several, the norm has a table of its
    // own, because each rank sums only its own shards.
    const int64_t others = s->ranks > 1;
    const int64_t table = gpu * (1 + others) * model_tensors(m) * GPU_TENSOR_ROW_BYTES;
    const int64_t statuses = gpu * others * s->ranks * RANK_STATUS_BYTES;
    // Backward of attention writes partial sums of 3 C numbers for each tile of 64 or 128 tokens.
    const int small = m->C / m->NH > 64 || s->dtype == TYPE_FP16;
    const int64_t tiles = (int64_t)s->B * ceil_div_i64(rows_per_pass, small ? 64 : 128);
    const int64_t parts = max_i64((int64_t)GPU_PARTIAL_BLOCKS * 4, tiles * 3);
    const int64_t partials = gpu * max_i64(parts * m->C, 1024);
    const Type E = s->dtype, R = settings_real(s);
    const BufferEntry rows[SINGLES - STATE_BUFFERS] = {
        {GROUP_BATCH, "losses", R, N, 0, end, ON_DEVICE},
        {GROUP_WORKSPACE, "matmul workspace", TYPE_U8, matmul, 0, end, ON_DEVICE},
        {GROUP_BATCH, "batch", TYPE_I32, gpu * batch, 0, end, ON_DEVICE},
        {GROUP_WORKSPACE, "table of tensors", TYPE_U8, table, 0, end, ON_DEVICE},
        {GROUP_WORKSPACE, "norm and counters", TYPE_U8, gpu * GPU_STATE_BYTES, 0, end, ON_DEVICE},
        {GROUP_WORKSPACE, "status of ranks", TYPE_U8, statuses, 0, end, ON_DEVICE},
        {GROUP_WORKSPACE, "partial sums", TYPE_FP32, partials, 0, end, ON_DEVICE},
        // Two batches, so that one is filled while the other is uploaded; then 256 bytes into which
        // the GPU's state ("norm and counters") is downloaded.
        {GROUP_BATCH, "pinned batches", TYPE_I32, gpu * (2 * batch + 64), 0, end, ON_HOST},
        {GROUP_KEPT, "xf", E, NC, x, back, ON_DEVICE},
        {GROUP_WORKING, "lnf", E, NC, lnf, back, ON_DEVICE},
        {GROUP_WORKING, "lnf.mean", R, N, lnf, back, ON_DEVICE},
        {GROUP_WORKING, "lnf.rstd", R, N, lnf, back, ON_DEVICE},
        // A chunk of logits, overwritten by their gradients. It lives for a single tick, so it
        // shares memory with other buffers.
        {GROUP_LOGITS, "logits", E, (int64_t)s->logit_rows * m->Vp, head, head, ON_DEVICE},
        {GROUP_WORKING, "d_residual", E, NC, back, back_end, ON_DEVICE},
        {GROUP_WORKING, "attention D", TYPE_FP32, gpu * N * m->NH, back, back_end, ON_DEVICE},
        // (L,2,NH,T,HS): for each layer the keys, then the values, head by head.
        {GROUP_CACHE, "KV cache", E, 2LL * m->C * m->L * s->cache * s->T, 0, end,
         ON_DEVICE},
    };
    state_buffers(buffers, s);
    memcpy(buffers + STATE_BUFFERS, rows, sizeof rows);
}

// A slot is a device buffer through which the data of one block at a time is streamed. The struct
// records its current contents and its transfers in progress.
typedef struct {
    int block;              // 1 + the block whose data the slot holds; 0: none
    int fetching, storing;  // 1: started, and the compute stream has not yet waited for it
} Slot;
typedef struct Transfer Transfer;  // next chapter

// For each kind that is streamed: its first slot; its backing store, which holds the data of all
// blocks; and the activation (ACT_*) that it consists of, or -1.
static const struct {
    int slot, store, act;
} transfer_buffers[KINDS] = {{BUF_WEIGHTS_SLOT, BUF_WEIGHTS_STORE, -1},
                             {BUF_GRADS_SLOT, BUF_GRADS_STORE, -1},
                             {-1, -1, -1},
                             {-1, -1, -1},
                             {BUF_X_SLOT, BUF_X_STORE, ACT_X}};

// Returns the kind under which these settings stream an activation, or KINDS if they do not.
static Kind act_streamed(const Settings *s, int act) {
    int kind = 0;
    while (kind < KINDS && (transfer_buffers[kind].act != act || !s->placement[kind])) {
        kind++;
    }
    return (Kind)kind;
}

typedef struct Plan Plan;
struct Plan {
    Settings settings;
    Buffer *buffers;
    int buffer_count, ticks;
    int single[SINGLES];                // index of the buffer; -1: not in this plan
    int *act;                           // [phase 0 forward, 1 backward][ACTS][L]
    int *grad;                          // [GRADS][L]
    uint64_t device_bytes, host_bytes;  // of the allocations; may exceed a 32-bit address space
    uint64_t live_bytes;                // peak of the bytes alive at once: no layout needs less
    int peak;                           // the first tick at that peak
    Transfer *transfers;                // of one micro-step
    int transfer_count;
    // at run time
    char *base[2];  // start of the allocation, by Placement
    int now;        // the current tick
    int adds;       // 1: gradients are added to those of the previous micro-step
    Slot slots[KINDS][SLOTS];
    // Performs one phase of a transfer; the next chapter defines the phases.
    void (*transfer)(Plan *p, int phase, const Transfer *v, void *slot, void *store, size_t bytes);
    void *transfer_context;
    void (*mark)(void *memory, size_t bytes, int alive);  // poison_mark() or its GPU version
};

// 256 bytes: the alignment of cudaMalloc, and four cache lines, so that no two buffers share one.
enum { PLAN_ALIGN = 256, PLAN_GAP = GPT2_POISON ? 256 : 0 };

// Adds a buffer, of block `layer` or of no block (-1), and returns its index, or -1 if the buffer
// is not needed: a forward-only run trains nothing and ends at the head. The name may be truncated:
// only messages and --plan --json use it.
static int plan_add(Plan *p, const BufferEntry *entry, int layer) {
    const Settings *s = &p->settings;
    const int learns = entry->group >= GROUP_GRADIENTS && entry->group <= GROUP_MASTER;
    if (!entry->count || (s->forward && (learns || entry->first > tick_head(&s->model)))) {
        return -1;
    }
    Buffer *b = &p->buffers[p->buffer_count];  // zeroed with its padding, so memcmp finds equality
    if (layer < 0) {
        snprintf(b->name, sizeof b->name, "%s", entry->name);
    } else {
        snprintf(b->name, sizeof b->name, "%d.%s", layer, entry->name);
    }
    b->group = entry->group;
    b->type = entry->type;
    b->count = entry->count;
    b->first = entry->first;
    b->last = s->forward ? min_int(entry->last, tick_head(&s->model)) : entry->last;
    const Kind kind = entry->kind;
    const int hosted = kind < KINDS ? s->placement[kind] & PLACE_HOST : kind == ON_HOST;
    b->placement = hosted ? PLACE_HOST : PLACE_DEVICE;
    b->bytes = (uint64_t)entry->count * type_bytes(entry->type);
    return p->buffer_count++;
}

// Adds the buffers of one block's activations and of their gradients. An activation that backward
// recomputes gets two short-lived buffers instead of one that lives from forward to backward.
static void plan_add_block(Plan *p, int layer) {
    const Settings *s = &p->settings;
    const Model *m = &s->model;
    const int64_t N = (int64_t)s->B * settings_rows(s);
    for (int i = 0; i < ACTS; i++) {
        const ActEntry *a = &act_table[i];
        int *forward = &p->act[i * m->L + layer], *backward = &p->act[(ACTS + i) * m->L + layer];
        // x is computed by the last stage of the previous block, or for block 0 by embed, which has
        // the tick before that block.
        const int made = tick_forward(layer - (i == ACT_X), a->made);
        const int used_back =  // without a backward pass, the last use is in forward
            s->forward ? tick_forward(layer, a->used) : tick_backward(m, layer, a->used_back);
        const Type type = a->channels > 0 ? s->dtype : settings_real(s);
        const int per_token = a->channels == PER_HEAD    ? m->NH
                              : a->channels == PER_TOKEN ? 1
                                                         : a->channels * m->C;
        BufferEntry entry = {s->forward ? GROUP_WORKING : GROUP_KEPT, a->name, type,
                             N * per_token, made, used_back, ON_DEVICE};
        if (act_streamed(s, i) < KINDS) {
            *forward = *backward = -1;  // stored in slots
            continue;
        }
        if (!plan_recomputes(s, a->made, layer)) {
            *forward = *backward = plan_add(p, &entry, layer);
            continue;
        }
        BufferEntry again = entry;
        entry.group = again.group = GROUP_WORKING;
        entry.last = tick_forward(layer, a->used);
        again.first = tick_backward(m, layer, a->made);
        *forward = plan_add(p, &entry, layer);
        *backward = plan_add(p, &again, layer);
    }
    for (int i = 0; i < GRADS; i++) {
        const GradEntry *g = &grad_table[i];
        BufferEntry entry = {GROUP_WORKING, g->name, s->dtype, N * g->channels * m->C,
                             tick_backward(m, layer, g->first), tick_backward(m, layer, g->last),
                             ON_DEVICE};
        p->grad[i * m->L + layer] = plan_add(p, &entry, layer);
    }
}

// Returns the bytes that a buffer occupies in an allocation, including padding and gap.
static uint64_t buffer_padded_bytes(const Buffer *b) {
    return (uint64_t)round_up_i64((int64_t)b->bytes, PLAN_ALIGN) + PLAN_GAP;
}

// Buffers are assigned offsets in ascending order of these keys, which are compared
// lexicographically. The last number is the buffer's index, so that no two keys are equal and every
// qsort gives the same order.
typedef struct {
    int64_t key[4];
} PlaceKey;

static int place_compare(const void *a, const void *b) {
    const int64_t *x = ((const PlaceKey *)a)->key, *y = ((const PlaceKey *)b)->key;
    int i = 0;
    while (i < 3 && x[i] == y[i]) {
        i++;
    }
    return x[i] < y[i] ? -1 : x[i] > y[i];
}

// Returns the key of buffer `i` for the order of offset assignment: first the buffers that live for
// the whole run, and slots, which would fragment the arena if they were placed later; then kept
// activations, the longest lifetime first, so that they form a stack; then the rest, the longest
// lifetime first or, with `by_size`, the largest first.
static PlaceKey place_key(const Plan *p, int i, int by_size) {
    const Buffer *b = &p->buffers[i];
    const int64_t life = b->last - b->first, bytes = (int64_t)b->bytes;
    const int whole = p->ticks - 1 - settings_joins(&p->settings);
    const int kind = life >= whole ? 0 : b->group == GROUP_KEPT ? 1 : 2;
    PlaceKey by_life = {{kind, -life, -bytes, i}}, largest = {{kind, -bytes, -life, i}};
    return by_size && kind == 2 ? largest : by_life;
}

// First fit: returns the lowest offset at which `b` overlaps no placed buffer that is alive at a
// common tick. `placed` holds the indices of `count` buffers in ascending order of offset.
static uint64_t place_find(const Plan *p, const Buffer *b, const int *placed, int count) {
    const uint64_t bytes = buffer_padded_bytes(b);
    uint64_t offset = 0;
    for (int i = 0; i < count; i++) {
        const Buffer *other = &p->buffers[placed[i]];
        if (other->first > b->last || other->last < b->first) {
            continue;
        }
        if (other->offset >= offset + bytes) {
            break;
        }
        const uint64_t end = other->offset + buffer_padded_bytes(other);
        offset = end > offset ? end : offset;
    }
    return offset;
}

// Inserts buffer `id` into a list of `*count` buffers in ascending order of offset.
static void place_insert(const Plan *p, int *placed, int *count, int id) {
    int at = (*count)++;
    for (; at > 0 && p->buffers[placed[at - 1]].offset > p->buffers[id].offset; at--) {
        placed[at] = placed[at - 1];
    }
    placed[at] = id;
}

// Assigns every buffer an offset; host buffers are laid out back to back. Returns the bytes of the
// device allocation. Most buffers live for less than a block, so the placed ones are listed by
// time: list w has those alive at some tick of [WINDOW w, WINDOW (w + 2)). A buffer whose lifetime
// fits in one of these ranges is compared with that list only, any other with the list of all
// buffers, which is updated only when it is needed.
static uint64_t plan_place(Plan *p, int by_size) {
    enum { WINDOW = 16 };
    const int n = p->buffer_count, all = p->ticks / WINDOW + 1;
    PlaceKey *order = (PlaceKey *)alloc_zero((size_t)n, sizeof *order);
    int *lists = (int *)alloc_zero((size_t)(all + 1) * (size_t)n, sizeof(int));
    int *counts = (int *)alloc_zero((size_t)all + 1, sizeof(int)), listed = 0;
    for (int i = 0; i < n; i++) {
        order[i] = place_key(p, i, by_size);
    }
    qsort(order, (size_t)n, sizeof *order, place_compare);
    p->device_bytes = p->host_bytes = 0;
    for (int k = 0; k < n; k++) {
        const int id = (int)order[k].key[3];
        Buffer *b = &p->buffers[id];
        const uint64_t bytes = buffer_padded_bytes(b);
        if (b->placement == PLACE_HOST) {
            b->offset = p->host_bytes;
            p->host_bytes += bytes;
            continue;
        }
        const int from = b->first / WINDOW, to = b->last / WINDOW;
        const int list = to <= from + 1 ? from : all;
        for (; list == all && listed < k; listed++) {
            const int placed = (int)order[listed].key[3];
            if (p->buffers[placed].placement == PLACE_DEVICE) {
                place_insert(p, lists + all * n, &counts[all], placed);
            }
        }
        b->offset = place_find(p, b, lists + list * n, counts[list]);
        p->device_bytes =
            b->offset + bytes > p->device_bytes ? b->offset + bytes : p->device_bytes;
        for (int w = from ? from - 1 : 0; w <= to; w++) {
            place_insert(p, lists + w * n, &counts[w], id);
        }
    }
    free(order);
    free(lists);
    free(counts);
    return p->device_bytes;
}

// Returns the maximum, over all ticks, of the bytes of device buffers alive at once, and stores the
// first tick at that maximum in *peak.
static uint64_t plan_peak(const Plan *p, int *peak) {
    int64_t *change = (int64_t *)alloc_zero((size_t)p->ticks + 1, sizeof(int64_t));
    int64_t live = 0, most = 0;
    for (int i = 0; i < p->buffer_count; i++) {
        const Buffer *b = &p->buffers[i];
        int64_t bytes = b->placement == PLACE_DEVICE ? (int64_t)buffer_padded_bytes(b) : 0;
        change[b->first] += bytes;
        change[b->last + 1] -= bytes;
    }
    for (int t = 0; t < p->ticks; t++) {
        live += change[t];
        *peak = live > most ? t : *peak;
        most = max_i64(live, most);
    }
    free(change);
    return (uint64_t)most;
}

static void plan_add_transfers(Plan *p);  // next chapter

// Lists the buffers of a run with these settings and finds the peak of live bytes and the bytes in
// host memory, without assigning offsets.
static void plan_list(Plan *p, const Settings *s) {
    memset(p, 0, sizeof *p);
    p->settings = *s;
    p->ticks = (s->forward ? tick_head(&s->model) : tick_update(s)) + 1;
    const size_t L = (size_t)s->model.L;
    p->buffers = (Buffer *)alloc_zero(SINGLES + (2 * ACTS + GRADS) * L, sizeof(Buffer));
    p->act = (int *)alloc_zero(2 * ACTS * L, sizeof(int));
    p->grad = (int *)alloc_zero(GRADS * L, sizeof(int));
    BufferEntry singles[SINGLES];
    single_buffers(singles, s);
    for (int i = 0; i < SINGLES; i++) {
        p->single[i] = plan_add(p, &singles[i], -1);
    }
    for (int l = 0; l < s->model.L; l++) {
        plan_add_block(p, l);
    }
    for (int i = 0; i < p->buffer_count; i++) {
        const Buffer *b = &p->buffers[i];
        p->host_bytes += b->placement == PLACE_HOST ? buffer_padded_bytes(b) : 0;
    }
    p->live_bytes = plan_peak(p, &p->peak);
}

// Assigns offsets to the listed buffers, in the better of two orders.
static void plan_layout(Plan *p) {
    const uint64_t by_size = plan_place(p, 1);  // neither order is better for all settings
    if (by_size > p->live_bytes) {
        const size_t bytes = (size_t)p->buffer_count * sizeof(Buffer);
        Buffer *kept = (Buffer *)alloc_zero(1, bytes);
        memcpy(kept, p->buffers, bytes);
        if (plan_place(p, 0) >= by_size) {
            memcpy(p->buffers, kept, bytes);
            p->device_bytes = by_size;
        }
        free(kept);
    }
}

// Builds the plan of a run with these settings. This is pure arithmetic: it allocates the plan's
// tables, but none of the memory that they describe.
static void plan_build(Plan *p, const Settings *s) {
    plan_list(p, s);
    plan_layout(p);
    plan_add_transfers(p);
}

static void plan_free(Plan *p) {
    free(p->buffers);
    free(p->act);
    free(p->grad);
    free(p->transfers);
    memset(p, 0, sizeof *p);
}

// Returns the peak of live bytes of a run with these settings. It is a lower bound on the size of
// any layout, so searches rule settings out by it without assigning offsets.
static uint64_t plan_live(const Settings *s) {
    Plan p;
    plan_list(&p, s);
    const uint64_t bytes = p.live_bytes;
    plan_free(&p);
    return bytes;
}

// Returns the bytes of device memory that a run takes. On the CPU, host buffers are in the same
// memory.
static uint64_t plan_taken(const Plan *p) {
    return p->device_bytes + (p->settings.gpu ? 0 : p->host_bytes);
}

// Returns plan_taken() for settings that will not be run, for suggested changes and tables.
static uint64_t plan_bytes(const Settings *s) {
    Plan p;
    plan_list(&p, s);
    plan_layout(&p);
    uint64_t bytes = plan_taken(&p);
    plan_free(&p);
    return bytes;
}

// Returns the level whose name or alias is `word` (n bytes), or -1. `names` receives all names and
// aliases.
static int level_find(const char *word, size_t n, char names[128]) {
    int found = -1;
    for (int i = 0, used = 0; i < RECOMPUTE_LEVELS; i++) {
        const LevelEntry *entry = &level_table[i];
        const char *spellings[] = {entry->name, entry->alias ? entry->alias : entry->name};
        for (int k = 0; k < 2; k++) {
            found = strlen(spellings[k]) == n && memcmp(spellings[k], word, n) == 0 ? i : found;
        }
        used = text_add(names, 128, used, entry->alias ? " %s (%s)" : " %s", entry->name,
                        entry->alias);
    }
    return found;
}

// Parses -r: a comma-separated list. Each LEVEL:K sets the recomputation level of the next K
// blocks, starting with the first one; without :K, a level applies to all remaining blocks.
// Blocks after the list recompute nothing. `auto` leaves all levels at none, and settings_auto()
// decides later. Ends the run if a level is unknown (the message lists all levels), if K exceeds
// the number of remaining blocks, or if no block is left for a level.
static void recompute_parse(Settings *s, const char *text) {
    char names[128];
    int block = 0, word_is_last = 0;
    settings_recompute(s, RECOMPUTE_NONE, 0);
    for (const char *word = text; strcmp(text, "auto") != 0 && !word_is_last;) {
        const size_t length = strcspn(word, ":,");
        const int level = level_find(word, length, names), left = s->model.L - block;
        char *end = (char *)word + length;
        if (level < 0) {
            die("--recompute (-r): '%s' is not one of%s auto, or LEVEL:K for the first K blocks, "
                "as in block:K", text, names);
        }
        if (left == 0) {
            die("--recompute (-r): '%s': no block is left for %s", text, level_table[level].name);
        }
        const char *number = end + 1;
        const long blocks = *end == ':' ? strtol(number, &end, 10) : left;
        if (end == number || (*end != 0 && *end != ',') || blocks < 0 || blocks > left) {
            die("--recompute (-r): '%s': K of %s:K must be from 0 to %d, the blocks left", text,
                level_table[level].name, left);
        }
        memset(s->level + block, level, (size_t)blocks);
        block += (int)blocks;
        word_is_last = *end == 0;
        word = end + 1;
    }
}

static void recompute_print_help(void) {
    for (int i = 0; i < RECOMPUTE_LEVELS; i++) {
        const LevelEntry *entry = &level_table[i];
        printf("%26s%-6s%-2s%s\n", "", entry->name, entry->alias ? entry->alias : "", entry->help);
    }
}

#if GPT2_POISON
// Fills a host buffer with NaN, in test builds, when its lifetime begins or ends. Builds with
// stricter checks, such as AddressSanitizer, assign another function to plan_mark; in a GPU run a
// kernel fills device buffers (Plan.mark).
static void poison_mark(void *memory, size_t bytes, int alive) {
    (void)alive;
    memset(memory, 0xff, bytes);  // NaN in every floating-point type
}
static void (*plan_mark)(void *memory, size_t bytes, int alive) = poison_mark;
#endif

// Advances the plan to `tick`. Test builds first poison the buffers whose lifetime has ended and
// then fill with NaN those whose lifetime begins, in this order because a new buffer may reuse a
// dead one's memory.
static void plan_tick(Plan *p, int tick) {
    p->now = tick;
#if GPT2_POISON
    for (int birth = 0; birth < 2; birth++) {
        for (int i = 0; i < p->buffer_count; i++) {
            Buffer *b = &p->buffers[i];
            int alive = b->first <= tick && tick <= b->last;
            if (alive != b->alive && alive == birth) {
                b->alive = alive;
                p->mark(p->base[b->placement] + b->offset, b->bytes, alive);
            }
        }
    }
#endif
}

// Returns the memory of buffer `id`, which must be alive at the current tick. Every build checks
// this: a step makes only a few thousand calls, and outside a buffer's lifetime its memory may
// belong to another buffer.
static void *buffer_pointer(const Plan *p, int id) {
    check(id >= 0 && id < p->buffer_count, "no such buffer in this plan");
    const Buffer *b = &p->buffers[id];
    check(b->first <= p->now && p->now <= b->last,
          "buffer %s lives from tick %d to %d, used at %d", b->name, b->first, b->last, p->now);
    return p->base[b->placement] + b->offset;
}

static void *plan_single(const Plan *p, int single) { return buffer_pointer(p, p->single[single]); }

// Returns the buffer index of the slot that holds the streamed weights, gradients or residuals of
// block `layer`. The slot must currently hold that block's data: before the fetch is complete and
// after the slot is reused, it belongs to another block.
static int slot_buffer(const Plan *p, Kind state, int layer) {
    check(p->slots[state][layer % SLOTS].block == layer + 1,
          "%s of block %d are not in their slot at tick %d", choice_text(offloads, state + 2).s,
          layer, p->now);
    return transfer_buffers[state].slot + layer % SLOTS;
}

// Returns an activation of a block, from its buffer for the current pass: a recomputed activation
// has one buffer for forward and one for backward. x of layer L is the output of the last block.
static void *plan_act(const Plan *p, int act, int layer) {
    const Model *m = &p->settings.model;
    if (act == ACT_X && layer == m->L) {
        return plan_single(p, BUF_XF);
    }
    const Kind streamed = act_streamed(&p->settings, act);
    if (streamed < KINDS) {
        return plan_single(p, slot_buffer(p, streamed, layer));
    }
    int backward = p->now >= tick_backward(m, m->L - 1, 0);
    return buffer_pointer(p, p->act[(backward * ACTS + act) * m->L + layer]);
}

static void *plan_grad(const Plan *p, int grad, int layer) {
    return buffer_pointer(p, p->grad[grad * p->settings.model.L + layer]);
}

// Returns a new mapping of `bytes` bytes, or NULL for 0 bytes. The memory reads as zero without
// having been written. Huge pages are requested, because packing steps through a matrix page by
// page. Ends the run if the system refuses.
static char *plan_map(uint64_t bytes) {
    if (bytes == 0) {
        return NULL;
    }
    void *memory = MAP_FAILED;
    if ((size_t)bytes == bytes) {
        memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    } else {
        errno = ENOMEM;  // exceeds the address space
    }
    if (memory == MAP_FAILED) {
        die("cannot allocate %s for the plan: %s", bytes_text((double)bytes).s, strerror(errno));
    }
    madvise(memory, bytes, MADV_HUGEPAGE);
    return (char *)memory;
}

// Allocates the plan: one mapping per placement, of exactly device_bytes and host_bytes.
static void plan_open(Plan *p) {
    p->base[PLACE_DEVICE] = plan_map(p->device_bytes);
    p->base[PLACE_HOST] = plan_map(p->host_bytes);
#if GPT2_POISON
    p->mark = plan_mark;
    p->mark(p->base[PLACE_DEVICE], p->device_bytes, 0);
    if (p->host_bytes) {
        p->mark(p->base[PLACE_HOST], p->host_bytes, 0);
    }
#endif
    plan_tick(p, 0);
}

// Frees the memory; the plan itself stays valid.
static void plan_close(Plan *p) {
    const uint64_t bytes[] = {p->device_bytes, p->host_bytes};
    for (int placement = PLACE_DEVICE; placement <= PLACE_HOST; placement++) {
        if (p->base[placement]) {
#if GPT2_POISON
            p->mark(p->base[placement], bytes[placement], 1);
#endif
            munmap(p->base[placement], bytes[placement]);
        }
        p->base[placement] = NULL;
    }
}

// -------------------------------------------------------------------------------------------------
// 7. Sharding and offload
// A state (weights, gradients, moments, master copy or residuals) need not be stored whole on the
// device: with PLACE_SHARD each of N ranks stores one Nth of it; with PLACE_HOST it is stored in
// host memory. This chapter is pure arithmetic with the same result on every rank, so a run with
// 1,024 ranks can be planned without any of them.
// 1. Ranks exchange buckets: one for all vectors, one each for wte and wpe, and one for the four
//    matrices of each block. A bucket is padded to a multiple of 64 N elements, so that its N
//    shards have equal sizes and a tensor's alignment. One rank needs no padding. Padding is zero
//    and is never read.
// 2. With one rank, a flat buffer that holds a whole state has the order of chapter The model,
//    which is also that of the files. Otherwise buckets are stored back to back, so that a shard is
//    one range of memory. In either order a tensor is one range, and so is a rank's part of it, so
//    no lists of ranges are needed.
// 3. Vectors are replicated on every rank: they are 0.1 % of the parameters, and moving them would
//    cost latency. wte and wpe are not streamed, because the first and the last layer need them;
//    moments and master are not either, because the update reads and writes each element once, in
//    place.
// 4. Weights and gradients of blocks, and residuals, are streamed through two slots per kind:
//    buffers in device memory that hold one block each, block l in slot l % 2. One slot is used
//    while the other is filled or emptied (double buffering), so the next block's data is
//    prefetched.
// 5. The memory of a slot changes owner only on the compute stream, which waits for a fetch before
//    the first use, and for a store before the slot is overwritten. So the lifetime of a slot's
//    contents can be given in ticks.

typedef struct {
    int64_t offset, count, part;  // elements: offset in a whole state; padded size; shard size
} Bucket;
enum { BUCKET_VECTORS, BUCKET_WTE, BUCKET_WPE, BUCKET_BLOCKS };  // block l: BUCKET_BLOCKS + l

// Returns bucket number `bucket`. The offset of number BUCKET_BLOCKS + L, one past the last, is the
// size of a whole state, in elements.
static Bucket bucket_at(const Model *m, int ranks, int bucket) {
    const int64_t sizes[] = {
        subset_offset(m, TENSORS, 0, VECTORS), tensor_padded_size(m, WTE, ALL_TENSORS),
        tensor_padded_size(m, WPE, ALL_TENSORS),
        subset_offset(m, QKVW, 1, MATRICES) - subset_offset(m, QKVW, 0, MATRICES)};
    Bucket b = {0, 0, 0};
    for (int i = 0; i <= bucket; i++) {
        b.offset += b.count;
        b.count = round_up_i64(sizes[min_int(i, BUCKET_BLOCKS)], (int64_t)TENSOR_ALIGN * ranks);
    }
    b.part = b.count / ranks;
    return b;
}

// Returns the bucket that holds a tensor, and stores the tensor's offset within it, in elements, in
// *at. The offset does not depend on the number of ranks.
static int tensor_bucket(const Model *m, int tensor, int layer, int64_t *at) {
    const int matrix = tensor_is_matrix(tensor), subset = matrix ? MATRICES : VECTORS;
    const int block = matrix && tensor_table[tensor].per_layer;
    *at = subset_offset(m, tensor, layer, subset) -
          (matrix ? subset_offset(m, block ? QKVW : tensor, layer, subset) : 0);
    return block ? BUCKET_BLOCKS + layer : matrix ? BUCKET_WTE + tensor - WTE : BUCKET_VECTORS;
}

// A rank's range of a tensor: elements `first` to first + count - 1 of the tensor.
typedef struct {
    int64_t first, count;
    int64_t param;         // offset of `first` in unsharded weights
    int64_t state;         // offset of `first` in the rank's moments and master weights
} TensorRange;

// Returns the range of a tensor in the shard of rank s->rank, or with `whole` the whole tensor. The
// norm sums shards at every ZeRO stage, so that the result is the same at every stage; AdamW uses
// tensor_update_range().
static TensorRange tensor_range(const Settings *s, int tensor, int layer, int whole) {
    const Model *m = &s->model;
    const int matrix = tensor_is_matrix(tensor);
    int64_t at;
    const Bucket b = bucket_at(m, s->ranks, tensor_bucket(m, tensor, layer, &at));
    // The rank's shard begins at element `part` of the tensor; negative: before it.
    const int64_t size = tensor_size(m, tensor), part = s->rank * b.part - at;
    TensorRange r = {0, size, 0, 0};
    if (!whole) {
        r.first = min_i64(max_i64(part, 0), size);
        r.count = min_i64(max_i64(part + b.part, 0), size) - r.first;
    }
    const int64_t in_file = tensor_offset(m, tensor, layer) + r.first;
    const int64_t vectors = bucket_at(m, s->ranks, BUCKET_VECTORS).count;
    const int64_t in_buckets = b.offset + at + r.first;
    r.param = s->ranks > 1 || s->placement[KIND_WEIGHTS] ? in_buckets : in_file;
    r.state = s->ranks > 1 ? in_buckets : in_file;
    if (matrix && s->placement[KIND_MOMENTS] & PLACE_SHARD) {
        r.state = vectors + (b.offset - vectors) / s->ranks + r.first - part;
    }
    return r;
}

// Location of a tensor of the weights, gradients or moments: a buffer that exists once, and the
// offset of the tensor in it, in elements.
typedef struct {
    int buffer;
    int64_t offset;
} Location;

// Returns whether a tensor of the weights or gradients is streamed.
static int tensor_is_streamed(const Settings *s, Kind state, int tensor) {
    return s->placement[state] && tensor_is_matrix(tensor) && tensor_table[tensor].per_layer;
}

// Returns whether each rank stores only its shard of a tensor of the weights or gradients. wte and
// wpe are never sharded.
static int tensor_divided(const Settings *s, Kind state, int tensor) {
    return tensor_is_streamed(s, state, tensor) && s->placement[state] & PLACE_SHARD;
}

// Returns the location of a whole tensor of the weights, gradients or moments (m; v has the same
// layout) in its backing store, which for a tensor that is not streamed is its buffer on the
// device.
static Location tensor_store(const Settings *s, Kind state, int tensor, int layer) {
    static const int flat[KINDS] = {BUF_WEIGHTS, BUF_GRADS, BUF_M, BUF_MASTER, 0};
    static const int store[] = {BUF_WEIGHTS_STORE, BUF_GRADS_STORE};
    const Model *m = &s->model;
    const int parted = s->gpu && state == KIND_GRADIENTS;  // vectors are in a separate buffer
    const int placement =
        state == KIND_WEIGHTS || state == KIND_GRADIENTS ? s->placement[state] : 0;
    if (s->ranks == 1 && !parted && !placement) {
        const Location in_file = {flat[state], tensor_offset(m, tensor, layer)};
        return in_file;
    }
    Location location = {flat[state], 0};
    const int bucket = tensor_bucket(m, tensor, layer, &location.offset);
    location.offset += bucket_at(m, s->ranks, bucket).offset;
    if (placement && tensor_is_streamed(s, state, tensor)) {
        location.buffer = store[state];
        location.offset -= bucket_at(m, s->ranks, BUCKET_BLOCKS).offset;
    } else if (parted && tensor_is_matrix(tensor)) {
        location.offset -= bucket_at(m, s->ranks, BUCKET_WTE).offset;
    } else if (parted) {
        location.buffer = BUF_GRADS_1D;
    }
    return location;
}

// Returns the location of a whole tensor of the weights or gradients on the device: in its block's
// slot if it is streamed, else in its own buffer.
static Location tensor_location(const Plan *p, Kind state, int tensor, int layer) {
    if (!tensor_is_streamed(&p->settings, state, tensor)) {
        return tensor_store(&p->settings, state, tensor, layer);
    }
    Location location = {slot_buffer(p, state, layer), 0};
    tensor_bucket(&p->settings.model, tensor, layer, &location.offset);
    return location;
}

// Returns the range of a tensor that AdamW updates on this rank. Every rank updates all vectors,
// with the same result, and all matrices too unless the moments are sharded.
static TensorRange tensor_update_range(const Settings *s, int tensor, int layer) {
    const int sharded = s->placement[KIND_MOMENTS] & PLACE_SHARD;
    return tensor_range(s, tensor, layer, !sharded || !tensor_is_matrix(tensor));
}

// Returns the number of elements that one rank stores of `count` elements of a state: all of them,
// or one shard.
static int64_t own_count(const Settings *s, Kind state, int64_t count) {
    return s->placement[state] & PLACE_SHARD ? count / s->ranks : count;
}

// The order in which the ranks' gradients are added depends on the number of ranks alone, not on
// the machines that they run on: groups of RANK_GROUP consecutive ranks are added in rank order,
// then the groups' sums in their order. A rank adds some of the parts of a bucket for its group,
// and the groups' sums of a part, in fp32, go to the rank that owns it. So if each machine has the
// GPUs of one group, only sums travel between machines.
enum { RANK_GROUP = 8 };
static int rank_groups(int ranks) { return (ranks + RANK_GROUP - 1) / RANK_GROUP; }
static int group_members(int ranks, int group) {
    return min_int(RANK_GROUP, ranks - group * RANK_GROUP);
}

// Returns the number of parts of a bucket that a rank adds for its group. Member i adds the parts
// of the ranks q with q % RANK_GROUP = i. If the last group has fewer members, these also add the
// parts of the missing ones (part_adder). With one group, each rank adds its own part.
static int parts_added(int ranks, int rank) {
    const int members = group_members(ranks, rank / RANK_GROUP);
    int parts = 0;
    for (int column = rank % RANK_GROUP; column < min_int(RANK_GROUP, ranks); column += members) {
        parts += (ranks - column + RANK_GROUP - 1) / RANK_GROUP;
    }
    return parts;
}

// Returns the bytes that a rank sends to add up a bucket of `count` elements of `bytes` bytes, for
// the rank that sends the most, which is the first member of the first or of the last group.
static double reduce_bytes(int ranks, double count, double bytes) {
    double most = 0;
    for (int i = 0; i < 2; i++) {
        const int parts = parts_added(ranks, i ? (rank_groups(ranks) - 1) * RANK_GROUP : 0);
        most = fmax(most, count / ranks * ((ranks - parts) * bytes + (parts - 1) * 4.0));
    }
    return most;
}

// Fills `rows` with the weights, gradients, moments and master copy, and the backing stores and
// slots. Rows that the placements do not need have no elements.
static void state_buffers(BufferEntry rows[STATE_BUFFERS], const Settings *s) {
    const Model *m = &s->model;
    const int end = tick_update(s), join = tick_join(s);
    const int64_t vectors = bucket_at(m, s->ranks, BUCKET_VECTORS).count;
    // Elements of the tensors that are never streamed, of one block, and of all blocks.
    const int64_t stay = bucket_at(m, s->ranks, BUCKET_BLOCKS).offset;
    const int64_t block = bucket_at(m, s->ranks, BUCKET_BLOCKS).count, blocks = m->L * block;
    const int64_t NC = (int64_t)s->B * s->T * m->C, has_second = m->L > 1;
    // 1 if the state is streamed, 0 if it is whole on the device; factors of the counts below.
    const int64_t W = s->placement[KIND_WEIGHTS] != 0, G = s->placement[KIND_GRADIENTS] != 0;
    const int64_t X = s->placement[KIND_RESIDUALS] != 0;
    const int64_t weights = own_count(s, KIND_WEIGHTS, W * blocks);
    const int64_t grads = own_count(s, KIND_GRADIENTS, G * blocks);
    // On a GPU, gradients of vectors are summed in fp32, in a buffer of their own.
    const int64_t grads_1d = s->gpu * vectors;
    const int64_t moments = vectors + own_count(s, KIND_MOMENTS, stay - vectors + blocks);
    const int64_t master = vectors + own_count(s, KIND_MASTER, stay - vectors + blocks);
    const Type E = s->dtype, D = s->grad_dtype, M = s->moment_dtype;
    const Type low = s->split_master ? TYPE_U16 : TYPE_FP32;
    const BufferEntry states[STATE_BUFFERS] = {
        {GROUP_WEIGHTS, "weights", E, stay + (1 - W) * blocks, 0, end, ON_DEVICE},
        {GROUP_GRADIENTS, "gradients", D, stay - grads_1d + (1 - G) * blocks, 0, end, ON_DEVICE},
        {GROUP_GRADIENTS, "gradients of vectors", TYPE_FP32, grads_1d, 0, end, ON_DEVICE},
        {GROUP_MOMENTS, "moment m", M, moments, 0, end, KIND_MOMENTS},
        {GROUP_MOMENTS, "moment v", M, moments, 0, end, KIND_MOMENTS},
        {GROUP_MASTER, "master", low, settings_has_master(s) * master, 0, end, KIND_MASTER},
        {GROUP_WEIGHTS, "weights store", E, weights, 0, end, KIND_WEIGHTS},
        {GROUP_GRADIENTS, "gradients store", D, grads, 0, end, KIND_GRADIENTS},
        // Residuals of the last two blocks stay in their slots.
        {GROUP_KEPT, "residuals store", E, X * NC * max_i64(m->L - SLOTS, 0), 0, end,
         KIND_RESIDUALS},
        {GROUP_WEIGHTS, "weights, slot 0", E, W * block, 0, join, ON_DEVICE},
        {GROUP_WEIGHTS, "weights, slot 1", E, W * block * has_second, 0, join, ON_DEVICE},
        {GROUP_GRADIENTS, "gradients, slot 0", D, G * block, 0, join, ON_DEVICE},
        {GROUP_GRADIENTS, "gradients, slot 1", D, G * block * has_second, 0, join, ON_DEVICE},
        {GROUP_KEPT, "residuals, slot 0", E, X * NC, 0, join, ON_DEVICE},
        {GROUP_KEPT, "residuals, slot 1", E, X * NC * has_second, 0, join, ON_DEVICE},
        // Receives the other ranks' parts of a bucket, which one kernel then adds; with several
        // groups of ranks also holds the group's sums, in fp32. Larger buckets are exchanged in
        // pieces. After the update, weights stored whole in host memory are gathered here.
        {GROUP_WORKSPACE, "exchange", D, (s->ranks > 1) * block * (8 + (s->ranks > 8)) / 8, 0,
         s->placement[KIND_WEIGHTS] == PLACE_HOST ? end : join, ON_DEVICE},
    };
    memcpy(rows, states, sizeof states);
}

// One use of a slot by a block (all times are ticks). The fetch starts at tick `fetch`; the compute
// stream waits for it at tick `first`; the store starts after tick `last`; the compute stream waits
// for it at tick `store_wait`. `in` and `out` are placement flags of the backing store: with
// PLACE_HOST data is uploaded and downloaded; with PLACE_SHARD weights are all-gathered and
// gradients are reduce-scattered; with both, a fetch uploads the rank's shard and then all-gathers.
// If `in` is 0, the data is computed on the device; if `out` is 0, nothing is stored.
struct Transfer {
    Kind kind;
    int block, slot;
    int fetch, first, last, store_wait;
    int in, out;
};
enum { BLOCK_TRANSFERS = 5 };  // at most, per block

// Lists the transfers of a micro-step in the order of their fetch ticks; returns their number, at
// most BLOCK_TRANSFERS L. A forward-only pass makes those whose fetch tick is not after the head,
// and stores nothing. The last two blocks stay in their slots from forward to backward. Weights
// that are still in their slot are not fetched again; from the second micro-step on this applies to
// blocks 0 and 1. Gradients stored on the host are fetched from the second micro-step on, because
// that micro-step adds to them.
static int transfers_build(Transfer *transfers, const Settings *s) {
    const Model *m = &s->model;
    const int L = m->L, weights = s->placement[KIND_WEIGHTS];
    const int x = s->placement[KIND_RESIDUALS], gradients = s->placement[KIND_GRADIENTS];
    int n = 0;
    for (int i = 0; i < 2 * L; i++) {
        const int backward = i >= L, l = backward ? 2 * L - 1 - i : i;
        const int slot = l % SLOTS, stays = l >= L - SLOTS;
        const int before = tick_backward(m, l + 1, 0), back = tick_backward(m, l, 0);
        const int d_qkv = tick_backward(m, l, B_QKV), d_ln1 = tick_backward(m, l, B_LN1);
        const int early = l < SLOTS ? 0 : tick_forward(l - 1, F_LN1), qkv = tick_forward(l, F_QKV);
        const int made = tick_forward(l - 1, F_FCPROJ);  // when x is computed
        const int over = tick_forward(l + 1, F_FCPROJ);  // when x of block l + 2 fills this slot
        const int fcproj = stays ? d_qkv : tick_forward(l, F_FCPROJ);
        const int attproj = stays ? d_ln1 : tick_forward(l, F_ATTPROJ);
        const int reused = l < SLOTS ? tick_join(s) : tick_backward(m, l - SLOTS, 0);
        const Transfer rows[BLOCK_TRANSFERS] = {
            {KIND_WEIGHTS, l, slot, early, qkv, fcproj, fcproj, weights, 0},
            {KIND_RESIDUALS, l, slot, made, made, attproj, stays ? attproj : over, 0,
             stays ? 0 : x},
            // In backward.
            {KIND_WEIGHTS, l, slot, before, back, d_qkv, d_qkv, weights, 0},
            {KIND_RESIDUALS, l, slot, before, back, d_ln1, d_ln1, x, 0},
            {KIND_GRADIENTS, l, slot, back, tick_backward(m, l, B_FCPROJ), d_qkv, reused,
             gradients & PLACE_HOST, gradients},
        };
        for (int k = !backward ? 0 : stays ? 4 : 2; k < (backward ? BLOCK_TRANSFERS : 2); k++) {
            if (s->placement[rows[k].kind]) {
                transfers[n++] = rows[k];
            }
        }
    }
    return n;
}

static void plan_add_transfers(Plan *p) {
    p->transfers =
        (Transfer *)alloc_zero(BLOCK_TRANSFERS * (size_t)p->settings.model.L, sizeof(Transfer));
    p->transfer_count = transfers_build(p->transfers, &p->settings);
}

// Phases of a transfer, in the order of its four ticks. FETCH starts to fill the slot from `store`;
// if that is NULL, the data will be computed in the slot. FETCH_WAIT makes the compute stream wait
// until the slot is filled. STORE starts to write the slot back to `store`. STORE_WAIT makes the
// compute stream wait for that. Plan.transfer performs them.
enum { FETCH, FETCH_WAIT, STORE, STORE_WAIT };

// Performs one phase of a transfer, if the transfer has that phase, and records which block the
// slot holds from then on. Gradients stored on the host are fetched only if this micro-step adds to
// them.
static void transfer_step(Plan *p, const Transfer *v, int phase) {
    const int fetches = v->in && (p->adds || v->kind != KIND_GRADIENTS);
    const int id = p->single[transfer_buffers[v->kind].slot + v->slot];
    Slot *slot = &p->slots[v->kind][v->slot];
    char *memory = (char *)buffer_pointer(p, id), *store = NULL;
    const size_t bytes = p->buffers[id].bytes;
    int happens = 1;
    switch (phase) {
    case FETCH:
        if (v->kind == KIND_WEIGHTS && slot->block == v->block + 1) {
            return;  // still in the slot
        }
#if GPT2_POISON
        p->mark(memory, bytes, 1);  // a late or incomplete fetch leaves NaN
#endif
        slot->block = 0;
        slot->fetching = fetches;
        break;
    case FETCH_WAIT:
        slot->block = v->block + 1;
        happens = slot->fetching;
        slot->fetching = 0;
        break;
    case STORE: happens = slot->storing = v->out != 0; break;
    case STORE_WAIT:
        happens = slot->storing;
        slot->storing = 0;
        break;
    }
    if (!happens) {
        return;
    }
    if (fetches || v->out) {
        const int64_t own = own_count(&p->settings, v->kind, (int64_t)bytes);
        store = (char *)plan_single(p, transfer_buffers[v->kind].store) + v->block * own;
    }
    p->transfer(p, phase, v, memory, phase == FETCH && !fetches ? NULL : store, bytes);
}

// Performs `phase` of all transfers that have it at `tick`. Transfers before index `from` are
// complete.
static void transfers_step(Plan *p, int from, int phase, int tick) {
    for (int i = from; i < p->transfer_count && p->transfers[i].fetch <= tick; i++) {
        const Transfer *v = &p->transfers[i];
        const int ticks[] = {v->fetch, v->first, v->last, v->store_wait};
        if (ticks[phase] == tick) {
            transfer_step(p, v, phase);
        }
    }
}

// Invalidates the weights in the slots, because the weights in the backing store have changed.
static void transfers_forget_weights(Plan *p) {
    for (int slot = 0; slot < SLOTS; slot++) {
        p->slots[KIND_WEIGHTS][slot].block = 0;
    }
}

// -------------------------------------------------------------------------------------------------
// 8. Step time
// The table of known cards and the cost model, which estimates the seconds of a step at given rates
// from what its stages compute and transfer.
// 1. The counts are those of the kernels, not ideal ones: data read twice is counted twice.
// 2. If the rates are unknown, those of a typical card are used to compare settings, and no
//    forecast is printed.

// Constants of the forecast for a line of cards: the compute capability; the share of the dense
// 16-bit rate that matmuls reach in the limit of many channels, and the number of channels at which
// they reach half of it; the share of that rate in attention, forward and backward, under the
// causal mask; the share of the memory bandwidth in copies of large arrays. The last two columns
// are library memory in MiB: of the CUDA context per SM, at 2 KiB per resident thread; and of the
// rest of the context and cuBLASLt's kernels, the power of two above the known figures.
// dev/notes/forecast.md gives those figures, and compares the resulting throughputs with published
// ones.
typedef struct {
    int capability;
    double matmuls, half, attention, attention_back, memory;
    int sm_mib, library_mib;
} CardLine;
enum {
    LINE_V100, LINE_T4, LINE_RTX20, LINE_A100, LINE_RTX30, LINE_RTX_A, LINE_RTX40, LINE_ADA,
    LINE_H100, LINE_H20, LINE_B200, LINE_RTX50, LINE_RTX_PRO
};
static const CardLine card_lines[] = {
    {70, 0.70, 100, 0.31, 0.22, 0.80, 4, 512},  // V100: only its memory is planned
    {75, 0.58, 120, 0.31, 0.215, 0.70, 2, 256},
    {75, 0.95, 45, 0.70, 0.51, 0.87, 2, 256},  // RTX 20 and 30: no figure is known; as RTX 40
    {80, 0.85, 85, 0.35, 0.255, 0.87, 4, 512},
    {86, 0.95, 45, 0.70, 0.51, 0.87, 3, 256},
    {86, 0.66, 45, 0.43, 0.31, 0.87, 3, 256},
    {89, 0.97, 45, 0.70, 0.51, 0.87, 3, 256},
    {89, 0.40, 45, 0.28, 0.21, 0.87, 3, 256},
    {90, 0.74, 262, 0.21, 0.158, 0.87, 4, 512},
    {90, 0.85, 85, 0.35, 0.255, 0.87, 4, 512},  // H20: a seventh of an H100's tensor cores
    {100, 0.60, 350, 0.15, 0.11, 0.87, 4, 512},
    {120, 0.97, 45, 0.70, 0.51, 0.87, 3, 256},
    {120, 0.50, 45, 0.35, 0.25, 0.87, 3, 256},  // RTX PRO: no figure; between RTX 50 and Ada
};

// Cards: total memory in GiB as the driver reports it, the smallest total quoted in CUDA
// out-of-memory messages (public issue trackers and logs, read 2026-11: "GPU 0 has a total capacity
// of 31.34 GiB" is a 5090; the driver reserves some of the nominal capacity); then from NVIDIA's
// data sheets and architecture whitepapers the dense 16-bit rate of tensor cores that accumulate in
// fp32, in TFLOP/s; the memory bandwidth in GB/s; the number of SMs and their boost clock in MHz;
// the link to the host in GB/s per direction (PCIe 3, 4, 5 x16: 15.75, 31.5, 63; x8: half); and, if
// the GPUs of one machine are connected by NVLink, the bandwidth of all links of one GPU per
// direction: 6, 12 or 18 times 20 to 20.6 GB/s (NVIDIA/nccl-tests#149, NVIDIA/nccl#1397), on B200
// twice that. Sources: dev/notes/forecast.md.
typedef struct {
    const char *name;
    int line;
    double gib, tflops, bandwidth, sms, mhz, link, nvlink;
} GpuEntry;
static const GpuEntry gpu_table[] = {
    {"v100", LINE_V100, 15.78, 125, 900, 80, 1530, 15.75, 120},
    {"t4", LINE_T4, 14.56, 65, 320, 40, 1590, 15.75, 0},
    {"2080ti", LINE_RTX20, 10.76, 53.8, 616, 68, 1545, 15.75, 0},
    {"3060-laptop", LINE_RTX30, 5.8, 21.9, 336, 30, 1425, 15.75, 0},
    {"3060", LINE_RTX30, 11.75, 25.5, 360, 28, 1777, 31.5, 0},
    {"3070", LINE_RTX30, 7.76, 40.6, 448, 46, 1725, 31.5, 0},
    {"3080", LINE_RTX30, 9.78, 59.5, 760, 68, 1710, 31.5, 0},
    {"3090", LINE_RTX30, 23.6, 71.2, 936, 82, 1695, 31.5, 0},
    {"4060", LINE_RTX40, 7.75, 30.2, 272, 24, 2460, 15.75, 0},
    {"4060ti", LINE_RTX40, 15.6, 44.1, 288, 34, 2535, 15.75, 0},
    {"4070", LINE_RTX40, 11.73, 58.3, 504, 46, 2475, 31.5, 0},
    {"4070ti-super", LINE_RTX40, 15.57, 88.2, 672, 66, 2610, 31.5, 0},
    {"4080", LINE_RTX40, 15.57, 97.5, 717, 76, 2505, 31.5, 0},
    {"4080-super", LINE_RTX40, 15.57, 104.4, 736, 80, 2550, 31.5, 0},
    {"4090", LINE_RTX40, 23.6, 165.2, 1008, 128, 2520, 31.5, 0},
    {"5060ti", LINE_RTX50, 15.44, 47.4, 448, 36, 2572, 31.5, 0},
    {"5070", LINE_RTX50, 11.49, 61.7, 672, 48, 2512, 63, 0},
    {"5070ti", LINE_RTX50, 15.48, 87.9, 896, 70, 2452, 63, 0},
    {"5080", LINE_RTX50, 15.44, 112.6, 960, 84, 2617, 63, 0},
    {"5090", LINE_RTX50, 31.34, 209.5, 1792, 170, 2407, 63, 0},
    {"a4000", LINE_RTX_A, 15.61, 76.7, 448, 48, 1560, 31.5, 0},
    {"a6000", LINE_RTX_A, 47.4, 154.8, 768, 84, 1800, 31.5, 0},
    {"a10", LINE_RTX_A, 22.0, 125, 600, 72, 1695, 31.5, 0},
    {"a10g", LINE_RTX30, 22.0, 70, 600, 80, 1710, 31.5, 0},
    {"rtx6000-ada", LINE_ADA, 44.43, 364.2, 960, 142, 2505, 31.5, 0},
    {"rtx-pro-6000", LINE_RTX_PRO, 94.97, 503.8, 1792, 188, 2617, 63, 0},
    {"l4", LINE_ADA, 22.0, 121, 300, 58, 2040, 31.5, 0},
    {"l40s", LINE_ADA, 44.3, 366, 864, 142, 2520, 31.5, 0},
    {"a30", LINE_A100, 23.53, 165, 933, 56, 1440, 31.5, 0},
    {"a100-40", LINE_A100, 39.5, 312, 1555, 108, 1410, 31.5, 230},
    {"a100", LINE_A100, 79.1, 312, 2039, 108, 1410, 31.5, 230},
    {"h20", LINE_H20, 94.88, 148, 4000, 78, 1830, 63, 370},
    {"h100-pcie", LINE_H100, 79.1, 756.5, 2039, 114, 1620, 63, 0},
    {"h100", LINE_H100, 79.1, 989.4, 3350, 132, 1830, 63, 370},
    {"gh200", LINE_H100, 94.88, 989.4, 4000, 132, 1830, 450, 370},
    {"h200", LINE_H100, 139.8, 989.4, 4800, 132, 1830, 63, 370},
    {"b200", LINE_B200, 178.35, 2250, 8000, 148, 1850, 63, 740},
};
enum { GPU_CARDS = sizeof gpu_table / sizeof gpu_table[0] };
enum { LEAST_CAPABILITY = 75, BF16_CAPABILITY = 80 };  // of this program, and of its bf16 kernels

static int card_capability(const GpuEntry *card) { return card_lines[card->line].capability; }

// Returns whether the GPU program does not run on a card, which is in the table for plans only.
// `card` may be NULL.
static int card_is_too_old(const GpuEntry *card) {
    return card && card_capability(card) < LEAST_CAPABILITY;
}

// Copies the letters and digits of a card's name in lower case, so that "RTX 4090", "rtx-4090" and
// "4090" are the same name. The text holds at most 31 of them.
static ShortText card_key(const char *name) {
    ShortText key = {""};
    size_t n = 0;
    for (; *name && n < 31; name++) {
        const char c = *name >= 'A' && *name <= 'Z' ? (char)(*name + 32) : *name;
        if ((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9')) {
            key.s[n++] = c;
        }
    }
    if (strncmp(key.s, "rtx", 3) == 0 && strncmp(key.s, "rtxpro", 6) != 0) {
        memmove(key.s, key.s + 3, n - 2);
    }
    return key;
}

// Returns the Levenshtein distance of two keys: insertions, deletions and substitutions.
static int key_distance(const char *a, const char *b) {
    int row[33];
    for (int j = 0; j <= (int)strlen(b); j++) {
        row[j] = j;
    }
    for (int i = 1; i <= (int)strlen(a); i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= (int)strlen(b); j++) {
            const int above = row[j];
            row[j] = min_int(min_int(above, row[j - 1]) + 1, diagonal + (a[i - 1] != b[j - 1]));
            diagonal = above;
        }
    }
    return row[strlen(b)];
}

// Returns the entry of the card that --gpu names, or NULL without that option. Ends the run if the
// name is unknown; the message lists the cards with the nearest names.
static const GpuEntry *gpu_find(const Options *o) {
    const ShortText key = card_key(o->gpu);
    char near[256] = "";
    int least = 99, n = 0;
    if (!o->gpu[0] || options_all_cards(o)) {
        return NULL;
    }
    for (int i = 0; i < GPU_CARDS; i++) {
        const ShortText card = card_key(gpu_table[i].name);
        const int apart = strstr(card.s, key.s) ? 1 : key_distance(key.s, card.s);
        if (strcmp(key.s, card.s) == 0) {
            return &gpu_table[i];
        }
        n = apart < least ? 0 : n;
        least = min_int(least, apart);
        n = apart == least ? text_add(near, sizeof near, n, " %s", gpu_table[i].name) : n;
    }
    die("--gpu: '%s' is not a known card; nearest:%s; --help lists all, and --gpu-mem SIZE plans "
        "for any card", o->gpu, near);
}

static void gpu_print_help(void) {
    char names[1024] = "";
    int n = 0;
    for (int i = 0; i < GPU_CARDS; i++) {
        n = text_add(names, sizeof names, n, "%s%s", i ? " " : "", gpu_table[i].name);
    }
    printf("%26s", "");
    text_wrap(names, 26, 26);
}

// Throughput of a card, per second: FLOPs of matmuls in the limit of many channels, and the number
// of channels at which matmuls reach half of it; FLOPs of attention, forward and backward, under
// the causal mask; bytes of all other kernels; bytes between host and device, and to other GPUs of
// the same machine, in each direction.
typedef struct {
    double matmuls, half, attention, attention_back, memory, link, peers;
} Rates;
// Kernels other than matmuls and attention are limited by memory or by their instructions: an SM
// processes at most sm_bytes_per_clock. link_share is the payload of the host link, 25 of 31.5 GB/s
// for PCIe 4 x16. Both are assumed to be the same for every card.
static const double sm_bytes_per_clock = 57.6, link_share = 0.79;

// Returns the rates of a card: those of its line at its specifications. They are predicted, not
// measured with this program.
static Rates card_rates(const GpuEntry *card) {
    const CardLine *line = &card_lines[card->line];
    const double flops = 1e12 * card->tflops, link = link_share * 1e9 * card->link;
    const double copies = line->memory * 1e9 * card->bandwidth;
    const double instructions = sm_bytes_per_clock * 1e6 * card->mhz * card->sms;
    const Rates r = {line->matmuls * flops,
                     line->half,
                     line->attention * flops,
                     line->attention_back * flops,
                     1 / (1 / copies + 1 / instructions),
                     link,
                     card->nvlink > 0 ? 1e9 * card->nvlink : link};
    return r;
}

// Attention kernels that a GPU uses once it has proved them (train_gpt2.cu, chapter Kernel trials):
// the cards and the heads in bf16 that they are for, and the predicted shares of the dense rate,
// forward and backward. wgmma: 285 TFLOP/s (250 to 330) and 245 (200 to 290) on an H100 at T =
// 1024, estimated from the machine code; no GPU has run it. Source: dev/notes/hopper.md, "Predicted
// rates".
static const struct {
    int line, HS;
    double share[2];
} proved_attention[] = {{LINE_H100, 64, {0.288, 0.248}}};

// Sets the attention rates of a card, those of the default kernels, to those that a run with these
// settings has: multiplied by gain[0] forward and gain[1] backward, as found in trials on this
// machine, or for a gain of 0 (not tried) as predicted. Returns whether a rate is still to be
// proved.
static int rates_prove(Rates *r, const GpuEntry *card, const Settings *s, const double gain[2]) {
    const size_t rows = sizeof proved_attention / sizeof proved_attention[0];
    double *const rates[] = {&r->attention, &r->attention_back};
    int unproved = 0;
    for (size_t i = 0; i < 2 * rows; i++) {
        const int k = (int)(i % 2);
        if (card && card->line == proved_attention[i / 2].line && s->tune &&
            s->dtype == TYPE_BF16 && s->model.C == proved_attention[i / 2].HS * s->model.NH) {
            *rates[k] = gain[k] > 0 ? gain[k] * *rates[k]
                                    : 1e12 * card->tflops * proved_attention[i / 2].share[k];
            unproved |= !(gain[k] > 0);
        }
    }
    return unproved;
}
static const double untried[2] = {0, 0};
static const char to_prove[] = "predicted, if this GPU proves the kernels";

// Rates used to compare settings if the card is not named: those of a 4090 and of two CPU cores.
static Rates rates_usual(int gpu) {
    static const Rates cpu = {2e11, 30, 8e10, 8e10, 6e9, 6e9, 6e9};
    const GpuEntry *card = gpu_table;
    while (strcmp(card->name, "4090") != 0) {
        card++;
    }
    return gpu ? card_rates(card) : cpu;
}

// Work of a stage per token, counted from its layers: FLOPs of matmuls, in units of C^2; FLOPs of
// causal attention, in units of T C; elements that its other passes read and write, in units of C.
// The gradient of a matmul's bias is counted as one more pass over dout, except fc's, which GELU's
// backward pass computes. The work of the head's own matmul is in speed_predict().
typedef struct {
    double matmuls, attention, numbers;
} StageWork;
static const StageWork stage_work[STAGES] = {
    // ln1, qkv, att, attproj (which adds the residual), ln2, fc, gelu, fcproj
    {0, 0, 2}, {6, 0, 0}, {0, 2, 0}, {2, 0, 1}, {0, 0, 2}, {8, 0, 0}, {0, 0, 8}, {8, 0, 1},
    // d_fcproj, d_gelu, d_fc, d_ln2, d_attproj, d_att, d_qkv, d_ln1
    {16, 0, 1}, {0, 0, 12}, {16, 0, 0}, {0, 0, 4}, {4, 0, 1}, {0, 5, 0}, {12, 0, 3}, {0, 0, 4},
    // embed, lnf, head, d_lnf, d_embed, join, update
    {0, 0, 3}, {0, 0, 2}, {0, 0, 0}, {0, 0, 4}, {0, 0, 4}, {0, 0, 0}, {0, 0, 0},
};

// Returns the FLOPs of recomputation, as a fraction of the FLOPs of a step without recomputation.
static double recompute_cost(const Settings *s) {
    const Model *m = &s->model;
    const double C = m->C, step = m->L * (72 * C * C + 7 * s->T * C) + 6.0 * C * m->Vp;
    double sum = 0;
    for (int l = 0; l < m->L; l++) {
        for (int stage = 0; stage < F_STAGES; stage++) {
            const StageWork *w = &stage_work[stage];
            sum += plan_recomputes(s, stage, l) * C * (w->matmuls * C + w->attention * s->T);
        }
    }
    return sum / step;
}

// Cost model of a step, in seconds: per token in each stage; per block and micro-step, and per
// chunk of logits, independent of their tokens; per step; per byte that the update reads or writes
// on the device; per byte between host and device; per byte sent to another GPU.
typedef struct {
    double token[STAGES];
    double block, chunk, step;
    double byte, link_byte, peer_byte;
    int gpu;
} Speed;

// Bytes per second that one of NCCL's thread blocks moves over NVLink: two of them saturate a link
// (NVIDIA/nccl#1703).
static const double nvlink_cta_rate = 20.6e9 / 2;

// Returns the cost model at a card's rates. Each kernel launch costs 1.2 us, as in a queue of short
// kernels on H100s; there are 30 launches per block and 4 per chunk. A block's weights cross memory
// four times per micro-step, including the read and the write of their gradients; a chunk's three
// times.
static Speed speed_predict(const Rates *r, const Settings *s) {
    const Model *m = &s->model;
    const double C = m->C, bytes = (double)type_bytes(s->dtype), launch = s->gpu ? 1.2e-6 : 5e-6;
    const double matmuls = r->matmuls * C / (C + r->half);
    Speed v;
    memset(&v, 0, sizeof v);
    for (int i = 0; i < STAGES; i++) {
        const StageWork *w = &stage_work[i];
        const double attention = i < F_STAGES ? r->attention : r->attention_back;
        v.token[i] = w->matmuls * C * C / matmuls + w->attention * s->T * C / attention +
                     w->numbers * C * bytes / r->memory;
    }
    v.token[HEAD] = 6 * C * m->Vp / matmuls + 2 * m->Vp * bytes / r->memory;
    v.block = 30 * launch + 48 * C * C * bytes / r->memory;
    v.chunk = 4 * launch + 3 * C * m->Vp * bytes / r->memory;
    v.step = s->gpu ? 0.4e-3 : 0;
    v.gpu = s->gpu;
    v.byte = 1 / r->memory;
    v.link_byte = 1 / r->link;
    v.peer_byte = 1 / (s->nvlink ? fmin(r->peers, s->ctas * nvlink_cta_rate) : r->peers);
    return v;
}

// Returns the cost model at the default rates, which are used to compare settings if the card's own
// rates are unknown.
static Speed speed_usual(const Settings *s) {
    const Rates rates = rates_usual(s->gpu);
    return speed_predict(&rates, s);
}

// Returns the bytes that an update reads and writes on the device. Gradients are read twice, for
// the norm and for AdamW; weights, moments and master bits are read once and written once.
static double update_bytes(const Settings *s) {
    static const int states[] = {BUF_WEIGHTS, BUF_GRADS, BUF_GRADS_1D, BUF_M, BUF_V, BUF_MASTER};
    BufferEntry rows[SINGLES];
    double bytes = 0;
    single_buffers(rows, s);
    for (size_t i = 0; i < sizeof states / sizeof states[0]; i++) {
        const BufferEntry *row = &rows[states[i]];
        const int hosted = row->kind < KINDS && s->placement[row->kind] & PLACE_HOST;
        bytes += hosted ? 0 : 2 * (double)row->count * (double)type_bytes(row->type);
    }
    return bytes;
}

// Bytes that one rank transfers in a step of `micros` micro-steps: host to device, device to host,
// and to other ranks in all-gathers and in reductions.
typedef struct {
    double up, down, gathered, reduced;
} Traffic;

// Computes the traffic of one rank from the list of transfers and the plan's buffers; nothing is
// measured.
static Traffic step_traffic(const Settings *s, int micros) {
    const double others = 1 - 1.0 / s->ranks;
    const int divided = s->placement[KIND_MOMENTS] & PLACE_SHARD;
    BufferEntry rows[SINGLES];
    Transfer *transfers =
        (Transfer *)alloc_zero(BLOCK_TRANSFERS * (size_t)s->model.L, sizeof(Transfer));
    const int n = transfers_build(transfers, s);
    Traffic t = {0, 0, 0, 0};
    single_buffers(rows, s);
    for (int i = 0; i < n; i++) {
        const Transfer *v = &transfers[i];
        const int weights = v->kind == KIND_WEIGHTS, grads = v->kind == KIND_GRADIENTS;
        const int id = transfer_buffers[v->kind].slot;
        const double bytes = (double)rows[id].count * (double)type_bytes(rows[id].type);
        const double own = s->placement[v->kind] & PLACE_SHARD ? bytes / s->ranks : bytes;
        const int times = weights && v->fetch == 0 ? 1 : micros - grads;
        t.up += v->in & PLACE_HOST ? times * own : 0;
        t.gathered += v->in & PLACE_SHARD ? times * others * bytes : 0;
        t.down += v->out & PLACE_HOST ? micros * own : 0;
        t.reduced += v->out & PLACE_SHARD ? micros * reduce_bytes(s->ranks, (double)rows[id].count,
                                                                  (double)type_bytes(rows[id].type))
                                          : 0;
    }
    free(transfers);
    // The update works in place on weights, gradients, moments and master bits stored in host
    // memory; the norm reads gradients once more. If weights are stored whole in host memory but
    // updated in shards, each rank uploads its own shard once more for the all-gather and then
    // copies all weights back to host memory.
    static const int in_place[][3] = {{BUF_WEIGHTS_STORE, 1, 1}, {BUF_GRADS_STORE, 2, 0},
                                      {BUF_M, 1, 1}, {BUF_V, 1, 1}, {BUF_MASTER, 1, 1}};
    const int gathers = divided && s->placement[KIND_WEIGHTS] == PLACE_HOST;
    for (size_t i = 0; i < sizeof in_place / sizeof in_place[0]; i++) {
        const BufferEntry *row = &rows[in_place[i][0]];
        const double bytes = (double)row->count * (double)type_bytes(row->type);
        const double parts = i == 0 && gathers ? s->ranks : 1, whole = parts > 1 ? bytes : 0;
        t.up += s->placement[row->kind] & PLACE_HOST ? (in_place[i][1] * bytes + whole) / parts : 0;
        t.down += s->placement[row->kind] & PLACE_HOST ? in_place[i][2] * bytes / parts + whole : 0;
    }
    // Gradients that are not sharded are reduced once per step. An all-gather follows: of the new
    // weights if the optimizer states are sharded, otherwise of the reduced gradients.
    const double vectors = (double)rows[BUF_GRADS_1D].count, w = (double)type_bytes(s->dtype);
    const double matrices = (double)rows[BUF_GRADS].count, g = (double)type_bytes(s->grad_dtype);
    const int64_t placement =
        s->placement[KIND_WEIGHTS] & PLACE_SHARD ? 0 : rows[BUF_WEIGHTS_STORE].count;
    const int64_t params = rows[BUF_WEIGHTS].count - rows[BUF_GRADS_1D].count + placement;
    t.reduced += s->ranks > 1 ? reduce_bytes(s->ranks, matrices, g) +
                                    reduce_bytes(s->ranks, vectors, 4)
                              : 0;
    t.gathered += others * ((divided ? w * (double)params : g * matrices) + 4 * vectors);
    return t;
}

// Returns the seconds of computation in a micro-step, with or without the transformer's blocks.
static double forecast_micro(const Speed *v, const Settings *s, int blocks) {
    const int L = blocks ? s->model.L : 0;
    const double N = (double)s->B * s->T, chunks = ceil(N / s->logit_rows);
    double token = v->token[EMBED] + v->token[LNF] + v->token[HEAD] + v->token[D_LNF] +
                   v->token[D_EMBED];
    for (int l = 0; l < L; l++) {
        for (int stage = 0; stage < BLOCK_STAGES; stage++) {
            const int again = stage < F_STAGES && plan_recomputes(s, stage, l);
            token += (1 + again) * v->token[stage];
        }
    }
    return N * token + L * v->block + chunks * v->chunk;
}

// Returns the seconds of a step of `micros` micro-steps on each rank. Transfers of streamed buffers
// overlap with computation, in both directions at once. The exchange of gradients between GPUs
// overlaps too; gradients that stay on the device are exchanged only in the last micro-step. The
// all-gather of new weights after the update (ZeRO) overlaps with the next forward, a third of a
// micro-step, except that of wte and wpe, with which forward begins. Transfers of gradients,
// moments, master bits and weights that the update works on in host memory do not overlap. The
// model assumes that the exchange can begin with the micro-step and that it shares the link to the
// host, as it does on PCIe.
static double forecast_step(const Speed *v, const Settings *s, int64_t micros) {
    double micro = forecast_micro(v, s, 1), last = micro, update = update_bytes(s) * v->byte;
    if (settings_offloads(s) || s->ranks > 1) {
        const Traffic one = step_traffic(s, 1), two = step_traffic(s, 2);
        const double up = two.up - one.up, down = two.down - one.down;  // per micro-step
        const double reduced = two.reduced - one.reduced, gathered = two.gathered - one.gathered;
        const double transfers =
            fmax(up, down) * v->link_byte + (reduced + gathered) * v->peer_byte;
        const double sums = (one.reduced - reduced) * v->peer_byte;
        const double results = (one.gathered - gathered) * v->peer_byte;
        const int divided = s->placement[KIND_MOMENTS] & PLACE_SHARD;  // then weights are gathered
        last = fmax(micro, transfers + sums + (divided ? 0 : results));
        micro = fmax(micro, transfers);
        update += fmax(fmax(one.up - up, one.down - down), 0) * v->link_byte;
        if (divided) {
            const double count = (double)bucket_at(&s->model, s->ranks, BUCKET_BLOCKS).offset -
                                 (double)bucket_at(&s->model, s->ranks, BUCKET_WTE).offset;
            const double begin = fmin(results, (1 - 1.0 / s->ranks) * count *
                                                   (double)type_bytes(s->dtype) * v->peer_byte);
            update += begin + fmax(0, results - begin - forecast_micro(v, s, 1) / 3);
        }
    }
    return (double)(micros - 1) * micro + last + update + v->step;
}

// Returns the predicted throughput: tokens per second of all ranks together.
static double forecast_tokens_per_s(const Speed *v, const Settings *s, int64_t micros) {
    return (double)micros * s->ranks * s->B * s->T / forecast_step(v, s, micros);
}

// -------------------------------------------------------------------------------------------------
// 9. Settings
// Turns options into settings, for the named card or the one present, and chooses recomputation
// levels and offload if they are left to the program.

// Library memory (CUDA context, cuBLASLt) that a plan leaves free if only the GPU's memory size is
// known (--gpu-mem).
static const uint64_t library_reserve_bytes = (uint64_t)1 << 30;

// Returns the library memory of a card (NULL: only its memory is known), estimated from its number
// of SMs and rounded up to 64 MiB.
static uint64_t card_library_bytes(const GpuEntry *card) {
    if (!card) {
        return library_reserve_bytes;
    }
    const CardLine *line = &card_lines[card->line];
    return (uint64_t)ceil((line->sm_mib * card->sms + line->library_mib) / 64) << 26;
}

// Estimate of NCCL's memory for the exchange between ranks: on eight H100s each pair of GPUs got
// 12 MiB of buffers per channel, and a channel has a thread block (CTA) (NVIDIA/nccl#1685). Peers
// on other machines share one pool (NVIDIA/nccl#1450), which is counted here as one additional
// peer, together with the ring of the all-gathers. A machine is assumed to have eight GPUs. Over
// NVSwitch the all-gathers may use NVLS, which needs buffers of its own.
enum { NCCL_PEERS = 7, NCCL_MIB = 12, NVLS_MIB = 64 };
static int nccl_peers(const Settings *s) { return min_int(s->ranks - 1, NCCL_PEERS); }
static uint64_t nccl_estimate_bytes(const Settings *s) {
    const uint64_t mib = (uint64_t)(nccl_peers(s) + 1) * (uint64_t)s->ctas * NCCL_MIB;
    return s->ranks > 1 ? (mib + (s->nvlink ? NVLS_MIB : 0)) << 20 : 0;
}

// How the GPUs of this machine are connected. LINK_UNKNOWN: there is no GPU, or a launcher shows
// each rank only one.
typedef enum { LINK_UNKNOWN, LINK_PCIE, LINK_NVLINK } Link;
static Link machine_link;

// Sets the link between GPUs (this machine's, or that of the card named by --gpu) and the number of
// thread blocks that NCCL may run. Its buffers, and the SMs that it takes from the matmuls that
// hide the exchange, grow with them: two suffice over PCIe, and sixteen use nearly half of NVLink.
// NCCL_MAX_CTAS takes precedence, as in NCCL (NCCL user guide, Environment Variables).
static void settings_nccl(Settings *s, const Options *o) {
    enum { CTAS_PCIE = 2, CTAS_NVLINK = 16, CTAS_MOST = 64 };
    const GpuEntry *card = gpu_find(o);
    const char *variable = getenv("NCCL_MAX_CTAS");
    s->nvlink = machine_link ? machine_link == LINK_NVLINK : card && card->nvlink > 0;
    s->ctas = s->nvlink ? CTAS_NVLINK : CTAS_PCIE;
    if (variable) {
        char *end;
        const long n = strtol(variable, &end, 10);
        if (*end || n < 1 || n > CTAS_MOST) {
            die("NCCL_MAX_CTAS is '%s'; allowed: a number from 1 to %d", variable, CTAS_MOST);
        }
        s->ctas = (int)n;
    }
}

// Returns the default number of rows of a classifier chunk, a multiple of 128, or N, the tokens of
// a batch, if that is less. The logits of a whole batch would be the largest buffer of most plans.
// The CPU gets 64 MiB, 256 rows of GPT-2's vocabulary: each chunk packs all of wte again, and 256
// rows are enough to amortize that. On a GPU, matmuls of few rows are slow, and each chunk rounds
// wte's bf16 gradient once more: at most eight times if the batch has at most 65,536 tokens.
static int64_t default_logit_rows(const Model *m, size_t element_bytes, int64_t N, int gpu) {
    if (gpu) {
        return min_i64(min_i64(max_i64((N + 1023) / 1024 * 128, 2560), 8192), N);
    }
    const int64_t rows = ((int64_t)64 << 20) / (m->Vp * (int64_t)element_bytes);
    return min_i64(max_i64(rows / 128 * 128, 128), N);
}

// Returns the size in bytes of the workspace for cuBLASLt's split-k partial sums. The gradients of
// weights need it: they have few output tiles, so the sum over tokens is split to fill the GPU. The
// size is sixteen parts of a block's largest matrix in fp32. The lower bound is the 32 MiB that
// cuBLAS's manual recommends on Hopper; the upper bound, 128 MiB, limits its share of a small
// model's plan.
static int64_t default_workspace(const Model *m) {
    const int64_t parts = (int64_t)16 * 4 * m->C * m->C * (int64_t)sizeof(float);
    return min_i64(max_i64(parts, 32 << 20), 128 << 20);
}

// The lowest ZeRO stage that shards each state; 0: never sharded.
static const int shard_stage[KINDS] = {3, 2, 1, 1, 0};

// Sets the number of ranks and the placement of each state from --gpus (by now the number of ranks
// that a launcher started), --zero and --offload. Ends the run if these are incompatible.
static void settings_placements(Settings *s, const Options *o) {
    if (o->zero && o->gpus == 1) {
        die("--zero (-z) %" PRId64 " shards states across GPUs: it needs --gpus N or mpirun",
            o->zero);
    }
    s->ranks = (int)o->gpus;
    s->rank = this_rank.rank;
    for (int state = 0; state < KINDS; state++) {
        const int stage = shard_stage[state], sharded = s->ranks > 1 && stage && o->zero >= stage;
        const int hosted = o->offload >> state & 1;  // `auto` has a separate bit
        s->placement[state] = (uint8_t)((hosted ? PLACE_HOST : 0) | (sharded ? PLACE_SHARD : 0));
    }
    if (s->ranks > 1 && s->placement[KIND_GRADIENTS] & PLACE_HOST) {
        die("--offload gradients works on one GPU only; on %d GPUs, --zero (-z) 2 shards the "
            "gradients, and the other states can be offloaded", s->ranks);
    }
}

static const char *bf16_missing(void);  // chapter Matmul and fast maths

// Returns the number type of a GPU run: the one requested, otherwise bf16, or fp16 if the planned
// card has no bf16. For the GPU present, run_choose_dtype() has already chosen.
static int64_t gpu_dtype(const Options *o) {
    const GpuEntry *card = gpu_find(o);
    const int usual = card && card_capability(card) < BF16_CAPABILITY ? DTYPE_FP16 : DTYPE_BF16;
    return o->dtype ? o->dtype : usual;
}

// Sets the number types of weights, gradients, moments and matmul operands, and the kind of master
// copy. Ends the run if the card, the program or another setting rules the combination out.
static void settings_types(Settings *s, const Options *o) {
    const GpuEntry *card = gpu_find(o);
    const int64_t dtype = s->gpu || o->dtype ? gpu_dtype(o) : (int64_t)DTYPE_FP32;
    const Type fp32 = s->gpu ? TYPE_FP32 : TYPE_REAL;
    if (dtype == DTYPE_BF16 && card && card_capability(card) < BF16_CAPABILITY) {
        die("--dtype bf16: %s has no bf16; it has fp16 and fp32", o->gpu);
    }
    s->dtype = dtype == DTYPE_BF16 ? TYPE_BF16 : dtype == DTYPE_FP16 ? TYPE_FP16 : fp32;
    s->grad_dtype = s->dtype == TYPE_BF16 && o->grad_dtype != GRADS_FP32 ? TYPE_BF16 : fp32;
    s->moment_dtype = o->moments == MOMENTS_BF16 ? TYPE_BF16 : fp32;
    s->split_master = s->dtype == TYPE_BF16 && o->master == MASTER_SPLIT;
    s->matmul_bf16 = o->matmul == MATMUL_BF16;
    const char *problem = s->gpu ? "on a GPU, --dtype sets the type" : bf16_missing();
    if (s->matmul_bf16 && problem) {
        die("--matmul bf16: %s", problem);
    }
    const int plain = s->dtype == TYPE_REAL && s->moment_dtype == TYPE_REAL;
    if (!s->gpu && !plain) {
        die("--dtype and --moments: this run computes in fp32 on the CPU; with --plan --gpu NAME "
            "they plan a GPU run");
    }
    if (s->dtype != TYPE_BF16 && (o->grad_dtype == GRADS_BF16 || s->moment_dtype == TYPE_BF16)) {
        die("--%s bf16 needs --dtype bf16, found %s",
            o->grad_dtype == GRADS_BF16 ? "grad-dtype" : "moments", choice_text(dtypes, dtype).s);
    }
    if (s->dtype == TYPE_FP16 && o->master == MASTER_NONE && !o->eval) {  // --eval has no master
        die("--master (-w) none: with --dtype fp16 the fp32 weights cannot be left out");
    }
    if (s->placement[KIND_MASTER] & PLACE_HOST && !settings_has_master(s)) {
        die("--offload master: there is no master copy with --dtype %s and --master (-w) %s",
            choice_text(dtypes, dtype).s, choice_text(masters, o->master).s);
    }
}

enum { USUAL_BATCH = 4 };  // sequences in a micro-batch by default

// Fills *s with the settings of a run from its options; the model, including its vocabulary, is
// already known. Ends the run at settings that this program does not support.
static void settings_from_options(Settings *s, const Options *o, const Model *m, int gpu) {
    memset(s, 0, sizeof *s);
    s->model = *m;
    s->gpu = gpu;
    s->B = (int)(o->batch ? o->batch : (int64_t)USUAL_BATCH);
    s->T = o->seq_len ? (int)o->seq_len : m->maxT;
    s->threads = thread_count();
    if (s->T > m->maxT) {
        die("--seq-len (-t): %d is more than the model's %d positions", s->T, m->maxT);
    }
    const int64_t N = (int64_t)s->B * s->T;
    if (N > 1 << 26) {  // B x T, and small multiples of it, must fit in an int
        die("--batch (-b) %d x --seq-len (-t) %d: a micro-batch holds at most 67,108,864 tokens",
            s->B, s->T);
    }
    settings_placements(s, o);
    settings_nccl(s, o);
    settings_types(s, o);
    recompute_parse(s, o->recompute);
    if (o->logit_rows > N) {
        die("--logit-rows: %" PRId64 " is more than the micro-batch's %" PRId64 " tokens",
            o->logit_rows, N);
    }
    s->logit_rows =
        (int)(o->logit_rows ? o->logit_rows : default_logit_rows(m, type_bytes(s->dtype), N, gpu));
    // The CPU's matmuls use a workspace too, but its size is fixed by their implementation.
    if (o->workspace && !gpu) {
        die("--workspace is for matmuls on a GPU; with --plan --gpu NAME this program plans it");
    }
    s->workspace = o->workspace ? o->workspace : default_workspace(m);
    s->tune = (int)o->tune;
    s->quiet = o->quiet || o->json;
}

// Turns a training run's settings into those of a forward-only run, whose plan keeps no activations
// for a backward pass.
static void settings_forward(Settings *s) {
    s->forward = 1;
    s->split_master = 0;
    for (int kind = 0; kind < KINDS; kind++) {
        s->placement[kind] = transfer_buffers[kind].act < 0 ? s->placement[kind] : 0;
    }
}

// Levels and placement. The program may choose anything that does not change results: the recompute
// level of each block, and which states are offloaded to the host.
// 1. Levels are chosen before placement: recomputation costs only time, and often less of it than
//    PCIe transfers.
// 2. The program chooses no more than necessary: if everything fits, nothing is recomputed or
//    offloaded.

// The states that `--offload auto` and the suggested changes move to the host, cheapest first; each
// tier includes the previous ones. Moments and master bits are transferred once per step, residuals
// once per micro-step in each direction, weights and gradients more often.
enum {
    HOST_MOMENTS = 1 << KIND_MOMENTS | 1 << KIND_MASTER,
    HOST_RESIDUALS = HOST_MOMENTS | 1 << KIND_RESIDUALS,
    HOST_GRADIENTS = HOST_RESIDUALS | 1 << KIND_GRADIENTS,
    HOST_ALL = HOST_GRADIENTS | 1 << KIND_WEIGHTS
};
static const int offload_tiers[] = {0, HOST_MOMENTS, HOST_RESIDUALS, HOST_GRADIENTS, HOST_ALL};
enum { OFFLOAD_TIERS = sizeof offload_tiers / sizeof offload_tiers[0] };

// Moves to host memory those of `states` (bits 1 << KIND_*) that this run has and can offload.
// Returns the bits of all states now in host memory.
static int64_t settings_offload(Settings *s, int states) {
    int64_t all = 0;
    for (int state = 0; state < KINDS; state++) {
        const int none = (state == KIND_MASTER && !settings_has_master(s)) ||
                         (state == KIND_GRADIENTS && s->ranks > 1);
        if (states >> state & 1 && !none) {
            s->placement[state] |= PLACE_HOST;
        }
        all |= (int64_t)(s->placement[state] & PLACE_HOST) / PLACE_HOST << state;
    }
    return all;
}

// Returns the bits of all states in host memory.
static int64_t settings_offload_bits(const Settings *s) {
    Settings copy = *s;
    return settings_offload(&copy, 0);
}

// Returns the states placed in host memory, in the syntax of --offload.
static const char *offload_text(char text[64], const Settings *s) {
    int n = 0;
    snprintf(text, 64, "none");
    for (int state = 0; state < KINDS; state++) {
        if (s->placement[state] & PLACE_HOST) {
            n = text_add(text, 64, n, "%s%s", n ? "," : "", choice_text(offloads, state + 2).s);
        }
    }
    return text;
}

// Finds the recomputation levels, from `none` to `block`, that are worth mixing (using for
// different blocks of one run): the lower convex hull of seconds over elements kept. Each next
// level frees memory at the lowest cost in time per element; a level that is not on the hull is no
// cheaper than a mix of its two neighbours on it. Returns the number of levels.
static int level_hull(int hull[RECOMPUTE_LEVELS], const Speed *v) {
    double seconds[RECOMPUTE_LEVELS] = {0}, kept[RECOMPUTE_LEVELS] = {0};
    int n = 1;
    for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
        for (int stage = 0; stage < F_STAGES; stage++) {
            seconds[level] += (level_table[level].stages >> stage & 1) * v->token[stage];
        }
        for (int i = 0; i < ACTS; i++) {
            const int again = level_table[level].stages >> act_table[i].made & 1;
            kept[level] += again ? 0 : max_i64(act_table[i].channels, 0);
        }
        check(level == 0 || kept[level] < kept[level - 1],
              "recompute level %s keeps no less than the one before it", level_table[level].name);
    }
    hull[0] = RECOMPUTE_NONE;
    for (; hull[n - 1] < RECOMPUTE_BLOCK; n++) {
        const int from = hull[n - 1];
        double least = INFINITY;
        for (int level = from + 1; level < RECOMPUTE_LEVELS; level++) {
            const double price = (seconds[level] - seconds[from]) / (kept[from] - kept[level]);
            hull[n] = price <= least ? level : hull[n];
            least = price <= least ? price : least;
        }
    }
    return n;
}

// Applies mix `k` of recomputation levels, 0 <= k <= (n - 1) L for a hull of n levels, in order of
// decreasing memory: the first k % L blocks use hull[k / L + 1], the others hull[k / L].
static void settings_mix(Settings *s, const int *hull, int k) {
    const int L = s->model.L;
    for (int l = 0; l < L; l++) {
        s->level[l] = (uint8_t)hull[k / L + (l < k % L)];
    }
}

// Sets the levels to the cheapest mix of levels whose plan takes at most `bytes`. Then it turns
// recomputation off for the last blocks, as long as the plan still fits: backward uses their
// activations before most of its working set exists. Returns the plan's bytes; if they exceed
// `bytes`, no mix fits and the levels are those of the smallest plan.
static uint64_t settings_fit_levels(Settings *s, const Speed *v, uint64_t bytes) {
    int hull[RECOMPUTE_LEVELS], low = -1, high = (level_hull(hull, v) - 1) * s->model.L;
    const int last = high;
    while (high - low > 1) {  // bisection by live bytes; the layout hardly exceeds them
        const int middle = (low + high) / 2;
        settings_mix(s, hull, middle);
        *(plan_live(s) <= bytes ? &high : &low) = middle;
    }
    settings_mix(s, hull, high);
    uint64_t best = plan_bytes(s);
    while (best > bytes && high < last) {
        settings_mix(s, hull, ++high);
        best = plan_bytes(s);
    }
    for (int l = s->model.L - 1; l >= 0 && best <= bytes && high > 0; l--) {
        const uint8_t level = s->level[l];
        s->level[l] = RECOMPUTE_NONE;
        const uint64_t found = level == RECOMPUTE_NONE       ? best
                             : plan_live(s) > bytes ? UINT64_MAX
                                                    : plan_bytes(s);
        if (found > bytes) {
            s->level[l] = level;
            break;
        }
        best = found;
    }
    return best;
}

// Resources available to a run: bytes of device memory (0: unknown), of host memory, and of device
// memory that libraries take; the device's name in messages; and how its speed is known (NULL: it
// is not).
typedef struct {
    uint64_t device, host, library;
    int64_t windows;  // sequences in the data, 0: unknown
    const char *where, *from;
    const GpuEntry *card;  // that --gpu names, or NULL
    char library_from[32];  // how the library memory is known
    Speed speed;
} MemoryBudget;

// Computes the bytes of each group of buffers at the tick of peak usage, for device and host
// separately. The device's groups sum to the peak; the rest of its allocation is first-fit
// fragmentation.
static void plan_groups(const Plan *p, uint64_t device[GROUPS], uint64_t host[GROUPS]) {
    memset(device, 0, GROUPS * sizeof(uint64_t));
    memset(host, 0, GROUPS * sizeof(uint64_t));
    for (int i = 0; i < p->buffer_count; i++) {
        const Buffer *b = &p->buffers[i];
        if (b->first <= p->peak && p->peak <= b->last) {
            (b->placement == PLACE_HOST ? host : device)[b->group] += buffer_padded_bytes(b);
        }
    }
}

// Returns the number of micro-steps per step: -d's tokens divided by those of one micro-step on all
// ranks, 0 if the division leaves a remainder, and 1 without -d.
static int64_t step_micros(const Options *o, const Settings *s) {
    const int64_t tokens = (int64_t)s->ranks * s->B * s->T;
    return !o->tokens_per_step ? 1 : o->tokens_per_step % tokens ? 0 : o->tokens_per_step / tokens;
}

// Returns step_micros() for a run; ends the run if -d's tokens are not a whole number of
// micro-steps.
static int64_t step_whole_micros(const Options *o, const Settings *s) {
    const int64_t micros = step_micros(o, s);
    char gpus[32] = "", times[32] = "";
    if (s->ranks > 1) {
        snprintf(gpus, sizeof gpus, " x GPUs");
        snprintf(times, sizeof times, " x %d", s->ranks);
    }
    if (micros == 0) {
        die("--tokens-per-step (-d): %" PRId64 " is not a multiple of B x T%s = %d x %d%s = %"
            PRId64, o->tokens_per_step, gpus, s->B, s->T, times,
            (int64_t)s->ranks * s->B * s->T);
    }
    return micros;
}

// The levels in the syntax of -r: runs of blocks, such as "block:20,qkv:8", without the last blocks
// if these recompute nothing. One block takes at most the eight characters of "block:1,".
typedef struct {
    char s[8 * MAX_LAYERS + 1];
} LevelsText;
static LevelsText recompute_text(const Settings *s) {
    LevelsText text = {"none"};
    const int size = sizeof text.s;
    int n = 0, blocks = s->model.L;
    while (blocks > 0 && s->level[blocks - 1] == RECOMPUTE_NONE) {
        blocks--;
    }
    for (int l = 0, run = 1; l < blocks; l += run) {
        for (run = 1; l + run < blocks && s->level[l + run] == s->level[l];) {
            run++;
        }
        n = text_add(text.s, size, n, "%s%s", n ? "," : "", level_table[s->level[l]].name);
        if (l + run < s->model.L) {
            n = text_add(text.s, size, n, ":%d", run);
        }
        check(n < size - 1, "%d blocks", blocks);
    }
    return text;
}

// Sets the micro-batch to B sequences. If the rows per classifier chunk (--logit-rows) were the
// default, they become the default for B; otherwise they are only limited to B x T.
static void settings_batch(Settings *s, int B) {
    const size_t element = type_bytes(s->dtype);
    const int64_t N = (int64_t)s->B * s->T, changed = (int64_t)B * s->T;
    const int usual = s->logit_rows == default_logit_rows(&s->model, element, N, s->gpu);
    s->B = B;
    s->logit_rows = (int)(usual ? default_logit_rows(&s->model, element, changed, s->gpu)
                                : min_i64(s->logit_rows, changed));
}

// Writes to `text` the options, as a user would type them, that turn settings `from` into `to`.
// Covers everything that a search may change.
static void changes_text(char text[256], const Settings *from, const Settings *to) {
    char offload[64];
    const Model *m = &to->model;
    int n = 0;
    text[0] = 0;
    if (memcmp(from->level, to->level, sizeof to->level) != 0) {
        n = text_add(text, 256, n, " -r %s", recompute_text(to).s);
    }
    if (from->moment_dtype != to->moment_dtype) {
        n = text_add(text, 256, n, " --moments bf16");
    }
    if (from->split_master != to->split_master) {
        n = text_add(text, 256, n, " -w none");
    }
    if (settings_offload_bits(from) != settings_offload_bits(to)) {
        n = text_add(text, 256, n, " --offload %s", offload_text(offload, to));
    }
    if (from->B != to->B) {
        n = text_add(text, 256, n, " -b %d", to->B);
    }
    const int64_t rows = default_logit_rows(m, type_bytes(to->dtype), (int64_t)to->B * to->T,
                                            to->gpu);
    if (to->logit_rows != rows && (from->logit_rows != to->logit_rows)) {
        n = text_add(text, 256, n, " --logit-rows %d", to->logit_rows);
    }
    if (from->workspace != to->workspace) {
        text_add(text, 256, n, " --workspace %" PRId64, to->workspace);
    }
    memmove(text, text + (text[0] == ' '), strlen(text) + 1 - (text[0] == ' '));
}

// Candidates. Every choice of settings varies them along the same axes: `-r auto` and `--offload
// auto`, suggested changes, --fit, --minimum, --largest, and the batch that unused memory would
// buy. Step 0 of an axis keeps what the base settings have; each step frees more memory than the
// one before it, except along BY_BATCH, whose steps are batches of the search's choice.
// 1. BY_LEVEL: a recomputation level in all blocks. BY_TYPE: bf16 moments, then also no low halves
//    of master weights, which alone free less than the moments do. BY_OFFLOAD: an offload tier.
//    BY_SCRATCH: few rows of logits and no workspace. BY_BATCH: another micro-batch.
// 2. A step that changes nothing, or no more than the step before it, is not a candidate.
enum { BY_LEVEL, BY_TYPE, BY_OFFLOAD, BY_SCRATCH, BY_BATCH, AXES };
enum { MAX_BATCHES = 40, SCRATCH_ROWS = 128, SCRATCH_WORKSPACE = 256 };

typedef struct {
    Settings base;
    int mix;                 // 1: step 0 of BY_LEVEL is the cheapest mix of levels that fits
    int last[AXES];          // the highest step of each axis
    int batch[MAX_BATCHES];  // micro-batch of each step of BY_BATCH; the first is the base's
    int64_t sequences;       // of each rank in a step: a multiple of the batch; 0: one micro-batch
    uint64_t device, host;   // bytes that the plan may take
    Speed speed;
    const struct PlanCandidate *better;  // candidates found so far, which may dominate; or NULL
    int better_count;
} Search;

typedef struct PlanCandidate {
    int steps[AXES];
    Settings settings;
    uint64_t bytes, host_bytes;  // of the plan; if it does not fit, at least these
    double tokens_per_s;
} PlanCandidate;
typedef enum { CHANGES_NOTHING, DIVIDES_NOT, BEATEN, TOO_LARGE, FITS } Verdict;

// Returns the micro-batch that a search tries after B: 1, 2, 3, 4, 6, 8, 12, 16, ...
static int next_batch(int B) { return B < 2 ? B + 1 : B & (B - 1) ? B / 3 * 4 : B / 2 * 3; }

// Begins a search with the memory and speed of `budget`, in which every axis has only step 0.
static void search_begin(Search *q, const Settings *base, const MemoryBudget *budget) {
    memset(q, 0, sizeof *q);
    q->base = *base;
    q->batch[0] = base->B;
    q->device = budget->device;
    q->host = budget->host;
    q->speed = budget->speed;
}

// Applies one step of an axis. Step 0 changes nothing.
static void axis_apply(Settings *s, const Search *q, int axis, int step) {
    if (axis == BY_LEVEL && step) {
        settings_recompute(s, step, s->model.L);
    } else if (axis == BY_TYPE && step) {
        s->moment_dtype = TYPE_BF16;
        s->split_master = step == 2 ? 0 : s->split_master;
        s->placement[KIND_MASTER] = s->split_master ? s->placement[KIND_MASTER] : 0;
    } else if (axis == BY_OFFLOAD) {
        settings_offload(s, offload_tiers[step]);
    } else if (axis == BY_SCRATCH && step) {
        s->logit_rows = min_int(s->logit_rows, SCRATCH_ROWS);
        s->workspace = s->gpu ? min_i64(s->workspace, SCRATCH_WORKSPACE) : s->workspace;
    } else if (axis == BY_BATCH) {
        settings_batch(s, q->batch[step]);
    }
}

// Sets the candidate's settings from its steps. Returns 0 if one of them changes nothing.
static int candidate_apply(PlanCandidate *c, const Search *q) {
    static const int order[AXES] = {BY_BATCH, BY_TYPE, BY_OFFLOAD, BY_SCRATCH, BY_LEVEL};
    Settings *s = &c->settings;
    int changes = 1;
    *s = q->base;
    for (int i = 0; i < AXES; i++) {
        const Settings before = *s;
        Settings lower = *s;
        axis_apply(s, q, order[i], c->steps[order[i]]);
        if (c->steps[order[i]]) {
            axis_apply(&lower, q, order[i], c->steps[order[i]] - 1);
            changes &= memcmp((const void *)&before, (const void *)s, sizeof before) != 0 &&
                       memcmp((const void *)&lower, (const void *)s, sizeof lower) != 0;
        }
    }
    return changes;
}

// Returns 1 if candidate `a` is simpler than `b`, which is about as fast: it has fewer states in
// host memory; if equal, fewer narrow number types; if equal, a smaller batch.
static int candidate_is_simpler(const PlanCandidate *a, const PlanCandidate *b) {
    const int *x = a->steps, *y = b->steps;
    return x[BY_OFFLOAD] != y[BY_OFFLOAD]   ? x[BY_OFFLOAD] < y[BY_OFFLOAD]
           : x[BY_TYPE] != y[BY_TYPE] ? x[BY_TYPE] < y[BY_TYPE]
                                      : a->settings.B < b->settings.B;
}

// Plans and forecasts a candidate, whose settings are set. Skips the layout, which takes most of
// the time, if the live bytes exceed the memory, or if an earlier candidate is at least as good and
// this one is not simpler.
static Verdict candidate_plan(PlanCandidate *c, const Search *q) {
    Plan p;
    Settings *s = &c->settings;
    if (q->sequences && q->sequences % s->B) {
        return DIVIDES_NOT;
    }
    if (q->mix && !c->steps[BY_LEVEL]) {
        settings_fit_levels(s, &q->speed, q->device);
    }
    plan_list(&p, s);
    p.device_bytes = p.live_bytes;
    c->bytes = plan_taken(&p);
    c->host_bytes = p.host_bytes;
    c->tokens_per_s =
        forecast_tokens_per_s(&q->speed, s, q->sequences ? q->sequences / s->B : 1);
    Verdict verdict = c->bytes > q->device || c->host_bytes > q->host ? TOO_LARGE : FITS;
    for (int i = 0; i < q->better_count && verdict == FITS; i++) {
        const PlanCandidate *g = &q->better[i];
        const int beats = g->bytes <= c->bytes && g->host_bytes <= c->host_bytes &&
                          g->tokens_per_s >= c->tokens_per_s && !candidate_is_simpler(c, g);
        verdict = beats ? BEATEN : FITS;
    }
    if (verdict == FITS) {
        plan_layout(&p);
        c->bytes = plan_taken(&p);
        verdict = c->bytes > q->device ? TOO_LARGE : FITS;
    }
    plan_free(&p);
    return verdict;
}

static Verdict candidate_try(PlanCandidate *c, const Search *q) {
    return candidate_apply(c, q) ? candidate_plan(c, q) : CHANGES_NOTHING;
}

// Advances `steps` to the next combination, in which BY_BATCH changes fastest; with `skip`, the
// rest of its steps are left out. Returns 0 after the last combination.
static int search_next(const Search *q, int steps[AXES], int skip) {
    int axis = AXES - 1;
    steps[BY_BATCH] = skip ? q->last[BY_BATCH] : steps[BY_BATCH];
    while (axis >= 0 && steps[axis] == q->last[axis]) {
        steps[axis--] = 0;
    }
    steps[max_i64(axis, 0)] += axis >= 0;
    return axis >= 0;
}

// Returns the largest micro-batch that divides `sequences`, the sequences of a rank in a step, has
// at most `tokens` tokens and fits in `bytes` of device memory with the levels and placements of
// `s`; 0 if there is none.
static int settings_largest_batch(const Settings *s, int64_t sequences, int64_t tokens,
                                  uint64_t bytes) {
    int64_t B = min_i64(sequences, tokens / s->T);
    for (; B > 0; B--) {
        Settings t = *s;
        settings_batch(&t, (int)(sequences % B ? s->B : B));
        if (sequences % B == 0 && plan_live(&t) <= bytes && plan_bytes(&t) <= bytes) {
            break;
        }
    }
    return (int)B;
}

// Resolves `-r auto` and `--offload auto`, neither of which changes results: the cheapest levels
// that fit, and offload only if no levels fit, of as few states as necessary. If nothing fits, the
// settings are those that exceed the memory least. If the available memory is unknown, nothing is
// recomputed or offloaded.
static void settings_auto(Settings *s, const Options *o, const MemoryBudget *budget) {
    const int trains = !s->forward;  // a forward-only run has nothing to recompute or offload
    Search q;
    uint64_t least = UINT64_MAX;
    search_begin(&q, s, budget);
    q.speed = speed_usual(s);  // the same choice whether or not this machine's speed is known
    q.mix = trains && strcmp(o->recompute, "auto") == 0;
    q.last[BY_OFFLOAD] = trains && s->gpu && o->offload == OFFLOAD_AUTO ? OFFLOAD_TIERS - 1 : 0;
    PlanCandidate c;
    memset(&c, 0, sizeof c);
    while (budget->device > 0 && least > budget->device) {
        if (candidate_try(&c, &q) != CHANGES_NOTHING && c.bytes < least &&
            (c.host_bytes <= budget->host || !c.steps[BY_OFFLOAD])) {
            *s = c.settings;
            least = c.bytes;
        }
        if (!search_next(&q, c.steps, 0)) {
            break;
        }
    }
}

static uint64_t size_less(uint64_t bytes, uint64_t taken) {
    return bytes > taken ? bytes - taken : 0;
}

// Returns the smaller of --gpu's memory and --gpu-mem, in bytes; 0 if neither is given.
static uint64_t gpu_memory_from_options(const Options *o) {
    const GpuEntry *row = gpu_find(o);
    uint64_t card = row ? (uint64_t)(row->gib * 0x1p30) : 0, cap = (uint64_t)o->gpu_mem;
    return card && cap ? (card < cap ? card : cap) : card + cap;
}

// Returns whether the micro-batch is chosen for the user: with -b auto, or with -d and no -b.
static int options_auto_batch(const Options *o) {
    return !o->batch || (o->tokens_per_step && !option_given(o, "batch"));
}

// Resolves -b auto for GPUs with `total` bytes, 0: unknown, and sets the option to the choice: the
// largest micro-batch that divides the step and whose plan fits without recomputation, with at most
// 65,536 tokens and `most` sequences. The choice affects rounding, so it depends on the card's
// memory, not on what is free at the moment: the same card always gives the same bits. It stays
// USUAL_BATCH on the CPU, without -d, or if nothing fits.
static void settings_auto_batch(Settings *s, Options *o, uint64_t total, int64_t most) {
    const int64_t tokens = (int64_t)s->ranks * s->T, sequences = o->tokens_per_step / tokens;
    if (!options_auto_batch(o)) {
        return;
    }
    if (s->gpu && total && sequences > 0 && o->tokens_per_step % tokens == 0) {
        const uint64_t cap = o->gpu_mem && (uint64_t)o->gpu_mem < total ? (uint64_t)o->gpu_mem
                                                                         : total;
        const uint64_t reserved = library_reserve_bytes + nccl_estimate_bytes(s);
        const int B = settings_largest_batch(s, sequences, min_i64(65536, most * s->T),
                                             size_less(cap, reserved));
        settings_batch(s, B ? B : s->B);
    }
    o->batch = s->B;
}

// Returns the memory budget of a card that is only named; its host's memory is unknown. The rates
// are those of 16-bit matmuls.
static MemoryBudget budget_named(const Options *o, const Settings *s) {
    const GpuEntry *card = gpu_find(o);
    const uint64_t bytes = gpu_memory_from_options(o);
    MemoryBudget budget;
    memset(&budget, 0, sizeof budget);
    budget.card = card;
    budget.library = card_library_bytes(card);
    if (card) {
        snprintf(budget.library_from, sizeof budget.library_from, "estimated: sm_%d, %.0f SMs",
                 card_capability(card), card->sms);
    } else {
        snprintf(budget.library_from, sizeof budget.library_from, "assumed");
    }
    const uint64_t reserved = budget.library + nccl_estimate_bytes(s);
    budget.device = bytes > reserved ? bytes - reserved : bytes > 0;  // 0 would mean unknown
    budget.host = UINT64_MAX;
    budget.where = o->gpu[0] ? o->gpu : "--gpu-mem";
    Rates rates = card ? card_rates(card) : rates_usual(1);
    const int unproved = rates_prove(&rates, card, s, untried);
    budget.speed = speed_predict(&rates, s);
    // Beyond one machine of eight GPUs the exchange is slower than these rates predict.
    budget.from = !card || s->dtype == TYPE_FP32 || card_is_too_old(card) ? NULL
                : s->ranks > NCCL_PEERS + 1     ? "predicted for these cards in one machine"
                : unproved                      ? to_prove
                                                : "predicted for this card, not measured";
    return budget;
}

// =================================================================================================
// Part C. GPT-2 on the CPU

// -------------------------------------------------------------------------------------------------
// 10. Matmul and fast maths
// One packed matmul serves the three matmuls of a linear layer; its inner functions serve
// attention.
// 1. Every element of a result is one chain of fused multiply-adds along k, split into blocks of at
//    most KC at positions that depend on K alone; threads never share a sum. So neither the number
//    of threads, nor the other rows of the batch, nor the alignment of the data affects results.
// 2. Loops are split into tasks (taskloop). The thread that runs the stages executes tasks itself
//    and never waits for an idle thread, so a thread that another program keeps off its core delays
//    a loop by at most one task. Outside a team (chapter The network) a loop runs on one thread.
//    Loops that do not depend on each other's results are marked nogroup, so that there is no wait
//    between them.
// 3. Nothing is allocated here. matmul_workspace points at matmul_workspace_bytes(thread_count())
//    bytes, aligned to 64: a buffer of the memory plan whose size depends on no tensor shape.
// 4. fast_exp and the two halves of tanh have no branches, so that loops around them are
//    vectorized, and no fused operations, so that results are the same on every machine.
// 5. If a bias and an addend are given, the result is (bias + addend) + a b, in this order.
// 6. With matmul_bf16, operands are rounded to bf16 as they are packed, two per fp32 element, and a
//    dot product of pairs replaces the multiply-add: two steps of k at a time, with fp32 sums.
//    Nothing outside packed memory is bf16.
// Layout: Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008).

// A tile of MR x NR sums and its operands fit in the vector registers. On AVX-512 (Zen 4), 8 x 32
// runs at 97 % of the multiply-add units' peak, as does 14 x 32, and 8 divides a batch of 64 rows.
#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64, MR = 8 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32, MR = 6 };
#elif defined(__aarch64__)
enum { VECTOR_BYTES = 16, MR = 8 };
#else
enum { VECTOR_BYTES = 16, MR = 6 };
#endif

// A panel of b, KC x NR floats, is 48 KiB on AVX-512 and 24 KiB on AVX2. The panels of a task,
// KC x BLOCK, are 192 KiB: they stay in an L2 cache of 256 KiB or more while all rows of a are read
// once. A larger KC would not fit in L2; a smaller one would read and write `out` more often. BLOCK
// is also the side of attention's tiles: s and dp are 64 KiB each, and a head of T tokens still has
// enough tiles to parallelize over.
enum {
    VL = VECTOR_BYTES / (int)sizeof(real),    // elements per vector
    NR = 2 * VL,                              // columns of a tile
    KC = 384,                                 // depth of a packed block, at most
    BLOCK = 128,                              // columns of a task; rows of an attention tile
    BLOCK_ROWS = (BLOCK + MR - 1) / MR * MR,  // BLOCK rounded up to whole panels of rows
    SHARED_REALS = 1 << 20,                   // packed a, read by all threads
    PACKED_A_REALS = BLOCK_ROWS * KC,         // the rest is per thread: packed a and b,
    PACKED_B_REALS = BLOCK * KC,
    TILE_REALS = BLOCK * BLOCK,  // and attention's two square tiles
    THREAD_REALS = PACKED_A_REALS + PACKED_B_REALS + 2 * TILE_REALS
};

typedef real Vector __attribute__((vector_size(VECTOR_BYTES)));
#if GPT2_DOUBLE
typedef int64_t Lanes __attribute__((vector_size(VECTOR_BYTES)));  // indices of a shuffle
#else
typedef int32_t Lanes __attribute__((vector_size(VECTOR_BYTES)));
#endif

// Multiply-adds are fused in functions marked FUSED and nowhere else. GCC uses the attribute (and
// then inlines nothing that lacks it), clang the pragma at the start of the body.
#if defined(__clang__)
// clang's expansion of a taskloop compares an int with an unsigned long. GCC still checks signs.
#pragma clang diagnostic ignored "-Wsign-compare"
#define FUSED
#define FUSED_BODY _Pragma("clang fp contract(fast)")
#else
#define FUSED __attribute__((noinline, optimize("fp-contract=fast")))
#define FUSED_BODY
#endif

static real *matmul_workspace;

// Dot products of bf16 pairs: AVX512-BF16, "Intel 64 and IA-32 Architectures Software Developer's
// Manual", volume 2. Inline assembly, because the intrinsics and their types differ between
// compilers and nvcc's front end has none.
//   bf16_round       VL elements of `low`, then VL of `high`, rounded to nearest even
//   bf16_interleave  reorders these into the pairs (i, VL + i)
//   bf16_dot         sum += the dot product of each lane's pair of a with that of b; the
//                    multiplications are exact, denormals count as 0
#if defined(__AVX512F__) && defined(__AVX512BW__) && !GPT2_DOUBLE
#define BF16_DOTS 1
static int matmul_bf16;
typedef int32_t Pairs __attribute__((vector_size(VECTOR_BYTES)));
#define bf16_round(out, low, high) \
    __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(out) : "v"(low), "v"(high))
#define bf16_interleave(out, order) __asm__("vpermw %0, %1, %0" : "+v"(out) : "v"(order))
#define bf16_dot(sum, a, b) __asm__("vdpbf16ps %1, %2, %0" : "+v"(sum) : "v"(a), "v"(b))
#else
#define BF16_DOTS 0
enum { matmul_bf16 = 0 };
#endif

// Returns NULL if matmul_bf16 can be set, otherwise the reason why this processor or this build
// does not support it.
static const char *bf16_missing(void) {
#if BF16_DOTS
    return __builtin_cpu_supports("avx512bf16") ? NULL
                                                : "this processor does not support AVX512-BF16";
#else
    return "this program was built for processors without AVX512-BF16";
#endif
}

// Returns the number of tasks that a loop is split into: several per thread, so that threads finish
// together even on a busy machine, but not many, since each task costs about 0.5 us. GCC's OpenMP
// accepts up to 64 tasks per thread and runs a loop of more on one thread. Unused in builds without
// OpenMP.
__attribute__((unused)) static int pieces(void) { return 4 * thread_count(); }

// Waits for the tasks of loops marked nogroup.
static void tasks_wait(void) {
    #pragma omp taskwait
}

static size_t matmul_workspace_bytes(int threads) {
    return (SHARED_REALS + (size_t)threads * THREAD_REALS) * sizeof(real);
}

// Returns the calling thread's part of the workspace: packed a, packed b and two square tiles.
static real *thread_workspace(void) {
    return matmul_workspace + SHARED_REALS + (size_t)thread_index() * THREAD_REALS;
}

// An operand of a matmul, viewed as rows along k, the dimension that is summed: a as a(M,K), b as
// its transpose (N,K). Element (row, k) is data[row * row_step + k * k_step]. One of the two steps,
// in elements, is 1; which of them depends on whether the operand is stored transposed.
typedef struct {
    const real *data;
    size_t row_step, k_step;
} Operand;

// Prefetches the cache line of base[index]. The element need not exist: C defines no pointers
// beyond an array, so the address is computed as an integer. prefetch_far takes an address and
// prefetches into the L2 cache only.
#define element_address(base, index)                                                               \
    ((const void *)((uintptr_t)(base) + (uintptr_t)(index) * sizeof *(base)))
#define prefetch(base, index) __builtin_prefetch(element_address(base, index))
#define prefetch_write(base, index) __builtin_prefetch(element_address(base, index), 1)
#define prefetch_far(address) __builtin_prefetch((const void *)(address), 0, 2)

static Operand operand(const real *data, size_t row_step, size_t k_step) {
    Operand o = {data, row_step, k_step};
    return o;
}

// Returns the operand that starts at element (row, k), which must exist.
static Operand operand_at(Operand o, int row, int k) {
    o.data += (size_t)row * o.row_step + (size_t)k * o.k_step;
    return o;
}

#if defined(__clang__)
// Transposes from(VL,VL), with to(VL,VL) as scratch; returns whichever of the two holds the result.
// Interleaving the first half of the flat array with the second rotates the bits of an element's
// index by one, and log2(VL) rotations swap row and column. clang turns the loop into register
// shuffles.
static real *transpose_square(real *from, real *to) {
    for (int step = 1; step < VL; step *= 2) {
        for (int i = 0; i < VL * VL / 2; i++) {
            to[2 * i] = from[i];
            to[2 * i + 1] = from[i + VL * VL / 2];
        }
        real *swap = from;
        from = to;
        to = swap;
    }
    return from;
}

// to(VL,VL) = transpose of from(VL,VL); rows are to_step and from_step elements apart.
static void transpose(real *to, size_t to_step, const real *from, size_t from_step) {
    real x[VL * VL] __attribute__((aligned(VECTOR_BYTES)));
    real y[VL * VL] __attribute__((aligned(VECTOR_BYTES)));
    for (int i = 0; i < VL; i++) {
        memcpy(x + i * VL, from + (size_t)i * from_step, VL * sizeof(real));
    }
    const real *t = transpose_square(x, y);
    for (int i = 0; i < VL; i++) {
        memcpy(to + (size_t)i * to_step, t + i * VL, VL * sizeof(real));
    }
}
#else
// The same with explicit shuffles for GCC, which would keep the arrays of the loop above in memory,
// at half the speed. nvcc's front end does not support the pragma; without it the CPU reference in
// the GPU program only packs a little slower.
#if defined(__CUDACC__)
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
static inline void transpose(real *to, size_t to_step, const real *from, size_t from_step) {
    Vector v[VL], next[VL];
    Lanes low = {0}, high = {0};
    for (int j = 0; j < VL; j++) {
        low[j] = j / 2 + j % 2 * VL;
        high[j] = low[j] + VL / 2;
    }
    UNROLL
    for (int i = 0; i < VL; i++) {  // one by one: a copy of all rows would go through memory
        memcpy(&v[i], from + (size_t)i * from_step, sizeof v[i]);
    }
    UNROLL
    for (int step = 1; step < VL; step *= 2) {
        UNROLL
        for (int i = 0; i < VL; i += 2) {
            next[i] = __builtin_shuffle(v[i / 2], v[i / 2 + VL / 2], low);
            next[i + 1] = __builtin_shuffle(v[i / 2], v[i / 2 + VL / 2], high);
        }
        UNROLL
        for (int i = 0; i < VL; i++) {
            v[i] = next[i];
        }
    }
    UNROLL
    for (int i = 0; i < VL; i++) {
        memcpy(to + (size_t)i * to_step, &v[i], sizeof v[i]);
    }
}
#undef UNROLL
#endif

// Returns the number of reals that K steps of k take in a packed row: bf16 packs two steps in one.
static int packed_depth(int K) { return matmul_bf16 ? (K + 1) / 2 : K; }

// x(VL) = the first `left` elements of a row with contiguous k, in packed form, padded with zeros.
static inline void pack_load(real *x, const real *row, int left) {
    const int full = matmul_bf16 ? 2 * VL : (int)VL;
    real edge[2 * VL] = {0};
    if (left < full) {
        for (int j = 0; j < left; j++) {
            edge[j] = row[j];
        }
        row = edge;
    }
#if BF16_DOTS
    if (matmul_bf16) {
        Vector low, high;
        memcpy(&low, row, sizeof low);
        memcpy(&high, row + VL, sizeof high);
        bf16_round(low, low, high);
        memcpy(x, &low, sizeof low);
        return;
    }
#endif
    memcpy(x, row, VL * sizeof(real));
}

// x(VL,VL) = the square at `row`: `rows` rows, `row_step` elements apart, each with `left`
// remaining elements of contiguous k. Missing elements are zeros.
static inline void load_square(real *x, const real *row, size_t row_step, int rows, int left) {
    for (int i = 0; i < VL; i++) {
        pack_load(x + i * VL, i < rows ? row + (size_t)i * row_step : row, i < rows ? left : 0);
    }
}

// Implements pack(), below, for operands whose rows are contiguous in k. Transposes squares of VL
// rows by VL packed steps of k; a square that extends past the operand is padded with zeros.
static inline void pack_transposed(real *packed, int width, Operand src, int rows, int K) {
    // A transposed row is stored in segments that never straddle two panels.
    const int segment = width % VL == 0 ? VL : VL % width == 0 ? width : 2;
    const int padded = ceil_div(rows, width) * width, steps = matmul_bf16 ? 2 : 1;
    const int depth = packed_depth(K);
    for (int r = 0; r < padded; r += VL) {
        for (int k = 0; k < depth; k += VL) {
            real x[VL * VL] __attribute__((aligned(VECTOR_BYTES)));
            real y[VL * VL] __attribute__((aligned(VECTOR_BYTES)));
            const int exists = r < rows && steps * k < K;
            const real *from = exists ? operand_at(src, r, steps * k).data : NULL;
            size_t step = src.row_step;
            if (matmul_bf16 || r + VL > rows || k + VL > K) {
                load_square(x, from, src.row_step, exists ? rows - r : 0, K - steps * k);
                from = x;
                step = VL;
            }
            if (segment == VL && k + VL <= depth) {
                const size_t lane = (size_t)(r % width);
                transpose(packed + (r - lane) * (size_t)depth + (size_t)k * width + lane,
                          (size_t)width, from, step);
                continue;
            }
            transpose(y, VL, from, step);
            for (int i = 0; i < VL && r + i < padded; i += segment) {
                int lane = (r + i) % width;
                real *p =
                    packed + (size_t)(r + i - lane) * (size_t)depth + (size_t)k * width + lane;
                for (int j = 0; j < min_int(VL, depth - k); j++) {
                    memcpy(p + j * width, y + j * VL + i, (size_t)segment * sizeof(real));
                }
            }
        }
    }
}

#if BF16_DOTS
// Implements pack(), below, in bf16, for operands whose rows are adjacent at each k (row_step is
// 1). Packs VL rows and two steps of k at once.
static inline void pack_pairs(real *packed, int width, Operand src, int rows, int K) {
    const int segment = width % VL == 0 ? VL : VL % width == 0 ? width : 2;
    const int padded = ceil_div(rows, width) * width, depth = packed_depth(K);
    uint16_t order[2 * VL];
    for (int i = 0; i < 2 * VL; i++) {
        order[i] = (uint16_t)(i % 2 * VL + i / 2);
    }
    Vector interleaved, low, high;
    memcpy(&interleaved, order, sizeof interleaved);
    for (int k = 0; k < depth; k++) {
        const real *s = src.data + (size_t)(2 * k) * src.k_step;
        const int last = 2 * k + 1 == K;  // the last pair of an odd K is half empty
        for (int r = 0; r < padded; r += VL) {
            real edge[2][VL] = {{0}};
            const int left = rows - r;
            // Successive k are pages apart, which hardware prefetchers do not follow.
            prefetch(s, 8 * src.k_step + (size_t)r);
            prefetch(s, 9 * src.k_step + (size_t)r);
            for (int j = 0; j < left && left < VL; j++) {
                edge[0][j] = s[r + j];
                edge[1][j] = last ? 0 : s[src.k_step + (size_t)(r + j)];
            }
            memcpy(&low, left < VL ? edge[0] : s + r, sizeof low);
            memcpy(&high, left < VL || last ? edge[1] : s + src.k_step + r, sizeof high);
            bf16_round(low, low, high);
            bf16_interleave(low, interleaved);
            for (int i = 0; i < VL && r + i < padded; i += segment) {
                int lane = (r + i) % width;
                real *p = packed + (size_t)(r + i - lane) * (size_t)depth + (size_t)k * width;
                memcpy(p + lane, (const real *)&low + i, (size_t)segment * sizeof(real));
            }
        }
    }
}
#endif

// packed = src in panels of `width` rows: panel p is a (K,width) array at packed + p * width * K,
// so that a tile reads both operands sequentially. The last panel is padded with zeros. In bf16 a
// panel is a (packed_depth(K),width) array of pairs.
static inline void pack(real *packed, int width, Operand src, int rows, int K) {
    if (src.k_step == 1) {
        pack_transposed(packed, width, src, rows, K);
        return;
    }
#if BF16_DOTS
    if (matmul_bf16) {
        pack_pairs(packed, width, src, rows, K);
        return;
    }
#endif
    for (int k = 0; k < K; k++) {
        const real *s = src.data + (size_t)k * src.k_step;
        for (int r = 0; r < rows; r += 64 / (int)sizeof(real)) {
            prefetch(s, 8 * src.k_step + (size_t)r);
        }
        real *p = packed + (size_t)k * width;
        int r = 0;
        for (; r + width <= rows; r += width) {
            memcpy(p + (size_t)r * (size_t)K, s + r, (size_t)width * sizeof(real));
        }
        for (int j = 0; r < rows && j < width; j++) {
            p[(size_t)r * (size_t)K + (size_t)j] = r + j < rows ? s[r + j] : 0;
        }
    }
}

#if BF16_DOTS
// Rounds rows of `a` with contiguous k to bf16. Tiles can read such rows as they are stored, so
// they are not rearranged into panels; the row count is padded to a multiple of MR with zero rows.
static void round_rows(real *packed, Operand a, int rows, int K) {
    const int depth = packed_depth(K), padded = ceil_div(rows, MR) * MR;
    for (int i = 0; i < padded; i++, packed += depth) {
        const real *row = operand_at(a, min_int(i, rows - 1), 0).data;
        for (int k = 0; k < depth; k += VL) {
            real edge[VL];
            const int whole = k + VL <= depth;
            const int left = i < rows ? K - 2 * k : 0;
            prefetch(row, 2 * a.row_step + (size_t)(2 * k));  // rows may be pages apart
            prefetch(row, 2 * a.row_step + (size_t)(2 * k) + VL);
            pack_load(whole ? packed + k : edge, left > 0 ? row + 2 * k : NULL, left);
            if (!whole) {
                memcpy(packed + k, edge, (size_t)(depth - k) * sizeof(real));
            }
        }
    }
}
#endif

// Two instances of pack(), so that the width is a compile-time constant.
static void pack_b(real *packed, Operand b, int columns, int K) { pack(packed, NR, b, columns, K); }
static void pack_a(real *packed, Operand a, int rows, int K) {
#if BF16_DOTS
    if (matmul_bf16 && a.k_step == 1) {
        round_rows(packed, a, rows, K);
        return;
    }
#endif
    pack(packed, MR, a, rows, K);
}

// Returns the result of pack_a() as an operand for tiles. A panel of MR rows takes MR *
// packed_depth(K) reals.
static Operand packed_rows(const real *packed, Operand a, int K) {
    const int rounded = matmul_bf16 && a.k_step == 1;
    return rounded ? operand(packed, (size_t)packed_depth(K), 1) : operand(packed, 1, MR);
}

// Computes out(MR,NR) = bias(NR) + addend(MR,NR) + a(MR,K) b(K,NR), with b a packed panel. bias and
// addend may be NULL; addend may be out. Rows of out and addend are `step` elements apart. All sums
// stay in registers during the loop: each k loads two vectors of b, broadcasts MR elements of a and
// issues 2 MR multiply-adds. The loop also prefetches a cache line of the next MR rows of a,
// because lines last written by another core have a high latency; into L2, because the lines of all
// rows may map to one set of L1.
FUSED static void matmul_tile(real *out, const real *addend, size_t step, const real *bias,
                              Operand from, const real *b, int K) {
    FUSED_BODY
    const Vector zero = {0};
    const size_t row_step = from.row_step, k_step = from.k_step;
    const real *a = from.data;
    // In bytes: the offset of the next MR rows, and the distance from one of them to the next, less
    // a's own step.
    const size_t ahead = MR * row_step * sizeof(real);
    const size_t turn = k_step == 1 ? (row_step - 1) * sizeof(real) : 0;
    Vector sum[MR][2];
    for (int i = 0; i < MR; i++) {
        sum[i][0] = sum[i][1] = zero;
        prefetch_write(out, (size_t)i * step);
        prefetch_write(out, (size_t)i * step + NR - 1);
    }
#if BF16_DOTS
    for (int k = 0; k < (matmul_bf16 ? packed_depth(K) : 0); k++, a += k_step, b += NR) {
        Vector b0, b1;
        memcpy(&b0, b, sizeof b0);
        memcpy(&b1, b + VL, sizeof b1);
        prefetch_far((uintptr_t)a + ahead + (size_t)(k % MR) * turn);
        for (int i = 0; i < MR; i++) {
            int32_t pair;
            memcpy(&pair, a + (size_t)i * row_step, sizeof pair);
            const Pairs pairs = (Pairs){0} + pair;
            Vector sum0 = sum[i][0], sum1 = sum[i][1];  // array elements would stay in memory
            bf16_dot(sum0, pairs, b0);
            bf16_dot(sum1, pairs, b1);
            sum[i][0] = sum0;
            sum[i][1] = sum1;
        }
    }
#endif
    for (int k = 0; k < (matmul_bf16 ? 0 : K); k++, a += k_step, b += NR) {
        Vector b0, b1;
        memcpy(&b0, b, sizeof b0);
        memcpy(&b1, b + VL, sizeof b1);
        prefetch_far((uintptr_t)a + ahead + (size_t)(k % MR) * turn);
        for (int i = 0; i < MR; i++) {
            const real a_i = a[(size_t)i * row_step];
            sum[i][0] += a_i * b0;
            sum[i][1] += a_i * b1;
        }
    }
    for (int i = 0; i < 2 * MR; i++) {
        const size_t at = (size_t)(i / 2) * step + (size_t)(i % 2 * VL);
        Vector o = zero, add;
        if (bias) {
            memcpy(&o, bias + i % 2 * VL, sizeof o);
        }
        if (addend) {
            memcpy(&add, addend + at, sizeof add);
            o += add;
        }
        o += sum[i / 2][i % 2];
        memcpy(out + at, &o, sizeof o);
    }
}

// matmul_tile() at an edge of out, where a tile has only m <= MR rows and n <= NR columns. Computes
// a full tile on the stack, so the arithmetic, and hence the result, is bitwise identical to that
// of an inner tile.
static void matmul_tile_edge(real *out, const real *addend, size_t step, const real *bias,
                             Operand a, const real *b, int K, int m, int n) {
    real full[MR * NR] = {0}, full_bias[NR] = {0};
    size_t row_bytes = (size_t)n * sizeof(real);
    if (bias) {
        memcpy(full_bias, bias, row_bytes);
    }
    for (int i = 0; addend && i < m; i++) {
        memcpy(full + i * NR, addend + (size_t)i * step, row_bytes);
    }
    matmul_tile(full, addend ? full : NULL, NR, bias ? full_bias : NULL, a, b, K);
    for (int i = 0; i < m; i++) {
        memcpy(out + (size_t)i * step, full + i * NR, row_bytes);
    }
}

// The elements that a matmul of attention skips because of the causal mask. MASK_OUT: out(i,j) for
// j > i + offset, which is never read. MASK_AFTER: a(i,k) for k > i + offset, which is 0.
// MASK_BEFORE: a(i,k) for k < i - offset, which is 0.
enum { MASK_NONE, MASK_OUT, MASK_AFTER, MASK_BEFORE };
typedef struct {
    int kind, offset;
} Mask;

// out(M,N) = bias(N) + addend(M,N) + a b for one block of k, with b packed. a is packed in panels
// of `panel` reals each, or unpacked if `panel` is 0. The panels of b, up to BLOCK x KC, stay in L2
// while MR rows of a at a time stream through L1.
static void matmul_packed(real *out, const real *addend, size_t step, const real *bias, Operand a,
                          size_t panel, const real *b, int M, int N, int K, Mask mask) {
    const size_t depth = (size_t)packed_depth(K), next = panel ? panel : MR * a.row_step;
    for (int i = 0; i < M; i += MR) {
        const int m = min_int(MR, M - i), seen = i + MR + mask.offset;
        const int columns = mask.kind == MASK_OUT ? min_int(N, seen) : N;
        const int skipped = mask.kind == MASK_BEFORE && i > mask.offset ? i - mask.offset : 0;
        const int first = packed_depth(skipped);  // MR and offsets are even
        const int left = (mask.kind == MASK_AFTER ? min_int(K, seen) : K) - skipped;
        Operand rows = operand(a.data + (size_t)(i / MR) * next, a.row_step, a.k_step);
        rows.data += left > 0 ? (size_t)first * a.k_step : 0;
        if (m < MR && !panel) {  // a tile always reads MR rows
            pack_a(thread_workspace(), rows, m, left);
            rows = operand(thread_workspace(), 1, MR);
        }
        for (int j = 0; j < columns; j += NR) {
            const int n = min_int(NR, N - j);
            const size_t at = (size_t)i * step + (size_t)j;
            const real *add = addend ? addend + at : NULL, *bias_j = bias ? bias + j : NULL;
            const real *b_j = b + (size_t)j * depth + (size_t)first * NR;
            if (m == MR && n == NR) {
                matmul_tile(out + at, add, step, bias_j, rows, b_j, left);
            } else {
                matmul_tile_edge(out + at, add, step, bias_j, rows, b_j, left, m, n);
            }
        }
    }
}

// Returns the depth of the blocks of k in invariant 1: K is split into as few blocks of at most KC
// as possible, about equal, each a whole number of vectors. In bf16 a block has up to 2 KC steps,
// since two of them take the space of one.
static int depth_of_block(int K) {
    const int most = matmul_bf16 ? 2 * KC : KC;
    return min_int(most, ceil_div(ceil_div(K, ceil_div(K, most)), VL) * VL);
}

// Computes out(M,N) = addend(M,N) + a(M,K) b(K,N) on the calling thread alone, for attention. M is
// at most BLOCK; so is K if `mask` restricts k. Rows of out and addend are `step` elements apart;
// addend may be NULL or out.
static void matmul_small(real *out, const real *addend, size_t step, Operand a, Operand b, int M,
                         int N, int K, Mask mask) {
    real *packed_a = thread_workspace(), *packed_b = packed_a + PACKED_A_REALS;
    const int kc = depth_of_block(K);
    for (int k = 0; k < K; k += kc) {
        int depth = min_int(kc, K - k);
        Operand rows = operand_at(a, 0, k);
        if (matmul_bf16) {
            pack_a(packed_a, rows, M, depth);
            rows = packed_rows(packed_a, rows, depth);
        }
        const size_t panel = matmul_bf16 ? (size_t)(MR * packed_depth(depth)) : 0;
        for (int j = 0; j < N; j += BLOCK) {
            int n = min_int(BLOCK, N - j);
            const real *add = k > 0 ? out + j : addend ? addend + j : NULL;
            pack_b(packed_b, operand_at(b, j, k), n, depth);
            matmul_packed(out + j, add, step, NULL, rows, panel, packed_b, M, n, depth, mask);
        }
    }
}

// Packs a(rows,K) into the shared part of the workspace, in blocks of kc steps of k, one block
// after the other; on several threads if `share` is set.
static void pack_shared(Operand a, int rows, int K, int kc, int share) {
    const int blocks = ceil_div(K, kc), tasks = ceil_div(rows, BLOCK_ROWS) * blocks;
    (void)share;  // used by the pragma only
    const size_t padded_rows = (size_t)ceil_div(rows, MR) * MR;
    #pragma omp taskloop num_tasks(pieces()) if (share)
    for (int t = 0; t < tasks; t++) {
        int i = t / blocks * BLOCK_ROWS, k = t % blocks * kc, depth = min_int(kc, K - k);
        real *to = matmul_workspace + (size_t)packed_depth(k) * padded_rows +
                   (size_t)i * (size_t)packed_depth(depth);
        pack_a(to, operand_at(a, i, k), min_int(BLOCK_ROWS, rows - i), depth);
    }
}

// Computes out(M,N) = bias(N) + addend(M,N) + a(M,K) b(K,N). Rows of out and addend are N elements
// apart. bias and addend may be NULL; out may be addend, but neither a nor b. Threads share tasks
// of at most BLOCK columns: a task packs its columns of b and processes all rows of a. If there are
// too few columns for all threads, tasks get fewer columns, then fewer rows. Tiles read a unpacked,
// unless all steps of k would map to one set of the L1 cache or a has to be rounded to bf16. In
// these cases the threads first pack a together, as much as the shared part holds: all K of up to
// rows_max rows, or part of K if K is long. Tasks may still be running when this returns: call
// tasks_wait() before reading out or writing to a or b.
static void matmul(real *out, Operand a, Operand b, const real *bias, const real *addend, int M,
                   int N, int K) {
    const Mask none = {MASK_NONE, 0};
    const int kc = depth_of_block(K), stored = packed_depth(kc), threads = thread_count();
    const int one_set = a.k_step * sizeof(real) % 4096 == 0;  // 64 sets of lines of 64 bytes
    const int packs = matmul_bf16 || one_set, fits = SHARED_REALS / stored / BLOCK_ROWS;
    const int all_rows = ceil_div(M, MR) * MR, blocks = ceil_div(K, kc);
    const int rows_max = packs ? min_int(all_rows, fits * BLOCK_ROWS) : all_rows;
    const int blocks_max = packs ? min_int(blocks, SHARED_REALS / rows_max / stored) : blocks;
    const int depth_max = blocks_max * kc;
    const int share = (double)M * N * K > 1e5;  // below that, waking threads costs more
    int columns = BLOCK;
    while (columns > NR && ceil_div(N, columns) < 4 * threads) {
        columns -= NR;
    }
    const int column_tasks = ceil_div(N, columns);
    for (int m0 = 0; m0 < M; m0 += rows_max) {
        const int rows = min_int(rows_max, M - m0);
        int row_tasks = 1;
        // Each row task packs b again, so tasks get many rows unless threads would lack a task.
        while (row_tasks * column_tasks < 3 * threads &&
               rows > (row_tasks * column_tasks < threads ? 4 * MR : 2 * BLOCK) * row_tasks) {
            row_tasks++;
        }
        const int task_rows = ceil_div(ceil_div(rows, row_tasks), MR) * MR;
        const size_t padded_rows = (size_t)ceil_div(rows, MR) * MR;
        row_tasks = ceil_div(rows, task_rows);
        const int tasks = row_tasks * column_tasks;
        for (int k0 = 0; k0 < K; k0 += depth_max) {
            const int k_end = min_int(k0 + depth_max, K);
            if (packs) {
                tasks_wait();  // for tasks that read the packed a or add to the same sums
                pack_shared(operand_at(a, m0, k0), rows, k_end - k0, kc, share);
            }
            #pragma omp taskloop nogroup num_tasks(4 * pieces()) if (share)
            for (int t = 0; t < tasks; t++) {
                int i = t % row_tasks * task_rows, m = min_int(task_rows, rows - i);
                int j = t / row_tasks * columns, n = min_int(columns, N - j);
                size_t at = (size_t)(m0 + i) * (size_t)N + (size_t)j;
                real *packed_b = thread_workspace() + PACKED_A_REALS;
                progress();  // a stage of a large model may take half a minute
                for (int k = k0; k < k_end; k += kc) {
                    int depth = min_int(kc, k_end - k);
                    const size_t column = (size_t)packed_depth(depth);
                    const real *packed = matmul_workspace + (size_t)i * column +
                                         (size_t)packed_depth(k - k0) * padded_rows;
                    const real *add = k > 0 ? out + at : addend ? addend + at : NULL;
                    pack_b(packed_b, operand_at(b, j, k), n, depth);
                    matmul_packed(out + at, add, (size_t)N, k == 0 && bias ? bias + j : NULL,
                                  packs ? packed_rows(packed, a, depth)
                                        : operand_at(a, m0 + i, k),
                                  packs ? MR * column : 0, packed_b, m, n, depth, none);
                }
            }
        }
    }
}

// Measures the peak FLOP/s, counting a multiply-add as two, of matmul_tile() on operands that stay
// in L1; "% of peak" refers to it. Each thread takes the best of sixteen trials of about 0.2 ms,
// all threads at once, so that the load of other programs does not count. Returns the sum over
// threads.
static double matmul_peak_flops(void) {
    enum { DEPTH = 64, REPEATS = 512, TRIALS = 16 };
    double sum = 0;
    memset(matmul_workspace, 0, matmul_workspace_bytes(thread_count()));
    #pragma omp parallel reduction(+ : sum)
    {
        real *a = thread_workspace(), *b = a + MR * DEPTH, *out = b + NR * DEPTH;
        double best_ms = INFINITY;
        for (int trial = 0; trial < TRIALS; trial++) {
            double start_ms = now_ms();
            for (int r = 0; r < REPEATS; r++) {
                matmul_tile(out, NULL, NR, NULL, operand(a, 1, MR), b, DEPTH);
            }
            double ms = now_ms() - start_ms;
            best_ms = ms < best_ms ? ms : best_ms;
        }
        sum += 2e3 * MR * NR * DEPTH * REPEATS / best_ms;
    }
    return sum;
}

#if GPT2_DOUBLE
static real exp_begin(real x, uint32_t *n) { return (void)(*n = 0), x; }
static real exp_end(real x, uint32_t n) { return (void)n, exp(x); }
static real tanh_begin(real x, uint32_t *n) { return exp_begin(x, n); }
static real tanh_end(real u, uint32_t n, real x) { return (void)x, (void)n, tanh(u); }
static real real_sqrt(real x) { return sqrt(x); }
#else
static inline real real_sqrt(real x) { return sqrtf(x); }

// x = n ln 2 + r with |r| <= ln 2 / 2; returns r. ln 2 is split into two constants, the first
// with so few significant bits that its product with n is exact. Adding 1.5 * 2^23 rounds to an
// integer, which is left in the low bits.
static inline float exp_reduced(float x, uint32_t *n) {
    const float round = 12582912.0f;
    float shifted = x * 1.44269504f + round, k = shifted - round;
    memcpy(n, &shifted, sizeof *n);
    *n -= 0x4b400000;  // the bits of `round`
    return (x - k * 0.693145752f) - k * 1.42860682e-6f;
}

// Returns e^r - 1 for |r| <= ln 2 / 2. The polynomial interpolates (e^r - 1 - r) / r^2 at five
// Chebyshev points; its error is below 8e-9.
static inline float exp_minus_1(float r) {
    float q = 0.00139262135f;
    q = q * r + 0.00836320297f;
    q = q * r + 0.0416665544f;
    q = q * r + 0.166665768f;
    q = q * r + 0.5f;
    return r + r * r * q;
}

static inline float power_of_two(uint32_t n) {
    uint32_t bits = (n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power;
}

// Returns min(x, limit), or x if x is NaN. Uses masks, because GCC compiles ?: to a branch around
// all code that follows, which runs at half the speed of vector code on AVX-512 and is not
// vectorized at all on AVX2.
static inline float at_most(float limit, float x) {
    uint32_t bits, limit_bits, above = 0u - (uint32_t)(x > limit);
    memcpy(&bits, &x, sizeof bits);
    memcpy(&limit_bits, &limit, sizeof limit_bits);
    bits = (bits & ~above) | (limit_bits & above);
    memcpy(&x, &bits, sizeof x);
    return x;
}

// The two halves of fast_exp. |x| is clamped where e^x is certain to be 0 or inf; the power of two
// is applied in two factors because 2^n alone would overflow or underflow there.
static inline float exp_begin(float x, uint32_t *n) {
    return exp_reduced(copysignf(at_most(104.0f, fabsf(x)), x), n);
}
static inline float exp_end(float r, uint32_t n) {
    uint32_t half = ((n + 256) >> 1) - 128;
    return (1.0f + exp_minus_1(r)) * power_of_two(half) * power_of_two(n - half);
}

// The two halves of tanh x, with an error of at most 2.53 ulp over all floats; tanh(-x) is exactly
// -tanh(x). Computed as t / (t + 2) with t = e^(2|x|) - 1, without cancellation; 1 for |x| >= 9.1.
// The second half takes the sign from x.
static inline float tanh_begin(float x, uint32_t *n) {
    return exp_reduced(2.0f * at_most(10.0f, fabsf(x)), n);
}
static inline float tanh_end(float r, uint32_t n, float x) {
    float power = power_of_two(n), t = power * exp_minus_1(r) + (power - 1.0f);
    return copysignf(t / (t + 2.0f), x);
}
#endif

// Returns e^x with an error of at most 1.05 ulp over all floats; inf, NaN, overflow and gradual
// underflow as in libm.
static inline real fast_exp(real x) {
    uint32_t n;
    real r = exp_begin(x, &n);
    return exp_end(r, n);
}

// x[i] = fast_exp(x[i] * scale - shift) for i < n. Also overwrites the elements that follow, up to
// the next multiple of VL. Split into two loops because the steps of one exponential depend on each
// other; shorter loops keep more exponentials in flight.
static void exponentials(real *x, real scale, real shift, int n) {
    real r[BLOCK];
    uint32_t powers[BLOCK];
    for (; n > 0; n -= BLOCK, x += BLOCK) {
        const int count = min_int(BLOCK, ceil_div(n, VL) * VL);
        for (int j = 0; j < count; j++) {
            r[j] = exp_begin(x[j] * scale - shift, &powers[j]);
        }
        for (int j = 0; j < count; j++) {
            x[j] = exp_end(r[j], powers[j]);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// 11. Layers
// The CPU reference: all layers of GPT-2, row-major, with N = B * T rows. Each backward function
// follows its forward function. Everything except attention and the matmuls is a readable loop.
// Backward adds to parameter gradients and overwrites activation gradients. Parallel loops split
// outputs, never a sum, so results do not depend on the number of threads. For a single row, as in
// generation, only the matmuls, and attention over a long context, run on several threads: for the
// rest, distributing tasks costs more than the computation.

// Sums use LANES interleaved partial sums, added in order at the end: a compiler may not reorder a
// sum by itself, and in this form it does not need to. 16 floats are one vector of AVX-512, two of
// AVX2 or four of NEON, so the order of additions, and hence the result, is the same for every
// vector width. The partial sums are PARTS native vectors, because GCC would keep sums of a wider
// vector type in memory.
enum { LANES = 16, PARTS = LANES / VL };
static real lanes_total(const real lanes[LANES]) {
    real total = 0;
    for (int j = 0; j < LANES; j++) {
        total += lanes[j];
    }
    return total;
}

// Loops that sum down the rows of a matrix split its columns into slices: 64 floats are four cache
// lines, so no two threads write to the same line.
enum { SLICE = 64 };

// Returns the sum of (x[i] - shift)^power over i < n; power is 1 or 2.
static inline real row_sum(const real *x, real shift, int power, int n) {
    Vector sum[PARTS] = {{0}}, d;
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int part = 0; part < PARTS; part++) {
            memcpy(&d, x + i + part * VL, sizeof d);
            d -= shift;
            sum[part] += power == 2 ? d * d : d;
        }
    }
    for (; i < n; i++) {  // a partial group goes to lane 0
        real rest = x[i] - shift;
        sum[0][0] += power == 2 ? rest * rest : rest;
    }
    return lanes_total((const real *)sum);
}

// Returns the largest of x[i], i < n, n >= 1. May skip a NaN; the exponentials computed afterwards
// propagate it.
static real row_largest(const real *x, int n) {
    const Vector zero = {0};
    Vector most = zero + x[0], next;
    real lanes[VL], largest = x[0];
    int i = 0;
    for (; i + VL <= n; i += VL) {
        memcpy(&next, x + i, sizeof next);
        const Lanes more = next > most;
        most = (Vector)((more & (Lanes)next) | (~more & (Lanes)most));
    }
    memcpy(lanes, &most, sizeof lanes);
    for (; i < n + VL; i++) {  // the remainder, then the lanes
        real value = i < n ? x[i] : lanes[i - n];
        largest = value > largest ? value : largest;
    }
    return largest;
}

// out[b,t] = wte[tokens[b,t]] + wpe[t], with out (B,T,C) and tokens (B,T).
static void embedding_forward(real *out, const Token *tokens, const real *wte, const real *wpe,
                              int B, int T, int C) {
    #pragma omp taskloop num_tasks(pieces()) if (B * T > 1)
    for (int i = 0; i < B * T; i++) {
        const real *token = wte + (int64_t)tokens[i] * C, *position = wpe + (int64_t)(i % T) * C;
        for (int c = 0; c < C; c++) {
            out[(int64_t)i * C + c] = token[c] + position[c];
        }
    }
}

// dwte (Vp,C) and dwpe (maxT,C) += dout (B,T,C). Threads split the channels and process the rows in
// order: a token may occur in many rows, and threads that split the rows would race on its
// gradient.
static void embedding_backward(real *dwte, real *dwpe, const real *dout, const Token *tokens, int B,
                               int T, int C) {
    #pragma omp taskloop num_tasks(pieces())
    for (int slice = 0; slice < ceil_div(C, SLICE); slice++) {
        int begin = slice * SLICE, end = (int)min_i64(begin + SLICE, C);
        for (int i = 0; i < B * T; i++) {
            real *dtoken = dwte + (int64_t)tokens[i] * C, *dposition = dwpe + (int64_t)(i % T) * C;
            for (int c = begin; c < end; c++) {
                dtoken[c] += dout[(int64_t)i * C + c];
                dposition[c] += dout[(int64_t)i * C + c];
            }
        }
    }
}

// out = (inp - mean) * rstd * weight + bias over C channels; mean (N), rstd (N) = 1 / sqrt(variance
// + 1e-5).
static void layernorm_forward(real *out, real *mean, real *rstd, const real *inp,
                              const real *weight, const real *bias, int N, int C) {
    #pragma omp taskloop num_tasks(pieces()) if (N > 1)
    for (int i = 0; i < N; i++) {
        const real *x = inp + (int64_t)i * C;
        real m = row_sum(x, 0, 1, C) / (real)C, variance = row_sum(x, m, 2, C) / (real)C;
        real r = (real)1 / real_sqrt(variance + (real)1e-5);
        for (int c = 0; c < C; c++) {
            out[(int64_t)i * C + c] = (x[c] - m) * r * weight[c] + bias[c];
        }
        mean[i] = m;
        rstd[i] = r;
    }
}

// With n = (inp - mean) * rstd, recomputed rather than kept, and g = dout * weight:
//   dinp = addend + rstd * (g - mean(g) - n * mean(g * n)), means over a row's C channels,
//   dweight += sum over rows of dout * n, dbias += sum over rows of dout.
// addend may be NULL (treated as 0) or alias dinp. The sums over rows are parallel over channels,
// dinp over rows.
static void layernorm_backward(real *dinp, real *dweight, real *dbias, const real *dout,
                               const real *inp, const real *weight, const real *mean,
                               const real *rstd, const real *addend, int N, int C) {
    #pragma omp taskloop nogroup num_tasks(pieces())
    for (int slice = 0; slice < ceil_div(C, SLICE); slice++) {
        int begin = slice * SLICE, end = (int)min_i64(begin + SLICE, C);
        for (int i = 0; i < N; i++) {
            for (int c = begin; c < end; c++) {
                int64_t k = (int64_t)i * C + c;
                dweight[c] += dout[k] * ((inp[k] - mean[i]) * rstd[i]);
                dbias[c] += dout[k];
            }
        }
    }
    #pragma omp taskloop nogroup num_tasks(pieces())
    for (int i = 0; i < N; i++) {
        const real *x = inp + (int64_t)i * C, *d = dout + (int64_t)i * C;
        real g_lanes[LANES] = {0}, gn_lanes[LANES] = {0};
        for (int c = 0; c < C; c += LANES) {
            for (int j = 0; j < (C - c < LANES ? C - c : LANES); j++) {
                real g = d[c + j] * weight[c + j];
                g_lanes[j] += g;
                gn_lanes[j] += g * ((x[c + j] - mean[i]) * rstd[i]);
            }
        }
        real sum_g = lanes_total(g_lanes) / (real)C, sum_gn = lanes_total(gn_lanes) / (real)C;
        for (int c = 0; c < C; c++) {
            int64_t k = (int64_t)i * C + c;
            real n = (x[c] - mean[i]) * rstd[i];
            dinp[k] =
                (addend ? addend[k] : (real)0) + rstd[i] * (d[c] * weight[c] - sum_g - n * sum_gn);
        }
    }
    tasks_wait();
}

// Linear layer: out(N,OC) = addend(N,OC) + bias(OC) + inp(N,C) weight(OC,C)^T; addend and bias may
// be NULL (0), addend may be out. The residual stream is passed as addend, so that it needs no
// separate pass.
static void matmul_forward(real *out, const real *inp, const real *weight, const real *bias,
                           const real *addend, int N, int C, int OC) {
    matmul(out, operand(inp, (size_t)C, 1), operand(weight, (size_t)C, 1), bias, addend, N, OC, C);
    tasks_wait();
}

// Computes n dot products: out[i] = a(K) . row i of b(n,K), whose rows are `step` elements apart.
// Each uses 64 interleaved partial sums, added in a fixed order. Rows of b are read sequentially
// and each element once, so this runs at memory bandwidth.
FUSED static void dots(real *out, const real *a, const real *b, size_t step, int n, int K) {
    FUSED_BODY
    enum { SUMS = 4 };
    for (int row = 0; row < n; row++, b += step) {
        Vector sum[SUMS * PARTS] = {{0}}, x, y;
        int k = 0;
        for (; k + SUMS * LANES <= K; k += SUMS * LANES) {
            for (int i = 0; i < SUMS * PARTS; i++) {
                memcpy(&x, a + k + i * VL, sizeof x);
                memcpy(&y, b + k + i * VL, sizeof y);
                sum[i] += x * y;
            }
        }
        for (; k < K; k++) {
            sum[k % LANES / VL][k % VL] += a[k] * b[k];
        }
        for (int i = 0; i < PARTS; i++) {
            sum[i] = (sum[i] + sum[i + PARTS]) + (sum[i + 2 * PARTS] + sum[i + 3 * PARTS]);
        }
        out[row] = lanes_total((const real *)sum);
    }
}

// matmul_forward() for a single row, for generation: nothing is packed, since no weight is used
// twice, and nothing is rounded to bf16. The order of sums differs from that for a row of a batch.
static void matvec_forward(real *out, const real *inp, const real *weight, const real *bias,
                           const real *addend, int N, int C, int OC) {
    (void)N;
    #pragma omp taskloop num_tasks(pieces()) if ((double)C * OC > 1e5)  // as in matmul()
    for (int j = 0; j < OC; j += SLICE) {
        real product[SLICE];
        dots(product, inp, weight + (size_t)j * C, (size_t)C, min_int(SLICE, OC - j), C);
        for (int i = j; i < OC && i < j + SLICE; i++) {
            out[i] = (bias ? bias[i] : 0) + (addend ? addend[i] : 0) + product[i - j];
        }
    }
}

// Computes dbias(OC) += column sums of dout(N,OC), dweight(OC,C) += dout^T inp(N,C) and then
// dinp(N,C) = dout weight(OC,C). dinp may be inp, since dweight is computed first. If dbias or dinp
// is NULL, it is not computed.
static void matmul_backward(real *dinp, real *dweight, real *dbias, const real *dout,
                            const real *inp, const real *weight, int N, int C, int OC) {
    #pragma omp taskloop nogroup num_tasks(pieces())
    for (int slice = 0; slice < (dbias ? ceil_div(OC, SLICE) : 0); slice++) {
        int begin = slice * SLICE, count = min_int(SLICE, OC - begin);
        real sums[SLICE] = {0};
        for (int i = 0; i < N; i++) {
            for (int c = 0; c < count; c++) {
                sums[c] += dout[(int64_t)i * OC + begin + c];
            }
        }
        for (int c = 0; c < count; c++) {
            dbias[begin + c] += sums[c];
        }
    }
    matmul(dweight, operand(dout, 1, (size_t)OC), operand(inp, 1, (size_t)C), NULL, dweight, OC, C,
           N);
    if (dinp == inp) {
        tasks_wait();
    }
    if (dinp) {
        matmul(dinp, operand(dout, (size_t)OC, 1), operand(weight, 1, (size_t)C), NULL, NULL, N, C,
               OC);
    }
    tasks_wait();
}

// Softmax cross-entropy of `rows` rows of logits (rows,Vp): losses[i] = log-sum-exp - logit of the
// target, both relative to the largest logit, so that no exponential overflows. Overwrites the
// logits: if `backward` is set, with their gradients (p - onehot) * dloss, and with 0 in the padded
// columns; otherwise with intermediate results.
static void classifier_forward_backward(real *losses, real *logits, const Token *targets,
                                        real dloss, int rows, int V, int Vp, int backward) {
    #pragma omp taskloop num_tasks(pieces())
    for (int i = 0; i < rows; i++) {
        real *x = logits + (int64_t)i * Vp, largest = row_largest(x, V), target = x[targets[i]];
        exponentials(x, 1, largest, V);
        real sum = row_sum(x, 0, 1, V);
        losses[i] = (real)log((double)sum) + largest - target;
        if (backward) {
            real scale = dloss / sum;
            for (int v = 0; v < V; v++) {
                x[v] *= scale;
            }
            x[targets[i]] -= dloss;
            for (int v = V; v < Vp; v++) {
                x[v] = 0;
            }
        }
    }
}

// Returns how many of the `keys` keys of a tile that starts at first_key the causal mask lets
// `query` attend to.
static int visible_keys(int query, int first_key, int keys) {
    return min_int(keys, query - first_key + 1);
}

// Online softmax of the next key tile for some rows. s(rows,BLOCK) holds the dot products of the
// rows' queries with the tile's keys; row i attends to the first visible_keys(query + i, key, keys)
// of them. Replaces s by exp(scale s - max), with zeros for masked keys so that the matmul with V
// may use the whole tile, updates each row's running maximum, and rescales its running sum and its
// HS partial outputs to the new maximum. Each step loops over all rows, because the steps of one
// row depend on each other.
static void softmax_online(real *s, real *max, real *sum, real *out, size_t out_step, int query,
                           int key, int rows, int keys, int HS, real scale) {
    real correction[BLOCK];
    for (int i = 0; i < rows; i++) {
        const real largest = scale * row_largest(s + i * BLOCK, visible_keys(query + i, key, keys));
        correction[i] = max[i];
        max[i] = largest > max[i] ? largest : max[i];
    }
    for (int i = 0; i < rows; i++) {
        correction[i] = fast_exp(correction[i] - max[i]);
        sum[i] *= correction[i];
    }
    for (int i = 0; i < rows; i++) {
        const int n = visible_keys(query + i, key, keys);
        exponentials(s + i * BLOCK, scale, max[i], n);
        memset(s + i * BLOCK + n, 0, (size_t)(keys - n) * sizeof(real));
    }
    for (int i = 0; i < rows; i++) {
        sum[i] += row_sum(s + i * BLOCK, 0, 1, visible_keys(query + i, key, keys));
        for (int d = 0; d < HS; d++) {
            out[(size_t)i * out_step + d] *= correction[i];
        }
    }
}

// Causal self-attention for queries q0 .. q0 + queries - 1 of one head, all in one tile of BLOCK,
// over keys 0 .. q0 + queries - 1. Outputs: out(queries,HS), rows `out_step` apart, and
// lse(queries), the natural log of each row's sum of exponentials. Inputs: q(queries,HS) and k, v
// (T,HS), rows `q_step` and `step` apart. Keys are processed in tiles of BLOCK with a running
// maximum; no T x T matrix is stored. Source: Dao et al., "FlashAttention" (2022), algorithm 1,
// with the query tile outermost.
static void attention_tile(real *out, size_t out_step, real *lse, const real *q, size_t q_step,
                           const real *k, const real *v, size_t step, int q0, int queries, int HS) {
    const real scale = (real)(1.0 / sqrt((double)HS));
    real *s = thread_workspace() + PACKED_A_REALS + PACKED_B_REALS;
    real max[BLOCK], sum[BLOCK];
    for (int i = 0; i < queries; i++) {
        max[i] = -INFINITY;
        sum[i] = 0;
        memset(out + (size_t)i * out_step, 0, (size_t)HS * sizeof(real));
    }
    for (int k0 = 0; k0 <= q0; k0 += BLOCK) {
        int keys = min_int(BLOCK, q0 + queries - k0);
        const Mask scores = {MASK_OUT, q0 - k0}, weights = {MASK_AFTER, q0 - k0};
        matmul_small(s, NULL, BLOCK, operand(q, q_step, 1), operand(k + k0 * step, step, 1),
                     queries, keys, HS, scores);
        softmax_online(s, max, sum, out, out_step, q0, k0, queries, keys, HS, scale);
        matmul_small(out, out, out_step, operand(s, BLOCK, 1), operand(v + k0 * step, 1, step),
                     queries, HS, keys, weights);
    }
    for (int i = 0; i < queries; i++) {
        for (int d = 0; d < HS; d++) {
            out[(size_t)i * out_step + d] /= sum[i];
        }
        lse[i] = max[i] + (real)log((double)sum[i]);
    }
}

// Causal self-attention: out(B,T,NH,HS) = softmax(Q K^T / sqrt(HS)) V, with Q, K and V in
// qkv(B,T,3,NH,HS). Also stores lse(B,NH,T), each row's log-sum-exp, which backward needs besides
// out and qkv.
static void attention_forward(real *out, real *lse, const real *qkv, int B, int T, int C, int NH) {
    int HS = C / NH, tiles = ceil_div(T, BLOCK);
    size_t stride = 3 * (size_t)C;
    // The last query tile has the most keys: schedule the longest tasks first.
    #pragma omp taskloop num_tasks(4 * pieces())
    for (int task = 0; task < B * NH * tiles; task++) {
        int b = task % (B * NH) / NH, h = task % NH, q0 = (tiles - 1 - task / (B * NH)) * BLOCK;
        const real *q = qkv + (size_t)b * T * stride + (size_t)h * HS;
        attention_tile(out + ((size_t)b * T + q0) * C + (size_t)h * HS, (size_t)C,
                       lse + ((size_t)b * NH + h) * T + q0, q + q0 * stride, stride, q + C,
                       q + 2 * C, stride, q0, min_int(BLOCK, T - q0), HS);
    }
}

// attention_tile() for a single query q(HS) at position n - 1; dot products are summed as in
// dots().
static void attention_token(real *out, real *lse, const real *q, const real *k, const real *v,
                            int n, int HS) {
    const real scale = (real)(1.0 / sqrt((double)HS));
    real s[BLOCK], max = -INFINITY, sum = 0;
    memset(out, 0, (size_t)HS * sizeof(real));
    for (int k0 = 0; k0 < n; k0 += BLOCK) {
        const int keys = min_int(BLOCK, n - k0);
        dots(s, q, k + (size_t)k0 * HS, (size_t)HS, keys, HS);
        softmax_online(s, &max, &sum, out, 0, n - 1, k0, 1, keys, HS, scale);
        for (int j = 0; j < keys; j++) {
            const real *value = v + (size_t)(k0 + j) * HS;
            for (int d = 0; d < HS; d++) {
                out[d] += s[j] * value[d];
            }
        }
    }
    for (int d = 0; d < HS; d++) {
        out[d] /= sum;
    }
    *lse = max + (real)log((double)sum);
}

// attention_forward() for `rows` tokens at positions first, first + 1, ... of one sequence. Appends
// their keys and values to those of earlier positions in cache(2,NH,positions,HS), then computes
// out(rows,NH,HS) and lse(NH,rows) from qkv(rows,3,NH,HS). The keys of a head are contiguous in the
// cache, since strided reads are slow. With several rows the results are bitwise those of
// attention_forward(): tiles begin at the same positions, and a row's sums are independent of the
// other rows.
static void attention_cached(real *out, real *lse, real *cache, const real *qkv, int positions,
                             int first, int rows, int C, int NH) {
    const int HS = C / NH, tile0 = first / BLOCK, tiles = ceil_div(first + rows, BLOCK) - tile0;
    const size_t head_size = (size_t)positions * (size_t)HS, stride = 3 * (size_t)C;
    for (int i = 0; i < rows * 2 * NH; i++) {  // per row: the keys of all heads, then the values
        const int row = i / (2 * NH), head = i % (2 * NH);
        memcpy(cache + head * head_size + (size_t)(first + row) * HS,
               qkv + row * stride + C + (size_t)head * HS, (size_t)HS * sizeof(real));
    }
    #pragma omp taskloop num_tasks(4 * pieces()) if ((double)rows * (first + rows) * C > 1e5)
    for (int task = 0; task < NH * tiles; task++) {
        const int h = task % NH, tile = (tile0 + task / NH) * BLOCK;
        const int q0 = tile < first ? first : tile;
        const size_t row = (size_t)(q0 - first);
        const real *q = qkv + row * stride + (size_t)h * HS;
        const real *k = cache + h * head_size, *v = cache + (NH + h) * head_size;
        real *out_q = out + row * C + (size_t)h * HS, *lse_q = lse + (size_t)h * rows + row;
        if (rows == 1) {
            attention_token(out_q, lse_q, q, k, v, first + 1, HS);
        } else {
            attention_tile(out_q, (size_t)C, lse_q, q, stride, k, v, (size_t)HS, q0,
                           min_int(tile + BLOCK, first + rows) - q0, HS);
        }
    }
}

// dqkv(B,T,3,NH,HS) = gradient of attention_forward from dout(B,T,NH,HS), P recomputed from lse:
//   D = rowsum(dout * out)   dP = dout V^T   dS = P (dP - D) / sqrt(HS)
//   dV = P^T dout            dQ = dS K       dK = dS^T Q
// A task is one head of one sequence: it loops over query tiles in order and, inside, over key
// tiles in order, so that the order of each sum is fixed.
static void attention_backward(real *dqkv, const real *dout, const real *qkv, const real *out,
                               const real *lse, int B, int T, int C, int NH) {
    int HS = C / NH;
    real scale = (real)(1.0 / sqrt((double)HS));
    size_t stride = 3 * (size_t)C;
    #pragma omp taskloop num_tasks(4 * pieces())
    for (int task = 0; task < B * NH; task++) {
        int b = task / NH, h = task % NH;
        size_t head = (size_t)b * T * stride + (size_t)h * HS;
        size_t head_out = (size_t)b * T * C + (size_t)h * HS;
        real *s = thread_workspace() + PACKED_A_REALS + PACKED_B_REALS, *dp = s + TILE_REALS;
        for (int q0 = 0; q0 < T; q0 += BLOCK) {
            int queries = min_int(BLOCK, T - q0);
            const real *q = qkv + head + q0 * stride, *out_q = out + head_out + (size_t)q0 * C;
            const real *dout_q = dout + head_out + (size_t)q0 * C;
            real *dq = dqkv + head + q0 * stride, D[BLOCK];
            for (int i = 0; i < queries; i++) {
                D[i] = 0;
                for (int d = 0; d < HS; d++) {
                    D[i] += dout_q[(size_t)i * C + d] * out_q[(size_t)i * C + d];
                }
            }
            for (int k0 = 0; k0 <= q0; k0 += BLOCK) {
                int keys = min_int(BLOCK, T - k0);
                const real *k = qkv + head + k0 * stride + C, *v = k + C;
                real *dk = dqkv + head + k0 * stride + C, *dv = dk + C;
                // dk and dv are first computed from the key tile's own queries, dq from key tile 0:
                // these calls overwrite, later ones add.
                const real *dk_sum = k0 == q0 ? NULL : dk, *dv_sum = k0 == q0 ? NULL : dv;
                const Mask scores = {MASK_OUT, q0 - k0}, rows = {MASK_AFTER, q0 - k0};
                const Mask columns = {MASK_BEFORE, q0 - k0};
                matmul_small(s, NULL, BLOCK, operand(q, stride, 1), operand(k, stride, 1), queries,
                             keys, HS, scores);
                matmul_small(dp, NULL, BLOCK, operand(dout_q, C, 1), operand(v, stride, 1), queries,
                             keys, HS, scores);
                for (int i = 0; i < queries; i++) {  // s becomes P, dp becomes dS; 0 if masked
                    const int n = visible_keys(q0 + i, k0, keys);
                    const real D_i = D[i];
                    real *p = s + i * BLOCK, *ds = dp + i * BLOCK;
                    exponentials(p, scale, lse[((size_t)b * NH + h) * T + q0 + i], n);
                    for (int j = 0; j < n; j++) {
                        ds[j] = scale * p[j] * (ds[j] - D_i);
                    }
                    memset(p + n, 0, (size_t)(keys - n) * sizeof(real));
                    memset(ds + n, 0, (size_t)(keys - n) * sizeof(real));
                }
                Operand p_keys = operand(s, 1, BLOCK), ds_keys = operand(dp, 1, BLOCK);
                matmul_small(dv, dv_sum, stride, p_keys, operand(dout_q, 1, C), keys, HS, queries,
                             columns);
                matmul_small(dk, dk_sum, stride, ds_keys, operand(q, 1, stride), keys, HS, queries,
                             columns);
                matmul_small(dq, k0 == 0 ? NULL : dq, stride, operand(dp, BLOCK, 1),
                             operand(k, 1, stride), queries, HS, keys, rows);
            }
        }
    }
}

// t[i] = tanh(u), u = sqrt(2/pi) (x + 0.044715 x^3), x = inp[i], for i < n <= BLOCK. Split into two
// loops for the reason given at exponentials(). u and x have the same sign, so the sign of the
// result is that of x.
static const real gelu_s = (real)0.79788456080286535588, gelu_c = (real)0.044715;
static void gelu_tanh(real *t, const real *inp, int n) {
    uint32_t powers[BLOCK];
    for (int i = 0; i < n; i++) {
        real x = inp[i];
        t[i] = tanh_begin(gelu_s * (x + gelu_c * x * x * x), &powers[i]);
    }
    for (int i = 0; i < n; i++) {
        t[i] = tanh_end(t[i], powers[i], inp[i]);
    }
}

// GELU (tanh approximation): out[i] = x/2 (1 + tanh(u)), x = inp[i], for i < n.
static void gelu_forward(real *out, const real *inp, size_t n) {
    #pragma omp taskloop num_tasks(pieces()) if (n > 1 << 14)
    for (size_t i = 0; i < n; i += BLOCK) {
        const int count = (int)min_i64(BLOCK, (int64_t)(n - i));
        real t[BLOCK];
        gelu_tanh(t, inp + i, count);
        for (int j = 0; j < count; j++) {
            out[i + j] = inp[i + j] / 2 * (1 + t[j]);
        }
    }
}

// dinp[i] = dout[i] * d/dx GELU at x = inp[i], for i < n; dinp may be dout.
static void gelu_backward(real *dinp, const real *dout, const real *inp, size_t n) {
    #pragma omp taskloop num_tasks(pieces())
    for (size_t i = 0; i < n; i += BLOCK) {
        const int count = (int)min_i64(BLOCK, (int64_t)(n - i));
        real t[BLOCK];
        gelu_tanh(t, inp + i, count);
        for (int j = 0; j < count; j++) {
            real x = inp[i + j], slope = gelu_s * (1 + 3 * gelu_c * x * x);
            t[j] = dout[i + j] / 2 * (1 + t[j] + x * (1 - t[j] * t[j]) * slope);
        }
        memcpy(dinp + i, t, (size_t)count * sizeof(real));
    }
}

// -------------------------------------------------------------------------------------------------
// 12. The network
// GPT-2 on the CPU, over the plan's buffers, and the loop over the stages of a micro-step, which
// train_gpt2.cu uses too.
// 1. A forward stage of a block computes one activation. Forward runs all eight stages; backward
//    repeats those whose activation was dropped, with the same code on the same inputs, so
//    recomputation does not change results.
// 2. Gradients are accumulated over micro-steps; `accum_steps` of them make one optimizer step.
// 3. Backward processes the stages of a block from last to first. The gradient of the residual
//    stream (BUF_DRES) passes both branches unchanged; the gradients through the MLP and through
//    attention are added to it by the LayerNorm at the start of each branch.

// Runs the ticks of a micro-step (its stages in order, as numbered by the memory plan) up to and
// including `end`: advances the plan to each tick, starts and awaits the transfers of streamed
// buffers, skips stages that need no recomputation and calls `stage` for the others. A forward-only
// pass ends earlier and stores no streamed buffer. If `adds` is nonzero, gradients are added to
// those of the previous micro-step. Every engine uses this loop. Memory passes from one buffer to
// another only on the compute stream, which therefore waits for a store to complete before new
// buffers reuse its memory, and for a fetch before the fetched buffer is used.
static void run_stages(Plan *p, int end, int adds, void (*stage)(void *self, int stage, int layer),
                 void *self) {
    const int stores = end > tick_head(&p->settings.model);
    p->adds = adds;
    for (int tick = 0, from = 0; tick <= end; tick++) {
        Tick t = tick_at(&p->settings, tick);
        progress();
        for (; from < p->transfer_count && p->transfers[from].store_wait < tick; from++) {
        }
        transfers_step(p, from, STORE_WAIT, tick);
        plan_tick(p, tick);
        transfers_step(p, from, FETCH, tick);
        transfers_step(p, from, FETCH_WAIT, tick);
        if (!t.again || plan_recomputes(&p->settings, t.stage, t.layer)) {
            stage(self, t.stage, t.layer);
        }
        if (stores) {
            transfers_step(p, from, STORE, tick);
        }
    }
}

// Return the plan's buffers as arrays of real: a buffer that exists once; the data at a location; a
// tensor of the weights or of the gradients, at its location on the device; an activation; the
// gradient of an activation (GRAD_*).
static real *buffer(const Plan *p, int id) { return (real *)plan_single(p, id); }
static real *at_location(const Plan *p, Location location) {
    return buffer(p, location.buffer) + location.offset;
}
static real *weight(const Plan *p, int tensor, int layer) {
    return at_location(p, tensor_location(p, KIND_WEIGHTS, tensor, layer));
}
static real *dweight(const Plan *p, int tensor, int layer) {
    return at_location(p, tensor_location(p, KIND_GRADIENTS, tensor, layer));
}
static real *act(const Plan *p, int id, int layer) { return (real *)plan_act(p, id, layer); }
static real *dact(const Plan *p, int id, int layer) { return (real *)plan_grad(p, id, layer); }

// Inputs and results of one pass: B sequences of T tokens, at most the plan's B and T.
typedef struct {
    Plan *plan;
    const Token *inputs, *targets;  // (B,T); targets NULL: logits after the last input only
    int B, T;
    real dloss;   // weight of a token's loss in the gradients; 0: no gradients
    double loss;  // the mean; valid after the head
    int first;    // the first token's position; nonzero only with a KV cache
} Pass;

// Returns the function that computes a linear layer for `rows` rows. A single row with a KV cache,
// which occurs only in generation, uses the function without packing. In training, the order of a
// row's sums does not depend on the number of rows.
typedef void (*LinearForward)(real *out, const real *inp, const real *weight, const real *bias,
                              const real *addend, int N, int C, int OC);
static LinearForward linear_forward(const Plan *p, int rows) {
    return rows == 1 && p->settings.cache ? matvec_forward : matmul_forward;
}

// Runs one stage of block `l`, in forward or in recomputation. The stage's output is the activation
// that act_table lists for it; the current tick selects which of the activation's buffers is
// written.
static void block_forward(const Pass *pass, int stage, int l) {
    const Plan *p = pass->plan;
    const int B = pass->B, T = pass->T, N = B * T;
    const int C = p->settings.model.C, NH = p->settings.model.NH;
    const LinearForward linear = linear_forward(p, N);
    switch (stage) {
    case F_LN1:
        layernorm_forward(act(p, ACT_LN1, l), act(p, ACT_LN1_MEAN, l), act(p, ACT_LN1_RSTD, l),
                          act(p, ACT_X, l), weight(p, LN1W, l), weight(p, LN1B, l), N, C);
        break;
    case F_QKV:
        linear(act(p, ACT_QKV, l), act(p, ACT_LN1, l), weight(p, QKVW, l),
               weight(p, QKVB, l), NULL, N, C, 3 * C);
        break;
    case F_ATT:
        if (p->settings.cache) {
            const int positions = p->settings.T;
            attention_cached(act(p, ACT_ATT, l), act(p, ACT_LSE, l),
                             buffer(p, BUF_CACHE) + (int64_t)l * 2 * positions * C,
                             act(p, ACT_QKV, l), positions, pass->first, N, C, NH);
            break;
        }
        attention_forward(act(p, ACT_ATT, l), act(p, ACT_LSE, l), act(p, ACT_QKV, l), B, T, C, NH);
        break;
    case F_ATTPROJ:
        linear(act(p, ACT_RES2, l), act(p, ACT_ATT, l), weight(p, ATTPROJW, l),
               weight(p, ATTPROJB, l), act(p, ACT_X, l), N, C, C);
        break;
    case F_LN2:
        layernorm_forward(act(p, ACT_LN2, l), act(p, ACT_LN2_MEAN, l), act(p, ACT_LN2_RSTD, l),
                          act(p, ACT_RES2, l), weight(p, LN2W, l), weight(p, LN2B, l), N, C);
        break;
    case F_FC:
        linear(act(p, ACT_FCH, l), act(p, ACT_LN2, l), weight(p, FCW, l),
               weight(p, FCB, l), NULL, N, C, 4 * C);
        break;
    case F_GELU:
        gelu_forward(act(p, ACT_GELU, l), act(p, ACT_FCH, l), (size_t)N * 4 * (size_t)C);
        break;
    case F_FCPROJ:
        linear(act(p, ACT_X, l + 1), act(p, ACT_GELU, l), weight(p, FCPROJW, l),
               weight(p, FCPROJB, l), act(p, ACT_RES2, l), N, 4 * C, C);
        break;
    }
}

// Runs one backward stage of block `l`. BUF_DRES holds the gradient of the block's output before
// the first stage, and that of the block's input after the last.
static void block_backward(const Pass *pass, int stage, int l) {
    const Plan *p = pass->plan;
    const int B = pass->B, T = pass->T, N = B * T;
    const int C = p->settings.model.C, NH = p->settings.model.NH;
    real *dres = buffer(p, BUF_DRES);
    switch (stage) {
    case B_FCPROJ:
        matmul_backward(dact(p, GRAD_MLP, l), dweight(p, FCPROJW, l), dweight(p, FCPROJB, l), dres,
                        act(p, ACT_GELU, l), weight(p, FCPROJW, l), N, 4 * C, C);
        break;
    case B_GELU:
        gelu_backward(dact(p, GRAD_MLP, l), dact(p, GRAD_MLP, l), act(p, ACT_FCH, l),
                      (size_t)N * 4 * (size_t)C);
        break;
    case B_FC:
        matmul_backward(dact(p, GRAD_LN2, l), dweight(p, FCW, l), dweight(p, FCB, l),
                        dact(p, GRAD_MLP, l), act(p, ACT_LN2, l), weight(p, FCW, l), N, C, 4 * C);
        break;
    case B_LN2:
        layernorm_backward(dres, dweight(p, LN2W, l), dweight(p, LN2B, l), dact(p, GRAD_LN2, l),
                           act(p, ACT_RES2, l), weight(p, LN2W, l), act(p, ACT_LN2_MEAN, l),
                           act(p, ACT_LN2_RSTD, l), dres, N, C);
        break;
    case B_ATTPROJ:
        matmul_backward(dact(p, GRAD_ATT, l), dweight(p, ATTPROJW, l), dweight(p, ATTPROJB, l),
                        dres, act(p, ACT_ATT, l), weight(p, ATTPROJW, l), N, C, C);
        break;
    case B_ATT:
        attention_backward(dact(p, GRAD_QKV, l), dact(p, GRAD_ATT, l), act(p, ACT_QKV, l),
                           act(p, ACT_ATT, l), act(p, ACT_LSE, l), B, T, C, NH);
        break;
    case B_QKV:
        matmul_backward(dact(p, GRAD_LN1, l), dweight(p, QKVW, l), dweight(p, QKVB, l),
                        dact(p, GRAD_QKV, l), act(p, ACT_LN1, l), weight(p, QKVW, l), N, C, 3 * C);
        break;
    case B_LN1:
        layernorm_backward(dres, dweight(p, LN1W, l), dweight(p, LN1B, l), dact(p, GRAD_LN1, l),
                           act(p, ACT_X, l), weight(p, LN1W, l), act(p, ACT_LN1_MEAN, l),
                           act(p, ACT_LN1_RSTD, l), dres, N, C);
        break;
    }
}

// Runs the head: the classifier's matmul and the loss, one chunk of logits at a time. Stores the
// losses in BUF_LOSSES. If gradients are requested, adds those of wte to dwte, and overwrites the
// last LayerNorm's output with its gradient. Without targets, computes only the logits of the last
// row and stores them in the first row of BUF_LOGITS.
static void network_head(Pass *pass) {
    const Plan *p = pass->plan;
    const Model *m = &p->settings.model;
    const int N = pass->B * pass->T, chunk = p->settings.logit_rows;
    real *logits = buffer(p, BUF_LOGITS), *losses = buffer(p, BUF_LOSSES);
    const real *wte = weight(p, WTE, 0);
    for (int row = pass->targets ? 0 : N - 1; row < N; row += chunk) {
        int rows = (int)min_i64(chunk, N - row);
        real *lnf = buffer(p, BUF_LNF) + (int64_t)row * m->C;
        linear_forward(p, rows)(logits, lnf, wte, NULL, NULL, rows, m->C, m->Vp);
        if (pass->targets) {
            classifier_forward_backward(losses + row, logits, pass->targets + row, pass->dloss,
                                        rows, m->V, m->Vp, pass->dloss != 0);
        }
        if (pass->dloss != 0) {  // dwte is computed first, so lnf's gradient may overwrite lnf
            matmul_backward(lnf, dweight(p, WTE, 0), NULL, logits, lnf, wte, rows, m->C, m->Vp);
        }
    }
    double sum = 0;  // in one order, independent of chunks and threads
    for (int i = 0; i < N && pass->targets; i++) {
        sum += (double)losses[i];
    }
    pass->loss = sum / N;
}

// Computes one stage of a Pass; called by run_stages(). The head and the embedding share wte (tied
// weights), so both add to its gradient.
static void network_stage(void *self, int stage, int layer) {
    Pass *pass = (Pass *)self;
    const Plan *p = pass->plan;
    const int B = pass->B, T = pass->T, C = p->settings.model.C;
    switch (stage) {
    case EMBED:
        embedding_forward(act(p, ACT_X, 0), pass->inputs, weight(p, WTE, 0),
                          weight(p, WPE, 0) + (int64_t)pass->first * C, B, T, C);
        break;
    case LNF:
        layernorm_forward(buffer(p, BUF_LNF), buffer(p, BUF_LNF_MEAN), buffer(p, BUF_LNF_RSTD),
                          buffer(p, BUF_XF), weight(p, LNFW, 0), weight(p, LNFB, 0), B * T, C);
        break;
    case HEAD:
        network_head(pass);
        break;
    case D_LNF:
        layernorm_backward(buffer(p, BUF_DRES), dweight(p, LNFW, 0), dweight(p, LNFB, 0),
                           buffer(p, BUF_LNF), buffer(p, BUF_XF), weight(p, LNFW, 0),
                           buffer(p, BUF_LNF_MEAN), buffer(p, BUF_LNF_RSTD), NULL, B * T, C);
        break;
    case D_EMBED:
        embedding_backward(dweight(p, WTE, 0), dweight(p, WPE, 0), buffer(p, BUF_DRES),
                           pass->inputs, B, T, C);
        break;
    case JOIN:  // joins streams; the CPU has none
        break;
    default:
        (stage < F_STAGES ? block_forward : block_backward)(pass, stage, layer);
    }
}

// Runs a pass with a team of threads: one thread executes the stages, the others take tasks of its
// loops. The team is started once per pass, because starting one costs as much as a small loop.
static void network_run(Pass *pass, int end, int adds) {
    #pragma omp parallel
    #pragma omp master
    run_stages(pass->plan, end, adds, network_stage, pass);
}

// -------------------------------------------------------------------------------------------------
// 13. Optimizer and schedules
// AdamW with decoupled weight decay (Loshchilov and Hutter, ICLR 2019) over the flat buffers;
// vectors are not decayed. The gradient norm is summed in fp64 over fixed chunks, so the result
// does not depend on the number of threads.

// Returns the sum of squares of elements offset <= i < offset + count of the flat gradients, read
// from their backing store. Tensors begin at multiples of LANES and are padded with zeros, so the
// lanes' sums are the same as in one pass over the flat array.
static double square_sum(const Plan *p, int64_t offset, int64_t count) {
    const Settings *s = &p->settings;
    double lanes[LANES] = {0}, sum = 0;
    TensorSpan span = {0, 0, 0, 0, 0, 0};
    while (span_next(&s->model, offset, count, &span)) {
        const real *x =
            at_location(p, tensor_store(s, KIND_GRADIENTS, span.tensor, span.layer)) + span.first;
        for (int64_t i = 0; i < span.count; i += LANES) {
            for (int j = 0; j < LANES; j++) {
                lanes[j] += (double)x[i + j] * (double)x[i + j];
            }
        }
    }
    for (int j = 0; j < LANES; j++) {
        sum += lanes[j];
    }
    return sum;
}

// Returns the L2 norm of all gradients. Each chunk of 65,536 elements has its own sum: small enough
// that GPT-2's smallest model still has 1,900 chunks to distribute, large enough that adding up the
// sums, in order and on one thread, takes negligible time.
static double gradient_norm(const Plan *p) {
    enum { CHUNK = 1 << 16, CHUNKS = 4096 };
    static double sums[CHUNKS];  // of up to 2^28 elements at a time; not on the stack or heap
    const int64_t n = tensor_offset(&p->settings.model, TENSORS, 0);
    double total = 0;
    for (int64_t begin = 0; begin < n; begin += (int64_t)CHUNK * CHUNKS) {
        const int chunks = (int)min_i64(ceil_div_i64(n - begin, CHUNK), CHUNKS);
        #pragma omp parallel for schedule(static)
        for (int k = 0; k < chunks; k++) {
            const int64_t at = begin + (int64_t)k * CHUNK;
            sums[k] = square_sum(p, at, min_i64(CHUNK, n - at));
        }
        for (int k = 0; k < chunks; k++) {
            total += sums[k];
        }
    }
    return sqrt(total);
}

// All parameters of AdamW besides the tensors. correction = 1 - beta^t for the t-th update.
typedef struct {
    real lr, beta1, beta2, correction1, correction2, eps, weight_decay, grad_scale;
} AdamW;

// Updates n elements: g = grad_scale * grad; m and v are the moments;
// p -= lr * (m / correction1 / (sqrt(v / correction2) + eps) + weight_decay * p).
// Work is shared among the threads of the calling team, without a barrier at the end.
static void adamw_update(real *p, real *m, real *v, const real *grad, const AdamW *a,
                         real weight_decay, int64_t n) {
    const AdamW k = *a;
    #pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < n; i++) {
        real g = k.grad_scale * grad[i];
        real mi = k.beta1 * m[i] + ((real)1 - k.beta1) * g;
        real vi = k.beta2 * v[i] + ((real)1 - k.beta2) * (g * g);
        m[i] = mi;
        v[i] = vi;
        real root = real_sqrt(vi / k.correction2);
        p[i] -= k.lr * (mi / k.correction1 / (root + k.eps) + weight_decay * p[i]);
    }
}

// Returns AdamW's parameters for the update that follows `updates` earlier ones.
static AdamW adamw_at(const Options *o, double lr, int64_t updates, double grad_scale) {
    double t = (double)(updates + 1);
    AdamW a = {(real)lr, (real)o->beta1, (real)o->beta2, (real)(1 - pow(o->beta1, t)),
               (real)(1 - pow(o->beta2, t)), (real)o->eps, (real)o->weight_decay, (real)grad_scale};
    return a;
}

// Returns the learning rate of step `step` (from 0) of `steps`: linear warmup, then the schedule
// down to final_lr * lr.
static double learning_rate(const Options *o, int64_t step, int64_t steps) {
    if (step < o->warmup) {
        return o->lr * (double)(step + 1) / (double)o->warmup;
    }
    double low = o->lr * o->final_lr;
    double t = steps > o->warmup ? (double)(step - o->warmup) / (double)(steps - o->warmup) : 1;
    t = t > 1 ? 1 : t;
    const double range = o->lr - low;
    switch (o->schedule) {
        case SCHEDULE_COSINE: return low + range * 0.5 * (1 + cos(3.141592653589793 * t));
        case SCHEDULE_LINEAR: return low + range * (1 - t);
        case SCHEDULE_WSD: return t > 0.8 ? low + range * (1 - sqrt((t - 0.8) / 0.2)) : o->lr;
        default: return o->lr;  // SCHEDULE_CONSTANT
    }
}

// The most recent gradient norms, for --skip-zscore: a norm above mean + z * deviation of a full
// window is an outlier. The deviation of 128 normally distributed values is known to 6 % (1 /
// sqrt(2 * 127)), and the window is short enough to follow the norm as it decreases over a run.
enum { NORM_WINDOW = 128 };
typedef struct {
    double values[NORM_WINDOW];
    int64_t count;
} NormWindow;

// Returns the largest norm that is not an outlier: infinity without --skip-zscore or until the
// window is full.
static double norm_limit(const NormWindow *w, double zscore) {
    double mean = 0, variance = 0;
    if (zscore <= 0 || w->count < NORM_WINDOW) {
        return HUGE_VAL;
    }
    for (int i = 0; i < NORM_WINDOW; i++) {
        mean += w->values[i] / NORM_WINDOW;
    }
    for (int i = 0; i < NORM_WINDOW; i++) {
        variance += (w->values[i] - mean) * (w->values[i] - mean) / NORM_WINDOW;
    }
    return mean + zscore * sqrt(variance);
}

// Performs an optimizer step on the whole network: norm, clipping, update. Returns the gradient
// norm. If the norm is not finite or is above `limit`, sets *skipped to 1 and leaves weights and
// moments unchanged. `updates` is the number of earlier updates.
static double network_update(Plan *p, const Options *o, double lr, double limit, int64_t updates,
                             int *skipped) {
    const Settings *s = &p->settings;
    const Model *m = &s->model;
    plan_tick(p, tick_update(s));
    transfers_forget_weights(p);
    double norm = gradient_norm(p);
    *skipped = !(isfinite(norm) && norm <= limit);
    if (*skipped) {
        return norm;
    }
    double scale = o->clip > 0 && norm > o->clip ? o->clip / norm : 1;
    const AdamW a = adamw_at(o, lr, updates, scale);
    #pragma omp parallel  // one team for all tensors; starting one costs as much as a small tensor
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            const TensorRange r = tensor_update_range(s, tensor, l);
            real *weights = at_location(p, tensor_store(s, KIND_WEIGHTS, tensor, l)) + r.first;
            real *grads = at_location(p, tensor_store(s, KIND_GRADIENTS, tensor, l)) + r.first;
            adamw_update(weights, buffer(p, BUF_M) + r.state, buffer(p, BUF_V) + r.state, grads, &a,
                         tensor_is_matrix(tensor) ? a.weight_decay : 0, r.count);
        }
    }
    return norm;
}

// -------------------------------------------------------------------------------------------------
// 14. The engine
// The interface between the network and all code above it, a struct of function pointers:
// micro_step, update, forward_loss, logits, and reading and writing of weights and moments. The
// CPU's engine is defined here, the GPU's in train_gpt2.cu. The chapters that follow work with
// either.

// A run trains three flat states (weights and AdamW's two moments), laid out as described in
// chapter The model.
enum { STATE_WEIGHTS, STATE_M, STATE_V, STATES, STATE_GRADS = STATES };  // gradients: read-only
static const Kind state_kinds[STATES + 1] = {KIND_WEIGHTS, KIND_MOMENTS, KIND_MOMENTS,
                                               KIND_GRADIENTS};
// Elements transferred through the host at a time: 1 MiB of fp32, enough for a disk's full
// throughput. Fewer in test builds, so that small models have several pieces.
enum { PIECE = GPT2_POISON ? 1 << 10 : 1 << 18 };

typedef struct {
    double loss, norm;
    int skipped;
    int scale_log2, scale_steps;  // fp16's loss scale as in RunState; otherwise 0
    int scale_moved;              // by this step: 1 up; -1 down, and the step was skipped
} StepResult;

// fp16 overflows above 65504 and loses precision below 6e-5, so the loss, and hence every gradient,
// is scaled by a power of two that the engine adjusts. The initial scale, and the number of steps
// without overflow after which it doubles, are the defaults of PyTorch's torch.amp.GradScaler.
enum { LOSS_SCALE_LOG2 = 16, LOSS_SCALE_GROWS = 2000, FP16_MOST = 65504 };

enum { MATMUL_TEXT = 4096 };  // bytes of the text of chosen algorithms

typedef struct Engine Engine;
struct Engine {
    void *self;
    char device[192];         // description to print
    const char *matmul;       // matmul algorithms in use, as text; NULL: it has no choice
    const char *kernels;      // kernels in use other than the default ones, likewise
    const char *kernels_line;  // how these were chosen, to print; NULL: there was no choice
    int states;               // number of states held: STATES, or 1 (only the weights)
    int zero;                 // 1: opened with all states zero, and none written since
    // Adopts the matmul algorithms recorded in a checkpoint; called before any state is written.
    // Returns 0 if it cannot use them, and then keeps its own. NULL: the engine has no choice.
    int (*set_algorithms)(Engine *e, const char *choices);
    // Likewise for kernels. If it cannot use one of those named, it uses the default instead.
    int (*set_kernels)(Engine *e, const char *kernels);
    double peak_flops;        // the basis of "% of peak"; 0: unknown
    const char *peak_source;  // its source, or why it is unknown
    // Runs forward and backward on micro-batch `accum_step` (from 0) of `accum_steps`. The first
    // micro-batch clears the gradients.
    void (*micro_step)(Engine *e, const Token *inputs, const Token *targets, int accum_step,
                       int accum_steps);
    // Prefetches the next micro-step's batch while the device is still computing; the same batch is
    // passed again to that micro-step. NULL if prefetching would not help.
    void (*prepare)(Engine *e, const Token *inputs, const Token *targets);
    // Ends the step: computes the mean loss of its micro-batches and the gradient norm, and updates
    // weights and moments unless the step is skipped.
    StepResult (*update)(Engine *e, const Options *o, double lr, double limit, int64_t updates);
    // Restores a checkpoint's loss scale. NULL: the loss is not scaled.
    void (*scale_loss)(Engine *e, int log2, int64_t good_steps);
    double weight_most;  // the largest weight its type can hold; 0: no limit
    // Returns the mean loss of one batch (B,T), without training. Unless NULL, `losses` (B,T)
    // receives each token's loss.
    double (*forward_loss)(Engine *e, real *losses, const Token *inputs, const Token *targets);
    // Computes out (V), the logits after the last of n <= T tokens.
    void (*logits)(Engine *e, real *out, const Token *tokens, int n);
    // Like logits, for n more tokens, at positions first <= i < first + n, of a sequence whose
    // earlier positions are in the KV cache; adds their keys and values to the cache. Valid only if
    // the plan has a KV cache. Overwrites the cache from `first` on, so a sequence may be continued
    // again from any of its positions.
    void (*extend)(Engine *e, real *out, const Token *tokens, int first, int n);
    // Reads or writes `count` elements from element `offset` on of a flat state (STATE_*), on the
    // device, on the host or sharded. Gaps between tensors read as zero and are not written.
    void (*read)(Engine *e, int state, int64_t offset, real *out, int64_t count);
    // Like read, for elements that this rank holds itself; does not communicate with other ranks.
    void (*read_own)(Engine *e, int state, int64_t offset, real *out, int64_t count);
    void (*write)(Engine *e, int state, int64_t offset, const real *values, int64_t count);
    // All-gather: all (ranks, bytes) = `mine` of every rank. Collective, as is read: all ranks must
    // call it at the same points of the run. NULL in an engine for a single rank.
    void (*gather)(Engine *e, void *all, const void *mine, size_t bytes);
    // Returns a hash of the states replicated on every rank. It is equal on all ranks unless one of
    // them computes incorrectly.
    uint64_t (*replica)(Engine *e);
    void (*close)(Engine *e);
};

// Calls e->gather; with a single rank, copies `mine` to `all`.
static void engine_gather(Engine *e, void *all, const void *mine, size_t bytes) {
    if (this_rank.ranks == 1) {
        memcpy(all, mine, bytes);
    } else {
        e->gather(e, all, mine, bytes);
    }
}

// Exchanges the ranks' statuses, with `value` in this rank's. Returns an array of one status per
// rank, valid until the next exchange. After this call all ranks know of a signal or a fault on any
// of them.
static const RankStatus *engine_exchange(Engine *e, double value) {
    static RankStatus *statuses;
    const RankStatus mine = {value, stop_signal != 0, this_rank.failed};
    if (!statuses) {
        statuses = (RankStatus *)alloc_zero((size_t)this_rank.ranks, sizeof *statuses);
    }
    engine_gather(e, statuses, &mine, sizeof mine);
    ranks_agree(statuses);
    return statuses;
}

// engine_exchange() without a value; does nothing with a single rank.
static void engine_agree(Engine *e) {
    if (this_rank.ranks > 1) {
        engine_exchange(e, 0);
    }
}

// The CPU's engine: the plan and the mean loss accumulated so far in this step.
typedef struct {
    Plan *plan;
    double loss;
} CpuEngine;

// The loss is averaged over the step: each micro-batch and rank has the same weight, and the
// gradients of micro-batches are simply added, without further scaling.
static void cpu_micro_step(Engine *e, const Token *inputs, const Token *targets, int accum_step,
                           int accum_steps) {
    CpuEngine *cpu = (CpuEngine *)e->self;
    Plan *p = cpu->plan;
    const Settings *s = &p->settings;
    const real dloss = (real)(1.0 / ((double)(s->B * s->T) * accum_steps * s->ranks));
    Pass pass = {p, inputs, targets, s->B, s->T, dloss, 0, 0};
    if (accum_step == 0) {
        cpu->loss = 0;
        memset(buffer(p, BUF_GRADS), 0, p->buffers[p->single[BUF_GRADS]].bytes);
    }
    network_run(&pass, tick_join(s), accum_step > 0);
    cpu->loss += pass.loss / accum_steps;
}

static StepResult cpu_update(Engine *e, const Options *o, double lr, double limit,
                             int64_t updates) {
    CpuEngine *cpu = (CpuEngine *)e->self;
    StepResult result = {cpu->loss, 0, 0, 0, 0, 0};
    result.norm = network_update(cpu->plan, o, lr, limit, updates, &result.skipped);
    return result;
}

// Runs the stages up to and including the head, without gradients. On the CPU, BUF_LOSSES is in
// (B,T) order.
static double cpu_forward_loss(Engine *e, real *losses, const Token *inputs, const Token *targets) {
    Plan *p = ((CpuEngine *)e->self)->plan;
    const Settings *s = &p->settings;
    Pass pass = {p, inputs, targets, s->B, s->T, 0, 0, 0};
    network_run(&pass, tick_head(&s->model), 0);
    if (losses) {
        memcpy(losses, buffer(p, BUF_LOSSES), (size_t)(s->B * s->T) * sizeof(real));
    }
    return pass.loss;
}

// Processes one sequence of n tokens in buffers for B sequences of T; the head computes its last
// row only.
static void cpu_logits(Engine *e, real *out, const Token *tokens, int n) {
    Plan *p = ((CpuEngine *)e->self)->plan;
    const Model *m = &p->settings.model;
    Pass pass = {p, tokens, NULL, 1, n, 0, 0, 0};
    network_run(&pass, tick_head(m), 0);
    memcpy(out, buffer(p, BUF_LOGITS), (size_t)m->V * sizeof(real));
}

// Processes up to settings_rows() tokens per pass. Only the last pass runs the head, and
// only on its last row.
static void cpu_extend(Engine *e, real *out, const Token *tokens, int first, int n) {
    Plan *p = ((CpuEngine *)e->self)->plan;
    const Model *m = &p->settings.model;
    for (int i = 0, rows; i < n; i += rows) {
        rows = min_int(settings_rows(&p->settings), n - i);
        const int last = i + rows == n;
        Pass pass = {p, tokens + i, NULL, 1, rows, 0, 0, first + i};
        network_run(&pass, last ? tick_head(m) : tick_lnf(m) - 1, 0);
    }
    memcpy(out, buffer(p, BUF_LOGITS), (size_t)m->V * sizeof(real));
}

// Returns the address of a span's elements in the backing store of a flat state.
static real *cpu_span(const Plan *p, int state, const TensorSpan *span) {
    Location location = tensor_store(&p->settings, state_kinds[state], span->tensor, span->layer);
    location.buffer = state == STATE_V ? BUF_V : location.buffer;
    return at_location(p, location) + span->first;
}

static void cpu_read(Engine *e, int state, int64_t offset, real *out, int64_t count) {
    const Plan *p = ((CpuEngine *)e->self)->plan;
    TensorSpan span = {0, 0, 0, 0, 0, 0};
    memset(out, 0, (size_t)count * sizeof(real));
    while (span_next(&p->settings.model, offset, count, &span)) {
        memcpy(out + span.at, cpu_span(p, state, &span), (size_t)span.count * sizeof(real));
    }
}

static void cpu_write(Engine *e, int state, int64_t offset, const real *values, int64_t count) {
    Plan *p = ((CpuEngine *)e->self)->plan;
    TensorSpan span = {0, 0, 0, 0, 0, 0};
    transfers_forget_weights(p);
    while (span_next(&p->settings.model, offset, count, &span)) {
        memcpy(cpu_span(p, state, &span), values + span.at, (size_t)span.count * sizeof(real));
    }
}

// Transfers are synchronous copies, so the waiting phases do nothing. A buffer of gradients with
// nothing to fetch is cleared instead, since the layers add to it.
static void cpu_transfer(Plan *p, int phase, const Transfer *v, void *slot, void *store,
                         size_t bytes) {
    (void)p;
    if (phase == FETCH && store) {
        memcpy(slot, store, bytes);
    } else if (phase == FETCH && v->kind == KIND_GRADIENTS) {
        memset(slot, 0, bytes);
    } else if (phase == STORE) {
        memcpy(store, slot, bytes);
    }
}

static void cpu_close(Engine *e) {
    plan_close(((CpuEngine *)e->self)->plan);
    free(e->self);
}

// Opens the CPU engine and allocates the plan's memory. The plan belongs to the caller and outlives
// the engine.
static void cpu_open(Engine *e, Plan *p) {
    const int threads = p->settings.threads;
    CpuEngine *cpu = (CpuEngine *)alloc_zero(1, sizeof *cpu);
    memset(e, 0, sizeof *e);
    cpu->plan = p;
    plan_open(p);
    p->transfer = cpu_transfer;
    matmul_workspace = buffer(p, BUF_MATMUL);
#if BF16_DOTS
    matmul_bf16 = p->settings.matmul_bf16;
#endif
    e->self = cpu;
    e->states = p->settings.forward ? STATE_WEIGHTS + 1 : STATES;
    e->micro_step = cpu_micro_step;
    e->update = cpu_update;
    e->forward_loss = cpu_forward_loss;
    e->logits = cpu_logits;
    e->extend = cpu_extend;
    e->read = e->read_own = cpu_read;
    e->write = cpu_write;
    e->close = cpu_close;
    e->peak_flops = matmul_peak_flops();
    e->peak_source = "measured with the matmul's inner kernel";
    snprintf(e->device, sizeof e->device, "CPU, %d thread%s, fp32%s", threads,
             threads == 1 ? "" : "s", matmul_bf16 ? ", bf16 matmuls" : "");
}

// Sets weights and moments to zero. Gaps between tensors stay zero because nothing else writes
// there, the padding rows of wte because their gradients are zero. Writes nothing if the engine has
// just zeroed the states itself.
static void engine_clear(Engine *e, const Model *m) {
    if (e->zero) {
        e->zero = 0;
        return;
    }
    real *zeros = (real *)alloc_zero(PIECE, sizeof(real));
    int64_t all = tensor_offset(m, TENSORS, 0);
    for (int64_t i = 0; i < all; i += PIECE) {
        for (int state = 0; state < e->states; state++) {
            e->write(e, state, i, zeros, min_i64(PIECE, all - i));
        }
    }
    free(zeros);
}

// Sets initial weights as in GPT-2: normally distributed with mean 0 and standard deviation 0.02,
// or 0.02 / sqrt(2 L) for residual projections; LayerNorm weights are 1, the rest and both moments
// 0. Each element is a function of the seed and its index alone, and so the same for every engine.
static void engine_initialise(Engine *e, const Model *m, uint64_t seed) {
    real *piece = (real *)alloc_zero(PIECE, sizeof(real));
    engine_clear(e, m);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        const Init init = tensor_table[tensor].init;
        int64_t size = tensor_rows(m, tensor) * tensor_cols(m, tensor);  // padding stays 0
        double std = init == INIT_RESIDUAL ? 0.02 / sqrt(2.0 * m->L) : 0.02;
        if (init == INIT_ZERO) {
            continue;
        }
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            for (int64_t i = 0; i < size; i += PIECE) {
                int64_t count = min_i64(PIECE, size - i);
                if (init == INIT_ONE) {
                    for (int64_t k = 0; k < count; k++) {
                        piece[k] = 1;
                    }
                } else {
                    rng_normal(piece, count, std, seed, (uint32_t)(RNG_INIT + tensor),
                               l * size + i);
                }
                e->write(e, STATE_WEIGHTS, tensor_offset(m, tensor, l) + i, piece, count);
            }
        }
    }
    free(piece);
}

// =================================================================================================
// Part D. The run

// -------------------------------------------------------------------------------------------------
// 15. Data
// Training splits every shard into windows of T inputs; the targets are the same tokens, shifted by
// one.
// 1. The position of a sequence in the run is a single number that counts sequences in the order
//    step, micro-step, rank, row. position / windows is the epoch. Within an epoch each window
//    occurs once, in the order of permute_index(seed, epoch), or in file order with --shuffle 0. So
//    ranks read disjoint sequences, and a resumed run continues at its position on any number of
//    ranks.
// 2. In each shard, an epoch omits the (tokens - 1) % T tokens that do not fill a window. The start
//    of the windows changes with the epoch, so that no token is omitted from every epoch.
// 3. A window that cannot be read, or that contains an id outside the vocabulary, must not lose the
//    progress of a run: dataset_batch() reports it, and the run saves before it ends.

typedef struct {
    Shard *shards;
    uint16_t *window;      // (T + 1)
    int shard_count, T;
    Tokenizer tokenizer;   // of all shards
    int shuffle;           // permute the windows by `seed` and the epoch; 0: file order
    uint64_t seed;
    int64_t tokens, windows;
    char problem[PATH_BYTES + 128];  // why the last batch failed
    int problem_shard;               // dataset_hash: the first shard with a problem
} Dataset;

// Opens every shard that matches `pattern`, sorted by name, and splits it into sequences of T
// tokens. They are read in file order unless the caller sets d->shuffle and d->seed.
static void dataset_open(Dataset *d, const char *pattern, int T) {
    glob_t found;
    struct rlimit files;
    memset(d, 0, sizeof *d);
    d->T = T;
    d->window = (uint16_t *)alloc_zero((size_t)T + 1, sizeof(uint16_t));
    // Raise the limit of open files: every shard stays open, and the soft limit is often 1,024.
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    int status = glob(pattern, 0, NULL, &found);
    if (status != 0 || found.gl_pathc == 0) {
        const char *own = strstr(pattern, "tinyshakespeare_") || strstr(pattern, "stories_bpe")
                              ? "'make data' prepares it"
                              : "data/tokenize makes token files from text";
        die("no token file matches %s; %s", pattern, own);
    }
    d->shard_count = (int)found.gl_pathc;
    d->shards = (Shard *)alloc_zero(found.gl_pathc, sizeof(Shard));
    for (int i = 0; i < d->shard_count; i++) {
        Shard *shard = &d->shards[i];
        shard_open(shard, found.gl_pathv[i]);
        if (i > 0 && !tokenizers_equal(&shard->tokenizer, &d->tokenizer)) {
            die("%s has %s; %s has %s", shard->path, tokenizer_text(&shard->tokenizer).s,
                d->shards[0].path, tokenizer_text(&d->tokenizer).s);
        }
        d->tokenizer = shard->tokenizer;
        if (shard->count < T + 1) {
            die("%s: %" PRId64 " tokens are fewer than one sequence: T + 1 = %d", shard->path,
                shard->count, T + 1);
        }
        shard->first_window = d->windows;
        d->windows += (shard->count - 1) / T;
        d->tokens += shard->count;
    }
    globfree(&found);
}

static void dataset_close(Dataset *d) {
    for (int i = 0; i < d->shard_count; i++) {
        close(d->shards[i].fd);
    }
    free(d->shards);
    free(d->window);
    memset(d, 0, sizeof *d);
}

// Hashes the edges of every shard; if `all`, also reads every shard and checks its tokens and its
// SHA-256, until a signal arrives. The first problem ends the run.
static void dataset_hash(Dataset *d, int all) {
    #pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < d->shard_count; i++) {
        char problem[PATH_BYTES + 128];
        const char *fault = shard_hash_edges(&d->shards[i]);
        const int whole = fault || !all || stop_signal || shard_check(&d->shards[i], problem);
        #pragma omp critical
        if ((fault || !whole) && (!d->problem[0] || i < d->problem_shard)) {
            d->problem_shard = i;
            if (fault) {
                snprintf(d->problem, sizeof d->problem, "cannot read token file %s: %s",
                         d->shards[i].path, fault);
            } else {
                memcpy(d->problem, problem, sizeof problem);
            }
        }
    }
    if (d->problem[0]) {
        die("%s", d->problem);
    }
}

// Copies window `window` of `epoch` into T inputs and T targets. Returns 1, or 0 with the reason in
// d->problem if the shard cannot be read or the window contains an id outside the vocabulary.
static int dataset_window(Dataset *d, int64_t window, uint32_t epoch, Token *inputs,
                          Token *targets) {
    int i = d->shard_count - 1;
    while (d->shards[i].first_window > window) {
        i--;
    }
    const Shard *shard = &d->shards[i];
    int64_t rest = (shard->count - 1) % d->T;
    int64_t shift = (int64_t)(rng_uniform(d->seed, RNG_WINDOW, epoch, (uint64_t)i) *
                              (double)(rest + 1));
    int64_t start = (window - shard->first_window) * d->T + (epoch ? shift : 0);
    const char *fault = shard_read(shard, d->window, start, d->T + 1);
    if (fault) {
        snprintf(d->problem, sizeof d->problem, "%s: cannot read tokens %" PRId64 " to %" PRId64
                 ": %s", shard->path, start, start + d->T, fault);
        return 0;
    }
    for (int t = 0; t <= d->T; t++) {
        Token token = d->window[t];
        if (token >= d->tokenizer.vocabulary) {
            snprintf(d->problem, sizeof d->problem, "%s: token %" PRId64 " is %d, outside the "
                     "vocabulary of %d", shard->path, start + t, token, d->tokenizer.vocabulary);
            return 0;
        }
        if (t < d->T) {
            inputs[t] = token;
        }
        if (t > 0) {
            targets[t - 1] = token;
        }
    }
    return 1;
}

// Reads the B sequences from `position` on into inputs and targets (B,T): the batch of one rank and
// micro-step. Returns 1, or 0 with the reason in d->problem if one of them cannot be read.
static int dataset_batch(Dataset *d, int64_t position, int B, Token *inputs, Token *targets) {
    int whole = 1;
    for (int b = 0; b < B && whole; b++) {
        int64_t place = position + b, window = place % d->windows;
        uint32_t epoch = (uint32_t)(place / d->windows);
        if (d->shuffle) {
            window = permute_index(window, d->windows, d->seed, epoch);
        }
        whole = dataset_window(d, window, epoch, inputs + (int64_t)b * d->T,
                               targets + (int64_t)b * d->T);
    }
    return whole;
}

// -------------------------------------------------------------------------------------------------
// 16. Weights and checkpoints
// File formats are implemented in data/, because a training step does not depend on them. The files
// included here use the model, the options, the engine and Dataset.

#include "data/weights.c"
#include "data/checkpoint.c"

// -------------------------------------------------------------------------------------------------
// 17. Sampling and generation
// Samples are generated one token at a time from the logits of the last position. The random number
// of a token is a function of (seed, step, sample, index in the sample), so samples are
// reproducible. A training run recomputes the whole window for each token, in the memory planned
// for training; --generate has its own plan with a KV cache, where each token computes one row. The
// two give logits that differ only by rounding, because a single row is summed in a different
// order; the sampled tokens rarely differ.

// Tokenizes a prompt of n bytes. Returns the number of tokens and writes at most the first
// `capacity` of them to `out`. An empty prompt becomes <|endoftext|>.
static int64_t prompt_tokens(Token *out, int capacity, const Tokenizer *tokenizer, const Bpe *bpe,
                             const char *text, size_t n) {
    if (n == 0) {
        out[0] = end_of_text(tokenizer);
        return 1;
    }
    if (tokenizer->kind != TOKENIZER_BYTES && !bpe) {
        die("--prompt: the data has GPT-2 tokens, but GPT-2's vocabulary was not found: run "
            "data/prepare.sh, which puts vocab.bpe in data/, or give its path with --tokenizer");
    }
    uint16_t *ids = (uint16_t *)alloc_zero(n, sizeof(uint16_t));
    int64_t count = 0;
    if (tokenizer->kind == TOKENIZER_BYTES) {
        for (; count < (int64_t)n; count++) {
            ids[count] = (unsigned char)text[count];
        }
    } else {
        BpeEncoder encoder;
        bpe_encoder_open(&encoder, bpe);
        count = bpe_encode(&encoder, text, n, ids);
        bpe_encoder_close(&encoder);
    }
    for (int64_t i = 0; i < min_i64(count, capacity); i++) {
        out[i] = ids[i];
    }
    free(ids);
    return count;
}

typedef struct {
    double weight;  // unnormalized probability
    float logit;
    Token token;
} Candidate;

// Sorts by descending logit; ties are ordered by token id, so that samples are reproducible.
static int candidate_compare(const void *a, const void *b) {
    const Candidate *x = (const Candidate *)a, *y = (const Candidate *)b;
    return x->logit != y->logit ? (x->logit < y->logit ? 1 : -1) : x->token - y->token;
}

// Samples a token from logits (V): divides them by --temperature (0: argmax), keeps the --top-k
// likeliest tokens, and of these the smallest set of likeliest ones whose probabilities sum to at
// least --top-p. scratch: (V); u is uniform in [0, 1).
static Token sample_token(const real *logits, int V, const Options *o, double u,
                          Candidate *scratch) {
    int best = 0, kept = o->top_k > 0 && o->top_k < V ? (int)o->top_k : V;
    double total = 0, sum = 0, reached = 0;
    for (int v = 0; v < V; v++) {
        scratch[v].logit = logits[v] == logits[v] ? (float)logits[v] : -INFINITY;  // NaN last
        scratch[v].token = v;
        best = candidate_compare(&scratch[v], &scratch[best]) < 0 ? v : best;
    }
    if (o->temperature <= 0) {
        return best;
    }
    const double highest = (double)scratch[best].logit;
    for (int v = 0; v < V; v++) {
        scratch[v].weight = exp(((double)scratch[v].logit - highest) / o->temperature);
    }
    // Sort only if top_k or top_p needs it: for 50,257 candidates it takes longer than the rest.
    if (kept < V || o->top_p < 1) {
        qsort(scratch, (size_t)V, sizeof *scratch, candidate_compare);
    }
    for (int v = 0; v < kept; v++) {
        total += scratch[v].weight;
    }
    for (int v = 0; v < kept; v++) {
        sum += scratch[v].weight;
        if (o->top_p < 1 && sum >= o->top_p * total) {
            kept = v + 1;
        }
    }
    for (int v = 0; v < kept; v++) {
        reached += scratch[v].weight;
        if (reached > u * sum) {
            return scratch[v].token;
        }
    }
    return scratch[kept - 1].token;
}

// Turns the settings of a training run into those of --generate, with a KV cache of T positions.
// The head computes one row, because only the last token of a prompt needs logits.
static void settings_generate(Settings *s) {
    s->cache = s->B = s->logit_rows = 1;
    settings_forward(s);
}

// State and counters of --generate. prompt_ms is the time of the passes for prompts, each up to the
// first sampled token; ms is that of the passes for the following tokens. They are separate because
// a row of a prompt costs less than a generated token: the rows of a chunk share one read of the
// weights.
typedef struct {
    Engine *engine;
    const Options *o;
    const Bpe *bpe;  // NULL: GPT-2's tokens are printed as numbers
    Tokenizer tokenizer;
    int V, T;
    uint32_t step;     // of the checkpoint, to repeat the samples of its run; else 0
    Token *tokens;     // prompt and sample, (T + --sample-tokens)
    real *logits;      // (V), after the previous token
    real *prompt_logits;  // (V), after the prompt, for the first token of each of its samples
    Candidate *scratch;   // (V)
    int write_error;   // errno of a failed write to stdout; 0: none
    // Numbers of texts and input lines started; of prompt tokens; of tokens sampled, except the
    // first of each sample; of tokens sampled after the window has slid.
    int64_t texts, lines, prompt_count, count, slid;
    double prompt_ms, ms;
} Generator;

// Writes and flushes a piece of text, so that output appears token by token. A failed write ends
// the generation; it is an error unless the reader of a pipe has closed it.
static void generator_write(Generator *g, const char *text, size_t n) {
    if (g->write_error == 0) {
        text_print(text, n);
        g->write_error = fflush(stdout) != 0 || ferror(stdout) ? errno : 0;
    }
}

// Generates and prints sample number `sample` of the prompt whose `n` tokens are in g->tokens. The
// context is the last T tokens, as in the samples of a training run; until this window slides, each
// token keeps its position, so its cache entry stays valid. `cached` is n if the KV cache holds the
// prompt and g->prompt_logits its logits, as a previous sample leaves them, else 0. Returns
// `cached` for the next sample, whose first token is then sampled from bitwise identical logits.
static int generate_sample(Generator *g, int64_t sample, int n, int cached) {
    const Options *o = g->o;
    const int prompt = n;
    char text[BPE_LONGEST];
    for (int64_t i = 0; i < o->sample_tokens && !run_stopping() && !g->write_error; i++, n++) {
        const int start = n > g->T ? n - g->T : 0;
        const double began = now_ms();
        real *logits = i ? g->logits : g->prompt_logits;
        // In a window that has slid every token has a new position, which invalidates the cache.
        cached = start ? 0 : cached;
        if (cached < n) {
            g->engine->extend(g->engine, logits, g->tokens + start + cached, cached,
                              n - start - cached);
        }
        cached = n - start;
        *(i ? &g->ms : &g->prompt_ms) += now_ms() - began;
        const uint64_t place = (uint64_t)sample << 32 | (uint64_t)i;
        const double u = rng_uniform((uint64_t)o->seed, RNG_SAMPLE, g->step, place);
        g->tokens[n] = sample_token(logits, g->V, o, u, g->scratch);
        g->count += i > 0;
        g->slid += start > 0;
        if (g->tokens[n] == end_of_text(&g->tokenizer)) {
            break;
        }
        generator_write(g, text, (size_t)token_text(text, &g->tokenizer, g->bpe, g->tokens[n]));
    }
    return n > g->T ? 0 : prompt;
}

// Returns whether each line of stdin is a prompt (--prompt -).
static int generator_reads(const Generator *g) { return strcmp(g->o->prompt, "-") == 0; }

// Writes the tokens of a prompt of n bytes to g->tokens and returns their number. Ends the run if
// there are more than T.
static int generator_prompt(Generator *g, const char *prompt, size_t n) {
    char line[48] = "";
    const int64_t count = prompt_tokens(g->tokens, g->T, &g->tokenizer, g->bpe, prompt, n);
    if (count > g->T) {
        if (generator_reads(g)) {
            snprintf(line, sizeof line, "line %" PRId64 " of stdin has ", g->lines);
        }
        die("--prompt: %s%" PRId64 " tokens, more than --seq-len (-t) %d", line, count, g->T);
    }
    return (int)count;
}

// Generates and prints all samples of a prompt of n bytes.
static void generate_prompt(Generator *g, const char *prompt, size_t n) {
    const int count = generator_prompt(g, prompt, n);
    int cached = 0;
    for (int64_t k = 0; k < g->o->samples && !run_stopping() && !g->write_error; k++) {
        if (g->texts++) {
            generator_write(g, "---\n", 4);
        }
        generator_write(g, prompt, n);
        g->prompt_count += count - cached;
        cached = generate_sample(g, k, count, cached);
        generator_write(g, "\n", 1);
    }
}

// Reads stdin line by line.
typedef struct {
    char *bytes;
    // Number of bytes allocated; index of the line's start; index up to which the line is known to
    // have no '\n'; number of bytes read into the buffer.
    size_t budget, begin, scanned, filled;
    int ended;                            // end of input reached
} LineInput;

// Returns the next line, of *n bytes without the line end, or NULL at the end of the input or if a
// signal asks to stop. Ends the run if stdin cannot be read.
static const char *line_next(LineInput *in, size_t *n) {
    for (;;) {
        char *from = in->bytes + in->begin;
        char *end = (char *)memchr(in->bytes + in->scanned, '\n', in->filled - in->scanned);
        if (end || (in->ended && in->filled > in->begin)) {
            *n = (size_t)((end ? end : in->bytes + in->filled) - from);
            in->begin = in->scanned = end ? in->begin + *n + 1 : in->filled;
            return from;
        }
        if (in->ended) {
            return NULL;
        }
        if (in->begin > 0) {
            memmove(in->bytes, from, in->filled -= in->begin);
            in->begin = 0;
        }
        in->scanned = in->filled;
        if (in->filled == in->budget) {
            in->budget *= 2;
            in->bytes = (char *)realloc(in->bytes, in->budget);
            check(in->bytes, "out of memory for a line of stdin");
        }
        const ssize_t got = read_or_stop(STDIN_FILENO, in->bytes + in->filled,
                                         in->budget - in->filled);
        if (got < 0) {
            die("--prompt -: cannot read stdin: %s", strerror(errno));
        }
        if (stop_signal) {
            return NULL;
        }
        in->filled += (size_t)got;
        in->ended = got == 0;
    }
}

// Generates the samples of --prompt or, if it is "-", those of every line of stdin until it ends or
// a signal arrives. The samples of a line do not depend on the lines before it.
static void generate_all(Generator *g) {
    LineInput in = {(char *)alloc_zero(1 << 16, 1), 1 << 16, 0, 0, 0, 0};
    const char *line;
    size_t n;
    stop_grace = GRACE_PROGRESS;
    if (!generator_reads(g)) {
        generate_prompt(g, g->o->prompt, strlen(g->o->prompt));
    }
    while (generator_reads(g) && !run_stopping() && !g->write_error &&
           (line = line_next(&in, &n)) != NULL) {
        g->lines++;
        generate_prompt(g, line, n);
    }
    free(in.bytes);
}

// -------------------------------------------------------------------------------------------------
// 18. Training and output
// The single training loop, used with every engine. It defines the order of a step: read each
// micro-batch and run forward and backward, update, report, then validate, sample and save a
// checkpoint when these are due; signals are acted on in between. The output is a start-up box, one
// line per step (rewritten in place on a terminal) and log.jsonl: append-only, one object per line,
// flushed line by line, valid after a crash. Resuming first truncates the log to the checkpoint's
// step.

// Number of steps after which the forecast is compared with measured times.
enum { FORECAST_STEPS = 20 };

// State of a run: everything the training loop needs.
typedef struct {
    Options o;
    Settings s;
    Plan plan;
    Engine engine;
    Dataset train, val;
    int has_val, accum_steps, live;
    int stdout_error, log_error;     // errno of a failed write; 0: none
    int64_t skips;                   // consecutive skipped steps
    int diverged;                    // replicated states differ between ranks
    char failure[PATH_BYTES + 256];  // why the run ends before its last step; "": no failure
    int64_t steps, windows_per_step, saved_step, reported_step;
    StepResult last;         // of the last step, which may be reported only at the end of the run
    double lr, ms, mean_ms;  // its learning rate and time; moving average over about 20 steps
    char identity[IDENTITY_BYTES];
    ModelFile weights;  // of -e; weights.spans is NULL if -e does not name a file
    RunState state;
    FILE *log;
    Token *inputs, *targets;  // (B,T) each
    int prepared;             // they already hold the next step's first micro-batch
    Bpe *bpe;                 // NULL: not needed, or not found
    MemoryBudget budget;      // that all ranks share
    double forecast_ms;       // of a step; 0: none
    double first_ms[FORECAST_STEPS];
    int first_count;  // number of times in first_ms
} Run;

// Differences between the programs of train_gpt2.c and train_gpt2.cu.
typedef struct Program {
    const char *name, *default_model;
    int gpu;
    void (*open)(Engine *e, Plan *p);
    uint64_t (*available)(void);                              // bytes available for the plan
    uint64_t (*total)(void);                                  // bytes of the device; or NULL
    uint64_t (*library)(int *measured);                       // bytes used by libraries; or NULL
    int (*command)(Run *run, const struct Program *program);  // --check, --compare; NULL: none
    int (*prove)(const char *shape);                          // --prove; NULL: none
    void (*try_kernels)(const Settings *s);                   // before memory is measured; or NULL
    // Sets the speed that the table of cards and the kernel trials give this GPU; returns how it is
    // known, or NULL if the table does not have the GPU.
    const char *(*predict)(Speed *speed, const Settings *s);
    void (*refuse)(const Settings *s);                        // rejects unsupported ones; or NULL
    const char *built;                                        // optional features built in
    // Stores the device's name in `name`. Returns 0 if no device is usable; `name` is then the
    // reason or "". NULL: the program needs no device.
    int (*device)(char name[96]);
    int (*lacks_bf16)(void);       // whether the device does not support bf16; NULL: no device
    // Start the ranks of a run (chapter Starting and watching the ranks), and let them compare what
    // they were started with. NULL: the program trains on one rank only; `alone` is the reason.
    void (*ranks_start)(const Launcher *l, int gpus);
    void (*ranks_handshake)(void);
    const char *alone;
    Link (*link)(int ranks);  // how the GPUs of this machine are connected; NULL: unknown
    const char *starts;  // appended to the first line that a run prints; or NULL
} Program;

// Returns the prefix of a line of output: on a terminal it clears the line rewritten in place.
static const char *clear_line(const Run *run) { return run->live ? "\r\033[K" : ""; }

// Prints and flushes the start of an operation that may take longer than a second: loading,
// verifying, measuring. With --generate the line goes to stderr and with --json it is suppressed,
// because stdout then contains only the text or the JSON.
__attribute__((format(printf, 2, 3))) static void run_say(const Run *run, const char *format, ...) {
    FILE *f = run->o.generate ? stderr : stdout;
    va_list args;
    if (run->o.quiet || run->o.json) {
        return;
    }
    va_start(args, format);
    vfprintf(f, format, args);
    va_end(args);
    fputc('\n', f);
    fflush(f);
}

// Maximum width of a line that is rewritten in place: a line that wraps could not be cleared. The
// last column is not used, because the cursor may wrap there already.
static int line_columns(const Run *run) { return run->live ? terminal_columns() - 1 : INT_MAX; }

// Writes a number to the log: with 9 digits, so that a float survives the round trip, or as null if
// it is not finite, because JSON has no infinity or NaN.
static void json_number(FILE *f, const char *key, double value) {
    if (isfinite(value)) {
        fprintf(f, ",\"%s\":%.9g", key, value);
    } else {
        fprintf(f, ",\"%s\":null", key);
    }
}

// Truncates `path` after its last complete line of step <= `step`, since the run repeats the later
// steps. Returns 1 if the remaining log contains the validation of `step`, 0 if not, and -1 (errno)
// if the log cannot be read or truncated; a log that cannot be read to its end is left unchanged.
static int log_cut(const char *path, int64_t step) {
    char *line = NULL;
    size_t capacity = 0;
    ssize_t bytes;
    int64_t size, keep = 0;
    int fd = file_open(path, &size), validated = 0;
    FILE *f = fd >= 0 ? fdopen(fd, "r") : NULL;
    if (!f) {
        return errno == ENOENT ? 0 : -1;
    }
    while ((bytes = getline(&line, &capacity, f)) > 0 && line[bytes - 1] == '\n') {
        int64_t found = 0;
        if (sscanf(line, "{\"step\":%" SCNd64, &found) == 1 && found > step) {
            break;
        }
        keep += bytes;
        validated |= found == step && strstr(line, ",\"val_loss\":") != NULL;
    }
    int error = bytes < 0 && !feof(f) ? errno : 0;  // getline returns -1 for both
    free(line);
    fclose(f);
    if (!error && truncate(path, keep) != 0) {
        error = errno;
    }
    errno = error;
    return error ? -1 : validated;
}

// Ends an object and its line in the log. A full disk must be reported, but must not lose the
// progress of a run: the log is truncated to complete lines and closed, and the run is asked to
// stop as if by a signal, so that all ranks save the same step; it then ends as failed.
static void log_end(Run *run) {
    char path[PATH_BYTES];
    fputs("}\n", run->log);
    slow_begin();
    const int failed = fflush(run->log) != 0 || ferror(run->log);
    slow_end();
    if (failed) {
        run->log_error = errno;
        fclose(run->log);
        run->log = NULL;
        path_print(path, "%s/log.jsonl", run->o.output);
        log_cut(path, INT64_MAX);
        stop_signal = stop_signal ? stop_signal : SIGUSR1;
    }
}

// Begins a log object for the run's current step; the caller adds fields and calls log_end().
static void log_begin(const Run *run) {
    fprintf(run->log, "{\"step\":%" PRId64, run->state.step);
}

// Opens the log of a run with an output folder, removes lines of steps after `resume_step` (-1: a
// new run), and writes the start line. Ends the run if the file cannot be read or written.
static void log_open(Run *run, int64_t resume_step) {
    const Options *o = &run->o;
    const Model *m = &run->s.model;
    char path[PATH_BYTES], text[64];
    path_print(path, "%s/log.jsonl", o->output);
    slow_begin();
    const int validated = log_cut(path, o->resume ? max_i64(resume_step, 0) : INT64_MAX);
    if (validated < 0) {
        die("cannot read or truncate log %s: %s", path, file_error());
    }
    if (validated) {
        run->state.pending_validation = 0;  // done by a run that ended before its next step
    }
    FILE *f = run->log = fopen(path, "a");
    slow_end();
    if (!f) {
        die("cannot open log %s: %s", path, strerror(errno));
    }
    fprintf(f, "{\"event\":\"start\",\"version\":\"" PROGRAM_VERSION "\",\"options\":{");
    for (int i = 0; i < OPTION_ROWS; i++) {
        const char *value = option_text(text, o, &option_rows[i]);
        OptionType type = option_rows[i].type;
        int number = type != OPT_TEXT && type != OPT_CHOICE && type != OPT_SET;
        fprintf(f, "%s\"%s\":%s", i ? "," : "", option_rows[i].name, number ? "" : "\"");
        json_text(f, value, strlen(value));
        fputs(number ? "" : "\"", f);
    }
    fprintf(f,
            "},\"model\":{\"layers\":%d,\"heads\":%d,\"channels\":%d,\"positions\":%d,"
            "\"vocabulary\":%d,\"parameters\":%" PRId64 "},\"plan_bytes\":%" PRIu64
            ",\"device\":\"",
            m->L, m->NH, m->C, m->maxT, m->V, model_parameters(m), plan_taken(&run->plan));
    json_text(f, run->engine.device, strlen(run->engine.device));
    fputs("\"", f);
    log_end(run);
    if (run->log_error) {
        die("cannot write log %s: %s", path, strerror(run->log_error));
    }
}

// Flushes stdout. If that fails, the run continues without printing: further output goes to
// /dev/null, and output_status() reports the error at the end.
static void run_flush(Run *run) {
    if (fflush(stdout) == 0 && !ferror(stdout)) {
        return;
    }
    run->stdout_error = errno;
    run->live = 0;
    if (!freopen("/dev/null", "w", stdout)) {
        run->o.quiet = 1;
    }
}

// Flushes the output of a command and returns its exit status: `status`, or 1 and a line on stderr
// if stdout failed. A closed pipe (`| head -1`) is not an error: the reader has seen enough.
static int output_status(Run *run, int status) {
    run_flush(run);
    if (run->stdout_error == 0 || run->stdout_error == EPIPE) {
        return status;
    }
    fprintf(stderr, "%s: cannot write to stdout: %s; the rest of the output is lost\n",
            program_name, strerror(run->stdout_error));
    return 1;
}

// Handles a fault of any rank by setting how long die() waits before it prints: not at all on the
// rank at fault, which thus prints its reason at once; rank_grace_ms() on the other ranks, so that
// they are ended before they print anything.
static void run_note_fault(Run *run) {
    grace_ms = !this_rank.fault   ? grace_ms
                   : this_rank.failed ? 0
                                      : rank_grace_ms();
    if (this_rank.fault && !run->failure[0]) {
        snprintf(run->failure, sizeof run->failure, "rank %d failed; see its message",
                 this_rank.fault - 1);
    }
}

// Computes the mean loss over the first --val-batches batches of the validation data (0: all of
// it), in file order, so that every validation of a run measures the same tokens. Batch k is
// computed by rank k % ranks, and every rank sums the losses in batch order, so the result is
// bitwise identical to that of one rank. Returns 0 if a signal or a read error cut it short, else
// 1.
static int run_validate(Run *run, double *loss) {
    const Settings *s = &run->s;
    const int64_t all = run->val.windows / s->B;
    const int64_t batches = run->o.val_batches ? min_i64(run->o.val_batches, all) : all;
    double sum = 0;
    int64_t k = 0;
    run->prepared = 0;  // validation overwrites its buffers
    rank_phase("validating", RANK_RUNS);
    for (; k < batches && !run_stopping() && !run->failure[0]; k += s->ranks) {
        const int64_t own = k + s->rank;
        if (own < batches && !dataset_batch(&run->val, own * s->B, s->B, run->inputs,
                                            run->targets)) {
            snprintf(run->failure, sizeof run->failure, "%s", run->val.problem);
            this_rank.failed = 1;
        }
        // A rank without a batch runs forward too: others may have to all-gather its weight shard.
        const RankStatus *statuses = engine_exchange(
            &run->engine,
            run->engine.forward_loss(&run->engine, NULL, run->inputs, run->targets));
        run_note_fault(run);
        for (int r = 0; r < min_i64(s->ranks, batches - k); r++) {
            sum += statuses[r].value;
        }
    }
    *loss = sum / (double)batches;
    return k >= batches && !run->failure[0];
}

// Generates a sample of --sample-tokens tokens, prints it and logs it.
static void run_sample(Run *run) {
    const Options *o = &run->o;
    const Settings *s = &run->s;
    const int V = s->model.V;
    const Tokenizer *tokenizer = &run->train.tokenizer;
    int64_t length = o->sample_tokens;
    Token *tokens = (Token *)alloc_zero((size_t)(s->T + length + 1), sizeof(Token));
    real *logits = (real *)alloc_zero((size_t)V, sizeof(real));
    Candidate *scratch = (Candidate *)alloc_zero((size_t)V, sizeof(Candidate));
    char *text = (char *)alloc_zero((size_t)(s->T + length), BPE_LONGEST);
    int n = (int)prompt_tokens(tokens, s->T, tokenizer, run->bpe, o->prompt, strlen(o->prompt));
    int bytes = 0;
    rank_phase("sampling", RANK_RUNS);
    for (int64_t i = 0; i < length && !run_stopping(); i++, n++) {
        engine_agree(&run->engine);
        int context = (int)min_i64(n, s->T);
        run->engine.logits(&run->engine, logits, tokens + n - context, context);
        double u =
            rng_uniform((uint64_t)o->seed, RNG_SAMPLE, (uint32_t)run->state.step, (uint64_t)i);
        tokens[n] = sample_token(logits, V, o, u, scratch);
    }
    for (int i = 0; i < n; i++) {
        bytes += token_text(text + bytes, tokenizer, run->bpe, tokens[i]);
    }
    if (!o->quiet && !run_stopping()) {
        printf("%s--- sample after step %" PRId64 " ---\n", run->live ? "\n" : "",
               run->state.step);
        text_print(text, (size_t)bytes);
        text_print("\n---\n", 5);
    }
    if (run->log && !run_stopping()) {
        log_begin(run);
        fputs(",\"sample\":\"", run->log);
        json_text(run->log, text, (size_t)bytes);
        fputs("\"", run->log);
        log_end(run);
    }
    free(tokens);
    free(logits);
    free(scratch);
    free(text);
}

// Interval, in steps, at which the ranks compare their replicated states; they also do so before
// each checkpoint. If a faulty GPU or link changes one rank's states, that rank's gradients soon
// corrupt those of all others.
enum { REPLICA_STEPS = 100 };

// Returns the number of ranks, r included, whose value equals that of rank r.
static int statuses_alike(const RankStatus *statuses, int ranks, int r) {
    int alike = 0;
    for (int q = 0; q < ranks; q++) {
        alike += statuses[q].value == statuses[r].value;
    }
    return alike;
}

// Compares the ranks' replicated states. If they differ, the run fails and names the ranks that
// disagree with the majority, or all ranks if there is no majority.
static void run_compare_replicas(Run *run) {
    const int ranks = run->s.ranks;
    char names[300] = "";
    int most = 0, named = 0, n = 0;
    if (ranks == 1) {
        return;
    }
    // Exchange the upper 53 bits of the hash, which a double holds exactly.
    const RankStatus *statuses =
        engine_exchange(&run->engine, (double)(run->engine.replica(&run->engine) >> 11));
    for (int r = 0; r < ranks; r++) {
        most = (int)max_i64(most, statuses_alike(statuses, ranks, r));
    }
    run->diverged = most < ranks;
    for (int r = 0; r < ranks; r++) {
        if (2 * most <= ranks || statuses_alike(statuses, ranks, r) < most) {
            n = text_add(names, sizeof names, n, "%s%d", named++ ? ", " : "", r);
        }
    }
    if (run->diverged) {
        snprintf(run->failure, sizeof run->failure, "rank%s %s: weights or moments differ "
                 "from those of the other ranks: a GPU or the interconnect may be faulty",
                 named > 1 ? "s" : "", names);
    }
}

// Saves a checkpoint of the current step and removes older ones in excess of --keep. Does nothing
// without an output folder, or if this step is already saved.
static void run_save(Run *run) {
    char path[PATH_BYTES];
    if (!run->o.output[0] || run->saved_step == run->state.step) {
        return;
    }
    run_compare_replicas(run);
    if (run->diverged) {  // which rank's states are correct is unknown
        return;
    }
    run->saved_step = run->state.step;
    rank_phase("saving", RANK_RUNS);
    Snapshot snapshot = {&run->engine, &run->s,     &run->o,
                         run->identity, &run->state, run->bpe,
                         run->train.tokenizer.kind == TOKENIZER_BYTES, {&run->train, &run->val}};
    alarm_enable(0);
    checkpoint_save(&snapshot, run->o.output, path);
    if (run->o.keep && this_rank.rank == 0) {
        checkpoint_prune(run->o.output, run->o.keep, run->state.step);
    }
    alarm_enable(1);
    if (run->log) {
        log_begin(run);
        fputs(",\"checkpoint\":\"", run->log);
        json_text(run->log, path, strlen(path));
        fputs("\"", run->log);
        log_end(run);
    }
    if (!run->o.quiet) {
        printf("%ssaved %s\n", clear_line(run), path);
    }
}

// Prints and logs the line of the last step if it is due or, when the run `ends`, if it has not
// been printed yet. On a terminal it is shortened to the width, and the next line overwrites it
// unless it is the last one or reports a skipped step or a change of the loss scale.
static void run_report(Run *run, int ends) {
    const Settings *s = &run->s;
    const StepResult *r = &run->last;
    const double tokens = (double)run->windows_per_step * s->T, per_second = tokens / run->ms * 1e3;
    const double flops = model_flops_per_token(&s->model, s->T) * per_second;
    const double peak = run->engine.peak_flops > 0 ? 100 * flops / run->engine.peak_flops : NAN;
    const int64_t left = run->steps - run->state.step;
    const int news = r->skipped || r->scale_moved;
    char of_peak[32] = "", line[256], scale[24] = "";
    // A step between multiples of --log-every is reported only if it was skipped or changed the
    // loss scale, or if it is the last one, which shows the result of the run.
    if (ends ? run->reported_step == run->state.step
             : run->state.step % run->o.log_every != 0 && left && !news) {
        return;
    }
    run->reported_step = run->state.step;
    if (!isnan(peak)) {
        snprintf(of_peak, sizeof of_peak, "%.0f %% of peak", peak);
    }
    if (r->scale_moved) {
        snprintf(scale, sizeof scale, "loss scale 2^%d", r->scale_log2);
    }
    if (!run->o.quiet) {
        snprintf(line, sizeof line,
                 "step %*" PRId64 "/%" PRId64 "\tloss %.4f\tnorm %.3f\tlr %.2e\t%.1f ms\t"
                 "%s tok/s\t%s\t%s\teta %s\t%s%s%s",
                 run->steps > 9999 ? 7 : 4, run->state.step, run->steps, r->loss, r->norm,
                 run->lr, run->ms, count_text((int64_t)per_second).s, of_peak,
                 bytes_text((double)plan_taken(&run->plan)).s,
                 duration_text((double)left * run->mean_ms * 1e-3).s, r->skipped ? "SKIPPED" : "",
                 r->skipped && r->scale_moved ? ", " : "", scale);
        // Dropped on a narrow terminal, in this order: memory, percentage of peak, learning rate,
        // norm, ms, time left, tokens/s.
        static const int spare[] = {7, 6, 3, 2, 4, 8, 5, -1};
        char fitting[256];
        line_fit(fitting, line, spare, line_columns(run));
        printf("%s%s%s", clear_line(run), fitting,
               run->live && left && !news && !ends ? "" : "\n");
    }
    if (run->log) {
        log_begin(run);
        json_number(run->log, "loss", r->loss);
        json_number(run->log, "grad_norm", r->norm);
        json_number(run->log, "lr", run->lr);
        json_number(run->log, "ms", run->ms);
        json_number(run->log, "tokens_per_s", per_second);
        json_number(run->log, "peak_pct", peak);
        fprintf(run->log, ",\"skipped\":%d", r->skipped);
        if (r->scale_log2) {
            fprintf(run->log, ",\"loss_scale_log2\":%d", r->scale_log2);
        }
        log_end(run);
    }
}

// Returns the position, counted in sequences, of this rank's batch in micro-step `accum_step` of
// the step that starts at position `start`. The batches of the ranks are consecutive, so a step
// reads the same sequences on any number of ranks.
static int64_t batch_position(const Settings *s, int64_t start, int accum_step) {
    return start + ((int64_t)accum_step * s->ranks + s->rank) * s->B;
}

// Prints the forecast: tokens per second and the time until the last step.
static void run_print_forecast(const Run *run) {
    if (run->forecast_ms > 0) {
        const double tokens = (double)run->windows_per_step * run->s.T;
        const int64_t left = run->steps - run->state.step;
        printf("forecast %s tokens/s, %s steps in %s; compared with the measured time after step %"
               PRId64 "\n\n",
               count_text((int64_t)(1e3 * tokens / run->forecast_ms)).s, count_text(left).s,
               duration_text(1e-3 * run->forecast_ms * (double)left).s,
               run->state.step + FORECAST_STEPS);
    }
}

// Records the times of the first FORECAST_STEPS steps, then prints the forecast next to their
// median.
static void run_compare_forecast(Run *run) {
    if (run->forecast_ms <= 0 || run->first_count == FORECAST_STEPS) {
        return;
    }
    run->first_ms[run->first_count++] = run->ms;
    if (run->first_count < FORECAST_STEPS) {
        return;
    }
    const double tokens = (double)run->windows_per_step * run->s.T;
    const double ms = median(run->first_ms, FORECAST_STEPS);
    printf("%sforecast %s tokens/s, measured %s: %+.0f %%\n", clear_line(run),
           count_text((int64_t)(1e3 * tokens / run->forecast_ms)).s,
           count_text((int64_t)(1e3 * tokens / ms)).s, 100 * (run->forecast_ms / ms - 1));
}

// Prefetches the next step's first micro-batch: reads it and has the engine sort and upload it
// before the host waits for this step's loss. Otherwise the device would idle meanwhile, which
// matters in short steps. Does nothing in the last step. A read error is not reported here, because
// the next step then reads the batch again.
static void run_prepare(Run *run) {
    const int64_t next = run->state.position + run->windows_per_step;
    if (run->engine.prepare && run->state.step + 1 < run->steps) {
        const int64_t position = batch_position(&run->s, run->o.overfit ? 0 : next, 0);
        run->prepared =
            dataset_batch(&run->train, position, run->s.B, run->inputs, run->targets);
        if (run->prepared) {
            run->engine.prepare(&run->engine, run->inputs, run->targets);
        }
    }
}

// Updates the state that checkpoints store after a completed step, and makes the run fail after
// --max-skips consecutive skipped steps.
static void run_count_step(Run *run, const StepResult r) {
    RunState *state = &run->state;
    state->position += run->windows_per_step;
    state->step++;
    state->updates += !r.skipped;
    state->skipped += r.skipped;
    state->pending_validation = 0;
    state->loss_scale_log2 = r.scale_log2;
    state->loss_scale_steps = r.scale_steps;
    // Skips that lower the loss scale are expected and do not count; skips at its lowest value do.
    run->skips = r.skipped ? run->skips + (r.scale_moved >= 0) : 0;
    if (run->o.max_skips && run->skips >= run->o.max_skips) {
        snprintf(run->failure, sizeof run->failure, "--max-skips: %" PRId64 " consecutive steps "
                 "were skipped: their gradients were not finite or exceeded --skip-zscore",
                 run->skips);
    }
    if (isfinite(r.norm)) {
        state->norms.values[state->norms.count++ % NORM_WINDOW] = r.norm;
    }
    run->last = r;
}

// Runs one optimizer step: the micro-batches at the run's position, the update and the report.
// Returns 0 if a rank has failed or, on a single rank (several ranks agree once per step), if a
// signal arrived before the last micro-batch started. The run is then in the state after the
// previous step, because only the update changes the weights and the position in the data, and the
// first micro-batch of the next step clears the gradients accumulated so far.
static int run_step(Run *run) {
    const Options *o = &run->o;
    const Settings *s = &run->s;
    RunState *state = &run->state;
    const double start = now_ms(), lr = learning_rate(o, state->step, run->steps);
    rank_phase("training", RANK_RUNS);
    for (int accum_step = 0; accum_step < run->accum_steps; accum_step++) {
        if (run_stopping()) {
            return 0;
        }
        int64_t position = batch_position(s, o->overfit ? 0 : state->position, accum_step);
        if (!run->prepared &&
            !dataset_batch(&run->train, position, s->B, run->inputs, run->targets)) {
            snprintf(run->failure, sizeof run->failure, "%s", run->train.problem);
            if (s->ranks == 1) {
                return 0;
            }
            // The other ranks wait for this rank when they exchange gradients, so it computes on an
            // all-zero batch; no update is made from these gradients.
            this_rank.failed = 1;
            memset(run->inputs, 0, (size_t)s->B * (size_t)s->T * sizeof(Token));
            memset(run->targets, 0, (size_t)s->B * (size_t)s->T * sizeof(Token));
        }
        run->prepared = 0;
        run->engine.micro_step(&run->engine, run->inputs, run->targets, accum_step,
                               run->accum_steps);
    }
    run_prepare(run);
    const StepResult r = run->engine.update(
        &run->engine, o, lr, norm_limit(&state->norms, o->skip_zscore), state->updates);
    run_note_fault(run);
    if (this_rank.fault) {
        return 0;
    }
    run_count_step(run, r);
    run->lr = lr;
    run->ms = now_ms() - start;
    // A moving average over about 20 steps: the time left follows the load of the machine, but not
    // the noise of single steps.
    run->mean_ms = run->mean_ms > 0 ? 0.95 * run->mean_ms + 0.05 * run->ms : run->ms;
    run_report(run, 0);
    run_compare_forecast(run);
    if (state->step % REPLICA_STEPS == 0) {
        run_compare_replicas(run);
    }
    return 1;
}

// Validates after the current step, and prints and logs the loss. A validation interrupted by a
// signal stays pending, so that a run resumed from here repeats it.
static void run_validation(Run *run) {
    double loss = 0;
    run->state.pending_validation = !run_validate(run, &loss);
    if (run->state.pending_validation) {
        return;
    }
    if (!run->o.quiet) {
        printf("%sstep %4" PRId64 "/%" PRId64 "  validation loss %.4f\n", clear_line(run),
               run->state.step, run->steps, loss);
    }
    if (run->log) {
        log_begin(run);
        json_number(run->log, "val_loss", loss);
        log_end(run);
    }
}

// Ends the program with the reason for the failure, and says whether the last step is saved.
static void run_fail(const Run *run) {
    const int64_t step = run->state.step;
    die("%s; the run ended after step %" PRId64 "%s", run->failure, step,
        !run->o.output[0] || step == 0 ? ""
        : run->saved_step == step
            ? ", which is saved"
        : run->diverged
            ? ", which is not saved"
            : ", which is not saved: the newest checkpoint precedes the skipped steps");
}

// Prints the last line of a run, writes the last line of the log and closes it.
static void run_end(Run *run, double ms) {
    const char *reason = run->failure[0] || run->log_error ? "failed"
                         : run_stopping()                  ? "interrupted"
                                                           : "finished";
    if (run->log) {
        fprintf(run->log, "{\"event\":\"end\",\"reason\":\"%s\"", reason);
        log_end(run);
    }
    if (run->log) {
        fclose(run->log);
    }
    if (!run->o.quiet) {
        printf("%s%s after step %" PRId64 ", %s, %" PRId64 " skipped\n", clear_line(run), reason,
               run->state.step, duration_text(ms * 1e-3).s, run->state.skipped);
    }
}

// The training loop: runs from the current step to the last one, a signal or a failure. After each
// step it validates, samples and saves, in this order, if each is due; with an output folder the
// end of the run saves too. A skipped step postpones a periodic checkpoint, and a run that fails
// because of skipped steps does not save at its end: its newest checkpoint precedes them.
static void run_train(Run *run) {
    const Options *o = &run->o;
    const double began = now_ms();
    int due = 0;  // a periodic checkpoint
    stop_grace = GRACE_PROGRESS;
    run->reported_step = run->state.step;
    if (run->state.step >= run->steps && !run->state.pending_validation && !o->quiet) {
        printf("nothing to do: the checkpoint is at step %" PRId64 ", --steps (-x) is %" PRId64
               "\n", run->state.step, run->steps);
    }
    if (run->state.pending_validation && run->has_val) {
        run_validation(run);
    }
    while (run->state.step < run->steps && !run_stopping() && !run->failure[0] &&
           run_step(run) && !run->failure[0]) {
        const int64_t step = run->state.step;
        const int last = step == run->steps;
        if (run->has_val && (step % o->val_every == 0 || last)) {
            run_validation(run);
        }
        if (o->sample_every && (step % o->sample_every == 0 || last) && !run_stopping()) {
            run_sample(run);
        }
        due |= o->save_every && step % o->save_every == 0;
        if (due && !last && !run->last.skipped && !run_stopping()) {
            run_save(run);
            due = 0;
        }
        run_flush(run);
    }
    run_report(run, 1);
    if (!run->failure[0] || (run->skips == 0 && run->state.step > 0)) {
        run_save(run);
    }
    run_end(run, now_ms() - began);
    if (run->log_error && !run->failure[0]) {
        snprintf(run->failure, sizeof run->failure, "cannot write %s/log.jsonl: %s", o->output,
                 strerror(run->log_error));
    }
    if (run->failure[0]) {
        run_fail(run);
    }
}

// -------------------------------------------------------------------------------------------------
// 19. Evaluation
// An example of an evaluation is a context with several completions; the model has to find the
// right one by its likelihood. data/tokens.c reads the files.
// 1. A row is a context followed by one completion. It is scored by the losses of the completion's
//    tokens: accuracy picks the lowest sum, acc_norm (llm.c's score) the lowest mean, and on a tie
//    the first completion.
// 2. In a row of more than T + 1 tokens the start of the context is cut off, but never all of it.

// One row of a batch: the completion it holds, and which of the row's T losses are those of the
// completion's tokens.
typedef struct {
    int completion, last, label;  // last: the example's last row; label: its correct completion
    int first, count, cut;        // losses first .. first + count - 1; cut: the context was
} EvalRow;

typedef struct {
    int examples, correct, correct_norm, cut_rows;
    double sum, mean;     // lowest of the current example so far
    int by_sum, by_mean;  // their completions
} EvalScore;

// Returns token i of the context followed by completion k; 0 after the end of both.
static Token eval_token(const EvalExample *x, int k, int i) {
    const EvalTokens *context = &x->texts[0], *completion = &x->texts[1 + k];
    const int after = i - context->count;
    return after < 0                   ? eval_word(context->words, i)
           : after < completion->count ? eval_word(completion->words, after)
                                       : 0;
}

// Writes the row of completion k, a completion of at most T tokens, as T inputs and T targets.
static EvalRow eval_row(Token *inputs, Token *targets, const EvalExample *x, int k, int T) {
    const int context = x->texts[0].count, count = x->texts[1 + k].count;
    const int drop = context + count > T + 1 ? context + count - T - 1 : 0;
    check(count <= T, "the evaluation file changed while in use");
    for (int i = 0; i < T; i++) {
        inputs[i] = eval_token(x, k, drop + i);
        targets[i] = eval_token(x, k, drop + i + 1);
    }
    EvalRow row = {k, k + 1 == x->completions, x->label, context - drop - 1, count, drop > 0};
    return row;
}

// Adds a row's losses (T) to the score. Rows are added in file order.
static void eval_add(EvalScore *score, const EvalRow *row, const real *losses) {
    double sum = 0;
    for (int i = 0; i < row->count; i++) {
        sum += (double)losses[row->first + i];
    }
    if (row->completion == 0 || sum < score->sum) {
        score->sum = sum;
        score->by_sum = row->completion;
    }
    if (row->completion == 0 || sum / row->count < score->mean) {
        score->mean = sum / row->count;
        score->by_mean = row->completion;
    }
    score->cut_rows += row->cut;
    score->examples += row->last;
    score->correct += row->last && score->by_sum == row->label;
    score->correct_norm += row->last && score->by_mean == row->label;
}

// Text of both scores in percent, with standard errors sqrt(p (1 - p) / n).
typedef struct {
    char s[80];
} ScoreText;
static ScoreText eval_text(const EvalScore *score) {
    ScoreText text;
    const double n = score->examples, p = score->correct / n, p_norm = score->correct_norm / n;
    snprintf(text.s, sizeof text.s, "accuracy %.2f %% +- %.2f, acc_norm %.2f %% +- %.2f", 100 * p,
             100 * sqrt(p * (1 - p) / n), 100 * p_norm, 100 * sqrt(p_norm * (1 - p_norm) / n));
    return text;
}

// Replaces the counts in `score` by their sums over all ranks. They are integers, so the order of
// the sum does not matter.
static void eval_total(Run *run, EvalScore *score) {
    EvalScore *scores = (EvalScore *)alloc_zero((size_t)run->s.ranks, sizeof *scores);
    engine_gather(&run->engine, scores, score, sizeof *score);
    score->examples = score->correct = score->correct_norm = score->cut_rows = 0;
    for (int r = 0; r < run->s.ranks; r++) {
        score->examples += scores[r].examples;
        score->correct += scores[r].correct;
        score->correct_norm += scores[r].correct_norm;
        score->cut_rows += scores[r].cut_rows;
    }
    free(scores);
}

// Scores the examples of `f`, B rows at a time, until the last one or a signal. With several ranks,
// rank r scores examples r, r + ranks, and so on. Prints its progress after every batch on a
// terminal, otherwise after every tenth of the examples.
static void run_evaluate(Run *run, const EvalFile *f, EvalScore *score) {
    const int B = run->s.B, T = run->s.T, all = f->examples, ranks = run->s.ranks;
    EvalRow *rows = (EvalRow *)alloc_zero((size_t)B, sizeof(EvalRow));
    real *losses = (real *)alloc_zero((size_t)B * (size_t)T, sizeof(real));
    const double began = now_ms();
    size_t at = LLMC_HEADER_BYTES;
    stop_grace = GRACE_PROGRESS;
    rank_phase("scoring", RANK_RUNS);
    for (int i = 0, filled = 0; i < all && !stop_signal; i++) {
        EvalExample x;
        const int before = min_int(score->examples * ranks, all);
        at += eval_example(&x, f, at, i);
        for (int k = 0; k < x.completions && i % ranks == run->s.rank; k++) {
            const int64_t row = (int64_t)filled * T;
            rows[filled++] = eval_row(run->inputs + row, run->targets + row, &x, k, T);
            if (filled < B && (k + 1 < x.completions || i + ranks < all)) {
                continue;
            }
            Engine *e = &run->engine;
            if (!isfinite(e->forward_loss(e, losses, run->inputs, run->targets))) {
                die("--eval: the loss of %s is not finite at example %d of %s", run->o.model,
                    i, f->name);
            }
            for (int b = 0; b < filled; b++) {
                eval_add(score, &rows[b], losses + (int64_t)b * T);
            }
            filled = 0;
        }
        const int done = min_int(score->examples * ranks, all), tenth = (int)(10.0 * done / all);
        if (!run->o.quiet && !run->o.json && done > before && done < all &&
            (run->live || tenth > (int)(10.0 * before / all))) {
            char line[160];
            snprintf(line, sizeof line, "example %5d/%d  %s  eta %s", done, all,
                     eval_text(score).s,
                     duration_text((now_ms() - began) * 1e-3 * (all - done) / done).s);
            printf("%s%.*s%s", clear_line(run), line_columns(run), line, run->live ? "" : "\n");
            fflush(stdout);
        }
    }
    free(rows);
    free(losses);
    eval_total(run, score);
}

// Prints the score as a line or, with --json, as a JSON object alone.
static void run_print_score(const Run *run, const EvalFile *f, const EvalScore *score) {
    const int n = score->examples;
    if (this_rank.rank > 0) {
        return;
    }
    if (n == 0) {
        die("--eval: interrupted before any example of %s was scored", f->name);
    }
    if (run->o.json) {
        printf("{\"file\":\"");
        json_text(stdout, f->name, strlen(f->name));
        printf("\",\"model\":\"");
        json_text(stdout, run->o.model, strlen(run->o.model));
        printf("\",\"sequence\":%d,\"examples\":%d,\"of\":%d,\"cut_rows\":%d,\"correct\":%d,"
               "\"correct_norm\":%d,\"accuracy\":%.9g,\"acc_norm\":%.9g}\n",
               run->s.T, n, f->examples, score->cut_rows, score->correct, score->correct_norm,
               1.0 * score->correct / n, 1.0 * score->correct_norm / n);
        return;
    }
    printf("%s", clear_line(run));
    if (score->cut_rows) {
        printf("%s rows were truncated at the start: with T = %d, a row has at most %d tokens\n",
               count_text(score->cut_rows).s, run->s.T, run->s.T + 1);
    }
    printf("%s: ", f->name);
    if (n < f->examples) {
        printf("interrupted after %s of ", count_text(n).s);
    }
    printf("%s examples, %s\n", count_text(f->examples).s, eval_text(score).s);
}

// =================================================================================================
// Part E. The program

// -------------------------------------------------------------------------------------------------
// 20. Plan report and remedies
// The printed plan, and the changes that would make a run fit, with their prices.

// Remedies: changes that make a plan smaller or make it fit, as options that a user would type. The
// price of a remedy is the extra time per token, its effect on the numbers and the host memory.

// argv[0], so that a printed command starts this program from the same working directory.
static const char *program_command = "./train_gpt2";

// Prints one word of a command line: for a shell or, with `json`, as an element of an array.
static void word_print(const char *word, int json) {
    if (json) {
        putchar('"');
        json_text(stdout, word, strlen(word));
        putchar('"');
    } else {
        shell_print(word);
    }
}

// Prints a command line that can be pasted, with the options that differ from their defaults; with
// `json`, an array of its words.
static void command_print(const char *program, const Options *o, int json) {
    char text[64], usual[64], name[48];
    const char *between = json ? "," : " ";
    Options defaults;
    options_default(&defaults);
    printf("%s", json ? "[" : "");
    word_print(program, json);
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        const char *value = option_text(text, o, row);
        const int chosen = row->letter == 'b' && o->batch && options_auto_batch(o);
        if (value[0] && (chosen || strcmp(value, option_text(usual, &defaults, row)) != 0)) {
            snprintf(name, sizeof name, row->letter ? "-%.0s%c" : "--%s", row->name, row->letter);
            printf("%s", between);
            word_print(name, json);
            if (row->type != OPT_FLAG) {
                printf("%s", between);
                word_print(value, json);
            }
        }
    }
    printf("%s", json ? "]" : "");
}

// A remedy: one or several changes, as options of a command line, and their price.
enum { SAME_BITS, OTHER_SPLIT, OTHER_ROUNDING, OTHER_NUMBERS };  // effect on the numbers
static const char *const change_kinds[] = {"same bits", "same tokens per step, in another split",
                                           "rounding changes", "numbers change"};
typedef struct {
    PlanCandidate c;
    char option[256];
    int kind;
    double slower;  // extra time per token, as a fraction, at the same tokens per step
} Remedy;
enum { MAX_REMEDIES = 256 };

// Begins a search for changes to a plan whose steps have `micros` micro-batches. The result must
// fit in the memory of `budget`; NULL: no limit.
static void plan_search(Search *q, const Plan *p, const MemoryBudget *budget, int64_t micros) {
    const Settings *s = &p->settings;
    MemoryBudget any;
    memset(&any, 0, sizeof any);
    any.device = any.host = UINT64_MAX;
    search_begin(q, s, budget ? budget : &any);
    q->speed = budget && budget->from ? budget->speed : speed_usual(s);
    q->sequences = s->B * max_i64(micros, 1);
    q->last[BY_LEVEL] = RECOMPUTE_BLOCK;
    q->last[BY_TYPE] = s->dtype == TYPE_BF16 ? 2 : 0;
    q->last[BY_OFFLOAD] = s->gpu ? OFFLOAD_TIERS - 1 : 0;
    q->last[BY_SCRATCH] = 1;
    for (int *last = &q->last[BY_BATCH]; q->batch[*last] > 1; ++*last) {
        q->batch[*last + 1] = q->batch[*last] / 2;
    }
}

// Fills in what a remedy changes and costs, from its candidate's settings.
static void remedy_price(Remedy *r, const Search *q) {
    const Settings *s = &r->c.settings, *now = &q->base;
    const int numbers = r->c.steps[BY_TYPE], rounding = r->c.steps[BY_SCRATCH];
    changes_text(r->option, now, s);
    r->kind = numbers ? OTHER_NUMBERS : rounding ? OTHER_ROUNDING
            : s->B != now->B ? OTHER_SPLIT : SAME_BITS;
    r->slower =
        forecast_tokens_per_s(&q->speed, now, q->sequences / now->B) / r->c.tokens_per_s - 1;
}

// Returns the price of a remedy in words.
static const char *remedy_cost(char text[160], const Remedy *r) {
    const int n = snprintf(text, 160, "%.0f %% slower, %s", fmax(100 * r->slower, 0),
                           change_kinds[r->kind]);
    if (settings_offloads(&r->c.settings)) {
        text_add(text, 160, n, ", %s on the host", bytes_text((double)r->c.host_bytes).s);
    }
    return text;
}

// Lists every single change that makes the plan smaller, axis by axis. Returns their number. Lists
// none for a forward-only run, where levels, types and placements of states have no effect and the
// user can reduce the batch.
static int plan_remedies(const Plan *p, int64_t micros, Remedy list[MAX_REMEDIES]) {
    Search q;
    int n = 0;
    plan_search(&q, p, NULL, micros);
    for (int axis = 0; axis < AXES && !p->settings.forward; axis++) {
        for (int step = 1; step <= q.last[axis] && n < MAX_REMEDIES; step++) {
            Remedy *r = &list[n];
            memset(r, 0, sizeof *r);
            r->c.steps[axis] = step;
            if (candidate_try(&r->c, &q) == FITS && r->c.bytes < plan_taken(p)) {
                remedy_price(r, &q);
                n++;
            }
        }
    }
    return n;
}

// Compares remedies by their effect on the numbers, smallest first, then by their cost in time.
static int remedy_compare(const void *a, const void *b) {
    const Remedy *x = (const Remedy *)a, *y = (const Remedy *)b;
    return x->kind != y->kind ? x->kind - y->kind
                              : (x->slower > y->slower) - (x->slower < y->slower);
}

// Returns 1 if `steps` is at least as large on every axis as one of the n remedies in `list`.
static int remedy_includes(const Remedy *list, int n, const int *steps) {
    for (int i = 0; i < n; i++) {
        int axis = 0;
        while (axis < AXES && list[i].c.steps[axis] <= steps[axis]) {
            axis++;
        }
        if (axis == AXES) {
            return 1;
        }
    }
    return 0;
}

// Tries what `-r auto --offload auto` would choose instead of the given levels and placements.
// Returns whether it fits.
static int remedy_auto(Remedy *r, const Search *q) {
    Settings *s = &r->c.settings;
    Options automatic;
    MemoryBudget budget;
    memset(r, 0, sizeof *r);
    memset(&budget, 0, sizeof budget);
    budget.device = q->device;
    budget.host = q->host;
    options_default(&automatic);
    *s = q->base;
    settings_recompute(s, RECOMPUTE_NONE, s->model.L);
    for (int state = 0; state < KINDS; state++) {
        s->placement[state] &= PLACE_SHARD;
    }
    settings_auto(s, &automatic, &budget);
    if (candidate_plan(&r->c, q) != FITS) {
        return 0;
    }
    remedy_price(r, q);
    snprintf(r->option, sizeof r->option, "-r auto%s", s->gpu ? " --offload auto" : "");
    return 1;
}

// Lists the minimal combinations of changes that make the plan fit, sorted by price: no change in
// them can be left out or made smaller; and the automatic choice, if it was overridden and fits.
// The enumeration reaches every combination after those that it includes. Returns their number, 0
// if none fits.
static int plan_changes(const Plan *p, const MemoryBudget *budget, int64_t micros,
                        Remedy list[MAX_REMEDIES]) {
    Search q;
    PlanCandidate most;
    int n = 0, steps[AXES] = {0};
    plan_search(&q, p, budget, micros);
    memcpy(most.steps, q.last, sizeof most.steps);
    candidate_apply(&most, &q);
    if (p->settings.forward || (candidate_plan(&most, &q) == TOO_LARGE && most.bytes > q.device)) {
        return 0;
    }
    do {
        if (n < MAX_REMEDIES - 1 && !remedy_includes(list, n, steps)) {
            Remedy *r = &list[n];
            memcpy(r->c.steps, steps, sizeof steps);
            if (candidate_try(&r->c, &q) == FITS && r->c.bytes < plan_taken(p)) {
                remedy_price(r, &q);
                n++;
            }
        }
    } while (search_next(&q, steps, 0));
    n += remedy_auto(&list[n], &q);
    qsort(list, (size_t)n, sizeof *list, remedy_compare);
    return n;
}

// Finds a batch that would use memory left free by the plan to make the run faster, with nothing
// recomputed or offloaded: the largest that divides the step of -d and has at most 65,536 tokens,
// or without -d a power of two. Returns how many times as fast it is; 0 if that is less than 1.05.
static double plan_unused(const Plan *p, const MemoryBudget *budget, const Options *o,
                          PlanCandidate *best) {
    enum { TOKENS = 1 << 16 };
    const Settings *s = &p->settings;
    const int64_t micros = step_micros(o, s);
    Search q;
    search_begin(&q, s, budget);
    settings_recompute(&q.base, RECOMPUTE_NONE, 0);
    for (int state = 0; state < KINDS; state++) {
        q.base.placement[state] &= PLACE_SHARD;
    }
    const int64_t most = budget->windows ? budget->windows / s->ranks : (int64_t)TOKENS;
    int64_t sequences = o->tokens_per_step ? micros * s->B : 1;
    while (!o->tokens_per_step && 2 * sequences <= min_i64(most, TOKENS / s->T)) {
        sequences *= 2;
    }
    if (!s->gpu || s->forward || !micros || plan_taken(p) >= budget->device) {
        return 0;
    }
    q.batch[0] = settings_largest_batch(&q.base, sequences, TOKENS, budget->device);
    q.sequences = o->tokens_per_step ? sequences : 0;
    memset(best, 0, sizeof *best);
    if (q.batch[0] < s->B || candidate_try(best, &q) != FITS) {
        return 0;
    }
    const double faster =
        best->tokens_per_s / forecast_tokens_per_s(&q.speed, s, micros);
    return faster >= 1.05 ? faster : 0;
}

// Prints what unused memory would buy, if anything, as a line that begins with `title`.
static void unused_print(const char *title, const Plan *p, const MemoryBudget *budget,
                         const Options *o) {
    char changes[256], step[64];
    PlanCandidate c;
    const double faster = plan_unused(p, budget, o, &c);
    if (faster > 0) {
        const int64_t tokens = (int64_t)c.settings.B * c.settings.T * c.settings.ranks;
        changes_text(changes, &p->settings, &c.settings);
        if (o->tokens_per_step) {
            snprintf(step, sizeof step, " -d %" PRId64 ": ", o->tokens_per_step);
        } else {
            snprintf(step, sizeof step, ", a step of %s tokens: ", count_text(tokens).s);
        }
        print_wrapped(9, "%s%s%s%.2fx as fast (predicted), %s", title, changes, step, faster,
                      bytes_text((double)c.bytes).s);
    }
}

// Error messages if no change makes a plan fit: for training, --generate and --eval.
static const char no_change[] = "no settings make it fit; --minimum prints the least memory";
static const char generate_change[] =
    "--generate needs weights and a KV cache; a smaller --seq-len (-t) makes the cache smaller";
static const char eval_change[] =
    "--eval needs weights and one forward pass; a smaller --batch (-b) needs less memory";
// Returns the one of these messages that applies to a run.
static const char *plan_no_change(const Settings *s) {
    return s->cache ? generate_change : s->forward ? eval_change : no_change;
}

// Ends the run with status 3, before anything is allocated, if `need` exceeds `available` bytes.
// The message says how much is missing and names the cheapest settings that fit. If these need more
// host memory than there is, it names the cheapest one of them and how much host memory is free.
static void plan_refuse(const Plan *p, uint64_t need, uint64_t available) {
    enum { SHOWN = 3 };
    char line[1536] = "", cost[160];
    if (need <= available) {
        return;  // before searching for remedies, whose plans take a while to build
    }
    const uint64_t missing = need - available, host = (uint64_t)host_memory("").bytes;
    MemoryBudget budget;
    memset(&budget, 0, sizeof budget);
    budget.device = plan_taken(p) > missing ? plan_taken(p) - missing : 0;
    budget.host = host;
    Remedy *list = (Remedy *)alloc_zero(MAX_REMEDIES, sizeof *list);
    int n = plan_changes(p, &budget, 1, list), length = 0, lacks_host = 0;
    if (n == 0) {
        budget.host = UINT64_MAX;
        n = plan_changes(p, &budget, 1, list);
        lacks_host = 1;
    }
    for (int i = 0; i < n && i < (lacks_host ? 1 : SHOWN); i++) {
        length = text_add(line, sizeof line, length, "; %s frees %s (%s)", list[i].option,
                          bytes_text((double)(plan_taken(p) - list[i].c.bytes)).s,
                          remedy_cost(cost, &list[i]));
    }
    if (n == 0) {
        snprintf(line, sizeof line, "; %s", plan_no_change(&p->settings));
    } else if (lacks_host) {
        text_add(line, sizeof line, length, ", but only %s are free", bytes_text((double)host).s);
    }
    free(list);
    die_status = STATUS_TOO_LARGE;
    die("the plan needs %s, only %s are available%s: %s short%s", bytes_text((double)need).s,
        bytes_text((double)available).s, available_limit, bytes_text((double)missing).s, line);
}

// Ends the run with status 3 if a rank would pin more than `available` bytes, its share of the
// host's memory.
static void plan_refuse_host(const Plan *p, uint64_t available, const char *limit) {
    if (p->host_bytes > available) {
        die_status = STATUS_TOO_LARGE;
        die("the plan keeps %s in host memory%s, only %s are available (%s): %s short; --offload "
            "fewer states", bytes_text((double)p->host_bytes).s,
            p->settings.ranks > 1 ? " for each GPU" : "", bytes_text((double)available).s, limit,
            bytes_text((double)(p->host_bytes - available)).s);
    }
}

// The printed plan: output of --plan, as text and as JSON.

// Prints the command that trains with these options, without those that only plan, on the CPU or a
// GPU: this program as it was called or, if the CPU program has planned a GPU run, train_gpt2cu in
// the same folder. With `json`, an array of its words, in which the program has no folder.
static void training_print(const Options *chosen, int gpu, int json) {
    const char *slash = strrchr(program_command, '/');
    const int folder = slash ? (int)(slash + 1 - program_command) : 0;
    char neighbor[PATH_BYTES];
    Options o = *chosen;
    o.plan = o.fit = o.minimum = o.largest = o.json = o.gpu_mem = 0;
    o.gpu = "";
    o.train_data = option_given(&o, "train-data") ? o.train_data : NULL;
    o.val_data = option_given(&o, "val-data") ? o.val_data : NULL;
    snprintf(neighbor, sizeof neighbor, "%.*strain_gpt2cu", folder, program_command);
    const int other = gpu && strcmp(program_name, "train_gpt2") == 0;
    const char *program = other ? neighbor + json * folder : json ? program_name : program_command;
    command_print(program, &o, json);
    printf("%s", json ? "" : "\n");
}

// Prints the command that trains with the options `asked`, except that its settings are `s`:
// settings_from_options() gives these settings again.
static void settings_print_command(const Options *asked, const Settings *s, int json) {
    Options o = *asked;
    const LevelsText levels = recompute_text(s);
    const int64_t rows = default_logit_rows(&s->model, type_bytes(s->dtype),
                                            (int64_t)s->B * s->T, s->gpu);
    const int64_t offloaded = settings_offload_bits(s);
    o.recompute = levels.s;
    o.batch = s->B;
    o.seq_len = o.seq_len || s->T != s->model.maxT ? s->T : 0;
    o.moments = s->gpu && s->moment_dtype == TYPE_BF16 ? (int64_t)MOMENTS_BF16 : o.moments;
    o.master = s->dtype == TYPE_BF16 && !s->split_master ? (int64_t)MASTER_NONE : o.master;
    o.offload = offloaded || o.offload != OFFLOAD_AUTO ? offloaded : (int64_t)OFFLOAD_AUTO;
    o.logit_rows = s->logit_rows == rows ? 0 : s->logit_rows;
    o.workspace = s->gpu && s->workspace != default_workspace(&s->model) ? s->workspace : 0;
    training_print(&o, s->gpu, json);
}

// Prints the command that names the settings chosen by settings_auto(), if it has chosen any.
static void choice_print(const Plan *p, const Options *o) {
    const Settings *s = &p->settings;
    const int offloads = o->offload == OFFLOAD_AUTO && settings_offloads(s);
    if (offloads || (strcmp(o->recompute, "auto") == 0 &&
                     strcmp(recompute_text(s).s, "none") != 0)) {
        printf("chosen   ");
        settings_print_command(o, s, 0);
        printf("         so that it fits, with the same bits; %s of host memory\n\n",
               bytes_text((double)p->host_bytes).s);
    }
}

// Writes the name of a tick (one stage of a micro-step) as in --plan --json and dev/report.py:
// `head`, `3.qkv`, `3.re-qkv` (recomputed).
static void tick_name(char name[32], const Settings *s, int tick) {
    Tick t = tick_at(s, tick);
    if (t.layer < 0) {
        snprintf(name, 32, "%s", stage_names[t.stage]);
    } else {
        snprintf(name, 32, "%d.%s%s", t.layer, t.again ? "re-" : "", stage_names[t.stage]);
    }
}

// Returns the ZeRO stage (-z) that shards the same states as these settings.
static int settings_zero(const Settings *s) {
    const int moments = s->placement[KIND_MOMENTS] & PLACE_SHARD;
    return (moments + (s->placement[KIND_GRADIENTS] & PLACE_SHARD) +
            (s->placement[KIND_WEIGHTS] & PLACE_SHARD)) / PLACE_SHARD;
}

static const char *const type_names[] = {"fp32", "bf16", "fp16", "int32", "uint16", "fp32"};

// Returns the bytes of device memory that a rank leaves to libraries, including NCCL's buffers.
static uint64_t outside_bytes(const MemoryBudget *budget, const Settings *s) {
    return s->gpu ? budget->library + nccl_estimate_bytes(s) : 0;
}

// Prints settings, their command, memory and forecast as members of a JSON object, which is left
// open. Bytes are those of one rank; tokens/s, of all ranks, are null if the speed is unknown.
static void settings_print_json(const Options *asked, const Settings *s, const MemoryBudget *budget,
                                uint64_t bytes, uint64_t host_bytes, double tokens_per_s) {
    char offload[64];
    printf("\"command\":");
    settings_print_command(asked, s, 1);
    printf(",\"batch\":%d,\"seq_len\":%d,\"recompute\":\"%s\",\"offload\":\"%s\",\"dtype\":\"%s\","
           "\"moments\":\"%s\",\"master\":%s,\"logit_rows\":%d,\"workspace\":%" PRId64
           ",\"gpus\":%d,\"zero\":%d",
           s->B, s->T, recompute_text(s).s, offload_text(offload, s), type_names[s->dtype],
           type_names[s->moment_dtype], settings_has_master(s) ? "true" : "false", s->logit_rows,
           s->gpu ? s->workspace : 0, s->ranks, settings_zero(s));
    printf(",\"device_bytes\":%" PRIu64 ",\"reserved_bytes\":%" PRIu64
           ",\"reserved_from\":\"%s\",\"host_bytes\":%" PRIu64 ",\"tokens_per_s\":",
           bytes, outside_bytes(budget, s), budget->library_from, host_bytes);
    printf(budget->from && tokens_per_s > 0 && !s->forward ? "%.0f" : "null", floor(tokens_per_s));
}

// Prints whether something fits the budget, as members of a JSON object: null if the available
// memory is unknown.
static void verdict_print_json(const MemoryBudget *budget, uint64_t bytes, uint64_t host_bytes) {
    const int fits = bytes <= budget->device && host_bytes <= budget->host;
    printf("\"fits\":%s,\"available_bytes\":%" PRIu64 ",\"short_bytes\":%" PRIu64,
           !budget->device ? "null" : fits ? "true" : "false", budget->device,
           budget->device && bytes > budget->device ? bytes - budget->device : 0);
}

// Prints the plan as JSON: its settings and verdict; for dev/report.py, the names of the ticks, and
// every buffer with its lifetime and its offset in memory; and the changes that make it fit.
static void plan_print_json(const Plan *p, const MemoryBudget *budget, const Options *o) {
    const Settings *s = &p->settings;
    const int64_t micros = max_i64(step_micros(o, s), 1);
    printf("{\"target\":\"%s\",", s->gpu ? "gpu" : "cpu");
    verdict_print_json(budget, plan_taken(p), p->host_bytes);
    printf(",");
    settings_print_json(o, s, budget, plan_taken(p), p->host_bytes,
                        forecast_tokens_per_s(&budget->speed, s, micros));
    printf(",\"changes\":[");
    if (budget->device && plan_taken(p) > budget->device) {
        Remedy *list = (Remedy *)alloc_zero(MAX_REMEDIES, sizeof *list);
        const int n = plan_changes(p, budget, micros, list);
        for (int i = 0; i < n; i++) {
            const Remedy *r = &list[i];
            printf("%s\n{\"options\":\"%s\",\"device_bytes\":%" PRIu64 ",\"host_bytes\":%" PRIu64
                   ",\"slower\":%.4f,\"effect\":\"%s\"}", i ? "," : "", r->option, r->c.bytes,
                   r->c.host_bytes, fmax(r->slower, 0), change_kinds[r->kind]);
        }
        free(list);
    }
    printf("],\n\"total_bytes\":%" PRIu64 ",\"ticks\":[", p->device_bytes);
    for (int t = 0; t < p->ticks; t++) {
        char name[32];
        tick_name(name, s, t);
        printf("%s\"%s\"", t ? "," : "", name);
    }
    printf("],\"buffers\":[");
    for (int i = 0; i < p->buffer_count; i++) {
        const Buffer *b = &p->buffers[i];
        printf("%s\n{\"name\":\"%s\",\"group\":\"%s\",\"bytes\":%" PRIu64
               ",\"offset\":%" PRIu64 ",\"first\":%d,\"last\":%d,\"home\":\"%s\"}",
               i ? "," : "", b->name, group_names[b->group], b->bytes, b->offset, b->first, b->last,
               b->placement == PLACE_HOST ? "host" : "device");
    }
    printf("]}\n");
}

// Prints the common rule of thumb for memory and why the plan differs. The rule: 16 bytes per
// parameter for weights, gradients and moments, every activation in fp32, and 2 GB for libraries.
static void plan_print_thumb(const Plan *p, uint64_t total) {
    const Settings *s = &p->settings;
    const Model *m = &s->model;
    if (s->forward) {
        return;  // the rule is for training
    }
    double N = (double)s->B * s->T, parameters = (double)model_parameters(m);
    double activations = N * ((16.0 * m->L + 1) * m->C + m->Vp);
    double thumb = 16 * parameters + 4 * activations + 2e9;
    printf("\n");
    print_wrapped(0, "rule of thumb: 16 B x parameters + 4 B x activations + 2 GB = %s + %s + 1.86 "
                  "GiB = %s; the plan: %s", bytes_text(16 * parameters).s,
                  bytes_text(4 * activations).s, bytes_text(thumb).s, bytes_text((double)total).s);
    print_wrapped(0, "The plan differs because it keeps %d of %d logit rows, shares the bytes of "
                  "buffers that are never in use together, counts each type's own size, and "
                  "reserves for libraries only what is stated above.", s->logit_rows,
                  s->B * s->T);
}

// Prints a line of the plan's table: exact bytes for scripts, rounded ones for readers.
static void plan_print_line(const char *name, uint64_t bytes, const char *note) {
    const int column = printf("%-22s %16s %11s%s", name, count_text((int64_t)bytes).s,
                              bytes_text((double)bytes).s, note[0] ? "   " : "");
    text_wrap(note, column, 4);
}

// Prints the part of --plan that only GPU runs have: libraries, host memory, and the bytes that a
// step transfers if buffers are offloaded or sharded.
static void plan_print_gpu(const Plan *p, const MemoryBudget *budget, const Options *o) {
    const Settings *s = &p->settings;
    const int micros = (int)max_i64(step_micros(o, s), 1);
    const Traffic t = step_traffic(s, micros);
    char note[96], step[48] = "one micro-step";
    plan_print_line("library", budget->library, budget->library_from);
    if (s->ranks > 1) {
        snprintf(note, sizeof note, "reserved: %d MiB x %d thread blocks x (%d peers + 1)%s",
                 NCCL_MIB, s->ctas, nccl_peers(s), s->nvlink ? " + NVLS" : "");
        plan_print_line("NCCL", nccl_estimate_bytes(s), note);
    }
    plan_print_line("total per GPU", p->device_bytes + outside_bytes(budget, s),
                    "with the reserve");
    plan_print_line(s->ranks > 1 ? "host memory per GPU" : "host memory", p->host_bytes, "");
    if (micros > 1) {
        snprintf(step, sizeof step, "%d micro-steps", micros);
    }
    if (t.up + t.down > 0) {
        print_wrapped(4, "a step of %s uploads %s to the GPU and downloads %s", step,
                      bytes_text(t.up).s, bytes_text(t.down).s);
    }
    if (s->ranks > 1) {
        print_wrapped(4, "a step of %s sends %s from each GPU: %s to reduce gradients, %s to "
                      "gather", step, bytes_text(t.reduced + t.gathered).s,
                      bytes_text(t.reduced).s, bytes_text(t.gathered).s);
    }
}

// Formats a time in its two largest units: "42 s", "3 min 20 s", "5 h 3 min", "7 d 1 h".
static ShortText span_text(double seconds) {
    static const char *const units[] = {"d", "h", "min", "s"};
    static const int64_t lengths[] = {86400, 3600, 60, 1};
    const int64_t s = (int64_t)ceil(seconds);
    ShortText text;
    int i = 0;
    while (i < 3 && s < lengths[i]) {
        i++;
    }
    int n = snprintf(text.s, sizeof text.s, "%" PRId64 " %s", s / lengths[i], units[i]);
    const int64_t rest = i < 3 ? s % lengths[i] / lengths[i + 1] : 0;
    if (rest) {
        text_add(text.s, sizeof text.s, n, " %" PRId64 " %s", rest, units[i + 1]);
    }
    return text;
}

// Prints the forecast speed and the time for -x steps, or for a billion tokens without -x; also the
// speed with the default kernels if a card has faster ones to prove.
static void forecast_print(const Settings *s, const MemoryBudget *budget, const Options *o) {
    const int64_t micros = step_micros(o, s);
    if (budget->from && micros > 0 && !s->forward) {
        const double rate = forecast_tokens_per_s(&budget->speed, s, micros);
        const int64_t run = o->steps * micros * s->ranks * s->B * s->T;
        const int64_t tokens = run ? run : 1000000000;
        print_wrapped(4, "forecast: %s tokens/s, %s tokens in %s; %s", count_text((int64_t)rate).s,
                      count_text(tokens).s, span_text((double)tokens / rate).s, budget->from);
        Rates rates = card_rates(budget->card ? budget->card : gpu_table);
        const Speed speed = speed_predict(&rates, s);
        if (rates_prove(&rates, budget->card, s, untried)) {
            const double usual = forecast_tokens_per_s(&speed, s, micros);
            print_wrapped(4, "with the default kernels: %s tokens/s; predicted",
                          count_text((int64_t)usual).s);
        }
    }
}

// Prints the table of single changes and, if the plan does not fit, the five cheapest combinations
// that make it fit, since there may be dozens.
static void plan_print_remedies(const Plan *p, const MemoryBudget *budget, const Options *o,
                                uint64_t outside) {
    enum { NAME = 29 };
    static const char *const effects[] = {"none", "split", "rounding", "numbers"};
    const int64_t micros = max_i64(step_micros(o, &p->settings), 1);
    char cost[160];
    if (p->settings.forward) {
        printf("\n");
        print_wrapped(4, "%s", plan_no_change(&p->settings));
        return;
    }
    Remedy *list = (Remedy *)alloc_zero(MAX_REMEDIES, sizeof *list);
    int n = plan_remedies(p, micros, list);
    printf("\n%-*s %10s %10s %7s %-8s %10s\n", NAME, "this setting", "saves", "new total", "slower",
           "changes", "host");
    for (int i = 0; i < n; i++) {
        const Remedy *r = &list[i];
        const int wide = (int)strlen(r->option) > NAME;
        printf("%s%s%-*s %10s %10s %5.0f %% %-8s %10s\n", wide ? r->option : "", wide ? "\n" : "",
               NAME, wide ? "" : r->option, bytes_text((double)(plan_taken(p) - r->c.bytes)).s,
               bytes_text((double)(r->c.bytes + outside)).s, fmax(100 * r->slower, 0),
               effects[r->kind],
               settings_offloads(&r->c.settings) ? bytes_text((double)r->c.host_bytes).s : "");
    }
    if (n == 0) {
        printf("no setting makes it smaller\n");
    }
    if (budget->device > 0 && plan_taken(p) > budget->device) {
        n = plan_changes(p, budget, micros, list);
        for (int i = 0; i < n && i < 5; i++) {
            print_wrapped(4, "it fits with %s: %s", list[i].option, remedy_cost(cost, &list[i]));
        }
        if (n == 0) {
            print_wrapped(4, "%s", no_change);
        }
    }
    free(list);
}

static void plan_print_settings(const Settings *s) {
    const Model *m = &s->model;
    char head[1024 + sizeof(LevelsText)];
    const int size = sizeof head;
    printf("memory plan of the %s run\n", s->gpu ? "GPU" : "CPU");
    int n = snprintf(head, sizeof head, "L%d NH%d C%d, vocabulary %d (%d rows), %s parameters; %s; "
                     "B %d, T %d%s; -r %s", m->L, m->NH, m->C, m->V, m->Vp,
                     count_text(model_parameters(m)).s, type_names[s->dtype], s->B,
                     settings_rows(s), s->cache ? " at a time" : "", recompute_text(s).s);
    if (recompute_cost(s) > 0) {
        n = text_add(head, size, n, ": %.1f %% more arithmetic", 100 * recompute_cost(s));
    }
    if (settings_offloads(s)) {
        char offload[64];
        n = text_add(head, size, n, "; --offload %s", offload_text(offload, s));
    }
    if (s->ranks > 1) {
        text_add(head, size, n, "; each of %d GPUs, -z %d", s->ranks, settings_zero(s));
    }
    text_wrap(head, 0, 4);
    printf("\n");
}

// Prints the plan by group, whether it fits the budget on the device and on the host, how much each
// setting would save, and the rule of thumb. Returns 0 if it does not fit.
static int plan_print(const Plan *p, const MemoryBudget *budget, const Options *o) {
    const Settings *s = &p->settings;
    uint64_t device[GROUPS], host[GROUPS], sum = 0;
    const uint64_t outside = outside_bytes(budget, s);
    const uint64_t total = plan_taken(p) + outside, all = budget->device + outside;
    const int fits = !budget->device || plan_taken(p) <= budget->device;
    plan_print_settings(s);
    // The groups at the peak and the fragmentation add up to the allocation.
    plan_groups(p, device, host);
    printf("%-22s %16s\n", "at the peak of a step", "bytes");
    for (int g = 0; g < GROUPS; g++) {
        if (device[g]) {
            plan_print_line(group_names[g], device[g], "");
        }
        sum += device[g];
    }
    plan_print_line("fragmentation", p->device_bytes - sum, "");
    plan_print_line(s->gpu ? "device allocation" : "allocation", p->device_bytes, "");
    if (s->gpu) {
        plan_print_gpu(p, budget, o);
    } else if (p->host_bytes) {
        plan_print_line("host buffers", p->host_bytes, "in host memory in a GPU run");
        plan_print_line("total", total, "");
    }
    const int old = card_is_too_old(budget->card);
    if (budget->device && fits && old) {
        printf("%s: %s; fits, but this program needs compute capability %.1f\n", budget->where,
               bytes_text((double)all).s, 0.1 * LEAST_CAPABILITY);
    } else if (budget->device) {
        print_wrapped(4, "%s: %s%s; %s, %s %s", budget->where, bytes_text((double)all).s,
                      available_limit, fits ? "fits" : "DOES\037NOT\037FIT",
                      bytes_text(fits ? (double)(all - total) : (double)(total - all)).s,
                      fits ? "free" : "short");
    }
    const int host_fits = p->host_bytes <= budget->host;
    if (!host_fits) {  // plan_refuse_host() would end a run
        const HostMemory h = host_memory("");
        print_wrapped(4, "host memory of this machine: %s (%s); DOES\037NOT\037FIT, %s short; "
                      "--offload fewer states", bytes_text((double)budget->host).s,
                      h.limit, bytes_text((double)(p->host_bytes - budget->host)).s);
    }
    forecast_print(s, budget, o);
    unused_print("unused memory would buy ", p, budget, o);
    plan_print_remedies(p, budget, o, outside);
    plan_print_thumb(p, total);
    return fits && host_fits;
}

// -------------------------------------------------------------------------------------------------
// 21. Searches: --fit, --minimum, --largest, all cards
// Commands that search for settings: --fit recommends some, --minimum prints those that need the
// least memory, --largest finds the largest batch or sequence length, and --plan --gpu all compares
// the cards. A run accepts what is recommended: every candidate is derived from settings that have
// passed the checks of a user's options.

// Checks the options of these commands before they are turned into settings. Ends the run if one of
// them would be ignored, or if no batch size divides -d's tokens.
static void fit_options(const Options *o, const Model *m) {
    Settings least;
    const GpuEntry *card = gpu_find(o);
    if (o->plan) {
        return;
    }
    if (!o->minimum && card_is_too_old(card)) {
        die("--%s: --gpu %s has compute capability %.1f; this program needs %.1f",
            o->fit ? "fit" : "largest", card->name, 0.1 * card_capability(card),
            0.1 * LEAST_CAPABILITY);
    }
    // If a larger batch divides the tokens per step (-d), so does the smallest one that is tried.
    memset(&least, 0, sizeof least);
    least.ranks = (int)o->gpus;
    least.B = !o->minimum && option_given(o, "batch") ? (int)o->batch : 1;
    least.T = o->seq_len ? (int)o->seq_len : m->maxT;
    if (o->largest != LARGEST_SEQ_LEN) {
        step_whole_micros(o, &least);
    }
}

// Returns 1 if candidate `c` is dominated by one of the list other than `self`: one that is no
// slower, takes no more device or host memory, and is strictly better in at least one of these (if
// all three are equal, the one earlier in the list wins).
static int candidate_is_beaten(const PlanCandidate *list, int n, const PlanCandidate *c, int self) {
    for (int k = 0; k < n; k++) {
        const PlanCandidate *g = &list[k];
        const int same = g->bytes == c->bytes && g->host_bytes == c->host_bytes &&
                         g->tokens_per_s == c->tokens_per_s;
        if (g->bytes <= c->bytes && g->host_bytes <= c->host_bytes &&
            g->tokens_per_s >= c->tokens_per_s && (!same || k < self)) {
            return 1;
        }
    }
    return 0;
}

// Begins the search of --fit: sets the base settings, which have the smallest batch, and the axes
// that the options leave open. The steps of BY_BATCH are 1, 2, 3, 4, 6, 8, 12, 16, ... sequences.
static void fit_search(Search *q, const Options *asked, const Model *m,
                       const MemoryBudget *budget) {
    const int64_t T = asked->seq_len ? asked->seq_len : m->maxT;
    const int gpu = budget->speed.gpu, one = option_given(asked, "batch");
    Options o = *asked;
    Settings base;
    o.batch = one ? asked->batch : 1;
    while (!one && o.batch * T < asked->logit_rows) {  // a run requires --logit-rows <= B x T
        o.batch = next_batch((int)o.batch);
    }
    settings_from_options(&base, &o, m, gpu);
    search_begin(q, &base, budget);
    q->mix = strcmp(o.recompute, "auto") == 0;
    q->sequences = o.tokens_per_step / (o.gpus * T);
    q->last[BY_LEVEL] = q->mix && o.fit == FIT_ALL ? RECOMPUTE_BLOCK : 0;
    q->last[BY_OFFLOAD] = o.offload == OFFLOAD_AUTO && gpu ? OFFLOAD_TIERS - 1 : 0;
    if (o.fit != FIT_BITS && base.dtype == TYPE_BF16 &&
        (!option_given(&o, "moments") || o.moments == MOMENTS_BF16)) {
        q->last[BY_TYPE] = option_given(&o, "master") && o.master == MASTER_SPLIT ? 1 : 2;
    }
    const int64_t windows = budget->windows ? budget->windows / o.gpus : INT64_MAX;
    const int64_t most = min_i64(min_i64((1 << 26) / T, (int64_t)option_find("batch")->high),
                                 q->sequences ? INT64_MAX : windows);
    for (int *last = &q->last[BY_BATCH];
         !one && *last + 1 < MAX_BATCHES && next_batch(q->batch[*last]) <= most; ++*last) {
        q->batch[*last + 1] = next_batch(q->batch[*last]);
    }
}

// Lists the candidates of --fit that fit: batches up to the first that does not fit, at each number
// type, offload tier and recomputation level. Returns their number; 0 if a step takes more
// sequences than the data has.
enum { MAX_CANDIDATES = 4096 };
static int fit_candidates(PlanCandidate list[MAX_CANDIDATES], Search *q, int64_t windows) {
    int n = 0, steps[AXES] = {0};
    const int64_t step = q->sequences ? q->sequences : q->base.B;
    Verdict verdict = FITS;
    if (windows && step * q->base.ranks > windows) {
        return 0;
    }
    do {
        PlanCandidate *c = &list[n];
        memcpy(c->steps, steps, sizeof steps);
        verdict = candidate_try(c, q);
        n += verdict == FITS;
        q->better = list;
        q->better_count = q->last[BY_LEVEL] ? n : 0;
    } while (n < MAX_CANDIDATES &&
             search_next(q, steps, verdict == TOO_LARGE || verdict == CHANGES_NOTHING));
    return n;
}

// Returns the simplest candidate within half a percent of the fastest, among those with the given
// steps of BY_TYPE and BY_OFFLOAD (-1: any), or NULL if there is none.
static const PlanCandidate *fit_fastest(const PlanCandidate *list, int n, int type, int tier) {
    const PlanCandidate *best = NULL;
    double most = 0;
    for (int i = 0; i < 2 * n; i++) {
        const PlanCandidate *c = &list[i % n];
        if ((type < 0 || c->steps[BY_TYPE] == type) && (tier < 0 || c->steps[BY_OFFLOAD] == tier)) {
            most = fmax(most, c->tokens_per_s);  // final after the first n iterations
            if (i >= n && c->tokens_per_s >= 0.995 * most &&
                (!best || candidate_is_simpler(c, best))) {
                best = c;
            }
        }
    }
    return best;
}

// Returns the candidate that --fit recommends. With -d, which fixes the tokens per step (`held`),
// it is the fastest overall. Without -d, step sizes differ, so speeds are not comparable across
// offload tiers: it is the fastest on the lowest tier that fits.
static const PlanCandidate *fit_choose(const PlanCandidate *list, int n, int held) {
    const PlanCandidate *best = held ? fit_fastest(list, n, -1, -1) : NULL;
    for (int tier = 0; tier < OFFLOAD_TIERS && !best; tier++) {
        best = fit_fastest(list, n, -1, tier);
    }
    return best;
}

// Compares candidates by device bytes, then by host bytes.
static int by_bytes(const void *a, const void *b) {
    const PlanCandidate *x = (const PlanCandidate *)a, *y = (const PlanCandidate *)b;
    return x->bytes != y->bytes ? (x->bytes > y->bytes) - (x->bytes < y->bytes)
                                : (x->host_bytes > y->host_bytes) - (x->host_bytes < y->host_bytes);
}

// Selects the rows of --fit's table: the fastest candidate of each number type and offload tier or,
// with `all`, every candidate that is not dominated, sorted by device bytes. Returns their number.
static int fit_rows(PlanCandidate *rows, const PlanCandidate *list, int n, int all) {
    int count = 0;
    for (int i = 0; i < n && all; i++) {
        if (!candidate_is_beaten(list, n, &list[i], i)) {
            rows[count++] = list[i];
        }
    }
    for (int i = 0; i < 3 * OFFLOAD_TIERS && !all; i++) {
        const PlanCandidate *c = fit_fastest(list, n, i / OFFLOAD_TIERS, i % OFFLOAD_TIERS);
        if (c) {
            rows[count++] = *c;
        }
    }
    if (all) {
        qsort(rows, (size_t)count, sizeof *rows, by_bytes);
    }
    return count;
}

// Prints one candidate as a row of --fit's table: its bytes, its speed, and as many of its settings
// as fit the line; the others follow on the next one.
static void fit_print_row(const PlanCandidate *c) {
    char offload[64], text[sizeof(LevelsText) + 128];
    const Settings *s = &c->settings;
    const int column = printf("%5d %10s %10s %10s  ", s->B, bytes_text((double)c->bytes).s,
                              bytes_text((double)c->host_bytes).s,
                              count_text((int64_t)c->tokens_per_s).s);
    int n = snprintf(text, sizeof text, "%s%s%s -r %s", type_names[s->dtype],
                     s->moment_dtype == TYPE_BF16 ? " --moments bf16" : "",
                     s->dtype == TYPE_BF16 && !s->split_master ? " -w none" : "",
                     recompute_text(s).s);
    if (settings_offloads(s)) {
        text_add(text, sizeof text, n, " --offload %s", offload_text(offload, s));
    }
    text_wrap(text, column, 8);
}

// Prints `lead` and which of these settings change the numbers that a run computes. `split` is
// appended to the part about the settings that do not.
static void print_changes(const char *lead, const Settings *s, const char *split) {
    print_wrapped(4, "%ssame bits as any other -r and --offload%s%s%s", lead, split,
                  s->moment_dtype == TYPE_BF16 ? "; --moments bf16 changes numbers" : "",
                  s->dtype == TYPE_BF16 && !s->split_master ? "; -w none changes numbers" : "");
}

// Returns the text to append to a number of bytes per GPU; "" with one GPU.
static ShortText each_text(const Options *o) {
    ShortText text = {""};
    if (o->gpus > 1) {
        snprintf(text.s, sizeof text.s, ", each of %d GPUs", (int)o->gpus);
    }
    return text;
}

static void candidate_print_json(const PlanCandidate *c, const Options *asked,
                                 const MemoryBudget *budget) {
    printf("{");
    settings_print_json(asked, &c->settings, budget, c->bytes, c->host_bytes, c->tokens_per_s);
    printf("}");
}

// Prints the JSON of --fit or --largest up to the list of candidates.
static void search_print_json(const Options *o, const char *query, const MemoryBudget *budget,
                              const PlanCandidate *best) {
    printf("{\"query\":\"%s\",\"model\":", query);
    word_print(o->model, 1);
    printf(",\"fits\":%s,\"available_bytes\":%" PRIu64 ",\"forecast\":\"%s\",\"best\":",
           best ? "true" : "false", (uint64_t)budget->device, budget->from ? budget->from : "");
    if (best) {
        candidate_print_json(best, o, budget);
    } else {
        printf("null");
    }
}

// Runs --fit. Returns the program's exit status: 3 if nothing fits.
static int fit_command(const Options *o, const Model *m, const MemoryBudget *budget) {
    PlanCandidate *list = (PlanCandidate *)alloc_zero(MAX_CANDIDATES, sizeof *list);
    PlanCandidate *rows = (PlanCandidate *)alloc_zero(MAX_CANDIDATES, sizeof *rows);
    Search q;
    fit_search(&q, o, m, budget);
    const int n = fit_candidates(list, &q, budget->windows), T = q.base.T;
    const int64_t step = (q.sequences ? q.sequences : q.base.B) * o->gpus;
    const PlanCandidate *best = fit_choose(list, n, o->tokens_per_step > 0);
    const int count = fit_rows(rows, list, n, o->fit == FIT_ALL);
    const int little_data = budget->windows && budget->windows < step;
    if (o->json) {
        search_print_json(o, "fit", budget, best);
        printf(",\"candidates\":[");
        for (int i = 0; i < count; i++) {
            printf(i ? ",\n" : "\n");
            candidate_print_json(&rows[i], o, budget);
        }
        printf("]}\n");
        free(list);
        free(rows);
        return best ? 0 : little_data ? 1 : STATUS_TOO_LARGE;
    }
    print_wrapped(4, "%s: settings whose plan fits in %s%s; tokens/s %s%s", o->model,
                  bytes_text((double)budget->device).s, each_text(o).s,
                  o->gpus > 1 ? "of all " : "",
                  budget->from        ? budget->from
                  : budget->speed.gpu ? "of a 4090 in bf16, for comparison: this GPU's are unknown"
                                      : "of two cores, for comparison: this machine's are unknown");
    if (best) {
        printf("%5s %10s %10s %10s  settings\n", "B", "device", "host", "tokens/s");
        for (int i = 0; i < count; i++) {
            fit_print_row(&rows[i]);
        }
        printf(o->tokens_per_step ? "fastest: " : "least on the host, then fastest: ");
        settings_print_command(o, &best->settings, 0);
        print_changes("", &best->settings,
                      o->tokens_per_step ? "; -d keeps the step's tokens, in another split"
                                         : "; a step is B x T tokens unless -d says otherwise");
    } else if (little_data) {
        print_wrapped(4, "nothing fits: %s has %s sequences of %d tokens, and a step takes %s",
                      o->train_data, count_text(budget->windows).s, T, count_text(step).s);
    } else {
        printf("nothing fits: --minimum prints the least memory\n");
    }
    free(list);
    free(rows);
    return best ? 0 : little_data ? 1 : STATUS_TOO_LARGE;
}

// Plans the settings that take the least memory, at B = 1: on a GPU without offload or with all
// states in host memory, or for the CPU program. Narrow number types are used only if nothing is
// offloaded, because states in host memory take no device memory.
static void minimum_plan(PlanCandidate *c, const Options *asked, const Model *m, int gpu,
                         int offload) {
    MemoryBudget all;
    Search q;
    Options o = *asked;
    memset(&all, 0, sizeof all);
    all.device = all.host = UINT64_MAX;
    o.batch = 1;
    o.recompute = "none";
    settings_from_options(&q.base, &o, m, gpu);
    const Settings base = q.base;
    all.speed = speed_usual(&base);
    search_begin(&q, &base, &all);
    memset(c, 0, sizeof *c);
    c->steps[BY_LEVEL] = RECOMPUTE_BLOCK;
    c->steps[BY_SCRATCH] = 1;
    c->steps[BY_OFFLOAD] = offload ? OFFLOAD_TIERS - 1 : 0;
    c->steps[BY_TYPE] = gpu && !offload && base.dtype == TYPE_BF16 ? 2 : 0;
    candidate_apply(c, &q);
    candidate_plan(c, &q);
}

// Returns why this program cannot run with these options on a card, or NULL. Options that need bf16
// are then set to their defaults, so that a plan for the card can still be made.
static const char *card_unable(Options *o, const GpuEntry *card) {
    const int wants = o->dtype == DTYPE_BF16 || o->grad_dtype == GRADS_BF16 ||
                      o->moments == MOMENTS_BF16 || o->master == MASTER_NONE;
    if (card_capability(card) >= BF16_CAPABILITY || !(wants || card_is_too_old(card))) {
        return NULL;
    }
    o->dtype = o->dtype == DTYPE_BF16 ? 0 : o->dtype;
    o->grad_dtype = 0;
    o->moments = MOMENTS_FP32;
    o->master = MASTER_SPLIT;
    return card_is_too_old(card) ? "this program needs compute capability 7.5" : "no bf16";
}

// Lists the up to three smallest cards on which the settings of minimum_plan() fit, as words or as
// JSON. Returns their number.
static int minimum_cards(char text[160], const Options *asked, const Model *m, int offload,
                         int json) {
    const GpuEntry *best[3] = {NULL, NULL, NULL};
    int count = 0, n = 0;
    for (int i = 0; i < GPU_CARDS; i++) {
        const GpuEntry *card = &gpu_table[i];
        Options o = *asked;
        PlanCandidate c;
        o.gpu = card->name;
        if (card_unable(&o, card) || (best[2] && best[2]->gib <= card->gib)) {
            continue;
        }
        minimum_plan(&c, &o, m, 1, offload);
        if (c.bytes > budget_named(&o, &c.settings).device) {
            continue;
        }
        int at = min_int(count, 2);
        for (; at > 0 && best[at - 1]->gib > card->gib; at--) {
            best[at] = best[at - 1];
        }
        best[at] = card;
        count = min_int(count + 1, 3);
    }
    text[0] = 0;
    for (int i = 0; i < count; i++) {
        n = text_add(text, 160, n, json ? "%s\"%s\"" : "%s%s", i == 0 ? "" : json ? "," : ", ",
                     best[i]->name);
    }
    return count;
}

// Runs --minimum: prints the least memory that a run can take on a GPU with nothing offloaded, on a
// GPU with all states in host memory (with several GPUs all but the gradients, which stay on the
// device) and, if `cpu` is set and the CPU program supports the given options, for the CPU program.
static void minimum_command(const Options *asked, const Model *m, int cpu) {
    static const char *const titles[] = {"GPU, nothing offloaded", "GPU, everything on the host",
                                         "CPU", "GPU, all but gradients on the host"};
    const int narrow = (asked->dtype && asked->dtype != DTYPE_FP32) || asked->grad_dtype ||
                       asked->workspace;
    const int rows = 2 + (cpu && !narrow && asked->gpus == 1);
    printf(asked->json ? "{\"query\":\"minimum\",\"minimum\":[" : "");
    for (int i = 0; i < rows; i++) {
        const int gpu = i < 2;
        char cards[160];
        PlanCandidate c;
        MemoryBudget budget;
        memset(&budget, 0, sizeof budget);
        minimum_plan(&c, asked, m, gpu, i == 1);
        budget.library = gpu ? card_library_bytes(gpu_find(asked)) : 0;
        snprintf(budget.library_from, sizeof budget.library_from,
                 asked->gpu[0] ? "estimated" : "assumed");
        const uint64_t outside = outside_bytes(&budget, &c.settings);
        const int found = gpu ? minimum_cards(cards, asked, m, i == 1, (int)asked->json) : 0;
        if (asked->json) {
            printf("%s\n{\"target\":\"%s\",\"cards\":[%s],", i ? "," : "", gpu ? "gpu" : "cpu",
                   found ? cards : "");
            settings_print_json(asked, &c.settings, &budget, c.bytes, c.host_bytes, 0);
            printf("}");
            continue;
        }
        char text[512];
        int n = snprintf(text, sizeof text, "%s: %s", titles[i == 1 && asked->gpus > 1 ? 3 : i],
                         bytes_text((double)(c.bytes + outside)).s);
        if (gpu) {
            n = text_add(text, sizeof text, n, " = %s and %s for libraries (%s)",
                         bytes_text((double)c.bytes).s, bytes_text((double)outside).s,
                         budget.library_from);
        }
        n = text_add(text, sizeof text, n, ", %s of host memory%s",
                     bytes_text((double)c.host_bytes).s, each_text(asked).s);
        if (gpu) {
            text_add(text, sizeof text, n, "; smallest cards: %s", found ? cards : "none");
        }
        text_wrap(text, 0, 2);
        printf("  ");
        settings_print_command(asked, &c.settings, 0);
        print_changes("  ", &c.settings,
                      gpu ? "; --logit-rows, --workspace and -b change rounding"
                          : "; --logit-rows and -b change rounding");
    }
    printf(asked->json ? "]}\n" : "");
}

// Sets the value that --largest varies. Returns whether a run accepts it with --logit-rows and -d.
static int largest_set(Options *o, const Model *m, int64_t value) {
    *(o->largest == LARGEST_BATCH ? &o->batch : &o->seq_len) = value;
    const int64_t N = o->batch * (o->seq_len ? o->seq_len : m->maxT);
    return o->logit_rows <= N && (!o->tokens_per_step || o->tokens_per_step % (o->gpus * N) == 0);
}

// Plans a candidate of --largest. Returns whether it fits.
static int largest_try(PlanCandidate *c, const Options *o, const Model *m,
                       const MemoryBudget *budget) {
    Search q;
    Settings s;
    settings_from_options(&s, o, m, budget->speed.gpu);
    settings_auto(&s, o, budget);
    memset(c, 0, sizeof *c);
    search_begin(&q, &s, budget);
    q.speed = budget->card ? budget_named(o, &s).speed : budget->speed;  // it depends on T
    q.sequences = o->tokens_per_step / (o->gpus * s.T);
    return candidate_try(c, &q) == FITS;
}

// Runs --largest: finds the largest batch or sequence length that fits, by bisection over the
// possible values. Returns the program's exit status: 3 if not even the smallest fits.
static int largest_command(const Options *asked, const Model *m, const MemoryBudget *budget) {
    const int batch = asked->largest == LARGEST_BATCH;
    Options o = *asked;
    PlanCandidate best, c;
    o.offload = option_given(asked, "offload") ? asked->offload : 0;
    const int64_t other = batch ? (o.seq_len ? o.seq_len : m->maxT) : o.batch;
    int64_t most = batch ? (int64_t)option_find("batch")->high : m->maxT;
    most = min_i64(most, (1 << 26) / other);
    most = budget->windows && batch ? min_i64(most, budget->windows / o.gpus) : most;
    int64_t *values = (int64_t *)alloc_zero((size_t)most + 1, sizeof *values), count = 0, found = 0;
    for (int64_t value = 1; value <= most; value++) {
        values[count] = value;
        count += largest_set(&o, m, value);
    }
    for (int64_t end = count; found < end;) {  // the first `found` fit, those from `end` do not
        const int64_t middle = found + (end - found) / 2;
        largest_set(&o, m, values[middle]);
        if (largest_try(&c, &o, m, budget)) {
            best = c;
            found = middle + 1;
        } else {
            end = middle;
        }
    }
    if (!count) {
        die("--largest %s: no value agrees with --tokens-per-step (-d) and --logit-rows",
            choice_text(largests, o.largest).s);
    }
    if (o.json) {
        search_print_json(&o, "largest", budget, found ? &best : NULL);
        printf(",\"largest\":\"%s\",\"value\":%" PRId64 "}\n", choice_text(largests, o.largest).s,
               found ? values[found - 1] : 0);
    } else if (!found) {
        print_wrapped(4, "nothing fits in %s: --minimum prints the least memory",
                      bytes_text((double)budget->device).s);
    } else {
        print_wrapped(4, "largest --%s that fits%s: %" PRId64 "%s; device %s of %s, host %s",
                      choice_text(largests, o.largest).s, each_text(&o).s, values[found - 1],
                      found < count ? "" : batch ? " (no larger one is possible)"
                                                 : " (the model has no more positions)",
                      bytes_text((double)best.bytes).s, bytes_text((double)budget->device).s,
                      bytes_text((double)best.host_bytes).s);
        if (budget->from) {
            print_wrapped(4, "forecast: %s tokens/s; %s", count_text((int64_t)best.tokens_per_s).s,
                          budget->from);
        }
        settings_print_command(&o, &best.settings, 0);
    }
    free(values);
    return found ? 0 : STATUS_TOO_LARGE;
}

// Prints the row of a card: the bytes that its plan leaves free or lacks, its forecast, and the
// settings chosen for it, the cheapest remedy (NULL: none) or why it cannot be used.
static void card_print_row(const GpuEntry *card, const Plan *p, const MemoryBudget *budget,
                           double rate, const Remedy *remedy, const char *unable) {
    const Settings *s = &p->settings;
    const uint64_t bytes = plan_taken(p);
    const int fits = bytes <= budget->device;
    char text[512], bytes_left[48], cost[160], offload[64];
    snprintf(bytes_left, sizeof bytes_left, "%s %s",
             bytes_text(fits ? (double)(budget->device - bytes)
                             : (double)(bytes - budget->device)).s, fits ? "free" : "short");
    if (unable) {
        snprintf(text, sizeof text, "%s%s", fits ? "fits, but " : "", unable);
    } else if (fits) {
        snprintf(text, sizeof text, "-r %.200s --offload %s", recompute_text(s).s,
                 offload_text(offload, s));
    } else if (remedy) {
        snprintf(text, sizeof text, "%s: %s", remedy->option, remedy_cost(cost, remedy));
    } else {
        snprintf(text, sizeof text, "no settings make it fit");
    }
    const int column = printf("%-12s %10s %15s %10s  ", card->name,
                              bytes_text(card->gib * 0x1p30).s, bytes_left,
                              rate > 0 && budget->from ? count_text((int64_t)rate).s : "-");
    text_wrap(text, column, 14);
}

// Runs --plan --gpu all: plans the run for each card, with the automatic choices for that card.
// Returns the program's exit status: 3 if it fits none.
static int cards_command(const Options *asked, const Model *m) {
    Remedy *list = (Remedy *)alloc_zero(MAX_REMEDIES, sizeof *list);
    int any = 0;
    if (asked->json) {
        printf("{\"query\":\"cards\",\"cards\":[");
    } else {
        printf("%-12s %10s %15s %10s  settings or remedy\n", "card", "memory", "plan",
               "tokens/s");
    }
    for (int i = 0; i < GPU_CARDS; i++) {
        const GpuEntry *card = &gpu_table[i];
        Options o = *asked;
        Settings s;
        Plan p;
        o.gpu = card->name;
        const char *unable = card_unable(&o, card);
        settings_from_options(&s, &o, m, 1);
        settings_auto_batch(&s, &o, gpu_memory_from_options(&o), 1 << 26);
        const int64_t micros = step_whole_micros(&o, &s);
        const MemoryBudget budget = budget_named(&o, &s);
        settings_auto(&s, &o, &budget);
        plan_build(&p, &s);
        const int fits = !unable && plan_taken(&p) <= budget.device;
        const int n = fits || unable ? 0 : plan_changes(&p, &budget, micros, list);
        const double rate = fits ? forecast_tokens_per_s(&budget.speed, &s, micros) : 0;
        any |= fits;
        if (asked->json) {
            printf("%s\n{\"gpu\":\"%s\",\"memory_bytes\":%.0f,\"supported\":%s,", i ? "," : "",
                   card->name, floor(card->gib * 0x1p30), unable ? "false" : "true");
            verdict_print_json(&budget, plan_taken(&p), p.host_bytes);
            printf(",");
            settings_print_json(&o, &s, &budget, plan_taken(&p), p.host_bytes, rate);
            printf(",\"takes\":%s%s%s}", n ? "\"" : "", n ? list[0].option : "null", n ? "\"" : "");
        } else {
            card_print_row(card, &p, &budget, rate, n ? &list[0] : NULL, unable);
        }
        plan_free(&p);
    }
    printf(asked->json ? "]}\n" : "tokens/s are predicted, not measured\n");
    free(list);
    return any ? 0 : STATUS_TOO_LARGE;
}

// -------------------------------------------------------------------------------------------------
// 22. Measured speed
// The speed of this machine, from which a plan forecasts a run: on the CPU small models are timed
// for every plan; on a GPU the speed is the one that earlier runs measured and cached.

// Returns the time of a micro-step in seconds, and sets *update to that of an optimizer update, for
// a model with settings `s` and arbitrary weights: medians of three, after a warm-up.
static double engine_seconds(const Program *program, const Settings *s, double *update) {
    enum { TIMES = 3 };
    double micro_ms[TIMES], update_ms[TIMES];
    const int N = s->B * s->T;
    const int64_t all = tensor_offset(&s->model, TENSORS, 0);
    real *piece = (real *)alloc_zero(PIECE, sizeof(real));
    Token *tokens = (Token *)alloc_zero((size_t)N, sizeof(Token));
    Options o;
    Plan p;
    Engine e;
    options_default(&o);
    plan_build(&p, s);
    program->open(&e, &p);
    for (int i = 0; i < PIECE; i++) {  // all-zero weights would be faster
        piece[i] = (real)(0.004 * (i * 7 % 11 - 5));
    }
    for (int64_t i = 0; i < all; i += PIECE) {
        e.write(&e, STATE_WEIGHTS, i, piece, min_i64(PIECE, all - i));
    }
    for (int i = 0; i < N; i++) {
        tokens[i] = (Token)((int64_t)i * 7919 % s->model.V);
    }
    for (int k = -1; k < TIMES; k++) {
        const double start = now_ms();
        e.micro_step(&e, tokens, tokens, 0, 1);
        e.read(&e, STATE_WEIGHTS, 0, piece, 1);  // waits for queued work
        const double middle = now_ms();
        e.update(&e, &o, 0, HUGE_VAL, 0);
        micro_ms[max_i64(k, 0)] = middle - start;
        update_ms[max_i64(k, 0)] = now_ms() - middle;
    }
    e.close(&e);
    plan_free(&p);
    free(piece);
    free(tokens);
    *update = 1e-3 * median(update_ms, TIMES);
    return 1e-3 * median(micro_ms, TIMES);
}

// Returns the estimated FLOPs of a calibration (speed_measure): four micro-steps each of two
// blocks, of two blocks with recomputation, and of one block with the vocabulary.
static double calibration_flops(const Settings *s) {
    const double C = s->model.C;
    return (800 * C * C + 24 * C * s->model.Vp) * s->B * s->T;
}

// Returns the settings of a calibration: two blocks of the run's width, with B and then T halved
// until it takes at most `flops`. Stops there, because the activations of a very small batch would
// stay in caches.
static Settings calibration_settings(const Settings *run, double flops) {
    Settings s = *run;
    memset(s.placement, 0, sizeof s.placement);
    s.model.L = 2;
    settings_recompute(&s, RECOMPUTE_NONE, 0);
    while (s.B > 1 && calibration_flops(&s) > flops) {
        settings_batch(&s, s.B / 2);
    }
    while (s.T > 64 && calibration_flops(&s) > flops) {
        s.T /= 2;
        s.logit_rows = (int)min_i64(s.logit_rows, (int64_t)s.B * s.T);
    }
    return s;
}

// Measures how fast this machine is at a run's settings: the default rates (speed_usual), corrected
// by the times of small models with one and with two of the run's blocks. Two blocks with a tiny
// vocabulary give the time of the blocks, the same with -r block the time of recomputation, and one
// block with the run's vocabulary the time of everything else. A smaller batch is assumed to take
// the same time per token. `dev/bench/cpu.c forecast` compares the result with the steps of ten
// settings. Returns 0 if the small models need more than `bytes` of memory, or timing them more
// than `flops` FLOPs.
static int speed_measure(Speed *speed, const Program *program, const Settings *run, uint64_t bytes,
                         double flops) {
    enum { TWO, AGAIN, ONE, MODELS };
    Settings s = calibration_settings(run, flops);
    if (calibration_flops(&s) > flops) {
        return 0;
    }
    double seconds[MODELS] = {0}, predicted[MODELS] = {0}, rest[MODELS] = {0}, update[MODELS];
    Speed v = speed_usual(run);
    for (int i = 0; i < MODELS; i++) {
        s.model.L = i == ONE ? 1 : 2;
        model_set_vocabulary(&s.model, i == ONE ? run->model.V : min_int(run->model.V, 128));
        settings_recompute(&s, i == AGAIN ? RECOMPUTE_BLOCK : RECOMPUTE_NONE, s.model.L);
        if (plan_bytes(&s) > bytes) {
            return 0;
        }
        const Speed usual = speed_usual(&s);
        predicted[i] = forecast_micro(&usual, &s, 1);
        rest[i] = forecast_micro(&usual, &s, 0);
        seconds[i] = engine_seconds(program, &s, &update[i]);
        v.byte = i == ONE ? update[i] / update_bytes(&s) : v.byte;
    }
    // Blocks have two factors: one for the stages that may be recomputed, one for the others.
    const double repeat = predicted[AGAIN] - predicted[TWO];
    const double others = predicted[TWO] - rest[TWO] - repeat;
    const double again = fmax((seconds[AGAIN] - seconds[TWO]) / repeat, 0.01);
    const double blocks = seconds[TWO] * (1 - rest[TWO] / predicted[TWO]);
    const double other = fmax((blocks - again * repeat) / others, 0.01);
    const double outside = fmax((seconds[ONE] - blocks / 2) / rest[ONE], 0.01);
    for (int stage = 0; stage < STAGES; stage++) {
        v.token[stage] *= stage <= F_GELU ? again : stage < BLOCK_STAGES ? other : outside;
    }
    v.block *= other;
    v.chunk *= outside;
    v.step = 0;
    *speed = v;
    return 1;
}

// Writes the cache key of a GPU's speed, which contains all that the speed depends on: GPU name,
// model width, batch and types.
static void speed_key(char key[192], const char *device, const Settings *s) {
    const Model *m = &s->model;
    snprintf(key, 192, "%.80s: C %d NH %d V %d B %d T %d rows %d types %d %d %d %d", device, m->C,
             m->NH, m->V, s->B, s->T, s->logit_rows, (int)s->dtype, (int)s->grad_dtype,
             (int)s->moment_dtype, s->split_master);
}

// Reads the last speed cached for `key`. Each line of the cache file is a key followed by the
// numbers of a Speed. Returns 0 if there is none.
static int speed_load(Speed *speed, const char *key) {
    char line[1024];
    int found = 0;
    FILE *f = cache_open("speed", "r");
    while (f && fgets(line, sizeof line, f)) {
        const size_t n = strlen(key);
        Speed v = *speed;
        double *const numbers[] = {&v.block, &v.chunk, &v.byte, &v.link_byte};
        char *text = line + n, *end = text;
        if (strncmp(line, key, n) != 0 || line[n] != '\t') {
            continue;
        }
        for (int i = 0; i < STAGES + 4 && end; i++, text = end) {
            double *number = i < STAGES ? &v.token[i] : numbers[i - STAGES];
            *number = strtod(text, &end);
            end = end != text && *number >= 0 && isfinite(*number) ? end : NULL;
        }
        if (end && *end == '\n') {
            v.step = 0;
            *speed = v;
            found = 1;
        }
    }
    if (f) {
        fclose(f);
    }
    return found;
}

// Appends a speed to the cache in one write, so that concurrent runs do not mix their lines.
static void speed_save(const Speed *v, const char *key) {
    char line[1024];
    int n = snprintf(line, sizeof line, "%s\t", key);
    for (int i = 0; i < STAGES; i++) {
        n = text_add(line, sizeof line, n, "%.6g ", v->token[i]);
    }
    n = text_add(line, sizeof line, n, "%.6g %.6g %.6g %.6g\n", v->block, v->chunk, v->byte,
                 v->link_byte);
    FILE *f = cache_open("speed", "a");
    if (f) {
        fwrite(line, 1, (size_t)n, f);
        fclose(f);
    }
}

// Fills in the speed of this machine for a plan, if it can be measured or is cached. The CPU's
// speed is measured, which may take no longer than three steps, or than 15 % of a run of `steps`
// steps (0: unknown); half of that limit is for the FLOPs that calibration_flops() counts. A GPU's
// speed is read from the cache or, without a measured one, predicted.
static void budget_measure(MemoryBudget *budget, const Program *program, const Settings *s,
                           int64_t micros, int64_t steps) {
    const double step = model_flops_per_token(&s->model, s->T) * s->B * s->T * (double)micros;
    const double most = step / 2 * fmin(3, steps ? 0.15 * (double)steps : 3);
    char key[192], device[96] = "";
    if (s->ranks > 1 || s->forward) {
        return;
    }
    if (program->device) {
        if (program->device(device)) {
            speed_key(key, device, s);
            budget->from = speed_load(&budget->speed, key) ? "measured on this GPU"
                                                           : program->predict(&budget->speed, s);
        }
        return;
    }
    const double flops = fmin(4e11, most);
    const Settings small = calibration_settings(s, flops);
    if (calibration_flops(&small) > 2e10) {  // fewer take less than 0.5 s on two cores
        printf("measuring this machine's speed for the forecast\n");
        fflush(stdout);
    }
    if (speed_measure(&budget->speed, program, s, budget->device, flops)) {
        budget->from = "measured on this machine just now";
    }
}

// Returns the estimated seconds of a micro-step at the default rates (speed_usual). If it is
// limited by computation on a GPU whose peak is known (peak_flops > 0, in FLOP/s), it is scaled by
// the ratio of the default GPU's peak to this one's.
static double micro_guess(const Settings *s, double peak_flops) {
    const Speed usual = speed_usual(s);
    const double computes = forecast_micro(&usual, s, 1);
    const double micro = forecast_step(&usual, s, 2) - forecast_step(&usual, s, 1);
    const double share = s->gpu && peak_flops > 0 ? peak_flops / rates_usual(1).matmuls : 1;
    return micro > computes ? micro : computes / share;
}

// Returns the estimated seconds of a step outside of its micro-steps, at the default rates.
static double update_guess(const Settings *s) {
    const Speed usual = speed_usual(s);
    return fmax(2 * forecast_step(&usual, s, 1) - forecast_step(&usual, s, 2), 0);
}

// Caches the speed of this GPU for later plans: the default rates (speed_usual), with all device
// rates scaled by the one factor for which the predicted time of a micro-step is `seconds`. Nothing
// is cached if the cache already has a speed for these settings, or if the run offloads states,
// because the PCIe link may then be the bottleneck.
static void speed_keep(const Program *program, const Settings *s, double seconds) {
    char key[192], device[96];
    Speed v = speed_usual(s);
    const double share = seconds / forecast_micro(&v, s, 1);
    if (settings_offloads(s) || !program->device(device)) {
        return;
    }
    speed_key(key, device, s);
    if (!speed_load(&v, key)) {
        for (int stage = 0; stage < STAGES; stage++) {
            v.token[stage] *= share;
        }
        v.block *= share;
        v.chunk *= share;
        v.byte *= share;
        speed_save(&v, key);
    }
}

// -------------------------------------------------------------------------------------------------
// 23. Start-up and main
// From options to a run, in the seven steps of program_run(); each one builds on the previous ones.
// Everything that can be refused is checked before anything is written or much memory is allocated:
// the first five steps only read, and the sixth compares the plan with the available memory.

// Step 1 with several GPUs: detects the ranks that a launcher has started, or starts those of
// --gpus; this process may then become one of them. Afterwards o->gpus is the number of ranks. Ends
// the run if this program cannot train on several ranks.
static void run_find_ranks(Run *run, const Program *program) {
    Options *o = &run->o;
    char text[64], asks[64];
    const Launcher l = launcher_find();
    const int launched = l.copies > 1;
    rank_timeout_ms = 1e3 * (double)o->timeout;
    if (!launched && o->gpus == 1) {
        if (option_given(o, "timeout")) {
            die("--timeout needs several ranks: use --gpus N or a launcher such as mpirun");
        }
        return;
    }
    if (launched && o->gpus > 1) {
        die("--gpus %" PRId64 ": a launcher has already started ranks (%s is %d); omit --gpus, or "
            "unset %s and start one process", o->gpus, l.variable, l.copies,
            l.variable);
    }
    snprintf(asks, sizeof asks, launched ? "%s is %d" : "%s %d", launched ? l.variable : "--gpus",
             launched ? l.copies : (int)o->gpus);
    if (!program->ranks_start) {
        die("%s: several ranks are not supported: %s", asks, program->alone);
    }
    if (o->check || o->compare || o->generate) {
        die("%s: --check, --compare and --generate run on one GPU only", asks);
    }
    for (int i = 0; i < OPTION_ROWS; i++) {
        const char *value = option_text(text, o, &option_rows[i]);
        rank_info.options = fnv1a(rank_info.options, value, strlen(value) + 1);
    }
    program->ranks_start(&l, (int)o->gpus);
    o->gpus = this_rank.ranks;
    o->quiet |= this_rank.rank > 0;
}

// Performs the handshake of the ranks before any of them makes its plan: settings that depend on
// the available memory are chosen identically on all ranks, for the one with the least. Ends the
// run if the ranks cannot train together. Returns the budget that every rank has; `budget` is this
// rank's.
static MemoryBudget run_handshake(Run *run, const Program *program, const MemoryBudget *budget) {
    const Options *o = &run->o;
    MemoryBudget least = *budget;
    rank_info.total = program->total ? program->total() : 0;
    rank_info.batch = options_auto_batch(o) && o->resume ? checkpoint_batch(o->output) : 0;
    if (this_rank.ranks > 1 && program->ranks_handshake) {
        Settings same = run->s;
        // These may differ between ranks.
        same.rank = same.threads = same.quiet = same.nvlink = same.ctas = 0;
        rank_info.settings = fnv1a(0, &same, sizeof same);
        rank_info.device = budget->device;
        rank_info.host = budget->host;
        rank_info.ctas = (uint64_t)run->s.ctas;
        program->ranks_handshake();
        run->s.ctas = (int)rank_info.ctas;
        least.device = (uint64_t)rank_info.device;
        least.host = (uint64_t)rank_info.host;
    }
    return least;
}

// Step 2: reads the model's sizes from -e, and opens the file if -e names one. The vocabulary is
// not known yet, except from a file.
static ModelKind run_choose_model(Run *run, const Program *program, Model *m) {
    Options *o = &run->o;
    o->model = o->model ? o->model : program->default_model;
    ModelKind kind = model_parse(m, o->model);
    if (kind == MODEL_FILE) {
        if (access(o->model, F_OK) != 0) {
            die("--model (-e): '%s' is neither a preset (d12 d24 d36 d48), nor a shape such as "
                "l4h4c128t256 or l4h4c128t256v8192, nor a file or folder",
                o->model);
        }
        model_file_open(&run->weights, o->model);
        *m = run->weights.model;
    }
    return kind;
}

// Returns whether a token file matches `pattern` and has this vocabulary (0: any).
static int data_exists(const char *pattern, int vocabulary) {
    glob_t found;
    Shard shard;
    int exists = glob(pattern, 0, NULL, &found) == 0;
    if (exists && vocabulary) {
        shard_open(&shard, found.gl_pathv[0]);
        close(shard.fd);
        exists = shard.tokenizer.vocabulary == vocabulary;
    }
    globfree(&found);
    return exists;
}

// Chooses the data of a run without -i: the first prepared data set in data/ of the working
// directory, else in data/ next to the program. One with the model's vocabulary is preferred;
// GPT-2's tokens are chosen only for GPT-2's vocabulary. Leaves the options unchanged if none is
// prepared.
static void default_data(Options *o, int vocabulary) {
    enum { NAMES = 5 };
    static const char *const names[NAMES] = {"tinyshakespeare_gpt2", "tinyshakespeare_bpe",
                                             "tinyshakespeare_bytes", "stories_bpe",
                                             "stories_bytes"};
    static char train[PATH_BYTES], val[PATH_BYTES];  // the options point to them
    const char *const folders[] = {"", program_folder()};
    for (int i = vocabulary ? 0 : 2 * NAMES; i < 4 * NAMES && !o->train_data; i++) {
        const char *folder = folders[i / NAMES % 2], *name = names[i % NAMES];
        if (i % NAMES == 0 && vocabulary != GPT2_VOCABULARY) {
            continue;
        }
        path_print(train, "%sdata/%s_train*.bin", folder, name);
        path_print(val, "%sdata/%s_val*.bin", folder, name);
        if (data_exists(train, i < 2 * NAMES ? vocabulary : 0)) {
            o->train_data = train;
            o->val_data = val;
        }
    }
}

// Ends the run if the merges in the weights' folder differ from the data's: the same id would stand
// for different text, even if the vocabularies have the same size.
static void weights_require_tokenizer(const ModelFile *weights, const Dataset *data) {
    char path[PATH_BYTES];
    Mapping map;
    model_file_beside(path, weights, "merges.txt");
    if (data->tokenizer.kind != TOKENIZER_MERGES || mapping_open(&map, path) != 0) {
        return;
    }
    const uint64_t hash = merges_hash((const char *)map.bytes, map.size);
    mapping_close(&map);
    if (hash != data->tokenizer.hash) {
        die("--model (-e): %s has the SHA-256 %016" PRIx64 "..., the merges of %s have %016" PRIx64
            "...", path, hash, data->shards[0].path, data->tokenizer.hash);
    }
}

// Chooses the data of a resume without -i: those of the newest checkpoint that can be read.
static void resume_data(Options *o) {
    static char train[PATH_BYTES], val[PATH_BYTES];  // the options point to them
    char folder[PATH_BYTES];
    if (access(o->output, F_OK) != 0) {
        return;
    }
    CheckpointList list = checkpoint_list(o->output, "");
    for (int i = 0; i < list.count && !o->train_data; i++) {
        path_print(folder, "%s/step-%08" PRId64, o->output, list.steps[i]);
        if (checkpoint_option(train, folder, "train-data") && train[0]) {
            o->train_data = train;
            o->val_data = checkpoint_option(val, folder, "val-data") && val[0] ? val : NULL;
        }
    }
    free(list.steps);
}

// Chooses the validation data of a run with -i and without -j: PREFIX_val... if the training data
// is PREFIX_train... and such files exist.
static void validation_beside(Options *o) {
    static char val[PATH_BYTES];  // the option points to it
    const char *end = shard_prefix(o->train_data);
    glob_t found;
    if (!end || strncmp(end, "_train", 6) != 0) {
        return;
    }
    path_print(val, "%.*s_val%s", (int)(end - o->train_data), o->train_data, end + 6);
    if (glob(val, 0, NULL, &found) == 0) {
        o->val_data = val;
    }
    globfree(&found);
}

// Sets the model's vocabulary: the preset's, the shape's, the file's or the data's. Without data
// (--plan), a shape uses the vocabulary of bytes. Ends the run if the vocabulary of a shape or file
// differs from the data's, because the same token id would stand for different text.
static void model_vocabulary(Model *m, ModelKind kind, const Options *o, const Dataset *data) {
    const int V = data ? data->tokenizer.vocabulary : 0;
    switch (kind) {
        case MODEL_PRESET:
            model_set_vocabulary(m, GPT2_VOCABULARY);
            if (data && V > m->V) {
                die("--model (-e): %s has GPT-2's vocabulary of %d; the data, %s, has one of %d: "
                    "use a shape such as l12h12c768t1024", o->model, m->V,
                    o->train_data, V);
            }
            if (data && V != GPT2_VOCABULARY && !o->quiet) {
                printf("%s has GPT-2's vocabulary of %d tokens; the data uses %d of them\n",
                       o->model, m->V, V);
            }
            break;
        case MODEL_SHAPE:
            if (m->V && data && V != m->V) {
                die("--model (-e): %s names a vocabulary of %d; the data, %s, has one of %d",
                    o->model, m->V, o->train_data, V);
            }
            model_set_vocabulary(m, m->V ? m->V : data ? V : (int)BYTE_VOCABULARY);
            break;
        case MODEL_FILE:
            if (data && V == GPT2_VOCABULARY && m->V == GPT2_PADDED) {
                if (!o->quiet) {
                    printf("%s pads GPT-2's vocabulary to %d rows; rows from %d on are kept, "
                           "and take part in the softmax, but no token refers to them\n",
                           o->model, m->V, GPT2_VOCABULARY);
                }
            } else if (data && V != m->V) {
                die("--model (-e): %s has a vocabulary of %d tokens, the data %s one of %d",
                    o->model, m->V, o->train_data, V);
            }
            break;
    }
}

// Step 3: opens the training data and sets the vocabulary. A plan needs data only for the
// vocabulary of a shape that names none; without data it assumes byte tokens.
static void run_choose_data(Run *run, Model *m, ModelKind kind) {
    Options *o = &run->o;
    if (o->resume && !o->train_data && !options_plan(o)) {
        resume_data(o);
    }
    if (o->train_data && !o->val_data && o->val_every && !options_plan(o)) {
        validation_beside(o);
    }
    if (!o->train_data && (!options_plan(o) || (kind == MODEL_SHAPE && !m->V))) {
        default_data(o, kind == MODEL_PRESET || m->V == GPT2_PADDED ? (int)GPT2_VOCABULARY : m->V);
    }
    if (!o->train_data && !options_plan(o)) {
        die("no training data: 'make data' prepares tinyshakespeare; --train-data (-i) takes token "
            "shards");
    }
    if (o->train_data && (!options_plan(o) || kind == MODEL_SHAPE || o->fit || o->largest)) {
        int64_t T = o->seq_len ? o->seq_len : m->maxT;
        dataset_open(&run->train, o->train_data, (int)min_i64(T, m->maxT));
        run->train.shuffle = (int)o->shuffle;
        run->train.seed = (uint64_t)o->seed;
    }
    model_vocabulary(m, kind, o, run->train.shards ? &run->train : NULL);
    if (kind == MODEL_FILE && run->train.shards) {
        weights_require_tokenizer(&run->weights, &run->train);
    }
}

// Returns the bytes of host memory that a process uses in addition to its plan: the matrix that
// saving a checkpoint transposes, of 16 C^2 bytes, plus a quarter of that; and 16 MiB for buffers
// of files, vocabularies and the program. If plans used all memory, as -r auto and --offload auto
// may, a job with a memory limit would be killed at its first checkpoint.
static uint64_t outside_plan_bytes(const Model *m) {
    return (16 << 20) + 20 * (uint64_t)m->C * (uint64_t)m->C;
}

// Returns the memory available to a run on this machine, and the default rates as its speed.
// --gpu-mem limits a GPU to a card of that size, less the memory of its context and libraries.
static MemoryBudget budget_at_hand(const Program *program, const Options *o, const Settings *s) {
    MemoryBudget budget;
    memset(&budget, 0, sizeof budget);
    if (o->gpu_mem && !program->gpu) {
        die("--gpu-mem: this program trains on the CPU; use --gpu-mem with --plan, --fit or "
            "--minimum to plan a GPU run");
    }
    const uint64_t nccl = nccl_estimate_bytes(s);  // allocated later than by other libraries
    const uint64_t outside = program->gpu ? 0 : outside_plan_bytes(&s->model);
    int measured = 0;
    budget.library = program->library ? program->library(&measured) : 0;
    snprintf(budget.library_from, sizeof budget.library_from,
             measured ? "measured on this GPU" : "estimated");
    budget.device = size_less(program->available(), budget.library + nccl + outside);
    if (o->gpu_mem) {
        const uint64_t cap = size_less((uint64_t)o->gpu_mem, library_reserve_bytes + nccl);
        if (cap < budget.device) {
            budget.device = cap;
            snprintf(available_limit, sizeof available_limit, " (--gpu-mem)");
        }
    }
    budget.device = (uint64_t)max_i64((int64_t)budget.device, 1);  // 0 would mean unknown
    // The ranks on a machine share its host memory.
    const uint64_t host = (uint64_t)(host_memory("").bytes / this_rank.local_ranks);
    budget.host = program->gpu ? size_less(host, outside_plan_bytes(&s->model)) : UINT64_MAX;
    budget.where = program->gpu ? "free on this GPU" : "memory available to this process";
    budget.speed = speed_usual(s);
    return budget;
}

// Ends the program if the memory available to --fit or --largest is unknown, or if libraries take
// all of it.
static void search_refuse(const Options *o, const MemoryBudget *budget, const Settings *s) {
    const char *command = o->fit ? "fit" : "largest";
    if (!o->plan && !budget->device) {
        die("--%s: %s; name a card with --gpu NAME or a size with --gpu-mem SIZE", command,
            o->gpus > 1 ? "the memory of several GPUs is unknown here" : "there is no GPU here");
    }
    if (!o->plan && budget->device <= 1 && budget->library) {
        die_status = STATUS_TOO_LARGE;
        die("--%s: %s: nothing is left for the plan: %s are reserved for libraries", command,
            budget->where, bytes_text((double)outside_bytes(budget, s)).s);
    }
}

// Runs --plan, --fit, --minimum or --largest for the card that the options name, else for this
// machine. Returns the program's exit status: 3 if nothing that was asked for fits, 1 if a card is
// too old for this program.
static int plan_command(const Run *run, const Program *program, Options *o, const Model *m) {
    Settings s;
    Plan p;
    const int named = gpu_memory_from_options(o) > 0 || o->gpus > 1, gpu = program->gpu || named;
    int fits = 1;
    fit_options(o, m);
    if (o->gpus > 1 && !o->gpu[0] && program->link) {
        machine_link = program->link((int)o->gpus);
    }
    if (o->minimum) {
        minimum_command(o, m, !program->gpu);
        return 0;
    }
    if (options_all_cards(o)) {
        return cards_command(o, m);
    }
    Options first = *o;  // --fit and --largest find a batch or length that --logit-rows allows
    first.logit_rows = o->plan ? o->logit_rows : 0;
    settings_from_options(&s, &first, m, gpu);
    if (o->plan) {
        const uint64_t total = gpu_memory_from_options(o);
        settings_auto_batch(&s, o, named ? total : program->total ? program->total() : 0, 1 << 26);
    }
    char device[96];
    const int known = !named && (!program->device || program->device(device));
    if (!known && !named && device[0]) {
        fprintf(stderr, "%s: %s\n", program_name, device);
    }
    MemoryBudget budget = known ? budget_at_hand(program, o, &s) : budget_named(o, &s);
    search_refuse(o, &budget, &s);
    if (o->generate) {
        settings_generate(&s);
    }
    const int64_t micros = o->plan ? step_whole_micros(o, &s) : 1;  // refuse what a run refuses
    if (known && (!o->json || program->device)) {  // measuring a CPU takes a while
        budget_measure(&budget, program, &s, micros, o->steps);
    }
    budget.windows = run->train.windows;
    if (!o->plan) {
        return o->fit ? fit_command(o, m, &budget) : largest_command(o, m, &budget);
    }
    settings_auto(&s, o, &budget);
    plan_build(&p, &s);
    const int unlimited = budget.device >> 60 != 0;  // the available memory is unknown
    budget.device = unlimited ? 0 : budget.device;
    if (o->json) {
        plan_print_json(&p, &budget, o);
        fits = !budget.device || (plan_taken(&p) <= budget.device && p.host_bytes <= budget.host);
    } else {
        fits = plan_print(&p, &budget, o);
        printf("%s%s", unlimited ? budget.where : "", unlimited ? ": unknown\n" : "");
    }
    plan_free(&p);
    return !fits ? STATUS_TOO_LARGE : card_is_too_old(budget.card) ? 1 : 0;
}

// Prints the start-up box: model, data, step, command and memory. It is printed before the engine
// is opened, because that may take a while; run_print_engine() then adds the device.
static void run_print_box(const Run *run) {
    const Plan *p = &run->plan;
    const Settings *s = &run->s;
    printf("model    %s: L%d NH%d C%d T%d vocabulary %d (%d rows), %s parameters\n", run->o.model,
           s->model.L, s->model.NH, s->model.C, s->model.maxT, s->model.V, s->model.Vp,
           count_text(model_parameters(&s->model)).s);
    printf("data     %s: %s tokens in %d shard%s\n", run->o.train_data,
           count_text(run->train.tokens).s, run->train.shard_count,
           run->train.shard_count == 1 ? "" : "s");
    if (!run->o.val_data) {
        printf("         no validation: --val-data (-j) is not given\n");
    }
    printf("step     %d x %d x %d", run->accum_steps, s->B, s->T);
    if (s->ranks > 1) {
        printf(" x %d GPUs", s->ranks);
    }
    printf(" = %s tokens; %s steps\n", count_text(run->windows_per_step * s->T).s,
           count_text(run->steps).s);
    printf("command  ");
    command_print(program_command, &run->o, 0);
    printf("\nmemory   %s", bytes_text((double)plan_taken(p)).s);
    uint64_t device[GROUPS], host[GROUPS];
    const char *separator = ":";
    plan_groups(p, device, host);
    for (int g = 0; g < GROUPS; g++) {
        if (device[g]) {
            printf("%s %s %s", separator, group_names[g], bytes_text((double)device[g]).s);
            separator = ",";
        }
    }
    if (settings_offloads(s)) {
        printf("; %s of %shost memory", bytes_text((double)p->host_bytes).s,
               s->gpu ? "" : "emulated ");
    }
    printf("\n");
    unused_print("         unused memory would buy ", p, &run->budget, &run->o);
    fflush(stdout);
}

static void run_print_engine(const Run *run) {
    const Engine *e = &run->engine;
    printf("device   %s\n", e->device);
    if (e->kernels_line) {
        printf("kernels  %s\n", e->kernels_line);
    }
    if (e->peak_flops > 0) {
        printf("peak     %.0f GFLOP/s, %s; FLOPs per token: 6 x (parameters + padding) + "
               "6 L C T\n\n", e->peak_flops * 1e-9, e->peak_source);
    } else {
        printf("peak     unknown: %s\n\n", e->peak_source);
    }
}

// Ends a resume if the output folder contains a checkpoint that is not named after its step, or is
// itself a checkpoint (its entry "."): starting a new run instead would clear the log.
static void refuse_renamed(const char *output) {
    static Manifest manifest;
    char path[PATH_BYTES];
    struct dirent *entry;
    DIR *folder = opendir(output);
    while (folder && (entry = readdir(folder)) != NULL) {
        path_print(path, "%s/%s/manifest.json", output, entry->d_name);
        if (strcmp(entry->d_name, "..") != 0 && !manifest_open(&manifest, path)) {
            die("--resume (-y): %s/%s is the checkpoint of step %" PRId64 "; rename it to "
                "step-%08" PRId64 " to resume from it, or move it to start a new run",
                output, entry->d_name, manifest.step, manifest.step);
        }
    }
    if (folder) {
        closedir(folder);
    }
}

// The newest checkpoint of the output folder whose files match its manifest, as
// run_choose_checkpoint() finds it.
typedef struct {
    int64_t step;   // -1: none
    int64_t files;  // number of ranks that wrote states
} ResumeChoice;

static ResumeChoice run_choose_checkpoint(const Run *run) {
    char path[PATH_BYTES], problem[PATH_BYTES];
    const Options *o = &run->o;
    ResumeChoice choice = {-1, 0};
    CheckpointList list = checkpoint_list(o->output, "");
    if (list.count && !o->resume) {
        die("--output (-o): %s already contains checkpoints; resume with --resume (-y) 1, or use "
            "another folder", o->output);
    }
    checkpoint_sweep(o->output);
    for (int i = 0; i < list.count && choice.step < 0; i++) {
        path_print(path, "%s/step-%08" PRId64, o->output, list.steps[i]);
        run_say(run, "verifying %s", path);
        choice.files = checkpoint_is_whole(path, problem);
        if (choice.files) {
            choice.step = list.steps[i];
        } else {
            fprintf(stderr, "%s: skipped %s: %s\n", program_name, path, problem);
        }
    }
    if (o->resume && !list.count) {
        refuse_renamed(o->output);
    }
    if (list.count && choice.step < 0) {
        die("--resume (-y): no checkpoint in %s is complete; remove its checkpoints to start a new "
            "run", o->output);
    }
    free(list.steps);
    return choice;
}

// Resumes from the newest complete checkpoint. Rank 0 chooses it, because only rank 0 may remove
// unfinished checkpoints and its disk may hold some that other ranks cannot see; all ranks then
// load the same one. Returns its step, or -1.
static int64_t run_resume(Run *run) {
    char path[PATH_BYTES] = "";
    const Options *o = &run->o;
    ResumeChoice mine = {-1, 0};
    ResumeChoice *choices =
        (ResumeChoice *)alloc_zero((size_t)this_rank.ranks, sizeof(ResumeChoice));
    if (this_rank.rank == 0) {
        mine = run_choose_checkpoint(run);
    }
    engine_gather(&run->engine, choices, &mine, sizeof mine);
    const ResumeChoice choice = choices[0];
    free(choices);
    if (choice.step >= 0) {
        const Snapshot resumed = {&run->engine, &run->s, o, run->identity, NULL, NULL, 0,
                                  {&run->train, &run->val}};
        path_print(path, "%s/step-%08" PRId64, o->output, choice.step);
        run_say(run, "loading %s", path);
        checkpoint_load(&resumed, &run->state, path, (int)choice.files);
        const int64_t most = choice.step * run->train.windows;  // at most an epoch per step
        if (run->state.step != choice.step || run->state.position > most) {
            die("checkpoint %s: its state has step %" PRId64 ", position %" PRId64 "; expected "
                "step %" PRId64 ", position 0 to %" PRId64, path, run->state.step,
                run->state.position, choice.step, most);
        }
    }
    const char *file = run->weights.spans ? o->model : NULL;
    if (o->resume && !o->quiet && choice.step < 0) {
        printf("no checkpoint in %s: starting a new run%s%s\n", o->output,
               file ? " from the weights of --model (-e) " : "", file ? file : "");
    } else if (o->resume && !o->quiet && file) {
        printf("using the weights of %s; --model (-e) %s only applied when the run started\n", path,
               file);
    }
    return choice.step;
}

// Opens the vocabulary if samples or checkpoints need it, or if --tokenizer names it. Only GPT-2's
// may be missing; merges of other data cannot be obtained elsewhere.
static void run_vocabulary(Run *run) {
    const Options *o = &run->o;
    const Tokenizer *t = &run->train.tokenizer;
    char path[PATH_BYTES];
    if (o->tokenizer[0] && t->kind == TOKENIZER_BYTES) {
        die("--tokenizer: %s has byte tokens, which need no vocabulary", o->train_data);
    }
    if (t->kind == TOKENIZER_BYTES || run->bpe ||
        !(o->sample_every || o->generate || o->tokenizer[0] || o->output[0])) {
        return;
    }
    const int own = t->kind == TOKENIZER_MERGES;
    const char *shard = own ? run->train.shards[0].path : o->train_data;
    const int found = own ? merges_find(path, o->tokenizer, shard) : bpe_find(path, o->tokenizer);
    if (own && (!found || (!o->tokenizer[0] && access(path, R_OK) != 0))) {
        die("%s needs its merges: %s%sgive their file with --tokenizer", shard, found ? path : "",
            found ? " cannot be read; " : "");
    }
    if (found) {
        run->bpe = (Bpe *)alloc_zero(1, sizeof(Bpe));
        bpe_open(run->bpe, path, t, shard);
    }
}

// Resolves -b auto. A resumed run keeps the micro-batch of its checkpoint, if that divides the step
// of this run's ranks. The batch is at most as large as the validation data.
static void run_choose_batch(Run *run) {
    Settings *s = &run->s;
    Options *o = &run->o;
    const int64_t most = run->has_val ? run->val.windows : 1 << 26;
    if (s->gpu && options_auto_batch(o) && rank_info.batch) {
        Settings t = *s;
        settings_batch(&t, (int)rank_info.batch);
        if (step_micros(o, &t)) {
            *s = t;
            o->batch = s->B;
            return;
        }
    }
    settings_auto_batch(s, o, rank_info.total, most);
}

// Step 5: sets the number of micro-batches per step and of steps in the run, from the options and
// the data. Ends the run if -d is not a multiple of the tokens that all ranks process in one
// micro-batch, if the warm-up is longer than the run, or if the data is too short for one step or
// one validation batch.
static void run_size(Run *run) {
    const Options *o = &run->o;
    const Settings *s = &run->s;
    const int64_t micros = step_whole_micros(o, s);
    run->accum_steps = (int)micros;
    run->windows_per_step = micros * s->ranks * s->B;
    if (run->windows_per_step > run->train.windows) {
        die("--batch (-b), --seq-len (-t), --tokens-per-step (-d): a step needs %" PRId64
            " sequences of %d tokens; %s has only %" PRId64, run->windows_per_step, s->T,
            o->train_data, run->train.windows);
    }
    run->steps = o->steps ? o->steps : run->train.windows / run->windows_per_step;
    if (o->warmup > run->steps) {
        die("--warmup (-u): %" PRId64 " steps, but the run has only %" PRId64, o->warmup,
            run->steps);
    }
    if (run->has_val && run->val.windows < s->B) {
        die("%s: %" PRId64 " sequences of %d tokens, fewer than one batch of %d", o->val_data,
            run->val.windows, s->T, s->B);
    }
}

// Chooses the settings that depend on the available memory, sizes the run, allocates the batch and
// builds the run's only plan. Ends the run if the program does not support the settings or if the
// plan does not fit in memory.
static void run_fit(Run *run, const Program *program) {
    if (program->refuse) {
        program->refuse(&run->s);
    }
    if (program->try_kernels) {
        Settings s = run->s;  // with the batch of the run; a resume may have its checkpoint's
        Options o = run->o;
        if (!s.forward) {
            settings_auto_batch(&s, &o, program->total ? program->total() : 0,
                                run->has_val ? run->val.windows : 1 << 26);
        }
        program->try_kernels(&s);
    }
    const MemoryBudget budget = budget_at_hand(program, &run->o, &run->s);
    const HostMemory host = host_memory("");
    const MemoryBudget least =
        run_handshake(run, program, &budget);  // no rank has allocated memory before this
    if (!run->s.forward) {
        run_choose_batch(run);
        run_size(run);
    }
    settings_auto(&run->s, &run->o, &least);
    run->budget = least;
    run->budget.windows = run->has_val ? min_i64(run->train.windows, run->val.windows)
                                       : run->train.windows;
    const size_t batch = (size_t)run->s.B * (size_t)run->s.T;
    run->inputs = (Token *)alloc_zero(2 * batch, sizeof(Token));
    run->targets = run->inputs + batch;
    plan_build(&run->plan, &run->s);
    plan_refuse(&run->plan, plan_taken(&run->plan), budget.device);
    if (program->gpu) {
        plan_refuse_host(&run->plan, budget.host, host.limit);
    }
}

// Opens the validation data, which must have the same tokenizer as the training data. Without it,
// or with -v 0, nothing is validated.
static void run_open_validation(Run *run) {
    const Options *o = &run->o;
    run->has_val = o->val_data && o->val_every;
    if (run->has_val) {
        dataset_open(&run->val, o->val_data, run->s.T);
        if (!tokenizers_equal(&run->val.tokenizer, &run->train.tokenizer)) {
            die("--val-data (-j): %s has %s; %s has %s", o->val_data,
                tokenizer_text(&run->val.tokenizer).s, o->train_data,
                tokenizer_text(&run->train.tokenizer).s);
        }
    }
}

// Hashes the data for checkpoints, which record it, and checks all of it if --check-data asks for
// that. The hash that ranks compare covers it too: each machine may have its own copy.
static void run_hash_data(Run *run) {
    const Options *o = &run->o;
    Dataset *const sets[] = {&run->train, &run->val};
    rank_info.data = fnv1a(run->val.windows, run->identity, strlen(run->identity));
    for (int k = 0; k < 2 && (o->output[0] || o->check_data); k++) {
        Dataset *d = sets[k];
        if (o->check_data && d->shard_count) {
            run_say(run, "checking all %s tokens of %s", count_text(d->tokens).s,
                    k ? o->val_data : o->train_data);
        }
        dataset_hash(d, (int)o->check_data);
        for (int i = 0; i < d->shard_count; i++) {
            rank_info.data = fnv1a(rank_info.data, d->shards[i].edges, SHA256_TEXT);
        }
    }
}

// Checks the vocabulary and the prompt of the samples, so that errors are reported now and not
// after a thousand steps. Uses the batch's buffers, which are still unused.
static void run_prepare_samples(Run *run) {
    run_vocabulary(run);
    if (run->o.sample_every) {
        const char *prompt = run->o.prompt;
        const int64_t count = prompt_tokens(run->inputs, run->s.T, &run->train.tokenizer, run->bpe,
                                            prompt, strlen(prompt));
        if (count > run->s.T) {
            die("--prompt: %" PRId64 " tokens, more than --seq-len (-t) %d", count, run->s.T);
        }
    }
}

// Opens the engine and loads the weights of the newest checkpoint, else those of -e's file, else
// initialises new ones. Returns the checkpoint's step, or -1.
static int64_t run_engine_open(Run *run, const Program *program, const Model *m) {
    const Plan *p = &run->plan;
    if (program->gpu) {
        run_say(run, "opening the GPU%s%s%s", p->host_bytes >> 30 ? "; pinning " : "",
                p->host_bytes >> 30 ? bytes_text((double)p->host_bytes).s : "",
                p->host_bytes >> 30 ? " of host memory" : "");
    }
    program->open(&run->engine, &run->plan);
    rank_phase("loading", RANK_LOADS);
    int64_t step = run->o.output[0] ? run_resume(run) : -1;
    if (step < 0 && run->weights.spans) {
        run_say(run, "loading %s", run->o.model);
        model_file_load(&run->engine, &run->weights);
    } else if (step < 0) {
        run_say(run, "initialising %s parameters with --seed %" PRId64
                "; -e FOLDER starts from pretrained weights",
                count_text(model_parameters(m)).s, run->o.seed);
        engine_initialise(&run->engine, m, (uint64_t)run->o.seed);
    }
    model_file_close(&run->weights);
    return step;
}

// Forecasts the time of a step by timing micro-batches of the run itself, after all checks that can
// refuse the run. They do not affect training, because the first micro-batch of a step clears the
// gradients. On the CPU two are timed, if at least 21 steps remain; the first one is not counted,
// because it touches the memory for the first time. A GPU has been warmed up already: one
// micro-batch is timed, if at least 50 steps remain and if it should take at most half a second.
// Shorter runs and runs on several GPUs have no forecast. The update is not timed, because it would
// change the weights; its time is estimated from the default rates.
static void run_forecast(Run *run, const Program *program) {
    const Settings *s = &run->s;
    const int64_t left = run->steps - run->state.step, micros = left * run->accum_steps;
    const int times = program->gpu ? 1 : 2;
    const double seconds = micro_guess(s, run->engine.peak_flops);
    double ms = 0;
    if (run->o.quiet || s->ranks > 1 || left <= FORECAST_STEPS ||
        (program->gpu && (micros < 50 || seconds > 0.5))) {
        return;
    }
    run_say(run, "timing %s of the first step for a forecast", times > 1 ? "two micro-batches"
                                                                        : "a micro-batch");
    for (int k = 0; k < times; k++) {
        real one;
        const double start = now_ms();
        const int64_t position = batch_position(s, run->o.overfit ? 0 : run->state.position, 0);
        if (run_stopping() ||
            !dataset_batch(&run->train, position, s->B, run->inputs, run->targets)) {
            return;  // the first step reports a read error
        }
        run->engine.micro_step(&run->engine, run->inputs, run->targets, 0, run->accum_steps);
        run->engine.read(&run->engine, STATE_WEIGHTS, 0, &one, 1);  // waits for queued work
        ms = now_ms() - start;
    }
    run->forecast_ms = (double)run->accum_steps * ms + 1e3 * update_guess(s);
    if (program->device) {
        speed_keep(program, s, 1e-3 * ms);
    }
}

// Step 7: performs everything with side effects: output folder, start-up box, engine, weights from
// a checkpoint or new ones, log, forecast. The folder is locked first, so that two runs never write
// to the same one; the log is opened after the weights, because a resume truncates it to the step
// of its checkpoint.
static void run_begin(Run *run, const Program *program, const Model *m) {
    const Options *o = &run->o;
    run->live = terminal_rewrites() && this_rank.rank == 0;
    if (o->output[0] && this_rank.rank == 0) {
        slow_begin();
        make_folders(o->output);
        folder_lock(o->output);
        slow_end();
    }
    if (!o->quiet) {
        run_print_box(run);
    }
    int64_t resume_step = run->saved_step = run_engine_open(run, program, m);
    if (this_rank.rank > 0) {
        return;
    }
    if (o->keep && resume_step >= 0) {  // the run may have been killed before it pruned
        checkpoint_prune(o->output, o->keep, resume_step);
    }
    if (o->output[0]) {
        log_open(run, resume_step);
    }
    if (!o->quiet) {
        run_print_engine(run);
        choice_print(&run->plan, o);
        run_flush(run);
        stop_line = o->output[0] ? "\nstopping after this micro-batch, then saving; "
                                   "a second signal quits at once\n"
                                 : "\nstopping after this micro-batch without saving, since there "
                                   "is no --output (-o); a second signal quits at once\n";
        stop_line += !run->live;  // the newline keeps the line that a terminal rewrites
    }
    run_forecast(run, program);
    run_print_forecast(run);
    run_flush(run);
}

// Frees everything that a finished run allocated. Datasets that were never opened are all zero.
static void run_close(Run *run) {
    rank_phase("ending", RANK_RUNS);
    run->engine.close(&run->engine);
    plan_free(&run->plan);
    dataset_close(&run->train);
    dataset_close(&run->val);
    free(run->inputs);
    free(run->bpe);
}

// Runs --eval: scores the model, without training data and without writing files. A signal ends it
// with the score so far, which is not an error. Without -t, T is chosen to fit the longest row of
// the file. A model that is not from a file gets GPT-2's vocabulary, as used by evaluation files.
static int eval_command(Run *run, const Program *program, Model *m) {
    Options *o = &run->o;
    Mapping map;
    EvalFile f;
    EvalScore score;
    char weights[48] = "loaded weights";
    memset(&score, 0, sizeof score);
    if (m->V == 0) {
        model_set_vocabulary(m, GPT2_VOCABULARY);
    }
    if (mapping_open(&map, o->eval) != 0) {
        die("--eval: cannot open %s: %s", o->eval, file_error());
    }
    eval_parse(&f, map.bytes, map.size, o->eval, m->V);
    if (!o->seq_len) {
        o->seq_len = min_i64(round_up_i64(f.longest_row - 1, 16), m->maxT);
    }
    settings_from_options(&run->s, o, m, program->gpu);
    if (f.longest_completion > run->s.T) {
        die("%s: example %d: a completion has %d tokens, more than --seq-len (-t) %d",
            f.name, f.longest_at, f.longest_completion, run->s.T);
    }
    settings_forward(&run->s);
    rank_info.data = fnv1a(f.examples, o->eval, strlen(o->eval));
    run_fit(run, program);
    run->live = terminal_rewrites() && !o->quiet && !o->json;
    if (!run->weights.spans) {
        snprintf(weights, sizeof weights, "initial weights of --seed %" PRId64, o->seed);
    }
    run_engine_open(run, program, m);
    if (!o->quiet && !o->json) {
        printf("%s: %s\nmodel    %s: vocabulary %d, %s; %s\n", program->name, run->engine.device,
               o->model, m->V, weights, bytes_text((double)run->plan.device_bytes).s);
        printf("file     %s: %s examples of at most %d tokens; B %d, T %d\n", f.name,
               count_text(f.examples).s, f.longest_row, run->s.B, run->s.T);
        fflush(stdout);
    }
    run_evaluate(run, &f, &score);
    run_print_score(run, &f, &score);
    run_close(run);
    mapping_close(&map);
    return 0;
}

// Sets the tokenizer of a model whose data is not available here: that of --tokenizer, else of
// merges.txt in the folder of the weights, as in checkpoints. Without either, 257 tokens are bytes,
// and GPT-2's vocabulary is searched for in the same places as in training; any other size is
// refused, because its tokens cannot be guessed. A model of GPT-2's size may have been trained on
// fewer tokens.
static void generate_vocabulary(Run *run, const Model *m) {
    static char merges[PATH_BYTES];  // the option points to it
    Options *o = &run->o;
    const int gpt2 = m->V == GPT2_VOCABULARY || m->V == GPT2_PADDED;
    o->train_data = o->model;  // for messages: the source of the tokens
    if (run->weights.spans && !o->tokenizer[0]) {
        model_file_beside(merges, &run->weights, "merges.txt");
        o->tokenizer = access(merges, F_OK) == 0 ? merges : "";
    }
    run->train.tokenizer = gpt2 ? gpt2_tokenizer : byte_tokenizer;
    if (o->tokenizer[0] && (m->V != BYTE_VOCABULARY || o->tokenizer == merges)) {
        run->bpe = (Bpe *)alloc_zero(1, sizeof(Bpe));
        bpe_open(run->bpe, o->tokenizer, NULL, NULL);
        run->train.tokenizer = run->bpe->tokenizer;
        if (run->bpe->count != m->V && !(gpt2 && run->bpe->count < m->V)) {
            die("--tokenizer: %s has %d tokens; --model (-e) %s has %d", o->tokenizer,
                run->bpe->count, o->model, m->V);
        }
    } else if (!gpt2 && m->V != BYTE_VOCABULARY) {
        die("--generate: %s has a vocabulary of %d and no merges.txt; give one with --tokenizer",
            o->model, m->V);
    }
    run_vocabulary(run);
}

static int64_t tokens_per_second(int64_t tokens, double ms) {
    return ms > 0 ? (int64_t)(1e3 * (double)tokens / ms) : 0;
}

// Opens everything --generate needs, the engine last. Errors that can be found without the weights
// end the run before these are read.
static void generator_open(Generator *g, Run *run, const Program *program, const Model *m) {
    const Options *o = &run->o;
    memset(g, 0, sizeof *g);
    generate_vocabulary(run, m);
    settings_from_options(&run->s, o, m, program->gpu);
    g->T = run->s.T;
    settings_generate(&run->s);
    g->engine = &run->engine;
    g->o = o;
    g->bpe = run->bpe;
    g->tokenizer = run->train.tokenizer;
    g->V = m->V;
    g->tokens = (Token *)alloc_zero((size_t)(g->T + o->sample_tokens), sizeof(Token));
    g->logits = (real *)alloc_zero(2 * (size_t)m->V, sizeof(real));
    g->prompt_logits = g->logits + m->V;
    g->scratch = (Candidate *)alloc_zero((size_t)m->V, sizeof(Candidate));
    if (!generator_reads(g)) {  // reject a prompt that is too long before loading
        generator_prompt(g, o->prompt, strlen(o->prompt));
    }
    run_fit(run, program);
    run_engine_open(run, program, m);
}

// Runs --generate: prints text from the model, without data, gradients or moments. The text goes to
// stdout, everything else to stderr. A signal ends it after the text generated so far, which is not
// an error.
static int generate_command(Run *run, const Program *program, Model *m) {
    const Options *o = &run->o;
    const int64_t step = run->weights.spans ? weights_step(&run->weights) : 0;
    Generator g;
    char weights[80] = "";
    if (!run->weights.spans) {
        snprintf(weights, sizeof weights, ", untrained: initial weights of --seed %" PRId64,
                 o->seed);
    }
    generator_open(&g, run, program, m);
    g.step = (uint32_t)step;
    if (!o->quiet) {
        fprintf(stderr, "%s: %s; %s: %s parameters%s; %s\n", program->name, run->engine.device,
                o->model, count_text(model_parameters(m)).s, weights,
                bytes_text((double)run->plan.device_bytes).s);
    }
    generate_all(&g);
    if (g.write_error) {  // reported once, at the end
        clearerr(stdout);
        run->stdout_error = g.write_error;
    }
    if (!o->quiet) {
        fprintf(stderr, "%s prompt tokens, %s tokens/s; %s tokens, %s tokens/s%s\n",
                count_text(g.prompt_count).s,
                count_text(tokens_per_second(g.prompt_count, g.prompt_ms)).s,
                count_text(g.count).s, count_text(tokens_per_second(g.count, g.ms)).s,
                g.slid ? "; beyond T positions each token recomputes the window" : "");
    }
    run_close(run);
    free(g.tokens);
    free(g.logits);
    free(g.scratch);
    return 0;
}

// Sets --dtype to fp16 if it is not given and this machine's GPU does not support bf16. A plan for
// a named card or memory size ignores this GPU.
static void run_choose_dtype(const Program *program, Options *o) {
    const int named = options_plan(o) && gpu_memory_from_options(o) > 0;
    const int lacks = !named && program->lacks_bf16 && program->lacks_bf16();
    if (lacks && options_plan(o) && o->dtype == DTYPE_BF16) {  // in a run the engine refuses it
        die("--dtype bf16: this GPU does not support bf16; use fp16 or fp32");
    }
    o->dtype = lacks && !o->dtype ? (int64_t)DTYPE_FP16 : o->dtype;
}

// Runs the steps of start-up in order, then the requested command, by default training. Returns the
// exit status; errors end the program with a line on stderr instead.
static int program_run(Run *run, const Program *program, int argc, char **argv) {
    const Options *o = &run->o;
    Model m;
    program_command = argv[0];
    options_parse(&run->o, argc, argv);                                // 1 options
    if (o->help || o->version) {
        o->help ? options_print_help(program->default_model)
                : version_print(program->name, program->built);
        return 0;
    }
    if ((o->check || o->compare) && !program->command) {
        die("--check and --compare need the GPU program, train_gpt2cu");
    }
    if (o->prove) {
        return program->prove ? program->prove(o->prove)
                              : (die("--prove is a command of the GPU program, train_gpt2cu"), 1);
    }
    writes_return_errors();
    if (!options_plan(o)) {  // a plan has neither ranks nor anything to save: signals end it
        stop_on_signals();
        run_find_ranks(run, program);
        stop_line = o->quiet ? "" : "stopping; a second signal quits at once\n";
        if (!o->generate) {  // prints the name itself
            run_say(run, "%s " PROGRAM_VERSION "%s%s", program->name, program->starts ? ": " : "",
                    program->starts ? program->starts : "");
        }
    }
    run_choose_dtype(program, &run->o);
    const ModelKind kind = run_choose_model(run, program, &m);         // 2 the model's sizes
    if (o->eval) {
        return eval_command(run, program, &m);
    }
    if (o->generate) {
        model_vocabulary(&m, kind, o, NULL);
        return o->plan ? plan_command(run, program, &run->o, &m)
                       : generate_command(run, program, &m);
    }
    run_choose_data(run, &m, kind);                                    // 3 data and vocabulary
    if (options_plan(o)) {
        return plan_command(run, program, &run->o, &m);
    }
    settings_from_options(&run->s, o, &m, program->gpu);               // 4 settings
    run_open_validation(run);
    run_identity(run->identity, &run->s, o, &run->train);
    run_hash_data(run);
    run_fit(run, program);                          // 5 micro-batch and steps; 6 memory
    run_prepare_samples(run);
    if (program->command && (o->check || o->compare)) {
        return program->command(run, program);
    }
    run_begin(run, program, &m);                                       // 7 folder, engine, log
    run_train(run);
    run_close(run);
    return 0;
}

// Entry point of both programs, called by their main functions. Returns the exit status.
static int program_main(const Program *program, int argc, char **argv) {
    static Run run;
    program_name = program->name;
    standard_streams_open();
    return output_status(&run, program_run(&run, program, argc, argv));
}

int train_gpt2_main(int argc, char **argv);
int train_gpt2_main(int argc, char **argv) {
    static const Program program = {
        .name = "train_gpt2",
        .default_model = "l4h4c128t64",
        .open = cpu_open,
        .available = host_memory_available,
        .built = "",
        .alone = "this program runs on the CPU; use train_gpt2cu",
    };
    return program_main(&program, argc, argv);
}

#if !GPT2_NO_MAIN && !GPT2_CUDA
int main(int argc, char **argv) {
    threads_start(argv);
    return train_gpt2_main(argc, argv);
}
#endif
