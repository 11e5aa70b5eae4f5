#!/usr/bin/env python3
"""Compares train_gpt2's GPT-2 tokenizer with tiktoken; exit status 1 if a token differs.

    dev/check/against_tiktoken.py [FOLDER] [--bytes N] [--seed N]

FOLDER contains vocab.bpe and encoder.json (default: $DATA_MIRROR/gpt2). Needs tiktoken, numpy and a
C compiler ($CC, else cc): the tokenizer is compiled as a library. Compares every code point in
several contexts and N bytes of mixed text (default 12,000,000); every encoded text must decode to
itself.
"""
import argparse, ctypes, os, random, subprocess, sys, tempfile, time

import numpy as np
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")

# GPT-2's pattern, with the alternatives in the order used in OpenAI's encoder.py.
PATTERN = (r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""")

LIBRARY = r"""
#include "data/files.c"
#include "data/tokens.c"
static Bpe bpe;
static BpeEncoder encoder;
void open_vocabulary(const char *path) {
    bpe_open(&bpe, path, NULL, NULL);
    bpe_encoder_open(&encoder, &bpe);
}
int64_t encode_all(const char *text, const int64_t *end, int64_t texts, uint16_t *out,
                   int64_t *end_out) {
    int64_t total = 0;
    for (int64_t i = 0, at = 0; i < texts; at = end[i++]) {
        total += bpe_encode(&encoder, text + at, (size_t)(end[i] - at), out + total);
        end_out[i] = total;
    }
    return total;
}
int64_t decode_all(const uint16_t *tokens, int64_t count, char *out) {
    int64_t n = 0;
    for (int64_t i = 0; i < count; i++) {
        const char *bytes;
        int length = bpe_bytes(&bpe, tokens[i], &bytes);
        memcpy(out + n, bytes, (size_t)length);
        n += length;
    }
    return n;
}
"""

PHRASES = [
    "The quick brown fox can't jump; they'll say I'd've known, won't they? DON'T 'TIS 's'll're",
    "Größenwahn, Straßenbahn und 1.234,56 €; „Guten Tag!“ — Fußgängerübergänge",
    "L’élève n'a pas été là où l'œuvre naïve s'arrête, aujourd’hui à 12 h 30",
    "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia; ¿cómo? ¡así!",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. № 42",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία· τι; 3½ ώρες",
    "我能吞下玻璃而不伤身体。今天是2024年１１月２０日，天气很好！「你好」、《书》",
    "いろはにほへと　ちりぬるを。カタカナとひらがな、漢字ﾊﾝｶｸ１２３",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. 각각",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ١٢٣٤ ؟ ـــ بِسْمِ ٱللَّهِ",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה שָׁלוֹם",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश १२३ क्ष त्र ज्ञ",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน ๑๒๓",
    "ஒளியும் நிழலும் தமிழ் ௧௨௩ বাংলা ভাষা ১২৩ తెలుగు ಕನ್ನಡ മലയാളം ਪੰਜਾਬੀ ગુજરાતી සිංහල",
    "ქართული ენა Հայերեն լեզու አማርኛ ፩፪፫ ភាសាខ្មែរ ພາສາລາວ မြန်မာ བོད་སྐད ᠮᠣᠩᠭᠣᠯ ᏣᎳᎩ",
    "Tiếng Việt, tie\u0302\u0301ng Vie\u0323\u0302t, Zalgo Z\u0351\u036b\u0343a\u0321l",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇯🇵 ❤️‍🔥 1️⃣ #️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ☺︎ ☺️ 🤷🏿‍♀️x🙂y",
    "for (int i = 0; i < n; i++) {\n\t\tx[i] += 0x1F * y->z;  // why?\n\r\n    }\n\n\n",
    "def f(x):\n    return {'a': x**2, \"b\": [1_000, 2.5e-3]}  # it's ok\n\n",
    "https://example.org/a/b?c=d&e=%20#f user@mail.com C:\\dir\\file.txt $HOME/~ <|endoftext|>",
    "Ⅷ Ⅻ ½ ⅔ ² ³ ① ⑳ 〇 〡〢 一二三 𝟘𝟙𝟚 ৴ ௰ ༳ Ⰰ 𐌰𐌱 𒀀𒀁 𓀀𓀁 𝒜𝓑 𠀀𠀁 ª º ʰ ˑ ﬁ ĳ ǅ",
]
SPACES = ("\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
          "\u200a\u2028\u2029\u202f\u205f\u3000")
NEARLY_SPACES = "\x00\x1c\x1d\x1e\x1f\u180e\u200b\u200c\u200d\u2060\ufeff"
CONTRACTIONS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "'S", "'RE", "'r", "'l", "'v", "''s",
                "’s", "'", " 's", " 're", "'tt", "'dd", "'llx", "1's", "!'s", "\n't", "'ſ"]
SCRIPTS = [(0x41, 0x7A), (0xC0, 0x24F), (0x300, 0x36F), (0x370, 0x52F), (0x531, 0x5FF),
           (0x600, 0x6FF), (0x900, 0xDFF), (0xE00, 0xFFF), (0x10A0, 0x13FF), (0x1E00, 0x1FFF),
           (0x2000, 0x27BF), (0x3000, 0x33FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
           (0x10000, 0x107FF), (0x12000, 0x16FFF), (0x1D400, 0x1D7FF), (0x1F000, 0x1FBFF),
           (0x20000, 0x323AF), (0xE0000, 0xE01EF)]


def code_point(rng, low, high):
    """A character of a range, excluding surrogates."""
    while True:
        c = rng.randint(low, high)
        if not 0xD800 <= c < 0xE000:
            return chr(c)


def fragment(rng, sources):
    """A short random text of a random kind."""
    kind, low_high = rng.randrange(10), rng.choice(SCRIPTS)
    part = lambda text, most: text[(at := rng.randrange(max(1, len(text) - most))):at + most]
    return [
        lambda: rng.choice(PHRASES),
        lambda: part(rng.choice(PHRASES), rng.randint(1, 12)),
        lambda: "".join(code_point(rng, *low_high) for _ in range(rng.randint(1, 20))),
        lambda: "".join(code_point(rng, 0, 0x10FFFF) for _ in range(rng.randint(1, 8))),
        lambda: "".join(rng.choice(SPACES) for _ in range(rng.randint(1, 6))),
        lambda: rng.choice(SPACES + NEARLY_SPACES) * rng.choice((1, 2, 3, 4, 8, 31, 32, 33)),
        lambda: rng.choice(CONTRACTIONS),
        lambda: str(rng.randrange(10 ** rng.randint(1, 18))),
        lambda: rng.choice("aeX=-*#.!0 \n_é中ا") * rng.choice((2, 3, 5, 15, 16, 31, 32, 100)),
        lambda: part(rng.choice(sources), rng.randint(1, 400))][kind]()


def mixed_texts(count, seed, sources):
    """Random texts of about `count` bytes in total, mostly up to 10 KB each, set by the seed."""
    rng, texts, total = random.Random(seed), [], 0
    for c in "a =\n1!中":
        texts.append("x" + c * 20000 + "y")
    while total < count:
        target, parts, size = rng.choice((10, 100, 1000, 10000)), [], 0
        while size < target:
            parts.append(fragment(rng, sources))
            size += len(parts[-1].encode())
            if rng.random() < 0.3:
                parts.append(rng.choice((" ", " ", " ", "\n", "  ", "")))
        texts.append("".join(parts))
        total += size
    return texts


def is_utf8(data):
    """True for valid UTF-8."""
    return data.decode(errors="ignore").encode() == data


class Ours:
    """train_gpt2's tokenizer as a library."""

    def __init__(self, folder, vocabulary):
        source, library = os.path.join(folder, "bpe.c"), os.path.join(folder, "bpe.so")
        with open(source, "w", encoding="utf-8") as f:
            f.write(LIBRARY)
        subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-O2", "-w", "-shared", "-fPIC",
                        "-I" + ROOT, source, "-o", library, "-lm"], check=True)
        self.c = ctypes.CDLL(library)
        self.c.open_vocabulary(vocabulary.encode())
        self.c.encode_all.restype = self.c.decode_all.restype = ctypes.c_int64

    def encode(self, texts):
        """The tokens of all texts (bytes) in one array, and where each text ends in it."""
        ends = np.cumsum([len(t) for t in texts], dtype=np.int64)
        out, out_ends = np.zeros(ends[-1] + 1, np.uint16), np.zeros_like(ends)
        n = self.c.encode_all(b"".join(texts), ends.ctypes.data_as(ctypes.c_void_p),
                              ctypes.c_int64(len(texts)), out.ctypes.data_as(ctypes.c_void_p),
                              out_ends.ctypes.data_as(ctypes.c_void_p))
        return out[:n], out_ends

    def decode(self, tokens):
        """Bytes of tokens."""
        tokens = np.ascontiguousarray(tokens, np.uint16)
        out = ctypes.create_string_buffer(128 * len(tokens) + 1)
        n = self.c.decode_all(tokens.ctypes.data_as(ctypes.c_void_p),
                              ctypes.c_int64(len(tokens)), out)
        return out.raw[:n]


