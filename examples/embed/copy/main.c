/* Every rank has measured something; all learn the average. */
#include "ddl.h"
#include <stdio.h>

int main(void) {
    ddl_context *context;
    if (ddl_init(NULL, &context) != DDL_OK) {
        return 1;
    }
    ddl_group *world = ddl_world(context);
    double measured[1] = {ddl_rank(world) * 2.0};
    if (ddl_all_reduce(world, DDL_ARRAY(measured), DDL_ARRAY(measured), DDL_AVG) != DDL_OK) {
        fprintf(stderr, "%s\n", ddl_error(context));
        return 1;
    }
    printf("average %g\n", measured[0]);
    return ddl_finalize(&context) == DDL_OK ? 0 : 1;
}
