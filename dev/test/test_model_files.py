"""Invalid and unsupported models, which the program must refuse with one line that names the file
and the error, without allocating the sizes that a file claims."""

from files import *

SHAPE = 2, 2, 4, 3, 5
INT32_MAX, INT32_MIN = 2**31 - 1, -2**31


def little_memory():
    """For `before`: limits memory, since sizes that a file claims must not be allocated."""
    if not has_sanitizers():
        resource.setrlimit(resource.RLIMIT_AS, (48 << 20, 48 << 20))


def model_refused(path, expected):
    refused("--plan -e " + path, expected, before=little_memory)


def refuse(data, expected):
    """Expects a message for a model file next to a valid config.json."""
    write_model("model", data, config_text(SHAPE))
    model_refused("model", expected)


def good():
    return safetensors({}, hugging_face(SHAPE))


def llmc(shape, version):
    """Returns an llm.c file with random numbers, and its tensors as in safetensors. The file's
    matrices are transposed, and its wte is padded to a multiple of 128 rows."""
    layers, heads, C, positions, vocabulary = shape
    padded = -(-vocabulary // 128) * 128
    data = struct.pack("<8i", 20240326, version, positions, vocabulary, layers, heads, C,
                       padded).ljust(HEADER, b"\0")
    members = hugging_face(shape, ["F32" if version == 3 else "BF16"])
    for tensor in ["wte.weight", "wpe.weight"] + [name for name, _, _ in BLOCK] + ["ln_f.weight",
                                                                                   "ln_f.bias"]:
        for name in members:
            if name == tensor or name.startswith("h.") and name.split(".", 2)[2] == tensor:
                dtype, sizes, values = members[name]
                size = 4 if version == 3 else 2
                if ".c_" in name and len(sizes) == 2:
                    values = b"".join(values[(row * sizes[1] + column) * size:][:size]
                                      for column in range(sizes[1]) for row in range(sizes[0]))
                data += values + bytes((padded - vocabulary) * C * size * (name == "wte.weight"))
    return data, members


def loads(path, members):
    """Expects a step with a learning rate of 0 to save exactly these weights."""
    shutil.rmtree("out", ignore_errors=True)
    succeeds("-i train.bin -b 1 -x 1 -l 0 --quiet -v 0 -o out -e " + path)
    assert values_of(tensors(checkpoint(1)[MODEL])[1]) == values_of(members)


@pytest.mark.parametrize("dtypes", [["F32"], ["BF16"], ["F16"], ["F32", "BF16", "F16"]])
@pytest.mark.parametrize("shape", [(2, 2, 20, 7, 257), (1, 2, 68, 5, 257)])
def test_accepted(dtypes, shape):
    """Models load from a folder or a file, in one or several dtypes, in any order of tensors, with
    and without the prefix, mask buffers, a tied head and a padded header, around tiles' sizes."""
    members = hugging_face(shape, dtypes)
    write_model("model", safetensors({}, members), config_text(shape))
    loads("model/model.safetensors", members)
    members = hugging_face(shape, dtypes, "transformer.")
    more = {"transformer.h.0.attn.bias": ["U8", [1, 1, 3, 3], bytes(9)], **members,
            "transformer.h.0.attn.masked_bias": ["F32", [], b"\1\2\3\4"],
            "lm_head.weight": members["transformer.wte.weight"]}
    more = dict(reversed(more.items()))
    write_model("model", with_header(safetensors({"format": "pt"}, more), "{", "{      "),
                config_text(shape))
    loads("model/", members)


# A header word of an llm.c file, its value, and the message; version 3 is fp32 and 5 bf16.
LLMC = [
    (1, 4, "bad.bin: an llm.c model with unsupported version 4"), (1, 1, "version 1"),
    (7, 257, "with 257 padded rows"), (7, -1, "padded"), (2, 0, "0 positions"), (3, 0, "0 tokens"),
    (3, 70000, "70000 tokens"), (3, INT32_MAX, "tokens"), (4, -2, "-2 layers"),
    (4, 400, "this shape requires"), (4, 401, "401 layers"), (5, 0, "0 heads"), (5, 3, "3 heads"),
    (6, 65536, "this shape requires"), (6, INT32_MIN, "channels")]


@pytest.mark.parametrize("version", [3, 5])
def test_llmc(version):
    """llm.c files load; those that are truncated or have one wrong header word do not."""
    (file, members), bad = llmc((2, 2, 20, 7, 257), version), Path("bad.bin")
    bad.write_bytes(file)
    succeeds("--plan -e bad.bin", before=little_memory)
    loads("bad.bin", members)
    changes = [(with_ints(file, word, value), expected) for word, value, expected in LLMC]
    changes += [(file + b"x", "bad.bin: "), (file[:-1], "this shape requires"),
                (with_ints(file, 1, 8 - version), "this shape requires")]
    changes += [(file[:n], "cannot open config.json" if n < 4 else "too short for an llm.c model")
                for n in (0, 3, 4, 12, 39, 1023)]
    for data, expected in changes:
        bad.write_bytes(data)
        model_refused("bad.bin", expected)


NOT_ONE = "model/model.safetensors: not a safetensors file"
JSON = "model/model.safetensors: invalid JSON: "
WTE = "model/model.safetensors: tensor wte.weight: "


def length(number):
    return struct.pack("<Q", number)


def header(was, now):
    return lambda file: with_header(file, was, now)


FILES = [
    (lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 135\n",
     "model/model.safetensors: this is a Git LFS pointer"),
    (lambda _: b"", NOT_ONE), (lambda _: b"{}", NOT_ONE), (lambda _: bytes(7), NOT_ONE),
    (lambda _: bytes(8), NOT_ONE), (lambda _: length(1) + b"{}", NOT_ONE),
    (lambda file: length(2**63) + file[8:], NOT_ONE),
    (lambda file: length(2**64 - 1) + file[8:], NOT_ONE),
    (lambda _: length(2**64 - 7) + b"{}", NOT_ONE),
    (lambda file: length(2**50) + file[8:], NOT_ONE),
    (lambda file: length(len(file) - 7) + file[8:], NOT_ONE),
    (lambda file: length(100000001) + file, NOT_ONE),
    (lambda _: with_length(b"{}", b""), "wte.weight: missing"),
    (lambda _: with_length(b"{}", b"x"), "overlap"), (lambda _: with_length(b"[]", b""), JSON),
    (lambda _: with_length(b'{"a', b""), JSON),
    (lambda _: with_length(b'{"a":' + b"[" * (5 << 20), b""), "tensor a: nesting is deeper"),
    (lambda _: with_length(b'{"wte.weight":{"shape":' + b"[" * (5 << 20), b""), WTE),
    (lambda file: file + b"x", "do not cover all"),
    (lambda file: file[:-1], "data_offsets are out of range"), (lambda file: file[:400], NOT_ONE),
    (header('"dtype":"F32",', ""), WTE + "dtype, shape or data_offsets is missing"),
    (header('"dtype"', '"Dtype"'), WTE + "dtype, shape or data_offsets is missing"),
    (header('"F32"', "5"), WTE), (header("F32", "F32\\u0000"), WTE), (header("[5,4]", "5"), WTE),
    (header("[5,4]", "[5,4"), WTE), (header("[0,80]", "[0]"), WTE),
    (header("[0,80]", "[0,80,80]"), WTE), (header("[0,80]", "[-80,0]"), WTE),
    (header("[0,80]", "[0,8e1]"), WTE),
    (header("[0,80]", "[80,0]"), WTE + "data_offsets are out of"),
    (header("[0,80]", "[0,18446744073709551615]"), WTE),
    (header("[0,80]", "[9007199254740912,9007199254740992]"), WTE + "data_offsets"),
    (header("{", "x"), JSON), (header("}}", "}"), JSON), (header("{}", "{"), JSON),
    *((lambda _, deep=deep: with_length(b'{"__metadata__":' + b"[" * deep, b""),
       JSON + "nesting is deeper") for deep in (65, 5 << 20)),
]


@pytest.mark.parametrize("change, expected", FILES)
def test_file(change, expected):
    """Malformed files and headers are refused at once, naming the file and using little memory."""
    refuse(change(good()), expected)


# Changes to one tensor of a good file: its name, the field (or `name`), the new value, the message.
TENSORS = [
    ("wpe.weight", "dtype", '"Q4"', "wpe.weight: unknown dtype"),
    ("wpe.weight", "dtype", '""', "wpe.weight: unknown dtype"),
    ("wpe.weight", "dtype", '"F64"', "wpe.weight: data_offsets do not match"),
    ("wpe.weight", "dtype", '"I32"', "wpe.weight: dtype must be F32, BF16 or F16"),
    *(("wpe.weight", "shape", shape, "wpe.weight: expected shape (3, 4)") for shape in (
        "[4,3]", "[12]", "[3,4,1]")),
    *(("wpe.weight", "shape", shape, "wpe.weight: data_offsets do not match") for shape in (
        "[3,5]", "[0,4]", "[]")),
    ("wpe.weight", "shape", "[-3,-4]", "wpe.weight: expected an integer"),
    ("wpe.weight", "shape", "[1099511627776,1099511627776]", "wpe.weight: shape has more"),
    ("wpe.weight", "shape", "[0,1099511627776,1099511627776]", "wpe.weight: data_offsets"),
    ("wpe.weight", "shape", "[4294967299,4294967296]", "wpe.weight: shape has more"),
    ("h.1.attn.c_attn.weight", "shape", "[12,4]", "weight: expected shape (4, 12)"),
    ("h.1.mlp.c_proj.weight", "shape", "[4,16]", "weight: expected shape (16, 4)"),
    ("ln_f.bias", "shape", "[4,1]", "ln_f.bias: expected shape ("),
    ("ln_f.bias", "shape", "[1,4]", "ln_f.bias: expected shape ("),
    ("h.0.ln_1.weight", "data_offsets", "[160,176]", "overlap"),
    ("h.0.ln_1.weight", "data_offsets", "[132,148]", "overlap"),
    ("wpe.weight", "name", "wte.weight", "wte.weight: appears twice"),
    ("h.0.ln_1.bias", "name", "h.2.ln_1.bias", "h.2.ln_1.bias: not part of a GPT-2"),
    ("h.0.ln_1.bias", "name", "h.99.ln_1.bias", "h.99.ln_1.bias: not part of a GPT-2"),
    ("ln_f.bias", "name", "ln_f.bias\\n\\u001b[2J", "tensor ln_f.bias??[2J: "),
    ("ln_f.bias", "name", "", "tensor : not part of a GPT-2"),
    *(("h.0.ln_1.bias", "name", name, "not part of a GPT-2") for name in (
        "h.01.ln_1.bias", "h.-1.ln_1.bias", "h.4294967296.ln_1.bias", "h.0.wte.weight",
        "h.18446744073709551616.ln_1.bias", "h..ln_1.bias", "ln_1.bias", "h.0.ln_f.bias",
        "transformer.transformer.ln_f.bias")),
]


@pytest.mark.parametrize("name, field, value, expected", TENSORS)
def test_tensor(name, field, value, expected):
    """Files in which one tensor is changed are refused."""
    text, data = header_and_data(good())
    before, entry, after = re.split(r'("%s":\{.*?\})' % re.escape(name), text.decode())
    entry = (entry.replace(name, value) if field == "name" else
             re.sub(r'("%s":)("\w+"|\[.*?\])' % field, lambda m: m[1] + value, entry))
    refuse(with_length((before + entry + after).encode(), data), expected)


def test_tensors():
    """Files in which a tensor is missing, duplicated or unknown are refused."""
    members = hugging_face(SHAPE)
    for name in "wte.weight", "h.0.attn.c_attn.bias", "h.1.mlp.c_proj.weight", "ln_f.bias":
        less = {key: value for key, value in members.items() if key != name}
        refuse(safetensors({}, less), "tensor " + name + ": missing")
        refuse(safetensors({}, {**members, "transformer." + name: members[name]}),
               "transformer." + name + ": appears twice")
    shape = 2, 2, 4, 7, 257
    more = hugging_face(shape)  # the last of 1028 numbers differs
    dtype, sizes, values = more["wte.weight"]
    more["lm_head.weight"] = [dtype, sizes, flipped(values, len(values) - 1)]
    write_model("model", safetensors({}, more), config_text(shape))
    model_refused("model", "lm_head.weight: must equal wte.weight")
    dtype, shape, values = members["wte.weight"]
    refuse(safetensors({}, {**members, "lm_head.weight": [dtype, shape, flipped(values, 79)]}),
           "lm_head.weight: must equal wte.weight")
    refuse(safetensors({}, {**members, "lm_head.weight": ["U32", shape, values]}),
           "lm_head.weight: dtype must be F32")
    text, data = header_and_data(good())  # a gap
    refuse(with_length(text, data[:128] + b"gap!" + data[128:]), "do not cover all")


# One unsupported or invalid entry of config.json.
CONFIGS = [
    *(('"%s"' % name, '"absent"', name + " is missing or zero") for name in (
        "n_layer", "n_head", "n_embd", "n_positions", "vocab_size")),
    ('"n_layer": 2', '"n_layer": 0', "n_layer is missing or zero"),
    ('"n_layer": 2', '"n_layer": -2', "expected an integer"),
    ('"n_layer": 2', '"n_layer": 2, "n_layer": 3', "h.2.ln_1.weight: missing"),
    ('"n_layer": 2', '"n_layer": 401', "401 layers"),
    ('"n_layer": 2', '"n_layer": 1048577', "n_layer is too large"),
    ('"n_layer": 2', '"n_layer": 4294967298', "n_layer is too large"),
    ('"n_layer": 2', '"n_layer": 99999999999999999999', "expected an integer"),
    ('"n_layer": 2', '"n_layer": "2"', "config.json: "),
    ('"n_layer": 2', '"n_layer": 1', "h.1.ln_1.weight: not part of a GPT-2"),
    ('"n_layer": 2', '"n_layer": 3', "h.2.ln_1.weight: missing"),
    ('"n_head": 2', '"n_head": 3', "3 heads, 4 channels"),
    ('"n_embd": 4', '"n_embd": 8', "wte.weight: expected shape (5, 8)"),
    ('"n_embd": 4', '"n_embd": 65538', "65538 channels"),
    ('"vocab_size": 5', '"vocab_size": 70000', "70000 tokens"),
    ('"n_positions": 3', '"n_positions": 4', "wpe.weight: expected shape (4, 4)"),
    ("gelu_new", "relu", "unsupported activation_function 'relu'"),
    ("gelu_new", "gelu_new|gelu_pytorch_tanh", "unsupported activation_function"),
    ("gelu_new", "", "activation_function ''"), ('"gelu_new"', '["gelu_new"]', "config.json: "),
    ('"n_inner": null', '"n_inner": 17', "unsupported n_inner 17"),
    ('embeddings": true', 'embeddings": false', "tie_word_embeddings 'false'"),
    ('weights": true', 'weights": false', "scale_attn_weights 'false'"),
    ("{\n", '{"scale_attn_by_inverse_layer_idx": true,', "inverse_layer_idx 'true'"),
    ("1e-05", "1e-06", "layer_norm_epsilon '1e-06'"),
    ('"gpt2"', '"gpt_neo"', "model_type 'gpt_neo'"), ("\n}\n", "\n}\n{", "trailing characters"),
    ("\n}\n", "", "config.json: invalid JSON"), (None, "", "model/config.json: invalid JSON"),
]


@pytest.mark.parametrize("was, now, expected", CONFIGS)
def test_config(was, now, expected):
    config = config_text(SHAPE)
    write_model("model", good(), replaced(config.encode(), was, now).decode() if was else now)
    model_refused("model", expected)


def test_no_config():
    write_model("model", good(), "")
    os.unlink("model/config.json")
    model_refused("model", "cannot open model/config.json: No such file")
    model_refused("model/none", "unknown model 'model/none'; expected a preset")
    os.mkfifo("model/config.json")
    model_refused("model", "cannot open model/config.json: ")


@pytest.mark.parametrize("dtype, name, element, values", [
    ("F32", "wte.weight", 9, b"\x00\x00\xc0\x7f"),
    ("F32", "h.1.attn.c_attn.weight", 13, b"\x00\x00\x80\xff"),
    ("F32", "ln_f.bias", 3, b"\x01\x00\x80\x7f"), ("BF16", "h.0.mlp.c_fc.bias", 0, b"\x80\x7f"),
    ("F16", "wpe.weight", 11, b"\x00\xfc"), ("F16", "wpe.weight", 0, b"\x01\x7c")])
def test_not_finite(dtype, name, element, values):
    """A non-finite number is reported with its tensor."""
    shape = 2, 2, 4, 3, 257
    members = hugging_face(shape, [dtype])
    data, at = members[name][2], element * len(values)
    members[name][2] = data[:at] + values + data[at + len(values):]
    write_model("model", safetensors({}, members), config_text(shape))
    # A refused run frees nothing, which a sanitizer would report.
    refused("-i train.bin -e model -b 2 -x 1", "tensor %s: contains NaN or infinity" % name,
            env={"ASAN_OPTIONS": "detect_leaks=0"})


def test_parts():
    """A split model loads the same weights; contradictions name the tensor and the file."""
    shape = 2, 2, 4, 16, 257
    members = hugging_face(shape, ["F32", "BF16"], "transformer.")
    write_model("whole", safetensors({}, members), config_text(shape))
    write_model("parts", b"", config_text(shape))
    Path("parts", MODEL).unlink()
    parts = [dict(list(members.items())[i::2]) for i in range(2)]

    def put(parts):
        for i, part in enumerate(parts):
            name = "model-%05d-of-00002.safetensors" % (i + 1)
            Path("parts", name).write_bytes(safetensors({}, part))

    put(parts)
    for model in "whole", "parts":
        succeeds("-i train.bin -b 2 -x 1 -l 0 --quiet -v 0 -e %s -o from-%s" % (model, model))
    assert training_state(1, "from-whole") == training_state(1, "from-parts")
    name = "transformer.ln_f.bias"
    put([parts[0], {key: value for key, value in parts[1].items() if key != name}])
    model_refused("parts", "ln_f.bias: missing")
    put([{**parts[0], name: members[name]}, parts[1]])
    model_refused("parts", name + ": appears twice")
    put(parts)
    left = Path("parts/model-00001-of-00099.safetensors")
    left.write_bytes(Path("parts/model-00001-of-00002.safetensors").read_bytes())
    loads("parts", members)
    index = {"weight_map": {name: "model-0000%d-of-00002.safetensors" % (1 + (name in parts[1]))
                            for name in members}}
    Path("parts", MODEL + ".index.json").write_text(json.dumps(index))
    left.rename("parts/model-00001-of-00001.safetensors")
    loads("parts", members)
    Path("parts/model-00002-of-00002.safetensors").unlink()
    model_refused("parts", "cannot open parts/model-00002-of-00002.safetensors, listed in parts/")
    for name in "../x", "", *range(65):
        index["weight_map"][str(name)] = str(name)
        Path("parts", MODEL + ".index.json").write_text(json.dumps(index))
        if name not in range(62):
            model_refused("parts", "index.json: invalid JSON: expected names of at most 64")
            del index["weight_map"][str(name)]


def test_other_names():
    """Only lm_head.weight; transformers' other names of the sizes; another spelling of 1e-5."""
    shape = 2, 2, 20, 7, 257
    members = hugging_face(shape)
    config = config_text(shape).replace("1e-05", "1.0e-5")
    for name, other in ("n_embd", "hidden_size"), ("n_layer", "num_hidden_layers"), (
            "n_head", "num_attention_heads"), ("n_positions", "max_position_embeddings"):
        config = config.replace(name, other)
    head = {"lm_head.weight" if name == "wte.weight" else name: t for name, t in members.items()}
    write_model("model", safetensors({}, head), config)
    loads("model", members)
    config = config.replace("{", '{"n_layer": 2,', 1).replace("1.0e-5", "9.999999747378752e-06")
    write_model("model", safetensors({}, members), config)
    loads("model", members)
    write_model("model", safetensors({}, members), config.replace('"n_layer": 2', '"n_layer": 3'))
    model_refused("model", "config.json: n_layer and num_hidden_layers have different values")


def test_other_files():
    """Folders and files of another kind are refused with what they are."""
    for name, expected in (("pytorch_model.bin", "only pytorch_model.bin; to convert it: from"),
                           ("adapter_config.json", "only a LoRA adapter; merge it into its base")):
        write_model("folder", b"", "")
        Path("folder", MODEL).unlink()
        Path("folder", name).touch()
        model_refused("folder", "--model (-e): folder has no model.safetensors, " + expected)
    for magic, what in ((20240327, "an llm.c debug state"), (20240328, "an llm.c tokenizer"),
                        (20240803, "an llm.c Llama 3 model"), (20240520, "a token file")):
        Path("x.bin").write_bytes(with_ints(bytes(HEADER), 0, magic))
        model_refused("x.bin", "x.bin: not an llm.c model: the first word is %d; expected "
                      "20240326; it is %s" % (magic, what))
    for magic, what in (20240801, "a Llama 3 token file"), (20240326, "an llm.c model"):
        Path("x.bin").write_bytes(with_ints(bytes(HEADER), 0, magic))
        refused("-i x.bin", "x.bin: not a token file: the first word is %d; expected 20240520; it "
                "is %s" % (magic, what))
    write_model("gpt2", good(), config_text(SHAPE))
    assert ("note: -e gpt2 creates a new model; to load the folder of that name, use -e ./gpt2\n"
            in run("--plan -e gpt2").err)


def test_padded_vocabulary():
    """A model whose vocabulary is extended or padded to 50304 rows, like nanoGPT's, accepts GPT-2
    tokens. The rows without a token are part of the softmax and are kept, but are never sampled,
    although they have the highest logit, 4 (all others are 0). Other paddings are refused, unless
    the folder names its tokenizer."""
    Path("train.bin").write_bytes(shard([7] * 400, GPT2))
    options = "-i train.bin -e model -b 2 "
    for rows in 50305, 50258, 50304:
        shape = 1, 1, 4, 8, rows
        members = {name: [dtype, sizes, bytes(len(values))]
                   for name, (dtype, sizes, values) in hugging_face(shape).items()}
        members["wte.weight"][2] = bytes(16 * 50257) + struct.pack("<f", 1) * 4 * (rows - 50257)
        members["ln_f.bias"][2] = struct.pack("<f", 1) * 4
        write_model("model", safetensors({}, members), config_text(shape))
        if rows == 50305:
            refused(options, "has a vocabulary of 50305 tokens, but that of the data")
        elif rows == 50258:
            succeeds(options + "-x 1", "loss 10.8260 ")  # ln(50257 + e^4)
    out = succeeds(options + "-x 1 -s 1 -g 200 -o out", "loss 10.8747 ")  # ln(50257 + 47 e^4)
    sampled = out.split("after step 1 ---\n")[1].split("\n")[0].split()
    assert len(sampled) == 200 and max(map(int, sampled)) < 50257
    config = json.loads((step(1) / CONFIG).read_text())
    assert config["vocab_size"] == 50304 and config["eos_token_id"] == 50256
    succeeds(options + "-o out -y 1 -x 2 --quiet")
