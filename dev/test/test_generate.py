"""--generate: reproduces a training run's sample, reads prompts from stdin, stops at the
end-of-text token, and refuses invalid options."""

from files import *

SAMPLING = "--seed 2 --top-k 40 --temperature 0.9 "
TRAINED = "--generate -e out/step-00000300 " + SAMPLING


@pytest.fixture
def sample():
    """Trains a model of 16 positions and returns the sample of 60 tokens that its run printed. Each
    letter is one to three after the last, so that a sample depends on its context."""
    letters = itertools.accumulate(random.Random(1).choices((1, 2, 3), k=3000))
    Path("train.bin").write_bytes(shard([97 + i % 26 for i in letters], BYTES))
    out = succeeds(TINY + "-x 300 -l 1e-2 -s 300 -o out -g 60 %s--prompt=abc" % SAMPLING)
    return re.search(r"--- sample after step 300 ---\n(.*?)\n---\n", out, re.S)[1]


def made(arguments, **more):
    """The text that --generate prints; with --quiet nothing else is printed."""
    o = run(arguments, **more)
    assert o.status == 0 and ("--quiet" in arguments) == (o.err == ""), o
    return o.out


def test_sample(sample):
    """--generate repeats the run's own sample up to its end-of-text token, from a checkpoint or a
    copy of its weights and config, with any number of threads. Only the first of several is it."""
    text = made(TRAINED + "-g 60 --prompt abc")
    assert len(text) > 30 and sample.startswith(text[:-1])
    err = run(TRAINED + "-g 60 --prompt abc").err
    assert "; out/step-00000300: " in err and "untrained" not in err
    size = re.search(r"; ([\d.]+ .iB)\n", err)[1]
    plan = succeeds(TRAINED + "-g 60 --plan", size, "KV cache")
    assert "gradients" not in plan and "moments" not in plan
    for threads in "1", "2", "3":
        assert made(TRAINED + "-g 60 --prompt abc --quiet",
                    env={"OMP_NUM_THREADS": threads}) == text
    # Samples depend on the step, which is in the folder's name.
    shutil.copytree("out/step-00000300", "hf/step-00000300", ignore=lambda *_: [STATE])
    for e in "out/step-00000300/" + MODEL, "out/step-00000300/", "hf/step-00000300":
        assert made("--generate -g 60 --prompt abc --quiet %s-e %s" % (SAMPLING, e)) == text
    shutil.copytree("hf/step-00000300", "hf/step-00000299")
    assert made("--generate -g 60 --prompt abc --quiet %s-e hf/step-00000299" % SAMPLING) != text
    three = made("--generate -e hf/step-00000300 -g 60 %s--prompt abc --samples 3" % SAMPLING)
    assert three.startswith(text + "---\n") and len(set(three.split("\n---\n"))) == 3
    # Without randomness all are the same, although each is longer than the KV cache.
    greedy = made("--generate -e hf/step-00000300 -g 60 --temperature 0 --quiet --samples 3")
    assert len(greedy) > 100 and len(set(greedy.removesuffix("\n").split("\n---\n"))) == 1


def test_stdin(sample):
    """Each line of stdin is a prompt, including empty lines and a last line without a newline."""
    texts = []
    for prompt in "abc", "", "caf\xe9\udcff":
        texts.append(made(TRAINED + "--quiet --prompt=" + prompt))
        assert texts[-1].startswith(prompt)
    want, stdin = "---\n".join(texts), TRAINED + "--quiet --prompt -"
    assert made(stdin, stdin="abc\n\ncaf\xe9\udcff") == want
    o = run(TRAINED + "--prompt -", stdin="")
    assert o.status == 0 and o.out == ""
    o = run(stdin, stdin="abc\n12345678901234567\nd\n")
    assert o.status == 1 and want.startswith(o.out) and o.out
    assert "--prompt: '12345678901234567" in o.err and " has 17 tokens" in o.err
    assert made(stdin, stdin="a\0b").startswith("a\0b")


def test_newest():
    """Without -e, the model is the newest checkpoint in runs/; of a run's folder, the newest."""
    refused("--generate", "--generate: no checkpoint found in runs/; use --model (-e)")
    for name, steps in ("old", 2), ("new", 1):
        succeeds(TINY + "--quiet -n 1 -o runs/%s -x %d" % (name, steps))
    os.utime("runs/old/step-00000002/manifest.json", (1, 1))
    os.utime("runs/new/step-00000001/manifest.json", (2, 2))
    assert "; runs/old/step-00000001: " in run("--generate -g 1").err
    assert "; runs/old/step-00000002: " in run("--generate -g 1 -e runs/old").err


