// data/tokens.c -- tokenizer, token shards and multiple-choice files.
//
// Encodes and decodes text with GPT-2's byte-level BPE; reads token shards and the files that
// --eval scores. Nothing here depends on models, options or engines. train_gpt2.c and
// data/tokenize.c include this file after data/files.c, as C11 or C++17. Formats: data/README.md.

// -------------------------------------------------------------------------------------------------
// 1. Tokenizer
// The byte tokenizer maps byte b to token b, and token 256 is <|endoftext|>. Every other tokenizer
// is a byte-level BPE: GPT-2's, one learned by `data/tokenize --train-bpe`, or one from Hugging
// Face. For valid UTF-8, GPT-2's gives the same tokens as encode_ordinary() of tiktoken.
// 1. GPT-2's pattern splits text into pre-tokens (pretoken_end). An invalid UTF-8 byte is treated
//    as a character that is not a letter, number or space.
// 2. Within a pre-token, adjacent tokens are merged repeatedly (bpe_merge). Each step merges the
//    leftmost pair with the lowest-ranked concatenation.
// 3. The ranks number first the bytes, in the order of their characters, then the merges, then the
//    special tokens. Encoding never produces special tokens. Ids are the numbers used in data and
//    models. They equal the ranks unless a vocab.json or tokenizer.json assigns others.
// 4. Threads share a Bpe, which is read-only once it is open. Each thread has its own BpeEncoder.

typedef int32_t Token;

enum { BYTE_VOCABULARY = 257, GPT2_VOCABULARY = 50257, GPT2_END_OF_TEXT = GPT2_VOCABULARY - 1 };
enum { GPT2_PADDED = 50304 };  // GPT-2's vocabulary rounded up to a multiple of 64 (nanoGPT)
enum { MIN_VOCABULARY = 257, MAX_VOCABULARY = 65535 };  // of a BPE; 257 means no merges

// Identifies a tokenizer. Token files, weights and merges store its hash. The hash covers the bytes
// of every id but no special tokens, so a model with added tokens reads the same data.
enum { TOKENIZER_GPT2 = 0, TOKENIZER_BYTES = 1, TOKENIZER_MERGES = 2 };
typedef struct {
    int kind, vocabulary;  // vocabulary: the highest id, including `end`, plus 1; 0 if unknown
    Token end;             // end-of-text token, or -1
    uint64_t hash;         // first 8 bytes of a SHA-256 (bpe_identify), or 0 if unknown
} Tokenizer;
static const Tokenizer gpt2_tokenizer = {TOKENIZER_GPT2, GPT2_VOCABULARY, GPT2_END_OF_TEXT,
                                         0x1CE1664773C50F3Eu};
static const Tokenizer byte_tokenizer = {TOKENIZER_BYTES, BYTE_VOCABULARY, BYTE_VOCABULARY - 1, 1};

// Returns whether two tokenizers agree. An unknown one agrees with any other of the same size.
static int tokenizers_agree(const Tokenizer *a, const Tokenizer *b) {
    return a->hash && b->hash ? a->hash == b->hash
                              : !a->vocabulary || !b->vocabulary || a->vocabulary == b->vocabulary;
}

static ShortText tokenizer_text(const Tokenizer *t) {
    ShortText text;
    const int n = t->kind == TOKENIZER_MERGES && t->vocabulary
                      ? snprintf(text.s, sizeof text.s, "%d ", t->vocabulary) : 0;
    snprintf(text.s + n, sizeof text.s - (size_t)n,
             t->hash == byte_tokenizer.hash   ? "bytes"
             : t->hash == gpt2_tokenizer.hash ? "GPT-2's tokens"
                                              : "custom tokens (%08x)",
             (unsigned)(t->hash >> 32));
    return text;
}

// Fails unless two tokenizers agree. `of_a` and `of_b` are the files that they come from.
static void tokenizers_require(const char *option, const Tokenizer *a, const char *of_a,
                               const Tokenizer *b, const char *of_b, const char *advice) {
    if (!tokenizers_agree(a, b)) {
        die("%s: %s has %s, but %s has %s%s", option, of_a, tokenizer_text(a).s, of_b,
            tokenizer_text(b).s, advice);
    }
}

// Code points of the Unicode categories L and N as alternating lengths of gaps and runs, encoded
// for class_runs(). From dev/tools/unicode_tables.py, with Unicode 16.0 as in tiktoken 0.14.0.
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
enum { CLASSES = 0x32400 };  // higher code points are CLASS_OTHER

// Sets the class of all code points in `runs`. Each character encodes a digit d, its distance from
// '#'. The last digit of a number is below 76; the digits before it are at least 76. The value is
// 76 q + d, where d is the last digit and q has the base-16 digits d - 75 (1 to 16) of the others.
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

