// data/tokenize.c -- converts text of any length to token shards for train_gpt2 (data/README.md).
//
//     data/tokenize --bpe -o data/mine mine.txt              data/mine_train.bin, data/mine_val.bin
//     cat *.txt | data/tokenize --bytes --shard-tokens 100000000 -o data/mine -
//     data/tokenize --train-bpe 8192 -o data/mine mine.txt   learns data/mine_merges.txt first
//
// Files are memory-mapped and split into blocks, which threads encode in parallel and write in
// order. With --train-bpe, a first pass counts the distinct pre-tokens of the training text.
//
// 1. The shards do not depend on the number of threads, because each block starts at a position
//    that depends only on the text near a multiple of BLOCK_BYTES. Except at an unsafe cut
//    (CUT_BYTES), blocks give the same tokens as the whole file.
// 2. A run writes either all of its files or none. Their names end in .part until all are complete.

#include "files.c"
#include "tokens.c"
#include <getopt.h>

enum {
    BLOCK_BYTES = 1 << 20,  // usual size of a block of text
    CUT_BYTES = 4 << 20     // distance without a safe cut after which an unsafe one is made
};

static const char *const usage_text =
    "usage: data/tokenize --bpe|--bytes|--tokens|--train-bpe N [options] -o PREFIX FILE...|-\n\n"
    "Tokenizes each FILE (- for standard input) and writes PREFIX_train.bin and PREFIX_val.bin.\n\n"
    "  --bpe               use GPT-2's tokenizer or the one given by --tokenizer\n"
    "  --bytes             use one token per byte\n"
    "  --tokens            read headerless uint16 tokens, as written by nanoGPT, from GPT-2's\n"
    "                      tokenizer or the one given by --tokenizer\n"
    "  --train-bpe N       learn a vocabulary of N tokens (257 to 65535) from the training text:\n"
    "                      256 bytes, up to N - 257 merges, end of text; writes PREFIX_merges.txt\n"
    "  -o PREFIX           path prefix of the output files, such as data/mine\n"
    "  --documents         split each FILE into documents at <|endoftext|>, strip surrounding\n"
    "                      whitespace and start each document with an end-of-text token;\n"
    "                      default: one plain text\n"
    "  --val-fraction F    hold out the last fraction F of the text for validation, rounded to\n"
    "                      whole documents with --documents; default: 0.1; 0 disables validation\n"
    "  --val-file FILE     validate on this file instead and train on all others\n"
    "  --shard-tokens N    split the output into shards of N tokens: PREFIX_train_000000.bin, ...\n"
    "  --tokenizer FILE    vocab.bpe, merges.txt or tokenizer.json, or a folder with one of them;\n"
    "                      copied to PREFIX_merges.txt unless GPT-2's; default: data/vocab.bpe\n";

typedef struct {
    char **files;
    const char *prefix, *tokenizer, *val_file;
    int file_count, bpe, bytes, tokens, documents;
    int train_bpe;               // size of the vocabulary to learn, or 0
    double val_fraction;         // negative if not given
    int64_t shard_tokens;        // 0 for one shard
} Arguments;

static double number(const char *option, double low, double high, int whole) {
    char *end;
    const double value = strtod(optarg, &end);
    if (end == optarg || *end != 0 || !(value >= low && value <= high) ||
        (whole && value != floor(value))) {
        die("--%s: invalid value '%s'; expected %s between %.10g and %.10g", option, optarg,
            whole ? "an integer" : "a number", low, high);
    }
    return value;
}

static Arguments parse_arguments(int argc, char **argv) {
    Arguments a = {.val_fraction = -1};
    const struct option options[] = {
        {"bpe", no_argument, &a.bpe, 1}, {"bytes", no_argument, &a.bytes, 1},
        {"tokens", no_argument, &a.tokens, 1}, {"documents", no_argument, &a.documents, 1},
        {"train-bpe", required_argument, NULL, 'b'}, {"shard-tokens", required_argument, NULL, 's'},
        {"val-fraction", required_argument, NULL, 'f'}, {"val-file", required_argument, NULL, 'v'},
        {"tokenizer", required_argument, NULL, 't'}, {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0}};
    for (int c, i = 0; (c = getopt_long(argc, argv, "ho:", options, &i)) >= 0;) {
        if (c == 'h') {
            fputs(usage_text, stdout);
            exit(0);
        } else if (c == '?') {
            exit(1);  // getopt_long has printed the reason
        } else if (c == 'b') {
            a.train_bpe = number(options[i].name, MIN_VOCABULARY, MAX_VOCABULARY, 1);
        } else if (c == 's') {
            a.shard_tokens = number(options[i].name, 1, INT32_MAX, 1);
        } else if (c == 'f') {
            a.val_fraction = number(options[i].name, 0, 1, 0);
        } else if (c) {
            *(c == 'o' ? &a.prefix : c == 'v' ? &a.val_file : &a.tokenizer) = optarg;
        }
    }
    a.files = argv + optind;
    a.file_count = argc - optind;
    const char *slash = a.prefix ? strrchr(a.prefix, '/') : NULL;
    const char *name = slash ? slash + 1 : a.prefix ? a.prefix : "";
    const int modes = a.bpe + a.bytes + a.tokens + (a.train_bpe > 0);
    const int ends_in_name = !choice_find("|.|..", name, strlen(name));
    const char *wrong =
        modes == 0      ? "missing --bpe, --bytes, --tokens or --train-bpe; see --help"
        : !a.prefix     ? "missing -o PREFIX; see --help"
        : !a.file_count ? "missing input: FILE or -; see --help"
        : !ends_in_name ? "-o: PREFIX must end in a file name, such as data/mine"
        : modes > 1     ? "--bpe, --bytes, --tokens and --train-bpe are mutually exclusive"
        : a.tokenizer && !a.bpe && !a.tokens ? "--tokenizer requires --bpe or --tokens"
        : a.tokens && a.documents           ? "--tokens and --documents are mutually exclusive"
        : a.val_fraction >= 0 && a.val_file ? "--val-fraction and --val-file are mutually exclusive"
                                            : NULL;
    if (wrong) {
        die("%s", wrong);
    }
    return a;
}

