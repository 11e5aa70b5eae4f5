"""data/tokenize and data/stories: shards and merges of small texts, and refusals without a file."""

import bz2, gzip, lzma, pty

import program
from files import *

BYTES_OF_TEXT = "--bytes -o out --val-fraction 0 "
TEXT = b"Hello, \xc3\xa4\xff\n"
DOCUMENTS = b" one <|endoftext|>\n\n<|endoftext|>two<|endof<|endoftext|>\n"
THIRD = b"three\n"


@pytest.fixture(autouse=True)
def tokenize(folder):
    program.path = str(TOP / "data/tokenize")
    Path("text").write_bytes(TEXT)
    Path("documents").write_bytes(DOCUMENTS)
    Path("third").write_bytes(THIRD)


def header(name):
    return list(struct.unpack("<5i", Path(name).read_bytes()[:20]))


def shards(prefix="out"):
    """The tokens of all shards of a prefix, in order of their names."""
    return [tokens(name) for name in names(".", prefix + "_") if name.endswith(".bin")]


def tokenized(arguments, *expected, **more):
    """The bytes of every file that a run writes, after removing those of earlier runs."""
    for name in names(".", "out"):
        os.unlink(name)
    succeeds(arguments, *expected, **more)
    return {name: Path(name).read_bytes() for name in names(".", "out")}


def test_bytes():
    succeeds(BYTES_OF_TEXT + "text", "out_train.bin  11 tokens\n")
    assert header("out_train.bin") == [20240520, 1, 11, 257, BYTES]
    assert tokens("out_train.bin") == list(TEXT)
    assert names(".", "out") == ["out_train.bin"]
    data = Path("out_train.bin").read_bytes()
    sealed = data[HEADER:] + data[:32] + bytes(32) + data[64:HEADER]
    words = struct.unpack("<8I", data[32:64])
    assert "".join("%08x" % word for word in words) == hashlib.sha256(sealed).hexdigest()


def test_split():
    """Validation data is the end of the text, without splitting a character, or a separate file."""
    succeeds("--bytes -o out --val-fraction 0.25 text")  # 8.25: inside a character of two bytes
    assert shards() == [list(TEXT[:-2]), [255, 10]]
    Path("long").write_bytes(b"a" * 3000000)
    succeeds("--bytes -o out long", "n.bin  2,700,000 tokens\nout_val.bin  300,000 tokens\n")
    assert [len(shard) for shard in shards()] == [2700000, 300000]
    os.symlink("third", "soft"), os.link("third", "hard")
    for spelling in "", " third", " ./third soft hard " + os.path.abspath("third"):
        succeeds("--bytes -o out --val-file third text" + spelling)
        assert shards() == [list(TEXT), list(THIRD)]
    refused("--bytes -o out soft text hard", "hard is given twice, also as soft")


def test_standard_input():
    files = tokenized("--bytes -o out --shard-tokens 4000000 -", stdin="abc\n" * 2500000)
    assert list(files) == ["out_train_00000%d.bin" % i for i in range(3)] + ["out_val_000000.bin"]
    assert b"".join(bytes(shard) for shard in shards()) == b"abc\n" * 2500000
    assert [len(shard) for shard in shards()] == [4000000, 4000000, 1000000, 1000000]
    tokenized("--bytes -o out --val-fraction 0 - -", stdin="abc\n")  # the second one is empty
    assert shards() == [list(b"abc\n")]


END = [256]


@pytest.mark.parametrize("arguments, want", [
    ("--documents --val-fraction 0 documents third",
     [END + [*b"one"] + END + [*b"two<|endof"] + END + [*b"three"]]),
    ("--documents --val-fraction 0.4 documents third",
     [END + [*b"one"] + END + [*b"two<|endof"], END + [*b"three"]]),
    ("--documents --val-file third documents",
     [END + [*b"one"] + END + [*b"two<|endof"], END + [*b"three"]]),
    ("--val-fraction 0 documents third", [[*DOCUMENTS + THIRD]])])
def test_documents(arguments, want):
    succeeds("--bytes -o out " + arguments)
    assert shards() == want


@pytest.mark.parametrize("before", [1048563, 1048564, 1048570, 1048576])
def test_borders(before):
    """Markers near the end of a block are found, even after a block of spaces."""
    Path("text").write_bytes(b"a" * before + b"<|endoftext|> b " + b" " * 1048560 +
                             b"<|endoftext|>c")
    succeeds("--documents " + BYTES_OF_TEXT + "text")
    assert tokens("out_train.bin")[1:] == [97] * before + [256, 98, 256, 99]


