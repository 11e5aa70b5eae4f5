#!/usr/bin/env bash
# Runs the example with three seeds: the race must be detected, and the fixed kernel must pass.
# PROGRAM is the built example.cu. The last line is `N passed, N failed, N skipped`.
#   dev/cuda_cpu/example.sh PROGRAM
set -u
passed=0 failed=0

# expect STATUS SEED KERNEL: runs the example once and checks its exit status.
expect() {
    local text status result=ok
    text=$(EMU_SEED=$2 "$program" "$3" 2>&1)
    status=$?
    if [ $status -eq "$1" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1)) result="FAILED (exit status $status)"
    fi
    printf 'example  EMU_SEED=%s %-6s %-45s %s\n' "$2" "$3" "$text" "$result"
}

program=${1:?"the built example"}
for seed in 1 2 3; do
    expect 1 $seed race
    expect 0 $seed fixed
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
