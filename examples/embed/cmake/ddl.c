/* The implementation, once per program. */
#define DDL_IMPLEMENTATION
#include <ddl.h>
