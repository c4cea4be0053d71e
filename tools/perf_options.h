/* perf_options: the command line of ddl-perf. Knows no communication. */
#ifndef DDL_PERF_OPTIONS_H
#define DDL_PERF_OPTIONS_H

#include "ddl.h"
#include "ended.h"
#include "nearest.h"

#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { EXIT_USAGE = 2 };

typedef enum perf_format { FORMAT_TABLE, FORMAT_CSV, FORMAT_JSON } perf_format;
typedef enum perf_mode { MODE_BLOCKING, MODE_NONBLOCKING, MODE_PERSISTENT } perf_mode;
typedef enum perf_spread { SPREAD_MIN, SPREAD_AVG, SPREAD_MAX } perf_spread;

typedef struct perf_options {
    const char *operation; /* "all" is all of them */
    int64_t begin_bytes, end_bytes, step_bytes;
    double factor;
    int32_t rounds, warmup, checks, root;
    ddl_dtype dtype; /* NONE: all */
    ddl_op op;       /* NONE: all */
    perf_mode mode;
    perf_format format;
    perf_spread spread;
    bool rewrite, stats;
    const char *algorithm;
} perf_options;

typedef struct named_value {
    const char *name;
    int value;
} named_value;

static const named_value dtype_names[] = {{"f16", DDL_F16}, {"bf16", DDL_BF16}, {"f32", DDL_F32}, {"f64", DDL_F64},
                                          {"i8", DDL_I8},   {"u8", DDL_U8},     {"i32", DDL_I32}, {"u32", DDL_U32},
                                          {"i64", DDL_I64}, {"u64", DDL_U64},   {"bool", DDL_BOOL}};
static const named_value op_names[] = {{"sum", DDL_SUM},   {"prod", DDL_PROD}, {"min", DDL_MIN},   {"max", DDL_MAX},
                                       {"avg", DDL_AVG},   {"band", DDL_BAND}, {"bor", DDL_BOR},   {"bxor", DDL_BXOR},
                                       {"land", DDL_LAND}, {"lor", DDL_LOR},   {"lxor", DDL_LXOR}};
static const named_value format_names[] = {{"table", FORMAT_TABLE}, {"csv", FORMAT_CSV}, {"json", FORMAT_JSON}};
static const named_value spread_names[] = {{"min", SPREAD_MIN}, {"avg", SPREAD_AVG}, {"max", SPREAD_MAX}};

#define NAMES(table) (table), sizeof(table) / sizeof((table)[0])

static const char perf_usage[] =
    "usage: ddlrun -n 4 ddl-perf [operation] [options]\n"
    "\n"
    "Measures one operation of ddl over a range of sizes, and checks its results.\n"
    "\n"
    "operations: all_reduce (the default), broadcast, reduce, all_gather, reduce_scatter, all_to_all, gather, scatter,\n"
    "            scan, exscan, barrier, gatherv, scatterv, all_gatherv, reduce_scatterv, all_to_allv, send_recv,\n"
    "            ping_pong, or all of them: all\n"
    "\n"
    "  -b, --minbytes SIZE    first size (8); 4K, 64M and 1G are understood\n"
    "  -e, --maxbytes SIZE    last size (64M)\n"
    "  -f, --stepfactor F     each size is F times the one before (2)\n"
    "  -i, --stepbytes SIZE   each size is so many bytes more than the one before; instead of -f\n"
    "  -n, --iters N          timed rounds for each size (20)\n"
    "  -w, --warmup_iters N   rounds before them (5)\n"
    "  -c, --check N          checked rounds for each size, after the timed ones (1); 0: none\n"
    "  -d, --datatype TYPE    f16 bf16 f32 f64 i8 u8 i32 u32 i64 u64 bool (f32); all\n"
    "  -o, --op OP            sum prod min max avg band bor bxor land lor lxor (sum); all\n"
    "  -r, --root RANK        of broadcast, reduce, gather, scatter (0)\n"
    "  -a, --average WHICH    which rank's time the table shows: min, avg, max over ranks (avg)\n"
    "      --blocking         the call that waits (the default)\n"
    "      --nonblocking      the i-form and ddl_wait\n"
    "      --persistent       ddl_collective_init once, then ddl_start and ddl_wait\n"
    "      --stats            after the table, the counters of rank 0 and how often each rank was the last to arrive\n"
    "      --no-rewrite       do not write the inputs anew before each timed round\n"
    "      --algo NAME        use this algorithm, as DDL_ALGO\n"
    "      --format FORMAT    table, csv or json\n"
    "  -h, --help             show this\n"
    "\n"
    "A round is timed from after a barrier until the call returns. size is the larger of a rank's two buffers; algbw is\n"
    "size / time, busbw is algbw times a factor that makes it comparable with the speed of the wire for any number of\n"
    "ranks: 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter, all_to_all, gather and scatter, 1 for the\n"
    "rest (NVIDIA's nccl-tests, doc/PERFORMANCE.md). ping_pong is half a round trip, as in OSU's osu_latency.\n"
    "Exit code: 0, 1 when a call failed or a result is wrong, 2 when an argument is.\n";

