// data/checkpoint.c -- saves, verifies, prunes and loads checkpoints.
//
// Part of train_gpt2.c (chapter Weights and checkpoints). Nothing in a checkpoint is trusted.
// Sizes, names and hashes are verified before anything is allocated or loaded.
//
// A checkpoint is a folder step-NNNNNNNN in the output folder. It contains:
//   model.safetensors, config.json   the weights, which transformers can load unchanged
//   state-R-of-N.safetensors         the rest of rank R's training state: counters, options, and
//                                    ranges of both moments and, for bf16 weights, of the low
//                                    halves of the fp32 masters
//   manifest.json                    the size and SHA-256 of every other file
//   merges.txt, vocab.json, tokenizer_config.json
//                                    the tokenizer, unless tokens are bytes or GPT-2's files were
//                                    not found; fine-tuning instead copies these and up to five
//                                    other files from the folder of the original weights
//
// For two ranks and a model with two blocks (buckets 3 and 4), rank 0's state file has this header:
//
//     "__metadata__": {"run": text that a resumed run must match, "matmul": kernel choices,
//                      "--lr": "0.001", ..., "train_hash": fingerprint of the training data,
//                      "step": "2000", ...}, "norms": {"dtype": "F64", "shape": [128], ...},
//     "m.0.0": {"dtype": "F32", "shape": [elements], ...}, ..., "m.4.0": ..., "v.0.0": ...
//
// In rank 1's file, "m.4.24576" (bucket 4, starting at element 24576) replaces "m.4.0".
//
// 1. A checkpoint is written to a ".tmp" folder, which is renamed after every file and the folder
//    are synced. A folder with the final name is therefore complete, even after a power failure. A
//    ".tmp" folder is never read, and the next run with this output folder removes it.
// 2. A run resumes from the newest checkpoint in which every file matches the manifest. Saving step
//    N again removes a damaged step-N, or renames it to step-N.damaged if it contains other files.
// 3. The engine copies states in chunks, so saving needs extra memory for only one tensor per rank.
// 4. The ranges in each file and their order depend only on the model and on the number of ranks
//    that saved it (chapter Sharding and offload). Any number of ranks can load a checkpoint.
// 5. All N ranks write at the same time, each 1/N of every bucket. Only rank 0 creates, renames and
//    removes folders and writes the other files. After each phase, the ranks exchange their status.
//    If one has failed, all ranks exit and the previous checkpoint is kept.

// The files of a checkpoint. Each rank of the run that saved it has one state file.
enum {
    FILE_MODEL, FILE_CONFIG, FILE_EXTRA, EXTRA_FILES = 8, FILE_MANIFEST = FILE_EXTRA + EXTRA_FILES,
    FILE_STATE, MAX_RANKS = 1024, CHECKPOINT_FILES = FILE_STATE + MAX_RANKS, FILE_NAME = 48
};

// Writes the name of a file. FILE_STATE + r is the state file of rank r, 0 <= r < ranks.
static void file_name(char name[FILE_NAME], int file, int ranks) {
    static const char *const names[FILE_STATE] = {
        "model.safetensors", "config.json", "merges.txt", "vocab.json", "tokenizer_config.json",
        "tokenizer.json", "added_tokens.json", "special_tokens_map.json", "generation_config.json",
        "chat_template.jinja", "manifest.json"};
    if (file < FILE_STATE) {
        snprintf(name, FILE_NAME, "%s", names[file]);
    } else {
        snprintf(name, FILE_NAME, "state-%d-of-%d.safetensors", file - FILE_STATE, ranks);
    }
}

// Returns the file (FILE_MODEL, ...) with this name, or -1 if checkpoints have no such file. Sets
// *ranks to the number of ranks in the name of a state file, or to 0 for other files.
static int file_find(const char *name, int *ranks) {
    char text[FILE_NAME];
    // The name must equal the one formatted from its numbers, which rules out signs, spaces and
    // leading zeros.
    int rank = 0, file = 0, last = FILE_STATE;
    *ranks = 0;
    if (sscanf(name, "state-%4d-of-%4d", &rank, ranks) == 2) {
        const int is_rank = rank >= 0 && rank < *ranks && *ranks <= MAX_RANKS;
        file = FILE_STATE + (is_rank ? rank : 0);
        last = file + is_rank;
    }
    for (; file < last; file++) {
        file_name(text, file, *ranks);
        if (strcmp(text, name) == 0) {
            return file;
        }
    }
    return -1;
}

// Removes a checkpoint folder, or the link if it is a symbolic link. The manifest is removed first
// so that the folder does not look complete if the process is killed midway.
static void checkpoint_remove(const char *folder) {
    char path[PATH_BYTES];
    if (readlink(folder, path, sizeof path) >= 0) {
        unlink(folder);
        return;
    }
    DIR *files = opendir(folder);  // the manifest, with the number of ranks, may be missing
    struct dirent *entry;
    int ranks;
    path_print(path, "%s/manifest.json", folder);
    unlink(path);
    while (files && (entry = readdir(files)) != NULL) {
        if (file_find(entry->d_name, &ranks) >= 0) {
            path_print(path, "%s/%s", folder, entry->d_name);
            unlink(path);
        }
    }
    if (files) {
        closedir(files);
    }
    rmdir(folder);
}

// The state of a run, excluding tensors. No generator state is needed because random numbers depend
// only on the seed and these values.
typedef struct {
    int64_t step, updates, position, skipped;  // position: sequences read (chapter Data)
    int64_t pending_validation;  // 1 if a signal interrupted the validation after `step`
    int64_t loss_scale_log2, loss_scale_steps;  // fp16 only; steps since it changed
    int64_t best_loss;  // lowest validation loss of a checkpoint in 1e-9 nats, or 0
    int64_t lowest_loss, stale;  // of all validations; validations since then (--patience)
    int64_t lowest_step, validated, lr;  // a hash of the validated tokens; of the last step, x 1e15
    NormWindow norms;
} RunState;