static int is_space(uint32_t c) {
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

// Returns the character for a byte in tokenizer files (bytes_to_unicode in GPT-2's encoder.py).
// Printable Latin-1 characters represent themselves; U+0100 to U+0143 stand for the other 68 bytes.
enum { BYTE_CHARACTERS = 256 + 68 };
static int byte_character(int b) {
    return b <= 32 ? 256 + b : b < 127 ? b : b <= 160 ? 289 + b - 127 : b == 173 ? 323 : b;
}

// A vocabulary, which maps between ids and bytes and classifies characters. At 5 MiB, it is too
// large for the stack. All tokens together have at most BPE_TEXT bytes, each at most BPE_LONGEST.
enum { BPE_SLOTS = 1 << 17, BPE_TEXT = 4 << 20, BPE_LONGEST = 512, NO_ID = 65535 };
typedef struct {
    Tokenizer tokenizer;                   // set by bpe_open
    int count, ordinary;                   // number of tokens; number of bytes and merges
    int plain;                             // 1 if ids are ranks and the last is end of text
    uint32_t start[MAX_VOCABULARY + 1];    // offset of each token's bytes in `text`
    uint32_t slots[BPE_SLOTS];             // hash table: 16 bits of the hash, rank + 1; 0 if free
    uint16_t splits[MAX_VOCABULARY];       // length of the left token of each merge
    uint16_t ids[MAX_VOCABULARY];          // id of each rank, or NO_ID
    uint16_t ranks[MAX_VOCABULARY + 1];    // rank of each id + 1, or 0
    unsigned char classes[CLASSES];
    int16_t byte_of[BYTE_CHARACTERS];      // inverse of byte_character; -1 if there is none
    char text[BPE_TEXT];
} Bpe;

// Points *bytes to the bytes of a token, which are not NUL-terminated. Returns their number.
static int bpe_bytes(const Bpe *bpe, int token, const char **bytes) {
    *bytes = bpe->text + bpe->start[token];
    return (int)(bpe->start[token + 1] - bpe->start[token]);
}

// Returns the slot of the token with these n bytes (1 to BPE_LONGEST), or the free slot where it
// belongs. Sets *tag to the upper half of the slot's value.
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

// Returns the rank of the byte or merge with these n bytes, or -1.
static int bpe_rank(const Bpe *bpe, const char *bytes, size_t n) {
    uint32_t tag;
    if (n == 0 || n > BPE_LONGEST) {
        return -1;
    }
    return (int)(bpe->slots[bpe_slot(bpe, bytes, n, &tag)] & 0xFFFF) - 1;
}

// Appends a special token, which bpe_rank() does not find. Returns 0 if the vocabulary is full.
static int bpe_add_special(Bpe *bpe, const char *bytes, size_t n) {
    const uint32_t begin = bpe->start[bpe->count];
    if (n == 0 || n > BPE_LONGEST || bpe->count == MAX_VOCABULARY || n > BPE_TEXT - begin) {
        return 0;
    }
    memcpy(bpe->text + begin, bytes, n);
    bpe->ids[bpe->count] = NO_ID;
    bpe->start[++bpe->count] = begin + (uint32_t)n;
    return 1;
}

// Appends a byte or merge. Returns 0 if the vocabulary is full or already contains the token.
static int bpe_add(Bpe *bpe, const char *bytes, size_t n) {
    uint32_t tag;
    if (bpe_rank(bpe, bytes, n) >= 0 || !bpe_add_special(bpe, bytes, n)) {
        return 0;
    }
    const uint32_t slot = bpe_slot(bpe, bytes, n, &tag);
    bpe->slots[slot] = tag | (uint32_t)bpe->count;
    bpe->ordinary = bpe->count;
    return 1;
}

// Returns the rank of the byte, merge or special token with these n bytes, or -1.
static int token_rank(const Bpe *bpe, const char *bytes, size_t n) {
    const char *found;
    int rank = bpe_rank(bpe, bytes, n);
    for (int i = bpe->ordinary; rank < 0 && i < bpe->count; i++) {
        rank = bpe_bytes(bpe, i, &found) == (int)n && memcmp(found, bytes, n) == 0 ? i : -1;
    }
    return rank;
}

// Assigns an id to a token. Returns 0 if either one already has a different assignment.
static int bpe_number(Bpe *bpe, int rank, int64_t id) {
    if (rank < 0 || id < 0 || id >= NO_ID || (bpe->ranks[id] && bpe->ranks[id] != rank + 1) ||
        (bpe->ids[rank] != NO_ID && bpe->ids[rank] != id)) {
        return 0;
    }
    bpe->ids[rank] = (uint16_t)id;
    bpe->ranks[id] = (uint16_t)(rank + 1);
    return 1;
}

// Appends <|endoftext|> and uses the ranks as ids. Returns 0 if the vocabulary is full.
static const char marker[] = "<|endoftext|>";
enum { MARKER_BYTES = sizeof marker - 1 };
static int bpe_number_plainly(Bpe *bpe) {
    bpe->plain = bpe_add_special(bpe, marker, MARKER_BYTES);
    bpe->tokenizer.end = bpe->ordinary;
    for (int rank = 0; rank < bpe->count; rank++) {
        bpe_number(bpe, rank, rank);
    }
    return bpe->plain;
}

// Starts a vocabulary that contains the 256 bytes, in the order of their characters.
static void bpe_begin(Bpe *bpe) {
    memset(bpe, 0, offsetof(Bpe, byte_of));
    memset(bpe->byte_of, -1, sizeof bpe->byte_of);
    class_runs(bpe->classes, letter_runs, CLASS_LETTER);
    class_runs(bpe->classes, number_runs, CLASS_NUMBER);
    for (uint32_t c = 0; c <= 0x3000; c++) {
        bpe->classes[c] = is_space(c) ? (unsigned char)CLASS_SPACE : bpe->classes[c];
    }
    for (int b = 0; b < 256; b++) {
        bpe->byte_of[byte_character(b)] = (int16_t)b;
    }
    for (int c = 0; c < BYTE_CHARACTERS; c++) {
        const char byte = (char)bpe->byte_of[c];
        if (bpe->byte_of[c] >= 0) {
            bpe_add(bpe, &byte, 1);
        }
    }
}

// Writes the path of GPT-2's merges: `asked` (--tokenizer) if it is not empty, or data/vocab.bpe.
// Returns 0 if the default path is used and does not exist.
static int bpe_find(char path[PATH_BYTES], const char *asked) {
    path_print(path, "%s", asked[0] ? asked : "data/vocab.bpe");
    return asked[0] || access(path, F_OK) == 0;
}

// Returns the class (CLASS_*) of the character at p and sets *length to its length in bytes.
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

// Returns the end of the pre-token that starts at p (p < end), according to GPT-2's pattern
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
    // `\s+(?!\S)` leaves the last whitespace character to the next pre-token. A single whitespace
    // character matches only `\s+` and is a pre-token by itself.
    for (q = p; q < end && char_class(bpe, q, end, &length) == CLASS_SPACE; q += length) {
        last = q;
    }
    return q == end || last == p ? q : last;
}

