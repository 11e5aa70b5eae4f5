#!/usr/bin/env python3
"""Prints the tokenizer's Unicode tables, using the character classes of tiktoken's regex engine.

    dev/check/unicode_tables.py            the C lines
    dev/check/unicode_tables.py --check    exit status 1 if data/tokens.c does not contain them

Needs tiktoken. A table lists the runs of a class in order of code points: gap, length, gap, length,
..., each number written with 92 digits, from '#' on. The last digit of a number is below 76, and
the digits before it are one of the 16 above (data/tokens.c, class_runs).
"""
import os, sys

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


def number(value):
    """Digits of a number, most significant first."""
    digits = chr(FIRST + value % FINAL)
    value //= FINAL
    while value:
        value -= 1
        digits = chr(FIRST + FINAL + value % CARRY) + digits
        value //= CARRY
    return digits


def table(name, pattern):
    """One table as lines of C."""
    runs, end = [], 0    # gap, length, gap, length, ...
    for c in matches(pattern):
        if not runs or c != end:
            runs += [c - end, 0]
        runs[-1] += 1
        end = c + 1
    lines = [""]
    for c in "".join(number(value) for value in runs):
        c = "\\" + c if c in "\\?" else c    # two question marks would start a trigraph
        if len(lines[-1]) + len(c) > 92:
            lines.append("")
        lines[-1] += c
    return "static const char %s[] =\n%s;\n" % (name, "\n".join('    "%s"' % x for x in lines))


text = table("letter_runs", r"\p{L}") + table("number_runs", r"\p{N}")
if sys.argv[1:] != ["--check"]:
    print(text, end="")
elif text not in open(SOURCE, encoding="utf-8").read():
    sys.exit("the tables in data/tokens.c differ from those of dev/check/unicode_tables.py")
