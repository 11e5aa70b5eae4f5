// data.h -- tests of tokens and batches. Tokens of test shards are distinct and identify a window.

// Writes shards a.bin, b.bin and c.bin with 101, 69 and 200 tokens, numbered 0, 1, ... throughout.
static void write_three_shards() {
    int next = 0;
    static const int counts[] = {101, 69, 200};
    for (int k = 0; k < 3; k++) {
        std::vector<uint16_t> tokens;
        for (int i = 0; i < counts[k]; i++) {
            tokens.push_back((uint16_t)next++);
        }
        write_file(text("%c.bin", 'a' + k), shard_bytes(tokens, TOKENIZER_GPT2));
    }
}

// Every window occurs once per epoch, whatever the number of ranks; targets are shifted inputs;
// tokens that are in no window of one epoch are used in others.
TEST(loader_coverage, HOST) {
    enum { T = 8, WINDOWS = 12 + 8 + 24, TOKENS = 370 };
    Dataset d;
    write_three_shards();
    dataset_open(&d, "[abc].bin", T);
    d.shuffle = 1;
    d.seed = 42;
    expect(d.windows == WINDOWS && d.tokens == TOKENS && d.shard_count == 3);
    std::vector<int> met(TOKENS);
    std::vector<Token> orders[2];
    for (uint32_t epoch = 0; epoch < 60; epoch++) {
        std::vector<int> starts(TOKENS);
        for (int i = 0; i < WINDOWS; i++) {  // one position at a time, as with B = 1
            Token in[T], out[T];
            dataset_batch(&d, (int64_t)epoch * WINDOWS + i, 1, in, out);
            for (int t = 0; t < T; t++) {
                expect(in[t] == in[0] + t && out[t] == in[t] + 1);
                expect(starts[(size_t)in[t]]++ == 0, "token %d occurs twice in epoch %u", in[t],
                       epoch);
                met[(size_t)in[t]] = met[(size_t)out[t]] = 1;
            }
            if (epoch < 2) {
                orders[epoch].push_back(in[0]);
            }
        }
        for (int end = 101, first = 0, k = 0; k < 3; first = end, k++, end = k == 1 ? 170 : 370) {
            int inputs = 0;
            for (int i = first; i < end; i++) {
                inputs += starts[(size_t)i];
            }
            expect(inputs == (end - first - 1) / T * T, "shard %d, epoch %u: %d", k, epoch, inputs);
        }
    }
    expect(std::count(met.begin(), met.end(), 0) == 0, "tokens never read");
    // Windows start at different tokens in each epoch; replace each start by its sorted position.
    for (std::vector<Token> &order : orders) {
        std::vector<Token> sorted = order;
        std::sort(sorted.begin(), sorted.end());
        for (Token &first : order) {
            first = (Token)(std::find(sorted.begin(), sorted.end(), first) - sorted.begin());
        }
    }
    expect(orders[0] != orders[1], "two epochs have the same order");
    // Every grouping into batches gives the same sequences, even across the end of an epoch.
    Token in[8][T], out[8][T], one[T], next[T];
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        d.shuffle = shuffle;
        dataset_batch(&d, WINDOWS - 3, 8, in[0], out[0]);
        for (int b = 0; b < 8; b++) {
            dataset_batch(&d, WINDOWS - 3 + b, 1, one, next);
            expect(memcmp(in[b], one, sizeof one) == 0 && memcmp(out[b], next, sizeof next) == 0);
        }
    }
    d.shuffle = 0;
    dataset_batch(&d, 12, 2, in[0], out[0]);
    expect(in[0][0] == 101 && in[1][0] == 109, "without shuffling, file order");
    dataset_close(&d);
    detail = "3 shards, 60 epochs";
}

