// harness.h -- what every test program shares: a table of tests, one process and one folder for
// each, and one line each: what was compared at the worst place found, its error and the tolerance,
// how much of it was used, ok or FAILED.
//
// What it is: C++17 and the system's headers, nothing of the project's own code, so that a program
// can be driven as its user drives it. A test program ends in
//     TEST(name) { expect(1 + 1 == 2); }
//     int main(int argc, char **argv) { return harness_main(argc, argv); }
// and understands
//     NAME...          the tests whose names begin so; without one, all of them
//     --list           the names
//     --all            prints every comparison of numbers, not only the nearest miss
//     --here NAME      one test without a process of its own and without a time limit, for gdb; its
//                      folder stays
//     --program PATH   the built program to drive, where the tests drive one
// Its last line is `N passed, N failed, N skipped`; exit status 0 only when nothing failed.
//
// ALL and FULL, each set if neither empty nor 0, say how much is run: ALL the tests marked REST as
// well, and with the values `main` and `rest` one part alone; FULL all cases of a product that a
// test otherwise samples, and the tests marked REST. A name on the command line picks its test from
// either part.
//
// What it refuses to be: lenient. NaN fails everywhere, a test that dies or hangs has failed, and
// one that cannot run here says why.

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

// REST, beside any other bit: runs only in the part that ALL=1 adds.
enum { REST = 1 << 16 };

struct Test {
    const char *name;
    void (*function)();
    int runs;  // 0: this build leaves it out, because another one runs it with the same input
};

// TEST(name, builds) { ... } defines a test and lists it; tests run in the order of their
// definition. A program that is built in several ways defines THIS_BUILD, one bit, and gives the
// bits of the builds that run a test; without any, every build does. REST can be added.
#ifndef THIS_BUILD
#define THIS_BUILD 1
#endif
inline std::vector<Test> tests;
struct Listed {
    Listed(const char *name, void (*function)(), int builds = 0) {
        const int named = builds & ~REST;
        const int runs = !named || named & THIS_BUILD ? 1 | (builds & REST) : 0;
        tests.push_back({name, function, runs});
    }
};
#define TEST(name, ...)                                                                            \
    static void test_##name();                                                                     \
    static const Listed listed_##name(#name, test_##name, ##__VA_ARGS__);                          \
    static void test_##name()

inline Text root, scratch;        // where the repository is; the folder of all tests' folders
inline Text tested;               // the built program that program() starts
inline int failures;              // of this test
inline Text detail;               // what its line says
inline int shows_all, stays_here; // --all, --here
inline Text (*switches)();        // variables that repeat a run as it began, or NULL
inline struct {
    double err, tol, share;
    Text where;
} worst = {0, 0, -1, ""};

// Is a variable such as FULL set?
inline bool is_set(const char *name) {
    const char *value = getenv(name);
    return value && *value && strcmp(value, "0") != 0;
}

inline bool is_full() { return is_set("FULL"); }

// How many cases a test takes: `sample`, or `all` of them with FULL=1.
inline int full_or(int sample, int all) { return is_full() ? all : sample; }

// Seconds after which a test is ended: what FULL=1 draws takes longer. 0: never.
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

