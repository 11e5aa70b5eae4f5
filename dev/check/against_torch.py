#!/usr/bin/env python3
"""Compares the CPU program with GPT-2 in Hugging Face transformers: make check_torch PYTHON=...

    python3 -m venv build/venv
    build/venv/bin/pip install numpy safetensors torch transformers
    make check_torch PYTHON=build/venv/bin/python

Needs no network and no GPU: models come from a GPT2Config, with random weights and tokens.
Makes three comparisons with small models of odd shapes:

1. Loss, gradient norm and every gradient, from the same weights and tokens.
2. The optimizers alone: torch.optim.AdamW on our gradients, with our schedule, global-norm clipping
   and decay on matrices only, compared by weights and moments after every step. Then 20 steps of
   torch.optim.Muon on the blocks' matrices, with c_attn split into three, and with torch's
   iteration both in float64 and in its own bfloat16.
3. Folders: transformers loads our checkpoint, and we load what transformers saves.

Our numbers are read from checkpoints, one per step. To get a gradient, a run of one step starts
from a checkpoint with --beta1 0 --clip 0; its first moment is then the gradient itself.

The reference is PyTorch in float64. Each line shows our largest difference from it, relative to the
tensor's largest number, the tolerance, and the share of it that is used. Tolerances follow from
u = 2^-24, the relative error of one rounding, and are documented where they are computed. Finally,
comparisons are repeated with a wrong weight or setting, which they must detect. `curve TEXT
PICTURE` instead trains both on the bytes of a text and draws the losses (with matplotlib).

The last line is `N passed, N failed`; the exit status is 1 if any failed.
"""
import copy, dataclasses, json, math, os, subprocess, sys, tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import safetensors.numpy, safetensors.torch, torch, transformers
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

ROOT = Path(__file__).resolve().parents[2]
U = 2.0 ** -24

V = 257     # the vocabulary of bytes

# Our order of tensors, by transformers' names, with sizes in units of C; matrices are (out, in),
# while transformers stores (in, out). The vectors of all blocks are one bucket.
MATRICES = {"attn.c_attn.weight": (3, 1), "attn.c_proj.weight": (1, 1), "mlp.c_fc.weight": (4, 1),
            "mlp.c_proj.weight": (1, 4)}
VECTORS = {"ln_1.weight": 1, "ln_1.bias": 1, "attn.c_attn.bias": 3, "attn.c_proj.bias": 1,
           "ln_2.weight": 1, "ln_2.bias": 1, "mlp.c_fc.bias": 4, "mlp.c_proj.bias": 1}


