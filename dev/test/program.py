"""Runs the program under test as a user would, and checks its status and output. Also exports what
most tests import."""

import array, functools, hashlib, itertools, json, math, os, random, re, resource, shutil, signal
import struct, subprocess, sys, tempfile, time
from dataclasses import dataclass
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
TINY = "-i train.bin -e l2h2c16t16 -b 2 "
ALL, FULL = (re.sub("^0$", "", os.environ.get(name, "")) for name in ("ALL", "FULL"))
LIMIT_S = 3600 if FULL else 300  # what takes longer hangs, however busy the machine is
path = None  # of the program under test
cpu_path = None  # of the CPU program
started = []  # processes of the current test; conftest.py ends those that are still running


def has_sanitizers():
    return "asan" in path


def is_emulated():
    return "cu_cpu" in path


@dataclass
class Outcome:
    status: int  # exit status, or minus the signal that ended it
    out: str
    err: str


def words(arguments, under=""):
    """The argv of a command line, split at spaces. `under` is a command that runs the program."""
    return [*under.split(), path, *(word for word in arguments.split(" ") if word)]


def start(arguments, under="", env={}, before=None, **more):
    """Starts the program. A list is used as the argv; `more` are arguments of Popen."""
    argv = words(arguments, under) if isinstance(arguments, str) else arguments
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started.append(subprocess.Popen(argv, env={**os.environ, **env}, preexec_fn=before, text=True,
                                    errors="surrogateescape", **{**pipes, **more}))
    return started[-1]


def run(arguments, stdin=None, **more):
    if stdin is not None:
        more["stdin"] = subprocess.PIPE
    process = start(arguments, **more)
    out, err = process.communicate(stdin, timeout=LIMIT_S)
    return Outcome(process.returncode, out or "", err or "")


def succeeds(arguments, *expected, **more):
    """Expects status 0, an empty stderr, and each of these texts in stdout. Returns stdout."""
    o = run(arguments, **more)
    assert o.status == 0 and o.err == "", o
    for text in expected:
        assert text in o.out
    return o.out


def refused(arguments, expected, status=1, **more):
    """Expects this status, and a single line on stderr that contains `expected`."""
    o = run(arguments, **more)
    assert o.status == status and expected in o.err and o.err.find("\n") == len(o.err) - 1, o
    return o.err


def passes_over(arguments, *skipped):
    """Expects a run that resumed from an older checkpoint and named the newer ones it skipped."""
    o = run(arguments)
    assert o.status == 0 and o.err.count("\n") == len(skipped), o
    for text in skipped:
        assert "train_gpt2: skipped out/" + text in o.err


def on_cpu(arguments):
    """The argv with which the CPU program runs a command line."""
    return [cpu_path, *arguments.split(" ")]


def query(arguments, status=0, **more):
    """The JSON that a command prints."""
    o = run(arguments.rstrip(" ") + " --json", **more)
    assert o.status == status and o.err == "", o
    return json.loads(o.out)


def wait_until(done):
    end = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < end, "not within %d s" % LIMIT_S
        time.sleep(0.001)


def written(path):
    return Path(path).read_text(errors="surrogateescape") if Path(path).exists() else ""


def wait_for(text, path="out/log.jsonl"):
    wait_until(lambda: text in written(path))
    time.sleep(0.01)


def begin(arguments, text="\ndevice ", **more):
    """Starts a run with its stdout in the file `stdout`, and waits until `text` is in it."""
    with open("stdout", "w") as out:
        process = start(arguments, stdout=out, **more)
    wait_for(text, "stdout")
    return process


def stopped(process, number):
    """Sends a signal and waits for the end. Returns status, stdout and stderr."""
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


def script(path, text):
    """Writes an executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def full_disk(size):
    """For `before`: limits the size of files, as a full disk does."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def seconds(duration):
    """The seconds of a duration such as 1:02:03."""
    return sum(int(part) * 60**i for i, part in enumerate(duration.split(":")[::-1]))


def default_signal(number=signal.SIGINT):
    """For `before`: shells start background processes with SIGINT ignored."""
    return lambda: signal.signal(number, signal.SIG_DFL)
