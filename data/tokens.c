// data/tokens.c -- tokenizer, token shards and multiple-choice files.
//
// Encodes and decodes byte-level BPE with GPT-2's split, and reads the shards for training and the
// files that --eval scores. Does not depend on models, options or engines. Errors end the program
// with one line that names the file.
//
// train_gpt2.c and data/tokenize.c include this file after data/files.c. It is also valid C++17,
// because nvcc compiles it too. data/README.md documents the formats.
//
// Contents
//   1  Tokenizer
//   2  Token shards
//   3  Evaluation files

// -------------------------------------------------------------------------------------------------
// 1. Tokenizer
// Token files name their tokenizer, so that a model is never given another tokenizer's ids. In the
// byte tokenizer, token b is byte b (0 <= b < 256), and 256 is <|endoftext|>. All others are
// byte-level BPEs: GPT-2's, which on valid UTF-8 gives the same tokens as tiktoken's
// encode_ordinary, and those that `data/tokenize --train-bpe` learns. The last token of every
// vocabulary is <|endoftext|>.
// 1. GPT-2's pattern splits text into pre-tokens (pretoken_end). A byte that is not valid UTF-8
//    counts as a character that is not a letter, number or space.
// 2. Within a pre-token, the adjacent pair of tokens whose concatenation has the lowest id is
//    merged, the leftmost such pair first, until no pair can be merged (bpe_merge).
// 3. A Bpe has no pointers and is read-only once it is open, so threads share it. Each thread
//    writes only to its own BpeEncoder.

typedef int32_t Token;

enum { BYTE_VOCABULARY = 257, GPT2_VOCABULARY = 50257, GPT2_END_OF_TEXT = GPT2_VOCABULARY - 1 };
enum { GPT2_PADDED = 50304 };  // GPT-2's vocabulary rounded up to a multiple of 64 (nanoGPT)
enum { MIN_VOCABULARY = 257, MAX_VOCABULARY = 65535 };  // of BPEs; 257: bytes, <|endoftext|>

// The identity of a tokenizer, as stored in token shards. Tokenizers of the same size are
// distinguished by the hash of their merges.
enum { TOKENIZER_GPT2 = 0, TOKENIZER_BYTES = 1, TOKENIZER_MERGES = 2 };
typedef struct {
    int kind, vocabulary;
    uint64_t hash;  // TOKENIZER_MERGES: first 8 bytes of the SHA-256 of the merges file; else 0
} Tokenizer;
static const uint64_t gpt2_hash = 0x1CE1664773C50F3Eu;  // of GPT-2's merges file, vocab.bpe
static const Tokenizer gpt2_tokenizer = {TOKENIZER_GPT2, GPT2_VOCABULARY, 0};
static const Tokenizer byte_tokenizer = {TOKENIZER_BYTES, BYTE_VOCABULARY, 0};

static Token end_of_text(const Tokenizer *t) { return t->vocabulary - 1; }

static int tokenizers_equal(const Tokenizer *a, const Tokenizer *b) {
    return a->kind == b->kind && a->vocabulary == b->vocabulary && a->hash == b->hash;
}

// Describes a tokenizer for error messages.
static ShortText tokenizer_text(const Tokenizer *t) {
    ShortText text;
    if (t->kind == TOKENIZER_MERGES) {
        snprintf(text.s, sizeof text.s, "%d custom tokens (%08x)", t->vocabulary,
                 (unsigned)(t->hash >> 32));
    } else {
        snprintf(text.s, sizeof text.s, "%s",
                 t->kind == TOKENIZER_BYTES ? "bytes" : "GPT-2's tokens");
    }
    return text;
}

