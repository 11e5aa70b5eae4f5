#!/usr/bin/env bash
# Runs the checks that need a GPU: dev/gpu_check.sh
#
# Prints one line per check: ok, FAILED or skipped (why), and continues after a failure. Exit status
# 1 if a check of correctness failed; the stage torch never counts. Needs no network. The most
# important stages run first. Logs, verdicts and summary.md are in LOGS and, after each stage, in
# one file, ARCHIVE. Stages that are not run keep the results of earlier calls, so on a machine that
# is available for ten minutes at a time, use two calls:
#
#   STAGES="build check bits prove speed" dev/gpu_check.sh
#   STAGES="build test sanitizer offload gpus bench torch" dev/gpu_check.sh
#
# Each ends after SECONDS_IN_ALL; `build` reuses programs of the first call. Variables (paths are
# relative to the repository's root):
#
#   STAGES=                    stages to run, in this order; default: all, as in the table below
#   LOGS=build/gpu_check       folder of logs, verdicts and summary.md; also of the program's caches
#   ARCHIVE=$LOGS.tar.gz       all of LOGS in one file
#   GPT2CU=./train_gpt2cu      the program; if given, it is not built
#   TEST=build/test_gpt2cu     its tests, likewise
#   BENCH=build/bench          the benchmark of single kernels, likewise
#   EMULATED=./train_gpt2cu_cpu  the program without a GPU, whose losses NCCL's are compared with
#   CARRIED=carried            programs built elsewhere, used if the build fails; to fill it:
#                                make ARCH=90a MARCH=-march=x86-64-v3 train_gpt2cu test_gpt2cu
#                                mkdir carried; cp train_gpt2cu build/test_gpt2cu carried
#   NCCL_HOME=                 an NCCL to build and run with, if the machine has none, or one older
#                              than 2.30.7: a folder with include/ and lib/, such as nvidia/nccl in
#                              an unpacked nvidia-nccl-cu13 wheel
#   MODELS="d12 d48"           models that are timed; the first is also checked
#   STEPS=20 LARGEST_BATCH=16  of a timed run
#   GPUS=                      how many there are; default: as many as CUDA_VISIBLE_DEVICES or
#                              nvidia-smi lists
#   MEMORY_MIB=                memory to plan for; default: what nvidia-smi reports as free, less a
#                              CUDA context
#   DTYPE=                     the 16-bit type; default: bf16, before compute capability 8.0 fp16
#   SECONDS_IN_ALL=580         after which the remaining checks are skipped
#   PYTHON=python3             the interpreter that has torch
#   COMMIT=                    what to print if there is no git
#
# Without a GPU it ends at once, unless GPT2CU is given; then all stages that do not need nvcc can
# be run, as in dev/test/machines.sh:
#   make train_gpt2cu_cpu && GPT2CU=./train_gpt2cu_cpu TEST=true MODELS=l2h2c64t64 $0
set -u
export LC_ALL=C CUDA_DEVICE_ORDER=PCI_BUS_ID    # the first GPU is nvidia-smi's first
unset CDPATH    # else cd could change to another folder and print it
cd "$(dirname "$0")/.." || exit 1
# Per stage: the seconds after which one of its commands is stopped, and those that the whole stage
# is expected to take on an H200 with 16 cores. The latter are estimates, not measurements: steps at
# the rates of `--plan --gpu h200` (bf16, B 16: d12 441,000 tokens/s, d48 45,600, with -r block
# 37,600), 3 s for a start (d48: 12 s), and the times of CPU work on other machines.
declare -A limit_s expected_s
all_stages=
while read -r stage limit expected; do
    limit_s[$stage]=$limit expected_s[$stage]=$expected
    [ "$stage" = machine ] || all_stages+=${all_stages:+ }$stage
done << 'TABLE'
machine     20    5
build      150  100
check       60   50
bits        40   20
prove       90   15
speed       60  130
test       180  120
sanitizer   75   90
offload     60   40
gpus        60   80
bench      120   30
torch      120  110
TABLE
STAGES=${STAGES-$all_stages}
LOGS=${LOGS:-build/gpu_check} PYTHON=${PYTHON:-python3} MODELS=${MODELS:-d12 d48}
STEPS=${STEPS:-20} LARGEST_BATCH=${LARGEST_BATCH:-16} SECONDS_IN_ALL=${SECONDS_IN_ALL:-580}
given_program=${GPT2CU:-} given_test=${TEST:-} given_bench=${BENCH:-} CARRIED=${CARRIED:-carried}
given_emulated=${EMULATED:-} EMULATED=${EMULATED:-./train_gpt2cu_cpu}
GPT2CU=${GPT2CU:-./train_gpt2cu} TEST=${TEST:-build/test_gpt2cu} BENCH=${BENCH:-build/bench}
first_model=${MODELS%% *}
# The first GPU that programs see, as named by nvidia-smi; not a part of one (MIG).
first_gpu=${CUDA_VISIBLE_DEVICES:-0} first_gpu=${first_gpu%%,*}
[[ $first_gpu =~ ^([0-9]+|GPU-.*)$ ]] || first_gpu=0
for stage in $STAGES; do
    if [[ " $all_stages " != *" $stage "* ]]; then
        echo "gpu_check.sh: STAGES has no stage '$stage': $all_stages" >&2
        exit 1
    fi
done
[ -z "${NCCL_HOME:-}" ] || NCCL_HOME=$(cd "$NCCL_HOME" && pwd) || exit 1
mkdir -p "$LOGS" build || exit 1
LOGS=$(cd "$LOGS" && pwd) || exit 1
ARCHIVE=${ARCHIVE:-$LOGS.tar.gz}
export XDG_CACHE_HOME=$LOGS/cache    # archives timed algorithms and rates, and ignores older ones
# Runs and their checkpoints (1.5 GB at 124M) never go to LOGS.
work=$(mktemp -d "$PWD/build/gpu_check.XXXXXX") || exit 1
# A program without a RUNPATH finds its libraries in a toolkit, or in those installed with PyTorch.
own_library_path=${LD_LIBRARY_PATH:-}
if [ -n "${NCCL_HOME:-}" ]; then
    ln -s "$NCCL_HOME/lib/libnccl.so.2" "$work/libnccl.so"    # a wheel has no such link
    export CPATH=$NCCL_HOME/include${CPATH:+:$CPATH}
    export NVCC_PREPEND_FLAGS="-I$NCCL_HOME/include ${NVCC_PREPEND_FLAGS:-}"    # before a toolkit's
    export LIBRARY_PATH=$work${LIBRARY_PATH:+:$LIBRARY_PATH}
    LD_LIBRARY_PATH=$NCCL_HOME/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2> /dev/null)
