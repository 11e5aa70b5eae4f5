#!/usr/bin/env python3
"""Draws runs, a memory plan or the settings that fit, as one HTML page or as an SVG file.

    dev/report.py runs/one                        writes runs/one/report.html
    dev/report.py runs/one runs/two               compares them in compare.html
    dev/report.py runs/one --svg run.svg          only the charts; also with --plan and --fit
    ./train_gpt2 --plan steps -e d12 --json | dev/report.py --plan - -o plan.html
    ./train_gpt2 --fit all -e gpt2-xl --gpu 4090 --json | dev/report.py --fit - -o fit.html
    dev/report.py --fit fit.json cards.json       adds the cards, from --plan --gpu all --json

A run is the folder given by -o; with --plan, its page shows the memory too. Needs matplotlib:
apt-get install python3-matplotlib, or pip install matplotlib.
"""
import argparse, html, io, itertools, json, math, os, statistics, sys

# In the order of the plan's table. Most are Paul Tol's "bright" colors, which are distinguishable
# with every kind of color vision. Groups not listed here are gray.
GROUPS = {"weights": "#4477aa", "gradients": "#66ccee", "moments": "#228833", "master": "#9fbf4f",
          "activations kept": "#ccbb44", "working set": "#ee6677", "logits": "#aa3377",
          "workspaces": "#9a8c7c", "batch": "#ee8866", "KV cache": "#ddaa33",
          "library": "#b8b8b8"}
PIECES = 500         # points of a long curve
SAMPLES_SHOWN = 20   # the newest ones


# -- Reading ---------------------------------------------------------------------------------------
def number(value):
    """The value as a number that can be drawn, else NaN: the log has null for non-finite values."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e30 else math.nan


def read_text(path):
    try:
        with open(0 if path == "-" else path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        sys.exit(f"report.py: cannot read {path}: {error.strerror}")


class Run:
    """A log, by subject and step. A repeated step replaces its old entry and all later ones."""

    def __init__(self, path):
        self.path = os.path.join(path, "log.jsonl") if os.path.isdir(path) else path
        self.name = os.path.basename(os.path.dirname(os.path.abspath(self.path)))
        self.steps, self.checks, self.samples, self.checkpoints = {}, {}, {}, {}
        self.start, self.resumes, self.end = {}, [], ""
        lines = read_text(self.path).split("\n")
        for i, line in enumerate(lines):
            try:
                self.add(json.loads(line))
            except (ValueError, AttributeError):
                if line[:1] not in ("{", "\0") and i + 1 < len(lines):
                    sys.exit(f"report.py: {self.path}:{i + 1}: not a JSON object")
                if i + 1 < len(lines):    # cut by a crash; a resumed run's first line may follow
                    print(f"report.py: note: {self.path}:{i + 1}: left out a cut line",
                          file=sys.stderr)
                    start = line.find('{"event":"start"', 1)
                    lines.insert(i + 1, line[start:] if start > 0 else "{}")
        if not self.start:
            sys.exit(f"report.py: {self.path}: no line that starts a run")
        self.options, self.plan_bytes = self.start["options"], self.start["plan_bytes"]

    def add(self, event):
        tables = {"loss": self.steps, "val_loss": self.checks, "sample": self.samples,
                  "checkpoint": self.checkpoints}
        kind, step = event.get("event"), event.get("step", 0)
        if kind == "start":
            self.start, self.end = event, ""
        elif kind == "end":
            self.end = event["reason"]
        elif kind == "resume":
            self.resumes.append(step)
        if "loss" in event and step <= max(self.steps, default=0):
            for table in tables.values():
                for later in [at for at in table if at >= step]:
                    del table[later]
            self.resumes = [at for at in self.resumes if at < step]
        for key, table in tables.items():
            if key in event and kind is None:
                table[step] = event if key == "loss" else event[key]

    def points(self, key):
        """Steps in order, and `key` of each."""
        steps = sorted(self.steps)
        return steps, [number(self.steps[step].get(key)) for step in steps]

    def skipped(self):
        return [step for step, event in self.steps.items() if event.get("skipped")]


def parse(path, members, command):
    """The output of `command`: a JSON object that has one of `members`."""
    try:
        found = json.loads(read_text(path))
        if any(member in found for member in members):
            return found
    except (ValueError, TypeError):
        pass
    sys.exit(f"report.py: {path} is not the output of {command}")


def size_text(count):
    power = next((power for power in (3, 2, 1) if count >= 1024 ** power), 0)
    return f"{count / 1024 ** power:,.{2 if power else 0}f} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


# -- Pictures --------------------------------------------------------------------------------------
def pyplot():
    """matplotlib, set up so that the same numbers give the same file and text stays text."""
    try:
        import matplotlib    # not at the top, so that a missing package gets a clear message
    except ImportError:
        sys.exit("report.py: needs matplotlib: apt-get install python3-matplotlib, or pip install "
                 "matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "train_gpt2", "font.size": 9,
        "font.family": "sans-serif", "figure.constrained_layout.use": True, "axes.grid": True,
        "axes.axisbelow": True, "grid.color": "#e2e6ea", "axes.spines.top": False,
        "axes.spines.right": False})
    from matplotlib import pyplot as plt
    return plt


def picture(figure):
    """The figure as an SVG element."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return out.getvalue().split("?>", 1)[1].split(".dtd\">", 1)[1].strip() + "\n"