// Tables of the code points in Unicode's categories L (letters) and N (numbers): the lengths of
// gaps and runs in turn (gap, run, gap, run, ...), in the encoding that class_runs() decodes.
// Unicode 16.0, as in tiktoken 0.14.0; written by dev/tools/unicode_tables.py.
static const char letter_runs[] =
    "d=)=R$-$'$(:$B$t%'/1(*$$$oX($%%'$$)$$&$$$7$o*$ob+p1$I%$)Lj>''PNF%$o:$$2%*%-&%$3$$A@o0.$;D,%'"
    "$(9'$,$&$:<*.(;$)4M]Y&$5$*-23'+%%%9$*$$&'&$3$0%$&1%-$+)'%%9$*$%$%$%B'$$6&3,$&$9$*$%$(&$5$2%:"
    "$.+%%%9$*$%$(&$A%$&2$4$$)&&$'&%$$$%&%&&&/9$W+$&$:$3&$=&%$%%A$'+$&$:$-$(&$B%$%2%4,$&$L%$3$(&+"
    "&;)(5&;$,$$%*]S$%/*]%$$$($;$$$-$%,$%($$8'C$b+$G>(oJN7$3)''&$&%*&'0/$4I$$($%N$r@$'%*$$$'%L$'%"
    "D$'%*$$$'%2$\\$'%fH33o-%)&v/%4$=(n)+*5061510$&2WF$'$fo0*(%E$$(i-BTA%(.O'=Y:,Xo)$o4R4+YA0%-O="
    "GL&-G%.(N%&L'$)$%&$(pKcqU%)%I%)%+$$$$$$$B%X$*$$&&$*&'%)'0(&$*oK$0$30o<$'$%-$$&()$$$$$$'$.%'("
    "('$W%pq:q$)'&%/I$$($%[*$3:,*$*$*$*$*$*$*$*o'$t0%M((%'o-)&$o1$'(N$o54CS3t[st[copqLfQ%qL&3-%7R"
    "3B%iT,%o>%f%%$$$+83$&$'$:@W1Ua)&$$%.\?-:<@*R\?$3($--($L:&$+7:&$&U$$&%%(%$$$;&%.*&/)%)%),*$*$"
    "N$1)oJ@wq#/:'Tt}3ra%oAI*/(($$-$0$($$$%$%$oCDr^5c%YK/oK($o^G=)=.o0&)%)%)%&F/$=$6$%$2%1EoRs,@&"
    "TRC07$+)I-A%G'+Sp)5G'G'K+W/.$2$*$%$.$2$*$%&W/r*,9-+;)$M$,h)%$$O$%&$%:-:,Bd6$%-9-=i[)%c$2'$&$"
    "@M@&@F+$\?>Y-9-605oElZV0V0GI\?,:q9M)%3&^@-$+9M5Q8>:/X\\%%$0PC<=G@$%$+F&$/S1'8$$$F5$<6%b*$$$'"
    "$2$-*RI+%%%9$*$%$(&$5$/(A-$$%$$I$$<$$$OX5'7&AS7%$$pCRL'GS7$^N0$j>H*pDOoKcB+%$%+$%$;2$$$o5+%J"
    "3$$$\?$-K*$8$.Q6$5lpRDB,$H4$TAoG*$%$I8$<)$%$C1$r:62$$0$EoS$o&z-q%pOppWo82|+4)<qrN(uVsx$Aou1u"
    "H*B4o&4A5S3'B8(6sWPp^coWn($e0c%$$\?r~[+~9L-usN'$*$%$qb2$@&%$1'+s3o|\?oB(0&,*-r|ao,$j$%%$%%%'"
    "$/$$$*$d$'%+$*$\?$'$($$&*$rG%<$<$B$<$B$<$B$<$B$<$+ov7B))qDaoiP-*3$r4A5Ot\?\?q#A%$tJ*$'$%$2$p"
    "P^g*$}c'$>$%$$%$$-$'$$$$)$'$$$$$$&$%$$%$$$$$$$$$$%$$%'$*$'$'$$$-$4(&$($4qx/pqp+CqtU)pi%rya1t"
    "p<2v1o~Eu-oqaq~n(qu/";
static const char number_runs[] =
    "S-oO%($%&opl-o]-pQ-sC-oM-')oC-oM-oM-%)oE0oJ-+*o>-o\?**6oD-o7-oM-i7qK-i-wF7yP&q.-)-9-qk-oW.p0"
    "-)-pA-o--o]-)-{]$&))-pQV%(wM_o%9v9Aop4$x4$<,1&rJ'oa-A+$2C-J2ovrS-pG-r3)p%-I-pQ-9-o--s=-ooue-"
    "tHP/\\4%rH>G'@$+$o](pU-zA+<*J,n(9)p+%%3%Qc,W%A&n(o\?+;+L*r=)S-)-qUBp)-M'oG*o]AoW-_-og-*7q:-r"
    "I-oM-ri-o=-)7o#/sK6o4-vY-o-@pn-i-sM-o=8|&oFzzT-o|a-o--o]-$*ti-qE:oq{`-oqE7/7oC<|PUo}/-sM-tQ-"
    "q6-wC,oW-xB^$&$'o#P$2zU0prV-";
enum { CLASS_OTHER, CLASS_LETTER, CLASS_NUMBER, CLASS_SPACE };
enum { CLASSES = 0x32400 };  // code points from here on are CLASS_OTHER

// Sets the class of all code points in `runs`. Each character of `runs` encodes d, its distance
// from '#'. A number is 76 q + d, where d < 76 is from its last character. The characters before it
// have d >= 76; they are the base-16 digits of q, each with the value d - 75.
static void class_runs(unsigned char classes[CLASSES], const char *runs, int kind) {
    uint32_t code = 0;
    for (int inside = 0; *runs; inside = !inside) {
        uint32_t count = 0;
        for (; *runs - '#' >= 76; runs++) {
            count = count * 16 + (uint32_t)(*runs - '#' - 76) + 1;
        }
        count = count * 76 + (uint32_t)(*runs++ - '#');
        memset(classes + code, kind, inside ? count : 0);
        code += count;
    }
}

