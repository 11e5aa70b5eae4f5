// generate.cpp -- --generate: reproduces a training run's sample, reads prompts from stdin, stops
// at the end-of-text token, and refuses invalid options.
//
// Run:    build/test/generate [--program build/train_gpt2_asan] [NAME...]

#include "files.h"

#define SAMPLING "--seed 2 --top-k 40 --temperature 0.9 "

// Trains a model that has partly learned the corpus, saved as out/step-00000300. Returns the sample
// of 60 tokens that its run printed, which exceeds the model's 16 positions.
static Text train(const Text &prompt) {
    const Text begins = "--- sample after step 300 ---\n";
    Outcome o = program(TINY "-x 300 -l 1e-2 -s 300 -o out -g 60 " SAMPLING "--prompt=" + prompt);
    expect_success(o, "training");
    const size_t at = o.out.find(begins) + begins.size();
    return o.out.substr(at, o.out.find("\n---\n", at) - at);
}
#define TRAINED "--generate -e out/step-00000300 " SAMPLING

// For program(): sets the contents of stdin.
static std::function<void()> with_stdin(const Text &bytes) {
    write_file("stdin", bytes);
    return [] {
        const int fd = open("stdin", O_RDONLY);
        dup2(fd, 0);
        close(fd);
    };
}

static void expect_made(const Outcome &o, const char *what) {  // with a line or two on stderr
    expect(o.status == 0 && has(o.err, " tokens/s"), "%s: status %d: %s", what,
           o.status, o.err.c_str());
}

static Text memory_of(const Text &err) {  // "train_gpt2: ...; 8.8 MiB\n"
    const Text line = err.substr(err.find("train_gpt2"));
    const size_t from = line.rfind("; ", line.find('\n')) + 2;
    return line.substr(from, line.find('\n') - from);
}

// Reproduces the run's own sample up to its end-of-text token, which ends generation: from a
// checkpoint under any name, or from a copy of weights, config and manifest, with any number of
// threads. The first of several samples is the same, the others differ; --quiet prints only the
// text.
TEST(generate_sample) {
    const Text sample = train("abc");
    Outcome o = program(TRAINED "-g 60 --prompt abc");
    expect_made(o, "--generate");
    const Text made = o.out.substr(0, o.out.size() - 1);
    // The run's own sample continues after its end-of-text token, which is not printed.
    expect(made.size() > 30 && sample.compare(0, made.size(), made) == 0, "%s, sample %s",
           made.c_str(), sample.c_str());
    expect(has(o.err, " prompt tokens, ") && has(o.err, " tokens/s") &&
           !has(o.err, "untrained"), "%s", o.err.c_str());
    const Text plan = program(TRAINED "-g 60 --plan").out;
    expect(has(plan, memory_of(o.err) + "\n") && has(plan, "KV cache") && !has(plan, "gradients") &&
           !has(plan, "moments"), "%s: %s", memory_of(o.err).c_str(), plan.c_str());
    for (const char *threads : {"1", "2", "3"}) {
        o = program(TRAINED "-g 60 --prompt abc --quiet", with("OMP_NUM_THREADS", threads));
        expect(o.status == 0 && o.out == made + "\n" && o.err.empty(), "%s threads: %s", threads,
               (o.out + o.err).c_str());
    }
    // Samples depend on the step, which is read from the manifest, whatever the folder's name.
    expect(symlink("out/step-00000300", "latest") == 0 && symlink("latest", "other-7") == 0);
    for (const char *e : {"latest", "other-7/", "latest/model.safetensors"}) {
        o = program(Text("--generate -g 60 --prompt abc --quiet " SAMPLING "-e ") + e);
        expect(o.status == 0 && o.out == made + "\n", "%s: %s", e, (o.out + o.err).c_str());
    }
    write_model("hf", in_checkpoint("out", 300, SAVED_MODEL),
                in_checkpoint("out", 300, SAVED_CONFIG));
    write_file("hf/manifest.json", in_checkpoint("out", 300, SAVED_MANIFEST));
    o = program("--generate -e hf -g 60 " SAMPLING "--prompt abc --samples 3");
    expect_made(o, "three samples of a folder");
    const size_t second = made.size() + 5, third = o.out.find("\n---\n", second) + 5;
    expect(o.out.compare(0, second, made + "\n---\n") == 0 && third > second + 3 &&
           o.out.substr(second, third - 5 - second) != made &&
           o.out.substr(third, o.out.size() - 1 - third) !=
               o.out.substr(second, third - 5 - second), "%s", o.out.c_str());
}

