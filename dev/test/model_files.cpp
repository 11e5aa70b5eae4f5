// model_files.cpp -- invalid and unsupported models, which the program must refuse with one line
// that names the file and the error, and with little memory, whatever the file claims.
//
// Run:    build/test/model_files [--program build/train_gpt2_asan] [NAME...]

#include "files.h"

// Opens a model with little address space: sizes that a file claims must not cost memory.
static Outcome open_model(const Text &path) {
    return program("--plan -e " + path, [] {
        enum { SPACE = 48 << 20 };
        struct rlimit r = {SPACE, SPACE};
        if (!has_sanitizers()) {
            setrlimit(RLIMIT_AS, &r);
        }
    });
}
#define expect_model_refused(path, words) expect_refused(open_model(path), words, words)

// llm.c files that are truncated, or have one changed word in the header, are refused.
TEST(llmc_refused) {
    const Shape m = {2, 2, 20, 7, 257};
    std::vector<std::vector<double>> ignored;
    for (int version : {3, 5}) {
        const Text good = llmc_bytes(m, version, &ignored);
        write_file("good.bin", good);
        expect_success(open_model("good.bin"), text("version %d", version));
        const std::pair<Text, const char *> table[] = {
            {with_int(good, 1, 4), "bad.bin: an llm.c model of version 4"},
            {with_int(good, 1, 1), "version 1"},
            {good + "x", "bad.bin: "}, {good.substr(0, good.size() - 1), "its shape requires"},
            {with_int(good, 7, 257), "with 257 padded rows"}, {with_int(good, 7, -1), "padded"},
            {with_int(good, 1, 8 - version), "its shape requires"},
            {with_int(good, 2, 0), "0 positions"},
            {with_int(good, 3, 0), "0 tokens"}, {with_int(good, 3, 70000), "70000 tokens"},
            {with_int(good, 3, INT32_MAX), "tokens"}, {with_int(good, 4, -2), "-2 layers"},
            {with_int(good, 4, 400), "its shape requires"}, {with_int(good, 4, 401), "401 layers"},
            {with_int(good, 5, 0), "0 heads"}, {with_int(good, 5, 3), "3 heads"},
            {with_int(good, 6, 65536), "its shape requires"},
            {with_int(good, 6, INT32_MIN), "channels"}};
        for (auto &row : table) {
            write_file("bad.bin", row.first);
            expect_model_refused("bad.bin", row.second);
        }
    }
    const Text good = llmc_bytes(m, 3, &ignored);
    for (size_t n = 0; n < 1024; n += n < 40 ? 1 : 41) {
        write_file("cut.bin", good.substr(0, n));
        expect_model_refused("cut.bin",
                             n < 4 ? "cannot open config.json" : "too short for an llm.c model");
    }
}