// The signal that requested a stop, or 0. It is checked before each block and each merge.
static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

// -------------------------------------------------------------------------------------------------
// Text
// A text is a list of parts. A part is a file, or a piece of the file that is split for validation.

typedef struct {
    const char *name, *bytes;    // name of the file
    size_t size;
} Part;
typedef struct {
    Part *parts;
    int count;
    int64_t size;                // bytes of all parts
} Corpus;

// Fails if the first bytes show that a file is not text or, with --tokens, not uint16 tokens.
static void file_refuse(const Part *file, int tokens) {
    static const struct {
        const char *mark, *format;
    } formats[] = {{"\x1F\x8B", "gzip"}, {"PAR1", "Parquet"}, {"\xFF\xFE", "UTF-16"},
                   {"\xFE\xFF", "UTF-16"}, {"\x28\xB5\x2F\xFD", "zstd"}, {"BZh", "bzip2"},
                   {"\xFD\x37zXZ", "xz"}, {"PK\x03\x04", "zip"}, {"%PDF-", "PDF"},
                   {"ARROW1", "Arrow"}, {"\x04\x22\x4D\x18", "lz4"}};
    const char *name = file->name;
    const unsigned char *bytes = (const unsigned char *)file->bytes;
    Json j = {bytes, 0, (size_t)min_i64((int64_t)file->size, 1 << 24), NULL};
    if (tokens && (llmc_kind(bytes, file->size) >= 0 || file->size % 2)) {
        die("--tokens: %s has %s", name, file->size % 2
                ? "an odd number of bytes; expected uint16 tokens"
                : "a header; pass it to train_gpt2 -i without conversion");
    }
    for (size_t i = 0; !tokens && i < sizeof formats / sizeof *formats; i++) {
        const size_t n = strlen(formats[i].mark);
        if (file->size >= n && memcmp(bytes, formats[i].mark, n) == 0) {
            die("%s is %s, not plain text; convert it first%s", name, formats[i].format,
                formats[i].format[0] == 'U' ? " (UTF-16: iconv -f UTF-16 -t UTF-8)" : "");
        }
    }
    if (!tokens && file->size > 0 && strchr("[{", bytes[0])) {
        const int list = json_take(&j, '['), is_object = json_peek(&j) == '{';
        json_skip(&j);  // the first object
        if (is_object && !j.fault && (list || json_peek(&j) < 0 || json_peek(&j) == '{')) {
            die("%s is JSON, not plain text; extract the text first, for example with jq -r "
                ".text %s | data/tokenize ... -", name, name);
        }
    }
}

// Maps a file. Standard input and a shell's <(command) are first copied to an unlinked file.
static Part file_map(const char *name, const Arguments *a) {
    Mapping map;
    char path[PATH_BYTES], buffer[1 << 16];
    struct stat status;
    const int is_pipe = (strncmp(name, "/dev/fd/", 8) == 0 || strncmp(name, "/proc/", 6) == 0) &&
                        stat(name, &status) == 0 && S_ISFIFO(status.st_mode);
    const int from = strcmp(name, "-") == 0 ? STDIN_FILENO : is_pipe ? open(name, O_RDONLY) : -1;
    int fd = -1;
    path_print(path, "%s", name);
    if (from >= 0) {
        path_print(path, "%s_input.part", a->prefix);
        fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
        if (fd < 0 || unlink(path) != 0) {
            die("cannot create %s: %s", path, strerror(errno));
        }
        ssize_t n = 0;
        while (!stop_signal && (n = read(from, buffer, sizeof buffer)) > 0) {
            if (write_all(fd, buffer, n) != 0) {
                die("cannot write %s: %s", path, strerror(errno));
            }
        }
        if (n < 0 && !stop_signal) {
            die("cannot read %s: %s", from ? name : "standard input", strerror(errno));
        }
        if (is_pipe) {
            close(from);
        }
        path_print(path, "/proc/self/fd/%d", fd);
    }
    if (mapping_open(&map, path) != 0) {
        die("cannot read %s: %s", name, file_error());
    }
    if (fd >= 0) {
        close(fd);
    }
    const Part part = {name, (const char *)map.bytes, map.size};
    file_refuse(&part, a->tokens);
    return part;
}

