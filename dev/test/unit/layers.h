// layers.h -- tests of the CPU layers.
// Covers the chapters "Matmul and fast math" and "Layers" of train_gpt2.c with odd shapes. A
// reference evaluates the formula in Num, a wider number that carries a bound on the error of the
// same computation in `real`. The errors of the approximate exp and tanh may be as large as their
// documentation states (EXP_ULP, TANH_ULP; libm's in double).

static const double EXP_ULP = 1.05, TANH_ULP = 2.53;

struct Num {
    wide v;
    double e;  // operations propagate their operands' errors and add one rounding
    Num(wide value = 0, double error = 0) : v(value), e(error) {}
};
static double size(wide x) { return fabs((double)x); }
static Num rounded(wide v, double e) { return Num(v, e + unit * size(v) + smallest); }
static Num operator+(Num a, Num b) { return rounded(a.v + b.v, a.e + b.e); }
static Num operator-(Num a, Num b) { return rounded(a.v - b.v, a.e + b.e); }
static Num operator*(Num a, Num b) {
    return rounded(a.v * b.v, size(a.v) * b.e + size(b.v) * a.e + a.e * b.e);
}
static Num operator/(Num a, Num b) {
    return rounded(a.v / b.v, (a.e + size(a.v / b.v) * b.e) / size(b.v));
}
static wide wide_exp(wide x) {
    return GPT2_DOUBLE ? (wide)expl((long double)x) : (wide)exp((double)x);
}
static Num num_exp(Num x) {
    wide v = wide_exp(x.v);
    return rounded(v, (double)v * (x.e + 2 * EXP_ULP * unit));
}
static Num num_tanh(Num x) {
    wide v = GPT2_DOUBLE ? (wide)tanhl((long double)x.v) : (wide)tanh((double)x.v);
    return rounded(v, x.e * (1 - (double)(v * v)) + 2 * TANH_ULP * unit * size(v));
}
static Num num_log(Num x) { return rounded((wide)logl((long double)x.v), x.e / (double)x.v); }
static Num num_rsqrt(Num x) {
    wide v = 1 / (wide)sqrtl((long double)x.v);
    return rounded(v, (double)v * (x.e / (double)x.v / 2 + 2 * unit));
}

// Returns term(0) + ... + term(n - 1), with an error bound for any order of summation.
template <class Term> static Num sum_of(int n, Term term) {
    wide v = 0;
    double e = 0, sizes = 0;
    for (int k = 0; k < n; k++) {
        Num t = term(k);
        v += t.v;
        e += t.e;
        sizes += size(t.v);
    }
    return Num(v, e + sum_error(n) * sizes);
}

typedef std::vector<Num> Nums;
static Nums nums(const Reals &x) { return Nums(x.begin(), x.end()); }

// Compares every element with its reference and reports the one closest to its tolerance.
static void compare_at(int line, const Reals &got, const Nums &want, const Text &where) {
    size_t at = 0;
    double most = -1;
    for (size_t i = 0; i < want.size(); i++) {
        double err = size((wide)got[i] - want[i].v);
        double share = err == 0 ? 0 : err <= want[i].e ? err / want[i].e : HUGE_VAL;
        if (share > most) {
            most = share;
            at = i;
        }
    }
    expect_near_at(line, got[at], want[at].v, want[at].e, where + text(" [%zu]", at));
}
#define compare(got, want, ...) compare_at(__LINE__, got, want, text(__VA_ARGS__))

// Allocates exactly the workspace the plan would reserve, for layers called outside a network.
static void give_workspace() {
    static void *memory;
    free(memory);
    size_t bytes = matmul_workspace_bytes(thread_count());
    if (posix_memalign(&memory, 64, bytes) != 0) {
        die("no memory for the matmul's workspace");
    }
    memset(memory, 0xff, bytes);
    matmul_workspace = (real *)memory;
}

static real fast_tanh(real x) {
    uint32_t n;
    real r = tanh_begin(x, &n);
    return tanh_end(r, n, x);
}

