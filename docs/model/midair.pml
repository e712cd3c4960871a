/* midair.pml: the ledger, the queues and their recovery, for `spin` to search exhaustively.
 *
 * Two connection managers and one router, any of which may be killed anywhere. README.md says
 * what is left out and why that is sound; check.py runs every scenario and every seeded bug
 * (-DBUG=n) and compares what comes out with what must come out.
 *
 * How to read it
 *   - Killed is `goto dead`. What a process loses is set to zero there. What only one process
 *     writes and reads (the journal, the routing segment, chunk headers, and the kernel's
 *     position in each socket) is a local variable of its proctype that `dead` leaves alone.
 *     What others see is global: ledger words, handles, queues.
 *   - DIES is a place where the process may be killed. There is one wherever something that a
 *     crash loses has been begun: after every operation on a ledger word, every system call
 *     and every redo log that was committed. Elsewhere (between two turns, or while frames are
 *     made past the committed lengths) a crash loses nothing, so it is the same as being slow.
 *   - An atomic block is at most one operation that others can see or that depends on what they
 *     do, with the private work and the stores to its own segment around it. Those can be moved
 *     next to it because nobody else reads or writes what they touch; the places to die
 *     between them stay. Blocks that hold more than one say why that is the same.
 *   - Variables nobody will look at again are set to zero, to have fewer states.
 *
 * Messages are numbered 1..MSGS: those of connmgr 0 first, then those of connmgr 1, each in the
 * order in which its client sends them. Receiving clients: connections 0 ("a") and 1 ("b") at
 * connmgr 0, connection 0 ("c") at connmgr 1.
 */

/* ---- what a scenario sets (check.py has the list) ---- */
#ifndef BUG
#define BUG 0
#endif
#ifndef CRASHES
#define CRASHES 2          /* kills in one run, of any of the three */
#endif
#ifndef MSGS0
#define MSGS0 2            /* messages that arrive at connmgr 0 */
#endif
#ifndef MSGS1
#define MSGS1 1            /* and at connmgr 1 */
#endif
#ifndef CHUNKS
#define CHUNKS 1           /* chunks of each arena, 1 or 2 */
#endif
#ifndef PER_CHUNK
#define PER_CHUNK 1        /* entries of each chunk, 1 or 2 */
#endif
#ifndef QUEUE
#define QUEUE 1            /* batches a queue holds */
#endif
#ifndef BATCH
#define BATCH 1            /* records a batch holds, 1 or 2 */
#endif
#ifndef LEAVES
#define LEAVES 0           /* 1: client c may go away at any time */
#endif
/* The shape of each message, and the shape it may have instead. */
#ifndef M1
#define M1 BIG + TO_A + TO_C
#endif
#ifndef M1_OR
#define M1_OR M1
#endif
#ifndef M2
#define M2 TO_A + TO_C
#endif
#ifndef M2_OR
#define M2_OR M2
#endif
#ifndef M3
#define M3 BIG + TO_A + TO_C
#endif
#ifndef M3_OR
#define M3_OR M3
#endif

#define MSGS    (MSGS0 + MSGS1)
#define ENTRIES (CHUNKS * PER_CHUNK)
#define RECORDS (MSGS + 1)    /* orders a connmgr can get: one long list makes two */
#define SLOTS   (RECORDS + 2) /* batches are numbered from 1; one more is being filled */

/* What a message is like. */
#define BIG  1   /* written straight from the arena; else copied when it is ordered */
#define LONG 2   /* connmgr 0 gets the recipients in two orders, the first marked "more" */
#define TO_A 4
#define TO_B 8
#define TO_C 16

#define SOURCE(m)   ((m) > MSGS0)
#define BIGM(m)     ((shape[m] & BIG) != 0)
#define TOUCH0(m)   ((shape[m] & (TO_A | TO_B)) != 0)
#define TOUCH1(m)   ((shape[m] & TO_C) != 0)
#define NOBODY(m)   ((shape[m] & (TO_A | TO_B | TO_C)) == 0)
/* The touch count rides on the last order of a message, and connmgr 0 is ordered to first.
 * Nobody: the source is told to delete it, touch count 1. */
