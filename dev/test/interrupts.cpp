// interrupts.cpp -- runs that are killed or stopped at any moment and then resumed end with the
// bytes of an uninterrupted run.
//
// Run:    build/test/interrupts [--program build/train_gpt2_asan] [NAME...]

#include "files.h"

static const char resumable[] =
    "-i ../train.bin -j ../val.bin -v 7 -e l2h2c16t16 -b 2 -d 64 -r norm "
    "-x 40 -n 3 --keep 2 -y 1 -s 9 -g 5 --quiet -o out --clip 0.5";

// Expects that the final checkpoint and the steps in the log are those of the uninterrupted run.
static void expect_same_end(const Text &want, const char *who) {
    expect(!want.empty() && checkpoint_bytes("out", 40) == want, "%s: different result", who);
    expect(log_steps("out/log.jsonl") == one_to(40), "%s: steps of the log", who);
}

// A run that is killed repeatedly at random moments still ends with the same bytes.
TEST(kill) {
    enter("whole");
    double began = wall_ms();
    expect_success(program(resumable), "undisturbed");
    double whole_ms = wall_ms() - began;
    Text want = checkpoint_bytes("out", 40);
    expect_same_end(want, "undisturbed");
    int kills = 0;
    for (int round = 0; round < 3; round++) {
        enter(text("../killed%d", round));
        for (int attempt = 0; attempt < 6; attempt++) {
            double share = random_unit((uint64_t)began, (uint64_t)(round * 6 + attempt));
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

// On SIGTERM and SIGINT a run saves and exits with 0; the resumed run ends like an uninterrupted
// one.
TEST(signals) {
    enter("whole");
    expect_success(program(resumable), "undisturbed");
    Text want = checkpoint_bytes("out", 40);
    for (int number : {SIGTERM, SIGINT}) {
        enter(number == SIGINT ? "../int" : "../term");
        for (int attempt = 0; attempt < 4; attempt++) {
            // A run's signal handlers are installed before its first access to the log.
            const Text before = read_file("out/log.jsonl");
            pid_t pid = start(resumable);
            wait_until([&] { return read_file("out/log.jsonl") != before; });
            usleep((useconds_t)(attempt * 5000));
            kill(pid, number);
            expect_success(outcome(pid), "interrupted");
            Text log = read_file("out/log.jsonl");
            expect(has(log, "\"reason\":\"interrupted\"") || has(log, "\"reason\":\"finished\""));
            expect(!names_in("out", "step").empty(), "no checkpoint after signal %d", number);
        }
        expect_success(program(resumable), "resumed");
        expect_same_end(want, "interrupted");
    }
}

// Options of a run whose step takes most of a second, as 40 micro-batches or as one batch of the
// same size. With sanitizers, a smaller model takes as long.
#define MANY_BATCHES "-b 1 -d 2560 "
#define ONE_BATCH "-b 40 "
static Text slow(const char *more) {
    const Text model = has_sanitizers() ? "l2h2c64t64" : "l6h4c192t64";
    return "-i train.bin -e " + model + " -k constant " + more;
}

// Starts a run and waits until it is in its first step.
static pid_t start_training(const Text &arguments, const std::function<void()> &before = nullptr) {
    remove("stdout");  // both are left by the previous run
    remove("stderr");
    pid_t pid = start(arguments, before);
    wait_until([] { return has(read_file("stdout"), "\npeak "); });
    usleep(20000);
    return pid;
}

// Waits until the run's log contains `words`, then sends the signal.
static void signal_at(pid_t pid, const char *words, int number) {
    wait_until([&] { return has(read_file("out/log.jsonl"), words); });
    usleep(5000);
    kill(pid, number);
}

// A signal takes effect between the micro-batches of a step, is acknowledged at once in one line,
// and the state after the last finished step is saved; the resumed run ends like an uninterrupted
// one.
TEST(mid_step) {
    static const char said[] =
        "stopping after this micro-batch, then saving; a second signal quits at once\n";
    const Text many = slow(MANY_BATCHES "-x 2 -n 1 -y 1 -o out");
    enter("whole");
    write_corpus();
    expect_success(program(many), "undisturbed");
    const Text first = tensors_of("out", 1), second = tensors_of("out", 2);
    enter("../cut");
    write_corpus();
    pid_t pid = start_training(many);
    kill(pid, SIGINT);
    Outcome o = outcome(pid);
    expect(o.status == 0 && o.err == said, "status %d, stderr: %s", o.status, o.err.c_str());
    expect(names_in("out", "step") == "step-00000000" && log_steps("out/log.jsonl").empty(),
           "the step was finished: %s", names_in("out", "step").c_str());
    pid = start(many, [] { signal(SIGHUP, SIG_DFL); });  // nohup make test ignores it
    signal_at(pid, "{\"step\":1,\"checkpoint\"", SIGHUP);
    o = outcome(pid);
    expect(o.status == 0 && o.err == said, "status %d, stderr: %s", o.status, o.err.c_str());
    expect(names_in("out", "step") == "step-00000000 step-00000001" && !first.empty() &&
           tensors_of("out", 1) == first, "not the state after step 1");
    expect_success(program(many), "resumed");
    expect(tensors_of("out", 2) == second, "different result");
    expect(log_steps("out/log.jsonl") == one_to(2));
    pid = start_training(slow(MANY_BATCHES "-x 2"));
    kill(pid, SIGTERM);
    o = outcome(pid);
    expect(o.status == 0 && has(o.err, "without saving, since there is no --output"),
           "status %d, stderr: %s", o.status, o.err.c_str());
}

// A second signal ends the run at once, with its number in the status, and leaves the checkpoints
// unchanged. A second SIGHUP does not, because closing a terminal may send two.
TEST(second_signal) {
    expect_success(program(slow("-b 1 -x 1 -o out")), "first step");
    const Text before = checkpoint_bytes("out", 1);
    for (int number : {SIGINT, SIGTERM, SIGHUP}) {
        pid_t pid = start_training(slow(ONE_BATCH "-x 2 -y 1 -o out"));
        kill(pid, SIGINT);
        wait_until([] { return !read_file("stderr").empty(); });
        kill(pid, number);
        const int status = outcome(pid).status, wanted = number == SIGHUP ? 0 : 128 + number;
        expect(status == wanted, "signal %d: status %d", number, status);
        const Text last = number == SIGHUP ? " step-00000002" : "";  // its one batch is finished
        expect(names_in("out", "step") == "step-00000001" + last &&
               checkpoint_bytes("out", 1) == before, "%s", names_in("out", "step").c_str());
    }
}

// A run measures its speed for a forecast after all checks, announces it, stops at the first
// signal, and changes no bit by it; a run of 20 steps has no forecast.
TEST(forecast) {
    static const char timing[] = "\ntiming two micro-batches of the first step for a forecast\n";
    const Text run = TINY "-d 64 -o ";
    const Outcome loud = program(run + "loud -x 21");
    expect_success(loud, "a run of 21 steps");
    const size_t at = loud.out.find(timing), forecast = loud.out.find("\nforecast ");
    const size_t step = loud.out.find("\nstep    1/21");
    expect(loud.out.find("\npeak ") < at && at < forecast && forecast < step, "%s",
           loud.out.c_str());
    expect_success(program(run + "quiet -x 21 --quiet"), "a quiet run");
    expect(tensors_of("loud", 21) == tensors_of("quiet", 21), "the forecast changes the run");
    const Outcome refused = program(run + "loud -x 50 -y 1 --seed 7");
    expect_refused(refused, "it has --seed 42, this run --seed 7", "a checkpoint of another run");
    expect(!has(refused.out, "timing"), "%s", refused.out.c_str());
    const Text some = program(run + "some -x 20").out, more = program(run + "loud -x 41 -y 1").out;
    expect(!has(some, "forecast") && !has(more, "forecast") && has(more, "finished after step 41"),
           "%s%s", some.c_str(), more.c_str());
    const pid_t pid = start(slow("-b 10 -x 21 -o cut"));
    wait_until([] { return has(read_file("stdout"), timing); });
    kill(pid, SIGINT);
    const Outcome o = outcome(pid);
    expect(o.status == 0 && !has(o.out, "\nforecast ") &&
           has(o.out, "\ninterrupted after step 0,") && names_in("cut", "step") == "step-00000000",
           "status %d: %s", o.status, o.out.c_str());
}

// A run announces everything slow before it starts: after the list of settings come the files that
// it verifies and loads, then the device.
TEST(start_lines) {
    const Text run = TINY "-y 1 -o out -x ";
    const auto in_order = [](const Text &out, const Words &lines) {
        size_t at = 0;
        for (const Text &line : lines) {
            const size_t next = ("\n" + out).find("\n" + line, at);
            expect(next != Text::npos, "'%s' is missing or too early: %s", line.c_str(),
                   out.c_str());
            at = next == Text::npos ? at : next;
        }
    };
    in_order(program(run + "1").out,
             {"train_gpt2 1.0\n", "model ", "data ", "step ", "command ", "memory ",
              "no checkpoint in out: starting a new run",
              "initialising 10,960 parameters with --seed 42; -e ",
              "device ", "peak "});
    in_order(program(run + "2").out,
             {"memory ", "verifying out/step-00000001\n", "loading out/step-00000001\n",
              "resumed from out/step-00000001\n", "device ", "peak "});
    in_order(program("-i train.bin -b 2 -x 1 -e out/step-00000002").out,
             {"memory ", "loading out/step-00000002\n", "device "});
    const Outcome made = program("--generate -e out/step-00000002 -g 3");
    in_order(made.err, {"loading out/step-00000002\n", "train_gpt2: CPU"});
    expect(!has(made.out, "loading"), "%s", made.out.c_str());
    in_order(program("--plan -e l12h4c256t64 -b 6").out,
             {"measuring this machine's speed for the forecast\n", "memory plan of the CPU run"});
}

// Under nohup a run ignores SIGHUP.
TEST(nohup) {
    pid_t pid = start_training(slow(MANY_BATCHES "-x 2 -n 1 -o out"),
                               [] { signal(SIGHUP, SIG_IGN); });
    kill(pid, SIGHUP);
    expect_success(outcome(pid), "a run that ignores SIGHUP");
    expect(names_in("out", "step") == "step-00000001 step-00000002");
}

// A resumed run repeats once a validation that a signal interrupted, and the log has the validation
// loss of an uninterrupted run.
TEST(cut_validation) {
    const Text validating = slow("-j train.bin -v 1 -m 0 -b 1 -x 1 -y 1 -o out --quiet");
    enter("whole");
    write_corpus();
    expect_success(program(validating), "undisturbed");
    const double want = last_value(read_file("out/log.jsonl"), "val_loss");
    enter("../cut");
    write_corpus();
    pid_t pid = start(validating);
    signal_at(pid, "{\"step\":1,\"loss\"", SIGTERM);
    expect_success(outcome(pid), "interrupted");
    expect(in_checkpoint("out", 1, SAVED_STATE).find("\"pending_validation\":\"1\"") != Text::npos);
    expect(!has(read_file("out/log.jsonl"), "val_loss"), "not cut short");
    for (int i = 0; i < 2; i++) {
        expect_success(program(validating), "resumed");
        const Text log = read_file("out/log.jsonl");
        expect(log.find("\"val_loss\"") == log.rfind("\"val_loss\""), "validated twice");
        expect(last_value(log, "val_loss") == want, "%.9g, undisturbed %.9g",
               last_value(log, "val_loss"), want);
    }
}

// A failed write to stdout ends the printing, not the run. A closed pipe is not an error; any other
// failure gives one line and status 1 at the end.
TEST(lost_output) {
    Outcome o = program(TINY "-x 30 -o pipe", [] {
        int ends[2];
        if (pipe(ends) == 0) {
            dup2(ends[1], 1);
            close(ends[0]);
            close(ends[1]);
        }
    });
    expect_success(o, "a closed pipe");
    expect(log_steps("pipe/log.jsonl") == one_to(30) && names_in("pipe", "s") == "step-00000030");
    const auto full = [] { dup2(open("/dev/full", O_WRONLY), 1); };
    for (const char *arguments : {TINY "-x 30 -o full", "--plan -e l2h2c16t16", "--help"}) {
        o = program(arguments, full);
        expect_refused(o, "cannot write to stdout: No space left on device", arguments);
    }
    expect(log_steps("full/log.jsonl") == one_to(30) && names_in("full", "s") == "step-00000030");
    // A stream closed by the shell (>&-) leaves its descriptor free; no file of the run may use it.
    for (int fd = 0; fd < 3; fd++) {
        const Text folder = text("closed%d", fd);
        o = program(TINY "-x 30 -o " + folder, [fd] { close(fd); });
        if (fd == 1) {
            expect_refused(o, "cannot write to stdout: Bad file descriptor", folder);
        } else {
            expect_success(o, folder);
        }
        expect(log_steps(folder + "/log.jsonl") == one_to(30), "%s", folder.c_str());
    }
}

// A reader that stops reading, such as a paused pager, blocks a run. A signal ends the wait: the
// run saves and ends within seconds, whether or not stderr goes to the same reader.
TEST(paused_reader) {
    for (int number : {SIGINT, SIGTERM}) {
        const int both = number == SIGTERM;
        const Text folder = both ? "both" : "out";
        const pid_t pid = start(TINY "-x 100000 -k constant -o " + folder, [both] {
            int ends[2];  // one page; its read end stays open but is never read
            expect(pipe(ends) == 0 && fcntl(ends[1], F_SETPIPE_SZ, 4096) == 4096);
            dup2(ends[1], 1);
            dup2(both ? ends[1] : 2, 2);
        });
        Text log;
        wait_until([&] {
            const Text before = log;
            usleep(300000);
            log = read_file(folder + "/log.jsonl");
            return log == before && has(log, "\"loss\":");
        });
        const double began = wall_ms();
        kill(pid, number);
        wait_until([&] {
            siginfo_t ended = {};
            waitid(P_PID, (id_t)pid, &ended, WEXITED | WNOHANG | WNOWAIT);
            return ended.si_pid != 0;
        });
        const double waited = wall_ms() - began;
        kill(pid, SIGKILL);
        expect(outcome(pid).status == 0 && waited < 10e3, "not ended %.0f s after signal %d",
               waited * 1e-3, number);
        log = read_file(folder + "/log.jsonl");
        const size_t steps = log_steps(folder + "/log.jsonl").size();
        expect(has(log, "\"reason\":\"interrupted\"") && steps < 100 &&
                   names_in(folder, "step") == text("step-%08zu", steps),
               "%zu steps, saved: %s", steps, names_in(folder, "step").c_str());
    }
}

// After a signal, SIGALRM interrupts writes to a blocked output. It does not interrupt a save,
// because on some file systems the save's writes would fail; other signals are still handled. Here
// a FIFO without a reader blocks the save.
TEST(save_undisturbed) {
    const pid_t pid = start(TINY "-x 100000 -n 1000 -k constant --quiet -o out");
    wait_until([] { return has(read_file("out/log.jsonl"), "\"loss\":"); });
    mkdir("out/step-00001000.tmp", 0755);
    expect(mkfifo("out/step-00001000.tmp/model.safetensors", 0644) == 0, "mkfifo");
    wait_until([] {
        return has(read_file("out/log.jsonl"), "{\"step\":1000,");
    });
    usleep(200000);
    kill(pid, SIGTERM);
    usleep(1500000);
    const Text status = read_file(text("/proc/%d/status", (int)pid));
    const size_t at = status.find("SigBlk:");
    const long long blocked = strtoll(status.c_str() + (at == Text::npos ? 0 : at + 7), NULL, 16);
    kill(pid, SIGTERM);
    expect(outcome(pid).status == 128 + SIGTERM, "the second signal was ignored");
    expect(blocked == 1LL << (SIGALRM - 1), "blocked: %llx", blocked);
    // The message of a failed save does not wait forever for a stopped reader.
    const pid_t full = start(TINY "-x 100000 -k constant --quiet -o full", [] {
        const struct rlimit limit = {20000, 20000};
        int ends[2];
        expect(pipe(ends) == 0 && fcntl(ends[1], F_SETPIPE_SZ, 4096) == 4096);
        expect(write(ends[1], Text(4096, 'x').c_str(), 4096) == 4096);
        dup2(ends[1], 2);
        setrlimit(RLIMIT_FSIZE, &limit);
    });
    wait_until([] { return has(read_file("full/log.jsonl"), "\"loss\":"); });
    kill(full, SIGTERM);
    siginfo_t ended = {};
    for (int look = 0; look < 60 && !ended.si_pid; look++) {
        usleep(100000);
        waitid(P_PID, (id_t)full, &ended, WEXITED | WNOHANG | WNOWAIT);
    }
    kill(full, SIGKILL);
    expect(outcome(full).status == 1, "a save that fails does not end");
}

// Files at the size limit end the run with a line that names the reason.
TEST(file_limit) {
    Outcome o = program(TINY "-x 3 -o out --quiet", [] {
        struct rlimit limit = {20000, 20000};
        setrlimit(RLIMIT_FSIZE, &limit);
    });
    expect_refused(o, "File too large", "ulimit -f");
    expect(names_in("out", "step").empty(), "%s", names_in("out", "step").c_str());
}

// If the log reaches the size limit, the run saves its state and a log of whole lines, reports the
// failure once and ends with status 1; the resumed run ends like an uninterrupted one.
TEST(full_log) {
    enum { LIMIT = 400000 };  // in bytes; larger than any file of the checkpoint
    const Text part = TINY "-j val.bin -v 7 -x 30 -k constant --quiet -y 1 -o ";
    expect_success(program(part + "whole"), "undisturbed");
    const Text want = tensors_of("whole", 30), log = read_file("whole/log.jsonl");
    const size_t starts = log.find('\n') + 1, end = log.rfind("{\"event\":\"end\"");
    // There is space for the first line and some of the next ones, or for all but the last.
    for (const size_t space : {starts + 500, (starts + end) / 2, end + 10}) {
        remove_folder("full");
        mkdir("full", 0755);
        const Text line = "{\"step\":0,\"text\":\"" + Text(LIMIT - space - 24, 'x') + "\"}\n";
        write_file("full/log.jsonl", line);
        const Outcome o = program(part + "full", [] {
            const struct rlimit limit = {LIMIT, LIMIT};
            setrlimit(RLIMIT_FSIZE, &limit);
        });
        if (o.status == 0 && space > end) {
            continue;  // the times in this log have fewer digits, so all lines fit
        }
        const size_t steps = log_steps("full/log.jsonl").size();
        const Text now = read_file("full/log.jsonl"), saved = names_in("full", "step");
        const int step = saved.empty() ? -1 : atoi(saved.c_str() + 5);
        expect_refused(o, text("cannot write full/log.jsonl: File too large; the run ended after "
                               "step %d, which is saved", step), text("space %zu", space));
        // The line that did not fit may belong to a step that is in the checkpoint.
        expect(now.size() <= LIMIT && steps + 1 >= (size_t)step && step > 1,
               "%zu steps in the log, saved: %s", steps, saved.c_str());
        expect_success(program(part + "full"), "resumed");
        expect(tensors_of("full", 30) == want, "space %zu: different result", space);
    }
}

int main(int argc, char **argv) {
    return harness_main(argc, argv, "./train_gpt2");
}
