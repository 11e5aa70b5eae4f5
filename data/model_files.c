// data/model_files.c -- the third appendix: GPT-2 in files.
//
// What it is: the weights as Hugging Face's and llm.c's files hold them, read and written, and
// checkpoints: the folders in which a run outlives its end. Volume I (train_gpt2.c) includes it
// behind its engine, whose verbs hand states over piece by piece.
//
// What it refuses to be: trusting. Whatever a file says is held against its length, the model and
// its hash before anything is allocated or read by it, and a fault is one line that names the file.
//
// Build:  with Volume I. It is also C++17 and is read by nvcc, as Volume I is
//
// Contents
//   1  Model files
//   2  Checkpoints

// -------------------------------------------------------------------------------------------------
// 1. Model files
// Weights come and go as Hugging Face's model.safetensors beside its config.json, and come from
// llm.c's .bin files.
// 1. These files come from strangers: what a header claims is held against the file's length and
//    the model's shapes before anything is allocated or read by it; a fault is one line that names
//    file and tensor.
// 2. Parsers work on bytes in memory and allocate nothing.
// 3. Hugging Face keeps the weights of a block as (in, out), the transpose of ours, and wte without
//    its padding rows.

// What Hugging Face's files may hold in addition to the sixteen tensors: the causal mask and the
// tied head.
enum { FILE_MASK = TENSORS, FILE_MASKED_BIAS, FILE_HEAD, FILE_TENSORS };
static const struct {
    const char *hf_name;
    int per_layer;
} extra_table[FILE_TENSORS - TENSORS] = {
    {"attn.bias", 1}, {"attn.masked_bias", 1}, {"lm_head.weight", 0}};

// Hugging Face's name of a tensor: prefix, block, name.
static void file_tensor_name(char name[80], const char *prefix, int tensor, int layer) {
    char block[16] = "";
    if (tensor_table[tensor].per_layer) {
        snprintf(block, sizeof block, "h.%d.", layer);
    }
    snprintf(name, 80, "%s%s%s", prefix, block, tensor_table[tensor].hf_name);
}

// Where the values of one tensor of one layer lie in a file.
typedef struct {
    const unsigned char *data;  // NULL: nowhere
    int type;                   // FILE_F32, FILE_BF16 or FILE_F16
} Span;
enum { MODEL_FILES = 64, MODEL_FILE_NAME = 100 };
typedef struct {
    char name[PATH_BYTES];  // of the file that holds the weights, or of its parts' index
    Mapping maps[MODEL_FILES];
    char parts[MODEL_FILES][MODEL_FILE_NAME];
    int files, tensors;     // parts, and the tensors in them
    Model model;
    int transposed;         // linear layers as (in, out), wte without padding: Hugging Face's
    Span *spans;            // [layer][FILE_TENSORS]
} ModelFile;

static Span *file_span(Span *spans, int tensor, int layer) {
    return &spans[layer * FILE_TENSORS + tensor];
}

// Elements `first` to first + count of a span, as numbers.
static void span_values(real *out, const Span *s, int64_t first, int64_t count) {
    const unsigned char *p = s->data + first * file_types[s->type].bytes;
    const int plain = !GPT2_DOUBLE && s->type == FILE_F32;
    slow_begin();  // the file is mapped
    if (plain) {
        memcpy(out, p, (size_t)count * 4);
    }
    for (int64_t i = 0; i < count && !plain; i++) {
        uint32_t bits;
        uint16_t half;
        float value, scale = 1;
        if (s->type == FILE_F32) {
            memcpy(&bits, p + 4 * i, 4);
        } else {
            memcpy(&half, p + 2 * i, 2);
            bits = (uint32_t)half << 16;
        }
        if (s->type == FILE_F16) {  // IEEE 754 half: 5 bits of exponent, biased by 15 and not 127
            int special = (half & 0x7c00) == 0x7c00;
            bits = (uint32_t)(half & 0x8000) << 16 | (uint32_t)(half & 0x7fff) << 13;
            bits |= special ? 0x7f800000u : 0;
            scale = special ? 1.0f : 0x1p112f;
        }
        memcpy(&value, &bits, 4);
        out[i] = value * scale;
    }
    slow_end();
}

// The tensor that a name of Hugging Face's means, TENSORS and above for extra_table; *layer is its
// block's number; -1: none. The prefix "transformer." is optional.
static int file_tensor_find(const char *name, int L, int *layer) {
    char *end;
    *layer = 0;
    name += strncmp(name, "transformer.", 12) == 0 ? 12 : 0;
    int in_block = strncmp(name, "h.", 2) == 0 && name[2] >= '0' && name[2] <= '9';
    if (in_block) {
        long number = strtol(name + 2, &end, 10);
        if (*end != '.' || number >= L || (name[2] == '0' && end > name + 3)) {
            return -1;
        }
        *layer = (int)number;
        name = end + 1;
    }
    for (int i = 0; i < FILE_TENSORS; i++) {
        int extra = i - TENSORS;
        int per_layer = extra < 0 ? tensor_table[i].per_layer : extra_table[extra].per_layer;
        const char *hf_name = extra < 0 ? tensor_table[i].hf_name : extra_table[extra].hf_name;
        if (per_layer == in_block && strcmp(hf_name, name) == 0) {
            return i;
        }
    }
    return -1;
}

// GPT-2's limits, as for shapes given by hand.
static void model_require(const Model *m, const char *name) {
    if (!model_is_allowed(m) || m->V < 1 || m->V > 65536) {
        die("%s: a model of %d layers, %d heads, %d channels, %d positions, %d tokens; allowed are "
            "1-400 layers, 1-65536 channels in equal heads, 1-1048576 positions, 1-65536 tokens",
            name, m->L, m->NH, m->C, m->maxT, m->V);
    }
}

// Finds the tensors of model `m` that a safetensors file holds. spans: (L, FILE_TENSORS), zeroed
// before the first file. Returns their number.
static int safetensors_spans(Span *spans, const Model *m, const Mapping *map, const char *name) {
    Safetensors f;
    FileTensor t;
    int count = 0;
    safetensors_start(&f, map->bytes, map->size, name);
    while (safetensors_next(&f, &t)) {
        int layer, i = file_tensor_find(t.name, m->L, &layer);
        file_require(i >= 0, name, t.name, "GPT-2 of this many layers has none of this name");
        Span *s = file_span(spans, i, layer);
        file_require(!s->data, name, t.name, "appears twice");
        s->data = t.data;
        s->type = t.type;
        count++;
        if (i == FILE_MASK || i == FILE_MASKED_BIAS) {
            continue;
        }
        int tensor = i == FILE_HEAD ? (int)WTE : i, swap = tensor_table[tensor].transposed;
        int64_t want[2] = {tensor_rows(m, tensor), tensor_cols(m, tensor)};
        if (t.dims != 1 + tensor_is_matrix(tensor) || t.shape[0] != want[swap] ||
            (t.dims == 2 && t.shape[1] != want[!swap])) {
            die("%s: tensor %s: its shape is not (%" PRId64 ", %" PRId64 "), as config.json wants",
                name, t.name, want[swap], want[!swap]);
        }
        file_require(t.type <= FILE_F16, name, t.name, "weights are F32, BF16 or F16");
    }
    return count;
}

// No tensor may be missing, and a head that stands in the file must be the embedding.
static void spans_complete(const Span *spans, const Model *m, const char *name) {
    char tensor_name[80];
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            file_tensor_name(tensor_name, "", tensor, l);
            file_require(spans[l * FILE_TENSORS + tensor].data != NULL, name, tensor_name,
                         "is missing");
        }
    }
    const Span *head = &spans[FILE_HEAD], *wte = &spans[WTE];
    real a[256], b[256];
    int64_t elements = (int64_t)m->V * m->C;
    for (int64_t i = 0; head->data && i < elements; i += 256) {
        int64_t count = min_i64(256, elements - i);
        span_values(a, head, i, count);
        span_values(b, wte, i, count);
        file_require(memcmp(a, b, (size_t)count * sizeof *a) == 0, name, "lm_head.weight",
                     "differs from wte.weight; GPT-2's head is tied to the embedding");
    }
}