static const struct {
    const char *name;
    size_t offset;
} counter_rows[] = {  // counters added later stand last; without them they are 0
    {"step", offsetof(RunState, step)}, {"skipped", offsetof(RunState, skipped)},
    {"updates", offsetof(RunState, updates)}, {"position", offsetof(RunState, position)},
    {"norm_count", offsetof(RunState, norms.count)},
    {"pending_validation", offsetof(RunState, pending_validation)},
    {"loss_scale_log2", offsetof(RunState, loss_scale_log2)},
    {"loss_scale_steps", offsetof(RunState, loss_scale_steps)},
    {"best_loss", offsetof(RunState, best_loss)}, {"lowest_loss", offsetof(RunState, lowest_loss)},
    {"stale", offsetof(RunState, stale)}, {"lowest_step", offsetof(RunState, lowest_step)},
    {"validated", offsetof(RunState, validated)}, {"lr", offsetof(RunState, lr)}};
enum { COUNTERS_REQUIRED = 5, COUNTERS = sizeof counter_rows / sizeof *counter_rows };

static int64_t *counter(RunState *state, int i) {
    return (int64_t *)(void *)((char *)state + counter_rows[i].offset);
}

// Writes the identity of a run, which a resumed run must match: properties of the model and data,
// and the options marked SAME in option_rows.
enum { IDENTITY_BYTES = 512 };
static void run_identity(char identity[IDENTITY_BYTES], const Settings *s, const Options *o,
                         const Dataset *d) {
    const Model *m = &s->model;
    uint64_t data = 0;
    for (int i = 0; i < d->shard_count; i++) {  // a sample of the tokens distinguishes datasets
        const Shard *shard = &d->shards[i];
        for (int64_t k = 0; k < 256; k++) {
            uint16_t token = 0;
            const char *fault = shard_read(shard, &token, k * shard->count / 256, 1);
            if (fault) {
                die("cannot read token file %s: %s", shard->path, fault);
            }
            data = hash_u64(data + (uint64_t)shard->count + token);
        }
    }
    int n = snprintf(identity, IDENTITY_BYTES,
                     "shape l%dh%dc%dt%d vocabulary %d sequence %d windows %" PRId64
                     " data %016" PRIx64,
                     m->L, m->NH, m->C, m->maxT, m->V, s->T, d->windows, data);
    for (int i = 0; i < OPTION_ROWS; i++) {
        char text[64];
        if (option_rows[i].on_resume == SAME) {
            n = text_add(identity, IDENTITY_BYTES, n, " %s %s", option_rows[i].name,
                         option_text(text, o, &option_rows[i]));
            check(n < IDENTITY_BYTES - 1, "too many options must match on resume");
        }
    }
}

// Writes config.json. `train_gpt2_tokenizer`, a key of our own, stores the tokenizer's hash;
// transformers keeps it when it saves the model again.
static void config_save(const Model *m, const Tokenizer *t, const Bpe *bpe, Writer *w) {
    char text[1024], end[16] = "null", ends[512];
    if (t->end >= 0) {
        snprintf(end, sizeof end, "%d", t->end);
    }
    const int one = snprintf(ends, sizeof ends, "[%s", end);
    int all = one;
    for (int id = 0; bpe && id < MAX_VOCABULARY; id++) {
        all = bpe->ends[id] && id != t->end ? text_add(ends, sizeof ends, all, ", %d", id) : all;
    }
    text_add(ends, sizeof ends, all, "]");
    int n = snprintf(text, sizeof text,
                     "{\"architectures\": [\"GPT2LMHeadModel\"], \"model_type\": \"gpt2\",\n"
                     "\"n_layer\": %d, \"n_head\": %d, \"n_embd\": %d, \"n_positions\": %d,\n"
                     "\"vocab_size\": %d, \"activation_function\": \"gelu_new\",\n"
                     "\"layer_norm_epsilon\": 1e-05, \"tie_word_embeddings\": true,\n"
                     "\"resid_pdrop\": 0.0, \"embd_pdrop\": 0.0, \"attn_pdrop\": 0.0,\n"
                     "\"bos_token_id\": %s, \"eos_token_id\": %s,\n"
                     "\"train_gpt2_tokenizer\": \"%016" PRIx64 "\"}\n",
                     m->L, m->NH, m->C, m->maxT, m->V, end, all > one ? ends : end, t->hash);
    writer_put(w, text, n);
}

// The parts of a run that a checkpoint stores.
typedef struct {
    Engine *engine;
    const Settings *settings;
    const Options *options;
    const char *identity;    // run_identity
    const RunState *state;
    const Bpe *bpe;  // NULL if tokens are bytes or GPT-2's vocabulary was not found
    const Mapping *extras;   // (EXTRA_FILES) contents of FILE_EXTRA and the following; may be empty
    const Dataset *data;     // training data
    int64_t previous;        // step of the last checkpoint saved by this run, or -1
} Snapshot;

// A range of a state and its location in a file.
typedef struct {
    int state;
    Range range;
    Span span;
} StateRange;
enum { RANGE_NAME = 48 };

// Writes the tensor name of a range: state, bucket and first element, such as "m.3.0".
static void range_name(char name[RANGE_NAME], const StateRange *r) {
    snprintf(name, RANGE_NAME, "%s.%d.%" PRId64, saved_names[r->state], r->range.bucket,
             r->range.first);
}

