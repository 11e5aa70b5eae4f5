// gpu_network.h -- tests of the network, offload, the plan and the commands on a GPU.
// Covers the chapters from Device memory to Initialization and warm-up of train_gpt2.cu: every
// gradient and several steps, in fp32 and 16 bits, compared with the CPU reference; results that
// must be bitwise equal; the single allocation; and buffers used outside their lifetimes.

// A CPU reference with the same weights as a network on the device, rounded to the device's type.
struct Reference : Net {
    Reference(Net *gpu, int logit_rows) : Net(gpu->s.model, gpu->s.B, gpu->s.T, 0, -1, logit_rows) {
        engine_copy(&e, &gpu->e, &gpu->s.model, gpu->s.dtype);
    }
};

static const struct {
    const char *e;
    int V;
    const char *options;
} gpu_shapes[] = {{"l2h3c192t65", 257, "-b 1 -t 65"},
                  {"l3h5c80t40", 300, "-b 2 -t 33 --logit-rows 40 -r block:2"},
                  {"l1h1c128t130", 129, "-b 1 -t 130 -r norm"},
                  {"l2h2c16t1", 2, "-b 3 -t 1"},
                  {"l1h1c16t8", 65535, "-b 1 -t 8 -r mlp"}};

// Every gradient and the logits agree with the reference: the relative error in norm is at most
// 1e-5. Runs two micro-steps, because the first one writes gradients and later ones accumulate.
TEST(gpu_gradients_fp32, CUDA_ALL) {
    for (auto &row : gpu_shapes) {
        if (!sampled(row.V == 300)) {
            continue;
        }
        Model m = shape(row.e, row.V);
        Net n(m, Text("--dtype fp32 ") + row.options);
        Reference reference(&n, n.s.logit_rows);
        const int N = n.s.B * n.s.T;
        Batch b(2 * N, m.V, 1);
        Reals first, logits[2] = {Reals(m.V), Reals(m.V)};
        for (int turn = 0; turn < 2; turn++) {
            for (int k = 0; k < 2; k++) {
                n.e.micro_step(&n.e, &b.inputs[k * N], &b.targets[k * N], k, 2);
                reference.e.micro_step(&reference.e, &b.inputs[k * N], &b.targets[k * N], k, 2);
            }
            first = turn ? first : n.gradients();
            expect(same_bits(first, n.gradients()), "%s: again", row.e);
        }
        for (int tensor = 0; tensor < TENSORS; tensor++) {
            expect_near((wide)gradient_error(&n.e, &reference.e, &m, tensor), 0, 1e-5, "d%s of %s",
                        tensor_table[tensor].name, row.e);
        }
        n.e.logits(&n.e, logits[0].data(), b.inputs.data(), 0, n.s.T);
        reference.e.logits(&reference.e, logits[1].data(), b.inputs.data(), 0, n.s.T);
        expect_near((wide)relative_error(logits[0].data(), logits[1].data(), m.V), 0, 1e-5,
                    "logits of %s", row.e);
    }
}

static real (*naive_round)(real);
static void round_all(real *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        x[i] = naive_round(x[i]);
    }
}

// The plan of the reference while it simulates a 16-bit type. Whenever a buffer's lifetime begins
// or ends, at every tick, all live activations and gradients are rounded, except for statistics.
static Plan *rounded_plan;
static void mark_and_round(void *memory, size_t bytes, int alive) {
    plan_mark(memory, bytes, alive);
    for (int i = 0; i < rounded_plan->buffer_count; i++) {
        const Buffer *row = &rounded_plan->buffers[i];
        if (row->alive && (row->group == GROUP_KEPT || row->group == GROUP_WORKING) &&
            !strstr(row->name, "mean") && !strstr(row->name, "rstd") && !strstr(row->name, "lse")) {
            round_all((real *)(void *)(rounded_plan->base[PLACE_DEVICE] + row->offset), row->count);
        }
    }
}

// Runs a reference stage; the head takes all rows at once and rounds logits and their gradients.
static void naive_stage(void *self, const Instr *i) {
    Pass *pass = (Pass *)self;
    const Plan *p = pass->plan;
    const Model *m = &p->settings.model;
    const int N = pass->B * pass->T;
    if (i->op != RUN || i->stage != HEAD) {
        network_execute(self, i);
        return;
    }
    real *logits = buffer(p, BUF_LOGITS), *lnf = buffer(p, BUF_LNF);
    real *wte = weight(p, KIND_WEIGHTS, i, WTE);
    matmul_forward(logits, lnf, wte, NULL, NULL, N, m->C, m->Vp);
    round_all(logits, (int64_t)N * m->Vp);
    classifier_forward_backward(buffer(p, BUF_LOSSES), logits, pass->targets, pass->dloss, N, m->V,
                                m->Vp);
    round_all(logits, (int64_t)N * m->Vp);
    matmul_backward(lnf, weight(p, KIND_GRADIENTS, i, WTE), NULL, logits, lnf, wte, N, m->C, m->Vp);
}