#define LIMIT(m, cm) ((cm) * (1 + TOUCH0(m)) + (1 - (cm)) * (1 - TOUCH1(m)))
#define BITMASK(m)  (1 << (m))
/* What the sender of m sends after m. */
#define LATER(m)    ((2 << (MSGS0 + SOURCE(m) * MSGS1)) - (2 << (m)))

/* A record of an order batch is a message and, for long lists, which part of the list. */
#define MORE 8
#define REST 16
#define MESSAGE(rec)  ((rec) & 7)

/* ================================== seen by everybody ================================== */

byte shape[MSGS + 1]; /* chosen once */

/* A ledger word is (limit, generation, bits). Word w belongs to connmgr w / ENTRIES. */
byte w_limit[2 * ENTRIES];
byte w_gen[2 * ENTRIES];
byte w_bits[2 * ENTRIES];

/* The handle of a message; constant from the commit of its reference on. */
byte h_entry[MSGS + 1];
byte h_gen[MSGS + 1];

/* Batches: sequence, first record, second record (0: none). */
chan refs0 = [QUEUE] of { byte, byte, byte };
chan refs1 = [QUEUE] of { byte, byte, byte };
chan orders0 = [QUEUE] of { byte, byte, byte };
chan orders1 = [QUEUE] of { byte, byte, byte };

byte crashes; /* that may still come */

#define DIES if :: skip :: crashes > 0 -> crashes--; goto dead fi

#if BUG == 5
#define COMPLETE(w) (w_limit[w] != 0 && w_bits[w] >= w_limit[w])
#define ADD(bits) w_bits[e] = w_bits[e] + ((bits) != 0)
#else
#define COMPLETE(w) ((w_limit[w] == 1 && w_bits[w] != 0) || (w_limit[w] == 2 && w_bits[w] == 3))
#define ADD(bits) w_bits[e] = w_bits[e] | (bits)
#endif

/* A message may be looked at while the word is its own and not complete. */
#define ALIVE(m) (w_gen[h_entry[m]] == h_gen[m] && !COMPLETE(h_entry[m]))

/* Bugs 6 and 7 are an earlier design: a live bit beside the word, cleared by who completed it. In
 * 7 the owner also takes a complete word for free, so as not to lose what a crash left live. */
#if BUG == 6 || BUG == 7
bit w_live[2 * ENTRIES];
#define WAS_COMPLETE mine = !COMPLETE(e)
#define NOW_COMPLETE mine = mine && COMPLETE(e)
#define SET_LIVE w_live[ENTRY(buffer, messages[buffer] - 1)] = 1
#define CLEAR_LIVE(m) ; atomic { DIES; if :: mine -> w_live[h_entry[m]] = 0; mine = 0 :: else fi }
#else
#define WAS_COMPLETE skip
#define NOW_COMPLETE skip
#define SET_LIVE skip
#define CLEAR_LIVE(m)
#endif
#if BUG == 6
#define FREE(w) (!w_live[w])
#elif BUG == 7
#define FREE(w) (!w_live[w] || COMPLETE(w))
#else
#define FREE(w) COMPLETE(w)
#endif

/* ledger_or, and ledger_or_redo (a compare-and-swap loop), are one atomic operation each. */
inline relinquish(m_, bits_, limit_, compare_)
{
    d_step {
        e = h_entry[m_];
        if
        :: compare_ && w_gen[e] != h_gen[m_]
        :: else ->
            WAS_COMPLETE;
            ADD(bits_);
            if
            :: limit_ != 0 -> w_limit[e] = limit_
            :: else
            fi;
            NOW_COMPLETE
        fi;
        e = 0
    }
}

