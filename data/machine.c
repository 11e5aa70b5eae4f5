// data/machine.c -- the second appendix: what a program asks of the system it runs on.
//
// What it is: the threads there are, the signals that end a run well, the memory that the machine
// and every limit around the process leave, folders that outlive a power cut, what a terminal or a
// shell would obey, and how it was built. Volume I (train_gpt2.c) includes it behind
// data/formats.c, whose errors, paths and UTF-8 it uses.
//
// What it refuses to be: aware of GPT-2, of options or of plans. It reads what Linux says of itself
// under /proc and /sys, and where that is silent it assumes no limit.
//
// Build:  with Volume I; alone: cc -include data/formats.c -c data/machine.c. It is also C++17
//
// Contents
//   1  Threads
//   2  Signals
//   3  Memory of the host
//   4  Cores of the host
//   5  Folders
//   6  Ranks
//   7  Terminals
//   8  The build

#include <signal.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#ifdef _OPENMP
#include <omp.h>
#endif

// -------------------------------------------------------------------------------------------------
// 1. Threads
// OpenMP's, or the one of a build without it.

static int thread_count(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

static int thread_index(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// -------------------------------------------------------------------------------------------------
// 2. Signals
// A handler only notes what was asked; the run acts on it at the next good place.

// Has the run been asked to stop? Training, validation, sampling and evaluation ask before each
// batch or token; loading and saving end first.
static int run_stopping(void) { return stop_signal != 0; }

// From here on signals ask the program to stop, but for a SIGHUP that was ignored from the start
// (nohup), and writes to a closed pipe or beyond `ulimit -f` fail with an error like any other.
static void stop_on_signals(void) {
    struct sigaction action, hangup;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN) {
        sigaction(SIGHUP, &action, NULL);
    }
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
}

// From here on a signal that asks to stop also ends a read that waits, as one from a terminal may
// for ever.
static void stop_interrupts_reads(void) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    for (int i = 0; i < 3; i++) {
        struct sigaction action;
        sigaction(signals[i], NULL, &action);
        action.sa_flags &= ~SA_RESTART;
        sigaction(signals[i], &action, NULL);
    }
}

// -------------------------------------------------------------------------------------------------
// 3. Memory of the host
// What the process may still take: the least of what is free, of the control groups around it, and
// of `ulimit`. Whoever exceeds one of them is killed, so a plan is held against all of them first.

// The number behind `key` at the start of a line of `path`, or `otherwise`.
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

// Memory that this process may still take, and which of all limits leaves the least.
typedef struct {
    int64_t bytes;
    char limit[160];
} HostMemory;

__attribute__((format(printf, 3, 4))) static void limit_memory(HostMemory *h, int64_t bytes,
                                                               const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (bytes < h->bytes) {
        h->bytes = max_i64(bytes, 0);
        vsnprintf(h->limit, sizeof h->limit, format, args);
    }
    va_end(args);
}

// Whether `word` stands in a list such as "cpu,cpuacct".
static int list_has(const char *list, const char *word) {
    const size_t n = strlen(word);
    for (; *list; list += *list == ',') {
        size_t length = strcspn(list, ",");
        if (length == n && memcmp(list, word, n) == 0) {
            return 1;
        }
        list += length;
    }
    return 0;
}

// Calls look(out, version, folder, group) for the control group of `controller` that this process
// is in and for every group around it, any of which can be the tightest: Slurm and systemd set
// limits on the job, not on its processes. In a container the path is the host's, and only its
// mount's own folder is there: the last one that is looked at. `root`: "", or where a test has put
// another /proc and /sys.
static void groups_look(const char *root, const char *controller,
                        void (*look)(void *out, int version, const char *folder, const char *group),
                        void *out) {
    static const struct {
        int version;
        const char *mount;
    } mounts[] = {{1, "/sys/fs/cgroup/"}, {2, "/sys/fs/cgroup"}, {2, "/sys/fs/cgroup/unified"}};
    char path[PATH_BYTES], line[2 * PATH_BYTES], folder[4 * PATH_BYTES];
    path_print(path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) {  // number:controllers:group
        line[strcspn(line, "\n")] = 0;
        char *names = strchr(line, ':'), *group = names ? strchr(names + 1, ':') : NULL;
        if (!group) {
            continue;
        }
        *group++ = 0;
        const int version = names[1] == 0 ? 2 : list_has(names + 1, controller);
        for (char *end = group + strlen(group); end; end = strrchr(group, '/')) {
            *end = 0;
            for (int i = 0; i < 3; i++) {
                if (mounts[i].version == version) {
                    snprintf(folder, sizeof folder, "%s%s%s%s/", root, mounts[i].mount,
                             version == 1 ? controller : "", group);
                    look(out, version, folder, group[0] ? group : "/");
                }
            }
        }
    }
    if (f) {
        fclose(f);
    }
}

