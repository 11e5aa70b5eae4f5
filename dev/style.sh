#!/usr/bin/env bash
# Checks the layout and the hygiene of the sources: `make style`, which `make test` runs first.
# One line a check, `style  NAME  ok|FAILED|skipped (why)`, what was wrong below it, and last the
# line `N passed, N failed, N skipped`. Exit status 1 on any failure. CC, CXX, MARCH, OMP come
# from make.
#
# The layout it expects of a volume (train_gpt2.c, train_gpt2.cu, test_gpt2.cu):
#   - the file opens with a // comment that holds the contents, a chapter a line: `//   1  Prelude`
#     (number, two or more spaces, title; two or more spaces and a remark may follow);
#   - every chapter opens with a banner: a line `// ---...` of at least 60 dashes, then
#     `// 1. Prelude`, then one line of prose or more;
#   - numbers go up, titles are those of the contents.
# shellcheck disable=SC2086  # flags are lists of words
set -u
shopt -s lastpipe    # so that `verdict` at the end of a pipe counts in this shell
cd "$(dirname "$0")/.." || exit 1
mkdir -p build
CC=${CC:-gcc} CXX=${CXX:-g++} MARCH=${MARCH--march=native} OMP=${OMP--fopenmp}
passed=0 failed=0 skipped=0
scratch=$(mktemp -d build/style.XXXXXX) || exit 1
trap 'rm -rf "$scratch"' EXIT

ok() { passed=$((passed + 1)) && printf 'style  %-38s ok%s\n' "$1" "${2:+  ($2)}"; }
skip() { skipped=$((skipped + 1)) && printf 'style  %-38s skipped (%s)\n' "$1" "$2"; }
fail() { failed=$((failed + 1)) && printf 'style  %-38s FAILED\n' "$1"; }

# verdict NAME: ok when standard input is empty, else FAILED and the first lines of it.
verdict() {
    local found
    found=$(cat)
    if [ -z "$found" ]; then
        ok "$1"
    else
        fail "$1"
        printf '%s\n' "$found" | head -n 12 | sed 's/^/         /'
        [ "$(printf '%s\n' "$found" | wc -l)" -le 12 ] || echo "         ..."
    fi
}

# builds NAME COMMAND...: ok when the command succeeds; what it says otherwise.
builds() {
    local name=$1
    shift
    if "$@" > "$scratch/out" 2>&1; then
        ok "$name"
    else
        { cat "$scratch/out"; echo "command: $*"; } | verdict "$name"
    fi
}

# --- Layout ---------------------------------------------------------------------------------------

# Contents list against banners.
contents() {
    awk '
        function complain(text) { print FILENAME ":" FNR ": " text }
        FNR == 1 { header = 1 }
        header && !/^\/\// { header = 0 }
        header && /^\/\/ +[0-9]+  +[^ ]/ {
            line = $0
            sub(/^\/\/ +/, "", line)
            number = line + 0
            sub(/^[0-9]+ +/, "", line)
            sub(/   *.*$/, "", line)
            title[++listed] = line
            chapter[listed] = number
            if (listed > 1 && number <= chapter[listed - 1]) {
                complain("contents: " number " after " chapter[listed - 1])
            }
        }
        prose_due {
            if (!/^\/\/ *[^ ]/) { complain("no prose under the banner of chapter " prose_due) }
            prose_due = 0
        }
        dashed {
            dashed = 0
            if (match($0, /^\/\/ [0-9]+\. /)) {
                number = substr($0, 4) + 0
                name = substr($0, RLENGTH + 1)
                banners++
                if (number != chapter[banners]) {
                    complain("banner " number " where the contents have " chapter[banners] + 0)
                } else if (name != title[banners]) {
                    complain("banner \"" name "\" where the contents say \"" title[banners] "\"")
                }
                prose_due = number
            } else {
                complain("a dashed line without `// N. Title` under it")
            }
        }
        !header && /^\/\/ ------------------------------------------------------------*$/ {
            dashed = 1
        }
        END {
            if (!listed) { complain("no contents in the opening comment") }
            if (banners < listed) { complain(listed " chapters listed, " banners + 0 " banners") }
        }' "$1"
}

