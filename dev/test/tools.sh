#!/usr/bin/env bash
# Tests of data/tokenize, data/prepare.sh and dev/report.py. Works in a scratch folder with a space
# in its name and leaves data/ unchanged. One line per test, last line `N passed, N failed, N
# skipped`.
set -u
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
mkdir -p build
scratch=$(mktemp -d "build/tools test.XXXXXX") || exit 1
server=
trap 'cd "$root" && rm -rf "$scratch"; [ -z "$server" ] || kill $server' EXIT
. dev/test/verdicts.sh tools

# equal NAME FOUND EXPECTED
equal() {
    [ "$2" = "$3" ]
    verdict "$1" $? "found '$2', expected '$3'"
}

# refuses NAME PATTERN COMMAND...: exit status 1, one matching line on stderr, no shard left.
refuses() {
    local name=$1 pattern=$2 said status
    shift 2
    said=$("$@" 2>&1 > /dev/null)
    status=$?
    [ $status -eq 1 ] && [ "$(printf '%s\n' "$said" | wc -l)" -eq 1 ] && [[ $said =~ $pattern ]] &&
        ! compgen -G 'bad*' > /dev/null
    verdict "$name" $? "status $status, said '$said'"
    rm -f bad*
}

# numbers FORMAT SKIP FILE: the numbers in a file after SKIP bytes.
numbers() { od -An -v -t"$1" -j "$2" "${@:3}" | tr -s ' \n' ' ' | sed 's/^ //; s/ $//'; }

cp data/prepare.sh data/tokenize data/stories "$scratch" && cd "$scratch" || exit 1
tokenize="./tokenize --bytes"

printf 'Hello, \303\244\377\n' > text
$tokenize -o one --val-fraction 0 text > /dev/null
equal "header" "$(numbers d4 0 -N20 one_train.bin)" "20240520 1 11 257 1"
equal "tokens are bytes" "$(numbers u2 1024 one_train.bin)" \
    "72 101 108 108 111 44 32 195 164 255 10"
equal "no validation with fraction 0" "$(ls one_*)" "one_train.bin"
$tokenize -o two --val-fraction 0.25 text > /dev/null    # 8.25: inside a two-byte character
equal "no character is cut" "$(numbers u2 1024 two_val.bin)" "255 10"
head -c 3000000 /dev/zero | tr '\0' 'a' > long
$tokenize -o long long > /dev/null
equal "split at 90 %" "$(numbers d4 8 -N4 long_train.bin)" 2700000
(cat long long; sleep 0.1; cat long) |
    $tokenize -o pipe --val-tokens 5 --shard-tokens 4000000 - > /dev/null
equal "stream in shards" "$(echo pipe_*)" "pipe_train_000000.bin pipe_train_000001.bin \
pipe_train_000002.bin pipe_val_000000.bin"
bytes=$(for f in pipe_val_000000.bin pipe_train_00000?.bin; do tail -c +1025 $f; done |
    tr -d '\0' | cksum)
expected=$(cat long long long | cksum)
equal "a stream decodes to the input" "$bytes" "$expected"
printf 'PK\0\0' > binary
equal "binary input: a warning" "$($tokenize -o binary binary 2>&1 > /dev/null)" \
    "tokenize: binary contains zero bytes: is it text? --bytes encodes any file"
equal "text: no warning" "$($tokenize -o binary long 2>&1 > /dev/null)" ""
: > nothing
refuses "missing input" "cannot open absent: No such file" $tokenize -o bad absent
refuses "empty input" "nothing is empty" $tokenize -o bad nothing
refuses "folder as input" "cannot read \.: Is a directory" $tokenize -o bad .
for prefix in . .. ./. ./..; do
    refuses "prefix $prefix" "-o '$prefix': a PREFIX ends in the start of" $tokenize -o $prefix text
done
mkfifo fifo
refuses "pipe as a file" "cannot read fifo: not a regular file" \
    timeout 20 $tokenize -o bad fifo
refuses "device as a file" "cannot read /dev/zero: not a regular file; - reads" \
    timeout 20 $tokenize -o bad --val-tokens 1 --shard-tokens 100 /dev/zero
refuses "pipe as a vocabulary" "fifo: not a regular file" \
    timeout 20 ./tokenize --bpe --tokenizer fifo -o bad text
for prefix in '' / /none/ ./; do
    refuses "prefix '$prefix'" "^tokenize: -o '$prefix': a PREFIX ends in" \
        $tokenize -o "$prefix" text
done
refuses "a huge argument is shortened" "^tokenize: --threads: 'x{200,400} ... x{200,300}' is not" \
    $tokenize -o bad --threads "$(printf 'x%.0s' {1..100000})" text
refuses "all text validates" "nothing is left" $tokenize -o bad --val-tokens 11 text
refuses "no output folder" "cannot create absent/bad\.lock" $tokenize -o absent/bad text
refuses "fraction of a stream" "needs files" $tokenize -o bad --val-fraction 0.1 -
refuses "fraction out of range" "not a number in .0, 1" $tokenize -o bad --val-fraction 1.5 text
refuses "shard of no tokens" "not a whole number from 1" $tokenize -o bad --shard-tokens 0 text
refuses "unknown option" "unknown option '--byte'" ./tokenize --byte -o bad text
refuses "no tokenizer named" "--bpe, --bytes or --train-bpe is missing" ./tokenize -o bad text
refuses "questions without a tokenizer" "tokenize: --bpe or --bytes is missing" \
    ./tokenize --questions -o bad text
refuses "two tokenizers" "contradict each other" $tokenize --bpe -o bad text
refuses "no vocabulary" "needs GPT-2's vocab.bpe" ./tokenize --bpe -o bad text
refuses "bad vocabulary" "text: " ./tokenize --bpe --tokenizer text -o bad text
printf '#version: 0.2\na b\n' > made
./tokenize --bpe --tokenizer made --val-fraction 0 -o made text > /dev/null
equal "a vocabulary of one merge" "$(numbers d4 12 -N8 made_train.bin)" "258 2"
equal "its merges are copied" "$(cmp made made_merges.txt 2>&1)" ""
printf '#version: 0.2\na b\nb c\na bc\n' > never    # ab is merged before bc
refuses "a merge that is never applied" "never:4: this merge can never be applied" \
    ./tokenize --bpe --tokenizer never -o bad text
