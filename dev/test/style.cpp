// style.cpp -- layout and proportions of the sources, measured: the first half of `make style`.
//
// What it is: rules of this project that no compiler knows. A source is read once: comments,
// strings and directives are told from code, functions are found by the depth of braces. Then each
// rule walks over every file. One line a rule, what was wrong below it, and last the line
// `N passed, N failed, N skipped`; exit status 1 on any failure. Every rule is first seen to fail
// on a small source with one planted fault.
//
// What it refuses to be: a compiler or a formatter. No macro is expanded, and of #if and #else each
// branch is read as if it stood alone.
//
// Build:  make build/test/style
// Run:    build/test/style             from the top of the repository
//         build/test/style FILE...     the functions found in these files: line, lines, parameters
//
// The layout it expects of a file with a contents list:
//   - the file opens with a // comment that holds a line `// Contents` and below it the chapters,
//     one a line: `//   1  Prelude` (number, two or more spaces, title; then two or more spaces and
//     a remark may follow), and parts, where there are any: `// Part A. Ground`;
//   - a chapter opens with a banner: a blank line, a line of dashes to column 100,
//     `// 1. Prelude`, one line of prose or more; a part with a line of = and `// Part A. Ground`;
//   - numbers go up; banners have the numbers, titles and order of the contents.
// A file without a contents list has banners without numbers.
//
// Contents
//   1  Bounds
//   2  Reading a source
//   3  Functions
//   4  Layout
//   5  Code
//   6  Citations and proportions
//   7  Planted faults
//   8  Report and main

#include <ctype.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

typedef std::string Text;

// -------------------------------------------------------------------------------------------------
// 1. Bounds
// Every figure that a rule compares with. Where a file misses the goal, its own figure is the
// bound, so that it can only become better: whoever betters it moves the bound. The goals: 14 % of
// comment lines in the volumes and the appendix, and no function over CONTRACT_OVER lines without a
// contract there.

enum {
    COLUMNS = 100,
    FUNCTION_LINES = 60,   // about a screen
    PARAMETERS = 6,
    CONTRACT_OVER = 11,    // lines; a shorter function may explain itself
    README_WORDS = 750,    // outside code blocks and tables
    SHOWN = 12             // places that a failed rule prints
};

// Files of one glob pattern. The first row that matches a file rules it. -1 of `bare`: no bound.
struct Bound {
    const char *files;
    bool contents;           // a contents list must be there
    int lines;               // at most; 0: no bound
    double comments;         // lines that are comment alone, percent at least; 0: reported
    int bare;                // functions over CONTRACT_OVER lines without a contract, at most
};
static const Bound bounds[] = {
    {"train_gpt2.c", true, 7000, 14.0, 3},
    {"data/formats.c", true, 1900, 11.0, 8},
    {"data/machine.c", true, 2400, 14.0, 3},
    {"data/model_files.c", true, 1900, 10.0, 3},
    {"data/fit.c", true, 2000, 14.0, 3},
    {"train_gpt2.cu", true, 6500, 17.0, 5},
    {"test_gpt2.cu", true, 6500, 0, -1},
    {"Makefile", false, 220, 0, -1},
    {".ci/run", false, 0, 0, -1},
    {"data/*.c", false, 0, 0, -1},
    {"data/*.sh", false, 0, 0, -1},
    {"dev/cuda_cpu/cuda_runtime.h", false, 0, 0, -1},
    {"dev/cuda_cpu/launch.h", false, 0, 0, -1},
    {"dev/cuda_cpu/*.h", true, 0, 14.0, -1},
    {"dev/cuda_cpu/*.cpp", true, 0, 0, -1},
    {"dev/cuda_cpu/*.cu", false, 0, 0, -1},
    {"dev/cuda_cpu/*.sh", false, 0, 0, -1},
    {"dev/fuzz/*.*", false, 0, 0, -1},
    {"dev/slurm/*.sh", false, 0, 0, -1},
    {"dev/test/*.*", false, 0, 0, -1},
    {"dev/*.*", false, 0, 0, -1},
    {"*.md", false, 0, 0, -1},
    {"data/*.md", false, 0, 0, -1},
    {"dev/notes/*.md", false, 0, 0, -1},
    {"dev/*/*.md", false, 0, 0, -1},
};

// Functions that may exceed FUNCTION_LINES or PARAMETERS, and how far (0: not at all). A row that
// no function needs fails, so the list can only become shorter. A name may have its file before it.
struct Exception {
    const char *name;
    int lines, parameters;
    const char *why;
};
#define ONE_LOOP "one loop over tiles; its stages are numbered in the contract"
#define NVIDIAS "the interface is NVIDIA's"
#define TO_DIVIDE "to be divided"
static const Exception exceptions[] = {
    {"attention_forward_kernel", 100, 0, ONE_LOOP},
    {"attention_backward_dq_kernel", 105, 0, ONE_LOOP},
    {"attention_backward_dkv_kernel", 90, 0, ONE_LOOP},
    {"classifier_kernel", 70, 0, "forward and backward of a row that stays in registers"},
    {"layernorm_forward_kernel", 65, 0, "one row in registers from first to last"},
    {"layernorm_backward_kernel", 80, 0, "one loop over rows whose sums stay in registers"},
    {"planted_faults", 90, 0, "a table"},
    {"cublasLtMatmul", 0, 16, NVIDIAS},
    {"cublasLtMatmulAlgoGetHeuristic", 0, 10, NVIDIAS},
    {"ncclAllReduce", 0, 7, NVIDIAS},
    {"ncclReduceScatter", 0, 7, NVIDIAS},
    {"ncclBroadcast", 0, 7, NVIDIAS},
    {"adamw_update", 0, 7, "tensor maths"},
    {"launch_at", 0, 9, "what <<<>>> takes, and the place in the source"},
    {"dev/bench_files.c:main", 75, 0, TO_DIVIDE},
    {"check_adamw", 86, 0, TO_DIVIDE},
    {"run_product", 0, 7, TO_DIVIDE},
    {"launch_kernel", 0, 7, TO_DIVIDE},
};