/* ---- a ring of outgoing batches (batch.h): slots, tail = (sequence, records), sent ---- */
inline ring_append(r_, rec_)
{
    if
    :: tail_n[r_] == BATCH -> tail[r_]++; tail_n[r_] = 0
    :: else
    fi;
    if
    :: tail_n[r_] == 0 -> slot_a[(r_) * SLOTS + tail[r_]] = rec_
    :: else -> slot_b[(r_) * SLOTS + tail[r_]] = rec_
    fi;
    tail_n[r_]++
}

#define UNSENT(r)   (sent[r] + 1 < tail[r])
#define CLOSABLE(r) (sent[r] + 1 == tail[r] && tail_n[r] > 0)
#define NEXT(r)     ((r) * SLOTS + sent[r] + 1)

inline store_sent(r_)
{
    sent[r_]++;
    slot_a[(r_) * SLOTS + sent[r_]] = 0;
    slot_b[(r_) * SLOTS + sent[r_]] = 0
}

/* batch_out_send: closes the batch being filled ("batch.close"), sends the next closed one,
 * stores `sent`. Killed between the last two, the successor sends the batch again. */
#if BUG == 13
#define SEND(r, queue) store_sent_first(r, queue)
inline store_sent_first(r_, queue_)
{
    e = slot_a[NEXT(r_)]; i = slot_b[NEXT(r_)];
    store_sent(r_);
    DIES;
    queue_!sent[r_],e,i;
    e = 0; i = 0
}
#else
#define SEND(r, queue) queue!sent[r] + 1,slot_a[NEXT(r)],slot_b[NEXT(r)]; DIES; store_sent(r)
#endif
#define TRY_SEND(r, queue) \
    if \
    :: CLOSABLE(r) -> tail[r]++; tail_n[r] = 0 \
    :: else \
    fi; \
    if \
    :: UNSENT(r) && len(queue) < QUEUE -> SEND(r, queue) \
    :: else \
    fi
/* Whether a turn of the loop has something to send. A batch that could be sent and is not yet is
 * to others the same as one that was sent and is not yet received. */
#define CAN_SEND(r, queue) (CLOSABLE(r) || (UNSENT(r) && len(queue) < QUEUE))
#if BATCH == 1
#define MAY_SEND(r, queue) TRY_SEND(r, queue)
#else
/* Or the batch is filled further first. */
#define MAY_SEND(r, queue) if :: skip :: true -> TRY_SEND(r, queue) fi
#endif

/* ================================ connection manager ================================ */

#define LISTED 4  /* segments in one output list at a time */
#define LOG_NONE 0
#define LOG_INPUT 1
#define LOG_ORDERS 2
#define LOG_CLOSING 3
#define HALF 4

#define TOTAL        ((1 - me) * MSGS0 + me * MSGS1)
#define NEXT_MESSAGE (me * MSGS0 + in_pos + 1)
#define ENTRY(ch, n) (me * ENTRIES + (ch) * PER_CHUNK + (n))
#define PENDING      (inbox == done + 1)

/* Whether order `rec` names connection c of this connmgr. */
#define NAMED(rec, c) \
    ((me == 0 && (c) == 0 && !((rec) & REST) && (shape[MESSAGE(rec)] & TO_A)) || \
     (me == 0 && (c) == 1 && !((rec) & MORE) && (shape[MESSAGE(rec)] & TO_B)) || \
     (me == 1 && (c) == 0 && (shape[MESSAGE(rec)] & TO_C)))

/* arena_idle: every word of the entries handed out is complete. */
#if PER_CHUNK == 1
#define IDLE(ch) (messages[ch] == 0 || FREE(ENTRY(ch, 0)))
#else
#define IDLE(ch) \
    ((messages[ch] < 1 || FREE(ENTRY(ch, 0))) && (messages[ch] < 2 || FREE(ENTRY(ch, 1))))
#endif

