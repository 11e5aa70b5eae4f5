// output.h -- tests of sampling, evaluation, the log, and failures that users cannot cause.

// Tests temperature 0, top-k, top-p, and frequencies: for n evenly spaced random numbers, a token
// with probability p is returned n p times, within two.
TEST(sampling, ALL) {
    enum { V = 6, DRAWS = 20000 };
    static const double p[V] = {0.05, 0.4, 0.1, 0.25, 0.15, 0.05};
    real logits[V];
    ScoredToken candidates[V];
    for (int v = 0; v < V; v++) {
        logits[v] = (real)(log(p[v]) + 3);
    }
    static const struct {
        double temperature, top_p;
        int top_k;
        double want[V];
    } cases[] = {{1, 1, 0, {0.05, 0.4, 0.1, 0.25, 0.15, 0.05}},
                 {0, 1, 0, {0, 1, 0, 0, 0, 0}},
                 {1, 1, 2, {0, 0.4 / 0.65, 0, 0.25 / 0.65, 0, 0}},
                 {1, 1, 99, {0.05, 0.4, 0.1, 0.25, 0.15, 0.05}},
                 {1, 0.7, 0, {0, 0.5, 0, 0.3125, 0.1875, 0}},  // 0.4 + 0.25 + 0.15 reaches 0.7
                 {1, 1e-6, 0, {0, 1, 0, 0, 0, 0}},
                 {1, 0.6, 3, {0, 0.4 / 0.65, 0, 0.25 / 0.65, 0, 0}},  // 0.65 reaches 0.6 x 0.8
                 {1, 0.45, 3, {0, 1, 0, 0, 0, 0}},  // 0.4 reaches 0.45 x 0.8, not 0.45
                 {0.5, 1, 0, {0.01, 0.64, 0.04, 0.25, 0.09, 0.01}}};  // p^2, normalized
    Options o;
    for (auto &c : cases) {
        int counts[V] = {0};
        const double sum = std::accumulate(c.want, c.want + V, 0.0);
        o.temperature = c.temperature;
        o.top_p = c.top_p;
        o.top_k = c.top_k;
        for (int i = 0; i < DRAWS; i++) {
            counts[sample_token(logits, V, &o, (i + 0.5) / DRAWS, candidates)]++;
        }
        for (int v = 0; v < V; v++) {
            expect_near(counts[v], (wide)(c.want[v] / sum * DRAWS), c.want[v] == 0 ? 0 : 2,
                        "token %d, temperature %g top-k %d top-p %g", v, c.temperature, c.top_k,
                        c.top_p);
        }
    }
    real equal[V] = {1, 2, 2, 0, 2, 1};
    options_default(&o);
    o.top_p = 0.5;
    real four[4] = {1, 1, 1, 1};  // exactly half of the probability in two tokens
    expect(sample_token(four, 4, &o, 0.99, candidates) == 1, "more tokens than top-p needs");
    o.temperature = 0;
    expect(sample_token(equal, V, &o, 0.9, candidates) == 1, "ties go to the first");
}

// A log line that contains every byte and non-finite numbers is valid JSON in ASCII.
TEST(log, HOST) {
    FILE *f = fopen("text", "w");
    char bytes[256];
    std::iota(bytes, bytes + 256, 0);
    json_print(f, "{'sample':'%.*s','x':%.9g,'y':%.9g,'z':%.9g}", 255, bytes + 1,  // no byte is 0
               NAN, -HUGE_VAL, 0.1);
    fclose(f);
    Text line = read_file("text");
    Json j = {(const unsigned char *)line.data(), 0, line.size(), NULL};
    json_skip(&j);
    expect(!j.fault && j.offset == line.size() && has(line, "\"x\":null,\"y\":null,\"z\":0.1}"));
    expect(std::count_if(line.begin(), line.end(), [](char c) { return c < 32 || c > 126; }) == 0);
}

