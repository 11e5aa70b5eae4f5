// data.cpp -- tests of the readers in data/: SHA-256, JSON, tokens, learned merges and evaluation
// files are compared with known answers and naive references, and files with a single error are
// refused.
//
// Run:    build/test/data [NAME...]         build/test/data_asan: with sanitizers

#define main tokenize_main
#include "../../data/tokenize.c"
#undef main
#include "files.h"
#include <map>
#include <set>

inline Text random_bytes(size_t n, uint64_t seed) {
    Text out(n, 0);
    for (size_t i = 0; i < n; i++) {
        out[i] = (char)(random_unit(seed, i) * 256);
    }
    return out;
}

// Messages are one line whatever a name contains; sizes are printed in readable units.
TEST(messages) {
    expect_death(die("a\x7f\x1b[2J\nb\tc"), "train_gpt2: a??[2J?b?c\n");
    expect_death(die("%s", Text(100000, 'x').c_str()), "train_gpt2: xxxx");
    const std::pair<double, const char *> sizes[] = {
        {0, "0 B"}, {1023, "1023 B"}, {1024, "1.0 KiB"}, {1048576, "1.0 MiB"},
        {0x1p30, "1.00 GiB"}, {0x1p50, "1024.00 TiB"}, {-2048, "-2.0 KiB"}, {1887437, "1.8 MiB"}};
    for (auto &row : sizes) {
        expect(Text(bytes_text(row.first).s) == row.second, "%s", bytes_text(row.first).s);
    }
    expect(Text(count_text(-1234567).s) == "-1,234,567" && Text(count_text(999).s) == "999" &&
           Text(count_text(-999).s) == "-999" && Text(count_text(1000).s) == "1,000");
    expect(Text(duration_text(0.4).s) == "0:00" && Text(duration_text(59.5).s) == "1:00" &&
           Text(duration_text(3599.5).s) == "1:00:00" && Text(duration_text(6e5).s) == "7 d" &&
           Text(duration_text(3725).s) == "1:02:05");
}

// Returns the hash of `data`, added in two chunks.
static Text sha256_of(const Text &data, size_t cut) {
    Sha256 s;
    char out[SHA256_TEXT];
    sha256_start(&s);
    sha256_add(&s, data.data(), cut);
    sha256_add(&s, data.data() + cut, data.size() - cut);
    sha256_end(&s, out);
    return out;
}

// Hashes FIPS 180-4's examples, and messages of all lengths around the padding's boundaries, in any
// two chunks; the latter are compared with the plain C rounds on a message padded by the test.
TEST(sha256) {
    static const char *const known[][2] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"}};
    for (auto &row : known) {
        expect(sha256_of(row[0], 0) == row[1], "'%s'", row[0]);
    }
    expect(sha256_of(Text(1000000, 'a'), 999) ==
           "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    for (size_t length = 0; length <= 300; length++) {
        const Text data = random_bytes(length, 1);
        Text padded = data + '\x80', digits;
        padded.append((119 - length % 64) % 64 + 6, 0);
        padded += {(char)(length * 8 >> 8), (char)(length * 8)};
        Sha256 s;
        sha256_start(&s);
        sha256_blocks_plain(s.h, (const unsigned char *)padded.data(), padded.size() / 64);
        for (uint32_t h : s.h) {
            digits += text("%08x", h);
        }
        for (size_t cut = 0; cut <= length; cut++) {
            expect(sha256_of(data, cut) == digits, "%zu bytes cut at %zu", length, cut);
        }
    }
    Sha256 s, want;    // a message of 2^29 bytes, whose length in bits needs 33 bits
    char out[SHA256_TEXT];
    Text block(64, 0), digits;
    sha256_start(&s);
    sha256_start(&want);
    s.bytes = 1u << 29;
    sha256_end(&s, out);
    block[0] = '\x80';
    block[59] = 1;
    sha256_blocks_plain(want.h, (const unsigned char *)block.data(), 1);
    for (uint32_t h : want.h) {
        digits += text("%08x", h);
    }
    expect(digits == out, "a length of 33 bits");
    detail = SHA256_X86 ? "x86's instructions and plain C" : "plain C";
}

