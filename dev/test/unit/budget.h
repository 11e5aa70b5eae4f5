// budget.h -- tests of train_gpt2.c's settings and forecasts: what fits in memory, what -r auto and
// --fit choose, and how long a step takes.

// A run as its options describe it: options, settings and plan, on a GPU unless `gpu` is 0.
struct Planned {
    Options o;
    Settings s;
    Plan plan;
    Planned(const Text &options, int gpu = 1) {
        Model m;
        parse(&o, ("--plan " + options).c_str());
        model_parse(&m, o.model);
        model_set_vocabulary(&m, m.V ? m.V : (int)GPT2_VOCABULARY);
        settings_from_options(&s, &o, &m, gpu);
        plan_build(&plan, &s);
    }
    Planned(const Planned &) = delete;
    ~Planned() { plan_free(&plan); }
};

// Settings that do not fit are rejected before any allocation, with suggestions that would fit.
TEST(plan_refuse, HOST) {
    Planned run("-e l4h4c128t64v257 -b 8 --logit-rows 64 -r none", 0);
    const Plan *p = &run.plan;
    auto refused = [](Planned &it, uint64_t device, uint64_t host, int64_t cap = 0) {
        it.o.host_mem = cap;
        MemoryBudget budget = budget_unlimited(&it.o, &it.s.model);
        budget.device = device;
        budget.host = host;
        budget.total = 1 << 20;
        return outcome(spawn([&] { plan_refuse(&it.plan, &it.o, &budget); }));
    };
    expect(refused(run, p->device_bytes, UINT64_MAX).status == 0, "a plan that fits");
    expect_too_large(refused(run, p->device_bytes - 1000, SIZE_MAX),
                     ": 1000 B short; it fits with -r ", "a little");
    expect_too_large(refused(run, 1, SIZE_MAX), "only 1 B is available", "all");
    expect_too_large(refused(run, 0, SIZE_MAX), "but libraries and file buffers use all 1.0 MiB",
                     "the libraries");
    Planned away("-e d12 --offload moments");
    expect_too_large(refused(away, away.plan.device_bytes, away.plan.host_bytes - 1),
                     "is available in host memory: 1 B short", "on the host");
    expect_too_large(refused(away, away.plan.device_bytes, away.plan.host_bytes - 1, 1),
                     "is available in host memory (--host-mem): 1 B short", "--host-mem");
}

// The mix of recompute levels that -r auto chooses fits in memory, can be passed to -r, and is
// `none` if everything fits. More memory never makes it slower. Compared with any single level that
// fits, it costs at most one recomputed block more, because a mix may recompute one too many.
TEST(levels_fit, FLOAT) {
    const int count = full_or(150, 3000);
    double worst_price = 0;
    for (int n = 0; n < count; n++) {
        Settings s = draw_settings(), least = s, parsed = s;
        const Speed v = default_speed(&s);
        const Text who = settings_text(s);
        settings_recompute(&s, RECOMPUTE_NONE, 0);
        settings_recompute(&least, RECOMPUTE_BLOCK, s.model.L);
        const size_t all = plan_bytes(&s), few = plan_bytes(&least);
        double before = HUGE_VAL;
        for (int part = 0; part <= 4; part++) {
            const size_t budget = few + (all - few) * (size_t)part / 4;
            settings_fit_levels(&s, &v, budget);
            const double seconds = forecast_step(&v, &s, 1);
            expect(plan_bytes(&s) <= budget, "%s: more than %zu", who.c_str(), budget);
            expect(seconds <= before, "%s: slower with more memory", who.c_str());
            before = seconds;
            recompute_parse(&parsed, recompute_text(&s).s);
            expect(memcmp(parsed.level, s.level, sizeof s.level) == 0, "%s: %s", who.c_str(),
                   recompute_text(&s).s);
            Settings block = s;
            settings_recompute(&block, RECOMPUTE_BLOCK, 1);
            Settings none = s;
            settings_recompute(&none, RECOMPUTE_NONE, 0);
            const double one = forecast_step(&v, &block, 1) - forecast_step(&v, &none, 1);
            for (int level = 0; level < RECOMPUTE_LEVELS; level++) {
                Settings same = s;
                settings_recompute(&same, level, s.model.L);
                if (plan_bytes(&same) <= budget) {
                    const double price = (seconds - forecast_step(&v, &same, 1)) / one;
                    worst_price = std::max(worst_price, price);
                    expect(price <= 1, "%s: %s is faster than %s by %.2f blocks", who.c_str(),
                           level_name(level).s, recompute_text(&s).s, price);
                }
            }
        }
        expect(recompute_text(&s).s == Text("none"), "%s: memory for everything", who.c_str());
        settings_fit_levels(&s, &v, few - 1);
        expect(plan_bytes(&s) == few, "%s: too little memory", who.c_str());
        // Given exactly the bytes that some mix needs, the chosen mix is not slower.
        int hull[RECOMPUTE_LEVELS];
        Settings mixed = s;
        settings_mix(&mixed, hull, draw(0, (level_hull(hull, &v, s.fp8) - 1) * s.model.L),
                     s.model.L);
        settings_fit_levels(&s, &v, plan_bytes(&mixed));
        expect(forecast_step(&v, &s, 1) <= forecast_step(&v, &mixed, 1), "%s: %s fits, not %s",
               who.c_str(), recompute_text(&mixed).s, recompute_text(&s).s);
    }
    detail = text("%d random settings; at worst %.2f blocks too many", count, worst_price);
}