// Runs a micro-step of the reference in which every tensor that would be stored in E is rounded
// when it is computed: weights, activations, logits, their gradients (of `scale` times the loss),
// and finally the gradients of matrices, unless they are stored in fp32.
template <class E>
static void naive_micro_step(Net *n, const Token *inputs, const Token *targets, real scale) {
    Plan *p = rounded_plan = &n->plan;
    const Model *m = &n->s.model;
    const int B = n->s.B, T = n->s.T;
    Pass pass = {p, inputs, targets, B, T, scale / (real)(B * T), 0, 0};
    naive_round = rounded_to<E>;
    p->mark = mark_and_round;
    instr_pass(p, p->at[D_EMBED], 0, 1);
    instr_execute(p, naive_stage, &pass);
    p->mark = plan_mark;
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            Instr i = {};
            i.layer = l;
            real *grads = weight(p, KIND_GRADIENTS, &i, tensor);
            for (int64_t i = 0; i < tensor_size(m, tensor); i++) {
                grads[i] /= scale;
            }
            if (tensor_is_matrix(tensor) && !traits<E>.small_range) {
                round_all(grads, tensor_size(m, tensor));
            }
        }
    }
}

// The error of every gradient in 16 bits is at most twice that of the naive computation above, both
// relative to the fp32 reference with the same weights. The loss scale of fp16 suits few rows.
template <class E> static void check_gradients() {
    const int log2 = 10;
    for (auto &row : gpu_shapes) {
        if (!sampled(row.V == 300)) {
            continue;
        }
        Model m = shape(row.e, row.V);
        Net n(m, Text(row.options) + " --dtype " + type_names[traits<E>.type]);
        if (traits<E>.small_range) {
            n.e.scale_loss(&n.e, log2, 0);
        }
        Reference exact(&n, n.s.B * n.s.T), naive(&n, n.s.B * n.s.T);
        Batch b(n.s.B * n.s.T, m.V, 1);
        n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
        exact.e.micro_step(&exact.e, b.inputs.data(), b.targets.data(), 0, 1);
        naive_micro_step<E>(&naive, b.inputs.data(), b.targets.data(),
                            traits<E>.small_range ? 1 << log2 : 1);
        for (int tensor = 0; tensor < TENSORS; tensor++) {
            double error = gradient_error(&n.e, &exact.e, &m, tensor);
            double loss = gradient_error(&naive.e, &exact.e, &m, tensor);
            expect_near((wide)error, 0, 2 * loss, "%s: d%s of %s", type_names[traits<E>.type],
                        tensor_table[tensor].name, row.e);
        }
    }
}

TEST(gpu_gradients_16, CUDA_ALL) {
    if (!device_lacks_bf16()) {
        check_gradients<bf16>();
    }
    check_gradients<__half>();
}

static double distance(const Reals &a, const Reals &b) {
    double squares = 0;
    for (size_t i = 0; i < a.size(); i++) {
        squares += pow((double)a[i] - (double)b[i], 2);
    }
    return sqrt(squares);
}

