#!/usr/bin/env bash
# Runs the checks that need a GPU: dev/gpu_check.sh
#
# Prints one line per check: ok, FAILED or skipped (why), and continues after a failure. Exit status
# 1 if a correctness check failed; the stage torch never fails. Needs no network. Logs, results and
# summary.md, a page to paste into an issue, are in LOGS, which is packed into ARCHIVE after each
# stage. Stages that are not run keep the results of earlier calls. If a machine is available for
# only ten minutes at a time, name other stages in each call:
#
#   SECONDS_IN_ALL=580 STAGES="build check speed update" dev/gpu_check.sh
#
# Programs can be built elsewhere and copied here: `make NCCL= ARCH=90a MARCH=-march=x86-64-v3
# train_gpt2cu build/test_gpt2cu` builds programs that need only the toolkit's libraries, which the
# stage build lists. An NCCL outside the toolkit, such as nvidia/nccl in an unpacked wheel, is found
# through CPATH, LIBRARY_PATH and LD_LIBRARY_PATH. Variables (paths are relative to the repository):
#
#   STAGES=                    stages to run, in this order; default: all, as in the table below
#   LOGS=build/gpu_check       folder of logs, results, summary.md and the program's choices
#   ARCHIVE=$LOGS.tar.gz       all of LOGS in one file
#   GPT2CU=./train_gpt2cu TEST=build/test_gpt2cu BENCH=build/bench
#                              program, tests and benchmark; those given here are not built
#   MODELS="d12 d48"           models that are timed; the first is also checked
#   STEPS=20 LARGEST_BATCH=16  steps (d48: at most 8) and largest batch of a timed run
#   TOKENS=524288              tokens per step of the timed run with the settings of --fit bits
#   FP8="d48:16 d24:32"        models and batches that are timed with and without fp8 matmuls
#   GPUS=                      number of GPUs; default: as many as nvidia-smi lists
#   DTYPE=                     the 16-bit type; default: bf16, or fp16 below compute capability 8.0
#   SECONDS_IN_ALL=            total time limit; default: none
#   PYTHON=python3             the interpreter that has torch
#
# Without a GPU, the script exits at once unless GPT2CU is set:
#   make train_gpt2cu_cpu && GPT2CU=./train_gpt2cu_cpu TEST=true BENCH=true MODELS=l2h2c64t64 $0
set -u
export LC_ALL=C CUDA_DEVICE_ORDER=PCI_BUS_ID    # the first GPU is nvidia-smi's first
PATH=$PATH:/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer
unset CDPATH    # else cd could change to another folder and print it
cd "$(dirname "$0")/.." || exit 1
# The stages, and for each the time limit of its commands, in seconds, on a machine with 16 or more
# cores; with fewer cores the limits are proportionally longer.
all_stages="build check speed update fp8 torch bench bits test sanitizer offload gpus"
declare -A limit_s=([build]=150 [check]=60 [speed]=600 [update]=120 [fp8]=300 [torch]=300
                    [bench]=120 [bits]=120 [test]=180 [sanitizer]=90 [offload]=60 [gpus]=60)
cores=$(nproc)
STAGES=${STAGES-$all_stages}
LOGS=${LOGS:-build/gpu_check} PYTHON=${PYTHON:-python3} MODELS=${MODELS:-d12 d48}
STEPS=${STEPS:-20} LARGEST_BATCH=${LARGEST_BATCH:-16} TOKENS=${TOKENS:-524288}
FP8=${FP8-d48:16 d24:32}
SECONDS_IN_ALL=${SECONDS_IN_ALL:-1000000}
given_program=${GPT2CU:-} given_test=${TEST:-} given_bench=${BENCH:-}
GPT2CU=${GPT2CU:-./train_gpt2cu} TEST=${TEST:-build/test_gpt2cu} BENCH=${BENCH:-build/bench}
first_model=${MODELS%% *}
for stage in $STAGES; do
    if [[ " $all_stages " != *" $stage "* ]]; then
        echo "gpu_check.sh: STAGES has no stage '$stage': $all_stages" >&2
        exit 1
    fi
