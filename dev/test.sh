#!/usr/bin/env bash
# Builds and runs the tests: `make test`. Two parts, the second only with ALL=1:
#   main   the layout of the sources, every chapter's unit tests, every kernel on the emulated
#          device, the main tests that drive the built programs
#   rest   the same with sanitizers, GPUs without bf16, kernels compiled for other GPUs, other
#          compilers and lint, and the tests marked REST
# ALL=main or ALL=rest runs only that part; ALL=1 runs both. FULL=1 is ALL=1 with all cases of the
# cartesian products that tests otherwise sample (dev/test/harness.h).
#
# Runs as many programs at a time as there are cores. Each prints `N passed, N failed, N skipped` as
# its last line; the last line here is their sum, preceded by the ten slowest tests. Exit status 1
# on any failure. MAKE, CC, CXX, SAN (empty: no sanitizers), M32 (empty: no 32-bit programs), NVCC,
# CUDA_HEADERS and GPU (empty: none) are set by make; with BUILD_ONLY=yes nothing is run.
set -u
cd "$(dirname "$0")/.." || exit 1
export OMP_WAIT_POLICY=passive    # on a busy machine, spinning threads delay the others
TIMEFORMAT='%1R %1U %1S'
MAKE=${MAKE:-make}
WIDTH=${WIDTH:-$(nproc)}          # programs at a time
passed=0 failed=0 skipped=0
mkdir -p build
logs=$(mktemp -d build/test.XXXXXX) || exit 1
trap 'rm -rf "$logs"' EXIT
# shellcheck disable=SC2046  # numbers
trap 'kill $(jobs -p) 2> /dev/null; exit 130' INT TERM
: > "$logs/failed"
: > "$logs/slow"

is_set() { [ -n "$1" ] && [ "$1" != 0 ]; }
parts=main
! is_set "${ALL-}${FULL-}" || parts="main rest"
case ${ALL-} in main | rest) parts=$ALL ;; esac

# --- What there is to run -------------------------------------------------------------------------

rows=()    # part | name | targets to build (+nvcc: needs nvcc) | command

# row PART NAME "TARGETS" COMMAND...
row() { rows+=("$1|$2|$3|${*:4}"); }

# driver PART DRIVER PROGRAM [TEST...]: adds tests that drive a built program; without names, all of
# them, and those marked REST to the second part.
driver() {
    row "$1" "$2 ${3#build/}${4+ $4 ...}" "build/test/$2 train_gpt2 $3" \
        "build/test/$2 --program ${*:3}"
    if [ "$1 $#" = "main 3" ] && grep -q '^TEST(.*REST)' "dev/test/$2.cpp"; then
        row rest "$2 ${3#build/}, REST" "build/test/$2 train_gpt2 $3" \
            "env ALL=rest build/test/$2 --program $3"
    fi
}

# Slow programs come first, so that no core runs one alone at the end.
row main test_gpt2cu_cpu build/test_gpt2cu_cpu build/test_gpt2cu_cpu
driver main ranks train_gpt2cu_cpu
driver main gpu_program train_gpt2cu_cpu
row main test_gpt2 build/test_gpt2 build/test_gpt2
row main test_gpt2_double build/test_gpt2_double build/test_gpt2_double
for driver in training options checkpoints interrupts model_files evaluate generate; do
    driver main $driver train_gpt2
done
driver main training train_gpt2cu_cpu micro_batches validation offload
row main tools "train_gpt2 data/tokenize data/stories" dev/test/tools.sh
row main "plans, page" "train_gpt2 build/plan.html" dev/test/plans.sh build/plan.html
row main "plans, 32 bits" "train_gpt2 build/plan_32" dev/test/plans.sh build/plan_32
row main machines "" dev/test/machines.sh main
row main fuzz "build/fuzz_replay train_gpt2 data/tokenize" dev/fuzz/run.sh replay build/fuzz_replay
row rest "fuzz, tokenize" "build/fuzz_tokenize_replay train_gpt2 data/tokenize" \
    dev/fuzz/run.sh replay build/fuzz_tokenize_replay