for folder in /usr/local/cuda/lib64 "$packages"/nvidia/*/lib; do
    [ -d "$folder" ] && LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
done
export LD_LIBRARY_PATH
child='' watcher=''
trap 'kill -KILL $child $watcher 2> /dev/null; archive; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
touch "$work/memory"
reported=0 stage=machine

# --- Lines, time and logs -------------------------------------------------------------------------

# begin STAGE: discards what an earlier call found in it.
begin() {
    stage=$1
    rm -f "$LOGS/$stage".{log,verdicts,rows,compare,seconds}
}

# Packs LOGS into ARCHIVE, which is complete at any time, even if this script is killed. tar's
# status is 1 if a file grew meanwhile.
archive() {
    compgen -G "$LOGS/*.verdicts" > /dev/null || return
    { tar -czf "$ARCHIVE.part" --exclude="${ARCHIVE##*/}*" -C "${LOGS%/*}" "${LOGS##*/}" ||
        [ $? -eq 1 ]; } 2> /dev/null && mv "$ARCHIVE.part" "$ARCHIVE"
}

# report NAME ok|FAILED|skipped TEXT: a line of the summary; checks without time left are skipped.
# The summary on disk is always complete, so a script stopped from outside leaves what it has found.
report() {
    local outcome=$2
    [[ $3 != "no time left"* ]] || outcome=skipped
    printf '%s\t%-10s %-26s %-8s %s  (%d s)\n' "$outcome" "$stage" "$1" "$outcome" "$3" \
        $((SECONDS - reported)) | tee -a "$LOGS/$stage.verdicts" | cut -f 2-
    reported=$SECONDS
    summary > "$LOGS/summary.md"
}

# found verdicts|rows|compare|seconds: the results of all calls, stage by stage.
found() {
    local each
    for each in machine $all_stages; do
        if [ -f "$LOGS/$each.$1" ]; then cat "$LOGS/$each.$1"; fi
    done
}
outcomes() { found verdicts | cut -f 1 | grep -cx "$1"; }
counts() { echo "$(outcomes ok) passed, $(outcomes FAILED) failed, $(outcomes skipped) skipped"; }

# limit SECONDS: the smaller of SECONDS and the time left in all. With a limit of 0 nothing starts.
limit() {
    local left=$((SECONDS_IN_ALL - SECONDS))
    [ $left -ge 3 ] || left=0
    echo $((left < $1 ? left : $1))
}

# bounded SECONDS COMMAND...: status 124 if the time was up, even before the start. 137 also becomes
# 124: the command ignored SIGTERM and was ended by SIGKILL.
bounded() {
    local seconds status
    seconds=$(limit "$1")
    shift
    [ "$seconds" -gt 0 ] || return 124
    timeout --kill-after=5 "$seconds" "$@"
    status=$?
    [ $status -ne 137 ] || status=124
    return $status
}

# logged SECONDS COMMAND...: appends the command line and the command's output to the stage's log,
# and writes only the output to $work/last.
logged() {
    local status
    bounded "$@" > "$work/last" 2>&1
    status=$?
    { echo "\$ ${*:2}"; cat "$work/last"; echo "[exit status $status]"; echo; } \
        >> "$LOGS/$stage.log"
    return $status
}

# why STATUS SECONDS: describes a command's failure: the time limit, or its last line.
why() {
    if [ "$1" -eq 124 ]; then
        [ "$(limit "$2")" -gt 0 ] && echo "not done after $2 s" || echo "no time left"
    else
        local line
        line=$(grep -v '^[[:space:]]*$' "$work/last" | tail -n 1 | cut -c 1-160)
        echo "exit status $1: ${line:-no output}"
    fi
}

# Records the GPU's memory in use, five times a second, while this script runs. As a client of the
# driver it also keeps the GPU initialised, which otherwise takes seconds whenever a program starts.
watch_memory() {
    command -v nvidia-smi > /dev/null || return
    stdbuf -oL nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -i "$first_gpu" \
        -lms 200 > "$work/memory" 2> /dev/null &
    watcher=$!
    disown    # no message at its end
}

# most_memory LINES: the maximum recorded after that many lines, in MiB; 0 if there is none.
most_memory() {
    { tail -n +$(($1 + 1)) "$work/memory"; gpu memory.used; } | grep -x '[0-9]*' | sort -n |
        tail -n 1 | grep . || echo 0
}

# gpu FIELD: a number or name that nvidia-smi reports for the first GPU; empty if it fails, e.g.
# because there is no GPU, which it reports in words on its stdout.
gpu() {
    local said
    said=$(timeout 20 nvidia-smi --query-gpu="$1" --format=csv,noheader,nounits -i "$first_gpu" \
        2> /dev/null) &&
        head -n 1 <<< "$said" | grep -v 'N/A'
}

# --- 0. The machine -------------------------------------------------------------------------------

# find_tool NAME: its path, from the PATH or the CUDA toolkit; empty if it is not installed.
find_tool() {
    command -v "$1" && return
    for folder in /usr/local/cuda/bin /usr/local/cuda/compute-sanitizer; do
        [ -x "$folder/$1" ] && echo "$folder/$1" && return
    done
}

stage_machine() {
    local commit driver name capability
    commit=$(git rev-parse --short=12 HEAD 2> /dev/null) &&
        { [ -z "$(git status --porcelain 2> /dev/null)" ] || commit="$commit and changes"; }
    commit=${commit:-${COMMIT:-unknown}}
    name=$(gpu name)
    if [ -z "$name$given_program" ]; then    # otherwise it would first build for minutes
        echo "gpu_check.sh: nvidia-smi shows no GPU; to continue without one, name a program:" \
            "GPT2CU=./train_gpt2cu_cpu" >&2
        exit 1
    fi
    begin machine
    driver=$(gpu driver_version) idle_mib=$(gpu memory.used)
    capability=$(gpu compute_cap) nvcc=$(find_tool nvcc)
    [ "${capability%.*}" != 7 ] || DTYPE=${DTYPE:-fp16}
    DTYPE=${DTYPE:-bf16}
    machine="${name:-no GPU seen}, driver ${driver:-none}, nvcc $(
        "${nvcc:-false}" --version 2> /dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p' |
            grep . || echo none), commit $commit, $(date -u +%F)"
    {
        echo "$machine"
        uname -srm
        nproc
        free -m
        df -m .
        timeout 20 nvidia-smi
        timeout 20 nvidia-smi topo -m
    } > "$LOGS/machine.log" 2>&1
    if [ -n "$name" ]; then
        report gpu ok "$machine"
    else
        report gpu skipped "nvidia-smi shows no GPU; $machine"
    fi
    watch_memory
    context_probe
}