def curve(axes, steps, values, **style):
    """Draws a curve; a long one as the means of PIECES pieces of equal length."""
    import numpy as np
    if len(steps) > PIECES:
        steps, values = ([np.nanmean(piece) for piece in np.array_split(np.array(row), PIECES)]
                         for row in (steps, values))
    axes.plot(steps, values, **style)


def run_svg(run):
    """Four charts over the steps, with validations, skipped steps and resumes."""
    figure, axes = pyplot().subplots(2, 2, figsize=(10, 5.6))
    for at, key, title in zip(axes.flat, ("loss", "lr", "tokens_per_s", "grad_norm"),
                              ("Loss, nats per token", "Learning rate", "Throughput, tokens/s",
                               "Gradient norm")):
        at.set_yscale("log" if key == "grad_norm" else "linear")
        curve(at, *run.points(key), color="#3567a8", label="training")
        at.set_title(title, loc="left", fontweight="bold", fontsize=10)
        at.set_xlabel("step")
        if key in ("lr", "tokens_per_s"):
            at.set_ylim(bottom=0)
        if key == "loss" and run.checks:
            steps = sorted(run.checks)
            at.plot(steps, [number(run.checks[step]) for step in steps], "o-", color="#b8570b",
                    markerfacecolor="white", markersize=4, label="validation")
        for step in run.resumes:
            at.axvline(step, color="#59636e", linestyle=":", label="resumed")
        if run.skipped():
            at.plot(run.skipped(), [0.02] * len(run.skipped()), "|", color="#c4352b",
                    transform=at.get_xaxis_transform(), label="skipped step")
        if key == "loss":
            names = dict(zip(*reversed(at.get_legend_handles_labels())))
            at.legend(names.values(), names.keys(), frameon=False)
    return picture(figure)


def compare_svg(runs):
    """The losses of several runs over the steps: on validation data or, for a run without
    validations, on training data. The legend has each run's lowest or, of these, last value."""
    import numpy as np
    figure, at = pyplot().subplots(figsize=(8, 3.4))
    for run, color in zip(runs, itertools.cycle(GROUPS.values())):
        steps, values = sorted(run.checks), [number(run.checks[s]) for s in sorted(run.checks)]
        kind = "" if steps else ", training"
        if not steps:
            steps, values = run.points("loss")
        curve(at, steps, values, color=color, marker="" if kind else "o", markersize=3,
              label=f"{run.name}{kind}: "
              f"{(values[-1] if kind else np.nanmin(values)) if values else math.nan:.3f}")
    at.set(xlabel="step", ylabel="nats per token")
    at.set_title("Validation loss", loc="left", fontweight="bold", fontsize=10)
    at.legend(frameon=False)
    return picture(figure)


def bytes_alive(rows, ticks):
    """Bytes of the buffers alive at each tick."""
    return [sum(row["bytes"] for row in rows if row["first"] <= tick < row["end"])
            for tick in range(ticks)]


