// ranks.cpp -- runs on several ranks, as processes on the emulated device: the same numbers as one
// rank, the same bits at every ZeRO stage and in every stream order, checkpoints that any number of
// ranks can resume, and clean shutdown.
//
// Run:    build/test/ranks [--program ./train_gpt2cu_cpu] [NAME...]

#include "files.h"
#include <arpa/inet.h>
#include <set>
#include <sys/ptrace.h>
#include <sys/socket.h>

// A small model whose shards are cut at odd offsets: C = 96 with 3 ranks, T below the model's 16.
#define ODD "-i train.bin -j val.bin -e l3h3c96t16 -t 12 -b 2 "

// Runs `line` in a shell, with PROGRAM set to the built program.
static Outcome shell(const Text &line) {
    return outcome(spawn([&] {
        setenv("PROGRAM", tested.c_str(), 1);
        setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
        setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
        execl("/bin/sh", "sh", "-c", line.c_str(), (char *)NULL);
    }));
}

// Skips the test if mpirun is missing or the program was built without MPI.
static void need_mpi() {
    if (shell("command -v mpirun > /dev/null").status != 0) {
        skip("no mpirun");
    }
    if (program("--version").out.find("MPI") == Text::npos) {
        skip("the program was built without MPI");
    }
}

// Returns the losses, norms and validations in a run's log; empty if the run failed.
static Text numbers(const Text &log) {
    Text all;
    for (const char *key : {"loss", "grad_norm", "val_loss"}) {
        for (const double value : values_in(log, key)) {
            all += text("%.9g ", value);
        }
    }
    return all;
}

static Text numbers_of(const Text &folder) { return numbers(read_file(folder + "/log.jsonl")); }

// Runs the program with an output folder and expects success.
static void run(const Text &arguments, const Text &folder,
                const std::function<void()> &before = nullptr) {
    expect_success(program("--quiet -o " + folder + " " + arguments, before), arguments.c_str());
}

// Expects that two runs of `steps` steps have the same bits: numbers, weights and states.
static void expect_same(const Text &a, const Text &b, int steps) {
    const Text want = numbers_of(a), got = numbers_of(b);
    expect(!want.empty() && got == want, "%s and %s: %s, %s", a.c_str(), b.c_str(), want.c_str(),
           got.c_str());
    const Text states = tensors_of(a, steps);
    expect(!states.empty() && tensors_of(b, steps) == states, "states of %s and %s", a.c_str(),
           b.c_str());
}

// With the same sequences per step, 1 to 4 ranks in fp32 have the same losses and norms up to
// rounding and, with a learning rate of 0, the same bits in the validation.
TEST(ranks_numbers) {
    for (int n = 1; n <= 4; n++) {
        const Text ranks = ODD "-d 288 --dtype fp32 -v 1 -m 7 " + text("--gpus %d ", n);
        run(ranks + "-x 1 -l 0", text("stays%d", n));
        for (const char *how : {"learns", "overfit"}) {
            const Text steps = how[0] == 'o' ? "-x 3 -l 3e-3 --overfit 1" : "-x 3 -l 3e-3";
            run(ranks + steps, how + text("%d", n));
            const Text log = read_file(how + text("%d/log.jsonl", n));
            const Text one = read_file(how + Text("1/log.jsonl"));
            for (const char *key : {"loss", "grad_norm", "val_loss"}) {
                const auto got = values_in(log, key), want = values_in(one, key);
                expect(got.size() == 3 && want.size() == 3, "%d ranks: %zu of %s", n, got.size(),
                       key);
                for (size_t i = 0; i < got.size() && i < want.size(); i++) {
                    expect_near(got[i], want[i], 5e-6 * want[i], "%s, %d ranks, %s %zu", how, n,
                                key, i);
                }
            }
        }
        // fp16: each rank scales its loss; the reported norm is that of the unscaled sum.
        run(ODD "-d 288 -x 2 -l 0 --dtype fp16 " + text("--gpus %d", n), text("fp16-%d", n));
        const auto norms = values_in(read_file(text("fp16-%d/log.jsonl", n)), "grad_norm");
        const auto alone = values_in(read_file("fp16-1/log.jsonl"), "grad_norm");
        expect(norms.size() == 2 && alone.size() == 2, "fp16, %d ranks: %zu norms", n,
               norms.size());
        for (size_t i = 0; i < norms.size() && i < alone.size(); i++) {
            expect_near(norms[i], alone[i], 2e-3 * alone[i], "fp16, %d ranks, norm %zu", n, i);
        }
        const auto got = values_in(read_file(text("stays%d/log.jsonl", n)), "val_loss");
        expect(got.size() == 1 && got == values_in(read_file("stays1/log.jsonl"), "val_loss"),
               "%d ranks: another validation", n);
    }
}

// All ZeRO stages give the same bits with one micro-step. With more, stages 0 and 1 agree, and so
// do 2 and 3, which round gradients once per micro-step. Tested with clipping, skipped steps, every
// type of the states, and every stream order.
TEST(ranks_stages) {
    enum { LAST = 3 };
    const bool full = is_full();  // every stream order and recompute level at every stage
    static const struct {
        int ranks, micros;
        const char *options;
    } table[] = {{3, 1, ""}, {2, 3, "--moments bf16 -w 0 "},
                 {2, 1, "--grad-dtype fp32 -l 100 -c 1 "},
                 {3, 3, "--dtype fp32 -r block "}, {3, 1, "--dtype fp16 "}};
    for (const auto &row : table) {
        const Text ranks = ODD + text("-x 3 --clip 0.5 -v 3 -m 2 --gpus %d -d %d ", row.ranks,
                                      24 * row.ranks * row.micros) + row.options;
        for (int z = 0; z <= LAST; z++) {
            const Text like = row.micros > 1 && z >= 2 ? "z2" : "z0";
            for (const char *order : {"", "late", "early", "3", "8"}) {
                const Text folder = text("z%d%s", z, order);
                if (order[0] && !full && (&row > table || z < LAST)) {
                    continue;  // only the last stage, which uses the most streams
                }
                remove_folder(folder);
                run(ranks + text("-z %d", z), folder, with("EMU_ORDER", order));
                if (folder != like) {
                    expect_same(like, folder, 3);
                }
            }
            for (const char *level : {"none", "qkv", "block"}) {
                if (full && !strstr(row.options, "-r ")) {
                    remove_folder("level");
                    run(ranks + text("-z %d -r %s", z, level), "level");
                    expect_same(like, "level", 3);
                }
            }
            const Text want = read_file("z0/log.jsonl"), got = read_file(text("z%d/log.jsonl", z));
            for (const char *key : {"loss", "grad_norm"}) {
                const auto a = values_in(want, key), b = values_in(got, key);
                for (size_t i = 0; i < a.size() && a.size() == b.size(); i++) {
                    expect_near(b[i], a[i], 5e-3 * a[i], "-z %d, %s %zu", z, key, i);
                }
            }
        }
        const bool skips = read_file("z0/log.jsonl").find("\"skipped\":1") != Text::npos;
        expect(skips == (strstr(row.options, "-l 100") != NULL), "%s", row.options);
    }
}

// Offloading changes no bit of a run on several ranks, at any ZeRO stage.
TEST(ranks_offload, REST) {
    enum { STAGES = 4 };
    static const struct {
        int ranks, micros;
        const char *options, *states;
    } table[] = {{3, 1, "-r block", "weights,moments,master,residuals"},
                 {2, 3, "--moments bf16 -w 0", "weights,residuals"}};
    for (const auto &row : table) {
        const Text ranks = ODD + text("-x 3 --clip 0.5 -v 3 -m 2 --gpus %d -d %d %s -z ", row.ranks,
                                      24 * row.ranks * row.micros, row.options);
        for (int z = 0; z < STAGES; z++) {
            const Text stage = ranks + text("%d ", z);
            remove_folder("device");
            run(stage, "device");
            remove_folder("host");
            run(stage + "--offload " + row.states, "host",
                with("EMU_ORDER", (z + row.micros / 2) % 2 ? "early" : "late"));
            expect_same("device", "host", 3);
        }
    }
}

// Ranks whose GPUs have different free memory plan for the minimum, and train.
TEST(ranks_budget) {
    need_mpi();
    const Text line = ODD "-x 2 -z 1 -d 48 ";
    const Text plan = program(line + "--gpus 2 -r block --offload none --plan --json").out;
    const char *key = "\"total_bytes\":";
    const long bytes = atol(&plan[plan.find(key) + strlen(key)]) + (2L * 2 * 12 << 20);
    for (const char *small : {"0", "1"}) {
        Text command = "mpirun --oversubscribe";
        for (const char *rank : {"0", "1"}) {
            const long all = bytes + (rank[0] == small[0] ? -1 : 1 << 30) + (500L << 20);
            command += (rank[0] == '0' ? " -np 1 env" : " : -np 1 env") +
                       text(" XDG_CACHE_HOME=/proc/none EMU_CONTEXT=300M EMU_LIBRARY=200M "
                            "EMU_NCCL=12M EMU_GPU_MEM=%ld ", all) +
                       "$PROGRAM " + line + "-o budget" + small;
        }
        const Outcome o = shell(command + " < /dev/null");
        expect_success(o, command);
        expect(o.out.find(" --offload moments,master ", o.out.find("\nchosen ")) != Text::npos,
               "%s", o.out.c_str());
    }
    run(line + "--gpus 2 -r none --offload none", "device");
    expect_same("device", "budget0", 2);
    expect_same("device", "budget1", 2);
}

// Ranks started by mpirun give the same bits as with --gpus.
TEST(ranks_mpirun, REST) {
    need_mpi();
    for (int n = 2; n <= 4; n++) {
        const Text ranks = ODD + text("-d %d -x 2 --clip 0.5 -z 1 ", 24 * n);
        run(ranks + text("--gpus %d", n), text("gpus%d", n));
        const Outcome o = shell(text("mpirun --oversubscribe -np %d $PROGRAM ", n) + ranks +
                                text("--quiet -o mpi%d < /dev/null", n));
        expect_success(o, "mpirun");
        expect_same(text("gpus%d", n), text("mpi%d", n), 2);
    }
}

