/* mesh: a rank that is dead or has left begins anew: another process has taken its place, a newcomer. Each process that
 * has a rank has an incarnation, higher than those before; the handshake of a connection and the word that a rank is
 * dead carry it (host.h, detector.h), so that whoever was only cut off, and news of it, find no way to its successor's
 * links. Who is admitted, and by whom, is for the rooms above. */
#ifndef DDL_MESH_REJOIN_H
#define DDL_MESH_REJOIN_H

#include "wait.h"

/* Group room: in groups that were made before, the rank stays dead. */
static void ddl__groups_rank_rejoined(ddl_context *c, int32_t rank);

/* Ends what is left of a rank here: this rank may not have heard yet that it is dead, or it left. Nobody is told. */
static void ddl__link_end(ddl_context *c, int32_t rank, const char *text) {
    ddl__link *l = &c->links[rank];
    if (l->life != DDL__DEAD) {
        ddl__settle(c, l, DDL__DEAD);
        c->closing_count += !l->closing;
        l->closing = true;
        ddl__groups_rank_dead(c, rank, text, false);
    }
    ddl__reap(c);
}

/* Makes the link of a rank that is dead as it was before ddl_init met anybody; the rank stays dead until the caller,
 * who knows the newcomer, has filled it. Not from inside a transport's calls. */
static void ddl__link_again(ddl_context *c, int32_t rank, uint32_t incarnation) {
    char text[128];
    snprintf(text, sizeof text, "rank %d is dead or has left: a new process takes its place", rank);
    ddl__link_end(c, rank, text);
    ddl__groups_rank_rejoined(c, rank);
    ddl__board_again(c, rank);
    c->local_ranks -= c->links[rank].same_host;
    c->core_ranks -= c->links[rank].same_cores;
    ddl__wipe(&c->links[rank], sizeof c->links[rank]); /* keys */
    c->links[rank] = (ddl__link){.life = DDL__DEAD, .pidfd = -1, .incarnation = incarnation};
    c->incarnation_seen = DDL__MAX(c->incarnation_seen, incarnation);
    for (int32_t i = 0; i < c->endpoint_count; i++) {
        const ddl__endpoint *e = &c->endpoints[i];
        if (DDL_HAS(e->table, peer_again)) {
            e->table->peer_again(e->self, rank);
        }
    }
}

#endif /* DDL_MESH_REJOIN_H */