// Returns the *count ranges in the state file of `rank`, in file order: the rank's part, without
// padding, of every bucket, first of the masters' low halves (if `low`), then of m, then of v. If
// `muon` is set, blocks have no v. The caller frees the array.
static StateRange *state_ranges(const Model *m, int rank, int ranks, int low, int muon,
                                int *count) {
    const int buckets = model_buckets(m), all = BUF_STORE * buckets;
    StateRange *ranges = (StateRange *)alloc_zero(all, sizeof *ranges);
    *count = 0;
    for (int i = low ? 0 : buckets; i < all; i++) {
        StateRange *r = &ranges[*count];
        r->state = i / buckets;
        r->range = shard_range(m, ranks, rank, i % buckets);
        const int no_v = muon && r->state == BUF_V && r->range.bucket >= BUCKET_BLOCKS;
        *count += saved_names[r->state] && !no_v && r->range.count > 0;
    }
    return ranges;
}

// Returns the size of a checkpoint in bytes, excluding headers and vocabulary.
static double checkpoint_bytes(const Settings *s) {
    const double moment = s->moment_dtype == TYPE_BF16 ? 2 : 4;
    double bytes = (s->dtype == TYPE_BF16 ? 2 : 4) * (double)model_parameters(&s->model);
    int count;
    StateRange *ranges = state_ranges(&s->model, 0, 1, s->split_master, s->muon, &count);
    for (int i = 0; i < count; i++) {
        bytes += (ranges[i].state == BUF_WEIGHTS ? 2 : moment) * ranges[i].range.count;
    }
    free(ranges);
    return bytes;
}

// Writes a range. `values` and `out` are buffers for IO_ELEMENTS elements (4 bytes each in `out`).
static void range_save(Engine *e, const Model *m, const StateRange *r, real *values,
                       unsigned char *out, Writer *w) {
    const int type = r->span.type;
    for (int64_t offset = 0, count; offset < r->range.count; offset += count) {
        Range p = r->range;
        count = min_i64(IO_ELEMENTS, p.count - offset);
        p.first += offset;
        p.count = min_i64(count, bucket_elements(m, p.bucket) - p.first);
        memset(values, 0, count * sizeof(real));
        if (p.count > 0) {
            e->read_local(e, r->state, p, values);
        }
        file_values(out, type, values, count);
        writer_put(w, out, count * file_types[type].bytes);
    }
}

static void state_save(const Snapshot *snapshot, Writer *w) {
    const Settings *s = snapshot->settings;
    const Options *options = snapshot->options;
    const char *choices = snapshot->engine->choices ? snapshot->engine->choices : "";
    const int moments = s->moment_dtype == TYPE_BF16 ? FILE_BF16 : FILE_F32;
    char given[PATH_BYTES] = "";
    int count, n = 0;
    StateRange *ranges =
        state_ranges(&s->model, this_rank.rank, s->ranks, s->split_master, s->muon, &count);
    HeaderText header;
    header_start(&header);
    json_print(header.file, ",'run':'%s','matmul':'%s'", snapshot->identity, choices);
    for (int i = 0; i < OPTION_ROWS; i++) {
        char text[64];
        const char *name = option_rows[i].name;
        json_print(header.file, ",'--%s':'%s'", name, option_text(text, options, &option_rows[i]));
        n = text_add(given, sizeof given, n, options->given[i] % NOT_GIVEN ? "%s|" : "%.0s", name);
    }
    json_print(header.file, ",'given':'%s'", given);
    if (snapshot->data->hash) {
        json_print(header.file, ",'train_hash':'%016" PRIx64 "'", snapshot->data->hash);
    }
    RunState counters = *snapshot->state;
    for (int i = 0; i < COUNTERS; i++) {
        json_print(header.file, ",'%s':'%" PRId64 "'", counter_rows[i].name,
                   *counter(&counters, i));
    }
    header_tensor(&header, "norms", FILE_F64, 0, NORM_WINDOW);
    for (int i = 0; i < count; i++) {
        char name[RANGE_NAME];
        range_name(name, &ranges[i]);
        ranges[i].span.type = ranges[i].state == BUF_WEIGHTS ? FILE_U16 : moments;
        header_tensor(&header, name, ranges[i].span.type, 0, ranges[i].range.count);
    }
    header_write(&header, w);
    writer_put(w, counters.norms.values, sizeof counters.norms.values);
    real *values = (real *)alloc_zero(IO_ELEMENTS, sizeof(real));
    unsigned char *out = (unsigned char *)alloc_zero(IO_ELEMENTS, sizeof(float));
    for (int i = 0; i < count; i++) {
        range_save(snapshot->engine, &s->model, &ranges[i], values, out, w);
    }
    free(out);
    free(values);
    free(ranges);
}

typedef struct {
    int64_t bytes;
    char sha256[SHA256_TEXT];  // "" if the checkpoint lacks this file
} ManifestRow;
typedef struct {
    int ranks;  // number of ranks that saved the checkpoint
    ManifestRow files[CHECKPOINT_FILES];
} Manifest;

static void manifest_save(const Manifest *manifest, int64_t step, Writer *w) {
    char text[256], name[FILE_NAME];
    int n = snprintf(text, sizeof text, "{\"format\": \"train_gpt2 checkpoint\", "
                     "\"version\": 3, \"step\": %" PRId64 ", \"files\": {", step);
    writer_put(w, text, n);
    for (int k = 0; k < FILE_STATE + manifest->ranks; k++) {
        const ManifestRow *row = &manifest->files[k];
        if (row->sha256[0]) {
            file_name(name, k, manifest->ranks);
            n = snprintf(text, sizeof text,
                         "%s\n\"%s\": {\"bytes\": %" PRId64 ", \"sha256\": \"%s\"}",
                         k ? "," : "", name, row->bytes, row->sha256);
            writer_put(w, text, n);
        }
    }
    writer_put(w, "}}\n", 3);
}

