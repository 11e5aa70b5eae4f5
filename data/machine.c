// data/machine.c -- the second appendix: what a program asks of the system it runs on.
//
// What it is: the threads there are, the signals that end a run well, the memory that the machine
// and every limit around the process leave, and folders that outlive a power cut. Volume I
// (train_gpt2.c) includes it behind data/formats.c, whose errors and paths it uses.
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
//   4  Folders
//   5  Ranks

#include <signal.h>
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

// Where the two versions of control groups keep the limits of memory, and what is used of them.
// Files in the cache count as used, but they make room before a process is killed.
static const struct {
    int version;
    const char *mount, *limits[2], *used, *cached;
} cgroup_rows[] = {
    {1, "/sys/fs/cgroup/memory", {"memory.limit_in_bytes", "memory.limit_in_bytes"},
     "memory.usage_in_bytes", "total_inactive_file "},
    {2, "/sys/fs/cgroup", {"memory.max", "memory.high"}, "memory.current", "inactive_file "},
    {2, "/sys/fs/cgroup/unified", {"memory.max", "memory.high"}, "memory.current",
     "inactive_file "}};
enum { CGROUP_ROWS = sizeof cgroup_rows / sizeof cgroup_rows[0] };

// The limits of `group` and of every group around it, any of which can be the tightest: Slurm and
// systemd set them on the job, not on its processes. In a container the path is the host's, and
// only its mount's own folder is there: the last one that is looked at.
static void limit_by_group(HostMemory *h, const char *root, int row, char *group) {
    char file[2 * PATH_BYTES];
    for (char *end = group + strlen(group); end; end = strrchr(group, '/')) {
        *end = 0;
        int n = snprintf(file, sizeof file, "%s%s%s/", root, cgroup_rows[row].mount, group);
        size_t left = sizeof file - (size_t)min_int(n, (int)sizeof file);
        snprintf(file + n, left, "%s", cgroup_rows[row].used);
        int64_t used = file_number(file, "", 0);
        snprintf(file + n, left, "memory.stat");
        used -= file_number(file, cgroup_rows[row].cached, 0);
        for (int k = 0; k < 2; k++) {
            snprintf(file + n, left, "%s", cgroup_rows[row].limits[k]);
            limit_memory(h, file_number(file, "", INT64_MAX) - used, "%s of control group %.90s",
                         cgroup_rows[row].limits[k], group[0] ? group : "/");
        }
    }
}

// The memory there is, less what control groups and `ulimit` keep back. `root`: "", or where a test
// has put another /proc and /sys.
static HostMemory host_memory(const char *root) {
    static const struct {
        const char *key, *name;
    } limits[] = {{"VmSize:", "ulimit -v"}, {"VmData:", "ulimit -d"}};
    HostMemory h = {INT64_MAX, ""};
    char path[PATH_BYTES], line[2 * PATH_BYTES];
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
    path_print(path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f)) {  // number:controllers:group
        char *controllers = strchr(line, ':'), *group = strrchr(line, ':');
        const int version = group == controllers + 1 ? 2 : strstr(line, "memory") ? 1 : 0;
        for (int row = 0; group && row < CGROUP_ROWS; row++) {
            if (cgroup_rows[row].version == version) {
                char copy[2 * PATH_BYTES];
                snprintf(copy, sizeof copy, "%.*s", (int)strcspn(group + 1, "\n"), group + 1);
                limit_by_group(&h, root, row, copy);
            }
        }
    }
    if (f) {
        fclose(f);
    }
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
// 4. Folders
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
// 5. Ranks
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
