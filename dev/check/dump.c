// dump.c: writes the CPU program's numbers as raw arrays, for comparison by
// dev/check/against_torch.py.
//
// Takes a model from -e, its weights from its file or from the seed, and runs optimizer steps like
// the training loop: the same micro-steps, schedule and update, through the same engine. It writes
// every tensor of every step, so it is meant for small models.
//
//   build/dump FOLDER VOCABULARY [options of train_gpt2]
//
// VOCABULARY: for a shape; a file has its own. 0: that of the data, or of the preset.
// Reads from FOLDER, if they exist:
//   weights.bin   weights to start from, laid out as index.txt says
//   tokens.bin    int32: inputs (B,T), then targets (B,T), of every micro-step; otherwise the
//                 batches come from -i, as in a run
// Writes to FOLDER, little-endian; `N` is the step from 1, weights-0 are the initial weights:
//   index.txt     a line per tensor: name, layer, rows, columns, offset in elements
//   weights-N.bin m-N.bin v-N.bin grads-N.bin   flat fp32 buffers
//   tokens-N.bin  the batches of step N, as in tokens.bin
//   logits.bin    (B,T,V) of the first micro-step before the first update, row by row by the
//                 engine's logits(), which sampling uses
//   steps.txt     a line per step: step, loss, gradient norm, learning rate, loss of the first
//                 micro-step by forward_loss(), which validation uses, before the update
//
// Build: make build/dump

#define GPT2_NO_MAIN 1
#include "../../train_gpt2.c"

static const char *const state_names[] = {"weights", "m", "v", "grads"};

static FILE *dump_create(const char *folder, const char *name) {
    char path[PATH_BYTES];
    path_print(path, "%s/%s", folder, name);
    FILE *f = fopen(path, "wb");
    if (!f) {
        die("cannot create %s: %s", path, strerror(errno));
    }
    return f;
}

static void dump_close(FILE *f, const char *name) {
    int failed = ferror(f);
    if (fclose(f) != 0 || failed) {
        die("cannot write %s: %s", name, strerror(errno));
    }
}

// Opens folder/name for reading; NULL if it does not exist.
static FILE *dump_find(const char *folder, const char *name) {
    char path[PATH_BYTES];
    path_print(path, "%s/%s", folder, name);
    return fopen(path, "rb");
}

static void dump_index(const char *folder, const Model *m) {
    FILE *f = dump_create(folder, "index.txt");
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        const TensorEntry *row = &tensor_table[tensor];
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            int64_t cols = tensor_cols(m, tensor), rows = tensor_size(m, tensor) / cols;  // padded
            fprintf(f, "%s %d %" PRId64 " %" PRId64 " %" PRId64 "\n", row->name, l, rows, cols,
                    tensor_offset(m, tensor, l));
        }
    }
    dump_close(f, "index.txt");
}

// Writes one flat state buffer of the engine to NAME-N.bin.
static void dump_state(const char *folder, Engine *e, const Model *m, int state, int64_t step) {
    char name[64];
    snprintf(name, sizeof name, "%s-%" PRId64 ".bin", state_names[state], step);
    FILE *f = dump_create(folder, name);
    real *piece = (real *)alloc_zero(PIECE, sizeof(real));
    int64_t all = tensor_offset(m, TENSORS, 0);
    for (int64_t i = 0; i < all; i += PIECE) {
        int64_t count = min_i64(PIECE, all - i);
        e->read(e, state, i, piece, count);
        fwrite(piece, sizeof(real), (size_t)count, f);
    }
    free(piece);
    dump_close(f, name);
}

// Loads weights from folder/weights.bin, if it exists.
static void dump_take_weights(const char *folder, Engine *e, const Model *m) {
    FILE *f = dump_find(folder, "weights.bin");
    if (!f) {
        return;
    }
    real *piece = (real *)alloc_zero(PIECE, sizeof(real));
    int64_t all = tensor_offset(m, TENSORS, 0);
    for (int64_t i = 0; i < all; i += PIECE) {
        int64_t count = min_i64(PIECE, all - i);
        if (fread(piece, sizeof(real), (size_t)count, f) != (size_t)count) {
            die("%s/weights.bin ends before its %" PRId64 " numbers", folder, all);
        }
        e->write(e, STATE_WEIGHTS, i, piece, count);
    }
    free(piece);
    fclose(f);
}

// Writes the logits of every position of the batch inputs (B,T), each from the tokens up to it.
static void dump_logits(const char *folder, Run *run) {
    const Settings *s = &run->s;
    const int V = s->model.V;
    real *row = (real *)alloc_zero((size_t)V, sizeof(real));
    FILE *f = dump_create(folder, "logits.bin");
    for (int b = 0; b < s->B; b++) {
        for (int t = 0; t < s->T; t++) {
            run->engine.logits(&run->engine, row, run->inputs + (int64_t)b * s->T, t + 1);
            fwrite(row, sizeof(real), (size_t)V, f);
        }
    }
    free(row);
    dump_close(f, "logits.bin");
}

