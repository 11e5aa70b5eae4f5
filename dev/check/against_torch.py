#!/usr/bin/env python3
"""The CPU program against GPT-2 in Hugging Face transformers: make check_torch PYTHON=...

    python3 -m venv build/venv
    build/venv/bin/pip install numpy safetensors torch transformers
    make check_torch PYTHON=build/venv/bin/python

It needs no network and no GPU: models are made from a GPT2Config, weights and tokens are random.
Four comparisons, with small models of odd shapes:

1. Logits, loss, gradient norm and every gradient, from the same weights and tokens.
2. AdamW alone: torch.optim.AdamW on our gradients, with decay on matrices only, clipping by the
   global norm and our schedule; weights and moments after every step.
3. Training: each side takes its steps with its own gradients.
4. Folders: transformers loads our checkpoint, and we load what transformers saves.

The reference is PyTorch in float64; PyTorch in float32 is shown for comparison. A line contains our
largest difference from the reference, absolute (`abs`) and relative to the tensor's largest number
(`rel`), that of PyTorch in float32 (`torch`), the tolerance, and the share of it that is used.
Tolerances follow from u = 2^-24, the relative error of one rounding, and are documented where they
are computed. Finally, every comparison is run with a wrong weight or optimizer, and must detect it.

The last line is `N passed, N failed`; the exit status is 1 if one failed.
"""
import argparse
import copy
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import safetensors.torch
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

ROOT = Path(__file__).resolve().parents[2]
U = 2.0 ** -24

# Our tensors, theirs, and whether theirs is transposed: their linear layers are (in, out).
NAMES = {
    "wte": ("wte.weight", False), "wpe": ("wpe.weight", False),
    "ln1w": ("h.{}.ln_1.weight", False), "ln1b": ("h.{}.ln_1.bias", False),
    "qkvw": ("h.{}.attn.c_attn.weight", True), "qkvb": ("h.{}.attn.c_attn.bias", False),
    "attprojw": ("h.{}.attn.c_proj.weight", True), "attprojb": ("h.{}.attn.c_proj.bias", False),
    "ln2w": ("h.{}.ln_2.weight", False), "ln2b": ("h.{}.ln_2.bias", False),
    "fcw": ("h.{}.mlp.c_fc.weight", True), "fcb": ("h.{}.mlp.c_fc.bias", False),
    "fcprojw": ("h.{}.mlp.c_proj.weight", True), "fcprojb": ("h.{}.mlp.c_proj.bias", False),
    "lnfw": ("ln_f.weight", False), "lnfb": ("ln_f.bias", False),
}