// Returns a socket of the loopback interface that listens on *port; 0 selects a free port.
static int listen_on(int *port) {
    const int yes = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in at = {};
    socklen_t bytes = sizeof at;
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    at.sin_port = htons((uint16_t)*port);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) != 0 || listen(fd, 4) != 0 ||
        getsockname(fd, (struct sockaddr *)&at, &bytes) != 0) {
        close(fd);
        return -1;
    }
    *port = ntohs(at.sin_port);
    return fd;
}

// Returns a free port whose successor is also free.
static int free_port() {
    for (int tries = 0; tries < 100; tries++) {
        int port = 0, next;
        const int fd = listen_on(&port), other = listen_on(&(next = port + 1));
        close(fd);
        close(other);
        if (fd >= 0 && other >= 0) {
            return port;
        }
    }
    skip("no free ports");
}

// Starts one process for each of `variables` at the same time, as torchrun or srun would.
static std::vector<Outcome> start_by_tcp(const Words &variables, const Text &line) {
    Text script;
    for (size_t i = 0; i < variables.size(); i++) {
        const Text to = text("tcp-%zu.", i);
        script += "(env " + variables[i] + " $PROGRAM " + line + " < /dev/null > " + to +
                  "out 2> " + to + "err; echo $? > " + to + "status) & ";
    }
    std::vector<Outcome> all;
    shell(script + "wait");
    for (size_t i = 0; i < variables.size(); i++) {
        const Text from = text("tcp-%zu.", i);
        all.push_back({atoi(read_file(from + "status").c_str()), read_file(from + "out"),
                       read_file(from + "err"), 0, 0});
    }
    return all;
}

static Text master(int port) { return text("MASTER_ADDR=localhost MASTER_PORT=%d ", port); }

// Without MPI, ranks started by torchrun or srun give the same bits as --gpus. Under torchrun, its
// own store already listens on MASTER_PORT; under srun, its variables take precedence over
// sbatch's. A port scanner is not mistaken for a rank.
TEST(ranks_tcp) {
    const Text part = TINY "-x 2 --clip 0.5 -z 1 ", line = part + "--quiet -o ";
    run(part + "--gpus 3", "gpus");
    int port = free_port();
    const int store = listen_on(&port);
    Words torchrun, srun;
    for (int r = 0; r < 3; r++) {
        torchrun.push_back(master(port) + text("TORCHELASTIC_USE_AGENT_STORE=True RANK=%d "
                                               "WORLD_SIZE=3 LOCAL_RANK=%d", r, r));
        // Variables of a surrounding launcher's task have no effect.
        torchrun.back() += " SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0";
    }
    for (const Outcome &o : start_by_tcp(torchrun, line + "torchrun")) {
        expect_success(o, "torchrun's variables");
    }
    close(store);
    expect_same("gpus", "torchrun", 2);
    for (int r = 0; r < 3; r++) {
        srun.push_back(master(port) + text("SLURM_STEP_NUM_TASKS=3 SLURM_PROCID=%d SLURM_LOCALID=%d"
                                           " SLURM_NTASKS=7", r, r));
    }
    const pid_t stranger = fork();
    if (stranger == 0) {
        struct sockaddr_in at = {};
        at.sin_family = AF_INET;
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        at.sin_port = htons((uint16_t)port);
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        alarm(20);
        while (connect(fd, (struct sockaddr *)&at, sizeof at) != 0) {
            close(fd);
            usleep(1000);
            fd = socket(AF_INET, SOCK_STREAM, 0);
        }
        const Text words(1000, 'x');
        _exit(write(fd, words.data(), words.size()) != (ssize_t)words.size());
    }
    srun[1] += " sh -c 'sleep 0.3; exec \"$0\" \"$@\"'";  // the port scanner connects first
    for (const Outcome &o : start_by_tcp(srun, line + "srun")) {
        expect_success(o, "srun's variables");
    }
    int status = 1;
    waitpid(stranger, &status, 0);
    expect(status == 0, "the port scanner did not connect");
    expect_same("gpus", "srun", 2);
}

// Each failure to connect the ranks ends in one line that names it.
TEST(ranks_tcp_refused) {
    int port = free_port(), taken = 0;
    const int listener = listen_on(&taken);
    auto both = [](int port, const char *count) {
        return master(port) + "WORLD_SIZE=" + count + " RANK=";
    };
    auto one = [](const Text &variables, const Text &words) {
        const Outcome o = start_by_tcp({variables}, TINY "-x 1 --quiet --timeout 1")[0];
        expect_refused(o, words, variables);
    };
    // Another process uses the port: rank 0 cannot listen, and others get no reply from a rank 0.
    one(both(taken, "2") + "0", text("rank 0 cannot listen on port %d (MASTER_PORT): Address "
                                     "already in use", taken));
    const pid_t other = fork();
    if (other == 0) {
        const Text words(4096, 'x');
        const int fd = accept(listener, NULL, NULL);
        char piece[4096];
        _exit(read(fd, piece, sizeof piece) < 1 ||
              write(fd, words.data(), words.size()) < 1 || read(fd, piece, sizeof piece) != 0);
    }
    one(both(taken, "2") + "1", "rank 1: the process that answers at localhost, port ");
    kill(other, SIGKILL);
    waitpid(other, NULL, 0);
    close(listener);
    // A rank is missing, duplicated, or has a different number of ranks.
    one(both(port, "2") + "1", text("rank 1: cannot connect to rank 0 at localhost, port %d "
                                    "(MASTER_ADDR, MASTER_PORT), within 1 s (--timeout): "
                                    "Connection refused", port));
    one(both(port, "2") + "0", text("only 1 of 2 ranks connected to port %d within 1 s "
                                    "(--timeout); rank 1 is missing", port));
    static const struct {
        Words ranks;
        const char *words;
    } table[] = {
        {{"3 RANK=0", "3 RANK=1", "3 RANK=1"}, "two processes were started as rank 1 of 3"},
        {{"2 RANK=0", "3 RANK=1"},
         "rank 1 was started as one of 3 ranks, rank 0 as one of 2 (WORLD_SIZE)"},
        {{"2 RANK=0", "2 RANK=1 sh -c 'exec \"$0\" \"$@\" -j nothing.bin'"},
         "rank 1 ended before all ranks were connected"},
    };
    for (const auto &row : table) {
        Words variables;
        for (const Text &rank : row.ranks) {
            variables.push_back(master(port) + "WORLD_SIZE=" + rank);
        }
        const auto all = start_by_tcp(variables, TINY "-x 1 --quiet --timeout 2");
        expect_refused(all[0], row.words, row.words);
        for (size_t r = 1; r < all.size(); r++) {
            expect(all[r].status == 1, "%s: rank %zu: %d", row.words, r, all[r].status);
        }
    }
}

// Contradictory or incomplete variables of launchers are refused.
TEST(ranks_variables) {
    static const Refusal words[] = {
        {"WORLD_SIZE=2 MASTER_ADDR=localhost RANK=0", "but MASTER_PORT is not set: "},
        {"WORLD_SIZE=2 MASTER_ADDR=localhost RANK=0 MASTER_PORT=65535 "
         "TORCHELASTIC_USE_AGENT_STORE=True", "but MASTER_PORT is too high: "},
        {"WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=9", "is 2, but RANK is not set: "},
        {"WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=9 RANK=2", "has a higher rank: "},
        {"WORLD_SIZE=two", "WORLD_SIZE is 'two', expected a number from 0 to "},
        {"WORLD_SIZE=2 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=3",
         "WORLD_SIZE is 2, but SLURM_STEP_NUM_TASKS is 3: both count the processes of this run"}};
    for (const Refusal &row : words) {
        expect_refused(start_by_tcp({row.arguments}, TINY "-x 1")[0], row.words, row.arguments);
    }
    // srun's local ID selects the GPU, not the order of the ranks on the machine.
    const Text same = master(free_port()) + "SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_PROCID=";
    expect_refused(start_by_tcp({same + "0", same + "1"}, TINY "-x 1 --timeout 1")[0],
                   "ranks 0 and 1 would share one GPU, ", "two ranks with one local ID");
}

// In a build with MPI, MASTER_ADDR selects TCP. Without it, MPI is initialised for calls from one
// thread, after this rank's GPU has become the current device.
TEST(ranks_mpi_starts) {
    need_mpi();
    int port = 0;
    const int listener = listen_on(&port);
    const Outcome taken = shell(text("MASTER_ADDR=localhost MASTER_PORT=%d mpirun --oversubscribe "
                                     "-np 2 $PROGRAM ", port) + ODD "-d 48 -x 1 < /dev/null");
    expect(taken.status != 0 && taken.err.find("rank 0 cannot listen on port ") != Text::npos, "%s",
           taken.err.c_str());
    close(listener);
    write_file("mpi.c", "#include <stdio.h>\n#include <stdlib.h>\n"
                        "int MPI_Init_thread(int *c, char ***v, int level, int *got) {\n"
                        "    (void)c, (void)v, (void)got;\n"
                        "    printf(\"level %d\\n\", level);\n    exit(0);\n}\n");
    if (shell("${CC:-cc} -shared -fPIC -o mpi.so mpi.c").status != 0) {
        skip("no cc");
    }
    for (const char *gpus : {"2", "0"}) {
        const Outcome o = program(ODD "-d 48 -x 1 --quiet", [=] {
            setenv("LD_PRELOAD", "./mpi.so", 1);
            setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
            setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1", 1);
            setenv("EMU_GPUS", gpus, 1);
        });
        if (gpus[0] == '2') {
            expect(o.status == 0 && o.out == "level 1\n", "%d: %s%s", o.status, o.out.c_str(),
                   o.err.c_str());  // MPI_THREAD_FUNNELED of Open MPI and MPICH
        } else {
            expect_refused(o, "no CUDA-capable device", "no GPU");
        }
    }
}

// Under mpirun, which gives ranks a pseudo-terminal, lines are whole and never rewritten.
TEST(ranks_whole_lines) {
    need_mpi();
    for (const char *ranks : {"1", "2"}) {
        const Outcome o = shell(Text("mpirun --oversubscribe -np ") + ranks + " $PROGRAM " ODD
                                "-d 48 -x 3 -v 1 -m 1 < /dev/null");
        expect_success(o, ranks);
        expect(o.out.find('\033') == Text::npos && o.out.find("\nstep    2/3  ") != Text::npos &&
                   o.out.find("\nstep    3/3  ") != Text::npos, "%s: %s", ranks, o.out.c_str());
    }
}