# Runs an empty process on the GPU, which fails if the driver is older than the toolkit; no test
# without a GPU can show that. The program's reserve for a context is based on the memory that this
# process uses, and the time limits of this script on its time.
context_probe() {
    local began took seconds=${limit_s[$stage]}
    cat > "$work/context.cu" << 'CUDA'
#include <cstdio>
int main() {
    size_t free_bytes = 0, total_bytes = 0;
    int driver = 0, toolkit = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&toolkit);
    cudaError_t status = cudaMemGetInfo(&free_bytes, &total_bytes);
    if (status != cudaSuccess) {
        printf("%s; the driver has CUDA %d.%d, the toolkit %d.%d\n", cudaGetErrorString(status),
               driver / 1000, driver % 1000 / 10, toolkit / 1000, toolkit % 1000 / 10);
        return 1;
    }
    printf("%zu\n", (total_bytes - free_bytes) >> 20);
}
CUDA
    if [ -z "$name" ] || [ -z "$nvcc" ]; then
        report context skipped "no GPU or no nvcc"
        return
    elif ! logged "$seconds" "$nvcc" -o "$work/context" "$work/context.cu"; then
        report context skipped "the probe does not build: $(why $? "$seconds")"
        return
    fi
    began=$(date +%s%N)
    if logged "$seconds" "$work/context"; then
        took=$((($(date +%s%N) - began) / 1000000))
        report context ok "$(tail -n 1 "$work/last") MiB of the GPU are used with an empty \
process, ${idle_mib:-unknown} MiB before; the process took $took ms"
    else
        report context FAILED "$(why $? "$seconds")"
    fi
}

# --- 1, 2. Build and tests ------------------------------------------------------------------------

# choose_programs: takes programs that were neither given nor built from CARRIED, if they are there.
choose_programs() {
    [ -x "$GPT2CU" ] || [ ! -x "$CARRIED/train_gpt2cu" ] || GPT2CU=$CARRIED/train_gpt2cu
    [ -x "$TEST" ] || [ -n "$given_test" ] || [ ! -x "$CARRIED/test_gpt2cu" ] ||
        TEST=$CARRIED/test_gpt2cu
    [ -x "$BENCH" ] || [ -n "$given_bench" ] || [ ! -x "$CARRIED/bench" ] || BENCH=$CARRIED/bench
}

