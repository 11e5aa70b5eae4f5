#!/usr/bin/env bash
# Kills a run at every system call that changes its output folder, one at a time, and makes each of
# them fail once with ENOSPC: dev/check/kill.sh [PROGRAM [OPTIONS...]]
#
# After every kill the same command must resume without reporting a damaged checkpoint, from at
# least the last step reported as saved, and end with the same bytes as an uninterrupted run. After
# every failed call the run must have ended with one line, and resume likewise. Needs strace, which
# injects the signals and errors; OPTIONS are added to the run's (e.g. the GPU program's types).
# Last line: `N kills and M failed calls, K bad`; exit status 1 if K is not 0.
set -u
unset CDPATH    # else cd could change to another folder and print it
cd "$(dirname "$0")/../.." || exit 1
program=$(realpath "${1:-train_gpt2}") || exit 1
shift
command -v strace > /dev/null || { echo "kill.sh: needs strace" >&2; exit 1; }
calls="write fsync rename mkdir unlink rmdir truncate"
work=$(mktemp -d "${TMPDIR:-/tmp}/kill.XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1    # so that the n-th call is the same in every run
seq 1 4000 | tr -d '\n' > "$work/text"
make -s data/tokenize > /dev/null && data/tokenize --bytes -o "$work/t" "$work/text" > /dev/null ||
    exit 1
cp "$program" "$work/program" && cd "$work" || exit 1
run=(./program -i t_train.bin -e l1h2c16t16 -b 2 -x 9 -n 2 --keep 2 -v 0 -s 4 -g 3 -y 1 -o out
     "$@")

digest() { (cd out && find . -type f ! -name log.jsonl ! -name lock | sort | xargs sha256sum); }
saved() { sed -n 's/^saved out.step-0*//p' "$1" | tail -n 1; }
bad=0
complain() { bad=$((bad + 1)) && echo "$call $n, $what: $1"; }

"${run[@]}" > log || exit 1
whole=$(digest)
rm -r out
strace -f -qq -e "trace=${calls// /,}" -o trace "${run[@]}" > log || exit 1
cp trace all
kills=0 failures=0
for call in $calls; do
    total=$(grep -c "^[0-9]* *$call(" all)
    for ((n = 1; n <= total; n++)); do
        for what in signal=KILL error=ENOSPC; do
            rm -rf out
            {    # hides the shell's message about the kill
                strace -f -qq -o trace -e "trace=$call" -e "inject=$call:$what:when=$n" \
                    "${run[@]}" > log 2> said
                status=$?
            } 2> /dev/null
            case $what$status in
            signal=KILL137) kills=$((kills + 1)) ;;
            error=ENOSPC0)    # allowed to fail if its target may be missing
                [ $call != fsync ] || complain "a file that may not be on the disk" ;;
            error=ENOSPC1)
                failures=$((failures + 1))
                [ "$(wc -l < said)" -eq 1 ] || complain "said $(head -c 300 said)" ;;
            *) complain "exit status $status, said $(head -c 300 said)" ;;
            esac
            before=$(saved log)
            if ! "${run[@]}" > log 2> said || [ -s said ]; then
                complain "the next run said: $(head -c 300 said)"
            elif [ "$(digest)" != "$whole" ]; then
                complain "the next run ended in other files"
            elif [ "${before:-0}" -gt 0 ]; then
                resumed=$(sed -n 's/^resumed from out.step-0*//p' log)
                [ "${resumed:-0}" -ge "$before" ] || complain "lost step $before"
            fi
        done
    done
    echo "$call: $total calls"
done
echo "$kills kills and $failures failed calls, $bad bad"
[ $bad -eq 0 ]