// Chapters of tensor maths: their functions take every tensor and every size as a parameter, as
// kernels and launchers do.
static const char *const tensor_chapters[] = {
    "Matmul and fast maths",
    "Layers",
    "GELU and bias",
    "Matmul",
    "Flash attention forward",
    "Layers against naive twins",
};

// -------------------------------------------------------------------------------------------------
// 2. Reading a source
// `code` is the text with comments, the insides of strings and directives replaced by spaces, line
// for line and column for column.

struct Function {
    Text name, chapter;
    int first, last;         // lines, from the first word of the declaration to the closing brace
    int parameters;
    bool kernel, launcher;   // __global__; gpu_* with a parameter `stream`
    bool contract;           // a comment directly above
    int lines() const { return last - first + 1; }
};

struct Heading {             // an entry of the contents, or a banner
    Text label, title;       // `3. Options` or `Part A. Ground`; the title alone
    int line;
};

struct Token {               // a word, one other character, or a directive: `#if`
    Text text;
    int line;
};

struct Source {
    Text path;
    const Bound *bound = nullptr;
    bool c_family = false;   // C, C++ or CUDA: else only its text is looked at
    std::vector<Text> lines;        // the line numbered n is lines[n - 1]
    std::vector<Text> comments;     // what each line holds of comments, without // and /*
    std::vector<Text> directives;   // "#if", "#else", ... on the first line of one
    std::vector<bool> comment_only, directive;  // the whole line is comment; is part of a directive
    bool final_newline = true;
    std::vector<Token> tokens;
    std::vector<Function> functions;
    std::vector<Heading> contents, banners;
    int contents_line = 0;
};

static bool starts(const Text &text, const char *with) {
    return text.compare(0, strlen(with), with) == 0;
}

static bool ends(const Text &text, const char *with) {
    size_t n = strlen(with);
    return text.size() >= n && text.compare(text.size() - n, n, with) == 0;
}

static bool word_char(char c) { return isalnum((unsigned char)c) || c == '_'; }

static Text trimmed(const Text &text) {
    size_t begin = text.find_first_not_of(" \t"), end = text.find_last_not_of(" \t");
    return begin == Text::npos ? "" : text.substr(begin, end - begin + 1);
}

// Where the string or character constant that opens at `at` ends (behind its closing quote).
static size_t literal_end(const Text &text, size_t at) {
    char quote = text[at];
    if (quote == '"' && at > 0 && text[at - 1] == 'R' && (at < 2 || !word_char(text[at - 2]))) {
        size_t open = text.find('(', at);
        Text close = ")" + text.substr(at + 1, open - at - 1) + "\"";
        size_t end = text.find(close, open);
        return end == Text::npos ? text.size() : end + close.size();
    }
    for (at++; at < text.size() && text[at] != quote && text[at] != '\n'; at++) {
        at += text[at] == '\\';
    }
    return std::min(at + 1, text.size());
}

// Divides a text into code, comments and directives. Returns the code, of the text's own length.
static Text source_divide(Source *s, const Text &text) {
    Text code(text.size(), ' ');
    std::vector<bool> has_comment(s->lines.size(), false), has_code(s->lines.size(), false);
    bool in_directive = false;
    size_t line = 0, end;
    for (size_t i = 0; i < text.size(); i = end) {
        end = i + 1;
        if (text[i] == '\n') {
            in_directive &= i > 0 && text[i - 1] == '\\';
            code[i] = '\n';
            line++;
            continue;
        }
        if (text[i] == '#' && !has_code[line] && !in_directive) {
            size_t word = text.find_first_not_of(" \t", i + 1);
            in_directive = true;
            while (word < text.size() && islower((unsigned char)text[word])) {
                s->directives[line] += text[word++];
            }
        }
        s->directive[line] = s->directive[line] || in_directive;
        bool block = text.compare(i, 2, "/*") == 0;
        if (block || text.compare(i, 2, "//") == 0) {
            end = block ? text.find("*/", i + 2) : text.find('\n', i);
            end = end == Text::npos ? text.size() : end + 2 * block;
            for (size_t k = i; k < end; k++) {
                has_comment[line] = true;
                if (text[k] == '\n') {
                    code[k] = '\n';
                    line++;
                } else if (k >= i + 2) {
                    s->comments[line] += text[k];
                }
            }
            continue;
        }
        if (text[i] == ' ' || text[i] == '\t') {
            continue;
        }
        has_code[line] = true;
        bool literal = text[i] == '"' || (text[i] == '\'' && (i == 0 || !word_char(text[i - 1])));
        if (literal) {
            end = literal_end(text, i);
            for (size_t k = i; k < end; k++) {
                if (text[k] == '\n') {
                    code[k] = '\n';
                    has_code[++line] = true;
                }
            }
        }
        if (!in_directive) {
            code[i] = literal ? '"' : text[i];
        }
    }
    for (size_t n = 0; n < s->lines.size(); n++) {
        s->comment_only[n] = has_comment[n] && !has_code[n];
    }
    return code;
}

// Words, other characters and directives in order, each with its line.
static void source_tokens(Source *s, const Text &code) {
    size_t line = 0;
    bool line_begins = true;
    for (size_t i = 0; i < code.size(); i++) {
        if (line_begins && line < s->directives.size() && !s->directives[line].empty()) {
            s->tokens.push_back({"#" + s->directives[line], (int)line + 1});
        }
        line_begins = code[i] == '\n';
        line += line_begins;
        if (isspace((unsigned char)code[i])) {
            continue;
        }
        size_t end = i + 1;
        while (word_char(code[i]) && end < code.size() && word_char(code[end])) {
            end++;
        }
        s->tokens.push_back({code.substr(i, end - i), (int)line + 1});
        i = end - 1;
    }
}