// The sizes of a Hugging Face config.json. What would make another function of the same weights is
// refused; what only training or generation looks at there is skipped.
static void config_parse(Model *m, const unsigned char *bytes, size_t size, const char *name) {
    static const char *const sizes[] = {"n_layer", "n_head", "n_embd", "n_positions", "vocab_size"};
    static const struct {
        const char *key, *allowed;  // a|b|c
    } facts[] = {{"model_type", "gpt2"},
                 {"activation_function", "gelu_new|gelu_pytorch_tanh"},
                 {"layer_norm_epsilon", "1e-05|1e-5|0.00001"},
                 {"tie_word_embeddings", "true"},
                 {"scale_attn_weights", "true"},
                 {"scale_attn_by_inverse_layer_idx", "false"},
                 {"add_cross_attention", "false"}};
    enum { SIZES = 5 };
    const int fact_count = (int)(sizeof facts / sizeof *facts);
    Json j = {bytes, 0, size, NULL};
    int64_t value[SIZES] = {0}, inner = 0;
    char key[40], text[64];
    memset(m, 0, sizeof *m);
    for (int n = 0; json_next(&j, &n, '{', key, sizeof key);) {
        int s = 0, f = 0;
        for (; s < SIZES && strcmp(key, sizes[s]) != 0; s++) {
        }
        for (; f < fact_count && strcmp(key, facts[f].key) != 0; f++) {
        }
        if (s < SIZES) {
            if (value[s]) {
                json_fail(&j, "a size stands twice");
            }
            value[s] = json_count(&j);
        } else if (f < fact_count) {
            json_peek(&j) == '"' ? json_string(&j, text, sizeof text) : json_scalar(&j, text);
            if (!j.fault && !choice_find(facts[f].allowed, text, strlen(text))) {
                die("%s: %s is '%.40s'; this program computes GPT-2 with %s", name, key, text,
                    facts[f].allowed);
            }
        } else if (strcmp(key, "n_inner") == 0 && json_peek(&j) != 'n') {
            inner = json_count(&j);
        } else {
            json_skip(&j);
        }
    }
    json_end(&j, name);
    for (int s = 0; s < SIZES; s++) {
        if (value[s] < 1 || value[s] > 1 << 20) {
            die("%s: %s is %s", name, sizes[s], value[s] ? "too large" : "missing or 0");
        }
    }
    if (inner && inner != 4 * value[2]) {
        die("%s: n_inner is %" PRId64 "; this program's MLP has 4 x n_embd", name, inner);
    }
    m->L = (int)value[0];
    m->NH = (int)value[1];
    m->C = (int)value[2];
    m->maxT = (int)value[3];
    model_set_vocabulary(m, (int)value[4]);
    model_require(m, name);
}

// llm.c's model files: a header with the sizes, then the tensors, each with all its layers, in the
// order of tensor_table; version 3 holds fp32, version 5 bf16. llmc_model finds the sizes and
// returns the type, llmc_spans finds the tensors; spans: (L, FILE_TENSORS).
static int llmc_model(Model *m, const unsigned char *bytes, size_t size, const char *name) {
    LlmcHeader h = llmc_header(LLMC_MODEL, bytes, size, name);
    const int type = h.words[1] == 3 ? (int)FILE_F32 : (int)FILE_BF16;
    memset(m, 0, sizeof *m);
    m->maxT = h.words[2];
    m->V = h.words[3];
    m->L = h.words[4];
    m->NH = h.words[5];
    m->C = h.words[6];
    model_require(m, name);
    model_set_vocabulary(m, m->V);
    int64_t want = LLMC_HEADER_BYTES + model_elements(m) * file_types[type].bytes;
    if (h.words[7] != m->Vp || (int64_t)size != want) {
        die("%s: %zu bytes with %d padded rows; its shape makes %" PRId64 " bytes with %d", name,
            size, h.words[7], want, m->Vp);
    }
    return type;
}

static void llmc_spans(Span *spans, const Model *m, const unsigned char *bytes, int type) {
    bytes += LLMC_HEADER_BYTES;
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            Span *s = file_span(spans, tensor, l);
            s->data = bytes;
            s->type = type;
            bytes += tensor_size(m, tensor) * file_types[type].bytes;
        }
    }
}

// What may stand in a folder in place of model.safetensors, and what to do then.
static const char *model_folder_hint(const char *folder) {
    static const char *const hints[][2] = {
        {"pytorch_model.bin", "; pytorch_model.bin is not read: save_pretrained(...) of a newer "
                              "transformers makes model.safetensors"},
        {"log.jsonl", "; this is a run's output folder: name one of its step-NNNNNNNN"}};
    char path[PATH_BYTES];
    for (size_t i = 0; i < sizeof hints / sizeof hints[0]; i++) {
        path_print(path, "%s/%s", folder, hints[i][0]);
        if (access(path, F_OK) == 0) {
            return hints[i][1];
        }
    }
    return "";
}

// A part that weight_map names: opened at its first mention.
static void index_open_part(ModelFile *f, const char *folder, const char *part) {
    char path[PATH_BYTES];
    int k = 0;
    while (k < f->files && strcmp(f->parts[k], part) != 0) {
        k++;
    }
    if (k < f->files) {
        return;
    }
    if (part[0] == 0 || strchr(part, '/') || strlen(part) + 1 == MODEL_FILE_NAME ||
        f->files == MODEL_FILES) {
        die("%s: '%s': allowed are %d files, of names without a slash below %d bytes", f->name,
            part, MODEL_FILES, MODEL_FILE_NAME - 1);
    }
    path_print(path, "%s/%s", folder, part);
    if (mapping_open(&f->maps[k], path) != 0) {
        die("--model (-e): cannot open %s, which %s names: %s", path, f->name, file_error());
    }
    snprintf(f->parts[k], MODEL_FILE_NAME, "%s", part);
    f->files++;
    f->tensors += safetensors_spans(f->spans, &f->model, &f->maps[k], path);
}

// A tensor must lie in the part that weight_map says.
static void index_check(const ModelFile *f, const char *tensor, const char *part) {
    int k = 0, layer, i = file_tensor_find(tensor, f->model.L, &layer);
    while (strcmp(f->parts[k], part) != 0) {
        k++;
    }
    const unsigned char *data = i < 0 ? NULL : f->spans[layer * FILE_TENSORS + i].data;
    if (!data || data < f->maps[k].bytes || data > f->maps[k].bytes + f->maps[k].size) {
        die("%s: tensor %s: is not in %s, where weight_map says it lies", f->name, tensor, part);
    }
}

// Hugging Face's model.safetensors.index.json: {"metadata": {...}, "weight_map": {tensor: part}}.
// Two passes: every part is opened, then every tensor looked for. Writers differ in what they count
// as metadata's total_size (headers too, or a mask's bits, in fractions of a byte): it is not read.
static void index_parse(ModelFile *f, const char *folder, const Mapping *index) {
    char key[80], inner[80], part[MODEL_FILE_NAME];
    for (int pass = 0; pass < 2; pass++) {
        Json j = {index->bytes, 0, index->size, NULL};
        int tensors = 0;
        for (int n = 0; json_next(&j, &n, '{', key, sizeof key);) {
            if (strcmp(key, "weight_map") != 0) {
                json_skip(&j);
                continue;
            }
            for (int k = 0; json_next(&j, &k, '{', inner, sizeof inner);) {
                json_string(&j, part, sizeof part);
                tensors++;
                if (!j.fault) {
                    pass ? index_check(f, inner, part) : index_open_part(f, folder, part);
                }
            }
        }
        json_end(&j, f->name);
        if (pass && tensors != f->tensors) {
            die("%s: weight_map names %d tensors; its %d files hold %d", f->name, tensors,
                f->files, f->tensors);
        }
    }
}

// Opens the weights that -e names: a folder with config.json and model.safetensors or the index of
// its parts, that model.safetensors itself, or llm.c's file. Ends the run at any fault.
static void model_file_open(ModelFile *f, const char *path) {
    char config[PATH_BYTES];
    struct stat status;
    Mapping map, *weights = &f->maps[0], index;
    int is_folder = stat(path, &status) == 0 && S_ISDIR(status.st_mode), indexed = 0;
    memset(f, 0, sizeof *f);
    path_print(f->name, is_folder ? "%s/model.safetensors" : "%s", path);
    if (is_folder && access(f->name, F_OK) != 0) {
        path_print(config, "%s.index.json", f->name);
        indexed = access(config, F_OK) == 0;
        path_print(f->name, indexed ? "%s/model.safetensors.index.json" : "%s/model.safetensors",
                   path);
    }
    if (mapping_open(indexed ? &index : weights, f->name) != 0) {
        const char *why = file_error();  // the hint looks at other files
        die("--model (-e): cannot open %s: %s%s", f->name, why,
            is_folder ? model_folder_hint(path) : "");
    }
    if (!indexed && llmc_is(LLMC_MODEL, weights->bytes, weights->size)) {
        int type = llmc_model(&f->model, weights->bytes, weights->size, f->name);
        f->files = 1;
        f->spans = (Span *)alloc_zero((size_t)f->model.L * FILE_TENSORS, sizeof(Span));
        llmc_spans(f->spans, &f->model, weights->bytes, type);
        return;
    }
    const char *slash = strrchr(f->name, '/');
    path_print(config, "%.*sconfig.json", slash ? (int)(slash + 1 - f->name) : 0, f->name);
    if (mapping_open(&map, config) != 0) {
        die("--model (-e): cannot open %s: %s; it stands beside the weights and tells their sizes",
            config, file_error());
    }
    config_parse(&f->model, map.bytes, map.size, config);
    mapping_close(&map);
    f->transposed = 1;
    f->spans = (Span *)alloc_zero((size_t)f->model.L * FILE_TENSORS, sizeof(Span));
    if (indexed) {
        index_parse(f, path, &index);
        mapping_close(&index);
    } else {
        f->files = 1;
        safetensors_spans(f->spans, &f->model, weights, f->name);
    }
    spans_complete(f->spans, &f->model, f->name);
}

