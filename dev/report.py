#!/usr/bin/env python3
"""Draws a run or a memory plan as one self-contained HTML page or an SVG file.

    dev/report.py runs/one                        writes runs/one/report.html
    dev/report.py runs/one --watch                serves it on this machine during the run
    ./train_gpt2 --plan -e d12 --json | dev/report.py --plan - -o plan.html
    ./train_gpt2 --fit all -e gpt2-xl --gpu 4090 --json | dev/report.py --fit - -o fit.html
    dev/report.py --fit fit.json cards.json       adds --plan --gpu all --json: the table of cards
    dev/report.py runs/one --svg run.svg          the charts alone; also with --plan and --fit
    dev/report.py runs/one --tensorboard DIR      the numbers for TensorBoard (package tensorboardX)
    dev/report.py runs/one --wandb PROJECT        ... for Weights & Biases (package wandb)

A run is the folder given by -o. Its page shows memory if --plan gives the plan, or if a program
built here plans exactly the bytes in the log for the options in the log. All but the last two need
only Python's standard library.
"""
import argparse
import html
import http.server
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROGRAMS = ("train_gpt2", "train_gpt2cu", "train_gpt2cu_cpu")
PLAN_OPTIONS = ("model", "seq-len", "train-data", "batch", "recompute", "logit-rows", "dtype",
                "grad-dtype", "moments", "master", "offload")
# In the order of the plan's table. Most are Paul Tol's "bright" colours, which are distinguishable
# with every kind of colour vision, on white and on black. Groups not listed here are grey.
GROUPS = {"weights": "#4477aa", "gradients": "#66ccee", "moments": "#228833", "master": "#9fbf4f",
          "activations kept": "#ccbb44", "working set": "#ee6677", "logits": "#aa3377",
          "workspaces": "#9a8c7c", "batch": "#ee8866", "KV cache": "#ddaa33",
          "library": "#b8b8b8"}
PIECES = 150               # of a long curve: three pixels each, drawn as range and mean
SAMPLES_SHOWN = 20         # only the newest
CHART = 460, 250           # pixels of a chart
WIDE, NARROW = 1120, 430   # of the plan's two drawings; the page shows the one that fits


class Refusal(Exception):
    """A message for the user, in one line."""


# -- Reading ---------------------------------------------------------------------------------------
def number(value):
    """A number that can be drawn, or None: the log contains null for non-finite values."""
    if not isinstance(value, (int, float)) or not abs(value) < 1e30:
        return None
    return float(value) if abs(value) > 1e-30 else 0.0


def read_text(path):
    try:
        if path == "-":
            return sys.stdin.buffer.read().decode("utf-8", "replace")
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        raise Refusal(f"cannot read {path}: {error.strerror}") from None


class Run:
    """A log by subject: steps, checks (validation losses), samples and checkpoints by step."""

    def __init__(self, path):
        self.path = os.path.join(path, "log.jsonl") if os.path.isdir(path) else path
        if os.path.exists(self.path) and not os.path.isfile(self.path):  # a FIFO would block
            raise Refusal(f"cannot read {self.path}: not a regular file")
        self.name = os.path.basename(os.path.dirname(os.path.abspath(self.path)))
        self.steps, self.checks, self.samples, self.checkpoints = {}, {}, {}, {}
        self.start, self.resumes, self.end = None, [], ""
        lines = read_text(self.path).split("\n")
        for i, line in enumerate(lines):
            try:
                event = json.loads(line)
                event.get("step")
            except (ValueError, AttributeError, RecursionError):
                if i + 1 < len(lines):    # only the last line may be truncated by a crash
                    raise Refusal(f"{self.path}:{i + 1}: not a JSON object") from None
                continue
            self.add(event, event.get("step"))
        if not self.start:
            raise Refusal(f"{self.path}: no line that starts a run")
        self.options, self.model = self.of_start("options", dict), self.of_start("model", dict)
        self.plan_bytes = self.of_start("plan_bytes", int)

    def add(self, event, step):
        tables = {"loss": self.steps, "val_loss": self.checks, "sample": self.samples,
                  "checkpoint": self.checkpoints}
        if event.get("event") == "start":
            self.start, self.end = event, ""
            if self.of_start("options", dict).get("resume"):
                self.resumes += [max(self.steps)] if self.steps else []
            else:    # a new run without checkpoints: earlier numbers are dropped
                for table in (*tables.values(), self.resumes):
                    table.clear()
        elif event.get("event") == "end":
            self.end = str(event.get("reason"))
        for key, table in tables.items():
            if key in event and isinstance(step, int) and 0 < step < 1 << 50:
                table[step] = event if key == "loss" else event[key]

    def of_start(self, key, kind):
        """An entry of the newest start line; empty, of the same kind, if it is missing."""
        return self.start[key] if isinstance(self.start.get(key), kind) else kind()

    def points(self, key):
        return [(step, number(event.get(key))) for step, event in self.steps.items()]

    def skipped(self):
        return [step for step, event in self.steps.items() if event.get("skipped")]


