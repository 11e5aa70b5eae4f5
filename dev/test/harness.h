// harness.h -- shared by all test programs: a registry of tests, each run in its own process and
// folder, and one line of output per test: the comparison closest to failing, its error and
// tolerance, the share of the tolerance that was used, and ok or FAILED.
//
// Uses C++17 and system headers only, and none of the project's code, so that a test drives a
// program as a user does. A test program ends with
//     TEST(name) { expect(1 + 1 == 2); }
//     int main(int argc, char **argv) { return harness_main(argc, argv); }
// and accepts
//     NAME...          run the tests whose names start with NAME; default: all
//     --list           print the names
//     --all            print every numeric comparison, not only the closest one
//     --here NAME      run one test without a separate process or time limit, for gdb; its folder
//                      is kept
//     --program PATH   the built program to drive, for tests that drive one
// The last line is `N passed, N failed, N skipped`; the exit status is 0 only if no test failed.
//
// The environment variables ALL and FULL (set means neither empty nor 0) select how much is run.
// ALL adds the tests marked REST, except that `main` selects only the others and `rest` only these.
// FULL runs every case of a cartesian product that a test otherwise samples, and implies ALL if ALL
// is not set. A test named on the command line always runs.
//
// The harness is strict: NaN fails every comparison, a test that crashes or hangs has failed, and a
// skipped test prints the reason.

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

// REST, combined with any other bit: runs only in the part that ALL=1 adds.
enum { REST = 1 << 16 };

struct Test {
    const char *name;
    void (*function)();
    int runs;  // 0: this build skips the test, because another build runs it with the same input
};

// TEST(name, builds) { ... } defines and registers a test; tests run in the order of their
// definitions. A program that is built in several variants defines THIS_BUILD as one bit, and
// `builds` is the set of variants that run the test; 0 means all. REST can be added.
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

inline Text root, scratch;        // the repository; the parent of all tests' folders
inline Text tested;               // the built program that program() starts
inline void (*prepare)();         // writes the files that tests of programs start with
inline int failures;              // of the current test
inline Text detail;               // text of its output line
inline int shows_all, stays_here; // --all, --here
inline Text (*switches)();        // returns the variables that reproduce the run; NULL: none
inline struct {
    double err, tol, share;
    Text where;
} worst = {0, 0, -1, ""};

// True if a variable such as FULL is set.
inline bool is_set(const char *name) {
    const char *value = getenv(name);
    return value && *value && strcmp(value, "0") != 0;
}

inline bool is_full() { return is_set("FULL"); }

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

// Ends a test that cannot run on this machine.
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

// -------------------------------------------------------------------------------------------------
// Files
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

// Creates `folder` and changes into it.
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

// -------------------------------------------------------------------------------------------------
// Programs
// Runs programs as a user does; the result is an Outcome.

