/* train, last part: strategies by the names that the field knows them by. */
#ifndef DDL_TRAIN_PRESET_H
#define DDL_TRAIN_PRESET_H

#include "checkpoint.h"

typedef struct ddl__preset {
    const char *name;
    ddl_trainer_config config;
} ddl__preset;

/* Bucket sizes are the defaults of what they are named after: 25 MiB in PyTorch's DistributedDataParallel, 64 MiB in
 * Horovod's tensor fusion; 4 MB pieces in BytePS. */
static const ddl__preset ddl__presets[] = {
    {"auto", {.schedule = DDL_SCHEDULE_AUTO}},
    {"adaptive-compression", {.schedule = DDL_SCHEDULE_AUTO, .compression = {.kind = DDL_COMPRESS_ADAPTIVE}}},
    {"BSP-A2A", {.schedule = DDL_SCHEDULE_NONE}},
    {"WFBP-A2A", {.schedule = DDL_SCHEDULE_WAIT_FREE}},
    {"BSP-PS", {.schedule = DDL_SCHEDULE_NONE, .architecture = DDL_ARCHITECTURE_PS}},
    {"WFBP-PS", {.schedule = DDL_SCHEDULE_WAIT_FREE, .architecture = DDL_ARCHITECTURE_PS}},
    {"ByteScheduler-PS",
     {.schedule = DDL_SCHEDULE_PRIORITY, .overlap_forward = 1, .architecture = DDL_ARCHITECTURE_PS}},
    {"SSP", {.schedule = DDL_SCHEDULE_WAIT_FREE, .sync = DDL_SYNC_SSP, .architecture = DDL_ARCHITECTURE_PS}},
    {"ASP", {.schedule = DDL_SCHEDULE_WAIT_FREE, .sync = DDL_SYNC_ASP, .architecture = DDL_ARCHITECTURE_PS}},
    {"parameter-server",
     {.schedule = DDL_SCHEDULE_WAIT_FREE, .sync = DDL_SYNC_ASP, .architecture = DDL_ARCHITECTURE_PS, .dedicated = 1}},
    {"central-storage", {.schedule = DDL_SCHEDULE_NONE, .architecture = DDL_ARCHITECTURE_PS, .servers = 1}},
    {"MG-WFBP", {.schedule = DDL_SCHEDULE_MERGED}},
    {"ByteScheduler-A2A", {.schedule = DDL_SCHEDULE_PRIORITY, .overlap_forward = 1}},
    {"DistributedDataParallel", {.schedule = DDL_SCHEDULE_FUSED, .bucket_bytes = 25 << 20}},
    {"DistributedOptimizer", {.schedule = DDL_SCHEDULE_FUSED, .bucket_bytes = 64 << 20}},
    {"ZeRO-1", {.schedule = DDL_SCHEDULE_FUSED, .shard = 1}},
    {"local-SGD", {.sync = DDL_SYNC_LOCAL, .local_steps = 8}},
    {"post-local-SGD", {.sync = DDL_SYNC_LOCAL, .local_steps = 4, .local_after = 1000}},
    {"DiLoCo", {.sync = DDL_SYNC_LOCAL, .local_steps = 500, .outer_rate = 0.7, .outer_momentum = 0.9}},
    {"mirrored", {.schedule = DDL_SCHEDULE_FUSED}},
    {"multi-worker-mirrored", {.schedule = DDL_SCHEDULE_FUSED}},
    {"one-device", {.schedule = DDL_SCHEDULE_NONE}},
};

DDL_API const char *ddl_trainer_preset_name(int32_t index) {
    return index >= 0 && index < (int32_t)DDL__COUNT_OF(ddl__presets) ? ddl__presets[index].name : NULL;
}

DDL_API ddl_status ddl_trainer_preset(const char *name, ddl_trainer_config *out_config) {
    for (size_t i = 0; name != NULL && out_config != NULL && i < DDL__COUNT_OF(ddl__presets); i++) {
        if (strcmp(ddl__presets[i].name, name) == 0) {
            *out_config = ddl__presets[i].config;
            return DDL_OK;
        }
    }
    return DDL_ERR_ARG;
}

#endif /* DDL_TRAIN_PRESET_H */