// Four optimizer steps of two micro-steps each; every second step clips the norm. Each step starts
// the reference from the device's current weights, so errors of earlier steps need no tolerance;
// where a gradient is nearly zero, AdamW would amplify them to full steps. The error of 16-bit
// gradients, relative to the fp32 reference, is at most twice naive_micro_step's; fp32 gradients
// pass through 6 L + 2 matmuls with independent errors, each that of a sum of 4 C terms. The error
// of the loss is at most twice the root mean square of the tokens' naive errors, which bounds their
// mean. The norm equals that of the device's gradients, except for rounding in its sum. fp32 AdamW
// applied to the device's gradients gives exactly the device's weights and moments.
template <class E> static void check_steps() {
    enum { B = 2, ROWS = 33 * B, MICROS = 2 };
    const char *dtype = type_names[traits<E>.type];
    Model m = shape("l2h2c64t33", 257);
    Net n(m, text("-b %d -t 33 -r block --dtype %s", (int)B, dtype));
    Reference exact(&n, ROWS), naive(&n, ROWS), follows(&n, ROWS);
    engine_copy(&follows.e, &n.e, &m, TYPE_FP32);
    Options o = default_options();
    o.weight_decay = 0.1;
    for (int step = 0; step < 4; step++) {
        Batch b(MICROS * ROWS, m.V, (uint64_t)(step % 2));
        for (Net *each : {(Net *)&exact, (Net *)&naive}) {
            engine_copy(&each->e, &n.e, &m, n.s.dtype);
        }
        double loss = 0, loss_squares = 0;
        Reals rounded;
        for (int k = 0; k < MICROS; k++) {
            const Token *in = &b.inputs[(size_t)(k * ROWS)], *out = &b.targets[(size_t)(k * ROWS)];
            n.e.micro_step(&n.e, in, out, k, MICROS);
            exact.e.micro_step(&exact.e, in, out, k, MICROS);
            const real *right = buffer(&exact.plan, BUF_LOSSES);
            for (int i = 0; i < ROWS; i++) {
                loss += (double)right[i] / (MICROS * ROWS);
            }
            if (!is_fp32<E>) {
                naive_micro_step<E>(&naive, in, out,
                                    traits<E>.small_range ? 1 << LOSS_SCALE_LOG2 : 1);
                const real *wrong = buffer(&naive.plan, BUF_LOSSES);
                const Reals half = naive.gradients();
                rounded.resize(half.size());
                for (size_t i = 0; i < half.size(); i++) {
                    rounded[i] += half[i] / MICROS;
                }
                for (int i = 0; i < ROWS; i++) {
                    loss_squares += pow((double)wrong[i] - (double)right[i], 2) / (MICROS * ROWS);
                }
            }
        }
        Reals gradients = n.gradients();
        const Reals want = exact.gradients(), zeros(want.size());
        const double norm = distance(gradients, zeros);
        const double products = sqrt(6 * m.L + 2) * sum_error(4 * m.C);
        expect_near((wide)distance(gradients, want), 0,
                    is_fp32<E> ? products * norm : 2 * distance(rounded, want),
                    "%s gradients, step %d", dtype, step);
        o.clip = step % 2 ? norm / 2 : 0;
        const StepResult r = n.e.update(&n.e, &o, 2e-3, HUGE_VAL, step);
        expect_near((wide)r.loss, (wide)loss, is_fp32<E> ? products * loss : 2 * sqrt(loss_squares),
                    "%s loss, step %d", dtype, step);
        expect_near((wide)r.norm, (wide)norm, sum_error((double)want.size()) * norm,
                    "%s norm, step %d", dtype, step);
        const float clip = (float)o.clip, factor = clip > 0 ? clip / (float)r.norm : 1;
        for (real &g : gradients) {
            g *= factor;
        }
        follows.set_state(BUF_GRADS, gradients);
        o.clip = 0;
        follows.e.update(&follows.e, &o, 2e-3, HUGE_VAL, step);
        for (int state : {BUF_WEIGHTS, BUF_M, BUF_V}) {
            const Reals got = n.state(state), made = follows.state(state);
            expect(same_bits(got, made), "%s, step %d: state %d is off by %g of %g", dtype, step,
                   state, distance(got, made), distance(made, zeros));
        }
    }
}

TEST(gpu_steps, CUDA_ALL) {
    if (!device_lacks_bf16()) {
        check_steps<bf16>();
    }
    if (sampled(device_lacks_bf16())) {
        check_steps<float>();
        check_steps<__half>();
    }
}

// Two Muon updates and a skipped one change weights and moments as on the CPU, given the device's
// gradients. In bf16, the iteration rounds its matrices.
static void check_muon(const char *options, double tolerance, double moments) {
    Model m = shape("l2h2c64t33", 257);
    const Text muon = text("-b 2 -t 33 --optimizer muon ");
    Net n(m, muon + options), follows(m, muon, 0);
    engine_copy(&follows.e, &n.e, &m, TYPE_FP32);
    Options o = default_options();
    o.weight_decay = 0.1;
    o.clip = 0;
    for (int step = 0; step < 3; step++) {
        Batch b(66, m.V, (uint64_t)step);
        n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
        follows.set_state(BUF_GRADS, n.gradients());
        Reals before[2];
        for (Net *each : {&n, &follows}) {
            before[each == &follows] = each->state(BUF_WEIGHTS);
            each->e.update(&each->e, &o, 1e-2, step == 2 ? 0 : HUGE_VAL, step);
        }
        for (int state : {BUF_WEIGHTS, BUF_M}) {
            Reals got = n.state(state), want = follows.state(state);
            for (size_t i = 0; i < got.size() && state == BUF_WEIGHTS; i++) {
                got[i] -= before[0][i];
                want[i] -= before[1][i];
            }
            const double norm = distance(want, Reals(want.size()));
            expect_near((wide)distance(got, want), 0,
                        norm * (state == BUF_WEIGHTS ? tolerance : moments),
                        "%s, step %d: state %d", options, step, state);
        }
    }
}