// Parses a manifest. Returns NULL on success, otherwise an error message.
static const char *manifest_parse(Manifest *manifest, Mapping map) {
    Json j = {map.bytes, 0, map.size, NULL};
    char name[FILE_NAME], format[40] = "";
    const char *wrong = NULL;
    memset(manifest, 0, sizeof *manifest);
    json_skip(&j);
    const int ends = json_peek(&j) < 0;
    json_get(&j, 0, "format", format, sizeof format);
    const int64_t version = json_get_count(&j, 0, "version", 0);
    const int found = json_find(&j, 0, "files");
    for (int n = 0, ranks; found && json_next(&j, &n, '{', name, sizeof name); json_skip(&j)) {
        const size_t from = j.offset;
        const int file = file_find(name, &ranks);
        if (file < 0 || file == FILE_MANIFEST || manifest->files[file].sha256[0] ||
            (ranks && manifest->ranks && ranks != manifest->ranks)) {
            wrong = "duplicate or unknown file name";
            break;
        }
        ManifestRow *row = &manifest->files[file];
        manifest->ranks = ranks ? ranks : manifest->ranks;
        row->bytes = json_get_count(&j, from, "bytes", 0);
        json_get(&j, from, "sha256", row->sha256, SHA256_TEXT);
        j.offset = from;
    }
    manifest->ranks = manifest->ranks ? manifest->ranks : 1;  // its state file is missing
    if (!ends || j.fault || strcmp(format, "train_gpt2 checkpoint") != 0) {
        return "damaged";
    }
    return !wrong && version != 3 ? "unsupported version; expected 3" : wrong;
}

static const char *manifest_open(Manifest *manifest, const char *path) {
    Mapping map;
    if (mapping_open(&map, path) != 0) {
        return file_error();
    }
    const char *fault = manifest_parse(manifest, map);
    mapping_close(&map);
    return fault;
}

// Compares a file with the size and SHA-256 in `row`. Returns NULL if they match, otherwise an
// error message. The file is read, not mapped, because a SIGBUS from an unreadable sector would end
// the run.
static const char *file_compare(const char *path, const ManifestRow *row) {
    Sha256 sha;
    char text[SHA256_TEXT];
    int64_t size = 0, count = 0;
    const int fd = file_open(path, &size);
    const char *wrong = fd < 0                ? "cannot be read"
                        : size != row->bytes ? "does not have the size given in manifest.json"
                                              : NULL;
    unsigned char *buffer = (unsigned char *)alloc_zero(IO_ELEMENTS, 1);
    sha256_start(&sha);
    for (int64_t offset = 0; !wrong && offset < size; offset += count) {
        count = min_i64(IO_ELEMENTS, size - offset);
        wrong = file_read(fd, buffer, count, offset) ? "cannot be read" : NULL;
        sha256_add(&sha, buffer, count);
    }
    free(buffer);
    if (fd >= 0) {
        close(fd);
    }
    sha256_end(&sha, text);
    return wrong || strcmp(text, row->sha256) == 0 ? wrong : "is corrupted: SHA-256 mismatch";
}

// Verifies the files of a checkpoint against its manifest. Returns the number of state files, or 0
// with an error message in `problem`.
static int checkpoint_is_whole(const char *folder, char problem[PATH_BYTES]) {
    static Manifest manifest;
    static const char *wrong[CHECKPOINT_FILES];
    char path[PATH_BYTES];
    path_print(path, "%s/manifest.json", folder);
    const char *fault = manifest_open(&manifest, path);
    if (fault) {
        path_print(problem, "manifest.json: %s", fault);
        return 0;
    }
    const int files = FILE_STATE + manifest.ranks;
    #pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < files; i++) {
        char file[PATH_BYTES], name[FILE_NAME];
        const ManifestRow *row = &manifest.files[i];
        const int extra = i >= FILE_EXTRA && i < FILE_MANIFEST;  // may be absent
        const int listed = i != FILE_MANIFEST && (!extra || row->sha256[0]);
        file_name(name, i, manifest.ranks);
        path_print(file, "%s/%s", folder, name);
        wrong[i] = listed ? file_compare(file, row) : NULL;
    }
    for (int i = 0; i < files; i++) {
        if (wrong[i]) {
            file_name(path, i, manifest.ranks);
            path_print(problem, "%s %s", path, wrong[i]);
            return 0;
        }
    }
    return manifest.ranks;
}

// A checkpoint that is being saved.
typedef struct {
    const Snapshot *snapshot;
    char folder[PATH_BYTES];  // with the suffix ".tmp"
    char problem[PATH_BYTES + 128];  // error message of this rank, or ""
    Manifest manifest;
} Saving;

__attribute__((format(printf, 2, 3)))
static void save_problem(Saving *save, const char *what, ...) {
    va_list args;
    va_start(args, what);
    vsnprintf(save->problem, sizeof save->problem, what, args);
    va_end(args);
}

