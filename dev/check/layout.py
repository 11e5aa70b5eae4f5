#!/usr/bin/env python3
"""Checks the layout of the sources: dev/check/layout.py

Every source file that git tracks must have lines of at most 100 columns, no tabs (except Makefile),
no trailing blanks and a newline at the end. In C and CUDA, no two consecutive lines may be empty;
  contents   the list under "Contents" in a file's header equals its chapter banners
  citations  "chapter X" names a chapter that exists in some file
Prints one line per fault and finally `N passed, N failed, N skipped`; exit status 1 on any fault.
Needs only python3.
"""
import itertools, re, subprocess, sys

COLUMNS = 100
CODE = (".c", ".cu", ".h", ".cpp")
TEXT = CODE + (".sh", ".py", "Makefile")
BANNER = re.compile(r"^// (?:(Part [A-Z]+\. .+)|(\d+\. .+))$")


def chapters(lines):
    """Titles in the banners: a dashed line followed by `N. Title` or `Part X. Title`."""
    found = []
    for before, line in zip(lines, lines[1:]):
        match = BANNER.match(line)
        if match and re.match(r"^// [-=]{60,}$", before):
            found.append(match.group(1) or match.group(2))
    return found


def contents(lines):
    """Titles in the list under `// Contents`, or None if there is no such list."""
    if "// Contents" not in lines:
        return None
    start = lines.index("// Contents") + 1
    rows = itertools.takewhile(lambda line: line.startswith("// "), lines[start:])
    text = " ".join(line[3:].strip() for line in rows)
    text = re.sub(r"(Part [A-Z]+\. [^:]+): ", r"; \1; ", text)
    items = filter(None, (item.strip() for item in text.split("; ")))
    return [i if i.startswith("Part") else i.replace(" ", ". ", 1) for i in items]


def title(chapter):
    return re.sub(r"^(\d+|Part [A-Z]+)\. ", "", chapter)


def check_text(name, lines, last_newline):
    """Faults that any text file may have, as (line number, what)."""
    for n, line in enumerate(lines, 1):
        if len(line) > COLUMNS:
            yield n, f"{len(line)} columns; at most {COLUMNS}"
        if "\t" in line and not name.endswith("Makefile"):
            yield n, "a tab"
        if line != line.rstrip():
            yield n, "trailing blanks"
        if line == "" and n > 1 and lines[n - 2] == "" and name.endswith(CODE):
            yield n, "two empty lines"
    if not last_newline:
        yield len(lines), "no newline at the end"


def check_sources(files):
    """Faults of {name: text}, as "file:line: what"."""
    faults, known = [], set()
    for text in files.values():
        known |= {title(c) for c in chapters(text.split("\n"))}
    for name, text in files.items():
        lines = text.split("\n")
        last = lines[-1] == ""
        lines = lines[:-1] if last else lines
        found = list(check_text(name, lines, last))
        if name.endswith(CODE):
            listed = contents(lines)
            if listed is not None and listed != chapters(lines):
                pairs = zip(listed + [""], chapters(lines) + [""])
                odd = next(a or b for a, b in pairs if a != b)
                found.append((lines.index("// Contents") + 1, f"contents and banners: {odd}"))
            prose = re.sub(r"\n *// ?", " ", "\n".join(lines))
            for cited in re.finditer(r"\bchapters? ((?:--)?[A-Z][\w,' -]*)", prose):
                if not any(cited.group(1).startswith(t) for t in known):
                    found.append((1, f"no chapter is called '{cited.group(1)[:40]}'"))
        faults += [f"{name}:{n}: {what}" for n, what in found]
    return faults


def main():
    names = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True)
    files = {}
    for name in names.stdout.split("\n"):
        if name.endswith(TEXT):
            try:
                with open(name, encoding="utf-8", newline="") as f:
                    files[name] = f.read()
            except FileNotFoundError:  # deleted, and not yet committed
                pass
    faults = check_sources(files)
    for fault in faults:
        print(fault)
    print(f"{len(files) - len({f.split(':')[0] for f in faults})} passed, "
          f"{len({f.split(':')[0] for f in faults})} failed, 0 skipped")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
