"""Invalid options and file names are answered by one line on stderr that names the option or file,
the value found and the values allowed; nothing is trained and no file is left. Also the output of
--plan, --fit, --minimum and --largest, and of a run on a terminal."""

import fcntl, pty, termios

from files import *

BAD_OPTIONS = [
    ("--nonsense 1", "unknown option '--nonsense'"),
    ("stray", "unknown option 'stray'"), ("-", "unknown option '-'"),
    ("-b4", "unknown option '-b4'"), ("--", "unknown option '--'"),
    ("-b", "--batch requires a value"), ("-b 4 --batch=4", "--batch is given more than once"),
    ("--help=2", "--help (-h): invalid value '2'; expected one of short|all"),
    ("--learning-rate 1", "unknown option '--learning-rate'; did you mean --lr?"),
    ("--batch_size 1", "unknown option '--batch_size'; did you mean --batch?"),
    ("--seq_len=1", "unknown option '--seq_len=1'; did you mean --seq-len?"),
    ("--max_iters 9", "unknown option '--max_iters'; did you mean --steps?"),
    ("--max-steps 9", "unknown option '--max-steps'; did you mean --steps?"),
    ("--gradient_accumulation_steps=4", "did you mean --tokens-per-step?"),
    ("--device=cpu", "unknown option '--device=cpu'; see --help all"),
    ("-o -y", "--output requires a value; if -y is a name, write ./-y"),
    ("-h 1", "--help (-h): invalid value '1'; expected one of short|all"),
    ("-i train.bin -j ./train.bin", "--val-data (-j): ./train.bin is also training data (-i)"),
    ("-e text", "text is a text file, not weights; to tokenize it, run data/tokenize --train-bpe"),
    ("--eval text", "text is a text file, not an evaluation file; to tokenize it, run data/token"),
    ("-i text -e l1h1c8t8", "text is a text file, not token data; to tokenize it, run data/token"),
    ("-e dangling", "unknown model 'dangling', a link whose target is gone; expected a preset"),
    ("-e hub", "hub has no model.safetensors; there is hub/snapshots/1f/model.safetensors"),
    ("-i pointer", "pointer: this is a Git LFS pointer, not the file itself; run git lfs pull"),
    ("-i [tv]*.bin -j val.bin", "--val-data (-j): val.bin is also training data (-i), as val.bin"),
    ("-i train.bin -e gpt3", "expected a preset (gpt2, gpt2-medium, gpt2-large, gpt2-xl"),
    ("--generate", "--generate: no checkpoint found in runs/; use --model (-e)"),
    ("--json", "--json requires --plan, --fit, --minimum, --largest or --eval"),
    ("--eval x.bin --plan", "are mutually exclusive"),
    ("--plan --fit bits", "are mutually exclusive"),
    ("--fit most", "--fit: invalid value 'most'; expected one of bits|any|all"),
    ("--offload auto,moments", "--offload: auto cannot be combined"),
    ("--eval x.bin -o out", "omit --output (-o)"),
    ("--eval x.bin -y 1", "require an output folder, --output (-o)"),
    ("--eval missing.bin", "--eval: cannot open missing.bin: No such file"),
    ("--eval=", "--eval requires a value"),
    ("-i train.bin -e l2h2c16t16 -x 1 --output=", "--output requires a value"),
    ("-e l2h2c16t16 -x 1 --train-data=", "--train-data requires a value"),
    ("--eval .", "--eval: cannot open .: Is a directory"),
    ("--eval /bin/sh", "/bin/sh: not an evaluation file"),
    ("--gpu t4", "--gpu requires --plan, --fit, --minimum or --largest"),
    ("-i train.bin -e l2h2c16t16 --gpu-mem 16GiB", "--gpu-mem: this program trains on the CPU"),
    ("-y 1", "require an output folder, --output (-o)"),
    ("-n 5", "--save-every (-n) and --keep require an output"),
    ("-j val.bin", "requires --train-data (-i)"),
    ("--fit bits -e d12 --gpu T4 -d 100", "100 is not a multiple of B x T x ranks = 1 x 1024"),
    ("-i train.bin --beta1 1", "--beta1: invalid value '1'; expected a number between 0 and 0.9"),
    ("-i train.bin --momentum 1", "--momentum: invalid value '1'; expected a number between 0"),
    ("-i train.bin --optimizer sgd", "--optimizer: invalid value 'sgd'; expected one of adamw|"),
    ("--plan --gpu t5", "--gpu: unknown GPU 't5'"),
    ("--plan --gpu-mem 5XB", "--gpu-mem: invalid value '5XB'; expected a size"),
    ("-i train.bin -e d13", "--model (-e): unknown model 'd13'"),
    ("-i train.bin -e l2h3c16t8", "--model (-e): unsupported model: 2 layers, 3 heads, 16"),
    *(("-i train.bin -e " + e, "expected 1-400 layers") for e in (
        "l0h1c16t8", "l2h2c16t0", "l2h0c16t8", "l2h2c16t16v1", "l2h2c-16t16", "l2h2c99999t1")),
    *(("-i train.bin -x 2 -b 2 -e " + e, "unknown model") for e in (
        "l2h2c16t16x", "l2h2c16t16v", "l\t2h2c16t16", "l2h\n2c16t16")),
    ("-i train.bin -e l2h2c16t16v65536", "a vocabulary of 2-65535"),
    ("-i train.bin -e l2h2c16t16v1000",
     "l2h2c16t16v1000 has a vocabulary of 1000 tokens, but that of the data in train.bin has 257"),
    ("-i train.bin -e l2h2c16t16 -t 17", "--seq-len (-t): 17 exceeds the model's maximum of 16"),
    ("-i train.bin -e l2h2c16t16 -r 2", "expected auto, or a list of none=0|gelu"),
    ("-i train.bin -e l2h2c16t16 -r half", "--recompute (-r): invalid value 'half'"),
    *(("-i train.bin -e l2h2c16t16 -r block:" + K, "K in block:K to be between 0 and 2, ")
      for K in ("3", "", "1x")),
    ("-i train.bin -e l2h2c16t16 -r block:1,gelu:2", "K in gelu:K to be between 0 and 1, "),
    ("-i train.bin -e l2h2c16t16 -r block:1,", "expected auto, or a list of none=0|gelu"),
    ("-i train.bin -e l2h2c16t16 -r gelu,block", "'; expected K in block:K to be between 0 and"),
    ("-i train.bin -e l2h2c16t16 -r block:1,gelu,none:0", "K in none:K to be between 0 and 0, "),
    ("-i train.bin -e l2h2c16t16 -r auto:1", "expected auto, or a list of none=0|gelu"),
    ("-i train.bin -e l2h2c16t16 -b 2 --logit-rows 33", "--logit-rows: 33 exceeds"),
    ("-i train.bin -e l2h2c16t16 -b 2 -d 33", "33 is not a multiple of B x T x ranks = 2 x 16"),
    ("--plan -i train.bin -e l2h2c16t16 -b 2 -d 33", "33 is not a multiple of B x T x ranks = 2 x"),
    ("-i train.bin -e l2h2c16t16 -x 10 -u 11", "--warmup (-u): 11"),
    ("-i train.bin -e l2h2c16t16 --dtype bf16", "--dtype"),
    ("-i train.bin -e l2h2c16t16 --moments bf16", "--moments"),
    ("-i train.bin -e l2h2c16t16 --offload master", "master: there are no master weights"),
    ("-i train.bin -e l2h2c16t16 --grad-dtype bf16", "--grad-dtype bf16 requires --dtype bf16"),
    ("--plan --gpu t4 -e d12 --dtype bf16", "bf16 is not supported on t4"),
    ("--plan --gpu a100 -e d12 --matmul fp8", "requires a GPU of compute capability 8.9"),
    ("--plan --gpu-mem 24GiB -e d12 --dtype bf16 --matmul fp8", "requires a GPU of compute"),
    ("-i train.bin -e l2h2c16t16 --matmul fp8", "--matmul fp8 requires --dtype bf16"),
    ("--eval val.bin -e l2h2c16t16 --matmul fp8", "--matmul applies to training only"),
    ("--plan --gpu a100 -e d12 -w 0 --offload master", "--offload master"),
    ("--plan --gpus 2 -e d12 --offload gradients", "gradients is not supported on 2 GPUs"),
    ("--fit bits -e d12 --gpus 4", "unknown memory size; use --gpu NAME"),
    ("--fit bits -e d12 --gpu 4090 --gpus 4 -d 2048", "B x T x ranks = 1 x 1024 x 4"),
    ("--minimum -e d12 -z 1", "--zero (-z) 1 requires several GPUs; use --gpus N"),
    *(("--minimum -e d12 " + option, "--minimum sets %s automatically; omit" % option.split("=")[0])
      for option in ("--batch=2", "--recompute=gelu", "--offload=none", "--logit-rows=64",
                     "--moments=fp32", "--workspace=1", "--master=split", "--gpu-mem=8G")),
    ("--plan -e d12 --gpu-mem 16", "--gpu-mem is below 1 MiB; did you mean GiB?"),
    ("--fit bits -e d12 --gpu 4090 -b 3 -d 4096", "4096 is not a multiple of B x T x ranks = 3 x"),
    ("--minimum -e l2h2c16t16 -d 100", "100 is not a multiple of B x T x ranks = 1 x 16"),
    ("-i train.bin -e l2h2c16t16 --gpus 2", "--gpus is 2, but only one rank is supported"),
    ("-i train.bin -e l2h2c16t16 -x 3 -s 1 --prompt 12345678901234567", "--seq-len (-t) is"),
    ("-e l2h2c16t16", "no training data; run 'make data'"),
]


