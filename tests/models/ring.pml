/* The ring of records from one writer to one reader (plugins/shm/ring.h), in lines. Records are one or two lines long;
 * what does not fit before the end is skipped; where there is room, the line behind the next record is cleared ahead of
 * time. The last record is an end without content. Either side may die before any step.
 *
 * Stores land at once: that others see them in order is for the releases and acquires of ring.h. Who sleeps while there is no
 * room, or no record, is in room.pml.
 *
 * Checked: the reader sees whole records, each once, in order, and then the end; who lives goes on as far as it can.
 * Planted bugs, which must be found: BUG_CLEAR (the place behind a record is cleared after it was published), BUG_BEHIND
 * (no room is kept for that place), BUG_TELL (places are given back before they were read), BUG_AHEAD (a line is cleared
 * ahead of time whether or not it was read), BUG_FORGET (what was cleared ahead is believed to be more than it is). */
#ifndef RECORDS
#define RECORDS 6
#endif
#define CAPACITY 6
#define SKIP 9 /* kind of what fills the end */
#define END 10 /* kind of the last record */
#define WORD(kind, lines) ((kind) * 4 + (lines) + 1) /* 0: no record */

byte word[CAPACITY];
byte data[CAPACITY];
byte read_lines; /* told by the reader, modulo 256 */
bit writer_dead, reader_dead;

#define AT(line) ((line) % CAPACITY)

inline publish(kind, lines) {
    word[place] = WORD(kind, lines)
}

/* cleared: the words of lines before this are 0, counted as moved is; seen: what was read when last looked. */
inline commit(kind, lines) {
#ifdef BUG_CLEAR
    publish(kind, lines);
#endif
    moved = moved + lines;
    next = AT(place + lines);
    if
    :: cleared <= moved -> word[next] = 0; cleared = moved + 1
    :: else
    fi;
#ifndef BUG_CLEAR
    publish(kind, lines);
#endif
    place = next;
    if
#ifdef BUG_AHEAD
    :: cleared == moved + 1 ->
#else
    :: cleared == moved + 1 && cleared + 1 - seen <= CAPACITY ->
#endif
        word[AT(place + 1)] = 0;
#ifdef BUG_FORGET
        cleared = cleared + 2
#else
        cleared = cleared + 1
#endif
    :: else
    fi
}

#ifdef BUG_BEHIND
#define BEHIND 0
#else
#define BEHIND 1
#endif

active proctype writer() {
    byte n = 1, place, next, moved, lines, need, k, cleared, seen;
    {
        do
        :: n <= RECORDS ->
            select(lines : 1 .. 2);
            need = (place + lines > CAPACITY -> CAPACITY - place + lines : lines);
            if
            :: moved + need + BEHIND - seen <= CAPACITY
            :: else ->
                (moved + need + BEHIND - read_lines <= CAPACITY || reader_dead);
                if :: reader_dead -> break :: else fi;
                seen = read_lines
            fi;
            if :: place + lines > CAPACITY -> k = CAPACITY - place; commit(SKIP, k) :: else fi;
            k = 0;
            do
            :: k < lines -> data[place + k] = n; k++
            :: else -> break
            od;
            commit(n % 2, lines);
            n++
        :: else -> publish(END, 0); break
        od
    } unless { writer_dead }
}

active proctype reader() {
    byte n = 1, place, moved, lines, w, k;
    {
        do
        :: true ->
            (word[place] != 0 || writer_dead);
            w = word[place];
            if :: w == 0 -> break :: else fi;
            if
            :: w == WORD(END, 0) -> assert(n == RECORDS + 1); break
            :: else
            fi;
            lines = (w - 1) % 4;
            assert(lines <= CAPACITY - place);
#ifdef BUG_TELL
            read_lines = moved + lines;
#endif
            if
            :: (w - 1) / 4 == SKIP
            :: else ->
                assert((w - 1) / 4 == n % 2);
                k = 0;
                do
                :: k < lines -> assert(data[place + k] == n); k++
                :: else -> break
                od;
                n++
            fi;
            place = (place + lines == CAPACITY -> 0 : place + lines);
            moved = moved + lines;
            read_lines = moved
        od
    } unless { reader_dead }
}

active proctype death() {
    if
    :: true
    :: true -> writer_dead = 1
    :: true -> reader_dead = 1
    fi
}
