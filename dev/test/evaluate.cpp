// evaluate.cpp -- --eval and samples: scores, output lines and JSON; samples are text if the
// vocabulary is available.
//
// Run:    build/test/evaluate [--program build/train_gpt2_asan] [NAME...]

#include "files.h"
#include <sstream>

static const char gpt2_run[] = "-i gpt2.bin -e l1h1c8t16 -b 1 -x 1 -s 1 -g 9 ";
static const char sample_begins[] = "--- sample after step 1 ---\n";

// Returns the tokens of a sample that was printed as numbers.
static Ids sampled_ids(const Outcome &o) {
    Ids ids;
    std::istringstream numbers(o.out.substr(o.out.find(sample_begins) + strlen(sample_begins)));
    for (size_t id; numbers >> id;) {
        ids.push_back((uint16_t)id);
    }
    return ids;
}

// Without the vocabulary a sample of GPT-2 tokens is printed as numbers, and a prompt is refused;
// no other vocabulary is accepted, even if well formed.
TEST(no_vocabulary) {
    write_file("gpt2.bin", shard_bytes(Ids(400, 995), GPT2_TOKENS));
    write_file("bytes.bin", shard_bytes(Ids(400, 99), BYTE_TOKENS));
    write_file("made", made_merges());
    const Text run = gpt2_run;
    Outcome o = program(run);
    expect_success(o, "no vocabulary");
    const Ids ids = sampled_ids(o);
    expect(ids.size() == 10 && ids[0] == 50256, "%zu tokens", ids.size());
    expect_refused(program(run + "--prompt=Hello"), "prepare.sh, which puts vocab.bpe", "--prompt");
    expect_refused(program(run + "--tokenizer absent"), "cannot read vocabulary absent", "absent");
    expect_refused(program(run + "--tokenizer made"),
                   "made: not GPT-2's vocabulary: 50257 tokens with fingerprint", "made up");
    expect_refused(program("-i bytes.bin -e l2h2c16t16 --tokenizer made"),
                   "--tokenizer: bytes.bin has byte tokens", "bytes");
}

// With the vocabulary, a sample of GPT-2 tokens is text, and a prompt is accepted.
TEST(bpe_samples) {
    const Words tokens = tokens_of_merges(vocab_bpe());
    write_file("gpt2.bin", shard_bytes(Ids(400, 995), GPT2_TOKENS));
    write_file("vocab", vocab_bpe());
    // The same sample as numbers and, if the vocabulary is available, as text.
    const Text run = gpt2_run, before = sample_begins, after = "\n---\n";
    Outcome o = program(run), p = program(run + "--tokenizer vocab");
    expect_success(o, "no vocabulary");
    expect_success(p, "--tokenizer vocab");
    Text decoded;
    for (const uint16_t id : sampled_ids(o)) {
        decoded += id < tokens.size() ? tokens[id] : "(no such token)";
    }
    expect(tokens.size() == 50257 && tokens[995] == " world", "%zu tokens", tokens.size());
    expect(has(p.out, before + decoded + after), "%s", p.out.c_str());
    o = program(run + "--tokenizer vocab --prompt=Hello,\xc3\xa9 -o out");
    expect_success(o, "--prompt");
    expect(has(o.out, before + "Hello,\xc3\xa9"), "%s", o.out.c_str());
    expect(has(read_file("out/log.jsonl"), "\"sample\":\"Hello,\xc3\xa9"));
    expect(log_steps("out/log.jsonl") == one_to(1), "every line of the log is JSON");
    expect_refused(program(run + "--tokenizer vocab --prompt=1,2,3,4,5,6,7,8,9"),
                   "--prompt: 17 tokens, more than --seq-len (-t) 16", "long prompt");
}

