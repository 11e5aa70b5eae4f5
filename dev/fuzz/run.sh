#!/usr/bin/env bash
# Runs the fuzz targets. `run.sh SECONDS` runs each for that long (`make fuzz`), in as many
# processes as there are cores; findings are written to build/found/, and the exit status is then 1.
# `run.sh replay` (part of `make test`) runs each target once on the seeds, on truncated seeds and
# on seeds with single bytes changed, without libFuzzer. Last line: N passed, N failed, N skipped.
set -u
cd "$(dirname "$0")/../.." || exit 1
export OMP_NUM_THREADS=1
mkdir -p build/found build/logs
targets=$(build/fuzz_replay)
# shellcheck disable=SC2086  # words
dev/fuzz/seeds.sh $targets || exit 1

# one TARGET SECONDS
one() {
    local log=build/logs/fuzz_$1
    mkdir -p build/corpus/"$1"
    if [ "$2" = replay ]; then
        build/fuzz_replay "$1" build/seeds/"$1"/* > "$log" 2>&1
    else
        FUZZ_TARGET=$1 build/fuzz -max_total_time="$2" -max_len=16384 -timeout=60 \
            -rss_limit_mb=2048 -print_final_stats=1 -dict=dev/fuzz/words.dict \
            -artifact_prefix=build/found/"$1"- build/corpus/"$1" build/seeds/"$1" \
            > "$log" 2>&1
    fi || { echo "fuzz  $1  FAILED" && tail -n 40 "$log" && return 1; }
    echo "fuzz  $1  $(grep -aoE 'cov: [0-9]+|[0-9]+ inputs|executed_units: [0-9]+' "$log" |
        tail -n 2 | tr '\n' ' ') ok"
}
export -f one
# shellcheck disable=SC2086
printf '%s\n' $targets | xargs -P "$(nproc)" -I{} bash -c 'one {} '"$1" | tee build/logs/fuzz
passed=$(grep -c ' ok$' build/logs/fuzz)
failed=$(($(echo "$targets" | wc -w) - passed))
echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
