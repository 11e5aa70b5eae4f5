#!/usr/bin/env bash
# Tests of dev/gpu_check.sh without a GPU, in addition to those in machines.sh: its order, limits
# and archive in an unusual environment, and how it judges ranks that share a GPU. Small scripts
# take the place of nvidia-smi, nvcc, timeout and the programs; they record how they were called.
# One line per test, last line `N passed, N failed, N skipped`.
set -u
cd "$(dirname "$0")/../.." || exit 1
mkdir -p build
scratch=$(mktemp -d "$PWD/build/gpu check.XXXXXX") || exit 1
trap 'rm -rf "$scratch"' EXIT
. dev/test/verdicts.sh gpu_check
mkdir "$scratch"/{bin,OUT,nccl,nccl/include,nccl/lib}
cat > "$scratch/bin/nvidia-smi" << 'END'
#!/bin/sh
echo "nvidia-smi $*" >> "$CALLS"
case "$*" in
    *compute_cap*) echo 9.0 ;;
    *-lms*) exec sleep 20 ;;
    *memory*) echo 100000 ;;
    *) echo Fake ;;
esac
END
cat > "$scratch/bin/nvcc" << 'END'
#!/bin/sh
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then printf '#!/bin/sh\n%s\n' "${PROBE-echo 450}" > "$2" && chmod +x "$2"; fi
    shift
done
END
cat > "$scratch/bin/timeout" << 'END'
#!/bin/sh
echo "timeout $2 $(shift 2; echo "${*##*/}")" >> "$CALLS"
exec /usr/bin/timeout "$@"
END
# A program whose runs have the same losses as the emulated one's, except for what FAULT injects.
cat > "$scratch/bin/program" << 'END'
#!/bin/bash
echo "program XDG_CACHE_HOME=$XDG_CACHE_HOME P2P=${NCCL_P2P_DISABLE-} $*" >> "$CALLS"
steps=0 zero='' ranks=1 folder=''
while [ $# -gt 0 ]; do
    case $1 in
        --check) echo 'check  dwte  relative difference 1.0e-03' ;;
        --prove)
            echo "gpu Planted: $([ "${FAULT-}" = none ] && echo 0 || echo 3) candidates"
            [ "${FAULT-}" != none ] || exit 0
            printf 'try forward wgmma\nright 1.432\ntry dq wgmma\n'
            case ${FAULT-} in
                wrong) printf 'wrong: dQ differs\ntry dkv wgmma\nabsent: older\n'; exit 1 ;;
                crash) echo "crashed: an illegal instruction"; exit 1 ;;
                dies) exit 134 ;;
            esac
            printf 'right 0.970\ntry dkv wgmma\nright 1.500\n'
            exit 0 ;;
        -x) steps=$2 ;;
        -z) zero=$2 ;;
        --gpus) ranks=$2 ;;
        -o) folder=$2 ;;
    esac
    shift
done
digits=00000
case "${FAULT-} ${0##*/}.$ranks.$zero" in
    "three program.4.1") digits=90000 ;;
    "three program.4.2") digits=00001 ;;
    "three program.4.3") echo "rank 1 is gone"; exit 1 ;;
    "old "*.2.0) echo "NCCL WARN Multiple Ranks are using the same GPU/Partition."; exit 1 ;;
    "p2p program."*) [ "${NCCL_P2P_DISABLE-}" = 1 ] || { echo "unhandled cuda error"; exit 1; } ;;
esac
[ -n "$folder" ] || exit 0
mkdir -p "$folder/step-00000010" && touch "$folder/step-00000010/model"
for ((step = 1; step <= steps; step++)); do
    echo "{\"step\":$step,\"loss\":$((9 - step % 5)).000$digits,\"grad_norm\":1.5,\"ms\":1.0}"