// The number in a file of a folder, or `otherwise`.
static int64_t folder_number(const char *folder, const char *name, const char *key,
                             int64_t otherwise) {
    char path[4 * PATH_BYTES + 32];
    snprintf(path, sizeof path, "%s%s", folder, name);
    return file_number(path, key, otherwise);
}

// What a control group leaves of memory. Files in the cache count as used, but they make room
// before a process is killed.
static void memory_of_group(void *out, int version, const char *folder, const char *group) {
    static const struct {
        const char *limits[2], *used, *cached;
    } rows[] = {{{"memory.limit_in_bytes", "memory.limit_in_bytes"}, "memory.usage_in_bytes",
                 "total_inactive_file "},
                {{"memory.max", "memory.high"}, "memory.current", "inactive_file "}};
    const int row = version - 1;
    const int64_t used = folder_number(folder, rows[row].used, "", 0) -
                         folder_number(folder, "memory.stat", rows[row].cached, 0);
    for (int k = 0; k < 2; k++) {
        int64_t limit = folder_number(folder, rows[row].limits[k], "", INT64_MAX);
        limit_memory((HostMemory *)out, limit - used, "%s of control group %.90s",
                     rows[row].limits[k], group);
    }
}

// The memory there is, less what control groups and `ulimit` keep back. `root`: "", or where a test
// has put another /proc and /sys.
static HostMemory host_memory(const char *root) {
    static const struct {
        const char *key, *name;
    } limits[] = {{"VmSize:", "ulimit -v"}, {"VmData:", "ulimit -d"}};
    HostMemory h = {INT64_MAX, ""};
    char path[PATH_BYTES];
    struct rlimit r;
    path_print(path, "%s/proc/meminfo", root);
    limit_memory(&h, file_number(path, "MemAvailable:", INT64_MAX >> 10) << 10,
                 "what is free on this machine");
    path_print(path, "%s/proc/self/status", root);
    for (int i = 0; i < 2; i++) {
        // No table holds them: their type is an enum in C and an int in C++.
        int known = i == 0 ? getrlimit(RLIMIT_AS, &r) : getrlimit(RLIMIT_DATA, &r);
        if (known == 0 && r.rlim_cur != RLIM_INFINITY) {
            int64_t mapped = file_number(path, limits[i].key, 0) << 10;
            limit_memory(&h, (int64_t)r.rlim_cur - mapped, "%s", limits[i].name);
        }
    }
    groups_look(root, "memory", memory_of_group, &h);
    return h;
}

// What limits the bytes that were said to be available, for messages; "" on a GPU.
static char available_limit[192];

static size_t host_memory_available(void) {
    const HostMemory h = host_memory("");
    snprintf(available_limit, sizeof available_limit, " (%s)", h.limit);
    return (size_t)h.bytes;
}

// -------------------------------------------------------------------------------------------------
// 4. Cores of the host
// How many threads a program starts, and how they wait for work. Both leave other programs their
// part of the machine.

