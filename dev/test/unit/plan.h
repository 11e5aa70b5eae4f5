// plan.h -- tests of the model's sizes, the memory plan, sharding and offload: arithmetic over many
// random settings, and the arena, which detects the use of a buffer outside its lifetime.

static Options default_options() {
    Options o;
    options_default(&o);
    return o;
}

static Model shape(const char *e, int V) {
    Model m;
    model_parse(&m, e);
    model_set_vocabulary(&m, V);
    return m;
}

// Returns a tensor's offset in the full state of a single rank, where buckets are back to back.
static int64_t tensor_offset(const Model *m, int tensor, int layer) {
    const Range p = tensor_range(m, tensor, layer, 0, 0);
    return bucket_at(m, 1, p.bucket).offset + p.first;
}

// The presets have GPT-2's parameter counts; tensors fill their buckets without overlap.
TEST(model_sizes, HOST) {
    // GPT-2's published parameter counts; buffers also hold 47 rows that pad the vocabulary.
    static const struct {
        const char *name;
        int64_t parameters;
    } known[] = {{"d12", 124439808}, {"gpt2", 124439808}, {"d24", 354823168}, {"d36", 774030080},
                 {"d48", 1557611200}};
    for (auto &k : known) {
        Model m = shape(k.name, GPT2_VOCABULARY);
        expect(model_parameters(&m) == k.parameters, "%s: %" PRId64, k.name, model_parameters(&m));
        expect(model_elements(&m) == k.parameters + 47 * m.C, "%s", k.name);
        expect(m.maxT == 1024 && m.Vp == 50304, "%s", k.name);
    }
    Model m = shape("l3h5c35t9", 257);
    std::map<int, std::map<int64_t, int64_t>> tensors;  // for each bucket: begin -> end
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(&m, tensor); l++) {
            const Range p = tensor_range(&m, tensor, l, 0, tensor_size(&m, tensor));
            expect(p.first % TENSOR_ALIGN == 0 && !tensors[p.bucket].count(p.first), "%s of %d",
                   tensor_table[tensor].name, l);
            tensors[p.bucket][p.first] = p.first + round_up_i64(p.count, TENSOR_ALIGN);
        }
    }
    expect((int)tensors.size() == model_buckets(&m) && model_buckets(&m) == 3 + m.L);
    for (const auto &[bucket, pieces] : tensors) {
        int64_t end = 0;
        for (const auto &[first, next] : pieces) {
            expect(first == end, "bucket %d at %d", bucket, (int)end);
            end = next;
        }
        expect(bucket_at(&m, 1, bucket).count == end, "bucket %d", bucket);
    }
    // 6 x (parameters + padding) + 6 L C T, d12 at T 1024: 746,855,424 + 56,623,104.
    m = shape("d12", GPT2_VOCABULARY);
    expect(model_flops_per_token(&m, 1024) == 803478528.0);
}

static uint64_t draw_state = 1;
static int draw(int low, int high) {  // low..high
    uint32_t r[4];
    philox4x32(r, 5, draw_state++, 0, 0);
    return low + (int)(r[0] % (uint32_t)(high - low + 1));
}

// Returns random settings for a CPU or GPU run, with every field within its range.
static Settings draw_settings() {
    Settings s;
    memset(&s, 0, sizeof s);
    int NH = draw(1, 5), T = draw(1, 70);
    s.model = shape(text("l%dh%dc%dt%d", draw(1, 9), NH, NH * draw(1, 40), T + draw(0, 9)).c_str(),
                    draw(2, 3000));
    s.ranks = 1;
    s.B = draw(1, 9);
    s.T = T;
    s.threads = draw(1, 8);
    s.logit_rows = draw(1, s.B * s.T);
    int level = draw(0, RECOMPUTE_LEVELS - 1);
    settings_recompute(&s, level, draw(0, 1) ? s.model.L : draw(0, s.model.L));
    s.gpu = draw(0, 1);
    s.dtype = s.grad_dtype = s.moment_dtype = s.gpu ? TYPE_FP32 : TYPE_REAL;
    if (s.gpu) {
        s.dtype = draw(0, 1) ? TYPE_BF16 : draw(0, 1) ? TYPE_FP16 : TYPE_FP32;
        s.grad_dtype = s.dtype == TYPE_BF16 && draw(0, 1) ? TYPE_BF16 : TYPE_FP32;
        s.moment_dtype = draw(0, 1) ? TYPE_BF16 : TYPE_FP32;
        s.split_master = s.dtype == TYPE_BF16 && draw(0, 1);
        s.workspace = default_workspace(&s.model);
        s.placement[KIND_MOMENTS] = (Placement)draw(0, 1);
        s.placement[KIND_MASTER] = settings_has_master(&s) ? (Placement)draw(0, 1) : PLACE_DEVICE;
    }
    return s;
}

// Returns random settings for a GPU run with any state offloaded and up to 1,024 ranks.
static Settings draw_placements() {
    static const int ranks[] = {1, 2, 3, 4, 7, 8, 1024};
    Settings s = draw_settings();
    s.gpu = 1;
    s.dtype = draw(0, 1) ? TYPE_BF16 : TYPE_FP32;
    s.grad_dtype = s.dtype;
    s.moment_dtype = draw(0, 1) ? TYPE_BF16 : TYPE_FP32;
    s.split_master = s.dtype == TYPE_BF16 && draw(0, 1);
    s.ranks = ranks[draw(0, 6)];
    const int stage = draw(0, 3);
    for (int state = 0; state < KINDS; state++) {
        const int from = state_table[state].zero;
        const int sharded = s.ranks > 1 && from && from <= stage;
        const int needs_one = state == KIND_GRADIENTS || (state == KIND_WEIGHTS && stage < 3);
        const int hosted = draw(0, 1) && !(needs_one && s.ranks > 1);
        s.placement[state] = (uint8_t)((sharded ? PLACE_SHARD : 0) | (hosted ? PLACE_HOST : 0));
    }
    s.fp8 = s.dtype == TYPE_BF16 && draw(0, 1);
    return s;
}

