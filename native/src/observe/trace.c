/* trace: records of deliveries, from the order to the kernel's taking of the last byte. Structure,
 * writers, invariants and what a crash leaves are in trace.h. */
#include "observe/trace.h"

#include "connmgr/connmgr.h"
#include "router/index/index.h"
#include "base/reserve.h"
#include "base/hash.h"

#include <errno.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

uint64_t trace_ring_bytes(uint32_t capacity)
{
    return sizeof(struct trace_ring) + (uint64_t)capacity * sizeof(struct trace_record) +
           (uint64_t)TRACE_SUBJECTS * sizeof(struct trace_subject);
}

uint64_t trace_fingerprint(void)
{
    return SEGMENT_FINGERPRINT(sizeof(struct trace_ring), sizeof(struct trace_record), sizeof(struct trace_subject),
                               sizeof(struct trace_control), TRACE_SUBJECTS);
}

void trace_ring_format(struct trace_ring *r, uint32_t index, uint32_t capacity, uint64_t epoch)
{
    r->index = index;
    r->capacity = capacity;
    r->epoch = epoch;
    segment_format(r, SEGMENT_TRACE, TRACE_LAYOUT, trace_fingerprint(), trace_ring_bytes(capacity));
}

void trace_control_format(struct trace_control *c)
{
    segment_format(c, SEGMENT_TRACE_CONTROL, TRACE_LAYOUT, trace_fingerprint(), sizeof(*c));
}

void trace_control_set(struct trace_control *c, uint32_t recording, uint32_t every)
{
    atomic_store_explicit(&c->word, (uint64_t)recording << 32 | every, memory_order_release);
}

void trace_control_set_tail(struct trace_control *c, uint32_t index, uint64_t epoch, uint64_t records,
                        uint64_t subjects)
{
    struct trace_tail *t = &c->tails[index];

    if (atomic_load_explicit(&t->epoch, memory_order_relaxed) != epoch)
        atomic_store_explicit(&t->epoch, 0, memory_order_release);
    atomic_store_explicit(&t->subjects, subjects, memory_order_release);
    atomic_store_explicit(&t->records, records, memory_order_release);
    atomic_store_explicit(&t->epoch, epoch, memory_order_release);
}

uint64_t trace_ring_head(const struct trace_ring *r)
{
    return atomic_load_explicit(&r->head, memory_order_acquire);
}
uint64_t trace_ring_subjects_head(const struct trace_ring *r)
{
    return atomic_load_explicit(&r->subjects_head, memory_order_acquire);
}
uint64_t trace_ring_word(const struct trace_ring *r)
{
    return atomic_load_explicit(&r->word, memory_order_acquire);
}
uint64_t trace_control_word(const struct trace_control *c)
{
    return atomic_load_explicit(&c->word, memory_order_acquire);
}

void trace_control_tail(const struct trace_control *c, uint32_t index, uint64_t epoch,
                        uint64_t *ret_records, uint64_t *ret_subjects)
{
    const struct trace_tail *t = &c->tails[index];
    int same = atomic_load_explicit(&t->epoch, memory_order_acquire) == epoch;

    *ret_records = same ? atomic_load_explicit(&t->records, memory_order_acquire) : 0;
    *ret_subjects = same ? atomic_load_explicit(&t->subjects, memory_order_acquire) : 0;
}

int trace_open(struct connmgr *cm, struct trace_ring *ring, const struct trace_control *control,
               uint32_t generation)
{
    struct trace *t = &cm->trace;

    t->pool = reserve((uint64_t)TRACE_FLIGHTS * sizeof(struct trace_flight));
    t->first = reserve((uint64_t)cm->journal->conns * 4);
    t->last = reserve((uint64_t)cm->journal->conns * 4);
    t->seen = reserve((uint64_t)TRACE_SEEN * 8);
    if (!t->pool || !t->first || !t->last || !t->seen)
        return -ENOMEM;
    t->control = control;
    t->generation = generation;
    t->ring = ring;
    return 0;
}