struct Outcome {
    int status;  // exit status, or 256 + the signal that ended it
    Text out, err;
    double user_ms, resident_bytes;  // processor time; peak resident memory
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

// Returns the argv of a program; it points into `words`.
inline std::vector<char *> arguments_of(Words *words) {
    std::vector<char *> argv = {(char *)"train_gpt2"};
    for (Text &word : *words) {
        argv.push_back(&word[0]);
    }
    return argv;
}

// Starts the built program at `path` (relative to the repository). `before` runs in the child
// process and sets limits or environment variables.
inline pid_t start_program(const Text &path, const Text &arguments,
                           const std::function<void()> &before = nullptr) {
    return spawn([&] {
        const Text from_root = path[0] == '/' ? path : root + "/" + path;
        Words words = split(arguments.c_str());
        std::vector<char *> argv = arguments_of(&words);
        argv.push_back(NULL);
        // Open first: after `before` changes the user, the repository may be inaccessible.
        const int fd = open(from_root.c_str(), O_RDONLY | O_CLOEXEC);
        if (before) {
            before();
        }
        fexecve(fd, argv.data(), environ);
        give_up("cannot run " + from_root);
    });
}

// Arguments appended to every run of the program under test.
inline Text more_arguments;

inline pid_t start(const Text &arguments, const std::function<void()> &before = nullptr) {
    const bool apart = more_arguments.empty() || arguments.empty() || arguments.back() == ' ';
    return start_program(tested, arguments + (apart ? "" : " ") + more_arguments, before);
}

inline Outcome program(const Text &arguments, const std::function<void()> &before = nullptr) {
    return outcome(start(arguments, before));
}

// Polls until `done`; after `limit` seconds records a failure, and the test continues.
inline void wait_until_at(const char *file, int line, const char *what,
                          const std::function<bool()> &done, double limit = 60) {
    for (const double began = wall_ms(); !done(); usleep(1000)) {
        if (wall_ms() - began > limit * 1e3) {
            return fail(file, line, text("not within %g s: %s", limit, what));
        }
    }
}
#define wait_until(...) wait_until_at(__FILE__, __LINE__, #__VA_ARGS__, __VA_ARGS__)

// Expects exit status 1 and exactly one line on stderr, which contains `words`; this also excludes
// sanitizer reports.
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

// Joins the lines of wrapped text: continuation lines are those indented by two spaces or more.
inline Text flat(const Text &wrapped) {
    Text line;
    for (size_t i = 0; i < wrapped.size(); i++) {
        const size_t next = wrapped.find_first_not_of(' ', i + 1);
        const bool joins = wrapped[i] == '\n' && next != Text::npos && next >= i + 3;
        line += joins ? ' ' : wrapped[i];
        i = joins ? next - 1 : i;
    }
    return line;
}

// Expects status 0 and an empty stderr.
inline void expect_success_at(const char *file, int line, const Outcome &o, const Text &who) {
    if (o.status != 0 || !o.err.empty()) {
        fail(file, line, who + text(": status %d, stderr: ", o.status) + o.err.substr(0, 600));
    }
}
#define expect_success(outcome, who) expect_success_at(__FILE__, __LINE__, outcome, who)

// -------------------------------------------------------------------------------------------------
// Running the tests
// Selects tests by name, lists them, runs each in its own process, and counts results.

// Runs a test in its own folder and prints its line.
inline void run_here(const Test *t) {
    if (chdir(scratch.c_str()) != 0) {
        give_up("cannot enter " + scratch);
    }
    enter(t->name);
    if (prepare && !tested.empty()) {
        prepare();
    }
    t->function();
    if (worst.share >= 0) {
        detail = worst.where + text("  max err %.1e  tol %.1e  %3.0f %%", worst.err, worst.tol,
                                    100 * worst.share);
    }
    printf("%-22s %s  %s", t->name, detail.c_str(), failures ? "FAILED" : "ok");
}

// Prints the command that repeats one test, preceded by the environment variables it needs.
inline void print_again(const Text &command, const Test *t) {
    printf("    again: %s%s --here %s\n", switches ? switches().c_str() : "", command.c_str(),
           t->name);
}

// Returns the processor seconds used so far by the tests and all their child processes.
inline double processor_s() {
    struct rusage used = {};
    getrusage(RUSAGE_CHILDREN, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

// Runs one test in its own process. Returns its exit status: 0, FAILED or SKIPPED if the test
// finished; any other value also counts as a failure.
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

// Copies the program under test into `scratch`: next to the original there may be a data/ folder,
// which the program would find.
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
            fprintf(stderr, "%s: unknown option; expected --list, --all, --here NAME or "
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

// Runs the tests that the arguments select. `by_default`: program to drive without --program.
inline int harness_main(int argc, char **argv, const char *by_default = "") {
    // On a busy machine, threads that spin at a barrier take processor time from each other.
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
        fprintf(stderr, "%s: no test has that name; --list prints the names\n", argv[0]);
        return 1;
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}