refuses "two splits" "contradict each other" $tokenize -o bad --val-tokens 1 --val-file text text
refuses "stream among files" "is a stream: it must be the only input" $tokenize -o bad text -
refuses "no threads" "not a whole number from 1 to 1024" $tokenize -o bad --threads 0 text
refuses "one document, split" "no document begins" $tokenize -o bad --documents text
refuses "leftover shards" "left from an earlier run" $tokenize -o pipe --shard-tokens 4000000 text

if [ "$(id -u)" -eq 0 ] && mkdir full && mount -t tmpfs -o size=64k tmpfs full 2> /dev/null; then
    refuses "full disk" "cannot write full/bad_train.bin.part: No space" $tokenize -o full/bad long
    equal "a full disk leaves no file" "$(ls full)" ""
    umount full
else
    skip "full disk" "cannot mount a small tmpfs"
fi

# Documents, shards, threads.
printf ' one <|endoftext|>\n\n<|endoftext|>two<|endof<|endoftext|>\n' > documents
printf 'three\n' > third
words="256 111 110 101 256 116 119 111 60 124 101 110 100 111 102 256 116 104 114 101 101"
$tokenize --documents --val-fraction 0 -o docs documents third > /dev/null
equal "documents" "$(numbers u2 1024 docs_train.bin)" "$words"
$tokenize --documents --val-fraction 0.4 -o docs documents third > /dev/null
equal "split at a document" "$(numbers u2 1024 docs_val.bin)" "${words##*102 }"
$tokenize --documents --val-file third -o docs documents > /dev/null
equal "a file validates" "$words" \
    "$(numbers u2 1024 docs_train.bin) $(numbers u2 1024 docs_val.bin)"
$tokenize --val-fraction 0 -o plain documents third > /dev/null
equal "plain text keeps the marker" "$(numbers u2 1024 plain_train.bin)" \
    "$(cat documents third | numbers u1 0 -)"
for before in 1048563 1048564 1048570 1048576; do    # markers around the end of the first block
    { head -c $before long; printf '<|endoftext|> b '; head -c 1048560 /dev/zero | tr '\0' ' '
      printf '<|endoftext|>c'; } > border
    $tokenize --documents --val-fraction 0 -o border border > /dev/null
    equal "marker after byte $before" "$(numbers u2 $((1024 + 2 * before)) border_train.bin)" \
        "97 256 98 256 99"
done
seq 700000 | sed '0~50000s/$/<|endoftext|>/' > digits    # 4.8 MB
$tokenize --val-fraction 0 --shard-tokens 2000000 -o rest digits > /dev/null
equal "a short remainder is the last shard" "$(numbers d4 8 -N4 rest_train_000002.bin)" 789077
$tokenize --val-fraction 0 --shard-tokens 2390000 -o rest2 digits > /dev/null
equal "a very short remainder is not a shard" "$(numbers d4 8 -N4 rest2_train_000001.bin)" 2399077
for t in 1 2 5; do
    ./tokenize --bytes --documents --threads $t --shard-tokens 400000 -o threads digits > /dev/null
    sum[t]=$(cat threads_*.bin | cksum)
done
equal "any number of threads" "${sum[1]} ${sum[2]}" "${sum[2]} ${sum[5]}"

# Interruptions at any moment. The reference is the run just above.
interrupt() {    # interrupt SIGNAL SHARD COMMAND...: ends the command once that shard exists
    "${@:3}" > said 2>&1 &
    local job=$!
    until [ -e "$2" ] || ! kill -0 $job 2> /dev/null; do sleep 0.002; done
    kill -s "$1" $job 2> /dev/null
    wait $job 2> /dev/null
}
again="./tokenize --bytes --documents --shard-tokens 400000 -o again"
for round in 1 2 3; do
    rm -f again_*
    for k in $((RANDOM % 4)) $((4 + RANDOM % 5)) 10; do
        interrupt KILL "again_train_0000$(printf %02d $k).bin" $again digits
    done
    $again --threads $round digits > /dev/null
    equal "killed and resumed, round $round" "$(cat again_*.bin | cksum)" "${sum[1]}"
done
interrupt INT again.state $again digits
says "interrupted" "(finished shards: [0-9]+; the same command continues)|(tokens)" "$(cat said)"
interrupt KILL again.state $again digits
if [ -f again.state ]; then
    cp again.state kept
    says "resuming" "continues after [0-9]+ finished shards" "$($again digits)"
    equal "no state at the end" "$(ls again.state* 2> /dev/null)" ""
    for how in "other arguments:--val-fraction 0:digits" "other input::digits2" \
        "damaged::digits"; do
        cp kept again.state
        cp digits digits2
        [[ $how == damaged* ]] && echo x >> again.state
        IFS=: read -r name option file <<< "$how"
        # shellcheck disable=SC2086  # options are words
        refuses "state, $name" "again.state (is|counts) .*: remove it" $again $option $file
    done
    cp kept again.state && rm again_train_000000.bin
    refuses "a state without its shards" "counts finished shards that do not exist" $again digits
    cp kept again.state && touch digits
    refuses "state, input touched" "is of a run with other or changed input" $again digits
    rm again.state
else
    skip "states" "runs end before they can be interrupted"
fi
# Its input never ends; a stream that only pauses could leave the first shard unfinished.
while cat long; do sleep 0.2; done 2> /dev/null |
    $tokenize -o held --shard-tokens 1000000 - > said 2>&1 &
holder=$!
until [ -e held_train_000000.bin ] || ! kill -0 $holder 2> /dev/null; do sleep 0.002; done
said=$($tokenize -o held text 2>&1 > /dev/null)
equal "one run per prefix" "$? $said" \
    "1 tokenize: -o held: another run of tokenize writes there (held.lock is locked)"
$tokenize -o other text > /dev/null
equal "another prefix is not locked" "$?" 0
kill -s KILL $holder
wait $holder 2> /dev/null
rm -f held_*
$tokenize -o held text > /dev/null
equal "the lock of a killed run is released and removed" "$? $(echo held*)" \
    "0 held_train.bin held_val.bin"
if command -v strace > /dev/null && strace -o traced true; then
    strace -f -o traced -e trace=fsync,fdatasync,syncfs,sync \
        $tokenize --val-fraction 0 --shard-tokens 2000 -o tiny digits2 > /dev/null
    equal "2,400 tiny shards: synced at the first and at the end" "$(grep -c sync traced)" 3
    rm -f tiny_*
else
    skip "syncs with tiny shards" "no strace"
