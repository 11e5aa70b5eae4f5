// data/files.c -- errors, memory, file I/O, SHA-256, UTF-8, JSON and safetensors.
//
// Nothing here depends on models, options or engines. Header fields are checked against the file
// size before use. train_gpt2.c and data/tokenize.c include this file, as C11 or C++17.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#if defined(__SHA__) && defined(__SSE4_1__)
#include <smmintrin.h>
#endif

// -------------------------------------------------------------------------------------------------
// 1. Errors and memory
// After an error, the program prints one line to stderr and exits with a nonzero status. die()
// reports errors that a user can cause; check() reports violated invariants of the program.

enum { PATH_BYTES = 1024 };
static const char *program_name = "train_gpt2";

// The number of completed units of work, which several threads may increment. It lets the watchdog
// (chapter Starting and watching the ranks) distinguish a long phase from a hang.
static uint64_t local_progress, *progress_count = &local_progress;
static void progress(void) { __atomic_fetch_add(progress_count, 1, __ATOMIC_RELAXED); }

// Delay in ms before die() prints its message. If several ranks fail with the same error, the first
// one prints it and the others are terminated during their delay.
static int grace_ms;

// Exit status of die(): 1, or STATUS_TOO_LARGE if the requested run does not fit in memory.
enum { STATUS_TOO_LARGE = 3 };
static int die_status = 1;

