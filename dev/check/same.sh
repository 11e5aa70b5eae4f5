#!/usr/bin/env bash
# Proves that a refactoring changed nothing: code moved between files, identifiers renamed, tests
# split, functions simplified.
#
#   dev/check/same.sh record DIR [PART...]                    store the proofs of this tree in DIR
#   dev/check/same.sh compare DIR [--names FILE] [PART...]    compute them again and compare
#
# Both print one line per part; compare prints `same`, or what differs below it, and exits with
# status 1. Without PART all parts are computed: about three minutes on one core, and as much again
# to build what has changed. Either command can be interrupted and started again: a part is stored
# only when it is complete. DIR is a folder that git does not track; compare leaves what it computed
# there, as PART.compare. Proofs are valid for one machine and one set of compilers; a different
# processor or compiler is reported. Times are for one core, with the programs already built:
#
#   functions     every top-level definition of the C, C++ and CUDA sources, without comments,
#                 layout, #include lines and prototypes, but with the #if around it. For moves; for
#                 renames with --names.                                                         2 s
#   object        every function and object of train_gpt2, data/tokenize and train_gpt2cu_cpu as
#                 compiled with the Makefile's flags. Names and strings are masked, but a reference
#                 to another definition counts what that contains. For renames and rewording, where
#                 it is exact. Not for moves: gcc stops inlining when a file has grown too much,
#                 which depends on the order of the functions, so a move may change functions that
#                 it did not touch. A short string whose copy gcc expands inline is code.     45 s
#   bits          losses, norms, planned bytes and the SHA-256 of every tensor saved by 12 runs of
#                 train_gpt2 and 12 of train_gpt2cu_cpu; what --generate and --eval print.     12 s
#   plans         --plan --json of 300 settings; the numbers printed by --fit, --minimum and --plan
#                 for four models on six cards; name, letter, default and range of each option.
#                 All for named cards, so independent of measured speeds and free memory.    30 s
#   sass          registers, spills, shared memory and disassembly of each kernel for six GPUs; only
#                 with nvcc and nvdisasm (NVDISASM names it if it is not on the PATH).        20 s
#   instructions  instructions of three CPU runs, equal to 0.1 %, and their memory; built for
#                 x86-64-v3, because valgrind lacks AVX-512. Only with valgrind.            23 s
#   tests         names of all tests, as often as there are builds that run them.             60 s
#
# Moves: functions, bits, plans, sass, instructions, tests. Renames: all; in functions, sass and
# tests --names translates what was recorded, by lines `OLD NEW` of identifiers (a test `x` is
# `test_x`). Simplifications: bits, plans, sass, tests. Bits come from runs without --tune, whose
# timings would choose between matmul algorithms.
# shellcheck disable=SC2046,SC2086,SC2317  # lists of words; parts are called by their names
set -u
cd "$(dirname "$0")/../.." || exit 1
root=$PWD reader=dev/check/same.py
all="functions object bits plans sass instructions tests"
export REPORTED=yes OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive LC_ALL=C
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
export XDG_CACHE_HOME=$scratch/cache    # measured speeds and algorithms of other runs

# The Makefile's command that builds TARGET, without output and dependency file; a recipe may write
# to $part, which it then moves to TARGET. More arguments are passed to make. Empty if this machine
# cannot build it.
command_of() {
    make -nB "$@" 2> /dev/null | sed -z 's/\\\n/ /g' | grep -E -- "-o $1 |^part=$1\." |
        sed -nE "1{s/^part=[^;]*; //; s/ && mv .*//; s, -o ($1|\\\$part) , ,
            s/-MMD -MP -MF [^ ]+ -MT [^ ]+//; p}"
}
reads() { python3 "$root/$reader" "$@"; }
skipped() { printf 'skipped\t%s\n' "$1"; }
build() { make -s "$@" > "$scratch/make" 2>&1 || { cat "$scratch/make" >&2 && return 1; }; }
# Both programs if CUDA's headers are installed, else only the CPU program.
programs() { echo train_gpt2 && [ -z "$(command_of train_gpt2cu_cpu)" ] || echo train_gpt2cu_cpu; }

part_functions() {
    git ls-files -co --exclude-standard -- '*.c' '*.cu' '*.cpp' '*.h' | reads items
}

