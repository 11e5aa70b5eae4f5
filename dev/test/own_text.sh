#!/usr/bin/env bash
# Runs dev/recipes/own_text.sh to its end on tinyshakespeare, as `make test FULL=1` does: five to
# ten minutes on two cores. The last validation loss, per byte of the text, must be at most BOUND.
# One line per test, last line `N passed, N failed, N skipped`.
set -u
cd "$(dirname "$0")/../.." || exit 1
BOUND=1.6    # nats per byte; dev/manual.md has the loss that was reached
mkdir -p build
scratch=$(mktemp -d build/own_text.XXXXXX) || exit 1
trap 'rm -rf "$scratch"' EXIT
. dev/test/verdicts.sh own_text
text=${DATA_MIRROR:-data}/tinyshakespeare.txt
if [ -f "$text" ]; then
    mkdir "$scratch"/{data,dev}
    cp -r train_gpt2 data/tokenize dev/recipes "$scratch"
    mv "$scratch/tokenize" "$scratch/data/" && mv "$scratch/recipes" "$scratch/dev/"
    cp "$text" "$scratch/play.txt"
    said=$("$scratch/dev/recipes/own_text.sh" "$scratch/play.txt" train 2>&1)
    verdict "the recipe ends" $? "$(tail -n 3 <<< "$said")"
    loss=$(sed -n 's/^.*validation loss //p' <<< "$said" | tail -n 1)
    tokens=$(od -An -td4 -j8 -N4 "$scratch/data/play_4096_val.bin")
    bytes=$(($(wc -c < "$text") / 10))    # that validate
    per_byte=$(awk "BEGIN { print ${loss:-99} * $tokens / $bytes }")
    awk "BEGIN { exit !($per_byte <= $BOUND) }"
    verdict "$per_byte nats per byte, at most $BOUND" $? "validation loss ${loss:-none}"
else
    skip "own_text.sh" "neither DATA_MIRROR nor data/ has tinyshakespeare.txt"
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