/* Segment n in the output list of connection c: a message, or 0 past the end. Only those of big
 * ones refer to a body. */
#define SEG(c, n) out[(c) * LISTED + (n)]
#define NEEDS(s, m) ((s) != 0 && BIGM(s) && h_entry[s] == h_entry[m])
/* cm->local[source][entry] > 0. It counts, by entry, segments in the lists as they are, and
 * recounting after a crash gives the same by construction, so it is no variable. `from`:
 * earlier segments of connection c were let go in this run of pop_sent. */
#define LOCAL_OF(c, m, from) \
    (((from) <= 0 && NEEDS(SEG(c, 0), m)) || ((from) <= 1 && NEEDS(SEG(c, 1), m)) || \
     ((from) <= 2 && NEEDS(SEG(c, 2), m)) || ((from) <= 3 && NEEDS(SEG(c, 3), m)))
#define LOCAL_AFTER(c, n, m) (LOCAL_OF(c, m, (n) + 1) || LOCAL_OF(1 - (c), m, 0))
#if BUG == 19
#define LOCAL(m) 0
#else
#define LOCAL(m) (LOCAL_OF(0, m, 0) || LOCAL_OF(1, m, 0))
#endif

/* Lists of two sources may be under way at once, those of one source never. */
#if BUG == 11
#define OPEN(m) open[0]
#else
#define OPEN(m) open[SOURCE(m)]
#endif

/* An order becomes segments at the end of its recipients' lists (orders.c, apply). */
inline apply_order(rec_)
{
    if
    :: rec_ != 0 ->
        i = 0;
        do
        :: i < 2 ->
            if
            :: NAMED(rec_, i) && !(closing && i == 0) ->
                assert(out_n[i] < LISTED);
                SEG(i, out_n[i]) = MESSAGE(rec_);
                out_n[i]++
            :: else
            fi;
            i++
        :: else -> break
        od;
        i = 0;
        OPEN(MESSAGE(rec_)) = (((rec_) & MORE) != 0) * MESSAGE(rec_)
    :: else
    fi
}

#if BUG == 12
#define STORE_APPLIED skip
#else
#define STORE_APPLIED applied = inbox
#endif
#if BUG == 14
#define APPEND_REF skip
#else
#define APPEND_REF ring_append(0, NEXT_MESSAGE)
#endif
#if BUG == 17
#define RAISE_MESSAGES skip
#else
#define RAISE_MESSAGES messages[buffer]++
#endif

/* A committed step becomes the words it names (redo.c), here in two parts with a place to die
 * between them. The values are absolute, so the successor may store all of them again; that is
 * the same as storing the rest, which is what `log + HALF` remembers. */
inline store_first()
{
    d_step {
        if
        :: log == LOG_INPUT -> APPEND_REF
        :: log == LOG_ORDERS -> apply_order(inbox_a); apply_order(inbox_b)
        :: else
        fi;
        if
        :: log > LOG_NONE && log < HALF -> log = log + HALF
        :: else
        fi
    }
}

inline store_rest()
{
    d_step {
        if
        :: log == LOG_INPUT + HALF ->
            RAISE_MESSAGES;
            SET_LIVE;
            in_pos++
        :: log == LOG_ORDERS + HALF -> STORE_APPLIED
        :: log == LOG_CLOSING + HALF -> closing = 1
        :: else
        fi;
        log = LOG_NONE
    }
}

#define COMMIT(step) log = step; DIES; store_first(); DIES; store_rest()

/* Lets go of segment n of connection c: the bit is set when no other segment here needs the
 * body and no further recipients can come (output.c, let_go_body). */
inline let_go(c_, n_, compare_)
{
    if
    :: !LOCAL_AFTER(c_, n_, SEG(c_, n_)) && OPEN(SEG(c_, n_)) != SEG(c_, n_) ->
        relinquish(SEG(c_, n_), 1 << me, 0, compare_)
    :: else
    fi
}

