// files.h -- shared by the tests that drive the programs: builders of input files, written
// independently of the product so that a test corrupts a file in one line, and functions that
// inspect what a run wrote.
// Includes none of the project's own code; the formats are those of data/README.md.

#pragma once
#include "harness.h"
#include <glob.h>
#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

// -------------------------------------------------------------------------------------------------
// Token files
// Built from token ids, with the header that data/README.md describes.

typedef std::vector<uint16_t> Ids;
enum { GPT2_TOKENS = 0, BYTE_TOKENS = 1, OWN_TOKENS = 2 };  // token kinds
enum { SHARD_BYTES = 1024, OWN_VOCABULARY = 1000 };         // header size; of the stories' merges

// The first 8 bytes of the SHA-256 of the merges that data/tokenize learns from data/stories.
#define OWN_HASH "\x9f\xfa\x32\x8f\x67\x63\x6d\xdb"

// Returns a token file that holds these tokens.
inline Text shard_bytes(const Ids &tokens, int kind) {
    static const int vocabularies[] = {50257, 257, OWN_VOCABULARY};
    int32_t header[SHARD_BYTES / 4] = {20240520, 1, (int32_t)tokens.size(), vocabularies[kind],
                                       kind};
    if (kind == OWN_TOKENS) {
        memcpy(&header[5], OWN_HASH, 8);
    }
    return Text((const char *)header, sizeof header) +
           Text((const char *)tokens.data(), tokens.size() * 2);
}

// Returns the same bytes with the int32 at `index` of the header replaced.
inline Text with_int(Text bytes, size_t index, int32_t value) {
    memcpy(&bytes[index * 4], &value, 4);
    return bytes;
}

// Writes train.bin and val.bin: byte tokens of a text that has a pattern to learn.
inline void write_corpus() {
    Ids tokens;
    for (int i = 0; i < 3000; i++) {
        tokens.push_back((uint16_t)(i % 50 == 0 ? 256 : 97 + (i * i / 7 + i % 11) % 20));
    }
    write_file("train.bin", shard_bytes(tokens, BYTE_TOKENS));
    tokens.resize(400);
    write_file("val.bin", shard_bytes(tokens, BYTE_TOKENS));
}

// Options with which runs on the corpus begin; tests append more.
#define TINY "-i train.bin -e l2h2c16t16 -b 2 "

// Returns a published data file: $DATA_MIRROR/NAME (relative to the folder where the tests were
// started), else data/ and the last component of NAME. Empty if neither exists.
inline Text real_data(const Text &name) {
    const char *mirror = getenv("DATA_MIRROR");
    Text folder = mirror && mirror[0] != '/' ? root + "/" + mirror : Text(mirror ? mirror : "");
    Text text = mirror ? read_file(folder + "/" + name) : "";
    return text.empty() ? read_file(root + "/data/" + name.substr(name.rfind('/') + 1)) : text;
}

// Returns `n` bytes that depend only on the seed.
inline Text random_bytes(size_t n, uint64_t seed) {
    Text out(n, 0);
    for (size_t i = 0; i < n; i++) {
        out[i] = (char)(random_unit(seed, i) * 256);
    }
    return out;
}

// -------------------------------------------------------------------------------------------------
// Vocabularies
// GPT-2's vocabulary if it is available, and a synthetic one of the same format and size.

// Returns GPT-2's merges; skips the test if they are not available.
inline Text vocab_bpe() {
    Text text = real_data("gpt2/vocab.bpe");
    if (text.empty()) {
        skip("no vocab.bpe: set DATA_MIRROR to the folder that contains gpt2/vocab.bpe");
    }
    return text;
}

// Returns all byte values in the order of their tokens: printable ones first.
inline Ids bytes_in_order() {
    Ids order, others;
    for (int c = 0; c < 256; c++) {
        const bool prints = (c > 32 && c < 127) || (c > 160 && c != 173);
        (prints ? order : others).push_back((uint16_t)c);
    }
    order.insert(order.end(), others.begin(), others.end());
    return order;
}

// Returns the character by which vocab.bpe represents the i-th of these bytes: the byte's own
// character if it is printable, else one from U+0100 on.
inline int merges_character(int i) {
    enum { PRINT = 188 };
    return i < PRINT ? bytes_in_order()[(size_t)i] : 0x100 + i - PRINT;
}