@pytest.mark.parametrize("arguments, expected", BAD_OPTIONS)
def test_bad_options(arguments, expected):
    Path("text").write_text("Once upon a time\n" * 9)
    Path("pointer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
    os.symlink("step-00000009", "dangling")
    os.makedirs("hub/snapshots/1f")
    Path("hub/snapshots/1f/model.safetensors").touch()
    refused(arguments, expected)


@pytest.mark.parametrize("arguments, expected", [
    ("-i fifo", "cannot read token file fifo: not a regular file"),
    ("-i /dev/zero", "cannot read token file /dev/zero: not a regular file"),
    ("-i train.bin -j fifo", "cannot read token file fifo: not a regular file"),
    ("-i train.bin -e fifo", "cannot open fifo: not a regular file"),
    ("-i train.bin -e /dev/zero", "cannot open /dev/zero: not a regular file"),
    ("-i train.bin -e model", "cannot open model/model.safetensors: not a regular file"),
    ("-i gpt2.bin --tokenizer fifo", "vocabulary fifo: not a regular file"),
    ("-i gpt2.bin --tokenizer /dev/zero", "vocabulary /dev/zero: not a regular file"),
    ("--eval fifo", "cannot open fifo: not a regular file")])
def test_not_regular(arguments, expected):
    """Anything but a regular file is refused without waiting."""
    Path("model").mkdir()
    for path in "fifo", "model/model.safetensors":
        os.mkfifo(path)
    Path("gpt2.bin").write_bytes(shard([7] * 400, GPT2))
    refused(("" if "-e " in arguments else "-e l2h2c16t16 ") + "-x 1 -b 2 " + arguments, expected)


# How a file differs from a good one (new bytes, length or header words), arguments, and message.
BAD_DATA = [
    (None, "-i missing.bin", "no token files match missing.bin"),
    (b"", "-i bad.bin", "bad.bin: 0 bytes is too short"),
    (1000, "-i bad.bin", "bad.bin: 1000 bytes is too short"),
    (2001, "-i bad.bin",
     "bad.bin: expected 7024 bytes for the 3000 tokens given in the header, found 2001"),
    ([0, 20240521], "-i bad.bin", "bad.bin: not a token file: the first word is 20240521"),
    ([1, 2], "-i bad.bin", "bad.bin: a token file with unsupported version 2"),
    ([2, -1], "-i bad.bin", "for the -1 tokens given in the header"),
    ([3, 258], "-i bad.bin", "bad.bin: the header has tokenizer 1 with a vocabulary of 258"),
    ([4, 7], "-i bad.bin", "bad.bin: the header has tokenizer 7 with a vocabulary of 257"),
    ([4, 2, 3, 256], "-i bad.bin", "tokenizer 2 with a vocabulary of 256; expected 0 (GPT-2, "),
    ([4, 2, 3, 65536], "-i bad.bin", "bad.bin: the header has tokenizer 2 with a vocabulary of 65"),
    (shard([], BYTES), "-i bad.bin", "too short: 0 tokens in 1 shard, but a sequence needs T + 1"),
    (shard([7] * 16, BYTES), "-i bad.bin", "bad.bin: too short: 16 tokens"),
    (shard([7] * 16, BYTES), "-i train.bin -j bad.bin", "bad.bin: too short: 16 tokens"),
    (shard([7] * 300 + [257] * 9, BYTES), "-i bad.bin",
     "bad.bin: token 300 is 257, out of range for a vocabulary of 257"),
    (shard([7] * 300, GPT2), "-i [tb]*.bin", "train.bin has byte tokens, but bad.bin has GPT-2's"),
    (shard([7] * 300, GPT2), "-i train.bin -j bad.bin",
     "(-j): bad.bin has GPT-2's tokens, but train.bin has"),
    (b"Once upon a time there was a fox.\n", "-i bad.bin",
     "bad.bin is a text file, not token data; to tokenize it, run data/"),
    (b"a" * 5000 + bytes(10), "-i train.bin -j bad.bin", "bad.bin is a text file"),
    (None, "-i data/mine_train.bin", "mine_train.bin; to convert text, use data/tokenize"),
    (None, "-i data/stories_bpe_train.bin", "_bpe_train.bin; run 'make data' to create them"),
    (None, "-i train.bin -j missing.bin", "no token files match missing.bin"),
    (None, "-i train.bin -b 200",
     "a step needs 200 sequences of 16 tokens, but train.bin has only"),
    (None, "-i train.bin -d 3200 -b 2", "a step needs 200 sequences"),
    (None, "-i .", "cannot read token file .: "),
]


@pytest.mark.parametrize("change, arguments, expected", BAD_DATA)
def test_bad_data(change, arguments, expected):
    """An invalid token file is reported in one line, and no checkpoint is written."""
    good = Path("train.bin").read_bytes()
    if change is not None:
        Path("bad.bin").write_bytes(change if isinstance(change, bytes)
                                    else good[:change] if isinstance(change, int)
                                    else with_ints(good, *change))
    refused("-e l2h2c16t16 -o out " + arguments, expected)
    assert not step(0).exists()


def nobody():
    """For `before`: gives up root's right to write everywhere."""
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)


