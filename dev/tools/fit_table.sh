#!/usr/bin/env bash
# The manual's table of models and cards: for each, the settings that `--fit bits` finds fastest at
# half a million tokens per step, their bytes, and the forecast. After make train_gpt2, run
# dev/tools/fit_table.sh
set -eu
cd "$(dirname "$0")/../.."
echo '| model | card | settings besides `-d 524288` | device, host GiB | forecast, tokens/s |'
echo '| --- | --- | --- | --- | --- |'
for model in gpt2 gpt2-large gpt2-xl; do
    for card in t4 4060ti 4090 a100 h200; do
        chosen=$(./train_gpt2 --fit bits -e $model --gpu $card -d 524288 |
            sed -n 's/^fastest: .*train_gpt2cu //p')
        # shellcheck disable=SC2086  # words
        plan=$(./train_gpt2 --plan --gpu $card $chosen)
        echo "$plan" | awk -v model=$model -v card=$card -v chosen="$chosen" '
            /^device allocation/ { device = $3 } /^host memory/ { host = $3 }
            /^forecast:/ { forecast = $2 }
            END { gsub(/,/, "", device); gsub(/,/, "", host)
                  sub(/-e [^ ]*/, "", chosen); sub(/-d 524288/, "", chosen)
                  gsub(/  +/, " ", chosen)
                  printf "| %s | %s |%s | %.1f, %.1f | %s |\n", model, card,
                         chosen == " " ? " the defaults " : " `" substr(chosen, 2) "`",
                         device / 2 ^ 30, host / 2 ^ 30,
                         forecast == "" ? "unknown" : forecast }'
    done
done