static int is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// Returns whether only blanks separate `offset` from a marker or from the start of the part.
static int document_begins(const Part *part, size_t offset) {
    while (offset > 0 && is_blank(part->bytes[offset - 1])) {
        offset--;
    }
    return offset == 0 || (offset >= MARKER_BYTES &&
                           memcmp(part->bytes + offset - MARKER_BYTES, marker, MARKER_BYTES) == 0);
}

// Returns the first offset >= `offset` at which validation may begin: the start of a UTF-8
// character or, with --documents, of a document.
static size_t split_at(const Part *file, size_t offset, int documents) {
    if (documents && offset > 0) {
        const size_t from = offset > MARKER_BYTES ? offset - MARKER_BYTES : 0;  // within a marker?
        const char *found =
            (const char *)memmem(file->bytes + from, file->size - from, marker, MARKER_BYTES);
        return found ? (size_t)(found - file->bytes) + MARKER_BYTES : file->size;
    }
    for (int i = 0; i < 3 && offset < file->size && (file->bytes[offset] & 0xC0) == 0x80; i++) {
        offset++;
    }
    return offset;
}

static void corpus_add(Corpus *t, const char *name, const char *bytes, size_t size) {
    const Part part = {name, bytes, size};
    t->parts[t->count] = part;
    t->count += size > 0;
    t->size += size;
}

// Maps all files and splits them into training and validation text. A file given by --val-file is
// never trained on, even if it is also listed as an input. Fails if any other file is given twice,
// even under different names.
static void corpus_open(Corpus texts[2], const Arguments *a) {
    const int count = a->file_count + (a->val_file != NULL);
    Part *files = (Part *)alloc_zero(count, sizeof *files);
    int64_t size = 0;
    for (int i = 0; i < count; i++) {
        const char *name = i < a->file_count ? a->files[i] : a->val_file;
        if (i < a->file_count && a->val_file && file_same(name, a->val_file)) {
            continue;
        }
        files[i] = file_map(name, a);
        size += files[i].size;
        for (int k = 0; k < i; k++) {
            if (files[k].size == files[i].size && file_same(files[k].name, name)) {
                die("%s is given twice, also as %s", name, files[k].name);
            }
        }
    }
    int64_t train = size * (1 - (a->val_fraction >= 0 ? a->val_fraction : 0.1));
    train = a->val_file ? size - (int64_t)files[count - 1].size : train;
    texts[0].parts = (Part *)alloc_zero(count, sizeof(Part));
    texts[1].parts = (Part *)alloc_zero(count, sizeof(Part));
    for (int i = 0; i < count; i++) {
        const Part *file = &files[i];
        size_t cut = min_i64(max_i64(train, 0), file->size);
        cut = cut == file->size ? cut : a->tokens ? cut / 2 * 2 : split_at(file, cut, a->documents);
        corpus_add(&texts[0], file->name, file->bytes, cut);
        corpus_add(&texts[1], file->name, file->bytes + cut, file->size - cut);
        train -= cut;
    }
    free(files);
}

// -------------------------------------------------------------------------------------------------
// Distinct pre-tokens
// --train-bpe counts the occurrences of each pre-token ("word") in one table per block. Tables are
// merged in block order, so the result does not depend on the number of threads.

typedef struct {
    int64_t count;
    uint32_t offset, bytes;  // location in `text`
    uint32_t hash;
} Word;
typedef struct {
    Word *words;           // in order of first occurrence; capacity: slot_count / 2
    uint32_t *slots;       // hash table: index of a word + 1; 0 if free
    char *text;
    uint32_t word_count, slot_count;
    size_t text_bytes, text_capacity;
} WordTable;

static void words_free(WordTable *t) {
    free(t->words);
    free(t->slots);
    free(t->text);
    memset(t, 0, sizeof *t);
}

