"""The GPU program, emulated or on a GPU: what it refuses, its commands, checkpoints exchanged with
the CPU program, choices of kernels, and training. EMU_*: see dev/cuda_cpu/emu_core.h."""

from files import *

pytestmark = pytest.mark.gpu
emulated = pytest.mark.emulated
EVERY_STATE = "weights,gradients,moments,master,residuals"
SMALL = "-i train.bin -e l1h1c16t16 -b 2 "
losses = functools.partial(series, "loss")


@pytest.fixture(autouse=True)
def untuned(request, monkeypatch):
    """On a GPU, tests share a cache, because each would time the algorithms of fifty matmuls."""
    if not is_emulated():
        monkeypatch.setenv("XDG_CACHE_HOME", str(request.config.rootpath / "../../build/cache"))


def total(options, **more):
    """The bytes of a plan on the device."""
    return query("--plan " + options, **more)["total_bytes"]


@pytest.mark.parametrize("arguments, expected", [
    ("--dtype fp16 -w none", "--master (-w) none is not supported with --dtype fp16"),
    ("--dtype bf16 -w 0 --offload master", "--offload master: there are no master weights"),
    ("--offload moments,weight", "--offload: invalid value 'moments,weight'"),
    ("-z 1", "--zero (-z) 1 requires several GPUs"),
    ("-z 4", "--zero (-z): invalid value '4'; expected an integer between 0 and 3"),
    ("--dtype fp32 --moments bf16", "--moments bf16 requires --dtype bf16"),
    ("--dtype fp32 --grad-dtype bf16", "--grad-dtype bf16 requires --dtype bf16"),
    ("--dtype fp16 --matmul fp8", "--matmul fp8 requires --dtype bf16"),
    ("-e l2h2c16t24 --matmul fp8", "channels that are multiples of 16"),
    ("--dtype fp64", "--dtype: invalid value 'fp64'"), ("-r block:3", "0 and 2, the number of"),
    ("-e l2h2c20t16", "20 channels in 2 heads are not supported; on a GPU, channels must be a "
                      "multiple of 8"),
    ("-e l2h4c16t16", "16 channels in 4 heads"), ("-e l1h1c136t16", "136 channels in 1 head "),
    ("-e l1h64c8192t4", "up to 4096"), ("-e l2h3c16t16", "expected 1-400 layers")])
def test_refused(arguments, expected):
    shape = "" if "-e " in arguments else "-e l2h2c16t16 "
    refused("-i train.bin -b 2 -x 2 -o out " + shape + arguments, expected)
    assert not Path("out").exists()


@emulated
@pytest.mark.parametrize("arguments, env, status, expected", [
    (TINY, {"EMU_GPUS": "0"}, 1, "no NVIDIA GPU found"),
    (TINY + "--dtype bf16", {"EMU_CC": "75"}, 1, "; use fp16 or fp32"),
    (TINY + "--matmul fp8", {"EMU_CC": "80"}, 1, "compute capability 8.9"),
    (TINY + "--dtype bf16 --plan", {"EMU_CC": "75"}, 1, "; use fp16 or fp32"),
    (TINY + "--offload moments", {"EMU_HOST_MEM": "4096"}, 1,
     " of host memory: out of memory; cannot pin more host memory"),
    ("-i train.bin -b 64 -x 2 -e l4h2c64t16 -r none --offload none", {"EMU_GPU_MEM": "42000000"},
     3, "; it fits with "),
    (TINY, {"EMU_DRIVER": "11080"}, 1, "CUDA driver version is insufficient")])
def test_unsuitable(arguments, env, status, expected):
    """A GPU that is missing, too old or too small is refused."""
    refused(arguments + ("" if "--plan" in arguments else " -o out"), expected, status, env=env)
    assert names("out", "step") == []


