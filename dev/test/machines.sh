#!/usr/bin/env bash
# Tests of the Makefile and of dev/gpu_check.sh on simulated machines: small scripts replace nvcc,
# nvidia-smi and compute-sanitizer and record how they were called. One line per test, last line
# `N passed, N failed, N skipped`. The argument `main` runs only the Makefile's tests, `rest` only
# those of dev/gpu_check.sh.
set -u
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
mkdir -p build
scratch=$(mktemp -d "$root/build/machines.XXXXXX") || exit 1
trap 'rm -rf "$scratch"' EXIT
unset MAKEFLAGS MAKELEVEL REPORTED WERROR ARCH NVCC GPU
. dev/test/verdicts.sh machines

# --- The Makefile ---------------------------------------------------------------------------------

# A clone with data, a toolkit behind a link as in Ubuntu's /usr/bin, and a GPU if GPU names one.
clone=$scratch/clone toolkit=$scratch/toolkit
mkdir -p "$clone/data" "$scratch/bin" "$toolkit"/{bin,include,lib64}
ln -s "$root"/{Makefile,train_gpt2.c,train_gpt2.cu,test_gpt2.cu,dev} "$clone"
ln -s "$root"/data/*.{c,sh} "$clone/data"
touch "$clone/data/some.bin"
cat > "$toolkit/bin/nvcc" << 'END'
#!/bin/sh
echo "$*" >> "$CALLS"
[ -z "${NVCC_FAILS-}" ] || { echo "error: injected"; exit 1; }
case "$*" in *tokenize.c*) [ -z "${SLOW-}" ] || sleep "$SLOW" ;; esac
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then printf '#!/bin/sh\necho 450\n' > "$2" && chmod +x "$2"; fi
    shift
done
END
cat > "$scratch/bin/nvidia-smi" << 'END'
#!/bin/sh
echo nvidia-smi >> "$CALLS"
[ -z "${NONE-}" ] || { echo "No devices were found"; exit 6; }
case "$*" in
    *compute_cap*) [ -z "$GPU" ] || echo "$GPU" ;;
    *-lms*) while sleep 0.02; do [ ! -e "$WANTED" ] || { echo 500; rm -f "$WANTED"; }; done ;;
    *memory.used*) echo 400 ;;
    *memory.free*) echo 1792 ;;
    *) echo Fake ;;
esac
END
chmod +x "$toolkit/bin/nvcc" "$scratch/bin/nvidia-smi"
ln -s "$toolkit/bin/nvcc" "$scratch/bin/nvcc"
# The emulated program, delayed until nvidia-smi above has reported its memory once: a run of a few
# milliseconds could end between two queries, and gpu_check.sh, which waits for the last step, would
# not wait for another query after it.
cat > "$scratch/bin/program" << 'END'
#!/bin/sh
touch "$WANTED"
for look in $(seq 500); do [ ! -e "$WANTED" ] || sleep 0.02; done
exec ./train_gpt2cu_cpu "$@"
END
chmod +x "$scratch/bin/program"
export CALLS=$scratch/calls WANTED=$scratch/wanted GPU=

# make_there ARGUMENTS...: runs make in the clone, without this machine's NCCL and MPI. Its output
# is written to $said, calls of tools to $calls.
make_there() {
    : > "$CALLS"
    said=$(cd "$clone" && PATH=$scratch/bin:$PATH make NCCL= mpi= "$@" 2>&1)
    status=$?
    calls=$(cat "$CALLS")
}

check_makefile() {
make_there train_gpt2cu
verdict "no GPU: make train_gpt2cu" $status "$said"
says "no GPU: sm_80 and PTX" \
    "arch=compute_80,code=sm_80 .*arch=compute_80,code=compute_80" "$calls"
says "no GPU: message" "No GPU to build for: train_gpt2cu is for sm_80 .* ARCH=75 a T4" "$said"
says_not "for users, warnings are not errors" "-Werror" "$calls"
says "line numbers for the sanitizers" " -lineinfo " "$calls"
says "an rpath to the toolkit's libraries" "-rpath,$toolkit/lib64" "$calls"
says "only cuBLASLt is linked" "-lcublasLt *$" "$calls"
says_not "no unused library is linked" "-lcublas |-lnccl" "$calls"
rm -f "$clone/train_gpt2cu"
GPU=8.9 make_there train_gpt2cu
says "one GPU: its own code" "arch=compute_89,code=sm_89" "$calls"
says_not "one GPU: no other code" "compute_80|No GPU" "$calls $said"
rm -f "$clone/train_gpt2cu"
GPU=$'6.1\n8.9' make_there train_gpt2cu
says "a card that is too old next to another: ignored" "arch=compute_89,code=sm_89" "$calls"
says_not "... nvcc would refuse it" "_61" "$calls"
GPU=6.1 make_there -n train
says "only a card that is too old: the CPU program is built" "-o train_gpt2 " "$said"
says_not "... and no other" "train_gpt2cu" "$said"
rm -f "$clone/train_gpt2cu"
GPU=9.0 make_there train_gpt2cu WERROR=-Werror
says "WERROR makes warnings errors" "-Werror all-warnings .*-Xcompiler .*-Werror" "$calls"
make_there train_gpt2cu WERROR=-Werror ARCH="80 90a"
says "ARCH names the GPUs" "sm_80 .*sm_90a" "$calls"
make_there train_gpt2cu ARCH="80 90a"
says_not "without WERROR: not built again" "-gencode" "$calls"

make_there train_gpt2cu NCCL=yes "mpi=-I$scratch/mpi -L$scratch -lmpi"
says "NCCL, and MPI in its own folder" "-lcublasLt -DGPT2_NCCL=1 -lnccl -DGPT2_MPI=1 -isystem \
$scratch/mpi -L$scratch -lmpi *$" "$calls"

# mpicc's output is passed to the linker through nvcc, and a program is rebuilt if it changes, as
# when NCCL or MPI is installed.
cat > "$scratch/bin/mpicc" << 'END'
#!/bin/sh
echo gcc -I/mpi/include -pthread -L/mpi/lib -Wl,-rpath -Wl,/mpi/lib -Wl,-z,now -lmpi
END
chmod +x "$scratch/bin/mpicc"
: > "$CALLS"
said=$(cd "$clone" && PATH=$scratch/bin:$PATH make train_gpt2cu NCCL=yes 2>&1)
says "MPI's rpath" "-lnccl -DGPT2_MPI=1 -isystem /mpi/include -L/mpi/lib -Xlinker -rpath \
-Xlinker /mpi/lib -Xlinker -z,now -lmpi *$" "$(cat "$CALLS")"
make_there train_gpt2cu NCCL=yes
says "MPI removed: built again" "-DGPT2_NCCL=1 -lnccl -DGPT2_MPI=0" "$calls"
make_there train_gpt2cu NCCL=yes
says_not "nothing has changed: not built again" "-gencode" "$calls"
make_there train_gpt2cu
says "NCCL removed: built again" "-lcublasLt *$" "$calls"

for target in "" help clean; do
    # shellcheck disable=SC2086  # no word is no target
    make_there $target
    says_not "make $target: nvidia-smi is not called" "nvidia-smi" "$calls"
done

# A failure in data/ is one line, and the program is built anyway.
rm -rf "$clone/data" && mkdir "$clone/data" && ln -s "$root"/data/*.{c,sh} "$clone/data"
DATA_MIRROR=$scratch/absent make_there -s train_gpt2cu ARCH=80 CC="$toolkit/bin/nvcc"
verdict "no data: make train_gpt2cu" $status "$said"
says "no data: one line" $'no data yet .prepare.sh: DATA_MIRROR=[^ ]* has no [^\n]*again$' \
    "$said"
[ -s "$clone/train_gpt2cu" ]
verdict "no data: the program is built" $?
rm -f "$clone"/data/tokenize* "$clone/train_gpt2cu"
echo '#error "injected"' > "$clone/data/tokenize.c"
make_there -s train_gpt2cu ARCH=80
says "the tokenizer does not compile: one line" $'no data yet [^\n]*make data tries again$' \
    "$said"
[ -s "$clone/train_gpt2cu" ]
verdict "... and the program is built" $?
touch "$clone/data/some.bin"

make_there -n train_gpt2cu_cpu CUDA_HEADERS=yes
says "headers of the toolkit that the link nvcc points to" "-isystem $toolkit/include" "$said"
make_there -n build/sm_80.log
says "nvcc is called in its toolkit, not through the link" "$toolkit/bin/nvcc -std" "$said"
mv "$toolkit/bin/nvcc" "$toolkit/bin/cache"
ln -sf "$toolkit/bin/cache" "$scratch/bin/nvcc"
make_there -n build/sm_80.log
says "a link to ccache is called by its own name" "$scratch/bin/nvcc -std" "$said"
mv "$toolkit/bin/cache" "$toolkit/bin/nvcc" && ln -sf "$toolkit/bin/nvcc" "$scratch/bin/nvcc"
make_there -n train_gpt2cu_cpu CUDA_HEADERS=yes NVCC=/usr/bin/nvcc
says_not "no -isystem /usr/include" "-isystem /usr/include" "$said"
said=$(cd "$clone" && make -n train_gpt2cu_cpu mpi= CUDA_HEADERS=yes NVCC= 2>&1)
says_not "without nvcc, no -isystem" "-isystem" "$said"
mkdir "$scratch/a b" && cp -r "$toolkit" "$scratch/a b/"
PATH="$scratch/a b/toolkit/bin:$PATH"
said=$(cd "$clone" && make -n build/sm_80.log NCCL= mpi= 2>&1)
says "nvcc in a path with a space is called through a link" \
    "$clone/build/cuda/bin/nvcc -std=.* -gencode" "$said"
equal=$(readlink "$clone/build/cuda")
[ "$equal" = "$scratch/a b/toolkit" ]
verdict "... to its toolkit" $? "$equal"
PATH=${PATH#*:}
# With make -n, nothing that is printed is executed.
said=$(cd "$clone" && timeout 20 make -n test style 2>&1)
says "make -n test" "dev/deps.sh test.*dev/test.sh" "$(tr '\n' ' ' <<< "$said")"
says_not "make -n test starts no test" "passed|build  " "$said"
# Two makes that build data/tokenize at the same time use different temporary names.
rm -f "$clone"/data/{some.bin,tokenize,stories} "$clone/train_gpt2"
SLOW=3 DATA_MIRROR=$scratch/absent make_there -s -j2 train_gpt2 data/tokenize CC="$toolkit/bin/nvcc"
parts=$(grep -o 'data/tokenize[^ ]*part' <<< "$calls")
[ "$(sort -u <<< "$parts" | wc -l)" -eq "$(wc -l <<< "$parts")" ] && [ -n "$parts" ]
verdict "make -j without data: one name for each data/tokenize" $? "$parts"
touch "$clone/data/some.bin"
mkdir -p "$clone/build"
printf '#!/bin/sh\necho 1 2 3; kill -SEGV $$\n' > "$clone/build/bench_cpu"
ln -s "$(type -P true)" "$clone/build/bench_files"
chmod +x "$clone/build/bench_cpu"
make_there -o build/bench_cpu -o build/bench_files bench
[ $status -ne 0 ] && [[ $said = *"1 2 3"* ]]
verdict "make bench: a crash is an error" $? "status $status, $said"
# dev/deps.sh on a machine without a tool, as a user and as root; apt-get only records the call.
mkdir "$scratch/apt" && ln -s "$(type -P env)" "$(type -P bash)" "$(type -P timeout)" "$scratch/apt"
for tool in gcc g++ make curl mpicc mpirun apt-get sudo; do
    printf '#!/bin/sh\necho "%s $*" >> "$CALLS"\n' $tool > "$scratch/apt/$tool"
done
printf '#!/bin/sh\necho $ID\n' > "$scratch/apt/id" && chmod +x "$scratch"/apt/*
for id in 1000 0; do
    : > "$CALLS"
    said=$(ID=$id PATH=$scratch/apt bash dev/deps.sh test 2>&1)
    if [ $id = 0 ]; then
        says "deps.sh: root: prints the packages" \
            $'^deps.sh: apt-get now installs shellcheck, for the check of shell scripts; \n' "$said"
        says "... and installs them" "apt-get .*install -y .*shellcheck" "$(cat "$CALLS")"
    else
        says "deps.sh: a user: prints the packages" \
            "to get it: sudo apt-get install shellcheck" "$said"
        says "... and installs nothing" "^$" "$(cat "$CALLS")"
    fi
done
make_there -s train_gpt2cu NVCC="$scratch/absent/nvcc"
[ $status -ne 0 ]
verdict "no nvcc is an error" $? "$said"
says "no nvcc: advice" "deps.sh: no nvcc; the CUDA toolkit: https" "$said"
}

[ "${1-}" = rest ] || check_makefile
if [ "${1-}" = main ]; then
    echo "$passed passed, $failed failed, $skipped skipped"
    exit $((failed > 0))
fi

# --- dev/gpu_check.sh -----------------------------------------------------------------------------

# A sanitizer that finds the injected errors in the probe with every tool, and in a program the
# errors that FINDS selects. With OLD it has only the options of its first versions.
cat > "$scratch/bin/compute-sanitizer" << 'END'
#!/bin/sh
echo "$OMP_WAIT_POLICY $CUDA_DEVICE_ORDER $*" >> "$CALLS"
report() { printf '========= Invalid __global__ write\n=========     at %s(int *) in x.cu:3\n' $1; }
summary() { echo "========= ERROR SUMMARY: $1 errors"; }
case "${OLD-} $*" in yes*--kernel-name*) echo "unrecognised option '--kernel-name'"; exit 1 ;; esac
echo "========= COMPUTE-SANITIZER"
case "$*" in *injected) report injected_kernel; summary 1; exit 1 ;; esac
case $FINDS in
    nothing) summary 0 ;;
    ours) report layernorm_forward_kernel; summary 1; exit 1 ;;
    cut) report nvjet; summary 5000; echo "========= ERROR SUMMARY: 4999 errors were not printed" ;;
    split) report splitKreduce_kernel; summary 1; exit 1 ;;
    refused) echo "train_gpt2cu: the plan needs 3.0 GiB, only 2 are free"; summary 0; exit 1 ;;
esac
END
chmod +x "$scratch/bin/compute-sanitizer"
export LOGS=$scratch/out PYTHON=$scratch/absent EMULATED=$scratch/absent

# check COMMAND...: runs dev/gpu_check.sh, or the command; its output is written to $said.
check() {
    : > "$CALLS"
    said=$(PATH=$scratch/bin:$PATH "${@:-dev/gpu_check.sh}" 2>&1)
    status=$?
    calls=$(cat "$CALLS")
}

# sanitized FINDS OUTCOME PATTERN: the verdict for a sanitizer's findings in memcheck's bf16 run.
sanitized() {
    FINDS=$1 OMP_WAIT_POLICY=active STAGES=sanitizer GPT2CU=$(type -P true) check
    says "gpu_check: a sanitizer finds $1" "memcheck bf16 +$2 +$3" "$said"
}

STAGES="speed tests" check
says "gpu_check: unknown stage" "STAGES has no stage 'tests': build check bits prove" "$said"
NONE=yes STAGES=build LOGS=$scratch/none check
says "gpu_check: ends without a GPU" "^gpu_check.sh: nvidia-smi shows no GPU; .*_cpu$" "$said"
[ $status -eq 1 ] && ! compgen -G "$scratch/none/*" > /dev/null
verdict "... before anything is built" $? "$said"
NONE=yes STAGES=bench GPT2CU=true BENCH=true LOGS=$scratch/none check
says "gpu_check: a given program needs no GPU" "gpu +skipped .*bench +true +ok" "$said"
if [ -x train_gpt2cu_cpu ]; then
    SECONDS=0
    STAGES="build test check bits offload gpus speed torch bench" GPT2CU=$scratch/bin/program \
        TEST=true BENCH=true MODELS=l1h1c8t32 STEPS=4 LARGEST_BATCH=1 MEMORY_MIB=16384 GPUS=2 check
    verdict "gpu_check on the emulated device ($SECONDS s)" $status "$said"
    says "gpu_check: context" "context +ok +450 MiB .*, 400 MiB before; the process took [0-9]+" \
        "$said"
    says "gpu_check: libraries" "4 micro-steps a step +ok +libraries took .*; at most 500 M" "$said"
    says "gpu_check: equal bits" "two runs +ok .*-r 0, -r 1 +ok" "$said"
    says "gpu_check: offload" \
        "weights,.*,residuals ok +[0-9.]+ ms, [0-9.]+ of none; the same bits" "$said"
    says "gpu_check: several GPUs" \
        "2 -z 1 +ok +[0-9.]+ ms, [0-9.]+ of one's; losses within .* bytes a GPU as planned" "$said"
    says "gpu_check: every state sharded" "2 -z 2 +ok .*2 -z 3 +ok" "$said"
    says "gpu_check: measured memory" "tokens/s; planned [0-9]+ MiB, measured 100 MiB" "$said"
    STAGES=speed GPT2CU=$scratch/bin/program MODELS=l1h1c8t32 check
    says "gpu_check: too little memory skips a row" "-r 1 +skipped +no plan fits 1024 MiB" "$said"
    says "gpu_check: earlier stages stay in the summary" "bits +two runs +ok" \
        "$(cat "$LOGS/summary.md")"
    says_not "gpu_check: a stage done again starts over" "tokens/s; planned" \
        "$(cat "$LOGS/summary.md")"
    GPU=7.5 EMU_CC=75 STAGES="check gpus speed" GPT2CU=$scratch/bin/program MODELS=l1h1c8t32 \
        STEPS=4 LARGEST_BATCH=1 MEMORY_MIB=16384 GPUS=2 LOGS=$scratch/old check
    verdict "gpu_check on a GPU without bf16" $status "$said"
    says "... its type" "check +l1h1c8t32 fp16 B 1 T 32 +ok .*2 -z 3 +ok .*-r 1 B 1 +ok" "$said"
    STAGES=gpus GPT2CU=$scratch/bin/program check
    says "gpu_check: one GPU is not two" "gpus +NCCL on one GPU +skipped +no .*/absent to" "$said"