// exp and tanh are accurate over their range and correct for NaN, infinities, zero and huge values.
TEST(fast_maths, ALL) {
    const double low = GPT2_DOUBLE ? -800 : -120, range = GPT2_DOUBLE ? 1500 : 208;
    for (int i = 0; i <= 400000; i++) {
        real x = (real)(low + range * i / 400000), y = (real)(-12 + 24.0 * i / 400000);
        double root = (double)y * fabs((double)y) * 1e-3;  // small arguments of tanh
        Num e = num_exp((wide)x), t = num_tanh((wide)y), s = num_tanh((wide)(real)root);
        expect_near(fast_exp(x), e.v, e.e, "exp %.9g", (double)x);
        expect_near(fast_tanh(y), t.v, t.e, "tanh %.9g", (double)y);
        expect_near(fast_tanh((real)root), s.v, s.e, "tanh %.9g", root);
    }
    const real inf = (real)HUGE_VAL, nan = (real)NAN;
    expect(fast_exp(-inf) == 0 && fast_exp((real)-1e30) == 0 && fast_exp(0) == 1);
    expect(fast_exp(inf) == inf && fast_exp((real)1e4) == inf && isnan((double)fast_exp(nan)));
    expect(fast_tanh(inf) == 1 && fast_tanh(-inf) == -1 && isnan((double)fast_tanh(nan)));
    for (const double x : {11.0, 44.5, 90.0, 1e3, 1e30}) {  // beyond the exponent's range
        expect_near(fast_tanh((real)x), 1, 1e-8, "tanh %g", x);
        expect_near(fast_tanh((real)-x), -1, 1e-8, "tanh %g", -x);
    }
    expect(fast_tanh((real)-0.0) == 0 && signbit((double)fast_tanh((real)-0.0)));
}

static const int matmul_shapes[][3] = {
    // rows, C, OC
    {1, 1, 1},      {1, 48, 144},  {3, 5, 7},      {13, 17, 19},   {65, 80, 33},  {14, 32, 64},
    {15, 33, 65},   {29, 31, 257}, {33, 1000, 17}, {200, 129, 31}, {9, 3072, 40}, {130, 768, 100},
    {2, 48, 50304}, {64, 64, 64},  {257, 16, 48},  {1, 768, 2304}, {600, 7, 9},   {385, 8, 129},
    {21, 40, 1024},  // dout's rows map to the same L1 set, so they are packed first
};

static Nums naive_matmul(const Reals &inp, const Reals &weight, int N, int C, int OC) {
    Nums out;
    for (int i = 0; i < N * OC; i++) {
        const real *x = &inp[i / OC * C], *w = &weight[i % OC * C];
        out.push_back(sum_of(C, [=](int c) { return Num(x[c]) * w[c]; }));
    }
    return out;
}

// Computes dinp, and adds to dweight and dbias, as matmul_backward does.
static void naive_matmul_backward(Nums *dinp, Nums *dweight, Nums *dbias, const Reals &dout,
                                 const Reals &inp, const Reals &weight, int N, int C, int OC) {
    for (int i = 0; i < N * C; i++) {
        const real *d = &dout[i / C * OC], *w = &weight[i % C];
        dinp->push_back(sum_of(OC, [=](int o) { return Num(d[o]) * w[(int64_t)o * C]; }));
    }
    for (int i = 0; i < OC * C; i++) {  // the last term is the initial value
        const real *d = &dout[i / C], *x = &inp[i % C];
        const Num start = (*dweight)[i];
        (*dweight)[i] = sum_of(N + 1, [=](int n) {
            return n == N ? start : Num(d[(int64_t)n * OC]) * x[(int64_t)n * C];
        });
    }
    for (int o = 0; o < OC; o++) {
        const real *d = &dout[o];
        const Num start = (*dbias)[o];
        (*dbias)[o] = sum_of(N + 1, [=](int n) { return n == N ? start : Num(d[n * OC]); });
    }
}

