// checkpoints.cpp -- checkpoint folders changed by a user, a full disk or another program: damaged
// checkpoints are reported and skipped, those of other runs are refused, no complete checkpoint is
// lost, and a resumed run ends with the same bytes as an uninterrupted one.
//
// Run:    build/test/checkpoints [--program build/train_gpt2_asan] [NAME...]

#include "files.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>

// Expects that a run resumed from an older checkpoint and printed, for every newer one, a line with
// the reason, such as "step-00000008: config.json".
static void passed_over_at(int line, const Outcome &o, const Words &skipped, const Text &who) {
    bool all = o.status == 0;
    for (const Text &what : skipped) {
        all = all && has(o.err, "train_gpt2: skipped out/" + what);
    }
    if (!all || std::count(o.err.begin(), o.err.end(), '\n') != (long)skipped.size()) {
        fail(__FILE__, line, who + text(": status %d, stderr: ", o.status) + o.err.substr(0, 600));
    }
}
#define expect_passed_over(outcome, who, ...) passed_over_at(__LINE__, outcome, {__VA_ARGS__}, who)

static const char eight_steps[] = TINY "--quiet -x 8 -n 2 -y 1 -o out ";
static const char every_second[] = "step-00000002 step-00000004 step-00000006 step-00000008";

// A damaged checkpoint is reported and skipped, and the run resumed from the previous one ends with
// the same bytes.
TEST(checkpoint_damaged) {
    const Text run = eight_steps;
    expect_success(program(run), "first run");
    expect(names_in("out", "step") == every_second);
    const Text good = checkpoint_bytes("out", 8), at = "out/step-00000008/";
    for (int i = 0; i < SAVED_FILES; i++) {
        const Text path = at + saved_files[i], file = read_file(path);
        const Text newest = "step-00000008: ";
        // The message for a damaged manifest may name one of its entries instead.
        const Text named = newest + (i == SAVED_MANIFEST ? "" : saved_files[i]);
        const size_t size = file.size();
        for (size_t byte : {(size_t)0, (size_t)9, size / 3, size - 1, size}) {
            Text bad = file;
            byte < size ? (void)(bad[byte] ^= 4) : bad.push_back('x');
            write_file(path, bad);
            expect_passed_over(program(run), text("byte %zu", byte), named);
            expect(checkpoint_bytes("out", 8) == good, "%s, byte %zu", path.c_str(), byte);
        }
        for (size_t length : {(size_t)0, (size_t)5, size / 2, size - 2}) {
            write_file(path, file.substr(0, length));
            expect_passed_over(program(run), text("cut to %zu", length), named);
        }
        unlink(path.c_str());
        expect_passed_over(program(run), "missing", newest + saved_files[i]);
        expect(checkpoint_bytes("out", 8) == good, "%s missing", path.c_str());
    }
}

// If no checkpoint is complete, nothing is deleted and no run starts; another run's checkpoint is
// refused.
TEST(checkpoint_foreign) {
    const Text run = eight_steps;
    expect_success(program(run), "first run");
    const Text tensors = tensors_of("out", 8);
    for (int step = 2; step <= 8; step += 2) {
        write_file(text("out/step-%08d/config.json", step), "{}");
    }
    Outcome o = program(run);
    expect(o.status == 1 && has(o.err, "no checkpoint in out is complete"), "%s", o.err.c_str());
    expect(names_in("out", "step") == every_second);
    expect_success(program(TINY "--quiet -x 8 -n 2 -y 1 -o again"), "again");
    remove_folder("out");
    expect(rename("again", "out") == 0 && tensors_of("out", 8) == tensors);
    expect_refused(program("-i train.bin -e l2h2c32t16 -b 2 -x 8 -n 2 -y 1 -o out"),
                   "it has shape l2h2c16t16; this run: shape l2h2c32t16\n", "another shape");
    write_file("gpt2.bin", shard_bytes(Ids(3000, 995), GPT2_TOKENS));
    expect_refused(program("-i gpt2.bin -e l2h2c16t16 -b 2 -x 8 -n 2 -y 1 -o out"),
                   "it was trained on train.bin; gpt2.bin has different tokens",
                   "another vocabulary");
    expect_refused(program("-i train.bin -e out"), "use one of its step-NNNNNNNN", "-e RUN");
    Text other = read_file("train.bin");  // same length, different tokens
    other.replace(SHARD_BYTES, 2000, other.substr(SHARD_BYTES + 1000, 2000));
    write_file("other.bin", other);
    expect_refused(program("-i other.bin -e l2h2c16t16 -b 2 -x 8 -n 2 -y 1 -o out"),
                   "it was trained on train.bin; other.bin has different tokens", "other data");
}

// A resume must agree with its checkpoint in everything that determines the tokens of a step.
TEST(checkpoint_identity) {
    expect_success(program(TINY "--quiet -x 2 -o out"), "first run");
    for (const char *other : {"--seed 2", "-t 8", "--shuffle 0", "-i val.bin"}) {
        const Text data = other[1] == 'i' ? "" : "-i train.bin ";
        expect_refused(program(data + "-e l2h2c16t16 -b 2 --quiet -x 4 -y 1 -o out " + other),
                       Text("checkpoint out/step-00000002 is from a different run: it ") +
                           (other[1] == '-'   ? "has --"
                            : other[1] == 't' ? "has sequence 16; this run: sequence 8"
                                              : "was trained on train.bin; val.bin has diff"),
                       other);
    }
    expect_success(program(TINY "--quiet -x 4 -l 1e-3 -y 1 -o out"), "another learning rate");
}

// A resume without -i and -j reads the data files that its checkpoint names, even if the newest
// checkpoint is damaged and an older one is used.
TEST(resume_data) {
    rename("val.bin", "some_val.bin");
    rename("train.bin", "some_train.bin");
    const Text run = "-e l2h2c16t16 -b 2 -n 2 -v 2 -m 2 -o out ";
    expect_success(program(run + "-i some_train.bin -x 6"), "first run");
    const Text tensors = tensors_of("out", 6);
    expect(values_in(read_file("out/log.jsonl"), "val_loss").size() == 3, "some_val.bin not used");
    write_file("out/step-00000006/" + Text(saved_files[SAVED_STATE]), "x");
    Outcome o = program(run + "-y 1 -x 6");
    expect(o.status == 0 && has(o.out, "data     some_train.bin: 3,000 tokens"), "%s",
           (o.out + o.err).c_str());
    expect(tensors_of("out", 6) == tensors && !tensors.empty(), "another end");
    expect(values_in(read_file("out/log.jsonl"), "val_loss").size() == 3, "no validation");
    rename("some_train.bin", "gone.bin");
    expect_refused(program(run + "-y 1 -x 8"),
                   "no token file matches some_train.bin; data/tokenize makes token", "gone");
    o = program(run + "-y 1 -x 8 -i gone.bin");
    expect(o.status == 0 && has(o.out, "no validation"), "%s", o.out.c_str());
}