@dataclass
class Case:
    """A model, its batches and its optimizer."""
    L: int
    NH: int
    C: int
    maxT: int
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
    optimizer: str = "adamw"
    momentum: float = 0.95
    thirds: int = 3  # number of matrices that c_attn is split into

    @property
    def weight_std(self):
        """Gives queries and keys a standard deviation of 1.3 at any width: attention is neither
        nearly uniform nor concentrated on one token, which would amplify rounding errors."""
        return 1.3 / math.sqrt(self.C)

    @property
    def shape(self):
        return f"l{self.L}h{self.NH}c{self.C}t{self.maxT}"

    def options(self):
        """Options of our program, except the model."""
        options = {"-b": self.B, "-t": self.T, "-d": self.B * self.T * self.micros,
                   "-x": self.steps, "-l": self.lr, "-u": self.warmup, "-q": self.final_lr,
                   "-k": self.schedule, "-c": self.decay, "--beta1": self.beta1,
                   "--beta2": self.beta2, "--eps": self.eps, "--clip": self.clip,
                   "--optimizer": self.optimizer, "--momentum": self.momentum}
        return [word for pair in options.items() for word in pair]

    def step_tokens(self):
        return self.micros * self.B * self.T

    def learning_rate(self, step):
        """Learning rate of step `step`, from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        t = (step - self.warmup) / (self.steps - self.warmup)
        fall = {"cosine": 0.5 * (1 + math.cos(math.pi * t)), "linear": 1 - t}[self.schedule]
        return self.lr * (self.final_lr + (1 - self.final_lr) * fall)

    def tolerance(self):
        """Tolerance relative to a tensor's largest number. A number is the result of a chain of
        sums: n consecutive roundings with practically random errors add up to about sqrt(n) u.
        This is doubled, because it must bound the largest error of all elements."""
        block = 2 * self.C + 7 * self.C + self.C // self.NH + self.T  # norms, matmuls, attention
        n = self.L * block + 2 * self.C
        n = 2 * n + V + self.B * self.T * self.micros  # backward, the head's sum, a weight's sum
        return 2 * U * math.sqrt(n)


CASES = [
    Case(L=3, NH=3, C=72, maxT=37, B=3, T=29, micros=1, schedule="cosine"),
    Case(L=2, NH=5, C=80, maxT=24, B=2, T=24, micros=2, schedule="linear"),
    Case(L=2, NH=5, C=320, maxT=140, B=2, T=131, micros=1, schedule="cosine"),
]


class Report:
    """Prints comparisons and counts the results."""

    def __init__(self):
        self.passed = self.failed = 0

    def check(self, name, ok, numbers=""):
        self.passed += bool(ok)
        self.failed += not ok
        print(f"{name:34} {numbers:26}  {'ok' if ok else 'FAILED'}", flush=True)

    def lines(self, title, differences):
        """Prints the worst difference of each kind of tensor, or of each name before a colon."""
        print(f"\n{title}\n{'':34} {'rel':>8} {'tol':>8}  used")
        worst = {}
        for name, (away, tolerance) in differences.items():
            kind = ".".join("*" if part.isdigit() else part
                            for part in name.split(":")[0].split("."))
            worst.setdefault(kind, []).append((away / tolerance, away, tolerance))
        for kind, rows in worst.items():
            used, away, tolerance = max(rows, key=lambda row: math.inf if row[0] != row[0]
                                        else row[0])
            self.check(kind, used <= 1, f"{away:8.1e} {tolerance:8.1e} {100 * used:4.0f} %")

    def detects(self, what, differences):
        worst = max(away / tolerance for away, tolerance in differences.values())
        self.check(f"a wrong {what} is found", worst > 1, f"{worst:.1f} tolerances")


def difference(ours, reference, tolerance):
    """The largest relative difference of arrays or numbers, and its tolerance. NaN always fails."""
    ours, reference = np.asarray(ours, np.float64), np.asarray(reference, np.float64)
    if ours.shape != reference.shape:
        raise SystemExit(f"shapes differ: {ours.shape}, {reference.shape}")
    return np.abs(ours - reference).max() / (np.abs(reference).max() + 1e-300), tolerance


# --- Our side -------------------------------------------------------------------------------------

def bucket_tensors(case, buckets):
    """{name: array} of the state in these buckets, with transformers' names and layout."""
    found, C = {}, case.C

    def take(bucket, at, name, shape):
        values = buckets[bucket][at:at + math.prod(shape)].reshape(shape)
        found[name] = values.T if name.split(".", 2)[-1] in MATRICES else values
        return at + (math.prod(shape) + 63) // 64 * 64    # tensors begin at multiples of 64

    take(1, 0, "wte.weight", (V, C))
    take(2, 0, "wpe.weight", (case.maxT, C))
    vector = 0
    for layer in range(case.L):
        at = 0
        for name, (rows, cols) in MATRICES.items():
            at = take(3 + layer, at, f"h.{layer}.{name}", (rows * C, cols * C))
        for name, size in VECTORS.items():
            vector = take(0, vector, f"h.{layer}.{name}", (size * C,))
    for name in ("ln_f.weight", "ln_f.bias"):
        vector = take(0, vector, name, (C,))
    return found


