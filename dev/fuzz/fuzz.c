// Fuzz targets for every reader of files and options. Each receives untrusted bytes and must either
// refuse them with one line or fulfil the reader's contract. FUZZ_PROGRAM selects the program whose
// readers are built: 0: train_gpt2.c, 1: data/tokenize.c, 2: train_gpt2.cu on the emulated device.
// `make fuzz` builds the targets with libFuzzer, AddressSanitizer and UBSan, makes the seeds
// (seeds.sh) and runs all of them; FUZZ_TARGET selects one:
//     FUZZ_TARGET=config build/fuzz -max_total_time=60 build/corpus/config build/seeds/config
// With FUZZ_REPLAY=1 any compiler builds it; it then runs each file, and small changes of it,
// through a target once:
//     build/fuzz_replay config FILE...
// Inputs are in heap blocks of exactly their size, so that reads beyond them are detected. die()
// returns here; a failed check() of the program, or a failed FACT below, is a finding.

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
#if FUZZ_PROGRAM == 2    // before the macros, which would change their declarations
#include <algorithm>
#include <cublasLt.h>
#include <cuda_runtime.h>
#endif

// Replacements for the program's exit and stderr, and for its files in the cache.
__attribute__((noreturn)) static void fuzz_exit(int status);
static FILE *fuzz_errors;
static const unsigned char *input_bytes;
static size_t input_size;

static FILE *fuzz_fopen(const char *path, const char *mode) {
    return strncmp(path, "/fuzz/", 6) == 0 ? fmemopen((void *)input_bytes, input_size, mode)
                                           : fopen(path, mode);
}

#define exit fuzz_exit
#define fopen fuzz_fopen
#undef stderr
#define stderr fuzz_errors
#define GPT2_NO_MAIN 1
#if FUZZ_PROGRAM == 1
#define main tokenize_main
#include "../../data/tokenize.c"
#undef main
#elif FUZZ_PROGRAM == 2
#include "../../train_gpt2.cu"
#else
#include "../../train_gpt2.c"
#endif
#undef exit
#undef fopen
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

#if FUZZ_PROGRAM != 1
// -------------------------------------------------------------------------------------------------
// Token files
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
    FACT(tokenizers_equal(&d.tokenizer, &gpt2_tokenizer) ||
         tokenizers_equal(&d.tokenizer, &byte_tokenizer) ||
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

// -------------------------------------------------------------------------------------------------
// Model files
// llm.c files and config.json: allowed sizes, tensors inside the file.

static Span fuzz_spans[400 * FILE_TENSORS];

static void require_allowed(const Model *m) {
    FACT(m->L >= 1 && m->L <= 400 && m->NH >= 1 && m->C >= m->NH && m->C <= 65536);
    FACT(m->C % m->NH == 0 && m->maxT >= 1 && m->maxT <= 1 << 20);
    FACT(m->V >= 1 && m->V <= 65536 && m->Vp % 128 == 0 && m->Vp >= m->V && m->Vp < m->V + 128);
    FACT(tensor_offset(m, TENSORS, 0) >= model_parameters(m));
}

// Reads every element that the weight loader reads; `transposed` files have V rows of wte.
static void require_spans(const Model *m, int transposed) {
    static real values[256 * 64];
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(m, tensor); l++) {
            const Span *s = file_span(fuzz_spans, tensor, l);
            int64_t rows = tensor_rows(m, tensor), cols = tensor_cols(m, tensor);
            FACT(s->type >= FILE_F32 && s->type <= FILE_F16);
            touch(s->data, (uint64_t)(rows * cols * file_types[s->type].bytes));
            if (transposed && tensor_table[tensor].transposed && cols <= 64) {
                span_transposed(values, s, rows, cols, 0, min_i64(rows, 256));
            }
            for (int64_t i = 0; i < rows * cols; i += 256) {
                span_values(values, s, i, min_i64(256, rows * cols - i));
            }
        }
    }
}