// Data that has changed since the checkpoint: other training data is refused, other validation data
// under the same name is reported. The first and last MiB of each shard are compared; --check-data
// compares all bytes with a checkpoint of a run that read all of them.
TEST(data_changed) {
    enum { TOKENS = 1600000, MIB = 1 << 20 };  // 3.05 MiB, so that the middle is in no edge
    Ids tokens(TOKENS);
    for (size_t i = 0; i < TOKENS; i++) {
        tokens[i] = (uint16_t)(97 + i % 7);
    }
    const Text good = shard_bytes(tokens, BYTE_TOKENS), val = read_file("val.bin");
    write_file("two.bin", good);
    write_file("one.bin", good);
    const Text run = "-i [ot]*.bin -j val.bin -e l1h1c8t16 -b 1 -v 2 -m 1 --quiet -y 1 -o out ";
    const Text steps = run + "-x 2";
    expect_success(program(steps), "first run");
    expect_success(program(steps), "nothing has changed");
    auto flipped = [](Text bytes, size_t at) {
        bytes[at] ^= 1;
        return bytes;
    };
    const size_t size = good.size();
    for (size_t at : {(size_t)800, (size_t)MIB - 1, size - MIB, size - 1}) {
        write_file("two.bin", flipped(good, at));
        expect_refused(program(steps), "checkpoint out/step-00000002 was trained on other data: "
                       "two.bin has changed in its first or last MiB; -e out/step-00000002 -o "
                       "FOLDER starts", text("byte %zu", at));
    }
    write_file("two.bin", flipped(good, MIB));
    expect_success(program(steps), "beyond the edges");
    expect_success(program(steps + " --check-data"), "nothing recorded");
    write_file("two.bin", good);
    expect_success(program(run + "-x 4 --check-data"), "recorded");
    for (size_t at : {(size_t)MIB, size - MIB - 2}) {
        write_file("two.bin", flipped(good, at));
        expect_success(program(run + "-x 4"), text("byte %zu", at));
        expect_refused(program(run + "-x 4 --check-data"), "other data: two.bin has changed; -e",
                       text("byte %zu", at));
    }
    write_file("two.bin", good);
    expect_success(program(run + "-x 6 --keep 1"), "the recorded hash is kept");
    write_file("two.bin", flipped(good, MIB));
    expect_refused(program(run + "-x 6 --check-data"), "other data: two.bin has changed; -e",
                   "a hash of an earlier run");
    Text bad = good;
    bad.replace(SHARD_BYTES + 2000000, 2, "\xff\xff");
    write_file("two.bin", bad);
    expect_refused(program("-i two.bin -e l1h1c8t16 -b 1 -x 1 --check-data"),
                   "two.bin: token 1000000 is 65535, outside the vocabulary of 257", "a token");
    write_file("two.bin", good);
    write_file("val.bin", flipped(val, SHARD_BYTES + 100));
    Outcome o = program(run + "-x 6");
    expect(o.status == 0 && has(o.err, "warning: the validation data has changed since "
                                "checkpoint out/step-00000006: val.bin has changed in its "),
           "%s", o.err.c_str());
    write_file("val.bin", shard_bytes(Ids(90, 97), BYTE_TOKENS));
    o = program(run + "-x 6");
    expect(o.status == 0 && has(o.err, "val.bin has 1204 bytes, it had 1824; "), "%s",
           o.err.c_str());
    write_file("other.val", val);
    o = program("-i [ot]*.bin -j other.val -e l1h1c8t16 -b 1 -v 2 -m 1 -y 1 -x 6 -o out");
    expect(o.status == 0 && o.err.empty() && has(o.out, "--val-data is other.val, was val.bin"),
           "%s", o.err.c_str());
    // A checkpoint without the keys, of an older version, is resumed with whatever data.
    const Text state = in_checkpoint("out", 6, SAVED_STATE);
    write_file(Text("out/step-00000006/") + saved_files[SAVED_STATE],
               with_header(with_header(state, "train_shards", "x"), "val_shards", "y"));
    write_manifest("out/step-00000006");
    write_file("two.bin", flipped(good, 800));
    o = program(run + "-x 6");
    expect(o.status == 0 && o.err.empty(), "%s", o.err.c_str());
}

// A flipped bit anywhere in a shard of data/tokenize is found by --check-data.
TEST(data_bits) {
    Text words;
    for (int i = 0; i < 6000; i++) {
        words += text("%d ", i * i);
    }
    write_file("text.txt", words);
    expect(system(("'" + root + "/data/tokenize' --bytes -o t text.txt > made").c_str()) == 0);
    const Text good = read_file("t_train.bin");
    const Text run = "-i t_train.bin -e l1h1c8t16 -b 1 -x 1 --quiet --check-data";
    expect_success(program(run), "undamaged");
    for (uint64_t i = 0; i < 12; i++) {
        const double unit = random_unit(11, i);
        const size_t at = (size_t)(unit * (i % 3 ? (double)good.size() : 1024));
        Text bad = good;
        bad[at] ^= (char)(1 << (int)(random_unit(12, i) * 8));
        write_file("t_train.bin", bad);
        expect_refused(program(run), "t_train.bin", text("byte %zu", at));
    }
}

// A checkpoint of a byte model has a model card that explains its token ids, and is complete even
// without the card.
TEST(model_card) {
    const Text run = TINY "--quiet -n 2 --keep 1 -o out ", card = "out/step-00000002/README.md";
    expect_success(program(run + "-x 2"), "bytes");
    expect(has(read_file(card), "id b is the byte b"), "%s", read_file(card).c_str());
    unlink(card.c_str());
    expect_success(program(run + "-x 4 -y 1"), "without the card");
    expect_success(program(run + "-x 6 -y 1"), "with it");
    expect(names_in("out", "step") == "step-00000006", "%s", names_in("out", "").c_str());
    write_file("gpt2.bin", shard_bytes(Ids(400, 7), GPT2_TOKENS));
    expect_success(program("-i gpt2.bin -e l1h1c8t16 -b 1 -x 1 --quiet -o other"), "GPT-2's");
    expect(exists("other/step-00000001/config.json") && !exists("other/step-00000001/README.md"));
}

// Returns the lines of `out` that start with `begin`.
static Text lines_with(const Text &out, const Text &begin) {
    Text lines;
    for (size_t at = 0; (at = out.find("\n" + begin, at)) != Text::npos; at++) {
        lines += out.substr(at + 1, out.find('\n', at + 1) - at);
    }
    return lines;
}

