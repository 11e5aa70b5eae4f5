// data/fit.c -- the fourth appendix: how fast a run will be and what fits.
//
// What it is: the time of a step, forecast from counts; the levels of recomputation and the homes
// that -r auto and --offload auto choose; what would make a plan fit, by price; the printed plan;
// --fit and --minimum; and the speed of the machine at hand, measured. Volume I (train_gpt2.c)
// includes it in its chapter Start-up and main.
//
// What it refuses to be: needed for training. It reads settings and plans, of which it builds as
// many as it likes, and changes no number of a run.
//
// Build:  with Volume I. It is also C++17
//
// Contents
//   1  Remedies
//   2  The printed plan
//   3  Fit and minimum
//   4  Measured speed

// -------------------------------------------------------------------------------------------------
// 1. Remedies
// What makes a plan smaller or fit, as a user would type it, with its price.

// What was typed to start this program, so that a printed command starts it again from there.
static const char *program_command = "./train_gpt2";

// Prints a command with these options, those that differ from their defaults, to be pasted.
static void command_print(const char *program, const Options *o) {
    char text[64], usual[64];
    Options defaults;
    options_default(&defaults);
    shell_print(program);
    for (int i = 0; i < OPTION_ROWS; i++) {
        const OptionRow *row = &option_rows[i];
        const char *value = option_text(text, o, row);
        if (value[0] && strcmp(value, option_text(usual, &defaults, row)) != 0) {
            const char letter[2] = {row->letter, 0};
            printf(" -%s%s", row->letter ? "" : "-", row->letter ? letter : row->name);
            if (row->type != OPT_FLAG) {
                printf(" ");
                shell_print(value);
            }
        }
    }
}

// Changes that free memory are steps on four axes; at step 0 things stay as they are.
enum { BY_LEVEL, BY_TYPE, BY_HOME, BY_BATCH, AXES };
enum { SAME_BITS, OTHER_SPLIT, OTHER_NUMBERS };  // what a change does to the numbers

// One or several changes as a command line says them, and their price.
typedef struct {
    int steps[AXES];
    char option[128], cost[96];
    Settings settings;
    size_t bytes, host_bytes;  // of the changed plan
    int kind;
    double slower;  // a token, in steps of B x T tokens
} Remedy;
enum { MAX_REMEDIES = 128 };

// The last step of an axis. Batches are halved, down to 1.
static int axis_steps(const Settings *s, int axis) {
    int halvings = 0;
    if (s->forward) {
        return 0;  // weights and a pass forward: no setting of training makes these smaller
    }
    while (s->B >> (halvings + 1)) {
        halvings++;
    }
    return axis == BY_LEVEL  ? RECOMPUTE_BLOCK
           : axis == BY_TYPE ? (s->dtype == TYPE_BF16 ? 2 : 0)
           : axis == BY_HOME ? (s->gpu ? HOST_RUNGS - 1 : 0)
                             : halvings;
}

// Another batch; the rows of a classifier chunk stay the default, if they are.
static void settings_batch(Settings *s, int B) {
    const size_t element = type_bytes(s->dtype);
    const int64_t N = (int64_t)s->B * s->T, changed = (int64_t)B * s->T;
    const int usual = s->logit_rows == default_logit_rows(&s->model, element, N, s->gpu);
    s->B = B;
    s->logit_rows = (int)(usual ? default_logit_rows(&s->model, element, changed, s->gpu)
                                : min_i64(s->logit_rows, changed));
}

// Takes a step on an axis and prints it into `option`. Returns 0 where it changes nothing. The low
// halves of weights go only together with the moments' precision: alone they free less than bf16
// moments do, and change numbers all the same.
static int axis_apply(Settings *s, int axis, int step, char option[64]) {
    const Settings before = *s;
    char homes[64];
    if (axis == BY_LEVEL) {
        settings_recompute(s, step, s->model.L);
        snprintf(option, 64, " -r %s", level_table[step].name);
    } else if (axis == BY_TYPE) {
        s->moment_dtype = TYPE_BF16;
        s->split_master = step == 2 ? 0 : s->split_master;
        s->home[HOME_OF_MASTER] = s->split_master ? s->home[HOME_OF_MASTER] : 0;
        snprintf(option, 64, "%s%s", before.moment_dtype == TYPE_BF16 ? "" : " --moments bf16",
                 s->split_master == before.split_master ? "" : " -w none");
    } else if (axis == BY_HOME) {
        settings_offload(s, host_rungs[step]);
        snprintf(option, 64, " --offload %s", offload_text(homes, s));
    } else {
        settings_batch(s, s->B >> step);
        snprintf(option, 64, " -b %d", s->B);
    }
    return memcmp((const void *)&before, (const void *)s, sizeof before) != 0;
}

// Fills in what the remedy's steps make of plan `p`. Returns 0 where one of them changes nothing or
// all together free nothing.
static int remedy_price(Remedy *r, const Plan *p) {
    static const char *const kinds[] = {"same bits", "-d keeps the step's tokens",
                                        "numbers change"};
    const Settings *now = &p->settings;
    const Speed v = speed_usual(now);
    Plan changed;
    r->settings = *now;
    r->option[0] = 0;
    r->kind = r->steps[BY_TYPE] ? OTHER_NUMBERS : r->steps[BY_BATCH] ? OTHER_SPLIT : SAME_BITS;
    for (int axis = 0; axis < AXES; axis++) {
        char option[64];
        if (r->steps[axis] && !axis_apply(&r->settings, axis, r->steps[axis], option)) {
            return 0;
        }
        strncat(r->option, r->steps[axis] ? option + !r->option[0] : "",
                sizeof r->option - 1 - strlen(r->option));
    }
    if (now->B % r->settings.B) {
        return 0;  // no number of these holds the step's tokens
    }
    plan_build(&changed, &r->settings);
    r->bytes = plan_taken(&changed);
    r->host_bytes = changed.host_bytes;
    plan_free(&changed);
    // Both in steps of as many tokens, of one micro-step before and of several after.
    const int64_t micros = now->B / r->settings.B;
    r->slower = forecast_tokens_per_s(&v, now, 1) /
                    forecast_tokens_per_s(&v, &r->settings, micros) - 1;
    int n = snprintf(r->cost, sizeof r->cost, "%.0f %% slower%s, %s", fmax(100 * r->slower, 0),
                     r->steps[BY_HOME] ? ", less with -d" : "", kinds[r->kind]);
    if (r->steps[BY_HOME]) {
        snprintf(r->cost + n, sizeof r->cost - (size_t)n, ", %s on the host",
                 bytes_text((double)r->host_bytes).s);
    }
    return r->bytes < plan_taken(p);
}

