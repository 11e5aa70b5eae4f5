// Fuzz targets for every reader of files and options. Given untrusted bytes, a reader must either
// reject them with one line or fulfill its contract. FUZZ_PROGRAM selects the program whose readers
// are built (0: train_gpt2.c, 1: data/tokenize.c). `make fuzz` builds the targets with
// libFuzzer, AddressSanitizer and UBSan and runs all of them; FUZZ_TARGET selects one:
//     FUZZ_TARGET=config build/fuzz -max_total_time=60 build/corpus/config
// With FUZZ_REPLAY=1, any compiler can build this file; the program then runs each input file, and
// slightly modified copies of it, through a target once:
//     build/fuzz_replay config FILE...
// Inputs are in heap blocks of exactly their size, so that reads beyond them are detected. die()
// returns to this file; a failed check() of the program, or a failed FACT below, is a finding.

#define _GNU_SOURCE 1
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef FUZZ_REPLAY
#define FUZZ_REPLAY 0
#endif
#ifndef FUZZ_PROGRAM
#define FUZZ_PROGRAM 0
#endif

__attribute__((noreturn)) static void fuzz_exit(int status);
static FILE *fuzz_errors;
static const unsigned char *input_bytes;
static size_t input_size;

#define exit fuzz_exit
#undef stderr
#define stderr fuzz_errors
#define GPT2_NO_MAIN 1
#if FUZZ_PROGRAM == 1
#define main tokenize_main
#include "../../data/tokenize.c"
#undef main
#else
#include "../../train_gpt2.c"
#endif
#undef exit
#undef stderr

static jmp_buf fuzz_back;
static char fuzz_message[8192];

static void fact_failed(const char *fact, int line) {
    fflush(fuzz_errors);
    dprintf(2, "fuzz.c:%d: check failed: %s; last message: %s\n", line, fact, fuzz_message);
    abort();
}
#define FACT(condition) ((condition) ? (void)0 : fact_failed(#condition, __LINE__))

static void fuzz_exit(int status) {
    fflush(fuzz_errors);
    FACT(status == 1);
    // A failed check() prints its source file and line first.
    FACT(strncmp(fuzz_message, "train_gpt2: " __FILE__, 12 + sizeof __FILE__ - 7) != 0);
    longjmp(fuzz_back, 1);
}

#if FUZZ_PROGRAM != 1
// Reads `count` bytes at `p`, which must be inside the input.
static volatile unsigned char fuzz_sink;
static void touch(const unsigned char *p, uint64_t count) {
    FACT(p >= input_bytes && p <= input_bytes + input_size);
    FACT(count <= (uint64_t)(input_bytes + input_size - p));
    unsigned char sum = 0;
    for (uint64_t i = 0; i < count; i++) {
        sum ^= p[i];
    }
    fuzz_sink = sum;
}

// --- Token files ---------------------------------------------------------------------------------
// Shards: every token counted in the header is in the file.

static Shard fuzz_shard;

// Writes the input to a file; returns its descriptor.
static int input_file(char path[64], const unsigned char *bytes, size_t size) {
    static int fd = -1;
    if (fd < 0) {
        fd = memfd_create("input", 0);
    }
    FACT(ftruncate(fd, 0) == 0 && pwrite(fd, bytes, size, 0) == (ssize_t)size);
    snprintf(path, 64, "/proc/self/fd/%d", fd);
    return fd;
}