// Returns whether c has Unicode's property White_Space.
static int is_space(uint32_t c) {
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

// A vocabulary: maps ids to bytes and bytes to ids, and holds the class of every character. A Bpe
// takes 5 MiB, too large for a stack; most of it is never accessed.
// BPE_TEXT limits the total bytes of all tokens, and BPE_LONGEST the bytes of one token.
enum { BPE_SLOTS = 1 << 17, BPE_TEXT = 4 << 20, BPE_LONGEST = 512 };
typedef struct {
    Tokenizer tokenizer;                   // set by bpe_open
    int count;                             // tokens so far
    uint32_t start[MAX_VOCABULARY + 1];    // offset of each token's bytes in `text`
    uint32_t slots[BPE_SLOTS];             // hash table: 16 bits of the hash, id + 1; 0: free
    unsigned char classes[CLASSES];
    char text[BPE_TEXT];
} Bpe;

// Sets *bytes to the bytes of a token, which are not 0-terminated. Returns their number.
static int bpe_bytes(const Bpe *bpe, int token, const char **bytes) {
    *bytes = bpe->text + bpe->start[token];
    return (int)(bpe->start[token + 1] - bpe->start[token]);
}

// Finds the slot of a token by its bytes (1 to BPE_LONGEST), or the free slot to insert it at. *tag
// receives the upper half of the slot's value.
static uint32_t bpe_slot(const Bpe *bpe, const char *bytes, size_t n, uint32_t *tag) {
    uint64_t hash = fnv1a(fnv1a_start, bytes, n) * 0x9E3779B97F4A7C15u;
    uint32_t slot = (uint32_t)(hash >> 31) % BPE_SLOTS;
    *tag = (uint32_t)(hash >> 32) & 0xFFFF0000u;
    for (; bpe->slots[slot]; slot = (slot + 1) % BPE_SLOTS) {
        if ((bpe->slots[slot] & 0xFFFF0000u) == *tag) {
            const char *found;
            int length = bpe_bytes(bpe, (int)(bpe->slots[slot] & 0xFFFF) - 1, &found);
            if (length == (int)n && memcmp(found, bytes, n) == 0) {
                break;
            }
        }
    }
    return slot;
}

// Returns the id of the token that consists of these n bytes, or -1.
static int bpe_id(const Bpe *bpe, const char *bytes, size_t n) {
    uint32_t tag;
    if (n == 0 || n > BPE_LONGEST) {
        return -1;
    }
    return (int)(bpe->slots[bpe_slot(bpe, bytes, n, &tag)] & 0xFFFF) - 1;
}

// Appends a token. Returns 0 if it is too long or a duplicate, or if the vocabulary is full.
static int bpe_add(Bpe *bpe, const char *bytes, size_t n) {
    uint32_t begin = bpe->start[bpe->count], tag;
    if (n == 0 || n > BPE_LONGEST || bpe->count == MAX_VOCABULARY || n > BPE_TEXT - begin) {
        return 0;
    }
    uint32_t *slot = &bpe->slots[bpe_slot(bpe, bytes, n, &tag)];
    if (*slot) {
        return 0;
    }
    memcpy(bpe->text + begin, bytes, n);
    *slot = tag | (uint32_t)++bpe->count;
    bpe->start[bpe->count] = begin + (uint32_t)n;
    return 1;
}

// Clears the vocabulary and fills in the character classes.
static void bpe_begin(Bpe *bpe) {
    memset(bpe, 0, offsetof(Bpe, text));
    class_runs(bpe->classes, letter_runs, CLASS_LETTER);
    class_runs(bpe->classes, number_runs, CLASS_NUMBER);
    for (uint32_t c = 0; c <= 0x3000; c++) {
        bpe->classes[c] = is_space(c) ? (unsigned char)CLASS_SPACE : bpe->classes[c];
    }
}

// Returns the character that stands for a byte in files (bytes_to_unicode in GPT-2's encoder.py):
// printable characters of Latin-1 stand for themselves, U+0100 onwards for the other 68 bytes.
enum { BYTE_CHARACTERS = 256 + 68 };
static int byte_character(int b) {
    return b <= 32 ? 256 + b : b < 127 ? b : b <= 160 ? 289 + b - 127 : b == 173 ? 323 : b;
}

// Begins a vocabulary with the 256 bytes, in the order of their characters. byte_of[c] receives the
// byte that character c stands for, or -1.
static void bpe_begin_bytes(Bpe *bpe, int byte_of[BYTE_CHARACTERS]) {
    memset(byte_of, -1, BYTE_CHARACTERS * sizeof *byte_of);
    for (int b = 0; b < 256; b++) {
        byte_of[byte_character(b)] = b;
    }
    bpe_begin(bpe);
    for (int c = 0; c < BYTE_CHARACTERS; c++) {
        char byte = (char)byte_of[c];
        if (byte_of[c] >= 0) {
            bpe_add(bpe, &byte, 1);
        }
    }
}

// Parses a vocab.bpe or merges.txt: a first line `#version`, then one merge per line, its two
// tokens written as characters (byte_character). Ids 0 to 255 are the bytes, 256 + i is merge i,
// and the last id is <|endoftext|>.
static const char merges_first_line[] = "#version: 0.2\n";
static void bpe_parse_merges(Bpe *bpe, const unsigned char *bytes, size_t n, const char *name) {
    int byte_of[BYTE_CHARACTERS], line = 2;
    bpe_begin_bytes(bpe, byte_of);
    size_t offset = sizeof merges_first_line - 1;
    if (n < offset || memcmp(bytes, merges_first_line, offset) != 0) {
        die("%s: not a vocab.bpe file: the first line must be '#version: 0.2'", name);
    }
    for (; offset < n; offset++, line++) {
        char both[BPE_LONGEST];
        size_t left = 0, length = 0;
        while (offset < n && bytes[offset] != '\n') {
            uint32_t c;
            offset += (size_t)utf8_decode(&c, bytes + offset, n - offset);
            if (c == ' ' && left == 0) {
                left = length;
            } else if (length == BPE_LONGEST || c >= BYTE_CHARACTERS || byte_of[c] < 0) {
                die("%s:%d: expected two tokens in GPT-2's byte alphabet, at most %d bytes long",
                    name, line, BPE_LONGEST);
            } else {
                both[length++] = (char)byte_of[c];
            }
        }
        if (bpe->count == MAX_VOCABULARY - 1) {
            die("%s:%d: too many merges, at most %d are supported", name, line,
                MAX_VOCABULARY - MIN_VOCABULARY);
        }
        if (bpe_id(bpe, both, left) < 0 || bpe_id(bpe, both + left, length - left) < 0 ||
            !bpe_add(bpe, both, length)) {
            die("%s:%d: a merge must join two earlier tokens into a new one", name, line);
        }
    }
    if (!bpe_add(bpe, "<|endoftext|>", 13)) {
        die("%s: a merge produces <|endoftext|>, which is reserved", name);
    }
}

// Finds the path of GPT-2's vocabulary: `asked` (--tokenizer) if given, even if the file does not
// exist, otherwise data/vocab.bpe. Returns 0 if there is none.
static int bpe_find(char path[PATH_BYTES], const char *asked) {
    path_print(path, "%s", asked[0] ? asked : "data/vocab.bpe");
    return asked[0] || access(path, F_OK) == 0;
}

// Returns the class (CLASS_*) of the character at p; *length receives its number of bytes.
static inline int char_class(const Bpe *bpe, const unsigned char *p, const unsigned char *end,
                             int *length) {
    if (*p < 0x80) {
        *length = 1;
        return bpe->classes[*p];
    }
    uint32_t c;
    *length = utf8_decode(&c, p, (size_t)(end - p));
    return c < CLASSES ? bpe->classes[c] : (int)CLASS_OTHER;
}

// Returns the end of the pre-token that begins at p (p < end), by GPT-2's pattern
// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
static const unsigned char *pretoken_end(const Bpe *bpe, const unsigned char *p,
                                      const unsigned char *end) {
    if (*p == '\'' && end - p > 1) {
        int a = p[1], b = end - p > 2 ? p[2] : 0;
        if (a == 's' || a == 't' || a == 'm' || a == 'd') {
            return p + 2;
        }
        if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) {
            return p + 3;
        }
    }
    const unsigned char *q = *p == ' ' && end - p > 1 ? p + 1 : p, *last = p;
    int length, kind = char_class(bpe, q, end, &length);
    if (kind != CLASS_SPACE) {
        do {
            q += length;
        } while (q < end && char_class(bpe, q, end, &length) == kind);
        return q;
    }
    // `\s+(?!\S)` leaves the last whitespace character to the next pre-token; a single whitespace
    // character is a separate pre-token (`\s+`).
    for (q = p; q < end && char_class(bpe, q, end, &length) == CLASS_SPACE; q += length) {
        last = q;
    }
    return q == end || last == p ? q : last;
}

