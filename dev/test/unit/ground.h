// ground.h -- tests of train_gpt2.c's random numbers, number formatting and options.

TEST(philox, ALL) {
    // Known answers of Random123 (kat_vectors, philox4x32 10): counter, key, result.
    static const uint32_t known[][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09,
         0x94fdcceb, 0x5001e420, 0x24126ea1},
    };
    for (const uint32_t *k : known) {
        uint32_t out[4];
        philox4x32(out, (uint64_t)k[5] << 32 | k[4], (uint64_t)k[1] << 32 | k[0], k[2], k[3]);
        expect(memcmp(out, k + 6, sizeof out) == 0, "got %08x %08x", out[0], out[1]);
    }
}

// Mean and deviation are within four standard errors; the chunk size changes no number.
TEST(rng_normal, ALL) {
    enum { COUNT = 200001 };
    Reals whole(COUNT), pieces(COUNT);
    rng_normal(whole.data(), COUNT, 0.02, 7, RNG_INIT + 3, 1);
    for (int i = 0, n = 1; i < COUNT; i += n, n = n * 3 % 1009 + 1) {
        n = n < COUNT - i ? n : COUNT - i;
        rng_normal(&pieces[(size_t)i], n, 0.02, 7, RNG_INIT + 3, 1 + i);
    }
    expect(same_bits(whole, pieces));
    double mean = 0, square = 0;
    for (real x : whole) {
        mean += (double)x / COUNT;
        square += (double)x * (double)x / COUNT;
    }
    expect_near((wide)mean, 0, 4 * 0.02 / sqrt(1.0 * COUNT), "mean");
    expect_near((wide)sqrt(square), (wide)0.02, 4 * 0.02 / sqrt(2.0 * COUNT), "deviation");
    rng_normal(pieces.data(), COUNT, 0.02, 8, RNG_INIT + 3, 1);
    expect(!same_bits(whole, pieces), "another seed");
    for (uint64_t i = 0; i < 100000; i++) {
        double u = rng_uniform(7, RNG_SAMPLE, 1, i);
        expect(u >= 0 && u < 1);
    }
}

// permute_index is a permutation for small sizes and sizes around powers of two. Neighbors, and a
// position in two epochs, are as far apart as two random positions: a third of the size on average.
TEST(permute_index, HOST) {
    std::vector<int64_t> sizes = {1000, 4095, 4096, 4097, 65537};
    for (int64_t n = 1; n <= 70; n++) {
        sizes.push_back(n);
    }
    for (int64_t n : sizes) {
        std::vector<char> seen((size_t)n);
        double neighbors = 0, epochs = 0;
        for (int64_t i = 0; i < n; i++) {
            int64_t at = permute_index(i, n, 42, 3);
            expect(at >= 0 && at < n && !seen[(size_t)at]++, "n %d position %d", (int)n, (int)i);
            neighbors += fabs((double)(at - permute_index((i + 1) % n, n, 42, 3)));
            epochs += fabs((double)(at - permute_index(i, n, 42, 4)));
        }
        for (double sum : {neighbors, epochs}) {
            expect(n < 1000 || fabs(sum / (double)(n * n) - 1 / 3.0) < 0.05 / 3, "n %d: %g of n",
                   (int)n, sum / (double)(n * n));
        }
    }
    detail = text("%zu sizes", sizes.size());
}

TEST(parse_bytes, HOST) {
    static const struct {
        const char *text;
        double bytes;
    } sizes[] = {{"16GiB", 0x1p34}, {"512M", 0x1p29}, {"1e9", 1e9},    {"38000000", 38e6},
                 {"0", 0},          {"1.5k", 1536},   {"2TB", 0x1p41}, {"7b", 7},
                 {"", -1},          {"x", -1},        {"-1", -1},      {"5XB", -1},
                 {"5 GiB", -1},     {"nan", -1},      {"inf", -1},     {"1e400", -1},
                 {"9000000T", -1},  {"1GiBB", -1},    {"3iB", -1},     {"1MiB2", -1}};
    for (auto &s : sizes) {
        expect((double)parse_bytes(s.text) == s.bytes, "%s: %g", s.text,
               (double)parse_bytes(s.text));
    }
}

static void parse(Options *o, const char *arguments) {
    static std::list<Words> all;  // kept because options point into argv
    all.push_back(split(arguments));
    std::vector<char *> argv = arguments_of(&all.back());
    options_parse(o, (int)argv.size(), argv.data());
}