static void target_shard(const unsigned char *bytes, size_t size) {
    char path[64];
    input_file(path, bytes, size);
    static uint16_t window[6];
    Dataset d;
    memset(&d, 0, sizeof d);
    d.window = window;
    d.shards = &fuzz_shard;
    d.shard_count = 1;
    d.T = 5;
    d.seed = 42;
    shard_open(&fuzz_shard, path);
    d.tokenizer = fuzz_shard.tokenizer;
    const int vocabulary = d.tokenizer.vocabulary;
    FACT(memcmp(&d.tokenizer, &gpt2_tokenizer, sizeof d.tokenizer) == 0 ||
         memcmp(&d.tokenizer, &byte_tokenizer, sizeof d.tokenizer) == 0 ||
         (d.tokenizer.kind == TOKENIZER_MERGES && vocabulary >= 257 && vocabulary <= 65535));
    FACT(fuzz_shard.count >= 0 && (size_t)fuzz_shard.count == (size - LLMC_HEADER_BYTES) / 2);
    d.windows = fuzz_shard.count > 0 ? (fuzz_shard.count - 1) / d.T : 0;
    Token inputs[5], targets[5];
    for (int64_t w = 0; w < d.windows; w++) {
        for (uint32_t epoch = 0; epoch < 2; epoch++) {
            if (!dataset_window(&d, w, epoch, inputs, targets)) {
                die("%s", d.problem);
            }
            for (int i = 0; i < d.T; i++) {
                FACT(inputs[i] >= 0 && inputs[i] < vocabulary);
                FACT(targets[i] >= 0 && targets[i] < vocabulary);
                FACT(i == 0 || targets[i - 1] == inputs[i]);
            }
        }
    }
}

// --- Model files ---------------------------------------------------------------------------------
// llm.c files and config.json: sizes are within their limits, and tensors are inside the file.

static Span fuzz_spans[400 * FILE_TENSORS];

static void require_allowed(const Model *m) {
    FACT(m->L >= 1 && m->L <= 400 && m->NH >= 1 && m->C >= m->NH && m->C <= 65536);
    FACT(m->C % m->NH == 0 && m->maxT >= 1 && m->maxT <= 1 << 20);
    FACT(m->V >= 1 && m->V <= 65536 && m->Vp % 128 == 0 && m->Vp >= m->V && m->Vp < m->V + 128);
    FACT(model_parameters(m) > 0);
}

// Reads every element that the weight loader reads.
static void require_spans(const Model *m) {
    real values[256];
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            const Span *s = file_span(fuzz_spans, tensor, l);
            int64_t rows = tensor_rows(m, tensor), cols = tensor_cols(m, tensor);
            FACT(s->type >= FILE_F32 && s->type <= FILE_F16);
            touch(s->data, (uint64_t)(rows * cols * file_types[s->type].bytes));
            for (int64_t i = 0; i < rows * cols; i += 256) {
                span_values(values, s, i, min_i64(256, rows * cols - i));
            }
        }
    }
}

static void target_llmc(const unsigned char *bytes, size_t size) {
    Model m;
    int type = llmc_model(&m, (Mapping){bytes, size}, "model.bin");
    require_allowed(&m);
    FACT(type == FILE_F32 || type == FILE_BF16);
    llmc_spans(fuzz_spans, &m, bytes, type);
    require_spans(&m);
}

// Shapes, as a config.json next to the weights would give them.
static const Model fuzz_models[] = {{1, 1, 1, 2, 257, 384}, {2, 1, 2, 2, 3, 128}};

static void target_weights(const unsigned char *bytes, size_t size) {
    const Model *m = &fuzz_models[size % 2];
    memset(fuzz_spans, 0, sizeof(Span) * (size_t)m->L * FILE_TENSORS);
    const Mapping file = {bytes, size};
    safetensors_spans(fuzz_spans, m, &file, "model.safetensors");
    spans_complete(fuzz_spans, m, "model.safetensors");
    require_spans(m);
}

static void target_config(const unsigned char *bytes, size_t size) {
    Model m;
    Tokenizer t;
    config_parse(&m, &t, (Mapping){bytes, size}, "config.json");
    require_allowed(&m);
}

static void target_index(const unsigned char *bytes, size_t size) {
    static PartNames names;
    const int count = index_parse(names, (Mapping){bytes, size}, "index.json");
    FACT(count >= 0 && count <= MODEL_FILES);
    for (int i = 0; i < count; i++) {
        FACT(names[i][0] && memchr(names[i], 0, sizeof names[i]) && !strchr(names[i], '/'));
    }
}