// --eval needs no data file. Its output lines and JSON are as documented, the score is the same for
// any B, a T or a vocabulary that is too small is reported, and an interruption is not an error.
TEST(eval_command) {
    std::vector<Question> questions = random_questions(12, 50257, 2);
    const Text run = "-e l1h1c16t16 --eval e.bin ", first = "e.bin: 12 examples, accuracy ";
    auto last_line = [](const Outcome &o) {
        size_t end = o.out.size() > 1 ? o.out.rfind('\n', o.out.size() - 2) : Text::npos;
        return o.out.substr(end == Text::npos ? 0 : end + 1);
    };
    write_file("e.bin", eval_bytes(questions));
    Outcome o = program(run + "-b 4");
    const Text line = last_line(o);
    double p = NAN, error = NAN, norm = NAN, norm_error = NAN;
    expect_success(o, "--eval");
    expect(line.find(first) == 0 && sscanf(&line[first.size()], "%lf %% +- %lf, acc_norm %lf %% +- "
                                           "%lf\n", &p, &error, &norm, &norm_error) == 4,
           "%s", line.c_str());
    expect_near(error, sqrt(p * (100 - p) / 12), 0.006, "standard error");
    expect_near(norm_error, sqrt(norm * (100 - norm) / 12), 0.006, "standard error");
    expect(std::count(o.out.begin(), o.out.end(), '\n') == 2 + 3 + 9 + 1, "%s", o.out.c_str());
    size_t longest = 0;
    for (const Question &q : questions) {
        for (const Ints &completion : q.completions) {
            longest = std::max(longest, q.context.size() + completion.size());
        }
    }
    const Text sizes = text("12 examples of at most %zu tokens; B 4, T 16\n", longest);
    expect(has(o.out, sizes), "%s", o.out.c_str());
    for (const char *b : {"-b 1", "-b 7", "-b 50"}) {
        o = program(run + "--quiet " + b);
        expect_success(o, b);
        expect(o.out == line, "%s: %s", b, o.out.c_str());
    }
    o = program(run + "--json -t 12");
    expect_success(o, "--json");
    expect(json_valid(o.out) && std::count(o.out.begin(), o.out.end(), '\n') == 1 &&
               o.out.find("{\"file\":\"e.bin\",\"model\":\"l1h1c16t16\",\"sequence\":12,"
                          "\"examples\":12,\"of\":12,") == 0 &&
               has(o.out, text("\"correct\":%.0f,", p * 0.12)) &&
               fabs(last_value(o.out, "acc_norm") - last_value(o.out, "correct_norm") / 12) < 1e-8,
           "%s", o.out.c_str());
    o = program(run + "--quiet -t 5");
    expect(has(o.out, "rows were truncated at the start: with T = 5, "));
    expect_refused(program(run + "-t 4"), ": a completion has 5 tokens, more than --seq-len (-t) 4",
                   "a short T");
    expect_refused(program(run + "-t 17"), "--seq-len (-t): 17 is more than the model's 16", "-t");
    questions[7].completions[3].back() = 50257;
    write_file("e.bin", eval_bytes(questions));
    expect_refused(program(run), "e.bin: example 7: token 50257 is outside", "a token too many");
    write_file("e.bin", eval_bytes(random_questions(60, 50257, 3)));
    pid_t pid = start(run);
    wait_until([] { return has(read_file("stdout"), "example "); });
    kill(pid, SIGINT);
    o = outcome(pid);
    expect(o.status == 0 && o.err == "stopping; a second signal quits at once\n",
           "status %d, stderr: %s", o.status, o.err.c_str());
    expect(has(o.out, "e.bin: interrupted after ") &&
           has(o.out, " of 60 examples, accuracy "), "%s", o.out.c_str());
}

// --eval uses the weights that -e names: a checkpoint answers the questions its run memorized.
TEST(eval_checkpoint) {
    expect_success(program("-i train.bin --shuffle 0 -e l1h2c32t16 -b 2 -a 1 -x 240 -l 3e-3 "
                           "--quiet -o out"), "training");
    const Text corpus = read_file("train.bin");
    std::vector<Question> questions = random_questions(8, 257, 4);
    for (int i = 0; i < 8; i++) {
        Question *q = &questions[(size_t)i];
        Ids tokens(9);
        memcpy(tokens.data(), &corpus[SHARD_BYTES + 2 * (size_t)i], 2 * tokens.size());
        q->context.assign(tokens.begin(), tokens.begin() + 6);
        q->completions[(size_t)q->label].assign(tokens.begin() + 6, tokens.end());
    }
    write_file("e.bin", eval_bytes(questions));
    Outcome o = program("-e out/step-00000240 --eval e.bin");
    expect_success(o, "-e FOLDER");
    expect(has(o.out, "out/step-00000240: vocabulary 257, loaded weights") &&
               has(o.out, ", acc_norm 100.00 % +- 0.00\n"), "%s", o.out.c_str());
    write_file("e.bin", eval_bytes(random_questions(3, 50257, 2)));
    expect_refused(program("-e out/step-00000240 --eval e.bin"),
                   "outside the model's vocabulary of 257", "tokens of another vocabulary");
}

int main(int argc, char **argv) {
    return harness_main(argc, argv, "./train_gpt2");
}
