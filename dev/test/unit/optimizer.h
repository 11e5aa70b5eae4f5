// optimizer.h -- tests of train_gpt2.c's optimizers and schedules, against values computed by hand.

// Two updates match values computed by hand, for a number of elements that fills no vector.
TEST(adamw, ALL) {
    // lr 0.1, beta 0.9 and 0.99, eps 1e-8, decay 0.1, p = 1.
    // g = 0.5: m = 0.05, v = 0.0025; corrected 0.5, 0.25; p = 1 - 0.1 (0.5 / 0.5 + 0.1) = 0.89.
    // g = -0.25: m = 0.045 - 0.025 = 0.02, v = 0.002475 + 0.000625 = 0.0031; corrected by 0.19 and
    // 0.0199: 0.105263158 and 0.155778894, root 0.394688351, ratio 0.266699431;
    // p = 0.89 - 0.1 (0.266699431 + 0.089) = 0.8544300569.
    static const double g[] = {0.5, -0.25},
                        want[][3] = {{0.89, 0.05, 0.0025}, {0.8544300569, 0.02, 0.0031}};
    Reals p(9, 1), m(9), v(9), grad(9);
    for (int t = 0; t < 2; t++) {
        AdamW a = {
            (real)0.1,  (real)0.9, (real)0.99, (real)(t ? 0.19 : 0.1), (real)(t ? 0.0199 : 0.01),
            (real)1e-8, (real)0.1, (real)0.5};
        grad.assign(9, (real)(g[t] / 0.5));  // grad_scale 0.5 restores it
        adamw_update(p.data(), m.data(), v.data(), grad.data(), &a, a.weight_decay, 9);
        // By hand to nine digits; 1 - beta2 in fp32 may have a relative error of 6e-8 / 0.01.
        for (size_t i = 0; i < 9; i++) {
            expect_near(p[i], (wide)want[t][0], 5e-9 + 8 * unit, "p after %d", t + 1);
            expect_near(m[i], (wide)want[t][1], 1e-9 + 4 * unit, "m after %d", t + 1);
            expect_near(v[i], (wide)want[t][2], want[t][2] * 200 * unit, "v after %d", t + 1);
        }
    }
    // g = 1e-6: corrected 1e-6 and 1e-12; the root is 100 times eps, which is added outside it.
    Options o = default_options();
    o.beta1 = 0.9;
    o.beta2 = 0.99;
    for (int t = 0; t < 2; t++) {
        const AdamW a = adamw_at(&o, 0.1, t, 1);
        expect_near(a.correction1, t ? 0.19 : 0.1, 4 * unit, "1 - beta1^%d", t + 1);
        expect_near(a.correction2, t ? 0.0199 : 0.01, 4 * unit, "1 - beta2^%d", t + 1);
    }
    const AdamW a = adamw_at(&o, 0.1, 0, 1);
    Reals one(1, 1), m1(1), v1(1), small(1, (real)1e-6);
    adamw_update(one.data(), m1.data(), v1.data(), small.data(), &a, 0, 1);
    expect_near(one[0], 1 - 0.1 / 1.01, 1e-6, "p after a small gradient");
}

// --skip-zscore sets no limit before 128 norms, then mean + z x standard deviation.
TEST(norm_limit, HOST) {
    NormWindow w;
    for (int i = 0; i < NORM_WINDOW; i++) {
        w.values[i] = i % 2 ? 1 : 5;
    }
    w.count = NORM_WINDOW - 1;
    expect(norm_limit(&w, 3) == HUGE_VAL);
    w.count = NORM_WINDOW;
    expect(norm_limit(&w, 3) == 9 && norm_limit(&w, 0) == HUGE_VAL, "%g", norm_limit(&w, 3));
}

// Executes an update on the CPU and returns the gradient norm.
static double network_update(Plan *p, const Options *o, double lr, double limit, int64_t updates,
                             int *skipped) {
    Update u = {.plan = p, .options = o, .lr = lr, .limit = limit, .updates = updates};
    instr_update(p);
    instr_execute(p, update_execute, &u);
    *skipped = u.skipped;
    return u.norm;
}

