/* SHA-256 against FIPS 180-4 and hashes made with another implementation, HMAC against RFC 4231, and the random bytes
 * with signals arriving and with the system call forbidden. */
#include "test.h"

#include "../src/wire/sha256.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define HASH_OF_HASHES "60d63ff40b5558727a9b786ac0be9300f7ca58fd9ddd3b2f3681b369018a87dc"

static const char *hex(const uint8_t *p, size_t n) {
    static char text[2][129];
    static int which;
    char *out = text[which ^= 1];
    for (size_t i = 0; i < n; i++) {
        snprintf(out + 2 * i, 3, "%02x", p[i]);
    }
    return out;
}

static const char *sha(const void *data, size_t n) {
    uint8_t out[32];
    ddl__sha256 h;
    ddl__sha256_init(&h);
    ddl__sha256_update(&h, data, n);
    ddl__sha256_final(&h, out);
    return hex(out, 32);
}

TEST(sha256_of_the_standard_messages) {
    const char *two = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    const char *four =
        "abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrs"
        "mnopqrstnopqrstu";
    CHECK_EQ(sha("", 0), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK_EQ(sha("abc", 3), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK_EQ(sha(two, 56), "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK_EQ(sha(four, 112), "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
    char *million = (char *)malloc(1000000);
    memset(million, 'a', 1000000);
    CHECK_EQ(sha(million, 1000000), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    free(million);
}

/* All lengths around the padding's edges, in one piece and in random pieces. */
TEST(sha256_of_every_length_and_split) {
    uint8_t data[300], out[32], whole[32];
    ddl__sha256 all, one;
    unsigned state = 1;
    ddl__sha256_init(&all);
    for (size_t n = 0; n <= 300; n++) {
        for (size_t i = 0; i < n; i++) {
            data[i] = (uint8_t)(i * 7 + n);
        }
        ddl__sha256_init(&one);
        for (size_t at = 0; at < n;) {
            size_t piece = (state = state * 1103515245u + 12345u) >> 16;
            piece = piece % 70 < n - at ? piece % 70 : n - at;
            ddl__sha256_update(&one, data + at, piece);
            at += piece;
        }
        ddl__sha256_final(&one, out);
        ddl__sha256_init(&one);
        ddl__sha256_update(&one, data, n);
        ddl__sha256_final(&one, whole);
        CHECK(memcmp(out, whole, 32) == 0);
        ddl__sha256_update(&all, out, 32);
    }
    ddl__sha256_final(&all, out);
    CHECK_EQ(hex(out, 32), HASH_OF_HASHES);
}

static const char *mac(const void *key, size_t key_bytes, const void *data, size_t bytes) {
    uint8_t out[32];
    ddl__hmac_sha256(key, key_bytes, data, bytes, out);
    return hex(out, 32);
}

TEST(hmac_of_rfc_4231) {
    uint8_t k0b[20], kaa[131], dd[50], cd[50], k25[25], k0c[20];
    memset(k0b, 0x0b, sizeof k0b);
    memset(kaa, 0xaa, sizeof kaa);
    memset(dd, 0xdd, sizeof dd);
    memset(cd, 0xcd, sizeof cd);
    memset(k0c, 0x0c, sizeof k0c);
    for (size_t i = 0; i < sizeof k25; i++) {
        k25[i] = (uint8_t)(i + 1);
    }
    const char *large = "Test Using Larger Than Block-Size Key - Hash Key First";
    const char *both =
        "This is a test using a larger than block-size key and a larger than block-size data. The key needs "
        "to be hashed before being used by the HMAC algorithm.";
    CHECK_EQ(mac(k0b, 20, "Hi There", 8), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    CHECK_EQ(mac("Jefe", 4, "what do ya want for nothing?", 28),
             "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    CHECK_EQ(mac(kaa, 20, dd, 50), "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
    CHECK_EQ(mac(k25, 25, cd, 50), "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
    CHECK(strncmp(mac(k0c, 20, "Test With Truncation", 20), "a3b6167473100ee06e0c796c2955552b", 32) == 0);
    CHECK_EQ(mac(kaa, 131, large, strlen(large)), "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    CHECK_EQ(mac(kaa, 131, both, strlen(both)), "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
    /* no key, no data */
    CHECK_EQ(mac(NULL, 0, NULL, 0), "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

/* A key of 64 bytes is used as it is, one of 65 is hashed. */
TEST(hmac_keys_around_the_block_size) {
    uint8_t key[65], hashed[32], direct[32], via[32];
    for (size_t i = 0; i < sizeof key; i++) {
        key[i] = (uint8_t)(i * 3 + 1);
    }
    ddl__sha256 h;
    for (size_t n = 64; n <= 65; n++) {
        ddl__sha256_init(&h);
        ddl__sha256_update(&h, key, n);
        ddl__sha256_final(&h, hashed);
        ddl__hmac_sha256(key, n, "x", 1, direct);
        ddl__hmac_sha256(hashed, 32, "x", 1, via);
        CHECK_EQ(memcmp(direct, via, 32) == 0, n > 64);
    }
}

TEST(equality_finds_every_single_difference) {
    uint8_t a[32], b[32];
    memset(a, 0x5a, sizeof a);
    memcpy(b, a, sizeof b);
    CHECK(ddl__ct_equal(a, b, 32));
    CHECK(ddl__ct_equal(a, NULL, 0));
    for (size_t bit = 0; bit < 256; bit++) {
        b[bit / 8] = (uint8_t)(b[bit / 8] ^ (1u << bit % 8));
        CHECK(!ddl__ct_equal(a, b, 32));
        CHECK(ddl__ct_equal(a, b, bit / 8)); /* looks no further than asked */
        b[bit / 8] = (uint8_t)(b[bit / 8] ^ (1u << bit % 8));
    }
}

/* The array dies right after, which is when a compiler drops plain stores; its old place on the stack is read back. */
static uint8_t *wiped_at;
__attribute__((noinline)) static void secret_and_wipe(void) {
    uint8_t secret[64];
    for (size_t i = 0; i < sizeof secret; i++) {
        secret[i] = (uint8_t)(0x80 + i);
    }
    wiped_at = secret;
    __asm__ volatile("" : : "r"(secret) : "memory");
    ddl__wipe(secret, sizeof secret);
}

#if !TEST_SANITIZED /* it reads a dead stack frame, which a sanitizer rightly reports */
TEST(wiping_is_not_optimised_away) {
    secret_and_wipe();
    const volatile uint8_t *p = wiped_at;
    uint8_t copy[64];
    for (size_t i = 0; i < 64; i++) {
        copy[i] = p[i];
    }
    size_t left = 0;
    for (size_t i = 0; i < 64; i++) {
        left += copy[i] == 0x80 + i;
    }
    CHECK(left < 4);
}
#endif

static int all_zero(const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (p[i] != 0) {
            return 0;
        }
    }
    return 1;
}

static void check_random(size_t bytes) {
    uint8_t *a = (uint8_t *)calloc(bytes + 1, 1), *b = (uint8_t *)calloc(bytes + 1, 1);
    CHECK_EQ(ddl__random(a, bytes), DDL_OK);
    CHECK_EQ(ddl__random(b, bytes), DDL_OK);
    CHECK(bytes < 8 || memcmp(a, b, bytes) != 0);
    CHECK(bytes < 32 || !all_zero(a + bytes - 16, 16)); /* filled to the end */
    CHECK_EQ(a[bytes], 0);
    free(a);
    free(b);
}

TEST(random_bytes_differ_and_fill_the_buffer) {
    static const size_t sizes[] = {0, 1, 31, 32, 255, 256, 257, 4096, 1000003};
    for (size_t i = 0; i < DDL__COUNT_OF(sizes); i++) {
        check_random(sizes[i]);
    }
}

static volatile int ticks;
static void on_tick(int sig) {
    (void)sig;
    ticks++;
}

/* The kernel returns early from a long getrandom when a signal comes. */
TEST(random_bytes_survive_signals) {
    struct sigaction action = {0}, old;
    action.sa_handler = on_tick;
    pid_t parent = getpid(), child;
    sigaction(SIGUSR1, &action, &old);
    child = fork();
    if (child == 0) {
        for (int i = 0; i < 2000; i++) {
            kill(parent, SIGUSR1);
            usleep(200);
        }
        _exit(0);
    }
    for (int i = 0; i < 5; i++) {
        check_random(8u << 20);
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    sigaction(SIGUSR1, &old, NULL);
    CHECK(ticks > 0);
}

/* Makes two system calls fail in this process: getrandom with error, and open too when both is set. */
static int forbid(unsigned error, int both) {
    unsigned open_call = both ? __NR_openat : __NR_getrandom;
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_getrandom, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, open_call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {(unsigned short)DDL__COUNT_OF(filter), filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

/* Runs in a child, since a filter stays. */
static int random_where_forbidden(unsigned error, int both) {
    pid_t child = fork();
    if (child == 0) {
        uint8_t a[64] = {0};
        if (!forbid(error, both)) {
            _exit(77);
        }
        ddl_status status = ddl__random(a, sizeof a);
        if (both) {
            _exit(status == DDL_ERR_SYSTEM ? 0 : 1);
        }
        _exit(status == DDL_OK && !all_zero(a, 32) && !all_zero(a + 32, 32) ? 0 : 1);
    }
    int result = 0;
    waitpid(child, &result, 0);
    return WIFEXITED(result) ? WEXITSTATUS(result) : 1;
}

TEST(random_bytes_without_the_system_call) {
    int result = random_where_forbidden(ENOSYS, 0);
    if (result == 77) {
        SKIP("seccomp filters are not allowed here");
    }
    CHECK_EQ(result, 0);
    CHECK_EQ(random_where_forbidden(EPERM, 0), 0);
    CHECK_EQ(random_where_forbidden(ENOSYS, 1), 0);
}
