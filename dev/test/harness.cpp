// harness.cpp -- tests of dev/test/harness.h itself.
//
// Build:  make build/test/harness
// Run:    build/test/harness [NAME...]

#include "harness.h"

// text() formats results of any length, such as a failure that quotes a whole command.
TEST(long_text) {
    const Text long_word(5000, 'x');
    expect(text("<%s>", long_word.c_str()) == "<" + long_word + ">");
    expect(text("%s", "").empty());
}

// A condition that does not become true in time is a failure that quotes it.
TEST(waiting_fails) {
    const Outcome late = outcome(spawn([] { wait_until([] { return false; }, 0.05); }));
    expect(late.status == 1 && has(late.out, "not within 0.05 s: [] { return false; }"),
           "status %d: %s", late.status, late.out.c_str());
    const double began = wall_ms();
    const auto soon = [&] { wait_until([&] { return wall_ms() > began + 10; }); };
    expect(outcome(spawn(soon)).status == 0);
}

TEST(main_part) {}
TEST(rest_part, REST) {}

// The tests that ALL and FULL select, counted by running this program within itself.
TEST(parts) {
    if (getenv("INSIDE")) {
        return;
    }
    char self[4096] = "";
    expect(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    static const struct {
        const char *all, *full;
        int passed;
    } table[] = {{"", "", 4},      {"0", "0", 4},   {"1", "", 5},    {"yes", "0", 5},
                 {"", "1", 5},     {"", "2", 5},    {"main", "1", 4}, {"main", "", 4},
                 {"rest", "", 1},  {"rest", "1", 1}};
    for (const auto &row : table) {
        const Outcome o = outcome(start_program(self, "", [&] {
            setenv("INSIDE", "yes", 1);
            setenv("ALL", row.all, 1);
            setenv("FULL", row.full, 1);
        }));
        const Text end = text("%d passed, 0 failed, 0 skipped\n", row.passed);
        expect(o.status == 0 && o.out.size() >= end.size() &&
                   o.out.compare(o.out.size() - end.size(), end.size(), end) == 0,
               "ALL=%s FULL=%s: %s", row.all, row.full, o.out.c_str());
    }
    setenv("FULL", "0", 1);
    expect(full_or(1, 2) == 1);
    setenv("FULL", "yes", 1);
    expect(full_or(1, 2) == 2);
}

int main(int argc, char **argv) {
    return harness_main(argc, argv);
}