def plan_parse(text, path):
    """Parses the output of --plan --json and checks what the drawing relies on."""
    try:
        plan = json.loads(text)
        plan["ticks"] = [str(tick) for tick in plan["ticks"]]
        plan["buffers"] = [row for row in plan["buffers"] if row["bytes"]]
        for row in plan["buffers"]:
            for key in ("name", "group", "home"):
                row[key] = str(row[key])
            numbers = [row[key] for key in ("bytes", "offset", "first", "last")]
            if not (all(isinstance(value, int) and 0 <= value < 1 << 60 for value in numbers) and
                    row["first"] <= row["last"] < len(plan["ticks"])):
                raise ValueError(row["name"])
        if not (plan["buffers"] and plan["total_bytes"] > 0):
            raise ValueError("no buffers")
        return plan
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refusal(f"{path} is not the output of --plan --json ({error!r:.80})") from None


def fit_parse(text, path):
    """Parses the output of --fit --json or of --plan --gpu all --json; returns (query, rows)."""
    try:
        found = json.loads(text)
        rows = found["candidates"] if found["query"] == "fit" else found["cards"]
        for row in rows:
            row["command"] = shlex.join(row["command"])
            for key in ("device_bytes", "host_bytes", "batch"):
                if not (isinstance(row[key], int) and 0 <= row[key] < 1 << 60):
                    raise ValueError(key)
            if row["tokens_per_s"] is not None and not (number(row["tokens_per_s"]) or 0) > 0:
                raise ValueError("tokens_per_s")
        if found["query"] == "fit":
            found["best"] = found["best"] and shlex.join(found["best"]["command"])
            found["available_bytes"] = number(found["available_bytes"])
        elif not all(number(row["memory_bytes"]) and number(row["available_bytes"]) is not None and
                     isinstance(row["short_bytes"], int) for row in rows):
            raise ValueError("cards")
        return found
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refusal(f"{path} is not the output of --fit --json or of --plan --gpu all --json "
                      f"({error!r:.80})") from None


def plan_of(run):
    """The plan of a run by a program built here; None if none plans the log's bytes."""
    words = [f"--{name}={run.options[name]}" for name in PLAN_OPTIONS if run.options.get(name)]
    # Paths in the log are relative to the folder where the run was started, usually one of these.
    for program, folder in ((name, at) for name in PROGRAMS for at in (None, REPOSITORY)):
        try:
            said = subprocess.run([os.path.join(REPOSITORY, program), "--plan", "--json"] + words,
                                  capture_output=True, timeout=20, check=False, cwd=folder)
            plan = plan_parse(said.stdout, program)
        except (OSError, ValueError, subprocess.TimeoutExpired, Refusal):
            continue
        if plan["total_bytes"] == run.plan_bytes:
            return plan
    return None


# -- Words and shapes ------------------------------------------------------------------------------
def safe(text):
    """Text from a file as HTML: markup is escaped, and invisible characters are spelled out."""
    return html.escape("".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}"
                               for c in str(text)))


def unit_of(count):
    """A readable unit for a number of bytes, and its name."""
    power = next((power for power in (3, 2, 1) if count >= 1024 ** power), 0)
    return 1024 ** power, ("bytes", "KiB", "MiB", "GiB")[power]


def size_text(count):
    unit, name = unit_of(count)
    return f"{count / unit:,.{2 if unit > 1 else 0}f} {name}"


STYLE = """
:root { --page:#fff; --ink:#1b1f24; --soft:#59636e; --line:#e2e6ea; --mark:#c4352b; --curve:#3567a8;
  --check:#b8570b }
@media (prefers-color-scheme:dark) { :root { --page:#14171b; --ink:#e8eaed; --soft:#a3adb8;
  --line:#30363d; --mark:#ff7b6b; --curve:#79aee8; --check:#f0a35e } }
svg text { font:12px system-ui,sans-serif; fill:var(--soft); stroke:none }
svg text.title { font-weight:600; font-size:13px; fill:var(--ink) }
svg text.dark { fill:#111 } svg text.light { fill:#fff }
svg path { fill:none; stroke-linejoin:round } svg .page { fill:var(--page) }
svg .grid { stroke:var(--line) } svg .band { stroke:var(--curve); stroke-width:2.8; opacity:.25 }
svg .curve { stroke:var(--curve); stroke-width:1.8; stroke-linecap:round }
svg .check { stroke:var(--check); stroke-width:1.5 } svg circle.check { fill:var(--page) }
svg .skip { stroke:var(--mark); stroke-width:1.6 }
svg .resume { stroke:var(--soft); stroke-dasharray:2 3 }
svg .buffer { stroke:var(--page); stroke-width:.5 } svg .buffer path { fill:inherit }
svg .point { stroke:var(--page); stroke-width:1 } svg .point:hover { stroke:var(--ink) }
svg .buffer path:hover { stroke:var(--ink); stroke-width:2 } svg .alive { stroke:var(--ink) }
"""


def svg(width, height, body, name, place=""):
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.5g} {height:.5g}" '
            f'{place} role="img" aria-label="{safe(name)}">\n{body}</svg>\n')


