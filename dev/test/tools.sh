#!/usr/bin/env bash
# Tests of dev/report.py, the notebook and make install. Works in a scratch folder with a space in
# its name. One line per test, last line `N passed, N failed, N skipped`.
set -u
cd "$(dirname "$0")/../.." || exit 1
root=$PWD
mkdir -p build
scratch=$(mktemp -d "build/tools test.XXXXXX") || exit 1
trap 'cd "$root" && rm -rf "$scratch"' EXIT
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

cp data/tokenize "$scratch" && cd "$scratch" || exit 1
seq 700000 > digits
./tokenize --bytes --val-fraction 0 --shard-tokens 2000000 -o rest digits > /dev/null
seq 99 > text
./tokenize --bytes --val-fraction 0 -o one text > /dev/null

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