// Returns the settings that -r auto and --offload auto choose for the given options on a GPU with
// `device` bytes for the plan and `host` bytes that can be pinned.
static Settings automatic(const Text &options, size_t device, size_t host) {
    Options o;
    Settings s = planned(options);
    parse(&o, ("--plan " + options).c_str());
    MemoryBudget budget = budget_unlimited(&o, &s.model);
    budget.device = device;
    budget.host = host;
    settings_auto(&s, &o, &budget);
    return s;
}

// Every suggestion fits, and its options reproduce its settings; none dominates another; they are
// sorted by effect and cost. If there are none, even the smallest settings do not fit.
TEST(suggestions, FLOAT) {
    static const char *const types[] = {"--dtype fp32", "--dtype bf16", "--moments bf16",
                                        "--moments bf16 -w none", "-w none", "--dtype fp16"};
    const int count = full_or(40, 1500);
    std::vector<Candidate> list(MAX_CANDIDATES);
    int changes = 0, without = 0;
    for (int n = 0; n < count; n++) {
        const Text base =
            text("-e l%dh2c%dt64 -b %d -r %s --offload %s %s", draw(1, 5), 16 * draw(1, 20),
                 1 << draw(0, 4), level_name(draw(0, 5)).s, draw(0, 3) ? "none" : "moments",
                 types[draw(0, 5)]);
        const Planned run(base);
        const Settings &s = run.s;
        const Speed v = default_speed(&s);
        MemoryBudget budget = {};
        budget.device = run.plan.device_bytes / 100 * (size_t)draw(2, 99);
        budget.host = draw(0, 3) ? SIZE_MAX : run.plan.device_bytes / 3;
        const int found = suggestions_find(list.data(), &run.plan, &budget, &run.o,
                                           OTHER_NUMBERS);
        for (int i = 0; i < found; i++) {
            const Candidate &w = list[(size_t)i], &before = list[(size_t)max_i64(i - 1, 0)];
            Settings again, changed = w.s;
            LevelsText levels;
            const Options o = options_of_settings(&run.o, &changed, 0, &levels);
            settings_from_options(&again, &o, &s.model, 1);
            expect(memcmp(&again, &changed, sizeof again) == 0, "%s, suggestion %d: -r %s",
                   base.c_str(), i, levels.s);
            expect(w.device == plan_bytes(&changed) && w.device <= budget.device &&
                       w.host <= budget.host, "%s, suggestion %d", base.c_str(), i);
            expect(w.effect > before.effect ||
                       (w.effect == before.effect && w.slower >= before.slower), "%s: order",
                   base.c_str());
            const int numbers = changed.moment_dtype != s.moment_dtype ||
                                changed.split_master != s.split_master;
            expect(!numbers || w.effect == OTHER_NUMBERS, "%s, suggestion %d", base.c_str(), i);
            for (int k = 0; k < i; k++) {
                const Candidate &other = list[(size_t)k];
                expect(other.host > w.host || other.tokens_per_s < w.tokens_per_s ||
                           other.effect > w.effect, "%s: %d beats %d", base.c_str(), k, i);
            }
            // Both forecasts are for a step with the same number of tokens.
            const double slower = forecast_tokens_per_s(&v, &s, 1) /
                                      forecast_tokens_per_s(&v, &changed, s.B / changed.B) - 1;
            expect_near(w.slower, slower, 1e-9 * (1 + slower), "%s, change %d", base.c_str(), i);
        }
        if (found == 0) {
            Search q = plan_search(&s, &budget, &run.o, OTHER_NUMBERS);
            q.mix = 0;
            for (int i = 0; i < OFFLOAD_LEVELS * (q.last[BY_TYPE] + 1); i++) {
                const int type = i / OFFLOAD_LEVELS, offload = i % OFFLOAD_LEVELS;
                const int steps[AXES] = {RECOMPUTE_BLOCK, type, offload, 1, 0, 1};
                expect(!candidate_plan(&q, steps).fits, "%s: %d fits", base.c_str(), i);
            }
        }
        changes += found;
        without += found == 0;
    }
    expect(changes > count && without > 0, "%d and %d", changes, without);
    detail = text("%d plans, %d suggestions", count, changes);
}