// All ranks compute with the algorithms that rank 0 measured as the fastest. Here that is the
// third, which is wrong on rank 1: the numbers show that rank 1 uses it, although it would choose
// the first itself. Ranks that resume the checkpoint also use it, although both would choose the
// first.
TEST(ranks_choices, REST) {
    need_mpi();
    for (const char *second : {"951", "159", "951 EMU_LT_WRONG=3", "159 EMU_LT_WRONG=3"}) {
        const Text program = " $PROGRAM " ODD "-d 48 -x 2 --quiet -o ";
        const Text folder = text("with%zu", strlen(second)) + second[0];
        // Without HOME, the ranks have no common file of choices.
        const Text env = " -np 1 env -u HOME -u XDG_CACHE_HOME EMU_LT_TIMES=";
        expect_success(shell("mpirun --oversubscribe" + env + "951" + program + folder + " :" +
                             env + second + program + folder + " < /dev/null"), second);
    }
    const Text right = numbers_of("with39"), wrong = numbers_of("with189");
    expect(!right.empty() && numbers_of("with31") == right, "one algorithm, different bits");
    expect(!wrong.empty() && wrong != right && numbers_of("with181") == wrong,
           "rank 1 keeps its own choice: %s, %s", right.c_str(), numbers_of("with181").c_str());
    for (const char *second : {"159", "159 EMU_LT_WRONG=3"}) {
        const Text folder = text("on%zu", strlen(second));
        shell("mkdir " + folder + "; cp -r with39/step-00000002 " + folder);
        const Text program = " $PROGRAM " ODD "-d 48 -x 3 -y 1 --quiet -o " + folder;
        const Text env = " -np 1 env -u HOME -u XDG_CACHE_HOME EMU_LT_TIMES=";
        expect_success(shell("mpirun --oversubscribe" + env + "159" + program + " :" + env +
                             second + program + " < /dev/null"), second);
    }
    expect(!numbers_of("on3").empty() && numbers_of("on18") != numbers_of("on3"),
           "rank 1 does not use the checkpoint's: %s", numbers_of("on3").c_str());
}

// A checkpoint of three ranks is equivalent to that of one: any other number of ranks resumes it at
// any ZeRO stage, and so does the CPU program; the same number resumes to the same bits, which
// equal those of a run that validates, samples and saves nothing before its end.
TEST(ranks_resume) {
    const Text part = ODD "-d 144 -s 2 -g 4 ", whole = "-d 144 -x 4 -z 3 --gpus 3 ";
    run(ODD + whole + "--keep 9 -v 1 -m 2 -s 2 -g 4 -n 2", "undisturbed");
    run(ODD + whole + "-v 0", "plain");
    expect(tensors_of("plain", 4) == tensors_of("undisturbed", 4), "-v, -s or -n changes bits");
    for (int n : {1, 2, 3}) {
        const Text folder = text("from%d", n);
        shell("mkdir " + folder + "; cp -r undisturbed/step-00000002 " + folder);
        run(part + text("-x 4 -y 1 --gpus %d", n) + (n > 1 ? text(" -z %d", n) : Text()), folder);
        const auto got = values_in(read_file(folder + "/log.jsonl"), "loss");
        const auto want = values_in(read_file("undisturbed/log.jsonl"), "loss");
        expect(got.size() == 2 && want.size() == 4, "%d ranks: %zu losses", n, got.size());
        for (size_t i = 0; i < got.size() && want.size() == 4; i++) {
            expect_near(got[i], want[2 + i], 2e-3, "%d ranks, step %zu", n, i + 3);
        }
    }
    expect(!tensors_of("undisturbed", 4).empty() &&
               tensors_of("from3", 4) == tensors_of("undisturbed", 4),
           "three ranks resume with different bits");
    shell("mkdir cpu; cp -r undisturbed/step-00000002 cpu");
    expect_success(outcome(start_program("train_gpt2", ODD "-d 144 -x 3 -y 1 --quiet -o cpu")),
                   "the CPU program");
    run(part + "-x 4 -y 1 --gpus 2 -z 3", "cpu");
    // From bf16, whose master weights are stored as low halves, to fp32 and fp16, at two stages.
    for (const char *type : {"fp32", "fp16"}) {
        for (int z : {2, 3}) {
            const Text folder = type + text("z%d", z);
            shell("mkdir " + folder + "; cp -r undisturbed/step-00000002 " + folder);
            run(part + text("-x 3 -y 1 --dtype %s --gpus 2 -z %d", type, z), folder);
        }
        expect_same(type + Text("z2"), type + Text("z3"), 3);
    }
    // The last of thirteen ranks has an empty shard of this small model.
    const Text small = "-i train.bin -e l1h1c16t16 -b 1 --gpus 13 -z 1 -k constant ";
    run(small + "-x 2", "whole", with("EMU_GPUS", "13"));
    run(small + "-x 1", "small", with("EMU_GPUS", "13"));
    run(small + "-x 2 -y 1", "small", with("EMU_GPUS", "13"));
    expect_same("whole", "small", 2);
    // Algorithms chosen for another type are not used, and checking them keeps fp16's loss scale.
    const Text types = ODD "-d 48 --tune 1 --gpus 2 ";
    run(types + "-x 2 --dtype bf16", "types");
    run(types + "-x 3 -y 1 --dtype fp16", "types");
    const auto norms = values_in(read_file("types/log.jsonl"), "grad_norm");
    expect(norms.size() == 3 && norms.back() > 0.5 * norms[1], "%zu norms, the last %g",
           norms.size(), norms.back());
}

// Changes a checkpoint into one of step `step` whose norms were all so small that --skip-zscore
// skips every step, so that a resumed run saves exactly the states that it read.
static void forge_idle(const Text &folder, int was, int step) {
    const Text at = folder + text("/step-%08d", step);
    rename((folder + text("/step-%08d", was)).c_str(), at.c_str());
    for (const Text &name : split(names_in(at, "state-").c_str())) {
        auto [header, data] = header_and_data(read_file(at + "/" + name));
        const double tiny = 1e-9;
        for (const char *key : {"step", "updates", "norm_count"}) {
            const Text quoted = text("\"%s\":\"", key);
            const size_t value = header.find(quoted) + quoted.size();
            header.replace(value, header.find('"', value) - value, text("%d", step));
        }
        for (size_t i = 0; i < 128; i++) {
            memcpy(&data[8 * i], &tiny, 8);
        }
        write_file(at + "/" + name, with_length(header, data));
    }
    write_manifest(at);
}

// States move from one number of ranks, stage and placement to another, to the CPU program and
// back, and every element stays the same; each rank writes a file.
TEST(ranks_states, REST) {
    static const struct {
        int ranks;
        const char *options;
        // 0 ranks: the CPU program, for the types that it supports.
    } hops[] = {{2, "-z 0"}, {1, "--offload moments,weights"},
                {4, "-z 3 --offload moments,weights"}, {2, "-z 2 --offload weights"}, {1, ""},
                {0, ""}, {3, "-z 1 --offload moments,residuals"}};
    for (const char *types : {"", "--moments bf16 ", "-w 0 ", "--dtype fp16 "}) {
        const Text shape = "-i train.bin -e l3h3c96t16 -t 12 -b 1 ";
        remove_folder("out");
        run(shape + types + "-d 36 -x 2 --gpus 3 -z 1", "out");
        forge_idle("out", 2, 130);
        int step = 130;
        Text counters;
        // With fp16 the fp32 weights are in the model's file, not among the states.
        auto model_of = [](int of) {
            const Text at = text("out/step-%08d/model.safetensors", of);
            return header_and_data(read_file(at)).second;
        };
        const Text want = states_of("out", step, &counters), model = model_of(step);
        // Widened fp16 numbers would end in zeros, so that a save could lose their low bits
        // unnoticed.
        size_t fine = 0;
        for (size_t i = 0; i + 4 <= model.size(); i += 4) {
            fine += (model[i] | (model[i + 1] & 0x1f)) != 0;
        }
        expect(!strstr(types, "fp16") || fine > model.size() / 8, "%zu of %zu bytes in fp32", fine,
               model.size());
        for (const auto &hop : hops) {
            const int n = hop.ranks ? hop.ranks : 1;
            if (!hop.ranks && types[0]) {
                continue;
            }
            const Text line = shape + text("-x %d -y 1 --keep 1 --skip-zscore 1 -d %d ", ++step,
                                           12 * n);
            if (hop.ranks) {
                run(line + types + text("--gpus %d ", n) + hop.options, "out");
            } else {
                expect_success(outcome(start_program("train_gpt2", line + "--quiet -o out")),
                               "the CPU program");
            }
            const Text got = states_of("out", step, &counters), who = text("%s%d ranks %s", types,
                                                                          n, hop.options);
            expect(!hop.ranks || (got == want && got.size() > 500000), "%s: other states",
                   who.c_str());
            expect(!hop.ranks || (model_of(step) == model && model.size() > 500000),
                   "%s: other weights", who.c_str());
            expect(values_in(read_file("out/log.jsonl"), "skipped").back() == 1, "%s: it learnt",
                   who.c_str());
            const Text files = names_in(text("out/step-%08d", step), "state-");
            expect(split(files.c_str()).size() == (size_t)n, "%s: %s", who.c_str(), files.c_str());
        }
    }
}

