#!/usr/bin/env python3
"""Interrupts runs in every way a machine can, and checks that nothing that was saved is lost.

    dev/check/faults.py kill [COUNT]     SIGKILL at random moments, several times in a row, to all
                                         processes of a run or to one of its ranks
    dev/check/faults.py power [COUNT]    power loss: data written but not synced may be missing
    dev/check/faults.py calls            each system call on the run's files fails once with each of
                                         its errors, or is the last one before SIGKILL
    dev/check/faults.py gpu [COUNT]      calls of CUDA, cuBLASLt and NCCL fail once, on the emulated
                                         device: each function and line once if COUNT allows it

Options: --seed N draws other moments and settings; --program PATH tests only that program; --jobs N
runs N at once (default 2). `kill` and `power` draw settings for `train_gpt2` and, if it is built,
`train_gpt2cu_cpu` with 1 to 4 ranks, ZeRO stages 0 to 3, with and without offload. `power` and
`calls` need strace.

After each fault the same command must resume, from the last step reported as saved or a later one,
and end with the bytes of an undisturbed run; a run that sees a fault must end with status 1 and one
line. Prints a line per violation, then `N <what was tried>, K violations`. The exit status is 1 if
K is not 0, if nothing was tried, or if 100 or more kills missed one of the PARTS of a run. Files
are written only to a temporary folder.
"""
import argparse, collections, concurrent.futures, glob, hashlib, os, random, re, shutil, signal
import subprocess, sys, tempfile, time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RUN = ("-i t_train.bin -e l2h2c16t16 -b 1 -d 192 -x 9 -v 0 -s 4 -g 3 --tune 0 -y 1 -o out").split()
PARTS = ("starting", "training", "writing a checkpoint", "removing a checkpoint", "resuming")
violations = []
tally = collections.Counter()    # kills by the part of a run they hit


def settings(programs):
    """Every command that may be drawn."""
    every = []
    for program in programs:
        kept = [["-n", str(n), "--keep", str(keep)] for n in (1, 2) for keep in (1, 2)]
        if "cu" not in os.path.basename(program):
            extra = [[], ["--offload", "moments,residuals"], ["-r", "block"]]
        else:
            extra = [["--dtype", "bf16"], ["--dtype", "fp32", "--offload", "weights,gradients"]]
            for ranks in (2, 3, 4):
                for z in range(4):
                    line = ["--gpus", str(ranks), "-z", str(z), "--dtype", "bf16"]
                    extra += [line, line + ["--offload", "moments,master,residuals"]]
        every += [[program] + RUN + some + more for some in kept for more in extra]
    return every


def saved_step(text):
    steps = re.findall(r"^saved out/step-(\d+)", text, re.M)
    return int(steps[-1]) if steps else 0


def digest(folder):
    """SHA-256 of each file except the log and the lock, which differ between runs."""
    found = {}
    for path, _, names in os.walk(folder):
        for name in names:
            if name not in ("log.jsonl", "lock"):
                file = os.path.join(path, name)
                with open(file, "rb") as f:
                    found[os.path.relpath(file, folder)] = hashlib.sha256(f.read()).hexdigest()
    return found


def violation(what, command, why):
    violations.append(what)
    print(f"{what}: {why}: {' '.join(command)}", flush=True)


class Place:
    """A folder to run in, with the data that all runs share."""

    def __init__(self, work, name):
        self.path, self.out = os.path.join(work, name), os.path.join(work, name, "out")
        os.mkdir(self.path)
        for name in "t_train.bin", "t_val.bin":
            os.symlink(os.path.join(work, name), os.path.join(self.path, name))
        self.env = dict(os.environ, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive",
                        XDG_CACHE_HOME=os.path.join(work, "cache"))

    def run(self, command, before=()):
        return subprocess.run([*before, *command], cwd=self.path, env=self.env, encoding="latin-1",
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=600)

    def must_run(self, command, before=()):
        done = self.run(command, before)
        if done.returncode:
            sys.exit(f"faults.py: {' '.join(command)}: {done.stderr.strip()[:500]}")

    def ends_as(self, whole, command, what, saved):
        """Resumes, from step `saved` or later, and compares with the undisturbed run."""
        done = self.run(command)
        resumed = re.search(r"^resumed from out/step-(\d+)", done.stdout, re.M)
        if done.returncode:
            violation(what, command, f"the next run: {done.stderr.strip()[:300]}")
        elif digest(self.out) != whole:
            violation(what, command, "the next run ends with different bytes")
        elif saved and int(resumed[1] if resumed else 0) < saved and saved < 9:
            violation(what, command, f"step {saved} was saved but is lost")


