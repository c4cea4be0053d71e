/* An all_to_all by pairs (plugins/shm/native_exchange.h), in place. N ranks run OPS of them, one after another; each gives
 * UNITS units to each other one, through a room for ROOM of them, and what it gets lands where what it gave stood. Two
 * counters of a pair, which go on from operation to operation, say how far it is. A rank fills rooms before the others have
 * come if all have taken what the operation before had, and empties them when all have come. Between operations the program
 * writes to its buffer. A rank may die before any step, or the core give up; then all others are cancelled. Sleep and wake
 * are in arrival.pml. COARSE, for three ranks, has fewer states: a rank dies and all others are cancelled in one step.
 *
 * Checked: an operation that ends has got what was given to it; no counter is ever taken for a corrupt one; nobody waits for
 * ever.
 * Planted bugs, which must be found: BUG_ROOM (fills a room that is full), BUG_INPLACE (empties more than was sent),
 * BUG_EARLY (fills rooms before all have taken what stood there), BUG_COUNT (what is sent is told before it is there),
 * BUG_FREE (what is got is told before it is read), BUG_BASE (counts as in the operation before). */
#ifndef N
#define N 2
#endif
#ifndef OPS
#define OPS 3
#endif
#ifndef UNITS
#define UNITS 3
#endif
#ifndef ROOM
#define ROOM 2
#endif
#ifdef COARSE
#define STEPS atomic
#else
#define STEPS
#endif
#define PAIR(i, j) ((i) * N + (j))
#define VALUE(i, s, u) (((s) * UNITS + (u)) * N + (i)) /* unit u of what rank i gives in operation s */
#define NEXT ((me + 1) % N)
#define LAST ((me + 2) % N)

byte room[N * N * ROOM];      /* of a pair: what i gives to j */
byte sent[N * N], got[N * N]; /* the same: what i says to j, counted from the first operation on */
byte arrived[N], taken[N];
bit dead[N], cancelled[N];

#if N > 2
#define THIRD(test) && (test)
#else
#define THIRD(test)
#endif
#define EACH(count, least) (count[0] >= (least) && count[1] >= (least) THIRD(count[2] >= (least)))
#define PLACE(i, j, u) room[PAIR(i, j) * ROOM + (u) % ROOM]
#define COUNT(count, j) ((count[PAIR(j, me)] - exchanged) & 255) /* in this operation; unsigned, as the real one is */
#ifdef BUG_EARLY
#define HAS_RING true
#else
#define HAS_RING EACH(taken, s - 1)
#endif
#ifdef BUG_ROOM
#define CAN_FILL(j) (HAS_RING && filled[j] < UNITS)
#else
#define CAN_FILL(j) (HAS_RING && filled[j] < UNITS && filled[j] < COUNT(got, j) + ROOM)
#endif
#ifdef BUG_INPLACE
#define CAN_EMPTY(j) (emptied[j] < COUNT(sent, j))
#else
#define CAN_EMPTY(j) (emptied[j] < COUNT(sent, j) && emptied[j] < filled[j])
#endif

/* The program gives its data of operation s. A rank's own part is there. */
inline prepare() {
    atomic {
        do
        :: k < N * UNITS -> cell[k] = VALUE(me, s, k % UNITS); k++
        :: else -> k = 0; break
        od;
        do
        :: k < N -> filled[k] = (k == me -> UNITS : 0); emptied[k] = filled[k]; k++
        :: else -> k = 0; break
        od
    }
}

inline copy_in(j) { PLACE(me, j, filled[j]) = cell[j * UNITS + filled[j]] }
inline say_sent(j) { sent[PAIR(me, j)] = exchanged + filled[j] + 1 }
inline copy_out(j) { cell[j * UNITS + emptied[j]] = PLACE(j, me, emptied[j]) }
inline say_got(j) { got[PAIR(me, j)] = exchanged + emptied[j] + 1 }

inline fill_room(j) {
    atomic { CAN_FILL(j) ->
#ifdef BUG_COUNT
        say_sent(j)
    };
    atomic { copy_in(j); filled[j]++ }
#else
        copy_in(j)
    };
    atomic { say_sent(j); filled[j]++ }
#endif
}

inline empty_room(j) {
    atomic { CAN_EMPTY(j) ->
#ifdef BUG_FREE
        say_got(j)
    };
    atomic { copy_out(j); emptied[j]++ }
#else
        copy_out(j)
    };
    atomic { say_got(j); emptied[j]++ }
#endif
}

/* The real one looks before each step, whether it can do anything or not. */
#define NONSENSE_GOT(j) (HAS_RING && COUNT(got, j) > filled[j])
#define NONSENSE(j) (NONSENSE_GOT(j) || COUNT(sent, j) > UNITS)

inline finish() {
    atomic {
        do
        :: k < N * UNITS -> assert(cell[k] == VALUE(k / UNITS, s, k % UNITS)); k++
        :: else -> k = 0; break
        od;
#ifndef BUG_BASE
        exchanged = exchanged + UNITS;
#endif
        taken[me] = s;
        s++
    }
}

/* Takes any step that it can; the real one tries them in turn. */
proctype rank(byte me) {
    byte s = 1, k, exchanged, cell[N * UNITS], filled[N], emptied[N];
    {
        do
        :: s <= OPS ->
            prepare();
            do
            :: fill_room(NEXT)
            :: NONSENSE_GOT(NEXT) -> assert(false)
#if N > 2
            :: fill_room(LAST)
            :: NONSENSE_GOT(LAST) -> assert(false)
#endif
            :: true -> break
            od;
            arrived[me] = s;
            if
            :: EACH(arrived, s)
            :: cancelled[me] -> goto done
            fi;
            do
            :: fill_room(NEXT)
            :: empty_room(NEXT)
            :: NONSENSE(NEXT) -> assert(false)
#if N > 2
            :: fill_room(LAST)
            :: empty_room(LAST)
            :: NONSENSE(LAST) -> assert(false)
#endif
            :: EACH(filled, UNITS) && EACH(emptied, UNITS) -> break
            :: cancelled[me] -> goto done
            od;
            finish()
        :: else -> break
        od;
done:
        skip
    } unless { dead[me] }
}

active proctype core() {
    byte victim;
    STEPS {
        if
        :: true -> goto done
        :: true -> skip
        :: true -> select(victim : 0 .. (N - 1)); dead[victim] = 1
        fi;
        victim = 0;
        do
        :: victim < N -> cancelled[victim] = 1; victim++
        :: else -> break
        od
    };
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