// out = addend + bias + inp weight^T, with and without each; addend may be out itself.
TEST(matmul_forward, ALL) {
    give_workspace();
    for (const auto &[N, C, OC] : matmul_shapes) {
        Reals inp = noise(N * C, 1, 1), weight = noise(OC * C, 0.2, 2);
        Reals bias = noise(OC, 1, 3), addend = noise(N * OC, 1, 4);
        Nums product = naive_matmul(inp, weight, N, C, OC);
        for (int has = 0; has < 4; has++) {
            const real *b = has & 1 ? bias.data() : NULL, *add = has & 2 ? addend.data() : NULL;
            Reals out((size_t)(N * OC), (real)NAN), same = addend;
            Nums want = product;
            for (int i = 0; i < N * OC; i++) {
                want[i] = want[i] + (b ? b[i % OC] : 0) + (add ? add[i] : 0);
                // if bias and addend are added first, they are rounded with every term
                want[i].e += sum_error(C) * ((b ? size(b[i % OC]) : 0) + (add ? size(add[i]) : 0));
            }
            matmul_forward(out.data(), inp.data(), weight.data(), b, add, N, C, OC);
            compare(out, want, "N %d C %d OC %d%s%s", N, C, OC, b ? " bias" : "", add ? " +" : "");
            matmul_forward(same.data(), inp.data(), weight.data(), b, add ? same.data() : NULL, N,
                           C, OC);
            expect(same_bits(out, same), "in place, N %d C %d OC %d", N, C, OC);
            for (int i = 0; i < N && N > 1; i++) {
                const size_t at = (size_t)(i * OC);
                Reals row((size_t)OC, (real)NAN), packed(&out[at], &out[at] + OC);
                matmul_forward(row.data(), &inp[(size_t)(i * C)], weight.data(), b,
                               add ? add + at : NULL, 1, C, OC);
                expect(same_bits(row, packed), "row %d alone, N %d C %d OC %d", i, N, C, OC);
            }
        }
    }
}

// dbias and dweight accumulate; dinp is overwritten and may be inp; dinp and dbias may be NULL.
TEST(matmul_backward, ALL) {
    give_workspace();
    for (const auto &[N, C, OC] : matmul_shapes) {
        Reals inp = noise(N * C, 1, 1), weight = noise(OC * C, 0.2, 2), dout = noise(N * OC, 1, 3);
        Reals dinp(inp.size(), (real)NAN), dweight = noise(OC * C, 1, 4), dbias = noise(OC, 1, 5);
        Nums want_dinp, want_dweight = nums(dweight), want_dbias = nums(dbias);
        naive_matmul_backward(&want_dinp, &want_dweight, &want_dbias, dout, inp, weight, N, C, OC);
        Reals dweight2 = dweight, dweight3 = dweight, dinp2 = inp;
        const real *d = dout.data(), *x = inp.data(), *w = weight.data();
        matmul_backward(dinp.data(), dweight.data(), dbias.data(), d, x, w, N, C, OC);
        compare(dinp, want_dinp, "dinp N %d C %d OC %d", N, C, OC);
        compare(dweight, want_dweight, "dweight N %d C %d OC %d", N, C, OC);
        compare(dbias, want_dbias, "dbias N %d C %d OC %d", N, C, OC);
        matmul_backward(dinp2.data(), dweight2.data(), NULL, d, dinp2.data(), w, N, C, OC);
        matmul_backward(NULL, dweight3.data(), NULL, d, x, w, N, C, OC);
        expect(same_bits(dinp, dinp2) && same_bits(dweight, dweight2) &&
               same_bits(dweight, dweight3), "aliases and NULL, N %d C %d OC %d", N, C, OC);
    }
}

