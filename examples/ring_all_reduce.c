/* ring_all_reduce.c: the ring all-reduce, written by hand with sends and receives, and compared with ddl_all_reduce.
 *
 * Build:  cc -O2 -std=c11 -I. -o ring_all_reduce examples/ring_all_reduce.c -lpthread -ldl
 * Run:    ddlrun -n 4 ./ring_all_reduce
 * Run:    ddlrun -n 3 ./ring_all_reduce
 * Prints: 4 ranks: the ring and ddl_all_reduce agree on 1000003 numbers
 * Prints: 3 ranks: the ring and ddl_all_reduce agree on 1000003 numbers
 *
 * The vector is cut into as many parts as there are ranks. In n - 1 steps each part travels once around the ring and
 * picks up every rank's share (reduce-scatter); in n - 1 more the finished parts travel around once (all-gather). Each
 * rank sends 2 (n-1)/n of the vector, which no algorithm can beat (Patarasuk and Yuan, 2009, "Bandwidth optimal
 * all-reduce algorithms for clusters of workstations"). */
#define DDL_IMPLEMENTATION
#include "ddl.h"

#include <stdio.h>
#include <stdlib.h>

enum { COUNT = 1000003, TAG = 7 }; /* a prime: the parts are of unequal size */

static ddl_tensor part_of(float *data, int32_t parts, int32_t index) {
    int64_t begin = 0, count = 0;
    ddl_part(COUNT, parts, index, &begin, &count);
    return DDL_VIEW(data + begin, count);
}

/* Sends one part to the right neighbour while another comes from the left. */
static ddl_status pass_on(ddl_group *group, ddl_tensor out, ddl_tensor in) {
    int32_t n = ddl_size(group), right = (ddl_rank(group) + 1) % n, left = (ddl_rank(group) + n - 1) % n;
    ddl_request *requests[2] = {NULL, NULL};
    ddl_status status = ddl_irecv(group, in, left, TAG, &requests[0]); /* first: so that it can land in place */
    if (status == DDL_OK) {
        status = ddl_isend(group, out, right, TAG, &requests[1]);
    }
    ddl_status waited = ddl_wait_all(requests, 2, NULL); /* also after an error: the buffers are ddl's until then */
    return status != DDL_OK ? status : waited;
}

static ddl_status ring_all_reduce(ddl_group *group, float *data, float *arriving) {
    int32_t n = ddl_size(group), rank = ddl_rank(group);
    for (int32_t step = 0; step < n - 1; step++) { /* reduce-scatter: in the end part rank + 1 is complete here */
        ddl_tensor mine = part_of(data, n, (rank + n - step) % n);
        ddl_tensor next = part_of(data, n, (rank + n - step - 1) % n);
        int64_t count = ddl_tensor_count(&next);
        ddl_status status = pass_on(group, mine, DDL_VIEW(arriving, count));
        if (status != DDL_OK) {
            return status;
        }
        float *sum = next.data;
        for (int64_t i = 0; i < count; i++) {
            sum[i] += arriving[i];
        }
    }
    for (int32_t step = 0; step < n - 1; step++) { /* all-gather */
        ddl_status status = pass_on(group, part_of(data, n, (rank + n - step + 1) % n),
                                    part_of(data, n, (rank + n - step) % n));
        if (status != DDL_OK) {
            return status;
        }
    }
    return DDL_OK;
}

static int fail(ddl_context *context) {
    fprintf(stderr, "%s\n", ddl_error(context));
    ddl_abort(context, "ring_all_reduce failed"); /* so that the others do not wait for us */
    return 1;
}

int main(void) {
    ddl_context *context;
    if (ddl_init(NULL, &context) != DDL_OK) {
        return 1;
    }
    ddl_group *world = ddl_world(context);
    float *ring = malloc(3 * COUNT * sizeof *ring), *library = ring + COUNT, *arriving = library + COUNT;
    if (ring == NULL) {
        ddl_abort(context, "ring_all_reduce has no memory");
        return 1;
    }
    for (int32_t i = 0; i < COUNT; i++) { /* small whole numbers: their sums are exact in any order */
        ring[i] = library[i] = (float)((i + ddl_rank(world)) % 1000);
    }
    if (ring_all_reduce(world, ring, arriving) != DDL_OK ||
        ddl_all_reduce(world, DDL_VIEW(library, COUNT), DDL_VIEW(library, COUNT), DDL_SUM) != DDL_OK) {
        return fail(context);
    }
    int32_t wrong = 0;
    for (int32_t i = 0; i < COUNT; i++) {
        wrong += ring[i] != library[i];
    }
    double all_wrong = wrong;
    if (ddl_all_reduce_scalar(world, &all_wrong, DDL_SUM) != DDL_OK) {
        return fail(context);
    }
    if (ddl_rank(world) == 0 && all_wrong == 0) {
        printf("%d ranks: the ring and ddl_all_reduce agree on %d numbers\n", ddl_size(world), COUNT);
    } else if (ddl_rank(world) == 0) {
        printf("%.0f numbers differ\n", all_wrong);
    }
    free(ring);
    ddl_finalize(&context);
    return all_wrong == 0 ? 0 : 1;
}