fi
(cat long; sleep 2) | $tokenize -o flow --shard-tokens 1000000 - > said 2>&1 &
stream=$!
sleep 0.5
kill -s INT $stream
wait $stream
equal "a stream is interrupted: status" $? 130
says "a stream is interrupted" "a stream cannot be continued" "$(cat said)"

equal "a pipe gets only the last lines" "$($tokenize -o long long | wc -l)" 2
if command -v script > /dev/null; then
    said=$(script -qec "./tokenize --bytes -o long long" /dev/null < /dev/null | tr '\r\033' 'R!')
    says "a terminal shows progress" "R\[#+ *\].*R!\[Klong_train.bin" "$said"
else
    skip "progress on a terminal" "no script(1)"
fi

mirror=${DATA_MIRROR:-$root/data}
vocab=$mirror/gpt2/vocab.bpe
[ -f "$vocab" ] || vocab=$mirror/vocab.bpe
if [ -f "$vocab" ]; then
    bpe="./tokenize --bpe --tokenizer $vocab"
    printf "I'll go.\n<|endoftext|>\nHello world" > said
    $bpe --documents --val-fraction 0 -o bpe said > /dev/null
    equal "GPT-2 tokens, documents" "$(numbers d4 8 -N12 bpe_train.bin) \
$(numbers u2 1024 bpe_train.bin)" "8 50257 0 50256 40 1183 467 13 50256 15496 995"
    $bpe --val-fraction 0 -o bpe said > /dev/null
    equal "GPT-2 tokens, plain" "$(numbers u2 1024 bpe_train.bin)" \
        "40 1183 467 13 198 27 91 437 1659 5239 91 29 198 15496 995"
    head -c 4500000 /dev/zero | tr '\0' 'a' > solid    # longer than the longest block
    $bpe --threads 2 --val-tokens 5 -o bpe solid > /dev/null
    equal "GPT-2 tokens, no place to split" "$(numbers u2 1024 bpe_val.bin)" \
        "24794 24794 24794 24794 24794"
else
    skip "GPT-2 tokens" "neither DATA_MIRROR nor data/ has vocab.bpe"
fi

# Learning merges. The stored ones are those of Hugging Face's BpeTrainer.
./stories > told
train_bpe="./tokenize --train-bpe"
$train_bpe 1000 --val-fraction 0 -o learned told > said
equal "merges of the stories" \
    "$(cmp learned_merges.txt "$root/dev/test/stories_merges.txt" 2>&1)" ""
says "learned merges are reported" "^learned_merges.txt +743 merges from 556 distinct pre-tokens" \
    "$(cat said)"
equal "header of own tokens" "$(numbers d4 12 -N8 learned_train.bin) \
$(od -An -tx1 -j20 -N8 learned_train.bin | tr -d ' ')" \
    "1000 2 $(sha256sum learned_merges.txt | cut -c1-16)"
learned=$(cat learned_train.bin learned_merges.txt | cksum)
./tokenize --bpe --tokenizer learned_merges.txt --val-fraction 0 -o same told > /dev/null
equal "the same with these merges" "$(cat same_train.bin same_merges.txt | cksum)" "$learned"
for t in 1 5; do
    $train_bpe 1000 --val-fraction 0 --threads $t -o learned told > /dev/null
    equal "$t threads learn the same" "$(cat learned_train.bin learned_merges.txt | cksum)" \
        "$learned"
done
head -c 1600000 told > begin
tail -c +1600001 told > end
$train_bpe 600 --val-fraction 0 -o begin begin > /dev/null
$train_bpe 600 --val-file end -o parts begin > /dev/null
equal "validation text is not learned from" "$(cmp begin_merges.txt parts_merges.txt 2>&1)" ""
$train_bpe 300 --documents --val-fraction 0 -o apart told > /dev/null
equal "a document begins with end of text" "$(numbers u2 1024 -N2 apart_train.bin)" 299
printf 'aaaa\xff\xfe\0\xff\xfe\0aaaa' > odd
$train_bpe 260 --val-fraction 0 -o odd odd > /dev/null
equal "bytes that are not text" "$(sed 1d odd_merges.txt | tr '\n' '|')" "a a|þ Ā|ÿ þĀ|"
$train_bpe 257 --val-fraction 0 -o odd odd > /dev/null
equal "no merges at all" "$(cat odd_merges.txt)" "#version: 0.2"
refuses "text with few merges" "--train-bpe 400: this text has only [0-9]+ merges, which make a" \
    $train_bpe 400 -o few odd
equal "... writes nothing" "$(echo few*)" "few*"
refuses "too few tokens" "'256' is not a whole number from 257 to 65535" $train_bpe 256 -o few odd
refuses "too many tokens" "'65536' is not a whole number" $train_bpe 65536 -o few odd
refuses "a stream" "--train-bpe reads its input twice: it needs files, not standard" \
    $train_bpe 300 -o few -
refuses "merges that are learned and given" "--train-bpe and --tokenizer contradict" \
    $train_bpe 300 --tokenizer learned_merges.txt -o few odd
if [ "$(id -u)" -eq 0 ] && mkdir -p full && mount -t tmpfs -o size=4k tmpfs full 2> /dev/null; then
    refuses "merges, full disk" "cannot write full/bad_merges.txt: No space" \
        $train_bpe 1200 -o full/bad told
    equal "full disk keeps nothing" "$(ls full)" ""
    umount full
else
    skip "merges on a full disk" "cannot mount a small tmpfs"
fi
cat told told told told told told told told > long_told
sleepy=$train_bpe\ 1200\ --threads\ 1\ --val-fraction\ 0\ --shard-tokens\ 1000000
$sleepy -o whole long_told > /dev/null
for round in 0.02 0.1 0.2 0.3 0.4; do
    timeout --foreground -s INT $round $sleepy -o broken long_told > said 2>&1
    says "interrupted after $round s" "(interrupted; finished shards: [0-9]+; )|(tokens)" \
        "$(cat said)"
    equal "... nothing half-written" "$(echo broken*part)" "broken*part"
done
$sleepy -o broken long_told > /dev/null
equal "resumed: the same" "$(cat broken_train* broken_merges.txt | cksum)" \
    "$(cat whole_train* whole_merges.txt | cksum)"
rm -f whole_* broken_* long_told

