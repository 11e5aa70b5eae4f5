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
//   2  Numbers and options
//   3  Model and plan
//   4  Data
//   5  Layers against naive twins
//   6  Derivatives
//   7  The network
//   8  Optimizer, sampling, evaluation, output
//   9  Failures from inside
//  10  Model files
//  11  Kernels
//  12  The network on a GPU
//  13  The table

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
// 2. Numbers and options
// Volume I's part Ground, without the model.

// The generator against the vectors that its authors publish.
static void test_philox() {
    // Known answers of Random123 (kat_vectors, philox4x32 10): counter, key, result.
    static const uint32_t known[][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09,
         0x94fdcceb, 0x5001e420, 0x24126ea1},
    };
    for (const uint32_t *k : known) {
        uint32_t out[4];
        philox4x32(out, (uint64_t)k[5] << 32 | k[4], (uint64_t)k[1] << 32 | k[0], k[2], k[3]);
        expect(memcmp(out, k + 6, sizeof out) == 0, "got %08x %08x", out[0], out[1]);
    }
}

// Mean and deviation within four standard errors; the same numbers in whatever pieces they come.
static void test_rng_normal() {
    enum { COUNT = 200001 };
    Reals whole(COUNT), pieces(COUNT);
    rng_normal(whole.data(), COUNT, 0.02, 7, RNG_INIT + 3, 1);
    for (int i = 0, n = 1; i < COUNT; i += n, n = n * 3 % 1009 + 1) {
        n = n < COUNT - i ? n : COUNT - i;
        rng_normal(&pieces[(size_t)i], n, 0.02, 7, RNG_INIT + 3, 1 + i);
    }
    expect(same_bits(whole, pieces));
    double mean = 0, square = 0;
    for (real x : whole) {
        mean += (double)x / COUNT;
        square += (double)x * (double)x / COUNT;
    }
    expect_near((wide)mean, 0, 4 * 0.02 / sqrt(1.0 * COUNT), "mean");
    expect_near((wide)sqrt(square), (wide)0.02, 4 * 0.02 / sqrt(2.0 * COUNT), "deviation");
    rng_normal(pieces.data(), COUNT, 0.02, 8, RNG_INIT + 3, 1);
    expect(!same_bits(whole, pieces), "another seed");
    for (uint64_t i = 0; i < 100000; i++) {
        double u = rng_uniform(7, RNG_SAMPLE, 1, i);
        expect(u >= 0 && u < 1);
    }
}

// Each place once for sizes around powers of two and small ones; epochs differ.
static void test_permute_index() {
    std::vector<int64_t> sizes = {1000, 4095, 4096, 4097, 65537};
    for (int64_t n = 1; n <= 70; n++) {
        sizes.push_back(n);
    }
    for (int64_t n : sizes) {
        std::vector<char> seen((size_t)n);
        int64_t moved = 0;
        for (int64_t i = 0; i < n; i++) {
            int64_t at = permute_index(i, n, 42, 3);
            expect(at >= 0 && at < n && !seen[(size_t)at]++, "n %d position %d", (int)n, (int)i);
            moved += at != permute_index(i, n, 42, 4);
        }
        expect(n < 1000 || moved > n * 9 / 10, "n %d: the next epoch moves %d", (int)n, (int)moved);
    }
    detail = text("%zu sizes", sizes.size());
}

// Sizes as users type them, and numbers as they are printed.
static void test_texts() {
    static const struct {
        const char *text;
        double bytes;
    } sizes[] = {{"16GiB", 0x1p34}, {"512M", 0x1p29}, {"1e9", 1e9},    {"38000000", 38e6},
                 {"0", 0},          {"1.5k", 1536},   {"2TB", 0x1p41}, {"7b", 7},
                 {"", -1},          {"x", -1},        {"-1", -1},      {"5XB", -1},
                 {"5 GiB", -1},     {"nan", -1},      {"inf", -1},     {"1e400", -1},
                 {"9000T", -1},     {"1GiBB", -1},    {"3iB", -1},     {"1MiB2", -1}};
    for (auto &s : sizes) {
        expect((double)parse_bytes(s.text) == s.bytes, "%s: %g", s.text,
               (double)parse_bytes(s.text));
    }
    expect(Text(bytes_text(512).s) == "512 B" && Text(bytes_text(1887437).s) == "1.8 MiB");
    expect(Text(bytes_text(11.61 * 0x1p30).s) == "11.61 GiB");
    expect(Text(count_text(1234567).s) == "1,234,567" && Text(count_text(-999).s) == "-999");
    expect(Text(count_text(1000).s) == "1,000" && Text(count_text(0).s) == "0");
    expect(Text(duration_text(59.6).s) == "1:00" && Text(duration_text(3725).s) == "1:02:05");
}

// options_parse() of one line of arguments.
static void parse(Options *o, const char *arguments) {
    static Words words;  // options keep pointers into argv
    words = split(arguments);
    std::vector<char *> argv = arguments_of(&words);
    options_parse(o, (int)argv.size(), argv.data());
}

// Names, letters and fields are unique, defaults inside their ranges, and every form of an option
// sets its field. A value just outside a range or a set of choices ends the run and names the
// option.
static void test_options_table() {
    Options o;
    char value[64];
    for (const OptionRow &row : option_rows) {
        for (const OptionRow *other = option_rows; other < &row; other++) {
            expect(Text(row.name) != other->name && row.offset != other->offset, "%s", row.name);
            expect(row.letter == 0 || row.letter != other->letter, "%s", row.name);
        }
        Text legal = row.type == OPT_TEXT     ? "some"
                     : row.choices ? Text(row.choices, strcspn(row.choices, "=|"))
                     : row.type == OPT_BYTES  ? "1234"
                     : row.type == OPT_REAL   ? text("%g", row.low + (row.high - row.low) / 4)
                                              : text("%.0f", row.low + 1);
        Text name = Text("--") + row.name;
        Words forms = {name + "=" + legal, name + " " + legal, text("-%c ", row.letter) + legal};
        for (const Text &form : forms) {
            if (row.type != OPT_FLAG && (row.letter || form[1] == '-')) {
                parse(&o, (form + " --help").c_str());
                expect(option_text(value, &o, &row) == legal, "%s: %s", form.c_str(), value);
            }
        }
        Words wrong = {row.type == OPT_TEXT || row.type == OPT_FLAG ? "" : "no-such"};
        if (row.type == OPT_INT || row.type == OPT_REAL || row.type == OPT_SWITCH) {
            wrong = {text("%.17g", row.low - 1),
                     text("%.17g", row.high * 2 + 2),
                     "nan",
                     "1e999",
                     "99999999999999999999",
                     "3x",
                     "0x",
                     "--plan"};
        }
        for (const Text &w : wrong) {
            if (!w.empty()) {
                expect_death(
                    parse(&o, (name + " " + w).c_str()),
                    (name + (row.letter ? text(" (-%c): '", row.letter) : Text(": '")) + w + "'")
                        .c_str());
            }
        }
    }
    Outcome help = in_process("--help");
    expect_success(help, "--help");
    for (const OptionRow &row : option_rows) {
        expect(help.out.find(Text("--") + row.name + " ") != Text::npos, "%s", row.name);
        expect(!row.letter ||
               help.out.find(text("  -%c, --%s", row.letter, row.name)) != Text::npos);
    }
    for (size_t at = 0, end; (end = help.out.find('\n', at)) != Text::npos; at = end + 1) {
        expect(end - at <= 80, "%s", help.out.substr(at, end - at).c_str());
    }
    detail = text("%d options", (int)OPTION_ROWS);
}

// What a run records of its options is what a user can type to get the same values: numbers lose no
// digit, choices and sets have one spelling.
static void test_options_text() {
    static const struct {
        const char *name, *given, *recorded;
    } known[] = {{"lr", "0.000300000001", "0.000300000001"},
                 {"lr", "3e-4", "0.0003"},
                 {"beta2", "0.95000000000000007", "0.9500000000000001"},
                 {"eps", "1e-8", "1e-08"},
                 {"master", "1", "split"},
                 {"master", "0", "none"},
                 {"offload", "none", "none"},
                 {"offload", "master", "master"},
                 {"offload", "master,moments", "moments,master"},
                 {"gpu-mem", "16GiB", "17179869184"}};
    for (auto &k : known) {
        Options o;
        char value[64];
        const OptionRow *row = option_rows;
        while (strcmp(row->name, k.name) != 0) {
            row++;
        }
        for (const Text &typed : {Text(k.given), Text(k.recorded)}) {
            parse(&o, ("--plan --" + Text(k.name) + "=" + typed).c_str());
            expect(Text(option_text(value, &o, row)) == k.recorded, "--%s %s: %s", k.name,
                   typed.c_str(), value);
        }
    }
    Options o;
    for (const char *wrong : {"none,master", "moments,", ",", "moments|master", "mome"}) {
        expect_death(parse(&o, (Text("--offload=") + wrong).c_str()),
                     (Text("--offload: '") + wrong + "' is not a list of none|weights|gradients|")
                         .c_str());
    }
}

// -------------------------------------------------------------------------------------------------
// 3. Model and plan
// Volume I's chapter The model and its part Memory: sizes, lifetimes that never share bytes, one
// number that is the allocation, and the arena that catches whoever uses a row outside its life.

#include "dev/test/plan.h"

// -------------------------------------------------------------------------------------------------
// 4. Data
// The appendix's chapter Tokenizer and Volume I's chapter Data. Shards here hold tokens that are
// all different, so a window is known by what is in it.

// Shards a.bin, b.bin, c.bin of 101, 69 and 200 tokens; token i of all is i.
static void write_three_shards() {
    int next = 0;
    static const int counts[] = {101, 69, 200};
    for (int k = 0; k < 3; k++) {
        std::vector<uint16_t> tokens;
        for (int i = 0; i < counts[k]; i++) {
            tokens.push_back((uint16_t)next++);
        }
        write_file(text("%c.bin", 'a' + k), shard_bytes(tokens, TOKENIZER_GPT2));
    }
}

// The ranks of a step read what one rank with the same tokens per step reads, each sequence once.
static void test_rank_positions() {
    Settings s = draw_settings();
    const int sequences = 24;
    for (int ranks : {1, 2, 3, 4, 6}) {
        for (s.B = 1; s.B * ranks <= sequences; s.B *= 2) {
            std::vector<int> read(sequences);
            s.ranks = ranks;
            for (int k = 0; sequences % (s.B * ranks) == 0 && k < sequences / s.B / ranks; k++) {
                for (s.rank = 0; s.rank < ranks; s.rank++) {
                    for (int b = 0; b < s.B; b++) {
                        read.at((size_t)(batch_position(&s, 100, k) - 100 + b))++;
                    }
                }
            }
            const int once = sequences % (s.B * ranks) == 0;
            expect(std::count(read.begin(), read.end(), once) == sequences, "%d ranks of %d", ranks,
                   s.B);
        }
    }
}

// Every window once an epoch, whatever the number of ranks; targets follow inputs; the tokens that
// fill no window get their turn in other epochs.
static void test_loader_coverage() {
    enum { T = 8, WINDOWS = 12 + 8 + 24, TOKENS = 370 };
    Dataset d;
    write_three_shards();
    dataset_open(&d, "[abc].bin", T);
    d.shuffle = 1;
    d.seed = 42;
    expect(d.windows == WINDOWS && d.tokens == TOKENS && d.shard_count == 3);
    std::vector<int> met(TOKENS);
    std::vector<Token> orders[2];
    for (uint32_t epoch = 0; epoch < 60; epoch++) {
        std::vector<int> starts(TOKENS);
        for (int i = 0; i < WINDOWS; i++) {  // as ranks with B 1 would ask: position by position
            Token in[T], out[T];
            dataset_batch(&d, (int64_t)epoch * WINDOWS + i, 1, in, out);
            for (int t = 0; t < T; t++) {
                expect(in[t] == in[0] + t && out[t] == in[t] + 1);
                expect(starts[(size_t)in[t]]++ == 0, "token %d comes twice in epoch %u", in[t],
                       epoch);
                met[(size_t)in[t]] = met[(size_t)out[t]] = 1;
            }
            if (epoch < 2) {
                orders[epoch].push_back(in[0]);
            }
        }
        for (int end = 101, first = 0, k = 0; k < 3; first = end, k++, end = k == 1 ? 170 : 370) {
            int inputs = 0;
            for (int i = first; i < end; i++) {
                inputs += starts[(size_t)i];
            }
            expect(inputs == (end - first - 1) / T * T, "shard %d, epoch %u: %d", k, epoch, inputs);
        }
    }
    expect(std::count(met.begin(), met.end(), 0) == 0, "tokens never visited");
    for (std::vector<Token> &order : orders) {  // the epochs' tokens differ: count windows instead
        std::vector<Token> sorted = order;
        std::sort(sorted.begin(), sorted.end());
        for (Token &first : order) {
            first = (Token)(std::find(sorted.begin(), sorted.end(), first) - sorted.begin());
        }
    }
    expect(orders[0] != orders[1], "every epoch has an order of its own");
    // Any grouping into batches gives the same sequences, also across the end of an epoch.
    Token in[8][T], out[8][T], one[T], next[T];
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        d.shuffle = shuffle;
        dataset_batch(&d, WINDOWS - 3, 8, in[0], out[0]);
        for (int b = 0; b < 8; b++) {
            dataset_batch(&d, WINDOWS - 3 + b, 1, one, next);
            expect(memcmp(in[b], one, sizeof one) == 0 && memcmp(out[b], next, sizeof next) == 0);
        }
    }
    d.shuffle = 0;
    dataset_batch(&d, 12, 2, in[0], out[0]);
    expect(in[0][0] == 101 && in[1][0] == 109, "without shuffling, file order");
    dataset_close(&d);
    detail = "3 shards, 60 epochs";
}

// Prompts and samples are text where a vocabulary is at hand.
static void test_prompts() {
    static Bpe bpe;
    const Text merges = made_merges();
    bpe_parse_merges(&bpe, (const unsigned char *)merges.data(), merges.size(), "vocab.bpe");
    Token tokens[8];
    char out[BPE_LONGEST];
    expect(prompt_tokens(tokens, 8, TOKENIZER_GPT2, &bpe, "aaa the", 7) == 3 && tokens[0] == 256 &&
           tokens[1] == 64 && tokens[2] == 263);
    expect(prompt_tokens(tokens, 8, TOKENIZER_GPT2, &bpe, "", 0) == 1 && tokens[0] == 50256);
    expect(prompt_tokens(tokens, 3, TOKENIZER_GPT2, &bpe, "a b", 3) == 3);
    tokens[2] = -1;
    expect(prompt_tokens(tokens, 2, TOKENIZER_GPT2, &bpe, "a b", 3) == 3 && tokens[2] == -1);
    expect(Text(out, (size_t)token_text(out, TOKENIZER_GPT2, &bpe, 263)) == " the");
    expect(Text(out, (size_t)token_text(out, TOKENIZER_GPT2, &bpe, 50256)) == "<|endoftext|>");
}

// A batch that cannot be given says why: a token outside the vocabulary, a file cut under the run.
static void test_loader_problems() {
    enum { T = 8 };
    Token in[2][T], out[2][T];
    Dataset d;
    write_three_shards();
    dataset_open(&d, "[abc].bin", T);
    d.vocabulary = 105;
    expect(!dataset_batch(&d, 12, 2, in[0], out[0]) &&
               Text(d.problem) == "b.bin: token 4 is 105, outside the vocabulary of 105",
           "%s", d.problem);
    d.vocabulary = GPT2_VOCABULARY;
    expect(truncate("b.bin", LLMC_HEADER_BYTES + 2 * 15) == 0 &&
               !dataset_batch(&d, 12, 2, in[0], out[0]) &&
               Text(d.problem) == "b.bin: cannot read tokens 8 to 16: it became shorter while it "
                                  "was in use",
           "%s", d.problem);
    dataset_close(&d);
}

// The last tokens of a shard of 2^31 - 1 tokens, 4 GiB: offsets have 64 bits. The file is sparse.
static void test_loader_large() {
    const int64_t count = INT32_MAX, T = 1000, window = (count - 1) / T - 1;
    write_file("large.bin", with_int(shard_bytes({}, TOKENIZER_GPT2), 2, INT32_MAX));
    int fd = open("large.bin", O_WRONLY);
    uint16_t tail[1001];
    for (int i = 0; i <= T; i++) {
        tail[i] = (uint16_t)(i + 7);
    }
    if (ftruncate(fd, LLMC_HEADER_BYTES + 2 * count) != 0 ||
        pwrite(fd, tail, sizeof tail, LLMC_HEADER_BYTES + 2 * window * T) != (ssize_t)sizeof tail) {
        skip("this file system has no room for it");
    }
    close(fd);
    Dataset d;
    Token in[1000], out[1000];
    dataset_open(&d, "large.bin", (int)T);
    dataset_batch(&d, window, 1, in, out);
    expect(d.windows == window + 1 && in[0] == 7 && in[999] == 1006 && out[999] == 1007);
    dataset_close(&d);
    unlink("large.bin");
}

// Bytes to ids and back, and what a prompt may be.
static void test_tokenizer() {
    Token tokens[8];
    char out[BPE_LONGEST];
    expect(prompt_tokens(tokens, 8, TOKENIZER_BYTES, NULL, "a\xff", 2) == 2 && tokens[0] == 'a' &&
           tokens[1] == 255);
    expect(prompt_tokens(tokens, 8, TOKENIZER_BYTES, NULL, "", 0) == 1 && tokens[0] == 256);
    expect(prompt_tokens(tokens, 8, TOKENIZER_GPT2, NULL, "", 0) == 1 && tokens[0] == 50256);
    expect(token_text(out, TOKENIZER_BYTES, NULL, 'x') == 1 && out[0] == 'x');
    expect(token_text(out, TOKENIZER_BYTES, NULL, 256) == 0);
    expect(token_text(out, TOKENIZER_GPT2, NULL, 31) == 3 && memcmp(out, "31 ", 3) == 0);
    expect_death(prompt_tokens(tokens, 8, TOKENIZER_GPT2, NULL, "a", 1),
                 "--prompt: this data has GPT-2 tokens, and their vocabulary is missing");
    tokens[2] = -1;
    expect(prompt_tokens(tokens, 2, TOKENIZER_BYTES, NULL, "a\0c", 3) == 3 && tokens[1] == 0 &&
           tokens[2] == -1);
}

// -------------------------------------------------------------------------------------------------
// 5. Layers against naive twins
// Volume I's chapters Matmul and fast maths and Layers, over odd shapes. A twin is the formula
// itself, written with Num: a wider number that carries how far the same computation in `real` may
// be off. Approximate exp and tanh are allowed what chapter Matmul and fast maths states of them
// (EXP_ULP, TANH_ULP; libm's in double).

static const double EXP_ULP = 1.05, TANH_ULP = 2.53;

struct Num {
    wide v;
    double e;  // each operation passes on its operands' errors and adds one rounding
    Num(wide value = 0, double error = 0) : v(value), e(error) {}
};
static double size(wide x) { return fabs((double)x); }
static Num rounded(wide v, double e) { return Num(v, e + unit * size(v) + smallest); }
static Num operator+(Num a, Num b) { return rounded(a.v + b.v, a.e + b.e); }
static Num operator-(Num a, Num b) { return rounded(a.v - b.v, a.e + b.e); }
static Num operator*(Num a, Num b) {
    return rounded(a.v * b.v, size(a.v) * b.e + size(b.v) * a.e + a.e * b.e);
}
static Num operator/(Num a, Num b) {
    return rounded(a.v / b.v, (a.e + size(a.v / b.v) * b.e) / size(b.v));
}
static wide wide_exp(wide x) {
    return GPT2_DOUBLE ? (wide)expl((long double)x) : (wide)exp((double)x);
}
static Num num_exp(Num x) {
    wide v = wide_exp(x.v);
    return rounded(v, (double)v * (x.e + 2 * EXP_ULP * unit));
}
static Num num_tanh(Num x) {
    wide v = GPT2_DOUBLE ? (wide)tanhl((long double)x.v) : (wide)tanh((double)x.v);
    return rounded(v, x.e * (1 - (double)(v * v)) + 2 * TANH_ULP * unit * size(v));
}
static Num num_log(Num x) { return rounded((wide)logl((long double)x.v), x.e / (double)x.v); }
static Num num_rsqrt(Num x) {
    wide v = 1 / (wide)sqrtl((long double)x.v);
    return rounded(v, (double)v * (x.e / (double)x.v / 2 + 2 * unit));
}

// term(0) + ... + term(n - 1), in whatever order the tested code takes them.
template <class Term> static Num sum_of(int n, Term term) {
    wide v = 0;
    double e = 0, sizes = 0;
    for (int k = 0; k < n; k++) {
        Num t = term(k);
        v += t.v;
        e += t.e;
        sizes += size(t.v);
    }
    return Num(v, e + sum_error(n) * sizes);
}

typedef std::vector<Num> Nums;
static Nums nums(const Reals &x) { return Nums(x.begin(), x.end()); }

// Every element against its twin; the one that used most of its tolerance goes into the line.
static void compare_at(int line, const Reals &got, const Nums &want, const Text &where) {
    size_t at = 0;
    double most = -1;
    for (size_t i = 0; i < want.size(); i++) {
        double err = size((wide)got[i] - want[i].v);
        double share = err == 0 ? 0 : err <= want[i].e ? err / want[i].e : HUGE_VAL;
        if (share > most) {
            most = share;
            at = i;
        }
    }
    near_at(line, got[at], want[at].v, want[at].e, where + text(" [%zu]", at));
}
#define compare(got, want, ...) compare_at(__LINE__, got, want, text(__VA_ARGS__))

// A workspace of exactly the bytes that the plan would give, for layers called outside a network.
static void give_workspace() {
    static void *memory;
    free(memory);
    size_t bytes = matmul_workspace_bytes(thread_count());
    if (posix_memalign(&memory, 64, bytes) != 0) {
        die("no memory for the matmul's workspace");
    }
    memset(memory, 0xff, bytes);
    matmul_workspace = (real *)memory;
}

static real fast_tanh(real x) {
    uint32_t n;
    real r = tanh_begin(x, &n);
    return tanh_end(r, n, x);
}

// exp and tanh over their whole range, and where a polynomial or a shift could go wrong.
static void test_fast_maths() {
    const double low = GPT2_DOUBLE ? -800 : -120, range = GPT2_DOUBLE ? 1500 : 208;
    for (int i = 0; i <= 400000; i++) {
        real x = (real)(low + range * i / 400000), y = (real)(-12 + 24.0 * i / 400000);
        double root = (double)y * fabs((double)y) * 1e-3;  // tanh's small arguments too
        Num e = num_exp((wide)x), t = num_tanh((wide)y), s = num_tanh((wide)(real)root);
        expect_near(fast_exp(x), e.v, e.e, "exp %.9g", (double)x);
        expect_near(fast_tanh(y), t.v, t.e, "tanh %.9g", (double)y);
        expect_near(fast_tanh((real)root), s.v, s.e, "tanh %.9g", root);
    }
    const real inf = (real)HUGE_VAL, nan = (real)NAN;
    expect(fast_exp(-inf) == 0 && fast_exp((real)-1e30) == 0 && fast_exp(0) == 1);
    expect(fast_exp(inf) == inf && fast_exp((real)1e4) == inf && isnan((double)fast_exp(nan)));
    expect(fast_tanh(inf) == 1 && fast_tanh(-inf) == -1 && isnan((double)fast_tanh(nan)));
    expect(fast_tanh((real)-0.0) == 0 && signbit((double)fast_tanh((real)-0.0)));
}

static const int matmul_shapes[][3] = {
    // rows, C, OC
    {1, 1, 1},      {1, 48, 144},  {3, 5, 7},      {13, 17, 19},   {65, 80, 33},  {14, 32, 64},
    {15, 33, 65},   {29, 31, 257}, {33, 1000, 17}, {200, 129, 31}, {9, 3072, 40}, {130, 768, 100},
    {2, 48, 50304}, {64, 64, 64},  {257, 16, 48},  {1, 768, 2304}, {600, 7, 9},   {385, 8, 129},
    {21, 40, 1024},  // dout's rows meet in one set of a first cache: packed before the product
};

// inp weight^T.
static Nums twin_matmul(const Reals &inp, const Reals &weight, int N, int C, int OC) {
    Nums out;
    for (int i = 0; i < N * OC; i++) {
        const real *x = &inp[i / OC * C], *w = &weight[i % OC * C];
        out.push_back(sum_of(C, [=](int c) { return Num(x[c]) * w[c]; }));
    }
    return out;
}

// What matmul_backward leaves; dweight and dbias hold on entry what it adds to.
static void twin_matmul_backward(Nums *dinp, Nums *dweight, Nums *dbias, const Reals &dout,
                                 const Reals &inp, const Reals &weight, int N, int C, int OC) {
    for (int i = 0; i < N * C; i++) {
        const real *d = &dout[i / C * OC], *w = &weight[i % C];
        dinp->push_back(sum_of(OC, [=](int o) { return Num(d[o]) * w[(int64_t)o * C]; }));
    }
    for (int i = 0; i < OC * C; i++) {  // the last term is what stood there
        const real *d = &dout[i / C], *x = &inp[i % C];
        const Num start = (*dweight)[i];
        (*dweight)[i] = sum_of(N + 1, [=](int n) {
            return n == N ? start : Num(d[(int64_t)n * OC]) * x[(int64_t)n * C];
        });
    }
    for (int o = 0; o < OC; o++) {
        const real *d = &dout[o];
        const Num start = (*dbias)[o];
        (*dbias)[o] = sum_of(N + 1, [=](int n) { return n == N ? start : Num(d[n * OC]); });
    }
}

// out = addend + bias + inp weight^T, with and without each; addend may be out itself.
static void test_matmul_forward() {
    give_workspace();
    for (auto &shape : matmul_shapes) {
        const int N = shape[0], C = shape[1], OC = shape[2];
        Reals inp = noise(N * C, 1, 1), weight = noise(OC * C, 0.2, 2), none;
        Reals bias = noise(OC, 1, 3), addend = noise(N * OC, 1, 4);
        Nums product = twin_matmul(inp, weight, N, C, OC);
        for (int has = 0; has < 4; has++) {
            const real *b = has & 1 ? bias.data() : NULL, *add = has & 2 ? addend.data() : NULL;
            Reals out((size_t)(N * OC), (real)NAN), same = addend;
            Nums want = product;
            for (int i = 0; i < N * OC; i++) {
                want[i] = want[i] + (b ? b[i % OC] : 0) + (add ? add[i] : 0);
                // what stands in the sum from its start is rounded with every term
                want[i].e += sum_error(C) * ((b ? size(b[i % OC]) : 0) + (add ? size(add[i]) : 0));
            }
            matmul_forward(out.data(), inp.data(), weight.data(), b, add, N, C, OC);
            compare(out, want, "N %d C %d OC %d%s%s", N, C, OC, b ? " bias" : "", add ? " +" : "");
            matmul_forward(same.data(), inp.data(), weight.data(), b, add ? same.data() : NULL, N,
                           C, OC);
            expect(same_bits(out, same), "in place, N %d C %d OC %d", N, C, OC);
            for (int i = 0; i < N && N > 1; i++) {
                const size_t at = (size_t)(i * OC);
                Reals row((size_t)OC, (real)NAN), packed(&out[at], &out[at] + OC);
                matmul_forward(row.data(), &inp[(size_t)(i * C)], weight.data(), b,
                               add ? add + at : NULL, 1, C, OC);
                expect(same_bits(row, packed), "row %d alone, N %d C %d OC %d", i, N, C, OC);
            }
        }
    }
}

// dbias and dweight add up, dinp is overwritten and may be inp; each of dinp and dbias may be NULL.
static void test_matmul_backward() {
    give_workspace();
    for (auto &shape : matmul_shapes) {
        const int N = shape[0], C = shape[1], OC = shape[2];
        Reals inp = noise(N * C, 1, 1), weight = noise(OC * C, 0.2, 2), dout = noise(N * OC, 1, 3);
        Reals dinp((size_t)(N * C), (real)NAN), dweight = noise(OC * C, 1, 4),
                                                dbias = noise(OC, 1, 5);
        Nums want_dinp, want_dweight = nums(dweight), want_dbias = nums(dbias);
        twin_matmul_backward(&want_dinp, &want_dweight, &want_dbias, dout, inp, weight, N, C, OC);
        Reals dweight2 = dweight, dweight3 = dweight, dinp2 = inp;
        const real *d = dout.data(), *x = inp.data(), *w = weight.data();
        matmul_backward(dinp.data(), dweight.data(), dbias.data(), d, x, w, N, C, OC);
        compare(dinp, want_dinp, "dinp N %d C %d OC %d", N, C, OC);
        compare(dweight, want_dweight, "dweight N %d C %d OC %d", N, C, OC);
        compare(dbias, want_dbias, "dbias N %d C %d OC %d", N, C, OC);
        matmul_backward(dinp2.data(), dweight2.data(), NULL, d, dinp2.data(), w, N, C, OC);
        matmul_backward(NULL, dweight3.data(), NULL, d, x, w, N, C, OC);
        expect(same_bits(dinp, dinp2) && same_bits(dweight, dweight2) &&
                   same_bits(dweight, dweight3),
               "aliases and NULL, N %d C %d OC %d", N, C, OC);
    }
}

// A number and what is left of it in bf16, to nearest even; the two differ by 2^-9 of it at most.
static Reals rounded_to_bf16(Reals numbers) {
    for (real &x : numbers) {
        float f = (float)x;
        uint32_t bits;
        memcpy(&bits, &f, sizeof bits);
        bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
        memcpy(&f, &bits, sizeof f);
        x = f;
    }
    return numbers;
}

// --matmul bf16: the products of operands that were rounded beforehand, to the bit, near the exact
// products of these; and of a NaN a NaN, whatever its bits.
static void test_matmul_bf16() {
    const char *missing = bf16_missing();
    if (missing) {
        skip(missing);
    }
#if BF16_DOTS
    give_workspace();
    matmul_bf16 = 1;
    for (auto &shape : matmul_shapes) {
        const int N = shape[0], C = shape[1], OC = shape[2];
        Reals inp = noise(N * C, 1, 1), weight = noise(OC * C, 0.2, 2), dout = noise(N * OC, 1, 3);
        const Reals x = rounded_to_bf16(inp), w = rounded_to_bf16(weight);
        const Reals d = rounded_to_bf16(dout), sums = noise(OC * C, 1, 4);
        Nums want = twin_matmul(x, w, N, C, OC), want_dinp, want_dweight = nums(sums);
        Nums want_dbias = nums(Reals((size_t)OC));
        twin_matmul_backward(&want_dinp, &want_dweight, &want_dbias, d, x, w, N, C, OC);
        Reals out((size_t)(N * OC), (real)NAN), out2 = out, dinp = inp, dinp2 = inp;
        Reals dweight = sums, dweight2 = sums;
        const real *i1 = inp.data(), *w1 = weight.data(), *d1 = dout.data();
        matmul_forward(out.data(), i1, w1, NULL, NULL, N, C, OC);
        matmul_forward(out2.data(), x.data(), w.data(), NULL, NULL, N, C, OC);
        matmul_backward(dinp.data(), dweight.data(), NULL, d1, i1, w1, N, C, OC);
        matmul_backward(dinp2.data(), dweight2.data(), NULL, d.data(), x.data(), w.data(), N, C,
                        OC);
        expect(same_bits(out, out2) && same_bits(dinp, dinp2) && same_bits(dweight, dweight2),
               "rounded beforehand, N %d C %d OC %d", N, C, OC);
        compare(out, want, "N %d C %d OC %d", N, C, OC);
        compare(dinp, want_dinp, "dinp N %d C %d OC %d", N, C, OC);
        compare(dweight, want_dweight, "dweight N %d C %d OC %d", N, C, OC);
    }
    const uint32_t quiet = 0x7fffffff;  // rounded as a number it would be -0
    Reals inp(64, 1), weight(64 * 64, 1), out(64);
    memcpy(&inp[40], &quiet, sizeof quiet);
    matmul_forward(out.data(), inp.data(), weight.data(), NULL, NULL, 1, 64, 64);
    for (real number : out) {
        expect(isnan(number), "%g of a NaN", number);
    }
    const Reals qkv = noise((BLOCK + 2) * 3 * 32, 1, 5);
    Reals one((BLOCK + 1) * 32), two((BLOCK + 2) * 32), lse(BLOCK + 2);
    attention_forward(one.data(), lse.data(), qkv.data(), 1, BLOCK + 1, 32, 1);
    attention_forward(two.data(), lse.data(), qkv.data(), 1, BLOCK + 2, 32, 1);
    two.resize(one.size());
    expect(same_bits(one, two), "attention: a tile of one row");
    matmul_bf16 = 0;
#endif
}