done
# The first GPU visible to programs, as nvidia-smi identifies it; never a MIG slice.
first_gpu=${CUDA_VISIBLE_DEVICES:-0} first_gpu=${first_gpu%%,*}
[[ $first_gpu =~ ^([0-9]+|GPU-.*)$ ]] || first_gpu=0

# gpu FIELD: prints what nvidia-smi reports for the first GPU, or nothing if it fails, e.g. because
# there is no GPU: nvidia-smi then prints a message to stdout.
gpu() {
    local said
    said=$(timeout 20 nvidia-smi --query-gpu="$1" --format=csv,noheader,nounits -i "$first_gpu" \
        2> /dev/null) && head -n 1 <<< "$said" | grep -v 'N/A'
}

name=$(gpu name)
if [ -z "$name$given_program" ]; then    # checked before the build, which takes minutes
    echo "gpu_check.sh: nvidia-smi shows no GPU; to continue without one, name a program:" \
        "GPT2CU=./train_gpt2cu_cpu" >&2
    exit 1
fi
mkdir -p "$LOGS" build && LOGS=$(cd "$LOGS" && pwd) || exit 1
ARCHIVE=${ARCHIVE:-$LOGS.tar.gz}
export XDG_CACHE_HOME=$LOGS/cache    # so that the archive holds only this GPU's choices
# Runs and their checkpoints (1.5 GB at 124M) never go to LOGS.
work=$(mktemp -d "$PWD/build/gpu_check.XXXXXX") || exit 1
watcher=
trap 'kill $watcher 2> /dev/null; archive; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
# A program without a RUNPATH finds its libraries in a toolkit, or in PyTorch's packages.
packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' 2> /dev/null)
for folder in /usr/local/cuda/lib64 "$packages"/nvidia/*/lib; do
    [ -d "$folder" ] && LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
done
export LD_LIBRARY_PATH
reported=0 cut='' steps=$STEPS

# --- Lines, time and logs -------------------------------------------------------------------------

# Packs LOGS into ARCHIVE, which is never incomplete. tar returns 1 if a file grew meanwhile.
archive() {
    { tar -czf "$ARCHIVE.part" --exclude="${ARCHIVE##*/}*" -C "${LOGS%/*}" "${LOGS##*/}" ||
        [ $? -eq 1 ]; } 2> /dev/null && mv "$ARCHIVE.part" "$ARCHIVE"
}

# report NAME ok|FAILED|skipped TEXT: adds a line to the summary. "no time left" means skipped.
report() {
    local outcome=$2
    [[ $3 != "no time left"* ]] || outcome=skipped
    printf '%s\t%-10s %-26s %-8s %s  (%d s)\n' "$outcome" "$stage" "$1" "$outcome" "$3" \
        $((SECONDS - reported)) | tee -a "$LOGS/$stage.results" | cut -f 2-
    reported=$SECONDS
}

# found results|rows: prints the results of all calls, stage by stage.
found() {
    for each in machine $all_stages; do
        if [ -f "$LOGS/$each.$1" ]; then cat "$LOGS/$each.$1"; fi
    done
}
outcomes() { found results | cut -f 1 | grep -cx "$1"; }

# logged COMMAND...: runs the command within the stage's time limit and the total one. Appends the
# command line and the output to the stage's log, and writes the output to $work/last. Returns, and
# sets $status to, the exit status, or 124 if time ran out, even before the start; $cut then names
# the stage. A command that had to be killed (137) counts as that.
logged() {
    local left=$((SECONDS_IN_ALL - SECONDS)) most=${limit_s[$stage]}
    most=$((cores < 16 ? most * 16 / cores : most))
    : > "$work/last"
    status=124
    if [ $left -ge 3 ]; then
        timeout --kill-after=5 $((left < most ? left : most)) "$@" > "$work/last" 2>&1
        status=$?
    fi
    { echo "\$ $*"; cat "$work/last"; echo "[exit status $status]"; echo; } >> "$LOGS/$stage.log"
    [ $status -ne 137 ] || status=124
    [ $status -ne 124 ] || [[ "$cut " == *" $stage "* ]] || cut+=" $stage"
    return $status
}