// Returns whether encoding the text in two parts, split before the ASCII whitespace at offset
// i > 0, gives the same tokens as encoding it whole. This holds if the preceding character is not
// whitespace: no alternative of the pattern continues from such a character to whitespace, so a
// pre-token ends there, and the only alternative that looks ahead (\s+) cannot end there.
__attribute__((unused)) static int bpe_cut_is_safe(const char *text, size_t i) {
    const unsigned char *t = (const unsigned char *)text;
    size_t start = i - 1;
    uint32_t c;
    while (start > 0 && i - start < 4 && (t[start] & 0xC0) == 0x80) {
        start--;
    }
    return (size_t)utf8_decode(&c, t + start, i - start) == i - start && !is_space(c);
}

// A binary heap with the smallest item at the top.
typedef struct {
    uint64_t *items;
    size_t count, capacity;
} Heap;

static void heap_push(Heap *h, uint64_t item) {
    if (h->count == h->capacity) {
        h->capacity = 2 * h->capacity + 1024;
        h->items = (uint64_t *)grow(h->items, h->capacity * sizeof *h->items);
    }
    size_t i = h->count++;
    for (; i > 0 && h->items[(i - 1) / 2] > item; i = (i - 1) / 2) {
        h->items[i] = h->items[(i - 1) / 2];
    }
    h->items[i] = item;
}

static uint64_t heap_pop(Heap *h) {
    const uint64_t top = h->items[0], item = h->items[--h->count];
    size_t i = 0, child;
    while ((child = 2 * i + 1) < h->count) {
        child += child + 1 < h->count && h->items[child + 1] < h->items[child];
        if (item <= h->items[child]) {
            break;
        }
        h->items[i] = h->items[child];
        i = child;
    }
    h->items[i] = item;
    return top;
}