// Returns whether a text gives the same tokens when encoded in two parts, split before the ASCII
// whitespace at offset i > 0. This is so if the preceding character is not whitespace. In that
// case, no alternative of the pattern matches across the split, and `\s+(?!\S)` cannot end there.
__attribute__((unused)) static int bpe_cut_is_safe(const char *text, size_t i) {
    const unsigned char *t = (const unsigned char *)text;
    size_t start = i - 1;
    uint32_t c;
    while (start > 0 && i - start < 4 && (t[start] & 0xC0) == 0x80) {
        start--;
    }
    return (size_t)utf8_decode(&c, t + start, i - start) == i - start && !is_space(c);
}

// A binary min-heap.
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

// Encoder state of one thread. A direct-mapped 2 MiB cache holds short pre-tokens ("words"). The
// nodes and the heap take 28 bytes per byte of the longest pre-token so far.
enum { WORDS = 1 << 15, WORD_BYTES = 31, WORD_TOKENS = 15 };
typedef struct {
    uint64_t key[4];  // the word, zero padding, and its length in the last byte
    uint16_t count, tokens[WORD_TOKENS];
} BpeWord;
typedef struct {
    uint32_t next, previous;  // offsets of the adjacent tokens
    int32_t merged;           // rank of the concatenation with the next token, or -1
} BpeNode;
typedef struct {
    const Bpe *bpe;
    BpeWord *words;
    BpeNode *nodes;  // indexed by the offset of a token
    size_t capacity;
    Heap heap;       // items: merged rank << 32 | offset; stale items are skipped
    int limit;       // only ranks below it are merged
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

// Looks up the merge of the token at offset i with the next one and pushes it onto the heap.
static void bpe_offer(BpeEncoder *e, const char *text, size_t n, uint32_t i) {
    uint32_t next = e->nodes[i].next;
    int rank = next < n ? bpe_rank(e->bpe, text + i, e->nodes[next].next - i) : -1;
    rank = rank < e->limit ? rank : -1;
    e->nodes[i].merged = rank;
    if (rank >= 0) {
        heap_push(&e->heap, (uint64_t)rank << 32 | i);
    }
}

// Encodes one pre-token of n bytes, using only bytes and ranks below `limit`. Returns the number of
// ranks written to `out`. Takes O(n log n): a merge removes a token and pushes at most two items.
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
        out[count++] = (uint16_t)bpe_rank(e->bpe, text + i, e->nodes[i].next - i);
    }
    return count;
}

// Encodes a text of n bytes. Writes at most n ids to `out` and returns their number.
static int64_t bpe_encode(BpeEncoder *e, const char *text, size_t n, uint16_t *out) {
    const unsigned char *p = (const unsigned char *)text, *end = p + n;
    uint16_t *to = out;
    for (size_t length; p < end; p += length) {
        uint64_t key[4] = {0};  // key[3] stays 0 if the pre-token is too long to cache
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
        for (int64_t i = 0; i < count; i++) {
            const uint16_t rank = to[i];
            to[i] = e->bpe->ids[rank];
            if (to[i] == NO_ID) {  // only bytes may lack an id (bpe_identify)
                die("the text contains byte value %d, for which the tokenizer has no token",
                    (unsigned char)e->bpe->text[e->bpe->start[rank]]);
            }
        }
        if (key[3] && count <= WORD_TOKENS) {
            memcpy(word->key, key, sizeof key);
            memcpy(word->tokens, to, (size_t)count * sizeof(uint16_t));
            word->count = (uint16_t)count;
        }
        to += count;
    }
    return to - out;
}

// Writes a token as UTF-8 characters (byte_character). Returns the number of bytes written.
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

// The files that store a tokenizer: merges.txt, vocab.json and tokenizer_config.json. A plain
// tokenizer needs only the first one.
enum { FILE_OF_MERGES, FILE_OF_IDS, FILE_OF_ROLES, TOKENIZER_FILES };

