"""Compares the kernels' machine code with budgets, because speed itself cannot be tested without a
GPU. Needs nvcc and, for instructions, nvdisasm (named by NVDISASM, on the PATH, or from PyPI's
package nvidia-cuda-nvdisasm, which contains nothing else); without them the tests are skipped.

    /usr/bin/python3 -m pytest dev/test/test_sass.py      all tests
    /usr/bin/python3 dev/test/test_sass.py WORD           the figures of the instances with WORD

A row of BUDGETS allows a compiled kernel at most `regs` registers and no spills; at least `blocks`
blocks must fit an SM when it is launched with these threads and dynamic shared bytes. instr/elem:
the most instructions allowed per element of a thread, in the whole kernel or, with L, in its
longest loop; each instruction counts as one, however long it takes. sN: at least N stores of 16
bytes. For kernels with wgmma, hN: the loop has exactly N wgmma instructions; oN: at least N
exponentials between the wait for all but one group of these and the next wait for all; the lanes of
a warp must not diverge in the loop.

Limits are those of the GPU that needs most: adamw with bf16 moments has a loop of 963 instructions
on sm_80, 969 on sm_89 and 978 on sm_90a, from the same source.

Budgets were recorded with nvcc RECORDED. For another release the limits are wider: they detect a
kernel that spills or no longer fills its SM, but not a few more registers."""

import math, os, pathlib, re, shutil, subprocess, sys
from collections import namedtuple

import pytest

TOP = pathlib.Path(__file__).resolve().parents[2]
RECORDED = "release 13.0,"
# Maximum threads, KiB of shared memory and blocks per SM; shared bytes per block that the system
# uses. Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
Gpu = namedtuple("Gpu", "threads shared_kib blocks system")
GPUS = {"80": Gpu(2048, 164, 32, 1024), "89": Gpu(1536, 100, 24, 1024),
        "90a": Gpu(2048, 228, 32, 1024), "75": Gpu(1024, 64, 16, 0),
        "120": Gpu(1536, 100, 24, 1024)}

# Kernels that access optimizer states, weights and gradients, which may be in host memory: each
# access of a warp covers whole lines, so no thread accesses an array at a stride of 16 bytes.
HOST_KERNELS = {name + "_kernel" for name in (
    "adamw", "muon_moment", "muon_apply", "grad_square_sum", "rank_add")}