/* What is to be traced has changed. */
void trace_switch(struct connmgr *cm, uint64_t word)
{
    struct trace *t = &cm->trace;

    if (word >> 32 != t->word >> 32) /* another recording has no subjects yet */
        memset(t->seen, 0, (size_t)TRACE_SEEN * 8);
    t->word = word;
    t->on = (uint32_t)word;
    cm->port.refs.trace_tag = t->on ? batch_trace_tag(t->generation, 0) : 0;
    t->round_from = cm->stats.messages_in;
}

/* The references so far are a round: how many messages goes into the batch that ends it. */
void trace_round(struct connmgr *cm)
{
    struct trace *t = &cm->trace;
    uint64_t messages = cm->stats.messages_in - t->round_from;

    cm->now_ns = clock_ns();
    t->round_from = cm->stats.messages_in;
    cm->port.refs.trace_tag = batch_trace_tag(t->generation, (uint32_t)messages);
}

void trace_batch(struct connmgr *cm, const struct batch *b)
{
    struct trace *t = &cm->trace;

    t->batch_first = t->contexts_made + 1;
    t->salt = 0;
    t->batch_bytes = b->bytes;
    t->instructed_ns = b->closed_ns;
}

void trace_mark(struct connmgr *cm, const struct order_trace *m)
{
    struct trace *t = &cm->trace;

    if (m->source >= PORTS_MAX)
        return;
    uint32_t number = ++t->contexts_made;

    t->about[m->source] = number;
    t->contexts[number % TRACE_CONTEXTS] = (struct trace_context){
        .number = number,
        .recording = (uint32_t)(t->word >> 32),
        .queued_ns = m->queued_ns,
        .routed_ns = m->routed_ns,
        .instructed_ns = t->instructed_ns,
        .bytes = m->bytes,
        .order_bytes = t->batch_bytes,
        .round_messages = m->round_messages,
        .source_generation = m->source_generation,
        .router_generation = m->router_generation,
    };
}

/* All that the way to the router and back took is nothing, and no router had to do with it. */
void trace_flow(struct connmgr *cm, uint32_t messages)
{
    struct trace *t = &cm->trace;
    uint64_t now = clock_ns();
    uint32_t number = t->batch_first = ++t->contexts_made;

    t->salt = (cm->stats.repeated + 1) * HASH_SPREAD;
    t->about[cm->conf.index] = number;
    t->contexts[number % TRACE_CONTEXTS] = (struct trace_context){
        .number = number,
        .recording = (uint32_t)(t->word >> 32),
        .queued_ns = now,
        .routed_ns = now,
        .instructed_ns = now,
        .round_messages = messages,
        .source_generation = t->generation,
    };
}

/* Every connmgr comes to the same answer about a message. */
static int sampled(uint64_t handle, uint32_t every)
{
    uint64_t mixed = (handle ^ handle >> 29) * HASH_SPREAD;

    return every == 1 || ((mixed >> 32) * every) >> 32 == 0;
}

/* Whether a record that is begun now will find its place in the ring. One that would not is not
 * begun: what nobody will read should cost nothing. */
static int find_room(struct trace *t)
{
    if (t->room)
        return 1;
    const struct trace_tail *tail = &t->control->tails[t->ring->index];
    uint64_t used = atomic_load_explicit(&t->ring->head, memory_order_relaxed) + t->flights;

    if (atomic_load_explicit(&tail->epoch, memory_order_acquire) == t->ring->epoch)
        used -= atomic_load_explicit(&tail->records, memory_order_acquire);
    t->room = used < t->ring->capacity ? (uint32_t)(t->ring->capacity - used) : 0;
    return t->room != 0;
}

/* Messages in a row usually have the same subject. */
static uint64_t hash_of(struct trace *t, const uint8_t *subject, uint32_t len)
{
    if (len == t->last_len && memcmp(t->last_subject, subject, len) == 0)
        return t->last_hash;
    uint64_t hash = index_hash((const char *)subject, len);

    if (len <= sizeof t->last_subject) {
        memcpy(t->last_subject, subject, len);
        t->last_len = len;
        t->last_hash = hash;
    }
    return hash;
}