def svg_file(width, height, body, name):
    body = f'<style>{STYLE}</style><rect class="page" width="100%" height="100%"/>\n{body}'
    return svg(width, height, body, name, f'width="{width}" height="{height}"')


def label(x, y, words, anchor="start", kind=""):
    return (f'<text x="{x:.5g}" y="{y:.5g}" text-anchor="{anchor}" class="{kind}">{safe(words)}'
            '</text>\n')


def width_of(words):
    """Upper bound of a text's width at 12 px, in pixels."""
    return 7.2 * len(words)


def legend(items, y, width):
    """[(shape of 18 x 10 pixels, label)] in lines of `width`; returns drawing and last line's y."""
    out, x = "", 8
    for shape, words in items:
        if x > 8 and x + width_of(words) + 36 > width:
            x, y = 8, y + 18
        out += f'<g transform="translate({x:.5g} {y - 9:.5g})">{shape}</g>'
        out += label(x + 23, y, words)
        x += width_of(words) + 36
    return out, y


def round_ticks(low, high, most):
    """[(value, label)] of the multiples of 1, 2 or 5 times a power of ten, in at most about `most`
    intervals."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= most)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(k * step, f"{k * step:,.{digits}f}")
            for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def grid(ticks, left, right, y_of):
    """A line and a label for each tick of a vertical axis."""
    return "".join(f'<path class="grid" d="M{left:.1f} {y_of(value):.1f}H{right:.1f}"/>' +
                   label(left - 6, y_of(value) + 4, words, "end") for value, words in ticks)


def scale_of(values, kind):
    """(low, high, ticks) of a vertical axis; kind: "zero" starts at 0, "log" is logarithmic."""
    low, high = (min(values), max(values)) if values else (1, 2)
    if kind == "log":
        low, high = low / 1.3, high * 1.3
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        each = [m * 10.0 ** p for p in powers for m in ((1, 2, 5) if len(powers) < 5 else (1,))]
        return low, high, [(value, f"{value:g}") for value in each if low <= value <= high]
    pad = 0.06 * (high - low) or abs(high) * 0.1 or 1
    low, high = (0, 1.1 * max(high, 0) or 1) if kind == "zero" else (low - pad, high + pad)
    return low, high, round_ticks(low, high, 5)


# -- Charts of a run -------------------------------------------------------------------------------
def pieces_of(points):
    """[(middle step, lowest, mean, highest)] of the pieces of a curve; None for the numbers of an
    empty piece."""
    size, out = max(1, len(points) / PIECES), []
    for i in range(min(len(points), PIECES)):
        piece = points[int(i * size):int((i + 1) * size)]
        values = [value for _, value in piece if value is not None]
        out.append(((piece[0][0] + piece[-1][0]) / 2, *(
            (min(values), sum(values) / len(values), max(values)) if values else (None,) * 3)))
    return out


def line_path(points):
    """Lines through points; None is a gap, and an isolated point is a dot."""
    d = pen = ""
    for point in points:
        d += f"{pen or 'M'}{point[0]:.1f} {point[1]:.1f}{'' if pen else 'h0'}" if point else ""
        pen = point and "L"
    return d


def chart(title, run, key, kind="", checks=(), items=()):
    """A chart of `key` over the steps: a long run's means, the range around them, validations and
    marks. The axis follows the means, because one extreme step must not flatten all others; the
    logarithmic axis of the gradient norm shows it."""
    pieces = pieces_of([(step, None if kind == "log" and (value or 0) <= 0 else value)
                        for step, value in run.points(key)])
    known = [piece for piece in pieces if piece[1] is not None]
    values = [value for piece in known for value in (piece[1:] if kind == "log" else piece[2:3])]
    low, high, ticks = scale_of(values + [loss for _, loss in checks], kind)
    first, last = (min(run.steps) - 1, max(run.steps)) if run.steps else (0, 1)
    marks, bottom = legend(items, 38, CHART[0]) if items else ("", 20)
    left, top = 14 + max((width_of(words) for _, words in ticks), default=20), bottom + 14
    wide, tall = CHART[0] - left - 16, CHART[1] - top - 38
    line = math.log if kind == "log" else float

    def at(step, value):
        return ((step - first) / (last - first) * (wide - 5),
                max(-999, (line(high) - line(value)) / (line(high) - line(low)) * tall))

    inside = '<path class="band" d="' + "".join(
        f"M{at(x, most)[0]:.1f} {at(x, most)[1]:.1f}V{at(x, least)[1]:.1f}"
        for x, least, _, most in known if most > least) + '"/>\n'
    means = [at(piece[0], piece[2]) if piece[1] is not None else None for piece in pieces]
    inside += f'<path class="curve" d="{line_path(means)}"/>\n'
    inside += f'<path class="check" d="{line_path(at(*check) for check in checks)}"/>\n'
    for step, loss in checks:
        x, y = at(step, loss)
        inside += (f'<circle class="check" r="3.5" cx="{x:.1f}" cy="{y:.1f}"><title>step {step:,}'
                   f": {loss:.4f}</title></circle>\n")
    columns = sorted({round(at(step, high)[0]) for step in run.skipped()})
    inside += f'<path class="skip" d="{"".join(f"M{x} {tall:.0f}v-9" for x in columns)}"/>'
    columns = sorted({round(at(step, high)[0]) for step in run.resumes})
    inside += f'<path class="resume" d="{"".join(f"M{x} 0v{tall:.0f}" for x in columns)}"/>'
    body = label(8, 18, title, kind="title") + marks
    body += grid(ticks, left, left + wide, lambda value: top + at(first, value)[1])
    for step, words in round_ticks(first, last, min(wide / 70, last - first)):
        body += label(left + at(step, high)[0], CHART[1] - 22, words, "middle")
    body += label(left + wide / 2, CHART[1] - 6, "step", "middle")
    return body + svg(wide, tall, inside, title,
                      f'x="{left:.5g}" y="{top}" width="{wide:.5g}" height="{tall:.5g}"')


def charts(run):
    checks = [(step, number(loss)) for step, loss in run.checks.items() if number(loss) is not None]
    items = [('<path class="curve" d="M0 5h18"/>', "training")]
    if len(run.steps) > PIECES:
        items = [('<path class="band" d="M1.5 0v10m3 0v-10m3 0v10m3 0v-10m3 0v10m3 0v-10"/><path '
                  'class="curve" d="M0 5h18"/>', "training, mean and range of "
                  f"{len(run.steps) / PIECES:.0f} steps")]
    if checks:
        items.append(('<path class="check" d="M0 5h18"/><circle class="check" cx="9" cy="5" r="3.5"'
                      '/>', "validation"))
    if run.skipped():
        items.append(('<path class="skip" d="M9 10v-9"/>', "skipped step"))
    if run.resumes:
        items.append(('<path class="resume" d="M9 -2v14"/>', "resumed"))
    return [chart("Loss, nats per token", run, "loss", "", checks, items),
            chart("Learning rate", run, "lr", "zero"),
            chart("Throughput, tokens/s", run, "tokens_per_s", "zero"),
            chart("Gradient norm", run, "grad_norm", "log")]


def charts_svg(run):
    """The four charts in one file, two by two."""
    wide, tall = CHART
    body = "".join(svg(wide, tall, body, "chart", f'x="{i % 2 * wide}" y="{i // 2 * tall}" '
                       f'width="{wide}" height="{tall}"') for i, body in enumerate(charts(run)))
    return svg_file(2 * wide, 2 * tall, body, f"training {run.name}")


# -- The plan --------------------------------------------------------------------------------------
def bytes_alive(rows, ticks):
    """Bytes of the buffers alive at each tick."""
    change = [0] * (len(ticks) + 1)
    for row in rows:
        change[row["first"]] += row["bytes"]
        change[row["last"] + 1] -= row["bytes"]
    return list(itertools.accumulate(change[:-1]))


def stage_names(ticks, left, across, right, y):
    """As many names of the step's stages as fit next to each other, below a drawing."""
    out, free = "", -math.inf
    for stage, group in itertools.groupby(enumerate(ticks), lambda pair: pair[1].split(".")[0]):
        span, half = [tick for tick, _ in group], width_of(stage) / 2
        x = left + (span[0] + span[-1] + 1) / 2 * across
        if x - half > free and x + half < right:
            out += label(x, y, stage, "middle")
            free = x + half + 5
    return out + label((left + right) / 2, y + 18, "stage: blocks forward, head, blocks backward",
                       "middle")