// Each line of stdin is a prompt, including empty lines and a last line without a newline.
TEST(generate_stdin) {
    train("abc");
    Text want;
    for (const char *prompt : {"abc", "", "caf\xc3\xa9\xff"}) {
        Outcome o = program(Text(TRAINED "--quiet --prompt=") + prompt);
        expect_success(o, prompt);
        expect(o.out.compare(0, strlen(prompt), prompt) == 0, "%s", o.out.c_str());
        want += (want.empty() ? "" : "---\n") + o.out;
    }
    Outcome o = program(TRAINED "--quiet --prompt -", with_stdin("abc\n\ncaf\xc3\xa9\xff"));
    expect_success(o, "stdin");
    expect(o.out == want, "%s, want %s", o.out.c_str(), want.c_str());
    o = program(TRAINED "--prompt -", with_stdin(""));
    expect(o.status == 0 && o.out.empty(), "no line: %s", (o.out + o.err).c_str());
    o = program(TRAINED "--quiet --prompt -", with_stdin("abc\n12345678901234567\nd\n"));
    expect(o.status == 1 && want.find(o.out) == 0, "%s", o.out.c_str());
    expect(has(o.err, "--prompt: line 2 of stdin has 17 tokens, more than"), "%s", o.err.c_str());
    const Text zeros = Text("a\0b", 3);
    o = program(TRAINED "--quiet --prompt -", with_stdin(zeros));
    expect(o.status == 0 && o.out.compare(0, 3, zeros) == 0, "a zero in a line: %s",
           (o.out + o.err).c_str());
}

// A model that memorized one line prints it and stops at the end-of-text token, or after the
// maximum number of tokens. An untrained model is reported.
TEST(generate_end) {
    Ids tokens;
    for (int i = 0; i < 400; i++) {
        tokens.push_back((uint16_t)(i % 8 == 7 ? 256 : 'a' + i % 8));
    }
    write_file("line.bin", shard_bytes(tokens, BYTE_TOKENS));
    expect_success(program("-i line.bin -e l1h2c32t16 -b 4 -x 150 -l 1e-2 --quiet -o out"),
                   "training");
    Outcome o = program("--generate -e out/step-00000150 --temperature 0 --prompt abc");
    expect_made(o, "--prompt abc");
    expect(o.out == "abcdefg\n" && has(o.err, "3 prompt tokens, ") &&
           has(o.err, "\n3 prompt"), "%s", (o.out + o.err).c_str());
    o = program("--generate -e out/step-00000150 --temperature 0 -g 2 --quiet");
    expect(o.status == 0 && o.out == "ab\n", "%s", o.out.c_str());
    o = program("--generate -e l1h1c8t16 -g 3");
    expect(o.status == 0 && has(o.err, "untrained: initial weights of --seed 42"),
           "%s", o.err.c_str());
    write_model("odd", safetensors_bytes(hugging_face(Shape{1, 1, 8, 16, 300}, {"F32"}, "")),
                config_text(Shape{1, 1, 8, 16, 300}));
    expect_refused(program("--generate -e odd"),
                   "--generate: odd has a vocabulary of 300 and no merges.txt; give one with", "V");
}

// GPT-2 tokens are printed as numbers without a vocabulary, and as text with the one next to the
// weights.
TEST(generate_gpt2) {
    Ids tokens;
    for (int i = 0; i < 400; i++) {
        tokens.push_back((uint16_t)(i % 4 ? 995 : 50256));
    }
    write_file("gpt2.bin", shard_bytes(tokens, GPT2_TOKENS));
    expect_success(program("-i gpt2.bin -e l1h2c16t16 -b 2 -x 40 -l 2e-2 --quiet -o out"), "train");
    const Text run = "--generate -e out/step-00000040 --temperature 0 --quiet -g 3 ";
    Outcome o = program(run);
    expect(o.status == 0 && o.out == "995 995 995 \n", "%s", (o.out + o.err).c_str());
    expect_refused(program(run + "--prompt=Hello"), "prepare.sh, which puts vocab.bpe", "no text");
    write_file("out/step-00000040/merges.txt", vocab_bpe());
    o = program(run);
    expect(o.status == 0 && o.out == " world world world\n", "%s", (o.out + o.err).c_str());
    o = program(run + "--prompt=Hello,\xc3\xa9");
    expect(o.status == 0 && o.out.find("Hello,\xc3\xa9") == 0, "%s", (o.out + o.err).c_str());
}