def test_threads():
    """Shards and merges do not depend on the number of threads."""
    numbers = "".join("%d\n" % i + "<|endoftext|>" * (i % 20000 == 0) for i in range(400000))
    Path("numbers").write_text(numbers)
    for arguments in ("--bytes --documents --shard-tokens 400000", "--train-bpe 400"):
        one, two, five = (tokenized(arguments + " -o out numbers", env={"OMP_NUM_THREADS": n})
                          for n in "125")
        assert one == two == five


REFUSED = [
    ("absent", "cannot read absent: No such file"),
    ("nothing", "nothing is too short: none of its 0 bytes are left for training"),
    (".", "cannot read .: Is a directory"), ("fifo", "cannot read fifo: not a regular file"),
    ("/dev/zero", "cannot read /dev/zero: not a regular file"),
    ("--val-fraction 1.5 text", "invalid value '1.5'; expected a number between 0 and 1"),
    ("--documents text", "are left for validation; use --val-fraction 0 to skip"),
    ("--shard-tokens 0 text", "'0'; expected an integer between 1 and 2147483647"),
    ("--sbytes text", "unrecognized option '--sbytes'"),
    ("text --shard-tokens", "option '--shard-tokens' requires an argument"),
    ("--bpe text", "--bpe, --bytes, --tokens and --train-bpe are mutually exclusive"),
    ("--tokens --documents text", "are mutually exclusive"),
    ("--tokenizer text text", "--tokenizer requires --bpe or --tokens"),
    ("--val-fraction 0 --val-file text text", "--val-fraction and --val-file are mutually"),
    ("-o absent/bad text", "cannot create absent/bad_train.bin.part: No such file"),
    ("-o . text", "-o: PREFIX must end in a file name, such as"), ("-o .. text", "-o: PREFIX"),
    ("-o /none/ text", "-o: PREFIX"), ("", "missing input: FILE or -; see --help")]
REFUSED_BPE = [
    ("text", "missing --bpe, --bytes, --tokens or --train-bpe; see --help"),
    ("--bpe text", "--bpe: data/vocab.bpe not found; run data/prepare.sh"),
    ("--bpe --tokenizer never text", "never:4: this merge can never apply, because"),
    ("--train-bpe 256 text", "'256'; expected an integer between 257 and 65535"),
    ("--train-bpe 65536 text", "invalid value '65536'"),
    ("--train-bpe 300 --tokenizer never text", "--tokenizer requires --bpe or --tokens")]


@pytest.mark.parametrize("arguments, expected",
                         [("--bytes -o bad " + a, text) for a, text in REFUSED] +
                         [("-o bad " + a, text) for a, text in REFUSED_BPE])
def test_refused(arguments, expected):
    Path("nothing").touch()
    os.mkfifo("fifo")
    Path("never").write_text("#version: 0.2\na b\nb c\na bc\n")  # ab is merged before bc
    refused(arguments, expected)
    assert names(".", "bad") == []


@pytest.mark.parametrize("data, expected", [
    (gzip.compress(b"text"), "is gzip, not plain text; convert it first"),
    (bz2.compress(b"text"), "is bzip2, not plain text"), (lzma.compress(b"text"), "is xz, not"),
    (b"PAR1\x15\x04", "is Parquet, not plain text"), (b"PK\3\4zip", "is zip, not plain text"),
    ("text".encode("utf-16"), "is UTF-16, not plain text; convert it first (UTF-16: iconv -f "),
    ("text".encode("utf-16-be"), "contains NUL bytes"),
    (b"text" * 700000 + b"\0", "contains NUL bytes, so it is UTF-16 or binary, not plain text"),
    (b'{"text": "one"}\n{"text": "two"}\n', "is JSON, not plain text; extract the text first, for "
                                            "example with jq -r .text bad | data/tokenize ... -"),
    (b'{"id": 7, "content": "one"}', "is JSON"), (b'[\n {"text": "one"},\n', "is JSON")],
    ids=range(11))
def test_not_text(data, expected):
    """Compressed, binary and structured files do not become tokens."""
    Path("bad").write_bytes(data)
    for mode in "--bytes", "--train-bpe 257":
        assert "tokenize: bad " + expected in refused(mode + " --val-fraction 0 -o new bad", "")
    Path("pointer").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused("--bytes -o new pointer", "pointer: this is a Git LFS pointer, not the file itself")
    assert names(".", "new") == []
    Path("bad").write_bytes(b"\n" + data if "JSON" in expected else b"{one} {two}")
    succeeds("--bytes --val-fraction 0 -o new bad")


def test_marker_note():
    """An end-of-text marker that is ordinary text is noted once."""
    note = "note: documents contains <|endoftext|>, which is ordinary text without --documents\n"
    shutil.copy("documents", "copy")
    assert run("--bytes -o out documents third copy").out.count(note) == 1
    assert "note" not in run("--bytes -o out --documents documents third").out