# Describes why the last command failed: the time limit, or the last line of its output.
why() {
    if [ $status -eq 124 ]; then
        [ $((SECONDS_IN_ALL - SECONDS)) -ge 3 ] && echo "not done in time" || echo "no time left"
    else
        echo "exit status $status: $(grep -v '^[[:space:]]*$' "$work/last" | tail -n 1 |
            cut -c 1-160)"
    fi
}

# must NAME COMMAND...: like logged, but reports a failure.
must() {
    local what=$1
    shift
    logged "$@" || { report "$what" FAILED "$(why)" && false; }
}

# --- Runs -----------------------------------------------------------------------------------------

# run DIR OPTIONS...: trains for $steps steps with a log in DIR (-: no log, no checkpoint). Sets
# $ms to the median step time after the first quarter, and $measured to the increase of the GPU's
# used memory, in MiB, since this script began.
run() {
    local dir=$1 lines
    shift
    [ "$dir" = - ] || set -- "$@" -o "$dir"
    lines=$(wc -l < "$work/memory")
    logged "$GPT2CU" "$@" -x "$steps" -v 0 --log-every 1
    ms=$(sed -n 's/^step .* \([0-9.,]*\) ms .*/\1/p' "$work/last" | tr -d , |
        tail -n +$((steps / 4 + 1)) | sort -g |
        awk '{ x[NR] = $1 } END { if (NR) printf "%.2f", x[int((NR + 1) / 2)] }')
    measured=$(tail -n +$((lines + 1)) "$work/memory" | sort -n | tail -n 1 |
        awk -v idle="$idle_mib" '{ print $1 - idle }')
    [ "$dir" = - ] || rm -rf "$dir"/step-*
    [ -n "$ms" ] || [ $status -ne 0 ] || status=1
    return $status
}

# timed NAME OPTIONS...: like run, without a log, and adds a row: program, options, ms, tokens/s,
# ratio to the forecast, MiB measured and planned. Sets $host to the planned bytes of host memory.
timed() {
    local what=$1 numbers batch length device forecast tokens speed ratio
    shift
    run - "$@" || { report "$what" FAILED "$(why)"; return 1; }
    numbers=$(printf '.*"%s":\([0-9a-z]*\)' batch seq_len device_bytes host_bytes tokens_per_s)
    read -r batch length device host forecast < <("$GPT2CU" --plan --json "$@" 2> /dev/null |
        sed -n "s/^$numbers.*/\1 \2 \3 \4 \5/p" | head -n 1)
    tokens=$((batch * length)) device=$((device >> 20))
    [[ $* =~ \ -d\ ([0-9]+) ]] && tokens=${BASH_REMATCH[1]}
    read -r speed ratio < <(awk -v ms="$ms" -v n="$tokens" -v f="$forecast" 'BEGIN {
        printf("%.0f %s\n", 1e3 * n / ms, f + 0 > 0 ? sprintf("%.2f", 1e3 * n / ms / f) : "-") }')
    printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "${GPT2CU##*/}" "${*:2}" "$ms" "$speed" "$ratio" \
        "${measured:--}" $device >> "$LOGS/$stage.rows"
    report "$what" ok "$ms ms, $speed tokens/s, $ratio of the forecast; \
measured ${measured:-no} MiB, planned $device and libraries"
}