def test_end():
    """A model that memorized a line prints it up to the end of text; an untrained one is named."""
    Path("line.bin").write_bytes(shard([*b"abcdefg", 256] * 50, BYTES))
    succeeds("-i line.bin -e l1h2c32t16 -b 4 -x 150 -l 1e-2 --quiet -o out")
    generate = "--generate -e out/step-00000150 --temperature 0 "
    assert made(generate + "--prompt abc") == "abcdefg\n"
    assert made(generate + "-g 2 --quiet") == "ab\n"
    assert "; l1h1c8t16: 3,072 untrained parameters; " in run( "--generate -e l1h1c8t16 -g 3").err
    odd = 1, 1, 8, 16, 300
    write_model("odd", safetensors({}, hugging_face(odd)), config_text(odd))
    refused("--generate -e odd", "odd: cannot find its merges; use --tokenizer FILE")


def test_own():
    """A model of 1,000 custom tokens trains, samples, saves its tokenizer, resumes with the same
    bits, and generates text from its checkpoint, or from a copy of two files and the merges."""
    texts = write_own_data()
    line = b"".join(texts).decode()
    options = ("-i mine_train.bin -j mine_val.bin -e l1h2c32t16 -b 4 -l 2e-2 -k constant -n 60 -m "
               "3 -v 120 --temperature 0 -g 8 -y 1 ")
    succeeds(options + "-x 120 -s 120 -o out", "vocabulary 1000 (padded to 1024)",
             line + "<|endoftext|>\n---")
    folder = step(120)
    assert (folder / "merges.txt").read_text() == stories_merges()
    vocabulary = json.loads((folder / "vocab.json").read_text())
    assert vocabulary["<|endoftext|>"] == 999 and vocabulary[merges_word(texts[0])] == 262
    config = json.loads((folder / CONFIG).read_text())
    assert config["vocab_size"] == 1000 and config["eos_token_id"] == 999
    for steps in 60, 120:
        succeeds(options + "-x %d -o half" % steps)
    assert training_state(120, "half") == training_state(120)
    generate = "--generate --temperature 0 --quiet -e "
    assert made(generate + str(folder)) == line + "\n"
    write_model("copy", (folder / MODEL).read_bytes(), (folder / CONFIG).read_text())
    refused(generate + "copy", "copy: cannot find its merges; use")
    assert made(generate + "copy --tokenizer mine_merges.txt") == line + "\n"
    Path("copy/merges.txt").write_text(stories_merges())
    assert made(generate + "copy/" + MODEL) == line + "\n"
    for model in "copy", "l1h1c8t16v1000":
        succeeds("-i mine_train.bin -e %s -b 2 -x 1 --quiet" % model)
    succeeds("-e d12 --plan --gpu t4 -i mine_train.bin")


@pytest.mark.parametrize("arguments, expected", [
    ("-y 1 -o out", "--generate does not support --output"),
    ("-x 3", "does not support --steps"), ("-i train.bin", "does not support --train-data"),
    ("-b 2", "does not support --batch"), ("-s 0", "does not support --sample-every"),
    ("--eval e.bin", "does not support --eval"),
    ("--offload weights", "does not support --offload"),
    ("-t 17", "--seq-len (-t): 17 exceeds the model's maximum of 16"),
    ("--prompt=12345678901234567", "' has 17 tokens, but --seq-len (-t) is 16"),
    ("-t 4 --prompt=12345", "--prompt: '12345' has 5 tokens, but --seq-len (-t) is 4"),
    ("--tokenizer v", "--tokenizer: l1h1c8t16 uses single bytes as tokens")])
def test_refused(arguments, expected):
    """Options without effect on generation, and a prompt longer than T, are refused."""
    refused("--generate -e l1h1c8t16 " + arguments, expected)


def test_whole_prompt():
    assert run("--generate -e l1h1c8t16 -g 1 --prompt=1234567890123456").status == 0
    refused("--samples 2", "--samples requires --generate")


def test_signal():
    """A signal or closed pipe ends --generate like any program; a full disk is an error."""
    process = begin("--generate -e l2h2c64t64 -g 1000000 --temperature 2", "",
                    before=default_signal())
    wait_until(lambda: os.path.getsize("stdout") > 200)
    assert stopped(process, signal.SIGINT)[0] == -signal.SIGINT
    reader, writer = os.pipe()
    os.close(reader)
    assert run("--generate -e l1h1c8t16 -g 100000", stdout=writer).status == -signal.SIGPIPE
    os.close(writer)
    with open("/dev/full", "w") as full:
        o = run("--generate -e l1h1c8t16 -g 100000", stdout=full)
    assert o.status == 1 and "cannot write to stdout: No space left" in o.err
