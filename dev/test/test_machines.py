"""The Makefile and dev/deps.sh on simulated machines: small scripts replace nvcc, nvidia-smi and
apt-get and record how they were called. Also plans of a 32-bit build and of the web page."""

import urllib.request

from program import *

NVCC = r"""#!/bin/sh
echo "$*" >> "$CALLS"
[ -z "$NVCC_FAILS" ] || { echo "error: injected"; exit 1; }
case "$*" in *tokenize.c*) [ -z "$SLOW" ] || sleep "$SLOW" ;; esac
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then printf '#!/bin/sh\necho 450\n' > "$2" && chmod +x "$2"; fi
    shift
done
"""
SMI = r"""#!/bin/sh
echo nvidia-smi >> "$CALLS"
case "$*" in *compute_cap*) [ -z "$GPU" ] || echo "$GPU" | tr ' ' '\n' ;; *) echo Fake ;; esac
"""


class Machine:
    """A clone with data, a toolkit behind a link as in Ubuntu's /usr/bin, and no NCCL."""

    def __init__(self, folder):
        self.clone, self.toolkit = folder / "clone", folder / "toolkit"
        self.bin, self.calls = folder / "bin", folder / "calls"
        (self.clone / "data").mkdir(parents=True)
        for name in "Makefile", "train_gpt2.c", "train_gpt2.cu", "test_gpt2.cu", "dev":
            (self.clone / name).symlink_to(TOP / name)
        for file in [*TOP.glob("data/*.c"), *TOP.glob("data/*.sh")]:
            (self.clone / "data" / file.name).symlink_to(file)
        (self.clone / "data/some.bin").touch()
        script(self.toolkit / "bin/nvcc", NVCC)
        for name in "include", "lib64":
            (self.toolkit / name).mkdir()
        script(self.bin / "nvidia-smi", SMI)
        (self.bin / "nvcc").symlink_to(self.toolkit / "bin/nvcc")

    def make(self, *arguments, path="", **env):
        """Runs make; returns its status, its output and the calls of tools."""
        self.calls.write_text("")
        inherited = {name: value for name, value in os.environ.items() if name not in (
            "MAKEFLAGS", "MAKELEVEL", "REPORTED", "WERROR", "ARCH", "NVCC", "GPU", "NCCL")}
        o = subprocess.run(
            ["make", "NCCL=", *arguments], cwd=self.clone, text=True, timeout=LIMIT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={
                **inherited, "CALLS": str(self.calls), "GPU": "",
                "PATH": path + str(self.bin) + ":" + os.environ["PATH"], **env})
        return o.returncode, o.stdout, self.calls.read_text()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


# The GPUs' compute capabilities, make arguments, patterns expected in the nvcc calls, and a pattern
# that must not occur there or in the output.
@pytest.mark.parametrize("gpu, arguments, expected, absent", [
    ("", "", ["arch=compute_80,code=sm_80 .*arch=compute_80,code=compute_80", " -lineinfo ",
              "-rpath,.*/toolkit/lib64", "-lcublasLt *$"], "-Werror|-lcublas |-lnccl"),
    ("8.9", "", ["arch=compute_89,code=sm_89"], "compute_80|No GPU"),
    ("6.1 8.9", "", ["arch=compute_89,code=sm_89"], "_61"),  # one that is too old for nvcc
    ("9.0", "", ["arch=compute_90a,code=sm_90a"], "compute_80|No GPU"),
    ("9.0", "WERROR=-Werror", ["-Werror all-warnings .*-Xcompiler .*-Werror"], "No GPU"),
    ("", "ARCH=80,90a", ["sm_80 .*sm_90a"], "No GPU"),
    ("", "NCCL=yes", ["-lcublasLt -DGPT2_NCCL=1 -lnccl *$"], "MPI")])
def test_gpu_build(machine, gpu, arguments, expected, absent):
    """make train_gpt2cu builds for the GPUs that are installed."""
    status, said, calls = machine.make("train_gpt2cu", *(
        word.replace(",", " ") for word in arguments.split()), GPU=gpu)
    assert status == 0, said
    for pattern in expected:
        assert re.search(pattern, calls, re.M), calls
    assert not re.search(absent, calls + (said if "No" in absent else ""))
    assert gpu or arguments.startswith("ARCH") or re.search(
        "No GPU found: train_gpt2cu is built for sm_80 .* ARCH=75 a T4", said.replace("\n", " "))


def test_rebuild(machine):
    """Changing a flag, library or list of GPUs rebuilds a program; changing WERROR does not."""
    for arguments, built in (["ARCH=80"], 1), (["ARCH=80", "WERROR=-Werror"], 0), (
            ["ARCH=80", "NCCL=yes"], 1), (["ARCH=80", "NCCL=yes"], 0), (["ARCH=80"], 1), (
            ["ARCH=89"], 1):
        assert ("-gencode" in machine.make("train_gpt2cu", *arguments)[2]) == built, arguments


