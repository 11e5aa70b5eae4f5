"""Scripts and tools around the programs: make train, make install, dev/report.py, the notebook,
dev/gpu_check.sh on the emulated GPU, and a machine that has only a compiler."""

import html, runpy, shlex, xml.etree.ElementTree

from files import *


def shell(command, status=0, **more):
    """Runs a command line; returns what it has printed."""
    o = subprocess.run(command, shell=isinstance(command, str), text=True, timeout=LIMIT_S,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)
    assert o.returncode == status, o.stdout
    return o.stdout


def test_install(tmp_path):
    """Manual page and completion have every option; the version is the same everywhere."""
    shell(["make", "-s", "install", "PROGRAM=train_gpt2", "DESTDIR=%s/root" % tmp_path,
           "PREFIX=/usr"], cwd=TOP)
    page = Path("root/usr/share/man/man1/train_gpt2.1")
    options = re.findall(r"^  (?:-\w,|   ) (--[a-z0-9-]+)",
                         shell("root/usr/bin/train_gpt2 --help all"), re.M)
    text = page.read_text().replace("\\-", "-")
    assert re.findall(r"^(?:\\fB-.\\fR, )?\\fB(--[a-z0-9-]+)", text, re.M) == options
    completed = shell(["bash", "-c", """. root/usr/share/bash-completion/completions/train_gpt2
        COMP_WORDS=(train_gpt2 --) COMP_CWORD=1 && _train_gpt2 && printf '%s\\n' "${COMPREPLY[@]}"
        COMP_WORDS=(train_gpt2 -r mlp -k w) COMP_CWORD=4 && _train_gpt2 && echo "${COMPREPLY[@]}"
        COMP_WORDS=(train_gpt2 -r n) COMP_CWORD=2 && _train_gpt2 && echo "${COMPREPLY[@]}"
        COMP_WORDS=(train_gpt2 -e d1) COMP_CWORD=2 && _train_gpt2 && echo "${COMPREPLY[@]}"
        COMP_WORDS=(train_gpt2 --gpu h2) COMP_CWORD=2 && _train_gpt2 && echo "${COMPREPLY[@]}" """])
    assert completed.splitlines() == [*options, "wsd", "none norm", "d12", "h20 h200"]
    assert "usage" in shell("root/usr/bin/train_gpt2_report --help")
    shell("root/usr/bin/train_gpt2_tokenize --help")
    if shutil.which("groff"):
        assert shell("groff -man -ww -Tutf8 %s > /dev/null" % page) == ""
    version = re.match(r"train_gpt2 (\S+)", shell("root/usr/bin/train_gpt2 --version"))[1]
    for path, pattern in ((page, r'^.TH .*train_gpt2 (.*)"'),
                          (TOP / "README.md", r"Cite as train_gpt2 ([\d.]*\d)"),
                          (TOP / "dev/CHANGELOG.md", r"^## ([\d.]+)")):
        assert re.search(pattern, path.read_text(), re.M)[1] == version
    succeeds(TINY + "-x 1 -o out")
    assert log()[0]["version"] == version


def report(arguments, status=0, **more):
    return shell([sys.executable, TOP / "dev/report.py", *arguments.split()], status, **more)


@pytest.fixture
def reported():
    """A run with validations and samples."""
    pytest.importorskip("matplotlib")
    succeeds("-i train.bin -j val.bin -e l2h2c32t32 -b 2 -x 5 -v 2 -m 1 -s 5 -g 4 --quiet -o run")