@emulated
def test_driver():
    """A plan needs neither driver nor GPU. By default kernels are loaded at their first launch."""
    old = {"EMU_DRIVER": "11080"}
    succeeds("--plan -e d12 --gpu h100", env=old)
    succeeds("--plan -e d12", env={"EMU_GPUS": "0"})
    succeeds(TINY + "-x 1 --quiet --dtype fp32", env={"EMU_CC": "75"})
    for loading, told in ("", "when they are launched\n"), ("EAGER", "at once\n"):
        env = {"EMU_LOG": "1", **({"CUDA_MODULE_LOADING": loading} if loading else {})}
        assert "loaded " + told in run(TINY + "-x 1 --quiet", env=env).err


@emulated
def test_start():
    """Runs start if peak rates are unknown, and if context and libraries fit to the byte."""
    out = succeeds(TINY + "-x 2 -o out", "; cuBLASLt 1", env={"EMU_CC": "999"})
    assert "% of peak" not in out and "cuBLASLt 1" in log()[0]["device"]
    assert [e["peak_pct"] for e in log() if "loss" in e] == [None, None]
    # The context is part of what the driver reports as used; libraries are added to that.
    options = TINY + "-x 2 -r none --offload none "
    need = total(options) + (300 << 20) + (200 << 20)
    large = {"EMU_CONTEXT": "300M", "EMU_LIBRARY": "200M"}
    succeeds(options + "--quiet", env={**large, "EMU_GPU_MEM": str(need)})
    refused(options + "--quiet", " short", 3, env={**large, "EMU_GPU_MEM": str(need - 1)})


@emulated
def test_auto():
    """-r auto finds levels that fit, with the same bits; --gpu-mem gives larger cards its plan."""
    options = "-i train.bin -e l3h2c16t16 -b 4 -x 3 --offload none "
    none, block = total(options + "-r none"), total(options + "-r block")
    succeeds(options + "-r none -o plain")
    for part in range(5):
        memory = block + (none - block) * part // 4
        for more, env in (("", {"EMU_GPU_MEM": str(memory)}),
                          ("--gpu-mem %d " % (memory + (1 << 30)), {})):
            out = succeeds(options + more + "-o out", env=env)
            chosen = re.search(r"\ncommand .* -r (\S+)", out)
            assert (chosen[1] if chosen else "none") != "none" or part == 4, out
            assert losses() == losses("plain")
            shutil.rmtree("out")
    refused(options, ": 1 B short", 3, env={"EMU_GPU_MEM": str(block - 1)})
    refused(options + "--gpu-mem %d" % (block - 1 + (1 << 30)), ": 1 B short", 3)
    succeeds("-i train.bin -e l3h2c16t16 -b 4 -x 3 -o away", " --offload moments",
             env={"EMU_GPU_MEM": str(block - 1)})
    assert losses("away") == losses("plain")


@emulated
def test_host_memory():
    """A plan whose pinned memory exceeds this machine's does not fit."""
    options = "--plan -e l96h64c16384t8 -i train.bin -b 1 -x 1 --offload " + EVERY_STATE
    o = run(options, env={"EMU_GPU_MEM": str(400 << 30)})
    assert o.status == 3 and "\nhost memory of this machine: " in o.out
    assert not query(options, 3, env={"EMU_GPU_MEM": str(400 << 30)})["plan"][0]["fits"]


@emulated
def test_header():
    """An emulated run prints its settings at once; a second signal ends it during the start."""
    process = begin("-i train.bin -e l6h6c384t64 -b 4", "\ncommand  ")
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: (signals := re.search(r"ShdPnd:\s*(\w+)", Path(
            "/proc/%d/status" % process.pid).read_text())) is None or not int(signals[1], 16))
    assert process.wait(LIMIT_S) in (128 + signal.SIGTERM, -signal.SIGTERM)


@pytest.mark.parametrize("options", ["--dtype fp32 -r norm", "--dtype bf16 -r block", "-w none",
    "--dtype fp16", "--dtype fp16 -t 1", "--offload " + EVERY_STATE])
def test_check(options):
    """--check compares 17 numbers with the CPU. A single token's scaled fp16 gradients overflow."""
    options += " -b 1 -e l2h2c64t64" if "-t" in options else " -b 2 -e l2h2c32t16"
    assert succeeds("-i train.bin --check " + options).count("  ok\n") == 17