/* All ranks read the same arguments; one of them speaks. */
static bool speaks(void) {
    static const char *const names[] = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *value = getenv(names[i]);
        if (value != NULL && value[0] != 0) {
            return strcmp(value, "0") == 0;
        }
    }
    return true;
}

/* The silent ranks leave later: launchers end all ranks as soon as the first one fails. */
static void __attribute__((format(printf, 1, 2), noreturn)) refuse(const char *format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (speaks()) {
        fprintf(stderr, "ddl-perf: %s ddl-perf --help lists what is possible.\n", text);
    } else {
        nanosleep(&(struct timespec){.tv_nsec = 300000000}, NULL);
    }
    exit(EXIT_USAGE);
}

static void __attribute__((noreturn)) refuse_flag(const char *flag) {
    char text[400];
    refuse("%s.", unknown_flag(perf_usage, flag, text, sizeof text));
}

/* 0 for "all" where that is allowed. */
static int parse_name(const char *option, const char *text, const named_value *names, size_t count, bool all) {
    for (size_t i = 0; i < count; i++) {
        if (strcmp(names[i].name, text) == 0) {
            return names[i].value;
        }
    }
    if (all && strcmp(text, "all") == 0) {
        return 0;
    }
    char list[200] = "";
    for (size_t i = 0; i < count; i++) {
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%s", i == 0 ? "" : ", ", names[i].name);
    }
    refuse("%s is \"%s\", but it can be %s%s.", option, text, list, all ? " or all" : "");
}

static int64_t parse_number(const char *option, const char *text, int64_t least, int64_t most) {
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    if (end == text || *end != 0 || errno != 0 || value < least || value > most) {
        refuse("%s is \"%s\", but it must be a whole number from %lld to %lld.", option, text, (long long)least,
               (long long)most);
    }
    return value;
}

static int64_t parse_size(const char *option, const char *text) {
    static const char units[] = "KMGT";
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    int shift = 0;
    const char *unit = *end != 0 ? strchr(units, *end >= 'a' ? *end - 'a' + 'A' : *end) : NULL;
    if (unit != NULL) {
        shift = 10 * (int)(unit - units + 1);
        end++;
        end += *end == 'B' || *end == 'b';
    }
    if (end == text || *end != 0 || errno != 0 || value < 0 || value > (INT64_MAX >> 10) >> shift) {
        refuse("%s is \"%s\", but it must be a size in bytes, as 8, 64K, 16M or 1G.", option, text);
    }
    return (int64_t)value << shift;
}

static double parse_factor(const char *text) {
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end != 0 || !(value > 1 && value <= 1e6)) {
        refuse("--stepfactor is \"%s\", but it must be a number greater than 1.", text);
    }
    return value;
}

enum { OPTION_MODE = 256, OPTION_NO_REWRITE, OPTION_STATS, OPTION_ALGO, OPTION_FORMAT };