static void words_add(WordTable *t, const char *bytes, size_t n, uint32_t hash, int64_t count) {
    if (t->word_count >= t->slot_count / 2) {
        free(t->slots);
        t->slot_count = t->slot_count ? 2 * t->slot_count : 1 << 12;
        t->slots = (uint32_t *)alloc_zero(t->slot_count, sizeof *t->slots);
        t->words = (Word *)grow(t->words, t->slot_count / 2 * sizeof(Word));
        for (uint32_t i = 0; i < t->word_count; i++) {
            // NOLINTNEXTLINE(clang-analyzer-unix.Malloc): slot_count is not 0
            uint32_t slot = t->words[i].hash & (t->slot_count - 1);
            while (t->slots[slot]) {
                slot = (slot + 1) & (t->slot_count - 1);
            }
            t->slots[slot] = i + 1;
        }
    }
    uint32_t slot = hash & (t->slot_count - 1);
    for (; t->slots[slot]; slot = (slot + 1) & (t->slot_count - 1)) {
        Word *w = &t->words[t->slots[slot] - 1];
        if (w->hash == hash && w->bytes == n && memcmp(t->text + w->offset, bytes, n) == 0) {
            w->count += count;
            return;
        }
    }
    if (t->text_bytes + n > UINT32_MAX) {
        die("--train-bpe: the distinct pre-tokens of this text exceed 4 GiB");
    }
    if (t->text_bytes + n > t->text_capacity) {
        t->text_capacity = 2 * t->text_capacity + n;
        t->text = (char *)grow(t->text, t->text_capacity);
    }
    const Word w = {count, (uint32_t)t->text_bytes, (uint32_t)n, hash};
    memcpy(t->text + t->text_bytes, bytes, n);
    t->text_bytes += n;
    t->words[t->word_count++] = w;  // NOLINT(clang-analyzer-unix.Malloc)
    t->slots[slot] = t->word_count;
}

static void words_count(WordTable *t, const Bpe *bpe, const char *text, size_t n) {
    const unsigned char *p = (const unsigned char *)text, *end = p + n;
    for (const unsigned char *next; p < end; p = next) {
        next = pretoken_end(bpe, p, end);
        const size_t length = next - p;
        words_add(t, (const char *)p, length, fnv1a(fnv1a_start, p, length), 1);
    }
}

static void words_merge(WordTable *t, WordTable *more) {
    for (uint32_t i = 0; i < more->word_count; i++) {
        const Word *w = &more->words[i];
        words_add(t, more->text + w->offset, w->bytes, w->hash, w->count);
    }
    words_free(more);
}

// -------------------------------------------------------------------------------------------------
// Learning merges
// Byte-pair encoding repeatedly merges the most frequent pair of adjacent tokens into a new token.
// Ties go to the lowest left id, then the lowest right id, as in Hugging Face's BpeTrainer, which
// learns the same merges.
// 1. A pair stores the number of its occurrences, including overlapping ones (aa in aaa), and a
//    list of the words that may contain it.
// 2. Only pairs that contain the newest token gain occurrences, so a count in the heap is never too
//    low. A pair popped with a stale count is pushed again with its current count.

typedef struct {
    uint32_t key;              // id of the left token << 16 | id of the right one
    uint32_t word_count, capacity;
    int64_t count;
    uint32_t *words;
} Pair;
typedef struct {
    const Bpe *bpe;
    const WordTable *table;
    uint16_t *symbols;         // token ids of all words, at the offsets of their texts
    uint32_t *lengths;         // number of symbols in each word
    Pair *pairs;               // capacity: slot_count / 2
    uint32_t *slots;           // hash table: index of a pair + 1; 0 if free
    uint32_t pair_count, slot_count;
    Heap heap;                 // items: pair_rank(), possibly stale
} Learner;

static uint32_t pair_slot(const Learner *l, uint32_t key) {
    uint32_t slot = ((key * 0x9E3779B97F4A7C15u) >> 40) & (l->slot_count - 1);
    while (l->slots[slot] && l->pairs[l->slots[slot] - 1].key != key) {
        slot = (slot + 1) & (l->slot_count - 1);
    }
    return slot;
}

static Pair *pair_get(Learner *l, uint32_t key) {
    if (l->pair_count >= l->slot_count / 2) {
        free(l->slots);
        l->slot_count = l->slot_count ? 2 * l->slot_count : 1 << 18;
        l->slots = (uint32_t *)alloc_zero(l->slot_count, sizeof *l->slots);
        l->pairs = (Pair *)grow(l->pairs, l->slot_count / 2 * sizeof(Pair));
        for (uint32_t i = 0; i < l->pair_count; i++) {
            l->slots[pair_slot(l, l->pairs[i].key)] = i + 1;
        }
    }
    const uint32_t slot = pair_slot(l, key);
    if (!l->slots[slot]) {
        const Pair fresh = {key, 0, 0, 0, NULL};
        l->pairs[l->pair_count] = fresh;
        l->slots[slot] = ++l->pair_count;
    }
    return &l->pairs[l->slots[slot] - 1];
}

// Returns the rank of a pair in merge order: by descending count (at most 2^32 - 1), then by key.
static uint64_t pair_rank(const Pair *pair) {
    return (uint64_t)(UINT32_MAX - min_i64(pair->count, UINT32_MAX)) << 32 | pair->key;
}

// Adds `times` occurrences of a pair in a word, or removes them if `times` is negative.
static void pair_change(Learner *l, int left, int right, uint32_t word, int64_t times) {
    const uint32_t *start = l->bpe->start;
    if (start[left + 1] - start[left] + start[right + 1] - start[right] > BPE_LONGEST) {
        return;
    }
    Pair *pair = pair_get(l, (uint32_t)left << 16 | right);
    pair->count += times;
    if (times < 0 || (pair->word_count && pair->words[pair->word_count - 1] == word)) {
        return;
    }
    if (pair->word_count == pair->capacity) {
        pair->capacity = pair->capacity ? 2 * pair->capacity : 4;
        pair->words = (uint32_t *)grow(pair->words, pair->capacity * sizeof *pair->words);
    }
    pair->words[pair->word_count++] = word;
}

