// data/tokenize.c -- converts text of any length to token shards for train_gpt2 (data/README.md).
//
//     data/tokenize --bpe -o data/mine mine.txt              data/mine_train.bin, data/mine_val.bin
//     cat *.txt | data/tokenize --bytes --val-tokens 100000 --shard-tokens 100000000 -o data/mine -
//     data/tokenize --train-bpe 8192 -o data/mine mine.txt   learns data/mine_merges.txt first
//     data/tokenize --questions --bpe -o data/quiz quiz.csv  data/quiz.bin, for train_gpt2 --eval
//
// One thread reads blocks of text and writes their tokens in order; other threads encode the blocks
// in a ring between the two. Memory use depends on the number of threads, not on the length of the
// text. With --train-bpe the text passes through the ring twice: the first time its pre-tokens are
// counted, in a table of limited size, and the merges are learned from the counts.
//
// 1. The shards are a function of the text and the arguments; they do not depend on the number of
//    threads or on interruptions. The end of a block depends only on its start and on the text, and
//    the blocks encode to the same tokens as the whole text, except at an unsafe cut (PIECE_BYTES).
// 2. A shard has the suffix .part until it is complete.
// 3. After a finished shard, but at most once a minute, all output is synced; then the position of
//    the next shard is written to PREFIX.state, which is replaced atomically. A run with the same
//    arguments and files continues from there. The file is removed at the end.
// 4. PREFIX.lock prevents a second run with the same PREFIX. It is removed at the end.
//
// files.c and tokens.c provide the tokenizer, the shard format's constants and the error functions;
// nothing else of train_gpt2.c is needed.

#include "files.c"
#include "tokens.c"
#include <pthread.h>
#include <sched.h>
#include <sys/file.h>

enum {
    BLOCK_BYTES = 1 << 20,     // normal size of a block of text
    PIECE_BYTES = 4 << 20,     // text without a safe cut in this many bytes is cut unsafely
    REST_TOKENS = 65536,       // a remainder of at most this size is added to the last shard
    MOST_THREADS = 1024,
    SYNC_MS = 60000,           // minimum time between syncs, because shards may be small
    MOST_WORDS = 1 << 22,      // distinct pre-tokens that are counted, and their bytes in total
    MOST_WORD_BYTES = 32 << 20,
    MARKER_BYTES = 13
};
static const char marker[] = "<|endoftext|>";

static const char *const usage_text =
    "usage: data/tokenize --bpe|--bytes|--train-bpe N [options] -o PREFIX FILE...|-\n"
    "       data/tokenize --questions --bpe|--bytes [--tokenizer FILE] -o PREFIX FILE.csv...\n\n"
    "Writes the text of the FILEs (-: standard input) to shards PREFIX_train.bin and\n"
    "PREFIX_val.bin. If it is interrupted, the same command continues after the last finished\n"
    "shard.\n\n"
    "  --bpe               GPT-2's tokens, or those of --tokenizer\n"
    "  --bytes             one token per byte\n"
    "  --train-bpe N       learn a vocabulary of N tokens (257 to 65535) from the training text:\n"
    "                      256 bytes, N - 257 merges and end of text; writes PREFIX_merges.txt.\n"
    "                      Reads the FILEs twice\n"
    "  -o PREFIX           start of the names of the shards\n"
    "  --documents         every FILE, and every part between <|endoftext|> in one, is a\n"
    "                      document: an end-of-text token is written before it, and whitespace\n"
    "                      at both ends is dropped; by default the FILEs are one plain text\n"
    "  --val-fraction F    use this fraction of the text, at its end, for validation; default\n"
    "                      0.1; 0: none; with --documents it begins at the next document\n"
    "  --val-tokens N      use the first N tokens for validation instead; default for a\n"
    "                      stream: 0\n"
    "  --val-file FILE     use this text for validation instead, all others for training\n"
    "  --shard-tokens N    write shards of N tokens: PREFIX_train_000000.bin, ...; a remainder\n"
    "                      of up to 65,536 (or half a shard) is added to the last one\n"
    "  --tokenizer FILE    GPT-2's vocab.bpe, llm.c's gpt2_tokenizer.bin or a merges.txt, which\n"
    "                      is copied to PREFIX_merges.txt; default: GPT-2's in data/\n"
    "  --threads N         encoder threads; default: all cores\n"
    "  --questions         write PREFIX.bin, a file for train_gpt2 --eval: each row of the FILEs\n"
    "                      is a question, 2 to 8 answers and the letter of the right one, as in\n"
    "                      MMLU's CSV files\n";

typedef struct {
    const char **files;          // in order, --val-file last
    const char *prefix, *tokenizer, *val_file;
    int file_count, bpe, bytes, documents, questions, threads;
    int train_bpe;               // size of the vocabulary to learn; 0: none
    double val_fraction;         // negative: not given
    int64_t val_tokens;          // negative: not given
    int64_t shard_tokens;        // 0: one shard
} Arguments;

static int64_t whole_number(const char *option, const char *text, int64_t low, int64_t high) {
    char *end;
    errno = 0;
    int64_t value = strtoll(text, &end, 10);
    if (end == text || *end != 0 || errno != 0 || value < low || value > high) {
        die("%s: '%s' is not a whole number from %" PRId64 " to %" PRId64, option, text, low, high);
    }
    return value;
}

static double fraction(const char *option, const char *text) {
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end != 0 || !(value >= 0 && value < 1)) {
        die("%s: '%s' is not a number in [0, 1)", option, text);
    }
    return value;
}

// Sets one option; `value` is the next argument, or NULL. Returns the number of arguments used.
static int set_argument(Arguments *a, const char *option, const char *value) {
    int *const switches[] = {&a->bpe, &a->bytes, &a->documents, &a->questions};
    const char **const texts[] = {&a->prefix, &a->tokenizer, &a->val_file};
    static const char *const names[] = {"--bpe",       "--bytes",       "--documents",
                                        "--questions", "-o",            "--tokenizer",
                                        "--val-file",  "--threads",     "--val-fraction",
                                        "--val-tokens", "--train-bpe",  "--shard-tokens"};
    int which = 0, count = (int)(sizeof names / sizeof names[0]);
    while (which < count && strcmp(option, names[which]) != 0) {
        which++;
    }
    if (which == count || (which >= 4 && !value)) {
        die(which == count ? "unknown option '%s'; --help lists them" : "%s needs a value", option);
    }
    if (which < 4) {
        *switches[which] = 1;
        return 1;
    }
    if (which < 7) {
        *texts[which - 4] = value;
    } else if (which == 7) {
        a->threads = (int)whole_number(option, value, 1, MOST_THREADS);
    } else if (which == 8) {
        a->val_fraction = fraction(option, value);
    } else if (which == 9) {
        a->val_tokens = whole_number(option, value, 0, INT64_MAX);
    } else if (which == 10) {
        a->train_bpe = (int)whole_number(option, value, MIN_VOCABULARY, MAX_VOCABULARY);
    } else {
        a->shard_tokens = whole_number(option, value, 1, INT32_MAX - REST_TOKENS);
    }
    return 2;
}

static Arguments parse_arguments(int argc, char **argv) {
    Arguments a;
    memset(&a, 0, sizeof a);
    a.val_fraction = -1;
    a.val_tokens = -1;
    cpu_set_t cores;
    a.threads = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    a.files = (const char **)alloc_zero((size_t)argc + 1, sizeof *a.files);
    for (int i = 1; i < argc;) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            fputs(usage_text, stdout);
            exit(0);
        }
        if (argv[i][0] != '-' || argv[i][1] == 0) {
            a.files[a.file_count++] = argv[i++];
        } else {
            i += set_argument(&a, argv[i], i + 1 < argc ? argv[i + 1] : NULL);
        }
    }
    const int ways = a.bpe + a.bytes + (a.train_bpe > 0);
    if (!a.file_count || !a.prefix || ways == 0) {
        die("%s is missing; --help shows how to call it",
            ways == 0 ? (a.questions ? "--bpe or --bytes" : "--bpe, --bytes or --train-bpe")
                      : !a.prefix ? "-o PREFIX" : "the input, FILE or -,");
    }
    const char *slash = strrchr(a.prefix, '/'), *name = slash ? slash + 1 : a.prefix;
    if (name[0] == 0 || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) {
        die("-o '%s': a PREFIX ends in the start of a file's name, as in data/mine", a.prefix);
    }
    if (ways > 1) {
        die("--bpe, --bytes and --train-bpe contradict each other: give one");
    }
    if (a.tokenizer && !a.bpe) {
        die("%s and --tokenizer contradict each other: %s", a.bytes ? "--bytes" : "--train-bpe",
            a.bytes ? "bytes need no merges" : "the merges are learned from the text");
    }
    if ((a.val_fraction >= 0) + (a.val_tokens >= 0) + (a.val_file != NULL) > 1) {
        die("--val-fraction, --val-tokens and --val-file contradict each other: give one");
    }
    if (a.questions && (a.train_bpe || a.documents || a.val_fraction >= 0 || a.val_tokens >= 0 ||
                        a.val_file || a.shard_tokens)) {
        die("--questions writes one file: only --bpe, --bytes, --tokenizer and -o apply");
    }
    if (a.val_file) {
        a.files[a.file_count++] = a.val_file;
    }
    return a;
}

// -------------------------------------------------------------------------------------------------
// Input
// The concatenated files are one text. Positions are byte offsets in this text.

typedef struct {
    const char *name;
    int64_t first, end;    // range of positions; INT64_MAX for the unknown end of a stream
    int64_t time_ns;       // modification time
} Source;

typedef struct {
    Source *files;
    int count, is_stream, is_stdin, documents;
    int64_t total;         // bytes; of a stream: INT64_MAX until it has ended
    int64_t split;         // first byte of the validation part; INT64_MAX: tokens are counted
    int fd, open;          // descriptor and index of the open file; fd -1: none
    int64_t offset;        // position of the next byte to read
    char *text;            // text[from..until) was read, but is not in a block yet
    size_t from, until, capacity;
    int64_t position;      // of text[from]
    int starts_document;   // no token of the document at `position` has been written
} Input;