def test_report_run(reported):
    """The page shows the log's numbers as text, and escapes markup in the log."""
    report("run")
    page, whole = Path("run/report.html").read_text(), log("run")
    assert "%.4f" % [e["loss"] for e in whole if "loss" in e][-1] in page
    assert "5 of 5" in page and not re.search("<(script|img|link|iframe)|https?://(?!www.w3)", page)
    with open("run/log.jsonl", "a") as file:
        file.write('{"step":6,"loss":null,"grad_norm":null,"lr":1e400,"skipped":1}\n'
                   '{"step":6,"sample":"</pre><script>alert(1)</script>\\u001b[1m&amp;"}\n'
                   '{"step":7,"lo')
    report("run")
    succeeds("-o run -y -x 3 --log-every 9")    # its first line follows the cut one
    assert report("run") == ("report.py: note: run/log.jsonl:%d: left out a cut line\n"
                             "run/report.html\n" % (len(whole) + 3))
    page = Path("run/report.html").read_text()
    assert "6 of 6" in page
    assert "not finite" in page and "<script>" not in page and "&lt;script&gt;alert(1)" in page
    report("run --svg run.svg")
    xml.etree.ElementTree.parse("run.svg")


def test_report_resumed():
    """What a run recorded after the step from which it was resumed does not count."""
    succeeds("-i train.bin -j val.bin -e l2h2c16t16 -b 2 -x 5 -v 2 -m 1 -s 4 -n 2 --quiet -o run")
    events = log("run")
    read = runpy.run_path(str(TOP / "dev/report.py"))
    for at, resumes in (3, [3]), (4, [3, 4]), (2, [2]):
        events += [log("run")[0], {"event": "resume", "step": at}]
        events += [{**e, "tokens_per_s": 10 * at, "skipped": 1} for e in log("run")
                   if e.get("step") == at + 1 and "loss" in e]
        Path("resumed.jsonl").write_text("\n".join(map(json.dumps, events)) + "\n")
        run = read["Run"]("resumed.jsonl")
        assert [*run.steps] == [*range(1, at + 2)] and (run.resumes, run.end) == (resumes, "")
        assert [*run.checks] == [*run.checkpoints] == [2] and not run.samples
    figures = read["run_figures"](run)
    speeds = [e["tokens_per_s"] for e in log("run") if "loss" in e][:2]
    assert figures["steps"] == "3 of 5" and figures["skipped steps"] == 1
    assert figures["lowest validation loss"] == "%.4f at step 2" % series("val_loss", "run")[0]
    assert figures["tokens/s, median"] == "{:,.0f}".format(sorted([20, *speeds])[1])


def test_report_compare(reported):
    """Several runs share one picture; the page has their numbers and the options that differ."""
    succeeds("-i train.bin -e l2h2c32t32 -b 2 -x 4 -l 1e-2 --quiet -o other")
    for name, key in ("run", "val_loss"), ("other", "loss"):    # the last, and not the best
        with open(name + "/log.jsonl", "a") as file:
            file.write('{"step":9,"%s":7}\n' % key)
    report("run other")
    page = Path("compare.html").read_text()
    losses = min(series("val_loss", "run")), series("loss", "other")[-1]
    assert "run: %.3f" % losses[0] in page and "other, training: %.3f" % losses[1] in page
    assert re.search("--lr</td><td>.*</td><td>0.01<", page)
    assert "--seq-len" not in page  # equal
    report("run other run --svg three.svg")
    xml.etree.ElementTree.parse("three.svg")


def test_report_plans(reported):
    """Pictures of plans and of fitting settings are valid SVG; the tables list all settings."""
    ways = {name: succeeds(query + " --json") for name, query in {
        "plan": "--plan steps -e d12 -b 4 -r block:5 --offload moments,master --gpu-mem 16GiB",
        "fit": "--fit all -e d12 --gpu 3070",
        "cards": "--plan --gpu all -e d36 -b 8 -r none --offload none"}.items()}
    for name, text in ways.items():
        Path(name + ".json").write_text(text)
    report("--plan plan.json --svg plan.svg")
    report("--fit fit.json --svg fit.svg")
    for name in "plan.svg", "fit.svg":
        xml.etree.ElementTree.parse(name)
    report("--fit fit.json cards.json -o fit.html")
    page = Path("fit.html").read_text()
    assert "img-src data:" in page and 'href="data:image' in page    # the color bar
    for name, key in ("fit", "ways"), ("cards", "cards"):
        for way in json.loads(ways[name])[key]:
            assert html.escape("%s %s" % (way["note"], way["options"])) in page
            assert not way["tokens_per_s"] or "{:,}".format(way["tokens_per_s"]) in page


