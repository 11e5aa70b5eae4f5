// data/stories.c -- writes short stories from a grammar, for training if there is no other text.
//
//     data/stories > data/stories.txt
//
// Writes the same 2 MB on every machine. A test checks the SHA-256 of the text, and dev/train.sh
// states a loss measured on it. `<|endoftext|>` separates stories.
//
// Words and plots use this notation:
//
//     [one|another]    one of these, with equal probability; brackets may be nested
//     {thing}          a word from the list `thing`; {a thing} adds "a" or "an"; {Thing} and
//                      {A thing} are capitalized
//     {game.past}      another form of a word; / separates forms
//     {he}             the same as {hero.he}; likewise {him}, {his} and {child}
//     '                a quotation mark
//
// A list marked KEPT uses the same word throughout a story. Within a story, two lists that contain
// the same words (hero and friend, place and place2) never use the same word.

#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { TEXT_BYTES = 2000000, STORY_BYTES = 4096, NAME_BYTES = 24, FORMS = 4, FREE = 0, KEPT = 1 };

// -------------------------------------------------------------------------------------------------
// Words
// The first letter selects "a" or "an", so words such as "hour" and "uniform" are excluded.

#define SHE "/she/her/her/girl|"
#define HE "/he/him/his/boy|"
static const char people[] =
    "Anna" SHE "Clara" SHE "Emma" SHE "Ida" SHE "Julia" SHE "Mary" SHE "Nora" SHE "Rosa" SHE
    "Adam" HE "Ben" HE "David" HE "Finn" HE "Hugo" HE "Leo" HE "Peter" HE "Tom/he/him/his/boy";
static const char places[] =
    "the forest/in the forest|the garden/in the garden|the river/by the river|the lake/by the lake|"
    "the hill/on the hill|the harbour/at the harbour|the beach/on the beach|the mill/near the mill|"
    "the barn/behind the barn|the castle/in the castle|the meadow/in the meadow|"
    "the bridge/under the bridge";
static const char natures[] = "kind|clever|brave|small|cheerful|quiet|curious|gentle|eager|shy";
static const char searches[] =
    "look under the bed/looked under the bed|search every cupboard/searched every cupboard|"
    "look behind the door/looked behind the door|open every box/opened every box|"
    "go back to {place}/went back to {place}|ask the neighbours/asked the neighbours|"
    "dig in the sand/dug in the sand";

static const struct {
    const char *name, *forms[FORMS];    // names of the forms after the first
    int kept;
    const char *words;
} lists[] = {
    {"hero", {"he", "him", "his", "child"}, KEPT, people},
    {"friend", {"he", "him", "his", "child"}, KEPT, people},
    {"elder", {""}, KEPT, "mother|father|grandmother|grandfather|aunt|uncle"},
    {"seller", {""}, KEPT, "baker|farmer|miller|tailor|fisherman|old woman"},
    {"place", {"at"}, KEPT, places},
    {"place2", {"at"}, KEPT, places},
    {"home", {""}, KEPT,
     "a little house|an old mill|a small village|a tall tower|an inn|a town by the sea|a farm"},
    {"nature", {""}, KEPT, natures},
    {"nature2", {""}, KEPT, natures},
    {"animal", {"cried"}, KEPT,
     "dog/barked|cat/meowed|owl/hooted|duck/quacked|goose/honked|mouse/squeaked|lamb/bleated|"
     "crow/cawed|pony/snorted|hen/clucked"},
    {"trouble", {"help", "after"}, KEPT,
     "was hungry/gave it some bread/had eaten enough|was cold/wrapped it in a scarf/was warm again|"
     "was thirsty/gave it some water/had drunk enough|was lost/showed it the way/felt safe|"
     "had hurt its leg/tied a cloth around its leg/could walk again"},
    {"thing", {""}, KEPT,
     "kite|ball|drum|whistle|lantern|hat|book|key|ring|basket|umbrella|boat|doll|clock|bell|apron"},
    {"look", {""}, KEPT, "red|blue|green|yellow|old|new|tiny|shiny|wooden|golden|orange|little"},
    {"dish", {""}, KEPT, "cup|bowl|vase|plate|lamp|jug"},
    {"fruit", {"s"}, KEPT,
     "apple/apples|pear/pears|plum/plums|cherry/cherries|peach/peaches|orange/oranges"},
    {"game", {"past", "ing"}, KEPT,
     "climb trees/climbed trees/climbing trees|sing songs/sang songs/singing songs|"
     "fly kites/flew kites/flying kites|draw pictures/drew pictures/drawing pictures|"
     "dance/danced/dancing|read books/read books/reading books|swim/swam/swimming|"
     "catch fish/caught fish/catching fish"},
    {"search", {"past"}, KEPT, searches},
    {"search2", {"past"}, KEPT, searches},
    {"food", {""}, KEPT,
     "a bowl of soup|some bread and butter|an apple pie|some pancakes|a plum cake|some nuts"},
    {"low", {""}, KEPT, "two|three|four|five"},
    {"high", {""}, KEPT, "six|seven|eight|nine|ten|twelve"},
    {"size", {""}, FREE, "big|small|little|grey|brown|white|black|old|ugly"},
    {"spot", {""}, FREE, "under an old tree|behind a wall|in an empty barrel|between two rocks"},
    {"glad", {""}, FREE, "glad|happy|proud|delighted"},
    {"sad", {""}, FREE, "sad|worried|upset|angry"},
    {"said", {""}, FREE, "said|answered|replied"},
    {"cried", {""}, FREE, "cried|shouted|called"},
    {"soon", {""}, FREE, "soon|after a while|in the end|at last"},
    {"day", {""}, FREE,
     "one day|one morning|one evening|last summer|on a [cold|warm|windy|sunny] day|"
     "on [Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday]"},
    {"opening", {""}, FREE,
     "[Once|Once upon a time] there was {a nature} {child} named {hero}. {He} lived in {home} near "
     "{place2}.|{Hero} was {a nature} and {nature2} {child} who [liked|loved] to {game}.|"
     "{Hero} lived in {home} and [liked|loved] {game.ing}.|"
     "Everybody knew {hero}, {a nature} {child} from {home}."},
    {"ending", {""}, FREE,
     "{Hero} never forgot that day.|That night {hero} slept well and dreamed of {place}.|"
     "{Hero} was {glad} for the rest of the day.|"
     "In the evening {he} told {his} {elder} everything, and they both laughed.|"
     "Then {he} ate {food}, because {he} was hungry."},
    {"ending2", {""}, FREE,
     "From that day on they were the best of friends.|Then they {game.past} until it was dark.|"
     "Then they ate {food} together.|{Hero} and {friend} still laugh about it today.|"
     "'Tomorrow we will {game},' said {friend}, and so they did."},
};
enum { LISTS = sizeof lists / sizeof *lists };