def undisturbed(work, command, known={}):
    """Digest and seconds of a command's run without faults, computed once."""
    key = tuple(command)
    if key not in known:
        place = Place(work, f"whole{len(known)}-{random.random()}")
        began = time.monotonic()
        place.must_run(command)
        known[key] = digest(place.out), time.monotonic() - began
        shutil.rmtree(place.path)
    return known[key]


# --- SIGKILL --------------------------------------------------------------------------------------

def kill_moment(out, process, seconds, draw):
    """Waits for a random time, or until a checkpoint is being written or removed."""
    if draw.random() < 0.5:    # often before the first step, as when a run resumes
        return time.sleep(draw.uniform(0, seconds * draw.choice((0.1, 0.3, 0.9))))
    seen, wanted, end = set(glob.glob(out + "/*.tmp")), draw.randint(1, 6), time.time() + seconds
    wanted += len(seen)
    while len(seen) < wanted and time.time() < end and process.poll() is None:
        seen.update(glob.glob(out + "/*.tmp"))
        time.sleep(0.0003)
    time.sleep(draw.uniform(0, 0.004))


def kill_place(out, stdout):
    """Returns what a run was doing when killed, judging by its folder and output."""
    steps = [int(path[-8:]) for path in glob.glob(out + "/step-" + "[0-9]" * 8)]
    unfinished = [int(path[-12:-4]) for path in glob.glob(out + "/*.tmp")]
    if any(step < max(steps, default=0) for step in unfinished):
        return "removing a checkpoint"
    if unfinished:
        return "writing a checkpoint"
    if re.search(r"^step +\d+/", stdout, re.M):
        return "training"
    return "resuming" if steps else "starting"


def kill_case(work, number, command, draw):
    """Kills a run several times in a row, then lets it finish. Returns the number of kills."""
    whole, seconds = undisturbed(work, command)
    place, kills, saved = Place(work, f"kill{number}"), 0, 0
    for attempt in range(draw.randint(1, 5)):
        process = subprocess.Popen(command, cwd=place.path, env=place.env, encoding="latin-1",
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   start_new_session=True)
        kill_moment(place.out, process, seconds, draw)
        try:
            with open(f"/proc/{process.pid}/task/{process.pid}/children") as f:
                ranks = [int(word) for word in f.read().split()]
            if ranks and draw.random() < 0.5:
                os.kill(draw.choice(ranks), signal.SIGKILL)
            else:
                os.killpg(process.pid, signal.SIGKILL)
        except OSError:    # it has ended
            pass
        stdout, stderr = process.communicate(timeout=300)
        if process.returncode == 0:
            break    # it ended before the signal
        kills += 1
        tally["while " + kill_place(place.out, stdout)] += 1
        saved = max(saved, saved_step(stdout))
    place.ends_as(whole, command, f"kill {number}", saved)
    shutil.rmtree(place.path)
    return kills


# --- Power loss -----------------------------------------------------------------------------------

class File:
    def __init__(self):
        self.live, self.durable, self.writes = bytearray(), bytearray(), []

    def write(self, data):
        self.writes.append((len(self.live), data))
        self.live += data

    def truncate(self, size):
        self.live[size:] = bytes(max(0, size - len(self.live)))
        self.writes.append((size, None))

    def sync(self):
        self.durable, self.writes = bytearray(self.live), []

    def after_loss(self, draw):
        """The durable bytes, plus those of later writes that the disk happened to keep."""
        data = bytearray(self.durable)
        kept = draw.choice(("none", "all", "first", "any"))
        first = draw.randint(0, len(self.writes))
        for i, (at, new) in enumerate(self.writes):
            if kept == "none" or kept == "first" and i >= first or \
                    kept == "any" and draw.random() < 0.5:
                continue
            if new is None:
                data[at:] = bytes(max(0, at - len(data)))
                continue
            if kept == "any":
                new = new[:draw.randint(0, len(new))]
            data[len(data):at] = bytes(max(0, at - len(data)))
            data[at:at + len(new)] = new
        return bytes(data)


