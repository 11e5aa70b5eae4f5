// data/weights.c -- GPT-2 weights in the file formats of Hugging Face and llm.c.
//
// Part of train_gpt2.c (chapter Weights and checkpoints). Reads llm.c's .bin files and Hugging
// Face's config.json and model.safetensors, which may be split into parts, and writes safetensors.
// Hugging Face stores a block's weight matrices as (in, out), the transpose of the layout in
// memory, and wte without padding rows.

// Tensors that Hugging Face's files may contain but tensor_table lacks: two for the causal mask,
// and the head, which is tied to wte.
enum { FILE_MASK = TENSORS, FILE_MASKED_BIAS, FILE_HEAD, FILE_TENSORS };
static const struct {
    const char *hf_name;
    int per_layer;
} extra_table[FILE_TENSORS - TENSORS] = {
    {"attn.bias", 1}, {"attn.masked_bias", 1}, {"lm_head.weight", 0}};

// Writes the name of a tensor: prefix, "h.N." if it belongs to block N, and Hugging Face's name.
static void file_tensor_name(char name[80], const char *prefix, int tensor, int layer) {
    const int extra = tensor - TENSORS;
    const char *hf_name = extra < 0 ? tensor_table[tensor].hf_name : extra_table[extra].hf_name;
    const int in_block = extra < 0 ? tensor_table[tensor].per_layer : extra_table[extra].per_layer;
    const int n = snprintf(name, 80, in_block ? "%sh.%d." : "%s", prefix, layer);
    text_add(name, 80, n, "%s", hf_name);
}

// Location of one layer's tensor in a mapped file.
typedef struct {
    const unsigned char *data;  // NULL if the file lacks the tensor
    int type;                   // FILE_F32, FILE_BF16 or FILE_F16
} Span;
enum { MODEL_FILES = 64 };
typedef struct {
    char name[PATH_BYTES];  // path of the weights, or of their last part
    Mapping maps[MODEL_FILES];
    int files;       // number of parts
    Model model;
    Tokenizer tokenizer;  // from files next to the weights (weights_tokenizer), else config.json
    int transposed;  // 1 for Hugging Face's layout: matrices (in, out), wte without padding
    Span *spans;     // [layer][FILE_TENSORS]
} ModelFile;

static Span *file_span(Span *spans, int tensor, int layer) {
    return &spans[layer * FILE_TENSORS + tensor];
}

// Converts `count` elements of a span, starting at element `first`, to `real`.
static void span_values(real *out, const Span *s, int64_t first, int64_t count) {
    const unsigned char *p = s->data + first * file_types[s->type].bytes;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        uint16_t half;
        float value, scale = 1;
        if (s->type == FILE_F32) {
            memcpy(&bits, p + 4 * i, 4);
        } else {
            memcpy(&half, p + 2 * i, 2);
            bits = (uint32_t)half << 16;
        }
        if (s->type == FILE_F16) {  // IEEE 754 half: 5 exponent bits, bias 15 instead of 127
            int special = (half & 0x7c00) == 0x7c00;
            bits = (uint32_t)(half & 0x8000) << 16 | (uint32_t)(half & 0x7fff) << 13;
            bits |= special ? 0x7f800000u : 0;
            scale = special ? 1.0f : 0x1p112f;
        }
        memcpy(&value, &bits, 4);
        out[i] = value * scale;
    }
}

// Finds a tensor by its Hugging Face name, with or without the prefix "transformer.". Returns its
// index (TENSORS and above are rows of extra_table) or -1. Sets *layer to the block number, or 0.
static int file_tensor_find(const char *name, int L, int *layer) {
    char same[80];  // differs from a name with signs or leading zeros
    *layer = 0;
    name += strncmp(name, "transformer.", 12) == 0 ? 12 : 0;
    sscanf(name, "h.%9d.", layer);
    for (int i = 0; i < FILE_TENSORS && *layer >= 0 && *layer < L; i++) {
        file_tensor_name(same, "", i, *layer);
        if (strcmp(same, name) == 0) {
            return i;
        }
    }
    return -1;
}