done > "$folder/log.jsonl"
END
cp "$scratch/bin/program" "$scratch/bin/emulated"
cat > "$scratch/bin/endless" << 'END'
#!/bin/sh
output=$(readlink /proc/$$/fd/1)
echo "$output" > "$PID.output"
echo $$ > "$PID"
exec sleep 100
END
chmod +x "$scratch"/bin/*
export CALLS=$scratch/calls PID=$scratch/pid LOGS="$scratch/lo gs" OUT=$scratch/OUT GPUS=1
export GPT2CU=$scratch/bin/program TEST=true BENCH=true EMULATED=$scratch/bin/emulated
export PYTHON=$scratch/absent PATH=$scratch/bin:$PATH STEPS=4
unset CUDA_VISIBLE_DEVICES ARCHIVE NCCL_HOME CPATH LIBRARY_PATH

# check VARIABLE=VALUE...: runs dev/gpu_check.sh without HOME and a terminal, from another folder
# and with a CDPATH that also contains a dev/. Sets $said to its output and $calls to the command
# lines of the programs it runs.
mkdir -p "$scratch/elsewhere/${PWD##*/}/dev"
check() {
    local script=${PWD##*/}/dev/gpu_check.sh
    : > "$CALLS"
    said=$(cd .. && env -u HOME "$@" CDPATH="$scratch/elsewhere" "$script" 2>&1 < /dev/null)
    status=$?
    calls=$(cat "$CALLS")
}

check -u STAGES
verdict "all stages" $status "$said"
order=$(sed -n 's/^\([a-z]*\) .* took [0-9]* s; expected on an H200: [0-9]* s$/\1/p' <<< "$said")
says "order of the stages, with the expected seconds" \
    "^machine build check bits prove speed test sanitizer offload gpus bench torch $" \
    "$(tr '\n' ' ' <<< "$order")"
says "the context is the first check on the GPU" "gpu +ok.*context +ok +450 MiB.*build " "$said"
says "caches are in LOGS" "^timeout.*program XDG_CACHE_HOME=$LOGS/cache P2P" "$calls"
says "a large model has 120 s, and an untimed first step" \
    "timeout 120 program -e d48 -r 1 -b 16 -x 1 -v 0 .* -e d48 -r 1 -b 16 -x 4 -v 0 -o [^ ]*d48" \
    "$(tr '\n' ' ' <<< "$calls")"
says "... and 120 s to compare" "timeout 120 program --compare -e d48" "$calls"
tail=$(sed -n 's/^program .*--check .*-b \(.*\) -t \(.*\) --dtype fp32$/\1 * \2 % 64/p' \
    <<< "$calls" | while read -r product; do echo $((product)); done | tr '\n' ' ')
says "an fp32 check with slightly more tokens than a multiple of 64" "^0 [1-8] $" "$tail"
says "ranks that share a GPU: the emulated device's losses" \
    "4 ranks on it, -z 3 +ok +losses within 0.* the same bits as -z 0  .*bench" "$said"
[ -z "$(ls "$OUT")" ] && [ "$(tar -xzOf "$LOGS.tar.gz" "lo gs/summary.md")" = \
    "$(cat "$LOGS/summary.md")" ] && ! compgen -G "$LOGS.tar.gz.part" > /dev/null
verdict "everything is in one archive, and nothing in OUT" $? "$(ls "$OUT" "$scratch")"
listed=$(tar -tzf "$LOGS.tar.gz")
says "... logs of stages" "speed.rows.*torch.verdicts" "$(sort <<< "$listed" | tr '\n' ' ')"

# Killed in its second stage: the first one's verdict is in the archive.
rm -rf "$LOGS" "$LOGS.tar.gz"
STAGES="bench test" TEST=$scratch/bin/endless ARCHIVE=$OUT/kept.tgz dev/gpu_check.sh \
    > /dev/null 2>&1 &
killed=$!
disown    # or the shell would report its end
for ((look = 0; look < 200; look++)); do
    [ -s "$PID" ] && break
    sleep 0.05
done
kill -KILL $killed "$(cat "$PID")"
work=$(dirname "$(cat "$PID.output")")
[[ $work != */build/gpu_check.?????? ]] || rm -rf "$work"    # the killed script could not
says "killed in a later stage: the archive has the earlier ones" "lo gs/bench.verdicts" \
    "$(tar -tzf "$OUT/kept.tgz")"
rm -rf "$LOGS"

check STAGES= PROBE='echo CUDA driver version is insufficient; exit 1'
says "a context that fails" "context +FAILED +exit status 1: CUDA driver .*insuff" "$said"
[ $status -eq 1 ]
verdict "... is a failure" $?
check -u GPUS STAGES=gpus MODELS=l1h1c8t32 CUDA_VISIBLE_DEVICES=3,5
says "the first GPU in CUDA_VISIBLE_DEVICES is queried" "nounits -i 3 -lms" "$calls"
says "... and all are counted" "gpus +--gpus 2 -z 3 " "$said"
check STAGES= "NCCL_HOME=$scratch/absent"
[ $status -eq 1 ]
verdict "no folder at NCCL_HOME" $? "$said"
cat > "$scratch/bin/make" << 'END'
#!/bin/sh
echo "CPATH=$CPATH LIBRARY_PATH=$LIBRARY_PATH"
END
chmod +x "$scratch/bin/make"
check -u BENCH STAGES=build "NCCL_HOME=$scratch/nccl"
says "builds with NCCL_HOME" "CPATH=$scratch/nccl/include LIBRARY_PATH=/.*/build/gpu_check\." \
    "$(cat "$LOGS/build.log")"
rm "$scratch/bin/make"

check STAGES=gpus FAULT=three
says "ranks that share a GPU: different losses" \
    "4 ranks on it, -z 1 +FAILED +not the emulated losses: losses within [0-9.]*e-04" "$said"
says "... different bits" "4 ranks on it, -z 2 +FAILED +losses or norms differ from" "$said"
says "... a run that ends" "4 ranks on it, -z 3 +FAILED +exit status 1: rank 1 is gone" "$said"
check STAGES=gpus FAULT=old
says "... an older NCCL" "skipped +needs NCCL 2.30.7 .NCCL_HOME.: Multiple Ranks are" "$said"
check STAGES=gpus FAULT=p2p
says "... without peer access" "4 ranks on it, -z 3 +ok .*; NCCL_P2P_DISABLE=1" "$said"

check STAGES=prove
says "kernels that are right" \
    "prove +forward wgmma +ok +right, 1.432 x .*dq wgmma +ok +right, 0.970 x .*dkv wgmma +ok" \
    "$said"
check STAGES=prove FAULT=none
says "... none to try" "prove +candidates +skipped" "$said"
check STAGES=prove FAULT=wrong
says "... one that is wrong" "dq wgmma +FAILED +wrong: dQ differs.*dkv wgmma +skipped +older" \
    "$said"
[ $status -eq 1 ]
verdict "... is a failure" $?
check STAGES=prove FAULT=crash
says "... one that crashes" "forward wgmma +ok.*dq wgmma +FAILED +crashed: an illegal" "$said"
check STAGES=prove FAULT=dies
says "... one that ends the process" "forward wgmma +ok.*dq wgmma +FAILED +exit status 134" "$said"

# Ranks share a GPU only if NCCL is told to.
if [ -x train_gpt2cu_cpu ]; then
    run="./train_gpt2cu_cpu -e l1h1c8t16 -b 1 -x 1 -v 0 --gpus 2"
    said=$(EMU_GPUS=1 $run 2>&1)
    says "two ranks on one GPU" "ranks 0 and 1 would share one GPU" "$said"
    said=$(NCCL_MULTI_RANK_GPU_ENABLE=1 EMU_GPUS=1 $run 2>&1)
    says "... with NCCL_MULTI_RANK_GPU_ENABLE=1" "step +1/1 " "$said"
    said=$(NCCL_MULTI_RANK_GPU_ENABLE=0 EMU_GPUS=1 $run 2>&1)
    says "... with 0" "ranks 0 and 1 would share one GPU" "$said"
else
    skip "two ranks on one GPU" "no train_gpt2cu_cpu"
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