stage_build() {
    local targets=() status seconds=${limit_s[$stage]} target missing
    [ -n "$given_program" ] || targets+=(train_gpt2cu)
    [ -n "$given_program$given_emulated" ] || targets+=(train_gpt2cu_cpu)
    [ -n "$given_test" ] || targets+=(build/test_gpt2cu build/test/gpu_program train_gpt2)
    [ -n "$given_bench" ] || [ ! -f dev/bench/bench.cu ] || targets+=(build/bench)
    if ! compgen -G 'data/*.bin' > /dev/null; then
        logged 90 make data || report data FAILED "$(why $? 90)"
    fi
    if [ ${#targets[@]} -eq 0 ]; then
        report programs skipped "GPT2CU, TEST and BENCH are given"
        return
    fi
    # Builds all at once; failed ones are built again one by one, so that each has a verdict.
    logged "$seconds" make -k -j"$(nproc)" "${targets[@]}"
    status=$?
    for target in "${targets[@]}"; do
        if [ $status -eq 0 ] || logged "$seconds" make "$target"; then
            report "$target" ok "$(du -m "$target" | cut -f 1) MiB, $(grep -c 'warning' \
                "$LOGS/build.log") lines with a warning so far"
        else
            report "$target" FAILED "$(why $? "$seconds"): $(grep -m 1 'error' "$work/last" |
                cut -c 1-120)"
            rm -f "$target"
        fi
    done
    choose_programs
    for target in "$GPT2CU" "$TEST" "$BENCH"; do
        [[ $target != "$CARRIED"/* ]] || report "$target" ok "used, because the build failed"
    done
    # The program must start without this script's LD_LIBRARY_PATH, by the RUNPATH of the
    # toolkit. Only a machine that has it outside the system's folders can show that.
    missing=$(LD_LIBRARY_PATH=$own_library_path ldd "$GPT2CU" 2> /dev/null |
        sed -n 's/^[[:space:]]*\([^ ]*\) => not found.*/\1/p' | tr '\n' ' ')
    if [ -z "$missing" ]; then
        report libraries ok "found without LD_LIBRARY_PATH"
    else
        report libraries skipped "not found without LD_LIBRARY_PATH: $missing"
    fi
}

# one_test PROGRAM [ARGUMENT...]
one_test() {
    local status seconds=${limit_s[$stage]}
    if [ ! -x "$1" ] && ! command -v "$1" > /dev/null; then
        report "$1" skipped "not found"
        return
    fi
    logged "$seconds" "$@"
    status=$?
    if [ $status -eq 0 ]; then
        report "$1" ok "$(tail -n 1 "$work/last" | grep . || echo 'no output')"
    else
        report "$1" FAILED \
            "$(why $status "$seconds"); $(grep -c FAILED "$work/last") lines with FAILED"
    fi
}

stage_test() {
    one_test "$TEST"
    [ -n "$given_test" ] || one_test build/test/gpu_program --program "$GPT2CU"
}

# --- 3. compute-sanitizer -------------------------------------------------------------------------

# A kernel with a race in shared memory, a barrier that only some threads of a warp reach, and
# writes past the end of an allocation. Each tool must find its kind of error here; otherwise it
# does not work on this machine, and finding no errors in the program would mean nothing.
injected_bugs() {
    cat << 'CUDA'
__global__ void injected_kernel(int *p) {
    __shared__ int s[64];
    s[threadIdx.x] = threadIdx.x;
    p[64 + s[63 - threadIdx.x]] = 1;
    if (threadIdx.x % 32 < 24) {
        __syncthreads();
    }
}
int main() {
    int *p;
    cudaMalloc(&p, 64 * sizeof(int));
    injected_kernel<<<1, 64>>>(p);
    return cudaDeviceSynchronize() != cudaSuccess;
}
CUDA
}

# Selects the kernels whose names end in _kernel: all of ours, including the injected one, and
# hardly any of the libraries', which are slow to check and not ours to fix. API errors that a
# program handles are not reported. The second spelling is for older tools; the last selects all.
filters=("--kernel-name kns=_kernel --report-api-errors explicit"
         "--kernel-regex kns=_kernel --report-api-errors explicit"
         "")

# sanitize TOOL LOG COMMAND...: runs the command under the tool, which checks what $filter selects.
# OMP_WAIT_POLICY is set here because the program would otherwise restart itself with it, and the
# tool might lose the new process.
sanitize() {
    local tool=$1 log=$2
    shift 2
    # shellcheck disable=SC2086  # words
    OMP_WAIT_POLICY=passive bounded "${limit_s[$stage]}" "$sanitizer" --tool "$tool" $filter \
        --print-limit 1000 "$@" > "$log" 2>&1
    echo "[exit status $?]" >> "$log"
}

# errors_in LOG: the count in the tool's summary; empty if there is no summary. A second line of
# that name counts the errors that were not printed.
errors_in() {
    sed -n 's/^=* *\(ERROR\|RACECHECK\) SUMMARY: *\([0-9]*\).*/\2/p' "$1" | head -n 1
}

# printed_in LOG: the number of reports printed. Only the first line of each is not indented.
printed_in() {
    grep '^=\{9\} [A-Z]' "$1" | grep -cv 'SUMMARY\|COMPUTE-SANITIZER\|Target app\|Error: process'
}

# kernels_in LOG: our kernels that it names.
kernels_in() {
    grep -oE '[a-z0-9_]+_kernel' train_gpt2.cu | sort -u | grep -owF -f - "$1" | sort -u |
        tr '\n' ' '
}

# finds_injected TOOL: true if the tool finds its part of the injected errors in what $filter
# selects.
finds_injected() {
    local log=$work/$1.injected
    sanitize "$1" "$log" "$work/injected"
    [ "$(errors_in "$log" | grep -v '^0$')" != "" ] && grep -q injected_kernel "$log"
}

sanitizer_verdict() {    # sanitizer_verdict TOOL DTYPE
    local log=$work/$1.$2 errors ours printed name="$1 $2"
    errors=$(errors_in "$log") printed=$(printed_in "$log")
    ours=$(kernels_in "$log")
    if grep -q 'the plan needs' "$log"; then
        report "$name" skipped "does not fit: $(grep -m 1 'the plan needs' "$log" | cut -c 1-120)"
    elif [ -z "$errors" ]; then
        report "$name" skipped "no summary: $(grep . "$log" | tail -n 2 | head -n 1 | cut -c 1-120)"
    elif [ "$errors" -eq 0 ] && grep -q '^\[exit status 0\]' "$log"; then
        report "$name" ok "no errors${filter:+ in our kernels}"
    elif [ -n "$ours" ]; then
        report "$name" FAILED "$errors reports in $ours$(tail -n 1 "$log")"
    elif [ "$printed" -lt "$errors" ]; then
        report "$name" FAILED "cut off: $printed of $errors reports printed, none in our kernels"
    elif [ "$errors" -gt 0 ] && [ "$(grep -c 'splitKreduce_kernel' "$log")" -ge "$errors" ]; then
        report "$name" ok "$errors reports, all in cuBLASLt's splitKreduce_kernel"
    elif [ "$errors" -gt 0 ] && [ -z "$filter" ]; then
        report "$name" ok "$errors reports, all in kernels of libraries"
    else
        report "$name" FAILED "$errors reports, $(tail -n 1 "$log")"
    fi
}

stage_sanitizer() {
    local tool dtype works=() pids=()
    sanitizer=$(find_tool compute-sanitizer)
    if [ -z "$sanitizer" ] || [ -z "$nvcc" ]; then
        report all skipped "no compute-sanitizer or no nvcc"
        return
    fi
    injected_bugs > "$work/injected.cu"
    if ! logged 30 "$nvcc" -arch=native -lineinfo -o "$work/injected" "$work/injected.cu"; then
        report all skipped "the probe does not build: $(why $? 30)"
        return
    fi
    for filter in "${filters[@]}"; do
        if finds_injected memcheck; then break; fi
    done
    for tool in memcheck racecheck synccheck; do
        if [ $tool = memcheck ] || finds_injected $tool; then
            works+=("$tool $DTYPE" "$tool fp32")
        fi
        { echo "=== $tool injected"; cat "$work/$tool.injected"; echo; } >> "$LOGS/sanitizer.log"
    done
    # Two layers, tiles with a remainder, two chunks of logits. At most two programs run at a time,
    # because each needs memory for its context and the tool; nothing here is timed.
    for each in "${works[@]}"; do
        read -r tool dtype <<< "$each"
        sanitize "$tool" "$work/$tool.$dtype" "$GPT2CU" -e l2h2c128t96 -b 2 -x 2 -v 0 -r 1 \
            --logit-rows 128 --tune 0 --dtype "$dtype" & pids+=($!)
        [ ${#pids[@]} -lt 2 ] || { wait "${pids[0]}"; pids=("${pids[1]}"); }
    done
    wait "${pids[@]}"
    for tool in memcheck racecheck synccheck; do
        if [[ " ${works[*]} " != *" $tool $DTYPE "* ]]; then
            report $tool skipped "it does not find an injected error on this machine"
            continue
        fi
        for dtype in "$DTYPE" fp32; do
            { echo "=== $tool $dtype"; cat "$work/$tool.$dtype"; echo; } >> "$LOGS/sanitizer.log"
            sanitizer_verdict "$tool" "$dtype"
        done
    done
}

# --- 4. GPU against CPU reference -----------------------------------------------------------------

# positions MODEL: 64 for l2h2c64t64, 1024 for a preset.
positions() {
    if [[ $1 =~ ^l[0-9]+h[0-9]+c[0-9]+t([0-9]+)$ ]]; then
        echo "${BASH_REMATCH[1]}"
    else
        echo 1024
    fi
}

# Batches are small because the CPU computes them too. In the second one, 1,092 tokens, 4 more than
# a multiple of 64, are the k of all weight-gradient matmuls: cuBLASLt has split such a k and lost
# its remainder (facebookexperimental/triton PR 2767), which the emulated library cannot reproduce.
# That would be a difference of sqrt(4 / 1092), or 6 %.
stage_check() {
    local dtype batch status T worst seconds=${limit_s[$stage]}
    T=$(positions "$first_model")
    [ "$T" -le 256 ] || T=256
    for batch in "1 $T" "42 26"; do
        for dtype in "$DTYPE" fp32; do
            logged "$seconds" "$GPT2CU" --check -e "$first_model" -b "${batch% *}" \
                -t "${batch#* }" --dtype "$dtype"
            status=$?
            worst=$(sed -n 's/^check *\(d[^ ]*\) *relative difference \([0-9.e+-]*\).*/\2 \1/p' \
                "$work/last" | sort -g | tail -n 1)
            if [ $status -eq 0 ] && [ -n "$worst" ]; then
                report "$first_model $dtype B ${batch/ / T }" ok "largest difference $worst"
            else
                report "$first_model $dtype B ${batch/ / T }" FAILED "$(why $status "$seconds")"
            fi
        done
    done
    library_log
    first_numbers
}

# Records cuBLASLt's own log of two steps: the algorithm chosen for every matmul, with tile, split
# and workspace.
library_log() {
    local T status seconds=${limit_s[$stage]}
    T=$(positions "$first_model")
    rm -f "$LOGS/cublaslt.log"
    CUBLASLT_LOG_LEVEL=2 CUBLASLT_LOG_FILE=$LOGS/cublaslt.log \
        logged "$seconds" "$GPT2CU" -e "$first_model" -b 2 -d $((4 * T)) -x 2 -v 0
    status=$?
    if [ $status -ne 0 ]; then
        report "cuBLASLt's choices" FAILED "$(why $status "$seconds")"
    elif [ -s "$LOGS/cublaslt.log" ]; then
        report "cuBLASLt's choices" ok "$(wc -l < "$LOGS/cublaslt.log") lines in cublaslt.log"
    else
        report "cuBLASLt's choices" skipped "the library wrote no log"
    fi
}

# Measures the memory used by the libraries with one micro-step and with four, on which the
# program's reserve for libraries is based.
first_numbers() {
    local lines T micro said most seconds=${limit_s[$stage]}
    T=$(positions "$first_model")
    for micro in 1 4; do
        lines=$(wc -l < "$work/memory")
        if logged "$seconds" "$GPT2CU" -e "$first_model" -b 1 -d $((micro * T)) -x 2 -v 0; then
            said=$(grep -o 'libraries took about [0-9.]* [A-Za-z]*' "$work/last" | head -n 1)
            most=$(most_memory "$lines")
            report "$micro micro-steps a step" ok \
                "${said:-no figure for libraries}; at most $most MiB of the GPU in use"
        else
            report "$micro micro-steps a step" FAILED "$(why $? "$seconds")"
        fi
    done
}

# --- Logs of runs ---------------------------------------------------------------------------------

# steps_of DIR FIELDS: the fields of every step in a run's log, one line per step.
steps_of() {
    awk -v fields="$2" '/^[{]"step":.*"loss":/ {
        n = split(fields, field, " ")
        for (i = 1; i <= n; i++) {
            match($0, "\"" field[i] "\":[^,}]*")
            skip = length(field[i]) + 3
            printf "%s%s", substr($0, RSTART + skip, RLENGTH - skip), i < n ? " " : "\n"
        }
    }' "$1/log.jsonl" 2> /dev/null
}

median() { sort -g | awk '{ x[NR] = $1 } END { if (NR) printf "%.3f", x[int((NR + 1) / 2)] }'; }

# same_steps DIR DIR: true if loss and norm of all steps exist and agree to all nine digits.
same_steps() {
    [ -n "$(steps_of "$1" loss)" ] &&
        [ "$(steps_of "$1" "loss grad_norm")" = "$(steps_of "$2" "loss grad_norm")" ]
}

# --- 4 b. Two runs with the same bits -------------------------------------------------------------

# Both runs save to the same path, because a checkpoint's header contains the options.
stage_bits() {
    local run status seconds=${limit_s[$stage]} dir=$work/bits
    for run in a b; do
        logged "$seconds" "$GPT2CU" -e "$first_model" -b 4 -x 10 -v 0 -o "$dir"
        status=$?
        if [ $status -ne 0 ]; then
            report "two runs" FAILED "$(why $status "$seconds")"
            rm -rf "$dir"*
            return
        fi
        mv "$dir" "$dir.$run"
    done
    local states
    states=$(cd "$dir.a" && find . -path './step-*' -type f | wc -l)
    if same_steps "$dir.a" "$dir.b" && [ "$states" -gt 0 ] &&
        diff -rq --exclude=log.jsonl --exclude=lock "$dir.a" "$dir.b" >> "$LOGS/bits.log"; then
        report "two runs" ok "10 losses and norms, and the last checkpoint, are equal"
    else
        report "two runs" FAILED "losses, norms or checkpoints differ"
    fi
    rm -rf "$dir".[ab]
}

# --- 4 c. Kernel trials ---------------------------------------------------------------------------

# Tries the candidates for the heads of d12 and reports each verdict. A candidate that crashes or
# hangs ends the command.
stage_prove() {
    local status verdicts tried name rest seconds=${limit_s[$stage]}
    logged "$seconds" "$GPT2CU" --prove 64,1024,12,64
    status=$?
    if grep -q '^gpu .*: 0 candidates$' "$work/last"; then
        report candidates skipped "this GPU has only the default kernels"
        return
    fi
    verdicts=$(awk '/^try / { name = $2 " " $3 }
        name && /^(right|wrong:|crashed:|absent:) / { print name ": " $0; name = "" }' "$work/last")
    tried=$(sed -n 's/^try //p' "$work/last" | tail -n 1)
    while IFS=: read -r name rest; do
        case $rest in
            " right"*) report "$name" ok "right,${rest# right} x as fast as the default" ;;
            " absent"*) report "$name" skipped "${rest# absent: }" ;;
            ?*) report "$name" FAILED "${rest# }" ;;
        esac
    done <<< "$verdicts"
    if [ $status -gt 1 ] || [ -z "$verdicts" ]; then
        report "${tried:-candidates}" FAILED "$(why $status "$seconds")"
    fi
}

# --- 5. Speed and memory --------------------------------------------------------------------------

# largest_batch MODEL LEVEL: the largest power of two up to LARGEST_BATCH whose plan fits the free
# memory; empty, and the plan in $work/last, if not even one sequence fits.
largest_batch() {
    local batch
    for ((batch = LARGEST_BATCH; batch >= 1; batch /= 2)); do
        if bounded 20 "$GPT2CU" --plan -e "$1" -r "$2" -b $batch --gpu-mem "${memory_mib}MiB" \
            --dtype "$DTYPE" \
            > "$work/last" 2>&1; then
            cat "$work/last" >> "$LOGS/speed.log"
            echo $batch
            return
        fi
    done
}

# timed_run DIR SECONDS OPTIONS...: a run of STEPS steps. Sets `measured` to the peak of the GPU's
# memory in use, in MiB, minus what was in use when this script began. Once the last step is in the
# log, which is flushed after every line, the run is killed: the final checkpoint would have 19 GB
# at 1558M.
timed_run() {
    local dir=$1 seconds most lines began=$SECONDS status ended
    seconds=$(limit "$2")
    shift 2
    measured=
    [ "$seconds" -gt 0 ] || return 124
    lines=$(wc -l < "$work/memory")
    "$GPT2CU" "$@" -x "$STEPS" -v 0 -o "$dir" > "$work/last" 2>&1 &
    child=$!
    status=124
    while [ $((SECONDS - began)) -lt "$seconds" ]; do
        sleep 0.2
        if [ "$(steps_of "$dir" step | tail -n 1)" = "$STEPS" ]; then
            status=0
            break
        fi
        if ! kill -0 $child 2> /dev/null; then
            status=1
            break
        fi
    done
    most=$(most_memory "$lines")
    kill -KILL $child 2> /dev/null
    wait $child 2> /dev/null
    ended=$?
    [ $status -ne 1 ] || [ $ended -eq 0 ] || status=$ended
    child=
    # A run may write its last step and end between two checks.
    [ "$(steps_of "$dir" step | tail -n 1)" != "$STEPS" ] || status=0
    [ "$most" -eq 0 ] || measured=$((most - ${idle_mib:-0}))
    { echo "\$ $GPT2CU $* -x $STEPS -v 0"; cat "$work/last" "$dir/log.jsonl"; echo; } \
        >> "$LOGS/speed.log" 2>&1
    rm -rf "$dir"/step-*
    return $status
}

# Compares the time of a step with each state offloaded with that of none; the bits must be equal.
# The rates of copies and of pinning are measured by the stage bench. On a machine with two sockets,
# pinned memory may be on the other socket's NUMA node, and copies then take twice as long: the
# output of `nvidia-smi topo -m` in machine.log shows the GPU's node.
stage_offload() {
    local states dir ms none='' seconds=${limit_s[$stage]} status
    for states in none moments moments,master weights gradients residuals \
        weights,gradients,moments,master,residuals; do
        dir=$work/offload.${states//,/+}
        timed_run "$dir" "$seconds" -e "$first_model" -b 4 -r 1 --offload "$states"
        status=$?
        ms=$(steps_of "$dir" ms | tail -n +$((STEPS / 4 + 1)) | median)
        if [ $status -ne 0 ]; then
            report "offload $states" FAILED "$(why $status "$seconds")"
        elif [ "$states" = none ]; then
            none=$ms
            report "offload $states" ok "$ms ms"
        elif same_steps "$work/offload.none" "$dir"; then
            report "offload $states" ok "$(awk -v ms="$ms" -v none="$none" \
                'BEGIN { printf "%s ms, %.2f of none; the same bits", ms, ms / none }')"
        else
            report "offload $states" FAILED "losses or norms differ from those without offload"
        fi
    done
}

# Prints the largest relative differences of losses and of gradient norms, step by step. Status 0 if
# they are at most LOSS and NORM: the order of sums differs, and bf16 has eight bits. The norm
# reveals gradients of a GPU that are lost or counted twice.
near_steps() {    # near_steps DIR DIR LOSS NORM
    paste -d ' ' <(steps_of "$1" "loss grad_norm") <(steps_of "$2" "loss grad_norm") |
        awk -v most_loss="$3" -v most_norm="$4" '
        function apart(a, b) { return a > b ? (a - b) / a : (b - a) / b }
        NF == 4 && $1 > 0 && $3 > 0 {
            rows++
            if (apart($1, $3) > loss) { loss = apart($1, $3) }
            if (apart($2, $4) > norm) { norm = apart($2, $4) }
        }
        END {
            printf "losses within %.1e, norms within %.1e", loss, norm
            exit !(rows > 0 && rows == NR && loss <= most_loss && norm <= most_norm)
        }'
}

# Runs several ranks on a single GPU, which NCCL from 2.30.7 on allows on request, so that the real
# calls, groups and streams are tested even here. Ranks take turns on the GPU unless MPS runs, and
# NVLink is not used, so times and memory mean nothing; those need MPS or a GPU per rank.
# The runs are in fp32 and have 6 steps, so that results differ from the emulated device's only by
# the order of sums; the CPU program, which uses yet another order, agrees within 1e-7. The results
# of all ZeRO stages must be bitwise equal. With 96 channels, the shards of 2 and 4 ranks end inside
# matrices, and the last one is padded.
shared_gpu() {
    local ranks zero dir status apart refused seconds=${limit_s[$stage]}
    local shared=(env NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_DEBUG=WARN)
    if [ ! -x "$EMULATED" ]; then
        report "NCCL on one GPU" skipped "no $EMULATED to compare with"
        return
    fi
    for ranks in 2 4; do
        set -- -e l3h3c96t16 -b 2 -x 6 -v 0 --dtype fp32 --tune 0 --gpus $ranks
        if ! logged "$seconds" env EMU_GPUS=$ranks "$EMULATED" "$@" -o "$work/emulated$ranks"; then
            report "$EMULATED --gpus $ranks" FAILED "$(why $? "$seconds")"
            return
        fi
        for zero in 0 1 2 3; do
            dir=$work/shared$ranks.$zero
            logged "$seconds" "${shared[@]}" "$GPT2CU" "$@" -z $zero -o "$dir"
            status=$?
            if [ $status -ne 0 ] && [ "$ranks $zero" = "2 0" ]; then
                refused=$(grep -oE '(without NCCL|Multiple Ranks|Duplicate GPU).*' "$work/last" |
                    head -n 1 | cut -c 1-80)
                if [ -n "$refused" ]; then
                    report "NCCL on one GPU" skipped "needs NCCL 2.30.7 (NCCL_HOME): $refused"
                    return
                fi
                shared+=(NCCL_P2P_DISABLE=1)    # through host memory
                rm -rf "$dir"
                logged "$seconds" "${shared[@]}" "$GPT2CU" "$@" -z $zero -o "$dir"
                status=$?
            fi
            if [ $status -ne 0 ]; then
                report "$ranks ranks on it, -z $zero" FAILED "$(why $status "$seconds")"
                [ "$ranks $zero" != "2 0" ] || return    # the others would fail slowly too
            elif ! apart=$(near_steps "$work/emulated$ranks" "$dir" 1e-5 1e-4); then
                report "$ranks ranks on it, -z $zero" FAILED "not the emulated losses: $apart"
            elif ! same_steps "$work/shared$ranks.0" "$dir"; then
                report "$ranks ranks on it, -z $zero" FAILED "losses or norms differ from -z 0"
            else
                report "$ranks ranks on it, -z $zero" ok "$apart of the emulated device's; the \
same bits as -z 0${shared[4]:+; ${shared[4]}}"
            fi
        done
    done
}

# Compares time, numbers and planned bytes of one GPU and of two, with the same tokens per step.
stage_gpus() {
    local run dir ms one='' seconds=${limit_s[$stage]} status T planned given count apart
    count=$(timeout 20 nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | wc -l)
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
        count=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | wc -l)
    fi
    count=${GPUS:-$count}
    if [ "$count" -lt 2 ]; then
        shared_gpu
        return
    fi
    T=$(positions "$first_model")
    for run in "1 -z 0" "2 -z 0" "2 -z 1" "2 -z 2" "2 -z 3"; do
        dir=$work/gpus.${run// /}
        # shellcheck disable=SC2086  # words
        set -- -e "$first_model" -b 4 -d $((8 * T)) -r 1 --offload none --gpus $run \
            --dtype "$DTYPE"
        planned=$(bounded 20 "$GPT2CU" --plan "$@" 2>&1 |
            sed -n 's/^device allocation *\([0-9,]*\) .*/\1/p' | tr -d ,)
        timed_run "$dir" "$seconds" "$@"
        status=$?
        ms=$(steps_of "$dir" ms | tail -n +$((STEPS / 4 + 1)) | median)
        given=$(sed -n 's/.*"plan_bytes":\([0-9]*\).*/\1/p' "$dir/log.jsonl" 2> /dev/null)
        if [ $status -ne 0 ]; then
            report "--gpus $run" FAILED "$(why $status "$seconds")"
        elif [ -z "$given" ] || [ "$given" != "$planned" ]; then
            report "--gpus $run" FAILED "planned ${planned:-no} bytes, allocated ${given:-no}"
        elif [ "$run" = "1 -z 0" ]; then
            one=$ms
            report "--gpus $run" ok "$ms ms; $given bytes"
        elif apart=$(near_steps "$work/gpus.1-z0" "$dir" 2e-3 2e-2); then
            report "--gpus $run" ok "$(awk -v ms="$ms" -v one="$one" \
                'BEGIN { printf "%s ms, %.2f of one'"'"'s", ms, one ? ms / one : 0 }'); $apart; \
$given bytes a GPU as planned, measured ${measured:-not} MiB; $(grep -m 1 -o \
                'libraries took about [0-9.]* [A-Za-z]*' "$work/last")"
        else
            report "--gpus $run" FAILED "differs from one GPU: $apart"
        fi
    done
}

# seconds_for MODEL: more for a large one, which generates a billion random numbers at the start.
seconds_for() {
    case $1 in
    d36 | d48 | gpt2-large | gpt2-xl) echo 120 ;;
    *) echo "${limit_s[$stage]}" ;;
    esac
}

