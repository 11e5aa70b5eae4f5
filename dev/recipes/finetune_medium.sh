#!/usr/bin/env bash
# Fine-tunes GPT-2 medium (355M) on your own text, on a 16 GB card. First:
#   hf download openai-community/gpt2-medium --local-dir gpt2-medium
#   data/tokenize --bpe -o data/mine mine.txt
set -eu
cd "$(dirname "$0")/../.."
[ -d gpt2-medium ] || { echo "${0##*/}: no folder gpt2-medium: hf download" \
    "openai-community/gpt2-medium --local-dir gpt2-medium" >&2; exit 1; }
card=4060ti
options=(-e ./gpt2-medium -i 'data/mine_train*.bin' -j 'data/mine_val*.bin' -b 4 -d 32768 -x 200
         -l 3e-5 -k constant -c 0.1 -v 10 -s 50 -g 200 -n 50 --keep 2 -o runs/medium -y 1)
says="Expect sentences in your text's style within 100 steps; stop when the validation loss rises.
Not run yet. The learning rate, the constant schedule and 32,768 tokens per step are those of
nanoGPT's config/finetune_shakespeare.py."
. dev/recipes/start.sh