static void target_llmc(const unsigned char *bytes, size_t size) {
    Model m;
    int type = llmc_model(&m, bytes, size, "model.bin");
    require_allowed(&m);
    FACT(type == FILE_F32 || type == FILE_BF16);
    llmc_spans(fuzz_spans, &m, bytes, type);
    require_spans(&m, 0);
}

// Shapes as given by a config.json next to the weights.
static const Model fuzz_models[] = {{1, 1, 1, 2, 257, 384}, {2, 1, 2, 2, 3, 128}};

static void target_weights(const unsigned char *bytes, size_t size) {
    const Model *m = &fuzz_models[size % 2];
    memset(fuzz_spans, 0, sizeof(Span) * (size_t)m->L * FILE_TENSORS);
    const Mapping file = {bytes, size};
    safetensors_spans(fuzz_spans, m, &file, "model.safetensors");
    spans_complete(fuzz_spans, m, "model.safetensors");
    require_spans(m, 1);
}

static void target_config(const unsigned char *bytes, size_t size) {
    Model m;
    config_parse(&m, bytes, size, "config.json");
    require_allowed(&m);
}

// -------------------------------------------------------------------------------------------------
// Evaluation files
// Every example fits the row in which it is scored.

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

// -------------------------------------------------------------------------------------------------
// Safetensors
// Tensors tile the data: every byte belongs to exactly one.

typedef struct {
    uint64_t begin, end;
} Range;

static int bytes_compare(const void *a, const void *b) {
    const Range *x = (const Range *)a, *y = (const Range *)b;
    return x->begin != y->begin ? (x->begin < y->begin ? -1 : 1)
                                : (x->end > y->end) - (x->end < y->end);
}

// Checks the tiling in order of offsets; the program adds up hashes instead.
static void target_safetensors(const unsigned char *bytes, size_t size) {
    static Range *ranges;
    static size_t capacity;
    size_t count = 0;
    Safetensors f;
    FileTensor t;
    safetensors_start(&f, bytes, size, "x.safetensors");
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
            ranges = (Range *)realloc(ranges, capacity * sizeof(Range));
        }
        ranges[count].begin = (uint64_t)(t.data - f.data);
        ranges[count].end = ranges[count].begin + length;
        count++;
    }
    qsort(ranges, count, sizeof(Range), bytes_compare);
    uint64_t at = 0;
    for (size_t i = 0; i < count; i++) {
        FACT(ranges[i].begin == at);
        at = ranges[i].end;
    }
    FACT(at == f.size);
    char text[24];
    safetensors_text(&f, "format", text, sizeof text);
    FACT(strlen(text) < sizeof text);
}

// -------------------------------------------------------------------------------------------------
// Checkpoints
// The manifest, the counters of a state, and the log that a resumed run truncates.

static void target_manifest(const unsigned char *bytes, size_t size) {
    static Manifest manifest;
    const char *fault = manifest_parse(&manifest, bytes, size);
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
    static StateFiles f;  // its ranges outlive a refused input
    free(f.ranges);
    memset(&f, 0, sizeof f);
    state_parse(&f, m, bytes, size, "state.safetensors");
    int64_t elements = 0, all = 0;
    for (int i = 0; i < f.count; i++) {
        const StateRange *r = &f.ranges[i];
        FACT(r->first >= 0 && r->count > 0 && r->first + r->count <= range_limit(m, r));
        touch(r->span.data, (uint64_t)(r->count * file_types[r->span.type].bytes));
    }
    state_cover(&f, m, "step", 1);
    for (int i = 0; i < f.count; i++) {
        FACT(i == 0 || range_compare(&f.ranges[i - 1], &f.ranges[i]) < 0);
        elements += f.ranges[i].state == STATE_M ? f.ranges[i].count : 0;
    }
    for (int b = 0; b < BUCKET_BLOCKS + m->L; b++) {
        all += bucket_at(m, 1, b).count;
    }
    FACT(elements == all);
    FACT(strlen(f.identity) < sizeof f.identity);
    for (int i = 0; i < COUNTERS; i++) {
        FACT(*counter(&f.run, i) >= 0 && *counter(&f.run, i) <= (int64_t)1 << 53);
    }
}