// Writes one file of a checkpoint and records it in the manifest. Does nothing after an error. Rank
// 0 writes FILE_MODEL, but all ranks call this function because weights may be sharded.
static void save_file(Saving *save, int file) {
    static Writer w;
    const Snapshot *snapshot = save->snapshot;
    const Settings *s = snapshot->settings;
    ManifestRow *row = &save->manifest.files[file];
    char name[FILE_NAME];
    if (save->problem[0]) {
        return;
    }
    file_name(name, file, save->manifest.ranks);
    w.fd = -1;
    if (this_rank.rank == 0 || file >= FILE_STATE) {
        writer_open(&w, save->folder, name);
    }
    if (file == FILE_MODEL) {
        model_file_save(snapshot->engine, &s->model, s->dtype == TYPE_BF16 ? FILE_BF16 : FILE_F32,
                        &w);
    } else if (file == FILE_CONFIG) {
        config_save(&s->model, &snapshot->data->tokenizer, snapshot->bpe, &w);
    } else if (file == FILE_MANIFEST) {
        manifest_save(&save->manifest, snapshot->state->step, &w);
    } else if (file >= FILE_STATE) {
        state_save(snapshot, &w);
    } else {
        const Mapping *extra = &snapshot->extras[file - FILE_EXTRA];
        writer_put(&w, extra->bytes, extra->size);
    }
    writer_close(&w);
    row->bytes = w.bytes;
    memcpy(row->sha256, w.hash, SHA256_TEXT);
    if (w.error) {
        save_problem(save, "cannot write %s: %s%s", w.file, strerror(w.error),
                     snapshot->previous < 0 ? "" : "; the previous checkpoint is intact");
    }
}

// Ends a phase of saving. If a rank has failed, rank 0 removes the unfinished checkpoint and the
// first failed rank prints its message. The other ranks wait to be terminated.
static void save_agree(Saving *save) {
    const int failed = this_rank.failed = save->problem[0] != 0;
    engine_agree(save->snapshot->engine);
    const int fault = this_rank.ranks > 1 ? this_rank.fault : failed;
    if (!fault) {
        return;
    }
    if (this_rank.rank == 0) {
        checkpoint_remove(save->folder);
    }
    engine_agree(save->snapshot->engine);  // no rank exits before the removal
    grace_ms = fault == this_rank.rank + 1 ? 0 : rank_grace_ms();
    if (!failed) {
        die("rank %d failed; see its error message", fault - 1);
    }
    die("%s", save->problem);
}

// Checks that all ranks share `output`: rank 0 creates a folder there, in which every rank must be
// able to create a file. The folder is named like an unfinished checkpoint, so if this run is
// killed, the next one removes it. All ranks pass the same `word`, a nonce that makes the name
// unique.
static void checkpoint_probe(Engine *e, const char *output, int64_t word) {
    static Snapshot snapshot;
    static Saving save;
    char path[PATH_BYTES], name[FILE_NAME];
    int fd = -1;
    snapshot.engine = e;
    save.snapshot = &snapshot;
    path_print(save.folder, "%s/step-%08" PRId64 ".tmp", output, word);
    if (this_rank.rank == 0 && mkdir(save.folder, 0777) != 0) {
        save_problem(&save, "cannot create %s: %s", save.folder, strerror(errno));
    }
    save_agree(&save);
    file_name(name, FILE_STATE + this_rank.rank, this_rank.ranks);
    path_print(path, "%s/%s", save.folder, name);
    const double end = now_ms() + fmin(10e3, rank_timeout_ms);  // network disks may lag
    while ((fd = open(path, O_WRONLY | O_CREAT, 0666)) < 0 && now_ms() < end) {
        usleep(50000);
    }
    if (fd < 0) {
        save_problem(&save, "--output (-o): cannot create %s: %s; all machines must share the "
                     "folder %s, to which rank 0 writes", path, strerror(errno), output);
    } else {
        close(fd);
    }
    save_agree(&save);
    if (this_rank.rank == 0) {
        checkpoint_remove(save.folder);
    }
}

// On rank 0, writes the manifest, verifies the other ranks' files and renames the folder.
static void save_finish(Saving *save, const char *output, const char *path) {
    char aside[PATH_BYTES], problem[PATH_BYTES];
    path_print(aside, "%s.damaged", path);
    save_file(save, FILE_MANIFEST);
    if (save->problem[0]) {
        return;
    }
    if (save->manifest.ranks > 1 && !checkpoint_is_whole(save->folder, problem)) {
        save_problem(save, "cannot save %s: %s", save->folder, problem);
        return;
    }
    fsync_folder(save->folder);
    checkpoint_remove(path);  // damaged and skipped when the run resumed
    rename(path, aside);  // succeeds only if unrelated files prevented the removal
    if (rename(save->folder, path) == 0) {
        fsync_folder(output);
    } else {
        save_problem(save, "cannot rename checkpoint %s to %s: %s", save->folder, path,
                     strerror(errno));
    }
}

// Saves a run as `output`/step-NNNNNNNN and writes this path to `path`. All ranks call this.
static void checkpoint_save(const Snapshot *snapshot, const char *output, char path[PATH_BYTES]) {
    static Saving save;
    memset(&save, 0, sizeof save);
    save.snapshot = snapshot;
    save.manifest.ranks = snapshot->settings->ranks;
    path_print(path, "%s/step-%08" PRId64, output, snapshot->state->step);
    path_print(save.folder, "%s.tmp", path);
    if (this_rank.rank == 0 && mkdir(save.folder, 0777) != 0 && errno != EEXIST) {
        save_problem(&save, "cannot create checkpoint %s: %s", save.folder, strerror(errno));
    }
    save_agree(&save);
    save_file(&save, FILE_MODEL);
    save_file(&save, FILE_STATE + this_rank.rank);
    ManifestRow *states = &save.manifest.files[FILE_STATE], mine = states[this_rank.rank];
    engine_gather(snapshot->engine, states, &mine, sizeof mine);
    save_agree(&save);
    if (this_rank.rank == 0) {
        save_file(&save, FILE_CONFIG);
        for (int k = 0; k < EXTRA_FILES; k++) {
            snapshot->extras[k].size ? save_file(&save, FILE_EXTRA + k) : (void)0;
        }
        save_finish(&save, output, path);
    }
    save_agree(&save);
}

