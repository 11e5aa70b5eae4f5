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
// Build:  with Volume I. It is also C++17 and is read by nvcc, as Volume I is
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

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/auxv.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#ifdef _OPENMP
#include <omp.h>
#endif
// GPT2_MPI=1 builds in MPI, by which the ranks of mpirun find each other; only the GPU program uses
// it.
#ifndef GPT2_MPI
#define GPT2_MPI 0
#endif
#if GPT2_MPI
#define OMPI_SKIP_MPICXX 1   // MPI's old C++ interface, which would ask for a library of its own
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#endif

// -------------------------------------------------------------------------------------------------
// 1. Threads
// OpenMP's, or the one of a build without it.

#ifdef _OPENMP
static int thread_count(void) { return omp_get_max_threads(); }
static int thread_index(void) { return omp_get_thread_num(); }
#else
static int thread_count(void) { return 1; }
static int thread_index(void) { return 0; }
#endif

// -------------------------------------------------------------------------------------------------
// 2. Signals
// A handler only notes what was asked; the run acts on it at the next good place. That it gets
// there is the handlers' part too: a pager that is paused, or Ctrl-S, makes a write wait for ever.

// From here on writes to a closed pipe or beyond `ulimit -f` fail with an error like any other.
static void writes_return_errors(void) {
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
}

// Whether a write to `fd` would wait now.
static int write_waits(int fd) {
    struct pollfd out = {fd, POLLOUT, 0};
    return poll(&out, 1, 0) == 0;
}

// How long the program may take to stop after SIGTERM: while it starts, 30 s in all, since nothing
// would be lost; while it computes, until it has made no progress for 30 s, as on a device that
// hangs; while it saves, as long as the file system takes.
enum { GRACE_SHORT, GRACE_PROGRESS, GRACE_UNLIMITED, GRACE_S = 30 };
static volatile sig_atomic_t stop_grace = GRACE_SHORT;

// Called every second from the first signal on; ends a program that SIGTERM does not stop in time.
// It counts calls, not time: a program stopped by Ctrl-Z makes no progress, but is not at fault.
static void stop_overdue(void) {
    static const char line[] = "no progress for 30 s after SIGTERM: ended without saving\n";
    static uint64_t count;
    static int seconds;
    const uint64_t now = __atomic_load_n(progress_count, __ATOMIC_RELAXED);
    const int moves = stop_grace == GRACE_PROGRESS && now != count;
    seconds = stop_signal != SIGTERM || stop_grace == GRACE_UNLIMITED || moves ? 0 : seconds + 1;
    count = now;
    if (seconds > GRACE_S) {
        if (!write_waits(STDERR_FILENO) && write(STDERR_FILENO, line, sizeof line - 1) < 0) {
            stop_line = "";  // nobody reads it: the program ends all the same
        }
        _exit(128 + SIGTERM);
    }
}

// Looks, every second from the first signal on, whether somebody takes the output. If nobody has
// for LOOKS of them, /dev/null is what takes it from then on, also the rest of the write that waits
// (SA_RESTART). Calls nothing but what POSIX allows in a handler.
static void on_look(int number) {
    enum { LOOKS = 3 };
    static int waited[STDERR_FILENO + 1];
    const int error = errno;
    for (int fd = STDOUT_FILENO; fd <= STDERR_FILENO; fd++) {
        waited[fd] = write_waits(fd) ? waited[fd] + 1 : 0;
        const int nowhere = waited[fd] < LOOKS ? -1 : open("/dev/null", O_WRONLY | O_CLOEXEC);
        if (nowhere >= 0) {
            dup2(nowhere, fd);
            close(nowhere);
        }
    }
    stop_overdue();
    alarm(1);
    errno = error;
    (void)number;
}

// Whether looks interrupt this thread. While it saves they do not: some file systems, as those of
// cloud storage, answer a call that a signal interrupts with EINTR, which would lose the save.
static void looks_interrupt(int yes) {
    sigset_t look;
    stop_grace = yes ? GRACE_PROGRESS : GRACE_UNLIMITED;
    (void)(sigemptyset(&look), sigaddset(&look, SIGALRM));
    sigprocmask(yes ? SIG_UNBLOCK : SIG_BLOCK, &look, NULL);
}

// What on_stop() writes a byte to; -1: nothing waits for input.
static int stop_pipe[2] = {-1, -1};

// A line that stderr does not take would keep the next signal from being heard.
static void on_stop(int number) {
    stop_line = write_waits(STDERR_FILENO) ? "" : stop_line;
    on_signal(number);
    if (stop_pipe[1] >= 0 && write(stop_pipe[1], "", 1) < 0) {
        errno = 0;  // the pipe is full, which says as much
    }
    signal(SIGALRM, on_look);  // not before: whoever started the program may have set an alarm
    alarm(1);
}

// From here on signals ask the program to stop, but for a SIGHUP that was ignored from the start
// (nohup).
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
    // What launchers and batch systems send for "save and stop", and a parent to its ranks, where a
    // terminal's signal reaches both: it only asks, however often it comes.
    sigaction(SIGUSR1, &action, NULL);
}