// A step's line and its entry in the log: 803,478,528 FLOPs per token of d12 (TEST(model_sizes)),
// and the mean time of a step for each of those left.
TEST(step_line, HOST) {
    static Run run;
    run.s = planned("-e d12");
    const Options o = default_options();
    run.o = &o;
    run.windows_per_step = 512;
    run.steps = 100;
    run.state.step = 40;
    run.ms = 800;
    run.mean_ms = 2000;
    run.engine.peak_flops = 989.4e12;
    run.log = fopen("log", "w");
    const Text line = outcome(spawn([] { run_report(&run, 0); })).out;
    expect(has(line, "  800.0 ms  655,360 tok/s  53 % of peak  eta 2:00\n"), "%s", line.c_str());
    expect(has(read_file("log"), "\"tokens_per_s\":655360,\"peak_pct\":53.22"), "%s",
           read_file("log").c_str());
}

// The first signal is acknowledged. A second one ends the process, of whatever kind the two are,
// except SIGHUP as the second, and SIGUSR1, which stops the other ranks.
TEST(signals, HOST) {
    static const struct {
        Ints sent;
        int status;
    } table[] = {{{SIGINT, SIGINT}, 130}, {{SIGINT, SIGTERM}, 143}, {{SIGHUP, SIGINT}, 130},
                 {{SIGTERM, SIGHUP}, 0}, {{SIGHUP, SIGHUP, SIGINT}, 130}, {{SIGUSR1, SIGINT}, 0},
                 {{SIGUSR1, SIGINT, SIGTERM}, 143}, {{SIGINT, SIGUSR1}, 0},
                 {{SIGINT, SIGUSR1, SIGTERM}, 143}};
    stop_line = "stopping\n";
    for (const auto &row : table) {
        const Outcome o = outcome(spawn([&] {
            std::for_each(row.sent.begin(), row.sent.end(), on_signal);
        }));
        expect(o.status == row.status && o.err == "stopping\n", "%d, %d: status %d, %s",
               row.sent[0], row.sent[1], o.status, o.err.c_str());
    }
}

// What checkpoints need on the disk: bytes per parameter, of P in all, S with the vocabulary's
// padding and M in matrices of blocks; and how many are still to come.
TEST(disk, HOST) {
    const double P = 124439808, S = P + 47 * 768, M = 12 * 12 * 768 * 768;
    const std::pair<const char *, double> sizes[] = {
        {"", 2 * P + 10 * S}, {"--moments bf16", 2 * P + 6 * S}, {"-w none", 2 * P + 8 * S},
        {"--dtype fp32", 4 * P + 8 * S}, {"--dtype fp16", 4 * P + 8 * S},
        {"--optimizer muon", 2 * P + 10 * S - 4 * M}};
    for (const auto &[options, bytes] : sizes) {
        const Settings s = planned(Text("-e d12 ") + options);
        expect_near(checkpoint_bytes(&s), bytes, 0.5, "%s", options);
    }
    static const int table[][6] = {  // --save-every, --keep, --steps, resumed at, found, to come
        {0, 0, 9, -1, 0, 1}, {0, 0, 5, 5, 3, 0}, {2, 0, 9, 0, 3, 5}, {2, 0, 9, 1, 3, 4},
        {1, 3, 9, -1, 0, 5}, {1, 3, 9, 0, 2, 3}, {1, 3, 9, 0, 5, 1}, {1, 3, 9, 0, 8, 1},
        {1, 3, 9, 7, 0, 2}};
    for (const auto &row : table) {
        Options o = default_options();
        o.save_every = row[0];
        o.keep = row[1];
        expect(checkpoints_to_come(&o, row[2], row[3], row[4]) == row[5],
               "-n %d --keep %d -x %d, at %d, %d", row[0], row[1], row[2], row[3], row[4]);
    }
}

// A rank waits for the folder that rank 0 has made, which a network disk may show late.
TEST(late_folder, HOST) {
    static Engine engine;
    this_rank.rank = 1;
    mkdir("out", 0755);
    const pid_t maker = spawn([] { usleep(200000), mkdir("out/step-00000007.tmp", 0755); });
    checkpoint_probe(&engine, "out", 7);
    outcome(maker);
    expect(exists("out/step-00000007.tmp/state-1-of-1.safetensors"));
    rank_timeout_ms = 100;
    expect_death(checkpoint_probe(&engine, "out", 8), "all machines must share the folder out");
}