// Decays only matrices, clips by the norm, and skips if that is not finite or above the limit.
TEST(update, ALL) {
    Model m = shape("l2h2c16t8", 257);
    Net n(m, 1, 4);
    real *g = buffer(&n.plan, BUF_GRADS);
    const Reals start = n.state(BUF_WEIGHTS);
    Options o = default_options();
    o.weight_decay = 0.5;
    int skipped = -1;
    memset(g, 0, (size_t)n.size() * sizeof(real));
    expect(network_update(&n.plan, &o, 0.1, HUGE_VAL, 0, &skipped) == 0 && skipped == 0);
    Reals w = n.state(BUF_WEIGHTS);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int64_t i = 0; i < tensor_size(&m, tensor); i++) {  // 1 - 0.1 x 0.5 = 0.95
            size_t k = (size_t)(tensor_offset(&m, tensor, tensor_copies(&m, tensor) - 1) + i);
            double keep = tensor == WTE || tensor == WPE || tensor == QKVW || tensor == ATTPROJW ||
                                  tensor == FCW || tensor == FCPROJW
                              ? 0.95
                              : 1;
            expect_near(w[k], start[k] * (wide)keep,
                        keep < 1 ? 4 * unit * fabs((double)start[k]) : 0, "decay of %s",
                        tensor_table[tensor].name);
        }
    }
    static const double bad[] = {NAN, HUGE_VAL, -HUGE_VAL, 6};
    for (double value : bad) {
        g[tensor_offset(&m, LNFB, 0)] = (real)value;
        network_update(&n.plan, &o, 0.1, 5, 0, &skipped);
        expect(skipped == 1 && same_bits(w, n.state(BUF_WEIGHTS)), "norm %g, limit 5", value);
    }
    Reals zero = n.state(BUF_M);
    expect(std::count(zero.begin(), zero.end(), (real)0) == n.size(),
           "moments after skipped steps");
    g[tensor_offset(&m, LNFB, 0)] = 0;
    const size_t at = (size_t)tensor_offset(&m, WTE, 0);
    g[at] = 3;
    g[at + 1] = -4;  // norm 5, clip 1: m = 0.1 x 3 / 5 and -0.1 x 4 / 5
    expect(network_update(&n.plan, &o, 0.1, HUGE_VAL, 0, &skipped) == 5 && !skipped);
    Reals moments = n.state(BUF_M);
    expect_near(moments[at], (wide)0.06, 0.06 * 8 * unit + 1e-17, "m, clipped");
    expect_near(moments[at + 1], (wide)-0.08, 0.08 * 8 * unit + 1e-17, "m, clipped");
    g[at] = g[at + 1] = 0;
    g[at + 2] = (real)0.5;  // norm 0.5, clip 1: not clipped
    network_update(&n.plan, &o, 0.1, HUGE_VAL, 1, &skipped);
    expect_near(n.state(BUF_M)[at + 2], (wide)0.05, 0.05 * 8 * unit + 1e-17, "m, not clipped");
}

// Muon's definition in double: divides x (rows,cols) by its norm, transposes it if rows > cols, and
// then computes X <- a X + (b S + c S S) X with S = X X^T five times.
using Doubles = std::vector<double>;
static Doubles muon_reference(Doubles x, int rows, int cols) {
    const int n = std::min(rows, cols), k = std::max(rows, cols);
    auto at = [&](Doubles &of, int i, int j) -> double & {
        return of[(size_t)(rows > cols ? j * n + i : i * k + j)];
    };
    double squares = 0;
    for (double value : x) {
        squares += value * value;
    }
    for (double &value : x) {
        value /= std::max(sqrt(squares), 1e-7);
    }
    for (int round = 0; round < 5; round++) {
        Doubles s((size_t)(n * n)), f(s), next(x);
        for (int i = 0; i < n * n; i++) {
            for (int j = 0; j < k; j++) {
                s[(size_t)i] += at(x, i / n, j) * at(x, i % n, j);
            }
        }
        for (int i = 0; i < n * n; i++) {
            for (int j = 0; j < n; j++) {
                f[(size_t)i] += 2.0315 * s[(size_t)(i / n * n + j)] * s[(size_t)(j * n + i % n)];
            }
            f[(size_t)i] += -4.7750 * s[(size_t)i] + (i % (n + 1) ? 0 : 3.4445);
        }
        for (int i = 0; i < n * k; i++) {
            at(next, i / k, i % k) = 0;
            for (int j = 0; j < n; j++) {
                at(next, i / k, i % k) += f[(size_t)(i / k * n + j)] * at(x, j, i % k);
            }
        }
        x = next;
    }
    return x;
}

// Returns the distance between two arrays relative to the norm of the second.
template <class A> static double away(const A *got, const Doubles &want) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < want.size(); i++) {
        difference += pow((double)got[i] - want[i], 2);
        norm += want[i] * want[i];
    }
    return sqrt(difference / (norm + 1e-300));
}

