// options.cpp -- invalid options and file names, which are answered by one line on stderr that
// names the option or file, the value found and the values allowed; nothing is trained and no file
// is left. Also the output of --plan, --fit, --minimum and --largest, and of a run on a terminal.
//
// Run:    build/test/options [--program build/train_gpt2_asan] [NAME...]

#include "files.h"
#include <sys/ioctl.h>

static const Refusal bad_options[] = {
    {"--nonsense 1", "unknown option '--nonsense'"},
    {"stray", "unknown option 'stray'"},
    {"-", "unknown option '-'"},
    {"-b4", "unknown option '-b4'"},
    {"--", "unknown option '--'"},
    {"-b", "--batch needs a value"},
    {"-b 4 --batch=4", "--batch is given twice"},
    {"--help=1", "--help takes no value"},
    {"--json", "--json needs --plan, --fit, --minimum, --largest, --compare"},
    {"--eval x.bin --plan", "are commands: give one"},
    {"--plan --fit bits", "are commands: give one"},
    {"--fit most", "--fit: 'most' is not one of bits|any|all"},
    {"--offload auto,moments", "--offload auto cannot be combined"},
    {"--eval x.bin -o out", "leave --output (-o) out"},
    {"--eval x.bin -y 1", "needs --output (-o)"},
    {"--eval missing.bin", "--eval: cannot open missing.bin: No such file"},
    {"--eval=", "--eval: the value is empty"},
    {"-i train.bin -e l2h2c16t16 -x 1 --output=", "--output: the value is empty"},
    {"-e l2h2c16t16 -x 1 --train-data=", "--train-data: the value is empty"},
    {"--eval .", "--eval: cannot open .: Is a directory"},
    {"--eval train.bin", "train.bin: not an evaluation file"},
    {"--gpu t4", "--gpu needs --plan, --fit, --minimum or --largest"},
    {"-i train.bin -e l2h2c16t16 --gpu-mem 16GiB", "--gpu-mem: this program trains on the CPU"},
    {"-y 1", "needs --output (-o)"},
    {"-n 5", "--save-every (-n) 5 needs --output"},
    {"-j val.bin", "needs --train-data (-i)"},
    {"--fit bits -e d12 --gpu T4 -d 100", "(-d): 100 is not a multiple of B x T = 1 x 1024"},
    {"-i train.bin --beta1 1", "--beta1: '1' is not a number from 0 to 0.9"},
    {"--plan --gpu t5", "--gpu: 't5' is not a known card; nearest: t4;"},
    {"--plan --gpu-mem 5XB", "--gpu-mem: '5XB' is not a size"},
    {"-i train.bin -e d13", "--model (-e): 'd13'"},
    {"-i train.bin -e l2h3c16t8", "--model (-e): 'l2h3c16t8': allowed are"},
    {"-i train.bin -e l0h1c16t8", "allowed are"},
    {"-i train.bin -e l2h2c16t0", "allowed are"},
    {"-i train.bin -e l2h0c16t8", "allowed are"},
    {"-i train.bin -e l2h2c16t16x", "neither"},
    {"-i train.bin -e l2h2c16t16v", "neither"},
    {"-i train.bin -e l2h2c16t16v9x", "neither"},
    {"-i train.bin -e l2h2c16t16v1", "allowed are"},
    {"-i train.bin -e l2h2c16t16v65536", "a vocabulary of 2-65535"},
    {"-i train.bin -e l2h2c16t16v1000",
     "l2h2c16t16v1000 names a vocabulary of 1000; the data, train.bin, has one of 257"},
    {"-i train.bin -x 2 -b 2 --model=l\t2h2c16t16", "neither"},
    {"-i train.bin -x 2 -b 2 --model=l2h\n2c16t16", "neither"},
    {"-i train.bin -e l2h2c-16t16", "allowed are"},
    {"-i train.bin -e l2h2c99999t1", "allowed are"},
    {"-i train.bin -e l2h2c16t16 -t 17", "--seq-len (-t): 17 is more than the model's 16"},
    {"-i train.bin -e l2h2c16t16 -r 2", "'2' is not one of none (0) gelu norm"},
    {"-i train.bin -e l2h2c16t16 -r half", "--recompute (-r): 'half'"},
    {"-i train.bin -e l2h2c16t16 -r block:3", "must be from 0 to 2"},
    {"-i train.bin -e l2h2c16t16 -r block:-1", "must be from 0 to 2"},
    {"-i train.bin -e l2h2c16t16 -r block:", "must be from 0 to 2"},
    {"-i train.bin -e l2h2c16t16 -r block:1x", "must be from 0 to 2"},
    {"-i train.bin -e l2h2c16t16 -r block:1,gelu:2", "K of gelu:K must be from 0 to 1"},
    {"-i train.bin -e l2h2c16t16 -r block:1,", "is not one of none (0) gelu norm"},
    {"-i train.bin -e l2h2c16t16 -r gelu,block", "(-r): 'gelu,block': no block is left for block"},
    {"-i train.bin -e l2h2c16t16 -r block:1,gelu,none:0", "no block is left for none"},
    {"-i train.bin -e l2h2c16t16 -r auto:1", "is not one of none (0) gelu norm"},
    {"-i train.bin -e l2h2c16t16 -b 2 --logit-rows 33", "--logit-rows: 33 is more than"},
    {"-i train.bin -e l2h2c16t16 -b 2 -d 33", "(-d): 33 is not a multiple of B x T = 2 x 16"},
    {"--plan -i train.bin -e l2h2c16t16 -b 2 -d 33", "(-d): 33 is not a multiple of B x T = 2 x"},
    {"-i train.bin -e l2h2c16t16 -x 10 -u 11", "--warmup (-u): 11"},
    {"-i train.bin -e l2h2c16t16 --dtype bf16", "--dtype"},
    {"-i train.bin -e l2h2c16t16 --moments bf16", "--moments"},
    {"-i train.bin -e l2h2c16t16 --offload master", "--offload master: there is no master copy"},
    {"-i train.bin -e l2h2c16t16 --grad-dtype bf16", "--grad-dtype bf16 needs --dtype bf16"},
    {"--plan --gpu t4 -e d12 --dtype bf16", "t4 has no bf16"},
    {"--plan --gpu a100 -e d12 -w 0 --offload master", "--offload master"},
    {"--plan --gpus 2 -e d12 --offload gradients", "works on one GPU only"},
    {"--fit bits -e d12 --gpus 4", "--fit: the memory of several GPUs is unknown here"},
    {"--fit bits -e d12 --gpu 4090 --gpus 4 -d 2048", "x GPUs = 1 x 1024 x 4"},
    {"--minimum -e d12 -z 1", "--zero (-z) 1 shards states across GPUs: it needs --gpus N"},
    {"--plan -e d12 -z 1 --gpu t4", "--zero (-z) 1 shards states across GPUs: it needs --gpus N"},
    {"--minimum -e d12 -b 2", "finds the least memory by itself: leave --batch out"},
    {"--minimum -e d12 -r gelu", "leave --recompute out"},
    {"--minimum -e d12 --offload none", "leave --offload out"},
    {"--minimum -e d12 --logit-rows 64", "leave --logit-rows out"},
    {"--minimum -e d12 --moments fp32", "leave --moments out"},
    {"--minimum -e d12 -w split", "leave --master out"},
    {"--minimum -e d12 --gpu-mem 8G", "leave --gpu-mem out"},
    {"--plan -e d12 --gpu-mem 16", "16 bytes are less than 1 MiB; did you mean 16GiB?"},
    {"--fit bits -e d12 --gpu 4090 -d 100", "(-d): 100 is not a multiple of B x T = 1 x 1024"},
    {"--fit bits -e d12 --gpu 4090 -b 3 -d 4096", "(-d): 4096 is not a multiple of B x T = 3 x"},
    {"--minimum -e l2h2c16t16 -d 100", "(-d): 100 is not a multiple of B x T = 1 x 16"},
    {"-i train.bin -e l2h2c16t16 --gpus 2", "--gpus 2: several ranks are not supported"},
    {"-i train.bin -e l2h2c16t16 -x 3 -s 1 --prompt 12345678901234567", "more than --seq-len"},
    {"-e l2h2c16t16", "no training data: 'make data'"},
};