// Prints a one-line message and exits. Control characters become '?' because the message may
// contain names from files.
__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...) {
    char text[3 * PATH_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (char *c = text; *c; c++) {
        *c = (unsigned char)*c < 32 || *c == 127 ? '?' : *c;
    }
    fflush(stdout);
    progress();
    signal(SIGTERM, SIG_DFL);
    struct timespec wait = {grace_ms / 1000, grace_ms % 1000 * 1000000L};
    while (nanosleep(&wait, &wait) != 0) {  // interrupted by a signal such as SIGALRM
    }
    fprintf(stderr, "%s: %s\n", program_name, text);
    if (progress_count != &local_progress) {  // true only in a rank
        // exit() would make CUDA free resources that NCCL's threads still use (NVIDIA/nccl#1013).
        fflush(NULL);
        _exit(die_status);
    }
    exit(die_status);
}

__attribute__((noreturn, format(printf, 4, 5)))
static void check_failed(const char *file, int line, const char *condition, const char *hint, ...) {
    char text[PATH_BYTES];
    va_list args;
    va_start(args, hint);
    vsnprintf(text, sizeof text, hint, args);
    va_end(args);
    die("%s:%d: check failed: %s: %s", file, line, condition, text);
}
#define check(condition, ...)                                                                      \
    ((condition) ? (void)0 : check_failed(__FILE__, __LINE__, #condition, __VA_ARGS__))

// Allocates a zeroed host table. Tensors are in the arena (chapter Memory plan).
static void *alloc_zero(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    if (!memory) {
        die("out of memory: cannot allocate %zu x %zu bytes", count, size);
    }
    return memory;
}

static void *grow(void *memory, size_t bytes) {
    void *more = realloc(memory, bytes);
    if (!more) {
        die("out of memory: cannot allocate %zu bytes", bytes);
    }
    return more;
}

static int min_int(int a, int b) { return a < b ? a : b; }
static int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t ceil_div_i64(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t round_up_i64(int64_t a, int64_t b) { return ceil_div_i64(a, b) * b; }

// Extends the 64-bit FNV-1a hash `before` (at first fnv1a_start), for hash tables and fingerprints.
static const uint64_t fnv1a_start = 0xCBF29CE484222325u;
static uint64_t fnv1a(uint64_t before, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; i++) {
        before = (before ^ p[i]) * 0x100000001B3u;
    }
    return before;
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

// A string returned by value, so that printf("%s", bytes_text(n).s) needs no buffer.
typedef struct {
    char s[32];
} ShortText;

// Appends text at offset `n` of `text` (`size` bytes), truncated to fit. Returns the new length.
__attribute__((format(printf, 4, 5)))
static int text_add(char *text, int size, int n, const char *format, ...) {
    va_list args;
    va_start(args, format);
    const int added = vsnprintf(text + n, size - n, format, args);
    va_end(args);
    return added < 0 ? n : min_int(n + added, size - 1);
}

// Returns the 1-based index of `word` (n bytes) in `choices` ("a|b=text"), or 0 if it is absent.
static int choice_find(const char *choices, const char *word, size_t n) {
    int number = 1;
    for (const char *c = choices; *c; c += *c != 0) {
        const size_t length = strcspn(c, "=|");
        if (length == n && memcmp(c, word, n) == 0) {
            return number;
        }
        c += length;
        number += *c == '|';
    }
    return 0;
}

// Formats a size in bytes: "512 B", "1.8 MiB", "11.61 GiB".
static ShortText bytes_text(double bytes) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    ShortText text;
    int u = 0;
    for (; fabs(bytes) >= 1024 && u < 4; u++) {
        bytes /= 1024;
    }
    snprintf(text.s, sizeof text.s, "%.*f %s", (u + 1) / 2, bytes, units[u]);
    return text;
}

// Formats an integer with thousands separators: 1234567 becomes "1,234,567".
static ShortText count_text(int64_t n) {
    ShortText text = {""};
    if (n > -1000 && n < 1000) {
        snprintf(text.s, sizeof text.s, "%d", (int)n);
        return text;
    }
    text = count_text(n / 1000);
    text_add(text.s, sizeof text.s, strlen(text.s), ",%03d", abs((int)(n % 1000)));
    return text;
}

// Formats a count with its noun: "1 shard", "1,030 shards".
static ShortText count_of(int64_t n, const char *thing) {
    ShortText text = count_text(n);
    text_add(text.s, sizeof text.s, strlen(text.s), " %s%s", thing, n == 1 ? "" : "s");
    return text;
}

// Formats a duration in seconds: "0:59", "12:03", "1:02:05", or "7 d" for two days or more.
static ShortText duration_text(double seconds) {
    ShortText text;
    const int64_t s = seconds + 0.5, hours = s / 3600;
    if (hours >= 48) {
        snprintf(text.s, sizeof text.s, "%" PRId64 " d", (hours + 12) / 24);
        return text;
    }
    const int n = hours ? snprintf(text.s, sizeof text.s, "%" PRId64 ":", hours) : 0;
    snprintf(text.s + n, sizeof text.s - n, hours ? "%02d:%02d" : "%d:%02d",
             (int)(s / 60 % 60), (int)(s % 60));
    return text;
}

// -------------------------------------------------------------------------------------------------
// 2. Reading and writing files
// Only regular files are opened for reading, because opening a FIFO may block and a device may be
// endless. Files parsed once are mapped. Files needed throughout a run are read by pread(), which
// reports truncation as an error, whereas accessing a truncated mapping raises SIGBUS
// (on_bus_error).

// Formats a path into a buffer of PATH_BYTES bytes. Fails if the path does not fit.
__attribute__((format(printf, 2, 3))) static void path_print(char *path, const char *format, ...) {
    va_list args;
    va_start(args, format);
    int n = vsnprintf(path, PATH_BYTES, format, args);
    va_end(args);
    if (n < 0 || n >= PATH_BYTES) {
        die("path is longer than %d bytes: %.60s...", PATH_BYTES - 1, path);
    }
}

// Writes all `bytes` bytes, in several calls if necessary. Returns 0, or -1 with errno set.
static int write_all(int fd, const void *data, size_t bytes) {
    const char *p = (const char *)data;
    while (bytes > 0) {
        ssize_t n = write(fd, p, bytes);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            errno = n == 0 ? ENOSPC : errno;
            return -1;
        }
        p += n;
        bytes -= n;
    }
    return 0;
}

// Syncs `folder` so that new or renamed entries survive a power failure. Does nothing on file
// systems that cannot open or sync a folder (CIFS, drvfs, FUSE).
static void fsync_folder(const char *folder) {
    const int fd = open(folder, O_RDONLY | O_DIRECTORY);
    if ((fd < 0 || fsync(fd) != 0) && errno != EINVAL && errno != EBADF && errno != ENOTSUP &&
        errno != ENOSYS && errno != EACCES && errno != EPERM) {
        die("cannot sync folder %s: %s", folder, strerror(errno));
    }
    close(fd);
}

static void make_folders(const char *path) {
    char part[PATH_BYTES], parent[PATH_BYTES];
    path_print(parent, path[0] == '/' ? "/" : ".");
    for (size_t n = 1; n <= strlen(path); n++) {
        if (path[n] == '/' || path[n] == 0) {
            path_print(part, "%.*s", (int)n, path);
            if (mkdir(part, 0777) == 0) {
                fsync_folder(parent);
            } else if (errno != EEXIST) {
                die("cannot create folder %s: %s", part, strerror(errno));
            }
            path_print(parent, "%s", part);
        }
    }
}

// Locks an output folder until this process exits. If another process holds the lock, fails and
// names it. Prints a warning if the file system has no locks (such as Lustre without -o flock).
// 1. F_OFD_SETLK ties the lock to the open file. A plain fcntl() lock would end when any descriptor
//    of the file is closed.
// 2. The lock file is never removed. Otherwise, one process could hold a lock on the removed file
//    while another locks a new file at the same path.
static void folder_lock(const char *folder) {
    char path[PATH_BYTES], host[256] = "", holder[320] = "";
    struct flock all = {.l_type = F_WRLCK};
    path_print(path, "%s/lock", folder);
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) {
        die("--output (-o): cannot open %s: %s", path, strerror(errno));
    }
    if (fcntl(fd, F_OFD_SETLK, &all) == 0) {
        gethostname(host, sizeof host - 1);
        const int n = snprintf(holder, sizeof holder, "process %d on %s\n", getpid(), host);
        if (ftruncate(fd, 0) == 0 && write_all(fd, holder, n) == 0) {
            (void)fsync(fd);  // makes the text visible on other machines
        }
    } else if (errno == EAGAIN || errno == EACCES) {
        const ssize_t n = pread(fd, holder, sizeof holder - 1, 0);
        holder[n > 0 ? strcspn(holder, "\n") : 0] = 0;
        die("--output (-o): %s is in use by another run%s%s (%s is locked)", folder,
            holder[0] ? ": " : "", holder, path);
    } else {
        fprintf(stderr, "%s: warning: cannot lock %s: %s; a second run in this folder would damage "
                "its checkpoints\n", program_name, path, strerror(errno));
    }
}

static int file_same(const char *a, const char *b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_ino == y.st_ino && x.st_dev == y.st_dev;
}

// Opens a regular file of *size bytes for reading. Returns the descriptor, or -1 (see file_error).
static int file_open(const char *path, int64_t *size) {
    struct stat status;
    char begin[25] = "";
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) {
        return -1;
    }
    if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
        close(fd);
        errno = S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
        return -1;
    }
    *size = status.st_size;
    if (pread(fd, begin, 24, 0) == 24 && strcmp(begin, "version https://git-lfs.") == 0) {
        die("%s: this is a Git LFS pointer, not the file itself; run git lfs pull", path);
    }
    return fd;
}

