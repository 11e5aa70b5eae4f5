#!/usr/bin/env python3
"""Checks dev/train_gpt2.ipynb without running it: dev/check/notebook.py [FILE]

The notebook must be valid nbformat 4 without outputs and at most 200 lines long; its code must
compile; its commands may use only options that --help lists; the files and make targets that it
names must exist. Needs train_gpt2 and data/tokenize. Prints a line per fault; exit status 1 if any.
"""
import ast, json, os, re, shlex, subprocess, sys

MAX_LINES = 200
# The first word of a command, and the program whose options it takes; {} is a value in an f-string.
PROGRAMS = {"./{}": "./train_gpt2", "{}": "./train_gpt2", "./train_gpt2": "./train_gpt2",
            "./train_gpt2cu": "./train_gpt2", "data/tokenize": "data/tokenize"}
MADE = re.compile(r"data/(notebook_|.*(\.bin|\.txt)$|\{\})")    # files made by running the notebook
OPTION = re.compile(r"-[A-Za-z]$|--[a-z]")
root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def options_of(program, known={}):
    """The options that --help of a program lists."""
    if program not in known:
        every = ["all"] if program != "data/tokenize" else []
        said = subprocess.run([program, "--help", *every], capture_output=True, text=True,
                              check=True)
        known[program] = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", said.stdout))
    return known[program]


def texts_of(cell):
    """A code cell's string constants, with {} for f-string values, or a markdown cell's `code`."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return re.findall(r"`([^`]+)`", source)
    inside = set()    # nodes inside an f-string, which is read as a whole, or a call of nvidia-smi
    texts = []
    for node in ast.walk(ast.parse(source)):    # visits a node before its children
        if isinstance(node, ast.List) and node.elts and "nvidia-smi" in ast.dump(node.elts[0]):
            inside.update(ast.walk(node))
        elif isinstance(node, ast.JoinedStr):
            inside.update(node.values)
            texts.append("".join(part.value if isinstance(part, ast.Constant) else "{}"
                                 for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            texts.append(node.value)
    return texts


def faults_of_text(text):
    """Yields the faults of one string: a command line, a part of one, or a file's name."""
    for command in re.split(r"&&|\|\||[|;]", text):
        try:
            words = shlex.split(command)
        except ValueError:    # prose with an apostrophe
            continue
        if not words:
            continue
        known = options_of(PROGRAMS[words[0]]) if words[0] in PROGRAMS else set()
        if OPTION.match(words[0]):    # the rest of a command line of one of these two
            known = options_of("./train_gpt2") | options_of("dev/report.py")
        for word in words if known else []:
            if OPTION.match(word) and word.split("=")[0] not in known:
                yield f"unknown option {word} in: {command.strip()}"
        if words[0] == "make":
            with open("Makefile", encoding="utf-8") as file:
                rules = file.read()
            for target in words[1:]:
                rule = rf"^[^#\t\n]*\b{target}\b.*:"
                if target[0] not in "-{" and not re.search(rule, rules, re.M):
                    yield f"make has no target {target}"
        for word in words:
            named = re.match(r"(data|dev)/[\w./*{}-]+", word)
            if named and not MADE.match(named[0]) and not os.path.exists(named[0]):
                yield f"no file {named[0]}"


def faults(path):
    with open(path, encoding="utf-8") as file:
        book = json.load(file)
    cells = book["cells"]
    if book["nbformat"] != 4 or not isinstance(book["metadata"], dict):
        yield "not nbformat 4"
    lines = sum(len(cell["source"]) for cell in cells)
    if lines > MAX_LINES:
        yield f"{lines} lines, more than {MAX_LINES}"
    for number, cell in enumerate(cells, 1):
        found = []
        if cell["cell_type"] == "code" and (cell["outputs"] or cell["execution_count"]):
            found.append("has outputs: clear them")
        try:
            found += [fault for text in texts_of(cell) for fault in faults_of_text(text)]
        except SyntaxError as error:
            found.append(f"line {error.lineno}: {error.msg}")
        yield from (f"cell {number}: {fault}" for fault in found)


def main():
    path = os.path.abspath(sys.argv[1]) if len(sys.argv) > 1 else "dev/train_gpt2.ipynb"
    os.chdir(root)
    found = list(faults(path))
    print("".join(f"{fault}\n" for fault in found), end="")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