TEST(gpu_muon, CUDA_ALL) {
    check_muon("--dtype fp32", 1e-5, 1e-6);
    check_muon("--dtype fp16", 1e-5, 1e-6);
    if (!device_lacks_bf16()) {
        check_muon("--dtype bf16", 2e-2, 1e-6);
        check_muon("--dtype bf16 -w none --moments bf16 --grad-dtype fp32", 0.3, 1e-2);
    }
}

// Losses, gradients and weights of two steps are the same for every recompute level, in every order
// of threads, and in repeated runs. Tests all levels in bf16 and two in other types.
TEST(gpu_bits, CUDA_ALL) {
    int runs = 0;
    for (const char *dtype :
         {"fp32", "bf16", "fp16", "bf16 --grad-dtype fp32 --moments bf16 -w none",
          "bf16 --optimizer muon", "bf16 --matmul fp8"}) {
        const bool fp8 = strstr(dtype, "fp8") != nullptr;
        if ((fp8 && gpu_present()->capability < FP8_CAPABILITY) ||
            !sampled(fp8 || strcmp(dtype, "bf16") == 0)) {
            continue;
        }
        Model m = shape("l3h2c32t17", 257);
        auto run = [&](const Text &level) {
            Net n(m, text("-b 2 -t %d --logit-rows 20 -r ", fp8 ? 16 : 17) + level + " --dtype " +
                         dtype);
            Trace t = trace(&n, 3);  // a pinned slot is refilled within a step
            runs++;
            return Outputs{Reals(t.losses.begin(), t.losses.end()), t.gradients, t.weights};
        };
        Outputs plain = run("none");
        expect(plain[0][0] > 1 && plain[0][1] != plain[0][0], "losses");
        const bool every = is_full() || (strcmp(dtype, "bf16") == 0 && !TEST_ASAN);
        for (const char *level :
             {"none", "gelu", "norm", "mlp", "qkv", "block", "block:0", "block:1", "block:2"}) {
            if (every || strcmp(level, "qkv") == 0 || strcmp(level, "block:1") == 0) {
                expect(run(level) == plain, "-r %s, %s", level, dtype);
            }
        }
        if (every || TEST_ASAN) {
            expect(every_order(dtype, [&] { return run("block:2"); }) == plain, "%s", dtype);
        }
    }
    detail = text("%d runs", runs);
}

static std::map<int, Reals> fp8_made;  // by item and block, as the stages made it
static double fp8_worst;               // error, as a fraction of its bound
static int fp8_products;
static void (*fp8_run)(void *pass, const Instr *i);

static Reals fp8_rounded(Reals x) {
    const int shift = fp8_exponent(x);
    for (real &v : x) {
        v = (real)ldexp(fp8_value(fp8_nearest(ldexp(v, shift))), -shift);
    }
    return x;
}

// Compares `got` (rows, cols) with `add` plus the sum of a(row, i) b(i, col) over i < k.
static void fp8_product(const Reals &got, const Reals &add, int cols, int k, double unit,
                        const Reals &a, int a_row, int a_k, const Reals &b, int b_col, int b_k) {
    fp8_products++;
    for (int n = 0; n < (int)got.size(); n++) {
        double sum = add[n], terms = fabs(sum);
        for (int i = 0; i < k; i++) {
            const double term =
                (double)a[n / cols * a_row + i * a_k] * b[n % cols * b_col + i * b_k];
            sum += term;
            terms += fabs(term);
        }
        // A GPU's tensor cores sum fp8 products with fewer bits.
        const double bound = fabs(sum) * unit + terms * (CUDA_CPU ? (k + 4) * 0x1p-24 : 0x1p-10);
        const double error = fabs(got[n] - sum) / (bound + 1e-38);
        fp8_worst = fmax(fp8_worst, isnan(error) ? HUGE_VAL : error);
    }
}