def test_bad_output():
    """A folder that cannot be created or written, or that has checkpoints, is reported."""
    step(2).mkdir(parents=True)
    for output, expected in {"train.bin/out": "cannot create folder",
                             "train.bin": "train.bin: Not a directory",
                             "/proc/none": "cannot create folder",
                             "out": "already contains checkpoints"}.items():
        refused(TINY + "-x 2 -o " + output, expected)
    # The user nobody may be unable to open the program and the data, so they are passed open.
    Path("/tmp/train_gpt2_closed").mkdir(mode=0o555, exist_ok=True)
    program = os.open(words("")[0], os.O_RDONLY)
    data = os.open("train.bin", os.O_RDONLY)
    command = "/proc/self/fd/%d -i /dev/fd/%d -e l2h2c16t16 -x 1 -o /tmp/train_gpt2_closed/out"
    refused((command % (program, data)).split(), "closed/out: Permission denied", before=nobody,
            pass_fds=[program, data])


def number_after(text, key):
    """The first number after a text, without its commas; -1 if there is none."""
    found = re.search(re.escape(key) + r"[^0-9\n]*([0-9][0-9,.]*)", text)
    return float(found[1].replace(",", "").rstrip(".")) if found else -1


def flat(text):
    """Joins continuation lines, which are indented."""
    return re.sub(r"\n {2,}(?=\S)", " ", text)


