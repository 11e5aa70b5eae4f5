// optimizer.h -- tests of chapter Optimizer and schedules, against values computed by hand.

// Two updates computed by hand, for a number of elements that is not a multiple of the vector
// length.
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
        // Nine digits by hand; 1 - beta2 in fp32 may be off by 6e-8 / 0.01 of itself.
        for (size_t i = 0; i < 9; i++) {
            expect_near(p[i], (wide)want[t][0], 5e-9 + 8 * unit, "p after %d", t + 1);
            expect_near(m[i], (wide)want[t][1], 1e-9 + 4 * unit, "m after %d", t + 1);
            expect_near(v[i], (wide)want[t][2], want[t][2] * 200 * unit, "v after %d", t + 1);
        }
    }
    // g = 1e-6: corrected 1e-6 and 1e-12; the root is 100 times eps, which is not under it.
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

// The limit of --skip-zscore: none before 128 norms, then mean + z x standard deviation.
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

// The update decays matrices only, clips by the norm of all gradients, and changes nothing if that
// norm is not finite or above the limit.
TEST(update, ALL) {
    Model m = shape("l2h2c16t8", 257);
    Net n(m, 1, 4);
    real *g = buffer(&n.plan, BUF_GRADS);
    const Reals start = n.state(STATE_WEIGHTS);
    Options o = default_options();
    o.weight_decay = 0.5;
    int skipped = -1;
    memset(g, 0, (size_t)n.size() * sizeof(real));
    expect(network_update(&n.plan, &o, 0.1, HUGE_VAL, 0, &skipped) == 0 && skipped == 0);
    Reals w = n.state(STATE_WEIGHTS);
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
        expect(skipped == 1 && same_bits(w, n.state(STATE_WEIGHTS)), "norm %g, limit 5", value);
    }
    Reals zero = n.state(STATE_M);
    expect(std::count(zero.begin(), zero.end(), (real)0) == n.size(),
           "moments after skipped steps");
    g[tensor_offset(&m, LNFB, 0)] = 0;
    const size_t at = (size_t)tensor_offset(&m, WTE, 0);
    g[at] = 3;
    g[at + 1] = -4;  // norm 5, clip 1: m = 0.1 x 3 / 5 and -0.1 x 4 / 5
    expect(network_update(&n.plan, &o, 0.1, HUGE_VAL, 0, &skipped) == 5 && !skipped);
    Reals moments = n.state(STATE_M);
    expect_near(moments[at], (wide)0.06, 0.06 * 8 * unit + 1e-17, "m, clipped");
    expect_near(moments[at + 1], (wide)-0.08, 0.08 * 8 * unit + 1e-17, "m, clipped");
    g[at] = g[at + 1] = 0;
    g[at + 2] = (real)0.5;  // norm 0.5, clip 1: not clipped
    network_update(&n.plan, &o, 0.1, HUGE_VAL, 1, &skipped);
    expect_near(n.state(STATE_M)[at + 2], (wide)0.05, 0.05 * 8 * unit + 1e-17, "m, not clipped");
}

// The norm of all gradients: buckets of less and of more than a chunk of 65,536 numbers.
TEST(norm, ALL) {
    Model m = shape("l2h1c36t80", 3000);
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

// Learning rates at points with simple values.
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
                 {"constant", 109, 1},  {"wsd", 90, 1},       {"wsd", 50, 1},
                 {"wsd", 95, 0.55},     {"wsd", 110, 0.1},    {"wsd", 91, 0.798753882025},
                 {"wsd", 5, 0.6}};
    Options o = default_options();
    o.lr = 1;
    o.final_lr = 0.1;
    o.warmup = 10;
    for (auto &k : known) {  // 0.868.. = 0.1 + 0.45 (1 + sqrt(1/2)), 0.798.. = 1 - 0.9 sqrt(0.05)
        o.schedule = choice_find(schedules, k.schedule, strlen(k.schedule));
        expect_near((wide)learning_rate(&o, k.step, 110), (wide)k.rate, 1e-11, "%s step %d",
                    k.schedule, k.step);
    }
}

// Splitting the master weights loses nothing.
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