def streams_svg(at, instructions):
    """What each stream does over time: the parts of a step side by side, each part once."""
    start, streams = 0, ["exchange", "down", "up", "compute"]
    for _, group in itertools.groupby(instructions, lambda row: row["part"]):
        rows = [row for row in group if row["end_ms"] > row["begin_ms"]]
        for y, stream in enumerate(streams):
            at.broken_barh([(start + row["begin_ms"], row["end_ms"] - row["begin_ms"])
                            for row in rows if row["stream"] == stream], (y - 0.4, 0.8),
                           facecolors=["#4477aa", "#ccbb44"])
        start += max((row["end_ms"] for row in rows), default=0)
        at.axvline(start, color="#1b1f24", linewidth=0.8)
    at.set_yticks(range(len(streams)), streams)
    at.set(xlim=(0, start), ylim=(-0.6, 3.6),
           xlabel="forecast in ms: first micro-step, later ones, update")
    at.set_title("Streams", loc="left", fontweight="bold", fontsize=10)


def plan_svg(plan):
    """Memory (y) over a step (x): each buffer from its first to its last use, at its offset. The
    buffers that live for the whole step are drawn separately, because most settings change only the
    others, which are often a small part of the memory. With --plan steps, also the streams."""
    plt, ticks, parts = pyplot(), plan["ticks"], []
    from matplotlib.patches import Path, PathPatch
    for row in plan["buffers"]:
        row["end"] = row["last"] + 1
    for home in sorted({row["home"] for row in plan["buffers"] if row["bytes"]}):
        rows = [row for row in plan["buffers"] if row["home"] == home and row["bytes"]]
        whole = [row for row in rows if row["end"] - row["first"] == len(ticks)]
        size = size_text(max(row["offset"] + row["bytes"] for row in rows))
        name = f"{home.capitalize()} memory"
        parts += [(title, drawn, rows) for title, drawn in (
            (f"{name} over a step: {size}", whole),
            (f"{name} used by some stages only", [row for row in rows if row not in whole]))
            if drawn]
    timed = plan.get("instructions", [])
    count = len(parts) + bool(timed)
    figure, axes = plt.subplots(
        count, 1, squeeze=False, figsize=(12, 1.2 + 2.7 * count),
        height_ratios=[1 if "over a step" in title else 1.8 for title, _, _ in parts] +
        [1] * bool(timed))
    if timed:
        streams_svg(axes.flat[-1], timed)
    for at, (title, drawn, rows) in zip(axes.flat, parts):
        for group in sorted({row["group"] for row in drawn},
                            key=lambda name: (*GROUPS, name).index(name)):
            own = [row for row in drawn if row["group"] == group]
            corners = [(row[x], (row["offset"] + y * row["bytes"]) / 2 ** 20)
                       for row in own for x, y in (("first", 0), ("end", 0), ("end", 1),
                                                   ("first", 1), ("first", 0))]
            at.add_patch(PathPatch(
                Path(corners, [1, 2, 2, 2, 79] * len(own)), facecolor=GROUPS.get(group, "#999999"),
                edgecolor="white", linewidth=0.3, label=f"{group}, at most "
                f"{size_text(max(bytes_alive(own, len(ticks))))}"))
        at.autoscale_view()
        low, high = at.get_ylim()
        for row in drawn:    # names where they fit: a letter takes about 0.6 % of the width
            if (row["bytes"] / 2 ** 20 > 0.07 * (high - low) and
                    row["end"] - row["first"] > 0.007 * len(row["name"]) * len(ticks)):
                at.text((row["first"] + row["end"]) / 2,
                        (row["offset"] + row["bytes"] / 2) / 2 ** 20, row["name"],
                        ha="center", va="center", fontsize=8)
        if min(row["offset"] for row in drawn) == 0:
            alive = bytes_alive(rows, len(ticks))
            at.stairs([count / 2 ** 20 for count in alive], color="#1b1f24",
                      label=f"alive, at most {size_text(max(alive))}")
        names = []    # of stages, skipping any that would overlap the previous name
        for stage, group in itertools.groupby(range(len(ticks)), lambda t: ticks[t].split(".")[0]):
            span = list(group)
            middle = (span[0] + span[-1] + 1) / 2
            if not names or middle - names[-1][0] > 0.05 * len(ticks):
                names.append((middle, stage))
        at.set_xticks(*zip(*names))
        at.set(xlim=(0, len(ticks)), ylabel="MiB",
               xlabel="stage: blocks forward, head, blocks backward")
        at.set_title(title, loc="left", fontweight="bold", fontsize=10)
        at.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return picture(figure)