// Returns the contents of a tokenizer file, which the caller frees, and stores their size in *size.
// `length` is the maximum sequence length of the model, or 0 if it is unknown.
static char *tokenizer_file_text(const Bpe *bpe, int file, int length, size_t *size) {
    char *text, word[2 * BPE_LONGEST];
    const char *bytes;
    FILE *f = open_memstream(&text, size);
    check(f, "out of memory for a vocabulary");
    fputs(file == FILE_OF_MERGES ? "#version: 0.2\n" : "{", f);
    for (int rank = 256; file == FILE_OF_MERGES && rank < bpe->ordinary; rank++) {
        const int n = bpe_bytes(bpe, rank, &bytes), split = bpe->splits[rank];
        fwrite(word, 1, token_characters(word, bytes, split), f);
        fputc(' ', f);
        fwrite(word, 1, token_characters(word, bytes + split, n - split), f);
        fputc('\n', f);
    }
    for (int rank = 0, some = 0; file == FILE_OF_IDS && rank < bpe->count; rank++) {
        const int n = bpe_bytes(bpe, rank, &bytes), special = rank >= bpe->ordinary;
        if (bpe->ids[rank] != NO_ID) {
            fputs(some++ ? ", \"" : "\"", f);
            json_text(f, special ? bytes : word,
                      special ? (size_t)n : token_characters(word, bytes, n));
            fprintf(f, "\": %d", bpe->ids[rank]);
        }
    }
    if (file == FILE_OF_ROLES) {
        fputs("\"tokenizer_class\": \"GPT2Tokenizer\", \"add_prefix_space\": false", f);
        if (length) {
            fprintf(f, ", \"model_max_length\": %d", length);
        }
        for (int i = 0; bpe->tokenizer.end >= 0 && i < 3; i++) {
            static const char *const roles[] = {"bos", "eos", "unk"};
            const int n = bpe_bytes(bpe, bpe->ranks[bpe->tokenizer.end] - 1, &bytes);
            fprintf(f, ",%s\"%s_token\": \"", i ? " " : "\n", roles[i]);
            json_text(f, bytes, (size_t)n);
            fputc('"', f);
        }
    }
    fputs(file == FILE_OF_MERGES ? "" : "}\n", f);
    check(fclose(f) == 0, "out of memory for a vocabulary");
    return text;
}

// Sets bpe->tokenizer, except for the end of text. The hash covers merges.txt and, unless all ids
// equal the ranks, the ids of bytes and merges.
static void bpe_identify(Bpe *bpe, const char *name) {
    size_t size;
    char digits[SHA256_TEXT];
    Tokenizer *t = &bpe->tokenizer;
    int plain = 1;
    t->vocabulary = t->end + 1;
    for (int rank = 0; rank < bpe->ordinary; rank++) {
        const int id = bpe->ids[rank];
        if (id == NO_ID && rank > 255) {  // a byte without an id may be absent from texts
            die("%s: merge %d produces a token without an id", name, rank - 255);
        }
        plain &= id == rank;
        t->vocabulary = id != NO_ID && id >= t->vocabulary ? id + 1 : t->vocabulary;
    }
    char *text = tokenizer_file_text(bpe, FILE_OF_MERGES, 0, &size);
    Sha256 sha;
    sha256_start(&sha);
    sha256_add(&sha, text, size);
    sha256_add(&sha, bpe->ids, plain ? 0 : sizeof *bpe->ids * (size_t)bpe->ordinary);
    sha256_end(&sha, digits);
    digits[16] = 0;
    free(text);
    t->hash = strtoull(digits, NULL, 16);
    const int gpt2 = t->hash == gpt2_tokenizer.hash && t->end == GPT2_END_OF_TEXT;
    t->kind = gpt2 ? TOKENIZER_GPT2 : TOKENIZER_MERGES;
}

// The state of reading a tokenizer's files. Error messages contain the name of the current file.
typedef struct {
    Bpe *bpe;
    BpeEncoder encoder;
    const char *name;
    char eos[BPE_LONGEST];  // end of text as a string, or ""; as an id, or -1
    int64_t end;
} BpeReader;

static void reader_open(BpeReader *r, Bpe *bpe, const char *name) {
    r->bpe = bpe;
    r->name = name;
    r->eos[0] = 0;
    r->end = -1;
    bpe_begin(bpe);
    bpe_encoder_open(&r->encoder, bpe);
}

// Decodes a token written as characters (byte_character). Returns its number of bytes, or -1 if a
// character represents no byte or the token is longer than `most` bytes.
static int word_bytes(const Bpe *bpe, char *out, int most, const char *text, size_t length) {
    int n = 0;
    for (size_t i = 0; i < length; n++) {
        uint32_t c;
        i += (size_t)utf8_decode(&c, (const unsigned char *)text + i, length - i);
        if (n == most || c >= BYTE_CHARACTERS || bpe->byte_of[c] < 0) {
            return -1;
        }
        out[n] = (char)bpe->byte_of[c];
    }
    return n;
}