// Returns the parser's error for a JSON text, or "" if it is valid. The text is copied to a buffer
// of exactly its size, so that sanitizers detect reads beyond it.
static Text json_fault(const Text &json) {
    std::vector<unsigned char> bytes(json.begin(), json.end());
    Json j = {bytes.data(), 0, bytes.size(), NULL};
    json_skip(&j);
    if (json_peek(&j) >= 0) {
        json_fail(&j, "trailing characters");
    }
    expect(j.offset <= j.end);
    return j.fault ? j.fault : "";
}

// Valid and almost valid JSON, and one text cut to every length.
TEST(json) {
    const Text open64(64, '['), close64(64, ']'), nul(1, 0);
    static const char value[] = "expected a value", ends[] = "unterminated string",
                      escape[] = "invalid escape", comma[] = "expected a comma",
                      deep[] = "nesting is deeper", more[] = "trailing characters";
    const std::vector<std::pair<Text, Text>> table = {
        {" {\"a\" : [ 1,-2.5e+3,0.5E-7, {} ],\r\n\t\"\":null} ", ""}, {"-0", ""}, {"0e0", ""},
        {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\x7f\xff\"", ""}, {open64 + close64, ""},
        {open64 + "[" + close64 + "]", deep}, {Text(100000, '['), deep}, {"", value},
        {Text(100000, '{'), "expected a string"}, {"[1,]", value}, {"[,1]", value},
        {"[1 2]", comma}, {"[1}", comma}, {"{\"a\":1]", comma}, {"[1:2]", comma}, {"[", value},
        {"{\"a\":1,}", "expected a string"}, {"{\"a\" 1}", "expected a colon"}, {"{\"a\":}", value},
        {"{1:2}", "expected a string"}, {"[]]", more}, {"1 2", more}, {"{}x", more},
        {"{}" + nul, more}, {nul, value}, {"[1" + nul + "]", comma}, {"\"a" + nul + "\"", ends},
        {"\"\n\"", ends}, {"\"\x1f\"", ends}, {"\"", ends}, {"\"\\\"", ends},
        {"\"\\x\"", escape}, {"\"\\u12g4\"", escape}, {"\"\\u0000\"", escape},
        {"\"\\" + nul + "\"", escape}, {"\"\\u12\"", escape}, {"'a'", value},
        {"/**/1", value}, {"\xef\xbb\xbf{}", value}, {"1e999", ""}, {Text(62, '9'), ""},
        {Text(63, '9'), value}};
    for (auto &row : table) {
        const Text got = json_fault(row.first), shown = row.first.substr(0, 40);
        expect(row.second.empty() ? got.empty() : got.find(row.second) == 0, "%s: got '%s'",
               shown.c_str(), got.c_str());
    }
    const Text good = "{\"a\":[true,-1.5e+3,\"x\\u00e9\\n\"],\"b\":{\"c\":null}}";
    for (size_t i = 0; i < good.size(); i++) {
        expect(!json_fault(good.substr(0, i)).empty(), "cut to %zu", i);
    }
    detail = text("%zu texts", table.size());
}

// Escapes become UTF-8, and a text too long for its buffer is truncated.
TEST(json_strings) {
    const struct {
        Text json;
        size_t capacity;
        Text want;
    } strings[] = {{"\"abc\"", 4, "abc"}, {"\"abc\"", 3, "ab"}, {"\"abc\"", 1, ""},
                   {"\"\\u0041\\u00e9\\u20ac\\ud83d\"", 20, "A\xc3\xa9\xe2\x82\xac\xed\xa0\xbd"},
                   {"\"\\u007f\\u0080\\u07ff\\u0800\"", 20, "\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80"},
                   {"\"\\b\\f\\n\\r\\t\\/\"", 20, "\b\f\n\r\t/"}};
    for (auto &row : strings) {
        Json j = {(const unsigned char *)row.json.data(), 0, row.json.size(), NULL};
        std::vector<char> out(row.capacity);
        json_string(&j, out.data(), row.capacity);
        expect(!j.fault && out.data() == row.want, "%s", row.json.c_str());
    }
}

// Only whole numbers up to 2^53 are accepted.
TEST(json_counts) {
    static const struct {
        const char *json;
        int64_t want;  // -1: refused
    } counts[] = {{"0", 0}, {" 42", 42}, {"9007199254740992", (int64_t)1 << 53}, {"1x", -1},
                  {"9007199254740993", -1}, {"-1", -1}, {"+1", -1}, {"1.0", -1}, {"1e2", -1},
                  {"99999999999999999999", -1}, {"true", -1}, {"\"1\"", -1}, {"", -1}};
    for (auto &row : counts) {
        Json j = {(const unsigned char *)row.json, 0, strlen(row.json), NULL};
        int64_t got = json_count(&j);
        expect(row.want < 0 ? j.fault != NULL : !j.fault && got == row.want, "%s", row.json);
    }
}