static const char *file_error(void) {
    return errno == EINVAL ? "not a regular file" : strerror(errno);
}

// Reads `bytes` bytes at `offset`. Returns NULL on success, otherwise an error message.
static const char *file_read(int fd, void *out, int64_t bytes, int64_t offset) {
    for (char *to = (char *)out; bytes > 0;) {
        ssize_t n = pread(fd, to, bytes, offset);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return n == 0 ? "the file was truncated while in use" : strerror(errno);
        }
        to += n;
        offset += n;
        bytes -= n;
    }
    return NULL;
}

typedef struct {
    const unsigned char *bytes;
    size_t size;
} Mapping;

// Handles SIGBUS, which means that a mapped file was truncated or its disk failed. Fails with the
// name of the file mapped at the faulting address. Several threads may receive the signal at once.
static void on_bus_error(int number, siginfo_t *info, void *context) {
    static int once;
    char line[2 * PATH_BYTES] = "";
    uintptr_t begin = 0, end = 0, address = (uintptr_t)info->si_addr;
    int name = 0;
    (void)number, (void)context;
    while (__atomic_exchange_n(&once, 1, __ATOMIC_RELAXED)) {
        pause();
    }
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && (address < begin || address >= end) && fgets(line, sizeof line, maps)) {
        sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*s %*s %*s %*s %n", &begin, &end, &name);
    }
    line[strcspn(line, "\n")] = 0;
    die("%s was truncated or became unreadable while in use", line + name);
}

static int mapping_open(Mapping *m, const char *path) {
    int64_t size;
    struct sigaction action = {.sa_flags = SA_SIGINFO};
    action.sa_sigaction = on_bus_error;
    sigaction(SIGBUS, &action, NULL);
    memset(m, 0, sizeof *m);
    int fd = file_open(path, &size);
    if (fd < 0) {
        return -1;
    }
    m->size = size;
    const void *map = m->size ? mmap(NULL, m->size, PROT_READ, MAP_PRIVATE, fd, 0) : "";
    close(fd);
    m->bytes = (const unsigned char *)map;
    return map == MAP_FAILED ? -1 : 0;
}

static void mapping_close(Mapping *m) {
    if (m->size) {
        munmap((void *)(uintptr_t)m->bytes, m->size);
    }
    memset(m, 0, sizeof *m);
}

// Every llm.c file starts with 256 int32 words. The first two are a magic number and a version.
enum { LLMC_TOKENS, LLMC_MODEL, LLMC_EVALUATION, LLMC_FILES = 7, LLMC_HEADER_BYTES = 1024 };
static const struct {
    const char *name;
    int32_t magic, versions[2];  // {0, 0} if recognized only in error messages
} llmc_files[LLMC_FILES] = {
    {"a token file", 20240520, {1, 1}}, {"an llm.c model", 20240326, {3, 5}},
    {"an evaluation file", 20240522, {1, 1}}, {"an llm.c debug state", 20240327, {0, 0}},
    {"an llm.c tokenizer", 20240328, {0, 0}}, {"a Llama 3 token file", 20240801, {0, 0}},
    {"an llm.c Llama 3 model", 20240803, {0, 0}}};
typedef struct {
    int32_t words[8];  // magic number, version, fields that depend on the kind of file
} LlmcHeader;

// Returns the kind of file (LLMC_*), or -1 if the magic number is unknown.
static int llmc_kind(const unsigned char *bytes, size_t size) {
    int32_t magic = 0;
    int kind = LLMC_FILES - 1;
    memcpy(&magic, bytes, min_i64(size, sizeof magic));
    while (kind >= 0 && magic != llmc_files[kind].magic) {
        kind--;
    }
    return kind;
}

// Fails if a file that should begin with a binary header is a text file.
static void text_refuse(const unsigned char *bytes, size_t size, const char *name, const char *is) {
    const int first = size > 15 ? bytes[0] : '{';  // which may begin JSON
    if (first < 0xF8 && first != '{' && !memchr(bytes, 0, min_i64(size, 1024))) {
        die("%s is a text file, not %s; to tokenize it, run data/tokenize --train-bpe 8192 (for "
            "pretrained weights --bpe --tokenizer FOLDER) -o PREFIX %s", name, is, name);
    }
}

// Returns a file's header. Fails unless the file is of this kind and has a supported version.
static LlmcHeader llmc_header(int kind, const unsigned char *bytes, size_t size, const char *name) {
    const char *what = llmc_files[kind].name;
    const int32_t *versions = llmc_files[kind].versions;
    LlmcHeader h;
    text_refuse(bytes, size, name, kind == LLMC_TOKENS ? "token data" : what);
    if (size < LLMC_HEADER_BYTES) {
        die("%s: %zu bytes is too short for %s; the header alone is %d bytes", name, size, what,
            LLMC_HEADER_BYTES);
    }
    memcpy(h.words, bytes, sizeof h.words);
    const int found = llmc_kind(bytes, size);
    if (found != kind) {
        die("%s: not %s: the first word is %d; expected %d%s%s", name, what, h.words[0],
            llmc_files[kind].magic, found < 0 ? "" : "; it is ",
            found >= 0            ? llmc_files[found].name
            : kind == LLMC_TOKENS ? "; data/tokenize --tokens converts headerless uint16 tokens"
                                  : "");
    }
    if (h.words[1] != versions[0] && h.words[1] != versions[1]) {
        die("%s: %s with unsupported version %d; expected %d%s", name, what, h.words[1],
            versions[0], versions[1] != versions[0] ? " (fp32) or 5 (bf16)" : "");
    }
    return h;
}