def test_no_data(machine):
    """Failing to prepare data is one line; two builds of data/tokenize use different names."""
    (machine.clone / "data/some.bin").unlink()
    compiler = "CC=%s/bin/nvcc" % machine.toolkit
    mirror = {"DATA_MIRROR": str(machine.clone / "absent")}
    status, said, calls = machine.make("-s", "-j2", "train_gpt2", "data/tokenize", compiler,
                                       SLOW="2", **mirror)
    parts = re.findall(r"data/tokenize\S*part", calls)
    assert parts and len(parts) == len(set(parts)) and (machine.clone / "train_gpt2").exists()
    status, said, calls = machine.make("-s", "train_gpt2cu", "ARCH=80", compiler, **mirror)
    assert status == 0 and re.search(
        r"^no data in data/ yet: preparing tiny.*\n(.*\n)*"
        r"no data yet \(prepare.sh: DATA_MIRROR=\S* has no .*again$", said, re.M)
    for name in "train_gpt2cu", "data/tokenize", "data/tokenize.c":
        (machine.clone / name).unlink(missing_ok=True)
    (machine.clone / "data/tokenize.c").write_text('#error "injected"\n')
    status, said, calls = machine.make("-s", "train_gpt2cu", "ARCH=80")
    assert status == 0 and (machine.clone / "train_gpt2cu").exists()
    assert re.search(r"^no data yet .*make data tries again$", said, re.M)


def test_train_data(machine):
    """make train prepares data only if there is none, and uses the CPU if the card is too old."""
    said = machine.make("-n", "train", GPU="6.1")[1]
    assert "data/prepare.sh" in said and "-o train_gpt2 " in said and "train_gpt2cu" not in said
    (machine.clone / "data/stories_bpe_train.bin").touch()
    assert "data/prepare.sh" not in machine.make("-n", "train")[1]


def test_toolkit(machine):
    """nvcc is called in its toolkit, whose headers are system headers; its path may have spaces."""
    toolkit, emulated = machine.toolkit, ("-n", "train_gpt2cu_cpu", "CUDA_HEADERS=yes")
    sass = lambda path="": machine.make("-n", "build/sm_80.log", path=path)[1]
    assert "-isystem %s/include" % toolkit in machine.make(*emulated)[1]
    assert "%s/bin/nvcc -std" % toolkit in sass()
    assert "-isystem /usr/include" not in machine.make(*emulated, "NVCC=/usr/bin/nvcc")[1]
    assert "-isystem" not in machine.make(*emulated, "NVCC=")[1]
    (toolkit / "bin/nvcc").rename(toolkit / "bin/ccache")
    (machine.bin / "nvcc").unlink()
    (machine.bin / "nvcc").symlink_to(toolkit / "bin/ccache")
    assert "%s/nvcc -std" % machine.bin in sass()
    spaced = toolkit.parent / "a b"
    script(spaced / "bin/nvcc", NVCC)
    link = machine.clone / "build/cuda"
    assert re.search("%s/bin/nvcc -std=.* -gencode" % link, sass("%s/bin:" % spaced))
    assert os.readlink(link) == str(spaced)
    status, said, _ = machine.make("-s", "train_gpt2cu", "NVCC=%s/absent/nvcc" % toolkit)
    assert status and "deps.sh: no nvcc; the CUDA toolkit: https" in said


def test_dry_run(machine):
    """make -n executes nothing; nvidia-smi, which takes seconds, is called only to build."""
    _, said, calls = machine.make("-n", "test", "style")
    assert re.search("dev/deps.sh test.*dev/test.sh", said, re.S) and "nvidia-smi" in calls
    assert not re.search("passed|^build  ", said, re.M)
    assert not any("nvidia-smi" in machine.make(*word)[2] for word in ([], ["help"], ["clean"]))


@pytest.mark.parametrize("user", [1000, 0])
def test_deps(tmp_path, user):
    """If tools are missing, dev/deps.sh installs them for root and names them for other users."""
    bin = tmp_path / "bin"
    for name in "gcc", "g++", "make", "curl", "mpirun", "strace", "apt-get", "sudo":
        script(bin / name, '#!/bin/sh\necho "%s $*" >> "$CALLS"\n' % name)
    script(bin / "id", "#!/bin/sh\necho %d\n" % user)
    script(bin / "python3", "#!/bin/sh\nexit 1\n")
    for name in "env", "bash", "timeout":
        (bin / name).symlink_to(shutil.which(name))
    Path("calls").touch()
    said = subprocess.run(["bash", TOP / "dev/deps.sh", "test"], text=True,
                          stderr=subprocess.STDOUT, stdout=subprocess.PIPE,
                          env={"PATH": str(bin), "PYTHON": "python3",
                               "CALLS": str(tmp_path / "calls")}).stdout
    calls = Path("calls").read_text()
    packages = "python3-pytest python3-pytest-xdist xz-utils shellcheck"
    if user:
        assert "to get it: sudo apt-get install " + packages in said and not calls
    else:
        assert said.startswith("deps.sh: apt-get now installs " + packages + ", for ")
        assert re.search("apt-get .*install -y .*" + packages, calls)


