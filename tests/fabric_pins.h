/* fabric_pins.h: registrations as an adapter has them, in front of whichever provider is there. Included before the plugin,
 * whose calls come here by macros. What is registered is a second mapping of the pages that lie there now (of shared
 * mappings: mremap from size 0): a region goes on with those pages when others are mapped at the address, as an adapter
 * does. All are counted, and a read into memory whose region has other pages is. */
#ifndef TEST_FABRIC_PINS_H
#define TEST_FABRIC_PINS_H

#include "../plugins/fabric/library.h"

#include <stdint.h>
#include <sys/mman.h>

enum { PINS = 4096 };
static struct {
    struct {
        struct fid_mr *mr;
        uint8_t *at, *alias, *map;
        size_t bytes, map_bytes;
    } list[PINS];
    int made, open;       /* so many were registered; are now */
    int stale;            /* reads into memory by a region of other pages, or of other memory */
    int fail;             /* so many from now on fail */
    size_t fail_above;    /* all larger ones fail; 0: none */
    size_t last_bytes;
} pins;

static int pins_reg(struct fid_domain *domain, const void *at, size_t bytes, uint64_t access, uint64_t offset, uint64_t key,
                    uint64_t flags, struct fid_mr **out, void *context) {
    uintptr_t from = (uintptr_t)at & ~(uintptr_t)4095, skip = (uintptr_t)at - from;
    size_t span = (skip + bytes + 4095) & ~(size_t)4095;
    int i = 0;
    pins.fail -= pins.fail > 0;
    if (pins.fail > 0 || (pins.fail_above != 0 && bytes > pins.fail_above)) {
        return -FI_ENOMEM;
    }
    while (pins.list[i].mr != NULL) {
        i++;
    }
    void *map = mremap((void *)from, 0, span, MREMAP_MAYMOVE);
    uint8_t *alias = map != MAP_FAILED ? (uint8_t *)map + skip : NULL; /* NULL: not a shared mapping */
    int result = fi_mr_reg(domain, alias != NULL ? alias : at, bytes, access, offset, key, flags, out, context);
    if (result != 0 && alias != NULL) {
        munmap(map, span);
    }
    if (result == 0) {
        pins.list[i].mr = *out;
        pins.list[i].at = (uint8_t *)(uintptr_t)at;
        pins.list[i].alias = alias;
        pins.list[i].bytes = bytes;
        pins.list[i].map = alias != NULL ? map : NULL;
        pins.list[i].map_bytes = span;
        pins.made++;
        pins.open++;
        pins.last_bytes = bytes;
    }
    return result;
}

static int pins_close(struct fid *fid) {
    for (int i = 0; i < PINS; i++) {
        if (pins.list[i].mr != NULL && &pins.list[i].mr->fid == fid) {
            int result = fi_close(fid);
            if (pins.list[i].map != NULL) {
                munmap(pins.list[i].map, pins.list[i].map_bytes);
            }
            memset(&pins.list[i], 0, sizeof pins.list[i]);
            pins.open--;
            return result;
        }
    }
    return fi_close(fid);
}

/* Is it in a region of that descriptor, and are the region's pages those that lie there? */
static int pins_hold(uint8_t *to, size_t bytes, const void *desc) {
    for (int i = 0; i < PINS; i++) {
        if (pins.list[i].mr == NULL || fi_mr_desc(pins.list[i].mr) != desc || to < pins.list[i].at ||
            to + bytes > pins.list[i].at + pins.list[i].bytes) {
            continue;
        }
        volatile uint8_t *here = to, *there = pins.list[i].alias + (to - pins.list[i].at);
        uint8_t before = *here;
        *there = (uint8_t)(before + 1);
        int same = *here == (uint8_t)(before + 1);
        *there = before;
        return same;
    }
    return 0;
}

#define fi_mr_reg(d, b, n, a, o, k, f, out, c) pins_reg(d, b, n, a, o, k, f, out, c)
#define fi_close(f) pins_close(f)

#include "fabric_hmem.h"

static ssize_t pins_read(struct fid_ep *ep, void *to, size_t bytes, void *desc, fi_addr_t at, uint64_t from, uint64_t key,
                         void *context) {
    pins.stale += !pins_hold(to, bytes, desc);
    return fi_read(ep, to, bytes, desc, at, from, key, context);
}
#undef fi_read
#define fi_read(ep, b, n, d, at, a, k, c) pins_read(ep, b, n, d, at, a, k, c)

#endif