// Lowers *(int *)out to the cores whose time a control group may spend.
static void cores_of_group(void *out, int version, const char *folder, const char *group) {
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

// The cores that control groups leave of `cores`; more threads would only be stopped in turn. A
// build without OpenMP has one thread and does not ask.
__attribute__((unused)) static int host_cores(const char *root, int cores) {
    groups_look(root, "cpu", cores_of_group, &cores);
    return cores;
}

// Called first thing in main: as many threads as this process has cores (OpenMP itself minds the
// affinity mask, not quotas), which wait for work as a good neighbour does. GCC's OpenMP by itself
// spins for milliseconds, and beside other programs a spinning thread keeps the core that the
// thread it waits for needs: a step beside one compiler took four times as long. 1,000 rounds are
// about ten microseconds, as long as waking a thread takes. OpenMP reads the variable before main,
// so the program is started anew, once, in the same process: a debugger follows; valgrind does not,
// and wants OMP_WAIT_POLICY=passive. Whoever sets one of these variables has chosen; where /proc is
// missing the program goes on as it is.
static void threads_start(char **argv) {
    static const char *const variables[] = {"GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"};
    char self[PATH_BYTES];
#ifdef _OPENMP
    if (!getenv("OMP_NUM_THREADS")) {
        omp_set_num_threads(host_cores("", thread_count()));
    }
#endif
    int chosen = thread_count() == 1;
    for (int i = 0; i < 3; i++) {
        chosen |= getenv(variables[i]) != NULL;
    }
    ssize_t length = chosen ? -1 : readlink("/proc/self/exe", self, sizeof self);
    if (length > 0 && length < (ssize_t)sizeof self) {
        self[length] = 0;
        setenv("GOMP_SPINCOUNT", "1000", 1);  // GCC's
        setenv("KMP_BLOCKTIME", "1", 1);      // clang's, in milliseconds
        execv(self, argv);
    }
}

// -------------------------------------------------------------------------------------------------
// 5. Folders
// A file is as lasting as the names of all folders above it.

// Creates `path` and the folders above it, to stay: a checkpoint is lost with the name of its
// folder.
static void make_folders(const char *path) {
    char part[PATH_BYTES], above[PATH_BYTES] = ".";
    path_print(part, "%s", path);
    for (char *p = part + 1;; p++) {
        if (*p == '/' || *p == 0) {
            char end = *p;
            *p = 0;
            if (mkdir(part, 0755) == 0) {
                fsync_folder(above);
            } else if (errno != EEXIST) {
                die("--output (-o): cannot create folder %s: %s", part, strerror(errno));
            }
            path_print(above, "%s", part);
            *p = end;
            if (end == 0) {
                break;
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// 6. Ranks
// A run on several GPUs is several processes, the ranks, which somebody starts.

// Variables by which launchers tell a process how many copies of it they started: Open MPI's
// mpirun; MPICH's, Intel's and Slurm's process managers; srun, and sbatch for its script.
static const char *const launcher_variables[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
                                                 "SLURM_NTASKS"};

// The first of these that says more than 1, with its number in *copies; NULL: nobody asks for
// ranks.
static const char *launcher_find(int *copies) {
    for (size_t i = 0; i < sizeof launcher_variables / sizeof launcher_variables[0]; i++) {
        const char *text = getenv(launcher_variables[i]);
        *copies = text ? atoi(text) : 1;
        if (*copies > 1) {
            return launcher_variables[i];
        }
    }
    *copies = 1;
    return NULL;
}

// -------------------------------------------------------------------------------------------------
// 7. Terminals
// A line that is rewritten in place must fit the terminal, and bytes from data or a command line
// must not be obeyed: neither by a terminal that shows them nor by a shell they are pasted into.

// Columns of the terminal behind stdout, asked anew because a window may be resized; 80 where the
// system does not say.
static int terminal_columns(void) {
    struct winsize size;
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// Bytes of the character at `text` if a terminal shows it; 0 for a byte that is no UTF-8 and for
// the control characters that are obeyed: C0, DEL and C1.
static int shown_bytes(const char *text, size_t left) {
    uint32_t c;
    const int bytes = utf8_decode(&c, (const unsigned char *)text, left);
    return c < 32 || (c >= 127 && c < 160) || c == UINT32_MAX ? 0 : bytes;
}

// Prints text of any bytes: into a file as it is, on a terminal with \xNN for what it would not
// show, but for line ends and tabs. A text may come in pieces: of a character that is cut the start
// waits for the rest, at the latest for the line end that a text ends with.
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

// Prints a word so that a shell reads the same word: in quotes where it needs them, in those of
// $'...', which bash, zsh and POSIX.1-2024 know, where a terminal would obey it.
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

// Puts the parts of a line, which tabs separate, together in `room` columns: as long as they are
// more, those that `spare` numbers are left out, up to -1, and at last the end is cut off. A part
// is ASCII; an empty one takes no room.
static void line_fit(char line[256], char *parts, const int *spare, int room) {
    enum { PARTS = 16 };
    char *part[PARTS];
    int count = 0, columns = -2, n = 0;
    for (; count < PARTS && parts; count++) {
        part[count] = strsep(&parts, "\t");
        columns += part[count][0] ? 2 + (int)strlen(part[count]) : 0;
    }
    for (; *spare >= 0 && columns > room; spare++) {
        columns -= part[*spare][0] ? 2 + (int)strlen(part[*spare]) : 0;
        part[*spare][0] = 0;
    }
    line[0] = 0;
    for (int i = 0; i < count && n < 255; i++) {
        n += part[i][0] ? snprintf(line + n, (size_t)(256 - n), "%s%s", n ? "  " : "", part[i]) : 0;
    }
    line[min_int(room, 255)] = 0;
}

// -------------------------------------------------------------------------------------------------
// 8. The build
// What a report of a fault should name. The number is the program's own, and git is not asked: a
// program may be built from an archive, or from one file.

#define PROGRAM_VERSION "0.9"

// --version; `more`: what is built in beside all that is said here.
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
