#!/usr/bin/env bash
# Prepares a corpus in data/; does nothing if it is already there.
#
#   data/prepare.sh [tinyshakespeare]   1,024 tokens learned from the text, and GPT-2's tokens if
#                                       vocab.bpe is available
#   data/prepare.sh tinystories         TinyStories V2 (GPT-4) as GPT-2 tokens; 2.3 GB of text
#   data/prepare.sh fineweb [N]         published shards of GPT-2 tokens, 200 MB each: one for
#   data/prepare.sh fineweb-edu [N]     validation, the first N (default 3) for training
#   data/prepare.sh hellaswag           llm.c's hellaswag_val.bin, for --eval; 10,042 questions
#
# Files are copied from $DATA_MIRROR if it is set, otherwise downloaded. If tinyshakespeare is not
# available, the stories written by data/stories replace it. A download has the suffix .part until
# it is complete and its SHA-256 or header is right; an interrupted one is resumed. Without a
# network, a call tries one file, for at most 3 s. DATA_URL=http://localhost:8000 replaces
# https://HOST in every address, for dev/test/test_prepare.py. tinystories, fineweb, fineweb-edu
# and hellaswag have not been tried with the real servers.
set -u
unset CDPATH    # else cd could change to another folder and print it
cd "$(dirname "$0")/.." || exit 1