class Trained:
    """A run of `case` from random weights on random tokens, and its numbers after every step."""

    def __init__(self, case, folder):
        self.case, self.folder = case, folder
        rng = np.random.default_rng(case.C)
        torch.manual_seed(case.C)
        model = GPT2LMHeadModel(hf_config(case))
        with torch.no_grad():
            for name, p in named(model).items():
                ones = "ln_" in name and "weight" in name
                p.copy_(torch.tensor(rng.normal(ones, case.weight_std, p.shape)))
        model.save_pretrained(folder / "start")
        self.start = arrays(named(model))
        self.tokens = rng.integers(0, V, case.steps * case.step_tokens() + 1, dtype=np.int32)
        self.log = train(case, folder / "start", self.tokens, folder / "run", "-n", 1)
        steps = [line for line in self.log if "loss" in line]
        self.loss, self.norm, self.lr = ([line[key] for line in steps]
                                         for key in ("loss", "grad_norm", "lr"))
        self.gradients = []
        for step in range(case.steps):
            n = case.step_tokens()
            train(dataclasses.replace(case, beta1=0, clip=0, steps=1, warmup=0, optimizer="adamw"),
                  self.model(step), self.tokens[step * n:(step + 1) * n + 1],
                  folder / f"grad-{step}")
            self.gradients.append(self.moments("m", folder / f"grad-{step}/step-00000001"))

    def model(self, step):
        """The folder of the weights after `step` steps."""
        return self.folder / (f"run/step-{step:08d}" if step else "start")

    def batches(self, step):
        """Inputs and targets of every micro-batch of a step, from 0, in file order."""
        case, n = self.case, self.case.step_tokens()
        shape = case.micros, case.B, case.T
        first = step * n
        return list(zip(self.tokens[first:first + n].reshape(shape),
                        self.tokens[first + 1:first + n + 1].reshape(shape)))

    def moments(self, what, folder):
        state = safetensors.numpy.load_file(folder / "state-0-of-1.safetensors")
        pieces = {}
        for name, values in state.items():
            if name.startswith(what + "."):
                _, bucket, first = name.split(".")
                pieces.setdefault(int(bucket), []).append((int(first), values))
        return bucket_tensors(self.case, {
            bucket: np.concatenate([values for _, values in sorted(rows, key=lambda row: row[0])])
            for bucket, rows in pieces.items()})

    def state(self, what, step):
        """weights, m or v after `step` steps: {name: array}."""
        return (load_weights(self.model(step)) if what == "weights" else
                self.moments(what, self.model(step)))


def load_weights(folder):
    found = safetensors.torch.load_file(folder / "model.safetensors")
    found = {n.removeprefix("transformer."): t.float().numpy() for n, t in found.items()}
    found.pop("lm_head.weight", None)
    return found


def train(case, model, tokens, output, *more):
    """Runs train_gpt2 from a folder; returns the lines of its log."""
    header = np.zeros(256, np.int32)
    header[:5] = 20240520, 1, tokens.size, V, 1
    shard = output.with_suffix(".bin")
    shard.write_bytes(header.tobytes() + tokens.astype(np.uint16).tobytes())
    words = [ROOT / "train_gpt2", "-e", model, "-i", shard, "-j", shard, "-v", case.steps, "-m", 1,
             "--shuffle", 0, "-o", output, *case.options(), *more]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


# --- Their side -----------------------------------------------------------------------------------

def hf_config(case):
    return GPT2Config(vocab_size=V, n_positions=case.maxT, n_embd=case.C, n_layer=case.L,
                      n_head=case.NH, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
                      bos_token_id=0, eos_token_id=0, attn_implementation="eager")


def hf_model(case, weights, dtype=torch.float64):
    model = GPT2LMHeadModel(hf_config(case)).to(dtype)
    with torch.no_grad():
        for name, parameter in named(model).items():
            parameter.copy_(torch.tensor(weights[name]))
    return model


def named(model):
    """Parameters by name; wte, which is also the classifier, only once."""
    return dict(model.transformer.named_parameters())


def arrays(tensors):
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors.items()}


def batch_loss(model, inputs, targets):
    """The mean loss. The model's own loss is not used, because targets are already shifted."""
    logits = model(torch.tensor(inputs).long()).logits
    return cross_entropy(logits.flatten(0, 1), torch.tensor(targets).long().flatten())


def gradients(model, batches):
    """Mean loss and norm of one step's micro-batches; the gradients stay in the model."""
    model.zero_grad()
    total = 0
    for inputs, targets in batches:
        loss = batch_loss(model, inputs, targets) / len(batches)
        loss.backward()
        total += loss.item()
    return total, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