static Text utf8_of(uint32_t c) {
    auto more = [&](int shift) { return (char)(0x80 | (c >> shift & 63)); };
    return c < 0x80      ? Text{(char)c}
           : c < 0x800   ? Text{(char)(0xc0 | c >> 6), more(0)}
           : c < 0x10000 ? Text{(char)(0xe0 | c >> 12), more(6), more(0)}
                         : Text{(char)(0xf0 | c >> 18), more(12), more(6), more(0)};
}

// Every character is decoded. Of all pairs of bytes, followed by various tails, only those that
// encode a character are valid; truncated characters are not.
TEST(utf8) {
    std::set<Text> all;
    uint32_t c;
    for (uint32_t want = 1; want < 0x110000; want += want == 0xd7ff ? 0x801 : 1) {
        const Text bytes = utf8_of(want);
        const int n = utf8_decode(&c, (const unsigned char *)bytes.data(), bytes.size());
        expect(c == want && n == (int)bytes.size(), "U+%04x: %x of %d bytes", want, c, n);
        all.insert(all.end(), bytes);
    }
    static const char tails[][3] = {"\x80\x80", "\xbf\xbf", "\x7f\x80", "\xc0\x80",
                                    "\x80\x7f"};
    for (int first = 0x80; first < 256; first++) {
        for (int second = 0; second < 256; second++) {
            for (const char *tail : tails) {
                const Text bytes = Text{(char)first, (char)second} + tail;
                int want = 0;
                for (int left = 1; left <= 4; left++) {
                    want = all.count(bytes.substr(0, (size_t)left)) ? left : want;
                    const int got = utf8_length((const unsigned char *)bytes.data(), (size_t)left);
                    expect(got == want, "%02x %02x %02x %02x, of %d: %d", first, second,
                           tail[0] & 255, tail[1] & 255, left, got);
                }
            }
        }
    }
    expect(utf8_decode(&c, (const unsigned char *)"\xff", 1) == 1 && c == UINT32_MAX);
}

static Bpe bpe;

// Builds a vocabulary of these tokens after the single bytes; some of its merges can never apply.
static void open_bpe(const Words &tokens) {
    bpe_begin(&bpe);
    for (const Text &token : tokens) {
        bpe_add(&bpe, token.data(), token.size());
    }
    bpe_number_plainly(&bpe);
}

// Encodes a text with a new encoder, or with one that already caches words.
static Ids encode(const Text &text, BpeEncoder *known = NULL) {
    BpeEncoder fresh, *e = known ? known : &fresh;
    Ids ids(text.size());
    if (!known) {
        bpe_encoder_open(&fresh, &bpe);
    }
    ids.resize((size_t)bpe_encode(e, text.data(), text.size(), ids.data()));
    if (!known) {
        bpe_encoder_close(&fresh);
    }
    return ids;
}

static Text decode(const Ids &ids) {
    Text all;
    for (uint16_t id : ids) {
        const char *bytes;
        int n = bpe_bytes(&bpe, id, &bytes);
        all.append(bytes, (size_t)n);
    }
    return all;
}

// Returns text of difficult characters: all kinds of spaces, parts of contractions, letters, digits
// and symbols of several lengths, and invalid UTF-8.
static Text awkward_text(uint64_t seed, size_t count) {
    static const char *const parts[] = {
        " ", " ", " ", "  ", "\n", "\t", "\xe3\x80\x80", "\xc2\xa0", "\xe2\x80\x89", "\xc2\x85",
        "'", "'s", "'re", "'ll", "e", "the", "a", "aaaa", "ing", "Z", "\xc3\xa9", "\xe4\xb8\xad",
        "\xf0\x9f\x98\x80", "\xcc\x81", "1", "12", "\xd9\xa3", "!", "...", "==", "\xff", "\xe3",
        "\xe3\x80", "\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xc0\xaf"};
    enum { PARTS = sizeof parts / sizeof parts[0] };
    Text all;
    for (uint64_t i = 0; i < count; i++) {
        all += parts[(size_t)(random_unit(seed, i) * PARTS)];
    }
    return all;
}

