/* fabric_hmem.h: a provider with FI_HMEM, in front of whichever is there. Included before the plugin, whose calls come here by
 * macros. fi_getinfo with FI_HMEM finds what it finds without; "memory of CUDA" is ordinary memory, registered as such. It
 * proves what the plugin asks of libfabric, and nothing about an adapter. */
#ifndef TEST_FABRIC_HMEM_H
#define TEST_FABRIC_HMEM_H

#include "../plugins/fabric/library.h"

static struct {
    int asked;   /* fi_getinfo was asked for FI_HMEM so often */
    int refuses; /* it finds nothing then */
    int fail_at; /* the so-manyth registration of memory of a device from now on fails; 0: none */
    int fail_reads; /* so many reads from now on fail with read_code, -FI_EIO or -FI_EAGAIN */
    int read_code, reads; /* reads: asked for so far, but for those */
    int old; /* the library is 1.16, whose ofi_rxm keeps the connection of an address that is removed */
    int registered; /* regions of devices that are there */
    struct fi_mr_attr last; /* how the last was asked for */
    struct iovec last_at;
    size_t last_count;
} hmem;

static int (*hmem_real_getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
static struct fi_info *(*hmem_real_dupinfo)(const struct fi_info *);
static void (*hmem_real_freeinfo)(struct fi_info *);

static int hmem_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags,
                        const struct fi_info *hints, struct fi_info **out) {
    if (hints == NULL || (hints->caps & FI_HMEM) == 0) {
        return hmem_real_getinfo(version, node, service, flags, hints, out);
    }
    hmem.asked++;
    if (hmem.refuses || (hints->domain_attr->mr_mode & FI_MR_HMEM) == 0) {
        return -FI_ENODATA;
    }
    struct fi_info *plain = hmem_real_dupinfo(hints);
    plain->caps &= ~FI_HMEM;
    plain->domain_attr->mr_mode &= ~FI_MR_HMEM;
    int result = hmem_real_getinfo(version, node, service, flags, plain, out);
    hmem_real_freeinfo(plain);
    for (struct fi_info *i = *out; result == 0 && i != NULL; i = i->next) {
        i->caps |= FI_HMEM;
        i->domain_attr->mr_mode |= FI_MR_HMEM;
    }
    return result;
}

static uint32_t (*hmem_real_version)(void);
static uint32_t hmem_version(void) { return hmem.old ? FI_VERSION(1, 16) : hmem_real_version(); }

static int hmem_av_remove(struct fid_av *av, fi_addr_t *at, size_t count, uint64_t flags) {
    return hmem.old ? 0 : fi_av_remove(av, at, count, flags);
}

static const char *hmem_library_open(fabric_library *lib, const char *ports) {
    const char *why = fabric_library_open(lib, ports);
    if (why == NULL) {
        hmem_real_getinfo = lib->getinfo;
        hmem_real_dupinfo = lib->dupinfo;
        hmem_real_freeinfo = lib->freeinfo;
        hmem_real_version = lib->version;
        lib->getinfo = hmem_getinfo;
        lib->version = hmem_version;
    }
    return why;
}

/* What the real provider would refuse. */
static int hmem_domain(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **out, void *context) {
    struct fi_info *plain = hmem_real_dupinfo(info);
    plain->caps &= ~FI_HMEM;
    plain->domain_attr->mr_mode &= ~FI_MR_HMEM;
    int result = fi_domain(fabric, plain, out, context);
    hmem_real_freeinfo(plain);
    return result;
}

static int hmem_endpoint(struct fid_domain *domain, struct fi_info *info, struct fid_ep **out, void *context) {
    struct fi_info *plain = hmem_real_dupinfo(info);
    plain->caps &= ~FI_HMEM;
    plain->domain_attr->mr_mode &= ~FI_MR_HMEM;
    int result = fi_endpoint(domain, plain, out, context);
    hmem_real_freeinfo(plain);
    return result;
}

/* Where a CPU may touch memory of the stand-in for CUDA's driver (cuda_driver.c): not at its address. */
static void *hmem_at(void *at) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), *found = NULL;
    void *(*alias)(void *) = NULL;
    if (driver != NULL) {
        found = dlsym(driver, "standin_alias");
        memcpy(&alias, &found, sizeof alias);
        dlclose(driver);
    }
    return alias != NULL ? alias(at) : at;
}

static int hmem_regattr(struct fid_domain *domain, const struct fi_mr_attr *attr, uint64_t flags, struct fid_mr **out) {
    hmem.last = *attr;
    hmem.last_at = attr->mr_iov[0];
    hmem.last_count = attr->iov_count;
    if (hmem.fail_at > 0 && --hmem.fail_at == 0) {
        return -FI_EIO;
    }
    int result = fi_mr_reg(domain, hmem_at(attr->mr_iov[0].iov_base), attr->mr_iov[0].iov_len, attr->access, attr->offset,
                           attr->requested_key, flags, out, attr->context);
    hmem.registered += result == 0;
    return result;
}

static ssize_t hmem_read(struct fid_ep *ep, void *to, size_t bytes, void *desc, fi_addr_t at, uint64_t from, uint64_t key,
                         void *context) {
    if (hmem.fail_reads > 0) {
        hmem.fail_reads--;
        return hmem.read_code;
    }
    hmem.reads++;
    return fi_read(ep, hmem_at(to), bytes, desc, at, from, key, context);
}

#define fabric_library_open(lib, ports) hmem_library_open(lib, ports)
#define fi_domain(f, info, out, c) hmem_domain(f, info, out, c)
#define fi_endpoint(d, info, out, c) hmem_endpoint(d, info, out, c)
#define fi_mr_regattr(d, attr, f, out) hmem_regattr(d, attr, f, out)
#define fi_av_remove(av, at, n, f) hmem_av_remove(av, at, n, f)
#define fi_read(ep, b, n, d, at, a, k, c) hmem_read(ep, b, n, d, at, a, k, c)

#endif