// GELU and its derivative.
static Num twin_gelu(Num v, Num *slope) {
    Num s = Num(0.79788456080286535588L, unit), c = Num(0.044715L, unit * 0.05);
    Num t = num_tanh(s * (v + c * v * v * v)), half = (wide)0.5, one = (wide)1, three = (wide)3;
    *slope = half * (one + t + v * (one - t * t) * s * (one + three * c * v * v));
    return half * v * (one + t);
}

// Both directions, in place, for every length of tail, and with a NaN beside a number.
static void test_gelu() {
    enum { COUNT = 100003 };
    Reals x(COUNT), out(COUNT), dout = noise(COUNT, 1, 2), dinp(COUNT);
    Nums want, want_dinp;
    for (int i = 0; i < COUNT; i++) {
        x[i] = (real)(i == 0 ? -1e4 : i == 1 ? 1e4 : -12 + 24.0 * i / COUNT);
        Num slope;
        want.push_back(twin_gelu(x[i], &slope));
        want_dinp.push_back(slope * dout[i]);
    }
    gelu_forward(out.data(), x.data(), COUNT);
    gelu_backward(dinp.data(), dout.data(), x.data(), COUNT);
    compare(out, want, "forward");
    compare(dinp, want_dinp, "backward");
    gelu_backward(dout.data(), dout.data(), x.data(), COUNT);
    expect(same_bits(dinp, dout), "in place");
    for (size_t n = 1; n < 40; n++) {  // every way to end a vector loop
        Reals few(n, (real)NAN);
        gelu_forward(few.data(), &x[50000], n);
        expect(memcmp(few.data(), &out[50000], n * sizeof(real)) == 0, "n %zu", n);
    }
    real bad[2] = {(real)NAN, 1};
    gelu_forward(bad, bad, 2);
    expect(isnan((double)bad[0]) && !isnan((double)bad[1]));
}

// out; dwte and dwpe, which hold on entry what backward adds to.
static void twin_embedding(Nums *out, Nums *dwte, Nums *dwpe, const std::vector<Token> &tokens,
                         const Reals &wte, const Reals &wpe, const Reals &dout, int T, int C) {
    for (int k = 0; k < (int)dout.size(); k++) {
        int w = tokens[k / C] * C + k % C, p = k / C % T * C + k % C;
        out->push_back(Num(wte[w]) + wpe[p]);
        (*dwte)[w] = (*dwte)[w] + dout[k];
        (*dwpe)[p] = (*dwpe)[p] + dout[k];
    }
}

// out is one rounding; backward adds up over equal tokens and over the batch.
static void test_embedding() {
    enum { B = 3, T = 7, C = 130, V = 11 };
    std::vector<Token> tokens = Batch(B * T, V, 1).inputs;
    Reals wte = noise(V * C, 1, 1), wpe = noise((T + 2) * C, 1, 2), out(B * T * C);
    Reals dout = noise(B * T * C, 1, 3), dwte = noise(V * C, 1, 4), dwpe = noise((T + 2) * C, 1, 5);
    Nums want, want_dwte = nums(dwte), want_dwpe = nums(dwpe);
    twin_embedding(&want, &want_dwte, &want_dwpe, tokens, wte, wpe, dout, T, C);
    embedding_forward(out.data(), tokens.data(), wte.data(), wpe.data(), B, T, C);
    embedding_backward(dwte.data(), dwpe.data(), dout.data(), tokens.data(), B, T, C);
    compare(out, want, "forward");
    compare(dwte, want_dwte, "dwte");
    compare(dwpe, want_dwpe, "dwpe");
}

// LayerNorm forward, and backward from mean and rstd as the tested forward left them; dinp without
// an addend. dweight and dbias hold on entry what backward adds to.
struct LayerNormTwin {
    Nums out, mean, rstd, dinp, dweight, dbias;
    LayerNormTwin(const Reals &x, const Reals &w, const Reals &b, const Reals &dout,
                  const Reals &dw, const Reals &db, const Reals &got_mean, const Reals &got_rstd)
        : dweight(nums(dw)), dbias(nums(db)) {
        const int N = (int)got_mean.size(), C = (int)w.size();
        auto n = [&](int i, int c) { return (Num(x[i * C + c]) - got_mean[i]) * got_rstd[i]; };
        for (int i = 0; i < N; i++) {
            const real *row = &x[i * C], *d = &dout[i * C];
            Num count = (wide)C, m = sum_of(C, [&](int c) { return Num(row[c]); }) / count;
            Num v = sum_of(C, [&](int c) { return (Num(row[c]) - m) * (Num(row[c]) - m); }) / count;
            Num r = num_rsqrt(v + Num((wide)1e-5L, unit * 1e-5));
            mean.push_back(m);
            rstd.push_back(r);
            Num g = sum_of(C, [&](int c) { return Num(d[c]) * w[c]; }) / count;
            Num gn = sum_of(C, [&](int c) { return Num(d[c]) * w[c] * n(i, c); }) / count;
            for (int c = 0; c < C; c++) {
                out.push_back((Num(row[c]) - m) * r * w[c] + b[c]);
                dinp.push_back(Num(got_rstd[i]) * (Num(d[c]) * w[c] - g - n(i, c) * gn));
            }
        }
        for (int c = 0; c < C; c++) {
            dweight[c] = sum_of(
                N + 1, [&](int i) { return i == N ? Num(dw[c]) : Num(dout[i * C + c]) * n(i, c); });
            dbias[c] = sum_of(N + 1, [&](int i) { return Num(i == N ? db[c] : dout[i * C + c]); });
        }
    }
};

// want + x.
static Nums plus(Nums want, const Reals &x) {
    for (size_t i = 0; i < x.size(); i++) {
        want[i] = want[i] + x[i];
    }
    return want;
}

// Forward and backward; addend may be NULL or dinp itself.
static void test_layernorm() {
    static const int shapes[][2] = {{1, 1},   {1, 48},   {2, 15},   {17, 16}, {5, 17},
                                    {65, 80}, {34, 768}, {3, 1600}, {300, 33}};  // rows, C
    for (auto &shape : shapes) {
        const int N = shape[0], C = shape[1];
        Reals x = noise(N * C, 2, 1), w = noise(C, 1, 2), b = noise(C, 1, 3), out(x.size());
        Reals mean(N), rstd(N), dout = noise(N * C, 1, 4), addend = noise(N * C, 1, 5),
                                dinp(x.size());
        Reals dw = noise(C, 1, 6), db = noise(C, 1, 7), alone(x.size());
        layernorm_forward(out.data(), mean.data(), rstd.data(), x.data(), w.data(), b.data(), N, C);
        const LayerNormTwin want(x, w, b, dout, dw, db, mean, rstd);
        auto backward = [&](real *result, const real *add) {
            Reals dw2 = dw, db2 = db;
            layernorm_backward(result, dw2.data(), db2.data(), dout.data(), x.data(), w.data(),
                               mean.data(), rstd.data(), add, N, C);
            compare(dw2, want.dweight, "dweight N %d C %d", N, C);
            compare(db2, want.dbias, "dbias N %d C %d", N, C);
        };
        compare(mean, want.mean, "mean N %d C %d", N, C);
        compare(rstd, want.rstd, "rstd N %d C %d", N, C);
        compare(out, want.out, "out N %d C %d", N, C);
        const Nums want_dinp = plus(want.dinp, addend);
        backward(dinp.data(), addend.data());
        backward(alone.data(), NULL);
        backward(addend.data(), addend.data());
        compare(dinp, want_dinp, "dinp N %d C %d", N, C);
        compare(alone, want.dinp, "dinp without addend N %d C %d", N, C);
        expect(same_bits(addend, dinp), "in place, N %d C %d", N, C);
    }
}

static Num as_it_is(Num x) { return x; }

// Attention of one head with its T x T matrices; results go to their places in out, lse and dqkv.
// `narrow` is done to what a computation in 16 bits rounds: P, out, dS, dqkv.
static void twin_attention(Nums *out, Nums *lse, Nums *dqkv, const Reals &qkv, const Reals &dout,
                           int b, int h, int T, int C, int NH, Num (*narrow)(Num) = as_it_is) {
    const int HS = C / NH;
    auto place = [=](int t, int part) { return ((b * T + t) * 3 + part) * C + h * HS; };
    Nums P(T * T), dS(T * T);
    const Num scale = Num(1 / (wide)sqrtl((long double)HS), unit);
    for (int t = 0; t < T; t++) {
        const real *q = &qkv[place(t, 0)], *d = &dout[(b * T + t) * C + h * HS];
        Num *o = &(*out)[(b * T + t) * C + h * HS];
        Nums s, p;
        wide most = -HUGE_VAL;
        for (int u = 0; u <= t; u++) {
            const real *k = &qkv[place(u, 1)];
            s.push_back(sum_of(HS, [=](int i) { return Num(q[i]) * k[i]; }) * scale);
            most = std::max(most, s[u].v);
        }
        for (int u = 0; u <= t; u++) {
            p.push_back(num_exp(s[u] - most));
        }
        Num sum = sum_of(t + 1, [&](int u) { return p[u]; });
        Num log_sum = (*lse)[(b * NH + h) * T + t] = Num(most) + num_log(sum);
        for (int i = 0; i < HS; i++) {
            o[i] = narrow(
                sum_of(t + 1, [&](int u) { return narrow(p[u]) * qkv[place(u, 2) + i]; }) / sum);
        }
        Num D = sum_of(HS, [=](int i) { return o[i] * d[i]; });
        for (int u = 0; u <= t; u++) {
            const real *v = &qkv[place(u, 2)];
            Num dp = sum_of(HS, [=](int i) { return Num(d[i]) * v[i]; });
            P[t * T + u] = num_exp(s[u] - log_sum);
            dS[t * T + u] = narrow(P[t * T + u] * (dp - D) * scale);
            P[t * T + u] = narrow(P[t * T + u]);
        }
    }
    for (int t = 0; t < T * HS; t++) {
        int row = t / HS, i = t % HS;
        (*dqkv)[place(row, 0) + i] =
            narrow(sum_of(row + 1, [&](int u) { return dS[row * T + u] * qkv[place(u, 1) + i]; }));
        (*dqkv)[place(row, 1) + i] = narrow(sum_of(
            T, [&](int u) { return u < row ? Num() : dS[u * T + row] * qkv[place(u, 0) + i]; }));
        (*dqkv)[place(row, 2) + i] = narrow(sum_of(T, [&](int u) {
            return u < row ? Num() : P[u * T + row] * dout[(b * T + u) * C + h * HS + i];
        }));
    }
}

// Shapes with one key, whole tiles, one more and one less, heads of 1 to 128 channels.
static void test_attention() {
    static const int shapes[][4] = {{1, 1, 8, 1},   {2, 1, 48, 3},   {1, 2, 3, 3},
                                    {2, 7, 48, 3},  {1, 65, 192, 3}, {2, 64, 64, 1},
                                    {3, 33, 80, 5}, {1, 129, 80, 5}, {1, 66, 256, 2},
                                    {2, 17, 35, 5}, {1, 260, 64, 2}, {1, 63, 24, 1}};
    give_workspace();
    for (auto &shape : shapes) {
        const int B = shape[0], T = shape[1], C = shape[2], NH = shape[3];
        for (int sharp = 1; sharp <= 4; sharp += 3) {  // scores of deviation 1 and 16
            const int n = B * T * C;
            Reals qkv = noise(3 * n, sharp, 1), dout = noise(n, 1, 2), out(n, (real)NAN);
            Reals lse(B * NH * T, (real)NAN), dqkv(3 * n, (real)NAN);
            Nums want(n), want_lse(lse.size()), want_dqkv(dqkv.size());
            for (int head = 0; head < B * NH; head++) {
                twin_attention(&want, &want_lse, &want_dqkv, qkv, dout, head / NH, head % NH, T, C,
                               NH);
            }
            attention_forward(out.data(), lse.data(), qkv.data(), B, T, C, NH);
            attention_backward(dqkv.data(), dout.data(), qkv.data(), out.data(), lse.data(), B, T,
                               C, NH);
            compare(out, want, "out B %d T %d C %d NH %d x %d", B, T, C, NH, sharp);
            compare(lse, want_lse, "lse B %d T %d C %d NH %d x %d", B, T, C, NH, sharp);
            compare(dqkv, want_dqkv, "dqkv B %d T %d C %d NH %d x %d", B, T, C, NH, sharp);
        }
    }
}

// e^(x - most) as the GPU's classifier computes it in 16 bits: 2^(LOG2_E x - shift), shift being
// LOG2_E most rounded. How shift was rounded makes no difference: all powers of a row have that
// factor, and the loss adds LN_2 shift. Relative error in units of 2^-24: |x| times that of LOG2_E,
// |x - most| for the rounding of the fused multiply-add, and 4 for ex2.approx.ftz.f32, 2^-22 (PTX
// ISA, "Floating Point Instructions: ex2"), whose results below 2^-126 are 0.
static const double LOG2_E_ERROR = 0.23, LN_2_ERROR = 0.05;  // of the nearest numbers in fp32
static Num num_power(wide x, wide most) {
    const wide v = wide_exp(x - most);
    return Num(v, (double)v * unit * (LOG2_E_ERROR * size(x) + size(x - most) + 4) + smallest);
}

// Losses and dlogits of rows of Vp logits, V of which count; in_powers_of_2: with num_power's
// exponentials.
static void twin_classifier(Nums *losses, Nums *dlogits, const Reals &logits,
                            const std::vector<Token> &targets, real dloss, int V, int Vp,
                            bool in_powers_of_2 = false) {
    for (int i = 0; i < (int)targets.size(); i++) {
        const real *x = &logits[i * Vp], most = *std::max_element(x, x + V);
        auto p = [=](int v) {
            return in_powers_of_2 ? num_power((wide)x[v], (wide)most) : num_exp(Num(x[v]) - most);
        };
        Num sum = sum_of(V, p), one = (wide)1;
        const Num logarithm = num_log(sum);
        // LN_2 shift, and logf, which is off by up to one unit in the last place, not by a half.
        const Num top = in_powers_of_2 ? Num(most, (1 + LN_2_ERROR) * unit * size(most) +
                                                       unit * size(logarithm.v)) : Num(most);
        losses->push_back(logarithm + top - x[targets[i]]);
        for (int v = 0; v < V; v++) {
            Num part = p(v) / sum;
            // rcp and two products, where a division and a product are counted already
            part.e += in_powers_of_2 ? 2 * unit * size(part.v) : 0;
            (*dlogits)[i * Vp + v] = (part - (v == targets[i] ? one : Num())) * dloss;
        }
    }
}

// Losses and dlogits; padded columns must be 0 exactly; forward alone gives the same losses.
static void test_classifier() {
    static const int shapes[][2] = {{1, 1}, {5, 2}, {7, 257}, {3, 50257}, {33, 128}};  // rows, V
    for (auto &shape : shapes) {
        const int rows = shape[0], V = shape[1], Vp = (int)round_up_i64(V, 128);
        Reals logits = noise(rows * Vp, 3, 1), losses(rows), again = logits, forward(rows);
        std::vector<Token> targets = Batch(rows, V, 2).targets;
        const real dloss = (real)0.37;
        Nums want, want_d(logits.size());  // padding: 0, tolerance 0
        twin_classifier(&want, &want_d, logits, targets, dloss, V, Vp);
        classifier_forward_backward(losses.data(), logits.data(), targets.data(), dloss, rows, V,
                                    Vp, 1);
        classifier_forward_backward(forward.data(), again.data(), targets.data(), dloss, rows, V,
                                    Vp, 0);
        compare(losses, want, "losses rows %d V %d", rows, V);
        compare(logits, want_d, "dlogits rows %d V %d", rows, V);
        expect(same_bits(losses, forward), "rows %d V %d", rows, V);
    }
}

// -------------------------------------------------------------------------------------------------
// 6. Derivatives
// Central differences in double, fourth order: truncation h^4 f^(5) / 30 = 3e-14 f^(5) and rounding
// about 1e-16 |f| / h = 1e-13 |f|, so a gradient that is right agrees to some 1e-10 of its size.

#if GPT2_DOUBLE
typedef std::function<double()> Loss;

// Derivative of `loss` along `move`, which displaces something by its argument.
static double slope(const Loss &loss, const std::function<void(double)> &move) {
    const double h = 1e-3;
    double f[4];
    static const int steps[] = {1, -1, 2, -2};
    for (int k = 0; k < 4; k++) {
        move(h * steps[k]);
        f[k] = loss();
    }
    move(0);
    return (8 * (f[0] - f[1]) - (f[2] - f[3])) / (12 * h);
}

// Every element of `gradient` against the difference of `loss` in the same element of `x`.
static void expect_gradient_at(int line, Reals *x, const Reals &gradient, const Loss &loss,
                               const char *name) {
    double size = 1;
    for (real g : gradient) {
        size = std::max(size, fabs(g));
    }
    for (size_t i = 0; i < x->size(); i++) {
        const real keep = (*x)[i];
        double found = slope(loss, [&](double by) { (*x)[i] = keep + by; });
        near_at(line, gradient[i], found, 1e-10 * size, text("%s [%zu]", name, i));
    }
}
#define expect_gradient(x, gradient, loss) expect_gradient_at(__LINE__, &x, gradient, loss, #x)

// <a, b>.
static double dot(const Reals &a, const Reals &b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

// For each layer: loss = <dout, layer(inputs)>, whose gradients are what backward returns.
static void test_derivatives_linear() {
    enum { N = 3, C = 5, OC = 7 };
    give_workspace();
    Reals inp = noise(N * C, 1, 1), weight = noise(OC * C, 1, 2), bias = noise(OC, 1, 3);
    Reals addend = noise(N * OC, 1, 4), dout = noise(N * OC, 1, 5), out(N * OC);
    Reals dinp(N * C), dweight(OC * C), dbias(OC);
    matmul_backward(dinp.data(), dweight.data(), dbias.data(), dout.data(), inp.data(),
                    weight.data(), N, C, OC);
    Loss loss = [&] {
        matmul_forward(out.data(), inp.data(), weight.data(), bias.data(), addend.data(), N, C, OC);
        return dot(out, dout);
    };
    expect_gradient(inp, dinp, loss);
    expect_gradient(weight, dweight, loss);
    expect_gradient(bias, dbias, loss);
    expect_gradient(addend, dout, loss);
}

// Inputs, weights and biases of a LayerNorm whose width is no multiple of anything.
static void test_derivatives_layernorm() {
    enum { N = 3, C = 19 };
    Reals inp = noise(N * C, 1, 1), weight = noise(C, 1, 2), bias = noise(C, 1, 3), out(N * C);
    Reals dout = noise(N * C, 1, 4), mean(N), rstd(N), dinp(N * C), dweight(C), dbias(C);
    Loss loss = [&] {
        layernorm_forward(out.data(), mean.data(), rstd.data(), inp.data(), weight.data(),
                          bias.data(), N, C);
        return dot(out, dout);
    };
    loss();
    layernorm_backward(dinp.data(), dweight.data(), dbias.data(), dout.data(), inp.data(),
                       weight.data(), mean.data(), rstd.data(), NULL, N, C);
    expect_gradient(inp, dinp, loss);
    expect_gradient(weight, dweight, loss);
    expect_gradient(bias, dbias, loss);
}

// All of dqkv, two sequences of five heads.
static void test_derivatives_attention() {
    enum { B = 2, T = 9, C = 20, NH = 5 };
    give_workspace();
    Reals qkv = noise(B * T * 3 * C, 1, 1), out(B * T * C), lse(B * NH * T);
    Reals dout = noise(B * T * C, 1, 2), dqkv(qkv.size());
    Loss loss = [&] {
        attention_forward(out.data(), lse.data(), qkv.data(), B, T, C, NH);
        return dot(out, dout);
    };
    loss();
    attention_backward(dqkv.data(), dout.data(), qkv.data(), out.data(), lse.data(), B, T, C, NH);
    expect_gradient(qkv, dqkv, loss);
}

// x from -3.5 to 3.5.
static void test_derivatives_gelu() {
    Reals inp = noise(301, 2, 1), out(301), dout = noise(301, 1, 2), dinp(301);
    gelu_backward(dinp.data(), dout.data(), inp.data(), inp.size());
    Loss loss = [&] {
        gelu_forward(out.data(), inp.data(), inp.size());
        return dot(out, dout);
    };
    expect_gradient(inp, dinp, loss);
}

// Weighted losses of three rows; padded logits have no influence.
static void test_derivatives_classifier() {
    enum { ROWS = 3, V = 21, Vp = 128 };
    Reals logits = noise(ROWS * Vp, 1, 1), losses(ROWS), dlogits = logits;
    static const Token targets[ROWS] = {0, 20, 7};
    classifier_forward_backward(losses.data(), dlogits.data(), targets, 0.25, ROWS, V, Vp, 1);
    Loss loss = [&] {
        Reals scratch_logits = logits;
        classifier_forward_backward(losses.data(), scratch_logits.data(), targets, 0, ROWS, V, Vp,
                                    0);
        return 0.25 * (losses[0] + losses[1] + losses[2]);
    };
    expect_gradient(logits, dlogits, loss);
}

// The whole network: for each of the sixteen tensors (all layers at once) the slope along two
// random directions of unit length and along a dozen single elements.
static void test_derivatives_network() {
    Model m = shape("l2h3c48t8", 257);
    Net n(m, 2, 7, RECOMPUTE_MLP, 1, 5);
    Batch b(14, 257, 1);
    n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
    const Reals g = n.gradients(), start = n.state(STATE_WEIGHTS);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        std::vector<size_t> elements;  // of this tensor, in the flat buffer
        double squares = 0;
        for (int l = 0; l < tensor_copies(&m, tensor); l++) {
            for (int64_t i = 0; i < tensor_size(&m, tensor); i++) {
                elements.push_back((size_t)(tensor_offset(&m, tensor, l) + i));
                squares += g[elements.back()] * g[elements.back()];
            }
        }
        const size_t count = elements.size();
        const double typical = sqrt(squares / (double)count);  // size of a slope along a direction
        for (size_t trial = 0; trial < 14; trial++) {
            Reals direction =
                trial < 2 ? noise(count, 1 / sqrt((double)count), 77 + trial) : Reals(count);
            if (trial >= 2) {
                direction[trial * 7919 % count] = 1;
            }
            double want = 0;
            for (size_t i = 0; i < count; i++) {
                want += direction[i] * g[elements[i]];
            }
            Reals moved = start;
            double found =
                slope([&] { return n.e.forward_loss(&n.e, NULL, &b.inputs[0], &b.targets[0]); },
                      [&](double by) {
                          for (size_t i = 0; i < count; i++) {
                              moved[elements[i]] = start[elements[i]] + by * direction[i];
                          }
                          n.e.write(&n.e, STATE_WEIGHTS, 0, moved.data(), n.size());
                      });
            // The loss is about 6: rounding 6e-13, truncation of the like.
            expect_near(want, found, 4e-12 + 1e-8 * typical, "%s, direction %zu (size %.1e)",
                        tensor_table[tensor].name, trial, typical);
        }
    }
}
#endif

// -------------------------------------------------------------------------------------------------
// 7. The network
// Volume I's chapter The network and the CPU's engine: what must be equal to the bit (recompute
// levels, numbers of threads), and what only to rounding (batches cut in another way).

struct Trace {
    std::vector<double> losses;
    Reals gradients, weights;
    bool operator==(const Trace &other) const {
        return losses == other.losses && same_bits(gradients, other.gradients) &&
               same_bits(weights, other.weights);
    }
};

// Two optimizer steps of `accum_steps` micro-batches: every loss, the first step's gradients, the
// weights after both.
static Trace trace(Net *n, int accum_steps) {
    const int N = n->s.B * n->s.T;
    Trace result;
    Options o;
    options_default(&o);
    o.weight_decay = 0.1;
    for (int step = 0; step < 2; step++) {
        Batch b(N * accum_steps, n->s.model.V, (uint64_t)(5 + step));
        for (int k = 0; k < accum_steps; k++) {
            n->e.micro_step(&n->e, &b.inputs[(size_t)(k * N)], &b.targets[(size_t)(k * N)], k,
                            accum_steps);
        }
        if (step == 0) {
            result.gradients = n->gradients();
        }
        StepResult r = n->e.update(&n->e, &o, 1e-2, HUGE_VAL, step);
        expect(isfinite(r.norm) && r.norm > 0 && !r.skipped, "step %d: norm %g", step, r.norm);
        result.losses.push_back(r.loss);
    }
    result.weights = n->state(STATE_WEIGHTS);
    return result;
}

static const struct {
    const char *e;
    int V, B, T, logit_rows;
} network_shapes[] = {{"l2h3c48t8", 257, 2, 7, 0},
                      {"l3h5c80t33", 300, 1, 33, 10},
                      {"l1h1c64t65", 129, 2, 65, 13},
                      {"l2h2c6t1", 5, 3, 1, 0}};

// Every level in all blocks, and block:K for every K, against none.
static void test_recompute_bits() {
    int runs = 0;
    for (auto &shape_row : network_shapes) {
        Model m = shape(shape_row.e, shape_row.V);
        auto run = [&](int level, int blocks) {
            Net n(m, shape_row.B, shape_row.T, level, blocks, shape_row.logit_rows);
            runs++;
            return trace(&n, 2);
        };
        Trace reference = run(RECOMPUTE_NONE, m.L);
        expect(isfinite(reference.losses[0]) && reference.losses[0] != reference.losses[1]);
        for (int level = RECOMPUTE_GELU; level < RECOMPUTE_LEVELS; level++) {
            for (int blocks = level == RECOMPUTE_BLOCK ? 0 : m.L; blocks <= m.L; blocks++) {
                expect(run(level, blocks) == reference, "%s, -r %s in %d", shape_row.e,
                       level_table[level].name, blocks);
            }
        }
    }
    detail = text("%d runs", runs);
}

// Numbers of all that a run does between its micro-steps: samples, validation, states read as a
// checkpoint reads them, a step that is skipped, weights written as a resume writes them.
static Reals busy_trace(Net *n, int accum_steps) {
    const int N = n->s.B * n->s.T, V = n->s.model.V;
    Reals all, logits((size_t)V);
    Options o;
    options_default(&o);
    o.weight_decay = 0.1;
    auto add = [&](const Reals &x) { all.insert(all.end(), x.begin(), x.end()); };
    if (n->s.dtype == TYPE_FP16) {
        n->e.scale_loss(&n->e, 8, 0);  // few rows allow no more
    }
    for (int step = 0; step < 4; step++) {
        Batch b(N * accum_steps, V, (uint64_t)(5 + step));
        for (int k = 0; k < accum_steps; k++) {
            const Token *inputs = &b.inputs[(size_t)(k * N)];
            const Token *targets = &b.targets[(size_t)(k * N)];
            if ((step + k) % 2) {
                add({(real)n->e.forward_loss(&n->e, NULL, inputs, targets)});
                n->e.logits(&n->e, logits.data(), inputs, min_int(3, n->s.T));
                add(logits);
            }
            n->e.micro_step(&n->e, inputs, targets, k, accum_steps);
        }
        add(n->gradients());
        const double limit = step == 1 ? 0 : HUGE_VAL;
        StepResult r = n->e.update(&n->e, &o, 1e-2, limit, step);
        expect(r.skipped == (step == 1) && isfinite(r.norm) && r.norm > 0, "step %d", step);
        add({(real)r.loss, (real)r.norm});
        for (int state : {STATE_WEIGHTS, STATE_M, STATE_V}) {
            add(n->state(state));
        }
        if (step == 2) {
            Reals half = n->state(STATE_WEIGHTS);
            n->e.forward_loss(&n->e, NULL, b.inputs.data(), b.targets.data());
            for (real &x : half) {
                x *= (real)0.5;
            }
            n->e.write(&n->e, STATE_WEIGHTS, 0, half.data(), n->size());
        }
    }
    return all;
}

// Every state alone and all together in host memory against none, in networks of one block, of as
// many as there are slots, of one more, and of more than slots are filled ahead. A build with
// sanitizers takes a quarter of these runs.
static void test_offload_bits() {
    int runs = 0, turn = 0;
    for (const char *e : {"l1h1c16t8", "l2h2c16t8", "l3h1c24t9", "l6h2c20t7"}) {
        Model m = shape(e, 257);
        for (int level : {0, 1}) {
            for (int accum_steps : {1, 3}) {
                if (TEST_ASAN && turn++ % 4 != (m.L == 6 ? 3 : m.L)) {
                    continue;
                }
                auto run = [&](const char *offload) {
                    Net n(m, text("-b 2 -t 7 -r %d --offload ", level) + offload, 0);
                    runs++;
                    return busy_trace(&n, accum_steps);
                };
                const Reals want = run("none");
                for (const char *offload : {"weights", "gradients", "moments", "residuals",
                                            "weights,gradients,moments,residuals"}) {
                    expect(same_bits(run(offload), want), "%s, -r %d, %d micro-steps, %s", e,
                           level, accum_steps, offload);
                }
            }
        }
    }
    detail = text("%d runs", runs);
}

// A slot is refused to all but its tenant, and to whoever asks before the tenant is there.
static void test_slots() {
#ifdef _OPENMP
    omp_set_num_threads(1);  // as in test_arena
#endif
    Model m = shape("l4h1c16t8", 257);
    Net n(m, "-b 1 -t 7 --offload weights,gradients,residuals", 0);
    Plan *p = &n.plan;
    Batch b(7, m.V, 1);
    n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
    weight(p, FCW, 0);  // blocks 0 and 1 are the last to have come
    weight(p, FCW, 1);
    weight(p, LN1W, 3);
    expect_death(weight(p, FCW, 2), "weights of block 2 are not in their slot at tick");
    expect_death(dweight(p, QKVW, 3), "gradients of block 3 are not in their slot at tick");
    expect_death(act(p, ACT_X, 2), "residuals of block 2 are not in their slot at tick");
    n.e.write(&n.e, STATE_WEIGHTS, 0, n.state(STATE_WEIGHTS).data(), n.size());
    expect_death(weight(p, FCW, 0), "weights of block 0 are not in their slot at tick");
    plan_tick(p, 0);
    visits_move(p, 0, MOVE_ARRIVE, 0);
    expect_death(weight(p, FCW, 0), "weights of block 0 are not in their slot at tick 0");
}

// Whole steps with products of bf16: the same bits whatever the threads and the recomputation, and
// gradients near those of fp32, within four units of bf16: an operand that is rounded has an error
// of half a unit at most, and errors of a sum's terms cancel, but each stage of a block adds
// its own.
static void test_bf16_steps() {
    const char *missing = bf16_missing();
    if (missing) {
        skip(missing);
    }
    double worst = 0;
    for (const char *e : {"l2h3c48t70", "l3h5c80t33"}) {
        const Model m = shape(e, 257);
        Net exact(m, "-b 3", 0);
        const Trace want = trace(&exact, 2);
        Trace first;
        for (const char *options : {"-b 3 --matmul bf16", "-b 3 --matmul bf16 -r block"}) {
            for (int threads = 1; threads <= 3; threads++) {
#ifdef _OPENMP
                omp_set_num_threads(threads);
#endif
                Net n(m, options, 0);
                const Trace got = trace(&n, 2);
                first = first.losses.empty() ? got : first;
                expect(got == first, "%s %s, %d threads", e, options, threads);
            }
        }
        double difference = 0, size = 0;
        for (size_t i = 0; i < want.gradients.size(); i++) {
            difference += pow((double)first.gradients[i] - (double)want.gradients[i], 2);
            size += pow((double)want.gradients[i], 2);
        }
        worst = fmax(worst, sqrt(difference / size));
        expect(difference > 0, "%s: nothing was rounded", e);
        expect_near((wide)sqrt(difference / size), 0, 0x1p-6, "gradients of %s", e);
        expect_near((wide)first.losses[0], (wide)want.losses[0], 0x1p-8, "loss of %s", e);
    }
    detail = text("gradients within %.1e of fp32's, bound 1.6e-02", worst);
}

