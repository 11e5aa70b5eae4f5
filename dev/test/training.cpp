// training.cpp -- whole runs that learn, within the planned memory.
//
// Run:    build/test/training [--program build/train_gpt2_double] [NAME...]

#include "files.h"
#include <set>

// A single repeated batch is memorized; the sample starts with the prompt; the log is complete.
TEST(overfit) {
    Outcome o = program("-i train.bin -j val.bin -e l1h2c32t16 -b 2 -a 1 -x 240 -l 3e-3 -v 60 -m 0 "
                        "-s 240 -g 9 --prompt abc --temperature 0 -o out");
    expect_success(o, "overfit");
    Text log = read_file("out/log.jsonl");
    double loss = last_value(log, "loss");
    expect(loss < 0.2, "loss %.3f", loss);
    expect(log_steps("out/log.jsonl") == one_to(240));
    expect(has(log, "{\"step\":240,\"sample\":\"abc") && has(o.out, "\nabc"));
    expect(has(log, "{\"step\":60,\"val_loss\":"));
    expect(has(log, "\"checkpoint\":\"out/step-00000240\""));
    expect(log.find("{\"event\":\"end\",\"reason\":\"finished\"}\n") == log.size() - 36);
    detail = text("loss %.4f after 240 steps", loss);
}

// Returns the words of a text in lower case. *sentences receives the number of sentences, *ended
// how many of them end properly: before a capital letter, at the end of the text or, at the end of
// a quotation, before anything.
static Words words_of(const Text &all, int *sentences, int *ended) {
    Words words(1);
    *sentences = *ended = 0;
    for (size_t i = 0; i < all.size(); i++) {
        if (isalpha((unsigned char)all[i])) {
            words.back() += (char)tolower(all[i]);
        } else if (!words.back().empty()) {
            words.push_back("");
        }
        if (strchr(".!?", all[i])) {
            const size_t next = all.find_first_not_of(" \n\"", i + 1);
            ++*sentences;
            *ended += next == Text::npos || isupper((unsigned char)all[next]) ||
                      all[next] == '<' || all[i + 1] == '"';
        }
    }
    words.pop_back();  // the last one is empty or truncated
    return words;
}

// `make train` without a network: 150 steps of its recipe on the stories reach the loss asserted
// here, nine of ten words of the sample exist and its sentences end properly; all of its steps
// (FULL=1) reach the loss stated in dev/train.sh. A uniform guess has loss 6.93.
TEST(make_train) {
    const Text script = read_file(root + "/dev/train.sh"), data = "'" + root + "/data/";
    auto after = [&](const char *key) {
        const size_t at = script.find(key) + strlen(key);
        return script.substr(at, script.find_first_of("\n)", at) - at);
    };
    const Text recipe = after("\nrecipe=("), stated = after("text=stories_bpe steps=");
    const Text prepares = data + "stories' > stories.txt && " + data + "tokenize' --train-bpe 1024 "
                          "--documents -o stories stories.txt > /dev/null";
    expect(system(prepares.c_str()) == 0, "%s", prepares.c_str());
    const bool full = is_full();
    int steps = 0, sentences, ended;
    double bound = 0;
    expect(sscanf(stated.c_str(), "%d loss=%lf", &steps, &bound) == 2, "%s", stated.c_str());
    steps = full ? steps : 150;
    const double reached = full ? 0.4611 : 1.2017;
    const Outcome o = program(text("-i stories_train.bin -j stories_val.bin -x %d ", steps) +
                              recipe + " -g 300 -o out --save-every 0");
    expect_success(o, "the recipe");
    const double loss = last_value(read_file("out/log.jsonl"), "val_loss");
    expect_near(loss, reached, 0.1 * reached, "validation loss");
    expect(!full || loss <= bound, "validation loss %.4f, dev/train.sh states %.2f", loss, bound);
    const Text begins = text("--- sample after step %d ---\n", steps);
    const size_t from = o.out.find(begins) + begins.size();
    const Text sample = o.out.substr(from, o.out.find("\n---\n", from) - from);
    const Words written = words_of(read_file("stories.txt"), &sentences, &ended);
    const std::set<Text> known(written.begin(), written.end());
    const Words words = words_of(sample, &sentences, &ended);
    int found = 0;
    for (const Text &word : words) {
        found += known.count(word) > 0;
    }
    const int most = (int)words.size();
    expect(most > 150 && found >= (full ? 0.99 : 0.9) * most, "%d of %d words: %s", found, most,
           sample.c_str());
    expect(sentences >= most / 20 && ended >= 0.9 * sentences,
           "%d of %d sentences end: %s", ended, sentences, sample.c_str());
    detail = text("validation loss %.4f, %d of %d words, %d of %d sentences", loss, found, most,
                  ended, sentences);
}