// Returns a token as vocab.bpe writes it.
inline Text merges_word(const Text &token) {
    static Words characters;
    if (characters.empty()) {
        characters.resize(256);
        for (int i = 0; i < 256; i++) {
            const int c = merges_character(i);
            characters[bytes_in_order()[(size_t)i]] =
                c < 128 ? Text(1, (char)c) : Text{(char)(0xc0 | c >> 6), (char)(0x80 | (c & 63))};
        }
    }
    Text word;
    for (const char c : token) {
        word += characters[(unsigned char)c];
    }
    return word;
}

// Returns all tokens of a vocab.bpe as bytes: 256 single bytes, one per merge, and <|endoftext|>.
inline Words tokens_of_merges(const Text &merges) {
    Text bytes(0x144, 0);
    Words tokens;
    for (int i = 0; i < 256; i++) {
        bytes[(size_t)merges_character(i)] = (char)bytes_in_order()[(size_t)i];
        tokens.push_back(Text(1, (char)bytes_in_order()[(size_t)i]));
    }
    for (size_t at = merges.find('\n') + 1, end; (end = merges.find('\n', at)) < merges.size();
         at = end + 1) {
        Text token;
        for (size_t i = at; i < end; i++) {
            const unsigned char c = (unsigned char)merges[i];
            if (c != ' ') {
                token += bytes[c < 128 ? c : (size_t)((c & 31) << 6 | (merges[++i] & 63))];
            }
        }
        tokens.push_back(token);
    }
    tokens.push_back("<|endoftext|>");
    return tokens;
}

// First merges of the synthetic vocabulary; merge i is token 256 + i.
inline const char *const made_first[][2] = {
    {"a", "a"}, {"aa", "aa"}, {"a", "b"}, {"b", "c"}, {"ab", "c"}, {" ", "t"}, {"h", "e"},
    {" t", "he"}, {"\n", "\n"}, {"\xc3", "\xa9"}, {"'", "s"}, {"1", "2"}, {"12", "3"}, {" ", " "}};

// Returns a synthetic vocab.bpe of GPT-2's size: first merges whose tokens can be worked out by
// hand, then all pairs of lower-case letters, then pairs of those pairs. The order is neither
// alphabetical nor the order of occurrence in the text.
inline Text made_merges() {
    Text all = "#version: 0.2\n";
    std::set<Text> known;
    int count = 0;
    auto merge = [&](const Text &left, const Text &right) {
        if (count < 50000 && known.insert(left + right).second) {
            all += merges_word(left) + " " + merges_word(right) + "\n";
            count++;
        }
    };
    for (auto &row : made_first) {
        merge(row[0], row[1]);
    }
    auto pair = [](int i) { return Text{(char)('a' + i / 26), (char)('a' + i % 26)}; };
    for (int i = 0; i < 676; i++) {
        const int k = i * 387 % 676;  // coprime: each pair occurs once
        merge(pair(k).substr(0, 1), pair(k).substr(1));
    }
    for (uint64_t i = 0; count < 50000; i += 2) {
        merge(pair((int)(random_unit(7, i) * 676)), pair((int)(random_unit(7, i + 1) * 676)));
    }
    return all;
}

// -------------------------------------------------------------------------------------------------
// Evaluation files
// Built from questions, so that a test can change a single 16-bit word of a question.

typedef std::vector<int> Ints;
struct Question {
    int label;
    Ints context;
    std::vector<Ints> completions;
};

inline Text words_bytes(const Ints &words) {
    Ids all(words.begin(), words.end());
    return Text((const char *)all.data(), all.size() * 2);
}

inline Text eval_bytes(const std::vector<Question> &questions) {
    Text body;
    size_t longest = 0;
    for (size_t i = 0; i < questions.size(); i++) {
        const Question &q = questions[i];
        Ints words = {65535, 0, (int)i, q.label, (int)q.completions.size()};
        std::vector<Ints> texts = {q.context};
        texts.insert(texts.end(), q.completions.begin(), q.completions.end());
        for (const Ints &tokens : texts) {
            words.push_back((int)tokens.size());
            words.insert(words.end(), tokens.begin(), tokens.end());
        }
        words[1] = 2 * (int)words.size();
        longest = std::max(longest, 2 * words.size());
        body += words_bytes(words);
    }
    int32_t header[256] = {20240522, 1, (int32_t)questions.size(), (int32_t)longest};
    return Text((const char *)header, sizeof header) + body;
}