// Executes an instruction and checks a linear layer's products.
static void fp8_spy(void *self, const Instr *i) {
    const GpuPass *pass = (const GpuPass *)self;
    const GpuBlock<bf16, float> b = {pass->net, i};
    const Model *m = &pass->net->plan->settings.model;
    const StageEntry &e = stage_table[i->stage];
    const int N = pass->B * pass->T, w = e.weight, act = e.makes[0];
    const int C = (int)tensor_cols(m, w), OC = (int)tensor_rows(m, w);
    auto made = [&](int item) -> Reals & {
        return fp8_made[item * MAX_LAYERS + (item == GRAD_RES ? 0 : i->layer)];
    };
    fp8_run(self, i);
    if (i->op != RUN || i->layer < 0 || e.op == OP_HEAD || e.op == OP_FP8) {
        return;
    }
    if (e.op != OP_LINEAR && e.op != OP_LINEAR_BACK) {
        made(act) = device_reals(b.out(0), act < BLOCK_BUFFERS ? act_count(m, act, N) : N * m->C);
        return;
    }
    const Reals W = fp8_rounded(device_reals(b.weight(w), OC * C));
    const Reals in = fp8_rounded(made(e.reads[0]));
    if (e.op == OP_LINEAR) {
        const Reals bias = device_reals(b.weight(w + 1), OC);
        Reals add = e.reads[1] ? device_reals(b.in(1), N * OC) : Reals(N * OC);
        for (int n = 0; n < N * OC; n++) {
            add[n] += bias[n % OC];
        }
        fp8_product(device_reals(b.out(0), N * OC), add, OC, C, 0x1p-8, in, C, 1, W, C, 1);
    } else {
        const Reals x = fp8_rounded(made(e.reads[1]));
        fp8_product(device_reals(b.out(0), N * C), Reals(N * C), C, OC, 0x1p-8, in, OC, 1, W, 1, C);
        fp8_product(device_reals(b.dmatrix(w), OC * C), Reals(OC * C), C, N, 0x1p-23, in, 1, OC, x,
                    1, C);
    }
}

// Every product of the blocks is that of its operands rounded to fp8, computed in fp64 from what
// the stages made: a wrong scale, operand or transpose still trains. With fp32 gradients of
// matrices, only the sum is rounded. A weight's scale is not that of the other block's. Only
// forward products may be summed fast.
TEST(gpu_fp8_products, CUDA_ALL) {
    if (gpu_present()->capability < FP8_CAPABILITY) {
        skip("this GPU has no fp8 matmuls");
    }
    for (const char *level : {"none", "gelu", "norm", "block"}) {
        Net n(shape("l2h2c32t32", 65),
              Text("-b 2 --dtype bf16 --grad-dtype fp32 --matmul fp8 -r ") + level);
        GpuNetwork *net = (GpuNetwork *)n.e.self;
        const Range qkv = tensor_range(&n.s.model, QKVW, 1, 0, tensor_size(&n.s.model, QKVW));
        n.e.write(&n.e, BUF_WEIGHTS, qkv, noise((size_t)qkv.count, 0.01, 9).data());
        fp8_products = 0;
        fp8_run = std::exchange(net->run, fp8_spy);
        trace(&n, 1);
        expect(fp8_products >= 2 * 12 && fp8_worst <= 1, "-r %s: %.3g of the bound", level,
               fp8_worst);
#if CUDA_CPU
        for (int i = 0; i < gemms.plans; i++) {
            MatmulPlan &plan = gemms.plan[i];
            const bool forward = plan.key.input_type == TYPE_FP8 && plan.key.has_bias;
            expect(emu::matmul(&plan.description).fast == forward, "fast: %d", i);
        }
#endif
    }
    detail = text("%.2f of the bound", fp8_worst);
}

// Like gpu_bits, for each wgmma variant of attention. Counts of launches show which variants ran:
// their bits may be equal, as those of dK and dV at T = 70 on an H100.
TEST(gpu_bits_wgmma, CUDA_ALL) {
    need_wgmma();
    Model m = shape("l2h1c64t70", 65);
    auto run = [&](const char *level, int kernels) {
        Net n(m, Text("-b 1 -t 70 -r ") + level);
        choose_wgmma(kernels);
        memset(attention_launches, 0, sizeof attention_launches);
        Trace t = trace(&n, 2);
        return Outputs{Reals(t.losses.begin(), t.losses.end()), t.gradients, t.weights};
    };
    for (int kernels : {0, 1, 2, 4}) {
        expect(run("none", kernels) == run("block", kernels), "-r block, kernels %d", kernels);
        for (int k = 0; k < ATTENTION_KERNELS; k++) {
            const int fast = kernels >> k & 1, *launches = attention_launches[k];
            expect(launches[fast] > 0 && launches[!fast] == 0, "kernels %d: %d, %d of kernel %d",
                   kernels, launches[0], launches[1], k);
        }
    }
    memset(attention_launches, 0, sizeof attention_launches);
    Net tuned(m, "-b 1 -t 70 --tune 1");
    for (const int *launches : attention_launches) {
        expect(launches[1] > 0 && launches[0] == 0, "the warm-up: %d, %d", launches[0],
               launches[1]);
    }
}