def test_report_refused():
    """Each check ends in one line, after the usage if it is about the arguments alone."""
    start = '{"event":"start","options":{},"plan_bytes":1,"model":{"parameters":1}}\n'
    for name, text in {"plan.json": '{"plan":[]}', "run.jsonl": start + '{"step":1,"lo',
                       "broken.jsonl": "\n" + start, "empty.jsonl": '{"step":1,"loss":2}\n',
                       "matplotlib.py": "raise ImportError"}.items():
        Path(name).write_text(text)
    for arguments, expected, status in (
            ("--fit plan.json -o bad", "plan.json is not the output of --fit --json or of", 1),
            ("absent -o bad", "cannot read absent: No such file", 1),
            ("broken.jsonl -o bad", "broken.jsonl:1: not a JSON", 1),
            ("empty.jsonl -o bad", "empty.jsonl: no line that starts a run", 1),
            ("--plan train.bin -o bad", "train.bin is not the output of --plan", 1),
            ("run.jsonl absent -o bad", "cannot read absent: No such file", 1),
            ("run.jsonl -o bad", "needs matplotlib: apt-get install", 1),
            ("-o bad", "name the folder of a run, or give --plan FILE or --fit FILE", 2),
            ("run.jsonl run.jsonl --plan plan.json", "--plan: only with one run", 2)):
        said = report(arguments, status, env={**os.environ, "PYTHONPATH": "."})
        assert expected in said and not Path("bad").exists(), said
        assert status == 2 or said.count("\n") == 1
    Path("matplotlib.py").unlink()
    pytest.importorskip("matplotlib")
    said = report("run.jsonl -o absent/page.html", 1)
    assert "cannot write absent/page.html: No such file" in said and said.count("\n") == 1


def test_notebook():
    """The notebook has no faults, and each injected fault is found."""
    check = [sys.executable, TOP / "dev/check/notebook.py"]
    assert shell(check) == ""
    assert "--train-bpe {size} --documents" in (TOP / "dev/train_gpt2.ipynb").read_text()
    wrong = (TOP / "dev/train_gpt2.ipynb").read_text()
    for was, now in (("--fit bits", "--fitt bits"), ('"import array', '"import (array'),
                     ("-g 60 ", "--sampels "), ("-e d24 -b", "-e d24 -B"),
                     ("make -s", "make -s al"), ("--train-bpe", "--train-bp"),
                     ("bench_torch.py`", "bench.py`"), ('"outputs": []', '"outputs": [1]'),
                     ('"source": [', '"source": ["","","","",')):
        assert was in wrong, was
        wrong = wrong.replace(was, now)
    Path("wrong.ipynb").write_text(wrong)
    said = shell([*check, "wrong.ipynb"], 1)
    for fault in ("option --fitt", "option --sampels", "option -B", "option --train-bp ",
                  "target al", r"line \d+: ", r"no file dev/\w+/bench.py", "has outputs",
                  "lines, more than 200"):
        assert re.search(fault, said), fault