def draw_buffers(rows, ticks, colour, left, across, y_of):
    """A rectangle per buffer, with a tooltip of name, bytes and lifetime; and, to be drawn on top
    of all rectangles, the names that fit into theirs."""
    kind = "dark" if sum(int(colour[k:k + 2], 16) for k in (1, 3, 5)) > 400 else "light"
    out, names = f'<g class="buffer" fill="{colour}">\n', ""
    for row in rows:
        x, wide = left + row["first"] * across, (row["last"] + 1 - row["first"]) * across
        y = y_of(row["offset"] + row["bytes"])
        tall = y_of(row["offset"]) - y
        life = f'{ticks[row["first"]]} to {ticks[row["last"]]}'
        out += (f'<path d="M{x:.1f} {y:.1f}h{wide:.1f}v{max(tall, 0.4):.1f}H{x:.1f}z"><title>'
                f'{safe(row["name"])}: {row["bytes"]:,} bytes, {safe(life)}</title></path>\n')
        if tall > 13 and wide > width_of(row["name"]):
            names += label(x + wide / 2, y + tall / 2 + 4, row["name"], "middle", kind)
    return out + "</g>\n", names


def draw_memory(title, rows, drawn, ticks, top, size):
    """Bytes (y) over a step's ticks (x): each of `drawn` from its first to its last use, at its
    offset; from offset 0, also the line of the live bytes of all `rows`. Returns the drawing and
    the y of its end."""
    low = min(row["offset"] for row in drawn)
    high = max(row["offset"] + row["bytes"] for row in rows)
    (unit, unit_name), (wide, tall) = unit_of(high), size
    lines = [(value * unit, f"{words} {unit_name}")
             for value, words in round_ticks(low / unit, high / unit, tall / 40)]
    left, top = 14 + max((width_of(words) for _, words in lines), default=0), top + 30
    across = (wide - left - 12) / len(ticks)

    def y_of(count):
        return top + (high - count) / (high - low) * tall

    body, names, items = grid(lines, left, wide - 12, y_of), "", []
    order = {group: i for i, group in enumerate(GROUPS)}
    for group in sorted({row["group"] for row in drawn}, key=lambda name: order.get(name, 99)):
        own, colour = [row for row in drawn if row["group"] == group], GROUPS.get(group, "#999999")
        rectangles, inside = draw_buffers(own, ticks, colour, left, across, y_of)
        body, names = body + rectangles, names + inside
        items.append((f'<rect width="12" height="10" x="3" fill="{colour}"/>',
                      f"{group}, at most {size_text(max(bytes_alive(own, ticks)))}"))
    if low == 0:
        alive = bytes_alive(rows, ticks)
        body += f'<path class="alive" d="M{left:.1f} {top + tall}' + "".join(
            f"V{y_of(count):.1f}h{across:.3f}" for count in alive) + '"/>\n'
        items.append(('<path class="alive" d="M0 5h18"/>',
                      f"alive, at most {size_text(max(alive))}"))
    signs, bottom = legend(items, top + tall + 56, wide)
    return (label(8, top - 12, title, kind="title") + body + names + signs +
            stage_names(ticks, left, across, wide - 12, top + tall + 16), bottom + 14)


