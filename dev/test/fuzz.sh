#!/usr/bin/env bash
# Runs the fuzz targets. `run.sh SECONDS` runs each for that long (`make fuzz`), in as many
# processes as there are cores. It starts from corpus.tar.xz, which has the coverage of long runs
# (libFuzzer: -set_cover_merge=1) and contains every input that once crashed a reader. Findings are
# written to build/found/ and make the exit status 1.
# `run.sh replay PROGRAM` (part of `make test`) runs each target of build/fuzz_replay or
# build/fuzz_tokenize_replay on some files of the corpus (on all with ALL=1): unchanged, truncated,
# and with single bytes changed, without libFuzzer. Last line: N passed, N failed, N skipped.
set -u
cd "$(dirname "$0")/../.." || exit 1
export OMP_NUM_THREADS=1
mkdir -p build/found build/logs build/corpus
tar -C build/corpus -xJkf dev/test/fuzz_corpus.tar.xz 2> /dev/null    # keeps existing files
programs=${2-} log=build/logs/${2+${2##*/}_}all    # replays may run concurrently
[ "$1" = replay ] || programs="build/fuzz build/fuzz_tokenize"
pairs=$(for program in $programs; do    # without a target, the program lists them all
    env -u FUZZ_TARGET "$program" -artifact_prefix=build/ 2> /dev/null | grep -x '[a-z0-9_]*' |
        sed "s|^|$program |"
done)

# one PROGRAM TARGET SECONDS
one() {
    local program=$1 log=build/logs/fuzz_$2
    shift
    mkdir -p build/corpus/"$1"
    if [ "$2" = replay ]; then
        # One file in twenty, and all handmade inputs, whose names are not hashes.
        # shellcheck disable=SC2046  # names without spaces
        "$program" "$1" $(printf '%s\n' build/corpus/"$1"/* |
            awk -F / -v part="${ALL:-main}" 'part != "main" || NR % 20 == 1 || length($NF) != 40'
        ) > "$log" 2>&1
    else
        FUZZ_TARGET=$1 "$program" -max_total_time="$2" -max_len=16384 -timeout=60 \
            -rss_limit_mb=2048 -print_final_stats=1 \
            -artifact_prefix=build/found/"$1"- build/corpus/"$1" > "$log" 2>&1
    fi || { echo "fuzz  $1  FAILED" && tail -n 40 "$log" && return 1; }
    echo "fuzz  $1  $(grep -aoE 'cov: [0-9]+|[0-9]+ inputs|executed_units: [0-9]+' "$log" |
        tail -n 2 | tr '\n' ' ') ok"
}
export -f one
echo "$pairs" | xargs -P "$(nproc)" -I{} bash -c 'one {} '"$1" | tee "$log"
passed=$(grep -c ' ok$' "$log")
failed=$(($(echo "$pairs" | wc -l) - passed))
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