class Folder:
    def __init__(self):
        self.live, self.durable = {}, {}


class Disk:
    """Files below a folder as the program sees them, and what would survive a power loss."""

    def __init__(self, root):
        self.root, self.top, self.pending = os.path.realpath(root), Folder(), []

    def find(self, path):
        """The folder that holds path and its name in it; None for files elsewhere."""
        path = os.path.normpath(os.path.join(self.root, path))
        if not path.startswith(self.root + "/"):
            return None, None
        *above, name = os.path.relpath(path, self.root).split("/")
        folder = self.top
        for part in above:
            folder = folder.live.get(part)
            if not isinstance(folder, Folder):
                return None, None
        return folder, name

    def get(self, path):
        if os.path.normpath(path) == self.root:
            return self.top
        folder, name = self.find(path)
        return folder.live.get(name) if folder else None

    def entry(self, *changes):
        """Applies a list of changes (folder, name, node or None) atomically."""
        self.apply(changes, "live")
        self.pending.append(changes)

    @staticmethod
    def apply(changes, state):
        for folder, name, node in changes:
            names = getattr(folder, state)
            names.pop(name, None)
            if node:
                names[name] = node

    def sync(self, node):
        if isinstance(node, File):
            node.sync()
        elif node:
            for changes in [c for c in self.pending if any(f is node for f, _, _ in c)]:
                self.apply(changes, "durable")
                self.pending.remove(changes)

    def call(self, name, line, arguments, result):
        """Applies a successful system call, as printed by strace -y -xx. All writes append."""
        paths = [unhex(text) for text in re.findall(r'"((?:\\x[0-9a-f]{2})*)"', arguments)]
        descriptor = re.match(r"\d+<([^<>]*)>", arguments)
        node = self.get(unhex(descriptor[1])) if descriptor else None
        if name == "rename":
            (old, was), (new, becomes) = self.find(paths[0]), self.find(paths[1])
            if old and new:
                self.entry((old, was, None), (new, becomes, old.live[was]))
        elif name in ("openat", "mkdir", "unlink", "rmdir"):
            folder, base = self.find(paths[0])
            known = folder and folder.live.get(base)
            if folder and name == "openat" and not known and "O_CREAT" in arguments:
                self.entry((folder, base, File()))
            elif isinstance(known, File) and "O_TRUNC" in arguments and known.live:
                known.truncate(0)
            elif folder and name != "openat":
                self.entry((folder, base, Folder() if name == "mkdir" else None))
        elif name == "write" and isinstance(node, File):
            node.write(paths[0].encode("latin-1")[:int(result)])
        elif name == "ftruncate" and isinstance(node, File):
            node.truncate(int(arguments.split(",")[1]))
        elif name == "fsync":
            self.sync(node)

    def lose_power(self, draw):
        """Keeps only a random prefix of those name changes that were not synced."""
        for changes in self.pending[:draw.randint(0, len(self.pending))]:
            self.apply(changes, "durable")

    def store(self, path, folder=None, durable=None):
        """Writes a tree to a real folder: the live one, or (durable: a Random) what survived."""
        folder = folder or self.top
        for name, node in (folder.durable if durable else folder.live).items():
            target = os.path.join(path, name)
            if isinstance(node, Folder):
                os.mkdir(target)
                self.store(target, node, durable)
            else:
                with open(target, "wb") as f:
                    f.write(node.after_loss(durable) if durable else node.live)


def unhex(text):
    return re.sub(r"\\x([0-9a-f]{2})", lambda m: chr(int(m[1], 16)), text)


def journal(place, command):
    """Runs a command under strace. Returns its calls in order: name, arguments, result."""
    trace = os.path.join(place.path, "trace")
    place.must_run(command, ["strace", "-f", "-qq", "-y", "-xx", "-s", "100000000", "-o", trace,
                             "-e", "trace=openat,write,ftruncate,fsync,mkdir,rename,unlink,rmdir"])
    calls, begun = [], {}
    with open(trace, encoding="latin-1") as f:
        for line in f:
            pid, line = line.split(None, 1)
            if line.rstrip().endswith("<unfinished ...>"):
                begun[pid] = line.rstrip()[:-len("<unfinished ...>")]
                continue
            resumed = re.match(r"<\.\.\. \w+ resumed>", line)
            if resumed:
                line = begun.pop(pid, "") + line[resumed.end():]
            call = re.match(r"(\w+)\((.*)\) += (.*)$", line, re.S)
            if call and not call[3].startswith(("-1 ", "?")):
                calls.append((call[1], line, call[2], call[3].strip()))
    os.remove(trace)
    return calls


