# Sourced at the end of own_text.sh and slurm/train.sh, which set `card` (empty: the CPU), `options`
# and `says` (what to expect):
#
#   NAME.sh          what to expect, the command line, its plan and forecast
#   NAME.sh train    trains; a second call resumes
#   ... [OPTION VALUE...]    overrides or adds options, e.g. --gpu 3090 or -x 100
# shellcheck shell=bash disable=SC2154,SC2206
action=plan
[ "${1-}" != train ] || { action=train && shift; }
program=train_gpt2
[ -z "$card" ] || [ $action = plan ] || program=train_gpt2cu
[ -x $program ] || { echo "${0##*/}: no ./$program: make $program" >&2; exit 1; }
names=$(./$program --help all | grep -Eo '^ +(-., )?--[^ ]+')
command=(${launch-} "./$program")
[ $action = train ] || command=("./$program" --plan)
[ $action = train ] || options=(${card:+--gpu "$card"} "${options[@]}")
for ((i = 0; i < ${#options[@]}; i += 2)); do    # unless it is given under one of its names
    either=$(grep -E -- " ${options[i]}(,|$)" <<< "$names" | grep -Eo -- '-[^ ,]+')
    grep -qxF -- "$either" <<< "$(printf '%s\n' "${@%%=*}")" || command+=("${options[@]:i:2}")
done
[ $action = plan ] || exec "${command[@]}" "$@"
command+=("$@")
printf '%s\n\n$' "$says"
printf ' %q' "${command[@]}"
printf '\n\n'
"${command[@]}"
