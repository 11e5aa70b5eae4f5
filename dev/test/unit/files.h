// files.h -- tests of weights and checkpoint files: train_gpt2.c's chapter Weights and checkpoints.
// Loaded and saved values are compared bit by bit. Input files are built by dev/test/files.h;
// dev/test/model_files.cpp and checkpoints.cpp test what is refused.

// Returns the flat weight buffer that an engine must hold after loading `list`.
static Reals flat_weights(const Model &m, const Members &list) {
    Reals flat((size_t)bucket_at(&m, 1, model_buckets(&m)).offset);
    const Member *member = list.data();
    for (int tensor = 0; tensor < TENSORS; tensor++) {
        for (int l = 0; l < tensor_copies(&m, tensor); l++, member++) {
            std::copy(member->values.begin(), member->values.end(),
                      flat.begin() + tensor_offset(&m, tensor, l));
        }
    }
    return flat;
}

// Loads a model into an engine with other weights, and expects exactly the weights `want`, and
// zeros in padding and moments.
static void expect_loads_at(int line, const char *path, const Model &m, const Reals &want,
                            const Text &who) {
    Net n(m, 1, 1);
    ModelFile f;
    model_file_open(&f, path);
    if (memcmp(&f.model, &m, sizeof m) != 0) {
        fail(__FILE__, line, who + ": another model");
    } else {
        model_file_load(&n.e, &f);
        const Reals got = n.state(STATE_WEIGHTS), zeros(want.size(), 0);
        size_t at = 0;
        while (at < got.size() && memcmp(&got[at], &want[at], sizeof(real)) == 0) {
            at++;
        }
        if (at < got.size()) {
            fail(__FILE__, line, who + text(": element %zu is %.9g, not %.9g", at,
                                            (double)got[at], (double)want[at]));
        }
        if (!same_bits(n.state(STATE_M), zeros) || !same_bits(n.state(STATE_V), zeros)) {
            fail(__FILE__, line, who + ": moments");
        }
    }
    model_file_close(&f);
}
#define expect_loads(path, m, want, who) expect_loads_at(__LINE__, path, m, want, who)

// Models load from a folder or a file, in any dtype or several, in any order of tensors, with and
// without the prefix, mask buffers, a tied head and a padded header. Their sizes are just below and
// above those of a tile, a strip and a chunk of the loader.
TEST(model_accepted, HOST) {
    static const Words dtypes[] = {{"F32"}, {"BF16"}, {"F16"}, {"F32", "BF16", "F16"}};
    int k = 0;
    for (const Words &types : dtypes) {
        for (int variant = 0; variant < 8; variant++, k++) {
            const Text prefix = variant & 1 ? "transformer." : "";
            const Model m = shape(k % 5 == 4 ? "l1h2c68t5" : "l2h2c20t7", k == 3 ? 4000 : 300);
            Members list = hugging_face(m, types, prefix);
            const Reals want = flat_weights(m, list);
            if (variant & 2) {
                const char *mask[][2] = {{"F32", "1,1,7,7"}, {"BOOL", "1,1,3,3"},
                                         {"U8", "1,1,5,1"}};
                const char *dtype = mask[k % 3][0];
                const size_t sizes[] = {49 * 4, 9, 5};
                list.push_back({prefix + "h.0.attn.bias", dtype, mask[k % 3][1],
                                Text(sizes[k % 3], 1), ""});  // misaligns the following tensors
                list.push_back({prefix + "h.0.attn.masked_bias", "F32", "", "\x1\x2\x3\x4", ""});
                Member head = named(&list, prefix + "wte.weight");
                head.name = "lm_head.weight";
                list.push_back(head);
            }
            if (variant & 4) {
                std::reverse(list.begin(), list.end());
            }
            const Text format = "\"__metadata__\":{\"format\":\"pt\"},";
            Text bytes = safetensors_bytes(list, variant & 4 ? "" : format);
            bytes = variant & 2 ? with_header(bytes, "{", "{      ") : bytes;
            write_model("model", bytes, config_text(m));
            const char *path = variant & 1 ? "model" : "model/model.safetensors";
            expect_loads(path, m, want,
                         types[0] + text(" variant %d of %zu", variant, types.size()));
        }
    }
    const Model m = shape("l1h1c8t2", 3);  // an F32 head equal to BF16's wte is accepted
    Members list = hugging_face(m, {"BF16"}, "");
    const Reals want = flat_weights(m, list);
    Text wide_bits;
    for (const char &c : list[0].data) {
        wide_bits += ((&c - list[0].data.data()) % 2 ? Text() : Text(2, 0)) + c;
    }
    list.push_back({"lm_head.weight", "F32", "3,8", wide_bits, ""});
    write_model("model", safetensors_bytes(list), config_text(m));
    expect_loads("model/", m, want, "an F32 head over BF16");
    detail = text("%d files", k + 1);
}

TEST(llmc_model, HOST) {
    const Model m = shape("l2h2c20t7", 257);
    for (int version : {3, 5}) {
        std::vector<std::vector<double>> values;
        write_file("good.bin", llmc_bytes(m, version, &values));
        Reals want((size_t)bucket_at(&m, 1, model_buckets(&m)).offset);
        for (int tensor = 0; tensor < TENSORS; tensor++) {
            const int64_t size = tensor_size(&m, tensor);  // wte: only rows below V are loaded
            const int64_t loaded = tensor == WTE ? (int64_t)m.V * m.C : size;
            for (int l = 0; l < tensor_copies(&m, tensor); l++) {
                const double *from = &values[(size_t)tensor][(size_t)(l * size)];
                std::copy(from, from + loaded, want.begin() + tensor_offset(&m, tensor, l));
            }
        }
        expect_loads("good.bin", m, want, text("version %d", version));
    }
}