// Every single change that makes the plan smaller, axis by axis. Returns how many.
static int plan_remedies(const Plan *p, Remedy list[MAX_REMEDIES]) {
    int n = 0;
    // Levels, types of states and their homes are settings of training; a batch is cut by the user.
    if (p->settings.forward) {
        return 0;
    }
    for (int axis = 0; axis < AXES; axis++) {
        for (int step = 1; step <= axis_steps(&p->settings, axis) && n < MAX_REMEDIES; step++) {
            memset(list[n].steps, 0, sizeof list[n].steps);
            list[n].steps[axis] = step;
            n += remedy_price(&list[n], p);
        }
    }
    return n;
}

// What changes least comes first, then what costs least time.
static int remedy_compare(const void *a, const void *b) {
    const Remedy *x = (const Remedy *)a, *y = (const Remedy *)b;
    return x->kind != y->kind ? x->kind - y->kind
                              : (x->slower > y->slower) - (x->slower < y->slower);
}

// Whether a remedy among `n` takes no step further than `steps` on any axis.
static int remedy_includes(const Remedy *list, int n, const int *steps) {
    for (int i = 0; i < n; i++) {
        int axis = 0;
        while (axis < AXES && list[i].steps[axis] <= steps[axis]) {
            axis++;
        }
        if (axis == AXES) {
            return 1;
        }
    }
    return 0;
}

// What makes the plan fit `room`, by price: changes of which none can be left out or taken less
// far. Smaller steps are met before larger ones. Returns how many, 0: nothing does.
static int plan_cures(const Plan *p, const Room *room, Remedy list[MAX_REMEDIES]) {
    const Settings *s = &p->settings;
    int n = 0, steps[AXES] = {0}, axis;
    if (s->forward) {
        return 0;
    }
    do {
        if (n < MAX_REMEDIES && !remedy_includes(list, n, steps)) {
            memcpy(list[n].steps, steps, sizeof steps);
            n += remedy_price(&list[n], p) && list[n].bytes <= room->device &&
                 list[n].host_bytes <= room->host;
        }
        for (axis = AXES - 1; axis >= 0 && steps[axis] == axis_steps(s, axis); axis--) {
            steps[axis] = 0;
        }
        steps[max_i64(axis, 0)] += axis >= 0;
    } while (axis >= 0);
    qsort(list, (size_t)n, sizeof *list, remedy_compare);
    return n;
}

// What is said where nothing cures a plan: of training, and of what has no settings of training.
static const char no_cure[] = "no settings make it fit";
static const char generate_cure[] =
    "--generate takes weights and a KV cache; a smaller --seq-len (-t) makes the cache smaller";
static const char eval_cure[] =
    "--eval takes weights and a batch on its way forward; a smaller --batch (-b) takes less";
// Which of these is true of a run.
static const char *plan_no_cure(const Settings *s) {
    return s->cache ? generate_cure : s->forward ? eval_cure : no_cure;
}

// Ends the run before anything is allocated when `available` bytes cannot hold `need`: says how
// much is missing, and the cheapest settings that fit; where only host memory would help and there
// is too little, that.
static void plan_refuse(const Plan *p, size_t need, size_t available) {
    enum { SHOWN = 3 };
    char line[1024] = "";
    if (need <= available) {
        return;  // before the remedies, whose plans take a while
    }
    const size_t missing = need - available, host = (size_t)host_memory("").bytes;
    Room room;
    memset(&room, 0, sizeof room);
    room.device = plan_taken(p) > missing ? plan_taken(p) - missing : 0;
    room.host = host;
    Remedy *list = (Remedy *)alloc_zero(MAX_REMEDIES, sizeof *list);
    int n = plan_cures(p, &room, list), length = 0, lacks_host = 0;
    if (n == 0) {
        room.host = SIZE_MAX;
        n = plan_cures(p, &room, list);
        lacks_host = 1;
    }
    for (int i = 0; i < n && i < (lacks_host ? 1 : SHOWN); i++) {
        length += snprintf(line + length, sizeof line - (size_t)length, "; %s frees %s (%s)",
                           list[i].option,
                           bytes_text((double)(plan_taken(p) - list[i].bytes)).s, list[i].cost);
    }
    if (n == 0) {
        snprintf(line, sizeof line, "; %s", plan_no_cure(&p->settings));
    } else if (lacks_host) {
        snprintf(line + length, sizeof line - (size_t)length, ", where %s are free",
                 bytes_text((double)host).s);
    }
    free(list);
    die("the plan needs %s, only %s are available%s: %s short%s", bytes_text((double)need).s,
        bytes_text((double)available).s, available_limit, bytes_text((double)missing).s, line);
}

// The same for what a rank pins in the memory of its machine, of which it has `available` bytes.
static void plan_refuse_host(const Plan *p, size_t available, const char *limit) {
    if (p->host_bytes > available) {
        die("the plan keeps %s in host memory%s, only %s are available (%s): %s short; fewer "
            "states in --offload need less of it", bytes_text((double)p->host_bytes).s,
            p->settings.ranks > 1 ? " for each GPU" : "", bytes_text((double)available).s, limit,
            bytes_text((double)(p->host_bytes - available)).s);
    }
}

// -------------------------------------------------------------------------------------------------
// 2. The printed plan
// --plan, for people and as JSON.

// Prints the command that trains with these options and levels on the CPU or a GPU: this program as
// it was called, or the GPU's that stands beside it.
static void training_print(const Options *chosen, const char *levels, int gpu) {
    const char *slash = strrchr(program_command, '/');
    const int folder = slash ? (int)(slash + 1 - program_command) : 0;
    char beside[PATH_BYTES];
    Options defaults, o = *chosen;
    options_default(&defaults);
    o.recompute = levels;
    o.plan = o.fit = o.minimum = o.gpu_mem = 0;
    o.gpu = defaults.gpu;
    snprintf(beside, sizeof beside, "%.*strain_gpt2cu", folder, program_command);
    command_print(gpu && strcmp(program_name, "train_gpt2") == 0 ? beside : program_command, &o);
    printf("\n");
}