// Returns the option that makes the GPU program compute in fp32, as the CPU program does.
static Text in_fp32() {
    const Text name = tested.substr(tested.rfind('/') + 1);
    return has(name, "cu") ? " --dtype fp32" : "";
}

// Relative rounding error allowed for losses and norms below. Measured in 60 steps of either
// program: 2.4e-7 of a loss, 4.7e-7 of a norm.
static const double LOSS_TOL = 1e-6, NORM_TOL = 1e-5;

// One batch of 4, two micro-steps of 2 and four micro-steps of 1 train alike: every step has the
// same sequences, even past the end of the data, and averages loss and gradient over all of them.
TEST(micro_batches) {
    const Text run = "-i train.bin -e l2h2c16t16 -d 64 -x 60 -u 5 -l 3e-3 --clip 0.5 --quiet" +
                     in_fp32();
    std::vector<double> want[2];
    for (int b : {4, 2, 1}) {
        const Text folder = text("b%d", b);
        expect_success(program(run + text(" -b %d -o b%d", b, b)), folder);
        const Text log = read_file(folder + "/log.jsonl");
        const std::vector<double> loss = values_in(log, "loss"), norm = values_in(log, "grad_norm");
        expect(loss.size() == 60 && norm.size() == 60, "%zu steps", loss.size());
        want[0] = b == 4 ? loss : want[0];
        want[1] = b == 4 ? norm : want[1];
        for (size_t i = 0; i < loss.size() && i < want[0].size(); i++) {
            expect_near(loss[i], want[0][i], LOSS_TOL * want[0][i], "-b %d, loss of step %zu", b,
                        i + 1);
            expect_near(norm[i], want[1][i], NORM_TOL * want[1][i], "-b %d, norm of step %zu", b,
                        i + 1);
        }
    }
    expect(want[0].back() < want[0][0] - 1, "learns: from %.3f to %.3f", want[0][0],
           want[0].back());
}

// The validation loss is a mean over sequences, so it is the same for any batch size, and for
// identical sequences it is the loss of one. Sequences at the end that do not fill a batch are left
// out and not counted.
TEST(validation) {
    enum { T = 16, WINDOWS = 11 };
    Ids tokens, same;
    for (int i = 0; i <= WINDOWS * T; i++) {  // the last windows differ from the others
        tokens.push_back((uint16_t)(i < 8 * T ? 97 + i % 3 : i * 37 % 256));
        same.push_back((uint16_t)(97 + i % T));
    }
    write_file("val", shard_bytes(tokens, BYTE_TOKENS));
    write_file("same", shard_bytes(same, BYTE_TOKENS));
    const Text run = "-i train.bin -e l2h2c16t16 -x 8 -l 1e-2 -u 1 -d 64 -v 8 --quiet" +
                     in_fp32();
    auto validate = [&](const char *file, int b, int batches) {
        const Text folder = text("%s_b%dm%d", file, b, batches);
        if (!exists(folder)) {
            const Text more = text(" -j %s -b %d -m %d -o ", file, b, batches);
            expect_success(program(run + more + folder), folder);
        }
        return last_value(read_file(folder + "/log.jsonl"), "val_loss");
    };
    static const struct {
        const char *file;
        int b, batches, same_b, same_batches;
    } table[] = {{"val", 4, 0, 1, 8}, {"val", 4, 99, 1, 8}, {"val", 2, 4, 1, 8},
                 {"val", 2, 0, 1, 10}, {"val", 4, 1, 1, 4}, {"val", 1, 0, 1, 11},
                 {"same", 4, 0, 1, 1}, {"same", 1, 0, 1, 1}};
    double least = HUGE_VAL, most = 0;
    for (auto &row : table) {
        const double got = validate(row.file, row.b, row.batches);
        const double want = validate(row.file, row.same_b, row.same_batches);
        expect_near(got, want, LOSS_TOL * want, "%s -b %d -m %d", row.file, row.b, row.batches);
        least = row.file[0] == 'v' ? fmin(least, want) : least;
        most = row.file[0] == 'v' ? fmax(most, want) : most;
    }
    expect(most > 1.01 * least, "%.4f to %.4f: no sequences are harder than others", least, most);
    expect(validate("val", 1, 0) != validate("val", 1, 10), "the last sequence is left out");
}

// Returns the number of step lines in a log, which may end within a line.
static int log_steps_of(const Text &folder) {
    const Text log = read_file(folder + "/log.jsonl");
    int steps = 0;
    for (size_t at = 0; (at = log.find("\"loss\":", at)) != Text::npos; at++) {
        steps++;
    }
    return steps;
}