// Steps of checkpoints, newest first. The caller frees `steps`.
typedef struct {
    int64_t *steps;
    int count;
} CheckpointList;

// Returns the step in a name of the form step-NNNNNNNN`suffix`, or -1 for other names.
static int64_t step_of_name(const char *name, const char *suffix) {
    int64_t step;
    int end = 0;
    const int named = sscanf(name, "step-%8" SCNd64 "%n", &step, &end) == 1 && end == 13;
    return named && strcmp(name + end, suffix) == 0 ? step : -1;
}

// Lists the folders step-NNNNNNNN`suffix` in `output`. ".tmp" selects unfinished checkpoints.
static CheckpointList checkpoint_list(const char *output, const char *suffix) {
    struct dirent **names;
    CheckpointList list = {NULL, 0};
    const int n = scandir(output, &names, NULL, alphasort);
    if (n < 0) {  // an empty list would start the run from scratch
        die("--output (-o): cannot list %s: %s", output, strerror(errno));
    }
    list.steps = (int64_t *)alloc_zero((size_t)n + 1, sizeof(int64_t));
    for (int i = n - 1; i >= 0; i--) {
        const int64_t step = step_of_name(names[i]->d_name, suffix);
        list.steps[list.count] = step;
        list.count += step >= 0;
        free(names[i]);
    }
    free(names);
    return list;
}

// Removes unfinished checkpoints. The caller must hold the folder's lock, because another run might
// be writing one.
static void checkpoint_sweep(const char *output) {
    CheckpointList list = checkpoint_list(output, ".tmp");
    for (int i = 0; i < list.count; i++) {
        char path[PATH_BYTES];
        path_print(path, "%s/step-%08" PRId64 ".tmp", output, list.steps[i]);
        checkpoint_remove(path);
    }
    free(list.steps);
}

static void checkpoint_mark_best(const char *output, const char *path) {
    char link[PATH_BYTES], next[PATH_BYTES];
    path_print(link, "%s/best", output);
    path_print(next, "%s/best.tmp", output);
    unlink(next);
    if (symlink(strrchr(path, '/') + 1, next) != 0 || rename(next, link) != 0) {
        fprintf(stderr, "%s: cannot link %s to %s: %s\n", program_name, link, path,
                strerror(errno));
    }
}

// Copies the metadata text of `key` from a checkpoint's first state file. Returns 0 on failure.
static int checkpoint_text(char out[PATH_BYTES], const char *folder, const char *key) {
    static Manifest manifest;
    char path[PATH_BYTES], file[FILE_NAME];
    Mapping map;
    path_print(path, "%s/manifest.json", folder);
    file_name(file, FILE_STATE, manifest_open(&manifest, path) ? 1 : manifest.ranks);
    path_print(path, "%s/%s", folder, file);
    if (mapping_open(&map, path) != 0) {
        return 0;
    }
    const int found = safetensors_text(&map, key, out, PATH_BYTES);
    mapping_close(&map);
    return found;
}

// Removes checkpoints up to step `newest`, except the newest `keep` and the best one. Later
// checkpoints, which were damaged and skipped when the run resumed, are left alone. The newest
// checkpoint records the lowest loss, so the best is the oldest one with this loss. (The link
// `best` is not used because the file system may not support links.) Each folder is renamed before
// its files are removed, so a killed process leaves an unfinished checkpoint, not a damaged one.
static void checkpoint_prune(const char *output, int64_t keep, int64_t newest) {
    CheckpointList list = checkpoint_list(output, "");
    char path[PATH_BYTES], gone[PATH_BYTES], lowest[PATH_BYTES] = "0", loss[PATH_BYTES];
    int64_t best = -1;
    path_print(path, "%s/step-%08" PRId64, output, newest);
    checkpoint_text(lowest, path, "best_loss");
    for (int i = 0; i < list.count && strcmp(lowest, "0") != 0; i++) {
        path_print(path, "%s/step-%08" PRId64, output, list.steps[i]);
        const int same = list.steps[i] <= newest && checkpoint_text(loss, path, "best_loss") &&
                         strcmp(loss, lowest) == 0;
        best = same ? list.steps[i] : best;
    }
    for (int i = 0, kept = 0; i < list.count; i++) {
        if (list.steps[i] > newest || kept++ < keep || list.steps[i] == best) {
            continue;
        }
        path_print(path, "%s/step-%08" PRId64, output, list.steps[i]);
        path_print(gone, "%s.tmp", path);
        if (rename(path, gone) == 0) {
            checkpoint_remove(gone);
        }
    }
    free(list.steps);
}

// Returns the step in the weights' path, or 0 if there is none. Sampling at this step repeats the
// samples of the run that saved the weights.
static int64_t weights_step(const ModelFile *f) {
    int64_t step = 0;
    for (const char *p = f->name; (p = strstr(p, "step-")) != NULL; p++) {
        sscanf(p, "step-%8" SCNd64, &step);
    }
    return step;
}

// The contents of a checkpoint's state files. Counters and identity are from the first file.
typedef struct {
    int ranks, low;  // number of files; 1 if they contain the masters' low halves
    struct {
        Mapping map;
        StateRange *ranges;
        int count;
    } files[MAX_RANKS];
    RunState run;
    char identity[IDENTITY_BYTES];
} StateFiles;