@dataclass
class Case:
    """A model, its batches and its optimizer."""
    L: int
    NH: int
    C: int
    maxT: int
    V: int
    B: int
    T: int
    micros: int
    schedule: str
    steps: int = 4
    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    decay: float = 0.1
    clip: float = 0.5  # below these models' norms, so every step clips
    warmup: int = 2
    final_lr: float = 0.1
    vector_decay: float = 0.0  # train_gpt2 never decays vectors

    @property
    def weight_std(self):
        """Gives queries and keys deviation 1.3 at any width: attention is far from uniform, but
        also far from a single token, which would amplify earlier rounding errors."""
        return 1.3 / math.sqrt(self.C)

    @property
    def shape(self):
        return f"l{self.L}h{self.NH}c{self.C}t{self.maxT}"

    def options(self):
        """Options of our programs, except the model."""
        options = {"-b": self.B, "-t": self.T, "-d": self.B * self.T * self.micros,
                   "-x": self.steps, "-l": self.lr, "-u": self.warmup, "-q": self.final_lr,
                   "-k": self.schedule, "-c": self.decay, "--beta1": self.beta1,
                   "--beta2": self.beta2, "--eps": self.eps, "--clip": self.clip}
        return [str(word) for pair in options.items() for word in pair]

    def learning_rate(self, step):
        """Learning rate of step `step`, from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        t = (step - self.warmup) / (self.steps - self.warmup)
        fall = {"cosine": 0.5 * (1 + math.cos(math.pi * t)), "linear": 1 - t}[self.schedule]
        return self.lr * (self.final_lr + (1 - self.final_lr) * fall)

    def tolerance(self, backward):
        """Relative to a tensor's largest number. A number is the result of a chain of sums: n
        consecutive roundings with practically random errors add up to about sqrt(n) u. Doubled,
        because it must bound the largest error of all elements."""
        block = 2 * self.C + 7 * self.C + self.C // self.NH + self.T  # norms, matmuls, attention
        n = self.L * block + 2 * self.C
        if backward:
            n = 2 * n + self.V + self.B * self.T * self.micros  # the head's sum, a weight's sum
        return 2 * U * math.sqrt(n)


CASES = [
    Case(L=3, NH=3, C=72, maxT=37, V=331, B=3, T=29, micros=1, schedule="cosine"),
    Case(L=2, NH=5, C=80, maxT=24, V=257, B=2, T=24, micros=2, schedule="linear"),
    Case(L=2, NH=5, C=320, maxT=140, V=1003, B=2, T=131, micros=1, schedule="cosine"),
]


class Report:
    """Prints comparisons and counts the results."""

    def __init__(self):
        self.passed = self.failed = 0

    def head(self, text):
        print(f"\n{text}\n{'':34} {'abs':>8} {'rel':>8} {'torch':>8} {'tol':>8}  used")

    def verdict(self, name, ok, numbers=""):
        self.passed += ok
        self.failed += not ok
        print(f"{name:34} {numbers:42}  {'ok' if ok else 'FAILED'}", flush=True)

    def line(self, name, d):
        self.verdict(name, d.used() <= 1, f"{d.abs:8.1e} {d.rel:8.1e} {d.torch:8.1e} "
                     f"{d.tolerance:8.1e} {100 * d.used():4.0f} %")

    def lines(self, differences):
        """One line per kind of tensor over all layers: the worst of them."""
        worst = {}
        for name, d in differences.items():
            kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
            if kind not in worst or not d.used() <= worst[kind].used():
                worst[kind] = d
        for kind, d in worst.items():
            self.line(kind, d)


@dataclass
class Difference:
    abs: float
    rel: float
    torch: float
    tolerance: float

    def used(self):
        return self.rel / self.tolerance


def difference(ours, torch32, reference, tolerance):
    """Compares arrays or numbers; NaN always fails. `torch32` may be None."""
    reference = np.asarray(reference, np.float64)
    scale = np.abs(reference).max() + 1e-300

    def largest(values):
        values = np.asarray(values, np.float64)
        if values.shape != reference.shape:
            raise SystemExit(f"shapes differ: {values.shape}, {reference.shape}")
        return np.abs(values - reference).max()

    away = largest(ours)
    return Difference(away, away / scale, 0 if torch32 is None else largest(torch32) / scale,
                      tolerance)


# --- Our side -------------------------------------------------------------------------------------

def run(*command):
    """Runs one of our programs; its output is shown only if it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