// The forecast of settings without a plan.
static Forecast forecast_of(const Speed *v, const Settings *s, int64_t micros) {
    Plan p;
    plan_stages(&p, s);
    const Forecast f = forecast_run(v, &p, micros, SHOW_NONE);
    plan_free(&p);
    return f;
}
static double forecast_step(const Speed *v, const Settings *s, int64_t micros) {
    return forecast_of(v, s, micros).seconds;
}
static double forecast_tokens_per_s(const Speed *v, const Settings *s, int64_t micros) {
    return (double)micros * s->ranks * s->B * s->T / forecast_step(v, s, micros);
}
static Traffic step_traffic(const Settings *s, int64_t micros) {
    const Speed v = default_speed(s);
    return forecast_of(&v, s, micros).traffic;
}

static Settings planned(const Text &options) {
    Options o;
    Settings s;
    Model m;
    parse(&o, ("--plan " + options).c_str());
    model_parse(&m, o.model);
    model_set_vocabulary(&m, GPT2_VOCABULARY);
    settings_from_options(&s, &o, &m, 1);
    return s;
}

static Text settings_text(const Settings &s) {
    return text("L%d NH%d C%d V%d B%d T%d logit rows %d -r %s gpu %d dtype %d threads %d",
                s.model.L, s.model.NH, s.model.C, s.model.V, s.B, s.T, s.logit_rows,
                recompute_text(&s).s, s.gpu, (int)s.dtype, s.threads);
}

// Returns the number of bytes a buffer occupies, including alignment and the gap in test builds.
static size_t padded(const Buffer &b) {
    return (b.bytes + PLAN_ALIGN - 1) / PLAN_ALIGN * PLAN_ALIGN + PLAN_GAP;
}

// Live buffers share no byte, the plan ends with its last buffer, equal settings give equal plans.
TEST(plan_layout, ALL) {
    for (int n = 0; n < 300; n++) {
        Settings s = n % 2 ? draw_settings() : draw_placements();
        Plan p, q;
        plan_build(&p, &s);
        plan_build(&q, &s);
        Text who = settings_text(s);
        expect(p.buffer_count == q.buffer_count && p.device_bytes == q.device_bytes &&
                   memcmp(p.buffers, q.buffers, sizeof(Buffer) * (size_t)p.buffer_count) == 0,
               "%s", who.c_str());
        size_t end[2] = {0, 0};
        std::vector<size_t> live((size_t)p.ticks);
        for (int i = 0; i < p.buffer_count; i++) {
            const Buffer &a = p.buffers[i];
            end[a.placement] = std::max(end[a.placement], a.offset + padded(a));
            expect(a.offset % PLAN_ALIGN == 0 && a.first >= 0 && a.first <= a.last &&
                   a.last < p.ticks && a.count > 0, "%s: %s", who.c_str(), a.name);
            for (int t = a.first; t <= a.last && !a.placement; t++) {
                live[(size_t)t] += padded(a);
            }
            for (int j = 0; j < i; j++) {
                const Buffer &b = p.buffers[j];
                int disjoint = a.placement != b.placement || a.last < b.first || b.last < a.first ||
                            a.offset + padded(a) <= b.offset || b.offset + padded(b) <= a.offset;
                expect(disjoint, "%s: %s and %s", who.c_str(), a.name, b.name);
            }
        }
        size_t most = *std::max_element(live.begin(), live.end());
        expect(end[0] == p.device_bytes && end[1] == p.host_bytes && p.device_bytes >= most, "%s",
               who.c_str());
        for (const int state : {BUF_M, BUF_V, BUF_MASTER}) {
            const int id = p.index[state];
            const int64_t least = model_parameters(&s.model) / s.ranks;
            expect((state == BUF_MASTER && !settings_has_master(&s)) || n % 2 ||
                       (id >= 0 && p.buffers[id].count >= least),
                   "%s: state %d", who.c_str(), state);
        }
        plan_free(&p);
        plan_free(&q);
    }
    detail = "300 random settings";
}

// No memory-saving change increases memory: a higher recompute level, more blocks at that level, a
// smaller batch, narrower moments, no master weights, fewer logits and workspace, or offloading.
TEST(plan_monotone, FLOAT) {
    const int count = full_or(200, 5000);
    int compared = 0;
    for (int n = 0; n < count; n++) {
        Settings s = draw_settings();
        s.logit_rows = std::min(s.logit_rows, s.T);
        for (int what = 0; what < 6 + OFFLOAD_LEVELS; what++) {
            Settings more = s;
            const int level = s.level[0];
            if (what == 0) {
                settings_recompute(&more, min_int(level + 1, RECOMPUTE_BLOCK), s.model.L);
            } else if (what == 1) {
                more.level[s.model.L - 1] = (uint8_t)level;
            } else if (what == 2) {
                more.B = max_i64(s.B - 1, 1);
            } else if (what == 3 && s.dtype == TYPE_BF16) {
                more.moment_dtype = TYPE_BF16;
            } else if (what == 4 && s.split_master) {
                more.split_master = more.placement[KIND_MASTER] = 0;
            } else if (what == 5) {
                more.logit_rows = min_int(s.logit_rows, SCRATCH_ROWS);
                more.workspace = s.gpu ? (int64_t)SCRATCH_WORKSPACE : s.workspace;
            } else if (what >= 6 && s.gpu && s.model.L > SLOTS) {  // two blocks fit in slots
                settings_offload(&more, what - 6);
            }
            if (memcmp(&more, &s, sizeof s) == 0) {
                continue;
            }
            compared++;
            expect(plan_bytes(&more) <= plan_bytes(&s), "%s, change %d: %zu to %zu",
                   settings_text(s).c_str(), what, plan_bytes(&s), plan_bytes(&more));
        }
    }
    expect(compared > 3 * count, "%d", compared);
    detail = text("%d random settings, %d smaller ones", count, compared);
}