static void write_subject(struct connmgr *cm, uint64_t hash, const uint8_t *subject, uint32_t len)
{
    struct trace *t = &cm->trace;
    uint64_t head = atomic_load_explicit(&t->ring->subjects_head, memory_order_relaxed);

    if (head - t->subjects_tail >= TRACE_SUBJECTS) {
        const struct trace_tail *tail = &t->control->tails[t->ring->index];

        if (atomic_load_explicit(&tail->epoch, memory_order_acquire) == t->ring->epoch)
            t->subjects_tail = atomic_load_explicit(&tail->subjects, memory_order_acquire);
        if (head - t->subjects_tail >= TRACE_SUBJECTS)
            return;
    }
    struct trace_subject *s = &trace_subjects(t->ring)[head % TRACE_SUBJECTS];

    s->hash = hash;
    s->len = len;
    memcpy(s->text, subject, len < TRACE_SUBJECT_MAX ? len : TRACE_SUBJECT_MAX);
    atomic_store_explicit(&t->ring->subjects_head, head + 1, memory_order_release);
    t->seen[hash % TRACE_SEEN] = hash;
}

/* When the client says it meant to send the message; 0 if it does not. */
static uint64_t intended(const struct protocol *protocol, const uint8_t *head, uint32_t len)
{
    static const char name[] = TRACE_HEADER;
    const uint8_t *end = head + len;
    struct field f;
    uint64_t value = 0;

    do
        head = protocol->next_field(head, end, name, sizeof name - 1, &f);
    while (head && f.name_len != sizeof name - 1);
    for (uint32_t i = 0; head && i < f.value_len && f.value[i] >= '0' && f.value[i] <= '9'; i++)
        value = value * 10 + (uint64_t)(f.value[i] - '0');
    return value;
}

static struct trace_flight *take_flight(struct trace *t)
{
    if (t->pool_free) {
        struct trace_flight *f = &t->pool[t->pool_free - 1];

        t->pool_free = f->next;
        return f;
    }
    return t->pool_used < TRACE_FLIGHTS ? &t->pool[t->pool_used++] : NULL;
}

static void free_flight(struct trace *t, struct trace_flight *f)
{
    f->next = t->pool_free;
    t->pool_free = (uint32_t)(f - t->pool) + 1;
}

static void begin(struct connmgr *cm, const struct conn *c, const struct trace_part *part, uint32_t about)
{
    struct trace *t = &cm->trace;
    uint64_t number = t->ring->sequence;
    struct trace_flight *f = find_room(t) ? take_flight(t) : NULL;
    uint32_t count = !f ? 0 : part->count < t->room ? part->count : t->room;

    t->ring->sequence += part->count;
    t->ring->dropped += part->count - count;
    if (!f)
        return;
    struct arena *a = cm->port.arenas[handle_source(part->handle)];
    const struct arena_entry *e = &arena_entries(a)[handle_entry(part->handle)];
    const uint8_t *data = arena_data(a, e->chunk), *subject = data + e->subject;
    uint64_t hash = hash_of(t, subject, e->subject_len);
    uint32_t searched = e->header_len < TRACE_HEADER_SEARCHED ? e->header_len : TRACE_HEADER_SEARCHED;

    if (e->body + searched > ARENA_CHUNK_BYTES) /* goes on in another chunk */
        searched = e->body < ARENA_CHUNK_BYTES ? ARENA_CHUNK_BYTES - e->body : 0;
    if (t->seen[hash % TRACE_SEEN] != hash)
        write_subject(cm, hash, subject, e->subject_len);
    *f = (struct trace_flight){
        .end = part->end,
        .message = part->handle,
        .source_uid = cm->table->slots[e->conn].uid,
        .subject_hash = hash,
        .intended_ns = searched ? intended(protocols[e->protocol], data + e->body, searched) : 0,
        .received_ns = e->received_ns,
        .sequence = (uint32_t)number,
        .context = about,
        .body_size = e->total_len,
        .count = count,
        .bytes = part->bytes,
    };
    uint32_t at = (uint32_t)(f - t->pool) + 1;

    if (t->first[c->slot])
        t->pool[t->last[c->slot] - 1].next = at;
    else
        t->first[c->slot] = at;
    t->last[c->slot] = at;
    t->flights += count;
    t->room -= count;
}