static void model_file_close(ModelFile *f) {
    for (int k = 0; k < f->files; k++) {
        mapping_close(&f->maps[k]);
    }
    free(f->spans);
    memset(f, 0, sizeof *f);
}

// A transposed tensor passes through the host in strips of STRIP rows, and is turned in tiles that
// stay in the cache whatever the rows' distance.
enum { STRIP = 256, TILE = 16 };
static int64_t strip_elements(const Model *m) {
    return max_i64(PIECE, STRIP * 4 * (int64_t)m->C);
}

// out (count,cols): rows `first` to first + count of a tensor (rows,cols) whose transpose a span
// holds. count <= STRIP.
static void span_transposed(real *out, const Span *s, int64_t rows, int64_t cols, int64_t first,
                            int64_t count) {
    #pragma omp parallel for
    for (int64_t c0 = 0; c0 < cols; c0 += TILE) {
        for (int64_t r0 = 0; r0 < count; r0 += TILE) {
            int64_t height = min_i64(TILE, count - r0), width = min_i64(TILE, cols - c0);
            real tile[TILE][TILE];
            for (int64_t c = 0; c < width; c++) {
                span_values(tile[c], s, (c0 + c) * rows + first + r0, height);
            }
            for (int64_t r = 0; r < height; r++) {
                for (int64_t c = 0; c < width; c++) {
                    out[(r0 + r) * cols + c0 + c] = tile[c][r];
                }
            }
        }
    }
}

// The split master: an fp32 weight's bits u are kept as the bf16 weight (u + 0x8000) >> 16, u
// rounded half up, and the low half u & 0xffff. Nothing is lost of a number; a NaN stays one,
// whatever its low half.
enum { MASTER_NAN = 0x7fc0 };
static uint16_t master_high(float value) {
    uint32_t u;
    memcpy(&u, &value, 4);
    return value != value ? (uint16_t)MASTER_NAN : (uint16_t)((u + 0x8000) >> 16);
}

static float master_join(float high, uint16_t low) {
    uint32_t u;
    memcpy(&u, &high, 4);
    u = (u - ((uint32_t)(low >> 15) << 16)) | low;
    memcpy(&high, &u, 4);
    return high;
}

// Index of the first number that is not finite, which the first step would spread to every weight,
// or is not in least .. most; -1: there is none.
static int64_t find_bad(const real *values, int64_t count, double least, double most) {
    int good = 1;
    int64_t i = 0;
    for (int64_t k = 0; k < count; k++) {
        // Without a branch, so that it becomes vector code.
        good &= (values[k] - values[k] == 0) & (values[k] >= (real)least) &
                (values[k] <= (real)most);
    }
    while (!good && isfinite(values[i]) && values[i] >= (real)least && values[i] <= (real)most) {
        i++;
    }
    return good ? -1 : i;
}

// The largest weight that an engine takes, and why another one, or any other number, is refused.
static double weight_most(const Engine *e) {
    return e->weight_most > 0 ? e->weight_most : INFINITY;
}
static const char *bad_reason(double value, double most) {
    return isfinite(value) && fabs(value) > most
               ? "fp16 ends at 65504, and --dtype bf16 or fp32 holds it"
               : "nothing can be trained from it";
}

// Fills the engine's weights from a file; moments become zero.
static void model_file_load(Engine *e, const ModelFile *f) {
    const Model *m = &f->model;
    char name[80];
    real *values = (real *)alloc_zero((size_t)strip_elements(m), sizeof(real));
    engine_clear(e, m);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        int64_t rows = tensor_rows(m, tensor), cols = tensor_cols(m, tensor);
        int swap = f->transposed && tensor_table[tensor].transposed;
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            const Span *s = file_span(f->spans, tensor, l);
            int64_t offset = tensor_offset(m, tensor, l), size = rows * cols;
            for (int64_t i = 0, count; i < size; i += count) {
                count = min_i64(swap ? STRIP * cols : (int64_t)PIECE, size - i);
                if (swap) {
                    span_transposed(values, s, rows, cols, i / cols, count / cols);
                } else {
                    span_values(values, s, i, count);
                }
                const double most = weight_most(e);
                const int64_t bad = find_bad(values, count, -most, most), at = i + bad;
                if (bad >= 0) {
                    file_tensor_name(name, "", tensor, l);
                    die("%s: tensor %s: element %" PRId64 " is %g: %s", f->name, name,
                        swap ? at % cols * rows + at / cols : at, (double)values[bad],
                        bad_reason(values[bad], most));
                }
                e->write(e, STATE_WEIGHTS, offset + i, values, count);
            }
            mapping_done(s->data, (size_t)(size * file_types[s->type].bytes));
        }
    }
    free(values);
}

// Numbers as a file holds them: FILE_F32, FILE_BF16, or FILE_U16, the low half.
static void file_values(unsigned char *out, int type, const real *values, int64_t count) {
    if (!GPT2_DOUBLE && type == FILE_F32) {
        memcpy(out, values, (size_t)count * 4);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        float value = (float)values[i];
        uint32_t u;
        memcpy(&u, &value, 4);
        uint16_t half = type == FILE_BF16 ? master_high(value) : (uint16_t)u;
        if (type == FILE_F32) {
            memcpy(out + 4 * i, &u, 4);
        } else {
            memcpy(out + 2 * i, &half, 2);
        }
    }
}

// out (count,rows) in `type`: the transpose of the first `count` columns of values (rows,cols).
static void file_transposed(unsigned char *out, int type, const real *values, int64_t rows,
                            int64_t cols, int64_t count) {
    #pragma omp taskloop
    for (int64_t r0 = 0; r0 < rows; r0 += TILE) {
        for (int64_t c0 = 0; c0 < count; c0 += TILE) {
            int64_t height = min_i64(TILE, rows - r0), width = min_i64(TILE, count - c0);
            real tile[TILE][TILE];
            for (int64_t r = 0; r < height; r++) {
                for (int64_t c = 0; c < width; c++) {
                    tile[c][r] = values[(r0 + r) * cols + c0 + c];
                }
            }
            for (int64_t c = 0; c < width; c++) {
                file_values(out + ((c0 + c) * rows + r0) * file_types[type].bytes, type, tile[c],
                            height);
            }
        }
    }
}

// Where the writing of weights stands: tensor by tensor as Hugging Face's files have them, without
// padding and transposed where they want it.
typedef struct {
    Engine *e;
    const Model *m;
    int type;
    int tensor, layer;  // under way
    int64_t at;         // elements of it that are written
    real *values;
} WeightPieces;

// The PieceSource of weights.
static size_t weight_piece(void *self, unsigned char *out) {
    WeightPieces *p = (WeightPieces *)self;
    if (p->tensor == TENSORS) {
        return 0;
    }
    int swap = tensor_table[p->tensor].transposed;
    int64_t rows = tensor_rows(p->m, p->tensor), cols = tensor_cols(p->m, p->tensor);
    int64_t size = rows * cols, offset = tensor_offset(p->m, p->tensor, p->layer);
    int64_t count = min_i64(swap ? STRIP * rows : (int64_t)PIECE, size - p->at);
    if (!swap) {
        p->e->read(p->e, STATE_WEIGHTS, offset + p->at, p->values, count);
        file_values(out, p->type, p->values, count);
    } else {
        if (p->at == 0) {
            p->e->read(p->e, STATE_WEIGHTS, offset, p->values, size);
        }
        file_transposed(out, p->type, p->values + p->at / rows, rows, cols, count / rows);
    }
    p->at += count;
    if (p->at == size) {
        p->at = 0;
        p->layer = (p->layer + 1) % tensor_copies(p->m, p->tensor);
        p->tensor += p->layer == 0;
    }
    return (size_t)(count * file_types[p->type].bytes);
}

// Writes model.safetensors in `type`, FILE_F32 or FILE_BF16.
static void model_file_save(Engine *e, const Model *m, int type, Writer *w) {
    HeaderText header;
    char name[80];
    header_start(&header);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        int64_t rows = tensor_rows(m, tensor), cols = tensor_cols(m, tensor);
        int swap = tensor_table[tensor].transposed, matrix = tensor_is_matrix(tensor);
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            file_tensor_name(name, "transformer.", tensor, l);
            header_tensor(&header, name, type, swap ? cols : matrix ? rows : 0,
                          swap || !matrix ? rows : cols);
        }
    }
    header_write(&header, w);
    // A transposed tensor has to be there whole before its first strip is written.
    const int64_t most = max_i64(strip_elements(m), 4 * (int64_t)m->C * m->C);
    real *values = (real *)alloc_zero((size_t)most, sizeof(real));
    WeightPieces pieces = {e, m, type, 0, 0, 0, values};
    writer_stream(w, weight_piece, &pieces, (size_t)(strip_elements(m) * file_types[type].bytes));
    free(values);
}