// Tall, wide and square matrices. With rank 3 (scale 0), each iteration amplifies rounding errors
// in the other directions by 3.4; some have huge or tiny numbers (the norm is clamped to 1e-7).
TEST(muon_orthogonalize, ALL) {
    give_workspace();
    static const int shapes[][2] = {{12, 12}, {48, 12}, {12, 48}, {32, 128}};
    for (auto &[rows, cols] : shapes) {
        for (double scale : {0.0, 1e-12, 1.0, 1e12}) {
            Reals x = noise((size_t)(rows * cols), scale ? scale : 1, 4);
            for (int i = 3 * cols; i < rows * cols && scale == 0; i++) {
                x[(size_t)i] = x[(size_t)(i % (3 * cols))];
            }
            Reals work(x.size() + 2 * (size_t)(std::min(rows, cols) * std::min(rows, cols)));
            const Doubles want = muon_reference(Doubles(x.begin(), x.end()), rows, cols);
            const real *got = muon_orthogonalize(x.data(), work.data(), rows, cols);
            expect_near((wide)away(got, want), 0, scale == 0 ? 1e-4 : 1e-5, "%dx%d, scale %g", rows,
                        cols, scale);
        }
    }
}

// Two updates of a network follow Muon's definition for each of the six matrices of a block; other
// tensors are bitwise equal to AdamW's.
TEST(muon_update, ALL) {
    Model m = shape("l2h2c16t8", 257);
    Net muon(m, "-b 1 -t 8 --optimizer muon", 0), adamw(m, "-b 1 -t 8", 0);
    Options o = default_options();
    o.weight_decay = 0.5;
    o.momentum = 0.9;
    o.clip = 1;
    auto second = [](Net &n) { return n.plan.buffers[n.plan.index[BUF_V]].bytes; };
    expect(second(adamw) - second(muon) == 2 * 12 * 16 * 16 * sizeof(real), "blocks have no v");
    const Reals start = muon.state(BUF_WEIGHTS);
    Doubles w(start.begin(), start.end()), moment(w.size());
    for (int step = 0; step < 2; step++) {
        const Reals g = noise(w.size(), 0.1, (uint64_t)step);
        int skipped;
        double scale = 0;
        for (Net *n : {&muon, &adamw}) {
            memcpy(buffer(&n->plan, BUF_GRADS), g.data(), g.size() * sizeof(real));
            scale = 1 / network_update(&n->plan, &o, 0.02, HUGE_VAL, step, &skipped);
        }
        for (int tensor : {QKVW, ATTPROJW, FCW, FCPROJW}) {
            const int cols = (int)tensor_cols(&m, tensor), all = (int)tensor_rows(&m, tensor);
            const int rows = tensor == QKVW ? all / 3 : all;
            for (int i = 0; i < m.L * all; i += rows) {
                const size_t size = (size_t)(rows * cols);
                const size_t at =
                    (size_t)tensor_offset(&m, tensor, i / all) + i % all * (size_t)cols;
                Doubles u(size);
                for (size_t k = 0; k < size; k++) {
                    const double gradient = scale * (double)g[at + k];
                    moment[at + k] = 0.9 * moment[at + k] + 0.1 * gradient;
                    u[k] = 0.1 * gradient + 0.9 * moment[at + k];
                }
                const Doubles x = muon_reference(u, rows, cols);
                for (size_t k = 0; k < size; k++) {
                    w[at + k] -= 0.02 * 0.5 * w[at + k] +
                                 0.02 * 0.2 * sqrt(std::max(rows, cols)) * x[k];
                }
            }
        }
    }
    Reals got = muon.state(BUF_WEIGHTS), other = adamw.state(BUF_WEIGHTS);
    Reals m1 = muon.state(BUF_M), m2 = adamw.state(BUF_M);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        const bool is_muon =
            tensor == QKVW || tensor == ATTPROJW || tensor == FCW || tensor == FCPROJW;
        for (int copy = 0; copy < tensor_copies(&m, tensor); copy++) {
            const size_t at = (size_t)tensor_offset(&m, tensor, copy);
            const size_t n = (size_t)tensor_size(&m, tensor);
            if (is_muon) {
                const Doubles want(w.begin() + (long)at, w.begin() + (long)(at + n));
                const Doubles want_m(moment.begin() + (long)at, moment.begin() + (long)(at + n));
                expect_near((wide)away(&got[at], want), 0, 1e-5, "weights of %s",
                            tensor_table[tensor].name);
                expect_near((wide)away(&m1[at], want_m), 0, 1e-5, "m of %s",
                            tensor_table[tensor].name);
            } else {
                expect(memcmp(&got[at], &other[at], n * sizeof(real)) == 0 &&
                           memcmp(&m1[at], &m2[at], n * sizeof(real)) == 0,
                       "%s has AdamW's bits", tensor_table[tensor].name);
            }
        }
    }
}

// Buckets smaller and larger than a chunk of 65,536 numbers, one not a multiple of a vector.
TEST(norm, ALL) {
    Model m = shape("l2h1c36t77", 3000);
    Net n(m, 1, 4);
    const Reals x = noise((size_t)n.size(), 1, 1);
    wide squares = 0;
    memcpy(buffer(&n.plan, BUF_GRADS), x.data(), x.size() * sizeof(real));
    for (const real value : n.gradients()) {
        squares += (wide)value * value;
    }
    expect(bucket_at(&m, 1, BUCKET_WTE).count > 65536 &&
           bucket_at(&m, 1, BUCKET_WPE).count < 65536);
    expect_near((wide)gradient_norm(&n.plan), (wide)sqrt((double)squares),
                sqrt((double)squares) * 4 * sqrt((double)n.size()) * 0x1p-53, "norm of %d numbers",
                (int)n.size());
}