// -------------------------------------------------------------------------------------------------
// 3. SHA-256
// Implements FIPS 180-4, using x86's SHA instructions if the target has them. Checkpoint manifests
// store these hashes.

typedef struct {
    uint32_t h[8];
    uint64_t bytes;
    unsigned char block[64];
} Sha256;
enum { SHA256_TEXT = 65 };

static const uint32_t sha256_k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// Updates the hash state `h` with `count` 64-byte blocks. The x86 SHA instructions are about six
// times as fast as plain C, which would be the slowest part of saving a checkpoint.
#if defined(__SHA__) && defined(__SSE4_1__)
static inline __m128i sha256_load(const void *p) { return _mm_loadu_si128((const __m128i *)p); }

// Calls built-ins directly, because immintrin.h of GCC 13 and 14 uses built-ins that nvcc up to
// 12.6 does not support.
static inline __m128i sha256_two_rounds(__m128i a, __m128i b, __m128i k) {
    return (__m128i)__builtin_ia32_sha256rnds2((__v4si)a, (__v4si)b, (__v4si)k);
}

// Performs rounds 4 i to 4 i + 3 (0 <= i < 16) with message schedule words w.
static inline void sha256_rounds(__m128i *abef, __m128i *cdgh, __m128i w, int i) {
    __m128i k = _mm_add_epi32(sha256_load(sha256_k + 4 * i), w);
    *cdgh = sha256_two_rounds(*cdgh, *abef, k);
    *abef = sha256_two_rounds(*abef, *cdgh, _mm_shuffle_epi32(k, 0x0E));
}

// Returns the next four words of the message schedule after the sixteen words a, b, c, d.
static inline __m128i sha256_schedule(__m128i a, __m128i b, __m128i c, __m128i d) {
    __m128i part = (__m128i)__builtin_ia32_sha256msg1((__v4si)a, (__v4si)b);
    __m128i sum = _mm_add_epi32(part, _mm_alignr_epi8(d, c, 4));
    return (__m128i)__builtin_ia32_sha256msg2((__v4si)sum, (__v4si)d);
}

static void sha256_blocks(uint32_t h[8], const unsigned char *p, size_t count) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i low = _mm_shuffle_epi32(sha256_load(h), 0xB1);
    __m128i high = _mm_shuffle_epi32(sha256_load(h + 4), 0x1B);
    __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xF0);
    for (; count > 0; count--, p += 64) {
        __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i a = _mm_shuffle_epi8(sha256_load(p), swap);
        __m128i b = _mm_shuffle_epi8(sha256_load(p + 16), swap);
        __m128i c = _mm_shuffle_epi8(sha256_load(p + 32), swap);
        __m128i d = _mm_shuffle_epi8(sha256_load(p + 48), swap);
        for (int i = 0; i < 16; i++) {  // the last four schedules are unused
            sha256_rounds(&abef, &cdgh, a, i);
            const __m128i next = sha256_schedule(a, b, c, d);
            a = b, b = c, c = d, d = next;
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    low = _mm_shuffle_epi32(abef, 0x1B);
    high = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)(void *)h, _mm_blend_epi16(low, high, 0xF0));
    _mm_storeu_si128((__m128i *)(void *)(h + 4), _mm_alignr_epi8(high, low, 8));
}
#define SHA256_X86 1
#else
#define SHA256_X86 0
#define sha256_blocks_plain sha256_blocks
#endif

static uint32_t rotate_right(uint32_t x, int n) { return x >> n | x << (32 - n); }

// sha256_blocks() in plain C. If the x86 version is compiled, only tests call it.
__attribute__((unused))
static void sha256_blocks_plain(uint32_t s[8], const unsigned char *p, size_t count) {
    for (; count > 0; count--, p += 64) {
        uint32_t a = s[0], b = s[1], c = s[2], d = s[3], e = s[4], f = s[5], g = s[6], h = s[7];
        uint32_t w[64];
        for (int i = 0; i < 16; i++) {
            w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 |
                   p[4 * i + 2] << 8 | p[4 * i + 3];
        }
        for (int i = 16; i < 64; i++) {
            uint32_t x = w[i - 15], y = w[i - 2];
            w[i] = w[i - 16] + w[i - 7] + (rotate_right(x, 7) ^ rotate_right(x, 18) ^ x >> 3) +
                   (rotate_right(y, 17) ^ rotate_right(y, 19) ^ y >> 10);
        }
        for (int i = 0; i < 64; i++) {
            uint32_t x = h + sha256_k[i] + w[i] + (g ^ (e & (f ^ g))) +
                         (rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25));
            h = g, g = f, f = e, e = d + x;
            x += ((a & b) | (c & (a | b))) +
                 (rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22));
            d = c, c = b, b = a, a = x;
        }
        s[0] += a, s[1] += b, s[2] += c, s[3] += d, s[4] += e, s[5] += f, s[6] += g, s[7] += h;
    }
}

static void sha256_start(Sha256 *s) {
    static const Sha256 fresh = {{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f,
                                  0x9b05688c, 0x1f83d9ab, 0x5be0cd19}, 0, {0}};
    *s = fresh;
}

