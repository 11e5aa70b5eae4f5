#!/usr/bin/env bash
# Trains GPT-2 124M on 10 billion tokens, on one machine with eight GPUs. Run `data/prepare.sh
# fineweb 103` (20 GB) and `data/prepare.sh hellaswag` first.
set -eu
cd "$(dirname "$0")/../.."
card=a100 tokens=10000000000 price=${PRICE:-1.80} gpus=8
options=(-e d12 -i 'data/fineweb_train_*.bin' -j 'data/fineweb_val_*.bin' --gpus 8 -z 1
         -b 64 -d 524288 -x 18865 -l 6e-4 -u 700 -q 0 -c 0.1 -v 250 -s 5000 -g 144 -n 1000 --keep 3
         -o runs/gpt2_8gpus -y 1)
says="The settings of llm.c's 124M run (scripts/run_gpt2_124M.sh, discussion 481), which took 94
minutes on 8 A100 and reached validation loss 3.29 on FineWeb and 29.9 % on HellaSwag (GPT-2's
weights: 29.4 %). gpt2_4090.sh and gpt2_muon.sh need fewer tokens. Not run yet."
. dev/recipes/start.sh