def test_eval():
    """--eval gives the same bytes in both programs, and needs only the memory of a forward pass."""
    Path("e.bin").write_bytes(eval_file(questions(3, 50257, 2)))
    options = "-e l1h1c16t16 --eval e.bin --json -b 3"
    assert succeeds(options + " --dtype fp32") == succeeds(on_cpu(options))
    half = succeeds(options)
    assert succeeds(options + " --dtype fp16 -w none") == succeeds(options + " --dtype fp16")
    if is_emulated():
        Path("gpt2.bin").write_bytes(shard([995] * 400, GPT2))
        least = total("-i gpt2.bin -e l1h1c16t16 -b 1 -r block --moments bf16 -w none --logit-rows "
                      "1 --offload none")
        assert succeeds(options, env={"EMU_GPU_MEM": str(least - 1)}) == half
        refused(options, "--eval needs weights and one forward pass", 3, env={"EMU_GPU_MEM": "2M"})


def weights(folder, number):
    """The weights of a checkpoint as numbers, without the low halves of the master weights."""
    members = tensors(checkpoint(number, folder)[MODEL])[1]
    return [*itertools.chain(*values_of(members).values())]


def distance(a, b):
    """The norm of the difference divided by the norm of b."""
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b)) / sum(y * y for y in b))


RESUMED = TINY + "-j val.bin -v 3 -d 64 -x 6 -n 3 -y 1 -s 6 -g 4 --quiet -o "


def resume(folder, more, start=lambda arguments: arguments):
    """Repeats a run from step 3 on."""
    shutil.rmtree(step(6, folder))
    succeeds(start(RESUMED + folder + more))
    assert log_steps(folder)[-3:] == [4, 5, 6]


@emulated
def test_resume_types():
    """A resumed run keeps the types, logit rows and workspace chosen first; lacks are named."""
    options = "-i train.bin -e l1h1c16t16 -b 2 -v 0 --tune 0 "
    t4, lacks = {"EMU_CC": "75"}, lambda out: re.findall(r"^  --(\S+) is '(\w+)' \(this device's "
                                                        r"default\), was '(\w+)'$", out, re.M)
    succeeds(options + "-x 8 -n 4 -o whole --workspace 1MiB --logit-rows 16", env=t4)
    shutil.copytree("whole", "out")
    shutil.rmtree(step(8))
    assert not lacks(succeeds("-o out -y --tune 0"))  # on a card whose default is bf16
    assert training_state(8) == training_state(8, "whole")
    succeeds(options + "-x 4 -w none --moments bf16 -o bf16")
    shutil.copytree("bf16", "cpu")
    out = succeeds("-o bf16 -y -x 6 --tune 0", env=t4)
    assert lacks(out) == [("dtype", "fp16", "bf16"), ("grad-dtype", "fp32", "bf16"),
                          ("moments", "fp32", "bf16"), ("master", "split", "none")]
    out = succeeds(on_cpu("-o cpu -y -x 6"))
    assert lacks(out)[-3:] == [("dtype", "fp32", "bf16"), ("grad-dtype", "fp32", "bf16"),
                               ("moments", "fp32", "bf16")]
    assert log_steps("cpu") == [1, 2, 3, 4, 5, 6]
    refused("-o bf16 -y -x 8 --dtype bf16", "--dtype bf16 is not supported on", env=t4)
    succeeds(options + "-x 1 -o split")
    succeeds("-o split -y -x 2 --moments bf16", "\nconverting the fp32 moments in split/step-")


@pytest.mark.parametrize("types", [" --dtype bf16", " --dtype fp32", " --moments bf16 -w none"])
def test_resume(types):
    """A run resumed at another recompute level is bit-identical to an uninterrupted one."""
    succeeds(RESUMED + "out" + types)
    end = training_state(6)
    resume("out", types + " -r block")
    assert training_state(6) == end