// --- Evaluation files ----------------------------------------------------------------------------
// Every example fits in the row in which it is scored.

// Reads every example again as scoring does: rows of T inputs and targets.
static void target_eval(const unsigned char *bytes, size_t size) {
    enum { T = 16, VOCABULARY = 257 };
    EvalFile f;
    Token inputs[T], targets[T];
    eval_parse(&f, bytes, size, "x.bin", VOCABULARY);
    FACT(f.examples >= 1 && f.bytes == bytes && f.size == size && f.longest_completion >= 1);
    FACT(f.longest_at >= 0 && f.longest_at < f.examples);
    size_t at = LLMC_HEADER_BYTES;
    for (int i = 0; i < f.examples; i++) {
        EvalExample x;
        touch(bytes + at, 2 * EVAL_EXAMPLE_WORDS);
        at += eval_example(&x, &f, at, i);
        FACT(x.label >= 0 && x.label < x.completions && x.completions <= EVAL_COMPLETIONS);
        for (int k = 0; k <= x.completions; k++) {
            FACT(x.texts[k].count >= 1);
            touch(x.texts[k].words, 2 * (uint64_t)x.texts[k].count);
            FACT(k == 0 || x.texts[k].count <= f.longest_completion);
            FACT(k == 0 || x.texts[0].count + x.texts[k].count <= f.longest_row);
        }
        for (int k = 0; k < x.completions; k++) {
            if (x.texts[1 + k].count > T) {
                continue;
            }
            EvalRow row = eval_row(inputs, targets, &x, k, T);
            FACT(row.first >= 0 && row.count >= 1 && row.first + row.count <= T);
            for (int t = 0; t < T; t++) {
                FACT(inputs[t] >= 0 && inputs[t] < VOCABULARY);
                FACT(targets[t] >= 0 && targets[t] < VOCABULARY);
            }
        }
    }
    FACT(at == size);
}

// --- Safetensors ---------------------------------------------------------------------------------
// Tensors tile the data: every byte belongs to exactly one.

typedef struct {
    uint64_t begin, end;
} ByteRange;

static int bytes_compare(const void *a, const void *b) {
    const ByteRange *x = (const ByteRange *)a, *y = (const ByteRange *)b;
    return x->begin != y->begin ? (x->begin < y->begin ? -1 : 1)
                                : (x->end > y->end) - (x->end < y->end);
}

// Checks the tiling after sorting by offset; the program adds up hashes instead.
static void target_safetensors(const unsigned char *bytes, size_t size) {
    static ByteRange *ranges;
    static size_t capacity;
    size_t count = 0;
    Safetensors f;
    FileTensor t;
    safetensors_start(&f, (Mapping){bytes, size}, "x.safetensors");
    touch(f.data, f.size);
    FACT(f.data + f.size == bytes + size);
    while (safetensors_next(&f, &t)) {
        FACT(t.type >= 0 && t.type < FILE_TYPES && t.dims >= 0 && t.count >= 0);
        FACT(strlen(t.name) < sizeof t.name);
        FACT(t.dims != 0 || t.count == 1);
        FACT(t.dims != 1 || t.count == t.shape[0]);
        FACT(t.dims != 2 || t.count == 0 || t.count == t.shape[0] * t.shape[1]);
        uint64_t length = (uint64_t)t.count * (uint64_t)file_types[t.type].bytes;
        FACT(t.data >= f.data && length <= (uint64_t)(bytes + size - t.data));
        touch(t.data, min_i64((int64_t)length, 1));
        if (count == capacity) {
            capacity = 2 * capacity + 64;
            ranges = (ByteRange *)realloc(ranges, capacity * sizeof(ByteRange));
        }
        ranges[count].begin = (uint64_t)(t.data - f.data);
        ranges[count].end = ranges[count].begin + length;
        count++;
    }
    qsort(ranges, count, sizeof(ByteRange), bytes_compare);
    uint64_t at = 0;
    for (size_t i = 0; i < count; i++) {
        FACT(ranges[i].begin == at);
        at = ranges[i].end;
    }
    FACT(at == f.size);
    char text[24];
    const Mapping map = {bytes, size};
    safetensors_text(&map, "format", text, sizeof text);
    FACT(strlen(text) < sizeof text);
}

