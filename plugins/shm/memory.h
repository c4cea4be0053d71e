/* memory: what ddl_tensor_alloc gives out here, and how its peers see it. Each rank has an arena in the segment: it
 * takes places from its own and maps each allocation for itself; from a peer it hears places, never addresses. It must
 * not know what the memory is used for.
 *
 *     shm_lend, shm_take_back   an allocation of this rank
 *     shm_locate                where an address of this rank lies in the segment, if it was lent
 *     shm_reach                 the address through which this rank sees a place in any arena
 *     shm_withdraw              moves pages to another place, from which peers stay away that know the old one
 *     shm_withdrawn_free        the old places are free again: nobody who knows them is left
 *
 * A peer's arena is mapped from its start as far as was needed so far; when more is needed a longer mapping is made and
 * the shorter one stays until the end, because somebody may be in the middle of using it: each is twice as long as the
 * last, so there are few. */
#ifndef SHM_MEMORY_H
#define SHM_MEMORY_H

#include "copy.h"
#include "segment.h"

#define SHM_HUGE ((uint64_t)2 << 20)

/* What was lent, or a piece of it: after shm_withdraw one allocation lies in several places. */
typedef struct shm_lent {
    uint8_t *at;
    uint64_t offset, bytes; /* in the segment */
    bool goes_on;           /* belongs to the allocation of the entry before */
} shm_lent;

/* A place that peers may still use, those of a set of native collectives. */
typedef struct shm_withdrawn {
    uint64_t offset, bytes;
    const void *set;
} shm_withdrawn;

typedef struct shm_hole {
    uint64_t offset, bytes;
} shm_hole;

/* One arena as this rank sees it. */
typedef struct shm_view {
    uint8_t *base;
    uint64_t bytes;
    int32_t old_count;
    struct {
        uint8_t *base;
        uint64_t bytes;
    } old[48];
} shm_view;

typedef struct shm_memory {
    shm_lent *lent; /* in order of address */
    shm_hole *holes; /* what is free of this rank's arena, in order of place */
    shm_withdrawn *withdrawn;
    size_t lent_count, lent_room, hole_count, hole_room, withdrawn_count, withdrawn_room;
    shm_view *views; /* by local index */
    bool told;       /* that not all can be mapped */
} shm_memory;

static void shm_memory_close(shm *t) {
    shm_memory *m = t->memory;
    if (m == NULL) {
        return;
    }
    for (size_t i = 0; i < m->lent_count; i++) {
        munmap(m->lent[i].at, (size_t)m->lent[i].bytes);
    }
    for (int32_t i = 0; m->views != NULL && i < t->local_count; i++) {
        shm_view *v = &m->views[i];
        for (int32_t k = 0; k < v->old_count; k++) {
            munmap(v->old[k].base, (size_t)v->old[k].bytes);
        }
        if (v->base != NULL) {
            munmap(v->base, (size_t)v->bytes);
        }
    }
    t->host->free(t->host, m->lent);
    t->host->free(t->host, m->holes);
    t->host->free(t->host, m->withdrawn);
    t->host->free(t->host, m->views);
    t->host->free(t->host, m);
    t->memory = NULL;
}

/* Room for one more; the list is taken over only when there is. */
static bool shm_grow(shm *t, void **list, size_t count, size_t *room, size_t each) {
    if (count < *room) {
        return true;
    }
    size_t more = *room * 2 + 16;
    void *bigger = t->host->alloc(t->host, more * each);
    if (bigger == NULL) {
        return false;
    }
    if (count > 0) {
        memcpy(bigger, *list, count * each);
    }
    t->host->free(t->host, *list);
    *list = bigger;
    *room = more;
    return true;
}

static ddl_status shm_memory_open(shm *t) {
    shm_memory *m = t->memory = shm_zalloc(t, sizeof *m);
    if (m != NULL) {
        m->views = shm_zalloc(t, (size_t)t->local_count * sizeof *m->views);
    }
    if (m == NULL || m->views == NULL || !shm_grow(t, (void **)&m->holes, 0, &m->hole_room, sizeof *m->holes)) {
        return DDL_ERR_NOMEM;
    }
    m->holes[0] = (shm_hole){shm_arena_offset(t, t->local_index), t->arena_bytes};
    m->hole_count = t->arena_bytes > 0;
    return DDL_OK;
}

/* ---- places ---- */

static void shm_hole_remove(shm_memory *m, size_t i) {
    m->hole_count--;
    memmove(&m->holes[i], &m->holes[i + 1], (m->hole_count - i) * sizeof *m->holes);
}

