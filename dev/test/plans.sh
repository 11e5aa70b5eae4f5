#!/usr/bin/env bash
# Compares the plans of another build of the CPU program with those of ./train_gpt2, byte for byte:
# the output of --plan and of --plan --json, the message of a refusal, and the exit status.
#
#   dev/test/plans.sh build/plan_32        a build with 32-bit pointers
#
# The settings are drawn; SEED=N draws others, which a failure names. Last line `N passed, N failed,
# N skipped`.
set -u
cd "$(dirname "$0")/../.." || exit 1
program=$PWD/${1?}
scratch=$(mktemp -d build/plans.XXXXXX) || exit 1
trap 'rm -rf "$scratch"' EXIT
. dev/test/verdicts.sh plans
SEED=${SEED-1}
DRAWS=${DRAWS-40}

# draws: prints the options of one plan a line. Most of the drawn combinations are valid.
draws() {
    awk -v seed="$SEED" -v count=$DRAWS '
    function pick(list,  n, word) { n = split(list, word, " "); return word[1 + int(rand() * n)] }
    function maybe(share, text) { return rand() < share ? " " text : "" }
    BEGIN {
        srand(seed)
        for (i = 0; i < count; i++) {
            model = pick("gpt2 d24 gpt2-large gpt2-xl gpt2-xl shape")
            if (model == "shape") {
                head = pick("16 32 64 80 128")
                heads = 1 + int(rand() * 40)
                model = "l" (1 + int(rand() * 96)) "h" heads "c" head * heads "t" \
                    pick("128 1000 1024 4096")
            }
            batch = pick("1 2 3 4 8 12 16 32")
            card = pick("t4 4060ti 4090 a100 h100 any any")
            line = "-e " model " -b " batch maybe(0.3, "-t " pick("64 100 128"))
            line = line (card == "any" ? " --gpu-mem " pick("2.5GiB 12GiB 15.5GiB 40GiB 300GiB") \
                : " --gpu " card)
            many = rand() < 0.3
            if (many) {
                line = line " --gpus " pick("2 3 8 64") " -z " pick("0 1 2 3")
            }
            line = line maybe(0.2, "--dtype " pick("fp16 fp32 bf16")) \
                maybe(0.3, "--moments bf16") maybe(0.2, "-w none") \
                maybe(0.2, "--grad-dtype fp32") maybe(0.2, "--logit-rows " pick("64 128 1000")) \
                maybe(0.2, "--workspace " pick("256 16MiB 300MiB")) \
                maybe(0.4, "-r " pick("none gelu norm mlp qkv block block:1 qkv:1,gelu")) \
                maybe(0.3, "--offload " pick(many ? "none moments master,moments residuals" : \
                    "none moments gradients weights,gradients,moments,residuals"))
            print line
        }
    }'
}

# answer PROGRAM FILE OPTION...: writes what the program says and its exit status into FILE.
answer() {
    local program=$1 file=$2
    shift 2
    "$program" "$@" > "$file" 2>&1
    echo "status $?" >> "$file"
}

draws > "$scratch/draws"
differ='' planned=0 large=0
while read -r -a options; do
    for how in --plan "--plan --json"; do
        # shellcheck disable=SC2086  # two words
        answer ./train_gpt2 "$scratch/native" "${options[@]}" $how
        # shellcheck disable=SC2086
        answer "$program" "$scratch/other" "${options[@]}" $how
        sed -i "s|^train_gpt2: |plan: |; s|$program|PROGRAM|; s|\./train_gpt2|PROGRAM|" \
            "$scratch/native" "$scratch/other"
        cmp -s "$scratch/native" "$scratch/other" ||
            differ+="; ${options[*]} $how: $(diff "$scratch/native" "$scratch/other" | sed -n 2p)"
    done
    ! grep -q '^{"target":"gpu"' "$scratch/native" || planned=$((planned + 1))
    ! grep -Eq '"bytes":[0-9]{10}' "$scratch/native" || large=$((large + 1))
done < "$scratch/draws"
[ -z "$differ" ]
verdict "$DRAWS drawn plans equal those of ${program##*/}" $? "SEED=$SEED${differ:0:1000}"
[ $planned -ge $((DRAWS * 3 / 4)) ] && [ $large -ge 5 ]
verdict "most drawn settings are valid, some have buffers of 1 GB or more" $? \
    "SEED=$SEED: $planned plans, $large with such buffers"

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