// Resident memory of a run is within 50 MB of its plan, as README promises.
TEST(resident_memory) {
    const Outcome o = program("-i train.bin -e l2h8c512t32 -b 2 -x 2 -o out --quiet");
    expect_success(o, "a run");
    double plan = last_value(read_file("out/log.jsonl"), "plan_bytes");
    expect_near(o.resident_bytes, plan, 50e6, "resident %.1f MB, plan %.1f MB",
                o.resident_bytes / 1e6, plan / 1e6);
}

// After --max-skips consecutive skipped steps the run ends; its newest checkpoint is from before
// them, whatever --save-every says.
TEST(max_skips) {
    const Text diverging = "--quiet -l 1 -c 11 -k constant -v 0 -n 1 -o out ";
    Outcome o = program(TINY + diverging + "-x 100 --max-skips 7");
    const Text log = read_file("out/log.jsonl");
    const Ints steps = log_steps("out/log.jsonl");
    const int last = steps.empty() ? 0 : steps.back(), before = last - 7;
    expect_refused(o, text("--max-skips: 7 consecutive steps were skipped"), "diverges");
    expect(has(o.err, text("the run ended after step %d, which is not saved", last)),
           "%s", o.err.c_str());
    expect(before > 0 && has(log, text("{\"step\":%d,\"checkpoint\"", before)),
           "the newest checkpoint is not of step %d: %s", before, log.c_str());
    expect(!exists(text("out/step-%08d", before + 1)) && !exists(text("out/step-%08d", last)));
    expect(has(log, "{\"event\":\"end\",\"reason\":\"failed\"}"));
    remove_folder("out");
    o = program(TINY + diverging + "-x 60");
    expect_refused(o, "--max-skips: 20 consecutive steps were skipped", "the default");
    remove_folder("out");
    expect_success(program(TINY + diverging + "-x 40 --max-skips 0"), "no limit");
    expect(exists("out/step-00000040"), "the end of a run without a limit is saved");
    detail = text("diverged in step %d", before + 1);
}

// If a data file is truncated during a run, every finished step is saved.
TEST(data_cut) {
    for (const char *file : {"train.bin", "val.bin"}) {
        const Text whole = read_file(file), folder = Text("out-") + file;
        pid_t pid = start(Text("-i train.bin -j val.bin -e l2h2c16t16 -b 2 -x 99999999 -v 50 -m 0 "
                               "-k constant --quiet -o ") + folder);
        wait_until([&] { return log_steps_of(folder) > 20; });
        const int cut = truncate(file, 1100);
        const Outcome o = outcome(pid);
        expect(cut == 0, "cannot cut %s", file);
        expect_refused(o, Text(file) + ": cannot read tokens", file);
        expect_refused(o, "the file was truncated while in use; the run ended after step", file);
        const Ints steps = log_steps(folder + "/log.jsonl");
        const int last = steps.empty() ? 0 : steps.back();
        expect(has(o.err, text("after step %d, which is saved", last)) &&
                   exists(folder + text("/step-%08d/manifest.json", last)),
               "%s: %s", names_in(folder, "").c_str(), o.err.c_str());
        write_file(file, whole);
        expect_success(program(Text("-i train.bin -j val.bin -e l2h2c16t16 -b 2 -k constant "
                                    "--quiet -y 1 -v 50 -m 0 -o ") + folder +
                               text(" -x %d", last + 5)), "resumed");
    }
}

// The program restarts itself once so that its OpenMP threads spin for microseconds only;
// arguments, name and process id stay the same, and an OMP_WAIT_POLICY set by the user is kept.
TEST(waiting) {
#ifdef _OPENMP
    const Text name = tested.substr(tested.rfind('/') + 1);
    for (int chosen = 0; chosen < 2; chosen++) {
        const pid_t pid = start("-i train.bin -e l1h2c32t16 -b 2 -x 9999999", [&] {
            setenv("OMP_NUM_THREADS", "2", 1);
            unsetenv("GOMP_SPINCOUNT");
            unsetenv("KMP_BLOCKTIME");
            chosen ? setenv("OMP_WAIT_POLICY", "active", 1) : unsetenv("OMP_WAIT_POLICY");
        });
        wait_until([] { return has(read_file("stdout"), "\npeak "); });
        const Text process = text("/proc/%d/", pid), variables = read_file(process + "environ");
        const Text words = read_file(process + "cmdline"), called = read_file(process + "comm");
        kill(pid, SIGINT);
        expect(outcome(pid).status == 0, "it does not stop with status 0");
        remove("stdout");
        expect(!has(variables, "GOMP_SPINCOUNT=") == chosen, "chosen: %d", chosen);
        expect(has(words, Text("-x\0009999999", 10)), "%s", words.c_str());
        expect(chosen || called == name.substr(0, 15) + "\n", "called %s", called.c_str());
    }
#endif
}

