#!/usr/bin/env python3
"""Prints the tokenizer's Unicode tables, with the classes of tiktoken's regex engine.

    dev/tools/unicode_tables.py            the C lines
    dev/tools/unicode_tables.py --check    exit status 1 if data/tokens.c does not contain them

Needs tiktoken. A table lists the runs of a class in order of code points: gap, length, gap, length,
..., each number in base-92 digits from '#' on. The last digit of a number is below 76, and each
digit before it counts in the 16 above (data/tokens.c, class_runs).
"""
import os
import sys

import tiktoken

FIRST, LAST, FINAL = ord("#"), ord("~"), 76
CARRY = LAST - FIRST + 1 - FINAL
SOURCE = os.path.join(os.path.dirname(__file__), "..", "..", "data", "tokens.c")
EVERY = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)


def matches(pattern):
    """Code points that the engine matches with a pattern."""
    byte_ranks = {bytes([i]): i for i in range(256)}
    encoding = tiktoken.Encoding("bytes", pat_str=pattern, mergeable_ranks=byte_ranks,
                                 special_tokens={})
    return [ord(c) for c in bytes(encoding.encode_ordinary(EVERY)).decode()]


def unicode_version():
    """The newest Unicode version that the engine supports."""
    newest = None
    for version in ("14.0", "15.0", "15.1", "16.0", "17.0", "18.0", "19.0"):
        try:
            if matches(r"\p{Age=" + version + "}"):
                newest = version
        except ValueError:
            pass
    return newest


def number(value):
    """Digits of a number, most significant first."""
    digits = chr(FIRST + value % FINAL)
    value //= FINAL
    while value:
        value -= 1
        digits = chr(FIRST + FINAL + value % CARRY) + digits
        value //= CARRY
    return digits


def runs(points):
    """Gap, length, gap, length, ... of a sorted list of code points."""
    out, end = [], 0
    for i, c in enumerate(points):
        if i == 0 or c != points[i - 1] + 1:
            out += [c - end, 0]
        out[-1] += 1
        end = c + 1
    return out


def table(name, pattern):
    """One table as lines of C."""
    text = "".join(number(v) for v in runs(matches(pattern)))
    lines, line = [], ""
    for c in text:
        c = "\\" + c if c in "\\?" else c    # two question marks would start a trigraph
        if len(line) + len(c) > 92:
            lines.append(line)
            line = ""
        line += c
    lines = ['    "%s"' % x for x in lines + [line]]
    return ["static const char %s[] =" % name] + lines[:-1] + [lines[-1] + ";"]


def main():
    lines = ["// Unicode %s (what tiktoken %s has), by dev/tools/unicode_tables.py."
             % (unicode_version(), tiktoken.__version__)]
    lines += table("letter_runs", r"\p{L}") + table("number_runs", r"\p{N}")
    text = "\n".join(lines) + "\n"
    if sys.argv[1:] == ["--check"]:
        with open(SOURCE, encoding="utf-8") as source:
            if text not in source.read():
                sys.exit("data/tokens.c has other tables than dev/tools/unicode_tables.py prints")
        print("data/tokens.c has the tables of Unicode %s" % unicode_version())
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
