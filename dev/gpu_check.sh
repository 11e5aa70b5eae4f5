#!/usr/bin/env bash
# What only a GPU can tell, on a machine with one, in less than 8 minutes: dev/gpu_check.sh
#
# Builds, tests, sanitizers, the oracle's check, equal bits, then speed and memory with PyTorch
# beside. One line a check, ok, FAILED or skipped (why); a failure does not stop the rest. Exit
# status 1 when a check of correctness failed; PyTorch's part never counts. Needs no network.
#
#   OUT=build/gpu_check        where seven logs and summary.md go, which is made anew every time
#   GPT2CU=./train_gpt2cu      the program; one named here is taken as it is and not built
#   TEST=build/test_gpt2cu     its tests, likewise
#   MODELS="d12 d48"           what is timed; the first is also checked
#   STEPS=20 LARGEST_BATCH=16  of a timed run
#   MEMORY_MIB=                memory to plan for; default: what nvidia-smi says is free
#   SECONDS_IN_ALL=465         when it is over, what is left is skipped
#   PYTHON=python3             the one that has torch
#   COMMIT=                    what to print where there is no git
#
# Without a GPU every line of this script but nvcc's can still be run:
#   make train_gpt2cu_cpu && GPT2CU=./train_gpt2cu_cpu TEST=true MODELS=l2h2c64t64 $0
set -u
export LC_ALL=C
cd "$(dirname "$0")/.." || exit 1
OUT=${OUT:-build/gpu_check} PYTHON=${PYTHON:-python3} MODELS=${MODELS:-d12 d48}
STEPS=${STEPS:-20} LARGEST_BATCH=${LARGEST_BATCH:-16} SECONDS_IN_ALL=${SECONDS_IN_ALL:-465}
given_program=${GPT2CU:-} given_test=${TEST:-}
GPT2CU=${GPT2CU:-./train_gpt2cu} TEST=${TEST:-build/test_gpt2cu}
first_model=${MODELS%% *}
mkdir -p "$OUT" build || exit 1
rm -f "$OUT"/[0-6]-*.log "$OUT/summary.md"
# Runs and their checkpoints (1.5 GB at 124M) never go to OUT.
work=$(mktemp -d build/gpu_check.XXXXXX) || exit 1
child=
trap 'if [ -n "$child" ]; then kill -KILL "$child" 2> /dev/null; fi; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
touch "$work"/{lines,rows,compare}
passed=0 failed=0 skipped=0 reported=0

# --- Lines, time and logs -------------------------------------------------------------------------

# report STAGE NAME ok|FAILED|skipped TEXT: a line of the summary. What had no time was skipped. The
# summary on disk is always whole, so that a script stopped from outside leaves what it had found.
report() {
    local outcome=$3
    [[ $4 != "no time left"* ]] || outcome=skipped
    case $outcome in
    ok) passed=$((passed + 1)) ;;
    skipped) skipped=$((skipped + 1)) ;;
    *) failed=$((failed + 1)) ;;
    esac
    printf '%-10s %-26s %-8s %s  (%d s)\n' "$1" "$2" "$outcome" "$4" $((SECONDS - reported)) |
        tee -a "$work/lines"
    reported=$SECONDS
    summary > "$OUT/summary.md"
}

# limit SECONDS: the same, or what is left in all. A limit of 0 means that nothing starts.
limit() {
    local left=$((SECONDS_IN_ALL - SECONDS))
    [ $left -ge 3 ] || left=0
    echo $((left < $1 ? left : $1))
}

# bounded SECONDS COMMAND...: status 124 when the time was up, also before the start. 137 becomes
# 124: the command needed the second, harder signal.
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

# logged LOG SECONDS COMMAND...: the command's output goes, under its own command line, to the end
# of LOG and alone to $work/last.
logged() {
    local log=$OUT/$1 status
    shift
    bounded "$@" > "$work/last" 2>&1
    status=$?
    { echo "\$ ${*:2}"; cat "$work/last"; echo "[exit status $status]"; echo; } >> "$log"
    return $status
}

