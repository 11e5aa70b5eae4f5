// kernels.h -- tests of the CUDA kernels.
// Compares the kernels of train_gpt2.cu, chapter by chapter, with the naive references of layers.h,
// in fp32 and 16 bits, with odd shapes. On the emulated device, every kernel runs again with its
// blocks, warps and lanes in other orders, with streams that run as late as allowed, and with
// memory that ends at guard pages; all results must be bitwise equal.

typedef __nv_bfloat16 bf16;
typedef std::vector<Reals> Outputs;

template <class E> static real rounded_to(real x) { return to_float(from_float<E>(x)); }

template <class E> static Reals noise_in(size_t n, double scale, uint64_t seed) {
    Reals x = noise(n, scale, seed);
    for (real &value : x) {
        value = rounded_to<E>(value);
    }
    return x;
}

template <class T> static Reals device_reals(const T *p, size_t n) {
    std::vector<T> host(n);
    cuda_check(cudaDeviceSynchronize());
    cuda_check(cudaMemcpy(host.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    Reals values;
    for (T x : host) {
        values.push_back(to_float(x));
    }
    return values;
}

// An array on the device, initially NaN.
template <class T> struct Array {
    size_t n;
    T *p;
    explicit Array(size_t count) : n(count) {
        cuda_check(cudaMalloc((void **)&p, n * sizeof(T)));
        cuda_check(cudaMemset(p, 0xff, n * sizeof(T)));
    }
    template <class X> explicit Array(const std::vector<X> &values) : Array(values.size()) {
        std::vector<T> host(n);
        for (size_t i = 0; i < n; i++) {
            if constexpr (std::is_same_v<X, T>) {
                host[i] = values[i];
            } else {
                host[i] = from_float<T>(values[i]);
            }
        }
        cuda_check(cudaMemcpy(p, host.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    Array(const Array &) = delete;
    ~Array() { cudaFree(p); }
    std::vector<T> raw() const {
        std::vector<T> host(n);
        cuda_check(cudaMemcpy(host.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
    Reals get() const { return device_reals(p, n); }
};

// EMU_SEED, EMU_ORDER and EMU_GUARD select order 0. The other orders, which only kernel tests use,
// are variations of it; on a GPU, they simply repeat the run.
enum { ORDERS = CUDA_CPU ? 6 : 2 };
static void set_order(int order) {
#if CUDA_CPU
    static const emu::Settings asked = emu::set;
    emu::set.seed = asked.seed + (order < 4 ? order : 0);
    emu::set.order = order == 4 ? (long)emu::LATE : asked.order;
    emu::set.guard = asked.guard || order == 5;
#else
    (void)order;
#endif
}

// Returns environment variables with which another run uses the current order as its order 0.
static Text order_switches() {
    char words[512] = "";
#if CUDA_CPU
    FILE *f = fmemopen(words, sizeof words, "w");
    emu::print_switches(f, "");
    fputc(' ', f);
    fclose(f);
#endif
    return words;
}

// Returns whether a case should run. Sanitizers check addresses, not numbers, so their builds run
// only cases with `kept`: a few odd shapes and repeated runs of each kernel. FULL=1 runs all.
static bool sampled(bool kept) { return kept || !TEST_ASAN || is_full(); }

// Returns the outputs of `run`, which must be bitwise equal in every order.
template <class Run> static Outputs every_order(const Text &who, Run run) {
    set_order(0);
    Outputs first = run();
    for (int order = 1; order < ORDERS && sampled(order == 1); order++) {
        set_order(order);
        Outputs again = run();
        for (size_t i = 0; i < first.size(); i++) {
            expect(same_bits(first[i], again[i]), "%s: output %zu differs with %s", who.c_str(), i,
                   order_switches().c_str());
        }
    }
    set_order(0);
    return first;
}

template <class E> static Num num_in(Num x) { return Num((wide)rounded_to<E>((real)x.v)); }

// Expects that the norm of the error is at most twice that of a naive computation in 16 bits.
static void expect_naive_at(int line, const Reals &got, const Nums &want, const Nums &naive,
                            const Text &who) {
    double error = 0, loss = 0, e = 0;
    for (size_t i = 0; i < want.size(); i++) {
        double v = (double)want[i].v, n = (double)naive[i].v;
        error += ((double)got[i] - v) * ((double)got[i] - v);
        loss += (n - v) * (n - v);
        e += want[i].e * want[i].e;
    }
    expect_near_at(line, (wide)sqrt(error), 0, 2 * sqrt(loss) + sqrt(e), who);
}

// Compares device values of type E with the reference, within its error bound in fp32. In 16 bits,
// each error and the norm of all errors may be up to twice that of rounding the exact result.
template <class E> static void compare_in(int line, const Reals &got, Nums want, const Text &who) {
    const Text name = who + " " + type_names[traits<E>.type];
    if (!is_fp32<E>) {
        Nums naive(want.size());
        std::transform(want.begin(), want.end(), naive.begin(), num_in<E>);
        expect_naive_at(line, got, want, naive, name + ", norm");
        for (Num &exact : want) {
            exact.e += 2 * traits<E>.unit * size(exact.v) + (traits<E>.small_range ? 0x1p-24 : 0);
        }
    }
    compare_at(line, got, want, name);
}
#define compare_as(E, got, want, who) compare_in<E>(__LINE__, got, want, who)

static bool device_lacks_bf16() { return gpu_present()->capability < 80; }

// Runs a test in fp32 and in the 16-bit type that this GPU supports.
#define in_16_bits(test, ...) \
    (device_lacks_bf16() ? (void)test<__half>(__VA_ARGS__) : (void)test<bf16>(__VA_ARGS__))
#define in_both_types(test, ...) (test<float>(__VA_ARGS__), in_16_bits(test, __VA_ARGS__))

static void need_bf16() {
    if (device_lacks_bf16()) {
        skip("this GPU has no bf16");
    }
}

template <class E, class G> static void check_embedding(int B, int T, int C, int V, int max_T) {
    const int N = B * T, Vp = (int)round_up_i64(V, 128);
    const Text who = text("B %d T %d C %d V %d", B, T, C, V);
    std::vector<Token> tokens = Batch(N, V, 1).inputs;
    for (int i = 0; i < N; i += 3) {
        tokens[(size_t)i] = V - 1;  // a frequent token
    }
    std::vector<int> plan((size_t)embedding_plan_ints(N)), counts((size_t)V);
    int segments = embedding_sort(plan.data(), counts.data(), tokens.data(), N, V);
    Reals wte = noise_in<E>(Vp * C, 1, 1), wpe = noise_in<E>(max_T * C, 1, 2);
    Reals dout = noise_in<E>(N * C, 1, 3), dwte = noise_in<G>(Vp * C, 1, 4);
    Reals dwpe = noise_in<G>(max_T * C, 1, 5);
    Outputs got = every_order(who, [&] {
        Array<E> d_wte(wte), d_wpe(wpe), d_dout(dout), out(dout.size());
        Array<G> d_dwte(dwte), d_dwpe(dwpe), written(dwpe.size());
        Array<int> d_tokens(tokens), d_plan(plan);
        gpu_embedding_forward(out.p, d_tokens.p, d_wte.p, d_wpe.p, B, T, C, 0);
        gpu_embedding_backward(d_dwte.p, d_dwpe.p, d_dout.p, d_plan.p, segments, B, T, C, max_T,
                               false, 0);
        Reals sums = d_dwte.get();
        gpu_embedding_backward(d_dwte.p, written.p, d_dout.p, d_plan.p, segments, B, T, C,
                               max_T, true, 0);
        return Outputs{out.get(), sums, d_dwpe.get(), written.get()};
    });
    Reals sizes = dout;
    for (real &x : sizes) {
        x = (real)fabs((double)x);
    }
    Nums want, want_dwte = nums(dwte), want_dwpe = nums(dwpe), first(dwpe.size());
    Nums none, of_dwte(dwte.size()), of_dwpe(dwpe.size());
    naive_embedding(&want, &want_dwte, &want_dwpe, tokens, wte, wpe, dout, T, C);
    naive_embedding(&none, &of_dwte, &of_dwpe, tokens, wte, wpe, sizes, T, C);
    for (int i = 0; i < N * C; i++) {
        first[i % (T * C)] = first[i % (T * C)] + dout[i];
    }
    for (size_t i = 0; i < dwte.size(); i++) {  // rows may be summed in any order
        want_dwte[i].e += sum_error(N) * (double)of_dwte[i].v;
    }
    compare_as(E, got[0], want, who + " out");
    compare_as(G, got[1], want_dwte, who + " dwte");
    compare_as(G, got[2], want_dwpe, who + " dwpe");
    compare_as(G, got[3], first, who + " dwpe, written");
}

// Tests embedding forward and backward with frequent tokens and with positions beyond T. Backward
// overwrites the gradients the first time and then accumulates.
TEST(gpu_embedding, CUDA_ALL) {
    static const int shapes[][5] = {
        {1, 1, 48, 257, 1}, {2, 65, 80, 257, 70}, {3, 17, 16, 50257, 17}, {1, 130, 1600, 257, 256}};
    for (const auto &[B, T, C, V, max_T] : shapes) {
        if (sampled(T == 65)) {
            check_embedding<float, float>(B, T, C, V, max_T);
            check_embedding<bf16, bf16>(B, T, C, V, max_T);
            check_embedding<bf16, float>(B, T, C, V, max_T);
        }
    }
}

// Returns start (columns) plus the column sums of x (rows,columns), the rounded output of a kernel.
static Nums column_sums_of(const Reals &x, const Reals &start) {
    const size_t columns = start.size(), rows = x.size() / columns;
    Nums sums;
    for (size_t c = 0; c < columns; c++) {
        sums.push_back(sum_of((int)rows + 1, [&](int i) {
            return Num((size_t)i == rows ? start[c] : x[(size_t)i * columns + c]);
        }));
    }
    return sums;
}

template <class E> static void check_layernorm(int N, int C) {
    const Text who = text("N %d C %d", N, C);
    const size_t n = (size_t)N * C;
    Reals x = noise_in<E>(n, 2, 1), w = noise_in<E>(C, 1, 2), b = noise_in<E>(C, 1, 3);
    Reals dout = noise_in<E>(n, 1, 4), addend = noise_in<E>(n, 1, 5);
    Reals dw = noise(C, 1, 6), db = noise(C, 1, 7), before = noise(C, 1, 8);
    Outputs got = every_order(who, [&] {
        Array<E> d_x(x), d_w(w), d_b(b), out(n), dinp(n), d_dout(dout), d_addend(addend);
        Array<float> mean(N), rstd(N), scratch((size_t)partial_count(1, N, C, 1, 0));
        Outputs all;
        gpu_layernorm_forward(out.p, mean.p, rstd.p, d_x.p, d_w.p, d_b.p, N, C, 0);
        auto backward = [&](Array<E> &to, const E *add) {
            Array<float> d_dw(dw), d_db(db), d_before(before);
            gpu_layernorm_backward(to.p, d_dw.p, d_db.p, add ? nullptr : d_before.p, d_dout.p,
                                   d_x.p, d_w.p, mean.p, rstd.p, add, scratch.p, N, C, 0);
            all = {to.get(), d_dw.get(), d_db.get(), d_before.get()};
            return all[0];
        };
        Reals separate = backward(dinp, d_addend.p);
        expect(same_bits(separate, backward(d_addend, d_addend.p)), "%s: in place", who.c_str());
        backward(d_dout, nullptr);  // overwrites dout
        return Outputs{out.get(), mean.get(), rstd.get(), separate,
                       all[0],    all[1],     all[2],     all[3]};
    });
    const NaiveLayerNorm want(x, w, b, dout, dw, db, got[1], got[2]);
    compare_as(E, got[0], want.out, who + " out");
    compare_as(float, got[1], want.mean, who + " mean");
    compare_as(float, got[2], want.rstd, who + " rstd");
    compare_as(E, got[3], plus(want.dinp, addend), who + " dinp");
    compare_as(E, got[4], want.dinp, who + " dinp without addend");
    compare_as(float, got[5], want.dweight, who + " dweight");
    compare_as(float, got[6], want.dbias, who + " dbias");
    compare_as(float, got[7], column_sums_of(got[4], before), who + " bias of inp");
}

// Tests LayerNorm, with rows handled by one warp or several and more rows than partial sums.
TEST(gpu_layernorm, CUDA_ALL) {
    for (int N : {1, 65, 130}) {
        for (int C : {16, 80, 192, 768, 1600}) {
            if (sampled(N == 65 && C == 80)) {
                in_both_types(check_layernorm, N, C);
            }
        }
    }
    in_both_types(check_layernorm, 9, 1024);
    in_both_types(check_layernorm, 9, 1280);
    if (sampled(false)) {
        in_both_types(check_layernorm, 1500, 48);
        check_layernorm<__nv_bfloat16>(515, 1600);  // of a preset
    }
    in_both_types(check_layernorm, 9, 4096);
    check_layernorm<__half>(9, 96);
}

template <class E> static void check_gelu(int N, int OC) {
    const Text who = text("N %d OC %d", N, OC);
    const size_t n = (size_t)N * OC;
    Reals x = noise_in<E>(n, 3, 1), dout = noise_in<E>(n, 1, 2), dbias = noise(OC, 1, 3);
    const real most = (real)(traits<E>.small_range ? 6e4 : 3e8);
    const real far[] = {-60, 60, 0, -8, most, -most};
    for (size_t i = 0; i < 6; i++) {
        x[i] = rounded_to<E>(far[i]);
    }
    Outputs got = every_order(who, [&] {
        Array<E> d_x(x), d_dout(dout), out(n);
        Array<float> of_dinp(dbias), of_dout(dbias), scratch((size_t)partial_count(1, N, OC, 1, 0));
        gpu_gelu_forward(out.p, d_x.p, n, 0);
        if constexpr (is_fp32<E>) {  // other kernels compute it in 16 bits
            gpu_gelu_backward<float, false>(nullptr, of_dout.p, d_dout.p, nullptr, scratch.p, N,
                                            OC, 0);
        }
        gpu_gelu_backward(d_dout.p, of_dinp.p, d_dout.p, d_x.p, scratch.p, N, OC, 0);
        return Outputs{out.get(), d_dout.get(), of_dinp.get(), of_dout.get()};
    });
    expect(got[0][0] == 0 && got[0][1] == 60 && got[0][4] == x[4] && got[0][5] == 0);
    expect(got[1][0] == 0 && got[1][1] == dout[1] && got[1][4] == dout[4] && got[1][5] == 0);
    Nums want, want_dinp;
    for (size_t i = 0; i < n; i++) {
        Num slope, value = naive_gelu(x[i], &slope);
        bool is_special = i < 6 && i != 3;  // checked above
        want.push_back(is_special ? Num(got[0][i]) : value);
        want_dinp.push_back(is_special ? Num(got[1][i]) : slope * dout[i]);
    }
    compare_as(E, got[0], want, who + " out");
    compare_as(E, got[1], want_dinp, who + " dinp");
    compare_as(float, got[2], column_sums_of(got[1], dbias), who + " dbias");
    compare_as(float, got[3], is_fp32<E> ? column_sums_of(dout, dbias) : nums(dbias),
               who + " dbias alone");
}

// GELU forward and backward, and both column sums. Far from zero, results are exactly x, dout or 0.
TEST(gpu_gelu, CUDA_ALL) {
    static const int shapes[][2] = {{1, 64}, {65, 80}, {130, 768}, {1500, 48}, {2100, 264}};
    for (auto &s : shapes) {
        if (sampled(s[0] == 65)) {
            in_both_types(check_gelu, s[0], s[1]);
        }
    }
}

template <class E, class G> static void check_matmul(int N, int C, int OC) {
    const Text who = text("N %d C %d OC %d G %zu", N, C, OC, sizeof(G));
    Reals inp = noise_in<E>(N * C, 1, 1), w = noise_in<E>(OC * C, 0.2, 2),
          b = noise_in<E>(OC, 1, 3);
    Reals addend = noise_in<E>(N * OC, 1, 4), dout = noise_in<E>(N * OC, 1, 5);
    Reals dw = noise_in<G>(OC * C, 1, 6);
    Outputs got = every_order(who, [&] {
        Array<char> workspace(4 << 20);
        gpu_matmul_open(workspace.p, workspace.n);
        Array<E> d_inp(inp), d_w(w), d_b(b), plain(addend.size()), sum(addend), d_dout(dout);
        Array<E> dinp(inp.size());
        Array<G> d_dw(dw), written(dw.size());
        gpu_matmul_forward<E>(plain.p, d_inp.p, d_w.p, nullptr, nullptr, N, C, OC, 0);
        gpu_matmul_forward<E>(sum.p, d_inp.p, d_w.p, d_b.p, sum.p, N, C, OC, 0);
        gpu_matmul_backward<E, G>(dinp.p, d_dw.p, d_dout.p, d_inp.p, d_w.p, N, C, OC, false, 0);
        gpu_matmul_backward<E, G>(d_inp.p, written.p, d_dout.p, d_inp.p, d_w.p, N, C, OC, true, 0);
        Outputs all = {plain.get(), sum.get(), dinp.get(), d_dw.get(), written.get()};
        expect(same_bits(all[2], d_inp.get()), "%s: in place", who.c_str());
        gpu_matmul_close();
        return all;
    });
    Nums want = naive_matmul(inp, w, N, C, OC), want_sum = plus(want, addend), want_dinp, none;
    Nums want_dw = nums(dw), zero(dw.size()), no_bias(OC);
    naive_matmul_backward(&want_dinp, &want_dw, &no_bias, dout, inp, w, N, C, OC);
    naive_matmul_backward(&none, &zero, &no_bias, dout, inp, w, N, C, OC);
    // The library may start from the addend or, in place in 16 bits, round the product first.
    auto rounding = [](const Num &product, double once) { return once * fabs((double)product.v); };
    const double e_unit = is_fp32<E> ? 0 : traits<E>.unit, g_unit = is_fp32<G> ? 0 : traits<G>.unit;
    for (int i = 0; i < N * OC; i++) {
        want_sum[i] = want_sum[i] + b[i % OC];
        want_sum[i].e += sum_error(C) * (size(b[i % OC]) + size(addend[i])) +
                         rounding(want[i] + b[i % OC], e_unit);
    }
    for (int i = 0; i < OC * C; i++) {
        want_dw[i].e += rounding(zero[i], g_unit);
    }
    compare_as(E, got[0], want, who + " matmul");
    compare_as(E, got[1], want_sum, who + " with bias, in place");
    compare_as(E, got[2], want_dinp, who + " dinp");
    compare_as(G, got[3], want_dw, who + " dweight");
    compare_as(G, got[4], zero, who + " dweight, written");
}

#if CUDA_CPU
// In bf16, a product that is added in place is rounded before the sum, as on Hopper; out of place,
// and in place in fp32, only the sum is. The product 1 + 2^-8 + 2^-12 rounds to 1 + 2^-7; plus -1.
TEST(gpu_matmul_rounding, EMULATED_ALL) {
    enum { N = 8 };
    Reals terms(N * N), ones(N * N, 1), old(N * N, -1);
    for (int i = 0; i < N; i++) {
        terms[i * N] = 1, terms[i * N + 1] = (real)0x1p-8, terms[i * N + 2] = (real)0x1p-12;
    }
    Array<char> workspace(4 << 20);
    gpu_matmul_open(workspace.p, workspace.n);
    Array<bf16> inp(terms), weight(ones), minus(old), out(N * N), dinp(N * N), columns(N * N);
    Array<bf16> in_place(old), gradient(old);
    Array<float> gradient_fp32(old);
    const Reals once(N * N, (real)(0x1p-8 + 0x1p-12)), twice(N * N, (real)0x1p-7);
    gpu_matmul_forward<bf16>(out.p, inp.p, weight.p, nullptr, minus.p, N, N, N, 0);
    expect(same_bits(out.get(), once), "out of place: %a", (double)out.get()[0]);
    gpu_matmul_forward<bf16>(in_place.p, inp.p, weight.p, nullptr, in_place.p, N, N, N, 0);
    expect(same_bits(in_place.get(), twice), "in place: %a", (double)in_place.get()[0]);
    Reals transposed(N * N);
    for (int i = 0; i < N * N; i++) {
        transposed[i] = terms[i % N * N + i / N];
    }
    Array<bf16> dout(transposed);
    gpu_matmul_backward<bf16, bf16>(dinp.p, gradient.p, dout.p, weight.p, weight.p, N, N, N, false,
                                    0);
    gpu_matmul_backward<bf16, float>(dinp.p, gradient_fp32.p, dout.p, weight.p, weight.p, N, N, N,
                                     false, 0);
    expect(same_bits(gradient.get(), twice), "gradient: %a", (double)gradient.get()[0]);
    expect(same_bits(gradient_fp32.get(), once), "fp32: %a", (double)gradient_fp32.get()[0]);
    gpu_matmul_close();
}

// Matmuls of the backward pass are scheduled for backward_sms SMs, which is part of their names in
// caches and checkpoints; those of the forward pass, for all.
TEST(gpu_matmul_sms, EMULATED_ALL) {
    enum { N = 8 };
    Array<float> x(N * N), y(N * N), z(N * N), w(N * N);
    Array<char> workspace(4 << 20);
    gpu_matmul_open(workspace.p, workspace.n);
    for (const int sms : {0, 1}) {
        gemms.backward_sms = sms;
        gpu_matmul_forward<float>(x.p, y.p, w.p, nullptr, nullptr, N, N, N, 0);
        gpu_matmul_backward<float, float>(x.p, z.p, y.p, x.p, w.p, N, N, N, true, 0);
    }
    const char *const names[] = {"8x8x8:10000:0>0", "8x8x8:01000:0>0", "8x8x8:00000:0>0",
                                 "8x8x8:01000:0>0:1", "8x8x8:00000:0>0:1"};
    expect(gemms.plans == 5, "%d plans", gemms.plans);
    for (int i = 0; i < gemms.plans; i++) {
        MatmulPlan &plan = gemms.plan[i];
        expect(matmul_key_text(&plan.key).s == Text(names[i]), "%s", matmul_key_text(&plan.key).s);
        expect(emu::matmul(&plan.description).sms == i / 3, "%s", names[i]);
    }
    gpu_matmul_close();
}
#endif

// e4m3: sign, exponent and mantissa; exponent 0 has units of 2^-9. 127 is NaN.
static double fp8_value(int code) {
    const int e = code >> 3 & 15;
    return (code & 127) == 127 ? NAN : ldexp(e ? 8 + code % 8 : code % 8, std::max(e, 1) - 10) *
                                       (code & 128 ? -1 : 1);
}

// Returns the code of the number that is nearest to x, with ties to even, saturated; NaN is NaN.
static int fp8_nearest(double x) {
    int best = isnan(x) ? 127 : 0;
    for (int code = 1; code < 127 && !isnan(x); code++) {
        const double error = fabs(fp8_value(code) - fabs(x));
        const double least = fabs(fp8_value(best) - fabs(x));
        best = error < least || (error == least && code % 2 == 0) ? code : best;
    }
    return best | (signbit(x) ? 128 : 0);
}

// Returns the exponent of the largest power of two, at most 2^63, that scales all x to at most 448.
static int fp8_exponent(const Reals &x) {
    double largest = 0;
    for (real v : x) {
        largest = fmax(largest, fabs(v));
    }
    int shift = largest == 0 || isinf(largest) ? 0 : 63;
    while (ldexp(largest, shift) > 448 && !isinf(largest)) {
        shift--;
    }
    return shift;
}

// Operands of fp8 matmuls, their transposes and the factors are exact, with zeros, the smallest and
// largest numbers, infinity and NaN.
TEST(gpu_fp8, CUDA_ALL) {
    static const struct {
        int rows, cols;
        double scale, special;
    } cases[] = {{144, 272, 1, 0}, {16, 16, 1, NAN}, {32, 400, 1e-38, 0}, {272, 48, 1e37, 0},
                 {16, 32, 0, 0}, {128, 128, 1, INFINITY}, {16, 144, 1e-5, 1.75}, {48, 16, 1e-3, 1}};
    if (gpu_present()->capability < FP8_CAPABILITY) {
        skip("this GPU has no fp8 matmuls");
    }
    for (auto &row : cases) {
        const size_t n = (size_t)row.rows * row.cols;
        Reals x = noise_in<bf16>(n, row.scale, 1), spread = noise(n, 12, 2);
        for (size_t i = 1; i < n; i++) {
            x[i] = rounded_to<bf16>((real)ldexp(x[i], -(int)fabs(spread[i])));
            x[i] = i == 5 && row.special != 0 ? (real)row.special : x[i];
        }
        const int shift = fp8_exponent(x);
        const double factor = isinf(row.special) ? NAN : ldexp(1, -shift);
        Array<bf16> in(x);
        Array<Fp8> y[] = {Array<Fp8>(n + 4), Array<Fp8>(n + 4), Array<Fp8>(n + 4),
                          Array<Fp8>(n + 4)};
        Array<unsigned> largest(1);
        gpu_fp8_largest(largest.p, in.p, n, nullptr);
        gpu_fp8(y[0].p, y[1].p, largest.p, in.p, row.rows, row.cols, nullptr);
        gpu_fp8(y[2].p, nullptr, largest.p, in.p, row.rows, row.cols, nullptr);
        gpu_fp8(nullptr, y[3].p, largest.p, in.p, row.rows, row.cols, nullptr);
        cuda_check(cudaDeviceSynchronize());
        for (int k = 0; k < 4; k++) {
            const std::vector<Fp8> got = y[k].raw();
            float undo;
            memcpy(&undo, &got[n], 4);
            expect(undo == factor || (isnan(undo) && isnan(factor)), "factor %g", undo);
            for (size_t i = 0; i < n; i++) {
                const int code = got[k % 2 ? i % row.cols * row.rows + i / row.cols : i].__x;
                const int want = fp8_nearest(ldexp(x[i], shift));
                expect(want == code || (want & code & 127) == 127, "%g: %02x, not %02x", x[i], code,
                       want);
            }
        }
    }
}

// Tests matmuls with widths of C, 3 C and 4 C, with few and with many rows.
TEST(gpu_matmul, CUDA_ALL) {
    static const int shapes[][3] = {{1, 48, 144},  {65, 80, 240}, {130, 16, 64}, {7, 192, 64},
                                    {33, 64, 384}, {3, 1600, 40}, {257, 32, 24}};
    for (auto &s : shapes) {
        if (!sampled(s[0] == 65)) {
            continue;
        }
        check_matmul<float, float>(s[0], s[1], s[2]);
        if (device_lacks_bf16()) {
            check_matmul<__half, float>(s[0], s[1], s[2]);
        } else {
            check_matmul<bf16, bf16>(s[0], s[1], s[2]);
            check_matmul<bf16, float>(s[0], s[1], s[2]);
        }
    }
}

template <class E> static Outputs check_attention(int B, int T, int HS, int NH, double sharp) {
    const int C = NH * HS, n = B * T * C;
    const Text who = text("B %d T %d heads %d of %d x %g", B, T, NH, HS, sharp);
    Reals qkv = noise_in<E>(3 * n, sharp, 1), dout = noise_in<E>(n, 1, 2);
    Reals dbias = noise(3 * C, 1, 3);
    Outputs got = every_order(who, [&] {
        Array<E> d_qkv(qkv), d_dout(dout), out(n), dqkv(3 * n);
        Array<float> lse(B * NH * T), drow(B * NH * T), d_dbias(dbias);
        Array<float> scratch((size_t)partial_count(B, T, C, NH, std::is_same_v<E, __half>));
        gpu_attention_forward<E>(out.p, lse.p, d_qkv.p, B, T, C, NH, 0);
        gpu_attention_backward<E>(dqkv.p, d_dbias.p, drow.p, d_dout.p, d_qkv.p, out.p, lse.p,
                                  scratch.p, B, T, C, NH, 0);
        return Outputs{out.get(), lse.get(), dqkv.get(), d_dbias.get()};
    });
    Nums want[2][3];  // exact, and naive in 16 bits
    for (int k = 0; k < 2; k++) {
        want[k][0] = Nums(n), want[k][1] = Nums(B * NH * T), want[k][2] = Nums(3 * n);
        for (int head = 0; head < B * NH && (k == 0 || !is_fp32<E>); head++) {
            naive_attention(&want[k][0], &want[k][1], &want[k][2], qkv, dout, head / NH, head % NH,
                           T, C, NH, k ? num_in<E> : as_it_is);
        }
    }
    for (Num &lse : want[0][1]) {  // the kernels store it in base 2
        lse = lse * Num((wide)1.4426950408889634L);
    }
    compare_as(float, got[1], want[0][1], who + " lse");
    compare_as(float, got[3], column_sums_of(got[2], dbias), who + " bias of qkv");
    if (is_fp32<E>) {
        compare_as(E, got[0], want[0][0], who + " out");
        compare_as(E, got[2], want[0][2], who + " dqkv");
    } else {
        const Text name = type_names[traits<E>.type];
        expect_naive_at(__LINE__, got[0], want[0][0], want[1][0], who + " out " + name);
        expect_naive_at(__LINE__, got[2], want[0][2], want[1][2], who + " dqkv " + name);
    }
    return got;
}

// Attention in fp16 has the same bits on an emulated GPU of compute capability 7.5, which has
// smaller mma instructions, no asynchronous copies and 64 KiB of shared memory.
static void check_attention_fp16(int B, int T, int HS, int NH, double sharp) {
    const Outputs want = check_attention<__half>(B, T, HS, NH, sharp);
#if CUDA_CPU
    const long asked = emu::set.cc;
    emu::set.cc = 75;
    const Outputs got = check_attention<__half>(B, T, HS, NH, sharp);
    emu::set.cc = asked;
    for (size_t i = 0; i < want.size(); i++) {
        expect(same_bits(got[i], want[i]), "T %d heads of %d: output %zu on sm_75", T, HS, i);
    }
#else
    (void)want;
#endif
}

// Attention with lengths around the tile size, heads of 8 to 128 channels, flat and sharp scores.
TEST(gpu_attention, CUDA_ALL) {
    static const int shapes[][4] = {
        {1, 1, 16, 5},  {2, 1, 64, 3},   {3, 2, 80, 1},   {1, 63, 64, 3},  {2, 64, 32, 2},
        {1, 65, 64, 3}, {1, 65, 128, 1}, {2, 33, 16, 5},  {1, 129, 64, 1}, {1, 130, 128, 2},
        {1, 130, 8, 3}, {1, 257, 64, 1}, {1, 200, 120, 1}};  // B, T, head size, heads
    for (auto &s : shapes) {
        if (sampled(s[1] == 33 || s[2] == 128 || s[2] == 8 || (s[1] == 65 && s[2] == 64))) {
            in_both_types(check_attention, s[0], s[1], s[2], s[3], 1);
        }
    }
    static const int small[][4] = {{1, 1, 64, 1},   {2, 33, 16, 3}, {1, 65, 64, 2},
                                   {1, 130, 64, 1}, {1, 97, 128, 1}, {1, 66, 120, 1}};
    for (auto &s : small) {
        if (sampled(s[1] == 33 || s[1] == 65)) {
            check_attention_fp16(s[0], s[1], s[2], s[3], 1);
        }
    }
    if (sampled(false)) {
        check_attention_fp16(1, 100, 64, 1, 4);
        in_both_types(check_attention, 1, 130, 64, 2, 4);
        in_both_types(check_attention, 1, 100, 16, 1, 8);
    }
}

static void need_wgmma() {
    if (gpu_present()->capability != 90) {
        skip("wgmma needs compute capability 9.0");
    }
}

// Computes out (64,64) = a b in fp32 with one warpgroup. FORM 0: a (64,64) and b, stored (n,k), are
// in shared memory; 1: a is in registers, b is stored (n,k); 2: a is in registers, b stored (k,n).
template <int FORM>
static __global__ void wgmma_kernel(float *out, const bf16 *a, const bf16 *b) {
    DYN_SHARED(bf16, tile_a);
    bf16 *tile_b = tile_a + 64 * 64;
    (void)warpgroup_index(tile_a);
    tile_load<64, 64, 4>(tile_a, a, 64, 0, 64, 64);
    tile_load<64, 64, 4>(tile_b, b, 64, 0, 64, 64);
    copy_commit();
    copy_wait<0>();
    fence_async();
    __syncthreads();
    const int row0 = (int)threadIdx.x / WARP * 16 + (int)threadIdx.x % WARP / 4;
    const int column0 = (int)threadIdx.x % 4 * 2;
    float d[1][8][4] = {};
    uint32_t p[4][4];
    for (int i = 0; i < 16; i++) {
        const int row = row0 + 8 * (i % 2), k = 16 * (i / 4) + column0 + i % 4 / 2 * 8;
        memcpy(&p[i / 4][i % 4], a + row * 64 + k, 4);
    }
    const uint64_t at_a = tile_descriptor(tile_a, 0), at_b = tile_descriptor(tile_b, 0);
    settle(d);  // otherwise nvcc may zero d after the fence, which PTX ISA 9.7.15.7.1 forbids
    wgmma_fence();
    if constexpr (FORM == 0) {
        wgmma_abt(d, at_a, at_b);
    } else if constexpr (FORM == 1) {
        UNROLL
        for (int k = 0; k < 4; k++) {
            wgmma<true, false>(d, p[k], at_b + k * DESCRIPTOR_K);
        }
    } else {
        wgmma_add(d, p, at_b);
    }
    wgmma_commit();
    wgmma_wait<0>();
    settle(d);
    each_element<1, 8>([&](int, int n, int e) {
        out[(row0 + e / 2 * 8) * 64 + column0 + 8 * n + e % 2] = d[0][n][e];
    });
}

// Checks the shared memory address that each element of an operand is read from. The other operand
// is the identity matrix, so the result is the operand as it was read. Its elements encode their
// row and column, so a failure shows which element was read instead.
template <int FORM> static void check_wgmma(bool of_a) {
    Reals one(4096), numbers[2] = {Reals(4096), Reals(4096)}, got[2];
    for (int i = 0; i < 4096; i++) {
        one[i] = i % 65 == 0;
        numbers[0][i] = i / 64;
        numbers[1][i] = i % 64;
    }
    for (int k = 0; k < 2; k++) {
        Array<bf16> a(of_a ? numbers[k] : one), b(of_a ? one : numbers[k]);
        Array<float> out(4096);
        launch(wgmma_kernel<FORM>, 1, 128, 16384, 0, out.p, a.p, b.p);
        got[k] = out.get();
    }
    for (int i = 0; i < 4096; i++) {
        const bool turned = !of_a && FORM != 2;  // b is stored (n,k)
        const int row = turned ? i % 64 : i / 64, column = turned ? i / 64 : i % 64;
        expect(got[0][i] == row && got[1][i] == column,
               "form %d, %s (%d,%d) is read from row %g, column %g", FORM, of_a ? "a" : "b", row,
               column, (double)got[0][i], (double)got[1][i]);
    }
}

TEST(gpu_wgmma, CUDA_ALL) {
    need_wgmma();
    for (bool of_a : {true, false}) {
        check_wgmma<0>(of_a), check_wgmma<1>(of_a), check_wgmma<2>(of_a);
    }
}

static void choose_wgmma(int kernels) {
    for (int k = 0; k < ATTENTION_KERNELS; k++) {
        attention_fast[k] = kernels >> k & 1;
    }
}

// Tests the wgmma variants with lengths around the tile sizes and with flat and sharp scores.
// Includes wgmma forward with mma.sync backward and the reverse, because LSE2 and D are the same in
// both. Shapes that the variants do not support fall back to the default kernels.
TEST(gpu_attention_wgmma, CUDA_ALL) {
    need_wgmma();
    enum { FORWARD = 1, DQ = 2, DKV = 4, EVERY = 7 };
    static const int rows[][6] = {
        {EVERY, 1, 1, 64, 2, 1},   {EVERY, 1, 64, 64, 1, 4},  {EVERY, 2, 65, 64, 3, 1},
        {EVERY, 1, 130, 64, 1, 4}, {EVERY, 1, 193, 64, 1, 1}, {EVERY, 1, 333, 64, 1, 1},
        {FORWARD, 1, 130, 64, 1, 1}, {DQ | DKV, 1, 130, 64, 1, 1}, {DQ, 1, 66, 64, 1, 1},
        {EVERY, 1, 33, 32, 1, 1}};  // kernels, B, T, head size, heads, sharpness
    for (auto &r : rows) {
        choose_wgmma(r[0]);
        if (sampled(r[2] == 65)) {
            check_attention<bf16>(r[1], r[2], r[3], r[4], r[5]);
        }
    }
}

template <class E> static void check_classifier(int rows, int V, double sharp) {
    const Text who = text("rows %d V %d x %g", rows, V, sharp);
    const int Vp = (int)round_up_i64(V, 128);
    const real dloss = (real)(1.0 / 300), scale = traits<E>.small_range ? 1024 : 1;
    Reals logits = noise_in<E>(rows * Vp, sharp, 1);
    std::vector<Token> targets = Batch(rows, V, 2).targets;
    targets[0] = V - 1;
    for (int i = 0; i < rows * Vp; i++) {
        logits[i] = i % Vp < V ? logits[i] : rounded_to<E>((real)1e9);  // any value
    }
    Outputs got = every_order(who, [&] {
        Array<E> d_logits(logits);
        Array<float> losses(rows), again(rows);
        Array<int> d_targets(targets);
        Array<float> d_scale(Reals{traits<E>.small_range ? scale : (real)NAN});
        gpu_classifier(losses.p, d_logits.p, d_targets.p, dloss, d_scale.p, rows, V, Vp, false, 0);
        expect(same_bits(d_logits.get(), logits), "%s: evaluation keeps them", who.c_str());
        gpu_classifier(again.p, d_logits.p, d_targets.p, dloss, d_scale.p, rows, V, Vp, true, 0);
        expect(same_bits(losses.get(), again.get()), "%s: losses", who.c_str());
        return Outputs{losses.get(), d_logits.get()};
    });
    Nums want, want_d(logits.size());  // padding: 0, tolerance 0
    naive_classifier(&want, &want_d, logits, targets, dloss * scale, V, Vp, !is_fp32<E>);
    compare_as(float, got[0], want, who + " losses");
    compare_as(E, got[1], want_d, who + " dlogits");
}

// Vocabularies from one pack to the largest, with padding that would dominate every softmax.
TEST(gpu_classifier, CUDA_ALL) {
    static const int shapes[][2] = {{1, 2}, {2, 5}, {1, 257}, {65, 257}, {3, 1000}, {2, 50257},
                                    {1, 65536}};
    for (auto &s : shapes) {
        if (sampled(s[0] == 65 || s[1] == 50257)) {
            in_both_types(check_classifier, s[0], s[1], 1);
            in_both_types(check_classifier, s[0], s[1], 20);
        }
    }
    check_classifier<__half>(3, 257, 1);
    check_classifier<__half>(1, 50257, 20);
}

// Weights on the device and, with SPLIT, their master copy, as the host writes and reads them.
template <class E, bool SPLIT> struct Weights {
    Array<E> p;
    Array<Master<E>> low;
    explicit Weights(const Reals &values) : p(values), low(values.size()) {
        std::vector<Master<E>> rest(values.size());
        std::vector<uint16_t> high;
        for (size_t i = 0; i < values.size(); i++) {
            memcpy(&rest[i], &values[i], sizeof rest[i]);  // the low half, or all of it
            high.push_back(master_high(values[i]));
        }
        cuda_check(cudaMemcpy(low.p, rest.data(), low.n * sizeof rest[0], cudaMemcpyHostToDevice));
        if (SPLIT && !traits<E>.small_range) {
            cuda_check(cudaMemcpy(p.p, high.data(), p.n * 2, cudaMemcpyHostToDevice));
        }
    }
    Master<E> *master() const { return SPLIT ? low.p : nullptr; }
    // Returns the fp32 weights. In fp16, the master holds all bits; weights are rounded from it.
    Reals get() const {
        Reals weights = p.get();
        const std::vector<Master<E>> rest = low.raw();
        for (size_t i = 0; SPLIT && i < weights.size(); i++) {
            const real rounded = weights[i];
            weights[i] = traits<E>.small_range ? (real)rest[i]
                                               : master_join(rounded, (uint16_t)rest[i]);
            expect(!traits<E>.small_range || isnan(rounded) || rounded == rounded_to<E>(weights[i]),
                   "weight %zu", i);
        }
        return weights;
    }
};

static AdamW adamw_of(int step, float rate) {
    return {rate, 0.9f, 0.95f, 1 - powf(0.9f, (float)step), 1 - powf(0.95f, (float)step), 1e-8f,
            0.1f, 1.0f};
}

template <class E, class G, class M, bool SPLIT>
static void update_with(E *p, Master<E> *low, M *m, M *v, const G *g, size_t count, size_t index,
                        int step, const UpdateState *state, float rate = 1e-3f) {
    launch((adamw_kernel<E, G, M, SPLIT>), (unsigned)ceil_div_i64((int64_t)count, UPDATE_CHUNK),
           UPDATE_THREADS, 0, 0, p, low, m, v, g, count, index, adamw_of(step, rate),
           UpdateRandom{1234, (uint32_t)step}, state);
}

// Three steps (clipped, not clipped, skipped) agree with train_gpt2.c's AdamW, and memory before
// and after the updated elements is not modified. States stored exactly must be bitwise equal.
// States stored only in 16 bits are rounded stochastically to one of the two neighbors without bias
// (the mean is within four standard deviations); these runs end after one step.
template <class E, class G, class M, bool SPLIT> static void check_adamw(const char *who) {
    enum { FIRST = 64, N = 24008, EVERY = FIRST + N + 64 };
    const bool exact_p = SPLIT || is_fp32<E>, exact_m = is_fp32<M>;
    Reals p = noise(EVERY, 0.02, 1), m(EVERY), v(EVERY);
    for (int i = 0; i < EVERY; i++) {
        p[i] = i % 97 ? exact_p ? p[i] : rounded_to<E>(p[i]) : 0;
    }
    Weights<E, SPLIT> weights(p);
    Array<M> d_m(m), d_v(v);
    Array<float> scratch((size_t)NORM_BLOCKS);
    Array<UpdateState> state(std::vector<UpdateState>(1));
    for (int step = 1; step <= (exact_p && exact_m ? 3 : 1); step++) {
        const Reals g = noise_in<G>(EVERY, 0.01, 10 + (uint64_t)step);
        Array<G> d_g(g);
        double squares = 0;
        for (int i = FIRST; i < FIRST + N; i++) {
            squares += (double)g[i] * (double)g[i];
        }
        const float clip = step == 2 ? 0.0f : 1e-3f;
        gpu_grad_square_sum(&state.p->square_sum, scratch.p, d_g.p + FIRST, N, true, 0);
        gpu_update_decide(state.p, clip, step == 3 ? 1e-9f : INFINITY, 0);
        update_with<E, G, M, SPLIT>(weights.p.p + FIRST,
                                    SPLIT ? weights.master() + FIRST : nullptr, d_m.p + FIRST,
                                    d_v.p + FIRST, d_g.p + FIRST, N, 0, step, state.p, 1e-2f);
        const UpdateState now = state.raw()[0];
        expect_near(now.norm, (wide)sqrt(squares), sum_error(N) * sqrt(squares), "%s: norm", who);
        expect(now.scale == (clip > 0 && now.norm > clip ? clip / now.norm : 1), "%s: clip", who);
        expect(now.skip == (step == 3) && now.skipped == (step == 3), "%s: skip", who);
        AdamW a = adamw_of(step, 1e-2f);
        a.grad_scale = now.scale;
        adamw_update(&p[FIRST], &m[FIRST], &v[FIRST], &g[FIRST], &a, a.weight_decay,
                     now.skip ? 0 : N);
    }
    auto compare_state = [&](const Reals &got, const Reals &want, bool exact, const char *name) {
        double bias = 0, count = 0;
        expect(!exact || same_bits(got, want), "%s: %s", who, name);
        for (size_t i = 0; i < want.size() && !exact; i++) {
            if (want[i] != 0) {
                double error = ((double)got[i] - (double)want[i]) / fabs((double)want[i]);
                expect_near((wide)error, 0, 2 * traits<bf16>.unit, "%s: %s %zu", who, name, i);
                bias += error;
                count++;
            }
        }
        if (!exact) {
            expect_near((wide)(bias / count), 0, 4 * traits<bf16>.unit / sqrt(count),
                        "%s: %s, bias", who, name);
        }
    };
    compare_state(weights.get(), p, exact_p, "weights");
    compare_state(d_m.get(), m, exact_m, "first moment");
    compare_state(d_v.get(), v, exact_m, "second moment");
}

TEST(gpu_adamw, CUDA_ALL) {
    check_adamw<float, float, float, false>("fp32");
    check_adamw<__half, float, float, true>("fp16");
    check_adamw<bf16, bf16, float, true>("split master");
    check_adamw<bf16, float, float, true>("split master, fp32 gradients");
    check_adamw<bf16, bf16, bf16, true>("split master, bf16 moments");
    check_adamw<bf16, bf16, bf16, false>("no master, bf16 moments");
    check_adamw<bf16, float, float, false>("no master, fp32 gradients");
}

// A NaN weight, written by the host or by AdamW, stays NaN in the weights that forward reads and in
// the saved weights, and its neighbors are unchanged.
template <class E, class G, class M, bool SPLIT> static void check_adamw_nan(const char *who) {
    enum { N = 4096 };
    static const uint32_t nan_bits[] = {0x7fffffff, 0xffffffff, 0x7f800001, 0xff807fff,
                                        0x7f808000, 0x7fc00000, 0xffc00000, 0x7fff8000};
    Reals p = noise_in<E>(N, 0.02, 1), zero(N), want = p;
    for (int i = 0; i < N; i += 8) {
        memcpy(&p[i], &nan_bits[i / 8 % 8], 4);
    }
    Weights<E, SPLIT> weights(p);
    Array<M> m(zero), v(zero);
    Array<G> g(zero);
    Array<UpdateState> state(std::vector<UpdateState>{{0, 1, 1, 0, 0}});
    for (int turn = 0; turn < 2; turn++) {
        const Reals got = weights.p.get(), saved = weights.get();
        for (size_t i = 0; i < N; i++) {
            expect(i % 8 == 0 ? isnan(got[i]) && isnan(saved[i])
                              : got[i] == want[i] && saved[i] == want[i],
                   "%s: weight %zu is %g, saved %g, turn %d", who, i, (double)got[i],
                   (double)saved[i], turn);
        }
        update_with<E, G, M, SPLIT>(weights.p.p, weights.master(), m.p, v.p, g.p, N, 0, 1, state.p,
                                    0);
    }
}

TEST(gpu_adamw_nan, CUDA_ALL) {
    check_adamw_nan<float, float, float, false>("fp32");
    check_adamw_nan<__half, float, float, true>("fp16");
    check_adamw_nan<bf16, bf16, float, true>("split master");
    check_adamw_nan<bf16, bf16, bf16, false>("no master");
}

// Splitting a state into two parts, as on two ranks, changes no rounding in any order of blocks.
TEST(gpu_rounding, CUDA_ALL) {
    enum { N = 20000, CUT = 8816 };
    Reals p = noise_in<bf16>(N, 1, 1), g = noise_in<bf16>(N, 1, 2), zero(N);
    auto update = [&](size_t cut) {
        return every_order("rounding", [&] {
            Array<bf16> d_p(p), m(zero), v(zero), d_g(g);
            Array<UpdateState> state(std::vector<UpdateState>{{0, 1, 1, 0, 0}});
            for (size_t from : {(size_t)0, cut}) {
                const size_t count = from == 0 ? cut : N - from;
                if (count > 0) {
                    update_with<bf16, bf16, bf16, false>(
                        d_p.p + from, nullptr, m.p + from, v.p + from, d_g.p + from, count,
                        from, 1, state.p);
                }
            }
            return Outputs{d_p.get(), m.get(), v.get()};
        });
    };
    const Outputs whole = update(N), two = update(CUT);
    for (size_t k = 0; k < 3; k++) {
        expect(same_bits(whole[k], two[k]), "state %zu", k);
    }
}

// The weights and both moments, two ranges of elements and two steps all use independent random
// numbers: two states round the same elements up as often as chance predicts, within four sigma.
TEST(gpu_rounding_streams, CUDA_ALL) {
    enum { N = 16384 };
    // The weight and both moments lie well between two neighboring bf16 numbers.
    const Reals ones(N, (real)1.5), zero(N), g(N, (real)(1 + 0x1p-9));
    std::vector<std::vector<bool>> all;  // for each state: whether its elements were rounded up
    for (int step : {1, 2}) {
        for (size_t index : {0, 1 << 20}) {
            Array<bf16> p(ones), m(zero), v(zero);
            Array<float> d_g(g);
            Array<UpdateState> state(std::vector<UpdateState>{{0, 1, 1, 0, 0}});
            launch((adamw_kernel<bf16, float, bf16, false>), 2, UPDATE_THREADS, 0, 0, p.p,
                   (uint16_t *)nullptr, m.p, v.p, d_g.p, (size_t)N, index,
                   AdamW{0x1p-8f, 0, 0, 1, 1, 1e-8f, 0, 1}, UpdateRandom{7, (uint32_t)step},
                   state.p);
            for (const Reals &got : {p.get(), m.get(), v.get()}) {
                const real low = *std::min_element(got.begin(), got.end());
                all.emplace_back();
                for (real x : got) {
                    all.back().push_back(x > low);
                }
            }
        }
    }
    auto share = [](const std::vector<bool> &x) {
        return (double)std::count(x.begin(), x.end(), true) / N;
    };
    for (size_t i = 0; i < all.size(); i++) {
        const double a = share(all[i]);
        expect(a > 0.2 && a < 0.8, "state %zu: %.2f round up", i, a);
        for (size_t j = 0; j < i; j++) {
            std::vector<bool> both(N);
            for (size_t x = 0; x < N; x++) {
                both[x] = all[i][x] && all[j][x];
            }
            const double b = share(all[j]), deviation = sqrt(a * (1 - a) * b * (1 - b) / N);
            expect_near((wide)share(both), (wide)(a * b), 4 * deviation, "states %zu, %zu", i, j);
        }
    }
}

// Sums of squares accumulate over buckets; a rank may hold no gradients. A step is skipped if a
// gradient is NaN, infinite or too large to be squared.
TEST(gpu_norm, CUDA_ALL) {
    enum { N = 20000 };
    for (real bad : {(real)2, (real)NAN, (real)HUGE_VAL, (real)-HUGE_VAL, (real)1e30}) {
        Reals g(N, 1);
        g[N - 1] = bad;
        Array<float> d_g(g), scratch((size_t)NORM_BLOCKS);
        Array<UpdateState> state(std::vector<UpdateState>(1));
        gpu_grad_square_sum(&state.p->square_sum, scratch.p, d_g.p, 0, true, 0);
        expect(state.raw()[0].square_sum == 0, "no gradients");
        gpu_grad_square_sum(&state.p->square_sum, scratch.p, d_g.p, N, true, 0);
        gpu_grad_square_sum(&state.p->square_sum, scratch.p, d_g.p, 8, false, 0);
        gpu_update_decide(state.p, 1.0f, INFINITY, 0);
        const UpdateState now = state.raw()[0];
        expect(bad == 2 ? now.square_sum == N + 3 + 8 && !now.skip : now.skip == 1 && now.skipped,
               "%g: %g", (double)bad, (double)now.square_sum);
    }
}

// Gradients are multiplied by clip / norm if the norm is above the limit, otherwise by 1; norm and
// factor are divided by the loss scale. A step changes the loss scale like the last lines of
// PyTorch's amp_update_scale_, between 2 and the largest power of two in fp32.
TEST(gpu_clip, CUDA_ALL) {
    const float inf = INFINITY, last = 0x1p127f;
    static const struct {
        float norm, clip, factor, scale;  // scale 0: no loss scale
        int good_steps;
        float next;
        int next_steps, moved;
    } table[] = {{4, 1, 0.25f, 0, 0, 0, 0, 0}, {0.5f, 1, 1, 0, 0, 0, 0, 0},
                 {1, 1, 1, 0, 0, 0, 0, 0}, {4, 0, 1, 0, 0, 0, 0, 0}, {0, 1, 1, 0, 0, 0, 0, 0},
                 {1.25f, 1, 0.8f, 0, 0, 0, 0, 0}, {inf, 1, 0, 0, 0, 0, 0, 0},
                 {NAN, 1, 0, 0, 0, 0, 0, 0}, {4, 1, 0.25f, 65536, 0, 65536, 1, 0},
                 {1, 1, 1, 65536, 3, 65536, 4, 0}, {1, 0, 1, 65536, 4, 131072, 0, 1},
                 {inf, 1, 0, 65536, 4, 32768, 0, -1}, {NAN, 1, 0, 65536, 1, 32768, 0, -1},
                 {inf, 1, 0, 4, 0, 2, 0, -1}, {inf, 1, 0, 2, 3, 2, 0, 0},
                 {0, 1, 1, last, 3, last, 4, 0}, {0, 1, 1, last, 4, last, 0, 0},
                 {inf, 1, 0, last, 4, last / 2, 0, -1}};
    for (auto &row : table) {
        const float unit_of = row.scale ? row.scale : 1, norm = row.norm * unit_of;
        const bool skips = !isfinite(row.norm);
        Array<UpdateState> state(std::vector<UpdateState>{
            {norm * norm, 0, 0, 7, 3, row.scale, row.good_steps, row.scale ? 5 : 0, 0}});
        gpu_update_decide(state.p, row.clip, INFINITY, 0);
        const UpdateState now = state.raw()[0];
        const Text who = text("norm %g, clip %g, scale %g", (double)row.norm, (double)row.clip,
                              (double)row.scale);
        expect(now.skip == skips && now.skipped == 3u + skips, "%s: skip %u", who.c_str(),
               now.skip);
        expect(skips || (now.norm == row.norm && now.scale == row.factor / unit_of),
               "%s: norm %g, factor %g", who.c_str(), (double)now.norm, (double)now.scale);
        expect(now.loss_scale == row.next && now.good_steps == row.next_steps &&
                   now.scale_moved == row.moved,
               "%s: %g after %d, moved %d", who.c_str(), (double)now.loss_scale, now.good_steps,
               now.scale_moved);
    }
}

// Launchers reject misaligned pointers, rows of other than multiples of 16 bytes, and large sizes.
TEST(gpu_misaligned, CUDA) {
    bf16 *p = (bf16 *)(uintptr_t)0x100000;
    float *f = (float *)(uintptr_t)0x100000;
    expect_death(gpu_gelu_forward(p, p + 1, 64, 0), "gpu_gelu_forward: ");
    expect_death(gpu_gelu_forward(p, p + 1, 64, 0), "is not 16-byte aligned");
    expect_death(gpu_gelu_forward(p, p, 12, 0),
                 "a row of 12 numbers is not a multiple of 16 bytes");
    expect_death(gpu_layernorm_forward(p, f, f, p, p, p, 1, CHANNELS_MAX + 8, 0),
                 "LayerNorm does not support 4104 channels");
    expect_death(gpu_layernorm_backward(p, f, f, f, p, p, p, f, f, p, f, 1, CHANNELS_MAX + 8, 0),
                 "LayerNorm does not support 4104 channels");
    expect_death(gpu_attention_forward(p, f, p, 1, 8, HEAD_MAX + 8, 1, 0), "heads of 136 channels");
    expect_death(gpu_attention_forward(f, f, f, 1, 8, HEAD_MAX_FP32 + 8, 1, 0),
                 "heads of 520 channels");
    expect_death(gpu_attention_forward(f, f, f, GRID_YZ_MAX + 1, 8, 8, 1, 0), "batch 65536");
    expect_death(gpu_attention_forward(f, f, f, 1, LENGTH_MAX + 1, 8, 1, 0), "length 262141");
}

#if CUDA_CPU
static int algorithm_of(const MatmulPlan &plan) {
    emu::Algo algo;
    memcpy(&algo, &plan.algorithm, sizeof algo);
    return algo.id;
}

// A matmul uses the heuristic's first algorithm; out of place (D is not C), the first that supports
// this, or else the first. A matmul that the library does not support is named with its sizes.
TEST(gpu_algorithms, EMULATED_ALL) {
    const int N = 8, C = 16, OC = 24;
    Array<float> inp(noise(N * C, 1, 1)), weight(noise(OC * C, 1, 2)), addend(noise(N * OC, 1, 3));
    Array<float> out(N * OC), workspace(1 << 18);
    auto chosen = [&](int plan) { return algorithm_of(gemms.plan[plan]); };
    for (int in_place : {0, 1, 2, 3}) {  // how many of the three algorithms work only in place
        emu::set.lt_in_place = in_place;
        gpu_matmul_open(workspace.p, workspace.n * sizeof(float));
        gpu_matmul_forward<float>(out.p, inp.p, weight.p, nullptr, nullptr, N, C, OC, 0);
        expect(gemms.plans == 1 && chosen(0) == 0, "in place: %d of %d", chosen(0),
               in_place);
        if (in_place < 3) {
            gpu_matmul_forward<float>(out.p, inp.p, weight.p, nullptr, addend.p, N, C, OC, 0);
            expect(gemms.plans == 2 && chosen(1) == in_place, "out of place: %d of %d",
                   chosen(1), in_place);
        } else {
            MatmulKey key = {OC, N, C, 1, 0, 0, 1, 1, TYPE_FP32, TYPE_FP32};
            matmul_plan_find(key);
            expect(chosen(1) == 0, "none can: %d", chosen(1));
        }
        gpu_matmul_close();
    }
    Outcome o = outcome(spawn([&] {
        emu::cuda_user = 0;  // a real GPU would not allow this
        emu::set.lt_max = 20;
        gpu_matmul_open(workspace.p, workspace.n * sizeof(float));
        gpu_matmul_forward<float>(out.p, inp.p, weight.p, nullptr, nullptr, N, C, OC, 0);
    }));
    const char *line = "cannot multiply (24 x 16) by (16 x 8) with fp32 input and fp32 output: "
                       "CUBLAS_STATUS_NOT_SUPPORTED\n";
    expect(o.status == 1 && has(o.err, line), "%s", o.err.c_str());
    // At a matmul's first launch, algorithms that return an error are passed over. If the list is
    // exhausted, or at a later launch, such an error ends the run.
    const struct {
        int refuse, launched, status;
    } rows[] = {{0, 0, 0}, {1, 0, 0}, {2, 0, 0}, {3, 0, 1}, {1, 1, 1}};
    for (auto &row : rows) {
        o = outcome(spawn([&] {
            emu::cuda_user = 0;
            emu::set.lt_in_place = 0;
            gpu_matmul_open(workspace.p, workspace.n * sizeof(float));
            for (int i = 0; i <= row.launched; i++) {
                emu::set.lt_refuse = i == row.launched ? row.refuse : 0;
                gpu_matmul_forward<float>(out.p, inp.p, weight.p, nullptr, addend.p, N, C, OC, 0);
            }
            exit(chosen(0) == row.refuse && gemms.plans == 1 ? 0 : 9);
        }));
        const char *says = row.status ? "cublasLtMatmul: CUBLAS_STATUS_NOT_SUPPORTED; " : "";
        expect(o.status == row.status && has(o.err, says) && o.err.empty() == !row.status,
               "the first %d fail, %s launch: status %d, %s", row.refuse,
               row.launched ? "second" : "first", o.status, o.err.c_str());
    }
}

// Zeroed device memory; pages are allocated on first access.
template <class T> struct Huge {
    T *p;
    size_t n;
    explicit Huge(size_t count) : n(count) {
        void *memory = mmap(NULL, n * sizeof(T), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            skip("no address space for tensors of 2^31 elements");
        }
        p = (T *)memory;
        emu::add_allocation({(char *)p, n * sizeof(T), false, (char *)p, n * sizeof(T)});
    }
    // Sets the last elements to `tail`.
    Huge(size_t count, const Reals &tail) : Huge(count) {
        for (size_t i = 1; i <= tail.size() && i <= n; i++) {
            p[n - i] = from_float<T>(tail[tail.size() - i]);
        }
    }
    Reals last(size_t count) const {
        Reals values;
        for (size_t i = n - count; i < n; i++) {
            values.push_back(to_float(p[i]));
        }
        return values;
    }
    Huge(const Huge &) = delete;
    ~Huge() {
        for (size_t i = 0; i < emu::allocs.size(); i++) {
            if (emu::allocs[i].p == (char *)p) {
                emu::allocs.erase(emu::allocs.begin() + (long)i);
                break;
            }
        }
        emu::allocated_bytes -= n * sizeof(T);
        munmap(p, n * sizeof(T));
    }
};

// Expects that the last rows of the output are the same for a small tensor and for a huge one.
static void same(const char *who, size_t small, size_t large,
                 const std::function<Outputs(size_t)> &run) {
    expect(run(small) == run(large), "%s", who);
}

static void check_huge_rows() {
    enum { C = 4096, ROWS = (1 << 19) + 1024, TAIL = 32 };  // ROWS: a multiple of the last block's
    const size_t tail = TAIL * C;
    const Reals x = noise_in<bf16>(tail, 1, 1), d = noise_in<bf16>(tail, 1, 2);
    const Reals w = noise_in<bf16>(C, 1, 3);
    same("embedding_forward", TAIL, ROWS, [&](size_t rows) {
        Huge<bf16> out(rows * C), wte(C, w), wpe(8 * C, x);
        Huge<int> tokens(rows);
        gpu_embedding_forward(out.p, tokens.p, wte.p, wpe.p, (int)(rows / 8), 8, C, 0);
        return Outputs{out.last(C)};
    });
    // Sums over three sequences per position.
    same("embedding_backward", TAIL, ROWS / 2, [&](size_t T) {
        Huge<bf16> dout(3 * T * C, d), dwpe(T * C, x), dwte(C);
        Huge<int> plan(3 * 3 * T + 1);
        const int rows = 3 * (int)T;
        EmbeddingPlan of = embedding_plan(plan.p, rows);
        of.order[0] = rows - 1, of.start[1] = 1;
        gpu_embedding_backward(dwte.p, dwpe.p, dout.p, plan.p, 1, 3, (int)T, C, (int)T, false, 0);
        return Outputs{dwpe.last(8), dwte.last(8)};
    });
    same("layernorm", TAIL, ROWS, [&](size_t rows) {
        Huge<bf16> out(rows * C), inp(rows * C, x), weight(C, w), bias(C, w);
        Huge<bf16> dinp(rows * C), dout(rows * C, d);
        Huge<float> mean(rows), rstd(rows), dw(C), db(C);
        Huge<float> scratch((size_t)partial_count(1, (int)rows, C, 1, 0));
        gpu_layernorm_forward(out.p, mean.p, rstd.p, inp.p, weight.p, bias.p, (int)rows, C, 0);
        gpu_layernorm_backward(dinp.p, dw.p, db.p, (float *)nullptr, dout.p, inp.p, weight.p,
                               mean.p, rstd.p, dout.p, scratch.p, (int)rows, C, 0);
        return Outputs{out.last(C), mean.last(1), rstd.last(1), dinp.last(C)};
    });
    same("gelu_forward", TAIL, ROWS, [&](size_t rows) {
        Huge<bf16> out(rows * C), inp(rows * C, x);
        gpu_gelu_forward(out.p, inp.p, rows * C, 0);
        return Outputs{out.last(C)};
    });
    same("gelu_backward", TAIL, ROWS, [&](size_t rows) {
        Huge<bf16> dinp(rows * C), dout(rows * C, d), inp(rows * C, x);
        Huge<float> scratch((size_t)partial_count(1, (int)rows, C, 1, 0)), db(C);
        gpu_gelu_backward(dinp.p, db.p, dout.p, inp.p, scratch.p, (int)rows, C, 0);
        return Outputs{dinp.last(256), db.last(32)};
    });
}

// Compares the last `tail` positions of 16 heads.
template <class E>
static void check_huge_attention(const char *who, size_t T, size_t tail, size_t large) {
    same(who, 1, large, [&](size_t B) {
        const size_t NH = 16, row = 1024;
        Huge<E> out(B * T * row), qkv(B * T * 3 * row, noise(T * 3 * row, 1, 5));
        Huge<E> dqkv(B * T * 3 * row), dout(B * T * row, noise(T * row, 1, 6));
        Huge<float> lse(B * NH * T), drow(B * NH * T), dbias(3 * row);
        Huge<float> scratch((size_t)partial_count((int)B, T, row, NH, !is_fp32<E>));
        gpu_attention_forward(out.p, lse.p, qkv.p, (int)B, T, row, NH, 0);
        gpu_attention_backward(dqkv.p, dbias.p, drow.p, dout.p, qkv.p, out.p, lse.p, scratch.p,
                               (int)B, T, row, NH, 0);
        return Outputs{out.last(tail * row), lse.last(tail), dqkv.last(tail * 3 * row)};
    });
}

static void check_huge_tokens() {
    same("classifier", 4, 42700, [&](size_t rows) {
        Huge<bf16> logits(rows * 50304, noise(50304, 1, 1));
        Huge<float> losses(rows);
        Huge<int> targets(rows);
        gpu_classifier(losses.p, logits.p, targets.p, 1, nullptr, (int)rows, 50257, 50304, true, 0);
        return Outputs{logits.last(50304), losses.last(1)};
    });
    check_huge_attention<__half>("attention", 128, 128, 16400);
    check_huge_attention<float>("attention, fp32", 64, 4, 32800);
}

static void check_huge_update() {
    const Reals x = noise_in<bf16>(UPDATE_CHUNK, 1, 1), d = noise_in<bf16>(UPDATE_CHUNK, 1, 2);
    // The norm's last block handles the last chunk.
    same("norm and AdamW", 1024, (1 << 18) + 1024, [&](size_t chunks) {
        const size_t count = chunks * UPDATE_CHUNK;
        Huge<bf16> p(count, x), g(count, d);
        Huge<uint16_t> low(count);
        Huge<float> m(count), v(count), scratch((size_t)NORM_BLOCKS);
        Huge<UpdateState> state(1);
        gpu_grad_square_sum(&state.p->square_sum, scratch.p, g.p, count, true, 0);
        gpu_update_decide(state.p, 1, INFINITY, 0);
        update_with<bf16, bf16, float, true>(p.p, low.p, m.p, v.p, g.p, count, 0, 1, state.p);
        return Outputs{p.last(UPDATE_CHUNK), m.last(UPDATE_CHUNK), {state.p->norm}};
    });
}

// For tensors of more than 2^31 elements, the last block of every grid computes the same results as
// for the same rows in a small tensor. A product of two 32-bit sizes would be out of bounds.
TEST(gpu_huge, EMULATED) {
    emu::set.last_blocks = 1;
    check_huge_rows();
    check_huge_tokens();
    check_huge_update();
}
#endif