// If everything fits, -r auto and --offload auto change nothing. Otherwise they prefer
// recomputation and offload no more than needed. Explicit options are left unchanged, and states
// that do not fit in host memory stay on the device.
TEST(auto, HOST) {
    const Text run = "-e l6h2c64t64 -b 4";
    const Settings whole = planned(run + " -r none"), min_kept = planned(run + " -r block");
    const size_t all = plan_bytes(&whole), block = plan_bytes(&min_kept);
    auto chosen = [&](const Text &more, size_t device, size_t host) {
        char placements[64];
        const Settings s = automatic(run + more, device, host);
        return Text(recompute_text(&s).s) + " " + offload_text(placements, &s);
    };
    expect(chosen("", all, 0) == "none none", "%s", chosen("", all, 0).c_str());
    expect(chosen("", NO_LIMIT, 0) == "none none", "an unknown card");
    expect(chosen("", all - 1, 0) != "none none" && has(chosen("", block, 0), "block"));
    const Text least = chosen("", block, SIZE_MAX);
    expect(least.find("block") == 0 && has(least, " none"), "%s", least.c_str());
    const Text away = chosen("", block - 1, SIZE_MAX);
    expect(has(away, " moments") && !has(away, "master"), "%s", away.c_str());
    expect(chosen("", block - 1, 1000).find("block none") == 0, "no host memory");
    expect(chosen("", 1, SIZE_MAX) == "block weights,gradients,moments,master,residuals", "%s",
           chosen("", 1, SIZE_MAX).c_str());
    static const char *const moved[OFFLOAD_LEVELS] = {
        "none", "moments", "moments,master", "moments,master,residuals",
        "gradients,moments,master,residuals", "weights,gradients,moments,master,residuals"};
    for (int level = 0; level < OFFLOAD_LEVELS; level++) {
        char placements[64];
        Settings s = whole;
        settings_offload(&s, level);
        expect(offload_text(placements, &s) == Text(moved[level]), "%d: %s", level, placements);
    }
    expect(chosen(" --offload none", 1, SIZE_MAX) == "block none");
    expect(chosen(" -r gelu:2 --offload moments", 1, SIZE_MAX) == "gelu:2 moments");
    expect(chosen(" -r mlp:2,norm", all, 0) == "mlp:2,norm none");
}

static Speed card_speed(const Text &options, const Settings &s) {
    Options o;
    parse(&o, ("--plan " + options).c_str());
    return speed_predict(card_rates(gpu_find(o.gpu)), &s);
}

// For every card in the table, the rate is 2^n FLOPs per clock and SM, as for all tensor cores
// (this detects typos), and the reported memory is below the nominal size. Other spellings of a
// name find the same row; an unknown name is an error that lists similar ones.
TEST(cards, HOST) {
    static const double sold[] = {6, 8, 10, 11, 12, 16, 24, 32, 40, 48, 80, 96, 141, 180};
    for (const GpuEntry &card : gpu_table) {
        const double work = 1e6 * card.tflops / (card.sms * card.mhz);
        const double power = exp2(round(log2(work)));
        expect(work >= 512 * 0.97 && work <= 8192 * 1.03, "%s: %g", card.name, work);
        expect_near(work, power, 0.03 * power, "%s: FLOPs per clock and SM", card.name);
        const double *nominal = std::lower_bound(sold, sold + 14, card.gib);
        expect(nominal < sold + 14 && card.gib > 0.9 * *nominal, "%s: %g GiB", card.name, card.gib);
        for (const char *spelling : {"%s", "RTX %s", "rtx_%s"}) {
            Options o;
            Text name = card.name, upper;
            for (const char c : name) {
                upper += c == '-' ? ' ' : (char)toupper(c);
            }
            options_default(&o);
            const Text typed = text(spelling, upper.c_str());
            o.gpu = typed.c_str();
            expect(strncmp(card.name, "rtx", 3) == 0 || gpu_find(o.gpu) == &card, "%s", o.gpu);
            o.gpu = card.name;
            expect(gpu_find(o.gpu) == &card, "%s", card.name);
        }
        const Rates r = card_rates(&card);
        expect(r.matmuls < 1e12 * card.tflops && r.memory < 1e9 * card.bandwidth &&
                   r.link < 1e9 * card.link, "%s: more than its specifications", card.name);
    }
    const Text long_name = Text(64, '4') + "090";
    expect(strlen(card_key(long_name.c_str()).s) == 31, "a longer name is cut");
    for (const char *name : {"4080s", "3090x", "rtx", long_name.c_str()}) {
        Options o = default_options();
        o.gpu = name;
        expect_death(gpu_find(o.gpu), "unknown GPU");
    }
}

