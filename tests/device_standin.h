/* device_standin.h: what a test can tell the stand-in for a device. */
#ifndef TEST_DEVICE_STANDIN_H
#define TEST_DEVICE_STANDIN_H

#include "ddl.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct standin_state {
    int fail_calls;      /* the so-manyth copy from now on is refused; 0: none */
    int fail_tasks;      /* the so-manyth task from now on fails on the device */
    int fail_events;     /* so many events from now on are refused */
    volatile int stopped; /* no stream moves */
    int no_pinned;       /* there is no pinned memory any more */
    int no_room;         /* nor memory of a device */
    int pinned;          /* blocks of pinned memory that are out */
    size_t pinned_bytes; /* of these; the core keeps free blocks */
    size_t pinned_largest; /* of all blocks so far */
    int tasks;           /* done so far */
    int natives;         /* collectives that ran there */
    void *captured;      /* a stream that is being captured */
} standin_state;

static inline size_t ddl_dtype_bytes_of(ddl_dtype dtype) {
    static const unsigned char bytes[] = {0, 2, 2, 4, 8, 1, 1, 4, 4, 8, 8, 1, 8, 16, 8, 16};
    return bytes[dtype];
}

#endif /* TEST_DEVICE_STANDIN_H */
