# The end of each recipe, which sets `card` (empty: the CPU), `options` and `says` (what to expect):
#
#   dev/recipes/NAME.sh              what to expect, the command line, its plan and forecast
#   dev/recipes/NAME.sh train        trains; a second call resumes
#   ... [OPTION...]                  added to the command line, e.g. --gpu 3090 or -x 100
# shellcheck shell=bash disable=SC2154
action=plan
[ "${1-}" != train ] || { action=train && shift; }
program=train_gpt2
[ -z "$card" ] || [ $action = plan ] || program=train_gpt2cu
[ -x $program ] || { echo "${0##*/}: no ./$program: make $program" >&2; exit 1; }
if [ $action = train ]; then
    exec ./$program "${options[@]}" "$@"
fi
printf '%s\n\n' "$says"
printf '$ ./%s' "train_gpt2${card:+cu}"
printf ' %q' "${options[@]}" "$@"
printf '\n\n'
exec ./$program --plan ${card:+--gpu "$card"} "${options[@]}" "$@"