# Says what gpu_check.sh reads: steps of 64 ms (the median after the first quarter), or 200 with
# moments in host memory. Also as Python.
GPU_PROGRAM = r"""#!/bin/bash
options=$* dir=${options##*-o } dir=${dir%% *} loss=4 norm=2 weights=1 ms=64
case "$*" in *moments*) ms=200 ;; esac
case "$*" in $WHEN) eval "$FAULT" ;; esac
case "$*" in
*--check*) echo "check dqkvw relative difference 1e-3" ;;
*bench_torch*) printf 'torch %s T 64 ms 2 tokens/s %s MiB 9\n' "eager d12 -r 0 B 16" 1000 \
    "eager d12 -r 1 B 8" 1000 "compiled d12 -r 1 B 8" 2000 ;;
*--plan*)
    echo '{"batch":4,"seq_len":64,"device_bytes":0,"host_bytes":680000000,"tokens_per_s":2000}' ;;
*--fit*) echo '"best":[{"options":"-b 8 -r norm:1 --offload moments,master"}]' ;;
*-o*)
    mkdir -p "$dir/step-4"
    echo "$weights" > "$dir/step-4/model.bin"
    echo '{"step":1,"loss":'$loss',"grad_norm":'$norm',' > "$dir/log.jsonl" ;;&
*) seq -f "step 1 of 20: %g ms each" $((ms - 12)) $((ms + 7)) ;;
esac
"""


def gpu_check(stage, when="", fault="", status=1, smi="exit 1", **more):
    for name, text in ("program", GPU_PROGRAM), ("nvidia-smi", "#!/bin/bash\n" + smi):
        script(Path(name), text)
    return shell([TOP / "dev/gpu_check.sh"], status, env={
        **os.environ, "GPT2CU": os.path.abspath("program"), "BENCH": "false", "TEST": "false",
        "GPUS": "1", "PYTHON": os.path.abspath("program"), "DTYPE": "fp16", "STAGES": stage,
        "LOGS": os.path.abspath("logs"), "WHEN": when, "FAULT": fault,
        "PATH": "%s:%s" % (os.getcwd(), os.environ["PATH"]), **more})


@pytest.mark.all
@pytest.mark.gpu
@pytest.mark.emulated
def test_gpu_check():
    """On the emulated GPU, all stages that can run pass; the archive has the logs."""
    stages = "check speed update fp8 bits test offload gpus"
    said = gpu_check(stages, status=0, GPT2CU=words("")[0], TEST="true", MODELS="l2h2c64t64",
                     STEPS="4", LARGEST_BATCH="1", TOKENS="64", GPUS="2", DTYPE="bf16",
                     FP8="l2h2c64t64:1")
    for stage in stages.split():
        assert re.search(r"^%s .* ok\b" % stage, said, re.M), said
    listed = shell(["tar", "-tzf", "logs.tar.gz"])
    assert "summary.md" in listed and "gpus" in listed
    page = Path("logs/summary.md").read_text()  # with planned MiB and the card's row
    for run in "-r 1 -b 1 --offload none", "-d 64 .*", "-r 0 -b 4 .* --optimizer muon":
        assert re.search(r"^\| \S+ \| l2h2c64t64 %s \| \S+ \| \d+ \| - \| - \| \d+ \| - \|$" % run,
                         page, re.M), page
    assert re.search(r"^\| no GPU seen; .* \| l2h2c64t64 -r 0 -b 1 .* \| - \| \d+ ok, 0 failed, ",
                     page, re.M), page


