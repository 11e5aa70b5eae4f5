// test_gpt2.cu -- every chapter of train_gpt2 checked.
//
// What it is: one program, one table of tests. A test runs in a process of its own, inside a folder
// of its own, and prints one line: what was compared at the worst place found, its error and the
// tolerance, how much of it was used, ok or FAILED. Naive twins of the fast code live here; they
// compute in a wider type and bring the tolerance of every element with them.
//
// What it refuses to be: tuned. A tolerance is an error model (sum_error, below) or stands beside
// the sentence that derives it, and is never loosened until a test passes. NaN fails everywhere.
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
//   9  The program
//  10  Model files
//  11  Kernels
//  12  The network on a GPU
//  13  The GPU program
//  14  The table

#define GPT2_NO_MAIN 1
#ifndef TEST_CUDA
#define TEST_CUDA 0
#endif
#if TEST_CUDA
#include "train_gpt2.cu"
#else
#include "train_gpt2.c"
#endif
#include <ftw.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <algorithm>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

// -------------------------------------------------------------------------------------------------
// 1. Harness
// The parent never computes: it forks a process for each test and counts exit statuses, so a crash
// or a hang (LIMIT_S) is one failed test. Inside a test, expect() and compare() record what does
// not hold; death tests and whole runs of the program fork again and look at what came out.

#if defined(__SANITIZE_ADDRESS__)
#define TEST_ASAN 1
#elif defined(__has_feature)
#define TEST_ASAN __has_feature(address_sanitizer)
#else
#define TEST_ASAN 0
#endif
#if TEST_ASAN
#include <sanitizer/asan_interface.h>
#endif

typedef std::string Text;
typedef std::vector<real> Reals;
#if GPT2_DOUBLE
typedef long double wide;  // of the naive twins
static const double unit = 0x1p-53, smallest = 0x1p-1022;
#else
typedef double wide;
static const double unit = 0x1p-24, smallest = 0x1p-126;  // of a rounding; normal number
#endif

enum { LIMIT_S = 300, SHOWN = 5, FAILED = 76, SKIPPED = 77 };
static Text root, scratch;  // where the repository is; the folder of all tests' folders
static int failures;        // of this test
static Text detail;         // what its line says
static struct {
    double err, tol, share;
    Text where;
} worst = {0, 0, -1, ""};

__attribute__((format(printf, 1, 2))) static Text text(const char *format, ...) {
    char out[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(out, sizeof out, format, args);
    va_end(args);
    return out;
}

// Prints the first SHOWN things of a test that do not hold; all of them count.
static void fail(int line, const Text &what) {
    if (failures++ < SHOWN) {
        printf("    test_gpt2.cu:%d: %s\n", line, what.c_str());
    }
}
#define expect(condition, ...)                                                                     \
    ((condition) ? (void)0 : fail(__LINE__, Text(#condition "  ") + text(" " __VA_ARGS__)))

// |got - want| <= tol. The nearest miss of the whole test goes into its line.
static void near_at(int line, wide got, wide want, double tol, const Text &where) {
    double err = got == want ? 0 : fabs((double)(got - want));
    double share = err == 0 ? 0 : err / tol;
    if (!(err <= tol)) {
        share = HUGE_VAL;
        fail(line, where + text("  got %.9g, want %.9g, tol %.1e", (double)got, (double)want, tol));
    }
    if (share > worst.share) {
        worst = {err, tol, share, where};
    }
}
#define expect_near(got, want, tol, ...) near_at(__LINE__, got, want, tol, text(__VA_ARGS__))

// Ends a test that cannot be run here.
__attribute__((noreturn)) static void skip(const char *why) {
    printf("(%s) ", why);
    exit(SKIPPED);
}

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
        uint64_t z = (seed * 0x2545F4914F6CDD1Du + i + 1) * 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        out[i] = (real)(((double)(z >> 11) * 0x1p-53 - 0.5) * 3.4641016 * scale);
    }
    return out;
}

// For nftw: removes a folder and all that is in it.
static int remove_one(const char *path, const struct stat *, int, struct FTW *) {
    return remove(path);
}

struct Outcome {
    int status;  // exit status, or 256 + the signal that ended it
    Text out, err;
};

// The whole file; empty when there is none.
static Text read_file(const Text &path) {
    Text all;
    char piece[4096];
    FILE *f = fopen(path.c_str(), "rb");
    for (size_t n; f && (n = fread(piece, 1, sizeof piece, f)) > 0;) {
        all.append(piece, n);
    }
    if (f) {
        fclose(f);
    }
    return all;
}

// The file holds `bytes` from now on, or the test ends.
static void write_file(const Text &path, const Text &bytes) {
    FILE *f = fopen(path.c_str(), "wb");
    if (!f || fwrite(bytes.data(), 1, bytes.size(), f) != bytes.size() || fclose(f) != 0) {
        die("cannot write %s: %s", path.c_str(), strerror(errno));
    }
}

static int exists(const Text &path) { return access(path.c_str(), F_OK) == 0; }

// Starts `action` in a child whose output goes to the files `stdout` and `stderr`.
static pid_t spawn(const std::function<void()> &action) {
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        failures = 0;
        if (!freopen("stdout", "w", stdout) || !freopen("stderr", "w", stderr)) {
            _exit(99);
        }
        alarm(LIMIT_S);
        action();
        exit(failures ? 1 : 0);
    }
    return pid;
}

// Waits for a child of spawn().
static Outcome outcome(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    status = WIFSIGNALED(status) ? 256 + WTERMSIG(status) : WEXITSTATUS(status);
    return {status, read_file("stdout"), read_file("stderr")};
}

typedef std::vector<Text> Words;
// "a b  c" -> a, b, (nothing), c: an empty word is an argument too.
static Words split(const char *arguments) {
    Words words;
    for (const char *a = arguments; *a;) {
        size_t n = strcspn(a, " ");
        words.push_back(Text(a, n));
        a += n + (a[n] == ' ');
    }
    return words;
}

// argv of a program; points into `words`.
static std::vector<char *> arguments_of(Words *words) {
    std::vector<char *> argv = {(char *)"train_gpt2"};
    for (Text &word : *words) {
        argv.push_back(&word[0]);
    }
    return argv;
}

// The whole program in a child of this process; `other` replaces train_gpt2_main's engine.
static pid_t start(const Text &arguments, const std::function<void()> &before = nullptr,
                   const Program *other = NULL) {
    return spawn([&] {
        Words words = split(arguments.c_str());
        std::vector<char *> argv = arguments_of(&words);
        if (before) {
            before();
        }
        exit(other ? program_main(other, (int)argv.size(), argv.data())
                   : train_gpt2_main((int)argv.size(), argv.data()));
    });
}

static Outcome program(const Text &arguments, const std::function<void()> &before = nullptr,
                       const Program *other = NULL) {
    return outcome(start(arguments, before, other));
}

// Ended in one line on stderr that holds `words`, status 1, and no sanitizer's report.
static void refused_at(int line, const Outcome &o, const char *words, const Text &who) {
    int one_line = !o.err.empty() && o.err.find('\n') == o.err.size() - 1;
    if (o.status != 1 || !one_line || o.err.find(words) == Text::npos) {
        fail(line,
             who + text(": status %d, wanted 1 and one line with '%s'; stderr: ", o.status, words) +
                 o.err.substr(0, 600));
    }
}
#define expect_refused(outcome, words, who) refused_at(__LINE__, outcome, words, who)
#define expect_death(action, words)                                                                \
    refused_at(__LINE__, outcome(spawn([&] { action; })), words, #action)

// Status 0 and a silent stderr.
static void expect_success_at(int line, const Outcome &o, const Text &who) {
    if (o.status != 0 || !o.err.empty()) {
        fail(line, who + text(": status %d, stderr: ", o.status) + o.err.substr(0, 600));
    }
}
#define expect_success(outcome, who) expect_success_at(__LINE__, outcome, who)

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
    Outcome help = program("--help");
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
                     (Text("--offload: '") + wrong + "' is not a list of none|moments|master")
                         .c_str());
    }
}

// -------------------------------------------------------------------------------------------------
// 3. Model and plan
// Volume I's chapter The model and its part Memory: sizes, lifetimes that never share bytes, one
// number that is the allocation, and the arena that catches whoever uses a row outside its life.

// The model that -e names, with V tokens.
static Model shape(const char *e, int V) {
    Model m;
    model_parse(&m, e);
    model_set_vocabulary(&m, V);
    return m;
}

// Parameters of the presets, and the layout of all three flat buffers: no hole, no overlap.
static void test_model_sizes() {
    // GPT-2's published parameter counts plus the padding of the vocabulary, 47 rows of C.
    static const struct {
        const char *name;
        int64_t parameters;
    } known[] = {{"d12", 124475904},
                 {"gpt2", 124475904},
                 {"d24", 354823168 + 47 * 1024},
                 {"d36", 774030080 + 47 * 1280},
                 {"d48", 1557611200 + 47 * 1600}};
    for (auto &k : known) {
        Model m = shape(k.name, GPT2_VOCABULARY);
        expect(model_parameters(&m) == k.parameters, "%s: %" PRId64, k.name, model_parameters(&m));
        expect(m.maxT == 1024 && m.Vp == 50304, "%s", k.name);
    }
    Model m = shape("l3h5c35t9", 257);
    for (int subset = ALL_TENSORS; subset <= VECTORS; subset++) {
        int64_t end = 0;  // of the tensor before, in the order of the buffer: each starts there
        for (int pass = 0; pass < 2 + m.L; pass++) {
            for (int i = 0; i < TENSORS; i++) {
                int layer = pass > 0 && pass <= m.L ? pass - 1 : 0;
                int turn = i < LN1W ? 0 : i > FCPROJB ? m.L + 1 : layer + 1;
                if (turn == pass && tensor_padded_size(&m, i, subset)) {
                    int64_t at = subset_offset(&m, i, layer, subset);
                    expect(at == end && at % TENSOR_ALIGN == 0, "tensor %d layer %d", i, layer);
                    end = at + round_up_i64(tensor_size(&m, i), TENSOR_ALIGN);
                }
            }
        }
        expect(subset_offset(&m, TENSORS, 0, subset) == end);
    }
    // 6 x parameters + 6 L C T, d12 at T 1024: 746,855,424 + 56,623,104.
    m = shape("d12", GPT2_VOCABULARY);
    expect(model_flops_per_token(&m, 1024) == 803478528.0);
}

static uint64_t draw_state = 1;
static int draw(int low, int high) {  // low..high
    uint32_t r[4];
    philox4x32(r, 5, draw_state++, 0, 0);
    return low + (int)(r[0] % (uint32_t)(high - low + 1));
}

// Settings of a CPU or GPU run, every field within its range.
static Settings draw_settings() {
    Settings s;
    memset(&s, 0, sizeof s);
    int NH = draw(1, 5), T = draw(1, 70);
    s.model = shape(text("l%dh%dc%dt%d", draw(1, 9), NH, NH * draw(1, 40), T + draw(0, 9)).c_str(),
                    draw(2, 3000));
    s.B = draw(1, 9);
    s.T = T;
    s.threads = draw(1, 8);
    s.logit_rows = draw(1, s.B * s.T);
    s.level = draw(0, RECOMPUTE_LEVELS - 1);
    s.recompute_blocks = draw(0, 1) ? s.model.L : draw(0, s.model.L);
    s.gpu = draw(0, 1);
    s.dtype = s.grad_dtype = s.moment_dtype = s.gpu ? TYPE_FP32 : TYPE_REAL;
    if (s.gpu) {
        s.dtype = draw(0, 1) ? TYPE_BF16 : draw(0, 1) ? TYPE_FP16 : TYPE_FP32;
        s.grad_dtype = s.dtype == TYPE_BF16 && draw(0, 1) ? TYPE_BF16 : TYPE_FP32;
        s.moment_dtype = draw(0, 1) ? TYPE_BF16 : TYPE_FP32;
        s.split_master = s.dtype == TYPE_BF16 && draw(0, 1);
        s.offload_moments = draw(0, 1);
        s.offload_master = (s.split_master || s.dtype == TYPE_FP16) && draw(0, 1);
    }
    return s;
}

// What a failure names.
static Text settings_text(const Settings &s) {
    return text("L%d NH%d C%d V%d B%d T%d logit rows %d level %d x %d gpu %d dtype %d threads %d",
                s.model.L, s.model.NH, s.model.C, s.model.V, s.B, s.T, s.logit_rows, s.level,
                s.recompute_blocks, s.gpu, (int)s.dtype, s.threads);
}

// Bytes that a row keeps from others.
static size_t padded(const Row &row) {
    return (row.bytes + PLAN_ALIGN - 1) / PLAN_ALIGN * PLAN_ALIGN + PLAN_GAP;
}

// No two rows share a byte at a tick, the total is where the last one ends, no layout could be
// below live_bytes, and the same settings give the same plan.
static void test_plan_layout() {
    for (int n = 0; n < 300; n++) {
        Settings s = draw_settings();
        Plan p, q;
        plan_build(&p, &s);
        plan_build(&q, &s);
        Text who = settings_text(s);
        expect(p.row_count == q.row_count && p.device_bytes == q.device_bytes &&
                   memcmp(p.rows, q.rows, sizeof(Row) * (size_t)p.row_count) == 0,
               "%s", who.c_str());
        size_t end[2] = {0, 0};
        std::vector<size_t> live((size_t)p.ticks);
        for (int i = 0; i < p.row_count; i++) {
            const Row &a = p.rows[i];
            end[a.host] = std::max(end[a.host], a.offset + padded(a));
            expect(a.offset % PLAN_ALIGN == 0 && a.first >= 0 && a.first <= a.last &&
                       a.last < p.ticks && a.count > 0,
                   "%s: %s", who.c_str(), a.name);
            for (int t = a.first; t <= a.last && !a.host; t++) {
                live[(size_t)t] += padded(a);
            }
            for (int j = 0; j < i; j++) {
                const Row &b = p.rows[j];
                int apart = a.host != b.host || a.last < b.first || b.last < a.first ||
                            a.offset + padded(a) <= b.offset || b.offset + padded(b) <= a.offset;
                expect(apart, "%s: %s and %s", who.c_str(), a.name, b.name);
            }
        }
        size_t most = *std::max_element(live.begin(), live.end());
        expect(end[0] == p.device_bytes && end[1] == p.host_bytes, "%s", who.c_str());
        expect(p.live_bytes == most && p.device_bytes >= most, "%s", who.c_str());
        plan_free(&p);
        plan_free(&q);
    }
    detail = "300 random settings";
}

// Asking for less never needs more: a higher level, more blocks of it, a smaller batch.
static void test_plan_monotone() {
    for (int n = 0; n < 200; n++) {
        Settings s = draw_settings();
        s.logit_rows = std::min(s.logit_rows, s.T);
        for (int what = 0; what < 3; what++) {
            Settings more = s;
            if (what == 0 && s.level + 1 < RECOMPUTE_LEVELS) {
                more.level++;
            } else if (what == 1 && s.recompute_blocks < s.model.L) {
                more.recompute_blocks++;
            } else if (what == 2 && s.B > 1) {
                more.B--;
            }
            expect(plan_bytes(&more) <= plan_bytes(&s), "%s, change %d: %zu to %zu",
                   settings_text(s).c_str(), what, plan_bytes(&s), plan_bytes(&more));
        }
    }
    detail = "200 random settings";
}

// Every tick has a name of its own and stands in order; every level keeps what it says.
static void test_stages() {
    Model m = shape("l3h1c8t4", 257);
    std::vector<Text> names;
    for (int t = 0; t <= tick_update(&m); t++) {
        char name[32];
        tick_name(name, &m, t);
        expect(std::find(names.begin(), names.end(), name) == names.end(), "%s comes twice", name);
        names.push_back(name);
    }
    // Channels kept per token and block at each level: what the levels are there for.
    static const int kept[RECOMPUTE_LEVELS] = {16, 12, 10, 6, 3, 1};
    for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
        int channels = 0;
        for (const ActRow &act : act_rows) {
            channels += level < act.level ? std::max(act.channels, 0) : 0;
        }
        expect(channels == kept[level], "%s keeps %d", level_names[level], channels);
    }
    // embed; 3 x 8; lnf, head, d_lnf; 3 x 15; d_embed, update.
    expect(names.size() == 1 + 24 + 3 + 45 + 2);
    expect(names[1] == "0.ln1" && names[24] == "2.fcproj" && names[28] == "2.re-ln1" &&
           names[72] == "0.d_ln1" && names[74] == "update");
}

// A network of random weights (biases and LayerNorms too), with an engine of its own.
struct Net {
    Engine e;
    Settings s;
    Net(const Model &m, int B, int T, int level = 0, int blocks = -1, int logit_rows = 0) {
        Options o;
        options_default(&o);
        o.batch = B;
        o.seq_len = T;
        o.logit_rows = logit_rows;
        settings_from_options(&s, &o, &m, 0);
        s.level = level;
        s.recompute_blocks = blocks < 0 ? m.L : blocks;
        cpu_open(&e, &s);
        give_weights(m);
    }
#if TEST_CUDA
    // The GPU's, with options as a user writes them.
    Net(const Model &m, const Text &options) {
        Options o;
        parse(&o, options.c_str());
        settings_from_options(&s, &o, &m, 1);
        gpu_engine_open(&e, &s);
        give_weights(m);
    }
#endif
    void give_weights(const Model &m) {
        engine_initialise(&e, &m, 3);
        for (int tensor = 0; tensor < TENSORS; tensor++) {
            for (int l = 0; l < tensor_copies(&m, tensor); l++) {
                size_t size =
                    (size_t)(tensor_rows(&m, tensor) * tensor_cols(&m, tensor));
                Reals w = noise(size, 0.15, (uint64_t)(tensor * 100 + l));
                for (real &x : w) {
                    x += (real)(tensor_table[tensor].init == INIT_ONE);
                }
                e.write(&e, STATE_WEIGHTS, tensor_offset(&m, tensor, l), w.data(), (int64_t)size);
            }
        }
    }
    Net(const Net &) = delete;
    ~Net() { e.close(&e); }
    Network *net() { return &((CpuEngine *)e.self)->net; }
    int64_t size() { return tensor_offset(&s.model, TENSORS, 0); }
    Reals state(int which) {
        Reals all((size_t)size());
        e.read(&e, which, 0, all.data(), size());
        return all;
    }
    Reals gradients() { return state(STATE_GRADS); }
};

// B x T tokens below V and the T that follow each.
struct Batch {
    std::vector<Token> inputs, targets;
    Batch(int n, int V, uint64_t seed) {
        for (int i = 0; i < n; i++) {
            inputs.push_back((Token)(rng_uniform(seed, 9, 0, (uint64_t)i) * V));
            targets.push_back((Token)(rng_uniform(seed, 9, 1, (uint64_t)i) * V));
        }
    }
};

#if TEST_ASAN
// What plan_tick does to memory in this build: dead rows, and the gaps behind rows, are out of
// bounds, and the sanitizer ends the test that touches them.
static void mark_for_asan(void *memory, size_t bytes, int alive) {
    ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
    memset(memory, 0xff, bytes);
    if (!alive) {
        ASAN_POISON_MEMORY_REGION(memory, bytes);
    }
}
#endif

// A row that is not alive is refused, a fresh one holds NaN; see also mark_for_asan.
static void test_arena() {
#ifdef _OPENMP
    omp_set_num_threads(1);  // the leak sanitizer of a forked child minds threads left behind
#endif
    Model m = shape("l2h2c26t8", 257);
    Net n(m, 1, 7, RECOMPUTE_BLOCK);
    Plan *p = &n.net()->plan;
    plan_tick(p, tick_update(&m));
    expect_death(network_single(n.net(), ROW_LOGITS),
                 "row logits lives from tick 18 to 18, used at");
    expect_death(network_grad(n.net(), GRAD_QKV, 1), "row 1.d_qkv lives from");
    expect_death(row_pointer(p, -1), "no such row");
    expect_death(row_pointer(p, p->row_count), "no such row");
    plan_tick(p, tick_head(&m));
    const Row &row = p->rows[p->single[ROW_LNF]];
    char *lnf = (char *)network_single(n.net(), ROW_LNF);
    const real *values = (const real *)lnf;
    expect(isnan((double)values[0]) && isnan((double)values[row.count - 1]), "fresh rows are NaN");
    for (const Row *r = p->rows; r < p->rows + p->row_count; r++) {
        expect(r->alive == (r->first <= p->now && p->now <= r->last), "%s", r->name);
    }
#if TEST_ASAN
    auto touch = [&](size_t byte) { *(volatile char *)(lnf + byte) = 0; };
    expect(outcome(spawn([&] { touch(row.bytes - 1); })).status == 0, "the last byte");
    for (size_t byte : {row.bytes, row.bytes + PLAN_GAP - 1}) {
        Outcome past = outcome(spawn([&] { touch(byte); }));
        expect(past.err.find("use-after-poison") != Text::npos, "behind the row");
    }
    plan_tick(p, tick_update(&m));
    Outcome dead = outcome(spawn([&] { touch(0); }));
    expect(dead.err.find("use-after-poison") != Text::npos, "a dead row");
#endif
}

// Pages of this process's address space (field 0 of /proc/self/statm).
static long address_pages() {
    long pages = 0;
    sscanf(read_file("/proc/self/statm").c_str(), "%ld", &pages);
    return pages;
}

// The mapping is the plan's number, and nothing is allocated once the first step is done.
static void test_plan_allocation() {
    static const int levels[] = {RECOMPUTE_NONE, RECOMPUTE_NORM, RECOMPUTE_BLOCK};
    for (int level : levels) {
        Model m = shape("l2h3c96t40", 300);
        Net n(m, 3, 40, level);
        Batch b(120, 300, 1);
        Options o;
        options_default(&o);
        n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
        n.e.update(&n.e, &o, 1e-3, HUGE_VAL, 0);
        Plan p;
        plan_build(&p, &n.s);
        long before = address_pages(), page = sysconf(_SC_PAGESIZE);
        plan_open(&p);
        long mapped = address_pages() - before;
        expect(mapped == ((long)p.device_bytes + page - 1) / page, "%ld pages", mapped);
        plan_close(&p);
        before = address_pages();
        for (int i = 0; i < 3; i++) {
            n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
            n.e.update(&n.e, &o, 1e-3, HUGE_VAL, 0);
        }
        expect(address_pages() == before, "grew by %ld pages", address_pages() - before);
    }
}

// What does not fit is refused before anything is allocated, with what would help.
static void test_plan_refuse() {
    Settings s = draw_settings();
    s.model = shape("l4h4c128t64", 257);
    s.B = 8;
    s.T = s.logit_rows = 64;
    s.level = s.gpu = 0;
    s.dtype = s.grad_dtype = s.moment_dtype = TYPE_REAL;
    s.split_master = s.offload_moments = s.offload_master = 0;
    Plan p;
    plan_build(&p, &s);
    plan_refuse(&p, p.device_bytes, p.device_bytes);
    expect_death(plan_refuse(&p, p.device_bytes, p.device_bytes - 1000), ": short 1000 B; -r gelu");
    expect_death(plan_refuse(&p, p.device_bytes, 0), "available are 0 B");
    Remedy list[MAX_REMEDIES];
    int n = plan_remedies(&p, list);
    expect(n == 8, "%d remedies: five levels, batches of 4, 2 and 1", n);
    for (int i = 0; i < n; i++) {
        expect(list[i].bytes < p.device_bytes && list[i].bytes == plan_bytes(&list[i].settings));
    }
    plan_free(&p);
}

// -------------------------------------------------------------------------------------------------
// 4. Data
// The appendix's chapter Tokenizer and Volume I's chapter Data. Shards here hold tokens that are
// all different, so a window is known by what is in it.

// A token file of these tokens.
static Text shard_bytes(const std::vector<uint16_t> &tokens, int tokenizer) {
    int32_t header[SHARD_HEADER] = {SHARD_MAGIC, 1, (int32_t)tokens.size(),
                                    tokenizer_vocabulary(tokenizer), tokenizer};
    return Text((const char *)header, sizeof header) +
           Text((const char *)tokens.data(), tokens.size() * 2);
}

// The same bytes with another int32 at `index` of the header.
static Text with_int(Text bytes, size_t index, int32_t value) {
    memcpy(&bytes[index * 4], &value, 4);
    return bytes;
}

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

