"""Whole runs that learn, within the planned memory."""

import program
from files import *

BOTH = pytest.mark.parametrize("fp32", [
    "", pytest.param(" --dtype fp32", marks=pytest.mark.gpu, id="gpu")])
# Relative rounding error allowed for losses and norms below. Measured in 60 steps of either
# program: 2.4e-7 of a loss, 4.7e-7 of a norm.
LOSS, NORM = 1e-6, 1e-5


def test_overfit():
    """One repeated batch is memorized; the sample begins with the prompt; the log is complete."""
    out = succeeds("-i train.bin -j val.bin -e l1h2c32t16 -b 2 -a 1 -x 240 -l 3e-3 -v 60 -m 0 -s "
                   "240 -g 9 --prompt abc --temperature 0 -o out", "\nabc")
    assert series("loss")[-1] < 0.2 and log_steps() == [*range(1, 241)]
    assert [e["step"] for e in log() if "val_loss" in e] == [60, 120, 180, 240]
    sample, = [e for e in log() if "sample" in e]
    assert sample["step"] == 240 and sample["sample"].startswith("abc") and sample["sample"] in out
    assert series("checkpoint") == [str(step(240))]
    assert log()[-1] == {"event": "end", "reason": "finished"}


def test_make_train():
    """150 steps of `make train` without a network, so on the stories, reach the loss asserted here
    and a sample in which nine of ten words exist and sentences end properly. All steps (FULL=1)
    reach the loss stated in dev/train.sh. A uniform guess has loss 6.93."""
    script = (TOP / "dev/train.sh").read_text()
    recipe = re.search(r"\nrecipe=\((.*?)\)", script, re.S)[1].split()
    steps, bound = re.search(r"text=stories_bpe steps=(\d+) loss=([\d.]+)", script).groups()
    steps, reached = (int(steps), float(bound)) if FULL else (150, 1.2017 * 1.1)
    Path("stories.txt").write_text(stories_text())
    tokenize("--train-bpe 1024 --documents -o stories stories.txt")
    out = succeeds("-i stories_train.bin -j stories_val.bin -x %d %s -g 300 -o out --save-every 0"
                   % (steps, " ".join(recipe)))
    assert series("val_loss")[-1] < reached
    sample = re.search(r"--- sample after step %d ---\n(.*?)\n---\n" % steps, out, re.S)[1]
    words_of = lambda text: re.findall(r"[a-z]+", text.lower())
    known, words = set(words_of(stories_text())), words_of(sample)[:-1]
    assert len(words) > 150
    assert sum(word in known for word in words) >= (0.99 if FULL else 0.9) * len(words), sample
    ends = re.findall(r'[.!?](?:"|\s*(.?))', sample)
    proper = sum(not after or after.isupper() or after in "<\"" for after in ends)
    assert len(ends) >= len(words) / 20 and proper >= 0.9 * len(ends), sample


@BOTH
def test_micro_batches(fp32):
    """Micro-batches of 4, 2 and 1 train alike, even past the end of the data."""
    for b in 4, 2, 1:
        succeeds("-i train.bin -e l2h2c16t16 -d 64 -x 60 -u 5 -l 3e-3 --clip 0.5 --quiet -b %d -o "
                 "b%d%s" % (b, b, fp32))
        assert series("loss", "b%d" % b) == pytest.approx(series("loss", "b4"), rel=LOSS)
        assert series("grad_norm", "b%d" % b) == pytest.approx(series("grad_norm", "b4"), rel=NORM)
    losses = series("loss", "b4")
    assert len(losses) == 60 and losses[-1] < losses[0] - 1


def test_seed():
    """--seed decides the order of the data, also for a model that is not initialized."""
    succeeds(TINY + "-x 1 --quiet -o out")
    for seed in 1, 2:
        succeeds("-i train.bin -e out -x 1 -l 0 --quiet --seed %d -o s%d" % (seed, seed))
    assert series("loss", "s1") != series("loss", "s2")