// -------------------------------------------------------------------------------------------------
// 2. Checkpoints
// A checkpoint is a folder step-NNNNNNNN of the output folder: model.safetensors and config.json,
// which transformers loads as they are; state-R-of-N.safetensors with what training needs beside:
// ranges of both moments in the run's type and, for bf16 weights, of the low halves of their fp32
// masters; counters and options; and manifest.json with the sizes and SHA-256 of the others. Of
// GPT-2's tokens there are also merges.txt, vocab.json and tokenizer_config.json, where the
// vocabulary is at hand.
//
//     step-N.tmp --(files and folders synced, renamed)--> step-N
//         ^                                                  |
//         +------ pruned: renamed first, then removed -------+
//
// The header of a state file, for two blocks (buckets 3 and 4) and two ranks:
//
//     "__metadata__": {"run": what a resume must share, "matmul": "...", "--lr": "0.001", ...,
//                      "step": "2000", ...}, "norms": {"dtype": "F64", "shape": [128], ...},
//     "m.0.0": {"dtype": "F32", "shape": [elements], ...}, ..., "m.4.0": ..., "v.0.0": ...
//
// where the second rank's "m.4.24576" goes on in bucket 4 from element 24576.
//
// A resume skips a step-N that is damaged. When step N is saved again, the old one is removed, or
// renamed to step-N.damaged where it holds files that are not ours.
// 1. It is written under its name with ".tmp", every file and folder synced, and renamed: what
//    bears the final name was complete then, whenever the machine stopped. A ".tmp" is never read;
//    the next run that writes there removes it.
// 2. A resume takes the newest checkpoint whose files are those of its manifest, byte for byte, and
//    says which it skipped and why.
// 3. The engine (chapter The engine) hands states over in pieces, so saving takes memory for one
//    tensor, on every rank.
// 4. A range is elements of one bucket of a state as one rank has it (chapter Buckets and visits),
//    whoever wrote it: a resume takes the states from any ranges that hold each element once.
// 5. Each rank writes its Nth of every bucket, all at the same time; rank 0 alone makes the folder,
//    writes the other files, renames and removes. Every phase ends with a word of all ranks: where
//    one has failed, all end, and what was there before stands.

// The files of a checkpoint. States have one for each rank that wrote.
enum {
    FILE_MODEL, FILE_CONFIG, FILE_MERGES, FILE_VOCABULARY, FILE_TOKENIZER, FILE_MANIFEST,
    FILE_STATE, MAX_RANKS = 1024, CHECKPOINT_FILES = FILE_STATE + MAX_RANKS, FILE_NAME = 48
};

// The name of a file; FILE_STATE + r is that of rank r.
static void file_name(char name[FILE_NAME], int file, int ranks) {
    static const char *const names[FILE_STATE] = {
        "model.safetensors", "config.json", "merges.txt", "vocab.json", "tokenizer_config.json",
        "manifest.json"};
    if (file < FILE_STATE) {
        snprintf(name, FILE_NAME, "%s", names[file]);
    } else {
        snprintf(name, FILE_NAME, "state-%d-of-%d.safetensors", file - FILE_STATE, ranks);
    }
}