static void sha256_add(Sha256 *s, const void *data, size_t bytes) {
    const unsigned char *p = (const unsigned char *)data;
    size_t held = s->bytes % 64;
    s->bytes += bytes;
    if (held > 0) {
        size_t used = min_i64(bytes, 64 - held);
        memcpy(s->block + held, p, used);
        if (held + used < 64) {
            return;
        }
        sha256_blocks(s->h, s->block, 1);
        p += used;
        bytes -= used;
    }
    sha256_blocks(s->h, p, bytes / 64);
    memcpy(s->block, p + bytes / 64 * 64, bytes % 64);
}

// Finishes the hash and writes it to `text` as 64 hexadecimal digits.
static void sha256_end(Sha256 *s, char text[SHA256_TEXT]) {
    static const unsigned char padding[64] = {0x80};
    unsigned char length[8];
    for (int i = 0; i < 8; i++) {
        length[i] = s->bytes * 8 >> (56 - 8 * i);
    }
    sha256_add(s, padding, 64 - (s->bytes + 8) % 64);
    sha256_add(s, length, 8);
    for (int i = 0; i < 8; i++) {
        snprintf(text + 8 * i, 9, "%08x", s->h[i]);
    }
}

// -------------------------------------------------------------------------------------------------
// 4. UTF-8 and JSON
// JSON follows RFC 8259, but the reader validates neither literals nor number syntax. It stores the
// first error in `fault` and then reads nothing more. Loops over elements therefore terminate, and
// callers need to check for errors only once, at the end.

// Returns the length (2 to 4 bytes) of the multi-byte UTF-8 character at `text`, or 0 if it is
// invalid (RFC 3629, section 4). Reads at most `left` bytes.
static int utf8_length(const unsigned char *text, size_t left) {
    int length = text[0] >= 0xF0 ? 4 : text[0] >= 0xE0 ? 3 : 2;
    if (text[0] < 0xC2 || text[0] > 0xF4 || left < (size_t)length ||
        (text[0] == 0xE0 && text[1] < 0xA0) || (text[0] == 0xED && text[1] > 0x9F) ||
        (text[0] == 0xF0 && text[1] < 0x90) || (text[0] == 0xF4 && text[1] > 0x8F)) {
        return 0;
    }
    for (int i = 1; i < length; i++) {
        length = (text[i] & 0xC0) == 0x80 ? length : 0;
    }
    return length;
}

// Decodes the character at `text` into *c (UINT32_MAX if invalid). Returns its length in bytes.
static int utf8_decode(uint32_t *c, const unsigned char *text, size_t left) {
    int length = text[0] < 0x80 ? 1 : utf8_length(text, left);
    *c = length == 0 ? UINT32_MAX : length == 1 ? text[0] : text[0] & 0x7Fu >> length;
    for (int i = 1; i < length; i++) {
        *c = *c << 6 | (text[i] & 0x3F);
    }
    return length ? length : 1;
}

typedef struct {
    const unsigned char *bytes;
    size_t offset, end;
    const char *fault;
} Json;
enum { JSON_DEPTH = 64, JSON_SCALAR = 64 };

static int json_fail(Json *j, const char *fault) {
    j->fault = j->fault ? j->fault : fault;
    return 0;
}

// Returns the next non-blank character without consuming it, or -1 at the end or after an error.
static int json_peek(Json *j) {
    while (j->offset < j->end && strchr(" \t\r\n", j->bytes[j->offset]) && j->bytes[j->offset]) {
        j->offset++;
    }
    return j->fault || j->offset == j->end ? -1 : j->bytes[j->offset];
}

static int json_take(Json *j, char c) {
    int found = json_peek(j) == c;
    j->offset += found;
    return found;
}

// Returns the value of the four hexadecimal digits at `offset`, or -1 if they are invalid.
static int json_hex(const Json *j, size_t offset) {
    char digits[5] = "";
    memcpy(digits, j->bytes + offset, offset + 4 > j->end ? 0 : 4);
    return strspn(digits, "0123456789abcdefABCDEF") == 4 ? strtol(digits, NULL, 16) : -1;
}