# Questions: the words of an evaluation file, quotation marks, line ends, and what is refused.
printf '1+1?,2,"3, or so",B\r\n\n"""a""\n",,"b",c,C' > quiz
./tokenize --questions --bytes -o quiz quiz > said
words() { printf '%b' "$1" | od -An -v -tu1 | tr -s ' \n' ' ' | sed 's/^ //; s/ $//'; }
equal "questions: the header" "$(cat said) $(numbers d4 0 -N20 quiz.bin)" \
    "quiz.bin  2 questions 20240522 1 2 84 0"
equal "questions: the words" "$(numbers u2 1024 quiz.bin)" "65535 84 0 1 2 23 \
$(words 'Question: 1+1?\n\nAnswer:') 2 $(words ' 2') 9 $(words ' 3, or so') \
65535 74 1 2 3 23 $(words 'Question: "a"\n\n\nAnswer:') 1 32 2 $(words ' b') 2 $(words ' c')"
says "questions: --eval reads them" "quiz.bin: 2 examples, accuracy [0-9.]+ %" \
    "$("$root/train_gpt2" -e l1h1c16t32 --eval quiz.bin 2>&1)"
while IFS='|' read -r rows pattern; do
    printf '%b' "$rows" > quiz
    refuses "questions: $rows" "$pattern" ./tokenize --questions --bytes -o bad quiz
done << 'END'
|quiz has no questions
q,yes,no,A\nq,yes,A|quiz, row 2: 3 fields; expected a question, 2 to 8 answers and the letter
q,1,2,3,4,5,6,7,8,9,A|quiz, row 1: 11 fields
q,yes,no,C|row 1: the last field is 'C'; expected the letter of the right answer, A to B$
q,yes,no,|row 1: the last field is ''; expected
q,yes,no,AB|row 1: the last field is 'AB'; expected
q,"yes,no,A\n|row 1: a quotation mark is not closed
END
{ head -c 40000 long; echo ,yes,no,A; } > quiz
refuses "questions: a long one" "row 1: its tokens take 80068 bytes; the format allows 65535" \
    ./tokenize --questions --bytes -o bad quiz
refuses "questions and documents" "only --bpe, --bytes, --tokenizer and -o apply" \
    ./tokenize --questions --bytes --documents -o bad quiz
refuses "questions: no file" "cannot open absent: No such" \
    ./tokenize --questions --bytes -o bad absent

# The stories have the same bytes with every compiler.
stories_sum=70fc3fac996a007e1cf13a707a473b813a1aa6ad6d0710fdc4500aeb3f9613c5
for compiler in "gcc -O0" "gcc -O3 -march=native" "gcc -m32 -O2" "gcc -funsigned-char -O2" \
    "clang -O0" "clang -O3 -march=native" "clang -m32 -O2"; do
    # shellcheck disable=SC2086  # a command and its options
    rm -f told
    if printf '#include <errno.h>\nint main(void) { return errno; }' |
        $compiler -x c - -o probe 2> /dev/null; then
        $compiler -std=c11 -Wall -Wextra -Werror "$root/data/stories.c" -o told
        equal "stories, $compiler" "$(./told | sha256sum)" "$stories_sum  -"
    else
        skip "stories, $compiler" "does not build here"
    fi
done
refuses "stories: no options" "usage: data/stories > FILE" ./stories --help
if [ -e /dev/full ]; then
    said=$(./stories 2>&1 > /dev/full)
    equal "stories on a full disk" "$? $said" \
        "1 data/stories: cannot write: No space left on device"
else
    skip "stories on a full disk" "no /dev/full"
fi

# prepare.sh in a separate repository: no download, since the network is unreachable here.
mkdir -p repo/data mirror && mv prepare.sh tokenize stories repo/data/
cp text mirror/tinyshakespeare.txt
export http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9
prepare=repo/data/prepare.sh
DATA_MIRROR=$PWD/mirror refuses "mirror with another text" "not the expected tiny" $prepare
DATA_MIRROR=$PWD/absent refuses "mirror without the text" "has no tinyshakespeare.txt" $prepare
refuses "unknown corpus" "unknown corpus 'pile'; known: tinyshakespeare tinystories" $prepare pile
# Without mirror and network: a curl that never connects counts its calls.
made="data: tinyshakespeare is not available; using generated stories"
mkdir stub && printf '#!/bin/sh\necho call >> "%s/calls"\nexit 7\n' "$PWD" > stub/curl
chmod +x stub/curl
says "stories without mirror and network" "download failed.*$made" \
    "$(env -u DATA_MIRROR PATH="$PWD/stub:$PATH" $prepare 2>&1 | tr '\n' ' ')"
equal "stories: text" "$(sha256sum < repo/data/stories.txt)" "$stories_sum  -"
equal "stories: tokens" "$(numbers d4 8 -N12 repo/data/stories_bpe_train.bin) \
$(numbers d4 8 -N12 repo/data/stories_bpe_val.bin)" "478399 1024 2 53214 1024 2"
equal "a story begins with end of text" "$(numbers u2 1024 -N2 repo/data/stories_bpe_train.bin) \
$(numbers u2 1024 -N2 repo/data/stories_bpe_val.bin)" "1023 1023"
equal "one download is tried per call" "$(wc -l < calls)" 1
equal "stories, called again: one line" \
    "$(env -u DATA_MIRROR PATH="$PWD/stub:$PATH" $prepare 2>&1)" "$made"
# The program finds data/ in the current folder, else next to itself.
mkdir -p elsewhere && cp "$root/train_gpt2" repo/
model="../repo/train_gpt2 -b 2 -x 1 -m 1 -e" train="$model l1h1c16t16"
says "data/ next to the program" \
    "data     $PWD/repo/data/stories_bpe_train\*.bin: 478,.*validation loss" \
    "$(cd elsewhere && $train 2>&1)"
mkdir elsewhere/data && cp repo/data/stories_bpe_* elsewhere/data/
said=$(cd elsewhere && $train 2>&1)
says "data/ here is preferred" "data     data/stories_bpe_train\*.bin: .*validation loss" "$said"
equal "validation data: no line without it" "$(grep -c 'no validation' <<< "$said")" 0
says "-i alone: validates on files next to it" ' -j data/stories_bpe_val.bin .*validation loss' \
    "$(cd elsewhere && $train -i data/stories_bpe_train.bin 2>&1)"
mv elsewhere/data/stories_bpe_val.bin elsewhere/val.bin
says "no validation data: one line" $'\n +no validation: --val-data \\(-j\\) is not given\n' \
    "$(cd elsewhere && $train -i data/stories_bpe_train.bin 2>&1)"