// The file that has a name, -1: none of a checkpoint; in *ranks of how many a state is, else 0.
static int file_find(const char *name, int *ranks) {
    char text[FILE_NAME];
    // A name that is printed again as it was has no sign, space or zero too many.
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

// Removes a checkpoint's folder, the manifest first: what a kill leaves is no complete checkpoint.
// Of a link only itself: what it leads to was put elsewhere to stay.
static void checkpoint_remove(const char *folder) {
    char path[PATH_BYTES];
    if (readlink(folder, path, sizeof path) >= 0) {
        unlink(folder);
        return;
    }
    slow_begin();
    DIR *files = opendir(folder);  // read, as the manifest that counts the ranks may be lost
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
    slow_end();
}

// What a run knows beside its tensors. Random numbers are functions of the seed and these counters.
typedef struct {
    int64_t step, updates, position, skipped;  // position: sequences consumed (chapter Data)
    int64_t pending_validation;                // 1: a signal cut the one after `step` short
    int64_t loss_scale_log2, loss_scale_steps;  // of fp16: its scale, and steps since it changed
    NormWindow norms;
} RunState;

// The counters, as texts of the state file's metadata, and the most that a run can have counted.
enum { AS_STEP = -1, AS_UPDATES = -2 };
static const struct {
    const char *name;
    size_t offset;
    int optional;  // older checkpoints lack it: 0
    int64_t most;  // AS_STEP: the steps done; AS_UPDATES: those not skipped, no more and no less
} counter_rows[] = {{"step", offsetof(RunState, step), 0, 99999999},
                    {"skipped", offsetof(RunState, skipped), 0, AS_STEP},
                    {"updates", offsetof(RunState, updates), 0, AS_UPDATES},  // once both are known
                    {"position", offsetof(RunState, position), 0, (int64_t)1 << 53},
                    {"norm_count", offsetof(RunState, norms.count), 0, AS_STEP},
                    {"pending_validation", offsetof(RunState, pending_validation), 1, 1},
                    {"loss_scale_log2", offsetof(RunState, loss_scale_log2), 1, 127},
                    {"loss_scale_steps", offsetof(RunState, loss_scale_steps), 1, AS_STEP}};
enum { COUNTERS = sizeof counter_rows / sizeof counter_rows[0] };

static int64_t *counter(RunState *state, int i) {
    return (int64_t *)(void *)((char *)state + counter_rows[i].offset);
}

// What a run must share with the checkpoint it goes on from: facts of its model and data, and the
// options whose row in the table says so.
enum { IDENTITY_BYTES = 512 };
static void run_identity(char identity[IDENTITY_BYTES], const Settings *s, const Options *o,
                         const Dataset *d) {
    const Model *m = &s->model;
    uint64_t data = 0;
    for (int i = 0; i < d->shard_count; i++) {  // tokens here and there tell other data apart
        const Shard *shard = &d->shards[i];
        for (int64_t k = 0; k < 256; k++) {
            uint16_t token;
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
            n += snprintf(identity + n, (size_t)(IDENTITY_BYTES - n), " %s %s",
                          option_rows[i].name, option_text(text, o, &option_rows[i]));
            check(n < IDENTITY_BYTES, "the options that a resume must match are too many");
        }
    }
}

static void config_save(const Model *m, Writer *w) {
    char text[1024];
    int end = m->V == BYTE_VOCABULARY ? (int)BYTE_END_OF_TEXT
                                      : min_int(m->V - 1, GPT2_END_OF_TEXT);
    int n = snprintf(text, sizeof text,
                     "{\"architectures\": [\"GPT2LMHeadModel\"], \"model_type\": \"gpt2\",\n"
                     "\"n_layer\": %d, \"n_head\": %d, \"n_embd\": %d, \"n_positions\": %d,\n"
                     "\"vocab_size\": %d, \"activation_function\": \"gelu_new\",\n"
                     "\"layer_norm_epsilon\": 1e-05, \"tie_word_embeddings\": true,\n"
                     "\"resid_pdrop\": 0.0, \"embd_pdrop\": 0.0, \"attn_pdrop\": 0.0,\n"
                     "\"bos_token_id\": %d, \"eos_token_id\": %d}\n",
                     m->L, m->NH, m->C, m->maxT, m->V, end, end);
    writer_put(w, text, (size_t)n);
}

// A token in GPT-2's alphabet for bytes (chapter Tokenizer), as UTF-8. Returns its length.
static size_t token_in_alphabet(char out[2 * BPE_LONGEST], const char *bytes, int n) {
    size_t length = 0;
    for (int i = 0; i < n; i++) {
        const int b = (unsigned char)bytes[i];
        const int c = b <= 32 ? 256 + b : b < 127 ? b : b <= 160 ? 289 + b - 127
                    : b == 173 ? 323 : b;
        if (c >= 128) {
            out[length++] = (char)(192 | c >> 6);
        }
        out[length++] = (char)(c < 128 ? c : 128 | (c & 63));
    }
    return length;
}

// Bytes of the first of the two tokens that merge `id` joins: what the merges before it leave of
// its bytes.
static int merge_left(const Bpe *bpe, int id) {
    const char *bytes;
    int start[BPE_LONGEST + 1] = {0}, parts = bpe_bytes(bpe, id, &bytes);
    for (int i = 0; i <= parts; i++) {
        start[i] = i;
    }
    for (; parts > 2; parts--) {
        int best = INT_MAX, at = 0;
        for (int i = 0; i + 2 <= parts; i++) {
            int merged = bpe_id(bpe, bytes + start[i], (size_t)(start[i + 2] - start[i]));
            at = merged >= 0 && merged < best ? i : at;
            best = merged >= 0 ? min_int(best, merged) : best;
        }
        memmove(start + at + 1, start + at + 2, (size_t)(parts - at - 1) * sizeof *start);
    }
    return start[1];
}

// GPT-2's merges, vocabulary and special tokens as transformers reads them beside the weights.
static void tokenizer_save(const Bpe *bpe, const Model *m, int file, Writer *w) {
    char *text, word[2 * BPE_LONGEST];
    const char *bytes;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    check(f, "no memory for a vocabulary");
    fputs(file == FILE_MERGES ? "#version: 0.2\n" : "{", f);
    for (int id = file == FILE_MERGES ? 256 : 0; file != FILE_TOKENIZER && id < bpe->count; id++) {
        int n = bpe_bytes(bpe, id, &bytes);
        if (file == FILE_VOCABULARY) {
            fputs(id ? ", \"" : "\"", f);
            json_text(f, word, token_in_alphabet(word, bytes, n));
            fprintf(f, "\": %d", id);
        } else if (id != GPT2_END_OF_TEXT) {
            int left = merge_left(bpe, id);
            fwrite(word, 1, token_in_alphabet(word, bytes, left), f);
            fputc(' ', f);
            fwrite(word, 1, token_in_alphabet(word, bytes + left, n - left), f);
            fputc('\n', f);
        }
    }
    if (file == FILE_TOKENIZER) {
        fprintf(f, "\"tokenizer_class\": \"GPT2Tokenizer\", \"model_max_length\": %d, "
                   "\"add_prefix_space\": false,\n\"bos_token\": \"<|endoftext|>\", "
                   "\"eos_token\": \"<|endoftext|>\", \"unk_token\": \"<|endoftext|>\"",
                m->maxT);
    }
    fputs(file == FILE_MERGES ? "" : "}\n", f);
    check(fclose(f) == 0, "no memory for a vocabulary");
    writer_put(w, text, size);
    free(text);
}

// What a checkpoint is made of.
typedef struct {
    Engine *engine;
    const Settings *settings;
    const Options *options;
    const char *identity;  // run_identity
    const RunState *state;
    const Bpe *bpe;  // of GPT-2's tokens; NULL: none is at hand, or none is needed
} Snapshot;

// Elements first .. first + count - 1 of a bucket of a state, and where a file holds them. Version
// 2 of the format had one for each state, all of it as chapter The model lays it out.
typedef struct {
    int state, bucket;
    int64_t first, count;
    Span span;
    const char *file;  // that it was read from
} StateRange;
enum { WHOLE_STATE = -1, RANGE_NAME = 48 };
// Of the weights these files have what model.safetensors lacks.
static const char *const range_names[STATES] = {"master", "m", "v"};

// "m.3.0", the name of the file's tensor that is the range; its shape is the count.
static void range_name(char name[RANGE_NAME], const StateRange *r) {
    int n = snprintf(name, RANGE_NAME, "%s", range_names[r->state]);
    if (r->bucket != WHOLE_STATE) {
        snprintf(name + n, (size_t)(RANGE_NAME - n), ".%d.%" PRId64, r->bucket, r->first);
    }
}

// Elements that a range of its bucket has at most; 0: there is no such bucket.
static int64_t range_limit(const Model *m, const StateRange *r) {
    return r->bucket == WHOLE_STATE           ? tensor_offset(m, TENSORS, 0)
           : r->bucket < BUCKET_BLOCKS + m->L ? bucket_at(m, 1, r->bucket).count
                                              : 0;
}

// What a range holds of a tensor: elements first .. first + count - 1, nothing where count <= 0;
// `param` is where they are in a whole state, `state` in the range.
static TensorRange range_of_tensor(const Model *m, const StateRange *r, int tensor, int layer) {
    TensorRange t = {0, 0, 0, 0};
    int64_t at = tensor_offset(m, tensor, layer);
    const int other_block = r->bucket >= BUCKET_BLOCKS && r->bucket != BUCKET_BLOCKS + layer;
    if (r->bucket != WHOLE_STATE &&
        (other_block || tensor_bucket(m, tensor, layer, &at) != r->bucket)) {
        return t;
    }
    t.first = max_i64(r->first - at, 0);
    t.count = min_i64(r->first + r->count - at, tensor_size(m, tensor)) - t.first;
    t.param = tensor_offset(m, tensor, layer) + t.first;
    t.state = at + t.first - r->first;
    return t;
}

// The ranges that this rank writes: its part of every bucket of the states that are saved, of those
// that it shares with others too; to be freed.
static StateRange *state_ranges(const Settings *s, int *count) {
    const int buckets = BUCKET_BLOCKS + s->model.L;
    const int moments = s->moment_dtype == TYPE_BF16 ? (int)FILE_BF16 : (int)FILE_F32;
    StateRange *ranges = (StateRange *)alloc_zero(STATES * (size_t)buckets, sizeof *ranges);
    *count = 0;
    for (int state = s->split_master ? STATE_WEIGHTS : STATE_M; state < STATES; state++) {
        for (int b = 0; b < buckets; b++) {
            StateRange *r = &ranges[*count];
            r->state = state;
            r->bucket = b;
            const int64_t part = bucket_at(&s->model, s->ranks, b).part;
            const int64_t end = range_limit(&s->model, r);  // nobody writes the padding of N parts
            r->first = min_i64(s->rank * part, end);
            r->count = min_i64(part, end - r->first);
            *count += r->count > 0;
            r->span.type = state == STATE_WEIGHTS ? (int)FILE_U16 : moments;
        }
    }
    return ranges;
}

// Where the writing of ranges stands: element `at` of the first of those that are left.
typedef struct {
    Engine *e;
    const Model *m;
    const StateRange *ranges;
    int left;
    int64_t at;
    real *values;
} RangePieces;

// The PieceSource of ranges. What lies between tensors is written as 0, and read by nobody.
static size_t range_piece(void *self, unsigned char *out) {
    RangePieces *p = (RangePieces *)self;
    if (p->left == 0) {
        return 0;
    }
    StateRange r = *p->ranges;
    r.first += p->at;
    r.count = min_i64(PIECE, r.count - p->at);
    memset(p->values, 0, (size_t)r.count * sizeof(real));
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(p->m, tensor); l++) {
            const TensorRange t = range_of_tensor(p->m, &r, tensor, l);
            if (t.count > 0) {
                p->e->read_own(p->e, r.state, t.param, p->values + t.state, t.count);
            }
        }
    }
    file_values(out, r.span.type, p->values, r.count);
    p->at += r.count;
    if (p->at == p->ranges->count) {
        p->at = 0;
        p->ranges++;
        p->left--;
    }
    return (size_t)(r.count * file_types[r.span.type].bytes);
}

// How an engine chose its products' algorithms, as a checkpoint tells it; "": nothing was chosen.
static const char *engine_matmul(const Engine *e) { return e->matmul ? e->matmul : ""; }

// States and counters; what the run must share with a resume, its options and the choices that its
// numbers depend on go into the metadata.
static void state_save(const Snapshot *snapshot, Writer *w) {
    const char *matmul = engine_matmul(snapshot->engine);
    int count;
    StateRange *ranges = state_ranges(snapshot->settings, &count);
    HeaderText header;
    header_start(&header);
    fprintf(header.file, ",\"run\":\"%s\",\"matmul\":\"", snapshot->identity);
    json_text(header.file, matmul, strlen(matmul));
    for (int i = 0; i < OPTION_ROWS; i++) {
        char text[64];
        const char *value = option_text(text, snapshot->options, &option_rows[i]);
        fprintf(header.file, "\",\"--%s\":\"", option_rows[i].name);
        json_text(header.file, value, strlen(value));
    }
    fputs("\"", header.file);
    RunState counters = *snapshot->state;
    for (int i = 0; i < COUNTERS; i++) {
        fprintf(header.file, ",\"%s\":\"%" PRId64 "\"", counter_rows[i].name,
                *counter(&counters, i));
    }
    header_tensor(&header, "norms", FILE_F64, 0, NORM_WINDOW);
    for (int i = 0; i < count; i++) {
        char name[RANGE_NAME];
        range_name(name, &ranges[i]);
        header_tensor(&header, name, ranges[i].span.type, 0, ranges[i].count);
    }
    header_write(&header, w);
    writer_put(w, counters.norms.values, sizeof counters.norms.values);
    RangePieces pieces = {snapshot->engine, &snapshot->settings->model, ranges, count, 0,
                          (real *)alloc_zero(PIECE, sizeof(real))};
    writer_stream(w, range_piece, &pieces, PIECE * sizeof(float));
    free(pieces.values);
    free(ranges);
}

typedef struct {
    int64_t bytes;
    char sha256[SHA256_TEXT];  // "": the file is not there
} ManifestRow;
typedef struct {
    int ranks;  // that wrote states
    int64_t step;
    ManifestRow files[CHECKPOINT_FILES];
} Manifest;

// Sizes and SHA-256 of the other files.
static void manifest_save(const Manifest *manifest, int64_t step, Writer *w) {
    char text[256], name[FILE_NAME];
    int n = snprintf(text, sizeof text, "{\"format\": \"train_gpt2 checkpoint\", "
                     "\"version\": 3, \"step\": %" PRId64 ", \"files\": {", step);
    writer_put(w, text, (size_t)n);
    for (int k = 0; k < FILE_STATE + manifest->ranks; k++) {
        const ManifestRow *row = &manifest->files[k];
        if (row->sha256[0]) {
            file_name(name, k, manifest->ranks);
            n = snprintf(text, sizeof text,
                         "%s\n\"%s\": {\"bytes\": %" PRId64 ", \"sha256\": \"%s\"}",
                         k ? "," : "", name, row->bytes, row->sha256);
            writer_put(w, text, (size_t)n);
        }
    }
    writer_put(w, "}}\n", 3);
}