# why STATUS SECONDS: words for a command that went wrong: the time, or its last line.
why() {
    if [ "$1" -eq 124 ]; then
        [ "$(limit "$2")" -gt 0 ] && echo "not done after $2 s" || echo "no time left"
    else
        local line
        line=$(grep -v '^[[:space:]]*$' "$work/last" | tail -n 1 | cut -c 1-160)
        echo "exit status $1: ${line:-no output}"
    fi
}

# gpu FIELD: one number or name that nvidia-smi knows of the first GPU; nothing without nvidia-smi.
gpu() {
    nvidia-smi --query-gpu="$1" --format=csv,noheader,nounits -i 0 2> /dev/null | head -n 1 |
        grep -v 'N/A'
}

# --- 0. The machine -------------------------------------------------------------------------------

# find_tool NAME: where it is, on the path or in the CUDA toolkit; nothing when it is not there.
find_tool() {
    command -v "$1" && return
    for folder in /usr/local/cuda/bin /usr/local/cuda/compute-sanitizer; do
        [ -x "$folder/$1" ] && echo "$folder/$1" && return
    done
}

stage_machine() {
    local log=$OUT/0-machine.log commit driver name
    commit=$(git rev-parse --short=12 HEAD 2> /dev/null) &&
        { [ -z "$(git status --porcelain 2> /dev/null)" ] || commit="$commit and changes"; }
    commit=${commit:-${COMMIT:-unknown}}
    name=$(gpu name) driver=$(gpu driver_version) idle_mib=$(gpu memory.used)
    nvcc=$(find_tool nvcc)
    machine="${name:-no GPU seen}, driver ${driver:-none}, nvcc $(
        "${nvcc:-false}" --version 2> /dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p' |
            grep . || echo none), commit $commit, $(date -u +%F)"
    { echo "$machine"; uname -srm; nproc; free -m; df -m .; nvidia-smi; } > "$log" 2>&1
    if [ -n "$name" ]; then
        report machine gpu ok "$machine"
    else
        report machine gpu skipped "nvidia-smi shows no GPU; $machine"
    fi
}

# --- 1, 2. Build and tests ------------------------------------------------------------------------