// Gets the size and modification time of every file; reads nothing.
static void input_open(Input *in, const Arguments *a) {
    memset(in, 0, sizeof *in);
    in->fd = -1;
    in->documents = a->documents;
    in->starts_document = a->documents;
    in->count = a->file_count;
    in->files = (Source *)alloc_zero((size_t)in->count, sizeof(Source));
    for (int i = 0; i < in->count; i++) {
        Source *file = &in->files[i];
        struct stat status;
        in->is_stdin = strcmp(a->files[i], "-") == 0;
        file->name = in->is_stdin ? "standard input" : a->files[i];
        if ((in->is_stdin ? fstat(STDIN_FILENO, &status) : stat(file->name, &status)) != 0) {
            die("cannot open %s: %s", file->name, strerror(errno));
        }
        in->is_stream = in->is_stdin || !S_ISREG(status.st_mode);
        if (in->is_stream && !in->is_stdin) {
            die("cannot read %s: %s; - reads standard input", file->name,
                S_ISDIR(status.st_mode) ? strerror(EISDIR) : "not a regular file");
        }
        if (in->is_stream && in->count > 1) {
            die("%s is a stream: it must be the only input", file->name);
        }
        file->first = in->total;
        in->total = in->is_stream ? INT64_MAX : in->total + status.st_size;
        file->end = in->total;
        file->time_ns = (int64_t)status.st_mtim.tv_sec * 1000000000 + status.st_mtim.tv_nsec;
    }
}

// Returns the index of the file that contains the byte at `offset`; the last file if `offset` is
// the end of the text.
static int input_file(const Input *in, int64_t offset) {
    int i = in->open;
    while (i > 0 && in->files[i].first > offset) {
        i--;
    }
    while (i + 1 < in->count && in->files[i].end <= offset) {
        i++;
    }
    return i;
}

// The signal that requested a stop; 0: none. The thread of main checks it while reading and between
// blocks. The handler is reset after one signal, so a second one ends the program.
static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

// Reads n bytes at in->offset, across files and short reads. Returns their number, which is less
// than n only at the end of the text and after a signal.
static size_t input_read(Input *in, char *out, size_t n) {
    size_t filled = 0;
    while (filled < n && in->offset < in->total && !stop_signal) {
        int index = input_file(in, in->offset);
        const Source *file = &in->files[index];
        if (in->fd < 0 || in->open != index) {
            if (in->fd > STDIN_FILENO) {
                close(in->fd);
            }
            in->open = index;
            int64_t size;
            in->fd = in->is_stdin ? STDIN_FILENO : file_open(file->name, &size);
            if (in->fd < 0 ||
                (!in->is_stream && lseek(in->fd, in->offset - file->first, SEEK_SET) < 0)) {
                die("cannot open %s: %s", file->name, file_error());
            }
        }
        size_t now = (size_t)min_i64((int64_t)(n - filled), file->end - in->offset);
        ssize_t got = read(in->fd, out + filled, now);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            die("cannot read %s: %s", file->name, strerror(errno));
        }
        if (got == 0 && !in->is_stream) {
            die("%s became shorter while it was read", file->name);
        }
        in->total = got == 0 ? in->offset : in->total;
        in->offset += got;
        filled += (size_t)got;
    }
    return filled;
}

static void *grow(void *memory, size_t bytes) {
    void *more = realloc(memory, bytes);
    if (!more) {
        die("out of memory: %zu bytes for a block of text", bytes);
    }
    return more;
}

// Sets the position of the next byte to read. Only for text in files, not for a stream.
static void input_seek(Input *in, int64_t offset) {
    if (in->fd > STDIN_FILENO) {
        close(in->fd);
    }
    in->fd = -1;
    in->from = in->until = 0;
    in->offset = in->position = offset;
}

// Reads until text[from..from + n) is filled or the text ends. Returns the number of bytes
// available there, at most n.
static size_t input_fill(Input *in, size_t n) {
    size_t have = in->until - in->from;
    if (have < n) {
        if (in->capacity < n) {
            in->text = (char *)grow(in->text, n);
            in->capacity = n;
        }
        memmove(in->text, in->text + in->from, have);
        in->from = 0;
        in->until = have + input_read(in, in->text + have, n - have);
        have = in->until;
    }
    return have < n ? have : n;
}

// -------------------------------------------------------------------------------------------------
// Distinct pre-tokens
// --train-bpe needs to know how often each pre-token ("word") occurs. Every block has a table of
// its own words, which are added to the table of the text in the order of the blocks, so that the
// result does not depend on the number of threads, even if the table is full.

typedef struct {
    int64_t count;
    uint32_t at, bytes;    // its bytes: text[at .. at + bytes)
    uint32_t hash;
} Word;
typedef struct {
    Word *words;           // in the order of their first occurrence
    uint32_t *slots;       // hash table: index of a word + 1; 0: free
    char *text;
    uint32_t word_count, word_capacity, slot_count;
    size_t text_bytes, text_capacity;
    int64_t dropped;       // occurrences of words that are no longer in the table
} WordTable;

static void words_free(WordTable *t) {
    free(t->words);
    free(t->slots);
    free(t->text);
    memset(t, 0, sizeof *t);
}

// Rebuilds the hash table with `slot_count` entries, a power of two.
static void words_index(WordTable *t, uint32_t slot_count) {
    if (slot_count != t->slot_count) {
        free(t->slots);
        t->slots = (uint32_t *)alloc_zero(slot_count, sizeof *t->slots);
        t->slot_count = slot_count;
    }
    memset(t->slots, 0, slot_count * sizeof *t->slots);
    for (uint32_t i = 0; i < t->word_count; i++) {
        uint32_t at = t->words[i].hash & (slot_count - 1);
        while (t->slots[at]) {
            at = (at + 1) & (slot_count - 1);
        }
        t->slots[at] = i + 1;
    }
}

// Removes all words and keeps the memory.
static void words_clear(WordTable *t) {
    t->word_count = 0;
    t->text_bytes = 0;
    words_index(t, t->slot_count ? t->slot_count : 1 << 12);
}

static uint32_t word_hash(const char *bytes, size_t n) {
    uint64_t hash = n * 0x9E3779B97F4A7C15u, piece = 0;
    for (; n >= 8; n -= 8, bytes += 8) {
        memcpy(&piece, bytes, 8);
        hash = (hash ^ piece) * 0xD6E8FEB86659FD93u;
        hash ^= hash >> 32;
    }
    piece = 0;
    memcpy(&piece, bytes, n);
    hash = (hash ^ piece) * 0xD6E8FEB86659FD93u;
    return (uint32_t)(hash >> 32);
}

// Adds `count` occurrences of the word of n bytes.
static void words_add(WordTable *t, const char *bytes, size_t n, uint32_t hash, int64_t count) {
    uint32_t at = hash & (t->slot_count - 1);
    for (; t->slots[at]; at = (at + 1) & (t->slot_count - 1)) {
        Word *w = &t->words[t->slots[at] - 1];
        if (w->hash == hash && w->bytes == n && memcmp(t->text + w->at, bytes, n) == 0) {
            w->count += count;
            return;
        }
    }
    if (t->word_count == t->word_capacity) {
        t->word_capacity = t->word_capacity ? 2 * t->word_capacity : 1 << 11;
        t->words = (Word *)grow(t->words, t->word_capacity * sizeof(Word));
    }
    if (t->text_bytes + n > t->text_capacity) {
        t->text_capacity = 2 * t->text_capacity + n;
        t->text = (char *)grow(t->text, t->text_capacity);
    }
    const Word w = {count, (uint32_t)t->text_bytes, (uint32_t)n, hash};
    memcpy(t->text + t->text_bytes, bytes, n);
    t->text_bytes += n;
    t->words[t->word_count++] = w;
    t->slots[at] = t->word_count;
    if (t->word_count > t->slot_count / 2) {
        words_index(t, 2 * t->slot_count);
    }
}

// Orders words by first occurrence; word_compare by descending count first.
static int word_compare_at(const void *a, const void *b) {
    const Word *x = (const Word *)a, *y = (const Word *)b;
    return (x->at > y->at) - (x->at < y->at);
}
static int word_compare(const void *a, const void *b) {
    const Word *x = (const Word *)a, *y = (const Word *)b;
    return x->count != y->count ? (x->count < y->count ? 1 : -1) : word_compare_at(a, b);
}

// Keeps the most frequent words, up to half of the limits.
static void words_prune(WordTable *t, uint32_t most_words, size_t most_bytes) {
    uint32_t kept = 0;
    size_t bytes = 0;
    qsort(t->words, t->word_count, sizeof(Word), word_compare);
    while (kept < t->word_count && kept < most_words / 2 &&
           bytes + t->words[kept].bytes <= most_bytes / 2) {
        bytes += t->words[kept++].bytes;
    }
    for (uint32_t i = kept; i < t->word_count; i++) {
        t->dropped += t->words[i].count;
    }
    qsort(t->words, kept, sizeof(Word), word_compare_at);
    t->word_count = kept;
    t->text_bytes = 0;
    for (uint32_t i = 0; i < kept; i++) {
        Word *w = &t->words[i];
        memmove(t->text + t->text_bytes, t->text + w->at, w->bytes);
        w->at = (uint32_t)t->text_bytes;
        t->text_bytes += w->bytes;
    }
    words_index(t, t->slot_count);
}