TEST(bad_options) {
    for (const Refusal &row : bad_options) {
        expect_refused(program(row.arguments), row.words, row.arguments);
    }
    detail = text("%zu command lines", sizeof bad_options / sizeof bad_options[0]);
}

// The message for a huge argument shows its start and end, followed by the allowed values.
TEST(huge_arguments) {
    const Text huge(100000, 'x');
    for (auto &row : std::vector<std::pair<Text, const char *>>{
             {"-b " + huge, "xxxx' is not a whole number from 1 to 65536"},
             {"--" + huge, "xxxx'; --help lists"},
             {"--dtype " + huge, "xxxx' is not one of"},
             {"-i train.bin -e " + huge, "xxxx' is neither a preset"}}) {
        const Outcome o = program(row.first);
        expect_refused(o, row.second, row.first.substr(0, 20));
        expect(o.err.size() < 1000, "%s: a line of %zu bytes", row.second, o.err.size());
    }
}

// Anything but a regular file is refused without waiting.
TEST(not_regular) {
    mkfifo("fifo", 0644);
    mkdir("model", 0755);
    mkfifo("model/model.safetensors", 0644);
    mkdir("out", 0755);
    mkfifo("out/log.jsonl", 0644);
    write_file("gpt2.bin", shard_bytes(Ids(400, 7), GPT2_TOKENS));
    static const Refusal table[] = {
        {"-i fifo", "cannot read token file fifo: not a regular file"},
        {"-i /dev/zero", "cannot read token file /dev/zero: not a regular file"},
        {"-i train.bin -j fifo", "cannot read token file fifo: not a regular file"},
        {"-i train.bin -e fifo", "cannot open fifo: not a regular file"},
        {"-i train.bin -e /dev/zero", "cannot open /dev/zero: not a regular file"},
        {"-i train.bin -e model", "cannot open model/model.safetensors: not a regular file"},
        {"-i gpt2.bin --tokenizer fifo", "vocabulary fifo: not a regular file"},
        {"-i gpt2.bin --tokenizer /dev/zero", "vocabulary /dev/zero: not a regular file"},
        {"--eval fifo", "cannot open fifo: not a regular file"},
        {"-i train.bin -o out", "out/log.jsonl: not a regular file"}};
    for (const Refusal &row : table) {
        const Text shape = strstr(row.arguments, "-e ") ? "" : "-e l2h2c16t16 ";
        expect_refused(program(shape + "-x 1 -b 2 " + row.arguments, [] { alarm(20); }), row.words,
                       row.arguments);
    }
    detail = text("%zu files", sizeof table / sizeof table[0]);
}

// An invalid token file is named in one line, and no checkpoint is written.
TEST(bad_data) {
    const Text good = read_file("train.bin");
    Ids short_tokens(16, 7), outside(400, 7);
    outside[300] = 257;
    write_file("empty.bin", "");
    write_file("header.bin", good.substr(0, 1000));
    write_file("cut.bin", good.substr(0, 2001));
    write_file("long.bin", good + "x");
    write_file("magic.bin", with_int(good, 0, 20240521));
    write_file("version.bin", with_int(good, 1, 2));
    write_file("negative.bin", with_int(good, 2, -1));
    write_file("words.bin", with_int(good, 3, 258));
    write_file("kind.bin", with_int(good, 4, 7));
    write_file("own.bin", with_int(with_int(good, 4, 2), 3, 256));
    write_file("own2.bin", with_int(with_int(good, 4, 2), 3, 65536));
    write_file("none.bin", shard_bytes({}, BYTE_TOKENS));
    write_file("short.bin", shard_bytes(short_tokens, BYTE_TOKENS));
    write_file("outside.bin", shard_bytes(outside, BYTE_TOKENS));
    write_file("gpt2.bin", shard_bytes(outside, GPT2_TOKENS));
    mkdir("folder.bin", 0755);
    write_file("story.txt", "Once upon a time there was a fox.\n");
    write_file("long.txt", Text(5000, 'a') + Text(10, 0));
    static const Refusal table[] = {
        {"-i missing.bin", "no token file matches missing.bin"},
        {"-i empty.bin", "empty.bin: 0 bytes is too short"},
        {"-i header.bin", "header.bin: 1000 bytes is too short"},
        {"-i folder.bin", "folder.bin"},
        {"-i cut.bin",
         "cut.bin: the header counts 3000 tokens, which makes 7024 bytes; the file has"},
        {"-i long.bin", "long.bin: the header counts"},
        {"-i magic.bin", "magic.bin: not a token file: the first word is 20240521"},
        {"-i version.bin", "version.bin: a token file of version 2"},
        {"-i negative.bin", "negative.bin: the header counts -1"},
        {"-i words.bin", "words.bin: a vocabulary of 258"},
        {"-i kind.bin", "kind.bin: tokenizer 7"},
        {"-i none.bin", "none.bin: 0 tokens are fewer than one sequence: T + 1 = 17"},
        {"-i short.bin", "short.bin: 16 tokens are fewer than one sequence: T + 1 = 17"},
        {"-i outside.bin", "outside.bin: token 300 is 257, outside the vocabulary of 257"},
        {"-i [tg]*.bin", "train.bin has bytes; gpt2.bin has GPT-2's tokens"},
        {"-i train.bin -j gpt2.bin", "(-j): gpt2.bin has GPT-2's tokens; train.bin has bytes"},
        {"-i story.txt", "story.txt is text, not tokens: data/tokenize --train-bpe 8192 -o"},
        {"-i train.bin -j long.txt", "long.txt is text, not tokens"},
        {"-i data/mine_train.bin", "mine_train.bin; data/tokenize makes token files from text"},
        {"-i data/stories_bpe_train.bin", "stories_bpe_train.bin; 'make data' prepares it"},
        {"-i own.bin", "own.bin: a vocabulary of 256 in the header; its tokenizer has 257"},
        {"-i own2.bin", "own2.bin: a vocabulary of 65536 in the header"},
        {"-i train.bin -j missing.bin", "no token file matches missing.bin"},
        {"-i train.bin -j short.bin", "short.bin: 16 tokens"},
        {"-i train.bin -b 200", "a step needs 200 sequences of 16 tokens; train.bin has only"},
        {"-i train.bin -d 3200 -b 2", "a step needs 200 sequences"},
        {"-i train.bin -j val.bin -b 30", "val.bin: 24 sequences of 16 tokens, fewer"},
    };
    for (const Refusal &row : table) {
        expect_refused(program(Text("-e l2h2c16t16 -o out ") + row.arguments), row.words,
                       row.arguments);
        expect(!exists("out/step-00000000"), "%s left a checkpoint", row.arguments);
    }
    detail = text("%zu files and sizes", sizeof table / sizeof table[0]);
}