// A resume reports the options that differ from the checkpoint's and take effect from here on, and
// refuses those that must not differ. Options that do not describe the run (--output, --resume,
// --quiet) may differ without a report.
TEST(resume_options) {
    write_file("same.bin", read_file("train.bin"));
    expect_success(program(TINY "--quiet -x 2 -l 1e-3 --top-k 5 --prompt \x1b[2J -o out"), "first");
    Outcome o = program("-i same.bin -e l2h2c16t16 -b 1 -d 32 -x 4 -y 1 -o ./out --dtype fp32");
    expect_success(o, "resumed");
    const Text told = lines_with("\n" + o.out, "  --");
    expect(has(o.out, "\nresumed from ./out/step-00000002\n  --") &&
           told == "  --train-data is same.bin, was train.bin\n  --batch is 1, was 2\n"
           "  --tokens-per-step is 32, was not given\n  --steps is 4, was 2\n"
           "  --lr is 0.0003, was 0.001\n  --prompt is not given, was $'\\033[2J'\n"
           "  --top-k is 0, was 5\n  --dtype is fp32, was not given\n", "%s", told.c_str());
    o = program("-i same.bin -e l2h2c16t16 -b 1 -d 32 -x 6 -y 1 -o out --dtype fp32 --quiet");
    expect(o.status == 0 && o.out.empty() && o.err.empty(), "--quiet: %s", o.out.c_str());
    // An option unknown to the program that wrote the checkpoint has its default value there.
    const Text state = in_checkpoint("out", 6, SAVED_STATE);
    write_file(Text("out/step-00000006/") + saved_files[SAVED_STATE],
               with_header(state, ",\"--log-every\":\"1\"", ""));
    write_manifest("out/step-00000006");
    o = program(TINY "-x 6 -y 1 -o out");
    expect(o.status == 0 && has(o.out, "\n  --batch is 2, was 1\n") &&
               !has(o.out, "--log-every"), "%s", o.out.c_str());
    expect_refused(program(TINY "-x 8 -y 1 -o out --seed 7"),
                   "step-00000006 is from a different run: it has --seed 42, this run --seed 7",
                   "--seed");
    expect_refused(program(TINY "-x 8 -y 1 -o out --shuffle 0"),
                   "it has --shuffle 1, this run --shuffle 0", "--shuffle");
}

// A run that has reached or passed its last step reports that there is nothing to do and leaves its
// output unchanged.
TEST(resume_nothing) {
    expect_success(program(TINY "--quiet -x 4 -n 2 -o out"), "first run");
    const Text end = checkpoint_bytes("out", 4);
    for (int steps : {4, 2}) {
        const Outcome o = program(TINY "-y 1 -o out -x " + text("%d", steps));
        expect_success(o, "nothing to do");
        expect(has(o.out, text("\nnothing to do: the checkpoint is at step 4, --steps (-x) is %d\n",
                               steps)), "%s", o.out.c_str());
        expect(names_in("out", "step") == "step-00000002 step-00000004" &&
               checkpoint_bytes("out", 4) == end);
    }
    expect(program(TINY "-y 1 -o out -x 5").out.find("nothing to do") == Text::npos);
}

// If the only checkpoint has a name given by the user, or is the output folder itself, a resume
// reports that and changes nothing, because a new run would delete the log of its steps. If another
// checkpoint can be resumed, that one is used. -e can load the renamed checkpoint's weights.
TEST(resume_renamed) {
    const Text run = TINY "--quiet -n 2 -y 1 -x 4 ";
    expect_success(program(run + "-o out"), "first run");
    const Text log = read_file("out/log.jsonl");
    rename("out/step-00000004", "out/best");
    expect_success(program(run + "-o out"), "the one before");
    expect(has(read_file("out/log.jsonl"), "\"step\":3,"));
    remove_folder("out/step-00000002");
    remove_folder("out/step-00000004");
    write_file("out/log.jsonl", log);
    const std::pair<Text, Text> table[] = {{"out", "out/best"}, {"out/best", "out/best/."}};
    for (const auto &[output, found] : table) {
        expect_refused(program(run + "-o " + output, no_leaks),
                       "--resume (-y): " + found + " is the checkpoint of step 4; rename it to "
                       "step-00000004", output);
    }
    expect(names_in("out", "") == "best lock log.jsonl" && read_file("out/log.jsonl") == log);
    expect_success(program("-i train.bin -b 2 -x 1 --quiet -e out/best"), "its weights");
    rename("out/best", "out/step-00000004");
    expect_success(program(run + "-o out"), "named so");
    expect(log_steps("out/log.jsonl") == one_to(4) && names_in("out", "step") == "step-00000004");
}

// If -e names weights and there is a checkpoint, a resume uses the checkpoint's weights and reports
// that; without a checkpoint it starts from -e's.
TEST(resume_weights) {
    expect_success(program(TINY "--quiet -x 2 -o first"), "first run");
    const Text run = "-i train.bin -e first/step-00000002 -b 2 -y 1 -o out ";
    Outcome o = program(run + "-x 1 -l 0");
    expect(o.status == 0 && has(o.out,
                                "\nno checkpoint in out: starting a new run from the "
                                "weights of --model (-e) first/step-00000002\n"),
           "%s", o.out.c_str());
    expect(in_checkpoint("out", 1, SAVED_MODEL) == in_checkpoint("first", 2, SAVED_MODEL));
    expect_success(program(run + "--quiet -x 2 -l 1e-2"), "one step away");
    o = program(run + "-x 3 -l 0");
    expect(o.status == 0 && has(o.out, "\nusing the weights of out/step-00000002; --model (-e) "
                                       "first/step-00000002 only applied "),
           "%s", o.out.c_str());
    expect(in_checkpoint("out", 3, SAVED_MODEL) == in_checkpoint("out", 2, SAVED_MODEL) &&
           in_checkpoint("out", 3, SAVED_MODEL) != in_checkpoint("first", 2, SAVED_MODEL));
    o = program(TINY "-x 4 -y 1 -o out");
    expect(o.status == 0 && !has(o.out, "\nusing the weights"), "%s", o.out.c_str());
}

// Makes every fcntl(F_OFD_SETLK) return `error`, as on a file system without locks.
static void without_locks(int error) {
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fcntl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, F_OFD_SETLK, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    const struct sock_fprog filter = {sizeof rules / sizeof rules[0], rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) {
        _exit(98);
    }
}

// A second run in the same output folder is refused with a line that names the first, and removes
// nothing that the first writes. However a run ends, the next one can start. On a file system
// without locks a run prints a note and continues.
TEST(output_lock) {
    const pid_t pid = start(TINY "-x 100000 -k constant --quiet -o out");
    wait_until([] { return has(read_file("out/log.jsonl"), "\"loss\":"); });
    mkdir("out/step-00000009.tmp", 0755);
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    mkdir("other", 0755);  // keeps the first run's stdout and stderr unchanged
    enter("other");
    expect_refused(program("-i ../train.bin -e l2h2c16t16 -b 2 -x 1 -y 1 -o ../out"),
                   text("--output (-o): ../out is in use by another run: process %d on %s "
                        "(../out/lock is locked)", (int)pid, host), "a second run");
    enter("..");
    expect(exists("out/step-00000009.tmp"), "the first run's unfinished checkpoint is gone");
    kill(pid, SIGKILL);
    (void)outcome(pid);
    expect_success(program(TINY "-x 2 -y 1 -o out"), "after a kill");
    expect(names_in("out", "step") == "step-00000002", "%s", names_in("out", "step").c_str());
    const Outcome o = program(TINY "-x 1 -o without --quiet", [] { without_locks(ENOLCK); });
    if (o.status == 98) {
        skip("seccomp is not available");
    }
    expect(o.status == 0 && has(o.err, "warning: cannot lock without/lock: No locks available"),
           "status %d: %s", o.status, o.err.c_str());
}