@BOTH
def test_validation(fp32):
    """The validation loss is a mean over sequences, for any batch size; a partial batch counts."""
    T, windows = 16, 11  # the last windows differ from the others
    Path("val").write_bytes(shard([97 + i % 3 if i < 8 * T else i * 37 % 256
                                   for i in range(windows * T + 1)], BYTES))
    Path("same").write_bytes(shard([97 + i % T for i in range(windows * T + 1)], BYTES))

    def validate(file, b, batches):
        folder = "%s_b%dm%d" % (file, b, batches)
        if not Path(folder).exists():
            succeeds("-i train.bin -e l2h2c16t16 -x 8 -l 1e-2 -u 1 -d 64 -v 8 --quiet -j %s -b %d "
                     "-m %d -o %s%s" % (file, b, batches, folder, fp32))
        return series("val_loss", folder)[-1]

    wants = []
    for file, b, batches, same_b, same_batches in (
            ("val", 4, 0, 1, 11), ("val", 4, 99, 1, 11), ("val", 2, 4, 1, 8), ("val", 2, 0, 1, 11),
            ("val", 4, 1, 1, 4), ("val", 1, 0, 1, 11), ("same", 4, 0, 1, 1), ("same", 1, 0, 1, 1)):
        want = validate(file, same_b, same_batches)
        assert validate(file, b, batches) == pytest.approx(want, rel=LOSS), (file, b, batches)
        wants += [want] * (file == "val")
    assert max(wants) > 1.01 * min(wants), "no sequences are harder than others"
    assert validate("val", 1, 0) != validate("val", 1, 10), "the last sequence counts"


def test_resident_memory():
    """Resident memory of a run is within 50 MB of its plan, as README promises."""
    # In a separate process, because the maximum includes that of the process that forked.
    code = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
    command = "-i train.bin -e l2h8c512t32 -b 2 -x 2 -o out --quiet".split()
    used = subprocess.check_output([sys.executable, "-c", code, program.path] + command)
    if not has_sanitizers():
        assert int(used) * 1024 == pytest.approx(log()[0]["plan_bytes"], abs=50e6)


def test_max_skips():
    """After --max-skips skipped steps in a row the run ends with a checkpoint from before them."""
    diverging = TINY + "--quiet -l 1 -c 11 -k constant -v 0 -n 1 -o out "
    err = refused(diverging + "-x 100 --max-skips 7",
                  "--max-skips: 7 consecutive steps were skipped")
    last = log_steps()[-1]
    assert "the run stopped after step %d, which was not saved" % last in err
    assert [e["step"] for e in log() if "checkpoint" in e][-1] == last - 7 > 0
    assert names("out", "step")[-1] == step(last - 7).name
    assert log()[-1] == {"event": "end", "reason": "failed"}
    shutil.rmtree("out")
    refused(diverging + "-x 60", "--max-skips: 20 consecutive steps were skipped")
    shutil.rmtree("out")
    succeeds(diverging + "-x 40 --max-skips 0")
    assert step(40).exists()


def test_skip_zscore():
    """--skip-zscore compares a norm with the last 128; a resumed run skips the same steps."""
    calm, other = [97 + i % 4 for i in range(16 * 400 + 1)], [200, 33, 150, 64, 90, 11, 45, 180] * 4
    calm[16 * 390:16 * 392], calm[16 * 220:16 * 221] = other, other[:16]
    Path("calm.bin").write_bytes(shard(calm, BYTES))
    options = ("-i calm.bin -e l1h2c32t16 -b 1 --shuffle 0 -l 1e-2 -k constant --clip 0.5 "
               "--skip-zscore 6 --max-skips 4 --quiet -y 1 -o ")
    succeeds(options + "out -x 392")
    skipped = [e["step"] for e in log() if e.get("skipped")]
    norms = series("grad_norm")
    assert skipped == [220, 221, 390, 391, 392]  # at most three in a row
    assert max(norms[:128]) > min(norms[389:]) > 3 * max(norms[261:389])
    succeeds(options + "cut -x 380")
    succeeds(options + "cut -x 392")
    assert training_state(392, "cut") == training_state(392)


