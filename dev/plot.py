#!/usr/bin/env python3
"""Pictures of a run and of a memory plan. Needs matplotlib.

    python3 -m venv build/venv && build/venv/bin/pip install matplotlib
    build/venv/bin/python dev/plot.py runs/one/log.jsonl [runs/two/log.jsonl ...] [-o FILE.png]
    ./train_gpt2 --plan --json > plan.json && build/venv/bin/python dev/plot.py --plan plan.json

The first draws loss, learning rate, throughput and memory, several runs over each other, beside the
first log as log.png; the second draws memory over one training step, buffer by buffer, as plan.png.
"""
import argparse
import json
import math
import os
import sys

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle
except ImportError:
    sys.exit("plot.py: no matplotlib: python3 -m venv build/venv && "
             "build/venv/bin/pip install matplotlib")

# Paul Tol's "muted" colours, told apart with every kind of colour vision. The order of the groups
# is that of the plan's table; a group that is not named here takes the next colour that is left.
COLOURS = ["#332288", "#88CCEE", "#44AA99", "#117733", "#DDCC77", "#CC6677", "#882255", "#AA4499",
           "#999933", "#661100", "#6699CC", "#BBBBBB"]
GROUPS = ["weights", "gradients", "moments", "master", "activations kept", "working set", "logits",
          "workspaces", "batch", "library"]


def number(value):
    """A logged number; null (not finite) leaves a gap in the line."""
    return math.nan if value is None else value


def read_log(path):
    """The objects of a log, one a line. A crash may cut the last line short, no other."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError as error:
        sys.exit(f"plot.py: cannot read {path}: {error.strerror}")
    events = []
    for i, line in enumerate(lines):
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            if i + 1 < len(lines):
                sys.exit(f"plot.py: {path}:{i + 1}: not JSON: {line[:60]}")
    if not any("loss" in event for event in events):
        sys.exit(f"plot.py: {path}: no step in it")
    return events


def smooth(values):
    """Mean over the neighbours, a hundredth of the run on either side; steps over gaps."""
    reach, out = len(values) // 100, []
    for i in range(len(values)):
        near = [value for value in values[max(i - reach, 0):i + reach + 1] if not math.isnan(value)]
        out.append(sum(near) / len(near) if near else math.nan)
    return out


def scale_of(count):
    """The unit in which a number of bytes reads well, and its name."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 2 * 1024 ** power:
            return 1024 ** power, name
    return 1, "bytes"


