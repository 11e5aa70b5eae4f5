#!/usr/bin/env bash
# Prepares a corpus as byte tokens in data/: data/prepare.sh [tinyshakespeare]
#
# The text comes from $DATA_MIRROR/tinyshakespeare.txt when that variable is set, else from the
# net, and must have the known SHA-256. With neither, the repository's own sources are the corpus
# (data/sources*). The first 90 % of the characters train, the rest validates. Does nothing when
# everything is there.
set -u
cd "$(dirname "$0")/.." || exit 1

corpus=${1:-tinyshakespeare}
url=https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
sha256=86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
part=
trap '[ -z "$part" ] || rm -f "$part"' EXIT
trap 'exit 130' INT TERM

die() { echo "prepare.sh: $*" >&2; exit 1; }

# sha256_of FILE
sha256_of() {
    { sha256sum "$1" 2> /dev/null || shasum -a 256 "$1"; } | cut -d' ' -f1
}

# int32 FILE INDEX: one number of a little-endian header.
int32() {
    od -An -tu1 -j $((4 * $2)) -N4 "$1" | {
        read -r a b c d && echo $((a + 256 * b + 65536 * c + 16777216 * d))
    }
}

# whole FILE: is it a token shard whose length is what its header says?
whole() {
    [ -f "$1" ] && [ "$(wc -c < "$1")" -gt 1024 ] && [ "$(int32 "$1" 0)" = 20240520 ] &&
        [ "$(wc -c < "$1")" -eq $((1024 + 2 * $(int32 "$1" 2))) ]
}

# prepared NAME: are both of its shards there?
prepared() { whole "data/$1_bytes_train.bin" && whole "data/$1_bytes_val.bin"; }

# download FILE: gives up after 5 s without a connection or a minute in all.
download() {
    if command -v curl > /dev/null; then
        curl --fail --silent --location --connect-timeout 5 --max-time 60 -o "$1" "$url"
    elif command -v wget > /dev/null; then
        wget -q --tries=1 --connect-timeout=5 --dns-timeout=5 --read-timeout=20 -O "$1" "$url"
    else
        return 1
    fi
}

# fetch FILE: the text, checked, or status 1 when there is neither mirror nor net.
fetch() {
    part=$1.$$.part
    if [ -n "${DATA_MIRROR:-}" ]; then
        [ -r "$DATA_MIRROR/tinyshakespeare.txt" ] ||
            die "DATA_MIRROR=$DATA_MIRROR holds no tinyshakespeare.txt; unset it to download it"
        cat "$DATA_MIRROR/tinyshakespeare.txt" > "$part" || die "cannot write in data/"
        [ "$(sha256_of "$part")" = "$sha256" ] ||
            die "$DATA_MIRROR/tinyshakespeare.txt is not the known text, of SHA-256 $sha256"
    else
        echo "prepare.sh: downloading tinyshakespeare (1.1 MB)"
        download "$part" || return 1
        if [ "$(sha256_of "$part")" != "$sha256" ]; then
            echo "prepare.sh: what $url sent is not the known text (SHA-256)" >&2
            return 1
        fi
    fi
    mv "$part" "$1" && part=
}

# tokenize NAME: data/NAME.txt to data/NAME_bytes_{train,val}.bin
tokenize() {
    [ -x data/tokenize ] || die "data/tokenize is not built: make data"
    data/tokenize --bytes -o "data/$1_bytes" "data/$1.txt" || exit 1
}

[ "$corpus" = tinyshakespeare ] || die "unknown corpus '$corpus'; known: tinyshakespeare"
[ $# -le 1 ] || die "one corpus at a time"
[ -w data ] || die "cannot write in data/"
prepared tinyshakespeare && exit 0

text=data/tinyshakespeare.txt
if [ -f "$text" ] && [ "$(sha256_of "$text")" = "$sha256" ] || fetch "$text"; then
    tokenize tinyshakespeare
    exit 0
fi

echo "prepare.sh: no DATA_MIRROR and no download: the corpus is this repository's own sources"
prepared sources && exit 0
part=data/sources.txt.$$.part
for file in train_gpt2.c train_gpt2.cu test_gpt2.cu README.md Makefile data/*.c data/*.sh \
            data/*.md dev/*.c dev/*.cu dev/*.sh dev/*.py dev/cuda_cpu/*.h; do
    if [ -f "$file" ]; then cat "$file"; fi
done > "$part" && mv "$part" data/sources.txt || die "cannot write in data/"
part=
tokenize sources