// Operands packed in several blocks of rows, of depths, and of depths per workspace; the rows fill
// no whole panel. Sums of small integers are exact.
TEST(matmul_blocks, ALL) {
    enum { STEP = 4096 };  // `a` is packed if its elements along k map to the same L1 set
    give_workspace();
    for (const auto &[M, N, K] : {std::array<int, 3>{1001, 9, 1200}, {2701, 5, 768}}) {
        Reals a((size_t)K * STEP), b((size_t)(N * K)), out((size_t)(M * N), (real)NAN);
        for (Reals *values : {&a, &b}) {
            for (size_t i = 0; i < values->size(); i++) {
                (*values)[i] = (real)((uint32_t)i * 2654435761u >> 30);
            }
        }
        matmul(out.data(), operand(a.data(), 1, STEP), operand(b.data(), (size_t)K, 1), NULL, NULL,
               M, N, K);
        tasks_wait();
        for (int i = 0; i < M * N; i++) {
            real sum = 0;
            for (int k = 0; k < K; k++) {
                sum += a[(size_t)(k * STEP + i / N)] * b[(size_t)(i % N * K + k)];
            }
            expect(out[(size_t)i] == sum, "M %d, K %d: %d, %d", M, K, i / N, i % N);
        }
    }
}

// Returns GELU(v); *slope receives its derivative.
static Num naive_gelu(Num v, Num *slope) {
    Num s = Num(0.79788456080286535588L, unit), c = Num(0.044715L, unit * 0.05);
    Num t = num_tanh(s * (v + c * v * v * v)), half = (wide)0.5, one = (wide)1, three = (wide)3;
    *slope = half * (one + t + v * (one - t * t) * s * (one + three * c * v * v));
    return half * v * (one + t);
}

// GELU forward and backward, also in place, with every vector-loop tail length, and next to NaN.
TEST(gelu, ALL) {
    enum { COUNT = 100003 };
    Reals x(COUNT), out(COUNT), dout = noise(COUNT, 1, 2), dinp(COUNT);
    Nums want, want_dinp;
    for (int i = 0; i < COUNT; i++) {
        x[i] = (real)(i == 0 ? -1e4 : i == 1 ? 1e4 : -12 + 24.0 * i / COUNT);
        Num slope;
        want.push_back(naive_gelu(x[i], &slope));
        want_dinp.push_back(slope * dout[i]);
    }
    gelu_forward(out.data(), x.data(), COUNT);
    gelu_backward(dinp.data(), dout.data(), x.data(), COUNT);
    compare(out, want, "forward");
    compare(dinp, want_dinp, "backward");
    gelu_backward(dout.data(), dout.data(), x.data(), COUNT);
    expect(same_bits(dinp, dout), "in place");
    for (size_t n = 1; n < 40; n++) {  // every length of a vector loop's tail
        Reals few(n, (real)NAN);
        gelu_forward(few.data(), &x[50000], n);
        expect(memcmp(few.data(), &out[50000], n * sizeof(real)) == 0, "n %zu", n);
    }
    real bad[2] = {(real)NAN, 1};
    gelu_forward(bad, bad, 2);
    expect(isnan((double)bad[0]) && !isnan((double)bad[1]));
}

// Computes out, and adds to dwte and dwpe.
static void naive_embedding(Nums *out, Nums *dwte, Nums *dwpe, const std::vector<Token> &tokens,
                         const Reals &wte, const Reals &wpe, const Reals &dout, int T, int C) {
    for (int k = 0; k < (int)dout.size(); k++) {
        int w = tokens[k / C] * C + k % C, p = k / C % T * C + k % C;
        out->push_back(Num(wte[w]) + wpe[p]);
        (*dwte)[w] = (*dwte)[w] + dout[k];
        (*dwpe)[p] = (*dwpe)[p] + dout[k];
    }
}

// The output is rounded once; backward accumulates over equal tokens and over the batch.
TEST(embedding, ALL) {
    enum { B = 3, T = 7, C = 130, V = 11 };
    std::vector<Token> tokens = Batch(B * T, V, 1).inputs;
    Reals wte = noise(V * C, 1, 1), wpe = noise((T + 2) * C, 1, 2), out(B * T * C);
    Reals dout = noise(B * T * C, 1, 3), dwte = noise(V * C, 1, 4), dwpe = noise((T + 2) * C, 1, 5);
    Nums want, want_dwte = nums(dwte), want_dwpe = nums(dwpe);
    naive_embedding(&want, &want_dwte, &want_dwpe, tokens, wte, wpe, dout, T, C);
    embedding_forward(out.data(), tokens.data(), wte.data(), wpe.data(), B, T, C);
    embedding_backward(dwte.data(), dwpe.data(), dout.data(), tokens.data(), B, T, C);
    compare(out, want, "forward");
    compare(dwte, want_dwte, "dwte");
    compare(dwpe, want_dwpe, "dwpe");
}

