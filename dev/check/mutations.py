#!/usr/bin/env python3
"""Injects the mistakes of mutations.txt, one at a time, and counts those that tests catch.

    dev/check/mutations.py               builds all mutations once, in a copy of the sources, then
                                         runs the tests of each
    dev/check/mutations.py --check       checks that each text occurs exactly once in its file and
                                         each test exists (part of make style); builds nothing
    dev/check/mutations.py --print       prints the mutations with their numbers

Options: --only N,N or --sample N with --seed S (default 1) select mutations; --jobs N runs N tests
at once (default 1); --scratch DIR keeps the copy and rebuilds only changed files. An expression E
becomes (mutant(N) ? NEW : E), where N is selected by the environment variable MUTANT, so each
target is built only once; Python files need `import os`. A test that fails without a mutation is
named and not used. Prints a line per mutation, then `N of M caught`; status 1 if a result differs
from the list or a test is unused.
"""
import argparse, concurrent.futures, os, random, re, subprocess, sys, tempfile

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIST = os.path.join(TOP, "dev/check/mutations.txt")
PYTHON = next((python for python in (sys.executable, "/usr/bin/python3") if subprocess.run(
    [python, "-c", "import pytest"], stderr=subprocess.DEVNULL).returncode == 0), sys.executable)
UNITS = "test_gpt2", "test_gpt2_double", "test_gpt2cu_cpu", "test/data"
ON_GPU = "test_ranks.py", "test_gpu_program.py"
SWITCH = """#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <stdlib.h>
__attribute__((unused)) static int mutant(int n) {
    static int is = -1;
    if (is < 0) {
        const char *text = getenv("MUTANT");
        is = text ? atoi(text) : 0;
    }
    return is == n;
}
"""


class Mutation:
    def __init__(self, number, line, head):
        self.number, self.line, self.old, self.new, self.reason = number, line, "", "", ""
        self.file, _, self.tests = head.partition(": ")

    def pattern(self):
        """A pattern for the text with any white space; group 1 is the expression to replace."""
        before, braces, rest = self.old.partition("{{")
        expression, _, after = rest.partition("}}") if braces else (self.old, "", "")
        before = before if braces else ""
        parts = [r"\s+".join(re.escape(word) for word in part.split())
                 for part in (before, expression, after)]
        gaps = [r"\s*" if before[-1:] in " " else "", r"\s*" if after[:1] in " " else ""]
        return re.compile(f"{parts[0]}{gaps[0]}({parts[1]}){gaps[1]}{parts[2]}")

    def runs(self, broken=()):
        """Yields each test program with the names of its tests that are not broken."""
        for run in self.tests.split("; "):
            program, *names = run.split()
            names = [name for name in names if (program, name) not in broken]
            if names:
                yield program, names