// Reads the rest of an escape sequence after its backslash: one of `letters`, uXXXX, or a surrogate
// pair (uXXXX\uXXXX). Returns the code point, or 0 on error.
static int json_escape(Json *j) {
    static const char letters[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const int c = j->offset < j->end ? j->bytes[j->offset++] : 0;
    const char *letter = c ? strchr(letters, c) : NULL;
    if (letter) {
        return values[letter - letters];
    }
    const int code = c == 'u' ? json_hex(j, j->offset) : 0;
    j->offset += code > 0 ? 4 : 0;
    const int pair = code >> 10 == 0xD800 >> 10 && j->end - j->offset > 6 &&
                     memcmp(j->bytes + j->offset, "\\u", 2) == 0;
    const int low = pair ? json_hex(j, j->offset + 2) : 0;
    if (low >> 10 == 0xDC00 >> 10) {
        j->offset += 6;
        return 0x10000 + ((code & 0x3FF) << 10 | (low & 0x3FF));
    }
    return code > 0 ? code : json_fail(j, "invalid escape sequence in string");
}

// Reads a string, truncated to capacity - 1 bytes, and decodes its escapes. Rejects \u0000.
static void json_string(Json *j, char *out, size_t capacity) {
    size_t n = 0;
    if (!json_take(j, '"')) {
        json_fail(j, "expected a string");
    }
    while (!j->fault) {
        int c = j->offset < j->end ? j->bytes[j->offset++] : -1, length = 1;
        if (c == '"') {
            break;
        }
        if (c < 32) {
            json_fail(j, "unterminated string");
        }
        if (c == '\\') {
            c = json_escape(j);
            length = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
        }
        for (int i = 0; i < length && n + 1 < capacity; i++) {
            int bits = c >> 6 * (length - 1 - i), lead = 0xF00 >> length & 0xFF;
            out[n++] = length == 1 ? c : i ? (bits & 63) | 128 : bits | lead;
        }
    }
    if (capacity) {
        out[n] = 0;
    }
}

// Copies a number or a literal (true, false, null) to `out` without validating it.
static void json_scalar(Json *j, char out[JSON_SCALAR]) {
    int n = 0, c = json_peek(j);
    while (c > 0 && (isalnum(c) || strchr("+-.", c)) && n < JSON_SCALAR - 1) {
        out[n++] = c;
        j->offset++;
        c = j->offset < j->end ? j->bytes[j->offset] : -1;
    }
    out[n] = 0;
    if (n == 0 || n == JSON_SCALAR - 1) {
        json_fail(j, "expected a value");
    }
}

// Reads an integer between 0 and 2^53.
static int64_t json_count(Json *j) {
    char text[JSON_SCALAR];
    json_scalar(j, text);
    int64_t value = strtoll(text, NULL, 10);
    if (text[strspn(text, "0123456789")] != 0 || value > (int64_t)1 << 53) {
        json_fail(j, "expected an integer between 0 and 2^53");
    }
    return j->fault ? 0 : value;
}

// Advances to the next array element (kind '[') or object member (kind '{'), and copies the key of
// a member. Returns 0 at the end. *count, initially 0, counts the elements.
static int json_next(Json *j, int *count, char kind, char *key, size_t capacity) {
    if (*count == 0 && !json_take(j, kind)) {
        return json_fail(j, kind == '{' ? "expected an object" : "expected an array");
    }
    if (json_take(j, kind == '{' ? '}' : ']')) {
        return 0;
    }
    if (*count > 0 && !json_take(j, ',')) {
        return json_fail(j, "expected a comma");
    }
    ++*count;
    if (kind == '{') {
        json_string(j, key, capacity);
        if (!json_take(j, ':')) {
            json_fail(j, "expected a colon");
        }
    }
    return !j->fault;
}

// Skips a value. Fails if arrays and objects are nested more than `depth` levels deep.
static void json_skip_to(Json *j, int depth) {
    int c = json_peek(j), n = 0;
    char text[JSON_SCALAR];
    if (c == '"') {
        json_string(j, NULL, 0);
    } else if (c != '{' && c != '[') {
        json_scalar(j, text);
    } else if (depth == 0) {
        json_fail(j, "nesting is deeper than 64 levels");
    } else {
        while (json_next(j, &n, c, NULL, 0)) {
            json_skip_to(j, depth - 1);
        }
    }
}

static void json_skip(Json *j) { json_skip_to(j, JSON_DEPTH); }

// Moves to the value at a path of keys, such as "model.vocab", in the object at offset `from`. If
// a key is repeated, the last member is used, as in Python. Returns 0 if there is none.
static int json_find(Json *j, size_t from, const char *path) {
    char key[64];
    const size_t length = strcspn(path, ".");
    size_t found = 0;
    if (j->fault) {
        return 0;
    }
    j->offset = from;
    const int is_object = json_peek(j) == '{';
    for (int n = 0; is_object && json_next(j, &n, '{', key, sizeof key); json_skip(j)) {
        found = strlen(key) == length && memcmp(key, path, length) == 0 ? j->offset : found;
    }
    j->offset = found && !j->fault ? found : j->offset;
    return found && !j->fault && (!path[length] || json_find(j, found, path + length + 1));
}

// Copies the string at a path to `out`. Returns 0 and leaves `out` unchanged if there is none.
static int json_get(Json *j, size_t from, const char *path, char *out, size_t capacity) {
    const int found = json_find(j, from, path) && json_peek(j) == '"';
    if (found) {
        json_string(j, out, capacity);
    }
    return found && !j->fault;
}

// Returns the integer at a path (json_find), or `otherwise` if it is missing or null.
static int64_t json_get_count(Json *j, size_t from, const char *path, int64_t otherwise) {
    return json_find(j, from, path) && json_peek(j) != 'n' ? json_count(j) : otherwise;
}

// Fails if a value is present but not allowed. Each of the `count` rows contains a path and its
// allowed values ("a|b"). Numbers are compared by value, so 1.0e-5 equals 1e-05.
static void json_require(Json j, size_t from, const char *name, const char *const (*rows)[2],
                         int count) {
    for (int i = 0; i < count; i++) {
        char value[64], *end;
        const char *allowed = rows[i][1];
        if (!json_find(&j, from, rows[i][0])) {
            continue;
        }
        const int quote = json_peek(&j) == '"';
        const size_t begin = j.offset;
        json_skip(&j);
        snprintf(value, sizeof value, "%.*s", (int)(j.offset - begin) - 2 * quote,
                 (const char *)j.bytes + begin + quote);
        const int is_number = strtof(value, &end) == strtof(allowed, NULL) && end > value &&
                              *end == 0 && strchr("0123456789", allowed[0]);
        if (!is_number && !choice_find(allowed, value, strlen(value))) {
            die("%s: unsupported %s '%.40s'; expected %s", name, rows[i][0], value, allowed);
        }
    }
}

static void json_check(const Json *j, const char *name) {
    if (j->fault) {
        die("%s: invalid JSON: %s at byte %zu", name, j->fault, j->offset);
    }
}

// Fails if an error has occurred or more text follows the JSON value.
static void json_end(Json *j, const char *name) {
    if (json_peek(j) >= 0) {
        json_fail(j, "trailing characters");
    }
    json_check(j, name);
}

// Writes `text` as the contents of a JSON string. Writes bytes that are not valid UTF-8 as \u00XX.
static void json_text(FILE *f, const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) {
        unsigned char c = text[i];
        int utf8 = c > 126 ? utf8_length((const unsigned char *)text + i, length - i) : 0;
        if (utf8) {
            fwrite(text + i, 1, utf8, f);
            i += utf8 - 1;
        } else if (c == '"' || c == '\\') {
            fprintf(f, "\\%c", c);
        } else if (c < 32 || c > 126) {
            fprintf(f, "\\u%04x", c);
        } else {
            fputc(c, f);
        }
    }
}