// Reference LayerNorm, whose backward uses the mean and rstd of the tested forward. dinp has no
// addend; dweight and dbias include their initial values.
struct NaiveLayerNorm {
    Nums out, mean, rstd, dinp, dweight, dbias;
    NaiveLayerNorm(const Reals &x, const Reals &w, const Reals &b, const Reals &dout,
                  const Reals &dw, const Reals &db, const Reals &got_mean, const Reals &got_rstd)
        : dweight(nums(dw)), dbias(nums(db)) {
        const int N = (int)got_mean.size(), C = (int)w.size();
        auto n = [&](int i, int c) { return (Num(x[i * C + c]) - got_mean[i]) * got_rstd[i]; };
        for (int i = 0; i < N; i++) {
            const real *row = &x[i * C], *d = &dout[i * C];
            Num count = (wide)C, m = sum_of(C, [&](int c) { return Num(row[c]); }) / count;
            Num v = sum_of(C, [&](int c) { return (Num(row[c]) - m) * (Num(row[c]) - m); }) / count;
            Num r = num_rsqrt(v + Num((wide)1e-5L, unit * 1e-5));
            mean.push_back(m);
            rstd.push_back(r);
            Num g = sum_of(C, [&](int c) { return Num(d[c]) * w[c]; }) / count;
            Num gn = sum_of(C, [&](int c) { return Num(d[c]) * w[c] * n(i, c); }) / count;
            for (int c = 0; c < C; c++) {
                out.push_back((Num(row[c]) - m) * r * w[c] + b[c]);
                dinp.push_back(Num(got_rstd[i]) * (Num(d[c]) * w[c] - g - n(i, c) * gn));
            }
        }
        for (int c = 0; c < C; c++) {
            dweight[c] = sum_of(
                N + 1, [&](int i) { return i == N ? Num(dw[c]) : Num(dout[i * C + c]) * n(i, c); });
            dbias[c] = sum_of(N + 1, [&](int i) { return Num(i == N ? db[c] : dout[i * C + c]); });
        }
    }
};

static Nums plus(Nums want, const Reals &x) {
    for (size_t i = 0; i < x.size(); i++) {
        want[i] = want[i] + x[i];
    }
    return want;
}

// LayerNorm forward and backward; addend may be NULL or dinp itself.
TEST(layernorm, ALL) {
    static const int shapes[][2] = {{1, 1},   {1, 48},   {2, 15},   {17, 16}, {5, 17},
                                    {65, 80}, {34, 768}, {3, 1600}, {300, 33}};  // rows, C
    for (auto &shape : shapes) {
        const int N = shape[0], C = shape[1];
        Reals x = noise(N * C, 2, 1), w = noise(C, 1, 2), b = noise(C, 1, 3), out(x.size());
        Reals mean(N), rstd(N), dout = noise(N * C, 1, 4), addend = noise(N * C, 1, 5),
                                dinp(x.size());
        Reals dw = noise(C, 1, 6), db = noise(C, 1, 7), alone(x.size());
        layernorm_forward(out.data(), mean.data(), rstd.data(), x.data(), w.data(), b.data(), N, C);
        const NaiveLayerNorm want(x, w, b, dout, dw, db, mean, rstd);
        auto backward = [&](real *result, const real *add) {
            Reals dw2 = dw, db2 = db;
            layernorm_backward(result, dw2.data(), db2.data(), dout.data(), x.data(), w.data(),
                               mean.data(), rstd.data(), add, N, C);
            compare(dw2, want.dweight, "dweight N %d C %d", N, C);
            compare(db2, want.dbias, "dbias N %d C %d", N, C);
        };
        compare(mean, want.mean, "mean N %d C %d", N, C);
        compare(rstd, want.rstd, "rstd N %d C %d", N, C);
        compare(out, want.out, "out N %d C %d", N, C);
        const Nums want_dinp = plus(want.dinp, addend);
        backward(dinp.data(), addend.data());
        backward(alone.data(), NULL);
        backward(addend.data(), addend.data());
        compare(dinp, want_dinp, "dinp N %d C %d", N, C);
        compare(alone, want.dinp, "dinp without addend N %d C %d", N, C);
        expect(same_bits(addend, dinp), "in place, N %d C %d", N, C);
    }
}

