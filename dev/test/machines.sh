#!/usr/bin/env bash
# Tests of the Makefile on machines that are not this one: compilers and tools that do nothing but
# write down how they were called stand in for CUDA's and for nvidia-smi. One line a test, last line
# `N passed, N failed, N skipped`.
set -u
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
mkdir -p build
scratch=$(mktemp -d "$root/build/machines.XXXXXX") || exit 1
trap 'rm -rf "$scratch"' EXIT
unset MAKEFLAGS MAKELEVEL REPORTED WERROR ARCH NVCC GPU
passed=0 failed=0 skipped=0

verdict() {    # verdict NAME STATUS [what was found]
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
        echo "machines  $1  ok"
    else
        failed=$((failed + 1))
        echo "machines  $1  FAILED${3:+: $3}"
    fi
}

# says NAME PATTERN TEXT, and its opposite.
says() {
    [[ $3 =~ $2 ]]
    verdict "$1" $? "no '$2' in '$3'"
}
says_not() {
    ! [[ $3 =~ $2 ]]
    verdict "$1" $? "'$2' in '$3'"
}

# --- The Makefile ---------------------------------------------------------------------------------

# A clone with data, a toolkit behind a link as in Ubuntu's /usr/bin, and a GPU where GPU names one.
clone=$scratch/clone toolkit=$scratch/toolkit
mkdir -p "$clone/data" "$scratch/bin" "$toolkit"/{bin,include,lib64}
ln -s "$root"/{Makefile,train_gpt2.c,train_gpt2.cu,test_gpt2.cu,dev} "$clone"
ln -s "$root"/data/*.{c,sh} "$clone/data"
touch "$clone/data/some.bin"
cat > "$toolkit/bin/nvcc" << 'END'
#!/bin/sh
echo "$*" >> "$CALLS"
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then echo "built" > "$2"; fi
    shift
done
END
cat > "$scratch/bin/nvidia-smi" << 'END'
#!/bin/sh
echo nvidia-smi >> "$CALLS"
[ -z "$GPU" ] || echo "$GPU"
END
chmod +x "$toolkit/bin/nvcc" "$scratch/bin/nvidia-smi"
ln -s "$toolkit/bin/nvcc" "$scratch/bin/nvcc"
export CALLS=$scratch/calls GPU=

# make_there ARGUMENTS...: in the clone. What it says goes to $said, how tools are called to $calls.
make_there() {
    : > "$CALLS"
    said=$(cd "$clone" && PATH=$scratch/bin:$PATH make "$@" 2>&1)
    status=$?
    calls=$(cat "$CALLS")
}

make_there train_gpt2cu
verdict "no GPU: make train_gpt2cu" $status "$said"
says "no GPU: sm_80 and PTX" \
    "arch=compute_80,code=sm_80 .*arch=compute_80,code=compute_80" "$calls"
says "no GPU: it says so" "No GPU seen: train_gpt2cu is built for sm_80" "$said"
says_not "a warning is none of the user's errors" "-Werror" "$calls"
says "lines for the sanitizers" " -lineinfo " "$calls"
says "where the libraries are" "-rpath,$toolkit/lib64" "$calls"
says "cuBLASLt alone is linked" "-lcublasLt$" "$calls"
says_not "no library that nothing calls" "-lcublas |-lnccl" "$calls"
rm -f "$clone/train_gpt2cu"
GPU=8.9 make_there train_gpt2cu
says "one GPU: its own code" "arch=compute_89,code=sm_89" "$calls"
says_not "one GPU: that alone" "compute_80|No GPU seen" "$calls $said"
rm -f "$clone/train_gpt2cu"
GPU=9.0 make_there train_gpt2cu WERROR=-Werror
says "warnings are errors when asked" "-Werror all-warnings .*-Xcompiler .*-Werror" "$calls"
make_there train_gpt2cu WERROR=-Werror ARCH="80 90a"
says "GPUs by name" "sm_80 .*sm_90a" "$calls"
make_there train_gpt2cu ARCH="80 90a"
says_not "WERROR builds nothing again" "-gencode" "$calls"

for target in "" help clean; do
    # shellcheck disable=SC2086  # no word is no target
    make_there $target
    says_not "make $target: nvidia-smi is not asked" "nvidia-smi" "$calls"
done

# A failure at data/ is one line, and the program is there all the same.
rm -rf "$clone/data" && mkdir "$clone/data" && ln -s "$root"/data/*.{c,sh} "$clone/data"
DATA_MIRROR=$scratch/absent make_there -s train_gpt2cu ARCH=80 CC="$toolkit/bin/nvcc"
verdict "no data: make train_gpt2cu" $status "$said"
says "no data: one line" $'no data yet .prepare.sh: DATA_MIRROR=[^ ]* holds no [^\n]*again$' \
    "$said"
[ -s "$clone/train_gpt2cu" ]
verdict "no data: the program is there" $?
rm -f "$clone"/data/tokenize* "$clone/train_gpt2cu"
echo '#error "planted"' > "$clone/data/tokenize.c"
make_there -s train_gpt2cu ARCH=80
says "a compiler refuses the tokenizer: one line" $'no data yet [^\n]*make data tries again$' "$said"
[ -s "$clone/train_gpt2cu" ]
verdict "... and the program is there" $?
touch "$clone/data/some.bin"

make_there -n train_gpt2cu_cpu CUDA_HEADERS=yes
says "headers beside what nvcc's link points to" "-isystem $toolkit/include" "$said"
make_there -n train_gpt2cu_cpu CUDA_HEADERS=yes NVCC=/usr/bin/nvcc
says_not "/usr/include is not named" "-isystem /usr/include" "$said"
said=$(cd "$clone" && make -n train_gpt2cu_cpu CUDA_HEADERS=yes NVCC= 2>&1)
says_not "no nvcc, no folder" "-isystem" "$said"
make_there -s train_gpt2cu NVCC="$scratch/absent/nvcc"
[ $status -ne 0 ]
verdict "no nvcc is an error" $? "$said"
says "no nvcc: what to do" "deps.sh: no nvcc; the CUDA toolkit: https" "$said"

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