// A full disk, simulated by a limit on file sizes, and folders that cannot be created or written.
TEST(bad_output) {
    expect_success(program(TINY "--quiet -x 2 -u 2 -o out"), "a warmup of all steps");
    expect_refused(program(TINY "--quiet -x 4 -y 1 -o out", full_disk(20000)),
                   "cannot write out/step-00000004.tmp/", "full disk");
    expect(names_in("out", "step") == "step-00000002", "%s", names_in("out", "step").c_str());
    expect_refused(program(TINY "--quiet -x 2 -o log", full_disk(600)), "log.jsonl", "full log");
    expect_refused(program(TINY "-x 2 -o train.bin/out"), "cannot create folder", "below a file");
    expect_refused(program(TINY "-x 2 -o train.bin"), "train.bin is a file, not a folder",
                   "a file");
    expect_refused(program(TINY "-x 2 -o /proc/none"), "cannot create folder", "/proc");
    expect_refused(program(TINY "-x 2 -o out"), "already contains checkpoints", "without -y");
    mkdir("closed", 0555);
    expect_refused(program(TINY "-x 2 -o closed/out",
                           [] {
                               if (geteuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) {
                                   exit(98);
                               }
                           }),
                   "closed/out: Permission denied", "unwritable folder");
}

// The output and exit status of --plan for GPUs, for this machine, and as JSON.
TEST(plan_command) {
    Outcome o = program("--plan -e d48 --gpu h200");
    expect_success(o, "--plan -e d48 --gpu h200");
    expect(has_sanitizers() || o.user_ms < 1000, "%.0f ms of the processor", o.user_ms);
    expect(o.out.find("memory plan of the GPU run") == 0 &&
           has(o.out, "1,557,611,200 parameters") && has(o.out, "   estimated: sm_90, 132 SMs\n") &&
           has(o.out, "rule of thumb") && has(o.out, "-r block"));
    o = program("--plan -e d48 --gpu 4080 --offload none");
    expect(o.status == 3 && has(o.out, "DOES NOT FIT, ") &&
               has(o.out, "\nit fits with --offload moments,master: "),
           "status %d: %s", o.status, o.out.c_str());
    // On a card with 16 GB, states that do not fit otherwise are offloaded, and this is reported.
    o = program("--plan -e gpt2-xl --gpu 4080");
    expect_success(o, "gpt2-xl on a 4080");
    expect(flat(o.out).find("; --offload moments,master") != Text::npos &&
           has(o.out, "\nhost memory         ") && has(o.out, "4080: 15.57 GiB; fits, "));
    o = program("--plan -e d12 --gpu v100");
    expect(o.status == 1 && has(o.out, "v100: 15.78 GiB; fits, but this program needs compute "
                                       "capability 7.5\n") &&
               !has(o.out, "\nforecast"), "status %d: %s", o.status, o.out.c_str());
    expect_refused(program("--fit bits -e d12 --gpu v100"), "this program needs 7.5", "--fit");
    o = program("--plan -e d12 --gpu 4090 -x 100");
    expect(has(o.out, "\nforecast: ") && has(o.out, " tokens/s, 409,600 tokens in 4 s") &&
               flat(o.out).find("; predicted for this card, not measured\n") != Text::npos,
           "%s", o.out.c_str());
    // A smaller batch is suggested if a multiple of it has the same number of tokens.
    for (const char *B : {"5", "6"}) {
        o = program(text("--plan -e d12 --gpu 4090 -b %s", B));
        expect(has(o.out, "\n-b 1 ") && !has(o.out, "\n-b 2 ") &&
               has(o.out, "\n-b 3 ") == (B[0] == '6'), "-b %s: %s", B, o.out.c_str());
    }
    o = program("--plan -e l2h2c16t16 -b 2");
    expect_success(o, "--plan of the CPU run");
    expect(o.out.find("memory plan of the CPU run\n") == 0);
    for (const char *arguments :
         {"--plan --json -e l2h2c16t16", "--plan --json --gpu-mem 16G -e d12"}) {
        o = program(arguments);
        expect_success(o, arguments);
        expect(json_valid(o.out) && has(o.out, "\"buffers\":["), "%s", arguments);
    }
}

// Returns the options of the command that --fit or --minimum recommends after the text `words`.
static Text recommended(const Text &out, const char *words) {
    const size_t at = out.find(words), line = out.find("train_gpt2", at);
    const size_t from = out.find(' ', line) + 1;
    return line == Text::npos ? "" : out.substr(from, out.find('\n', from) - from);
}

// --fit and --minimum: the printed command gives the printed plan, and fits.
TEST(fit_command) {
    // With sanitizers, plans of a large model take long.
    const char *model = has_sanitizers() ? "d12" : "d48";
    for (const char *fit : {"bits", "all"}) {
        Outcome o = program(text("--fit %s -e %s --gpu 4080 -d 524288", fit, model));
        expect_success(o, fit);
        const Text command = recommended(o.out, "\nfastest: ");
        const Outcome plan = program("--plan --gpu 4080 " + command);
        expect(plan.status == 0 && has(plan.out, "4080: 15.57 GiB; fits, "), "%s: %s",
               fit, command.c_str());
        const size_t r = command.find("-r ");
        const Text levels = command.substr(r, command.find(' ', r + 3) - r);
        expect(flat(plan.out).find("; " + levels) != Text::npos, "%s", command.c_str());
    }
    Outcome o = program(text("--minimum -e %s", model));
    expect_success(o, "--minimum");
    for (const char *title :
         {"GPU, nothing offloaded: ", "GPU, everything on the host: ", "CPU: "}) {
        if (has_sanitizers() && title[0] == 'C') {
            continue;  // its plan measures this machine's speed first
        }
        const Text command = recommended(o.out, title);
        expect((title[5] == 'e') ==
                   (has(command, "--offload weights,gradients,moments,master,residuals")),
               "%s%s", title, command.c_str());
        const Text gpu = title[0] == 'G' ? "--gpu-mem 200G " : "";
        const Outcome plan = program("--plan " + gpu + command);
        const size_t start = o.out.find(title) + strlen(title);
        const size_t at = title[0] == 'G' ? o.out.find("= ", start) + 2 : start;  // the plan alone
        const Text said = o.out.substr(at, o.out.find("iB", at) + 2 - at);
        const size_t line = plan.out.find("allocation ");
        expect(line != Text::npos && plan.out.substr(line, 60).find(said) != Text::npos,
               "%s%s: %s", title, command.c_str(), said.c_str());
    }
    const Outcome less = program(text("--minimum -e %s --workspace 1", model));
    expect(less.out.substr(0, less.out.find('\n')) == o.out.substr(0, o.out.find('\n')),
           "a smaller workspace takes less: %s", less.out.c_str());
    o = program(text("--fit bits -e %s --gpu-mem 1100M", model));
    expect(o.status == 3 && has(o.out, "nothing fits: --minimum"), "%s", o.out.c_str());
    expect_success(program("--fit bits -e l2h2c16t16"), "--fit of the CPU's memory");
    // Only batches that this data allows are suggested: it has 24 sequences.
    write_file("few.bin", shard_bytes(Ids(400, 99), BYTE_TOKENS));
    const Text few = "-i few.bin -e l2h2c16t16 --gpu 4090 --fit ";
    o = program(few + "all");
    const Text command = recommended(o.out, "then fastest: ");
    expect(has(o.out, "\n   24 ") && !has(o.out, "\n   32 ") &&
           atoi(&command[command.find("-b ") + 3]) <= 24, "%s", o.out.c_str());
    for (const char *step : {"bits -d 512", "bits -b 32"}) {
        o = program(few + step);
        expect(o.status == 1 &&
                   flat(o.out).find("nothing fits: few.bin has 24 sequences of 16 tokens, and a "
                                    "step takes 32\n") != Text::npos, "%s", o.out.c_str());
    }
}