def test_truncated():
    """An input that is truncated while it is read ends the run in one line, without a file."""
    Path("long").write_bytes(b"a b " * (1 << 25))
    process = start("--bytes -o new long")
    wait_until(lambda: names(".", "new"))
    os.truncate("long", 4096)
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and names(".", "new") == [], (out, err)
    assert err == "tokenize: %s was truncated or became unreadable while in use\n" % (
        Path("long").absolute())


def test_pipe():
    """A shell's <(command) is an input."""
    succeeds(["bash", "-c", program.path + " --bytes --val-fraction 0 -o out <(cat text third) "
              "<(cat third)"])
    assert shards() == [list(TEXT + THIRD + THIRD)]


def test_tokens():
    """uint16 tokens without a header, as nanoGPT writes them, become shards of these tokens."""
    ids = [i * i % 50257 for i in range(3000000)]
    Path("nano.bin").write_bytes(array.array("H", ids).tobytes())
    Path("val.bin").write_bytes(array.array("H", ids[:7]).tobytes())
    succeeds("--tokens --val-file val.bin -o out nano.bin", "out_train.bin  3,000,000 tokens\n")
    assert shards() == [ids, ids[:7]] and header("out_train.bin")[3:] == [50257, GPT2]
    succeeds("--tokens --val-fraction 0.3 --shard-tokens 1000000 -o two val.bin nano.bin")
    assert sum(shards("two")[:-1], []) == ids[:7] + ids[:2099997]
    Path("nano.bin").write_bytes(array.array("H", [1, 300]).tobytes())
    Path("merges").write_text("#version: 0.2\na b\n")
    refused("--tokens --tokenizer merges -o new nano.bin", "nano.bin has tokens outside the vocab")
    refused("--tokens -o new out_train.bin", "has a header; pass it to train_gpt2 -i without conv")
    Path("odd").write_bytes(b"odd")
    refused("--tokens -o new odd", "odd has an odd number of bytes")
    assert names(".", "new") == []


def test_leftovers():
    """Old shards that a pattern would also match are named, if possible before reading the text."""
    succeeds("--bytes -o out --shard-tokens 4 text")
    before = shards()
    Path("binary").write_bytes(b"a\0")
    refused("--bytes -o out --shard-tokens 8 text", "out_train_000002.bin is left over from an")
    refused("--bytes -o out --shard-tokens 1 binary", "out_train_000001.bin is left over from an")
    refused("--bytes -o out binary", "out_train_000000.bin is left over from an earlier run")
    assert shards() == before and len(before) == 4


def test_replaced():
    """A tokenizer's files are replaced as a set; a small text gives all merges that it yields."""
    Path("own").mkdir()
    Path("own/merges.txt").write_text("#version: 0.2\n")
    Path("own/vocab.json").write_text(json.dumps({c: 256 - i for i, c in enumerate(
        WRITTEN[b] for b in BYTES_IN_ORDER)}))
    succeeds("--bpe --tokenizer own -o out --val-fraction 0 text")
    assert tokens("out_train.bin") == [256 - BYTES_IN_ORDER.index(b) for b in TEXT]
    succeeds("--train-bpe 400 -o out text", "6 merges from 3 distinct pre-tokens, which yield no")
    assert len(Path("out_merges.txt").read_text().splitlines()) == 7
    assert header("out_train.bin")[3] == 263
    learned = shards()
    succeeds("--bpe --tokenizer out_merges.txt -o out text")    # with the new ids
    assert shards() == learned


def limited(size):
    def before():
        full_disk(size)()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    return before


@pytest.mark.parametrize("arguments, named", [
    ("--bytes text", "out_train.bin"), ("--bytes -", "out_input"),
    ("--train-bpe 3000 text", "out_merges.txt")])
def test_full_disk(arguments, named):
    text = "".join("%d " % (i * i) for i in range(20000))
    Path("text").write_text(text)
    refused("-o out " + arguments, "cannot write %s.part: File too large" % named,
            before=limited(8192), stdin=text if arguments.endswith("-") else None)
    assert names(".", "out") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("arguments, waits_for", [
    ("--bytes --shard-tokens 100000 long", "out_train_000003.bin.part"),
    ("--train-bpe 20000 long", None), ("--bytes -", None)])