row main faults "train_gpt2 data/tokenize" faults
row rest "faults, long" "train_gpt2 data/tokenize" faults long
row main faults_gpu "train_gpt2cu_cpu data/tokenize" faults_gpu
row main style "" dev/style.sh main
row main test_cuda_cpu build/test_cuda_cpu build/test_cuda_cpu
row main cuda_example build/cuda_example dev/cuda_cpu/example.sh build/cuda_example
row main harness build/test/harness build/test/harness
row main data build/test/data build/test/data
row main "kernels of sm_80" "build/test/sass ${NVCC:+build/sm_80.log}" kernels 80
row main "kernels of sm_90a" "build/test/sass ${NVCC:+build/sm_90a.log}" kernels 90a
# The same tests as on the emulated device, on a real GPU.
row main test_gpt2cu build/test_gpt2cu build/test_gpt2cu
driver main gpu_program train_gpt2cu

row rest test_gpt2cu_cpu_asan build/test_gpt2cu_cpu_asan build/test_gpt2cu_cpu_asan
driver rest gpu_program build/train_gpt2cu_cpu_asan gpu_bad gpu_start gpu_comm gpu_eval gpu_check
driver rest ranks build/train_gpt2cu_cpu_asan ranks_ref ranks_fault
row rest test_gpt2_asan build/test_gpt2_asan build/test_gpt2_asan
for driver in options checkpoints interrupts evaluate generate model_files; do
    driver rest $driver build/train_gpt2_asan
done
driver rest training build/train_gpt2_asan overfit offload
driver rest training build/train_gpt2_double overfit
row rest data_asan build/test/data_asan build/test/data_asan
row rest test_cuda_cpu_asan build/test_cuda_cpu_asan build/test_cuda_cpu_asan
row rest "style, other compilers" "" dev/style.sh rest
row rest "machines, gpu_check.sh" "${CUDA_HEADERS:+train_gpt2cu_cpu}" dev/test/machines.sh rest
row rest gpu_check "${CUDA_HEADERS:+train_gpt2cu_cpu}" dev/test/gpu_check.sh
row rest bench_cuda build/bench_profile bench_cuda 90
row rest "bench_cuda sm_75" build/bench_profile bench_cuda 75
row rest profile_cuda build/bench_profile profile_cuda
# A GPU without bf16: the tests that depend on the 16-bit type.
tests="gpu_gradients_16 gpu_steps gpu_offload_mixed gpu_gaps"
! is_set "${FULL-}" || tests=
row rest "test_gpt2cu_cpu sm_75" build/test_gpt2cu_cpu env EMU_CC=75 build/test_gpt2cu_cpu $tests
row rest "gpu_program sm_75" "build/test/gpu_program train_gpt2cu_cpu" \
    env EMU_CC=75 build/test/gpu_program gpu_commands gpu_eval gpu_checkpoints
for arch in 75 89 100 120; do
    row rest "kernels of sm_$arch" "build/test/sass build/sm_$arch.log" kernels $arch
done
[ -n "${GPU-}" ] || row rest "nvcc, build/test_gpt2cu" +nvcc nvcc_links
! is_set "${FULL-}" || row rest own_text "train_gpt2 data/tokenize" dev/test/own_text.sh

# Twelve kills and twelve power losses (dev/check/faults.py); `faults long`: a run of 20,000 steps.
faults() {
    local what said count passed=0 tried="${*:-kill power}"
    for what in $tried; do
        count=12
        [ "$what" != long ] || count=20000
        if ! command -v python3 > /dev/null; then
            said="no python3"
        elif [ "$what" = power ] && ! command -v strace > /dev/null; then
            said="no strace"
        elif dev/check/faults.py "$what" $count --program train_gpt2 > build/faults.log; then
            echo "faults  $what: $(tail -n 1 build/faults.log)  ok"
            passed=$((passed + 1))
            continue
        else
            cat build/faults.log
            echo "faults  $what  FAILED"
            echo "$passed passed, 1 failed, 0 skipped"
            return 1
        fi
        echo "faults  $what  skipped ($said)"
    done
    echo "$passed passed, 0 failed, $(($(echo "$tried" | wc -w) - passed)) skipped"
}

# A few failing calls of CUDA, cuBLASLt and NCCL (dev/check/faults.py).
faults_gpu() {
    if ! command -v python3 > /dev/null; then
        echo "0 passed, 0 failed, 1 skipped"
    elif dev/check/faults.py gpu 8 --program train_gpt2cu_cpu; then
        echo "1 passed, 0 failed, 0 skipped"
    else
        echo "0 passed, 1 failed, 0 skipped"
    fi
}

