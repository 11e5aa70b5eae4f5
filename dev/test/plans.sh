#!/usr/bin/env bash
# Compares the plans of another build of the CPU program with those of ./train_gpt2, byte for byte:
# the output of --plan and of --plan --json, the message of a refusal, and the exit status.
#
#   dev/test/plans.sh build/plan_32        a build with 32-bit pointers
#   dev/test/plans.sh build/plan.html      the page, its form filled in by headless Chromium
#
# The settings are drawn at random; SEED=N draws others, and a failure names the seed. Last line `N
# passed, N failed, N skipped`.
set -u
cd "$(dirname "$0")/../.." || exit 1
program=$PWD/${1?}
scratch=$(mktemp -d build/plans.XXXXXX) || exit 1
trap 'rm -rf "$scratch"' EXIT
. dev/test/verdicts.sh plans
SEED=${SEED-1}
DRAWS=${DRAWS-40}

# draws: prints the options of one plan per line. Most of the drawn combinations are valid.
draws() {
    awk -v seed="$SEED" -v count=$DRAWS '
    function pick(list,  n, word) { n = split(list, word, " "); return word[1 + int(rand() * n)] }
    function maybe(share, text) { return rand() < share ? " " text : "" }
    BEGIN {
        srand(seed)
        for (i = 0; i < count; i++) {
            model = pick("gpt2 d24 gpt2-large gpt2-xl gpt2-xl shape")
            if (model == "shape") {
                head = pick("16 32 64 80 128")
                heads = 1 + int(rand() * 40)
                model = "l" (1 + int(rand() * 96)) "h" heads "c" head * heads "t" \
                    pick("128 1000 1024 4096")
            }
            batch = pick("1 2 3 4 8 12 16 32")
            card = pick("t4 4060ti 4090 a100 h100 any any")
            line = "-e " model " -b " batch maybe(0.3, "-t " pick("64 100 128"))
            line = line (card == "any" ? " --gpu-mem " pick("2.5GiB 12GiB 15.5GiB 40GiB 300GiB") \
                : " --gpu " card)
            many = rand() < 0.3
            if (many) {
                line = line " --gpus " pick("2 3 8 64") " -z " pick("0 1 2 3")
            }
            line = line maybe(0.2, "--dtype " pick("fp16 fp32 bf16")) \
                maybe(0.3, "--moments bf16") maybe(0.2, "-w none") \
                maybe(0.2, "--grad-dtype fp32") maybe(0.2, "--logit-rows " pick("64 128 1000")) \
                maybe(0.2, "--workspace " pick("256 16MiB 300MiB")) \
                maybe(0.4, "-r " pick("none gelu norm mlp qkv block block:1 qkv:1,gelu")) \
                maybe(0.3, "--offload " pick(many ? "none moments master,moments residuals" : \
                    "none moments gradients weights,gradients,moments,residuals"))
            print line
        }
    }'
}

# The other questions: options of the form | question of the page | options that ask it. With
# --dtype, --minimum leaves out the CPU program, whose workspace depends on the width of vectors.
questions='-e gpt2-xl --gpu 4090|fit|--fit any
-e d24 --gpu 3080 -d 65536|all|--fit all
-e gpt2-xl|cards|--plan --gpu all
-e d36 --gpu 4070|batch|--largest batch
-e d36 --gpu 4070 -b 2|length|--largest seq-len
-e gpt2-xl --dtype bf16|minimum|--minimum'

# The native program runs in a folder without data, which its printed commands would name.
mkdir "$scratch/bare" && cp train_gpt2 "$scratch/bare" || exit 1
native() { (cd "$scratch/bare" && exec ./train_gpt2 "$@"); }

# answer FILE COMMAND...: writes the command's output and exit status to FILE.
answer() {
    "${@:2}" > "$1" 2>&1
    echo "status $?" >> "$1"
}

