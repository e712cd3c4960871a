/* port: opening, the crash-safe core of a batch of orders, letting go. See port.h. */
#include "shm/port.h"

#include "base/crash.h"
#include "base/reserve.h"

#include <errno.h>

void port_format(struct port_log *log, uint32_t index, uint32_t kind)
{
    log->index = index;
    log->kind = kind;
    batch_ring_format(&log->refs);
}

uint64_t port_hot_bytes(void) { return page_up(sizeof(struct port_log)); }
uint64_t port_bytes(uint64_t own) { return port_hot_bytes() + page_up(own); }
uint64_t port_fingerprint(void) { return SEGMENT_FINGERPRINT(sizeof(struct port_log), BATCH_VERSION); }

void port_segment_format(struct port_log *log, uint32_t index, uint64_t own)
{
    port_format(log, index, PORT_ALONE);
    segment_format(log, SEGMENT_PORT, PORT_LAYOUT, port_fingerprint(), port_bytes(own));
}

int port_open(struct port *p, struct port_log *log, int refs_queue, int orders_queue)
{
    p->log = log;
    p->index = log->index;
    p->my_bit = ledger_bit(log->index);
    p->orders = orders_queue;
    p->redo.log = &log->redo;
    p->redo.base = (char *)log;
    batch_out_open(&p->refs, &log->refs, refs_queue, (uint8_t)log->index);
    p->let_go = reserve(BATCH_BYTES / ORDER_BYTES_MIN * sizeof(struct let_go));
    return p->let_go ? 0 : -ENOMEM;
}

int port_add_arena(struct port *p, uint32_t index, struct arena *arena)
{
    p->arenas[index] = arena;
    p->needed[index] = reserve((uint64_t)arena->chunk_count * ARENA_CHUNK_MESSAGES * 4);
    if (!p->needed[index])
        return -ENOMEM;
    if (index != p->index)
        return 0;
    p->redo.arena = (char *)arena;
    return arena_pool_open(&p->pool, arena);
}

uint32_t port_recover(struct port *p, uint64_t *ret_batches)
{
    struct port_log *log = p->log;
    uint32_t words = redo_recover(&p->redo);

    memcpy(p->open_handle, log->open_handle, sizeof p->open_handle);
    *ret_batches = (uint64_t)port_has_batch(p) + batch_unsent(&log->refs);
    batch_out_open(&p->refs, &log->refs, p->refs.queue, (uint8_t)p->index);
    return words;
}

/* ---- references ---- */

void port_refer_open(struct port *p, uint32_t conn, uint64_t uid, const char *ip, uint64_t now_ns)
{
    uint32_t len = (uint32_t)strlen(ip), bytes = ref_bytes(len);
    struct ref_open *r = batch_out_append(&p->refs, bytes, now_ns);

    *r = (struct ref_open){.type = REF_OPEN, .ip_len = (uint16_t)len, .bytes = (uint16_t)bytes, .conn = conn, .uid = uid};
    memcpy(r->ip, ip, len);
}

void port_refer_subscribe(struct port *p, uint32_t conn, uint64_t sub, const void *subject, uint32_t subject_len,
                          const void *queue, uint32_t queue_len, const void *sid, uint32_t sid_len, uint64_t now_ns)
{
    uint32_t bytes = ref_bytes(subject_len + queue_len + sid_len);
    struct ref_subscribe *r = batch_out_append(&p->refs, bytes, now_ns);

    *r = (struct ref_subscribe){.type = REF_SUBSCRIBE, .subject_len = (uint16_t)subject_len, .queue_len = (uint16_t)queue_len,
                                .bytes = (uint16_t)bytes, .conn = conn, .sid_len = (uint16_t)sid_len, .sub = sub};
    memcpy(r->text, subject, subject_len);
    if (queue_len)
        memcpy(r->text + subject_len, queue, queue_len);
    if (sid_len)
        memcpy(r->text + subject_len + queue_len, sid, sid_len);
}

void port_refer_unsubscribe(struct port *p, uint32_t conn, uint64_t sub, uint64_t max, uint64_t now_ns)
{
    struct ref_unsubscribe *r = batch_out_append(&p->refs, sizeof(*r), now_ns);

    *r = (struct ref_unsubscribe){.type = REF_UNSUBSCRIBE, .max_len = sizeof(r->max), .bytes = sizeof(*r), .conn = conn,
                                  .sub = sub, .max = max};
}

void port_refer_close(struct port *p, uint32_t conn, uint64_t uid, uint64_t now_ns)
{
    struct ref_close *r = batch_out_append(&p->refs, sizeof(*r), now_ns);

    *r = (struct ref_close){.type = REF_CLOSE, .bytes = sizeof(*r), .conn = conn, .uid = uid};
}

int port_refer_commit(struct port *p, uint64_t now_ns)
{
    batch_out_put(&p->refs, &p->redo);
    redo_commit(&p->redo);
    return batch_out_send(&p->refs, BATCH_FILLED, now_ns);
}

/* ---- orders ---- */