# Shards of bytes, which earlier versions made.
seq 99 | repo/data/tokenize --bytes --val-tokens 40 -o elsewhere/data/stories_bytes - > /dev/null
says "a model of bytes gets byte tokens" "data     data/stories_bytes_train\*.bin: 248 tokens" \
    "$(cd elsewhere && $model l1h1c16t4v257 2>&1)"
says "no data with the vocabulary of the model: the other one is named" \
    "names a vocabulary of 300; the data, data/stories_bpe_train" \
    "$(cd elsewhere && $model l1h1c16t16v300 2>&1)"

# make train, with a model that takes a second: Ctrl-C keeps it, another call resumes, and so on.
mkdir repo/dev
sed 's/l4h4c128t64/l1h1c32t64/; s/steps=[0-9]*/steps=399/; s/loss=[0-9.]*/loss=8/' \
    "$root/dev/train.sh" > repo/dev/train.sh
set -m    # so that the signal reaches the script and the program, as that of a terminal does
bash repo/dev/train.sh train_gpt2 > said 2>&1 &
set +m
for _ in {1..400}; do
    grep -qs '"step":9,' repo/runs/first/log.jsonl && break
    sleep 0.02
done
kill -INT -- -$!
wait $!
verdict "make train: Ctrl-C" $? "$(cat said)"
saved=$(cd repo && echo runs/first/step-*)
says "make train: Ctrl-C keeps the model" \
    "saved $saved.*Interrupted: make train resumes from $saved; rm -r runs/first starts" \
    "$(tr '\n' ' ' < said)"
said=$(bash repo/dev/train.sh train_gpt2 2>&1)
says "make train: resumes" "resumed from $saved.*finished after step 399.*Expected: a val" "$said"
command=$(grep -- ' --generate ' <<< "$said")
says "make train: the command that it prints generates" "^Once upon a time" \
    "$(cd repo && eval "$command" 2> /dev/null)"
for kind in train.bin val.bin merges.txt; do
    cp repo/data/stories_bpe_$kind repo/data/tinyshakespeare_bpe_$kind
done
said=$(bash repo/dev/train.sh train_gpt2 2>&1)
says "make train: the data of the first call" " -i data/stories_bpe_train.bin " "$said"
says "make train: finished" "nothing to do: .* step 399, .*rm -r runs/first && make train" "$said"
echo > repo/data/tinyshakespeare_bpe_train.bin && rm -rf repo/runs
said=$(bash repo/dev/train.sh train_gpt2 2>&1)
equal "make train: tinyshakespeare is preferred; an error is the last line" \
    "$? $(tail -n 1 <<< "$said" | cut -c 1-24)" "1 train_gpt2: data/tinysha"