// Adds all words of `more` to a table, which is pruned whenever it exceeds these limits.
static void words_merge(WordTable *t, const WordTable *more, uint32_t most_words,
                        size_t most_bytes) {
    for (uint32_t i = 0; i < more->word_count; i++) {
        const Word *w = &more->words[i];
        words_add(t, more->text + w->at, w->bytes, w->hash, w->count);
        if (t->word_count > most_words || t->text_bytes > most_bytes) {
            words_prune(t, most_words, most_bytes);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Learning merges
// Byte-pair encoding: repeatedly merges the most frequent pair of adjacent tokens in the words into
// a new token. Ties go to the pair with the lower ids (left token first), as in BpeTrainer of
// Hugging Face's tokenizers, so that the merges are the same.
// 1. All words are one array of symbols, one per byte, separated by BREAK. A token of n bytes takes
//    n symbols; the first and the last hold its id, so both neighbours of a token are found from
//    its position and the lengths of tokens.
// 2. A pair stores its exact number of occurrences, including overlapping ones (aa in aaa), and an
//    ascending list of positions. A position may be outdated, but never looks valid: when a token's
//    first symbol becomes the inside of a longer token, it is overwritten.
// 3. A pair first occurs when its newer token is created; afterwards its count only decreases. So a
//    count in the heap may be too high, never too low; an entry with an outdated count is put back.

enum { BREAK = 0xFFFF, INSIDE = 0xFFFE };
typedef struct {
    uint32_t key;          // id of the left token << 16 | id of the right one
    uint32_t place_count;
    int64_t count;
    uint32_t *places;      // symbols at which the left token begins
} Pair;
typedef struct {
    int64_t count;
    uint32_t key;
} PairEntry;
typedef struct {
    uint16_t *symbols;
    uint32_t symbol_count;
    // The words are sorted by count: those that end before symbol step_end[s], and not before
    // step_end[s - 1], occur step_count[s] times. step_of[i]: step of symbol 64 i.
    uint32_t *step_end, *step_of;
    int64_t *step_count;
    Pair *pairs;
    uint32_t *slots;       // hash table: index of a pair + 1; 0: free
    uint32_t pair_count, slot_count;
    PairEntry *heap;
    size_t heap_count, heap_capacity;
    uint16_t lengths[MAX_VOCABULARY];    // bytes of each token
} Learner;

// Occurrences of a pair of the token that a merge makes and a token on its left or right.
typedef struct {
    int64_t lost, gained;  // of the pair with the old token; with the new one
    uint32_t places, filled;
    uint32_t *into;
} Neighbour;
typedef struct {
    Neighbour of[MAX_VOCABULARY + 1];
    uint16_t met[MAX_VOCABULARY];    // ids with an entry
    int count;
} Neighbours;

static Neighbour *neighbour(Neighbours *all, int id) {
    Neighbour *n = &all->of[id];
    if (!n->lost && !n->gained) {
        all->met[all->count++] = (uint16_t)id;
    }
    return n;
}

// Returns how often the word that contains this symbol occurs.
static int64_t symbol_count(const Learner *l, uint32_t at) {
    uint32_t step = l->step_of[at >> 6];
    while (l->step_end[step] <= at) {
        step++;
    }
    return l->step_count[step];
}

static uint32_t pair_slot(const Learner *l, uint32_t key) {
    uint32_t at = (uint32_t)((key * 0x9E3779B97F4A7C15u) >> 40) & (l->slot_count - 1);
    while (l->slots[at] && l->pairs[l->slots[at] - 1].key != key) {
        at = (at + 1) & (l->slot_count - 1);
    }
    return at;
}

// Returns the pair, or NULL if it does not occur.
static Pair *pair_find(const Learner *l, uint32_t key) {
    const uint32_t index = l->slots[pair_slot(l, key)];
    return index ? &l->pairs[index - 1] : NULL;
}

// Removes pairs that no longer occur and rebuilds the hash table, at most half full.
static void pairs_index(Learner *l) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < l->pair_count; i++) {
        if (l->pairs[i].count > 0) {
            l->pairs[kept++] = l->pairs[i];
        } else {
            free(l->pairs[i].places);
        }
    }
    l->pair_count = kept;
    if (kept > l->slot_count / 4) {
        l->slot_count *= 2;
        l->slots = (uint32_t *)grow(l->slots, l->slot_count * sizeof *l->slots);
        l->pairs = (Pair *)grow(l->pairs, l->slot_count / 2 * sizeof(Pair));
    }
    memset(l->slots, 0, l->slot_count * sizeof *l->slots);
    for (uint32_t i = 0; i < kept; i++) {
        l->slots[pair_slot(l, l->pairs[i].key)] = i + 1;
    }
}

// Returns whether pair `a` is merged before pair `b`.
static int entry_before(const PairEntry *a, const PairEntry *b) {
    return a->count != b->count ? a->count > b->count : a->key < b->key;
}

static void entry_push(Learner *l, PairEntry entry) {
    if (l->heap_count == l->heap_capacity) {
        l->heap_capacity = 2 * l->heap_capacity + 1024;
        l->heap = (PairEntry *)grow(l->heap, l->heap_capacity * sizeof *l->heap);
    }
    size_t at = l->heap_count++;
    for (; at > 0 && entry_before(&entry, &l->heap[(at - 1) / 2]); at = (at - 1) / 2) {
        l->heap[at] = l->heap[(at - 1) / 2];
    }
    l->heap[at] = entry;
}

static PairEntry entry_pop(Learner *l) {
    const PairEntry top = l->heap[0], last = l->heap[--l->heap_count];
    size_t at = 0, child;
    while ((child = 2 * at + 1) < l->heap_count) {
        child += child + 1 < l->heap_count && entry_before(&l->heap[child + 1], &l->heap[child]);
        if (!entry_before(&l->heap[child], &last)) {
            break;
        }
        l->heap[at] = l->heap[child];
        at = child;
    }
    l->heap[at] = last;
    return top;
}

// Adds a new pair. Returns its list of positions, which the caller fills.
static uint32_t *pair_add(Learner *l, uint32_t key, int64_t count, uint32_t places) {
    if (l->pair_count == l->slot_count / 2) {
        pairs_index(l);
    }
    const PairEntry entry = {count, key};
    const Pair pair = {key, places, count, (uint32_t *)grow(NULL, places * sizeof(uint32_t))};
    l->slots[pair_slot(l, key)] = ++l->pair_count;
    l->pairs[l->pair_count - 1] = pair;
    entry_push(l, entry);
    return pair.places;
}

// Adds all pairs of bytes.
static void learner_add_pairs(Learner *l, const uint16_t *symbols) {
    Neighbour *pairs = (Neighbour *)alloc_zero(256 * 256, sizeof *pairs);
    for (int fill = 0; fill < 2; fill++) {
        for (uint32_t at = 1; at + 1 < l->symbol_count; at++) {
            if (symbols[at] != BREAK && symbols[at + 1] != BREAK) {
                Neighbour *n = &pairs[symbols[at] << 8 | symbols[at + 1]];
                if (fill) {
                    n->into[n->filled++] = at;
                } else {
                    n->gained += symbol_count(l, at);
                    n->places++;
                }
            }
        }
        for (uint32_t i = 0; i < 256 * 256 && !fill; i++) {
            if (pairs[i].places) {
                const uint32_t key = i >> 8 << 16 | (i & 255);
                pairs[i].into = pair_add(l, key, pairs[i].gained, pairs[i].places);
            }
        }
    }
    free(pairs);
}

// Builds the array of symbols and all pairs of bytes. Sorts the words.
static void learner_open(Learner *l, const Bpe *bpe, WordTable *t) {
    uint32_t steps = 0, at = 1;
    qsort(t->words, t->word_count, sizeof(Word), word_compare);
    const size_t symbols = 2 + t->text_bytes + t->word_count;
    l->symbols = (uint16_t *)grow(NULL, symbols * sizeof(uint16_t));
    l->step_of = (uint32_t *)alloc_zero(symbols / 64 + 1, sizeof(uint32_t));
    l->step_end = (uint32_t *)alloc_zero((size_t)t->word_count + 1, sizeof(uint32_t));
    l->step_count = (int64_t *)alloc_zero((size_t)t->word_count + 1, sizeof(int64_t));
    l->symbols[0] = BREAK;
    for (uint32_t i = 0; i < t->word_count; i++) {
        const Word *w = &t->words[i];
        for (uint32_t k = 0; k < w->bytes; k++) {
            l->symbols[at++] = (uint16_t)bpe_id(bpe, t->text + w->at + k, 1);
        }
        l->symbols[at++] = BREAK;
        steps += steps == 0 || l->step_count[steps - 1] != w->count;
        l->step_count[steps - 1] = w->count;
        l->step_end[steps - 1] = at;
    }
    l->symbol_count = at;
    for (uint32_t i = 0, step = 0; i < at / 64 + 1 && steps; i++) {
        while (step + 1 < steps && l->step_end[step] <= 64 * i) {
            step++;
        }
        l->step_of[i] = step;
    }
    for (int id = 0; id < 256; id++) {
        l->lengths[id] = 1;
    }
    l->slot_count = 1 << 18;
    l->slots = (uint32_t *)alloc_zero(l->slot_count, sizeof(uint32_t));
    l->pairs = (Pair *)grow(NULL, l->slot_count / 2 * sizeof(Pair));
    learner_add_pairs(l, l->symbols);
}

static void learner_close(Learner *l) {
    for (uint32_t i = 0; i < l->pair_count; i++) {
        free(l->pairs[i].places);
    }
    free(l->symbols);
    free(l->step_end);
    free(l->step_of);
    free(l->step_count);
    free(l->pairs);
    free(l->slots);
    free(l->heap);
}

// Returns the most frequent pair and removes it from the heap, or NULL if no pair occurs.
static Pair *learner_best(Learner *l) {
    while (l->heap_count > 0) {
        PairEntry entry = entry_pop(l);
        Pair *pair = pair_find(l, entry.key);
        if (pair && pair->count == entry.count && pair->count > 0) {
            return pair;
        }
        if (pair && pair->count > 0) {
            entry.count = pair->count;
            entry_push(l, entry);
        }
    }
    return NULL;
}

// Replaces every occurrence of a pair by the token `id`, and counts the pairs with its neighbours
// that this removes. Keeps the places of the new token in pair->places. Returns their number.
static uint32_t learner_replace(Learner *l, Pair *pair, int id, Neighbours *left,
                                Neighbours *right) {
    uint16_t *s = l->symbols;
    const int a = (int)(pair->key >> 16), b = (int)(pair->key & 0xFFFF);
    const uint32_t a_bytes = l->lengths[a], b_bytes = l->lengths[b];
    uint32_t count = 0;
    for (uint32_t i = 0; i < pair->place_count; i++) {
        const uint32_t at = pair->places[i], second = at + a_bytes, after = second + b_bytes;
        if (s[at] != a || s[second] != b) {
            continue;
        }
        const int64_t times = symbol_count(l, at);
        if (s[at - 1] != BREAK) {
            neighbour(left, s[at - 1])->lost += times;
        }
        if (s[after] != BREAK) {
            neighbour(right, s[after])->lost += times;
        }
        s[second] = INSIDE;
        s[at] = s[after - 1] = (uint16_t)id;
        pair->places[count++] = at;
    }
    return count;
}

// Counts the pairs that the token `id` at `places` forms with its neighbours; with `fill`, fills in
// their places. A pair of two such tokens counts as one of its left token.
static void learner_count(const Learner *l, const uint32_t *places, uint32_t count, int id,
                          Neighbours *left, Neighbours *right, int fill) {
    const uint16_t *s = l->symbols;
    const uint32_t bytes = l->lengths[id];
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t at = places[i];
        const int ids[2] = {s[at - 1] == id ? (int)BREAK : s[at - 1], s[at + bytes]};
        for (int side = 0; side < 2; side++) {
            if (ids[side] == BREAK || l->lengths[ids[side]] + bytes > BPE_LONGEST) {
                continue;
            }
            Neighbour *n = side ? &right->of[ids[side]] : &left->of[ids[side]];
            if (fill) {
                n->into[n->filled++] = side ? at : at - l->lengths[ids[side]];
            } else {
                neighbour(side ? right : left, ids[side])->gained += symbol_count(l, at);
                n->places++;
            }
        }
    }
}