# The GPU benchmark with a tiny model: must print a finite line for each kernel and matmul.
bench_cuda() {    # bench_cuda CAPABILITY: before 80 in fp16
    local lines wanted=$((32 + 2 * ($1 == 90)))    # on Hopper also attention with wgmma
    lines=$(EMU_CC=$1 build/bench_profile --tsv -n 1 -e l1h1c64t16 -b 2 | grep -v '^#' |
        awk -F'\t' 'NF == 6 && $3 + 0 > 0 && $3 + 0 < 1e9' | wc -l)
    if [ "$lines" -eq $wanted ]; then
        echo "bench_cuda  sm_$1, $lines kernels and matmuls  ok"
        echo "1 passed, 0 failed, 0 skipped"
    else
        echo "bench_cuda  sm_$1, $lines kernels and matmuls, expected $wanted  FAILED"
        echo "0 passed, 1 failed, 0 skipped"
    fi
}

# Compares the bytes that each kernel accesses in device memory with those that it needs.
profile_cuda() {
    local lines
    EMU_PROFILE=1 build/bench_profile -e l1h12c768t128 -b 2 2> build/profile.log |
        grep '^profile' > build/profile.txt
    cat build/profile.txt build/profile.log
    lines=$(grep -c ' ok ' build/profile.txt)
    echo "$lines passed, $((14 - lines)) failed, 0 skipped"
}

# Compiles one GPU's kernels without a warning and compares the machine code with the budgets;
# without nvcc, only checks that every kernel has a budget.
kernels() {
    NVDISASM=${NVDISASM-$(PATH=$PATH:$(dirname "${NVCC:-.}") command -v nvdisasm)} \
        build/test/sass --gpu "$1"
}

# The tests built for a GPU that is not present: nvcc compiles them and links its libraries.
nvcc_links() {
    $MAKE -s build/test_gpt2cu ARCH=90a && echo "1 passed, 0 failed, 0 skipped"
}

# --- Building -------------------------------------------------------------------------------------

# lacks TARGET: prints what this machine lacks to build it, if anything.
lacks() {
    case $1 in
        *asan) [ -n "${SAN-yes}" ] || echo "${CXX:-the compiler} has no sanitizers" ;;&
        *cu_cpu* | *cuda* | build/bench_profile)
            [ -n "${CUDA_HEADERS-}" ] || echo "no headers of CUDA" ;;
        build/plan.html)
            local tool
            for tool in emcc chromium node; do
                command -v $tool > /dev/null || echo "no $tool"
            done ;;
        build/plan_32) [ -n "${M32-}" ] || echo "no 32-bit libraries (gcc-multilib)" ;;
        +nvcc) [ -n "${NVCC-}" ] || echo "no nvcc" ;;
        build/sm_*)
            local arch=${1//[!0-9]/}
            if [ -z "${NVCC-}" ]; then
                echo "no nvcc"
            elif ! "$NVCC" --list-gpu-code | grep -q "^sm_$arch"; then
                echo "this nvcc does not support sm_$arch"
            fi ;;
        *gpt2cu) [ -n "${NVCC-}" ] || echo "no nvcc"; [ -n "${GPU-}" ] || echo "no GPU" ;;
    esac
}

# build TARGET...: builds all in parallel. Prints a line per target and the compilers' messages;
# sets $broken to the targets that could not be built.
build() {
    local jobs=-j$WIDTH
    [[ ${MAKEFLAGS:-} =~ (^| )-j ]] && jobs=    # the calling make has set the number of jobs
    (
        LC_ALL=C $MAKE -s -k --trace $jobs "$@" 2>&1 >&3 3>&- | tee "$logs/errors" >&2
        exit "${PIPESTATUS[0]}"
    ) 3>&1 | sed -un "s/^Makefile:[0-9]*: [a-z ]*target '\([^']*\)'.*/build  \1/
        /^build  \(build\/flags\|build\/gpu\|.*data\)$/d; /^build  /p; /^data/p"
    [ "${PIPESTATUS[0]}" -ne 0 ] || return 0
    broken=$(sed -n "s/.*\*\*\* \[[^ ]* \(.*\)\] Error.*/\1/p; s/.*Target '\(.*\)' not rem.*/\1/p
        s/.*No rule to make target '\([^']*\)'.*/\1/p" "$logs/errors")
    [ -n "$broken" ] || broken=$(printf '%s\n' "$@")
}