// A checkpoint that is being saved.
typedef struct {
    const Snapshot *snapshot;
    char folder[PATH_BYTES];  // with ".tmp"
    char problem[PATH_BYTES + 128];  // of this rank; "": none
    Manifest manifest;
} Saving;

__attribute__((format(printf, 2, 3)))
static void save_problem(Saving *save, const char *what, ...) {
    va_list args;
    va_start(args, what);
    vsnprintf(save->problem, sizeof save->problem, what, args);
    va_end(args);
}

// Writes one file of a checkpoint, and notes it in the manifest; nothing behind a failure. All
// ranks make the model, as each may have weights that the others lack, and rank 0 writes it.
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
    switch (file) {
        case FILE_MODEL:
            model_file_save(snapshot->engine, &s->model,
                            s->dtype == TYPE_BF16 ? (int)FILE_BF16 : (int)FILE_F32, &w);
            break;
        case FILE_CONFIG: config_save(&s->model, &w); break;
        case FILE_MERGES: case FILE_VOCABULARY: case FILE_TOKENIZER:
            tokenizer_save(snapshot->bpe, &s->model, file, &w);
            break;
        case FILE_MANIFEST: manifest_save(&save->manifest, snapshot->state->step, &w); break;
        default: state_save(snapshot, &w);
    }
    writer_close(&w);
    row->bytes = w.bytes;
    memcpy(row->sha256, w.hash, SHA256_TEXT);
    if (w.error) {
        save_problem(save, "cannot write %s: %s; what was there before stands", w.file,
                     strerror(w.error));
    }
}

// Ends a phase of saving. Where a rank has failed, rank 0 removes what was written, and then the
// run ends with the line of the first that did; the others wait until they are ended.
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
    engine_agree(save->snapshot->engine);  // or rank 0 might be ended before that
    looks_interrupt(1);                    // or its line might wait for a reader for ever
    die_after_ms = fault == this_rank.rank + 1 ? 0 : rank_patience_ms();
    if (!failed) {
        die("rank %d cannot save, and says why", fault - 1);
    }
    die("%s", save->problem);
}

// Rank 0's last phase: the manifest, and the folder gets its final name.
static void save_finish(Saving *save, const char *output, const char *path) {
    char aside[PATH_BYTES];
    path_print(aside, "%s.damaged", path);
    save_file(save, FILE_MANIFEST);
    if (save->problem[0]) {
        return;
    }
    fsync_folder(save->folder);
    checkpoint_remove(path);  // a damaged one, which the resume skipped
    slow_begin();
    rename(path, aside);  // where it holds what is not ours
    const int renamed = rename(save->folder, path) == 0;
    slow_end();
    if (!renamed) {
        save_problem(save, "cannot rename checkpoint %s to %s: %s", save->folder, path,
                     strerror(errno));
        return;
    }
    fsync_folder(output);
}

// Saves a run as `output`/step-NNNNNNNN, which all ranks call; path receives the folder's name.
static void checkpoint_save(const Snapshot *snapshot, const char *output, char path[PATH_BYTES]) {
    static Saving save;
    memset(&save, 0, sizeof save);
    save.snapshot = snapshot;
    save.manifest.ranks = snapshot->settings->ranks;
    path_print(path, "%s/step-%08" PRId64, output, snapshot->state->step);
    path_print(save.folder, "%s.tmp", path);
    slow_begin();
    if (this_rank.rank == 0 && mkdir(save.folder, 0755) != 0 && errno != EEXIST) {
        save_problem(&save, "cannot create checkpoint %s: %s", save.folder, strerror(errno));
    }
    slow_end();
    save_agree(&save);
    save_file(&save, FILE_MODEL);
    save_file(&save, FILE_STATE + this_rank.rank);
    ManifestRow *states = &save.manifest.files[FILE_STATE], mine = states[this_rank.rank];
    engine_gather(snapshot->engine, states, &mine, sizeof mine);
    save_agree(&save);
    if (this_rank.rank == 0) {
        save_file(&save, FILE_CONFIG);
        for (int k = FILE_MERGES; snapshot->bpe && k <= FILE_TOKENIZER; k++) {
            save_file(&save, k);
        }
        save_finish(&save, output, path);
    }
    save_agree(&save);
}

// Steps of checkpoints, the newest first; `steps` is to be freed.
typedef struct {
    int64_t *steps;
    int count;
} CheckpointList;