def plan_svg(plan, wide, draw=svg):
    """The buffers that live for the whole step, then the others in a separate drawing, because
    most settings change only these, which are often a small part of the memory."""
    body, top, ticks = "", 0, plan["ticks"]
    for home in sorted({row["home"] for row in plan["buffers"]}):
        rows = [row for row in plan["buffers"] if row["home"] == home]
        whole = [row for row in rows if row["last"] - row["first"] + 1 == len(ticks)]
        name = "Memory" if plan.get("target") == "cpu" else home.capitalize() + " memory"
        size = size_text(max(row["offset"] + row["bytes"] for row in rows))
        for title, drawn, tall in (
                (f"{name} over a step: {size}", whole, 160 if home == "device" else 80),
                (f"{name} used by some stages only", [r for r in rows if r not in whole], 330)):
            if drawn:
                part, top = draw_memory(title, rows, drawn, ticks, top, (wide, tall))
                body += part
    return draw(wide, top, body, "memory over one training step")


# -- What fits -------------------------------------------------------------------------------------
def mixed(share):
    """A colour from blue (0: nothing on the host) over yellow to red (1: the most of all rows)."""
    stops = ("4477aa", "ccbb44", "ee6677")
    first = min(int(2 * share), 1)
    parts = [[int(stop[k:k + 2], 16) for k in (0, 2, 4)] for stop in stops[first:first + 2]]
    return "#" + "".join(f"{round(a + (b - a) * (2 * share - first)):02x}" for a, b in zip(*parts))


def settings_text(row):
    """What a candidate chooses, in the options' syntax."""
    moments = f' --moments {row["moments"]}' if row["moments"] != "fp32" else ""
    master = " -w none" if row["dtype"] == "bf16" and not row["master"] else ""
    return (f'-b {row["batch"]} -r {row["recompute"]} --dtype {row["dtype"]}{moments}{master} '
            f'--offload {row["offload"]}')