// Returns random questions: tokens below V, contexts of 1-9 tokens, four completions of 1-5 tokens.
inline std::vector<Question> random_questions(int n, int V, uint64_t seed) {
    std::vector<Question> questions;
    uint64_t place = 0;
    auto pick = [&](int below) { return (int)(random_unit(seed, place++) * below); };
    auto tokens = [&](int count) {
        Ints out;
        for (int i = 0; i < count; i++) {
            out.push_back(pick(V));
        }
        return out;
    };
    for (int i = 0; i < n; i++) {
        Question q = {pick(4), tokens(1 + pick(9)), {}};
        for (int k = 0; k < 4; k++) {
            q.completions.push_back(tokens(1 + pick(5)));
        }
        questions.push_back(q);
    }
    return questions;
}

// -------------------------------------------------------------------------------------------------
// Model files
// safetensors and llm.c files, built from lists of tensors.

// A tensor of a safetensors file. `offsets`: its data_offsets; empty: computed from its position.
// `values`: its numbers as (rows,cols) in the model's order, whatever the order in the file.
struct Member {
    Text name, dtype, shape, data, offsets;
    std::vector<double> values;
};
typedef std::vector<Member> Members;

inline Text with_length(const Text &header, const Text &data) {
    uint64_t length = header.size();
    return Text((const char *)&length, 8) + header + data;
}

// Returns a safetensors file of these tensors. `first`: header text before them, e.g. __metadata__
// and a comma.
inline Text safetensors_bytes(const Members &list, const Text &first = "") {
    Text header = "{" + first, data;
    for (const Member &m : list) {
        const Text span = text("%zu,%zu", data.size(), data.size() + m.data.size());
        header += (&m == &list[0] ? "\"" : ",\"") + m.name + "\":{\"dtype\":\"" + m.dtype +
                  "\",\"shape\":[" + m.shape + "],\"data_offsets\":[" +
                  (m.offsets.empty() ? span : m.offsets) + "]}";
        data += m.data;
    }
    return with_length(header + "}", data);
}

// Splits a safetensors file into header and data; both are empty if the file is too short.
inline std::pair<Text, Text> header_and_data(const Text &bytes) {
    uint64_t length = 0;
    if (bytes.size() < 8) {
        return {};
    }
    memcpy(&length, bytes.data(), 8);
    return {bytes.substr(8, length), bytes.substr(8 + length)};
}

// Returns the file with the first occurrence of `was` in its header replaced by `now`.
inline Text with_header(const Text &bytes, const Text &was, const Text &now) {
    auto [header, data] = header_and_data(bytes);
    expect(has(header, was), "no %s in the header", was.c_str());
    header.replace(header.find(was), was.size(), now);
    return with_length(header, data);
}

// Returns the tensors of a state file in header order; *first receives the header text before them.
inline Members members_of(const Text &bytes, Text *first) {
    const auto [header, data] = header_and_data(bytes);
    const size_t begin = header.find("},\"norms\":") + 2;
    Members list;
    *first = header.substr(1, begin - 1);
    const char *end;
    for (const char *p = header.c_str() + begin; (end = strchr(p, '}')) != NULL; p = end + 2) {
        char name[48], dtype[8], shape[24];
        size_t from, to;
        if (sscanf(p, "\"%47[^\"]\":{\"dtype\":\"%7[^\"]\",\"shape\":[%23[^]]],"
                      "\"data_offsets\":[%zu,%zu]", name, dtype, shape, &from, &to) != 5) {
            break;
        }
        list.push_back({name, dtype, shape, data.substr(from, to - from), "", {}});
    }
    return list;
}

inline Member &named(Members *list, const Text &name) {
    for (Member &m : *list) {
        if (m.name == name) {
            return m;
        }
    }
    give_up("the test's file has no " + name);
}

// Draws a finite number with random bits. Returns its bytes as a file holds them; *want receives
// its value.
inline Text number_bytes(const Text &dtype, uint64_t seed, uint64_t index, double *want) {
    uint32_t bits = (uint32_t)(random_unit(seed, index) * 0x1p32);
    uint16_t half = (uint16_t)bits;
    if (dtype == "F16") {
        half = (half & 0x7c00) == 0x7c00 ? half & 0xbfff : half;
        const int exponent = half >> 10 & 31, fraction = half & 1023;
        double size = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
        *want = half >> 15 ? -size : size;
        return Text((const char *)&half, 2);
    }
    bits = dtype == "BF16" ? bits << 16 : bits;
    bits &= (bits & 0x7f800000) == 0x7f800000 ? 0xbfffffff : 0xffffffff;
    float value;
    memcpy(&value, &bits, 4);
    *want = (double)value;
    return dtype == "BF16" ? Text((const char *)&bits + 2, 2) : Text((const char *)&bits, 4);
}