// --- Checkpoints ---------------------------------------------------------------------------------
// Manifests and states. A state's counters are not checked: the manifest vouches for them.

static void target_manifest(const unsigned char *bytes, size_t size) {
    static Manifest manifest;
    const char *fault = manifest_parse(&manifest, (Mapping){bytes, size});
    FACT(manifest.ranks >= 1 && manifest.ranks <= MAX_RANKS);
    for (int i = 0; !fault && i < CHECKPOINT_FILES; i++) {
        const ManifestRow *row = &manifest.files[i];
        FACT(row->bytes >= 0 && row->bytes <= (int64_t)1 << 53);
        FACT(strlen(row->sha256) < SHA256_TEXT);
        FACT(i < FILE_STATE + manifest.ranks || !row->sha256[0]);
    }
}

static void target_state(const unsigned char *bytes, size_t size) {
    const Model *m = &fuzz_models[size % 2];
    static StateFiles f;  // static, because its ranges outlive a rejected input
    free(f.files[0].ranges);
    memset(&f, 0, sizeof f);
    f.ranks = 1;
    f.files[0].map.bytes = bytes;
    f.files[0].map.size = size;
    state_parse(&f, m, 0, "state.safetensors");
    int64_t elements = 0, all = 0;
    for (int i = 0; i < f.files[0].count; i++) {
        const StateRange *r = &f.files[0].ranges[i];
        touch(r->span.data, (uint64_t)(r->range.count * file_types[r->span.type].bytes));
        elements += r->state == BUF_M ? r->range.count : 0;
    }
    for (int b = 0; b < model_buckets(m); b++) {
        all += bucket_at(m, 1, b).count;
    }
    FACT(elements == all);
    FACT(strlen(f.identity) < sizeof f.identity);
}

// The options that a resumed run takes from a state file that nothing has verified yet.
static void target_state_text(const unsigned char *bytes, size_t size) {
    const Mapping map = {bytes, size};
    char text[PATH_BYTES];
    for (int i = 0; i < COUNTERS; i++) {
        safetensors_text(&map, counter_rows[i].name, text, sizeof text);
    }
    FACT(!safetensors_text(&map, "--lr", text, sizeof text) || strlen(text) < sizeof text);
}

// --- Tokenizer -----------------------------------------------------------------------------------
// Merges files are read, and texts must survive encoding and decoding.

static Bpe fuzz_bpe;

