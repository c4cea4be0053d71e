/* ps, third part: the rows that one server holds of one sparse table: a hash of ids to slots, slots in slabs, a list of
 * slots by last use. It knows no workers and no clocks. */
#ifndef DDL_PS_ROWS_H
#define DDL_PS_ROWS_H

#include "message.h"

enum { DDL__PS_SLAB_ROWS = 256, DDL__PS_INDEX_LEAST = 1024 };
#define DDL__PS_NO_ROW UINT32_MAX

/* Memory of one server, bounded. Under the context's lock, as all of its memory is. */
typedef struct ddl__ps_memory {
    ddl_context *c;
    uint64_t used, peak, limit; /* bytes */
    uint64_t reserve;           /* that only pushes whose turn it is may use, so that these never wait */
} ddl__ps_memory;

static bool ddl__ps_fits(const ddl__ps_memory *m, uint64_t bytes) {
    return bytes <= m->limit && m->used <= m->limit - bytes;
}

static void ddl__ps_use(ddl__ps_memory *m, uint64_t bytes) {
    m->used += bytes;
    m->peak = DDL__MAX(m->peak, m->used);
}

/* Zeroed; NULL when the bound or the machine's memory is reached. */
static void *ddl__ps_alloc(ddl__ps_memory *m, size_t count, size_t each) {
    size_t bytes;
    if (__builtin_mul_overflow(count, each, &bytes) || !ddl__ps_fits(m, bytes)) {
        return NULL;
    }
    ddl__lock(m->c);
    void *memory = ddl__alloc(&m->c->base, bytes);
    ddl__unlock(m->c);
    if (memory != NULL) {
        ddl__ps_use(m, bytes);
    }
    return memory;
}

static void ddl__ps_free(ddl__ps_memory *m, void *memory, size_t count, size_t each) {
    if (memory != NULL) {
        ddl__lock(m->c);
        ddl__free(&m->c->base, memory);
        ddl__unlock(m->c);
        m->used -= (uint64_t)count * each;
    }
}

typedef struct ddl__ps_row {
    uint64_t id;
    int64_t steps;         /* of the optimizer */
    uint32_t newer, older; /* by last use */
    uint32_t pins;         /* pushes that wait for their turn: it must not be evicted */
    bool touched;          /* its gradient is being added up */
} ddl__ps_row;

/* Behind each row: width values, width * state slots, width of the gradient that is being added up. */
typedef struct ddl__ps_slab {
    ddl__ps_row rows[DDL__PS_SLAB_ROWS];
    float data[];
} ddl__ps_slab;

typedef struct ddl__ps_rows {
    ddl_ps_table_config config;
    int32_t slots;        /* of the optimizer's state */
    uint32_t count, room; /* rows; slots in slabs */
    uint32_t newest, oldest;
    uint32_t *index;   /* open addressing, slot + 1; 0: empty */
    size_t index_size; /* a power of two */
    ddl__ps_slab **slabs;
    size_t slab_cap;
    uint32_t *touched; /* slots with a gradient; room for those of touched_cap slabs */
    size_t touched_cap;
    uint32_t touched_count;
    uint64_t evicted;
    ddl__ps_memory *memory;
} ddl__ps_rows;

static size_t ddl__ps_row_floats(const ddl__ps_rows *t) { return (size_t)t->config.width * (size_t)(t->slots + 2); }

static size_t ddl__ps_slab_bytes(const ddl__ps_rows *t) {
    return sizeof(ddl__ps_slab) + DDL__PS_SLAB_ROWS * ddl__ps_row_floats(t) * sizeof(float);
}

static ddl__ps_row *ddl__ps_row_at(const ddl__ps_rows *t, uint32_t slot) {
    return &t->slabs[slot / DDL__PS_SLAB_ROWS]->rows[slot % DDL__PS_SLAB_ROWS];
}

static float *ddl__ps_row_values(const ddl__ps_rows *t, uint32_t slot) {
    return t->slabs[slot / DDL__PS_SLAB_ROWS]->data + slot % DDL__PS_SLAB_ROWS * ddl__ps_row_floats(t);
}