@pytest.mark.parametrize("stage, when, fault, failed, gpus", [
    ("check", "*--check*fp32*", "echo oh; exit 9", "d12 fp32 B 1 T 256 .* exit status 9: oh", 1),
    ("bits", "*", '[ ! -d "$dir.0a" ] || loss=4.1', "two runs .* losses, norms or", 1),
    ("bits", "*", '[ ! -d "$dir.0a" ] || weights=2', "two runs .* losses, norms or", 1),
    ("bits", "*", 'mkdir() { command mkdir "$dir"; }', "two runs .* losses, norms or", 1),
    ("bits", "*", "dir+=/x", "-r 0, -r 1 .* losses or norms differ", 1),
    ("bits", "*-r 1*", "norm=2.00001", "-r 0, -r 1 .* losses or norms differ", 1),
    ("speed", "* -x 20 *", "echo oh; exit 9", "d12 -r 0 B 16 .* exit status 9: oh", 1),
    ("speed", "* -x 1 *", "exit 9", "d48 -r 1 .* exit status 9", 1),
    ("test", "", "", "false .* exit status 1", 1), ("bench", "", "", "false .* exit status 1", 1),
    ("fp8", "*--matmul fp8*", "loss=4.1", "50 steps .* losses within 2.4e-02", 1),
    ("fp8", "*--matmul fp8*", "norm=3.1", "50 steps .* norms within 3.5e-01", 1),
    ("fp8", "*--matmul fp8*", "echo oh; exit 9", "fp8 .* exit status 9: oh", 1),
    ("offload", "*weights*", "loss=4.1", "offload weights .* differ from", 1),
    ("offload", "*none*", "echo oh; exit 9", "offload none .* exit status 9: oh", 1),
    ("gpus", "*-b 4*", "echo oh; exit 9", "one rank .* exit status 9: oh", 1),
    ("gpus", "*-z 2*", "echo oh; exit 9", "2 ranks, -z 2 .* exit status 9: oh", 1),
    ("gpus", "*-z 2*", "loss=4.00005", "4 ranks, -z 2 .* losses within 1.2e-05, norms within 0", 1),
    ("gpus", "*-z 2*", "echo() { printf '%s\n' \"$@\" \"$@\"; }", "2 ranks, -z 2 .* differs", 1),
    ("gpus", "*-z 1*", "norm=2.0003", "2 ranks, -z 1 .* norms within 1.5e-04", 1),
    ("gpus", "*-z 3*", "loss=4.01", "2 ranks, -z 3 .* losses within 2.5e-03", 2),
    ("gpus", "*-z 3*", "norm=2.05", "2 ranks, -z 3 .* norms within 2.4e-02", 2)])
def test_gpu_check_fails(stage, when, fault, failed, gpus):
    """Each comparison of dev/gpu_check.sh fails when it should."""
    said = gpu_check(stage, when, fault, GPUS=str(gpus))
    assert re.search("^%s +%s" % (stage, failed.replace(" .*", " +FAILED .*")), said, re.M), said


def test_gpu_check_page():
    """Ratios to forecast and PyTorch, an update's rate in host memory, and the stages cut."""
    said = gpu_check("check bits speed update torch offload gpus", "*", """case "$options" in
        *-z\\ 2*) loss=4.00003 norm=2.0001 ;;
        *d12*-r\\ 1*-b\\ 16* | *d48*-r\\ 0*) exit 3 ;;
        *d12*-r\\ 1*-b\\ 8*) echo 1324 > $LOGS.used; sleep 1; rm $LOGS.used ;; esac""", 0,
        smi="""case "$*" in *=name*) echo H200 ;;
        *-lms*) while sleep 0.02; do cat $LOGS.used; done ;; *) echo 300 ;; esac""")
    for row in ("-r 0 -b 16 --offload none | 64.00 | 4000 | 2.00 | - | 0 | 4.00 |",
                "-r 1 -b 8 --offload none | 64.00 | 4000 | 2.00 | 1024 | 0 | 2.00 |",
                "-d 524288 -b 8 -r norm:1 --offload moments,master | 197.00 | 2661360 | 1330.68 |"):
        assert "| program | d12 " + row in said
    assert re.search(r"in host memory +ok +5 GB/s(?s:.*) 3.12 x none;", said)
    assert re.search("-z 1 .*the same bits as", said) and not re.search("-z 2 .*bits as", said)
    torch, speed = Path("logs/torch.log").read_text(), Path("logs/speed.log").read_text()
    assert "--model d12 --dtype fp16 --batch 16 --batch-recompute 8\n" in torch
    assert "-e d48 -r 1 -b 16 --offload none -x 8 " in speed
    assert re.search(r"\| H200; .* \| 1024 \| \d+ ok,", Path("logs/summary.md").read_text())
    said = gpu_check("speed bench", "* -x *", "sleep 60", 0, SECONDS_IN_ALL="5")
    assert "cut by a time limit: speed bench;" in said and "no time left" in said
    assert "STAGES has no stage 'tests'" in gpu_check("speed tests")


