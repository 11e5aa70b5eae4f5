#!/usr/bin/env bash
# `make test`: builds and runs the tests. ALL=1 adds sanitizers, GPUs without bf16, kernels for
# other GPUs, other compilers, lint, and the tests marked `all`; ALL=main and ALL=rest run only one
# part. FULL=1 is ALL=1 plus long tests, and tests every combination instead of a sample.
#
# dev/test/conftest.py says how to run single tests. Without pytest only the unit programs run. The
# last line is `N passed, N failed, N skipped`; the exit status is 1 if any failed. make sets MAKE,
# SAN (empty: no sanitizers), M32 (empty: no 32-bit programs), NVCC, CUDA_HEADERS and GPU (empty:
# none); with BUILD_ONLY=yes nothing is run.
set -u
cd "$(dirname "$0")/.." || exit 1
is_set() { [ -n "$1" ] && [ "$1" != 0 ]; }
part=main
! is_set "${ALL-}${FULL-}" || part=all
case ${ALL-} in main | rest) part=$ALL ;; esac
log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
failed=0 skipped=0 targets=

# add "WHAT IT NEEDS" HAS TARGET...: adds targets to build if HAS is not empty; else reports a skip.
add() {
    if [ -n "$2" ]; then
        targets+=" ${*:3}"
    else
        echo "skipped (no $1): ${*:3}"
        skipped=$((skipped + $# - 2))
    fi
}

cuda=${CUDA_HEADERS-} page=$(command -v emcc > /dev/null && command -v chromium)
add - yes train_gpt2 data/tokenize data/stories
add "CUDA headers" "$cuda" train_gpt2cu_cpu
if [ "$part" != rest ]; then
    add - yes build/{test_gpt2,test_gpt2_double,fuzz_replay} build/test/data
    add "CUDA headers" "$cuda" build/{test_gpt2cu_cpu,test_cuda_cpu}
    add "32-bit libraries (gcc-multilib)" "${M32-}" build/plan_32
    add "emcc or chromium" "$page" build/plan.html
    add nvcc "${NVCC-}" build/sm_80.log build/sm_90a.log
    add GPU "${GPU-}" train_gpt2cu build/test_gpt2cu
fi
if [ "$part" != main ]; then
    add sanitizers "${SAN-yes}" build/{test_gpt2_asan,train_gpt2_asan} build/test/data_asan
    add "sanitizers or CUDA headers" "${SAN-yes}$cuda" \
        build/{test_gpt2cu_cpu,train_gpt2cu_cpu,test_cuda_cpu}_asan
    add - yes build/{train_gpt2_double,fuzz_tokenize_replay}
    add AVX2 "$(grep -om 1 avx2 /proc/cpuinfo)" build/test_gpt2_avx2
    add "CUDA headers" "$cuda" build/bench_cuda_cpu build/test_gpt2cu_cpu
    add nvcc "${NVCC-}" build/sm_{75,89,100,120}.log build/test_gpt2cu
fi
jobs=-j$(nproc)
[[ ${MAKEFLAGS:-} =~ (^| )-j ]] && jobs=    # the calling make has set the number of jobs
# shellcheck disable=SC2086  # words
if ! ${MAKE:-make} -s -k $jobs $targets; then
    echo "FAILED: not all programs build"
    failed=1
fi

# run PROGRAM...: runs it and appends the last line of its output, the counts, to the log.
run() {
    printf '\n=== %s\n' "$*"
    "$@" 2>&1 | tee "$log.one"
    grep -xE '[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped' "$log.one" | tail -n 1 >> "$log" ||
        echo "0 passed, 1 failed, 0 skipped" >> "$log"
    rm -f "$log.one"
}

python=
for name in ${PYTHON:-python3 /usr/bin/python3}; do
    ! "$name" -c "import pytest, xdist" 2> /dev/null || python=${python:-$name}
done
tests() { run "$python" -m pytest -q -n "$(nproc)" -rfEs --durations=10 "$@"; }
programs() { run env ALL=main "$python" -m pytest -q -n "$(nproc)" -rfEs "$@"; }

if [ -n "${BUILD_ONLY-}" ]; then
    :
elif [ -z "$python" ]; then
    for program in $targets; do
        [[ ! $program =~ test_gpt2|test_cuda|test/data ]] || run "$program"
    done
    for file in dev/test/test_*.py; do
        echo "$file: skipped (no pytest: dev/deps.sh test)"
        skipped=$((skipped + 1))
    done
else
    cd dev/test || exit 1
    ALL=$part tests .
    [ -z "${GPU-}" ] || tests test_gpu_program.py --gpu-program=train_gpt2cu
    if [ "$part" != main ] && [ -x ../../build/train_gpt2_asan ]; then
        programs test_{options,checkpoints,interrupts,evaluate,generate,model_files}.py \
            --program=build/train_gpt2_asan
        programs test_training.py -k "overfit or offload" --program=build/train_gpt2_asan
        programs test_gpu_program.py -k "refused or unsuitable or start or eval or check" \
            --gpu-program=build/train_gpt2cu_cpu_asan
    fi
    if [ "$part" != main ]; then
        programs test_training.py -k overfit --program=build/train_gpt2_double
        EMU_CC=75 programs test_gpu_program.py -k fp16
        EMU_CC=75 programs test_units.py -k "gpt2cu_cpu-gpu_steps or gpt2cu_cpu-gpu_gradients_16"
    fi
fi
awk -v failed=$failed -v skipped=$skipped '
    { passed += $1; failed += $3; skipped += $5 }
    END { printf "\n%d passed, %d failed, %d skipped\n", passed, failed, skipped
        exit failed > 0 }' "$log"
