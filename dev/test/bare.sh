#!/usr/bin/env bash
# Builds and tests the project on a simulated bare machine, where optional tools are hidden.
#
#   dev/test/bare.sh               hides all of HIDE: make test ALL=1; then each one: builds all
#   dev/test/bare.sh COMMAND...    runs only that command with all of HIDE hidden, e.g. make style
#
#   HIDE="onednn clang clang-tidy cppcheck shellcheck python3 downloads vocab mirror mpi nvcc
#         cuda-headers openmp"     what to hide; the last three change the flags of everything
#
# Works in a copy of the tree in a scratch folder; needs neither root nor namespaces: programs are
# found through a folder of links without the hidden ones, compilers through scripts that reject
# hidden headers and libraries. apt-get and sudo are always hidden, so that nothing hidden gets
# installed. It takes long on 2 cores and is not part of `make test`; results are in
# dev/notes/bare_machine.md. Exit status 1 if a test failed or something was not built. The last
# line is `N passed, N failed, N skipped`: the sums of all calls of make.
set -u
cd "$(dirname "$0")/../.." || exit 1
everything="onednn clang clang-tidy cppcheck shellcheck python3 downloads vocab mirror mpi nvcc
            cuda-headers openmp"
HIDE=${HIDE-$everything}
for name in $HIDE; do
    if [[ " $everything " != *[[:space:]]"$name"[[:space:]]* ]]; then
        echo "bare.sh: HIDE has '$name'; known: $(xargs <<< "$everything")" >&2
        exit 1
    fi
done
mkdir -p build
scratch=$(mktemp -d "$PWD/build/bare.XXXXXX") || exit 1
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
log=$PWD/build/bare.log
: > "$log"
programs=$PATH mirror=${DATA_MIRROR:-}
passed=0 failed=0 skipped=0
unset MAKEFLAGS MAKELEVEL REPORTED

# The current tree without build products.
mkdir "$scratch/clone"
git ls-files -co --exclude-standard -z | xargs -0 cp --parents -t "$scratch/clone"
(cd "$scratch/clone" && git init -q . && git add -A)

# hide NAME...: creates $scratch/bin and $scratch/headers, and sets PATH, DATA_MIRROR and MAKEFLAGS,
# for a machine without these.
hide() {
    local all=" $* " name folder compiler headers=() refused="-hidden" arguments=
    local without="apt-get sudo"
    PATH=$programs    # the machine's; the previous folder of links is deleted now
    rm -rf "${scratch:?}"/{bin,headers,mirror}
    mkdir -p "$scratch"/{bin,headers,mirror}
    IFS=: read -ra folders <<< "$programs"
    for folder in "${folders[@]}"; do    # the first of a name wins, as in a PATH
        ln -s "$folder"/* "$scratch/bin/" 2> /dev/null
    done
    unset DATA_MIRROR
    if [[ $all != *" mirror "* ]] && [ -n "$mirror" ]; then
        ln -s "$mirror"/* "$scratch/mirror/"
        export DATA_MIRROR=$scratch/mirror
    fi
    for name in "$@"; do
        case $name in
            onednn) headers+=(dnnl.h oneapi/dnnl/dnnl.h) refused+="|-ldnnl" ;;
            clang) without+=" clang clang++ clang-[0-9]* clang++-[0-9]*" ;;
            nvcc) without+=" nvcc nvidia-smi compute-sanitizer" arguments="NVCC=" ;;
            cuda-headers)    # nvcc does not work without them
                headers+=(cuda_runtime.h cuda_bf16.h cublasLt.h nccl.h) arguments="NVCC="
                without+=" nvcc" ;;
            python3) without+=" python python3*" ;;
            downloads) without+=" curl wget" ;;
            mpi) without+=" mpirun mpiexec mpicc" ;;
            vocab) rm -f "$scratch/mirror/gpt2" ;;
            openmp) headers+=(omp.h) refused+="|-fopenmp" ;;
            mirror) ;;
            *) without+=" $name $name-[0-9]*" ;;
        esac
    done
    for name in "${headers[@]}"; do
        mkdir -p "$(dirname "$scratch/headers/$name")"
        echo "#error \"$name is hidden\"" > "$scratch/headers/$name"
    done
    # shellcheck disable=SC2086  # patterns
    (cd "$scratch/bin" && rm -f $without)
    # Each compiler is replaced by a script that calls the real one.
    for compiler in "$scratch"/bin/{cc,c++,gcc,g++,clang,clang++}{,-[0-9]*}; do
        [ -x "$compiler" ] || continue
        folder=$(readlink "$compiler") && rm "$compiler"
        cat > "$compiler" << END
#!/bin/sh
for word; do
    case \$word in $refused) echo "\$word is hidden" >&2; exit 1 ;; esac
done
exec '$folder' -I'$scratch/headers' "\$@"
END
        chmod +x "$compiler"
    done
    export PATH=$scratch/bin MAKEFLAGS=$arguments
    hash -r
}

# call NAME COMMAND...: runs it in the copy. Its last line is added to the sums; failed and skipped
# tests are shown.
call() {
    local name=$1 status counts
    shift
    printf '\n=== %s\n' "$name"
    (cd "$scratch/clone" && "$@") > "$scratch/said" 2>&1
    status=$?
    { printf '\n=== %s\n' "$name"; cat "$scratch/said"; } >> "$log"
    grep -E 'FAILED|: error|skipped \(|deps.sh: without' "$scratch/said" | sort -u
    counts=$(grep -xE '[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped' "$scratch/said" | tail -n 1)
    echo "${counts:-$(tail -n 1 "$scratch/said")} (exit status $status)"
    # shellcheck disable=SC2046  # three words
    set -- $(tr -cd '0-9 ' <<< "${counts:-0 0 0}")
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
    [ $status -eq 0 ] || [ "$2" -gt 0 ] || failed=$((failed + 1))
}

# shellcheck disable=SC2086  # words
hide $HIDE
if [ $# -gt 0 ]; then
    call "$*" "$@"
else
    call "all hidden: make test ALL=1" make test ALL=1
    # make rebuilds everything if the hidden tool changes a flag, otherwise only the programs that
    # are removed here, which build quickly.
    for name in $HIDE; do
        hide "$name"
        (cd "$scratch/clone" && rm -f train_gpt2 data/tokenize build/{bench_cpu,bench_files,dump})
        call "$name hidden: all is built" make test ALL=1 BUILD_ONLY=yes
        call "$name hidden: benchmarks are built" make -s build/{bench_cpu,bench_files,dump}
    done
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