def power_case(work, number, command, draw, losses):
    """Traces one run and cuts the power `losses` times. Returns the number of losses."""
    whole, _ = undisturbed(work, command)
    place = Place(work, f"power{number}")
    calls = journal(place, command)
    disk = Disk(place.path)
    for call in calls:
        disk.call(*call)
    copy = os.path.join(work, f"copy{number}")
    os.mkdir(copy)
    disk.store(copy)
    found, expected = digest(os.path.join(copy, "out")), digest(place.out)
    if found != expected:
        differ = sorted(dict(found.items() ^ expected.items()))
        sys.exit(f"faults.py: the calls of {' '.join(command)} do not explain {differ}")
    shutil.rmtree(copy)
    inside = [i for i, call in enumerate(calls) if place.path in unhex(call[1])]
    for _ in range(losses):
        cut = draw.randint(inside[0], len(calls))
        disk, said = Disk(place.path), ""
        for name, line, arguments, result in calls[:cut]:
            if name == "write" and arguments.startswith("1<"):
                said += "".join(unhex(text) for text in re.findall(r'"([^"]*)"', arguments))
            disk.call(name, line, arguments, result)
        disk.lose_power(draw)
        shutil.rmtree(place.out, ignore_errors=True)
        disk.store(place.path, durable=draw)
        place.ends_as(whole, command, f"power loss {number} after call {cut}", saved_step(said))
    shutil.rmtree(place.path)
    return losses


# --- Failing calls --------------------------------------------------------------------------------

WAYS = {
    "write": "ENOSPC EIO EINTR EDQUOT", "read": "EIO EINTR ESTALE", "fsync": "EIO ENOSPC EDQUOT",
    "open": "EIO EINTR ENOMEM EMFILE ESTALE", "rename": "ENOSPC EIO EDQUOT", "rmdir": "EIO",
    "mkdir": "ENOSPC EDQUOT", "unlink": "EIO EBUSY", "truncate": "EIO", "ftruncate": "EIO EINTR",
    "lseek": "EIO", "fstat": "EIO ESTALE", "stat": "EIO ESTALE", "mmap": "ENOMEM EIO",
    "getdents64": "EIO ESTALE", "fcntl": "ENOLCK EIO",
}
ALIKE = {"openat": "open", "pread64": "read", "readv": "read", "writev": "write",
         "pwrite64": "write", "unlinkat": "unlink", "newfstatat": "stat", "fdatasync": "fsync",
         "renameat2": "rename", "renameat": "rename", "mkdirat": "mkdir"}


def calls_case(work, command, pool):
    """Injects faults into each call on the run's files, in a new run and in one that resumes."""
    cases, command = [], command + ["--keep", "2"]
    whole, _ = undisturbed(work, command)
    names = ",".join("?" + name for name in [*WAYS, *ALIKE])
    for begin in ("start", "resume"):
        place = Place(work, "calls-" + begin)
        kept = None
        if begin == "resume":
            nine = command.index("-x") + 1
            place.run(command[:nine] + ["5"] + command[nine + 1:])
            kept = place.out + ".kept"
            shutil.copytree(place.out, kept, symlinks=True)
        trace = os.path.join(place.path, "trace")
        place.run(command, ["strace", "-f", "-qq", "-y", "-o", trace, "-e", "trace=" + names])
        count = {}
        with open(trace, errors="replace") as f:
            for line in f:
                call = re.match(r"\d+ +(\w+)\(", line)
                if not call:
                    continue
                name = call[1]
                count[name] = count.get(name, 0) + 1
                line = re.sub(r"AT_FDCWD<[^>]*>", "", line)
                if place.path in line or re.search(r'"(out|t_train)', line):
                    for way in ["signal=KILL"] + \
                            ["error=" + e for e in WAYS[ALIKE.get(name, name)].split()]:
                        cases.append(pool.submit(call_fails, work, len(cases), command, whole, kept,
                                                 begin, name, count[name], way, "/lock>" in line))
        print(f"{len(cases)} faults, including those of '{begin}'", flush=True)
    for case in cases:
        case.result()
    return len(cases)


