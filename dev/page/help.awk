# Turns the text that `train_gpt2 --help` prints from its option table into a manual page or a bash
# completion script. `make install` uses it:
#
#   train_gpt2 --help all | awk -v to=man|bash -v name=train_gpt2 -v version="train_gpt2 1.0" \
#       -f dev/page/help.awk
#
# Input: `usage: ...` and a paragraph; then sections, each a title and its options. An option is
# `  -l, --name  text` and continues in column 27. The words of `[one|two; default]` are values of
# the option. Without `(flag)` an option takes a value.

function escape(text) {
    gsub(/\\/, "\\e", text)
    gsub(/-/, "\\-", text)
    return text ~ /^[.']/ ? "\\&" text : text
}

# Prints the option that has been read, if any.
function finish(  words) {
    if (option == "") {
        return
    }
    if (to == "man") {
        printf ".TP\n%s\\fB%s\\fR%s\n%s", letter == "" ? "" : "\\fB" escape(letter) "\\fR, ",
            escape(option), flag ? "" : " \\fIvalue\\fR", page
    } else {
        words = ""
        if (match(text, /\[[^][]*\|[^][]*\]/)) {
            words = substr(text, RSTART + 1, RLENGTH - 2)
            sub(/;.*/, "", words)
            gsub(/=[^|]*/, "", words)
            gsub(/\|/, " ", words)
        }
        if (option == "--gpu") {
            words = text
            sub(/.*one line per model/, "all", words)
        }
        if (option == "--model") {
            words = "d12 d24 d36 d48 gpt2 gpt2-medium gpt2-large gpt2-xl"
        }
        options = options " " option
        if (words != "") {
            values = values sprintf("        %s%s)\n            words=\"%s\" ;;\n",
                letter == "" ? "" : letter "|", option, words)
        }
    }
    option = ""
}

/^usage:/ { next }
{ blank = empty; empty = $0 == "" }
blank && /^[A-Z][^.:]*$/ {
    finish()
    if (to == "man" && !sections++) {
        printf ".TH %s 1 \"\" \"%s\"\n.SH NAME\n" \
            "%s \\- trains GPT-2 within a memory plan\n.SH SYNOPSIS\n" \
            ".B %s\n[\\fIoption\\fR ...]\n.SH DESCRIPTION\n%s.SH OPTIONS\n",
            toupper(name), version, name, name, intro
    }
    if (to == "man") {
        print ".SS " $0
    }
    next
}
/^  (-[a-zA-Z],|   ) --/ {
    finish()
    letter = $1 ~ /^--/ ? "" : substr($1, 1, 2)
    option = letter == "" ? $1 : $2
    page = text = ""
    flag = 0
    $0 = substr($0, 27)
}
option == "" { intro = intro ($0 == "" ? "" : escape($0) "\n"); next }
{
    sub(/^ +/, "")
    flag = flag || / ?\(flag\)$/
    sub(/ ?\(flag\)$/, "")
    text = text " " $0
    page = page ($0 == "" ? "" : escape($0) "\n")
}
END {
    finish()
    if (to == "bash") {
        printf "# bash completion of %s, made by `make install` from --help\n_%s() {\n" \
            "    local word=${COMP_WORDS[COMP_CWORD]} words=\n" \
            "    case ${COMP_WORDS[COMP_CWORD - 1]} in\n%s    esac\n" \
            "    [[ $word != -* ]] || words=\"%s\"\n" \
            "    COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))\n}\n" \
            "complete -o default -F _%s %s\n", name, name, values, substr(options, 2), name, name
    }
}