// A tokenizer.json, or a merges.txt and, after a 0, a vocab.json. What is written is read again.
static void target_bpe_merges(const unsigned char *bytes, size_t size) {
    static BpeReader r;
    const unsigned char *end = (const unsigned char *)memchr(bytes, 0, size);
    const size_t first = end ? (size_t)(end - bytes) : size;
    Mapping merges = {bytes, first};
    Json j = {bytes, 0, size, NULL}, ids = {bytes, first + 1, size, NULL};
    bpe_encoder_close(&r.encoder);
    reader_open(&r, &fuzz_bpe, "merges.txt");
    const int is_json = json_peek(&j) == '{';
    is_json ? tokenizer_json_read(&r, j, 1) : merges_read(&r, merges);
    if (end && !is_json) {
        tokens_read(&r, ids);
    } else if (!is_json) {
        bpe_number_plainly(&fuzz_bpe);
    }
    bpe_set_end(&fuzz_bpe, r.end, r.eos);
    bpe_identify(&fuzz_bpe, "merges.txt");
    for (int rank = 0; rank < fuzz_bpe.count; rank++) {
        const int id = fuzz_bpe.ids[rank];
        FACT(id == NO_ID ? rank < 256 : fuzz_bpe.ranks[id] == rank + 1);
    }
    const uint64_t hash = fuzz_bpe.tokenizer.hash;
    char *text[2];
    size_t length[2];
    for (int i = 0; i < 2; i++) {
        text[i] = tokenizer_file_text(&fuzz_bpe, i, 0, &length[i]);
    }
    Json written = {(const unsigned char *)text[1], 0, length[1], NULL};
    Mapping again = {(const unsigned char *)text[0], length[0]};
    bpe_encoder_close(&r.encoder);
    reader_open(&r, &fuzz_bpe, "merges.txt");
    merges_read(&r, again);
    tokens_read(&r, written);
    bpe_identify(&fuzz_bpe, "merges.txt");
    FACT(fuzz_bpe.tokenizer.hash == hash);
    free(text[0]);
    free(text[1]);
}

// Returns GPT-2's vocabulary if the tests find it, otherwise a small one encoded the same way.
static const Bpe *encoder_vocabulary(void) {
    static int is_open;
    char path[PATH_BYTES];
    const char *mirror = getenv("DATA_MIRROR");
    if (is_open++) {
        return &fuzz_bpe;
    }
    snprintf(path, sizeof path, "%s/gpt2/vocab.bpe", mirror ? mirror : "data");
    if (access(path, R_OK) == 0) {
        bpe_open(&fuzz_bpe, path, NULL, NULL);
        return &fuzz_bpe;
    }
    static const char *const merges[] = {" t", "he", "in", " a", " the", "aa", "aaa", "aaaa", "ing",
                                         "\n\n", "  ", "    ", "er", "\xC3\xA9", " \xC3\xA9", "00"};
    bpe_begin(&fuzz_bpe);
    for (size_t i = 0; i < sizeof merges / sizeof merges[0]; i++) {
        bpe_add(&fuzz_bpe, merges[i], strlen(merges[i]));
    }
    bpe_number_plainly(&fuzz_bpe);
    return &fuzz_bpe;
}

// Tokens must decode to the text, and must not change if the text is split at a safe cut or encoded
// again by an encoder that has cached its words.
static void target_bpe_encode(const unsigned char *bytes, size_t size) {
    const Bpe *bpe = encoder_vocabulary();
    const char *text = (const char *)bytes;
    uint16_t *tokens = (uint16_t *)malloc(2 * size + 1), *again = (uint16_t *)malloc(2 * size + 1);
    static BpeEncoder e;
    if (!e.bpe) {
        bpe_encoder_open(&e, bpe);
    }
    memset(e.words, 0, WORDS * sizeof *e.words);
    int64_t count = bpe_encode(&e, text, size, tokens);
    FACT(count >= 0 && (size_t)count <= size);
    size_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        const char *found;
        FACT(tokens[i] < bpe->count);
        size_t n = (size_t)bpe_bytes(bpe, tokens[i], &found);
        FACT(n <= size - at && memcmp(found, text + at, n) == 0);
        at += n;
    }
    FACT(at == size);
    FACT(bpe_encode(&e, text, size, again) == count);
    FACT(count == 0 || memcmp(tokens, again, (size_t)count * 2) == 0);
    size_t cut = 1;
    while (cut < size && (!strchr(" \n\t", text[cut]) || !bpe_cut_is_safe(text, cut))) {
        cut++;
    }
    if (cut < size && text[cut]) {
        int64_t first = bpe_encode(&e, text, cut, again);
        first += bpe_encode(&e, text + cut, size - cut, again + first);
        FACT(first == count && memcmp(tokens, again, (size_t)count * 2) == 0);
    }
    free(tokens);
    free(again);
}