@pytest.mark.parametrize("options, status, texts", [
    ("-e d48 --gpu h200", 0, ["memory plan of the GPU run", "1,557,611,200 parameters",
                              "   measured: sm_90, plus a quarter\n", "-r block",
                              "; predicted from steps of older kernels on an H100 and an H200\n"]),
    ("-e d48 --gpu 4080 --offload none", 3, ["DOES NOT FIT, ", "fits with", "--offload moments"]),
    ("-e gpt2-xl --gpu 4080", 0, ["--offload moments", "\nhost memory         ", "4080: 15.57 GiB; "
                                  "fits; needs 11.61 GiB of host memory; "]),  # the least that fits
    ("-e gpt2-xl --gpu 4060ti -b 2 -d 524288 -r gelu --offload moments,master --host-mem 14GiB", 3,
     ["4060ti: 15.60 GiB; fits, ", "host memory (--host-mem): 13.94 GiB; DOES NOT FIT, 584."]),
    ("-e d12 --gpu NVIDIA_GeForce_RTX_4090", 0, ["RTX_4090: 23.60 GiB; fits, "]),
    ("-e d12 --gpu NVIDIA_H100_80GB_HBM3", 0, ["HBM3: 79.10 GiB; fits, "]),
    ("-e d12 --gpu NVIDIA_A100-SXM4-40GB", 0, ["40GB: 39.50 GiB; fits, "]),
    ("-e d12 --gpu NVIDIA_GH200_480GB", 0, ["480GB: 94.88 GiB; fits, "]),
    ("-e d12 --gpu NVIDIA_RTX_PRO_6000_Blackwell_Workstation_Edition", 0, [": 94.97 GiB; fits, "]),
    ("-e d12 --gpu NVIDIA_GeForce_RTX_4090_Laptop_GPU", 1, []),  # another chip, with 16 GB
    ("-e d12 --gpu 4090 -x 100", 0, ["\nforecast: ", " tokens/s (", ", 409,600 tokens in ",
                                     "; predicted for this card, not measured\n"]),
    ("-e d12 --gpu 4090 -x 100 -d 524288", 0, [" tokens/s, 52,428,800 tokens in "]),
    ("-e d12 --gpu h100 --gpus 16", 0, ["; predicted for these cards in one machine\n"]),
    ("-e d12 --gpu 4090 --offload weights", 0,  # 12 blocks down; 22 more up, to be read again
     ["uploads 459.0 MiB to the GPU and downloads 162.0 MiB\n"]),
    ("-e d12 --gpu 4090 --gpus 8 -z 2 -b 4 -d 131072", 0,  # blocks' gradients four times, the rest
     ["sends 841.1 MiB per GPU: 633.2 MiB in reductions, 207.9 MiB in other",  # once, of 7 ranks
      "; predicted for this card, not measured\n"]),
    ("-e l2h2c16t16 -b 2", 0, ["memory plan of the CPU run\n"]),
    ("-e d12 --gpu t4", 0, ["; fp16; B 4"]), ("-e d12 --gpu T4", 0, ["; fp16; B 4"]),
    ("-e gpt2-xl --gpu-mem 1.3GiB -b 1", 3, ["no settings make it fit; see --minimum"]),
    ("-e gpt2-xl --gpu-mem 1.7GiB -b 1", 3, ["--logit-rows 128 --workspace 256"]),
    ("-e l12h12c768t1024v999 -i train.bin --gpu t4", 1, []),
])
def test_plan(options, status, texts):
    """Exit status and text of a plan."""
    o = run("--plan " + options)
    assert o.status == status, o
    out = flat(o.out)
    assert [text for text in texts if text not in out and text not in o.out] == []
    for *found, time in re.findall(r"t: ([\d,]+) tokens/s.*, ([\d,]+) tokens in ([\d:]+);", out):
        rate, tokens = [int(x.replace(",", "")) for x in found]
        assert tokens / rate == pytest.approx(seconds(time), rel=1e-3, abs=1)
    for all, left, word in re.findall(r": ([\d.]+) GiB; \D+ ([\d.]+) GiB (free|short)", out):
        total = number_after(o.out, "\ntotal per GPU") / 2**30
        left = float(left) if word == "free" else -float(left)
        assert float(all) - total == pytest.approx(left, abs=0.011)


def test_plan_steps():
    """dev/reading.md's excerpt is the output, in the streams' order; the JSON has the same."""
    text = (TOP / "dev/reading.md").read_text().split("$ ./train_gpt2 ", 1)[1].split("\n\n")[0]
    command, *shown = [line.strip() for line in text.split("\n")]
    printed = iter([line.strip() for line in succeeds(command).split("\n")])
    assert len(shown) > 20 and all(line == "..." or line in printed for line in shown)
    rows = json.loads(succeeds(command + " --json"))["instructions"]
    lines = re.findall(r"^ +([\d.]+) +([\d.]+)  (\w+) +(\w+) +(.*)$", succeeds(command), re.M)
    assert lines == [("%.3f" % row["begin_ms"], "%.3f" % row["end_ms"], row["stream"], row["op"],
                      row["text"]) for row in rows]
    halves = re.findall(r"_fp8: .*", succeeds(command + " --dtype bf16 --matmul fp8"))
    assert halves and all(" -> " in text for text in halves)    # also with one result
    for stream in "compute", "up", "down":
        own = [row for row in rows if row["stream"] == stream and row["part"] == 0]
        assert own and all(a["end_ms"] <= b["begin_ms"] + 1e-9 for a, b in zip(own, own[1:]))


def test_first_page():
    """A plan suggests at most five changes, --plan all all; only on terminals lines are wrapped."""
    lines = lambda text: text.replace("\r", "").split("\n")
    ways = lambda text: len([line for line in lines(text) if " % " in line])
    for options in " -e gpt2-xl --gpu 4060ti -r none --offload none", " -e d12":
        first, whole = run("--plan" + options).out, run("--plan all" + options).out
        assert ways(first) == 5 < ways(whole) and len(lines(first)) < 30
        assert max(map(len, lines(first))) > 80
        wrapped = lines(on_terminal("--plan" + options, 72, (0, 3)).decode())
        assert [x for x in wrapped if len(x) > 72 and "," not in x] == []
        assert not [x for x in wrapped if re.search(r" \d+$", x) and "memory" not in x]


def test_advice():
    """A suggestion's slowdown depends on the card; --largest says what --offload auto would do."""
    slower = lambda card: query("--plan -e gpt2-xl -b 64 -r none --offload none --gpu " + card, 3)[
        "suggestions"][0]["slower"]
    assert slower("t4") != pytest.approx(slower("h200"), rel=0.1)
    found = query("--fit -e gpt2-xl --gpu 4060ti")
    assert found["best"][0]["tokens_per_s"] >= 0.99 * max(w["tokens_per_s"] for w in found["ways"])
    least = min((way for way in query("--fit all --gpu b200 -e d12")["ways"] if way["matmul"] ==
                 "fp8"), key=lambda way: way["device_bytes"])  # the last of all candidates
    assert least["offload"] == "weights,gradients,moments,residuals"
    succeeds("--largest batch -e gpt2-xl --gpu t4", "nothing fits without "
             "offloading; the largest that fits with --offload auto:\n",
             " --offload weights,gradients,moments,master,residuals\n")


