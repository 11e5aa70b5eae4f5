#!/usr/bin/env bash
# Lists the packages that targets need but this machine lacks; installs them if run as root on
# Debian or Ubuntu.
#   dev/deps.sh build|test|ci|lint|cuda...  CC and NVCC override the compilers cc and nvcc
# Prints nothing if everything is installed. Status 1 only if a target would fail without a package.
set -u

have() { command -v "$1" > /dev/null 2>&1; }
# has_module NAMES: whether a Python that can run the tests has these modules.
has_module() {
    for python in ${PYTHON:-python3 /usr/bin/python3}; do
        ! "$python" -c "import pytest, xdist, $1" 2> /dev/null || return 0
    done
    return 1
}

# need PACKAGE...: a target requires them. want WHAT PACKAGE...: without them only WHAT is lost.
need() { needed+=("$@"); }
want() { lost+=("$1") && shift && wanted+=("$@"); }

# One line per tool: the command, the loss if it is missing, and the packages that contain it.
look() {
    needed=() wanted=() lost=()
    for target in "$@"; do
        if [ "$target" != cuda ]; then
            have gcc || have clang || need gcc libc6-dev
            have g++ || have clang++ || need g++
            have make || need make
            have curl || have wget || want "download of tinyshakespeare" curl ca-certificates
        fi
        case "$target" in
        build) ;;
        test)
            have mpirun || want "the runs that mpirun starts" openmpi-bin
            has_module sys || want "most tests" python3-pytest python3-pytest-xdist
            have xz || want "the inputs of the fuzz targets" xz-utils
            have shellcheck || want "the check of shell scripts" shellcheck
            have strace || want "runs with power losses and failing calls" strace ;;
        ci)  # what few users have, and tests without it are skipped
            have emcc || want "the web page" emscripten
            have chromedriver || want "its test" chromium chromium-driver
            echo 'int main(void) {}' | "${CC:-gcc}" -m32 -x c -o /dev/null - 2> /dev/null ||
                want "plans of a 32-bit build" gcc-multilib
            has_module matplotlib || want "the pictures of dev/report.py" python3-matplotlib ;;
        lint)
            have clang || want "the check that clang builds the programs" clang
            have clang-tidy || want "the clang-tidy check" clang-tidy
            have cppcheck || want "the cppcheck check" cppcheck
            have slurmctld || want "the runs under Slurm" slurm-wlm munge ;;
        cuda) have "${NVCC:-nvcc}" || no_nvcc=1 ;;
        *)
            echo "deps.sh: unknown target '$target'; known: build test ci lint cuda" >&2
            exit 1 ;;
        esac
    done
}

# Updates the package lists first, since a bare container has none. One unavailable stops no other.
install() {
    local apt=(env DEBIAN_FRONTEND=noninteractive timeout 600 apt-get -qq
               -o Acquire::Retries=1 -o Acquire::http::Timeout=15 -o Dpkg::Use-Pty=0)
    echo "deps.sh: apt-get now installs $*${lost[*]:+, for $(printf '%s; ' "${lost[@]}")}"
    "${apt[@]}" update > /dev/null 2>&1
    "${apt[@]}" install -y --no-install-recommends "$@" > /dev/null 2>&1 && return
    for package in "$@"; do
        "${apt[@]}" install -y --no-install-recommends "$package" > /dev/null 2>&1 ||
            echo "deps.sh: apt-get could not install $package" >&2
    done
}

[ $# -gt 0 ] || { echo "usage: dev/deps.sh build|test|ci|lint|cuda..." >&2; exit 1; }
no_nvcc=0
look "$@"
if [ ${#needed[@]} -gt 0 ] || [ ${#wanted[@]} -gt 0 ]; then
    if [ "$(id -u)" -eq 0 ] && have apt-get; then
        install "${needed[@]}" "${wanted[@]}"
        look "$@"
    fi
fi
[ ${#needed[@]} -eq 0 ] || echo "deps.sh: needed: ${needed[*]}"
for what in "${lost[@]}"; do
    echo "deps.sh: without $what"
done
if [ ${#wanted[@]} -gt 0 ] || [ ${#needed[@]} -gt 0 ]; then
    echo "deps.sh: to get it: sudo apt-get install" "${needed[@]}" "${wanted[@]}"
fi
if [ "$no_nvcc" = 1 ]; then
    echo "deps.sh: no nvcc; the CUDA toolkit: https://developer.nvidia.com/cuda-downloads;" \
         "without it, make train_gpt2 builds the CPU program" >&2
    exit 1
fi
[ ${#needed[@]} -eq 0 ]