class Trainer:
    """torch.optim.AdamW and torch.optim.Muon with our run's settings. Clipping is done here,
    because clip_grad_norm_ adds 1e-6 to the norm, which exceeds a rounding error."""

    def __init__(self, case, model):
        self.case, self.model = case, model
        muon = [p for n, p in named(model).items()
                if case.optimizer == "muon" and n.split(".", 2)[-1] in MATRICES]
        # Muon's matrices are copies: it keeps one momentum for each, and c_attn consists of three.
        self.parts = [(p, i, part.clone()) for p in muon for i, part in enumerate(
            p.detach().chunk(case.thirds if p.shape[1] == 3 * case.C else 1, dim=1))]
        self.muon = torch.optim.Muon([part for _, _, part in self.parts], lr=1.0,
                                     weight_decay=case.decay, momentum=case.momentum,
                                     adjust_lr_fn="match_rms_adamw") if muon else None
        matrices = [p for p in model.parameters()
                    if p.ndim == 2 and all(p is not m for m in muon)]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": case.decay},
                  {"params": vectors, "weight_decay": case.vector_decay}]
        self.adamw = torch.optim.AdamW(groups, lr=1.0, betas=(case.beta1, case.beta2), eps=case.eps)

    def update(self, step, norm):
        for parameter in self.model.parameters():
            parameter.grad *= min(1.0, self.case.clip / norm)
        optimizers = [self.adamw] + [self.muon] * bool(self.muon)
        for part_of, i, part in self.parts:
            part.grad = part_of.grad[:, i * part.shape[1]:][:, :part.shape[1]].clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.case.learning_rate(step)
            optimizer.step()
        with torch.no_grad():
            for part_of, i, part in self.parts:
                part_of[:, i * part.shape[1]:][:, :part.shape[1]] = part

    def state(self, what):
        """weights, m or v."""
        if what == "weights":
            return arrays(named(self.model))
        key = {"m": "exp_avg", "v": "exp_avg_sq"}[what]
        return arrays({n: self.adamw.state[p][key] for n, p in named(self.model).items()})


# --- 1. Gradients ---------------------------------------------------------------------------------

def gradient_differences(ours, step, weights):
    """Repeats a step (from 0) from `weights`; {name: difference} of loss, norm and gradients."""
    model = hf_model(ours.case, weights)
    loss, norm = gradients(model, ours.batches(step))
    # Losses and norms are sums in double, in which errors largely cancel: a few roundings.
    found = {"loss": difference(ours.loss[step], loss, 4 * U),
             "gradient norm": difference(ours.norm[step], norm, 4 * U)}
    for name, parameter in named(model).items():
        found["grad " + name] = difference(ours.gradients[step][name], parameter.grad.numpy(),
                                           ours.case.tolerance())
    return found


def check_gradients(report, ours):
    case, start = ours.case, ours.state("weights", 0)
    for step in (0, case.steps - 1):
        report.lines(f"1. {case.shape} B {case.micros} x {case.B} T {case.T}: step {step + 1} from "
                     "our weights", gradient_differences(ours, step, ours.state("weights", step)))
    for name in [n for n in start if "h." not in n or f"h.{case.L - 1}." in n]:
        weights = {n: array.copy() for n, array in start.items()}
        # A row used by the batch; a query's bias (a key's has no effect mathematically).
        row = ours.tokens[0] if name == "wte.weight" else 1
        weights[name][(row, 1) if weights[name].ndim == 2 else 1] += 1e-3
        report.detects(f"number in {name}", gradient_differences(ours, 0, weights))


# --- 2. AdamW alone -------------------------------------------------------------------------------

def optimizer_differences(ours, case):
    """Applies the optimizer of `case` to our gradients; returns, by step and name, the differences
    in weights, moments, norm and learning rate."""
    trainer, found = Trainer(case, hf_model(case, ours.state("weights", 0))), {}
    for step in range(case.steps):
        grads, n = ours.gradients[step], step + 1
        norm = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
        found[f"norm of step {n}"] = difference(ours.norm[step], norm, U)
        found[f"learning rate of step {n}"] = difference(ours.lr[step], case.learning_rate(step), U)
        for name, parameter in named(trainer.model).items():
            parameter.grad = torch.tensor(grads[name]).double()
        trainer.update(step, norm)
        for what in ("weights", "m", "v"):
            values = ours.state(what, n)
            for name, reference in trainer.state(what).items():
                # Tolerance of a moment: 16 roundings; of a weight, per step: its own and 32 of the
                # update (1 - beta in fp32: up to u / (1 - beta); the rest: divisions and roots).
                scale, tolerance = np.abs(reference).max(), 16 * U
                if what == "weights":
                    tolerance = n * (U * scale + 32 * U * case.lr) / scale
                found[f"{what} {n}: {name}"] = difference(values[name], reference, tolerance)
    return found