// Subtracts `lost` occurrences of a pair; frees its list of positions when none is left.
static void pair_lose(const Learner *l, uint32_t key, int64_t lost) {
    Pair *pair = lost ? pair_find(l, key) : NULL;
    if (pair) {
        pair->count -= lost;
        if (pair->count <= 0) {
            free(pair->places);
            pair->places = NULL;
        }
    }
}

// Merges a pair into the token `id`.
static void learner_merge(Learner *l, Pair *pair, int id, Neighbours *left, Neighbours *right) {
    const uint32_t a = pair->key >> 16, b = pair->key & 0xFFFF;
    const uint32_t count = learner_replace(l, pair, id, left, right);
    uint32_t *places = pair->places;
    pair->places = NULL;
    pair->count = 0;
    learner_count(l, places, count, id, left, right, 0);
    for (int side = 0; side < 2; side++) {
        Neighbours *all = side ? right : left;
        for (int i = 0; i < all->count; i++) {
            const uint32_t other = all->met[i];
            Neighbour *n = &all->of[other];
            pair_lose(l, side ? b << 16 | other : other << 16 | a, n->lost);
            if (n->places) {
                const uint32_t key = side ? (uint32_t)id << 16 | other : other << 16 | (uint32_t)id;
                n->into = pair_add(l, key, n->gained, n->places);
            }
        }
    }
    learner_count(l, places, count, id, left, right, 1);
    for (int side = 0; side < 2; side++) {
        Neighbours *all = side ? right : left;
        for (; all->count > 0; all->count--) {
            memset(&all->of[all->met[all->count - 1]], 0, sizeof(Neighbour));
        }
    }
    free(places);
}

// Learns `merges` merges from the words of a text and adds them to a vocabulary of the 256 bytes.
// Returns their number, which is lower if no pair is left or after a signal.
static int bpe_learn(Bpe *bpe, WordTable *words, int merges) {
    Learner *l = (Learner *)alloc_zero(1, sizeof *l);
    Neighbours *sides = (Neighbours *)alloc_zero(2, sizeof *sides);
    int done = 0;
    Pair *pair;
    learner_open(l, bpe, words);
    for (; done < merges && !stop_signal && (pair = learner_best(l)) != NULL; done++) {
        char both[BPE_LONGEST];
        const char *bytes;
        size_t n = 0;
        for (int side = 0; side < 2; side++) {
            const int part = (int)(side ? pair->key & 0xFFFF : pair->key >> 16);
            const size_t length = (size_t)bpe_bytes(bpe, part, &bytes);
            memcpy(both + n, bytes, length);
            n += length;
        }
        const int id = bpe->count;
        if (!bpe_add(bpe, both, n)) {
            die("--train-bpe: the first %d merges make tokens of %u bytes in total; at most %d fit",
                done, bpe->start[id], BPE_TEXT);
        }
        l->lengths[id] = (uint16_t)n;
        learner_merge(l, pair, id, &sides[0], &sides[1]);
    }
    learner_close(l);
    free(l);
    free(sides);
    return done;
}

// -------------------------------------------------------------------------------------------------
// Blocks
// Cuts the text into blocks and encodes them.

typedef struct {
    int64_t position;      // of its first byte
    char *text;
    uint16_t *tokens;
    size_t size, capacity;     // bytes of text; `tokens` has space for capacity + 1
    int64_t count;         // number of tokens
    WordTable words;       // instead of tokens, if they are counted
    int starts_document, ends_document;
    int done;              // 1: encoded
} Block;

typedef struct {
    Bpe bpe;
    Tokenizer tokenizer;
    int documents;
    int counts;            // 1: pre-tokens are counted, for a vocabulary that is not known yet
} Coder;

static int is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// Returns the length of the longest proper prefix of a marker that text[0..n) ends with; 0: none.
static size_t marker_begun(const char *text, size_t n) {
    for (size_t k = n < MARKER_BYTES - 1 ? n : MARKER_BYTES - 1; k > 0; k--) {
        if (memcmp(text + n - k, marker, k) == 0) {
            return k;
        }
    }
    return 0;
}

// Returns the last offset in text[0..n] at which a cut does not change the tokens; 0: none.
static size_t token_cut(const Coder *coder, const char *text, size_t n) {
    return coder->tokenizer.kind == TOKENIZER_BYTES ? n : bpe_cut(text, n);
}

// Returns the size of the next block of text[0..n), which is not the end of the text; 0 if no cut
// is safe. With --documents it cuts after the last marker. If there is no marker, the text after
// the cut must certainly belong to the same document: blanks alone do not, since the document may
// end with them, nor does the possible beginning of a marker.
static size_t block_cut(const Coder *coder, const char *text, size_t n) {
    if (!coder->documents) {
        return token_cut(coder, text, n);
    }
    for (size_t i = n; i >= MARKER_BYTES; i--) {
        if (text[i - 1] == '>' && memcmp(text + i - MARKER_BYTES, marker, MARKER_BYTES) == 0) {
            return i;
        }
    }
    size_t end = n - marker_begun(text, n), place = end;
    while ((place = token_cut(coder, text, place)) > 0) {
        size_t after = place;
        while (after < end && is_blank(text[after])) {
            after++;
        }
        if (after < end) {
            return place;
        }
        for (place--; place > 0 && is_blank(text[place]);) {
            place--;
        }
    }
    return 0;
}

// Returns an offset between two UTF-8 characters, for a text that has no safe cut in n bytes.
static size_t unsafe_cut(const Coder *coder, const char *text, size_t n) {
    size_t place = n - 1 - (coder->documents ? marker_begun(text, n) : 0);
    for (int back = 0; back < 3 && ((unsigned char)text[place] & 0xC0) == 0x80; back++) {
        place--;
    }
    return place;
}

static void count_text_words(const Bpe *bpe, WordTable *words, const char *text, size_t n) {
    const unsigned char *p = (const unsigned char *)text, *end = p + n;
    for (const unsigned char *next; p < end; p = next) {
        next = pretoken_end(bpe, p, end);
        const size_t length = (size_t)(next - p);
        words_add(words, (const char *)p, length, word_hash((const char *)p, length), 1);
    }
}

// Encodes n bytes to at most n tokens. Returns their number.
static int64_t coder_encode(const Coder *coder, BpeEncoder *encoder, const char *text, size_t n,
                            uint16_t *tokens) {
    if (coder->tokenizer.kind != TOKENIZER_BYTES) {
        return bpe_encode(encoder, text, n, tokens);
    }
    for (size_t i = 0; i < n; i++) {
        tokens[i] = (unsigned char)text[i];
    }
    return (int64_t)n;
}

// Adds the tokens, or pre-tokens, of a part of a document or of plain text to a block.
static void encode_text(const Coder *coder, BpeEncoder *encoder, Block *b, const char *text,
                        size_t n) {
    if (coder->counts) {
        count_text_words(&coder->bpe, &b->words, text, n);
    } else {
        b->count += coder_encode(coder, encoder, text, n, b->tokens + b->count);
    }
}

// Encodes a block. Documents that contain only blanks are dropped.
static void block_encode(const Coder *coder, BpeEncoder *encoder, Block *b) {
    const char *text = b->text, *end = b->text + b->size;
    int starts = b->starts_document;
    b->count = 0;
    if (coder->counts) {
        words_clear(&b->words);
    }
    while (text) {
        const char *found = NULL, *until = end;
        if (coder->documents) {
            found = (const char *)memmem(text, (size_t)(end - text), marker, MARKER_BYTES);
            until = found ? found : end;
        }
        while (starts && text < until && is_blank(*text)) {
            text++;
        }
        while ((found || b->ends_document) && until > text && is_blank(until[-1])) {
            until--;
        }
        if (starts && text < until) {
            b->tokens[b->count++] = (uint16_t)end_of_text(&coder->tokenizer);
        }
        encode_text(coder, encoder, b, text, (size_t)(until - text));
        text = found ? found + MARKER_BYTES : NULL;
        starts = 1;
    }
}

// -------------------------------------------------------------------------------------------------
// Shards
// There is one sink for training and one for validation. A sink has an open shard, and counts what
// was written before it.

// A position between the tokens of the text: after `skip` tokens of the block at `position`.
typedef struct {
    int64_t position, skip;
    int starts_document;
} Place;

typedef struct {
    const Arguments *arguments;
    const char *split;
    char path[PATH_BYTES], part[PATH_BYTES];
    Tokenizer tokenizer;
    int fd;                      // descriptor of `part`; -1: no shard is open
    int64_t finished, finished_tokens;    // complete shards, and the tokens in them
    int64_t shard_tokens, tokens;         // tokens in the open shard, and in all shards
    Place full;                  // the end of the open shard, once it is full
    int64_t held_count;          // tokens after a full shard: of the next one, or its remainder
    uint16_t held[REST_TOKENS];
    Sha256 sha;                  // of the tokens in the open shard
} Sink;

static Sink train = {NULL, "train", "", "", {0, 0, 0}, -1, 0, 0, 0, 0, {0, 0, 0}, 0, {0},
                     {{0}, 0, {0}}};