static float *ddl__ps_row_state(const ddl__ps_rows *t, uint32_t slot) {
    return ddl__ps_row_values(t, slot) + t->config.width;
}

static float *ddl__ps_row_grad(const ddl__ps_rows *t, uint32_t slot) {
    return ddl__ps_row_values(t, slot) + (size_t)t->config.width * (size_t)(t->slots + 1);
}

/* The initialiser: value j of a row depends on seed, id and j alone, so that neither the order of first touches nor the
 * number of servers matters. 24 random bits, as many as an f32 in [0, 1) can tell apart. */
static float ddl__ps_first_value(const ddl_ps_table_config *config, uint64_t id, int32_t j) {
    uint64_t bits = ddl__mix(ddl__mix(config->seed, id), (uint64_t)j);
    float unit = (float)(bits >> 40) * (1.0f / 16777216.0f);
    return (2.0f * unit - 1.0f) * config->uniform;
}

/* >>index */

static size_t ddl__ps_home(const ddl__ps_rows *t, uint64_t id) {
    return (size_t)ddl__mix(0x696478, id) & (t->index_size - 1);
}

/* Where the id is, or the empty entry where it belongs. */
static size_t ddl__ps_probe(const ddl__ps_rows *t, uint64_t id) {
    size_t at = ddl__ps_home(t, id);
    while (t->index[at] != 0 && ddl__ps_row_at(t, t->index[at] - 1)->id != id) {
        at = (at + 1) & (t->index_size - 1);
    }
    return at;
}

/* Takes an entry out and moves those behind it up, so that no probe stops too early (Knuth, volume 3, 6.4 R). */
static void ddl__ps_unindex(ddl__ps_rows *t, size_t hole) {
    size_t mask = t->index_size - 1;
    for (size_t at = (hole + 1) & mask; t->index[at] != 0; at = (at + 1) & mask) {
        size_t home = ddl__ps_home(t, ddl__ps_row_at(t, t->index[at] - 1)->id);
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            t->index[hole] = t->index[at];
            hole = at;
        }
    }
    t->index[hole] = 0;
}

/* At most two thirds full. False: no memory. */
static bool ddl__ps_index_grow(ddl__ps_rows *t) {
    if (t->index != NULL && (size_t)t->count * 3 < t->index_size * 2) {
        return true;
    }
    size_t old_size = t->index_size, size = old_size == 0 ? DDL__PS_INDEX_LEAST : old_size * 2;
    uint32_t *old = t->index, *index = ddl__ps_alloc(t->memory, size, sizeof *index);
    if (index == NULL) {
        return false;
    }
    t->index = index;
    t->index_size = size;
    for (size_t i = 0; i < old_size; i++) {
        if (old[i] != 0) {
            index[ddl__ps_probe(t, ddl__ps_row_at(t, old[i] - 1)->id)] = old[i];
        }
    }
    ddl__ps_free(t->memory, old, old_size, sizeof *old);
    return true;
}

/* >>use */

static void ddl__ps_row_unlink(ddl__ps_rows *t, uint32_t slot) {
    ddl__ps_row *r = ddl__ps_row_at(t, slot);
    *(r->newer != DDL__PS_NO_ROW ? &ddl__ps_row_at(t, r->newer)->older : &t->newest) = r->older;
    *(r->older != DDL__PS_NO_ROW ? &ddl__ps_row_at(t, r->older)->newer : &t->oldest) = r->newer;
}

static void ddl__ps_row_use(ddl__ps_rows *t, uint32_t slot, bool linked) {
    if (linked && t->newest == slot) {
        return;
    }
    if (linked) {
        ddl__ps_row_unlink(t, slot);
    }
    ddl__ps_row *r = ddl__ps_row_at(t, slot);
    r->newer = DDL__PS_NO_ROW;
    r->older = t->newest;
    *(t->newest != DDL__PS_NO_ROW ? &ddl__ps_row_at(t, t->newest)->newer : &t->oldest) = slot;
    t->newest = slot;
}

/* >>making rows */