QUERIES = [
    ("--plan -e gpt2-xl --gpu 4060ti --gpus 2 -z 1 --offload moments,master", 0, "plan"),
    ("--plan -e gpt2-xl --gpu 4060ti -r none --offload none", 3, "plan"),
    ("--plan -e l2h2c16t16 -b 2", 0, "plan"), ("--plan -e d24 --gpu all", 0, "cards"),
    ("--plan -e l2h2c64t64 --gpu all --gpu-mem 2M", 3, "cards"),
    ("--fit bits -e gpt2-xl --gpu 4060ti -d 524288", 0, "ways"),
    ("--fit all -e d12 --gpu 3060-laptop", 0, "ways"),
    ("--fit bits -e d48 --gpu-mem 1100M", 3, "ways"), ("--minimum -e gpt2-xl", 0, "settings"),
    ("--minimum -e gpt2-xl --gpus 8 -z 3", 0, "settings"),
    ("--largest batch -e d24 --gpu t4", 0, "ways"),
    ("--largest batch -e d48 --gpu-mem 1200M", 3, "ways"),
]


@pytest.mark.parametrize("options, status, key", QUERIES)
def test_json_and_text(options, status, key):
    """Every command's JSON has the options and numbers of its text; both have the same status."""
    o, found = run(options), query(options, status)
    assert o.status == status and (o.out if status != 1 else True)
    text = re.sub(r"\s+", " ", o.out)
    for way in found[key]:
        if key == "plan":
            name = "device allocation" if "memory plan of the GPU" in o.out else "allocation"
            assert number_after(o.out, "\n" + name) == way["device_bytes"]
            assert "{:,d}".format(way["host_bytes"] or way["device_bytes"]) in o.out
            continue
        assert not way["options"] or way["options"] in text or "," in way["options"]
        rate = way["tokens_per_s"]
        assert not rate or "{:,d}".format(int(rate)) in o.out
    for way in found.get("suggestions", [])[:5]:
        assert "%s %s" % (way["effect"], way["options"]) in text
    assert {b["home"] for b in found.get("buffers", [])} <= {"device", "host"}


SAME = """device_bytes reserved_bytes host_bytes batch seq_len gpus zero dtype moments master
logit_rows workspace recompute offload fits tokens_per_s""".split()


def same_plan(way, card, *but):
    """Expects that the command in `way`, typed, gives the same plan at the same speed."""
    options = way["command"].split(" ", 1)[1]
    o = run("--plan %s %s --json" % (card, options))
    assert o.status in (0, 3) and o.err == "", (options, o)
    plan, = json.loads(o.out)["plan"]
    for key in SAME:
        unknown = key == "tokens_per_s" and way[key] is None
        assert unknown or key in but or plan[key] == way[key], (key, options)


def keeps(way, typed, vary):
    """Expects that a recommendation has every option that was typed, except those it may vary."""
    for name, value in typed:
        if value != "auto" and not re.match(vary, name):
            key = {"-r": "recompute", "-b": "batch"}.get(name, name[2:].replace("-", "_"))
            assert (str(way[key]) == value if key in way and key != "master"
                    else ("%s %s" % (name, value)).rstrip() in way["command"]), (name, way)


def test_minimum():
    """--minimum: the least memory on a GPU, with states on the host, on the CPU, on more GPUs."""
    device, host, cpu = query("--minimum -e d24")["settings"]
    assert host["device_bytes"] < device["device_bytes"] < cpu["device_bytes"]
    assert host["offload"] == "weights,gradients,moments,master,residuals"
    assert device["offload"] == cpu["offload"] == "none"
    assert device["moments"] == "bf16" and not device["master"]
    t4 = query("--minimum -e d12 --gpu t4")["settings"]
    assert t4[0]["dtype"] == "fp16" and t4[0]["moments"] == "fp32" and t4[0]["master"]
    last = [math.inf, math.inf]
    for gpus in 2, 4, 8:
        ways = query("--minimum -e d24 -z 3 --gpus %d" % gpus)["settings"]
        sizes = [way["device_bytes"] for way in ways]
        assert all(a < b for a, b in zip(sizes, last)), gpus
        assert " --gpus %d -z 3" % gpus in ways[0]["command"]
        last = sizes
    o = succeeds("--minimum -e d12 --gpu t4")
    folder = os.path.dirname(words("")[0])
    assert "\nGPU: %s/train_gpt2cu -e d12 " % folder in o
    assert "and %.2f GiB of host" % (t4[1]["host_bytes"] / 2**30) in flat(o)
    assert "\nCPU: %s -e d12 " % words("")[0] in o


@pytest.mark.parametrize("options, part", [
    ("any --logit-rows 3000", " --logit-rows 3000"),
    ("any --logit-rows 2560", " --logit-rows 2560"),  # the default of small batches only
    ("bits -r gelu --offload moments", " -r gelu --offload moments"), ("bits --quiet", " --quiet"),
    ("bits -r block:1,gelu:1,block:1,gelu:1,block:1,gelu:1,block:1,gelu:1",
     " -r block:1,gelu:1,block:1,gelu:1,block:1,gelu:1,block:1,gelu:1"),
    ("all --moments fp32", ""), ("any -w split", "")])
def test_fit_given(options, part):
    """The recommended command contains the user's options, and can be typed."""
    found = query("--fit %s -e d12 --gpu 4090" % options)
    best, = found["best"]
    assert part in best["command"] + " " and "--quiet 1" not in best["command"]
    for way in found["ways"]:
        assert way["moments"] == "fp32" or "fp32" not in options
        assert way["master"] or "split" not in options
        assert way["logit_rows"] == 2560 or "2560" not in options
    same_plan(best, "--gpu 4090")