// An unreadable log is an error; it is not taken for the end of the log.
TEST(unreadable_log) {
    expect_success(program(TINY "-x 2 --quiet -o out"), "first run");
    unlink("out/log.jsonl");
    // Every read of this regular file fails, because its first bytes are not mapped.
    expect(symlink("/proc/self/mem", "out/log.jsonl") == 0);
    expect_refused(program(TINY "-x 3 --quiet -y 1 -o out", no_leaks),
                   "cannot read or truncate log out/log.jsonl: I", "a resume");
}

// Folders that only look like checkpoints are left alone. A user's files in a damaged checkpoint
// are moved aside, not removed. --keep does not count checkpoints newer than the run's own.
TEST(checkpoint_strangers) {
    const Text run = TINY "--quiet -n 2 -y 1 -o out ";
    expect_success(program(run + "-x 4"), "first run");
    const Text good = checkpoint_bytes("out", 4);
    const char *const strangers[] = {"step-9", "step-000000099", "step-00000009.old", "steps",
                                     "step-0000000x"};
    for (const char *name : strangers) {
        mkdir(("out/" + Text(name)).c_str(), 0755);
    }
    expect_success(program(run + "-x 4"), "strangers");
    for (const char *name : strangers) {
        expect(exists("out/" + Text(name)), "%s is gone", name);
    }
    write_file("out/step-00000004/config.json", "{}");
    write_file("out/step-00000004/notes", "mine");
    expect_passed_over(program(run + "-x 2 --keep 1"), "kept", "step-00000004: config.json");
    expect(exists("out/step-00000002/manifest.json"), "the only complete one is gone");
    expect_passed_over(program(run + "-x 4"), "notes", "step-00000004: config.json");
    expect(checkpoint_bytes("out", 4) == good && !exists("out/step-00000004/notes"));
    expect(read_file("out/step-00000004.damaged/notes") == "mine");
}

// Resuming a finished run leaves its weights, moments and gradient norms as they are. Incomplete
// checkpoints, and those beyond --keep, are removed. A log is truncated to whole lines.
TEST(checkpoint_folder) {
    const Text run = eight_steps;
    expect_success(program(run), "first run");
    const Text model = in_checkpoint("out", 8, SAVED_MODEL), tensors = tensors_of("out", 8);
    mkdir("out/step-00000099.tmp", 0755);
    write_file("out/step-00000099.tmp/model.safetensors", model.substr(0, 999));
    expect_success(program(run), "resumed after its end");
    expect(names_in("out", "step") == every_second, "%s", names_in("out", "step").c_str());
    expect(tensors_of("out", 8) == tensors, "resumed after its end");
    const std::vector<double> norms = values_in(read_file("out/log.jsonl"), "grad_norm");
    double saved[8];  // first tensor of the state; the log has only 9 digits
    memcpy(saved, header_and_data(in_checkpoint("out", 8, SAVED_STATE)).second.data(),
           sizeof saved);
    for (size_t i = 0; i < 8 && norms.size() == 8; i++) {
        expect_near(saved[i], norms[i], 1e-8 * norms[i], "norm of step %zu", i + 1);
    }
    mkdir("torn", 0755);  // killed before its first checkpoint, while writing a log line
    write_file("torn/log.jsonl",
               "{\"event\":\"start\"}\n{\"step\":1,\"loss\":5}\n{\"step\":2,\"lo");
    expect_success(program(TINY "--quiet -x 3 -y 1 -o torn"), "nothing to resume from");
    expect(log_steps("torn/log.jsonl") == one_to(3), "the log of a run without a checkpoint");
    expect_success(program(TINY "--quiet -x 9 -n 2 --keep 2 -o kept"), "--keep 2");
    expect(names_in("kept", "step") == "step-00000008 step-00000009", "%s",
           names_in("kept", "step").c_str());
    write_file("kept/step-00000009/config.json", "{}");  // damaged ones are not counted
    Outcome kept = program(TINY "--quiet -x 9 -n 2 --keep 1 -y 1 -o kept");
    expect(kept.status == 0 && names_in("kept", "step") == "step-00000009", "%s",
           names_in("kept", "step").c_str());
    // If a checkpoint is a symbolic link, only the link is removed.
    expect(rename("kept/step-00000009", "aside") == 0 &&
           symlink("../aside", "kept/step-00000009") == 0);
    expect_success(program(TINY "--quiet -x 11 -n 2 --keep 1 -y 1 -o kept"), "a link");
    expect(names_in("kept", "step") == "step-00000011" && exists("aside/manifest.json"), "%s",
           names_in("kept", "step").c_str());
}

// If GPT-2's vocabulary is available, a checkpoint contains it in the files that transformers
// reads. They are listed in the manifest; a checkpoint without them can also be resumed.
TEST(vocabulary_files) {
    const Text merges = vocab_bpe();
    static const char *const files[] = {"merges.txt", "vocab.json", "tokenizer_config.json"};
    write_file("vocab.bpe", merges);
    write_file("train.bin", shard_bytes(Ids(400, 7), GPT2_TOKENS));
    const Text run = "-i train.bin -e l1h1c8t16 -b 2 --quiet -y 1 -o out ",
               with_files = run + "--tokenizer vocab.bpe ", at = "out/step-00000001/";
    expect_success(program(with_files + "-x 1"), "with a vocabulary");
    expect(read_file(at + "merges.txt") == merges, "merges.txt is not the vocabulary's");
    const Text vocabulary = read_file(at + "vocab.json");
    expect(json_valid(vocabulary) && vocabulary.find("{\"!\": 0, \"\\\"\": 1, ") == 0 &&
           has(vocabulary, "\"\xc4\xa0the\": 262, ") &&
           has(vocabulary, ", \"<|endoftext|>\": 50256}"));
    expect(json_valid(read_file(at + "tokenizer_config.json")));
    for (const char *file : files) {
        const Text good = read_file(at + file);
        expect(has(read_file(at + "manifest.json"), file), "%s", file);
        write_file(at + file, good + " ");
        const Outcome o = program(with_files + "-x 2");
        expect(o.status == 1 && has(o.err, Text(file) + " does not have the size given in"),
               "%s: %s", file, o.err.c_str());
        write_file(at + file, good);
    }
    expect_success(program(with_files + "-x 2"), "resumed");
    for (const char *file : files) {
        unlink(("out/step-00000002/" + Text(file)).c_str());
    }
    write_manifest("out/step-00000002");
    expect_success(program(run + "-x 3"), "resumed from one without them, and without any");
    expect(exists("out/step-00000003/manifest.json") && !exists("out/step-00000003/merges.txt"));
}