// Prints the command of what settings_auto() has chosen, where that is anything.
static void choice_print(const Plan *p, const Options *o) {
    const Settings *s = &p->settings;
    Options chosen = *o;
    const int homes = o->offload == OFFLOAD_AUTO && settings_offloads(s);
    const LevelsText levels = recompute_text(s);
    if (homes || (strcmp(o->recompute, "auto") == 0 && strcmp(levels.s, "none") != 0)) {
        Settings copy = *s;
        chosen.offload = homes ? settings_offload(&copy, 0) : o->offload;
        printf("chosen   ");
        training_print(&chosen, levels.s, s->gpu);
        printf("         so that it fits, same bits; %s of host memory\n\n",
               bytes_text((double)p->host_bytes).s);
    }
}

// A tick as --plan --json and dev/report.py call it: `head`, `3.qkv`, `3.re-qkv`.
static void tick_name(char name[32], const Settings *s, int tick) {
    Tick t = tick_at(s, tick);
    if (t.layer < 0) {
        snprintf(name, 32, "%s", stage_names[t.stage]);
    } else {
        snprintf(name, 32, "%d.%s%s", t.layer, t.again ? "re-" : "", stage_names[t.stage]);
    }
}

// Prints the plan as JSON, for dev/report.py: ticks by name, and every buffer with its place in
// time and memory.
static void plan_print_json(const Plan *p) {
    printf("{\"target\":\"%s\",\"total_bytes\":%zu,\"host_bytes\":%zu,\"ticks\":[",
           p->settings.gpu ? "gpu" : "cpu", p->device_bytes, p->host_bytes);
    for (int t = 0; t < p->ticks; t++) {
        char name[32];
        tick_name(name, &p->settings, t);
        printf("%s\"%s\"", t ? "," : "", name);
    }
    printf("],\"buffers\":[");
    for (int i = 0; i < p->buffer_count; i++) {
        const Buffer *b = &p->buffers[i];
        printf("%s\n{\"name\":\"%s\",\"group\":\"%s\",\"bytes\":%zu,\"offset\":%zu,\"first\":%d,"
               "\"last\":%d,\"home\":\"%s\"}",
               i ? "," : "", b->name, group_names[b->group], b->bytes, b->offset, b->first, b->last,
               b->home == HOME_HOST ? "host" : "device");
    }
    printf("]}\n");
}

// Prints the rule of thumb that people use instead of a plan, and where it errs: 16 bytes of
// weights, gradients and moments for each parameter, every activation in fp32, 2 GB for libraries.
static void plan_print_thumb(const Plan *p, size_t total) {
    const Settings *s = &p->settings;
    const Model *m = &s->model;
    if (s->forward) {
        return;  // the rule is one for training
    }
    double N = (double)s->B * s->T, parameters = (double)model_parameters(m);
    double activations = N * ((16.0 * m->L + 1) * m->C + m->Vp);
    double thumb = 16 * parameters + 4 * activations + 2e9;
    printf("\nrule of thumb: 16 B x parameters + 4 B x activations + 2 GB = %s + %s + 1.86 GiB = "
           "%s; the plan: %s\n",
           bytes_text(16 * parameters).s, bytes_text(4 * activations).s, bytes_text(thumb).s,
           bytes_text((double)total).s);
    printf("The plan differs because it keeps %d of %d logit rows, shares the bytes of buffers\n"
           "that are never in use together, counts each type's own size, and reserves for\n"
           "libraries only what is stated above.\n",
           s->logit_rows, s->B * s->T);
}

// A line of the plan's table: exact bytes for machines, rounded ones for people.
static void plan_print_line(const char *name, size_t bytes, const char *note) {
    printf("%-24s %18s %12s%s\n", name, count_text((int64_t)bytes).s,
           bytes_text((double)bytes).s, note);
}

// What --plan says of a GPU run alone: libraries, host memory, and what a step moves where not
// everything is whole on the device.
static void plan_print_gpu(const Plan *p, const Room *room, const Options *o) {
    const Settings *s = &p->settings;
    const int micros = (int)max_i64(step_micros(o, s), 1);
    const Traffic t = step_traffic(s, micros);
    char note[80], step[48] = "one micro-step";
    plan_print_line("library", room->library, "   reserved, not measured");
    if (s->ranks > 1) {
        snprintf(note, sizeof note, "   reserved, not measured: 12 MiB x %d channels x (%d peers + "
                 "1)", NCCL_CHANNELS, nccl_peers(s));
        plan_print_line("NCCL", nccl_estimate_bytes(s), note);
    }
    plan_print_line("total per GPU", p->device_bytes + room->library + nccl_estimate_bytes(s),
                    "   with the reserve");
    plan_print_line(s->ranks > 1 ? "host memory per GPU" : "host memory", p->host_bytes, "");
    if (micros > 1) {
        snprintf(step, sizeof step, "%d micro-steps", micros);
    }
    if (t.up + t.down > 0) {
        printf("a step of %s moves %s up to the GPU and %s down\n", step, bytes_text(t.up).s,
               bytes_text(t.down).s);
    }
    if (s->ranks > 1) {
        printf("a step of %s sends %s from each GPU: %s of gradients to add, %s to gather\n", step,
               bytes_text(t.reduced + t.gathered).s, bytes_text(t.reduced).s,
               bytes_text(t.gathered).s);
    }
}

// Prints how fast a run is said to be, and how long -x steps take, or a billion tokens.
static void forecast_print(const Settings *s, const Room *room, const Options *o) {
    const int64_t micros = step_micros(o, s);
    if (room->from && micros > 0 && !s->forward) {
        const double rate = forecast_tokens_per_s(&room->speed, s, micros);
        const int64_t run = o->steps * micros * s->ranks * s->B * s->T;
        const int64_t tokens = run ? run : 1000000000;
        printf("forecast: %s tokens/s, %s tokens in %s; %s\n", count_text((int64_t)rate).s,
               count_text(tokens).s, duration_text((double)tokens / rate).s, room->from);
    }
}