// A rank runs in exactly the bytes of its plan plus those of NCCL, context and libraries, and is
// refused with one byte less. NCCL's use of its reserve, which depends on the link and on
// NCCL_MAX_CTAS, is reported.
TEST(ranks_memory) {
    static const struct {
        int ranks;
        const char *options;
        int ctas;                    // 2 over PCIe, 16 over NVLink, or NCCL_MAX_CTAS
        const char *nvlink, *limit;  // EMU_NVLINK, NCCL_MAX_CTAS
    } table[] = {{2, "-z 0", 2, "", ""}, {3, "-z 0", 16, "1", ""}, {2, "-z 1", 5, "1", "5"},
                 {3, "-z 1", 1, "", "1"}, {2, "-z 2", 2, "", ""}, {3, "-z 2", 2, "", ""},
                 {2, "-z 3", 2, "", ""}, {3, "-z 3", 2, "", ""},
                 {3, "-z 1 --offload moments,master,residuals", 2, "", ""},
                 {2, "-z 2 --offload weights", 2, "", ""},
                 {3, "-z 3 --offload weights,moments", 2, "", ""}};
    for (const auto &row : table) {
        const Text line = ODD "-x 1 -r none " + text("-d %d --gpus %d %s", 24 * row.ranks,
                                                     row.ranks, row.options) +
                          (strstr(row.options, "--offload") ? "" : " --offload none");
        const Text plan = program(line + " --plan --json").out;
        const char *key = "\"total_bytes\":";
        const long bytes = atol(&plan[plan.find(key) + strlen(key)]);
        // 12 MiB per CTA for each peer and for the ring, and 64 MiB for NVLS.
        const long nccl = ((long)row.ranks * row.ctas * 12 + (row.nvlink[0] ? 64 : 0)) << 20;
        expect(bytes > 1 << 20, "%s: %ld bytes", line.c_str(), bytes);
        const char *pinned = "\"host_bytes\":";
        const long host = atol(&plan[plan.find(pinned) + strlen(pinned)]);
        expect_refused(program(line, with("EMU_HOST_MEM", text("%ld", host - 1).c_str())),
                       "cannot pin", line);
        for (long less : {0, 1}) {
            const Outcome o = program(line, [=] {
                const long page = 4096;  // the heartbeats shared with the parent are pinned too
                setenv("EMU_HOST_MEM", text("%ld", host + page).c_str(), 1);
                setenv("EMU_CONTEXT", "300M", 1);
                setenv("XDG_CACHE_HOME", "/proc/none", 1);
                setenv("EMU_LIBRARY", "200M", 1);
                setenv("EMU_NCCL", "12M", 1);
                setenv("EMU_NVLINK", row.nvlink, 1);
                row.limit[0] ? setenv("NCCL_MAX_CTAS", row.limit, 1) : unsetenv("NCCL_MAX_CTAS");
                const long all = bytes + nccl + (500L << 20) - less;
                setenv("EMU_GPU_MEM", text("%ld", all).c_str(), 1);
            });
            if (less) {
                expect_too_large(o, ": 1 B short", line);
            } else {
                expect_success(o, line);
                const Text mib = text("%.1f MiB", (double)(nccl >> 20));
                const Text told = "libraries took about 200.0 MiB, NCCL " + mib + " of " + mib +
                                  " reserved\n";
                expect(o.out.find(told) != Text::npos, "%s", o.out.c_str());
            }
        }
    }
}

// What ranks do not support is refused in one line, whichever process detects it.
TEST(ranks_refused) {
    static const Refusal table[] = {
        {"--gpus 3 -d 100", "is not a multiple of B x T x GPUs = 2 x 12 x 3 = 72"},
        {"--gpus 3 -i nothing.bin", "no token file matches nothing.bin"},
        {"--gpus 2 -z 4", "--zero (-z): '4'"},
        {"--gpus 2 -z 3 --eval nothing", "--zero (-z) 3 is for training"},
        {"--gpus 2 --check", "--check, --compare and --generate run on one GPU only"},
        {"--gpus 2 -l 2e9", "--lr (-l): '2e9'"},
    };
    const Text shape = "-e l3h3c96t16 -t 12 -b 2 ";
    for (const Refusal &row : table) {
        const Text data = strstr(row.arguments, "-i ") ? "" : "-i train.bin ";
        expect_refused(program(data + shape + row.arguments), row.words, row.arguments);
    }
    expect_refused(program(ODD "--gpus 3", with("EMU_GPUS", "2")),
                   "ranks 0 and 2 would share one GPU, 0000:00:00.0 of ", "too few GPUs");
    expect_refused(program(ODD "--gpus 2", with("PMI_SIZE", "2")),
                   "a launcher has already started ranks", "two launchers");
    expect_too_large(program(ODD "--gpus 2", with("EMU_GPU_MEM", "82000000")), " short",
                     "memory");
    expect_refused(program(ODD "--gpus 2 --offload gradients"), "works on one GPU only", "offload");
    expect_refused(program(ODD "--gpus 2", with("NCCL_MAX_CTAS", "0")),
                   "NCCL_MAX_CTAS is '0'; allowed: a number from 1 to 64", "NCCL_MAX_CTAS");
    expect_refused(outcome(start_program("train_gpt2", ODD "--gpus 2")),
                   "--gpus 2: several ranks are not supported: this program runs on", "CPU");
}

// If ranks differ in options, data or program, rank 0 names the first rank that differs, and none
// trains.
TEST(ranks_mixed) {
    need_mpi();
    write_file("other.bin", read_file("val.bin"));
    shell("mkdir there; cp train.bin val.bin there; cp val.bin there/train.bin");
    write_file("program", read_file(tested) + "x");
    shell("chmod 755 program");
    static const Refusal table[] = {
        {"$PROGRAM OPTIONS --seed 7", "rank 1 was given different options from rank 0"},
        {"$PROGRAM OPTIONS -l 1e-5", "rank 1 was given different options from rank 0"},
        {"sh -c 'cd there && $PROGRAM OPTIONS'", "rank 1 reads different data from rank 0"},
        {"./program OPTIONS", "rank 1 runs a different build of this program from rank 0"},
    };
    for (const Refusal &row : table) {
        Text second = row.arguments;
        second.replace(second.find("OPTIONS"), 7, ODD "-x 1");
        const Outcome o = shell("mpirun --oversubscribe -np 1 $PROGRAM " ODD "-x 1 : -np 1 " +
                                second + " < /dev/null");
        size_t lines = 0;
        for (size_t at = 0; (at = o.err.find("ranks must use the same", at)) != Text::npos; at++) {
            lines++;
        }
        expect(o.status != 0 && lines == 1 && o.err.find(row.words) != Text::npos, "%s: %d, %zu",
               row.arguments, o.status, lines);
        expect(o.out.find("step    1/1") == Text::npos, "%s: it trained", row.arguments);
    }
    // GPUs with different free memory: all ranks use the automatic choices for the minimum.
    const Text plan = program(ODD "-d 48 --gpus 2 -r block --plan --json").out;
    const char *key = "\"total_bytes\":";
    const long bytes = atol(&plan[plan.find(key) + strlen(key)]) + (2L * 2 * 12 << 20);
    const Text line = " $PROGRAM " ODD "-d 48 -x 1 ";
    const Text small = text(": -np 1 env EMU_GPU_MEM=%ld", bytes);
    const Outcome o = shell("mpirun --oversubscribe -np 1" + line + small + line + " < /dev/null");
    expect_success(o, "GPUs of two sizes");
    expect(o.out.find("chosen ") != Text::npos && o.out.find("-r block") != Text::npos, "%s",
           o.out.c_str());
    // One GPU each on two machines whose names differ at the end, if a test may set host names.
    const Text name = "unshare -u sh -c 'hostname " + Text(62, 'm');
    if (shell(name + "'").status == 0) {
        const Text rest = " && EMU_GPUS=1 exec $PROGRAM " ODD "-d 48 -x 1 --quiet'";
        expect_success(shell("mpirun --oversubscribe -np 1 " + name + "1" + rest + " : -np 1 " +
                             name + "2" + rest + " < /dev/null"), "two machines");
    }
}

static Ints children_of(pid_t parent) {
    Ints pids;
    const Text list = read_file(text("/proc/%d/task/%d/children", (int)parent, (int)parent));
    for (const Text &word : split(list.c_str())) {
        if (!word.empty()) {
            pids.push_back(atoi(word.c_str()));
        }
    }
    return pids;
}

// For program(): sets environment variables, and makes ranks wait forever for one that has exited.
static std::function<void()> with_faults(const Text &variables) {
    return [=] {
        for (const Text &word : split((variables + " EMU_NCCL_HANG=1").c_str())) {
            const size_t at = word.find('=');
            setenv(word.substr(0, at).c_str(), word.substr(at + 1).c_str(), 1);
        }
    };
}

// Starts three ranks with a long run and waits until they train.
static Ints start_ranks(pid_t *parent, const char *more) {
    *parent = start(ODD "-d 72 --gpus 3 -z 1 -k constant -x 100000 --quiet -o out " + Text(more),
                    [] {
                        with_faults("EMU_FAULT_RANK=0")();
                        signal(SIGCHLD, SIG_IGN);  // inherited from some shells and daemons
                    });
    wait_until([] { return read_file("out/log.jsonl").find("{\"step\":2,") != Text::npos; });
    const Ints ranks = children_of(*parent);
    expect(ranks.size() == 3, "%zu ranks", ranks.size());
    return ranks;
}

static void expect_none_left(const Ints &ranks, const char *who) {
    for (const int pid : ranks) {
        wait_until([&] { return kill(pid, 0) != 0; });
        expect(kill(pid, 0) != 0, "%s: a rank still exists", who);
    }
}

// If a rank is killed, the run ends with one line that names it, although on GPUs the others would
// wait for it forever. If the parent is killed, its ranks end too.
TEST(ranks_die) {
    for (size_t victim : {2, 0}) {
        pid_t parent;
        remove_folder("out");
        const Ints ranks = start_ranks(&parent, "");
        if (ranks.size() == 3) {
            kill(ranks[victim], SIGKILL);
            const Outcome o = outcome(parent);
            expect_refused(o, text("rank %zu was ended by signal 9 (Killed): the run ends", victim),
                           "a killed rank");
            expect_none_left(ranks, "a killed rank");
        }
    }
    pid_t parent;
    remove_folder("out");
    const Ints ranks = start_ranks(&parent, "");
    kill(parent, SIGKILL);
    outcome(parent);
    expect_none_left(ranks, "a killed parent");
}