// Writes JSON to `f` unless it is NULL. `format` is a printf() format in which ' stands for ".
// Strings are escaped, and numbers that are not finite become null.
__attribute__((format(printf, 2, 3))) static void json_print(FILE *f, const char *format, ...) {
    char spec[16];
    va_list args;
    va_start(args, format);
    for (const char *c = format; f && *c; c++) {
        const size_t n = *c == '%' ? strcspn(c, "cdufgsx") + 1 : 1;
        snprintf(spec, sizeof spec, "%.*s", (int)n, *c == '\'' ? "\"" : c);
        c += n - 1;
        if (n == 1) {
            fputs(spec, f);
        } else if (*c == 's') {
            const int bytes = spec[1] == '.' ? va_arg(args, int) : -1;
            const char *text = va_arg(args, const char *);
            json_text(f, text, bytes < 0 ? strlen(text) : (size_t)bytes);
        } else if (strchr("fg", *c)) {
            const double value = va_arg(args, double);
            fprintf(f, isfinite(value) ? spec : "null", value);
            // NOLINTNEXTLINE(bugprone-branch-clone): the types differ
        } else if (strchr(spec, 'l')) {
            fprintf(f, spec, va_arg(args, int64_t));
        } else {
            fprintf(f, spec, va_arg(args, int));
        }
    }
    va_end(args);
}

// -------------------------------------------------------------------------------------------------
// 5. Safetensors
// Weights and training states are stored in this format. Writer hashes a file as it is written.

// Element types of safetensors files. Weights have type FILE_F32, FILE_BF16 or FILE_F16.
enum { FILE_F32, FILE_BF16, FILE_F16, FILE_U16, FILE_F64, FILE_TYPES = 15 };
static const struct {
    const char *name;
    int bytes;
} file_types[FILE_TYPES] = {{"F32", 4}, {"BF16", 2}, {"F16", 2}, {"U16", 2}, {"F64", 8},
                            {"U8", 1}, {"I64", 8},  {"I32", 4}, {"I16", 2}, {"I8", 1},
                            {"U64", 8}, {"U32", 4},  {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}};

// A safetensors file consists of the header's length (8 bytes), the header (a JSON object with one
// member per tensor), and the data. Format: https://github.com/huggingface/safetensors, README.
typedef struct {
    const char *name;
    Json json;
    int count;                  // number of header members read
    const unsigned char *data;
    uint64_t size, tiling;      // bytes of data; sum of hashes (safetensors_next)
} Safetensors;

typedef struct {
    char name[80];
    int type, dims;
    int64_t shape[2], count;    // first and last dimensions; number of elements
    const unsigned char *data;
} FileTensor;

static void file_require(int ok, const char *file, const char *tensor, const char *what) {
    if (!ok) {
        die("%s: tensor %s: %s", file, tensor, what);
    }
}

static void safetensors_start(Safetensors *f, Mapping map, const char *name) {
    uint64_t length = 0;
    memcpy(&length, map.bytes, map.size < 8 ? 0 : 8);
    if (length < 2 || length > 100000000 || length > map.size - 8) {
        die("%s: not a safetensors file: invalid header length of %" PRIu64 " bytes in a file of "
            "%zu bytes", name, length, map.size);
    }
    const size_t end = 8 + length;
    const Safetensors opened = {name, {map.bytes, 8, end, NULL}, 0, map.bytes + end,
                                map.size - end, 0};
    *f = opened;
}