else
    skip "gpu_check on the emulated device" "no train_gpt2cu_cpu"
fi
sanitized nothing ok "no errors in our kernels"
says "gpu_check: only our kernels are checked" \
    "passive PCI_BUS_ID --tool synccheck --kernel-name kns=_kernel --report-api-errors explicit \
--print-limit 1000" \
    "$calls"
sanitized ours FAILED "1 reports in layernorm_forward_kernel"
sanitized cut FAILED "cut off: 1 of 5000"
sanitized split ok "1 reports, all in cuBLASLt's splitKreduce"
sanitized refused skipped "does not fit: .*the plan needs 3.0 GiB"
OLD=yes sanitized nothing ok "no errors"
says "gpu_check: an older tool's option" "--tool racecheck --kernel-regex kns=_kernel" "$calls"
mkdir "$clone/carried"
printf '#!/bin/sh\necho 3 passed\n' | tee "$clone"/carried/{train_gpt2cu,test_gpt2cu} > /dev/null
chmod +x "$clone"/carried/*
rm -f "$clone/train_gpt2cu"
NVCC_FAILS=1 STAGES="build test" LOGS=$scratch/out2 check "$clone/dev/gpu_check.sh"
says "gpu_check: a build that fails" "train_gpt2cu +FAILED +.*error: injected" "$said"
says "gpu_check: carried programs" \
    "carried/train_gpt2cu +ok .*carried/test_gpt2cu +ok .*test +carried/test_gpt2cu +ok +3 passed" \
    "$said"
STAGES="build test" LOGS=$scratch/out2 check "$clone/dev/gpu_check.sh"
says "gpu_check: built programs are preferred" "test +build/test_gpt2cu +ok +450" "$said"

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