// Hugging Face's names, with rows and columns in units of C (for wte and wpe, only the columns).
enum { MEMBERS = 16 };
inline const struct {
    const char *name;
    int rows, cols;  // cols 0: a vector
} member_rows[MEMBERS] = {
    {"wte.weight", 0, 1},         {"wpe.weight", 0, 1},       {"ln_1.weight", 1, 0},
    {"ln_1.bias", 1, 0},          {"attn.c_attn.weight", 3, 1}, {"attn.c_attn.bias", 3, 0},
    {"attn.c_proj.weight", 1, 1}, {"attn.c_proj.bias", 1, 0}, {"ln_2.weight", 1, 0},
    {"ln_2.bias", 1, 0},          {"mlp.c_fc.weight", 4, 1},  {"mlp.c_fc.bias", 4, 0},
    {"mlp.c_proj.weight", 1, 4},  {"mlp.c_proj.bias", 1, 0},  {"ln_f.weight", 1, 0},
    {"ln_f.bias", 1, 0}};

// Returns a model's tensors in Hugging Face's layout, tensor by tensor and layer by layer, whose
// types cycle through `dtypes`.
template <class M>
inline Members hugging_face(const M &m, const Words &dtypes, const Text &prefix) {
    Members list;
    for (int k = 0; k < MEMBERS; k++) {
        const Text name = member_rows[k].name;
        const bool per_layer = k >= 2 && k < 14;
        const bool swap = has(name, ".c_") && has(name, "weight");
        const int rows = k == 0 ? m.V : k == 1 ? m.maxT : member_rows[k].rows * m.C;
        const int cols = member_rows[k].cols ? member_rows[k].cols * m.C : 1;
        for (int l = 0; l < (per_layer ? m.L : 1); l++) {
            const Text dtype = dtypes[list.size() % dtypes.size()];
            Member t = {prefix + (per_layer ? text("h.%d.", l) : "") + name, dtype,
                        text("%d", rows), "", "", std::vector<double>((size_t)(rows * cols))};
            if (member_rows[k].cols) {
                t.shape = text("%d,%d", swap ? cols : rows, swap ? rows : cols);
            }
            for (int i = 0; i < rows * cols; i++) {
                const int r = swap ? i % rows : i / cols, c = swap ? i / rows : i % cols;
                t.data += number_bytes(dtype, (uint64_t)(k * 100 + l), (uint64_t)i,
                                       &t.values[(size_t)(r * cols + c)]);
            }
            list.push_back(t);
        }
    }
    return list;
}

// Returns a config.json in the format that transformers writes.
template <class M> inline Text config_text(const M &m) {
    return text("{\n  \"activation_function\": \"gelu_new\",\n  \"architectures\": [\"GPT2LMHead"
                "Model\"],\n  \"attn_pdrop\": 0.1,\n  \"initializer_range\": 0.02,\n  "
                "\"layer_norm_epsilon\": 1e-05,\n  \"model_type\": \"gpt2\",\n  \"n_ctx\": 1024,\n "
                " \"n_embd\": %d,\n  \"n_head\": %d,\n  \"n_inner\": null,\n  \"n_layer\": %d,\n  "
                "\"n_positions\": %d,\n  \"scale_attn_weights\": true,\n  "
                "\"task_specific_params\": {\"text-generation\": {\"do_sample\": true, "
                "\"max_length\": 50}},\n  \"tie_word_embeddings\": true,\n  \"vocab_size\": %d\n}"
                "\n", m.C, m.NH, m.L, m.maxT, m.V);
}

inline void write_model(const Text &folder, const Text &bytes, const Text &config) {
    mkdir(folder.c_str(), 0755);
    write_file(folder + "/model.safetensors", bytes);
    write_file(folder + "/config.json", config);
}