// If a rank is stopped or hangs, the run ends with one line that names it; if a rank skipped a
// collective, the line tells in which call each rank waits. On an idle machine this takes at most
// --timeout plus 5 seconds; here 30 are allowed, and the timeouts tolerate a machine that stalls
// for a second or two.
TEST(ranks_hang) {
    enum { WITHIN_MS = 30000 };
    pid_t parent;
    const Ints ranks = start_ranks(&parent, "--timeout 4");
    double began = wall_ms(), longest = 0;
    kill(ranks.size() == 3 ? ranks[1] : parent, SIGSTOP);
    expect_refused(outcome(parent), "no progress for 4 s (--timeout): rank 1 is stopped by signal "
                   "19", "a stopped rank");
    longest = wall_ms() - began;
    expect_none_left(ranks, "a stopped rank");
    // A process held by a debugger does not end with its parent, and neither may one whose GPU
    // hangs.
    remove_folder("out");
    const Ints held = start_ranks(&parent, "--timeout 4");
    const pid_t last = held.size() == 3 ? held[1] : parent;
    const bool holds = ptrace(PTRACE_SEIZE, last, NULL, NULL) == 0;  // some systems forbid it
    kill(last, SIGKILL);
    expect_refused(outcome(parent), holds ? "rank 1 has exited, but the system has not ended it"
                                          : "rank 1 was ended by signal 9", "a held rank");
    waitpid(last, NULL, __WALL);
    expect_none_left(held, "a held rank");
    static const struct {
        const char *faults, *words;
    } table[] = {
        {"EMU_FAULT_RANK=2 EMU_FAULT_LAUNCH=400", ": rank 2 hangs while training, after "},
        {"EMU_FAULT_RANK=0 EMU_FAULT_LAUNCH=160", ": rank 0 hangs while starting, after "},
        {"EMU_FAULT_RANK=1 EMU_FAULT_SKIP=200", ", rank 1 waits for others while training, in "},
    };
    for (const auto &row : table) {
        began = wall_ms();
        const Outcome o = program(ODD "-d 72 --gpus 3 -z 1 -x 100 --quiet --timeout 4",
                                  with_faults(row.faults));
        expect_refused(o, row.words, row.faults);
        longest = std::max(longest, wall_ms() - began);
    }
    // An error that NCCL reports ends the run long before its --timeout of a minute.
    began = wall_ms();
    expect_refused(program(ODD "-d 72 --gpus 3 -z 3 -x 100 --quiet",
                           with_faults("EMU_FAULT_RANK=2 EMU_FAULT_ASYNC=300")),
                   "rank 2: NCCL: a remote process has exited; ", "an NCCL error");
    longest = std::max(longest, wall_ms() - began);
    expect(longest < WITHIN_MS, "%.0f ms", longest);
    detail = text("at most %.1f s, some with the time before the fault", longest * 1e-3);
    expect_refused(program(TINY "--timeout 9"), "--timeout needs several ranks", "one rank");
}

// A rank that waits for a file server, or whose NCCL is slow to start, gets ten times as long, and
// so do the ranks that wait for it, under each watchdog. A pipe that is not read blocks its rank.
TEST(ranks_slow, REST) {
    const Text part = TINY "-x 1 --timeout 1 --quiet ";
    const int port = free_port();
    // Appends arguments, so that start_by_tcp can start two ranks of one run and another run.
    auto with_end = [](const Text &end) { return " sh -c 'exec \"$0\" \"$@\" " + end + "'"; };
    const Text tcp = master(port) + "WORLD_SIZE=2 ";
    const Text hangs = "EMU_NCCL_HANG=1 ", late = hangs + "EMU_FAULT_RANK=1 EMU_FAULT_LATE=2500 ";
    for (const Outcome &o : start_by_tcp({tcp + late + "RANK=0", tcp + late + "RANK=1",
                                          late + with_end("--gpus 2")}, part)) {
        expect_success(o, "NCCL starts slowly");
    }
    // A training run finds a pipe in the place of rank 1's state file. The pipe is read after
    // 2.5 s, and then fails like any file that is not a regular one.
    const Text saves = TINY "-k constant -x 30 --timeout 1 --quiet ", tmp = "/step-00000030.tmp/";
    auto hold = [&](const Text &out, int read_after_us) {
        const pid_t pid = fork();
        if (pid == 0) {
            const Text log = out + "/log.jsonl", fifo = out + tmp + "state-1-of-2.safetensors";
            wait_until([&] { return read_file(log).find("{\"step\":2,") != Text::npos; });
            mkdir((out + tmp).c_str(), 0755);
            mkfifo(fifo.c_str(), 0644);
            wait_until([&] { return read_file(log).find("{\"step\":30,") != Text::npos; });
            usleep((useconds_t)read_after_us);
            shell("timeout 5 cat " + fifo + " > /dev/null");
            _exit(0);
        }
        return pid;
    };
    const pid_t of_gpus = hold("gpus", 2500000), of_tcp = hold("tcp", 2500000);
    const auto all = start_by_tcp({tcp + hangs + "RANK=0" + with_end("-o tcp"),
                                   tcp + hangs + "RANK=1" + with_end("-o tcp"),
                                   hangs + with_end("--gpus 2 -o gpus")}, saves);
    const Text words = "rank 1: cannot write ";
    expect_refused(all[0], "rank 1 cannot save; see its message", "by TCP");
    expect_refused(all[1], words, "by TCP");
    expect_refused(all[2], words, "--gpus");
    waitpid(of_gpus, NULL, 0);
    waitpid(of_tcp, NULL, 0);
    if (getenv("FULL")) {  // ten times --timeout is the limit
        const pid_t never = hold("never", 60000000);
        expect_refused(program(saves + "--gpus 2 -o never"), "no progress for 1", "a hanging disk");
        kill(never, SIGKILL);
        waitpid(never, NULL, 0);
    }
}

// NCCL's errors come with hints: too little shared memory, or a single visible GPU per rank.
TEST(ranks_hints) {
    const Text faults = " EMU_FAULT_RANK=1 EMU_FAULT_INIT=1 ";
    const Text part = TINY "-x 1 --quiet --timeout 2 ";
    const Text shm = "unshare -m sh -c 'mount -t tmpfs -o size=64m none /dev/shm";
    if (shell(shm + "'").status == 0) {
        expect_refused(shell(shm + " && EMU_NCCL_HANG=1" + faults + "exec $PROGRAM " + part +
                             "--gpus 2'"),
                       "unhandled system error;  (/dev/shm has less than 256 MiB: a container "
                       "needs --shm-size=1g or --ipc=host)", "shared memory");
    } else {
        detail = "no mount: shared memory not tried";
    }
    const Text one = master(free_port()) + "WORLD_SIZE=2 EMU_GPUS=1 EMU_NCCL_TIMEOUT_S=1" + faults +
                     "RANK=";
    const auto all = start_by_tcp({one + "0 EMU_MACHINE=1", one + "1 EMU_MACHINE=2"}, part);
    expect(all[1].err.find("(this rank sees a single GPU, ") != Text::npos ||
               all[1].err.find("(/dev/shm has less") != Text::npos, "%s", all[1].err.c_str());
    const auto same = start_by_tcp({one + "0", one + "1"}, part);
    expect_refused(same[0], "as it has GPUs, and have srun show all of them to each: "
                            "--gpus-per-node with --gpu-bind=none", "one GPU");
    expect_refused(program(part + "--gpus 2",
                           with_faults("EMU_FAULT_RANK=1 EMU_FAULT_SKIP=1")),
                   ": the first collective does not complete; if the GPUs cannot access each "
                   "other's memory, NCCL_P2P_DISABLE=1 helps; the run ends", "P2P");
}

// Under a launcher each rank has its own watchdog, and reports that other ranks delay it.
TEST(ranks_hang_mpirun) {
    need_mpi();
    static const Refusal table[] = {
        {"RANK=1 EMU_FAULT_LAUNCH=400", ": rank 1 hangs while training, after "},
        {"RANK=0 EMU_FAULT_ASYNC=200", ": rank 0: NCCL: a remote process has exited; "}};
    for (const Refusal &row : table) {
        const Outcome o = shell(text("EMU_NCCL_HANG=1 EMU_FAULT_%s mpirun --oversubscribe -np 2 ",
                                     row.arguments) + "$PROGRAM " ODD "-d 48 -x 100 --quiet "
                                "--timeout " + (row.arguments[5] == '1' ? "4" : "60") +
                                " < /dev/null");
        expect(o.status != 0 && o.err.find(row.words) != Text::npos, "%d: %s", o.status,
               o.err.c_str());
    }
}

// A run that was stopped as a whole, as by Ctrl-Z in a shell, continues however long that lasted,
// even if its ranks made no progress between the parent's checks before and after it, for example
// because of a long kernel.
TEST(ranks_stopped) {
    const pid_t parent = start(ODD "-d 72 --gpus 3 -x 10000 --quiet -o out --timeout 5",
                               [] { setpgid(0, 0); });
    wait_until([] { return read_file("out/log.jsonl").find("{\"step\":2,") != Text::npos; });
    for (const int rank : children_of(parent)) {
        kill(rank, SIGSTOP);
    }
    usleep(600000);
    kill(parent, SIGSTOP);
    usleep(7000000);
    kill(parent, SIGCONT);
    usleep(300000);
    kill(-parent, SIGCONT);
    const size_t before = read_file("out/log.jsonl").size();
    wait_until([&] { return read_file("out/log.jsonl").size() > before + 1000; });
    kill(parent, SIGTERM);
    expect_success(outcome(parent), "stopped and continued");
}

// A run whose output is not read for a while, as after Ctrl-S or in `less`, waits and continues.
TEST(ranks_unread) {
    int ends[2];
    char piece[4096];
    if (pipe(ends) != 0 || fcntl(ends[1], F_SETPIPE_SZ, 4096) < 0) {
        skip("no small pipe");
    }
    const pid_t parent = start(TINY "--gpus 2 -x 100 -o out --timeout 3", [&] {
        dup2(ends[1], STDOUT_FILENO);
        close(ends[0]);
        close(ends[1]);
    });
    close(ends[1]);
    wait_until([] { return exists("out/log.jsonl"); });
    usleep(6000000);
    expect(log_steps("out/log.jsonl").size() < 100, "all output fits into the pipe");
    while (read(ends[0], piece, sizeof piece) > 0) {
    }
    expect_success(outcome(parent), "an output that is not read");
    expect(log_steps("out/log.jsonl") == one_to(100), "steps of the log");
}

