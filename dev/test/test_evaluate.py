"""--eval and samples: scores, output lines and JSON; with the vocabulary, samples are text."""

from files import *

RUN = "-i gpt2.bin -e l1h1c8t16 -b 1 -x 1 -s 1 -g 9 "
BEGINS = "--- sample after step 1 ---\n"


@pytest.fixture
def sampled():
    """Trains on GPT-2's tokens; returns the tokens of the sample, which are printed as numbers."""
    Path("gpt2.bin").write_bytes(shard([995] * 400, GPT2))
    return [int(word) for word in succeeds(RUN + "-o bare").split(BEGINS)[1].split("\n")[0].split()]


def test_no_vocabulary(sampled):
    """Without vocab.bpe, samples are numbers, and prompts and other vocabularies are refused."""
    assert len(sampled) == 9
    Path("made").write_text(made_merges())
    for more, expected in {
            "--prompt=Hello": "GPT-2's vocab.bpe; run data/prepare.sh",
            "--tokenizer absent": "cannot read vocabulary absent",
            "--tokenizer made": "made has 50257 custom tokens (",
            }.items():
        refused(RUN + more, expected)
    refused(TINY + "--tokenizer made", "--tokenizer: train.bin uses single bytes as tokens")


def test_bpe_samples(sampled):
    """With the vocabulary, the same sample is text. --generate finds it beside the weights."""
    Path("vocab").write_text(vocab_bpe())
    tokens = tokens_of_merges(vocab_bpe())
    assert len(tokens) == 50257 and tokens[995] == b" world"
    text = b"".join(tokens[i] for i in sampled).decode(errors="surrogateescape")
    succeeds(RUN + "--tokenizer vocab", BEGINS + text + "\n---\n")
    succeeds(RUN + "--tokenizer vocab --prompt=Hello,\xe9 -o out", BEGINS + "Hello,\xe9")
    assert [e for e in log() if e.get("sample", "").startswith("Hello,\xe9")]
    refused(RUN + "--tokenizer vocab --prompt=1,2,3,4,5,6,7,8,9",
            "--prompt: '1,2,3,4,5,6,7,8,9' has 17 tokens, but --seq-len (-t) is 16")
    generate = "--generate -e bare --temperature 0 --quiet -g 3"
    numbers = run(generate).out.split()
    refused(generate + " --prompt=Hello", "GPT-2's vocab.bpe; run data/prepare.sh")
    step(1, "bare").joinpath("merges.txt").write_text(vocab_bpe())
    text = b"".join(tokens[int(number)] for number in numbers)
    assert run(generate).out == text.decode(errors="surrogateescape") + "\n" and len(numbers) == 3
    assert run(generate + " --prompt=Hello,\xe9").out.startswith("Hello,\xe9")


def test_eval_command():
    """--eval's lines and JSON are as documented and do not depend on B; a small T is reported."""
    asked = questions(12, 50257, 2)
    command = "-e l1h1c16t16 --eval e.bin "
    Path("e.bin").write_bytes(eval_file(asked))
    longest = max(len(context) + len(c) for _, context, completions in asked for c in completions)
    out = succeeds(command + "-b 4", "12 examples of at most %d tokens; B 4, T 16\n" % longest)
    line = out.splitlines(keepends=True)[-1]
    numbers = [float(x) for x in re.fullmatch(
        r"e.bin: 12 examples, accuracy ([\d.]+) % \+- ([\d.]+), acc_norm ([\d.]+) % \+- ([\d.]+)\n",
        line).groups()]
    for p, error in (numbers[:2], numbers[2:]):
        assert error == pytest.approx(math.sqrt(p * (100 - p) / 12), abs=0.006)
    assert out.count("\n") == 3 + 9 + 1
    for b in 1, 7, 50:
        assert succeeds(command + "--quiet -b %d" % b) == line
    found = query(command + "-t 12")
    assert [found[key] for key in ("file", "model", "sequence", "examples", "of")] == [
        "e.bin", "l1h1c16t16", 12, 12, 12]
    assert found["acc_norm"] == pytest.approx(found["correct_norm"] / 12)
    assert found["correct"] == round(numbers[0] * 0.12)
    succeeds(command + "--quiet -t 5", "rows to T + 1 = 6 tokens")
    refused(command + "-t 4", ": a completion of 5 tokens exceeds --seq-len (-t) 4")
    refused(command + "-t 17", "--seq-len (-t): 17 exceeds the model's maximum of 16")
    asked[7][2][3][-1] = 50257
    Path("e.bin").write_bytes(eval_file(asked))
    refused(command, "e.bin: example 7: token 50257 is outside")