// --- Options -------------------------------------------------------------------------------------
// Command lines: accepted values are within the table's limits, and the plan fits its arrays.

enum { FUZZ_WORDS = 64 };

static void require_option(const Options *o, const OptionRow *row) {
    const char *field = (const char *)o + row->offset;
    if (row->type == OPT_TEXT) {
        FACT(*(const char *const *)(const void *)field || !row->value);
    } else if (row->type == OPT_REAL) {
        double value = *(const double *)(const void *)field;
        FACT(value >= row->low && value <= row->high);
    } else {
        char text[64];
        int64_t value = *(const int64_t *)(const void *)field;
        const char *word = option_text(text, o, row);
        FACT(row->type != OPT_CHOICE || choice_find(row->choices, word, strlen(word)) == value);
        FACT(row->type != OPT_SET || set_parse(row->choices, word) == value);
        FACT(row->choices || (value == 0 && !row->value) ||
             ((double)value >= row->low && (double)value <= row->high));
    }
}

// Each line of the input is an argument.
static void parse_words(Options *o, const unsigned char *bytes, size_t size) {
    static char *text;  // the arguments point into it; freed by the next call
    static char name[] = "train_gpt2", *argv[FUZZ_WORDS + 2];
    int argc = 1;
    free(text);
    text = (char *)malloc(size + 1);
    memcpy(text, bytes, size);
    text[size] = 0;
    argv[0] = name;
    for (char *p = text; argc <= FUZZ_WORDS && p < text + size; argc++) {
        argv[argc] = p;
        p += strcspn(p, "\n");
        *p++ = 0;
    }
    argv[argc] = NULL;
    options_parse(o, argc, argv);
}

static void target_options(const unsigned char *bytes, size_t size) {
    Options o;
    parse_words(&o, bytes, size);
    for (int i = 0; i < OPTION_ROWS; i++) {
        require_option(&o, &option_rows[i]);
    }
    Model m;
    if (o.model && model_parse(&m, o.model) != MODEL_FILE) {
        FACT(m.L <= MAX_LAYERS && m.C % m.NH == 0 && m.C <= 65536 && m.maxT <= 1 << 20);
    }
    Settings s;
    memset(&s, 0, sizeof s);
    s.model.L = 12;
    recompute_parse(&s, o.recompute);
    for (int l = 0; l < s.model.L; l++) {
        FACT(s.level[l] < RECOMPUTE_LEVELS && s.level[l] <= s.level[0]);
    }
}

static void target_plan(const unsigned char *bytes, size_t size) {
    Options o;
    Model m;
    Settings s;
    Plan p;
    parse_words(&o, bytes, size);
    if (model_parse(&m, o.model ? o.model : "l1h1c8t8") == MODEL_FILE) {
        return;
    }
    model_set_vocabulary(&m, GPT2_VOCABULARY);
    settings_from_options(&s, &o, &m, o.gpu[0] || o.gpu_mem);
    plan_build(&p, &s);
    FACT((p.device_bytes + p.host_bytes) / 2 * (size_t)s.ranks >= (size_t)model_parameters(&m));
    FACT(p.device_bytes / 4 >= (size_t)(s.B * s.T));
    for (int i = 0; i < p.buffer_count; i++) {
        const Buffer *b = &p.buffers[i];
        FACT(b->placement == PLACE_HOST || b->offset + b->bytes <= p.device_bytes);
    }
    plan_free(&p);
}

static void target_sizes(const unsigned char *bytes, size_t size) {
    char *text = strndup((const char *)bytes, size);
    int64_t value = parse_bytes(text);
    FACT(value >= -1);
    free(text);
}

// --- JSON ----------------------------------------------------------------------------------------
// The cursor stays inside the text.

