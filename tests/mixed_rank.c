/* One rank of the jobs that test_arm64.py starts, some of whose ranks have another processor. Prints after each
 * part a digest of all that it has got: the sums of every type, and the parameters that every optimizer and every gradient code leave. What it
 * gives is made of integers, and no arithmetic of its own is in the digest. */
#include "ddl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 70001, COUNTS = 4, ROWS = 40, WIDE = 50, STEPS = 4 };
static const int64_t counts[COUNTS] = {1, 33, 5000, MOST};
static uint64_t digest = 14695981039346656037u; /* FNV-1a */
static ddl_context *context;

static void must(ddl_status status, const char *what) {
    if (status != DDL_OK) {
        printf("failed %s: %s: %s\n", what, ddl_status_name(status), ddl_error(context));
        exit(1);
    }
}

static void digest_add(const void *at, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        digest = (digest ^ ((const unsigned char *)at)[i]) * 1099511628211u;
    }
}

/* splitmix64 (Steele, Lea, Flood 2014): the same everywhere. */
static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Any bits: among those of floats are NaNs of all payloads, infinities and subnormals. */
static void sums(ddl_group *world) {
    static uint64_t in[MOST], out[MOST];
    static const ddl_op ops[] = {DDL_SUM, DDL_PROD, DDL_MIN, DDL_MAX, DDL_AVG};
    static const ddl_dtype types[] = {DDL_I8,  DDL_U8,  DDL_I32,  DDL_U32,  DDL_I64, DDL_U64,
                                      DDL_F16, DDL_BF16, DDL_E4M3, DDL_E5M2, DDL_F32, DDL_F64};
    for (size_t k = 0; k < sizeof types / sizeof types[0] * 5 * COUNTS; k++) {
        int64_t count = counts[k % COUNTS];
        ddl_dtype type = types[k / COUNTS / 5];
        ddl_op op = ops[k / COUNTS % 5];
        for (int64_t i = 0; i < count; i++) {
            in[i] = mix(k * 1000003 + (uint64_t)i * 64 + (uint64_t)ddl_rank(world));
            out[i] = 0;
        }
        ddl_status status = ddl_all_reduce(world, ddl_tensor_1d(in, type, count), ddl_tensor_1d(out, type, count), op);
        if (status != DDL_ERR_UNSUPPORTED && status != DDL_ERR_ARG) { /* averages of integers are refused, on all ranks */
            must(status, "all_reduce");
        }
        digest_add(out, sizeof out);
    }
}

/* Numbers of any sign from 1/8 to 1/4, by their bits. */
static void numbers(void *at, ddl_dtype type, uint64_t seed) {
    for (uint64_t i = 0; i < ROWS * WIDE; i++) {
        uint64_t bits = mix(seed * ROWS * WIDE + i);
        uint32_t word = (uint32_t)(bits >> 32);
        if (type == DDL_F64) {
            ((uint64_t *)at)[i] = (bits & 0x800fffffffffffffu) | 0x3fc0000000000000u;
        } else if (type == DDL_F32) {
            ((uint32_t *)at)[i] = (word & 0x807fffffu) | 0x3e000000u;
        } else {
            ((uint16_t *)at)[i] = (uint16_t)(type == DDL_F16 ? (word & 0x83ffu) | 0x3000u : (word & 0x807fu) | 0x3e00u);
        }
    }
}

/* Blocks from all to all, by each collective that moves them as they are. */
static void blocks(ddl_group *world) {
    static uint64_t in[4 * MOST], out[4 * MOST];
    for (int k = 0; k < COUNTS; k++) {
        int64_t n = counts[k], all = n * ddl_size(world);
        for (int64_t i = 0; i < all; i++) {
            in[i] = mix((uint64_t)(i * 64 + ddl_rank(world)));
            out[i] = 0;
        }
        must(ddl_all_gather(world, ddl_tensor_1d(in, DDL_U64, n), ddl_tensor_1d(out, DDL_U64, all)), "all_gather");
        digest_add(out, sizeof out);
        must(ddl_all_to_all(world, ddl_tensor_1d(in, DDL_U64, all), ddl_tensor_1d(out, DDL_U64, all)), "all_to_all");
        must(ddl_broadcast(world, ddl_tensor_1d(out, DDL_U64, all), k % ddl_size(world)), "broadcast");
        digest_add(out, sizeof out);
        must(ddl_reduce_scatter(world, ddl_tensor_1d(in, DDL_U64, all), ddl_tensor_1d(out, DDL_U64, n), DDL_SUM), "scatter");
        must(ddl_all_gather(world, ddl_tensor_1d(out, DDL_U64, n), ddl_tensor_1d(in, DDL_U64, all)), "all_gather");
        digest_add(in, sizeof in);
    }
}