static Num as_it_is(Num x) { return x; }

// Computes attention of one head with full T x T matrices, and writes that head's part of out, lse
// and dqkv. `to_real` rounds the values that a 16-bit computation rounds: P, out, dS, dqkv.
static void naive_attention(Nums *out, Nums *lse, Nums *dqkv, const Reals &qkv, const Reals &dout,
                           int b, int h, int T, int C, int NH, Num (*to_real)(Num) = as_it_is) {
    const int HS = C / NH;
    auto place = [=](int t, int part) { return ((b * T + t) * 3 + part) * C + h * HS; };
    Nums P(T * T), dS(T * T);
    const Num scale = Num(1 / (wide)sqrtl((long double)HS), unit);
    for (int t = 0; t < T; t++) {
        const real *q = &qkv[place(t, 0)], *d = &dout[(b * T + t) * C + h * HS];
        Num *o = &(*out)[(b * T + t) * C + h * HS];
        Nums s, p;
        wide most = -HUGE_VAL;
        for (int u = 0; u <= t; u++) {
            const real *k = &qkv[place(u, 1)];
            s.push_back(sum_of(HS, [=](int i) { return Num(q[i]) * k[i]; }) * scale);
            most = std::max(most, s[u].v);
        }
        for (int u = 0; u <= t; u++) {
            p.push_back(num_exp(s[u] - most));
        }
        Num sum = sum_of(t + 1, [&](int u) { return p[u]; });
        Num log_sum = (*lse)[(b * NH + h) * T + t] = Num(most) + num_log(sum);
        for (int i = 0; i < HS; i++) {
            o[i] = to_real(
                sum_of(t + 1, [&](int u) { return to_real(p[u]) * qkv[place(u, 2) + i]; }) / sum);
        }
        Num D = sum_of(HS, [=](int i) { return o[i] * d[i]; });
        for (int u = 0; u <= t; u++) {
            const real *v = &qkv[place(u, 2)];
            Num dp = sum_of(HS, [=](int i) { return Num(d[i]) * v[i]; });
            P[t * T + u] = num_exp(s[u] - log_sum);
            dS[t * T + u] = to_real(P[t * T + u] * (dp - D) * scale);
            P[t * T + u] = to_real(P[t * T + u]);
        }
    }
    for (int t = 0; t < T * HS; t++) {
        int row = t / HS, i = t % HS;
        (*dqkv)[place(row, 0) + i] =
            to_real(sum_of(row + 1, [&](int u) { return dS[row * T + u] * qkv[place(u, 1) + i]; }));
        (*dqkv)[place(row, 1) + i] = to_real(sum_of(
            T, [&](int u) { return u < row ? Num() : dS[u * T + row] * qkv[place(u, 0) + i]; }));
        (*dqkv)[place(row, 2) + i] = to_real(sum_of(T, [&](int u) {
            return u < row ? Num() : P[u * T + row] * dout[(b * T + u) * C + h * HS + i];
        }));
    }
}