/* Passes over segments without a body: there is nothing to let go. */
inline pass_small(c_, until_)
{
    do
    :: k < until_ && !BIGM(SEG(c_, k)) -> k++
    :: else -> break
    od
}

/* out_head moves past what was given: one store; then the segments are reused. */
inline pop(c_)
{
    d_step {
        i = 0;
        do
        :: i < LISTED ->
            if
            :: i + given[c_] < LISTED -> SEG(c_, i) = SEG(c_, i + given[c_])
            :: else -> SEG(c_, i) = 0
            fi;
            i++
        :: else -> break
        od;
        out_n[c_] = out_n[c_] - given[c_];
        given[c_] = 0;
        i = 0
    }
}

/* One segment goes to the kernel, and so to the client: here is what the client checks. */
inline write_one(c_)
{
    d_step {
        i = SEG(c_, given[c_]);
        assert(!BIGM(i) || ALIVE(i));           /* not freed too early */
        assert((got[c_] & BITMASK(i)) == 0);    /* not delivered before */
        assert((got[c_] & LATER(i)) == 0);      /* nor anything its sender sent later */
        got[c_] = got[c_] | BITMASK(i);
        given[c_]++;
        i = 0
    }
}

/* sendmsg takes one segment or more. */
inline write_some(c_)
{
    write_one(c_);
    do
    :: given[c_] < out_n[c_] && BUG != 2 -> write_one(c_)
    :: break
    od
}

/* relinquish_all for one order: its limit, and the bit if no body is still to be written. */
#if BUG == 1
#define COMPARE 0
#else
#define COMPARE redo
#endif
#define LET_GO_ORDER(rec) \
    if \
    :: (rec) & MORE \
    :: else -> \
        i = (!LOCAL(MESSAGE(rec))) << me; \
        relinquish(MESSAGE(rec), i, LIMIT(MESSAGE(rec), me), COMPARE); \
        i = 0 \
    fi

/* place() and recv: the chunk being filled, or else one that arena_take finds (free, or idle
 * when swept; a free chunk is one that was idle, and idle it stays until it is taken). */
#define CAN_TAKE(ch) (fill == (ch) + 1 || (fill == 0 && IDLE(ch)))
#define TAKE(ch) \
    if \
    :: fill == 0 -> messages[ch] = 0; fill = (ch) + 1 \
    :: else \
    fi; \
    buffer = ch; \
    taken++

/* describe() looks at the entry of every message that is to be delivered. */
#define READABLE(rec) ((rec) == 0 || NOBODY(MESSAGE(rec)) || ALIVE(MESSAGE(rec)))