def call_fails(work, number, command, whole, kept, begin, name, n, way, lock):
    """Makes the n-th call of a function fail, or sends SIGKILL there."""
    place, what = Place(work, f"call{number}"), f"{begin}, {name} {n}, {way}"
    if kept:
        shutil.copytree(kept, place.out, symlinks=True)
    done = place.run(command, ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=" + name,
                               "-e", f"inject={name}:{way}:when={n}"])
    if way == "signal=KILL":
        if done.returncode == 0:
            violation(what, command, "was not killed")
    elif done.returncode == 1:
        if done.stderr.count("\n") != 1:
            violation(what, command, f"said {done.stderr[:300]!r}")
    elif done.returncode != 0:
        violation(what, command, f"status {done.returncode}: {done.stderr[:300]!r}")
    elif not whole.items() <= digest(place.out).items():    # unpruned checkpoints are allowed
        violation(what, command, "succeeded but its checkpoints are wrong")
    elif ALIKE.get(name, name) == "fsync" and not lock:    # the lock's text is informational
        violation(what, command, "succeeded although a sync failed")
    place.ends_as(whole, command, what, saved_step(done.stdout))
    shutil.rmtree(place.path)


# --- Failing CUDA, cuBLASLt and NCCL calls --------------------------------------------------------

GPU_RUN = ("-i t_train.bin -j t_val.bin -e l2h2c16t16 -b 1 -d 64 -n 1 -v 1 -m 1 -s 2 -g 2 "
           "-y 1 -o out --quiet").split()
GPU_KINDS = ["--tune 0 --dtype bf16", "--tune 0 --dtype fp16 --offload residuals,moments",
             "--tune 0 --dtype fp32 --offload weights,gradients -r block", "--tune 1 --dtype bf16"]
TWO_GPUS = "--tune 0 --dtype bf16 --gpus 2 --timeout 30"
GPU_KINDS += [f"{TWO_GPUS} -z {z}" for z in range(4)]
GPU_KINDS += [f"{TWO_GPUS} -z {z} --offload moments,master,residuals" for z in (1, 3)]
# A run may continue, with the same bytes, if one of these calls fails: the search for a GPU, which
# a plan does not need; the query of an attribute unknown to older versions of cuBLASLt; or a
# matmul, for which the next algorithm is tried.
GPU_SURVIVED = ("cudaGetDeviceCount", "cudaDriverGetVersion", "cudaGetDeviceProperties",
                "cublasLtMatmulAlgoCapGetAttribute", "cublasLtMatmul")
# What a message contains instead of the function's name.
GPU_NAMED = {"cudaLaunchKernel": "launch of ", "cudaHostRegister": "cannot pin ",
             "cudaMallocHost": "cannot pin ",
             "cublasLtMatmulAlgoGetHeuristic": "cuBLASLt cannot multiply"}


class GpuKind:
    """A run that resumes from step 1, validates, samples and saves step 2, with its GPU calls."""

    def __init__(self, work, number, program):
        self.command = [program, "-x", "2"] + GPU_RUN + GPU_KINDS[number].split()
        self.number, self.work = number, work
        place = Place(work, f"gpu{number}")
        self.path = place.path
        place.must_run([program, "-x", "1"] + self.command[3:])
        self.first = digest(place.out)
        shutil.copytree(place.out, place.out + ".kept", symlinks=True)
        shutil.rmtree(place.env["XDG_CACHE_HOME"], ignore_errors=True)
        journal = os.path.join(place.path, "calls")
        place.env["EMU_CALLS"] = journal
        place.must_run(self.command)
        self.whole = digest(place.out)
        self.calls = {}    # (process, function, line): number of calls
        with open(journal) as f:
            for line in f:
                call = tuple(line.split())
                self.calls[call] = self.calls.get(call, 0) + 1

    def fail(self, number, call, ordinal):
        """Runs with one failing call. Returns 1 if the run continued."""
        place = Place(self.work, f"gpu{self.number}.{number}")
        shutil.copytree(os.path.join(self.path, "out.kept"), place.out, symlinks=True)
        place.env["EMU_NCCL_HANG"] = "1"    # as on GPUs, a rank waits for one that has exited
        place.env["EMU_FAIL"] = " ".join([*call, str(ordinal)])
        place.env["XDG_CACHE_HOME"] = os.path.join(place.path, "cache")
        what, function = f"EMU_FAIL='{place.env['EMU_FAIL']}'", call[1]
        try:
            done = place.run(self.command)
        except subprocess.TimeoutExpired:
            violation(what, self.command, "hangs")
            return 0
        found, lines = digest(place.out), done.stderr.count("\n")
        named = function in done.stderr or GPU_NAMED.get(function, function) in done.stderr
        if done.returncode == 0:
            if function not in GPU_SURVIVED:
                violation(what, self.command, f"continued: {done.stderr.strip()[:200]!r}")
            if "--tune 1" not in " ".join(self.command) and found != self.whole:
                violation(what, self.command, "continued and saved different bytes")
        elif done.returncode != 1 or lines != 1 or not named:
            violation(what, self.command, f"status {done.returncode}, {done.stderr[:300]!r}")
        if not self.first.items() <= found.items():
            violation(what, self.command, "the previous checkpoint is lost")
        shutil.rmtree(place.path)
        return int(done.returncode == 0)


