/* Rounds through the rings of a set (plugins/shm/native_bulk.h), in place. N ranks walk through ROUNDS rounds with room
 * for ROOM of them; each posts, (with SPLIT) reduces and posts the result where its own part was, and takes. A rank may
 * die before any step, or the core give up; then all others are cancelled. Sleep and wake are in arrival.pml.
 *
 * Checked: whoever reads a place reads the round that it means; nobody posts from a buffer that a result was written to;
 * nobody waits for ever.
 * Planted bugs, which must be found: BUG_ROOM (posts without asking the others), BUG_INPLACE (takes before the own chunk
 * is posted), BUG_OWN (asks the others, not itself). */
#ifndef N
#define N 2
#endif
#ifndef ROUNDS
#define ROUNDS 4
#endif
#ifndef ROOM
#define ROOM 2
#endif
#define AT(i, k) ((i) * ROOM + (k) % ROOM)

byte given[N * ROOM];  /* round + 1 of what was posted there */
byte result[N * ROOM]; /* the same place: the own part is not posted, the result goes there */
byte posted[N], reduced[N], taken[N];
bit overwritten[N * ROUNDS];
bit dead[N], cancelled[N];

/* count and what are expressions with j in them. */
inline all_counted(count, least, own) {
    ok = 1;
    j = 0;
    do
    :: j < N -> ok = ok && ((j == me && !own) || count >= least); j++
    :: else -> break
    od;
    j = 0
}

/* One rank's place at a time. */
inline check_each(what, k, own) {
    do
    :: atomic { j < N ->
        if
        :: j != me || own -> assert(what == k + 1)
        :: else
        fi;
        j++ }
    :: atomic { j >= N -> j = 0; break }
    od
}

inline can_post() {
    atomic {
        ok = 1;
#ifndef BUG_ROOM
        if
        :: post >= ROOM ->
#ifdef BUG_OWN
            all_counted(taken[j], post + 1 - ROOM, 0)
#else
            all_counted(taken[j], post + 1 - ROOM, 1)
#endif
        :: else
        fi;
#endif
        ok = ok && post < ROUNDS
    }
}

inline can_reduce() {
    atomic { all_counted(posted[j], reduce + 1, 0); ok = ok && reduce < post }
}

inline can_take() {
    atomic {
#ifdef SPLIT
        all_counted(reduced[j], take + 1, 0);
        ok = ok && take < reduce
#else
        all_counted(posted[j], take + 1, 0);
#ifndef BUG_INPLACE
        ok = ok && take < post
#endif
#endif
    }
}

#define ANY_NEWS (posted[0] + posted[1] + reduced[0] + reduced[1] + taken[0] + taken[1] + more != seen)
#if N > 2
#define more (posted[2] + reduced[2] + taken[2])
#else
#define more 0
#endif

proctype rank(byte me) {
    byte j, post, reduce, take, seen;
    bit ok, moved;
    {
        do
        :: take < ROUNDS && !cancelled[me] ->
            atomic {
                moved = 0;
                seen = posted[0] + posted[1] + reduced[0] + reduced[1] + taken[0] + taken[1] + more
            };
            can_post();
            if
            :: ok ->
                atomic {
                    assert(!overwritten[me * ROUNDS + post]);
                    given[AT(me, post)] = post + 1;
                    result[AT(me, post)] = 0
                };
                atomic { post++; posted[me] = post; moved = 1 }
            :: else
            fi;
#ifdef SPLIT
            can_reduce();
            if
            :: ok ->
                check_each(given[AT(j, reduce)], reduce, 0);
                result[AT(me, reduce)] = reduce + 1;
                atomic { reduce++; reduced[me] = reduce; moved = 1 }
            :: else
            fi;
#endif
            if :: take < ROUNDS -> can_take() :: else -> ok = 0 fi;
            if
            :: ok ->
#ifdef SPLIT
                check_each(result[AT(j, take)], take, 1);
#else
                check_each(given[AT(j, take)], take, 0);
#endif
                atomic { overwritten[me * ROUNDS + take] = 1; take++; taken[me] = take; moved = 1 }
            :: else
            fi;
            if
            :: moved
            :: else -> (ANY_NEWS || cancelled[me])
            fi
        :: else -> break
        od
    } unless { dead[me] }
}

active proctype core() {
    byte victim;
    if
    :: true -> goto done
    :: true -> skip
    :: true -> select(victim : 0 .. (N - 1)); dead[victim] = 1
    fi;
    victim = 0;
    do
    :: victim < N -> cancelled[victim] = 1; victim++
    :: else -> break
    od;
done:
    skip
}

init {
    byte i = 0;
    atomic {
        do
        :: i < N -> run rank(i); i++
        :: else -> break
        od
    }
}
