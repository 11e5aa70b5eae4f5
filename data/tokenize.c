// data/tokenize.c -- a text of any length to token shards that train_gpt2 reads (data/README.md).
//
//     data/tokenize --bytes -o data/mine mine.txt            data/mine_train.bin, data/mine_val.bin
//     cat *.txt | data/tokenize --bytes --val-tokens 100000 --shard-tokens 100000000 -o data/mine -
//
// The text is read in blocks, so it may be larger than memory; a shard stands beside its final
// name (with .part) until it is complete. The format's constants and the errors are those of
// Volume I, which is included without main.

#define GPT2_NO_MAIN 1
#include "../train_gpt2.c"

enum { BLOCK_BYTES = 1 << 20 };

static const char *const usage_text =
    "usage: data/tokenize --bytes [options] -o PREFIX FILE|-\n\n"
    "Writes the text of FILE (-: standard input) to shards PREFIX_train.bin and PREFIX_val.bin.\n\n"
    "  --bytes             one token a byte (the only tokenizer yet)\n"
    "  -o PREFIX           start of the names of the shards\n"
    "  --val-fraction F    the last part of a file validates; default 0.1, 0: no validation shard\n"
    "  --val-tokens N      the first N tokens validate instead; default for a stream: 0\n"
    "  --shard-tokens N    several shards, of N tokens: PREFIX_train_000000.bin, ...\n";

typedef struct {
    const char *input, *prefix;
    int bytes;
    double val_fraction;         // negative: not given
    int64_t val_tokens;          // negative: not given
    int64_t shard_tokens;        // 0: one shard
} Arguments;

// One half of the split, train or val: the shard that is open, and what was written before it.
typedef struct {
    const Arguments *arguments;
    const char *split;
    char path[PATH_BYTES], part[PATH_BYTES];
    int fd;                      // of `part`; -1: no shard is open
    int finished;                // shards complete
    int64_t shard_tokens, tokens;    // in the open shard; in all
} Sink;

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
        die("%s: '%s' is not a number from 0 up to 1", option, text);
    }
    return value;
}

static Arguments parse_arguments(int argc, char **argv) {
    Arguments a = {NULL, NULL, 0, -1, -1, 0};
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
            fputs(usage_text, stdout);
            exit(0);
        }
        if (strcmp(word, "--bytes") == 0) {
            a.bytes = 1;
            continue;
        }
        if (word[0] != '-' || word[1] == 0) {
            if (a.input) {
                die("one input at a time, found '%s' and '%s'; cat them and give -", a.input, word);
            }
            a.input = word;
            continue;
        }
        int takes_value = strcmp(word, "-o") == 0 || strcmp(word, "--val-fraction") == 0 ||
                          strcmp(word, "--val-tokens") == 0 || strcmp(word, "--shard-tokens") == 0;
        if (!takes_value || i + 1 == argc) {
            die(takes_value ? "%s needs a value" : "unknown option '%s'; --help lists them", word);
        }
        const char *value = argv[++i];
        if (word[1] == 'o') {
            a.prefix = value;
        } else if (word[2] == 's') {
            a.shard_tokens = whole_number(word, value, 1, INT32_MAX);
        } else if (strcmp(word, "--val-tokens") == 0) {
            a.val_tokens = whole_number(word, value, 0, INT64_MAX);
        } else {
            a.val_fraction = fraction(word, value);
        }
    }
    if (!a.input || !a.prefix || !a.bytes) {
        die("%s is missing; --help shows how to call it",
            !a.bytes ? "--bytes" : !a.prefix ? "-o PREFIX" : "the input, FILE or -,");
    }
    if (a.val_fraction >= 0 && a.val_tokens >= 0) {
        die("--val-fraction and --val-tokens contradict each other: give one");
    }
    return a;
}

// Name of the shard with this index: numbered when --shard-tokens is given.
static void shard_path(char *path, const Sink *s, int index, int numbered) {
    if (numbered) {
        path_print(path, "%s_%s_%06d.bin", s->arguments->prefix, s->split, index);
    } else {
        path_print(path, "%s_%s.bin", s->arguments->prefix, s->split);
    }
}

// Removes the unfinished shard, so that a failed run leaves nothing.
static void sink_drop(Sink *s) {
    if (s->fd >= 0) {
        unlink(s->part);
        s->fd = -1;
    }
}

static void sink_write(Sink *s, const void *data, size_t bytes) {
    if (write_all(s->fd, data, bytes) != 0) {
        int error = errno;
        sink_drop(s);
        die("cannot write %s: %s", s->part, strerror(error));
    }
}