// Locates the ranges, which follow the norms, in the file of rank r.
static void state_parse_ranges(StateFiles *out, const Model *m, int r, Safetensors *f) {
    char name[RANGE_NAME] = "", optimizer[16];
    FileTensor t;
    int i = 0, count = 0;
    safetensors_text(&out->files[r].map, "--optimizer", optimizer, sizeof optimizer);
    const int muon = strcmp(optimizer, "muon") == 0;  // AdamW if absent
    int more = safetensors_next(f, &t);  // 0 if all parts of this rank are padding
    out->low = r ? out->low : more && strncmp(t.name, "master.", 7) == 0;
    out->files[r].ranges = state_ranges(m, r, out->ranks, out->low, muon, &count);
    for (; more; more = safetensors_next(f, &t), i++) {
        StateRange *range = &out->files[r].ranges[i < count ? i : 0];
        range_name(name, range);
        file_require(i < count && strcmp(name, t.name) == 0 && t.count == range->range.count,
                     f->name, t.name, "is not the range that this model expects here");
        file_require(range->state == BUF_WEIGHTS ? t.type == FILE_U16 : t.type <= FILE_BF16,
                     f->name, t.name, "wrong dtype");
        range->span.data = t.data;
        range->span.type = t.type;
    }
    file_require(i == count && (r > 0 || count > 0), f->name, name,
                 "is the last range, but more are expected");
    out->files[r].count = count;
}

// Adds the state file of rank r to `out`. Its counters and identity must equal those of rank 0.
static void state_parse(StateFiles *out, const Model *m, int r, const char *name) {
    const Mapping *map = &out->files[r].map;
    Safetensors f;
    FileTensor t = {.data = NULL};
    RunState run;
    char identity[IDENTITY_BYTES];
    memset(&run, 0, sizeof run);
    safetensors_start(&f, *map, name);
    file_require(safetensors_next(&f, &t) && strcmp(t.name, "norms") == 0 && t.type == FILE_F64 &&
                     t.count == NORM_WINDOW, name, "norms", "missing or of the wrong type or size");
    memcpy(run.norms.values, t.data, sizeof run.norms.values);
    state_parse_ranges(out, m, r, &f);
    safetensors_text(map, "run", identity, sizeof identity);
    for (int i = 0; i < COUNTERS; i++) {
        char text[24], *end;
        if (!safetensors_text(map, counter_rows[i].name, text, sizeof text) &&
            i >= COUNTERS_REQUIRED) {
            continue;
        }
        const int64_t value = strtoll(text, &end, 10);
        if (end == text || *end != 0 || value < 0) {
            die("%s: invalid metadata: '%s' is '%s'; expected a count", name, counter_rows[i].name,
                text);
        }
        *counter(&run, i) = value;
    }
    if (r == 0) {
        out->run = run;
        memcpy(out->identity, identity, sizeof identity);
    } else if (memcmp((const void *)&run, (const void *)&out->run, sizeof run) != 0 ||
               strcmp(identity, out->identity) != 0) {  // padding bytes are 0 in both RunStates
        die("%s and rank 0's state file are from different runs or steps", name);
    }
}

// Loads this rank's part of a range into the engine. Without a split master, low halves are joined
// with the weights. For unsharded weights, all ranks load the whole range with the same calls,
// because read() gathers the weights from the sharded master in fp16. All other loads are local.
static void range_load(Engine *e, const Settings *s, const StateRange *r) {
    const int bucket = r->range.bucket, in_weights = r->state == BUF_WEIGHTS && !s->split_master;
    const int whole =
        in_weights && (bucket < BUCKET_BLOCKS || !(s->placement[KIND_WEIGHTS] & PLACE_SHARD));
    const Range all = {bucket, 0, bucket_elements(&s->model, bucket)};
    const Range local = whole ? all : bucket_range(s, bucket, 0);
    const int64_t end = min_i64(r->range.first + r->range.count, local.first + local.count);
    real *values = (real *)alloc_zero(IO_ELEMENTS, sizeof(real));
    Range p = {bucket, max_i64(r->range.first, local.first), 0};
    for (; p.first < end; p.first += p.count) {
        const int64_t offset = p.first - r->range.first;
        p.count = min_i64(IO_ELEMENTS, end - p.first);
        if (r->state == BUF_WEIGHTS) {
            (whole ? e->read : e->read_local)(e, BUF_WEIGHTS, p, values);
            for (int64_t k = 0; k < p.count; k++) {
                uint16_t low;
                memcpy(&low, r->span.data + 2 * (offset + k), 2);
                values[k] = (real)master_join(values[k], low);
            }
        } else {
            span_values(values, &r->span, offset, p.count);
        }
        e->write(e, r->state, p, values);
    }
    free(values);
}

// Writes an option's value in the checkpoint to `was`, or the default if the option is newer.
static void option_was(char was[PATH_BYTES], const StateFiles *f, const OptionRow *row) {
    Options defaults;
    char text[64];
    options_default(&defaults);
    snprintf(text, sizeof text, "--%s", row->name);
    safetensors_text(&f->files[0].map, text, was, PATH_BYTES);
    if (!was[0]) {
        snprintf(was, PATH_BYTES, "%s", option_text(text, &defaults, row));
    }
}

// Fails if an option marked SAME differs from its value in the checkpoint. If `saying` is nonzero,
// prints the other options that differ.
static void checkpoint_options(const Snapshot *run, const StateFiles *f, const char *folder,
                               int saying) {
    char was[PATH_BYTES], text[64];
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        const char *now = option_text(text, run->options, row);
        option_was(was, f, row);
        // An option that is not given takes the checkpoint's value if the device supports it. It is
        // not compared if the checkpoint has no value for it, because older checkpoints do not
        // record values chosen by the program.
        const int given = option_given(run->options, row->name);
        const int chosen = strcmp(row->subject, "Memory") == 0;
        if (row->on_resume == NEW || strncmp(now, was, sizeof was - 1) == 0 ||
            (!given && (!was[0] || strcmp(was, "0") == 0 || row->letter == 'e'))) {
            continue;
        }
        if (row->on_resume == SAME) {
            die("checkpoint %s is from a different run: it has --%s %s, but this run has --%s %s",
                folder, row->name, was, row->name, now);
        }
        if (saying) {
            printf("  --%s is '%s'%s, was '%s'\n", row->name, now,
                   given || !chosen ? "" : " (this device's default)", was);
        }
    }
}

