#!/usr/bin/env bash
# seeds.sh TARGET...: writes the seeds of all targets to build/seeds/: files that the program itself
# writes for the smallest models and texts, and hand-made files for formats that it only reads. The
# TARGETs get a folder even if there are no seeds for them.
set -eu
cd "$(dirname "$0")/../.."
to=$PWD/build/seeds
program=$PWD/train_gpt2
tokenize=$PWD/data/tokenize
for target in "$@" weights safetensors state config json manifest log shard llmc eval bpe_merges \
    bpe_tokens bpe_encode options plan sizes sha256 speed bpe_train progress matmul kernels library
do
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

# llm.c models with one layer, head, channel and position; 156 parameters.
for version in 3 5; do
    { le32 20240326 $version 1 1 1 1 1 128; zeros $((992 + 156 * (version == 3 ? 4 : 2))); } \
        > "$to/llmc/$version"
done
# llm.c multiple-choice files: two examples, the second with two completions.
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
# Texts longer than any that a reader stores.
long=$(printf '%0100d' 0)
printf '{"%s":1,"model_type":"gpt2","x":"%s"}' "$long" "$long" > "$to/config/long"
printf '{"%s":1,"format":"%s"}' "$long" "$long" > "$to/manifest/long"
printf '[1,-2.5e3,true,null,{"a":[],"b":{}},"\\u00e9\\ud83d\\ude00\\n"]' > "$to/json/hand"

# The first tokens of GPT-2's vocabulary: the whole exceeds the size of an input.
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
printf -- '-e\nl6h4c128t64\n--plan\n--gpu\nh100\n--gpus=8\n-z\n3\n--offload=weights,residuals\n' \
    > "$to/plan/ranks"
# What runs on this machine have measured, and texts whose merges are learned.
printf 'GPU: C 4\t%s\nother\t1\n' "$(seq -s' ' 1 60 | sed 's/ / .5 /g')" > "$to/speed/long"
for n in 20 24 28 32 36 40; do
    printf 'GPU: C 4\t%s\n' "$(seq -s' ' 1 $n)" > "$to/speed/$n"
done
key='8x16x24:01100:14>14=h'
printf 'GPU, 2 SMs| 8x8x8:00000:0>0=h0 %s0123456789abcdef\n' "$key" > "$to/matmul/choice"
printf 'GPU, 2 SMs| %s0123456789abcde\nGPU, 2 SMs| %s-0x' "$key" "$key" > "$to/matmul/short"
printf 'GPU, 2 SMs| %s-123456789abcdef\n' "$key" > "$to/matmul/sign"    # was accepted
for verdict in 'right 1.432' 'wrong: bits' 'hung: no answer in 60 s' 'right 1e7'; do
    for kernel in forward dq dkv; do
        printf 'GPU| %s:64,128,12,4=wgmma %s\n' "$kernel" "$verdict"
    done
done > "$to/kernels/verdicts"
printf 'GPU| dq:64,128,12,4=wgmma right 0.%080d1\n' 0 > "$to/kernels/long"
printf 'Emulated, 2 SMs, cuBLASLt 130100\t123456789\nx\t99999999999999999999\n' \
    > "$to/library/bytes"
printf '\100\037the cat sat on the mat, the cat sat: aaaa aaaaaaaa \303\251t\303\251 12 12' \
    > "$to/bpe_train/text"
{ printf '\100\002'; printf 'a%.0s' {1..600}; printf ' ba ab aba bab%.0s' {1..20}; } \
    > "$to/bpe_train/runs"
printf 'data/tokenize was interrupted\narguments 1234 input 5678\nnext 100 3 1\n%s\n' \
    'train 0 0 val 0 0' > "$to/progress/state"
printf 16GiB > "$to/sizes/gib"
printf 1e9 > "$to/sizes/real"
printf '\3abcdefg\0\100%s' "$header$header" > "$to/sha256/pieces"

# Inputs that once crashed a reader or are designed to: sizes that overflow, values nested too
# deeply, counts that no double can represent, terminal control codes in a name.
tensors() { le32 ${#1} 0; printf '%s' "$1"; zeros "$2"; }    # tensors HEADER BYTES
deep=$(printf '[%.0s' {1..70000})
one='"dtype":"U8","shape":'
printf '\377\377\377\377\377\377\377\377' > "$to/safetensors/length"
tensors '{"a\n\u001b[2J":{"dtype":"X","shape":[],"data_offsets":[0,0]}}' 0 > "$to/safetensors/name"
tensors "{\"a\":$deep" 0 > "$to/safetensors/deep"
tensors "{\"__metadata__\":$deep" 0 > "$to/safetensors/deep_metadata"
tensors "{\"a\":{${one}[8388608,8388609]" 0 > "$to/safetensors/product"
tensors "{\"a\":{${one}[9007199254740993]" 0 > "$to/safetensors/count"
tensors "{\"a\":{${one}[2],\"data_offsets\":[2,0]}}" 2 > "$to/safetensors/backwards"
tensors "{\"a\":{${one}[2],\"data_offsets\":[0,2]},\"b\":{${one}[1],\"data_offsets\":[1,2]}}" 2 \
    > "$to/safetensors/overlap"
tensors "{\"h.99999999999999999999.ln_1.bias\":{${one}[0],\"data_offsets\":[0,0]}}" 0 \
    > "$to/weights/layer"
bytes=$(od -An -tu4 -N4 "$to/state/state")
header=$(tail -c +9 "$to/state/state" | head -c $((bytes)))
for step in 9007199254740992 9007199254740993 99999999999999999999 -1; do
    other=${header/'"step":"1"'/"\"step\":\"$step\""}
    (( (${#other} - ${#header}) % 2 == 0 )) || other+=' '    # the size's parity selects the model
    { le32 ${#other} 0; printf '%s' "$other"; tail -c +$((9 + bytes)) "$to/state/state"; } \
        > "$to/state/step$step"
done
printf '{"n_layer":9007199254740993}' > "$to/config/count"
printf '{"n_layer":1,"n_head":1,"n_embd":1048576,"n_positions":1,"vocab_size":1}' \
    > "$to/config/channels"
{ le32 20240326 3 2147483648 2147483647 400 2147483648 65536 4294967168; zeros 992; } \
    > "$to/llmc/overflow"
printf '{"files":{"config.json":{"bytes":-1}}}' > "$to/manifest/negative"
printf '{"files":%s' "$deep" > "$to/manifest/deep"
{ printf '#version: 0.2\n'; printf 'a%.0s' {1..200}; } > "$to/bpe_merges/long"
printf '#version: 0.2\n%s' "$deep" > "$to/bpe_merges/deep"
zeros 1024 > "$to/bpe_tokens/zeros"
