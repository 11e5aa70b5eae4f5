#!/usr/bin/env bash
# Fine-tunes GPT-2 medium (355M) on a text of yours, on a card of 16 GB:
#   hf download openai-community/gpt2-medium --local-dir gpt2-medium
#   data/tokenize --bpe -o data/mine mine.txt
set -eu
cd "$(dirname "$0")/../.."
[ -d gpt2-medium ] || { echo "${0##*/}: no folder gpt2-medium: hf download" \
    "openai-community/gpt2-medium --local-dir gpt2-medium" >&2; exit 1; }
card=4060ti
options=(-e ./gpt2-medium -i 'data/mine_train*.bin' -j 'data/mine_val*.bin' -b 4 -d 32768 -x 200
         -l 3e-5 -k constant -c 0.1 -v 10 -s 50 -g 200 -n 50 --keep 2 -o runs/medium -y 1)
says="Sentences in your text's style within 100 steps; stop when the validation loss rises. Not
run yet. Learning rate, constant schedule and 32,768 tokens a step are those of nanoGPT's
config/finetune_shakespeare.py."
. dev/recipes/start.sh
