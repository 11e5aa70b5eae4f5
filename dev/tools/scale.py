#!/usr/bin/env python3
"""Bytes, messages and exposed time of a step from 1 to 1,024 GPUs: tables for dev/notes/scale.md.

The stream operations of a step (launches, waits, collectives) are recorded from the emulated GPU
program (EMU_LOG=1), for each number of blocks and ZeRO stage: with 2 ranks, whose gradients are
added in one group, and with 9, in two groups. They are then replayed with a real model's sizes:
each stream does one operation at a time and waits as recorded, and a transfer takes its bytes
divided by the rate of its link. So the overlap is that of the program. Computation is the forecast
of `train_gpt2 --plan`, spread over the recorded matmuls in proportion to their operations. The
bytes are checked against those that `--plan --gpus N -z S` prints. Nothing here is measured.
Run:    make train_gpt2 train_gpt2cu_cpu && dev/tools/scale.py
"""
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = (("d12", 12, 768, 64), ("d48", 48, 1600, 16))  # blocks, channels, sequences on each GPU
GPUS = (1, 2, 4, 8, 16, 64, 256, 1024)
CARD, VP, MAX_T = "h200", 50304, 1024
NVLINK = 16 * 10.3e9                      # bytes/s per direction: sixteen of NCCL's thread blocks
PCIE = 0.79 * 31.5e9                      # PCIe 4 x16
ADAPTER = 50e9                            # 400 Gb/s
LINKS = (("NVLink", NVLINK, 1), ("NVLink, 8 adapters", NVLINK, 8), ("PCIe", PCIE, 1))
MEMORY = 3.2e12                           # the forecast's rate of an H200's other kernels
MACHINE = GROUP = 8                       # GPUs of a machine, ranks of a group
MESSAGE = 1e-6                            # s: assumed for a send to a rank, and a hop of a ring
UPDATE_BYTES = 26                         # read and written by AdamW per element: weight and split
                                          # master 2 + 2 and moments 4 + 4 twice, gradient 2
SMALL, SMALL_T = 16, 20                   # channels and tokens of the recorded model
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
LINES = (("gather", r"AllGather on stream (\d+), (\d+)"), ("send", r"Send/Recv on stream (\d+)"),
         ("broadcast", r"Broadcast on stream (\d+)"),
         ("matmul", r"matmul on stream (\d+), (\d+) x (\d+) x (\d+)"),
         ("wait", r"stream (\d+) waits for stream (\d+), after (\d+)"),
         ("host", r"the host waits, stream (\d+)"), ("adamw", r"adamw_kernel.* on stream (\d+)"),
         ("decide", r"update_decide.* on stream (\d+)"))