// The truncated log must be a prefix of whole lines, without steps after the given one.
static void target_log(const unsigned char *bytes, size_t size) {
    enum { STEP = 5 };
    char path[64];
    struct stat status;
    int fd = input_file(path, bytes, size);
    log_cut(path, STEP);
    FACT(fstat(fd, &status) == 0 && (size_t)status.st_size <= size);
    size_t kept = (size_t)status.st_size;
    char *text = (char *)malloc(kept + 1);
    FACT(pread(fd, text, kept, 0) == (ssize_t)kept && memcmp(text, bytes, kept) == 0);
    FACT(kept == 0 || text[kept - 1] == '\n');
    text[kept] = 0;
    for (char *line = text, *end; !memchr(text, 0, kept) && *line; line = end + 1) {
        int64_t step = 0;
        end = strchr(line, '\n');
        *end = 0;
        FACT(sscanf(line, "{\"step\":%" SCNd64, &step) != 1 || step <= STEP);
    }
    free(text);
}

// -------------------------------------------------------------------------------------------------
// Tokenizer
// Both kinds of vocabulary, and encoding compared with a slow reference.

static Bpe fuzz_bpe;

static void target_bpe_merges(const unsigned char *bytes, size_t size) {
    bpe_parse_merges(&fuzz_bpe, bytes, size, "merges.txt");
    bpe_identify(&fuzz_bpe, (const char *)bytes, size, "merges.txt");
    FACT(fuzz_bpe.tokenizer.kind == TOKENIZER_GPT2 || fuzz_bpe.tokenizer.kind == TOKENIZER_MERGES);
    FACT(fuzz_bpe.tokenizer.vocabulary == fuzz_bpe.count && fuzz_bpe.count >= MIN_VOCABULARY);
}

static void target_bpe_tokens(const unsigned char *bytes, size_t size) {
    bpe_parse_tokens(&fuzz_bpe, bytes, size, "gpt2_tokenizer.bin");
    bpe_require_gpt2(&fuzz_bpe, "gpt2_tokenizer.bin");
    FACT(fuzz_bpe.count == GPT2_VOCABULARY);
}

// GPT-2's vocabulary from where the tests find it, or a small one that is encoded the same way.
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
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        bpe_add(&fuzz_bpe, &byte, 1);
    }
    for (size_t i = 0; i < sizeof merges / sizeof merges[0]; i++) {
        bpe_add(&fuzz_bpe, merges[i], strlen(merges[i]));
    }
    return &fuzz_bpe;
}

// Merges a pre-token by the definition in chapter Tokenizer: scans all neighbours repeatedly.
static int64_t slow_merge(const Bpe *bpe, const char *text, size_t n, uint16_t *out) {
    size_t start[257], count = n;
    for (size_t i = 0; i <= n; i++) {
        start[i] = i;
    }
    for (;;) {
        int best = -1;
        size_t place = 0;
        for (size_t i = 0; i + 1 < count; i++) {
            int id = bpe_id(bpe, text + start[i], start[i + 2] - start[i]);
            if (id >= 0 && (best < 0 || id < best)) {
                best = id;
                place = i;
            }
        }
        if (best < 0) {
            break;
        }
        memmove(start + place + 1, start + place + 2, (count - place - 1) * sizeof *start);
        count--;
    }
    for (size_t i = 0; i < count; i++) {
        out[i] = (uint16_t)bpe_id(bpe, text + start[i], start[i + 1] - start[i]);
    }
    return (int64_t)count;
}

