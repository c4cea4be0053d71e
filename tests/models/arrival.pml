/* How the ranks of a set meet in small native collectives (plugins/shm/native_small.h, native_set.h), and how they sleep
 * and are woken (doorbell.h). N ranks run OPS operations; odd ones are of kinds where all wait for all, even ones of
 * kinds where all wait for a root, which runs ahead. A line is used again SLOTS operations later.
 *
 * A store goes through a store buffer, as on a real processor, and is seen later, or at the next fence: that of the rank
 * itself, or with SLEEPER the one that a rank asks the kernel for, on all cores, before it sleeps. A rank may die
 * before any step, and the core may give the operation up at any time; then it cancels, and wakes, all others. At last
 * each piece is used for something else, when every other rank has gone or is dead. COARSE, for three ranks, has fewer
 * states: stores land at once, all are cancelled at once, pieces are not used again, and a rank reads from, or wakes, all
 * others in one step.
 *
 * Clearing a sleeper's word and ringing are one step here, and two in doorbell.h: of a waker that is stopped between them
 * the core makes up, which looks every 50 ms.
 *
 * Checked: a rank that sees an arrival reads the data that came with it; nobody waits for ever.
 * Planted bugs, which must be found: BUG_FENCE (no fence between a store and the look for sleepers), BUG_LOOK (no second look
 * before the sleep), BUG_SLOT (a line is used again without asking), BUG_PIECE (a piece is used again at once). */
#ifndef N
#define N 2
#endif
#ifndef OPS
#define OPS 4
#endif
#ifdef COARSE
#define STEPS atomic
#else
#define STEPS
#endif
#define SLOTS 2
#define AT(i, s) ((i) * SLOTS + (s) % SLOTS)
#define OLD 99

byte line[N * SLOTS];
byte data[N * SLOTS];
byte ended[N];
bit sleeping[N], rung[N], dead[N], cancelled[N], gone[N];
bit anybody_dead, given_up;

/* One store of each rank that is under way: what = 0 none, 1 a line, 2 ended. */
byte under_way[N], value[N];

inline land(r) {
    if
    :: under_way[r] == 1 -> line[AT(r, value[r])] = value[r]
    :: under_way[r] == 2 -> ended[r] = value[r]
    :: else
    fi;
    under_way[r] = 0
}

/* The processor lands a store when it likes; the store of a dead rank lands too. */
active proctype memory() {
    byte r;
end:
    do
    :: atomic { under_way[0] != 0 -> r = 0; land(r) }
    :: atomic { under_way[1] != 0 -> r = 1; land(r) }
#if N > 2
    :: atomic { under_way[2] != 0 -> r = 2; land(r) }
#endif
    od
}

inline wake_others() {
#if !defined(BUG_FENCE) && !defined(SLEEPER)
    atomic { land(me) };
#endif
    STEPS { j = 0;
    do
    :: atomic { j < N ->
        if
        :: j != me && sleeping[j] -> sleeping[j] = 0; rung[j] = 1
        :: else
        fi;
        j++ }
    :: atomic { j >= N -> j = 0; break }
    od }
}

inline publish(kind, number) {
#ifdef COARSE
    atomic { under_way[me] = kind; value[me] = number; land(me) };
#else
    atomic { land(me); under_way[me] = kind; value[me] = number }; /* stores land in order */
#endif
    wake_others()
}

#define IS_ALL(s) ((s) % 2 == 1)
#define ROOT(s) ((s) / 2 % N)
#define NEEDS(s) (IS_ALL(s) || (j == ROOT(s) && me != ROOT(s)))

/* Is what this rank waits for there? phase 0: its line is free; 1: the arrivals that it needs. */
inline look(ok) {
    atomic {
        ok = 1;
        j = 0;
        do
        :: j < N ->
            if
            :: j == me
            :: j != me && phase == 0 ->
#ifdef BUG_SLOT
                skip
#else
                ok = ok && (s <= floor + SLOTS || ended[j] + SLOTS >= s)
#endif
            :: j != me && phase == 1 -> ok = ok && (line[AT(j, s)] == s || !NEEDS(s))
            fi;
            j++
        :: else -> break
        od;
        j = 0
    }
}

/* Until it is, sleeping; or until the core gives up. */
inline await() {
    do
    :: cancelled[me] -> goto give_up
    :: else ->
        look(ok);
        if
        :: ok -> ok = 0; break
        :: else ->
            atomic { land(me); sleeping[me] = 1 }; /* sequentially consistent */
#if defined(SLEEPER) && !defined(BUG_FENCE)
            atomic {
                land(0);
                land(1);
#if N > 2
                land(2)
#endif
            };
#endif
#ifndef BUG_LOOK
            look(ok);
#endif
            if
            :: ok -> atomic { sleeping[me] = 0; ok = 0 }
            :: else -> atomic { (rung[me] || cancelled[me]) -> rung[me] = 0; sleeping[me] = 0 }
            fi
        fi
    od
}

inline read_all() {
    STEPS { j = 0;
    do
    :: atomic { j < N ->
        if
        :: j != me && NEEDS(s) -> assert(data[AT(j, s)] == s)
        :: else
        fi;
        j++ }
    :: atomic { j >= N -> j = 0; break }
    od }
}

proctype rank(byte me) {
    byte s = 1, j, floor, phase;
    bit ok;
    {
        do
        :: s <= OPS ->
            phase = 0;
            await();
            atomic {
                if :: s > floor + SLOTS -> floor = s - SLOTS :: else fi;
                data[AT(me, s)] = s
            };
            publish(1, s);
            phase = 1;
            await();
            read_all();
            if
            :: IS_ALL(s) -> floor = s - 1
            :: else -> publish(2, s)
            fi;
            s++
        :: else -> break
        od;
give_up:
#ifndef COARSE
        gone[me] = 1;
#ifndef BUG_PIECE
        j = 0;
        do
        :: j < N -> (gone[j] || dead[j]); j++ /* the real one looks again at each opening and closing of a set */
        :: else -> break
        od;
#endif
        data[AT(me, 0)] = OLD;
        data[AT(me, 1)] = OLD;
#endif
        skip
    } unless { dead[me] }
}

/* Kills one rank at any time, or finds that time is over at any time; then everybody is told. */
active proctype core() {
    byte victim;
    if
    :: true -> goto done
    :: true -> given_up = 1
    :: true -> select(victim : 0 .. (N - 1)); dead[victim] = 1; anybody_dead = 1
    fi;
    victim = 0;
#ifdef COARSE
    atomic { cancelled[0] = 1; cancelled[1] = 1; cancelled[N - 1] = 1 };
#else
    do
    :: victim < N -> cancelled[victim] = 1; victim++
    :: else -> break
    od;
#endif
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
