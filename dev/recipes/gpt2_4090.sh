#!/usr/bin/env bash
# GPT-2 124M on 10 billion tokens, on one RTX 4090: needs `data/prepare.sh fineweb-edu 100` (20 GB)
# and `data/prepare.sh hellaswag` first.
set -eu
cd "$(dirname "$0")/../.."
card=4090
options=(-e d12 -i 'data/edu_fineweb_train_*.bin' -j 'data/edu_fineweb_val_*.bin'
         -d 524288 -x 18865 -l 6e-4 -u 700 -q 0 -c 0.1 -v 250 -s 5000 -g 144 -n 500 --keep 3
         -o runs/gpt2_4090 -y 1)
says="The settings of llm.c's run of 124M (scripts/run_gpt2_124M.sh, discussion 481), which
reached validation loss 3.29 on FineWeb and 29.9 % of HellaSwag (GPT-2's weights: 29.4 %).
Losses on FineWeb-Edu, which data/prepare.sh gets, are not comparable with those; HellaSwag
is: ./train_gpt2cu -e runs/gpt2_4090/step-00018865 --eval data/hellaswag_val.bin. Not run
yet."
. dev/recipes/start.sh
