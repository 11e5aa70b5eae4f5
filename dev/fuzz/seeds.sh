#!/usr/bin/env bash
# seeds.sh TARGET...: makes the seeds of the fuzz targets below build/seeds/: what the program
# itself writes for the smallest models and texts, and hand-made files for what it only reads.
set -eu
cd "$(dirname "$0")/../.."
to=$PWD/build/seeds
program=$PWD/train_gpt2
tokenize=$PWD/data/tokenize
for target in "$@"; do
    mkdir -p "$to/$target"
done
scratch=$(mktemp -d build/seed.XXXXXX)
trap 'rm -rf "$scratch"' EXIT

# le32 NUMBER...: little-endian 32-bit words.
le32() {
    local n
    for n in "$@"; do
        # shellcheck disable=SC2059
        printf "$(printf '\\x%02x\\x%02x\\x%02x\\x%02x' $((n & 255)) $((n >> 8 & 255)) \
                  $((n >> 16 & 255)) $((n >> 24 & 255)))"
    done
}
zeros() { head -c "$1" /dev/zero; }

# A checkpoint of one step.
printf 'The cat sat on the mat.\n%.0s' 1 2 3 4 > "$scratch/text"
"$tokenize" --bytes -o "$scratch/bytes" "$scratch/text" > "$scratch/log"
"$program" -e l1h1c1t2 -i "$scratch/bytes_train.bin" -v 0 -x 1 -o "$scratch" > "$scratch/log"
set -- "$scratch"/step-*
cp "$1/model.safetensors" "$to/weights/model"
cp "$1/model.safetensors" "$to/safetensors/model"
cp "$1/state-0-of-1.safetensors" "$to/state/state"
cp "$1/config.json" "$to/config/config"
cp "$1/config.json" "$to/json/config"
cp "$1/manifest.json" "$to/manifest/manifest"
cp "$1/manifest.json" "$to/json/manifest"
cp "$scratch/log.jsonl" "$to/json/log"
{ cat "$scratch/log.jsonl"; printf '{"step":%d}\n' 4 5 6 5; } > "$to/log/log"

cp "$scratch/bytes_train.bin" "$to/shard/bytes"
{ le32 20240520 1 7 0 0; zeros 1004; printf 'abcdefghijkl\0\0'; } > "$to/shard/gpt2"

# llm.c's models of one layer, head, channel and position; 156 parameters.
for version in 3 5; do
    { le32 20240326 $version 1 1 1 1 1 128; zeros $((992 + 156 * (version == 3 ? 4 : 2))); } \
        > "$to/llmc/$version"
done
# llm.c's multiple-choice files: two examples, the second of two completions.
le16() {
    local n
    for n in "$@"; do
        # shellcheck disable=SC2059
        printf "$(printf '\\x%02x\\x%02x' $((n & 255)) $((n >> 8)))"
    done
}
{ le32 20240522 1 2 44; zeros 1008
  le16 65535 44 0 2 4 3 1 2 3 2 4 5 1 6 3 7 8 9 3 65 66 67
  le16 65535 24 1 1 2 1 65 2 66 67 1 68; } > "$to/eval/two"
header='{"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"b":{"dtype":"BOOL","shape":[],'
header+='"data_offsets":[8,9]},"__metadata__":{"format":"pt"},"c":{"dtype":"I8","shape":[0,3],'
header+='"data_offsets":[9,9]}}'
{ le32 ${#header} 0; printf '%s123456789' "$header"; } > "$to/safetensors/hand"
# Texts longer than any that a reader keeps.
long=$(printf '%0100d' 0)
printf '{"%s":1,"model_type":"gpt2","x":"%s"}' "$long" "$long" > "$to/config/long"
printf '{"%s":1,"format":"%s"}' "$long" "$long" > "$to/manifest/long"
printf '[1,-2.5e3,true,null,{"a":[],"b":{}},"\\u00e9\\ud83d\\ude00\\n"]' > "$to/json/hand"

# GPT-2's vocabulary, the first tokens of it: the whole is longer than an input gets.
printf '#version: 0.2\n\304\240 t\n\304\240 a\nh e\ni n\n\304\240t he\n' > "$to/bpe_merges/merges"
{ le32 20240328 2 50257 50256; zeros 1008; printf '\1!\1"\1#\2 t\4 the'; } > "$to/bpe_tokens/tokens"
printf "It's  12 o'clock, they'll:\n\n\t\303\251t\303\251 \342\200\211\360\237\230\200 aaaa\377" \
    > "$to/bpe_encode/text"

printf -- '-e\nl4h4c128t64\n-b\n8\n--lr=3e-4\n--plan\n--gpu-mem\n16GiB\n-r\nblock:2\n' \
    > "$to/options/one"
printf -- '--schedule\nwsd\n--offload=moments,master\n-w\n1\n-o\nout\n-y\n1\n-n\n5' \
    > "$to/options/two"
cp "$to"/options/* "$to/plan/"
printf -- '-e\nl2h4c128t64\n-b\n8\n--plan\n--gpu\nh100\n-r\nblock:2\n' > "$to/plan/gpu"
printf 16GiB > "$to/sizes/gib"
printf 1e9 > "$to/sizes/real"
printf '\3abcdefg\0\100%s' "$header$header" > "$to/sha256/pieces"