// One thread's encoder state: a direct-mapped 2-MiB cache of short pre-tokens ("words") with their
// tokens; and nodes and a heap, together 28 bytes per byte of the longest pre-token so far.
enum { WORDS = 1 << 15, WORD_BYTES = 31, WORD_TOKENS = 15 };
typedef struct {
    uint64_t key[4];  // the word's bytes, zero padding, and its length in the last byte
    uint16_t count, tokens[WORD_TOKENS];
} BpeWord;
typedef struct {
    uint32_t next, previous;  // offsets at which the adjacent tokens begin
    int32_t merged;           // id of the token that this and the next one merge into; -1: none
} BpeNode;
typedef struct {
    const Bpe *bpe;
    BpeWord *words;
    BpeNode *nodes;  // indexed by the offset at which a token begins
    size_t capacity;
    Heap heap;       // merged id << 32 | offset; outdated entries are skipped when popped
    int limit;       // only merges into tokens with lower ids are applied
} BpeEncoder;

static void bpe_encoder_open(BpeEncoder *e, const Bpe *bpe) {
    memset(e, 0, sizeof *e);
    e->bpe = bpe;
    e->words = (BpeWord *)alloc_zero(WORDS, sizeof(BpeWord));
}

static void bpe_encoder_close(BpeEncoder *e) {
    free(e->words);
    free(e->nodes);
    free(e->heap.items);
    memset(e, 0, sizeof *e);
}

// Looks up the merge of the token at offset `i` with the next token, and pushes it onto the heap.
static void bpe_offer(BpeEncoder *e, const char *text, size_t n, uint32_t i) {
    uint32_t next = e->nodes[i].next;
    int id = next < n ? bpe_id(e->bpe, text + i, e->nodes[next].next - i) : -1;
    id = id < e->limit ? id : -1;
    e->nodes[i].merged = id;
    if (id >= 0) {
        heap_push(&e->heap, (uint64_t)id << 32 | i);
    }
}

// Encodes one pre-token of n bytes into `out`, using only ids below `limit`, and returns the number
// of tokens. Every merge pops an entry, removes one token and pushes at most two entries, so the
// total time is O(n log n) and the heap has at most 2 n entries.
static int64_t bpe_merge(BpeEncoder *e, const char *text, size_t n, int limit, uint16_t *out) {
    check(n < UINT32_MAX, "a pre-token of %zu bytes", n);
    e->limit = limit;
    if (n > e->capacity) {
        e->capacity = n > 4096 ? n : 4096;
        e->nodes = (BpeNode *)grow(e->nodes, e->capacity * sizeof(BpeNode));
    }
    for (uint32_t i = 0; i < n; i++) {
        BpeNode node = {i + 1, i - 1, -1};
        e->nodes[i] = node;
    }
    for (uint32_t i = 0; i < n; i++) {
        bpe_offer(e, text, n, i);
    }
    while (e->heap.count > 0) {
        uint64_t entry = heap_pop(&e->heap);
        uint32_t i = (uint32_t)entry;
        BpeNode *node = &e->nodes[i];
        if (node->merged != (int32_t)(entry >> 32)) {
            continue;
        }
        e->nodes[node->next].merged = -1;
        node->next = e->nodes[node->next].next;
        if (node->next < n) {
            e->nodes[node->next].previous = i;
        }
        bpe_offer(e, text, n, i);
        if (i > 0) {
            bpe_offer(e, text, n, node->previous);
        }
    }
    int64_t count = 0;
    for (uint32_t i = 0; i < n; i = e->nodes[i].next) {
        out[count++] = (uint16_t)bpe_id(e->bpe, text + i, e->nodes[i].next - i);
    }
    return count;
}

// Encodes a text of n bytes into `out`, which has space for n tokens. Returns the number of tokens.
static int64_t bpe_encode(BpeEncoder *e, const char *text, size_t n, uint16_t *out) {
    const unsigned char *p = (const unsigned char *)text, *end = p + n;
    uint16_t *to = out;
    for (size_t length; p < end; p += length) {
        uint64_t key[4] = {0};  // stays 0 for a pre-token that is too long to cache
        BpeWord *word = e->words;
        length = (size_t)(pretoken_end(e->bpe, p, end) - p);
        if (length <= WORD_BYTES) {
            memcpy(key, p, length);
            key[3] |= (uint64_t)length << 56;
            word += (key[0] * 0x9E3779B97F4A7C15u + key[1] * 0xC2B2AE3D27D4EB4Fu +
                     key[2] * 0x165667B19E3779F9u + key[3] * 0x27D4EB2F165667C5u) >> 49;
        }
        if (key[3] && memcmp(word->key, key, sizeof key) == 0) {
            memcpy(to, word->tokens, word->count * sizeof(uint16_t));
            to += word->count;
            continue;
        }
        int64_t count = bpe_merge(e, (const char *)p, length, MAX_VOCABULARY, to);
        if (key[3] && count <= WORD_TOKENS) {
            memcpy(word->key, key, sizeof key);
            memcpy(word->tokens, to, (size_t)count * sizeof(uint16_t));
            word->count = (uint16_t)count;
        }
        to += count;
    }
    return to - out;
}

