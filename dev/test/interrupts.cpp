// interrupts.cpp -- runs that are killed or asked to stop at any moment and then resumed end in the
// bytes of the run that nothing disturbed.
//
// Run:    build/test/interrupts [--program build/train_gpt2_asan] [NAME...]

#include "files.h"

static const char resumable[] =
    "-i ../train.bin -j ../val.bin -v 7 -e l2h2c16t16 -b 2 -d 64 -r norm "
    "-x 40 -n 3 --keep 2 -y 1 -s 9 -g 5 --quiet -o out --clip 0.5";

// The final checkpoint and the steps of the log equal those of the run that nothing disturbed.
static void expect_same_end(const Text &want, const char *who) {
    expect(!want.empty() && checkpoint_bytes("out", 40) == want, "%s: another end", who);
    expect(log_steps("out/log.jsonl") == one_to(40), "%s: steps of the log", who);
}

// Killed again and again at random moments, a run still ends in the same bytes.
static void test_kill() {
    write_corpus();
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

// SIGTERM and SIGINT save and exit 0; what follows goes on as if nothing had happened.
static void test_signals() {
    write_corpus();
    enter("whole");
    expect_success(program(resumable), "undisturbed");
    Text want = checkpoint_bytes("out", 40);
    for (int number : {SIGTERM, SIGINT}) {
        enter(number == SIGINT ? "../int" : "../term");
        for (int attempt = 0; attempt < 4; attempt++) {
            // The first thing a run does to the log is later than its handlers.
            const Text before = read_file("out/log.jsonl");
            pid_t pid = start(resumable);
            wait_until([&] { return read_file("out/log.jsonl") != before; });
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

static const Test tests[] = {
    {"kill", test_kill, 1},
    {"signals", test_signals, 1},
};

int main(int argc, char **argv) {
    return harness_main(argc, argv, tests, sizeof tests / sizeof tests[0], "./train_gpt2");
}