static Sink val = {NULL, "val", "", "", {0, 0, 0}, -1, 0, 0, 0, 0, {0, 0, 0}, 0, {0},
                   {{0}, 0, {0}}};

// Writes the path of the shard with this index; with `numbered` (--shard-tokens), the path contains
// the index.
static void shard_path(char *path, const Sink *s, int64_t index, int numbered) {
    if (numbered) {
        path_print(path, "%s_%s_%06" PRId64 ".bin", s->arguments->prefix, s->split, index);
    } else {
        path_print(path, "%s_%s.bin", s->arguments->prefix, s->split);
    }
}

// The lock file PREFIX.lock.
static struct {
    int fd;  // -1: not held
    char path[PATH_BYTES];
} lock = {-1, ""};

// Creates and locks the file. Another run may remove it after it was opened here and before it is
// locked; a lock on a removed file would not exclude other runs. Hence the inode is compared with
// that of the name.
static void lock_prefix(const char *prefix) {
    struct stat ours, named;
    path_print(lock.path, "%s.lock", prefix);
    int fd = open(lock.path, O_RDWR | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0644);
    if (fd < 0) {
        die("cannot create %s: %s", lock.path, strerror(errno));
    }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 || fstat(fd, &ours) != 0 ||
        stat(lock.path, &named) != 0 || ours.st_ino != named.st_ino) {
        die("-o %s: another run of tokenize writes there (%s is locked)", prefix, lock.path);
    }
    lock.fd = fd;
}

// Syncs everything written so far, so that it survives a power failure. One call is enough for all
// shards since the last sync, because they are on one file system.
static void sync_shards(void) {
    if (syncfs(lock.fd) != 0) {
        die("cannot sync the shards of %s: %s", train.arguments->prefix, strerror(errno));
    }
}

// Removes unfinished shards and the lock file. Called at exit, also after an error.
static void sinks_drop(void) {
    Sink *const sinks[2] = {&train, &val};
    if (lock.fd >= 0) {
        unlink(lock.path);
    }
    for (int i = 0; i < 2; i++) {
        if (sinks[i]->fd >= 0) {
            unlink(sinks[i]->part);
            sinks[i]->fd = -1;
        }
    }
}

static void sink_write(Sink *s, const void *data, size_t bytes) {
    if (write_all(s->fd, data, bytes) != 0) {
        die("cannot write %s: %s", s->part, strerror(errno));
    }
}

