#!/usr/bin/env bash
# `make style`: checks the layout and style of the sources. With the argument `main`, as in `make
# test`, it checks the layout (dev/check/layout.py) and the shell scripts; with `rest`, which ALL=1
# adds, it runs compilers and lint; without an argument, it does both.
# One line per check, `style  NAME  ok|FAILED|skipped (why)`, followed by the errors found; the last
# line is `N passed, N failed, N skipped`. Exit status 1 on any failure. CC, CXX, MARCH, OMP, MAKE,
# CUDA_INCLUDE and CUDA_HEADERS (empty: not installed) are set by make.
# shellcheck disable=SC2086  # flags are lists of words
set -u
cd "$(dirname "$0")/.." || exit 1
mkdir -p build
CC=${CC:-gcc} CXX=${CXX:-g++} MARCH=${MARCH--march=native} OMP=${OMP--fopenmp}
part=${1:-main rest}
passed=0 failed=0 skipped=0
scratch=$(mktemp -d build/style.XXXXXX) || exit 1
trap 'rm -rf "$scratch"' EXIT

# check NAME COMMAND...: ok if the command succeeds with no output; skipped if it is not installed.
check() {
    local name=$1 out=$scratch/out
    shift
    if ! command -v "$1" > /dev/null; then
        skipped=$((skipped + 1))
        printf 'style  %-38s skipped (no %s)\n' "$name" "$1"
    elif "$@" > "$out" 2>&1 && [ ! -s "$out" ]; then
        passed=$((passed + 1))
        printf 'style  %-38s ok\n' "$name"
    else
        failed=$((failed + 1))
        printf 'style  %-38s FAILED\n' "$name"
        { head -n 12 "$out"; echo "command: $*"; } | sed 's/^/         /'
    fi
}

# Files allowed at the top level, besides those that git ignores or does not track.
top_level() {
    local known='train_gpt2\.cu?|test_gpt2\.cu|Makefile|README\.md|LICENSE|data|dev'
    ! git ls-files | cut -d/ -f1 | sort -u |
        grep -vxE "$known|\.gitignore|\.gitattributes|\.ci|\.github|\.clang-(tidy|format)"
}

# Folders next to the clone differ between machines; only .ci/run may refer to one.
outside() { ! git grep -nF '../shared' -- . ':!.ci/run' ':!dev/style.sh'; }

# python COMMAND...: prints a script's output only if it fails.
python() {
    "$@" > "$scratch/said" || cat "$scratch/said"
}

if [[ $part = *main* ]]; then
    if command -v python3 > /dev/null && git rev-parse --git-dir > /dev/null 2>&1; then
        check "layout" python dev/check/layout.py
        check "mutations apply" python dev/check/mutations.py --check
        check "top level" top_level
        check "no folder outside the clone" outside
    fi
    # SC2319 (since 0.10): `verdict NAME $?` after a condition is intended.
    check "shell scripts" shellcheck -S warning -e SC2319 data/*.sh dev/*.sh dev/*/*.sh .ci/run
fi

# Only the packed matmul is compiled with contraction. Without fused multiply-adds it would reach
# half of the machine's peak at most, and no test of its results would notice.
fused() {
    [ "$(objdump -d "$1" | grep -c 'vfn*m[a-z]*[0-9]*p[sd]')" -ge 8 ] || echo "no packed vfmadd"
}

# The analyzer would take minutes on the .cu.
tidy() {
    {
        clang-tidy --quiet train_gpt2.c data/{tokenize,stories}.c -- -std=c11 -DGPT2_DOUBLE=0
        [ -z "${CUDA_HEADERS:-}" ] || clang-tidy --quiet --checks='-clang-analyzer-*' \
            train_gpt2.cu -- -x c++ -std=c++17 -Idev/cuda_cpu ${CUDA_INCLUDE:-}
    } 2> /dev/null | grep -E '(error|warning):'
}

if [[ $part = *rest* ]]; then
    tidy > "$scratch/tidy" &    # the slowest check
    warnings="-Wall -Wextra -Wundef -Wvla -Werror -Wno-unknown-pragmas"
    numbers="-ffp-contract=off -fno-math-errno"
    as_c="-x c -std=c11 -Wc++-compat"
    as_cpp="-x c++ -std=c++17 -Wno-missing-field-initializers -Wno-unused-function"
    for family in "gcc g++" "clang clang++"; do
        read -r c cpp <<< "$family"
        omp=
        echo 'int x;' | $c -fopenmp -include omp.h -fsyntax-only -x c - 2> /dev/null && omp=-fopenmp
        check "$c: C11" $c $as_c -O3 $MARCH $numbers $omp $warnings -c train_gpt2.c \
            -o "$scratch/$c.o"
        if [ "$(uname -m)" = x86_64 ]; then
            grep -qw fma /proc/cpuinfo && [ -f "$scratch/$c.o" ] &&
                check "$c: FMA in the matmul" fused "$scratch/$c.o"
            check "$c: C11, x86-64 without AVX or OpenMP" $c $as_c -O1 -march=x86-64 $numbers \
                $warnings -c train_gpt2.c -o "$scratch/plain.o"
        fi
        for file in train_gpt2.c data/tokenize.c; do
            check "$cpp: C++17, $file" $cpp $warnings $as_cpp $MARCH $omp -fsyntax-only $file
        done
    done
    check "in double" "$CC" $as_c $MARCH $OMP $warnings -DGPT2_DOUBLE=1 -fsyntax-only train_gpt2.c
    check "aarch64: C11" aarch64-linux-gnu-gcc $as_c -O1 $numbers -fopenmp $warnings \
        -c train_gpt2.c -o "$scratch/aarch64.o"
    ${MAKE:-make} -s one
    check "one file: C" "$CC" $as_c -O1 $MARCH $OMP $warnings build/train_gpt2_one.c \
        -o "$scratch/one" -lm
    [ -z "${CUDA_HEADERS:-}" ] || check "one file: CUDA" "$CXX" $as_cpp $MARCH $OMP $warnings \
        -Idev/cuda_cpu $CUDA_INCLUDE -fsyntax-only build/train_gpt2_one.cu
    # Each of these is a program; those of dev/ include train_gpt2.c.
    for file in data/{stories,tokenize}.c dev/test/fuzz.c; do
        check "$file" "$CC" $as_c $MARCH $OMP $warnings -Wno-unused-function -fsyntax-only "$file"
    done
    check "cppcheck" cppcheck --quiet --std=c11 --language=c --enable=warning,portability \
        --inline-suppr --suppress=missingIncludeSystem --max-configs=1 -DGPT2_DOUBLE=0 train_gpt2.c
    wait
    command -v clang-tidy > /dev/null && check "clang-tidy" cat "$scratch/tidy"
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