static const char short_options[] = ":b:e:f:i:n:w:c:d:o:r:a:h";
static const struct option long_options[] = {{"minbytes", required_argument, NULL, 'b'},
                                             {"maxbytes", required_argument, NULL, 'e'},
                                             {"stepfactor", required_argument, NULL, 'f'},
                                             {"stepbytes", required_argument, NULL, 'i'},
                                             {"iters", required_argument, NULL, 'n'},
                                             {"warmup_iters", required_argument, NULL, 'w'},
                                             {"check", required_argument, NULL, 'c'},
                                             {"datatype", required_argument, NULL, 'd'},
                                             {"op", required_argument, NULL, 'o'},
                                             {"root", required_argument, NULL, 'r'},
                                             {"average", required_argument, NULL, 'a'},
                                             {"blocking", no_argument, NULL, OPTION_MODE + 10},
                                             {"nonblocking", no_argument, NULL, OPTION_MODE + 11},
                                             {"persistent", no_argument, NULL, OPTION_MODE + 12},
                                             {"no-rewrite", no_argument, NULL, OPTION_NO_REWRITE},
                                             {"stats", no_argument, NULL, OPTION_STATS},
                                             {"algo", required_argument, NULL, OPTION_ALGO},
                                             {"format", required_argument, NULL, OPTION_FORMAT},
                                             {"help", no_argument, NULL, 'h'},
                                             {NULL, 0, NULL, 0}};

static void parse_sizes(perf_options *o, int option) {
    switch (option) {
    case 'b':
        o->begin_bytes = parse_size("--minbytes", optarg);
        return;
    case 'e':
        o->end_bytes = parse_size("--maxbytes", optarg);
        return;
    case 'i':
        o->step_bytes = parse_size("--stepbytes", optarg);
        return;
    default:
        o->factor = parse_factor(optarg);
        return;
    }
}

static void parse_option(perf_options *o, int option, char **argv) {
    switch (option) {
    case 'b':
    case 'e':
    case 'i':
    case 'f':
        parse_sizes(o, option);
        return;
    case 'n':
        o->rounds = (int32_t)parse_number("--iters", optarg, 1, 1000000);
        return;
    case 'w':
        o->warmup = (int32_t)parse_number("--warmup_iters", optarg, 0, 1000000);
        return;
    case 'c':
        o->checks = (int32_t)parse_number("--check", optarg, 0, 1000000);
        return;
    case 'd':
        o->dtype = (ddl_dtype)parse_name("--datatype", optarg, NAMES(dtype_names), true);
        return;
    case 'o':
        o->op = parse_name("--op", optarg, NAMES(op_names), true);
        return;
    case 'r':
        o->root = (int32_t)parse_number("--root", optarg, 0, INT32_MAX);
        return;
    case 'a':
        o->spread = (perf_spread)parse_name("--average", optarg, NAMES(spread_names), false);
        return;
    case OPTION_NO_REWRITE:
        o->rewrite = false;
        return;
    case OPTION_STATS:
        o->stats = true;
        return;
    case OPTION_ALGO:
        o->algorithm = optarg;
        return;
    case OPTION_FORMAT:
        o->format = (perf_format)parse_name("--format", optarg, NAMES(format_names), false);
        return;
    case 'h':
        if (speaks()) {
            fputs(perf_usage, stdout);
        }
        exit(ended("ddl-perf", 0));
    case ':':
        refuse("The option %s needs a value.", argv[optind - 1]);
    case '?':
        refuse_flag(argv[optind - 1]);
    default:
        o->mode = (perf_mode)(option - OPTION_MODE - 10);
        return;
    }
}

static perf_options parse_options(int argc, char **argv) {
    perf_options o = {.operation = "all_reduce",
                      .begin_bytes = 8,
                      .end_bytes = 64 << 20,
                      .factor = 2,
                      .rounds = 20,
                      .warmup = 5,
                      .checks = 1,
                      .dtype = DDL_F32,
                      .op = DDL_SUM,
                      .spread = SPREAD_AVG,
                      .rewrite = true};
    opterr = 0;
    for (int option; (option = getopt_long(argc, argv, short_options, long_options, NULL)) != -1;) {
        parse_option(&o, option, argv);
    }
    if (optind + 1 < argc) {
        refuse("There are two operations, \"%s\" and \"%s\"; name one, or all.", argv[optind], argv[optind + 1]);
    }
    if (optind < argc) {
        o.operation = argv[optind];
    }
    if (o.begin_bytes > o.end_bytes) {
        refuse("--minbytes is %lld and --maxbytes is %lld, but the first must not be larger.", (long long)o.begin_bytes,
               (long long)o.end_bytes);
    }
    return o;
}

#endif /* DDL_PERF_OPTIONS_H */