proctype Connmgr(byte me; chan refs; chan orders)
{
    /* The kernel's: messages read from the client; segments given, past the head of the list. */
    byte taken, given[2];
    /* The journal. */
    byte in_pos, buffer;           /* buffer: the chunk where unparsed bytes lie */
    byte applied, done, open[2];   /* open[s]: message of connmgr s whose list goes on */
    byte inbox, inbox_a, inbox_b;
    byte slot_a[SLOTS], slot_b[SLOTS], tail[1], tail_n[1], sent[1];
    byte out[2 * LISTED], out_n[2];
    bit closing;                   /* connection 0 has ended */
    byte log;
    /* The headers of its chunks. `state` is left out: see CAN_TAKE. */
    byte messages[CHUNKS];
    /* Private. */
    byte fill;                     /* the open chunk, + 1 */
    byte c, k, i, e;
    bit redo;
#if BUG == 6 || BUG == 7
    bit mine;
#endif
    /* What the clients have got, as bits. */
    byte got[2];

    atomic { tail[0] = 1; goto turn };

turn:
    do
    /* take_orders: mq_receive into the inbox. A batch that was sent again is dropped. */
    :: atomic {
        !PENDING && nempty(orders) ->
        orders?inbox,inbox_a,inbox_b;
#if BUG == 4
        done = inbox - 1;
        applied = 0;
        goto process
#else
        if
        :: inbox <= done -> inbox = 0; inbox_a = 0; inbox_b = 0
        :: else -> assert(PENDING); goto process
        fi
#endif
       }
    /* A batch that a predecessor received. */
    :: atomic { PENDING && applied != inbox -> goto process }
    :: atomic { PENDING && applied == inbox -> redo = 1; goto relinquish_all }

    /* output_write, for one connection. */
    :: atomic { out_n[0] > given[0] && !closing -> c = 0; goto write }
    :: atomic { out_n[1] > given[1] -> c = 1; goto write }
#if BUG == 9
    :: atomic { given[0] > 0 -> c = 0; goto written }
    :: atomic { given[1] > 0 -> c = 1; goto written }
#endif

    /* input_read. */
    :: atomic { taken < TOTAL && taken == in_pos && CAN_TAKE(0) -> TAKE(0); goto parse }
#if CHUNKS > 1
    :: atomic { taken < TOTAL && taken == in_pos && CAN_TAKE(1) -> TAKE(1); goto parse }
#endif
    :: atomic { taken > in_pos -> goto parse } /* bytes that a predecessor received */

    :: atomic { CAN_SEND(0, refs) -> TRY_SEND(0, refs) }

#if LEAVES
    /* connmgr_end: the client has gone. */
    :: atomic { me == 1 && !closing -> COMMIT(LOG_CLOSING); goto dropping }
#endif
#if PER_CHUNK > 1
    /* Between turns a crash loses one thing: which chunk is open. */
    :: atomic { fill > 0 && crashes > 0 -> crashes--; goto dead }
#endif

    /* Nothing can move any more, anywhere. */
    :: timeout -> goto quiet
    od;

parse:
    /* arena_begin, then input_commit: the reference, the number of entries handed out and the
     * position in the stream become valid together. To others, all of this is the moment the
     * word gets its next generation: until then it is complete, and adding to a complete word
     * changes nothing. */
    atomic {
        DIES;
        d_step {
            e = ENTRY(buffer, messages[buffer]);
            w_gen[e] = w_gen[e] + 1;
            w_bits[e] = 0;
            w_limit[e] = 0;
            h_entry[NEXT_MESSAGE] = e;
            h_gen[NEXT_MESSAGE] = w_gen[e];
            e = 0
        };
        DIES;
        COMMIT(LOG_INPUT);
#if BUG == 14
        DIES;
        in_pos--; ring_append(0, NEXT_MESSAGE); in_pos++;
#elif BUG == 17
        DIES;
        messages[buffer]++;
#endif
        if
        :: messages[buffer] == PER_CHUNK -> fill = 0 /* arena_close: it gets no more entries */
        :: else
        fi;
        buffer = 0;
        DIES;
        MAY_SEND(0, refs);
        goto turn
    };

process:
    /* orders_process: frames are made, small bodies copied, past the ends of the lists; then the
     * ends and `applied` are committed together. */
    atomic {
        assert(READABLE(inbox_a));
        assert(READABLE(inbox_b));
        COMMIT(LOG_ORDERS);
#if BUG == 12
        DIES;
        applied = inbox;
#elif BUG == 3
        DIES;
        done = inbox;
#endif
        DIES
    };
relinquish_all:
    atomic { LET_GO_ORDER(inbox_a); DIES } CLEAR_LIVE(MESSAGE(inbox_a));
#if BATCH > 1
    if
    :: atomic { inbox_b != 0 -> LET_GO_ORDER(inbox_b); DIES } CLEAR_LIVE(MESSAGE(inbox_b))
    :: inbox_b == 0
    fi;
#endif
    atomic {
        done = inbox; /* "orders.done" */
        inbox_a = 0; inbox_b = 0; redo = 0;
        goto turn
    };

write:
    atomic { write_some(c); DIES };
written:
    /* pop_sent: relinquish, then pop (J4). */
    atomic {
#if BUG == 2
        e = SEG(c, 0);
        pop(c);
        DIES;
        if
        :: BIGM(e) && !LOCAL(e) && OPEN(e) != e -> i = e; relinquish(i, 1 << me, 0, 0)
        :: else
        fi;
        i = 0; c = 0; e = 0;
        goto turn
#endif
        pass_small(c, given[c]);
        if
        :: k == given[c] -> pop(c); k = 0; c = 0; goto turn /* "out.pop" */
        :: else -> let_go(c, k, (BUG == 9)); k++; DIES
        fi
    } CLEAR_LIVE(SEG(c, k - 1));
    goto written;

#if LEAVES
dropping:
    /* output_drop: all that is listed is let go of, written or not. */
    atomic {
        pass_small(0, out_n[0]);
        if
        :: k == out_n[0] -> given[0] = k; pop(0); k = 0; redo = 0; goto turn /* "out.drop" */
        :: else -> let_go(0, k, redo); k++; DIES
        fi
    } CLEAR_LIVE(SEG(0, k - 1));
    goto dropping;
#endif

dead:
    skip;
    /* It is away for as long as the others like. Its successor: connmgr_load, _readopt, _start. */
    atomic {
        fill = 0; c = 0; k = 0; i = 0; e = 0; redo = 0;
#if BUG == 6 || BUG == 7
        mine = 0;
#elif BUG == 15
        given[0] = 0; given[1] = 0;
#elif BUG == 16
        log = LOG_NONE;
#elif BUG == 18
        inbox = 0;
#endif
        store_first(); store_rest(); /* redo_recover */
#if BUG == 9
        goto turn
#endif
    };
settling:
    /* What the kernel took before the crash may have been relinquished then, and by now be freed
     * and reused: it is let go of again, comparing generations, before any order is taken (a
     * count by entry must not mix two generations). */
    atomic {
        if
        :: c < 2 ->
            pass_small(c, given[c]);
            if
            :: k == given[c] -> pop(c); k = 0; c++
            :: else -> let_go(c, k, (BUG != 8)); k++; DIES
            fi
        :: else ->
            c = 0;
#if LEAVES && BUG != 10
            /* So is everything an ended connection still had. */
            if
            :: closing && out_n[0] > 0 -> redo = 1; goto dropping
            :: else
            fi;
#endif
            goto turn
        fi
    } CLEAR_LIVE(SEG(c, k - 1));
    goto settling;

quiet:
    /* None lost: all were read, and every connection that stayed has got all of its own. */
    assert(in_pos == TOTAL);
    d_step {
        k = 1;
        do
        :: k <= MSGS ->
            assert(closing || NAMED(k, 0) == ((got[0] & BITMASK(k)) != 0));
            assert(NAMED(k, 1) == ((got[1] & BITMASK(k)) != 0));
            k++
        :: else -> break
        od;
        /* None leaked: nothing in any chunk lives. */
        k = 0;
        do
        :: k < CHUNKS -> assert(IDLE(k)); k++
        :: else -> break
        od;
        k = 0
    }
}