/* The first place that is long enough; false: there is none. Large ones begin where a huge page can. */
static bool shm_place_take(shm *t, uint64_t bytes, uint64_t *out_offset) {
    shm_memory *m = t->memory;
    uint64_t unit = bytes >= SHM_HUGE ? SHM_HUGE : t->address.page_bytes;
    if (!shm_grow(t, (void **)&m->holes, m->hole_count, &m->hole_room, sizeof *m->holes)) {
        return false; /* what is cut out of the middle leaves one hole more */
    }
    for (size_t i = 0; i < m->hole_count; i++) {
        shm_hole *h = &m->holes[i];
        uint64_t skip = (unit - h->offset % unit) % unit;
        if (skip > h->bytes || h->bytes - skip < bytes) {
            continue;
        }
        shm_hole rest = {h->offset + skip + bytes, h->bytes - skip - bytes};
        *out_offset = h->offset + skip;
        if (skip > 0 && rest.bytes > 0) {
            memmove(h + 2, h + 1, (m->hole_count - i - 1) * sizeof *h);
            m->hole_count++;
            h->bytes = skip;
            h[1] = rest;
        } else if (skip > 0) {
            h->bytes = skip;
        } else if (rest.bytes > 0) {
            *h = rest;
        } else {
            shm_hole_remove(m, i);
        }
        return true;
    }
    return false;
}

/* Its memory goes back to the system at once. Without room for one more entry the place is lost, not the memory. */
static void shm_place_give(shm *t, uint64_t offset, uint64_t bytes) {
    shm_memory *m = t->memory;
    fallocate(t->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes);
    if (!shm_grow(t, (void **)&m->holes, m->hole_count, &m->hole_room, sizeof *m->holes)) {
        return;
    }
    size_t i = 0;
    while (i < m->hole_count && m->holes[i].offset < offset) {
        i++;
    }
    memmove(&m->holes[i + 1], &m->holes[i], (m->hole_count - i) * sizeof *m->holes);
    m->holes[i] = (shm_hole){offset, bytes};
    m->hole_count++;
    if (i + 1 < m->hole_count && offset + bytes == m->holes[i + 1].offset) {
        m->holes[i].bytes += m->holes[i + 1].bytes;
        shm_hole_remove(m, i + 1);
    }
    if (i > 0 && m->holes[i - 1].offset + m->holes[i - 1].bytes == offset) {
        m->holes[i - 1].bytes += m->holes[i].bytes;
        shm_hole_remove(m, i);
    }
}

/* ---- lending ---- */