SANITIZER = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
*/injected) echo "Error: at injected_kernel(int *)"; exit 9 ;;
*racecheck*bf16*) echo "Internal Sanitizer Error: the tool encountered an error"; exit 1 ;;
*memcheck*bf16*) echo "Invalid read at splitKreduce_kernel"; exit 9 ;;
*memcheck*fp32*) echo "Invalid write at adamw_kernel, at splitKreduce_kernel"; exit 9 ;;
*racecheck*fp32*) echo "Internal Sanitizer Error: race at gelu_kernel"; exit 9 ;;
esac
"""


def test_gpu_check_sanitizer(tmp_path):
    """A tool that fails is skipped; our kernels' errors fail; no racecheck of 16-bit attention."""
    for name, text in ("compute-sanitizer", SANITIZER), ("nvcc", "#!/bin/sh\n"):
        script(tmp_path / name, text)
    said = gpu_check("sanitizer", PATH="%s:%s" % (tmp_path, os.environ["PATH"]), DTYPE="bf16",
                     CALLS=str(tmp_path / "calls"))
    found = dict(re.findall(r"^sanitizer +(\S+ \S+) +(\S+)", said, re.M))
    assert found == {"memcheck bf16": "ok", "memcheck fp32": "FAILED", "racecheck bf16": "skipped",
                     "racecheck fp32": "FAILED", "initcheck fp32": "ok"}, said
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ["racecheck" in c and "bf16" in c for c in calls] == [
        "--kernel-name-exclude kns=attention" in c for c in calls]


@pytest.mark.full
def test_bare_machine(tmp_path):
    """With only a compiler, make and a shell, `make test` runs the unit programs, names skips."""
    bin, clone = tmp_path / "bin", tmp_path / "clone"
    bin.mkdir()
    hidden = re.compile("python|clang|cpp?check|shellcheck|curl|wget|nv|mpi|apt|sudo|strace")
    for folder in os.environ["PATH"].split(":")[::-1]:
        for path in Path(folder).glob("*"):
            if not hidden.match(path.name):
                (bin / path.name).unlink(missing_ok=True)
                (bin / path.name).symlink_to(path)
    files = shell("git ls-files -z", cwd=TOP).split("\0")[:-1]
    for name in files:
        if (TOP / name).exists():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TOP / name, clone / name)
    env = {"PATH": str(bin), "HOME": str(tmp_path), "PYTHON": "none"}
    said = shell("git init -q . && git add -A && make test NVCC=", cwd=clone, env=env)
    assert re.search(r"skipped \(no pytest", said) and re.search(
        r"\n[1-9]\d* passed, 0 failed, [1-9]\d* skipped\n$", said)


def test_recipes():
    """The commands of recipes that have not been run are accepted, and fit their card."""
    text = (TOP / "dev/recipes/not_run.md").read_text()
    found = re.findall(r"on (?:a|eight)\s(\w+):\n\n    \./train_gpt2cu (.*)$", text, re.M)
    assert len(found) == text.count("./train_gpt2cu ") == 5
    for card, options in found:
        options = re.sub(r"-i \S+ ", "", options)
        said = succeeds([words("")[0], *shlex.split(options), "--plan", "--gpu", card])
        assert "; fits" in said and "forecast: " in said


def own_text_folders(*more):
    for folder in "data", "dev", *more:
        Path(folder).mkdir()
    shutil.copy(words("")[0], "train_gpt2")
    shutil.copy(TOP / "data/tokenize", "data/tokenize")
    shutil.copytree(TOP / "dev/recipes", "dev/recipes")