rm -f repo/data/{stories,tinyshakespeare}?*.*
if [ -f "$mirror/tinyshakespeare.txt" ]; then
    DATA_MIRROR=$mirror $prepare > said
    equal "tinyshakespeare: tokens" "$(numbers d4 8 -N4 repo/data/tinyshakespeare_bpe_train.bin) \
$(numbers d4 8 -N4 repo/data/tinyshakespeare_bpe_val.bin)" "411268 49422"
    if [ -f "$mirror/gpt2/vocab.bpe" ]; then
        equal "tinyshakespeare: GPT-2 tokens" \
            "$(numbers d4 8 -N4 repo/data/tinyshakespeare_gpt2_train.bin) \
$(numbers d4 8 -N4 repo/data/tinyshakespeare_gpt2_val.bin)" "301966 36059"
        before=$(stat -c %Y.%i repo/data/*.bin)
        equal "prepared twice: nothing to do" "$($prepare)$(stat -c %Y.%i repo/data/*.bin)" \
            "$before"
    else
        says "tinyshakespeare: no vocabulary" "no GPT-2 tokens" "$(cat said)"
    fi
    truncate -s -2 repo/data/tinyshakespeare_bpe_val.bin
    $prepare > /dev/null 2>&1
    bytes=$(stat -c %s repo/data/tinyshakespeare_bpe_val.bin)
    equal "a damaged shard is made again" "$bytes" 99868
    rm repo/data/tinyshakespeare_bpe_merges.txt
    $prepare > /dev/null 2>&1
    equal "lost merges are made again" "$(cd repo/data && echo *merges.txt)" \
        tinyshakespeare_bpe_merges.txt
    rm -f repo/data/*.bin repo/data/*.bpe && mkdir -p bare
    cp "$mirror/tinyshakespeare.txt" bare/
    says "a mirror without vocabulary" "no gpt2/vocab.bpe.*no GPT-2 tokens" \
        "$(DATA_MIRROR=$PWD/bare $prepare)"
    equal "... makes the learned tokens" "$(cd repo/data && echo tiny*.bin)" \
        "tinyshakespeare_bpe_train.bin tinyshakespeare_bpe_val.bin"
else
    skip "tinyshakespeare" "neither DATA_MIRROR nor data/ has the text"
fi

# The download itself, from a local server. `mode` selects its behaviour: plain (no ranges, like
# python's http.server), range, cut (announces everything, sends half and closes), and cut-range
# (sends at most 1,500,000 bytes, and the rest on request).
cat > server.py << 'END'
import http.server, os, re
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
    def do_GET(self):
        path, mode = "www" + self.path, open("mode").read().strip()
        if not os.path.isfile(path):
            return self.send_error(404)
        body = open(path, "rb").read()
        size, asked = len(body), re.match(r"bytes=(\d+)-$", self.headers.get("Range", ""))
        first = int(asked[1]) if asked and "range" in mode else 0
        if first >= size > 0 and asked:
            self.send_response(416)
            self.send_header("Content-Range", "bytes */%d" % size)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if asked and "range" in mode else 200)
        if asked and "range" in mode:
            self.send_header("Content-Range", "bytes %d-%d/%d" % (first, size - 1, size))
        self.send_header("Content-Length", str(size - first))
        self.end_headers()
        most = {"cut": size // 2, "cut-range": 1500000}.get(mode, size)
        self.wfile.write(body[first:first + most])
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
open("port.new", "w").write(str(server.server_port))
os.rename("port.new", "port")
server.serve_forever()
END
shards=www/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/main
stories=www/datasets/roneneldan/TinyStories/resolve/main
starter=www/datasets/karpathy/llmc-starter-pack/resolve/main
mmlu=www/datasets/cais/mmlu/resolve/main
mkdir -p $shards $stories $starter $mmlu www/gpt-2/encodings/main data/{test,dev}
printf 'One?,1,2,3,4,A\n' > data/test/a_test.csv
printf 'Two?,1,2,3,4,B\n' | tee data/test/b_test.csv > data/dev/a_dev.csv
tar -cf $mmlu/data.tar data
archive_sum=$(sha256sum < $mmlu/data.tar | cut -d' ' -f1)
{ printf '\212\330\064\1\1\0\0\0'; head -c 2000 /dev/zero; } > $starter/hellaswag_val.bin
echo plain > mode
if command -v python3 > /dev/null; then
    python3 server.py > /dev/null 2>&1 &
    server=$!
    for _ in {1..100}; do [ -f port ] || sleep 0.05; done
fi
export no_proxy=127.0.0.1
clients=
for client in curl wget; do
    if [ -f port ] && command -v $client > /dev/null; then clients+=" $client"; else
        skip "download with $client" "no $client, or no python3 to serve"
    fi
done
cp rest_train_000000.bin $shards/edu_fineweb_val_000000.bin
cp rest_train_000002.bin $shards/edu_fineweb_train_000001.bin
cp docs_train.bin $shards/edu_fineweb_train_000002.bin
head -c 90000 digits > $shards/edu_fineweb_train_000003.bin
tools=$(for t in bash env dirname sha256sum cut od wc tr cat mv rm awk grep tar mkdir; do
    command -v $t
done)
served() {
    env -u DATA_MIRROR PATH="$PWD/only" DATA_URL="http://127.0.0.1:$(cat port)" \
        MMLU_SHA256="$archive_sum" $prepare "$@"
}
for client in $clients; do
    rm -rf only && mkdir only
    # shellcheck disable=SC2086  # many paths
    ln -s $tools "$(command -v $client)" only/
    first=repo/data/edu_fineweb_val_000000.bin
    for mode in plain range cut-range resume-plain resume-range complete; do
        rm -f repo/data/edu_*
        case $mode in
            resume*) head -c 1000000 $shards/edu_fineweb_val_000000.bin > $first.part ;;
            complete) cp $shards/edu_fineweb_val_000000.bin $first.part ;;
        esac
        case $mode in complete) echo range ;; *) echo ${mode#resume-} ;; esac > mode
        served fineweb-edu 2 > said 2>&1
        equal "$client, $mode" "$(cd repo/data && cksum edu_*.bin)" "$(cd $shards && cksum \
            edu_fineweb_train_00000[12].bin edu_fineweb_val_000000.bin)"
    done
    equal "$client, prepared twice: nothing to do" "$(served fineweb-edu 2 2>&1)" ""
    echo cut > mode && rm -f repo/data/edu_*
    refuses "$client, cut off" "val_000000.bin: download failed after 2000512 of 4001024 bytes" \
        served fineweb-edu 1
    equal "$client, cut off: no final name" "$(cd repo/data && echo edu_*)" \
        edu_fineweb_val_000000.bin.part
    echo range > mode && served fineweb-edu 1 > /dev/null 2>&1
    equal "$client, cut off, called again" "$(cd repo/data && echo edu_*)" \
        "edu_fineweb_train_000001.bin edu_fineweb_val_000000.bin"
    refuses "$client, wrong bytes" "train_000003.bin: wrong content .whole.$" \
        served fineweb-edu 3
    cp docs_train.bin $shards/edu_fineweb_train_000003.bin
    refuses "$client, 404" "train_000004.bin: download failed" served fineweb-edu 4
    equal "$client, 404: the others are kept" "$(cd repo/data && echo edu_* | wc -w)" 4
    head -c 90000 digits > $shards/edu_fineweb_train_000003.bin
    served hellaswag > said 2>&1
    equal "$client, HellaSwag" \
        "$(cmp repo/data/hellaswag_val.bin $starter/hellaswag_val.bin 2>&1)" ""
    rm -f repo/data/hellaswag_val.bin && cp digits $starter/hellaswag_val.bin
    refuses "$client, HellaSwag, wrong bytes" "val.bin: wrong content .questions.$" \
        served hellaswag
    { printf '\212\330\064\1\1\0\0\0'; head -c 2000 /dev/zero; } > $starter/hellaswag_val.bin
    refuses "$client, stories without vocabulary" "needs GPT-2.s vocab.bpe: .*download failed" \
        served tinystories
    if [ -f "$vocab" ]; then
        cp documents $stories/TinyStoriesV2-GPT4-valid.txt
        cp digits $stories/TinyStoriesV2-GPT4-train.txt
        cp "$vocab" www/gpt-2/encodings/main/vocab.bpe
        served tinystories > said 2>&1
        equal "$client, tinystories" "$(cd repo/data && echo Tiny* tinystories* vocab*) \
$(numbers u2 1024 repo/data/tinystories_gpt2_val_000000.bin)" "TinyStoriesV2-GPT4-train.txt \
TinyStoriesV2-GPT4-valid.txt tinystories_gpt2_train_000000.bin tinystories_gpt2_val_000000.bin \
vocab.bpe 50256 505 50256 11545 27 91 437 1659"
        equal "$client, tinystories twice" "$(served tinystories 2>&1)" ""
        says "$client, MMLU" "data/mmlu_test.bin  2 questions" "$(served mmlu 2>&1)"
        equal "$client, MMLU: the test split" "$(cd repo/data && echo mmlu*) \
$(numbers u2 1024 -N22 repo/data/mmlu_test.bin)" \
            "mmlu_test.bin 65535 44 0 0 4 8 24361 25 1881 30 198"
        equal "$client, MMLU twice" "$(served mmlu 2>&1)" ""
        rm -f repo/data/mmlu*
        archive_sum=0 refuses "$client, MMLU, wrong bytes" "data.tar: wrong content" served mmlu
        rm -f repo/data/Tiny* repo/data/tinystories* repo/data/vocab.bpe \
            www/gpt-2/encodings/main/vocab.bpe
    fi
    mkdir -p www/karpathy/char-rnn/master/data/tinyshakespeare repo/data/kept
    cp text www/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
    mv repo/data/tinyshakespeare* repo/data/kept 2> /dev/null
    says "$client, wrong text" "wrong content.*$made" \
        "$(served 2>&1 | tr '\n' ' ')"
    rm -rf repo/data/kept
done
# dev/report.py: reports of a run made here and of a plan, parsed with the standard library.
cat > read.py << 'END'
import html.parser, json, re, sys, xml.etree.ElementTree
void, svg = {"meta", "br"}, "{http://www.w3.org/2000/svg}"
class Reader(html.parser.HTMLParser):
    """Tags that are open, all that occurred, and the text in them."""
    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], [], {}
    def handle_starttag(self, tag, attributes):
        self.seen += [tag] + [name for name, _ in attributes]
        self.open += [] if tag in void else [tag]
    def handle_startendtag(self, tag, attributes):
        self.seen += [tag] + [name for name, _ in attributes]
    def handle_endtag(self, tag):
        if self.open.pop() != tag:
            sys.exit("</%s> where another tag is open" % tag)
    def handle_data(self, data):
        self.text.setdefault(self.open[-1] if self.open else "", []).append(data)