/* Index of the first allocation that begins behind p. */
static size_t shm_lent_after(const shm_memory *m, const void *p) {
    size_t low = 0, high = m->lent_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if ((uintptr_t)m->lent[middle].at <= (uintptr_t)p) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* The place of bytes at p when all of them were lent by this rank. */
static bool shm_locate(const shm *t, const void *p, uint64_t bytes, uint64_t *out_offset) {
    const shm_memory *m = t->memory;
    size_t i = m == NULL || m->lent_count == 0 ? 0 : shm_lent_after(m, p);
    if (i == 0) {
        return false;
    }
    const shm_lent *l = &m->lent[i - 1];
    uint64_t into = (uint64_t)((uintptr_t)p - (uintptr_t)l->at);
    *out_offset = l->offset + into;
    return into <= l->bytes && bytes <= l->bytes - into;
}

/* Maps a place of this rank's arena, allocated and present, at a fixed address or anywhere. */
static void *shm_place_map(shm *t, uint64_t offset, uint64_t bytes, void *where) {
    if (shm_commit(t, offset, bytes) != DDL_OK) {
        return NULL;
    }
    void *at = mmap(where, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (where != NULL ? MAP_FIXED : 0), t->fd,
                    (off_t)offset);
    if (at == MAP_FAILED) {
        return NULL;
    }
    if (bytes >= SHM_HUGE) {
        madvise(at, (size_t)bytes, MADV_HUGEPAGE);
    }
    madvise(at, (size_t)bytes, MADV_POPULATE_WRITE); /* or the first use pays for each page */
    return at;
}

static ddl_status shm_lend(shm *t, uint64_t bytes, void **out_memory) {
    shm_memory *m = t->memory;
    uint64_t page = t->address.page_bytes, offset;
    if (m == NULL || bytes > t->arena_bytes) {
        return DDL_ERR_NOMEM;
    }
    bytes = bytes < page ? page : (bytes + page - 1) / page * page;
    if (!shm_grow(t, (void **)&m->lent, m->lent_count, &m->lent_room, sizeof *m->lent) ||
        !shm_place_take(t, bytes, &offset)) {
        return DDL_ERR_NOMEM;
    }
    void *at = shm_place_map(t, offset, bytes, NULL);
    if (at == NULL) {
        shm_place_give(t, offset, bytes);
        return DDL_ERR_NOMEM;
    }
    size_t i = shm_lent_after(m, at);
    memmove(&m->lent[i + 1], &m->lent[i], (m->lent_count - i) * sizeof *m->lent);
    m->lent[i] = (shm_lent){at, offset, bytes, false};
    m->lent_count++;
    *out_memory = at;
    return DDL_OK;
}

static void shm_take_back(shm *t, void *memory) {
    shm_memory *m = t->memory;
    size_t i = m == NULL ? 0 : shm_lent_after(m, memory);
    if (i == 0 || m->lent[i - 1].at != memory || m->lent[i - 1].goes_on) {
        return;
    }
    i--;
    do {
        shm_lent l = m->lent[i];
        m->lent_count--;
        memmove(&m->lent[i], &m->lent[i + 1], (m->lent_count - i) * sizeof *m->lent);
        munmap(l.at, (size_t)l.bytes);
        shm_place_give(t, l.offset, l.bytes);
    } while (i < m->lent_count && m->lent[i].goes_on);
}

/* A copy in this rank's arena that it need not see itself; given back with shm_place_give. Written by the kernel: what
 * cannot be read or allocated is an error, not a signal. */
static ddl_status shm_lend_copy(shm *t, const void *data, uint64_t bytes, uint64_t *out_offset, uint64_t *out_bytes) {
    uint64_t page = t->address.page_bytes, done = 0;
    *out_bytes = (bytes + page - 1) / page * page;
    if (t->memory == NULL || !shm_place_take(t, *out_bytes, out_offset)) {
        return DDL_ERR_NOMEM;
    }
    /* A container kills who writes beyond its limit. */
    if (shm_memory_left(t) < *out_bytes + SHM_ASK_BYTES || shm_commit(t, *out_offset, *out_bytes) != DDL_OK) {
        shm_place_give(t, *out_offset, *out_bytes);
        return DDL_ERR_NOMEM;
    }
    while (done < bytes) {
        ssize_t n = pwrite(t->fd, (const uint8_t *)data + done, (size_t)(bytes - done), (off_t)(*out_offset + done));
        if (n <= 0 && errno != EINTR) {
            shm_place_give(t, *out_offset, *out_bytes);
            return DDL_ERR_NOMEM;
        }
        done += n > 0 ? (uint64_t)n : 0;
    }
    return DDL_OK;
}

/* ---- withdrawing ---- */

/* Cuts entry i so that one begins `into` bytes behind its start. */
static bool shm_lent_cut(shm *t, size_t i, uint64_t into) {
    shm_memory *m = t->memory;
    if (!shm_grow(t, (void **)&m->lent, m->lent_count, &m->lent_room, sizeof *m->lent)) {
        return false;
    }
    shm_lent l = m->lent[i];
    memmove(&m->lent[i + 1], &m->lent[i], (m->lent_count - i) * sizeof *m->lent);
    m->lent_count++;
    m->lent[i].bytes = into;
    m->lent[i + 1] = (shm_lent){l.at + into, l.offset + into, l.bytes - into, true};
    return true;
}

/* Another place with the same content at the same address. */
static ddl_status shm_lent_move(shm *t, shm_lent *l, const void *set) {
    shm_memory *m = t->memory;
    uint64_t offset;
    if (!shm_grow(t, (void **)&m->withdrawn, m->withdrawn_count, &m->withdrawn_room, sizeof *m->withdrawn) ||
        !shm_place_take(t, l->bytes, &offset)) {
        return DDL_ERR_NOMEM;
    }
    void *copy = shm_place_map(t, offset, l->bytes, NULL);
    if (copy == NULL) {
        shm_place_give(t, offset, l->bytes);
        return DDL_ERR_NOMEM;
    }
    shm_memcpy(copy, l->at, l->bytes);
    munmap(copy, (size_t)l->bytes);
    if (shm_place_map(t, offset, l->bytes, l->at) == NULL) {
        shm_place_give(t, offset, l->bytes);
        return DDL_ERR_NOMEM;
    }
    m->withdrawn[m->withdrawn_count++] = (shm_withdrawn){l->offset, l->bytes, set};
    l->offset = offset;
    return DDL_OK;
}

/* Afterwards the pages [p, p + bytes) have other places; who still reads or writes the old ones meets nobody there.
 * Nothing but these pages is touched, as their neighbours may be in use by other threads and other sets. */
static ddl_status shm_withdraw(shm *t, void *p, uint64_t bytes, const void *set) {
    shm_memory *m = t->memory;
    uintptr_t from = (uintptr_t)p, to = from + bytes;
    size_t i = m == NULL ? 0 : shm_lent_after(m, p);
    for (i = i > 0 ? i - 1 : 0; m != NULL && i < m->lent_count && (uintptr_t)m->lent[i].at < to; i++) {
        uintptr_t at = (uintptr_t)m->lent[i].at, end = at + m->lent[i].bytes;
        if (end <= from) {
            continue;
        }
        if (at < from && !shm_lent_cut(t, i++, from - at)) {
            return DDL_ERR_NOMEM;
        }
        if (end > to && !shm_lent_cut(t, i, to - (at < from ? from : at))) {
            return DDL_ERR_NOMEM;
        }
        ddl_status status = shm_lent_move(t, &m->lent[i], set);
        if (status != DDL_OK) {
            return status;
        }
    }
    return DDL_OK;
}

static void shm_withdrawn_free(shm *t, const void *set) {
    shm_memory *m = t->memory;
    for (size_t i = 0; m != NULL && i < m->withdrawn_count;) {
        shm_withdrawn w = m->withdrawn[i];
        if (w.set != set) {
            i++;
            continue;
        }
        m->withdrawn[i] = m->withdrawn[--m->withdrawn_count];
        shm_place_give(t, w.offset, w.bytes);
    }
}

/* ---- reaching ---- */

/* False: not so much can be mapped, says errno; what is mapped stays. */
static bool shm_view_extend(shm *t, int32_t i, uint64_t need) {
    shm_view *v = &t->memory->views[i];
    uint64_t bytes = v->bytes > 0 ? v->bytes * 2 : (uint64_t)64 << 20;
    while (bytes < need) {
        bytes *= 2;
    }
    bytes = bytes < t->arena_bytes ? bytes : t->arena_bytes;
    errno = ENOMEM;
    void *at = v->old_count == (int32_t)(sizeof v->old / sizeof v->old[0])
                   ? MAP_FAILED
                   : mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, t->fd,
                          (off_t)shm_arena_offset(t, i));
    if (at == MAP_FAILED) {
        return false;
    }
    madvise(at, (size_t)bytes, MADV_DONTFORK);
    madvise(at, (size_t)bytes, MADV_DONTDUMP);
    madvise(at, (size_t)bytes, MADV_HUGEPAGE);
    if (v->base != NULL) {
        v->old[v->old_count].base = v->base;
        v->old[v->old_count++].bytes = v->bytes;
    }
    v->base = at;
    v->bytes = bytes;
    return true;
}