// Returns one state (m or v) of a state file, rearranged from buckets into the memory order of one
// rank, in which each block's matrices and vectors are interleaved. Only for l2h2c16t16 with 257
// tokens, whose tensors start at multiples of 64 elements.
static Text whole_state(const Text &state_file, const Text &state) {
    enum { C = 16, ROWS = 384 };
    Text first, whole, bucket[5];  // vectors, wte, wpe, two blocks
    size_t at[5] = {};
    Members list = members_of(state_file, &first);
    for (size_t b = 0; b < 5; b++) {
        bucket[b] = named(&list, state + text(".%zu.0", b)).data;
    }
    auto take = [&](int k, int layer) {
        const size_t b = k < 2 ? (size_t)(1 + k) : member_rows[k].cols ? (size_t)(3 + layer) : 0;
        const int units = k == 0 ? ROWS : k == 1 ? C : member_rows[k].rows * C;
        const int size = units * (member_rows[k].cols ? member_rows[k].cols * C : 1);
        const size_t bytes = (size_t)(size + 63) / 64 * 64 * 4;
        whole += bucket[b].substr(at[b], bytes);
        at[b] += bytes;
    };
    take(0, 0);
    take(1, 0);
    for (int layer = 0; layer < 2; layer++) {
        for (int k = 2; k < 14; k++) {
            take(k, layer);
        }
    }
    take(14, 0);
    take(15, 0);
    for (size_t b = 0; b < 5; b++) {
        expect(at[b] == bucket[b].size(), "bucket %zu: %zu of %zu", b, at[b], bucket[b].size());
    }
    return whole;
}

// Replaces a checkpoint's state files and updates its manifest.
static void write_states(const Text &folder, const std::vector<Members> &files, const Text &first) {
    for (const Text &name : split(names_in(folder, "state-").c_str())) {
        unlink((folder + "/" + name).c_str());
    }
    for (size_t i = 0; i < files.size(); i++) {
        write_file(folder + text("/state-%zu-of-%zu.safetensors", i, files.size()),
                   safetensors_bytes(files[i], first));
    }
    write_manifest(folder);
}

// Distributes the tensors of a state file over `n` files: each bucket is cut into `n` parts at odd
// offsets, and part i of tensor k is in file i + k, modulo n.
static std::vector<Members> cut_states(const Members &whole, size_t n) {
    std::vector<Members> files(n, Members{whole[0]});
    for (size_t k = 1; k < whole.size(); k++) {
        const size_t count = whole[k].data.size() / 4;
        const Text name = whole[k].name.substr(0, whole[k].name.rfind('.'));
        for (size_t i = 0; i < n; i++) {
            const size_t from = count * i / n + (i ? 3 : 0);
            const size_t to = i + 1 < n ? count * (i + 1) / n + 3 : count;
            files[(i + k) % n].push_back({name + text(".%zu", from), "F32", text("%zu", to - from),
                                          whole[k].data.substr(4 * from, 4 * (to - from)), "",
                                          {}});
        }
    }
    return files;
}

// State files of the checkpoint at step 2 that belong to another step or are missing are reported
// by name, and state files are removed with their checkpoint. Second half of the test below.
static void state_files_apart(const Text &run, const Members &whole, const Text &first) {
    const Text at = "out/step-00000002";
    remove_folder("out/step-00000004");
    Text earlier = first;
    for (const char *key : {"\"step\":\"", "\"updates\":\"", "\"norm_count\":\""}) {
        earlier[earlier.find(key) + strlen(key)] = '1';
    }
    write_file(at + "/state-1-of-2.safetensors",
               safetensors_bytes(cut_states(whole, 2)[1], earlier));
    write_manifest(at);
    expect_refused(program(run), "are from different runs or steps", "step");
    Text other = first;
    other.replace(other.find("\"run\":\"shape"), 12, "\"run\":\"Shape");
    write_file(at + "/state-1-of-2.safetensors", safetensors_bytes(cut_states(whole, 2)[1], other));
    write_manifest(at);
    expect_refused(program(run), "are from different runs or steps", "run");
    write_states(at, cut_states(whole, 2), first);
    unlink((at + "/state-0-of-2.safetensors").c_str());
    const Outcome o = program(run);
    expect(has(o.err, "skipped out/step-00000002: state-0-of-2.safetensors"), "%s", o.err.c_str());
    // When --keep removes a checkpoint, it removes all its state files.
    write_states(at, cut_states(whole, 7), first);
    expect_success(program(TINY "--quiet -x 4 --keep 1 -y 1 -o out"), "--keep 1");
    expect(names_in("out", "step") == "step-00000004", "%s", names_in("out", "step").c_str());
}

// A checkpoint resumes to the same bytes however its state is divided into parts and files. A part
// that is missing, duplicated, or from another step or model is refused with its name.
TEST(state_parts) {
    const Text run = TINY "--quiet -x 4 -n 2 -y 1 -o out", at = "out/step-00000002";
    expect_success(program(run), "first run");
    const Text end = checkpoint_bytes("out", 4);
    Text first;
    const Members whole = members_of(in_checkpoint("out", 2, SAVED_STATE), &first);
    expect(whole.size() == 11, "%zu tensors", whole.size());  // norms, 5 buckets of m and of v
    auto cut = [&](size_t n) { return cut_states(whole, n); };
    auto resume = [&](const std::vector<Members> &files) {
        remove_folder("out/step-00000004");
        write_states(at, files, first);
        return program(run);
    };
    for (size_t n : {1, 2, 7}) {
        expect_success(resume(cut(n)), text("%zu files", n));
        expect(checkpoint_bytes("out", 4) == end, "%zu files: different result", n);
    }
    std::vector<Members> bad;
    for (int part = 0; part < 3; part++) {  // parts of the last tensor start in file 1
        bad = cut(3);
        Members &file = bad[(part + 1) % 3];
        const Text words = "its state files lack " + file.back().name +
                           text(", expected in state-%d-of-3.safetensors", part);
        file.pop_back();
        expect_refused(resume(bad), words.c_str(), "a part is missing");
    }
    bad = cut(3);
    const Text doubled = bad[1].back().name;
    bad[0].push_back(bad[1].back());
    const Outcome twice = resume(bad);
    expect_refused(twice, ("elements of " + doubled + " are stored twice, in ").c_str(), "twice");
    for (const char *file : {"/state-0-of-3.safetensors", "/state-1-of-3.safetensors"}) {
        expect(has(twice.err, at + file), "%s: %s", file, twice.err.c_str());
    }
    for (auto &[name, words] : std::vector<std::pair<Text, Text>>{
             {"v.4.0", "elements of v.4.1027 are stored twice"},
             {"v.4.2051", "v.4.2051: outside the states of this model"}}) {
        bad = cut(3);
        Members &file = name == "v.4.0" ? bad[1] : bad[0];  // parts 0 and 2 of the last bucket
        Member &longer = named(&file, name);
        longer.data += longer.data.substr(0, 4);
        longer.shape = text("%zu", longer.data.size() / 4);
        expect_refused(resume(bad), words.c_str(), "a part too long");
    }
    resume(cut(2));
    state_files_apart(run, whole, first);
}