# compare_program: compares plan by plan. Both programs run as ./train_gpt2, so that the commands
# they print are equal.
compare_program() {
    local how differ='' options question
    mkdir "$scratch/other bare" && cp "$program" "$scratch/other bare/train_gpt2"
    other() { (cd "$scratch/other bare" && exec ./train_gpt2 "$@"); }
    while read -r -a options; do
        for how in --plan "--plan --json"; do
            # shellcheck disable=SC2086  # two words
            answer "$scratch/native" native "${options[@]}" $how
            # shellcheck disable=SC2086
            answer "$scratch/other" other "${options[@]}" $how
            cmp -s "$scratch"/{native,other} || differ+="; ${options[*]} $how: $(
                diff "$scratch"/{native,other} | sed -n 2p)"
        done
    done < "$scratch/draws"
    [ -z "$differ" ]
    verdict "$DRAWS drawn plans equal those of ${program##*/}" $? "SEED=$SEED${differ:0:1000}"
    differ=
    while IFS='|' read -r options _ question; do
        for how in "" --json; do
            # shellcheck disable=SC2086  # words
            answer "$scratch/native" native $options $question $how
            # shellcheck disable=SC2086
            answer "$scratch/other" other $options $question $how
            cmp -s "$scratch"/{native,other} || differ+="; $options $question $how"
        done
    done <<< "$questions"
    [ -z "$differ" ]
    verdict "--fit, --gpu all, --largest and --minimum too" $? "$differ"
}

# Functions for the page's scripts: fill() sets the form's fields from a line of options, answer()
# waits for the page's answer and returns it, or the error message that is shown.
helpers='
const $ = id => document.getElementById(id);
const answer = async () => {
  const said = () => [...document.querySelectorAll(".error:not([hidden])")][0];
  await new Promise(done => setTimeout(done));
  while ($("answers").getAttribute("aria-busy") === "true") {
    await new Promise(done => setTimeout(done, 5));
  }
  return said() ? said().textContent + "\n" : $("text").textContent;
};
await answer();  // the form is there by now
const type = (id, value) => {
  $(id).value = value;
  $(id).dispatchEvent(new Event("input", { bubbles: true }));
};
const ask = name => document.querySelector(`[name=question][value=${name}]`).click();
const fields = [...document.querySelectorAll("[data-option]")];
const blank = new Map(fields.map(field => [field, field.tagName === "SELECT" &&
  tables.options.find(row => row.name === field.dataset.option).value || ""]));
const fill = line => {
  for (const [field, value] of blank) field.value = value;
  const words = line.split(" ");
  for (let i = 0; i < words.length; i += 2) {
    const row = tables.options.find(row => [`--${row.name}`, `-${row.letter}`].includes(words[i]));
    type("option-" + row.name, words[i + 1]);
  }
};
'

# browse WIDTHxHEIGHT SCRIPT: runs the script in the page and prints what it returns.
browse() {
    timeout 120 node dev/test/chromium.js "$program#-e d12 --gpu t4" "$1" "$helpers $2"
}

