"""Tokenizers of other programs and what each file says of its own: the ids of a Hugging Face folder
are kept, files of different tokenizers are refused, and a name that exists is that file. Expected
tokens and settings are those of the tokenizers library 0.23 and transformers 5.24."""

from files import *

MERGES = ["h e", "t he", "a t", "Ġ the", "a n", "Ġ an", "Ġan d", "b at"]
TEXT = "the cat and\né bat<|endoftext|>"
# The library's tokens of the text, as its files write them.
PIECES = "the Ġ c at Ġand Ċ Ã © Ġ bat < | e n d o f t e x t | >".split()
END = "<|endoftext|>"
PLAIN = [WRITTEN[c] for c in BYTES_IN_ORDER] + [merge.replace(" ", "") for merge in MERGES]
ORDERS = {"first": [END] + PLAIN, "last": PLAIN + [END], "reversed": [END, *PLAIN][::-1],
          "shuffled": random.Random(1).sample([END, *PLAIN], 265),
          "others": ["<s>", "<pad>", *PLAIN, "é☃ x", "</s>"],
          "holes": [None, *PLAIN[:100], None, None, *PLAIN[100:], END],
          "bytes": [END] + [x for x in PLAIN if x not in "QZ"]}


def tokenizer_json(ids, **changes):
    """A tokenizer.json; `changes` replace or add members of its parts: part__member=value."""
    extra = [{"id": i, "content": token, "special": True} for token, i in ids.items()
             if token not in PLAIN]
    parts = {"version": "1.0", "added_tokens": extra, "normalizer": None,
             "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
             "post_processor": {"type": "TemplateProcessing", "special_tokens": {}},
             "decoder": {"type": "ByteLevel"},
             "model": {"type": "BPE", "dropout": None, "byte_fallback": False, "vocab": ids,
                       "merges": [merge.split() for merge in MERGES]}}
    for name, value in changes.items():
        part, _, member = name.partition("__")
        if member:
            parts[part] = {**parts[part], member: value}
        else:
            parts[part] = value
    return json.dumps(parts)