# A row applies to the instances whose template arguments begin with `arguments`; each kernel has at
# least one row, but an instance may have none. sm: its GPUs; -: all but 75, which has no bf16.
BUDGETS = """
kernel                      arguments          sm     threads shared regs blocks instr/elem more
partials_add                                   -         1024   4096   38      1
embedding_forward           bf16               80,89,90a   256      0   24      6
embedding_forward           bf16               120         256      0   28      6
embedding_backward_position  bf16              -          256      0   40      6
embedding_backward_token    bf16               -          256   8192   40      6
layernorm_forward           bf16,0             -          256      0   64      4
layernorm_forward           bf16,768           -          256      0   48      5 13.2/24
layernorm_forward           bf16,1024          -          256      0   63      4 12.2/32
layernorm_forward           bf16,1280          -          256      0   64      4 11.3/40
layernorm_forward           bf16,1600          -          256      0   77      3 12.5/50
layernorm_forward           fp16,768           75         256      0   64      4 13.9/24
layernorm_backward          bf16,0             -          384  12288   64      2
layernorm_backward          bf16,768           -          384  12288   80      2 30.4/16L
layernorm_backward          bf16,1024          -          384  12288   80      2 30.7/16L
layernorm_backward          bf16,1280          -          320  10240   80      2 31.4/16L
layernorm_backward          bf16,1600          -          224      0   80      3 32.4/16L
layernorm_backward          fp16,768           75         384  12288   80      2 30.2/16L
gelu_forward                bf16               -          256      0   32      6 11.2/16
gelu_forward                fp16               75         256      0   32      4 11.8/16
bias_backward               bf16,true          -          256   8192   72      3 20.9/32L
bias_backward               fp16,true          75         256   8192   72      3 21.5/32L
attention_forward           bf16,64,true,false 89         128  49152  219      2 12.8/64L   s4
attention_forward           bf16,64,true,false 120         128  49152  226      2 13/64L     s1
attention_forward           bf16,64,true,false 80,90a     128  49152  168      3            s4
attention_forward           bf16,64,true,true  90a        256  65536  111      2 11.5/32L   h8 s4
attention_forward           bf16,64,false      80,89,90a   128  49152  226      2
attention_forward           bf16,64,false      120         128  49152  230      2
attention_forward           bf16,128           80,89,90a   128  81920  184      1 21.1/32L
attention_forward           bf16,128           120         128  81920  221      1 21.8/32L
attention_forward           fp16,64            75         128  24576  116      2 23.2/16L
attention_forward           fp16,128           75         128  32768  146      2 45.4/8L
attention_forward_rows                         -          128   1536   56      9
attention_backward_dq       bf16,64,true,false 80,89,90a   128  49152  233      2 13.8/32L   s1
attention_backward_dq       bf16,64,true,false 120         128  49152  228      2 14.6/32L   s1
attention_backward_dq       bf16,64,false      80,89,90a   128  49152  231      2 13.8/32L
attention_backward_dq       bf16,64,false      120         128  49152  230      2 14.7/32L
attention_backward_dq       bf16,64,true,true  90a      256  65536  122      2 10.6/32L   h12 o32 s1
attention_backward_dq       bf16,128           80,89,90a   128  98304  231      1 21.1/32L
attention_backward_dq       bf16,128           120         128  98304  245      1 23.4/32L
attention_backward_dq       fp16,64            75         128  32768  150      2 22.4/16L
attention_backward_dq       fp16,128           75         128  65536  188      1 33/16L
attention_backward_dkv      bf16,64,true,false 80,89,90a   128  50176  252      2 16.8/32L   s2
attention_backward_dkv      bf16,64,true,false 120         128  50176  255      2 18.1/32L   s2
attention_backward_dkv      bf16,64,false      80,89,90a   128  50176  255      2 17/32L
attention_backward_dkv      bf16,64,false      120         128  50176  255      2 18.3/32L
attention_backward_dkv      bf16,64,true,true  90a      128  50176  168      3 12.5/32L   h16 o32 s2
attention_backward_dkv      bf16,128           80,89,90a   128  66560  247      1 31.5/16L
attention_backward_dkv      bf16,128           120         128  66560  222      1 37.2/16L
attention_backward_dkv      fp16,64            75         128  25600  128      2 35.5/8L
attention_backward_dkv      fp16,128           75         128  50176  232      1 51.2/8L
attention_backward_rows                        -          128   3072   78      6
classifier                  bf16,true          -          800      0   64      1 21.1/64
classifier                  bf16,false         -          800      0   64      1 15/64
classifier                  fp16,true          75         800      0   64      1 21.9/64
classifier                  fp16,false         75         800      0   64      1 15.1/64
fp8                                            89,90a,120 256      0   48      5 9.2/64   s5
fp8_largest                                    -          256      0   24      6 3/8L
grad_square_sum             bf16               -          256      0   31      6
update_decide                                  -            1      0   24     24
adamw                       bf16,bf16,float    -          256      0   54      4 109.8/4L   s2
adamw                       bf16,bf16,bf16     80,89,90a  256      0   64      4 122.3/8L   s3
adamw                       bf16,bf16,bf16     120        256      0   73      3 121.3/8L   s3
muon_moment                 bf16,float,bf16    -          256      0   40      6
muon_normalize              bf16               -          256      0   40      6
muon_apply                  bf16,bf16,true     -          256      0   40      6
rank_add                    bf16               -        256      0   24      6            s1
sum                                            80,89,90a   256      0   33      6
sum                                            120         256      0   38      6
has_wgmma                                      -            1      0   16     24
step_status                                    -            1      0   16     24
step_statuses                                  80,89,90a     1      0   32     24
step_statuses                                  120           1      0   40     24
"""

Budget = namedtuple("Budget", "kernel arguments sm threads shared regs blocks each elements loop "
                              "hgmma overlap stores")


def budget_read(line):
    words = line.split()
    more = {}
    while re.fullmatch(r"[hos]\d+", words[-1]):
        word = words.pop()
        more[word[0]] = int(word[1:])
    each = re.fullmatch(r"([\d.]+)/(\d+)(L?)", words[-1])
    words = words[:-1] if each else words
    numbers = [int(word) for word in words[-4:]]
    sm = words[-5].split(",") if words[-5] != "-" else ["80", "89", "90a", "120"]
    return Budget(words[0] + "_kernel", words[1] if len(words) == 7 else "", sm, *numbers,
                  *((float(each[1]), int(each[2]), each[3] == "L") if each else (0, 0, False)),
                  *(more.get(letter, 0) for letter in "hos"))


BUDGET_ROWS = [budget_read(line) for line in BUDGETS.strip().split("\n")[1:]]