// Every window once an epoch, whatever the number of ranks; targets follow inputs; the tokens that
// fill no window get their turn in other epochs.
static void test_loader_coverage() {
    enum { T = 8, WINDOWS = 12 + 8 + 24, TOKENS = 370 };
    Dataset d;
    write_three_shards();
    dataset_open(&d, "[abc].bin", T);
    expect(d.windows == WINDOWS && d.tokens == TOKENS && d.shard_count == 3);
    std::vector<int> met(TOKENS);
    std::vector<Token> orders[2];
    for (uint32_t epoch = 0; epoch < 60; epoch++) {
        std::vector<int> starts(TOKENS);
        for (int i = 0; i < WINDOWS;
             i++) {  // as ranks 0..3 with B 1 would ask: position by position
            Token in[T], out[T];
            dataset_batch(&d, (int64_t)epoch * WINDOWS + i, 1, 1, 42, in, out, GPT2_VOCABULARY);
            for (int t = 0; t < T; t++) {
                expect(in[t] == in[0] + t && out[t] == in[t] + 1);
                expect(starts[(size_t)in[t]]++ == 0, "token %d comes twice in epoch %u", in[t],
                       epoch);
                met[(size_t)in[t]] = met[(size_t)out[t]] = 1;
            }
            if (epoch < 2) {
                orders[epoch].push_back(in[0] / T);
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
    expect(orders[0] != orders[1], "every epoch has an order of its own");
    // Any grouping into batches gives the same sequences, also across the end of an epoch.
    Token in[8][T], out[8][T], one[T], next[T];
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        dataset_batch(&d, WINDOWS - 3, 8, shuffle, 42, in[0], out[0], GPT2_VOCABULARY);
        for (int b = 0; b < 8; b++) {
            dataset_batch(&d, WINDOWS - 3 + b, 1, shuffle, 42, one, next, GPT2_VOCABULARY);
            expect(memcmp(in[b], one, sizeof one) == 0 && memcmp(out[b], next, sizeof next) == 0);
        }
    }
    dataset_batch(&d, 12, 2, 0, 42, in[0], out[0], GPT2_VOCABULARY);
    expect(in[0][0] == 101 && in[1][0] == 109, "without shuffling, file order");
    expect_death(dataset_batch(&d, 12, 2, 0, 42, in[0], out[0], 105),
                 "b.bin: token 4 is 105, outside the vocabulary of 105");
    dataset_close(&d);
    detail = "3 shards, 60 epochs";
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
    if (ftruncate(fd, SHARD_HEADER * 4 + 2 * count) != 0 ||
        pwrite(fd, tail, sizeof tail, SHARD_HEADER * 4 + 2 * window * T) != (ssize_t)sizeof tail) {
        skip("this file system has no room for it");
    }
    close(fd);
    Dataset d;
    Token in[1000], out[1000];
    dataset_open(&d, "large.bin", (int)T);
    dataset_batch(&d, window, 1, 0, 0, in, out, GPT2_VOCABULARY);
    expect(d.windows == window + 1 && in[0] == 7 && in[999] == 1006 && out[999] == 1007);
    dataset_close(&d);
    unlink("large.bin");
}

// Bytes to ids and back, and what a prompt may be.
static void test_tokenizer() {
    Token tokens[8];
    char out[BPE_LONGEST];
    expect(prompt_tokens(tokens, 8, TOKENIZER_BYTES, NULL, "a\xff") == 2 && tokens[0] == 'a' &&
           tokens[1] == 255);
    expect(prompt_tokens(tokens, 8, TOKENIZER_BYTES, NULL, "") == 1 && tokens[0] == 256);
    expect(prompt_tokens(tokens, 8, TOKENIZER_GPT2, NULL, "") == 1 && tokens[0] == 50256);
    expect(token_text(out, TOKENIZER_BYTES, NULL, 'x') == 1 && out[0] == 'x');
    expect(token_text(out, TOKENIZER_BYTES, NULL, 256) == 0);
    expect(token_text(out, TOKENIZER_GPT2, NULL, 31) == 3 && memcmp(out, "31 ", 3) == 0);
    expect_death(prompt_tokens(tokens, 8, TOKENIZER_GPT2, NULL, "a"),
                 "--prompt: this data has GPT-2 tokens, and their vocabulary is missing");
    expect_death(prompt_tokens(tokens, 2, TOKENIZER_BYTES, NULL, "abc"),
                 "--prompt: 3 tokens, at most 2");
}

// A file of real data: below DATA_MIRROR (from where the tests were started), else in data/ under
// its last name. Empty: it is not here.
static Text real_data(const Text &name) {
    const char *mirror = getenv("DATA_MIRROR");
    Text folder = mirror && mirror[0] != '/' ? root + "/" + mirror : Text(mirror ? mirror : "");
    Text text = mirror ? read_file(folder + "/" + name) : "";
    return text.empty() ? read_file(root + "/data/" + name.substr(name.rfind('/') + 1)) : text;
}

// GPT-2's merges, or the end of the test.
static Text vocab_bpe() {
    Text text = real_data("gpt2/vocab.bpe");
    if (text.empty()) {
        skip("no vocab.bpe: DATA_MIRROR names the folder that has gpt2/vocab.bpe");
    }
    return text;
}

static Bpe bpe;  // GPT-2's, after open_bpe()
static void open_bpe() {
    Text text = vocab_bpe();
    bpe_parse_merges(&bpe, (const unsigned char *)text.data(), text.size(), "vocab.bpe");
}

// llm.c's file of the open vocabulary; token `other` has these bytes instead of its own.
static Text gpt2_tokenizer_bin(int other = -1, const Text &instead = "") {
    uint32_t header[256] = {20240328, 2, 50257, 50256};
    Text all((const char *)header, sizeof header);
    for (int i = 0; i < 50257; i++) {
        const char *bytes;
        int n = bpe_bytes(&bpe, i, &bytes);
        Text token = i == other ? instead : Text(bytes, (size_t)n);
        all += Text(1, (char)token.size()) + token;
    }
    return all;
}

typedef std::vector<uint16_t> Ids;
// Tokens of a text, by an encoder that knows no word yet, or by one that knows some.
static Ids encode(const Text &text, BpeEncoder *known = NULL) {
    BpeEncoder fresh, *e = known ? known : &fresh;
    Ids ids(text.size());
    if (!known) {
        bpe_encoder_open(&fresh, &bpe);
    }
    ids.resize((size_t)bpe_encode(e, text.data(), text.size(), ids.data()));
    if (!known) {
        bpe_encoder_close(&fresh);
    }
    return ids;
}

static Text decode(const Ids &ids) {
    Text all;
    for (uint16_t id : ids) {
        const char *bytes;
        int n = bpe_bytes(&bpe, id, &bytes);
        all.append(bytes, (size_t)n);
    }
    return all;
}

// Encodings that tiktoken 0.14.0 gives (dev/check_tiktoken.py compares far more), and
// tinyshakespeare's published counts.
static void test_bpe_known() {
    open_bpe();
    static const struct {
        Text text;
        Ids ids;
    } known[] = {
        {"", {}},
        {"Hello world", {15496, 995}},
        {"it's I'll THEY'RE we'd've", {270, 338, 314, 1183, 33302, 6, 2200, 356, 1549, 1053}},
        {"  two  spaces \n\n\t end  ", {220, 734, 220, 9029, 220, 628, 197, 886, 220, 220}},
        {"x=1234567890.5e-3;", {87, 28, 10163, 2231, 30924, 3829, 13, 20, 68, 12, 18, 26}},
        {"Gr\xc3\xb6\xc3\x9f" "e na\xc3\xafve \xce\x95\xce\xbb\xce\xbb\xce\xac\xce\xb4\xce\xb1",
         {8642, 9101, 39683, 68, 41492, 7377, 243, 39377, 39377, 138, 105, 138, 112, 17394}},
        {"\xe7\x92\x83\xe3\x80\x82\xef\xbc\x91\xef\xbc\x92",
         {163, 240, 225, 16764, 171, 120, 239, 171, 120, 240}},
        {"a\xe3\x80\x80\xe3\x80\x80" "b\xc2\xa0" "c\xe2\x80\xa8" "d",
         {64, 5099, 222, 5099, 222, 65, 1849, 66, 447, 101, 67}},
        {"\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa7 \xf0\x9f\x87\xa9\xf0\x9f\x87\xaa",
         {41840, 102, 447, 235, 41840, 100, 12520, 229, 102, 8582, 229, 103}},
        {"e\xcc\x81 \xc2\xbd \xe2\x85\xa7 \xc2\xb2", {68, 136, 223, 25208, 2343, 227, 100, 1587,
                                                      110}},
        {Text("\x00\x01 \x1f", 4), {188, 189, 220, 219}},
        {"<|endoftext|>", {27, 91, 437, 1659, 5239, 91, 29}},
        {" Antidisestablishmentarianism aaaaaaaaaa",
         {3738, 29207, 44390, 3699, 1042, 257, 24794, 24794, 64}},
    };
    BpeEncoder e;
    bpe_encoder_open(&e, &bpe);
    for (int again = 0; again < 2; again++) {    // the second time from the words seen before
        for (auto &row : known) {
            expect(encode(row.text, &e) == row.ids, "'%s'", row.text.c_str());
        }
    }
    bpe_encoder_close(&e);
    expect(decode({50256}) == "<|endoftext|>" && decode({220, 628}) == " \n\n");
    Text shakespeare = real_data("tinyshakespeare.txt");
    size_t cut = shakespeare.size() / 10 * 9 + shakespeare.size() % 10 * 9 / 10;
    if (!shakespeare.empty()) {
        size_t train = encode(shakespeare.substr(0, cut)).size();
        size_t val = encode(shakespeare.substr(cut)).size();
        expect(train == 301966 && val == 36059, "%zu + %zu tokens", train, val);
        detail = text("tinyshakespeare: %zu + %zu tokens", train, val);
    }
}

// Text of characters that meet badly: all kinds of spaces, what contractions are made of, letters,
// digits and signs of several lengths, and bytes that are no UTF-8.
static Text awkward_text(uint64_t seed, size_t count) {
    static const char *const parts[] = {
        " ", " ", " ", "  ", "\n", "\t", "\xe3\x80\x80", "\xc2\xa0", "\xe2\x80\x89", "\xc2\x85",
        "'", "'s", "'re", "'ll", "e", "the", "a", "aaaa", "ing", "Z", "\xc3\xa9", "\xe4\xb8\xad",
        "\xf0\x9f\x98\x80", "\xcc\x81", "1", "12", "\xd9\xa3", "!", "...", "==", "\xff", "\xe3",
        "\xe3\x80", "\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xc0\xaf"};
    enum { PARTS = sizeof parts / sizeof parts[0] };
    Text all;
    for (uint64_t i = 0; i < count; i++) {
        all += parts[(size_t)(rng_uniform(seed, RNG_SAMPLE, 0, i) * PARTS)];
    }
    return all;
}

// The tokens of one piece by the rule itself: look at all neighbours, merge the best, begin again.
static Ids naive_merge(const Text &piece) {
    std::vector<Text> parts;
    for (char c : piece) {
        parts.push_back(Text(1, c));
    }
    for (;;) {
        int best = -1;
        size_t at = 0;
        for (size_t i = 0; i + 1 < parts.size(); i++) {
            Text both = parts[i] + parts[i + 1];
            int id = bpe_id(&bpe, both.data(), both.size());
            if (id >= 0 && (best < 0 || id < best)) {
                best = id;
                at = i;
            }
        }
        if (best < 0) {
            break;
        }
        parts[at] += parts[at + 1];
        parts.erase(parts.begin() + (long)at + 1);
    }
    Ids ids;
    for (const Text &part : parts) {
        ids.push_back((uint16_t)bpe_id(&bpe, part.data(), part.size()));
    }
    return ids;
}

// Merging against its rule; what is encoded decodes to itself, whatever the bytes; a text may be
// cut where bpe_cut says; long pieces take no longer than they must.
static void test_bpe_rules() {
    open_bpe();
    int cuts = 0, pieces = 0;
    BpeEncoder e;
    bpe_encoder_open(&e, &bpe);
    for (uint64_t seed = 0; seed < 300; seed++) {
        Text piece, bytes;
        for (uint64_t i = 0; i < 1 + seed / 3; i++) {
            double u = rng_uniform(seed, RNG_SAMPLE, 1, i);
            piece += "etaoinshrdlu"[(int)(u * (2 + (double)(seed % 11)))];
            bytes += (char)(u * 1e6);
        }
        pieces += encode(piece) == naive_merge(piece);
        expect(encode(piece) == naive_merge(piece), "%s", piece.c_str());
        expect(decode(encode(bytes, &e)) == bytes, "random bytes, seed %d", (int)seed);
        Text whole = awkward_text(seed, 100);
        expect(decode(encode(whole, &e)) == whole, "awkward text, seed %d", (int)seed);
        for (size_t at; (at = bpe_cut(whole.data(), whole.size())) > 0; whole.resize(at), cuts++) {
            Ids left = encode(whole.substr(0, at), &e), right = encode(whole.substr(at), &e);
            left.insert(left.end(), right.begin(), right.end());
            expect(left == encode(whole, &e), "cut at %zu of awkward text, seed %d", at, (int)seed);
        }
    }
    expect(cuts > 1000 && bpe_cut("", 0) == 0 && bpe_cut("a", 1) == 0 && bpe_cut(" a", 2) == 0);
    expect(bpe_cut("a b c", 5) == 3 && bpe_cut("a b c", 3) == 1 && bpe_cut("a  ", 3) == 1);
    expect(bpe_cut("a\xe3\x80\x80 b", 6) == 0 && bpe_cut("\xe3\x80\x82 b", 5) == 3);
    enum { LONG = 1 << 20 };
    expect(encode(Text(LONG, 'a'), &e) == Ids(LONG / 4, 24794), "a million letters");
    expect(encode(Text(LONG, ' '), &e) == Ids(LONG, 220), "a million spaces");
    bpe_encoder_close(&e);
    detail = text("%d pieces, %d cuts", pieces, cuts);
}

// Both files of the vocabulary are read, and no other file is.
static void test_bpe_files() {
    open_bpe();
    static Bpe other;
    const Text merges = vocab_bpe(), tokens = gpt2_tokenizer_bin(), first = "#version: 0.2\n";
    write_file("good.bin", tokens);
    bpe_open(&other, "good.bin");
    expect(memcmp(&other, &bpe, sizeof bpe) == 0, "gpt2_tokenizer.bin gives another table");
    Text swapped = merges;    // two lines, each as long as the other
    std::swap(swapped[first.size() + 3], swapped[first.size() + 8]);
    const struct {
        Text bytes;
        const char *words;
    } table[] = {
        {"", "not a vocab.bpe"},
        {"#ver", "not a vocab.bpe"},
        {Text(2000000, '#'), "not a vocab.bpe"},
        {first, "not GPT-2's vocabulary: 257 tokens"},
        {first + "a b\na b\n", ":3: not a merge of two tokens from above to a new one"},
        {first + "\n", ":2: not a merge"},
        {first + "ab\n", ":2: not a merge"},
        {first + " a\n", ":2: not a merge"},
        {first + "a \n", ":2: not a merge"},
        {first + "a bc\n", ":2: not a merge"},
        {first + "a b c\n", ":2: not two tokens"},
        {first + "a \xff\n", ":2: not two tokens"},
        {first + "a b\r\n", ":2: not two tokens"},
        {first + "a " + Text(3000, 'b'), "not two tokens in GPT-2's alphabet for bytes, of 128"},
        {first + "a \xc5\x84\n", ":2: not two tokens"},
        {Text("a b\n") + merges.substr(first.size()), "not a vocab.bpe"},
        {swapped, "with fingerprint"},
        {merges.substr(0, merges.size() / 2), "not"},
        {merges + "Z Q\n", "not GPT-2's vocabulary: 50257 tokens with fingerprint"},
        {tokens.substr(0, 1023), "its header begins 0 0 0 0"},
        {with_int(tokens, 1, 1), "begins 20240328 1 50257 50256, that of GPT-2's vocabulary"},
        {with_int(tokens, 2, INT32_MAX), "begins 20240328 2 2147483647"},
        {with_int(tokens, 3, 0), "its header begins"},
        {tokens.substr(0, 1024), "token 0 is not one of GPT-2's: 0 bytes, of 0 left"},
        {tokens.substr(0, tokens.size() - 1), "token 50256 is not one"},
        {tokens.substr(0, 90000), "is not one of GPT-2's"},
        {tokens + "x", "1 bytes after the last token"},
        {gpt2_tokenizer_bin(1000, ""), "token 1000 is not one of GPT-2's: 0 bytes"},
        {gpt2_tokenizer_bin(1000, Text(129, 'q')), "token 1000 is not one of GPT-2's: 129"},
        {gpt2_tokenizer_bin(1000, "a"), "token 1000 is not one of GPT-2's: 1 bytes"},
        {gpt2_tokenizer_bin(1000, "qqzzq"), "not"},
    };
    for (auto &row : table) {
        write_file("bad", row.bytes);
        refused_at(__LINE__, outcome(spawn([] { bpe_open(&other, "bad"); })), row.words,
                   row.bytes.substr(0, 60));
    }
    expect_death(bpe_open(&other, "absent"), "cannot read vocabulary absent: No such file");
    expect_death(bpe_open(&other, "."), "cannot read vocabulary .: Is a directory");
    char path[PATH_BYTES];
    expect(!bpe_find(path, "") && bpe_find(path, "absent") && strcmp(path, "absent") == 0);
    mkdir("data", 0755);
    write_file("data/gpt2_tokenizer.bin", tokens);
    expect(bpe_find(path, "") && strcmp(path, "data/gpt2_tokenizer.bin") == 0);
    write_file("data/vocab.bpe", merges);
    expect(bpe_find(path, "") && strcmp(path, "data/vocab.bpe") == 0);
    detail = text("%zu bad files", sizeof table / sizeof table[0]);
}

// Prompts and samples of a model of GPT-2 tokens are text when the vocabulary is there.
static void test_bpe_samples() {
    open_bpe();
    Token tokens[8];
    char out[BPE_LONGEST];
    expect(prompt_tokens(tokens, 8, TOKENIZER_GPT2, &bpe, "Hello world") == 2 &&
           tokens[0] == 15496 && tokens[1] == 995);
    expect(prompt_tokens(tokens, 8, TOKENIZER_GPT2, &bpe, "") == 1 && tokens[0] == 50256);
    expect_death(prompt_tokens(tokens, 2, TOKENIZER_GPT2, &bpe, "a b c"),
                 "--prompt: 3 tokens, at most 2");
    expect(Text(out, (size_t)token_text(out, TOKENIZER_GPT2, &bpe, 995)) == " world");
    expect(Text(out, (size_t)token_text(out, TOKENIZER_GPT2, &bpe, 50256)) == "<|endoftext|>");
    write_file("gpt2.bin", shard_bytes(Ids(400, 995), TOKENIZER_GPT2));
    write_file("bytes.bin", shard_bytes(Ids(400, 99), TOKENIZER_BYTES));
    write_file("vocab", vocab_bpe());
    const Text run = "-i gpt2.bin -e l1h1c8t16 -b 1 -x 1 -s 1 -g 9 ";
    // The same sample as numbers and, where the vocabulary is there, as text.
    const Text before = "--- sample after step 1 ---\n", after = "\n---\n";
    Outcome o = program(run), p = program(run + "--tokenizer vocab");
    expect_success(o, "no vocabulary");
    expect_success(p, "--tokenizer vocab");
    Ids ids;
    std::istringstream numbers(o.out.substr(o.out.find(before) + before.size()));
    for (int id; numbers >> id; ids.push_back((uint16_t)id)) {
    }
    expect(ids.size() == 10 && ids[0] == 50256, "%zu tokens", ids.size());
    expect(p.out.find(before + decode(ids) + after) != Text::npos, "%s", p.out.c_str());
    o = program(run + "--tokenizer vocab --prompt=Hello,\xc3\xa9 -o out");
    expect_success(o, "--prompt");
    expect(o.out.find(before + "Hello,\xc3\xa9") != Text::npos, "%s", o.out.c_str());
    expect(read_file("out/log.jsonl").find("\"sample\":\"Hello,\xc3\xa9") != Text::npos);
    expect_refused(program(run + "--prompt=Hello"), "data/prepare.sh puts vocab.bpe", "--prompt");
    expect_refused(program(run + "--tokenizer absent"), "cannot read vocabulary absent", "absent");
    expect_refused(program(run + "--tokenizer vocab --prompt=1,2,3,4,5,6,7,8,9"),
                   "--prompt: 17 tokens, at most 16 fit", "long prompt");
    expect_refused(program("-i bytes.bin -e l2h2c16t16 --tokenizer vocab"),
                   "--tokenizer: bytes.bin has byte tokens", "bytes");
}

// A safetensors file of this header and `size` zeros.
static Text hostile_tensors(const Text &header, size_t size) {
    uint64_t length = header.size();
    return Text((const char *)&length, 8) + header + Text(size, 0);
}

// A state file of the model (1, 1, 1, 1, 1), whose tensors have 1,088 elements.
static Text hostile_state(const char *step) {
    return hostile_tensors(
        Text("{\"__metadata__\":{\"step\":\"") + step +
            "\",\"updates\":\"1\",\"position\":\"1\",\"skipped\":\"0\",\"norm_count\":\"1\"},"
            "\"norms\":{\"dtype\":\"F64\",\"shape\":[128],\"data_offsets\":[0,1024]},"
            "\"m\":{\"dtype\":\"BF16\",\"shape\":[1088],\"data_offsets\":[1024,3200]},"
            "\"v\":{\"dtype\":\"BF16\",\"shape\":[1088],\"data_offsets\":[3200,5376]}}",
        5376);
}

// Sends bytes through a parser, from a block that ends where they end.
static void parse_hostile(const Text &reader, const Text &text) {
    std::vector<unsigned char> block(1 + text.size());
    std::copy(text.begin(), text.end(), block.begin() + 1);
    const unsigned char *bytes = block.data() + 1;
    const size_t size = text.size();
    static Bpe bpe;
    Model m = {1, 1, 1, 1, 1, 128};
    std::vector<Span> spans(FILE_TENSORS);
    ManifestRow rows[FILE_MANIFEST];
    StateFile state;
    Safetensors f;
    FileTensor t;
    if (reader == "safetensors") {
        safetensors_start(&f, bytes, size, "x");
        while (safetensors_next(&f, &t)) {
        }
    } else if (reader == "weights") {
        safetensors_model(spans.data(), &m, bytes, size, "x");
    } else if (reader == "state") {
        state_parse(&state, &m, bytes, size, "x");
    } else if (reader == "config") {
        config_parse(&m, bytes, size, "x");
    } else if (reader == "llmc") {
        llmc_model(&m, bytes, size, "x");
    } else if (reader == "merges") {
        bpe_parse_merges(&bpe, bytes, size, "x");
    } else if (reader == "tokens") {
        bpe_parse_tokens(&bpe, bytes, size, "x");
    } else {
        const char *fault = manifest_parse(rows, bytes, size);
        if (fault) {
            die("x: manifest: %s", fault);
        }
    }
}

// Bytes that a stranger could have made, found by dev/fuzz or made to order: each ends its parser
// in one line, in the sanitizers' builds without a report.
static void test_fuzz_findings() {
    const Text deep(100000, '['), one = "{\"dtype\":\"U8\",\"shape\":";
    const int32_t llmc[256] = {LLMC_MAGIC, 3, INT32_MIN, INT32_MAX, 400, INT32_MIN, 65536, -128};
    const struct {
        const char *reader;
        Text bytes;
        const char *words;
    } table[] = {
        {"safetensors", "", "not a safetensors file"},
        {"safetensors", Text(8, (char)255), "not a safetensors file"},
        {"safetensors", hostile_tensors("{\"a\\n\\u001b[2J\":{\"dtype\":\"X\",\"shape\":[],"
                                        "\"data_offsets\":[0,0]}}", 0),
         "tensor a??[2J: an unknown dtype"},
        {"safetensors", hostile_tensors("{\"a\":" + deep, 0), "an object should begin"},
        {"safetensors", hostile_tensors("{\"__metadata__\":" + deep, 0), "deeper than 64"},
        {"safetensors", hostile_tensors("{\"a\":" + one + "[8388608,8388609]", 0),
         "more than 2^46"},
        {"safetensors", hostile_tensors("{\"a\":" + one + "[9007199254740993]", 0), "whole number"},
        {"safetensors", hostile_tensors("{\"a\":" + one + "[2],\"data_offsets\":[2,0]}}", 2),
         "outside the file"},
        {"safetensors", hostile_tensors("{\"a\":" + one + "[2],\"data_offsets\":[0,2]},\"b\":" +
                                        one + "[1],\"data_offsets\":[1,2]}}", 2),
         "overlap"},
        {"weights", hostile_tensors("{\"h.99999999999999999999.ln_1.bias\":" + one +
                                    "[0],\"data_offsets\":[0,0]}}", 0),
         "has none of this name"},
        {"state", hostile_state("99999999999999999999"), "not a count"},
        {"state", hostile_state("9007199254740993"), "not a count"},
        {"state", hostile_state("-1"), "not a count"},
        {"config", "", "an object should begin"},
        {"config", "{\"n_layer\":9007199254740993}", "not a whole number"},
        {"config", "{\"n_layer\":1,\"n_head\":1,\"n_embd\":1048576,\"n_positions\":1,"
                   "\"vocab_size\":1}", "1-65536 channels"},
        {"llmc", "", "not a model of llm.c"},
        {"llmc", Text((const char *)llmc, sizeof llmc), "a model of 400 layers"},
        {"manifest", "{\"files\":{\"config.json\":{\"bytes\":-1}}}", "damaged"},
        {"manifest", "{\"files\":" + deep, "damaged"},
        {"merges", "#version: 0.2\n" + Text(200, 'a'), "two tokens"},
        {"merges", "#version: 0.2\n" + deep, "two tokens"},
        {"tokens", Text(1024, 0), "its header begins 0"},
    };
    parse_hostile("state", hostile_state("9007199254740992"));
    for (const auto &row : table) {
        expect_death(parse_hostile(row.reader, row.bytes), row.words);
    }
    detail = text("%zu inputs", sizeof table / sizeof table[0]);
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
static void twin_encoder(Nums *out, Nums *dwte, Nums *dwpe, const std::vector<Token> &tokens,
                         const Reals &wte, const Reals &wpe, const Reals &dout, int T, int C) {
    for (int k = 0; k < (int)dout.size(); k++) {
        int w = tokens[k / C] * C + k % C, p = k / C % T * C + k % C;
        out->push_back(Num(wte[w]) + wpe[p]);
        (*dwte)[w] = (*dwte)[w] + dout[k];
        (*dwpe)[p] = (*dwpe)[p] + dout[k];
    }
}

// out is one rounding; backward adds up over equal tokens and over the batch.
static void test_encoder() {
    enum { B = 3, T = 7, C = 130, V = 11 };
    std::vector<Token> tokens = Batch(B * T, V, 1).inputs;
    Reals wte = noise(V * C, 1, 1), wpe = noise((T + 2) * C, 1, 2), out(B * T * C);
    Reals dout = noise(B * T * C, 1, 3), dwte = noise(V * C, 1, 4), dwpe = noise((T + 2) * C, 1, 5);
    Nums want, want_dwte = nums(dwte), want_dwpe = nums(dwpe);
    twin_encoder(&want, &want_dwte, &want_dwpe, tokens, wte, wpe, dout, T, C);
    encoder_forward(out.data(), tokens.data(), wte.data(), wpe.data(), B, T, C);
    encoder_backward(dwte.data(), dwpe.data(), dout.data(), tokens.data(), B, T, C);
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

// Losses and dlogits of rows of Vp logits, V of which count; `exp_of` says how e^x may be off.
static void twin_classifier(Nums *losses, Nums *dlogits, const Reals &logits,
                            const std::vector<Token> &targets, real dloss, int V, int Vp,
                            Num (*exp_of)(Num) = num_exp) {
    for (int i = 0; i < (int)targets.size(); i++) {
        const real *x = &logits[i * Vp], most = *std::max_element(x, x + V);
        auto p = [=](int v) { return exp_of(Num(x[v]) - most); };
        Num sum = sum_of(V, p), one = (wide)1;
        losses->push_back(num_log(sum) + most - x[targets[i]]);
        for (int v = 0; v < V; v++) {
            (*dlogits)[i * Vp + v] = (p(v) / sum - (v == targets[i] ? one : Num())) * dloss;
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
                slope([&] { return n.e.evaluate(&n.e, NULL, b.inputs.data(), b.targets.data()); },
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

// Two optimizer steps of `micros` micro-batches: every loss, the first step's gradients, the
// weights after both.
static Trace trace(Net *n, int micros) {
    const int N = n->s.B * n->s.T;
    Trace result;
    Options o;
    options_default(&o);
    o.weight_decay = 0.1;
    for (int step = 0; step < 2; step++) {
        Batch b(N * micros, n->s.model.V, (uint64_t)(5 + step));
        for (int k = 0; k < micros; k++) {
            n->e.micro_step(&n->e, &b.inputs[(size_t)(k * N)], &b.targets[(size_t)(k * N)], k,
                            micros);
        }
        if (step == 0) {
            result.gradients = n->gradients();
        }
        result.losses.push_back(n->e.update(&n->e, &o, 1e-2, HUGE_VAL, step).loss);
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
                       level_names[level], blocks);
            }
        }
    }
    detail = text("%d runs", runs);
}

// Losses, gradients, weights, and products large enough to be shared out, for 1 to 3 threads.
static void test_thread_bits() {
#ifdef _OPENMP
    Trace first[4];
    Reals products[3];
    const int N = 70, C = 1000, OC = 96;
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
            lse(2 * 4 * 70);
        matmul_forward(out.data(), inp.data(), weight.data(), NULL, NULL, N, C, OC);
        matmul_backward(dinp.data(), dweight.data(), dbias.data(), dout.data(), inp.data(),
                        weight.data(), N, C, OC);
        attention_forward(att.data(), lse.data(), qkv.data(), 2, 70, 64, 4);
        attention_backward(dqkv.data(), datt.data(), qkv.data(), att.data(), lse.data(), 2, 70, 64,
                           4);
        Reals all;
        for (Reals *part : {&out, &dinp, &dweight, &dbias, &att, &lse, &dqkv}) {
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
    static const int cuts[][3] = {{2, 2, 0}, {1, 4, 0}, {4, 1, 9}, {2, 2, 1}};  // B, micros, chunk
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

// A token changes nothing before it; evaluate, micro_step and logits tell the same loss; the padded
// rows of wte stay zero through training.
static void test_network_facts() {
    Model m = shape("l2h3c48t12", 200);
    const int T = 12;
    Net n(m, 1, T);
    Batch b(T, m.V, 1);
    double loss = n.e.evaluate(&n.e, NULL, b.inputs.data(), b.targets.data());
    const real *losses = network_single(n.net(), ROW_LOSSES);
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
    expect(n.e.update(&n.e, &o, 0, HUGE_VAL, 0).loss == loss, "evaluate and micro_step");
    for (int t = T - 1; t > 0; t--) {
        b.inputs[(size_t)t] = (b.inputs[(size_t)t] + 1) % m.V;
        n.e.evaluate(&n.e, NULL, b.inputs.data(), b.targets.data());
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
    real *g = network_single(n.net(), ROW_GRADS);
    const Reals start = n.state(STATE_WEIGHTS);
    Options o;
    options_default(&o);
    o.weight_decay = 0.5;
    int skipped = -1;
    memset(g, 0, (size_t)n.size() * sizeof(real));
    expect(network_update(n.net(), &o, 0.1, HUGE_VAL, 0, &skipped) == 0 && skipped == 0);
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
        g[n.size() - m.C] = (real)value;
        network_update(n.net(), &o, 0.1, 5, 0, &skipped);
        expect(skipped == 1 && same_bits(w, n.state(STATE_WEIGHTS)), "norm %g, limit 5", value);
    }
    Reals zero = n.state(STATE_M);
    expect(std::count(zero.begin(), zero.end(), (real)0) == n.size(),
           "moments after skipped steps");
    g[n.size() - m.C] = 0;
    g[0] = 3;
    g[1] = -4;  // norm 5, clip 1: m = 0.1 x 3 / 5 and -0.1 x 4 / 5
    expect(network_update(n.net(), &o, 0.1, HUGE_VAL, 0, &skipped) == 5 && !skipped);
    Reals moments = n.state(STATE_M);
    expect_near(moments[0], (wide)0.06, 0.06 * 8 * unit + 1e-17, "m, clipped");
    expect_near(moments[1], (wide)-0.08, 0.08 * 8 * unit + 1e-17, "m, clipped");
    Reals x = noise(200000, 1, 1);
    wide squares = 0;
    for (real value : x) {
        squares += (wide)value * value;
    }
    expect_near((wide)global_norm(x.data(), 200000), (wide)sqrt((double)squares),
                sqrt((double)squares) * 4 * sqrt(2e5) * 0x1p-53, "norm of 200,000");
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
                 {0.5, 1, 0, {0.01, 0.64, 0.04, 0.25, 0.09, 0.01}}};  // squares over 0.25 + ...
    for (auto &c : cases) {
        int counts[V] = {0};
        double sum = 0;
        for (int v = 0; v < V; v++) {
            sum += c.want[v];
        }
        for (int i = 0; i < DRAWS; i++) {
            counts[sample_token(logits, V, c.temperature, c.top_k, c.top_p, (i + 0.5) / DRAWS,
                                candidates)]++;
        }
        for (int v = 0; v < V; v++) {
            expect_near(counts[v], (wide)(c.want[v] / sum * DRAWS), c.want[v] == 0 ? 0 : 2,
                        "token %d, temperature %g top-k %d top-p %g", v, c.temperature, c.top_k,
                        c.top_p);
        }
    }
    real equal[V] = {1, 2, 2, 0, 2, 1};
    expect(sample_token(equal, V, 0, 0, 1, 0.9, candidates) == 1, "the first of equals");
}

// Past one JSON value; NULL when there is none.
static const char *json_skip(const char *p) {
    p += strspn(p, " \n");
    if (*p == '{' || *p == '[') {
        const char close = *p++ == '{' ? '}' : ']';
        for (int first = 1; *(p += strspn(p, " \n")) != close; first = 0) {
            if (!first && *p++ != ',') {
                return NULL;
            }
            if (close == '}' &&
                (*(p += strspn(p, " \n")) != '"' || !(p = json_skip(p)) || *p++ != ':')) {
                return NULL;
            }
            if (!(p = json_skip(p))) {
                return NULL;
            }
        }
        return p + 1;
    }
    if (*p == '"') {
        for (p++; *p != '"'; p++) {
            unsigned digits;
            int escape = *p == '\\';
            p += escape;
            if ((unsigned char)*p < 32 || (unsigned char)*p > 126 ||
                (escape && !strchr("\"\\nrtu", *p)) ||
                (escape && *p == 'u' && sscanf(p, "u%4x", &digits) != 1)) {
                return NULL;
            }
            p += escape && *p == 'u' ? 4 : 0;
        }
        return p + 1;
    }
    size_t number = strspn(p, "-+.eE0123456789");
    if (strncmp(p, "null", 4) == 0 || strncmp(p, "true", 4) == 0) {
        return p + 4;
    }
    char *end;
    strtod(p, &end);
    return number > 0 && end == p + number ? end : NULL;
}

// One JSON value and nothing else.
static int json_valid(const Text &line) {
    const char *end = json_skip(line.c_str());
    return end && end[strspn(end, " \n")] == 0;
}

// The steps that have a loss in a log whose every line is JSON.
static std::vector<int> log_steps(const Text &path) {
    Text all = read_file(path);
    std::vector<int> steps;
    expect(!all.empty() && all.back() == '\n', "%s ends in a whole line", path.c_str());
    for (size_t at = 0, end; (end = all.find('\n', at)) != Text::npos; at = end + 1) {
        Text line = all.substr(at, end - at);
        int step;
        expect(json_valid(line), "%s", line.substr(0, 300).c_str());
        if (line.find("\"loss\":") != Text::npos &&
            sscanf(line.c_str(), "{\"step\":%d,", &step) == 1) {
            steps.push_back(step);
        }
    }
    return steps;
}

// 1, 2, ... n.
static std::vector<int> one_to(int n) {
    std::vector<int> steps;
    for (int i = 1; i <= n; i++) {
        steps.push_back(i);
    }
    return steps;
}

// The checker itself, text of every byte, numbers that are none, and cutting back.
static void test_log() {
    expect(json_valid("{\"a\":[1,-2.5e3,\"x\\u00e9\\n\",{}],\"b\":null}") && json_valid("[]"));
    for (const char *bad :
         {"{\"a\":nan}", "{\"a\":1,}", "[1 2]", "{\"a\" 1}", "\"\n\"", "{", "inf", "[1]]"}) {
        expect(!json_valid(bad), "%s", bad);
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
}

typedef std::vector<int> Ints;
struct Question {
    int label;
    Ints context;
    std::vector<Ints> completions;
};

static Text words_bytes(const Ints &words) {
    std::vector<uint16_t> all(words.begin(), words.end());
    return Text((const char *)all.data(), all.size() * 2);
}

// An evaluation file of these questions.
static Text eval_bytes(const std::vector<Question> &questions) {
    Text body;
    size_t longest = 0;
    for (size_t i = 0; i < questions.size(); i++) {
        const Question &q = questions[i];
        Ints words = {EVAL_START, 0, (int)i, q.label, (int)q.completions.size()};
        std::vector<Ints> texts = {q.context};
        texts.insert(texts.end(), q.completions.begin(), q.completions.end());
        for (const Ints &tokens : texts) {
            words.push_back((int)tokens.size());
            words.insert(words.end(), tokens.begin(), tokens.end());
        }
        words[1] = 2 * (int)words.size();
        longest = std::max(longest, 2 * words.size());
        body += words_bytes(words);
    }
    int32_t header[EVAL_HEADER_BYTES / 4] = {EVAL_MAGIC, 1, (int32_t)questions.size(),
                                             (int32_t)longest};
    return Text((const char *)header, sizeof header) + body;
}

// Questions of random tokens below V; contexts of up to 9 tokens, four completions of up to 5.
static std::vector<Question> random_questions(int n, int V, uint64_t seed) {
    std::vector<Question> questions;
    uint64_t place = 0;
    auto pick = [&](int below) { return (int)(rng_uniform(seed, 9, 2, place++) * below); };
    auto tokens = [&](int count) {
        Ints out;
        for (int i = 0; i < count; i++) {
            out.push_back(pick(V));
        }
        return out;
    };
    for (int i = 0; i < n; i++) {
        Question q = {pick(4), tokens(1 + pick(9)), {}};
        for (int k = 0; k < 4; k++) {
            q.completions.push_back(tokens(1 + pick(5)));
        }
        questions.push_back(q);
    }
    return questions;
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
    run.engine = *e;
    run.inputs = batch.data();
    run.targets = batch.data() + B * T;
    eval_parse(&f, (const unsigned char *)bytes.data(), bytes.size(), "file", V);
    run_evaluate(&run, &f, &score);
    return score;
}

// An engine that has loss target / 1024, exactly, or 1e6 for targets that belong to no completion.
static int stub_tokens;
static double stub_evaluate(Engine *, real *losses, const Token *, const Token *targets) {
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
    stub.evaluate = stub_evaluate;
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
    size_t at = EVAL_HEADER_BYTES;
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

// Scores of a network, whose sums are worked out again from the logits of one row at a time; the
// same bits for any B; a network that has learnt the right completions by heart answers all.
static void test_eval_network() {
    const int T = 14, V = 257;
    Model m = shape("l2h3c48t14", V);
    std::vector<Question> questions = random_questions(9, V, 1);
    const Text bytes = eval_bytes(questions);
    int correct = 0, correct_norm = 0;
    double sum = 0, mean = 0;
    Net one(m, 1, T);
    for (const Question &q : questions) {
        int by_sum = -1, by_mean = -1;
        double least = 0, least_mean = 0;
        for (size_t k = 0; k < q.completions.size(); k++) {
            std::vector<Token> tokens(q.context.begin(), q.context.end());
            double loss = 0, count = (double)q.completions[k].size();
            for (int token : q.completions[k]) {
                Reals logits((size_t)V);
                one.e.logits(&one.e, logits.data(), tokens.data(), (int)tokens.size());
                double most = (double)*std::max_element(logits.begin(), logits.end()), all = 0;
                for (real logit : logits) {
                    all += exp((double)logit - most);
                }
                loss += log(all) + most - (double)logits[(size_t)token];
                tokens.push_back(token);
            }
            if (by_sum < 0 || loss < least) {
                least = loss;
                by_sum = (int)k;
            }
            if (by_mean < 0 || loss / count < least_mean) {
                least_mean = loss / count;
                by_mean = (int)k;
            }
        }
        correct += by_sum == q.label;
        correct_norm += by_mean == q.label;
        sum = least;
        mean = least_mean;
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
    questions.resize(4);
    Net n(m, 4, T);
    EvalFile f;
    EvalExample x;
    std::vector<Token> inputs(4 * T), targets(4 * T);
    Options o;
    options_default(&o);
    size_t at = EVAL_HEADER_BYTES;
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

// The parser on exactly these bytes, at an odd address: status and stderr.
static Outcome eval_parsed(const Text &bytes) {
    return outcome(spawn([&] {
        std::vector<unsigned char> all(bytes.size() + 1);
        memcpy(all.data() + 1, bytes.data(), bytes.size());
        EvalFile f;
        eval_parse(&f, all.data() + 1, bytes.size(), "x.bin", 50257);
    }));
}

// Files with any one field wrong, cut anywhere, or with flipped bits: parsed, or refused in a line.
static void test_eval_hostile() {
    const Text good = eval_bytes({{3, {11, 12}, {{1}, {2, 3}, {4}, {5}}}, {0, {1}, {{1}, {2}}}});
    const size_t body = EVAL_HEADER_BYTES, second = body + 2 * 17;
    auto with_word = [&](size_t at, int word) {
        Text bad = good;
        bad.replace(at, 2, words_bytes({word}));
        return bad;
    };
    const struct {
        Text bytes;
        const char *words;
    } table[] = {
        {"", "x.bin: 0 bytes are too few for an evaluation file"},
        {with_int(good, 0, 20240520), "it starts with 20240520 and 1, not with 20240522 and 1"},
        {with_int(good, 1, 2), "it starts with 20240522 and 2"},
        {with_int(good, 2, 0), "counts 0 examples of at most 34 bytes; allowed are 1 to 65535"},
        {with_int(good, 2, -1), "counts -1 examples"},
        {with_int(good, 2, 65536), "counts 65536 examples"},
        {with_int(good, 2, 1), "22 bytes follow the last of its 1 examples"},
        {with_int(good, 2, 3), "example 2: the file ends before it"},
        {with_int(good, 3, 0), "of at most 0 bytes"},
        {with_int(good, 3, 65536), "of at most 65536 bytes"},
        {with_int(good, 3, 33), "example 0: of 34 bytes, where the file has 56 more and the header "
                                "allows 33"},
        {with_word(body, 65534), "example 0: begins with 65534 and index 0; 65535 and 0 are due"},
        {with_word(body + 2, 33), "example 0: text 4 (0 is the context) has 1 tokens"},
        {with_word(body + 2, 35), "example 0: of 35 bytes"},
        {with_word(body + 2, 6), "example 0: text 0 (0 is the context) has 0 tokens"},
        {with_word(body + 2, 0), "example 0: text 0 (0 is the context) has 0 tokens"},
        {with_word(body + 4, 1), "begins with 65535 and index 1; 65535 and 0 are due"},
        {with_word(body + 6, 4), "example 0: label 4 of 4 completions"},
        {with_word(body + 8, 1), "label 3 of 1 completions; allowed are 2 to 8"},
        {with_word(body + 8, 9), "label 3 of 9 completions"},
        {with_word(body + 8, 5), "example 0: text 5 (0 is the context) has 0 tokens"},
        {with_word(body + 10, 0), "text 0 (0 is the context) has 0 tokens"},
        {with_word(body + 10, 12), "leave room for 11"},
        {with_word(body + 10, 65535), "text 0 (0 is the context) has 65535 tokens"},
        {with_word(body + 12, 50257), "token 50257 is outside the model's vocabulary of 50257"},
        {with_word(body + 32, 50257), "example 0: token 50257"},
        {with_word(body + 26, 0), "example 0: text 3 (0 is the context) has 0 tokens"},
        {with_word(second, 1), "example 1: begins with 1 and index 1; 65535 and 1 are due"},
        {with_word(second + 2, 24), "example 1: of 24 bytes, where the file has 22"},
        {with_word(second + 2, 24) + "ab", "example 1: 24 bytes, of which its tokens fill 22"},
        {with_word(second + 6, 2), "example 1: label 2 of 2 completions"},
        {good + "x", "1 bytes follow the last of its 2 examples"},
        {good + good.substr(second), "22 bytes follow"},
    };
    expect(good.size() == second + 22);
    expect_success(eval_parsed(good), "the file itself");
    for (auto &row : table) {
        expect_refused(eval_parsed(row.bytes), row.words, row.words);
    }
    for (size_t n = 1; n < good.size(); n += n < body - 1 ? 93 : 1) {
        expect_refused(eval_parsed(good.substr(0, n)), "x.bin: ", text("cut to %zu bytes", n));
    }
    for (size_t bit = 0; bit < 8 * (good.size() - body); bit += TEST_ASAN ? 7 : 1) {
        Text bad = good;
        bad[body + bit / 8] = (char)(bad[body + bit / 8] ^ 1 << bit % 8);
        Outcome o = eval_parsed(bad);
        if (o.status != 0) {
            expect_refused(o, "x.bin: example ", text("bit %zu flipped", bit));
        }
    }
    detail = text("%zu wrong fields, every length, every bit", sizeof table / sizeof table[0]);
}

// -------------------------------------------------------------------------------------------------
// 9. The program
// train_gpt2_main() as a user runs it, in children of the test: what it refuses, what it writes,
// and that no interruption, kill or full disk changes what it learns or leaves half a checkpoint.

// train.bin and val.bin: byte tokens of a text with some pattern to learn.
static void write_corpus() {
    std::vector<uint16_t> tokens;
    for (int i = 0; i < 3000; i++) {
        tokens.push_back((uint16_t)(i % 50 == 0 ? 256 : 97 + (i * i / 7 + i % 11) % 20));
    }
    write_file("train.bin", shard_bytes(tokens, TOKENIZER_BYTES));
    tokens.resize(400);
    write_file("val.bin", shard_bytes(tokens, TOKENIZER_BYTES));
}

struct Refusal {
    const char *arguments, *words;
};

// One line that names the option, what was found and what is allowed; nothing is trained.
static void test_bad_options() {
    static const Refusal table[] = {
        {"--nonsense 1", "unknown option '--nonsense'"},
        {"stray", "unknown option 'stray'"},
        {"-", "unknown option '-'"},
        {"-b4", "unknown option '-b4'"},
        {"--", "unknown option '--'"},
        {"-b", "--batch needs a value"},
        {"-b 4 --batch=4", "--batch is given twice"},
        {"--help=1", "--help takes no value"},
        {"--json", "--json needs --plan or --eval"},
        {"--eval x.bin --plan", "--eval is a command of its own"},
        {"--eval x.bin -o out", "leave --output (-o) out"},
        {"--eval x.bin -y 1", "needs --output (-o)"},
        {"--eval missing.bin", "--eval: cannot open missing.bin: No such file"},
        {"--eval=", "--eval: cannot open : No such file"},
        {"--eval .", "--eval: cannot open .: Is a directory"},
        {"--eval train.bin", "train.bin: not an evaluation file"},
        {"--gpu t4", "need --plan"},
        {"--gpu-mem 16GiB", "need --plan"},
        {"-y 1", "needs --output (-o)"},
        {"-n 5", "--save-every (-n) 5 needs --output"},
        {"-j val.bin", "needs --train-data (-i)"},
        {"--plan --gpu t5", "--gpu: 't5' is not one of t4"},
        {"--plan --gpu-mem 5XB", "--gpu-mem: '5XB' is not a size"},
        {"-i train.bin -e d13", "--model (-e): 'd13'"},
        {"-i train.bin -e l2h3c16t8", "--model (-e): 'l2h3c16t8': allowed are"},
        {"-i train.bin -e l0h1c16t8", "allowed are"},
        {"-i train.bin -e l2h2c16t0", "allowed are"},
        {"-i train.bin -e l2h0c16t8", "allowed are"},
        {"-i train.bin -e l2h2c16t16x", "neither"},
        {"-i train.bin -e l2h2c-16t16", "allowed are"},
        {"-i train.bin -e l2h2c99999t1", "allowed are"},
        {"-i train.bin -e l2h2c16t16 -t 17", "--seq-len (-t): 17 is more than the model's 16"},
        {"-i train.bin -e l2h2c16t16 -r 2", "'gelu' recomputes GELU, 'norm' also"},
        {"-i train.bin -e l2h2c16t16 -r half", "--recompute (-r): 'half'"},
        {"-i train.bin -e l2h2c16t16 -r block:3", "K from 0 to 2"},
        {"-i train.bin -e l2h2c16t16 -r block:-1", "K from 0 to 2"},
        {"-i train.bin -e l2h2c16t16 -r block:", "K from 0 to 2"},
        {"-i train.bin -e l2h2c16t16 -r block:1x", "K from 0 to 2"},
        {"-i train.bin -e l2h2c16t16 -b 2 --logit-rows 33", "--logit-rows: 33 is more than"},
        {"-i train.bin -e l2h2c16t16 -b 2 -d 33", "(-d): 33 is not a multiple of B x T = 2 x 16"},
        {"-i train.bin -e l2h2c16t16 -x 10 -u 11", "--warmup (-u): 11"},
        {"-i train.bin -e l2h2c16t16 --dtype bf16", "--dtype"},
        {"-i train.bin -e l2h2c16t16 --moments bf16", "--moments"},
        {"-i train.bin -e l2h2c16t16 --offload moments", "--offload"},
        {"-i train.bin -e l2h2c16t16 --grad-dtype bf16", "--grad-dtype bf16 needs --dtype bf16"},
        {"--plan --gpu t4 -e d12 --dtype bf16", "t4 has no bf16"},
        {"--plan --gpu a100 -e d12 -w 0 --offload master", "--offload master"},
        {"-i train.bin -e l2h2c16t16 -x 3 -s 1 --prompt 12345678901234567", "at most 16 fit"},
        {"-e l2h2c16t16", "no data: 'make data'"},
    };
    write_corpus();
    for (const Refusal &row : table) {
        expect_refused(program(row.arguments), row.words, row.arguments);
    }
    detail = text("%zu command lines", sizeof table / sizeof table[0]);
}

// One line that names the file; no checkpoint is left.
static void test_bad_data() {
    write_corpus();
    const Text good = read_file("train.bin");
    std::vector<uint16_t> short_tokens(16, 7), outside(400, 7);
    outside[300] = 257;
    write_file("empty.bin", "");
    write_file("header.bin", good.substr(0, 1000));
    write_file("cut.bin", good.substr(0, 2001));
    write_file("long.bin", good + "x");
    write_file("magic.bin", with_int(good, 0, 20240521));
    write_file("version.bin", with_int(good, 1, 2));
    write_file("negative.bin", with_int(good, 2, -1));
    write_file("words.bin", with_int(good, 3, 258));
    write_file("kind.bin", with_int(good, 4, 7));
    write_file("none.bin", shard_bytes({}, TOKENIZER_BYTES));
    write_file("short.bin", shard_bytes(short_tokens, TOKENIZER_BYTES));
    write_file("outside.bin", shard_bytes(outside, TOKENIZER_BYTES));
    write_file("gpt2.bin", shard_bytes(outside, TOKENIZER_GPT2));
    mkdir("folder.bin", 0755);
    static const Refusal table[] = {
        {"-i missing.bin", "no token file matches missing.bin"},
        {"-i empty.bin", "empty.bin: 0 bytes are too few"},
        {"-i header.bin", "header.bin: 1000 bytes are too few"},
        {"-i folder.bin", "folder.bin"},
        {"-i cut.bin",
         "cut.bin: the header counts 3000 tokens, which makes 7024 bytes; the file has"},
        {"-i long.bin", "long.bin: the header counts"},
        {"-i magic.bin", "magic.bin: not a token file: it starts with 20240521"},
        {"-i version.bin", "version.bin: token file version 2"},
        {"-i negative.bin", "negative.bin: the header counts -1"},
        {"-i words.bin", "words.bin: a vocabulary of 258"},
        {"-i kind.bin", "kind.bin: tokenizer 7"},
        {"-i none.bin", "none.bin: 0 tokens are fewer than one sequence: T + 1 = 17"},
        {"-i short.bin", "short.bin: 16 tokens are fewer than one sequence: T + 1 = 17"},
        {"-i outside.bin", "outside.bin: token 300 is 257, outside the vocabulary of 257"},
        {"-i [tg]*.bin", "its tokens are"},
        {"-i train.bin -j gpt2.bin", "gpt2.bin"},
        {"-i train.bin -j missing.bin", "no token file matches missing.bin"},
        {"-i train.bin -j short.bin", "short.bin: 16 tokens"},
        {"-i train.bin -b 200", "a step takes 200 sequences of 16 tokens; train.bin has 187"},
        {"-i train.bin -d 3200 -b 2", "a step takes 200 sequences"},
        {"-i train.bin -j val.bin -b 30", "val.bin: 24 sequences of 16 tokens are fewer"},
    };
    for (const Refusal &row : table) {
        expect_refused(program(Text("-e l2h2c16t16 -o out ") + row.arguments), row.words,
                       row.arguments);
        expect(!exists("out/step-00000000"), "%s left a checkpoint", row.arguments);
    }
    detail = text("%zu files and sizes", sizeof table / sizeof table[0]);
}

// Names in `folder` that begin with `prefix`, sorted, in one string.
static Text names_in(const char *folder, const char *prefix) {
    glob_t found;
    Text all;
    if (glob((Text(folder) + "/" + prefix + "*").c_str(), 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++) {
            all += Text(all.empty() ? "" : " ") + (found.gl_pathv[i] + strlen(folder) + 1);
        }
    }
    globfree(&found);
    return all;
}

#define TINY "-i train.bin -e l2h2c16t16 -b 2 "

// Full disk (a limit on the size of files), folders that cannot be made or written.
static void test_bad_output() {
    auto limit = [](rlim_t bytes) {
        return [bytes] {
            struct rlimit r = {bytes, bytes};
            signal(SIGXFSZ, SIG_IGN);
            setrlimit(RLIMIT_FSIZE, &r);
        };
    };
    write_corpus();
    expect_success(program(TINY "--quiet -x 2 -o out"), "first run");
    expect_refused(program(TINY "--quiet -x 4 -y 1 -o out", limit(20000)),
                   "cannot write out/step-00000004.tmp/", "full disk");
    expect(names_in("out", "step") == "step-00000002", "%s", names_in("out", "step").c_str());
    expect_refused(program(TINY "--quiet -x 2 -o log", limit(600)), "log.jsonl", "full log");
    expect_refused(program(TINY "-x 2 -o train.bin/out"), "cannot create folder", "below a file");
    expect_refused(program(TINY "-x 2 -o train.bin"), "train.bin", "a file");
    expect_refused(program(TINY "-x 2 -o /proc/none"), "cannot create folder", "/proc");
    expect_refused(program(TINY "-x 2 -o out"), "already holds checkpoints", "without -y");
    mkdir("closed", 0555);
    expect_refused(program(TINY "-x 2 -o closed/out",
                           [] {
                               if (geteuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) {
                                   exit(98);
                               }
                           }),
                   "closed/out: Permission denied", "unwritable folder");
}

// A file of a checkpoint.
static Text in_checkpoint(const char *folder, int step, int file) {
    return read_file(text("%s/step-%08d/%s", folder, step, checkpoint_files[file]));
}

// Weights, moments and counters of a checkpoint, without the options in its header.
static Text tensors_of(const char *folder, int step) {
    const Text state = in_checkpoint(folder, step, FILE_STATE);
    uint64_t length = 0;
    if (state.size() < 8) {
        return "";
    }
    memcpy(&length, &state[0], 8);
    size_t counters = state.find("\"step\":");
    return in_checkpoint(folder, step, FILE_MODEL) +
           state.substr(counters, state.find('}', counters) - counters) + state.substr(8 + length);
}

// Went on from an older checkpoint, and says in one line what is wrong with the newest.
static void passed_over_at(int line, const Outcome &o, const Text &file, const Text &who) {
    if (o.status != 0 || o.err.find("passed over out/step-00000008: " + file) == Text::npos ||
        o.err.find('\n') != o.err.size() - 1) {
        fail(line, who + text(": status %d, stderr: ", o.status) + o.err.substr(0, 600));
    }
}
#define expect_passed_over(outcome, file, who) passed_over_at(__LINE__, outcome, file, who)

// The bytes of a checkpoint, all its files.
static Text state_file(const char *folder, int step) {
    Text all;
    for (int i = 0; i < CHECKPOINT_FILES; i++) {
        all += in_checkpoint(folder, step, i);
    }
    return all;
}

// A damaged checkpoint is passed over by name, and the run that goes on from the one before ends in
// the same bytes; a foreign one is refused; without a whole one nothing is lost or begun;
// unfinished ones are removed; --keep keeps the newest; a finished run resumes to the same end.
static void test_checkpoint_folder() {
    write_corpus();
    const Text run = TINY "--quiet -x 8 -n 2 -y 1 -o out ";
    expect_success(program(run), "first run");
    expect(names_in("out", "step") == "step-00000002 step-00000004 step-00000006 step-00000008");
    const Text good = state_file("out", 8), tensors = tensors_of("out", 8);
    const Text at = "out/step-00000008/";
    for (int i = 0; i < CHECKPOINT_FILES; i++) {
        const Text path = at + checkpoint_files[i], file = read_file(path);
        const char *named = i == FILE_MANIFEST ? "" : checkpoint_files[i];  // or what it tells of
        const size_t size = file.size();
        for (size_t byte : {(size_t)0, (size_t)9, size / 3, size - 1, size}) {
            Text bad = file;
            byte < size ? (void)(bad[byte] ^= 4) : bad.push_back('x');
            write_file(path, bad);
            expect_passed_over(program(run), named, text("byte %zu", byte));
            expect(state_file("out", 8) == good, "%s, byte %zu", path.c_str(), byte);
        }
        for (size_t length : {(size_t)0, (size_t)5, size / 2, size - 2}) {
            write_file(path, file.substr(0, length));
            expect_passed_over(program(run), named, text("cut to %zu", length));
        }
        unlink(path.c_str());
        expect_passed_over(program(run), checkpoint_files[i], "missing");
        expect(state_file("out", 8) == good, "%s missing", path.c_str());
    }
    for (int step = 2; step <= 8; step += 2) {
        write_file(text("out/step-%08d/config.json", step), "{}");
    }
    Outcome o = program(run);
    expect(o.status == 1 && o.err.find("no checkpoint in out is whole") != Text::npos, "%s",
           o.err.c_str());
    expect(names_in("out", "step") == "step-00000002 step-00000004 step-00000006 step-00000008");
    expect_success(program(TINY "--quiet -x 8 -n 2 -y 1 -o again"), "again");
    nftw("out", remove_one, 16, FTW_DEPTH | FTW_PHYS);
    expect(rename("again", "out") == 0 && tensors_of("out", 8) == tensors);
    expect_refused(program("-i train.bin -e l2h2c32t16 -b 2 -x 8 -n 2 -y 1 -o out"),
                   "is of another run", "another shape");
    expect_refused(program("-i train.bin -e out"), "name one of its step-NNNNNNNN", "-e RUN");
    Text other = read_file("train.bin");  // as long, with other tokens
    other.replace(SHARD_HEADER * 4, 2000, other.substr(SHARD_HEADER * 4 + 1000, 2000));
    write_file("other.bin", other);
    expect_refused(program("-i other.bin -e l2h2c16t16 -b 2 -x 8 -n 2 -y 1 -o out"),
                   "is of another run", "other data");
    mkdir("out/step-00000099.tmp", 0755);
    write_file("out/step-00000099.tmp/model.safetensors", good.substr(0, 999));
    expect_success(program(run), "resumed after its end");
    expect(names_in("out", "step") == "step-00000002 step-00000004 step-00000006 step-00000008",
           "%s", names_in("out", "step").c_str());
    expect(tensors_of("out", 8) == tensors, "resumed after its end");
    mkdir("torn", 0755);  // killed before its first checkpoint, inside a line of the log
    write_file("torn/log.jsonl",
               "{\"event\":\"start\"}\n{\"step\":1,\"loss\":5}\n{\"step\":2,\"lo");
    expect_success(program(TINY "--quiet -x 3 -y 1 -o torn"), "nothing to resume from");
    expect(log_steps("torn/log.jsonl") == one_to(3), "the log of a run without a checkpoint");
    expect_success(program(TINY "--quiet -x 9 -n 2 --keep 2 -o kept"), "--keep 2");
    expect(names_in("kept", "step") == "step-00000008 step-00000009", "%s",
           names_in("kept", "step").c_str());
    write_file("kept/step-00000009/config.json", "{}");  // and what is damaged counts for nothing
    Outcome kept = program(TINY "--quiet -x 9 -n 2 --keep 1 -y 1 -o kept",
                           [] { rename("kept/step-00000008", "kept/step-00000005"); });
    expect(kept.status == 0 && names_in("kept", "step") == "step-00000009", "%s",
           names_in("kept", "step").c_str());
}

// Makes `folder` and goes there.
static void enter(const char *folder) {
    if ((mkdir(folder, 0755) != 0 && errno != EEXIST) || chdir(folder) != 0) {
        die("cannot enter %s: %s", folder, strerror(errno));
    }
}

static const char resumable[] =
    "-i ../train.bin -j ../val.bin -v 7 -e l2h2c16t16 -b 2 -d 64 -r norm "
    "-x 40 -n 3 --keep 2 -y 1 -s 9 -g 5 --quiet -o out --clip 0.5";

// The final checkpoint and the steps of the log equal those of the run that nothing disturbed.
static void expect_same_end(const Text &want, const char *who) {
    expect(!want.empty() && state_file("out", 40) == want, "%s: another end", who);
    expect(log_steps("out/log.jsonl") == one_to(40), "%s: steps of the log", who);
}

// Killed again and again at random moments, a run still ends in the same bytes.
static void test_kill() {
    write_corpus();
    enter("whole");
    double began = now_ms();
    expect_success(program(resumable), "undisturbed");
    double whole_ms = now_ms() - began;
    Text want = state_file("out", 40);
    expect_same_end(want, "undisturbed");
    int kills = 0;
    for (int round = 0; round < 3; round++) {
        chdir("..") == 0 ? enter(text("killed%d", round).c_str()) : fail(__LINE__, "chdir");
        for (int attempt = 0; attempt < 6; attempt++) {
            double share = rng_uniform((uint64_t)began, 1, (uint32_t)round, (uint64_t)attempt);
            pid_t pid = start(resumable);
            usleep((useconds_t)(whole_ms * 1e3 * 0.3 * share));
            kill(pid, SIGKILL);
            kills += outcome(pid).status == 256 + SIGKILL;
        }
        expect_success(program(resumable), "resumed");
        expect_same_end(want, "killed");
        expect(names_in("out", "step") == "step-00000039 step-00000040");
    }
    detail = text("%d kills", kills);
}

// SIGTERM and SIGINT save and exit 0; what follows goes on as if nothing had happened.
static void test_signals() {
    write_corpus();
    enter("whole");
    expect_success(program(resumable), "undisturbed");
    Text want = state_file("out", 40);
    for (int number : {SIGTERM, SIGINT}) {
        chdir("..") == 0 ? enter(number == SIGINT ? "int" : "term") : fail(__LINE__, "chdir");
        for (int attempt = 0; attempt < 4; attempt++) {
            // The first thing a run does to the log is later than its handlers.
            const Text before = read_file("out/log.jsonl");
            pid_t pid = start(resumable);
            for (int wait = 0; wait < 20000 && read_file("out/log.jsonl") == before; wait++) {
                usleep(1000);
            }
            usleep((useconds_t)(attempt * 5000));
            kill(pid, number);
            expect_success(outcome(pid), "interrupted");
            Text log = read_file("out/log.jsonl");
            expect(log.find("\"reason\":\"interrupted\"") != Text::npos ||
                   log.find("\"reason\":\"finished\"") != Text::npos);
            expect(!names_in("out", "step").empty(), "no checkpoint after signal %d", number);
        }
        expect_success(program(resumable), "resumed");
        expect_same_end(want, "interrupted");
    }
}

static void (*healthy_micro_step)(Engine *e, const Token *in, const Token *out, int micro,
                                  int micros);
// The third micro-step of a sick engine leaves a NaN among the gradients.
static void sick_micro_step(Engine *e, const Token *in, const Token *out, int micro, int micros) {
    static int calls;
    healthy_micro_step(e, in, out, micro, micros);
    if (++calls == 3) {
        network_single(&((CpuEngine *)e->self)->net, ROW_GRADS)[5] = (real)NAN;
    }
}

static void sick_open(Engine *e, const Settings *s) {
    cpu_open(e, s);
    healthy_micro_step = e->micro_step;
    e->micro_step = sick_micro_step;
}

static size_t little_memory() { return 1000000; }
static size_t much_memory() { return (size_t)1 << 60; }

// A step whose gradient is not finite is skipped, counted, logged as null; training goes on.
static void test_skipped_step() {
    static const Program sick = {"train_gpt2", "l2h2c16t16", 0, sick_open, much_memory};
    static const Program small = {"train_gpt2", "l2h2c16t16", 0, cpu_open, little_memory};
    write_corpus();
    Outcome o = program(TINY "-x 6 -o out", nullptr, &sick);
    expect_success(o, "a gradient that is not a number");
    expect(o.out.find("1 skipped") != Text::npos && o.out.find("SKIPPED") != Text::npos);
    expect(log_steps("out/log.jsonl") == one_to(6));
    Text log = read_file("out/log.jsonl");
    size_t third = log.find("{\"step\":3,\"loss\"");
    Text line = log.substr(third, log.find('\n', third) - third);
    expect(line.find("\"grad_norm\":null") != Text::npos &&
           line.find("\"skipped\":1") != Text::npos);
    expect(log.find("\"skipped\":1") == log.rfind("\"skipped\":1"), "one step only");
    expect(in_checkpoint("out", 6, FILE_STATE)
               .find("\"step\":\"6\",\"updates\":\"5\",\"position\":\"12\",\"skipped\":\"1\","
                     "\"norm_count\":\"5\"}") != Text::npos);
    o = program(TINY "-x 6 -o none", nullptr, &small);
    expect_refused(o, "available are 976.6 KiB: short", "a plan that does not fit");
    expect(!exists("none/log.jsonl"));
}

// The last value of `key` in a log.
static double last_value(const Text &log, const char *key) {
    size_t at = log.rfind(Text("\"") + key + "\":");
    return at == Text::npos ? (double)NAN : strtod(log.c_str() + at + strlen(key) + 3, NULL);
}

// Resident memory of a run against its plan: within 50 MB, as README promises.
static void test_resident_memory() {
    write_corpus();
    Outcome o = outcome(spawn([] {
        Words words = split("-i train.bin -e l2h8c512t32 -b 2 -x 2 -o out --quiet");
        train_gpt2_main((int)words.size() + 1, arguments_of(&words).data());
        Text status = read_file("/proc/self/status");
        printf("%ld\n", strtol(status.c_str() + status.find("VmHWM:") + 6, NULL, 10));
    }));
    double resident = strtod(o.out.c_str(), NULL) * 1024;
    double plan = last_value(read_file("out/log.jsonl"), "plan_bytes");
    expect_near((wide)resident, (wide)plan, 50e6, "resident %.1f MB, plan %.1f MB", resident / 1e6,
                plan / 1e6);
}

// What --plan prints and returns, for GPUs, for this machine, and as JSON.
static void test_plan_command() {
    struct rusage used;
    Outcome o = program("--plan -e d48 --gpu h200");
    getrusage(RUSAGE_CHILDREN, &used);
    double ms = (double)used.ru_utime.tv_sec * 1e3 + (double)used.ru_utime.tv_usec * 1e-3;
    expect_success(o, "--plan -e d48 --gpu h200");
    expect(TEST_ASAN || ms < 1000, "%.0f ms of the processor", ms);
    expect(o.out.find("memory plan of the GPU run") == 0 &&
           o.out.find("1,557,686,400 parameters") != Text::npos &&
           o.out.find("not measured; 1 GiB reserved") != Text::npos &&
           o.out.find("rule of thumb") != Text::npos && o.out.find("-r block") != Text::npos);
    o = program("--plan -e d48 --gpu t4");
    expect(o.status == 1 && o.out.find("DOES NOT FIT, short") != Text::npos, "status %d", o.status);
    o = program("--plan -e l2h2c16t16 -b 2");
    expect_success(o, "--plan of the CPU run");
    expect(o.out.find("memory plan of the CPU run\n") == 0);
    for (const char *arguments :
         {"--plan --json -e l2h2c16t16", "--plan --json --gpu-mem 16G -e d12"}) {
        o = program(arguments);
        expect_success(o, arguments);
        expect(json_valid(o.out) && o.out.find("\"rows\":[") != Text::npos, "%s", arguments);
    }
}

// --eval, which needs no data: lines as promised, the same score for any B, JSON, a T that is too
// small, a vocabulary that is, and an interruption that is no failure.
static void test_eval_command() {
    std::vector<Question> questions = random_questions(12, 50257, 2);
    const Text run = "-e l1h1c16t16 --eval e.bin ", first = "e.bin: 12 examples, accuracy ";
    auto last_line = [](const Outcome &o) {
        size_t end = o.out.size() > 1 ? o.out.rfind('\n', o.out.size() - 2) : Text::npos;
        return o.out.substr(end == Text::npos ? 0 : end + 1);
    };
    write_file("e.bin", eval_bytes(questions));
    Outcome o = program(run + "-b 4");
    const Text line = last_line(o);
    double p = NAN, error = NAN, norm = NAN, norm_error = NAN;
    expect_success(o, "--eval");
    expect(line.find(first) == 0 && sscanf(&line[first.size()], "%lf %% +- %lf, acc_norm %lf %% +- "
                                           "%lf\n", &p, &error, &norm, &norm_error) == 4,
           "%s", line.c_str());
    expect_near((wide)error, (wide)sqrt(p * (100 - p) / 12), 0.006, "standard error");
    expect_near((wide)norm_error, (wide)sqrt(norm * (100 - norm) / 12), 0.006, "standard error");
    expect(std::count(o.out.begin(), o.out.end(), '\n') == 3 + 9 + 1, "%s", o.out.c_str());
    expect(o.out.find("12 examples of at most 13 tokens; B 4, T 16\n") != Text::npos);
    for (const char *b : {"-b 1", "-b 7", "-b 50"}) {
        o = program(run + "--quiet " + b);
        expect_success(o, b);
        expect(o.out == line, "%s: %s", b, o.out.c_str());
    }
    o = program(run + "--json -t 12");
    expect_success(o, "--json");
    expect(json_valid(o.out) && std::count(o.out.begin(), o.out.end(), '\n') == 1 &&
               o.out.find("{\"file\":\"e.bin\",\"model\":\"l1h1c16t16\",\"sequence\":12,"
                          "\"examples\":12,\"of\":12,") == 0 &&
               o.out.find(text("\"correct\":%.0f,", p * 0.12)) != Text::npos &&
               fabs(last_value(o.out, "acc_norm") - last_value(o.out, "correct_norm") / 12) < 1e-8,
           "%s", o.out.c_str());
    o = program(run + "--quiet -t 5");
    expect(o.out.find("rows lost the start of their context: T = 5 holds 6 tokens") != Text::npos);
    expect_refused(program(run + "-t 4"), ": a completion has 5 tokens; --seq-len (-t) 4 holds",
                   "a short T");
    expect_refused(program(run + "-t 17"), "--seq-len (-t): 17 is more than the model's 16", "-t");
    static const Program small = {"train_gpt2", "l2h2c16t16", 0, cpu_open, little_memory};
    expect_refused(program(run, nullptr, &small), "available are 976.6 KiB: short", "memory");
    questions[7].completions[3].back() = 50257;
    write_file("e.bin", eval_bytes(questions));
    expect_refused(program(run), "e.bin: example 7: token 50257 is outside", "a token too many");
    write_file("e.bin", eval_bytes(random_questions(60, 50257, 3)));
    pid_t pid = start(run);
    for (int wait = 0; wait < 20000 && read_file("stdout").find("example ") == Text::npos; wait++) {
        usleep(1000);
    }
    kill(pid, SIGINT);
    o = outcome(pid);
    expect_success(o, "interrupted");
    expect(o.out.find("e.bin: interrupted after ") != Text::npos &&
           o.out.find(" of 60 examples, accuracy ") != Text::npos, "%s", o.out.c_str());
}

// Weights come from where -e says: what a run has learnt by heart, its checkpoint answers.
static void test_eval_checkpoint() {
    write_corpus();
    expect_success(program("-i train.bin --shuffle 0 -e l1h2c32t16 -b 2 -a 1 -x 240 -l 3e-3 "
                           "--quiet -o out"), "training");
    const Text corpus = read_file("train.bin");
    std::vector<Question> questions = random_questions(8, 257, 4);
    for (int i = 0; i < 8; i++) {
        Question *q = &questions[(size_t)i];
        std::vector<uint16_t> tokens(9);
        memcpy(tokens.data(), &corpus[(size_t)(SHARD_HEADER * 4 + 2 * i)], 2 * tokens.size());
        q->context.assign(tokens.begin(), tokens.begin() + 6);
        q->completions[(size_t)q->label].assign(tokens.begin() + 6, tokens.end());
    }
    write_file("e.bin", eval_bytes(questions));
    Outcome o = program("-e out/step-00000240 --eval e.bin");
    expect_success(o, "-e FOLDER");
    expect(o.out.find("out/step-00000240: vocabulary 257, weights of that file") != Text::npos &&
               o.out.find(", acc_norm 100.00 % +- 0.00\n") != Text::npos, "%s", o.out.c_str());
    write_file("e.bin", eval_bytes(random_questions(3, 50257, 2)));
    expect_refused(program("-e out/step-00000240 --eval e.bin"),
                   "outside the model's vocabulary of 257", "tokens of another vocabulary");
}

// One batch over and over is learnt by heart; the prompt opens the sample; the log says everything.
static void test_overfit() {
    write_corpus();
    Outcome o = program("-i train.bin -j val.bin -e l1h2c32t16 -b 2 -a 1 -x 240 -l 3e-3 -v 60 -m 0 "
                        "-s 240 -g 9 --prompt abc --temperature 0 -o out");
    expect_success(o, "overfit");
    Text log = read_file("out/log.jsonl");
    double loss = last_value(log, "loss");
    expect(loss < 0.2, "loss %.3f", loss);
    expect(log_steps("out/log.jsonl") == one_to(240));
    expect(log.find("{\"step\":240,\"sample\":\"abc") != Text::npos &&
           o.out.find("\nabc") != Text::npos);
    expect(log.find("{\"step\":60,\"val_loss\":") != Text::npos);
    expect(log.find("\"checkpoint\":\"out/step-00000240\"") != Text::npos);
    expect(log.find("{\"event\":\"end\",\"reason\":\"finished\"}\n") == log.size() - 36);
    detail = text("loss %.4f after 240 steps", loss);
}

// Options that name real text: tinyshakespeare's bytes when they are prepared, else this
// repository's own sources, *from_sources.
static Text training_files(int *from_sources) {
    const Text prepared = root + "/data/tinyshakespeare_bytes_";
    int there = exists(prepared + "train.bin") && exists(prepared + "val.bin");
    if (from_sources) {
        *from_sources = !there;
    }
    if (there) {
        return "-i " + prepared + "train.bin -j " + prepared + "val.bin";
    }
    Text source = read_file(root + "/train_gpt2.c");
    std::vector<uint16_t> tokens(source.begin(), source.end());
    for (uint16_t &token : tokens) {
        token &= 255;
    }
    auto cut = tokens.begin() + (long)(tokens.size() / 10 * 9);
    write_file("t.bin", shard_bytes({tokens.begin(), cut}, TOKENIZER_BYTES));
    write_file("v.bin", shard_bytes({cut, tokens.end()}, TOKENIZER_BYTES));
    return "-i t.bin -j v.bin";
}

// A uniform guess has loss 5.55, letter frequencies alone about 3.3. The sources change from day to
// day, so their bound is wider than that of the text that never does.
static void test_training() {
    int sources = 0;
    const Text files = training_files(&sources);
    const double bound = sources ? 2.8 : 2.6;
    expect_success(program(files + " -e l2h4c64t64 -b 8 -x 800 -l 3e-3 -u 20 -v 800 -m 10 -o out"),
                   "training");
    double loss = last_value(read_file("out/log.jsonl"), "val_loss");
    expect(loss < bound, "validation loss %.4f", loss);
    detail = text("%s: validation loss %.4f, bound %.1f", sources ? "sources" : "tinyshakespeare",
                  loss, bound);
}

// -------------------------------------------------------------------------------------------------
// 10. Model files
// Volume I's chapters Model files and Checkpoints as strangers' files meet them. Files are put
// together here from lists of tensors, by names and rules that are written down a second time, so
// that a corruption is one line; what is refused dies in one line that names the file and what in
// it is wrong.

// The hash of `data`, added in two pieces.
static Text sha256_of(const Text &data, size_t cut) {
    Sha256 s;
    char out[SHA256_TEXT];
    sha256_start(&s);
    sha256_add(&s, data.data(), cut);
    sha256_add(&s, data.data() + cut, data.size() - cut);
    sha256_end(&s, out);
    return out;
}

// `n` bytes, a function of the seed.
static Text random_bytes(size_t n, uint64_t seed) {
    Text out(n, 0);
    for (size_t i = 0; i < n; i++) {
        out[i] = (char)(rng_uniform(seed, 9, 2, i) * 256);
    }
    return out;
}

// FIPS 180-4's examples; every length around the padding's turns, in any two pieces, against the
// plain rounds over a message that is padded here; the processor's rounds against the plain ones.
static void test_sha256() {
    static const char *const known[][2] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"}};
    for (auto &row : known) {
        expect(sha256_of(row[0], 0) == row[1], "'%s'", row[0]);
    }
    expect(sha256_of(Text(1000000, 'a'), 999) ==
           "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    for (size_t length = 0; length <= 300; length++) {
        const Text data = random_bytes(length, 1);
        Text padded = data + '\x80', digits;
        padded.append((119 - length % 64) % 64 + 6, 0);
        padded += {(char)(length * 8 >> 8), (char)(length * 8)};
        Sha256 s;
        sha256_start(&s);
        sha256_blocks_plain(s.h, (const unsigned char *)padded.data(), padded.size() / 64);
        for (uint32_t h : s.h) {
            digits += text("%08x", h);
        }
        for (size_t cut = 0; cut <= length; cut++) {
            expect(sha256_of(data, cut) == digits, "%zu bytes cut at %zu", length, cut);
        }
        uint32_t a[8], b[8];
        memcpy(a, s.h, sizeof a);
        memcpy(b, s.h, sizeof b);
        sha256_blocks(a, (const unsigned char *)data.data(), length / 64);
        sha256_blocks_plain(b, (const unsigned char *)data.data(), length / 64);
        expect(memcmp(a, b, sizeof a) == 0, "%zu blocks", length / 64);
    }
    detail = SHA256_X86 ? "x86's instructions and plain C" : "plain C";
}

// What is wrong with a JSON text, which lies in memory of exactly its size; "" for nothing.
static Text json_fault(const Text &json) {
    std::vector<unsigned char> bytes(json.begin(), json.end());
    Json j = {bytes.data(), 0, bytes.size(), NULL};
    json_skip(&j);
    if (json_peek(&j) >= 0) {
        json_fail(&j, "more text after the end");
    }
    expect(j.at <= j.end);
    return j.fault ? j.fault : "";
}

static void test_json() {
    const Text open64(64, '['), close64(64, ']'), nul(1, 0);
    static const char value[] = "a value should stand", number[] = "neither a number nor",
                      ends[] = "a string does not end", escape[] = "an unknown escape",
                      comma[] = "a comma", deep[] = "values nested deeper", more[] = "more text";
    const std::vector<std::pair<Text, Text>> table = {
        {" {\"a\" : [ 1,-2.5e+3,0.5E-7, {} ],\r\n\t\"\":null} ", ""}, {"-0", ""}, {"0e0", ""},
        {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\x7f\xff\"", ""}, {open64 + close64, ""},
        {open64 + "[" + close64 + "]", deep}, {Text(100000, '['), deep}, {"", value},
        {Text(100000, '{'), "a string should begin"}, {"[1,]", value}, {"[,1]", value},
        {"[1 2]", comma}, {"[1}", comma}, {"{\"a\":1]", comma}, {"[1:2]", comma}, {"[", value},
        {"{\"a\":1,}", "a string should begin"}, {"{\"a\" 1}", "a colon"}, {"{\"a\":}", value},
        {"{1:2}", "a string should begin"}, {"[]]", more}, {"1 2", more}, {"{}x", more},
        {"{}" + nul, more}, {nul, value}, {"[1" + nul + "]", comma}, {"\"a" + nul + "\"", ends},
        {"\"\n\"", ends}, {"\"\x1f\"", ends}, {"\"", ends}, {"\"\\\"", ends},
        {"\"\\x\"", escape}, {"\"\\u12g4\"", escape}, {"\"\\u0000\"", escape},
        {"\"\\" + nul + "\"", escape}, {"\"\\u12\"", escape}, {"nan", number}, {"Infinity", number},
        {"True", number}, {"nulls", number}, {"01", number}, {"+1", number}, {"1.", number},
        {".5", number}, {"1e", number}, {"1e+", number}, {"--1", number}, {"-", number},
        {"1.2.3", number}, {"0x10", number}, {"'a'", value}, {"/**/1", value},
        {"\xef\xbb\xbf{}", value},
        {"1e999", ""}, {Text(30, '9'), ""}, {Text(31, '9'), value}};
    for (auto &row : table) {
        const Text got = json_fault(row.first), shown = row.first.substr(0, 40);
        expect(row.second.empty() ? got.empty() : got.find(row.second) == 0, "%s: got '%s'",
               shown.c_str(), got.c_str());
    }
    const Text good = "{\"a\":[true,-1.5e+3,\"x\\u00e9\\n\"],\"b\":{\"c\":null}}";
    for (size_t i = 0; i < good.size(); i++) {
        expect(!json_fault(good.substr(0, i)).empty(), "cut to %zu", i);
        for (int c = 0; c < 256; c++) {
            Text other = good;
            other[i] = (char)c;
            json_fault(other);  // the sanitizers look
        }
    }
    const struct {
        Text json;
        size_t capacity;
        Text want;
    } strings[] = {{"\"abc\"", 4, "abc"}, {"\"abc\"", 3, "ab"}, {"\"abc\"", 1, ""},
                   {"\"\\u0041\\u00e9\\u20ac\\ud83d\"", 20, "A\xc3\xa9\xe2\x82\xac\xed\xa0\xbd"},
                   {"\"\\u007f\\u0080\\u07ff\\u0800\"", 20, "\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80"},
                   {"\"\\b\\f\\n\\r\\t\\/\"", 20, "\b\f\n\r\t/"}};
    for (auto &row : strings) {
        Json j = {(const unsigned char *)row.json.data(), 0, row.json.size(), NULL};
        std::vector<char> out(row.capacity);
        json_string(&j, out.data(), row.capacity);
        expect(!j.fault && out.data() == row.want, "%s", row.json.c_str());
    }
    static const struct {
        const char *json;
        int64_t want;  // -1: a fault
    } counts[] = {{"0", 0}, {" 42", 42}, {"9007199254740992", (int64_t)1 << 53}, {"007", -1},
                  {"9007199254740993", -1}, {"-1", -1}, {"+1", -1}, {"1.0", -1}, {"1e2", -1},
                  {"99999999999999999999", -1}, {"true", -1}, {"\"1\"", -1}, {"", -1}};
    for (auto &row : counts) {
        Json j = {(const unsigned char *)row.json, 0, strlen(row.json), NULL};
        int64_t got = json_count(&j);
        expect(row.want < 0 ? j.fault != NULL : !j.fault && got == row.want, "%s", row.json);
    }
    detail = text("%zu texts", table.size());
}

// A tensor of a safetensors file. `offsets` empty: where its data come to lie.
struct Member {
    Text name, dtype, shape, data, offsets;
};
typedef std::vector<Member> Members;

static Text with_length(const Text &header, const Text &data) {
    uint64_t length = header.size();
    return Text((const char *)&length, 8) + header + data;
}

// The file of a list of tensors. `first`: text before them, such as __metadata__ and a comma.
static Text safetensors_bytes(const Members &list, const Text &first = "") {
    Text header = "{" + first, data;
    for (const Member &m : list) {
        const Text span = text("%zu,%zu", data.size(), data.size() + m.data.size());
        header += (&m == &list[0] ? "\"" : ",\"") + m.name + "\":{\"dtype\":\"" + m.dtype +
                  "\",\"shape\":[" + m.shape + "],\"data_offsets\":[" +
                  (m.offsets.empty() ? span : m.offsets) + "]}";
        data += m.data;
    }
    return with_length(header + "}", data);
}

// The file with the first `was` of its header changed.
static Text with_header(const Text &bytes, const Text &was, const Text &now) {
    uint64_t length;
    memcpy(&length, bytes.data(), 8);
    Text header = bytes.substr(8, length);
    expect(header.find(was) != Text::npos, "no %s in the header", was.c_str());
    header.replace(header.find(was), was.size(), now);
    return with_length(header, bytes.substr(8 + length));
}

static Member &named(Members *list, const Text &name) {
    for (Member &m : *list) {
        if (m.name == name) {
            return m;
        }
    }
    die("the test's file has no %s", name.c_str());
}

// A number of any bits but those of a NaN, as a file holds it and as what it means.
static Text number_bytes(const Text &dtype, uint64_t seed, uint64_t index, real *want) {
    uint32_t bits = (uint32_t)(rng_uniform(seed, 9, 3, index) * 0x1p32);
    uint16_t half = (uint16_t)bits;
    if (dtype == "F16") {
        const int exponent = half >> 10 & 31, fraction = half & 1023;
        double size = exponent == 31 ? HUGE_VAL
                      : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                     : ldexp(fraction, -24);
        half = exponent == 31 ? half & 0xfc00 : half;
        *want = (real)(half >> 15 ? -size : size);
        return Text((const char *)&half, 2);
    }
    bits = dtype == "BF16" ? bits << 16 : bits;
    bits &= (bits & 0x7f800000) == 0x7f800000 ? 0xff800000 : 0xffffffff;
    float value;
    memcpy(&value, &bits, 4);
    *want = (real)value;
    return dtype == "BF16" ? Text((const char *)&bits + 2, 2) : Text((const char *)&bits, 4);
}

// A model's tensors as Hugging Face keeps them, dtypes in turn, and what the engine's flat buffer
// has to hold then.
static Members hugging_face(const Model &m, const Words &dtypes, const Text &prefix, Reals *want) {
    static const char *const names[TENSORS] = {
        "wte.weight",       "wpe.weight",      "ln_1.weight",        "ln_1.bias",
        "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias",
        "ln_2.weight",      "ln_2.bias",       "mlp.c_fc.weight",    "mlp.c_fc.bias",
        "mlp.c_proj.weight", "mlp.c_proj.bias", "ln_f.weight",       "ln_f.bias"};
    Members list;
    want->assign((size_t)tensor_offset(&m, TENSORS, 0), 0);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(&m, tensor); l++) {
            const Text name = names[tensor], dtype = dtypes[list.size() % dtypes.size()];
            const bool swap = name.find(".c_") != Text::npos && name.find("weight") != Text::npos;
            const int64_t rows = tensor_rows(&m, tensor), cols = tensor_cols(&m, tensor);
            Member t = {prefix + (tensor_copies(&m, tensor) > 1 || tensor_table[tensor].per_layer
                                      ? text("h.%d.", l) : "") + name,
                        dtype, text("%d", (int)rows), "", ""};
            if (tensor_is_matrix(tensor)) {
                t.shape = text("%d,%d", (int)(swap ? cols : rows), (int)(swap ? rows : cols));
            }
            for (int64_t i = 0; i < rows * cols; i++) {
                const int64_t r = swap ? i % rows : i / cols, c = swap ? i / rows : i % cols;
                real *place = &(*want)[(size_t)(tensor_offset(&m, tensor, l) + r * cols + c)];
                t.data += number_bytes(dtype, (uint64_t)(tensor * 100 + l), (uint64_t)i, place);
            }
            list.push_back(t);
        }
    }
    return list;
}

// config.json as transformers writes it.
static Text config_text(const Model &m) {
    return text("{\n  \"activation_function\": \"gelu_new\",\n  \"architectures\": [\"GPT2LMHead"
                "Model\"],\n  \"attn_pdrop\": 0.1,\n  \"initializer_range\": 0.02,\n  "
                "\"layer_norm_epsilon\": 1e-05,\n  \"model_type\": \"gpt2\",\n  \"n_ctx\": 1024,\n "
                " \"n_embd\": %d,\n  \"n_head\": %d,\n  \"n_inner\": null,\n  \"n_layer\": %d,\n  "
                "\"n_positions\": %d,\n  \"scale_attn_weights\": true,\n  "
                "\"task_specific_params\": {\"text-generation\": {\"do_sample\": true, "
                "\"max_length\": 50}},\n  \"tie_word_embeddings\": true,\n  \"vocab_size\": %d\n}"
                "\n", m.C, m.NH, m.L, m.maxT, m.V);
}

static void write_model(const Text &folder, const Text &bytes, const Text &config) {
    mkdir(folder.c_str(), 0755);
    write_file(folder + "/model.safetensors", bytes);
    write_file(folder + "/config.json", config);
}

// Opens what -e names, with little more address space than there is now: no file's claim may cost
// memory.
static void open_model(const char *path) {
#if !TEST_ASAN
    const rlim_t space = (rlim_t)address_pages() * (rlim_t)sysconf(_SC_PAGESIZE) +
                         ((rlim_t)24 << 20);
    struct rlimit r = {space, space};
    setrlimit(RLIMIT_AS, &r);
#endif
    ModelFile f;
    model_file_open(&f, path);
    model_file_close(&f);
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
        fail(line, who + ": another model");
    } else {
        model_file_load(&n.e, &f, NULL);
        const Reals got = n.state(STATE_WEIGHTS), zeros(want.size(), 0);
        size_t at = 0;
        while (at < got.size() && memcmp(&got[at], &want[at], sizeof(real)) == 0) {
            at++;
        }
        if (at < got.size()) {
            fail(line, who + text(": element %zu is %.9g, not %.9g", at, (double)got[at],
                                  (double)want[at]));
        }
        if (!same_bits(n.state(STATE_M), zeros) || !same_bits(n.state(STATE_V), zeros)) {
            fail(line, who + ": moments");
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
            Reals want;
            Members list = hugging_face(m, types, prefix, &want);
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
    Reals want;
    Members list = hugging_face(m, {"BF16"}, "", &want);
    Text wide_bits;
    for (const char &c : list[0].data) {
        wide_bits += ((&c - list[0].data.data()) % 2 ? Text() : Text(2, 0)) + c;
    }
    list.push_back({"lm_head.weight", "F32", "3,8", wide_bits, ""});
    write_model("model", safetensors_bytes(list), config_text(m));
    expect_loads("model/", m, want, "an F32 head over BF16");
    detail = text("%d files", k + 1);
}

// An llm.c file: each tensor with all its layers; rows V to Vp - 1 of wte hold what must not be
// loaded.
static Text llmc_bytes(const Model &m, int version, Reals *want) {
    int32_t header[256] = {20240326, version, m.maxT, m.V, m.L, m.NH, m.C, m.Vp};
    Text bytes((const char *)header, sizeof header);
    want->assign((size_t)tensor_offset(&m, TENSORS, 0), 0);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(&m, tensor); l++) {
            for (int64_t i = 0; i < tensor_size(&m, tensor); i++) {
                real value;
                bytes += number_bytes(version == 3 ? "F32" : "BF16", (uint64_t)(tensor * 99 + l),
                                      (uint64_t)i, &value);
                if (tensor != WTE || i < (int64_t)m.V * m.C) {
                    (*want)[(size_t)(tensor_offset(&m, tensor, l) + i)] = value;
                }
            }
        }
    }
    return bytes;
}

static void test_llmc_model() {
    const Model m = shape("l2h2c20t7", 257);
    for (int version : {3, 5}) {
        Reals want;
        const Text good = llmc_bytes(m, version, &want);
        write_file("good.bin", good);
        // in a child, so that no threads stand beside the forks below
        expect_success(outcome(spawn([&] { expect_loads("good.bin", m, want, "good.bin"); })),
                       text("version %d", version));
        const std::pair<Text, const char *> table[] = {
            {with_int(good, 1, 4), "bad.bin: version 4"}, {with_int(good, 1, 1), "version 1"},
            {good + "x", "bad.bin: "}, {good.substr(0, good.size() - 1), "its shape makes"},
            {with_int(good, 7, 257), "with 257 padded rows"}, {with_int(good, 7, -1), "padded"},
            {with_int(good, 1, 8 - version), "its shape makes"},
            {with_int(good, 2, 0), "0 positions"},
            {with_int(good, 3, 0), "0 tokens"}, {with_int(good, 3, 70000), "70000 tokens"},
            {with_int(good, 3, INT32_MAX), "tokens"}, {with_int(good, 4, -2), "-2 layers"},
            {with_int(good, 4, 400), "its shape makes"}, {with_int(good, 4, 401), "401 layers"},
            {with_int(good, 5, 0), "0 heads"}, {with_int(good, 5, 3), "3 heads"},
            {with_int(good, 6, 65536), "its shape makes"},
            {with_int(good, 6, INT32_MIN), "channels"}};
        for (auto &row : table) {
            write_file("bad.bin", row.first);
            expect_death(open_model("bad.bin"), row.second);
        }
    }
    Reals want;
    const Text good = llmc_bytes(m, 3, &want);
    for (size_t n = 0; n < 1024; n += n < 40 ? 1 : 41) {
        write_file("cut.bin", good.substr(0, n));
        expect_death(open_model("cut.bin"),
                     n < 4 ? "cannot open config.json" : "cut.bin: not a model");
    }
}

// One tensor of a good file changed: its name, the member, the new value, what is said of it.
static const struct {
    const char *name;
    char field;  // n(ame), d(type), s(hape) or o(ffsets)
    const char *value, *words;
} changes[] = {
    {"wpe.weight", 'd', "Q4", "wpe.weight: an unknown dtype"},
    {"wpe.weight", 'd', "", "wpe.weight: an unknown dtype"},
    {"wpe.weight", 'd', "F64", "wpe.weight: its data_offsets do not span"},
    {"wpe.weight", 'd', "I32", "wpe.weight: weights are F32, BF16 or F16"},
    {"wpe.weight", 's', "4,3", "wpe.weight: its shape is not (3, 4)"},
    {"wpe.weight", 's', "12", "wpe.weight: its shape is not (3, 4)"},
    {"wpe.weight", 's', "3,4,1", "wpe.weight: its shape is not (3, 4)"},
    {"wpe.weight", 's', "3,5", "wpe.weight: its data_offsets do not span"},
    {"wpe.weight", 's', "-3,-4", "wpe.weight: not a whole number"},
    {"wpe.weight", 's', "0,4", "wpe.weight: its data_offsets do not span"},
    {"wpe.weight", 's', "", "wpe.weight: its data_offsets do not span"},
    {"wpe.weight", 's', "1099511627776,1099511627776",
     "wpe.weight: a shape of more"},
    {"wpe.weight", 's', "0,1099511627776,1099511627776", "wpe.weight: its data"},
    {"wpe.weight", 's', "4294967299,4294967296", "wpe.weight: a shape of more"},
    {"h.1.attn.c_attn.weight", 's', "12,4", "weight: its shape is not (4, 12)"},
    {"h.1.mlp.c_proj.weight", 's', "4,16", "weight: its shape is not (16, 4)"},
    {"ln_f.bias", 's', "4,1", "ln_f.bias: its shape is not"},
    {"ln_f.bias", 's', "1,4", "ln_f.bias: its shape is not"},
    {"wpe.weight", 'n', "wte.weight", "wte.weight: stands in the file twice"},
    {"h.0.ln_1.bias", 'n', "h.2.ln_1.bias", "h.2.ln_1.bias: GPT-2 of this many"},
    {"h.0.ln_1.bias", 'n', "h.99.ln_1.bias", "h.99.ln_1.bias: GPT-2 of this many"},
    {"h.0.ln_1.bias", 'n', "h.01.ln_1.bias", "h.01.ln_1.bias: GPT-2 of this many"},
    {"h.0.ln_1.bias", 'n', "h.-1.ln_1.bias", "h.-1.ln_1.bias: GPT-2 of this many"},
    {"h.0.ln_1.bias", 'n', "h.4294967296.ln_1.bias", "none of this name"},
    {"h.0.ln_1.bias", 'n', "h.18446744073709551616.ln_1.bias", "none of this name"},
    {"h.0.ln_1.bias", 'n', "h.0.wte.weight", "none of this name"},
    {"h.0.ln_1.bias", 'n', "h..ln_1.bias", "none of this name"},
    {"h.0.ln_1.bias", 'n', "ln_1.bias", "none of this name"},
    {"ln_f.bias", 'n', "h.0.ln_f.bias", "none of this name"},
    {"ln_f.bias", 'n', "transformer.transformer.ln_f.bias", "none of this name"},
    {"ln_f.bias", 'n', "", "tensor : GPT-2 of this many"},
    {"ln_f.bias", 'n', "ln_f.bias\\n\\u001b[2J", "tensor ln_f.bias??[2J: "},
    {"h.0.ln_1.weight", 'o', "160,176", "overlap"},
    {"h.0.ln_1.weight", 'o', "132,148", "overlap"}};

// Whole files and headers that no writer makes, each refused by its name and in little memory.
static void test_model_refused() {
    const Model m = shape("l2h2c4t3", 5);
    Reals ignored;
    const Members good = hugging_face(m, {"F32"}, "", &ignored);
    const Text bytes = safetensors_bytes(good), config = config_text(m);
    auto refuse = [&](const Text &file, const Text &words) {
        write_model("model", file, config);
        expect_death(open_model("model"), words.c_str());
    };
    auto header = [](uint64_t length) { return Text((const char *)&length, 8); };
    static const char not_one[] = "model/model.safetensors: not a safetensors file";
    static const char json[] = "model/model.safetensors: not JSON as it should be: ";
    const Text wte = "model/model.safetensors: tensor wte.weight: ";
    const uint64_t size = bytes.size();
    const std::pair<Text, Text> files[] = {
        {"", not_one}, {"{}", not_one}, {Text(7, 0), not_one}, {Text(8, 0), not_one},
        {header(1) + "{}", not_one}, {header((uint64_t)1 << 63) + bytes.substr(8), not_one},
        {header(~(uint64_t)0) + bytes.substr(8), not_one}, {header(~(uint64_t)6) + "{}", not_one},
        {header((uint64_t)1 << 50) + bytes.substr(8), not_one},
        {header(size - 7) + bytes.substr(8), not_one}, {header(100000001) + bytes, not_one},
        {with_length("{}", ""), "wte.weight: is missing"}, {with_length("{}", "x"), "overlap"},
        {with_length("[]", ""), json}, {with_length("{\"a", ""), json},
        {with_length("{\"__metadata__\":" + Text(65, '[') + Text(65, ']') + "}", ""), "deeper"},
        {with_length("{\"a\":" + Text(5 << 20, '['), ""), "an object should begin"},
        {with_length("{\"__metadata__\":" + Text(5 << 20, '['), ""), "deeper than 64"},
        {with_length("{\"wte.weight\":{\"shape\":" + Text(5 << 20, '['), ""), wte},
        {safetensors_bytes(good, "\"__metadata__\":{},\"__metadata__\":{},"), "__metadata__ twice"},
        {safetensors_bytes(good, "\"__metadata__\":{"), json}, {bytes + "x", "leave some of its"},
        {bytes.substr(0, size - 1), "outside the file"}, {bytes.substr(0, 400), not_one},
        {with_header(bytes, "\"dtype\":\"F32\",", ""), wte + "dtype, shape and data_offsets"},
        {with_header(bytes, "\"F32\"", "\"F32\",\"dtype\":\"F32\""), wte + "a member twice"},
        {with_header(bytes, "\"dtype\"", "\"Dtype\""), wte + "a member twice, or other"},
        {with_header(bytes, "\"F32\"", "5"), wte}, {with_header(bytes, "F32", "F32\\u0000"), wte},
        {with_header(bytes, "[5,4]", "5"), wte}, {with_header(bytes, "[5,4]", "[5,4"), wte},
        {with_header(bytes, "[0,80]", "[0]"), wte},
        {with_header(bytes, "[0,80]", "[0,80,80]"), wte},
        {with_header(bytes, "[0,80]", "[-80,0]"), wte},
        {with_header(bytes, "[0,80]", "[0,8e1]"), wte},
        {with_header(bytes, "[0,80]", "[80,0]"), wte + "its data_offsets lie outside"},
        {with_header(bytes, "[0,80]", "[0,18446744073709551615]"), wte},
        {with_header(bytes, "[0,80]", "[9007199254740912,9007199254740992]"),
         wte + "its data_offsets"},
        {with_header(bytes, "{", "x"), json}, {with_header(bytes, "}", ""), wte}};
    for (auto &row : files) {
        const double began = now_ms();
        refuse(row.first, row.second);
        expect(now_ms() - began < 5000, "slow: %s", row.second.c_str());
    }
    for (auto &row : changes) {
        Members list = good;
        Member &m = named(&list, row.name);
        (row.field == 'n'   ? m.name
         : row.field == 'd' ? m.dtype
         : row.field == 's' ? m.shape
                            : m.offsets) = row.value;
        refuse(safetensors_bytes(list), row.words);
    }
    for (const Member &t : good) {
        Members list = good;
        list.erase(list.begin() + (&t - &good[0]));
        refuse(safetensors_bytes(list), "tensor " + t.name + ": is missing");
        list.push_back(t);
        list.push_back(t);
        list.back().name = "transformer." + t.name;
        refuse(safetensors_bytes(list), "transformer." + t.name + ": stands in the file twice");
    }
    Members list = good;
    list.push_back(good[0]);
    list.back().name = "lm_head.weight";
    list.back().data[79] ^= 1;
    refuse(safetensors_bytes(list), "lm_head.weight: differs from wte.weight");
    list.back().dtype = "U32";
    refuse(safetensors_bytes(list), "lm_head.weight: weights are F32");
    list = good;
    list[1].data += "gap!";
    list[1].offsets = "80,128";
    refuse(safetensors_bytes(list), "leave some of its");
    detail = text("%zu files, %zu changes", sizeof files / sizeof *files,
                  sizeof changes / sizeof *changes);
}

// config.json with one thing changed.
static void test_config_refused() {
    const Model m = shape("l2h2c4t3", 5);
    Reals ignored;
    const Text bytes = safetensors_bytes(hugging_face(m, {"F32"}, "", &ignored));
    static const char *const table[][3] = {
        {"\"n_layer\"", "\"layers\"", "n_layer is missing or 0"},
        {"\"n_head\"", "\"heads\"", "n_head is missing or 0"},
        {"\"n_embd\"", "\"embd\"", "n_embd is missing or 0"},
        {"\"n_positions\"", "\"positions\"", "n_positions is missing or 0"},
        {"\"vocab_size\"", "\"vocab\"", "vocab_size is missing or 0"},
        {"\"n_layer\": 2", "\"n_layer\": 0", "n_layer is missing or 0"},
        {"\"n_layer\": 2", "\"n_layer\": -2", "not a whole number"},
        {"\"n_layer\": 2", "\"n_layer\": 2, \"n_layer\": 2", "twice"},
        {"\"n_layer\": 2", "\"n_layer\": 401", "401 layers"},
        {"\"n_layer\": 2", "\"n_layer\": 1048577", "n_layer is too large"},
        {"\"n_layer\": 2", "\"n_layer\": 4294967298", "n_layer is too large"},
        {"\"n_layer\": 2", "\"n_layer\": 99999999999999999999", "not a whole number"},
        {"\"n_layer\": 2", "\"n_layer\": \"2\"", "config.json: "},
        {"\"n_layer\": 2", "\"n_layer\": 1", "h.1.ln_1.weight: GPT-2 of this many layers"},
        {"\"n_layer\": 2", "\"n_layer\": 3", "h.2.ln_1.weight: is missing"},
        {"\"n_head\": 2", "\"n_head\": 3", "3 heads, 4 channels"},
        {"\"n_embd\": 4", "\"n_embd\": 8", "wte.weight: its shape is not (5, 8)"},
        {"\"n_embd\": 4", "\"n_embd\": 65538", "65538 channels"},
        {"\"vocab_size\": 5", "\"vocab_size\": 70000", "70000 tokens"},
        {"\"n_positions\": 3", "\"n_positions\": 4", "wpe.weight: its shape is not (4, 4)"},
        {"gelu_new", "relu", "activation_function is 'relu'"},
        {"gelu_new", "gelu_new|gelu_pytorch_tanh", "activation_function is"},
        {"gelu_new", "", "activation_function is ''"},
        {"\"gelu_new\"", "[\"gelu_new\"]", "config.json: "},
        {"\"n_inner\": null", "\"n_inner\": 17", "n_inner is 17"},
        {"\"n_inner\": null", "\"n_inner\": nil", "config.json: "},
        {"embeddings\": true", "embeddings\": false", "tie_word_embeddings is 'false'"},
        {"weights\": true", "weights\": false", "scale_attn_weights is 'false'"},
        {"{\n", "{\"scale_attn_by_inverse_layer_idx\": true,", "inverse_layer_idx is 'true'"},
        {"1e-05", "1e-06", "layer_norm_epsilon is '1e-06'"},
        {"\"gpt2\"", "\"gpt_neo\"", "model_type is 'gpt_neo'"},
        {"\n}\n", "\n}\n{", "more text after the end"},
        {"\n}\n", "", "config.json: not JSON"},
    };
    for (auto &row : table) {
        Text config = config_text(m);
        expect(config.find(row[0]) != Text::npos, "no %s", row[0]);
        config.replace(config.find(row[0]), strlen(row[0]), row[1]);
        write_model("model", bytes, config);
        expect_death(open_model("model"), row[2]);
    }
    write_model("model", bytes, "");
    expect_death(open_model("model"), "model/config.json: not JSON");
    unlink("model/config.json");
    expect_death(open_model("model"), "cannot open model/config.json: No such file");
    expect_death(open_model("model/none"), "cannot open model/none: No such file");
    mkfifo("model/config.json", 0644);
    expect_death(open_model("model"), "cannot open model/config.json: ");
    detail = text("%zu changes", sizeof table / sizeof *table);
}

// Writes an engine's weights as a checkpoint's model into `folder`.
static void save_model(Net *n, int type, const char *folder) {
    static Writer model, config;
    mkdir(folder, 0755);
    writer_open(&model, folder, "model.safetensors", checkpoint_remove);
    model_file_save(&n->e, &n->s.model, type, &model);
    writer_close(&model);
    writer_open(&config, folder, "config.json", checkpoint_remove);
    config_save(&n->s.model, &config);
    writer_close(&config);
    const Text bytes = read_file(text("%s/model.safetensors", folder));
    expect(sha256_of(bytes, 0) == model.hash && (int64_t)bytes.size() == model.bytes);
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
            Reals want;
            const Text made = safetensors_bytes(hugging_face(m, {dtype}, "transformer.", &want));
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
        expect(back == u, "%08x became %08x", u, back);
    }
}

// Sizes and hashes of a checkpoint's files, as they are now.
static void write_manifest(const Text &folder, const Text &more = "") {
    Text all = "{\"format\": \"train_gpt2 checkpoint\", \"version\": 2, \"files\": {" + more;
    for (int i = 0; i < FILE_MANIFEST; i++) {
        const Text bytes = read_file(folder + "/" + checkpoint_files[i]);
        all += text("%s\"%s\": {\"bytes\": %zu, \"sha256\": \"%s\"}", i ? ", " : "",
                    checkpoint_files[i], bytes.size(), sha256_of(bytes, 0).c_str());
    }
    write_file(folder + "/manifest.json", all + "}}");
}

// Appends a tensor to a state file.
static Text with_tensor(const Text &bytes, const char *name, const char *dtype, const Text &data,
                        size_t elements) {
    uint64_t length;
    memcpy(&length, bytes.data(), 8);
    const size_t end = bytes.rfind("}}", 8 + length) + 1, begin = bytes.size() - 8 - length;
    const Text header = bytes.substr(8, end - 8) + text(",\"%s\":{\"dtype\":\"%s\",\"shape\":[%zu],"
                        "\"data_offsets\":[%zu,%zu]}}", name, dtype, elements, begin,
                        begin + data.size());
    return with_length(header, bytes.substr(8 + length) + data);
}

// A checkpoint of bf16 weights and the low halves of their masters goes on as the fp32 one it was
// made of; state files that a manifest vouches for are refused all the same.
static void test_state_file() {
    write_corpus();
    const Text run = TINY "--quiet -x 4 -n 2 -y 1 -o out", at = "out/step-00000002";
    expect_success(program(run), "first run");
    const Text end = tensors_of("out", 4),
               good = read_file(at + "/" + checkpoint_files[FILE_STATE]);
    // in a child: after threads of this process, those of its children would wait for ever
    expect_success(outcome(spawn([&] {
        Net n(shape("l2h2c16t16", 257), 2, 16);
        ModelFile f;
        model_file_open(&f, at.c_str());
        model_file_load(&n.e, &f, NULL);
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
        write_file(at + "/" + checkpoint_files[FILE_STATE], state);
        write_manifest(at);
        return program(run);
    };
    expect_success(resume(with_tensor(good, "master", "U16", low, all)), "bf16, master");
    expect(tensors_of("out", 4) == end, "bf16 weights and master: another end");
    expect_success(resume(good), "bf16 weights alone");
    expect(tensors_of("out", 4) != end && !tensors_of("out", 4).empty(), "bf16 weights alone");
    const std::pair<Text, const char *> table[] = {
        {with_tensor(good, "master", "U16", low + "xx", all + 1), "tensor master: has not"},
        {with_tensor(good, "master", "F16", low, all), "tensor master: has not"},
        {with_tensor(good, "m", "BF16", low, all), "tensor m: stands in the file twice"},
        {with_tensor(good, "other", "U16", low, all), "tensor other: is unknown"},
        {with_header(good, "\"m\"", "\"master\""), "tensor master: has not"},
        {with_header(good, "\"norms\"", "\"norm\""), "tensor norm: is unknown"},
        {with_header(good, "\"updates\":\"2\"", "\"updates\":\"-2\""), "'updates' is '-2'"},
        {with_header(good, "\"updates\":\"2\"", "\"updates\":\"\""), "'updates' is ''"},
        {with_header(good, "\"updates\":\"2\"", "\"updates\":2"), "'updates' is ''"},
        {with_header(good, "\"updates\"", "\"update\""), "'updates' is ''"},
        {with_header(good, "\"step\":\"2\"", "\"step\":\"2x\""), "'step' is '2x'"},
        {with_header(good, "\"position\":\"", "\"position\":\"9007199254740993"), "'position' is"},
        {with_header(good, "\"__metadata__\":{\"format", "\"__metadata__\":{\"form"), ""},
        {with_header(good, "\"run\":\"shape l2", "\"run\":\"\\u001b\\nl2"), "run: it has ??l2"},
        {with_header(good, "\"run\"", "\"ran\""), "is of another run"}};
    for (auto &row : table) {
        if (row.second[0]) {
            expect_refused(resume(row.first), row.second, row.second);
        } else {
            expect_success(resume(row.first), "a key that nobody asks for");
        }
    }
    resume(good);
    static const char *const doubles[] = {
        "\"model.safetensors\": {\"bytes\": 1, \"sha256\": \"0\"}, ",
                                          "\"../x\": {}, ", "\"a\": [}, "};
    for (const char *more : doubles) {
        write_manifest("out/step-00000004", more);
        Outcome o = program(run);
        expect(o.status == 0 && o.err.find("passed over out/step-00000004: manifest.json: it") !=
                                    Text::npos, "%s: %s", more, o.err.c_str());
    }
}

// What a checkpoint's folder names, trained on as a model of its own.
static void test_model_option() {
    write_corpus();
    expect_success(program(TINY "--quiet -x 3 -o out"), "first run");
    Outcome first = outcome(spawn([] {
        Net n(shape("l2h2c16t16", 257), 2, 16);
        ModelFile f;
        Options o;
        Dataset d;
        Token inputs[32], targets[32];
        model_file_open(&f, "out/step-00000003");
        model_file_load(&n.e, &f, NULL);
        options_default(&o);
        dataset_open(&d, "train.bin", 16);
        dataset_batch(&d, 0, 2, (int)o.shuffle, (uint64_t)o.seed, inputs, targets, 257);
        n.e.micro_step(&n.e, inputs, targets, 0, 1);
        printf("{\"step\":1,\"loss\":%.9g,", n.e.update(&n.e, &o, 0, HUGE_VAL, 0).loss);
        dataset_close(&d);
        model_file_close(&f);
    }));
    expect_success(first, "a step from these weights");
    const Text want = first.out;
    int k = 0;
    for (const char *e : {"out/step-00000003", "out/step-00000003/",
                         "out/step-00000003/model.safetensors"}) {
        const Text folder = text("next%d", k++),
                   run = Text("--quiet -x 2 -b 2 -i train.bin -y 1 -e ") + e;
        expect_success(program(run + " -o " + folder), e);
        const Text log = read_file(folder + "/log.jsonl"), end = tensors_of(folder.c_str(), 2);
        expect(log.find(want) != Text::npos, "%s: no %s", e, want.c_str());
        expect(tensors_of("next0", 2) == end && !end.empty(), "%s: another end", e);
    }
    write_file("gpt2.bin", shard_bytes(std::vector<uint16_t>(400, 7), TOKENIZER_GPT2));
    mkdir("empty", 0755);
    static const Refusal table[] = {
        {"-i gpt2.bin -e out/step-00000003", "has a vocabulary of 257; the data, gpt2.bin, has"},
        {"-i train.bin -e out/step-00000004", "'out/step-00000004' is neither a preset"},
        {"-i train.bin -e empty", "cannot open empty/model.safetensors: No such file"},
        {"-i train.bin -e train.bin", "cannot open config.json: No such file"},
        {"-i train.bin -e out/step-00000003/config.json", "not a safetensors file"},
        {"-i train.bin -t 17 -e out/step-00000003", "17 is more than the model's 16"},
        {"-e out/step-00000003", "no data: 'make data'"},
        {"-i train.bin -e /dev/null", "cannot open /dev/null: "}};
    for (const Refusal &row : table) {
        expect_refused(program(row.arguments), row.words, row.arguments);
    }
    Outcome plan = program("--plan --json -e out/step-00000003");
    expect_success(plan, "--plan");
    expect(json_valid(plan.out) && plan.out == program("--plan --json -e l2h2c16t16").out);
}

// A disk that fills up inside any file of a checkpoint, and what else is in the way, leave the one
// before as it was; a folder in the first form, or one without a manifest, is passed over.
static void test_checkpoint_writes() {
    write_corpus();
    expect_success(program(TINY "--quiet -x 2 -o out"), "first run");
    const Text good = state_file("out", 2), run = TINY "--quiet -x 4 -y 1 -o out";
    const size_t model = in_checkpoint("out", 2, FILE_MODEL).size(),
                 state = in_checkpoint("out", 2, FILE_STATE).size();
    auto is_whole = [](const char *folder) {
        return outcome(spawn([&] {
            char problem[PATH_BYTES];
            exit(!checkpoint_is_whole(folder, problem));
        })).status == 0;
    };
    auto expect_stands = [&](const char *who) {
        expect(names_in("out", "step") == "step-00000002", "%s: %s", who,
               names_in("out", "step").c_str());
        expect(state_file("out", 2) == good && is_whole("out/step-00000002"), "%s", who);
    };
    for (size_t bytes : {model / 2, model - 1, model, model + 1,
                         state / 2, state - 100, state - 1}) {
        Outcome o = program(run, [bytes] {
            struct rlimit r = {bytes, bytes};
            signal(SIGXFSZ, SIG_IGN);
            setrlimit(RLIMIT_FSIZE, &r);
        });
        const Text file = Text("cannot write out/step-00000004.tmp/") +
                          checkpoint_files[bytes < model ? FILE_MODEL : FILE_STATE];
        expect_refused(o, file.c_str(), text("%zu bytes", bytes));
        expect_stands("full disk");
    }
    for (const char *file : checkpoint_files) {
        const Text in_the_way = Text("out/step-00000004.tmp/") + file;
        mkdir("out/step-00000004.tmp", 0755);
        mkdir(in_the_way.c_str(), 0755);
        expect_refused(program(run), ("cannot write " + in_the_way).c_str(), in_the_way);
        expect(names_in("out/step-00000004.tmp", "") == file, "what is written beside %s", file);
        nftw("out/step-00000004.tmp", remove_one, 16, FTW_DEPTH | FTW_PHYS);
        expect_stands(file);
    }
    mkdir("out/step-00000003", 0755);
    write_file("out/step-00000003/state.bin", good);
    write_file("out/step-00000009", "no folder");
    Outcome o = program(run);
    expect(o.status == 0 &&
               o.err.find("passed over out/step-00000003: manifest.json") != Text::npos &&
               o.err.find("passed over out/step-00000009: manifest.json") != Text::npos,
           "%s", o.err.c_str());
    expect(is_whole("out/step-00000004"));
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
static const double bf16_unit = 0x1p-8;  // of rounding to nearest

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

// Order 0 is the plain one; on a GPU the others only run again.
enum { ORDERS = CUDA_CPU ? 6 : 2 };
static void set_order(int order) {
#if CUDA_CPU
    emu::set.seed = order < 4 ? order : 0;
    emu::set.lazy = order == 4;
    emu::set.guard = order == 5;
#else
    (void)order;
#endif
}

// The outputs of `run`, which must be the same to the bit in every order.
template <class Run> static Outputs every_order(Run run, const Text &who) {
    Outputs first = run();
    for (int order = 1; order < ORDERS; order++) {
        set_order(order);
        Outputs again = run();
        for (size_t i = 0; i < first.size(); i++) {
            expect(same_bits(first[i], again[i]), "%s: output %zu, order %d", who.c_str(), i,
                   order);
        }
    }
    set_order(0);
    return first;
}

// Numbers that left the device as E. fp32: within the twin's error, as everywhere. bf16: each
// number, and the norm of all, within twice what rounding the exact result loses.
template <class E> static void compare_in(int line, const Reals &got, Nums want, const Text &who) {
    if (sizeof(E) == 2) {
        double error = 0, loss = 0, e = 0;
        for (size_t i = 0; i < want.size(); i++) {
            double v = (double)want[i].v, naive = (double)rounded_to<bf16>((real)v) - v;
            error += ((double)got[i] - v) * ((double)got[i] - v);
            loss += naive * naive;
            e += want[i].e * want[i].e;
            want[i].e += 2 * bf16_unit * fabs(v);
        }
        near_at(line, (wide)sqrt(error), 0, 2 * sqrt(loss) + sqrt(e), who + " bf16, norm");
    }
    compare_at(line, got, want, who + (sizeof(E) == 2 ? " bf16" : " fp32"));
}
#define compare_as(E, got, want, who) compare_in<E>(__LINE__, got, want, who)

// Both element types.
#define in_both_types(test, ...) (test<float>(__VA_ARGS__), test<bf16>(__VA_ARGS__))

template <class E, class G> static void check_encoder(int B, int T, int C, int V, int max_T) {
    const int N = B * T, Vp = (int)round_up_i64(V, 128);
    const Text who = text("B %d T %d C %d V %d", B, T, C, V);
    std::vector<Token> tokens = Batch(N, V, 1).inputs;
    for (int i = 0; i < N; i += 3) {
        tokens[(size_t)i] = V - 1;  // one that comes often
    }
    std::vector<int> plan((size_t)encoder_plan_ints(N)), counts((size_t)V);
    int segments = encoder_sort(plan.data(), counts.data(), tokens.data(), N, V);
    Reals wte = noise_in<E>(Vp * C, 1, 1), wpe = noise_in<E>(max_T * C, 1, 2);
    Reals dout = noise_in<E>(N * C, 1, 3), dwte = noise_in<G>(Vp * C, 1, 4);
    Reals dwpe = noise_in<G>(max_T * C, 1, 5);
    Outputs got = every_order(
        [&] {
            Device<E> d_wte(wte), d_wpe(wpe), d_dout(dout), out(dout.size());
            Device<G> d_dwte(dwte), d_dwpe(dwpe), written(dwpe.size());
            Device<int> d_tokens(tokens), d_plan(plan);
            gpu_encoder_forward(out.p, d_tokens.p, d_wte.p, d_wpe.p, B, T, C, 0);
            gpu_encoder_backward(d_dwte.p, d_dwpe.p, d_dout.p, d_plan.p, segments, B, T, C, max_T,
                                 false, 0);
            Reals sums = d_dwte.get();
            gpu_encoder_backward(d_dwte.p, written.p, d_dout.p, d_plan.p, segments, B, T, C, max_T,
                                 true, 0);
            return Outputs{out.get(), sums, d_dwpe.get(), written.get()};
        },
        who);
    Reals sizes = dout;
    for (real &x : sizes) {
        x = (real)fabs((double)x);
    }
    Nums want, want_dwte = nums(dwte), want_dwpe = nums(dwpe), first(dwpe.size());
    Nums none, of_dwte(dwte.size()), of_dwpe(dwpe.size());
    twin_encoder(&want, &want_dwte, &want_dwpe, tokens, wte, wpe, dout, T, C);
    twin_encoder(&none, &of_dwte, &of_dwpe, tokens, wte, wpe, sizes, T, C);
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
static void test_gpu_encoder() {
    static const int shapes[][5] = {
        {1, 1, 48, 257, 1}, {2, 65, 80, 257, 70}, {3, 17, 16, 50257, 17}, {1, 130, 1600, 257, 256}};
    for (auto &s : shapes) {
        check_encoder<float, float>(s[0], s[1], s[2], s[3], s[4]);
        check_encoder<bf16, bf16>(s[0], s[1], s[2], s[3], s[4]);
        check_encoder<bf16, float>(s[0], s[1], s[2], s[3], s[4]);
    }
}

template <class E> static void check_layernorm(int N, int C) {
    const Text who = text("N %d C %d", N, C);
    const size_t n = (size_t)N * C;
    Reals x = noise_in<E>(n, 2, 1), w = noise_in<E>(C, 1, 2), b = noise_in<E>(C, 1, 3);
    Reals dout = noise_in<E>(n, 1, 4), addend = noise_in<E>(n, 1, 5);
    Reals dw = noise(C, 1, 6), db = noise(C, 1, 7);
    Outputs got = every_order(
        [&] {
            Device<E> d_x(x), d_w(w), d_b(b), out(n), dinp(n), d_dout(dout), d_addend(addend);
            Device<float> mean(N), rstd(N), scratch(gpu_layernorm_backward_bytes(N, C) / 4);
            Outputs all;
            gpu_layernorm_forward(out.p, mean.p, rstd.p, d_x.p, d_w.p, d_b.p, N, C, 0);
            auto backward = [&](Device<E> &to, const E *add) {
                Device<float> d_dw(dw), d_db(db);
                gpu_layernorm_backward(to.p, d_dw.p, d_db.p, d_dout.p, d_x.p, d_w.p, mean.p, rstd.p,
                                       add, scratch.p, N, C, 0);
                all = {to.get(), d_dw.get(), d_db.get()};
                return all[0];
            };
            Reals apart = backward(dinp, d_addend.p);
            expect(same_bits(apart, backward(d_addend, d_addend.p)), "%s: in place", who.c_str());
            backward(d_dout, nullptr);  // over dout
            return Outputs{out.get(), mean.get(), rstd.get(), apart, all[0], all[1], all[2]};
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
}

// Rows of one warp and of several; more rows than partial sums.
static void test_gpu_layernorm() {
    for (int N : {1, 65, 130}) {
        for (int C : {16, 80, 192, 768, 1600}) {
            in_both_types(check_layernorm, N, C);
        }
    }
    in_both_types(check_layernorm, 1500, 48);
    in_both_types(check_layernorm, 9, 4096);
}

template <class E> static void check_gelu(int N, int OC) {
    const Text who = text("N %d OC %d", N, OC);
    const size_t n = (size_t)N * OC;
    Reals x = noise_in<E>(n, 3, 1), dout = noise_in<E>(n, 1, 2), dbias = noise(OC, 1, 3);
    static const real far[] = {-60, 60, 0, -8, (real)3e8, (real)-3e8};
    for (size_t i = 0; i < 6; i++) {
        x[i] = rounded_to<E>(far[i]);
    }
    Outputs got = every_order(
        [&] {
            Device<E> d_x(x), d_dout(dout), out(n);
            Device<float> of_dinp(dbias), of_dout(dbias),
                scratch(gpu_bias_backward_bytes(N, OC) / 4);
            gpu_gelu_forward(out.p, d_x.p, n, 0);
            gpu_bias_backward(of_dout.p, d_dout.p, scratch.p, N, OC, 0);
            gpu_gelu_backward(d_dout.p, of_dinp.p, d_dout.p, d_x.p, scratch.p, N, OC, 0);
            return Outputs{out.get(), d_dout.get(), of_dinp.get(), of_dout.get()};
        },
        who);
    expect(got[0][0] == 0 && got[0][1] == 60 && got[0][4] == x[4] && got[0][5] == 0);
    expect(got[1][0] == 0 && got[1][1] == dout[1] && got[1][4] == dout[4] && got[1][5] == 0);
    Nums want, want_dinp, want_dbias[2];
    for (size_t i = 0; i < n; i++) {
        Num slope, value = twin_gelu(x[i], &slope);
        bool apart = i < 6 && i != 3;  // done above
        want.push_back(apart ? Num(got[0][i]) : value);
        want_dinp.push_back(apart ? Num(got[1][i]) : slope * dout[i]);
    }
    for (int k = 0; k < 2; k++) {  // column sums of dinp as it was rounded, and of dout
        const Reals &d = k ? dout : got[1];
        for (int c = 0; c < OC; c++) {
            want_dbias[k].push_back(sum_of(
                N + 1, [&](int i) { return Num(i == N ? dbias[c] : d[(size_t)i * OC + c]); }));
        }
    }
    compare_as(E, got[0], want, who + " out");
    compare_as(E, got[1], want_dinp, who + " dinp");
    compare_as(float, got[2], want_dbias[0], who + " dbias");
    compare_as(float, got[3], want_dbias[1], who + " dbias alone");
}

// Both directions and both column sums; far from zero exactly x, dout or 0.
static void test_gpu_gelu() {
    static const int shapes[][2] = {{1, 64}, {65, 80}, {130, 768}, {1500, 48}, {2100, 264}};
    for (auto &s : shapes) {
        in_both_types(check_gelu, s[0], s[1]);
    }
}

template <class E, class G> static void check_matmul(int N, int C, int OC) {
    const Text who = text("N %d C %d OC %d G %zu", N, C, OC, sizeof(G));
    Reals inp = noise_in<E>(N * C, 1, 1), w = noise_in<E>(OC * C, 0.2, 2),
          b = noise_in<E>(OC, 1, 3);
    Reals addend = noise_in<E>(N * OC, 1, 4), dout = noise_in<E>(N * OC, 1, 5);
    Reals dw = noise_in<G>(OC * C, 1, 6), db = noise(OC, 1, 7);
    Outputs got = every_order(
        [&] {
            Device<char> workspace(4 << 20);
            gpu_matmul_open(workspace.p, workspace.n);
            Device<E> d_inp(inp), d_w(w), d_b(b), plain(addend.size()), sum(addend), d_dout(dout);
            Device<E> dinp(inp.size());
            Device<G> d_dw(dw), written(dw.size());
            Device<float> d_db(db), scratch(gpu_bias_backward_bytes(N, OC) / 4);
            gpu_matmul_forward<E>(plain.p, d_inp.p, d_w.p, nullptr, nullptr, N, C, OC, 0);
            gpu_matmul_forward<E>(sum.p, d_inp.p, d_w.p, d_b.p, sum.p, N, C, OC, 0);
            gpu_matmul_backward<E, G>(dinp.p, d_dw.p, d_db.p, d_dout.p, d_inp.p, d_w.p, scratch.p,
                                      N, C, OC, false, 0);
            gpu_matmul_backward<E, G>(d_inp.p, written.p, nullptr, d_dout.p, d_inp.p, d_w.p,
                                      nullptr, N, C, OC, true, 0);
            Outputs all = {plain.get(), sum.get(),  dinp.get(),
                           d_dw.get(),  d_db.get(), written.get()};
            expect(same_bits(all[2], d_inp.get()), "%s: in place", who.c_str());
            gpu_matmul_close();
            return all;
        },
        who);
    Nums want = twin_matmul(inp, w, N, C, OC), want_sum = plus(want, addend), want_dinp, none;
    Nums want_dw = nums(dw), want_db = nums(db), zero(dw.size()), zero_db(db.size());
    twin_matmul_backward(&want_dinp, &want_dw, &want_db, dout, inp, w, N, C, OC);
    twin_matmul_backward(&none, &zero, &zero_db, dout, inp, w, N, C, OC);
    for (int i = 0; i < N * OC; i++) {  // a library may start from the addend
        want_sum[i] = want_sum[i] + b[i % OC];
        want_sum[i].e += sum_error(C) * (size(b[i % OC]) + size(addend[i]));
    }
    compare_as(E, got[0], want, who + " product");
    compare_as(E, got[1], want_sum, who + " with bias, in place");
    compare_as(E, got[2], want_dinp, who + " dinp");
    compare_as(G, got[3], want_dw, who + " dweight");
    compare_as(float, got[4], want_db, who + " dbias");
    compare_as(G, got[5], zero, who + " dweight, written");
}

// Widths of C, 3 C and 4 C; few and many rows.
static void test_gpu_matmul() {
    static const int shapes[][3] = {{1, 48, 144},  {65, 80, 240}, {130, 16, 64}, {7, 192, 64},
                                    {33, 64, 384}, {3, 1600, 40}, {257, 32, 24}};
    for (auto &s : shapes) {
        check_matmul<float, float>(s[0], s[1], s[2]);
        check_matmul<bf16, bf16>(s[0], s[1], s[2]);
        check_matmul<bf16, float>(s[0], s[1], s[2]);
    }
}

// What a computation in bf16 rounds in attention.
static Num in_bf16(Num x) { return Num((wide)rounded_to<bf16>((real)x.v)); }

// bf16: norm of the difference to the exact result at most twice that of a naive computation.
static void expect_naive_at(int line, const Reals &got, const Nums &want, const Nums &naive,
                            const Text &who) {
    double error = 0, loss = 0, e = 0;
    for (size_t i = 0; i < want.size(); i++) {
        double v = (double)want[i].v, n = (double)naive[i].v;
        error += ((double)got[i] - v) * ((double)got[i] - v);
        loss += (n - v) * (n - v);
        e += want[i].e * want[i].e;
    }
    near_at(line, (wide)sqrt(error), 0, 2 * sqrt(loss) + sqrt(e), who + " bf16");
}

template <class E> static void check_attention(int B, int T, int HS, int NH, double sharp) {
    const int C = NH * HS, n = B * T * C;
    const Text who = text("B %d T %d heads %d of %d x %g", B, T, NH, HS, sharp);
    Reals qkv = noise_in<E>(3 * n, sharp, 1), dout = noise_in<E>(n, 1, 2);
    Outputs got = every_order(
        [&] {
            Device<E> d_qkv(qkv), d_dout(dout), out(n), dqkv(3 * n);
            Device<float> lse(B * NH * T), drow(B * NH * T);
            gpu_attention_forward<E>(out.p, lse.p, d_qkv.p, B, T, C, NH, 0);
            gpu_attention_backward<E>(dqkv.p, drow.p, d_dout.p, d_qkv.p, out.p, lse.p, B, T, C, NH,
                                      0);
            return Outputs{out.get(), lse.get(), dqkv.get()};
        },
        who);
    Nums want[2][3];  // exact, and naive in bf16
    for (int k = 0; k < 2; k++) {
        want[k][0] = Nums(n), want[k][1] = Nums(B * NH * T), want[k][2] = Nums(3 * n);
        for (int head = 0; head < B * NH && (k == 0 || sizeof(E) == 2); head++) {
            twin_attention(&want[k][0], &want[k][1], &want[k][2], qkv, dout, head / NH, head % NH,
                           T, C, NH, k ? in_bf16 : as_it_is);
        }
    }
    for (Num &lse : want[0][1]) {  // the kernels keep base 2
        lse = lse * Num((wide)1.4426950408889634L);
    }
    compare_as(float, got[1], want[0][1], who + " lse");
    if (sizeof(E) == 2) {
        expect_naive_at(__LINE__, got[0], want[0][0], want[1][0], who + " out");
        expect_naive_at(__LINE__, got[2], want[0][2], want[1][2], who + " dqkv");
    } else {
        compare_as(E, got[0], want[0][0], who + " out");
        compare_as(E, got[2], want[0][2], who + " dqkv");
    }
}

// Lengths around the tiles' edges, heads of 8 to 128 channels, flat and sharp scores.
static void test_gpu_attention() {
    static const int shapes[][4] = {
        {1, 1, 16, 5},  {2, 1, 64, 3},   {3, 2, 80, 1},   {1, 63, 64, 3},  {2, 64, 32, 2},
        {1, 65, 64, 3}, {1, 65, 128, 1}, {2, 33, 16, 5},  {1, 129, 64, 1}, {1, 130, 128, 2},
        {1, 130, 8, 3}, {1, 257, 64, 1}, {1, 200, 120, 1}};  // B, T, head size, heads
    for (auto &s : shapes) {
        in_both_types(check_attention, s[0], s[1], s[2], s[3], 1);
    }
    in_both_types(check_attention, 1, 130, 64, 2, 4);
    in_both_types(check_attention, 1, 100, 16, 1, 8);
}

// __expf: 2 + floor(1.173 |x|) units in the last place (CUDA C++ Programming Guide, "Intrinsic
// Functions").
static Num num_fast_exp(Num x) {
    Num e = num_exp(x);
    return Num(e.v, e.e + (2 + 1.173 * size(x.v)) * 2 * unit * size(e.v));
}

template <class E> static void check_classifier(int rows, int V, double sharp) {
    const Text who = text("rows %d V %d x %g", rows, V, sharp);
    const int Vp = (int)round_up_i64(V, 128);
    const real dloss = (real)(1.0 / 300);
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
            gpu_classifier(losses.p, d_logits.p, d_targets.p, dloss, rows, V, Vp, false, 0);
            expect(same_bits(d_logits.get(), logits), "%s: evaluation keeps them", who.c_str());
            gpu_classifier(again.p, d_logits.p, d_targets.p, dloss, rows, V, Vp, true, 0);
            expect(same_bits(losses.get(), again.get()), "%s: losses", who.c_str());
            return Outputs{losses.get(), d_logits.get()};
        },
        who);
    Nums want, want_d(logits.size());  // padding: 0, tolerance 0
    twin_classifier(&want, &want_d, logits, targets, dloss, V, Vp,
                    sizeof(E) == 2 ? num_fast_exp : num_exp);
    compare_as(float, got[0], want, who + " losses");
    compare_as(E, got[1], want_d, who + " dlogits");
}

// Vocabularies of one pack to the largest; padding that would win every softmax.
static void test_gpu_classifier() {
    static const int shapes[][2] = {{2, 5}, {1, 257}, {65, 257}, {2, 50257}, {1, 65536}};
    for (auto &s : shapes) {
        in_both_types(check_classifier, s[0], s[1], 1);
        in_both_types(check_classifier, s[0], s[1], 20);
    }
}

// Two matrices and a vector of odd sizes with gaps between them, as a table of ranges.
static std::vector<ParamRange> three_ranges(int *chunks) {
    std::vector<ParamRange> ranges = {{64, 0, 0, 24008, 130, 1, 0},
                                      {24136, 0, 0, 72, 131, 0, 0},
                                      {24272, 24072, 800, 48, 132, 1, 0}};
    *chunks = param_ranges_chunk(ranges.data(), 3);
    return ranges;
}

// Three steps (clipped, not clipped, skipped) beside the AdamW of chapter Optimizer and schedules.
// States kept exactly must have its bits. A state in 16 bits alone is rounded stochastically: to
// one of its two neighbours, and without bias, its mean within four deviations; its run ends after
// one step.
template <class E, class G, class M, bool SPLIT> static void check_adamw(const char *who) {
    enum { N = 24384, N2 = 24120, N1 = 72 };
    const bool exact_p = SPLIT || sizeof(E) == 4, exact_m = sizeof(M) == 4;
    const int steps = exact_p && exact_m ? 3 : 1;
    int chunks;
    std::vector<ParamRange> ranges = three_ranges(&chunks);
    Reals p = noise(N, 0.02, 1), m(N), v(N);
    std::vector<uint16_t> low(N), high(N);
    for (int i = 0; i < N; i++) {
        p[i] = i % 97 ? exact_p ? p[i] : rounded_to<E>(p[i]) : 0;
        uint32_t bits;
        memcpy(&bits, &p[i], 4);
        high[i] = (uint16_t)((bits + 0x8000) >> 16);
        low[i] = (uint16_t)bits;
    }
    Device<E> d_p(p);
    if (SPLIT) {
        cuda_check(cudaMemcpy(d_p.p, high.data(), N * 2, cudaMemcpyHostToDevice));
    }
    Device<uint16_t> d_low(low);
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
        gpu_grad_square_sum(state.p, scratch.p, d_g2.p, d_g1.p, d_ranges.p, 3, chunks, 0);
        gpu_update_decide(state.p, clip, step == 3 ? 1e-9f : INFINITY, 0);
        AdamW a = {1e-2f, 0.9f, 0.95f, 1 - powf(0.9f, (float)step), 1 - powf(0.95f, (float)step),
                   1e-8f, 0.1f, 1.0f};
        gpu_adamw<E, G, M, SPLIT>(d_p.p, SPLIT ? d_low.p : nullptr, d_m.p, d_v.p, d_g2.p, d_g1.p,
                                  d_ranges.p, 3, chunks, a, UpdateRandom{1234, step}, state.p, 0);
        UpdateState now = state.raw()[0];
        expect_near(now.norm, (wide)sqrt(squares), sum_error(N) * sqrt(squares), "%s: norm", who);
        expect(now.scale == (clip > 0 && now.norm > clip ? clip / now.norm : 1), "%s: clip", who);
        expect(now.skip == (step == 3) && now.skipped == (step == 3), "%s: skip", who);
        for (const ParamRange &r : ranges) {
            a.grad_scale = now.scale;
            if (!now.skip) {
                adamw_update(&p[r.param], &m[r.param], &v[r.param],
                             r.two_dimensional ? &g2[r.grad] : g1.data(), &a,
                             r.two_dimensional ? a.weight_decay : 0, (int64_t)r.count);
            }
        }
    }
    Reals got_p = d_p.get(), got_m = d_m.get(), got_v = d_v.get();
    if (SPLIT) {
        master_download(got_p.data(), (const bf16 *)d_p.p, d_low.p, N, 0);
    }
    expect(!exact_p || same_bits(got_p, p), "%s: weights, and what lies between them", who);
    expect(!exact_m || (same_bits(got_m, m) && same_bits(got_v, v)), "%s: moments", who);
    auto unbiased = [&](const Reals &got, const Reals &want, const char *name) {
        double bias = 0, count = 0;
        for (const ParamRange &r : ranges) {
            for (size_t i = r.param; i < r.param + r.count; i++) {
                if (want[i] != 0) {
                    double error = ((double)got[i] - (double)want[i]) / fabs((double)want[i]);
                    expect_near((wide)error, 0, 2 * bf16_unit, "%s: %s %zu", who, name, i);
                    bias += error;
                    count++;
                }
            }
        }
        expect_near((wide)(bias / count), 0, 4 * bf16_unit / sqrt(count), "%s: %s, bias", who,
                    name);
    };
    if (!exact_p) {
        unbiased(got_p, p, "p");
    }
    if (!exact_m) {
        unbiased(got_m, m, "m");
        unbiased(got_v, v, "v");
    }
}

static void test_gpu_adamw() {
    check_adamw<float, float, float, false>("fp32");
    check_adamw<bf16, bf16, float, true>("split master");
    check_adamw<bf16, float, float, true>("split master, fp32 gradients");
    check_adamw<bf16, bf16, bf16, true>("split master, bf16 moments");
    check_adamw<bf16, bf16, bf16, false>("no master, bf16 moments");
    check_adamw<bf16, float, float, false>("no master, fp32 gradients");
}

// A tensor in two parts, as two ranks have it, is rounded as in one; whatever the order of blocks.
static void test_gpu_rounding() {
    enum { N = 20000, CUT = 8816 };
    Reals p = noise_in<bf16>(N, 1, 1), g = noise_in<bf16>(N, 1, 2), zero(N);
    auto update = [&](int parts) {
        return every_order(
            [&] {
                size_t first = parts == 1 ? N : CUT;
                std::vector<ParamRange> ranges = {{0, 0, 0, first, 130, 1, 0}};
                if (parts == 2) {
                    ranges.push_back({CUT, CUT, CUT, N - CUT, 130, 1, 0});
                }
                int chunks = param_ranges_chunk(ranges.data(), parts);
                Device<bf16> d_p(p), m(zero), v(zero), d_g(g);
                Device<ParamRange> d_ranges(ranges);
                Device<UpdateState> state(std::vector<UpdateState>{{0, 1, 1, 0, 0}});
                AdamW a = {1e-3f, 0.9f, 0.95f, 0.1f, 0.05f, 1e-8f, 0.1f, 1.0f};
                gpu_adamw<bf16, bf16, bf16, false>(d_p.p, nullptr, m.p, v.p, d_g.p,
                                                   (float *)nullptr, d_ranges.p, parts, chunks, a,
                                                   UpdateRandom{7, 1}, state.p, 0);
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
        std::vector<ParamRange> ranges = {{0, 0, 0, 20000, 0, 1, 0}};
        int chunks = param_ranges_chunk(ranges.data(), 1);
        Reals g(20000, 1);
        g[17001] = bad;
        Device<float> d_g(g), scratch(gpu_grad_square_sum_bytes() / 4);
        Device<ParamRange> d_ranges(ranges);
        Device<UpdateState> state(std::vector<UpdateState>(1));
        gpu_grad_square_sum(state.p, scratch.p, d_g.p, d_g.p, d_ranges.p, 1, chunks, 0);
        gpu_update_decide(state.p, 1.0f, INFINITY, 0);
        UpdateState now = state.raw()[0];
        expect(now.skip == 1 && now.skipped == 1, "%g", (double)bad);
    }
}

// -------------------------------------------------------------------------------------------------
// 12. The network on a GPU
// Volume II's chapters The device arena and GPT-2 on the GPU against the oracle: every gradient,
// several steps, in both types; what must be equal to the bit; the one allocation, and rows used
// outside their lives.

// An oracle with the weights of another network as the device computes with them.
struct Oracle : Net {
    Oracle(Net *gpu, int logit_rows) : Net(gpu->s.model, gpu->s.B, gpu->s.T, 0, -1, logit_rows) {
        engine_copy(&e, &gpu->e, STATE_WEIGHTS, &gpu->s.model, gpu->s.dtype == TYPE_BF16);
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

static void round_all(real *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        x[i] = rounded_to<bf16>(x[i]);
    }
}

// While the oracle computes as bf16 would, its plan: whenever a row comes alive or dies, which is
// at every tick, the activations and gradients alive by then are rounded. Statistics stay fp32.
static Plan *rounded_plan;
static void mark_and_round(void *memory, size_t bytes, int alive) {
    plan_mark(memory, bytes, alive);
    for (int i = 0; i < rounded_plan->row_count; i++) {
        const Row *row = &rounded_plan->rows[i];
        if (row->alive && (row->group == GROUP_KEPT || row->group == GROUP_WORKING) &&
            !strstr(row->name, "mean") && !strstr(row->name, "rstd") && !strstr(row->name, "lse")) {
            round_all((real *)(void *)(rounded_plan->base + row->offset), row->count);
        }
    }
}

// A micro-step of the oracle with every tensor that bf16 would keep rounded where it is made:
// weights, activations, logits, their gradients, and the gradients of matrices in the end.
static void naive_bf16_micro_step(Net *n, const Batch &b) {
    Network *net = n->net();
    Plan *p = rounded_plan = &net->plan;
    const Model *m = &n->s.model;
    const int B = n->s.B, T = n->s.T, N = B * T;
    p->mark = mark_and_round;
    memset(network_single(net, ROW_GRADS), 0, p->rows[p->single[ROW_GRADS]].bytes);
    network_forward(net, b.inputs.data(), B, T);
    plan_tick(p, tick_head(m));
    real *logits = network_single(net, ROW_LOGITS), *lnf = network_single(net, ROW_LNF);
    real *wte = network_tensor(net, ROW_WEIGHTS, WTE, 0);
    matmul_forward(logits, lnf, wte, NULL, NULL, N, m->C, m->Vp);
    round_all(logits, (int64_t)N * m->Vp);
    classifier_forward_backward(network_single(net, ROW_LOSSES), logits, b.targets.data(),
                                (real)(1.0 / N), N, m->V, m->Vp, 1);
    round_all(logits, (int64_t)N * m->Vp);
    matmul_backward(lnf, network_tensor(net, ROW_GRADS, WTE, 0), NULL, logits, lnf, wte, N, m->C,
                    m->Vp);
    plan_tick(p, tick_lnf_backward(m));
    layernorm_backward(network_single(net, ROW_DRES), network_tensor(net, ROW_GRADS, LNFW, 0),
                       network_tensor(net, ROW_GRADS, LNFB, 0), lnf, network_single(net, ROW_XF),
                       network_tensor(net, ROW_WEIGHTS, LNFW, 0), network_single(net, ROW_LNF_MEAN),
                       network_single(net, ROW_LNF_RSTD), NULL, N, m->C);
    for (int l = m->L - 1; l >= 0; l--) {
        block_backward(net, l);
    }
    plan_tick(p, tick_embed_backward(m));
    encoder_backward(network_tensor(net, ROW_GRADS, WTE, 0), network_tensor(net, ROW_GRADS, WPE, 0),
                     network_single(net, ROW_DRES), b.inputs.data(), B, T, m->C);
    p->mark = plan_mark;
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(m, tensor) && tensor_is_matrix(tensor); l++) {
            round_all(network_tensor(net, ROW_GRADS, tensor, l), tensor_size(m, tensor));
        }
    }
}

// Every gradient in bf16: at most twice the error of the naive bf16 computation above, both
// measured from the oracle in fp32 with the same weights.
static void test_gpu_gradients_bf16() {
    for (auto &row : gpu_shapes) {
        Model m = shape(row.e, row.V);
        Net n(m, row.options);
        Oracle exact(&n, n.s.B * n.s.T), naive(&n, n.s.B * n.s.T);
        Batch b(n.s.B * n.s.T, m.V, 1);
        n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
        exact.e.micro_step(&exact.e, b.inputs.data(), b.targets.data(), 0, 1);
        naive_bf16_micro_step(&naive, b);
        for (int tensor = 0; tensor < TENSORS; tensor++) {
            double error = gradient_error(&n.e, &exact.e, &m, tensor);
            double loss = gradient_error(&naive.e, &exact.e, &m, tensor);
            expect_near((wide)error, 0, 2 * loss, "d%s of %s", tensor_table[tensor].name, row.e);
        }
    }
}

// Norm of the difference of two networks' weights over the way they went from `start`. Biases of
// keys are left out: a softmax does not see them, so their gradients are rounding and nothing else,
// and AdamW makes steps of full length of them.
static double distance(Net *a, Net *b, const Reals &start) {
    const Model *m = &a->s.model;
    Reals x = a->state(STATE_WEIGHTS), y = b->state(STATE_WEIGHTS);
    double difference = 0, way = 0;
    for (int l = 0; l < m->L; l++) {
        auto keys = x.begin() + tensor_offset(m, QKVB, l) + m->C;
        std::copy(keys, keys + m->C, y.begin() + (keys - x.begin()));
    }
    for (size_t i = 0; i < x.size(); i++) {
        difference += pow((double)x[i] - (double)y[i], 2);
        way += pow((double)y[i] - (double)start[i], 2);
    }
    return sqrt(difference / way);
}

// Eight optimizer steps of two micro-steps each beside the oracle's. fp32: the first steps of AdamW
// are signs of gradients, so an element whose gradient is nearly zero may go the other way: 1e-3 of
// the way allows for one in a million. bf16: the loss within 1 %.
static void test_gpu_steps() {
    for (const char *dtype : {"fp32", "bf16"}) {
        Model m = shape("l2h2c64t33", 257);
        Net n(m, Text("-b 2 -t 33 -r block --dtype ") + dtype);
        Oracle oracle(&n, 66);
        const bool fp32 = n.s.dtype == TYPE_FP32;
        engine_copy(&oracle.e, &n.e, STATE_WEIGHTS, &m, false);
        const Reals start = oracle.state(STATE_WEIGHTS);
        Options o;
        options_default(&o);
        o.weight_decay = 0.1;
        for (int step = 0; step < 8; step++) {
            Batch b(2 * 66, m.V, (uint64_t)(step % 2));
            StepResult r[2];
            for (Net *each : {&n, (Net *)&oracle}) {
                for (int k = 0; k < 2; k++) {
                    each->e.micro_step(&each->e, &b.inputs[(size_t)k * 66],
                                       &b.targets[(size_t)k * 66], k, 2);
                }
                r[each != &n] = each->e.update(&each->e, &o, 2e-3, HUGE_VAL, step);
            }
            double tol = fp32 ? 1e-5 : 0.01;
            expect_near((wide)r[0].loss, (wide)r[1].loss, tol * r[1].loss, "%s loss, step %d",
                        dtype, step);
            expect_near((wide)r[0].norm, (wide)r[1].norm, 5 * tol * r[1].norm, "%s norm, step %d",
                        dtype, step);
        }
        double way = distance(&n, &oracle, start);
        expect_near((wide)way, 0, fp32 ? 1e-3 : 0.5, "%s weights", dtype);
    }
}

// Losses, gradients and weights of two steps: the same for every level of recomputation, in every
// order of threads, and from one run to the next.
static void test_gpu_bits() {
    int runs = 0;
    for (const char *dtype : {"fp32", "bf16", "bf16 --grad-dtype fp32 --moments bf16 -w none"}) {
        if (TEST_ASAN && strcmp(dtype, "bf16") != 0) {
            continue;  // the other build has them
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
        for (const char *level :
             {"none", "gelu", "norm", "mlp", "qkv", "block", "block:0", "block:1", "block:2"}) {
            expect(run(level) == plain, "-r %s, %s", level, dtype);
        }
        expect(every_order([&] { return run("block:2"); }, dtype) == plain, "%s", dtype);
    }
    detail = text("%d runs", runs);
}

#if CUDA_CPU
// One cudaMalloc of exactly the planned bytes, and nothing after it.
static void test_gpu_allocation() {
    for (const char *options :
         {"-b 2 -t 33", "--dtype fp32 -r block", "-r block:1 --moments bf16 -w none",
          "--grad-dtype fp32 -r qkv --logit-rows 7"}) {
        Model m = shape("l2h2c48t40", 300);
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
        trace(&n, 2);
        expect(on_device() == one && emu::peak_bytes == one[0] && emu::allocs.size() == pinned + 1,
               "%s: peak %zu of %zu", options, emu::peak_bytes, one[0]);
        expect(pinned == 1, "%zu pinned allocations", pinned);
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
    Plan *p = &net->plan;
    plan_tick(p, 0);
    plan_tick(p, tick_head(&m));
    const Row &row = p->rows[p->single[ROW_LOGITS]];
    float *logits = gpu_single<float>(net, ROW_LOGITS);
    Reals fresh(8);
    state_download(fresh.data(), logits, 8, net->stream);
    expect(isnan((double)fresh[0]) && isnan((double)fresh[7]), "fresh rows are NaN");
    auto launch_on = [&](float *x) {
        return outcome(spawn([&] {
            gpu_gelu_forward<float>(x, x, 8, net->stream);
            cuda_check(cudaStreamSynchronize(net->stream));
        }));
    };
    expect(launch_on(logits).status == 0, "alive");
    Outcome behind = launch_on(logits + row.bytes / 4);
    plan_tick(p, tick_update(&m));
    expect_death(gpu_single<float>(net, ROW_LOGITS), "row logits lives from tick 18 to 18");
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
    for (const char *options : {"-b 2 -t 33 --dtype fp32", "-b 2 -t 33 --dtype bf16"}) {
        Model m = shape("l2h2c64t40", 300);
        Net n(m, options);
        Oracle oracle(&n, n.s.logit_rows);
        const size_t N = 2 * 33;
        Batch b((int)N, m.V, 1);
        Reals got(N), want(N);
        double mean = n.e.evaluate(&n.e, got.data(), b.inputs.data(), b.targets.data()), sum = 0;
        oracle.e.evaluate(&oracle.e, want.data(), b.inputs.data(), b.targets.data());
        for (real loss : got) {
            sum += (double)loss;
        }
        expect_near((wide)mean, (wide)(sum / N), 1e-6 * mean, "mean, %s", options);
        expect(n.e.evaluate(&n.e, NULL, b.inputs.data(), b.targets.data()) == mean, "without them");
        // fp32 as the gradients' 1e-5; bf16 rounds every logit.
        expect_near((wide)relative_error(got.data(), want.data(), (int64_t)N), 0,
                    n.s.dtype == TYPE_FP32 ? 1e-5 : 2 * bf16_unit, "losses, %s", options);
    }
}

// -------------------------------------------------------------------------------------------------
// 13. The GPU program
// train_gpt2cu_main() in children of the test, which never touches the device itself: what it
// refuses, its commands, checkpoints that either program goes on from, and that it learns.

// The whole GPU program in a child of this process.
static Outcome gpu_program(const Text &arguments, const std::function<void()> &before = nullptr) {
    return outcome(spawn([&] {
        Words words = split(arguments.c_str());
        std::vector<char *> argv = arguments_of(&words);
        if (before) {
            before();
        }
        exit(train_gpt2cu_main((int)argv.size(), argv.data()));
    }));
}

// One line, exit status 1, no checkpoint; what is at fault is named.
static void test_gpu_bad_input() {
    static const Refusal table[] = {
        {"--dtype fp16", "--dtype fp16 and --offload can be planned"},
        {"--offload moments,master", "--dtype fp16 and --offload can be planned"},
        {"--dtype bf16 -w 0 --offload master", "--offload master: there is no master copy"},
        {"--dtype fp32 --moments bf16", "--moments bf16 needs --dtype bf16"},
        {"--dtype fp32 --grad-dtype bf16", "--grad-dtype bf16 needs --dtype bf16"},
        {"--dtype fp64", "--dtype: 'fp64'"},
        {"-r block:3", "K from 0 to 2"},
    };
    static const Refusal shapes[] = {
        {"l2h2c20t16", "20 channels in 2 heads: a GPU takes channels that are a multiple of 8"},
        {"l2h4c16t16", "16 channels in 4 heads"},
        {"l1h1c136t16", "136 channels in 1 heads"},
        {"l1h64c8192t4", "at most 4096"},
        {"l2h3c16t16", "allowed are"},
    };
    auto large_gpu = [] {
#if CUDA_CPU
        emu::set.gpu_mem = 1L << 40;
#endif
    };
    write_corpus();
    const Text run = "-i train.bin -b 2 -x 2 -o out -e ";
    for (const Refusal &row : table) {
        expect_refused(gpu_program(run + "l2h2c16t16 " + row.arguments), row.words, row.arguments);
    }
    for (const Refusal &row : shapes) {
        expect_refused(gpu_program(run + row.arguments, large_gpu), row.words, row.arguments);
    }
#if CUDA_CPU
    Outcome none = gpu_program(run + "l2h2c16t16", [] { emu::set.gpus = 0; });
    expect_refused(none, "no NVIDIA GPU is visible", "no GPU");
    Outcome old = gpu_program(run + "l2h2c16t16", [] { emu::set.cc = 75; });
    expect_refused(old, "has no bf16; use --dtype fp32", "a GPU without bf16");
    expect_success(gpu_program(run + "l2h2c16t16 --quiet --dtype fp32", [] { emu::set.cc = 75; }),
                   "fp32 where there is no bf16");
    Outcome small = gpu_program("-i train.bin -b 64 -x 2 -e l4h2c64t16 -o small",
                                [] { emu::set.gpu_mem = 42000000; });
    expect_refused(small, ": short ", "too little memory");
    expect(small.err.find("-r ") != Text::npos && small.err.find(" frees ") != Text::npos,
           "remedies: %s", small.err.c_str());
#endif
    expect(names_in("small", "step").empty() && !exists("small/log.jsonl"), "nothing was begun");
    expect_success(gpu_program("-i train.bin -e l2h2c16t16 -b 2 -x 2 -o other --quiet"), "a run");
    Text kept = state_file("other", 2);
    expect_refused(gpu_program("-i train.bin -e l2h2c32t16 -b 2 -x 4 -o other -y 1 --quiet"),
                   "is of another run", "a checkpoint of another shape");
    expect(state_file("other", 2) == kept, "it stays as it was");
}

// --check agrees in all 17 numbers, --compare names two levels; --plan needs no GPU.
static void test_gpu_commands() {
    write_corpus();
    for (const char *arguments : {"--dtype fp32 -r norm", "--dtype bf16 -r block", "-w none"}) {
        Outcome o = gpu_program(Text("-i train.bin -e l2h2c32t16 -b 2 --check ") + arguments);
        expect_success(o, arguments);
        int ok = 0;
        for (size_t at = 0; (at = o.out.find("  ok\n", at)) != Text::npos; at++) {
            ok++;
        }
        expect(ok == TENSORS + 1, "%s: %d of 17 numbers agree", arguments, ok);
    }
    Outcome o = gpu_program("-i train.bin -e l2h2c16t16 -b 2 --compare");
    expect_success(o, "--compare");
    expect(o.out.find("\n-r none ") != Text::npos && o.out.find("\n-r block ") != Text::npos &&
           o.out.find("median of 9 steps") != Text::npos);
#if CUDA_CPU
    o = gpu_program("--plan -e d12", [] { emu::set.gpus = 0; });
    expect_success(o, "--plan");
    expect(o.out.find("memory plan of the GPU run") == 0, "%s", o.out.substr(0, 60).c_str());
#endif
}

// --eval in both programs: to the byte the same scores.
static void test_gpu_eval() {
    write_file("e.bin", eval_bytes(random_questions(3, 50257, 2)));
    const Text run = "-e l1h1c16t16 --eval e.bin --json -b 3 ";
    Outcome cpu = program(run), gpu = gpu_program(run + "--dtype fp32"), half = gpu_program(run);
    expect_success(cpu, "CPU");
    expect_success(gpu, "GPU, fp32");
    expect_success(half, "GPU, bf16");
    expect(gpu.out == cpu.out, "%s", gpu.out.c_str());
    expect(json_valid(half.out) && half.out.find("\"examples\":3,\"of\":3") != Text::npos);
}

// Weights of a checkpoint as numbers, without the low halves of their masters.
static Reals weights_of(const char *folder, int step) {
    ModelFile f;
    Reals all;
    model_file_open(&f, text("%s/step-%08d", folder, step).c_str());
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(&f.model, tensor); l++) {
            int64_t rows = tensor_rows(&f.model, tensor), cols = tensor_cols(&f.model, tensor);
            Reals part((size_t)(rows * cols));
            span_values(part.data(), file_span(f.spans, tensor, l), 0, rows * cols);
            all.insert(all.end(), part.begin(), part.end());
        }
    }
    model_file_close(&f);
    return all;
}

// Norm of the difference of two checkpoints' weights over the norm of the second.
static double weights_apart(const Reals &a, const Reals &b) {
    return a.size() == b.size() ? relative_error(a.data(), b.data(), (int64_t)a.size()) : NAN;
}

// A resumed run ends in the bytes of the uninterrupted one, whatever is recomputed meanwhile. What
// one program saved the other goes on from: the CPU's after the GPU's ends where the GPU's own
// does, to fp32's rounding.
static void test_gpu_checkpoints() {
    write_corpus();
    const Text run = "-i train.bin -j val.bin -v 3 -e l2h2c16t16 -b 2 -d 64 -x 6 -n 3 -y 1 -s 6 "
                     "-g 4 --quiet -o ";
    auto resume = [&](const char *folder, const Text &more, bool gpu) {
        checkpoint_remove(text("%s/step-00000006", folder).c_str());
        expect(names_in(folder, "step") == "step-00000003", "%s", folder);
        expect_success(gpu ? gpu_program(run + folder + more) : program(run + folder + more),
                       folder);
        expect(log_steps(Text(folder) + "/log.jsonl") == one_to(6), "log of %s", folder);
        return tensors_of(folder, 6);
    };
    for (const char *types : {" --dtype bf16", " --dtype fp32", " --moments bf16 -w none"}) {
        const char *folder = types[9] == 'b' ? "bf16" : types[9] == 'f' ? "fp32" : "none";
        expect_success(gpu_program(run + folder + types), folder);
        Text whole = tensors_of(folder, 6);
        expect(!whole.empty() && resume(folder, Text(types) + " -r block", true) == whole,
               "%s: resumed", folder);
    }
    Reals gpu = weights_of("fp32", 6);
    resume("fp32", "", false);
    expect_near((wide)weights_apart(weights_of("fp32", 6), gpu), 0, 1e-5,
                "the GPU's, resumed on the CPU");
    expect_success(program(run + "cpu"), "the CPU's");
    const Reals cpu = weights_of("cpu", 6);
    resume("cpu", " --dtype fp32 -r norm", true);
    expect_near((wide)weights_apart(weights_of("cpu", 6), cpu), 0, 1e-5,
                "the CPU's, resumed on the GPU");
    resume("cpu", " --dtype bf16", true);
    expect_near((wide)weights_apart(weights_of("cpu", 6), cpu), 0, 1e-2,
                "the CPU's, resumed in bf16");
    checkpoint_remove("cpu/step-00000006");
    const Outcome o = gpu_program("-i train.bin -e l2h2c16t16 -b 2 -d 64 -x 6 -y 1 -o cpu "
                                  "--dtype bf16 -w none --moments bf16");
    expect_success(o, "narrower types");
    for (const char *what : {"weights", "moments"}) {
        const Text said = Text(what) + " were fp32 in cpu/step-00000003 and are bf16 from here on";
        expect(o.out.find(said) != Text::npos, "no '%s'", said.c_str());
    }
}

// The losses of a log's steps.
static std::vector<double> losses_in(const Text &path) {
    std::vector<double> losses;
    const Text all = read_file(path);
    for (size_t at = 0; (at = all.find("\"loss\":", at)) != Text::npos; at += 7) {
        losses.push_back(strtod(&all[at + 7], NULL));
    }
    return losses;
}

// 200 steps in bf16 on real text stay within 1 % of the oracle's loss, each and every one.
static void test_gpu_learns() {
    const Text run = training_files(nullptr) + " -e l2h2c64t64 -b 2 -x 200 -l 1e-3 -u 20 -v 0 -r 1 "
                                               "--quiet -o ";
    Outcome oracle = program(run + "cpu"), gpu = gpu_program(run + "gpu");
    expect_success(oracle, "oracle");
    expect_success(gpu, "bf16");
    std::vector<double> want = losses_in("cpu/log.jsonl"), got = losses_in("gpu/log.jsonl");
    expect(want.size() == 200 && got.size() == 200, "%zu and %zu steps", want.size(), got.size());
    for (size_t i = 0; i < want.size() && i < got.size(); i++) {
        expect_near((wide)got[i], (wide)want[i], 0.01 * want[i], "loss of step %zu", i + 1);
    }
    double last = 0;
    for (size_t i = 180; i < 200 && i < got.size(); i++) {
        last += got[i] / 20;
    }
    expect(last < 3.5, "the last 20 losses are %.3f on average; a uniform guess has 5.55", last);
}
#endif

// -------------------------------------------------------------------------------------------------
// 14. The table
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
typedef struct {
    const char *name;
    void (*function)(void);
    int builds;
} Test;

#define T(name, builds)                                                                            \
    { #name, test_##name, builds }
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
    T(plan_allocation, FLOAT | DOUBLE),
    T(plan_refuse, HOST),
    T(arena, ALL),
    T(loader_coverage, HOST),
    T(loader_large, FLOAT),
    T(tokenizer, HOST),
    T(bpe_known, HOST),
    T(bpe_rules, HOST),
    T(bpe_files, HOST),
    T(bpe_samples, HOST),

    T(fuzz_findings, HOST),
    T(fast_maths, ALL),
    T(matmul_forward, ALL),
    T(matmul_backward, ALL),
    T(gelu, ALL),
    T(encoder, ALL),
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
    T(thread_bits, ALL),
    T(accumulation, ALL),
    T(network_facts, ALL),
    T(initialise, ALL),
    T(adamw, ALL),
    T(update, ALL),
    T(schedules, HOST),
    T(sampling, ALL),
    T(log, HOST),
    T(eval_scores, ALL),
    T(eval_network, ALL),
    T(eval_hostile, HOST),
    T(bad_options, HOST),
    T(bad_data, HOST),
    T(bad_output, HOST),
    T(checkpoint_folder, HOST),
    T(kill, HOST),
    T(signals, HOST),
    T(skipped_step, HOST),
    T(resident_memory, FLOAT),
    T(plan_command, HOST),
    T(eval_command, HOST),
    T(eval_checkpoint, HOST),
    T(overfit, ALL),
    T(training, FLOAT),
    T(sha256, HOST),
    T(json, HOST),
    T(model_accepted, HOST),
    T(llmc_model, HOST),
    T(model_refused, HOST),
    T(config_refused, HOST),
    T(model_saved, HOST),
    T(state_file, HOST),
    T(model_option, HOST),
    T(checkpoint_writes, HOST),
#if TEST_CUDA
    T(gpu_encoder, CUDA_ALL),
    T(gpu_layernorm, CUDA_ALL),
    T(gpu_gelu, CUDA_ALL),
    T(gpu_matmul, CUDA_ALL),
    T(gpu_attention, CUDA_ALL),
    T(gpu_classifier, CUDA_ALL),
    T(gpu_adamw, CUDA_ALL),
    T(gpu_rounding, CUDA_ALL),
    T(gpu_norm, CUDA_ALL),
    T(gpu_gradients_fp32, CUDA_ALL),
    T(gpu_gradients_bf16, CUDA_ALL),
    T(gpu_steps, CUDA_ALL),
    T(gpu_bits, CUDA_ALL),
    T(gpu_losses, CUDA_ALL),
#if CUDA_CPU
    T(gpu_allocation, CUDA_ALL),
    T(gpu_lifetimes, CUDA_ALL),
#endif
    T(gpu_bad_input, CUDA_ALL),
    T(gpu_commands, CUDA_ALL),
    T(gpu_eval, CUDA_ALL),
    T(gpu_checkpoints, CUDA_ALL),
    T(gpu_learns, CUDA),
#endif
};
#undef T

// One test in a process and a folder of its own; its exit status: 0, FAILED or SKIPPED
// from a test that came to its end, anything else is a failure too.
static int run_test(const Test *t) {
    double began = now_ms();
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(LIMIT_S);
        if (chdir(scratch.c_str()) != 0) {
            _exit(1);
        }
        enter(t->name);
        t->function();
        if (worst.share >= 0) {
            detail = worst.where + text("  max err %.1e  tol %.1e  %3.0f %%", worst.err, worst.tol,
                                        100 * worst.share);
        }
        printf("%-22s %s  %s", t->name, detail.c_str(), failures ? "FAILED" : "ok");
        exit(failures ? FAILED : 0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    if (WIFSIGNALED(status)) {
        printf("%-22s ended by signal %d  FAILED", t->name, WTERMSIG(status));
    } else if (WEXITSTATUS(status) == SKIPPED) {
        printf("%-22s skipped", t->name);
    } else if (WEXITSTATUS(status) != 0 && WEXITSTATUS(status) != FAILED) {
        printf("%-22s exit status %d  FAILED", t->name, WEXITSTATUS(status));
    }
    double seconds = (now_ms() - began) * 1e-3;
    printf("%s\n", seconds >= 1 ? text("  (%.1f s)", seconds).c_str() : "");
    return WIFSIGNALED(status) ? 1 : WEXITSTATUS(status);
}

// No argument asks for everything that this build runs.
static int is_asked_for(const Test *t, int argc, char **argv) {
    int asked = argc == 1;
    for (int a = 1; a < argc; a++) {
        asked |= strncmp(t->name, argv[a], strlen(argv[a])) == 0;
    }
    return asked && (t->builds & THIS_BUILD);
}

int main(int argc, char **argv) {
    // Where other work goes on, threads that spin at a barrier stand in their own way.
    if (!getenv("OMP_WAIT_POLICY")) {
        setenv("OMP_WAIT_POLICY", "passive", 1);
        execv("/proc/self/exe", argv);
    }
#if TEST_ASAN
    plan_mark = mark_for_asan;
#endif
    int passed = 0, failed = 0, skipped = 0, list = argc == 2 && strcmp(argv[1], "--list") == 0;
    char here[PATH_BYTES], folder[PATH_BYTES];
    check(getcwd(here, sizeof here), "no current folder");
    root = here;
    const char *base = getenv("TMPDIR");
    path_print(folder, "%s/test_gpt2.XXXXXX",
               base              ? base
               : exists("build") ? (root + "/build").c_str()
                                 : "/tmp");
    if (!list && !mkdtemp(folder)) {
        die("cannot make a folder for the tests, %s: %s", folder, strerror(errno));
    }
    scratch = folder;
    for (const Test &t : tests) {
        if (list && (t.builds & THIS_BUILD)) {
            puts(t.name);
        } else if (!list && is_asked_for(&t, argc, argv)) {
            int status = run_test(&t);
            passed += status == 0;
            skipped += status == SKIPPED;
            failed += status != 0 && status != SKIPPED;
        }
    }
    if (list) {
        return 0;
    }
    nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    if (passed + failed + skipped == 0) {
        die("no test is named so; --list names them");
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}