// Checks that the pieces of each bucket that AdamW updates, and likewise its shards, cover the
// bucket exactly once over all ranks, and that each piece is contiguous on its rank. No two
// elements of a state share a location, and every location is inside its buffer.
static void check_placements(Settings s) {
    const Model &m = s.model;
    const Text who = settings_text(s) + text(" ranks %d", s.ranks);
    static const int buffers[] = {BUF_WEIGHTS, BUF_GRADS, BUF_M, BUF_MASTER};
    std::map<std::array<int, 2>, std::vector<std::array<int64_t, 2>>> taken;  // by buffer and owner
    BufferEntry rows[SINGLES];
    single_buffers(rows, &s);
    for (int bucket = 0; bucket < model_buckets(&m); bucket++) {
        const int64_t all = bucket_elements(&m, bucket), part = bucket_at(&m, s.ranks, bucket).part;
        for (int local = 0; local < 2; local++) {
            int64_t next = 0;
            for (int &rank = this_rank.rank = 0; rank < s.ranks; rank++) {
                const Range p = bucket_range(&s, bucket, local);
                const int whole = p.count == all && s.ranks > 1 && !local;
                expect(p.count >= 0 && p.first == (whole ? 0 : next), "%s: bucket %d", who.c_str(),
                       bucket);
                next = whole ? all : next + p.count;
                const Location where = range_location(&s, BUF_M, p);
                expect(local || !p.count || (where.count == p.count &&
                                             (where.owner < 0 || where.owner == this_rank.rank)),
                       "%s: moments of bucket %d", who.c_str(), bucket);
            }
            this_rank.rank = 0;
            expect(next == all, "%s: bucket %d has %d, not %d", who.c_str(), bucket, (int)next,
                   (int)all);
        }
        for (int kind = KIND_WEIGHTS; kind <= KIND_MASTER; kind++) {
            Range p = {bucket, 0, all};
            for (int64_t n; p.count > 0; p.first += n, p.count -= n) {
                const Location where = range_location(&s, buffers[kind], p);
                n = where.count;
                const int64_t room = rows[where.buffer].count;
                expect(n > 0 && where.offset >= 0 &&
                           (where.offset + n <= room || kind == KIND_MASTER),
                       "%s: kind %d of bucket %d: %d + %d of %d", who.c_str(), kind, bucket,
                       (int)where.offset, (int)n, (int)room);
                expect(where.owner < 0 || where.owner == p.first / part, "%s", who.c_str());
                taken[{where.buffer, where.owner}].push_back({where.offset, where.offset + n});
            }
        }
    }
    for (auto &[where, pieces] : taken) {
        std::sort(pieces.begin(), pieces.end());
        for (size_t i = 1; i < pieces.size(); i++) {
            expect(pieces[i - 1][1] <= pieces[i][0], "%s: buffer %d", who.c_str(), where[0]);
        }
    }
}

TEST(places, HOST) {
    for (int n = 0; n < 60; n++) {
        check_placements(draw_placements());
    }
    // T < maxT, and maxT C is not a multiple of 64. With 1,024 ranks, some shards are padding.
    for (int ranks : {3, 7, 1024}) {
        check_placements(planned(text("-e l2h3c96t9 -t 8 -b 1 --gpus %d -z %d", ranks, ranks % 4)));
    }
    detail = "63 settings";
}

// Where an instruction reads or writes: a buffer and, if it has parts, a bucket or a block.
struct Access {
    int buffer, part;
    bool writes;
};

// The location of a bucket of the weights or gradients.
static Access state_access(const Settings &s, Kind kind, int bucket, bool writes) {
    return bucket >= BUCKET_BLOCKS && s.placement[kind]
               ? Access{BUF_STORE + kind, bucket - BUCKET_BLOCKS, writes}
               : Access{state_table[kind].buffer, bucket, writes};
}

// What an instruction accesses, by the definition of its operation.
static std::vector<Access> accesses_of(const Plan &p, const Instr &i, const MuonGroup &g) {
    const Settings &s = p.settings;
    const Op stage = stage_table[i.stage].op;
    std::vector<Access> all;
    auto weights = [&](int b, bool writes) { return state_access(s, KIND_WEIGHTS, b, writes); };
    auto grads = [&](int b, bool writes) { return state_access(s, KIND_GRADIENTS, b, writes); };
    auto muon = [&](int group) { return Access{BUF_MUON, group % g.buffers, true}; };
    auto memory = [&](Address a, bool writes) {
        const bool store = a.buffer >= BUF_STORE && a.buffer < BUF_SLOT;
        const Kind kind = (Kind)(a.buffer - BUF_STORE);
        const int64_t shards = store && s.placement[kind] & PLACE_SHARD ? s.ranks : 1;
        return Access{a.buffer, store ? (int)(a.offset * shards / state_block_bytes(&s, kind)) : 0,
                      writes};
    };
    const int bucket = i.event - EVENT_BUCKET;
    if (i.op == RUN) {
        for (int k = 0; k < STAGE_ITEMS; k++) {
            const bool writes = (k >= READS && k < READS + MAKES) || k == STAGE_ITEMS - 1;
            const bool matrix = k >= READS + MAKES && i.items[k] >= SINGLES;
            if (i.items[k] >= 0) {
                all.push_back(!matrix ? Access{i.items[k], 0, writes}
                              : writes ? grads(BUCKET_BLOCKS + i.layer, true)
                                       : weights(BUCKET_BLOCKS + i.layer, false));
            }
        }
        if (stage == OP_EMBED || stage == OP_HEAD || stage == OP_EMBED_BACK) {
            all.push_back(stage == OP_EMBED_BACK ? grads(BUCKET_WPE, 1) : weights(BUCKET_WTE, 0));
            all.push_back(stage == OP_EMBED ? weights(BUCKET_WPE, 0) : grads(BUCKET_WTE, true));
        }
        if (stage >= OP_BACK) {
            all.push_back(grads(BUCKET_VECTORS, true));
        }
    } else if (i.op < WAIT && (bucket < 0 || i.to.buffer == BUF_RANK_STATUS)) {
        all.push_back(memory(i.to, true));
        all.push_back(memory(i.bytes ? i.from : i.to, false));
    } else if (i.op < WAIT && i.to.buffer == BUF_MUON) {
        all.push_back(muon((bucket - BUCKET_BLOCKS) / g.blocks));
    } else if (i.op < WAIT) {
        const bool w = i.to.buffer == BUF_WEIGHTS || i.to.buffer == BUF_STORE + KIND_WEIGHTS;
        all.push_back(w ? weights(bucket, true) : grads(bucket, true));
    } else if (i.op == NORM) {
        for (int b = 0; b < model_buckets(&s.model); b++) {
            all.push_back(grads(b, false));
        }
        all.push_back({BUF_RANK_STATUS, 0, true});
    } else if (i.op == DECIDE) {
        all.push_back({BUF_RANK_STATUS, 0, false});
    } else if (i.op > DECIDE) {
        const int group = i.op == ORTHO || i.op == ADAMW ? i.bucket
                                                         : (i.bucket - BUCKET_BLOCKS) / g.blocks;
        if (i.op != ADAMW) {
            all.push_back(muon(group));
        }
        if (i.op == ADAMW || i.op == MOMENT) {
            all.push_back(grads(i.bucket, false));
        }
        if (i.op == ADAMW || i.op == APPLY) {
            all.push_back(weights(i.bucket, true));
        }
    }
    return all;
}