/* Entries of an array that has to grow: it doubles. 0: it need not. */
static size_t ddl__ps_grown(size_t cap, size_t need) { return need > cap ? DDL__MAX(need, cap * 2) : 0; }

/* Arrays of one entry a slab or a row. */
static bool ddl__ps_array_grow(ddl__ps_rows *t, void **array, size_t *cap, size_t need, size_t each) {
    if (need <= *cap) {
        return true;
    }
    size_t grown = ddl__ps_grown(*cap, need);
    void *to = ddl__ps_alloc(t->memory, grown, each);
    if (to == NULL) {
        return false;
    }
    if (*array != NULL) {
        memcpy(to, *array, *cap * each);
        ddl__ps_free(t->memory, *array, *cap, each);
    }
    *array = to;
    *cap = grown;
    return true;
}

/* One slab more. False: the bound of rows, or memory: a table without a bound leaves the reserve, one with a bound was
 * promised its room when it was made. */
static bool ddl__ps_rows_grow(ddl__ps_rows *t) {
    size_t slab = t->room / DDL__PS_SLAB_ROWS, each = DDL__PS_SLAB_ROWS * sizeof *t->touched;
    uint64_t bytes = ddl__ps_slab_bytes(t) + ddl__ps_grown(t->slab_cap, slab + 1) * sizeof *t->slabs +
                     ddl__ps_grown(t->touched_cap, slab + 1) * each;
    bytes += t->config.rows > 0 ? 0 : t->memory->reserve;
    if (t->room > UINT32_MAX / 2 || !ddl__ps_fits(t->memory, bytes) ||
        !ddl__ps_array_grow(t, (void **)&t->slabs, &t->slab_cap, slab + 1, sizeof *t->slabs) ||
        !ddl__ps_array_grow(t, (void **)&t->touched, &t->touched_cap, slab + 1, each)) {
        return false;
    }
    t->slabs[slab] = ddl__ps_alloc(t->memory, 1, ddl__ps_slab_bytes(t));
    t->room += t->slabs[slab] != NULL ? DDL__PS_SLAB_ROWS : 0;
    return t->slabs[slab] != NULL;
}

/* Takes the row that was used least recently away and returns its slot; DDL__PS_NO_ROW when none may go. */
static uint32_t ddl__ps_row_evict(ddl__ps_rows *t) {
    for (uint32_t slot = t->oldest; slot != DDL__PS_NO_ROW; slot = ddl__ps_row_at(t, slot)->newer) {
        ddl__ps_row *r = ddl__ps_row_at(t, slot);
        if (r->pins == 0 && !r->touched) {
            ddl__ps_unindex(t, ddl__ps_probe(t, r->id));
            ddl__ps_row_unlink(t, slot);
            t->evicted++;
            t->count--;
            return slot;
        }
    }
    return DDL__PS_NO_ROW;
}

static uint32_t ddl__ps_row_new(ddl__ps_rows *t, uint64_t id) {
    bool full = t->config.rows > 0 && t->count >= t->config.rows;
    uint32_t slot = DDL__PS_NO_ROW;
    if (!full && ddl__ps_index_grow(t) && (t->count < t->room || ddl__ps_rows_grow(t))) {
        slot = t->count; /* without an eviction slots are handed out in order */
    } else if (t->config.evict) {
        slot = ddl__ps_row_evict(t);
    }
    if (slot == DDL__PS_NO_ROW) {
        return slot;
    }
    ddl__ps_row *r = ddl__ps_row_at(t, slot);
    *r = (ddl__ps_row){.id = id};
    float *values = ddl__ps_row_values(t, slot);
    for (int32_t j = 0; j < t->config.width; j++) {
        values[j] = ddl__ps_first_value(&t->config, id, j);
    }
    memset(values + t->config.width, 0, (ddl__ps_row_floats(t) - (size_t)t->config.width) * sizeof(float));
    t->count++;
    t->index[ddl__ps_probe(t, id)] = slot + 1;
    ddl__ps_row_use(t, slot, false);
    return slot;
}