def test_fit_listed():
    """--fit recommends a setting that it lists; without speeds, it calls none the fastest."""
    for card in "t4", "4090", "h200":
        found = query("--fit bits -e d12 --gpu " + card)
        rates = [way["tokens_per_s"] for way in found["ways"]]
        assert found["best"][0]["options"] in [way["options"] for way in found["ways"]]
        assert found["best"][0]["tokens_per_s"] >= 0.99 * max(rates)
        for way, rate in zip(found["ways"], rates):
            assert way["slower"] == pytest.approx(max(rates) / rate - 1, abs=2e-4)
    out = succeeds("--fit bits -e d12")
    assert "\nsuggested: " in out and "fastest" not in out


def test_words():
    """Singular and plural; no line about nothing; no advice for what fits."""
    assert "shrink" not in succeeds("--plan -e d12 --generate --gpu t4", "; fits, ")
    out = succeeds(TINY + "-x 1") + succeeds("--plan " + TINY) + succeeds("--fit any -e d12")
    assert " in 1 shard; " in out and "; 1 step; 0.0107 epochs; " in out
    for words in "1 shards", "1 GPU", "1 steps", " 0 B", "-0 %":
        assert words not in out, words
    assert "--gpu-mem: 512.0 MiB; DOES NOT FIT, " in run("--plan -e d12 --gpu-mem 512MiB").out


def test_fit_data():
    """Only batches that the data and the step allow are suggested, on all GPUs together."""
    Path("few.bin").write_bytes(shard([99] * 400, BYTES))  # 24 sequences
    few = "-i few.bin -e l2h2c16t16 --gpu 4090 "
    batches = lambda more: {way["batch"] for way in query(few + more)["ways"]}
    assert max(batches("--fit all")) == 24
    for gpus, most in (1, 24), (4, 6):
        assert max(batches("--fit all --gpus %d" % gpus)) <= most
        assert batches("--largest batch --gpus %d" % gpus) == {most}
    assert max(batches("--fit all --gpus 4 -d 256")) <= 4  # a step of 16 sequences
    assert batches("--largest batch --gpus 4 -d 256") == {4}
    for more in "-d 512", "-b 32":
        refused(few + "--fit bits " + more,
                "few.bin has only 24 sequences of 16 tokens, but a step needs 32")
    out = flat(run("--fit bits -b 8 -r none --offload none -e d48 --gpu-mem 1100M").out)
    assert out.startswith("nothing fits for ") and out.endswith(
        " -e d48 -b 8 -r none --offload none --gpu-mem 1153433600; see --minimum\n")
    assert run("--fit -i few.bin -e l2h2c16t16 --gpu 4090").out.startswith(
        "assuming the vocabulary of few.bin: ")
    succeeds("--fit bits -e l2h2c16t16")


def test_host_mem():
    """--host-mem limits every query, less what the program itself takes; ranks share it."""
    most = (12 << 30) - (16 << 20) - 20 * 1600**2
    free, base = "-e gpt2-xl --gpu 4060ti ", "-e gpt2-xl --gpu 4060ti --host-mem 12GiB "
    hosts = lambda command, key, status=0: [
        way["host_bytes"] for way in query(command + base, status)[key] if way["fits"]]
    assert query("--minimum " + base)["host_available_bytes"] == most
    for command, key in (("--fit bits -d 524288 ", "ways"), ("--minimum ", "best"),
                         ("--plan ", "plan"), ("--largest seq-len --offload auto -b 1 ", "best")):
        assert 0 < max(hosts(command, key)) <= most, command
        if key == "ways" or "min" in command:
            assert max(way["host_bytes"] for way in query(command + free)[key]) > most
    assert max(hosts("--fit bits --gpus 2 -z 1 -d 524288 ", "ways")) < most / 2
    every = "--plan --offload weights,gradients,moments,master,residuals "
    assert not hosts(every, "plan", 3) and max(hosts(every, "suggestions", 3)) <= most


def test_includes_validation():
    """A pattern that also matches the validation shard of a training shard is refused."""
    for name in "train_001", "val_000":
        shutil.copy(name.split("_")[0] + ".bin", "both_%s.bin" % name)
    refused("-i both_*.bin -e l2h2c16t16",
            "--train-data (-i): both_*.bin includes the validation shard both_val_000.bin")


def test_usual_step():
    """Without -d, a plan says what a step of GPT-2's size would give."""
    for plan in "--plan -e gpt2-xl --gpu 4060ti", "--plan -e d12 --gpu 4090 --gpus 2":
        out = flat(succeeds(plan))
        rate, step = re.search(r"s \(([\d,]+) with -b 4 -d (\d+)\), ", out).groups()
        assert step == "524288" and "forecast: %s tokens/s, " % rate in succeeds(
            "%s -b 4 -d %s" % (plan, step))
    refused("--plan -e d12 -b 1 -t 1 -d 3000000000", "--tokens-per-step (-d): ")
    rows = "--plan --gpu-mem 2G -e d12 -d 524288 -r none --offload moments --logit-rows 4096 -w 0"
    assert query(rows, 3)["plan"][0]["logit_rows"] == 4096  # -b auto keeps what was typed


@pytest.mark.parametrize("gpus", ["", "--gpus 2 "])
def test_batch_memory(gpus):
    """-b auto takes the largest micro-batch that fits beside the libraries and NCCL."""
    options = "--plan -e l1h1c16t16 -d 768 %s-r none --offload none --gpu-mem %%d -b %%s" % gpus
    plan = lambda size, batch: query(options % (size, batch))["plan"][0]
    way = plan(64 << 30, 24)
    room = way["device_bytes"] + way["reserved_bytes"]
    assert plan(room, "auto")["batch"] == 24 and plan(room - 1, "auto")["batch"] < 24