// Tokens must decode to the text, equal those of the slow reference, and stay the same if the text
// is cut, or encoded again by an encoder that has cached its words.
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
    const unsigned char *end = bytes + size;
    int64_t place = 0;
    for (const unsigned char *p = bytes, *next; p < end; p = next) {
        uint16_t slow[256];
        next = pretoken_end(bpe, p, end);
        FACT(next > p && next <= end);
        if (next - p > 256) {
            place = -1;
            break;
        }
        int64_t n = slow_merge(bpe, (const char *)p, (size_t)(next - p), slow);
        FACT(n <= count - place && memcmp(slow, tokens + place, (size_t)n * 2) == 0);
        place += n;
    }
    FACT(place == -1 || place == count);
    size_t cut = size ? bpe_cut(text, size) : 0;
    FACT(cut == 0 || cut < size);
    if (cut) {
        int64_t first = bpe_encode(&e, text, cut, again);
        first += bpe_encode(&e, text + cut, size - cut, again + first);
        FACT(first == count && memcmp(tokens, again, (size_t)count * 2) == 0);
    }
    free(tokens);
    free(again);
}

// -------------------------------------------------------------------------------------------------
// Options
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
        FACT(model_is_allowed(&m));
    }
    Settings s;
    memset(&s, 0, sizeof s);
    s.model.L = 12;
    recompute_parse(&s, o.recompute);
    for (int l = 0; l < s.model.L; l++) {
        FACT(s.level[l] < RECOMPUTE_LEVELS && s.level[l] <= s.level[0]);
    }
}

// The plan of any allowed options fits its arrays.
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
    FACT(value >= -1 && value < (int64_t)9e15);
    free(text);
}

// -------------------------------------------------------------------------------------------------
// JSON and SHA-256
// The JSON cursor compared with a grammar; the hash in chunks compared with the whole.

// The log's writer and the cursor agree on every text; an invalid UTF-8 byte is written as the
// character of its value.
static void json_round_trip(const unsigned char *bytes, size_t size) {
    char *written = NULL, *want = (char *)malloc(2 * size + 1), *got = (char *)malloc(2 * size + 1);
    size_t length = 0, n = 0;
    FILE *f = open_memstream(&written, &length);
    fputc('"', f);
    json_text(f, (const char *)bytes, size);
    fputc('"', f);
    fclose(f);
    for (size_t i = 0; i < size; i++) {
        int utf8 = bytes[i] < 128 ? 1 : utf8_length(bytes + i, size - i);
        if (!utf8) {
            want[n++] = (char)(0xC0 | bytes[i] >> 6);
            want[n++] = (char)(0x80 | (bytes[i] & 63));
        }
        for (int k = 0; k < utf8; k++) {
            want[n++] = (char)bytes[i + (size_t)k];
        }
        i += utf8 ? (size_t)utf8 - 1 : 0;
    }
    want[n] = 0;
    Json j = {(const unsigned char *)written, 0, length, NULL};
    json_string(&j, got, 2 * size + 1);
    int has_zero = size && memchr(bytes, 0, size) != NULL;
    FACT(has_zero == (j.fault != NULL));
    FACT(has_zero || (j.at == length && strcmp(got, want) == 0));
    free(written);
    free(want);
    free(got);
}

// RFC 8259 as a grammar, with the cursor's limits: depth, no \u0000, numbers of 30 characters.
// Returns the end of the value at p, or NULL if invalid.
static const unsigned char *grammar_space(const unsigned char *p, const unsigned char *end) {
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n')) {
        p++;
    }
    return p;
}