// A signal to the parent or to any rank, in steps, validations, samples and saves, makes all ranks
// save the same step and exit with 0; the resumed run ends with the bytes of an uninterrupted one.
TEST(ranks_signals) {
    const Text part = TINY "-j val.bin --gpus 3 -z 1 -v 2 -m 3 -x 12 -n 3 -s 2 -g 5";
    run(part, "undisturbed");
    static const struct {
        int rank, signal;  // rank -1: the parent; -2: all of them, as for Ctrl-C
    } table[] = {{-2, SIGINT}, {-1, SIGTERM}, {2, SIGUSR1}, {1, SIGINT}, {0, SIGINT}};
    const int times = full_or(3, 20);
    int interrupted = 0;
    for (int i = 0; i < times; i++) {
        const auto &row = table[i % 5];
        remove_folder("out");
        pid_t pid = start(part + " --quiet -o out", [] { setpgid(0, 0); });
        wait_until([] { return read_file("out/log.jsonl").find("{\"step\":1,") != Text::npos; });
        usleep((useconds_t)(300000 * random_unit((uint64_t)pid, 1)));
        const Ints ranks = children_of(pid);
        const bool one = row.rank >= 0 && ranks.size() == 3;
        kill(row.rank == -2 ? -pid : one ? ranks[(size_t)row.rank] : pid, row.signal);
        expect_success(outcome(pid), "asked to stop");
        interrupted += read_file("out/log.jsonl").find("\"interrupted\"") != Text::npos;
        run(part + " -y 1", "out");
        expect(tensors_of("out", 12) == tensors_of("undisturbed", 12), "different result");
        expect(log_steps("out/log.jsonl") == one_to(12), "steps of the log");
    }
    // If nothing is validated, sampled or saved, nor compared (every hundred steps), only the
    // status exchanged in each step passes the signal on.
    for (const size_t rank : {0, 1}) {
        remove_folder("steps");
        const pid_t pid = start(ODD "-d 48 --gpus 2 -v 0 -x 90 --quiet -o steps");
        wait_until([] { return read_file("steps/log.jsonl").find("{\"step\":1,") != Text::npos; });
        const Ints ranks = children_of(pid);
        kill(ranks.size() == 2 ? ranks[rank] : pid, SIGINT);
        expect_success(outcome(pid), "asked to stop between steps");
        expect(log_steps("steps/log.jsonl").size() < 90, "rank %zu: the signal is ignored", rank);
    }
    detail = text("%d of %d interrupted", interrupted, times);
}

// A random rank is killed at a random moment, from its first instruction on: one line names it, no
// process is left, and the resumed run ends with the bytes of an uninterrupted one.
TEST(ranks_killed) {
    const Text part = TINY "-j val.bin --gpus 3 -z 1 -v 3 -m 3 -x 16 -n 2 -s 4 -g 5 --timeout 20";
    double began = wall_ms();
    run(part, "undisturbed");
    const double whole_ms = wall_ms() - began;
    const int times = full_or(3, 20);
    int ended = 0, saved = 0;
    for (int i = 0; i < times; i++) {
        remove_folder("out");
        pid_t parent = start(part + " --quiet -o out", with_faults("EMU_FAULT_RANK=0"));
        wait_until([&] { return children_of(parent).size() == 3; });
        const Ints ranks = children_of(parent);
        const size_t victim = (size_t)(3 * random_unit((uint64_t)parent, 1));
        usleep((useconds_t)(700 * whole_ms * random_unit((uint64_t)parent, 2)));
        const int hit = ranks.size() == 3 && kill(ranks[victim], SIGKILL) == 0;
        const Outcome o = outcome(parent);
        if (hit && o.status != 0) {  // otherwise the run had already finished
            expect_refused(o, text("rank %zu was ended by signal 9 (Killed): the run ends", victim),
                           "a killed rank");
            ended++;
        }
        saved += !names_in("out", "step").empty();
        expect_none_left(ranks, "a killed rank");
        run(part + " -y 1", "out");
        expect(tensors_of("out", 16) == tensors_of("undisturbed", 16), "different result");
        expect(log_steps("out/log.jsonl") == one_to(16), "steps of the log");
    }
    detail = text("%d of %d ended, %d had saved", ended, times, saved);
}

// Expects that a rank's error ended the run, and that the previous checkpoint is the only one.
static void expect_stands(const Outcome &o, const Text &words, const Text &good) {
    expect_refused(o, words, words);
    expect(names_in("out", "step") == "step-00000002" && checkpoint_bytes("out", 2, 3) == good,
           "%s: %s", words.c_str(), names_in("out", "").c_str());
}

// If one rank cannot write, because of the disk or another obstacle, rank 0 removes what all ranks
// have written, and the next run resumes from the previous checkpoint.
TEST(ranks_full) {
    const Text part = TINY "--gpus 3 -z 1 ", tmp = "out/step-00000004.tmp/";
    run(part + "-x 2", "out");
    const Text good = checkpoint_bytes("out", 2, 3);
    const std::pair<const char *, const char *> table[] = {
        {"state-0-of-3.safetensors", ": cannot write "},
        {"state-2-of-3.safetensors", ": rank 2: cannot write "},
        {"model.safetensors", ": cannot write "},
        {"manifest.json", ": cannot write "}};
    for (const auto &[file, who] : table) {
        mkdir(tmp.c_str(), 0755);
        mkdir((tmp + file).c_str(), 0755);
        const Outcome o = program(part + "-x 4 -y 1 --quiet -o out");
        expect(names_in(tmp, "") == file, "%s: %s", file, names_in(tmp, "").c_str());
        remove_folder("out/step-00000004.tmp");
        expect_stands(o, who + tmp + file + ": Is a directory", good);
    }
    run(part + "-x 2 -y 1", "out");  // truncates the log
    // One rank reaches its limit on file sizes while it trains.
    const pid_t parent = start(part + "-k constant -x 20 -y 1 --quiet -o out");
    wait_until([] { return read_file("out/log.jsonl").find("{\"step\":4,") != Text::npos; });
    const Ints ranks = children_of(parent);
    const struct rlimit small = {5000, 5000};
    expect(ranks.size() == 3 && prlimit(ranks[1], RLIMIT_FSIZE, &small, NULL) == 0, "prlimit");
    const Outcome o = outcome(parent);
    expect_stands(o, ": rank 1: cannot write out/step-00000020.tmp/state-1-of-3.safetensors: File "
                     "too large", good);
    expect(names_in("out", "") == "lock log.jsonl step-00000002", "%s",
           names_in("out", "").c_str());
}

// A log at the size limit, which concerns only rank 0, stops all ranks at the same step, which is
// saved; one line says what failed.
TEST(ranks_full_log) {
    enum { LIMIT = 400000 };  // in bytes; larger than any file of the checkpoint
    mkdir("out", 0755);
    write_file("out/log.jsonl", "{\"step\":0,\"text\":\"" + Text(LIMIT - 5000, 'x') + "\"}\n");
    const Outcome o = program(TINY "--gpus 3 -z 1 -k constant -x 1000 --quiet -o out", [] {
        const struct rlimit limit = {LIMIT, LIMIT};
        setrlimit(RLIMIT_FSIZE, &limit);
    });
    const Text saved = names_in("out", "step");
    const int step = saved.empty() ? -1 : atoi(saved.c_str() + 5);
    expect_refused(o, text(": cannot write out/log.jsonl: File too large; the run ended after step "
                           "%d, which is saved\n", step), "a full log");
    expect(step > 1 && step < 100 && log_steps("out/log.jsonl").size() + 2 >= (size_t)step,
           "saved: %s", saved.c_str());
    expect_success(program(text(TINY "--gpus 3 -z 1 -k constant -x %d -y 1 --quiet -o out",
                                step + 1)), "resumed");
}

// A rank that is killed in any phase of a save leaves the previous checkpoint. The next run removes
// what is incomplete and ends with the bytes of an uninterrupted one. A FIFO without a reader holds
// the rank in that phase.
TEST(ranks_save_killed, REST) {
    enum { END = 20 };
    const Text part = TINY "--gpus 3 -z 1 -k constant ", whole = part + text("-x %d -y 1 ", END);
    const Text done = text("out/step-%08d", END), tmp = done + ".tmp/";
    run(part + "-x 2", "begun");
    shell("cp -r begun undisturbed");
    const Text good = checkpoint_bytes("begun", 2, 3);
    run(whole, "undisturbed");
    const std::pair<const char *, const char *> table[] = {  // the file that is a FIFO
        {"model.safetensors", ""},
        {"state-1-of-3.safetensors", "state-0-of-3.safetensors"},
        {"manifest.json", "config.json"}};
    for (size_t i = 0; i < 3; i++) {
        for (size_t victim = 0; victim < 3; victim++) {
            if (victim != i && !is_full()) {
                continue;
            }
            remove_folder("out");
            shell("cp -r begun out");
            const pid_t parent = start(whole + "--quiet -o out", with("EMU_NCCL_HANG", "1"));
            auto logged = [](int step) {
                return read_file("out/log.jsonl").find(text("{\"step\":%d,", step)) != Text::npos;
            };
            wait_until([&] { return logged(3); });  // by then it has removed old files
            mkdir(tmp.c_str(), 0755);
            expect(mkfifo((tmp + table[i].first).c_str(), 0644) == 0, "mkfifo");
            wait_until([&] {
                return exists(done) || (logged(END) && exists(tmp + table[i].second));
            });
            expect(!exists(done), "renamed before %s exists", table[i].first);
            const Ints ranks = children_of(parent);
            if (ranks.size() == 3) {
                kill(ranks[victim], SIGKILL);
            }
            const Outcome o = outcome(parent);
            expect(exists(tmp + table[i].first), "%s: removed", table[i].first);
            expect_none_left(ranks, table[i].first);
            shell("mv " + tmp + " unfinished");
            expect_stands(o, text("rank %zu was ended by signal 9 (Killed)", victim), good);
            shell("mv unfinished " + tmp);
            run(whole, "out");
            expect(names_in("out", "step") == text("step-00000002 step-%08d", END) &&
                   tensors_of("out", END) == tensors_of("undisturbed", END), "%s: different result",
                   table[i].first);
        }
    }
}