@pytest.mark.parametrize("options, card, key, step", [
    ("batch -e d12", "--gpu 4090", "batch", 1), ("batch -e d24 -r none", "--gpu t4", "batch", 1),
    ("batch -e d24 --offload auto -d 524288", "--gpu 4060ti", "batch", 0),  # the next divisor
    ("seq-len -e l6h6c384t32768 -b 16 -r none", "--gpu 3060-laptop", "seq_len", 1),
    ("seq-len -e d12", "--gpu h100", "seq_len", 1),  # the model has no more positions
    ("seq-len -e l6h6c384t65536 -b 8 -d 524288", "--gpu-mem 3GiB", "seq_len", 0)])
def test_largest(options, card, key, step):
    """--largest's command fits, and the next possible value does not."""
    best, = query("--largest %s %s" % (options, card))["best"]
    same_plan(best, card)
    value, letter = best[key], "-b" if key == "batch" else "-t"
    assert "%s %d" % (letter, value) in best["command"]
    after = value + step if step else 2 * value
    command = re.sub(r"%s \d+" % letter, "%s %d" % (letter, after), best["command"])
    o = run("--plan %s %s" % (card, command.split(" ", 1)[1]))
    assert o.status == 3 or "exceeds the model's maximum" in o.err, o


def test_all_cards():
    """--plan --gpu all agrees with --plan of each card."""
    options = "--plan -e d24 -b 8 --offload none "
    cards = {way["note"].split(":")[0]: way for way in query(options + "--gpu all")["cards"]}
    for card in "t4", "4090", "h100", "3060-laptop":
        o = run(options + "--json --gpu " + card)
        plan = json.loads(o.out)
        way, row = plan["plan"][0], cards[card]
        assert ("free" in row["note"]) == way["fits"] == (o.status == 0), card
        if not way["fits"] and plan["suggestions"]:
            assert row["options"] == "-b 8 " + plan["suggestions"][0]["options"] and row["fits"]
        elif way["fits"]:
            assert row["tokens_per_s"] == way["tokens_per_s"]
            assert row["device_bytes"] == way["device_bytes"]
    narrow = query("--plan --gpu all -e d12 --moments bf16 --matmul fp8")["cards"]
    for card, lack in ("t4", "bf16"), ("3090", "fp8"):
        assert [way for way in narrow if re.match("%s:.*; no %s;" % (card, lack), way["note"])]


def test_version():
    for out in map(succeeds, ("--version", "-x 5 --version -y 1")):
        assert re.match(r"train_gpt2\w* [0-9.]+\ncompiler  .*\n(.*\n)*built in  ", out)
    assert all(card in succeeds("--help all") for card in ("3060-laptop", "rtx-pro-6000", "gh200"))


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS",
                                      "WORLD_SIZE"])
def test_launcher(variable):
    """A run that a launcher starts several times is refused in one line; a plan is not."""
    refused(TINY + "-x 1 -o out", variable + " is 8, but only one rank is supported: this "
            "program runs", env={variable: "8"})
    assert not Path("out").exists()
    succeeds("--plan -e l2h2c16t16", env={variable: "8"})
    succeeds(TINY + "-x 1 --quiet", env={variable: "1"})
    succeeds(TINY + "-x 1 --quiet", env={"SLURM_NTASKS": "8"})  # in a shell of sbatch


@pytest.mark.parametrize("query", ["--plan", "--fit bits"])
def test_plan_signal(query):
    """A signal ends --plan and --fit like any program that has nothing to save."""
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"x" * size)  # full: the plan waits for a reader that never reads
    process = start(query + " -e l2h2c16t16", stdout=writer, before=default_signal())
    wait_until(lambda: "pipe_write" in Path("/proc/%d/wchan" % process.pid).read_text() or
               "S" in Path("/proc/%d/stat" % process.pid).read_text().rsplit(")", 1)[1][:3])
    assert stopped(process, signal.SIGINT)[::2] == (-signal.SIGINT, "")


def test_memory_shown():
    """The start-up lines, the log and --plan report the same memory, including the host's."""
    options = "-e l3h2c64t16 -b 2 -r none --offload weights,gradients,moments "
    way, = query("--plan " + options)["plan"]
    out = succeeds("-i train.bin -x 1 -o out " + options)
    bytes_ = log()[0]["plan_bytes"]
    assert way["device_bytes"] == bytes_ or way["device_bytes"] + way["host_bytes"] == bytes_
    shown = re.search(r"\ndevice .*; memory ([\d.]+) (.)iB", out)
    assert float(shown[1]) * {"K": 2**10, "M": 2**20}[shown[2]] == pytest.approx(bytes_, rel=0.01)
    # On the host: weights and gradients of the blocks' matrices, and both moments of everything.
    hosted = float(re.search(r"\ndevice .*, host memory ([\d.]+) MiB", out)[1])
    assert hosted * 2**20 == pytest.approx(8 * 3 * 12 * 64**2 + 8 * (167552 + 127 * 64), rel=0.02)


@pytest.mark.parametrize("value", ["plain", "two words", "it's \"$HOME\" `x` \\ \\n !1 #?*~", "",
                                   "-", "caf\xe9"])
def test_pasted(value):
    """The command that a run prints can be pasted into a shell, which splits it into the words."""
    out = run([*words(TINY + "-x 1 --prompt"), value]).out
    command = re.search(r"\ncommand  (.*)\n", out)[1]
    Path("words").write_text("printf '%s|' " + command)
    got = subprocess.check_output(["bash", "words"], text=True).split("|")[1:-1]
    wanted = {"-i": "train.bin", "-e": "l2h2c16t16", "-b": "2", "-x": "1"}
    wanted.update({"--prompt": value} if value else {})
    pairs = dict(zip(got[::2], got[1::2]))
    assert {key: pairs.get(key) for key in wanted} == wanted, command