/* The slot of a row, made when make is set; DDL__PS_NO_ROW: there is none, or no room. It is the newest then. */
static uint32_t ddl__ps_row_get(ddl__ps_rows *t, uint64_t id, bool make) {
    uint32_t entry = t->index != NULL ? t->index[ddl__ps_probe(t, id)] : 0;
    if (entry != 0) {
        ddl__ps_row_use(t, entry - 1, true);
        return entry - 1;
    }
    return make ? ddl__ps_row_new(t, id) : DDL__PS_NO_ROW;
}

/* >>gradients */

/* Makes and pins the rows of a push: from here on it cannot fail. False: there is no room, and nothing is pinned. */
static bool ddl__ps_rows_pin(ddl__ps_rows *t, const uint64_t *ids, int64_t count) {
    int64_t made = 0;
    for (; made < count; made++) {
        uint32_t slot = ddl__ps_row_get(t, ids[made], true);
        if (slot == DDL__PS_NO_ROW) {
            break;
        }
        ddl__ps_row_at(t, slot)->pins++;
    }
    for (int64_t i = 0; made < count && i < made; i++) {
        ddl__ps_row_at(t, ddl__ps_row_get(t, ids[i], false))->pins--;
    }
    return made == count;
}

/* Adds the gradients of a push that was pinned; those of one id are added up. */
static void ddl__ps_rows_add(ddl__ps_rows *t, const uint64_t *ids, const float *grads, int64_t count) {
    int32_t width = t->config.width;
    for (int64_t i = 0; i < count; i++) {
        uint32_t slot = ddl__ps_row_get(t, ids[i], false);
        ddl__ps_row *r = ddl__ps_row_at(t, slot);
        float *sum = ddl__ps_row_grad(t, slot);
        if (!r->touched) {
            r->touched = true;
            t->touched[t->touched_count++] = slot;
            memset(sum, 0, (size_t)width * sizeof *sum);
        }
        for (int32_t j = 0; j < width; j++) {
            sum[j] += grads[i * width + j];
        }
        r->pins--;
    }
}

/* One step of the optimizer on every row with a gradient, which is divided by `among`. */
static void ddl__ps_rows_step(ddl__ps_rows *t, const ddl_optimizer *o, int32_t tensor, int32_t among, double rate) {
    for (uint32_t i = 0; i < t->touched_count; i++) {
        uint32_t slot = t->touched[i];
        ddl__ps_row *r = ddl__ps_row_at(t, slot);
        float *grad = ddl__ps_row_grad(t, slot);
        ddl__average(grad, (size_t)t->config.width, DDL_F32, among);
        ddl_optimizer_part part = {.step = ++r->steps,
                                   .learning_rate = o->learning_rate * rate,
                                   .tensor = tensor,
                                   .count = t->config.width,
                                   .param = ddl__ps_row_values(t, slot),
                                   .grad = grad,
                                   .state = ddl__ps_row_state(t, slot),
                                   .state_stride = t->config.width};
        ddl__optim_step(o, &part, NULL);
        r->touched = false;
    }
    t->touched_count = 0;
}

/* Forgets all rows. */
static void ddl__ps_rows_clear(ddl__ps_rows *t) {
    if (t->index != NULL) {
        memset(t->index, 0, t->index_size * sizeof *t->index);
    }
    t->count = t->touched_count = 0;
    t->newest = t->oldest = DDL__PS_NO_ROW;
}

static void ddl__ps_rows_free(ddl__ps_rows *t) {
    size_t slabs = t->room / DDL__PS_SLAB_ROWS;
    for (size_t i = 0; i < slabs; i++) {
        ddl__ps_free(t->memory, t->slabs[i], 1, ddl__ps_slab_bytes(t));
    }
    ddl__ps_free(t->memory, t->slabs, t->slab_cap, sizeof *t->slabs);
    ddl__ps_free(t->memory, t->touched, t->touched_cap, DDL__PS_SLAB_ROWS * sizeof *t->touched);
    ddl__ps_free(t->memory, t->index, t->index_size, sizeof *t->index);
    t->room = 0;
}

#endif /* DDL_PS_ROWS_H */
