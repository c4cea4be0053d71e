/* queue: messages of the core, one behind another by their own `next`. It must not know what is done with them. */
#ifndef SHM_QUEUE_H
#define SHM_QUEUE_H

#include "../../ddl.h"

#include <stdbool.h>

typedef struct shm_queue {
    ddl_message *first, **last;
} shm_queue;

static void shm_queue_add(shm_queue *q, ddl_message *m) {
    m->next = NULL;
    *q->last = m;
    q->last = &m->next;
}

static ddl_message *shm_queue_take(shm_queue *q) {
    ddl_message *m = q->first;
    q->first = m->next;
    if (q->first == NULL) {
        q->last = &q->first;
    }
    return m;
}

/* Puts `instead` (or nothing) where m is. false: m is not in the queue. */
static bool shm_queue_replace(shm_queue *q, ddl_message *m, ddl_message *instead) {
    ddl_message **at = &q->first;
    while (*at != NULL && *at != m) {
        at = &(*at)->next;
    }
    if (*at == NULL) {
        return false;
    }
    if (instead != NULL) {
        instead->next = m->next;
    }
    *at = instead != NULL ? instead : m->next;
    if (q->last == &m->next) {
        q->last = instead != NULL ? &instead->next : at;
    }
    return true;
}

static bool shm_queue_has(const shm_queue *q, const ddl_message *m) {
    const ddl_message *at = q->first;
    while (at != NULL && at != m) {
        at = at->next;
    }
    return at != NULL;
}

#endif /* SHM_QUEUE_H */