# compare_page: all plans in one browser session. The page answers --plan --json for each and --plan
# for every fourth; the command line that it offers must print the same.
compare_page() {
    local command n=0
    browse 1200x900 "let out = '';
        for (const [i, line] of \`$(< "$scratch/draws")\`.split('\\n').entries()) {
          ask('json');
          fill(line);
          out += await answer();
          out += '\$ ' + \$('plan').textContent + '\\n';
          if (i % 4 === 0) { ask('plan'); out += await answer(); }
        }
        return out;" > "$scratch/page" 2> "$scratch/log"
    while read -r -a options; do
        native "${options[@]}" --plan --json 2>&1
        echo '$'
        [ $((n++ % 4)) -ne 0 ] || native "${options[@]}" --plan 2>&1
    done < "$scratch/draws" > "$scratch/native"
    sed 's/^\$ .*/$/' "$scratch/page" | cmp -s - "$scratch/native"
    verdict "$DRAWS drawn plans of the page equal the program's" $? "SEED=$SEED: $(
        sed 's/^\$ .*/$/' "$scratch/page" | diff "$scratch/native" - | head -c 600) $(
        head -c 300 "$scratch/log")"
    grep '^\$ ' "$scratch/page" | while read -r _ command; do
        (cd "$scratch/bare" && eval "$command" 2>&1)
        echo '$'
    done > "$scratch/commands"
    while read -r -a options; do
        native "${options[@]}" --plan --json 2>&1
        echo '$'
    done < "$scratch/draws" | cmp -s - "$scratch/commands"
    verdict "the command lines of the page print the same" $?
}

# compare_questions: the page's other questions.
compare_questions() {
    local options question
    while IFS='|' read -r options _ question; do
        # shellcheck disable=SC2086  # words
        native $options $question 2>&1
    done <<< "$questions" > "$scratch/native"
    browse 1200x900 "let out = '';
        for (const line of \`$questions\`.split('\\n')) {
          const [options, question] = line.split('|');
          fill(options);
          ask(question);
          out += await answer();
        }
        return out;" > "$scratch/page" 2> "$scratch/log"
    cmp -s "$scratch/native" "$scratch/page"
    verdict "the page's other questions print the same" $? "$(
        diff "$scratch/native" "$scratch/page" | head -c 600) $(head -c 300 "$scratch/log")"
}

# The form's behaviour, apart from numbers.
test_form() {
    local found expected
    found=$(browse 1200x900 "type('option-gpu', 'h1000');
        await answer();
        return \$('error-gpu').textContent + \$('option-gpu').getAttribute('aria-invalid');")
    expected=$(native --plan -e d12 --gpu h1000 2>&1)
    [ "$found" = "${expected}true" ]
    verdict "a message is shown under its field" $? "'$found', not '$expected'"
    found=$(browse 1200x900 "
        const reached = [];
        for (let i = 0; i < 80 && !reached.includes('plan'); i++) {
          await press('Tab');
          const at = document.activeElement;
          reached.push(at.dataset.option || at.dataset.copy || at.value || at.id);
          if (at.id === 'option-batch') await press('6');
        }
        await answer();
        for (let i = 0; i < 2; i++) await press('Tab');
        await press('ArrowRight');
        await answer();
        const missing = fields.filter(field => !reached.includes(field.dataset.option));
        document.querySelector('#picture svg').focus();
        await press('ArrowRight');
        return missing.length + ' ' + \$('plan').textContent + ' ' +
          \$('text').textContent.split(':')[0] + ' ' +
          / bytes, in use from embed to update/.test(\$('named').textContent);")
    expected="0 ./train_gpt2 -e d12 -b 6 --fit any --gpu t4 d12 true"
    [ "$found" = "$expected" ]
    verdict "the page works by keyboard" $? "'$found', not '$expected'"
    found=$(browse 360x740 'return document.scrollingElement.scrollWidth;')
    [ "$found" -le 360 ]
    verdict "the page fits a narrow screen" $? "$found pixels"
    found=$(stat -c %s "$program")
    [ "$found" -le 700000 ]
    verdict "the page has at most 700 KB" $? "$found bytes"
}

draws > "$scratch/draws"
planned=0 large=0
while read -r -a options; do
    native "${options[@]}" --plan --json > "$scratch/native" 2>&1
    ! grep -q '^{"target":"gpu"' "$scratch/native" || planned=$((planned + 1))
    ! grep -Eq '"bytes":[0-9]{10}' "$scratch/native" || large=$((large + 1))
done < "$scratch/draws"
[ $planned -ge $((DRAWS * 3 / 4)) ] && [ $large -ge 5 ]
verdict "most drawn settings are valid, some have buffers of 1 GB or more" $? \
    "SEED=$SEED: $planned plans, $large with such buffers"
case $program in
    *.html) compare_page; compare_questions; test_form ;;
    *) compare_program ;;
esac
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