stage_build() {
    local targets=() status seconds=150
    [ -n "$given_program" ] || targets+=(train_gpt2cu)
    [ -n "$given_test" ] || targets+=(build/test_gpt2cu build/test/gpu_program train_gpt2)
    if ! compgen -G 'data/*.bin' > /dev/null; then
        logged 1-build.log 90 make data || report build data FAILED "$(why $? 90)"
    fi
    if [ ${#targets[@]} -eq 0 ]; then
        report build programs skipped "GPT2CU and TEST are given"
        return
    fi
    # Both at once; what went wrong then is built again alone, so that each has a verdict.
    logged 1-build.log $seconds make -k -j2 "${targets[@]}"
    status=$?
    for target in "${targets[@]}"; do
        if [ $status -eq 0 ] || logged 1-build.log $seconds make "$target"; then
            report build "$target" ok "$(du -m "$target" | cut -f 1) MiB"
        else
            report build "$target" FAILED "$(why $? $seconds): $(grep -m 1 'error' "$work/last" |
                cut -c 1-120)"
            rm -f "$target"
        fi
    done
}

# one_test PROGRAM [ARGUMENT...]
one_test() {
    local status counts
    if [ ! -x "$1" ] && ! command -v "$1" > /dev/null; then
        report test "$1" skipped "not there"
        return
    fi
    logged 2-test.log 120 "$@"
    status=$?
    counts=$(tail -n 1 "$work/last")
    if [ $status -eq 0 ]; then
        report test "$1" ok "${counts:-no output}"
    else
        report test "$1" FAILED \
            "$(why $status 120); FAILED stands in $(grep -c FAILED "$work/last") lines"
    fi
}

stage_test() {
    one_test "$TEST"
    [ -n "$given_test" ] || one_test build/test/gpu_program --program "$GPT2CU"
}

# --- 3. compute-sanitizer -------------------------------------------------------------------------

# A kernel with a race in shared memory whose writes land behind the allocation: a tool that works
# on this machine finds its half of that, and the clean bill of one that does not is worth nothing.
planted_bugs() {
    cat << 'CUDA'
__global__ void planted_kernel(int *p) {
    __shared__ int s[64];
    s[threadIdx.x] = threadIdx.x;
    p[64 + s[63 - threadIdx.x]] = 1;
}
int main() {
    int *p;
    cudaMalloc(&p, 64 * sizeof(int));
    planted_kernel<<<1, 64>>>(p);
    return cudaDeviceSynchronize() != cudaSuccess;
}
CUDA
}

# sanitize TOOL LOG COMMAND...: runs the command under the tool.
sanitize() {
    local tool=$1 log=$2
    shift 2
    bounded 75 "$sanitizer" --tool "$tool" --print-limit 20 "$@" > "$log" 2>&1
    echo "[exit status $?]" >> "$log"
}

# errors_in LOG: the count in the tool's last summary; nothing when it never came to one.
errors_in() {
    sed -n 's/^=* *\(ERROR\|RACECHECK\) SUMMARY: *\([0-9]*\).*/\2/p' "$1" | tail -n 1
}

# Which of our kernels a report names. Hazards inside a library's kernels are the library's.
kernels_in() {
    grep -oE '[a-z0-9_]+_kernel' train_gpt2.cu | sort -u | grep -owF -f - "$1" | sort -u |
        tr '\n' ' '
}

sanitizer_verdict() {    # sanitizer_verdict TOOL DTYPE
    local log=$work/$1.$2 errors ours
    errors=$(errors_in "$log")
    ours=$(kernels_in "$log")
    if [ -z "$errors" ]; then
        report sanitizer "$1 $2" skipped "no summary: $(grep . "$log" | tail -n 2 | head -n 1 |
            cut -c 1-120)"
    elif [ "$errors" -eq 0 ] && grep -q '^\[exit status 0\]' "$log"; then
        report sanitizer "$1 $2" ok "no errors"
    elif [ "$errors" -gt 0 ] && [ -z "$ours" ]; then
        report sanitizer "$1 $2" ok "$errors reports, all in kernels of libraries"
    else
        report sanitizer "$1 $2" FAILED "$errors reports ${ours:+in $ours}$(tail -n 1 "$log")"
    fi
}

stage_sanitizer() {
    local log=$OUT/3-sanitizer.log tool dtype pids=()
    sanitizer=$(find_tool compute-sanitizer)
    if [ -z "$sanitizer" ] || [ -z "$nvcc" ]; then
        report sanitizer all skipped "compute-sanitizer or nvcc is not there"
        return
    fi
    planted_bugs > "$work/planted.cu"
    if ! logged 3-sanitizer.log 30 "$nvcc" -arch=native -o "$work/planted" "$work/planted.cu"; then
        report sanitizer all skipped "the probe does not build: $(why $? 30)"
        return
    fi
    # Two layers, tiles with a tail, two chunks of logits. Side by side: nothing here is timed.
    for tool in memcheck racecheck; do
        sanitize $tool "$work/$tool.planted" "$work/planted" & pids+=($!)
        for dtype in bf16 fp32; do
            sanitize $tool "$work/$tool.$dtype" "$GPT2CU" -e l2h2c128t96 -b 2 -x 2 -v 0 -r 1 \
                --logit-rows 128 --dtype $dtype & pids+=($!)
        done
    done
    wait "${pids[@]}"
    for tool in memcheck racecheck; do
        for dtype in planted bf16 fp32; do
            { echo "=== $tool $dtype"; cat "$work/$tool.$dtype"; echo; } >> "$log"
        done
        if [ "$(errors_in "$work/$tool.planted" | grep -v '^0$')" = "" ] ||
            ! grep -q planted_kernel "$work/$tool.planted"; then
            report sanitizer $tool skipped "it does not find a planted error on this machine"
        else
            sanitizer_verdict $tool bf16
            sanitizer_verdict $tool fp32
        fi
    done
}