// The instructions of two steps.
struct TwoSteps {
    std::vector<Instr> list;
    std::vector<std::vector<Access>> accesses;
    std::vector<bool> adds;  // in a pass that adds to gradients
    size_t step = 0;         // instructions of the first step
};
static TwoSteps two_steps(const Settings &s, int micros) {
    Plan p;
    plan_stages(&p, &s);
    TwoSteps all;
    const MuonGroup group = s.muon ? muon_group(&s) : MuonGroup();
    for (int part = 0; part < 2 * (micros + 1); part++) {
        const int micro = part % (micros + 1);
        micro < micros ? instr_pass(&p, p.at[UPDATE] - 1, micro > 0, micro == micros - 1)
                       : instr_update(&p);
        for (const Instr *i = p.instrs.list; i < p.instrs.list + p.instrs.count; i++) {
            all.list.push_back(*i);
            all.accesses.push_back(accesses_of(p, *i, group));
            all.adds.push_back(micro > 0 && micro < micros &&
                               s.placement[KIND_GRADIENTS] & PLACE_HOST);
        }
        all.step = part < micros + 1 ? all.list.size() : all.step;
    }
    plan_free(&p);
    return all;
}

// Returns the first fault in two steps without instruction `without`, or "". Instructions of
// different streams that access the same memory, one of them writing, must be ordered: by their
// stream, by beginning after all earlier work of COMPUTE, or by waiting for an event (vector
// clocks). Faults are also a wait for something that is ordered already, the wrong block in a slot,
// and a copy between slot and store without a block's computation to overlap with, except at the
// ends of a pass.
static Text list_fault(const TwoSteps &all, size_t without) {
    typedef std::array<int, STREAMS> Clock;
    Clock now[STREAMS] = {}, recorded[EVENTS] = {};
    int since[EVENTS] = {};
    std::map<std::pair<int, int>, std::pair<Clock, Clock>> last;  // reads and writes, by memory
    int holds[KINDS * SLOTS] = {};  // 1 + the block
    auto join = [](Clock &a, const Clock &b) {
        const Clock before = a;
        for (int i = 0; i < STREAMS; i++) {
            a[i] = std::max(a[i], b[i]);
        }
        return a != before;
    };
    for (size_t n = 0; n < all.list.size(); n++) {
        const Instr &i = all.list[n];
        const Text who = text("instruction %d, tick %d: ", (int)n, i.tick);
        Clock &clock = now[i.stream];
        if (i.op == WAIT) {
            if (n != without && !join(clock, recorded[i.event])) {
                return who + "a wait for nothing";
            }
            if (i.event < EVENT_BUCKET && i.stream == COMPUTE && i.stage != JOIN &&
                since[i.event] > 0 && i.tick - since[i.event] < 4) {
                return who + "no time for the copy";
            }
            continue;
        }
        join(clock, now[COMPUTE]);
        clock[i.stream]++;
        for (const Access &a : all.accesses[n]) {
            auto &[read, written] = last[{a.buffer, a.part}];
            Clock copy = clock;
            if (join(copy, written) || (a.writes && join(copy, read))) {
                return who + text("buffer %d, part %d is in flight", a.buffer, a.part);
            }
            (a.writes ? written : read)[i.stream] = clock[i.stream];
        }
        auto slot = [&](int b) { return b < BUF_SLOT || b >= STATE_BUFFERS ? -1 : b - BUF_SLOT; };
        for (int k = 0; k < STAGE_ITEMS && i.op == RUN; k++) {
            const int at = slot(i.items[k]), next = stage_item(0, i.stage, k) == ACT_NEXT;
            const int block = i.layer + next;
            const bool makes = k >= READS && (k < READS + MAKES ||
                                              (k == STAGE_ITEMS - 1 && !all.adds[n]));
            if (at >= 0 && holds[at] != block + 1 && !(makes && !holds[at])) {
                return who + text("slot %d holds block %d", at, holds[at] - 1);
            }
            holds[at < 0 ? 0 : at] = at < 0 ? holds[0] : block + 1;
        }
        if (i.op >= ACQUIRE && i.op < WAIT) {
            const int to = slot(i.to.buffer), from = i.bytes ? slot(i.from.buffer) : -1;
            const bool stores = from >= 0 && to < 0;
            if (stores && holds[from] != all.accesses[n][0].part + 1) {
                return who + text("slot %d stores block %d", from, holds[from] - 1);
            }
            if (to >= 0 && from < 0) {
                holds[to] = i.op == ACQUIRE ? 0 : i.bytes ? all.accesses[n][1].part + 1 : holds[to];
            }
        }
        if (i.event >= 0) {
            recorded[i.event] = clock;
            since[i.event] = i.tick;
        }
    }
    return "";
}