def test_eval_eta():
    """The eta assumes the mean speed, which a pause makes known. --eval can be interrupted."""
    Path("e.bin").write_bytes(eval_file(questions(300, 257, 2)))
    began = time.monotonic()
    process = start("-e l4h4c128t64v257 --eval e.bin -b 1", before=default_signal())
    lines = filter(None, map(re.compile(r"example +(\d+)/300 .* eta (.*)").match, process.stdout))
    next(lines)
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    done, eta = next(lines).groups()
    left = 300 / int(done) - 1    # of the examples scored
    assert 3 * left - 1 <= seconds(eta) <= (time.monotonic() - began) * left + 1
    process.send_signal(signal.SIGINT)
    assert re.search("e.bin: interrupted after .* of 300 examples, acc", process.stdout.read())
    assert process.stderr.read() == "stopping; send the signal again to quit immediately\n"
    assert process.wait(LIMIT_S) == 0


def test_eval_checkpoint():
    """A checkpoint answers the questions that its run memorized."""
    succeeds("-i train.bin --shuffle 0 -e l1h2c32t16 -b 2 -a 1 -x 240 -l 3e-3 --quiet -o out")
    corpus = tokens("train.bin")
    asked = questions(8, 257, 4)
    for i, question in enumerate(asked):
        question[1] = corpus[i:i + 6]
        question[2][question[0]] = corpus[i + 6:i + 9]
    Path("e.bin").write_bytes(eval_file(asked))
    succeeds("-e out/step-00000240 --eval e.bin", ", acc_norm 100.00 % +- 0.00\n",
             "out/step-00000240: vocabulary 257, loaded weights")
    Path("e.bin").write_bytes(eval_file(questions(3, 50257, 2)))
    refused("-e out/step-00000240 --eval e.bin", "outside the model's vocabulary of 257")


@pytest.mark.parametrize("data", ["bytes", "merges"])
def test_eval_tokens(data):
    """The validation loss over all data, and --eval's loss on shards, are the same for any batch
    size, even one larger than the data; nats per byte refer to the bytes of the text."""
    name = "val.bin"
    if data == "merges":
        Path("text").write_text(("It was a sunny day. " * 3 + "\n<|endoftext|>\n") * 99)
        tokenize("--train-bpe 262 --documents -o mine text")
        name = "mine_val.bin"
    train = "-i %s -j %s -e l1h1c8t16 -x 1 -v 1 -m 0 -o out%%d -d 32 -b %%d" % (
        name.replace("val", "train"), name)
    for batch in 1, 2:
        succeeds(train % (batch, batch))
        loss, = series("val_loss", "out%d" % batch)
        for b in 1, 5, 40:
            got = query("-e out1 --eval %s -b %d" % (name, b))
            assert got["loss"] == pytest.approx(loss, rel=1e-6)
            assert got["perplexity"] == pytest.approx(math.exp(got["loss"]))
    assert query("-e out1 --eval %s -m 2 -b 3" % name)["tokens"] == 16 * 6
    os.makedirs("runs"), os.rename("out2", "runs/two")
    o = run("--eval %s --json" % name)    # the newest run
    assert json.loads(o.out) == pytest.approx(got)
    assert o.err == "train_gpt2: the newest run, runs/two/%s\n" % step(1).name
    refused("-e gpt2 --eval " + name, "--eval: -e gpt2 is a shape without weights")
    tokens = array.array("H", Path(name).read_bytes()[1024:])
    windows = (len(tokens) - 1) // 16
    assert got["tokens"] == 16 * windows
    size = [len(t) for t in tokens_of_merges(Path("mine_merges.txt").read_text())[:-1]] if \
        data == "merges" else [1] * 256
    size.append(0)  # <|endoftext|>
    assert tokens.count(len(size) - 1) > 1
    bytes_ = sum(size[t] for t in tokens[1:16 * windows + 1])
    assert got["nats_per_byte"] == pytest.approx(got["loss"] * got["tokens"] / bytes_)
    succeeds("-e out1 --eval " + name, name + ": %(tokens)d tokens, loss %(loss).4f, perplexity "
             "%(perplexity).2f, %(nats_per_byte).4f nats per byte\n" % got)
