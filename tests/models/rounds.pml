/* Rounds through the rings of a set (plugins/shm/native_bulk.h), in place. N ranks walk through ROUNDS rounds with room
 * for ROOM of them; each posts, (with SPLIT) reduces and posts the result where its own part was, and takes. A rank may
 * die before any step, or the core give up; then all others are cancelled. Sleep and wake are in arrival.pml. COARSE, for
 * three ranks, has fewer states: a rank looks at all others in one step, and all are cancelled at once.
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
#ifdef COARSE
#define STEPS atomic
#else
#define STEPS
#endif
#define AT(i, k) ((i) * ROOM + (k) % ROOM)

byte given[N * ROOM];  /* round + 1 of what was posted there */
byte result[N * ROOM]; /* the same place: the own part is not posted, the result goes there */
byte posted[N], reduced[N], taken[N];
bit overwritten[N * ROUNDS];
bit dead[N], cancelled[N];

#if N > 2
#define THIRD(test) && (test)
#else
#define THIRD(test)
#endif
#define EACH(count, least) (count[0] >= (least) && count[1] >= (least) THIRD(count[2] >= (least)))
#define OTHERS(count, least) ((me == 0 || count[0] >= (least)) && (me == 1 || count[1] >= (least)) \
                              THIRD(me == 2 || count[2] >= (least)))
#if defined(BUG_ROOM)
#define CAN_POST (post < ROUNDS)
#elif defined(BUG_OWN)
#define CAN_POST (post < ROUNDS && (post < ROOM || OTHERS(taken, post + 1 - ROOM)))
#else
#define CAN_POST (post < ROUNDS && (post < ROOM || EACH(taken, post + 1 - ROOM)))
#endif
#define CAN_REDUCE (reduce < post && OTHERS(posted, reduce + 1))
#if defined(SPLIT)
#define CAN_TAKE (take < reduce && OTHERS(reduced, take + 1))
#elif defined(BUG_INPLACE)
#define CAN_TAKE (take < ROUNDS && OTHERS(posted, take + 1))
#else
#define CAN_TAKE (take < post && OTHERS(posted, take + 1))
#endif

/* One rank's place at a time; what is an expression with j in it. */
inline check_each(what, k, own) {
    STEPS { do
    :: atomic { j < N ->
        if
        :: j != me || own -> assert(what == k + 1)
        :: else
        fi;
        j++ }
    :: atomic { j >= N -> j = 0; break }
    od }
}

/* Takes any step that it can; the real one tries them in turn. */
proctype rank(byte me) {
    byte j, post, reduce, take;
    {
        do
        :: cancelled[me] || take == ROUNDS -> break
        :: atomic { CAN_POST ->
                assert(!overwritten[me * ROUNDS + post]);
                given[AT(me, post)] = post + 1;
                result[AT(me, post)] = 0
            };
            atomic { post++; posted[me] = post }
#ifdef SPLIT
        :: CAN_REDUCE ->
            check_each(given[AT(j, reduce)], reduce, 0);
            result[AT(me, reduce)] = reduce + 1;
            atomic { reduce++; reduced[me] = reduce }
#endif
        :: CAN_TAKE ->
#ifdef SPLIT
            check_each(result[AT(j, take)], take, 1);
#else
            check_each(given[AT(j, take)], take, 0);
#endif
            atomic { overwritten[me * ROUNDS + take] = 1; take++; taken[me] = take }
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
    STEPS { do
    :: victim < N -> cancelled[victim] = 1; victim++
    :: else -> break
    od };
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
