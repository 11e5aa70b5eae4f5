// network.h -- tests of the network on the CPU.
// Covers the chapter "The network" of train_gpt2.c and the CPU engine: results must be bitwise
// equal for all recompute levels and thread counts, and equal up to rounding for all batch sizes.

struct Trace {
    std::vector<double> losses;
    Reals gradients, weights;
    bool operator==(const Trace &other) const {
        return losses == other.losses && same_bits(gradients, other.gradients) &&
               same_bits(weights, other.weights);
    }
};

// Runs two steps of `accum_steps` micro-batches: all losses, the first gradients, the last weights.
static Trace trace(Net *n, int accum_steps) {
    const int N = n->s.B * n->s.T;
    Trace result;
    Options o = default_options();
    o.weight_decay = 0.1;
    for (int step = 0; step < 2; step++) {
        Batch b(N * accum_steps, n->s.model.V, (uint64_t)(5 + step));
        for (int k = 0; k < accum_steps; k++) {
            n->e.micro_step(&n->e, &b.inputs[(size_t)(k * N)], &b.targets[(size_t)(k * N)], k,
                            accum_steps);
        }
        if (step == 0) {
            result.gradients = n->gradients();
        }
        StepResult r = n->e.update(&n->e, &o, 1e-2, HUGE_VAL, step);
        expect(isfinite(r.norm) && r.norm > 0 && !r.skipped, "step %d: norm %g", step, r.norm);
        result.losses.push_back(r.loss);
    }
    result.weights = n->state(BUF_WEIGHTS);
    return result;
}

static const struct {
    const char *e;
    int V, B, T, logit_rows;
} network_shapes[] = {{"l2h3c48t8", 257, 2, 7, 0},
                      {"l3h5c80t33", 300, 1, 33, 10},
                      {"l1h1c64t65", 129, 2, 65, 13},
                      {"l2h2c6t1", 2, 3, 1, 0}};

// Every recompute level in all blocks, and block:K for every K, gives the same bits as `none`.
TEST(recompute_bits, ALL) {
    int runs = 0;
    for (auto &shape_row : network_shapes) {
        Model m = shape(shape_row.e, shape_row.V);
        auto run = [&](int level, int blocks) {
            Net n(m, shape_row.B, shape_row.T, level, blocks, shape_row.logit_rows);
            runs++;
            return trace(&n, 2);
        };
        Trace reference = run(RECOMPUTE_NONE, m.L);
        expect(isfinite(reference.losses[0]) && reference.losses[0] != reference.losses[1]);
        for (int level = RECOMPUTE_GELU; level < RECOMPUTE_LEVELS; level++) {
            for (int blocks = level == RECOMPUTE_BLOCK ? 0 : m.L; blocks <= m.L; blocks++) {
                expect(run(level, blocks) == reference, "%s, -r %s in %d", shape_row.e,
                       level_name(level).s, blocks);
            }
        }
    }
    detail = text("%d runs", runs);
}

// Returns the results of everything a run does between micro-steps: sampling, validation, reading
// states as for a checkpoint, a skipped step, and writing weights as when resuming.
static Reals busy_trace(Net *n, int accum_steps) {
    const int N = n->s.B * n->s.T, V = n->s.model.V;
    Reals all, logits((size_t)V);
    Options o = default_options();
    o.weight_decay = 0.1;
    auto add = [&](const Reals &x) { all.insert(all.end(), x.begin(), x.end()); };
    if (n->s.dtype == TYPE_FP16) {
        n->e.scale_loss(&n->e, 8, 0);  // a larger scale overflows with few rows
    }
    for (int step = 0; step < 4; step++) {
        Batch b(N * accum_steps, V, (uint64_t)(5 + step));
        for (int k = 0; k < accum_steps; k++) {
            const Token *inputs = &b.inputs[(size_t)(k * N)];
            const Token *targets = &b.targets[(size_t)(k * N)];
            if ((step + k) % 2) {
                add({(real)n->e.forward_loss(&n->e, NULL, inputs, targets)});
                n->e.logits(&n->e, logits.data(), inputs, 0, min_int(3, n->s.T));
                add(logits);
            }
            n->e.micro_step(&n->e, inputs, targets, k, accum_steps);
        }
        add(n->gradients());
        const double limit = step == 1 ? 0 : HUGE_VAL;
        StepResult r = n->e.update(&n->e, &o, 1e-2, limit, step);
        expect(r.skipped == (step == 1) && isfinite(r.norm) && r.norm > 0, "step %d", step);
        add({(real)r.loss, (real)r.norm});
        for (int state : {BUF_WEIGHTS, BUF_M, BUF_V}) {
            add(n->state(state));
        }
        if (step == 2) {
            Reals half = n->state(BUF_WEIGHTS);
            n->e.forward_loss(&n->e, NULL, b.inputs.data(), b.targets.data());
            for (real &x : half) {
                x *= (real)0.5;
            }
            n->set_state(BUF_WEIGHTS, half);
        }
    }
    return all;
}