// Matmul algorithms or a loss scale that this run cannot use are reported and dropped.
TEST(state_dropped) {
    const Text run = TINY "-x 4 -n 2 -y 1 -o out", at = "out/step-00000002";
    expect_success(program(run), "first run");
    const Text good = in_checkpoint("out", 2, SAVED_STATE), end = tensors_of("out", 4);
    const std::pair<Text, Text> told[] = {
        {with_header(good, "\"matmul\":\"\"", "\"matmul\":\"qkv 7\""),
         "\nmatmul algorithms differ from those of out/step-00000002: losses may differ"},
        {with_header(good, "\"loss_scale_log2\":\"0\"", "\"loss_scale_log2\":\"16\""),
         "\nignoring the fp16 loss scale of out/step-00000002, 2^16\n"}};
    for (auto &row : told) {
        remove_folder("out/step-00000004");
        write_file(at + "/" + saved_files[SAVED_STATE], row.first);
        write_manifest(at);
        const Outcome told_by = program(run);
        expect_success(told_by, row.second);
        expect(has(told_by.out, row.second), "%s", told_by.out.c_str());
        expect(tensors_of("out", 4) == end, "%s: different result", row.second.c_str());
    }
}

// Invalid state files are refused even if the manifest matches them; an invalid manifest causes its
// checkpoint to be skipped.
TEST(state_refused) {
    const Text run = TINY "--quiet -x 4 -n 2 -y 1 -o out", at = "out/step-00000002";
    expect_success(program(run), "first run");
    const Text good = in_checkpoint("out", 2, SAVED_STATE), end = tensors_of("out", 4);
    const size_t all = whole_state(good, "m").size() / 4;
    const Text low(2 * all, 'x');
    auto resume = [&](const Text &state) {
        remove_folder("out/step-00000004");
        write_file(at + "/" + saved_files[SAVED_STATE], state);
        write_manifest(at);
        return program(run, no_leaks);
    };
    const std::pair<Text, const char *> table[] = {
        {with_tensor(good, "master", "U16", low, all), "tensor master: unknown"},
        {with_tensor(good, "m.0.64", "BF16", low.substr(0, 128), 64),
         "elements of m.0.64 are stored twice"},
        {with_tensor(good, "other", "U16", low, all), "tensor other: unknown"},
        {with_header(good, "\"m.0.0\"", "\"m.00.0\""), "tensor m.00.0: unknown"},
        {with_header(good, "\"m.0.0\"", "\"m.0.-1\""), "tensor m.0.-1: outside the states"},
        {with_header(good, "\"m.0.0\"", "\"m.-1.0\""), "tensor m.-1.0: outside the states"},
        {with_header(good, "\"m.0.0\"", "\"m.0.1\""), "tensor m.0.1: outside the states"},
        {with_header(good, "\"m.0.0\"", "\"m.5.0\""), "tensor m.5.0: outside the states"},
        {with_header(good, "\"m.4.0\"", "\"v.4.0\""), "its state files lack m.4.0"},
        {with_header(good, "\"m.0.0\"", "\"master.0.0\""), "tensor master.0.0: wrong dtype"},
        {with_header(good, "\"norms\"", "\"norm\""), "tensor norm: unknown"},
        {with_header(good, "\"updates\":\"2\"", "\"updates\":\"-2\""), "'updates' is '-2'"},
        {with_header(good, "\"updates\":\"2\"", "\"updates\":\"\""), "'updates' is ''"},
        {with_header(good, "\"updates\":\"2\"", "\"updates\":2"), "expected a string"},
        {with_header(good, "\"step\":\"2\"", "\"step\":\"2x\""), "'step' is '2x'"},
        {with_header(good, "\"position\":\"", "\"position\":\"9007199254740993"), "'position' is"},
        {with_header(good, "\"__metadata__\":{\"format", "\"__metadata__\":{\"form"), ""},
        {with_header(good, "\"run\":\"shape l2", "\"run\":\"\\u001b\\nl2"), "run: it has ??l2"},
        {with_header(good, "\"run\"", "\"ran\""), "is from a different run"}};
    for (auto &row : table) {
        if (row.second[0]) {
            expect_refused(resume(row.first), row.second, row.second);
        } else {
            expect_success(resume(row.first), "an unknown key");
        }
    }
    // The file's last number is a second moment; a wrong size is detected before hashes are
    // computed.
    expect_refused(resume(good.substr(0, good.size() - 4) + Text("\x00\x00\x80\x7f", 4)),
                   "v of h.1.mlp.c_proj.weight: element 1023 is inf: ", "moments");
    expect(truncate((at + "/model.safetensors").c_str(), (off_t)1 << 35) == 0, "no sparse file");
    const Outcome large = program(run);
    expect(has(large.err, "model.safetensors does not have the size given") &&
               large.user_ms < 2000, "%.0f ms, %s", large.user_ms, large.err.c_str());
    remove_folder("out");
    expect_success(program(run), "again");
    expect_success(resume(good), "the state itself");
    expect(tensors_of("out", 4) == end, "the state itself: different result");
    for (const char *more : {"\"model.safetensors\": {\"bytes\": 1, \"sha256\": \"0\"}, ",
                             "\"../x\": {}, ", "\"a\": [}, "}) {
        write_manifest("out/step-00000004", more);
        expect_passed_over(program(run), more, "step-00000004: manifest.json: ");
    }
}

// Counters, norms and moments that no run can produce are refused with their names although all
// hashes match; so is a folder named after another step.
TEST(state_values) {
    const Text run = TINY "--quiet -x 4 -n 2 -y 1 -o out", at = "out/step-00000002";
    expect_success(program(run), "first run");
    const Text good = in_checkpoint("out", 2, SAVED_STATE);
    auto resume = [&](const Text &state) {
        remove_folder("out/step-00000004");
        write_file(at + "/" + saved_files[SAVED_STATE], state);
        write_manifest(at);
        return program(run, no_leaks);
    };
    const std::pair<Text, Text> values[] = {
        {"\"step\":\"900000000", "'step' is '900000000', expected 0 to 99999999"},
        {"\"updates\":\"0", "'updates' is '0', expected 2 to 2"},
        {"\"skipped\":\"3", "'skipped' is '3', expected 0 to 2"},
        {"\"norm_count\":\"3", "'norm_count' is '3', expected 0 to 2"},
        {"\"pending_validation\":\"7", "is '7', expected 0 to 1"},
        {"\"loss_scale_log2\":\"4000", "is '4000', expected 0 to 127"},
        {"\"loss_scale_steps\":\"3", "is '3', expected 0 to 2"},
        {"\"position\":\"900000000", "its state has step 2, position 900000000; expected step "
                                      "2, position 0 to 374"}};
    for (auto &row : values) {
        const Text key = row.first.substr(0, row.first.find(':') + 2);
        const size_t at_key = good.find(key) + key.size();
        const Text was = good.substr(at_key, good.find('"', at_key) - at_key);
        expect_refused(resume(with_header(good, key + was + "\"", row.first + "\"")), row.second,
                       row.first);
    }
    const auto [header, data] = header_and_data(good);
    for (double norm : {(double)NAN, HUGE_VAL, -1.0}) {
        Text bad = data;
        memcpy(&bad[8], &norm, 8);
        expect_refused(resume(with_length(header, bad)), "norms: element 1 is ", "norms");
    }
    expect_refused(resume(good.substr(0, good.size() - 4) + Text("\x00\x00\x80\xbf", 4)),
                   "v of h.1.mlp.c_proj.weight: element 1023 is -1: ", "a negative square");
    expect_success(resume(good), "as it was");
    rename(at.c_str(), "out/step-00000003");
    remove_folder("out/step-00000004");
    expect_refused(program(run), "out/step-00000003: its state has step 2, position 4; expected "
                                 "step 3", "another folder");
    rename("out/step-00000003", at.c_str());
}

