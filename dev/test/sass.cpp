// sass.cpp -- compares the machine code of the kernels with their budgets, which is what can be
// checked about speed without a GPU.
//
// Every kernel's contract in train_gpt2.cu ends with one or more lines of this form,
//
//     // budget: <bf16, 64> threads 128 shared 49152 regs 222 blocks 2 instr/elem 13 of 64 loop
//     //   test gpu_attention
//
// and for each GPU below the compiled instance must stay within it: at most that many registers, no
// byte spilled (`spills N`: at most N bytes), at least that many blocks per SM when launched with
// the given threads and dynamic shared bytes, and at most that many instructions for each of a
// thread's elements. All of the kernel's instructions are counted, including slow paths but not
// subroutines, or with `loop` its longest loop. An instance is named by its first template
// arguments, or none if the kernel is not a template; instances without a line are reported but not
// limited. `sm 80`: the line applies to that GPU only. sm_75, which has no bf16, has only such
// lines.
//
// For kernels with wgmma, `hgmma N`: the loop has exactly N wgmma instructions; `overlap N`: at
// least N exponentials are computed between the wait for all but one group of them and the next
// wait for all. Their loops must not let the lanes of a warp diverge. A warning C75xx, in which
// ptxas reports that it serializes wgmma instructions, is a failure.
//
// Budgets were recorded with one release of nvcc; the log of a compilation starts with its name.
// For another release the limits are wider: they detect a kernel that spills or no longer fills its
// SM, but not a few more registers.
//
// This is not a simulator: every instruction counts as one, however long it takes.
//
// Build:  make build/test/sass
// Run:    build/test/sass           from the top of the repository, after make build/sm_80.log ...;
//                                   NVDISASM names NVIDIA's disassembler if it is not on the PATH
//         build/test/sass --gpu 80  only that GPU
//         build/test/sass WORD      all numbers of the instances whose name contains WORD
//
// The disassembler is part of the toolkit; PyPI's nvidia-cuda-nvdisasm contains only it.

#include <ctype.h>
#include <cxxabi.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

typedef std::string Text;

// -------------------------------------------------------------------------------------------------
// Budgets
// Read from the comments of the source.

struct Budget {
    Text kernel, arguments, test, arch;
    int line, threads, shared, regs, spills, blocks, elements, hgmma, overlap;
    double instructions;  // per element; 0: unlimited
    bool loop;
};

struct Source {
    std::vector<Budget> budgets;
    std::vector<Text> faults;
};

static bool starts(const Text &s, const char *with) {
    return s.compare(0, strlen(with), with) == 0;
}

// Parses `words`, the text after "budget:" with its continuation lines joined.
static bool budget_read(const Text &words, Budget *b) {
    Text rest = words;
    if (starts(rest, " <")) {
        const size_t end = rest.find('>');
        b->arguments = rest.substr(2, end - 2);
        rest = end == Text::npos ? "" : rest.substr(end + 1);
    }
    std::istringstream in(rest);
    const std::map<Text, int *> numbers = {
        {"threads", &b->threads}, {"shared", &b->shared}, {"regs", &b->regs},
        {"spills", &b->spills},   {"blocks", &b->blocks}, {"of", &b->elements},
        {"hgmma", &b->hgmma},     {"overlap", &b->overlap}};
    Text word;
    while (in >> word) {
        if (word == "loop") {
            b->loop = true;
        } else if (word == "test") {
            in >> b->test;
        } else if (word == "sm") {
            in >> b->arch;
        } else if (word == "instr/elem") {
            in >> b->instructions;
        } else if (numbers.count(word)) {
            in >> *numbers.at(word);
        } else {
            return false;
        }
        if (!in) {
            return false;
        }
    }
    return b->threads > 0 && b->regs > 0 && b->blocks > 0 && !b->test.empty() &&
           (b->instructions > 0) == (b->elements > 0);
}

static void fault(Source *source, int line, const Text &what) {
    source->faults.push_back("train_gpt2.cu:" + std::to_string(line) + ": " + what);
}

