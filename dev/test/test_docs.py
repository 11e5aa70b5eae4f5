"""What documents state of the code is what it says; their links, options and commands work."""

import shlex

from program import *

DOCS = {name: (TOP / name).read_text() for name in subprocess.check_output(
    ["git", "-C", TOP, "ls-files", "*.md"], text=True).split()}
README, MANUAL, FORECAST = DOCS["README.md"], DOCS["dev/manual.md"], DOCS["dev/notes/forecast.md"]
# Options of launchers, Slurm, Docker, Hugging Face's tools, debootstrap, gdb, gcc, dev/.
OTHERS = set("""--bind-to --no-python --nproc-per-node --cpus-per-task --gpus-per-node --gpu-bind
    --kill-on-bad-exit --signal --shm-size --ipc --local-dir --execute --variant --args --coverage
    --svg --here""".split())


def said(*command):
    return subprocess.check_output(command, cwd=TOP, text=True)


def rows(text, head):
    """The cells of the table whose first line contains `head`."""
    table = text[text.index("\n| %s |" % head) + 1:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" `") for cell in row.strip("|").split(" | ")] for row in table]


def plan(options):
    for name in "-r none", "--offload none":
        options += "" if name.split()[0] in options else " " + name
    return json.loads(run("--plan --json " + options).out)["plan"][0]    # also if it does not fit


def test_links():
    """Links lead to files and titles that exist. Prose has at most 100 columns."""
    def slug(title):
        return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")

    for name, text in DOCS.items():
        for path, title in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text):
            file = (TOP / name).parent / path if path else TOP / name
            titles = re.findall("^#+ (.*)", file.read_text(), re.M) if title else []
            assert file.exists() and (not title or title in map(slug, titles)), (name, path, title)
    for line in (README + MANUAL + DOCS["data/README.md"]).splitlines():
        assert len(line) <= 100 or line.startswith("|"), line


def test_names():
    """Options, functions, tables and switches that dev/ names exist; dev/README lists dev/."""
    options = set(re.findall("--[a-z][a-z0-9-]*", succeeds("--help all") + said(
        "data/tokenize", "--help"))) | OTHERS
    names = set(said("git", "grep", "-hwoE", "[A-Za-z_][A-Za-z_0-9]*", "--", ":!*.md").split())
    for name, text in DOCS.items():
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)) <= options, name
        if name in ("dev/README.md", "dev/reading.md", "data/README.md", "dev/cuda_cpu/README.md"):
            found = re.findall(r"\bEMU_\w+|(?<=`)[a-z]+_[a-z_\d]+(?=`|\(\)`)", text)
            assert set(found) <= names, set(found) - names
    chapters = re.findall(r"^// -+\n// \d+\. (.+)", "".join(
        (TOP / name).read_text() for name in ("train_gpt2.c", "train_gpt2.cu")), re.M)
    cited = re.findall(r"(?:`\.cu?`|\bchapter) ([A-Z][\w -]*)", "".join(DOCS.values()))
    cited += [name for row in rows(DOCS["dev/reading.md"], "minutes | read") if "*" not in row[1]
              for name in row[1].split("`: ")[-1].split(", ")]
    for name in cited:
        assert any(name.startswith(c) or c.startswith(name) for c in chapters), name
    for field in re.findall(r"`([a-z]\w+)`", str(rows(MANUAL, "object | fields"))):
        assert field in names, field
    for path in said("git", "ls-files", "dev").split():
        assert path.split("/")[1].split(".")[0] in DOCS["dev/README.md"] + "CHANGELOG", path


def test_commands():
    """Plans in README and manual are accepted; README's output is what the program prints."""
    typed = re.findall(r"^ +\$? ?\./train_gpt2 (--(?:plan|fit|min|larg).*?)(?: +#.*| \|.*)?$",
                       README + MANUAL, re.M)
    printed = [succeeds([words("")[0], *shlex.split(line)]) for line in typed]
    shown = re.search(r"    (gpt2-xl in .*?)\n\n", README, re.S)[1]
    assert len(typed) >= 9 and shown.replace("\n    ", "\n") in printed[0]
    assert re.search(r"line for each of (\d+) cards", MANUAL)[1] == str(len(query(
        "--plan --gpu all -e d36 -b 8")["cards"]))


def test_figures():
    """Memory and speed in the manual are what the program plans today."""
    assert said("dev/notes/fit_table.sh") in MANUAL
    sizes, mib = [row.replace(",", "").split("|")[2:-1] for row in re.findall(
        r"^(?:\| `-b` |\| this program, planned ).*", MANUAL, re.M)]
    for b, size in zip(sizes, mib):
        assert round(plan("-e d12 --gpu h200 -b" + b)["device_bytes"] / 2**20) == int(size)
    ways = {}
    for level, _, kept, device, slower in rows(MANUAL, "`-r`"):
        pair = [plan("-e %s -b 4 -d 524288 --gpu h100 -r %s" % (model, level.split("`")[0]))
                for model in ("d12", "gpt2-xl")]
        ways.setdefault("none", pair)
        freed = (ways["none"][1]["device_bytes"] - pair[1]["device_bytes"]) / 4096 / 48 / 1600
        assert kept == "%.0f C" % (32 - freed)
        assert device == "%.2f / %.2f GiB" % tuple(p["device_bytes"] / 2**30 for p in pair)
        assert slower == "%.1f / %.1f %%" % tuple(100 * none["tokens_per_s"] / p[
            "tokens_per_s"] - 100 for none, p in zip(ways["none"], pair))
    for speed, tokens in re.findall(r"([\d,]+)(?: tokens/s without|\s+with) `-d( 5\d+)?", MANUAL):
        p = query("--plan -e gpt2-xl --gpu 4060ti" + (" -d" + tokens if tokens else ""))["plan"][0]
        assert "{:,}".format(p["tokens_per_s"]) == speed
    least = query("--minimum -e gpt2-xl --gpu 4060ti")["settings"][1]["device_bytes"]
    assert "needs %.1f MiB on the device" % (least / 2**20) in MANUAL
    speed = plan("-e gpt2-xl -d 524288 -b 2 -r gelu --offload moments --gpu 4060ti")["tokens_per_s"]
    assert "forecast for an RTX 4060 Ti is {:,} tokens/s".format(speed) in README


def test_forecasts():
    """The tables of forecast.md have today's forecasts, and residuals of the measured steps."""
    for head, more in ("card | options", ""), ("card | model, options", " -d 524288"):
        for card, options, *cells, forecast, residual in rows(FORECAST, head):
            gpu = re.sub("80 gb|sxm|rtx| ", "", card.lower()) or gpu
            options = options.split(" (")[0].replace(", `", " ").replace("`", "")
            speed = plan("-e %s --gpu %s%s" % (options, gpu, more))["tokens_per_s"]
            assert forecast.split(" (")[0] == "{:,}".format(speed), (card, options, speed)
            if not more:
                tokens = 1024 * int(re.search(r"-b (\d+)", options)[1])
                measured = 1000 * tokens / float(cells[0].replace(",", ""))
                assert "%+.1f %%" % (100 * speed / measured - 100) == residual, (card, options)