// A program started through a dynamic loader does not restart itself, because the loader would
// interpret the program's arguments.
TEST(loader) {
    static const char loader[] = "/lib64/ld-linux-x86-64.so.2";
    if (access(loader, X_OK) != 0 || has_sanitizers()) {
        skip("no loader of this name, or a sanitizer build");
    }
    if (program("--version").out.find("no OpenMP") != Text::npos) {
        skip("a program without OpenMP never restarts itself");
    }
    const Outcome o = outcome(spawn([] {
        setenv("OMP_NUM_THREADS", "2", 1);
        for (const char *name : {"GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY"}) {
            unsetenv(name);
        }
        execl(loader, loader, tested.c_str(), "-i", "train.bin", "-e", "l2h2c16t16", "-b", "2",
              "-x", "1", NULL);
    }));
    expect_success(o, "through the loader");
    expect(has(o.out, "\nfinished after step 1,"), "%s", o.out.c_str());
}

// The loss of each of 200 steps with bf16 matmuls is within 2 % of that in fp32; a resume without
// bf16 matmuls reports the change.
TEST(bf16_matmuls) {
    const Text run = training_files() + " -e l2h2c64t64 -b 2 -l 1e-3 -u 20 -v 0 -o ";
    const Outcome exact = program(run + "exact -x 200"),
                  rounded = program(run + "bf16 -x 200 --matmul bf16");
    if (has(rounded.err, "AVX512-BF16")) {
        skip("this processor lacks AVX512-BF16");
    }
    expect_success(exact, "fp32");
    expect_success(rounded, "bf16");
    std::vector<double> want = values_in(read_file("exact/log.jsonl"), "loss"),
                        got = values_in(read_file("bf16/log.jsonl"), "loss");
    expect(want.size() == 200 && got.size() == 200, "%zu and %zu steps", want.size(), got.size());
    double worst = 0;
    for (size_t i = 0; i < want.size() && i < got.size(); i++) {
        worst = fmax(worst, fabs(got[i] / want[i] - 1));
    }
    expect(worst > 0 && worst < 0.02, "losses differ by %.2e", worst);
    const Outcome again = program(run + "bf16 -y 1 -x 201");
    expect_success(again, "in fp32 from step 200 on");
    expect(has(again.out, "  --matmul is fp32, was bf16\n"), "the change is not reported");
    detail = text("losses within %.2e, bound 2e-2", worst);
}

// Losses, validations, samples and checkpoints do not depend on where states are placed; a run
// resumes a checkpoint with another placement; --eval gives the same scores.
TEST(offload) {
    write_file("e.bin", eval_bytes(random_questions(3, 50257, 2)));
    const Text all = Text("weights,gradients,moments,residuals") +
                     (has(tested, "cu") ? ",master" : "");
    const Text run = "-i train.bin -j val.bin -e l3h1c16t16 -b 2 -d 64 -k constant -v 2 -m 2 -s 2 "
                     "-g 4 -r none --offload ";
    auto sample = [](const Outcome &o) { return o.out.substr(o.out.find("--- sample")); };
    auto losses = [](const Text &folder) {
        std::vector<double> both = values_in(read_file(folder + "/log.jsonl"), "loss");
        for (double x : values_in(read_file(folder + "/log.jsonl"), "val_loss")) {
            both.push_back(x);
        }
        return both;
    };
    Outcome o = program(run + "none -x 4 -o none");
    expect_success(o, "none");
    const Text samples = sample(o).substr(0, 24), end = tensors_of("none", 4);
    expect(losses("none").size() >= 6 && !end.empty());
    for (const Text &states : {Text("weights"), Text("gradients"), Text("moments"),
                               Text("residuals"), all}) {
        o = program(run + states + " -x 4 -o " + states);
        expect_success(o, states);
        expect(losses(states) == losses("none") && tensors_of(states, 4) == end, "%s",
               states.c_str());
        expect(sample(o).substr(0, 24) == samples, "%s: samples", states.c_str());
    }
    for (int turn = 0; turn < 2; turn++) {
        const Text folder = text("turn%d", turn), none = "none";
        expect_success(program(run + (turn ? all : none) + " -x 2 -o " + folder), folder);
        expect_success(program(run + (turn ? none : all) + " -x 4 -y 1 -o " + folder), folder);
        expect(tensors_of(folder, 4) == end, "a resume with other states offloaded, %d", turn);
    }
    const Text eval = "-e l3h1c16t16 --eval e.bin --json -b 3 --offload ";
    expect(program(eval + all).out == program(eval + "none").out, "--eval");
}

int main(int argc, char **argv) {
    return harness_main(argc, argv, "./train_gpt2");
}
