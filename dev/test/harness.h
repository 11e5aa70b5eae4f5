// harness.h -- shared by all test programs: a registry of tests, each run in its own process and
// folder, and one line of output per test: the comparison closest to failing, its error and
// tolerance, the share of the tolerance that was used, and ok or FAILED.
//
// A test program defines tests with TEST(name) { expect(1 + 1 == 2); }, returns harness_main() from
// its main, and accepts
//     NAME...       run the tests whose names start with NAME; default: all
//     --list        print the names
//     --here NAME   run one test without a separate process or time limit, for gdb; its folder is
//                   kept
// The last line is `N passed, N failed, N skipped`; the exit status is 0 only if no test failed.
// With the environment variable FULL (neither empty nor 0), tests run every case of a cartesian
// product that they otherwise sample. NaN fails every comparison; a test that crashes or hangs has
// failed; a skipped test prints the reason.

#pragma once
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <functional>
#include <list>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define TEST_ASAN 1
#elif defined(__has_feature)
#define TEST_ASAN __has_feature(address_sanitizer)
#else
#define TEST_ASAN 0
#endif

typedef std::string Text;
typedef std::vector<Text> Words;
enum { LIMIT_S = 300, SHOWN = 5, FAILED = 76, SKIPPED = 77 };

struct Test {
    const char *name;
    void (*function)();
};

// TEST(name, builds) { ... } defines and registers a test; tests run in the order of their
// definitions. A program that is built in several variants defines THIS_BUILD as one bit, and
// `builds` is the set of variants that run the test; 0 means all.
#ifndef THIS_BUILD
#define THIS_BUILD 1
#endif
inline std::vector<Test> tests;
struct Listed {
    Listed(const char *name, void (*function)(), int builds = 0) {
        if (!builds || builds & THIS_BUILD) {
            tests.push_back({name, function});
        }
    }
};
#define TEST(name, ...)                                                                            \
    static void test_##name();                                                                     \
    static const Listed listed_##name(#name, test_##name, ##__VA_ARGS__);                          \
    static void test_##name()

inline Text root, scratch;        // the repository; the parent of all tests' folders
inline int failures;              // of the current test
inline Text detail;               // text of its output line
inline int stays_here;            // --here
inline Text (*switches)();        // returns the variables that reproduce the run; NULL: none
inline struct {
    double err, tol, share;
    Text where;
} worst = {0, 0, -1, ""};

inline bool is_full() {
    const char *value = getenv("FULL");
    return value && *value && strcmp(value, "0") != 0;
}

// Returns the number of cases a test runs: `sample`, or `all` with FULL=1.
inline int full_or(int sample, int all) { return is_full() ? all : sample; }

// Returns the time limit of a test in seconds; 0: none. FULL=1 runs more cases and needs longer.
inline unsigned limit_s() { return stays_here ? 0 : (unsigned)full_or(LIMIT_S, 3600); }

__attribute__((format(printf, 1, 2))) inline Text text(const char *format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    const int size = vsnprintf(NULL, 0, format, args);
    Text out(size < 0 ? 0 : (size_t)size, '\0');
    vsnprintf(&out[0], out.size() + 1, format, again);
    va_end(again);
    va_end(args);
    return out;
}

inline bool has(const Text &all, const Text &part) { return all.find(part) != Text::npos; }

