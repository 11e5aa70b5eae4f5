#!/usr/bin/env bash
# Tests of data/tokenize and data/prepare.sh. Works in a scratch folder with a space in its name
# and leaves data/ as it is. One line a test, last line `N passed, N failed, N skipped`.
set -u
cd "$(dirname "$0")/.." || exit 1
root=$PWD
mkdir -p build
scratch=$(mktemp -d "build/tools test.XXXXXX") || exit 1
trap 'cd "$root" && rm -rf "$scratch"' EXIT
passed=0 failed=0 skipped=0

verdict() {    # verdict NAME STATUS [what was found]
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
        echo "tools  $1  ok"
    else
        failed=$((failed + 1))
        echo "tools  $1  FAILED${3:+: $3}"
    fi
}

# equal NAME FOUND EXPECTED
equal() {
    [ "$2" = "$3" ]
    verdict "$1" $? "found '$2', expected '$3'"
}

# refuses NAME PATTERN COMMAND...: exit status 1, one line on stderr that matches, no shard left.
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

# numbers FORMAT SKIP FILE: what stands in a file after SKIP bytes.
numbers() { od -An -v -t"$1" -j "$2" "${@:3}" | tr -s ' \n' ' ' | sed 's/^ //; s/ $//'; }

cp data/prepare.sh data/tokenize "$scratch" && cd "$scratch" || exit 1
tokenize="./tokenize --bytes"

printf 'Hello, \303\244\377\n' > text
$tokenize -o one --val-fraction 0 text > /dev/null
equal "header" "$(numbers d4 0 -N20 one_train.bin)" "20240520 1 11 257 1"
equal "tokens are bytes" "$(numbers u2 1024 one_train.bin)" \
    "72 101 108 108 111 44 32 195 164 255 10"
equal "no validation with fraction 0" "$(ls one_*)" "one_train.bin"
$tokenize -o two --val-fraction 0.25 text > /dev/null    # 8.25: inside the two bytes of a character
equal "no character is cut" "$(numbers u2 1024 two_val.bin)" "255 10"
head -c 3000000 /dev/zero | tr '\0' 'a' > long
$tokenize -o long long > /dev/null
equal "split at 90 %" "$(numbers d4 8 -N4 long_train.bin)" 2700000
(cat long long; sleep 0.1; cat long) |
    $tokenize -o pipe --val-tokens 5 --shard-tokens 4000000 - > /dev/null
equal "stream in shards" "$(echo pipe_*)" "pipe_train_000000.bin pipe_train_000001.bin \
pipe_train_000002.bin pipe_val_000000.bin"
bytes=$(for f in pipe_val_000000.bin pipe_train_00000?.bin; do numbers u2 1024 "$f"; echo; done |
    tr '\n' ' ' | cksum)
expected=$(cat long long long | numbers u1 0 - | sed 's/$/ /' | tr '\n' ' ' | cksum)
equal "stream comes back whole" "$bytes" "$expected"
: > nothing
refuses "missing input" "cannot open absent: No such file" $tokenize -o bad absent
refuses "empty input" "nothing is empty" $tokenize -o bad nothing
refuses "folder as input" "cannot read \.: Is a directory" $tokenize -o bad .
refuses "all text validates" "nothing is left" $tokenize -o bad --val-tokens 11 text
refuses "no output folder" "cannot create absent/bad_train" $tokenize -o absent/bad text
refuses "fraction of a stream" "needs a file" $tokenize -o bad --val-fraction 0.1 /dev/null
refuses "fraction out of range" "not a number from 0" $tokenize -o bad --val-fraction 1.5 text
refuses "shard of no tokens" "not a whole number from 1" $tokenize -o bad --shard-tokens 0 text
refuses "unknown option" "unknown option '--byte'" ./tokenize --byte -o bad text
refuses "no tokenizer named" "bytes is missing" ./tokenize -o bad text
refuses "leftover shards" "left from an earlier run" $tokenize -o pipe --shard-tokens 4000000 text

if [ "$(id -u)" -eq 0 ] && mkdir full && mount -t tmpfs -o size=64k tmpfs full 2> /dev/null; then
    refuses "full disk" "cannot write full/bad_train.bin.part: No space" $tokenize -o full/bad long
    equal "full disk keeps nothing" "$(ls full)" ""
    umount full
else
    skipped=$((skipped + 1))
    echo "tools  full disk  skipped (cannot mount a small tmpfs)"
fi

# prepare.sh in a repository of its own: the text never leaves this folder, and the net is out of
# reach.
mkdir -p repo/data mirror && mv prepare.sh tokenize repo/data/ && cp text mirror/tinyshakespeare.txt
export http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9
prepare=repo/data/prepare.sh
DATA_MIRROR=$PWD/mirror refuses "mirror with another text" "is not the known text" $prepare
DATA_MIRROR=$PWD/absent refuses "mirror without the text" "holds no tinyshakespeare.txt" $prepare
refuses "unknown corpus" "unknown corpus 'pile'; known: tinyshakespeare" $prepare pile
seq 1000 > repo/train_gpt2.c
[[ $(env -u DATA_MIRROR $prepare) =~ "own sources" ]]
verdict "own sources without mirror and net" $?
equal "own sources: tokens" "$(numbers d4 8 -N4 repo/data/sources_bytes_train.bin)" \
    $(($(cat repo/train_gpt2.c repo/data/prepare.sh | wc -c) * 9 / 10))
mirror=${DATA_MIRROR:-$root/data}
if [ -f "$mirror/tinyshakespeare.txt" ]; then
    DATA_MIRROR=$mirror $prepare > /dev/null
    equal "tinyshakespeare: tokens" "$(numbers d4 8 -N4 repo/data/tinyshakespeare_bytes_train.bin) \
$(numbers d4 8 -N4 repo/data/tinyshakespeare_bytes_val.bin)" "1003854 111540"
    before=$(stat -c %Y.%i repo/data/*.bin)
    equal "prepared twice: nothing to do" "$($prepare)$(stat -c %Y.%i repo/data/*.bin)" "$before"
    truncate -s -2 repo/data/tinyshakespeare_bytes_val.bin
    $prepare > /dev/null
    bytes=$(stat -c %s repo/data/tinyshakespeare_bytes_val.bin)
    equal "damaged shard is made again" "$bytes" 224104
else
    skipped=$((skipped + 1))
    echo "tools  tinyshakespeare  skipped (neither DATA_MIRROR nor data/ has the text)"
fi
equal "no part is left" "$(find . -name '*.part')" ""

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
