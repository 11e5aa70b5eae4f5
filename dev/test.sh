#!/usr/bin/env bash
# Every test this machine can run: `make test`. Style first, then the programs; each prints as its
# last line `N passed, N failed, N skipped`, and the last line here is their sum. Exit status 1 on
# any failure. MAKE, CC, CXX and SAN (empty: no sanitizers) come from make.
set -u
cd "$(dirname "$0")/.." || exit 1
MAKE=${MAKE:-make}
passed=0 failed=0 skipped=0
mkdir -p build
log=$(mktemp build/test.XXXXXX) || exit 1
trap 'rm -f "$log"' EXIT

# run NAME COMMAND...: adds up the counts of its last line; a program that ends without one, or
# badly although it counted no failure, is a failure itself.
run() {
    local name=$1 status counts
    shift
    printf '\n=== %s\n' "$name"
    "$@" 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    counts=$(tail -n 1 "$log" | grep -xE '[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped' |
        tr -cd '0-9 ')
    # shellcheck disable=SC2086  # three words
    set -- ${counts:-0 0 0}
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
    if [ -z "$counts" ] || { [ "$status" -ne 0 ] && [ "$2" -eq 0 ]; }; then
        echo "$name: FAILED (exit status $status${counts:+, though no test failed})"
        failed=$((failed + 1))
    fi
}

# build TARGET...: status 1, and a failure, when it does not build.
build() {
    $MAKE -s "$@" && return
    echo "$*: FAILED (does not build)"
    failed=$((failed + 1))
    return 1
}

skip() {
    printf '\n=== %s\n%s: skipped (%s)\n' "$1" "$1" "$2"
    skipped=$((skipped + 1))
}

run style dev/style.sh
programs="test_gpt2 test_gpt2_double test_gpt2_asan"

# Everything at once on all cores, in silence; what fails is built again below, aloud.
jobs=-j$(nproc)
[[ ${MAKEFLAGS:-} =~ (^| )-j ]] && jobs=
# shellcheck disable=SC2086  # words
$MAKE -s -k $jobs train_gpt2 data/tokenize $programs > /dev/null 2>&1

build train_gpt2 data/tokenize && run tools dev/test_tools.sh
for program in $programs; do
    if [ ! -f test_gpt2.cu ]; then
        skip $program "no test_gpt2.cu"
    elif [ $program = test_gpt2_asan ] && [ -z "${SAN-yes}" ]; then
        skip $program "${CXX:-the compiler} has no sanitizers"
    else
        build build/$program && run $program build/$program
    fi
done

echo
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