// Losses, gradients, weights, and products large enough to be shared out, for 1 to 3 threads.
static void test_thread_bits() {
#ifdef _OPENMP
    Trace first[4];
    Reals products[3];
    const int N = 70, C = 1000, OC = 112;  // of one row too, enough products to be shared out
    Reals inp = noise(N * C, 1, 1), weight = noise(OC * C, 1, 2), dout = noise(N * OC, 1, 3);
    Reals qkv = noise(2 * 70 * 3 * 64, 1, 4), dqkv(qkv.size()), datt = noise(2 * 70 * 64, 1, 5);
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        for (size_t k = 0; k < 4; k++) {
            auto &row = network_shapes[k];
            Net n(shape(row.e, row.V), row.B, row.T, 0, -1, row.logit_rows);
            Trace t = trace(&n, 2);
            expect(threads == 1 || t == first[k], "%s, %d threads", row.e, threads);
            first[k] = threads == 1 ? t : first[k];
        }
        give_workspace();
        Reals out(N * OC), dinp(N * C), dweight(OC * C), dbias(OC), att(datt.size()),
            lse(2 * 4 * 70), row(OC);
        #pragma omp parallel
        #pragma omp master
        {
            matvec_forward(row.data(), inp.data(), weight.data(), NULL, NULL, 1, C, OC);
            matmul_forward(out.data(), inp.data(), weight.data(), NULL, NULL, N, C, OC);
            matmul_backward(dinp.data(), dweight.data(), dbias.data(), dout.data(), inp.data(),
                            weight.data(), N, C, OC);
            attention_forward(att.data(), lse.data(), qkv.data(), 2, 70, 64, 4);
            attention_backward(dqkv.data(), datt.data(), qkv.data(), att.data(), lse.data(), 2, 70,
                               64, 4);
        }
        Reals all;
        for (Reals *part : {&out, &dinp, &dweight, &dbias, &att, &lse, &dqkv, &row}) {
            all.insert(all.end(), part->begin(), part->end());
        }
        products[threads - 1] = all;
        expect(same_bits(all, products[0]), "matmul or attention, %d threads", threads);
    }
    detail = "1, 2 and 3 threads";
#else
    skip("built without OpenMP");
#endif
}

// One batch of 4, two of 2, four of 1, and irregular chunks of logits: equal up to rounding. Each
// gradient went through at most 6 L + 2 matmuls, each with the error of a sum of 4 C products.
static void test_accumulation() {
    Model m = shape("l2h3c48t8", 257);
    const double tol = (6 * m.L + 2) * 2 * sum_error(4 * m.C);
    Net whole(m, 4, 7);
    Trace want = trace(&whole, 1);
    static const int cuts[][3] = {{2, 2, 0}, {1, 4, 0}, {4, 1, 9}, {2, 2, 1}};  // B, steps, chunk
    for (auto &cut : cuts) {
        Net n(m, cut[0], 7, 0, -1, cut[2]);
        Trace got = trace(&n, cut[1]);
        expect_near(got.losses[0], want.losses[0], tol * want.losses[0], "loss, B %d", cut[0]);
        for (int tensor = 0; tensor < TENSORS; tensor++) {
            double distance = 0, size = 0;
            for (int l = 0; l < tensor_copies(&m, tensor); l++) {
                for (int64_t i = 0; i < tensor_size(&m, tensor); i++) {
                    size_t k = (size_t)(tensor_offset(&m, tensor, l) + i);
                    double w = (double)want.gradients[k], d = (double)got.gradients[k] - w;
                    distance += d * d;
                    size += w * w;
                }
            }
            expect_near((wide)sqrt(distance), 0, tol * sqrt(size), "%s, B %d x %d, chunk %d",
                        tensor_table[tensor].name, cut[0], cut[1], cut[2]);
        }
    }
}

// A token changes nothing before it; forward_loss, micro_step and logits tell the same loss; the
// padded rows of wte stay zero through training.
static void test_network_facts() {
    Model m = shape("l2h3c48t12", 200);
    const int T = 12;
    Net n(m, 1, T);
    Batch b(T, m.V, 1);
    double loss = n.e.forward_loss(&n.e, NULL, b.inputs.data(), b.targets.data());
    const real *losses = buffer(&n.plan, BUF_LOSSES);
    Reals before(losses, losses + T);
    Reals logits((size_t)m.V);
    for (int length = 1; length <= T; length += 5) {
        n.e.logits(&n.e, logits.data(), b.inputs.data(), length);
        double most = -HUGE_VAL, sum = 0;
        for (real x : logits) {
            most = std::max(most, (double)x);
        }
        for (real x : logits) {
            sum += exp((double)x - most);
        }
        double found = log(sum) + most - (double)logits[(size_t)b.targets[(size_t)length - 1]];
        expect_near((wide)found, before[(size_t)length - 1],
                    14 * sum_error(4 * m.C) * 4 * (1 + most), "logits after %d tokens", length);
    }
    n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
    Options o;
    options_default(&o);
    o.weight_decay = 0.1;
    expect(n.e.update(&n.e, &o, 0, HUGE_VAL, 0).loss == loss, "forward_loss and micro_step");
    for (int t = T - 1; t > 0; t--) {
        b.inputs[(size_t)t] = (b.inputs[(size_t)t] + 1) % m.V;
        n.e.forward_loss(&n.e, NULL, b.inputs.data(), b.targets.data());
        expect(memcmp(losses, before.data(), (size_t)t * sizeof(real)) == 0 &&
                   losses[t] != before[(size_t)t],
               "token %d is seen too early, or never", t);
    }
    for (int step = 0; step < 3; step++) {
        n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
        n.e.update(&n.e, &o, 0.1, HUGE_VAL, step);
    }
    Reals w = n.state(STATE_WEIGHTS);
    for (size_t i = (size_t)m.V * (size_t)m.C; i < (size_t)m.Vp * (size_t)m.C; i++) {
        expect(w[i] == 0, "padded row %d", (int)i / m.C);
    }
}

// With a KV cache, in pieces of all sizes, the logits are those of the whole window but for
// rounding, since a token by itself has sums of another order; and again where other tokens follow
// the first ones, as in a second sample. In the plan are weights, cache, and of everything else a
// few rows.
static void test_kv_cache() {
    static const struct {
        const char *e;
        int V, again;
        std::vector<int> pieces;
    } rows[] = {{"l2h3c48t12", 200, 5, {1, 1, 4, 6}},
                {"l2h2c80t300", 257, 130, {1, 70, 57, 1, 130, 1, 40}},
                {"l1h3c6t140", 130, 127, {64, 64, 1, 11}},
                {"l2h1c400t70", 20, 64, {69, 1}}};
    for (auto &row : rows) {
        Model m = shape(row.e, row.V);
        Net whole(m, 1, m.maxT), cached(m, "--generate", 0);
        Batch b(m.maxT, m.V, 1);
        Reals want((size_t)m.V), got((size_t)m.V);
        auto compare_after = [&](int first, int n) {
            cached.e.extend(&cached.e, got.data(), &b.inputs[(size_t)first], first, n);
            whole.e.logits(&whole.e, want.data(), b.inputs.data(), first + n);
            for (int v = 0; v < m.V; v++) {
                expect_near((wide)got[(size_t)v], (wide)want[(size_t)v],
                            (2 + 6 * m.L) * sum_error(4 * m.C), "%s: %d tokens behind %d", row.e, n,
                            first);
            }
        };
        int first = 0;
        for (const int n : row.pieces) {
            compare_after(first, n);
            first += n;
        }
        for (int t = row.again; t < m.maxT; t++) {
            b.inputs[(size_t)t] = (b.inputs[(size_t)t] + 1) % m.V;
        }
        compare_after(row.again, 1);
        compare_after(row.again + 1, m.maxT - row.again - 1);
        size_t device[GROUPS], host[GROUPS];
        plan_groups(&cached.plan, device, host);
        const size_t cache = 2 * (size_t)(m.L * m.maxT * m.C) * sizeof(real);
        const size_t few = sizeof(real) * GENERATE_ROWS * 20 * (size_t)(m.C + 64) +
                           matmul_workspace_bytes(cached.s.threads);
        expect(device[GROUP_CACHE] - cache < PLAN_ALIGN + PLAN_GAP + 1, "%s: %zu bytes", row.e,
               device[GROUP_CACHE]);
        expect(cached.plan.device_bytes < (size_t)cached.size() * sizeof(real) + cache + few,
               "%s: %zu bytes", row.e, cached.plan.device_bytes);
        expect(device[GROUP_GRADIENTS] + device[GROUP_MOMENTS] + device[GROUP_KEPT] +
               cached.plan.host_bytes == 0, "%s: states of training", row.e);
    }
    // In training a chunk of one row has the sums of any other row.
    Reals losses[2];
    for (int k = 0; k < 2; k++) {
        Net n(shape("l1h3c72t9", 257), 1, 9, 0, -1, k ? 1 : 9);
        Batch b(9, 257, 1);
        losses[k].resize(9);
        n.e.forward_loss(&n.e, losses[k].data(), b.inputs.data(), b.targets.data());
    }
    expect(same_bits(losses[0], losses[1]), "chunks of one row");
}

// The tokens of samples, one behind another from the same cache, are those picked from the logits
// of the whole window: within the window, past it, and behind a sample of either kind. The first
// one of each sample is picked from the same bits.
static void test_generated_tokens() {
    Model m = shape("l2h3c48t12", 257);
    Net whole(m, 1, m.maxT), cached(m, "--generate", 0);
    const int PROMPT = 4, MOST = 20;
    Batch b(PROMPT, m.V, 1);
    std::vector<Token> tokens(PROMPT + MOST);
    std::vector<Candidate> candidates((size_t)m.V);
    Reals logits((size_t)m.V), prompt_logits((size_t)m.V), first;
    Options o;
    options_default(&o);
    const SampleRule rule = {o.temperature, o.top_p, o.top_k};
    Generator g;
    memset((void *)&g, 0, sizeof g);
    g.engine = &cached.e;
    g.o = &o;
    g.tokenizer = TOKENIZER_BYTES;
    g.V = m.V;
    g.T = m.maxT;
    g.tokens = tokens.data();
    g.logits = logits.data();
    g.prompt_logits = prompt_logits.data();
    g.scratch = candidates.data();
    int kept = 0, sample = 0;
    fflush(stdout);
    const int terminal = dup(1), nowhere = open("/dev/null", O_WRONLY);
    for (const int length : {5, 8, MOST, 6, MOST}) {
        std::vector<Token> want(b.inputs);
        o.sample_tokens = length;
        memcpy(g.tokens, want.data(), PROMPT * sizeof(Token));
        dup2(nowhere, 1);
        kept = generate_sample(&g, sample, PROMPT, kept);
        dup2(terminal, 1);
        for (uint64_t i = 0; i < (uint64_t)length; i++) {
            const int n = (int)want.size(), start = std::max(0, n - m.maxT);
            whole.e.logits(&whole.e, logits.data(), &want[(size_t)start], n - start);
            const double u =
                rng_uniform((uint64_t)o.seed, RNG_SAMPLE, 0, (uint64_t)sample << 32 | i);
            want.push_back(sample_token(logits.data(), m.V, &rule, u, candidates.data()));
            if (want.back() == BYTE_END_OF_TEXT) {
                break;
            }
        }
        expect(memcmp(want.data(), g.tokens, want.size() * sizeof(Token)) == 0, "sample %d",
               sample);
        first = sample ? first : prompt_logits;
        expect(same_bits(prompt_logits, first), "the first token of sample %d", sample);
        sample++;
    }
    close(nowhere);
    close(terminal);
}

// Deviations of the initial weights within four standard errors; what is not random is exact.
static void test_initialise() {
    Model m = shape("l3h2c64t20", 257);
    Net n(m, 1, 4);
    engine_initialise(&n.e, &m, 42);
    Reals w = n.state(STATE_WEIGHTS), v = n.state(STATE_V);
    expect(std::count(v.begin(), v.end(), (real)0) == n.size());
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        int64_t size = tensor_rows(&m, tensor) * tensor_cols(&m, tensor);
        Init init = tensor_table[tensor].init;
        double std = init == INIT_RESIDUAL ? 0.02 / sqrt(6.0)
                     : init == INIT_NORMAL ? 0.02
                                           : 0,
               sum = 0;
        for (int l = 0; l < tensor_copies(&m, tensor); l++) {
            const real *x = &w[(size_t)tensor_offset(&m, tensor, l)];
            for (int64_t i = 0; i < size; i++) {
                double d = (double)x[i] - (init == INIT_ONE);
                sum += d * d / (double)(size * tensor_copies(&m, tensor));
            }
        }
        expect_near((wide)sqrt(sum), (wide)std, 4 * std / sqrt(2.0 * (double)size), "%s",
                    tensor_table[tensor].name);
    }
    engine_initialise(&n.e, &m, 42);
    expect(same_bits(w, n.state(STATE_WEIGHTS)), "the same seed");
    engine_initialise(&n.e, &m, 43);
    expect(!same_bits(w, n.state(STATE_WEIGHTS)), "another seed");
    const real *first = &w[(size_t)tensor_offset(&m, QKVW, 0)];
    expect(memcmp(first, &w[(size_t)tensor_offset(&m, QKVW, 1)], 64) != 0, "layers differ");
}

// -------------------------------------------------------------------------------------------------
// 8. Optimizer, sampling, evaluation, output
// Volume I's chapters Optimizer and schedules, Sampling, Evaluation and Training and output against
// numbers worked out by hand.

// Two updates by hand, on a count that is no multiple of a vector.
static void test_adamw() {
    // lr 0.1, beta 0.9 and 0.99, eps 1e-8, decay 0.1, p = 1.
    // g = 0.5: m = 0.05, v = 0.0025; corrected 0.5, 0.25; p = 1 - 0.1 (0.5 / 0.5 + 0.1) = 0.89.
    // g = -0.25: m = 0.045 - 0.025 = 0.02, v = 0.002475 + 0.000625 = 0.0031; corrected by 0.19 and
    // 0.0199: 0.105263158 and 0.155778894, root 0.394688351, ratio 0.266699431;
    // p = 0.89 - 0.1 (0.266699431 + 0.089) = 0.8544300569.
    static const double g[] = {0.5, -0.25},
                        want[][3] = {{0.89, 0.05, 0.0025}, {0.8544300569, 0.02, 0.0031}};
    Reals p(9, 1), m(9), v(9), grad(9);
    for (int t = 0; t < 2; t++) {
        AdamW a = {
            (real)0.1,  (real)0.9, (real)0.99, (real)(t ? 0.19 : 0.1), (real)(t ? 0.0199 : 0.01),
            (real)1e-8, (real)0.1, (real)0.5};
        grad.assign(9, (real)(g[t] / 0.5));  // grad_scale 0.5 restores it
        adamw_update(p.data(), m.data(), v.data(), grad.data(), &a, a.weight_decay, 9);
        // Nine digits by hand; 1 - beta2 in fp32 may be off by 6e-8 / 0.01 of itself.
        for (size_t i = 0; i < 9; i++) {
            expect_near(p[i], (wide)want[t][0], 5e-9 + 8 * unit, "p after %d", t + 1);
            expect_near(m[i], (wide)want[t][1], 1e-9 + 4 * unit, "m after %d", t + 1);
            expect_near(v[i], (wide)want[t][2], want[t][2] * 200 * unit, "v after %d", t + 1);
        }
    }
}

// Decay on matrices only, clipping by the whole norm, nothing at all when the norm is not finite or
// above the limit.
static void test_update() {
    Model m = shape("l2h2c16t8", 257);
    Net n(m, 1, 4);
    real *g = buffer(&n.plan, BUF_GRADS);
    const Reals start = n.state(STATE_WEIGHTS);
    Options o;
    options_default(&o);
    o.weight_decay = 0.5;
    int skipped = -1;
    memset(g, 0, (size_t)n.size() * sizeof(real));
    expect(network_update(&n.plan, &o, 0.1, HUGE_VAL, 0, &skipped) == 0 && skipped == 0);
    Reals w = n.state(STATE_WEIGHTS);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int64_t i = 0; i < tensor_size(&m, tensor); i++) {  // 1 - 0.1 x 0.5 = 0.95
            size_t k = (size_t)(tensor_offset(&m, tensor, tensor_copies(&m, tensor) - 1) + i);
            double keep = tensor == WTE || tensor == WPE || tensor == QKVW || tensor == ATTPROJW ||
                                  tensor == FCW || tensor == FCPROJW
                              ? 0.95
                              : 1;
            expect_near(w[k], start[k] * (wide)keep,
                        keep < 1 ? 4 * unit * fabs((double)start[k]) : 0, "decay of %s",
                        tensor_table[tensor].name);
        }
    }
    static const double bad[] = {NAN, HUGE_VAL, -HUGE_VAL, 6};
    for (double value : bad) {
        g[tensor_offset(&m, LNFB, 0)] = (real)value;
        network_update(&n.plan, &o, 0.1, 5, 0, &skipped);
        expect(skipped == 1 && same_bits(w, n.state(STATE_WEIGHTS)), "norm %g, limit 5", value);
    }
    Reals zero = n.state(STATE_M);
    expect(std::count(zero.begin(), zero.end(), (real)0) == n.size(),
           "moments after skipped steps");
    g[tensor_offset(&m, LNFB, 0)] = 0;
    g[0] = 3;
    g[1] = -4;  // norm 5, clip 1: m = 0.1 x 3 / 5 and -0.1 x 4 / 5
    expect(network_update(&n.plan, &o, 0.1, HUGE_VAL, 0, &skipped) == 5 && !skipped);
    Reals moments = n.state(STATE_M);
    expect_near(moments[0], (wide)0.06, 0.06 * 8 * unit + 1e-17, "m, clipped");
    expect_near(moments[1], (wide)-0.08, 0.08 * 8 * unit + 1e-17, "m, clipped");
    g[0] = g[1] = 0;
    g[2] = (real)0.5;  // norm 0.5, clip 1: as it is
    network_update(&n.plan, &o, 0.1, HUGE_VAL, 1, &skipped);
    expect_near(n.state(STATE_M)[2], (wide)0.05, 0.05 * 8 * unit + 1e-17, "m, not clipped");
    // What lies between two tensors is no parameter: sizes here are no multiples of TENSOR_ALIGN.
    real *weights = buffer(&n.plan, BUF_WEIGHTS), *m1 = buffer(&n.plan, BUF_M);
    const int64_t begin = tensor_offset(&m, LN1W, 0) + m.C, end = tensor_offset(&m, LN1B, 0);
    std::fill(weights + begin, weights + end, (real)7);
    std::fill(m1 + begin, m1 + end, (real)NAN);
    network_update(&n.plan, &o, 0.1, HUGE_VAL, 2, &skipped);
    expect(end > begin && std::count(weights + begin, weights + end, (real)7) == end - begin,
           "AdamW leaves gaps alone");
}

// The norm of a flat state of more than two chunks, of 65,536 numbers each, and a few over.
static void test_norm() {
    Model m = shape("l2h1c36t80", 3000);
    Net n(m, 1, 4);
    Reals x((size_t)n.size());
    wide squares = 0;
    TensorSpan span = {0, 0, 0, 0, 0, 0};
    while (span_next(&m, 0, n.size(), &span)) {
        const Reals values = noise((size_t)span.count, 1, (uint64_t)span.next);
        std::copy(values.begin(), values.end(), x.begin() + span.at);
        for (real value : values) {
            squares += (wide)value * value;
        }
    }
    expect(n.size() > 2 * 65536 && n.size() % 65536 > 0);
    memcpy(buffer(&n.plan, BUF_GRADS), x.data(), x.size() * sizeof(real));
    expect_near((wide)gradient_norm(&n.plan), (wide)sqrt((double)squares),
                sqrt((double)squares) * 4 * sqrt((double)n.size()) * 0x1p-53, "norm of %d numbers",
                (int)n.size());
}

// Learning rates at places where they are round numbers, and the limit of --skip-zscore.
static void test_schedules() {
    // Peak 1, last 0.1, 10 steps of warmup, 110 steps: t = (step - 10) / 100.
    static const struct {
        const char *schedule;
        int step;
        double rate;
    } known[] = {{"cosine", 0, 0.1},    {"cosine", 4, 0.5},   {"cosine", 9, 1},
                 {"cosine", 10, 1},     {"cosine", 60, 0.55}, {"cosine", 35, 0.868198051534},
                 {"cosine", 110, 0.1},  {"linear", 10, 1},    {"linear", 35, 0.775},
                 {"linear", 85, 0.325}, {"linear", 110, 0.1}, {"constant", 0, 0.1},
                 {"constant", 109, 1},  {"wsd", 90, 1},       {"wsd", 50, 1},
                 {"wsd", 95, 0.55},     {"wsd", 110, 0.1},    {"wsd", 91, 0.798753882025},
                 {"wsd", 5, 0.6}};
    Options o;
    options_default(&o);
    o.lr = 1;
    o.final_lr = 0.1;
    o.warmup = 10;
    for (auto &k : known) {  // 0.868.. = 0.1 + 0.45 (1 + sqrt(1/2)), 0.798.. = 1 - 0.9 sqrt(0.05)
        o.schedule = choice_find(schedules, k.schedule, strlen(k.schedule));
        expect_near((wide)learning_rate(&o, k.step, 110), (wide)k.rate, 1e-11, "%s step %d",
                    k.schedule, k.step);
    }
    NormWindow w = {{0}, 0};
    for (; w.count < NORM_WINDOW; w.count++) {
        expect(norm_limit(&w, 3) == HUGE_VAL, "before the window is full");
        w.values[w.count] = w.count % 2 ? 1 : 3;  // mean 2, deviation 1
    }
    expect_near((wide)norm_limit(&w, 3), 5, 1e-12, "limit at 3 deviations");
    for (double &norm : w.values) {
        norm *= 4;  // mean 8, deviation 4, variance 16
    }
    expect_near((wide)norm_limit(&w, 2), 16, 1e-12, "limit at 2 deviations of 4");
    expect(norm_limit(&w, 0) == HUGE_VAL, "0: never");
}

// Likeliest token, top-k, top-p, and frequencies: the inverse of the distribution at n even places
// gives each token n p tokens, within two.
static void test_sampling() {
    enum { V = 6, DRAWS = 20000 };
    static const double p[V] = {0.05, 0.4, 0.1, 0.25, 0.15, 0.05};
    real logits[V];
    Candidate candidates[V];
    for (int v = 0; v < V; v++) {
        logits[v] = (real)(log(p[v]) + 3);
    }
    static const struct {
        double temperature, top_p;
        int top_k;
        double want[V];
    } cases[] = {{1, 1, 0, {0.05, 0.4, 0.1, 0.25, 0.15, 0.05}},
                 {0, 1, 0, {0, 1, 0, 0, 0, 0}},
                 {1, 1, 2, {0, 0.4 / 0.65, 0, 0.25 / 0.65, 0, 0}},
                 {1, 1, 99, {0.05, 0.4, 0.1, 0.25, 0.15, 0.05}},
                 {1, 0.7, 0, {0, 0.5, 0, 0.3125, 0.1875, 0}},  // 0.4 + 0.25 + 0.15 reaches 0.7
                 {1, 1e-6, 0, {0, 1, 0, 0, 0, 0}},
                 {1, 0.6, 3, {0, 0.4 / 0.65, 0, 0.25 / 0.65, 0, 0}},  // of 0.8: 0.65 reaches 0.48
                 {1, 0.45, 3, {0, 1, 0, 0, 0, 0}},  // 0.4 reaches 0.36, and would not reach 0.45
                 {0.5, 1, 0, {0.01, 0.64, 0.04, 0.25, 0.09, 0.01}}};  // squares over 0.25 + ...
    for (auto &c : cases) {
        int counts[V] = {0};
        double sum = 0;
        for (int v = 0; v < V; v++) {
            sum += c.want[v];
        }
        for (int i = 0; i < DRAWS; i++) {
            SampleRule rule = {c.temperature, c.top_p, c.top_k};
            counts[sample_token(logits, V, &rule, (i + 0.5) / DRAWS, candidates)]++;
        }
        for (int v = 0; v < V; v++) {
            expect_near(counts[v], (wide)(c.want[v] / sum * DRAWS), c.want[v] == 0 ? 0 : 2,
                        "token %d, temperature %g top-k %d top-p %g", v, c.temperature, c.top_k,
                        c.top_p);
        }
    }
    real equal[V] = {1, 2, 2, 0, 2, 1};
    const SampleRule likeliest = {0, 1, 0};
    expect(sample_token(equal, V, &likeliest, 0.9, candidates) == 1, "the first of equals");
    real four[4] = {1, 1, 1, 1};
    const SampleRule half = {1, 0.5, 0};  // two of them have it exactly
    expect(sample_token(four, 4, &half, 0.99, candidates) == 1, "one more than top-p needs");
}

// The checker itself, text of every byte, numbers that are none, and cutting back.
static void test_log() {
    expect(json_valid("{\"a\":[1,-2.5e3,\"x\\u00e9\\n\",{}],\"b\":null}") && json_valid("[]"));
    for (const char *bad :
         {"{\"a\":nan}", "{\"a\":1,}", "[1 2]", "{\"a\" 1}", "\"\n\"", "{", "inf", "[1]]"}) {
        expect(!json_valid(bad), "%s", bad);
    }
    // What begins and ends each range of well-formed UTF-8, and what lies just outside.
    for (const char *utf8 : {"\xc3\xa9", "\xe2\x82\xac\xed\x9f\xbf", "\xf0\x9f\x98\x80", "\x7f",
                             "\xc2\x80\xf4\x8f\xbf\xbf\xe0\xa0\x80\xf0\x90\x80\x80"}) {
        expect(json_valid(Text("\"") + utf8 + "\""), "%s", utf8);
    }
    for (const char *none : {"\x80", "\xc3", "\xc3(", "\xc0\xaf", "\xe0\x9f\xbf", "\xed\xa0\x80",
                             "\xe2\x82", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xff",
                             "\xf5\x80\x80\x80", "\\\xc3\xa9", "\\u12"}) {
        expect(!json_valid(Text("\"") + none + "\""), "%s", none);
    }
    FILE *f = fopen("text", "w");
    fputs("{\"sample\":\"", f);
    char bytes[257];
    for (int i = 0; i < 256; i++) {
        bytes[i] = (char)i;
    }
    json_text(f, bytes, 256);
    fputs("\"", f);
    json_number(f, "x", NAN);
    json_number(f, "y", -HUGE_VAL);
    json_number(f, "z", 0.1);
    fputs("}", f);
    fclose(f);
    Text line = read_file("text");
    expect(json_valid(line) && line.find("\"x\":null,\"y\":null,\"z\":0.1}") != Text::npos);
    const Text head = "{\"event\":\"start\"}\n{\"step\":1,\"loss\":2}\n";
    const Text long_line = "{\"step\":2,\"sample\":\"" + Text(1000, 'x') + "\"}\n";
    static const struct {
        const char *tail;
        int step, keeps_long;
    } cuts[] = {
        {"{\"step\":3,\"loss\":1}\n", 2, 1}, {"{\"step\":2,\"lo", 2, 1}, {"", 2, 1}, {"", 1, 0}};
    for (auto &cut : cuts) {
        write_file("log", head + long_line + cut.tail);
        log_cut("log", cut.step);
        expect(read_file("log") == (cut.keeps_long ? head + long_line : head), "%s", cut.tail);
    }
    // Reading that fails half way, here for want of memory for a line, cuts nothing.
    enum { LONG = 64 << 20 };
    write_file("log", head);
    expect(truncate("log", LONG) == 0);
    const int status = outcome(spawn([] {
        struct rlimit limit = {LONG / 2, LONG / 2};
        limit.rlim_cur += (rlim_t)file_number("/proc/self/status", "VmSize:", 0) << 10;
        limit.rlim_max = limit.rlim_cur;
        expect(TEST_ASAN || setrlimit(RLIMIT_AS, &limit) == 0);  // which needs terabytes itself
        expect(TEST_ASAN || (log_cut("log", 9) < 0 && errno == ENOMEM));
    })).status;
    expect(status == 0 && read_file("log").size() == LONG, "status %d", status);
}

// A signal ends a wait for input even if it comes between the last look at stop_signal and the
// wait; input and errors come through.
static void test_read_or_stop() {
    int ends[2];
    char byte = 0;
    expect(pipe(ends) == 0 && write(ends[1], "x", 1) == 1);
    expect(read_or_stop(ends[0], &byte, 1) == 1 && byte == 'x');
    expect(read_or_stop(999, &byte, 1) == -1 && errno == EBADF);  // closed, as stdin may be
    const pid_t late = fork();  // ends a wait that nothing else ends
    if (late == 0) {
        usleep(1000000);
        _exit(write(ends[1], "y", 1) != 1);
    }
    stop_on_signals();
    raise(SIGINT);
    stop_signal = 0;  // as somebody saw it who looked just before
    expect(read_or_stop(ends[0], &byte, 1) == 0, "the signal was missed");
    kill(late, SIGKILL);
    waitpid(late, NULL, 0);
    close(ends[1]);
    alarm(0);
}

// SIGTERM ends a program that makes no progress for 30 s, or that is still starting by then; not
// one that computes or saves, and no other signal does.
static void test_stop_overdue() {
    static const struct {
        int signal, grace, moves, status;
    } rows[] = {{SIGTERM, GRACE_SHORT, 1, 128 + SIGTERM},
                {SIGTERM, GRACE_PROGRESS, 0, 128 + SIGTERM}, {SIGTERM, GRACE_PROGRESS, 1, 0},
                {SIGTERM, GRACE_UNLIMITED, 0, 0}, {SIGINT, GRACE_PROGRESS, 0, 0},
                {SIGUSR1, GRACE_SHORT, 0, 0}};
    for (const auto &row : rows) {
        const Outcome o = outcome(spawn([&] {
            stop_signal = row.signal;
            stop_grace = row.grace;
            for (int second = 0; second < 4 * GRACE_S; second++) {
                row.moves ? progress() : (void)0;
                on_look(SIGALRM);
            }
        }));
        expect(o.status == row.status && o.err.empty() == (row.status == 0),
               "signal %d, grace %d, moves %d: status %d, %s", row.signal, row.grace, row.moves,
               o.status, o.err.c_str());
    }
}

// The lock stays when another descriptor of its file is closed, and keeps a process away that this
// one forks.
static void test_folder_lock() {
    mkdir("folder", 0755);
    folder_lock("folder");
    close(open("folder/lock", O_RDWR));
    expect_death(folder_lock("folder"), "folder: another run writes there: process ");
}

// The cache of the user is where XDG_CACHE_HOME says, unless that is a relative path.
static void test_cache_open() {
    static const char *const rows[][2] = {{"here", "home/.cache"}, {"", "home/.cache"},
                                          {"/xdg", "xdg"}};
    const Text here = Text(getcwd(NULL, 0)) + "/";
    mkdir("home", 0755);
    setenv("HOME", (here + "home").c_str(), 1);
    for (const auto &row : rows) {
        setenv("XDG_CACHE_HOME", row[0][0] == '/' ? (here + (row[0] + 1)).c_str() : row[0], 1);
        FILE *f = cache_open("kept", "a");
        expect(f != NULL && exists(here + row[1] + "/train_gpt2/kept"), "'%s'", row[0]);
        fclose(f);
        remove_folder(row[1]);
    }
    expect(!exists("here"), "a relative path was taken");
}

// The file through an engine with room for B rows of T tokens.
static EvalScore eval_score(Engine *e, const Text &bytes, int V, int B, int T) {
    static Run run;
    EvalFile f;
    EvalScore score;
    Options none = {};
    std::vector<Token> batch((size_t)(2 * B * T), V - 1);
    memset(&score, 0, sizeof score);
    run.o = none;
    run.o.quiet = 1;
    run.s.B = B;
    run.s.T = T;
    run.s.ranks = 1;
    run.engine = *e;
    run.inputs = batch.data();
    run.targets = batch.data() + B * T;
    eval_parse(&f, (const unsigned char *)bytes.data(), bytes.size(), "file", V);
    run_evaluate(&run, &f, &score);
    return score;
}

// An engine that has loss target / 1024, exactly, or 1e6 for targets that belong to no completion.
static int stub_tokens;
static double stub_forward_loss(Engine *, real *losses, const Token *, const Token *targets) {
    for (int i = 0; i < stub_tokens; i++) {
        losses[i] = targets[i] == 0 || targets[i] > 9000 ? (real)1e6 : (real)targets[i] / 1024;
    }
    return 1;
}