# speed MODEL LEVEL BATCH: one timed run, and its row of the table. It is preceded by one untimed
# step that loads kernels and times algorithms, so that the time limit applies to STEPS only.
speed() {
    local model=$1 level=$2 batch=$3 seconds status T ms tokens planned
    local dir=$work/$model.r$level
    seconds=$(seconds_for "$model") T=$(positions "$model")
    logged "$seconds" "$GPT2CU" -e "$model" -r "$level" -b "$batch" -x 1 -v 0
    status=$?
    if [ $status -eq 0 ]; then
        timed_run "$dir" "$seconds" -e "$model" -r "$level" -b "$batch"
        status=$?
    fi
    if [ $status -ne 0 ]; then
        report "$model -r $level" FAILED "$(why $status "$seconds")"
        return 1
    fi
    # The first quarter is the warm-up.
    ms=$(steps_of "$dir" ms | tail -n +$((STEPS / 4 + 1)) | median)
    tokens=$(awk -v ms="$ms" -v n=$((batch * T)) 'BEGIN { printf "%.0f", 1e3 * n / ms }')
    planned=$(sed -n 's/.*"plan_bytes":\([0-9]*\).*/\1/p' "$dir/log.jsonl" |
        awk '{ printf "%.0f", $1 / 1048576 }')
    echo "${GPT2CU##*/} $model $level $batch $ms $tokens $planned ${measured:--}" \
        >> "$LOGS/speed.rows"
    report "$model -r $level B $batch" ok \
        "$ms ms, $tokens tokens/s; planned $planned MiB, measured ${measured:-not} MiB"
}