# losses DIR: prints loss and norm of every step in a run's log, with all digits.
losses() {
    sed -n 's/^{"step":.*"loss":\([^,]*\),.*"grad_norm":\([^,]*\),.*/\1 \2/p' "$1/log.jsonl" \
        2> /dev/null
}

# same_steps DIR DIR: true if loss and norm of all steps exist and agree to all digits.
same_steps() { [ -n "$(losses "$1")" ] && [ "$(losses "$1")" = "$(losses "$2")" ]; }

# near_steps DIR DIR LOSS NORM: prints the largest relative differences of losses and of norms.
# Succeeds if they are at most LOSS and NORM, which are not 0 because the order of sums differs and
# bf16 has eight bits. The norm reveals whether a GPU's gradients are lost or counted twice.
near_steps() {
    paste -d ' ' <(losses "$1") <(losses "$2") | awk -v most_loss="$3" -v most_norm="$4" '
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

# positions MODEL: prints 64 for l2h2c64t64, 1024 for a preset.
positions() { [[ $1 =~ c[0-9]+t([0-9]+)$ ]] && echo "${BASH_REMATCH[1]}" || echo 1024; }

# --- Stages ---------------------------------------------------------------------------------------

# Records the machine and, from now on, the GPU memory in use, five times a second. nvidia-smi thus
# stays a client of the driver, which saves every run seconds of GPU initialization.
stage_machine() {
    local commit
    commit=$(git rev-parse --short=12 HEAD 2> /dev/null || echo unknown)
    idle_mib=$(gpu memory.used)
    idle_mib=${idle_mib:-0}
    case $(gpu compute_cap) in 7.*) DTYPE=${DTYPE:-fp16} ;; esac
    DTYPE=${DTYPE:-bf16}
    machine="${name:-no GPU seen}, driver $(gpu driver_version | grep . || echo none), nvcc $(
        nvcc --version 2> /dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p' |
            grep . || echo none), commit $commit, $(date -u +%F)"
    { uname -srm; nproc; free -m; df -m .; timeout 20 nvidia-smi; timeout 20 nvidia-smi topo -m; } \
        > "$LOGS/machine.log" 2>&1
    report gpu "$([ -n "$name" ] && echo ok || echo skipped)" "$machine"
    touch "$work/memory"
    if [ -n "$name" ]; then
        stdbuf -oL nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits \
            -i "$first_gpu" -lms 200 > "$work/memory" 2> /dev/null &
        watcher=$!
        disown    # no message when it ends
    fi
}