def gpu_cases(work, program, count, draw, pool):
    """Fails `count` calls: each function and line at least once, if `count` allows."""
    numbers = range(len(GPU_KINDS)) if count >= 50 else draw.sample(range(len(GPU_KINDS)), 2)
    kinds = [GpuKind(work, i, program) for i in numbers]
    every = [(kind, call) for kind in kinds for call in kind.calls]
    draw.shuffle(every)
    seen, first, rest = set(), [], []
    for kind, call in every:
        (rest if call[1:] in seen else first).append((kind, call))
        seen.add(call[1:])
    chosen = (first + rest)[:count]
    cases = [pool.submit(kind.fail, i, call, draw.choice([1, kind.calls[call],
                                                          draw.randint(1, kind.calls[call])]))
             for i, (kind, call) in enumerate(chosen)]
    went_on = sum(case.result() for case in cases)
    print(f"{len(first)} functions and lines, {len(every)} with processes and settings; "
          f"{went_on} runs continued")
    return len(chosen)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["kill", "power", "calls", "gpu"])
    parser.add_argument("count", nargs="?", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--program", action="append")
    given = parser.parse_args()
    if given.what in ("power", "calls") and not shutil.which("strace"):
        sys.exit("faults.py: needs strace")
    programs = given.program or [p for p in ("train_gpt2", "train_gpt2cu_cpu")
                                 if os.path.exists(os.path.join(TOP, p))]
    if not programs:
        sys.exit("faults.py: neither train_gpt2 nor train_gpt2cu_cpu is built; make train_gpt2")
    programs = [os.path.join(TOP, p) for p in programs]
    with tempfile.TemporaryDirectory(prefix="faults.") as work, \
            concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        work = os.path.realpath(work)
        with open(os.path.join(work, "text"), "w") as f:
            f.write("".join(map(str, range(1, 4000))))
        subprocess.run([os.path.join(TOP, "data/tokenize"), "--bytes", "-o", work + "/t",
                        work + "/text"], check=True, stdout=subprocess.DEVNULL)
        every = settings(programs)
        if given.what == "calls":
            tried = calls_case(work, [programs[0]] + RUN + ["-n", "2", "-k", "constant"], pool)
        elif given.what == "gpu":
            tried = gpu_cases(work, programs[-1], given.count, random.Random(given.seed), pool)
        else:
            # The function that runs a case, and about how many faults a case has.
            case, most = (power_case, 12) if given.what == "power" else (kill_case, 2)
            cases = []
            for number in range((given.count + most - 1) // most):
                draw = random.Random(f"{given.seed} {number}")
                faults = (min(most, given.count - number * most),) if most > 2 else ()
                cases.append(pool.submit(case, work, number, draw.choice(every), draw, *faults))
            tried = sum(case.result() for case in cases)
    noun = {"kill": "kills", "power": "power losses", "calls": "faults",
            "gpu": "failing calls"}[given.what]
    for name, number in sorted(tally.items()):
        print(f"{number:6} {name}")
    if given.what == "kill" and given.count >= 100:
        for part in PARTS:
            if not tally["while " + part]:
                violation("kill", [], f"no kill while {part}")
    print(f"seed {given.seed}: {tried} {noun}, {len(violations)} violations")
    return 1 if violations or not tried else 0


if __name__ == "__main__":
    sys.exit(main())