def test_exchange():
    """Each program resumes the other's checkpoints and reaches the same result up to rounding."""
    succeeds(RESUMED + "gpu --dtype fp32")
    gpu = weights("gpu", 6)
    resume("gpu", "", on_cpu)
    assert distance(weights("gpu", 6), gpu) < 1e-5
    succeeds(on_cpu(RESUMED + "cpu"))
    cpu = weights("cpu", 6)
    resume("cpu", " --dtype fp32 -r norm")
    assert distance(weights("cpu", 6), cpu) < 1e-5
    resume("cpu", " --dtype bf16")
    assert distance(weights("cpu", 6), cpu) < 1e-2
    shutil.rmtree(step(6, "cpu"))
    succeeds("-i train.bin -e l2h2c16t16 -b 2 -d 64 -x 6 -y 1 -o cpu --dtype bf16 -w none "
             "--moments bf16", *("converting the fp32 %s in cpu/step-00000003 to bf16" % what
                       for what in ("weights", "moments")))


def test_exchange_master():
    """bf16 weights and their masters' low halves keep every bit of the CPU's weights."""
    usual = "-i train.bin -e l2h2c16t16 -b 2 -d 64 -y 1 --quiet -o cpu -x "
    succeeds(on_cpu(usual + "2"))
    start = weights("cpu", 2)
    for more, same in (" --dtype bf16", True), (" --dtype bf16 -w none", False):
        run(usual + "3 -l 0" + more)
        run(on_cpu(usual + "4 -l 0 --dtype fp32 -w split"))
        assert (weights("cpu", 4) == start) == same
        for number in 3, 4:
            shutil.rmtree(step(number, "cpu"))


# -b auto, the default with -d, is the largest micro-batch that divides each GPU's share of a step
# and fits the card without recomputation, however much memory is free. `spare`: the card's bytes
# beyond the plan for 8 sequences and the libraries' reserve; None: a large card.
@emulated
@pytest.mark.parametrize("options, spare, batch", [
    ("-d 384", None, 24), ("-d 384 -b auto", None, 24), ("-d 384 -b 2", None, 2), ("", None, 4),
    ("-b auto", None, 4), ("-d 384 --gpus 2", None, 12), ("-d 352 --gpus 2", None, 11),
    ("-d 48", None, 3), ("-d 384", 0, 8), ("-d 384", -1, 6)])
def test_batch(options, spare, batch):
    eight = total("-i train.bin -e l1h1c16t16 -d 384 -b 8 -r none")
    memory = (4 << 30) if spare is None else (1 << 30) + eight + spare
    out = succeeds("-i train.bin -e l1h1c16t16 -x 1 " + options, env={"EMU_GPU_MEM": str(memory)})
    assert re.search(r"\nstep     .* x B (\d+) x T ", out)[1] == str(batch), out


@emulated
def test_batch_resume():
    """A resumed run keeps the micro-batch of its checkpoint if it divides the step."""
    options = "-i train.bin -e l1h1c16t16 -d 384 -o out -y 1 -x "
    eight = (1 << 30) + total("-i train.bin -e l1h1c16t16 -d 384 -b 8 -r none")
    large = {"EMU_GPU_MEM": str(4 << 30)}
    batch = lambda more, env=large: int(re.search(r"\nstep     .* x B (\d+) x T ", succeeds(
        options + more, env=env))[1])
    assert batch("1", {"EMU_GPU_MEM": str(eight)}) == 8
    assert [batch("2"), batch("3 --gpus 2"), batch("4 -b 6")] == [8, 12, 6]
    succeeds("-i train.bin -e l1h1c16t16 -d 384 -x 1 -b 8 -o given", "finished", env=large)
    assert losses("given") == losses()[:1]
    refused(options + "4 -b auto8", "--batch (-b): invalid value 'auto8'; expected an integer")
    refused("-i train.bin -e l1h1c16t16 -d 100", "is not a multiple of B x T x ranks", env=large)


# Choices of matmul algorithms. A table of times replaces the emulated device's clock: EMU_LT_TIMES
# has one digit per algorithm, and the first algorithm is the reference. EMU_LT_WRONG=n makes the
# n-th one wrong, which shows whether a run uses it: right ones all give the same bits.
CHOOSING = SMALL + "-x 4 -n 2 -y 1 -o out "