# Runs --compare: the program's own table of planned bytes, library memory (cudaMemGetInfo) and
# medians.
compare() {    # compare MODEL BATCH
    local status seconds
    seconds=$(seconds_for "$1")
    logged "$seconds" "$GPT2CU" --compare -e "$1" -b "$2"
    status=$?
    if [ $status -eq 0 ]; then
        { echo "$1, B $2:"; grep -A 3 'planned' "$work/last"; } >> "$LOGS/speed.compare"
        report "compare $1 B $2" ok "$(tail -n 1 "$work/last")"
    else
        report "compare $1 B $2" FAILED "$(why $status "$seconds")"
    fi
}

stage_speed() {
    local model level batch batch_0 batch_1 timed
    # The program's CUDA context will use part of the free memory, so 768 MiB are subtracted.
    memory_mib=${MEMORY_MIB:-$(gpu memory.free | awk '{ print $1 - 768 }')}
    memory_mib=${memory_mib:-16384}
    for model in $MODELS; do
        timed=0
        for level in 0 1; do
            batch=$(largest_batch "$model" $level)
            local batch_$level="$batch"
            if [ -n "$batch" ]; then
                speed "$model" $level "$batch" && timed=$((timed + 1))
            elif [ "$(limit 20)" -eq 0 ]; then
                report "$model -r $level" skipped "no time left"
            elif grep -qE 'DOES NOT FIT|nothing is left' "$work/last"; then
                report "$model -r $level" skipped "no plan fits $memory_mib MiB"
            else
                report "$model -r $level" FAILED "no plan: $(tail -n 1 "$work/last")"
            fi
        done
        # Recomputation must not change a bit: compares the same data step by step.
        if [ $timed -eq 2 ] && [ "$batch_0" = "$batch_1" ]; then
            if same_steps "$work/$model.r0" "$work/$model.r1"; then
                report "$model -r 0, -r 1" ok "losses and norms of $STEPS steps are equal"
            else
                report "$model -r 0, -r 1" FAILED "losses or norms differ, or are missing"
            fi
        fi
        [ -z "$batch_0" ] || compare "$model" "$batch_0"
    done
}