// Library memory is what was measured on Hopper plus a quarter (dev/notes/gpu.md), and an estimate
// on other cards. With --gpu-mem, a run on a card that was not measured reserves 1 GiB.
TEST(libraries, HOST) {
    static const struct {
        const char *card;
        int mib, with_limit;
    } table[] = {{"h100", 672, 672}, {"h200", 672, 672}, {"h20", 672, 672}, {"4060ti", 384, 1024},
                 {"a100", 960, 1024}, {"t4", 384, 1024}, {"b200", 1152, 1024}};
    Program program = {};
    program.gpu = 1;
    program.available = [] { return (uint64_t)1 << 50; };
    for (const auto &row : table) {
        const Text options = text("-e d12 --gpu-mem 15GiB --gpu %s", row.card);
        Options o;
        parse(&o, ("--plan " + options).c_str());
        const Settings s = planned(options);
        machine.card = gpu_find(o.gpu);
        expect(card_library_bytes(machine.card) == (size_t)row.mib << 20, "%s", row.card);
        const size_t device = budget_of_machine(&program, &o, &s).device;
        expect(device == ((size_t)15 << 30) - ((size_t)row.with_limit << 20), "%s", row.card);
        machine.card = nullptr;
    }
    available_limit[0] = 0;
    // Beside its plan a process needs 16 MiB and 20 C^2 bytes, in the memory that its plan is in.
    // Ranks on a machine share the host's memory.
    const Options o = default_options();
    const Settings s = planned("-e l1h64c8192t64");
    const uint64_t outside = (16 << 20) + 20 * 8192 * 8192;
    const uint64_t alone = budget_of_machine(&program, &o, &s).host + outside;
    this_rank.local_ranks = 4;
    expect_near((double)(budget_of_machine(&program, &o, &s).host + outside), (double)alone / 4,
                (double)outside / 4, "four ranks");
    program.gpu = 0;
    expect(budget_of_machine(&program, &o, &s).device == ((uint64_t)1 << 50) - outside);
    // A run has a forecast if its card has one: in 16 bits, on one rank.
    for (const char *options : {"-e d12", "-e d12 --dtype fp32", "-e d12 --gpus 2"}) {
        const Settings run = planned(options);
        machine.card = gpu_table;
        expect((budget_of_machine(&program, &o, &run).from != NULL) == (options[6] == 0), "%s",
               options);
    }
    machine.card = NULL;
}

// The forecast is within 5 % of every step that was measured on a GPU, in ms (dev/notes/gpu.md).
TEST(forecast_measured, HOST) {
    static const struct {
        const char *card, *options;
        double ms;
    } steps[] = {
        {"h100", "-e d12 -b 64", 108.5},  {"h100", "-e d12 -b 64 -r block", 131.1},
        {"h100", "-e d24 -b 32", 148.0},  {"h100", "-e d36 -b 16", 160.3},
        {"h100", "-e d48 -b 16", 313.8},  {"h200", "-e d12 -b 64", 106.5},
        {"h200", "-e d12 -b 128", 209.3}, {"h200", "-e d24 -b 32", 145.8},
        {"h200", "-e d36 -b 32", 313.3},  {"h200", "-e d48 -b 16", 303.8},
        {"h200", "-e d48 -b 32", 599.6},
        {"h100", "-e d48 -b 4 -r norm:14 --offload moments,master", 1518},
        {"h200", "-e d48 -b 4 -r norm:14 --offload moments,master", 1438},
    };
    double worst = 0;
    for (auto &c : steps) {
        const Text options = Text("--gpu ") + c.card + " " + c.options;
        const Settings s = planned(options + (!has(options, "-r ") ? " -r none" : ""));
        const Speed v = card_speed(options, s);
        const double ms = 1e3 * forecast_step(&v, &s, 1);
        expect_near(ms, c.ms, 0.05 * c.ms, "%s %s", c.card, c.options);
        worst = fmax(worst, fabs(c.ms / ms - 1));
    }
    detail = text("within %.1f %%", 100 * worst);
}