// Returns an llm.c file: header, then each tensor with all its layers; wte's rows are padded to a
// multiple of 128. *values receives the numbers of each tensor.
template <class M>
inline Text llmc_bytes(const M &m, int version, std::vector<std::vector<double>> *values) {
    const int padded = (m.V + 127) / 128 * 128;
    int32_t header[256] = {20240326, version, m.maxT, m.V, m.L, m.NH, m.C, padded};
    Text bytes((const char *)header, sizeof header);
    values->assign(MEMBERS, {});
    for (int k = 0; k < MEMBERS; k++) {
        const int rows = k == 0 ? padded : k == 1 ? m.maxT : member_rows[k].rows * m.C;
        const int cols = member_rows[k].cols ? member_rows[k].cols * m.C : 1;
        const int copies = k >= 2 && k < 14 ? m.L : 1;
        for (int i = 0; i < copies * rows * cols; i++) {
            double value;
            bytes += number_bytes(version == 3 ? "F32" : "BF16", (uint64_t)(k * 99 + 1),
                                  (uint64_t)i, &value);
            (*values)[(size_t)k].push_back(value);
        }
    }
    return bytes;
}

// -------------------------------------------------------------------------------------------------
// Output of a run
// Reads the log as JSON and checkpoints as files.

// Returns the names in `folder` that begin with `prefix`, sorted and joined by spaces.
inline Text names_in(const Text &folder, const Text &prefix) {
    glob_t found;
    Text all;
    if (glob((folder + "/" + prefix + "*").c_str(), 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++) {
            all += Text(all.empty() ? "" : " ") + (found.gl_pathv[i] + folder.size() + 1);
        }
    }
    globfree(&found);
    return all;
}

enum { SAVED_MODEL, SAVED_CONFIG, SAVED_STATE, SAVED_MANIFEST, SAVED_FILES };
inline const char *const saved_files[SAVED_FILES] = {
    "model.safetensors", "config.json", "state-0-of-1.safetensors", "manifest.json"};

inline Text in_checkpoint(const Text &folder, int step, int file) {
    return read_file(folder + text("/step-%08d/", step) + saved_files[file]);
}

// Returns weights, moments and master weights of a checkpoint as one text, which does not depend on
// the number of state files. *first receives the counters and norms, which must agree in all files.
inline Text states_of(const Text &folder, int step, Text *first) {
    const Text at = folder + text("/step-%08d/", step);
    std::map<std::tuple<Text, int, long>, Member> ranges;
    first->clear();
    for (const Text &name : split(names_in(at, "state-").c_str())) {
        Text header;
        for (const Member &part : members_of(read_file(at + name), &header)) {
            char state[48] = "";
            int bucket = 0;
            long from = 0;
            sscanf(part.name.c_str(), "%47[^.].%d.%ld", state, &bucket, &from);
            ranges[{state, bucket, from}] = part;  // norms are in every file
        }
        const size_t counters = header.find("\"step\":");
        const Text these = header.substr(counters, header.find('}') - counters) +
                           ranges[{"norms", 0, 0}].data;
        expect(first->empty() || *first == these, "%s: different counters", name.c_str());
        *first = these;
    }
    Text all = in_checkpoint(folder, step, SAVED_MODEL);
    for (const auto &[key, part] : ranges) {
        const auto &[state, bucket, from] = key;
        const Text name = from ? "" : state + text(" %d ", bucket) + part.dtype + " ";
        all += state == "norms" ? "" : name + part.data;
    }
    return all;
}

// Returns everything in a checkpoint except the options in its headers.
inline Text tensors_of(const Text &folder, int step) {
    Text first;
    const Text states = states_of(folder, step, &first);
    return first.empty() ? "" : states + first;
}

// Returns the SHA-256 of files, computed by the system's sha256sum.
inline Words sha256_of(const Words &paths) {
    Text command = "sha256sum", line(4096, 0);
    for (const Text &path : paths) {
        command += " '" + path + "'";
    }
    FILE *f = popen(command.c_str(), "r");
    Words sums;
    while (f && fgets(&line[0], (int)line.size(), f)) {
        sums.push_back(line.substr(0, 64));
    }
    if (!f || pclose(f) != 0 || sums.size() != paths.size()) {
        give_up(command);
    }
    return sums;
}