static int compare_newest_first(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

// The folders step-NNNNNNNN`suffix` of `output`: "" lists checkpoints, ".tmp" unfinished ones.
static CheckpointList checkpoint_list(const char *output, const char *suffix) {
    CheckpointList list = {NULL, 0};
    DIR *folder = opendir(output);
    struct dirent *entry;
    errno = folder ? 0 : errno;
    while (folder && (entry = readdir(folder)) != NULL) {
        int64_t step;
        int end = 0;
        if (sscanf(entry->d_name, "step-%8" SCNd64 "%n", &step, &end) == 1 && end == 13 &&
            strcmp(entry->d_name + end, suffix) == 0) {
            if ((list.count & (list.count - 1)) == 0) {  // full at every power of two
                const size_t room = 2 * ((size_t)list.count + 1);
                list.steps = (int64_t *)realloc(list.steps, room * sizeof(int64_t));
                check(list.steps, "no memory for a list of checkpoints");
            }
            list.steps[list.count++] = step;
        }
        errno = 0;  // readdir tells its end from a failure by errno alone
    }
    if (!folder || errno != 0) {  // "none" would start the run anew and cut its log
        die("--output (-o): cannot list %s: %s", output, strerror(errno));
    }
    closedir(folder);
    if (list.count) {
        qsort(list.steps, (size_t)list.count, sizeof(int64_t), compare_newest_first);
    }
    return list;
}

// Removes the unfinished checkpoints that a kill left. Only the run that holds the folder's lock
// may: another run's unfinished checkpoint is being written.
static void checkpoint_sweep(const char *output) {
    CheckpointList list = checkpoint_list(output, ".tmp");
    for (int i = 0; i < list.count; i++) {
        char path[PATH_BYTES];
        path_print(path, "%s/step-%08" PRId64 ".tmp", output, list.steps[i]);
        checkpoint_remove(path);
    }
    free(list.steps);
}

// Removes all but the newest `keep` checkpoints up to step `newest`, the run's own; a later one is
// damaged, and no reason to remove a verified one. One that goes is renamed first: a kill leaves it
// unfinished, not damaged.
static void checkpoint_prune(const char *output, int64_t keep, int64_t newest) {
    CheckpointList list = checkpoint_list(output, "");
    for (int i = 0, kept = 0; i < list.count; i++) {
        char path[PATH_BYTES], gone[PATH_BYTES];
        if (list.steps[i] > newest || kept++ < keep) {
            continue;
        }
        path_print(path, "%s/step-%08" PRId64, output, list.steps[i]);
        path_print(gone, "%s.tmp", path);
        slow_begin();
        if (rename(path, gone) == 0) {
            checkpoint_remove(gone);
        }
        slow_end();
    }
    free(list.steps);
}

// The manifest's object of files. Returns NULL, or what is wrong.
static const char *manifest_files(Manifest *manifest, Json *j) {
    char key[FILE_NAME];
    int ranks;
    for (int n = 0; json_next(j, &n, '{', key, sizeof key);) {
        const int file = file_find(key, &ranks);
        if (file < 0 || file == FILE_MANIFEST || manifest->files[file].sha256[0] ||
            (ranks && manifest->ranks && ranks != manifest->ranks)) {
            return "it names a file twice, or one that is not of a checkpoint";
        }
        ManifestRow *row = &manifest->files[file];
        manifest->ranks = ranks ? ranks : manifest->ranks;
        for (int i = 0; json_next(j, &i, '{', key, sizeof key);) {
            if (strcmp(key, "bytes") == 0) {
                row->bytes = json_count(j);
            } else if (strcmp(key, "sha256") == 0) {
                json_string(j, row->sha256, SHA256_TEXT);
            } else {
                json_skip(j);
            }
        }
    }
    return NULL;
}

// Reads sizes and hashes of a checkpoint's files. Returns NULL, or what is wrong.
static const char *manifest_parse(Manifest *manifest, const unsigned char *bytes, size_t size) {
    Json j = {bytes, 0, size, NULL};
    char key[40], format[40] = "";
    int64_t version = 0;
    const char *wrong = NULL;
    memset(manifest, 0, sizeof *manifest);
    for (int n = 0; !wrong && json_next(&j, &n, '{', key, sizeof key);) {
        if (strcmp(key, "format") == 0) {
            json_string(&j, format, sizeof format);
        } else if (strcmp(key, "version") == 0) {
            version = json_count(&j);
        } else if (strcmp(key, "step") == 0) {
            manifest->step = json_count(&j);
        } else if (strcmp(key, "files") == 0) {
            wrong = manifest_files(manifest, &j);
        } else {
            json_skip(&j);
        }
    }
    manifest->ranks = manifest->ranks ? manifest->ranks : 1;  // whose file will be missed
    if (!wrong && (json_peek(&j) >= 0 || j.fault || strcmp(format, "train_gpt2 checkpoint") != 0)) {
        return "it is damaged";
    }
    return wrong                          ? wrong
           : version != 2 && version != 3 ? "its version is not 2 or 3, those this program reads"
                                          : NULL;
}

// The same of a file, which may also not be there.
static const char *manifest_open(Manifest *manifest, const char *path) {
    Mapping map;
    if (mapping_open(&map, path) != 0) {
        return file_error();
    }
    const char *fault = manifest_parse(manifest, map.bytes, map.size);
    mapping_close(&map);
    return fault;
}

// The step of the checkpoint whose weights these are, so that samples repeat those of its run
// whatever its folder is called; 0 where no manifest beside them tells it.
static int64_t weights_step(const ModelFile *f) {
    static Manifest manifest;
    char path[PATH_BYTES];
    const char *slash = strrchr(f->name, '/');
    path_print(path, "%.*smanifest.json", slash ? (int)(slash + 1 - f->name) : 0, f->name);
    return manifest_open(&manifest, path) ? 0 : manifest.step;
}

// Is a file of `row`'s size and SHA-256? Returns NULL, or what is wrong. The size comes first: it
// costs nothing. Not mapped: a sector that the disk cannot read has to be an error, not a signal.
static const char *file_compare(const char *path, const ManifestRow *row) {
    Sha256 sha;
    char text[SHA256_TEXT];
    int64_t size = 0, count = 0;
    const int fd = file_open(path, &size);
    const char *wrong = fd < 0                ? "cannot be read"
                        : size != row->bytes ? "has not its manifest's size"
                                              : NULL;
    unsigned char *piece = (unsigned char *)alloc_zero(PIECE, 1);
    sha256_start(&sha);
    for (int64_t at = 0; !wrong && at < size; at += count) {
        count = min_i64(PIECE, size - at);
        wrong = file_read(fd, piece, count, at) ? "cannot be read" : NULL;
        sha256_add(&sha, piece, (size_t)count);
    }
    free(piece);
    if (fd >= 0) {
        close(fd);
    }
    sha256_end(&sha, text);
    return wrong || strcmp(text, row->sha256) == 0 ? wrong : "is damaged: its SHA-256 is another";
}

// Is a checkpoint's every file as its manifest says? Returns how many ranks wrote states, or 0 and
// what is wrong.
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
        const int vocabulary = i >= FILE_MERGES && i <= FILE_TOKENIZER;  // not all have one
        const int listed = i != FILE_MANIFEST && (!vocabulary || row->sha256[0]);
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

// What the state files of a checkpoint hold together.
typedef struct {
    StateRange *ranges;  // to be freed
    int count;
    RunState run;
    char identity[IDENTITY_BYTES];
    Safetensors header;  // of the first one, for the rest of its metadata
} StateFiles;

// Adds the range that a tensor of a state file is.
static void state_add_range(StateFiles *out, const Model *m, const FileTensor *t,
                            const char *name) {
    StateRange r = {0, WHOLE_STATE, 0, t->count, {t->data, t->type}, name};
    char text[RANGE_NAME];
    const size_t length = strcspn(t->name, ".");
    while (r.state < STATES && (strlen(range_names[r.state]) != length ||
                                memcmp(range_names[r.state], t->name, length) != 0)) {
        r.state++;
    }
    file_require(r.state < STATES, name, t->name, "is unknown");
    sscanf(t->name + length, ".%6d.%16" SCNd64, &r.bucket, &r.first);
    range_name(text, &r);
    file_require(strcmp(text, t->name) == 0, name, t->name, "is unknown");
    const int64_t limit = r.bucket >= WHOLE_STATE ? range_limit(m, &r) : 0;
    file_require(r.first >= 0 && r.count > 0 && r.first + r.count <= limit, name, t->name,
                 "is no part of this model's states");
    file_require(r.state == STATE_WEIGHTS ? t->type == FILE_U16 : t->type <= FILE_BF16, name,
                 t->name, "has not the type of this state");
    if ((out->count & (out->count - 1)) == 0) {  // full at every power of two
        out->ranges = (StateRange *)realloc(out->ranges, 2 * ((size_t)out->count + 1) * sizeof r);
        check(out->ranges, "no memory for the ranges of a state");
    }
    out->ranges[out->count++] = r;
}

// Adds a rank's state file to `out`, which the first one begins; all have the same counters.
static void state_parse(StateFiles *out, const Model *m, const unsigned char *bytes, size_t size,
                        const char *name) {
    Safetensors f;
    FileTensor t;
    RunState run;
    char identity[IDENTITY_BYTES];
    int norms = 0;
    memset(&run, 0, sizeof run);
    safetensors_start(&f, bytes, size, name);
    while (safetensors_next(&f, &t)) {
        if (strcmp(t.name, "norms") != 0) {
            state_add_range(out, m, &t, name);
            continue;
        }
        file_require(t.type == FILE_F64 && t.count == NORM_WINDOW && !norms++, name, t.name,
                     "has another type or size, or appears in the file twice");
        memcpy(run.norms.values, t.data, sizeof run.norms.values);
        for (int i = 0; i < NORM_WINDOW; i++) {
            if (!isfinite(run.norms.values[i]) || run.norms.values[i] < 0) {
                die("%s: norms: element %d is %g: no norm", name, i, run.norms.values[i]);
            }
        }
    }
    file_require(norms, name, "norms", "is missing");
    safetensors_text(&f, "run", identity, sizeof identity);
    for (int i = 0; i < COUNTERS; i++) {
        char text[24], *end;
        safetensors_text(&f, counter_rows[i].name, text, sizeof text);
        if (text[0] == 0 && counter_rows[i].optional) {
            continue;
        }
        const int64_t row = counter_rows[i].most, updates = run.step - run.skipped;
        const int64_t least = row == AS_UPDATES ? updates : 0, value = strtoll(text, &end, 10);
        const int64_t most = row == AS_UPDATES ? updates : row == AS_STEP ? run.step : row;
        if (end == text || *end != 0 || value < least || value > most) {
            die("%s: '%s' is '%s' in its metadata, allowed is %" PRId64 " to %" PRId64, name,
                counter_rows[i].name, text, least, most);
        }
        *counter(&run, i) = value;
    }
    if (!out->header.name) {
        out->header = f;
        out->run = run;
        memcpy(out->identity, identity, sizeof identity);
    } else if (memcmp((const void *)&run, (const void *)&out->run, sizeof run) != 0 ||
               strcmp(identity, out->identity) != 0) {  // both cleared before they were filled
        die("%s is of another run or step than %s", name, out->header.name);
    }
}

static int range_compare(const void *a, const void *b) {
    const StateRange *x = (const StateRange *)a, *y = (const StateRange *)b;
    return x->state != y->state     ? x->state - y->state
           : x->bucket != y->bucket ? x->bucket - y->bucket
                                    : (x->first > y->first) - (x->first < y->first);
}

// Ends the run unless the ranges of `ranks` files hold each element of each state once; of the
// master all or nothing, because a run that had none saved none.
static void state_cover(StateFiles *f, const Model *m, const char *folder, int ranks) {
    char name[RANGE_NAME], file[FILE_NAME];
    int i = 0;
    if (f->count) {
        qsort(f->ranges, (size_t)f->count, sizeof *f->ranges, range_compare);
    }
    for (int state = 0; state < STATES; state++) {
        const int some = i < f->count && f->ranges[i].state == state;
        const int whole = some && f->ranges[i].bucket == WHOLE_STATE;
        const int end = whole ? 0 : some || state != STATE_WEIGHTS ? BUCKET_BLOCKS + m->L : 0;
        // What is wanted next is there, or else before it something twice, or behind it a gap.
        for (int bucket = whole ? (int)WHOLE_STATE : 0; bucket < end; bucket++) {
            StateRange want = {state, bucket, 0, 0, {NULL, 0}, NULL};
            const int64_t limit = range_limit(m, &want);
            for (; want.first < limit; want.first += f->ranges[i++].count) {
                const int order = i < f->count ? range_compare(&f->ranges[i], &want) : 1;
                if (order < 0) {
                    break;
                }
                range_name(name, &want);
                if (order > 0) {
                    const int64_t part = whole ? limit : bucket_at(m, ranks, bucket).part;
                    file_name(file, FILE_STATE + (int)(want.first / part), ranks);
                    die("checkpoint %s: its state files lack %s, which should be in %s", folder,
                        name, file);
                }
            }
        }
        if (i < f->count && f->ranges[i].state == state) {
            range_name(name, &f->ranges[i]);
            die("checkpoint %s: its state files hold elements of %s twice, in %s and %s", folder,
                name, f->ranges[i - 1].file, f->ranges[i].file);
        }
    }
}

// Takes what this rank keeps of a range into the engine, of the master all where weights are whole
// and have the low halves in themselves: for these all ranks call alike, since fp16's master, which
// they are joined to, is in parts. Otherwise it asks no other rank. Ends the run at a number that
// is not finite, and at a second moment below 0.
static void range_load(Engine *e, const Settings *s, const StateRange *r, const char *folder) {
    const int in_weights = r->state == STATE_WEIGHTS && !s->split_master;
    real *values = (real *)alloc_zero(PIECE, sizeof(real));
    char name[80];
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        const int whole = in_weights && !tensor_divided(s, HOME_OF_WEIGHTS, tensor);
        for (int l = 0; l < tensor_copies(&s->model, tensor); l++) {
            const TensorRange t = range_of_tensor(&s->model, r, tensor, l);
            const TensorRange own = whole ? tensor_range(s, tensor, l, 1)
                                          : tensor_update_range(s, tensor, l);
            const int64_t end = min_i64(t.first + t.count, own.first + own.count);
            for (int64_t i = max_i64(t.first, own.first), count; i < end; i += count) {
                const int64_t in_state = t.param + i - t.first, in_range = t.state + i - t.first;
                count = min_i64(PIECE, end - i);
                if (r->state == STATE_WEIGHTS) {
                    (whole ? e->read : e->read_own)(e, STATE_WEIGHTS, in_state, values, count);
                    slow_begin();
                    for (int64_t k = 0; k < count; k++) {
                        uint16_t low;
                        memcpy(&low, r->span.data + 2 * (in_range + k), 2);
                        values[k] = (real)master_join((float)values[k], low);
                    }
                    slow_end();
                } else {
                    span_values(values, &r->span, in_range, count);
                }
                const double most = r->state == STATE_WEIGHTS ? weight_most(e) : INFINITY;
                const int64_t bad = find_bad(values, count, r->state == STATE_V ? 0 : -most, most);
                if (bad >= 0) {
                    file_tensor_name(name, "", tensor, l);
                    die("checkpoint %s: %s of %s: element %" PRId64 " is %g: %s", folder,
                        range_names[r->state], name, i + bad, (double)values[bad],
                        bad_reason(values[bad], most));
                }
                e->write(e, r->state, in_state, values, count);
            }
        }
    }
    mapping_done(r->span.data, (size_t)(r->count * file_types[r->span.type].bytes));
    free(values);
}