class Compiled:
    """An instance of a kernel: figures of ptxas, then of its instructions if it is disassembled."""

    def __init__(self):
        self.kernel = self.arguments = ""
        self.regs = self.spills = self.shared = self.whole = self.loop = 0
        self.hgmma = self.overlap = self.stores = 0
        self.diverges = self.halves = False

    def name(self, plain):
        """Takes name and arguments from "void gelu_forward_kernel<__nv_bfloat16>(...)"."""
        plain = re.sub(r"^void ", "", plain.replace("(bool)1", "true").replace("(bool)0", "false"))
        for long, short in ((" ", ""), ("(int)", ""), ("__nv_bfloat16", "bf16"),
                            ("__half", "fp16")):
            plain = plain.replace(long, short)
        self.kernel, _, rest = plain.partition("(")[0].partition("<")
        self.arguments = rest[:-1]

    def __str__(self):
        return "%s<%s>  regs %d spills %d shared %d instr %d loop %d hgmma %d stores %d" % (
            self.kernel, self.arguments, self.regs, self.spills, self.shared, self.whole, self.loop,
            self.hgmma, self.stores)


def log_read(log):
    """Reads the output of ptxas -v: a kernel's name, its spills, its registers."""
    kernels, now = {}, None
    for line in log.split("\n"):
        name = re.search("Compiling entry function '([^']*)'", line)
        spills = re.search(r"(\d+) bytes spill stores, (\d+)", line)
        used = re.search(r"Used (\d+) registers", line)
        if name:
            now = kernels.setdefault(name[1], Compiled())
        elif now and spills:
            now.spills = max(int(spills[1]), int(spills[2]))
        elif now and used:
            now.regs = int(used[1])
            now.shared = int(re.search(r"(\d+) bytes smem|$", line)[1] or 0)
            now = None
    plain = subprocess.run(["c++filt"], input="\n".join(kernels), text=True, stdout=subprocess.PIPE,
                           check=True).stdout.split("\n")
    for kernel, name in zip(kernels.values(), plain):
        kernel.name(name)
    return kernels


def code_read(kernel, lines):
    """Counts a kernel's instructions in lines like "/*01a0*/  @P0 BRA `(.L_x_1) ;" and labels.
    Subroutines ("$name:") and the padding after the code are not counted."""
    labels, code, end, at, size = {}, [], 0, 0, 0
    for line in lines:
        if line.endswith(":"):
            if line.startswith("$"):
                break
            labels[line[:-1]] = len(code)
            continue
        if "/*" not in line or " ;" not in line:
            continue
        code.append(line)
        if "EXIT" in line and "@" not in line:
            end = len(code)
        target = re.search(r"BRA.*`\(([^)]*)\)", line)
        start = labels.get(target[1]) if target else None
        if start is None:
            continue
        if start >= len(code) - 1:  # a branch to itself: the padding begins
            code.pop()
            break
        # Not loops: rare paths, such as diverged shuffles, follow EXIT and jump back.
        if start >= end and len(code) - start > size:
            at, size = start, len(code) - start
    loop = code[at:at + size]
    kinds = "".join(next((letter for letter, word in (
        ("H", "HGMMA"), ("E", "MUFU.EX2"), ("1", "DEPBAR.LE gsb0, 0x1"),
        ("0", "DEPBAR.LE gsb0, 0x0"), ("P", "BSSY"), ("P", "WARPSYNC")) if word in line), ".")
        for line in loop)
    waited = re.search("1([^0]*)0", kinds)
    kernel.whole, kernel.loop, kernel.hgmma = len(code), size, kinds.count("H")
    kernel.overlap = waited[1].count("E") if waited else 0
    kernel.diverges = "H" in kinds and "P" in kinds
    kernel.stores = sum("STG.E.128" in line for line in code)
    accessed = {(found[1], int(found[2] or "0", 16)) for found in (
        re.search(r"(?:LDG|STG)\.E\.128.*\[(R[^]+]*(?:\+UR\d+)?)\+?(-?0x[0-9a-f]+)?\]", line)
        for line in code) if found}
    kernel.halves = any((base, at + 16) in accessed for base, at in accessed)


def sass_read(kernels, sass):
    for part in re.split(r"^\.text\.", sass, flags=re.M)[1:]:
        name, _, lines = part.partition(":\n")
        if name in kernels:
            code_read(kernels[name], [line.rstrip() for line in lines.split("\n")
                                      if line.rstrip() != name + ":"])