// --minimum and --fit for several GPUs: the more GPUs, the less memory each needs. The recommended
// command contains their number and fits, and --plan gives a forecast for it.
TEST(fit_gpus) {
    const char *model = "d48";
    for (const char *title : {"GPU, nothing offloaded: ", "GPU, all but gradients on the host: "}) {
        double last = INFINITY;
        for (int gpus : {2, 4, 8}) {
            const Outcome o = program(text("--minimum -e %s -z 3 --gpus %d", model, gpus));
            const size_t at = o.out.find(title);
            const Text command = recommended(o.out, title) + " ";
            char unit = 0;
            double size = 0;
            expect(at != Text::npos &&
                   sscanf(&o.out[at + strlen(title)], "%lf %c", &size, &unit) == 2 &&
                   flat(o.out).find(text(", each of %d GPUs; ", gpus)) != Text::npos &&
                   has(command, text(" --gpus %d -z 3 ", gpus)), "%s", o.out.c_str());
            size *= unit == 'G' ? 1024 : 1;
            expect(size < last, "%s%d GPUs: %g after %g", title, gpus, size, last);
            last = size;
        }
    }
    const Outcome o = program(text("--fit bits -e %s --gpu 4090 --gpus 4 -z 2 -d 524288", model));
    const Text many = recommended(o.out, "\nfastest: ");
    expect_success(o, "--fit of several GPUs");
    expect((many + " ").find(" --gpus 4 -z 2 ") != Text::npos &&
               flat(o.out).find(", each of 4 GPUs; tokens/s of all predicted ") != Text::npos,
           "%s", o.out.c_str());
    const Text planned = program("--plan --gpu 4090 " + many).out;
    expect(has(planned, "4090: 23.60 GiB; fits, ") &&
               has(planned, "\nforecast: "), "%s", many.c_str());
    const Text two = flat(program("--plan -e d12 --gpu h100 --gpus 16").out);
    expect(has(two, "; predicted for these cards "), "16 GPUs are two machines");
}

// The command that --fit recommends contains the user's options, can be pasted, and contains no
// option that the program would refuse.
TEST(fit_given) {
    static const struct {
        const char *options, *in, *not_in;
    } table[] = {
        {"any -d 524288 -b 8", " -b 8 ", NULL},
        {"any --logit-rows 3000", " --logit-rows 3000", NULL},
        {"any --dtype fp32", " --dtype fp32", "  bf16 "},
        {"any --moments bf16", " --moments bf16", "  bf16 -r"},
        {"any -w none", " -w none", "  bf16 -r"},
        {"bits -r gelu --offload moments", " -r gelu --offload moments", NULL},
        {"bits --quiet", " --quiet ", "--quiet 1"},
        {"bits -r block:1,gelu:1,block:1,gelu:1,block:1,gelu:1,block:1,gelu:1",
         " -r block:1,gelu:1,block:1,gelu:1,block:1,gelu:1,block:1,gelu:1\n", NULL},
    };
    for (const auto &row : table) {
        const Text line = Text("--fit ") + row.options + " -e d12 --gpu 4090";
        const Outcome o = program(line);
        expect_success(o, line);
        const Text command = recommended(o.out, row.options[4] == '-' ? "st: " : "fastest: ");
        expect((command + "\n").find(row.in) != Text::npos, "%s: %s", line.c_str(),
               command.c_str());
        expect(!row.not_in || !has(o.out, row.not_in) ||
                   o.out.find(row.not_in) > o.out.find("\nsame bits"),
               "%s: %s", line.c_str(), o.out.c_str());
        expect_success(program("--plan --gpu 4090 " + command), command);
    }
    for (const char *command : {"--fit any", "--minimum"}) {
        const Outcome o = program(Text(command) + " -e d12 --gpu t4");
        const Outcome same = program(Text(command) + " -e d12 --gpu T4");
        expect(same.out == o.out, "%s: --gpu T4 is another card than t4", command);
        const Text plan = program("--plan -e d12 --gpu t4").out;
        expect(o.status == 0 && !has(o.out, "moments bf16") && !has(o.out, "-w none") &&
               flat(plan).find("; fp16; B 4") != Text::npos, "%s: %s", command, o.out.c_str());
    }
    const Outcome moved = outcome(spawn([] {
        execl(tested.c_str(), "../my tools/train_gpt2", "--minimum", "-e", "d12", NULL);
    }));
    expect(has(moved.out, "'../my tools/train_gpt2cu' -e d12 ") &&
               has(moved.out, "'../my tools/train_gpt2' -e d12 ") &&
               flat(moved.out).find("iB and 1.00 GiB for libraries (assumed") != Text::npos,
           "%s", moved.out.c_str());
}

// --largest: its command fits, and the next possible value does not.
TEST(largest) {
    static const struct {
        const char *options, *card, *flag;
        int step;  // from one possible value to the next; 0: the next divisor
    } table[] = {
        {"batch -e d12", " --gpu 4090", "-b ", 1},
        {"batch -e d24 -r none", " --gpu t4", "-b ", 1},
        {"batch -e d24 --offload auto -d 524288", " --gpu 4060ti", "-b ", 0},
        {"seq-len -e l6h6c384t32768 -b 4 -r none", " --gpu-mem 3GiB", "-t ", 1},
        {"seq-len -e l6h6c384t65536 -b 8 -d 524288", " --gpu-mem 3GiB", "-t ", 0},
    };
    for (const auto &row : table) {
        const Text line = Text("--largest ") + row.options + row.card;
        const Outcome o = program(line);
        expect_success(o, line);
        const Text command = recommended(o.out, "\n") + row.card;
        const size_t at = command.find(row.flag) + 3;
        const int value = atoi(&command[at]);
        expect(number_after(o.out, " that fits:") == value, "%s", o.out.c_str());
        const Outcome fits = program("--plan " + command);
        expect(fits.status == 0, "%s: %s", command.c_str(), fits.out.c_str());
        const int next = row.step ? value + row.step : 2 * value;
        const Text digits = text("%d", value);
        const Outcome not_fits =
            program("--plan " + Text(command).replace(at, digits.size(), text("%d", next)));
        expect(not_fits.status == 3 || has(not_fits.err, "positions"), "%s: %d: %s",
               command.c_str(), next, not_fits.out.c_str());
    }
    expect(program("--largest batch -e d48 --gpu-mem 1200M").status == 3);
    expect_too_large(program("--fit bits -e d12 --gpu-mem 1G"),
                     "--gpu-mem: nothing is left for the plan: 1.00 GiB", "libraries");
    const Outcome all = program("--largest seq-len -e d12 --gpu h100");
    expect(flat(all.out).find(": 1024 (the model has no more positions)") != Text::npos, "%s",
           all.out.c_str());
    static const Refusal refused[] = {
        {"--largest batch -b 2 --gpu t4", "leave --batch out"},
        {"--largest seq-len -t 64 --gpu t4", "leave --seq-len out"},
        {"--largest length --gpu t4", "'length' is not one of batch|seq-len"},
        {"--largest batch --plan", "are commands: give one"},
        {"--largest batch -e d12 -d 1000 --gpu t4", "is not a multiple of B x T"},
        {"--largest batch --generate", "leave --largest out"},
        {"--fit bits -e d12 --gpu all", "--gpu all needs --plan"},
        {"--plan -e d12 --gpu-mem 12", "12 bytes are less than 1 MiB; did you mean 12GiB?"},
    };
    for (const Refusal &row : refused) {
        expect_refused(program(row.arguments), row.words, row.arguments);
    }
}