def compare(ours, theirs, texts, what):
    """Encodes the texts with both tokenizers, compares the tokens, and decodes ours."""
    data = [t.encode() for t in texts]
    tokens, ends = ours.encode(data)
    wanted = [theirs.encode_ordinary(t) for t in texts]    # the batch call is slower here
    counts = np.diff(ends, prepend=0)
    flat = np.fromiter((t for w in wanted for t in w), np.uint16)
    if [len(w) for w in wanted] != counts.tolist() or not np.array_equal(tokens, flat):
        for i, w in enumerate(wanted):
            got = tokens[ends[i] - counts[i]:ends[i]].tolist()
            if got != w:
                k = next((k for k, (a, b) in enumerate(zip(got, w)) if a != b), len(w))
                sys.exit("%s, text %d, token %d: ours %s, tiktoken's %s, after %r"
                         % (what, i, k, got[k:k + 6], w[k:k + 6], theirs.decode(w[:k])[-40:]))
    if ours.decode(tokens) != b"".join(data):
        sys.exit("%s: does not decode to what was encoded" % what)
    print("%-28s %11s texts %11s bytes %11s tokens  equal"
          % (what, f"{len(texts):,}", f"{sum(map(len, data)):,}", f"{len(tokens):,}"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", nargs="?",
                        default=os.path.join(os.environ.get("DATA_MIRROR", "data"), "gpt2"))
    parser.add_argument("--bytes", type=int, default=12_000_000)
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    began = time.time()
    ranks = data_gym_to_mergeable_bpe_ranks(os.path.join(a.folder, "vocab.bpe"),
                                            os.path.join(a.folder, "encoder.json"))
    theirs = tiktoken.Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks,
                               special_tokens={"<|endoftext|>": 50256}, explicit_n_vocab=50257)
    with tempfile.TemporaryDirectory() as scratch:
        ours = Ours(scratch, os.path.join(a.folder, "vocab.bpe"))
        compare(ours, theirs, [t.decode() for t in ranks if is_utf8(t)], "every token alone")
        points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
        for context in ("%s", "a%s", "%sa", "1%s1", " %s!", "! %s", "  %s", "%s  x", "\n%s\n"):
            compare(ours, theirs, [context.replace("%s", c) for c in points],
                    "every code point in %r" % context)
        sources = []
        for name in ("train_gpt2.c", "data/files.c", "data/tokens.c", "test_gpt2.cu", "README.md",
                     "Makefile", "dev/style.sh"):
            with open(os.path.join(ROOT, name), encoding="utf-8") as f:
                sources.append(f.read())
        shakespeare = os.path.join(a.folder, "../tinyshakespeare.txt")
        if os.path.exists(shakespeare):
            with open(shakespeare, encoding="utf-8", newline="") as f:
                sources.append(f.read())
        compare(ours, theirs, sources, "whole files")
        compare(ours, theirs, mixed_texts(a.bytes, a.seed, sources), "mixed text, seed %d" % a.seed)
    print("tiktoken %s, Python %s, %.0f s" % (tiktoken.__version__, sys.version.split()[0],
                                              time.time() - began))


if __name__ == "__main__":
    main()