// Adds the tensors of a safetensors file to `spans` (L, FILE_TENSORS), initially zero.
static void safetensors_spans(Span *spans, const Model *m, const Mapping *map, const char *name) {
    Safetensors f;
    FileTensor t;
    safetensors_start(&f, *map, name);
    while (safetensors_next(&f, &t)) {
        int layer, i = file_tensor_find(t.name, m->L, &layer);
        file_require(i >= 0, name, t.name, "not part of a GPT-2 model with this number of layers");
        Span *s = file_span(spans, i, layer);
        file_require(!s->data, name, t.name, "appears twice");
        s->data = t.data;
        s->type = t.type;
        if (i == FILE_MASK || i == FILE_MASKED_BIAS) {
            continue;
        }
        int tensor = i == FILE_HEAD ? WTE : i, swap = tensor_table[tensor].transposed;
        int64_t want[2] = {tensor_rows(m, tensor), tensor_cols(m, tensor)};
        if (t.dims != 1 + tensor_is_matrix(tensor) || t.shape[0] != want[swap] ||
            (t.dims == 2 && t.shape[1] != want[!swap])) {
            die("%s: tensor %s: expected shape (%" PRId64 ", %" PRId64 ") from config.json",
                name, t.name, want[swap], want[!swap]);
        }
        file_require(t.type <= FILE_F16, name, t.name, "dtype must be F32, BF16 or F16");
    }
}

// Fails if a tensor is missing, or if lm_head.weight differs from wte.weight. GPT-2 uses one tensor
// for both, so either one may be absent.
static void spans_complete(Span *spans, const Model *m, const char *name) {
    char tensor_name[80];
    spans[WTE] = spans[WTE].data ? spans[WTE] : spans[FILE_HEAD];
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            file_tensor_name(tensor_name, "", tensor, l);
            file_require(file_span(spans, tensor, l)->data != NULL, name, tensor_name, "missing");
        }
    }
    const int64_t elements = spans[FILE_HEAD].data ? (int64_t)m->V * m->C : 0;
    real a[256], b[256];
    for (int64_t i = 0; i < elements; i += 256) {
        const int64_t count = min_i64(256, elements - i);
        span_values(a, &spans[FILE_HEAD], i, count);
        span_values(b, &spans[WTE], i, count);
        file_require(memcmp(a, b, count * sizeof *a) == 0, name, "lm_head.weight",
                     "must equal wte.weight, because GPT-2 ties its head to the embedding");
    }
}

// Parses a Hugging Face config.json: the sizes and the tokenizer that config_save() wrote. Rejects
// settings with which the same weights would compute a different function.
static void config_parse(Model *m, Tokenizer *t, Mapping map, const char *name) {
    enum { SIZES = 5, INNER = SIZES };
    static const char *const sizes[INNER + 1][2] = {
        {"n_layer", "num_hidden_layers"}, {"n_head", "num_attention_heads"},
        {"n_embd", "hidden_size"}, {"n_positions", "max_position_embeddings"},
        {"vocab_size", "vocab_size"}, {"n_inner", "n_inner"}};
    static const char *const facts[][2] = {
        {"model_type", "gpt2"}, {"activation_function", "gelu_new|gelu_pytorch_tanh"},
        {"layer_norm_epsilon", "1e-05"}, {"tie_word_embeddings", "true"},
        {"scale_attn_weights", "true"}, {"scale_attn_by_inverse_layer_idx", "false"},
        {"add_cross_attention", "false"}};
    Json j = {map.bytes, 0, map.size, NULL};
    int64_t value[INNER + 1];
    char text[64] = "";
    memset(m, 0, sizeof *m);
    memset(t, 0, sizeof *t);
    json_skip(&j);
    json_end(&j, name);
    json_require(j, 0, name, facts, sizeof facts / sizeof *facts);
    for (int i = 0; i <= INNER; i++) {
        const int64_t first = json_get_count(&j, 0, sizes[i][0], 0);
        value[i] = json_get_count(&j, 0, sizes[i][1], first);
        json_check(&j, name);
        if (first && value[i] != first) {
            die("%s: %s and %s have different values", name, sizes[i][0], sizes[i][1]);
        }
        if (i < SIZES && (value[i] < 1 || value[i] > 1 << 20)) {
            die("%s: %s is %s", name, sizes[i][0], value[i] ? "too large" : "missing or zero");
        }
    }
    json_get(&j, 0, "train_gpt2_tokenizer", text, sizeof text);
    t->hash = strtoull(text, NULL, 16);
    if (value[INNER] && value[INNER] != 4 * value[2]) {
        die("%s: unsupported n_inner %" PRId64 "; expected 4 x n_embd", name, value[INNER]);
    }
    m->L = value[0];
    m->NH = value[1];
    m->C = value[2];
    m->maxT = value[3];
    model_set_vocabulary(m, value[4]);
    model_require(m, name, 1, 65536);
    if (t->hash) {
        const Tokenizer custom = {TOKENIZER_MERGES, 0, -1, t->hash};
        *t = t->hash == byte_tokenizer.hash   ? byte_tokenizer
             : t->hash == gpt2_tokenizer.hash ? gpt2_tokenizer
                                              : custom;
    }
}