// For 1,000 random settings, the lists of two steps have no fault, and all ranks exchange the same
// in the same order. In a sample, a step without any one of its waits has a fault, except those of
// join, after which other buffers may reuse the slots' memory.
TEST(instructions, HOST) {
    int waits = 0;
    for (int n = 0; n < 1000; n++) {
        Settings s = draw_placements();
        s.muon = draw(0, 1);
        const int micros = draw(1, 4);
        const TwoSteps all = two_steps(s, micros);
        const Text who = settings_text(s) + text(" ranks %d, %d micro-steps: ", s.ranks, micros);
        const Text fault = list_fault(all, SIZE_MAX);
        expect(fault.empty(), "%s%s", who.c_str(), fault.c_str());
        this_rank.rank = draw(0, s.ranks - 1);
        const TwoSteps other = two_steps(s, micros);
        this_rank.rank = 0;
        bool same = all.list.size() == other.list.size();
        for (size_t i = 0; i < all.list.size() && same; i++) {
            const Instr &a = all.list[i], &b = other.list[i];
            same = a.op == b.op && a.stream == b.stream && a.event == b.event &&
                   a.bytes == b.bytes && a.type == b.type;
        }
        expect(same, "%sthe ranks differ", who.c_str());
        for (size_t i = 0; i < all.step && n % 50 == 0; i++) {
            if (all.list[i].op == WAIT && all.list[i].stage != JOIN) {
                expect(!list_fault(all, i).empty(), "%swait %d is not needed", who.c_str(), (int)i);
                waits++;
            }
        }
    }
    expect(waits > 100);
    detail = text("1,000 random settings, %d waits", waits);
}

// The bytes copied and exchanged in a step match closed-form formulas. P, E and V count elements in
// the blocks' matrices, in wte and wpe, and in vectors; w and g are bytes per weight and gradient.
TEST(traffic, FLOAT) {
    for (int n = 0; n < 500; n++) {
        Settings s = draw_placements();
        const int L = s.model.L, k = draw(1, 4), N = s.ranks, z = settings_zero(&s);
        const Text who = settings_text(s) + text(" ranks %d z %d micros %d", N, z, k);
        const double V = (double)bucket_at(&s.model, N, BUCKET_VECTORS).count;
        const double E = (double)bucket_at(&s.model, N, BUCKET_BLOCKS).offset - V;
        const double P = (double)(L * bucket_at(&s.model, N, BUCKET_BLOCKS).count), f = 1 - 1.0 / N;
        const double w = (double)type_bytes(s.dtype), g = (double)type_bytes(s.grad_dtype);
        // Two slots hold the last two blocks between passes; a single block stays.
        const double transfers_w = L > 1 ? (2.0 * k * L - 4 * k + 2) / L : 1;
        const double reduced = f * ((z >= 2 ? k : 1) * P * g + E * g + V * 4);
        const double gathered =
            f * ((z == 0 ? g : w) * (P + E) + (z == 3 ? w * (transfers_w - 1) * P : 0) + 4 * V +
                 64 * N);  // and statuses
        auto hosted = [&](int state) { return s.placement[state] & PLACE_HOST ? 1.0 : 0.0; };
        const double share = z >= 1 ? 1.0 / N : 1, own = V + (E + P) * share;
        const double moments = hosted(KIND_MOMENTS) * 2 * (double)type_bytes(s.moment_dtype);
        const double master = hosted(KIND_MASTER) * (s.split_master ? 2 : 0);
        const double NC = (double)s.B * s.T * s.model.C;
        const double x = hosted(KIND_RESIDUALS) * w * NC * k * std::max(L - 2, 0);
        const double weights = hosted(KIND_WEIGHTS) * w * P / (z == 3 ? N : 1);
        const double updated = hosted(KIND_WEIGHTS) * w * P * share;
        const double grads = hosted(KIND_GRADIENTS) * g * P;
        const Traffic t = step_traffic(&s, k);
        auto same = [&](double got, double want) { return fabs(got - want) <= 1e-9 * want; };
        expect(same(t.reduced, reduced), "%s: %.17g, not %.17g", who.c_str(), t.reduced, reduced);
        expect(same(t.gathered, gathered), "%s: %.17g, not %.17g", who.c_str(), t.gathered,
               gathered);
        const double down = (moments + master) * own + x + updated + grads * k;
        expect(same(t.up, down + weights * transfers_w + grads), "%s", who.c_str());
        expect(same(t.down, down), "%s", who.c_str());
    }
    detail = "500 random settings";
}