stage_build() {
    local targets=() target needs
    [ -n "$given_program" ] || targets+=(train_gpt2cu)
    [ -n "$given_test" ] || targets+=(build/test_gpt2cu)
    [ -n "$given_bench" ] || targets+=(build/bench)
    if ! compgen -G 'data/*.bin' > /dev/null; then
        must data make data
    fi
    # Builds all at once and, if that fails, one by one, so that each failure is reported.
    [ ${#targets[@]} -eq 0 ] || logged make -k -j"$(nproc)" "${targets[@]}" ||
        for target in "${targets[@]}"; do
            must "$target" make "$target"
        done
    for target in "$GPT2CU" "$TEST" "$BENCH"; do
        [ ! -f "$target" ] || report "$target" ok "$(du -m "$target" | cut -f 1) MiB"
    done
    needs=$(readelf -d "$GPT2CU" 2> /dev/null | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        grep -v '^lib\(c\|m\|dl\|rt\|gcc_s\|stdc++\|gomp\|pthread\)\.so\|^ld-' | tr '\n' ' ')
    report libraries ok "besides the system's: ${needs:-none}"
}

# Batches are small because the CPU computes them too. In the second one, the k dimension of all
# weight-gradient matmuls is 1,092 tokens, 4 more than a multiple of 64: cuBLASLt has split such a k
# and dropped the remainder (facebookexperimental/triton PR 2767), which the emulated library cannot
# reproduce. The error would be sqrt(4 / 1092), or 6 %.
stage_check() {
    local dtype batch T worst
    T=$(positions "$first_model")
    [ "$T" -le 256 ] || T=256
    for batch in "1 $T" "42 26"; do
        for dtype in "$DTYPE" fp32; do
            set -- "$first_model $dtype B ${batch/ / T }"
            must "$1" "$GPT2CU" --check -e "$first_model" -b "${batch% *}" -t "${batch#* }" \
                --dtype "$dtype" || continue
            worst=$(sed -n 's/^check *d.* relative difference \([0-9.e+-]*\).*/\1/p' \
                "$work/last" | sort -g | tail -n 1)
            report "$1" ok "largest relative difference of a gradient $worst"
        done
    done
}

# Two runs must be bit-identical. Both save to the same path because checkpoints contain it.
# Recomputation must not change a bit of losses and norms.
stage_bits() {
    local run dir=$work/bits
    for run in 0a 0b 1; do    # level of recomputation
        must "-r ${run:0:1}" "$GPT2CU" -e "$first_model" -r ${run:0:1} -b 4 -x 10 -v 0 -o "$dir" ||
            return
        mv "$dir" "$dir.$run"
    done
    same_steps "$dir.0a" "$dir.0b" && compgen -G "$dir.0a/step-*" > /dev/null &&
        diff -rq --exclude=log.jsonl --exclude=lock "$dir.0a" "$dir.0b" >> "$LOGS/bits.log" &&
        report "two runs" ok "10 losses and norms, and the last checkpoint, are equal" ||
        report "two runs" FAILED "losses, norms or checkpoints differ"
    same_steps "$dir.0a" "$dir.1" && report "-r 0, -r 1" ok "losses and norms are equal" ||
        report "-r 0, -r 1" FAILED "losses or norms differ"
    rm -rf "$dir".*
}

# Times every model without offload, with and without recomputation, at the largest batch that fits
# (the program exits with 3 if one does not), and as --fit bits recommends for TOKENS per step. An
# untimed first run loads kernels and chooses algorithms.
stage_speed() {
    local model level batch fit
    for model in $MODELS; do
        [ "$model" != d48 ] || [ "$STEPS" -le 8 ] || steps=8
        for level in 0 1; do
            for ((batch = LARGEST_BATCH; batch >= 1; batch /= 2)); do
                set -- -e "$model" -r $level -b $batch --offload none
                logged "$GPT2CU" "$@" -x 1 -v 0
                [ $status -eq 3 ] || break
            done
            case $status in
                0) timed "$model -r $level B $batch" "$@" ;;
                3) report "$model -r $level" skipped "does not fit: $(tail -n 1 "$work/last")" ;;
                *) report "$model -r $level" FAILED "$(why)" ;;
            esac
        done
        steps=2
        read -r -a fit < <("$GPT2CU" --fit bits -e "$model" -d "$TOKENS" --json | tr -d '\n' |
            sed -n 's/.*"best":\[{[^}]*"options":"\([^"]*\)".*/\1/p')
        [ -n "${fit[*]}" ] || report "$model --fit" skipped "nothing fits"
        [ -z "${fit[*]}" ] || timed "$model --fit" -e "$model" -d "$TOKENS" "${fit[@]}"
        steps=$STEPS
    done
}

# Times Muon, and AdamW with its states in host memory, which an update reads and writes once: their
# bytes over the time by which the step is longer than with states on the device.
stage_update() {
    local options none=
    for options in "--offload none" "--offload none --optimizer muon" \
        "--offload moments,master" "--offload moments,master --moments bf16"; do
        # shellcheck disable=SC2086
        timed "$options" -e "$first_model" -r 0 -b 4 $options || continue
        none=${none:-$ms}
        [[ $options == *none* ]] || report "in host memory" ok "$(awk -v ms="$ms" -v none="$none" \
            -v bytes="$host" 'BEGIN { print(ms > none ? bytes / (ms - none) / 1e6 : "-") }') GB/s"
    done
}