// -------------------------------------------------------------------------------------------------
// Plots

static const char *const plots[] = {
    // Lost and found
    "{Day}, {he} could not find {his} {look} {thing}. {He} {search.past}, but it was not there, "
    "and that made {him} {sad}.\n'[Have you seen|Do you know who has] my {thing}?' {he} asked. "
    "'No,' {said} {friend}, 'but we can {search2}.' So they {search2.past}.\n{Soon} {friend} found "
    "the {thing} {spot}. [{A size} {animal} had taken it to play with|{A size} {animal} was "
    "sleeping on it|The wind had carried it there]. '[Thank you|You are a true friend|How clever "
    "you are], {friend}!' {cried} {hero}. {ending2}",
    // An animal that does not forget
    "{Day}, {hero} heard a noise {place.at}. It was {a size} {animal}. It {animal.cried}, because "
    "it {trouble}. '[Poor thing|Do not cry|Come here],' said {hero}, 'I will help you.' {He} "
    "{trouble.help}, and {soon} it {trouble.after}.\n[Some days|Two weeks|A year] later {hero} "
    "lost {his} way {place2.at}. It was [dark|late|foggy], and {he} was {sad}. Then {he} saw the "
    "{animal} again. It led {him} home, because {he} had been [kind|good] to it. {ending}",
    // The truth
    "{Day}, {he} was [dancing|running|jumping|playing ball] in the kitchen. {He} [slipped|fell "
    "over a chair|ran into the table], and {a look} {dish} broke. {Hero} was {sad} and hid the "
    "pieces [under the bed|behind the stove|in a sack].\n'Who broke my {dish}?' asked {his} "
    "{elder}. {Hero} wanted to say that it was the {animal}, but {he} [did not like to lie|knew "
    "that it was wrong]. 'It was me,' {he} {said}, 'and I am sorry.'\n{His} {elder} was not angry, "
    "because {hero} had told the truth. Together they [mended the {dish} with glue|bought a new "
    "{dish}|made another {dish}]. {ending}",
    // Patience
    "{Day}, {his} {elder} gave {him} {low} seeds. {Hero} planted them {place.at} and gave them "
    "water every [day|morning|evening]. But nothing happened. '[Why do they not grow|When will "
    "they grow]?' {he} asked. 'You must wait,' {said} {his} {elder}.\nThen [it rained|the sun came "
    "out], and [small|green] leaves came out of the ground. They grew until they were taller than "
    "{hero}. [Only one {fruit} was ripe, so {hero} gave half of it to {friend}|There were {high} "
    "{fruit.s} on them, so {hero} gave {low} to {friend}]. 'I have never eaten such {a fruit}!' "
    "{cried} {friend}. {ending2}",
    // Work
    "{Day}, {he} went to the market to buy {a thing}. There was {a look} one. 'How much [does it "
    "cost|is the {thing}]?' {he} asked. '{High} coins,' {said} the {seller}. {Hero} counted {his} "
    "coins, but there were only {low}. {He} was {sad}.\n'[May|Can] I work for you?' {he} asked. So "
    "{he} [carried sacks|swept the floor|washed bottles|chopped wood] for the {seller} until the "
    "sun went down. 'You have worked hard,' said the {seller}, 'so the {thing} is yours.' {Hero} "
    "ran home and showed it to {his} {elder}. {ending}",
    // The race
    "{Day}, {hero} and {friend} ran a race to {place}. 'I am faster than you!' {cried} {friend}. "
    "{Hero} ran as fast as {he} could and was soon [far ahead|in front]. But then {friend} [fell "
    "over a stone|slipped in the mud|stepped on a thorn] and could not get up.\n{Hero} turned back "
    "at once, although {he} wanted to win. 'Does it hurt?' {he} asked. '[Only a little|Very "
    "much],' {said} {friend}. {Hero} took {friend.him} by the hand, and they walked to {place} "
    "together. 'Now we have both won,' said {hero}. {ending2}",
    // The quarrel
    "{Day}, {hero} and {friend} found {a look} {thing} {place.at}. 'It is mine, because I saw it "
    "first!' {cried} {hero}. 'No, it is mine!' {cried} {friend}. They both pulled until it broke "
    "in two. Then they went home without a word.\nThat night {hero} could not sleep. In the "
    "morning {he} went to {friend}. 'I am sorry,' {he} said. 'A friend is better than {a thing}.' "
    "'I am sorry too,' {said} {friend}. They mended the {thing} with [glue|string|a nail], and now "
    "it belongs to both. {ending2}",
};
enum { PLOTS = sizeof plots / sizeof *plots };