// With several ranks, the plan does not grow with the ZeRO stage or, except for padding, the number
// of ranks. First-fit fragmentation is at most 2 %.
TEST(plan_ranks, FLOAT) {
    static const int ranks[] = {2, 3, 4, 7, 8, 1024};
    double worst_layout = 1;
    for (int n = 0; n < 40; n++) {
        const Text shape = text("-e l%dh2c%dt64 -b %d -r %d", draw(5, 12), 16 * draw(1, 30),
                                draw(1, 4), draw(0, 1));
        size_t before[4] = {0, 0, 0, 0};
        for (int N : ranks) {
            for (int z = 0; z < 4; z++) {
                Settings s = planned(shape + text(" --gpus %d -z %d", N, z));
                Plan p;
                plan_build(&p, &s);
                uint64_t device[GROUPS], host[GROUPS], live = 0;
                plan_groups(&p, device, host);
                for (const uint64_t bytes : device) {
                    live += bytes;
                }
                worst_layout = std::max(worst_layout, (double)p.device_bytes / (double)live);
                // Buckets, slots and the exchange use at most 20 bytes per element of padding.
                size_t padding = 20 * 64 * (size_t)N * (size_t)(s.model.L + 8) + 65536;
                expect(N == 2 || p.device_bytes <= before[z] + padding, "%s, %d ranks, -z %d",
                       shape.c_str(), N, z);
                before[z] = p.device_bytes;
                expect(z == 0 || before[z] <= before[z - 1], "%s, %d ranks, -z %d: %zu after %zu",
                       shape.c_str(), N, z, before[z], before[z - 1]);
                plan_free(&p);
            }
        }
    }
    // GPT-2 1558M: what the README and the out-of-memory messages promise for small cards.
    static const struct {
        const char *options;
        double gib;
    } limits[] = {{"-b 24 --offload moments,master", 15},
                  {"-b 1 --offload moments,master,residuals", 6.5},
                  {"-b 1 --offload weights,gradients,moments,master,residuals", 1.2},
                  {"-b 1 --gpus 8 -z 3 --offload weights,moments,master,residuals", 1.2}};
    for (auto &limit : limits) {
        Settings s = planned(Text("-e d48 -t 1024 -r 1 ") + limit.options);
        expect((double)plan_bytes(&s) <= limit.gib * 0x1p30, "%s", limit.options);
    }
    expect(worst_layout <= 1.02, "%.4f", worst_layout);
    detail = text("layout %.2f %% above the live bytes", 100 * (worst_layout - 1));
}

// Returns whether a block keeps an activation for backward at a recomputation level.
static bool kept_at(int level, int item, int fp8) {
    Settings s = {};
    Plan p = {};
    s.model.L = s.ranks = 1;
    s.level[0] = (uint8_t)level;
    s.fp8 = fp8;
    plan_stages(&p, &s);
    const bool kept = lifetime_spans(&p.lives[block_buffer(&s.model, item, 0, 0)], p.at[HEAD]);
    plan_free(&p);
    return kept;
}

// The number and order of ticks are correct; every level keeps its documented bytes per channel.
TEST(stages, HOST) {
    Settings s = planned("-e l3h1c8t4 --gpus 2");
    Tick ticks[128];
    // embed; 3 x 8; lnf, head, d_lnf; 3 x 15; d_embed, join, update.
    expect(ticks_list(ticks, &s) == 1 + 24 + 3 + 45 + 3);
    expect(ticks[74].stage == JOIN && ticks[75].stage == UPDATE);
    expect(ticks[1 + 8 + 3].stage == F_ATTPROJ && ticks[1 + 8 + 3].layer == 1);
    expect(ticks[28 + 15 + 9].stage == B_FC && ticks[28 + 15 + 9].layer == 1);
    s.ranks = 1;  // a single rank has no join tick
    expect(ticks_list(ticks, &s) == 75);
    // Bytes kept per token, block and channel at each level, with and without fp8.
    static const int kept[2][RECOMPUTE_LEVELS] = {{32, 24, 20, 12, 6, 2}, {26, 22, 20, 12, 6, 2}};
    for (int k = 0; k < 2 * RECOMPUTE_LEVELS; k++) {
        const int fp8 = k % 2, level = k / 2;
        int bytes = 0;
        for (int i = ACT_X; i < BLOCK_BUFFERS; i++) {
            bytes += kept_at(level, i, fp8) * std::max(act_table[i].channels, 0) *
                     (act_is_fp8(i) ? 1 : 2);
        }
        expect(bytes == kept[fp8][level], "%s keeps %d", level_name(level).s, bytes);
    }
}

// Returns the first fault in the declared network at a recomputation level, or an empty text: a
// stage must read only what an earlier stage of the pass has made, or what forward has kept.
static Text graph_fault(int level, int fp8) {
    bool there[MATRICES] = {}, needed[MATRICES] = {};
    for (int item : {0, (int)ACT_X, (int)GRAD_RES}) {
        there[item] = true;  // nothing, and what other blocks have made
    }
    for (int step = 0; step < F_STAGES + BLOCK_STAGES; step++) {
        const int back = step >= F_STAGES, stage = back ? step - F_STAGES : step;
        const StageEntry &e = stage_table[stage];
        for (int i = 1; i < BLOCK_BUFFERS && step == F_STAGES; i++) {
            there[i] = kept_at(level, i, fp8);
        }
        if ((back && stage < F_STAGES && e.level > level) || (e.op == OP_FP8 && !fp8)) {
            continue;
        }
        for (int i = 0; i < READS; i++) {
            const int item = stage_item(fp8, stage, i);
            if (!there[item]) {
                return text("%s%s reads item %d too early", back ? "backward: " : "", e.name, item);
            }
            needed[item] = needed[item] || back;
        }
        for (int item : e.makes) {
            if (item && item < GRAD_MLP && there[item]) {
                return text("%s makes %s again", e.name, act_table[item].name);
            }
            there[item] = true;
        }
    }
    for (const StageEntry &e : stage_table) {  // what is repeated must be needed
        if (e.level <= level && !needed[e.makes[0]] && !needed[e.makes[1]] &&
            (e.op != OP_FP8 || fp8)) {
            return text("%s is repeated in vain", e.name);
        }
    }
    return "";
}