// Writes a token as characters (byte_character) in UTF-8. Returns the number of bytes written.
static size_t token_characters(char out[2 * BPE_LONGEST], const char *bytes, int n) {
    size_t length = 0;
    for (int i = 0; i < n; i++) {
        const int c = byte_character((unsigned char)bytes[i]);
        if (c >= 128) {
            out[length++] = (char)(192 | c >> 6);
        }
        out[length++] = (char)(c < 128 ? c : 128 | (c & 63));
    }
    return length;
}

// Returns the text of a vocabulary's merges file, *size bytes, which the caller frees. The two
// tokens of merge `id` are found by encoding its bytes with the tokens before it.
static char *bpe_merges_text(const Bpe *bpe, size_t *size) {
    char *text, word[2 * BPE_LONGEST];
    const char *bytes;
    uint16_t two[BPE_LONGEST] = {0};
    BpeEncoder e;
    FILE *f = open_memstream(&text, size);
    check(f, "no memory for a vocabulary");
    bpe_encoder_open(&e, bpe);
    fputs(merges_first_line, f);
    for (int id = 256; id < bpe->count - 1; id++) {
        const int n = bpe_bytes(bpe, id, &bytes);
        bpe_merge(&e, bytes, (size_t)n, id, two);
        const char *left;
        const int length = bpe_bytes(bpe, two[0], &left);
        fwrite(word, 1, token_characters(word, bytes, length), f);
        fputc(' ', f);
        fwrite(word, 1, token_characters(word, bytes + length, n - length), f);
        fputc('\n', f);
    }
    bpe_encoder_close(&e);
    check(fclose(f) == 0, "no memory for a vocabulary");
    return text;
}

// Sets bpe->tokenizer. Ends the run unless the merges file `bytes` is the one that
// bpe_merges_text() would write, which a checkpoint stores. The two differ if earlier merges keep
// a merge from ever being applied; with such a file, other programs would give different tokens.
static void bpe_identify(Bpe *bpe, const char *bytes, size_t n, const char *name) {
    size_t size, at = 0;
    int line = 1;
    char *text = bpe_merges_text(bpe, &size), digits[SHA256_TEXT];
    for (; at < size && at < n && text[at] == bytes[at]; at++) {
        line += text[at] == '\n';
    }
    Sha256 sha;
    sha256_start(&sha);
    sha256_add(&sha, text, size);
    sha256_end(&sha, digits);
    digits[16] = 0;
    free(text);
    const Tokenizer own = {TOKENIZER_MERGES, bpe->count, strtoull(digits, NULL, 16)};
    bpe->tokenizer = own.hash == gpt2_hash ? gpt2_tokenizer : own;
    if (size - at > (bytes[n - 1] != '\n')) {  // the last newline may be missing
        die("%s:%d: this merge can never apply: earlier merges take precedence", name, line);
    }
}

// Reads a vocabulary. Ends the run unless it is `want`, the tokenizer of the data named `of`; if
// `want` is NULL, any vocabulary is allowed.
static void bpe_open(Bpe *bpe, const char *path, const Tokenizer *want, const char *of) {
    Mapping file;
    if (mapping_open(&file, path) != 0) {
        die("cannot read vocabulary %s: %s", path, file_error());
    }
    bpe_parse_merges(bpe, file.bytes, file.size, path);
    bpe_identify(bpe, (const char *)file.bytes, file.size, path);
    mapping_close(&file);
    if (want && !tokenizers_equal(want, &bpe->tokenizer)) {
        die("--tokenizer: %s has %s, but %s has %s", path, tokenizer_text(&bpe->tokenizer).s, of,
            tokenizer_text(want).s);
    }
}

// Returns the end of PREFIX in the name of a shard, PREFIX_train*.bin or PREFIX_val*.bin, or NULL.
static const char *shard_prefix(const char *shard) {
    const char *slash = strrchr(shard, '/'), *end = NULL;
    for (const char *p = slash ? slash + 1 : shard; *p; p++) {
        end = strncmp(p, "_train", 6) == 0 || strncmp(p, "_val", 4) == 0 ? p : end;
    }
    return end;
}

// Finds the merges of a shard: `asked` (--tokenizer) or, if it is empty, PREFIX_merges.txt. Returns
// 0 if neither is known, because the shard is not called PREFIX_train... or PREFIX_val...
static int merges_find(char path[PATH_BYTES], const char *asked, const char *shard) {
    const char *end = shard_prefix(shard);
    path_print(path, "%s", asked);
    if (end && !asked[0]) {
        path_print(path, "%.*s_merges.txt", (int)(end - shard), shard);
    }
    return asked[0] || end;
}

// Writes the text of one token to `out` and returns its number of bytes. Without a vocabulary
// (bpe NULL), tokens that are not bytes are printed as numbers.
static int token_text(char out[BPE_LONGEST], const Tokenizer *t, const Bpe *bpe, Token token) {
    if (t->kind == TOKENIZER_BYTES) {
        out[0] = (char)token;
        return token < end_of_text(t) ? 1 : 0;
    }
    if (!bpe) {
        return snprintf(out, BPE_LONGEST, "%d ", token);
    }
    const char *bytes = "";
    int n = token < bpe->count ? bpe_bytes(bpe, token, &bytes) : 0;  // padding has no text
    memcpy(out, bytes, (size_t)n);
    return n;
}