def write_tokenizer(folder, form, order, end=END):
    """Writes a tokenizer in one of several forms; returns {token: id}."""
    ids = {token: i for i, token in enumerate(ORDERS[order]) if token}
    Path(folder).mkdir(exist_ok=True)
    if form != "json":
        Path(folder, "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))
    if form == "files":
        Path(folder, "vocab.json").write_text(json.dumps(ids))
    elif form == "added":
        for name, plain in ("vocab.json", True), ("added_tokens.json", False):
            some = {token: i for token, i in ids.items() if (token in PLAIN) == plain}
            Path(folder, name).write_text(json.dumps(some))
    else:
        Path(folder, "tokenizer.json").write_text(
            tokenizer_json(ids, **({"model__merges": MERGES} if form == "both" else {})))
    if end in ids:
        Path(folder, CONFIG).write_text('{"eos_token_id": %s}' % ([ids[end]] if form == "both"
                                                                 else ids[end]))
    return ids


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", ["files", "added", "json", "both"])
def test_ids(form, order):
    """Text gets the folder's ids, in any order, also from the files written beside the shards."""
    end = "</s>" if order == "others" else END
    ids = write_tokenizer("own", form, order, end)
    Path("text").write_text(TEXT)
    options = "--bpe --val-fraction 0 --documents text -o %s --tokenizer "
    want = [ids[piece] for piece in PIECES[:-13]]
    tokenize(options % "a" + "own")
    assert tokens("a_train.bin") == [ids[end]] + want
    tokenize(options % "b" + "a_merges.txt")
    assert Path("b_train.bin").read_bytes() == Path("a_train.bin").read_bytes()
    tokenize("--bpe --val-fraction 0 text -o c --tokenizer own/" +
             ("tokenizer.json" if form == "json" else "merges.txt"))
    assert tokens("c_train.bin") == [ids[piece] for piece in PIECES]
    Path("text").write_text("<s>the</s>the" + TEXT)
    if order == "others":    # special tokens; the library's ids
        tokenize("--bpe --val-fraction 0 text -o s --tokenizer own")
        assert tokens("s_train.bin") == [ids[t] for t in ["<s>", "the", "</s>", "the", *PIECES]]
    if order == "bytes":
        Path("text").write_text("Q")
        o = run([str(TOP / "data/tokenize"), *(options % "d" + "own").split()])
        assert o.status == 1 and "byte value 81, for which the tokenizer has no token" in o.err


def test_others_files():
    """Files whose other settings are not a tokenizer's, and names with a prefix, as GPT-2's."""
    ids = write_tokenizer("own", "files", "holes")
    Path("text").write_text(TEXT)
    want = [ids[END]] + [ids[piece] for piece in PIECES[:-13]]

    def agrees(tokenizer):
        tokenize("--bpe --val-fraction 0 --documents text -o a --tokenizer " + tokenizer)
        assert tokens("a_train.bin") == want

    for config in ('{"eos_token_id": -1}', '{"eos_token_id": []}', '{"eos_token_id": "x"}',
                   '{"eos_token_id": null, "model": {"type": "GPT2"}, "normalizer": "x"}', "[]"):
        Path("own", CONFIG).write_text(config)
        agrees("own")
    for name in "merges.txt", "vocab.json":
        Path("own", name).rename("gpt2-" + name)
    agrees("gpt2-merges.txt")
    for added in None, {}, [{"content": END}, {"content": END, "id": ids[END]}]:
        Path("own/tokenizer.json").write_text(tokenizer_json(ids, added_tokens=added))
        agrees("own")


@pytest.mark.parametrize("form", ["files", "json"])
def test_round_trip(form):
    """A model trained on a folder's tokens keeps its numbering in the checkpoint, and prints the
    line that it memorized, also if only a tokenizer.json is left of the tokenizer."""
    ids = write_tokenizer("own", form, "others", "</s>")
    Path("text").write_text("the cat and bat</s>" * 50)
    tokenize("--bpe --val-fraction 0 text -o own/x --tokenizer own")
    line = [ids[t] for t in ["the", "Ġ", "c", "at", "Ġand", "Ġ", "bat", "</s>"]]
    header = Path("own/x_train.bin").read_bytes()[:HEADER]
    Path("own/x_train.bin").write_bytes(with_ints(header, 2, 400) +
                                        array.array("H", line * 50).tobytes())
    succeeds("-i own/x_train.bin -e l1h2c32t16 -b 4 -x 150 -l 1e-2 --quiet -o out")
    folder = step(150)
    assert json.loads((folder / CONFIG).read_text())["eos_token_id"] == ids["</s>"]
    assert json.loads((folder / "vocab.json").read_text()) == ids
    roles = json.loads((folder / "tokenizer_config.json").read_text())
    assert roles["eos_token"] == "</s>"
    generate = "--generate --temperature 0 --quiet --prompt=the -e %s"
    assert run(generate % folder).out == "the cat and bat\n"
    for name in "vocab.json", "merges.txt":
        (folder / name).unlink()
    (folder / "tokenizer.json").write_text(tokenizer_json(ids))
    assert run(generate % folder).out == "the cat and bat\n"
    assert run((generate % folder).replace("=the", "=</s>the")).out == "</s>the cat and bat\n"
    for name in CONFIG, "generation_config.json":    # a sample ends at each of them
        config = json.loads((folder / CONFIG).read_text())
        config["eos_token_id"] = [ids["</s>"], ids["Ġand"]]
        (folder / name).write_text(json.dumps(config))
        assert run(generate % folder).out == "the cat\n"
        if name == CONFIG:
            (folder / name).write_text(json.dumps({**config, "eos_token_id": ids["</s>"]}))
    for name in "special_tokens_map.json", "chat_template.jinja":
        (folder / name).write_text("{%s}" % name)
    succeeds("-i own/x_train.bin -e %s -x 1 -b 4 --quiet -o tuned" % folder)
    extras = {name: (folder / name).read_bytes() for name in (
        "special_tokens_map.json", "chat_template.jinja", "tokenizer.json",
        "tokenizer_config.json", "generation_config.json")}
    shutil.rmtree("out")
    succeeds("-o tuned -y -x 2")
    for number in 1, 2:    # as they were, and no others
        saved = {p.name: p.read_bytes() for p in step(number, "tuned").iterdir()}
        assert {name: saved[name] for name in saved if name not in SAVED} == extras
        assert json.loads(saved[CONFIG])["eos_token_id"] == [ids["</s>"], ids["Ġand"]]


def test_merges():
    """merges.txt as others write it."""
    good = "\n".join(["#version: 0.2", *MERGES, ""])
    Path("text").write_text(TEXT)
    shards = []
    for text in (good, good[14:], good.replace("\n", "\r\n"), "\ufeff" + good, good + "\n",
                 good.replace("0.2", "0.2 - Trained by `huggingface/tokenizers`"), good[:-1]):
        Path("merges").write_bytes(text.encode())
        tokenize("--bpe --val-fraction 0 text -o m --tokenizer merges")
        shards.append(Path("m_train.bin").read_bytes())
    assert set(shards) == {shards[0]} and tokens("m_train.bin") == [PLAIN.index(p) for p in PIECES]


EVERY_PAIR = "\n".join(a + " " + b for a in WRITTEN.values() for b in WRITTEN.values())


@pytest.mark.parametrize("merges, expected", [
    (None, ":1: a merge must join"), ("a b\na b", ":3: a merge must join two earlier tokens into"),
    ("ab", ":2: a merge must join"), ("a bc", ":2: a merge must join"),
    ("ab c", ":2: a merge must join"), ("a a\naa aa\na aaa", ":4: a merge must join"),
    ("a b c", ":2: expected two tokens"), ("a \x7f", ":2: expected two tokens"),
    ("a b\r\r", ":2: expected two tokens"),
    ("a " + "b" * 3000, "in GPT-2's byte alphabet with at most 512"),
    ("a a\na aa", ":3: this merge can never apply"),
    ("a b\nb c\na bc", ":4: this merge can never apply, because earlier merges"),
    (EVERY_PAIR, ":65280: too many merges; expected at most 65278")], ids=range(13))
def test_bad_merges(merges, expected):
    Path("own").write_bytes(("#version: 0.2\n%s\n" % merges if merges else "#ver").encode())
    not_tokenized("own", "own" + expected if expected[0] == ":" else expected)


IDS = {token: i for i, token in enumerate(ORDERS["first"])}
REFUSED = [
    ({"model__type": "WordPiece"}, "unsupported model.type 'WordPiece'; expected BPE"),
    ({"model__type": "Unigram", "model__vocab": [["a", -1.5]]}, "model.type 'Unigram'"),
    ({"normalizer": {"type": "NFC"}}, "unsupported normalizer '{\"type\": \"NFC\"}'"),
    ({"pre_tokenizer": None}, "not the tokenizer.json of a byte-level BPE"),
    ({"pre_tokenizer__type": "Sequence"}, "unsupported pre_tokenizer.type 'Sequence'"),
    ({"pre_tokenizer__add_prefix_space": True}, "pre_tokenizer.add_prefix_space 'true'"),
    ({"pre_tokenizer__use_regex": False}, "pre_tokenizer.use_regex 'false'"),
    ({"post_processor__special_tokens": {"<s>": {}}}, "post_processor.special_tokens '{\"<s>"),
    ({"model__ignore_merges": True}, "unsupported model.ignore_merges 'true'"),
    ({"model__byte_fallback": True}, "unsupported model.byte_fallback"),
    ({"model__continuing_subword_prefix": "##"}, "model.continuing_subword_prefix '##'"),
    ({"added_tokens": [{"id": 300, "content": "w", "special": False}]},
     "unsupported special 'false'; expected true"),
    ({"model__vocab": {**IDS, "he": 7}}, "token 'he' cannot have the id 7"),
    ({"model__vocab": {**IDS, "he": 65535}}, "token 'he' cannot have the id 65535"),
    ({"model__vocab": {**IDS, "x" * 600: 300}}, "token 'xxx"),
    ({"model__vocab": {k: i for k, i in IDS.items() if k != "he"}}, "merge 1 produces a token"),
    ({"model__vocab": {}}, "merge 1 produces a token without an id"),
    ({"model__merges": [["h", "e"], ["a", "x", "y"]]}, "invalid JSON: expected"),
    ({"model__merges": [["h"]]}, "invalid JSON: expected a string"),
    ({"model__merges": [["he", "x"]]}, ":1: a merge must join two earlier tokens"),
    ({"model__merges": 5}, "invalid JSON: expected an array"),
    ({"model": {}}, "not the tokenizer.json of a byte-level BPE")]


@pytest.mark.parametrize("changes, expected", REFUSED)
def test_refused(changes, expected):
    """A tokenizer.json that would give other tokens is refused with the setting's name."""
    Path("tokenizer.json").write_text(tokenizer_json(IDS, **changes))
    not_tokenized("tokenizer.json", expected)


def not_tokenized(tokenizer, expected):
    Path("text").write_text(TEXT)
    refused([TOP / "data/tokenize", *"--bpe -o x text --tokenizer".split(), tokenizer], expected)
    assert names(".", "x") == []


def test_refused_more():
    fails = lambda expected: not_tokenized("own", expected)
    write_tokenizer("own", "files", "first")
    for text, found in (("true", "add_prefix_space 'true'; expected false"), (
            'false, "added_tokens_decoder": {"7": {"special": false}}', "special 'false'; expect")):
        Path("own/tokenizer_config.json").write_text('{"x": %s, "add_prefix_space": %s}' % (
            "9" * 31, text))
        fails("own/tokenizer_config.json: unsupported " + found)
    Path("own/tokenizer_config.json").unlink()
    Path("own/vocab.json").unlink()
    fails("config.json sets the end of text to 0, but without vocab.json it is 264")
    for cut in 1, 300, 2000:
        Path("own/tokenizer.json").write_text(tokenizer_json(IDS)[:-cut])
        fails("own/tokenizer.json: invalid JSON: ")
    Path("own/tokenizer.json").write_text(
        tokenizer_json(IDS, added_tokens=[{"id": 300, "content": "\U0001f600", "special": True}]))
    Path("own/" + CONFIG).write_text('{"eos_token_id": 300}')
    tokenize("--bpe --tokenizer own --val-fraction 0 -o x text")
    assert '"\U0001f600": 300' in Path("x_vocab.json").read_text()


@pytest.fixture(scope="module")
def texts(tmp_path_factory, built):
    """Two tokenizers of 300 tokens, a model of the first, and weights of several vocabularies."""
    here, folder = os.getcwd(), tmp_path_factory.mktemp("two")
    os.chdir(folder)
    write_corpus()
    for name, line in ("a", "the cat %d and the hat, then a bat sat there %d\n"), (
            "b", "zwei Katzen %d und ein Hund; Vogel flog davon %d\n"):
        Path(name).write_text("".join(line % (i, i * 7 % 13) for i in range(300)))
        tokenize("--train-bpe 300 -o %s %s" % (name, name))
    tokenize("--train-bpe 257 -o few a")
    write_tokenizer("ids", "files", "first")
    write_tokenizer("plain", "files", "last")
    tokenize("--bpe --tokenizer plain -o plain a")
    shape = 1, 1, 4, 16, 265
    write_model("ids", safetensors({}, hugging_face(shape)), config_text(shape))
    Path("hash_train.bin").write_bytes(with_ints(Path("a_train.bin").read_bytes(), 5, 0, 6, 0))
    for source, copies in {"a_merges.txt": "hash_merges.txt", "b_merges.txt": "wrong_merges.txt",
                           "a_train.bin": "alone.bin alone_train.bin wrong_train.bin"}.items():
        for copy in copies.split():
            shutil.copy(source, copy)
    for model, data in ("a", "a_train"), ("few", "few_train"), ("bytes", "train"):
        line = "-i %s.bin -e l1h1c8t16 -x 1 -b 2 -v 0 --quiet -o run-%s" % (data, model)
        subprocess.run([built[0], *line.split()], check=True)
    for name, V in ("unknown", 257), ("padded", 320), ("own", 50257), ("more", 50258):
        shape = 1, 1, 4, 16, V
        write_model(name, safetensors({}, hugging_face(shape)), config_text(shape))
    Path("own/merges.txt").write_text(made_merges())
    Path("gpt2.bin").write_bytes(shard([7, 50256] * 200, GPT2))
    Path("e.bin").write_bytes(eval_file(questions(3, 50257, 2)))
    os.chdir(here)
    return folder


HASH = hashlib.sha256("\n".join(["#version: 0.2", *MERGES, ""]).encode() + array.array(
    "H", [IDS[token] for token in PLAIN]).tobytes()).hexdigest()[:8]


@pytest.mark.parametrize("arguments, expected", [
    ("-e run-a --eval b_val.bin", "b_val.bin has 300 custom tokens ("),
    ("-e run-a -x 1 -b 2 -i b_train.bin", "b_train.bin has 300 custom tokens ("),
    ("-e run-a --generate --tokenizer b_merges.txt", "b_merges.txt has 300 custom tokens ("),
    ("-e ids -x 1 -b 2 -i plain_train.bin", "ids has 265 custom tokens (%s), but pl" % HASH),
    ("-e run-few -x 1 -b 2 -i train.bin", "run-few/step-00000001 has 257 custom tokens ("),
    ("-e run-bytes -x 1 -b 2 -i few_train.bin", "step-00000001 has byte tokens, but few_"),
    ("-e run-bytes --generate --tokenizer few_merges.txt", "run-bytes/step-00000001 uses single"),
    ("-e own --eval e.bin", "--eval: own has 50257 custom tokens ("),
    ("-e own --eval gpt2.bin", "own has 50257 custom tokens ("),
    ("-e own -x 1 -b 2 -i a_train.bin", "; to tokenize text for this model, run data/tokenize "
                                        "--bpe --tokenizer own -o PREFIX FILE"),
    ("-e more -x 1 -b 2 -i train.bin", "; to tokenize text for this model, run data/tokenize "
                                       "--bpe -o PREFIX"),
    ("-i a_train.bin -j b_val.bin", "(-j): b_val.bin has 300 custom tokens ("),
    ("-i a_train.bin -j val.bin", "(-j): val.bin has byte tokens, but a_train.bin has 300"),
    ("-i [ab]_train.bin", "a_train.bin has 300 custom tokens ("),
    ("-i alone_train.bin -s 1", "alone_train.bin: cannot find its merges in alone_merges.txt; use"),
    ("-i alone.bin -o out", "alone.bin: cannot find its merges; use --tokenizer FILE"),
    ("-i wrong_train.bin -o out", "wrong_merges.txt has 300 custom tokens"),
    ("-i a_train.bin --tokenizer few_merges.txt", "few_merges.txt has 257 custom tokens"),
    ("-i a_train.bin --tokenizer b_merges.txt", "b_merges.txt has 300 custom tokens"),
    ("-i gpt2.bin --tokenizer a_merges.txt", "a_merges.txt has 300 custom tokens ("),
    ("--generate -e unknown --tokenizer a_merges.txt",
     "--tokenizer: unknown has a vocabulary of 257 tokens, but that of a_merges.txt has 300")])
def test_agree(texts, monkeypatch, arguments, expected):
    """Files of different tokenizers are refused, even if these have the same size."""
    monkeypatch.chdir(texts)
    refused(("" if "-e " in arguments else "-e l1h1c8t16 -x 1 -b 2 ") + arguments, expected)


@pytest.mark.parametrize("arguments, said", [
    ("-e unknown -x 1 -b 2 -i train.bin", "unknown does not name a tokenizer; assuming the "
                                          "tokenizer of train.bin: byte tokens\n"),
    ("-e padded -x 1 -b 2 -i train.bin", "padded does not name a tokenizer; assuming the tok"),
    ("-e more --eval gpt2.bin", "assuming the tokenizer of gpt2.bin: GPT-2's"),
    ("-e more --eval e.bin", "assuming the tokenizer of e.bin: GPT-2's tokens\n"),
    ("-e l1h1c8t16 -x 1 -b 2 -s 1 -g 1 -i hash_train.bin", "hash_train.bin does not name a tok"),
    ("-e run-a --eval a_val.bin", ""), ("-e run-bytes --eval val.bin", "")])
def test_unknown(texts, monkeypatch, arguments, said):
    """Weights without a tokenizer are accepted, which is said."""
    monkeypatch.chdir(texts)
    assert succeeds(arguments, said).count("does not name a tokenizer") == (said != "")


def test_never_predicted():
    """A row without a token is never sampled; it is kept. Its logit is the highest everywhere."""
    shape = 1, 1, 8, 16, 270
    members = hugging_face(shape)
    members["ln_f.bias"][2] = struct.pack("<8f", *[1] * 8)
    members["wte.weight"][2] = struct.pack("<%df" % (270 * 8), *[0] * (265 * 8), *[9] * 40)
    write_tokenizer("own", "files", "last")
    write_model("own", safetensors({}, members), config_text(shape))
    o = run("--generate -e own --temperature 0 -g 5 --prompt=a --quiet")
    assert o.status == 0 and o.out == "a!!!!!\n", o  # all tokens have the same logit; 0 is "!"
    Path("text").write_text(TEXT * 9)
    tokenize("--bpe --val-fraction 0 -o x --tokenizer own text")
    succeeds("-i x_train.bin -e own -b 1 -x 1 -l 0 -v 0 -o out --quiet")
    assert tensors(checkpoint(1)[MODEL])[1]["transformer.wte.weight"][2] == members["wte.weight"][2]


def test_names():
    """A name that exists is that file, even if it could be a pattern."""
    for name, lr in ("a1", "1e-3"), ("a[1]", "1e-2"):
        succeeds(TINY + "-x 1 -v 0 --quiet -o %s -l %s" % (name, lr))
    one, two = (checkpoint(1, name)[MODEL] for name in ("a1", "a[1]"))
    assert one != two
    succeeds(TINY.replace("l2h2c16t16", "a[1]/step-00000001") + "-x 1 -l 0 -v 0 --quiet -o b")
    assert checkpoint(1, "b")[MODEL] == two
    succeeds("-o a[1] -y -x 2 -l 0 --quiet")
    assert checkpoint(2, "a[1]")[MODEL] == two
    Path("text").write_text("some text " * 50)
    tokenize("--bytes -o q[1] text")
    out = succeeds("-i q[1]_train.bin -e l1h1c8t16 -b 1 -x 1 -v 1", "q[1]_train.bin: 450 tokens")
    assert "no validation" not in out and "validation loss" in out
    succeeds("-e a1 --eval q[1]_val.bin", "q[1]_val.bin: ")
    refused("-e a1 -i q[1]_train.bin q[1]_val.bin", "--train-data takes one file or pattern, but "
            "'q[1]_val.bin' follows 'q[1]_train.bin'; quote the pattern")