# Braces always: after if, for, while, do and else stands `{` (or `else if`). Comments, strings and
# preprocessor lines are blanked first, so what is left is scanned as one text.
braces() {
    awk '
        function blank_code(line,    out, i, c, two) {
            out = ""
            for (i = 1; i <= length(line); i++) {
                c = substr(line, i, 1)
                two = substr(line, i, 2)
                if (in_comment) { if (two == "*/") { in_comment = 0; i++ } continue }
                if (quote != "") {
                    if (c == "\\") { i++ } else if (c == quote) { quote = "" }
                    continue
                }
                if (two == "//") { break }
                if (two == "/*") { in_comment = 1; i++; continue }
                if (c == "\"" || (c == "\047" && out !~ /[0-9]$/)) {
                    quote = c
                    out = out "0"
                    continue
                }
                out = out c
            }
            quote = ""
            return out
        }
        function want_brace(word) {
            if (expect != "") { print FILENAME ":" expect_line ": no brace after " expect }
            expect = word
            expect_line = FNR
        }
        {
            directive = continued || /^[ \t]*#/
            continued = directive && /\\$/
            code = blank_code($0)
            if (directive) { next }
            gsub(/[A-Za-z_0-9]+/, " & ", code)
            gsub(/[(){};]/, " & ", code)
            n = split(code, token, " ")
            for (k = 1; k <= n; k++) {
                t = token[k]
                if (expect != "") {
                    if (t == "{" || (expect == "else" && t == "if")) { expect = "" }
                    else if (t == ";" && expect == "while" && after_do) { expect = "" }
                    else { print FILENAME ":" expect_line ": no brace after " expect; expect = "" }
                }
                if (head != "") {                       # inside the parentheses of if, for, while
                    if (t == "(") { depth++ }
                    if (t == ")" && --depth == 0) { want_brace(head); head = "" }
                } else if (t == "if" || t == "for" || t == "while") {
                    head = t
                    depth = 0
                    after_do = (t == "while" && last == "}" && do_at[level + 1])
                } else if (t == "else" || t == "do") {
                    want_brace(t)
                }
                if (t == "{") { level++; do_at[level] = (last == "do") }
                if (t == "}") { level-- }
                last = t
            }
        }' "$1"
}