def bucket_sizes(layers, channels, vp, positions, ranks):
    """Elements of each bucket, padded: vectors, wte, wpe, then the matrices of each block."""
    def pad(n, to=64):
        return -(-n // to) * to
    vectors = layers * (6 * pad(channels) + pad(3 * channels) + pad(4 * channels))
    sizes = [vectors + 2 * pad(channels), vp * channels, positions * channels]
    return [pad(n, 64 * ranks) for n in sizes + layers * [12 * channels**2]]


class Recording:
    """The operations of rank 0 in two steps: (kind, stream, numbers)."""

    def __init__(self, layers, ranks, stage):
        self.layers = layers
        options = (f"-i train.bin -e l{layers}h1c{SMALL}t{SMALL_T} -b 1 -x 4 -v 0 -r none --quiet "
                   f"--gpus {ranks} -z {stage}")
        with tempfile.TemporaryDirectory() as folder:
            header = [20240520, 1, 4000] + 253 * [0]
            data = b"".join(x.to_bytes(4, "little") for x in header) + bytes(2 * 4000)
            Path(folder, "train.bin").write_bytes(data)
            run = subprocess.run([ROOT / "train_gpt2cu_cpu", *options.split()], cwd=folder,
                                 capture_output=True, text=True,
                                 env={**os.environ, "EMU_LOG": "1", "EMU_GPUS": "9",
                                      "OMP_NUM_THREADS": "1"})
        if run.returncode:
            sys.exit(f"{options}: {run.stderr[-500:]}")
        lines = re.findall(r"\[emu (\d+)\] (.*)", run.stderr)
        # Rank 0 is the only one that sends to rank 1 first and never to itself.
        rank_0 = next(pid for pid, line in lines if re.match(r"Send/Recv .*, to 1:", line))
        ops = []
        for line in (line for pid, line in lines if pid == rank_0):
            for kind, pattern in LINES:
                match = re.match(pattern, line)
                if match:
                    ops.append((kind, *(int(x) for x in match.groups())))
                    break
        updates = [i for i, op in enumerate(ops) if op[0] == "decide"]
        self.begin, self.end = updates[-3], updates[-1]
        self.calls = sum(op[0] in ("gather", "send", "broadcast") for op in ops[:self.begin])
        self.ops = ops[self.begin:self.end + 1]
        self.compute = self.ops[0][1]
        self.exchange = next(op[1] for op in self.ops if op[0] == "send")
        self.name_buckets(bucket_sizes(layers, SMALL, VP, SMALL_T, ranks), ranks)

    def name_buckets(self, sizes, ranks):
        """Sets buckets[i] to transfer i's (bucket, level of the sum, share of the bucket)."""
        ring = {(ranks - 1) * (n // ranks) * (2 if b else 4): b for b, n in enumerate(sizes)}
        assert len(ring) == 4, "two buckets of one size"
        order, session, self.buckets = [], [], {}
        for i, op in enumerate(self.ops):
            if op[0] == "decide":
                order = [*range(2 + self.layers, 2, -1), 1, 2, 0]  # in which gradients are added
            elif op[0] == "wait" and op[1] == self.exchange:
                session = []
            elif op[0] == "gather":
                self.buckets[i] = (ring.get(op[2]), 0, 1)
            elif op[0] == "send":
                bucket = self.buckets[session[0]][0] if session else order.pop(0)
                session.append(i)
                levels = 2 if ranks > GROUP else 1
                for n, at in enumerate(session):
                    self.buckets[at] = (bucket, n % levels, levels / len(session))


class Step:
    """A recorded step with the sizes of a real model on `ranks` ranks."""

    def __init__(self, recording, model, ranks, stage, compute):
        _, self.layers, self.channels, batch = model
        self.recording, self.ranks, self.stage = recording, ranks, stage
        self.sizes = bucket_sizes(self.layers, self.channels, VP, MAX_T, ranks)
        self.tokens, self.compute = batch * 1024, compute
        self.parts = -(-ranks // GROUP) if ranks > GROUP else 1  # of a bucket that rank 0 adds
        self.flops = sum(self.work(op) for op in recording.ops if op[0] == "matmul") / 2

    def work(self, op):
        """Operations of a recorded matmul with the real dimensions."""
        flops = 1
        for size in op[2:5]:
            flops *= (VP if size == VP else self.tokens if size == SMALL_T
                      else size // SMALL * self.channels)
        return flops

    def added(self, bucket):
        """Bytes and messages of a rank in each level of the sum of a bucket. The exchange buffer
        has the size of a block's bucket, or 9/8 of it with several groups; larger buckets are
        added in pieces."""
        part, size = self.sizes[bucket] // self.ranks, 2 if bucket else 4
        inside, between = self.ranks - self.parts, self.parts - 1
        received = (min(self.ranks, GROUP) - 1) * self.parts * size + (between and self.parts * 4)
        buffer = self.sizes[3] * 2 * (9 if between else 8) // 8
        pieces = -(-part // (buffer // received // 8 * 8))
        return ((inside * part * size, inside * pieces), (between * part * 4, between * pieces))

    def gathered(self, bucket):
        part = self.sizes[bucket] // self.ranks if bucket is not None else 16
        return (self.ranks - 1) * part * (2 if bucket else 4)

    def traffic(self):
        """Bytes of a rank, added and gathered; bytes a machine sends to others; messages."""
        levels = [self.added(b) for b in range(len(self.sizes))]
        block = 2 - 2 / self.layers if self.stage == 3 else 1  # gathers of a block
        gathered = sum(self.gathered(b) * (block if b > 2 else 1) for b in range(len(self.sizes)))
        away = MACHINE * sum(b[0] for a, b in levels) + gathered if self.ranks > MACHINE else 0
        return (sum(a[0] + b[0] for a, b in levels), gathered, away,
                sum(a[1] + b[1] for a, b in levels))

    def update(self, bucket):
        """Seconds of a launch of AdamW: of everything, or of a bucket's shard."""
        share = self.sizes[bucket] / (self.ranks if bucket else 1)
        return (share if self.stage else sum(self.sizes)) * UPDATE_BYTES / MEMORY

    def seconds(self, link, network, message):
        """Seconds between two updates."""
        r, now_at, done, decided = self.recording, {}, {}, []
        host, calls, updates = 0.0, r.calls, 0
        between = self.ranks > MACHINE
        for i, op in enumerate(r.ops):
            kind, stream = op[0], op[1]
            now = max(now_at.get(stream, 0.0), host)
            if kind == "decide":
                decided.append(now)
                updates = 0
            elif kind == "matmul":
                now += self.compute * self.work(op) / self.flops
            elif kind == "adamw":
                now += self.update(updates)
                updates += 1
            elif kind == "gather":
                size = self.gathered(r.buckets[i][0])
                now += max(size / link, size / network if between else 0)
                now += (self.ranks - 1) * message
            elif kind == "send":
                bucket, level, share = r.buckets[i]
                size, messages = self.added(bucket)[level]
                now += share * (MACHINE * size / network if level else size / link)
                now += share * messages * message
            elif kind == "wait":
                # For a transfer's event, or for all that the other stream has been given so far.
                now = max(now, done.get(op[3], 0.0) if op[2] == r.exchange else
                          now_at.get(op[2], 0.0))
            elif kind == "host":
                host = max(host, now)
            if kind in ("gather", "send"):
                calls += 1
                done[calls] = now
            now_at[stream] = now
        return decided[-1] - decided[-2]


def plan(model, ranks, stage):
    """The printed plan of one setting."""
    name, _, _, batch = model
    command = [ROOT / "train_gpt2", "-e", name, "-b", str(batch), "-r", "none", "--plan", "--gpu",
               CARD, *(["--gpus", str(ranks), "-z", str(stage)] if ranks > 1 else [])]
    text = subprocess.run(command, capture_output=True, text=True).stdout
    return " ".join(text.split())  # long lines are wrapped


def differs(text, pattern, size):
    """Whether a size printed by the plan, with one digit after the point, is not `size`."""
    found = re.search(pattern + r" ([0-9.]+) (\w+)", text)
    return abs(float(found[1]) - size / UNITS[found[2]]) > 0.051


def row(model, step, text, ranks, stage):
    """A row of the table: bytes, messages, and for each link exposed ms and what limits."""
    added, gathered, away, messages = step.traffic()
    if differs(text, "each GPU:", added) or differs(text, "gradients to add,", gathered):
        sys.exit(f"{model[0]}, {ranks} GPUs, -z {stage}: {added:.0f} and {gathered:.0f} bytes, "
                 f"but the plan says: {text}")
    cells = []
    alone = step.seconds(1e30, 1e30, 0)
    for _, link, adapters in LINKS:
        network = adapters * ADAPTER
        real = step.seconds(link, network, MESSAGE)
        without = {"link": step.seconds(1e30, network, MESSAGE),
                   "network": step.seconds(link, 1e30, MESSAGE),
                   "messages": step.seconds(link, network, 0)}
        least = min(without, key=without.get)
        limit = "computation" if real < 1.02 * alone else least
        cells.append(f"{1e3 * (real - alone):.1f} ({100 * (real / alone - 1):.1f} %), {limit}")
    total = float(re.search(r"total per GPU .*? ([0-9.]+) GiB", text)[1])
    return (f"| {ranks:,} | {stage} | {total:.1f} | {added / 2**30:.2f} + {gathered / 2**30:.2f} | "
            f"{away / 2**30:.1f} | {messages:,} | " + " | ".join(cells) + " |")


def main():
    for model in MODELS:
        name, layers, _, batch = model
        rate = float(re.search(r"forecast: ([0-9,]+) tokens", plan(model, 1, 0))[1]
                     .replace(",", ""))
        sizes = bucket_sizes(layers, model[2], VP, MAX_T, 1)
        compute = batch * 1024 / rate - sum(sizes) * UPDATE_BYTES / MEMORY
        print(f"\n{name}, {batch} x 1,024 tokens per GPU and step; computation {1e3 * compute:.0f} "
              "ms, and the update\n")
        print("| GPUs | `-z` | total per GPU, GiB | sent per GPU, GiB: added + gathered | sent per "
              "machine, GiB | messages | " +
              " | ".join(f"{link[0]}: exposed ms, limit" for link in LINKS) + " |")
        print("| --- " * (6 + len(LINKS)) + "|")
        recordings = {}
        for ranks in GPUS[1:]:
            for stage in range(4):
                key = (9 if ranks > GROUP else 2, stage)
                if key not in recordings:
                    recordings[key] = Recording(layers, *key)
                step = Step(recordings[key], model, ranks, stage, compute)
                print(row(model, step, plan(model, ranks, stage), ranks, stage), flush=True)


main()
