/* fabric_faults.h: the functions of libfabric that the plugin calls, each of which can be told to fail in its n-th call
 * from now on. Included before the plugin, whose calls come here by macros. A close that "fails" has closed all the same,
 * so that what leaks is the plugin's. */
#ifndef TEST_FABRIC_FAULTS_H
#define TEST_FABRIC_FAULTS_H

#include "../plugins/fabric/library.h"

enum {
    CALL_GETINFO, CALL_DUPINFO, CALL_FABRIC, CALL_DOMAIN, CALL_AV_OPEN, CALL_CQ_OPEN, CALL_ENDPOINT, CALL_EP_BIND,
    CALL_ENABLE, CALL_CONTROL, CALL_GETNAME, CALL_AV_INSERT, CALL_AV_REMOVE, CALL_MR_REG, CALL_RECV,
    CALL_SEND, CALL_INJECT, CALL_READ, CALL_CQ_READ, CALL_CQ_READERR, CALL_TRYWAIT, CALL_CLOSE, CALL_EQ_OPEN, CALL_EQ_READ,
    CALL_EQ_READERR, CALL_MR_BIND, CALL_MR_ENABLE, CALL_SRX, CALL_PASSIVE_EP, CALL_PEP_BIND, CALL_LISTEN, CALL_CONNECT, CALL_ACCEPT,
    CALL_REJECT, CALLS
};

static const char *const call_names[CALLS] = {
    "fi_getinfo", "fi_dupinfo", "fi_fabric", "fi_domain", "fi_av_open", "fi_cq_open", "fi_endpoint", "fi_ep_bind",
    "fi_enable", "fi_control", "fi_getname", "fi_av_insert", "fi_av_remove", "fi_mr_reg", "fi_recv",
    "fi_send", "fi_inject", "fi_read", "fi_cq_read", "fi_cq_readerr", "fi_trywait", "fi_close", "fi_eq_open", "fi_eq_read",
    "fi_eq_readerr", "fi_mr_bind", "fi_mr_enable", "fi_srx_context", "fi_passive_ep", "fi_pep_bind", "fi_listen", "fi_connect", "fi_accept",
    "fi_reject"};

static struct {
    int calls[CALLS]; /* so far */
    int which, at;    /* the at-th call of which fails; 0: none does */
    int code;         /* with this, below 0 */
    int objects;      /* that are open */
} call_faults;

static int call_fails(int which) {
    return ++call_faults.calls[which] == call_faults.at && which == call_faults.which;
}

/* Returns the error or what the real function says. */
#define CALL_OR_FAIL(which, real) (call_fails(which) ? call_faults.code : (real))

/* The same for what opens something. */
static int call_opened(int result) {
    call_faults.objects += result == 0;
    return result;
}
#define OPEN_OR_FAIL(which, real) (call_fails(which) ? call_faults.code : call_opened(real))

static int (*real_getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
static struct fi_info *(*real_dupinfo)(const struct fi_info *);
static void (*real_freeinfo)(struct fi_info *);
static int (*real_fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);

static int faulty_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
                          const struct fi_info *hints, struct fi_info **out) {
    return OPEN_OR_FAIL(CALL_GETINFO, real_getinfo(version, node, service, flags, hints, out));
}

/* tcp does not demand that regions are bound to the endpoint, and cannot do it: where that is what fails, it is demanded
 * in its name, and the other calls do nothing. */
static int call_binds(void) { return call_faults.which == CALL_MR_BIND || call_faults.which == CALL_MR_ENABLE; }

static struct fi_info *faulty_dupinfo(const struct fi_info *info) {
    struct fi_info *copy = call_fails(CALL_DUPINFO) ? NULL : real_dupinfo(info);
    call_faults.objects += copy != NULL;
    if (copy != NULL && info != NULL && call_binds()) {
        copy->domain_attr->mr_mode |= FI_MR_ENDPOINT;
    }
    return copy;
}

static int faulty_fabric(struct fi_fabric_attr *attr, struct fid_fabric **out, void *context) {
    return OPEN_OR_FAIL(CALL_FABRIC, real_fabric(attr, out, context));
}

static void counted_freeinfo(struct fi_info *info) {
    call_faults.objects--;
    real_freeinfo(info);
}

/* Those that are no inline functions. */
static void faulty_library(fabric_library *lib) {
    real_getinfo = lib->getinfo;
    real_dupinfo = lib->dupinfo;
    real_freeinfo = lib->freeinfo;
    real_fabric = lib->fabric;
    lib->getinfo = faulty_getinfo;
    lib->dupinfo = faulty_dupinfo;
    lib->freeinfo = counted_freeinfo;
    lib->fabric = faulty_fabric;
}

static const char *faulty_library_open(fabric_library *lib, const char *ports) {
    const char *why = fabric_library_open(lib, ports);
    if (why == NULL) {
        faulty_library(lib);
    }
    return why;
}

static int faulty_close(struct fid *fid) {
    int result = fi_close(fid);
    call_faults.objects -= result == 0;
    return CALL_OR_FAIL(CALL_CLOSE, result);
}