// Returns the name before "(" if a kernel begins here, else "". *declared: __global__ was seen.
static Text kernel_name(const Text &code, bool *declared) {
    *declared |= !starts(code, "//") && !starts(code, "#") &&
                 code.find("__global__") != Text::npos;
    const size_t end = code.find("_kernel(");
    if (!*declared || end == Text::npos) {
        return "";
    }
    *declared = false;
    size_t at = end;
    while (at > 0 && (isalnum((unsigned char)code[at - 1]) || code[at - 1] == '_')) {
        at--;
    }
    return code.substr(at, end - at) + "_kernel";
}

// Reads a budget with its continuation lines, after which `line` is the next line; false if no
// budget begins here. `tests`: source text that contains every test's name.
static bool budget_lines(std::istream *in, Text *line, int *number, const Text &tests, Source *to) {
    const char opening[] = "// budget:";
    if (!starts(*line, opening)) {
        return false;
    }
    Budget b = {};
    b.line = *number;
    Text words = line->substr(strlen(opening));
    while ((++*number, std::getline(*in, *line)) && starts(*line, "//   ")) {
        words += line->substr(4);
    }
    if (!budget_read(words, &b)) {
        fault(to, b.line, "not a budget: expected threads, regs, blocks, test and known words");
    } else if (tests.find("TEST(" + b.test + ",") == Text::npos) {
        fault(to, b.line, "no test has the name " + b.test);
    } else {
        to->budgets.push_back(b);
    }
    return true;
}

// True if the line uses an approximation other than ex2_approx and rcp_approx. The error of these
// is documented and the emulator has CPU versions; others are no faster and give GPU-specific bits.
static bool approximates(const Text &line) {
    static const char *const names[] = {"__expf(", "__exp10f(", "__logf(", "__log2f(", "__powf(",
                                        "__fdividef(", "__tanhf(", "rsqrtf(", "__frsqrt_rn("};
    const size_t at = line.find(".approx.");
    return (at != Text::npos && line.find("(\"ex2.approx.ftz.f32 ") == Text::npos &&
            line.find("(\"rcp.approx.ftz.f32 ") == Text::npos) ||
           std::any_of(std::begin(names), std::end(names), [&](const char *name) {
               return line.find(name) != Text::npos;
           });
}

// Returns the budgets of every kernel, and as faults the kernels that have none.
static Source source_read(const Text &text, const Text &tests) {
    Source source;
    std::istringstream in(text);
    size_t named = 0;  // budgets of known kernels; the others apply to the next kernel
    bool declared = false;
    Text line;
    for (int number = 1; std::getline(in, line); number++) {
        while (budget_lines(&in, &line, &number, tests, &source)) {
        }
        if (!starts(line, "//") && approximates(line)) {
            fault(&source, number, "an approximation that is neither ex2_approx nor rcp_approx");
        }
        const Text kernel = kernel_name(line, &declared);
        if (!kernel.empty() && named == source.budgets.size()) {
            fault(&source, number, kernel + " has no budget");
        }
        for (; !kernel.empty() && named < source.budgets.size(); named++) {
            source.budgets[named].kernel = kernel;
        }
    }
    return source;
}

// -------------------------------------------------------------------------------------------------
// Compiled kernels
// Reads the output of ptxas for each kernel, and its instructions.

struct Gpu {
    const char *arch;
    int threads, shared_kib, blocks;  // maximum per SM
    int system;                       // shared memory per block used by the system
    bool has_bf16;                    // otherwise only lines that name it apply
};
// source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
static const Gpu gpus[] = {{"80", 2048, 164, 32, 1024, true},
                           {"89", 1536, 100, 24, 1024, true},
                           {"90a", 2048, 228, 32, 1024, true},
                           {"75", 1024, 64, 16, 0, false}};

struct Compiled {
    Text kernel, arguments;  // arguments without spaces, bf16 for __nv_bfloat16, fp16 for __half
    int regs, spills, shared;
    int whole, loop;  // instructions; 0 without disassembly, or without a loop
    int hgmma, overlap;  // of the loop
    bool diverges;       // the loop has both wgmma and places where lanes may diverge
};

typedef std::map<Text, Compiled> Kernels;  // by mangled name

static void replace_all(Text *s, const char *what, const char *with) {
    for (size_t at; (at = s->find(what)) != Text::npos;) {
        s->replace(at, strlen(what), with);
    }
}