// Closing another descriptor of the lock file keeps the lock, which also excludes a forked child.
TEST(folder_lock, HOST) {
    mkdir("folder", 0755);
    folder_lock("folder");
    close(open("folder/lock", O_RDWR));
    expect_death(folder_lock("folder"), "folder is in use by another run: process ");
}

// Returns the scores that an engine with capacity for B rows of T tokens gives the file.
static EvalScore eval_score(Engine *e, const Text &bytes, int V, int B, int T) {
    static Run run;
    EvalFile f;
    EvalScore score;
    Options none = {};
    std::vector<Token> batch((size_t)(2 * B * T), V - 1);
    memset(&score, 0, sizeof score);
    none.quiet = 1;
    run.o = &none;
    run.s.B = B;
    run.s.T = T;
    run.s.ranks = 1;
    run.engine = *e;
    run.inputs = batch.data();
    run.targets = batch.data() + B * T;
    eval_parse(&f, (const unsigned char *)bytes.data(), bytes.size(), "file", V);
    run_evaluate(&run, &f, &score);
    return score;
}

// An engine whose loss is exactly target / 1024, or 1e6 for targets outside completions.
static int stub_tokens;
static double stub_forward_loss(Engine *, real *losses, const Token *, const Token *targets) {
    for (int i = 0; i < stub_tokens; i++) {
        losses[i] = targets[i] == 0 || targets[i] > 9000 ? (real)1e6 : (real)targets[i] / 1024;
    }
    return 1;
}

// Scores by lowest loss sum and by lowest mean (ties go to the first) match values computed by hand
// for any B and T, with two to eight completions and with truncated contexts.
TEST(eval_scores, ALL) {
    const std::vector<Ints> four = {{200, 200}, {250}, {100, 100, 100}, {400}};  // sum 1, mean 2
    const std::vector<Ints> equal = {{500}, {300}, {300, 300}, {300}}, sums = {{100, 200}, {300}};
    const Ints longer = {9001, 9002, 9003, 9004, 9005, 9006};
    const std::vector<Question> questions = {
        {1, {9001}, four},  {1, longer, four},  {2, longer, four},        {1, longer, equal},
        {0, {9001}, equal}, {0, {9001}, sums}, {1, {9001, 9002}, sums},
        {7, longer, {{9}, {8}, {7}, {6}, {5}, {4}, {3}, {2}}}};
    const Text bytes = eval_bytes(questions);  // correct: 0 1 3 5 7 by sum, 2 3 5 7 by mean
    Engine stub;
    memset(&stub, 0, sizeof stub);
    stub.forward_loss = stub_forward_loss;
    for (int B : {1, 3, 4, 8, 100}) {
        for (int T : {3, 6, 8, 33}) {
            stub_tokens = B * T;
            EvalScore s = eval_score(&stub, bytes, 10000, B, T);
            // Questions 1, 2, 3 and 7 have rows of 7 to 9 tokens; 3 also has rows of 4 tokens.
            const int cut = T == 3 ? 20 : T == 6 ? 5 : 0;
            expect(s.examples == 8 && s.correct == 5 && s.correct_norm == 4 && s.cut_rows == cut,
                   "B %d T %d: %d examples, %d and %d right, %d cut", B, T, s.examples, s.correct,
                   s.correct_norm, s.cut_rows);
        }
    }
    // Compares every row token by token.
    EvalFile f;
    EvalExample x;
    eval_parse(&f, (const unsigned char *)bytes.data(), bytes.size(), "file", 10000);
    expect(f.longest_row == 9 && f.longest_completion == 3 && f.longest_at == 0);
    size_t at = LLMC_HEADER_BYTES;
    for (int i = 0; i < f.examples; i++) {
        at += eval_example(&x, &f, at, i);
        for (int k = 0; k < x.completions; k++) {
            for (int T = 3; T < 12; T++) {
                std::vector<Token> inputs((size_t)T, -1), targets((size_t)T, -1);
                Ints all = questions[(size_t)i].context;
                const Ints &completion = questions[(size_t)i].completions[(size_t)k];
                all.insert(all.end(), completion.begin(), completion.end());
                all.erase(all.begin(), all.end() - std::min((long)all.size(), (long)T + 1));
                const size_t kept = all.size();
                all.resize((size_t)T + 1, 0);
                EvalRow row = eval_row(inputs.data(), targets.data(), &x, k, T);
                expect(std::equal(inputs.begin(), inputs.end(), all.begin()) &&
                           std::equal(targets.begin(), targets.end(), all.begin() + 1),
                       "example %d, completion %d, T %d", i, k, T);
                expect(row.count == (int)completion.size() && row.first >= 0 &&
                       row.first + row.count == (int)kept - 1);
            }
        }
    }
    expect_death(eval_row(NULL, NULL, &x, 0, 0), "file changed");
    detail = "20 combinations of B and T";
}