static void word_merge(Learner *l, uint32_t word, int a, int b, int id) {
    uint16_t *s = l->symbols + l->table->words[word].offset;
    const uint32_t n = l->lengths[word];
    const int64_t times = l->table->words[word].count;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (i + 1 == n || s[i] != a || s[i + 1] != b) {
            s[kept++] = s[i];
            continue;
        }
        if (kept > 0) {
            pair_change(l, s[kept - 1], a, word, -times);
            pair_change(l, s[kept - 1], id, word, times);
        }
        if (i + 2 < n) {
            pair_change(l, b, s[i + 2], word, -times);
            pair_change(l, id, s[i + 2], word, times);
        }
        s[kept++] = id;
        i++;
    }
    l->lengths[word] = kept;
}

static void learner_open(Learner *l, const Bpe *bpe, const WordTable *t) {
    l->bpe = bpe;
    l->table = t;
    l->symbols = (uint16_t *)alloc_zero(t->text_bytes + 1, sizeof *l->symbols);
    l->lengths = (uint32_t *)alloc_zero((size_t)t->word_count + 1, sizeof *l->lengths);
    for (uint32_t i = 0; i < t->word_count; i++) {
        const Word *w = &t->words[i];
        l->lengths[i] = w->bytes;
        for (uint32_t k = 0; k < w->bytes; k++) {
            l->symbols[w->offset + k] = bpe_rank(bpe, t->text + w->offset + k, 1);
            if (k > 0) {
                pair_change(l, l->symbols[w->offset + k - 1], l->symbols[w->offset + k], i,
                            w->count);
            }
        }
    }
    for (uint32_t i = 0; i < l->pair_count; i++) {
        heap_push(&l->heap, pair_rank(&l->pairs[i]));
    }
}

// Learns `merges` merges from words, or fewer if no pairs are left or a signal arrives, and adds
// them to `bpe`, which contains the 256 bytes. Returns their number.
static int bpe_learn(Bpe *bpe, WordTable *words, int merges) {
    Learner *l = (Learner *)alloc_zero(1, sizeof *l);
    int done = 0;
    learner_open(l, bpe, words);
    while (done < merges && !stop_signal && l->heap.count > 0) {
        const uint64_t rank = heap_pop(&l->heap);
        Pair *found = pair_get(l, rank), pair = *found;
        if (pair_rank(&pair) != rank || pair.count <= 0) {
            if (pair.count > 0) {
                heap_push(&l->heap, pair_rank(&pair));
            }
            continue;
        }
        found->words = NULL;
        found->count = 0;
        const int a = pair.key >> 16, b = pair.key & 0xFFFF, id = bpe->count;
        const char *left, *right;
        char both[BPE_LONGEST];
        const size_t n = bpe_bytes(bpe, a, &left), m = bpe_bytes(bpe, b, &right);
        memcpy(both, left, n);
        memcpy(both + n, right, m);
        if (!bpe_add(bpe, both, n + m)) {
            die("--train-bpe: after %d merges, the tokens take %u bytes in total; the limit is %d",
                done, bpe->start[id], BPE_TEXT);
        }
        bpe->splits[id] = n;
        const uint32_t first = l->pair_count;
        for (uint32_t i = 0; i < pair.word_count; i++) {
            word_merge(l, pair.words[i], a, b, id);
        }
        free(pair.words);
        for (uint32_t i = first; i < l->pair_count; i++) {  // the pairs with the new token
            if (l->pairs[i].count > 0) {
                heap_push(&l->heap, pair_rank(&l->pairs[i]));
            }
        }
        done++;
    }
    for (uint32_t i = 0; i < l->pair_count; i++) {
        free(l->pairs[i].words);
    }
    free(l->symbols);
    free(l->lengths);
    free(l->pairs);
    free(l->slots);
    free(l->heap.items);
    free(l);
    return done;
}

// -------------------------------------------------------------------------------------------------
// Shards

static char (*outputs)[PATH_BYTES];  // final paths of the files that this run writes
static int output_count;

static void outputs_end(int complete) {
    char part[PATH_BYTES + 8];
    for (int i = 0; i < output_count; i++) {
        snprintf(part, sizeof part, "%s.part", outputs[i]);
        if (!complete) {
            unlink(part);
        } else if (rename(part, outputs[i]) != 0) {
            die("cannot rename %s to %s: %s", part, outputs[i], strerror(errno));
        }
    }
    output_count = 0;
}

static void outputs_drop(void) { outputs_end(0); }  // at exit, including after an error

static int output_open(const char *path) {
    char part[PATH_BYTES];
    path_print(part, "%s.part", path);
    outputs = (char (*)[PATH_BYTES])grow(outputs, ((size_t)output_count + 1) * sizeof *outputs);
    const int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (fd < 0) {
        die("cannot create %s: %s", part, strerror(errno));
    }
    path_print(outputs[output_count++], "%s", path);
    return fd;
}