def test_own_text():
    """Each path and each contents has shards and a run of its own; a second call resumes."""
    own_text_folders("a", "b")
    options = "-e l1h1c16t16 --steps=2 -u 0 -b 1 -v 0 --sample-every 0".split()
    train = lambda path: shell(["dev/recipes/own_text.sh", path, "train", *options])
    lines = stories_text().splitlines()
    for i, path in enumerate(("a/my book.txt", "b/my book.txt", "b/my-book.md", "ä.txt", "ö")):
        Path(path).write_text("\n".join(lines[9 * i:9 * i + 3]) * 3)
        said = train(path)
        assert "pre-tokens, which yield no more\n" in said and "resumed from" not in said
        assert "nothing to do" in train(path)
    with open("a/my book.txt", "a") as file:
        file.write(lines[100])
    assert "finished after step 2" in train("a/my book.txt")
    assert len(names("runs")) == len(names("data")) // 5 == 6


@pytest.mark.full
def test_own_text_recipe(tmp_path):
    """dev/recipes/own_text.sh on tinyshakespeare reaches 1.6 nats per byte, in ten minutes."""
    text = TOP / os.environ.get("DATA_MIRROR", "data") / "tinyshakespeare.txt"
    if not text.exists():
        pytest.skip("neither DATA_MIRROR nor data/ has tinyshakespeare.txt")
    own_text_folders()
    shutil.copy(text, "play.txt")
    said = shell("dev/recipes/own_text.sh play.txt train")
    loss = float(re.findall(r"validation loss ([\d.]+)", said)[-1])
    tokens, = struct.unpack_from("<i", next(Path("data").glob("play_*_val.bin")).read_bytes(), 8)
    assert loss * tokens / (text.stat().st_size // 10) <= 1.6


def manual(title):
    """The commands or the program of a section of dev/manual.md."""
    text = (TOP / "dev/manual.md").read_text()
    section = re.sub(r"\\\n +", "", text.split("\n## %s\n" % title)[1].split("\n## ")[0])
    return re.sub("^    ", "", "\n".join(re.findall("^    .*", section, re.M)), flags=re.M)


@pytest.mark.gpu
@pytest.mark.emulated
def test_out_of_memory():
    """The manual's way from the error to a run: the first command recommends a command such as the
    last one, which fits; of a smaller model, the others run."""
    here, machine, last = [line.split("#")[0].strip() for line in
                           manual('What do I do about "CUDA out of memory"?').splitlines()]
    best = shell(shlex.join(on_cpu(here.split(" ", 1)[1]))).splitlines()[-1]
    assert re.search("/train_gpt2cu -e gpt2-xl -b .* -d 524288 -r .* --offload ", best)
    options = last.split(" -i ")[0].split(" ", 1)[1]
    assert "; fits" in shell(shlex.join(on_cpu(options + " --plan --gpu 4060ti")))

    def small(line):
        for was, now in (("gpt2-xl", "l2h2c64t64"), ("524288", "512"), ("norm:6", "norm:1"),
                         ("data/fineweb_train_*.bin", "train.bin"),
                         ("./train_gpt2cu", words("")[0])):
            line = line.replace(was, now)
        return line

    assert "\nsuggested: " in shell(small(machine))    # no speeds on the emulated GPU
    assert "finished after step 2" in shell(small(last) + " -x 2")


def test_tensorboard(reported):
    """The manual's script copies the numbers of a log."""
    pytest.importorskip("torch.utils.tensorboard")
    Path("log.py").write_text(manual("How do I log to TensorBoard or W&B?"))
    assert shell([sys.executable, "log.py", "run"]) == ""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator("run").Reload()
    for key in "loss", "val_loss":
        assert [(e.step, e.value) for e in events.Scalars(key)] == [
            (e["step"], pytest.approx(e[key])) for e in log("run") if key in e]