// Encodes one pre-token by the definition of BPE: repeatedly merge the best pair of neighbors.
static Ids naive_merge(const Text &piece) {
    std::vector<Text> parts;
    for (char c : piece) {
        parts.push_back(Text(1, c));
    }
    for (;;) {
        int best = -1;
        size_t at = 0;
        for (size_t i = 0; i + 1 < parts.size(); i++) {
            Text both = parts[i] + parts[i + 1];
            int id = bpe_rank(&bpe, both.data(), both.size());
            if (id >= 0 && (best < 0 || id < best)) {
                best = id;
                at = i;
            }
        }
        if (best < 0) {
            break;
        }
        parts[at] += parts[at + 1];
        parts.erase(parts.begin() + (long)at + 1);
    }
    Ids ids;
    for (const Text &part : parts) {
        ids.push_back((uint16_t)bpe_rank(&bpe, part.data(), part.size()));
    }
    return ids;
}

// Tokens that hash to the table's last slot continue at its first.
TEST(bpe_table) {
    bpe_begin(&bpe);
    Words last;
    for (uint32_t i = 0, tag; last.size() < 3; i++) {
        const Text token = text("%u", i);
        if (bpe_slot(&bpe, token.data(), token.size(), &tag) == BPE_SLOTS - 1) {
            last.push_back(token);
        }
    }
    for (size_t i = 0; i < last.size(); i++) {
        expect(bpe_rank(&bpe, last[i].data(), last[i].size()) == -1);
        expect(bpe_add(&bpe, last[i].data(), last[i].size()) == 1);
        expect(bpe_rank(&bpe, last[i].data(), last[i].size()) == 256 + (int)i, "%zu", i);
    }
    expect(bpe_add(&bpe, last[1].data(), last[1].size()) == 0, "twice");
    const Text longest(BPE_LONGEST, 'x');
    expect(bpe_add(&bpe, longest.data(), 0) == 0 && bpe_rank(&bpe, longest.data(), 0) == -1);
    expect(bpe_add(&bpe, longest.data(), BPE_LONGEST) == 1);
    expect(bpe_rank(&bpe, longest.data(), BPE_LONGEST) == bpe.count - 1);
    Text token = longest;
    for (int i = 0; i < 10000; i++) {    // the text buffer fills up before the hash table
        token.replace(0, 4, text("%04d", i));
        const int fits = bpe.start[bpe.count] + BPE_LONGEST <= BPE_TEXT;
        expect(bpe_add(&bpe, token.data(), BPE_LONGEST) == fits, "token %d", i);
    }
}

// GPT-2's pattern splits these texts at the bars.
TEST(bpe_pretokens) {
    static const char *const known[] = {
        "it|'s| I|'ll| THEY|'|RE| we|'d|'ve|'| '|s|'m|'|r|'|l|'|v|'t|e|'",
        "x|=|1234567890|.|5|e|-|3|;",
        " | two| | spaces| \n\n\t| end|  ", " ", "a| ", "\n|\n|a", "  |\xc2\xa0|x",
        "a|\xe3\x80\x80|\xe3\x80\x80|b|\xc2\xa0|c|\xe2\x80\xa8|d",
        "e|\xcc\x81| \xc2\xbd| \xe2\x85\xa7| \xc2\xb2|a",
        "\xff\xfe| \xe3\x80|a|\xed\xa0\x80!|1\xd9\xa3|!|\xc3\xa9z",
        "''|s", "!'|s", " '|s", "\xe4\xb8\xad\xe6\x96\x87|\xe3\x80\x82", "'"};
    bpe_begin(&bpe);
    for (const char *row : known) {
        Text whole = row, cut;
        whole.erase(std::remove(whole.begin(), whole.end(), '|'), whole.end());
        const unsigned char *p = (const unsigned char *)whole.data(), *end = p + whole.size();
        for (const unsigned char *next; p < end; p = next) {
            next = pretoken_end(&bpe, p, end);
            cut += Text(cut.empty() ? "" : "|") + Text((const char *)p, (size_t)(next - p));
        }
        expect(cut == row, "'%s', not '%s'", cut.c_str(), row);
    }
}

