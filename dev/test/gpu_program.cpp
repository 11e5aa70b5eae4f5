// gpu_program.cpp -- the GPU program, emulated or on a GPU: what it refuses, its commands,
// checkpoints exchanged with the CPU program, and training. The emulated device is configured by
// environment variables (see dev/cuda_cpu/emu_core.h).
//
// Run:    build/test/gpu_program [--program ./train_gpt2cu] [NAME...]

#include "files.h"
#include <map>
#include <numeric>

// Runs the CPU program, for results on which both programs must agree.
static Outcome cpu_program(const Text &arguments) {
    return outcome(start_program("train_gpt2", arguments));
}

static int is_emulated() { return has(tested, "cu_cpu"); }

// True if the available GPU can run these options. Without bf16 its plans fail; a test that skips
// options reports it.
static bool can_run(const Text &options) {
    static const bool has_bf16 =
        program("--plan -e l1h1c16t16 --dtype bf16").err.find("support bf16") == Text::npos;
    const bool can = has_bf16 || (!has(options, "bf16") && !has(options, "-w none"));
    detail = can ? detail : "no bf16 here";
    return can;
}

// Invalid options give one line that names the error, exit status 1, and no checkpoint.
TEST(gpu_bad_input) {
    static const Refusal table[] = {
        {"--dtype fp16 -w none", "--master (-w) none: with --dtype fp16 the fp32 weights"},
        {"--dtype bf16 -w 0 --offload master", "--offload master: there is no master copy"},
        {"--offload moments,weight", "--offload: 'moments,weight' is not a list"},
        {"-z 1", "--zero (-z) 1 shards states across GPUs"},
        {"-z 4", "--zero (-z): '4' is not a whole number from 0 to 3"},
        {"--dtype fp32 --moments bf16", "--moments bf16 needs --dtype bf16"},
        {"--dtype fp32 --grad-dtype bf16", "--grad-dtype bf16 needs --dtype bf16"},
        {"--dtype fp64", "--dtype: 'fp64'"},
        {"-r block:3", "must be from 0 to 2"},
    };
    static const Refusal shapes[] = {
        {"l2h2c20t16", "20 channels in 2 heads: on a GPU, channels must be a multiple of 8"},
        {"l2h4c16t16", "16 channels in 4 heads"},
        {"l1h1c136t16", "136 channels in 1 heads"},
        {"l1h64c8192t4", "at most 4096"},  // also short of memory, which is not tested here
        {"l2h3c16t16", "allowed are"},
    };
    const Text run = "-i train.bin -b 2 -x 2 -o out -e ";
    for (const Refusal &row : table) {
        expect_refused(program(run + "l2h2c16t16 " + row.arguments), row.words, row.arguments);
    }
    for (const Refusal &row : shapes) {
        expect_refused(program(run + row.arguments), row.words, row.arguments);
    }
    if (is_emulated()) {
        Outcome none = program(run + "l2h2c16t16", with("EMU_GPUS", "0"));
        expect_refused(none, "no NVIDIA GPU found", "no GPU");
        Outcome old = program(run + "l2h2c16t16 --dtype bf16", with("EMU_CC", "75"));
        expect_refused(old, "does not support it; use --dtype fp16", "a GPU without bf16");
        old = program("--plan -e l2h2c16t16 --dtype bf16", with("EMU_CC", "75"));
        expect_refused(old, "this GPU does not support bf16; use fp16", "a plan for it");
        expect_success(program(run + "l2h2c16t16 --quiet --dtype fp32", with("EMU_CC", "75")),
                       "fp32 without bf16");
        Outcome pinned =
            program(run + "l2h2c16t16 --offload moments", with("EMU_HOST_MEM", "4096"));
        expect_refused(pinned, " of host memory: out of memory; this machine cannot pin more",
                       "memory that cannot be pinned");
        Outcome small = program("-i train.bin -b 64 -x 2 -e l4h2c64t16 -o small "
                                "-r none --offload none",
                                with("EMU_GPU_MEM", "42000000"));
        expect_too_large(small, " short; ", "too little memory");
        expect(has(small.err, "-r ") && has(small.err, " frees "),
               "remedies: %s", small.err.c_str());
    }
    expect(names_in("small", "step").empty() && !exists("small/log.jsonl"), "a run was started");
    expect_success(program("-i train.bin -e l2h2c16t16 -b 2 -x 2 -o other --quiet"), "a run");
    Text kept = checkpoint_bytes("other", 2);
    expect_refused(program("-i train.bin -e l2h2c32t16 -b 2 -x 4 -o other -y 1 --quiet"),
                   "is from a different run", "a checkpoint of another shape");
    expect(checkpoint_bytes("other", 2) == kept, "it has changed");
}

// Start of a run on a GPU whose peak rates are unknown, or whose context and libraries take much
// memory.
TEST(gpu_start) {
    if (!is_emulated()) {
        skip("needs the emulated device");
    }
    const Text run = "-i train.bin -e l2h2c16t16 -b 2 -x 2 ";
    Outcome o = program(run + "-o out", with("EMU_CC", "999"));
    expect_success(o, "a GPU without a row in peak_rows");
    expect(has(o.out, "\npeak     unknown: ") && !has(o.out, "% of peak") &&
           has(o.out, "; cuBLASLt 1"), "%s", o.out.c_str());
    const Text log = read_file("out/log.jsonl");
    expect(has(log, "\"peak_pct\":null") && has(log, "\"device\":\"") && has(log, "cuBLASLt 1"),
           "%s", log.c_str());
    // The context is part of what the driver reports as used; libraries are added to that.
    const Text fixed = run + "-r none --offload none ";
    o = program(fixed + "--plan --json");
    const char *key = "\"total_bytes\":";
    expect(has(o.out, key), "%s", o.out.c_str());
    const long plan = atol(o.out.c_str() + o.out.find(key) + strlen(key));
    for (long less : {0, 1}) {
        o = program(fixed + "--quiet", [=] {
            setenv("XDG_CACHE_HOME", "/proc/none", 1);  // the next run must not know this one's use
            setenv("EMU_CONTEXT", "300M", 1);
            setenv("EMU_LIBRARY", "200M", 1);
            setenv("EMU_GPU_MEM", text("%ld", plan + (500L << 20) - less).c_str(), 1);
        });
        if (less) {
            expect_too_large(o, ": 1 B short", "a byte less");
            expect(has(o.err, " (300.0 MiB of "), "%s", o.err.c_str());
        } else {
            expect_success(o, "plan, context and libraries to the byte");
        }
    }
    o = program(run, [] {
        setenv("XDG_CACHE_HOME", "/proc/none", 1);
        setenv("EMU_LIBRARY", "200M", 1);
    });
    expect(has(o.out, "; libraries took about 200.0 MiB"), "%s", o.out.c_str());
}

// A driver older than the toolkit ends a run; a plan that needs the GPU reports it.
TEST(gpu_driver) {
    if (!is_emulated()) {
        skip("needs the emulated device");
    }
    const Text run = "-i train.bin -e l2h2c16t16 -b 2 -x 2 ";
    const auto old = with("EMU_DRIVER", "11080");
    expect_refused(program(run, old), "the driver is older than this program's CUDA", "a run");
    Outcome o = program("--plan -e d12", old);
    expect(o.status == 0 && o.out.find("memory plan of the GPU run") == 0 &&
               has(o.err, ": the driver supports CUDA 11.8, too old for this program's CUDA 1") &&
               std::count(o.err.begin(), o.err.end(), '\n') == 1, "%s", o.err.c_str());
    expect_success(program("--plan -e d12 --gpu h100", old), "a plan for a card that is named");
    // Kernels are loaded at their first launch, unless the user's environment says otherwise.
    for (const char *loading : {"", "EAGER"}) {
        o = program(run + "--quiet", [=] {
            setenv("EMU_LOG", "1", 1);
            loading[0] ? setenv("CUDA_MODULE_LOADING", loading, 1)
                       : unsetenv("CUDA_MODULE_LOADING");
        });
        expect(has(o.err, loading[0] ? "loaded at once\n" : "loaded when they are launched\n"),
               "'%s': %s", loading, o.err.substr(0, 200).c_str());
    }
}

// A run that times algorithms announces it, unless --quiet; the next run uses the results.
TEST(gpu_announced) {
    if (!is_emulated()) {
        skip("needs the emulated device");
    }
    const Text run = "-i train.bin -e l2h2c16t16 -b 2 -x 2 ";
    const Text cache = current_folder() + "/cache";
    mkdir(cache.c_str(), 0755);
    more_arguments = "";
    const char *said = "timing matmul algorithms for this GPU, once\n";
    for (const char *times : {"951", "951 again", "159 --quiet"}) {
        const Outcome o = program(run + (strchr(times, '-') ? "--quiet" : ""), [=] {
            setenv("EMU_LT_TIMES", Text(times, 3).c_str(), 1);
            setenv("XDG_CACHE_HOME", strchr(times, '-') ? "/proc/none" : cache.c_str(), 1);
        });
        expect_success(o, times);
        const size_t first = o.out.find(said);
        expect(times[3] ? first == Text::npos : first != Text::npos && o.out.rfind(said) == first,
               "%s: %s", times, o.out.substr(0, 200).c_str());
    }
}