#if CUDA_CPU
// Values of EMU_ORDER: orders in which streams run.
static const long stream_orders[] = {0, emu::EARLY, emu::LATE, 1, 2};

// A run calls cudaMalloc once, for exactly the planned bytes, and never again.
TEST(gpu_allocation, EMULATED_ALL) {
    for (const char *options :
         {"--dtype fp32 -r block", "-r block:1 --moments bf16 -w none",
          "--grad-dtype fp32 -r qkv --logit-rows 7", "--dtype fp16 --offload weights,master",
          "--optimizer muon -r block",
          "-r block --offload weights,gradients,moments,master,residuals"}) {
        if (!sampled(strstr(options, "residuals"))) {
            continue;
        }
        Model m = shape("l3h2c48t40", 300);
        emu::peak_bytes = 0;
        Net n(m, options);
        auto on_device = [] {
            std::vector<size_t> sizes;
            for (const emu::Alloc &a : emu::allocs) {
                if (!a.host) {
                    sizes.push_back(a.n);
                }
            }
            return sizes;
        };
        const std::vector<size_t> one = {plan_bytes(&n.s)};
        expect(on_device() == one, "%s", options);
        const size_t pinned = emu::allocs.size() - 1;
        const int plans = gemms.plans;
        expect(((GpuNetwork *)n.e.self)->accum_steps == 2,
               "the warm-up also loads matmuls that add to gradients");
        trace(&n, 2);
        Reals logits((size_t)m.V);
        Batch b(n.s.B * n.s.T, m.V, 1);
        n.e.logits(&n.e, logits.data(), b.inputs.data(), 0, 3);
        n.e.forward_loss(&n.e, NULL, b.inputs.data(), b.targets.data());
        expect(gemms.plans == plans, "%s: %d matmuls after warm-up", options, plans);
        expect(on_device() == one && emu::peak_bytes == one[0] && emu::allocs.size() == pinned + 1,
               "%s: peak %zu of %zu", options, emu::peak_bytes, one[0]);
        expect(pinned == 1 && emu::pinned_bytes == n.plan.host_bytes,
               "%s: %zu pinned allocations, %zu bytes of %zu", options, pinned, emu::pinned_bytes,
               n.plan.host_bytes);
    }
}

static Reals offloaded(const Model &m, const Text &options, int accum_steps, long order) {
    emu::set.order = order;
    Net n(m, options);
    return busy_trace(&n, accum_steps);
}

// Reading a state in host memory waits for queued work, although a host-to-host copy would not.
// Nothing is read earlier, so nothing else makes the host wait.
TEST(gpu_host_read, EMULATED_ALL) {
    const Model m = shape("l2h1c16t8", 257);
    const Batch b(14, m.V, 1);
    const int64_t count = tensor_size(&m, QKVW);
    Reals grads[2];
    for (int late = 0; late < 2; late++) {
        emu::set.order = late ? (long)emu::LATE : 0;
        Net n(m, "-b 2 -t 7 --offload gradients");
        n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
        grads[late].resize((size_t)count);
        n.e.read(&n.e, BUF_GRADS, tensor_range(&m, QKVW, 0, 0, count), grads[late].data());
    }
    emu::set.order = 0;
    expect(same_bits(grads[0], grads[1]) && grads[0][0] != 0, "read too early");
}