// Reads the next micro-batch into run->inputs and run->targets: from `tokens`, or from the data.
static void dump_batch(Run *run, FILE *tokens, int accum_step) {
    const Settings *s = &run->s;
    size_t batch = (size_t)s->B * (size_t)s->T;
    if (!tokens) {
        if (!dataset_batch(&run->train, run->state.position + (int64_t)accum_step * s->B, s->B,
                           run->inputs, run->targets)) {
            die("%s", run->train.problem);
        }
        return;
    }
    if (fread(run->inputs, sizeof(Token), 2 * batch, tokens) != 2 * batch) {
        die("tokens.bin ends in step %" PRId64, run->state.step + 1);
    }
    for (size_t i = 0; i < 2 * batch; i++) {
        if (run->inputs[i] < 0 || run->inputs[i] >= s->model.V) {
            die("tokens.bin: token %d is outside the vocabulary of %d", run->inputs[i], s->model.V);
        }
    }
}

// One optimizer step like run_step's, with everything written out.
static void dump_step(const char *folder, Run *run, FILE *tokens, FILE *steps) {
    const Options *o = &run->o;
    const Settings *s = &run->s;
    Engine *e = &run->engine;
    char name[64];
    double lr = learning_rate(o, run->state.step, run->steps), evaluated = 0;
    snprintf(name, sizeof name, "tokens-%" PRId64 ".bin", run->state.step + 1);
    FILE *used = dump_create(folder, name);
    for (int accum_step = 0; accum_step < run->accum_steps; accum_step++) {
        dump_batch(run, tokens, accum_step);
        fwrite(run->inputs, sizeof(Token), 2 * (size_t)s->B * (size_t)s->T, used);
        if (run->state.step == 0 && accum_step == 0) {
            dump_logits(folder, run);
        }
        if (accum_step == 0) {
            evaluated = e->forward_loss(e, NULL, run->inputs, run->targets);
        }
        e->micro_step(e, run->inputs, run->targets, accum_step, run->accum_steps);
    }
    dump_close(used, name);
    StepResult r = e->update(e, o, lr, HUGE_VAL, run->state.updates);
    run->state.position += run->windows_per_step;
    run->state.step++;
    run->state.updates++;
    fprintf(steps, "%" PRId64 " %.9g %.9g %.9g %.9g\n", run->state.step, r.loss, r.norm, lr,
            evaluated);
    for (int state = 0; state <= STATE_GRADS; state++) {
        dump_state(folder, e, &s->model, state, run->state.step);
    }
}

// Opens model, plan, engine and weights from the options.
static void dump_open(const char *folder, Run *run, int vocabulary) {
    Options *o = &run->o;
    Model m;
    const ModelKind kind = model_parse(&m, o->model);
    if (kind == MODEL_FILE) {
        model_file_open(&run->weights, o->model);
        m = run->weights.model;
    }
    int64_t T = o->seq_len ? o->seq_len : m.maxT;
    if (o->train_data) {
        dataset_open(&run->train, o->train_data, (int)min_i64(T, m.maxT));
        run->train.shuffle = (int)o->shuffle;
        run->train.seed = (uint64_t)o->seed;
    }
    model_vocabulary(&m, kind, o, run->train.shards ? &run->train : NULL);
    if (vocabulary && kind != MODEL_FILE) {
        model_set_vocabulary(&m, vocabulary);
    }
    settings_from_options(&run->s, o, &m, 0);
    int64_t tokens = (int64_t)run->s.B * run->s.T;
    run->accum_steps = (int)((o->tokens_per_step ? o->tokens_per_step : tokens) / tokens);
    run->windows_per_step = (int64_t)run->accum_steps * run->s.B;
    run->steps = o->steps;
    run->inputs = (Token *)alloc_zero(2 * (size_t)tokens, sizeof(Token));
    run->targets = run->inputs + tokens;
    plan_build(&run->plan, &run->s);
    cpu_open(&run->engine, &run->plan);
    if (kind == MODEL_FILE) {
        model_file_load(&run->engine, &run->weights);
        model_file_close(&run->weights);
    } else {
        engine_initialise(&run->engine, &m, (uint64_t)o->seed);
    }
    dump_take_weights(folder, &run->engine, &m);
}

int main(int argc, char **argv) {
    static Run run;
    program_name = "dump";
    if (argc < 3) {
        die("usage: dump FOLDER VOCABULARY [options of train_gpt2]");
    }
    const char *folder = argv[1];
    options_parse(&run.o, argc - 2, argv + 2);
    if (!run.o.model || !run.o.steps) {
        die("--model (-e) and --steps (-x) are needed");
    }
    dump_open(folder, &run, atoi(argv[2]));
    dump_index(folder, &run.s.model);
    dump_state(folder, &run.engine, &run.s.model, STATE_WEIGHTS, 0);
    FILE *tokens = dump_find(folder, "tokens.bin");
    if (!tokens && !run.train.shards) {
        die("neither %s/tokens.bin nor --train-data (-i) brings tokens", folder);
    }
    FILE *steps = dump_create(folder, "steps.txt");
    while (run.state.step < run.steps) {
        dump_step(folder, &run, tokens, steps);
    }
    dump_close(steps, "steps.txt");
    if (tokens) {
        fclose(tokens);
    }
    run.engine.close(&run.engine);
    plan_free(&run.plan);
    free(run.inputs);
    return 0;
}