/* Messages between neighbours in rank, in both directions at once: small, eager, and by rendezvous. */
static void messages(ddl_group *world) {
    static const int64_t sizes[] = {0, 1, 30000, (int64_t)MOST * 8, 5 << 20};
    static unsigned char in[5 << 20], out[5 << 20];
    int rank = ddl_rank(world), peer = rank ^ 1;
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        size_t wrong = 0, bytes = (size_t)sizes[k];
        for (size_t i = 0; i < bytes; i++) {
            out[i] = (unsigned char)(i * 7 + k + 50 * (size_t)rank);
        }
        must(ddl_send_recv(world, ddl_tensor_1d(out, DDL_U8, sizes[k]), peer, 5, ddl_tensor_1d(in, DDL_U8, sizes[k]), peer, 5,
                           NULL), "send_recv");
        for (size_t i = 0; i < bytes; i++) {
            wrong += in[i] != (unsigned char)(i * 7 + k + 50 * (size_t)peer);
        }
        if (wrong > 0) {
            printf("failed send_recv: %zu of %zu bytes are wrong\n", wrong, bytes);
            exit(1);
        }
        memset(in, 0xa5, sizeof in);
    }
}

static void train(ddl_group *world, const ddl_trainer_config *config, ddl_dtype type) {
    static uint64_t weight[ROWS * WIDE], gradient[ROWS * WIDE];
    const int64_t shape[2] = {ROWS, WIDE};
    ddl_trainer *t = NULL;
    numbers(weight, type, 0);
    must(ddl_trainer_create(world, config, &t), "trainer_create");
    must(ddl_trainer_add(t, "w", ddl_tensor_nd(weight, type, 2, shape), ddl_tensor_nd(gradient, type, 2, shape), NULL, NULL),
         "trainer_add");
    must(ddl_trainer_start(t), "trainer_start");
    for (uint64_t step = 0; step < STEPS; step++) {
        numbers(gradient, type, 1 + step * 64 + (uint64_t)ddl_rank(world));
        must(ddl_grad_ready(t, 0), "grad_ready");
        must(ddl_step(t), "step");
        digest_add(weight, sizeof weight);
    }
    must(ddl_trainer_free(&t), "trainer_free");
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    char error[1024] = "";
    ddl_config config = {.error_text = error, .error_bytes = sizeof error};
    if (ddl_init(&config, &context) != DDL_OK) {
        printf("failed init: %s\n", error);
        return 1;
    }
    ddl_group *world = ddl_world(context);
    messages(world);
    blocks(world);
    printf("blocks %016" PRIx64 "\n", digest);
    sums(world);
    printf("sums %016" PRIx64 "\n", digest);
    for (int kind = DDL_SGD; kind <= DDL_LAMB; kind++) {
        ddl_trainer_config trainer = {.optimizer = {.kind = (ddl_optimizer_kind)kind, .weight_decay = 0.01}, .clip_norm = 3};
        for (int type = 0; type < 4; type++) {
            train(world, &trainer, (const ddl_dtype[]){DDL_F16, DDL_BF16, DDL_F32, DDL_F64}[type]);
            printf("optimizer %d, type %d %016" PRIx64 "\n", kind, type, digest);
        }
    }
    for (int kind = DDL_COMPRESS_F16; kind <= DDL_COMPRESS_POWER; kind++) {
        ddl_trainer_config trainer = {.compression = {.kind = (ddl_compression_kind)kind}};
        train(world, &trainer, DDL_F32);
        printf("compression %d %016" PRIx64 "\n", kind, digest);
    }
    must(ddl_finalize(&context), "finalize");
    return 0;
}