// Changes to one tensor of a good file: its name, the field, the new value, the expected message.
static const struct {
    const char *name;
    char field;  // n(ame), d(type), s(hape) or o(ffsets)
    const char *value, *words;
} changes[] = {
    {"wpe.weight", 'd', "Q4", "wpe.weight: unknown dtype"},
    {"wpe.weight", 'd', "", "wpe.weight: unknown dtype"},
    {"wpe.weight", 'd', "F64", "wpe.weight: data_offsets do not match"},
    {"wpe.weight", 'd', "I32", "wpe.weight: dtype must be F32, BF16 or F16"},
    {"wpe.weight", 's', "4,3", "wpe.weight: shape is not (3, 4)"},
    {"wpe.weight", 's', "12", "wpe.weight: shape is not (3, 4)"},
    {"wpe.weight", 's', "3,4,1", "wpe.weight: shape is not (3, 4)"},
    {"wpe.weight", 's', "3,5", "wpe.weight: data_offsets do not match"},
    {"wpe.weight", 's', "-3,-4", "wpe.weight: expected an integer"},
    {"wpe.weight", 's', "0,4", "wpe.weight: data_offsets do not match"},
    {"wpe.weight", 's', "", "wpe.weight: data_offsets do not match"},
    {"wpe.weight", 's', "1099511627776,1099511627776",
     "wpe.weight: shape has more"},
    {"wpe.weight", 's', "0,1099511627776,1099511627776", "wpe.weight: data_offsets"},
    {"wpe.weight", 's', "4294967299,4294967296", "wpe.weight: shape has more"},
    {"h.1.attn.c_attn.weight", 's', "12,4", "weight: shape is not (4, 12)"},
    {"h.1.mlp.c_proj.weight", 's', "4,16", "weight: shape is not (16, 4)"},
    {"ln_f.bias", 's', "4,1", "ln_f.bias: shape is not"},
    {"ln_f.bias", 's', "1,4", "ln_f.bias: shape is not"},
    {"wpe.weight", 'n', "wte.weight", "wte.weight: appears twice"},
    {"h.0.ln_1.bias", 'n', "h.2.ln_1.bias", "h.2.ln_1.bias: not a tensor of a GPT-2"},
    {"h.0.ln_1.bias", 'n', "h.99.ln_1.bias", "h.99.ln_1.bias: not a tensor of a GPT-2"},
    {"h.0.ln_1.bias", 'n', "h.01.ln_1.bias", "h.01.ln_1.bias: not a tensor of a GPT-2"},
    {"h.0.ln_1.bias", 'n', "h.-1.ln_1.bias", "h.-1.ln_1.bias: not a tensor of a GPT-2"},
    {"h.0.ln_1.bias", 'n', "h.4294967296.ln_1.bias", "not a tensor of a GPT-2"},
    {"h.0.ln_1.bias", 'n', "h.18446744073709551616.ln_1.bias", "not a tensor of a GPT-2"},
    {"h.0.ln_1.bias", 'n', "h.0.wte.weight", "not a tensor of a GPT-2"},
    {"h.0.ln_1.bias", 'n', "h..ln_1.bias", "not a tensor of a GPT-2"},
    {"h.0.ln_1.bias", 'n', "ln_1.bias", "not a tensor of a GPT-2"},
    {"ln_f.bias", 'n', "h.0.ln_f.bias", "not a tensor of a GPT-2"},
    {"ln_f.bias", 'n', "transformer.transformer.ln_f.bias", "not a tensor of a GPT-2"},
    {"ln_f.bias", 'n', "", "tensor : not a tensor of a GPT-2"},
    {"ln_f.bias", 'n', "ln_f.bias\\n\\u001b[2J", "tensor ln_f.bias??[2J: "},
    {"h.0.ln_1.weight", 'o', "160,176", "overlap"},
    {"h.0.ln_1.weight", 'o', "132,148", "overlap"}};

static const Shape small = {2, 2, 4, 3, 5};
static Members small_model() { return hugging_face(small, {"F32"}, ""); }

// Expects the message `words` for a model file with the config.json of `small`.
static void refuse_at(int line, const Text &file, const Text &words) {
    write_model("model", file, config_text(small));
    refused_at(__FILE__, line, open_model("model"), words, words);
}
#define refuse(file, words) refuse_at(__LINE__, file, words)