/* Is that within one arena? */
static bool shm_is_place(const shm *t, uint64_t offset, uint64_t bytes) {
    return t->arena_bytes > 0 && offset >= t->shared_bytes && offset < t->segment_bytes &&
           bytes <= t->arena_bytes - (offset - t->shared_bytes) % t->arena_bytes;
}

/* The address through which this rank sees bytes at a place that a peer named; good until the end. NULL: that is no
 * place in an arena, or it cannot be mapped. */
static void *shm_reach(shm *t, uint64_t offset, uint64_t bytes) {
    if (t->memory == NULL || !shm_is_place(t, offset, bytes)) {
        return NULL;
    }
    int32_t i = (int32_t)((offset - t->shared_bytes) / t->arena_bytes);
    uint64_t into = (offset - t->shared_bytes) % t->arena_bytes;
    shm_view *v = &t->memory->views[i];
    bool seen = into + bytes <= v->bytes || shm_view_extend(t, i, into + bytes);
    return seen ? v->base + into : NULL;
}

/* Copies from a place: through the mapping, or by the kernel where no more can be mapped. */
static bool shm_copy_from_place(shm *t, void *to, uint64_t offset, uint64_t bytes) {
    const void *from = shm_reach(t, offset, bytes);
    if (from != NULL) {
        shm_memcpy(to, from, bytes);
        return true;
    }
    uint64_t done = 0;
    while (shm_is_place(t, offset, bytes) && done < bytes) {
        ssize_t n = pread(t->fd, (uint8_t *)to + done, (size_t)(bytes - done), (off_t)(offset + done));
        if (n <= 0 && errno != EINTR) {
            return false;
        }
        done += n > 0 ? (uint64_t)n : 0;
    }
    return done == bytes;
}

#endif /* SHM_MEMORY_H */