// The table of single changes and, where the plan does not fit, what would make it: the five
// cheapest, since there may be dozens.
static void plan_print_remedies(const Plan *p, const Room *room, size_t beside) {
    if (p->settings.forward) {
        printf("\n%s\n", plan_no_cure(&p->settings));
        return;
    }
    Remedy *list = (Remedy *)alloc_zero(MAX_REMEDIES, sizeof *list);
    int n = plan_remedies(p, list);
    printf("\n%-46s %12s %12s   cost\n", "this setting", "saves", "new total");
    for (int i = 0; i < n; i++) {
        printf("%-46s %12s %12s   %s\n", list[i].option,
               bytes_text((double)(plan_taken(p) - list[i].bytes)).s,
               bytes_text((double)(list[i].bytes + beside)).s, list[i].cost);
    }
    if (n == 0) {
        printf("no setting makes it smaller\n");
    }
    if (room->device > 0 && plan_taken(p) > room->device) {
        n = plan_cures(p, room, list);
        for (int i = 0; i < n && i < 5; i++) {
            printf("it fits with %s: %s\n", list[i].option, list[i].cost);
        }
        if (n == 0) {
            printf("%s\n", no_cure);
        }
    }
    free(list);
}

// The stage of ZeRO that divides the states so.
static int settings_zero(const Settings *s) {
    const int moments = s->home[HOME_OF_MOMENTS] & HOME_SHARD;
    return (moments + (s->home[HOME_OF_GRADIENTS] & HOME_SHARD) +
            (s->home[HOME_OF_WEIGHTS] & HOME_SHARD)) / HOME_SHARD;
}

// Prints the plan by group, whether it fits the room, on the device and on the host, what each
// setting would save, and the rule of thumb. Returns 0 when it does not fit.
static int plan_print(const Plan *p, const Room *room, const Options *o) {
    const Settings *s = &p->settings;
    const Model *m = &s->model;
    static const char *const types[] = {"fp32", "bf16", "fp16"};
    size_t device[GROUPS], host[GROUPS], sum = 0;
    const size_t beside = s->gpu ? room->library + nccl_estimate_bytes(s) : 0;
    const size_t total = plan_taken(p) + beside, all = room->device + beside;
    const int fits = !room->device || plan_taken(p) <= room->device;
    printf("memory plan of the %s run\nL%d NH%d C%d, vocabulary %d (%d rows), %s parameters; %s; "
           "B %d, T %d%s; -r %s",
           s->gpu ? "GPU" : "CPU", m->L, m->NH, m->C, m->V, m->Vp,
           count_text(model_parameters(m)).s, s->gpu ? types[s->dtype] : "fp32", s->B, s->T,
           s->cache ? " at a time" : "", recompute_text(s).s);
    if (recompute_cost(s) > 0) {
        printf(": %.1f %% more arithmetic", 100 * recompute_cost(s));
    }
    if (settings_offloads(s)) {
        char homes[64];
        printf("; --offload %s", offload_text(homes, s));
    }
    if (s->ranks > 1) {
        printf("; each of %d GPUs, -z %d", s->ranks, settings_zero(s));
    }
    printf("\n\n");
    // The groups at the peak and what the layout loses add up to the allocation.
    plan_groups(p, device, host);
    printf("%-24s %18s\n", "at the peak of a step", "bytes");
    for (int g = 0; g < GROUPS; g++) {
        if (device[g]) {
            plan_print_line(group_names[g], device[g], "");
        }
        sum += device[g];
    }
    plan_print_line("fragmentation", p->device_bytes - sum, "");
    plan_print_line(s->gpu ? "device allocation" : "allocation", p->device_bytes, "");
    if (s->gpu) {
        plan_print_gpu(p, room, o);
    } else if (p->host_bytes) {
        plan_print_line("in the host's place", p->host_bytes, "   as a GPU run keeps apart");
        plan_print_line("total", total, "");
    }
    if (room->device) {
        printf("%s: %s%s; %s, %s %s\n", room->where, bytes_text((double)all).s, available_limit,
               fits ? "fits" : "DOES NOT FIT",
               bytes_text(fits ? (double)(all - total) : (double)(total - all)).s,
               fits ? "free" : "short");
    }
    const int host_fits = p->host_bytes <= room->host;
    if (!host_fits) {  // what plan_refuse_host() says of a run
        const HostMemory h = host_memory("");
        printf("host memory of this machine: %s (%s); DOES NOT FIT, %s short; fewer states in "
               "--offload need less of it\n", bytes_text((double)room->host).s, h.limit,
               bytes_text((double)(p->host_bytes - room->host)).s);
    }
    forecast_print(s, room, o);
    plan_print_remedies(p, room, beside);
    plan_print_thumb(p, total);
    return fits && host_fits;
}

// -------------------------------------------------------------------------------------------------
// 3. Fit and minimum
// --fit tries settings, plans and forecasts each, and recommends one by its command line; --minimum
// is the smallest of them. Settings are tried as options that are parsed like a user's, so that
// what is recommended is what a run accepts.

// What --minimum decides itself, or does not depend on.
static const char *const minimum_decides[] = {"batch",   "recompute", "logit-rows", "moments",
                                              "master", "offload",   "gpu-mem"};

// Looks at the options of --fit and --minimum before settings are made of them. Ends the run at
// what they would ignore, and where no batch divides -d's tokens.
static void fit_options(const Options *o, const Model *m) {
    Settings least;
    if (!o->fit && !o->minimum) {
        return;
    }
    const size_t count = o->minimum ? sizeof minimum_decides / sizeof minimum_decides[0] : 0;
    for (size_t i = 0; i < count; i++) {
        if (option_given(o, minimum_decides[i])) {
            die("--minimum finds what is least, whatever memory there is: leave --%s out",
                minimum_decides[i]);
        }
    }
    // The smallest batch that is tried divides whatever a larger one does.
    memset(&least, 0, sizeof least);
    least.ranks = (int)o->gpus;
    least.B = o->fit && option_given(o, "batch") ? (int)o->batch : 1;
    least.T = o->seq_len ? (int)o->seq_len : m->maxT;
    step_whole_micros(o, &least);
}

// Settings that fit as options that a user could type, and what they take. `type` is a row of
// fit_types, `rung` one of host_rungs.
typedef struct {
    Options o;
    Settings settings;
    size_t bytes, host_bytes;
    double tokens_per_s;
    int type, rung;
} FitPoint;
enum { MAX_POINTS = 4096 };