static void output_require(int ok) {
    if (!ok) {
        die("cannot write %s.part: %s", outputs[output_count - 1], strerror(errno));
    }
}

static void output_write(int fd, const void *data, size_t bytes) {
    output_require(write_all(fd, data, bytes) == 0);
}

static void output_close(int fd) { output_require(fsync(fd) == 0 && close(fd) == 0); }

// The shards of one split, training or validation.
typedef struct {
    const Arguments *arguments;
    const char *split;
    char path[PATH_BYTES];
    Tokenizer tokenizer;
    int fd;                         // of the open shard, or -1
    int64_t shards;                 // complete shards
    int64_t shard_tokens, tokens;   // tokens in the open shard; in all shards
    Sha256 sha;                     // of the tokens in the open shard
} Sink;

// Writes the path of a shard. The file name contains `index` if `numbered` is nonzero
// (--shard-tokens).
static void shard_path(char *path, const Sink *s, int64_t index, int numbered) {
    path_print(path, numbered ? "%s_%s_%06" PRId64 ".bin" : "%s_%s.bin", s->arguments->prefix,
               s->split, index);
}

// Completes the open shard, if any. The SHA-256 in its header covers all tokens, then the header
// with zeros in place of the hash.
static void sink_finish(Sink *s) {
    if (s->fd < 0) {
        return;
    }
    const Tokenizer *t = &s->tokenizer;
    const uint64_t named = t->kind == TOKENIZER_MERGES ? t->hash : 0;
    char hash[SHA256_TEXT];
    int32_t header[LLMC_HEADER_BYTES / 4] = {
        llmc_files[LLMC_TOKENS].magic, 1, (int32_t)s->shard_tokens, t->vocabulary, t->kind,
        (int32_t)__builtin_bswap32(named >> 32), (int32_t)__builtin_bswap32(named)};
    sha256_add(&s->sha, header, sizeof header);
    sha256_end(&s->sha, hash);
    memcpy(header + SHARD_SHA256, s->sha.h, sizeof s->sha.h);
    output_require(lseek(s->fd, 0, SEEK_SET) == 0);
    output_write(s->fd, header, sizeof header);
    output_close(s->fd);
    s->fd = -1;
    s->shards++;
}

// Appends tokens and starts a new shard whenever the current one is full. No shard is empty.
static void sink_append(Sink *s, const uint16_t *tokens, int64_t count) {
    const int32_t header[LLMC_HEADER_BYTES / 4] = {0};  // written by sink_finish
    const int64_t numbered = s->arguments->shard_tokens, limit = numbered ? numbered : INT32_MAX;
    s->tokens += count;
    for (int64_t now; count > 0; tokens += now, count -= now) {
        if (s->fd >= 0 && s->shard_tokens == limit) {
            if (!numbered) {
                die("%s: a shard can hold at most %d tokens; use --shard-tokens", s->path,
                    INT32_MAX);
            }
            sink_finish(s);
        }
        if (s->fd < 0) {
            shard_path(s->path, s, s->shards, numbered > 0);
            s->fd = output_open(s->path);
            s->shard_tokens = 0;
            sha256_start(&s->sha);
            output_write(s->fd, header, sizeof header);
        }
        now = min_i64(count, limit - s->shard_tokens);
        output_write(s->fd, tokens, now * sizeof *tokens);
        sha256_add(&s->sha, tokens, now * sizeof *tokens);
        s->shard_tokens += now;
    }
}