class Dump:
    """A run of `case` by build/dump with random weights and tokens, and its numbers."""

    def __init__(self, case, folder, seed):
        self.case, self.folder = case, folder
        rng = np.random.default_rng(seed)
        folder.mkdir()
        shape = case.steps, case.micros, 2, case.B, case.T
        self.tokens = rng.integers(0, case.V, shape, dtype=np.int32)
        self.tokens.tofile(folder / "tokens.bin")
        command = [ROOT / "build/dump", folder, case.V, "-e", case.shape, *case.options()]
        run(*command)  # for the layout
        self.fields = {}
        for line in (folder / "index.txt").read_text().splitlines():
            name, layer, *numbers = line.split()
            self.fields[name, int(layer)] = tuple(map(int, numbers))
        flat = np.zeros_like(np.fromfile(folder / "weights-0.bin", np.float32))
        for (name, _), (rows, cols, offset) in self.fields.items():
            values = rng.normal(name in ("ln1w", "ln2w", "lnfw"), case.weight_std, (rows, cols))
            if name == "wte":
                values[case.V:] = 0
            flat[offset:offset + rows * cols] = values.ravel()
        flat.tofile(folder / "weights.bin")
        run(*command)
        if not np.array_equal(flat, np.fromfile(folder / "weights-0.bin", np.float32)):
            raise SystemExit(f"{folder}: weights-0.bin is not weights.bin")
        columns = np.loadtxt(folder / "steps.txt", ndmin=2).T
        self.loss, self.norm, self.lr, self.evaluated = columns[1:]
        logits = np.fromfile(folder / "logits.bin", np.float32)
        self.logits = logits.reshape(case.B, case.T, case.V)

    def state(self, what, step):
        """weights, grads, m or v after `step` steps: {their name: array in their layout}."""
        flat = np.fromfile(self.folder / f"{what}-{step}.bin", np.float32)
        tensors = {}
        for (name, layer), (rows, cols, offset) in self.fields.items():
            theirs, transposed = NAMES[name]
            array = flat[offset:offset + rows * cols].reshape(rows, cols)
            if name == "wte":
                if array[self.case.V:].any():
                    raise SystemExit(f"{what}-{step}.bin: a row beyond the vocabulary is not zero")
                array = array[:self.case.V]
            tensors[theirs.format(layer)] = array.T if transposed else array.squeeze()
        return tensors


# --- Their side -----------------------------------------------------------------------------------

def hf_config(case):
    return GPT2Config(vocab_size=case.V, n_positions=case.maxT, n_embd=case.C, n_layer=case.L,
                      n_head=case.NH, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                      bos_token_id=0, eos_token_id=0, attn_implementation="eager")


def hf_model(case, weights, dtype):
    model = GPT2LMHeadModel(hf_config(case)).to(dtype)
    load(model, weights)
    return model


def named(model):
    """Parameters by name; wte, which is also the classifier, only once."""
    return dict(model.transformer.named_parameters())


def load(model, weights):
    with torch.no_grad():
        for name, parameter in named(model).items():
            parameter.copy_(torch.tensor(weights[name]))


def arrays(tensors):
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


def batch_loss(model, inputs, targets):
    """Logits and mean loss. Targets are already shifted, so the model's own loss is not used."""
    logits = model(torch.tensor(inputs).long()).logits
    loss = cross_entropy(logits.flatten(0, 1), torch.tensor(targets).long().flatten())
    return logits, loss


def gradients(model, batches):
    """Mean loss and norm of one step's micro-batches; the gradients stay in the model."""
    model.zero_grad()
    total = 0
    for inputs, targets in batches:
        loss = batch_loss(model, inputs, targets)[1] / len(batches)
        loss.backward()
        total += loss.item()
    return total, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


class Trainer:
    """torch.optim.AdamW with our run's settings. Clipping is done here, because clip_grad_norm_
    adds 1e-6 to the norm, which is more than a rounding."""

    def __init__(self, case, model):
        self.case, self.model = case, model
        matrices = [p for p in model.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": case.decay},
                  {"params": vectors, "weight_decay": case.vector_decay}]
        self.adamw = torch.optim.AdamW(groups, lr=1.0, betas=(case.beta1, case.beta2), eps=case.eps)

    def update(self, step, norm):
        for parameter in self.model.parameters():
            parameter.grad *= min(1.0, self.case.clip / norm)
        for group in self.adamw.param_groups:
            group["lr"] = self.case.learning_rate(step)
        self.adamw.step()

    def state(self, what):
        """weights, m or v."""
        if what == "weights":
            return arrays(named(self.model))
        key = {"m": "exp_avg", "v": "exp_avg_sq"}[what]
        return arrays({n: self.adamw.state[p][key] for n, p in named(self.model).items()})


# --- 1. Gradients ---------------------------------------------------------------------------------