static void target_json(const unsigned char *bytes, size_t size) {
    Json j = {bytes, 0, size, NULL};
    json_skip(&j);
    FACT(j.offset <= size);
    char key[8] = "";
    for (int kind = 0; kind < 2; kind++) {
        Json k = {bytes, 0, size, NULL};
        int count = 0;
        while (json_next(&k, &count, kind ? '{' : '[', key, sizeof key)) {
            FACT(strlen(key) < sizeof key);
            json_skip(&k);
        }
        FACT(k.offset <= size && (size_t)count <= size);
    }
    Json number = {bytes, 0, size, NULL};
    int64_t value = json_count(&number);
    FACT(value >= 0 && value <= (int64_t)1 << 53);
}
#endif

#if FUZZ_PROGRAM == 1
// --- Tokenizing: blocks and learned merges -------------------------------------------------------

// What is not refused is encoded block by block, without a byte lost. Byte 0 chooses the mode.
static void target_text(const unsigned char *bytes, size_t size) {
    static Coder coder;
    static BpeEncoder encoder;
    static uint16_t *tokens;
    const int mode = size ? bytes[0] : 0;
    const Part part = {"text", (const char *)bytes + (size > 0), size - (size > 0)};
    int64_t count = 0;
    coder.tokenizer = byte_tokenizer;
    coder.tokens = mode & 1;
    coder.documents = mode == 2;
    file_refuse(&part, coder.tokens);
    for (size_t begin = 0, end; begin < part.size; begin = end) {
        end = block_begin(&coder, &part, begin + 64);
        FACT(end > begin && end <= part.size);
        const char *problem = block_problem(&coder, &part, begin, end);
        if (problem) {
            die("%s %s", part.name, problem);
        }
        tokens = (uint16_t *)grow(tokens, 2 * (end - begin + 1));
        const int64_t n = block_encode(&coder, &encoder, NULL, &part, begin, end, tokens);
        FACT(n >= 0 && n <= (int64_t)(end - begin + 1));
        for (int64_t i = 0; i < n; i++) {
            FACT(tokens[i] < BYTE_VOCABULARY);
        }
        count += n;
    }
    FACT(coder.documents || (size_t)count == part.size / (coder.tokens ? 2 : 1));
}

// Learns merges from a text; the first byte determines how many. A merges file written from the
// vocabulary must give the same tokens.
static void target_bpe_train(const unsigned char *bytes, size_t size) {
    static WordTable words;    // static, because its memory outlives a rejected input
    static Bpe bpe, again;
    int64_t all = 0;
    size_t length;
    words_free(&words);
    bpe_begin(&bpe);
    words_count(&words, &bpe, (const char *)bytes + 1, size - (size > 0));
    for (uint32_t i = 0; i < words.word_count; i++) {
        const Word *w = &words.words[i];
        FACT(w->count > 0 && w->offset + w->bytes <= words.text_bytes);
        all += w->count * w->bytes;
    }
    FACT(all == (int64_t)(size - (size > 0)));
    const int learned = bpe_learn(&bpe, &words, size ? bytes[0] % 25 : 0);
    FACT(learned < 25 && bpe.count == 256 + learned && bpe_number_plainly(&bpe));
    char *text = tokenizer_file_text(&bpe, FILE_OF_MERGES, 0, &length);
    const Mapping merges = {(const unsigned char *)text, length};
    BpeReader r;
    reader_open(&r, &again, "merges.txt");
    merges_read(&r, merges);
    bpe_number_plainly(&again);
    bpe_encoder_close(&r.encoder);
    free(text);
    FACT(again.count == bpe.count);
    for (int id = 0; id < again.count; id++) {
        const char *one, *other;
        const int n = bpe_bytes(&again, id, &one);
        FACT(n == bpe_bytes(&bpe, id, &other) && memcmp(one, other, (size_t)n) == 0);
    }
}
#endif

// --- Running -------------------------------------------------------------------------------------
// Targets by name, called by libFuzzer or run over files.

static const struct {
    const char *name;
    void (*run)(const unsigned char *bytes, size_t size);
} targets[] = {
#if FUZZ_PROGRAM == 1
    {"text", target_text}, {"bpe_train", target_bpe_train}};