/* ====================================== router ====================================== */

#define LANE_PENDING(l) (inbox[l] == last[l] + 1)
#define RECORD(l)       ((1 - at[l]) * inbox_a[l] + at[l] * inbox_b[l])

#if BUG == 20
#define STORE_DONE(l) late = 1
#else
#define STORE_DONE(l) last[l] = inbox[l]; inbox_a[l] = 0; inbox_b[l] = 0
#endif

/* The step committed for lane l becomes valid, in two parts: the orders of connmgr 0; those of
 * connmgr 1 and the place in the input. One reference a step: a step of several references is
 * several steps that nothing came between. */
#define FIRST_PIECE(l) ((shape[RECORD(l)] & LONG) && progress[l] == 0) /* route_huge */
inline store_orders0(l_)
{
    d_step {
        i = RECORD(l_);
        if
        :: FIRST_PIECE(l_) -> ring_append(0, i + MORE)
        :: !FIRST_PIECE(l_) && (TOUCH0(i) || (NOBODY(i) && SOURCE(i) == 0)) ->
            ring_append(0, i + progress[l_] * REST)
        :: else
        fi;
        i = 0;
        log = log + HALF
    }
}

inline store_place(l_)
{
    d_step {
        i = RECORD(l_);
        if
        :: FIRST_PIECE(l_) -> progress[l_] = 1
        :: else ->
            if
            :: TOUCH1(i) || (NOBODY(i) && SOURCE(i) == 1) -> ring_append(1, i)
            :: else
            fi;
            progress[l_] = 0;
            if
            :: at[l_] == 1 || inbox_b[l_] == 0 -> STORE_DONE(l_); at[l_] = 0
            :: else -> at[l_] = 1
            fi
        fi;
        i = 0;
        log = LOG_NONE
    }
}