// Fails if an earlier run left shards that a pattern for this run's shards, such as
// PREFIX_train*.bin, would also match. `shards` is the number of this run's shards or, before they
// are counted, an upper bound.
static void sink_check_others(const Sink *s, int64_t shards) {
    const int numbered = s->arguments->shard_tokens > 0;
    char path[2][PATH_BYTES];
    shard_path(path[0], s, numbered ? shards : 0, 1);
    shard_path(path[1], s, 0, 0);
    for (int i = 0; i < 2; i++) {
        const int ours = i == 1 && !numbered && shards > 0;
        if (!ours && access(path[i], F_OK) == 0) {
            die("%s is left over from an earlier run on a different text; remove it", path[i]);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Blocks

typedef struct {
    Bpe bpe;
    Tokenizer tokenizer;
    int documents, tokens;       // tokens: files contain tokens, not text
    WordTable *words;            // if not NULL, pre-tokens are counted here, not encoded
} Coder;

// Returns the first offset >= `offset` where cutting a part keeps the tokens (bpe_cut_is_safe), or,
// if there is none within CUT_BYTES, a UTF-8 character boundary.
static size_t block_begin(const Coder *coder, const Part *part, size_t offset) {
    if (offset == 0 || offset >= part->size || coder->tokens) {
        return offset < part->size ? offset : part->size;
    }
    const size_t last = offset + CUT_BYTES < part->size ? offset + CUT_BYTES : part->size;
    for (size_t i = offset; i < last; i++) {
        if (is_blank(part->bytes[i]) && bpe_cut_is_safe(part->bytes, i)) {
            return i;
        }
    }
    return last == part->size ? last : split_at(part, offset, 0);
}

// Returns an error message for bytes [begin, end) of a part, or NULL. Without --documents, prints a
// note when <|endoftext|> is first found, since it is then encoded as ordinary text.
static const char *block_problem(const Coder *coder, const Part *part, size_t begin, size_t end) {
    static int noted;
    const char *text = part->bytes + begin;
    for (size_t i = begin; coder->tokens && i < end; i += 2) {
        uint16_t token;
        memcpy(&token, part->bytes + i, 2);
        if (token >= coder->tokenizer.vocabulary) {
            return "has tokens outside the vocabulary of --tokenizer (default: GPT-2's)";
        }
    }
    if (!coder->tokens && memchr(text, 0, end - begin)) {
        return "contains NUL bytes, so it is UTF-16 or binary, not plain text";
    }
    if (!coder->tokens && !coder->documents && memmem(text, end - begin, marker, MARKER_BYTES) &&
        !__atomic_exchange_n(&noted, 1, __ATOMIC_RELAXED)) {
        printf("note: %s contains %s, which is ordinary text without --documents\n", part->name,
               marker);
    }
    return NULL;
}

// Encodes n bytes and returns the number of tokens. While counting, fills `words` and returns 0.
static int64_t coder_encode(const Coder *coder, BpeEncoder *encoder, WordTable *words,
                            const char *text, size_t n, uint16_t *tokens) {
    if (coder->words) {
        words_count(words, &coder->bpe, text, n);
        return 0;
    }
    if (coder->tokens) {
        memcpy(tokens, text, n);
        return n / 2;
    }
    if (coder->tokenizer.kind != TOKENIZER_BYTES) {
        return bpe_encode_all(encoder, text, n, 0, tokens);
    }
    for (size_t i = 0; i < n; i++) {
        tokens[i] = (unsigned char)text[i];
    }
    return n;
}

// Encodes bytes [begin, end) of a part, omitting blank documents. Returns the number of tokens.
static int64_t block_encode(const Coder *coder, BpeEncoder *encoder, WordTable *words,
                            const Part *part, size_t begin, size_t end, uint16_t *tokens) {
    const char *text = part->bytes + begin, *stop = part->bytes + end;
    int64_t count = 0;
    int starts = coder->documents && document_begins(part, begin);
    while (text) {
        const char *found =
            coder->documents ? (const char *)memmem(text, stop - text, marker, MARKER_BYTES) : NULL;
        const char *until = found ? found : stop;
        const int ends = found || (coder->documents && end == part->size);
        while (starts && text < until && is_blank(*text)) {
            text++;
        }
        while (ends && until > text && is_blank(until[-1])) {
            until--;
        }
        if (starts && text < until) {
            tokens[count++] = coder->tokenizer.end;
            starts = 0;
        }
        count += coder_encode(coder, encoder, words, text, until - text, tokens + count);
        text = found ? found + MARKER_BYTES : NULL;
        starts |= found != NULL;
    }
    return count;
}

static void corpus_encode(const Coder *coder, Sink *sink, const Corpus *text) {
    const Part *parts = text->parts;
    const int count = text->count, draws = isatty(STDOUT_FILENO);
    int64_t *first = (int64_t *)alloc_zero((size_t)count + 1, sizeof *first);
    for (int i = 0; i < count; i++) {
        first[i + 1] = first[i] + ceil_div_i64(parts[i].size, BLOCK_BYTES);
    }
    #pragma omp parallel
    {
        BpeEncoder encoder = {0};  // unused for bytes or tokens, and while counting
        size_t capacity = 0;
        uint16_t *tokens = NULL;
        int part = 0;
        if (coder->tokenizer.kind != TOKENIZER_BYTES && !coder->words && !coder->tokens) {
            bpe_encoder_open(&encoder, &coder->bpe);
        }
        #pragma omp for ordered schedule(static, 1)
        for (int64_t i = 0; i < first[count]; i++) {
            WordTable words = {0};
            while (i >= first[part + 1]) {
                part++;
            }
            const size_t offset = (size_t)(i - first[part]) * BLOCK_BYTES;
            const size_t begin = block_begin(coder, &parts[part], offset);
            const size_t end = block_begin(coder, &parts[part], offset + BLOCK_BYTES);
            int64_t n = 0;
            const char *problem = NULL;
            if (begin < end && !stop_signal) {
                if (capacity <= end - begin) {
                    capacity = end - begin + 1;
                    tokens = (uint16_t *)grow(tokens, capacity * sizeof *tokens);
                }
                problem = block_problem(coder, &parts[part], begin, end);
                n = problem ? 0
                    : block_encode(coder, &encoder, &words, &parts[part], begin, end, tokens);
            }
            #pragma omp ordered
            if (!stop_signal) {
                if (problem) {
                    die("%s %s", parts[part].name, problem);
                } else if (coder->words) {
                    words_merge(coder->words, &words);
                } else {
                    sink_append(sink, tokens, n);
                }
                if (draws && i % 16 == 0) {
                    printf("\r%3.0f %%\033[K", 100.0 * i / first[count]);
                    fflush(stdout);
                }
            }
        }
        bpe_encoder_close(&encoder);
        free(tokens);
    }
    fputs(draws ? "\r\033[K" : "", stdout);
    free(first);
}

// -------------------------------------------------------------------------------------------------
// Main

// Writes the tokenizer to PREFIX_merges.txt, PREFIX_vocab.json and PREFIX_tokenizer_config.json.
// All three are always written, so that they match.
static void tokenizer_write(const Bpe *bpe, const char *prefix) {
    static const char *const names[TOKENIZER_FILES] = {
        "merges.txt", "vocab.json", "tokenizer_config.json"};
    for (int file = 0; file < TOKENIZER_FILES; file++) {
        char path[PATH_BYTES];
        size_t size;
        path_print(path, "%s_%s", prefix, names[file]);
        char *text = tokenizer_file_text(bpe, file, 0, &size);
        const int fd = output_open(path);
        output_write(fd, text, size);
        output_close(fd);
        free(text);
    }
}

static void learn_vocabulary(Coder *coder, const Arguments *a, const Corpus *train) {
    WordTable words = {0};
    bpe_begin(&coder->bpe);
    coder->words = &words;
    corpus_encode(coder, NULL, train);
    coder->words = NULL;
    const uint32_t count = words.word_count;
    const int wanted = a->train_bpe - MIN_VOCABULARY;
    const int merges = bpe_learn(&coder->bpe, &words, wanted);
    words_free(&words);
    if (stop_signal) {
        return;
    }
    if (!bpe_number_plainly(&coder->bpe)) {
        die("--train-bpe %d: the tokens exceed %d bytes in total", a->train_bpe, BPE_TEXT);
    }
    bpe_identify(&coder->bpe, "--train-bpe");
    tokenizer_write(&coder->bpe, a->prefix);
    printf("%s_merges.txt  %s from %s%s\n", a->prefix, count_of(merges, "merge").s,
           count_of(count, "distinct pre-token").s, merges < wanted ? ", which yield no more" : "");
}

static void tokenizer_open(Coder *coder, const Arguments *a, const Corpus *train) {
    char path[PATH_BYTES];
    if (a->train_bpe) {
        learn_vocabulary(coder, a, train);
    } else if (a->bpe || (a->tokens && a->tokenizer)) {
        if (!bpe_find(path, a->tokenizer ? a->tokenizer : "", NULL)) {
            die("--bpe: data/vocab.bpe not found; run data/prepare.sh or use --tokenizer FILE");
        }
        bpe_open(&coder->bpe, path, a->tokenizer ? NULL : &gpt2_tokenizer, "--bpe");
        if (coder->bpe.tokenizer.kind == TOKENIZER_MERGES) {
            tokenizer_write(&coder->bpe, a->prefix);
        }
    }
    coder->tokenizer = a->bytes ? byte_tokenizer : coder->bpe.tokenizer;
    if (a->tokens && !a->tokenizer) {
        coder->tokenizer = gpt2_tokenizer;
    }
    if (a->documents && coder->tokenizer.end < 0) {
        die("--documents: %s has no end-of-text token", a->tokenizer);
    }
}

int main(int argc, char **argv) {
    static Coder coder;
    static Corpus texts[2];
    program_name = "tokenize";
    const Arguments a = parse_arguments(argc, argv);
    atexit(outputs_drop);
    struct sigaction action = {.sa_flags = 0};
    action.sa_handler = on_signal;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    corpus_open(texts, &a);
    coder.documents = a.documents;
    coder.tokens = a.tokens;
    Sink sinks[2] = {{.arguments = &a, .split = "train", .fd = -1},
                     {.arguments = &a, .split = "val", .fd = -1}};
    sink_check_others(&sinks[0], texts[0].size);
    sink_check_others(&sinks[1], texts[1].size);
    tokenizer_open(&coder, &a, &texts[0]);
    for (int i = 0; i < 2 && !stop_signal; i++) {
        Sink *sink = &sinks[i];
        sink->tokenizer = coder.tokenizer;
        corpus_encode(&coder, sink, &texts[i]);
        sink_finish(sink);
        if (sink->tokens == 0 && (i == 0 || a.val_fraction != 0) && !stop_signal) {
            die("%s is too short: none of its %" PRId64 " bytes are left for %s", a.files[0],
                texts[0].size + texts[1].size, i ? "validation; use --val-fraction 0 to skip it"
                                                 : "training");
        }
        sink_check_others(sink, sink->shards);
    }
    if (stop_signal) {
        fprintf(stderr, "tokenize: interrupted\n");
        return 130;
    }
    outputs_end(1);
    for (int i = 0; i < 2 && sinks[i].shards > 0; i++) {
        printf("%s%s  %s\n", sinks[i].shards > 1 ? "... " : "", sinks[i].path,
               count_of(sinks[i].tokens, "token").s);
    }
    return 0;
}