// Splits "void gelu_forward_kernel<__nv_bfloat16>(...)" into name and arguments.
static void name_read(const Text &mangled, Compiled *c) {
    int status;
    char *plain = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
    Text name = plain ? plain : mangled;
    free(plain);
    if (starts(name, "void ")) {
        name = name.substr(5);
    }
    const size_t end = std::min(name.find('('), name.find('<'));
    c->kernel = name.substr(0, end);
    if (end != Text::npos && name[end] == '<') {
        int depth = 0;
        size_t close = end;
        do {
            depth += name[close] == '<' ? 1 : name[close] == '>' ? -1 : 0;
        } while (depth > 0 && ++close < name.size());
        c->arguments = name.substr(end + 1, close - end - 1);
        replace_all(&c->arguments, " ", "");
        replace_all(&c->arguments, "__nv_bfloat16", "bf16");
        replace_all(&c->arguments, "__half", "fp16");
        replace_all(&c->arguments, "(bool)1", "true");
        replace_all(&c->arguments, "(bool)0", "false");
    }
}

// Reads the output of ptxas -v: three lines per kernel.
static Kernels log_read(const Text &log) {
    Kernels kernels;
    std::istringstream in(log);
    Text line;
    Compiled *now = nullptr;
    while (std::getline(in, line)) {
        const size_t name = line.find("Compiling entry function '");
        const size_t used = line.find("Used "), spill = line.find("bytes spill stores, ");
        if (name != Text::npos) {
            const size_t from = line.find('\'') + 1;
            const Text mangled = line.substr(from, line.find('\'', from) - from);
            now = &kernels[mangled];
            *now = {};
            name_read(mangled, now);
        } else if (now != nullptr && spill != Text::npos) {
            int stack, stores, loads;
            if (sscanf(line.c_str(), "%d bytes stack frame, %d bytes spill stores, %d", &stack,
                       &stores, &loads) == 3) {
                now->spills = std::max(stores, loads);
            }
        } else if (now != nullptr && used != Text::npos) {
            now->regs = atoi(line.c_str() + used + strlen("Used "));
            const size_t shared = line.find(" bytes smem");
            if (shared != Text::npos) {
                now->shared = atoi(line.c_str() + line.rfind(' ', shared - 1) + 1);
            }
            now = nullptr;
        }
    }
    return kernels;
}

// Counts one kernel's instructions: lines "/*01a0*/  @P0 BRA `(.L_x_1) ;" with labels between them.
// Subroutines ("$name:") and the padding after the code are not counted.
struct Counter {
    std::map<Text, int> labels;
    int count = 0, end = 0, loop = 0, loop_at = 0;  // end: the last unconditional EXIT
    bool over = false;
    Text kinds;  // a letter for each instruction

    void label(const Text &name) {
        over |= name[0] == '$';
        labels[name] = count;
    }

    void instruction(const Text &line) {
        if (over) {
            return;
        }
        count++;
        static const char *const words[] = {"HGMMA", "MUFU.EX2", "WARPGROUP.DEPBAR.LE gsb0, 0x1",
                                            "WARPGROUP.DEPBAR.LE gsb0, 0x0", "BSSY", "WARPSYNC"};
        const auto word = std::find_if(std::begin(words), std::end(words), [&](const char *name) {
            return line.find(name) != Text::npos;
        });
        kinds += "HE10PP."[word - std::begin(words)];
        const size_t exit = line.find("EXIT");
        if (exit != Text::npos && line.find('@') == Text::npos) {
            end = count;
        }
        const size_t branch = line.find("BRA"), from = line.find("`(", branch);
        if (branch == Text::npos || from == Text::npos) {
            return;
        }
        const Text target = line.substr(from + 2, line.find(')', from) - from - 2);
        if (labels.count(target) && labels[target] < count - 1) {
            // Rare paths, such as a shuffle of a diverged warp, follow the end and jump back.
            if (labels[target] >= end && count - labels[target] > loop) {
                loop_at = labels[target];
                loop = count - loop_at;
            }
        } else if (labels.count(target)) {  // a branch to itself: the padding begins
            count--;
            over = true;
        }
    }