// Parses the header of an llm.c model file. Returns the element type: fp32 for version 3 or bf16
// for version 5. The tensors follow in the order of tensor_table, each with all of its layers.
static int llmc_model(Model *m, Mapping map, const char *name) {
    LlmcHeader h = llmc_header(LLMC_MODEL, map.bytes, map.size, name);
    const int type = h.words[1] == 3 ? FILE_F32 : FILE_BF16;
    memset(m, 0, sizeof *m);
    m->maxT = h.words[2];
    m->V = h.words[3];
    m->L = h.words[4];
    m->NH = h.words[5];
    m->C = h.words[6];
    model_require(m, name, 1, 65536);
    model_set_vocabulary(m, m->V);
    int64_t want = LLMC_HEADER_BYTES + model_elements(m) * file_types[type].bytes;
    if (h.words[7] != m->Vp || (int64_t)map.size != want) {
        die("%s: the size is %zu bytes with %d padded rows; this shape requires %" PRId64 " bytes "
            "with %d padded rows", name, map.size, h.words[7], want, m->Vp);
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

static void model_file_beside(char path[PATH_BYTES], const ModelFile *f, const char *name) {
    const char *slash = strrchr(f->name, '/');
    path_print(path, "%.*s%s", slash ? (int)(slash + 1 - f->name) : 0, f->name, name);
}

// Names of the weight files within their folder.
typedef char PartNames[MODEL_FILES][256];

// Reads the part names from model.safetensors.index.json. Returns the number of parts.
static int index_parse(PartNames names, Mapping map, const char *path) {
    Json j = {map.bytes, 0, map.size, NULL};
    char name[256];
    int count = 0;
    json_skip(&j);
    json_end(&j, path);
    const int found = json_find(&j, 0, "weight_map");
    for (int n = 0, i; found && json_next(&j, &n, '{', NULL, 0);) {
        json_string(&j, name, sizeof name);
        for (i = 0; i < count && strcmp(names[i], name) != 0; i++) {
        }
        if (i == MODEL_FILES || !name[0] || strchr(name, '/')) {
            json_fail(&j, "expected names of at most 64 files in the same folder");
        } else if (i == count) {
            memcpy(names[count++], name, sizeof name);
        }
    }
    json_check(&j, path);
    return count;
}

// Lists the parts model-N-of-M.safetensors of a folder without an index. M is the lowest number for
// which the first or last part exists. If there is none, fails and says what the folder contains.
static int parts_list(PartNames names, const char *folder) {
    static const char *const others[][2] = {
        {"adapter_config.json", ", only a LoRA adapter; merge it into its base model "
                                "(merge_and_unload() of PEFT) and save the result"},
        {"pytorch_model.bin", ", only pytorch_model.bin; to convert it: from transformers import "
                              "AutoModelForCausalLM as M; M.from_pretrained(FOLDER)"
                              ".save_pretrained(FOLDER)"},
        {"*/model.safetensors*", "; there is "}, {"*/*/model.safetensors*", "; there is "}};
    const char *instead = "", *below = "";
    char path[PATH_BYTES];
    glob_t found;
    for (int count = 1; count <= MODEL_FILES; count++) {
        int parts = 0;
        for (int i = 0; i < count; i++) {
            snprintf(names[i], sizeof names[i], "model-%05d-of-%05d.safetensors", i + 1, count);
            path_print(path, "%s/%s", folder, names[i]);
            parts = (i == 0 || i == count - 1) && access(path, F_OK) == 0 ? count : parts;
        }
        if (parts) {
            return parts;
        }
    }
    for (int i = 0; i < 4 && !instead[0]; i++) {
        path_print(path, "%s/%s", folder, others[i][0]);
        instead = glob(path, 0, NULL, &found) == 0 ? others[i][1] : "";
        below = instead[0] && i > 1 ? found.gl_pathv[found.gl_pathc - 1] : "";  // the newest
    }
    die("--model (-e): %s has no model.safetensors%s%s", folder, instead, below);
}

// Maps the weight files named by `path` (model_file_open).
static void weights_map(ModelFile *f, const char *path) {
    static PartNames names;
    char whole[PATH_BYTES], index[PATH_BYTES];
    struct stat status;
    Mapping map;
    const int is_folder = stat(path, &status) == 0 && S_ISDIR(status.st_mode);
    path_print(whole, is_folder ? "%s/model.safetensors" : "%s", path);
    path_print(index, "%s.index.json", whole);
    const int in_parts = is_folder && access(whole, F_OK) != 0;
    const int has_index = in_parts && mapping_open(&map, index) == 0;
    const int count = !in_parts ? 1
                      : has_index ? index_parse(names, map, index) : parts_list(names, path);
    if (has_index) {
        mapping_close(&map);
    }
    for (; f->files < count; f->files++) {
        path_print(f->name, "%s%s%s", in_parts ? path : whole, in_parts ? "/" : "",
                   in_parts ? names[f->files] : "");
        if (mapping_open(&f->maps[f->files], f->name) != 0) {
            die("--model (-e): cannot open %s%s%s: %s", f->name, has_index ? ", listed in " : "",
                has_index ? index : "", file_error());
        }
    }
}

// Opens the weights named by -e: a folder with config.json and model.safetensors or its parts, the
// path of such a model.safetensors, or an llm.c file. Fails on any error.
static void model_file_open(ModelFile *f, const char *path) {
    char config[PATH_BYTES];
    memset(f, 0, sizeof *f);
    weights_map(f, path);
    Mapping map = f->maps[0];
    if (llmc_kind(map.bytes, map.size) >= 0) {
        int type = llmc_model(&f->model, map, f->name);
        f->spans = (Span *)alloc_zero((size_t)f->model.L * FILE_TENSORS, sizeof(Span));
        llmc_spans(f->spans, &f->model, map.bytes, type);
        f->tokenizer = f->model.V == GPT2_VOCABULARY ? gpt2_tokenizer : f->tokenizer;
        return;
    }
    text_refuse(map.bytes, map.size, f->name, "weights");
    model_file_beside(config, f, "config.json");
    if (mapping_open(&map, config) != 0) {
        die("--model (-e): cannot open %s: %s; config.json must be next to the weights",
            config, file_error());
    }
    config_parse(&f->model, &f->tokenizer, map, config);
    mapping_close(&map);
    f->transposed = 1;
    f->spans = (Span *)alloc_zero((size_t)f->model.L * FILE_TENSORS, sizeof(Span));
    for (int i = 0; i < f->files; i++) {
        safetensors_spans(f->spans, &f->model, &f->maps[i], f->name);
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

// A transposed tensor is copied to host memory as a whole and transposed in strips of STRIP rows.
// Within a strip, TILE x TILE tiles keep accesses within the cache for any row stride.
enum { STRIP = 256, TILE = 16 };
static int64_t strip_elements(const Model *m) {
    return max_i64(IO_ELEMENTS, STRIP * 4 * (int64_t)m->C);
}
static int64_t whole_elements(const Model *m) {
    return max_i64(strip_elements(m), 4 * (int64_t)m->C * m->C);
}

// Transposes columns first <= c < first + count of in (rows,cols) to out (count,rows).
static void columns_transpose(real *out, const real *in, int64_t rows, int64_t cols, int64_t first,
                              int64_t count) {
    #pragma omp parallel for
    for (int64_t r0 = 0; r0 < rows; r0 += TILE) {
        for (int64_t c0 = 0; c0 < count; c0 += TILE) {
            for (int64_t c = c0; c < min_i64(c0 + TILE, count); c++) {
                for (int64_t r = r0; r < min_i64(r0 + TILE, rows); r++) {
                    out[c * rows + r] = in[r * cols + first + c];
                }
            }
        }
    }
}

static void model_file_load(Engine *e, const ModelFile *f) {
    const Model *m = &f->model;
    char name[80];
    real *values = (real *)alloc_zero(strip_elements(m), sizeof(real));
    real *whole = (real *)alloc_zero(whole_elements(m), sizeof(real));
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        int64_t rows = tensor_rows(m, tensor), cols = tensor_cols(m, tensor);
        int swap = f->transposed && tensor_table[tensor].transposed;
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            const Span *s = file_span(f->spans, tensor, l);
            for (int64_t i = 0, count; i < rows * cols; i += count) {
                count = min_i64(swap ? STRIP * cols : (int64_t)IO_ELEMENTS, rows * cols - i);
                if (swap && i == 0) {
                    span_values(whole, s, 0, rows * cols);
                }
                if (swap) {
                    columns_transpose(values, whole, cols, rows, i / cols, count / cols);
                } else {
                    span_values(values, s, i, count);
                }
                int finite = 1;  // one NaN or infinity would soon spread to all weights
                for (int64_t k = 0; k < count; k++) {
                    finite &= values[k] - values[k] == 0;
                }
                if (!finite) {
                    file_tensor_name(name, "", tensor, l);
                    die("%s: tensor %s: contains NaN or infinity", f->name, name);
                }
                e->write(e, BUF_WEIGHTS, tensor_range(m, tensor, l, i, count), values);
            }
        }
    }
    free(whole);
    free(values);
}

// Converts numbers to a file type: FILE_F32, FILE_BF16, or FILE_U16 for low halves.
static void file_values(unsigned char *out, int type, const real *values, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const float value = values[i];
        const uint16_t half = type == FILE_BF16 ? master_high(value) : master_low(value);
        if (type == FILE_F32) {
            memcpy(out + 4 * i, &value, 4);
        } else {
            memcpy(out + 2 * i, &half, 2);
        }
    }
}

// Writes one tensor in Hugging Face's layout. Buffers: `strip` and `out` for a strip, `whole` for a
// transposed tensor.
static void tensor_save(Engine *e, const Model *m, int type, int tensor, int layer, real *whole,
                        real *strip, unsigned char *out, Writer *w) {
    const int swap = tensor_table[tensor].transposed;
    const int64_t rows = tensor_rows(m, tensor), size = rows * tensor_cols(m, tensor);
    for (int64_t offset = 0, count; offset < size; offset += count) {
        count = min_i64(swap ? STRIP * rows : (int64_t)IO_ELEMENTS, size - offset);
        if (!swap || offset == 0) {
            const Range p = tensor_range(m, tensor, layer, offset, swap ? size : count);
            e->read(e, BUF_WEIGHTS, p, swap ? whole : strip);
        }
        if (swap) {
            columns_transpose(strip, whole, rows, size / rows, offset / rows, count / rows);
        }
        file_values(out, type, strip, count);
        writer_put(w, out, count * file_types[type].bytes);
    }
}

// Writes model.safetensors with element type FILE_F32 or FILE_BF16.
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
    const size_t elements = strip_elements(m);
    real *whole = (real *)alloc_zero(whole_elements(m), sizeof(real));
    real *strip = (real *)alloc_zero(elements, sizeof(real));
    unsigned char *out = (unsigned char *)alloc_zero(elements, file_types[type].bytes);
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            tensor_save(e, m, type, tensor, l, whole, strip, out, w);
        }
    }
    free(out);
    free(strip);
    free(whole);
}