inline receive(l_, refs_)
{
    refs_?inbox[l_],inbox_a[l_],inbox_b[l_];
    if
    :: inbox[l_] <= last[l_] -> inbox[l_] = 0; inbox_a[l_] = 0; inbox_b[l_] = 0
    :: else -> assert(LANE_PENDING(l_))
    fi
}

inline route(l_)
{
    log = l_ + 1;
    DIES;
    store_orders0(l_);
    DIES;
    store_place(l_);
#if BUG == 20
    DIES;
    if
    :: late -> last[l_] = inbox[l_]; late = 0
    :: else
    fi;
#endif
    MAY_SEND(0, orders0);
    MAY_SEND(1, orders1)
}

proctype Router()
{
    /* The routing segment; in.done is called `last`. */
    byte inbox[2], inbox_a[2], inbox_b[2], last[2], at[2], progress[2];
    byte slot_a[2 * SLOTS], slot_b[2 * SLOTS], tail[2], tail_n[2], sent[2];
    byte log; /* lane of the committed step, + 1 */
    /* Private. */
    byte i, e;
#if BUG == 20
    bit late;
#endif

    atomic { tail[0] = 1; tail[1] = 1; goto turn };

turn:
end:
    do
    :: atomic { !LANE_PENDING(0) && nempty(refs0) -> receive(0, refs0) }
    :: atomic { !LANE_PENDING(1) && nempty(refs1) -> receive(1, refs1) }
    /* A lane that finds no room in a ring waits, and the other goes on: so any order of lanes. */
    :: atomic { LANE_PENDING(0) -> route(0) }
    :: atomic { LANE_PENDING(1) -> route(1) }
    :: atomic { CAN_SEND(0, orders0) -> TRY_SEND(0, orders0) }
    :: atomic { CAN_SEND(1, orders1) -> TRY_SEND(1, orders1) }
    od;

dead:
    skip;
    atomic {
        i = 0; e = 0;
#if BUG == 20
        late = 0;
#endif
        /* redo_recover */
        if
        :: log > LOG_NONE && log < HALF -> store_orders0(log - 1)
        :: else
        fi;
        if
        :: log > HALF -> store_place(log - HALF - 1)
        :: else
        fi;
        goto turn
    }
}

/* ====================================== scenario ====================================== */

#define CHOOSE(m, one, other) if :: shape[m] = one :: one != other -> shape[m] = other fi

init {
    atomic {
        CHOOSE(1, M1, M1_OR);
        CHOOSE(2, M2, M2_OR);
#if MSGS0 + MSGS1 > 2
        CHOOSE(3, M3, M3_OR);
#endif
        /* Runs with fewer kills are runs of their own: one more might repair a leak. */
        do
        :: crashes < CRASHES -> crashes++
        :: break
        od;
        run Connmgr(0, refs0, orders0);
        run Connmgr(1, refs1, orders1);
        run Router()
    }
}
