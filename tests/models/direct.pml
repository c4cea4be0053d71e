/* Collectives on memory that all ranks see (plugins/shm/native_direct.h). N ranks run OPS operations: odd ones write (each
 * rank reduces its part from the inputs of all into the outputs of all; what lies in shared pages goes by its ring),
 * even ones read. Between operations the program writes to its buffers. A rank may die before any step, or the core
 * give up; then all others are told, one after another, and each cancels: it says so, moves its output to other pages,
 * and from then on its memory is the program's. Who is late goes on reading and writing. Sleep and wake are in
 * arrival.pml, rounds through rings in rounds.pml. COARSE, for three ranks, has fewer states: a rank looks at all inputs,
 * or flags, in one step, and all are told at once.
 *
 * Checked: an operation that ends has the right result, everywhere; nobody writes to what is a program's again; nobody
 * waits for ever.
 * Planted bugs, which must be found: BUG_FENCE (what is written after a cancel may be seen before it), BUG_PAGES (the output
 * is not moved), BUG_LOOK (no look for who has cancelled before the end), BUG_TOLD (reduced is told before the outputs are
 * written), BUG_READ (an end without waiting until all have read), BUG_ARRIVE (a begin before all have arrived),
 * BUG_EDGE (what goes by a ring is told before it is there). */
#ifndef N
#define N 2
#endif
#ifndef OPS
#define OPS 3
#endif
#ifdef COARSE
#define STEPS atomic
#else
#define STEPS
#endif
#define BAD 99 /* not of this operation */
#define WRITES(s) ((s) % 2 == 1)
#if N > 2
#define THIRD(test) && (test)
#else
#define THIRD(test)
#endif
#define EACH(count, least) (count[0] >= (least) && count[1] >= (least) THIRD(count[2] >= (least)))

byte arrived[N], reduced[N], taken[N]; /* written last, so that who sees them sees what came before */
byte input[N];
byte output[N * N]; /* part p of rank q's output at q * N + p */
byte edge[N];       /* in the rings */
bit cancelled[N], moved[N], gone[N], told[N], dead[N];
bit pending[N]; /* a flag that is on its way */

active proctype memory() {
end:
    do
    :: atomic { pending[0] -> pending[0] = 0; cancelled[0] = 1 }
    :: atomic { pending[1] -> pending[1] = 0; cancelled[1] = 1 }
#if N > 2
    :: atomic { pending[2] -> pending[2] = 0; cancelled[2] = 1 }
#endif
    od
}

/* The program gives the input of operation s, and has read the result of the one before. */
inline prepare() {
    atomic {
        input[me] = s;
        do
        :: j < N -> output[me * N + j] = 0; j++
        :: else -> j = 0; break
        od
    }
}

inline await(test) {
    if
    :: test
    :: told[me] -> goto give_up
    fi
}

/* What comes of the inputs, one after another: who is late may see those of another time. */
inline read_inputs() {
    STEPS { do
    :: atomic { j < N -> value = (input[j] == s -> value : BAD); j++ }
    :: atomic { j >= N -> j = 0; break }
    od }
}

/* To where the outputs were when the operation began. */
inline write_outputs() {
    do
    :: atomic { j < N ->
        assert(!gone[j] || moved[j]);
        if
        :: !moved[j] -> output[j * N + me] = value
        :: else
        fi;
        j++ }
    :: atomic { j >= N -> j = 0; break }
    od
}

inline take_edges() {
    STEPS { do
    :: atomic { j < N -> value = (edge[j] == s -> value : BAD); j++ }
    :: atomic { j >= N -> j = 0; break }
    od }
}

inline look_for_cancelled() {
#ifndef BUG_LOOK
    STEPS { do
    :: atomic { j < N && cancelled[j] -> j = 0; goto stuck }
    :: atomic { j < N && !cancelled[j] -> j++ }
    :: atomic { j >= N -> j = 0; break }
    od }
#endif
    skip
}

inline check_result() {
    atomic {
        assert(value == s);
        do
        :: j < N -> assert(!WRITES(s) || output[me * N + j] == s); j++
        :: else -> j = 0; break
        od
    }
}

inline write() {
#ifdef BUG_TOLD
    edge[me] = value;
    reduced[me] = s;
    write_outputs();
#else
    write_outputs();
#ifdef BUG_EDGE
    reduced[me] = s;
    edge[me] = value;
#else
    edge[me] = value;
    reduced[me] = s;
#endif
#endif
    await(EACH(reduced, s));
    take_edges();
    look_for_cancelled();
    taken[me] = s
}

inline read() {
    taken[me] = s;
#ifndef BUG_READ
    await(EACH(taken, s));
#endif
    look_for_cancelled()
}

proctype rank(byte me) {
    byte s = 1, j, value;
    {
        do
        :: s <= OPS ->
            prepare();
            arrived[me] = s;
#ifndef BUG_ARRIVE
            await(EACH(arrived, s));
#endif
            value = s;
            read_inputs();
            if
            :: WRITES(s) -> write()
            :: else -> read()
            fi;
            check_result();
            s++
        :: else -> goto done
        od;
stuck:
        (told[me]); /* the core hears of it too */
give_up:
#ifdef BUG_FENCE
        pending[me] = 1;
#else
        cancelled[me] = 1;
#endif
#ifndef BUG_PAGES
        moved[me] = 1;
#endif
        gone[me] = 1;
        input[me] = BAD;
done:
        skip
    } unless { dead[me] }
}

/* Kills one rank at any time, or finds that time is over at any time; then everybody is told. */
active proctype core() {
    byte victim;
    if
    :: true -> goto done
    :: true -> skip
    :: true -> select(victim : 0 .. (N - 1)); dead[victim] = 1
    fi;
    victim = 0;
    STEPS { do
    :: victim < N -> told[victim] = 1; victim++
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