/* The messages were appended to the output of the connection. */
void trace_deliver(struct connmgr *cm, const struct conn *c, struct trace_part part)
{
    struct trace *t = &cm->trace;
    uint32_t about = t->about[handle_source(part.handle)], left = part.count;

    if (about - t->batch_first >= t->contexts_made + 1 - t->batch_first) { /* of an earlier batch */
        for (; left; left--, part.handle++)
            t->ring->unmarked += (uint64_t)sampled(part.handle ^ t->salt, t->on);
        return;
    }
    if (t->on == 1) {
        begin(cm, c, &part, about);
        return;
    }
    for (part.count = 1; left; left--, part.handle++, part.end += part.bytes)
        if (sampled(part.handle ^ t->salt, t->on))
            begin(cm, c, &part, about);
}

/* Non-temporal stores: this process does not read records again, and cached lines are needed for
 * messages. */
static inline void store_record(struct trace_record *to, const struct trace_record *from)
{
#ifdef __SSE2__
    for (int i = 0; i < 8; i++)
        _mm_stream_si128((__m128i *)to + i, _mm_load_si128((const __m128i *)from + i));
#else
    *to = *from;
#endif
}

static inline void publish(struct trace_ring *r, uint64_t head)
{
#ifdef __SSE2__
    _mm_sfence(); /* such stores are not ordered by the release below */
#endif
    atomic_store_explicit(&r->head, head, memory_order_release);
}

/* Writes the first `count` of the flight, numbered from `head`. Returns how many: it may be too late. */
static uint32_t write_records(struct connmgr *cm, const struct conn *c, const struct trace_flight *f,
                              uint32_t count, uint64_t head, uint64_t now)
{
    struct trace *t = &cm->trace;
    const struct trace_context *about = &t->contexts[f->context % TRACE_CONTEXTS];

    if (about->number != f->context) { /* it waited too long */
        t->ring->dropped += count;
        return 0;
    }
    _Alignas(64) struct trace_record made = {
        .sequence = t->ring->sequence - ((uint32_t)t->ring->sequence - f->sequence),
        .message = f->message,
        .source_uid = f->source_uid,
        .destination_uid = c->uid,
        .subject_hash = f->subject_hash,
        .intended_ns = f->intended_ns,
        .received_ns = f->received_ns,
        .queued_ns = about->queued_ns,
        .routed_ns = about->routed_ns,
        .instructed_ns = about->instructed_ns,
        .written_ns = now,
        .recording = about->recording,
        .body_size = f->body_size,
        .round_messages = about->round_messages,
        .source_generation = about->source_generation,
        .router_generation = about->router_generation,
        .destination_generation = t->generation,
        .ref_batch_bytes = (uint16_t)about->bytes,
        .order_batch_bytes = (uint16_t)about->order_bytes,
    };
    for (uint32_t i = 0; i < count; i++) {
        store_record(&trace_records(t->ring)[(head + i) & (t->ring->capacity - 1)], &made);
        made.sequence++;
        made.message++;
    }
    return count;
}

/* The kernel has taken bytes of the connection, up to c->sent. */
void trace_sent(struct connmgr *cm, const struct conn *c)
{
    struct trace *t = &cm->trace;
    uint32_t *first = &t->first[c->slot];

    if (!*first || t->pool[*first - 1].end > c->sent)
        return;
    uint64_t now = clock_ns();
    uint64_t head = atomic_load_explicit(&t->ring->head, memory_order_relaxed);

    while (*first && t->pool[*first - 1].end <= c->sent) {
        struct trace_flight *f = &t->pool[*first - 1];
        uint32_t count = f->count;

        if (count > 1 && (c->sent - f->end) / f->bytes + 1 < count)
            count = (uint32_t)((c->sent - f->end) / f->bytes) + 1;
        head += write_records(cm, c, f, count, head, now);
        t->flights -= count;
        if (count == f->count) {
            *first = f->next;
            free_flight(t, f);
            continue;
        }
        f->end += (uint64_t)count * f->bytes;
        f->message += count;
        f->sequence += count;
        f->count -= count;
    }
    publish(t->ring, head);
}

/* The connection is over: what it had not taken it never will. */
void trace_forget(struct connmgr *cm, const struct conn *c)
{
    struct trace *t = &cm->trace;

    while (t->first[c->slot]) {
        struct trace_flight *f = &t->pool[t->first[c->slot] - 1];

        t->first[c->slot] = f->next;
        t->ring->undelivered += f->count;
        t->flights -= f->count;
        free_flight(t, f);
    }
}