static void sink_open(Sink *s) {
    const int32_t header[LLMC_HEADER_BYTES / 4] = {0};  // not a token file until sink_finish
    shard_path(s->path, s, s->finished, s->arguments->shard_tokens > 0);
    path_print(s->part, "%s.part", s->path);
    s->fd = open(s->part, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (s->fd < 0) {
        die("cannot create %s: %s", s->part, strerror(errno));
    }
    s->shard_tokens = 0;
    sha256_start(&s->sha);
    sink_write(s, header, sizeof header);
}

static void sink_finish(Sink *s) {
    if (s->fd < 0) {
        return;
    }
    const Tokenizer *t = &s->tokenizer;
    char hash[SHA256_TEXT];
    int32_t header[LLMC_HEADER_BYTES / 4] = {
        llmc_files[LLMC_TOKENS].magic, 1, (int32_t)s->shard_tokens, t->vocabulary, t->kind,
        (int32_t)__builtin_bswap32((uint32_t)(t->hash >> 32)),
        (int32_t)__builtin_bswap32((uint32_t)t->hash)};
    shard_seal(&s->sha, header, hash);
    if (lseek(s->fd, 0, SEEK_SET) != 0) {
        die("cannot rewind %s: %s", s->part, strerror(errno));
    }
    sink_write(s, header, sizeof header);
    if (close(s->fd) != 0 || rename(s->part, s->path) != 0) {
        die("cannot finish %s: %s", s->path, strerror(errno));
    }
    s->fd = -1;
    s->finished++;
    s->finished_tokens += s->shard_tokens;
}

static void sink_add(Sink *s, const uint16_t *tokens, int64_t count) {
    sink_write(s, tokens, (size_t)count * sizeof *tokens);
    sha256_add(&s->sha, tokens, (size_t)count * sizeof *tokens);
    s->shard_tokens += count;
}

// Returns the largest remainder that is added to a full shard instead of becoming a shard of its
// own.
static int64_t rest_tokens(const Arguments *a) { return min_i64(REST_TOKENS, a->shard_tokens / 2); }

// Finishes the last shard of a sink, to which it adds the held tokens.
static void sink_close(Sink *s) {
    if (s->fd >= 0) {
        sink_add(s, s->held, s->held_count);
        s->held_count = 0;
        sink_finish(s);
    }
}

// Appends tokens to as many shards as they fill; `from` is the place of the first token. A shard is
// created with its first token, so none is empty. Returns 1 if a shard was finished; an interrupted
// run then continues at *place.
static int sink_append(Sink *s, Place *place, Place from, const uint16_t *tokens, int64_t count) {
    int64_t numbered = s->arguments->shard_tokens, most = numbered ? numbered : INT32_MAX;
    int finished = 0;
    s->tokens += count;
    while (count > 0) {
        if (s->fd < 0) {
            sink_open(s);
        }
        int64_t now = min_i64(count, most - s->shard_tokens);
        if (now == 0 && !numbered) {
            die("%s: one shard holds %d tokens at most: give --shard-tokens", s->path, INT32_MAX);
        }
        if (now > 0) {
            sink_add(s, tokens, now);
        } else if (s->held_count < rest_tokens(s->arguments)) {
            now = min_i64(count, rest_tokens(s->arguments) - s->held_count);
            memcpy(s->held + s->held_count, tokens, (size_t)now * sizeof *tokens);
            s->held_count += now;
        } else {
            sink_finish(s);
            finished = 1;
            *place = s->full;
            sink_open(s);
            sink_add(s, s->held, s->held_count);
            s->held_count = 0;
        }
        tokens += now;
        count -= now;
        from.skip += now;
        if (s->shard_tokens == most && s->held_count == 0) {
            s->full = from;
        }
    }
    return finished;
}

// Ends the run if shards of an earlier run with more shards or other names are left, because the
// same glob pattern would read them too.
static void refuse_leftovers(const Sink *s) {
    int numbered = s->arguments->shard_tokens > 0;
    char path[2][PATH_BYTES];
    shard_path(path[0], s, numbered ? s->finished : 0, 1);
    shard_path(path[1], s, 0, 0);
    for (int i = 0; i < 2; i++) {
        int ours = i == 1 && !numbered && s->finished > 0;
        if (!ours && access(path[i], F_OK) == 0) {
            die("%s is left from an earlier run on another text: remove it", path[i]);
        }
    }
}

static void sink_report(const Sink *s) {
    char path[PATH_BYTES];
    if (s->finished > 0) {
        shard_path(path, s, s->finished - 1, s->arguments->shard_tokens > 0);
        printf("%s%s  %s tokens\n", s->finished > 1 ? "... " : "", path,
               count_text(s->tokens).s);
    }
}

// -------------------------------------------------------------------------------------------------
// State of an interrupted run
// A small text file with a fixed sequence of lines, PREFIX.state.

typedef struct {
    uint64_t arguments, input;   // hashes, which must be equal to continue
    Place place;                 // start of the next shard
    int64_t finished[2], tokens[2];    // finished shards of train and val, and tokens in them
} State;

static const char state_format[] = "data/tokenize was interrupted\n"
                                   "arguments %" PRIx64 " input %" PRIx64 "\n"
                                   "next %" PRId64 " %" PRId64 " %d\n"
                                   "train %" PRId64 " %" PRId64 " val %" PRId64 " %" PRId64 "\n";

__attribute__((format(printf, 2, 3))) static uint64_t hash_line(uint64_t hash, const char *format,
                                                                ...) {
    char line[PATH_BYTES + 128];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    return fnv1a(hash, line, strlen(line));
}

// Returns the initial state of this run. The path of the vocabulary is not part of the hash: it is
// either GPT-2's vocabulary or identified by the hash of its merges.
static State state_new(const Arguments *a, const Input *in, const Tokenizer *t) {
    State state;
    memset(&state, 0, sizeof state);
    state.input = fnv1a_start;
    state.arguments = hash_line(fnv1a_start, "%d %d %a %" PRId64 " %d %" PRId64, a->bpe,
                                a->documents, a->val_fraction, a->val_tokens, a->val_file != NULL,
                                a->shard_tokens);
    if (t->kind == TOKENIZER_MERGES) {
        state.arguments = hash_line(state.arguments, "%d %" PRIx64, t->vocabulary, t->hash);
    }
    for (int i = 0; i < in->count; i++) {
        state.input = hash_line(state.input, "%s %" PRId64 " %" PRId64, in->files[i].name,
                                in->files[i].end, in->files[i].time_ns);
    }
    return state;
}

static void state_write(const State *s, const char *path) {
    char part[PATH_BYTES];
    path_print(part, "%s.part", path);
    FILE *f = fopen(part, "w");
    if (!f) {
        die("cannot create %s: %s", part, strerror(errno));
    }
    fprintf(f, state_format, s->arguments, s->input, s->place.position, s->place.skip,
            s->place.starts_document, s->finished[0], s->tokens[0], s->finished[1], s->tokens[1]);
    int bad = fflush(f) != 0 || fsync(fileno(f)) != 0;
    if (fclose(f) != 0 || bad || rename(part, path) != 0) {
        int error = errno;
        unlink(part);
        die("cannot write %s: %s", path, strerror(error));
    }
}

// Returns whether all finished shards of a sink exist, with the expected number of tokens in total.
static int sink_verify(const Sink *s) {
    char path[PATH_BYTES];
    int64_t tokens = 0;
    for (int64_t i = 0; i < s->finished; i++) {
        struct stat status;
        shard_path(path, s, i, s->arguments->shard_tokens > 0);
        if (stat(path, &status) != 0 || status.st_size < LLMC_HEADER_BYTES) {
            return 0;
        }
        tokens += (status.st_size - LLMC_HEADER_BYTES) / 2;
    }
    return tokens == s->finished_tokens;
}

// Continues an interrupted run: reads its state into *state and both sinks. On entry *state has the
// hashes of this run, which must match. Returns 0 if there is no state file.
static int state_read(State *state, const Input *in, const char *path) {
    State s;
    Mapping file;
    char text[512] = "", again[512];
    if (mapping_open(&file, path) != 0) {
        if (errno == ENOENT) {
            return 0;
        }
        die("cannot read %s: %s", path, file_error());
    }
    memcpy(text, file.bytes, file.size < sizeof text ? file.size : sizeof text - 1);
    mapping_close(&file);
    memset(&s, 0, sizeof s);
    sscanf(text, "%*[^\n]\narguments %" SCNx64 " input %" SCNx64 "\nnext %" SCNd64 " %" SCNd64
           " %d\ntrain %" SCNd64 " %" SCNd64 " val %" SCNd64 " %" SCNd64,
           &s.arguments, &s.input, &s.place.position, &s.place.skip, &s.place.starts_document,
           &s.finished[0], &s.tokens[0], &s.finished[1], &s.tokens[1]);
    snprintf(again, sizeof again, state_format, s.arguments, s.input, s.place.position,
             s.place.skip, s.place.starts_document, s.finished[0], s.tokens[0], s.finished[1],
             s.tokens[1]);
    const char *why = strcmp(again, text) != 0          ? "is not a state of tokenize"
                      : s.arguments != state->arguments ? "is of a run with other arguments"
                      : s.input != state->input ? "is of a run with other or changed input"
                                                : NULL;
    if (!why && (s.place.position < 0 || s.place.position > in->total || s.place.skip < 0)) {
        why = "is damaged";
    }
    Sink *const sinks[2] = {&train, &val};
    for (int i = 0; i < 2; i++) {
        sinks[i]->finished = s.finished[i];
        sinks[i]->finished_tokens = sinks[i]->tokens = s.tokens[i];
        why = why || sink_verify(sinks[i]) ? why : "counts finished shards that do not exist";
    }
    if (why) {
        die("%s %s: remove it to start over", path, why);
    }
    *state = s;
    return 1;
}

// -------------------------------------------------------------------------------------------------
// The run
// Block i uses slot i % slots of the ring. Blocks are read, taken by encoder threads, and written,
// each in order. The thread of main reads and writes.

typedef struct {
    Arguments a;
    Input in;
    Coder coder;
    State state;
    char state_path[PATH_BYTES], merges_path[PATH_BYTES];
    WordTable words;             // of the text, while they are counted
    Sink *sinks[2];              // in the order of the text
    int64_t first_tokens;        // for the first sink; INT64_MAX: all before `in.split`
    int64_t skip;                // tokens of the next block that are in finished shards
    Block *blocks;
    int slots;
    int64_t read, taken, written;
    int ended;                   // 1: no more blocks will be read
    pthread_mutex_t lock;        // protects `read`, `taken`, `ended` and Block.done
    pthread_cond_t work, done;
    int live;                    // stdout is a terminal
    int warned;                  // 1: has warned that the input does not look like text
    double began_ms, drawn_ms, synced_ms;
    int unsaved;                 // 1: PREFIX.state does not count all finished shards
    int64_t began;               // position at which this run began
} Job;

static void *encode_blocks(void *argument) {
    Job *job = (Job *)argument;
    BpeEncoder encoder;  // empty for bytes and while counting
    memset(&encoder, 0, sizeof encoder);
    if (job->coder.tokenizer.kind != TOKENIZER_BYTES && !job->coder.counts) {
        bpe_encoder_open(&encoder, &job->coder.bpe);
    }
    pthread_mutex_lock(&job->lock);
    for (;;) {
        while (job->taken == job->read && !job->ended) {
            pthread_cond_wait(&job->work, &job->lock);
        }
        if (job->taken == job->read) {
            break;
        }
        Block *b = &job->blocks[job->taken++ % job->slots];
        pthread_mutex_unlock(&job->lock);
        block_encode(&job->coder, &encoder, b);
        pthread_mutex_lock(&job->lock);
        b->done = 1;
        pthread_cond_signal(&job->done);
    }
    pthread_mutex_unlock(&job->lock);
    bpe_encoder_close(&encoder);
    return NULL;
}

// Prints "[######          ]  38 %  812.1 MiB of 2.08 GiB  41.3 MB/s  0:32 left", at most four
// times a second.
static void draw_progress(Job *job, int64_t position) {
    double now = now_ms(), seconds = (now - job->began_ms) * 1e-3;
    if (!job->live || now < job->drawn_ms + 250) {
        return;
    }
    job->drawn_ms = now;
    char bar[33];
    double rate = (double)(position - job->began) / (seconds > 0 ? seconds : 1);
    ShortText done = bytes_text((double)position);
    if (job->in.is_stream) {
        printf("\r%s  %.1f MB/s\033[K", done.s, rate * 1e-6);
    } else {
        double part = (double)position / (double)job->in.total;
        memset(bar, ' ', 32);
        memset(bar, '#', (size_t)(part * 32));
        bar[32] = 0;
        printf("\r[%s] %3.0f %%  %s of %s  %.1f MB/s  %s left\033[K", bar, part * 100, done.s,
               bytes_text((double)job->in.total).s, rate * 1e-6,
               duration_text((double)(job->in.total - position) / (rate > 0 ? rate : 1)).s);
    }
    fflush(stdout);
}

// Syncs the shards and writes the state file if there is a newly finished shard and SYNC_MS have
// passed since the last time; with `now` without waiting for SYNC_MS.
static void save_state(Job *job, int now) {
    if (!job->unsaved || (!now && now_ms() < job->synced_ms + SYNC_MS)) {
        return;
    }
    sync_shards();
    state_write(&job->state, job->state_path);
    job->synced_ms = now_ms();
    job->unsaved = 0;
}

// Writes the tokens of a block, or adds its pre-tokens to those of the text. If a shard was
// finished, records where a later run continues.
static void block_write(Job *job, const Block *b) {
    Sink **sinks = job->sinks;
    if (job->coder.counts) {
        words_merge(&job->words, &b->words, MOST_WORDS, MOST_WORD_BYTES);
        draw_progress(job, b->position + (int64_t)b->size);
        return;
    }
    Place from = {b->position, min_i64(job->skip, b->count), b->starts_document}, place = from;
    int64_t rest = b->count - from.skip, finished = 0;
    int64_t first = job->first_tokens < INT64_MAX
                        ? min_i64(rest, max_i64(job->first_tokens - sinks[0]->tokens, 0))
                        : b->position < job->in.split ? rest : 0;
    job->skip -= from.skip;
    const uint16_t *tokens = b->tokens + from.skip;
    finished = sink_append(sinks[0], &place, from, tokens, first);
    if (first < rest) {
        from.skip += first;
        if (sinks[0]->fd >= 0) {
            sink_close(sinks[0]);
            finished = 1;
            place = from;
        }
        finished |= sink_append(sinks[1], &place, from, tokens + first, rest - first);
    }
    if (finished && !job->in.is_stream) {
        job->state.place = place;
        for (int i = 0; i < 2; i++) {
            job->state.finished[i] = (i == 0 ? &train : &val)->finished;
            job->state.tokens[i] = (i == 0 ? &train : &val)->finished_tokens;
        }
        job->unsaved = 1;
        save_state(job, 0);
    }
    draw_progress(job, b->position + (int64_t)b->size);
}

static void block_free(Block *b) {
    free(b->text);
    free(b->tokens);
    words_free(&b->words);
    memset(b, 0, sizeof *b);
}

// Writes the next block of the ring if it is encoded; with `wait`, waits until it is. Returns 1 if
// a block was written.
static int write_next(Job *job, int wait) {
    Block *b = &job->blocks[job->written % job->slots];
    pthread_mutex_lock(&job->lock);
    while (wait && !b->done) {
        pthread_cond_wait(&job->done, &job->lock);
    }
    int done = job->written < job->read && b->done;
    pthread_mutex_unlock(&job->lock);
    if (done) {
        block_write(job, b);
        b->done = 0;
        job->written++;
        if (b->capacity > BLOCK_BYTES) {
            block_free(b);
        }
    }
    return done;
}

// Reads the next block of text. Returns 0 at the end of the text and after a signal. A block larger
// than BLOCK_BYTES gets the ring to itself, which bounds memory.
static int read_block(Job *job, Block *b) {
    Input *in = &job->in;
    size_t window = BLOCK_BYTES, have, size;
    int ends;
    for (;;) {
        int64_t border = in->position < in->split ? min_i64(in->split, in->total) : in->total;
        if (in->documents) {
            border = min_i64(border, in->files[input_file(in, in->position)].end);
        }
        if (job->coder.counts && in->position >= in->split) {
            return 0;  // merges are learned from the training part only
        }
        size_t wanted = (size_t)min_i64((int64_t)window, border - in->position);
        have = input_fill(in, wanted);
        if (have == 0 || stop_signal) {
            return 0;
        }
        const char *text = in->text + in->from;
        ends = in->position + (int64_t)have == border || have < wanted;
        size = ends ? have : block_cut(&job->coder, text, have);
        if (size == 0 && window == PIECE_BYTES) {
            size = unsafe_cut(&job->coder, text, have);
        }
        if (size > 0) {
            break;
        }
        while (job->written < job->read) {
            write_next(job, 1);
        }
        window *= 2;
    }
    if (b->capacity < size) {
        b->capacity = size < BLOCK_BYTES ? (size_t)BLOCK_BYTES : size;
        b->text = (char *)grow(b->text, b->capacity);
        b->tokens = (uint16_t *)grow(b->tokens, (b->capacity + 1) * sizeof *b->tokens);
    }
    memcpy(b->text, in->text + in->from, size);
    if (job->a.bytes && !job->warned && memchr(b->text, 0, size)) {
        fprintf(stderr, "tokenize: %s contains zero bytes: is it text? --bytes encodes any file\n",
                in->files[input_file(in, in->position)].name);
        job->warned = 1;
    }
    b->size = size;
    b->position = in->position;
    b->starts_document = in->starts_document;
    b->ends_document = in->documents &&
                       (ends || (size >= MARKER_BYTES &&
                                 memcmp(b->text + size - MARKER_BYTES, marker, MARKER_BYTES) == 0));
    size_t blanks = 0;
    while (in->starts_document && blanks < size && is_blank(b->text[blanks])) {
        blanks++;
    }
    in->starts_document = b->ends_document || (in->starts_document && blanks == size);
    in->from += size;
    in->position += (int64_t)size;
    return 1;
}

// Reads, encodes and writes the whole text, or the part before a signal; or counts its pre-tokens.
static void encode_all(Job *job) {
    job->read = job->taken = job->written = 0;
    job->ended = 0;
    job->live = isatty(STDOUT_FILENO);
    job->began_ms = now_ms();
    job->began = job->in.position;
    pthread_t *threads = (pthread_t *)alloc_zero((size_t)job->a.threads, sizeof *threads);
    sigset_t signals, before;    // signals must interrupt only the thread that reads
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals, &before);
    for (int i = 0; i < job->a.threads; i++) {
        if (pthread_create(&threads[i], NULL, encode_blocks, job) != 0) {
            die("cannot start thread %d of %d: use fewer --threads", i + 1, job->a.threads);
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    int more = 1;
    while (!stop_signal && (more || job->written < job->read)) {
        int64_t waiting = job->read - job->written;
        const Block *last = &job->blocks[(job->read + job->slots - 1) % job->slots];
        int full = waiting == job->slots || (waiting > 0 && last->size > BLOCK_BYTES);
        if (waiting > 0 && write_next(job, full || !more)) {
            continue;
        }
        more = read_block(job, &job->blocks[job->read % job->slots]);
        if (more) {
            pthread_mutex_lock(&job->lock);
            job->read++;
            pthread_cond_signal(&job->work);
            pthread_mutex_unlock(&job->lock);
        }
    }
    pthread_mutex_lock(&job->lock);
    job->ended = 1;
    pthread_cond_broadcast(&job->work);
    pthread_mutex_unlock(&job->lock);
    for (int i = 0; i < job->a.threads; i++) {
        pthread_join(threads[i], NULL);
    }
    free(threads);
    if (job->live) {
        printf("\r\033[K");
    }
}

// -------------------------------------------------------------------------------------------------
// Main
// Splits the text into training and validation; opens, stops and ends a run.

// Reads up to n bytes at `offset`, all from one file. Only for text in files. Returns their number.
static size_t input_peek(Input *in, char *out, size_t n, int64_t offset) {
    if (offset >= in->total) {
        return 0;
    }
    input_seek(in, offset);
    const Source *file = &in->files[input_file(in, offset)];
    return input_read(in, out, (size_t)min_i64((int64_t)n, file->end - offset));
}

// Returns the start of the first document at `offset` or later that is not blank; in->total if
// there is none.
static int64_t next_document(Input *in, int64_t offset) {
    char *text = (char *)alloc_zero(BLOCK_BYTES, 1);
    int64_t first = in->files[input_file(in, offset)].first;
    int inside = offset > first;    // in a document; 0: between documents, only blanks so far
    size_t n;
    offset = inside ? max_i64(offset - MARKER_BYTES, first) : offset;    // a marker may span it
    while ((n = input_peek(in, text, BLOCK_BYTES, offset)) > 0) {
        int64_t end = in->files[input_file(in, offset)].end;
        const char *found = (const char *)memmem(text, n, marker, MARKER_BYTES);
        size_t blanks = 0;
        while (!inside && blanks < n && is_blank(text[blanks])) {
            blanks++;
        }
        if (!inside && blanks < n && found != text + blanks) {
            break;
        }
        if (found) {
            offset += found - text + MARKER_BYTES;
            inside = 0;
        } else if (offset + (int64_t)n == end) {
            offset = end;
            inside = 0;
        } else {
            offset += (int64_t)(n - MARKER_BYTES);
        }
    }
    free(text);
    return offset;
}

// Returns the first byte of the validation part. With --val-fraction it is floor(size x (1 -
// fraction)), moved forward to the start of a UTF-8 character, so that no character is split, or
// with --documents to the start of a document.
static int64_t split_offset(Input *in, const Arguments *a) {
    double val_fraction = a->val_fraction >= 0 ? a->val_fraction : 0.1;
    int64_t offset = (int64_t)((double)in->total * (1 - val_fraction));
    char byte;
    if (a->val_file) {
        return in->files[in->count - 1].first;
    }
    if (in->documents && offset < in->total) {
        offset = next_document(in, offset);
        if (offset == in->total) {
            die("no document begins in the last part of the text: --val-fraction 0 writes no "
                "validation shard, --val-tokens N one of the first N tokens");
        }
    } else {
        for (int moved = 0; moved < 3 && input_peek(in, &byte, 1, offset) == 1 &&
                            ((unsigned char)byte & 0xC0) == 0x80; moved++) {
            offset++;
        }
    }
    input_seek(in, 0);
    return offset;
}

// Writes `size` bytes as the file `path`, which replaces an existing file atomically.
static void file_replace(const char *path, const void *bytes, size_t size) {
    char part[PATH_BYTES];
    path_print(part, "%s.part", path);
    const int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd < 0) {
        die("cannot create %s: %s", part, strerror(errno));
    }
    const int failed = write_all(fd, bytes, size) != 0 || fsync(fd) != 0;
    int error = failed ? errno : 0;
    if ((close(fd) != 0 || failed || rename(part, path) != 0)) {
        error = error ? error : errno;
        unlink(part);
        die("cannot write %s: %s", path, strerror(error));
    }
}

// Writes the merges of the vocabulary as PREFIX_merges.txt. Sets the vocabulary's hash.
static void merges_write(Job *job) {
    Bpe *bpe = &job->coder.bpe;
    size_t size;
    char *text = bpe_merges_text(bpe, &size);
    const Tokenizer t = {TOKENIZER_MERGES, bpe->count, merges_hash(text, size)};
    bpe->tokenizer = t;
    file_replace(job->merges_path, text, size);
    free(text);
}

// Learns the vocabulary of --train-bpe from the training part of the text, unless an interrupted
// run has done so: its state refers to its merges. Returns 0 after a signal.
static int learn_vocabulary(Job *job) {
    Bpe *bpe = &job->coder.bpe;
    const int wanted = job->a.train_bpe - MIN_VOCABULARY;
    int byte_of[BYTE_CHARACTERS];
    if (access(job->state_path, F_OK) == 0 && access(job->merges_path, F_OK) == 0) {
        bpe_open(bpe, job->merges_path, NULL, NULL);
        if (bpe->count != job->a.train_bpe) {
            die("%s is from a run with --train-bpe %d; remove it to start over", job->state_path,
                bpe->count);
        }
        return 1;
    }
    bpe_begin_bytes(bpe, byte_of);
    words_clear(&job->words);
    job->coder.counts = 1;
    encode_all(job);
    job->coder.counts = 0;
    input_seek(&job->in, 0);
    job->in.starts_document = job->in.documents;
    if (stop_signal) {
        return 0;
    }
    const uint32_t words = job->words.word_count;
    const int64_t dropped = job->words.dropped;
    const int merges = bpe_learn(bpe, &job->words, wanted);
    words_free(&job->words);
    if (stop_signal) {
        return 0;
    }
    if (merges < wanted) {
        die("--train-bpe %d: this text has only %d merges, which make a vocabulary of %d",
            job->a.train_bpe, merges, merges + MIN_VOCABULARY);
    }
    if (!bpe_add(bpe, marker, MARKER_BYTES)) {
        die("--train-bpe %d: the tokens have more than %d bytes in total", job->a.train_bpe,
            BPE_TEXT);
    }
    merges_write(job);
    printf("%s  %s merges from %s distinct pre-tokens\n", job->merges_path,
           count_text(merges).s, count_text(words).s);
    if (dropped) {
        printf("%s occurrences of rare pre-tokens were not counted: the limits are %s and %s\n",
               count_text(dropped).s, count_text(MOST_WORDS).s, bytes_text(MOST_WORD_BYTES).s);
    }
    return 1;
}

// Sets the tokenizer: of bytes, of --train-bpe, of --tokenizer, or GPT-2's. Returns 0 after a
// signal.
static int tokenizer_open(Job *job) {
    const Arguments *a = &job->a;
    char path[PATH_BYTES];
    if (a->train_bpe && !learn_vocabulary(job)) {
        return 0;
    }
    if (a->bpe) {
        if (!bpe_find(path, a->tokenizer ? a->tokenizer : "")) {
            die("--bpe needs GPT-2's vocab.bpe: run data/prepare.sh, or use --tokenizer FILE");
        }
        bpe_open(&job->coder.bpe, path, a->tokenizer ? NULL : &gpt2_tokenizer, "--bpe");
        if (job->coder.bpe.tokenizer.kind == TOKENIZER_MERGES && !a->questions) {
            merges_write(job);
        }
    }
    job->coder.tokenizer = a->bytes ? byte_tokenizer : job->coder.bpe.tokenizer;
    train.tokenizer = val.tokenizer = job->coder.tokenizer;
    return 1;
}

// Prepares a run up to its first block; continues an interrupted run. Returns 0 after a signal.
static int tokenize_open(Job *job) {
    const Arguments *a = &job->a;
    Input *in = &job->in;
    input_open(in, a);
    if (in->is_stream && a->train_bpe) {
        die("--train-bpe reads its input twice: it needs files, not %s", in->files[0].name);
    }
    lock_prefix(a->prefix);
    if (in->is_stream && a->val_fraction > 0) {
        die("--val-fraction needs files, whose length is known; for %s use --val-tokens",
            in->files[0].name);
    }
    path_print(job->state_path, "%s.state", a->prefix);
    path_print(job->merges_path, "%s_merges.txt", a->prefix);
    job->coder.documents = a->documents;
    train.arguments = val.arguments = a;
    job->slots = 2 * a->threads + 2;
    job->blocks = (Block *)alloc_zero((size_t)job->slots, sizeof(Block));
    job->synced_ms = -SYNC_MS;  // the first finished shard is saved at once
    pthread_mutex_init(&job->lock, NULL);
    pthread_cond_init(&job->work, NULL);
    pthread_cond_init(&job->done, NULL);
    int val_first = in->is_stream || a->val_tokens >= 0;
    job->sinks[0] = val_first ? &val : &train;
    job->sinks[1] = val_first ? &train : &val;
    job->first_tokens = val_first ? max_i64(a->val_tokens, 0) : INT64_MAX;
    in->split = val_first ? INT64_MAX : split_offset(in, a);
    if (!tokenizer_open(job)) {
        return 0;
    }
    job->state = state_new(a, in, &job->coder.tokenizer);
    if (state_read(&job->state, in, job->state_path)) {
        input_seek(in, job->state.place.position);
        in->starts_document = job->state.place.starts_document;
        job->skip = job->state.place.skip;
        printf("continues after %" PRId64 " finished shards, at %s of the text\n",
               train.finished + val.finished, bytes_text((double)in->position).s);
    }
    return 1;
}

// After a signal: reports the finished shards and how to continue. Returns the exit status.
static int interrupted(const Job *job) {
    fprintf(stderr, "tokenize: interrupted; finished shards: %" PRId64 "; %s\n",
            train.finished + val.finished,
            job->in.is_stream ? "a stream cannot be continued: remove them and start over"
            : train.finished + val.finished > 0 ? "the same command continues after them"
                                                : "the same command starts over");
    return 130;
}

// Ends the run with an error if no training tokens were found: all text was blank or used for
// validation. Removes the validation shards.
static void nothing_to_train(const Job *job) {
    char path[PATH_BYTES];
    for (int64_t i = 0; i < val.finished; i++) {
        shard_path(path, &val, i, job->a.shard_tokens > 0);
        unlink(path);
    }
    unlink(job->state_path);
    if (job->in.position > 0) {
        die("%s: of %" PRId64 " bytes nothing is left for training", job->in.files[0].name,
            job->in.position);
    }
    die("%s is empty", job->in.files[0].name);
}

// -------------------------------------------------------------------------------------------------
// Questions
// --questions makes an evaluation file (tokens.c) from CSV files (RFC 4180) with rows as in MMLU's:
// a question, its answers and the letter of the right one. The words around them are those of
// llm.c's dev/data/mmlu.py, so that scores are comparable with the ones it reports.

enum { MOST_FIELDS = EVAL_COMPLETIONS + 2, EXAMPLE_BYTES = 65535, MOST_EXAMPLES = 65535 };

// A row of a CSV file. Fields after the first MOST_FIELDS are counted, but not kept.
typedef struct {
    const char *fields[MOST_FIELDS];  // without the quotation marks around them
    size_t bytes[MOST_FIELDS];
    int count;                        // 0: a quotation mark is not closed
} CsvRow;

typedef struct {
    const Coder *coder;
    BpeEncoder encoder;
    uint16_t *words;         // the file after its header
    size_t count, capacity;  // of `words`
    char *text;              // of a context or completion
    size_t text_capacity, longest;  // longest: bytes of the longest example
    int examples;
} Questions;

// Parses the row at the start of `text`, which has n bytes until the end of the file, and moves its
// fields together. Returns the size of the row with its line end.
static size_t csv_row(CsvRow *row, char *text, size_t n) {
    size_t begun = 0, end = 0;  // the field so far is text[begun .. end)
    int quoted = 0;
    row->count = 0;
    for (size_t at = 0;; at++) {
        const int ends = at >= n, c = ends ? '\n' : text[at];
        const int next = at + 1 < n ? text[at + 1] : '\n';
        if (quoted && !ends) {
            if (c == '"' && next != '"') {
                quoted = 0;
                continue;
            }
            at += c == '"';  // two quotation marks stand for one
            text[end++] = (char)c;
        } else if (c == ',' || c == '\n') {
            if (row->count < MOST_FIELDS) {
                row->fields[row->count] = text + begun;
                row->bytes[row->count] = end - begun;
            }
            row->count++;
            begun = end;
            if (c == '\n') {
                row->count = quoted ? 0 : row->count;
                return ends ? n : at + 1;
            }
        } else if (c == '"' && end == begun) {
            quoted = 1;
        } else if (c != '\r' || next != '\n') {
            text[end++] = (char)c;
        }
    }
}

// Makes space for n more words. Returns where they go.
static uint16_t *questions_space(Questions *q, size_t n) {
    if (q->capacity < q->count + n) {
        q->capacity = 2 * (q->count + n);
        q->words = (uint16_t *)grow(q->words, q->capacity * sizeof *q->words);
    }
    return q->words + q->count;
}

// Appends the number of tokens of `before`, `text` (of n bytes) and `after` together, and the
// tokens.
static void questions_text(Questions *q, const char *before, const char *text, size_t n,
                           const char *after) {
    const size_t first = strlen(before), last = strlen(after), all = first + n + last;
    if (q->text_capacity < all) {
        q->text = (char *)grow(q->text, all);
        q->text_capacity = all;
    }
    memcpy(q->text, before, first);
    memcpy(q->text + first, text, n);
    memcpy(q->text + first + n, after, last);
    uint16_t *out = questions_space(q, 1 + all);
    const int64_t tokens = coder_encode(q->coder, &q->encoder, q->text, all, out + 1);
    out[0] = (uint16_t)min_i64(tokens, EXAMPLE_BYTES);
    q->count += 1 + (size_t)tokens;
}

// Appends the question of a row. `name` and `number` of the row are for error messages.
static void questions_row(Questions *q, const CsvRow *row, const char *name, int number) {
    const int answers = row->count - 2, last = row->count - 1;
    if (answers < 2 || answers > EVAL_COMPLETIONS) {
        die(row->count ? "%s, row %d: %d fields; expected a question, 2 to %d answers and the "
                         "letter of the right one"
                       : "%s, row %d: a quotation mark is not closed",
            name, number, row->count, EVAL_COMPLETIONS);
    }
    const int label = row->bytes[last] == 1 ? row->fields[last][0] - 'A' : -1;
    if (label < 0 || label >= answers) {
        die("%s, row %d: the last field is '%.*s'; expected the letter of the right answer, A to "
            "%c", name, number, (int)min_i64((int64_t)row->bytes[last], 40), row->fields[last],
            'A' + answers - 1);
    }
    if (q->examples == MOST_EXAMPLES) {
        die("%s, row %d: an evaluation file has at most %d questions", name, number,
            MOST_EXAMPLES);
    }
    const size_t start = q->count;
    questions_space(q, EVAL_EXAMPLE_WORDS);
    q->count += EVAL_EXAMPLE_WORDS;
    questions_text(q, "Question: ", row->fields[0], row->bytes[0], "\n\nAnswer:");
    for (int k = 0; k < answers; k++) {
        questions_text(q, " ", row->fields[1 + k], row->bytes[1 + k], "");
    }
    const size_t bytes = (q->count - start) * sizeof *q->words;
    if (bytes > EXAMPLE_BYTES) {
        die("%s, row %d: its tokens take %zu bytes; the format allows %d", name, number, bytes,
            EXAMPLE_BYTES);
    }
    const uint16_t head[EVAL_EXAMPLE_WORDS] = {EVAL_START, (uint16_t)bytes, (uint16_t)q->examples,
                                               (uint16_t)label, (uint16_t)answers};
    memcpy(q->words + start, head, sizeof head);
    q->longest = bytes > q->longest ? bytes : q->longest;
    q->examples++;
}

// Appends the questions of a file; empty lines are skipped.
static void questions_file(Questions *q, const char *name) {
    Mapping map;
    CsvRow row;
    if (mapping_open(&map, name) != 0) {
        die("cannot open %s: %s", name, file_error());
    }
    char *text = (char *)grow(NULL, map.size + 1);
    memcpy(text, map.bytes, map.size);
    size_t at = map.size >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;  // byte order mark
    for (int number = 1; at < map.size && !stop_signal; number++) {
        at += csv_row(&row, text + at, map.size - at);
        if (row.count != 1 || row.bytes[0] > 0) {
            questions_row(q, &row, name, number);
        }
    }
    free(text);
    mapping_close(&map);
}

// Runs --questions. Returns the exit status.
static int questions_command(Job *job) {
    const Arguments *a = &job->a;
    Questions q;
    char path[PATH_BYTES];
    memset(&q, 0, sizeof q);
    q.coder = &job->coder;
    lock_prefix(a->prefix);
    tokenizer_open(job);
    bpe_encoder_open(&q.encoder, &job->coder.bpe);
    q.count = q.capacity = LLMC_HEADER_BYTES / sizeof *q.words;
    q.words = (uint16_t *)alloc_zero(q.capacity, sizeof *q.words);
    for (int i = 0; i < a->file_count; i++) {
        questions_file(&q, a->files[i]);
    }
    if (!q.examples && !stop_signal) {
        die("%s has no questions", a->files[0]);
    }
    const int32_t header[4] = {llmc_files[LLMC_EVALUATION].magic, 1, q.examples, (int)q.longest};
    memcpy(q.words, header, sizeof header);
    path_print(path, "%s.bin", a->prefix);
    if (stop_signal) {
        fprintf(stderr, "tokenize: interrupted; %s was not written\n", path);
    } else {
        file_replace(path, q.words, q.count * sizeof *q.words);
        printf("%s  %s questions\n", path, count_text(q.examples).s);
    }
    bpe_encoder_close(&q.encoder);
    free(q.words);
    free(q.text);
    free((void *)a->files);
    return stop_signal ? 130 : 0;
}

static void tokenize_close(Job *job) {
    for (int i = 0; i < job->slots; i++) {
        block_free(&job->blocks[i]);
    }
    free(job->blocks);
    free(job->in.text);
    free(job->in.files);
    free((void *)job->a.files);
}

int main(int argc, char **argv) {
    static Job job;
    program_name = "tokenize";
    standard_streams_open();
    job.a = parse_arguments(argc, argv);
    atexit(sinks_drop);
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = (int)SA_RESETHAND;    // a second signal ends the run at once
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    if (job.a.questions) {
        return questions_command(&job);
    }
    if (tokenize_open(&job)) {
        encode_all(&job);
    }
    if (stop_signal) {
        save_state(&job, 1);
        return interrupted(&job);
    }
    if (train.tokens == 0) {
        nothing_to_train(&job);
    }
    sink_close(&train);
    sink_close(&val);
    sync_shards();
    unlink(job.state_path);
    sink_report(&train);
    sink_report(&val);
    refuse_leftovers(&train);
    refuse_leftovers(&val);
    tokenize_close(&job);
    return 0;
}