static const unsigned char *grammar_string(const unsigned char *p, const unsigned char *end) {
    for (p++; p < end && *p != '"'; p++) {
        if (*p < 32) {
            return NULL;
        }
        if (*p == '\\') {
            p++;
            if (p == end || !*p || !strchr("\"\\/bfnrtu", *p)) {
                return NULL;
            }
            if (*p == 'u') {
                char hex[5] = "";
                memcpy(hex, p + 1, end - p < 5 ? (size_t)(end - p - 1) : 4);
                if (strspn(hex, "0123456789abcdefABCDEF") != 4 || strcmp(hex, "0000") == 0) {
                    return NULL;
                }
                p += 4;
            }
        }
    }
    return p < end ? p + 1 : NULL;
}

static const unsigned char *grammar_scalar(const unsigned char *p, const unsigned char *end) {
    static const char *const words[] = {"true", "false", "null"};
    for (int i = 0; i < 3; i++) {
        size_t n = strlen(words[i]);
        if ((size_t)(end - p) >= n && memcmp(p, words[i], n) == 0) {
            return p + n;
        }
    }
    const unsigned char *start = p, *digits;
    p += p < end && *p == '-';
    digits = p;
    while (p < end && *p >= '0' && *p <= '9') {
        p++;
    }
    if (p == digits || (*digits == '0' && p > digits + 1)) {
        return NULL;
    }
    for (int part = 0; part < 2; part++) {
        if (p == end || (part == 0 ? *p != '.' : (*p | 32) != 'e')) {
            continue;
        }
        p++;
        p += part == 1 && p < end && (*p == '+' || *p == '-');
        digits = p;
        while (p < end && *p >= '0' && *p <= '9') {
            p++;
        }
        if (p == digits) {
            return NULL;
        }
    }
    return p - start <= 30 ? p : NULL;
}

static const unsigned char *grammar_value(const unsigned char *p, const unsigned char *end,
                                          int depth) {
    p = grammar_space(p, end);
    if (p == end) {
        return NULL;
    }
    if (*p == '"') {
        return grammar_string(p, end);
    }
    if (*p != '{' && *p != '[') {
        return grammar_scalar(p, end);
    }
    int is_object = *p == '{', close = is_object ? '}' : ']';
    p = grammar_space(p + 1, end);
    if (depth == 0 || p == end) {
        return NULL;
    }
    if (*p == close) {
        return p + 1;
    }
    for (;; p++) {
        if (is_object) {
            p = grammar_space(p, end);
            p = p < end && *p == '"' ? grammar_string(p, end) : NULL;
            p = p ? grammar_space(p, end) : NULL;
            if (!p || p == end || *p++ != ':') {
                return NULL;
            }
        }
        p = grammar_value(p, end, depth - 1);
        p = p ? grammar_space(p, end) : NULL;
        if (!p || p == end || (*p != ',' && *p != close)) {
            return NULL;
        }
        if (*p == close) {
            return p + 1;
        }
    }
}

static void target_json(const unsigned char *bytes, size_t size) {
    Json j = {bytes, 0, size, NULL};
    const unsigned char *end = grammar_value(bytes, bytes + size, JSON_DEPTH);
    json_skip(&j);
    int is_whole = json_peek(&j) < 0 && !j.fault;
    FACT(j.at <= size);
    FACT(is_whole == (end && grammar_space(end, bytes + size) == bytes + size));
    char key[8] = "";
    for (int kind = 0; kind < 2; kind++) {
        Json k = {bytes, 0, size, NULL};
        int count = 0;
        while (json_next(&k, &count, kind ? '{' : '[', key, sizeof key)) {
            FACT(strlen(key) < sizeof key);
            json_skip(&k);
        }
        FACT(k.at <= size && (size_t)count <= size);
    }
    Json number = {bytes, 0, size, NULL};
    int64_t value = json_count(&number);
    FACT(value >= 0 && value <= (int64_t)1 << 53);
    json_round_trip(bytes, size);
}