// -------------------------------------------------------------------------------------------------
// 2. Token shards
// A shard is a file with a header of 256 int32, followed by uint16 tokens. The header names the
// tokenizer; all shards of a dataset must have the same one. data/tokenize also stores a SHA-256
// in the header that covers the whole file; other programs leave zeros there.

enum { SHARD_SHA256 = 8, SHARD_EDGE = 1 << 20 };  // header word where the hash starts; bytes

typedef struct {
    char path[PATH_BYTES];
    int fd;
    Tokenizer tokenizer;        // from the header
    int64_t count;              // tokens
    int64_t first_window;       // number of windows in all preceding shards
    char edges[SHA256_TEXT];    // SHA-256 of the file's first and last MiB, header included
} Shard;

static int64_t shard_file_bytes(const Shard *shard) { return LLMC_HEADER_BYTES + 2 * shard->count; }

// Reads `count` tokens of a shard into `out`, from index `first` on. Returns NULL on success,
// otherwise an error message.
static const char *shard_read(const Shard *shard, uint16_t *out, int64_t first, int64_t count) {
    return file_read(shard->fd, out, 2 * count, LLMC_HEADER_BYTES + 2 * first);
}

// Opens one shard and checks its header against the file size.
static void shard_open(Shard *shard, const char *path) {
    unsigned char header[LLMC_HEADER_BYTES] = {0};
    int64_t size = 0;
    path_print(shard->path, "%s", path);
    shard->fd = file_open(path, &size);
    const int64_t first = min_i64(size, LLMC_HEADER_BYTES);
    const char *fault = shard->fd < 0 ? file_error() : file_read(shard->fd, header, first, 0);
    if (fault) {
        die("cannot read token file %s: %s", path, fault);
    }
    if (first > 0 && !memchr(header, 0, (size_t)first)) {  // every header contains zeros
        die("%s is a text file, not token data; to tokenize it, run data/tokenize --train-bpe 8192 "
            "-o PREFIX %s", path, path);
    }
    LlmcHeader h = llmc_header(LLMC_TOKENS, header, (size_t)size, path);
    int count = h.words[2], kind = h.words[4];
    const uint32_t first_hash = (uint32_t)h.words[5], second_hash = (uint32_t)h.words[6];
    const uint64_t hash =
        (uint64_t)__builtin_bswap32(first_hash) << 32 | __builtin_bswap32(second_hash);
    const Tokenizer t = {kind, h.words[3] == 0 ? (int)GPT2_VOCABULARY : h.words[3],
                         kind == TOKENIZER_MERGES ? hash : 0};
    int64_t bytes = LLMC_HEADER_BYTES + 2 * (int64_t)count;
    if (count < 0 || size != bytes) {
        die("%s: expected %" PRId64 " bytes for the %d tokens in the header, found %" PRId64,
            path, bytes, count, size);
    }
    if (kind != TOKENIZER_GPT2 && kind != TOKENIZER_BYTES && kind != TOKENIZER_MERGES) {
        die("%s: unknown tokenizer %d in the header; expected 0 (GPT-2), 1 (bytes) or 2 (custom)",
            path, kind);
    }
    const int own = kind == TOKENIZER_MERGES;
    const int minimum = own ? (int)MIN_VOCABULARY
                      : kind == TOKENIZER_BYTES ? (int)BYTE_VOCABULARY : (int)GPT2_VOCABULARY;
    if (t.vocabulary < minimum || t.vocabulary > (own ? (int)MAX_VOCABULARY : minimum)) {
        die("%s: invalid vocabulary size %d in the header; expected %d%s", path, t.vocabulary,
            minimum, own ? " to 65535" : "");
    }
    shard->tokenizer = t;
    shard->count = count;
}

// Hashes the first and the last MiB of a shard, or all of a smaller one, into shard->edges, with
// zeros in place of the header's own hash, which other programs do not write. Returns NULL on
// success, otherwise an error message.
static const char *shard_hash_edges(Shard *shard) {
    const int64_t size = shard_file_bytes(shard), first = min_i64(size, SHARD_EDGE);
    const int64_t last = max_i64(size - SHARD_EDGE, first);
    unsigned char *edge = (unsigned char *)alloc_zero(SHARD_EDGE, 1);
    Sha256 sha;
    sha256_start(&sha);
    const char *fault = file_read(shard->fd, edge, first, 0);
    memset(edge + 4 * SHARD_SHA256, 0, sizeof sha.h);
    sha256_add(&sha, edge, (size_t)first);
    if (!fault) {
        fault = file_read(shard->fd, edge, size - last, last);
        sha256_add(&sha, edge, (size_t)(size - last));
    }
    sha256_end(&sha, shard->edges);
    free(edge);
    return fault;
}

// -------------------------------------------------------------------------------------------------
// 3. Evaluation files
// Multiple choice: each example is a context and several completions, one of them correct. The
// format is llm.c's, documented at write_evalfile in llm.c's dev/data/data_common.py: a header with
// the number of examples and the size in bytes of the largest one, then for each example uint16
// words: 65535; the example's size in bytes, index, label (the correct completion) and number of
// completions; and the length and tokens of the context and of each completion. So far, this code
// has been tested only with synthetic files, not with published ones.