// Returns the losses in a run's log, as text.
static Text losses_in(const Text &folder) {
    const Text log = read_file(folder + "/log.jsonl");
    Text losses;
    for (size_t at = 0; (at = log.find("\"loss\":", at)) != Text::npos; at++) {
        losses += log.substr(at, log.find(',', at) - at) + " ";
    }
    return losses;
}

// Under WSL, registered memory has a different address on the GPU, so CUDA allocates the pinned
// memory instead. The bits are the same, whichever states are offloaded.
TEST(gpu_alias) {
    if (!is_emulated()) {
        skip("needs the emulated device");
    }
    for (const char *states : {"none", "weights,gradients,moments,master,residuals"}) {
        const Text run = Text("-i train.bin -e l2h2c16t16 -b 2 -x 3 --offload ") + states;
        expect_success(program(run + " -o plain"), states);
        expect_success(program(run + " -o alias", with("EMU_ALIAS", "1")), states);
        expect(losses_in("alias") == losses_in("plain") && losses_in("alias").size() > 30,
               "--offload %s: %s, %s", states, losses_in("alias").c_str(),
               losses_in("plain").c_str());
        remove_folder("plain");
        remove_folder("alias");
    }
    expect_refused(program("-i train.bin -e l2h2c16t16 -b 2 -x 2 --offload moments", [] {
        setenv("EMU_ALIAS", "1", 1);
        setenv("EMU_HOST_MEM", "4096", 1);
    }), "out of memory; this machine cannot pin more memory", "too little to pin");
}

// On a card with little memory -r auto finds levels that fit, and results stay bit-identical. With
// --gpu-mem a larger card has the same plan, to the byte.
TEST(gpu_auto) {
    if (!is_emulated()) {
        skip("needs the emulated device");
    }
    const Text run = "-i train.bin -e l3h2c16t16 -b 4 -x 3 --offload none ";
    auto planned = [&](const Text &options) {
        const Text out = program(run + options + "--plan --json").out;
        const char *key = "\"total_bytes\":";
        return atol(out.c_str() + out.find(key) + strlen(key));
    };
    const long none = planned("-r none "), block = planned("-r block ");
    expect(block < none, "%ld, %ld", block, none);
    expect_success(program(run + "-r none -o plain"), "all kept");
    int chosen = 0;
    for (long part = 0; part <= 4; part++) {
        const long memory = block + (none - block) * part / 4;
        const Text folder = text("out%ld", part), capped = text("capped%ld", part);
        const Outcome small =
            program(run + "-o " + folder, with("EMU_GPU_MEM", text("%ld", memory).c_str()));
        const Outcome cap = program(run + text("-o %s --gpu-mem %ld", capped.c_str(),
                                               memory + (1L << 30)));
        expect_success(small, folder.c_str());
        expect_success(cap, capped.c_str());
        expect(losses_in(folder) == losses_in("plain") && losses_in(capped) == losses_in("plain"),
               "%ld bytes: losses", memory);
        const size_t at = small.out.find("\nchosen   "), other = cap.out.find("\nchosen   ");
        expect((at == Text::npos) == (part == 4) && (other == Text::npos) == (part == 4), "%ld: %s",
               part, small.out.c_str());
        chosen += at != Text::npos && small.out.find(" -r ", at) != Text::npos &&
                  cap.out.find("same bits; ", other) != Text::npos;
    }
    expect(chosen == 4, "%d", chosen);
    for (int capped = 0; capped < 2; capped++) {
        const Text less = text("%ld", block - 1 + (capped ? 1L << 30 : 0));
        const Outcome o = capped ? program(run + "--gpu-mem " + less)
                                 : program(run, with("EMU_GPU_MEM", less.c_str()));
        expect_too_large(o, ": 1 B short; ", "a byte less");
    }
    const Outcome away = program("-i train.bin -e l3h2c16t16 -b 4 -x 3 -o away",
                                 with("EMU_GPU_MEM", text("%ld", block - 1).c_str()));
    expect_success(away, "offloads what does not fit otherwise");
    const size_t chose = away.out.find("\nchosen ");
    expect(away.out.find(" --offload moments,master --tune 0\n", chose) != Text::npos &&
               losses_in("away") == losses_in("plain"), "%s", away.out.c_str());
}

// --plan compares pinned memory with this machine's memory, like a run.
TEST(gpu_plan_host) {
    if (!is_emulated() || has_sanitizers()) {
        skip("needs the emulated device without sanitizers");
    }
    const Text run = "-i train.bin -e l12h12c768t64 -b 1 -x 1 -r none --offload moments,master ";
    auto low = [] {
        struct rlimit r = {512 << 20, 512 << 20};
        setrlimit(RLIMIT_DATA, &r);
    };
    const Outcome plan = program(run + "--plan", low);
    const Text out = flat(plan.out);
    expect(plan.status == 3 && has(out, "; fits, ") &&
           has(out, "\nhost memory of this machine: ") && has(out, " (ulimit -d") &&
           has(out, "; DOES NOT FIT, "), "status %d, %s", plan.status, plan.out.c_str());
    expect_too_large(program(run, low), "short; --offload fewer states", "the run");
    expect_success(program(run + "--plan"), "without a limit");
}

// An emulated run prints at once that it is emulated and what it will do, even to a file, because
// its start may take minutes. A second signal ends it during the start.
TEST(gpu_header) {
    if (!is_emulated() || has_sanitizers()) {
        skip("needs the emulated device");
    }
    const pid_t pid = start("-i train.bin -e l6h6c384t64 -b 4");
    wait_until([] { return has(read_file("stdout"), "\nopening the GPU\n"); });
    const Text out = read_file("stdout");
    expect(out.find("train_gpt2cu_cpu 1.0: emulated: try -e l2h2c64t64\n") == 0 &&
               out.find("\nmodel    l6h6c384t64: ") < out.find("\nmemory   ") &&
               out.find("\nopening the GPU\n") == out.size() - 17, "%s", out.c_str());
    kill(pid, SIGTERM);
    wait_until([] { return !read_file("stderr").empty(); });
    kill(pid, SIGTERM);
    const Outcome o = outcome(pid);
    expect(o.status == 128 + SIGTERM && o.err == "stopping; a second signal quits at once\n",
           "status %d, %s", o.status, o.err.c_str());
}

// A run stores the GPU's speed in the user's cache once, and compares it with its own steps; later
// plans use it. If it cannot be stored, the run continues.
TEST(gpu_speed) {
    mkdir("cache", 0755);
    const Text run = "-i train.bin -e l2h2c16t16 -b 2 -x 51 ";
    const Text here = current_folder() + "/";
    auto cache = [&](const Text &folder) {
        const Text path = folder[0] == '/' ? folder : here + folder;
        return [path] { setenv("XDG_CACHE_HOME", path.c_str(), 1); };
    };
    expect(program(run + "--plan", cache("cache")).out.find("\nforecast") == Text::npos, "unknown");
    for (int k = 0; k < 2; k++) {
        const Outcome o = program(run, cache("cache"));
        expect_success(o, "a run of 51 steps");
        expect(has(o.out, "\nforecast ") &&
                   has(o.out, " tokens/s, measured "), "%s", o.out.c_str());
        const Text kept = read_file("cache/train_gpt2/speed");
        expect(std::count(kept.begin(), kept.end(), '\n') == 1, "%s", kept.c_str());
    }
    const Outcome plan = program(run + "--plan", cache("cache"));
    expect(has(plan.out, "\nforecast: ") &&
               has(plan.out, "; measured on this GPU\n"), "%s", plan.out.c_str());
    // The last number of the line is the link's speed, used only for offloaded states.
    Text kept = read_file("cache/train_gpt2/speed");
    const size_t last = kept.rfind(' ') + 1;
    auto forecast = [&](const char *link, const Text &options) {
        write_file("cache/train_gpt2/speed", kept.substr(0, last) + link + "\n");
        const Text out = program(run + "--plan " + options, cache("cache")).out;
        const size_t at = out.find("\nforecast: ");
        return out.substr(at, out.find(" tokens/s", at) - at);
    };
    expect(forecast("1e-12", "-r none") == forecast("1e-3", "-r none"), "no transfers");
    expect(forecast("1e-12", "--offload moments") != forecast("1e-3", "--offload moments"),
           "transfers cost nothing");
    write_file("cache/train_gpt2/speed", "what is this\n");
    expect_success(program(run, cache("cache")), "a malformed file");
    expect_success(program(run, cache("/proc/none")), "no cache folder");
    expect(program(run + "--quiet", cache("cache")).out.empty(), "--quiet");
    // A micro-batch that takes more than 2 % of the run is not timed.
    const Text out = program(run + "-x 49", cache("none")).out;
    expect(!has(out, "forecast") && !exists("none/train_gpt2/speed"), "%s", out.c_str());
}

