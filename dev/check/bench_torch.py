#!/usr/bin/env python3
"""Times GPT-2's training step in PyTorch, for comparison with train_gpt2cu:
    dev/check/bench_torch.py --model d12

Does the same work as a step of train_gpt2cu, with the same shapes, in PyTorch's usual setup: fp32
weights and moments with bf16 or fp16 autocast, SDPA, fused AdamW. There are four variants: eager
and compiled, each with all activations kept (-r 0) and with every block checkpointed (-r 1). Models
with more than 12 layers are compiled block by block, because compiling 48 layers as one graph would
take minutes. Without CUDA, runs on the CPU, which only shows that it works.

Prints one line per variant as soon as it is measured: the median time of steps after warm-up, and
the peak of reserved device memory, including the CUDA context:
torch eager d12 -r 0 B 16 T 1024 ms 101.2 tokens/s 161897 MiB 20112
"""
import argparse, re, statistics, sys, time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PRESETS = {"d12": (12, 12, 768), "d24": (24, 16, 1024), "d36": (36, 20, 1280),
           "d48": (48, 25, 1600)}  # L, NH, C
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
WAYS = ((False, "eager"), (True, "eager"), (False, "compiled"), (True, "compiled"))  # fast first
WARM_UP, BATCHES, WHOLE_GRAPH_LAYERS = 3, 4, 12


def shape(name):
    """Returns (L, NH, C, maxT, Vp) of a preset, or of a shape such as l2h2c64t64 (257 tokens)."""
    if name in PRESETS:
        return (*PRESETS[name], 1024, 50304)
    found = re.fullmatch(r"l(\d+)h(\d+)c(\d+)t(\d+)", name)
    if not found:
        sys.exit(f"--model '{name}' is neither {' '.join(PRESETS)} nor a shape such as l2h2c64t64")
    return (*map(int, found.groups()), 384)


class Block(nn.Module):
    """Maps x (B,T,C) to x (B,T,C): attention and MLP, each with pre-LayerNorm and a residual."""

    def __init__(self, C, NH):
        super().__init__()
        self.NH = NH
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.attproj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.qkv(self.ln1(x)).view(B, T, 3, self.NH, C // self.NH)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attproj(att.transpose(1, 2).reshape(B, T, C))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class Head(nn.Module):
    """Final LayerNorm, tied classifier and mean loss."""

    def __init__(self, C, wte):
        super().__init__()
        self.lnf, self.wte = nn.LayerNorm(C), wte

    def forward(self, x, targets):
        logits = F.linear(self.lnf(x), self.wte)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GPT2(nn.Module):
    def __init__(self, L, NH, C, max_T, Vp, recompute):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(Vp, C), nn.Embedding(max_T, C)
        self.blocks = nn.ModuleList(Block(C, NH) for _ in range(L))
        self.head = Head(C, self.wte.weight)
        self.recompute = recompute
        # Random inputs need no careful initialization, only one that keeps the loss finite.
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x, targets)


def compiled(model):
    """Compiles the model's graph in place, as a whole or block by block."""
    if len(model.blocks) <= WHOLE_GRAPH_LAYERS:
        model.compile()
        return
    for part in (*model.blocks, model.head):
        part.compile()


def device_mib(device):
    """Returns the peak of reserved memory plus other device memory in use, in MiB."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    return (torch.cuda.max_memory_reserved() + others) >> 20


def measure(args, way, recompute, B, device):
    """Trains a fresh model for a few steps and prints its line."""
    L, NH, C, T, Vp = shape(args.model)
    torch.manual_seed(42)
    with device:
        model = GPT2(L, NH, C, T, Vp, recompute)
    if way == "compiled":
        compiled(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0,
                              fused=True)
    tokens = torch.randint(0, min(Vp, 50257), (BATCHES, B, T + 1))
    if device.type == "cuda":
        tokens = tokens.pin_memory()
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")
    times = []
    for step in range(WARM_UP + args.steps):
        began = time.perf_counter()
        batch = tokens[step % BATCHES].to(device, non_blocking=True)
        with torch.autocast(device.type, DTYPES[args.dtype]):
            loss = model(batch[:, :-1], batch[:, 1:])
        scaler.scale(loss).backward()
        scaler.unscale_(adamw)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(adamw)
        scaler.update()
        adamw.zero_grad(set_to_none=True)
        value = loss.item()  # waits for all queued work, including the update
        times.append((time.perf_counter() - began) * 1e3)
    if not value < 1e3:
        raise RuntimeError(f"the loss is {value}")
    ms = statistics.median(times[WARM_UP:])
    print(f"torch {way} {args.model} -r {recompute:d} B {B} T {T} ms {ms:.3f} "
          f"tokens/s {B * T / ms * 1e3:.0f} MiB {device_mib(device)}", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Times GPT-2's training step in PyTorch.")
    parser.add_argument("--model", default="d12", help="d12 d24 d36 d48 or a shape: l2h2c64t64")
    parser.add_argument("--batch", type=int, default=4, help="sequences with -r 0")
    parser.add_argument("--batch-recompute", type=int, help="sequences with -r 1; default: --batch")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--steps", type=int, default=10, help="timed steps after the warm-up")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"# PyTorch {torch.__version__} on {name}, {torch.get_num_threads()} threads", flush=True)
    measured = 0
    for recompute, way in WAYS:
        B = args.batch_recompute if recompute and args.batch_recompute else args.batch
        try:
            measure(args, way, recompute, B, device)
            measured += 1
        except Exception as error:  # out of memory, or the compiler does not work here
            first_line = str(error).strip().split("\n")[0][:150]
            print(f"torch {way} {args.model} -r {recompute:d} B {B} FAILED: "
                  f"{type(error).__name__}: {first_line}", flush=True)
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return 0 if measured else 1


if __name__ == "__main__":
    sys.exit(main())