def gradient_differences(dump, step, weights, with_torch32=True):
    """Step `step` (from 0) from `weights`: {name: Difference} of logits, losses and gradients."""
    case, batches, results = dump.case, dump.tokens[step], []
    for dtype in (torch.float64, torch.float32)[:1 + with_torch32]:
        model = hf_model(case, weights, dtype)
        with torch.no_grad():
            logits, evaluated = batch_loss(model, *batches[0])
        loss, norm = gradients(model, batches)
        grads = arrays({name: p.grad for name, p in named(model).items()})
        results.append((logits.numpy(), evaluated.item(), loss, norm, grads))
    reference, other = results[0], results[-1] if with_torch32 else (None,) * 5
    forward, backward = case.tolerance(False), case.tolerance(True)
    # Losses and norms are sums over many elements in double, whose errors largely cancel, so the
    # tolerance is a few roundings.
    found = {
        "loss": difference(dump.loss[step], other[2], reference[2], 4 * U),
        "loss by forward_loss()": difference(dump.evaluated[step], other[1], reference[1], 4 * U),
        "gradient norm": difference(dump.norm[step], other[3], reference[3], 4 * U),
    }
    if step == 0:
        found["logits"] = difference(dump.logits, other[0], reference[0], forward)
    ours = dump.state("grads", step + 1)
    for name, array in reference[4].items():
        theirs = other[4][name] if with_torch32 else None
        found["grad " + name] = difference(ours[name], theirs, array, backward)
    return found


def check_gradients(report, dump):
    for step in (0, dump.case.steps - 1):
        report.head(f"1. {dump.case.shape} V {dump.case.V} B {dump.case.micros} x {dump.case.B} "
                    f"T {dump.case.T}: step {step + 1} from our weights")
        report.lines(gradient_differences(dump, step, dump.state("weights", step)))


def check_that_weights_matter(report, dump):
    """Changes one element of each tensor in turn by 1e-3 on their side."""
    case = dump.case
    for name, (theirs, _) in NAMES.items():
        weights = {n: array.copy() for n, array in dump.state("weights", 0).items()}
        array = weights[theirs.format(case.L - 1)]
        # A row used by the batch; a query's bias (a key's has no effect mathematically).
        row = dump.tokens[0, 0, 0, 0, 0] if name == "wte" else 1
        array[(row, 1) if array.ndim == 2 else 1] += 1e-3
        found = gradient_differences(dump, 0, weights, with_torch32=False)
        worst = max(d.used() for d in found.values())
        report.verdict(f"a wrong number in {name} is found", worst > 1, f"{worst:.1f} tolerances")


# --- 2. AdamW alone -------------------------------------------------------------------------------

def optimizer_differences(dump, case, with_torch32=True):
    """Compares after every step with our gradients and the optimizer of `case`: {(step, what,
    name): Difference} of weights and moments, of the norm and the learning rate."""
    trainers = [Trainer(case, hf_model(case, dump.state("weights", 0), dtype))
                for dtype in (torch.float64, torch.float32)[:1 + with_torch32]]
    found = {}
    for step in range(case.steps):
        grads = dump.state("grads", step + 1)
        norm = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
        lr = case.learning_rate(step)
        found[step + 1, "norm", ""] = difference(dump.norm[step], None, norm, U)
        found[step + 1, "learning rate", ""] = difference(dump.lr[step], None, lr, U)
        for trainer in trainers:
            for name, parameter in named(trainer.model).items():
                parameter.grad = torch.tensor(grads[name]).to(parameter.dtype)
            trainer.update(step, norm)
        for what in ("weights", "m", "v"):
            ours, states = dump.state(what, step + 1), [t.state(what) for t in trainers]
            for name, reference in states[0].items():
                # A moment: 16 roundings. A weight: one of its own and 32 per step of the update
                # (1 - beta in fp32 is up to u / (1 - beta) off, the rest are divisions and roots).
                scale, tolerance = np.abs(reference).max(), 16 * U
                if what == "weights":
                    tolerance = (step + 1) * (U * scale + 32 * U * case.lr) / scale
                theirs = states[1][name] if with_torch32 else None
                found[step + 1, what, name] = difference(ours[name], theirs, reference, tolerance)
    return found


