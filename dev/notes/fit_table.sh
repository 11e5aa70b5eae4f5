#!/usr/bin/env bash
# The manual's table of models and cards: for each, the settings that `--fit bits` finds fastest at
# half a million tokens per step, their memory, and the forecast. After make train_gpt2, run
# dev/notes/fit_table.sh
set -eu
cd "$(dirname "$0")/../.."
echo '| model | card | settings besides `-d 524288` | device, host GiB | forecast, tokens/s |'
echo '| --- | --- | --- | --- | --- |'
for model in gpt2 gpt2-large gpt2-xl; do
    for card in t4 4060ti 4090 a100 h200; do
        ./train_gpt2 --fit bits -e $model --gpu $card -d 524288 --json | python3 -c '
import json, sys
best = json.load(sys.stdin)["best"][0]
print("| %s | %s | `%s` | %.1f, %.1f | %s |" % (*sys.argv[1:], best["options"],
      best["device_bytes"] / 2**30, best["host_bytes"] / 2**30,
      format(best["tokens_per_s"] or 0, ",")))' $model $card
    done
done