// Reads at most `room` bytes from a stream that may block, as a terminal does. Returns how many, 0
// at the end of the input or if a signal asks to stop, and -1 (errno) for an error. poll() also
// waits for the pipe that the handler writes to, so it does not matter whether the signal comes
// before or during the wait, or which thread receives it.
static ssize_t read_or_stop(int fd, char *out, size_t room) {
    if (stop_pipe[0] < 0 && pipe2(stop_pipe, O_CLOEXEC | O_NONBLOCK) != 0) {
        return -1;
    }
    struct pollfd ready[2] = {{fd, POLLIN, 0}, {stop_pipe[0], POLLIN, 0}};
    while (!stop_signal) {
        ssize_t n = poll(ready, 2, -1);
        if (n > 0 && ready[1].revents) {
            break;
        }
        n = n > 0 ? read(fd, out, room) : n;
        if (n >= 0 || (errno != EINTR && errno != EAGAIN)) {
            return n;
        }
    }
    return 0;
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

// Memory that this process may still take, and which of all limits leaves the least; INT64_MAX and
// "" where nothing says.
typedef struct {
    int64_t bytes;
    char limit[160];
} HostMemory;

__attribute__((format(printf, 3, 4))) static void limit_memory(HostMemory *h, int64_t bytes,
                                                               const char *format, ...) {
    va_list args;
    va_start(args, format);
    // Control groups without a limit have one of about 2^63.
    if (bytes < h->bytes && bytes < (int64_t)1 << 60) {
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

// Bytes of the stacks of the threads that OpenMP has yet to start beside `running` ones, two at
// least, as a checkpoint's writer has: each takes as much address space as `ulimit -s` says.
static int64_t stacks_to_come(int64_t running) {
    struct rlimit r;
    const int known = getrlimit(RLIMIT_STACK, &r) == 0 && r.rlim_cur != RLIM_INFINITY;
    const int64_t to_come = max_i64(max_i64(thread_count(), 2) - running, 0);
    return to_come * (known ? (int64_t)r.rlim_cur : 2 << 20);
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
    const int64_t kib = file_number(path, "MemAvailable:", -1);
    limit_memory(&h, kib < 0 ? INT64_MAX : kib << 10, "what is free on this machine");
    path_print(path, "%s/proc/self/status", root);
    const int64_t stacks = stacks_to_come(file_number(path, "Threads:", 1));
    for (int i = 0; i < 2; i++) {
        // No table holds them: their type is an enum in C and an int in C++.
        int known = i == 0 ? getrlimit(RLIMIT_AS, &r) : getrlimit(RLIMIT_DATA, &r);
        if (known == 0 && r.rlim_cur != RLIM_INFINITY) {
            int64_t mapped = file_number(path, limits[i].key, 0) << 10;
            limit_memory(&h, (int64_t)r.rlim_cur - mapped - stacks, "%s%s", limits[i].name,
                         stacks ? " less its threads' stacks" : "");
        }
    }
    groups_look(root, "memory", memory_of_group, &h);
    return h;
}

// The NUMA node next to a device of the PCI bus, whose place CUDA writes in capitals and sysfs does
// not; -1: the machine has no such nodes, or nothing says. `root`: as above.
__attribute__((unused)) static int pci_node(const char *root, const char *bus) {
    char path[PATH_BYTES], place[32] = "";
    for (size_t i = 0; bus[i] && i + 1 < sizeof place; i++) {
        place[i] = (char)(bus[i] | 32);  // changes letters alone
    }
    path_print(path, "%s/sys/bus/pci/devices/%s/numa_node", root, place);
    return (int)file_number(path, "", -1);
}

// Pages of a mapping that nobody has touched come from `node`, as long as it has room. That is no
// more than faster: where the system refuses, as a container's may, they come from anywhere.
__attribute__((unused)) static void memory_near(void *memory, size_t bytes, int node) {
    enum { NODES = 1024, PREFERRED = 1, BITS = 8 * sizeof(unsigned long) };  // mbind(2)
    unsigned long nodes[NODES / BITS + 1] = {0};
    if (bytes > 0 && node >= 0 && node < NODES) {
        nodes[node / BITS] = 1ul << node % BITS;
        (void)syscall(SYS_mbind, memory, bytes, PREFERRED, nodes, (unsigned long)NODES, 0);
    }
}

// What limits the bytes that were said to be available, for messages; "" on a GPU, and where
// nothing is known to.
static char available_limit[192];

static size_t host_memory_available(void) {
    const HostMemory h = host_memory("");
    if (h.limit[0]) {
        snprintf(available_limit, sizeof available_limit, " (%s)", h.limit);
    }
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
// missing the program goes on as it is, and so it does where a dynamic loader was told to run it
// (ld.so PROGRAM): then the process is the loader's, which would take the arguments for its own.
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

// -------------------------------------------------------------------------------------------------
// 5. Folders
// A file is as lasting as the names of all folders above it. Output folders are locked.

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

// Takes the lock of an output folder, which this process holds until it ends. Ends the run if
// another process has it, and names that process.
// 1. The lock is on a regular file: on NFS, flock() on a folder is local to each machine, while
//    byte ranges are locked on the server (flock(2), NFS details; fcntl(2), Lost locks).
// 2. It belongs to the open file (F_OFD_SETLK): other locks of fcntl() are lost as soon as any
//    descriptor of the file is closed (fcntl(2), Open file description locks). To the file system
//    it is an ordinary byte-range lock with another owner (Linux, fs/locks.c, fcntl_setlk()).
// 3. The file stays. If it were removed, a process could lock the removed file and another one a
//    new file of the same name.
// 4. Some file systems have no locks, such as Lustre mounted without -o flock or NFS without a lock
//    service. A run goes on there, and says what it cannot prevent.
static void folder_lock(const char *folder) {
    char path[PATH_BYTES], host[256] = "", holder[320] = "";
    struct flock all;
    memset(&all, 0, sizeof all);
    all.l_type = F_WRLCK;
    path_print(path, "%s/lock", folder);
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) {
        die("--output (-o): cannot open %s: %s", path, strerror(errno));
    }
    if (fcntl(fd, F_OFD_SETLK, &all) == 0) {
        gethostname(host, sizeof host - 1);
        const int n = snprintf(holder, sizeof holder, "process %d on %s\n", (int)getpid(), host);
        // fsync, so that another machine can read it. Failure is no reason to end the run.
        if (ftruncate(fd, 0) == 0 && write_all(fd, holder, (size_t)n) == 0) {
            (void)fsync(fd);
        }
    } else if (errno == EAGAIN || errno == EACCES) {
        const ssize_t n = pread(fd, holder, sizeof holder - 1, 0);
        holder[n > 0 ? strcspn(holder, "\n") : 0] = 0;
        die("--output (-o): %s: another run writes there%s%s (%s is locked)", folder,
            holder[0] ? ": " : "", holder, path);
    } else {
        fprintf(stderr, "%s: warning: %s cannot be locked: %s; a second run in the same folder "
                "would damage this one's checkpoints\n", program_name, path, strerror(errno));
    }
}

// Opens a file of the user's cache, "a" to add to it and "r" to read; NULL if there is none, which
// is no reason to end a run. A relative XDG_CACHE_HOME is ignored, as the XDG Base Directory
// Specification asks.
static FILE *cache_open(const char *name, const char *mode) {
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    const int given = cache && cache[0] == '/';
    char path[PATH_BYTES];
    const char *const parts[] = {"", "/train_gpt2/", name};
    int n = snprintf(path, sizeof path, "%s%s", given ? cache : home ? home : "",
                     given ? "" : "/.cache");
    for (int i = 0; i < 3; i++) {
        if ((!given && !home) || n + strlen(parts[i]) >= sizeof path) {
            return NULL;
        }
        strcpy(path + n, parts[i]);
        n += (int)strlen(parts[i]);
        if (i < 2 && mode[0] == 'a') {
            mkdir(path, 0700);  // if this fails, so does fopen
        }
    }
    return fopen(path, mode);
}

// -------------------------------------------------------------------------------------------------
// 6. Ranks
// A run on several GPUs is several processes, the ranks, one for each GPU. The program forks them
// itself (--gpus N) and stays as their parent, or a launcher starts them: torchrun and srun, whose
// ranks find each other by TCP (MASTER_ADDR), or mpirun, by MPI. Either way each shows the others
// its card once, when the run starts; what they exchange while they train is no business of this
// file.
// 1. The parent touches neither CUDA nor OpenMP, before or after the fork, which neither survives.
// 2. A rank that dies ends the run: the parent ends the others and says in one line who died and
//    how, unless the rank has said it. Under a launcher that is the launcher's part.
// 3. What a signal asked of one rank all act on at the same place of the run (Ranks.stop), or some
//    would wait for ever for those who left.
// 4. A rank that hangs or is stopped makes all others wait inside CUDA. So ranks write down where
//    they stand (RankRow), and whoever watches ends a run in which nothing has moved for --timeout:
//    the parent sees all ranks, a launcher's rank has a thread that sees it alone.

// This process among the ranks of its run; without ranks it is rank 0 of 1. `stop` and `fault` are
// what all ranks agreed on when they last exchanged words: somebody was asked to stop; 1 + the
// first rank that cannot go on, 0: all can. `failed`: this one cannot.
typedef struct {
    int rank, ranks;
    int local_rank, local_ranks;  // on this machine
    int launched;                 // by a launcher, not by --gpus
    int stop, fault, failed;
} Ranks;
static Ranks this_rank = {0, 1, 0, 1, 0, 0, 0, 0};

// What ranks wait for each other in, and its names.
enum { RANK_MEETING, RANK_CONNECTION, RANK_EXCHANGE, RANK_GATHER, RANK_BROADCAST };
static const char *const rank_calls[] = {"the first meeting", "NCCL's start", "Send/Recv",
                                         "AllGather", "Broadcast"};

// The collective that a rank has come to: its number in the run, and whether the rank is through
// it. The GPU writes it in the order of its stream, since the host is ahead of that.
typedef struct {
    uint64_t begun, done;  // alike: the rank waits for nobody
    int call;
} RankNote;

// The longest name of a GPU, and the bytes of an id (NCCL's).
enum { RANK_TEXT = 96, RANK_ID = 128 };

// What a rank shows the others when they meet, before any of them plans. But for memory, GPU and id
// all must be alike: other options or data would train another model and wait for ever for parts of
// other sizes.
typedef struct {
    uint64_t program, options, data, settings;  // fingerprints
    uint64_t device, host;                      // bytes that there are for a plan
    char gpu[RANK_TEXT], id[RANK_ID];
} RankCard;
static RankCard rank_card;  // this rank's; behind the meeting the id of rank 0 and the least memory

// Of a part of the run: engines open, and a driver may be compiling kernels for minutes and show by
// its use of the processor alone that it lives; weights and states are loaded, likewise; all else.
enum { RANK_STARTS, RANK_LOADS, RANK_RUNS };

// Where a rank stands, in pages of its own (a GPU maps whole ones) that the parent sees too.
typedef struct {
    uint64_t count;     // *progress_count
    const char *doing;  // a literal: ranks and parent are forks of one process
    int work;           // RANK_*
    int slow;           // *slow_count
    uint64_t calls;     // collectives that the host has asked for
    RankNote note;
} RankRow;
enum { RANK_PAGES = 1 << 16 };
static RankRow rank_row_alone, *rank_row = &rank_row_alone;  // this rank's
static char *rank_pages;                                     // of all ranks that can be seen
static double rank_timeout_ms = 60e3;

static RankRow *rank_row_at(int r) {
    return (RankRow *)(void *)(rank_pages + (size_t)r * RANK_PAGES);
}

// This process begins another part of the run.
static void rank_phase(const char *doing, int work) {
    rank_row->doing = doing;
    rank_row->work = work;
    progress();
}

// The note of the next collective. Host calls that wait for other ranks put it into the row
// themselves.
static RankNote rank_note_next(int call) {
    const uint64_t done = rank_row->calls++;
    const RankNote note = {done + 1, done, call};
    return note;
}
static void rank_wait_begin(int call) { rank_row->note = rank_note_next(call); }
static void rank_wait_end(void) { rank_row->note.done = rank_row->note.begun; }

// Has the run been asked to stop? Training, validation, sampling and evaluation ask before each
// batch or token; loading and saving end first.
static int run_stopping(void) { return this_rank.ranks > 1 ? this_rank.stop : stop_signal != 0; }

// The variables by which launchers tell a process how many copies of it there are, which of them it
// is, and which of those on its machine: torchrun's (PyTorch documentation, "torchrun", Environment
// Variables), mpirun's of Open MPI ("Environment variables set for MPI applications"), of MPICH and
// Intel MPI (Hydra), and srun's (srun(1), "Output environment variables"). SLURM_NTASKS would not
// do: sbatch and salloc set it in shells too, where a program is started once.
enum { LAUNCH_COPIES, LAUNCH_RANK, LAUNCH_LOCAL_RANK, LAUNCH_COLUMNS };
static const char *const launchers[][LAUNCH_COLUMNS] = {
    {"WORLD_SIZE", "RANK", "LOCAL_RANK"},
    {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"},
    {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"}};

// What launchers say of this process. Numbers that nobody says are -1.
typedef struct {
    const char *variable;  // says how many copies there are; NULL: nobody does
    int copies, rank, local_rank;
    const char *address, *port;  // MASTER_ADDR's, where rank 0 listens; NULL: ranks use MPI
} Launcher;

// A variable's number, or -1 where it is not set. Ends the run where it is something else.
static int launcher_number(const char *variable) {
    const char *text = getenv(variable);
    char *end = NULL;
    const long number = text && text[0] ? strtol(text, &end, 10) : -1;
    if (end && (*end || number < 0 || number > 1 << 20)) {
        die("%s is '%s', which is not a number from 0 to %d", variable, text, 1 << 20);
    }
    return (int)number;
}

// The number in *number of the first variable of a column that is set; returns its row, or -1.
static int launcher_first(int column, int *number) {
    const int rows = (int)(sizeof launchers / sizeof launchers[0]);
    for (int row = 0; row < rows; row++) {
        if ((*number = launcher_number(launchers[row][column])) >= 0) {
            return row;
        }
    }
    return -1;
}

// Who this process is among those that a launcher started. A launcher within another one, as
// torchrun in a task of srun, sets both numbers of its own row. Where the count comes from one row
// and the rank from another, as with WORLD_SIZE set in a script for srun, both must have one count.
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
        die("%s is %d, but %s: it is to be a number below that", l.variable, l.copies,
            l.rank < 0 ? "RANK is not set" : "this process has a higher rank");
    }
    // torchrun's own store listens on MASTER_PORT, and it says so: torch/distributed/rendezvous.py
    // then has rank 0 listen nowhere.
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

// How long a rank that cannot go on lets another one speak. Whoever watches waits longer.
static int rank_patience_ms(void) { return (int)fmin(4000, rank_timeout_ms / 2); }

// Makes the pages for rows that so many processes can see.
static void ranks_share(int rows) {
    rank_pages = (char *)mmap(NULL, (size_t)rows * RANK_PAGES, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (rank_pages == MAP_FAILED) {
        die("no memory for %d ranks: %s", rows, strerror(errno));
    }
}

// This process is a rank from here on, and `row` where it stands. What is wrong on all ranks is
// said once: the others wait until rank 0 has said it and somebody ends them.
static void ranks_begin(Ranks r, RankRow *row) {
    static char name[64];
    this_rank = r;
    rank_row = row;
    progress_count = &row->count;
    slow_count = &row->slow;
    rank_phase("starting", RANK_STARTS);
    if (r.rank > 0) {
        snprintf(name, sizeof name, "%s: rank %d", program_name, r.rank);
        program_name = name;
        die_after_ms = rank_patience_ms();
    }
}

// Each rank computes on its share of the cores: of those that a parent may use, or of the machine's
// where a launcher may have given each rank its own.
static void ranks_share_cores(void) {
#ifdef _OPENMP
    if (!getenv("OMP_NUM_THREADS")) {
        const int mine = omp_get_max_threads();
        const int all = this_rank.launched ? (int)sysconf(_SC_NPROCESSORS_ONLN) : mine;
        omp_set_num_threads((int)max_i64(1, min_int(mine, all / this_rank.local_ranks)));
    }
#endif
}

// Moves `bytes` through a socket. 0: the other end is gone, or silent for as long as the socket
// waits.
static int socket_move(int fd, void *data, size_t bytes, int sending) {
    char *at = (char *)data;
    while (bytes > 0) {
        const ssize_t n = sending ? send(fd, at, bytes, MSG_NOSIGNAL) : recv(fd, at, bytes, 0);
        if (n == 0 || (n < 0 && errno != EINTR)) {
            return 0;
        }
        at += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
    }
    return 1;
}

// The sockets by which ranks meet without MPI: of rank 0 one to each other rank, of the others one,
// rank_links[0], to rank 0.
static int *rank_links;

static void *link_move(int r, void *data, size_t bytes, int sending) {
    if (!socket_move(rank_links[r], data, bytes, sending)) {
        die_after_ms = rank_patience_ms();  // it, or who saw it end, is to speak first
        die("rank %d is gone before all ranks have met", r);
    }
    return data;
}

// all (ranks, bytes) = `own` of every rank, by way of rank 0. All ranks call it.
static void ranks_gather(void *all, void *own, size_t bytes) {
    const int ranks = this_rank.ranks;
#if GPT2_MPI
    if (!rank_links) {
        MPI_Allgather(own, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD);
        return;
    }
#endif
    if (this_rank.rank > 0) {
        link_move(0, own, bytes, 1);
        link_move(0, all, (size_t)ranks * bytes, 0);
        return;
    }
    memcpy(all, own, bytes);
    for (int sending = 0; sending < 2; sending++) {
        for (int r = 1; r < ranks; r++) {
            char *at = (char *)all + (sending ? 0 : (size_t)r * bytes);
            link_move(r, at, sending ? (size_t)ranks * bytes : bytes, sending);
        }
    }
}

// The parent's record of a rank.
typedef struct {
    pid_t pid;  // 0: it has ended
    int alive;  // a pipe that closes when it ends; -1: it is ending
} Child;

// To all ranks that are left.
static void children_signal(const Child *children, int ranks, int number) {
    for (int r = 0; r < ranks; r++) {
        if (children[r].pid > 0) {
            kill(children[r].pid, number);
        }
    }
}

// Rank r's pipe is closed: how did it end? A status of 1 comes with a line of the rank's own, so
// there is no second one. Returns the exit status for the whole run; -1: it has not ended yet, for
// a system takes its time to free a GPU, and may never be done with one that hangs.
static int child_reap(Child *child, int r, int quiet) {
    int status = 0;
    if (waitpid(child->pid, &status, WNOHANG) == 0) {
        return -1;
    }
    child->pid = 0;
    const int number = WIFSIGNALED(status) ? WTERMSIG(status) : 0, code = WEXITSTATUS(status);
    if (number && !quiet) {
        fprintf(stderr, "%s: rank %d was ended by signal %d (%s): the run ends\n", program_name, r,
                number, strsignal(number));
    } else if (code > 1 && !quiet) {
        fprintf(stderr, "%s: rank %d ended with status %d: the run ends\n", program_name, r, code);
    }
    return number ? 1 : code;
}

// What somebody who watches ranks last saw of them all.
typedef struct {
    uint64_t moves;
    double processor_ms, last_ms, still_ms;
} Watch;

// Milliseconds that nothing has moved on any of the ranks that are left. A look counts for a second
// at most: who watches may have been stopped itself, with all ranks, as by Ctrl-Z in a shell, and
// all go on together.
static double watch_look(Watch *w, const Child *children, int ranks) {
    // Who reads what is printed may hold it up, as Ctrl-S does: that is no fault of a rank's.
    const double now = now_ms(), passed = fmin(now - w->last_ms, 1000);
    double processor_ms = 0;
    uint64_t moves = 0;
    for (int r = 0; r < ranks; r++) {
        const volatile RankRow *row = rank_row_at(r);
        clockid_t clock;
        struct timespec t;
        moves += children[r].pid ? row->count + row->note.begun + row->note.done : 0;
        if (children[r].pid && row->work != RANK_RUNS && row->note.begun == row->note.done &&
            clock_getcpuclockid(children[r].pid, &clock) == 0 && clock_gettime(clock, &t) == 0) {
            processor_ms += (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
        }
    }
    // A driver's threads that only look around use less than a tenth, a compiler more.
    const int moved = moves != w->moves || processor_ms - w->processor_ms > 0.1 * passed ||
                      write_waits(STDOUT_FILENO);
    const Watch seen = {moves, processor_ms, now, moved ? 0 : w->still_ms + passed};
    *w = seen;
    return w->still_ms;
}

// How long nothing may move: a file server that fails over, or NCCL while it starts, is no hang.
static double watch_limit_ms(const Child *children, int ranks) {
    int slow = 0;
    for (int r = 0; r < ranks; r++) {
        slow |= children[r].pid && __atomic_load_n(&rank_row_at(r)->slow, __ATOMIC_SEQ_CST) > 0;
    }
    return rank_timeout_ms * (slow ? 10 : 1);
}

// Is a rank in the first collectives, with its engine open and nothing loaded yet? There no rank
// has more to do than another.
static int row_in_warm_up(const RankRow *row) {
    return row->work == RANK_STARTS && row->note.call > RANK_CONNECTION;
}

// Why a rank does not move, what is worse first.
enum { RANK_STOPPED, RANK_HANGS, RANK_WAITS, RANK_REASONS };

// Prints what rank r is doing, behind `named` others, if it does not move for this reason; returns
// whether it did.
static int watch_explain_rank(FILE *f, int reason, const Child *child, int r, int named) {
    const RankRow *row = rank_row_at(r);
    const RankNote *note = &row->note;
    siginfo_t info;
    memset(&info, 0, sizeof info);
    (void)waitid(P_PID, (id_t)child->pid, &info, WSTOPPED | WNOHANG | WNOWAIT);
    const int ending = child->alive < 0;
    if (child->pid == 0 || reason != (info.si_pid || ending        ? RANK_STOPPED
                                      : note->begun == note->done ? RANK_HANGS
                                                                  : RANK_WAITS)) {
        return 0;
    }
    // A launcher's rank sees itself alone.
    fprintf(f, "%s rank %d ", named ? "," : ":", this_rank.ranks > 1 ? this_rank.rank : r);
    if (ending) {
        fprintf(f, "has left, but the system does not end it");
        return 1;
    }
    if (reason == RANK_STOPPED) {
        fprintf(f, "is stopped by signal %d (%s)", info.si_status, strsignal(info.si_status));
        return 1;
    }
    fprintf(f, reason == RANK_HANGS ? "hangs while %s" : "waits for others while %s", row->doing);
    if (note->begun) {
        fprintf(f, ", %s %s #%" PRIu64, reason == RANK_HANGS ? "after" : "in",
                rank_calls[note->call], note->begun);
    }
    return 1;
}

// Prints why nothing moves: the ranks that are stopped, else those that hang, else, where all wait
// for others, what each waits in.
static void watch_explain(const Watch *w, const Child *children, int ranks) {
    char *text;
    size_t bytes;
    FILE *f = open_memstream(&text, &bytes);  // one write, for others may speak at the same time
    check(f, "no memory for a message");
    fprintf(f, "%s: no progress for %.0f s (--timeout)", program_name, w->still_ms * 1e-3);
    int first = 0;
    for (int reason = RANK_STOPPED, named = 0; reason < RANK_REASONS && !named; reason++) {
        for (int r = 0; r < ranks; r++) {
            const int waits = watch_explain_rank(f, reason, &children[r], r, named);
            named += waits;
            first |= waits && reason == RANK_WAITS && row_in_warm_up(rank_row_at(r));
        }
    }
    fputs(first ? ": the first collective never completes, as where GPUs cannot reach each other's "
                  "memory: NCCL_P2P_DISABLE=1 does without that; the run ends\n"
                : ": the run ends\n", f);
    fclose(f);
    fputs(text, stderr);
    free(text);
}

// The parent's life: passes a signal on, ends the others when a rank fails and all when nothing
// moves. Returns the exit status of the run. A second signal ends all of it, as it
// would one process.
static int children_attend(Child *children, int ranks) {
    enum { LOOK_MS = 250, END_MS = 4000 };  // no longer for SIGKILL, which may find a disk asleep
    struct pollfd *fds = (struct pollfd *)alloc_zero((size_t)ranks, sizeof *fds);
    int left = ranks, passed_on = 0, result = 0, ending = 0;
    Watch watch = {0, 0, now_ms(), 0};
    double ended_ms = HUGE_VAL;
    for (int r = 0; r < ranks; r++) {
        fds[r].fd = children[r].alive;
    }
    while (left > 0 && now_ms() < ended_ms + END_MS) {
        const int ready = poll(fds, (nfds_t)ranks, ending ? 1 : LOOK_MS), before = result;
        if (stop_signal && !passed_on) {
            children_signal(children, ranks, SIGUSR1);
            passed_on = 1;
        }
        ending = 0;
        for (int r = 0; r < ranks; r++) {
            if (ready > 0 && fds[r].revents != 0) {
                fds[r].fd = children[r].alive = -1;
            }
            const int gone = fds[r].fd < 0 && children[r].pid;
            const int status = gone ? child_reap(&children[r], r, result != 0) : -1;
            ending |= gone && status < 0;
            left -= status >= 0;
            result = result || status < 0 ? result : status;
        }
        if (!result && left > 0 && watch_look(&watch, children, ranks) >
                                          watch_limit_ms(children, ranks)) {
            watch_explain(&watch, children, ranks);
            result = 1;
        }
        if (result && !before) {
            children_signal(children, ranks, SIGKILL);
            ended_ms = now_ms();
        }
    }
    free(fds);
    return result;
}

// Takes this rank's ends of the links between rank 0 and each rank q, {rank 0's, rank q's}, and
// closes the others.
static void links_take(int (*links)[2], int rank, int ranks) {
    rank_links = (int *)alloc_zero((size_t)ranks, sizeof(int));
    for (int q = 1; q < ranks; q++) {
        for (int end = 0; end < 2; end++) {
            if (end == (rank > 0) && (rank == 0 || rank == q)) {
                rank_links[rank ? 0 : q] = links[q][end];
            } else {
                close(links[q][end]);
            }
        }
    }
    free(links);
}

// Forks the ranks of --gpus. They return and go on; their parent attends to them and exits. It dies
// hard, they with it: the system ends a rank whose parent is gone.
static void ranks_fork(int ranks) {
    Child *children = (Child *)alloc_zero((size_t)ranks, sizeof(Child));
    int (*links)[2] = (int (*)[2])alloc_zero((size_t)ranks, sizeof *links);
    const pid_t parent = getpid();
    int failed = 0;
    signal(SIGCHLD, SIG_DFL);  // ignored, as a shell can have it, it hides how ranks end
    ranks_share(ranks);
    fflush(NULL);
    for (int q = 1; q < ranks; q++) {
        failed |= socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, links[q]);
    }
    for (int r = 0; r < ranks; r++) {
        int ends[2];
        if (failed || pipe2(ends, O_CLOEXEC) != 0 || (children[r].pid = fork()) < 0) {
            children[r].pid = 0;
            children_signal(children, ranks, SIGKILL);
            die("--gpus: cannot start rank %d of %d: %s", r, ranks, strerror(errno));
        }
        if (children[r].pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent) {
                _exit(1);
            }
            for (int other = 0; other < r; other++) {
                close(children[other].alive);
            }
            close(ends[0]);
            free(children);
            links_take(links, r, ranks);
            const Ranks mine = {r, ranks, r, ranks, 0, 0, 0, 0};
            ranks_begin(mine, rank_row_at(r));
            ranks_share_cores();
            return;
        }
        close(ends[1]);
        children[r].alive = ends[0];
    }
    for (int q = 1; q < ranks; q++) {
        close(links[q][0]);
        close(links[q][1]);
    }
    stop_grace = GRACE_UNLIMITED;  // its ranks have their own, and it watches them
    exit(children_attend(children, ranks));
}

// The thread that watches a rank of a launcher's. It sees nothing of the others, which may be in a
// slow call: while its rank waits for them it is patient, and lets those speak first who do not
// wait.
static void *rank_watch(void *nothing) {
    const Child own = {getpid(), 0};
    Watch watch = {0, 0, now_ms(), 0};
    double over;
    do {
        usleep(250000);
        const double still = watch_look(&watch, &own, 1);
        const int waits = rank_row->note.begun != rank_row->note.done;
        const int patient = waits && !row_in_warm_up(rank_row);
        over = still - (patient ? 10 * rank_timeout_ms : watch_limit_ms(&own, 1));
        over -= waits ? 2000 : 0;
    } while (over <= 0);
    watch_explain(&watch, &own, 1);
    _exit(1);
    return nothing;
}

// Starts it; signals stay the main thread's, whose calls they are to interrupt.
static void rank_watch_start(void) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&thread, NULL, rank_watch, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        die("cannot start the thread that watches this rank: %s", strerror(error));
    }
}

// What a rank says first, so that nothing else that comes to the port, or answers there, is taken
// for a rank.
typedef struct {
    char magic[16];
    int32_t rank, ranks;
    char machine[RANK_TEXT];
} RankHello;
static const char rank_magic[16] = "train_gpt2 rank";

// How long a socket waits in one call.
static void socket_limit(int fd, double ms) {
    const int64_t us = (int64_t)(1e3 * ms);
    const struct timeval limit = {(time_t)(us / 1000000), (suseconds_t)(us % 1000000)};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);  // for connect() too: socket(7)
}

// Milliseconds until `end_ms`, at most `most`; 0: it is over. Ends the run where a signal asks to.
static double meeting_left(double end_ms, double most) {
    if (stop_signal) {
        die("stopped by a signal before all ranks had come");
    }
    return fmin(fmax(end_ms - now_ms(), 0), most);
}

// Rank 0's socket, on every address of this machine: which of them MASTER_ADDR's name has for the
// others it need not have here (Debian's own name is 127.0.1.1).
static int meeting_listen(const Launcher *l) {
    const int yes = 1, no = 0;
    struct addrinfo hints, *any = NULL;
    int fd = -1;
    errno = 0;
    for (int ipv6 = 1; ipv6 >= 0 && fd < 0 && errno != EADDRINUSE; ipv6--) {
        memset(&hints, 0, sizeof hints);
        hints.ai_family = ipv6 ? AF_INET6 : AF_INET;  // the former takes IPv4 too
        hints.ai_socktype = SOCK_STREAM;
        hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
        if (getaddrinfo(NULL, l->port, &hints, &any) != 0) {
            continue;
        }
        fd = socket(hints.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd >= 0) {
            setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
            // A run that has just ended on this port leaves it in TIME_WAIT.
            setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
            if (bind(fd, any->ai_addr, any->ai_addrlen) != 0 || listen(fd, SOMAXCONN) != 0) {
                const int error = errno;
                close(fd);
                errno = error;
                fd = -1;
            }
        }
        freeaddrinfo(any);
    }
    if (fd < 0) {
        die("rank 0 cannot listen on port %s (MASTER_PORT): %s", l->port, strerror(errno));
    }
    return fd;
}

// Rank 0: waits for the others, and for nobody else, at the latest until `end_ms`.
static void meeting_open(const Launcher *l, double end_ms) {
    enum { HELLO_MS = 5000 };
    const int listener = meeting_listen(l);
    for (int there = 1; there < l->copies;) {
        RankHello hello;
        struct pollfd ready = {listener, POLLIN, 0};
        const double left = meeting_left(end_ms, 1000);
        if (left <= 0) {
            int absent = 1;
            while (rank_links[absent] >= 0) {
                absent++;
            }
            die("%d of %d ranks have come to port %s within %.0f s (--timeout); rank %d has not",
                there, l->copies, l->port, rank_timeout_ms * 1e-3, absent);
        }
        if (poll(&ready, 1, (int)left + 1) <= 0) {
            continue;
        }
        const int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0) {
            continue;
        }
        socket_limit(fd, HELLO_MS);
        if (!socket_move(fd, &hello, sizeof hello, 0) ||
            memcmp(hello.magic, rank_magic, sizeof rank_magic) != 0) {
            close(fd);  // as of who looks for open ports
            continue;
        }
        if (hello.ranks != l->copies) {
            die("rank %d is one of %d, and rank 0 one of %d (%s)", hello.rank, hello.ranks,
                l->copies, l->variable);
        }
        if (hello.rank < 1 || hello.rank >= l->copies || rank_links[hello.rank] >= 0) {
            die("two processes say that they are rank %d of %d", hello.rank, l->copies);
        }
        rank_links[hello.rank] = fd;
        there++;
    }
    close(listener);
}

// The other ranks: connect to rank 0 as soon as it listens, at the latest at `end_ms`.
static void meeting_join(const Launcher *l, RankHello *hello, double end_ms) {
    enum { TRY_MS = 2000, PAUSE_US = 20000 };
    char why[128] = "";
    for (double left; rank_links[0] < 0;) {
        struct addrinfo hints, *found = NULL;
        memset(&hints, 0, sizeof hints);
        hints.ai_socktype = SOCK_STREAM;
        const int unknown = getaddrinfo(l->address, l->port, &hints, &found);
        if (unknown) {
            snprintf(why, sizeof why, "%s", gai_strerror(unknown));
        }
        for (struct addrinfo *a = found; a && rank_links[0] < 0; a = a->ai_next) {
            const int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
            socket_limit(fd, meeting_left(end_ms, TRY_MS) + 1);
            if (connect(fd, a->ai_addr, a->ai_addrlen) == 0) {
                rank_links[0] = fd;
                break;
            }
            snprintf(why, sizeof why, "%s",
                     errno == EINPROGRESS ? "no answer, as behind a firewall" : strerror(errno));
            close(fd);
        }
        if (found) {
            freeaddrinfo(found);
        }
        left = meeting_left(end_ms, TRY_MS);
        if (left <= 0 && rank_links[0] < 0) {
            die("rank 0 cannot be reached at %s, port %s (MASTER_ADDR, MASTER_PORT), for %.0f s "
                "(--timeout): %s", l->address, l->port, rank_timeout_ms * 1e-3, why);
        }
        usleep(rank_links[0] < 0 ? PAUSE_US : 0);
    }
    socket_limit(rank_links[0], rank_timeout_ms + 5000);  // until rank 0 has waited for the others
    if (!socket_move(rank_links[0], hello, sizeof *hello, 1)) {
        die("rank 0 at %s, port %s, is gone", l->address, l->port);
    }
}

// Opens the links to the other ranks by TCP.
static void meeting_find(const Launcher *l, RankHello *hello) {
    const double end_ms = now_ms() + rank_timeout_ms;
    rank_links = (int *)alloc_zero((size_t)l->copies, sizeof(int));
    for (int r = 0; r < l->copies; r++) {
        rank_links[r] = -1;
    }
    if (l->rank == 0) {
        meeting_open(l, end_ms);
    } else {
        meeting_join(l, hello, end_ms);
    }
}

// The ranks that a launcher started find each other, and count those on one machine, which share
// its memory and cores.
static void ranks_join(const Launcher *l, void (*select)(int local_rank)) {
    Ranks r = {l->rank, l->copies, 0, 1, 1, 0, 0, 0};
    RankHello hello, *all;
    die_after_ms = l->rank > 0 ? rank_patience_ms() : 0;
#if GPT2_MPI
    if (!l->address) {
        int level;
        if (l->local_rank >= 0) {
            select(l->local_rank);  // before MPI starts: one that knows CUDA takes what is current
        }
        // The thread that watches this rank calls nothing of MPI's.
        MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level);
        MPI_Comm_rank(MPI_COMM_WORLD, &r.rank);
        MPI_Comm_size(MPI_COMM_WORLD, &r.ranks);
        if (r.ranks != l->copies) {
            die("%s is %d, but MPI finds %d: set MASTER_ADDR and MASTER_PORT, as "
                "dev/slurm/train.sh does; or srun needs --mpi=pmix, or the pmi2 of this MPI",
                l->variable, l->copies, r.ranks);
        }
    }
#else
    (void)select;
    if (!l->address) {
        die("%s is %d, but MASTER_ADDR is not set: without it, and built without MPI, the "
            "processes cannot find each other; on one machine --gpus %d starts them", l->variable,
            l->copies, l->copies);
    }
#endif
    ranks_share(1);
    ranks_begin(r, rank_row_at(0));
    rank_watch_start();
    rank_wait_begin(RANK_MEETING);
    memset(&hello, 0, sizeof hello);
    memcpy(hello.magic, rank_magic, sizeof rank_magic);
    hello.rank = r.rank;
    hello.ranks = r.ranks;
    gethostname(hello.machine, sizeof hello.machine - 1);
    if (l->address) {
        meeting_find(l, &hello);
    }
    all = (RankHello *)alloc_zero((size_t)r.ranks, sizeof *all);
    ranks_gather(all, &hello, sizeof hello);
    if (memcmp(all[0].magic, rank_magic, sizeof rank_magic) != 0) {
        die("what answers at %s, port %s, is no rank 0 of this program: is MASTER_PORT another "
            "program's?", l->address, l->port);
    }
    this_rank.local_ranks = 0;
    for (int q = 0; q < r.ranks; q++) {
        const int here = strcmp(all[q].machine, hello.machine) == 0;
        this_rank.local_rank += here && q < r.rank;
        this_rank.local_ranks += here;
    }
    this_rank.local_rank = l->local_rank < 0 ? this_rank.local_rank : l->local_rank;
    for (int q = 0; rank_links && q < (r.rank ? 1 : r.ranks); q++) {
        socket_limit(rank_links[q], 0);  // from here on whoever watches says what takes too long
    }
    free(all);
    rank_wait_end();
    ranks_share_cores();
}