# Losses of 50 steps with fp8 matmuls beside bf16's, then both times where fp8 must be faster.
stage_fp8() {
    local row matmul said steps=50
    for matmul in dtype fp8; do
        run "$work/fp8.$matmul" -e "$first_model" -r 0 -b 4 --matmul $matmul && continue
        grep -q 'matmul fp8 requires' "$work/last" && said=skipped || said=FAILED
        report fp8 $said "$(why)"
        return
    done
    said=$(near_steps "$work/fp8.dtype" "$work/fp8.fp8" 2e-2 3e-1) &&
        report "50 steps" ok "$said" || report "50 steps" FAILED "$said"
    steps=$STEPS
    for row in $FP8; do
        for matmul in dtype fp8; do
            timed "${row/:/ -b } --matmul $matmul" -e "${row%:*}" -r 0 -b "${row#*:}" \
                --offload none --matmul $matmul
        done
    done
}

stage_test() { must "$TEST" "$TEST" && report "$TEST" ok "$(tail -n 1 "$work/last")"; }

stage_bench() { must "$BENCH" "$BENCH" && report "$BENCH" ok "$(tail -n 1 "$work/last")"; }

# The probe has a race in shared memory, a write past the end of an allocation and a read of memory
# that nothing has written. Each tool must find its kind of error in it; otherwise the tool does not
# work on this machine, and a clean report would mean nothing. Only kernels whose names end in
# _kernel are checked: all of ours, and hardly any of the libraries', which are slow to check and
# not ours to fix. racecheck ends with an internal error in 16-bit attention. initcheck checks fp32
# only, because it does not see that cuBLASLt's 16-bit matmuls write their results (by TMA).
stage_sanitizer() {
    local tool dtype ours
    local -a exclude
    cat > "$work/injected.cu" << 'CUDA'
__global__ void injected_kernel(int *p) {
    __shared__ int s[64];
    s[threadIdx.x] = p[threadIdx.x] & 63;
    p[64 + s[63 - threadIdx.x]] = 1;
}
int main() {
    int *p;
    cudaMalloc(&p, 64 * sizeof(int));
    injected_kernel<<<1, 64>>>(p);
    return cudaDeviceSynchronize() != cudaSuccess;
}
CUDA
    if ! command -v compute-sanitizer > /dev/null ||
        ! logged nvcc -arch=native -lineinfo -o "$work/injected" "$work/injected.cu"; then
        report all skipped "no compute-sanitizer, or nvcc does not build a probe"
        return
    fi
    for tool in memcheck racecheck initcheck; do
        # Without OMP_WAIT_POLICY the program restarts itself, and the tool might lose it.
        set -- env OMP_WAIT_POLICY=passive compute-sanitizer --tool $tool --error-exitcode 9 \
            --kernel-name kns=_kernel --report-api-errors explicit --print-limit 1000
        if logged "$@" "$work/injected" || ! grep -q injected_kernel "$work/last"; then
            report $tool skipped "it does not find an injected error on this machine"
            continue
        fi
        for dtype in "$DTYPE" fp32; do
            exclude=()
            case "$tool $dtype" in
                "initcheck $DTYPE") continue ;;
                "racecheck $DTYPE") exclude=(--kernel-name-exclude kns=attention) ;;
            esac
            # Two layers, tiles with a remainder, two chunks of logits.
            logged "$@" "${exclude[@]}" env XDG_CACHE_HOME="$work/$tool.$dtype" "$GPT2CU" \
                -e l2h2c128t96 -b 2 -x 2 -v 0 -r 1 --logit-rows 128 --dtype "$dtype"
            ours=$(grep -oE 'at [A-Za-z0-9_]+_kernel' "$work/last" | sort -u | tr '\n' ' ')
            if [ $status -eq 0 ]; then
                report "$tool $dtype" ok "no errors in our kernels"
            elif grep -q splitKreduce_kernel <<< "$ours" && [ "$(wc -w <<< "$ours")" -eq 2 ]; then
                report "$tool $dtype" ok "errors only in cuBLASLt's splitKreduce_kernel"
            elif [ -z "$ours" ] && grep -q 'Internal Sanitizer Error' "$work/last"; then
                report "$tool $dtype" skipped "the tool failed: Internal Sanitizer Error"
            else
                report "$tool $dtype" FAILED "$ours$(why)"
            fi
        done
    done
}

