#!/usr/bin/env bash
# Trains GPT-2 124M on stories, on one T4 (16 GB). Run `data/prepare.sh tinystories` first.
set -eu
cd "$(dirname "$0")/../.."
card=t4
options=(-e d12 -i 'data/tinystories_gpt2_train_*.bin' -j 'data/tinystories_gpt2_val_*.bin'
         -d 131072 -x 4000 -l 6e-4 -u 200 -c 0.1 -v 250 -s 500 -g 200 -n 250 --keep 2
         -o runs/gpt2_t4 -y 1)
says="524 million tokens of TinyStories in fp16: expect short stories with a plot. Not run yet.
Learning rate and weight decay are those of llm.c's 124M run (scripts/run_gpt2_124M.sh). A free
notebook ends after a few hours; run the recipe again to resume from the newest checkpoint, at
most 250 steps back."
. dev/recipes/start.sh