// A manifest with one change causes its checkpoint to be skipped.
TEST(manifest_refused) {
    const Text run = TINY "--quiet -x 4 -n 2 -y 1 -o out", path = "out/step-00000004/manifest.json";
    expect_success(program(run), "first run");
    const Text good = read_file(path), end = checkpoint_bytes("out", 4);
    const Text size = text("\"bytes\": %zu", in_checkpoint("out", 4, SAVED_CONFIG).size());
    static const char another[] = "manifest.json: unsupported version";
    const struct {
        Text was, now;
        const char *words;
    } table[] = {{"\"version\": 3", "\"version\": 2", another},
                 {"\"version\": 3", "\"version\": 4", another},
                 {"\"version\": 3,", "", another},
                 {"state-0-of-1", "state-1-of-1", "manifest.json: duplicate"},
                 {"state-0-of-1", "state-0-of-1025", "manifest.json: duplicate"},
                 {"state-0-of-1", "state-0-of-01", "manifest.json: duplicate"},
                 {"state-0-of-1", "state-0-of-2", "state-0-of-2.safetensors cannot be read"},
                 {"train_gpt2 checkpoint", "another checkpoint", "manifest.json: damaged"},
                 {"}}", "}", "manifest.json: damaged"},
                 {"}}", "}}}", "manifest.json: damaged"},
                 {"\"config.json\"", "\"other.json\"", "manifest.json: duplicate"},
                 {size, size + "0", "config.json does not have the size given in manifest"},
                 {size, "\"bytes\": -1", "manifest.json: damaged"},
                 {size + ", \"sha256\": \"", size + ", \"sha257\": \"", "config.json is damaged"}};
    for (auto &row : table) {
        Text bad = good;
        expect(has(bad, row.was), "no %s", row.was.c_str());
        bad.replace(bad.find(row.was), row.was.size(), row.now);
        write_file(path, bad);
        expect_passed_over(program(run), row.now, Text("step-00000004: ") + row.words);
        expect(checkpoint_bytes("out", 4) == end, "%s", row.now.c_str());
    }
}

// -e with a checkpoint folder: its weights are trained as a new model.
TEST(model_option) {
    expect_success(program(TINY "--quiet -x 4 -n 3 -a 1 -o out"), "first run");
    // -a 1 repeats one batch: the next step starts from the same weights with the same tokens.
    auto loss_of_step = [](const Text &log, int step) {
        const size_t at = log.find(text("{\"step\":%d,\"loss\":", step)) + 9;
        return at < 9 ? Text("no such step") : log.substr(log.find(',', at), 24);
    };
    const Text want = loss_of_step(read_file("out/log.jsonl"), 4);
    int k = 0;
    for (const char *e : {"out/step-00000003", "out/step-00000003/",
                         "out/step-00000003/model.safetensors"}) {
        const Text folder = text("next%d", k++),
                   run = Text("--quiet -x 2 -b 2 -a 1 -i train.bin -y 1 -e ") + e;
        expect_success(program(run + " -o " + folder), e);
        const Text log = read_file(folder + "/log.jsonl"), end = tensors_of(folder.c_str(), 2);
        expect(loss_of_step(log, 1) == want, "%s: not the loss %s", e, want.c_str());
        expect(tensors_of("next0", 2) == end && !end.empty(), "%s: different result", e);
    }
    write_file("gpt2.bin", shard_bytes(Ids(400, 7), GPT2_TOKENS));
    mkdir("empty", 0755);
    static const Refusal table[] = {
        {"-i gpt2.bin -e out/step-00000003", "has a vocabulary of 257 tokens, the data gpt2.bin"},
        {"-i train.bin -e out/step-00000005", "'out/step-00000005' is neither a preset"},
        {"-i train.bin -e empty", "cannot open empty/model.safetensors: No such file"},
        {"-i train.bin -e train.bin", "cannot open config.json: No such file"},
        {"-i train.bin -e out/step-00000003/config.json", "not a safetensors file"},
        {"-i train.bin -t 17 -e out/step-00000003", "17 is more than the model's 16"},
        {"-e out/step-00000003", "no training data: 'make data'"},
        {"-i train.bin -e /dev/null", "cannot open /dev/null: "}};
    for (const Refusal &row : table) {
        expect_refused(program(row.arguments), row.words, row.arguments);
    }
    Outcome plan = program("--plan --json -e out/step-00000003");
    expect_success(plan, "--plan");
    const Text same = program("--plan --json -e l2h2c16t16").out;
    const size_t at = plan.out.find("\"buffers\":["), from = same.find("\"buffers\":[");
    expect(json_valid(plan.out) && at != Text::npos && from != Text::npos &&
           plan.out.substr(at) == same.substr(from), "%s", plan.out.c_str());
}

// A disk that fills up while any file of a checkpoint is written, and other obstacles, leave the
// previous checkpoint unchanged. A folder without a manifest (such as one in the first format, with
// state.bin) is skipped.
TEST(checkpoint_writes) {
    expect_success(program(TINY "--quiet -x 2 -o out"), "first run");
    const Text good = checkpoint_bytes("out", 2), run = TINY "--quiet -x 4 -y 1 -o out";
    const size_t model = in_checkpoint("out", 2, SAVED_MODEL).size(),
                 state = in_checkpoint("out", 2, SAVED_STATE).size();
    auto expect_stands = [&](const char *who) {
        expect(names_in("out", "step") == "step-00000002", "%s: %s", who,
               names_in("out", "step").c_str());
        expect(checkpoint_bytes("out", 2) == good, "%s", who);
    };
    for (size_t bytes : {model / 2, model - 1, model, model + 1,
                         state / 2, state - 100, state - 1}) {
        Outcome o = program(run, full_disk(bytes));
        const Text file = Text("cannot write out/step-00000004.tmp/") +
                          saved_files[bytes < model ? SAVED_MODEL : SAVED_STATE];
        expect_refused(o, file.c_str(), text("%zu bytes", bytes));
        expect_stands("full disk");
    }
    for (const char *file : saved_files) {
        const Text in_the_way = Text("out/step-00000004.tmp/") + file;
        mkdir("out/step-00000004.tmp", 0755);
        mkdir(in_the_way.c_str(), 0755);
        expect_refused(program(run), ("cannot write " + in_the_way).c_str(), in_the_way);
        expect(names_in("out/step-00000004.tmp", "") == file, "files besides %s exist", file);
        remove_folder("out/step-00000004.tmp");
        expect_stands(file);
    }
    mkdir("out/step-00000003", 0755);
    write_file("out/step-00000003/state.bin", good);
    write_file("out/step-00000009", "no folder");
    expect_passed_over(program(run), "in the way", "step-00000009: manifest.json",
                       "step-00000003: manifest.json");
    unlink("out/step-00000009");
    remove_folder("out/step-00000003");
    expect_success(program(run), "the newest checkpoint is complete");
}