// cards (ranks) = every rank's. Once in a run, and called by all of its ranks; MPI and links are
// done with afterwards.
static void ranks_meet(RankCard *cards) {
    rank_wait_begin(RANK_MEETING);
    ranks_gather(cards, &rank_card, sizeof rank_card);
    for (int q = this_rank.rank == 0; rank_links && q < (this_rank.rank ? 1 : this_rank.ranks);
         q++) {
        close(rank_links[q]);
    }
#if GPT2_MPI
    if (!rank_links) {
        MPI_Finalize();
    }
#endif
    free(rank_links);
    rank_links = NULL;
    rank_wait_end();
}

// What a rank tells the others between steps: a number, and whether it must stop or cannot go on.
typedef struct {
    double value;
    int32_t stop, failed;
} RankWord;

// From the words of all ranks, what all of them do next.
static void ranks_agree(const RankWord *words) {
    this_rank.stop = this_rank.fault = 0;
    for (int r = this_rank.ranks - 1; r >= 0; r--) {
        this_rank.stop |= words[r].stop;
        this_rank.fault = words[r].failed ? r + 1 : this_rank.fault;
    }
}

// A fingerprint of `bytes`, begun with that of other bytes.
static uint64_t fingerprint(uint64_t before, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; i++) {
        before = (before ^ p[i]) * 0x100000001B3u;  // FNV-1a: these are no secrets
    }
    return before;
}