// Number types that --fit any tries with bf16 weights, 0: as asked.
static const struct {
    int64_t moments, master;
} fit_types[] = {{0, 0}, {MOMENTS_BF16, MASTER_SPLIT}, {MOMENTS_BF16, MASTER_NONE}};
enum { FIT_TYPES = sizeof fit_types / sizeof fit_types[0] };

// The micro-batches that --fit tries: 1, 2, 3, 4, 6, 8, 12, 16, ...
static int next_batch(int B) { return B < 2 ? B + 1 : B & (B - 1) ? B / 3 * 4 : B / 2 * 3; }

// Fills in a point from its options: settings, homes and levels where they are left to the program
// (`level` -1: the cheapest mixture that fits, else this one in all blocks), plan, speed. Returns
// whether it fits.
static int fit_point(FitPoint *f, const Model *m, int level, const Room *room) {
    Plan p;
    Settings *s = &f->settings;
    const int levels = strcmp(f->o.recompute, "auto") == 0, homes = f->o.offload == OFFLOAD_AUTO;
    settings_from_options(s, &f->o, m, room->speed.gpu);
    if (homes) {
        f->o.offload = settings_offload(s, host_rungs[f->rung]);
        f->o.offload += f->o.offload ? 0 : (int64_t)OFFLOAD_AUTO;  // which finds that all fits
    }
    if (levels && level >= 0) {
        settings_recompute(s, level, m->L);
    } else if (levels) {
        settings_fit_levels(s, &room->speed, room->device);
    }
    plan_build(&p, s);
    f->bytes = plan_taken(&p);
    f->host_bytes = p.host_bytes;
    f->tokens_per_s = forecast_tokens_per_s(&room->speed, s, max_i64(step_micros(&f->o, s), 1));
    plan_free(&p);
    return f->bytes <= room->device && f->host_bytes <= room->host;
}

// Whether --fit tries a row of fit_types: what the user has asked for stays, and is row 0.
static int fit_tries_type(const Options *asked, int type) {
    const int64_t moments = fit_types[type].moments, master = fit_types[type].master;
    return type == 0 || ((moments == asked->moments || !option_given(asked, "moments")) &&
                         (master == asked->master || !option_given(asked, "master")) &&
                         (moments != asked->moments || master != asked->master));
}

// Every point that --fit looks at and that fits: number types, batches until the smallest plan does
// not fit, homes and levels, each where the options leave it open. Returns how many.
static int fit_points(FitPoint list[MAX_POINTS], const Options *asked, const Model *m,
                      const Room *room) {
    const int64_t T = asked->seq_len ? asked->seq_len : m->maxT;
    const int narrow =
        asked->fit != FIT_BITS && room->speed.gpu && gpu_dtype(asked) == DTYPE_BF16;
    const int one = option_given(asked, "batch");
    const int rungs = asked->offload == OFFLOAD_AUTO && room->speed.gpu ? HOST_RUNGS : 1;
    const int is_auto = strcmp(asked->recompute, "auto") == 0;
    const int levels = asked->fit == FIT_ALL && is_auto ? RECOMPUTE_LEVELS : 1;
    int n = 0;
    for (int i = 0; i < (narrow ? FIT_TYPES : 1) * rungs * levels; i++) {
        const int type = i / levels / rungs;
        int fits = fit_tries_type(asked, type);
        for (int64_t B = one ? asked->batch : 1;
             fits && B * T <= 1 << 26 && B <= option_find("batch")->high && n < MAX_POINTS;
             B = one ? INT64_MAX / T : next_batch((int)B)) {
            FitPoint *f = &list[n];
            f->o = *asked;
            f->o.batch = B;
            f->type = type;
            f->rung = i / levels % rungs;
            if (asked->gpus > 1 && host_rungs[f->rung] == HOST_GRADIENTS) {
                break;  // gradients of several GPUs stay there: it is the rung before
            }
            if (asked->logit_rows > B * T) {
                continue;  // fewer tokens than that option takes
            }
            if (type > 0) {
                f->o.moments = fit_types[type].moments;
                f->o.master = fit_types[type].master;
            }
            // In place of nothing recomputed stands what fits with the least of it.
            fits = fit_point(f, m, i % levels ? i % levels : -1, room);
            const int64_t micros = step_micros(asked, &f->settings);
            // A run refuses a step that the data does not fill once.
            n += fits && micros > 0 &&
                 (!room->windows || micros * f->settings.ranks * B <= room->windows);
        }
    }
    return n;
}

// A row of the table of fit_print_points().
static void fit_print_point(const FitPoint *f) {
    char homes[64], types[64] = "";
    const Settings *s = &f->settings;
    static const char *const names[] = {"fp32", "bf16", "fp16"};
    snprintf(types, sizeof types, "%s%s%s", s->gpu ? names[s->dtype] : "fp32",
             s->gpu && s->moment_dtype == TYPE_BF16 ? ", moments bf16" : "",
             s->dtype == TYPE_BF16 && !s->split_master ? ", -w none" : "");
    printf("%5d  %-18s %-26s %10s %10s %10s  %s\n", s->B, recompute_text(s).s, types,
           bytes_text((double)f->bytes).s, bytes_text((double)f->host_bytes).s,
           count_text((int64_t)f->tokens_per_s).s, offload_text(homes, s));
}

// A point that another one beats: no slower, and no more bytes on either side, one of them better
// (or, of equals, earlier in the list).
static int fit_is_beaten(const FitPoint *list, int n, int i) {
    const FitPoint *f = &list[i];
    for (int k = 0; k < n; k++) {
        const FitPoint *g = &list[k];
        const int same = g->bytes == f->bytes && g->host_bytes == f->host_bytes &&
                         g->tokens_per_s == f->tokens_per_s;
        if (g->bytes <= f->bytes && g->host_bytes <= f->host_bytes &&
            g->tokens_per_s >= f->tokens_per_s && (!same || k < i)) {
            return 1;
        }
    }
    return 0;
}

// Of points that are about as fast, the one that takes less for granted: host memory, then other
// numbers, then a large batch.
static int point_is_plainer(const FitPoint *a, const FitPoint *b) {
    return a->rung != b->rung   ? a->rung < b->rung
           : a->type != b->type ? a->type < b->type
                                : a->o.batch < b->o.batch;
}