// Scores worked out by hand, in batches of any size and at any T: lowest sum and lowest mean, the
// first of equals, two to eight completions, contexts that lose their start.
static void test_eval_scores() {
    const std::vector<Ints> four = {{200, 200}, {250}, {100, 100, 100}, {400}};  // sum 1, mean 2
    const std::vector<Ints> equal = {{500}, {300}, {300, 300}, {300}}, sums = {{100, 200}, {300}};
    const Ints longer = {9001, 9002, 9003, 9004, 9005, 9006};
    const std::vector<Question> questions = {
        {1, {9001}, four},  {1, longer, four},  {2, longer, four},        {1, longer, equal},
        {0, {9001}, equal}, {0, {9001}, sums}, {1, {9001, 9002}, sums},
        {7, longer, {{9}, {8}, {7}, {6}, {5}, {4}, {3}, {2}}}};
    const Text bytes = eval_bytes(questions);  // by sum 0 1 3 5 7 are right, by mean 2 3 5 7
    Engine stub;
    memset(&stub, 0, sizeof stub);
    stub.forward_loss = stub_forward_loss;
    for (int B : {1, 3, 4, 8, 100}) {
        for (int T : {3, 6, 8, 33}) {
            stub_tokens = B * T;
            EvalScore s = eval_score(&stub, bytes, 10000, B, T);
            // Rows of 7 to 9 tokens: of questions 1, 2, 3 and 7; 3 holds rows of 4 tokens.
            const int cut = T == 3 ? 20 : T == 6 ? 5 : 0;
            expect(s.examples == 8 && s.correct == 5 && s.correct_norm == 4 && s.cut_rows == cut,
                   "B %d T %d: %d examples, %d and %d right, %d cut", B, T, s.examples, s.correct,
                   s.correct_norm, s.cut_rows);
        }
    }
    // Every row, token by token.
    EvalFile f;
    EvalExample x;
    eval_parse(&f, (const unsigned char *)bytes.data(), bytes.size(), "file", 10000);
    expect(f.longest_row == 9 && f.longest_completion == 3 && f.longest_at == 0);
    size_t at = LLMC_HEADER_BYTES;
    for (int i = 0; i < f.examples; i++) {
        at += eval_example(&x, &f, at, i);
        for (int k = 0; k < x.completions; k++) {
            for (int T = 3; T < 12; T++) {
                std::vector<Token> inputs((size_t)T, -1), targets((size_t)T, -1);
                Ints all = questions[(size_t)i].context;
                const Ints &completion = questions[(size_t)i].completions[(size_t)k];
                all.insert(all.end(), completion.begin(), completion.end());
                all.erase(all.begin(), all.end() - std::min((long)all.size(), (long)T + 1));
                const size_t kept = all.size();
                all.resize((size_t)T + 1, 0);
                EvalRow row = eval_row(inputs.data(), targets.data(), &x, k, T);
                expect(std::equal(inputs.begin(), inputs.end(), all.begin()) &&
                           std::equal(targets.begin(), targets.end(), all.begin() + 1),
                       "example %d, completion %d, T %d", i, k, T);
                expect(row.count == (int)completion.size() && row.first >= 0 &&
                       row.first + row.count == (int)kept - 1);
            }
        }
    }
    expect_death(eval_row(NULL, NULL, &x, 0, 0), "has changed");
    detail = "20 batches and lengths";
}

// The loss of a completion after its context, worked out from the logits of one row at a time.
static double completion_loss(Engine *e, const Question &q, const Ints &completion, int V) {
    std::vector<Token> tokens(q.context.begin(), q.context.end());
    double loss = 0;
    for (int token : completion) {
        Reals logits((size_t)V);
        e->logits(e, logits.data(), tokens.data(), (int)tokens.size());
        double most = (double)*std::max_element(logits.begin(), logits.end()), all = 0;
        for (real logit : logits) {
            all += exp((double)logit - most);
        }
        loss += log(all) + most - (double)logits[(size_t)token];
        tokens.push_back(token);
    }
    return loss;
}

// Scores of a network are those of its completions' losses; the same bits for any B.
static void test_eval_network() {
    const int T = 14, V = 257;
    Model m = shape("l2h3c48t14", V);
    const std::vector<Question> questions = random_questions(9, V, 1);
    const Text bytes = eval_bytes(questions);
    int correct = 0, correct_norm = 0;
    double sum = 0, mean = 0;
    Net one(m, 1, T);
    for (const Question &q : questions) {
        std::vector<double> sums, means;
        for (const Ints &completion : q.completions) {
            sums.push_back(completion_loss(&one.e, q, completion, V));
            means.push_back(sums.back() / (double)completion.size());
        }
        const auto least = std::min_element(sums.begin(), sums.end());  // of equals the first
        const auto least_mean = std::min_element(means.begin(), means.end());
        correct += least - sums.begin() == q.label;
        correct_norm += least_mean - means.begin() == q.label;
        sum = *least;
        mean = *least_mean;
    }
    EvalScore first = eval_score(&one.e, bytes, V, 1, T);
    expect(first.correct == correct && first.correct_norm == correct_norm, "%d and %d, want %d, %d",
           first.correct, first.correct_norm, correct, correct_norm);
    // As a token's loss in test_network_facts; logits are below 16 here, completions have 5 tokens.
    const double tol = 5 * 14 * sum_error(4 * m.C) * 4 * 17;
    expect_near((wide)first.sum, (wide)sum, tol, "lowest sum of the last question");
    expect_near((wide)first.mean, (wide)mean, tol, "lowest mean of the last question");
    for (int B : {3, 4, 8}) {
        Net n(m, B, T);
        EvalScore s = eval_score(&n.e, bytes, V, B, T);
        expect(memcmp(&s, &first, sizeof s) == 0, "B %d: another score", B);
    }
}

// --eval plans weights and one pass forward, and takes no more: no gradients, moments or masters,
// and nothing that grows with the blocks but their weights. Losses are those of a training run's
// engine, to the bit.
static void test_eval_plan() {
    for (const char *options : {"-b 3", "-b 2 -t 9 --logit-rows 7", "-b 3 -r block:1,mlp"}) {
        for (const char *dtype : {"--dtype fp32", "--dtype bf16 -w none"}) {
            const Model m = shape("l2h3c48t14", 257), deep = shape("l5h3c48t14", 257);
            const Text rest = Text(options) + " " + (TEST_CUDA ? dtype : "");
            const Batch b(3 * m.maxT, m.V, 1);
            auto losses = [&](const Net &n) {
                Reals all((size_t)(n.s.B * n.s.T));
                Engine e = n.e;
                e.forward_loss(&e, all.data(), b.inputs.data(), b.targets.data());
                return all;
            };
            const Reals want = losses(Net(m, rest));  // gone again: one engine at a time
#if TEST_CUDA && CUDA_CPU
            emu::peak_bytes = 0;
#endif
            Net scores(m, "--eval x " + rest);
            expect(same_bits(losses(scores), want), "%s: losses", rest.c_str());
            expect(scores.e.states == STATE_WEIGHTS + 1, "%s: states", rest.c_str());
#if TEST_CUDA && CUDA_CPU
            expect(emu::peak_bytes == scores.plan.device_bytes, "%s: peak %zu of %zu", rest.c_str(),
                   emu::peak_bytes, scores.plan.device_bytes);
#endif
            Settings more = scores.s;
            more.model = deep;
            Plan p;
            plan_build(&p, &more);
            size_t device[2][GROUPS], host[2][GROUPS];
            plan_groups(&scores.plan, device[0], host[0]);
            plan_groups(&p, device[1], host[1]);
            for (int g = 0; g < GROUPS; g++) {
                const bool learns = g >= GROUP_GRADIENTS && g <= GROUP_MASTER;
                expect(!learns || device[1][g] + host[1][g] == 0, "%s: %s", rest.c_str(),
                       group_names[g]);
                expect(g == GROUP_WEIGHTS || g == GROUP_WORKSPACE || device[1][g] == device[0][g],
                       "%s: %s of five blocks", rest.c_str(), group_names[g]);
            }
            plan_free(&p);
        }
    }
}

// A network that has learnt the right completions by heart answers every question.
static void test_eval_learnt() {
    const int T = 14, V = 257;
    Model m = shape("l2h3c48t14", V);
    std::vector<Question> questions = random_questions(4, V, 1);
    const Text bytes = eval_bytes(questions);
    Net n(m, 4, T);
    EvalFile f;
    EvalExample x;
    std::vector<Token> inputs(4 * T), targets(4 * T);
    Options o;
    options_default(&o);
    size_t at = LLMC_HEADER_BYTES;
    eval_parse(&f, (const unsigned char *)bytes.data(), bytes.size(), "file", V);
    for (int i = 0; i < 4; i++) {
        at += eval_example(&x, &f, at, i);
        eval_row(&inputs[(size_t)(i * T)], &targets[(size_t)(i * T)], &x, x.label, T);
    }
    for (int step = 0; step < 40; step++) {
        n.e.micro_step(&n.e, inputs.data(), targets.data(), 0, 1);
        n.e.update(&n.e, &o, 1e-2, HUGE_VAL, step);
    }
    EvalScore learnt = eval_score(&n.e, eval_bytes(questions), V, 4, T);
    expect(learnt.correct == 4 && learnt.correct_norm == 4, "by heart: %d, %d", learnt.correct,
           learnt.correct_norm);
    for (Question &q : questions) {
        q.label = (q.label + 1) % 4;
    }
    learnt = eval_score(&n.e, eval_bytes(questions), V, 4, T);
    expect(learnt.correct == 0 && learnt.correct_norm == 0, "wrong labels");
}

// -------------------------------------------------------------------------------------------------
// 9. Failures from inside
// What a user cannot make the built program do: an engine that fails, a machine with next to no
// memory. What a user can do, dev/test/ does to the programs as they are built.

static void (*healthy_micro_step)(Engine *e, const Token *in, const Token *out, int accum_step,
                                  int accum_steps);
// The third micro-step of a faulty engine leaves a NaN among the gradients.
static void faulty_micro_step(Engine *e, const Token *in, const Token *out, int accum_step,
                              int accum_steps) {
    static int calls;
    healthy_micro_step(e, in, out, accum_step, accum_steps);
    if (++calls == 3) {
        buffer(((CpuEngine *)e->self)->plan, BUF_GRADS)[5] = (real)NAN;
    }
}

static void faulty_open(Engine *e, Plan *p) {
    cpu_open(e, p);
    healthy_micro_step = e->micro_step;
    e->micro_step = faulty_micro_step;
}

static size_t little_memory() {
    const Model m = shape("l1h1c16t16", 257);
    return 1000000 + beside_plan_bytes(&m);
}
static size_t much_memory() { return (size_t)1 << 60; }

// A step whose gradient is not finite is skipped, counted, logged as null; training goes on.
static void test_skipped_step() {
    static const Program faulty = {
        .name = "train_gpt2", .default_model = "l2h2c16t16", .open = faulty_open,
        .available = much_memory};
    static const Program small = {
        .name = "train_gpt2", .default_model = "l2h2c16t16", .open = cpu_open,
        .available = little_memory};
    write_corpus();
    Outcome o = in_process(TINY "-x 6 -o out", &faulty);
    expect_success(o, "a gradient that is not a number");
    expect(o.out.find("1 skipped") != Text::npos && o.out.find("SKIPPED") != Text::npos);
    expect(log_steps("out/log.jsonl") == one_to(6));
    Text log = read_file("out/log.jsonl");
    size_t third = log.find("{\"step\":3,\"loss\"");
    Text line = log.substr(third, log.find('\n', third) - third);
    expect(line.find("\"grad_norm\":null") != Text::npos &&
           line.find("\"skipped\":1") != Text::npos);
    expect(log.find("\"skipped\":1") == log.rfind("\"skipped\":1"), "one step only");
    expect(in_checkpoint("out", 6, SAVED_STATE)
               .find("\"step\":\"6\",\"skipped\":\"1\",\"updates\":\"5\",\"position\":\"12\","
                     "\"norm_count\":\"5\",\"pending_validation\":\"0\"") != Text::npos);
    o = in_process(TINY "-x 6 -o none", &small);
    expect_refused(o, "only 976.6 KiB are available: ", "a plan that does not fit");
    expect(!exists("none/log.jsonl"));
    write_file("e.bin", eval_bytes(random_questions(12, 50257, 2)));
    expect_refused(in_process("-e l1h1c16t16 --eval e.bin", &small),
                   "only 976.6 KiB are available: ", "--eval");
}

// -------------------------------------------------------------------------------------------------
// 10. Model files
// Volume I's chapters Model files and Checkpoints: what is loaded and saved, to the bit. Files are
// put together in dev/test/files.h; dev/test/model_files.cpp and checkpoints.cpp hold what is
// refused.

// The flat buffer of weights that an engine has to hold after loading `list`.
static Reals flat_weights(const Model &m, const Members &list) {
    Reals flat((size_t)tensor_offset(&m, TENSORS, 0));
    const Member *member = list.data();
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(&m, tensor); l++, member++) {
            std::copy(member->values.begin(), member->values.end(),
                      flat.begin() + tensor_offset(&m, tensor, l));
        }
    }
    return flat;
}

// Opens a model and loads it over weights of all sevens: `want` to the bit, padding and moments 0.
static void expect_loads_at(int line, const char *path, const Model &m, const Reals &want,
                            const Text &who) {
    Net n(m, 1, 1);
    const Reals sevens(want.size(), 7);
    for (int state = 0; state < STATES; state++) {
        n.e.write(&n.e, state, 0, sevens.data(), n.size());
    }
    ModelFile f;
    model_file_open(&f, path);
    if (memcmp(&f.model, &m, sizeof m) != 0) {
        fail(__FILE__, line, who + ": another model");
    } else {
        model_file_load(&n.e, &f);
        const Reals got = n.state(STATE_WEIGHTS), zeros(want.size(), 0);
        size_t at = 0;
        while (at < got.size() && memcmp(&got[at], &want[at], sizeof(real)) == 0) {
            at++;
        }
        if (at < got.size()) {
            fail(__FILE__, line, who + text(": element %zu is %.9g, not %.9g", at,
                                            (double)got[at], (double)want[at]));
        }
        if (!same_bits(n.state(STATE_M), zeros) || !same_bits(n.state(STATE_V), zeros)) {
            fail(__FILE__, line, who + ": moments");
        }
    }
    model_file_close(&f);
}
#define expect_loads(path, m, want, who) expect_loads_at(__LINE__, path, m, want, who)

// Every dtype and their mixture, with and without the prefix, mask buffers, tied head, any order,
// a padded header; as a folder and as a file; sizes on both sides of a tile, a strip and a piece.
static void test_model_accepted() {
    static const Words dtypes[] = {{"F32"}, {"BF16"}, {"F16"}, {"F32", "BF16", "F16"}};
    int k = 0;
    for (const Words &types : dtypes) {
        for (int variant = 0; variant < 8; variant++, k++) {
            const Text prefix = variant & 1 ? "transformer." : "";
            const Model m = shape(k % 5 == 4 ? "l1h2c68t5" : "l2h2c20t7", k == 3 ? 4000 : 300);
            Members list = hugging_face(m, types, prefix);
            const Reals want = flat_weights(m, list);
            if (variant & 2) {
                const char *mask[][2] = {{"F32", "1,1,7,7"}, {"BOOL", "1,1,3,3"},
                                         {"U8", "1,1,5,1"}};
                const char *dtype = mask[k % 3][0];
                const size_t sizes[] = {49 * 4, 9, 5};
                list.push_back({prefix + "h.0.attn.bias", dtype, mask[k % 3][1],
                                Text(sizes[k % 3], 1), ""});  // what follows is not aligned
                list.push_back({prefix + "h.0.attn.masked_bias", "F32", "", "\x1\x2\x3\x4", ""});
                Member head = named(&list, prefix + "wte.weight");
                head.name = "lm_head.weight";
                list.push_back(head);
            }
            if (variant & 4) {
                std::reverse(list.begin(), list.end());
            }
            const Text format = "\"__metadata__\":{\"format\":\"pt\"},";
            Text bytes = safetensors_bytes(list, variant & 4 ? "" : format);
            bytes = variant & 2 ? with_header(bytes, "{", "{      ") : bytes;
            write_model("model", bytes, config_text(m));
            const char *path = variant & 1 ? "model" : "model/model.safetensors";
            expect_loads(path, m, want,
                         types[0] + text(" variant %d of %zu", variant, types.size()));
        }
    }
    const Model m = shape("l1h1c8t2", 3);  // a head in another dtype, of equal numbers
    Members list = hugging_face(m, {"BF16"}, "");
    const Reals want = flat_weights(m, list);
    Text wide_bits;
    for (const char &c : list[0].data) {
        wide_bits += ((&c - list[0].data.data()) % 2 ? Text() : Text(2, 0)) + c;
    }
    list.push_back({"lm_head.weight", "F32", "3,8", wide_bits, ""});
    write_model("model", safetensors_bytes(list), config_text(m));
    expect_loads("model/", m, want, "an F32 head over BF16");
    detail = text("%d files", k + 1);
}

static void test_llmc_model() {
    const Model m = shape("l2h2c20t7", 257);
    for (int version : {3, 5}) {
        std::vector<std::vector<double>> values;
        write_file("good.bin", llmc_bytes(m, version, &values));
        Reals want((size_t)tensor_offset(&m, TENSORS, 0));
        for (int tensor = 0; tensor < TENSORS; tensor++) {
            const int64_t size = tensor_size(&m, tensor);  // but no row of wte beyond V is loaded
            const int64_t loaded = tensor == WTE ? (int64_t)m.V * m.C : size;
            for (int l = 0; l < tensor_copies(&m, tensor); l++) {
                const double *from = &values[(size_t)tensor][(size_t)(l * size)];
                std::copy(from, from + loaded, want.begin() + tensor_offset(&m, tensor, l));
            }
        }
        expect_loads("good.bin", m, want, text("version %d", version));
    }
}

// Writes an engine's weights as a checkpoint's model into `folder`.
static void save_model(Net *n, int type, const char *folder) {
    static Writer model, config;
    mkdir(folder, 0755);
    writer_open(&model, folder, "model.safetensors");
    model_file_save(&n->e, &n->s.model, type, &model);
    writer_close(&model);
    writer_open(&config, folder, "config.json");
    config_save(&n->s.model, &config);
    writer_close(&config);
    const Text path = Text(folder) + "/model.safetensors";
    expect(sha256_of({path})[0] == model.hash && (int64_t)read_file(path).size() == model.bytes);
}

// What is saved is the file put together here, to the byte behind the header, and loads as what it
// was; its header is JSON and the data are aligned. The split master loses nothing.
static void test_model_saved() {
    static const struct {
        const char *e;
        int V;
    } models[] = {{"l2h2c20t7", 300}, {"l1h2c68t5", 4000}, {"l3h1c1t1", 1}};
    for (auto &row : models) {
        const Model m = shape(row.e, row.V);
        for (int type : {FILE_F32, FILE_BF16}) {
            const char *dtype = type == FILE_F32 ? "F32" : "BF16";
            const Members list = hugging_face(m, {dtype}, "transformer.");
            const Text made = safetensors_bytes(list);
            const Reals want = flat_weights(m, list);
            Net n(m, 1, 1);
            n.e.write(&n.e, STATE_WEIGHTS, 0, want.data(), n.size());
            save_model(&n, type, "saved");
            const Text bytes = read_file("saved/model.safetensors");
            uint64_t length, other;
            memcpy(&length, bytes.data(), 8);
            memcpy(&other, made.data(), 8);
            expect((8 + length) % 64 == 0 && json_valid(bytes.substr(8, length)));
            expect(bytes.substr(8 + length) == made.substr(8 + other), "%s %s", row.e, dtype);
            expect(json_valid(read_file("saved/config.json")));
            expect_loads("saved", m, want, Text(row.e) + dtype);
        }
    }
    for (uint64_t i = 0; i < 2000000; i++) {
        const uint32_t edges[] = {0, 0x7f80, 0xff80, 0x8000,
                                  0x7f7f, 0xff7f, 0x0080, 0x7fff, 0xffff};
        uint32_t u = (uint32_t)(rng_uniform(4, 9, 4, i) * 0x1p32), back, high;
        u = i < 9 * 65536 ? edges[i / 65536] << 16 | (uint32_t)(i % 65536) : u;
        float value;
        memcpy(&value, &u, 4);
        high = (uint32_t)master_high(value) << 16;
        memcpy(&value, &high, 4);
        value = master_join(value, (uint16_t)u);
        memcpy(&back, &value, 4);
        const bool is_nan = (u & 0x7fffffff) > 0x7f800000;
        expect(is_nan ? (high & 0x7fffffff) > 0x7f800000 && value != value : back == u,
               "%08x became %08x, in bf16 %08x", u, back, high);
    }
}

// A checkpoint of bf16 weights and the low halves of their masters goes on as the fp32 one it was
// made of.
static void test_state_file() {
    write_corpus();
    const Text run = TINY "--quiet -x 4 -n 2 -y 1 -o out", at = "out/step-00000002";
    expect_success(in_process(run), "first run");
    const Text end = tensors_of("out", 4),
               good = in_checkpoint("out", 2, SAVED_STATE);
    // in a child: after threads of this process, those of its children would wait for ever
    expect_success(outcome(spawn([&] {
        Net n(shape("l2h2c16t16", 257), 2, 16);
        ModelFile f;
        model_file_open(&f, at.c_str());
        model_file_load(&n.e, &f);
        model_file_close(&f);
        const Reals weights = n.state(STATE_WEIGHTS);
        Text low(weights.size() * 2, 0);
        file_values((unsigned char *)&low[0], FILE_U16, weights.data(), n.size());
        write_file("low", low);
        save_model(&n, FILE_BF16, at.c_str());
    })), "bf16 weights");
    const Text low = read_file("low");
    const size_t all = low.size() / 2;
    auto resume = [&](const Text &state) {
        checkpoint_remove("out/step-00000004");
        write_file(at + "/" + saved_files[SAVED_STATE], state);
        write_manifest(at);
        return in_process(run);
    };
    expect_success(resume(with_tensor(good, "master", "U16", low, all)), "bf16, master");
    expect(tensors_of("out", 4) == end, "bf16 weights and master: another end");
    expect_success(resume(good), "bf16 weights alone");
    expect(tensors_of("out", 4) != end && !tensors_of("out", 4).empty(), "bf16 weights alone");
}

// -------------------------------------------------------------------------------------------------
// 11. Kernels
// Volume II's kernels, one chapter after the other, against the naive twins of chapter Layers
// against naive twins, in fp32 and bf16, over odd shapes. Without a GPU every kernel runs again
// with its blocks, warps and lanes in other orders, with streams as late as they may be, and with
// memory that ends at guard pages: equal bits.

#if TEST_CUDA
typedef __nv_bfloat16 bf16;
typedef std::vector<Reals> Outputs;

template <class E> static real rounded_to(real x) { return to_float(from_float<E>(x)); }

// noise() that E holds exactly.
template <class E> static Reals noise_in(size_t n, double scale, uint64_t seed) {
    Reals x = noise(n, scale, seed);
    for (real &value : x) {
        value = rounded_to<E>(value);
    }
    return x;
}