part_object() {
    local target
    for target in data/tokenize $(programs); do
        eval "$(command_of "$target") -S -g0 -o $scratch/unit.s" &&
            reads assembly "$target" < "$scratch/unit.s" || return 1
    done
}

# Text, shards and a multiple-choice file in the scratch folder, which becomes the current one.
make_data() {
    build data/tokenize data/stories $(programs) && cd "$scratch" &&
        "$root/data/stories" > stories && head -c 40000 stories > text &&
        "$root/data/tokenize" --bytes -o text text > tokenize.out && reads questions > eval.bin
}
tiny=(-i text_train.bin -j text_val.bin -e l2h2c32t16 -b 2 -u 1 -c 0.1 -v 2 -m 2)

# trains LABEL PROGRAM OPTION...: what a run logs and saves.
trains() {
    "$root/$2" "${tiny[@]}" -x 3 --tune 0 -o "$1" "${@:3}" > "$1.out" 2>&1
    printf '%s exit status\t%s\n' "$1" $?
    reads run "$1"
}
part_bits() {
    local r z n program offload=weights,gradients,moments,master,residuals
    make_data || return 1
    for r in none gelu norm mlp:1,none qkv block; do
        trains "cpu-r-$r" train_gpt2 -r $r
    done
    trains cpu-accumulate train_gpt2 -d 128 -r mlp
    trains cpu-matmul-bf16 train_gpt2 --matmul bf16
    trains cpu-offload train_gpt2 --offload weights,gradients,moments,residuals -r gelu
    trains cpu-wsd train_gpt2 -k wsd --clip 0.5 --final-lr 0.1
    trains cpu-chunks train_gpt2 --logit-rows 7 --shuffle 0 -t 11 -d 66
    trains cpu-resume train_gpt2 -n 2 > /dev/null
    rm -rf cpu-resume/step-00000003
    trains cpu-resume train_gpt2 -n 2 -y 1
    if [ -x "$root/train_gpt2cu_cpu" ]; then
        trains gpu-bf16 train_gpt2cu_cpu -r block
        EMU_CC=75 trains gpu-fp16 train_gpt2cu_cpu -d 64
        trains gpu-fp32 train_gpt2cu_cpu --dtype fp32 -r qkv:1,gelu
        trains gpu-offload train_gpt2cu_cpu --offload $offload -d 64
        for n in 2 3; do
            for z in 0 1 2 3; do
                trains "gpu-$n-ranks-z-$z" train_gpt2cu_cpu --gpus $n -z $z
            done
        done
    fi
    for program in $(cd "$root" && programs); do
        printf '%s --generate\t' "$program"
        "$root/$program" -e cpu-r-none/step-00000003 --generate --prompt 'One day' -g 40 \
            --top-k 20 --samples 2 --quiet | sha256sum
        printf '%s --eval\t' "$program"
        "$root/$program" -e l2h2c32t16 --eval eval.bin --json | tr -d '\n'
        echo
    done
}

part_plans() {
    local model card options option name
    build train_gpt2 || return 1
    export OMP_NUM_THREADS=1
    while read -r options; do
        ./train_gpt2 --plan --json $options > "$scratch/json" 2> "$scratch/errors"
        printf '%s\tstatus %s %s ' "$options" $? "$(head -c 60 "$scratch/json" | cut -d, -f-3)"
        sha256sum < "$scratch/json"
    done < <(reads settings)
    for model in d12 d24 d36 d48; do
        ./train_gpt2 --minimum -e $model 2>&1 | reads numbers "--minimum -e $model"
        for card in t4 4060ti 4090 a100 h100 h200; do
            for option in "--fit all" --plan; do
                name="$option -e $model --gpu $card"
                ./train_gpt2 $name 2>&1 | reads numbers "$name"
            done
        done
    done
    ./train_gpt2 --help all | reads help > "$scratch/help" && cat "$scratch/help"
    while read -r _ _ name _; do    # a value that is refused names those that are not
        ./train_gpt2 "--$name=?" --version 2>&1 | head -n 1 | sed -n "s/.*: '?' is not//p" |
            grep -oE '[^ ]+\|[^ ]+|[0-9.]+' | tr '\n' ' ' | sed "s/.*/--$name accepts\t&\n/"
    done < "$scratch/help"
    [ -s "$scratch/help" ]
}