// A run stores the measured memory of the libraries in the user's cache; later plans and runs on
// this GPU reserve the largest measured value instead of an estimate. Lines of other GPUs are
// ignored.
TEST(gpu_library) {
    if (!is_emulated()) {
        skip("needs the emulated device");
    }
    const Text run = "-i train.bin -e l1h1c16t16 -b 2 -x 1 -r none --offload none ";
    const Text cache = current_folder() + "/cache";
    mkdir("cache", 0755);
    auto with_library = [&](const char *bytes, const char *memory = nullptr) {
        return [=] {
            setenv("XDG_CACHE_HOME", cache.c_str(), 1);
            setenv("EMU_LIBRARY", bytes, 1);
            memory ? (void)setenv("EMU_GPU_MEM", memory, 1) : (void)0;
        };
    };
    auto planned = [&](const Text &words) {
        const Outcome o = program(run + "--plan", with_library("20M"));
        expect_success(o, "--plan");
        const Text out = o.out;
        const size_t at = out.find("\nlibrary "), end = out.find('\n', at + 1);
        expect(out.substr(at, end - at).find(words) != Text::npos, "%s: %s", words.c_str(),
               out.substr(at, end - at).c_str());
    };
    planned(" 20,971,520    20.0 MiB   estimated");
    expect_success(program(run, with_library("30M")), "30 MiB are measured");
    planned(" 31,457,280    30.0 MiB   measured on this GPU");
    expect_success(program(run, with_library("25M")), "less is measured");
    planned(" 31,457,280    30.0 MiB   measured on this GPU");
    // The start-up box says what unused memory would buy, with no more sequences than the data has.
    const Text box = flat(program(run, with_library("0")).out);
    expect(box.find(" unused memory would buy -b 128, a step of 2,048 tokens: ") != Text::npos,
           "%s", box.c_str());
    const Text kept = read_file("cache/train_gpt2/library");
    expect(std::count(kept.begin(), kept.end(), '\n') == 1, "%s", kept.c_str());
    expect_success(program(run, with_library("40M")), "more is measured");
    planned(" 41,943,040    40.0 MiB   measured on this GPU");
    // A run reserves it too: 20 MiB of libraries would fit, but 40 MiB were measured on this GPU.
    const Text json = program(run + "--plan --json", with_library("20M")).out;
    const long bytes = (long)last_value(json, "total_bytes");
    expect_too_large(program(run, with_library("20M", text("%ld", bytes + (30L << 20)).c_str())),
                     " short", "a run");
    write_file("cache/train_gpt2/library", "another " + kept + "no line\n");
    planned(" 20,971,520    20.0 MiB   estimated");
}

// The micro-batch that a forecast times changes no bit of the run, with and without offload.
TEST(gpu_forecast) {
    for (const char *more :
         {"--dtype fp32 ", "--offload weights,gradients,moments,residuals ", "--dtype fp16 "}) {
        const Text run = Text("-i train.bin -e l1h1c16t16 -b 2 -d 64 -x 25 ") + more;
        const Outcome loud = program(run + "-o loud");
        expect_success(loud, more);
        expect(has(loud.out, "\nforecast "), "%s", loud.out.c_str());
        expect_success(program(run + "-o quiet --quiet"), more);
        expect(tensors_of("loud", 25) == tensors_of("quiet", 25) &&
               losses_in("loud") == losses_in("quiet"), "%s: other bits", more);
        remove_folder("loud");
        remove_folder("quiet");
    }
}

// --check passes for all 17 numbers, --compare lists two levels, and --plan needs no GPU.
TEST(gpu_commands) {
    for (const char *arguments : {"--dtype fp32 -r norm", "--dtype bf16 -r block", "-w none",
                                  "--dtype fp16",
                                  "--offload weights,gradients,moments,master,residuals"}) {
        if (!can_run(arguments)) {
            continue;
        }
        Outcome o = program(Text("-i train.bin -e l2h2c32t16 -b 2 --check ") + arguments);
        expect_success(o, arguments);
        int ok = 0;
        for (size_t at = 0; (at = o.out.find("  ok\n", at)) != Text::npos; at++) {
            ok++;
        }
        expect(ok == 17, "%s: %d of 17 numbers agree", arguments, ok);
    }
    Outcome o = program("-i train.bin -e l2h2c16t16 -b 2 --compare --offload weights,moments");
    expect_success(o, "--compare");
    expect(has(o.out, "\n-r none ") && has(o.out, "\n-r block ") &&
           has(o.out, "median of 9 steps"));
    o = program("-i train.bin -e l2h2c16t16 -b 2 --compare --json -r mlp");
    expect_success(o, "--compare --json");
    expect(json_valid(o.out) && has(o.out, "\n{\"recompute\":\"none\",") &&
               has(o.out, "\n{\"recompute\":\"mlp\",") &&
               has(o.out, "\"time_ratio\":"), "%s", o.out.c_str());
    if (is_emulated()) {
        o = program("--plan -e d12", with("EMU_GPUS", "0"));
        expect_success(o, "--plan");
        expect(o.out.find("memory plan of the GPU run") == 0, "%s", o.out.substr(0, 60).c_str());
    }
}

// --eval gives the same scores in both programs, byte for byte.
TEST(gpu_eval) {
    write_file("e.bin", eval_bytes(random_questions(3, 50257, 2)));
    const Text run = "-e l1h1c16t16 --eval e.bin --json -b 3 ";
    Outcome cpu = cpu_program(run), gpu = program(run + "--dtype fp32"), half = program(run);
    expect_success(cpu, "CPU");
    expect_success(gpu, "GPU, fp32");
    expect_success(half, "GPU, 16 bits");
    const Outcome fp16 = program(run + "--dtype fp16");  // without master weights
    expect_success(fp16, "GPU, fp16");
    expect(program(run + "--dtype fp16 -w none").out == fp16.out, "no master either way");
    expect(gpu.out == cpu.out, "%s", gpu.out.c_str());
    expect(json_valid(half.out) && has(half.out, "\"examples\":3,\"of\":3"));
    if (is_emulated()) {  // memory for weights and a forward pass, but not for training
        write_file("gpt2.bin", shard_bytes(Ids(400, 995), GPT2_TOKENS));
        const Text narrow = can_run("bf16") ? "--moments bf16 -w none " : "";
        const Text least = program("--plan --json -i gpt2.bin -e l1h1c16t16 -b 1 -r block " +
                                   narrow + "--logit-rows 1 --offload none").out;
        const char *key = "\"total_bytes\":";
        const Text bytes = text("%ld", atol(&least[least.find(key) + strlen(key)]) - 1);
        const Outcome small = program(run, with("EMU_GPU_MEM", bytes.c_str()));
        expect_success(small, "less than training takes");
        expect(small.out == half.out, "%s", small.out.c_str());
        expect_too_large(program(run, with("EMU_GPU_MEM", "2000000")),
                         "--eval needs weights and one forward pass", "too little");
    }
}

// Returns the weights of a checkpoint as numbers, without the low halves of the master weights.
static std::vector<float> weights_of(const Text &folder, int step) {
    const auto [header, data] = header_and_data(in_checkpoint(folder, step, SAVED_MODEL));
    const size_t bytes = has(header, "\"BF16\"") ? 2 : 4;
    std::vector<float> all(data.size() / bytes);
    for (size_t i = 0; i < all.size(); i++) {
        memcpy((char *)&all[i] + 4 - bytes, &data[i * bytes], bytes);
    }
    return all;
}