def fit_svg(fit):
    """Device memory (x) and tokens/s (y) of all settings that fit, colored by host memory; the
    staircase shows the highest tokens/s that fits in each amount of memory."""
    figure, at = pyplot().subplots(figsize=(10, 4.6))
    rows = sorted((row for row in fit["ways"] if row["tokens_per_s"]),
                  key=lambda row: row["device_bytes"])
    at.set_title(f'What fits: {fit["model"]}' if rows else "Nothing fits, or no speed is known: "
                 "name a card with --gpu", loc="left", fontweight="bold")
    gib = [row["device_bytes"] / 2 ** 30 for row in rows]
    tokens = [row["tokens_per_s"] for row in rows]
    at.step(gib, list(itertools.accumulate(tokens, max)), where="post", color="#3567a8")
    dots = at.scatter(gib, tokens, c=[row["host_bytes"] / 2 ** 30 for row in rows],
                      cmap="plasma_r", edgecolors="white", linewidths=0.5, zorder=3)
    for row in fit["best"] if rows else []:
        at.annotate("recommended", (row["device_bytes"] / 2 ** 30, row["tokens_per_s"]),
                    (-8, 8), textcoords="offset points", ha="right", fontweight="bold")
    at.axvline(fit["available_bytes"] / 2 ** 30, color="#59636e", linestyle=":")
    at.set(xlabel="device memory of the plan, GiB", ylabel="tokens/s", ylim=(0, None))
    figure.colorbar(dots, label="host memory, GiB")
    return picture(figure)