// The forecast, in tokens/s at 0.5M tokens per step, matches published throughputs of other
// programs (within the residuals recorded in dev/notes/forecast.md) and throughputs estimated
// kernel by kernel from this program's machine code (within 6 %).
TEST(forecast, HOST) {
    static const struct {
        const char *card, *options;
        double tokens_per_s, within;
    } known[] = {
        {"b200", "-e d12 -b 64", 794e3, 0.03},
        {"a100", "-e d12 -b 64", 213.5e3, 0.05}, {"a100", "-e d24 -b 32", 79.9e3, 0.04},
        {"a100", "-e d36 -b 16", 38.6e3, 0.04},  {"5090", "-e d12 -b 32", 196.5e3, 0.03},
        {"l40s", "-e d12 -b 32", 143e3, 0.1},    {"l4", "-e d12 -b 16", 40e3, 0.1},
        {"a6000", "-e d12 -b 32", 92e3, 0.1},    {"a4000", "-e d12 -b 16", 52e3, 0.1},
        {"4090", "-e d48 -b 8", 14e3, 0.07},     {"5060ti", "-e d48 -b 4", 3.9e3, 0.03},
        // Estimated from the machine code.
        {"a100", "-e d12 -b 64", 220e3, 0.06},  {"a100", "-e d48 -b 8", 21e3, 0.06},
        {"a100", "-e d48 -b 8 -r block", 17.2e3, 0.06},
        {"4090", "-e d12 -b 16", 142e3, 0.06},  {"4090", "-e d48 -b 8", 13.3e3, 0.06},
        {"4090", "-e d48 -b 8 -r block", 11e3, 0.06},
        {"4060ti", "-e d12 -b 16", 40e3, 0.06}, {"4060ti", "-e d48 -b 4", 3.7e3, 0.06},
        {"t4", "-e d12 -b 16", 30.6e3, 0.06},   {"t4", "-e d48 -b 4", 3e3, 0.06},
    };
    for (auto &c : known) {
        const Text options = Text("--gpu ") + c.card + " -d 524288 " + c.options;
        const Settings s = planned(options + (!has(options, "-r ") ? " -r none" : ""));
        Options o;
        parse(&o, ("--plan " + options).c_str());
        const Speed v = card_speed(options, s);
        expect_near(forecast_tokens_per_s(&v, &s, step_micros(&o, &s)), c.tokens_per_s,
                    c.within * c.tokens_per_s, "%s %s", c.card, c.options);
    }
    // A level costs its recomputation.
    const Settings s = planned("-e d12 -r none"), mlp = planned("-e d12 -r mlp");
    const Speed v = default_speed(&s);
    double again = 0;
    for (int stage : {F_LN1, F_LN2, F_FC, F_GELU}) {
        again += v.token[stage] * 12 * 4096;
    }
    expect_near(forecast_step(&v, &mlp, 1) - forecast_step(&v, &s, 1), again, 1e-9, "-r mlp");
}

// -b auto chooses the largest batch that divides the step, fits the card without recomputation, and
// has at most 65,536 tokens. It chooses 4 if no batch fits, -d is not given, or memory is unknown.
TEST(auto_batch, FLOAT) {
    int found = 0;
    auto chosen = [](const Text &options, uint64_t total) {
        Planned run(options);
        settings_auto_batch(&run.s, &run.o, total, 0);
        return run.s.B;
    };
    for (int n = 0; n < 30; n++) {
        const int64_t sequences = draw(1, 720);
        const Text base = text("-e l%dh2c%dt64 -r none -d %d", draw(1, 4), 16 * draw(1, 12),
                               (int)sequences * 64);
        const Settings four = planned(base);
        const uint64_t bytes = plan_bytes(&four) / 100 * (uint64_t)draw(30, 3000);
        const int B = chosen(base, library_reserve_bytes + bytes);
        auto fits = [&](int64_t batch) {
            Settings s = four;
            settings_batch(&s, (int)batch);
            return sequences % batch == 0 && plan_bytes(&s) <= bytes;
        };
        expect(fits(B) || (B == DEFAULT_BATCH && !fits(1)), "%s: %d", base.c_str(), B);
        for (int64_t larger = B + 1; larger <= sequences; larger++) {
            expect(!fits(larger), "%s: %d, and %d fits", base.c_str(), B, (int)larger);
        }
        found += B > DEFAULT_BATCH;
    }
    expect(found > 5, "%d", found);
    expect(chosen("-e d12 -d 524288", 0) == DEFAULT_BATCH, "unknown memory");
    const Text small = "-e l1h1c16t64 -r none -d ";  // 65,536 tokens are 1,024 sequences
    expect(chosen(small + "65536", NO_LIMIT) == 1024 && chosen(small + "65600", NO_LIMIT) == 205 &&
           chosen(small + "131072", NO_LIMIT) == 1024, "a micro-batch of at most 65,536 tokens");
}