# Compares step times with each state offloaded and with none; results must be bit-identical.
stage_offload() {
    local states dir none=''
    for states in none moments moments,master weights gradients residuals \
        weights,gradients,moments,master,residuals; do
        dir=$work/offload.${states//,/+}
        if ! run "$dir" -e "$first_model" -b 4 -r 1 --offload "$states"; then
            report "offload $states" FAILED "$(why)"
        elif same_steps "$work/offload.none" "$dir"; then
            none=${none:-$ms}
            report "offload $states" ok "$(awk -v ms="$ms" -v none="$none" \
                'BEGIN { printf "%s ms, %.2f x none; the same bits", ms, ms / none }')"
        else
            report "offload $states" FAILED "losses or norms differ from those without offload"
        fi
    done
}

# Compares one GPU with two or, if there is only one, with 2 and 4 ranks that share it, which NCCL
# allows on request since 2.30.7: this tests the real calls and streams, but its times mean nothing.
# Shared runs use fp32, where results differ only by the order of sums; with 96 channels the shards
# of 2 and 4 ranks end inside matrices, and the last one is padded.
stage_gpus() {
    local ranks zero dir count apart list="2 4" tokens loss=1e-5 norm=1e-4 rows=4
    count=${GPUS:-$(timeout 20 nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null |
        wc -l)}
    set -- -e l3h3c96t16 --dtype fp32 -d 256
    export NCCL_DEBUG=WARN
    if [ "$count" -ge 2 ]; then
        list=2 loss=2e-3 norm=2e-2 tokens=$((8 * $(positions "$first_model")))
        set -- -e "$first_model" --dtype "$DTYPE" -d $tokens -r 1 --offload none
    else
        export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0
    fi
    if ! run "$work/gpus.1" "$@" -b $rows; then
        report "one rank" FAILED "$(why)"
        return
    fi
    report "one rank" ok "$ms ms"
    for ranks in $list; do
        for zero in 0 1 2 3; do
            dir=$work/gpus.$ranks.$zero
            if ! run "$dir" "$@" -b $((rows * 2 / ranks)) --gpus "$ranks" -z $zero; then
                if grep -qE 'without NCCL|Multiple Ranks|Duplicate GPU' "$work/last"; then
                    report "$ranks ranks" skipped "needs NCCL 2.30.7: $(tail -n 1 "$work/last")"
                    return
                fi
                report "$ranks ranks, -z $zero" FAILED "$(why)"
            elif apart=$(near_steps "$work/gpus.1" "$dir" $loss $norm); then
                same_steps "$work/gpus.$ranks.0" "$dir" && apart+="; the same bits as -z 0"
                report "$ranks ranks, -z $zero" ok "$ms ms; $apart; measured ${measured:-no} MiB"
            else
                report "$ranks ranks, -z $zero" FAILED "differs from one rank: $apart"
            fi
        done
    done
    unset NCCL_MULTI_RANK_GPU_ENABLE NCCL_NVLS_ENABLE NCCL_DEBUG
}

# Runs PyTorch in one process per model; lines printed before its time limit still count.
stage_torch() {
    local model row
    batch() {    # of our row at this level
        sed -n "s/.*\t$model -r $1 -b \([0-9]*\) --offload none\t.*/\1/p" "$LOGS/speed.rows" |
            grep . || echo 1
    }
    for model in $MODELS; do
        PYTHONUNBUFFERED=1 logged "$PYTHON" dev/check/bench_torch.py --model "$model" \
            --dtype "$DTYPE" --batch "$(batch 0)" --batch-recompute "$(batch 1)" ||
            report "$model" skipped "$(why)"
        # torch eager d48 -r 0 B 16 T 1024 ms 330.1 tokens/s 49636 MiB 71234
        while read -r -a row; do
            printf '%s\t%s -r %s -b %s --offload none\t%s\t%s\t-\t%s\t-\n' "torch-${row[1]}" \
                "${row[2]}" "${row[4]}" "${row[6]}" "${row[10]}" "${row[12]}" "${row[14]}" \
                >> "$LOGS/torch.rows"
            report "${row[2]} ${row[1]} -r ${row[4]} B ${row[6]}" ok "${row[*]:9}"
        done < <(grep '^torch .* tokens/s ' "$work/last")
    done
}

# --- Summary --------------------------------------------------------------------------------------

# Prints the rows as a table. Ours are compared with compiled PyTorch at the same recomputation and
# batch, or else with eager PyTorch.
table() {
    echo "| program | run | ms/step | tokens/s | of forecast | measured MiB | planned MiB |" \
        "of PyTorch |"
    echo "| --- | --- | --- | --- | --- | --- | --- | --- |"
    awk -F '\t' '
        NR == FNR { speed[$1 $2] = $4; next }
        {
            other = speed["torch-compiled" $2]
            other = $1 ~ /^torch-/ ? 0 : other ? other : speed["torch-eager" $2]
            ratio = other ? sprintf("%.2f", $4 / other) : "-"
            gsub("\t", " | ")
            print "| " $0 " | " ratio " |"
        }' <(found rows) <(found rows | sort -s -t $'\t' -k2,2)
}

# Prints this card's row of the first table in dev/notes/gpu.md: the card, our runs, the largest
# difference of measured and planned MiB, and the checks.
card_row() {
    echo "| ${machine//, /; } | $(found rows | awk -F '\t' '
        !/^torch/ {
            printf "%s%s: %s ms, %s tokens/s, %s of forecast", n++ ? "; " : "", $2, $3, $4, $5
            if ($6 - $7 > library) { library = $6 - $7 }
        }
        END { printf "%s | %s", n ? "" : "-", library ? library : "-" }') | $(outcomes ok) ok," \
        "$(outcomes FAILED) failed, $(outcomes skipped) skipped |"
}

summary() {
    printf '# GPU check\n\n%s\n\n' "$machine"
    table
    cat << TEXT

Medians, $DTYPE. Measured: the growth of the GPU's used memory, with CUDA context and libraries.
Planned: without them. PyTorch: fp32 weights under $DTYPE autocast, SDPA (flash), fused AdamW, the
same clipping; -r 1: every block checkpointed. Ratios are of tokens/s.${cut:+
Cut by a time limit:$cut.}

TEXT
    printf '```\n'
    found results | cut -f 2-
    printf '```\n\nRow for dev/notes/gpu.md:\n\n'
    card_row
}

for stage in machine $STAGES; do
    rm -f "$LOGS/$stage".{log,results,rows}
    if [ -x "$GPT2CU" ] || [[ " machine build test bench " == *" $stage "* ]]; then
        "stage_$stage"
    else
        report "$GPT2CU" FAILED "no such program"
    fi
    summary > "$LOGS/summary.md"    # so results survive if the script is killed
    archive
done
echo
table
echo
echo "$(outcomes ok) passed, $(outcomes FAILED) failed, $(outcomes skipped) skipped; $SECONDS s;" \
    "${cut:+cut by a time limit:$cut; }$LOGS/summary.md; $ARCHIVE"
[ "$(outcomes FAILED)" -eq 0 ]
