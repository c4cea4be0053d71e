/* How the two sides of a ring of messages sleep and are woken (plugins/shm/message.h, doorbell.h): a writer that waits for
 * room, a reader that waits for records. What stands in the ring is ring.pml's; here it is a number of records. The
 * writer's rank has two threads: one sends, and one moves what waits for room, and sleeps for both.
 *
 * A store goes through a store buffer of its thread, and is seen later, or at the next fence: the thread's own, or with
 * SLEEPER the one that a rank asks the kernel for, on all cores, before it sleeps. A lock is a fence. The reader tells what
 * it has read now and then, when the writer wants room, and before it sleeps.
 *
 * Checked: all records come, and nobody sleeps for ever; nobody counts on the core, which looks every 50 ms. The death of
 * a side is in ring.pml.
 * Planted bugs, which must be found: BUG_FENCE (no fence between a store and the look for sleepers), BUG_LOOK (the writer
 * does not look again before it sleeps), BUG_RECORD (nor does the reader), BUG_THREAD (nor does a thread that finds no
 * room while the other one sleeps), BUG_WANT (nobody says that room is wanted), BUG_TELL (the reader sleeps without having
 * told). */
#ifndef RECORDS
#define RECORDS 6
#endif
#define CAPACITY 3
#define NEEDS 2 /* a record, and the place behind it */
#define OFTEN 3 /* so many that were read are told in any case */

#define POLLER 0
#define SENDER 1
#define READER 2
#define THREADS 3

#define WRITTEN 1
#define READ 2
#define WANTS 3

byte written, read; /* in shared memory */
bit wants;
bit asleep[2], rung[2]; /* of the writer's rank, the reader's */

byte under_way[THREADS], value[THREADS];

bit locked, armed, all_sent; /* of the writer's rank */
byte moved, seen, waiting, full_at;

inline land(t) {
    if
    :: under_way[t] == WRITTEN -> written = value[t]
    :: under_way[t] == READ -> read = value[t]
    :: under_way[t] == WANTS -> wants = value[t]
    :: else
    fi;
    under_way[t] = 0
}

/* The processor lands a store when it likes. */
active proctype memory() {
end:
    do
    :: atomic { under_way[POLLER] != 0 -> land(POLLER) }
    :: atomic { under_way[SENDER] != 0 -> land(SENDER) }
    :: atomic { under_way[READER] != 0 -> land(READER) }
    od
}

/* Stores land in order. */
inline store(t, what, number) { atomic { land(t); under_way[t] = what; value[t] = number } }

inline waker_fence(t) {
#if !defined(BUG_FENCE) && !defined(SLEEPER)
    atomic { land(t) }
#else
    skip
#endif
}

inline sleeper_fence(t) {
#if defined(SLEEPER) && !defined(BUG_FENCE)
    atomic { land(POLLER); land(SENDER); land(READER) }
#elif !defined(BUG_FENCE)
    atomic { land(t) }
#else
    skip
#endif
}

inline wake(t, side) {
    waker_fence(t);
    atomic {
        if
        :: asleep[side] -> asleep[side] = 0; rung[side] = 1
        :: else
        fi
    }
}

inline lock(t) { atomic { !locked -> locked = 1; land(t) } }
inline unlock(t) { atomic { land(t); locked = 0 } }

/* Of the first that waits, or is to be sent. */
inline find_room(ok) {
    if
    :: moved - seen + NEEDS <= CAPACITY -> ok = 1
    :: else -> atomic { seen = read; ok = (moved - seen + NEEDS <= CAPACITY) }
    fi
}

inline push(t) {
    moved++;
    store(t, WRITTEN, moved)
}

active proctype sender() {
    byte sent;
    bit ok;
    do
    :: sent < RECORDS ->
        lock(SENDER);
        ok = 0;
        if
        :: waiting == 0 -> find_room(ok)
        :: else
        fi;
        if
        :: ok -> push(SENDER); wake(SENDER, 1)
        :: !ok && waiting > 0 -> waiting++
        :: else ->
            waiting++;
#ifndef BUG_WANT
            store(SENDER, WANTS, 1);
#endif
            full_at = seen;
#ifndef BUG_THREAD
            if
            :: armed ->
                sleeper_fence(SENDER);
                if
                :: read != full_at -> rung[0] = 1
                :: else
                fi
            :: else
            fi
#endif
        fi;
        sent++;
        unlock(SENDER)
    :: else -> all_sent = 1; break
    od
}

active proctype poller() {
    bit ok, any;
    do
    :: true ->
        lock(POLLER);
        any = 0;
        do
        :: waiting > 0 ->
            find_room(ok);
            if
            :: ok -> push(POLLER); waiting--; any = 1
            :: else -> full_at = seen; break
            fi
        :: else -> break
        od;
        if
        :: any -> wake(POLLER, 1)
        :: else
        fi;
        if
        :: waiting == 0 -> store(POLLER, WANTS, 0)
        :: else
        fi;
        atomic { land(POLLER); armed = 1; asleep[0] = 1 };
        sleeper_fence(POLLER);
#ifdef BUG_LOOK
        ok = 0;
#else
        ok = (waiting > 0 && read != full_at);
#endif
        if
        :: ok -> atomic { armed = 0; asleep[0] = 0 }; unlock(POLLER)
        :: else ->
            unlock(POLLER);
            atomic { (rung[0] || (all_sent && waiting == 0)) -> if :: !rung[0] -> goto done :: else fi };
            lock(POLLER);
            atomic { rung[0] = 0; armed = 0; asleep[0] = 0 };
            unlock(POLLER)
        fi
    od;
done:
    skip
}

inline tell() {
    told = got;
    store(READER, READ, got);
    waker_fence(READER);
    if
    :: wants -> wake(READER, 0)
    :: else
    fi
}

active proctype reader() {
    byte got, told;
    bit ok;
    do
    :: true ->
        do
        :: written != got ->
            got++;
            if
            :: got - told >= OFTEN -> tell()
            :: else
            fi
        :: else -> break
        od;
        if
        :: got != told && wants -> tell()
        :: else
        fi;
        if :: got == RECORDS -> break :: else fi;
        atomic { land(READER); asleep[1] = 1 };
        sleeper_fence(READER);
#ifndef BUG_TELL
        if
        :: got != told -> tell()
        :: else
        fi;
#endif
#ifdef BUG_RECORD
        ok = 0;
#else
        ok = (written != got);
#endif
        if
        :: ok -> asleep[1] = 0
        :: else -> atomic { rung[1] -> rung[1] = 0; asleep[1] = 0 }
        fi
    od
}