// -------------------------------------------------------------------------------------------------
// After a power failure, only synced data exist. The test does not simulate one: like a debugger it
// traces the run's system calls, and requires an order in which a complete checkpoint exists at
// every moment.

#ifdef PTRACE_GET_SYSCALL_INFO
// Returns the string at an address in another process.
static Text text_in(pid_t pid, uint64_t address) {
    Text path(4096, 0);
    const int fd = open(text("/proc/%d/mem", (int)pid).c_str(), O_RDONLY);
    const ssize_t n = pread(fd, &path[0], path.size() - 1, (off_t)address);
    close(fd);
    return path.substr(0, n > 0 ? strlen(path.c_str()) : 0);
}

// Returns the path of another process's file descriptor, relative to the test's folder.
static Text file_of(pid_t pid, uint64_t fd) {
    char path[4096], here[4096];
    const Text link = text("/proc/%d/fd/%d", (int)pid, (int)fd);
    const ssize_t n = readlink(link.c_str(), path, sizeof path);
    const Text all(path, n > 0 ? (size_t)n : 0), folder = Text(getcwd(here, sizeof here)) + "/";
    return all + "/" == folder ? "." : all.find(folder) == 0 ? all.substr(folder.size()) : all;
}

// Returns a system call that changes files as one line; "" for any other.
static Text disk_call(pid_t pid) {
    struct __ptrace_syscall_info call = {};
    if (ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof call, &call) <= 0 ||
        call.op != PTRACE_SYSCALL_INFO_ENTRY) {
        return "";
    }
    const auto &arg = call.entry.args;
    switch (call.entry.nr) {
        case SYS_write:
        case SYS_writev:  // used by musl's stdio
        case SYS_pwrite64: return "write " + file_of(pid, arg[0]);
        case SYS_fsync: return "sync " + file_of(pid, arg[0]);
#ifdef SYS_rename
        case SYS_rename: return "rename " + text_in(pid, arg[0]) + " " + text_in(pid, arg[1]);
#endif
#ifdef SYS_renameat
        case SYS_renameat:
#endif
        case SYS_renameat2: return "rename " + text_in(pid, arg[1]) + " " + text_in(pid, arg[3]);
        default: return "";
    }
}

// Returns the traced calls of a run of the program, including all its threads, in order.
static Words disk_calls(const Text &arguments) {
    const pid_t pid = start(arguments, [] {
        setenv("ASAN_OPTIONS", "detect_leaks=0", 1);  // the leak check fails under ptrace
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) {
            _exit(SKIPPED);
        }
    });
    Words calls;
    int status = 0, first = 1;
    for (pid_t at; (at = waitpid(-1, &status, __WALL)) > 0;) {
        if (at == pid && WIFEXITED(status)) {
            if (WEXITSTATUS(status) == SKIPPED) {
                skip("ptrace is not permitted");
            }
            expect(WEXITSTATUS(status) == 0, "%s", read_file("stderr").c_str());
        }
        if (!WIFSTOPPED(status)) {
            continue;
        }
        if (first) {
            ptrace(PTRACE_SETOPTIONS, pid, NULL, (void *)(PTRACE_O_TRACESYSGOOD |
                                                          PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL));
            first = 0;
        }
        const Text call = WSTOPSIG(status) == (SIGTRAP | 0x80) ? disk_call(at) : "";
        if (!call.empty() && (calls.empty() || call != calls.back())) {
            calls.push_back(call);
        }
        ptrace(PTRACE_SYSCALL, at, NULL, NULL);
    }
    return calls;
}

// Returns the index of the last matching call before index `before`; -1 if there is none.
static long last_of(const Words &calls, const Text &call, size_t before = SIZE_MAX) {
    for (size_t i = std::min(before, calls.size()); i-- > 0;) {
        if (calls[i] == call) {
            return (long)i;
        }
    }
    return -1;
}

// Every file of a checkpoint is synced after its last write, then the folder; then the folder is
// renamed to its final name, which is synced before the log mentions it. A checkpoint that --keep
// removes loses its name only after the new one is permanent, and the rename is its first change.
TEST(sync_order) {
    const Words calls = disk_calls(TINY "--quiet -x 2 -n 1 --keep 1 -o runs/out");
    long before = -1;
    for (int step = 1; step <= 2; step++) {
        const Text path = text("runs/out/step-%08d", step), folder = path + ".tmp";
        const long renamed = last_of(calls, "rename " + folder + " " + path);
        const long named = last_of(calls, "sync " + folder, (size_t)std::max(renamed, 0L));
        expect(renamed >= 0 && named >= 0, "%s: renamed %ld, folder synced %ld", path.c_str(),
               renamed, named);
        for (const char *name : saved_files) {
            const Text file = folder + "/" + name;
            const long wrote = last_of(calls, "write " + file);
            const long synced = last_of(calls, "sync " + file);
            expect(before < wrote && wrote < synced && synced < named,
                   "%s: written %ld, synced %ld, folder synced %ld", file.c_str(), wrote, synced,
                   named);
        }
        const auto from = calls.begin() + std::max(renamed, 0L);
        const auto stays = std::find(from, calls.end(), "sync runs/out");
        const auto told = std::find(from, calls.end(), "write runs/out/log.jsonl");
        expect(stays < told, "%s: the log mentions it before its name is synced", path.c_str());
        before = renamed;
        if (step == 2) {
            const Text old = "runs/out/step-00000001";
            expect(last_of(calls, "rename " + old + " " + old + ".tmp") > stays - calls.begin(),
                   "%s is removed before the new one is permanent", old.c_str());
        }
    }
    for (const char *parent : {"sync runs", "sync ."}) {
        const long at = std::find(calls.begin(), calls.end(), parent) - calls.begin();
        expect(at < last_of(calls, "write runs/out/log.jsonl"), "%s", parent);
    }
    detail = text("%zu calls", calls.size());
}
#else
TEST(sync_order) { skip("the system's headers lack PTRACE_GET_SYSCALL_INFO"); }
#endif

int main(int argc, char **argv) {
    return harness_main(argc, argv, "./train_gpt2");
}