// Attention over one key, whole tiles of keys, and one more or less, with heads of 1 to 128.
TEST(attention, ALL) {
    static const int shapes[][4] = {{1, 1, 8, 1},   {2, 1, 48, 3},   {1, 2, 3, 3},
                                    {2, 7, 48, 3},  {1, 65, 192, 3}, {2, 64, 64, 1},
                                    {3, 33, 80, 5}, {1, 129, 80, 5}, {1, 66, 256, 2},
                                    {2, 17, 35, 5}, {1, 260, 64, 2}, {1, 63, 24, 1}};
    give_workspace();
    for (const auto &[B, T, C, NH] : shapes) {
        for (int sharp = 1; sharp <= 4; sharp += 3) {  // scores with standard deviation 1 and 16
            const int n = B * T * C;
            Reals qkv = noise(3 * n, sharp, 1), dout = noise(n, 1, 2), out(n, (real)NAN);
            Reals lse(B * NH * T, (real)NAN), dqkv(3 * n, (real)NAN);
            Nums want(n), want_lse(lse.size()), want_dqkv(dqkv.size());
            for (int head = 0; head < B * NH; head++) {
                naive_attention(&want, &want_lse, &want_dqkv, qkv, dout, head / NH, head % NH, T, C,
                               NH);
            }
            attention_forward(out.data(), lse.data(), qkv.data(), B, T, C, NH);
            attention_backward(dqkv.data(), dout.data(), qkv.data(), out.data(), lse.data(), B, T,
                               C, NH);
            compare(out, want, "out B %d T %d C %d NH %d x %d", B, T, C, NH, sharp);
            compare(lse, want_lse, "lse B %d T %d C %d NH %d x %d", B, T, C, NH, sharp);
            compare(dqkv, want_dqkv, "dqkv B %d T %d C %d NH %d x %d", B, T, C, NH, sharp);
        }
    }
}

// Returns e^(x - most) as the GPU's classifier computes it in 16 bits: 2^(LOG2_E x - shift), where
// shift is LOG2_E most, rounded. The rounding of shift does not matter, because it scales all
// powers of a row equally and the loss adds LN_2 shift. The relative error in units of 2^-24 is |x|
// times the error of LOG2_E, plus |x - most| for the rounding of the fused multiply-add, plus 4
// (2^-22) for ex2.approx.ftz.f32 (PTX ISA, "Floating Point Instructions: ex2"). Its results below
// 2^-126 are 0.
static const double LOG2_E_ERROR = 0.23, LN_2_ERROR = 0.05;  // in fp32, in units of 2^-24
static Num num_power(wide x, wide most) {
    const wide v = wide_exp(x - most);
    return Num(v, (double)v * unit * (LOG2_E_ERROR * size(x) + size(x - most) + 4) + smallest);
}

// Computes losses and dlogits from the first V of Vp logits per row; in_powers_of_2: num_power.
static void naive_classifier(Nums *losses, Nums *dlogits, const Reals &logits,
                            const std::vector<Token> &targets, real dloss, int V, int Vp,
                            bool in_powers_of_2 = false) {
    for (int i = 0; i < (int)targets.size(); i++) {
        const real *x = &logits[i * Vp], most = *std::max_element(x, x + V);
        auto p = [=](int v) {
            return in_powers_of_2 ? num_power((wide)x[v], (wide)most) : num_exp(Num(x[v]) - most);
        };
        Num sum = sum_of(V, p), one = (wide)1;
        const Num logarithm = num_log(sum);
        // Add the errors of LN_2 shift and of logf, which is accurate to 1 ulp rather than 0.5 ulp.
        const Num top = in_powers_of_2 ? Num(most, (1 + LN_2_ERROR) * unit * size(most) +
                                                       unit * size(logarithm.v)) : Num(most);
        losses->push_back(logarithm + top - x[targets[i]]);
        for (int v = 0; v < V; v++) {
            Num part = p(v) / sum;
            // rcp and two multiplications instead of the division and multiplication counted here
            part.e += in_powers_of_2 ? 2 * unit * size(part.v) : 0;
            (*dlogits)[i * Vp + v] = (part - (v == targets[i] ? one : Num())) * dloss;
        }
    }
}