def check_optimizer(report, dump):
    """Prints the worst tensor of every kind and step."""
    case, worst = dump.case, {}
    for (step, what, name), d in optimizer_differences(dump, case).items():
        if (step, what) not in worst or not d.used() <= worst[step, what][1].used():
            worst[step, what] = name, d
    report.head(f"2. {case.shape}: {case.steps} steps of AdamW on our gradients, decay "
                f"{case.decay}, norms {dump.norm.min():.1f} to {dump.norm.max():.1f} clipped to "
                f"{case.clip}; the worst tensor")
    for (step, what), (name, d) in worst.items():
        report.line(f"{what} {step} {name}", d)


def check_that_the_optimizer_matters(report, dump):
    wrong = {"beta1": 0.9001, "beta2": 0.9501, "eps": 1e-6, "decay": 0.101, "vector_decay": 1e-3,
             "clip": 0.501, "lr": 3.001e-3, "final_lr": 0.101, "warmup": 1}
    for name, value in wrong.items():
        case = copy.copy(dump.case)
        setattr(case, name, value)
        worst = max(d.used() for d in optimizer_differences(dump, case, False).values())
        report.verdict(f"a wrong {name} is found", worst > 1, f"{worst:.1f} tolerances")


# --- 3. Training ----------------------------------------------------------------------------------

def check_training(report, dump):
    """Each side uses its own gradients. AdamW divides a gradient by its magnitude: if that is not
    larger than its error, the step is noise; for a key's bias, whose gradient is mathematically 0,
    it is nothing else. So in the first step a weight may differ by what the tolerated error d of
    the gradient g explains, lr * 2 d / (|g| + eps), at most by two whole steps in opposite
    directions. Later gradients differ because the weights do; there the measure is PyTorch in
    float32, which has the same noise."""
    case = dump.case
    sides = [Trainer(case, hf_model(case, dump.state("weights", 0), dtype))
             for dtype in (torch.float64, torch.float32)]
    report.head(f"3. {case.shape}: every side on its own gradients, {case.steps} steps")
    for step in range(case.steps):
        results = [gradients(side.model, dump.tokens[step]) for side in sides]
        for side, (_, norm) in zip(sides, results):
            side.update(step, norm)
        (loss, _), (loss32, _) = results
        report.line(f"loss {step + 1}", difference(dump.loss[step], loss32, loss, 16 * U))
        reference, theirs = (side.state("weights") for side in sides)
        ours, lr = dump.state("weights", step + 1), case.learning_rate(step)
        if step == 0:
            report.lines(first_step(case, sides[0].model, ours, theirs, reference))
        far = {}
        for name, side in (("ours", ours), ("torch", theirs)):
            errors = [(side[n] - reference[n]).ravel() for n in reference if "c_attn.bias" not in n]
            far[name] = np.sqrt((np.concatenate(errors) ** 2).mean()) / lr
        report.line(f"weights {step + 1}, rms, in learning rates",
                    Difference(far["ours"] * lr, far["ours"], far["torch"], 4 * far["torch"]))


def first_step(case, model, ours, theirs, reference):
    """{name: Difference} of the weights after the first step, as a share of the allowed error; the
    model's gradients are those of the step, clipped."""
    found, lr = {}, case.learning_rate(0)
    large = total = 0
    for name, parameter in named(model).items():
        g = np.abs(parameter.grad.numpy())
        share = np.minimum(2 * case.tolerance(True) * g.max() / (g + case.eps), 2)
        bound = lr * (share + 32 * U) + U * np.abs(reference[name])
        away = np.abs(ours[name] - reference[name])
        away32 = np.abs(theirs[name] - reference[name])
        found[name] = Difference(away.max(), (away / bound).max(), (away32 / bound).max(), 1.0)
        large += (share < 0.02).sum()
        total += g.size
    print(f"weights after step 1 relative to what may be; that is less than 2 % of the learning "
          f"rate for {100 * large / total:.1f} % of them")
    return found