// Prompts and samples are text if vocab.bpe is available.
TEST(prompts, HOST) {
    static Bpe bpe;
    write_file("vocab.bpe", "#version: 0.2\na a\naa aa\na b\nb c\nab c\n\xc4\xa0 t\nh e\n"
                            "\xc4\xa0t he\n");
    bpe_open(&bpe, "vocab.bpe", NULL, NULL);
    Token tokens[8];
    char out[BPE_LONGEST];
    expect(prompt_tokens(tokens, 8, &gpt2_tokenizer, &bpe, "aaa the", 7) == 3 && tokens[0] == 256 &&
           tokens[1] == 64 && tokens[2] == 263);
    expect(prompt_tokens(tokens, 8, &gpt2_tokenizer, &bpe, "", 0) == 1 && tokens[0] == 50256);
    expect(prompt_tokens(tokens, 3, &gpt2_tokenizer, &bpe, "a b", 3) == 3);
    tokens[2] = -1;
    expect(prompt_tokens(tokens, 2, &gpt2_tokenizer, &bpe, "a b", 3) == 3 && tokens[2] == -1);
    expect(Text(out, (size_t)token_text(out, &gpt2_tokenizer, &bpe, 263)) == " the");
    expect(Text(out, (size_t)token_text(out, &gpt2_tokenizer, &bpe, 264)) == "<|endoftext|>");
    expect(token_text(out, &gpt2_tokenizer, &bpe, 50256) == 0);
}

// A token outside the vocabulary, or a file truncated during the run, is reported.
TEST(loader_problems, HOST) {
    enum { T = 8 };
    Token in[2][T], out[2][T];
    Dataset d;
    write_three_shards();
    dataset_open(&d, "[abc].bin", T);
    d.tokenizer.vocabulary = 105;
    expect(!dataset_batch(&d, 12, 2, in[0], out[0]) &&
               Text(d.problem) == "b.bin: token 4 is 105, out of range for a vocabulary of 105",
           "%s", d.problem);
    d.tokenizer.vocabulary = GPT2_VOCABULARY;
    expect(truncate("b.bin", LLMC_HEADER_BYTES + 2 * 15) == 0 &&
           !dataset_batch(&d, 12, 2, in[0], out[0]) &&
           Text(d.problem) == "b.bin: cannot read tokens 8 to 16: the file was truncated while "
           "in use", "%s", d.problem);
    dataset_close(&d);
}

// Reads the end of a shard of 2^31 - 1 tokens (a sparse file of 4 GiB): offsets need 64 bits.
TEST(loader_large, FLOAT) {
    const int64_t count = INT32_MAX, T = 1000, window = (count - 1) / T - 1;
    write_file("large.bin", with_int(shard_bytes({}, TOKENIZER_GPT2), 2, INT32_MAX));
    int fd = open("large.bin", O_WRONLY);
    uint16_t tail[1001];
    for (int i = 0; i <= T; i++) {
        tail[i] = (uint16_t)(i + 7);
    }
    if (ftruncate(fd, LLMC_HEADER_BYTES + 2 * count) != 0 ||
        pwrite(fd, tail, sizeof tail, LLMC_HEADER_BYTES + 2 * window * T) != (ssize_t)sizeof tail) {
        skip("this file system has no space for it");
    }
    close(fd);
    Dataset d;
    Token in[1000], out[1000];
    dataset_open(&d, "large.bin", (int)T);
    dataset_batch(&d, window, 1, in, out);
    expect(d.windows == window + 1 && in[0] == 7 && in[999] == 1006 && out[999] == 1007);
    dataset_close(&d);
    unlink("large.bin");
}

// Converts bytes to ids and back, and checks which prompts are accepted.
TEST(tokenizer, HOST) {
    Token tokens[8];
    char out[BPE_LONGEST];
    expect(prompt_tokens(tokens, 8, &byte_tokenizer, NULL, "a\xff", 2) == 2 && tokens[0] == 'a' &&
           tokens[1] == 255);
    expect(prompt_tokens(tokens, 8, &byte_tokenizer, NULL, "", 0) == 1 && tokens[0] == 256);
    expect(prompt_tokens(tokens, 8, &gpt2_tokenizer, NULL, "", 0) == 1 && tokens[0] == 50256);
    expect(token_text(out, &byte_tokenizer, NULL, 'x') == 1 && out[0] == 'x');
    expect(token_text(out, &byte_tokenizer, NULL, 256) == 0);
    expect(token_text(out, &gpt2_tokenizer, NULL, 31) == 3 && memcmp(out, "31 ", 3) == 0);
    expect_death(prompt_tokens(tokens, 8, &gpt2_tokenizer, NULL, "a", 1),
                 "--prompt: cannot find GPT-2's vocab.bpe; run data/prepare.sh");
    tokens[2] = -1;
    expect(prompt_tokens(tokens, 2, &byte_tokenizer, NULL, "a\0c", 3) == 3 && tokens[1] == 0 &&
           tokens[2] == -1);
}