// Losses and dlogits agree with the reference; padded dlogits are 0; forward-only, losses agree.
TEST(classifier, ALL) {
    static const int shapes[][2] = {{1, 1}, {5, 2}, {7, 257}, {3, 65535}, {33, 128}};  // rows, V
    for (auto &shape : shapes) {
        const int rows = shape[0], V = shape[1], Vp = (int)round_up_i64(V, 128);
        Reals logits = noise(rows * Vp, 3, 1), losses(rows), again = logits, forward(rows);
        std::vector<Token> targets = Batch(rows, V, 2).targets;
        const real dloss = (real)0.37;
        Nums want, want_d(logits.size());  // padding: 0, tolerance 0
        naive_classifier(&want, &want_d, logits, targets, dloss, V, Vp);
        classifier_forward_backward(losses.data(), logits.data(), targets.data(), dloss, rows, V,
                                    Vp);
        classifier_forward_backward(forward.data(), again.data(), targets.data(), 0, rows, V, Vp);
        compare(losses, want, "losses rows %d V %d", rows, V);
        compare(logits, want_d, "dlogits rows %d V %d", rows, V);
        expect(same_bits(losses, forward), "rows %d V %d", rows, V);
    }
}

// Derivatives.
// Fourth-order central differences in double have a truncation error of h^4 f^(5) / 30 = 3e-14
// f^(5) and a rounding error of about 1e-16 |f| / h = 1e-13 |f|, so a correct gradient agrees to
// about 1e-10 of its size.

#if GPT2_DOUBLE
typedef std::function<double()> Loss;

// Returns the derivative of `loss` in the direction in which `move` displaces the parameters.
static double slope(const Loss &loss, const std::function<void(double)> &move) {
    const double h = 1e-3;
    double f[4];
    static const int steps[] = {1, -1, 2, -2};
    for (int k = 0; k < 4; k++) {
        move(h * steps[k]);
        f[k] = loss();
    }
    move(0);
    return (8 * (f[0] - f[1]) - (f[2] - f[3])) / (12 * h);
}

// For each of the sixteen tensors of the network (all layers at once), gradients match the slope of
// the loss along two random unit directions and along a dozen single elements.
TEST(derivatives_network, DOUBLE) {
    Model m = shape("l2h3c48t8", 257);
    Net n(m, 2, 7, RECOMPUTE_MLP, 1, 5);
    Batch b(14, 257, 1);
    n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
    const Reals g = n.gradients(), start = n.state(BUF_WEIGHTS);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        std::vector<size_t> elements;  // of this tensor, in the flat buffer
        double squares = 0;
        for (int l = 0; l < tensor_copies(&m, tensor); l++) {
            for (int64_t i = 0; i < tensor_size(&m, tensor); i++) {
                elements.push_back((size_t)(tensor_offset(&m, tensor, l) + i));
                squares += g[elements.back()] * g[elements.back()];
            }
        }
        const size_t count = elements.size();
        const double typical = sqrt(squares / (double)count);  // typical slope in a direction
        for (size_t sample = 0; sample < 14; sample++) {
            Reals direction =
                sample < 2 ? noise(count, 1 / sqrt((double)count), 77 + sample) : Reals(count);
            if (sample >= 2) {
                direction[sample * 7919 % count] = 1;
            }
            double want = 0;
            for (size_t i = 0; i < count; i++) {
                want += direction[i] * g[elements[i]];
            }
            Reals moved = start;
            double found =
                slope([&] { return n.e.forward_loss(&n.e, NULL, &b.inputs[0], &b.targets[0]); },
                      [&](double by) {
                          for (size_t i = 0; i < count; i++) {
                              moved[elements[i]] = start[elements[i]] + by * direction[i];
                          }
                          n.set_state(BUF_WEIGHTS, moved);
                      });
            // The loss is about 6: rounding error 6e-13, truncation error of the same order.
            expect_near(want, found, 4e-12 + 1e-8 * typical, "%s, direction %zu (size %.1e)",
                        tensor_table[tensor].name, sample, typical);
        }
    }
}
#endif