def tidy(axis, title, unit):
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axis.set_ylabel(unit)
    axis.grid(True, color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def draw_logs(paths, output):
    figure, axes = plt.subplots(2, 2, figsize=(12, 7.5), sharex=True, constrained_layout=True)
    loss_axis, lr_axis, speed_axis, memory_axis = axes.flat
    names = [os.path.basename(os.path.dirname(os.path.abspath(path))) for path in paths]
    if len(set(names)) < len(names):
        names = paths
    plans, losses, lost_step = [], [], "skipped step"
    for i, (path, name) in enumerate(zip(paths, names)):
        events = read_log(path)
        steps = [event for event in events if "loss" in event]
        checks = [event for event in events if "val_loss" in event]
        x = [event["step"] for event in steps]
        colour = COLOURS[(0, 5, 3, 7, 8, 9)[i % 6]]
        prefix = f"{name}: " if len(paths) > 1 else ""
        loss = [number(event["loss"]) for event in steps]
        even = smooth(loss)
        losses += [value for value in even if not math.isnan(value)]
        loss_axis.plot(x, loss, color=colour, alpha=0.22, linewidth=0.7)
        loss_axis.plot(x, even, color=colour, linewidth=1.6, label=prefix + "train, smoothed")
        if checks:
            best = min(number(event["val_loss"]) for event in checks)
            loss_axis.plot([event["step"] for event in checks],
                           [number(event["val_loss"]) for event in checks], color=colour,
                           marker="o", markersize=5, markerfacecolor="white", linewidth=1.2,
                           linestyle="--", label=f"{prefix}validation, lowest {best:.4g}")
            losses += [number(event["val_loss"]) for event in checks]
        lr_axis.plot(x, [number(event.get("lr")) for event in steps], color=colour, linewidth=1.6)
        speed = [number(event.get("tokens_per_s")) for event in steps]
        speed_axis.plot(x, speed, color=colour, alpha=0.3, linewidth=0.7)
        speed_axis.plot(x, smooth(speed), color=colour, linewidth=1.6)
        for event in steps:
            if event.get("skipped"):
                loss_axis.axvline(event["step"], color="#999999", linewidth=0.8, linestyle=":",
                                  label=lost_step)
                lost_step = None
        plans += [(x, event["plan_bytes"], colour, prefix) for event in events
                  if "plan_bytes" in event]
    finite = sorted(value for value in losses if not math.isnan(value))
    if finite:
        spread = max(finite[-1] - finite[0], 1e-3)
        loss_axis.set_ylim(finite[0] - 0.08 * spread, finite[-1] + 0.08 * spread)
    loss_axis.legend(frameon=False, fontsize=9)
    tallest = max((planned for _, planned, _, _ in plans), default=1)
    unit, unit_name = scale_of(tallest)
    for x, planned, colour, prefix in plans:
        memory_axis.plot([x[0], x[-1]], [planned / unit] * 2, color=colour, linewidth=2,
                         label=f"{prefix}planned and allocated, {in_words(planned)}")
    if plans:
        memory_axis.set_ylim(0, 1.3 * tallest / unit)
        memory_axis.legend(frameon=False, fontsize=9)
    speed_axis.set_ylim(bottom=0)
    speed_axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    lr_axis.set_ylim(bottom=0)
    lr_axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    tidy(loss_axis, "Loss", "nats per token")
    tidy(lr_axis, "Learning rate", "")
    tidy(speed_axis, "Throughput", "tokens/s")
    tidy(memory_axis, "Memory", unit_name)
    for axis in (speed_axis, memory_axis):
        axis.set_xlabel("step")
    save(figure, output or os.path.join(os.path.dirname(paths[0]), "log.png"))


def colours_of(rows):
    """A colour for each group that occurs, in the order of the plan's table."""
    present = {row["group"] for row in rows}
    order = [group for group in GROUPS if group in present]
    order += sorted(present - set(GROUPS))
    spare = iter(COLOURS[len(GROUPS):] * len(order))
    return {group: COLOURS[GROUPS.index(group)] if group in GROUPS else next(spare)
            for group in order}


def stages_of(ticks):
    """Where the step's stages begin: [(tick, name)], ticks `3.fc` and `3.gelu` being stage `3`."""
    stages = []
    for i, name in enumerate(ticks):
        stage = name.split(".")[0]
        if not stages or stages[-1][1] != stage:
            stages.append((i, stage))
    return stages


def bytes_alive(rows, ticks):
    """Bytes of the rows alive at each tick."""
    alive = [0] * len(ticks)
    for row in rows:
        for tick in range(row["first"], row["last"] + 1):
            alive[tick] += row["bytes"]
    return alive


def draw_rows(axis, rows, ticks, colours, title):
    """One address space: every row a rectangle of its life and its bytes, and the bytes alive."""
    top = max(row["offset"] + row["bytes"] for row in rows)
    unit, unit_name = scale_of(top)
    axis.set_xlim(0, len(ticks))
    axis.set_ylim(0, 1.06 * top / unit)
    box = axis.get_window_extent()
    for row in rows:
        width = row["last"] + 1 - row["first"]
        bottom, height = row["offset"] / unit, row["bytes"] / unit
        axis.add_patch(Rectangle((row["first"], bottom), width, height, linewidth=0.4,
                                 facecolor=colours[row["group"]], edgecolor="white"))
        # A name where it fits: 8 points high, about 5 pixels a letter at 100 dots per inch.
        high = row["bytes"] / (1.06 * top) * box.height
        wide = width / len(ticks) * box.width
        if high > 12 and wide > 6.0 * len(row["name"]) + 6:
            dark = sum(int(colours[row["group"]][k:k + 2], 16) for k in (1, 3, 5)) < 390
            axis.text(row["first"] + width / 2, bottom + height / 2, row["name"],
                      fontsize=7.5, ha="center", va="center", color="white" if dark else "black")
    alive = [count / unit for count in bytes_alive(rows, ticks)]
    axis.step(range(len(ticks) + 1), alive + alive[-1:], where="post", color="black", linewidth=1.6)
    axis.axhline(top / unit, color="black", linewidth=1, linestyle="--")
    axis.text(len(ticks), top / unit, in_words(top), ha="right", va="bottom", fontsize=9)
    # Of the stages' names as many as stand beside each other without touching.
    shown, right = [], -math.inf
    for tick, name in stages_of(ticks):
        centre, half = tick / len(ticks) * box.width, 3.2 * len(name) + 4
        if centre - half > right:
            shown.append((tick, name))
            right = centre + half
    axis.set_xticks([tick for tick, _ in shown], [name for _, name in shown], fontsize=8)
    tidy(axis, title, unit_name)
    axis.grid(False)


def draw_plan(path, output):
    try:
        with open(path, encoding="utf-8") as file:
            plan = json.load(file)
        spaces = [(where, [row for row in plan["rows"] if row.get("where", "device") == where
                           and row["bytes"] > 0]) for where in ("device", "host")]
        ticks, target = plan["ticks"], plan["target"]
    except OSError as error:
        sys.exit(f"plot.py: cannot read {path}: {error.strerror}")
    except (ValueError, KeyError, TypeError) as error:
        sys.exit(f"plot.py: {path} is not what --plan --json prints ({error!r})")
    spaces = [(where, rows) for where, rows in spaces if rows]
    if not spaces:
        sys.exit(f"plot.py: {path}: no rows in the plan")
    figure, axes = plt.subplots(len(spaces), 1, figsize=(13, 4 + 3.5 * len(spaces)), dpi=100,
                                squeeze=False, height_ratios=(2.2, 1)[:len(spaces)])
    figure.subplots_adjust(left=0.06, right=0.82, top=0.93, bottom=0.08, hspace=0.22)
    colours = colours_of([row for _, rows in spaces for row in rows])
    for axis, (where, rows) in zip(axes[:, 0], spaces):
        draw_rows(axis, rows, ticks, colours,
                  f"Memory over one training step: {target}, {where}")
    axes[-1, 0].set_xlabel("stage of the step: blocks forward, head, blocks backward, update")
    handles = []
    for group, colour in reversed(colours.items()):
        rows = [row for _, rows in spaces for row in rows if row["group"] == group]
        most = in_words(max(bytes_alive(rows, ticks)))
        handles.append(Patch(facecolor=colour, label=f"{group}\nat most {most}"))
    handles += [plt.Line2D([], [], color="black", linewidth=1.6, label="bytes alive"),
                plt.Line2D([], [], color="black", linewidth=1, linestyle="--",
                           label="the one allocation")]
    figure.legend(handles=handles, loc="center left", bbox_to_anchor=(0.83, 0.5), frameon=False,
                  fontsize=9, labelspacing=0.9)
    save(figure, output or os.path.splitext(path)[0] + ".png")


def in_words(count):
    unit, name = scale_of(count)
    return f"{count / unit:.4g} {name}"


def save(figure, path):
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        sys.exit(f"plot.py: cannot write {path}: {error.strerror}")
    print(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="*", metavar="log.jsonl", help="logs of runs")
    parser.add_argument("--plan", metavar="plan.json", help="what --plan --json printed")
    parser.add_argument("-o", "--output", metavar="FILE.png", help="the picture")
    arguments = parser.parse_args()
    if bool(arguments.plan) == bool(arguments.logs):
        parser.error("give logs of runs, or --plan plan.json")
    if arguments.plan:
        draw_plan(arguments.plan, arguments.output)
    else:
        draw_logs(arguments.logs, arguments.output)


if __name__ == "__main__":
    main()