// Returns the norm of the difference between two checkpoints' weights over the norm of the second.
static double weights_apart(const std::vector<float> &a, const std::vector<float> &b) {
    double error = 0, size = 0;
    for (size_t i = 0; i < b.size() && a.size() == b.size(); i++) {
        error += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    return size > 0 ? sqrt(error / size) : NAN;
}

// A resumed run ends with the bytes of the uninterrupted one, even with another recompute level.
// Each program resumes the other's checkpoints: the CPU program ends at the GPU's own result up to
// fp32 rounding.
TEST(gpu_checkpoints) {
    const Text run = "-i train.bin -j val.bin -v 3 -e l2h2c16t16 -b 2 -d 64 -x 6 -n 3 -y 1 -s 6 "
                     "-g 4 --quiet -o ";
    auto resume = [&](const char *folder, const Text &more, bool gpu) {
        remove_folder(text("%s/step-00000006", folder));
        expect(names_in(folder, "step") == "step-00000003", "%s", folder);
        expect_success(gpu ? program(run + folder + more) : cpu_program(run + folder + more),
                       folder);
        expect(log_steps(Text(folder) + "/log.jsonl") == one_to(6), "log of %s", folder);
        return tensors_of(folder, 6);
    };
    for (const char *types : {" --dtype bf16", " --dtype fp32", " --moments bf16 -w none"}) {
        const char *folder = types[9] == 'b' ? "bf16" : types[9] == 'f' ? "fp32" : "none";
        if (!can_run(types)) {
            continue;
        }
        expect_success(program(run + folder + types), folder);
        Text whole = tensors_of(folder, 6);
        expect(!whole.empty() && resume(folder, Text(types) + " -r block", true) == whole,
               "%s: resumed", folder);
    }
    const std::vector<float> gpu = weights_of("fp32", 6);
    resume("fp32", "", false);
    expect_near(weights_apart(weights_of("fp32", 6), gpu), 0, 1e-5,
                "the GPU's, resumed on the CPU");
    expect_success(cpu_program(run + "cpu"), "the CPU's");
    const std::vector<float> cpu = weights_of("cpu", 6);
    resume("cpu", " --dtype fp32 -r norm", true);
    expect_near(weights_apart(weights_of("cpu", 6), cpu), 0, 1e-5,
                "the CPU's, resumed on the GPU");
    if (!can_run("--dtype bf16")) {
        return;
    }
    resume("cpu", " --dtype bf16", true);
    expect_near(weights_apart(weights_of("cpu", 6), cpu), 0, 1e-2,
                "the CPU's, resumed in bf16");
    remove_folder("cpu/step-00000006");
    const Outcome o = program("-i train.bin -e l2h2c16t16 -b 2 -d 64 -x 6 -y 1 -o cpu "
                                  "--dtype bf16 -w none --moments bf16");
    expect_success(o, "narrower types");
    for (const char *what : {"weights", "moments"}) {
        const Text said = Text(what) + " were fp32 in cpu/step-00000003 and are bf16 from here on";
        expect(has(o.out, said), "no '%s'", said.c_str());
    }
}

static Text choices_in(const Text &folder, int step) {
    const Text state = in_checkpoint(folder, step, SAVED_STATE);
    const size_t at = state.find("\"matmul\":\"");
    return at == Text::npos ? "" : state.substr(at, state.find('"', at + 10) - at);
}

// Returns the number of matmuls that have the same algorithm in both texts.
static int algorithms_in(const Text &choices, const Text &other) {
    int same = 0;
    for (const Text &word : split(choices.c_str())) {
        same += has(word, "=h") && has(other, word);
    }
    return same;
}

// A run resumes with the algorithms of its checkpoint, whatever it would choose itself, even with
// --quiet. Its result has the same bytes, but not if a wrong result is injected into the algorithm
// that the checkpoint names. The user's file of choices is unchanged. On another GPU a run reports
// that it uses its own choices.
TEST(gpu_choices) {
    if (!is_emulated()) {
        skip("needs the emulated device");
    }
    more_arguments = "";
    auto in = [](const char *times, const char *wrong, const char *more, const char *cache) {
        return [=] {
            setenv("EMU_LT_TIMES", times, 1);
            setenv("EMU_LT_WRONG", wrong, 1);
            setenv("XDG_CACHE_HOME", cache, 1);
            setenv("EMU_SMS", more, 1);
        };
    };
    const Text run = "-i train.bin -e l1h1c16t16 -b 2 -x 4 -n 2 -y 1 -g 4 -s 4 -o out ";
    const Text other = "\nmatmul algorithms differ from those of out/step-00000002: losses may";
    expect_success(program(run, in("951", "0", "2", "/proc/none")), "a run");
    const Text end = tensors_of("out", 4), own = choices_in("out", 2);
    expect(has(own, "=h") && choices_in("out", 4) == own && !end.empty(), "%s", own.c_str());
    auto again = [&](const Text &options, const std::function<void()> &where, const char *who) {
        remove_folder("out/step-00000004");
        const Outcome o = program(run + options, where);
        expect_success(o, who);
        return o.out;
    };
    const Text here = current_folder() + "/cache";
    for (const char *options : {"", "--quiet"}) {
        for (const char *cache : {"/proc/none", here.c_str(), here.c_str()}) {
            const Text kept = read_file("cache/train_gpt2/matmul");
            const Text out = again(options, in("159", "0", "2", cache), "other times");
            expect(tensors_of("out", 4) == end && choices_in("out", 4) == own, "'%s': %s", options,
                   choices_in("out", 4).c_str());
            expect(!has(out, other), "%s", out.c_str());
            expect(kept.empty() || kept == read_file("cache/train_gpt2/matmul"), "timed again");
        }
        again(options, in("159", "3", "2", here.c_str()), "an injected wrong result");
        expect(tensors_of("out", 4) != end, "'%s': it ran another algorithm", options);
    }
    for (const char *options : {"", "--workspace 1MiB "}) {
        const Text out = again(options, in("159", "3", options[0] ? "2" : "4", "/proc/none"),
                               "another GPU");
        const Text choices = choices_in("out", 4);
        expect(has(out, other), "%s", out.c_str());
        expect(choices != own && algorithms_in(choices, own) == 0, "%s", choices.c_str());
        expect(tensors_of("out", 4) == end, "its own are right");
    }
}

// -b auto, the default with -d, is the largest micro-batch that divides the step of each GPU and
// fits into the card's memory without recomputation, however much of it is free. A resumed run
// keeps the micro-batch of its checkpoint. Without -d, and on the CPU, the default is 4.
TEST(gpu_batch) {
    if (!is_emulated()) {
        skip("needs the emulated device");
    }
    write_corpus();
    const Text run = "-i train.bin -e l1h1c16t16 -x 1 ";
    auto batch = [](const Outcome &o) {  // from the line "step     2 x 8 x 16 = 256 tokens"
        const size_t at = o.out.find("\nstep     ");
        int micros = 0, B = 0;
        expect(o.status == 0 && at != Text::npos &&
                   sscanf(o.out.c_str() + at + 10, "%d x %d x ", &micros, &B) == 2,
               "status %d, %s%s", o.status, o.err.c_str(), o.out.c_str());
        return B;
    };
    auto planned = [&](const Text &options) {
        const Text out = program(run + options + " --plan --json").out;
        const char *key = "\"total_bytes\":";
        return atol(out.c_str() + out.find(key) + strlen(key));
    };
    const long reserved = 1L << 30, eight = planned("-b 8 -d 384 -r none"),
               less = eight - planned("-b 8 -d 384 -r block");
    auto card = [=](long bytes, const Text &used = "0") {
        return [=] {
            setenv("EMU_GPU_MEM", text("%ld", bytes).c_str(), 1);
            setenv("EMU_CONTEXT", used.c_str(), 1);
        };
    };
    const auto large = card(4 * reserved), small = card(reserved + eight);
    const struct {
        Text options;
        std::function<void()> where;
        int batch;
    } rows[] = {
        {"-d 384", large, 24},           // 24 sequences in a step
        {"-d 384 -b auto", large, 24},
        {"-d 384 -b 2", large, 2},
        {"", large, 4},
        {"-b auto", large, 4},
        {"-d 384 --gpus 2", large, 12},
        {"-d 352 --gpus 2", large, 11},
        {"-d 48", large, 3},
        {"-d 384", small, 8},            // the plan with 8 fits to the byte
        {"-d 384", card(reserved + eight - 1), 6},
        {"-d 384", card(reserved + eight, text("%ld", reserved + less)), 8},  // little is free
        {text("-d 384 --gpu-mem %ld", reserved + eight), large, 8},
        {"-d 384", card(reserved + 1), 4},   // nothing fits: -r auto finds a way
        {"-d 384 -j short.bin -v 1", large, 6},  // validation data of 6 sequences
    };
    write_file("short.bin", shard_bytes(Ids(6 * 16 + 1, 97), BYTE_TOKENS));
    for (auto &row : rows) {
        const Outcome o = program(run + row.options, row.where);
        expect(batch(o) == row.batch, "%s: %d, not %d", row.options.c_str(), batch(o), row.batch);
        const bool named = row.options.find("-d") != Text::npos;
        expect((o.out.find(text(" -b %d -d ", row.batch)) != Text::npos) == named, "%s: %s",
               row.options.c_str(), o.out.c_str());
    }
    expect(batch(cpu_program(run + "-d 384")) == 4 &&
               batch(cpu_program(run + "-d 384 -b auto")) == 4, "on the CPU");
    expect_refused(program(run + "-d 384 -b auto8"),
                   "--batch (-b): 'auto8' is not a whole number from 1 to 65536 or auto", "auto8");
    expect_refused(program(run + "-d 100", large), "-d): 100 is not a multiple of B x T", "-d 100");
    // Plans have the same batch, including the CPU program's plan for a card.
    const Outcome plan = program(run + "-d 384 --plan", small);
    expect(plan.out.find("B 8") != Text::npos, "%s", plan.out.c_str());
    const Outcome d12 = cpu_program("--plan -e d12 -d 524288 --gpu h100");
    expect(d12.out.find(" 64, T 1024") != Text::npos, "%s", d12.out.c_str());
    // The bits are those with -b. A resume on another card keeps the checkpoint's batch if it
    // divides the step of each GPU.
    expect_success(program(run + "-d 384 -o auto", small), "auto");
    expect_success(program(run + "-d 384 -b 8 -o given", large), "given");
    expect(losses_in("auto") == losses_in("given"), "%s", losses_in("auto").c_str());
    const Text resume = "-i train.bin -e l1h1c16t16 -d 384 -o auto -y 1 -x ";
    expect(batch(program(resume + "3", large)) == 8, "a resume");
    expect(batch(program(resume + "4 --gpus 2", large)) == 12, "a resume on two GPUs");
    expect(batch(program(resume + "5 -b 6", large)) == 6, "a resume with -b");
    write_file("auto/step-00000005/state-0-of-1.safetensors", "damaged");
    expect(batch(program(resume + "6", large)) == 12, "a resume of the checkpoint before");
    expect(batch(program(run + "-d 384 -o empty -y 1", large)) == 24, "nothing to resume");
}

// Kernel trials use a small model with two heads.
static const Text tried_run = "-i train.bin -e l1h2c16t64 -b 2 ";

// For program(): sets the environment of a run whose trials find the candidate `kernels`
// (EMU_KERNELS) and whose caches are in `cache`, plus variables such as "EMU_KERNEL_NUMBER=3
// EMU_KERNEL_TIMES=35".
static std::function<void()> with_kernels(const Text &kernels, const Text &cache,
                                          const Text &more = "") {
    const Text here = cache[0] == '/' ? cache : current_folder() + "/" + cache;
    return [=] {
        setenv("EMU_KERNELS", kernels.c_str(), 1);
        setenv("XDG_CACHE_HOME", here.c_str(), 1);
        for (const Text &word : split(more.c_str())) {
            const size_t at = word.find('=');
            if (at != Text::npos) {
                setenv(word.substr(0, at).c_str(), word.c_str() + at + 1, 1);
            }
        }
    };
}

// Returns the line in which a run prints its kernels; "" if there is none, or more than one.
static Text kernels_in(const Text &out) {
    const Text begins = "\nkernels  ";
    const size_t at = out.find(begins);
    return at == Text::npos || out.find(begins, at + 1) != Text::npos
               ? "" : out.substr(at + begins.size(), out.find('\n', at + 1) - at - begins.size());
}

// Runs in `folder`, expects success and `says` in its line of kernels, and returns its losses.
static Text tried(const Text &folder, const Text &says, const std::function<void()> &where,
                  const Text &options = "") {
    const Outcome o = program(tried_run + "-x 3 -o " + folder + " " + options, where);
    expect_success(o, folder);
    expect(kernels_in(o.out).find(says) != Text::npos && says.empty() == kernels_in(o.out).empty(),
           "%s, wanted '%s': %s", folder.c_str(), says.c_str(), kernels_in(o.out).c_str());
    const Text losses = losses_in(folder);
    expect(losses.size() > 30, "%s: %s", folder.c_str(), losses.c_str());
    remove_folder(folder);
    return losses;
}

// A candidate that is right and faster is used. With any other, a run has the bits of the default
// kernels and prints the reason in one line. The verdict is cached: the next run uses the same
// kernels without a trial, whatever a trial would find.
TEST(gpu_kernels) {
    if (!is_emulated()) {
        skip("needs the emulated device");
    }
    more_arguments = "";
    const Text plain = tried("plain", "", with_kernels("", "none"));
    expect(!exists("none/train_gpt2/kernels"), "tried without EMU_KERNELS");
    const Text good = tried("good", "attention, tried once on this GPU: forward planted, 1.67x; dQ "
                                    "planted, 1.67x; dK and dV planted, 1.67x",
                            with_kernels("good", "good.cache"));
    expect(good != plain, "the candidate was not used: %s", good.c_str());
    expect(tried("good", ": forward planted, 1.67x; ",
                 with_kernels("good", "good.cache", "EMU_KERNEL_TIMES=35")) == good,
           "a second start");
    const struct {
        const char *kernels, *more, *says;
    } rows[] = {
        {"wrong", "", "; dQ mma.sync (planted wrong: dQ differs in 1 rows of heads); dK and dV "
                      "mma.sync (planted wrong: dV differs from the CPU's by "},
        {"unstable", "", "dQ mma.sync (planted wrong: not the same bits twice); dK and dV mma.sync "
                         "(planted wrong: not"},
        {"stray", "", "dK and dV mma.sync (planted wrong: it writes outside its outputs)"},
        {"partial", "", "forward mma.sync (planted wrong: not the same bits twice); dQ mma.sync"},
        {"crash", "", "forward mma.sync (planted crashed: exit status 86); dQ mma.sync (planted "
                      "not tried)"},
        {"hang", "EMU_KERNEL_LIMIT_S=2",
         "forward mma.sync (planted hung: no answer in 2 s); dQ mma.sync (planted not"},
        {"slow", "", "dQ mma.sync (planted right 0.417)"},
        {"good", "EMU_KERNEL_TIMES=55", "dQ mma.sync (planted right 1.000)"},
        {"good", "EMU_KERNEL_TIMES=35", "dQ mma.sync (planted right 0.600)"},
    };
    for (auto &row : rows) {
        const Text cache = Text(row.kernels) + row.more + ".cache";
        expect(tried(row.kernels, row.says, with_kernels(row.kernels, cache, row.more)) == plain,
               "%s: losses", row.kernels);
        const Text kept = read_file(cache + "/train_gpt2/kernels");
        expect(std::count(kept.begin(), kept.end(), '\n') == (strchr("ch", row.kernels[0]) ? 1 : 3),
               "%s: %s", row.kernels, kept.c_str());
        if (kept.find("\n", kept.find("\n") + 1) != Text::npos) {
            expect(tried(row.kernels, row.says, with_kernels("good", cache)) == plain &&
                       kept == read_file(cache + "/train_gpt2/kernels"),
                   "%s: a second start", row.kernels);
        }
    }
    // Mistakes that show only in a repetition, in some values, or in other memory.
    const struct {
        const char *kernels, *candidate, *says;
    } finds[] = {{"rare", "forward", "not the same bits twice"},
                 {"input", "dq", "it changes the default's inputs or outputs"},
                 {"large", "dkv", "dV differs from the default's by "},
                 {"tiny", "dkv", "dK differs from the default's by "},
                 {"nan", "forward", "out differs from the default's by "},
                 {"past", "dkv", "dK differs from the CPU's by "}};
    for (auto &row : finds) {
        const Text shape = Text("--prove 8,64,2,2,") + row.candidate + "=planted";
        const Outcome found = program(shape, with_kernels(row.kernels, "none"));
        expect(found.status == 1 && has(found.out, Text("\nwrong: ") + row.says), "%s: %s%s",
               row.kernels, found.out.c_str(), found.err.c_str());
    }
    // Kernels are chosen one by one; those after one that crashed are tried at the next start.
    for (const char *says : {"forward planted, 1.67x; dQ mma.sync (planted crashed: exit status "
                             "86); dK and dV mma.sync (planted not tried)",
                             "(planted crashed: exit status 86); dK and dV planted, 1.67x"}) {
        const Text losses =
            tried("some", says, with_kernels("crash", "some.cache", "EMU_KERNEL_NUMBER=2"));
        expect((losses == plain) == (says[0] == 'f'), "%s: %s", says, losses.c_str());
    }
    // If the default kernel is not right either, a line asks the user to report it.
    const Outcome o = program(tried_run + "-x 1", with_kernels("judge", "judge.cache"));
    expect(o.status == 0 && std::count(o.err.begin(), o.err.end(), '\n') == 3 &&
               has(o.err, ": attention's default kernel is wrong on this GPU or in this trial: out "
                          "differs from the CPU's by ") &&
               has(o.err, "Please report this line\n") &&
               kernels_in(o.out).find("dQ mma.sync (planted wrong: ") != Text::npos,
           "status %d, %s%s", o.status, o.err.c_str(), kernels_in(o.out).c_str());
}

// Nothing that happens to the cache, the child process or the environment ends a run. A line
// of another build, or with other text, does not count as a verdict.
TEST(gpu_kernels_cache) {
    if (!is_emulated()) {
        skip("needs the emulated device");
    }
    more_arguments = "";
    Outcome o;
    const Text path = "cache/train_gpt2/kernels", fast = "forward planted, 1.67x; dQ planted, ";
    const Text not_tried = "forward mma.sync (planted not tried); dQ mma.sync (planted not tried)";
    const Text good = tried("good", fast, with_kernels("good", "cache"));
    const Text kept = read_file(path);
    const size_t build = kept.find("build ") + 6, verdict = kept.find("right 1.667");
    expect(build > 6 && verdict != Text::npos &&
           kept.find("CUDA on the CPU, 2 SMs, driver 1") == 0 &&
           has(kept, "| forward:8,64,2,2=planted right 1.667\n"), "%s", kept.c_str());
    // Contents of the file, and the number of lines added by a run that finds all candidates wrong.
    Text other = kept, torn = kept, odd = kept;
    other[build] = other[build] == '0' ? '1' : '0';
    torn.resize(verdict + 6);
    odd.replace(verdict, 11, "right 1.667x");
    const struct {
        Text file;
        int added;
    } rows[] = {{other, 1}, {torn, 3}, {odd, 1}, {kept.substr(0, kept.size() - 1), 1},
                {"\n" + Text(5000, 'x') + kept, 1}, {Text("\0\xff|\n", 4) + kept, 0}};
    for (auto &row : rows) {
        write_file(path, row.file);
        tried("file", "attention, tried once", with_kernels("unstable", "cache"));
        const Text now = read_file(path);
        const Text tail = now.substr(row.file.size());
        expect(now.compare(0, row.file.size(), row.file) == 0 &&
                   std::count(tail.begin(), tail.end(), '\n') == row.added, "%s",
               now.substr(now.size() > 600 ? now.size() - 600 : 0).c_str());
    }
    write_file(path, kept);
    const Text longer = current_folder() + "/train_gpt2cu_cpu";  // another build
    write_file(longer, read_file(tested) + "\n");
    chmod(longer.c_str(), 0755);
    const Text once = tried_run + "-x 1";
    expect_success(outcome(start_program(longer, once, with_kernels("good", "cache"))), "a build");
    const Text both = read_file(path);
    expect(both.size() == 2 * kept.size() && both.compare(0, kept.size(), kept) == 0, "%s",
           both.c_str());
    expect(tried("shape", "planted, 1.67x", with_kernels("good", "cache"), "-t 32") != good &&
               has(read_file(path), "| dq:8,32,2,2="), "another shape");
    // With -b auto the trial has the batch that is chosen: 8 sequences, which is all of the
    // validation data, neither the default of 4 nor the 16 of a step.
    write_file("eight.bin", shard_bytes(Ids(8 * 16 + 1, 97), BYTE_TOKENS));
    o = program("-i train.bin -j eight.bin -v 1 -e l1h2c16t16 -d 256 -x 1",
                with_kernels("unstable", "auto", "EMU_GPU_MEM=4000000000"));
    const Text chosen = read_file("auto/train_gpt2/kernels");
    expect(o.status == 0 && has(o.out, " -b 8 ") && has(chosen, "| dq:8,16,2,8=planted wrong"),
           "%s%s%s", o.out.c_str(), o.err.c_str(), chosen.c_str());
    for (const char *folder : {"/proc/none", "/dev/null"}) {
        expect(tried("nowhere", fast, with_kernels("good", folder)) == good, "no cache");
    }
    tried("mps", not_tried, with_kernels("good", "empty", "CUDA_MPS_PIPE_DIRECTORY=/none"));
    expect(tried("mps", fast, with_kernels("good", "cache", "CUDA_MPS_PIPE_DIRECTORY=/none")) ==
               good, "under MPS, from the cache");
    tried("tune", "", with_kernels("good", "cache"), "--tune 0");
    tried("fp32", "", with_kernels("good", "cache"), "--dtype fp32");
    // The child's pipe needs two descriptors at a time; nothing else in this run does.
    o = program(tried_run + "-x 1", [=] {
        with_kernels("good", "empty")();
        struct rlimit r = {4, 4};
        setrlimit(RLIMIT_NOFILE, &r);
    });
    expect_success(o, "a child that cannot be started");
    expect(kernels_in(o.out).find(not_tried) != Text::npos, "%s", o.out.c_str());
    expect(!exists("empty/train_gpt2/kernels"), "a verdict without a trial");
    // --prove of the program's own candidates, also in a build without their instructions.
    for (const char *ptx : {"EMU_PTX=90", "EMU_PTX=80"}) {
        o = program("--prove 64,64,1,1", with_kernels("own", "empty", ptx));
        const bool any = !has(o.out, ": 0 candidates\n");
        expect(o.status == 0 && o.out.find("gpu CUDA on the CPU: ") == 0 &&
                   any == (has(o.out, ptx[8] == '9' ? "\nright " : "\nabsent: ")),
               "%s: status %d, %s%s", ptx, o.status, o.out.c_str(), o.err.c_str());
    }
    o = program("--prove 8,64,2,2", with_kernels("good", "empty"));
    expect(o.status == 0 && o.out == "gpu CUDA on the CPU: 3 candidates\ntry forward planted\n"
               "right 1.667\ntry dq planted\nright 1.667\ntry dkv planted\nright 1.667\n", "%s",
           o.out.c_str());
    o = program("--prove 8,64,2,999999", with_kernels("stray", "empty", "EMU_KERNEL_NUMBER=2"));
    expect(o.status == 1 && has(o.out, "\ntry dq planted\nwrong: it writes outside its outputs\n"
                                       "try dkv planted\nright 1.667\n"), "%s%s",
           o.out.c_str(), o.err.c_str());
    for (const char *shape : {"", "8", "8,64,2", "8,64,2,2,", "0,64,2,2", "12,64,2,2", "136,64,2,2",
                              "8,15,2,2", "8,999999999,2,2", "8,64,0,2", "128,64,33,2", "8,64,2,0",
                              "8,64,2,-1", "8,64,2,2x", "99999999999,64,2,2"}) {
        o = program(Text("--prove=") + shape, with_kernels("good", "empty"));
        expect_refused(o, shape[0] ? "--prove: '" : "--prove: the value is empty", shape);
    }
    expect_refused(program("--prove 8,64,2,2 --check"), "are commands: give one", "two commands");
    expect_refused(cpu_program("--prove 8,64,2,2"), "--prove is a command of the GPU program",
                   "the CPU program");
}

// The plan on a GPU of the table of cards is predicted until a run has measured it: with kernels
// that the GPU has to prove; after a trial with the gain that it has measured, or with the
// default's rate.
TEST(gpu_kernels_forecast) {
    if (!is_emulated()) {
        skip("needs the emulated device");
    }
    more_arguments = "";
    const Text h100 = "EMU_NAME=h100 EMU_SMS=132 EMU_GPU_MEM=84900000000 ";
    const Text run = "-e l1h1c64t64 -b 1 ";
    auto forecast = [&](const Text &cache, const Text &says, const Text &more = "") {
        const Outcome o = program("--plan " + run + more, with_kernels("own", cache, h100));
        expect(o.status == 0 && flat(o.out).find("; " + says + "\n") != Text::npos, "%s: %s%s",
               cache.c_str(), o.out.c_str(), o.err.c_str());
        return number_after(o.out, "\nforecast: ");
    };
    const Text to_prove = "predicted, if this GPU proves the kernels";
    const Text known = "predicted for this GPU, not measured";
    const double usual = forecast("none", known, "--tune 0"), faster = forecast("none", to_prove);
    for (const char *times : {"EMU_KERNEL_TIMES=93", "EMU_KERNEL_TIMES=35"}) {
        const auto trial = with_kernels("own", times, h100 + times);
        expect_success(program("-i train.bin -x 1 " + run, trial), times);
    }
    const double proved = forecast("EMU_KERNEL_TIMES=93", known);
    const double refused = forecast("EMU_KERNEL_TIMES=35", known);
    expect(usual > 0 && faster > usual && proved > faster && refused == usual,
           "default %g, predicted %g, three times as fast %g, refused %g", usual, faster, proved,
           refused);
}

// The processes that process `pid` has started.
static Text children_of(pid_t pid) {
    return read_file(text("/proc/%d/task/%d/children", (int)pid, (int)pid));
}

// A signal during a trial ends the trial and the run, without a verdict. If the run ends during a
// trial, even by SIGKILL, the trial ends too.
TEST(gpu_kernels_stopped) {
    if (!is_emulated() || has_sanitizers()) {
        skip("needs the emulated device");
    }
    more_arguments = "";
    for (int number : {SIGINT, SIGKILL}) {
        const pid_t pid = start(tried_run + "-x 3000",
                                with_kernels("hang", "cache", "EMU_KERNEL_LIMIT_S=60"));
        wait_until([=] { return !children_of(pid).empty(); });
        const pid_t child = (pid_t)atoi(children_of(pid).c_str());
        kill(pid, number);
        const Outcome o = outcome(pid);
        expect(o.status == (number == SIGINT ? 0 : 256 + SIGKILL) || o.status == 128 + number,
               "status %d, %s", o.status, o.err.c_str());
        wait_until([=] { return child <= 0 || kill(child, 0) != 0; });
        expect(child > 0 && !exists("cache/train_gpt2/kernels"), "%d: %s", (int)child,
               read_file("cache/train_gpt2/kernels").c_str());
    }
    // A trial whose process is killed from outside has no verdict either.
    const pid_t pid =
        start(tried_run + "-x 1", with_kernels("hang", "cache", "EMU_KERNEL_LIMIT_S=60"));
    const Text key = "\nvoluntary_ctxt_switches:";  // many once it hangs, sleeping in a loop
    wait_until([=] {
        const Text status = read_file(text("/proc/%d/status", atoi(children_of(pid).c_str())));
        const size_t at = status.find(key);
        return at != Text::npos && atoi(status.c_str() + at + key.size()) > 300;
    });
    kill(atoi(children_of(pid).c_str()), SIGKILL);
    const Outcome o = outcome(pid);
    expect_success(o, "its child is killed");
    expect(kernels_in(o.out).find("forward mma.sync (planted not tried)") != Text::npos &&
               read_file("cache/train_gpt2/kernels").empty(), "%s", o.out.c_str());
}

// All ranks use what rank 0 has found or, if one of them has another GPU, the default kernels.
TEST(gpu_kernels_ranks) {
    if (!is_emulated()) {
        skip("needs the emulated device");
    }
    more_arguments = "";
    const Text plain = tried("plain", "", with_kernels("", "cache"), "--gpus 2");
    const Text good = tried("good", "dQ planted, 1.67x", with_kernels("good", "cache"), "--gpus 2");
    expect(good != plain, "%s", good.c_str());
    const Text log = program(tried_run + "-x 1 --gpus 2",
                             with_kernels("good", "cache", "EMU_LOG=1")).err;
    std::map<Text, int> ranks;  // launches of candidates by each process
    const Text says = "] planted kernel ";
    for (size_t at = 0; (at = log.find(says, at)) != Text::npos; at++) {
        ranks[log.substr(log.rfind(' ', at) + 1, at - log.rfind(' ', at) - 1)]++;
    }
    expect(ranks.size() == 2 && ranks.begin()->second == ranks.rbegin()->second,
           "%zu ranks use candidates", ranks.size());
    const Outcome o = program(tried_run + "-x 3 --gpus 2 -o unlike",
                              with_kernels("good", "cache", "EMU_UNLIKE=1"));
    expect(o.status == 0 && losses_in("unlike") == plain &&
               kernels_in(o.out) == "attention; rank 1 has another GPU or driver than rank 0: "
                                    "forward mma.sync; dQ mma.sync; dK and dV mma.sync",
           "%s%s", o.err.c_str(), o.out.c_str());
    // All trials together take less than --timeout, because the other ranks wait for them.
    const double began = wall_ms();
    expect(tried("hang", "forward mma.sync (planted hung: no answer in ",
                 with_kernels("hang", "other", "EMU_KERNEL_LIMIT_S=60"),
                 "--gpus 2 --timeout 4") == plain && wall_ms() - began < 40e3, "hang");
}

// A resumed run uses the kernels of its checkpoint if they are right on this GPU, even if they are
// slower; a run that began with the default kernels keeps them. Otherwise it reports that losses
// may differ.
TEST(gpu_kernels_resume) {
    if (!is_emulated()) {
        skip("needs the emulated device");
    }
    more_arguments = "";
    auto kernels_at = [](const Text &folder, int step) {
        const Text state = in_checkpoint(folder, step, SAVED_STATE), key = "\"kernels\":\"";
        const size_t at = state.find(key);
        return at == Text::npos ? "" : state.substr(at + key.size(),
                                                    state.find('"', at + key.size()) - at -
                                                        key.size());
    };
    const Text other = "\nkernels differ from those of ";
    const Text all = " forward=planted dq=planted dkv=planted";
    const Text run = "-i train.bin -e l1h2c16t64 -b 2 -x 4 -n 2 -y 1 -o ";
    struct Row {
        const char *folder, *kernels, *more, *says;
        bool same;
    };
    const Row rows[] = {
        {"fast", "good", "EMU_KERNEL_TIMES=35",
         "attention, as in the checkpoint: forward planted, 0.60x; dQ planted, 0.60x", true},
        {"fast", "slow", "--quiet", "", true},
        {"fast", "good", "", "attention, tried once on this GPU: forward planted", true},
        {"fast", "wrong", "EMU_KERNEL_NUMBER=2", "checkpoint: forward planted, 1.67x; dQ mma.sync",
         false},
        {"fast", "", "", "", false},
        {"plain", "good", "", "attention, as in the checkpoint: forward mma.sync (planted right",
         true},
        {"plain", "wrong", "", "attention, tried once on this GPU: forward mma.sync", true},
    };
    Text ends[2];
    for (int plain = 0; plain < 2; plain++) {
        const Text folder = plain ? "plain" : "fast";
        expect_success(program(run + folder, with_kernels(plain ? "" : "good", folder)), folder);
        ends[plain] = tensors_of(folder, 4);
        expect(kernels_at(folder, 2) == (plain ? "" : all) && !ends[plain].empty(), "%s: %s",
               folder.c_str(), kernels_at(folder, 2).c_str());
    }
    expect(ends[0] != ends[1], "the same weights");
    for (const Row &row : rows) {
        remove_folder(Text(row.folder) + "/step-00000004");
        const bool quiet = row.more[0] == '-';
        const Outcome o = program(run + row.folder + (quiet ? " --quiet" : ""),
                                  with_kernels(row.kernels, "/proc/none", quiet ? "" : row.more));
        expect_success(o, row.kernels);
        const bool plain = row.folder[0] == 'p';
        expect(kernels_in(o.out).find(row.says) != Text::npos &&
                   (!has(o.out, other + row.folder + "/step-00000002: losses may differ by "
                               "rounding\n")) == row.same,
               "%s, %s %s: %s", row.folder, row.kernels, row.more, o.out.c_str());
        expect((tensors_of(row.folder, 4) == ends[plain]) == row.same &&
               (kernels_at(row.folder, 4) == (plain ? "" : all)) == row.same, "%s, %s %s: %s",
               row.folder, row.kernels, row.more, kernels_at(row.folder, 4).c_str());
    }
}

// Returns the order in which a run uploads whole batches (U), updates (A), and first waits after an
// update (W), from the emulated device's log.
static Text order_of(const Text &arguments, int batch_bytes) {
    const Text log = program(arguments, with("EMU_LOG", "1")).err;
    const Text upload = text("copy up of %d bytes", batch_bytes);
    Text order;
    for (size_t at = 0, end; (end = log.find('\n', at)) != Text::npos; at = end + 1) {
        const Text line = log.substr(at, end - at);
        const bool waits = has(line, "the host waits");
        order += has(line, upload)                    ? "U"
                 : has(line, " adamw_kernel")         ? "A"
                 : waits && !order.empty() && order.back() == 'A' ? "W"
                                                                    : "";
    }
    return order;
}

// The next step's first batch is uploaded before the host waits for this step's loss; none is
// uploaded after the last step. A validation overwrites it, so it is read again; an unreadable
// batch ends the run only when it is needed. No bit changes.
TEST(gpu_prepared) {
    const Text run = "-i train.bin -e l1h1c16t16 -b 2 -x 3 --shuffle 0 ";
    const Text warm_up = "UUAW";
    if (is_emulated()) {
        const int bytes = (5 * 32 + 1) * 4;  // inputs, targets, and the tokens sorted
        const Text once = order_of(run, bytes), twice = order_of(run + "-d 64", bytes);
        expect(once == warm_up + "UUAWUAWAW", "%s", once.c_str());
        expect(twice == warm_up + "UUUAWUUAWUAW", "two micro-steps: %s", twice.c_str());
    }
    expect_success(program(run + "-o plain"), "a run");
    expect_success(program(run + "-j val.bin -v 1 -m 2 -s 1 -g 3 -n 1 -o looks"), "with -v and -s");
    expect(losses_in("plain") == losses_in("looks") && losses_in("plain").size() > 30, "%s",
           losses_in("looks").c_str());
    Text bytes = read_file("train.bin");
    const uint16_t outside = 300;
    memcpy(&bytes[1024 + 2 * 70], &outside, 2);  // in the fifth sequence, part of step 3
    write_file("odd.bin", bytes);
    const Outcome o = program("-i odd.bin -e l1h1c16t16 -b 2 -x 4 --shuffle 0 -o odd "
                              "--quiet");
    expect_refused(o, "token 70 is 300, outside the vocabulary of 257; the run ended after step 2, "
                      "which is saved", "odd.bin");
    expect(losses_in("odd") == losses_in("plain").substr(0, losses_in("odd").size()) &&
           names_in("odd", "step") == "step-00000002", "%s", losses_in("odd").c_str());
}

// Generates text from a checkpoint: in fp32 the same as the CPU program, even beyond the 16
// positions, and the same as the run's own sample, which was computed without a KV cache and hence
// with other matmuls. Their rounding is equal on the emulated device; on a GPU only fp32 is precise
// enough for the same text. The plan contains no gradients, moments or master weights.
TEST(gpu_generate) {
    const Text rule = " -g 40 --seed 5 --temperature 0.8 --prompt=abc ";
    const Text type = is_emulated() ? "" : "--dtype fp32";
    const Text begins = "--- sample after step 40 ---\n";
    Outcome o = program("-i train.bin -e l2h2c16t16 -b 2 -x 40 -l 3e-3 -s 40 -o out" + rule + type);
    expect_success(o, "training");
    const size_t at = o.out.find(begins) + begins.size();
    const Text run = "--generate -e out/step-00000040 --quiet" + rule;
    const Outcome cached = program(run + type), full = program(run + "--dtype fp32");
    const Outcome cpu = cpu_program(run);
    expect(cached.out.size() > 8 && cached.err.empty() &&
           o.out.compare(at, cached.out.size() - 1, cached.out, 0, cached.out.size() - 1) == 0,
           "%s, sample %s", (cached.out + cached.err).c_str(), o.out.substr(at).c_str());
    expect(full.out.size() > 20 && full.out == cpu.out, "%s, on the CPU %s",
           (full.out + full.err).c_str(), cpu.out.c_str());
    o = program(run + "--plan");
    expect(has(o.out, "KV cache") && !has(o.out, "gradients") && !has(o.out, "moments") &&
           !has(o.out, "master"), "%s", o.out.c_str());
}

// fp16 is chosen automatically on a GPU without bf16. A step of one token overflows with the
// initial loss scale, so the scale falls and the step is skipped and reported. A resume with
// another -r and states in host memory ends with the same bytes and scales. Another type drops the
// scale and reports it; a return to fp16 starts with the initial scale.
TEST(gpu_fp16) {
    const auto old = with("EMU_CC", is_emulated() ? "75" : "0");
    const Text run = "-i train.bin -e l2h2c16t16 -b 1 -t 1 -v 0 -n 1 --keep 0 -o out -x ";
    const Text type = is_emulated() ? "8 " : "8 --dtype fp16 ";
    Outcome o = program(run + type, old);
    expect_success(o, "fp16");
    expect(has(o.out, ", fp16; ") &&
               has(o.out, "  SKIPPED, loss scale 2^15\n"), "%s", o.out.c_str());
    auto scales = [] { return values_in(read_file("out/log.jsonl"), "loss_scale_log2"); };
    const std::vector<double> want = scales();
    const Text whole = tensors_of("out", 8);
    expect(want.size() == 8 && want[0] == 15 && want[1] == 15 && want[7] < 15 &&
               !exists("out/step-00000001") && exists("out/step-00000002"),
           "%zu steps, to 2^%g; an overflow is not saved", want.size(), want.back());
    for (const char *more : {"-y 1 -r block", "-y 1 --offload master,moments"}) {
        for (int step = more[6] == 'r' ? 3 : 6; step <= 8; step++) {
            remove_folder(text("out/step-%08d", step));
        }
        expect_success(program(run + type + more, old), more);
        expect(tensors_of("out", 8) == whole && scales() == want, "%s", more);
    }
    remove_folder("out/step-00000008");
    o = program(run + "8 -y 1 --dtype " + (can_run("bf16") ? "bf16" : "fp32"));
    const Text dropped = text("ignoring the fp16 loss scale of out/step-00000007, 2^%g",
                              want[6]);
    expect(o.status == 0 && has(o.out, dropped), "%s", o.out.c_str());
    o = program(run + "9 -y 1 --dtype fp16");
    expect(o.status == 0 && has(o.out, "SKIPPED, loss scale 2^15\n"), "%s", o.out.c_str());
    o = program("--generate -e out/step-00000008 --dtype fp16 -g 4 --plan");
    expect(o.status == 0 && has(o.out, "; fp16;") && !has(o.out, "master"), "%s", o.out.c_str());
    expect_success(program("--generate -e out/step-00000008 --dtype fp16 -g 4 --quiet"), "text");
    o = program("--plan -i train.bin -e l2h2c16t16 --gpus 2 -x " + type, old);
    expect(o.status == 0 && has(o.out, "; fp16;"), "%s", o.out.c_str());
}

// Steps skipped while the loss scale falls do not count as consecutive. If no scale helps, the run
// ends, and its newest checkpoint is from before the weights were lost. Weights beyond fp16's range
// are refused.
TEST(gpu_fp16_fails) {
    Outcome o = program("-i train.bin -e l2h2c16t16 -b 2 -l 1 -c 11 -k constant -x 90 --dtype fp16 "
                        "--max-skips 3 -v 0 -n 1 --quiet -o out");
    expect_refused(o, "--max-skips: 3 consecutive steps were skipped", "diverges");
    const Text log = read_file("out/log.jsonl");
    std::vector<double> scales = values_in(log, "loss_scale_log2"), skipped = values_in(log,
                                                                                     "skipped");
    int lost = 0;
    for (size_t i = skipped.size(); i > 0 && skipped[i - 1] == 1; i--) {
        lost++;
    }
    const int last = (int)skipped.size() - lost;
    expect(lost > 3 && scales.back() == 1 && last > 0 && exists(text("out/step-%08d", last)) &&
           !exists(text("out/step-%08d", last + 1)), "%d steps lost of %zu", lost, skipped.size());
    const Shape m = {1, 1, 8, 16, 257};
    Members list = hugging_face(m, {"F32"}, "");
    for (auto &member : list) {
        member.data.assign(member.data.size(), 0);
    }
    named(&list, "wte.weight").data.replace(9 * 4, 4, Text("\x00\xb8\x88\x47", 4));
    write_model("model", safetensors_bytes(list), config_text(m));
    expect_refused(program("-i train.bin -e model -b 2 -x 1 --dtype fp16", no_leaks),
                   "tensor wte.weight: element 9 is 70000: beyond fp16's maximum of 65504; use",
                   "a large weight");
}

// The loss of each of 200 steps in bf16 is within 2 % of the CPU reference's; in fp16 the means
// over five steps are within 0.5 %.
TEST(gpu_learns) {
    const Text run = training_files() +
                     " -e l2h2c64t64 -b 2 -x 200 -l 1e-3 -u 20 -v 0 -r 1 --quiet -o ";
    Outcome reference = cpu_program(run + "cpu"), gpu = program(run + "gpu");
    expect_success(reference, "reference");
    expect_success(gpu, "bf16");
    std::vector<double> want = values_in(read_file("cpu/log.jsonl"), "loss"),
                        got = values_in(read_file("gpu/log.jsonl"), "loss");
    expect(want.size() == 200 && got.size() == 200, "%zu and %zu steps", want.size(), got.size());
    for (size_t i = 0; i < want.size() && i < got.size(); i++) {
        expect_near(got[i], want[i], 0.02 * want[i], "loss of step %zu", i + 1);
    }
    expect_success(program(run + "fp16 --dtype fp16"), "fp16");
    const std::vector<double> half = values_in(read_file("fp16/log.jsonl"), "loss");
    expect(half.size() == 200, "%zu steps", half.size());
    for (size_t i = 0; i + 5 <= want.size() && i + 5 <= half.size(); i += 5) {
        const double mean = std::accumulate(&want[i], &want[i] + 5, 0.0) / 5;
        const double fp16 = std::accumulate(&half[i], &half[i] + 5, 0.0) / 5;
        expect_near(fp16, mean, 0.005 * mean, "fp16, mean loss from step %zu on", i + 1);
    }
    double last = 0;
    for (size_t i = 180; i < 200 && i < got.size(); i++) {
        last += got[i] / 20;
    }
    expect(last < 2.9, "the last 20 losses are %.3f on average; a uniform guess has 5.55", last);
}

// A vocabulary of one's own with 1,000 tokens: in fp32, losses and norms are those of the CPU
// program up to rounding, on one GPU and on two with sharded optimizer states. The CPU program
// generates the same text from their checkpoint, and a run in bf16 learns the data.
TEST(gpu_own_tokens) {
    write_own_data();
    const Text run = "-i mine_train.bin -j mine_val.bin -e l2h2c32t16 -b 2 -d 64 -x 24 -l 1e-2 "
                     "-v 24 --quiet -o ";
    expect_success(cpu_program(run + "cpu"), "the CPU's");
    std::vector<Text> folders = {"one"};
    expect_success(program(run + "one --dtype fp32"), "one GPU");
    if (is_emulated()) {
        expect_success(program(run + "two --dtype fp32 --gpus 2 -z 2"), "two GPUs");
        folders.push_back("two");
    }
    for (const Text &folder : folders) {
        for (const char *key : {"loss", "grad_norm", "val_loss"}) {
            const auto want = values_in(read_file("cpu/log.jsonl"), key);
            const auto got = values_in(read_file(folder + "/log.jsonl"), key);
            expect(!want.empty() && want.size() == got.size(), "%s: %zu of %s", folder.c_str(),
                   got.size(), key);
            for (size_t i = 0; i < want.size() && i < got.size(); i++) {
                expect_near(got[i], want[i], 1e-4 * want[i] + 1e-6, "%s: %s %zu", folder.c_str(),
                            key, i + 1);
            }
        }
        const Text generate = "--generate --temperature 0 -g 7 --quiet --prompt=Can -e " + folder +
                              "/step-00000024";
        const Outcome o = program(generate + " --dtype fp32");
        expect(o.out.size() > 10 && o.out == cpu_program(generate).out, "%s, on the CPU %s",
               (o.out + o.err).c_str(), cpu_program(generate).out.c_str());
    }
    if (can_run("--dtype bf16")) {
        expect_success(program(run + "bf16 --dtype bf16"), "bf16");
        const auto losses = values_in(read_file("bf16/log.jsonl"), "val_loss");
        expect(losses.size() == 1 && losses[0] < 4, "a validation loss of %g; ln 1000 is 6.9",
               losses.empty() ? NAN : losses[0]);
    }
}

int main(int argc, char **argv) {
    // A GPU would time the algorithms of about fifty matmuls in every run.
    more_arguments = "--tune 0";
    return harness_main(argc, argv, "./train_gpt2cu_cpu");
}