# --- 4. GPU against oracle ------------------------------------------------------------------------

# positions MODEL: of l2h2c64t64, 64; of a preset, 1024.
positions() {
    if [[ $1 =~ ^l[0-9]+h[0-9]+c[0-9]+t([0-9]+)$ ]]; then
        echo "${BASH_REMATCH[1]}"
    else
        echo 1024
    fi
}

# T is small: the oracle takes the CPU's time.
stage_check() {
    local dtype status T worst
    T=$(positions "$first_model")
    [ "$T" -le 256 ] || T=256
    for dtype in bf16 fp32; do
        logged 4-check.log 60 "$GPT2CU" --check -e "$first_model" -b 1 -t "$T" --dtype $dtype
        status=$?
        worst=$(sed -n 's/^check *\(d[^ ]*\) *relative difference \([0-9.e+-]*\).*/\2 \1/p' \
            "$work/last" | sort -g | tail -n 1)
        if [ $status -eq 0 ] && [ -n "$worst" ]; then
            report check "$first_model $dtype T $T" ok "largest difference $worst"
        else
            report check "$first_model $dtype T $T" FAILED "$(why $status 60)"
        fi
    done
}

# --- Logs of runs ---------------------------------------------------------------------------------

# steps_of DIR FIELDS: the fields of every step of a run's log, a line a step.
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

# same_steps DIR DIR: are loss and norm of all steps the same to all nine digits, and there?
same_steps() {
    [ -n "$(steps_of "$1" loss)" ] &&
        [ "$(steps_of "$1" "loss grad_norm")" = "$(steps_of "$2" "loss grad_norm")" ]
}

# --- 4 b. Two runs, the same bits -----------------------------------------------------------------

# Both runs save to the same path: a checkpoint's header holds the options.
stage_bits() {
    local run status seconds=40 dir=$work/bits
    for run in a b; do
        logged 4-check.log $seconds "$GPT2CU" -e "$first_model" -b 4 -x 10 -v 0 -o "$dir"
        status=$?
        if [ $status -ne 0 ]; then
            report bits "two runs" FAILED "$(why $status $seconds)"
            rm -rf "$dir"*
            return
        fi
        mv "$dir" "$dir.$run"
    done
    local states
    states=$(cd "$dir.a" && find . -path './step-*' -type f | wc -l)
    if same_steps "$dir.a" "$dir.b" && [ "$states" -gt 0 ] &&
        diff -rq --exclude=log.jsonl "$dir.a" "$dir.b" >> "$OUT/4-check.log"; then
        report bits "two runs" ok "10 losses and norms, and the last checkpoint, are equal"
    else
        report bits "two runs" FAILED "losses, norms or checkpoints differ"
    fi
    rm -rf "$dir".[ab]
}

# --- 5. Speed and memory --------------------------------------------------------------------------

# largest_batch MODEL LEVEL: the largest power of two up to LARGEST_BATCH whose plan fits what is
# free now; nothing, and the plan in $work/last, when one sequence does not fit.
largest_batch() {
    local batch
    for ((batch = LARGEST_BATCH; batch >= 1; batch /= 2)); do
        if bounded 20 "$GPT2CU" --plan -e "$1" -r "$2" -b $batch --gpu-mem "${memory_mib}MiB" \
            > "$work/last" 2>&1; then
            cat "$work/last" >> "$OUT/5-speed.log"
            echo $batch
            return
        fi
    done
}