// Saves an engine's weights as the model of a checkpoint in `folder`.
static void save_model(Net *n, int type, const char *folder) {
    static Writer model, config;
    mkdir(folder, 0755);
    writer_open(&model, folder, "model.safetensors");
    model_file_save(&n->e, &n->s.model, type, &model);
    writer_close(&model);
    writer_open(&config, folder, "config.json");
    config_save(&n->s.model, NULL, &config);
    writer_close(&config);
    const Text path = Text(folder) + "/model.safetensors";
    expect(sha256_of({path})[0] == model.hash && (int64_t)read_file(path).size() == model.bytes);
}

// A saved model's data equal those of a file built by the test, and load as the original weights.
// The header is JSON and the data are aligned. Splitting the master weights loses nothing.
TEST(model_saved, HOST) {
    static const struct {
        const char *e;
        int V;
    } models[] = {{"l2h2c20t7", 300}, {"l1h2c68t5", 4000}, {"l3h1c1t1", 1}};
    for (auto &row : models) {
        const Model m = shape(row.e, row.V);
        for (int type : {FILE_F32, FILE_BF16}) {
            const char *dtype = type == FILE_F32 ? "F32" : "BF16";
            const Members list = hugging_face(m, {dtype}, "transformer.");
            const Text made = safetensors_bytes(list);
            const Reals want = flat_weights(m, list);
            Net n(m, 1, 1);
            n.set_state(STATE_WEIGHTS, want);
            save_model(&n, type, "saved");
            const Text bytes = read_file("saved/model.safetensors");
            uint64_t length, other;
            memcpy(&length, bytes.data(), 8);
            memcpy(&other, made.data(), 8);
            expect((8 + length) % 64 == 0 && json_valid(bytes.substr(8, length)));
            expect(bytes.substr(8 + length) == made.substr(8 + other), "%s %s", row.e, dtype);
            expect(json_valid(read_file("saved/config.json")));
            expect_loads("saved", m, want, Text(row.e) + dtype);
        }
    }
    for (uint64_t i = 0; i < 2000000; i++) {
        const uint32_t edges[] = {0, 0x7f80, 0xff80, 0x8000,
                                  0x7f7f, 0xff7f, 0x0080, 0x7fff, 0xffff};
        uint32_t u = (uint32_t)(rng_uniform(4, 9, 4, i) * 0x1p32), back, high;
        u = i < 9 * 65536 ? edges[i / 65536] << 16 | (uint32_t)(i % 65536) : u;
        float value;
        memcpy(&value, &u, 4);
        high = (uint32_t)master_high(value) << 16;
        memcpy(&value, &high, 4);
        value = master_join(value, (uint16_t)u);
        memcpy(&back, &value, 4);
        const bool is_nan = (u & 0x7fffffff) > 0x7f800000;
        expect(is_nan ? (high & 0x7fffffff) > 0x7f800000 && value != value : back == u,
               "%08x became %08x, in bf16 %08x", u, back, high);
    }
}

// A checkpoint with bf16 weights and the low halves of their masters resumes exactly like the fp32
// one it was made from.
TEST(state_file, HOST) {
    write_corpus();
    const Text run = TINY "--quiet -x 4 -n 2 -y 1 -o out", at = "out/step-00000002";
    expect_success(in_process(run), "first run");
    const Text end = tensors_of("out", 4),
               good = in_checkpoint("out", 2, SAVED_STATE);
    // Runs in a child process: once this process has OpenMP threads, its forks would hang.
    expect_success(outcome(spawn([&] {
        Net n(shape("l2h2c16t16", 257), 2, 16);
        ModelFile f;
        model_file_open(&f, at.c_str());
        model_file_load(&n.e, &f);
        model_file_close(&f);
        const Reals weights = n.state(STATE_WEIGHTS);
        Text low(weights.size() * 2, 0);
        file_values((unsigned char *)&low[0], FILE_U16, weights.data(), n.size());
        write_file("low", low);
        save_model(&n, FILE_BF16, at.c_str());
    })), "bf16 weights");
    const Text low = read_file("low");
    auto resume = [&](const Text &state) {
        checkpoint_remove("out/step-00000004");
        write_file(at + "/" + saved_files[SAVED_STATE], state);
        write_manifest(at);
        return in_process(run);
    };
    const Model m = shape("l2h2c16t16", 257);
    uint64_t header;
    memcpy(&header, good.data(), 8);
    Text entries, data;
    for (int b = 0; b < model_buckets(&m); b++) {
        const Bucket bucket = bucket_at(&m, 1, b);
        const size_t begin = good.size() - 8 - header + data.size();
        data += low.substr(2 * (size_t)bucket.offset, 2 * (size_t)bucket.count);
        entries += text("\"master.%d.0\":{\"dtype\":\"U16\",\"shape\":[%d],"
                        "\"data_offsets\":[%zu,%zu]},", b, (int)bucket.count, begin,
                        begin + 2 * (size_t)bucket.count);
    }
    const Text with_master = with_header(good, "\"m.0.0\":", entries + "\"m.0.0\":") + data;
    expect_success(resume(with_master), "bf16, master");
    expect(tensors_of("out", 4) == end, "bf16 weights and master: different result");
    expect_success(resume(good), "bf16 weights alone");
    expect(tensors_of("out", 4) != end && !tensors_of("out", 4).empty(), "bf16 weights alone");
}
