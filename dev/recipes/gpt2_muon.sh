#!/usr/bin/env bash
# Trains a 124M model to GPT-2's validation loss, 3.28 on FineWeb, on one RTX 4090 with Muon.
# Run `data/prepare.sh fineweb 43` (9 GB) first.
set -eu
cd "$(dirname "$0")/../.."
card=4090 tokens=4200000000 price=${PRICE:-0.40}
options=(-e d12 -i 'data/fineweb_train_*.bin' -j 'data/fineweb_val_*.bin' --optimizer muon
         -d 262144 -x 16022 -l 4e-3 -u 700 -v 250 -s 5000 -g 144 -n 500 --keep 3
         -o runs/gpt2_muon -y 1)
says="An estimate: 34 % fewer tokens than with AdamW (gpt2_4090.sh), as in the optimizer track of
the modded-nanogpt speedrun: 3,250 steps with tuned Muon, 4,950 with tuned AdamW. The learning
rate was better than 1.5e-3 on an H100, with 65,536 tokens per step and 800 steps
(dev/notes/muon.md); it has not been tried with this batch. Not run yet."
. dev/recipes/start.sh