// The hash of data added in chunks of any length equals that of the whole.
static void target_sha256(const unsigned char *bytes, size_t size) {
    char whole[SHA256_TEXT], pieces[SHA256_TEXT];
    Sha256 s;
    sha256_start(&s);
    sha256_add(&s, bytes, size);
    sha256_end(&s, whole);
    sha256_start(&s);
    for (size_t at = 0, n; at < size; at += n) {
        n = bytes[at] < size - at ? bytes[at] : size - at;
        sha256_add(&s, bytes + at, n);
        n += n == 0;
        if (bytes[at] == 0) {
            sha256_add(&s, bytes + at, 1);
        }
    }
    sha256_end(&s, pieces);
    FACT(strcmp(whole, pieces) == 0 && strlen(whole) == 64);
}

// -------------------------------------------------------------------------------------------------
// Caches
// What earlier runs measured: a line that is not one of a run on this machine is ignored.

static void target_speed(const unsigned char *bytes, size_t size) {
    Speed v;
    (void)bytes, (void)size;
    memset(&v, 0, sizeof v);
    speed_load(&v, "GPU: C 4");
    for (int i = 0; i < STAGES; i++) {
        FACT(v.token[i] >= 0 && isfinite(v.token[i]));
    }
    FACT(v.block >= 0 && v.chunk >= 0 && v.byte >= 0 && v.link_byte >= 0);
    FACT(isfinite(v.block + v.chunk + v.byte + v.link_byte));
}
#endif

#if FUZZ_PROGRAM == 2
// The choices of a matmul in the cache and in a checkpoint: sixteen hexadecimal digits.
static void target_matmul(const unsigned char *bytes, size_t size) {
    static const MatmulKey key = {8, 16, 24, 0, 1, 1, 0, 0, 14, 14};
    char *text = strndup((const char *)bytes, size), word[96];
    uint64_t hash, cached;
    snprintf(matmul_library.where, sizeof matmul_library.where, "GPU, 2 SMs");
    if (matmul_choice_find(&hash, text, &key)) {
        const char *at = strstr(text, matmul_key_text(&key).s);
        FACT(strncmp(text, "GPU, 2 SMs|", 11) == 0 && at);
        snprintf(word, sizeof word, "%" PRIx64, hash);
        FACT(strcasestr(at, word));
    }
    matmul_cache_find(&cached, &key);
    free(text);
}

// Verdicts of kernel trials: what is taken from the cache is a verdict, cut to its space.
static void target_kernels(const unsigned char *bytes, size_t size) {
    const TrialShape x = {64, 128, 12, 4};
    KernelVerdicts verdicts = {};
    (void)bytes, (void)size;
    emu::set.kernels = emu::KERNEL_OWN;
    trial_cache(&verdicts, nullptr, "GPU", x, 90);
    each_candidate(x, 90, [&](int kernel, int row, const char *) {
        const char *text = verdicts[kernel][row].s;
        FACT(memchr(text, 0, sizeof verdicts[kernel][row].s));
        FACT(!text[0] || verdict_is(text));
    });
}

// The library's memory: at most 8 GiB, whatever the cache says.
static void target_library(const unsigned char *bytes, size_t size) {
    int measured;
    (void)bytes, (void)size;
    FACT(device_library_bytes(&measured) <= (uint64_t)8 << 30);
}
#endif

#if FUZZ_PROGRAM == 1
// -------------------------------------------------------------------------------------------------
// Learning merges
// Merges of any text, compared with their definition; the state of an interrupted run.

enum { FUZZ_MERGES = 24 };
static Bpe fuzz_bpe;

