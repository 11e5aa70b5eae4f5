// cpu.c: speed of the CPU program's parts, compared with oneDNN.
//
// Prints, from one run: the matmuls of a training step of GPT-2 124M at 256 and at 1024 rows and
// those of a small character model, ours and oneDNN's (repetitions interleaved, medians);
// attention; whole steps. Quote ratios: absolute times mean something only together
// with the machine, and neither means anything if other programs use its cores.
//
// Build: make bench. By hand, without oneDNN (with it: -DBENCH_DNNL=1, and -ldnnl at the end):
//   gcc -std=c11 -O3 -march=native -ffp-contract=off -fno-math-errno -fopenmp dev/bench/cpu.c
//       -o bench_cpu -lm

#define GPT2_NO_MAIN 1
#include "../../train_gpt2.c"

#ifndef BENCH_DNNL
#define BENCH_DNNL 0
#endif
#if BENCH_DNNL
#include "oneapi/dnnl/dnnl.h"
#endif

enum { MAX_REPEATS = 15, BIGGEST = 50304, CHANNELS = 768, MOST_ROWS = 1024 };

// A linear layer inp(rows,C) -> (rows,OC) and how often it occurs in a step.
typedef struct {
    const char *name;
    int C, OC, per_step;
} LayerShape;

static const LayerShape layers_124m[] = {
    {"qkv", 768, 2304, 12},    {"attproj", 768, 768, 12},       {"fc", 768, 3072, 12},
    {"fcproj", 3072, 768, 12}, {"classifier", 768, BIGGEST, 1},
};

static const LayerShape layers_characters[] = {
    {"qkv", 128, 384, 4},    {"attproj", 128, 128, 4},    {"fc", 128, 512, 4},
    {"fcproj", 512, 128, 4}, {"classifier", 128, 384, 1},
};

enum { FORWARD, DINP, DWEIGHT, MATMULS };

static const char *const matmul_names[MATMULS] = {"forward", "dinp", "dweight"};

// The arrays that all benchmarks use: activations, their gradients, weights.
static real *bench_x, *bench_y, *bench_w;

static real *bench_array(size_t n) {
    real *p = (real *)aligned_alloc(64, (n * sizeof(real) + 63) / 64 * 64);
    if (!p) {
        fprintf(stderr, "bench_cpu: no memory for %zu numbers\n", n);
        exit(1);
    }
    for (size_t i = 0; i < n; i++) {
        p[i] = (real)0.01 * (real)(int)(i % 13) - (real)0.06;
    }
    return p;
}

static int doubles_compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

// Returns the median of values[0..n), which it sorts.
static double median(double *values, int n) {
    qsort(values, (size_t)n, sizeof *values, doubles_compare);
    return values[n / 2];
}

// One matmul of a linear layer: forward writes y, dinp writes y from x, dweight adds to w.
typedef struct {
    Operand a, b;  // rows along k of the benchmark's arrays
    real *out;
    const real *addend;
    int M, N, K;
} Matmul;

static Matmul matmul_of(int which, int rows, int C, int OC) {
    real *x = bench_x, *y = bench_y, *w = bench_w;
    const size_t c = (size_t)C, oc = (size_t)OC;
    const Matmul all[MATMULS] = {
        {operand(x, c, 1), operand(w, c, 1), y, NULL, rows, OC, C},
        {operand(x, oc, 1), operand(w, 1, c), y, NULL, rows, C, OC},
        {operand(x, 1, oc), operand(y, 1, c), w, w, OC, C, rows},
    };
    return all[which];
}

// Times our matmul with a team of threads that are awake, as in a step. Returns ms.
static double time_ours(const Matmul *p) {
    double ms = 0;
    #pragma omp parallel
    #pragma omp master
    {
        for (double began = now_ms(), start = began; ms == 0 || start < began + 0.2;) {
            start = now_ms();
            matmul(p->out, p->a, p->b, NULL, p->addend, p->M, p->N, p->K);
            tasks_wait();
            ms = now_ms() - start;
        }
    }
    return ms;
}

// oneDNN's matmul; 0 if this program is built without it.
static double time_sgemm(const Matmul *p) {
#if BENCH_DNNL
    const int a_plain = p->a.k_step == 1, b_plain = p->b.k_step != 1;
    const double start = now_ms();
    dnnl_sgemm(a_plain ? 'N' : 'T', b_plain ? 'N' : 'T', p->M, p->N, p->K, 1, p->a.data,
               (dnnl_dim_t)(a_plain ? p->a.row_step : p->a.k_step), p->b.data,
               (dnnl_dim_t)(b_plain ? p->b.k_step : p->b.row_step), p->addend ? 1 : 0, p->out,
               p->N);
    return now_ms() - start;
#else
    (void)p;
    return 0;
#endif
}