// A model with its own vocabulary of 1,000 tokens trains, samples, saves its tokenizer, resumes
// with the same bits, and generates from its checkpoint alone, even from a copy of two of its files
// and the merges.
TEST(generate_own) {
    const Words words = write_own_data();
    Text line;
    for (const Text &word : words) {
        line += word;
    }
    const Text run = "-i mine_train.bin -j mine_val.bin -e l1h2c32t16 -b 4 -l 2e-2 -k constant "
                     "-n 60 -m 3 -v 120 --temperature 0 -g 8 ";
    Outcome o = program(run + "-x 120 -s 120 -o out");
    expect_success(o, "training");
    expect(has(o.out, "vocabulary 1000 (1024 rows)") &&
           has(o.out, "\n<|endoftext|>" + line + "<|endoftext|>\n---"), "%s", o.out.c_str());
    const Text folder = "out/step-00000120/", vocabulary = read_file(folder + "vocab.json");
    const Text token = "\"" + merges_word(words[0]) + "\": 262, ";
    const Text end = ", \"<|endoftext|>\": 999}";
    expect(read_file(folder + "merges.txt") == stories_merges(), "other merges");
    expect(json_valid(vocabulary) && has(vocabulary, end) && has(vocabulary, token));
    const Text config = read_file(folder + "config.json");
    expect(json_valid(config) && has(config, "\"vocab_size\": 1000,") &&
           has(config, "\"eos_token_id\": 999}"), "%s", config.c_str());
    expect_success(program(run + "-x 60 -o half"), "the first half");
    expect_success(program(run + "-x 120 -y 1 -o half"), "resumed");
    expect(tensors_of("half", 120) == tensors_of("out", 120) && !tensors_of("out", 120).empty(),
           "a resume gives different bits");
    const Text generate = "--generate --temperature 0 --quiet -e ";
    o = program(generate + folder);
    expect(o.out == line + "\n", "%s", (o.out + o.err).c_str());
    o = program("--generate -g 2 -e " + folder + " --prompt=Can");  // token 998
    expect(o.status == 0 && has(o.err, "\n1 prompt tokens"), "%s", o.err.c_str());
    write_model("copy", read_file(folder + "model.safetensors"), config);
    expect_refused(program(generate + "copy"), "copy has a vocabulary of 1000 and no merges.txt",
                   "no merges");
    expect(program(generate + "copy --tokenizer mine_merges.txt").out == line + "\n");
    write_file("copy/merges.txt", stories_merges());
    expect(program(generate + "copy/model.safetensors").out == line + "\n");
    expect_success(program("-i mine_train.bin -e copy -b 2 -x 1 --quiet"), "those weights");
    expect_success(program("-i mine_train.bin -e l1h1c8t16v1000 -b 2 -x 1 --quiet"), "v1000");
}

// Data, tokenizer, weights and shape that disagree are refused with a message that names them.
TEST(own_refused) {
    write_own_data();
    Text other = stories_merges();
    other.resize(other.rfind('\n', other.size() - 2) + 1);  // one merge fewer
    write_file("fewer.txt", other);
    Text swapped = stories_merges();
    swapped.replace(swapped.rfind('\n', swapped.size() - 2) + 1, Text::npos, "q q\n");
    write_file("other.txt", swapped);
    const Text own = read_file("mine_train.bin");
    write_file("hash_train.bin", with_int(own, 5, 1));
    write_file("alone_train.bin", own);
    write_file("alone.bin", own);
    write_file("wrong_train.bin", own);
    write_file("wrong_merges.txt", swapped);
    write_file("gpt2.bin", shard_bytes(Ids(400, 7), GPT2_TOKENS));
    const Shape m = {1, 1, 8, 16, OWN_VOCABULARY};
    write_model("model", safetensors_bytes(hugging_face(m, {"F32"}, "")), config_text(m));
    write_file("model/merges.txt", swapped);
    static const Refusal refusals[] = {
        {"-i mine_train.bin -j hash_train.bin", "hash_train.bin has 1000 own tokens (01000000)"},
        {"-i mine_train.bin -j val.bin", "(-j): val.bin has bytes; mine_train.bin has 1000 own"},
        {"-i mine_*.bin -j train.bin", "train.bin has bytes; "},
        {"-i *_train.bin", "hash_train.bin has 1000 own tokens (01000000); alone_train.bin has"},
        {"-i alone_train.bin -s 1", "alone_train.bin needs its merges: alone_merges.txt cannot be "
                                    "read; give their file with --tokenizer"},
        {"-i alone.bin -o out", "alone.bin needs its merges: give their file with --tokenizer"},
        {"-i wrong_train.bin -o out", "wrong_merges.txt has 1000 own tokens"},
        {"-i mine_train.bin --tokenizer fewer.txt", "fewer.txt has 999 own tokens"},
        {"-i mine_train.bin --tokenizer other.txt", "other.txt has 1000 own tokens"},
        {"-i gpt2.bin --tokenizer mine_merges.txt", "mine_merges.txt: not GPT-2's vocabulary"},
        {"-i train.bin --tokenizer mine_merges.txt", "--tokenizer: train.bin has byte tokens"},
        {"-i mine_train.bin -e l1h1c8t16v999", "v999 names a vocabulary of 999; the data, "},
        {"-i mine_train.bin -e model", "model/merges.txt has the SHA-256 "},
        {"-i train.bin -e model", "model has a vocabulary of 1000 tokens, the data train.bin one"},
    };
    for (auto &row : refusals) {
        const Text shape = strstr(row.arguments, "-e ") ? "" : "-e l1h1c8t16 ";
        expect_refused(program(shape + "-x 1 -b 2 " + row.arguments), row.words, row.arguments);
    }
    expect_refused(program("--generate -e model --tokenizer fewer.txt"),
                   "--tokenizer: fewer.txt has 999 tokens; --model (-e) model has 1000", "fewer");
    expect_success(program("-e d12 --plan --gpu t4 -i mine_train.bin"), "a preset");
    detail = text("%zu refusals", sizeof refusals / sizeof refusals[0]);
}

