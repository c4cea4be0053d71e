/* coll: operations in the order of a device's stream. The device waits for them, the host does not. */
#ifndef DDL_COLL_STREAM_H
#define DDL_COLL_STREAM_H

#include "measure.h"

static ddl_status ddl__group_stream(ddl_group *g, int32_t device, void *stream) {
    ddl_context *c = g->context;
    ddl__device *d = NULL;
    if (stream == NULL) {
        g->stream_device = NULL;
        g->stream = NULL;
        return DDL_OK;
    }
    DDL__TRY(ddl__device_get(c, device, "ddl_group_stream", &d));
    if (!DDL_HAS(d->table, gate_put) || !DDL_HAS(d->table, gate_open)) {
        return ddl__error(c, DDL_ERR_UNSUPPORTED, "ddl_group_stream: streams of device %d (%s) cannot wait for "
                          "operations", device, d->plugin->name);
    }
    void *gate = NULL;
    bool captured = ddl__stream_captured(d, stream); /* then what cannot be is told by each call */
    ddl__unlock_shortly(c); /* ddl__enter_ordered says why */
    ddl_status status = captured ? DDL_OK : d->table->gate_put(d->self, stream, &gate); /* a trial */
    ddl__lock(c);
    ddl__locked_again(c);
    if (status < 0) {
        return ddl__error(c, status, "ddl_group_stream: the stream cannot wait for operations: it is not one of device "
                          "%d (%s), or the device cannot wait for the host: %s", device,
                          d->plugin->name, ddl_status_text(status));
    }
    if (!captured) {
        d->table->gate_open(d->self, gate);
    }
    DDL__TRY(ddl__thread_start(c, "ddl_group_stream")); /* nobody else may come and move operations on */
    g->stream_device = d;
    g->stream = stream;
    return DDL_OK;
}

DDL_API ddl_status ddl_group_stream(ddl_group *group, int32_t device, void *stream) {
    DDL__TRY(ddl__enter_group(group, "ddl_group_stream"));
    ddl_status status = ddl__group_stream(group, device, stream);
    ddl__unlock(group->context);
    return status;
}

DDL_API ddl_status ddl_stream_wait(ddl_request **request) {
    ddl_context *c;
    DDL__TRY(request == NULL ? DDL_ERR_ARG : ddl__enter_requests(request, 1, "ddl_stream_wait", &c));
    if (c == NULL) {
        return DDL_OK;
    }
    ddl_request *r = *request;
    ddl_status status = DDL_OK;
    if (r->persistent) {
        status = ddl__error(c, DDL_ERR_ARG, "ddl_stream_wait: a persistent request is to be waited for by ddl_wait");
    } else if (r->state == DDL__REQUEST_DONE) {
        status = ddl__request_report(request, NULL);
    } else if (r->group->stream_device == NULL) {
        status = ddl__error(c, DDL_ERR_STATE, "ddl_stream_wait: group \"%s\" has no stream; ddl_group_stream gives it "
                            "one", r->group->name);
    } else {
        status = ddl__stream_check(r->group, "ddl_stream_wait");
        bool detached = status == DDL_OK && ddl__request_detach(c, r);
        if (status == DDL_OK && r->state == DDL__REQUEST_DONE && !detached) {
            status = ddl__request_report(request, NULL);
            r = *request;
        } else if (status == DDL_OK && !detached) {
            status = ddl__error(c, DDL_ERR_SYSTEM, "ddl_stream_wait: the device does not let its stream wait");
        }
        *request = status == DDL_OK ? NULL : r;
    }
    ddl__unlock(c);
    return status;
}

#endif /* DDL_COLL_STREAM_H */