// Malformed files and headers are refused with the file's name and with little memory.
TEST(model_refused) {
    const Members good = small_model();
    const Text bytes = safetensors_bytes(good);
    auto header = [](uint64_t length) { return Text((const char *)&length, 8); };
    static const char not_one[] = "model/model.safetensors: not a safetensors file";
    static const char json[] = "model/model.safetensors: invalid JSON: ";
    const Text wte = "model/model.safetensors: tensor wte.weight: ";
    const uint64_t size = bytes.size();
    const std::pair<Text, Text> files[] = {
        {"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 135\n",
         "model/model.safetensors: a Git LFS pointer"},
        {"", not_one}, {"{}", not_one}, {Text(7, 0), not_one}, {Text(8, 0), not_one},
        {header(1) + "{}", not_one}, {header((uint64_t)1 << 63) + bytes.substr(8), not_one},
        {header(~(uint64_t)0) + bytes.substr(8), not_one}, {header(~(uint64_t)6) + "{}", not_one},
        {header((uint64_t)1 << 50) + bytes.substr(8), not_one},
        {header(size - 7) + bytes.substr(8), not_one}, {header(100000001) + bytes, not_one},
        {with_length("{}", ""), "wte.weight: missing"}, {with_length("{}", "x"), "overlap"},
        {with_length("[]", ""), json}, {with_length("{\"a", ""), json},
        {with_length("{\"a\":" + Text(5 << 20, '['), ""), "expected an object"},
        {with_length("{\"wte.weight\":{\"shape\":" + Text(5 << 20, '['), ""), wte},
        {safetensors_bytes(good, "\"__metadata__\":{},\"__metadata__\":{},"),
         "duplicate __metadata__"},
        {bytes + "x", "do not cover its"},
        {bytes.substr(0, size - 1), "outside the file"}, {bytes.substr(0, 400), not_one},
        {with_header(bytes, "\"dtype\":\"F32\",", ""), wte + "dtype, shape and two data_offsets"},
        {with_header(bytes, "\"F32\"", "\"F32\",\"dtype\":\"F32\""), wte + "duplicate or unknown"},
        {with_header(bytes, "\"dtype\"", "\"Dtype\""), wte + "duplicate or unknown key"},
        {with_header(bytes, "\"F32\"", "5"), wte}, {with_header(bytes, "F32", "F32\\u0000"), wte},
        {with_header(bytes, "[5,4]", "5"), wte}, {with_header(bytes, "[5,4]", "[5,4"), wte},
        {with_header(bytes, "[0,80]", "[0]"), wte},
        {with_header(bytes, "[0,80]", "[0,80,80]"), wte},
        {with_header(bytes, "[0,80]", "[-80,0]"), wte},
        {with_header(bytes, "[0,80]", "[0,8e1]"), wte},
        {with_header(bytes, "[0,80]", "[80,0]"), wte + "data_offsets are outside"},
        {with_header(bytes, "[0,80]", "[0,18446744073709551615]"), wte},
        {with_header(bytes, "[0,80]", "[9007199254740912,9007199254740992]"),
         wte + "data_offsets"},
        {with_header(bytes, "{", "x"), json}, {with_header(bytes, "}", ""), wte}};
    for (auto &row : files) {
        const double began = wall_ms();
        refuse(row.first, row.second);
        expect(wall_ms() - began < 5000, "slow: %s", row.second.c_str());
    }
    detail = text("%zu files", sizeof files / sizeof *files);
}

// Files in which one tensor is changed, missing, duplicated or unknown are refused.
TEST(tensor_refused) {
    const Members good = small_model();
    for (auto &row : changes) {
        Members list = good;
        Member &m = named(&list, row.name);
        (row.field == 'n'   ? m.name
         : row.field == 'd' ? m.dtype
         : row.field == 's' ? m.shape
                            : m.offsets) = row.value;
        refuse(safetensors_bytes(list), row.words);
    }
    for (const Member &t : good) {
        Members list = good;
        list.erase(list.begin() + (&t - &good[0]));
        refuse(safetensors_bytes(list), "tensor " + t.name + ": missing");
        list.push_back(t);
        list.push_back(t);
        list.back().name = "transformer." + t.name;
        refuse(safetensors_bytes(list), "transformer." + t.name + ": appears twice");
    }
    Members list = good;
    list.push_back(good[0]);
    list.back().name = "lm_head.weight";
    list.back().data[79] ^= 1;
    refuse(safetensors_bytes(list), "lm_head.weight: differs from wte.weight");
    list.back().dtype = "U32";
    refuse(safetensors_bytes(list), "lm_head.weight: dtype must be F32");
    list = good;
    list[1].data += "gap!";
    list[1].offsets = "80,128";
    refuse(safetensors_bytes(list), "do not cover its");
    detail = text("%zu changes", sizeof changes / sizeof *changes);
}