// An array on the device; NaN until something is written to it.
template <class T> struct Device {
    size_t n;
    T *p;
    explicit Device(size_t count) : n(count) {
        cuda_check(cudaMalloc((void **)&p, n * sizeof(T)));
        cuda_check(cudaMemset(p, 0xff, n * sizeof(T)));
    }
    template <class X> explicit Device(const std::vector<X> &values) : Device(values.size()) {
        std::vector<T> host(n);
        for (size_t i = 0; i < n; i++) {
            if constexpr (std::is_same_v<X, T>) {
                host[i] = values[i];
            } else {
                host[i] = from_float<T>(values[i]);
            }
        }
        cuda_check(cudaMemcpy(p, host.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    Device(const Device &) = delete;
    ~Device() { cudaFree(p); }
    std::vector<T> raw() const {
        std::vector<T> host(n);
        cuda_check(cudaMemcpy(host.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
    Reals get() const {
        Reals values;
        for (T x : raw()) {
            values.push_back(to_float(x));
        }
        return values;
    }
};

// Order 0 is the one that EMU_SEED, EMU_ORDER and EMU_GUARD ask for, and every test but those of
// kernels runs in it; the others go on from there. On a GPU the others only run again.
enum { ORDERS = CUDA_CPU ? 6 : 2 };
static void set_order(int order) {
#if CUDA_CPU
    static const emu::Settings asked = emu::set;
    emu::set.seed = asked.seed + (order < 4 ? order : 0);
    emu::set.order = order == 4 ? (long)emu::LATE : asked.order;
    emu::set.guard = asked.guard || order == 5;
#else
    (void)order;
#endif
}

// The variables that make the present order a run's order 0.
static Text order_switches() {
#if CUDA_CPU
    char *words = NULL;
    size_t length = 0;
    FILE *f = open_memstream(&words, &length);
    emu::print_switches(f, "");
    fclose(f);
    Text all(words, length);
    free(words);
    return all + " ";
#else
    return "";
#endif
}

// Is a case run? Under sanitizers, which look at addresses and not at numbers, only what `kept`
// says: an odd shape or two of each kernel, a few of many runs. FULL=1 runs them all.
static bool sampled(bool kept) { return kept || !TEST_ASAN || is_full(); }

// The outputs of `run`, which must be the same to the bit in every order.
template <class Run> static Outputs every_order(Run run, const Text &who) {
    set_order(0);
    Outputs first = run();
    for (int order = 1; order < ORDERS && sampled(order == 1); order++) {
        set_order(order);
        Outputs again = run();
        for (size_t i = 0; i < first.size(); i++) {
            expect(same_bits(first[i], again[i]), "%s: output %zu differs with %s", who.c_str(), i,
                   order_switches().c_str());
        }
    }
    set_order(0);
    return first;
}

// Numbers that left the device as E. fp32: within the twin's error, as everywhere. 16 bits: each
// number, and the norm of all, within twice what rounding the exact result loses.
template <class E> static void compare_in(int line, const Reals &got, Nums want, const Text &who) {
    const Text name = who + " " + traits<E>.name;
    if (!is_fp32<E>) {
        double error = 0, loss = 0, e = 0;
        for (size_t i = 0; i < want.size(); i++) {
            double v = (double)want[i].v, naive = (double)rounded_to<E>((real)v) - v;
            error += ((double)got[i] - v) * ((double)got[i] - v);
            loss += naive * naive;
            e += want[i].e * want[i].e;
            want[i].e += 2 * traits<E>.unit * fabs(v) + (traits<E>.narrow ? 0x1p-24 : 0);
        }
        near_at(line, (wide)sqrt(error), 0, 2 * sqrt(loss) + sqrt(e), name + ", norm");
    }
    compare_at(line, got, want, name);
}
#define compare_as(E, got, want, who) compare_in<E>(__LINE__, got, want, who)

// fp32 and the 16 bits that this GPU has.
#define in_16_bits(test, ...) \
    (device_lacks_bf16() ? (void)test<__half>(__VA_ARGS__) : (void)test<bf16>(__VA_ARGS__))
#define in_both_types(test, ...) (test<float>(__VA_ARGS__), in_16_bits(test, __VA_ARGS__))

// Of tests that bf16 alone can run.
static void need_bf16() {
    if (device_lacks_bf16()) {
        skip("this GPU has no bf16");
    }
}

template <class E, class G> static void check_embedding(int B, int T, int C, int V, int max_T) {
    const int N = B * T, Vp = (int)round_up_i64(V, 128);
    const Text who = text("B %d T %d C %d V %d", B, T, C, V);
    std::vector<Token> tokens = Batch(N, V, 1).inputs;
    for (int i = 0; i < N; i += 3) {
        tokens[(size_t)i] = V - 1;  // one that comes often
    }
    std::vector<int> plan((size_t)embedding_plan_ints(N)), counts((size_t)V);
    int segments = embedding_sort(plan.data(), counts.data(), tokens.data(), N, V);
    Reals wte = noise_in<E>(Vp * C, 1, 1), wpe = noise_in<E>(max_T * C, 1, 2);
    Reals dout = noise_in<E>(N * C, 1, 3), dwte = noise_in<G>(Vp * C, 1, 4);
    Reals dwpe = noise_in<G>(max_T * C, 1, 5);
    Outputs got = every_order(
        [&] {
            Device<E> d_wte(wte), d_wpe(wpe), d_dout(dout), out(dout.size());
            Device<G> d_dwte(dwte), d_dwpe(dwpe), written(dwpe.size());
            Device<int> d_tokens(tokens), d_plan(plan);
            gpu_embedding_forward(out.p, d_tokens.p, d_wte.p, d_wpe.p, B, T, C, 0);
            gpu_embedding_backward(d_dwte.p, d_dwpe.p, d_dout.p, d_plan.p, segments, B, T, C, max_T,
                                   false, 0);
            Reals sums = d_dwte.get();
            gpu_embedding_backward(d_dwte.p, written.p, d_dout.p, d_plan.p, segments, B, T, C,
                                   max_T, true, 0);
            return Outputs{out.get(), sums, d_dwpe.get(), written.get()};
        },
        who);
    Reals sizes = dout;
    for (real &x : sizes) {
        x = (real)fabs((double)x);
    }
    Nums want, want_dwte = nums(dwte), want_dwpe = nums(dwpe), first(dwpe.size());
    Nums none, of_dwte(dwte.size()), of_dwpe(dwpe.size());
    twin_embedding(&want, &want_dwte, &want_dwpe, tokens, wte, wpe, dout, T, C);
    twin_embedding(&none, &of_dwte, &of_dwpe, tokens, wte, wpe, sizes, T, C);
    for (int i = 0; i < N * C; i++) {
        first[i % (T * C)] = first[i % (T * C)] + dout[i];
    }
    for (size_t i = 0; i < dwte.size(); i++) {  // the rows may be added up in any order
        want_dwte[i].e += sum_error(N) * (double)of_dwte[i].v;
    }
    compare_as(E, got[0], want, who + " out");
    compare_as(G, got[1], want_dwte, who + " dwte");
    compare_as(G, got[2], want_dwpe, who + " dwpe");
    compare_as(G, got[3], first, who + " dwpe, written");
}

// Tokens that come often and positions beyond T; gradients added to and, the first time, written.
static void test_gpu_embedding() {
    static const int shapes[][5] = {
        {1, 1, 48, 257, 1}, {2, 65, 80, 257, 70}, {3, 17, 16, 50257, 17}, {1, 130, 1600, 257, 256}};
    for (auto &s : shapes) {
        if (!sampled(s[1] == 65)) {
            continue;
        }
        check_embedding<float, float>(s[0], s[1], s[2], s[3], s[4]);
        check_embedding<bf16, bf16>(s[0], s[1], s[2], s[3], s[4]);
        check_embedding<bf16, float>(s[0], s[1], s[2], s[3], s[4]);
    }
}

// start (columns) plus the column sums of x (rows,columns), which is as a kernel has rounded it.
static Nums column_sums_of(const Reals &x, const Reals &start) {
    const size_t columns = start.size(), rows = x.size() / columns;
    Nums sums;
    for (size_t c = 0; c < columns; c++) {
        sums.push_back(sum_of((int)rows + 1, [&](int i) {
            return Num((size_t)i == rows ? start[c] : x[(size_t)i * columns + c]);
        }));
    }
    return sums;
}

template <class E> static void check_layernorm(int N, int C) {
    const Text who = text("N %d C %d", N, C);
    const size_t n = (size_t)N * C;
    Reals x = noise_in<E>(n, 2, 1), w = noise_in<E>(C, 1, 2), b = noise_in<E>(C, 1, 3);
    Reals dout = noise_in<E>(n, 1, 4), addend = noise_in<E>(n, 1, 5);
    Reals dw = noise(C, 1, 6), db = noise(C, 1, 7), before = noise(C, 1, 8);
    Outputs got = every_order(
        [&] {
            Device<E> d_x(x), d_w(w), d_b(b), out(n), dinp(n), d_dout(dout), d_addend(addend);
            Device<float> mean(N), rstd(N), scratch(gpu_layernorm_backward_bytes(N, C) / 4);
            Outputs all;
            gpu_layernorm_forward(out.p, mean.p, rstd.p, d_x.p, d_w.p, d_b.p, N, C, 0);
            auto backward = [&](Device<E> &to, const E *add) {
                Device<float> d_dw(dw), d_db(db), d_before(before);
                gpu_layernorm_backward(to.p, d_dw.p, d_db.p, add ? nullptr : d_before.p, d_dout.p,
                                       d_x.p, d_w.p, mean.p, rstd.p, add, scratch.p, N, C, 0);
                all = {to.get(), d_dw.get(), d_db.get(), d_before.get()};
                return all[0];
            };
            Reals apart = backward(dinp, d_addend.p);
            expect(same_bits(apart, backward(d_addend, d_addend.p)), "%s: in place", who.c_str());
            backward(d_dout, nullptr);  // over dout
            return Outputs{out.get(), mean.get(), rstd.get(), apart,
                           all[0],    all[1],     all[2],     all[3]};
        },
        who);
    const LayerNormTwin want(x, w, b, dout, dw, db, got[1], got[2]);
    compare_as(E, got[0], want.out, who + " out");
    compare_as(float, got[1], want.mean, who + " mean");
    compare_as(float, got[2], want.rstd, who + " rstd");
    compare_as(E, got[3], plus(want.dinp, addend), who + " dinp");
    compare_as(E, got[4], want.dinp, who + " dinp without addend");
    compare_as(float, got[5], want.dweight, who + " dweight");
    compare_as(float, got[6], want.dbias, who + " dbias");
    compare_as(float, got[7], column_sums_of(got[4], before), who + " bias of inp");
}

// Rows of one warp and of several; more rows than partial sums.
static void test_gpu_layernorm() {
    for (int N : {1, 65, 130}) {
        for (int C : {16, 80, 192, 768, 1600}) {
            if (sampled(N == 65 && C == 80)) {
                in_both_types(check_layernorm, N, C);
            }
        }
    }
    in_both_types(check_layernorm, 9, 1024);
    in_both_types(check_layernorm, 9, 1280);
    if (sampled(false)) {
        in_both_types(check_layernorm, 1500, 48);
    }
    in_both_types(check_layernorm, 9, 4096);
    check_layernorm<__half>(9, 96);
}

template <class E> static void check_gelu(int N, int OC) {
    const Text who = text("N %d OC %d", N, OC);
    const size_t n = (size_t)N * OC;
    Reals x = noise_in<E>(n, 3, 1), dout = noise_in<E>(n, 1, 2), dbias = noise(OC, 1, 3);
    const real most = (real)(traits<E>.narrow ? 6e4 : 3e8), far[] = {-60, 60, 0, -8, most, -most};
    for (size_t i = 0; i < 6; i++) {
        x[i] = rounded_to<E>(far[i]);
    }
    Outputs got = every_order(
        [&] {
            Device<E> d_x(x), d_dout(dout), out(n);
            Device<float> of_dinp(dbias), of_dout(dbias),
                scratch(gpu_bias_backward_bytes(N, OC) / 4);
            gpu_gelu_forward(out.p, d_x.p, n, 0);
            if constexpr (is_fp32<E>) {  // elsewhere other kernels sum them on their way
                gpu_bias_backward(of_dout.p, d_dout.p, scratch.p, N, OC, 0);
            }
            gpu_gelu_backward(d_dout.p, of_dinp.p, d_dout.p, d_x.p, scratch.p, N, OC, 0);
            return Outputs{out.get(), d_dout.get(), of_dinp.get(), of_dout.get()};
        },
        who);
    expect(got[0][0] == 0 && got[0][1] == 60 && got[0][4] == x[4] && got[0][5] == 0);
    expect(got[1][0] == 0 && got[1][1] == dout[1] && got[1][4] == dout[4] && got[1][5] == 0);
    Nums want, want_dinp;
    for (size_t i = 0; i < n; i++) {
        Num slope, value = twin_gelu(x[i], &slope);
        bool apart = i < 6 && i != 3;  // done above
        want.push_back(apart ? Num(got[0][i]) : value);
        want_dinp.push_back(apart ? Num(got[1][i]) : slope * dout[i]);
    }
    compare_as(E, got[0], want, who + " out");
    compare_as(E, got[1], want_dinp, who + " dinp");
    compare_as(float, got[2], column_sums_of(got[1], dbias), who + " dbias");
    compare_as(float, got[3], is_fp32<E> ? column_sums_of(dout, dbias) : nums(dbias),
               who + " dbias alone");
}

// Both directions and both column sums; far from zero exactly x, dout or 0.
static void test_gpu_gelu() {
    static const int shapes[][2] = {{1, 64}, {65, 80}, {130, 768}, {1500, 48}, {2100, 264}};
    for (auto &s : shapes) {
        if (!sampled(s[0] == 65)) {
            continue;
        }
        in_both_types(check_gelu, s[0], s[1]);
    }
}

template <class E, class G> static void check_matmul(int N, int C, int OC) {
    const Text who = text("N %d C %d OC %d G %zu", N, C, OC, sizeof(G));
    Reals inp = noise_in<E>(N * C, 1, 1), w = noise_in<E>(OC * C, 0.2, 2),
          b = noise_in<E>(OC, 1, 3);
    Reals addend = noise_in<E>(N * OC, 1, 4), dout = noise_in<E>(N * OC, 1, 5);
    Reals dw = noise_in<G>(OC * C, 1, 6);
    Outputs got = every_order(
        [&] {
            Device<char> workspace(4 << 20);
            gpu_matmul_open(workspace.p, workspace.n);
            Device<E> d_inp(inp), d_w(w), d_b(b), plain(addend.size()), sum(addend), d_dout(dout);
            Device<E> dinp(inp.size());
            Device<G> d_dw(dw), written(dw.size());
            gpu_matmul_forward<E>(plain.p, d_inp.p, d_w.p, nullptr, nullptr, N, C, OC, 0);
            gpu_matmul_forward<E>(sum.p, d_inp.p, d_w.p, d_b.p, sum.p, N, C, OC, 0);
            gpu_matmul_backward<E, G>(dinp.p, d_dw.p, d_dout.p, d_inp.p, d_w.p, N, C, OC, false, 0);
            gpu_matmul_backward<E, G>(d_inp.p, written.p, d_dout.p, d_inp.p, d_w.p, N, C, OC, true,
                                      0);
            Outputs all = {plain.get(), sum.get(), dinp.get(), d_dw.get(), written.get()};
            expect(same_bits(all[2], d_inp.get()), "%s: in place", who.c_str());
            gpu_matmul_close();
            return all;
        },
        who);
    Nums want = twin_matmul(inp, w, N, C, OC), want_sum = plus(want, addend), want_dinp, none;
    Nums want_dw = nums(dw), zero(dw.size()), no_bias(OC);
    twin_matmul_backward(&want_dinp, &want_dw, &no_bias, dout, inp, w, N, C, OC);
    twin_matmul_backward(&none, &zero, &no_bias, dout, inp, w, N, C, OC);
    for (int i = 0; i < N * OC; i++) {  // a library may start from the addend
        want_sum[i] = want_sum[i] + b[i % OC];
        want_sum[i].e += sum_error(C) * (size(b[i % OC]) + size(addend[i]));
    }
    compare_as(E, got[0], want, who + " product");
    compare_as(E, got[1], want_sum, who + " with bias, in place");
    compare_as(E, got[2], want_dinp, who + " dinp");
    compare_as(G, got[3], want_dw, who + " dweight");
    compare_as(G, got[4], zero, who + " dweight, written");
}

// Widths of C, 3 C and 4 C; few and many rows.
static void test_gpu_matmul() {
    static const int shapes[][3] = {{1, 48, 144},  {65, 80, 240}, {130, 16, 64}, {7, 192, 64},
                                    {33, 64, 384}, {3, 1600, 40}, {257, 32, 24}};
    for (auto &s : shapes) {
        if (!sampled(s[0] == 65)) {
            continue;
        }
        check_matmul<float, float>(s[0], s[1], s[2]);
        if (device_lacks_bf16()) {
            check_matmul<__half, float>(s[0], s[1], s[2]);
        } else {
            check_matmul<bf16, bf16>(s[0], s[1], s[2]);
            check_matmul<bf16, float>(s[0], s[1], s[2]);
        }
    }
}

// What a computation in 16 bits rounds in attention.
template <class E> static Num num_in(Num x) { return Num((wide)rounded_to<E>((real)x.v)); }

// 16 bits: norm of the difference to the exact result at most twice that of a naive computation.
static void expect_naive_at(int line, const Reals &got, const Nums &want, const Nums &naive,
                            const Text &who) {
    double error = 0, loss = 0, e = 0;
    for (size_t i = 0; i < want.size(); i++) {
        double v = (double)want[i].v, n = (double)naive[i].v;
        error += ((double)got[i] - v) * ((double)got[i] - v);
        loss += (n - v) * (n - v);
        e += want[i].e * want[i].e;
    }
    near_at(line, (wide)sqrt(error), 0, 2 * sqrt(loss) + sqrt(e), who);
}

template <class E> static Outputs check_attention(int B, int T, int HS, int NH, double sharp) {
    const int C = NH * HS, n = B * T * C;
    const Text who = text("B %d T %d heads %d of %d x %g", B, T, NH, HS, sharp);
    Reals qkv = noise_in<E>(3 * n, sharp, 1), dout = noise_in<E>(n, 1, 2);
    Reals dbias = noise(3 * C, 1, 3);
    Outputs got = every_order(
        [&] {
            Device<E> d_qkv(qkv), d_dout(dout), out(n), dqkv(3 * n);
            Device<float> lse(B * NH * T), drow(B * NH * T), d_dbias(dbias);
            Device<float> scratch(gpu_attention_backward_bytes<E>(B, T, C, NH) / 4);
            gpu_attention_forward<E>(out.p, lse.p, d_qkv.p, B, T, C, NH, 0);
            gpu_attention_backward<E>(dqkv.p, d_dbias.p, drow.p, d_dout.p, d_qkv.p, out.p, lse.p,
                                      scratch.p, B, T, C, NH, 0);
            return Outputs{out.get(), lse.get(), dqkv.get(), d_dbias.get()};
        },
        who);
    Nums want[2][3];  // exact, and naive in 16 bits
    for (int k = 0; k < 2; k++) {
        want[k][0] = Nums(n), want[k][1] = Nums(B * NH * T), want[k][2] = Nums(3 * n);
        for (int head = 0; head < B * NH && (k == 0 || !is_fp32<E>); head++) {
            twin_attention(&want[k][0], &want[k][1], &want[k][2], qkv, dout, head / NH, head % NH,
                           T, C, NH, k ? num_in<E> : as_it_is);
        }
    }
    for (Num &lse : want[0][1]) {  // the kernels keep base 2
        lse = lse * Num((wide)1.4426950408889634L);
    }
    compare_as(float, got[1], want[0][1], who + " lse");
    compare_as(float, got[3], column_sums_of(got[2], dbias), who + " bias of qkv");
    if (is_fp32<E>) {
        compare_as(E, got[0], want[0][0], who + " out");
        compare_as(E, got[2], want[0][2], who + " dqkv");
    } else {
        const Text name = traits<E>.name;
        expect_naive_at(__LINE__, got[0], want[0][0], want[1][0], who + " out " + name);
        expect_naive_at(__LINE__, got[2], want[0][2], want[1][2], who + " dqkv " + name);
    }
    return got;
}

// fp16 on the emulated GPU and on one of capability 7.5, which has smaller products, no copies
// behind the registers' back and 64 KiB of shared memory: the CPU layer gives both the same bits.
static void check_attention_fp16(int B, int T, int HS, int NH, double sharp) {
    const Outputs want = check_attention<__half>(B, T, HS, NH, sharp);
#if CUDA_CPU
    const long asked = emu::set.cc;
    emu::set.cc = 75;
    const Outputs got = check_attention<__half>(B, T, HS, NH, sharp);
    emu::set.cc = asked;
    for (size_t i = 0; i < want.size(); i++) {
        expect(same_bits(got[i], want[i]), "T %d heads of %d: output %zu on sm_75", T, HS, i);
    }
#else
    (void)want;
#endif
}

// Queries over the cache: all of a sequence in two pieces, whatever stood in the cache before.
template <class E> static void check_cached(int positions, int first, int rows, int HS, int NH) {
    const int C = NH * HS, T = first + rows;
    const Text who = text("%d behind %d of %d heads %d of %d", rows, first, positions, NH, HS);
    Reals qkv = noise_in<E>(3 * T * C, 1, 1), dout(T * C);
    Outputs got = every_order(
        [&] {
            Device<E> d_qkv(qkv), cache(2 * positions * C), out(T * C);
            if (first) {
                gpu_attention_cached<E>(out.p, cache.p, d_qkv.p, positions, 0, first, C, NH, 0);
            }
            gpu_attention_cached<E>(out.p + first * C, cache.p, d_qkv.p + 3 * first * C, positions,
                                    first, rows, C, NH, 0);
            return Outputs{out.get()};
        },
        who);
    Nums want[2], lse(NH * T), dqkv(3 * T * C);
    for (int k = 0; k < 2; k++) {
        want[k] = Nums(T * C);
        for (int head = 0; head < NH && (k == 0 || !is_fp32<E>); head++) {
            twin_attention(&want[k], &lse, &dqkv, qkv, dout, 0, head, T, C, NH,
                           k ? num_in<E> : as_it_is);
        }
    }
    if (is_fp32<E>) {
        compare_as(E, got[0], want[0], who + " out");
    } else {
        expect_naive_at(__LINE__, got[0], want[0], want[1], who + " out " + traits<E>.name);
    }
}

static void test_gpu_cached() {
    static const int shapes[][5] = {{1, 0, 1, 16, 2},   {70, 0, 66, 64, 1}, {200, 191, 1, 40, 3},
                                    {66, 1, 65, 128, 1}, {90, 31, 5, 8, 5},  {300, 255, 3, 80, 1}};
    for (auto &s : shapes) {
        if (!sampled(s[0] == 90)) {
            continue;
        }
        in_both_types(check_cached, s[0], s[1], s[2], s[3], s[4]);
    }
    check_cached<float>(70, 66, 4, 200, 1);
    check_cached<float>(70, 60, 2, 5, 8);
}

// Lengths around the tiles' edges, heads of 8 to 128 channels, flat and sharp scores.
static void test_gpu_attention() {
    static const int shapes[][4] = {
        {1, 1, 16, 5},  {2, 1, 64, 3},   {3, 2, 80, 1},   {1, 63, 64, 3},  {2, 64, 32, 2},
        {1, 65, 64, 3}, {1, 65, 128, 1}, {2, 33, 16, 5},  {1, 129, 64, 1}, {1, 130, 128, 2},
        {1, 130, 8, 3}, {1, 257, 64, 1}, {1, 200, 120, 1}};  // B, T, head size, heads
    for (auto &s : shapes) {
        if (sampled(s[1] == 33 || s[2] == 128 || s[2] == 8 || (s[1] == 65 && s[2] == 64))) {
            in_both_types(check_attention, s[0], s[1], s[2], s[3], 1);
        }
    }
    static const int small[][4] = {{1, 1, 64, 1},   {2, 33, 16, 3}, {1, 65, 64, 2},
                                   {1, 130, 64, 1}, {1, 97, 128, 1}, {1, 66, 120, 1}};
    for (auto &s : small) {
        if (sampled(s[1] == 33 || s[1] == 65)) {
            check_attention_fp16(s[0], s[1], s[2], s[3], 1);
        }
    }
    if (sampled(false)) {
        check_attention_fp16(1, 100, 64, 1, 4);
        in_both_types(check_attention, 1, 130, 64, 2, 4);
        in_both_types(check_attention, 1, 100, 16, 1, 8);
    }
    // Sections of one head, of two with one left over, and of heads of two sequences.
    for (int heads : {1, 2, 4}) {
        attention_cache_bytes = 2 * heads * 130 * 64 * 4;
        if (!sampled(heads == 2)) {
            continue;
        }
        in_16_bits(check_attention, 2, 130, 64, 3, 1);
        in_16_bits(check_attention, 1, 130, 64, 5, 1);
    }
    attention_cache_bytes = 0;
}

template <class E> static void check_classifier(int rows, int V, double sharp) {
    const Text who = text("rows %d V %d x %g", rows, V, sharp);
    const int Vp = (int)round_up_i64(V, 128);
    const real dloss = (real)(1.0 / 300), scale = traits<E>.narrow ? 1024 : 1;
    Reals logits = noise_in<E>(rows * Vp, sharp, 1);
    std::vector<Token> targets = Batch(rows, V, 2).targets;
    targets[0] = V - 1;
    for (int i = 0; i < rows * Vp; i++) {
        logits[i] = i % Vp < V ? logits[i] : rounded_to<E>((real)1e9);  // padding may be anything
    }
    Outputs got = every_order(
        [&] {
            Device<E> d_logits(logits);
            Device<float> losses(rows), again(rows);
            Device<int> d_targets(targets);
            Device<float> d_scale(Reals{traits<E>.narrow ? scale : (real)NAN});
            gpu_classifier(losses.p, d_logits.p, d_targets.p, dloss, d_scale.p, rows, V, Vp, false,
                           0);
            expect(same_bits(d_logits.get(), logits), "%s: evaluation keeps them", who.c_str());
            gpu_classifier(again.p, d_logits.p, d_targets.p, dloss, d_scale.p, rows, V, Vp, true,
                           0);
            expect(same_bits(losses.get(), again.get()), "%s: losses", who.c_str());
            return Outputs{losses.get(), d_logits.get()};
        },
        who);
    Nums want, want_d(logits.size());  // padding: 0, tolerance 0
    twin_classifier(&want, &want_d, logits, targets, dloss * scale, V, Vp, !is_fp32<E>);
    compare_as(float, got[0], want, who + " losses");
    compare_as(E, got[1], want_d, who + " dlogits");
}

// Vocabularies of one pack to the largest; padding that would win every softmax.
static void test_gpu_classifier() {
    static const int shapes[][2] = {{2, 5}, {1, 257}, {65, 257}, {2, 50257}, {1, 65536}};
    for (auto &s : shapes) {
        if (!sampled(s[0] == 65 || s[1] == 50257)) {
            continue;
        }
        in_both_types(check_classifier, s[0], s[1], 1);
        in_both_types(check_classifier, s[0], s[1], 20);
    }
    check_classifier<__half>(3, 257, 1);
    check_classifier<__half>(1, 50257, 20);
}

// Two matrices and a vector of odd sizes with gaps between them, as a table of ranges; what a rank
// keeps of their states lies elsewhere than the weights.
static std::vector<ParamRange> three_ranges(int *chunks) {
    std::vector<ParamRange> ranges = {{64, 128, 0, 0, 24008, 130, 1, 0, 0},
                                      {24136, 24200, 0, 0, 72, 131, 0, 0, 0},
                                      {24272, 24328, 24072, 800, 48, 132, 1, 0, 0}};
    *chunks = param_ranges_chunk(ranges.data(), 3);
    return ranges;
}

// `to` with the numbers of all ranges, from where their field `a` says in `from` to where `b` says.
template <class T>
static std::vector<T> moved(const std::vector<T> &from, std::vector<T> to,
                            const std::vector<ParamRange> &ranges, size_t ParamRange::*a,
                            size_t ParamRange::*b) {
    for (const ParamRange &r : ranges) {
        std::copy_n(&from[r.*a], r.count, &to[r.*b]);
    }
    return to;
}

// The fp32 weights that the master makes of the weights on the device; those of fp16 are whole, and
// the weights, `rounded`, their roundings.
template <class E>
static Reals master_weights(const Reals &rounded, const Device<E> &params,
                            const std::vector<Master<E>> &master,
                            const std::vector<ParamRange> &ranges) {
    Device<Master<E>> low(master);
    Reals weights(master.size());
    const StateView whole = {TYPE_FP32, (char *)low.p, nullptr, false};
    const StateView halves = {TYPE_BF16, (char *)params.p, (uint16_t *)(void *)low.p, true};
    state_read(weights.data(), traits<E>.narrow ? whole : halves, (int64_t)weights.size(), 0);
    for (const ParamRange &r : ranges) {
        for (size_t i = r.param; traits<E>.narrow && i < r.param + r.count; i++) {
            expect(rounded[i] == rounded_to<E>(weights[i]), "weight %zu", i);
        }
    }
    return weights;
}

// Three steps (clipped, not clipped, skipped) beside the AdamW of chapter Optimizer and schedules.
// States kept exactly must have its bits. A state in 16 bits alone is rounded stochastically: to
// one of its two neighbours, and without bias, its mean within four deviations; its run ends after
// one step.
template <class E, class G, class M, bool SPLIT> static void check_adamw(const char *who) {
    enum { N = 24384, N2 = 24120, N1 = 72 };
    const bool exact_p = SPLIT || is_fp32<E>, exact_m = is_fp32<M>;
    int chunks, steps = exact_p && exact_m ? 3 : 1;
    std::vector<ParamRange> ranges = three_ranges(&chunks);
    Reals p = noise(N, 0.02, 1), m(N), v(N);
    std::vector<Master<E>> low(N), none(N);
    std::vector<uint16_t> high(N);
    for (int i = 0; i < N; i++) {
        p[i] = i % 97 ? exact_p ? p[i] : rounded_to<E>(p[i]) : 0;
        uint32_t bits;
        memcpy(&bits, &p[i], 4);
        high[i] = (uint16_t)((bits + 0x8000) >> 16);
        memcpy(&low[i], &p[i], sizeof low[i]);  // the low half, or all of it
    }
    Device<E> d_p(p);
    if (SPLIT && !traits<E>.narrow) {
        cuda_check(cudaMemcpy(d_p.p, high.data(), N * 2, cudaMemcpyHostToDevice));
    }
    Device<Master<E>> d_low(moved(low, none, ranges, &ParamRange::param, &ParamRange::state));
    Device<M> d_m(m), d_v(v);
    Device<ParamRange> d_ranges(ranges);
    Device<float> scratch(gpu_grad_square_sum_bytes() / 4);
    Device<UpdateState> state(std::vector<UpdateState>(1));
    for (uint32_t step = 1; step <= (uint32_t)steps; step++) {
        Reals g2 = noise_in<G>(N2, 0.01, 10 + step), g1 = noise(N1, 0.01, 20 + step);
        double squares = 0;
        for (const ParamRange &r : ranges) {
            for (size_t i = 0; i < r.count; i++) {
                double x = (double)(r.two_dimensional ? g2[r.grad + i] : g1[i]);
                squares += x * x;
            }
        }
        Device<G> d_g2(g2);
        Device<float> d_g1(g1);
        float clip = step == 2 ? 0.0f : 1e-3f;
        G *g = d_g2.p;
        gpu_grad_square_sum(state.p, scratch.p, g, d_g1.p, g, d_ranges.p, 3, chunks, 0);
        gpu_update_decide(state.p, clip, step == 3 ? 1e-9f : INFINITY, 0);
        AdamW a = {1e-2f, 0.9f, 0.95f, 1 - powf(0.9f, (float)step), 1 - powf(0.95f, (float)step),
                   1e-8f, 0.1f, 1.0f};
        gpu_adamw<E, G, M, SPLIT>(d_p.p, SPLIT ? d_low.p : nullptr, d_m.p, d_v.p, g, d_g1.p, d_p.p,
                                  g, d_ranges.p, 3, chunks, a, {1234, step}, state.p, 0);
        UpdateState now = state.raw()[0];
        expect_near(now.norm, (wide)sqrt(squares), sum_error(N) * sqrt(squares), "%s: norm", who);
        expect(now.scale == (clip > 0 && now.norm > clip ? clip / now.norm : 1), "%s: clip", who);
        expect(now.skip == (step == 3) && now.skipped == (step == 3), "%s: skip", who);
        for (const ParamRange &r : ranges) {
            a.grad_scale = now.scale;
            if (!now.skip) {
                adamw_update(&p[r.param], &m[r.state], &v[r.state],
                             r.two_dimensional ? &g2[r.grad] : g1.data(), &a,
                             r.two_dimensional ? a.weight_decay : 0, (int64_t)r.count);
            }
        }
    }
    Reals got_p = d_p.get(), got_m = d_m.get(), got_v = d_v.get();
    if (SPLIT) {
        got_p = master_weights(got_p, d_p, moved(d_low.raw(), low, ranges, &ParamRange::state,
                                                 &ParamRange::param), ranges);
    }
    expect(!exact_p || same_bits(got_p, p), "%s: weights, and what lies between them", who);
    expect(!exact_m || (same_bits(got_m, m) && same_bits(got_v, v)), "%s: moments", who);
    auto unbiased = [&](const Reals &got, const Reals &want, const char *name, auto place) {
        double bias = 0, count = 0;
        for (const ParamRange &r : ranges) {
            for (size_t i = r.*place; i < r.*place + r.count; i++) {
                if (want[i] != 0) {
                    double error = ((double)got[i] - (double)want[i]) / fabs((double)want[i]);
                    expect_near((wide)error, 0, 2 * traits<bf16>.unit, "%s: %s %zu", who, name, i);
                    bias += error;
                    count++;
                }
            }
        }
        expect_near((wide)(bias / count), 0, 4 * traits<bf16>.unit / sqrt(count), "%s: %s, bias",
                    who, name);
    };
    if (!exact_p) {
        unbiased(got_p, p, "p", &ParamRange::param);
    }
    if (!exact_m) {
        unbiased(got_m, m, "m", &ParamRange::state);
        unbiased(got_v, v, "v", &ParamRange::state);
    }
}

static void test_gpu_adamw() {
    check_adamw<float, float, float, false>("fp32");
    check_adamw<__half, float, float, true>("fp16");
    check_adamw<bf16, bf16, float, true>("split master");
    check_adamw<bf16, float, float, true>("split master, fp32 gradients");
    check_adamw<bf16, bf16, bf16, true>("split master, bf16 moments");
    check_adamw<bf16, bf16, bf16, false>("no master, bf16 moments");
    check_adamw<bf16, float, float, false>("no master, fp32 gradients");
}

// A weight that is not a number stays one, in what forward reads and in what is saved, whether it
// comes from the host or out of AdamW, and its neighbours stay what they are.
template <class E, class G, class M, bool SPLIT> static void check_adamw_nan(const char *who) {
    enum { N = 4096 };
    static const uint32_t nan_bits[] = {0x7fffffff, 0xffffffff, 0x7f800001, 0xff807fff,
                                        0x7f808000, 0x7fc00000, 0xffc00000, 0x7fff8000};
    std::vector<ParamRange> ranges = {{0, 0, 0, 0, N, 130, 1, 0, 0}};
    const int chunks = param_ranges_chunk(ranges.data(), 1);
    Reals p = noise_in<E>(N, 0.02, 1), zero(N), want = p;
    for (int i = 0; i < N; i += 8) {
        memcpy(&p[i], &nan_bits[i / 8 % 8], 4);
    }
    Device<E> d_p(N);
    Device<Master<E>> low(std::vector<Master<E>>((size_t)N));
    Device<M> m(zero), v(zero);
    Device<G> g(zero);
    Device<ParamRange> d_ranges(ranges);
    Device<UpdateState> state(std::vector<UpdateState>{{0, 1, 1, 0, 0}});
    StateView view = {traits<E>.type, (char *)d_p.p, nullptr, SPLIT && !traits<E>.narrow};
    view.low = view.split ? (uint16_t *)(void *)low.p : nullptr;
    const StateView whole = {TYPE_FP32, (char *)low.p, nullptr, false};
    state_write(view, p.data(), N, 0);
    if (traits<E>.narrow) {
        state_write(whole, p.data(), N, 0);
    }
    const AdamW a = {0.0f, 0.9f, 0.95f, 0.1f, 0.05f, 1e-8f, 0.1f, 1.0f};  // a rate of 0: p stays
    for (int turn = 0; turn < 2; turn++) {
        Reals saved(N);
        const Reals got = d_p.get();
        state_read(saved.data(), traits<E>.narrow ? whole : view, N, 0);
        for (int i = 0; i < N; i++) {
            const real is = got[(size_t)i], kept = saved[(size_t)i];
            expect(i % 8 == 0 ? isnan(is) && isnan(kept) : is == want[i] && kept == want[i],
                   "%s: weight %d is %g, saved %g, turn %d", who, i, (double)is, (double)kept,
                   turn);
        }
        gpu_adamw<E, G, M, SPLIT>(d_p.p, SPLIT ? low.p : nullptr, m.p, v.p, g.p, nullptr, nullptr,
                                  nullptr, d_ranges.p, 1, chunks, a, UpdateRandom{7, 1}, state.p,
                                  0);
    }
}

static void test_gpu_adamw_nan() {
    check_adamw_nan<float, float, float, false>("fp32");
    check_adamw_nan<__half, float, float, true>("fp16");
    check_adamw_nan<bf16, bf16, float, true>("split master");
    check_adamw_nan<bf16, bf16, bf16, false>("no master");
}

// Initial states go to a fresh GPU without zeros, wherever they live; one that has trained is
// cleared. Either way nothing is left of what was there.
static int64_t moments_written;
static void (*real_write)(Engine *e, int state, int64_t offset, const real *values, int64_t count);
static void counted_write(Engine *e, int state, int64_t offset, const real *values,
                          int64_t count) {
    moments_written += state == STATE_WEIGHTS ? 0 : count;
    real_write(e, state, offset, values, count);
}
static void test_gpu_zero_states() {
    const Model m = shape("l2h1c16t8", 257);
    for (const char *options : {"-b 1 -t 8", "-b 1 -t 8 --offload weights,moments,master",
                                "-b 1 -t 8 --dtype fp16"}) {
        Options o;
        Settings s;
        Plan plan;
        Engine e;
        parse(&o, options);
        o.tune = 0;
        o.dtype = device_lacks_bf16() ? (int64_t)DTYPE_FP16 : o.dtype;
        settings_from_options(&s, &o, &m, 1);
        plan_build(&plan, &s);
        gpu_engine_open(&e, &plan);
        real_write = e.write;
        e.write = counted_write;
        const int64_t all = tensor_offset(&m, TENSORS, 0);
        Reals first[STATES], again((size_t)all);
        for (int turn = 0; turn < 2; turn++) {
            moments_written = 0;
            engine_initialise(&e, &m, 42);
            expect(moments_written == (turn ? 2 * all : 0), "%s, turn %d: %g of %g moments written",
                   options, turn, (double)moments_written, (double)all);
            for (int state = 0; state < STATES; state++) {
                e.read(&e, state, 0, again.data(), all);
                expect(state == STATE_WEIGHTS ||
                           std::count(again.begin(), again.end(), (real)0) == all,
                       "%s, turn %d: moments", options, turn);
                expect(turn == 0 || same_bits(first[state], again), "%s: another start", options);
                first[state] = again;
                std::fill(again.begin(), again.end(), (real)0.5);
                e.write(&e, state, 0, again.data(), turn ? 0 : all);
            }
        }
        e.close(&e);
        plan_free(&plan);
    }
}

// A tensor in two parts, as two ranks have it, is rounded as in one; whatever the order of blocks.
static void test_gpu_rounding() {
    enum { N = 20000, CUT = 8816 };
    Reals p = noise_in<bf16>(N, 1, 1), g = noise_in<bf16>(N, 1, 2), zero(N);
    auto update = [&](int parts) {
        return every_order(
            [&] {
                size_t first = parts == 1 ? N : CUT;
                std::vector<ParamRange> ranges = {{0, 0, 0, 0, first, 130, 1, 0, 0}};
                if (parts == 2) {
                    ranges.push_back({CUT, CUT, CUT, CUT, N - CUT, 130, 1, 0, 0});
                }
                int chunks = param_ranges_chunk(ranges.data(), parts);
                Device<bf16> d_p(p), m(zero), v(zero), d_g(g);
                Device<ParamRange> d_ranges(ranges);
                Device<UpdateState> state(std::vector<UpdateState>{{0, 1, 1, 0, 0}});
                AdamW a = {1e-3f, 0.9f, 0.95f, 0.1f, 0.05f, 1e-8f, 0.1f, 1.0f};
                gpu_adamw<bf16, bf16, bf16, false>(d_p.p, nullptr, m.p, v.p, d_g.p,
                                                   nullptr, nullptr, nullptr, d_ranges.p, parts,
                                                   chunks, a, UpdateRandom{7, 1}, state.p, 0);
                return Outputs{d_p.get(), m.get(), v.get()};
            },
            "rounding");
    };
    Outputs whole = update(1), two = update(2);
    for (size_t k = 0; k < 3; k++) {
        expect(same_bits(whole[k], two[k]), "state %zu", k);
    }
}

// A gradient that is not a number, infinite or too large for its square skips the step.
static void test_gpu_norm() {
    for (real bad : {(real)NAN, (real)HUGE_VAL, (real)-HUGE_VAL, (real)1e30}) {
        std::vector<ParamRange> ranges = {{0, 0, 0, 0, 20000, 0, 1, 0, 0}};
        int chunks = param_ranges_chunk(ranges.data(), 1);
        Reals g(20000, 1);
        g[17001] = bad;
        Device<float> d_g(g), scratch(gpu_grad_square_sum_bytes() / 4);
        Device<ParamRange> d_ranges(ranges);
        Device<UpdateState> state(std::vector<UpdateState>(1));
        gpu_grad_square_sum(state.p, scratch.p, d_g.p, d_g.p, d_g.p, d_ranges.p, 1, chunks, 0);
        gpu_update_decide(state.p, 1.0f, INFINITY, 0);
        UpdateState now = state.raw()[0];
        expect(now.skip == 1 && now.skipped == 1, "%g", (double)bad);
        // A rank without any part of a small model's gradients.
        gpu_grad_square_sum(state.p, scratch.p, d_g.p, d_g.p, d_g.p, d_ranges.p, 0, 0, 0);
        expect(state.raw()[0].square_sum == 0, "no gradients");
    }
}

// The sum of `ranks` ranks' parts of a bucket as rank `rank` makes it: to the bit the parts added
// in the order of ranks in fp32 and rounded once, whichever rank it is, and in pieces of any size.
// Every other number is 1e8, 1, -1e8, 1: another order loses a 1.
template <class G> static void check_rank_sum(int ranks, int rank, size_t room) {
    enum { PART = 4160 };  // more than a block's
    static const real pattern[] = {(real)1e8, 1, (real)-1e8, 1};
    std::vector<Reals> parts;
    for (int q = 0; q < ranks; q++) {
        parts.push_back(noise_in<G>(PART, 1, 5 + (uint64_t)q));
        for (int i = 0; i < PART; i += 2) {
            parts.back()[(size_t)i] = rounded_to<G>(pattern[q % 4]);
        }
    }
    // What the others send, piece by piece, is in the staging buffer at once: on a GPU it comes.
    const size_t piece = room / (size_t)(ranks - 1) / 8 * 8;
    Reals bucket((size_t)ranks * PART, 7), want(PART), got(PART), twice(PART);
    std::copy(parts[(size_t)rank].begin(), parts[(size_t)rank].end(), &bucket[(size_t)rank * PART]);
    for (int i = 0; i < PART; i++) {
        float sum = (float)parts[0][(size_t)i];
        for (int q = 1; q < ranks; q++) {
            sum += (float)parts[(size_t)q][(size_t)i];
        }
        want[(size_t)i] = rounded_to<G>(sum);
        twice[(size_t)i] = rounded_to<G>((float)want[(size_t)i] + sum);
    }
    // In place, and twice into a part of its own, to which the second adds.
    Device<G> d_bucket(bucket), d_home(Reals(PART, NAN));
    int adds = 0;
    for (size_t from = 0; from < PART; from += piece) {
        const size_t n = std::min(piece, PART - from);
        Reals staging;
        for (int q = 0; q < ranks; q++) {
            if (q != rank) {
                staging.insert(staging.end(), &parts[(size_t)q][from], &parts[(size_t)q][from] + n);
            }
        }
        Device<G> d_staging(staging);
        G *own = d_bucket.p + (size_t)rank * PART + from;
        for (G *sum : {d_home.p + from, d_home.p + from, own}) {
            launch(rank_sum_kernel<G>, ceil_div((int)n, 256 * Pack<G>::size), 256, 0, 0, sum, own,
                   d_staging.p, rank, ranks, n, adds++ % 3 == 1);
        }
    }
    expect(same_bits(d_home.get(), twice), "%s, rank %d of %d, added", traits<G>.name, rank, ranks);
    const Reals all = d_bucket.get();
    std::copy_n(&all[(size_t)rank * PART], PART, got.begin());
    expect(same_bits(got, want), "%s, rank %d of %d", traits<G>.name, rank, ranks);
    const size_t other = rank == 0 ? PART : 0;
    expect(all[other] == 7 && all[other + PART - 1] == 7, "another rank's part was written");
}

// The words of four ranks: sums in the order of ranks, a stop of one is a stop of all, the first of
// two faults is named, and with a fault nobody's norm is a number.
static void check_step_words() {
    enum { RANKS = 4 };
    const float losses[RANKS] = {1e8f, 1, -1e8f, 1};
    std::vector<char> words(RANKS * RANK_WORD_BYTES);
    for (int fault : {0, 1}) {
        Device<char> d_words(words);
        Device<UpdateState> update(std::vector<UpdateState>(1));
        Device<StepWord> total(std::vector<StepWord>(1));
        for (int r = 0; r < RANKS; r++) {
            Device<float> loss(Reals{losses[r]});
            Device<UpdateState> mine(std::vector<UpdateState>{{(float)(r + 1), 0, 0, 0, 0}});
            launch(step_word_kernel, 1, 1, 0, 0,
                   (StepWord *)(void *)(d_words.p + r * RANK_WORD_BYTES), mine.p, loss.p, r == 2,
                   fault && r % 2 ? r + 1 : 0);
        }
        launch(step_words_kernel, 1, 1, 0, 0, total.p, update.p, d_words.p, (int)RANKS);
        const StepWord all = total.raw()[0];
        const float norm = update.raw()[0].square_sum;
        expect(all.loss_sum == 1 && all.square_sum == 10 && all.stop == 1, "%g, %g, %d",
               (double)all.loss_sum, (double)all.square_sum, all.stop);
        expect(all.fault == 2 * fault && (fault ? norm != norm : norm == 10), "fault %d, norm %g",
               all.fault, (double)norm);
    }
}

// A hash of states is another when one bit is, when two words change places, and with nothing else.
static void check_replica_hash() {
    std::vector<uint64_t> words(10000);
    for (size_t i = 0; i < words.size(); i++) {
        words[i] = hash_u64(i);
    }
    auto hash = [&](unsigned blocks) {
        Device<uint64_t> d_words(words);
        Device<unsigned long long> sum(std::vector<unsigned long long>(1));
        launch(replica_hash_kernel, blocks, 256, 0, 0, sum.p, d_words.p, words.size());
        return sum.raw()[0];
    };
    const unsigned long long before = hash(7);
    expect(hash(1) == before && hash(64) == before, "another hash from other blocks");
    words[9999] ^= 1;
    expect(hash(7) != before, "a bit that does not count");
    words[9999] ^= 1;
    std::swap(words[5], words[600]);
    expect(hash(7) != before, "places that do not count");
}

static void test_gpu_exchange() {
    for (int ranks : {2, 3, 4, 7}) {
        if (!sampled(ranks == 3)) {
            continue;
        }
        for (int rank = 0; rank < ranks; rank++) {
            check_rank_sum<float>(ranks, rank, 1 << 20);
            check_rank_sum<bf16>(ranks, rank, 8192);
        }
    }
    check_step_words();
    check_replica_hash();
}

// The factor on the gradients: clip / norm above the limit, and 1 below it or without one.
static void test_gpu_clip() {
    static const struct {
        float norm, clip, scale;
    } table[] = {{4, 1, 0.25f}, {0.5f, 1, 1}, {1, 1, 1}, {4, 0, 1}, {0.5f, 0, 1}, {0, 1, 1}};
    static const float power = 0x1p20f;  // a loss scale: norm and clip do not know of it
    for (auto &row : table) {
        UpdateState before = {row.norm * row.norm, 0, 0, 7, 3};
        Device<UpdateState> state(std::vector<UpdateState>{before});
        gpu_update_decide(state.p, row.clip, INFINITY, 0);
        UpdateState now = state.raw()[0];
        expect(now.norm == row.norm && now.scale == row.scale && now.skip == 0 && now.skipped == 3,
               "norm %g, clip %g: factor %g", (double)row.norm, (double)row.clip,
               (double)now.scale);
        before = {row.norm * row.norm * power * power, 0, 0, 7, 3, power, 0, 9, 0};
        Device<UpdateState> scaled(std::vector<UpdateState>{before});
        gpu_update_decide(scaled.p, row.clip, INFINITY, 0);
        now = scaled.raw()[0];
        expect(now.norm == row.norm && now.scale == row.scale / power && now.skip == 0,
               "scaled norm %g, clip %g: factor %g", (double)row.norm, (double)row.clip,
               (double)now.scale);
    }
}

// What a step does to the loss scale, as the last lines of PyTorch's amp_update_scale_ have it; the
// least scale is 2, the largest the last power of two in fp32.
static void test_gpu_loss_scale() {
    const float inf = INFINITY, last = 0x1p127f;
    static const struct {
        float norm, scale;
        int good_steps;
        float next;
        int next_steps, moved;
    } table[] = {
        {1, 65536, 0, 65536, 1, 0},  {1, 65536, 3, 65536, 4, 0},   {1, 65536, 4, 131072, 0, 1},
        {inf, 65536, 4, 32768, 0, -1}, {NAN, 65536, 1, 32768, 0, -1}, {inf, 4, 0, 2, 0, -1},
        {inf, 2, 3, 2, 0, 0},        {0, last, 3, last, 4, 0},     {0, last, 4, last, 0, 0},
        {inf, last, 4, last / 2, 0, -1}};
    for (auto &row : table) {
        const float norm = row.norm * row.scale;
        Device<UpdateState> state(std::vector<UpdateState>{
            {norm * norm, 0, 0, 0, 0, row.scale, row.good_steps, 5, 9}});
        gpu_update_decide(state.p, 1, INFINITY, 0);
        const UpdateState now = state.raw()[0];
        expect(now.loss_scale == row.next && now.good_steps == row.next_steps &&
                   now.scale_moved == row.moved && now.skip == !isfinite(row.norm),
               "norm %g, scale %g after %d: %g after %d, moved %d", (double)row.norm,
               (double)row.scale, row.good_steps, (double)now.loss_scale, now.good_steps,
               now.scale_moved);
        // The step's gradients were made with the scale before it.
        expect(!isfinite(row.norm) || now.scale == 1 / row.scale, "norm %g, scale %g: factor %g",
               (double)row.norm, (double)row.scale, (double)now.scale);
    }
}

// Which of n numbers rounded up where a state in 16 bits took them in, as bits.
typedef std::vector<bool> Ups;

// A parameter, its two moments, two layers of its tensor, another tensor and two steps each draw
// random numbers of their own: that both of two states round up is as likely as by chance, within
// four standard deviations.
static void test_gpu_rounding_streams() {
    enum { N = 16384, RANGES = 3 };
    std::vector<ParamRange> ranges = {{0, 0, 0, 0, N, RNG_ROUND, 1, 0, 0},
                                      {N, N, N, N, N, RNG_ROUND, 1, 0, 0},
                                      {2 * N, 2 * N, 2 * N, 0, N, RNG_ROUND + 1, 1, 0, 0}};
    int chunks = param_ranges_chunk(ranges.data(), RANGES);
    // m = g = 1 + a quarter of bf16's spacing, v = g^2 nearly a half, p = 1.5 less nearly a half.
    const Reals ones(RANGES * N, (real)1.5), zero(RANGES * N), g(RANGES * N, (real)(1 + 0x1p-9));
    std::vector<Ups> all;
    Words names;
    for (uint32_t step = 1; step <= 2; step++) {
        Device<bf16> p(ones), m(zero), v(zero);
        Device<float> d_g(g);
        Device<ParamRange> d_ranges(ranges);
        Device<UpdateState> state(std::vector<UpdateState>{{0, 1, 1, 0, 0}});
        AdamW a = {0x1p-8f, 0, 0, 1, 1, 1e-8f, 0, 1};
        gpu_adamw<bf16, float, bf16, false>(p.p, nullptr, m.p, v.p, d_g.p, nullptr, nullptr,
                                            nullptr, d_ranges.p, RANGES, chunks, a,
                                            UpdateRandom{7, step}, state.p, 0);
        const Outputs got = {p.get(), m.get(), v.get()};
        for (size_t k = 0; k < 3; k++) {
            const real low = *std::min_element(got[k].begin(), got[k].end());
            for (int r = 0; r < RANGES; r++) {
                Ups ups;
                for (int i = 0; i < N; i++) {
                    ups.push_back(got[k][(size_t)(r * N + i)] > low);
                }
                all.push_back(ups);
                names.push_back(text("%c of range %d, step %u", "pmv"[k], r, step));
            }
        }
    }
    auto share = [](const Ups &x) { return (double)std::count(x.begin(), x.end(), true) / N; };
    for (size_t i = 0; i < all.size(); i++) {
        const double a = share(all[i]);
        expect(a > 0.2 && a < 0.8, "%s: %.2f round up", names[i].c_str(), a);
        for (size_t j = 0; j < i; j++) {
            Ups both(N);
            for (size_t x = 0; x < N; x++) {
                both[x] = all[i][x] && all[j][x];
            }
            const double b = share(all[j]), deviation = sqrt(a * (1 - a) * b * (1 - b) / N);
            expect_near((wide)share(both), (wide)(a * b), 4 * deviation, "%s and %s",
                        names[i].c_str(), names[j].c_str());
        }
    }
}

// In the tables of AdamW no two elements of a tensor, in whatever layer and on whatever rank, have
// the same place among its stream's random numbers, and all of them have one: of matrices in parts
// on one rank, of vectors on every rank.
static void test_gpu_rounding_places() {
    Settings s = planned("-e l3h3c96t16 -t 12 -b 2 --gpus 3 -z 1 -w 0");
    std::vector<ParamRange> ranges((size_t)model_tensors(&s.model));
    std::map<uint32_t, std::vector<std::pair<size_t, size_t>>> places;  // first and end, by stream
    for (s.rank = 0; s.rank < s.ranks; s.rank++) {
        const int count = ranges_fill(ranges.data(), &s, false);
        for (int i = 0; i < count; i++) {
            const ParamRange &r = ranges[(size_t)i];
            if (r.two_dimensional || s.rank == 0) {
                places[r.stream].push_back({r.index, r.index + r.count});
            }
        }
    }
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        auto &parts = places[(uint32_t)(RNG_ROUND + tensor)];
        size_t end = 0;
        std::sort(parts.begin(), parts.end());
        for (const auto &part : parts) {
            expect(part.first == end, "%s: %zu follows %zu", tensor_table[tensor].name, part.first,
                   end);
            end = part.second;
        }
        expect((int64_t)end == tensor_size(&s.model, tensor) * tensor_copies(&s.model, tensor),
               "%s: %zu places", tensor_table[tensor].name, end);
    }
}

// Every pointer that a kernel reads in packs, one element off: the launcher's line names it.
// Nothing is launched, so the addresses need no memory behind them.
template <class E, class G> static void check_misaligned() {
    enum { N = 64, C = 64, POINTERS = 6 };
    E *p[POINTERS] = {};
    G *g[POINTERS] = {};
    float *f[POINTERS] = {};
    int *ints = (int *)(uintptr_t)0x100000;
    float *f0 = (float *)(void *)ints;
    const struct {
        const char *name;
        int pointers;
        std::function<void()> launch;
    } table[] = {
        {"gpu_embedding_forward", 3,
         [&] { gpu_embedding_forward(p[0], ints, p[1], p[2], 1, N, C, 0); }},
        {"gpu_embedding_backward", 3,
         [&] { gpu_embedding_backward(g[0], g[1], p[2], ints, 1, 1, N, C, N, true, 0); }},
        {"gpu_layernorm_forward", 4,
         [&] { gpu_layernorm_forward(p[0], f[5], f[5], p[1], p[2], p[3], N, C, 0); }},
        {"gpu_layernorm_backward", 6,
         [&] {
             gpu_layernorm_backward<E>(p[0], f0, f0, f0, p[1], p[2], p[3], f0, f0, p[4], f[5],
                                       N, C, 0);
         }},
        {"gpu_gelu_forward", 2, [&] { gpu_gelu_forward(p[0], p[1], N * C, 0); }},
        {"column_sums", 4, [&] { gpu_gelu_backward(p[0], f[4], p[1], p[2], f[3], N, C, 0); }},
        {"matmul_run", 5,
         [&] {  // checked in this order: a, b, then d, bias, c
             matmul_run<E, G>(g[2], p[0], p[1], g[3], g[4], 1, false, false, C, C, C, 0);
         }},
        {"gpu_attention_forward", is_fp32<E> ? 0 : 2,
         [&] { gpu_attention_forward(p[0], f[5], p[1], 1, N, C, 1, 0); }},
        {"gpu_attention_backward", is_fp32<E> ? 0 : 4,
         [&] { gpu_attention_backward(p[0], f0, f0, p[1], p[2], p[3], f0, f0, 1, N, C, 1, 0); }},
        {"gpu_classifier", 1, [&] { gpu_classifier(f[5], p[0], ints, 1, f[1], N, C, C, true, 0); }},
        {"gpu_grad_square_sum", 2,
         [&] {
             gpu_grad_square_sum((UpdateState *)(void *)ints, f[5], g[0], f[1], g[0],
                                 (ParamRange *)(void *)ints, 1, 1, 0);
         }},
        {"gpu_adamw", 6,
         [&] {
             gpu_adamw<E, G, float, false>(p[0], (uint16_t *)(void *)f[1], f[2], f[3], g[4], f[5],
                                           nullptr, nullptr, (ParamRange *)(void *)ints, 1, 1,
                                           AdamW(), UpdateRandom(), (UpdateState *)(void *)ints, 0);
         }},
    };
    for (auto &row : table) {
        for (int bad = 0; bad < row.pointers; bad++) {
            for (int i = 0; i < POINTERS; i++) {
                const uintptr_t at = 0x100000 + (uintptr_t)i * 0x10000;
                p[i] = (E *)(at + (i == bad) * sizeof(E));
                g[i] = (G *)(at + (i == bad) * sizeof(G));
                f[i] = (float *)(at + (i == bad) * sizeof(float));
            }
            expect_refused(outcome(spawn(row.launch)), "is no multiple of 16 bytes",
                           text("%s, pointer %d", row.name, bad + 1));
            expect(read_file("stderr").find(Text(row.name) + ": pointer ") != Text::npos);
        }
    }
}

// The pointers of each launcher; rows that are no multiple of 16 bytes; sizes beyond the limits.
static void test_gpu_misaligned() {
    check_misaligned<float, float>();
    check_misaligned<bf16, bf16>();
    bf16 *p = (bf16 *)(uintptr_t)0x100000;
    float *f = (float *)(uintptr_t)0x100000;
    expect_death(gpu_gelu_forward(p, p, 12, 0), "a row of 12 numbers is no multiple of 16 bytes");
    expect_death(gpu_layernorm_forward(p, f, f, p, p, p, 1, CHANNELS_MAX + 8, 0),
                 "LayerNorm of 4104 channels");
    expect_death(gpu_layernorm_backward(p, f, f, f, p, p, p, f, f, p, f, 1, CHANNELS_MAX + 8, 0),
                 "LayerNorm of 4104 channels");
    expect_death(gpu_attention_forward(p, f, p, 1, 8, HEAD_MAX + 8, 1, 0), "heads of 136 channels");
    expect_death(gpu_attention_forward(f, f, f, 1, 8, HEAD_MAX_FP32 + 8, 1, 0),
                 "heads of 520 channels");
    expect_death(gpu_attention_forward(f, f, f, GRID_YZ_MAX + 1, 8, 8, 1, 0), "of batch 65536");
    expect_death(gpu_attention_forward(f, f, f, 1, LENGTH_MAX + 1, 8, 1, 0), "length 262141");
}

#if CUDA_CPU
// Which of the emulated library's algorithms a plan has.
static int algorithm_of(const MatmulPlan &plan) {
    emu::Algo algo;
    memcpy(&algo, &plan.algorithm, sizeof algo);
    return algo.id;
}

// The heuristic's first algorithm, and where D lies beside C the first that says it can do that; if
// none does, the first. A product that the library has not at all is named by its sizes.
static void test_gpu_algorithms() {
    const int N = 8, C = 16, OC = 24;
    Device<float> inp(noise(N * C, 1, 1)), weight(noise(OC * C, 1, 2)), addend(noise(N * OC, 1, 3));
    Device<float> out(N * OC), workspace(1 << 18);
    auto chosen = [&](int plan) { return algorithm_of(matmul_library.plan[plan]); };
    for (int in_place : {0, 1, 2, 3}) {  // of three algorithms, so many cannot write beside
        emu::set.lt_in_place = in_place;
        gpu_matmul_open(workspace.p, workspace.n * sizeof(float));
        gpu_matmul_forward<float>(out.p, inp.p, weight.p, nullptr, nullptr, N, C, OC, 0);
        expect(matmul_library.plans == 1 && chosen(0) == 0, "in place: %d of %d", chosen(0),
               in_place);
        if (in_place < 3) {
            gpu_matmul_forward<float>(out.p, inp.p, weight.p, nullptr, addend.p, N, C, OC, 0);
            expect(matmul_library.plans == 2 && chosen(1) == in_place, "beside: %d of %d",
                   chosen(1), in_place);
        } else {
            MatmulKey key = {OC, N, C, 1, 0, 0, 1, 1, CUDA_R_32F, CUDA_R_32F};
            matmul_plan_find(key);
            expect(chosen(1) == 0, "none can: %d", chosen(1));
        }
        gpu_matmul_close();
    }
    Outcome o = outcome(spawn([&] {
        emu::cuda_user = 0;  // a GPU would not take it
        emu::set.lt_max = 20;
        gpu_matmul_open(workspace.p, workspace.n * sizeof(float));
        gpu_matmul_forward<float>(out.p, inp.p, weight.p, nullptr, nullptr, N, C, OC, 0);
    }));
    const char *line = "no product of (24 x 16) and (16 x 8) here, fp32 in and fp32 out: "
                       "CUBLAS_STATUS_NOT_SUPPORTED\n";
    expect(o.status == 1 && o.err.find(line) != Text::npos, "%s", o.err.c_str());
    // One that refuses its product is replaced by the next until the warm-up is over, each with a
    // line; where the list ends, or after the warm-up, the run ends.
    const struct {
        int refuse, settled, status, lines;
    } rows[] = {{0, 0, 0, 0}, {1, 0, 0, 1}, {2, 0, 0, 2}, {3, 0, 1, 3}, {1, 1, 1, 1}};
    for (auto &row : rows) {
        o = outcome(spawn([&] {
            emu::cuda_user = 0;
            emu::set.lt_in_place = 0;
            emu::set.lt_refuse = row.refuse;
            gpu_matmul_open(workspace.p, workspace.n * sizeof(float));
            matmul_library.settled = row.settled;
            gpu_matmul_forward<float>(out.p, inp.p, weight.p, nullptr, addend.p, N, C, OC, 0);
            exit(chosen(0) == row.refuse && matmul_library.plans == 1 ? 0 : 9);
        }));
        const char *says = row.status ? "cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED; "
                           : row.refuse ? "refuses its algorithm for the product 24x8x16:10011:"
                                        : "";
        expect(o.status == row.status && o.err.find(says) != Text::npos &&
                   std::count(o.err.begin(), o.err.end(), '\n') == row.lines,
               "the first %d refuse, %s: status %d, %s", row.refuse,
               row.settled ? "after the warm-up" : "during it", o.status, o.err.c_str());
    }
}

// A run whose first algorithms are refused trains with the next ones; a later refusal ends it.
static void test_gpu_refused_algorithm() {
    for (bool later : {false, true}) {
        const Outcome o = outcome(spawn([&] {
            emu::set.lt_refuse = 1;
            Net n(shape("l1h1c16t8", 257), "-b 1 -t 8");
            for (int i = 0; i < matmul_library.plans; i++) {
                if (algorithm_of(matmul_library.plan[i]) != 1) {
                    _exit(9);
                }
            }
            emu::set.lt_refuse = later ? 2 : 1;
            trace(&n, 1);
            fprintf(stderr, "trained\n");
            fflush(NULL);
            _exit(0);
        }));
        const bool trained = o.err.find("\ntrained\n") != Text::npos;
        expect(o.status == later && trained != later, "later %d: %d, ... %s", later, o.status,
               o.err.substr(o.err.size() - std::min<size_t>(o.err.size(), 400)).c_str());
    }
}
#endif

#if CUDA_CPU
// Device memory of which only the pages that are touched exist; zero until then.
template <class T> struct Huge {
    T *p;
    size_t n;
    explicit Huge(size_t count) : n(count) {
        void *memory = mmap(NULL, n * sizeof(T), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            skip("no address space for tensors of 2^31 elements");
        }
        p = (T *)memory;
        emu::add_allocation({(char *)p, n * sizeof(T), false, (char *)p, n * sizeof(T)});
    }
    // Ends as `tail` does.
    Huge(size_t count, const Reals &tail) : Huge(count) {
        for (size_t i = 1; i <= tail.size() && i <= n; i++) {
            p[n - i] = from_float<T>(tail[tail.size() - i]);
        }
    }
    Reals last(size_t count) const {
        Reals values;
        for (size_t i = n - count; i < n; i++) {
            values.push_back(to_float(p[i]));
        }
        return values;
    }
    Huge(const Huge &) = delete;
    ~Huge() {
        for (size_t i = 0; i < emu::allocs.size(); i++) {
            if (emu::allocs[i].p == (char *)p) {
                emu::allocs.erase(emu::allocs.begin() + (long)i);
                break;
            }
        }
        emu::allocated_bytes -= n * sizeof(T);
        munmap(p, n * sizeof(T));
    }
};

// The outputs of the last rows are the same for a small tensor and for a huge one.
static void same(const char *who, const std::function<Outputs(size_t)> &run, size_t small,
                 size_t large) {
    expect(run(small) == run(large), "%s", who);
}

enum { HUGE_C = 4096, HUGE_ROWS = (1 << 19) + 1024 };  // rows: a multiple of the last block's

static void check_huge_rows() {
    enum { C = HUGE_C, ROWS = HUGE_ROWS, TAIL = 32 };
    const size_t tail = TAIL * C;
    const Reals x = noise_in<bf16>(tail, 1, 1), d = noise_in<bf16>(tail, 1, 2);
    const Reals w = noise_in<bf16>(C, 1, 3);
    same("embedding_forward",
         [&](size_t rows) {
             Huge<bf16> out(rows * C), wte(C, w), wpe(8 * C, x);
             Huge<int> tokens(rows);
             gpu_embedding_forward(out.p, tokens.p, wte.p, wpe.p, (int)(rows / 8), 8, C, 0);
             return Outputs{out.last(C)};
         },
         TAIL, ROWS);
    same("embedding_backward",
         [&](size_t T) {  // a sum over three sequences for each position
             Huge<bf16> dout(3 * T * C, d), dwpe(T * C, x), dwte(C);
             Huge<int> plan(3 * 3 * T + 1);
             const int rows = 3 * (int)T;
             EmbeddingPlan of = embedding_plan(plan.p, rows);
             of.order[0] = rows - 1, of.start[1] = 1;
             gpu_embedding_backward(dwte.p, dwpe.p, dout.p, plan.p, 1, 3, (int)T, C, (int)T, false,
                                    0);
             return Outputs{dwpe.last(8), dwte.last(8)};
         },
         TAIL, ROWS / 2);
    same("layernorm",
         [&](size_t rows) {
             Huge<bf16> out(rows * C), inp(rows * C, x), weight(C, w), bias(C, w);
             Huge<bf16> dinp(rows * C), dout(rows * C, d);
             Huge<float> mean(rows), rstd(rows), dw(C), db(C);
             Huge<float> scratch(gpu_layernorm_backward_bytes((int)rows, C) / 4);
             gpu_layernorm_forward(out.p, mean.p, rstd.p, inp.p, weight.p, bias.p, (int)rows, C, 0);
             gpu_layernorm_backward(dinp.p, dw.p, db.p, (float *)nullptr, dout.p, inp.p, weight.p,
                                    mean.p, rstd.p, dout.p, scratch.p, (int)rows, C, 0);
             return Outputs{out.last(C), mean.last(1), rstd.last(1), dinp.last(C)};
         },
         TAIL, ROWS);
    same("gelu_forward",
         [&](size_t rows) {
             Huge<bf16> out(rows * C), inp(rows * C, x);
             gpu_gelu_forward(out.p, inp.p, rows * C, 0);
             return Outputs{out.last(C)};
         },
         TAIL, ROWS);
    same("gelu_backward",
         [&](size_t rows) {
             Huge<bf16> dinp(rows * C), dout(rows * C, d), inp(rows * C, x);
             Huge<float> scratch(gpu_bias_backward_bytes((int)rows, C) / 4), db(C);
             gpu_gelu_backward(dinp.p, db.p, dout.p, inp.p, scratch.p, (int)rows, C, 0);
             return Outputs{dinp.last(256), db.last(32)};
         },
         TAIL, ROWS);
}

static void check_huge_attention() {
    same("classifier",
         [&](size_t rows) {
             Huge<bf16> logits(rows * 50304, noise(50304, 1, 1));
             Huge<float> losses(rows);
             Huge<int> targets(rows);
             gpu_classifier(losses.p, logits.p, targets.p, 1, nullptr, (int)rows, 50257, 50304,
                            true, 0);
             return Outputs{logits.last(50304), losses.last(1)};
         },
         4, 42700);
    same("attention",
         [&](size_t B) {
             const size_t T = 128, NH = 16, row = 1024;
             Huge<__half> out(B * T * row), qkv(B * T * 3 * row, noise(T * 3 * row, 1, 5));
             Huge<__half> dqkv(B * T * 3 * row), dout(B * T * row, noise(T * row, 1, 6));
             Huge<float> lse(B * NH * T), drow(B * NH * T), dbias(3 * row);
             Huge<float> scratch(gpu_attention_backward_bytes<__half>((int)B, T, row, NH) / 4);
             gpu_attention_forward(out.p, lse.p, qkv.p, (int)B, T, row, NH, 0);
             gpu_attention_backward(dqkv.p, dbias.p, drow.p, dout.p, qkv.p, out.p, lse.p, scratch.p,
                                    (int)B, T, row, NH, 0);
             return Outputs{out.last(T * row), lse.last(T), dqkv.last(T * 3 * row)};
         },
         1, 16400);
    same("attention, fp32",
         [&](size_t B) {
             const size_t T = 64, NH = 16, row = 1024;
             Huge<float> out(B * T * row), qkv(B * T * 3 * row, noise(T * 3 * row, 1, 5));
             Huge<float> dqkv(B * T * 3 * row), dout(B * T * row, noise(T * row, 1, 6));
             Huge<float> lse(B * NH * T), drow(B * NH * T), dbias(3 * row);
             Huge<float> scratch(gpu_attention_backward_bytes<float>((int)B, T, row, NH) / 4);
             gpu_attention_forward(out.p, lse.p, qkv.p, (int)B, T, row, NH, 0);
             gpu_attention_backward(dqkv.p, dbias.p, drow.p, dout.p, qkv.p, out.p, lse.p, scratch.p,
                                    (int)B, T, row, NH, 0);
             return Outputs{out.last(4 * row), lse.last(4), dqkv.last(12 * row)};
         },
         1, 32800);
}

static void check_huge_update() {
    const Reals x = noise_in<bf16>(UPDATE_CHUNK, 1, 1), d = noise_in<bf16>(UPDATE_CHUNK, 1, 2);
    same("norm and AdamW",
         [&](size_t chunks) {  // the last chunk falls to the norm's last block
             const size_t count = chunks * UPDATE_CHUNK;
             Huge<bf16> p(count, x), g(count, d);
             Huge<uint16_t> low(count);
             Huge<float> m(count), v(count), scratch(gpu_grad_square_sum_bytes() / 4);
             Huge<ParamRange> range(1);
             Huge<UpdateState> state(1);
             *range.p = {0, 0, 0, 0, count, RNG_ROUND, 1, 0, 0};
             expect((size_t)param_ranges_chunk(range.p, 1) == chunks, "chunks");
             gpu_grad_square_sum(state.p, scratch.p, g.p, (float *)nullptr, g.p, range.p, 1,
                                 (int)chunks, 0);
             gpu_update_decide(state.p, 1, INFINITY, 0);
             AdamW a = {1e-3f, 0.9f, 0.95f, 0.1f, 0.05f, 1e-8f, 0.1f, 1.0f};
             float *none = nullptr;
             gpu_adamw<bf16, bf16, float, true>(p.p, low.p, m.p, v.p, g.p, none, nullptr,
                                                nullptr, range.p, 1, (int)chunks, a,
                                                UpdateRandom{1, 1}, state.p, 0);
             return Outputs{p.last(UPDATE_CHUNK), m.last(UPDATE_CHUNK), {state.p->norm}};
         },
         1024, (1 << 18) + 1024);
}

// Tensors of more than 2^31 elements: the last block of every grid computes what it does for the
// same rows of a small tensor. A product of two 32-bit sizes used as an index ends outside.
static void test_gpu_huge() {
    emu::set.last_blocks = 1;
    check_huge_rows();
    check_huge_attention();
    check_huge_update();
}
#endif

// What ranks agree on: a stop of any of them, the first one that cannot go on, and, when they meet,
// the least memory that one of them has. Ranks share the threads of their machine.
static void test_rank_agreement() {
    enum { RANKS = 4, THREADS = 8 };
    this_rank = {0, RANKS, 0, RANKS, 0, 0, 0, 0};
    for (int who = 0; who < RANKS; who++) {
        RankWord words[RANKS] = {};
        words[who].stop = 1;
        ranks_agree(words);
        expect(this_rank.stop == 1 && this_rank.fault == 0, "rank %d stops", who);
        words[who].failed = words[RANKS - 1].failed = 1;
        ranks_agree(words);
        expect(this_rank.fault == who + 1, "rank %d fails, not %d", who, this_rank.fault - 1);
    }
    ranks_share(RANKS);
    rank_row = rank_row_at(0);
    for (int least = 0; least < RANKS; least++) {
        rank_links = (int *)alloc_zero(RANKS, sizeof(int));
        int others[RANKS];  // the other ends of rank 0's links
        for (int r = 0; r < RANKS; r++) {
            RankCard card = {};
            card.program = fingerprint_program();
            card.device = 1000 + (r != least);
            card.host = 2000 + ((r + 1) % RANKS != least);
            snprintf(card.gpu, sizeof card.gpu, "GPU %d", r);
            int ends[2] = {-1, -1};
            if (r == 0) {
                rank_card = card;
            } else if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0 ||
                       !socket_move(ends[1], &card, sizeof card, 1)) {
                give_up("no socket");
            }
            rank_links[r] = ends[0];
            others[r] = ends[1];
        }
        ranks_introduce();
        expect(rank_card.device == 1000 && rank_card.host == 2000, "rank %d has least: %d, %d",
               least, (int)rank_card.device, (int)rank_card.host);
        for (int r = 1; r < RANKS; r++) {
            close(others[r]);
        }
    }
#ifdef _OPENMP
    unsetenv("OMP_NUM_THREADS");
    for (const int launched : {0, 1}) {  // a launcher does not tell its ranks to share
        const int cores = launched ? (int)sysconf(_SC_NPROCESSORS_ONLN) : (int)THREADS;
        omp_set_num_threads(launched ? RANKS * cores : (int)THREADS);
        ranks_begin({0, RANKS, 0, RANKS, launched, 0, 0, 0}, rank_row_at(0));
        ranks_share_cores();
        expect(omp_get_max_threads() == std::max(1, cores / RANKS), "%d threads of %d",
               omp_get_max_threads(), cores);
    }
#endif
}

// -------------------------------------------------------------------------------------------------
// 12. The network on a GPU
// Volume II's chapters from The device arena to States, open and close against the oracle: every
// gradient, several steps, in both types; what must be equal to the bit; the one allocation, and
// buffers used outside their lives.

// An oracle with the weights of another network as the device computes with them.
struct Oracle : Net {
    Oracle(Net *gpu, int logit_rows) : Net(gpu->s.model, gpu->s.B, gpu->s.T, 0, -1, logit_rows) {
        engine_copy(&e, &gpu->e, STATE_WEIGHTS, &gpu->s.model, gpu->s.dtype);
    }
};

static const struct {
    const char *e;
    int V;
    const char *options;
} gpu_shapes[] = {{"l2h3c192t65", 257, "-b 1 -t 65"},
                  {"l3h5c80t40", 300, "-b 2 -t 33 --logit-rows 40 -r block:2"},
                  {"l1h1c128t130", 129, "-b 1 -t 130 -r norm"},
                  {"l2h2c16t1", 5, "-b 3 -t 1"},
                  {"l1h1c16t8", 50257, "-b 1 -t 8 -r mlp"}};

// Every gradient against the oracle: norm of the difference over norm at most 1e-5, twice in a row,
// because the first micro-step writes where later ones add. The GPU's logits too.
static void test_gpu_gradients_fp32() {
    for (auto &row : gpu_shapes) {
        if (!sampled(row.V == 300)) {
            continue;
        }
        Model m = shape(row.e, row.V);
        Net n(m, Text("--dtype fp32 ") + row.options);
        Oracle oracle(&n, n.s.logit_rows);
        const int N = n.s.B * n.s.T;
        Batch b(2 * N, m.V, 1);
        Reals first, logits[2] = {Reals(m.V), Reals(m.V)};
        for (int turn = 0; turn < 2; turn++) {
            for (int k = 0; k < 2; k++) {
                n.e.micro_step(&n.e, &b.inputs[k * N], &b.targets[k * N], k, 2);
                oracle.e.micro_step(&oracle.e, &b.inputs[k * N], &b.targets[k * N], k, 2);
            }
            first = turn ? first : n.gradients();
            expect(same_bits(first, n.gradients()), "%s: again", row.e);
        }
        for (int tensor = 0; tensor < TENSORS; tensor++) {
            expect_near((wide)gradient_error(&n.e, &oracle.e, &m, tensor), 0, 1e-5, "d%s of %s",
                        tensor_table[tensor].name, row.e);
        }
        n.e.logits(&n.e, logits[0].data(), b.inputs.data(), n.s.T);
        oracle.e.logits(&oracle.e, logits[1].data(), b.inputs.data(), n.s.T);
        expect_near((wide)relative_error(logits[0].data(), logits[1].data(), m.V), 0, 1e-5,
                    "logits of %s", row.e);
    }
}

// The type that the oracle's numbers are rounded to.
static real (*naive_round)(real);
static void round_all(real *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        x[i] = naive_round(x[i]);
    }
}

// While the oracle computes as 16 bits would, its plan: whenever a row comes alive or dies, which
// is at every tick, the activations and gradients alive by then are rounded. Statistics stay fp32.
static Plan *rounded_plan;
static void mark_and_round(void *memory, size_t bytes, int alive) {
    plan_mark(memory, bytes, alive);
    for (int i = 0; i < rounded_plan->buffer_count; i++) {
        const Buffer *row = &rounded_plan->buffers[i];
        if (row->alive && (row->group == GROUP_KEPT || row->group == GROUP_WORKING) &&
            !strstr(row->name, "mean") && !strstr(row->name, "rstd") && !strstr(row->name, "lse")) {
            round_all((real *)(void *)(rounded_plan->base[HOME_DEVICE] + row->offset), row->count);
        }
    }
}

// The oracle's stages with logits and their gradients rounded, all rows in one chunk.
static void naive_stage(void *self, int stage, int layer) {
    Pass *pass = (Pass *)self;
    const Plan *p = pass->plan;
    const Model *m = &p->settings.model;
    const int N = pass->B * pass->T;
    if (stage != HEAD) {
        network_stage(self, stage, layer);
        return;
    }
    real *logits = buffer(p, BUF_LOGITS), *lnf = buffer(p, BUF_LNF), *wte = weight(p, WTE, 0);
    matmul_forward(logits, lnf, wte, NULL, NULL, N, m->C, m->Vp);
    round_all(logits, (int64_t)N * m->Vp);
    classifier_forward_backward(buffer(p, BUF_LOSSES), logits, pass->targets, pass->dloss, N, m->V,
                                m->Vp, 1);
    round_all(logits, (int64_t)N * m->Vp);
    matmul_backward(lnf, dweight(p, WTE, 0), NULL, logits, lnf, wte, N, m->C, m->Vp);
}

// A micro-step of the oracle with every tensor that E would keep rounded where it is made: weights,
// activations, logits, their gradients, which are those of `scale` times the loss, and in the end
// the gradients of matrices unless they are fp32.
template <class E>
static void naive_micro_step(Net *n, const Token *inputs, const Token *targets, real scale) {
    Plan *p = rounded_plan = &n->plan;
    const Model *m = &n->s.model;
    const int B = n->s.B, T = n->s.T;
    Pass pass = {p, inputs, targets, B, T, scale / (real)(B * T), 0, 0};
    naive_round = rounded_to<E>;
    p->mark = mark_and_round;
    memset(buffer(p, BUF_GRADS), 0, p->buffers[p->single[BUF_GRADS]].bytes);
    walk(p, tick_embed_backward(m), 0, naive_stage, &pass);
    p->mark = plan_mark;
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            real *grads = dweight(p, tensor, l);
            for (int64_t i = 0; i < tensor_size(m, tensor); i++) {
                grads[i] /= scale;
            }
            if (tensor_is_matrix(tensor) && !traits<E>.narrow) {
                round_all(grads, tensor_size(m, tensor));
            }
        }
    }
}

// Every gradient in 16 bits: at most twice the error of the naive computation above, both measured
// from the oracle in fp32 with the same weights. fp16 at a loss scale that few rows allow.
template <class E> static void check_gradients() {
    const int log2 = 10;
    for (auto &row : gpu_shapes) {
        if (!sampled(row.V == 300)) {
            continue;
        }
        Model m = shape(row.e, row.V);
        Net n(m, Text(row.options) + " --dtype " + traits<E>.name);
        if (traits<E>.narrow) {
            n.e.scale_loss(&n.e, log2, 0);
        }
        Oracle exact(&n, n.s.B * n.s.T), naive(&n, n.s.B * n.s.T);
        Batch b(n.s.B * n.s.T, m.V, 1);
        n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
        exact.e.micro_step(&exact.e, b.inputs.data(), b.targets.data(), 0, 1);
        naive_micro_step<E>(&naive, b.inputs.data(), b.targets.data(),
                            traits<E>.narrow ? 1 << log2 : 1);
        for (int tensor = 0; tensor < TENSORS; tensor++) {
            double error = gradient_error(&n.e, &exact.e, &m, tensor);
            double loss = gradient_error(&naive.e, &exact.e, &m, tensor);
            expect_near((wide)error, 0, 2 * loss, "%s: d%s of %s", traits<E>.name,
                        tensor_table[tensor].name, row.e);
        }
    }
}

static void test_gpu_gradients_16() {
    if (!device_lacks_bf16()) {
        check_gradients<bf16>();
    }
    check_gradients<__half>();
}

// Root of the sum of squares of a - b.
static double distance(const Reals &a, const Reals &b) {
    double squares = 0;
    for (size_t i = 0; i < a.size(); i++) {
        squares += pow((double)a[i] - (double)b[i], 2);
    }
    return sqrt(squares);
}

// Four optimizer steps of two micro-steps each, in every second of which the norm is clipped. What
// a step may be off by is measured anew in each, from the weights that the device has by then, so
// that errors of earlier steps, which AdamW makes full steps of where a gradient is nearly zero,
// need no tolerance.
// Gradients: in 16 bits at most twice as far from the oracle's in fp32 as the naive computation
// (naive_micro_step) is; in fp32 they have been through 6 L + 2 products, whose errors, each that
// of a sum of 4 C terms, are independent. The loss: at most twice the root mean square of the naive
// errors of its tokens, which bounds the mean of errors of their size. The norm is that of the
// gradients that the device has, but for its sum. AdamW in fp32 makes the very weights and moments
// that the device gets from those gradients.
template <class E> static void check_steps() {
    enum { B = 2, ROWS = 33 * B, MICROS = 2 };
    const char *dtype = traits<E>.name;
    Model m = shape("l2h2c64t33", 257);
    Net n(m, text("-b %d -t 33 -r block --dtype %s", (int)B, dtype));
    Oracle exact(&n, ROWS), naive(&n, ROWS), follows(&n, ROWS);
    engine_copy(&follows.e, &n.e, STATE_WEIGHTS, &m, TYPE_FP32);
    Options o;
    options_default(&o);
    o.weight_decay = 0.1;
    for (int step = 0; step < 4; step++) {
        Batch b(MICROS * ROWS, m.V, (uint64_t)(step % 2));
        for (Net *each : {(Net *)&exact, (Net *)&naive}) {
            engine_copy(&each->e, &n.e, STATE_WEIGHTS, &m, n.s.dtype);
        }
        double loss = 0, loss_squares = 0;
        Reals rounded;
        for (int k = 0; k < MICROS; k++) {
            const Token *in = &b.inputs[(size_t)(k * ROWS)], *out = &b.targets[(size_t)(k * ROWS)];
            n.e.micro_step(&n.e, in, out, k, MICROS);
            exact.e.micro_step(&exact.e, in, out, k, MICROS);
            const real *right = buffer(&exact.plan, BUF_LOSSES);
            for (int i = 0; i < ROWS; i++) {
                loss += (double)right[i] / (MICROS * ROWS);
            }
            if (!is_fp32<E>) {
                naive_micro_step<E>(&naive, in, out, traits<E>.narrow ? 1 << LOSS_SCALE_LOG2 : 1);
                const real *wrong = buffer(&naive.plan, BUF_LOSSES);
                const Reals half = naive.gradients();
                rounded.resize(half.size());
                for (size_t i = 0; i < half.size(); i++) {
                    rounded[i] += half[i] / MICROS;
                }
                for (int i = 0; i < ROWS; i++) {
                    loss_squares += pow((double)wrong[i] - (double)right[i], 2) / (MICROS * ROWS);
                }
            }
        }
        Reals gradients = n.gradients();
        const Reals want = exact.gradients(), zeros(want.size());
        const double norm = distance(gradients, zeros);
        const double products = sqrt(6 * m.L + 2) * sum_error(4 * m.C);
        expect_near((wide)distance(gradients, want), 0,
                    is_fp32<E> ? products * norm : 2 * distance(rounded, want),
                    "%s gradients, step %d", dtype, step);
        o.clip = step % 2 ? norm / 2 : 0;
        const StepResult r = n.e.update(&n.e, &o, 2e-3, HUGE_VAL, step);
        expect_near((wide)r.loss, (wide)loss, is_fp32<E> ? products * loss : 2 * sqrt(loss_squares),
                    "%s loss, step %d", dtype, step);
        expect_near((wide)r.norm, (wide)norm, sum_error((double)want.size()) * norm,
                    "%s norm, step %d", dtype, step);
        const float clip = (float)o.clip, factor = clip > 0 ? clip / (float)r.norm : 1;
        for (real &g : gradients) {
            g *= factor;
        }
        follows.e.write(&follows.e, STATE_GRADS, 0, gradients.data(), (int64_t)gradients.size());
        o.clip = 0;
        follows.e.update(&follows.e, &o, 2e-3, HUGE_VAL, step);
        for (int state : {STATE_WEIGHTS, STATE_M, STATE_V}) {
            const Reals got = n.state(state), made = follows.state(state);
            expect(same_bits(got, made), "%s, step %d: state %d is off by %g of %g", dtype, step,
                   state, distance(got, made), distance(made, zeros));
        }
    }
}

static void test_gpu_steps() {
    if (!device_lacks_bf16()) {
        check_steps<bf16>();
    }
    if (sampled(device_lacks_bf16())) {
        check_steps<float>();
        check_steps<__half>();
    }
}

// Losses, gradients and weights of two steps: the same for every level of recomputation, in every
// order of threads, and from one run to the next. All of it in bf16, two levels in other types.
static void test_gpu_bits() {
    int runs = 0;
    for (const char *dtype :
         {"fp32", "bf16", "fp16", "bf16 --grad-dtype fp32 --moments bf16 -w none"}) {
        if (!sampled(strcmp(dtype, "bf16") == 0)) {
            continue;
        }
        Model m = shape("l3h2c32t17", 257);
        auto run = [&](const Text &level) {
            Net n(m, Text("-b 2 -t 17 --logit-rows 20 -r ") + level + " --dtype " + dtype);
            Trace t = trace(&n, 2);
            runs++;
            return Outputs{Reals(t.losses.begin(), t.losses.end()), t.gradients, t.weights};
        };
        Outputs plain = run("none");
        expect(plain[0][0] > 1 && plain[0][1] != plain[0][0], "losses");
        const bool every = is_full() || (strcmp(dtype, "bf16") == 0 && !TEST_ASAN);
        for (const char *level :
             {"none", "gelu", "norm", "mlp", "qkv", "block", "block:0", "block:1", "block:2"}) {
            if (every || strcmp(level, "qkv") == 0 || strcmp(level, "block:1") == 0) {
                expect(run(level) == plain, "-r %s, %s", level, dtype);
            }
        }
        if (every || TEST_ASAN) {
            expect(every_order([&] { return run("block:2"); }, dtype) == plain, "%s", dtype);
        }
    }
    detail = text("%d runs", runs);
}

// wte's gradient in bf16 is rounded once for each chunk of logits and once by the embedding: its
// distance to the same sums in fp32, for one chunk and for eight, the most up to 65,536 tokens.
static void test_gpu_wte_rounding() {
    need_bf16();
    Model m = shape("l1h1c32t64", 257);
    Batch b(256, m.V, 1);
    for (int rows : {256, 32}) {
        Reals dwte[2];
        for (int fp32 = 0; fp32 < 2; fp32++) {
            Net n(m, text("-b 4 -t 64 --logit-rows %d --grad-dtype %s", rows,
                          fp32 ? "fp32" : "bf16"));
            n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
            dwte[fp32] = Reals((size_t)tensor_size(&m, WTE));
            n.e.read(&n.e, STATE_GRADS, tensor_offset(&m, WTE, 0), dwte[fp32].data(),
                     tensor_size(&m, WTE));
        }
        const double error =
            relative_error(dwte[0].data(), dwte[1].data(), (int64_t)dwte[0].size());
        const int roundings = 256 / rows + 1;
        expect_near((wide)error, 0, sqrt(roundings) * traits<bf16>.unit / 2, "%d roundings",
                    roundings);
        expect(error > 0, "bf16 rounds");
        detail += text("%s%d roundings %.1e", rows == 256 ? "" : ", ", roundings, error);
    }
}

#if CUDA_CPU
#if GPT2_NCCL
// What a rank has of wte's gradient behind its first micro-step goes to grad-RANK: all of it at
// stage 0, else its own part; wte and its first moments behind the last update to wte-RANK.
static void wte_micro_step(Engine *e, const Token *in, const Token *out, int accum_step,
                           int accum_steps) {
    const Settings *s = &((GpuNetwork<float, float> *)e->self)->plan->settings;
    const TensorRange own = tensor_update_range(s, WTE, 0);
    Reals grad((size_t)own.count);
    healthy_micro_step(e, in, out, accum_step, accum_steps);
    if (exists(text("grad-%d", s->rank))) {
        return;
    }
    e->read(e, STATE_GRADS, tensor_offset(&s->model, WTE, 0) + own.first, grad.data(), own.count);
    write_file(text("grad-%d", s->rank), Text((char *)grad.data(), grad.size() * sizeof(real)));
}

static StepResult (*healthy_update)(Engine *e, const Options *o, double lr, double limit,
                                    int64_t updates);
static StepResult wte_update(Engine *e, const Options *o, double lr, double limit,
                             int64_t updates) {
    const StepResult result = healthy_update(e, o, lr, limit, updates);
    const Settings *s = &((GpuNetwork<float, float> *)e->self)->plan->settings;
    const size_t size = (size_t)tensor_size(&s->model, WTE);
    Reals wte(2 * size);
    for (int state : {STATE_WEIGHTS, STATE_M}) {
        e->read(e, state, tensor_offset(&s->model, WTE, 0), &wte[state ? size : 0], (int64_t)size);
    }
    write_file(text("wte-%d", s->rank), Text((char *)wte.data(), wte.size() * sizeof(real)));
    return result;
}

static void wte_open(Engine *e, Plan *p) {
    gpu_engine_open(e, p);
    healthy_micro_step = e->micro_step;
    healthy_update = e->update;
    e->micro_step = wte_micro_step;
    e->update = wte_update;
}

// wte belongs to the first layer and to the last, and to every rank: a token that rank 1 alone has,
// whose row is rank 0's part, has the gradient of one rank with all sequences, though each rank
// adds it up over two chunks of logits. Rows V .. Vp-1 get none, and are zero behind two updates;
// of the others all ranks have the bits of stage 0, and of their moments, of which the ranks send
// each other parts that are larger than the buffer for them.
static void test_gpu_rank_wte() {
    enum { C = 8, T = 64, B = 4, RARE = 5, V = 257, VP = 384 };
    static const Program program = {
        .name = "train_gpt2cu_cpu", .default_model = "d12", .gpu = 1, .open = wte_open,
        .available = device_available, .refuse = gpu_settings_check, .built = "", .device = device_name,
        .ranks_start = ranks_start, .ranks_handshake = ranks_shake_hands, .alone = ""};
    Ids tokens(3 * B * T * 2 + 1);
    for (size_t i = 0; i < tokens.size(); i++) {
        const bool rank_1 = i / (B * T) == 1 && i % (B * T) > 0;  // of two ranks and of three
        tokens[i] = rank_1 && i % 7 == 0 ? (uint16_t)RARE : (uint16_t)(8 + i * i / 3 % 240);
    }
    write_file("train.bin", shard_bytes(tokens, BYTE_TOKENS));
    auto read = [](const Text &path) {
        const Text bytes = read_file(path);
        const float *x = (const float *)(const void *)bytes.data();
        return Reals(x, x + bytes.size() / sizeof(float));
    };
    Reals stage_0;
    auto run = [&](int ranks, int b, int z) {
        const Text line = text("-i train.bin -e l1h1c%dt%d -b %d -d %d -z %d --gpus %d --quiet "
                               "--dtype fp32 --logit-rows 128 --shuffle 0 -k constant -x 2", C, T,
                               b, b * T * ranks, z, ranks);
        for (int q = 0; q < ranks; q++) {
            remove(text("grad-%d", q).c_str());
        }
        expect_success(in_process(line, &program), line);
        for (int q = 0; q < ranks; q++) {
            const Reals wte = read(text("wte-%d", q));
            stage_0 = z == 0 && q == 0 ? wte : stage_0;
            expect(wte == stage_0, "rank %d of %d, -z %d: other weights", q, ranks, z);
            expect(wte.size() == 2 * VP * C &&
                       std::count(&wte[V * C], &wte[0] + VP * C, 0) == (VP - V) * C,
                   "rank %d of %d, -z %d: padding", q, ranks, z);
        }
    };
    for (int ranks : {2, 3}) {
        run(1, B * ranks, 0);
        const Reals want = read("grad-0");
        expect(want.size() == VP * C && want[RARE * C] != 0, "%zu numbers", want.size());
        for (int z = 0; z < 4; z++) {
            Reals got;
            run(ranks, B, z);
            for (int q = 0; q < ranks; q++) {
                const Reals part = read(text("grad-%d", q));
                got.insert(got.end(), part.begin(), part.end());
                if (z == 0 || q == ranks - 1) {
                    const Text who = text("%d ranks, -z %d, rank %d", ranks, z, q);
                    got.resize(want.size());
                    expect_near((wide)relative_error(&got[RARE * C], &want[RARE * C], C), 0, 1e-6,
                                "%s: the rare row", who.c_str());
                    expect_near((wide)relative_error(got.data(), want.data(), VP * C), 0, 1e-6,
                                "%s: all", who.c_str());
                    expect(std::count(&got[V * C], &got[0] + VP * C, 0) == (VP - V) * C, "%s: "
                           "padding", who.c_str());
                    got.clear();
                }
            }
        }
    }
}

static int64_t host_room;  // what `ulimit -d` is to leave a rank
static size_t room_available() {
    const size_t device = device_available();
    (void)host_memory("");  // its own memory is taken now
    const int64_t mapped = file_number("/proc/self/status", "VmData:", 0) << 10;
    struct rlimit r;
    getrlimit(RLIMIT_DATA, &r);
    omp_set_num_threads(1);  // few stacks of threads to come, which count too
    r.rlim_cur = (rlim_t)(mapped + host_room + stacks_to_come(1));
    setrlimit(RLIMIT_DATA, &r);
    return device;
}

static void room_open(Engine *e, Plan *p) {
    (void)e;
    write_file("opened", text("%zu", p->host_bytes));
    exit(0);
}

// What the ranks of a machine pin together, and take beside their plans, is held against its
// memory: one byte too few ends the run before anything of the plan is allocated.
static void test_gpu_rank_host() {
    static const Program program = {
        .name = "train_gpt2cu_cpu", .default_model = "d12", .gpu = 1, .open = room_open,
        .available = room_available, .refuse = gpu_settings_check, .built = "", .device = device_name,
        .ranks_start = ranks_start, .ranks_handshake = ranks_shake_hands, .alone = ""};
    const Text line = "-i train.bin -e l2h2c64t16 -b 2 -r none --gpus 3 -z 1 "
                      "--offload moments,master --quiet";
    write_corpus();
    host_room = 1 << 30;
    expect_success(in_process(line, &program), line);
    const int64_t each = atol(read_file("opened").c_str());
    for (int less : {0, 1}) {
        remove("opened");
        const Model m = shape("l2h2c64t16", 257);
        host_room = 3 * (each + (int64_t)beside_plan_bytes(&m)) - less;
        const Outcome o = in_process(line, &program);
        if (less) {
            expect_refused(o, "only " + Text(bytes_text((double)each).s) + " are available "
                           "(ulimit -d less its threads' stacks): 1 B short; fewer states in",
                           line);
        } else {
            expect_success(o, line);
        }
        expect(each > 10000 && exists("opened") == !less, "%lld bytes each, %d less",
               (long long)each, less);
    }
}
#endif

// GPUs of machines with one name and one place on the bus are two; one is one.
static void test_gpu_rank_names() {
    std::vector<Text> names;
    this_rank.rank = 1;  // no id of a run
    for (long machine : {0, 0, 0x9a}) {
        char gpu[RANK_TEXT], id[RANK_ID];
        emu::set.machine = machine;
        rank_introduce(gpu, id);
        names.push_back(gpu);
    }
    expect(names[0] == names[1] && names[0] != names[2] &&
               names[2].find(", GPU-9a000000") != Text::npos, "%s", names[2].c_str());
}

// N ranks have N times the peak that "% of peak" is of.
static void test_gpu_peak() {
    Settings s = planned("-e l2h2c16t16");
    Engine one, three;
    device_describe(&one, &s);
    s.ranks = 3;
    device_describe(&three, &s);
    expect(one.peak_flops > 0 && three.peak_flops == 3 * one.peak_flops, "%g and %g FLOP/s",
           one.peak_flops, three.peak_flops);
}

// Pinned memory is zero to its last byte, mapped by the program or allocated by CUDA.
static void test_gpu_pinned() {
    const long asked = emu::set.alias;
    for (const long alias : {0, 1}) {
        for (const size_t bytes : {(size_t)1, (size_t)(2 << 20) + 5, (size_t)5 << 20}) {
            emu::set.alias = alias;
            char *memory = pinned_open(bytes, -1);
            expect(pinned_in_place() == !alias, "another way to pin");
            expect(std::count(memory, memory + bytes, 0) == (long)bytes, "%zu bytes, alias %ld",
                   bytes, alias);
            pinned_close(memory, bytes);
        }
    }
    emu::set.alias = asked;
}

// The policy of the memory at `at`, and the first 64 nodes it names; -1 where nobody is told.
static std::pair<int, unsigned long> memory_policy(void *at) {
    enum { OF_ADDRESS = 2, NODES = 1024 };  // get_mempolicy(2)
    unsigned long nodes[NODES / 64 + 1] = {};
    int mode = -1;
    const bool told = syscall(SYS_get_mempolicy, &mode, nodes, (unsigned long)NODES, at,
                              OF_ADDRESS) == 0;
    return {told ? mode : -1, nodes[0]};
}

// Pinned memory prefers the node of its GPU, in a made-up /sys; with none it is as it would be.
static void test_gpu_pinned_node() {
    const int gpus = (int)emu::set.gpus;
    emu::set.gpus = 16;
    put("sys/bus/pci/devices/0000:0a:00.0/numa_node", "0\n");
    put("sys/bus/pci/devices/0000:0b:00.0/numa_node", "-1\n");
    cuda_check(cudaSetDevice(10));
    expect(device_node(".") == 0 && device_node("absent") == -1, "node %d", device_node("."));
    char *near = pinned_open(3 << 20, device_node("."));
    const auto policy = memory_policy(near + (2 << 20));
    cuda_check(cudaSetDevice(11));
    expect(device_node(".") == -1, "node %d", device_node("."));
    char *any = pinned_open(3 << 20, device_node("."));
    expect(memory_policy(any).first <= 0, "policy %d", memory_policy(any).first);
    pinned_close(near, 3 << 20);
    pinned_close(any, 3 << 20);
    emu::set.gpus = gpus;
    if (policy.first < 0) {
        skip("memory policies are not told here");
    }
    expect(policy.first == 1 && policy.second == 1, "policy %d, nodes %lx", policy.first,
           policy.second);
}

// One cudaMalloc of exactly the planned bytes, and nothing after it.
static void test_gpu_allocation() {
    for (const char *options :
         {"-b 2 -t 33", "--dtype fp32 -r block", "-r block:1 --moments bf16 -w none",
          "--grad-dtype fp32 -r qkv --logit-rows 7", "--offload moments,master",
          "--dtype fp16 -r mlp", "--dtype fp16 --offload weights,master",
          "-r block --offload weights,gradients,moments,master,residuals"}) {
        if (!sampled(strstr(options, "residuals"))) {
            continue;
        }
        Model m = shape("l3h2c48t40", 300);
        emu::peak_bytes = 0;
        Net n(m, options);
        auto on_device = [] {
            std::vector<size_t> sizes;
            for (const emu::Alloc &a : emu::allocs) {
                if (!a.host) {
                    sizes.push_back(a.n);
                }
            }
            return sizes;
        };
        const std::vector<size_t> one = {plan_bytes(&n.s)};
        expect(on_device() == one, "%s", options);
        const size_t pinned = emu::allocs.size() - 1;
        const int plans = matmul_library.plans;
        expect(((GpuNetwork<float, float> *)n.e.self)->accum_steps == 2,
               "the warm-up loads the products that add to gradients too");
        trace(&n, 2);
        Reals logits((size_t)m.V);
        Batch b(n.s.B * n.s.T, m.V, 1);
        n.e.logits(&n.e, logits.data(), b.inputs.data(), 3);
        n.e.forward_loss(&n.e, NULL, b.inputs.data(), b.targets.data());
        expect(matmul_library.plans == plans, "%s: %d products at first", options, plans);
        expect(on_device() == one && emu::peak_bytes == one[0] && emu::allocs.size() == pinned + 1,
               "%s: peak %zu of %zu", options, emu::peak_bytes, one[0]);
        expect(pinned == 1 && emu::pinned_bytes == n.plan.host_bytes,
               "%s: %zu pinned allocations, %zu bytes of %zu", options, pinned, emu::pinned_bytes,
               n.plan.host_bytes);
    }
}

// Random options: device and pinned memory to the byte as planned, through two steps; a device with
// one byte less refuses.
static void test_gpu_allocation_random() {
    const int count = full_or(24, 2000);
    for (int n = 0; n < count; n++) {
        const int NH = draw(1, 3), T = draw(1, 12);
        const Model m = shape(text("l%dh%dc%dt%d", draw(1, 4), NH, NH * 8 * draw(1, 3),
                                   T + draw(0, 3)).c_str(), draw(2, 300));
        static const char *const types[] = {"--dtype fp32", "--dtype bf16", "--moments bf16",
                                            "--moments bf16 -w none", "--grad-dtype fp32"};
        const int B = draw(1, 3), level = draw(0, RECOMPUTE_BLOCK), blocks = draw(1, m.L);
        static const char *const homes[] = {"none", "moments", "residuals,moments",
                                            "weights,gradients", "weights,residuals,gradients"};
        const Text rest = Text(",") + level_table[draw(0, RECOMPUTE_BLOCK)].name;
        const Text options = text("-b %d -t %d -r %s:%d%s %s --logit-rows %d --offload %s", B, T,
                                  level_table[level].name, blocks,
                                  blocks < m.L ? rest.c_str() : "", types[draw(0, 4)],
                                  draw(0, B * T), homes[draw(0, 4)]);
        emu::peak_bytes = 0;
        Net net(m, options);
        trace(&net, 2);
        expect(emu::peak_bytes == net.plan.device_bytes &&
                   emu::pinned_bytes == net.plan.host_bytes,
               "%s: %zu of %zu, %zu of %zu on the host", options.c_str(), emu::peak_bytes,
               net.plan.device_bytes, emu::pinned_bytes, net.plan.host_bytes);
        plan_refuse(&net.plan, plan_taken(&net.plan), emu::peak_bytes);
        if (n % 8 == 0) {  // each in a process of its own
            expect_death(plan_refuse(&net.plan, plan_taken(&net.plan), emu::peak_bytes - 1),
                         ": 1 B short");
        }
    }
    detail = text("%d random settings", count);
}

// The orders of streams that offloaded runs are tried in: copies as late and as early as they may
// come, and three that chance draws.
static const long stream_orders[] = {emu::LATE, emu::EARLY, 1, 2, 3};

// busy_trace with states in host memory in one of these orders; 0 is none of them.
static Reals offloaded(const Model &m, const Text &options, int accum_steps, long order) {
    emu::set.order = order;
    Net n(m, options);
    return busy_trace(&n, accum_steps);
}

// Every state alone and all together in host memory, at every order, against none: the same bits.
// With FULL=1 each level with one micro-step and with three.
static void test_gpu_offload() {
    int runs = 0;
    const bool all = is_full();
    for (int level : {0, 1}) {
        for (int accum_steps : {1, 3}) {
            // Of two blocks both stay from pass to pass, of four none that the next begins with.
            Model m = shape(accum_steps == 1 ? "l2h1c16t8" : "l4h1c16t8", 257);
            if (!all && (TEST_ASAN ? level + accum_steps < 4 : level == (accum_steps == 1))) {
                continue;
            }
            const Text options = text("-b 2 -t 7 -r %d", level);
            const Reals want = offloaded(m, options, accum_steps, 0);
            for (long order : stream_orders) {
                for (const char *homes : {"weights", "gradients", "moments", "master", "residuals",
                                          "weights,gradients,moments,master,residuals"}) {
                    if (!sampled(strlen(homes) > 20 && order < 2)) {
                        continue;
                    }
                    runs++;
                    const Reals got =
                        offloaded(m, options + " --offload " + homes, accum_steps, order);
                    expect(same_bits(got, want), "%s, %d micro-steps, %s%s", options.c_str(),
                           accum_steps, order_switches().c_str(), homes);
                }
            }
        }
    }
    emu::set.order = 0;
    detail = text("%d runs", runs);
}

// What lives in host memory is read behind the work that is queued, though a copy from host to host
// need not wait for it: here no other tensor is read before.
static void test_gpu_host_read() {
    const Model m = shape("l2h1c16t8", 257);
    const Batch b(14, m.V, 1);
    const int64_t count = tensor_size(&m, QKVW);
    Reals grads[2];
    for (int late = 0; late < 2; late++) {
        emu::set.order = late ? (long)emu::LATE : 0;
        Net n(m, "-b 2 -t 7 --offload gradients");
        n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
        grads[late].resize((size_t)count);
        n.e.read(&n.e, STATE_GRADS, tensor_offset(&m, QKVW, 0), grads[late].data(), count);
    }
    emu::set.order = 0;
    expect(same_bits(grads[0], grads[1]) && grads[0][0] != 0, "read too early");
}

// Settings drawn at random, of every type that states have: 12 of them, or 60 with FULL=1.
static void test_gpu_offload_mixed() {
    static const char *const names[] = {"weights", "gradients", "moments", "residuals", "master"};
    const int all = full_or(TEST_ASAN ? 4 : 12, 60);
    for (int n = 0; n < all; n++) {
        const int bf16s = draw(0, 3) > 0, split = bf16s && draw(0, 1), accum_steps = draw(1, 3);
        Model m = shape(text("l%dh1c%dt9", draw(1, 6), 8 * draw(1, 4)).c_str(), 257);
        Text homes, options = text("-b %d -t %d -r %s:%d", draw(1, 2), draw(1, 9),
                                   level_table[draw(0, RECOMPUTE_LEVELS - 1)].name, draw(0, m.L));
        options += bf16s ? split ? "" : " -w none" : " --dtype fp32";
        options += bf16s && draw(0, 1) ? " --moments bf16" : "";
        options += bf16s && draw(0, 1) ? " --grad-dtype fp32" : "";
        const int bits = draw(1, split ? 31 : 15);
        for (int k = 0; k < 5; k++) {
            homes += bits >> k & 1 ? (homes.empty() ? "" : ",") + Text(names[k]) : "";
        }
        const long order = stream_orders[draw(0, 4)];
        const Reals want = offloaded(m, options, accum_steps, 0);
        const Reals got = offloaded(m, options + " --offload " + homes, accum_steps, order);
        expect(same_bits(got, want), "L%d C%d %s, %d micro-steps, %s%s", m.L, m.C,
               options.c_str(), accum_steps, order_switches().c_str(), homes.c_str());
    }
    emu::set.order = 0;
    detail = text("%d settings", all);
}

// Which algorithm each product has after opening a run with the emulated library's three at `times`
// ms, as digits; is_timed: all of them are, or none. The first algorithm cannot write D beside C,
// so where that is asked the second is the default. Of the largest matrices' gradients not all
// elements are compared, but both ends.
static void expect_tuned(const char *options, int times, int chosen, int beside, bool is_timed) {
    emu::set.lt_times = times;
    Net n(shape("l1h1c96t8", 257), Text("-b 1 -t 8 ") + options);
    for (int i = 0; i < matmul_library.plans; i++) {
        const MatmulPlan &p = matmul_library.plan[i];
        expect(algorithm_of(p) == (p.key.beside ? beside : chosen), "%s, times %d, %s: %d", options,
               times, matmul_key_text(&p.key).s, algorithm_of(p));
    }
    const int plans = matmul_library.plans, timed = matmul_library.timed;
    expect(plans > 10 && timed == (is_timed ? plans : 0), "%s, times %d: %d of %d timed", options,
           times, timed, plans);
    Text choices = n.e.matmul;
    expect(n.e.take_matmul(&n.e, choices.c_str()) && choices == n.e.matmul, "its own choices");
    choices[0] ^= 1;
    expect(!n.e.take_matmul(&n.e, choices.c_str()), "another GPU's choices");
}

// The fastest of the table, if it agrees; the file's choice, when there is one; a checkpoint's.
static void test_gpu_tuning() {
    char here[PATH_BYTES];
    const Text cache = Text(getcwd(here, sizeof here)) + "/cache";
    setenv("XDG_CACHE_HOME", "/proc/none", 1);
    expect_tuned("--tune 1", 539, 1, 1, true);
    expect_tuned("--tune 1", 553, 2, 2, true);
    expect_tuned("--tune 1", 555, 0, 1, true);  // nothing is faster
    expect_tuned("", 539, 0, 1, false);
    for (long emu::Settings::*fault :
         {&emu::Settings::lt_wrong, &emu::Settings::lt_unstable, &emu::Settings::lt_tail}) {
        emu::set.*fault = 2;
        expect_tuned("--tune 1", 513, 2, 1 + (fault != &emu::Settings::lt_unstable), true);
        emu::set.*fault = 0;
    }
    setenv("XDG_CACHE_HOME", cache.c_str(), 1);
    expect_tuned("--tune 1", 539, 1, 1, true);
    expect_tuned("--tune 1", 593, 1, 1, false);                    // from the file
    expect_tuned("--tune 1 --workspace 1MiB", 593, 2, 2, true);    // another key
    expect_tuned("--tune 1 -r block", 593, 1, 1, false);
    setenv("XDG_CACHE_HOME", "/proc/none", 1);
    // Products of more elements than the noise has, timed one after the other without growing to
    // infinity; choices of which the last cannot be had, and choices by their place in a list, as
    // older checkpoints have them.
    emu::set.lt_times = 539;
    {
        Net large(shape("l1h1c96t8", 257), "-b 1 -t 8 --dtype fp32 --tune 1");
        const Text own = large.e.matmul;
        Text foreign = own, older = own;
        foreign.back() = foreign.back() == '0' ? '1' : '0';
        for (size_t at = 0; (at = older.find("=h", at)) != Text::npos; at++) {
            older.replace(at, 18, "=1");
        }
        for (int i = 0; i < matmul_library.plans; i++) {
            expect(algorithm_of(matmul_library.plan[i]) == 1, "%s", own.c_str());
        }
        for (const Text &other : {foreign, older}) {
            expect(!large.e.take_matmul(&large.e, other.c_str()) && own == large.e.matmul,
                   "%s: %s", other.c_str(), large.e.matmul);
        }
    }
    Model m = shape("l4h1c16t8", 257);
    Text kept;
    for (const char *homes : {"none", "weights,gradients,moments,master,residuals"}) {
        Trace traces[2];
        for (int tune : {1, 0}) {
            Net n(m, text("-b 1 -t 8 --tune %d --offload %s", tune, homes));
            traces[tune] = trace(&n, 1);
            expect((kept == n.e.matmul) == (tune && !kept.empty()), "--tune %d", tune);
            kept = tune ? n.e.matmul : kept.c_str();
            expect(n.e.take_matmul(&n.e, kept.c_str()) && kept == n.e.matmul, "a checkpoint's");
        }
        expect(traces[0].losses == traces[1].losses && traces[0].weights == traces[1].weights,
               "timing leaves nothing behind, --offload %s", homes);
    }
    Net wider(m, "-b 2 -t 8");
    expect(!wider.e.take_matmul(&wider.e, kept.c_str()), "choices for another batch");
}

// One product, timed: the gradient of a weight, whose sum over 20,000 rows hides in bf16 that a
// step of it is missing, so that every algorithm agrees with every other.
static void test_gpu_tuning_proof() {
    enum { MEMORY = 8 << 20 };
    setenv("XDG_CACHE_HOME", "/proc/none", 1);
    Device<char> workspace(1 << 20), memory(MEMORY);
    const int bf = device_lacks_bf16() ? CUDA_R_16F : CUDA_R_16BF;
    const MatmulKey dweight = {8, 16, 20000, 0, 1, 0, 0, 0, bf, bf};
    // None is right: one line, and nothing is chosen or kept. First, because after threads of
    // this process those of its children would wait for ever.
    const Outcome o = outcome(spawn([&] {
        emu::cuda_user = 0;
        emu::set.lt_times = 539;
        gpu_matmul_open(workspace.p, workspace.n);
        MatmulPlan *plan = matmul_plan_find(dweight);
        emu::set.lt_wrong = 9;
        matmul_tune(memory.p, memory.n, 0);
        exit(algorithm_of(*plan) != 0 || matmul_library.timed != 0);
    }));
    expect(o.status == 0 && o.err.find("the product 8x16x20000:01000:") != Text::npos &&
               std::count(o.err.begin(), o.err.end(), '\n') == 1, "%d: %s", o.status,
           o.err.c_str());
    const struct {
        int wrong, tail, times, chosen;
    } rows[] = {
        {0, 0, 539, 1},  // all are right: the fastest
        {0, 2, 539, 0},  // the fastest has lost a step, the others are no faster than the first
        {0, 2, 534, 2},  // the second best, although it is more than 1.3 times as slow
        {1, 2, 534, 2},  // the first is wrong: it is no reference
        {0, 1, 555, 1},  // nor is it with a step lost, though all agree with it
        {0, 1, 159, 1},  // however fast it is
    };
    int adds = 0;
    for (auto &row : rows) {
        emu::set.lt_wrong = row.wrong;
        emu::set.lt_tail = row.tail;
        emu::set.lt_times = row.times;
        gpu_matmul_open(workspace.p, workspace.n);
        MatmulKey key = dweight;
        key.adds = adds = !adds;
        MatmulPlan *plan = matmul_plan_find(key);
        matmul_tune(memory.p, memory.n, 0);
        expect(algorithm_of(*plan) == row.chosen && matmul_library.timed == 1,
               "wrong %d, tail %d, times %d, adds %d: %d", row.wrong, row.tail, row.times, adds,
               algorithm_of(*plan));
        gpu_matmul_close();
    }
    emu::set.lt_wrong = emu::set.lt_tail = 0;
    // What takes more than 1.3 times as long as the first runs twice, to be compared, and is not
    // timed. The first takes 12 launches: two for its proof, one as the sample, nine to be timed.
    for (int second : {6, 7}) {
        emu::set.lt_times = 509 + 10 * second;
        gpu_matmul_open(workspace.p, workspace.n);
        matmul_plan_find(dweight);
        const double before = emu::table_ms;
        matmul_tune(memory.p, memory.n, 0);
        const double want = 12 * 5 + (second == 6 ? 11 : 2) * second + 2 * 9;
        expect(emu::table_ms - before == want, "second %d ms: %g ms in all, not %g", second,
               emu::table_ms - before, want);
        gpu_matmul_close();
    }
}

// Of the file of choices a run takes what was found with its own GPU and library, the first of two,
// and what the library offers for the product; the rest is timed again, as is what an older program
// wrote there: places in the library's list.
static void test_gpu_tuning_file() {
    char here[PATH_BYTES];
    const Text cache = Text(getcwd(here, sizeof here)) + "/cache";
    const Text path = cache + "/train_gpt2/matmul";
    setenv("XDG_CACHE_HOME", cache.c_str(), 1);
    expect_tuned("--tune 1", 539, 1, 1, true);
    const Text lines = read_file(path);
    // The file with `was` made `is` and everything behind it, to the line's end, left out.
    auto with = [&](const Text &was, const Text &is, bool cut) {
        Text changed = lines;
        for (size_t at = 0; (at = changed.find(was, at)) != Text::npos; at += is.size()) {
            const size_t end = cut ? changed.find('\n', at) : at + was.size();
            changed.replace(at, end - at, is);
        }
        expect(changed != lines, "no %s in %s", was.c_str(), lines.c_str());
        return changed;
    };
    const Text library = text(" cuBLASLt %zu, ", cublasLtGetVersion());
    const Text gpu = text(" %ld SMs, ", emu::set.sms);
    for (const Text &other : {with("=h", "=1", true), with("=h", "=h0123456789abcdef", true),
                              with("=h", "=h01234567", true), with(library, " cuBLASLt 1, ", false),
                              with(gpu, " 99 SMs, ", false)}) {
        write_file(path, other);
        expect_tuned("--tune 1", 593, 2, 2, true);
    }
    unlink(path.c_str());
    expect_tuned("--tune 1", 553, 2, 2, true);
    write_file(path, lines + read_file(path));
    expect_tuned("--tune 1", 593, 1, 1, false);
    // The library's first algorithm cannot write D beside C, for those products alone.
    unlink(path.c_str());
    const long in_place = emu::set.lt_in_place;
    emu::set.lt_in_place = 0;
    expect_tuned("--tune 1", 555, 0, 0, true);
    emu::set.lt_in_place = in_place;
    emu::set.lt_times = 593;
    Net n(shape("l1h1c96t8", 257), "-b 1 -t 8 --tune 1");
    for (int i = 0; i < matmul_library.plans; i++) {
        const MatmulPlan &p = matmul_library.plan[i];
        expect(algorithm_of(p) == (p.key.beside ? 2 : 0), "%s: %d", matmul_key_text(&p.key).s,
               algorithm_of(p));
    }
}

// A row outside its life: refused by name; a kernel that keeps its address is stopped under ASan,
// and otherwise reads NaN. The gap behind a row is nobody's.
static void test_gpu_lifetimes() {
#ifdef _OPENMP
    omp_set_num_threads(1);  // as in test_arena
#endif
    Model m = shape("l2h2c16t8", 257);
    Net n(m, "-b 1 -t 8 -r block --dtype fp32");
    auto *net = (GpuNetwork<float, float> *)n.e.self;
    Plan *p = net->plan;
    plan_tick(p, 0);
    plan_tick(p, tick_head(&m));
    const Buffer &row = p->buffers[p->single[BUF_LOGITS]];
    float *logits = gpu_buffer<float>(net, BUF_LOGITS);
    Reals fresh(8);
    state_read(fresh.data(), {TYPE_FP32, (char *)logits, nullptr}, 8, net->stream);
    expect(isnan((double)fresh[0]) && isnan((double)fresh[7]), "fresh rows are NaN");
    auto launch_on = [&](float *x) {
        return outcome(spawn([&] {
            emu::cuda_user = 0;  // a GPU would not take it
            gpu_gelu_forward<float>(x, x, 8, net->stream);
            cuda_check(cudaStreamSynchronize(net->stream));
        }));
    };
    expect(launch_on(logits).status == 0, "alive");
    Outcome behind = launch_on(logits + row.bytes / 4);
    plan_tick(p, tick_update(&p->settings));
    expect_death(gpu_buffer<float>(net, BUF_LOGITS), "buffer logits lives from tick 18 to 18");
    Outcome dead = launch_on(logits);
    if (TEST_ASAN) {
        expect(dead.status == 86 && dead.err.find("use-after-poison") != Text::npos, "dead, %d",
               dead.status);
        expect(behind.status == 86, "behind the row, %d", behind.status);
    }
}
#endif

// Losses of every token against the oracle's, and their mean against the one that comes with them.
static void test_gpu_losses() {
    for (const char *options :
         {"-b 2 -t 33 --dtype fp32", "-b 2 -t 33 --dtype bf16", "-b 2 -t 33 --dtype fp16"}) {
        Model m = shape("l2h2c64t40", 300);
        Net n(m, options);
        Oracle oracle(&n, n.s.logit_rows);
        const size_t N = 2 * 33;
        Batch b((int)N, m.V, 1);
        Reals got(N), want(N);
        every_order(
            [&] {
                got.assign(N, NAN);
                double all = n.e.forward_loss(&n.e, got.data(), b.inputs.data(), b.targets.data());
                double other = n.e.forward_loss(&n.e, NULL, b.targets.data(), b.inputs.data());
                return Outputs{got, {(real)all, (real)other}};
            },
            options);
        double sum = 0;
        double mean = n.e.forward_loss(&n.e, got.data(), b.inputs.data(), b.targets.data());
        oracle.e.forward_loss(&oracle.e, want.data(), b.inputs.data(), b.targets.data());
        for (real loss : got) {
            sum += (double)loss;
        }
        expect_near((wide)mean, (wide)(sum / N), 1e-6 * mean, "mean, %s", options);
        expect(n.e.forward_loss(&n.e, NULL, &b.inputs[0], &b.targets[0]) == mean, "without them");
        // fp32 as the gradients' 1e-5; 16 bits round every logit.
        double tol = 1e-5;
        with_type(n.s.dtype, [&](auto element) { tol += 2 * traits<decltype(element)>.unit; });
        expect_near((wide)relative_error(got.data(), want.data(), (int64_t)N), 0, tol,
                    "losses, %s", options);
    }
}

// Logits after fewer than T tokens, as samples ask for them: those of the oracle, which computes no
// more than these tokens.
static void test_gpu_sampling() {
    Model m = shape("l2h2c32t20", 257);
    Net n(m, "-b 2 -t 17 --dtype fp32");
    Oracle oracle(&n, 34);
    Batch b(17, m.V, 1);
    for (int tokens : {1, 2, 8, 16, 17}) {
        Reals got((size_t)m.V), want((size_t)m.V);
        n.e.logits(&n.e, got.data(), b.inputs.data(), tokens);
        oracle.e.logits(&oracle.e, want.data(), b.inputs.data(), tokens);
        expect_near((wide)relative_error(got.data(), want.data(), m.V), 0, 1e-5, "%d tokens",
                    tokens);
    }
}

// Logits from a KV cache, beside the oracle's of the whole window: as near as the GPU's own of the
// whole window are, or in fp32 within 1e-5.
static void test_gpu_kv_cache() {
    const int pieces[] = {70, 1, 1, 3, 65, 24};
    for (const char *dtype : {"fp32", "bf16", "fp16"}) {
        if (!sampled(strcmp(dtype, "bf16") == 0)) {
            continue;
        }
        Model m = shape("l2h2c32t90", 257);
        Net oracle(m, 1, m.maxT);
        Batch b(m.maxT, m.V, 1);
        std::vector<Reals> got;
        auto walk = [&](std::function<void(int, int)> visit) {
            int first = 0;
            for (const int n : pieces) {
                first = n == 65 ? 1 : first;  // a second sample, behind one token of the first
                visit(first, n);
                first += n;
            }
        };
        {  // an engine at a time: products belong to the one that is open
            Net cached(m, Text("--generate --dtype ") + dtype);
            const int plans = matmul_library.plans;
            walk([&](int first, int n) {
                got.push_back(Reals((size_t)m.V));
                cached.e.extend(&cached.e, got.back().data(), &b.inputs[(size_t)first], first, n);
            });
            expect(matmul_library.plans == plans, "%s: %d products that the warm-up has not met",
                   dtype, matmul_library.plans - plans);
        }
        Net whole(m, Text("-b 1 --dtype ") + dtype);
        Reals want((size_t)m.V), other((size_t)m.V);
        size_t at = 0;
        walk([&](int first, int n) {
            whole.e.logits(&whole.e, other.data(), b.inputs.data(), first + n);
            oracle.e.logits(&oracle.e, want.data(), b.inputs.data(), first + n);
            const double error = relative_error(other.data(), want.data(), m.V);
            expect_near((wide)relative_error(got[at++].data(), want.data(), m.V), 0,
                        whole.s.dtype == TYPE_FP32 ? 1e-5 : 2 * error, "%s, %d tokens", dtype,
                        first + n);
        });
    }
}

// --skip-zscore: a norm above the limit changes nothing, on the device neither, and the next step
// is the one that a network without the outlier makes.
static void test_gpu_skip() {
    for (const char *options :
         {"-b 2 -t 9 --dtype fp32", "-b 2 -t 9", "-b 2 -t 9 -w none --moments bf16",
          "-b 2 -t 9 --dtype fp16"}) {
        Model m = shape("l2h2c32t9", 257);
        Batch b(18, m.V, 1);
        Options o;
        options_default(&o);
        auto step = [&](Net *net, double limit) {
            net->e.micro_step(&net->e, b.inputs.data(), b.targets.data(), 0, 1);
            return net->e.update(&net->e, &o, 1e-2, limit, 0);
        };
        auto states = [](Net *net) {
            return Outputs{net->state(STATE_WEIGHTS), net->state(STATE_M), net->state(STATE_V)};
        };
        StepResult free;
        Outputs stepped;
        {
            Net n(m, options);
            free = step(&n, HUGE_VAL);
            stepped = states(&n);
        }
        Net n(m, options);
        const Outputs start = states(&n);
        StepResult r = step(&n, 0.999 * free.norm);
        expect(r.skipped == 1 && r.norm == free.norm, "%s: norm %g, limit below", options, r.norm);
        expect(states(&n) == start, "%s: a skipped step changes nothing", options);
        r = step(&n, 1.001 * free.norm);
        expect(r.skipped == 0 && r.loss == free.loss, "%s: limit above", options);
        expect(states(&n) == stepped && stepped != start, "%s: the next step", options);
    }
}

// A loss scale too large for this batch falls, step by step, while weights and moments stay as they
// are; the first step without an overflow is that of a network that began with its scale. Then it
// grows after as many steps as it is told, of which one above the limit of norms counts, and a
// resumed network goes on counting.
static void test_gpu_overflow() {
    Model m = shape("l2h2c32t9", 257);
    Batch b(18, m.V, 1);
    Options o;
    options_default(&o);
    auto states = [](Net *net) {
        return Outputs{net->state(STATE_WEIGHTS), net->state(STATE_M), net->state(STATE_V)};
    };
    auto step = [&](Net *net, double limit) {
        net->e.micro_step(&net->e, b.inputs.data(), b.targets.data(), 0, 1);
        return net->e.update(&net->e, &o, 1e-2, limit, 0);
    };
    auto grow_after = [](Net *net, int steps) {
        auto *network = (GpuNetwork<__half, float> *)net->e.self;
        copy_wait(&gpu_buffer<GpuState>(network, BUF_STATE)->update.scale_grows, &steps,
                  sizeof steps, network->stream);
    };
    const Text options = "-b 2 -t 9 -r block --dtype fp16";
    Outputs stepped;
    StepResult r = {}, good;
    int falls = 0;
    {
        Net n(m, options);
        const Outputs start = states(&n);
        r = step(&n, 0);
        expect(r.skipped && r.scale_log2 == LOSS_SCALE_LOG2 && r.scale_steps == 1,
               "the warm-up's steps are counted: %d at 2^%d", r.scale_steps, r.scale_log2);
        n.e.scale_loss(&n.e, 30, 1234);
        for (r = step(&n, HUGE_VAL); r.skipped && falls < 30; r = step(&n, HUGE_VAL)) {
            falls++;
            expect(r.scale_log2 == 30 - falls && r.scale_steps == 0 && r.scale_moved == -1 &&
                       !isfinite(r.norm) && isfinite(r.loss), "scale 2^%d", r.scale_log2);
            expect(states(&n) == start, "an overflow changes nothing");
        }
        expect(falls > 3 && r.scale_log2 == 30 - falls && r.scale_steps == 1 && r.scale_moved == 0,
               "%d falls", falls);
        good = r;
        stepped = states(&n);
        expect(stepped != start);
        grow_after(&n, 3);
        r = step(&n, 0);
        expect(r.skipped && r.scale_steps == 2 && r.scale_moved == 0, "%d steps", r.scale_steps);
        n.e.scale_loss(&n.e, 4, 2);  // as a resume does
        grow_after(&n, 3);
        r = step(&n, HUGE_VAL);
        expect(!r.skipped && r.scale_log2 == 5 && r.scale_steps == 0 && r.scale_moved == 1,
               "2^%d after %d steps", r.scale_log2, r.scale_steps);
    }
    Net n(m, options);
    n.e.scale_loss(&n.e, 30 - falls, 0);
    r = step(&n, HUGE_VAL);
    expect(r.loss == good.loss && r.norm == good.norm && states(&n) == stepped, "from its scale");
    detail = text("from 2^30 to 2^%d", 30 - falls);
}

// Each update rounds with random numbers of its own, and so does each seed: the same first moments,
// stored in bf16 by update 0, by update 1 and by another seed's update 0.
static void test_gpu_rounding_updates() {
    need_bf16();
    Model m = shape("l1h1c16t9", 257);
    auto moments = [&](int64_t updates, int64_t seed) {
        Net n(m, "-b 2 -t 9 -w none --moments bf16");
        Batch b(18, m.V, 1);
        Options o;
        options_default(&o);
        o.seed = seed;
        n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
        n.e.update(&n.e, &o, 1e-2, HUGE_VAL, updates);
        return n.state(STATE_M);
    };
    const Reals first = moments(0, 1);
    expect(same_bits(first, moments(0, 1)), "again");
    for (const Reals &other : {moments(1, 1), moments(0, 2)}) {
        int64_t apart = 0, all = 0;
        for (size_t i = 0; i < first.size(); i++) {
            apart += first[i] != other[i];
            all += first[i] != 0;
        }
        expect(apart > all / 8, "%d of %d differ", (int)apart, (int)all);
    }
}

// Five micro-steps, so that each pinned slot is filled again and again: the same bits however late
// the stream runs, and the oracle's gradients.
static void test_gpu_micro_steps() {
    const int accum_steps = 5;
    Model m = shape("l1h1c16t9", 257);
    Outputs got = every_order(
        [&] {
            Net n(m, "-b 2 -t 9 --dtype fp32");
            Trace t = trace(&n, accum_steps);
            return Outputs{Reals(t.losses.begin(), t.losses.end()), t.gradients, t.weights};
        },
        "five micro-steps");
    Net n(m, "-b 2 -t 9 --dtype fp32");
    Oracle oracle(&n, 18);
    Trace want = trace(&oracle, accum_steps);
    expect_near((wide)relative_error(got[1].data(), want.gradients.data(), n.size()), 0, 1e-5,
                "gradients");
    for (size_t step = 0; step < 2; step++) {
        expect_near(got[0][step], (wide)want.losses[step], 1e-5 * want.losses[step],
                    "loss of step %zu", step);
    }
}

// -b 4 and -b 2 with two micro-steps: the same gradients and losses but for the order of sums, and
// the same loss of every token in a validation.
static void test_gpu_batches() {
    Model m = shape("l2h2c32t12", 257);
    const size_t N = 4 * 12;
    Batch b((int)N, m.V, 1);
    struct Whole {
        Reals losses, gradients;
        double mean;
        StepResult step;
    };
    auto run = [&](int batch) {
        Net n(m, text("-b %d -t 12 --dtype fp32", batch));
        Whole whole = {Reals(N), Reals(), 0, {}};
        Options o;
        options_default(&o);
        const int accum_steps = 4 / batch;
        for (size_t at = 0; at < N; at += N / (size_t)accum_steps) {
            whole.mean += n.e.forward_loss(&n.e, &whole.losses[at], &b.inputs[at], &b.targets[at]) /
                          accum_steps;
        }
        for (int k = 0; k < accum_steps; k++) {
            const size_t at = (size_t)k * N / (size_t)accum_steps;
            n.e.micro_step(&n.e, &b.inputs[at], &b.targets[at], k, accum_steps);
        }
        whole.gradients = n.gradients();
        whole.step = n.e.update(&n.e, &o, 1e-3, HUGE_VAL, 0);
        return whole;
    };
    const Whole want = run(4), got = run(2);
    auto near = [](const Reals &x, const Reals &y, const char *who) {
        expect_near((wide)relative_error(x.data(), y.data(), (int64_t)x.size()), 0, 1e-5, "%s",
                    who);
    };
    near(got.losses, want.losses, "losses of a validation");
    near(got.gradients, want.gradients, "gradients");
    expect_near((wide)got.mean, (wide)want.mean, 1e-6 * want.mean, "mean loss of a validation");
    expect_near((wide)got.step.loss, (wide)want.step.loss, 1e-6 * want.step.loss, "loss");
    expect_near((wide)got.step.norm, (wide)want.step.norm, 1e-5 * want.step.norm, "norm");
}

// The bytes of a state's buffer that belong to no tensor.
static std::vector<bool> gaps_of(const Plan *p, int id, size_t element_bytes) {
    const Model *m = &p->settings.model;
    std::vector<bool> gap(p->buffers[p->single[id]].bytes, true);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        const int set = tensor_is_matrix(tensor) ? MATRICES : VECTORS;
        if ((id == BUF_GRADS && set != MATRICES) || (id == BUF_GRADS_1D && set != VECTORS)) {
            continue;
        }
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            const int64_t at = id == BUF_GRADS || id == BUF_GRADS_1D
                                   ? subset_offset(m, tensor, l, set)
                                   : tensor_offset(m, tensor, l);
            auto from = gap.begin() + at * (int64_t)element_bytes;
            std::fill(from, from + tensor_size(m, tensor) * (int64_t)element_bytes, false);
        }
    }
    return gap;
}