    void figures(Compiled *c) const {
        const Text in_loop = kinds.substr((size_t)loop_at, (size_t)loop);
        c->whole = count;
        c->loop = loop;
        c->hgmma = (int)std::count(in_loop.begin(), in_loop.end(), 'H');
        c->diverges = c->hgmma > 0 && in_loop.find('P') != Text::npos;
        const size_t from = in_loop.find('1'), to = in_loop.find('0', std::min(from, (size_t)loop));
        c->overlap = to == Text::npos ? 0
                                      : (int)std::count(in_loop.begin() + (long)from,
                                                        in_loop.begin() + (long)to, 'E');
    }
};

static void sass_read(const Text &sass, Kernels *kernels) {
    std::istringstream in(sass);
    Text line, name;
    Counter counter;
    auto close = [&] {
        if (kernels->count(name)) {
            counter.figures(&kernels->at(name));
        }
    };
    while (std::getline(in, line)) {
        if (starts(line, ".text.") && line.back() == ':') {
            close();
            name = line.substr(6, line.size() - 7);
            counter = Counter();
        } else if (!line.empty() && line.back() == ':' && !name.empty() && line != name + ":") {
            counter.label(line.substr(0, line.size() - 1));
        } else if (line.find("/*") != Text::npos && line.find(" ;") != Text::npos) {
            counter.instruction(line);
        }
    }
    close();
}

// Returns the blocks per SM, limited by threads, blocks, shared memory including the system's part
// of each block, and 65536 registers, which are allocated to warps in units of 256; each quarter of
// the SM holds whole warps.
static int blocks_per_sm(const Gpu &gpu, const Compiled &c, const Budget &b) {
    const int warps = (b.threads + 31) / 32, warp_regs = (c.regs * 32 + 255) / 256 * 256;
    const int by_regs = 65536 / 4 / std::max(warp_regs, 1) * 4 / warps;
    const int shared = (c.shared + b.shared + gpu.system + 127) / 128 * 128;
    return std::min(std::min(gpu.blocks, gpu.threads / (warps * 32)),
                    std::min(by_regs, gpu.shared_kib * 1024 / std::max(shared, 1)));
}

// -------------------------------------------------------------------------------------------------
// Comparison
// Compares a budget with every instance that it names.

static bool is_named_by(const Compiled &c, const Budget &b) {
    Text want = b.arguments;
    replace_all(&want, " ", "");
    want += want.empty() ? "" : ",";
    return c.kernel == b.kernel && starts(c.arguments + ",", want.c_str());
}

static const char recorded_with[] = "release 13.0,";

// True if ptxas serializes a kernel's wgmma instructions.
static bool is_serialized(const Text &log) { return log.find("(C75") != Text::npos; }

static bool is_recorded(const Text &log) {
    return log.find(" release ") == Text::npos || log.find(recorded_with) != Text::npos;
}

// Limits for another release of nvcc: a quarter more of each, a quarter fewer blocks. Of the 182
// lines compared with ptxas 12.0's code, the largest excess over a budget was 10 % more registers,
// 3 % more instructions and 8 bytes spilled; no block fewer.
static Budget widened(Budget b) {
    b.regs = std::min(255, b.regs + b.regs / 4);
    b.spills += 64;
    b.blocks = std::max(1, b.blocks * 3 / 4);
    b.instructions *= 1.25;
    b.overlap = 0;
    return b;
}

static bool is_for(const Budget &b, const Gpu &gpu) {
    return b.arch.empty() ? gpu.has_bf16 : b.arch == gpu.arch;
}

static Text figure(const char *name, double is, double bound, bool good) {
    char text[60];
    const bool whole = is == floor(is) && bound == floor(bound);
    snprintf(text, sizeof text, whole ? " %s %.0f%s%.0f%s" : " %s %.1f%s%.1f%s", name, is,
             good ? " of " : " and not ", bound, good ? "" : "!");
    return text;
}

