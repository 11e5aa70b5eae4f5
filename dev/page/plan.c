// The program that build/plan.html runs: train_gpt2.c compiled to WebAssembly. The page calls
// main() as a shell would, in a fresh instance each time, and shows its output. Two additional
// commands serve the page's form:
//
//   tables                  JSON: the options and the names that a user may choose from
//   commands OPTION...      two command lines: one with these options, one that trains with them
//
// Standard output and standard error are files, because emscripten's terminal calls JavaScript for
// every byte.
#define GPT2_NO_MAIN 1
#include "../../train_gpt2.c"

// Stub of Linux's system call, which emscripten lacks; only code that writes checkpoints calls it.
int sync_file_range(int fd, off_t at, off_t bytes, unsigned flags) {
    (void)fd, (void)at, (void)bytes, (void)flags;
    return 0;
}

// Prints a name and its meaning as an array of two strings.
static void print_pair(int first, const char *name, const char *meaning) {
    json_print(stdout, first ? "['%s','%s']" : ",\n['%s','%s']", name, meaning);
}

// Prints the options, and the models, cards, recompute and offload levels that the form offers.
static void tables_print(void) {
    static const char *const types[] = {"text", "choice", "text", "number",
                                        "number", "choice", "flag", "text"};
    Settings s;
    char text[64];
    memset(&s, 0, sizeof s);
    s.dtype = TYPE_BF16;
    s.split_master = s.ranks = 1;
    printf("{\"options\":[");
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        const char letter[2] = {row->letter, 0};
        printf("%s", i ? ",\n" : "");
        json_print(stdout, "{'name':'%s','letter':'%s','type':'%s','value':'%s','choices':'%s',"
                   "'help':'%s'}", row->name, letter, types[row->type],
                   row->value ? row->value : "", row->choices ? row->choices : "", row->help);
    }
    printf("],\n\"models\":[");
    for (size_t i = 0; i < sizeof presets / sizeof presets[0]; i++) {
        print_pair(i == 0, presets[i].alias, presets[i].name);
    }
    printf("],\n\"cards\":[");
    for (size_t i = 0; i < sizeof gpu_table / sizeof gpu_table[0]; i++) {
        snprintf(text, sizeof text, "%.2f GiB", gpu_table[i].gib);
        print_pair(i == 0, gpu_table[i].name, text);
    }
    printf("],\n\"levels\":[");
    for (int i = 0; i < RECOMPUTE_LEVELS; i++) {
        print_pair(i == 0, level_name(i).s, "");
    }
    printf("],\n\"offloads\":[");
    for (int i = 0; i < OFFLOAD_LEVELS; i++) {
        settings_offload(&s, i);
        print_pair(i == 0, offload_text(text, &s), "");
    }
    const char *separator = "";
    printf("],\n\"minimum\":[");  // options that --minimum chooses
    for (int i = 0; i < OPTION_ROWS; i++) {
        if (option_rows[i].flags & CHOSEN) {
            json_print(stdout, "%s'%s'", separator, option_rows[i].name);
            separator = ",";
        }
    }
    printf("]}\n");
}

// Rejects options that would make the program inspect this machine, which a page cannot do.
static void refuse_here(const Options *o) {
    if (!o->minimum && !o->gpu[0] && !o->gpu_mem && o->gpus == 1) {
        die("--gpu: name a card, or give its memory with --gpu-mem");
    }
}

// Prints the command line with these options, and the one that trains with them on a GPU.
static void commands_print(const Options *given) {
    char line[LINE];
    Options defaults, o = *given;
    options_default(&defaults);
    options_line(line, &o, &defaults);
    printf("%s %s\n", program_command, line);
    o.plan = o.fit = o.minimum = o.largest = o.json = o.gpu_mem = 0;
    o.gpu = "";
    options_line(line, &o, &defaults);
    printf("./train_gpt2cu %s\n", line);
}

int main(int argc, char **argv) {
    static Options o;
    program_name = "train_gpt2";
    if (!freopen("/stdout", "w", stdout) || !freopen("/stderr", "w", stderr)) {
        return 1;
    }
    if (argc > 1 && strcmp(argv[1], "tables") == 0) {
        tables_print();
        return 0;
    }
    const int commands = argc > 1 && strcmp(argv[1], "commands") == 0;
    argv[commands] = argv[0];
    options_parse(&o, argc - commands, argv + commands);
    refuse_here(&o);
    if (commands) {
        commands_print(&o);
        return 0;
    }
    return train_gpt2_main(argc, argv);
}
