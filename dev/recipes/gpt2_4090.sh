#!/usr/bin/env bash
# Trains a 124M model to GPT-2's validation loss, 3.28 on FineWeb, on one RTX 4090 with tuned AdamW.
# Run `data/prepare.sh fineweb 65` (13 GB) and `data/prepare.sh hellaswag` first.
set -eu
cd "$(dirname "$0")/../.."
card=4090 tokens=6400000000 price=${PRICE:-0.40}
options=(-e d12 -i 'data/fineweb_train_*.bin' -j 'data/fineweb_val_*.bin'
         -d 262144 -x 24414 -l 1.5e-3 -u 700 -v 250 -s 5000 -g 144 -n 500 --keep 3
         -o runs/gpt2_4090 -y 1)
says="6.4 billion tokens with learning rate 1.5e-3 and 262,144 tokens per step reached 3.28 on two
RTX 4090 (Romero), where llm.c's 124M run (scripts/run_gpt2_124M.sh, discussion 481: 6e-4,
524,288) needs 10.3 billion; warm-up and decay are llm.c's. The rate is for this batch: with 65,536
tokens per step, 6e-4 was better than 1.5e-3 on an H100 (dev/notes/muon.md). GPT-2's weights score
29.4 % on HellaSwag: ./train_gpt2cu -e runs/gpt2_4090 --eval data/hellaswag_val.bin. Not run yet."
. dev/recipes/start.sh