// llm.c's files have four completions per example; other benchmarks have two to five.
enum { EVAL_START = 65535, EVAL_EXAMPLE_WORDS = 5, EVAL_COMPLETIONS = 8 };

typedef struct {
    const unsigned char *words;  // uint16, unaligned
    int count;
} EvalTokens;

typedef struct {
    int label, completions, longest;         // longest: tokens of the longest completion
    EvalTokens texts[1 + EVAL_COMPLETIONS];  // the context, then the completions
} EvalExample;

typedef struct {
    const char *name;
    const unsigned char *bytes;
    size_t size, longest_bytes;
    int examples, vocabulary;
    int longest_row, longest_completion, longest_at;  // tokens; tokens; its example's index
} EvalFile;

static int eval_word(const unsigned char *words, int64_t i) {
    return words[2 * i] | words[2 * i + 1] << 8;
}

// Parses example `number`, which begins at byte `at` of the file. Returns its size in bytes. Ends
// the run unless it is within the file and all its words have allowed values.
static size_t eval_example(EvalExample *x, const EvalFile *f, size_t offset, int number) {
    const unsigned char *p = f->bytes + offset;
    const size_t left = f->size - offset;
    if (left < 2 * EVAL_EXAMPLE_WORDS) {
        die("%s: example %d: unexpected end of file", f->name, number);
    }
    const int start = eval_word(p, 0), bytes = eval_word(p, 1), index = eval_word(p, 2);
    if (start != EVAL_START || index != number) {
        die("%s: example %d: start word %d, index %d; expected %d and %d", f->name, number,
            start, index, EVAL_START, number);
    }
    if ((size_t)bytes > left || (size_t)bytes > f->longest_bytes) {
        die("%s: example %d: size is %d bytes; %zu are left and the header's maximum is %zu",
            f->name, number, bytes, left, f->longest_bytes);
    }
    memset(x, 0, sizeof *x);
    x->label = eval_word(p, 3);
    x->completions = eval_word(p, 4);
    if (x->completions < 2 || x->completions > EVAL_COMPLETIONS || x->label >= x->completions) {
        die("%s: example %d: label %d, %d completions; expected 2 to %d and label < completions",
            f->name, number, x->label, x->completions, EVAL_COMPLETIONS);
    }
    int position = EVAL_EXAMPLE_WORDS;
    for (int k = 0; k <= x->completions; k++) {
        EvalTokens *tokens = &x->texts[k];
        const int space = bytes / 2 - position - 1;
        tokens->count = space >= 0 ? eval_word(p, position) : 0;
        tokens->words = p + 2 * (position + 1);
        if (tokens->count < 1 || tokens->count > space) {
            die("%s: example %d: text %d (0 is the context) has %d tokens; expected 1 to %d, the "
                "space left",
                f->name, number, k, tokens->count, space > 0 ? space : 0);
        }
        for (int i = 0; i < tokens->count; i++) {
            if (eval_word(tokens->words, i) >= f->vocabulary) {
                die("%s: example %d: token %d is outside the model's vocabulary of %d", f->name,
                    number, eval_word(tokens->words, i), f->vocabulary);
            }
        }
        position += 1 + tokens->count;
        x->longest = k && tokens->count > x->longest ? tokens->count : x->longest;
    }
    if (2 * position != bytes) {
        die("%s: example %d: size is %d bytes, but its contents take only %d", f->name,
            number, bytes, 2 * position);
    }
    return (size_t)bytes;
}

// Checks an evaluation file of `size` bytes, including every example, for a model of `vocabulary`
// tokens. `f` keeps pointers to `bytes` and `name`. Allocates nothing. Ends the run on the first
// error.
static void eval_parse(EvalFile *f, const unsigned char *bytes, size_t size, const char *name,
                       int vocabulary) {
    LlmcHeader h = llmc_header(LLMC_EVALUATION, bytes, size, name);
    int examples = h.words[2], longest_bytes = h.words[3];
    if (examples < 1 || examples > 65535 || longest_bytes < 1 || longest_bytes > 65535) {
        die("%s: header says %d examples of up to %d bytes; expected 1 to 65535 for both",
            name, examples, longest_bytes);
    }
    const EvalFile file = {.name = name, .bytes = bytes, .size = size,
                           .longest_bytes = (size_t)longest_bytes, .examples = examples,
                           .vocabulary = vocabulary};
    *f = file;
    size_t offset = LLMC_HEADER_BYTES;
    for (int i = 0; i < f->examples; i++) {
        EvalExample x;
        offset += eval_example(&x, f, offset, i);
        f->longest_row = (int)max_i64(f->longest_row, x.texts[0].count + x.longest);
        if (x.longest > f->longest_completion) {
            f->longest_completion = x.longest;
            f->longest_at = i;
        }
    }
    if (offset != size) {
        die("%s: %zu trailing bytes after the last of %d examples", name, size - offset,
            f->examples);
    }
}