# --- Running --------------------------------------------------------------------------------------

names=() shown=()    # the programs started, and whether their output was printed

# run NAME COMMAND...: starts COMMAND once fewer than WIDTH programs are running, and prints the
# output of those that have ended.
run() {
    local log=$logs/${#names[@]}
    while [ "$(jobs -pr | wc -l)" -ge "$WIDTH" ]; do
        wait -n
    done
    show
    echo "run    $1"
    names+=("$1") shown+=("")
    shift
    { { time "$@" > "$log" 2>&1; } 2> "$log.time"; echo $? > "$log.status"; } &
}

# Prints the output of programs that have ended and adds up the counts of their last lines. A
# program without such a line, or with a nonzero status but no counted failure, is itself a failure.
# Failures are repeated at the end, where a log truncated at the start still has them. A test's line
# ends with its time if that is at least a second; a program without such lines counts as one test.
show() {
    local i name log status counts before wall user system
    for i in "${!names[@]}"; do
        log=$logs/$i name=${names[i]}
        [ -z "${shown[i]}" ] && [ -s "$log.status" ] || continue
        status=$(< "$log.status") shown[i]=yes before=$failed
        read -r wall user system < <(tail -n 1 "$log.time")
        printf '\n=== %s  (%s s, processor %s s)\n' "$name" "$wall" \
            "$(awk "BEGIN { printf \"%.1f\", $user + $system }")"
        cat "$log"
        grep -E ' \([0-9.]+ s, processor [0-9.]+ s\)$' "$log" |
            sed -E "s|^([^ ]+) .*\(([0-9.]+) s, (.*)\)$|\2 s  \1  (\3)  $name|" > "$log.slow"
        [ -s "$log.slow" ] || echo "$wall s  $name" > "$log.slow"
        cat "$log.slow" >> "$logs/slow"
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

# perform PART: builds the targets of its rows, then runs them.
perform() {
    local row part name targets command why target began=$SECONDS rest=() all=()
    broken=
    for row in "${rows[@]}"; do
        IFS='|' read -r part name targets command <<< "$row"
        [ "$part" = "$1" ] || continue
        why=
        for target in $targets; do
            why=${why:-$(lacks "$target" | head -n 1)}
        done
        if [ -n "$why" ]; then
            printf 'skip   %s: skipped (%s)\n' "$name" "$why"
            skipped=$((skipped + 1))
        else
            rest+=("$row")
            # shellcheck disable=SC2206  # words
            all+=(${targets/+*/})
        fi
    done
    mapfile -t all < <(printf '%s\n' "${all[@]}" | awk '!seen[$0]++')
    build "${all[@]}"
    for row in "${rest[@]}"; do
        IFS='|' read -r part name targets command <<< "$row"
        why=
        for target in $targets; do
            [[ $'\n'"$broken"$'\n' != *$'\n'"$target"$'\n'* ]] || why=$target
        done
        if [ -n "$why" ]; then
            echo "$name: FAILED ($why does not build)" | tee -a "$logs/failed"
            failed=$((failed + 1))
        elif [ -z "${BUILD_ONLY-}" ]; then
            # shellcheck disable=SC2086  # words
            run "$name" $command
        fi
    done
    while [ -n "$(jobs -pr)" ]; do
        wait -n
        show
    done
    wait
    show
    times > "$logs/times"    # of the shell and all its child processes
    printf '\n=== %s: %s s on %s cores; processor time since the start %s s\n' "$1" \
        $((SECONDS - began)) "$(nproc)" \
        "$(tr 'ms' '  ' < "$logs/times" | awk '{ s += 60 * ($1 + $3) + $2 + $4 } END { print s }')"
}

for part in $parts; do
    ALL=${part/rest/1} perform $part
done
[ ! -s "$logs/failed" ] || { printf '\n=== failures\n' && cat "$logs/failed"; }
if [ -s "$logs/slow" ]; then
    printf '\n=== the slowest\n'
    sort -rn "$logs/slow" | head -n 10
fi
echo
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
