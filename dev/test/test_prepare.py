"""Runs data/prepare.sh in a separate repository: with a mirror, with a local server in place of
the real ones, and with neither. Also tests a run's default data, and make train."""

import http.server, threading

import program
from files import *
from test_tokenize import STORIES, header

MADE = "data: tinyshakespeare is not available; using generated stories\n"
MIRROR = TOP / os.environ.get("DATA_MIRROR", "data")
TOOLS = "bash env dirname sha256sum cut od wc tr cat mv rm".split()


@pytest.fixture(autouse=True)
def repository(folder, monkeypatch):
    Path("repo/data").mkdir(parents=True)
    for name in "prepare.sh", "tokenize", "stories":
        shutil.copy(TOP / "data" / name, "repo/data")
    monkeypatch.delenv("DATA_MIRROR", raising=False)
    for name in "http_proxy", "https_proxy":
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no network
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    program.path = str(Path("repo/data/prepare.sh").resolve())


def prepared(prefix=""):
    return names("repo/data", prefix)


def counts(prefix):
    return [header("repo/data/%s_%s.bin" % (prefix, split))[2:] for split in ("train", "val")]


def real(*places):
    for path in (MIRROR / place for place in places):
        if path.exists():
            return path
    pytest.skip("no %s: DATA_MIRROR names the folder that has it" % places[0])


@pytest.mark.parametrize("mirror, arguments, expected", [
    ("mirror", "", "mirror/tinyshakespeare.txt: not the expected tinyshakespeare.txt"),
    ("absent", "", "DATA_MIRROR=absent has no tinyshakespeare.txt; unset it to download it"),
    ("mirror", "pile", "unknown corpus 'pile'; expected tinyshakespeare, tinystories"),
    ("mirror", "fineweb-edu 0", "fineweb-edu 0: invalid number of training shards"),
    ("mirror", "fineweb 104", "fineweb 104: invalid number of training shards; expected 1 to 103"),
    ("mirror", "hellaswag tinystories", "expected a single corpus")])
def test_refused(mirror, arguments, expected):
    Path("mirror").mkdir()
    Path("mirror/tinyshakespeare.txt").write_text("another text")
    folder = mirror if mirror == "absent" else os.path.abspath(mirror)
    refused(arguments, expected, env={"DATA_MIRROR": folder})
    assert prepared() == ["prepare.sh", "stories", "tokenize"]


def test_stories():
    """Without mirror and network, stories are used. A curl that never connects logs its calls."""
    calls = Path("calls").resolve()
    script(Path("stub/curl"), '#!/bin/sh\necho $3 $4 $5 >> "%s"\nexit 7\n' % calls)
    offline = {"PATH": "%s:%s" % (Path("stub").resolve(), os.environ["PATH"])}
    o = run("", env=offline)
    assert o.status == 0 and o.out.endswith(
        MADE + "data/stories_bpe_merges.txt  767 merges from 553 distinct pre-tokens\n"
        "data/stories_bpe_train.bin  478,399 tokens\ndata/stories_bpe_val.bin  53,214 tokens\n")
    assert "input.txt: download failed after 0 bytes\n" in o.err
    assert hashlib.sha256(Path("repo/data/stories.txt").read_bytes()).hexdigest() == STORIES
    assert counts("stories_bpe") == [[478399, 1024, OWN], [53214, 1024, OWN]]
    assert [tokens("repo/data/stories_bpe_%s.bin" % s)[0] for s in ("train", "val")] == [1023] * 2
    assert succeeds("", env=offline) == MADE
    assert Path("calls").read_text().split("\n") == [
        "--silent --connect-timeout 3"] * 2 + [""]  # one per run


def test_tinyshakespeare():
    real("gpt2/vocab.bpe"), real("tinyshakespeare.txt")
    mirror = {"DATA_MIRROR": str(MIRROR.resolve())}
    succeeds("", env=mirror)
    assert [c[:2] for c in counts("tinyshakespeare_bpe")] == [[411268, 1024], [49422, 1024]]
    assert [c[:2] for c in counts("tinyshakespeare_gpt2")] == [[301966, 50257], [36059, 50257]]
    times = lambda: [(p.name, p.stat().st_mtime_ns) for p in sorted(Path("repo/data").iterdir())]
    before = times()
    assert succeeds("", env=mirror) == "" and times() == before
    shard = Path("repo/data/tinyshakespeare_bpe_val.bin")
    good = shard.read_bytes()
    shard.write_bytes(good[:-2])  # damaged, and its merges are lost: both are made again
    succeeds("", env=mirror)
    assert shard.read_bytes() == good
    os.unlink("repo/data/tinyshakespeare_bpe_merges.txt")
    succeeds("", env=mirror)
    assert prepared("tinyshakespeare_bpe_merges")