// One value of an option in a message; 0 without a default is one that was left to the program.
static void option_print(const OptionRow *row, const char *value) {
    if (value[0] && (row->value || strcmp(value, "0") != 0)) {
        shell_print(value);
    } else {
        printf("not given");
    }
}

// The text of an option in a checkpoint; the default where its program did not have the option.
static void option_was(char was[PATH_BYTES], const StateFiles *f, const OptionRow *row) {
    Options defaults;
    char text[64];
    options_default(&defaults);
    snprintf(text, sizeof text, "--%s", row->name);
    safetensors_text(&f->header, text, was, PATH_BYTES);
    if (!was[0]) {
        snprintf(was, PATH_BYTES, "%s", option_text(text, &defaults, row));
    }
}

// Compares the options with those of a checkpoint. `saying` 0: ends the run at one that may not be
// another; 1: says which of the rest are, as they count from here on. Version 2 of the format kept
// them all in one text, which is not read.
static void checkpoint_options(const Snapshot *run, const StateFiles *f, const char *folder,
                               int saying) {
    char was[PATH_BYTES], text[64];
    safetensors_text(&f->header, "--seed", was, sizeof was);
    // The seed has a text wherever the options have one each.
    const int rows = was[0] ? (int)OPTION_ROWS : 0;
    for (int i = 0; i < rows; i++) {
        const OptionRow *row = &option_rows[i];
        const char *now = option_text(text, run->options, row);
        option_was(was, f, row);
        if (row->on_resume == OWN || strncmp(now, was, sizeof was - 1) == 0) {
            continue;
        }
        if (row->on_resume == SAME) {
            die("checkpoint %s is of another run: it has --%s %s; here: --%s %s", folder,
                row->name, was, row->name, now);
        }
        if (saying) {
            printf("  --%s is ", row->name);
            option_print(row, now);
            printf(", was ");
            option_print(row, was);
            printf("\n");
        }
    }
}

// Has the engine take the algorithms of the checkpoint's products, on every rank and however quiet
// the run is: its bits hang on them. 0: it cannot.
static int checkpoint_matmul(Engine *e, const StateFiles *f) {
    char matmul[MATMUL_TEXT];
    safetensors_text(&f->header, "matmul", matmul, sizeof matmul);
    return !matmul[0] || strcmp(matmul, engine_matmul(e)) == 0 ||
           (e->take_matmul && e->take_matmul(e, matmul));
}

// What a run goes on without, and what it does with wider numbers than its own.
static void checkpoint_announce(const Snapshot *run, const StateFiles *f, int weights_fp32,
                                int other_matmul, const char *folder) {
    const Settings *s = run->settings;
    int moments_fp32 = 0;
    for (int i = 0; i < f->count; i++) {
        moments_fp32 |= f->ranges[i].state != STATE_WEIGHTS && f->ranges[i].span.type == FILE_F32;
        weights_fp32 |= f->ranges[i].state == STATE_WEIGHTS;
    }
    if (weights_fp32 && s->dtype == TYPE_BF16 && !s->split_master) {
        printf("weights were fp32 in %s and are bf16 from here on\n", folder);
    }
    if (moments_fp32 && s->moment_dtype == TYPE_BF16) {
        printf("moments were fp32 in %s and are bf16 from here on\n", folder);
    }
    if (other_matmul) {
        printf("matmul algorithms are not those of %s: losses may differ in rounding\n", folder);
    }
    if (f->run.loss_scale_log2 && s->dtype != TYPE_FP16) {
        printf("the loss scale of %s, 2^%" PRId64 ", is for fp16 and dropped\n", folder,
               f->run.loss_scale_log2);
    }
}

// Loads a verified checkpoint, whose states `ranks` ranks wrote, into the run's engine and `state`.
static void checkpoint_load(const Snapshot *run, RunState *state, const char *folder, int ranks) {
    const Settings *s = run->settings;
    char (*paths)[PATH_BYTES] = (char (*)[PATH_BYTES])alloc_zero((size_t)ranks, PATH_BYTES);
    Mapping *maps = (Mapping *)alloc_zero((size_t)ranks, sizeof *maps);
    char name[FILE_NAME];
    ModelFile model;
    StateFiles f;
    memset(&f, 0, sizeof f);
    model_file_open(&model, folder);
    for (int r = 0; r < ranks; r++) {
        file_name(name, FILE_STATE + r, ranks);
        path_print(paths[r], "%s/%s", folder, name);
        if (mapping_open(&maps[r], paths[r]) != 0) {
            die("cannot open %s: %s", paths[r], file_error());
        }
        state_parse(&f, &model.model, maps[r].bytes, maps[r].size, paths[r]);
    }
    state_cover(&f, &model.model, folder, ranks);
    checkpoint_options(run, &f, folder, 0);
    if (strcmp(f.identity, run->identity) != 0 ||
        memcmp(&model.model, &s->model, sizeof(Model)) != 0) {
        size_t at = 0;  // of the first fact, a name and its value, that differs
        for (size_t i = 0, spaces = 0; f.identity[i] && f.identity[i] == run->identity[i]; i++) {
            spaces += f.identity[i] == ' ';
            at = f.identity[i] == ' ' && spaces % 2 == 0 ? i + 1 : at;
        }
        die("checkpoint %s is of another run: it has %s; here: %s", folder, f.identity + at,
            run->identity + at);
    }
    const int other_matmul = !checkpoint_matmul(run->engine, &f);
    model_file_load(run->engine, &model);
    for (int i = 0; i < f.count; i++) {
        range_load(run->engine, s, &f.ranges[i], folder);
    }
    if (!run->options->quiet) {
        printf("resumed from %s\n", folder);
        checkpoint_options(run, &f, folder, 1);
        checkpoint_announce(run, &f, file_span(model.spans, WTE, 0)->type == FILE_F32,
                            other_matmul, folder);
    }
    *state = f.run;
    // What is dropped here is written as dropped by the next checkpoint. Where there is none, as
    // after a run of another type, the engine's first one holds.
    if (!run->engine->scale_loss) {
        state->loss_scale_log2 = state->loss_scale_steps = 0;
    } else if (state->loss_scale_log2) {
        run->engine->scale_loss(run->engine, (int)state->loss_scale_log2, state->loss_scale_steps);
    }
    for (int r = 0; r < ranks; r++) {
        mapping_close(&maps[r]);
    }
    free(maps);
    free(paths);
    free(f.ranges);
    model_file_close(&model);
}