static void source_functions(Source *s);
static void source_headings(Source *s);

// A source from its text; the rules read nothing else.
static Source source_read(const Text &path, const Text &text, const Bound *bound) {
    Source s;
    s.path = path;
    s.bound = bound;
    for (const char *suffix : {".c", ".cu", ".cpp", ".h"}) {
        s.c_family |= ends(path, suffix);
    }
    std::istringstream stream(text);
    for (Text line; std::getline(stream, line);) {
        s.lines.push_back(line);
    }
    s.final_newline = ends(text, "\n") && !ends(text, "\n\n");
    s.comments.resize(s.lines.size());
    s.directives.resize(s.lines.size());
    s.comment_only.resize(s.lines.size());
    s.directive.resize(s.lines.size());
    if (!s.c_family) {
        s.comments = s.lines;    // for citations, which may be anywhere
    } else {
        source_tokens(&s, source_divide(&s, text));
        source_headings(&s);
        source_functions(&s);
    }
    return s;
}

// -------------------------------------------------------------------------------------------------
// 3. Functions
// Found where a `{` opens at the level of a file, a namespace or a struct, behind a parenthesis
// that follows a name. Templates, attributes and launch bounds come before the name.

// Behind the group that opens at token `at` with ( or <, or `end`.
static size_t group_end(const std::vector<Token> &t, size_t at, size_t end) {
    const bool angle = t[at].text == "<";
    int parentheses = 0, angles = 0;
    for (; at < end; at++) {
        const Text &x = t[at].text;
        parentheses += (x == "(") - (x == ")");
        angles += angle && parentheses == 0 ? (x == "<") - (x == ">") : 0;
        if (parentheses == 0 && angles == 0) {
            return at + 1;
        }
    }
    return end;
}

// How many parameters stand between the parentheses open and close - 1.
static int parameter_count(const std::vector<Token> &t, size_t open, size_t close) {
    if (close == open + 2 || (close == open + 3 && t[open + 1].text == "void")) {
        return 0;
    }
    int count = 1, depth = 0;
    for (size_t i = open + 1; i + 1 < close; i++) {
        const Text &x = t[i].text;
        depth += (x == "(" || x == "[" || x == "{" || x == "<") -
                 (x == ")" || x == "]" || x == "}" || x == ">");
        count += depth == 0 && x == ",";
    }
    return count;
}

// Is tokens [begin, end), what stands before a `{`, the head of a function? Then its name and
// parameters go to `f`.
static bool function_head(const std::vector<Token> &t, size_t begin, size_t end, Function *f) {
    static const std::set<Text> no_names = {
        "__attribute__", "alignas", "__launch_bounds__", "decltype", "noexcept", "sizeof",
        "__align__", "__declspec", "asm", "static_assert", "if", "for", "while", "switch"};
    static const std::set<Text> behind = {"const", "noexcept", "override", "final", "mutable",
                                          "volatile", "try"};
    for (size_t i = begin; i < end; i++) {
        const Text &x = t[i].text;
        if (x == "=" || (x == "enum" && i + 1 < end && t[i + 1].text != "class")) {
            return false;
        }
        size_t open = i + 1, close;
        if (x == "operator") {
            f->name = x;
            do {
                f->name += t[open++].text;
            } while (open < end && t[open].text != "(");
        } else if (word_char(x[0])) {
            f->name = x;
            if (open < end && t[open].text == "<") {
                size_t after = group_end(t, open, end);
                if (x == "template" || after >= end || t[after].text != "(") {
                    i = after - 1;
                    continue;
                }
                open = after;    // a specialisation: name<type>(...)
            }
        }
        if (!(word_char(x[0])) || open >= end || t[open].text != "(") {
            continue;
        }
        close = group_end(t, open, end);
        const bool head = close == end || !word_char(t[close].text[0]) ||
                          behind.count(t[close].text) > 0;
        if (!head || no_names.count(x)) {
            i = close - 1;
            continue;
        }
        f->parameters = parameter_count(t, open, close);
        f->launcher = starts(f->name, "gpu_") && t[close - 2].text == "stream";
        for (size_t k = begin; k < i; k++) {
            f->kernel |= t[k].text == "__global__";
        }
        return true;
    }
    return false;
}

// What a brace holds.
enum Scope { SCOPE_OPEN, SCOPE_FUNCTION, SCOPE_OTHER };  // OPEN: namespace or struct

// What the brace at token `end` opens, from the declaration before it.
static Scope scope_of(const std::vector<Token> &t, size_t begin, size_t end, Function *f) {
    if (function_head(t, begin, end, f)) {
        return SCOPE_FUNCTION;
    }
    for (size_t i = begin; i < end; i++) {
        const Text &x = t[i].text;
        if (x == "enum" || x == "=") {
            return SCOPE_OTHER;
        }
        if (x == "namespace" || x == "struct" || x == "class" || x == "union" || x == "extern") {
            return SCOPE_OPEN;
        }
    }
    return SCOPE_OTHER;
}

// A function's comment stands directly above it; directives may stand between.
static bool has_contract(const Source &s, int first) {
    int n = first - 1;
    while (n > 0 && s.directive[n - 1]) {
        n--;
    }
    return n > 0 && s.comment_only[n - 1];
}

struct Scan {              // where the search for functions stands
    std::vector<Scope> scopes;
    size_t begin;          // first token of the declaration
    int parentheses;
};

// Each branch of an #if begins where the #if stood. A directive between declarations belongs to
// none of them.
static void scan_directive(const Text &x, size_t i, std::vector<Scan> *at_if, Scan *now) {
    const bool branch = starts(x, "#el") && !at_if->empty();
    if (branch) {
        *now = at_if->back();
    }
    if (now->parentheses == 0 && (branch || now->begin == i)) {
        now->begin = i + 1;
    }
    if (starts(x, "#if")) {
        at_if->push_back(*now);
    } else if (x == "#endif" && !at_if->empty()) {
        at_if->pop_back();
    }
}