def test_log_every():
    """Step lines are printed every --log-every steps and for the last one, even when resumed."""
    out = succeeds(TINY + "-x 10 -n 5 -s 10 -g 2 --log-every 4 -y 1 -o out")
    assert [*map(int, re.findall(r"\nstep +(\d+)/10  loss ", out))] == log_steps() == [4, 8, 10]
    assert out.index("step   10/10  loss ") < out.index("--- sample after step 10")
    # An interrupted run also prints its last step, although that step was not planned as the last.
    process = start(TINY + "-x 99999999 -k constant --log-every 50000000 -n 20 -o cut",
                    before=default_signal())
    wait_until(lambda: (step(20, "cut") / MANIFEST).exists())
    status, out, _ = stopped(process, signal.SIGINT)
    last, = log_steps("cut")
    assert status == 0 and last >= 20 and "interrupted after step %d," % last in out
    assert re.search(r"\nstep +%d/99999999  loss " % last, out)


def test_eta():
    """The steps left at their mean time, over about 20 steps; the first counts until the second."""
    process = begin(TINY + "-x 999999 -k constant --log-every 1 -o out", before=default_signal())
    wait_until(lambda: Path("out/log.jsonl").exists() and len(log_steps()) > 40)
    assert stopped(process, signal.SIGINT)[0] == 0
    shown = re.findall(r"^step +(\d+)/999999 .* eta ([\d:]+)$", Path("stdout").read_text(), re.M)
    mean = 0
    for (step, eta), event in zip(shown, (e for e in log() if "loss" in e), strict=True):
        mean = event["ms"] if event["step"] <= 2 else 0.95 * mean + 0.05 * event["ms"]
        assert int(step) == event["step"]
        assert seconds(eta) == pytest.approx((999999 - int(step)) * mean / 1000, abs=1)


def on_terminal(arguments, columns=80, statuses=(0,)):
    """The output of a program on a terminal."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    process, out = start(arguments, stdout=terminal), b""
    os.close(terminal)
    try:
        while piece := os.read(master, 4096):
            out += piece
    except OSError:  # Linux: the other end is closed
        pass
    os.close(master)
    assert process.wait() in statuses and process.stderr.read() == ""
    return out


def test_live_line():
    """A step's line replaces the previous one and fits 80 columns; no step is missing."""
    out = on_terminal(TINY + "-x 20").decode()
    lines = re.findall(r"\r?\n(?:\033\[A\033\[K)?(step +(\d+)/20  loss [^\r\n]*)", out)
    assert [int(number) for _, number in lines] == [*range(1, 21)]
    assert all(len(line) < 80 for line, _ in lines) and out.count("\033[A\033[K") == 19


def test_sample_bytes():
    """A prompt's control bytes and invalid UTF-8 are written unchanged."""
    prompt = b"\x1b[2m\x01\x7f\xc2\x9b\xff\xc3\xa9k\n."
    argv = [*words(TINY + "-x 1 -s 1 -g 1 --temperature 0 --prompt"), prompt]
    assert b"---\n" + prompt in run(argv).out.encode(errors="surrogateescape")


def test_drawn_planner_commands():
    """Random planner commands print only JSON with --json; what they list gives the same plan."""
    seed = random.randrange(10**6)
    pick = random.Random(seed)
    axes = [("-e d12", "-e l4h4c128t64", "-e l6h5c80t512", "-e l8h2c64t64v8192"),
            ("--gpu 4090", "--gpu t4", "--gpu h100", "--gpu-mem 2G", "--gpu-mem 1300M"),
            ("", "", "-b auto", "-b 4", "-b 5", "-b 64"), ("", "", "-d 65536", "-d 524288"),
            ("", "", "", "-t 64", "-t 50"), ("", "", "", "--dtype fp16", "--dtype fp32"),
            ("", "--gpus 2", "--gpus 2 -z 1", "--gpus 4 -z 2", "--gpus 3 -z 3", "-z 3"),
            ("", "", "", "-r block:3", "-r none"), ("", "", "--offload moments", "--offload none"),
            ("", "--logit-rows 200", "--logit-rows 4096", "--workspace 1000"),
            ("", "", "", "", "--moments bf16", "--moments fp32", "-w none"),
            ("", "", "", "--optimizer muon"), ("", "-l 0.001", "-x 50", "--quiet")]
    forbidden = {"--largest batch": "-b", "--largest seq-len": "-t", "--minimum": "-[br]|--[mlow]"}
    queries = *["--plan"] * 3, "--fit bits", "--fit any", "--fit all", *forbidden
    statuses, count = set(), 0
    for _ in range(200):
        query = pick.choice(queries)
        drawn = [pick.choice(axis) for axis in axes]
        no = forbidden.get(query, "--none") if pick.random() < 0.9 else "--none"
        drawn = [word for word in drawn if not re.match("(%s)" % no, word)]
        if "--minimum" in query:
            drawn[1] = "--gpu t4" if pick.random() < 0.5 else ""
        o = run(" ".join([query, "--json"] + drawn))
        assert o.status in (0, 1, 3), (seed, query, drawn, o)
        statuses.add(o.status)
        if o.status == 1:
            continue
        found = json.loads(o.out)
        ways = sum((found.get(key, []) for key in ("plan", "suggestions", "changes", "best")), [])
        typed = re.findall(r"(--?[a-z-]+)(?: (\w\S*))?", " ".join([drawn[0], *drawn[2:]]))
        for way in ways + found.get("ways", []):  # a plan suggests other settings
            keeps(way, typed, "-[brw]|--(off|mom|log|work)" if way in found.get(
                "suggestions", []) + found.get("changes", []) else "$")
        for way in pick.sample(ways, min(len(ways), 6)):
            # --minimum is about GPUs of any size, and its CPU run is planned for no card.
            card = "" if way["note"] == "CPU" else drawn[1] or "--gpu-mem 200G"
            same_plan(way, card, "fits" * (query == "--minimum"))
            count += 1
    assert statuses == {0, 1, 3} and count > 100, (seed, count)