// Adds the merge "left right" on line `line` of the file. Fails if earlier merges prevent it from
// ever being applied, in which case other programs would produce different tokens.
static void merge_read(BpeReader *r, const char *text, size_t length, int line) {
    Bpe *bpe = r->bpe;
    char both[BPE_LONGEST];
    const char *bytes, *space = (const char *)memchr(text, ' ', length);
    uint16_t two[BPE_LONGEST] = {0};
    const size_t first = space ? (size_t)(space - text) : 0, second = first + (space != NULL);
    const int left = word_bytes(bpe, both, BPE_LONGEST, text, first);
    const int right = left < 0 ? -1 : word_bytes(bpe, both + left, BPE_LONGEST - left,
                                                 text + second, length - second);
    if (right < 0) {
        die("%s:%d: expected two tokens in GPT-2's byte alphabet with at most %d bytes in total",
            r->name, line, BPE_LONGEST);
    }
    const size_t n = (size_t)left + (size_t)right;
    if (bpe_rank(bpe, both, (size_t)left) < 0 || bpe_rank(bpe, both + left, (size_t)right) < 0 ||
        bpe_rank(bpe, both, n) >= 0) {
        die("%s:%d: a merge must join two earlier tokens into a new one", r->name, line);
    }
    if (bpe_merge(&r->encoder, both, n, bpe->count, two) != 2 ||
        bpe_bytes(bpe, two[0], &bytes) != left) {
        die("%s:%d: this merge can never apply, as earlier merges take precedence", r->name, line);
    }
    bpe->splits[bpe->count] = (uint16_t)left;
    if (bpe->count == MAX_VOCABULARY - 1 || !bpe_add(bpe, both, n)) {
        die("%s:%d: too many merges; expected at most %d merges and %d bytes in total", r->name,
            line, MAX_VOCABULARY - MIN_VOCABULARY, BPE_TEXT);
    }
}