def choices():
    return Path("cache/train_gpt2/choices")


def tuned(arguments, expected="", **env):
    """Output of a run in which algorithms are timed."""
    o = run(arguments, env=env)
    assert o.status == 0 and expected in o.out, o
    return o.out


@emulated
@pytest.mark.parametrize("times, fastest", [("951", 3), ("915", 2)])
def test_choices(times, fastest):
    """The fastest algorithm is used. The file has a line per matmul, which the next start reads."""
    tuned(CHOOSING, EMU_LT_TIMES=times)
    end, kept = losses(), choices().read_text()
    chosen = [line.split("=")[0] for line in kept.splitlines()]
    assert len(chosen) == len(set(chosen)) > 10
    # The choices in the file are used, not those that this start would make.
    for wrong in 2, 3:
        shutil.rmtree("out")
        tuned(CHOOSING, EMU_LT_TIMES="159", EMU_LT_WRONG=str(wrong))
        assert choices().read_text() == kept
        assert (losses() != end) == (wrong == fastest), wrong
    shutil.rmtree("cache")
    tuned(SMALL + "-x 1 --tune 0", EMU_LT_TIMES="951")
    assert not choices().exists()


@emulated
def test_choices_fp8():
    """Every fp8 matmul is timed: its line changes with the times."""
    command, lines = "-i train.bin -e l2h2c64t64 -b 2 -x 1 -v 0 --matmul fp8", []
    for times in "159", "951":
        tuned(command, EMU_LT_TIMES=times, EMU_CC="89")
        lines.append({line for line in choices().read_text().splitlines() if "28>" in line})
        shutil.rmtree("cache")
    assert len(lines[0]) > 5 and not lines[0] & lines[1]


@emulated
def test_choices_not_used():
    """An algorithm that is slower or wrong is not used; one that is refused is passed over."""
    tuned(CHOOSING, EMU_LT_TIMES="199")
    plain = losses()
    for env, same in (({"EMU_LT_TIMES": "159"}, True), ({"EMU_LT_TIMES": "951"}, True),
                      ({"EMU_LT_TIMES": "159", "EMU_LT_REFUSE": "2"}, False)):
        for folder in "cache", "out":
            shutil.rmtree(folder)
        tuned(CHOOSING, EMU_LT_WRONG="3", **env)
        assert (losses() == plain) == same, env


@emulated
def test_choices_old():
    """Lines of earlier versions, one per algorithm, are ignored; choices are added after them."""
    tuned(CHOOSING, EMU_LT_TIMES="951")
    old = re.sub("=h(.*)", r"#\1=9.000", choices().read_text())
    choices().write_text(old)
    shutil.rmtree("out")
    tuned(CHOOSING, EMU_LT_TIMES="951")
    text = choices().read_text()
    assert text.startswith(old) and text.count("=h") == old.count("=9.000") > 10


@emulated
def test_choices_resume():
    """A run resumes with its checkpoint's choices, or says that it uses its own."""
    differ = " differ from those in out/step-00000002; losses may differ due to rounding\n"
    tuned(CHOOSING, EMU_LT_TIMES="951")
    end = training_state(4)

    def again(more="", **env):
        shutil.rmtree(step(4))
        shutil.rmtree("cache", ignore_errors=True)
        return tuned(CHOOSING + more, EMU_LT_TIMES="159", **env)

    assert differ not in again() and training_state(4) == end
    again("--quiet", EMU_LT_WRONG="3")
    assert training_state(4) != end, "it ran another algorithm"
    for more, env in ("", {"EMU_SMS": "4"}), ("--workspace 1MiB ", {}), ("--workspace 3MiB ", {}):
        assert differ in again(more, EMU_LT_WRONG="3", **env)
        assert training_state(4) == end, "its own are right"


@emulated
def test_choices_workspace():
    """Choices for one workspace size are not used for a size whose digits are a prefix of it."""
    tuned(CHOOSING + "--workspace 12345678", EMU_LT_TIMES="951")
    shutil.rmtree(step(4))
    shutil.rmtree("cache")
    tuned(CHOOSING + "--workspace 1234567", " differ from those in out/step-00000002; losses")


