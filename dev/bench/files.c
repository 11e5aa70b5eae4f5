// files.c: speed of writing and reading model files, compared with dd on the same disk.
//
// Prints medians of one run for GPT-2 124M in fp32 (498 MB): model.safetensors written, synced and
// hashed; loaded with its pages in memory and, if the system's cache can be dropped (as root), from
// disk; dd writing (conv=fsync) and reading as much; SHA-256 alone; a whole checkpoint, its
// verification, and verification plus loading. Rates refer to the bytes of the files. Ratios above
// 1 are faster than dd.
//
// Build and run: make bench. Writes 2.5 GB of files to a folder in $TMPDIR or /tmp.

#define GPT2_NO_MAIN 1
#include "../../train_gpt2.c"

enum { REPEATS = 7 };
enum {
    DD_WRITE, SAVE, LOAD, DD_READ_COLD, LOAD_COLD, HASH, CHECKPOINT, VERIFY, RESUME, MEASURES
};
static const char *const measure_names[MEASURES] = {
    "dd writes and syncs",  "model.safetensors written", "... loaded, in memory",
    "dd reads, from disk",  "... loaded, from disk",     "SHA-256 alone",
    "checkpoint saved",     "... verified",              "... verified and loaded"};
static double times[MEASURES][REPEATS];

static void dd(const char *options) {
    char command[2 * PATH_BYTES];
    snprintf(command, sizeof command, "dd bs=1M %s 2> /dev/null", options);
    check(system(command) == 0, "dd does not run: %s", command);
}

static int drop_cache(void) {
    return system("sync && { echo 3 > /proc/sys/vm/drop_caches; } 2> /dev/null") == 0;
}

static double load(Engine *e, const char *folder) {
    double began = now_ms();
    ModelFile f;
    model_file_open(&f, folder);
    model_file_load(e, &f);
    model_file_close(&f);
    return now_ms() - began;
}

// Prints a line per measurement, for a model and a checkpoint of these sizes.
static void print_rates(double megabytes, double all_megabytes) {
    printf("GPT-2 124M in fp32: model of %.0f MB, checkpoint of %.0f MB; medians of %d runs, "
           "%d threads\n", megabytes, all_megabytes, REPEATS, thread_count());
    for (int i = 0; i < MEASURES; i++) {
        double ms = median(times[i], REPEATS), size = i < CHECKPOINT ? megabytes : all_megabytes;
        if (ms > 0) {
            printf("%-27s %7.0f ms  %5.2f GB/s", measure_names[i], ms, size / ms);
            int dd = i == SAVE ? (int)DD_WRITE : i == LOAD_COLD ? (int)DD_READ_COLD : -1;
            printf(dd >= 0 ? "  %.2f of dd's rate\n" : "\n",
                   dd >= 0 ? median(times[dd], REPEATS) / ms : 0.0);
        }
    }
}

int main(void) {
    Options o;
    Settings s;
    Plan p;
    Engine e;
    static Writer w;
    static RunState state;
    char folder[PATH_BYTES], path[PATH_BYTES], options[PATH_BYTES], problem[PATH_BYTES];
    const char *base = getenv("TMPDIR");
    path_print(folder, "%s/bench_files.XXXXXX", base ? base : "/tmp");
    check(mkdtemp(folder), "cannot make a folder for the files");
    Model m;
    options_default(&o);
    o.batch = 1;
    o.seq_len = 64;
    o.quiet = 1;
    model_parse(&m, "d12");
    model_set_vocabulary(&m, GPT2_VOCABULARY);
    settings_from_options(&s, &o, &m, 0);
    plan_build(&p, &s);
    cpu_open(&e, &p);
    engine_initialise(&e, &m, 42);
    int cold = drop_cache();
    double megabytes = 0, all_megabytes = 0, began;
    const Snapshot snapshot = {&e, &s, &o, "bench", &state, NULL, 0, {NULL, NULL}};
    for (int r = 0; r < REPEATS; r++) {
        began = now_ms();
        writer_open(&w, folder, "model.safetensors");
        model_file_save(&e, &m, FILE_F32, &w);
        writer_close(&w);
        times[SAVE][r] = now_ms() - began;
        megabytes = (double)w.bytes * 1e-6;
        path_print(options, "if=/dev/zero of=%s/dd count=%.0f conv=fsync", folder,
                   megabytes * 1e6 / (1 << 20));
        began = now_ms();
        dd(options);
        times[DD_WRITE][r] = now_ms() - began;
        writer_open(&w, folder, "config.json");
        config_save(&m, NULL, &w);
        writer_close(&w);
        times[LOAD][r] = load(&e, folder);
        if (cold) {
            drop_cache();
            times[LOAD_COLD][r] = load(&e, folder);
            drop_cache();
            path_print(options, "if=%s/%s of=/dev/null", folder, "model.safetensors");
            began = now_ms();
            dd(options);
            times[DD_READ_COLD][r] = now_ms() - began;
        }
        began = now_ms();
        sha256_add(&w.sha, buffer(&p, BUF_WEIGHTS), (size_t)(megabytes * 1e6));
        times[HASH][r] = now_ms() - began;
        began = now_ms();
        checkpoint_save(&snapshot, folder, path);
        times[CHECKPOINT][r] = now_ms() - began;
        all_megabytes = megabytes + 2e-6 * (double)(tensor_offset(&m, TENSORS, 0) * 4);
        began = now_ms();
        const int ranks = checkpoint_is_whole(path, problem);
        check(ranks, "%s", problem);
        times[VERIFY][r] = now_ms() - began;
        checkpoint_load(&snapshot, &state, path, ranks);
        times[RESUME][r] = now_ms() - began;
    }
    print_rates(megabytes, all_megabytes);
    checkpoint_remove(path);
    path_print(path, "%s/dd", folder);
    unlink(path);
    checkpoint_remove(folder);
    e.close(&e);
    plan_free(&p);
    return 0;
}
