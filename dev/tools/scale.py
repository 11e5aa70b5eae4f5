#!/usr/bin/env python3
"""Bytes and time of a step from 1 to 1,024 GPUs, as tables for dev/notes/scale.md.

Bytes are those printed by `train_gpt2 --plan --gpus N -z S`; compute time is its forecast for one
H200; exchange time is bytes over rates: NVLink's is that of the forecast (nvlink_cta_rate in
train_gpt2.c, for sixteen of NCCL's thread blocks), the others are nominal. Nothing is measured.
Run:    make train_gpt2 && dev/tools/scale.py
"""
import re
import subprocess
from pathlib import Path

MODELS = (("d12", 12, 64), ("d48", 48, 16))  # name, layers, sequences of 1,024 tokens on each GPU
CARD = "h200"
PCIE, NODE = 31.5e9, 50e9                    # bytes/s: per GPU and direction, per machine
MACHINE = 8                                  # GPUs per machine
MESSAGE = 1e-6                               # s: assumed for one send to one rank
FORECAST = Path(__file__).resolve().parents[2] / "train_gpt2.c"
NVLINK = 16 * float(re.search(r"nvlink_cta_rate = (\S+) / 2;", FORECAST.read_text())[1]) / 2
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def plan(model, batch, gpus, stage):
    """The printed plan of one setting."""
    command = ["./train_gpt2", "-e", model, "-b", str(batch), "-r", "none", "--plan"]
    card = ["--gpu", CARD]
    ranks = ["--gpus", str(gpus), "-z", str(stage)] if gpus > 1 else []
    text = subprocess.run(command + card + ranks, capture_output=True, text=True).stdout
    return " ".join(text.split())  # long lines are wrapped


def size(text, pattern):
    """A size in bytes printed by the plan; 0 if it is missing."""
    found = re.search(pattern + r" ([0-9.]+) (\w+)", text)
    return float(found[1]) * UNITS[found[2]] if found else 0.0


def exchange(bytes_added, bytes_gathered, gpus, layers, link):
    """Seconds to add and to gather. Between machines each rank sends its part to every other one,
    so eight ranks share the machine's link; a gather uses a ring that crosses it once."""
    messages = MESSAGE * (gpus - 1) * (layers + 3)  # one to each rank for each bucket
    if gpus <= MACHINE:
        return bytes_added / link + messages, bytes_gathered / link
    outside = bytes_added * MACHINE * (gpus - MACHINE) / (gpus - 1)
    return (max(outside / NODE, bytes_added / link) + messages,
            bytes_gathered / min(NODE, link))


def main():
    for model, layers, batch in MODELS:
        rate = re.search(r"forecast: ([0-9,]+) tokens", plan(model, batch, 1, 0))[1]
        compute = batch * 1024 / float(rate.replace(",", ""))
        print(f"\n{model}, {batch} x 1,024 tokens a GPU and step: {1e3 * compute:.0f} ms of "
              "computing\n")
        print("| GPUs | `-z` | total per GPU, GiB | sent, GiB: added + gathered | "
              "exchange, ms: NVLink | PCIe 4 | step, ms: NVLink | PCIe 4 | what binds (NVLink) |")
        print("| --- " * 9 + "|")
        for gpus in (1, 2, 4, 8, 16, 64, 256, 1024):
            for stage in range(4 if gpus > 1 else 1):
                text = plan(model, batch, gpus, stage)
                total = float(re.search(r"total per GPU .*? ([0-9.]+) GiB", text)[1])
                added, gathered = size(text, "GPU:"), size(text, "gradients to add,")
                times, steps, binds = [], [], ""
                for link in (NVLINK, PCIE):
                    add, gather = exchange(added, gathered, gpus, layers, link)
                    # Sums overlap with backward, two thirds of a step; at -z 3 everything overlaps.
                    hidden = max(compute, add + gather) if stage == 3 else 0
                    step = hidden or max(compute, compute / 3 + add) + gather
                    late = add if stage == 3 else add - compute * 2 / 3  # not hidden
                    binds = binds or ("computing" if step < 1.1 * compute else
                                      "adding" if late > gather else "gathering")
                    times.append(f"{1e3 * (add + gather):.1f}")
                    steps.append(f"{1e3 * step:.0f}")
                print(f"| {gpus:,} | {stage} | {total:.2f} | {added / 2**30:.2f} + "
                      f"{gathered / 2**30:.2f} | {times[0]} | {times[1]} | {steps[0]} | {steps[1]} "
                      f"| {binds} |")


main()