# --- 6. PyTorch -----------------------------------------------------------------------------------

# Runs PyTorch in one process per model; lines printed before its time limit still count.
stage_torch() {
    local model level batch_0 batch_1 status seconds=${limit_s[$stage]} line
    if ! logged 60 "$PYTHON" -c 'import torch'; then
        report all skipped "$PYTHON cannot import torch: $(tail -n 1 "$work/last")"
        return
    fi
    for model in $MODELS; do
        batch_0=$(found rows | awk -v m="$model" '$2 == m && $3 == 0 && !/^torch/ { print $4 }')
        batch_1=$(found rows | awk -v m="$model" '$2 == m && $3 == 1 && !/^torch/ { print $4 }')
        if [ -z "$batch_0$batch_1" ]; then
            report "$model" skipped "no run of ours to compare with"
            continue
        fi
        PYTHONUNBUFFERED=1 logged "$seconds" "$PYTHON" dev/bench/against_torch.py \
            --model "$model" --batch "${batch_0:-$batch_1}" --batch-recompute "${batch_1:-$batch_0}"
        status=$?
        # torch eager d48 -r 0 B 16 T 1024 ms 330.1 tokens/s 49636 MiB 71234
        while read -r line; do
            # shellcheck disable=SC2086  # words
            set -- $line
            echo "$1-$2 $3 $5 $7 ${11} ${13} - ${15}" >> "$LOGS/torch.rows"
            report "$3 $2 -r $5 B $7" ok "${11} ms, ${13} tokens/s, ${15} MiB"
        done < <(grep '^torch .* tokens/s ' "$work/last")
        while read -r line; do
            report "$model" skipped "${line#torch }"
        done < <(grep '^torch .* FAILED' "$work/last")
        [ $status -eq 0 ] || report "$model" skipped "the remaining rows: $(why $status "$seconds")"
    done
}

