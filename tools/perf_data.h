/* perf_data: what ddl-perf writes into buffers and what it expects to find there. It knows no communication: the expected
 * result is computed from the inputs of all ranks, element by element, in double and uint64_t.
 *
 * Inputs repeat with a period of PERIOD elements and differ by rank and round, so that a buffer is filled by copying
 * and expected results repeat too. The period is a prime: a block that landed at the wrong place shows. Values are
 * small whole numbers: results are exact in every type and in any order of the ranks, and equality is the test. */
#ifndef DDL_PERF_DATA_H
#define DDL_PERF_DATA_H

#include "ddl.h"

#include <stdbool.h>
#include <string.h>

enum { PERIOD = 251, ELEMENT_MAX = 8 };

typedef struct data_rule {
    ddl_dtype dtype;
    ddl_op op;
    int32_t ranks;
    uint32_t round;
} data_rule;

static uint32_t value_at(const data_rule *rule, int32_t rank, int64_t index) {
    uint32_t at = (uint32_t)((index + rank * 29 + (int64_t)rule->round * 13) % PERIOD);
    uint32_t mixed = (at * 2654435761u) >> 16;
    if (rule->dtype == DDL_BOOL) {
        return mixed % 2;
    }
    switch (rule->op) {
    case DDL_SUM:
    case DDL_AVG: /* bf16 counts to 256 */
        return mixed % (rule->ranks <= 64 ? 5 : 2);
    case DDL_PROD: /* rarely 2, so that the product of many ranks stays in range */
        return at % 16 == 3 ? 2 : 1;
    case DDL_LAND:
    case DDL_LOR:
    case DDL_LXOR:
        return mixed % 3;
    default:
        return mixed % 128;
    }
}

/* f16 and bf16 of a number that is 0 or normal in them, to nearest, ties to even. */
static uint16_t to_half(double value, bool is_bf16) {
    float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    if (bits == 0) {
        return 0;
    }
    uint32_t cut = is_bf16 ? 16 : 13, rounded = bits + (1u << (cut - 1)) - 1 + ((bits >> cut) & 1);
    return (uint16_t)((rounded >> cut) - (is_bf16 ? 0 : (127 - 15) << 10));
}

/* Writes one element: a number as a float type, the low bits of `whole` as anything else. */
static void put_element(void *out, ddl_dtype dtype, double number, uint64_t whole) {
    float single = (float)number;
    uint16_t half = dtype == DDL_F16 || dtype == DDL_BF16 ? to_half(number, dtype == DDL_BF16) : 0;
    switch (dtype) {
    case DDL_F16:
    case DDL_BF16:
        memcpy(out, &half, sizeof half);
        return;
    case DDL_F32:
        memcpy(out, &single, sizeof single);
        return;
    case DDL_F64:
        memcpy(out, &number, sizeof number);
        return;
    case DDL_I32:
    case DDL_U32:
        memcpy(out, &(uint32_t){(uint32_t)whole}, 4);
        return;
    case DDL_I64:
    case DDL_U64:
        memcpy(out, &whole, 8);
        return;
    default:
        memcpy(out, &(uint8_t){(uint8_t)whole}, 1);
        return;
    }
}

/* Copies a period that was written once until count elements are full. */
static void repeat(char *data, size_t bytes, size_t written) {
    while (written < bytes) {
        size_t more = written < bytes - written ? written : bytes - written;
        memcpy(data + written, data, more);
        written += more;
    }
}

/* Writes what `rank` holds from element `first` of its input on. */
static void fill(const data_rule *rule, int32_t rank, int64_t first, int64_t count, void *out) {
    size_t width = ddl_dtype_bytes(rule->dtype);
    int64_t once = count < PERIOD ? count : PERIOD;
    for (int64_t i = 0; i < once; i++) {
        uint32_t value = value_at(rule, rank, first + i);
        put_element((char *)out + (size_t)i * width, rule->dtype, value, value);
    }
    repeat(out, (size_t)count * width, (size_t)once * width);
}

/* >>oracle */

static uint64_t combine(ddl_op op, bool is_bool, uint64_t a, uint64_t b) {
    if (is_bool) { /* the sum of bools is "or", their product and minimum "and" */
        bool both = op == DDL_PROD || op == DDL_MIN || op == DDL_BAND || op == DDL_LAND;
        bool differ = op == DDL_BXOR || op == DDL_LXOR;
        return both ? (a != 0 && b != 0) : differ ? (a != 0) != (b != 0) : (a != 0 || b != 0);
    }
    switch (op) {
    case DDL_PROD:
        return a * b;
    case DDL_MIN:
        return a < b ? a : b;
    case DDL_MAX:
        return a > b ? a : b;
    case DDL_BAND:
        return a & b;
    case DDL_BOR:
        return a | b;
    case DDL_BXOR:
        return a ^ b;
    case DDL_LAND:
        return a != 0 && b != 0;
    case DDL_LOR:
        return a != 0 || b != 0;
    case DDL_LXOR:
        return (a != 0) != (b != 0);
    default:
        return a + b;
    }
}

/* A run of elements of an output: the inputs of ranks first_rank .. last_rank, reduced when there are several, from
 * element `index` of theirs on. */
typedef struct expected_run {
    int64_t begin, count;
    int32_t first_rank, last_rank;
    int64_t index;
    bool reduced; /* also of a single rank: the logical ops give 0 or 1 only where there are two */
} expected_run;

static void put_expected(const data_rule *rule, const expected_run *run, int64_t i, void *out) {
    uint64_t whole = value_at(rule, run->first_rank, run->index + i);
    for (int32_t rank = run->first_rank + 1; rank <= run->last_rank; rank++) {
        whole = combine(rule->op, rule->dtype == DDL_BOOL, whole, value_at(rule, rank, run->index + i));
    }
    double number = (double)whole;
    if (rule->op == DDL_AVG && run->reduced) {
        number /= rule->ranks;
        whole /= (uint64_t)rule->ranks;
    }
    put_element(out, rule->dtype, number, whole);
}

/* How many elements of a run are not what they should be. Elements are compared by their bytes. */
static int64_t count_wrong(const data_rule *rule, const expected_run *run, const void *out) {
    unsigned char expected[PERIOD * ELEMENT_MAX];
    size_t width = ddl_dtype_bytes(rule->dtype);
    for (int64_t i = 0; i < PERIOD && i < run->count; i++) {
        put_expected(rule, run, i, expected + (size_t)i * width);
    }
    int64_t wrong = 0;
    for (int64_t at = 0; at < run->count; at += PERIOD) {
        int64_t here = run->count - at < PERIOD ? run->count - at : PERIOD;
        const char *got = (const char *)out + (size_t)(run->begin + at) * width;
        if (memcmp(got, expected, (size_t)here * width) == 0) {
            continue;
        }
        for (int64_t i = 0; i < here; i++) {
            wrong += memcmp(got + (size_t)i * width, expected + (size_t)i * width, width) != 0;
        }
    }
    return wrong;
}

#endif /* DDL_PERF_DATA_H */