int port_receive(struct port *p)
{
    return port_has_batch(p) ? 1 : batch_in_receive(&p->log->inbox, p->orders, p->log->done);
}

/* The messages of a batch whose step was committed before a crash. */
static int note_all(struct port *p, const struct batch *b)
{
    for (uint32_t at = BATCH_HEAD; at < b->bytes;) {
        const struct order *o = batch_order(b, at);

        at += order_bytes(o);
        if (at > b->bytes)
            return -EBADMSG;
        if (order_has_message(o) && !(o->type & ORDER_MORE))
            port_note(p, o);
    }
    return 0;
}

/* Lets go of the messages of the committed batch, but for those that are still needed: port_release(). */
static void let_go_all(struct port *p, int redo)
{
    for (uint32_t i = 0; i < p->let_go_count; i++) {
        const struct let_go *l = &p->let_go[i];
        uint32_t source = handle_source(l->handle);
        const uint32_t *needed = port_needed(p, l->handle);
        struct arena_pool *pool = source == p->index ? &p->pool : NULL;

        uint64_t handle = l->handle, end = handle + l->count;

        do {
            uint64_t add = l->limit | (*needed++ ? 0 : p->my_bit);

            if (add)
                (void)arena_relinquish(p->arenas[source], pool, handle, add, redo);
        } while (++handle != end);
        if (i == p->let_go_count / 2)
            CRASH(ORDERS_RELINQUISHING);
    }
    p->let_go_count = 0;
}

int port_process(struct port *p, const struct port_owner *with, void *owner)
{
    struct port_log *log = p->log;
    const struct batch *b = &log->inbox.batch;
    int redo = log->applied == b->seq; /* committed before a crash */
    int err = redo ? note_all(p, b) : with->apply(owner, b);

    if (err)
        return err;
    if (!redo) {
        CRASH(ORDERS_APPLIED);
        redo_put(&p->redo, &log->applied, b->seq);
        redo_commit(&p->redo);
        CRASH(ORDERS_COMMITTED);
        with->committed(owner, b);
    }
    let_go_all(p, redo);
    CRASH(ORDERS_RELINQUISHED);
    with->finish(owner, b, redo);
    log->done = b->seq; /* "orders.done" */
    CRASH(ORDERS_DONE);
    return 0;
}

int port_next(struct port *p, const struct batch *b, uint32_t *at, struct port_delivery *ret)
{
    while (*at < b->bytes) {
        const struct order *o = batch_order(b, *at);
        uint8_t type = o->type & (uint8_t)~ORDER_MORE;

        *at += order_bytes(o);
        if (*at > b->bytes)
            return -EBADMSG;
        if (type != ORDER_DELIVER && type != ORDER_RUN && type != ORDER_MODE && type != ORDER_TOPIC) {
            if (order_has_message(o))
                port_note(p, o);
            continue;
        }
        port_delivered(p, o);
        *ret = (struct port_delivery){.first = order_handle(o), .messages = order_messages(o), .recipients = 1,
                                      .subs = &((const struct order_mode *)o)->sub};
        if (type == ORDER_TOPIC) {
            ret->recipients = order_recipients(o);
            ret->subs = ((const struct order_topic *)o)->subs;
        } else if (type != ORDER_MODE) {
            ret->recipients = order_recipients(o);
            ret->subs = order_subs(o);
        }
        if (ret->recipients) /* the end of a list that was ordered in pieces has none */
            return 1;
    }
    return 0;
}

/* ---- bodies ---- */

void port_describe(const struct port *p, uint64_t handle, struct port_message *ret)
{
    const struct arena_entry *e = port_entry(p, handle);
    const uint8_t *data = arena_data(p->arenas[handle_source(handle)], e->chunk);

    *ret = (struct port_message){.subject = (const char *)data + e->subject, .subject_len = e->subject_len,
                                 .header_len = e->header_len, .total_len = e->total_len, .conn = e->conn};
}

void port_read(const struct port *p, uint64_t handle, uint32_t at, void *to, uint32_t len)
{
    struct arena *a = p->arenas[handle_source(handle)];
    const struct arena_entry *e = port_entry(p, handle);
    uint32_t chunk = e->chunk;
    uint8_t *end = to;

    for (at += e->body; at >= ARENA_CHUNK_BYTES; at -= ARENA_CHUNK_BYTES)
        chunk = a->chunks[chunk].next - 1;
    while (len) {
        uint32_t part = ARENA_CHUNK_BYTES - at < len ? ARENA_CHUNK_BYTES - at : len;

        memcpy(end, arena_data(a, chunk) + at, part);
        end += part;
        len -= part;
        at = 0;
        if (len)
            chunk = a->chunks[chunk].next - 1;
    }
}

void port_own_alone(struct port *p, uint32_t first, uint32_t count)
{
    ledger_word *words = &arena_words(p->pool.arena)[first];

    for (uint32_t n = 0; n < count; n++)
        (void)ledger_or_own(&words[n], ledger_limit(1));
}