/* What comes with a call of a peer's is ours to free. */
static ssize_t call_event(ssize_t n, const uint32_t *event) {
    call_faults.objects += n > 0 && *event == FI_CONNREQ;
    return n;
}

#define fabric_library_open(lib, ports) faulty_library_open(lib, ports)
#define fi_close(fid) faulty_close(fid)
#define fi_domain(f, info, out, c) OPEN_OR_FAIL(CALL_DOMAIN, fi_domain(f, info, out, c))
#define fi_av_open(d, attr, out, c) OPEN_OR_FAIL(CALL_AV_OPEN, fi_av_open(d, attr, out, c))
#define fi_cq_open(d, attr, out, c) OPEN_OR_FAIL(CALL_CQ_OPEN, fi_cq_open(d, attr, out, c))
#define fi_endpoint(d, info, out, c) OPEN_OR_FAIL(CALL_ENDPOINT, fi_endpoint(d, info, out, c))
#define fi_ep_bind(ep, fid, flags) CALL_OR_FAIL(CALL_EP_BIND, fi_ep_bind(ep, fid, flags))
#define fi_enable(ep) CALL_OR_FAIL(CALL_ENABLE, fi_enable(ep))
#define fi_control(fid, command, arg) CALL_OR_FAIL(CALL_CONTROL, fi_control(fid, command, arg))
#define fi_getname(fid, to, bytes) CALL_OR_FAIL(CALL_GETNAME, fi_getname(fid, to, bytes))
#define fi_av_insert(av, a, n, to, f, c) CALL_OR_FAIL(CALL_AV_INSERT, fi_av_insert(av, a, n, to, f, c))
#define fi_av_remove(av, a, n, f) CALL_OR_FAIL(CALL_AV_REMOVE, fi_av_remove(av, a, n, f))
#define fi_mr_reg(d, b, n, a, o, k, f, m, c) OPEN_OR_FAIL(CALL_MR_REG, fi_mr_reg(d, b, n, a, o, k, f, m, c))
#define fi_recv(ep, b, n, d, at, c) CALL_OR_FAIL(CALL_RECV, fi_recv(ep, b, n, d, at, c))
#define fi_send(ep, b, n, d, at, c) CALL_OR_FAIL(CALL_SEND, fi_send(ep, b, n, d, at, c))
#define fi_inject(ep, b, n, at) CALL_OR_FAIL(CALL_INJECT, fi_inject(ep, b, n, at))
#define fi_srx_context(d, attr, out, c) OPEN_OR_FAIL(CALL_SRX, fi_srx_context(d, attr, out, c))
#define fi_passive_ep(f, info, out, c) OPEN_OR_FAIL(CALL_PASSIVE_EP, fi_passive_ep(f, info, out, c))
#define fi_pep_bind(ep, fid, flags) CALL_OR_FAIL(CALL_PEP_BIND, fi_pep_bind(ep, fid, flags))
#define fi_listen(ep) CALL_OR_FAIL(CALL_LISTEN, fi_listen(ep))
#define fi_connect(ep, at, param, n) CALL_OR_FAIL(CALL_CONNECT, fi_connect(ep, at, param, n))
#define fi_accept(ep, param, n) CALL_OR_FAIL(CALL_ACCEPT, fi_accept(ep, param, n))
#define fi_reject(ep, id, param, n) CALL_OR_FAIL(CALL_REJECT, fi_reject(ep, id, param, n))
#define fi_read(ep, b, n, d, at, a, k, c) CALL_OR_FAIL(CALL_READ, fi_read(ep, b, n, d, at, a, k, c))
#define fi_cq_read(cq, to, n) CALL_OR_FAIL(CALL_CQ_READ, fi_cq_read(cq, to, n))
#define fi_cq_readerr(cq, to, f) CALL_OR_FAIL(CALL_CQ_READERR, fi_cq_readerr(cq, to, f))
#define fi_eq_open(f, attr, out, c) OPEN_OR_FAIL(CALL_EQ_OPEN, fi_eq_open(f, attr, out, c))
/* There is never an error to read but where that is what fails. */
#define fi_eq_read(eq, event, to, n, f)                                                                                \
    CALL_OR_FAIL(CALL_EQ_READ, call_faults.which == CALL_EQ_READERR && call_faults.calls[CALL_EQ_READERR] < call_faults.at ? -FI_EAVAIL : call_event(fi_eq_read(eq, event, to, n, f), event))
#define fi_eq_readerr(eq, to, f) CALL_OR_FAIL(CALL_EQ_READERR, fi_eq_readerr(eq, to, f))
#define fi_mr_bind(mr, to, f) CALL_OR_FAIL(CALL_MR_BIND, call_binds() ? 0 : fi_mr_bind(mr, to, f))
#define fi_mr_enable(mr) CALL_OR_FAIL(CALL_MR_ENABLE, call_binds() ? 0 : fi_mr_enable(mr))
#define fi_trywait(f, fids, n) CALL_OR_FAIL(CALL_TRYWAIT, fi_trywait(f, fids, n))

#endif