# --- 7. Kernels alone -----------------------------------------------------------------------------

stage_bench() {
    local status seconds=${limit_s[$stage]}
    if [ ! -x "$BENCH" ] && ! command -v "$BENCH" > /dev/null; then
        report "$BENCH" skipped "not found"
        return
    fi
    logged "$seconds" "$BENCH"
    status=$?
    if [ $status -eq 0 ]; then
        report "$BENCH" ok "$(wc -l < "$work/last") lines in bench.log"
    else
        report "$BENCH" FAILED "$(why $status "$seconds")"
    fi
}

# --- 8. Summary -----------------------------------------------------------------------------------

# Prints the rows (program model level batch ms tokens/s planned measured) as a table. Our rows are
# compared with compiled PyTorch with the same recomputation and batch, or with eager PyTorch if
# that is missing.
table() {
    echo "| program | model | -r | B | ms/step | tokens/s | planned MiB | measured MiB |" \
        "ratio to PyTorch |"
    echo "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    found rows | sort -s -k2,2 -k3,3 | awk '
        { row[NR] = $0; key = $2 " " $3 " " $4; speed[$1 " " key] = $6 }
        END {
            for (i = 1; i <= NR; i++) {
                split(row[i], f, " ")
                key = f[2] " " f[3] " " f[4]
                compiled = speed["torch-compiled " key]
                other = compiled ? compiled : speed["torch-eager " key]
                ratio = "-"
                if (f[1] !~ /^torch-/ && other) {
                    ratio = sprintf("%.2f%s", f[6] / other, compiled ? "" : " (eager)")
                }
                printf "| %s | %s | %s | %s | %.2f | %d | %s | %s | %s |\n", f[1], f[2], f[3], f[4],
                       f[5], f[6], f[7], f[8], ratio
            }
        }'
}

summary() {
    printf '# GPU check\n\n%s\n\n' "${machine:-}"
    table
    cat << TEXT

Medians; a step is B sequences of the model's T, $DTYPE. Measured: the growth of the GPU's used
memory in nvidia-smi, with CUDA context and libraries; planned: the program's single allocation.
PyTorch: fp32 weights under bf16 autocast, SDPA (flash), fused AdamW, the same clipping; -r 1: every
block checkpointed; measured: peak reserved memory plus the context. Ratios: tokens/s of this
program over those of PyTorch.

TEXT
    echo '```'
    found compare
    echo '```'
    printf '\n```\n'
    found verdicts | cut -f 2-
    counts
    found seconds
    echo '```'
}

# timed COMMAND: runs a stage and prints its time next to the expected one.
timed() {
    local began=$SECONDS
    "$@"
    printf '%-10s took %d s; expected on an H200: %d s\n' "$stage" $((SECONDS - began)) \
        "${expected_s[$stage]}" | tee "$LOGS/$stage.seconds"
}

timed stage_machine
[[ " $STAGES " == *" build "* ]] || choose_programs
for stage in $STAGES; do
    begin "$stage"
    if [ "$stage" = build ] || [ "$stage" = test ] || [ "$stage" = bench ] || [ -x "$GPT2CU" ]; then
        timed "stage_$stage"
    else
        report "$GPT2CU" FAILED "no such program"
    fi
    archive
done
summary > "$LOGS/summary.md"
echo
table
echo
found compare
echo
echo "$(counts); $SECONDS s; $LOGS/summary.md; $ARCHIVE"
[ "$(outcomes FAILED)" -eq 0 ]
