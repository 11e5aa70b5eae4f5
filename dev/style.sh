#!/usr/bin/env bash
# Checks the layout and style of the sources: `make style`. With the argument `main`, as in
# `make test`: the layout (dev/check/layout.py) and the shell scripts; with `rest`, as added by
# ALL=1: compilers and lint; without an argument: both.
# One line per check, `style  NAME  ok|FAILED|skipped (why)`, followed by the errors found; the last
# line is `N passed, N failed, N skipped`. Exit status 1 on any failure. CC, CXX, MARCH, OMP, MAKE,
# CUDA_INCLUDE and CUDA_HEADERS (empty: not installed) are set by make.
# shellcheck disable=SC2086  # flags are lists of words
set -u
shopt -s lastpipe    # so that `verdict` at the end of a pipe counts in this shell
cd "$(dirname "$0")/.." || exit 1
mkdir -p build
CC=${CC:-gcc} CXX=${CXX:-g++} MARCH=${MARCH--march=native} OMP=${OMP--fopenmp}
part=${1:-main rest}
passed=0 failed=0 skipped=0
scratch=$(mktemp -d build/style.XXXXXX) || exit 1
trap 'rm -rf "$scratch"' EXIT

ok() { passed=$((passed + 1)) && printf 'style  %-38s ok%s\n' "$1" "${2:+  ($2)}"; }
skip() { skipped=$((skipped + 1)) && printf 'style  %-38s skipped (%s)\n' "$1" "$2"; }
fail() { failed=$((failed + 1)) && printf 'style  %-38s FAILED\n' "$1"; }

# verdict NAME: ok if standard input is empty, otherwise FAILED and its first lines.
verdict() {
    local found
    found=$(cat)
    if [ -z "$found" ]; then
        ok "$1"
    else
        fail "$1"
        printf '%s\n' "$found" | head -n 12 | sed 's/^/         /'
        [ "$(printf '%s\n' "$found" | wc -l)" -le 12 ] || echo "         ..."
    fi
}

# builds NAME COMMAND...: ok if the command succeeds, otherwise FAILED and its output.
builds() {
    local name=$1
    shift
    if "$@" > "$scratch/out" 2>&1; then
        ok "$name"
    else
        { cat "$scratch/out"; echo "command: $*"; } | verdict "$name"
    fi
}

# --- Layout ---------------------------------------------------------------------------------------

# Files allowed at the top level, besides those that git ignores or does not track.
top_level() {
    local known='train_gpt2\.cu?|test_gpt2\.cu|Makefile|README\.md|LICENSE|data|dev'
    if git rev-parse --is-inside-work-tree > /dev/null 2>&1; then
        git ls-files | cut -d/ -f1 | sort -u |
            grep -vxE "$known|\.gitignore|\.ci|\.github|\.clang-(tidy|format)" |
            sed 's/$/: not a file of the top level/'
    fi
}

layout() {
    if ! command -v python3 > /dev/null; then
        skip "layout" "no python3"
    elif git rev-parse --is-inside-work-tree > /dev/null 2>&1; then
        dev/check/layout.py --self-test | grep -v ' 0 failed' | verdict "layout: seeded faults"
        dev/check/layout.py | grep -v '^[0-9]* passed' | verdict "layout"
        dev/check/mutations.py --check | grep -v ' 0 failed' | verdict "mutations apply"
    fi
    top_level | verdict "top level"
    # A folder next to the clone belongs to the machine; only .ci/run may refer to one.
    if git rev-parse --is-inside-work-tree > /dev/null 2>&1; then
        git grep -nF '../shared' -- . ':!.ci/run' ':!dev/style.sh' |
            verdict "no folder outside the clone"
    fi
    if command -v shellcheck > /dev/null; then
        # SC2319, since 0.10: `verdict NAME $?` after a condition is meant.
        shellcheck -S warning -e SC2319 data/*.sh dev/*.sh dev/*/*.sh .ci/run |
            verdict "shellcheck"
    else
        skip "shellcheck" "no shellcheck"
    fi
}

finish() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
}

[[ $part != *main* ]] || layout
[[ $part = *rest* ]] || finish

# --- Compilers and lint ---------------------------------------------------------------------------

# The slow checks start now, and their results are read at the end.
if [ -f train_gpt2.c ]; then
    defines=(-DGPT2_DOUBLE=0)
    if command -v clang-tidy > /dev/null; then
        {
            clang-tidy --quiet train_gpt2.c data/{tokenize,stories}.c -- -std=c11 "${defines[@]}"
            # The analyzer would take minutes.
            [ -z "${CUDA_HEADERS:-}" ] || clang-tidy --quiet --checks='-clang-analyzer-*' \
                train_gpt2.cu -- -x c++ -std=c++17 -Idev/cuda_cpu ${CUDA_INCLUDE:-}
        } > "$scratch/tidy" 2> /dev/null &
    fi
    if command -v cppcheck > /dev/null; then
        cppcheck --quiet --std=c11 --language=c --enable=warning,portability --inline-suppr \
            --suppress=missingIncludeSystem --max-configs=1 "${defines[@]}" train_gpt2.c \
            2> "$scratch/cppcheck" > /dev/null &
    fi
