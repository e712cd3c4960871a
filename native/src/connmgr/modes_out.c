/* modes_out: what the router orders for the modes becomes bytes for clients (docs/modes.md).
 *
 * The structure: none of its own. ORDER_MODE is a delivery with another subject or reply than was
 *               published, ORDER_TEXT a message the router itself wrote, ORDER_NAME_TAKEN the end
 *               of a connection whose name is somebody else's.
 * Written by:   the connmgr, past committed lengths, within the step of a batch of orders (J5).
 * Invariants:   those of orders.c. A request past its deadline is not delivered; the router, which
 *               has the same clock, tells whoever asked.
 * After a crash: the step is repeated, or was committed.
 */
#include "connmgr/connmgr.h"
#include "base/put.h"

void modes_deliver(struct connmgr *cm, const struct order_mode *o, uint32_t stamp)
{
    if (!o->deadline_ns || cm->now_ns < o->deadline_ns)
        deliver_as(cm, o, stamp);
}

static void text_to(struct connmgr *cm, uint32_t sub, const struct order_written *t, uint32_t stamp)
{
    struct conn *c = deliver_recipient(cm, sub, stamp, 0);

    if (!c)
        return;
    int headers = t->header_len && c->options & CONN_HEADERS;

    if (!headers && !t->body_len)
        return; /* a status means nothing to a client without headers */
    const struct sub_rec *s = &cm->subs[sub];
    const char *reply = t->text + t->subject_len, *header = reply + t->reply_len;
    uint32_t most = 5 + t->subject_len + s->sid_len + t->reply_len + t->header_len + t->body_len + 32;
    uint8_t *at = output_reserve(cm, c, most), *to = at;

    to = put_text(to, headers ? "HMSG " : "MSG ", headers ? 5 : 4);
    to = put_text(to, t->text, t->subject_len);
    *to++ = ' ';
    to = put_text(to, s->sid, s->sid_len);
    *to++ = ' ';
    if (t->reply_len) {
        to = put_text(to, reply, t->reply_len);
        *to++ = ' ';
    }
    if (headers) {
        to = put_number(to, t->header_len);
        *to++ = ' ';
    }
    to = put_number(to, (headers ? t->header_len : 0u) + t->body_len);
    to = put_text(to, "\r\n", 2);
    if (headers)
        to = put_text(to, header, t->header_len);
    to = put_text(to, header + t->header_len, t->body_len);
    to = put_text(to, "\r\n", 2);
    c->write_at = to;
    c->end += (uint64_t)(to - at);
    cm->stats.messages_out++;
    c->messages_out++;
}

void modes_text(struct connmgr *cm, const struct order_text *o, uint32_t stamp)
{
    for (uint32_t i = 0; i < o->recipients; i++)
        text_to(cm, o->subs[i], order_written(o), stamp);
}

/* With the step of the batch: its PONG must not come before. */
void modes_name_taken(struct connmgr *cm, const struct order_conn *o)
{
    struct conn *c = &cm->conns[o->conn];

    if (c->uid == o->uid && c->served)
        conn_end(cm, c, CLOSE_NAME_TAKEN);
}