// Internal failures.
// A failing engine, or a machine with very little memory, cannot be produced by running the built
// program. Failures that a user can cause are tested by dev/test/*.py.

static void (*healthy_micro_step)(Engine *e, const Token *in, const Token *out, int accum_step,
                                  int accum_steps);
// The third and fifth micro-steps of a faulty engine write a NaN to the gradients.
static void faulty_micro_step(Engine *e, const Token *in, const Token *out, int accum_step,
                              int accum_steps) {
    static int calls;
    healthy_micro_step(e, in, out, accum_step, accum_steps);
    if (++calls == 3 || calls == 5) {
        buffer(((CpuEngine *)e->self)->plan, BUF_GRADS)[5] = (real)NAN;
    }
}

static void faulty_open(Engine *e, Plan *p, const Options *o) {
    cpu_open(e, p, o);
    healthy_micro_step = e->micro_step;
    e->micro_step = faulty_micro_step;
}

static size_t little_memory() {
    const Model m = shape("l1h1c16t16", 257);
    return 1000000 + outside_plan_bytes(&m);
}
static size_t much_memory() { return (size_t)1 << 60; }

// A step with a non-finite gradient is skipped, counted, and logged as null; training continues,
// unless --max-skips of them are consecutive.
TEST(skipped_step, HOST) {
    static const Program faulty = {
        .name = "train_gpt2", .default_model = "l2h2c16t16", .open = faulty_open,
        .available = much_memory};
    static const Program small = {
        .name = "train_gpt2", .default_model = "l2h2c16t16", .open = cpu_open,
        .available = little_memory};
    const Text tiny = "-i train.bin -e l2h2c16t16 -b 2 -x 6 -o ";
    write_file("train.bin", shard_bytes(Ids(3000, 97), BYTE_TOKENS));
    Outcome o = in_process(tiny + "out --max-skips 2", &faulty);
    expect_success(o, "a NaN gradient");
    expect(has(o.out, "2 skipped") && has(o.out, "SKIPPED"));
    Text log = read_file("out/log.jsonl");
    size_t third = log.find("{\"step\":3,\"loss\"");
    Text line = log.substr(third, log.find('\n', third) - third);
    expect(has(line, "\"grad_norm\":null") && has(line, "\"skipped\":1"));
    expect(log.rfind("\"skipped\":1") > log.find("{\"step\":5,\"loss\""), "and step 5");
    expect(has(read_file("out/step-00000006/state-0-of-1.safetensors"),
               "\"step\":\"6\",\"skipped\":\"2\",\"updates\":\"4\",\"position\":\"12\","
               "\"norm_count\":\"4\",\"pending_validation\":\"0\""));
    o = in_process(tiny + "none", &small);
    expect_too_large(o, "only 976.6 KiB is available: ", "a plan that does not fit");
    expect(!exists("none/log.jsonl"));
    write_file("e.bin", eval_bytes(random_questions(12, 50257, 2)));
    expect_too_large(in_process("-e l1h1c16t16 --eval e.bin", &small),
                     "only 976.6 KiB is available: ", "--eval");
}