// Offload changes no bit in 12 random settings with every type of state (60 with FULL=1).
TEST(gpu_offload_mixed, EMULATED_ALL) {
    static const char *const names[] = {"weights", "gradients", "moments", "residuals", "master"};
    const int all = full_or(TEST_ASAN ? 4 : 12, 60);
    for (int n = 0; n < all; n++) {
        const int bf16s = draw(0, 3) > 0, split = bf16s && draw(0, 1), accum_steps = draw(1, 3);
        Model m = shape(text("l%dh1c%dt9", draw(1, 6), 8 * draw(1, 4)).c_str(), 257);
        Text placements, options = text("-b %d -t %d -r %s:%d", draw(1, 2), draw(1, 9),
                                   level_name(draw(0, RECOMPUTE_LEVELS - 1)).s, draw(0, m.L));
        options += bf16s ? split ? "" : " -w none" : " --dtype fp32";
        options += bf16s && draw(0, 1) ? " --moments bf16" : "";
        options += bf16s && draw(0, 1) ? " --grad-dtype fp32" : "";
        options += draw(0, 1) ? " --optimizer muon" : "";
        const int bits = draw(1, split ? 31 : 15);
        for (int k = 0; k < 5; k++) {
            placements += bits >> k & 1 ? (placements.empty() ? "" : ",") + Text(names[k]) : "";
        }
        const long order = stream_orders[draw(0, 4)];
        const Reals want = offloaded(m, options, accum_steps, 0);
        const Reals got = offloaded(m, options + " --offload " + placements, accum_steps, order);
        expect(same_bits(got, want), "L%d C%d %s, %d micro-steps, %s%s", m.L, m.C,
               options.c_str(), accum_steps, order_switches().c_str(), placements.c_str());
    }
    emu::set.order = 0;
    detail = text("%d settings", all);
}

// Backward waits for fetched weights at the first stage that uses them, after those that backward
// repeats, which also covers the residuals fetched before them. In every order of streams, the
// stages before it and the wait change no bit.
TEST(gpu_offload_later_wait, EMULATED_ALL) {
    const Model m = shape("l5h1c16t8", 257);
    for (const char *level : {"none", "norm"}) {
        const Text options = text("-b 1 -t 8 --dtype fp32 -r %s", level);
        const Reals want = offloaded(m, options, 2, 0);
        for (const long order : stream_orders) {
            emu::set.order = order;
            Net n(m, options + " --offload weights,residuals");
            int later = 0;
            Plan *p = &n.plan;
            instr_pass(p, p->at[UPDATE] - 1, 0, 1);
            slots_forget_weights(p);
            for (int i = 0; i < p->instrs.count; i++) {
                const Instr &wait = p->instrs.list[i];
                const Tick &t = p->order[wait.tick];
                if (wait.op == WAIT && wait.event < EVENT_BUCKET && t.back &&
                    t.stage >= F_STAGES && t.stage < BLOCK_STAGES) {
                    later |= 1 << wait.event / SLOTS;
                }
            }
            expect(later == 1 << KIND_WEIGHTS, "-r %s: kinds %d", level, later);
            expect(same_bits(busy_trace(&n, 2), want), "-r %s, %s", level,
                   order_switches().c_str());
        }
    }
    emu::set.order = 0;
}

#endif

// Logits computed with a KV cache, and those for the whole window, agree with the reference's: the
// error is at most 1e-5 in fp32; in 16 bits, the cache at most doubles that of the whole window.
TEST(gpu_kv_cache, CUDA_ALL) {
    const int pieces[] = {1, 1, 68, 1, 1, 3, 65, 24};
    for (const char *dtype : {"fp32", "bf16", "fp16"}) {
        if (!sampled(strcmp(dtype, "bf16") == 0)) {
            continue;
        }
        Model m = shape("l2h2c32t90", 257);
        Net reference(m, 1, m.maxT);
        Batch b(m.maxT, m.V, 1);
        std::vector<Reals> got;
        auto run_stages = [&](std::function<void(int, int)> transfer) {
            int first = 0;
            for (const int n : pieces) {
                first = n == 65 ? 1 : first;  // a second sample shares one token
                transfer(first, n);
                first += n;
            }
        };
        {  // one engine at a time: matmul plans are global
            Net cached(m, Text("--generate --dtype ") + dtype);
            const int plans = gemms.plans;
            run_stages([&](int first, int n) {
                got.push_back(Reals((size_t)m.V));
                cached.e.logits(&cached.e, got.back().data(), &b.inputs[(size_t)first], first, n);
            });
            expect(gemms.plans == plans, "%s: %d matmuls missing from the warm-up",
                   dtype, gemms.plans - plans);
        }
        Net whole(m, Text("-b 1 --dtype ") + dtype);
        Reals want((size_t)m.V), other((size_t)m.V);
        size_t at = 0;
        run_stages([&](int first, int n) {
            whole.e.logits(&whole.e, other.data(), b.inputs.data(), 0, first + n);
            reference.e.logits(&reference.e, want.data(), b.inputs.data(), 0, first + n);
            const double error = relative_error(other.data(), want.data(), m.V);
            const bool fp32 = whole.s.dtype == TYPE_FP32;
            expect(!fp32 || error <= 1e-5, "%d tokens: %g", first + n, error);
            expect_near((wide)relative_error(got[at++].data(), want.data(), m.V), 0,
                        fp32 ? 1e-5 : 2 * error, "%s, %d tokens", dtype, first + n);
        });
    }
}