def muon_differences(ours, case, exact):
    """Compares the weights after all steps of Muon and AdamW on our gradients: {name: difference
    relative to the change of the weights}. exact: run torch's iteration in float64."""
    real = torch.optim._muon._zeropower_via_newtonschulz

    def iterate(grad, coefficients, steps, eps):
        a, b, c = coefficients
        x = grad.T if grad.shape[0] > grad.shape[1] else grad
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            s = x @ x.T
            x = a * x + (b * s + c * s @ s) @ x
        return x.T if grad.shape[0] > grad.shape[1] else x

    start = ours.state("weights", 0)
    trainer = Trainer(case, hf_model(case, start))
    torch.optim._muon._zeropower_via_newtonschulz = iterate if exact else real
    for step in range(case.steps):
        for name, parameter in named(trainer.model).items():
            parameter.grad = torch.tensor(ours.gradients[step][name]).double()
        trainer.update(step, ours.norm[step])
    torch.optim._muon._zeropower_via_newtonschulz = real
    end, found = ours.state("weights", case.steps), {}
    for name, reference in trainer.state("weights").items():
        change = np.linalg.norm(reference - start[name])
        found[name] = np.linalg.norm(end[name] - reference) / change, 1e-3 if exact else 3e-2
    return found


def check_muon(report, folder):
    case = dataclasses.replace(CASES[0], steps=20, optimizer="muon")
    folder.mkdir()
    ours = Trained(case, folder)
    for exact, name in (True, "float64"), (False, "bfloat16"):
        report.lines(f"2. {case.shape}: {case.steps} steps of Muon on our gradients, torch's "
                     f"iteration in {name}", muon_differences(ours, case, exact))
    for name, value in {"momentum": 0.951, "decay": 0.11, "lr": 3.01e-3, "thirds": 1}.items():
        report.detects(name, muon_differences(ours, dataclasses.replace(case, **{name: value}),
                                              True))


def check_optimizer(report, ours):
    case = ours.case
    report.lines(f"2. {case.shape}: {case.steps} steps of AdamW on our gradients, decay "
                 f"{case.decay}, norms {min(ours.norm):.1f} to {max(ours.norm):.1f} clipped to "
                 f"{case.clip}", optimizer_differences(ours, case))
    wrong = {"beta1": 0.9001, "beta2": 0.9501, "eps": 1e-6, "decay": 0.101, "vector_decay": 1e-3,
             "clip": 0.501, "lr": 3.001e-3, "final_lr": 0.101, "warmup": 1}
    for name, value in wrong.items():
        report.detects(name, optimizer_differences(ours, dataclasses.replace(
            case, **{name: value})))


# --- 3. Folders -----------------------------------------------------------------------------------

def save_variants(model, folder):
    """Folders as transformers saves them: {name: (folder, weights)}."""
    found = {}
    for name, dtype in (("F32", torch.float32), ("BF16", torch.bfloat16), ("F16", torch.float16)):
        typed = copy.deepcopy(model).to(dtype)
        typed.save_pretrained(folder / name)
        found[name] = folder / name, arrays({n: p.float() for n, p in named(typed).items()})
    return found


def reload(report, folder, case):
    """Loads our checkpoint with from_pretrained; no tensor may be missing or unexpected."""
    model, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True,
                                                  attn_implementation="eager")
    left = {key: value for key, value in info.items() if value}
    report.check("keys missing or left over", not left, str(left)[:40] if left else "none")
    wanted = hf_config(case).to_dict()
    wrong = {key: getattr(model.config, key) for key in
             ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "activation_function",
              "layer_norm_epsilon", "resid_pdrop", "embd_pdrop", "attn_pdrop",
              "tie_word_embeddings") if getattr(model.config, key) != wanted[key]}
    report.check("config.json", not wrong, str(wrong) if wrong else "as a GPT2Config")
    tied = model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
    report.check("the classifier is wte", tied and model.dtype == torch.float32, str(model.dtype))
    return model.eval()