// The spaces are exactly the characters with Unicode's property White_Space.
TEST(spaces) {
    const Ids spaces = {9, 10, 11, 12, 13, ' ', 0x85, 0xa0, 0x1680, 0x2000, 0x2001, 0x2002, 0x2003,
                        0x2004, 0x2005, 0x2006, 0x2007, 0x2008, 0x2009, 0x200a, 0x2028, 0x2029,
                        0x202f, 0x205f, 0x3000};
    bpe_begin(&bpe);
    for (int c = 0; c < 0x10000; c++) {
        const bool want = std::find(spaces.begin(), spaces.end(), c) != spaces.end();
        expect(is_space((uint32_t)c) == want, "U+%04X", c);
        expect((bpe.classes[c] == CLASS_SPACE) == want, "class of U+%04X", c);
    }
}

// Merging agrees with its definition; any encoded bytes decode to themselves; a text can be split
// where bpe_cut_is_safe allows; a pre-token of a million characters is encoded quickly enough.
TEST(bpe_rules) {
    Words tokens = {"aa", "aaaa", "ab", "bc", "abc", " t", "he", " the", "\n\n", "\xc3\xa9", "'s",
                    "12", "123", "  "};
    auto pair = [](int i) { return Text{(char)('a' + i / 26), (char)('a' + i % 26)}; };
    for (int i = 0; i < 676; i++) {
        tokens.push_back(pair(i * 387 % 676));  // 387 is coprime: each pair occurs once
    }
    for (uint64_t i = 0; i < 50000; i += 2) {
        tokens.push_back(pair((int)(random_unit(7, i) * 676)) +
                         pair((int)(random_unit(7, i + 1) * 676)));
    }
    open_bpe(tokens);
    int cuts = 0, pieces = 0;
    BpeEncoder e;
    bpe_encoder_open(&e, &bpe);
    for (uint64_t seed = 0; seed < 300; seed++) {
        Text piece, bytes;
        for (uint64_t i = 0; i < 1 + seed / 3; i++) {
            double u = random_unit(seed + 1000, i);
            piece += "etaoinshrdlu"[(int)(u * (2 + (double)(seed % 11)))];
            bytes += (char)(u * 1e6);
        }
        pieces += encode(piece) == naive_merge(piece);
        expect(encode(piece) == naive_merge(piece), "%s", piece.c_str());
        expect(decode(encode(bytes, &e)) == bytes, "random bytes, seed %d", (int)seed);
        Text whole = awkward_text(seed, 100);
        expect(decode(encode(whole, &e)) == whole, "awkward text, seed %d", (int)seed);
        for (size_t at = 1; at < whole.size(); at++) {
            if (!strchr(" \n\t", whole[at]) || !bpe_cut_is_safe(whole.data(), at)) {
                continue;
            }
            Ids left = encode(whole.substr(0, at), &e), right = encode(whole.substr(at), &e);
            left.insert(left.end(), right.begin(), right.end());
            expect(left == encode(whole, &e), "cut at %zu of awkward text, seed %d", at, (int)seed);
            cuts++;
        }
    }
    expect(cuts > 1000 && bpe_cut_is_safe("a b", 1) && !bpe_cut_is_safe("a  ", 2));
    expect(!bpe_cut_is_safe("a\xe3\x80\x80 b", 4) && bpe_cut_is_safe("\xe3\x80\x82 b", 3));
    enum { LONG = 1 << 20 };
    expect(encode(Text(LONG, 'a'), &e) == Ids(LONG / 4, 257), "a million letters");
    expect(encode(Text(LONG, ' '), &e) == Ids(LONG / 2, 269), "a million spaces");
    bpe_encoder_close(&e);
    // Words of few tokens that differ in a single bit, around the longest that is cached.
    open_bpe({"xx", "xxxx", Text(8, 'x'), Text(16, 'x')});
    bpe_encoder_open(&e, &bpe);
    for (size_t n = 24; n < 40; n++) {
        for (const char *end : {"A", "a", "A"}) {
            const Text word = Text(n - 1, 'x') + end;
            expect(decode(encode(word, &e)) == word, "%s", word.c_str());
        }
    }
    bpe_encoder_close(&e);
    detail = text("%d pieces, %d cuts", pieces, cuts);
}

static WordTable word_table(const Words &words) {
    WordTable t = {};
    for (const Text &word : words) {
        const uint32_t hash = (uint32_t)fnv1a(fnv1a_start, word.data(), word.size());
        words_add(&t, word.data(), word.size(), hash, 1);
    }
    return t;
}