# timed_run DIR SECONDS OPTIONS...: a run of STEPS steps. The variable `measured` becomes the most
# memory in MiB that the GPU had in use meanwhile, less what it had when this script began. The run
# is killed once its last step stands in the log, which is whole after every line: the checkpoint
# that would follow takes 19 GB at 1558M.
timed_run() {
    local dir=$1 seconds most=0 now began=$SECONDS status
    seconds=$(limit "$2")
    shift 2
    measured=
    [ "$seconds" -gt 0 ] || return 124
    "$GPT2CU" "$@" -x "$STEPS" -v 0 -o "$dir" > "$work/last" 2>&1 &
    child=$!
    status=124
    while [ $((SECONDS - began)) -lt "$seconds" ]; do
        sleep 0.2
        now=$(gpu memory.used)
        [ "${now:-0}" -le "$most" ] || most=$now
        if [ "$(steps_of "$dir" step | tail -n 1)" = "$STEPS" ]; then
            status=0
            break
        fi
        if ! kill -0 $child 2> /dev/null; then
            status=1
            break
        fi
    done
    kill -KILL $child 2> /dev/null
    wait $child 2> /dev/null
    [ $status -ne 1 ] || status=$?
    child=
    # A run may have written its last step and ended between two looks.
    [ "$(steps_of "$dir" step | tail -n 1)" != "$STEPS" ] || status=0
    [ "$most" -eq 0 ] || measured=$((most - idle_mib))
    { echo "\$ $GPT2CU $* -x $STEPS -v 0"; cat "$work/last" "$dir/log.jsonl"; echo; } \
        >> "$OUT/5-speed.log" 2>&1
    rm -rf "$dir"/step-*
    return $status
}

# speed MODEL LEVEL BATCH: one timed run, and its row of the table.
speed() {
    local model=$1 level=$2 batch=$3 seconds=60 status T ms tokens planned
    local dir=$work/$model.r$level
    T=$(positions "$model")
    timed_run "$dir" $seconds -e "$model" -r "$level" -b "$batch"
    status=$?
    if [ $status -ne 0 ]; then
        report speed "$model -r $level" FAILED "$(why $status $seconds)"
        return 1
    fi
    # The first quarter warms up.
    ms=$(steps_of "$dir" ms | tail -n +$((STEPS / 4 + 1)) | median)
    tokens=$(awk -v ms="$ms" -v n=$((batch * T)) 'BEGIN { printf "%.0f", 1e3 * n / ms }')
    planned=$(sed -n 's/.*"plan_bytes":\([0-9]*\).*/\1/p' "$dir/log.jsonl" |
        awk '{ printf "%.0f", $1 / 1048576 }')
    echo "${GPT2CU##*/} $model $level $batch $ms $tokens $planned ${measured:--}" >> "$work/rows"
    report speed "$model -r $level B $batch" ok \
        "$ms ms, $tokens tokens/s; planned $planned MiB, measured ${measured:-not} MiB"
}

# The program's own table: planned bytes, what the libraries take by cudaMemGetInfo, medians.
compare() {    # compare MODEL BATCH
    local status
    logged 5-speed.log 75 "$GPT2CU" --compare -e "$1" -b "$2"
    status=$?
    if [ $status -eq 0 ]; then
        { echo "$1, B $2:"; grep -A 3 'planned' "$work/last"; } >> "$work/compare"
        report compare "$1 B $2" ok "$(tail -n 1 "$work/last")"
    else
        report compare "$1 B $2" FAILED "$(why $status 75)"
    fi
}

stage_speed() {
    local model level batch batch_0 batch_1 timed
    memory_mib=${MEMORY_MIB:-$(gpu memory.free)}
    memory_mib=${memory_mib:-16384}
    for model in $MODELS; do
        timed=0
        for level in 0 1; do
            batch=$(largest_batch "$model" $level)
            local batch_$level="$batch"
            if [ -n "$batch" ]; then
                speed "$model" $level "$batch" && timed=$((timed + 1))
            elif [ "$(limit 20)" -eq 0 ]; then
                report speed "$model -r $level" skipped "no time left"
            elif grep -q 'DOES NOT FIT' "$work/last"; then
                report speed "$model -r $level" skipped "no plan fits $memory_mib MiB"
            else
                report speed "$model -r $level" FAILED "no plan: $(tail -n 1 "$work/last")"
            fi
        done
        # Recomputation must not change a bit: the same data, step for step.
        if [ $timed -eq 2 ] && [ "$batch_0" = "$batch_1" ]; then
            if same_steps "$work/$model.r0" "$work/$model.r1"; then
                report bits "$model -r 0, -r 1" ok "losses and norms of $STEPS steps are equal"
            else
                report bits "$model -r 0, -r 1" FAILED "losses or norms differ, or are missing"
            fi
        fi
        [ -z "$batch_0" ] || compare "$model" "$batch_0"
    done
}