// Where states are rounded at random, no two numbers share theirs: each stream's indices are apart.
static void expect_streams_apart(const ParamRange *ranges, int count, const char *options) {
    std::vector<std::array<size_t, 3>> drawn;  // stream, first index, end
    for (int i = 0; i < count; i++) {
        const ParamRange &range = ranges[i];
        for (uint32_t state : {0u, ROUND_MOMENT1, ROUND_MOMENT2}) {
            drawn.push_back({range.stream + state, range.index, range.index + range.count});
        }
    }
    std::sort(drawn.begin(), drawn.end());
    for (size_t i = 1; i < drawn.size(); i++) {
        expect(drawn[i][0] != drawn[i - 1][0] || drawn[i][1] >= drawn[i - 1][2],
               "%s: stream %zu from %zu", options, drawn[i][0], drawn[i][1]);
    }
}

template <class E, class G> static void check_gaps(const char *options) {
    Model m = shape("l2h1c40t9", 257);
    Batch b(18, m.V, 1);
    Options o;
    options_default(&o);
    Reals want_weights;
    StepResult want;
    {
        Net plain(m, options);
        plain.e.micro_step(&plain.e, b.inputs.data(), b.targets.data(), 0, 1);
        want = plain.e.update(&plain.e, &o, 1e-2, HUGE_VAL, 0);
        want_weights = plain.state(STATE_WEIGHTS);
    }
    Net n(m, options);
    auto *net = (GpuNetwork<E, G> *)n.e.self;
    const Plan *p = &n.plan;
    const size_t moment = type_bytes(n.s.moment_dtype);
    const struct {
        int id;
        size_t element_bytes;
    } states[] = {{BUF_WEIGHTS, sizeof(E)}, {BUF_MASTER, sizeof(Master<E>)}, {BUF_M, moment},
                {BUF_V, moment},          {BUF_GRADS, sizeof(G)},   {BUF_GRADS_1D, 4}};
    size_t gap_bytes = 0;
    std::vector<char> bytes;
    auto each_gap = [&](const std::function<void(char *, int)> &visit, bool write) {
        for (auto &state : states) {
            if (p->single[state.id] < 0) {
                continue;  // this run keeps no such state
            }
            char *device = gpu_buffer<char>(net, state.id);
            const std::vector<bool> gap = gaps_of(p, state.id, state.element_bytes);
            bytes.resize(gap.size());
            copy_wait(bytes.data(), device, gap.size(), net->stream);
            for (size_t i = 0; i < gap.size(); i++) {
                if (gap[i]) {
                    visit(&bytes[i], state.id);
                }
            }
            if (write) {
                copy_wait(device, bytes.data(), gap.size(), net->stream);
            }
        }
    };
    n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
    each_gap([&](char *x, int) { *x = (char)0xff, gap_bytes++; }, true);
    StepResult r = n.e.update(&n.e, &o, 1e-2, HUGE_VAL, 0);
    expect(gap_bytes > 1000, "%s: %zu bytes between tensors", options, gap_bytes);
    expect(r.norm == want.norm && isfinite(r.norm) && !r.skipped, "%s: norm %g", options, r.norm);
    const Reals got = n.state(STATE_WEIGHTS);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(&m, tensor); l++) {
            const int64_t at = tensor_offset(&m, tensor, l), size = tensor_size(&m, tensor);
            expect(memcmp(&got[(size_t)at], &want_weights[(size_t)at], (size_t)size * 4) == 0,
                   "%s: %s", options, tensor_table[tensor].name);
        }
    }
    each_gap([&](char *x, int id) { expect(*x == (char)0xff, "%s: buffer %d", options, id); },
             false);
    expect_streams_apart(net->ranges, net->range_count, options);
}

// Norm and AdamW walk over tensors, not over what lies between them: with NaN there the step is the
// same, and the NaN stay.
static void test_gpu_gaps() {
    check_gaps<float, float>("-b 2 -t 9 --dtype fp32");
    if (!device_lacks_bf16()) {
        check_gaps<bf16, bf16>("-b 2 -t 9");
        check_gaps<bf16, float>("-b 2 -t 9 -w none --moments bf16 --grad-dtype fp32");
    }
    check_gaps<__half, float>("-b 2 -t 9 --dtype fp16");
}
#endif

// -------------------------------------------------------------------------------------------------
// 13. The table
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