part_sass() {
    local arch disassemble=${NVDISASM:-nvdisasm}
    if ! make -nB build/sm_80.log 2> /dev/null | grep nvcc > /dev/null; then  # -q: make would fail
        skipped "no nvcc"
    elif ! command -v "$disassemble" > /dev/null; then
        skipped "no nvdisasm"
    else
        for arch in 75 80 89 90a 100 120; do
            build build/sm_$arch.log && "$disassemble" build/sm_$arch.log.cubin > "$scratch/sass" &&
                reads kernels sm_$arch build/sm_$arch.log < "$scratch/sass" || return 1
        done
    fi
}

# counts LABEL OPTION...: instructions of a run, and the memory that it reports.
counts() {
    valgrind --tool=callgrind --callgrind-out-file=/dev/null ./portable "${@:2}" > out 2> errors
    printf '%s instructions\t%s\n' "$1" "$(sed -n 's/.*Collected : //p' errors)"
    printf '%s memory\t%s\n' "$1" "$({ reads run counted | grep -o 'plan_bytes.*'
        grep '^memory ' out; } | tr -cs '0-9.' ' ')"
    rm -rf counted
}
part_instructions() {
    local portable=()
    command -v valgrind > /dev/null || { skipped "no valgrind" && return; }
    [ "$(uname -m)" != x86_64 ] || portable=(MARCH=-march=x86-64-v3)
    eval "$(command_of train_gpt2 "${portable[@]}") -o $scratch/portable" && make_data || return 1
    export OMP_NUM_THREADS=1
    ./portable "${tiny[@]}" -x 1 -o saved > out 2>&1
    counts none "${tiny[@]}" -x 3 -r none -o counted
    counts block "${tiny[@]}" -x 3 -r block:1,norm -d 64 --offload moments,residuals -o counted
    counts generate -e saved/step-00000001 --generate --prompt One -g 30 --quiet
}

part_tests() {
    local target driver
    for target in build/test_gpt2 build/test_gpt2_double build/test_gpt2cu_cpu build/test_cuda_cpu \
        $(grep -l harness_main dev/test/*.cpp | sed 's,dev/\(.*\)\.cpp,build/\1,'); do
        driver=$(command_of "$target" | sed 's/-O[123]/-O0/g')    # names take no optimisation
        [ -n "$driver" ] || continue
        eval "$driver -o $scratch/driver" || return 1
        "$scratch/driver" --list | sed 's/.*/test_&\t/'
    done
    grep -ohE '^ *(verdict|equal|refuses|says|says_not|skip) "[^"$]+"' dev/test/*.sh |
        sed -E 's/^ *\w+ "(.*)"/"\1"\t/'
}

# Compilers and machine: what the proofs depend on besides the sources.
environment() {
    $(command_of train_gpt2 | cut -d' ' -f1) --version | head -n 1
    { nvcc --version 2> /dev/null || echo "no nvcc"; } | tail -n 1
    grep -m 1 -E '^(model name|CPU part)' /proc/cpuinfo
}

usage() { sed -n '5,6s/^# *//p' "$0" >&2 && exit 2; }
[ $# -ge 2 ] || usage
command=$1 names=/dev/null failed=0
mkdir -p "$2" && folder=$(cd "$2" && pwd) || exit 1
shift 2
if [ "${1-}" = --names ]; then
    names=$(realpath "${2-}") || exit 2
    shift 2
fi
case $command in
    record) environment > "$folder/environment" ;;
    compare) environment | diff "$folder/environment" - || echo "note: different environment" ;;
    *) usage ;;
esac
[ $# -gt 0 ] || set -- $all
for part; do
    now=$folder/$part.$command started=$SECONDS
    [[ " $all " = *" $part "* ]] || usage
    printf '%-14s' "$part"
    # Each part runs in its own shell, because it changes the folder and the environment.
    if ! (set -o pipefail && "part_$part") > "$now"; then
        echo "FAILED: cannot be computed"
        failed=1
    elif [ $command = record ]; then
        mv "$now" "$folder/$part"
        echo "recorded, $((SECONDS - started)) s"
    else
        reads compare "$part" "$folder/$part" "$now" "$names" || failed=1
    fi
done
exit $failed