// The plainest of the points of a number type and a rung of homes (-1: of any) that are within half
// a percent of the fastest. NULL: there is none.
static const FitPoint *fit_fastest(const FitPoint *list, int n, int type, int rung) {
    const FitPoint *best = NULL;
    double most = 0;
    for (int i = 0; i < 2 * n; i++) {
        const FitPoint *f = &list[i % n];
        if ((type < 0 || f->type == type) && (rung < 0 || f->rung == rung)) {
            most = fmax(most, f->tokens_per_s);  // known after the first n
            if (i >= n && f->tokens_per_s >= 0.995 * most && (!best || point_is_plainer(f, best))) {
                best = f;
            }
        }
    }
    return best;
}

// What --fit recommends: with -d, which holds a step's tokens, the fastest of all. Without it steps
// differ in size, and speeds compare no two rungs: the lowest one that fits, and there the fastest.
static const FitPoint *fit_choose(const FitPoint *list, int n, int held) {
    const FitPoint *best = held ? fit_fastest(list, n, -1, -1) : NULL;
    for (int rung = 0; rung < HOST_RUNGS && !best; rung++) {
        best = fit_fastest(list, n, -1, rung);
    }
    return best;
}

// Fewer bytes of the device first, then of the host.
static int point_compare(const void *a, const void *b) {
    const FitPoint *x = (const FitPoint *)a, *y = (const FitPoint *)b;
    return x->bytes != y->bytes ? (x->bytes > y->bytes) - (x->bytes < y->bytes)
                                : (x->host_bytes > y->host_bytes) - (x->host_bytes < y->host_bytes);
}

// The rows of --fit: of each number type and rung of homes the fastest point, with `all` every
// point that no other beats, by device bytes.
static void fit_print_points(const FitPoint *list, int n, int all) {
    FitPoint *rows = (FitPoint *)alloc_zero(MAX_POINTS, sizeof *rows);
    int count = 0;
    for (int i = 0; i < n && all; i++) {
        if (!fit_is_beaten(list, n, i)) {
            rows[count++] = list[i];
        }
    }
    for (int i = 0; i < FIT_TYPES * HOST_RUNGS && !all; i++) {
        const FitPoint *f = fit_fastest(list, n, i / HOST_RUNGS, i % HOST_RUNGS);
        if (f) {
            rows[count++] = *f;
        }
    }
    if (all) {
        qsort(rows, (size_t)count, sizeof *rows, point_compare);
    }
    printf("%5s  %-18s %-26s %10s %10s %10s  %s\n", "B", "-r", "types", "device", "host",
           "tokens/s", "--offload");
    for (int i = 0; i < count; i++) {
        fit_print_point(&rows[i]);
    }
    free(rows);
}

// What of these settings changes numbers, for people.
static void print_changes(const Settings *s, const char *split) {
    printf("same bits as any other -r and --offload%s%s%s\n", split,
           s->moment_dtype == TYPE_BF16 ? "; --moments bf16 changes numbers" : "",
           s->dtype == TYPE_BF16 && !s->split_master ? "; -w none changes numbers" : "");
}

// Whose the bytes before it are; nothing where there is one GPU.
static ShortText each_text(const Options *o) {
    ShortText text = {""};
    if (o->gpus > 1) {
        snprintf(text.s, sizeof text.s, ", each of %d GPUs", (int)o->gpus);
    }
    return text;
}

// What libraries take of the device of a rank, NCCL's buffers among them.
static double reserved_bytes(const Options *o, size_t library) {
    Settings s;
    memset(&s, 0, sizeof s);
    s.ranks = (int)o->gpus;
    return (double)(library + nccl_estimate_bytes(&s));
}

// --fit. Returns the program's exit status: 1 when nothing fits.
static int fit_command(const Options *o, const Model *m, const Room *room) {
    FitPoint *list = (FitPoint *)alloc_zero(MAX_POINTS, sizeof *list);
    if (room->device <= 1 && room->library) {
        die("--fit: %s: nothing is left beside %s, which are reserved for libraries", room->where,
            bytes_text(reserved_bytes(o, room->library)).s);
    }
    const int n = fit_points(list, o, m, room);
    const int64_t T = o->seq_len ? o->seq_len : m->maxT;
    const int64_t B = option_given(o, "batch") ? o->batch : 1;
    const int64_t step = max_i64(o->tokens_per_step, o->gpus * B * T);
    const FitPoint *best = fit_choose(list, n, o->tokens_per_step > 0);
    printf("%s: what fits %s for the plan%s; tokens/s %s%s\n", o->model,
           bytes_text((double)room->device).s, each_text(o).s, o->gpus > 1 ? "of all " : "",
           room->from         ? room->from
           : room->speed.gpu ? "of a 4090 in bf16: this run's are unknown, and these only compare"
                             : "of two cores: this run's are unknown, and these only compare");
    if (best) {
        fit_print_points(list, n, o->fit == FIT_ALL);
        printf(o->tokens_per_step ? "fastest: " : "least on the host, then fastest: ");
        training_print(&best->o, recompute_text(&best->settings).s, room->speed.gpu);
        print_changes(&best->settings, o->tokens_per_step
                                           ? "; -d is held, split into another number of batches"
                                           : "; a step is B x T tokens, -d TOKENS would hold it");
    } else if (room->windows && room->windows * T < step) {
        printf("nothing fits: %s has %s sequences, and a step takes %s\n", o->train_data,
               count_text(room->windows).s, count_text(step / T).s);
    } else {
        printf("nothing fits: --minimum says what is the least\n");
    }
    free(list);
    return best ? 0 : 1;
}

