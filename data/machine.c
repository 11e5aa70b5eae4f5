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
//   1  Ranks

#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
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
// 1. Ranks
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
enum { RANK_PAGES = 1 << 16 };
static char *rank_pages;                                     // of all ranks that can be seen

static RankRow *rank_row_at(int r) {
    return (RankRow *)(void *)(rank_pages + (size_t)r * RANK_PAGES);
}

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