// Offloading any single state, or all of them, changes no bit. The networks have one block, as many
// blocks as slots, one more, and more than are prefetched. Sanitizers run a quarter of the cases.
TEST(offload_bits, ALL) {
    int runs = 0, turn = 0;
    for (const char *e : {"l1h1c16t8", "l2h2c16t8", "l3h1c24t9", "l6h2c20t7"}) {
        Model m = shape(e, 257);
        for (int level : {0, 1}) {
            for (int accum_steps : {1, 3}) {
                if (TEST_ASAN && turn++ % 4 != (m.L == 6 ? 3 : m.L)) {
                    continue;
                }
                auto run = [&](const char *offload) {
                    Net n(m, text("-b 2 -t 7 -r %d --offload ", level) + offload, 0);
                    runs++;
                    return busy_trace(&n, accum_steps);
                };
                const Reals want = run("none");
                for (const char *offload : {"weights", "gradients", "moments", "residuals",
                                            "weights,gradients,moments,residuals"}) {
                    expect(same_bits(run(offload), want), "%s, -r %d, %d micro-steps, %s", e,
                           level, accum_steps, offload);
                }
            }
        }
    }
    detail = text("%d runs", runs);
}

// Losses, gradients, weights and split matmuls are bitwise equal with 1, 2 and 3 threads.
TEST(thread_bits, ALL) {
#ifdef _OPENMP
    Trace first[4];
    Reals products[3];
    const int N = 70, C = 1000, OC = 112;  // large enough to be split, even with one row
    Reals inp = noise(N * C, 1, 1), weight = noise(OC * C, 1, 2), dout = noise(N * OC, 1, 3);
    Reals qkv = noise(2 * 70 * 3 * 64, 1, 4), dqkv(qkv.size()), datt = noise(2 * 70 * 64, 1, 5);
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        for (size_t k = 0; k < 4; k++) {
            auto &row = network_shapes[k];
            Net n(shape(row.e, row.V), row.B, row.T, 0, -1, row.logit_rows);
            Trace t = trace(&n, 2);
            expect(threads == 1 || t == first[k], "%s, %d threads", row.e, threads);
            first[k] = threads == 1 ? t : first[k];
        }
        give_workspace();
        Reals out(N * OC), dinp(N * C), dweight(OC * C), dbias(OC), att(datt.size()),
            lse(2 * 4 * 70), row(OC);
        #pragma omp parallel
        #pragma omp master
        {
            matvec_forward(row.data(), inp.data(), weight.data(), NULL, NULL, 1, C, OC);
            matmul_forward(out.data(), inp.data(), weight.data(), NULL, NULL, N, C, OC);
            matmul_backward(dinp.data(), dweight.data(), dbias.data(), dout.data(), inp.data(),
                            weight.data(), N, C, OC);
            attention_forward(att.data(), lse.data(), qkv.data(), 2, 70, 64, 4);
            attention_backward(dqkv.data(), datt.data(), qkv.data(), att.data(), lse.data(), 2, 70,
                               64, 4);
        }
        Reals all;
        for (Reals *part : {&out, &dinp, &dweight, &dbias, &att, &lse, &dqkv, &row}) {
            all.insert(all.end(), part->begin(), part->end());
        }
        products[threads - 1] = all;
        expect(same_bits(all, products[0]), "matmul or attention, %d threads", threads);
    }
    detail = "1, 2 and 3 threads";
#else
    skip("built without OpenMP");
#endif
}