// Learns `merges` merges by the definition: count all pairs of neighbors, take the most frequent
// one (ties: the lowest ids), and merge it from left to right.
static std::vector<std::pair<int, int>> naive_merges(const Words &words, int merges) {
    std::vector<std::vector<int>> parts;
    for (const Text &word : words) {
        parts.push_back({});
        for (const char c : word) {
            parts.back().push_back(bpe_rank(&bpe, &c, 1));
        }
    }
    std::vector<std::pair<int, int>> learned;
    for (int id = 256; (int)learned.size() < merges; id++) {
        std::map<std::pair<int, int>, int> counts;
        for (auto &word : parts) {
            for (size_t i = 0; i + 1 < word.size(); i++) {
                counts[{word[i], word[i + 1]}]++;
            }
        }
        auto best = counts.begin();
        for (auto row = counts.begin(); row != counts.end(); row++) {
            best = row->second > best->second ? row : best;
        }
        if (counts.empty()) {
            break;
        }
        learned.push_back(best->first);
        for (auto &word : parts) {
            for (size_t i = 0; i + 1 < word.size(); i++) {
                if (std::make_pair(word[i], word[i + 1]) == best->first) {
                    word[i] = id;
                    word.erase(word.begin() + (long)i + 1);
                }
            }
        }
    }
    return learned;
}

// Learned merges agree with their definition on small texts full of ties and runs, until no pair
// is left. Encoding a token's bytes with only the merges before it gives the two tokens it merges.
TEST(bpe_learned) {
    int merges = 0;
    for (uint64_t seed = 0; seed < 100; seed++) {
        Words words;
        uint64_t place = 0;
        const int letters = 1 + (int)(seed % 5), count = 1 + (int)(seed % 40);
        for (int i = 0; i < count; i++) {
            Text word;
            const int n = 1 + (int)(random_unit(seed, place++) * (seed % 7 == 0 ? 60 : 12));
            for (int k = 0; k < n; k++) {
                word += (char)("abc\xff\0"[(int)(random_unit(seed, place++) * letters)]);
            }
            words.insert(words.end(), 1 + (size_t)(random_unit(seed, place++) * 3), word);
        }
        bpe_begin(&bpe);
        const auto want = naive_merges(words, 200);
        WordTable table = word_table(words);
        const int got = bpe_learn(&bpe, &table, 200);
        words_free(&table);
        expect(got == (int)want.size(), "seed %d: %d merges, not %zu", (int)seed, got, want.size());
        BpeEncoder e;
        bpe_encoder_open(&e, &bpe);
        for (int i = 0; i < got && i < (int)want.size(); i++) {
            uint16_t two[BPE_LONGEST];
            const char *bytes;
            const int n = bpe_bytes(&bpe, 256 + i, &bytes);
            expect(bpe_merge(&e, bytes, (size_t)n, 256 + i, two) == 2 && two[0] == want[i].first &&
                   two[1] == want[i].second, "seed %d: merge %d is %d %d, not %d %d", (int)seed, i,
                   two[0], two[1], want[i].first, want[i].second);
        }
        bpe_encoder_close(&e);
        merges += got;
    }
    // No token is longer than BPE_LONGEST; a run of such tokens is not merged.
    bpe_begin(&bpe);
    WordTable table = word_table({Text(5000, 'a')});
    expect(bpe_learn(&bpe, &table, 100) == 11, "%d tokens", bpe.count);
    words_free(&table);
    detail = text("%d merges", merges);
}

// A word table counts every word, however the text was divided.
TEST(bpe_word_table) {
    std::map<Text, int64_t> want;
    WordTable all = {};
    words_add(&all, "ab", 2, 7, 1);  // two words with one hash
    words_add(&all, "cd", 2, 7, 1);
    expect(all.word_count == 2 && all.words[0].count == 1);
    words_free(&all);
    for (uint64_t part = 0; part < 40; part++) {
        Words words;
        for (uint64_t i = 0; i < 500; i++) {
            const double u = random_unit(part, i);
            words.push_back(text("%d", (int)(u * u * u * 3000)));
            want[words.back()]++;
        }
        WordTable t = word_table(words);
        words_merge(&all, &t);
    }
    expect(all.word_count == want.size(), "%u words", all.word_count);
    for (uint32_t i = 0; i < all.word_count; i++) {
        const Text word(all.text + all.words[i].offset, all.words[i].bytes);
        expect(want[word] == all.words[i].count, "'%s'", word.c_str());
    }
    words_free(&all);
}