static void function_ends(Source *s, Function f, int line) {
    f.last = line;
    f.contract = has_contract(*s, f.first);
    for (const Heading &banner : s->banners) {
        f.chapter = banner.line < f.first ? banner.title : f.chapter;
    }
    s->functions.push_back(f);
}

// Walks over the tokens with a stack of braces; what stands inside a function or an initialiser is
// only counted through.
static void source_functions(Source *s) {
    Scan now = {{}, 0, 0};
    std::vector<Scan> at_if;
    Function f = {};
    size_t function_depth = 0;    // of scopes inside the function; 0: in no function
    const std::vector<Token> &t = s->tokens;
    for (size_t i = 0; i < t.size(); i++) {
        const Text &x = t[i].text;
        const bool open = function_depth == 0 &&
                          std::count(now.scopes.begin(), now.scopes.end(), SCOPE_OTHER) == 0;
        if (x[0] == '#' && x.size() > 1) {
            scan_directive(x, i, &at_if, &now);
        } else if (x == "{") {
            Scope scope = SCOPE_OTHER;
            if (open && now.parentheses == 0) {
                f = Function{};
                scope = scope_of(t, now.begin, i, &f);
                f.first = t[now.begin].line;
            }
            now.scopes.push_back(scope);
            function_depth = scope == SCOPE_FUNCTION ? now.scopes.size() : function_depth;
            now.begin = i + 1;
        } else if (x == "}" && !now.scopes.empty()) {
            if (now.scopes.size() == function_depth) {
                function_ends(s, f, t[i].line);
                function_depth = 0;
            }
            now.scopes.pop_back();
            now.begin = i + 1;
        } else if (open) {
            now.parentheses += (x == "(") - (x == ")");
            const bool access = x == ":" && i == now.begin + 1 &&
                                (t[i - 1].text == "public" || t[i - 1].text == "private");
            if ((x == ";" && now.parentheses == 0) || access) {
                now.begin = i + 1;
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------
// 4. Layout
// What stands in lines, whatever the language; contents lists and banners.

struct Findings {
    std::vector<Text> places;    // `file:line: what`
    int counted = 0;             // what the rule looked at
    void add(const Source &s, int line, const Text &what) {
        places.push_back(s.path + ":" + std::to_string(line) + ": " + what);
    }
};

static void check_columns(const Source &s, Findings *out) {
    for (size_t n = 0; n < s.lines.size() && !ends(s.path, ".md"); n++) {
        auto continues = [](char c) { return ((unsigned char)c & 0xC0) == 0x80; };  // of UTF-8
        long columns = (long)s.lines[n].size() -
                       std::count_if(s.lines[n].begin(), s.lines[n].end(), continues);
        if (columns > COLUMNS) {
            out->add(s, (int)n + 1, std::to_string(columns) + " columns");
        }
        out->counted++;
    }
}

static void check_blanks(const Source &s, Findings *out) {
    for (size_t n = 0; n < s.lines.size() && !ends(s.path, ".md"); n++) {
        const Text &line = s.lines[n];
        if (!line.empty() && (line.back() == ' ' || line.back() == '\t' || line.back() == '\r')) {
            out->add(s, (int)n + 1, "a blank at the end of the line");
        }
        if (s.path != "Makefile" && line.find('\t') != Text::npos) {
            out->add(s, (int)n + 1, "a tab");
        }
    }
    if (!s.final_newline) {
        out->add(s, (int)s.lines.size(), "a file ends in one line end");
    }
    out->counted++;
}

// A comment line of `c` alone, to the last column.
static bool is_rule(const Text &line, char c) {
    return line.size() == COLUMNS && starts(line, "// ") &&
           line.find_first_not_of(c, 3) == Text::npos;
}

// `12  Title` of a contents list, or `12. Title` of a banner, to a heading.
static bool numbered(const Text &text, const char *between, Heading *out) {
    size_t digits = text.find_first_not_of("0123456789");
    if (digits == 0 || digits == Text::npos || text.compare(digits, strlen(between), between)) {
        return false;
    }
    out->title = trimmed(text.substr(digits + strlen(between)));
    out->label = text.substr(0, digits) + ". " + out->title;
    return true;
}

// The contents stand below `// Contents` in the opening comment, a banner's title below a rule of -
// or =.
static void source_headings(Source *s) {
    bool header = true;
    for (size_t n = 0; n < s->lines.size(); n++) {
        Heading h = {"", "", (int)n + 1};
        const Text comment = trimmed(s->comments[n]);
        header &= s->comment_only[n];
        if (header && comment == "Contents") {
            s->contents_line = h.line;
        } else if (header && s->contents_line) {
            Text entry = comment;
            size_t remark = entry.find("  ", entry.find_first_not_of(" 0123456789"));
            bool chapter = numbered(entry.substr(0, remark), "  ", &h);
            if (!chapter && starts(entry, "Part ")) {
                h.label = h.title = entry;
            }
            if (!h.label.empty()) {
                s->contents.push_back(h);
            }
        } else if (!header && n > 0 && s->comment_only[n - 1] && s->comment_only[n]) {
            if (is_rule(s->lines[n - 1], '-')) {
                if (!numbered(comment, ". ", &h)) {
                    h.label = h.title = comment;
                }
                s->banners.push_back(h);
            } else if (is_rule(s->lines[n - 1], '=')) {
                h.label = h.title = comment;
                s->banners.push_back(h);
            }
        }
    }
}

// What stands around a banner whose title is on line h.line.
static void check_banner(const Source &s, const Heading &h, Findings *out) {
    const size_t title = (size_t)h.line - 1;
    const bool part = is_rule(s.lines[title - 1], '=');
    auto comment = [&](size_t n) { return n < s.lines.size() ? trimmed(s.comments[n]) : ""; };
    if (title >= 2 && !s.lines[title - 2].empty()) {
        out->add(s, h.line - 1, "no blank line before the banner");
    }
    const bool sentence = ends(h.title, ".") || (!part && h.title.find(". ") != Text::npos);
    if (h.title.empty() || is_rule(s.lines[title], '-') || sentence) {
        out->add(s, h.line, "no title alone on the line under the dashes");
    } else if (part != starts(h.label, "Part ")) {
        out->add(s, h.line, "parts have a line of =, chapters one of -");
    } else if (!part && (comment(title + 1).empty() || is_rule(s.lines[title + 1], '-'))) {
        out->add(s, h.line, "no prose under the banner: " + h.label);
    }
}

// Banners one by one against the contents, and no other kind of banner.
static void check_contents(const Source &s, Findings *out) {
    if (!s.c_family) {
        return;
    }
    if (s.bound->contents && s.contents.empty()) {
        out->add(s, 1, "no contents in the opening comment");
    }
    int last = 0;
    for (const Heading &entry : s.contents) {
        int number = atoi(entry.label.c_str());
        if (number != 0 && number <= last) {
            out->add(s, entry.line, "contents: " + std::to_string(number) + " after " +
                                        std::to_string(last));
        }
        last = std::max(number, last);
    }
    for (size_t i = 0; i < s.banners.size(); i++) {
        const Heading &banner = s.banners[i];
        const bool chapter = banner.label != banner.title;
        out->counted++;
        check_banner(s, banner, out);
        if (s.contents.empty()) {
            if (chapter) {
                out->add(s, banner.line, "a numbered banner, but no contents list");
            }
        } else if (i >= s.contents.size() || banner.label != s.contents[i].label) {
            out->add(s, banner.line,
                     "banner \"" + banner.label + "\" where the contents have \"" +
                         (i < s.contents.size() ? s.contents[i].label : "nothing") + "\"");
        }
    }
    if (s.banners.size() < s.contents.size()) {
        out->add(s, s.contents_line, "the contents have \"" + s.contents[s.banners.size()].label +
                                         "\", but no banner follows");
    }
    // Any other comment that is drawn as a line.
    for (size_t n = 0; n < s.lines.size(); n++) {
        const Text comment = trimmed(s.comments[n]);
        const bool drawn = s.comment_only[n] && comment.size() >= 3 &&
                           strchr("-=*#", comment[0]) && comment[1] == comment[0] &&
                           comment[2] == comment[0];
        const bool over_title = n + 1 < s.lines.size() && s.comment_only[n + 1] &&
                                (is_rule(s.lines[n], '-') || is_rule(s.lines[n], '='));
        if (drawn && !over_title) {
            out->add(s, (int)n + 1, "not the banner of this project: a line of dashes to column "
                                    "100, a title under it");
        }
    }
}

// -------------------------------------------------------------------------------------------------
// 5. Code
// Braces, and what is counted of functions.

// After if, for, while, do and else stands `{`, or `else if`.
static void check_braces(const Source &s, Findings *out) {
    Text expect, head;          // a brace must follow this word; in the parentheses of this word
    Text last;
    int depth = 0, line = 0;
    bool after_do = false;      // this while ends a do
    std::vector<bool> is_do;    // of each open brace; the one that closed last
    bool closed_do = false;
    for (const Token &token : s.tokens) {
        const Text &x = token.text;
        if (x[0] == '#' && x.size() > 1) {
            continue;
        }
        if (!expect.empty()) {
            const bool good = x == "{" || (expect == "else" && x == "if") ||
                              (x == ";" && expect == "while" && after_do);
            if (!good) {
                out->add(s, line, "no brace after " + expect);
            }
            out->counted++;
            expect.clear();
        }
        if (!head.empty()) {
            depth += (x == "(") - (x == ")");
            if (x == ")" && depth == 0) {
                expect = head;
                line = token.line;
                head.clear();
            }
        } else if (x == "if" || x == "for" || x == "while") {
            head = x;
            depth = 0;
            after_do = x == "while" && last == "}" && closed_do;
        } else if (x == "else" || x == "do") {
            expect = x;
            line = token.line;
        }
        if (x == "{") {
            is_do.push_back(last == "do");
        } else if (x == "}" && !is_do.empty()) {
            closed_do = is_do.back();
            is_do.pop_back();
        }
        last = x;
    }
}

static std::set<Text> exceptions_needed;

// How much `f` may have of what `member` limits; `limit` where no exception is needed.
static int allowed(const Source &s, const Function &f, int has, int limit, int Exception::*member) {
    for (const Exception &row : exceptions) {
        const bool named = f.name == row.name || s.path + ":" + f.name == row.name;
        if (named && has > limit && row.*member > 0) {
            exceptions_needed.insert(row.name);
            return row.*member;
        }
    }
    return limit;
}

static void check_function_lines(const Source &s, Findings *out) {
    for (const Function &f : s.functions) {
        const int limit = allowed(s, f, f.lines(), FUNCTION_LINES, &Exception::lines);
        if (f.lines() > limit) {
            out->add(s, f.first, f.name + " has " + std::to_string(f.lines()) + " lines of " +
                                     std::to_string(limit));
        }
        out->counted++;
    }
}

// Kernels, launchers and the chapters of tensor maths are free.
static void check_parameters(const Source &s, Findings *out) {
    for (const Function &f : s.functions) {
        bool tensors = f.kernel || f.launcher;
        for (const char *chapter : tensor_chapters) {
            tensors |= f.chapter == chapter;
        }
        const int limit = allowed(s, f, f.parameters, PARAMETERS, &Exception::parameters);
        if (!tensors && f.parameters > limit) {
            out->add(s, f.first, f.name + " has " + std::to_string(f.parameters) +
                                     " parameters of " + std::to_string(limit));
        }
        out->counted++;
    }
}

static void check_kernels(const Source &s, Findings *out) {
    for (const Function &f : s.functions) {
        if (s.bound->bare < 0 || !(f.kernel || f.launcher)) {
            continue;
        }
        if (!f.contract) {
            out->add(s, f.first, Text(f.kernel ? "kernel " : "launcher ") + f.name +
                                     " without a contract above it");
        }
        out->counted++;
    }
}

// -------------------------------------------------------------------------------------------------
// 6. Citations and proportions
// A comment cites a chapter by its title, `chapter Memory plan`: numbers move.

static std::set<Text> all_titles;

// What follows the word `chapter` in `text`, the joined lines of one comment.
static Text citation_fault(Text text, int *counted) {
    text = text.substr(text.find_first_not_of(' '));
    if (isdigit((unsigned char)text[0])) {
        return "chapter " + text.substr(0, text.find_first_not_of("0123456789")) +
               ": cite the title, numbers move";
    }
    text = text.substr(text[0] == '"');
    if (!isupper((unsigned char)text[0])) {
        return "";
    }
    ++*counted;
    for (const Text &title : all_titles) {
        if (starts(text, title.c_str()) && !word_char(text[title.size()])) {
            return "";
        }
    }
    return "no chapter has the title \"" + text.substr(0, 24) + "...\"";
}

// A title may go on in the next line of the comment.
static void check_citations(const Source &s, Findings *out) {
    for (size_t n = 0; n < s.lines.size(); n++) {
        Text next = n + 1 < s.lines.size() ? trimmed(s.comments[n + 1]) : "";
        next = trimmed(next.substr(!s.c_family && next[0] == '#'));
        const Text text = s.comments[n] + " " + next + " ";
        for (size_t at = 0; at < s.comments[n].size(); at++) {
            const bool begins = at == 0 || !word_char(text[at - 1]);
            const bool word = tolower(text[at]) == 'c' && text.compare(at + 1, 6, "hapter") == 0;
            const size_t behind = at + 7 + (at + 7 < text.size() && text[at + 7] == 's');
            if (!begins || !word || behind >= text.size() || text[behind] != ' ' ||
                text.find_first_not_of(' ', behind) == Text::npos) {
                continue;
            }
            const Text fault = citation_fault(text.substr(behind), &out->counted);
            if (!fault.empty()) {
                out->add(s, (int)n + 1, fault);
            }
        }
    }
}

static double comment_share(const Source &s) {
    const long comments = std::count(s.comment_only.begin(), s.comment_only.end(), true);
    return s.lines.empty() ? 0.0 : 100.0 * (double)comments / (double)s.lines.size();
}

static std::vector<const Function *> bare_functions(const Source &s) {
    std::vector<const Function *> bare;
    for (const Function &f : s.functions) {
        if (f.lines() > CONTRACT_OVER && !f.contract) {
            bare.push_back(&f);
        }
    }
    return bare;
}

// Length, comments and contracts of one file against its row of `bounds`; the figures as a text.
static Text check_proportions(const Source &s, Findings *out) {
    const Bound *b = s.bound;
    const int lines = (int)s.lines.size();
    char part[200];
    snprintf(part, sizeof part, "%d of %d lines", lines, b->lines);
    Text figures = part;
    if (lines > b->lines) {
        out->add(s, lines, part);
    }
    if (b->comments > 0) {
        const double share = comment_share(s);
        snprintf(part, sizeof part, "comments %.1f %%, at least %.1f", share, b->comments);
        figures += Text(", ") + part;
        if (share < b->comments) {
            out->add(s, lines, part);
        }
    }
    if (b->bare >= 0) {
        const std::vector<const Function *> bare = bare_functions(s);
        snprintf(part, sizeof part, "no contract above %zu of at most %d functions",
                 bare.size(), b->bare);
        figures += Text(", ") + part;
        if ((int)bare.size() > b->bare) {
            out->add(s, lines, part);
            for (const Function *f : bare) {
                out->add(s, f->first, f->name + " has no contract");
            }
        }
    }
    return figures;
}

// Words of README outside code blocks, indented code and tables.
static int readme_words(const Text &text) {
    int words = 0;
    bool code = false;
    std::istringstream stream(text);
    for (Text line; std::getline(stream, line);) {
        if (starts(line, "```")) {
            code = !code;
        } else if (!code && !starts(line, "    ") && !starts(line, "\t") && !starts(line, "|")) {
            std::istringstream in(line);
            for (Text word; in >> word;) {
                words++;
            }
        }
    }
    return words;
}

// -------------------------------------------------------------------------------------------------
// 7. Planted faults
// Every rule on small sources, one fault in each: it must report that line and that text. A case
// without a text is one that no rule may complain about.

typedef void Check(const Source &, Findings *);

struct Rule {
    const char *name, *counted;
    Check *check;
};
static const Rule rules[] = {
    {"100 columns", "lines", check_columns},
    {"no tabs, no trailing blanks", "files", check_blanks},
    {"contents and banners", "banners", check_contents},
    {"braces", "braces", check_braces},
    {"function lengths", "functions", check_function_lines},
    {"parameters", "functions", check_parameters},
    {"contracts of kernels and launchers", "kernels and launchers", check_kernels},
    {"chapters cited by title", "citations", check_citations},
};

#define DASHES "// ------------------------------------------------------------" \
               "-------------------------------------\n"
#define EQUALS "// ============================================================" \
               "=====================================\n"
#define HEAD "// Contents\n//   1  One\n//   2  Two\n"
#define ONE "\n" DASHES "// 1. One\n// Prose.\n\nint x;\n"
#define TWO "\n" DASHES "// 2. Two\n// Prose.\n\nint y;\n"

#define PARTS "// Contents\n// Part A. All\n//   1  One  remark\n\n" EQUALS

struct Planted {
    Text text;
    int line;
    const char *complaint;    // nullptr: none
};

static Text lines_of(int n) {
    Text text;
    for (int i = 0; i < n; i++) {
        text += "    x++;\n";
    }
    return text;
}

static std::vector<Planted> planted_faults() {
    const Text long_body = lines_of(59) + "}\n";
    return {
        {HEAD ONE TWO, 0, nullptr},
        {"int x;  // " + Text(90, 'x') + "\n", 1, "101 columns"},
        {"int x;  // " + Text(86, 'x') + "\303\244\303\266\n", 0, nullptr},
        {"int x;\t// tab\n", 1, "a tab"},
        {"int x; \n", 1, "a blank at the end"},
        {"int x;\nint y;", 2, "one line end"},
        // contents and banners
        {HEAD ONE, 1, "the contents have \"2. Two\""},
        {"// Contents\n//   1  One\n" TWO, 5, "\"2. Two\" where the contents have \"1. One\""},
        {HEAD ONE TWO "\n" DASHES "// 3. Three\n// Prose.\n", 18, "the contents have \"nothing\""},
        {HEAD ONE "\n" DASHES "// 2. To\n// Prose.\n", 12, "banner \"2. To\""},
        {HEAD ONE "\n" DASHES "// 2. Two\n\nint y;\n", 12, "no prose"},
        {HEAD ONE "\n" DASHES "// 2. Two\n// Prose.\n" DASHES "int y;\n", 14, "not the banner"},
        {HEAD ONE "int z;" TWO, 11, "no blank line"},
        {"// Contents\n//   2  Two\n//   1  One\n" TWO ONE, 3, "1 after 2"},
        {"int x;\n\n// --- Title ---\n", 3, "not the banner"},
        {"int x;\n\n/***** Title *****/\n", 3, "not the banner"},
        {"int x;\n\n" DASHES "// Title. And prose.\n// More.\n", 4, "no title alone"},
        {"int x;\n\n" DASHES "// Title\n// Prose.\n\nint y;\n", 0, nullptr},
        {"int x;\n" ONE, 4, "no contents list"},
        {PARTS "// Part A. All\n" ONE, 0, nullptr},
        {PARTS "// Part B. All\n" ONE, 6, "banner \"Part B. All\""},
        // braces
        {"void f(int a) {\n    if (a)\n        g();\n}\n", 2, "no brace after if"},
        {"void f(int a) {\n    if (a) {\n    } else\n        g();\n}\n", 3, "no brace after else"},
        {"void f(int a) {\n    for (;;) a++;\n}\n", 2, "no brace after for"},
        {"void f(int a) {\n    while (a)\n        a--;\n}\n", 2, "no brace after while"},
        {"void f(int a) {\n    do a--; while (a);\n}\n", 2, "no brace after do"},
        {"void f(int a) {\n    do {\n    } while (a);\n    if (a) {\n    } else if (g(\"{\")) {\n"
         "    }  // if (a) x\n}\n#define F if (a) x\n", 0, nullptr},
        // functions, under the right name
        {"static int f(int a) {\n" + lines_of(58) + "}\n", 0, nullptr},
        {"static int f(int a) {\n" + long_body, 1, "f has 61 lines"},
        {"namespace n {\nint f(int a) {\n" + long_body + "}\n", 2, "f has 61 lines"},
        {"struct S {\n    int a = 1;\n    int f(int a) const {\n" + long_body + "};\n", 3,
         "f has 61 lines"},
        {"#if A\nint f(int a) {\n    return 1;\n}\n#else\nint g(int a) {\n" + long_body +
         "#endif\n", 6, "g has 61 lines"},
        {"int f(int a) {\n#if A\n    if (a) {\n#else\n    if (!a) {\n#endif\n    }\n}\n"
         "int g(int a) {\n" + long_body, 9, "g has 61 lines"},
        {"static const struct { int a; } t[] = {{1}, {f(2)}};\nint g(int a) {\n" + long_body, 2,
         "g has 61 lines"},
        {"int f(char *a) {\n    a = \"}\";  // }\n    /* } */ a[0] = '}';\n" + lines_of(57) +
         "}\n", 1, "f has 61 lines"},
        {"auto f(int a) -> int {\n    int n = 1'000'000;\n    auto t = R\"(\"})\";\n" +
         lines_of(57) + "}\n", 1, "f has 61 lines"},
        {"bool operator()(int a) {\n" + long_body, 1, "operator() has 61 lines"},
        {"template <> float narrow<float>(float x) {\n" + long_body, 1, "narrow has 61 lines"},
        {"int f(int a, int b, int c, int d, int e, int g) {\n}\n", 0, nullptr},
        {"int f(int a, int b, int c, int d, int e, int g, M<1, 2> h) {\n}\n", 1, "7 parameters"},
        // contracts
        {"template <class E, int N = f(2)>\n__global__ void __launch_bounds__(N *32, 1)\n"
         "    k(int a, int b, int c, int d, int e, int f, int g) {\n}\n", 1,
         "kernel k without a contract"},
        {"// What.\ntemplate <class E>\n__attribute__((unused)) static __global__ void k(E *a) {\n"
         "}\n", 0, nullptr},
        {"int x;\nstatic void gpu_f(int n, cudaStream_t stream) {\n}\n", 2,
         "launcher gpu_f without a contract"},
        // citations
        {"int x;  // (chapter 5)\n", 1, "cite the title"},
        {"// As Chapter\n// 5 has it.\nint x;\n", 1, "cite the title"},
        {"int x;  // chapters 5 to 7\n", 1, "cite the title"},
        {"int x;  // chapter Nowhere\n", 1, "no chapter has the title"},
        {"int x;  // chapter \"One\", chapter One, this chapter\n"
         "const char *s = \"chapter 5\";\n", 0, nullptr},
    };
}

// Every planted fault, and of proportions each bound once. What was not seen goes to `out`.
static void check_planted(Findings *out) {
    static const Bound small = {"", false, 4, 20.0, 0};
    all_titles = {"One"};
    for (const Planted &p : planted_faults()) {
        const Source s = source_read("planted.cu", p.text, &small);
        Findings found;
        for (const Rule &rule : rules) {
            rule.check(s, &found);
        }
        const Text place = "planted.cu:" + std::to_string(p.line) + ": ";
        bool good = found.places.empty() == (p.complaint == nullptr);
        if (good && p.complaint != nullptr) {
            good = starts(found.places[0], place.c_str()) &&
                   found.places[0].find(p.complaint) != Text::npos;
        }
        if (!good) {
            out->places.push_back("expected: " + place + (p.complaint ? p.complaint : "nothing") +
                                  ", in:\n" + p.text);
            out->places.insert(out->places.end(), found.places.begin(), found.places.end());
        }
        out->counted += p.complaint != nullptr;
    }
    const Text bare = "int f(int a) {\n" + lines_of(10) + "}\n";
    const struct { Text text; size_t places; } proportions[] = {
        {"int x;\nint y;\nint z;\n// a\n", 0},     {"int x;\nint y;\nint z;\nint w;\n", 1},
        {"// a\n// a\nint x;\nint y;\nint z;\n", 1}, {"// a\n" + bare, 2},
        {"// a\n\n// a\n\n// a\n\n" + bare, 4}};
    for (const auto &p : proportions) {
        Findings found;
        check_proportions(source_read("planted.c", p.text, &small), &found);
        if (found.places.size() != p.places) {
            out->places.push_back("proportions of:\n" + p.text);
        }
        out->counted += p.places > 0;
    }
    if (readme_words("one two\n```\nthree\n```\n    four\n| five |\nsix\n") != 3) {
        out->places.push_back("words of a README");
    }
}

// -------------------------------------------------------------------------------------------------
// 8. Report and main
// One line a rule, as dev/style.sh goes on with.

static int passed, failed;

static void report(const Text &name, const Findings &found, const Text &figures) {
    if (found.places.empty()) {
        passed++;
        printf("style  %-38s ok  (%s)\n", name.c_str(), figures.c_str());
        return;
    }
    failed++;
    printf("style  %-38s FAILED\n", name.c_str());
    for (size_t i = 0; i < found.places.size() && i < SHOWN; i++) {
        printf("         %s\n", found.places[i].c_str());
    }
    if (found.places.size() > SHOWN) {
        printf("         and %zu more\n", found.places.size() - SHOWN);
    }
}

static Text file_text(const Text &path) {
    std::ifstream in(path, std::ios::binary);
    std::stringstream text;
    text << in.rdbuf();
    return text.str();
}

// All files that `bounds` names, each under the first row that matches.
static std::vector<Source> sources_read() {
    std::vector<Source> sources;
    std::set<Text> seen;
    for (const Bound &b : bounds) {
        glob_t found;
        if (glob(b.files, 0, nullptr, &found) == 0) {
            for (size_t i = 0; i < found.gl_pathc; i++) {
                const Text path = found.gl_pathv[i];
                const bool text = path.find(".bin") == Text::npos;
                if (text && seen.insert(path).second) {
                    sources.push_back(source_read(path, file_text(path), &b));
                }
            }
        }
        globfree(&found);
    }
    return sources;
}

// What no bound holds: the share of comments in the other sources.
static Text other_shares(const std::vector<Source> &sources) {
    Text figures;
    int count = 0;
    for (const Source &s : sources) {
        if (s.c_family && s.bound->comments == 0) {
            char share[40];
            snprintf(share, sizeof share, " %.0f %%", comment_share(s));
            figures += count == 0 ? "" : count % 3 == 1 ? ",\n         " : ", ";
            figures += s.path + share;
            count++;
        }
    }
    return figures;
}

static void report_readme() {
    Findings found;
    const int words = readme_words(file_text("README.md"));
    const Text figures = std::to_string(words) + " words of " + std::to_string(README_WORDS) +
                         " outside code and tables";
    if (words > README_WORDS) {
        found.places.push_back("README.md: " + figures);
    }
    report("README.md", found, figures);
}

static void report_all() {
    Findings planted;
    check_planted(&planted);
    report("rules", planted, std::to_string(planted.counted) + " planted faults seen");

    const std::vector<Source> sources = sources_read();
    all_titles.clear();
    for (const Source &s : sources) {
        for (const Heading &entry : s.contents) {
            all_titles.insert(entry.title);
        }
    }
    exceptions_needed.clear();
    for (const Rule &rule : rules) {
        Findings found;
        for (const Source &s : sources) {
            rule.check(s, &found);
        }
        report(rule.name, found, std::to_string(found.counted) + " " + rule.counted);
    }
    Findings unused;
    for (const Exception &row : exceptions) {
        if (exceptions_needed.count(row.name) == 0) {
            unused.places.push_back(Text(row.name) + " (" + row.why +
                                    ") needs no exception: take its row out");
        }
    }
    report("exceptions", unused, std::to_string(exceptions_needed.size()) + " functions");
    for (const Source &s : sources) {
        if (s.bound->lines > 0) {
            Findings found;
            const Text figures = check_proportions(s, &found);
            report(s.path, found, figures);
        }
    }
    report_readme();
    report("comments elsewhere", Findings{}, other_shares(sources));
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        const Source s = source_read(argv[i], file_text(argv[i]), &bounds[0]);
        for (const Function &f : s.functions) {
            printf("%s:%d: %s  %d lines, %d parameters%s%s\n", argv[i], f.first, f.name.c_str(),
                   f.lines(), f.parameters, f.kernel ? ", kernel" : f.launcher ? ", launcher" : "",
                   f.contract ? "" : ", no contract");
        }
    }
    if (argc > 1) {
        return 0;
    }
    report_all();
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed > 0;
}