// Makes the engine use the checkpoint's matmul algorithms and kernels, which affect results.
// Returns NULL, or a description of the choices if the engine cannot use them.
static const char *checkpoint_choices(Engine *e, const StateFiles *f) {
    char choices[MATMUL_TEXT];
    safetensors_text(&f->files[0].map, "matmul", choices, MATMUL_TEXT);
    const int took = !choices[0] || (e->choices && strcmp(choices, e->choices) == 0) ||
                     (e->set_choices && e->set_choices(e, choices));
    return took ? NULL : "matmul algorithms and attention kernels";
}

static void checkpoint_announce(const Snapshot *run, const StateFiles *f, int weights_fp32,
                                const char *others, const char *folder) {
    const Settings *s = run->settings;
    // NOLINTNEXTLINE(clang-analyzer-core.NullDereference): every checkpoint has a state file
    const int moments_fp32 = f->files[0].ranges[f->files[0].count - 1].span.type == FILE_F32;
    if ((weights_fp32 || f->low) && s->dtype == TYPE_BF16 && !s->split_master) {
        printf("converting the fp32 weights in %s to bf16\n", folder);
    }
    if (moments_fp32 && s->moment_dtype == TYPE_BF16) {
        printf("converting the fp32 moments in %s to bf16\n", folder);
    }
    if (others) {
        printf("%s differ from those in %s; losses may differ due to rounding\n", others, folder);
    }
    if (f->run.loss_scale_log2 && s->dtype != TYPE_FP16) {
        printf("ignoring the fp16 loss scale in %s (2^%" PRId64 ")\n", folder,
               f->run.loss_scale_log2);
    }
}

// Fails and prints the first difference if the checkpoint has a different identity or model.
static void checkpoint_require_same_run(const Snapshot *run, const StateFiles *f, const Model *m,
                                        const char *folder) {
    const char *was = f->identity, *now = run->identity;
    int pair = 0, spaces = 0, ends[2] = {0, 0};
    for (int i = 0; was[i] && was[i] == now[i]; i++) {
        spaces += was[i] == ' ';
        pair = was[i] == ' ' && spaces % 2 == 0 ? i + 1 : pair;
    }
    if (strcmp(was, now) == 0 && memcmp(m, &run->settings->model, sizeof *m) == 0) {
        return;
    }
    sscanf(was + pair, "%*s %*s%n", &ends[0]);
    sscanf(now + pair, "%*s %*s%n", &ends[1]);
    die("checkpoint %s is from a different run: it has %.*s, but this run has %.*s", folder,
        ends[0], was + pair, ends[1], now + pair);
}

// Fails if the training data differ from the checkpoint's.
static void checkpoint_data(const Snapshot *run, const StateFiles *f, const char *folder) {
    char hash[24], now[24];
    snprintf(now, sizeof now, "%016" PRIx64, run->data->hash);
    safetensors_text(&f->files[0].map, "train_hash", hash, sizeof hash);
    if (run->data->hash && hash[0] && strcmp(hash, now) != 0) {
        die("checkpoint %s: the training data %s has changed since it was saved; to start a new "
            "run from its weights, use -e %s -o FOLDER", folder, run->options->train_data, folder);
    }
}

// Loads a verified checkpoint, saved by `ranks` ranks, into the run's engine and `state`.
static void checkpoint_load(const Snapshot *run, RunState *state, const char *folder, int ranks) {
    static StateFiles f;
    char path[PATH_BYTES], name[FILE_NAME];
    ModelFile model;
    memset(&f, 0, sizeof f);
    f.ranks = ranks;
    model_file_open(&model, folder);
    for (int r = 0; r < ranks; r++) {
        file_name(name, FILE_STATE + r, ranks);
        path_print(path, "%s/%s", folder, name);
        if (mapping_open(&f.files[r].map, path) != 0) {
            die("cannot open %s: %s", path, file_error());
        }
        state_parse(&f, &model.model, r, path);
    }
    checkpoint_options(run, &f, folder, 0);
    checkpoint_require_same_run(run, &f, &model.model, folder);
    checkpoint_data(run, &f, folder);
    const char *others = checkpoint_choices(run->engine, &f);
    model_file_load(run->engine, &model);
    for (int r = 0; r < ranks; r++) {
        for (int i = 0; i < f.files[r].count; i++) {
            range_load(run->engine, run->settings, &f.files[r].ranges[i]);
        }
    }
    if (!run->options->quiet) {
        printf("resumed from %s\n", folder);
        checkpoint_options(run, &f, folder, 1);
        checkpoint_announce(run, &f, model.spans[WTE].type == FILE_F32, others, folder);
    }
    *state = f.run;
    if (!run->engine->scale_loss) {  // the next checkpoint stores 0
        state->loss_scale_log2 = state->loss_scale_steps = 0;
    } else if (state->loss_scale_log2) {  // otherwise the engine keeps its initial scale
        run->engine->scale_loss(run->engine, state->loss_scale_log2, state->loss_scale_steps);
    }
    for (int r = 0; r < ranks; r++) {
        mapping_close(&f.files[r].map);
        free(f.files[r].ranges);
    }
    model_file_close(&model);
}