// __metadata__ must be an object of strings, as the format requires.
TEST(metadata_refused) {
    const Shape m = {2, 2, 4, 3, 5};
    const Members good = hugging_face(m, {"F32"}, "");
    const Text wrong = "model/model.safetensors: __metadata__, an object of strings: ";
    for (const char *value : {"\"pt\",", "null,", "[\"format\"],", "{\"format\":2},",
                              "{\"format\":{}},", "{"}) {
        write_model("model", safetensors_bytes(good, Text("\"__metadata__\":") + value),
                    config_text(m));
        expect_model_refused("model", wrong);
    }
    for (size_t deep : {(size_t)65, (size_t)5 << 20}) {
        write_model("model", with_length("{\"__metadata__\":" + Text(deep, '['), ""),
                    config_text(m));
        expect_model_refused("model", wrong + "expected an object");
    }
}

// Models whose config.json has one unsupported or invalid entry are refused.
TEST(config_refused) {
    const Shape m = {2, 2, 4, 3, 5};
    const Text bytes = safetensors_bytes(hugging_face(m, {"F32"}, ""));
    static const char *const table[][3] = {
        {"\"n_layer\"", "\"layers\"", "n_layer is missing or 0"},
        {"\"n_head\"", "\"heads\"", "n_head is missing or 0"},
        {"\"n_embd\"", "\"embd\"", "n_embd is missing or 0"},
        {"\"n_positions\"", "\"positions\"", "n_positions is missing or 0"},
        {"\"vocab_size\"", "\"vocab\"", "vocab_size is missing or 0"},
        {"\"n_layer\": 2", "\"n_layer\": 0", "n_layer is missing or 0"},
        {"\"n_layer\": 2", "\"n_layer\": -2", "expected an integer"},
        {"\"n_layer\": 2", "\"n_layer\": 2, \"n_layer\": 2", "duplicate size"},
        {"\"n_layer\": 2", "\"n_layer\": 401", "401 layers"},
        {"\"n_layer\": 2", "\"n_layer\": 1048577", "n_layer is too large"},
        {"\"n_layer\": 2", "\"n_layer\": 4294967298", "n_layer is too large"},
        {"\"n_layer\": 2", "\"n_layer\": 99999999999999999999", "expected an integer"},
        {"\"n_layer\": 2", "\"n_layer\": \"2\"", "config.json: "},
        {"\"n_layer\": 2", "\"n_layer\": 1", "h.1.ln_1.weight: not a tensor of a GPT-2"},
        {"\"n_layer\": 2", "\"n_layer\": 3", "h.2.ln_1.weight: missing"},
        {"\"n_head\": 2", "\"n_head\": 3", "3 heads, 4 channels"},
        {"\"n_embd\": 4", "\"n_embd\": 8", "wte.weight: shape is not (5, 8)"},
        {"\"n_embd\": 4", "\"n_embd\": 65538", "65538 channels"},
        {"\"vocab_size\": 5", "\"vocab_size\": 70000", "70000 tokens"},
        {"\"n_positions\": 3", "\"n_positions\": 4", "wpe.weight: shape is not (4, 4)"},
        {"gelu_new", "relu", "activation_function is 'relu'"},
        {"gelu_new", "gelu_new|gelu_pytorch_tanh", "activation_function is"},
        {"gelu_new", "", "activation_function is ''"},
        {"\"gelu_new\"", "[\"gelu_new\"]", "config.json: "},
        {"\"n_inner\": null", "\"n_inner\": 17", "n_inner is 17"},
        {"\"n_inner\": null", "\"n_inner\": nil", "config.json: "},
        {"embeddings\": true", "embeddings\": false", "tie_word_embeddings is 'false'"},
        {"weights\": true", "weights\": false", "scale_attn_weights is 'false'"},
        {"{\n", "{\"scale_attn_by_inverse_layer_idx\": true,", "inverse_layer_idx is 'true'"},
        {"1e-05", "1e-06", "layer_norm_epsilon is '1e-06'"},
        {"\"gpt2\"", "\"gpt_neo\"", "model_type is 'gpt_neo'"},
        {"\n}\n", "\n}\n{", "unexpected text after the end"},
        {"\n}\n", "", "config.json: invalid JSON"},
    };
    for (auto &row : table) {
        Text config = config_text(m);
        expect(has(config, row[0]), "no %s", row[0]);
        config.replace(config.find(row[0]), strlen(row[0]), row[1]);
        write_model("model", bytes, config);
        expect_model_refused("model", row[2]);
    }
    write_model("model", bytes, "");
    expect_model_refused("model", "model/config.json: invalid JSON");
    unlink("model/config.json");
    expect_model_refused("model", "cannot open model/config.json: No such file");
    expect_model_refused("model/none", "'model/none' is neither a preset");
    mkfifo("model/config.json", 0644);
    expect_model_refused("model", "cannot open model/config.json: ");
    detail = text("%zu changes", sizeof table / sizeof *table);
}

