#!/usr/bin/env bash
# `make train`: trains a small GPT-2 on the text that data/prepare.sh prepared, keeps it in
# runs/first and prints the command that generates text with it. If interrupted (Ctrl-C), the next
# call resumes; once training has finished, it says how to start again.
#
#   dev/train.sh train_gpt2|train_gpt2cu
set -u
cd "$(dirname "$0")/.." || exit 1
program=./$1 folder=runs/first

# With these settings the validation loss, in nats per token, is `loss` or less. A run that began
# with the stories keeps them, even if tinyshakespeare has been downloaded since.
recipe=(-e l4h4c128t64 -b 12 --optimizer muon -l 6e-3 -u 100 --beta2 0.99 -v 350 -m 0 -s 700
        --temperature 0.7)
text=tinyshakespeare_bpe steps=1400 loss=3.6 prompt="To be"
if [ ! -f data/${text}_train.bin ] ||
    grep -qs '"train-data":"data/stories' $folder/log.jsonl; then
    text=stories_bpe steps=700 loss=0.5 prompt="Once upon a time"
fi
set -- "$program" -i data/${text}_train.bin -j data/${text}_val.bin -x $steps "${recipe[@]}" \
    -n 700 -o $folder -y 1
printf '\n$ %s\n' "$*"
"$@" || exit    # after Ctrl-C the program saves and exits with 0, so this script continues

for saved in $folder/step-[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]; do :; done    # the newest
[ -d "$saved" ] || saved=
step=$((10#0${saved##*-}))
if [ "$step" -ge $steps ]; then
    cat << END

Expected: a validation loss of $loss or less. The model is in $folder. To generate text with it:
  $program -e $folder --generate --temperature 0.7 --prompt "$prompt"
Next: rm -r $folder && make train starts again; $program --help lists the options;
      $program -e d12 --plan shows what GPT-2 needs;
      dev/recipes/own_text.sh FILE trains on a text of yours.
END
else
    echo "Interrupted: make train resumes${saved:+ from $saved}; rm -r $folder starts again."
fi