// Returns the numbers of an instance next to its limits; *good: whether it stays within them.
static Text compare(const Gpu &gpu, const Compiled &c, const Budget &b, bool *good) {
    const int blocks = blocks_per_sm(gpu, c, b);
    const bool regs = c.regs <= b.regs, spills = c.spills <= b.spills, enough = blocks >= b.blocks;
    Text text = figure("regs", c.regs, b.regs, regs);
    text += figure("spills", c.spills, b.spills, spills);
    text += figure("blocks", blocks, b.blocks, enough);
    *good = regs && spills && enough;
    const int count = b.loop ? c.loop : c.whole;
    if (b.elements > 0 && c.whole > 0) {
        const double per_element = (double)count / b.elements;
        const bool few = count > 0 && per_element <= b.instructions;
        text += figure("instr/elem", per_element, b.instructions, few);
        *good &= few;
    }
    if (b.hgmma > 0 && c.whole > 0) {
        const bool exact = c.hgmma == b.hgmma, overlaps = c.overlap >= b.overlap;
        text += figure("hgmma", c.hgmma, b.hgmma, exact);
        text += figure("overlap", c.overlap, b.overlap, overlaps);
        text += c.diverges ? " lanes may diverge!" : "";
        *good &= exact && overlaps && !c.diverges;
    }
    return text;
}

static Text instance_name(const Compiled &c) {
    return c.kernel + (c.arguments.empty() ? "" : "<" + c.arguments + ">");
}

// -------------------------------------------------------------------------------------------------
// Injected faults
// A kernel of eleven instructions, eight of them in a loop and one after the end, which stays
// within its budget; then every way to violate it, which must be detected.

static const char injected_source[] =
    "// What.\n"
    "// budget: <bf16> threads 256 regs 32 blocks 8\n"
    "//   instr/elem 4 of 2 loop hgmma 1 overlap 1 test gpu_f\n"
    "template <class E>\n"
    "__global__ void f_kernel(E *a) {\n"
    "    asm(\"ex2.approx.ftz.f32 %0, %1;\" : \"=f\"(y) : \"f\"(x));\n";
static const char injected_log[] =
    "ptxas info : Compiling entry function '_Z8f_kernelI13__nv_bfloat16EvPT_' for 'sm_80'\n"
    "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
    "ptxas info : Used 32 registers, used 0 barriers, 64 bytes smem\n";
static const char injected_sass[] =
    ".text._Z8f_kernelI13__nv_bfloat16EvPT_:\n"
    " /*0000*/ MOV R1, c[0x0][0x28] ;\n"
    ".L_x_1:\n"
    " /*0008*/ HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;\n"
    " /*0009*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;\n"
    " /*000a*/ MUFU.EX2 R1, R1 ;\n"
    " /*000b*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"
    " /*0010*/ FMUL R0, R0, R0 ;\n"
    " /*0020*/ CALL.REL.NOINC `($__internal_0) ;\n"
    " /*0030*/ FMUL R0, R0, R0 ;\n"
    " /*0040*/ @P0 BRA `(.L_x_1) ;\n"
    ".L_x_3:\n"
    " /*0050*/ EXIT ;\n"
    ".L_x_4:\n"
    " /*0058*/ BRA `(.L_x_1) ;\n"
    "$__internal_0:\n"
    " /*0060*/ FADD R0, R0, R0 ;\n"
    ".L_x_2:\n"
    " /*0070*/ BRA `(.L_x_2);\n";

struct Injected {
    const char *where, *from, *to;  // in source, log or sass
};

// True if the kernel stays within its budget after one replacement; `release`: of nvcc.
static bool injected_is_good(const Injected &p, const char *release = "13.0") {
    Text source = injected_source, sass = injected_sass;
    Text log = Text("Cuda compilation tools, release ") + release + ", V1\n" + injected_log;
    Text *text = p.where[1] == 'o' ? (p.where[0] == 's' ? &source : &log) : &sass;
    const size_t at = text->find(p.from);
    if (at == Text::npos) {
        return true;  // the fault was not injected, which the caller reports
    }
    text->replace(at, strlen(p.from), p.to);
    const Source read = source_read(source, "TEST(gpu_f, CUDA_ALL) {");
    Kernels kernels = log_read(log);
    sass_read(sass, &kernels);
    bool good = read.faults.empty() && read.budgets.size() == 1 && kernels.size() == 1 &&
                !is_serialized(log);
    for (const auto &kernel : kernels) {
        bool kept = false;
        if (good) {
            const Budget b = is_recorded(log) ? read.budgets[0] : widened(read.budgets[0]);
            compare(gpus[0], kernel.second, b, &kept);
            good = kept && is_named_by(kernel.second, b);
        }
    }
    return good;
}