static Outputs states(Net *net) {
    return {net->state(BUF_WEIGHTS), net->state(BUF_M), net->state(BUF_V)};
}

static StepResult step(Net *net, const Batch &b, double limit) {
    const Options o = default_options();
    net->e.micro_step(&net->e, b.inputs.data(), b.targets.data(), 0, 1);
    return net->e.update(&net->e, &o, 1e-2, limit, 0);
}

// A loss scale that is too large for this batch falls step by step, while weights and moments stay
// unchanged; the first step without overflow equals that of a network that starts with that scale.
// The scale then grows after the given number of steps, counting a step that is skipped because its
// norm is above the limit; a resumed network continues the count.
TEST(gpu_overflow, CUDA_ALL) {
    Model m = shape("l2h2c32t9", 257);
    Batch b(18, m.V, 1);
    auto grow_after = [](Net *net, int steps) {
        auto *network = (GpuNetwork *)net->e.self;
        copy_sync(&gpu_buffer<GpuState>(network, BUF_STATE)->update.scale_grows, &steps,
                  sizeof steps, network->stream);
    };
    const Text options = "-b 2 -t 9 -r block --dtype fp16";
    Outputs stepped;
    StepResult r = {}, good;
    int falls = 0;
    {
        Net n(m, options);
        const Outputs start = states(&n);
        r = step(&n, b, 0);
        expect(r.skipped && r.scale_log2 == LOSS_SCALE_LOG2 && r.scale_steps == 1,
               "the warm-up's steps are counted: %d at 2^%d", r.scale_steps, r.scale_log2);
        n.e.scale_loss(&n.e, 30, 1234);
        for (r = step(&n, b, HUGE_VAL); r.skipped && falls < 30; r = step(&n, b, HUGE_VAL)) {
            falls++;
            expect(r.scale_log2 == 30 - falls && r.scale_steps == 0 && r.scale_moved == -1 &&
                       !isfinite(r.norm) && isfinite(r.loss), "scale 2^%d", r.scale_log2);
            expect(states(&n) == start, "an overflow changes nothing");
        }
        expect(falls > 3 && r.scale_log2 == 30 - falls && r.scale_steps == 1 && r.scale_moved == 0,
               "%d falls", falls);
        good = r;
        stepped = states(&n);
        expect(stepped != start);
        grow_after(&n, 3);
        r = step(&n, b, 0);
        expect(r.skipped && r.scale_steps == 2 && r.scale_moved == 0, "%d steps", r.scale_steps);
        expect(states(&n) == stepped, "a norm above the limit changes nothing");
        n.e.scale_loss(&n.e, 4, 2);  // like a resume
        grow_after(&n, 3);
        r = step(&n, b, HUGE_VAL);
        expect(!r.skipped && r.scale_log2 == 5 && r.scale_steps == 0 && r.scale_moved == 1,
               "2^%d after %d steps", r.scale_log2, r.scale_steps);
    }
    Net n(m, options);
    n.e.scale_loss(&n.e, 30 - falls, 0);
    r = step(&n, b, HUGE_VAL);
    expect(r.loss == good.loss && r.norm == good.norm && states(&n) == stepped, "same start scale");
    detail = text("from 2^30 to 2^%d", 30 - falls);
}

// Rounding uses different random numbers in each update and for each seed. Compares the same first
// moments when stored in bf16 by update 0, by update 1, and by update 0 with another seed.
TEST(gpu_rounding_updates, CUDA_ALL) {
    need_bf16();
    Model m = shape("l1h1c16t9", 257);
    auto moments = [&](int64_t updates, int64_t seed) {
        Net n(m, "-b 2 -t 9 -w none --moments bf16");
        Batch b(18, m.V, 1);
        Options o = default_options();
        o.seed = seed;
        n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
        n.e.update(&n.e, &o, 1e-2, HUGE_VAL, updates);
        return n.state(BUF_M);
    };
    const Reals first = moments(0, 1);
    expect(same_bits(first, moments(0, 1)), "again");
    for (const Reals &other : {moments(1, 1), moments(0, 2)}) {
        int64_t differing = 0, all = 0;
        for (size_t i = 0; i < first.size(); i++) {
            differing += first[i] != other[i];
            all += first[i] != 0;
        }
        expect(differing > all / 8, "%d of %d differ", (int)differing, (int)all);
    }
}