// Hashes a 64-bit number (the output function of splitmix64).
static uint64_t hash_u64(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

// Parses one header entry, such as {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}.
static void safetensors_member(Safetensors *f, FileTensor *t) {
    Json *j = &f->json;
    const size_t from = j->offset;
    char type[16] = "";
    uint64_t offset[2] = {0, 0};
    int found = json_get(j, from, "dtype", type, sizeof type), offsets = 0;
    t->dims = 0;
    t->count = 1;
    found &= json_find(j, from, "shape");
    while (found && json_next(j, &t->dims, '[', NULL, 0)) {
        const int64_t value = json_count(j);
        if (value > 0 && t->count > ((int64_t)1 << 46) / value) {
            json_fail(j, "shape has more than 2^46 elements");
            break;
        }
        t->count *= value;
        t->shape[min_int(t->dims, 2) - 1] = value;
    }
    found &= json_find(j, from, "data_offsets");
    while (found && json_next(j, &offsets, '[', NULL, 0)) {
        offset[offsets > 1] = json_count(j);
    }
    if (!j->fault) {
        j->offset = from;
        json_skip(j);
    }
    if (j->fault) {
        die("%s: tensor %s: %s at byte %zu", f->name, t->name, j->fault, j->offset);
    }
    t->type = 0;
    while (t->type < FILE_TYPES && strcmp(type, file_types[t->type].name) != 0) {
        t->type++;
    }
    file_require(found && offsets == 2, f->name, t->name,
                 "dtype, shape or data_offsets is missing");
    file_require(t->type < FILE_TYPES, f->name, t->name, "unknown dtype");
    file_require(offset[0] <= offset[1] && offset[1] <= f->size, f->name, t->name,
                 "data_offsets are out of range");
    file_require((int64_t)(offset[1] - offset[0]) == t->count * file_types[t->type].bytes, f->name,
                 t->name, "data_offsets do not match the shape");
    t->data = f->data + offset[0];
    f->tiling += hash_u64(offset[1]) - hash_u64(offset[0]);
}

// Reads the next tensor. After the last one, returns 0, or fails if the tensors do not cover the
// data without gaps or overlaps. If they do, the sum of hash(end) - hash(begin) over all tensors,
// in any order, telescopes to hash(size) - hash(0). A forged file could pass this test, but every
// range has been checked to lie within the file.
static int safetensors_next(Safetensors *f, FileTensor *t) {
    Json *j = &f->json;
    while (json_next(j, &f->count, '{', t->name, sizeof t->name)) {
        if (strcmp(t->name, "__metadata__") != 0) {
            safetensors_member(f, t);
            return 1;
        }
        json_skip(j);
    }
    json_end(j, f->name);
    if (f->tiling != hash_u64(f->size) - hash_u64(0)) {
        die("%s: tensors overlap or do not cover all %" PRIu64 " bytes of data", f->name, f->size);
    }
    return 0;
}

// Copies a string from __metadata__ to `out`, or "" if there is none. Returns whether it exists.
static int safetensors_text(const Mapping *map, const char *key, char *out, size_t capacity) {
    char path[80];
    uint64_t length = 0;
    memcpy(&length, map->bytes, map->size < 8 ? 0 : 8);
    Json j = {map->bytes, 0, length + 8, NULL};
    out[0] = 0;
    snprintf(path, sizeof path, "__metadata__.%s", key);
    return map->size >= 8 && length <= map->size - 8 && json_get(&j, 8, path, out, capacity);
}

// Writes a file and hashes it. After an error, further data are dropped, but callers continue
// because producing the data may involve collectives that every rank must join.
typedef struct {
    int fd;     // -1 if closed, or if another process writes the file
    int error;  // errno of the first failure, or 0
    int64_t bytes;
    char file[PATH_BYTES];
    Sha256 sha;
    char hash[SHA256_TEXT];
} Writer;

static void writer_open(Writer *w, const char *folder, const char *name) {
    path_print(w->file, "%s/%s", folder, name);
    w->bytes = 0;
    sha256_start(&w->sha);
    w->fd = open(w->file, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    w->error = w->fd < 0 ? errno : 0;
}

static void writer_put(Writer *w, const void *data, size_t bytes) {
    if (w->fd >= 0 && !w->error) {
        sha256_add(&w->sha, data, bytes);
        w->error = write_all(w->fd, data, bytes) != 0 ? errno : 0;
        sync_file_range(w->fd, 0, 0, SYNC_FILE_RANGE_WRITE);  // shortens the final fsync()
    }
    w->bytes += bytes;
}

static void writer_close(Writer *w) {
    if (w->fd >= 0) {
        w->error = !w->error && fsync(w->fd) != 0 ? errno : w->error;
        w->error = close(w->fd) != 0 && !w->error ? errno : w->error;
    }
    w->fd = -1;
    sha256_end(&w->sha, w->hash);
}

// A safetensors header under construction: its text and the data offset of the next tensor.
typedef struct {
    char *text;
    size_t bytes;
    FILE *file;
    int64_t offset;
} HeaderText;

// Begins a header. The first header_tensor() closes the __metadata__ object.
static void header_start(HeaderText *h) {
    h->offset = 0;
    h->file = open_memstream(&h->text, &h->bytes);
    check(h->file, "out of memory for a header");
    json_print(h->file, "{'__metadata__':{'format':'pt'");
}

// Adds a tensor of shape (rows,cols), or (cols) if rows is 0, to the header.
static void header_tensor(HeaderText *h, const char *name, int type, int64_t rows, int64_t cols) {
    int64_t bytes = max_i64(rows, 1) * cols * file_types[type].bytes;
    json_print(h->file, rows ? "%s'%s':{'dtype':'%s','shape':[%" PRId64 ","
                             : "%s'%s':{'dtype':'%s','shape':[",
               h->offset ? "," : "},", name, file_types[type].name, rows);
    json_print(h->file, "%" PRId64 "],'data_offsets':[%" PRId64 ",%" PRId64 "]}", cols, h->offset,
               h->offset + bytes);
    h->offset += bytes;
}

// Writes the header, padded with spaces so that the data start at a multiple of 64 bytes.
static void header_write(HeaderText *h, Writer *w) {
    long length = ftell(h->file);
    fprintf(h->file, "}%*s", (int)(63 - (length + 8) % 64), "");
    check(fclose(h->file) == 0, "out of memory for a header");
    uint64_t bytes = h->bytes;
    writer_put(w, &bytes, sizeof bytes);
    writer_put(w, h->text, h->bytes);
    free(h->text);
}