static const Injected injected_faults[] = {
    {"log", "0 bytes spill loads", "8 bytes spill loads"},
    {"log", "Used 32", "Used 33"},
    {"log", " 64 bytes smem", " 40000 bytes smem"},
    {"source", "blocks 8", "blocks 9"},
    {"sass", "FMUL R0, R0, R0 ;\n", "MUFU.RCP R0, R0 ;\n /*0018*/ FMUL R0, R0, R0 ;\n"},
    {"sass", "@P0 BRA `(.L_x_1)", "FADD"},
    {"source", "4 of 2 loop", "4 of 2"},
    {"sass", "HGMMA", "FADD"},
    {"sass", "MUFU.EX2", "MUFU.RCP"},
    {"sass", "FMUL R0, R0, R0", "BSSY B0, `(.L_x_3)"},
    {"sass", "gsb0, 0x1", "gsb0, 0x0"},
    {"log", "ptxas info : Used", "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async "
                                 "instructions are serialized\nptxas info : Used"},
    {"source", "gpu_f\n", "gpu_g\n"},
    {"source", "blocks 8", "block 8"},
    {"source", "// budget", "// Budget"},
    {"source", "<bf16>", "<fp16>"},
    {"source", "ex2.approx", "tanh.approx"},
    {"source", "asm(\"ex2", "*a = __expf(*a); // asm(\"ex2"},
};

// -------------------------------------------------------------------------------------------------
// Report and main
// A line for each GPU and instance.

static int passed, failed, skipped;

static void verdict(bool good, const Text &line) {
    (good ? passed : failed)++;
    printf("%s  %s\n", line.c_str(), good ? "ok" : "FAILED");
}

static Text file_text(const Text &path) {
    std::ifstream in(path, std::ios::binary);
    std::stringstream text;
    text << in.rdbuf();
    return text.str();
}

// Returns the output of a command; empty if it cannot be run.
static Text command_text(const Text &command) {
    Text text;
    FILE *pipe = popen(command.c_str(), "r");
    char buffer[1 << 16];
    size_t bytes;
    while (pipe != nullptr && (bytes = fread(buffer, 1, sizeof buffer, pipe)) > 0) {
        text.append(buffer, bytes);
    }
    return pipe != nullptr && pclose(pipe) == 0 ? text : "";
}

static void report_injected(void) {
    int seen = 0;
    for (const Injected &p : injected_faults) {
        if (injected_is_good({p.where, p.from, p.from}) && !injected_is_good(p)) {
            seen++;
        } else {
            verdict(false, Text("sass  not seen: ") + p.from + " -> " + p.to);
        }
    }
    verdict(seen > 0, "sass  " + std::to_string(seen) + " injected faults seen");
    const bool wide = injected_is_good({"log", "Used 32", "Used 40"}, "12.0") &&
                      injected_is_good({"sass", "CALL", "FADD R1 ;\n /*0024*/ CALL"}, "12.0") &&
                      !injected_is_good({"log", "Used 32", "Used 41"}, "12.0") &&
                      !injected_is_good({"log", "0 bytes spill loads", "72 bytes spill loads"},
                                       "12.0");
    verdict(wide, "sass  wider bounds for another release of nvcc");
}

// Reads the kernels of one GPU; false if nothing was compiled for it.
static bool kernels_read(const Gpu &gpu, const Text &disassembler, Kernels *kernels,
                         bool *recorded) {
    const Text log = Text("build/sm_") + gpu.arch + ".log";
    *kernels = log_read(file_text(log));
    *recorded = is_recorded(file_text(log));
    if (is_serialized(file_text(log))) {
        verdict(false, "sass  ptxas serializes wgmma: see (C75 in " + log);
    }
    if (!kernels->empty() && !disassembler.empty()) {
        const Text sass = command_text("'" + disassembler + "' -c " + log + ".cubin");
        sass_read(sass, kernels);
        if (sass.empty()) {
            verdict(false, "sass  " + disassembler + " disassembles " + log + ".cubin");
        }
    }
    return !kernels->empty();
}