def test_interrupted(number, arguments, waits_for):
    """A signal ends a run soon, and none of its files is left."""
    succeeds(BYTES_OF_TEXT + "text")
    os.rename("out_train.bin", "kept")
    size = 30000000 if waits_for else 3000000
    Path("long").write_text("".join("%d " % (i * i * i) for i in range(size // 15)))
    process = start("-o out " + arguments, before=default_signal(number), stdin=subprocess.PIPE)
    reads = Path("/proc/%d/maps" % process.pid)
    wait_until(lambda: Path(waits_for).exists() if waits_for else
               "/long" in reads.read_text() or "out_input" in os.popen(
                   "readlink /proc/%d/fd/*" % process.pid).read())
    assert stopped(process, number) == (130, "", "tokenize: interrupted\n")
    assert names(".", "out") == []


def test_terminal():
    """A terminal shows progress, a pipe only the last lines."""
    Path("long").write_bytes(b"a" * 3000000)
    assert succeeds("--bytes -o out long").count("\n") == 2
    ours, theirs = pty.openpty()
    assert start("--bytes -o out long", stdout=theirs).wait(LIMIT_S) == 0
    os.close(theirs)
    said = ""
    while "out_train.bin" not in said:  # fails at the end of the output
        said += os.read(ours, 10000).decode()
    assert said.startswith("\r  0 %\033[K") and "\r\033[Kout_train.bin" in said


def test_gpt2():
    Path("vocab").write_text(vocab_bpe())
    Path("text").write_text("I'll go.\n<|endoftext|>\nHello world")
    bpe = "--bpe --tokenizer vocab -o out "
    succeeds(bpe + "--documents --val-fraction 0 text")
    assert header("out_train.bin")[2:] == [8, 50257, GPT2]
    assert shards() == [[50256, 40, 1183, 467, 13, 50256, 15496, 995]]
    succeeds(bpe + "--val-fraction 0 text")
    assert shards() == [[40, 1183, 467, 13, 198, 27, 91, 437, 1659, 5239, 91, 29, 198, 15496, 995]]
    assert names(".", "out") == ["out_train.bin"]
    Path("text").write_bytes(b"a" * 6000000)  # no place to cut
    succeeds(bpe + "text")
    assert shards()[1] == [24794] * 150000


def test_learned():
    """The merges of the stories are those of Hugging Face's BpeTrainer."""
    Path("told").write_text(stories_text())
    first = tokenized("--train-bpe 1000 --val-fraction 0 -o out told",
                      "out_merges.txt  743 merges from 556 distinct pre-tokens\n")
    assert hashlib.sha256(first["out_merges.txt"]).hexdigest() == OWN_MERGES
    assert header("out_train.bin")[3:] == [1000, OWN]
    assert first["out_train.bin"][20:28] == bytes.fromhex(OWN_MERGES)[:8]
    shutil.copy("out_merges.txt", "merges")
    assert tokenized("--bpe --tokenizer merges --val-fraction 0 -o out told") == first
    succeeds("--train-bpe 300 --documents --val-fraction 0 -o out told")
    assert tokens("out_train.bin")[0] == 299


def test_learned_from():
    """Validation text is not learned from."""
    text = stories_text()
    Path("begin").write_text(text[:160000])
    Path("end").write_text(text[160000:])
    alone = tokenized("--train-bpe 600 --val-fraction 0 -o out begin")
    both = tokenized("--train-bpe 600 --val-file end -o out begin")
    assert alone["out_merges.txt"] == both["out_merges.txt"]


@pytest.mark.parametrize("vocabulary, merges", [(260, "a a\nþ ā\nÿ þā\n"), (257, "")])
def test_learned_bytes(vocabulary, merges):
    Path("text").write_bytes(b"aaaa\xff\xfe\1\xff\xfe\1aaaa")
    succeeds("--train-bpe %d --val-fraction 0 -o out text" % vocabulary)
    assert Path("out_merges.txt").read_text() == "#version: 0.2\n" + merges


STORIES = "70fc3fac996a007e1cf13a707a473b813a1aa6ad6d0710fdc4500aeb3f9613c5"


@pytest.mark.parametrize("compiler", [
    "gcc -O0", "gcc -O3 -march=native -funsigned-char", "gcc -m32 -O2", "clang -O0",
    "clang -O3 -march=native", "clang -m32 -O2"])
def test_stories(compiler):
    """The text of the stories has the same bytes with every compiler."""
    Path("empty.c").write_text("#include <errno.h>\nint main(void) { return errno; }\n")
    words = compiler.split()
    if subprocess.run(compiler + " empty.c", shell=True, capture_output=True).returncode:
        pytest.skip(compiler + " does not build here")
    subprocess.run([*words, "-std=c11", "-Wall", "-Wextra", "-Werror", TOP / "data/stories.c",
                    "-o", "told"], check=True)
    assert hashlib.sha256(subprocess.check_output("./told")).hexdigest() == STORIES


def test_stories_refused():
    program.path = str(TOP / "data/stories")
    refused("--help", "data/stories > FILE")
    with open("/dev/full", "w") as full:
        refused("", "data/stories: cannot write: No space left on device", stdout=full)