// By default, a new run of a preset uses GPT-3's learning rate or Muon's, a warm-up of 1 % of the
// steps and weight decay 0.1. Resumed runs and other models keep their options.
TEST(preset_options, HOST) {
    static const struct {
        const char *options;
        int step;
        double lr;
        int warmup;
        double decay;
    } rows[] = {{"-e d12", -1, 6e-4, 5, 0.1},          {"-e gpt2-medium", -1, 3e-4, 5, 0.1},
                {"-e d12 --optimizer muon", -1, 4e-3, 5, 0.1},
                {"-e d36", -1, 2.5e-4, 5, 0.1},        {"-e gpt2-xl", -1, 2e-4, 5, 0.1},
                {"-e d12 -l 3e-4 -c 0", -1, 3e-4, 5, 0}, {"-e d12 -u 0", -1, 6e-4, 0, 0.1},
                {"-e d12", 3, 3e-4, 0, 0},             {"-e l12h12c768t1024", -1, 3e-4, 0, 0}};
    for (auto &row : rows) {
        Run run;
        memset(&run, 0, sizeof run);
        Options o;
        parse(&o, (Text("-x 500 ") + row.options).c_str());
        run.o = &o;
        run.s.B = run.s.T = run.s.ranks = 1;
        run.train.windows = 1000;
        run.resume.step = row.step;
        options_preset(&o, &run, "d24");
        snprintf(run.model, sizeof run.model, "%s", o.model);
        run_size(&run);
        expect(fabs(o.lr - row.lr) < 1e-12 && run.warmup == row.warmup &&
                   fabs(o.weight_decay - row.decay) < 1e-12,
               "%s: %g %d %g", row.options, o.lr, (int)run.warmup, o.weight_decay);
    }
}

// Learning rates at steps where they are easy to compute by hand.
TEST(schedules, HOST) {
    // Peak 1, last 0.1, 10 steps of warmup, 110 steps: t = (step - 10) / 100.
    static const struct {
        const char *schedule;
        int step;
        double rate;
    } known[] = {{"cosine", 0, 0.1},    {"cosine", 4, 0.5},   {"cosine", 9, 1},
                 {"cosine", 10, 1},     {"cosine", 60, 0.55}, {"cosine", 35, 0.868198051534},
                 {"cosine", 110, 0.1},  {"linear", 10, 1},    {"linear", 35, 0.775},
                 {"linear", 85, 0.325}, {"linear", 110, 0.1}, {"constant", 0, 0.1},
                 {"constant", 109, 1},  {"wsd", 80, 1},       {"wsd", 50, 1},
                 {"wsd", 88, 1},        {"wsd", 110, 0.1},    {"wsd", 99, 0.363603896932},
                 {"wsd", 5, 0.6}};
    Options o = default_options();
    o.lr = 1;
    o.final_lr = 0.1;
    o.warmup = 10;
    for (auto &k : known) {  // 0.868.. = 0.1 + 0.45 (1 + sqrt(1/2)), 0.363.. = 1 - 0.9 sqrt(1/2)
        o.schedule = choice_find(schedules, k.schedule, strlen(k.schedule));
        expect_near((wide)learning_rate(&o, o.warmup, k.step, 110), (wide)k.rate, 1e-11,
                    "%s step %d", k.schedule, k.step);
    }
}

// Splitting the master weights into two halves is lossless.
TEST(master_bits, HOST) {
    for (uint64_t i = 0; i < 2000000; i++) {
        const uint32_t edges[] = {0, 0x7f80, 0xff80, 0x8000,
                                  0x7f7f, 0xff7f, 0x0080, 0x7fff, 0xffff};
        uint32_t u = (uint32_t)(rng_uniform(4, 9, 4, i) * 0x1p32), back, high;
        u = i < 9 * 65536 ? edges[i / 65536] << 16 | (uint32_t)(i % 65536) : u;
        float value;
        memcpy(&value, &u, 4);
        high = (uint32_t)master_high(value) << 16;
        memcpy(&value, &high, 4);
        value = master_join(value, (uint16_t)u);
        memcpy(&back, &value, 4);
        const bool is_nan = (u & 0x7fffffff) > 0x7f800000;
        expect(is_nan ? (high & 0x7fffffff) > 0x7f800000 && value != value : back == u,
               "%08x became %08x, in bf16 %08x", u, back, high);
    }
}