static void sink_open(Sink *s) {
    const int32_t header[SHARD_HEADER] = {0};    // not a token file until sink_finish
    shard_path(s->path, s, s->finished, s->arguments->shard_tokens > 0);
    path_print(s->part, "%s.part", s->path);
    s->fd = open(s->part, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (s->fd < 0) {
        die("cannot create %s: %s", s->part, strerror(errno));
    }
    s->shard_tokens = 0;
    sink_write(s, header, sizeof header);
}

static void sink_finish(Sink *s) {
    if (s->fd < 0) {
        return;
    }
    const int32_t header[SHARD_HEADER] = {SHARD_MAGIC, 1, (int32_t)s->shard_tokens, BYTE_VOCABULARY,
                                          TOKENIZER_BYTES};
    if (lseek(s->fd, 0, SEEK_SET) != 0) {
        die("cannot rewind %s: %s", s->part, strerror(errno));
    }
    sink_write(s, header, sizeof header);
    if (fsync(s->fd) != 0 || close(s->fd) != 0 || rename(s->part, s->path) != 0) {
        int error = errno;
        sink_drop(s);
        die("cannot finish %s: %s", s->path, strerror(error));
    }
    s->fd = -1;
    s->finished++;
}

// Appends tokens, over as many shards as they fill. A shard is created with its first token, so
// none is empty.
static void sink_append(Sink *s, const uint16_t *tokens, int64_t count) {
    int64_t room = s->arguments->shard_tokens ? s->arguments->shard_tokens : INT32_MAX;
    while (count > 0) {
        if (s->fd < 0) {
            sink_open(s);
        }
        int64_t now = min_i64(count, room - s->shard_tokens);
        sink_write(s, tokens, (size_t)now * sizeof *tokens);
        tokens += now;
        count -= now;
        s->shard_tokens += now;
        s->tokens += now;
        if (s->shard_tokens == s->arguments->shard_tokens) {
            sink_finish(s);
        } else if (now == 0) {
            sink_drop(s);
            die("%s: one shard holds %d tokens at most: give --shard-tokens", s->path, INT32_MAX);
        }
    }
}

// A shard of an earlier, longer or differently numbered run would be read by the same glob as
// these.
static void refuse_leftovers(const Sink *s) {
    int numbered = s->arguments->shard_tokens > 0;
    char path[2][PATH_BYTES];
    shard_path(path[0], s, numbered ? s->finished : 0, 1);
    shard_path(path[1], s, 0, 0);
    for (int i = 0; i < 2; i++) {
        int ours = i == 1 && !numbered && s->finished > 0;
        if (!ours && access(path[i], F_OK) == 0) {
            die("%s is left from an earlier run, of another text: remove it", path[i]);
        }
    }
}

static void sink_report(const Sink *s) {
    char path[PATH_BYTES], count[32];
    if (s->finished > 0) {
        shard_path(path, s, s->finished - 1, s->arguments->shard_tokens > 0);
        printf("%s%s  %s tokens\n", s->finished > 1 ? "... " : "", path,
               count_text(count, s->tokens));
    }
}

// First byte of validation in a file of `size` bytes: floor(size x (1 - fraction)), moved on to
// the start of a UTF-8 character, so that no character is cut in two.
static int64_t split_offset(int fd, int64_t size, double val_fraction) {
    int64_t offset = (int64_t)((double)size * (1 - val_fraction));
    unsigned char byte;
    for (int moved = 0; moved < 3 && offset < size; moved++, offset++) {
        if (pread(fd, &byte, 1, offset) != 1 || (byte & 0xC0) != 0x80) {
            break;
        }
    }
    return offset;
}

// Reads up to a block, across short reads (a pipe gives little at a time). Returns 0 at the end.
static int64_t read_block(int fd, const char *name, unsigned char *block) {
    int64_t filled = 0;
    while (filled < BLOCK_BYTES) {
        ssize_t n = read(fd, block + filled, (size_t)(BLOCK_BYTES - filled));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            die("cannot read %s: %s", name, strerror(errno));
        }
        if (n == 0) {
            break;
        }
        filled += n;
    }
    return filled;
}

int main(int argc, char **argv) {
    static unsigned char block[BLOCK_BYTES];
    static uint16_t tokens[BLOCK_BYTES];
    program_name = "tokenize";
    Arguments a = parse_arguments(argc, argv);
    int is_stream = strcmp(a.input, "-") == 0;
    const char *name = is_stream ? "standard input" : a.input;
    int fd = is_stream ? STDIN_FILENO : open(a.input, O_RDONLY);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) != 0) {
        die("cannot open %s: %s", name, strerror(errno));
    }
    is_stream = is_stream || !S_ISREG(status.st_mode);
    if (is_stream && a.val_fraction > 0) {
        die("--val-fraction needs a file, whose length is known; for %s give --val-tokens", name);
    }

    // Sink 0 takes the text up to `split`, sink 1 the rest.
    Sink train = {&a, "train", "", "", -1, 0, 0, 0}, val = {&a, "val", "", "", -1, 0, 0, 0};
    int val_first = is_stream || a.val_tokens >= 0;
    Sink *sinks[2] = {val_first ? &val : &train, val_first ? &train : &val};
    double val_fraction = a.val_fraction >= 0 ? a.val_fraction : 0.1;
    int64_t split = val_first ? max_i64(a.val_tokens, 0)
                              : split_offset(fd, status.st_size, val_fraction);
    int64_t position = 0, count;
    while ((count = read_block(fd, name, block)) > 0) {
        for (int64_t i = 0; i < count; i++) {
            tokens[i] = block[i];
        }
        int64_t before = min_i64(max_i64(split - position, 0), count);
        sink_append(sinks[0], tokens, before);
        sink_append(sinks[1], tokens + before, count - before);
        position += count;
    }
    if (train.tokens == 0) {
        sink_drop(&val);
        if (position > 0) {
            die("%s: only %" PRId64 " bytes, nothing is left to train on", name, position);
        }
        die("%s is empty", name);
    }
    sink_finish(&train);
    sink_finish(&val);
    sink_report(&train);
    sink_report(&val);
    refuse_leftovers(&train);
    refuse_leftovers(&val);
    return 0;
}