// One batch of 4, two of 2, four of 1, and irregular chunks of logits give results equal up to
// rounding. Each gradient passes through at most 6 L + 2 matmuls, whose errors of a few roundings
// are independent, so a tensor's error norm grows with their square root; losses are more accurate.
TEST(accumulation, ALL) {
    Model m = shape("l2h3c48t8", 257);
    const double tol = 4 * unit * sqrt(2 * (6 * m.L + 2));
    Net whole(m, 4, 7);
    Trace want = trace(&whole, 1);
    static const int cuts[][3] = {{2, 2, 0}, {1, 4, 0}, {4, 1, 9}, {2, 2, 1}};  // B, steps, chunk
    for (auto &cut : cuts) {
        Net n(m, cut[0], 7, 0, -1, cut[2]);
        Trace got = trace(&n, cut[1]);
        expect_near(got.losses[0], want.losses[0], tol * want.losses[0], "loss, B %d", cut[0]);
        for (int tensor = 0; tensor < TENSORS; tensor++) {
            double distance = 0, size = 0;
            for (int l = 0; l < tensor_copies(&m, tensor); l++) {
                for (int64_t i = 0; i < tensor_size(&m, tensor); i++) {
                    size_t k = (size_t)(tensor_offset(&m, tensor, l) + i);
                    double w = (double)want.gradients[k], d = (double)got.gradients[k] - w;
                    distance += d * d;
                    size += w * w;
                }
            }
            expect_near((wide)sqrt(distance), 0, tol * sqrt(size), "%s, B %d x %d, chunk %d",
                        tensor_table[tensor].name, cut[0], cut[1], cut[2]);
        }
    }
}

// A token affects nothing before it; forward_loss, micro_step and logits agree on the loss; the
// padding rows of wte stay zero during training.
TEST(network_facts, ALL) {
    Model m = shape("l2h3c48t12", 200);
    const int T = 12;
    Net n(m, 1, T);
    Batch b(T, m.V, 1);
    double loss = n.e.forward_loss(&n.e, NULL, b.inputs.data(), b.targets.data());
    const real *losses = buffer(&n.plan, BUF_LOSSES);
    Reals before(losses, losses + T);
    Reals logits((size_t)m.V);
    for (int length = 1; length <= T; length += 5) {
        n.e.logits(&n.e, logits.data(), b.inputs.data(), 0, length);
        const double most = (double)*std::max_element(logits.begin(), logits.end());
        double sum = 0;
        for (real x : logits) {
            sum += exp((double)x - most);
        }
        double found = log(sum) + most - (double)logits[(size_t)b.targets[(size_t)length - 1]];
        // From equal logits, exp, the sum, log and the difference add at most 16 roundings.
        expect_near((wide)found, before[(size_t)length - 1], 16 * unit * (1 + most),
                    "logits after %d tokens", length);
    }
    n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
    Options o = default_options();
    o.weight_decay = 0.1;
    expect(n.e.update(&n.e, &o, 0, HUGE_VAL, 0).loss == loss, "forward_loss and micro_step");
    for (int t = T - 1; t > 0; t--) {
        b.inputs[(size_t)t] = (b.inputs[(size_t)t] + 1) % m.V;
        n.e.forward_loss(&n.e, NULL, b.inputs.data(), b.targets.data());
        expect(memcmp(losses, before.data(), (size_t)t * sizeof(real)) == 0 &&
               losses[t] != before[(size_t)t], "token %d is seen too early, or never", t);
    }
    for (int step = 0; step < 3; step++) {
        n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
        n.e.update(&n.e, &o, 0.1, HUGE_VAL, step);
    }
    Reals w = n.state(BUF_WEIGHTS);
    const real *wte = &w[(size_t)tensor_offset(&m, WTE, 0)];
    for (int i = m.V * m.C; i < m.Vp * m.C; i++) {
        expect(wte[i] == 0, "padded row %d", i / m.C);
    }
}

