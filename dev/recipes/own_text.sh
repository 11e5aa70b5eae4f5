#!/usr/bin/env bash
# Trains a small GPT on your own text, on a laptop's CPU; has run on tinyshakespeare:
#
#   dev/recipes/own_text.sh FILE [train] [OPTION...]
#
# Learns a tokenizer of 4,096 tokens (VOCABULARY=N; as many as a small text yields) from FILE, plain
# text such as a novel or a few MB of chats, and trains a model of 3.5 million parameters. Each path
# and contents have shards and a run of their own. With less than a megabyte of text, the
# validation loss may rise again: use runs/NAME/best, or fewer steps (-x).
set -eu
file=$(realpath "${1:?usage: dev/recipes/own_text.sh FILE [train] [OPTION...]}")
shift
cd "$(dirname "$0")/../.."
vocabulary=${VOCABULARY:-4096} name=${file##*/} id=$(sha256sum "$file")
id=$(sha256sum <<< "$id $vocabulary") name=$(tr -c 'A-Za-z0-9\n' _ <<< "${name%.*}")_${id:0:8}
if [ ! -f "data/${name}_val.bin" ]; then
    make -s data/tokenize
    data/tokenize --train-bpe "$vocabulary" -o "data/$name" "$file"
fi
card=
options=(-e l6h6c192t128 -i "data/${name}_train.bin" -j "data/${name}_val.bin"
         -b 16 -x 1000 -l 3e-3 -u 100 -q 0.1 -c 0.1 --beta2 0.99 -v 250 -s 500 -g 60
         --temperature 0.8 --top-p 0.95 -n 250 --keep 4 -o "runs/$name" -y 1)
says="Expect sentences in your text's style after five to ten minutes on two cores. Schedule, warmup
and beta2 are those of nanoGPT's config/train_shakespeare_char.py; three times its learning rate
of 1e-3 did better in 200 steps on tinyshakespeare (validation loss 5.276 instead of 5.294)."
. dev/recipes/start.sh