# --- 6. PyTorch -----------------------------------------------------------------------------------

# One process a model; what it had printed when its time was up still counts.
stage_torch() {
    local model level batch_0 batch_1 status seconds=120 line
    if ! logged 6-torch.log 60 "$PYTHON" -c 'import torch'; then
        report torch all skipped "$PYTHON cannot import torch: $(tail -n 1 "$work/last")"
        return
    fi
    for model in $MODELS; do
        batch_0=$(awk -v m="$model" '$2 == m && $3 == 0 { print $4 }' "$work/rows")
        batch_1=$(awk -v m="$model" '$2 == m && $3 == 1 { print $4 }' "$work/rows")
        if [ -z "$batch_0$batch_1" ]; then
            report torch "$model" skipped "no run of ours to stand beside"
            continue
        fi
        PYTHONUNBUFFERED=1 logged 6-torch.log $seconds "$PYTHON" dev/bench_torch.py \
            --model "$model" --batch "${batch_0:-$batch_1}" --batch-recompute "${batch_1:-$batch_0}"
        status=$?
        # torch eager d48 -r 0 B 16 T 1024 ms 330.1 tokens/s 49636 MiB 71234
        while read -r line; do
            # shellcheck disable=SC2086  # words
            set -- $line
            echo "$1-$2 $3 $5 $7 ${11} ${13} - ${15}" >> "$work/rows"
            report torch "$3 $2 -r $5 B $7" ok "${11} ms, ${13} tokens/s, ${15} MiB"
        done < <(grep '^torch .* tokens/s ' "$work/last")
        while read -r line; do
            report torch "$model" skipped "${line#torch }"
        done < <(grep '^torch .* FAILED' "$work/last")
        [ $status -eq 0 ] || report torch "$model" skipped "the rest: $(why $status $seconds)"
    done
}

# --- 7. Summary -----------------------------------------------------------------------------------

# Rows: program model level batch ms tokens/s planned measured. The ratio of a row of ours is to
# compiled PyTorch with the same recomputation and batch, to eager PyTorch where that is missing.
table() {
    echo "| program | model | -r | B | ms/step | tokens/s | planned MiB | measured MiB |" \
        "ratio to PyTorch |"
    echo "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    sort -s -k2,2 -k3,3 "$work/rows" | awk '
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

Medians; a step is B sequences of the model's T, bf16. Measured: what nvidia-smi saw the GPU's used
memory grow by, CUDA context and libraries included; planned: the program's one allocation.
PyTorch: fp32 weights under bf16 autocast, SDPA (flash), fused AdamW, the same clipping; -r 1: every
block checkpointed; measured: reserved at most, and the context. Larger ratios are better for us.

TEXT
    echo '```'
    cat "$work/compare"
    echo '```'
    printf '\n```\n'
    cat "$work/lines"
    echo "$passed passed, $failed failed, $skipped skipped"
    echo '```'
}

stage_machine
stage_build
if [ -x "$GPT2CU" ]; then
    stage_test
    stage_sanitizer
    stage_check
    stage_bits
    stage_speed
    stage_torch
else
    report build "$GPT2CU" FAILED "there is no such program: nothing else can run"
fi
summary > "$OUT/summary.md"
echo
table
echo
cat "$work/compare"
echo
echo "$passed passed, $failed failed, $skipped skipped; $SECONDS s; $OUT/summary.md"
[ "$failed" -eq 0 ]