// --minimum: the least memory that a run can take, at B = 1: on a GPU with nothing offloaded and
// with everything at home on the host (of several GPUs all but the gradients, which stay there),
// and, `cpu`, in the CPU program, unless it lacks an option that is given. Number types change only
// where nothing is offloaded: on the host they take no device memory.
static void minimum_command(const Options *asked, const Model *m, int cpu) {
    static const char *const titles[] = {"GPU, nothing offloaded", "GPU, everything on the host",
                                         "CPU", "GPU, all but gradients on the host"};
    const int wide = gpu_dtype(asked) != DTYPE_BF16;  // narrow moments and masters need bf16
    Room all;
    memset(&all, 0, sizeof all);
    all.device = all.host = SIZE_MAX;
    FitPoint *f = (FitPoint *)alloc_zero(1, sizeof *f);
    const int narrow = (asked->dtype && asked->dtype != DTYPE_FP32) || asked->grad_dtype ||
                       asked->workspace;
    for (int i = 0; i < 2 + (cpu && !narrow && asked->gpus == 1); i++) {
        all.speed.gpu = i < 2;
        f->o = *asked;
        f->o.recompute = "block";
        f->o.batch = 1;
        f->o.logit_rows = min_i64(128, asked->seq_len ? asked->seq_len : m->maxT);
        f->o.offload = OFFLOAD_AUTO;
        // All that cuBLASLt asks of a workspace is that it begins at a multiple of 256 bytes.
        f->o.workspace = asked->workspace || !all.speed.gpu ? asked->workspace : 256;
        f->rung = i == 1 ? HOST_RUNGS - 1 : 0;
        f->o.moments = i == 0 && !wide ? MOMENTS_BF16 : MOMENTS_FP32;
        f->o.master = i == 0 && !wide ? MASTER_NONE : MASTER_SPLIT;
        fit_point(f, m, 0, &all);
        printf("%s: %s", titles[i == 1 && asked->gpus > 1 ? 3 : i],
               bytes_text((double)f->bytes).s);
        if (all.speed.gpu) {
            printf(" and %s for libraries (reserved, not measured)",
                   bytes_text(reserved_bytes(asked, library_reserve_bytes)).s);
        }
        printf(", %s of host memory%s\n  ", bytes_text((double)f->host_bytes).s,
               each_text(asked).s);
        training_print(&f->o, "block", all.speed.gpu);
        printf("  ");
        print_changes(&f->settings, all.speed.gpu
                                        ? "; --logit-rows, --workspace and -b change rounding"
                                        : "; --logit-rows and -b change rounding");
    }
    free(f);
}

// -------------------------------------------------------------------------------------------------
// 4. Measured speed
// The source of a plan's forecast for the machine at hand: on the CPU, small models that are timed
// each time; on a GPU, what runs have measured and kept.

// Seconds of a micro-step, and of an update, of a model of random weights at `s`: the middle one of
// three after a first that is not counted.
static double engine_seconds(const Program *program, const Settings *s, double *update) {
    enum { TIMES = 3 };
    double micro_ms[TIMES], update_ms[TIMES];
    const int N = s->B * s->T;
    const int64_t all = tensor_offset(&s->model, TENSORS, 0);
    real *piece = (real *)alloc_zero(PIECE, sizeof(real));
    Token *tokens = (Token *)alloc_zero((size_t)N, sizeof(Token));
    Options o;
    Plan p;
    Engine e;
    options_default(&o);
    plan_build(&p, s);
    program->open(&e, &p);
    for (int i = 0; i < PIECE; i++) {  // zeros would be faster than numbers are
        piece[i] = (real)(0.004 * (i * 7 % 11 - 5));
    }
    for (int64_t i = 0; i < all; i += PIECE) {
        e.write(&e, STATE_WEIGHTS, i, piece, min_i64(PIECE, all - i));
    }
    for (int i = 0; i < N; i++) {
        tokens[i] = (Token)((int64_t)i * 7919 % s->model.V);
    }
    for (int k = -1; k < TIMES; k++) {
        const double start = now_ms();
        e.micro_step(&e, tokens, tokens, 0, 1);
        e.read(&e, STATE_WEIGHTS, 0, piece, 1);  // which waits for what is queued
        const double middle = now_ms();
        e.update(&e, &o, 0, HUGE_VAL, 0);
        micro_ms[max_i64(k, 0)] = middle - start;
        update_ms[max_i64(k, 0)] = now_ms() - middle;
    }
    e.close(&e);
    plan_free(&p);
    free(piece);
    free(tokens);
    *update = 1e-3 * median(update_ms, TIMES);
    return 1e-3 * median(micro_ms, TIMES);
}

// FLOPs of a calibration: four micro-steps each of two blocks, of two blocks computed again, and of
// one block with the vocabulary.
static double calibration_flops(const Settings *s) {
    const double C = s->model.C;
    return (800 * C * C + 24 * C * s->model.Vp) * s->B * s->T;
}

// The settings of a calibration: the run's width on few blocks, and of its batch what takes at most
// `flops`. A whole batch is better: the activations of a small one stay in caches.
static Settings calibration_settings(const Settings *run, double flops) {
    Settings s = *run;
    memset(s.home, 0, sizeof s.home);
    s.model.L = 2;
    settings_recompute(&s, RECOMPUTE_NONE, 0);
    while (s.B > 1 && calibration_flops(&s) > flops) {
        settings_batch(&s, s.B / 2);
    }
    while (s.T > 64 && calibration_flops(&s) > flops) {
        s.T /= 2;
        s.logit_rows = (int)min_i64(s.logit_rows, (int64_t)s.B * s.T);
    }
    return s;
}

// How fast this machine is at a run's settings: the usual rates, corrected by what small models
// take, of one and of two of the run's blocks. Two blocks and hardly any vocabulary give the
// blocks' time, the same with -r block what is computed again, one block with the run's vocabulary
// the rest. A smaller batch is taken to be as fast, a token. `dev/bench_cpu.c forecast` holds it
// against the steps of ten settings. Returns 0 if the small models take more than `bytes`, or more
// than `flops` to time.
static int speed_measure(Speed *speed, const Program *program, const Settings *run, size_t bytes,
                         double flops) {
    enum { TWO, AGAIN, ONE, MODELS };
    Settings s = calibration_settings(run, flops);
    if (calibration_flops(&s) > flops) {
        return 0;
    }
    double seconds[MODELS] = {0}, predicted[MODELS] = {0}, rest[MODELS] = {0}, update[MODELS];
    Speed v = speed_usual(run);
    for (int i = 0; i < MODELS; i++) {
        s.model.L = i == ONE ? 1 : 2;
        model_set_vocabulary(&s.model, i == ONE ? run->model.V : min_int(run->model.V, 128));
        settings_recompute(&s, i == AGAIN ? RECOMPUTE_BLOCK : RECOMPUTE_NONE, s.model.L);
        if (plan_bytes(&s) > bytes) {
            return 0;
        }
        const Speed usual = speed_usual(&s);
        predicted[i] = forecast_micro(&usual, &s, 1);
        rest[i] = forecast_micro(&usual, &s, 0);
        seconds[i] = engine_seconds(program, &s, &update[i]);
        v.byte = i == ONE ? update[i] / update_bytes(&s) : v.byte;
    }
    // Blocks have two factors: of the stages that may come again, and of the others.
    const double repeat = predicted[AGAIN] - predicted[TWO];
    const double others = predicted[TWO] - rest[TWO] - repeat;
    const double again = fmax((seconds[AGAIN] - seconds[TWO]) / repeat, 0.01);
    const double blocks = seconds[TWO] * (1 - rest[TWO] / predicted[TWO]);
    const double other = fmax((blocks - again * repeat) / others, 0.01);
    const double outside = fmax((seconds[ONE] - blocks / 2) / rest[ONE], 0.01);
    for (int stage = 0; stage < STAGES; stage++) {
        v.token[stage] *= stage <= F_GELU ? again : stage < BLOCK_STAGES ? other : outside;
    }
    v.block *= other;
    v.chunk *= outside;
    v.step = 0;
    *speed = v;
    return 1;
}

