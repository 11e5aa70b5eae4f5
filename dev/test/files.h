// files.h -- builders of input files for the tests, written independently of the product so that a
// test corrupts a file in one line. The formats are those of data/README.md.

#pragma once
#include "harness.h"
#include <algorithm>
#include <utility>

typedef std::vector<uint16_t> Ids;
enum { GPT2_TOKENS = 0, BYTE_TOKENS = 1 };  // token kinds

inline Text shard_bytes(const Ids &tokens, int kind) {
    const int32_t header[256] = {20240520, 1, (int32_t)tokens.size(),
                                 kind == GPT2_TOKENS ? 50257 : 257, kind};
    return Text((const char *)header, sizeof header) +
           Text((const char *)tokens.data(), tokens.size() * 2);
}

inline Text with_int(Text bytes, size_t index, int32_t value) {
    memcpy(&bytes[index * 4], &value, 4);
    return bytes;
}

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