#else
    {"shard", target_shard}, {"llmc", target_llmc}, {"weights", target_weights},
    {"config", target_config}, {"index", target_index}, {"safetensors", target_safetensors},
    {"manifest", target_manifest}, {"state", target_state}, {"state_text", target_state_text},
    {"eval", target_eval}, {"bpe_merges", target_bpe_merges}, {"bpe_encode", target_bpe_encode},
    {"options", target_options}, {"plan", target_plan}, {"sizes", target_sizes},
    {"json", target_json}};
#endif
enum { TARGETS = sizeof targets / sizeof targets[0] };

static int target_find(const char *name) {
    fuzz_errors = fmemopen(fuzz_message, sizeof fuzz_message, "w");
    for (int i = 0; i < TARGETS; i++) {
        if (name && strcmp(targets[i].name, name) == 0) {
            return i;
        }
    }
    for (int i = 0; i < TARGETS; i++) {
        puts(targets[i].name);
    }
    fflush(stdout);  // libFuzzer ends the process without flushing
    exit(name != NULL);
}

// Runs one input. If it is rejected, the message must be one line of printable text.
static void target_run(int target, const unsigned char *data, size_t size) {
    unsigned char *copy = (unsigned char *)malloc(size);
    memcpy(copy, data, size);
    input_bytes = copy;
    input_size = size;
    rewind(fuzz_errors);
    memset(fuzz_message, 0, sizeof fuzz_message);
    if (setjmp(fuzz_back) == 0) {
        targets[target].run(copy, size);
    } else {
        size_t n = strlen(fuzz_message);
        FACT(n > 20 && n < sizeof fuzz_message - 1 && fuzz_message[n - 1] == '\n');
        for (size_t i = 0; i + 1 < n; i++) {
            FACT((unsigned char)fuzz_message[i] >= 32 && fuzz_message[i] != 127);
        }
    }
#if FUZZ_PROGRAM != 1
    if (fuzz_shard.fd > 0) {
        close(fuzz_shard.fd);
        memset(&fuzz_shard, 0, sizeof fuzz_shard);
    }
#endif
    free(copy);
}

#if FUZZ_REPLAY
// Runs every file unchanged, then REPLAY_CHANGES times truncated and the same number of times with
// one byte changed, at positions from a fixed sequence.
enum { REPLAY_CHANGES = 400 };

static uint32_t replay_draw(uint32_t i) {
    uint64_t x = (i + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return (uint32_t)(x >> 32);
}

int main(int argc, char **argv) {
    int target = target_find(argc > 1 ? argv[1] : NULL), inputs = 0;
    for (int a = 2; a < argc; a++) {
        Mapping map;
        if (mapping_open(&map, argv[a]) != 0) {
            dprintf(2, "cannot open %s\n", argv[a]);
            return 1;
        }
        target_run(target, map.bytes, map.size);
        inputs++;
        for (uint32_t i = 0; i < REPLAY_CHANGES && map.size && map.size < 65536; i++) {
            const uint32_t r[3] = {replay_draw(3 * i), replay_draw(3 * i + 1),
                                   replay_draw(3 * i + 2)};
            unsigned char *changed = (unsigned char *)malloc(map.size);
            memcpy(changed, map.bytes, map.size);
            changed[r[0] % map.size] = (unsigned char)r[1];
            target_run(target, changed, map.size);
            target_run(target, map.bytes, r[2] % map.size);
            inputs += 2;
            free(changed);
        }
        mapping_close(&map);
    }
    printf("%s: %d inputs\n", argv[1], inputs);
    return 0;
}
#else
#ifdef __cplusplus
extern "C"
#endif
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static int target = -1;
    if (target < 0) {
        target = target_find(getenv("FUZZ_TARGET"));
    }
    target_run(target, data, size);
    return 0;
}
#endif