# --- 4. Folders -----------------------------------------------------------------------------------

FOLDER_CASE = Case(L=3, NH=3, C=72, maxT=37, V=257, B=3, T=29, micros=1, schedule="cosine",
                   steps=20)


def write_shard(path, tokens):
    """Writes byte tokens as a shard of version 1."""
    header = np.zeros(256, np.int32)
    header[:5] = 20240520, 1, tokens.size, 257, 1
    path.write_bytes(header.tobytes() + tokens.astype(np.uint16).tobytes())


def shard_batch(case, tokens, step):
    """Batch `step` (from 0) of a shard in file order (--shuffle 0)."""
    first = step * case.B * case.T
    n = case.B * case.T
    shape = case.B, case.T
    return tokens[first:first + n].reshape(shape), tokens[first + 1:first + n + 1].reshape(shape)


def train(case, model, shard, output, **changed):
    """Runs train_gpt2 on a folder; returns the lines of its log and its last checkpoint."""
    case = copy.copy(case)
    for name, value in changed.items():
        setattr(case, name, value)
    run(ROOT / "train_gpt2", "-e", model, "-i", shard, "-j", shard, "-v", case.steps, "-m", 1,
        "--shuffle", 0, "-o", output, *case.options())
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return lines, output / f"step-{case.steps:08d}"


def save_variants(model, folder):
    """Folders as transformers or its users may create them: {name: (folder, weights)}."""
    found = {}
    for name, dtype in (("F32", torch.float32), ("BF16", torch.bfloat16), ("F16", torch.float16)):
        typed = copy.deepcopy(model).to(dtype)
        typed.save_pretrained(folder / name)
        found[name] = folder / name, arrays({n: p.float() for n, p in named(typed).items()})
    f32 = arrays(named(model))
    model.transformer.save_pretrained(folder / "no-prefix")
    found["F32 without prefix"] = folder / "no-prefix", f32
    everything = {f"transformer.{name}": p.detach().clone() for name, p in named(model).items()}
    everything["lm_head.weight"] = everything["transformer.wte.weight"].clone()
    T = model.config.n_positions
    for layer in range(model.config.n_layer):
        mask = torch.tril(torch.ones(T, T)).view(1, 1, T, T)
        everything[f"transformer.h.{layer}.attn.bias"] = mask
        everything[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    model.config.save_pretrained(folder / "everything")
    safetensors.torch.save_file(everything, folder / "everything/model.safetensors",
                                metadata={"format": "pt"})
    found["F32 with head and masks"] = folder / "everything", f32
    return found


def reload(report, folder, case):
    """Loads our checkpoint by from_pretrained: no missing and no unexpected tensors."""
    model, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True,
                                                  attn_implementation="eager")
    left = {key: value for key, value in info.items() if value}
    report.verdict("keys missing or left over", not left, str(left)[:40] if left else "none")
    wanted = hf_config(case).to_dict()
    wrong = {key: getattr(model.config, key) for key in
             ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "activation_function",
              "layer_norm_epsilon", "resid_pdrop", "embd_pdrop", "attn_pdrop",
              "tie_word_embeddings") if getattr(model.config, key) != wanted[key]}
    report.verdict("config.json", not wrong, str(wrong) if wrong else "as a GPT2Config")
    tied = model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
    report.verdict("the classifier is wte", tied and model.dtype == torch.float32, str(model.dtype))
    return model.eval()