// --plan --gpu all agrees with --plan of each card.
TEST(all_cards) {
    const Text run = "-e gpt2-xl -b 4 --offload none ";
    const Outcome o = program("--plan --gpu all " + run);
    expect_success(o, "--gpu all");
    const Text out = flat(o.out);
    for (const char *card : {"t4", "4090", "h100", "3060-laptop", "v100"}) {
        const Outcome one = program(Text("--plan --gpu ") + card + " " + run);
        const size_t at = out.find(text("\n%s ", card)), end = out.find('\n', at + 1);
        const Text line = out.substr(at, end - at), plan = flat(one.out);
        const Text words = one.status == 0 ? "; fits, " : "; DOES NOT FIT, ";
        const size_t verdict = plan.find(words) + words.size();
        const Text room = plan.substr(verdict, plan.find('\n', verdict) - verdict);  // "1 GiB free"
        expect(at != Text::npos && (card[0] == 'v' || has(line, room)), "%s: %s: %s",
               card, line.c_str(), room.c_str());
        const double rate = number_after(plan, "\nforecast: ");
        expect(one.status != 0 || number_after(line, " free ") == rate, "%s: %s: %.0f", card,
               line.c_str(), rate);
        const size_t fits = plan.find("\nit fits with ");
        if (fits != Text::npos && card[0] != 'v') {  // the line has the first of these
            const Text remedy = plan.substr(fits + 14, plan.find('\n', fits + 1) - fits - 14);
            expect(has(line, remedy), "%s: %s: %s", card, line.c_str(), remedy.c_str());
        }
    }
    const Text narrow = program("--plan --gpu all -e d12 --moments bf16").out;
    expect(narrow.find("fits, but no bf16\n", narrow.find("\nt4 ")) < narrow.find("\n2080ti "),
           "%s", narrow.c_str());
    expect(has(out, "\nv100 ") && has(out, "this program needs compute capability 7.5"), "%s",
           o.out.c_str());
}

// Each suggestion that --plan prints fits when it is typed, and none is printed twice. They include
// --logit-rows and --workspace, as in --minimum.
TEST(suggestions) {
    static const char *const plans[] = {
        "-e gpt2-xl --gpu-mem 1.7GiB -b 1", "-e gpt2-xl --gpu 4060ti -r none --offload none",
        "-e gpt2-large --gpu t4 -b 64 -d 65536 -r none",
        "-e gpt2-xl --gpu 4060 --gpus 2 -z 3 -r none"};
    for (const char *options : plans) {
        const Outcome o = program(Text("--plan ") + options);
        const Text out = flat(o.out);
        Words seen;
        expect(o.status == 3, "%s: status %d", options, o.status);
        for (size_t at = 0; (at = out.find("\nit fits with ", at)) != Text::npos; at++) {
            const Text remedy = out.substr(at + 14, out.find(": ", at) - at - 14);
            Text line = Text("--plan ") + options + " ";
            for (const char *given : {"-r ", "-b ", "--offload "}) {  // set by the suggestion
                const size_t old = line.find(given);
                if (has(remedy, given) && old != Text::npos) {
                    const size_t value = line.find(' ', old);
                    line.erase(old, line.find(' ', value + 1) + 1 - old);
                }
            }
            const Outcome typed = program(line + remedy);
            expect(typed.status == 0, "%s%s: %s", line.c_str(), remedy.c_str(),
                   (typed.out + typed.err).c_str());
            expect(std::find(seen.begin(), seen.end(), remedy) == seen.end(), "twice: %s",
                   remedy.c_str());
            seen.push_back(remedy);
        }
        expect(!seen.empty(), "%s: %s", options, o.out.c_str());
    }
    const Text rows = program(Text("--plan ") + plans[0]).out;
    expect(has(rows, "it fits with --logit-rows 128 --workspace 256: "), "%s", rows.c_str());
    const Text none = program("--plan -e gpt2-xl --gpu-mem 1.3GiB -b 1").out;
    expect(has(none, "no settings make it fit; --minimum prints the least memory"),
           "%s", none.c_str());
    const Text twice = program("--plan -e gpt2-xl --gpu 4090 --gpus 2 -z 3").out;
    const size_t first = twice.find("\n--offload moments,master,residuals\n");
    expect(first != Text::npos &&
               twice.find("\n--offload moments,master,residuals\n", first + 1) == Text::npos, "%s",
           twice.c_str());
}

// The forecast for a Hopper GPU is that with the attention kernels that the GPU has to prove, which
// are for heads of 64 channels in bf16, and says so; below it is the speed without them.
TEST(proved_kernels) {
    static const struct {
        const char *options;
        bool has;
    } table[] = {{"-e d12 -b 64 --gpu h200", true},
                 {"-e d48 --gpu h100 --gpus 8", true},
                 {"-e d12 --gpu h100 --dtype fp16", false},
                 {"-e d12 --gpu h200 --tune 0", false},
                 {"-e d12 --gpu h20", false},
                 {"-e d12 --gpu 4090", false},
                 {"-e l12h6c768t1024 --gpu h100", false}};
    for (auto &row : table) {
        const Text out = flat(program(Text("--plan ") + row.options).out);
        const double forecast = number_after(out, "forecast: ");
        const double usual = number_after(out, "with the default kernels: ");
        const size_t said = out.find("; predicted, if this GPU proves the kernels\n");
        const bool ranks = has(out, "; predicted for these cards in one machine\n");
        expect(forecast > 0 && (said != Text::npos || (ranks && usual > 0)) == row.has &&
                   (row.has ? forecast > 1.02 * usual && forecast < 1.1 * usual : usual < 0),
               "%s: %g, %g", row.options, forecast, usual);
    }
    // --fit and the list of cards have the same forecast.
    const Text plan = flat(program("--plan -e d12 -b 64 -r none -d 524288 --gpu h200").out);
    const Text fit = flat(program("--fit bits -e d12 -d 524288 --gpu h200").out);
    const Text cards = program("--plan -e d12 -b 64 -r none -d 524288 --gpu all --json").out;
    const double forecast = number_after(plan, "\nforecast: ");
    const size_t row = cards.find("\"h200\"");
    expect(forecast > 5e5 && fit.find("predicted, if this GPU proves the kernels") != Text::npos &&
               number_after(cards.substr(row), "\"tokens_per_s\":") == forecast,
           "%g: %s %s", forecast, fit.c_str(), cards.substr(row, 300).c_str());
}