// What a GPU's speed depends on: its name, the width, the batch and the types.
static void speed_key(char key[192], const char *device, const Settings *s) {
    const Model *m = &s->model;
    snprintf(key, 192, "%.80s: C %d NH %d V %d B %d T %d rows %d types %d %d %d %d", device, m->C,
             m->NH, m->V, s->B, s->T, s->logit_rows, (int)s->dtype, (int)s->grad_dtype,
             (int)s->moment_dtype, s->split_master);
}

// Reads the last speed that was kept for `key`, in a file with a line for each: the key, then the
// numbers of a Speed. 0: there is none.
static int speed_load(Speed *speed, const char *key) {
    char line[1024];
    int found = 0;
    FILE *f = cache_open("speed", "r");
    while (f && fgets(line, sizeof line, f)) {
        const size_t n = strlen(key);
        Speed v = *speed;
        double *const numbers[] = {&v.block, &v.chunk, &v.byte, &v.link_byte};
        char *text = line + n, *end = text;
        if (strncmp(line, key, n) != 0 || line[n] != '\t') {
            continue;
        }
        for (int i = 0; i < STAGES + 4 && end; i++, text = end) {
            double *number = i < STAGES ? &v.token[i] : numbers[i - STAGES];
            *number = strtod(text, &end);
            end = end != text && *number >= 0 && isfinite(*number) ? end : NULL;
        }
        if (end && *end == '\n') {
            v.step = 0;
            *speed = v;
            found = 1;
        }
    }
    if (f) {
        fclose(f);
    }
    return found;
}

// Appends a speed in one write, so that runs that start at once do not mix their lines.
static void speed_save(const Speed *v, const char *key) {
    char line[1024];
    int n = snprintf(line, sizeof line, "%s\t", key);
    for (int i = 0; i < STAGES; i++) {
        n += snprintf(line + n, sizeof line - (size_t)n, "%.6g ", v->token[i]);
    }
    n += snprintf(line + n, sizeof line - (size_t)n, "%.6g %.6g %.6g %.6g\n", v->block, v->chunk,
                  v->byte, v->link_byte);
    FILE *f = cache_open("speed", "a");
    if (f) {
        fwrite(line, 1, (size_t)n, f);
        fclose(f);
    }
}

// Fills in how fast the machine at hand is, if that can be known, for a plan: the CPU's speed is
// measured, which takes no longer than three of its steps or 15 % of a run of so many (0: unknown),
// half of that for the FLOPs that are counted; a GPU's is what runs have kept.
static void room_measure(Room *room, const Program *program, const Settings *s, int64_t micros,
                         int64_t steps) {
    const double step = model_flops_per_token(&s->model, s->T) * s->B * s->T * (double)micros;
    const double most = step / 2 * fmin(3, steps ? 0.15 * (double)steps : 3);
    char key[192], device[96] = "";
    if (s->ranks > 1 || s->forward) {
        return;
    }
    if (program->device) {
        if (program->device(device)) {
            speed_key(key, device, s);
            room->from = speed_load(&room->speed, key) ? "measured on this GPU" : NULL;
        }
        return;
    }
    const double flops = fmin(4e11, most);
    const Settings small = calibration_settings(s, flops);
    if (calibration_flops(&small) > 2e10) {  // less takes two cores no half second
        printf("measuring this machine's speed for the forecast\n");
        fflush(stdout);
    }
    if (speed_measure(&room->speed, program, s, room->device, flops)) {
        room->from = "measured on this machine just now";
    }
}

// Seconds that a micro-step takes at the usual rates; on a GPU of which the peak is known, at that
// GPU's share of the usual one's.
static double micro_guess(const Settings *s, double peak_flops) {
    const Speed usual = speed_usual(s);
    const double computes = forecast_micro(&usual, s, 1);
    const double micro = forecast_step(&usual, s, 2) - forecast_step(&usual, s, 1);
    const double share = s->gpu && peak_flops > 0 ? peak_flops / usual_gpu.products : 1;
    return micro > computes ? micro : computes / share;
}

// Seconds of a step at the usual rates that no micro-step takes.
static double update_guess(const Settings *s) {
    const Speed usual = speed_usual(s);
    return fmax(2 * forecast_step(&usual, s, 1) - forecast_step(&usual, s, 2), 0);
}

// Keeps for later plans how fast this GPU is, from the seconds of a micro-step: the usual rates,
// all those of the device scaled alike. Nothing is kept if the speed of these settings is known, or
// if the run moves states to the host, because then the link may be what it waits for.
static void speed_keep(const Program *program, const Settings *s, double seconds) {
    char key[192], device[96];
    Speed v = speed_usual(s);
    const double share = seconds / forecast_micro(&v, s, 1);
    if (settings_offloads(s) || !program->device(device)) {
        return;
    }
    speed_key(key, device, s);
    if (!speed_load(&v, key)) {
        for (int stage = 0; stage < STAGES; stage++) {
            v.token[stage] *= share;
        }
        v.block *= share;
        v.chunk *= share;
        v.byte *= share;
        speed_save(&v, key);
    }
}
