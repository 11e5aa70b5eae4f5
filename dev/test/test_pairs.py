"""Pairs of conditions, drawn from tables, on the emulated device. A condition that must not change
numbers leaves every number of a run with the other condition as it was."""

import program
from files import *

pytestmark = [pytest.mark.gpu, pytest.mark.emulated]

# Change no number of a step. Samples of 20 tokens slide over T = 16.
NEUTRAL = {
    "eval": "-j val.bin -v 2 -m 3", "file": "-j val.bin -v 2 -m 0", "lines": "--log-every 2",
    "samples": "-s 2 -g 20 --temperature 0.7 --prompt abc", "recompute": "-r block:1,mlp",
    "offload": "--offload moments,residuals", "host": "--offload weights,gradients,moments",
    "checkpoints": "-n 1 --keep 1"}
# Change numbers.
OTHER = {
    "documents": "-i documents.bin", "tokens": "-i mine_train.bin", "order": "--shuffle 0",
    "padding": "-e padded", "muon": "--optimizer muon", "no master": "-w none",
    "moments": "--moments bf16", "fp32": "--dtype fp32", "fp16": "--dtype fp16",
    "clip": "--clip 0.1 --skip-zscore 3", "odd": "-t 13 -d 52", "one batch": "-a 1"}
# Change numbers by rounding.
RANKS = {"ranks": "--gpus 2", **{zero: "--gpus 2 " + zero for zero in ("-z 1", "-z 2", "-z 3")}}
TABLE = {**NEUTRAL, **OTHER, **RANKS}
REFUSED = {("offload", "host"), ("documents", "tokens"), ("eval", "tokens"), ("fp32", "fp16")}
REFUSED |= {("eval", "file"), ("file", "tokens"), ("tokens", "padding")}
REFUSED |= {("host", ranks) for ranks in RANKS} | {*itertools.combinations(RANKS, 2)}
REFUSED |= {(a, b) for a in ("no master", "moments") for b in ("fp32", "fp16")}
PAIRS = [pair for pair in itertools.combinations(TABLE, 2) if pair not in REFUSED]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns the numbers of a run by step and kind, and its last weights and moments."""
    folder, known = tmp_path_factory.mktemp("pairs"), {}

    def numbers(*conditions):
        if conditions not in known:
            os.chdir(folder)
            write_corpus()
            write_own_data()
            shape = 2, 1, 32, 16, 320
            write_model("padded", safetensors({}, hugging_face(shape)), config_text(shape))
            tokens = [256, 97, 98, 99, 256, 100, 256, *range(97, 120)] * 60
            Path("documents.bin").write_bytes(shard(tokens, BYTES))
            out = "run%d" % len(known)
            line = "-i train.bin -e l2h1c32t16 -b 1 -d 64 -x 2 -l 3e-3 --quiet -o " + out
            for name in conditions:
                for option in re.findall(r"(-\S+ \S+)", TABLE[name]):
                    line, found = re.subn(r"(?<=\S )?%s \S+" % option.split()[0], option, line)
                    line += "" if found else " " + option
            succeeds(line)
            events = {(e["step"], key): e[key] for e in log(out) if "step" in e
                      for key in ("loss", "grad_norm", "val_loss", "sample") if key in e}
            known[conditions] = events, training_state(2, out)
            if "file" in conditions:  # --eval of this file has the loss of the run's validation
                same = re.findall("--dtype \\S+|-t 13", line)
                score = query("-e %s -b 1 --eval val.bin %s" % (out, " ".join(same)))
                assert events[2, "val_loss"] == pytest.approx(score["loss"], rel=1e-6), conditions
        return known[conditions]

    return numbers


def test_pairs(runs):
    """Ten random pairs; 100 with ALL=1. If neither changes nothing, a third one does."""
    seed = random.randrange(10**6)
    pick = random.Random(seed)
    for a, b in pick.sample(PAIRS, 100 if ALL else 10):
        third = pick.choice([c for c in NEUTRAL if (c, a) in PAIRS and (c, b) in PAIRS] or [a])
        pairs = [((a,), (a, b), b), ((b,), (a, b), a)]
        pairs += [] if a in NEUTRAL else [((a, b), (third, a, b), third)]
        for less, more, added in pairs:
            (want, before), (got, after) = runs(*less), runs(*more)
            common = [key for key in want if key in got]
            assert len(common) >= 2 or "lines" in more, (seed, more)
            if added in NEUTRAL:
                assert before == after and all(want[k] == got[k] for k in common), (seed, more)
            elif added in RANKS:
                for key in (key for key in common if key[1] != "sample"):
                    close = pytest.approx(want[key], rel=1e-5 if "fp32" in more else 2e-2)
                    assert got[key] == close, (seed, more, key)