// --plan tells what unused memory would buy: the batch that it names fits, and is faster by the
// printed factor.
TEST(unused_memory) {
    const Text run = "-e d12 --gpu h100";
    for (const Text &step : {Text(" -d 524288"), Text()}) {
        const Outcome o = program("--plan " + run + step + (step.empty() ? "" : " -b 4"));
        const Text out = flat(o.out);
        const double B = number_after(out, "unused memory would buy -b ");
        const size_t line = out.find("unused memory would buy -b ");
        const double faster = number_after(out.substr(line), ": ");
        const Outcome typed = program("--plan " + run + step + text(" -b %.0f", B));
        expect(o.status == 0 && typed.status == 0 && B > 4, "%s", o.out.c_str());
        expect_near(number_after(typed.out, "\nforecast: ") / number_after(out, "\nforecast: "),
                    faster, 0.006, "-b %.0f%s", B, step.c_str());
        expect(number_after(flat(typed.out), "unused memory would buy") < 0, "%s",
               typed.out.c_str());
    }
    const Text chosen = program("--plan -d 524288 " + run).out;  // as much as fits
    expect(flat(chosen).find("unused memory would buy") == Text::npos, "%s", chosen.c_str());
    const Text levels = program("--plan -e d12 --gpu 4090 -b 16 -r block -d 524288").out;
    expect(has(levels, "unused memory would buy -r none"), "%s", levels.c_str());
    const Text full = program("--plan -e d48 --gpu 4060ti").out;
    expect(!has(full, "unused"), "%s", full.c_str());
}

// Every command's JSON is valid, has the numbers of its text output and gives the same exit status.
// Lines of text fit 80 columns, except commands to paste.
TEST(json_and_text) {
    static const struct {
        const char *options;
        int status;
        const char *key, *before;  // a JSON number of bytes, and the text before the same number
    } table[] = {
        {"--plan -e gpt2-xl --gpu 4060ti", 0, "device_bytes", "\ndevice allocation "},
        {"--plan -e gpt2-xl --gpu 4060ti -r none --offload none", 3, "device_bytes",
         "\ndevice allocation "},
        {"--plan -e d12 --gpu v100", 1, "device_bytes", "\ndevice allocation "},
        {"--plan -e l2h2c16t16 -b 2", 0, "device_bytes", "\nallocation "},
        {"--plan -e d24 --gpu all", 0, NULL, NULL},
        {"--plan -e gpt2-xl --gpu all --gpu-mem 1100M", 3, NULL, NULL},
        {"--fit bits -e gpt2-xl --gpu 4060ti -d 524288", 0, NULL, NULL},
        {"--fit all -e d12 --gpu 3060-laptop", 0, NULL, NULL},
        {"--fit bits -e d48 --gpu-mem 1100M", 3, NULL, NULL},
        {"--minimum -e gpt2-xl", 0, NULL, NULL},
        {"--minimum -e gpt2-xl --gpus 8 -z 3", 0, NULL, NULL},
        {"--largest batch -e d24 --gpu t4", 0, NULL, NULL},
        {"--largest batch -e d48 --gpu-mem 1200M", 3, NULL, NULL},
        {"--fit bits -e d12 --gpu nothing", 1, NULL, NULL},
    };
    for (const auto &row : table) {
        const Outcome text_out = program(row.options);
        const Outcome json = program(Text(row.options) + " --json");
        expect(text_out.status == row.status && json.status == row.status, "%s: %d and %d",
               row.options, text_out.status, json.status);
        if (row.status == 1 && !row.key) {
            expect(text_out.err == json.err && json.out.empty(), "%s", json.out.c_str());
            continue;
        }
        expect(json_valid(json.out), "%s: %s", row.options, json.out.substr(0, 600).c_str());
        if (row.key) {
            expect(number_after(json.out, text("\"%s\":", row.key)) ==
                       number_after(text_out.out, row.before), "%s: %s", row.options, row.key);
        }
        Words lines;
        for (size_t at = 0, end; at < text_out.out.size(); at = end + 1) {
            end = text_out.out.find('\n', at);
            const Text line = text_out.out.substr(at, end - at);
            expect(line.size() <= 80 || has(line, "train_gpt2"),
                   "%s: %zu columns: %s", row.options, line.size(), line.c_str());
        }
    }
    // The speeds and bytes of --fit's candidates are those of the text.
    const Text options = "--fit bits -e gpt2-xl --gpu 4060ti -d 524288";
    const Text rows = program(options).out, json = program(options + " --json").out;
    size_t at = json.find("\"candidates\""), row = rows.find("settings\n");
    int count = 0;
    for (; (at = json.find("\"batch\":", at)) != Text::npos; at++, count++) {
        row = rows.find(text("\n%5.0f ", number_after(json.substr(at), "\"batch\":")), row);
        expect(row != Text::npos, "%s", rows.c_str());
        const Text line = rows.substr(row, 45);
        const double rate = number_after(json.substr(at), "\"tokens_per_s\":");
        const double gib = number_after(json.substr(at), "\"device_bytes\":") / 0x1p30;
        expect(has(line, text("%d,%03d ", (int)rate / 1000, (int)rate % 1000)) &&
               has(line, text(" %.2f GiB ", gib)), "%s: %.0f, %.2f", line.c_str(), rate, gib);
        row++;
    }
    expect(count >= 3, "%d candidates", count);
    const Text help = program("--help").out;
    expect(has(help, "3060-laptop") && has(help, "rtx-pro-6000") &&
               has(help, "gh200"), "%s", help.c_str());
}

// If the available memory is unknown, a plan says so and prints no number. Skipped if a test cannot
// hide the files that contain it.
TEST(memory_unknown) {
    auto hidden = [](const Text &then) {
        return outcome(spawn([&] {
            const Text line = "mount --bind none /proc/meminfo && mount -t tmpfs none "
                              "/sys/fs/cgroup && exec " + then;
            write_file("none", "");
            execlp("unshare", "unshare", "-rm", "sh", "-c", line.c_str(), (char *)NULL);
        }));
    };
    if (hidden("true").status != 0) {
        skip("no permission to mount over system files");
    }
    const Outcome o = hidden("'" + tested + "' -e l2h2c16t16 --plan");
    expect_success(o, "a plan");
    expect(has(o.out, "\nmemory available to this process: unknown\n"), "%s", o.out.c_str());
}