def test_no_vocabulary():
    Path("bare").mkdir()
    shutil.copy(real("tinyshakespeare.txt"), "bare")
    succeeds("", "has no gpt2/vocab.bpe\n", "no vocab.bpe: no GPT-2 tokens\n",
             env={"DATA_MIRROR": os.path.abspath("bare")})
    assert [n for n in prepared("tiny") if n.endswith(".bin")] == [
        "tinyshakespeare_bpe_train.bin", "tinyshakespeare_bpe_val.bin"]


# The servers' modes: plain (no ranges, like Python's own), range, cut (announces the whole file but
# sends half), cut-range (sends at most 1,500,000 bytes per request).
class Server(http.server.ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.mode, self.files = "plain", {}
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        mode, body = self.server.mode, self.server.files.get(self.path.rsplit("/", 1)[1])
        if body is None:
            return self.send_error(404)
        asked = "range" in mode and re.match(r"bytes=(\d+)-$", self.headers.get("Range", ""))
        first, size = int(asked[1]) if asked else 0, len(body)
        if asked and first >= size:
            self.send_response(416)
            self.send_header("Content-Range", "bytes */%d" % size)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", "bytes %d-%d/%d" % (first, size - 1, size))
        self.send_header("Content-Length", str(size - first))
        self.end_headers()
        most = {"cut": size // 2, "cut-range": 1500000}.get(mode, size)
        self.wfile.write(body[first:first + most])


@pytest.fixture(params=["curl", "wget"])
def server(request, monkeypatch):
    """A server, and a PATH on which this client is the only one."""
    if not shutil.which(request.param):
        pytest.skip("no " + request.param)
    Path("only").mkdir()
    for tool in [*TOOLS, request.param]:
        os.symlink(shutil.which(tool), "only/" + tool)
    monkeypatch.setenv("PATH", os.path.abspath("only"))
    served = Server()
    served.files = {"edu_fineweb_val_000000.bin": shard([7] * 2000000, GPT2),
                    "fineweb_val_000000.bin": shard([7] * 100, GPT2),
                    "fineweb_train_000001.bin": shard([8] * 200, GPT2),
                    "edu_fineweb_train_000001.bin": shard([8] * 400000, GPT2),
                    "edu_fineweb_train_000002.bin": shard([9] * 20, BYTES),
                    "edu_fineweb_train_000003.bin": b"x" * 90000,
                    "hellaswag_val.bin": struct.pack("<2i", 20240522, 1).ljust(2000, b"\0")}
    monkeypatch.setenv("DATA_URL", "http://127.0.0.1:%d" % served.server_port)
    yield served
    served.shutdown()
    served.server_close()


@pytest.mark.parametrize("mode", ["plain", "range", "cut-range"])
@pytest.mark.parametrize("there", [0, 1000000, 4001024])
def test_downloads(server, mode, there):
    """A download resumes from an existing part, or starts again if the server cannot resume."""
    server.mode = mode
    if there:
        first = server.files["edu_fineweb_val_000000.bin"]
        Path("repo/data/edu_fineweb_val_000000.bin.part").write_bytes(first[:there])
    o = run("fineweb-edu 2")
    assert o.status == 0, o
    assert prepared("edu") == sorted(server.files)[:2] + ["edu_fineweb_val_000000.bin"]
    for name in prepared("edu"):
        assert Path("repo/data", name).read_bytes() == server.files[name]
    assert succeeds("fineweb-edu 2") == ""


def test_download_fails(server):
    server.mode = "cut"
    refused("fineweb-edu 1", "val_000000.bin: download failed after 2000512 bytes")
    assert prepared("edu") == ["edu_fineweb_val_000000.bin.part"]
    server.mode = "range"
    assert run("fineweb-edu 1").status == 0
    assert prepared("edu") == ["edu_fineweb_train_000001.bin", "edu_fineweb_val_000000.bin"]
    refused("fineweb-edu 3", "train_000003.bin: wrong content (whole)")
    server.files["edu_fineweb_train_000003.bin"] = server.files["edu_fineweb_train_000002.bin"]
    refused("fineweb-edu 4", "train_000004.bin: download failed")
    assert len(prepared("edu")) == 4
    refused("tinystories", "tinystories needs GPT-2's vocab.bpe: ")
    succeeds("hellaswag")
    assert run("fineweb 1").status == 0
    assert prepared("fineweb") == ["fineweb_train_000001.bin", "fineweb_val_000000.bin"]
    assert Path("repo/data/hellaswag_val.bin").read_bytes() == server.files["hellaswag_val.bin"]
    os.unlink("repo/data/hellaswag_val.bin")
    server.files["hellaswag_val.bin"] = b"x" * 2000
    refused("hellaswag", "hellaswag_val.bin: wrong content (questions)")
    server.files["input.txt"] = b"another text"
    o = run("")
    assert o.status == 0 and MADE in o.out and "input.txt: wrong content (known" in o.err


def test_tinystories(server):
    server.files |= {"vocab.bpe": real("gpt2/vocab.bpe", "vocab.bpe").read_bytes(),
                     "TinyStoriesV2-GPT4-valid.txt": b" one <|endoftext|>\n two<|endof\n",
                     "TinyStoriesV2-GPT4-train.txt": b"".join(b"%d\n" % i for i in range(9999))}
    assert run("tinystories").status == 0
    assert prepared("tinystories") == ["tinystories_gpt2_train_000000.bin",
                                       "tinystories_gpt2_val_000000.bin"]
    assert tokens("repo/data/tinystories_gpt2_val_000000.bin") == [
        50256, 505, 50256, 11545, 27, 91, 437, 1659]
    assert succeeds("tinystories") == ""


# Runs that find their data in data/.
@pytest.fixture
def stories(built):
    """repo/ with the program and the stories' tokens; returns options of a one-layer model."""
    assert run("", env={"PATH": "/nowhere:" + os.environ["PATH"]}).status == 0
    shutil.copy(built[0], "repo/train_gpt2")
    program.path = str(Path("repo/train_gpt2").resolve())
    return "-e l1h1c16t16 -b 2 -x 1 -m 1 "


def test_default_data(stories, monkeypatch):
    monkeypatch.chdir("repo")
    succeeds(stories, " data/stories_bpe_train*.bin: 478,399 tokens", "validation loss")
    train = stories + "-i data/stories_bpe_train.bin"
    succeeds(train, "validation loss")
    os.rename("data/stories_bpe_val.bin", "data/tinyshakespeare_bpe_val.bin")
    assert succeeds(train, "no validation without --val-data (-j)").count("no validation") == 1
    refused(stories.replace("t16", "t16v300"),
            "has a vocabulary of 300 tokens, but that of the data in data/stories_bpe")
    os.rename("data/stories_bpe_train.bin", "data/tinyshakespeare_bpe_train.bin")
    succeeds(stories, " data/tinyshakespeare_bpe_train*.bin: ", "validation loss")


def test_readme(stories):
    """README's commands on a run, after two steps, in a new user's checkout."""
    commands = (TOP / "README.md").read_text().split("## Commands")[1]
    for command in re.findall("^    (.*runs/one[^#\n]*)", commands, re.M):
        command = command.replace("dev/", "%s/dev/" % TOP) + " -x 2 -m 1" * ("-y" in command)
        assert subprocess.run(command, shell=True, cwd="repo").returncode == 0, command
    assert os.path.getsize("repo/runs/one/report.html") > 9999


def train_sh(**more):
    """Runs dev/train.sh in a new session, on a model that takes a second."""
    program.path = "bash"
    return start("repo/dev/train.sh train_gpt2", stderr=subprocess.STDOUT,
                 before=lambda: (os.setsid(), default_signal()()), **more)


def test_make_train(stories):
    """Ctrl-C keeps the model; another call resumes with the same data."""
    Path("repo/dev").mkdir()
    script = (TOP / "dev/train.sh").read_text().replace("l4h4c128t64", "l1h1c32t64")
    script = re.sub("steps=[0-9]*", "steps=399", re.sub("loss=[0-9.]*", "loss=8", script))
    Path("repo/dev/train.sh").write_text(script)
    process, log = train_sh(), Path("repo/runs/first/log.jsonl")
    wait_until(lambda: log.exists() and '"step":9,' in log.read_text())
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=LIMIT_S)[0]
    saved, = names("repo/runs/first", "step-")
    assert process.returncode == 0
    assert "Interrupted: make train resumes from runs/first/" + saved in said
    said = train_sh().communicate(timeout=LIMIT_S)[0]
    assert "resumed from runs/first/" + saved in said and "finished after step 399" in said
    assert "Expected: a val" in said
    command, = re.findall("^.* --generate .*$", said, re.M)
    o = subprocess.run(command, shell=True, cwd="repo", capture_output=True, text=True)
    assert o.stdout.startswith("Once upon a time"), o
    for kind in "train.bin", "val.bin", "merges.txt":
        shutil.copy("repo/data/stories_bpe_" + kind, "repo/data/tinyshakespeare_bpe_" + kind)
    said = train_sh().communicate(timeout=LIMIT_S)[0]
    assert " -i data/stories_bpe_train.bin " in said and "nothing to do: " in said
    assert "rm -r runs/first && make train" in said
    Path("repo/data/tinyshakespeare_bpe_train.bin").write_text("\n")
    shutil.rmtree("repo/runs")
    process = train_sh()
    said = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 1
    assert said.splitlines()[-1].startswith("train_gpt2: data/tinyshakespeare_bpe_train.bin")