// If one rank cannot read its data, it prints one line, no rank applies the step, and the run ends
// with its state saved. Also tested with rank 0, since 0 could mean "no fault".
TEST(ranks_fault) {
    const Text part = "-i train.bin -e l2h2c16t16 -b 2 --gpus 3 -z 1 --shuffle 0 -x 30 ";
    run(part + "-n 20", "undisturbed");
    // Step 3 starts at sequence 12, which rank 0 reads.
    Text wrong = read_file("train.bin");
    wrong.replace(SHARD_BYTES + 2 * (12 * 16 + 8), 2, "\xff\xff");
    write_file("wrong.bin", wrong);
    const Outcome first = program("-i wrong.bin -e l2h2c16t16 -b 2 --gpus 3 -z 1 --shuffle 0 -x 30 "
                                  "--quiet -o first");
    expect_refused(first, ": wrong.bin: token 200 is 65535, outside the vocabulary", "rank 0");
    expect(first.err.find("the run ended after step 2, which is saved") != Text::npos &&
               names_in("first", "step") == "step-00000002", "%s", first.err.c_str());
    pid_t pid = start(part + "--quiet -o out");
    wait_until([] { return read_file("out/log.jsonl").find("{\"step\":1,") != Text::npos; });
    // Step 21 starts at sequence 120; rank 2 reads 124 and 125.
    expect(truncate("train.bin", SHARD_BYTES + 2 * (124 * 16 + 8)) == 0, "truncate");
    const Outcome o = outcome(pid);
    expect_refused(o, "rank 2: ", "data that ends");
    expect(o.err.find("the run ended after step 20, which is saved") != Text::npos, "%s",
           o.err.c_str());
    expect(names_in("out", "step") == "step-00000020" &&
               tensors_of("out", 20) == tensors_of("undisturbed", 20),
           "%s", names_in("out", "").c_str());
}

// The score of an evaluation equals that of one rank to the last digit.
TEST(ranks_eval) {
    write_file("e.bin", eval_bytes(random_questions(7, 50257, 2)));
    const Text ask = "-e l1h1c16t16 --eval e.bin --json -b 3 --gpus ";
    const Outcome one = program(ask + "1");
    expect_success(one, "one rank");
    for (const char *n : {"2", "3"}) {
        const Outcome o = program(ask + n);
        expect_success(o, n);
        expect(o.out == one.out, "%s ranks: %s", n, o.out.c_str());
    }
}

// Returns the log lines of one rank, from the emulator's log of a run.
static Words log_of_rank(const Text &log) {
    // The parent logs too, but only ranks log collectives.
    const size_t collective = log.find("] AllGather"), begin = log.rfind('\n', collective) + 1;
    if (collective == Text::npos) {
        return {};
    }
    const Text own = log.substr(begin, collective + 1 - begin);
    Words lines;
    for (size_t at = 0, end; (end = log.find('\n', at)) != Text::npos; at = end + 1) {
        if (log.compare(at, own.size(), own) == 0) {
            lines.push_back(log.substr(at + own.size() + 1, end - at - own.size() - 1));
        }
    }
    return lines;
}

static Text logged(const Text &arguments) {
    return program(arguments, with("EMU_LOG", "1")).err;
}

static int starts(const Text &line, const char *with) { return line.rfind(with, 0) == 0; }

// Returns the number of the stream after the text `before`.
static int stream_in(const Text &line, const char *before) {
    const size_t at = line.find(before);
    return at == Text::npos ? -1 : atoi(&line[at + strlen(before)]);
}

// Expects that a block's exchange waits only for the kernels before it, and is followed by the
// kernels of the next block's backward pass, whose stream waits for the exchange only after all
// blocks.
// (Streamed buffers are ordered by ticks instead: see TEST(transfers).)
static void check_overlap(int z) {
    enum { BLOCKS = 3 };
    const Words lines =
        log_of_rank(logged(ODD "-d 144 --gpus 3 -x 1 -s 1 -g 2 -z " + text("%d", z)));
    int compute = -1, exchange = -1, waited = 0, between = 0, block = 0, exchanges = 0;
    for (const Text &line : lines) {
        const int on = stream_in(line, " on stream ");
        const bool moves = starts(line, "Send/Recv") || starts(line, "AllGather") ||
                           starts(line, "Broadcast");
        if (on >= 0 && !moves) {
            if (line.find("rank_sum") == Text::npos &&
                line.find("collective_state") == Text::npos) {
                compute = on;
                between++;
            }
        }
        if (starts(line, "Send/Recv")) {
            exchange = on;
            exchanges++;
            // The first exchange of a bucket: its stream has just waited for the compute stream.
            if (waited && z < 2) {
                expect(block == 0 || block > BLOCKS - 1 || between > 5,
                       "%d's exchange is followed by %d kernels", BLOCKS - block, between);
                block++;
                between = 0;
            }
            waited = 0;
        }
        if (starts(line, "stream ")) {
            const int later = stream_in(line, "stream "), earlier = stream_in(line, "waits for "
                                                                                    "stream ");
            waited = later != compute && earlier == compute;
            if (later == compute && earlier == exchange && block > 0) {
                expect(block == BLOCKS + 3 || block == 0, "compute waits after %d exchanges",
                       block);
                block = 0;
            }
        }
    }
    expect(exchanges > 0, "no exchange");
}

TEST(ranks_overlap) {
    check_overlap(1);
    check_overlap(3);
}

// After the update each bucket of weights is gathered as soon as its own AdamW is queued, and the
// host reports the step without waiting for gathers. In the next forward, compute waits for a
// bucket's gather, and for no later one, just before it needs it: for wte and wpe before the first
// matmul, for block l after the 4 l matmuls of the blocks before. Weights stored whole in host
// memory are waited for by their upload.
TEST(ranks_gathers) {
    enum { BLOCKS = 3, BUCKETS = BLOCKS + 2 };
    write_corpus();
    for (const char *options : {"-z 1", "-z 2 -d 144", "-z 1 --offload weights"}) {
        const bool hosted = strstr(options, "offload") != NULL;
        const Words lines = log_of_rank(logged(
            ODD "--gpus 3 -x 3 -v 0 " + Text(strstr(options, "-d") ? "" : "-d 72 ") + options));
        std::vector<size_t> updates;
        for (size_t i = 0; i < lines.size(); i++) {
            if (starts(lines[i], "adamw_kernel")) {
                updates.push_back(i);
            }
        }
        expect(updates.size() > 3 * (BUCKETS + 1), "%s: %zu updates", options, updates.size());
        // Looks at the last update but one. Vectors are updated first and are not gathered.
        const size_t begin = updates[updates.size() - 2 * (BUCKETS + 1)];
        const size_t end = updates[updates.size() - (BUCKETS + 1)];
        const int compute = stream_in(lines[begin], " on stream ");
        int calls = 0, updated = 0, matmuls = 0, exchange = -2;
        bool reported = false, ordered = false;  // the gather waits for the update
        Ints gathers;
        size_t next = 0;
        std::set<int> awaited;
        for (size_t i = 0; i < end; i++) {
            const Text &line = lines[i];
            calls += starts(line, "AllGather") || starts(line, "Send/Recv") ||
                     starts(line, "Broadcast");
            if (i < begin) {
                continue;
            }
            updated += starts(line, "adamw_kernel");
            ordered = !starts(line, "adamw_kernel") &&
                      (ordered || (starts(line, "stream ") &&
                                   stream_in(line, "waits for stream ") == compute));
            reported |= line == text("the host waits, stream %d", compute);
            matmuls += starts(line, "matmul");
            if (starts(line, "AllGather") && gathers.size() < BUCKETS) {
                expect(updated == 2 + (int)gathers.size() && !reported && ordered, "%s: gather %zu"
                       " comes after %d buckets' updates, waiting: %d", options, gathers.size(),
                       updated, ordered);
                gathers.push_back(calls);
            }
            const int after = stream_in(line, ", after ");
            exchange = starts(line, "AllGather") ? stream_in(line, " on stream ") : exchange;
            if (stream_in(line, "waits for stream ") != exchange || next == BUCKETS) {
                continue;
            }
            if (stream_in(line, "stream ") != compute) {
                awaited.insert(after);
            } else if (reported && after == gathers[next]) {
                expect(hosted || matmuls == 4 * std::max((int)next - 2, 0), "%s: %d matmuls before "
                       "the wait for bucket %zu", options, matmuls, next);
                next++;
            } else {
                expect(gathers.empty() || after < gathers[0], "%s: compute waits for %d too early: "
                       "the next bucket is %zu of %d", options, after, next, gathers[0]);
            }
        }
        expect(next == BUCKETS, "%s: compute waits for %zu buckets of %d", options, next,
               (int)BUCKETS);
        for (int l = 0; hosted && l < BLOCKS; l++) {
            expect(awaited.count(gathers[(size_t)l + 2]), "the upload of block %d does not wait",
                   l);
        }
    }
}

// Twelve ranks have the same bits at every stage and for every placement: on one machine, in blocks
// on three, or alternating between three. Also with random stream orders, and with a second group
// of a single rank.
TEST(ranks_placement, REST) {
    write_corpus();
    const Text shape = "-i train.bin -j val.bin -e l2h2c64t16 -t 12 -b 1 -x 2 --clip 0.5 "
                       "-v 2 -m 2 ";
    for (const int n : {9, 12}) {
        const Text line = shape + text("-d %d ", 12 * n);
        for (int z = 0; z < 4; z++) {
            run(line + text("-z %d --gpus %d", z, n), text("n%dz%d", n, z), [=] {
                setenv("EMU_GPUS", "16", 1);
                setenv("EMU_ORDER", z == 3 ? "5" : "", 1);
            });
            expect_same(text("n%dz0", n), text("n%dz%d", n, z), 2);
        }
    }
    if (shell("unshare -u sh -c 'hostname m'").status != 0) {
        skip("no host names may be set");
    }
    for (const bool dealt : {false, true}) {
        const int port = free_port();
        Words ranks;
        for (int r = 0; r < 12; r++) {
            const int host = dealt ? r % 3 : r / 4, local = dealt ? r / 3 : r % 4;
            ranks.push_back(text("EMU_GPUS=4 EMU_MACHINE=%d MASTER_ADDR=127.0.0.1 MASTER_PORT=%d "
                                 "WORLD_SIZE=12 RANK=%d LOCAL_RANK=%d unshare -u sh -c 'hostname "
                                 "m%d && exec \"$0\" \"$@\"'", host, port, r, local, host));
        }
        const Text folder = dealt ? "dealt" : "blocks";
        for (const Outcome &o : start_by_tcp(ranks, shape + "-d 144 -z 1 --quiet -o " + folder)) {
            expect_success(o, folder);
        }
        expect_same("n12z0", folder, 2);
    }
}

