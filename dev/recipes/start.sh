# Sourced at the end of each recipe, which sets `card` (empty: the CPU), `options`, `says` (what to
# expect) and, for a long run, `tokens`, `gpus` (default 1) and `price` in dollars per GPU hour:
#
#   dev/recipes/NAME.sh              what to expect, the command line, its plan, forecast and cost
#   PRICE=1.2 dev/recipes/NAME.sh    the same at another price
#   dev/recipes/NAME.sh train        trains; a second call resumes
#   ... [OPTION VALUE...]            overrides or adds options, e.g. --gpu 3090 or -x 100
# shellcheck shell=bash disable=SC2154
action=plan
[ "${1-}" != train ] || { action=train && shift; }
program=train_gpt2
[ -z "$card" ] || [ $action = plan ] || program=train_gpt2cu
[ -x $program ] || { echo "${0##*/}: no ./$program: make $program" >&2; exit 1; }
set -- ${card:+--gpu "$card"} "${options[@]}" "$@"
options=()
while [ $# -gt 0 ]; do    # option-value pairs; of a repeated option, the last one counts
    [[ " ${*:3} " == *" $1 "* || "$action $1" = "train --gpu" ]] || options+=("${@:1:2}")
    shift $(($# > 1 ? 2 : 1))
done
if [ $action = train ]; then
    exec ./$program "${options[@]}"
fi
printf '%s\n\n' "$says"
printf '$ ./%s' "train_gpt2${card:+cu}"
printf ' %q' "${options[@]}"
printf '\n\n'
plan=("./$program" --plan "${options[@]}")
"${plan[@]}"
[ -z "${price-}" ] || "${plan[@]}" --json | awk -F '"tokens_per_s":' -v tokens="$tokens" \
    -v gpus="${gpus:-1}" -v price="$price" '$2 && !done++ { hours = tokens / ($2 + 0) / 3600
    printf "%.1f hours for %.1f billion tokens: $%.0f at $%s per GPU and hour\n", hours,
        tokens / 1e9, hours * gpus * price, price }'