def page(path):
    reader = Reader()
    reader.feed(open(path, encoding="utf-8").read())
    reader.close()
    if reader.open or {"script", "img", "link", "onerror", "src", "href"} & set(reader.seen):
        sys.exit("open %s, seen %s" % (reader.open, set(reader.seen)))
    return reader.text
def of(what, path, other=None):
    if what == "figures":
        return " ".join(page(path)["dd"])
    if what == "newest":    # the newest sample
        return page(path)["pre"][0]
    if what == "cards":
        cells, cards = " ".join(page(path)["td"]), json.load(open(other))["cards"]
        missing = [row for row in cards if row["gpu"] + " " not in cells or row["tokens_per_s"] and
                   "{:,}".format(row["tokens_per_s"]) not in cells or
                   row["takes"] and row["takes"] not in cells]
        return "every card" if cards and not missing else "missing: %s" % missing
    tree = xml.etree.ElementTree.parse(path)
    titles = [title.text for title in tree.iter(svg + "title")]
    if what == "points":
        planned = [row for row in json.load(open(other))["candidates"]]
        found = {}
        for point in tree.iter(svg + "circle"):
            numbers = re.findall("([0-9][0-9,]*) ", point.find(svg + "title").text)[:3]
            found[tuple(int(text.replace(",", "")) for text in numbers)] = point
        keys = sorted(found)
        named = sorted({(row["device_bytes"], row["tokens_per_s"], row["host_bytes"])
                        for row in planned})
        if keys != named:
            return "%s, planned %s" % (keys, named)
        for axis, place, sign in ((0, "cx", 1), (1, "cy", -1)):
            at = [sign * float(found[key].get(place)) for key in
                  sorted(keys, key=lambda key: key[axis])]
            if at != sorted(at):
                return "%s is not in order" % place
        colours = {key[2]: found[key].get("fill") for key in keys}
        return "every candidate" if len(set(colours.values())) > 2 and all(
            found[key].get("fill") == colours[key[2]] for key in keys) else "colours %s" % colours
    if what == "checks":
        return " ".join(titles)
    drawn = sorted(int(re.search("([0-9,]+) bytes", title)[1].replace(",", "")) for title in titles)
    planned = sorted(row["bytes"] for row in json.load(open(other))["buffers"] if row["bytes"])
    return "every buffer" if drawn == planned else "%s, planned %s" % (drawn, planned)
print(of(*sys.argv[1:]))
END
if command -v python3 > /dev/null; then
    report() { python3 "$root/dev/report.py" "$@"; }
    "$root/train_gpt2" -e l2h2c32t32 -b 2 -x 5 -i rest_train_000000.bin -j rest_train_000002.bin \
        -v 2 -m 1 -s 5 -g 4 --quiet -o run
    logged() { sed -n "s/.*\"$1\":\([0-9.]*\).*/\1/p" run/log.jsonl | while read -r value; do
        printf '%.4f\n' "$value"; done; }
    report run > /dev/null && report run --svg run.svg > /dev/null
    says "report: the log's numbers" \
        "5 of 5 $(logged loss | tail -1) $(logged val_loss | sort -n | head -1) at step" \
        "$(python3 read.py figures run/report.html)"
    says "report: memory of the run" ">Memory over a step: [0-9]" "$(cat run/report.html)"
    (cd run && report . -o ../away.html > /dev/null)  # from there no program finds its data
    says "report: no memory to show" "No program built here plans the bytes of this run" \
        "$(cat away.html)"
    equal "report: validations" "$(python3 read.py checks run.svg)" \
        "$(logged val_loss | paste -d' ' <(printf 'step %d:\n' 2 4 5) - | paste -sd' ')"
    plan="-e d12 -b 4 -r block:5 --offload moments,master --gpu-mem 16GiB --plan --json"
    # shellcheck disable=SC2086  # options are words
    "$root/train_gpt2" $plan > plan.json
    report --plan - --svg plan.svg < plan.json > /dev/null
    equal "report: a plan" "$(python3 read.py buffers plan.svg plan.json)" "every buffer"
    # What fits: a circle for each candidate, at coordinates that increase with its numbers.
    "$root/train_gpt2" --fit all -e d12 --gpu 3070 --json > fit.json
    "$root/train_gpt2" --plan --gpu all -e d36 -b 8 -r none --offload none --json > cards.json
    report --fit - --svg fit.svg < fit.json > /dev/null
    equal "report: what fits" "$(python3 read.py points fit.svg fit.json)" "every candidate"
    report --fit fit.json cards.json -o fit.html > /dev/null
    equal "report: the table of cards" "$(python3 read.py cards fit.html cards.json)" "every card"
    echo '{"query":"fit","model":"<b>","available_bytes":0,"best":null,"candidates":[]}' \
        > none.json
    report --fit none.json --svg none.svg > /dev/null
    says "report: nothing fits" ">Nothing fits.<" "$(cat none.svg)"
    refuses "report: --fit of a plan" "plan.json is not the output of --fit --json or of" \
        report --fit plan.json -o bad
    sed 's/"device_bytes":[0-9]*/"device_bytes":-1/' fit.json > damaged.json
    refuses "report: a damaged candidate" "damaged.json is not the output of --fit" \
        report --fit damaged.json -o bad
    mkfifo pipe
    refuses "report: a FIFO" "cannot read pipe: not a regular file" \
        timeout 20 python3 "$root/dev/report.py" pipe
    printf '%s\n' '{"event":"start"}' '{"step":1,"loss":1,"tokens_per_s":-1,"lr":1e-320}' \
        '{"step":1e17,"loss":1}' > damaged.jsonl
    says "report: a number out of range" "^x.html$" "$(report damaged.jsonl -o x.html 2>&1)"
    sed 's/"first":[0-9]*/"first":0.5/' plan.json > damaged.json
    refuses "report: a damaged plan" "damaged.json is not the output of --plan --json" \
        python3 "$root/dev/report.py" --plan damaged.json
    # What a log may contain: non-finite numbers, markup, control bytes, a truncated last line.
    printf '%s\n%s\n%s' '{"step":6,"loss":null,"grad_norm":null,"lr":1e400,"skipped":1}' \
        '{"step":6,"sample":"</pre></script><script>alert(1)</script>\u0000\u001b[1m&amp;\ud800"}' \
        '{"step":7,"lo' >> run/log.jsonl
    report run > /dev/null && report run --svg run.svg > /dev/null
    equal "report: hostile sample" "$(python3 read.py newest run/report.html)" \
        '</pre></script><script>alert(1)</script>\x00\x1b[1m&amp;\xd800'
    says "report: not finite, skipped" "^l2.* 6 of 5 not finite .* 1 [^ ]*run/step-00000005" \
        "$(python3 read.py figures run/report.html)"
    equal "report: hostile log as SVG" "$(python3 read.py checks run.svg | wc -l)" 1
    echo > broken.jsonl && cat run/log.jsonl >> broken.jsonl
    cp run/report.html before.html
    refuses "report: no space for it" "cannot write run/report.html: File too large" \
        bash -c 'ulimit -f 4; python3 "$1/dev/report.py" run' - "$root"
    equal "report: ... the old page is kept" \
        "$(ls run/*.html*; cmp before.html run/report.html 2>&1)" run/report.html
    refuses "report: no run" "cannot read absent: No such file" report absent -o bad
    refuses "report: a broken line" "broken.jsonl:1: not a JSON object" report broken.jsonl -o bad
    refuses "report: no plan" "digits is not the output of --plan" report --plan digits -o bad
    refuses "report: no tensorboardX" "needs Python's package tensorboardX" \
        python3 -S "$root/dev/report.py" run --tensorboard bad
    refuses "report: no wandb" "needs Python's package wandb" \
        python3 -S "$root/dev/report.py" run --wandb bad
    python3 "$root/dev/report.py" run --watch --port 0 > url &
    watcher=$!
    for _ in {1..100}; do [ -s url ] || sleep 0.05; done
    cat > get.py << 'END'