// The tokenizer's file that belongs to a shard, derived from the shard's name.
TEST(bpe_find) {
    static const char *const table[][3] = {
        {"", "data/mine_train.bin", "data/mine_merges.txt"},
        {"", "mine_val_000001.bin", "mine_merges.txt"},
        {"", "a_train/b_train_val_000001.bin", "a_train/b_train_merges.txt"},
        {"", "a_train/b.bin", ""}, {"", "train.bin", ""}, {"", NULL, "data/vocab.bpe"},
        {"other", "train.bin", "other"}, {"other", "data/mine_train.bin", "other"}};
    char path[PATH_BYTES];
    for (auto &row : table) {
        expect(bpe_find(path, row[0], row[1]) == (row[0][0] != 0), "%s", row[2]);
        expect(strcmp(path, row[2]) == 0, "%s: %s", row[2], path);
    }
}

// Runs the parser on exactly these bytes at an odd address. Returns its status and stderr.
static Outcome eval_parsed(const Text &bytes) {
    return outcome(spawn([&] {
        std::vector<unsigned char> all(bytes.size() + 1);
        memcpy(all.data() + 1, bytes.data(), bytes.size());
        EvalFile f;
        eval_parse(&f, all.data() + 1, bytes.size(), "x.bin", 50257);
    }));
}

// Files with one wrong field are refused with a message about that field.
TEST(eval_fields) {
    const Text good = eval_bytes({{3, {11, 12}, {{1}, {2, 3}, {4}, {5}}},  // 34 bytes
                                  {0, {1}, {{1}, {2}}}});                  // 22
    const size_t body = LLMC_HEADER_BYTES, second = body + 2 * 17;
    auto with_word = [&](size_t at, int word) {
        Text bad = good;
        bad.replace(at, 2, words_bytes({word}));
        return bad;
    };
    const struct {
        Text bytes;
        const char *words;
    } table[] = {
        {"", "x.bin: 0 bytes is too short for an evaluation file"},
        {with_int(good, 0, 20240520),
         "not an evaluation file: the first word is 20240520; expected 20240522"},
        {with_int(good, 1, 2), "an evaluation file with unsupported version 2; expected 1"},
        {with_int(good, 2, 0), "header gives 0 examples of up to 34 bytes; expected 1 to 65535"},
        {with_int(good, 2, 65536), "65536 examples"},
        {with_int(good, 2, 1), "22 trailing bytes after the last of 1 examples"},
        {with_int(good, 2, 3), "example 2: unexpected end of file"},
        {with_int(good, 3, 0), "of up to 0 bytes"},
        {with_int(good, 3, 65536), "of up to 65536 bytes"},
        {with_int(good, 3, 33), "size 34 bytes; expected 65535, 0 and at most 33"},
        {with_word(body, 65534), "start word 65534, index 0, size 34 bytes; expected 65535, 0 and"},
        {with_word(body + 2, 33), "example 0: text 4 (0 is the context) has 1 tokens"},
        {with_word(body + 2, 35), "example 0: start word 65535, index 0, size 35 bytes"},
        {with_word(body + 2, 6), "example 0: text 0 (0 is the context) has 0 tokens"},
        {with_word(body + 4, 1), "start word 65535, index 1, size 34 bytes; expected 65535, 0 and"},
        {with_word(body + 6, 4), "example 0: label 4, 4 completions"},
        {with_word(body + 8, 1), "label 3, 1 completions; expected 2 to 8"},
        {with_word(body + 10, 0), "text 0 (0 is the context) has 0 tokens"},
        {with_word(body + 10, 12), "is required and at most 11 fit"},
        {with_word(body + 12, 50257), "token 50257 is outside the model's vocabulary of 50257"},
        {with_word(body + 32, 50257), "example 0: token 50257"},
        {with_word(second, 1), "example 1: start word 1, index 1, size 22"},
        {with_word(second + 2, 24), "size 24 bytes; expected 65535, 1 and at most 22"},
        {with_word(second + 2, 24) + "ab", "size is 24 bytes, but the contents take only 22"},
        {good + "x", "1 trailing bytes after the last of 2 examples"},
    };
    expect(good.size() == second + 22);
    expect_success(eval_parsed(good), "the file itself");
    for (auto &row : table) {
        expect_refused(eval_parsed(row.bytes), row.words, row.words);
    }
    detail = text("%zu wrong fields", sizeof table / sizeof table[0]);
}

int main(int argc, char **argv) {
    return harness_main(argc, argv);
}
