# Sourced at the end of each recipe, which sets `card` (empty: the CPU), `options`, `says` (what to
# expect) and, for a long run, `tokens`, `gpus` (default 1) and `price` in dollars per GPU hour:
#
#   dev/recipes/NAME.sh              what to expect, the command line, its plan, forecast and cost
#   PRICE=1.2 dev/recipes/NAME.sh    the same at another price
#   dev/recipes/NAME.sh train        trains; a second call resumes
#   ... [OPTION VALUE...]            overrides or adds options, e.g. --gpu 3090 or -x 100
# shellcheck shell=bash disable=SC2154,SC2206
action=plan
[ "${1-}" != train ] || { action=train && shift; }
program=train_gpt2
[ -z "$card" ] || [ $action = plan ] || program=train_gpt2cu
[ -x $program ] || { echo "${0##*/}: no ./$program: make $program" >&2; exit 1; }
names=$(./$program --help all | grep -Eo '^ +(-., )?--[^ ]+')
command=(${launch-} "./$program")
[ $action = train ] || options=(${card:+--gpu "$card"} "${options[@]}") command=("./$program" --plan)
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
[ -z "${price-}" ] || "${command[@]}" --json | awk -F '"tokens_per_s":' -v tokens="$tokens" \
    -v gpus="${gpus:-1}" -v price="$price" '$2 && !done++ { hours = tokens / ($2 + 0) / 3600
    printf "%.1f hours for %.1f billion tokens: $%.0f at $%s per GPU and hour\n", hours,
        tokens / 1e9, hours * gpus * price, price }'