@pytest.mark.parametrize("file", ["train.bin", "val.bin"])
def test_data_cut(file):
    """If a data file is truncated during a run, every finished step is saved."""
    whole = Path(file).read_bytes()
    options = "-i train.bin -j val.bin -e l2h2c16t16 -b 2 -v 50 -m 0 -k constant --quiet -o out "
    process = start(options + "-x 99999999")
    wait_until(lambda: written("out/log.jsonl").count('"loss":') > 20)
    os.truncate(file, 1100)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and file + ": cannot read tokens" in err
    last = log_steps()[-1]
    assert "the file was truncated while in use; the run stopped after step %d, which was saved" % \
        last in err and (step(last) / MANIFEST).exists()
    Path(file).write_bytes(whole)
    succeeds(options + "-y 1 -x %d" % (last + 5))


def test_many_shards():
    """There may be more shards than a process may open files: the rest are opened for each read."""
    tokens = Path("train.bin").read_bytes()
    for i in range(60):
        Path("many_train_%02d.bin" % i).write_bytes(tokens)
    options = "-i many_train_*.bin -j val.bin -e l1h1c16t16 -b 8 -x 60 -n 30 -v 30 -m 1 -o "
    succeeds(options + "whole")
    low = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    succeeds(options + "out", before=low)
    assert training_state(60) == training_state(60, "whole")
    Path("many_train_59.bin").write_bytes(tokens[:-2])
    refused("-o out -y -x 90", "expected", before=low)


@pytest.mark.parametrize("chosen", [False, True])
def test_waiting(chosen, monkeypatch):
    """The program restarts itself once, for threads that spin briefly, unless the user chose."""
    if "no OpenMP" in succeeds("--version"):
        pytest.skip("no OpenMP")
    for name in "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY":
        monkeypatch.delenv(name, raising=False)
    policy = {"OMP_WAIT_POLICY": "active"} if chosen else {}
    process = begin("-i train.bin -e l1h2c32t16 -b 2 -x 9999999", "\nstep ",
                    env={"OMP_NUM_THREADS": "2", **policy}, before=default_signal())
    about = Path("/proc/%d" % process.pid)
    variables, argv = (about / "environ").read_text(), (about / "cmdline").read_text()
    assert stopped(process, signal.SIGINT)[0] == 0
    assert ("GOMP_SPINCOUNT=" in variables) != chosen and "\0-x\09999999\0" in argv


def test_offload():
    """Where states are placed changes no loss, sample, checkpoint or score, even on resuming."""
    Path("e.bin").write_bytes(eval_file(questions(3, 50257, 2)))
    every = "weights,gradients,moments,residuals"
    options = ("-i train.bin -j val.bin -e l3h1c16t16 -b 2 -d 64 -k constant -v 2 -m 2 -s 2 -g 4 "
               "-r none --offload %s -x %d -y 1 -o %s")
    sample = lambda out: re.findall(r"--- sample after.*?\n---", out, re.S)
    samples = sample(succeeds(options % ("none", 4, "none")))
    end = training_state(4, "none")
    assert len(samples) == 2 and len(series("val_loss", "none")) == 2
    for states in "weights", "gradients", "moments", "residuals", every:
        assert sample(succeeds(options % (states, 4, states))) == samples
        for key in "loss", "val_loss":
            assert series(key, states) == series(key, "none")
        assert training_state(4, states) == end
    for first, second in ("none", every), (every, "none"):
        succeeds(options % (first, 2, "turn-" + first))
        succeeds(options % (second, 4, "turn-" + first))
        assert training_state(4, "turn-" + first) == end
    scores = {succeeds("-e l3h1c16t16 --eval e.bin --json -b 3 --offload " + states)
              for states in (every, "none")}
    assert len(scores) == 1