// Logit rows on both sides of each limit, and those of a resumed run: the checkpoint's, unless the
// other program wrote it (only the GPU program's has a workspace) or the batch is smaller.
TEST(default_rows, FLOAT) {
    static const struct {
        int V, tokens, gpu, want, rows, workspace;
        const char *typed;
    } table[] = {
        {50257, 4096, 0, 256, 0, 0, ""}, {50257, 255, 0, 255, 0, 0, ""},
        {43648, 4096, 0, 384, 0, 0, ""}, {43649, 4096, 0, 256, 0, 0, ""},
        {257, 50000, 0, 43648, 0, 0, ""}, {257, 2559, 1, 2559, 0, 0, ""},
        {257, 20480, 1, 2560, 0, 0, ""}, {257, 20481, 1, 2688, 0, 0, ""},
        {257, 65536, 1, 8192, 0, 0, ""}, {257, 131072, 1, 8192, 0, 0, ""},
        {50257, 512, 1, 512, 256, 0, ""}, {50257, 512, 0, 256, 512, 1 << 25, ""},
        {50257, 512, 1, 256, 256, 1 << 25, ""}, {50257, 512, 0, 128, 128, 0, ""},
        {50257, 512, 1, 512, 600, 1 << 25, ""}, {50257, 512, 1, 300, 300, 0, " --logit-rows 300"}};
    for (const auto &row : table) {
        const Model m = shape(text("l1h1c16t%d", row.tokens).c_str(), row.V);
        Options o;
        Settings s;
        parse(&o, (Text("--plan -b 1") + row.typed).c_str());
        o.logit_rows = row.rows;
        o.workspace = row.workspace;
        settings_from_options(&s, &o, &m, row.gpu);
        expect(s.logit_rows == row.want, "V %d, %d tokens, %d rows, workspace %d, gpu %d: %d",
               row.V, row.tokens, row.rows, row.workspace, row.gpu, s.logit_rows);
    }
    static const int workspaces[][2] = {{256, 32}, {384, 36}, {512, 64}, {704, 121}, {768, 128}};
    for (const auto &[C, mib] : workspaces) {
        const Model m = shape(text("l1h1c%dt16", C).c_str(), 257);
        expect(default_workspace(&m) >> 20 == mib, "C %d: %" PRId64, C, default_workspace(&m));
    }
}

// NCCL's memory and the exchange rate depend on the link in the card's table row and on
// NCCL_MAX_CTAS; the plan reserves that memory. The forecast names its source.
TEST(nccl_blocks, FLOAT) {
    static const struct {
        const char *options, *limit;
        size_t mib;
        double rate;
        const char *from;
    } table[] = {{"--gpu h100 --gpus 8", "", 2 * 16 * 12 + 64, 16 * 10.3e9, "this card, not"},
                 {"--gpu h100 --gpus 9", "", 3 * 16 * 12 + 64, 16 * 10.3e9, "in one machine"},
                 {"--gpu a100 --gpus 2", "", 2 * 16 * 12 + 64, 16 * 10.3e9, "this card, not"},
                 {"--gpu h100 --gpus 512", "4", 3 * 4 * 12 + 64, 4 * 10.3e9, "in one machine"},
                 {"--gpu h200 --gpus 8", "64", 2 * 64 * 12 + 64, 370e9, "this card, not"},
                 {"--gpu 4090 --gpus 8", "", 2 * 2 * 12 + 64, 0.79 * 31.5e9, "this card, not"},
                 {"--gpu 4090 --gpus 3", "8", 2 * 8 * 12 + 64, 0.79 * 31.5e9, "this card, not"},
                 {"--gpu-mem 24GiB --gpus 2", "", 2 * 2 * 12 + 64, 0.79 * 31.5e9, ""},
                 {"--gpu h100", "", 0, 0, "on an H100 and an H200"},
                 {"--gpu h20", "", 0, 0, "this card, not"},
                 {"--gpu h200 --dtype fp32", "", 0, 0, ""}};
    for (const auto &row : table) {
        row.limit[0] ? setenv("NCCL_MAX_CTAS", row.limit, 1) : unsetenv("NCCL_MAX_CTAS");
        const Settings s = planned(Text("-e d12 ") + row.options);
        Options o;
        parse(&o, (Text("--plan -e d12 ") + row.options).c_str());
        const MemoryBudget budget = budget_of_gpu(&o, &s);
        expect(nccl_bytes(&s, budget.ctas) == row.mib << 20, "%s: %zu", row.options,
               nccl_bytes(&s, budget.ctas));
        expect(budget.device == gpu_memory_from_options(&o) - card_library_bytes(gpu_find(o.gpu)) -
                                    (row.mib << 20), "%s: %zu", row.options, budget.device);
        expect_near(budget.speed.peer_byte * row.rate, row.rate > 0, 1e-6, "%s: s per byte",
                    row.options);
        expect(row.from[0] ? budget.from && has(budget.from, row.from) : !budget.from, "%s: %s",
               row.options, budget.from);
    }
    unsetenv("NCCL_MAX_CTAS");
}