// Names, letters and fields are unique, defaults are within their ranges, and every form of an
// option sets its field. A value just outside its range is refused with the option's name.
TEST(options_table, HOST) {
    Options o;
    char value[64];
    for (const OptionRow &row : option_rows) {
        for (const OptionRow *other = option_rows; other < &row; other++) {
            expect(Text(row.name) != other->name && row.offset != other->offset, "%s", row.name);
            expect(row.letter == 0 || row.letter != other->letter, "%s", row.name);
        }
        Text legal = row.type == OPT_TEXT     ? "some"
                     : row.choices ? Text(row.choices, strcspn(row.choices, "=|"))
                     : row.type == OPT_BYTES  ? "1234"
                     : row.type == OPT_REAL   ? text("%g", row.low + (row.high - row.low) / 4)
                                              : text("%.0f", row.low + 1);
        Text name = Text("--") + row.name;
        Words forms = {name + "=" + legal, name + " " + legal, text("-%c ", row.letter) + legal};
        for (const Text &form : forms) {
            if (row.type != OPT_FLAG && name != "--help" && (row.letter || form[1] == '-')) {
                parse(&o, (form + " --help").c_str());
                expect(option_text(value, &o, &row) == legal, "%s: %s", form.c_str(), value);
            }
        }
        Words wrong = {row.type == OPT_TEXT || row.type == OPT_FLAG ? "" : "no-such"};
        if (row.type == OPT_INT || row.type == OPT_REAL || row.type == OPT_SWITCH) {
            wrong = {text("%.17g", row.low - 1), text("%.17g", row.high * 2 + 2), "nan", "1e999",
                     "99999999999999999999", "3x", "0x", "--plan"};
        }
        if (row.type == OPT_BYTES) {
            wrong.push_back(text("%.17g", row.high * 2));
        }
        for (const Text &w : wrong) {
            if (!w.empty() && !(row.type == OPT_SWITCH && w[0] == '-')) {  // needs no value
                const Text letter = row.letter ? text(" (-%c)", row.letter) : Text();
                expect_death(parse(&o, (name + " " + w).c_str()),
                             name + letter + ": invalid value '" + w + "'; expected ");
            }
        }
    }
    Outcome help = in_process("--help all");
    expect_success(help, "--help");
    for (const OptionRow &row : option_rows) {
        expect(has(help.out, Text("--") + row.name + " "), "%s", row.name);
        expect(!row.letter || has(help.out, text("  -%c, --%s", row.letter, row.name)));
    }
    for (size_t at = 0, end; (end = help.out.find('\n', at)) != Text::npos; at = end + 1) {
        expect(end - at <= 80, "%s", help.out.substr(at, end - at).c_str());
    }
    detail = text("%d options", (int)OPTION_ROWS);
}

// Recorded options can be passed on the command line again and give the same values: numbers lose
// no digits, and each choice or set has a single recorded spelling.
TEST(options_text, HOST) {
    static const struct {
        const char *name, *given, *recorded;
    } known[] = {{"lr", "0.000300000001", "0.000300000001"}, {"lr", "3e-4", "0.0003"},
                 {"beta2", "0.95000000000000007", "0.9500000000000001"}, {"eps", "1e-8", "1e-08"},
                 {"master", "1", "split"}, {"master", "0", "none"}, {"offload", "none", "none"},
                 {"offload", "master", "master"}, {"offload", "master,moments", "moments,master"},
                 {"gpu-mem", "16GiB", "17179869184"}};
    for (auto &k : known) {
        Options o;
        char value[64];
        const OptionRow *row = std::find_if(option_rows, std::end(option_rows), [&](auto &each) {
            return strcmp(each.name, k.name) == 0;
        });
        for (const Text &typed : {Text(k.given), Text(k.recorded)}) {
            parse(&o, ("--plan --" + Text(k.name) + "=" + typed).c_str());
            expect(Text(option_text(value, &o, row)) == k.recorded, "--%s %s: %s", k.name,
                   typed.c_str(), value);
        }
    }
    Options o;
    for (const char *wrong : {"none,master", "moments,", ",", "moments|master", "mome"}) {
        expect_death(parse(&o, (Text("--offload=") + wrong).c_str()),
                     Text("--offload: invalid value '") + wrong +
                     "'; expected a comma-separated list of none|weights|gradients|");
    }
}