text_sha256=86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
vocab_sha256=1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5
github=${DATA_URL:-https://raw.githubusercontent.com}
openai=${DATA_URL:-https://openaipublic.blob.core.windows.net}
huggingface=${DATA_URL:-https://huggingface.co}
part=
again=      # set if a corpus to train on already exists; a failed download is then not reported
trap '[ -z "$part" ] || rm -f "$part"' EXIT
trap 'exit 130' INT TERM

say() { echo "prepare.sh: $*"; }
die() { echo "prepare.sh: $*" >&2; exit 1; }

size() { if [ -f "$1" ]; then wc -c < "$1" | tr -d ' '; else echo 0; fi; }

# known SHA256 FILE: true if the file has this hash.
known() {
    [ -f "$2" ] &&
        [ "$({ sha256sum "$2" 2> /dev/null || shasum -a 256 "$2"; } | cut -d' ' -f1)" = "$1" ]
}

# int32 FILE INDEX: one number of a little-endian header.
int32() {
    od -An -tu1 -j $((4 * $2)) -N4 "$1" | {
        read -r a b c d && echo $((a + 256 * b + 65536 * c + 16777216 * d))
    }
}

# whole FILE: true for a token shard whose length agrees with its header.
whole() {
    [ "$(size "$1")" -gt 1024 ] && [ "$(int32 "$1" 0)" = 20240520 ] && [ "$(int32 "$1" 1)" = 1 ] &&
        [ "$(size "$1")" -eq $((1024 + 2 * $(int32 "$1" 2))) ]
}

# prepared PREFIX: true if both of its shards exist, and for *_bpe its merges too.
prepared() {
    whole "data/$1_train.bin" && whole "data/$1_val.bin" &&
        { [ "${1%_bpe}" = "$1" ] || [ -s "data/$1_merges.txt" ]; }
}

# --- Copying and downloading ----------------------------------------------------------------------

# transfer URL PART: appends the missing bytes to PART; starts over if the server cannot resume.
# Gives up after 3 s without a connection or 30 s without data; wget's connection timeout is lower
# because it applies to each address of a host, and these hosts have four or more.
transfer() {
    local loud=--silent code status
    [ -t 2 ] && [ -z "$again" ] && loud=--progress-bar
    if command -v curl > /dev/null; then
        code=$(curl --fail --location $loud --connect-timeout 3 --speed-limit 1 --speed-time 30 \
            --continue-at - --write-out '%{http_code}' --output "$2" "$1")
        status=$?
        [ $status -ne 33 ] || { rm -f "$2" && transfer "$@" && return; }
        [ $status -eq 0 ] || [ "$code" = 416 ]    # 416: it was complete
    else
        wget --quiet --tries=1 --connect-timeout=1 --dns-timeout=3 --read-timeout=30 --continue \
            --output-document="$2" "$1" 2> /dev/null
    fi
}

# download URL FILE CHECK...: downloads FILE and checks it with the command CHECK; returns 1 on
# failure. Requests the rest again as long as each attempt receives some of it.
download() {
    local url=$1 file=$2 body=$2.part before
    shift 2
    [ -n "$again" ] || say "downloading $url"
    while before=$(size "$body"); do
        if transfer "$url" "$body"; then
            "$@" "$body" && mv "$body" "$file" && return
            rm -f "$body"
            [ "$before" -gt 0 ] || break    # the existing part may be from another file
        elif [ "$(size "$body")" -le "$before" ]; then
            [ -s "$body" ] || rm -f "$body"
            [ -n "$again" ] ||
                echo "prepare.sh: $url: download failed after $(size "$body") bytes" >&2
            return 1
        fi
    done
    echo "prepare.sh: $url: wrong content ($*)" >&2
    return 1
}

# obtain NAME MIRRORED URL CHECK...: gets data/NAME from $DATA_MIRROR/MIRRORED or URL, else fails.
obtain() {
    local file=data/$1 mirrored=${DATA_MIRROR:-}/$2 url=$3
    shift 3
    [ -f "$file" ] && "$@" "$file" && return
    if [ -z "${DATA_MIRROR:-}" ]; then
        download "$url" "$file" "$@"
        return
    fi
    [ -r "$mirrored" ] ||
        die "DATA_MIRROR=$DATA_MIRROR has no ${mirrored#"$DATA_MIRROR"/}; unset it to download it"
    part=$file.$$.part
    cat "$mirrored" > "$part" || die "cannot write to data/"
    "$@" "$part" || { rm -f "$part" && die "$mirrored: not the expected ${file##*/} ($*)"; }
    mv "$part" "$file" && part=
}

# vocabulary: gets data/vocab.bpe, or prints why not and returns status 1.
vocabulary() {
    if [ -n "${DATA_MIRROR:-}" ] && [ ! -r "$DATA_MIRROR/gpt2/vocab.bpe" ]; then
        known $vocab_sha256 data/vocab.bpe && return
        [ -n "$again" ] || say "DATA_MIRROR=$DATA_MIRROR has no gpt2/vocab.bpe"
        return 1
    fi
    obtain vocab.bpe gpt2/vocab.bpe "$openai/gpt-2/encodings/main/vocab.bpe" known $vocab_sha256
}

# --- The corpora ----------------------------------------------------------------------------------

# tokenize PREFIX OPTION... FILE: writes data/PREFIX_*.bin unless they already exist.
tokenize() {
    local prefix=$1
    prepared "$prefix" && return
    shift
    [ -x data/tokenize ] || die "data/tokenize is not built: make data"
    data/tokenize -o "data/$prefix" "$@" || exit 1
}

tinyshakespeare() {
    local name=tinyshakespeare path=karpathy/char-rnn/master/data/tinyshakespeare/input.txt
    prepared ${name}_bpe && prepared ${name}_gpt2 && return
    if prepared ${name}_bpe || prepared stories_bpe; then again=yes; fi
    if obtain $name.txt $name.txt "$github/$path" known $text_sha256; then
        tokenize ${name}_bpe --train-bpe 1024 data/$name.txt
        if prepared ${name}_gpt2 || vocabulary; then
            tokenize ${name}_gpt2 --bpe --tokenizer data/vocab.bpe data/$name.txt
        elif [ -z "$again" ]; then
            say "no vocab.bpe: no GPT-2 tokens"
        fi
    elif ! prepared ${name}_bpe; then
        stories
    fi
}

stories() {
    echo "data: tinyshakespeare is not available; using generated stories"
    prepared stories_bpe && return
    [ -x data/stories ] || die "data/stories is not built: make data"
    part=data/stories.txt.$$.part
    data/stories > "$part" && mv "$part" data/stories.txt || die "cannot write to data/"
    part=
    tokenize stories_bpe --train-bpe 1024 --documents data/stories.txt
}

tinystories() {
    local name=tinystories_gpt2 file said
    whole data/${name}_val_000000.bin && return
    said=$(vocabulary 2>&1) ||
        die "tinystories needs GPT-2's vocab.bpe: ${said##*$'\n'prepare.sh: }"
    for file in TinyStoriesV2-GPT4-valid.txt TinyStoriesV2-GPT4-train.txt; do
        obtain $file $file "$huggingface/datasets/roneneldan/TinyStories/resolve/main/$file" \
            test -s || exit 1
    done
    tokenize $name --bpe --tokenizer data/vocab.bpe --documents --shard-tokens 100000000 \
        --val-file data/TinyStoriesV2-GPT4-valid.txt data/TinyStoriesV2-GPT4-train.txt
}

# shards PREFIX DATASET ALL N: gets the validation shard and the first N training shards (at most
# ALL) of a Hugging Face dataset
shards() {
    local i file
    [[ "$4" =~ ^[0-9]{1,4}$ ]] && [ "$((10#$4))" -ge 1 ] && [ "$((10#$4))" -le "$3" ] ||
        die "$corpus $4: invalid number of training shards; expected 1 to $3"
    for ((i = 0; i <= 10#$4; i++)); do
        file=$1_$([ $i = 0 ] && echo val || echo train)_$(printf %06d $i).bin
        obtain "$file" "$file" "$huggingface/datasets/$2/resolve/main/$file" whole || exit 1
    done
}

# questions FILE: true for an evaluation file of llm.c.
questions() { [ "$(size "$1")" -gt 1024 ] && [ "$(int32 "$1" 0)" = 20240522 ]; }

hellaswag() {
    local file=hellaswag_val.bin
    obtain $file $file "$huggingface/datasets/karpathy/llmc-starter-pack/resolve/main/$file" \
        questions || exit 1
}

corpus=${1:-tinyshakespeare}
[ $# -le 1 ] || [[ "$corpus $#" =~ ^fineweb(-edu)?' '2$ ]] || die "expected a single corpus"
[ -w data ] || die "cannot write to data/"
case $corpus in
    tinyshakespeare | tinystories | hellaswag) $corpus ;;
    fineweb) shards fineweb kjj0/fineweb10B-gpt2 103 "${2:-3}" ;;
    fineweb-edu) shards edu_fineweb karpathy/fineweb-edu-100B-gpt2-token-shards 1001 "${2:-3}" ;;
    *) die "unknown corpus '$corpus'; expected tinyshakespeare, tinystories, fineweb," \
        "fineweb-edu or hellaswag" ;;
esac
