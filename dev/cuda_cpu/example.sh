#!/usr/bin/env bash
# The example under three seeds: the race is seen, the repaired kernel passes. PROGRAM is what
# example.cu was built to. Last line `N passed, N failed, N skipped`; exit status 1 on a failure.
#   dev/cuda_cpu/example.sh PROGRAM
set -u
passed=0 failed=0

# expect STATUS SEED KERNEL: one run, and the exit status it should have.
expect() {
    local text status verdict=ok
    text=$(EMU_SEED=$2 "$program" "$3" 2>&1)
    status=$?
    if [ $status -eq "$1" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1)) verdict="FAILED (exit status $status)"
    fi
    printf 'example  EMU_SEED=%s %-6s %-45s %s\n' "$2" "$3" "$text" "$verdict"
}

program=${1:?"the built example"}
for seed in 1 2 3; do
    expect 1 $seed race
    expect 0 $seed fixed
done
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