// Every level is closed and keeps less than the one before it; each tensor of a block has one stage
// in forward and one in backward; of the stages of a block, only the last one makes the next x.
TEST(graph, HOST) {
    for (int k = 0; k < 2 * RECOMPUTE_LEVELS; k++) {
        const Text fault = graph_fault(k / 2, k % 2);
        expect(fault.empty(), "%s: %s", level_name(k / 2).s, fault.c_str());
    }
    for (int tensor = LN1W; tensor < LNFW; tensor++) {
        int stages[2] = {0, 0};
        for (int stage = 0; stage < BLOCK_STAGES; stage++) {
            const int w = stage_table[stage].weight;
            stages[stage >= F_STAGES] += w && (w == tensor || w + 1 == tensor);
        }
        expect(stages[0] == 1 && stages[1] == 1, "%s", tensor_table[tensor].name);
    }
    for (int stage = 0; stage < STAGES; stage++) {
        expect((stage_table[stage].makes[0] == ACT_NEXT) == (stage == F_FCPROJ || stage == EMBED),
               "%s", stage_table[stage].name);
    }
}

// A network with its own engine; all weights are random, including biases and LayerNorm's.
struct Net {
    Engine e;
    Settings s;
    Plan plan;
    Net(const Model &m, int B, int T, int level = 0, int blocks = -1, int logit_rows = 0) {
        Options o = default_options();
        o.batch = B;
        o.seq_len = T;
        o.logit_rows = logit_rows;
        settings_from_options(&s, &o, &m, 0);
        settings_recompute(&s, level, blocks < 0 ? m.L : blocks);
        plan_build(&plan, &s);
        cpu_open(&e, &plan, &o);
        give_weights(m);
    }
    // Takes options as typed by a user. Runs on the GPU in CUDA builds.
    Net(const Model &m, const Text &options, int gpu = TEST_CUDA) {
        Options o;
        parse(&o, options.c_str());
        // Tuning on a GPU would time the algorithms of about fifty matmuls for each network.
        o.tune = has(options, "--tune 1");
        o.quiet = 1;
#if TEST_CUDA
        // Use the 16-bit type that this GPU supports; without bf16, use defaults for other types.
        gpu_device(&machine);
        if (gpu && machine.capability < BF16_CAPABILITY && o.dtype != DTYPE_FP32) {
            o.dtype = DTYPE_FP16;
            o.moments = o.grad_dtype = o.master = 0;
        }
#endif
        settings_from_options(&s, &o, &m, gpu);
        o.generate ? settings_generate(&s) : o.eval ? settings_forward(&s) : (void)0;
        plan_build(&plan, &s);
#if TEST_CUDA
        (gpu ? gpu_engine_open : cpu_open)(&e, &plan, &o);
#else
        cpu_open(&e, &plan, &o);
#endif
        give_weights(m);
    }
    void give_weights(const Model &m) {
        engine_initialize(&e, &m, 3);
        for (int tensor = 0; tensor < TENSORS; tensor++) {
            for (int l = 0; l < tensor_copies(&m, tensor); l++) {
                const size_t size = (size_t)(tensor_rows(&m, tensor) * tensor_cols(&m, tensor));
                Reals w = noise(size, 0.15, (uint64_t)(tensor * 100 + l));
                for (real &x : w) {
                    x += (real)(tensor_table[tensor].init == INIT_ONE);
                }
                e.write(&e, BUF_WEIGHTS, tensor_range(&m, tensor, l, 0, (int64_t)size), w.data());
            }
        }
    }
    Net(const Net &) = delete;
    ~Net() {
        e.close(&e);
        plan_free(&plan);
    }
    // A full state, its buckets back to back; see tensor_offset. With Muon, the blocks' v is 0.
    int64_t size() { return bucket_at(&s.model, 1, model_buckets(&s.model)).offset; }
    Reals state(int which) {
        const int buckets = which == BUF_V ? adamw_buckets(&s) : model_buckets(&s.model);
        Reals all((size_t)size());
        for (int bucket = 0; bucket < buckets; bucket++) {
            const int64_t at = bucket_at(&s.model, 1, bucket).offset;
            e.read(&e, which, {bucket, 0, bucket_elements(&s.model, bucket)}, &all[(size_t)at]);
        }
        return all;
    }
    void set_state(int which, const Reals &all) {
        for (int bucket = 0; bucket < model_buckets(&s.model); bucket++) {
            const int64_t at = bucket_at(&s.model, 1, bucket).offset;
            e.write(&e, which, {bucket, 0, bucket_elements(&s.model, bucket)}, &all[(size_t)at]);
        }
    }
    Reals gradients() { return state(BUF_GRADS); }
};

// Random tokens below V: n inputs and n targets.
struct Batch {
    std::vector<Token> inputs, targets;
    Batch(int n, int V, uint64_t seed) {
        for (int i = 0; i < n; i++) {
            inputs.push_back((Token)(rng_uniform(seed, 9, 0, (uint64_t)i) * V));
            targets.push_back((Token)(rng_uniform(seed, 9, 1, (uint64_t)i) * V));
        }
    }
};

#if TEST_ASAN
// plan_tick calls this on memory in sanitizer builds: it poisons dead buffers and the gaps after
// buffers, so AddressSanitizer aborts a test that accesses them.
static void mark_for_asan(void *memory, size_t bytes, int alive) {
    ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
    memset(memory, 0xff, bytes);
    if (!alive) {
        ASAN_POISON_MEMORY_REGION(memory, bytes);
    }
}
#endif