// Resource limits that would end a run later are detected at its start, and by --plan.
TEST(memory_limits) {
    if (has_sanitizers()) {
        skip("a sanitizer needs more address space than any limit leaves");
    }
    static const struct {
        int resource;
        const char *name;
    } limits[] = {{RLIMIT_AS, "ulimit -v"}, {RLIMIT_DATA, "ulimit -d"}};
    const bool threaded = program("--version").out.find("no OpenMP") == Text::npos;
    for (const auto &limit : limits) {
        auto low = [&] {
            struct rlimit r = {256 << 20, 256 << 20};
            setenv("OMP_NUM_THREADS", "2", 1);  // the stacks of more threads would exceed the limit
            setrlimit((decltype(RLIMIT_AS))limit.resource, &r);
        };
        Outcome o = program("--plan -e l12h12c384t64", low);
        expect(o.status == 3 && flat(o.out).find(text(" (%s", limit.name)) != Text::npos &&
                   flat(o.out).find("); DOES NOT FIT") != Text::npos,
               "%s: status %d, %s", limit.name, o.status, o.out.substr(0, 1200).c_str());
        expect_too_large(program("-i train.bin -e l12h12c384t64 -x 1", low),
                         text("are available (%s", limit.name), limit.name);
        expect_success(program("-i train.bin -e l2h2c16t16 -x 1 --quiet", low), limit.name);
        // A plan that -r auto makes as large as possible leaves memory for a checkpoint's thread.
        for (int mib = 80; mib <= 120; mib += 10) {
            remove_folder("full");
            o = program("-i train.bin -e l4h4c128t16 -b 160 -x 1 --quiet -o full", [&] {
                struct rlimit r = {(rlim_t)mib << 20, (rlim_t)mib << 20};
                setenv("OMP_NUM_THREADS", "1", 1);
                setrlimit((decltype(RLIMIT_AS))limit.resource, &r);
            });
            if (mib < 100 && o.status) {
                expect_too_large(o, text("are available (%s", limit.name), limit.name);
            } else {
                expect_success(o, text("%s %d MiB", limit.name, mib));
            }
        }
        expect_too_large(program("--generate -e l12h12c1536t64", low),
                         "short; --generate needs weights and a KV cache", limit.name);
        // Threads start after the plan is allocated, and their stacks count against the limit.
        for (const char *threads : {"7", "9"}) {
            o = program("-i train.bin -e l2h2c16t16 -x 1 --quiet", [&] {
                struct rlimit stack = {32 << 20, 32 << 20};
                low();
                setrlimit(RLIMIT_STACK, &stack);
                setenv("OMP_NUM_THREADS", threads, 1);
            });
            if (threads[0] == '7' || !threaded) {
                expect_success(o, limit.name);
            } else {
                expect_too_large(o, Text(limit.name) + " minus thread stacks): ", threads);
            }
        }
        o = program("--fit bits -e l12h12c1536t64", low);
        expect(o.status == 3 && flat(o.out).find("tokens/s of two cores, for ") != Text::npos, "%s",
               o.out.c_str());
    }
}