static void report_gpu(const Gpu &gpu, const Source &source, const Kernels &kernels,
                       bool recorded) {
    if (!recorded) {
        printf("sass  sm_%s  not the nvcc of the budgets, %s wider bounds\n", gpu.arch,
               recorded_with);
    }
    for (const Budget &exact : source.budgets) {
        const Budget b = recorded ? exact : widened(exact);
        if (!is_for(b, gpu)) {
            continue;
        }
        bool found = false;
        for (const auto &kernel : kernels) {
            if (is_named_by(kernel.second, b)) {
                bool good = false;
                const Text text = compare(gpu, kernel.second, b, &good);
                verdict(good, Text("sass  sm_") + gpu.arch + "  " + instance_name(kernel.second) +
                                  " " + text);
                found = true;
            }
        }
        if (!found) {
            verdict(false, "sass  train_gpt2.cu:" + std::to_string(b.line) + ": sm_" + gpu.arch +
                               " has no " + b.kernel + "<" + b.arguments + ">");
        }
    }
    for (const auto &kernel : kernels) {
        const Compiled &c = kernel.second;
        if (!gpu.has_bf16 && c.arguments.find("fp16") == Text::npos) {
            continue;  // covered by other GPUs, or not supported there
        }
        if (std::none_of(source.budgets.begin(), source.budgets.end(),
                         [&](const Budget &b) { return is_for(b, gpu) && is_named_by(c, b); })) {
            printf("sass  sm_%s  %s  regs %d spills %d instr %d, loop %d  not bound\n", gpu.arch,
                   instance_name(c).c_str(), c.regs, c.spills, c.whole, c.loop);
        }
    }
}

// Prints all numbers of the instances whose name contains `word`, for authors of kernels.
static void print_figures(const Text &word, const Text &disassembler) {
    for (const Gpu &gpu : gpus) {
        Kernels kernels;
        bool recorded;
        kernels_read(gpu, disassembler, &kernels, &recorded);
        for (const auto &kernel : kernels) {
            const Compiled &c = kernel.second;
            if (instance_name(c).find(word) != Text::npos) {
                printf("sm_%-3s  %s  regs %d spills %d shared %d instr %d loop %d\n", gpu.arch,
                       instance_name(c).c_str(), c.regs, c.spills, c.shared, c.whole, c.loop);
            }
        }
    }
}

int main(int argc, char **argv) {
    const char *named = getenv("NVDISASM");
    Text disassembler = named ? named : command_text("command -v nvdisasm");
    disassembler.erase(std::remove(disassembler.begin(), disassembler.end(), '\n'),
                       disassembler.end());
    const bool one = argc == 3 && strcmp(argv[1], "--gpu") == 0;
    if (argc > 1 && !one) {
        print_figures(argv[1], disassembler);
        return 0;
    }
    report_injected();
    const Source source = source_read(file_text("train_gpt2.cu"),
                                      file_text("dev/test/unit/kernels.h") +
                                          file_text("dev/test/unit/gpu_network.h"));
    for (const Text &fault : source.faults) {
        verdict(false, "sass  " + fault);
    }
    verdict(!source.budgets.empty(),
            "sass  " + std::to_string(source.budgets.size()) + " budgets in train_gpt2.cu");
    bool bound = false;  // has the selected GPU any budgets?
    for (const Gpu &gpu : gpus) {
        Kernels kernels;
        bool recorded;
        if (one && strcmp(gpu.arch, argv[2]) != 0) {
            continue;
        }
        bound = true;
        if (kernels_read(gpu, disassembler, &kernels, &recorded)) {
            report_gpu(gpu, source, kernels, recorded);
        } else {
            printf("sass  sm_%s  skipped (no nvcc has compiled for it)\n", gpu.arch);
            skipped++;
        }
    }
    if (!bound) {
        const Text log = file_text(Text("build/sm_") + argv[2] + ".log");
        verdict(!log_read(log).empty(), Text("sass  sm_") + argv[2] + " compiles, no budgets");
    } else if (disassembler.empty()) {
        printf("sass  instructions  skipped (no nvdisasm: NVDISASM=FILE names one, "
               "PyPI's nvidia-cuda-nvdisasm has it)\n");
        skipped++;
    }
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed > 0;
}