// Learns merges from the words of a table by definition: counts all pairs again for every merge.
// Returns their number.
static int slow_learn(const Bpe *bpe, const WordTable *t, int merges, uint32_t keys[FUZZ_MERGES]) {
    static int64_t counts[256 + FUZZ_MERGES][256 + FUZZ_MERGES];
    int lengths[256 + FUZZ_MERGES], done = 0;
    int *symbols = (int *)malloc((t->text_bytes + 1) * sizeof(int));
    size_t *sizes = (size_t *)malloc((t->word_count + 1) * sizeof(size_t));
    for (size_t i = 0; i < t->text_bytes; i++) {
        symbols[i] = bpe_id(bpe, t->text + i, 1);
    }
    for (uint32_t w = 0; w < t->word_count; w++) {
        sizes[w] = t->words[w].bytes;
    }
    for (int id = 0; id < 256; id++) {
        lengths[id] = 1;
    }
    for (; done < merges; done++) {
        int best_a = -1, best_b = -1;
        memset(counts, 0, sizeof counts);
        for (uint32_t w = 0; w < t->word_count; w++) {
            const int *s = symbols + t->words[w].at;
            for (size_t i = 0; i + 1 < sizes[w]; i++) {
                counts[s[i]][s[i + 1]] += t->words[w].count;
            }
        }
        for (int a = 0; a < 256 + done; a++) {
            for (int b = 0; b < 256 + done; b++) {
                if (counts[a][b] > 0 && lengths[a] + lengths[b] <= BPE_LONGEST &&
                    (best_a < 0 || counts[a][b] > counts[best_a][best_b])) {
                    best_a = a;
                    best_b = b;
                }
            }
        }
        if (best_a < 0) {
            break;
        }
        keys[done] = (uint32_t)best_a << 16 | (uint32_t)best_b;
        lengths[256 + done] = lengths[best_a] + lengths[best_b];
        for (uint32_t w = 0; w < t->word_count; w++) {
            int *s = symbols + t->words[w].at;
            size_t kept = 0;
            for (size_t i = 0; i < sizes[w]; i++) {
                const int is_pair = i + 1 < sizes[w] && s[i] == best_a && s[i + 1] == best_b;
                s[kept++] = is_pair ? 256 + done : s[i];
                i += (size_t)is_pair;
            }
            sizes[w] = kept;
        }
    }
    free(symbols);
    free(sizes);
    return done;
}

// Checks that `merges` merges of a table are those of slow_learn, and that a merges file of the
// vocabulary has the same tokens.
static void require_merges(WordTable *t, int merges) {
    static Bpe again;
    uint32_t keys[FUZZ_MERGES];
    int byte_of[BYTE_CHARACTERS];
    size_t size;
    bpe_begin_bytes(&fuzz_bpe, byte_of);
    const int want = slow_learn(&fuzz_bpe, t, merges, keys), got = bpe_learn(&fuzz_bpe, t, merges);
    FACT(got == want && fuzz_bpe.count == 256 + got);
    for (int i = 0; i < got; i++) {
        const char *whole, *part;
        const int n = bpe_bytes(&fuzz_bpe, 256 + i, &whole);
        const int a = bpe_bytes(&fuzz_bpe, (int)(keys[i] >> 16), &part);
        FACT(a < n && memcmp(whole, part, (size_t)a) == 0);
        FACT(n - a == bpe_bytes(&fuzz_bpe, (int)(keys[i] & 0xFFFF), &part));
        FACT(memcmp(whole + a, part, (size_t)(n - a)) == 0);
    }
    FACT(bpe_add(&fuzz_bpe, marker, MARKER_BYTES));
    char *text = bpe_merges_text(&fuzz_bpe, &size);
    bpe_parse_merges(&again, (const unsigned char *)text, size, "merges.txt");
    FACT(again.count == fuzz_bpe.count);
    for (int id = 0; id < again.count; id++) {
        const char *one, *other;
        const int n = bpe_bytes(&again, id, &one);
        FACT(n == bpe_bytes(&fuzz_bpe, id, &other) && memcmp(one, other, (size_t)n) == 0);
    }
    free(text);
}