ATTENTION = "-i train.bin -e l1h1c64t64 -b 2 -x 2 "


def chosen(folder):
    """The wgmma attention kernels recorded in a checkpoint."""
    text = tensors(checkpoint(2, folder)[STATE])[0]["matmul"]
    return [word for word in text.split(" ") if word in ("forward", "dq", "dkv")]


@emulated
def test_kernels():
    """Attention uses wgmma on Hopper for bf16 heads of 64, except with --tune 0 or after it."""
    for name, options, env in (
            ("fast", ATTENTION, {}), ("plain", ATTENTION + "--tune 0", {}),
            ("ampere", ATTENTION, {"EMU_CC": "80"}), ("fp32", ATTENTION + "--dtype fp32", {}),
            ("small", ATTENTION.replace("h1", "h2"), {})):
        succeeds(options + " -o " + name, env=env)
        assert chosen(name) == (["forward", "dq", "dkv"] if name == "fast" else []), name
    assert losses("plain") == losses("ampere") == pytest.approx(losses("fast"), rel=1e-3)
    for name in "fast", "plain":
        succeeds("-i train.bin -x 4 -n 2 -y --tune %d -o %s" % (name == "plain", name))
        assert chosen(name) == (["forward", "dq", "dkv"] if name == "fast" else []), name


@emulated
def test_stopped():
    """A signal ends the start cleanly: what was measured is kept, nothing else is recorded."""
    process = start(CHOOSING, env={"EMU_LT_TIMES": "951"})
    wait_until(choices().exists)
    stopped(process, signal.SIGTERM)
    kept = choices().read_text()
    shutil.rmtree("out", ignore_errors=True)
    shutil.rmtree("cache")
    tuned(CHOOSING, EMU_LT_TIMES="951")
    assert choices().read_text().startswith(kept)


@emulated
def test_no_cache():
    """Without a folder for the file, a run uses the default kernels and still succeeds."""
    for folder in "/proc/none", "/dev/null":
        o = run(ATTENTION, env={"EMU_LT_TIMES": "951", "XDG_CACHE_HOME": folder})
        assert o.status == 0 and "cannot write to the cache folder" in o.err


def test_batches():
    """An invalid batch ends the run when it is needed."""
    succeeds(SMALL + "-x 3 --shuffle 0 -o plain")
    data = Path("train.bin").read_bytes()
    at = HEADER + 2 * 70  # in the fifth sequence, part of step 3
    Path("odd.bin").write_bytes(data[:at] + struct.pack("<H", 300) + data[at + 2:])
    refused("-i odd.bin -e l1h1c16t16 -b 2 -x 4 --shuffle 0 -o odd --quiet", "token 70 is 300, "
            "out of range for a vocabulary of 257; the run stopped after step 2, which was saved")
    assert losses("odd") == losses("plain")[:2] and names("odd", "step") == [step(2).name]


def test_generate():
    """In fp32, the CPU program's text, even beyond the 16 positions; the plan has no gradients."""
    rule = " -g 40 --seed 5 --temperature 0.8 --prompt=abc"
    out = succeeds("-i train.bin -e l2h2c16t16 -b 2 -x 40 -l 3e-3 -s 40 -o out --dtype fp32" + rule)
    generate = "--generate -e out/step-00000040 --quiet" + rule
    text = succeeds(generate + " --dtype fp32")
    assert len(text) > 20 and text == succeeds(on_cpu(generate))
    assert "--- sample after step 40 ---\n" + text[:-1] in out
    assert len(succeeds(generate)) > 4
    plan = succeeds(generate + " --plan", "KV cache")
    assert not [word for word in ("gradients", "moments", "master") if word in plan]