def fit_svg(fit, wide, draw=svg):
    """Device memory (x) and tokens/s (y) of every candidate, with host memory as the colour; the
    staircase shows the highest tokens/s that fits in the memory."""
    rows = sorted((row for row in fit["candidates"] if row["tokens_per_s"]),
                  key=lambda row: (row["device_bytes"], -row["tokens_per_s"]))
    if not rows:
        why = "No speed is known: name a card with --gpu." if fit["candidates"] else "Nothing fits."
        return draw(wide, 40, label(8, 24, why, kind="title"), "what fits")
    limit = fit["available_bytes"] or rows[-1]["device_bytes"]
    most_host, tall, top = max(row["host_bytes"] for row in rows), wide * 0.42, 44
    (unit, unit_name), tokens = unit_of(limit), [row["tokens_per_s"] for row in rows]
    low, high, ticks = scale_of(tokens, "zero")
    left = 14 + max(width_of(words) for _, words in ticks)

    def x_of(count):
        return left + count / (1.03 * limit) * (wide - left - 16)

    def y_of(value):
        return top + (high - value) / (high - low) * tall

    body = grid(ticks, left, wide - 16, y_of) + label(8, top - 12, "tokens/s")
    for value, words in round_ticks(0, limit / unit, wide / 90):
        body += label(x_of(value * unit), top + tall + 18, words, "middle")
    body += label((left + wide) / 2, top + tall + 36, f"device memory of the plan, {unit_name}",
                  "middle")
    body += (f'<path class="resume" d="M{x_of(limit):.1f} {top}v{tall:.1f}"/>' +
             label(x_of(limit), top - 5, f"available: {size_text(limit)}", "end"))
    stairs, best = "", 0
    for row in rows:
        if row["tokens_per_s"] > best:
            start = "V" if stairs else f'M{x_of(row["device_bytes"]):.1f} '
            stairs += f'H{x_of(row["device_bytes"]):.1f}' if stairs else ""
            best = row["tokens_per_s"]
            stairs += f"{start}{y_of(best):.1f}"
    body += f'<path class="curve" d="{stairs}H{x_of(limit):.1f}"/>\n'
    for row in sorted(rows, key=lambda row: row["command"] == fit["best"]):
        chosen = row["command"] == fit["best"]
        x, y = x_of(row["device_bytes"]), y_of(row["tokens_per_s"])
        body += (f'<circle class="point" cx="{x:.1f}" cy="{y:.1f}" r="{7 if chosen else 4.5}" '
                 f'fill="{mixed(row["host_bytes"] / max(most_host, 1))}"><title>'
                 f'{row["device_bytes"]:,} bytes, {row["tokens_per_s"]:,} tokens/s, '
                 f'{row["host_bytes"]:,} bytes on the host: {safe(settings_text(row))}'
                 '</title></circle>\n')
        body += label(x - 11, y - 9, "recommended", "end", "title") if chosen else ""
    swatch = '<rect width="12" height="10" x="3" fill="{}"/>'
    items = [(swatch.format(mixed(share / 4)), size_text(most_host * share // 4))
             for share in range(5 if most_host else 1)]
    signs, bottom = legend(items, top + tall + 82, wide)
    return draw(wide, bottom + 14, label(8, 16, f'What fits: {fit["model"]}', kind="title") + body +
                label(8, top + tall + 62, "host memory:") + signs, "what fits")


def table(heads, rows):
    """An HTML table; a column whose head starts with > is aligned to the right."""
    kinds = [' class="right"' if head.startswith(">") else "" for head in heads]
    return ("<div class=\"scroll\"><table><thead><tr>" + "".join(
        f"<th{kind}>{safe(head.lstrip('>'))}</th>" for kind, head in zip(kinds, heads)) +
        "</tr></thead>\n" + "".join("<tr>" + "".join(
            f"<td{kind}>{safe(cell)}</td>" for kind, cell in zip(kinds, row)) + "</tr>\n"
            for row in rows) + "</table></div>\n")


def speed_text(row):
    return f'{row["tokens_per_s"]:,}' if row["tokens_per_s"] else "\u2013"


def fit_html(answers):
    """The page's body for what --fit and --plan --gpu all have printed."""
    body = ""
    for found in (found for found in answers if found["query"] == "fit"):
        body += "".join(fit_svg(found, wide, lambda *drawn, kind=kind: svg(
            *drawn, f'class="{kind}"')) for wide, kind in ((WIDE, "wide"), (NARROW, "narrow")))
        body += f'<p>tokens/s: {safe(found.get("forecast") or "only to compare")}</p>\n'
        body += f'<p>Recommended:</p><pre>{safe(found["best"])}</pre>\n' if found["best"] else ""
        body += f'<details><summary>{len(found["candidates"])} settings that fit</summary>' + table(
            [">B", ">device", ">host", ">tokens/s", "settings"], [
                (row["batch"], size_text(row["device_bytes"]), size_text(row["host_bytes"]),
                 speed_text(row), settings_text(row)) for row in found["candidates"]])
        body += "</details>\n"
    for found in (found for found in answers if found["query"] == "cards"):
        body += "<h2>Cards</h2>\n" + table(
            ["GPU", ">memory", ">plan", ">tokens/s", "settings, or changes that fit"], [
                (row["gpu"], size_text(row["memory_bytes"]),
                 size_text(row["available_bytes"] - row["device_bytes"]) + " free"
                 if row["fits"] else size_text(row["short_bytes"]) + " short",
                 speed_text(row), "too old for this program" if row.get("supported") is False else
                 settings_text(row) if row["fits"] else row["takes"] or "no settings make it fit")
                for row in found["cards"]])
    return body


# -- The page --------------------------------------------------------------------------------------
PAGE_STYLE = """
body { margin:0; background:var(--page); color:var(--ink); font:15px/1.5 system-ui,sans-serif }
main { max-width:1160px; margin:0 auto; padding:12px }
h1 { font-size:22px; margin:8px 0 } h2 { font-size:17px; margin:28px 0 8px }
.charts { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));
  gap:12px }
main > svg, .charts svg { width:100%; height:auto; display:block }
.narrow { display:none !important }
@media (max-width:700px) { .wide { display:none !important }
  .narrow { display:block !important } }
dl { display:grid; grid-template-columns:repeat(auto-fit,minmax(160px,1fr)); gap:8px; margin:8px 0 }
dl div { border:1px solid var(--line); border-radius:6px; padding:6px 10px; overflow-wrap:anywhere }
dt { color:var(--soft); font-size:13px } dd { margin:0; font-weight:600 }
pre { border:1px solid var(--line); border-radius:6px; padding:10px; margin:6px 0 14px;
  white-space:pre-wrap; overflow-wrap:anywhere; font:13px/1.45 ui-monospace,monospace }
code { display:inline-block; margin-right:14px; overflow-wrap:anywhere; font-size:13px }
.scroll { overflow-x:auto; margin:14px 0 } table { border-collapse:collapse; font-size:14px }
th, td { padding:3px 14px 3px 0; text-align:left; border-bottom:1px solid var(--line);
  white-space:nowrap } .right { text-align:right } th { color:var(--soft); font-weight:600 }
summary { cursor:pointer; color:var(--soft); margin:6px 0 }
"""
# Replaces <main> and keeps the scroll position and the open samples.
WATCH = """
setInterval(async () => {
  try {
    const text = await (await fetch(location.href)).text();
    const main = document.querySelector('main');
    const next = new DOMParser().parseFromString(text, 'text/html').querySelector('main');
    for (const old of main.querySelectorAll('details')) {
      const same = next.querySelector('#' + old.id);
      if (same) same.open = old.open;
    }
    main.replaceChildren(...next.childNodes);
  } catch (error) { document.title = 'The report has ended'; }
}, 3000);
"""


def page(title, body, script=""):
    """An HTML page whose policy forbids loading anything and running any script but `script`."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    policy += "; script-src 'unsafe-inline'; connect-src 'self'" if script else ""
    script = f"<script>{script}</script>" if script else ""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{safe(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<style>{STYLE}{PAGE_STYLE}</style></head>
<body><main>
<h1>{safe(title)}</h1>
{body}</main>{script}</body></html>
"""


def plan_html(plan):
    return "".join(plan_svg(plan, wide, lambda *drawn, kind=kind: svg(*drawn, f'class="{kind}"'))
                   for wide, kind in ((WIDE, "wide"), (NARROW, "narrow")))


def run_html(run, plan):
    """The page's body: numbers, charts, memory, samples, options."""
    last = max(run.steps, default=0)
    loss = number(run.steps.get(last, {}).get("loss"))
    checks = [(number(value), step) for step, value in run.checks.items() if number(value)]
    speeds = [value for _, value in run.points("tokens_per_s") if value]
    figures = {
        "model": run.options.get("model"),
        "parameters": f"{number(run.model.get('parameters')) or 0:,.0f}",
        "steps": f"{last:,} of {run.options.get('steps') or 'one epoch'}",
        "loss": "not finite" if loss is None else f"{loss:.4f}",
        "lowest validation loss": checks and f"{min(checks)[0]:.4f} at step {min(checks)[1]:,}",
        "tokens/s, median": speeds and f"{statistics.median(speeds):,.0f}",
        "memory, planned and allocated": size_text(run.plan_bytes),
        "skipped steps": len(run.skipped()),
        "resumed after step": ", ".join(f"{step:,}" for step in run.resumes),
        "newest checkpoint": run.checkpoints and list(run.checkpoints.values())[-1],
        "ended": run.end}
    body = "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{safe(value)}</dd></div>\n"
                            for name, value in figures.items() if value) + "</dl>\n"
    body += '<div class="charts">' + "".join(svg(*CHART, drawn, "chart") for drawn in charts(run))
    body += "</div>\n<h2>Memory</h2>\n" + (
        plan_html(plan) if plan else "<p>No program built here plans the bytes of this run. "
        "To draw its memory, save the output of --plan --json and pass it with --plan.</p>\n")
    if plan and plan["total_bytes"] != run.plan_bytes:
        body += (f"<p>This plan allocates {plan['total_bytes']:,} bytes, the run "
                 f"{run.plan_bytes:,}: it belongs to a different run.</p>\n")
    body += "<h2>Samples</h2>\n" if run.samples else ""
    for i, step in enumerate(sorted(run.samples, reverse=True)[:SAMPLES_SHOWN]):
        body += (f'<details id="after{step}"{"" if i else " open"}><summary>after step {step:,}'
                 f"</summary><pre>{safe(run.samples[step])}</pre></details>\n")
    return body + "<h2>Options</h2>\n" + "\n".join(
        f"<code>{safe(f'--{name} {value}')}</code>" for name, value in run.options.items()
        if value != "") + "\n"


def report(path, plan, plans, script=""):
    """The page of a run, or of a plan only. plans: cache of plans found, by the log's bytes."""
    if not path:
        return page("Memory over one training step", plan_html(plan), script)
    run = Run(path)
    if not plan and run.plan_bytes not in plans:
        plans[run.plan_bytes] = plan_of(run)
    return page(f"Training {run.name}", run_html(run, plan or plans[run.plan_bytes]), script)


def watch(path, plan, port):
    """Serves the page of the current log to this machine only, until interrupted."""
    plans = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            # The request must name this machine: otherwise a foreign page could resolve its own
            # name to this address and read the answer.
            name = self.headers.get("Host", "").rsplit(":", 1)[0]
            if self.path != "/" or name not in ("127.0.0.1", "localhost"):
                return self.send_error(404)
            try:
                data = report(path, plan, plans, WATCH).encode()
            except Refusal as error:    # for example a run that has no log yet
                data = page("No report yet", f"<p>{safe(error)}</p>\n", WATCH).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            return self.wfile.write(data)

        def log_message(self, *_):
            pass

    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise Refusal(f"--port {port}: {error}") from None
    print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C to stop)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass


# -- Other tools -----------------------------------------------------------------------------------
def scalars(run):
    """(step, {name: number}) in the order of steps, without non-finite numbers."""
    for step in sorted(set(run.steps) | set(run.checks)):
        values = {key: number(run.steps.get(step, {}).get(key)) for key in
                  ("loss", "grad_norm", "lr", "ms", "tokens_per_s", "skipped")}
        values["val_loss"] = number(run.checks.get(step))
        yield step, {key: value for key, value in values.items() if value is not None}


def need(option, package):
    """The module of a package that is needed only by `option`."""
    try:
        return __import__(package)
    except ImportError:
        raise Refusal(f"{option} needs Python's package {package}: python3 -m venv build/venv; "
                      f"build/venv/bin/pip install {package}; build/venv/bin/python dev/report.py"
                      ) from None


def to_tensorboard(run, folder):
    with need("--tensorboard", "tensorboardX").SummaryWriter(folder) as writer:
        for step, values in scalars(run):
            for name, value in values.items():
                writer.add_scalar(name, value, step)
        for step, sample in run.samples.items():
            writer.add_text("sample", f"<pre>{safe(sample)}</pre>", step)
    print(folder)


def to_wandb(run, project):
    copy = need("--wandb", "wandb").init(project=project, name=run.name, config=run.options)
    for step, values in scalars(run):
        copy.log(values, step=step)
    copy.finish()