def check_folders(report, ours, folder):
    case, tokens = ours.case, ours.tokens
    variants = save_variants(hf_model(case, ours.start, torch.float32).eval(), folder)
    found = {}
    for name, (path, weights) in variants.items():
        one = dataclasses.replace(case, steps=1, lr=0, warmup=0)
        output = folder / f"out {name}"
        loss = train(one, path, tokens, output)[1]["loss"]
        reference = gradients(hf_model(case, weights), ours.batches(0))[0]
        found[f"{name}, loss"] = difference(loss, reference, 4 * U)
        again = load_weights(output / "step-00000001")
        same = again.keys() == weights.keys() and all(
            np.array_equal(again[n], weights[n]) for n in weights)
        report.check(f"{name}: weights", same, "every bit equal" if same else "differ")
    loaded = reload(report, ours.model(case.steps), case)
    with torch.no_grad():
        loss = batch_loss(loaded.double(), *ours.batches(0)[0])
    validation = [line["val_loss"] for line in ours.log if "val_loss" in line][-1]
    found["our checkpoint, validation"] = difference(validation, loss, 4 * U)
    report.lines("3. Folders: loss of a batch", found)


# --- A loss curve ---------------------------------------------------------------------------------

def curve(text, picture, folder):
    """Trains both from the same random weights on the same batches, PyTorch also in float64; draws
    the losses and their differences from float64."""
    from matplotlib import pyplot as plt
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "0", "font.size": 9})
    case = Case(L=4, NH=4, C=128, maxT=64, B=12, T=64, micros=1, schedule="cosine", steps=1000,
                beta2=0.99, clip=1.0, warmup=100)
    torch.manual_seed(1)
    start = GPT2LMHeadModel(hf_config(case))
    start.save_pretrained(folder / "start")
    tokens = np.frombuffer(Path(text).read_bytes(), np.uint8).astype(np.int32)
    tokens = tokens[:case.steps * case.step_tokens() + 1]
    log = train(case, folder / "start", tokens, folder / "run")
    losses = {"train_gpt2, fp32": [line["loss"] for line in log if "loss" in line]}
    shape = case.steps, 1, case.B, case.T
    for name, dtype in ("PyTorch, fp32", torch.float32), ("PyTorch, float64", torch.float64):
        model, losses[name] = copy.deepcopy(start).to(dtype), []
        trainer = Trainer(case, model)
        for step, (x, y) in enumerate(zip(tokens[:-1].reshape(shape), tokens[1:].reshape(shape))):
            loss, norm = gradients(model, list(zip(x, y)))
            trainer.update(step, norm)
            losses[name].append(loss)
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), layout="constrained")
    for (name, values), width, color in zip(losses.items(), (0.7, 2, 4), ("#06c", "#c60", "#ccc")):
        away = np.abs(np.subtract(values, losses["PyTorch, float64"]))
        print(f"{name:17} last loss {values[-1]:.4f}, largest difference from float64 in 100 steps "
              f"{away[:100].max():.1e}, in all {away.max():.1e}, mean {away.mean():.1e}")
        for axis, y in zip(axes, (values, away)):
            axis.plot(y, color=color, linewidth=width, zorder=-width, label=name)
    axes[0].set(xlabel="step", ylabel="loss")
    axes[0].legend(frameon=False)
    axes[1].set(xlabel="step", ylabel="difference from float64", yscale="log")
    figure.savefig(picture, metadata={"Date": None})


def main():
    print(f"PyTorch {torch.__version__}, transformers {transformers.__version__}, "
          f"safetensors {safetensors.__version__}, numpy {np.__version__}")
    transformers.utils.logging.disable_progress_bar()
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        if sys.argv[1:2] == ["curve"]:
            return curve(*sys.argv[2:], Path(scratch))
        check_muon(report, Path(scratch) / "muon")
        for case in CASES:
            folder = Path(scratch) / case.shape
            folder.mkdir()
            ours = Trained(case, folder)
            check_gradients(report, ours)
            check_optimizer(report, ours)
            if case.micros == 1:
                check_folders(report, ours, folder)
    print(f"\n{report.passed} passed, {report.failed} failed")
    return report.failed > 0


if __name__ == "__main__":
    sys.exit(main())