def test_fp16():
    """fp16 is chosen on a GPU without bf16. A step of one token overflows with the initial loss
    scale, so the scale falls and the step is skipped. Resuming with another -r and with states in
    host memory gives the same bytes and scales; resuming with another type drops the scale."""
    old = {"EMU_CC": "75"} if is_emulated() else {}
    options = ("-i train.bin -e l2h2c16t16 -b 1 -t 1 -v 0 -n 1 -o out -y 1 -x 8"
               + ("" if is_emulated() else " --dtype fp16"))
    out = succeeds(options, ", fp16; ", env=old)
    assert re.search(r"SKIPPED,? +loss scale 2\^15\n", out)
    scales = lambda: [e["loss_scale_log2"] for e in log() if "loss" in e][-8:]
    want, end = scales(), training_state(8)
    assert want[:2] == [15, 15] and want[7] < 15 and not step(1).exists() and step(2).exists()
    for more, first in (" -r block", 3), (" --offload master,moments", 6):
        for number in range(first, 9):
            shutil.rmtree(step(number), ignore_errors=True)
        succeeds(options + more, env=old)
        assert training_state(8) == end and scales()[first - 8:] == want[first - 8:]
    shutil.rmtree(step(8))
    succeeds(options + " --dtype fp32",
             "ignoring the fp16 loss scale in out/step-00000007 (2^%d)" % want[6])
    succeeds("--generate -e out/step-00000008 --dtype fp16 -g 4 --quiet")
    assert "master" not in succeeds("--generate -e out/step-00000008 --dtype fp16 --plan", "; fp16")


def test_fp16_fails():
    """Skips while the loss scale falls do not count; if no scale helps, the run ends."""
    refused("-i train.bin -e l2h2c16t16 -b 2 -l 1 -c 11 -k constant -x 90 --dtype fp16 --max-skips "
            "3 -v 0 -n 1 --quiet -o out", "--max-skips: 3 consecutive steps were skipped")
    steps = [e for e in log() if "loss" in e]
    last = max(e["step"] for e in steps if not e["skipped"])
    assert len(steps) - last > 3 and steps[-1]["loss_scale_log2"] == 1
    assert step(last).exists() and not step(last + 1).exists()


def test_learns():
    """100 losses in bf16 are within 2 % of the CPU's; means of five in fp16 within 0.5 %."""
    text = [97 + (i * i // 7 + i % 11) % 20 for i in range(30000)]
    Path("t.bin").write_bytes(shard(text, BYTES))
    options = "-i t.bin -e l2h2c64t64 -b 2 -x 100 -l 1e-3 -u 20 -v 0 -r gelu --quiet -o "
    succeeds(on_cpu(options + "cpu"))
    want = losses("cpu")
    succeeds(options + "bf16")
    assert losses("bf16") == pytest.approx(want, rel=0.02) and want[-1] < 0.6 * want[0]
    succeeds(options + "fp16 --dtype fp16")
    mean = lambda values: [sum(values[i:i + 5]) / 5 for i in range(0, 100, 5)]
    assert mean(losses("fp16")) == pytest.approx(mean(want), rel=0.005)


@pytest.mark.parametrize("more", ["", pytest.param(" --gpus 2 -z 2", marks=emulated)])
def test_own_tokens(more):
    """With 1,000 custom tokens, numbers and texts are the CPU program's, on one GPU and on two."""
    write_own_data()
    options = ("-i mine_train.bin -j mine_val.bin -e l2h2c32t16 -b 2 -d 64 -x 24 -l 1e-2 -v 24 "
               "--quiet -o ")
    succeeds(on_cpu(options + "cpu"))
    succeeds(options + "out --dtype fp32" + more)
    for key in "loss", "grad_norm", "val_loss":
        want, got = series(key, "cpu"), series(key)
        assert want and got == pytest.approx(want, rel=1e-4, abs=1e-6)
    generate = "--generate --temperature 0 -g 7 --quiet --prompt=Can -e out/step-00000024"
    text = succeeds(generate + " --dtype fp32")
    assert len(text) > 10 and text == succeeds(on_cpu(generate))
    if not more:
        succeeds(options + "bf16 --dtype bf16")
        assert series("val_loss", "bf16")[0] < 4  # ln 1000 is 6.9