// Prints the first SHOWN things of a test that do not hold; all of them count.
inline void fail(const char *file, int line, const Text &what) {
    if (failures++ < SHOWN) {
        printf("    %s:%d: %s\n", file, line, what.c_str());
    }
}
#define expect(condition, ...)                                                                     \
    ((condition) ? (void)0                                                                         \
                 : fail(__FILE__, __LINE__, Text(#condition "  ") + text(" " __VA_ARGS__)))

// |got - want| <= tol. The nearest miss of the whole test goes into its line.
inline void near_at(const char *file, int line, long double got, long double want, double tol,
                    const Text &where) {
    double err = got == want ? 0 : fabs((double)(got - want));
    double share = err == 0 ? 0 : err / tol;
    const Text numbers = text("  got %.9g, want %.9g, tol %.1e", (double)got, (double)want, tol);
    if (!(err <= tol)) {
        share = HUGE_VAL;
        fail(file, line, where + numbers);
    } else if (shows_all) {
        printf("    %s%s, err %.1e\n", where.c_str(), numbers.c_str(), err);
    }
    if (share > worst.share) {
        worst = {err, tol, share, where};
    }
}
#define expect_near(got, want, tol, ...)                                                           \
    near_at(__FILE__, __LINE__, got, want, tol, text(__VA_ARGS__))

// Ends a test that cannot be run here.
__attribute__((noreturn)) inline void skip(const char *why) {
    printf("(%s) ", why);
    exit(SKIPPED);
}

// Ends the program, or the test, for want of something that every machine has.
__attribute__((noreturn)) inline void give_up(const Text &what) {
    fprintf(stderr, "tests: %s: %s\n", what.c_str(), strerror(errno));
    exit(1);
}

inline double wall_ms() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

// A number in [0, 1), a function of seed and index.
inline double random_unit(uint64_t seed, uint64_t index) {
    uint64_t z = (seed * 0x2545F4914F6CDD1Du + index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (double)(z >> 11) * 0x1p-53;
}

// -------------------------------------------------------------------------------------------------
// Files
// In the folder of the test, which is gone after it.

// The whole file; empty when there is none.
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

// The file holds `bytes` from now on, or the test ends.
inline void write_file(const Text &path, const Text &bytes) {
    FILE *f = fopen(path.c_str(), "wb");
    if (!f || fwrite(bytes.data(), 1, bytes.size(), f) != bytes.size() || fclose(f) != 0) {
        give_up("cannot write " + path);
    }
}

// The folder that the test works in.
inline Text current_folder() {
    char path[4096];
    return getcwd(path, sizeof path) ? path : "";
}

inline int exists(const Text &path) { return access(path.c_str(), F_OK) == 0; }

// Makes `folder` and goes there.
inline void enter(const Text &folder) {
    if ((mkdir(folder.c_str(), 0755) != 0 && errno != EEXIST) || chdir(folder.c_str()) != 0) {
        give_up("cannot enter " + folder);
    }
}

// Removes a folder and all that is in it; no error when it is not there.
inline void remove_folder(const Text &folder) {
    auto one = [](const char *path, const struct stat *, int, struct FTW *) {
        return remove(path);
    };
    nftw(folder.c_str(), one, 16, FTW_DEPTH | FTW_PHYS);
}

// -------------------------------------------------------------------------------------------------
// Programs
// Run as a user runs them; what came out is an Outcome.

struct Outcome {
    int status;  // exit status, or 256 + the signal that ended it
    Text out, err;
    double user_ms, resident_bytes;  // of the processor; the most memory that it held
};

// Starts `action` in a child whose output goes to the files `stdout` and `stderr`.
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

// Waits for a child of spawn().
inline Outcome outcome(pid_t pid) {
    int status = 0;
    struct rusage used = {};
    wait4(pid, &status, 0, &used);
    status = WIFSIGNALED(status) ? 256 + WTERMSIG(status) : WEXITSTATUS(status);
    return {status, read_file("stdout"), read_file("stderr"),
            (double)used.ru_utime.tv_sec * 1e3 + (double)used.ru_utime.tv_usec * 1e-3,
            (double)used.ru_maxrss * 1024};
}

// "a b  c" -> a, b, (nothing), c: an empty word is an argument too.
inline Words split(const char *arguments) {
    Words words;
    for (const char *a = arguments; *a;) {
        size_t n = strcspn(a, " ");
        words.push_back(Text(a, n));
        a += n + (a[n] == ' ');
    }
    return words;
}

// argv of a program; points into `words`.
inline std::vector<char *> arguments_of(Words *words) {
    std::vector<char *> argv = {(char *)"train_gpt2"};
    for (Text &word : *words) {
        argv.push_back(&word[0]);
    }
    return argv;
}

// Starts the built program at `path`, as seen from the repository; `before` prepares its process:
// limits, variables of the environment.
inline pid_t start_program(const Text &path, const Text &arguments,
                           const std::function<void()> &before = nullptr) {
    return spawn([&] {
        const Text from_root = path[0] == '/' ? path : root + "/" + path;
        Words words = split(arguments.c_str());
        std::vector<char *> argv = arguments_of(&words);
        argv.push_back(NULL);
        // Opened first: whom `before` turns this process into may not see the repository.
        const int fd = open(from_root.c_str(), O_RDONLY | O_CLOEXEC);
        if (before) {
            before();
        }
        fexecve(fd, argv.data(), environ);
        give_up("cannot run " + from_root);
    });
}

// Arguments that every run of the program that --program names gets behind its own.
inline Text more_arguments;

// The program that --program names.
inline pid_t start(const Text &arguments, const std::function<void()> &before = nullptr) {
    const bool apart = more_arguments.empty() || arguments.empty() || arguments.back() == ' ';
    return start_program(tested, arguments + (apart ? "" : " ") + more_arguments, before);
}

inline Outcome program(const Text &arguments, const std::function<void()> &before = nullptr) {
    return outcome(start(arguments, before));
}

// Is it built with sanitizers? Then memory it may take, and its speed, are no measure of it.
inline int has_sanitizers() { return tested.find("asan") != Text::npos; }

// Waits until `done`; after `limit` seconds the test has failed, and goes on.
inline void wait_until_at(const char *file, int line, const char *what,
                          const std::function<bool()> &done, double limit = 60) {
    for (const double began = wall_ms(); !done(); usleep(1000)) {
        if (wall_ms() - began > limit * 1e3) {
            return fail(file, line, text("not within %g s: %s", limit, what));
        }
    }
}
#define wait_until(...) wait_until_at(__FILE__, __LINE__, #__VA_ARGS__, __VA_ARGS__)

// Ended in one line on stderr that holds `words`, status 1, and no sanitizer's report.
inline void refused_at(const char *file, int line, const Outcome &o, const Text &words,
                       const Text &who) {
    int one_line = !o.err.empty() && o.err.find('\n') == o.err.size() - 1;
    if (o.status != 1 || !one_line || o.err.find(words) == Text::npos) {
        fail(file, line,
             who + text(": status %d, wanted 1 and one line with '%s'; stderr: ", o.status,
                        words.c_str()) + o.err.substr(0, 600));
    }
}
#define expect_refused(outcome, words, who) refused_at(__FILE__, __LINE__, outcome, words, who)
#define expect_death(action, words)                                                                \
    refused_at(__FILE__, __LINE__, outcome(spawn([&] { action; })), words, #action)

// Status 0 and a silent stderr.
inline void expect_success_at(const char *file, int line, const Outcome &o, const Text &who) {
    if (o.status != 0 || !o.err.empty()) {
        fail(file, line, who + text(": status %d, stderr: ", o.status) + o.err.substr(0, 600));
    }
}
#define expect_success(outcome, who) expect_success_at(__FILE__, __LINE__, outcome, who)

// -------------------------------------------------------------------------------------------------
// The table
// Tests by name: picked, listed, run in processes of their own, counted.

// The test in a folder of its own, and its line.
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

// The command that repeats one test alone, in the order that the program begins with.
inline void print_again(const Text &command, const Test *t) {
    printf("    again: %s%s --here %s\n", switches ? switches().c_str() : "", command.c_str(),
           t->name);
}

// Seconds of processors that the tests so far took, with all that they started.
inline double processor_s() {
    struct rusage used = {};
    getrusage(RUSAGE_CHILDREN, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

// One test in a process of its own; its exit status: 0, FAILED or SKIPPED from a test that came to
// its end, anything else is a failure too.
inline int run_apart(const Test *t, const Text &again) {
    const double began = wall_ms(), busy_before = processor_s();
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
    const double seconds = (wall_ms() - began) * 1e-3, busy = processor_s() - busy_before;
    printf("%s\n", seconds >= 1 ? text("  (%.1f s, processor %.1f s)", seconds, busy).c_str() : "");
    if (code != 0 && code != SKIPPED) {
        print_again(again, t);
    }
    return code;
}

// The folder that tests work in, below build/ where there is one.
inline Text make_scratch() {
    const char *base = getenv("TMPDIR");
    Text folder = (base ? Text(base) : exists("build") ? root + "/build" : Text("/tmp")) +
                  "/test.XXXXXX";
    if (!mkdtemp(&folder[0])) {
        give_up("cannot make a folder for the tests, " + folder);
    }
    return folder;
}

// The program to drive, copied into that folder: beside the one in the repository may lie data/,
// which it would find there.
inline Text copy_of_program(const Text &path) {
    const Text copy = scratch + "/" + path.substr(path.rfind('/') + 1);
    write_file(copy, read_file(path));
    if (chmod(copy.c_str(), 0755) != 0) {
        give_up("cannot copy the program to " + copy);
    }
    return copy;
}

struct Asked {
    int list;
    const char *here;
    Words names;
};

inline Asked harness_options(int argc, char **argv) {
    Asked asked = {0, NULL, {}};
    for (int a = 1; a < argc; a++) {
        const Text word = argv[a];
        if (word == "--list") {
            asked.list = 1;
        } else if (word == "--all") {
            shows_all = 1;
        } else if (word == "--here" && a + 1 < argc) {
            asked.here = argv[++a];
        } else if (word == "--program" && a + 1 < argc) {
            tested = argv[++a];
        } else if (word[0] == '-') {
            fprintf(stderr, "%s: unknown option; there are --list, --all, --here NAME and "
                            "--program PATH\n", argv[a]);
            exit(1);
        } else {
            asked.names.push_back(word);
        }
    }
    return asked;
}

inline int is_asked_for(const Test *t, const Asked *asked) {
    const char *all = getenv("ALL");
    const Text part = all ? all : "";
    const bool both = part != "main" && (is_set("ALL") || is_full());
    int wanted = asked->names.empty() &&
                 (t->runs & REST ? part == "rest" || both : part != "rest");
    for (const Text &name : asked->names) {
        wanted |= strncmp(t->name, name.c_str(), name.size()) == 0;
    }
    return wanted && t->runs;
}

// Runs the tests that the arguments name. `by_default`: the program to drive without --program.
inline int harness_main(int argc, char **argv, const char *by_default = "") {
    // Where other work goes on, threads that spin at a barrier stand in their own way.
    if (!getenv("OMP_WAIT_POLICY")) {
        setenv("OMP_WAIT_POLICY", "passive", 1);
        execv("/proc/self/exe", argv);
    }
    tested = by_default;
    const Asked asked = harness_options(argc, argv);
    char here[4096];
    root = getcwd(here, sizeof here) ? here : "";
    if (!asked.list && !tested.empty() && access(tested.c_str(), X_OK) != 0) {
        give_up("cannot drive " + tested);
    }
    int passed = 0, failed = 0, skipped = 0;
    const Text again = Text(argv[0]) + (tested == by_default ? "" : " --program " + tested);
    scratch = asked.list ? "" : make_scratch();
    if (!asked.list && !tested.empty()) {
        tested = copy_of_program(tested);
    }
    for (const Test &test : tests) {
        const Test *t = &test;
        if (asked.list && t->runs) {
            puts(t->name);
        } else if (asked.here && t->runs && strcmp(t->name, asked.here) == 0) {
            stays_here = 1;
            run_here(t);
            printf("\n    its files are in %s/%s\n", scratch.c_str(), t->name);
            return failures != 0;
        } else if (!asked.list && !asked.here && is_asked_for(t, &asked)) {
            int status = run_apart(t, again);
            passed += status == 0;
            skipped += status == SKIPPED;
            failed += status != 0 && status != SKIPPED;
        }
    }
    if (asked.list) {
        return 0;
    }
    remove_folder(scratch);
    if (passed + failed + skipped == 0 && !asked.names.empty()) {
        fprintf(stderr, "%s: no test is named so; --list names them\n", argv[0]);
        return 1;
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}