fi

warnings="-Wall -Wextra -Wundef -Wvla -Werror"
numbers="-ffp-contract=off -fno-math-errno"
as_c="-x c -std=c11 -Wc++-compat"
as_cpp="-x c++ -std=c++17 -Wno-missing-field-initializers"

# The packed matmul is the only code with contraction: without fused multiply-adds it would lose
# half of the machine's peak, and no test of values would notice.
fused() {
    local count
    count=$(objdump -d "$2" | grep -c 'vfn*m[a-z]*[0-9]*p[sd]')
    if [ "$count" -ge 8 ]; then
        ok "$1" "$count vfmadd"
    else
        echo "$count packed vfmadd in the object" | verdict "$1"
    fi
}

# compilers NAME C C++: compiles train_gpt2.c with one family of compilers.
compilers() {
    if ! command -v "$2" > /dev/null; then
        skip "$1: C11, C++17, FMA" "no $2"
        return
    fi
    local omp=
    echo 'int x;' | "$2" -fopenmp -include omp.h -fsyntax-only -x c - 2> /dev/null && omp=-fopenmp
    builds "$1: C11" "$2" $as_c -O3 $MARCH $numbers ${omp:--Wno-unknown-pragmas} $warnings \
        -c train_gpt2.c -o "$scratch/$1.o"
    if [ "$(uname -m)" != x86_64 ] || ! grep -qw fma /proc/cpuinfo; then
        skip "$1: FMA in the matmul" "not x86-64 with FMA"
    elif [ -f "$scratch/$1.o" ]; then
        fused "$1: FMA in the matmul" "$scratch/$1.o"
    fi
    if [ "$(uname -m)" = x86_64 ]; then
        builds "$1: C11, x86-64 without AVX or OpenMP" "$2" $as_c -O1 -march=x86-64 $numbers \
            -Wno-unknown-pragmas $warnings -c train_gpt2.c -o "$scratch/$1-plain.o"
    fi
    if command -v "$3" > /dev/null; then
        builds "$1: C++17" "$3" $as_cpp $MARCH ${omp:--Wno-unknown-pragmas} $warnings \
            -fsyntax-only train_gpt2.c
        builds "$1: C++17, data/tokenize.c" "$3" $as_cpp $MARCH $omp $warnings \
            -Wno-unknown-pragmas -Wno-unused-function -fsyntax-only data/tokenize.c
    else
        skip "$1: C++17" "no $3"
    fi
}

if [ -f train_gpt2.c ]; then
    compilers gcc gcc g++
    compilers clang clang clang++
    builds "in double" "$CC" $as_c $MARCH $OMP $warnings -Wno-unknown-pragmas -DGPT2_DOUBLE=1 \
        -fsyntax-only train_gpt2.c
    if command -v aarch64-linux-gnu-gcc > /dev/null; then
        builds "gcc: C11, aarch64" aarch64-linux-gnu-gcc $as_c -O1 $numbers -fopenmp $warnings \
            -c train_gpt2.c -o "$scratch/aarch64.o"
    else
        skip "gcc: C11, aarch64" "no aarch64-linux-gnu-gcc"
    fi
    builds "make one" "${MAKE:-make}" -s one
    builds "one file: C" "$CC" $as_c -O1 $MARCH $OMP $warnings -Wno-unknown-pragmas \
        build/train_gpt2_one.c -o "$scratch/one" -lm
    if [ -n "${CUDA_HEADERS:-}" ] && [ -f train_gpt2.cu ]; then
        builds "one file: CUDA" "$CXX" $as_cpp $MARCH $OMP $warnings -Wno-unknown-pragmas \
            -Wno-unused-function -Idev/cuda_cpu ${CUDA_INCLUDE:-} -fsyntax-only \
            build/train_gpt2_one.cu
    else
        skip "one file: CUDA" "no CUDA headers"
    fi
    # Each of these is a program; those of dev/ include train_gpt2.c.
    for file in data/{stories,tokenize}.c dev/bench/*.c dev/check/dump.c dev/fuzz/fuzz.c; do
        [ -f "$file" ] && builds "$file" "$CC" $as_c $MARCH $OMP $warnings -Wno-unknown-pragmas \
            -Wno-unused-function -fsyntax-only "$file"
    done
fi
wait
for tool in clang-tidy cppcheck; do
    if ! command -v $tool > /dev/null; then
        skip $tool "no $tool"
    elif [ -f "$scratch/${tool#clang-}" ]; then
        grep -E '(error|warning|portability):' "$scratch/${tool#clang-}" | verdict $tool
    fi
done

finish
