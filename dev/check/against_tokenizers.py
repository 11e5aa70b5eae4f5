#!/usr/bin/env python3
"""Compares --train-bpe with Hugging Face's BpeTrainer; exit status 1 if a merge or token differs.

    dev/check/against_tokenizers.py [TEXT...]

Needs the packages tokenizers and transformers, and the built data/tokenize and train_gpt2. Learns
vocabularies of several sizes from each TEXT (default: five texts in several languages, generated
here or part of the project) and compares the merges. Then trains a model for one step and
compares our tokens of 10,000 lines with those of transformers, which loads its checkpoint.
"""
import os, random, struct, subprocess, sys, tempfile

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
TOKENIZE = os.path.join(ROOT, "data", "tokenize")
END = "<|endoftext|>"

RUSSIAN = """широкая электрификация южных губерний даст мощный толчок подъёму сельского хозяйства
съешь же ещё этих мягких французских булок да выпей чаю в чащах юга жил бы цитрус""".split()
CHINESE = "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳云腾致雨露结为霜"


def words_of(rng, words, count, ends):
    """A random text of `count` words, preferring the first of `words`, with punctuation."""
    out = []
    for _ in range(count):
        word = words[min(int(rng.expovariate(6 / len(words))), len(words) - 1)]
        out.append(rng.choice((word, word, word.capitalize(), word + rng.choice(ends))))
    return " ".join(out)


def made_texts():
    """Names and texts: stories, Russian, Chinese, this project's sources, awkward characters."""
    rng = random.Random(1)
    read = lambda name: open(os.path.join(ROOT, name), encoding="utf-8", newline="").read()
    stories = subprocess.run([os.path.join(ROOT, "data", "stories")], check=True,
                             stdout=subprocess.PIPE).stdout.decode()
    stems = [a + b for a in RUSSIAN for b in ("", "ами", "ов", "ый", "ться")]
    chinese = ["".join(rng.choice(CHINESE) for _ in range(rng.randint(1, 6))) for _ in range(900)]
    parts = ("a", "aa", "b", "ab", " ", "  ", "\n", "\t", "'s", "'ll", "é", "中", "👩‍👧", "12", "!!",
             "--------", "\u00a0", "\u3000", "\x00")
    awkward = "".join(rng.choice(parts) for _ in range(200000))
    return [("stories", stories), ("Russian", words_of(rng, stems, 60000, (",", ".", "!", "\n"))),
            ("Chinese", words_of(rng, chinese, 60000, ("，", "。", "\n"))),
            ("C", "".join(read(n) for n in ("train_gpt2.c", "train_gpt2.cu", "data/tokenize.c"))),
            ("awkward", awkward)]


def ours(folder, text, size, name="ours"):
    """The merges that data/tokenize learns from a text, as lines."""
    path, prefix = os.path.join(folder, name + ".txt"), os.path.join(folder, name)
    with open(path, "w", encoding="utf-8", newline="") as f:
        f.write(text)
    subprocess.run([TOKENIZE, "--train-bpe", str(size), "--val-fraction", "0", "-o", prefix, path],
                   check=True, stdout=subprocess.DEVNULL)
    with open(prefix + "_merges.txt", encoding="utf-8", newline="") as f:
        return f.read().split("\n")[1:-1]


def theirs(folder, text, size):
    """The merges of a tokenizer trained on the text, split by GPT-2's pattern, as lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([text], trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.model.save(folder, "theirs")
    with open(os.path.join(folder, "theirs-merges.txt"), encoding="utf-8", newline="") as f:
        return f.read().split("\n")[1:-1]


def compare_merges(folder, name, text):
    """Compares the merges for vocabularies of several sizes, up to the largest the text allows."""
    for size in (300, 1000, 4096, 16384):
        want = theirs(folder, text, size)
        possible = min(size, len(want) + 257)
        got = ours(folder, text, possible)
        if got != want:
            at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), len(want))
            sys.exit("%s, %d tokens: merge %d is %r, not %r" % (name, size, at, got[at:at + 1],
                                                                want[at:at + 1]))
        print("%-10s %10s bytes %7s tokens: the same merges"
              % (name, f"{len(text.encode()):,}", f"{possible:,}"))
        if possible < size:
            return


def compare_tokens(folder, text):
    """Compares data/tokenize and transformers, given a checkpoint's files, on 10,000 lines."""
    from transformers import AutoTokenizer    # takes seconds to load
    lines = [l for l in text.split("\n") if l.strip() and END not in l]
    lines = (lines * (10000 // len(lines) + 1))[:10000]
    ours(folder, text, 2000, "mine")
    subprocess.run([os.path.join(ROOT, "train_gpt2"), "-i", os.path.join(folder, "mine_train.bin"),
                    "-e", "l1h1c16t32", "-x", "1", "-o", os.path.join(folder, "out"), "--quiet"],
                   check=True)
    tokenizer = AutoTokenizer.from_pretrained(os.path.join(folder, "out", "step-00000001"))
    with open(os.path.join(folder, "lines.txt"), "w", encoding="utf-8", newline="") as f:
        f.write(END.join(lines))
    prefix = os.path.join(folder, "lines")
    subprocess.run([TOKENIZE, "--bpe", "--tokenizer", os.path.join(folder, "mine_merges.txt"),
                    "--documents", "--val-fraction", "0", "-o", prefix, prefix + ".txt"],
                   check=True, stdout=subprocess.DEVNULL)
    with open(prefix + "_train.bin", "rb") as f:
        count = (os.fstat(f.fileno()).st_size - 1024) // 2
        tokens = struct.unpack("<%dH" % count, f.read()[1024:])
    want = []
    for line in lines:
        want += [1999] + tokenizer(line.strip(" \t\n\v\f\r"))["input_ids"]
    if list(tokens) != want or tokenizer.eos_token_id != 1999:
        sys.exit("tokens of the lines differ from transformers'")
    if tokenizer.decode(tokenizer(lines[0])["input_ids"]) != lines[0]:
        sys.exit("transformers does not decode its own tokens")
    print("10,000 lines, %s tokens: the same in transformers, from a checkpoint"
          % f"{len(tokens):,}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        texts = made_texts()
        for name, text in [(t, open(t, encoding="utf-8", newline="").read())
                           for t in sys.argv[1:]] or texts:
            compare_merges(folder, name, text)
        compare_tokens(folder, texts[1][1] + texts[3][1])


if __name__ == "__main__":
    main()