// The first byte is the number of merges, the second bounds a table that must be pruned.
static void target_bpe_train(const unsigned char *bytes, size_t size) {
    static WordTable words, small;    // their memory outlives a refused input
    if (size < 2) {
        return;
    }
    const char *text = (const char *)bytes + 2;
    const int merges = bytes[0] % (FUZZ_MERGES + 1);
    const uint32_t most = 2 + bytes[1] % 32u;
    int64_t all = 0, kept = 0;
    words_clear(&words);
    words_clear(&small);
    small.dropped = 0;
    count_text_words(&fuzz_bpe, &words, text, size - 2);
    words_merge(&small, &words, most, 8 * most);
    for (uint32_t i = 0; i < words.word_count; i++) {
        all += words.words[i].count;
        FACT(words.words[i].at + words.words[i].bytes <= words.text_bytes);
    }
    for (uint32_t i = 0; i < small.word_count; i++) {
        kept += small.words[i].count;
    }
    FACT(words.text_bytes <= size - 2 && small.word_count <= most);
    FACT(kept + small.dropped == all);
    require_merges(&words, merges);
    require_merges(&small, merges);
}

// PREFIX.state of an interrupted run: what is accepted is within the text.
static void target_progress(const unsigned char *bytes, size_t size) {
    static Arguments a;
    static Source source = {"text", 0, 1000, 0};
    Input in;
    char path[64];
    static int fd = -1;
    fd = fd < 0 ? memfd_create("input", 0) : fd;
    FACT(ftruncate(fd, 0) == 0 && pwrite(fd, bytes, size, 0) == (ssize_t)size);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    memset(&in, 0, sizeof in);
    in.files = &source;
    in.count = 1;
    in.total = 1000;
    a.prefix = "/nonexistent/prefix";
    train.arguments = val.arguments = &a;
    State state;
    memset(&state, 0, sizeof state);
    state.arguments = 0x1234;
    state.input = 0x5678;
    if (state_read(&state, &in, path)) {
        FACT(state.place.position >= 0 && state.place.position <= 1000 && state.place.skip >= 0);
        FACT(state.arguments == 0x1234 && state.input == 0x5678);
        FACT(train.finished <= 0 && val.finished <= 0);
    }
}
#endif

// -------------------------------------------------------------------------------------------------
// Running
// Targets by name, called by libFuzzer or run over files.

static const struct {
    const char *name;
    void (*run)(const unsigned char *bytes, size_t size);
} targets[] = {
#if FUZZ_PROGRAM == 1
               {"bpe_train", target_bpe_train},
               {"progress", target_progress}};
#elif FUZZ_PROGRAM == 2
               {"matmul", target_matmul},
               {"kernels", target_kernels},
               {"library", target_library}};
#else
               {"shard", target_shard},
               {"llmc", target_llmc},
               {"weights", target_weights},
               {"config", target_config},
               {"safetensors", target_safetensors},
               {"manifest", target_manifest},
               {"state", target_state},
               {"log", target_log},
               {"eval", target_eval},
               {"bpe_merges", target_bpe_merges},
               {"bpe_tokens", target_bpe_tokens},
               {"bpe_encode", target_bpe_encode},
               {"options", target_options},
               {"plan", target_plan},
               {"sizes", target_sizes},
               {"json", target_json},
               {"sha256", target_sha256},
               {"speed", target_speed}};
#endif
enum { TARGETS = sizeof targets / sizeof targets[0] };

static int target_find(const char *name) {
    fuzz_errors = fmemopen(fuzz_message, sizeof fuzz_message, "w");
    setenv("XDG_CACHE_HOME", "/fuzz", 1);
    for (int i = 0; i < TARGETS; i++) {
        if (name && strcmp(targets[i].name, name) == 0) {
            return i;
        }
    }
    for (int i = 0; i < TARGETS; i++) {
        puts(targets[i].name);
    }
    fflush(stdout);  // libFuzzer ends the process without it
    exit(name != NULL);
}

// Runs one input. A refusal must be one line of printable text.
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
// Runs every file whole, truncated, and with one byte changed: REPLAY_CHANGES times each, at places
// from a fixed sequence.
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