// Accessing a dead buffer ends the program, and a new buffer is filled with NaN.
TEST(arena, ALL) {
#ifdef _OPENMP
    omp_set_num_threads(1);  // the leak check in a forked child does not support threads
#endif
    Model m = shape("l2h2c26t8", 257);
    Net n(m, 1, 7, RECOMPUTE_BLOCK);
    Plan *p = &n.plan;
    plan_tick(p, p->at[UPDATE]);
    expect_death(buffer(&n.plan, BUF_LOGITS),
                 "buffer logits lives from tick 18 to 18 but is used at");
    expect_death(buffer(&n.plan, block_buffer(&m, GRAD_QKV, 1, 1)), "buffer 1.d_qkv lives from");
    expect_death(buffer_pointer(p, -1), "no such buffer");
    expect_death(buffer_pointer(p, p->buffer_count), "no such buffer");
    plan_tick(p, p->at[HEAD]);
    const Buffer &row = p->buffers[p->index[BUF_LNF]];
    char *lnf = (char *)buffer(&n.plan, BUF_LNF);
    const real *values = (const real *)lnf;
    expect(isnan((double)values[0]) && isnan((double)values[row.count - 1]), "fresh rows are NaN");
    for (const Buffer *r = p->buffers; r < p->buffers + p->buffer_count; r++) {
        expect(r->alive == (r->first <= p->now && p->now <= r->last), "%s", r->name);
    }
#if TEST_ASAN
    auto touch = [&](size_t byte) { *(volatile char *)(lnf + byte) = 0; };
    expect(outcome(spawn([&] { touch(row.bytes - 1); })).status == 0, "the last byte");
    for (size_t byte : {row.bytes, row.bytes + PLAN_GAP - 1}) {
        Outcome past = outcome(spawn([&] { touch(byte); }));
        expect(has(past.err, "use-after-poison"), "past the row");
    }
    plan_tick(p, p->at[UPDATE]);
    Outcome dead = outcome(spawn([&] { touch(0); }));
    expect(has(dead.err, "use-after-poison"), "a dead row");
#endif
}

// Returns the number of pages in this process's address space (field 0 of /proc/self/statm).
static long address_pages() {
    long pages = 0;
    sscanf(read_file("/proc/self/statm").c_str(), "%ld", &pages);
    return pages;
}

// The device and host mappings have exactly the planned sizes, and nothing is allocated after the
// first step. All threads share one heap with spare space at its end, because the number of
// simultaneous OpenMP tasks varies and each per-thread heap would take 64 MiB of address space.
TEST(plan_allocation, FLOAT | DOUBLE) {
    mallopt(M_ARENA_MAX, 1);
    mallopt(M_TOP_PAD, 1 << 22);
    for (const char *options : {"-r none", "-r norm", "-r block", "--offload moments",
                                "-r block --offload weights,gradients,moments,residuals"}) {
        Model m = shape("l3h3c96t40", 300);
        Net n(m, Text("-b 3 ") + options, 0);
        Batch b(120, 300, 1);
        Options o = default_options();
        n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
        n.e.update(&n.e, &o, 1e-3, HUGE_VAL, 0);
        Plan p;
        plan_build(&p, &n.s);
        long before = address_pages(), page = sysconf(_SC_PAGESIZE);
        plan_open(&p);
        long mapped = address_pages() - before;
        auto pages = [page](size_t bytes) { return ((long)bytes + page - 1) / page; };
        expect(mapped == pages(p.device_bytes) + pages(p.host_bytes), "%ld pages", mapped);
        expect((p.host_bytes > 0) == (strstr(options, "offload") != NULL), "%s", options);
        plan_close(&p);
        plan_free(&p);
        before = address_pages();
        for (int i = 0; i < 3; i++) {
            n.e.micro_step(&n.e, b.inputs.data(), b.targets.data(), 0, 1);
            n.e.update(&n.e, &o, 1e-3, HUGE_VAL, 0);
        }
        expect(address_pages() == before, "grew by %ld pages", address_pages() - before);
    }
}

// Ranks share the matrices of Muon's groups as evenly as their FLOPs allow: no division gives the
// busiest rank less than the mean, in square matrices, or less than its share of large ones.
// For a matrix (C,n), X X^T and the product with X take 2 C C n FLOPs each, the square 2 C C C.
TEST(muon_shares, HOST) {
    static const struct {
        int ranks;
        const char *options;
        int blocks;  // five buffers of C x C per block fit in the activations of B T tokens
    } table[] = {{8, "-e d12 -b 4", 1}, {8, "-e d12 -b 16", 4}, {8, "-e d12 -b 24", 6},
                 {8, "-e d48 -b 8", 1}, {8, "-e d48 -b 16", 2}, {8, "-e d48 -b 24", 3},
                 {8, "-e d48 -b 64", 8}, {5, "-e d12 -b 16", 4}, {5, "-e d48 -b 24", 3},
                 {7, "-e d12 -b 24", 6}, {7, "-e d12 -b 4", 1}, {64, "-e d12 -b 24", 6}};
    for (auto &row : table) {
        const int R = row.ranks;
        const Settings s = planned(text("--gpus %d --optimizer muon ", R) + row.options);
        const MuonGroup g = muon_group(&s);
        const double C = s.model.C, square = 6 * C * C * C;
        std::vector<double> flops((size_t)R);
        std::vector<int64_t> elements((size_t)R);
        for (int i = 0; i < MUON_MATRICES * g.blocks; i++) {
            const MuonMatrix a = muon_matrix(&s.model, 0, i / g.blocks);
            flops[g.owner[i]] += (4 * (double)a.range.count + 2 * C * C) * C;
            expect(g.offset[i] == elements[g.owner[i]], "%s: matrix %d", row.options, i);
            elements[g.owner[i]] += a.range.count;
        }
        const int least = std::max(ceil_div(10 * g.blocks, R), 3 * ceil_div(2 * g.blocks, R));
        const double most = *std::max_element(flops.begin(), flops.end());
        expect(g.blocks == row.blocks && g.groups * g.blocks == s.model.L, "%s: %d blocks",
               row.options, g.blocks);
        expect(most <= least * square && g.cost * square == most, "%s: %g squares, not %d",
               row.options, most / square, least);
        expect(g.part == *std::max_element(elements.begin(), elements.end()), "%s", row.options);
        // u holds the blocks' buckets and, while exchanged, every rank's part.
        const int64_t bucket = 12 * (int64_t)(C * C), whole = (bucket + 64 * R - 1) / (64 * R);
        expect(g.u == std::max(g.blocks * whole * 64 * R, R * g.part), "%d ranks, %s", R,
               row.options);
    }
}