# -- The page --------------------------------------------------------------------------------------
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline';
img-src data:">
<style>
body {{ margin:0 auto; max-width:1160px; padding:12px; font:15px/1.5 system-ui,sans-serif }}
svg {{ width:100%; height:auto }} summary {{ cursor:pointer }}
pre {{ border:1px solid #e2e6ea; padding:10px; white-space:pre-wrap; overflow-wrap:anywhere }}
table {{ border-collapse:collapse; display:block; overflow-x:auto }}
th, td {{ padding:3px 14px 3px 0; text-align:left; border-bottom:1px solid #e2e6ea }}
</style></head><body>
<h1>{title}</h1>
{body}</body></html>
"""


def safe(text):
    """Text from a file as HTML: markup is escaped, and invisible characters are spelled out."""
    return html.escape("".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}"
                               for c in str(text)))


def table(heads, rows):
    return "<table>" + "".join(
        "<tr>" + "".join(f"<{tag}>{safe(cell)}</{tag}>" for cell in row) + "</tr>\n"
        for tag, row in [("th", heads)] + [("td", row) for row in rows]) + "</table>\n"


def ways_html(rows):
    return table(["device", "host", "tokens/s", "settings"], [
        (size_text(row["device_bytes"]), size_text(row["host_bytes"]),
         f'{row["tokens_per_s"]:,}' if row["tokens_per_s"] else "\u2013",
         f'{row["note"]} {row["options"]}') for row in rows])


def fit_html(answers):
    """The page's body for the outputs of --fit and --plan --gpu all."""
    body = ""
    for found in answers:
        if found["query"] == "cards":
            body += "<h2>Cards</h2>\n" + ways_html(found["cards"])
            continue
        body += fit_svg(found) + f'<p>tokens/s: {safe(found["forecast"] or "unknown")}</p>\n'
        for row in found["best"]:
            body += f'<p>Recommended:</p><pre>{safe(row["command"])}</pre>\n'
        body += (f'<details><summary>{len(found["ways"])} settings that fit</summary>\n'
                 f'{ways_html(found["ways"])}</details>\n')
    return body


def run_figures(run):
    """What the page's table shows of a run, by name."""
    last, steps = max(run.steps, default=0), run.options.get("steps")
    loss = number(run.steps.get(last, {}).get("loss"))
    checks = [(number(value), step) for step, value in run.checks.items() if number(value) > 0]
    speeds = [value for value in run.points("tokens_per_s")[1] if value > 0]
    return {
        "model": run.options.get("model"),
        "parameters": f'{run.start["model"]["parameters"]:,}',
        "steps": f"{last:,} of " + (f"{max(last, steps):,}" if steps else "one epoch"),
        "loss": f"{loss:.4f}" if loss == loss else "not finite",
        "lowest validation loss": checks and f"{min(checks)[0]:.4f} at step {min(checks)[1]:,}",
        "tokens/s, median": speeds and f"{statistics.median(speeds):,.0f}",
        "memory, planned and allocated": size_text(run.plan_bytes),
        "skipped steps": len(run.skipped()),
        "resumed after step": ", ".join(f"{step:,}" for step in run.resumes),
        "newest checkpoint": run.checkpoints and run.checkpoints[max(run.checkpoints)],
        "ended": run.end}


def compare_html(runs):
    """The page's body for several runs: losses, numbers, and the options that differ."""
    figures = [run_figures(run) for run in runs]
    rows = [(name, *(each[name] or "" for each in figures)) for name in figures[0]]
    options = [(f"--{name}", *(run.options.get(name, "") for run in runs))
               for name in dict.fromkeys(name for run in runs for name in run.options)
               if len({str(run.options.get(name, "")) for run in runs}) > 1]
    return compare_svg(runs) + table(["", *(run.name for run in runs)], rows + options)


def run_html(run, plan):
    """The page's body: numbers, charts, memory, samples, options."""
    body = table(["", ""], [pair for pair in run_figures(run).items() if pair[1]]) + run_svg(run)
    if plan:
        body += "<h2>Memory</h2>\n" + plan_svg(plan)
    for i, step in enumerate(sorted(run.samples, reverse=True)[:SAMPLES_SHOWN]):
        body += (f'<details{"" if i else " open"}><summary>sample after step {step:,}'
                 f"</summary><pre>{safe(run.samples[step])}</pre></details>\n")
    options = "\n".join(f"--{name} {value}" for name, value in run.options.items() if value != "")
    return f"{body}<h2>Options</h2>\n<pre>{safe(options)}</pre>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="*", help="a run's folder, or its log.jsonl; several: compare")
    parser.add_argument("--plan", metavar="FILE", help="output of --plan --json; -: stdin")
    parser.add_argument("--fit", metavar="FILE", nargs="+",
                        help="output of --fit --json and of --plan --gpu all --json; -: stdin")
    parser.add_argument("-o", "--output", metavar="FILE",
                        help="the page; default: report.html in the run's folder, compare.html, "
                        "plan.html or fit.html")
    parser.add_argument("--svg", metavar="FILE", help="write only the picture, to FILE")
    given = parser.parse_args()
    if not (given.run or given.plan or given.fit):
        parser.error("name the folder of a run, or give --plan FILE or --fit FILE")
    if given.plan and len(given.run) > 1:
        parser.error("--plan: only with one run, or without one")
    plan = given.plan and parse(given.plan, ("ticks",), "--plan --json")
    if given.fit:
        answers = [parse(path, ("ways", "cards"), "--fit --json or of --plan --gpu all --json")
                   for path in given.fit]
        output, title, body = "fit.html", "What fits", lambda: fit_html(answers)
        draw = lambda: fit_svg(answers[0])
    elif len(given.run) > 1:
        runs = [Run(path) for path in given.run]
        output, title = "compare.html", f"{len(runs)} runs"
        body, draw = lambda: compare_html(runs), lambda: compare_svg(runs)
    elif given.run:
        run = Run(given.run[0])
        output, title = os.path.join(os.path.dirname(run.path), "report.html"), f"Run {run.name}"
        body, draw = lambda: run_html(run, plan), lambda: run_svg(run)
    else:
        output, title = "plan.html", "Memory over one training step"
        body = draw = lambda: plan_svg(plan)
    output = given.svg or given.output or output
    text = draw() if given.svg else PAGE.format(title=safe(title), body=body())
    try:
        with open(output, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        sys.exit(f"report.py: cannot write {output}: {error.strerror}")
    print(output)


if __name__ == "__main__":
    main()