// Reads a vocab.bpe or merges.txt: a `#version` line (not in older files), then one merge per line.
static void merges_read(BpeReader *r, Mapping map) {
    const char *text = (const char *)map.bytes, *end = text + map.size;
    text += map.size > 2 && memcmp(text, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;  // a byte order mark
    for (int line = 1; text < end || line == 1; line++) {
        const char *newline = (const char *)memchr(text, '\n', (size_t)(end - text));
        size_t n = (size_t)((newline ? newline : end) - text);
        n -= n && text[n - 1] == '\r';
        const int version = line == 1 && n > 7 && memcmp(text, "#version", 8) == 0;
        if (!version && (n || line == 1)) {
            merge_read(r, text, n, line);
        }
        text = newline ? newline + 1 : end;
    }
}

// Assigns an id to the token written as `text`. A token that no merge produces is special.
static void token_read(const BpeReader *r, const char *text, int64_t id) {
    Bpe *bpe = r->bpe;
    char decoded[BPE_LONGEST];
    const int n = word_bytes(bpe, decoded, BPE_LONGEST, text, strlen(text));
    const char *bytes = n > 0 ? decoded : text;  // a special token may contain other characters
    const size_t length = n > 0 ? (size_t)n : strlen(text);
    int rank = token_rank(bpe, bytes, length);
    rank = rank < 0 && bpe_add_special(bpe, bytes, length) ? bpe->count - 1 : rank;
    if (!bpe_number(bpe, rank, id)) {
        die("%s: token '%.40s' cannot have the id %" PRId64 "; expected tokens of 1 to %d bytes "
            "and unique ids below %d", r->name, text, id, BPE_LONGEST, NO_ID);
    }
}

// Reads {"token": id, ...} from a vocab.json, added_tokens.json or part of a tokenizer.json.
static void tokens_read(const BpeReader *r, Json j) {
    char text[2 * BPE_LONGEST + 2];
    for (int n = 0; json_next(&j, &n, '{', text, sizeof text);) {
        const int64_t id = json_count(&j);
        if (!j.fault) {
            token_read(r, text, id);
        }
    }
    json_check(&j, r->name);
}

// Writes the path of `name` next to a tokenizer file: FOLDER/name, or PREFIX_name if the file is
// PREFIX_merges.txt. Returns whether it exists.
static int file_beside(char path[PATH_BYTES], const char *file, const char *name) {
    static const char *const ends[] = {"merges.txt", "vocab.bpe", "tokenizer.json"};
    const size_t n = strlen(file);
    for (int i = 0; i < 3; i++) {
        const size_t length = strlen(ends[i]);
        if (n >= length && strcmp(file + n - length, ends[i]) == 0) {
            path_print(path, "%.*s%s", (int)(n - length), file, name);
            return access(path, F_OK) == 0;
        }
    }
    return 0;
}

// Finds the tokenizer file in the folder of FOLDER/merges.txt. Returns 0 if there is none.
static int tokenizer_find(char path[PATH_BYTES], const char *merges) {
    return file_beside(path, merges, "tokenizer.json") || file_beside(path, merges, "merges.txt") ||
           file_beside(path, merges, "vocab.bpe");
}

// Reads the merges of a tokenizer.json: ["a", "b"] or, in older files, "a b".
static void json_merges_read(BpeReader *r, Json j) {
    enum { WORD = 2 * BPE_LONGEST + 2 };
    char text[2 * WORD];
    for (int n = 0; json_next(&j, &n, '[', NULL, 0);) {
        const int is_pair = json_take(&j, '[');
        json_string(&j, text, WORD);
        if (is_pair) {
            const size_t length = strlen(text);
            text[length] = ' ';
            json_take(&j, ',');
            json_string(&j, text + length + 1, WORD);
            if (!json_take(&j, ']')) {
                json_fail(&j, "expected two tokens");
            }
        }
        if (!j.fault) {
            merge_read(r, text, strlen(text), n);
        }
    }
    json_check(&j, r->name);
}

// Reads the merges, ids and end of text from a tokenizer.json (`whole`), config.json or
// tokenizer_config.json. Fails if a setting would change how text is tokenized.
static void tokenizer_json_read(BpeReader *r, Json j, int whole) {
    static const char *const settings[][2] = {
        {"special", "true"}, {"add_prefix_space", "false"}, {"add_bos_token", "false"},
        {"model.type", "BPE"}, {"model.dropout", "0|null"},
        {"model.byte_fallback", "false"}, {"model.continuing_subword_prefix", "|null"},
        {"model.end_of_word_suffix", "|null"}, {"model.ignore_merges", "false"},
        {"normalizer", "null"}, {"pre_tokenizer.type", "ByteLevel"},
        {"pre_tokenizer.add_prefix_space", "false"}, {"pre_tokenizer.use_regex", "true"},
        {"post_processor.special_tokens", "{}"},
        {"post_processor.type", "ByteLevel|TemplateProcessing"}};
    enum { SETTINGS = sizeof settings / sizeof *settings };
    static const char *const lists[] = {"added_tokens", "added_tokens_decoder"};
    char text[2 * BPE_LONGEST + 2], number[16] = "";
    json_skip(&j);
    json_end(&j, r->name);
    json_require(j, 0, r->name, settings + 1, whole ? SETTINGS - 1 : 2);
    if (whole && (!json_find(&j, 0, "model.vocab") || !json_find(&j, 0, "model.merges") ||
                  !json_find(&j, 0, "pre_tokenizer.type"))) {
        die("%s: not the tokenizer.json of a byte-level BPE", r->name);
    }
    if (json_find(&j, 0, "model.merges")) {
        json_merges_read(r, j);
    }
    if (json_find(&j, 0, "model.vocab")) {
        tokens_read(r, j);
    }
    for (int i = 0; i < 2; i++) {  // an array of objects with "id"; an object with ids as keys
        const int found = json_find(&j, 0, lists[i]) && json_peek(&j) == "[{"[i];
        for (int n = 0; found && json_next(&j, &n, "[{"[i], number, sizeof number); json_skip(&j)) {
            const size_t from = j.offset;
            const int64_t id =
                json_get_count(&j, from, "id", number[0] ? strtoll(number, NULL, 10) : -1);
            json_require(j, from, r->name, settings, 1);
            if (json_get(&j, from, "content", text, sizeof text) && id >= 0) {
                token_read(r, text, id);
            }
            j.offset = j.fault ? j.offset : from;
        }
    }
    if (!json_get(&j, 0, "eos_token.content", r->eos, sizeof r->eos)) {
        json_get(&j, 0, "eos_token", r->eos, sizeof r->eos);
    }
    json_check(&j, r->name);
    if (json_find(&j, 0, "eos_token_id")) {
        json_take(&j, '[');  // the first of a list
        const int64_t id = json_count(&j);
        r->end = j.fault ? r->end : id;  // null and -1 are no token
    }
}

static int token_exists(const Bpe *bpe, int64_t id) {
    return id >= 0 && id < NO_ID && bpe->ranks[id];
}

// Sets the end of text to the token `id` or, if there is no such token, to `eos` or <|endoftext|>.
static void bpe_set_end(Bpe *bpe, int64_t id, const char *eos) {
    const char *const names[] = {eos, marker};
    for (int i = 0; i < 2 && !token_exists(bpe, id); i++) {
        const int rank = token_rank(bpe, names[i], strlen(names[i]));
        id = rank < 0 || bpe->ids[rank] == NO_ID ? -1 : bpe->ids[rank];
    }
    bpe->tokenizer.end = (Token)id;
}

// Reads a tokenizer from a folder with a tokenizer.json or merges.txt, or from one of these files
// and those next to it. The end of text is eos_token_id of config.json, else eos_token, else
// <|endoftext|>. If `want`, the tokenizer of data file `of`, is not NULL, fails unless they agree.
static void bpe_open(Bpe *bpe, const char *path, const Tokenizer *want, const char *of) {
    static const char *const names[] = {"", "vocab.json", "added_tokens.json", "config.json",
                                        "tokenizer_config.json"};
    char file[PATH_BYTES], beside[PATH_BYTES];
    BpeReader r;
    Mapping map;
    path_print(beside, "%s/merges.txt", path);
    if (!tokenizer_find(file, beside) && !file_beside(file, path, "tokenizer.json")) {
        path_print(file, "%s", path);
    }
    reader_open(&r, bpe, file);
    for (int i = 0, is_json = 0; i < 5; i += i == 0 && is_json ? 3 : 1) {
        if (i && !file_beside(beside, file, names[i])) {
            i == 1 ? bpe_number_plainly(bpe) : 0;
            continue;
        }
        r.name = i ? beside : file;
        if (mapping_open(&map, r.name) != 0) {
            die("cannot read vocabulary %s: %s", r.name, file_error());
        }
        Json j = {map.bytes, 0, map.size, NULL};
        is_json = json_peek(&j) == '{';
        if (i == 1 || i == 2) {
            tokens_read(&r, j);
        } else if (i || is_json) {
            tokenizer_json_read(&r, j, i == 0);
        } else {
            merges_read(&r, map);
        }
        mapping_close(&map);
    }
    bpe_encoder_close(&r.encoder);
    bpe_set_end(bpe, r.end, r.eos);
    if (bpe->plain && bpe->tokenizer.end < bpe->ordinary) {
        die("%s: config.json sets the end of text to %d, but without vocab.json it is %d", file,
            bpe->tokenizer.end, bpe->ordinary);
    }
    bpe->plain &= bpe->count == bpe->ordinary + 1;
    bpe_identify(bpe, file);
    if (want) {
        tokenizers_require("--tokenizer", &bpe->tokenizer, path, want, of, "");
    }
}

// Returns the end of PREFIX in the shard name PREFIX_train*.bin or PREFIX_val*.bin, or NULL.
static const char *shard_prefix(const char *shard) {
    const char *slash = strrchr(shard, '/'), *end = NULL;
    for (const char *p = slash ? slash + 1 : shard; *p; p++) {
        end = strncmp(p, "_train", 6) == 0 || strncmp(p, "_val", 4) == 0 ? p : end;
    }
    return end;
}

// Writes the path of a shard's merges: `asked` (--tokenizer) if it is not empty, or
// PREFIX_merges.txt. Returns 0 if neither is available because the shard's name has no PREFIX.
static int merges_find(char path[PATH_BYTES], const char *asked, const char *shard) {
    const char *end = shard_prefix(shard);
    path_print(path, "%s", asked);
    if (end && !asked[0]) {
        path_print(path, "%.*s_merges.txt", (int)(end - shard), shard);
    }
    return asked[0] || end;
}

// Writes a token's text, or its number if bpe is NULL, to `out`. Returns the number of bytes.
static int token_text(char out[BPE_LONGEST], const Tokenizer *t, const Bpe *bpe, Token token) {
    if (t->kind == TOKENIZER_BYTES) {
        out[0] = (char)token;
        return token < t->end ? 1 : 0;
    }
    if (!bpe) {
        return snprintf(out, BPE_LONGEST, "%d ", token);
    }
    const char *bytes = "";
    int n = bpe->ranks[token] ? bpe_bytes(bpe, bpe->ranks[token] - 1, &bytes) : 0;
    memcpy(out, bytes, (size_t)n);
    return n;
}

// -------------------------------------------------------------------------------------------------
// 2. Token shards
// A shard consists of a header of 256 int32 words, followed by uint16 tokens. The header identifies
// the tokenizer. data/tokenize also stores a SHA-256 of the file there; other programs write zeros.

enum { SHARD_SHA256 = 8, SHARD_EDGE = 1 << 20 };  // first header word of the hash; bytes

typedef struct {
    char path[PATH_BYTES];
    int fd;                     // -1 if the file is opened for each read
    Tokenizer tokenizer;        // from the header
    int64_t count;              // tokens
    int64_t first_window;       // number of windows in preceding shards
    char edges[SHA256_TEXT];    // SHA-256 of the file's first and last MiB, with the header
} Shard;

static int64_t shard_file_bytes(const Shard *shard) { return LLMC_HEADER_BYTES + 2 * shard->count; }

// Reads `bytes` bytes at `offset`. Returns NULL on success, otherwise an error message.
static const char *shard_bytes(const Shard *shard, void *out, int64_t bytes, int64_t offset) {
    int64_t size = shard_file_bytes(shard);
    const int fd = shard->fd < 0 ? file_open(shard->path, &size) : shard->fd;
    const char *fault = fd < 0                            ? file_error()
                        : size != shard_file_bytes(shard) ? "its size has changed"
                                                          : file_read(fd, out, bytes, offset);
    if (fd >= 0 && fd != shard->fd) {
        close(fd);
    }
    return fault;
}

static const char *shard_read(const Shard *shard, uint16_t *out, int64_t first, int64_t count) {
    return shard_bytes(shard, out, 2 * count, LLMC_HEADER_BYTES + 2 * first);
}

// Returns the tokenizer named in the header of a token or evaluation file. Files from llm.c do not
// name one, because their tokens are always GPT-2's.
static Tokenizer tokenizer_of_header(const LlmcHeader *h, int vocabulary) {
    const uint32_t first = (uint32_t)h->words[5], second = (uint32_t)h->words[6];
    Tokenizer t = h->words[4] == TOKENIZER_BYTES ? byte_tokenizer : gpt2_tokenizer;
    if (h->words[4] == TOKENIZER_MERGES) {
        t.hash = (uint64_t)__builtin_bswap32(first) << 32 | __builtin_bswap32(second);
    }
    t.kind = h->words[4];
    t.vocabulary = vocabulary ? vocabulary : t.vocabulary;
    t.end = t.vocabulary - 1;
    return t;
}

static void shard_open(Shard *shard, const char *path) {
    static const int sizes[][2] = {{GPT2_VOCABULARY, GPT2_VOCABULARY},
                                   {BYTE_VOCABULARY, BYTE_VOCABULARY},
                                   {MIN_VOCABULARY, MAX_VOCABULARY}};
    unsigned char header[LLMC_HEADER_BYTES] = {0};
    int64_t size = 0;
    path_print(shard->path, "%s", path);
    shard->fd = file_open(path, &size);
    const int64_t first = min_i64(size, LLMC_HEADER_BYTES);
    const char *fault = shard->fd < 0 ? file_error() : file_read(shard->fd, header, first, 0);
    if (fault) {
        die("cannot read token file %s: %s", path, fault);
    }
    if (first > 0 && !memchr(header, 0, (size_t)first)) {  // a header contains zeros
        die("%s is a text file, not token data; to tokenize it, run data/tokenize --train-bpe 8192 "
            "-o PREFIX %s", path, path);
    }
    LlmcHeader h = llmc_header(LLMC_TOKENS, header, (size_t)size, path);
    const int count = h.words[2], kind = h.words[4];
    const Tokenizer t = tokenizer_of_header(&h, h.words[3]);
    shard->tokenizer = t;
    shard->count = count;
    if (count < 0 || size != shard_file_bytes(shard)) {
        die("%s: expected %" PRId64 " bytes for the %d tokens given in the header, found %" PRId64,
            path, shard_file_bytes(shard), count, size);
    }
    if (kind < TOKENIZER_GPT2 || kind > TOKENIZER_MERGES || t.vocabulary < sizes[kind][0] ||
        t.vocabulary > sizes[kind][1]) {
        die("%s: the header has tokenizer %d with a vocabulary of %d; expected 0 (GPT-2, 50257), "
            "1 (bytes, 257) or 2 (custom, 257 to 65535)", path, kind, t.vocabulary);
    }
}

// Hashes the first and last MiB of a shard, or all of a smaller one, into shard->edges, with zeros
// in place of the hash in the header. Returns NULL on success, otherwise an error message.
static const char *shard_hash_edges(Shard *shard) {
    const int64_t size = shard_file_bytes(shard), first = min_i64(size, SHARD_EDGE);
    const int64_t last = max_i64(size - SHARD_EDGE, first);
    unsigned char *edge = (unsigned char *)alloc_zero(SHARD_EDGE, 1);
    Sha256 sha;
    sha256_start(&sha);
    const char *fault = shard_bytes(shard, edge, first, 0);
    memset(edge + 4 * SHARD_SHA256, 0, sizeof sha.h);
    sha256_add(&sha, edge, (size_t)first);
    if (!fault) {
        fault = shard_bytes(shard, edge, size - last, last);
        sha256_add(&sha, edge, (size_t)(size - last));
    }
    sha256_end(&sha, shard->edges);
    free(edge);
    return fault;
}

// -------------------------------------------------------------------------------------------------
// 3. Evaluation files
// Each multiple-choice example has a context and several completions, exactly one of them correct.
// The format is llm.c's (write_evalfile in dev/data/data_common.py). A header stores the number of
// examples and the size of the largest one in bytes. Each example consists of uint16 words: 65535;
// its size in bytes, index, label (the correct completion) and number of completions; then the
// length and the tokens of the context and of each completion. llm.c's files have four completions
// per example, and other benchmarks have two to five. Only synthetic files have been tested.

enum { EVAL_START = 65535, EVAL_EXAMPLE_WORDS = 5, EVAL_COMPLETIONS = 8 };

typedef struct {
    const unsigned char *words;  // uint16, unaligned
    int count;
} EvalTokens;

typedef struct {
    int label, completions, longest;         // longest: tokens in the longest completion
    EvalTokens texts[1 + EVAL_COMPLETIONS];  // context and completions
} EvalExample;

typedef struct {
    const char *name;
    const unsigned char *bytes;
    size_t size, longest_bytes;
    int examples, vocabulary;
    Tokenizer tokenizer;
    int longest_row, longest_completion, longest_at;  // tokens; tokens; its example's index
} EvalFile;

static int eval_word(const unsigned char *words, int64_t i) {
    return words[2 * i] | words[2 * i + 1] << 8;
}

// Parses example `number` at byte `offset` of the file. Returns its size in bytes. Fails if the
// example extends past the end of the file or contains an invalid word.
static size_t eval_example(EvalExample *x, const EvalFile *f, size_t offset, int number) {
    const unsigned char *p = f->bytes + offset;
    const size_t available = f->size - offset;
    if (available < 2 * EVAL_EXAMPLE_WORDS) {
        die("%s: example %d: unexpected end of file", f->name, number);
    }
    const int start = eval_word(p, 0), bytes = eval_word(p, 1), index = eval_word(p, 2);
    const size_t most = available < f->longest_bytes ? available : f->longest_bytes;
    if (start != EVAL_START || index != number || (size_t)bytes > most) {
        die("%s: example %d: start word %d, index %d, size %d bytes; expected %d, %d and at most "
            "%zu", f->name, number, start, index, bytes, EVAL_START, number, most);
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
                "space left", f->name, number, k, tokens->count, space > 0 ? space : 0);
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
        die("%s: example %d: the size is %d bytes, but the contents take only %d", f->name,
            number, bytes, 2 * position);
    }
    return (size_t)bytes;
}

// Parses an evaluation file and checks all examples for a model with a vocabulary of `vocabulary`
// tokens. `f` keeps pointers to `bytes` and `name`. Fails on the first error.
static void eval_parse(EvalFile *f, const unsigned char *bytes, size_t size, const char *name,
                       int vocabulary) {
    LlmcHeader h = llmc_header(LLMC_EVALUATION, bytes, size, name);
    int examples = h.words[2], longest_bytes = h.words[3];
    if (examples < 1 || examples > 65535 || longest_bytes < 1 || longest_bytes > 65535) {
        die("%s: the header gives %d examples of up to %d bytes; expected 1 to 65535 for both",
            name, examples, longest_bytes);
    }
    const EvalFile file = {.name = name, .bytes = bytes, .size = size,
                           .longest_bytes = (size_t)longest_bytes, .examples = examples,
                           .vocabulary = vocabulary,
                           .tokenizer = tokenizer_of_header(&h, h.words[7])};
    static const Tokenizer unknown = {0, 0, 0, 0};
    *f = file;
    if (f->tokenizer.kind == TOKENIZER_GPT2 && vocabulary < GPT2_VOCABULARY) {
        f->tokenizer = unknown;  // not from llm.c: all ids are too low
    }
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