// Writes a manifest of the files now in `folder`. `more` is JSON inserted before the first file.
inline void write_manifest(const Text &folder, const Text &more = "") {
    unlink((folder + "/manifest.json").c_str());
    const Words names = split(names_in(folder, "").c_str());
    Words paths;
    for (const Text &name : names) {
        paths.push_back(folder + "/" + name);
    }
    const Words sums = sha256_of(paths);
    Text all = "{\"format\": \"train_gpt2 checkpoint\", \"version\": 3, \"files\": {" + more;
    for (size_t i = 0; i < paths.size(); i++) {
        all += text("%s\"%s\": {\"bytes\": %zu, \"sha256\": \"%s\"}", i ? ", " : "",
                    names[i].c_str(), read_file(paths[i]).size(), sums[i].c_str());
    }
    write_file(folder + "/manifest.json", all + "}}");
}

inline std::function<void()> with(const char *name, const char *value) {
    return [=] { setenv(name, value, 1); };
}

// Returns the length of the UTF-8 character at p, by RFC 3629's table; 0 if it is malformed.
inline int utf8_size(const char *p) {
    auto at = [&](int i, int low, int high) {
        const unsigned char c = (unsigned char)p[i];
        return low <= c && c <= high;
    };
    auto more = [&](int i) { return at(i, 0x80, 0xbf); };
    if (at(0, 0x01, 0x7f)) {
        return 1;
    }
    if (at(0, 0xc2, 0xdf)) {
        return more(1) ? 2 : 0;
    }
    const int three = at(0, 0xe0, 0xe0)   ? at(1, 0xa0, 0xbf)
                      : at(0, 0xed, 0xed) ? at(1, 0x80, 0x9f)  // no surrogates
                                          : at(0, 0xe1, 0xef) && more(1);
    if (three) {
        return more(2) ? 3 : 0;
    }
    const int four = at(0, 0xf0, 0xf0)   ? at(1, 0x90, 0xbf)
                     : at(0, 0xf4, 0xf4) ? at(1, 0x80, 0x8f)  // U+10FFFF is the last
                                         : at(0, 0xf1, 0xf3) && more(1);
    return four && more(2) && more(3) ? 4 : 0;
}

// Returns the end of the JSON value at p, or NULL if it is malformed.
inline const char *json_past(const char *p) {
    p += strspn(p, " \n");
    if (*p == '{' || *p == '[') {
        const char close = *p++ == '{' ? '}' : ']';
        for (int first = 1; *(p += strspn(p, " \n")) != close; first = 0) {
            if (!first && *p++ != ',') {
                return NULL;
            }
            if (close == '}' &&
                (*(p += strspn(p, " \n")) != '"' || !(p = json_past(p)) || *p++ != ':')) {
                return NULL;
            }
            if (!(p = json_past(p))) {
                return NULL;
            }
        }
        return p + 1;
    }
    if (*p == '"') {
        for (p++; *p != '"'; p += utf8_size(p)) {
            int escape = *p == '\\';
            p += escape;
            if ((unsigned char)*p < 32 || utf8_size(p) == 0 ||
                (escape && !strchr("\"\\nrtu", *p)) ||
                (escape && *p == 'u' && strspn(p + 1, "0123456789abcdefABCDEF") < 4)) {
                return NULL;
            }
            p += escape && *p == 'u' ? 4 : 0;
        }
        return p + 1;
    }
    size_t number = strspn(p, "-+.eE0123456789");
    for (const char *word : {"null", "true", "false"}) {
        if (strncmp(p, word, strlen(word)) == 0) {
            return p + strlen(word);
        }
    }
    char *end;
    strtod(p, &end);
    return number > 0 && end == p + number ? end : NULL;
}

// True if the line is exactly one JSON value.
inline int json_valid(const Text &line) {
    const char *end = json_past(line.c_str());
    return end && end[strspn(end, " \n")] == 0;
}

// Returns the steps that have a loss in a log; every line must be JSON.
inline Ints log_steps(const Text &path) {
    Text all = read_file(path);
    Ints steps;
    expect(!all.empty() && all.back() == '\n', "%s: incomplete last line", path.c_str());
    for (size_t at = 0, end; (end = all.find('\n', at)) != Text::npos; at = end + 1) {
        Text line = all.substr(at, end - at);
        int step;
        expect(json_valid(line), "%s", line.substr(0, 300).c_str());
        if (has(line, "\"loss\":") && sscanf(line.c_str(), "{\"step\":%d,", &step) == 1) {
            steps.push_back(step);
        }
    }
    return steps;
}

inline Ints one_to(int n) {
    Ints steps;
    for (int i = 1; i <= n; i++) {
        steps.push_back(i);
    }
    return steps;
}