// A non-finite number is reported with its tensor and its index in the file's order.
TEST(not_finite) {
    const Shape m = {2, 2, 4, 3, 257};
    static const struct {
        const char *dtype, *name;
        size_t element;
        const char *bytes, *words;
    } table[] = {
        {"F32", "wte.weight", 9, "\x00\x00\xc0\x7f", "tensor wte.weight: element 9 is nan: "},
        {"F32", "h.1.attn.c_attn.weight", 13, "\x00\x00\x80\xff",
         "tensor h.1.attn.c_attn.weight: element 13 is -inf: "},
        {"F32", "ln_f.bias", 3, "\x01\x00\x80\x7f", "tensor ln_f.bias: element 3 is nan: "},
        {"BF16", "h.0.mlp.c_fc.bias", 0, "\x80\x7f", "h.0.mlp.c_fc.bias: element 0 is inf: "},
        {"F16", "wpe.weight", 11, "\x00\xfc", "tensor wpe.weight: element 11 is -inf: "},
        {"F16", "wpe.weight", 0, "\x01\x7c", "tensor wpe.weight: element 0 is nan: "}};
    for (const auto &row : table) {
        Members list = hugging_face(m, {row.dtype}, "");
        const size_t size = row.dtype[0] == 'F' && row.dtype[1] == '3' ? 4 : 2;
        named(&list, row.name).data.replace(row.element * size, size, Text(row.bytes, size));
        write_model("model", safetensors_bytes(list), config_text(m));
        expect_refused(program("-i train.bin -e model -b 2 -x 1", no_leaks), row.words, row.words);
    }
    std::vector<std::vector<double>> ignored;
    Text bytes = llmc_bytes(m, 3, &ignored);
    write_file("model.bin", bytes.replace(1024 + 4 * 5, 4, Text("\x00\x00\x80\x7f", 4)));
    expect_refused(program("-i train.bin -e model.bin -b 2 -x 1", no_leaks),
                   "model.bin: tensor wte.weight: element 5 is inf", "llm.c");
    detail = text("%zu numbers", 1 + sizeof table / sizeof table[0]);
}

