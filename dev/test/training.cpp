// training.cpp -- whole runs that learn, in the memory that was planned.
//
// Run:    build/test/training [--program build/train_gpt2_double] [NAME...]

#include "files.h"

// One batch over and over is learnt by heart; the prompt opens the sample; the log says everything.
static void test_overfit() {
    write_corpus();
    Outcome o = program("-i train.bin -j val.bin -e l1h2c32t16 -b 2 -a 1 -x 240 -l 3e-3 -v 60 -m 0 "
                        "-s 240 -g 9 --prompt abc --temperature 0 -o out");
    expect_success(o, "overfit");
    Text log = read_file("out/log.jsonl");
    double loss = last_value(log, "loss");
    expect(loss < 0.2, "loss %.3f", loss);
    expect(log_steps("out/log.jsonl") == one_to(240));
    expect(log.find("{\"step\":240,\"sample\":\"abc") != Text::npos &&
           o.out.find("\nabc") != Text::npos);
    expect(log.find("{\"step\":60,\"val_loss\":") != Text::npos);
    expect(log.find("\"checkpoint\":\"out/step-00000240\"") != Text::npos);
    expect(log.find("{\"event\":\"end\",\"reason\":\"finished\"}\n") == log.size() - 36);
    detail = text("loss %.4f after 240 steps", loss);
}

// A uniform guess has loss 5.55, letter frequencies alone about 3.3. The sources change from day to
// day, so their bound is wider than that of the text that never does.
static void test_training() {
    int sources = 0;
    const Text files = training_files(&sources);
    const double bound = sources ? 2.8 : 2.6;
    expect_success(program(files + " -e l2h4c64t64 -b 8 -x 800 -l 3e-3 -u 20 -v 800 -m 10 -o out"),
                   "training");
    double loss = last_value(read_file("out/log.jsonl"), "val_loss");
    expect(loss < bound, "validation loss %.4f", loss);
    detail = text("%s: validation loss %.4f, bound %.1f", sources ? "sources" : "tinyshakespeare",
                  loss, bound);
}

// Resident memory of a run against its plan: within 50 MB, as README promises.
static void test_resident_memory() {
    write_corpus();
    const Outcome o = program("-i train.bin -e l2h8c512t32 -b 2 -x 2 -o out --quiet");
    expect_success(o, "a run");
    double plan = last_value(read_file("out/log.jsonl"), "plan_bytes");
    expect_near(o.resident_bytes, plan, 50e6, "resident %.1f MB, plan %.1f MB",
                o.resident_bytes / 1e6, plan / 1e6);
}

static const Test tests[] = {
    {"overfit", test_overfit, 1},
    {"training", test_training, 1},
    {"resident_memory", test_resident_memory, 1},
};

int main(int argc, char **argv) {
    return harness_main(argc, argv, tests, sizeof tests / sizeof tests[0], "./train_gpt2");
}