// Options without effect on generation are refused with their names, and so is a prompt longer than
// T.
TEST(generate_refused) {
    static const Refusal refusals[] = {
        {"-y 1 -o out", "--generate neither trains nor writes files: leave --output out"},
        {"-x 3", "leave --steps out"},
        {"-i train.bin", "leave --train-data out"},
        {"-b 2", "leave --batch out"},
        {"-s 0", "leave --sample-every out"},
        {"--eval e.bin", "leave --eval out"},
        {"--offload weights", "leave --offload out"},
        {"-t 17", "--seq-len (-t): 17 is more than the model's 16"},
        {"--prompt=12345678901234567", "--prompt: 17 tokens, more than --seq-len (-t) 16"},
        {"-t 4 --prompt=12345", "--prompt: 5 tokens, more than --seq-len (-t) 4"},
        {"--tokenizer v", "--tokenizer: l1h1c8t16 has byte tokens"},
    };
    for (auto &row : refusals) {
        expect_refused(program(Text("--generate -e l1h1c8t16 ") + row.arguments), row.words,
                       row.arguments);
    }
    const Outcome whole = program("--generate -e l1h1c8t16 -g 1 --prompt=1234567890123456");
    expect(whole.status == 0, "T tokens: %s", whole.err.c_str());
    expect_refused(program("--samples 2"), "--samples needs --generate", "--samples");
}

// A signal ends generation with status 0, even while it waits for stdin or for a stopped reader; so
// does a closed pipe. A full disk is an error.
TEST(generate_signal) {
    pid_t pid = start("--generate -e l2h2c64t64 -g 1000000 --temperature 2");
    wait_until([] { return read_file("stdout").size() > 200; });
    kill(pid, SIGINT);
    Outcome o = outcome(pid);
    expect(o.status == 0 && has(o.err, "stopping; a second signal"), "status %d: %s",
           o.status, o.err.c_str());
    int ends[2];
    expect(pipe(ends) == 0);
    pid = start("--generate -e l1h1c8t16 -g 3 --prompt -", [ends] { dup2(ends[0], 0); });
    wait_until([] { return has(read_file("stderr"), "untrained"); });
    usleep(200000);
    kill(pid, SIGTERM);
    o = outcome(pid);
    expect(o.status == 0 && o.out.empty(), "status %d: %s", o.status, o.err.c_str());
    // A write that is blocked by a stopped reader is not interrupted, as its text would be lost.
    expect(pipe(ends) == 0 && write(ends[1], "a\n", 2) == 2);
    pid = start("--generate -e l1h1c8t16 --samples 100000 --prompt -", [ends] {
        int paused[2];  // one page; its read end stays open but is never read
        expect(pipe(paused) == 0 && fcntl(paused[1], F_SETPIPE_SZ, 4096) == 4096);
        dup2(ends[0], 0);
        dup2(paused[1], 1);
    });
    wait_until([] { return has(read_file("stderr"), "untrained"); });
    usleep(1000000);
    kill(pid, SIGTERM);
    o = outcome(pid);
    expect(o.status == 0, "a paused reader: status %d: %s", o.status, o.err.c_str());
    o = program("--generate -e l1h1c8t16 -g 100000", [] {
        int gone[2];
        if (pipe(gone) == 0) {
            close(gone[0]);
            dup2(gone[1], 1);
        }
    });
    expect(o.status == 0, "a closed pipe: status %d: %s", o.status, o.err.c_str());
    o = program("--generate -e l1h1c8t16 -g 100000", [] {
        dup2(open("/dev/full", O_WRONLY), 1);
    });
    expect(o.status == 1 && has(o.err, "cannot write to stdout: No space left"),
           "a full disk: status %d: %s", o.status, o.err.c_str());
}

int main(int argc, char **argv) {
    return harness_main(argc, argv, "./train_gpt2");
}