// A run that a launcher starts several times is refused in one line that names its variable,
// because independent copies would each train the whole model. A plan is not affected.
TEST(launcher) {
    for (const char *variable :
         {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"}) {
        expect_refused(program(TINY "-x 1 -o out", with(variable, "8")), Text(variable) + " is 8",
                       variable);
        for (const char *plan : {"--plan", "--fit bits", "--minimum"}) {
            expect_success(program(Text(plan) + " -e l2h2c16t16", with(variable, "8")), plan);
        }
        expect_success(program(TINY "-x 1 --quiet", with(variable, "1")), "one copy");
    }
    // In a shell of sbatch or salloc, the program is started once.
    expect_success(program(TINY "-x 1 --quiet", with("SLURM_NTASKS", "8")), "a shell");
    expect(!exists("out"), "a run was started");
}

// A signal ends --plan and --fit as it ends any program that has nothing to save.
TEST(plan_signal) {
    int ends[2];
    expect(pipe2(ends, O_NONBLOCK) == 0);
    while (write(ends[1], "x", 1) == 1) {  // full: the plan waits for a reader that never reads
    }
    fcntl(ends[1], F_SETFL, 0);
    for (const char *plan : {"--plan -e l2h2c16t16", "--fit bits -e l2h2c16t16"}) {
        const pid_t pid = start(plan, [&] {
            dup2(ends[1], 1);
            signal(SIGINT, SIG_DFL);  // shells start background processes with it ignored
            alarm(10);
        });
        usleep(300000);
        kill(pid, SIGINT);
        const Outcome o = outcome(pid);
        expect(o.status == 256 + SIGINT && o.err.empty(), "%s: status %d: %s", plan, o.status,
               o.err.c_str());
    }
}

// The start-up box and the log list all memory of a run, even if host and device share it, and no
// list ends with a comma.
TEST(memory_shown) {
    if (has(tested, "cu")) {
        skip("needs the CPU program");
    }
    const Text run = "-e l3h2c64t16 -b 2 -r none --offload weights,gradients,moments ";
    const Outcome plan = program("--plan " + run), o = program("-i train.bin -x 1 -o out " + run);
    expect_success(o, run);
    char total[2][40] = {"", ""};
    const size_t planned = plan.out.find("\ntotal "), box = o.out.find("\nmemory ");
    expect(planned != Text::npos && box != Text::npos, "%s%s", plan.out.c_str(), o.out.c_str());
    const int64_t bytes = (int64_t)last_value(read_file("out/log.jsonl"), "plan_bytes");
    sscanf(plan.out.c_str() + planned, "\ntotal %39[0-9,]", total[0]);
    sscanf(o.out.c_str() + box, "\nmemory %39[^:]", total[1]);
    Text digits = total[0];
    digits.erase(std::remove(digits.begin(), digits.end(), ','), digits.end());
    expect(digits == text("%lld", (long long)bytes), "planned %s, logged %lld", digits.c_str(),
           (long long)bytes);
    expect(fabs(atof(total[1]) * (1 << (strstr(total[1], "MiB") ? 20 : 10)) / (double)bytes - 1) <
               0.01, "box: %s", total[1]);
    expect(has(o.out, text("\t%s", total[1])) ||
               has(o.out, text("  %s", total[1])), "no step says %s", total[1]);
    const Text line = o.out.substr(box + 1, o.out.find('\n', box + 1) - box - 1);
    expect(!has(line, ",;") && line.back() != ',' &&
           has(line, " of emulated host memory"), "%s", line.c_str());
    const Outcome plain = program(TINY "-x 1");
    expect(!has(plain.out, ",\npeak"), "%s", plain.out.c_str());
}

// --version prints program, version and compiler, in any folder and with any other option.
TEST(version) {
    for (const char *arguments : {"--version", "-x 5 --version -y 1"}) {
        const Outcome o = program(arguments);
        expect_success(o, arguments);
        char name[32], number[32];
        expect(sscanf(o.out.c_str(), "%31[a-z_2] %31[0-9.]\ncompiler", name, number) == 2 &&
               Text(name).find("train_gpt2") == 0 && number[0] && has(o.out, "\ncompiler  ") &&
               has(o.out, "\nbuilt in  "), "%s", o.out.c_str());
    }
}

// The command that a run prints can be pasted into a shell: bash splits it into the same words.
TEST(command) {
    const Text values[] = {"plain", "two words", "it's \"$HOME\" `x` \\ \\n !1 #?*~", "",
                           "a\nb\tc'\\\x1b[31m\xff\xc2\x9b \xc3\xa9", "-"};
    for (const Text &value : values) {
        const Outcome run = outcome(spawn([&] {
            execl(tested.c_str(), "./a program", "-i", "train.bin", "-e", "l2h2c16t16", "-b", "2",
                  "-x", "1", "--prompt", value.c_str(), NULL);
        }));
        expect_success(run, value);
        const size_t at = run.out.find("\ncommand  ") + 10, end = run.out.find("\nmemory ", at);
        const Text command = run.out.substr(at, end - at);
        for (const char &c : command) {
            expect((unsigned char)c >= 32 && c != 127, "%02x in %s", c, command.c_str());
        }
        write_file("words", "printf '%s|' " + command);
        const Outcome words = outcome(spawn([] { execlp("bash", "bash", "words", NULL); }));
        const Text want = "./a program|-e|l2h2c16t16|-i|train.bin|-b|2|-x|1|" +
                          (value.empty() ? "" : "--prompt|" + value + "|");
        expect(words.out == want, "%s: %s", command.c_str(), words.out.c_str());
    }
}

// Step lines are printed every --log-every steps and for the last step, after a resume too.
TEST(log_every) {
    const Outcome o = program(TINY "-x 10 -n 5 --log-every 4 -y 1 -o out");
    expect_success(o, "--log-every 4");
    Text steps;
    for (size_t at = 0; (at = o.out.find("\nstep ", at)) != Text::npos; at++) {
        const int step = atoi(&o.out[at + 6]);
        steps += o.out.find(text("%4d/10  loss ", step), at) == at + 6 ? text("%d ", step) : "";
    }
    expect(steps == "4 8 10 ", "%s", steps.c_str());
    expect(log_steps("out/log.jsonl") == Ints({4, 8, 10}));
    remove_folder("out/step-00000010");
    expect_success(program(TINY "--quiet -x 10 -n 5 --log-every 3 -y 1 -o out"), "resumed");
    expect(log_steps("out/log.jsonl") == Ints({4, 6, 9, 10}), "a log cut back to step 5");
    // A run that is stopped prints its last step too, although it was not known to be the last.
    const pid_t pid = start(TINY "-x 99999999 -k constant --log-every 50000000 -n 20 -o cut");
    wait_until([] { return exists("cut/step-00000020/manifest.json"); });
    kill(pid, SIGINT);
    const Outcome cut = outcome(pid);
    const Ints last = log_steps("cut/log.jsonl");
    expect(cut.status == 0 && last.size() == 1 && last[0] >= 20 &&
               has(cut.out, text("\nstep %7d/99999999  loss ", last.back())) &&
               has(cut.out, text("interrupted after step %d,", last.back())),
           "%zu lines: %s", last.size(), cut.out.c_str());
}

// Returns the output of a program on a terminal of `columns` columns; `each` receives the output so
// far and may resize the terminal.
static Text on_terminal(const Text &arguments, int columns,
                        const std::function<void(int, const Text &)> &each = nullptr) {
    const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    if (terminal < 0 || grantpt(terminal) != 0 || unlockpt(terminal) != 0) {
        skip("this system has no pseudo-terminals");
    }
    const Text name = ptsname(terminal);
    struct winsize size = {24, (unsigned short)columns, 0, 0};
    ioctl(terminal, TIOCSWINSZ, &size);
    const int held = open(name.c_str(), O_RDWR | O_NOCTTY);  // until the program has opened it
    const pid_t pid = start(arguments, [&] { dup2(held, 1); });
    close(held);
    Text all;
    char piece[512];
    for (ssize_t n; (n = read(terminal, piece, sizeof piece)) > 0;) {
        all.append(piece, (size_t)n);
        if (each) {
            each(terminal, all);
        }
    }
    close(terminal);
    expect_success(outcome(pid), arguments);
    return all;
}

// Returns the lines that are rewritten in place; each byte of the clearing sequence is replaced by
// a space.
static Words live_lines(const Text &all) {
    Words lines;
    for (size_t at = 0, end; (at = all.find("\r\033[K", at)) != Text::npos; at = end) {
        at += 4;
        end = std::min(all.find('\r', at), all.size());
        lines.push_back(all.substr(at, end - at));
    }
    return lines;
}

// A line rewritten in place fits the terminal at any width, even after it is resized; on a narrow
// terminal the least useful parts are omitted first, and no step is missing.
TEST(live_line) {
    for (int columns : {200, 80, 56, 20}) {
        const Words lines = live_lines(on_terminal(TINY "-x 20", columns));
        expect(lines.size() >= 20, "%zu lines at %d columns", lines.size(), columns);
        for (size_t i = 0; i < lines.size() && i < 20; i++) {
            const Text &line = lines[i];
            expect((int)line.size() < columns, "%d columns: %s", columns, line.c_str());
            expect(line.find(text("step %4zu/20", i + 1)) == 0, "%s", line.c_str());
            expect(has(line, "MiB") == (columns == 200) &&
                       has(line, "  norm ") == (columns >= 80) &&
                       has(line, "  eta ") == (columns >= 56),
                   "%d columns: %s", columns, line.c_str());
        }
    }
    int resized = 0;
    const Words lines = live_lines(on_terminal(TINY "-x 3000", 120, [&](int fd, const Text &all) {
        struct winsize size = {24, 40, 0, 0};
        if (!resized && has(all, "step   20/3000")) {
            resized = ioctl(fd, TIOCSWINSZ, &size) == 0;
        }
    }));
    size_t wide = 0;
    for (size_t i = lines.size() - 1000; i < lines.size() - 1; i++) {
        wide += lines[i].size() >= 40;
    }
    expect(resized && lines[5].size() > 80 && wide == 0, "%zu lines too long after a resize", wide);
}

// Control bytes and invalid UTF-8 are written to a file unchanged and to a terminal as text.
TEST(sample_bytes) {
    const Text bytes = "\x1b[2m\x01\x7f\xc2\x9b\xff\xc3\xa9k\n.";
    const Text shown = "\\x1b[2m\\x01\\x7f\\xc2\\x9b\\xff\xc3\xa9k\r\n.";
    const Text run = TINY "-x 1 -s 1 -g 1 --temperature 0 --prompt " + bytes;
    const Outcome o = program(run);
    expect_success(o, "into a file");
    expect(has(o.out, "---\n" + bytes), "%s", o.out.c_str());
    expect_success(program(TINY "-x 1 --quiet -o out"), "a model");
    for (const Text &arguments : {run, "-e out/step-00000001 --generate --quiet -g 1 --prompt " +
                                           bytes}) {
        const Text all = on_terminal(arguments, 80);
        expect(has(all, (arguments == run ? "---\r\n" : "") + shown) &&
                   !has(all, bytes.substr(0, 4)), "%s", all.c_str());
    }
    // A character whose bytes are separate tokens is printed whole.
    Ids accents;
    for (int i = 0; i < 400; i++) {
        accents.push_back(i % 2 ? 0xa9 : 0xc3);
    }
    write_file("accents.bin", shard_bytes(accents, BYTE_TOKENS));
    const Text train = "-i accents.bin -e l2h2c32t16 -b 8 -x 200 -l 1e-2 --quiet -o accents";
    expect_success(program(train), train);
    const Text all = on_terminal("-e accents/step-00000200 --generate --quiet -g 9 --temperature 0 "
                                 "--prompt \xc3\xa9", 80);
    expect(all.find("\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\xc3\xa9\\xc3\r\n") == 0, "%s", all.c_str());
}

int main(int argc, char **argv) {
    return harness_main(argc, argv, "./train_gpt2");
}
