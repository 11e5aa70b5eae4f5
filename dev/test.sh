#!/usr/bin/env bash
# Every test this machine can run: `make test`. Style first, then the programs; each prints as its
# last line `N passed, N failed, N skipped`, and the last line here is their sum. Exit status 1 on
# any failure. MAKE, CC, CXX, SAN (empty: no sanitizers), NVCC, CUDA_HEADERS and GPU (empty: none)
# and TESTS, the programs that run by themselves, come from make; with BUILD_ONLY=yes nothing is
# run.
set -u
cd "$(dirname "$0")/.." || exit 1
export OMP_WAIT_POLICY=passive    # where other work goes on, spinning threads stand in its way
MAKE=${MAKE:-make}
WIDTH=${WIDTH:-2}                 # programs at a time: most use one core
passed=0 failed=0 skipped=0
names=() shown=0                  # what was started, and how many of these are printed
mkdir -p build
logs=$(mktemp -d build/test.XXXXXX) || exit 1
trap 'rm -rf "$logs"' EXIT
# shellcheck disable=SC2046  # numbers
trap 'kill $(jobs -p) 2> /dev/null; exit 130' INT TERM

# run NAME COMMAND...: starts it once fewer than WIDTH are running, and prints what has ended.
run() {
    local log=$logs/${#names[@]}
    [ -z "${BUILD_ONLY-}" ] || [[ $2 = cuda_compile || $2 = skipped ]] || return 0
    while [ "$(jobs -pr | wc -l)" -ge "$WIDTH" ]; do
        wait -n
    done
    names+=("$1")
    shift
    { "$@" > "$log" 2>&1; echo $? > "$log.status"; } &
    show
}

# Prints what has ended, in the order of starting, and adds up the counts of the last lines; a
# program that ends without one, or badly although it counted no failure, is a failure itself. What
# failed is kept for the end, where a log that was cut short still has it.
show() {
    local name log status counts before
    while [ -s "$logs/$shown.status" ]; do
        name=${names[shown]} log=$logs/$shown status=$(< "$logs/$shown.status")
        shown=$((shown + 1)) before=$failed
        printf '\n=== %s\n' "$name"
        cat "$log"
        counts=$(tail -n 1 "$log" | grep -xE '[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped' |
            tr -cd '0-9 ')
        # shellcheck disable=SC2086  # three words
        set -- ${counts:-0 0 0}
        passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
        if [ -z "$counts" ] || { [ "$status" -ne 0 ] && [ "$2" -eq 0 ]; }; then
            echo "$name: FAILED (exit status $status${counts:+, though no test failed})"
            failed=$((failed + 1))
        fi
        if [ "$failed" -gt "$before" ]; then
            { echo "--- $name" && grep -B 5 -A 2 FAILED "$log" || tail -n 8 "$log"; } \
                >> "$logs/failed"
        fi
    done
}

# build TARGET...: status 1, and a failure, when it does not build.
build() {
    $MAKE -s "$@" && return
    echo "$*: FAILED (does not build)" | tee -a "$logs/failed"
    failed=$((failed + 1))
    return 1
}

skipped() { printf '%s: skipped (%s)\n0 passed, 0 failed, 1 skipped\n' "$1" "$2"; }
skip() { run "$1" skipped "$1" "$2"; }

# Every GPU's kernels compile without a warning.
cuda_compile() {
    local ok=0 bad=0 arch
    for arch in $archs; do
        if $MAKE -s build/sm_$arch.log; then
            ok=$((ok + 1)) && echo "nvcc  sm_$arch  ok"
        else
            bad=$((bad + 1)) && echo "nvcc  sm_$arch  FAILED"
        fi
    done
    if [ -z "${GPU-}" ]; then    # with a GPU it is built for that one, and run
        if $MAKE -s build/test_gpt2cu ARCH=90a; then
            ok=$((ok + 1)) && echo "nvcc  build/test_gpt2cu  ok"
        else
            bad=$((bad + 1)) && echo "nvcc  build/test_gpt2cu  FAILED"
        fi
    fi
    echo "$ok passed, $bad failed, 0 skipped"
}

# The GPU's benchmark on a tiny model: a line for each kernel and product, none that is not finite.
bench_cuda() {    # bench_cuda CAPABILITY: before 80 in fp16
    local lines
    lines=$(EMU_CC=$1 build/bench_cuda_cpu --tsv -n 1 -e l1h1c16t16 -b 2 | grep -v '^#' |
        awk -F'\t' 'NF == 6 && $3 + 0 > 0 && $3 + 0 < 1e9' | wc -l)
    if [ "$lines" -eq 32 ]; then
        echo "bench_cuda  sm_$1, $lines kernels and products  ok"
        echo "1 passed, 0 failed, 0 skipped"
    else
        echo "bench_cuda  sm_$1, $lines kernels and products, 32 wanted  FAILED"
        echo "0 passed, 1 failed, 0 skipped"
    fi
}

# Bytes that each kernel asks for in device memory beside those that it needs.
profile_cuda() {
    local lines
    # shellcheck disable=SC2086  # words
    $CXX -std=c++17 -O1 -fsanitize=thread -w -ffp-contract=off -Idev/cuda_cpu ${CUDA_INCLUDE-} \
        -x c++ -c dev/bench.cu -o build/bench_profile.o &&
        $CXX build/bench_profile.o -o build/bench_profile -lm || return 1
    EMU_PROFILE=1 build/bench_profile -e l1h12c768t128 -b 2 2> build/profile.log |
        grep '^profile' > build/profile.txt
    cat build/profile.txt build/profile.log
    lines=$(grep -c ' ok ' build/profile.txt)
    echo "$lines passed, $((12 - lines)) failed, 0 skipped"
}

run style dev/style.sh
# What drives a built program from outside: the driver, the program, the tests (none: all).
# Programs with sanitizers run what is about memory and files, not what takes long to learn.
drives="options       train_gpt2
        checkpoints   train_gpt2
        interrupts    train_gpt2
        evaluate      train_gpt2
        generate      train_gpt2
        model_files   train_gpt2
        training      train_gpt2
        options       build/train_gpt2_asan
        checkpoints   build/train_gpt2_asan
        interrupts    build/train_gpt2_asan
        evaluate      build/train_gpt2_asan
        generate      build/train_gpt2_asan
        model_files   build/train_gpt2_asan
        training      build/train_gpt2_asan        overfit homes
        training      build/train_gpt2_double      overfit
        training      train_gpt2cu_cpu             micro_batches validation homes
        gpu_program   train_gpt2cu_cpu
        ranks         train_gpt2cu_cpu
        ranks         build/train_gpt2cu_cpu_asan  ranks_ref ranks_fault
        gpu_program   build/train_gpt2cu_cpu_asan  gpu_bad gpu_start gpu_comm gpu_eval gpu_check"
archs="75 80 89 90a 100 120"

# Everything at once on all cores, in silence; what fails is built again below, aloud. Without the
# headers of CUDA, what needs them would end the whole of it.
jobs=-j$(nproc)
[[ ${MAKEFLAGS:-} =~ (^| )-j ]] && jobs=
# shellcheck disable=SC2086  # words
targets=$(printf '%s\n' train_gpt2 data/tokenize data/stories build/fuzz_replay
    printf 'build/%s\n' $TESTS
    awk '{ print "build/test/" $1 "\n" $2 }' <<< "$drives" | sort -u
    echo build/test/sass)
[ -n "${CUDA_HEADERS-}" ] || targets=$(grep -v cu <<< "$targets")
# shellcheck disable=SC2086  # words
$MAKE -s -k $jobs $targets ${NVCC:+$(printf 'build/sm_%s.log ' $archs)} > /dev/null 2>&1

# can_build PROGRAM: status 1, and a skip, when this machine lacks what it needs.
can_build() {
    if [[ $1 == *asan ]] && [ -z "${SAN-yes}" ]; then
        skip "$1" "${CXX:-the compiler} has no sanitizers"
    elif [[ $1 == *cu* ]] && [ -z "${CUDA_HEADERS-}" ]; then
        skip "$1" "no headers of CUDA"
    else
        return 0
    fi
    return 1
}

[ -z "${CUDA_HEADERS-}" ] || build train_gpt2cu_cpu
run machines dev/test/machines.sh
build train_gpt2 data/tokenize data/stories && run tools dev/test/tools.sh
build build/fuzz_replay train_gpt2 data/tokenize && run fuzz dev/fuzz/run.sh replay
for program in $TESTS; do
    can_build $program && build build/$program && run $program build/$program
done
while read -r driver program names <&3; do
    # shellcheck disable=SC2086  # words
    can_build $program && build build/test/$driver train_gpt2 $program &&
        run "$driver ${program#build/}" build/test/$driver --program $program $names
done 3<<< "$drives"
if [ -z "${CUDA_HEADERS-}" ]; then
    skip cuda_example "no headers of CUDA"
    skip "bench_cuda, profile_cuda" "no headers of CUDA"
else
    build build/cuda_example && run cuda_example dev/cuda_cpu/example.sh build/cuda_example
    build build/bench_cuda_cpu && run bench_cuda bench_cuda 90 &&
        run "bench_cuda sm_75" bench_cuda 75
    run profile_cuda profile_cuda
    # A GPU without bf16: whatever names a type asks first. With FULL=1 all tests.
    tests="gpu_gradients_16 gpu_steps gpu_offload_mixed gpu_gaps"
    [ -z "${FULL-}" ] || tests=
    # shellcheck disable=SC2086  # words
    build build/test_gpt2cu_cpu && run "test_gpt2cu_cpu sm_75" env EMU_CC=75 \
        build/test_gpt2cu_cpu $tests
    build build/test/gpu_program train_gpt2cu_cpu && run "gpu_program sm_75" env EMU_CC=75 \
        build/test/gpu_program gpu_commands gpu_eval gpu_checkpoints
fi
if [ -z "${NVCC-}" ]; then
    skip cuda_compile "no nvcc"
else
    run cuda_compile cuda_compile
fi
# The machine code that they became; without nvcc only that every kernel has a budget.
export NVDISASM=${NVDISASM-$(PATH=$PATH:$(dirname "${NVCC:-.}") command -v nvdisasm)}
build build/test/sass && run sass build/test/sass
# What the emulated runs above checked, on the GPU itself.
if [ -z "${NVCC-}" ] || [ -z "${GPU-}" ]; then
    skip "test_gpt2cu, gpu_program" "no $([ -n "${NVCC-}" ] && echo GPU || echo nvcc)"
else
    build build/test_gpt2cu && run test_gpt2cu build/test_gpt2cu
    build build/test/gpu_program train_gpt2 train_gpt2cu &&
        run "gpu_program train_gpt2cu" build/test/gpu_program --program train_gpt2cu
fi
wait
show
[ ! -s "$logs/failed" ] || { printf '\n=== what failed\n' && cat "$logs/failed"; }
echo
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