def read_list():
    """Reads mutations: `file: program test test; program test`, text, `-> new`, `! reason`."""
    found = []
    with open(LIST) as f:
        for number, line in enumerate(f, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            if not line.startswith(" "):
                found.append(Mutation(len(found) + 1, number, text))
            elif text.startswith("-> "):
                found[-1].new = text[3:]
            elif text.startswith("! "):
                found[-1].reason = text[2:]
            else:
                found[-1].old = (found[-1].old + " " + text).strip()
    return found


def command(program, names=()):
    """Targets to build, and the command that runs a program's tests: in a unit program, those whose
    names begin with a given name; in a Python file, those whose names or parameters contain it."""
    if program in UNITS:
        return [f"build/{program}"], [f"build/{program}", *names]
    targets = ["train_gpt2", "data/tokenize", "data/stories"]
    return (targets + ["train_gpt2cu_cpu"] * (program in ON_GPU),
            [PYTHON, "-m", "pytest", "-q", f"dev/test/{program}", "-k", " or ".join(names)])


def check(mutations):
    """Returns the messages about entries that do not apply."""
    files, bad = {}, []
    tests = set()  # includes all words of Python files, where a parameter can select a test
    for folder in ("dev/test", "dev/test/unit"):
        for name in os.listdir(os.path.join(TOP, folder)):
            if name.endswith((".cpp", ".h", ".py")):
                with open(os.path.join(TOP, folder, name)) as f:
                    pattern = r"(?:test_)?([a-z]\w+)" if name[-1] == "y" else r"^TEST\((\w+)"
                    tests |= set(re.findall(pattern, f.read(), re.M))
    for m in mutations:
        if m.file not in files:
            with open(os.path.join(TOP, m.file)) as f:
                files[m.file] = f.read()
        times = len(m.pattern().findall(files[m.file]))
        if times != 1:
            bad.append(f"mutations.txt:{m.line}: occurs {times} times in {m.file}: {m.old}")
        if not m.new:
            bad.append(f"mutations.txt:{m.line}: no line '-> NEW'")
        for _, names in m.runs():
            bad += [f"mutations.txt:{m.line}: no test is called {name}" for name in names
                    if name not in tests]
    return bad


def apply(mutations, scratch):
    """Writes the mutated sources into the copy; does not touch files that are unchanged."""
    names = subprocess.run(["git", "ls-files"], cwd=TOP, check=True, stdout=subprocess.PIPE,
                           encoding="utf-8").stdout.split()
    for name in names:
        with open(os.path.join(TOP, name), "rb") as f:
            text = f.read()
        changes = []
        for m in mutations:
            if m.file == name:
                at = m.pattern().search(text.decode())
                new = f"(mutant({m.number}) ? ({m.new}) : ({at[1]}))"
                if name.endswith(".py"):
                    new = f"({m.new} if os.environ.get('MUTANT') == '{m.number}' else {at[1]})"
                changes.append((at.start(1), at.end(1), new))
        if changes:
            whole = text.decode()
            for start, end, new in sorted(changes, reverse=True):
                whole = whole[:start] + new + whole[end:]
            text = whole.encode()
        if name == "data/files.c":
            text = SWITCH.encode() + text
        target = os.path.join(scratch, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.exists(target):
            with open(target, "rb") as f:
                if f.read() == text:
                    continue
        with open(target, "wb") as f:
            f.write(text)
        os.chmod(target, os.stat(os.path.join(TOP, name)).st_mode)


def passes(scratch, program, names, number):
    """Runs tests with a mutation. Returns whether they pass and, if not, the lines saying why."""
    environment = dict(os.environ, MUTANT=str(number), OMP_NUM_THREADS="1",
                       OMP_WAIT_POLICY="passive")
    try:
        done = subprocess.run(command(program, names)[1], cwd=scratch, env=environment,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600,
                              encoding="latin-1")
    except subprocess.TimeoutExpired:
        return False, ["600 s passed"]
    lines = [line.strip() for line in done.stdout.split("\n") if line.strip()]
    failed = [line for line in lines if "FAILED" in line or "timed out" in line]
    return done.returncode == 0, failed or lines[-1:]


def attempt(scratch, m, broken):
    for program, names in m.runs(broken):
        passed, why = passes(scratch, program, names, m.number)
        if not passed:
            return m, f"{program}: {why[0][:120]}"
    return m, None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--scratch")
    given = parser.parse_args()
    every = read_list()
    bad = check(every)
    for line in bad:
        print(line)
    if given.print:
        for m in every:
            print(f"{m.number}  {m.file}: {m.old} -> {m.new}  ({m.tests})")
    if given.check or given.print or bad:
        if given.check:
            print(f"{len(every) - len(bad)} passed, {len(bad)} failed, 0 skipped")
        return 1 if bad else 0
    chosen = [m for m in every if not given.only or str(m.number) in given.only.split(",")]
    if given.sample and given.sample < len(chosen):
        chosen = random.Random(given.seed).sample(chosen, given.sample)
    with tempfile.TemporaryDirectory(prefix="mutations.") as scratch:
        scratch = given.scratch or scratch
        apply(every, scratch)
        runs = {(program, name) for m in chosen for program, names in m.runs() for name in names}
        targets = sorted({target for program, _ in runs for target in command(program)[0]})
        subprocess.run(["make", "-s", "EMPTY_DATA=", *targets], cwd=scratch, check=True)
        caught, wrong, broken = 0, 0, set()
        for program in sorted({program for program, _ in runs}):
            names = sorted(name for other, name in runs if other == program)
            passed, why = passes(scratch, program, names, 0)
            words = re.split(r"\W+|test_", " ".join(why))
            failed = [(program, name) for name in names if name in words]
            if not passed and not failed:
                sys.exit(f"mutations.py: without a mutation, {program}: {why}")
            if not passed:
                print(f"without a mutation {program} fails: {why}", flush=True)
                broken.update(failed)
                wrong += 1
        chosen = [m for m in chosen if list(m.runs(broken))]
        with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
            for m, why in pool.map(lambda m: attempt(scratch, m, broken), chosen):
                caught += why is not None
                wrong += (why is None) != bool(m.reason)
                print(f"{m.number}  {m.file}: {m.old} -> {m.new}: "
                      f"{'caught: ' + why if why else 'NOT caught: ' + m.reason}", flush=True)
        print(f"{caught} of {len(chosen)} caught, {100 * caught / len(chosen):.1f} %")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