def drawn_plans(count, seed):
    """Random options for plans, most of them valid."""
    pick = random.Random(seed)
    one = lambda words: pick.choice(words.split())
    maybe = lambda share, text: text if pick.random() < share else ""
    for _ in range(count):
        model = one("gpt2 d24 gpt2-large gpt2-xl gpt2-xl shape")
        if model == "shape":
            head, heads = int(one("16 32 64 80 128")), pick.randint(1, 40)
            model = "l%dh%dc%dt%s" % (pick.randint(1, 96), heads, head * heads,
                                      one("128 1000 1024 4096"))
        card, many = one("t4 4060ti 4090 a100 h100 any any"), pick.random() < 0.3
        yield " ".join((
            "-e", model, "-b", one("1 2 3 4 8 12 16 32"), maybe(0.3, "-t " + one("64 100 128")),
            "--gpu-mem " + one("2.5GiB 12GiB 15.5GiB 40GiB 300GiB") if card == "any"
            else "--gpu " + card,
            "--gpus %s -z %s" % (one("2 3 8 64"), one("0 1 2 3")) if many else "",
            maybe(0.2, "--dtype " + one("fp16 fp32 bf16")), maybe(0.3, "--moments bf16"),
            maybe(0.2, "-w none"), maybe(0.2, "--grad-dtype fp32"),
            maybe(0.2, "--logit-rows " + one("64 128 1000")),
            maybe(0.2, "--workspace " + one("256 16MiB 300MiB")),
            maybe(0.4, "-r " + one("none gelu norm mlp qkv block block:1 qkv:1,gelu")),
            maybe(0.3, "--offload " + one("none moments master,moments residuals" if many else
                                          "none moments weights,gradients,moments,residuals"))))


# With --dtype, --minimum leaves out the CPU program, whose workspace depends on vectors' width.
QUERIES = ["--fit any -e d24 --gpu 4090", "--fit all -e d24 --gpu 3080 -d 65536",
           "--plan --gpu all -e gpt2-xl", "--largest batch -e d36 --gpu 4070",
           "--largest seq-len -e d36 --gpu 4070 -b 2", "--minimum -e gpt2-xl --dtype bf16"]


def test_plans_32_bits(tmp_path):
    """A 32-bit build prints the same plans, refusals and recommendations, byte for byte."""
    if not (TOP / "build/plan_32").exists():
        pytest.skip("no 32-bit libraries (gcc-multilib)")
    other = str(shutil.copy(TOP / "build/plan_32", tmp_path / "train_gpt2"))
    seed = random.randrange(10**6)
    print("seed", seed)
    plans = ["--plan " + options for options in drawn_plans(30, seed)]
    valid = 0
    for query in plans[::2] + [plan + " --json" for plan in plans[1::2]] + QUERIES:
        a = run([words("")[0], *query.split()])
        b = run([other, *query.split()])
        assert (a.status, a.out.replace(words("")[0], other), a.err) == (b.status, b.out, b.err), (
            "seed %d: %s" % (seed, query))
        valid += a.status != 1
    assert valid > 20


def driver(base, path, **body):
    """A command of the WebDriver protocol, to which chromedriver answers."""
    asked = urllib.request.Request(base + path, json.dumps(body).encode(), method="POST")
    return json.load(urllib.request.urlopen(asked, timeout=LIMIT_S))["value"]


@pytest.fixture
def browser():
    """The address of a session of headless Chromium."""
    if not (TOP / "build/plan.html").exists() or not shutil.which("chromedriver"):
        pytest.skip("no chromium-driver, or no emcc to build the page")
    with subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True) as p:
        port = next(m.group(1) for m in map(re.compile(r"on port (\d+)\.$").search, p.stdout) if m)
        base = "http://127.0.0.1:%s/session" % port
        options = {"args": ["--headless", "--no-sandbox", "--disable-gpu"]}
        session = driver(base, "", capabilities={
            "alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}})
        yield base + "/" + session["sessionId"]
        urllib.request.urlopen(urllib.request.Request(base + "/" + session["sessionId"],
                                                      method="DELETE"), timeout=LIMIT_S)
        p.terminate()


def test_page(browser):
    """The web page prints what the program prints."""
    page = TOP / "build/plan.html"
    for query in "--plan -e d12 --gpu t4", QUERIES[0]:
        want = succeeds([words("")[0], *query.split()]).replace(words("")[0], "./train_gpt2")
        driver(browser, "/url", url="about:blank")
        driver(browser, "/url", url="file://%s#%s" % (page, query))
        for _ in range(600):    # the page's worker answers in less than a second
            text = driver(browser, "/execute/sync", args=[],
                          script="return document.body.textContent")
            if want in text:
                break
            time.sleep(0.1)
        assert want in text
    assert page.stat().st_size <= 700000
