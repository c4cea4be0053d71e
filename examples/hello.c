/* hello.c: the smallest complete program. Every rank adds its number to everybody's sum.
 *
 * Build:  cc -O2 -std=c11 -I. -o hello examples/hello.c -lpthread -ldl
 * Run:    ddlrun -n 4 ./hello
 * Prints: rank 3 of 4: the sum is 6 */
#define DDL_IMPLEMENTATION
#include "ddl.h"
#include <stdio.h>

int main(void) {
    ddl_context *context;
    if (ddl_init(NULL, &context) != DDL_OK) {
        return 1; /* ddl has said why on stderr */
    }
    ddl_group *world = ddl_world(context);
    float value[1] = {(float)ddl_rank(world)};
    if (ddl_all_reduce(world, DDL_ARRAY(value), DDL_ARRAY(value), DDL_SUM) != DDL_OK) {
        fprintf(stderr, "%s\n", ddl_error(context));
        return 1;
    }
    printf("rank %d of %d: the sum is %g\n", ddl_rank(world), ddl_size(world), (double)value[0]);
    return ddl_finalize(&context) == DDL_OK ? 0 : 1;
}