def blocks_per_sm(gpu, kernel, budget):
    """Warps get registers in units of 256; each quarter of the SM holds whole warps."""
    warps = math.ceil(budget.threads / 32)
    by_regs = 65536 // 4 // max(math.ceil(kernel.regs * 32 / 256) * 256, 1) * 4 // warps
    shared = max(1, math.ceil((kernel.shared + budget.shared + gpu.system) / 128) * 128)
    return min(gpu.blocks, gpu.threads // (warps * 32), by_regs, gpu.shared_kib * 1024 // shared)


def named_by(kernel, budget):
    return kernel.kernel == budget.kernel and (kernel.arguments + ",").startswith(
        budget.arguments + "," if budget.arguments else "")


def widened(budget):
    """Limits for another release: ptxas 12.0 needs at most 10 % more registers, 3 % more
    instructions and 8 spilled bytes, and as many blocks fit."""
    return budget._replace(regs=min(255, budget.regs * 5 // 4), each=budget.each * 1.25, overlap=0,
                           blocks=max(1, budget.blocks * 3 // 4))


def faults(gpu, kernel, budget, recorded):
    """Returns how an instance exceeds its budget."""
    b = budget if recorded else widened(budget)
    count = kernel.loop if b.loop else kernel.whole
    blocks = blocks_per_sm(gpu, kernel, b)
    limits = [("registers", kernel.regs <= b.regs), ("%d blocks" % blocks, blocks >= b.blocks),
              ("spills", kernel.spills <= (0 if recorded else 64))]
    if kernel.whole:
        each = count / b.elements if b.elements else 0
        limits += [("%.2f instructions for each element" % each,
                     not b.elements or 0 < each <= b.each + 0.05),
                   ("stores", kernel.stores >= b.stores)]
        if b.hgmma:
            limits += [("wgmma instructions", kernel.hgmma == b.hgmma), ("lanes may diverge",
                       not kernel.diverges), ("overlap", kernel.overlap >= b.overlap)]
    return ["%s: %s" % (kernel, name) for name, good in limits if not good]


# --- Compiled kernels -----------------------------------------------------------------------------

def disassembler():
    installed = [path for folder in sys.path
                 for path in pathlib.Path(folder).glob("nvidia/cu*/bin/nvdisasm")]
    return (os.environ.get("NVDISASM") or shutil.which("nvdisasm")
            or shutil.which("nvdisasm", path="/usr/local/cuda/bin") or (installed or [None])[0])


def compiled(arch):
    """Returns the log of the kernels' compilation for a GPU, and the kernels."""
    log = TOP / "build" / ("sm_%s.log" % arch)
    made = subprocess.run(["make", "-s", str(log.relative_to(TOP))], cwd=TOP, text=True,
                          stderr=subprocess.PIPE)
    if made.returncode:
        pytest.skip("nvcc does not compile for sm_" + arch if shutil.which("nvcc") else "no nvcc")
    kernels = log_read(log.read_text())
    if disassembler():
        sass_read(kernels, subprocess.run([disassembler(), "-c", str(log) + ".cubin"], text=True,
                                          stdout=subprocess.PIPE, check=True).stdout)
    return log.read_text(), kernels


@pytest.mark.parametrize("arch", ["80", "90a", pytest.param("89", marks=pytest.mark.all),
                                  pytest.param("75", marks=pytest.mark.all),
                                  pytest.param("120", marks=pytest.mark.all)])
def test_budgets(arch):
    log, kernels = compiled(arch)
    wrong, rows = [], [b for b in BUDGET_ROWS if arch in b.sm]
    for b in rows:
        instances = [kernel for kernel in kernels.values() if named_by(kernel, b)]
        wrong += ["no %s<%s>" % (b.kernel, b.arguments)] if not instances else []
        for kernel in instances:
            wrong += faults(GPUS[arch], kernel, b, RECORDED in log)
    names = {kernel.kernel for kernel in kernels.values()}
    wrong += ["half lines: %s" % kernel for kernel in kernels.values()
              if kernel.kernel in HOST_KERNELS and kernel.halves]
    wrong += ["no budget: " + name for name in names - {b.kernel for b in BUDGET_ROWS}]
    assert not wrong and len(rows) > 10, "\n".join(wrong)
    assert "(C75" not in log, "ptxas serializes wgmma instructions"
    if not disassembler():
        pytest.skip("instructions: no nvdisasm")


@pytest.mark.all
def test_compiles():
    assert compiled("100")[1]


def test_approximations():
    """Only ex2_approx and rcp_approx are used: their errors are documented, and the emulator has
    CPU versions. Others are no faster and give bits that depend on the GPU."""
    other = r'__expf\(|__exp10f\(|__logf\(|__log2f\(|__powf\(|__fdividef\(|__tanhf\(|rsqrtf\(' \
            r'|__frsqrt_rn\(|(?<!"ex2)(?<!"rcp)\.approx\.'
    lines = (TOP / "train_gpt2.cu").read_text().split("\n")
    assert not [line for line in lines if re.search(other, line) and line[:2] != "//"
                and "// source" not in line]


# --- Faults that must be seen ---------------------------------------------------------------------
# A kernel of eleven instructions, eight of them in a loop and one after EXIT.

FAKE = budget_read("f bf16 80 256 0 32 8 4/2L h1 o1 s1")
FAKE_LOG = """Cuda compilation tools, release 13.0, V1
ptxas info : Compiling entry function '_Z8f_kernelI13__nv_bfloat16EvPT_' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info : Used 32 registers, used 0 barriers, 64 bytes smem
"""
FAKE_SASS = """.text._Z8f_kernelI13__nv_bfloat16EvPT_:
 /*0000*/ MOV R1, c[0x0][0x28] ;
.L_x_1:
 /*0008*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
 /*0009*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
 /*000a*/ MUFU.EX2 R1, R1 ;
 /*000b*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
 /*0010*/ FMUL R0, R0, R0 ;
 /*0020*/ CALL.REL.NOINC `($__internal_0) ;
 /*0030*/ STG.E.128 [R0], R0 ;
 /*0040*/ @P0 BRA `(.L_x_1) ;
.L_x_3:
 /*0050*/ EXIT ;
.L_x_4:
 /*0058*/ BRA `(.L_x_1) ;
$__internal_0:
 /*0060*/ FADD R0, R0, R0 ;
.L_x_2:
 /*0070*/ BRA `(.L_x_2);
"""


def fake_is_good(old, new, budget=FAKE, release="13.0"):
    """Whether the kernel stays within its budget after a replacement in log or code."""
    assert old in FAKE_LOG + FAKE_SASS
    log = FAKE_LOG.replace("release 13.0", "release " + release).replace(old, new, 1)
    kernels = log_read(log)
    sass_read(kernels, FAKE_SASS.replace(old, new, 1))
    return all(named_by(kernel, budget) and not faults(GPUS["80"], kernel, budget, RECORDED in log)
               for kernel in kernels.values())


@pytest.mark.parametrize("old, new", [
    ("0 bytes spill loads", "8 bytes spill loads"), ("Used 32", "Used 33"),
    (" 64 bytes smem", " 40000 bytes smem"), ("@P0 BRA `(.L_x_1)", "FADD"),
    ("FMUL R0, R0, R0 ;\n", "MUFU.RCP R0, R0 ;\n /*0018*/ FMUL R0, R0, R0 ;\n"),
    ("HGMMA", "FADD"), ("MUFU.EX2", "MUFU.RCP"), ("gsb0, 0x1", "gsb0, 0x0"),
    ("FMUL R0, R0, R0", "BSSY B0, `(.L_x_3)"), ("STG.E.128", "STG.E")])
def test_fault_is_seen(old, new):
    assert fake_is_good(old, old) and not fake_is_good(old, new)


@pytest.mark.parametrize("access, halves", [
    ("STG.E.128 [R4+0x10]", True), ("LDG.E.128.SYS R8, [R4+-0x10]", True),
    ("LDG.E.128 R8, [R4+0x1000]", False), ("STG.E.64 [R4+0x10]", False),
    ("LDG.E.128 R8, desc[UR4][R4.64+0x10]", False), ("LDG.E.128 R8, [R6+0x10]", False)])
def test_half_lines(access, halves):
    kernel = Compiled()
    code_read(kernel, [" /*0000*/ STG.E.128 [R4] ;", " /*0008*/ @P0 %s ;" % access])
    assert kernel.halves == halves


@pytest.mark.parametrize("change", [{"blocks": 9}, {"loop": False}, {"arguments": "fp16"}])
def test_budget_is_compared(change):
    assert not fake_is_good("FMUL", "FMUL", FAKE._replace(**change))


@pytest.mark.parametrize("old, new, good", [
    ("Used 32", "Used 40", True), ("CALL", "FADD R1 ;\n /*0024*/ CALL", True),
    ("Used 32", "Used 41", False), ("0 bytes spill loads", "72 bytes spill loads", False)])
def test_other_release(old, new, good):
    assert fake_is_good(old, new, release="12.0") == good


if __name__ == "__main__":
    for word, gpu in ((word, gpu) for word in sys.argv[1:] for gpu in GPUS):
        for instance in compiled(gpu)[1].values():
            if word in str(instance):
                print("sm_%-3s  %s" % (gpu, instance))