// With a KV cache and chunks of all sizes, logits equal those of the whole window up to rounding (a
// single token is summed in a different order). This also holds if the first tokens are then
// continued with different tokens, as in a second sample. The plan contains weights, the cache, and
// only a few rows of everything else.
TEST(kv_cache, ALL) {
    static const struct {
        const char *e;
        int V, again;
        std::vector<int> pieces;
    } rows[] = {{"l2h3c48t12", 200, 5, {1, 1, 4, 6}},
                {"l2h2c80t300", 257, 130, {1, 70, 57, 1, 130, 1, 40}},
                {"l1h3c6t140", 130, 127, {64, 64, 1, 11}},
                {"l2h1c400t70", 20, 64, {69, 1}}};
    for (auto &row : rows) {
        Model m = shape(row.e, row.V);
        Net whole(m, 1, m.maxT), cached(m, "--generate", 0);
        Batch b(m.maxT, m.V, 1);
        Reals want((size_t)m.V), got((size_t)m.V);
        auto compare_after = [&](int first, int n) {
            cached.e.logits(&cached.e, got.data(), &b.inputs[(size_t)first], first, n);
            whole.e.logits(&whole.e, want.data(), b.inputs.data(), 0, first + n);
            for (int v = 0; v < m.V; v++) {
                expect_near((wide)got[(size_t)v], (wide)want[(size_t)v],
                            (2 + 6 * m.L) * sum_error(4 * m.C), "%s: %d tokens after %d", row.e, n,
                            first);
            }
        };
        int first = 0;
        for (const int n : row.pieces) {
            compare_after(first, n);
            first += n;
        }
        for (int t = row.again; t < m.maxT; t++) {
            b.inputs[(size_t)t] = (b.inputs[(size_t)t] + 1) % m.V;
        }
        compare_after(row.again, 1);
        compare_after(row.again + 1, m.maxT - row.again - 1);
        size_t device[GROUPS], host[GROUPS];
        plan_groups(&cached.plan, device, host);
        const size_t cache = 2 * (size_t)(m.L * m.maxT * m.C) * sizeof(real);
        const size_t few = sizeof(real) * 64 * 20 * (size_t)(m.C + 64) +
                           matmul_workspace_bytes(cached.s.threads);
        expect(device[GROUP_CACHE] - cache < PLAN_ALIGN + PLAN_GAP + 1, "%s: %zu bytes", row.e,
               device[GROUP_CACHE]);
        expect(cached.plan.device_bytes < (size_t)cached.size() * sizeof(real) + cache + few,
               "%s: %zu bytes", row.e, cached.plan.device_bytes);
        expect(device[GROUP_GRADIENTS] + device[GROUP_MOMENTS] + device[GROUP_KEPT] +
               cached.plan.host_bytes == 0, "%s: training states", row.e);
    }
    // In training, a chunk of one row is summed in the same order as any other row.
    Reals losses[2];
    for (int k = 0; k < 2; k++) {
        Net n(shape("l1h3c72t9", 257), 1, 9, 0, -1, k ? 1 : 9);
        Batch b(9, 257, 1);
        losses[k].resize(9);
        n.e.forward_loss(&n.e, losses[k].data(), b.inputs.data(), b.targets.data());
    }
    expect(same_bits(losses[0], losses[1]), "chunks of one row");
}

// The deviations of the initial weights are within four standard errors; constants are exact.
TEST(initialize, ALL) {
    Model m = shape("l3h2c64t20", 257);
    Net n(m, 1, 4);
    n.set_state(BUF_WEIGHTS, Reals((size_t)n.size()));  // as in a newly opened engine
    engine_initialize(&n.e, &m, 42);
    Reals w = n.state(BUF_WEIGHTS), v = n.state(BUF_V);
    expect(std::count(v.begin(), v.end(), (real)0) == n.size());
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        int64_t size = tensor_rows(&m, tensor) * tensor_cols(&m, tensor);
        Init init = tensor_table[tensor].init;
        double std = init == INIT_RESIDUAL ? 0.02 / sqrt(6.0)
                     : init == INIT_NORMAL ? 0.02
                                           : 0,
               sum = 0;
        for (int l = 0; l < tensor_copies(&m, tensor); l++) {
            const real *x = &w[(size_t)tensor_offset(&m, tensor, l)];
            for (int64_t i = 0; i < size; i++) {
                double d = (double)x[i] - (init == INIT_ONE);
                sum += d * d / (double)(size * tensor_copies(&m, tensor));
            }
        }
        expect_near((wide)sqrt(sum), (wide)std, 4 * std / sqrt(2.0 * (double)size), "%s",
                    tensor_table[tensor].name);
    }
    engine_initialize(&n.e, &m, 42);
    expect(same_bits(w, n.state(BUF_WEIGHTS)), "the same seed");
    engine_initialize(&n.e, &m, 43);
    expect(!same_bits(w, n.state(BUF_WEIGHTS)), "another seed");
    const real *first = &w[(size_t)tensor_offset(&m, QKVW, 0)];
    expect(memcmp(first, &w[(size_t)tensor_offset(&m, QKVW, 1)], 64) != 0, "layers differ");
}