import sys, urllib.request
asked = urllib.request.Request(sys.argv[1], headers={"Host": sys.argv[2]})
print(urllib.request.urlopen(asked).read().decode())
END
    url=$(cut -d' ' -f 1 url)
    sed -i '$d' run/log.jsonl && echo '{"step":7,"loss":1.25}' >> run/log.jsonl
    says "report: --watch reads again" "<dd>1.2500</dd>" "$(python3 get.py "$url" localhost:1)"
    says "report: --watch serves only this machine" "404" "$(python3 get.py "$url" a.example 2>&1)"
    kill $watcher
    # The notebook: no fault, and each of the seeded ones is found.
    equal "notebook" "$(python3 "$root/dev/check/notebook.py" 2>&1)" ""
    sed -e 's/--fit bits/--fitt bits/; s/"import array/"import (array/; s/-g 60 /--sampels /' \
        -e 's/-e d24 -b/-e d24 -B/; s/make -s/make -s al/; s/--train-bpe/--train-bp/' \
        -e 's/against_torch\.py`/against.py`/; s/"outputs": \[\]/"outputs": [1]/' \
        -e 's/"source": \[/&"","","","",/' "$root/dev/train_gpt2.ipynb" > wrong.ipynb
    python3 "$root/dev/check/notebook.py" wrong.ipynb > said
    for fault in "option --fitt" "option --sampels" "option -B" "option --train-bp " "target al" \
        "line [0-9]+: " "no file dev/bench/against.py" "has outputs" "lines, more than 200"; do
        says "notebook: $fault" "$fault" "$(cat said)"
    done
else
    skip "report.py, the notebook" "no python3"
fi

# make install: the manual page made from --help lists every option, and completion offers options
# and values.
make -s -C "$root" install PROGRAM=train_gpt2 DESTDIR="$PWD/root" PREFIX=/usr > /dev/null
options=$(cd root/usr && bin/train_gpt2 --help | grep -oE '^  (-[a-zA-Z],|   ) --[a-z0-9-]+' |
    grep -o -- '--.*')
page=root/usr/share/man/man1/train_gpt2.1
equal "make install: options of the manual page" "$options" \
    "$(sed 's/\\-/-/g' $page | grep -oE '^(\\fB-.\\fR, )?\\fB--[a-z0-9-]+' | grep -o -- '--.*')"
version=$(root/usr/bin/train_gpt2 --version | sed -n '1s/train_gpt2 //p')
root/usr/bin/train_gpt2 -e l1h1c16t16 -i one_train.bin -t 4 -b 1 -x 1 -o versioned --quiet
equal "one version: manual page, log, README, changelog" \
    "$(sed -n 's/^.TH .*train_gpt2 \(.*\)"/\1/p' $page;
       sed -n 's/.*"version":"\([^"]*\)".*/\1/p' versioned/log.jsonl
       sed -n 's/.*To cite:.*train_gpt2 \([0-9.]*[0-9]\).*/\1/p' "$root/README.md"
       sed -n 's/^## \([0-9.]*\).*/\1/p' "$root/dev/CHANGELOG.md" | head -n 1)" \
    "$(printf '%s\n' "$version" "$version" "$version" "$version")"
if command -v groff > /dev/null; then
    equal "make install: a manual page without warnings" \
        "$(groff -man -ww -Tutf8 $page 2>&1 > /dev/null)" ""
else
    skip "make install: a manual page without warnings" "no groff"
fi
completed=$(. root/usr/share/bash-completion/completions/train_gpt2
    COMP_WORDS=(train_gpt2 --) COMP_CWORD=1 && _train_gpt2 && printf '%s\n' "${COMPREPLY[@]}"
    COMP_WORDS=(train_gpt2 -r mlp -k w) COMP_CWORD=4 && _train_gpt2 && echo "${COMPREPLY[@]}"
    COMP_WORDS=(train_gpt2 --recompute n) COMP_CWORD=2 && _train_gpt2 && echo "${COMPREPLY[@]}")
equal "make install: completion of options and values" "$completed" \
    "$options"$'\n'"wsd"$'\n'"none norm"

equal "no .part file is left" "$(find . -name '*.part')" ""

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