// N ranks process between one and N times the tokens/s of one rank. An exchange once per step
// overlaps only with the last micro-step's computation; one in every micro-step overlaps with that
// micro-step's. Traffic that does not overlap takes its bytes divided by the link's rate.
TEST(forecast_ranks, HOST) {
    for (const char *card : {"4090", "t4", "h100"}) {
        const Text options = text("--gpu %s -e d12 -b 1 -r none --gpus ", card);
        const Settings one = planned(options + "1");
        const Speed v = card_speed(options + "1", one);
        for (int ranks : {1, 2, 4, 8}) {
            const Settings s = planned(options + text("%d", ranks));
            for (int micros : {1, 64}) {
                const double alone = forecast_tokens_per_s(&v, &one, micros);
                const double all = forecast_tokens_per_s(&v, &s, micros);
                expect(all >= alone && all <= ranks * alone * (1 + 1e-12), "%s x %d, %d: %g, %g",
                       card, ranks, micros, all, alone);
                expect(all < 0.99 * ranks * alone || !strcmp(card, "h100") || ranks < 8 ||
                           micros > 1,
                       "%s: PCIe is slower than so small a batch", card);
            }
            expect_near(forecast_step(&v, &s, 64) - forecast_step(&v, &one, 64),
                        forecast_step(&v, &s, 1) - forecast_step(&v, &one, 1), 1e-9, "%s x %d",
                        card, ranks);
        }
        for (int zero : {1, 2, 3}) {
            const Settings s = planned(options + text("8 -z %d", zero));
            // Part of an exchange overlaps with computation.
            for (const double peer_byte : {1e-6, 1e-9, 1e-12, 1e-15}) {
                Speed some = v, free = v;
                some.peer_byte = peer_byte;
                free.peer_byte = 0;
                for (int micros : {1, 2, 5}) {
                    const Traffic t = step_traffic(&s, micros);
                    const double all = peer_byte * (t.reduced + t.gathered);
                    const double none = forecast_step(&free, &s, micros);
                    const double step = forecast_step(&some, &s, micros) * (1 - 1e-9);
                    expect(step >= fmax(none, all) * (1 - 2e-9) && step <= none + all,
                           "%s -z %d: %g, not from %g, %g", card, zero, step, none, all);
                }
            }
        }
        // Residuals and exchanges take turns on PCIe, but not if there is NVLink.
        const Settings s = planned(options + "8 -z 3 --offload residuals");
        Speed both = {}, copies = {}, exchanges = {};
        both.shared_link = v.shared_link;
        both.link_byte = copies.link_byte = 3e-8;
        both.peer_byte = exchanges.peer_byte = 1e-9;
        const double sum = forecast_step(&copies, &s, 2) + forecast_step(&exchanges, &s, 2);
        const double step = forecast_step(&both, &s, 2);
        expect(strcmp(card, "h100") ? step > 0.9 * sum : step < 0.8 * sum, "%s: %g of %g", card,
               step, sum);
    }
}