def write(path, text):
    """Writes the text to `path`: atomically if it is or becomes a regular file, else directly."""
    aside = not os.path.islink(path) and (os.path.isfile(path) or not os.path.exists(path))
    other = path + ".tmp" if aside else path
    try:
        with open(other, "w", encoding="utf-8") as file:
            file.write(text)
        if other != path:
            os.replace(other, path)
    except OSError as error:
        if other != path and os.path.exists(other):
            os.remove(other)
        raise Refusal(f"cannot write {path}: {error.strerror}") from None
    print(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="a run's folder, or its log.jsonl")
    parser.add_argument("--plan", metavar="FILE", help="output of --plan --json; -: stdin")
    parser.add_argument("--fit", metavar="FILE", nargs="+",
                        help="output of --fit --json and of --plan --gpu all --json; -: stdin")
    parser.add_argument("-o", "--output", metavar="FILE",
                        help="the page; default: report.html in the run's folder, or plan.html")
    parser.add_argument("--svg", metavar="FILE", help="write this picture and no page")
    parser.add_argument("--watch", action="store_true", help="serve a page that reloads itself")
    parser.add_argument("--port", type=int, default=8000,
                        help="port of --watch on 127.0.0.1; 0: any free one")
    parser.add_argument("--tensorboard", metavar="DIR", help="write event files and no page")
    parser.add_argument("--wandb", metavar="PROJECT", help="upload the run and write no page")
    given = parser.parse_args()
    if given.fit and (given.run or given.plan or given.watch or given.tensorboard or given.wandb):
        parser.error("--fit draws one page or picture; give only -o or --svg with it")
    if not (given.run or given.fit) and (not given.plan or given.tensorboard or given.wandb):
        parser.error("name the folder of a run, or give --plan FILE or --fit FILE")
    if given.watch and (given.svg or given.output or given.tensorboard or given.wandb):
        parser.error("--watch writes no files: leave --svg, -o, --tensorboard and --wandb out")
    try:
        plan = plan_parse(read_text(given.plan), given.plan) if given.plan else None
        run = Run(given.run) if given.run and not given.watch else None
        if given.tensorboard:
            to_tensorboard(run, given.tensorboard)
        if given.wandb:
            to_wandb(run, given.wandb)
        fits = [fit_parse(read_text(path), path) for path in given.fit or []]
        drawn = [found for found in fits if found["query"] == "fit"]
        if given.svg and fits and not drawn:
            raise Refusal(f"--svg draws the output of --fit, which none of these is: {given.fit}")
        if given.svg:
            write(given.svg, fit_svg(drawn[0], WIDE, svg_file) if drawn else
                  charts_svg(run) if run else plan_svg(plan, WIDE, svg_file))
        if given.watch:
            watch(given.run, plan, given.port)
        elif fits and (given.output or not given.svg):
            write(given.output or "fit.html", page("What fits", fit_html(fits)))
        elif given.output or not (given.svg or given.tensorboard or given.wandb):
            output = os.path.join(os.path.dirname(run.path), "report.html") if run else "plan.html"
            write(given.output or output, report(given.run, plan, {}))
    except Refusal as error:
        sys.exit(f"report.py: {error}")


if __name__ == "__main__":
    main()