// -------------------------------------------------------------------------------------------------
// The teller
// A single left-to-right pass over a plot makes the choices and replaces list names with words.

static int kept[LISTS];    // index of each list's word in this story, or -1
static char story[STORY_BYTES];
static size_t length;

// Returns a random number from 0 to n - 1, taken from the upper 32 bits of the linear congruential
// generator in Knuth's MMIX.
static int random_below(int n) {
    static uint64_t x = 2024;
    x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (x >> 32) * n >> 32;
}

static void put(char c) { story[length++] = c; }

// Returns the text after the next `separator` outside brackets, or NULL if the choice that contains
// p ends first.
static const char *behind(const char *p, char separator) {
    for (int depth = 0; *p && depth >= 0; p++) {
        if (depth == 0 && *p == separator) {
            return p + 1;
        }
        depth += (*p == '[') - (*p == ']');
    }
    return NULL;
}

static int count(const char *choices) {
    int n = 0;
    for (const char *p = choices; p; p = behind(p, '|')) {
        n++;
    }
    return n;
}

static const char *part(const char *p, char separator, int index) {
    while (p && index-- > 0) {
        p = behind(p, separator);
    }
    return p;
}

// Returns a word from a list: the kept one, or one that no list with the same words has kept.
static const char *draw(int list) {
    int index = kept[list];
    while (index < 0) {
        index = random_below(count(lists[list].words));
        for (int i = 0; i < LISTS; i++) {
            index = lists[i].words == lists[list].words && kept[i] == index ? -1 : index;
        }
    }
    kept[list] = lists[list].kept ? index : -1;
    return part(lists[list].words, '|', index);
}

static void tell(const char *p);

static void tell_slot(const char *slot) {
    char name[NAME_BYTES] = "";
    size_t start = length;
    memcpy(name, slot, strcspn(slot, "}"));
    int capital = name[0] >= 'A' && name[0] <= 'Z', list = 0, index = 0;
    name[0] += capital ? 'a' - 'A' : 0;
    int article = strncmp(name, "a ", 2) == 0;
    char *word = name + 2 * article, *form = strchr(name, '.');
    if (form) {
        *form++ = 0;
    }
    while (list < LISTS && strcmp(lists[list].name, word) != 0) {
        list++;
    }
    if (list == LISTS) {    // {he} means {hero.he}
        list = 0;
        form = word;
    }
    while (form && strcmp(lists[list].forms[index], form) != 0) {
        index++;
    }
    const char *told = part(draw(list), '/', index + (form != NULL));
    if (article) {
        put('a');
        if (strchr("aeiou", told[0])) {
            put('n');
        }
        put(' ');
    }
    tell(told);
    if (capital && story[start] >= 'a' && story[start] <= 'z') {
        story[start] += 'A' - 'a';
    }
}

// Expands a template, such as a plot or a word, up to the next separator or closing bracket.
static void tell(const char *p) {
    while (*p && !strchr("|/]", *p)) {
        char c = *p++;
        if (c == '{') {
            tell_slot(p);
            p += strcspn(p, "}") + 1;
        } else if (c == '[') {
            tell(part(p, '|', random_below(count(p))));
            p = behind(p, ']');
        } else {
            put(c == '\'' ? '"' : c);
        }
    }
}

int main(int argc, char **argv) {
    if (argc > 1) {
        fprintf(stderr, "usage: %s > FILE\n", argv[0]);
        return 1;
    }
    for (size_t written = 0; written < TEXT_BYTES; written += length) {
        length = 0;
        memset(kept, -1, sizeof kept);
        tell("{opening}\n");
        tell(plots[random_below(PLOTS)]);
        put('\n');
        fputs(written ? "<|endoftext|>\n" : "", stdout);
        fwrite(story, 1, length, stdout);
    }
    if (fflush(stdout) != 0 || ferror(stdout)) {
        perror("data/stories: cannot write");
        return 1;
    }
    return 0;
}