// Every term of the forecast: with one rate of 1 and all others 0, nothing overlaps, and a step's
// time is its count of that rate's unit. Sizes follow from the shape: P parameters, V in vectors
// and M in matrices of blocks. Each rank has S elements of a sharded state.
TEST(forecast_terms, HOST) {
    const double C = 768, L = 12, V = L * 13 * C + 2 * C, M = L * 12 * C * C;
    const double P = 50304 * C + 1024 * C + M + V, G = 2 * (P - V) + 4 * V;
    const double S = V + (P - V) / 4, muon = 6 * 2 * M;  // six passes over u in bf16
    const struct {
        const char *options;
        double update, host;  // bytes of an update: on the device, over the link to host memory
        double squares;       // Muon's work per block on the busiest rank, in C x C matrices
    } table[] = {
        {"", 2 * (2 * P + G + 10 * P), 0, 0},
        {"-w none --moments bf16", 2 * (2 * P + G + 4 * P), 0, 0},
        {"--grad-dtype fp32", 2 * (2 * P + 4 * P + 10 * P), 0, 0},
        {"--offload moments,master", 2 * (2 * P + G), 10 * P, 0},
        {"--offload moments", 2 * (2 * P + G + 2 * P), 8 * P, 0},
        {"--gpus 4", 2 * (2 * P + G + 10 * P), 0, 0},
        {"--gpus 4 -z 1", 2 * (2 * P + G + 10 * S), 0, 0},
        {"--gpus 4 -z 1 --offload moments", 2 * (2 * P + G + 2 * S), 8 * S, 0},
        {"--optimizer muon", 2 * (2 * P + G + 10 * P - 4 * M) + muon, 0, 4 + 2 * 3},
        {"--optimizer muon --gpus 8", 2 * (2 * P + G + 10 * P - 4 * M) + muon, 0, 3},
    };
    for (const auto &row : table) {
        const Settings s = planned(Text("-e d12 -b 4 -t 512 -r none --logit-rows 700 ") +
                                   row.options);
        const Traffic one = step_traffic(&s, 1), two = step_traffic(&s, 2);
        const Speed still = {};
        auto takes = [&](double Speed::*rate, double want, int micros) {
            Speed v = still;
            v.*rate = 1;
            expect_near(forecast_step(&v, &s, micros) - forecast_step(&still, &s, micros), want,
                        1e-9 * want, "%s, %d micro-steps: rate %d", row.options, micros,
                        (int)(&(v.*rate) - v.token));
        };
        for (int micros : {1, 5}) {
            takes(&Speed::step, 1, micros);
            takes(&Speed::block, micros * L, micros);
            takes(&Speed::chunk, micros * 3, micros);
            takes(&Speed::byte, row.update, micros);
            takes(&Speed::host_byte, row.host, micros);
            Speed v = still;
            for (int i = 0; i < JOIN; i++) {  // five rounds of 6 C C C multiply-adds
                const double products = i == F_QKV ? row.squares * L * 5 * 6 * C * C * C : 0;
                const int times = i >= BLOCK_STAGES ? 1 : stage_table[i].op == OP_FP8 ? 0 : L;
                v.token[i] = 1;
                expect_near(forecast_step(&v, &s, micros), micros * times * 4 * 512 + products /
                            (6 * C * C), 1e-3, "%s, stage %d", row.options, i);
                v.token[i] = 0;
            }
            takes(&Speed::peer_byte, one.reduced + one.gathered + one.muon + (micros - 1) *
                  (two.reduced + two.gathered - one.reduced - one.gathered), micros);
        }
    }
    // Bytes of a block's kernels besides matmuls and attention. Per token: LayerNorm 2 C numbers,
    // backward 4 C, twice; GELU 8 C, backward 12 C; residuals, added in matmuls, 1 C, twice. Per
    // micro-step: weights of 2 bytes and their gradients, twice each.
    for (const auto &[options, gradient] : {std::pair("", 2), std::pair("--grad-dtype fp32", 4),
                                            std::pair("--dtype fp16", 4)}) {
        const Settings s = planned(Text("-e d12 ") + options);
        const Speed v = speed_predict({HUGE_VAL, HUGE_VAL, HUGE_VAL, 1, 1, 1}, &s);
        double token = 0;
        for (int i = 0; i < BLOCK_STAGES; i++) {
            token += stage_seconds(&v, 0, i);
        }
        expect_near(token, 34 * C * 2, 1e-6, "%s: per token", options);
        expect_near(v.block, 12 * C * C * 2 * (2 + gradient), 1e-3, "%s: per block", options);
        expect_near(v.chunk, 50304 * C * 2 * (2 + gradient), 1e-3, "%s: per chunk", options);
    }
}