// A model split into several files with an index loads the same weights as a single file;
// contradictions are refused with the names of the tensor and file.
TEST(parts) {
    const Shape m = {2, 2, 4, 16, 257};
    const Members all = hugging_face(m, {"F32", "BF16"}, "transformer.");
    write_model("whole", safetensors_bytes(all), config_text(m));
    write_model("parts", "", config_text(m));
    unlink("parts/model.safetensors");
    Members part[2];
    Text map;
    const char *const names[] = {"model-00001-of-00002.safetensors",
                                 "model-00002-of-00002.safetensors"};
    for (size_t i = 0; i < all.size(); i++) {
        part[i % 3 == 0].push_back(all[i]);
        map += Text(i ? ", \"" : "\"") + all[i].name + "\": \"" + names[i % 3 == 0] + "\"";
    }
    // Programs count total_size differently; some are off by half a byte.
    auto put = [&](const Text &changed_map) {
        write_file("parts/model.safetensors.index.json",
                   "{\"metadata\": {\"total_size\": 12.5}, \"weight_map\": {" + changed_map + "}}");
        for (int k = 0; k < 2; k++) {
            write_file(Text("parts/") + names[k], safetensors_bytes(part[k]));
        }
    };
    const Text run = "-i train.bin -b 2 -x 1 -l 0 --quiet -v 0 ";
    put(map);
    expect_success(program(run + "-e whole -o one"), "whole");
    expect_success(program(run + "-e parts -o two"), "parts");
    expect(tensors_of("one", 1) == tensors_of("two", 1) && !tensors_of("one", 1).empty());
    auto with = [&](const Text &was, const Text &now) {
        Text changed = map;
        return changed.replace(changed.find(was), was.size(), now);
    };
    const Text first = "\"" + all[0].name + "\": \"" + names[1] + "\"";
    const std::pair<Text, const char *> table[] = {
        {with(first + ", ", ""), "weight_map lists 27 tensors, but its 2 files contain 28"},
        {with(first, "\"" + all[0].name + "\": \"" + names[0] + "\""),
         "tensor transformer.wte.weight: not found in model-00001-of-00002.safetensors, to"},
        {with(all[0].name, "wte.wait"), "tensor wte.wait: not found in model-00002"},
        {with(names[1], "../x.safetensors"), "'../x.safetensors': at most 64 files"},
        {with(names[1], "none.safetensors"), "open parts/none.safetensors, listed in parts/"},
        {with(names[1], Text(3000, 'a')), "at most 64 files"},
        {"\"a\": 1", "expected a string"}, {"", "wte.weight: missing"}};
    for (const auto &row : table) {
        put(row.first);
        expect_model_refused("parts", row.second);
    }
    part[0].push_back(all[0]);
    put(map);
    expect_model_refused("parts", "tensor transformer.wte.weight: appears twice");
    part[0].pop_back();
    part[0].pop_back();
    put(map);
    expect_model_refused("parts", "tensor transformer.ln_f.weight: not found in model-00001-of");
    mkfifo("parts/fifo", 0644);
    put(with(names[1], "fifo"));
    expect_model_refused("parts", "fifo, listed in parts/model.safetensors.index.json: not a");
    unlink("parts/model.safetensors.index.json");
    mkfifo("parts/model.safetensors.index.json", 0644);
    expect_model_refused("parts", "safetensors.index.json: not a regular file");
}

// A model whose vocabulary is padded to 50304 rows, like nanoGPT's, accepts GPT-2 tokens. The rows
// without a token are part of the softmax and are kept. Other paddings are refused.
TEST(padded_vocabulary) {
    write_file("train.bin", shard_bytes(Ids(400, 7), GPT2_TOKENS));
    for (int rows : {50304, 50305}) {
        const Shape m = {1, 1, 4, 8, rows};
        Members list = hugging_face(m, {"F32"}, "");
        for (Member &t : list) {
            t.data.assign(t.data.size(), 0);
        }
        write_model("model", safetensors_bytes(list), config_text(m));
        const Text run = "-i train.bin -e model -b 2 ";
        if (rows == 50305) {
            expect_refused(program(run), "has a vocabulary of 50305 tokens, the data", "50305");
            continue;
        }
        Outcome o = program(run + "-x 1 -s 1 -g 40 --temperature 100 -o out");
        expect_success(o, "50304");
        expect(has(o.out, "pads GPT-2's vocabulary to 50304 rows") &&
                   has(o.out, "loss 10.8258 "), "%s", o.out.c_str());  // ln 50304
        const Text config = read_file("out/step-00000001/config.json");
        expect(has(config, "\"vocab_size\": 50304") &&
                   has(config, "\"eos_token_id\": 50256"), "%s", config.c_str());
        expect_success(program(run + "-o out -y 1 -x 2 --quiet"), "resumed");
    }
}

int main(int argc, char **argv) {
    return harness_main(argc, argv, "./train_gpt2");
}