// The program's own file: ranks of two builds need not compute alike.
static uint64_t fingerprint_program(void) {
    uint64_t print = 0;
    Mapping map;
    if (mapping_open(&map, "/proc/self/exe") == 0) {
        print = fingerprint(map.size, map.bytes, map.size);
        mapping_close(&map);
    }
    return print;
}

// The ranks show each other their cards. Ends the run, with the line of rank 0, where they cannot
// train together.
static void ranks_introduce(void) {
    const size_t n = (size_t)this_rank.ranks;
    static const struct {
        size_t offset;
        const char *what;
    } alike[] = {{offsetof(RankCard, program), "is another build of this program"},
                 {offsetof(RankCard, options), "was given other options"},
                 {offsetof(RankCard, data), "has other data"},
                 {offsetof(RankCard, settings), "has another model"}};
    RankCard *cards = (RankCard *)alloc_zero(n, sizeof(RankCard));
    // For tests: NCCL from 2.30.7 on lets ranks share a GPU if this is set (NCCL user guide,
    // Environment Variables). Each rank then plans as if all of its free memory were its own.
    const char *sharing = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    const int shared = sharing && strcmp(sharing, "1") == 0;
    rank_card.program = fingerprint_program();
    ranks_meet(cards);
    for (size_t r = 1; r < n; r++) {
        cards[0].device = cards[r].device < cards[0].device ? cards[r].device : cards[0].device;
        cards[0].host = cards[r].host < cards[0].host ? cards[r].host : cards[0].host;
        for (size_t i = 0; i < sizeof alike / sizeof alike[0]; i++) {
            if (memcmp((char *)&cards[0] + alike[i].offset, (char *)&cards[r] + alike[i].offset,
                       sizeof(uint64_t)) != 0) {
                die("rank %zu %s than rank 0: all ranks must be alike", r, alike[i].what);
            }
        }
        for (size_t other = 0; other < r; other++) {
            if (!shared && strcmp(cards[other].gpu, cards[r].gpu) == 0) {
                die("ranks %zu and %zu would share one GPU, %s; start as many ranks on a machine "
                    "as it has GPUs%s", other, r, cards[r].gpu, !this_rank.launched ? "" :
                    ", and have srun show all of them to each: --gpus-per-node with "
                    "--gpu-bind=none");
            }
        }
    }
    memcpy(rank_card.id, cards[0].id, RANK_ID);
    rank_card.device = cards[0].device;
    rank_card.host = cards[0].host;
    free(cards);
}

// -------------------------------------------------------------------------------------------------
// 7. Terminals
// A line that is rewritten in place must fit the terminal, and bytes from data or a command line
// must not be obeyed: neither by a terminal that shows them nor by a shell they are pasted into.

// Whether a line can be rewritten in place. Open MPI's mpirun gives every process a pseudo-terminal
// and sends what comes out of it where its own output goes, as to a file; other launchers mix the
// lines of several processes.
static int terminal_rewrites(void) {
    return isatty(STDOUT_FILENO) && !this_rank.launched && !getenv("OMPI_COMM_WORLD_SIZE");
}

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
    for (; *spare >= 0 && *spare < count && columns > room; spare++) {
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
