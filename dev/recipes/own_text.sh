#!/usr/bin/env bash
# A small GPT on your own text, on the CPU of a laptop:
#
#   dev/recipes/own_text.sh FILE [train] [OPTION...]
#
# Learns a tokenizer of 4,096 tokens from FILE (plain text; a novel, some MB of mails or chats) and
# trains a model of 3.5 million parameters. With less than 2 MB of text the validation loss rises
# again before the end: the run keeps its checkpoints, and fewer steps (-x) are then better.
set -eu
file=$(realpath "${1:?usage: dev/recipes/own_text.sh FILE [train] [OPTION...]}")
shift
cd "$(dirname "$0")/../.."
name=$(basename "${file%.*}" | tr -c 'A-Za-z0-9\n' _)
if ! compgen -G "data/${name}_bpe_train*.bin" > /dev/null; then
    make -s data/tokenize
    data/tokenize --train-bpe 4096 -o "data/${name}_bpe" "$file"
fi
card=
options=(-e l6h6c192t128 -i "data/${name}_bpe_train*.bin" -j "data/${name}_bpe_val*.bin"
         -b 16 -x 1500 -l 1e-3 -u 100 -q 0.1 -c 0.1 --beta2 0.99 -v 250 -s 500 -g 60
         --temperature 0.8 --top-p 0.95 -n 500 --keep 2 -o "runs/$name" -y 1)
says="Sentences in your text's style after some ten minutes on two cores. Learning rate, schedule,
warmup and beta2 are those of nanoGPT's config/train_shakespeare_char.py."
. dev/recipes/start.sh