// No kernel or matmul is called for the first time while a collective may be waiting for another
// rank: in steps of one or three micro-steps, in validation, samples and saves, with algorithms
// that were timed, were read from a file, or were read from a checkpoint although the ranks would
// choose others; and in an evaluation. The emulated device ends a program that violates this.
TEST(ranks_first) {
    write_file("e.bin", eval_bytes(random_questions(5, 50257, 2)));
    for (const int z : {0, 3}) {
        const Text part = ODD + text("-d %d --gpus 2 -z %d -v 1 -m 3 -s 1 -g 2 --logit-rows 9 -x ",
                                     z ? 144 : 48, z);
        auto with_home = [](const char *path, const char *times) {
            return [=] {
                unsetenv("XDG_CACHE_HOME");
                setenv("HOME", path, 1);
                setenv("EMU_LT_TIMES", times, 1);
            };
        };
        remove_folder("first");
        remove_folder("home");
        mkdir("home", 0755);
        run(part + "1", "first", with_home("home", "951"));
        expect(exists("home/.cache/train_gpt2/matmul"), "no file of algorithms");
        run(part + "2 -y 1", "first", with_home("home", "951"));
        run(part + "3 -y 1", "first", with_home("none", "159"));
    }
    expect_success(program("-e l1h1c16t16 --eval e.bin --json -b 3 --gpus 2"), "--eval");
}

// Returns the bytes that a rank of a logged run sends, without the ranks' statuses (64 bytes each).
static long sent_bytes(const Text &arguments, int ranks) {
    long sum = 0;
    for (const Text &line : log_of_rank(logged(arguments))) {
        const size_t at = line.rfind(", ");
        const long bytes = at != Text::npos && line.find(" bytes sent") != Text::npos
                               ? atol(&line[at + 2]) : 0;
        sum += bytes == 64 * (ranks - 1) ? 0 : bytes;
    }
    return sum;
}

// A step sends exactly the shards of every bucket, once in the reduce-scatter and once in the
// all-gather: gradients at stage 0, weights from stage 1 on, vectors in fp32. With k micro-steps,
// blocks' gradients are reduced in each from stage 2 on, otherwise in the last one only. The plan
// has the same number.
TEST(ranks_traffic, REST) {
    enum { C = 96, L = 3, MAX_T = 16, VP = 384, LAST = 3 };
    for (int n : {2, 3}) {
        for (int z = 0; z <= LAST; z++) {
            const int k = n == 2 && z > 0 ? 3 : 1;
            auto padded = [&](long count, long to) { return (count + to - 1) / to * to; };
            const long to = 64 * n, stay = padded(VP * C, to) + padded(MAX_T * C, to);
            const long blocks = L * padded(12 * C * C, to);
            // Vectors: 13 C elements in a block and 2 C after the last, each vector padded to a
            // multiple of 64.
            const long vector = padded(C, 64);
            const long vectors = padded(L * (6 * vector + padded(3 * C, 64) + padded(4 * C, 64)) +
                                            2 * vector, to);
            const long reduced = 2 * (stay + (z >= 2 ? k : 1) * blocks) + 4 * vectors;
            // Weights at stage 3: gathered in every micro-step's forward and backward, except the
            // last two blocks, which forward keeps for backward, and the first two, which backward
            // keeps for the next micro-step.
            const long transfers = z == 3 ? 2 * k * L - 4 * k + 2 : L;
            const long gathered = 2 * (stay + blocks / L * transfers) + 4 * vectors;
            const long want = (reduced + gathered) / n * (n - 1);
            const Text ranks = ODD + text("-d %d --gpus %d -z %d -k constant --quiet ", 24 * n * k,
                                          n, z);
            const long got = sent_bytes(ranks + "-x 2", n) - sent_bytes(ranks + "-x 1", n);
            expect(got == want, "%d ranks, -z %d: %ld bytes a step, %ld wanted", n, z, got, want);
            const Outcome plan = program(ranks + "--plan");
            const double shown = (double)want / (want < 1 << 20 ? 0x1p10 : 0x1p20);
            expect(plan.out.find(text("sends %.1f %s from each GPU", shown,
                                      want < 1 << 20 ? "KiB" : "MiB")) != Text::npos,
                   "%.1f: %s", shown, plan.out.substr(plan.out.find("a step of")).c_str());
        }
    }
    // NCCL must not allocate in the first save, so the warm-up calls every collective.
    const Outcome o = program(ODD "-d 48 --gpus 2 -z 1 -x 1 --quiet", with("EMU_LOG", "1"));
    expect(o.err.find("] Broadcast on stream") != Text::npos, "no broadcast in the warm-up");
}

// Returns the number of the last exchange of a run with an output folder, or of the `before`-th one
// before it. The last is that of the vectors' gradients in the last step, which is followed by the
// gather of their sums.
static int last_exchange(const Text &arguments, size_t before = 0) {
    int serial = 0;
    Ints numbers;
    remove_folder("counted");
    for (const Text &line : log_of_rank(logged(arguments + " -o counted"))) {
        const int exchange = starts(line, "Send/Recv");
        serial += exchange || starts(line, "AllGather") || starts(line, "Broadcast");
        if (exchange) {
            numbers.push_back(serial);
        }
    }
    return numbers.size() > before ? numbers[numbers.size() - 1 - before] : -1;
}

// One wrong bit in a vector's gradient on one rank ends the run before any result of it is saved;
// the run resumes from the previous checkpoint as if it had not happened.
TEST(ranks_replicas) {
    for (const char *zero : {"0", "3"}) {
        const Text part = TINY "--gpus 3 -k constant -n 2 -x 6 -z " + Text(zero);
        const Text faults = text("EMU_FAULT_RANK=1 EMU_FAULT_FLIP=%d",
                                 last_exchange(TINY "--gpus 3 -x 3 -n 2 -z " + Text(zero)) + 1);
        remove_folder("undisturbed");
        remove_folder("out");
        run(part, "undisturbed");
        expect_refused(program(part + " --quiet -o out", with_faults(faults)),
                       "rank 1: weights or moments differ from those of the other ranks: a GPU or "
                       "the interconnect may be faulty; the run ended after step 4, which is not "
                       "saved", zero);
        expect(names_in("out", "step") == "step-00000002", "%s", names_in("out", "").c_str());
        run(part + " -y 1", "out");
        expect(tensors_of("out", 6) == tensors_of("undisturbed", 6), "different result, -z %s",
               zero);
    }
    // The same with two ranks and with a learning rate of 0, where only moments differ.
    for (const char *rate : {"", "-l 0 "}) {
        const Text two = TINY "--gpus 2 -z 1 --quiet " + Text(rate);
        const Text faults = text("EMU_FAULT_RANK=1 EMU_FAULT_FLIP=%d",
                                 last_exchange(two + "-x 1") + 1);
        remove_folder("two");
        expect_refused(program(two + "-x 101 -o two", with_faults(faults)),
                       "ranks 0, 1: weights or moments differ from those of the", "two ranks");
        expect(log_steps("two/log.jsonl") == one_to(100), "steps of the log");
    }
    // Without ZeRO the blocks' weights are replicated too. The last exchanges of a step are those
    // of block 0, the two of wte, and those of wpe and the vectors.
    const Text whole = TINY "--gpus 2 -z 0 --quiet ";
    expect_refused(program(whole + "-x 2 -n 2 -o whole",
                           with_faults(text("EMU_FAULT_RANK=1 EMU_FAULT_FLIP=%d",
                                            last_exchange(whole + "-x 1", 4) + 1))),
                   "ranks 0, 1: weights or moments differ", "a block's gradient");
}

// If one rank sends a NaN to another, all ranks skip the step, and if the norm is just above
// --clip, all clip equally: their replicas agree in the next save, the counters equal the log's,
// and all stages have the same bits. In fp16 every rank halves its own copy of the loss scale: if
// one did not, its part of the next step's gradients would be wrong by that factor.
TEST(ranks_skip_and_clip, REST) {
    static const struct {
        const char *options;
        int last;  // stage
    } table[] = {{"", 1}, {"--dtype fp16 ", 3}};
    for (const auto &row : table) {
        const Text part = ODD "-d 72 --gpus 3 --skip-zscore 0 " + Text(row.options);
        run(part + "-x 4 -z 0", "plain");
        const auto norms = values_in(read_file("plain/log.jsonl"), "grad_norm");
        if (norms.size() != 4) {
            expect(norms.size() == 4, "%zu norms", norms.size());
            return;
        }
        const Text clip = part + text("-x 4 --clip %.9g -z ", norms[1] * (1 - 1e-6));
        for (int z = 0; z <= row.last; z++) {
            run(clip + text("%d", z), text("clip%d", z));
            const int step_2 = last_exchange(part + text("-x 2 -z %d", z));
            run(part + text("-x 4 -z %d", z), text("nan%d", z),
                with_faults(text("EMU_FAULT_RANK=2 EMU_FAULT_NAN=%d", step_2)));
            const Text log = read_file(text("nan%d/log.jsonl", z));
            const auto skipped = values_in(log, "skipped");
            expect(skipped == std::vector<double>({0, 1, 0, 0}), "-z %d: %s", z, log.c_str());
            const auto scales = values_in(log, "loss_scale_log2");
            expect(!row.options[0] || scales == std::vector<double>({16, 15, 15, 15}), "-z %d: %s",
                   z, log.c_str());
            if (z > 0) {
                expect_same("clip0", text("clip%d", z), 4);
                expect_same("nan0", text("nan%d", z), 4);
            }
        }
        shell("rm -r plain clip* nan*");
    }
}

// Ranks that are late for collectives at random get the same bits.
TEST(ranks_late) {
    const Text part = ODD "-d 72 --gpus 3 -z 1 -x 3 -v 1 -m 4 -s 3 -g 4 --clip 0.5";
    run(part, "undisturbed");
    for (const char *seed : {"1", "2"}) {
        remove_folder("late");
        run(part, "late", with("EMU_NCCL_SLEEP", seed));
        expect_same("undisturbed", "late", 3);
    }
}

int main(int argc, char **argv) {
    return harness_main(argc, argv, "./train_gpt2cu_cpu");
}