def check_folders(report, folder):
    case = FOLDER_CASE
    rng = np.random.default_rng(3)
    vocabulary = rng.choice(case.V, 40, replace=False)  # so that something can be learned
    tokens = rng.choice(vocabulary, case.steps * case.B * case.T + 1).astype(np.int32)
    shard = folder / "tokens.bin"
    write_shard(shard, tokens)
    torch.manual_seed(1)
    model = GPT2LMHeadModel(hf_config(case)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * case.weight_std + (p.ndim == 1 and bool(p.mean() == 1)))
    variants = save_variants(model, folder)
    report.head("4. Loaded by us: loss of a batch, and weights that come out as they went in")
    for name, (path, weights) in variants.items():
        lines, saved = train(case, path, shard, folder / f"out {name}", steps=1, lr=0, warmup=0)
        losses = []
        for dtype in (torch.float64, torch.float32):
            with torch.no_grad():
                reference = hf_model(case, weights, dtype)
                losses.append(batch_loss(reference, *shard_batch(case, tokens, 0))[1].item())
        loss = lines[1]["loss"]
        report.line(f"{name}: loss", difference(loss, losses[1], losses[0], 4 * U))
        again = safetensors.torch.load_file(saved / "model.safetensors")
        again = {n.removeprefix("transformer."): t.float().numpy() for n, t in again.items()}
        again.pop("lm_head.weight", None)
        same = again.keys() == weights.keys() and all(
            np.array_equal(again[n], weights[n]) for n in weights)
        report.verdict(f"{name}: weights", same, "every bit equal" if same else "differ")
    weights["h.1.mlp.c_fc.weight"][1, 1] += 1e-2  # of the last variant, on their side
    with torch.no_grad():
        reference = hf_model(case, weights, torch.float64)
        wrong = batch_loss(reference, *shard_batch(case, tokens, 0))[1].item()
    worst = difference(loss, None, wrong, 4 * U).used()
    report.verdict("a wrong number in a folder is found", worst > 1, f"{worst:.1f} tolerances")
    report.head(f"4. {case.steps} steps of train_gpt2 from that folder and in PyTorch")
    lines, saved = train(case, variants["F32"][0], shard, folder / "trained")
    ours = [line["loss"] for line in lines if "loss" in line]
    sides = [Trainer(case, hf_model(case, variants["F32"][1], dtype))
             for dtype in (torch.float64, torch.float32)]
    for step in range(case.steps):
        losses = []
        for side in sides:
            loss, norm = gradients(side.model, [shard_batch(case, tokens, step)])
            side.update(step, norm)
            losses.append(loss)
        d = difference(ours[step], losses[1], losses[0], 16 * U)
        report.line(f"step {step + 1:2} {ours[step]:.7f} {losses[0]:.7f}", d)
    report.head("4. Our checkpoint loaded by transformers")
    loaded = reload(report, saved, case)
    batch = shard_batch(case, tokens, 0)
    with torch.no_grad():
        logits32, loss32 = batch_loss(loaded, *batch)
        logits, loss = batch_loss(loaded.double(), *batch)
    numbers = folder / "again"
    numbers.mkdir()
    np.array(batch, np.int32).tofile(numbers / "tokens.bin")
    run(ROOT / "build/dump", numbers, 0, "-e", saved, "-b", case.B, "-t", case.T, "-x", 1)
    ours = np.fromfile(numbers / "logits.bin", np.float32).reshape(logits.shape)
    report.line("logits", difference(ours, logits32, logits, case.tolerance(False)))
    validation = [line["val_loss"] for line in lines if "val_loss" in line][-1]
    report.line("validation loss", difference(validation, loss32, loss, 4 * U))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--only", type=int, choices=(1, 2, 3, 4), help="one of the comparisons")
    only = parser.parse_args().only
    print(f"PyTorch {torch.__version__}, transformers {transformers.__version__}, "
          f"safetensors {safetensors.__version__}, numpy {np.__version__}")
    transformers.utils.logging.disable_progress_bar()
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        for case in CASES if only != 4 else []:
            dump = Dump(case, Path(scratch) / case.shape, seed=case.V)
            if only in (None, 1):
                check_gradients(report, dump)
                check_that_weights_matter(report, dump)
            if only in (None, 2):
                check_optimizer(report, dump)
                check_that_the_optimizer_matters(report, dump)
            if only in (None, 3):
                check_training(report, dump)
        if only in (None, 4):
            check_folders(report, Path(scratch))
    print(f"\n{report.passed} passed, {report.failed} failed")
    return report.failed > 0


if __name__ == "__main__":
    sys.exit(main())