// Counts a failed expectation and prints it if it is among the first SHOWN of its test.
inline void fail(const char *file, int line, const Text &what) {
    if (failures++ < SHOWN) {
        printf("    %s:%d: %s\n", file, line, what.c_str());
    }
}
#define expect(condition, ...)                                                                     \
    ((condition) ? (void)0                                                                         \
                 : fail(__FILE__, __LINE__, Text(#condition "  ") + text(" " __VA_ARGS__)))

// Expects |got - want| <= tol. The comparison closest to failing appears on the test's line.
inline void expect_near_at(const char *file, int line, long double got, long double want,
                           double tol, const Text &where) {
    double err = got == want ? 0 : fabs((double)(got - want));
    double share = err == 0 ? 0 : err / tol;
    if (!(err <= tol)) {
        share = HUGE_VAL;
        fail(file, line, where + text("  got %.9g, want %.9g, tol %.1e", (double)got, (double)want,
                                      tol));
    }
    if (share > worst.share) {
        worst = {err, tol, share, where};
    }
}
#define expect_near(got, want, tol, ...)                                                           \
    expect_near_at(__FILE__, __LINE__, got, want, tol, text(__VA_ARGS__))

__attribute__((noreturn)) inline void skip(const char *why) {
    printf("(%s) ", why);
    exit(SKIPPED);
}

// Ends the program or test because something that every machine should have is missing.
__attribute__((noreturn)) inline void give_up(const Text &what) {
    fprintf(stderr, "tests: %s: %s\n", what.c_str(), strerror(errno));
    exit(1);
}

inline double wall_ms() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

// Returns a number in [0, 1) that depends only on seed and index.
inline double random_unit(uint64_t seed, uint64_t index) {
    uint64_t z = (seed * 0x2545F4914F6CDD1Du + index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (double)(z >> 11) * 0x1p-53;
}

// --- Files ---------------------------------------------------------------------------------------
// Paths are relative to the test's folder, which is removed afterwards.

// Returns the contents of a file; empty if it does not exist.
inline Text read_file(const Text &path) {
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

// Replaces the file's contents with `bytes`; ends the test on failure.
inline void write_file(const Text &path, const Text &bytes) {
    FILE *f = fopen(path.c_str(), "wb");
    if (!f || fwrite(bytes.data(), 1, bytes.size(), f) != bytes.size() || fclose(f) != 0) {
        give_up("cannot write " + path);
    }
}

inline int exists(const Text &path) { return access(path.c_str(), F_OK) == 0; }

inline void enter(const Text &folder) {
    if ((mkdir(folder.c_str(), 0755) != 0 && errno != EEXIST) || chdir(folder.c_str()) != 0) {
        give_up("cannot enter " + folder);
    }
}

// Removes a folder recursively; a missing folder is not an error.
inline void remove_folder(const Text &folder) {
    auto one = [](const char *path, const struct stat *, int, struct FTW *) {
        return remove(path);
    };
    nftw(folder.c_str(), one, 16, FTW_DEPTH | FTW_PHYS);
}

// --- Child processes -----------------------------------------------------------------------------
// What a child process wrote and how it ended is an Outcome.

struct Outcome {
    int status;  // exit status, or 256 + the signal that ended it
    Text out, err;
};

// Runs `action` in a child process that writes to the files `stdout` and `stderr`.
inline pid_t spawn(const std::function<void()> &action) {
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        failures = 0;
        if (!freopen("stdout", "w", stdout) || !freopen("stderr", "w", stderr)) {
            _exit(99);
        }
        alarm(limit_s());
        action();
        exit(failures ? 1 : 0);
    }
    return pid;
}

inline Outcome outcome(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    status = WIFSIGNALED(status) ? 256 + WTERMSIG(status) : WEXITSTATUS(status);
    return {status, read_file("stdout"), read_file("stderr")};
}

// Splits at single spaces: "a b  c" -> a, b, (empty), c. An empty word is a valid argument.
inline Words split(const char *arguments) {
    Words words;
    for (const char *a = arguments; *a;) {
        size_t n = strcspn(a, " ");
        words.push_back(Text(a, n));
        a += n + (a[n] == ' ');
    }
    return words;
}

inline std::vector<char *> arguments_of(Words *words) {
    std::vector<char *> argv = {(char *)"train_gpt2"};
    for (Text &word : *words) {
        argv.push_back(&word[0]);
    }
    return argv;
}

// Expects exit status 1 and exactly one line on stderr, which contains `words`.
inline void refused_at(const char *file, int line, const Outcome &o, const Text &words,
                       const Text &who, int status = 1) {
    int one_line = !o.err.empty() && o.err.find('\n') == o.err.size() - 1;
    if (o.status != status || !one_line || !has(o.err, words)) {
        fail(file, line,
             who + text(": status %d, wanted %d and one line with '%s'; stderr: ", o.status, status,
                        words.c_str()) + o.err.substr(0, 600));
    }
}
#define expect_refused(outcome, words, who) refused_at(__FILE__, __LINE__, outcome, words, who)
// Like expect_refused, with status 3: it does not fit in memory.
#define expect_too_large(outcome, words, who)                                                      \
    refused_at(__FILE__, __LINE__, outcome, words, who, 3)
#define expect_death(action, words)                                                                \
    refused_at(__FILE__, __LINE__, outcome(spawn([&] { action; })), words, #action)

inline void expect_success_at(const char *file, int line, const Outcome &o, const Text &who) {
    if (o.status != 0 || !o.err.empty()) {
        fail(file, line, who + text(": status %d, stderr: ", o.status) + o.err.substr(0, 600));
    }
}
#define expect_success(outcome, who) expect_success_at(__FILE__, __LINE__, outcome, who)

// --- Running the tests ---------------------------------------------------------------------------
// Selects tests by name, lists them, runs each in its own process, and counts results.

inline void run_here(const Test *t) {
    if (chdir(scratch.c_str()) != 0) {
        give_up("cannot enter " + scratch);
    }
    enter(t->name);
    t->function();
    if (worst.share >= 0) {
        detail = worst.where + text("  max err %.1e  tol %.1e  %3.0f %%", worst.err, worst.tol,
                                    100 * worst.share);
    }
    printf("%-22s %s  %s", t->name, detail.c_str(), failures ? "FAILED" : "ok");
}

// Runs one test in its own process. Returns its exit status: 0, FAILED or SKIPPED if the test
// finished; any other value also counts as a failure.
inline int run_in_child(const Test *t, const char *program) {
    const double began = wall_ms();
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(limit_s());
        run_here(t);
        exit(failures ? FAILED : 0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    const int code = WIFSIGNALED(status) ? 1 : WEXITSTATUS(status);
    if (WIFSIGNALED(status)) {
        printf("%-22s ended by signal %d  FAILED", t->name, WTERMSIG(status));
    } else if (code == SKIPPED) {
        printf("%-22s skipped", t->name);
    } else if (code != 0 && code != FAILED) {
        printf("%-22s exit status %d  FAILED", t->name, code);
    }
    const double seconds = (wall_ms() - began) * 1e-3;
    printf("%s\n", seconds >= 1 ? text("  (%.1f s)", seconds).c_str() : "");
    if (code != 0 && code != SKIPPED) {
        printf("    again: %s%s --here %s\n", switches ? switches().c_str() : "", program, t->name);
    }
    return code;
}

// Creates the parent of the tests' folders: in $TMPDIR, else in build/ if it exists, else in /tmp.
inline Text make_scratch() {
    const char *base = getenv("TMPDIR");
    Text folder = (base ? Text(base) : exists("build") ? root + "/build" : Text("/tmp")) +
                  "/test.XXXXXX";
    if (!mkdtemp(&folder[0])) {
        give_up("cannot make a folder for the tests, " + folder);
    }
    return folder;
}

inline int harness_main(int argc, char **argv) {
    // On a busy machine, threads that spin at a barrier take processor time from each other.
    if (!getenv("OMP_WAIT_POLICY")) {
        setenv("OMP_WAIT_POLICY", "passive", 1);
        execv("/proc/self/exe", argv);
    }
    bool lists = false;
    const char *here = NULL;
    Words names;
    for (int a = 1; a < argc; a++) {
        const Text word = argv[a];
        if (word == "--list") {
            lists = true;
        } else if (word == "--here" && a + 1 < argc) {
            here = argv[++a];
        } else if (word[0] == '-') {
            fprintf(stderr, "%s: unknown option; expected --list or --here NAME\n", argv[a]);
            return 1;
        } else {
            names.push_back(word);
        }
    }
    char folder[4096];
    root = getcwd(folder, sizeof folder) ? folder : "";
    scratch = lists ? "" : make_scratch();
    int passed = 0, failed = 0, skipped = 0;
    for (const Test &t : tests) {
        bool asked = names.empty();
        for (const Text &name : names) {
            asked |= strncmp(t.name, name.c_str(), name.size()) == 0;
        }
        if (lists) {
            puts(t.name);
        } else if (here && strcmp(t.name, here) == 0) {
            stays_here = 1;
            run_here(&t);
            printf("\n    its files are in %s/%s\n", scratch.c_str(), t.name);
            return failures != 0;
        } else if (!here && asked) {
            const int status = run_in_child(&t, argv[0]);
            passed += status == 0;
            skipped += status == SKIPPED;
            failed += status != 0 && status != SKIPPED;
        }
    }
    if (lists) {
        return 0;
    }
    remove_folder(scratch);
    if (passed + failed + skipped == 0) {
        fprintf(stderr, "%s: no test has that name; --list prints the names\n", argv[0]);
        return 1;
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}
