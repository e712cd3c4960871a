/* replies: what a connmgr says to a client of its own accord, in the words of the client's protocol.
 *
 * The structure: none of its own. Bytes go behind what the connection's output already holds.
 * Written by:   the connmgr, past committed ends: they are the client's with the step that commits.
 */
#include "connmgr/connmgr.h"
#include "base/put.h"

_Static_assert(CONNMGR_TEXT_MAX + PROTOCOL_REPLY_MORE < JOURNAL_BLOCK_BYTES, "a reply is written in one piece");

void reply_text(struct connmgr *cm, struct conn *c, enum reply reply, const char *text, uint32_t len)
{
    uint8_t *at = output_reserve(cm, c, len + PROTOCOL_REPLY_MORE);
    uint8_t *to = c->protocol->put_reply(at, reply, text, len);

    c->write_at = to;
    c->end += (uint64_t)(to - at);
}

void reply_say(struct connmgr *cm, struct conn *c, enum reply reply) { reply_text(cm, c, reply, "", 0); }

void reply_refuse(struct connmgr *cm, struct conn *c, int refusal)
{
    const char *text = c->protocol->text(refusal);

    if (refusal < REFUSALS)
        cm->stats.refused[refusal]++;
    reply_text(cm, c, REPLY_ERROR, text, (uint32_t)strlen(text));
}

/* The template of its listener, with what differs from client to client filled in. */
void reply_greet(struct connmgr *cm, struct conn *c)
{
    const struct conntable_slot *t = &cm->table->slots[c->slot];
    const char *from = cm->conf.greeting[t->listener % CONNMGR_LISTENERS_MAX];
    uint8_t text[CONNMGR_GREETING_MAX * 2 + 64], *to = text;
    int filled = 0;

    for (; *from; from++) {
        if (*from == GREETING_CLIENT_ID && !(filled & 1)) {
            to = put_number(to, c->uid);
            filled |= 1;
        } else if (*from == GREETING_CLIENT_IP && !(filled & 2)) {
            to = put_text(to, t->ip, (uint32_t)strnlen(t->ip, sizeof t->ip));
            filled |= 2;
        } else {
            *to++ = (uint8_t)*from;
        }
    }
    output_append(cm, c, text, (uint32_t)(to - text));
}