# A function of more than 100 lines, attention and matmul excepted; main within 60. Top-level
# functions open with a line that starts in column 1 and ends in `{`, and close with `}` in column
# 1.
long_functions() {
    awk '
        /^[a-zA-Z_].*[(]/ && !/;$/ && !/^(struct|enum|typedef|union|else|extern "C")/ {
            start = FNR
            name = $0
            sub(/[(].*/, "", name)
            sub(/.*[ *]/, "", name)
        }
        /^}/ && start {
            limit = name == "main" ? 60 : 100
            if (FNR - start + 1 > limit && name !~ /attention|matmul/) {
                print FILENAME ":" start ": " name " has " FNR - start + 1 " lines of " limit
            }
            start = 0
        }' "$1"
}

# A kernel has a contract: a comment above its template and attribute lines.
contracts() {
    awk '
        /__global__/ && !/^[ \t]*(\/\/|\*|#)/ && !above {
            print FILENAME ":" FNR ": kernel without a contract above it"
        }
        /^[ \t]*(\/\/|\*|\/\*)/ { above = 1; next }
        !/^(template|static|__launch_bounds__|inline)/ { above = 0 }' "$1"
}

volume() {
    local file=$1 limit=$2
    contents "$file" | verdict "$file contents"
    braces "$file" | verdict "$file braces"
    long_functions "$file" | verdict "$file functions"
    grep -q __global__ "$file" && contracts "$file" | verdict "$file contracts"
    lines=$(wc -l < "$file")
    if [ "$lines" -gt "$limit" ]; then echo "$lines lines of $limit"; fi | verdict "$file length"
}

# What the top level may hold; what git ignores or does not know is the user's own.
top_level() {
    local known='train_gpt2\.cu?|test_gpt2\.cu|Makefile|README\.md|LICENSE|data|dev'
    if git rev-parse --is-inside-work-tree > /dev/null 2>&1; then
        git ls-files | cut -d/ -f1 | sort -u | grep -vxE "$known|\.gitignore|\.ci|\.clang-tidy" |
            sed 's/$/: not a file of the top level/'
    fi
}

[ -f train_gpt2.c ] && volume train_gpt2.c 6250
[ -f train_gpt2.cu ] && volume train_gpt2.cu 5500
[ -f test_gpt2.cu ] && volume test_gpt2.cu 4200
for file in dev/test/*.h dev/test/*.cpp; do
    braces "$file" | verdict "$file braces"
    long_functions "$file" | verdict "$file functions"
done
texts=()
for file in train_gpt2.c train_gpt2.cu test_gpt2.cu Makefile .ci/run data/*.c data/*.sh \
            dev/*.c dev/*.cu dev/*.sh dev/*.py dev/fuzz/* dev/test/*; do
    [ -f "$file" ] && texts+=("$file")
done
LC_ALL=C.UTF-8 grep -HnE '^.{101,}' "${texts[@]}" | cut -c1-80 | verdict "100 columns"
grep -Hn '[[:blank:]]$' "${texts[@]}" | verdict "no trailing blanks"
grep -HnP '\t' "${texts[@]}" | grep -v '^Makefile:' | verdict "no tabs"
top_level | verdict "top level"

# --- Compilers and lint ---------------------------------------------------------------------------

# The slow ones start now and are asked at the end.
if [ -f train_gpt2.c ]; then
    defines=(-DGPT2_DOUBLE=0)
    if command -v clang-tidy > /dev/null; then
        clang-tidy --quiet train_gpt2.c -- -std=c11 "${defines[@]}" > "$scratch/tidy" 2> /dev/null &
    fi
    if command -v cppcheck > /dev/null; then
        cppcheck --quiet --std=c11 --language=c --enable=warning,portability --inline-suppr \
            --suppress=missingIncludeSystem --max-configs=1 "${defines[@]}" train_gpt2.c \
            2> "$scratch/cppcheck" > /dev/null &
    fi
fi

warnings="-Wall -Wextra -Wundef -Wvla -Werror"
numbers="-ffp-contract=off -fno-math-errno"
as_c="-x c -std=c11 -Wc++-compat"
as_cpp="-x c++ -std=c++17 -Wno-missing-field-initializers"

# The packed matmul is the one place with contraction: without fused multiply-adds half of the
# machine's peak is gone, and no test of values notices.
fused() {
    local count
    count=$(objdump -d "$2" | grep -c 'vfn*m[a-z]*[0-9]*p[sd]')
    if [ "$count" -ge 8 ]; then
        ok "$1" "$count vfmadd"
    else
        echo "$count packed vfmadd in the object" | verdict "$1"
    fi
}

# compilers NAME C C++: Volume I through one family of compilers.
compilers() {
    if ! command -v "$2" > /dev/null; then
        skip "$1: C11, C++17, FMA" "no $2"
        return
    fi
    local omp=
    echo 'int x;' | "$2" -fopenmp -include omp.h -fsyntax-only -x c - 2> /dev/null && omp=-fopenmp
    builds "$1: C11" "$2" $as_c -O3 $MARCH $numbers ${omp:--Wno-unknown-pragmas} $warnings \
        -c train_gpt2.c -o "$scratch/$1.o"
    if [ "$(uname -m)" != x86_64 ] || ! grep -qw fma /proc/cpuinfo; then
        skip "$1: FMA in the matmul" "not x86-64 with FMA"
    elif [ -f "$scratch/$1.o" ]; then
        fused "$1: FMA in the matmul" "$scratch/$1.o"
    fi
    if [ "$(uname -m)" = x86_64 ]; then
        builds "$1: C11, x86-64 without AVX or OpenMP" "$2" $as_c -O1 -march=x86-64 $numbers \
            -Wno-unknown-pragmas $warnings -c train_gpt2.c -o "$scratch/$1-plain.o"
    fi
    if command -v "$3" > /dev/null; then
        builds "$1: C++17" "$3" $as_cpp $MARCH $omp $warnings -fsyntax-only train_gpt2.c
    else
        skip "$1: C++17" "no $3"
    fi
}

if [ -f train_gpt2.c ]; then
    compilers gcc gcc g++
    compilers clang clang clang++
    builds "in double" "$CC" $as_c $MARCH $OMP $warnings -Wno-unknown-pragmas -DGPT2_DOUBLE=1 \
        -fsyntax-only train_gpt2.c
    if command -v aarch64-linux-gnu-gcc > /dev/null; then
        builds "gcc: C11, aarch64" aarch64-linux-gnu-gcc $as_c -O1 $numbers -fopenmp $warnings \
            -c train_gpt2.c -o "$scratch/aarch64.o"
    else
        skip "gcc: C11, aarch64" "no aarch64-linux-gnu-gcc"
    fi
    for file in data/*.c dev/bench_*.c dev/dump.c dev/fuzz/fuzz.c; do
        [ -f "$file" ] && builds "$file" "$CC" $as_c $MARCH $OMP $warnings -Wno-unknown-pragmas \
            -Wno-unused-function -fsyntax-only "$file"
    done
fi
for file in dev/test/*.cpp; do
    builds "$file" "$CXX" $as_cpp $MARCH $OMP $warnings -Wno-unknown-pragmas -Wno-unused-function \
        -fsyntax-only "$file"
done
if command -v shellcheck > /dev/null; then
    shellcheck -S warning data/*.sh dev/*.sh dev/fuzz/*.sh dev/test/*.sh .ci/run |
        verdict "shellcheck"
else
    skip "shellcheck" "no shellcheck"
fi
wait
for tool in clang-tidy cppcheck; do
    if ! command -v $tool > /dev/null; then
        skip $tool "no $tool"
    elif [ -f "$scratch/${tool#clang-}" ]; then
        grep -E '(error|warning|portability):' "$scratch/${tool#clang-}" | verdict $tool
    fi
done

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