// Prints the table of one model's matmuls at one row count and the sum over a step. Returns
// oneDNN's ms of a step.
static double bench_matmuls(const char *title, const LayerShape *layers, int n, int rows) {
    double flops = 0, sum_ours = 0, sum_dnnl = 0;
    printf("\n%s, %d rows: ms\n", title, rows);
    printf("%-11s %-8s %9s %9s %6s %8s\n", "layer", "matmul", "ours", "oneDNN", "ratio", "GFLOP/s");
    for (int i = 0; i < n * MATMULS; i++) {
        const LayerShape *l = &layers[i / MATMULS];
        const Matmul p = matmul_of(i % MATMULS, rows, l->C, l->OC);
        const double work = 2.0 * rows * l->C * l->OC;
        const int repeats = work > 5e10 ? 3 : work > 5e9 ? 7 : MAX_REPEATS;
        double ours[MAX_REPEATS], dnnl[MAX_REPEATS];
        // Repeated sums would grow to infinities and denormals, which slow down any matmul.
        for (size_t k = 0; k < (size_t)rows * (size_t)(l->C > l->OC ? l->C : l->OC); k++) {
            bench_x[k] = bench_y[k] = (real)0.05;
        }
        for (int r = 0; r < repeats; r++) {
            ours[r] = time_ours(&p);
            dnnl[r] = time_sgemm(&p);
        }
        const double a = median(ours, repeats), b = median(dnnl, repeats);
        printf("%-11s %-8s %9.3f %9.3f %6.2f %8.0f\n", l->name, matmul_names[i % MATMULS], a, b,
               b > 0 ? a / b : 0, 1e-6 * work / a);
        fflush(stdout);
        sum_ours += a * l->per_step;
        sum_dnnl += b * l->per_step;
        flops += work * l->per_step;
    }
    printf("%-20s %9.1f %9.1f %6.2f %8.0f\n", "step", sum_ours, sum_dnnl,
           sum_dnnl > 0 ? sum_ours / sum_dnnl : 0, 1e-6 * flops / sum_ours);
    return sum_dnnl;
}

static void bench_attention(int B, int T, int NH, int HS) {
    enum { REPEATS = 9 };
    int C = NH * HS;
    size_t out_size = (size_t)B * T * C;
    real *qkv = bench_x, *dqkv = bench_y;
    real *out = bench_w, *dout = out + out_size, *lse = dout + out_size;
    double forward[REPEATS], backward[REPEATS];
    for (size_t i = 0; i < 3 * out_size; i++) {
        qkv[i] = (real)0.01 * (real)(int)(i % 11) - (real)0.05;
    }
    for (int r = 0; r < REPEATS; r++) {
        double start = now_ms();
        attention_forward(out, lse, qkv, B, T, C, NH);
        double middle = now_ms();
        attention_backward(dqkv, dout, qkv, out, lse, B, T, C, NH);
        forward[r] = middle - start;
        backward[r] = now_ms() - middle;
    }
    // Half of the T x T scores count, because the causal mask skips the rest.
    double f = median(forward, REPEATS), b = median(backward, REPEATS);
    double flops = 2.0 * B * NH * HS * T * T;
    printf("attention B%d T%d NH%d HS%d: forward %.3f ms (%.0f GFLOP/s), backward %.3f ms (%.0f)\n",
           B, T, NH, HS, f, 1e-6 * flops / f, b, 2.5e-6 * flops / b);
}

// Times training steps of a model at B x T. Prints tokens/s, the update's time and, with oneDNN,
// that of all matmuls in it (dnnl_ms).
static void bench_step(const char *name, int B, int T, double dnnl_ms) {
    enum { WARM = 1, STEPS = 5 };
    double step[STEPS], update[STEPS];
    Options o;
    Model m;
    Settings s;
    Plan p;
    Engine e;
    options_default(&o);
    o.batch = B;
    o.seq_len = T;
    model_set_vocabulary(&m, model_parse(&m, name) == MODEL_PRESET ? GPT2_VOCABULARY
                                                                   : BYTE_VOCABULARY);
    settings_from_options(&s, &o, &m, 0);
    plan_build(&p, &s);
    cpu_open(&e, &p);
    engine_initialise(&e, &m, 1);
    Token *tokens = (Token *)alloc_zero((size_t)B * (size_t)T, sizeof(Token));
    for (int i = 0; i < B * T; i++) {
        tokens[i] = (Token)((unsigned)i * 7919u % (unsigned)m.V);
    }
    for (int k = -WARM; k < STEPS; k++) {
        double start = now_ms();
        e.micro_step(&e, tokens, tokens, 0, 1);
        double middle = now_ms();
        e.update(&e, &o, 1e-4, HUGE_VAL, k + WARM);
        step[k < 0 ? 0 : k] = now_ms() - start;
        update[k < 0 ? 0 : k] = now_ms() - middle;
    }
    const double ms = median(step, STEPS);
    printf("%s B %d T %d: step %.1f ms, %.0f tokens/s; update %.1f ms; oneDNN's matmuls %.1f ms\n",
           name, B, T, ms, 1e3 * B * T / ms, median(update, STEPS), dnnl_ms);
    fflush(stdout);
    free(tokens);
    e.close(&e);
    plan_free(&p);
}

int main(int argc, char **argv) {
    enum { COUNT_124M = sizeof layers_124m / sizeof layers_124m[0] };
    enum { COUNT_CHARACTERS = sizeof layers_characters / sizeof layers_characters[0] };
    (void)argc;
    threads_start(argv);
    matmul_workspace = bench_array(matmul_workspace_bytes(thread_count()) / sizeof(real));
    bench_x = bench_array((size_t)MOST_ROWS * BIGGEST);
    bench_y = bench_array((size_t)MOST_ROWS * BIGGEST);
    bench_w = bench_array((size_t)CHANNELS * BIGGEST);
    printf("%d threads%s\n", thread_count(), BENCH_DNNL ? "" : ", without oneDNN: its times are 0");
    const double dnnl[3] = {
        bench_matmuls("GPT-2 124M", layers_124m, COUNT_124M, 256),
        bench_matmuls("GPT-2 124M", layers_124m, COUNT_124M, MOST_ROWS),
        bench_matmuls("characters L4 C128", layers_characters, COUNT_CHARACTERS, 768)};
    printf("\n");
    #pragma omp parallel
    #pragma omp master
    {
        bench_attention(4, 64, 12, 64);
        bench_attention(1, 1024, 12, 64);
        bench_attention(12, 64, 4, 32);
    }
    bench_step("d12", 4, 64, dnnl[0]);
    bench_step("d12", 1, 1024, dnnl[1]);
    bench_step("l4h4c128t64", 12, 64, dnnl[2]);
    return 0;
}
