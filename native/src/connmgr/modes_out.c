/* modes_out: what the router orders for the modes becomes bytes for clients (docs/modes.md).
 *
 * The structure: none of its own. ORDER_MODE is a delivery with another subject or reply than was
 *               published, ORDER_TOPIC one with another subject to several, ORDER_STATUS a message of the
 *               router itself.
 * Written by:   the connmgr, past committed lengths, within the step of a batch of orders (J5).
 * Invariants:   those of orders.c. A request past its deadline is not delivered; the router, which
 *               has the same clock, tells the client that asked.
 * After a crash: the step is repeated, or was committed.
 */
#include "connmgr/connmgr.h"

void modes_deliver(struct connmgr *cm, const struct order_mode *o, uint32_t stamp)
{
    if (!o->deadline_ns || cm->now_ns < o->deadline_ns)
        deliver_as(cm, o->sub, o->handle,
                   &(struct deliver_texts){.subject = (const uint8_t *)o->text, .subject_len = o->subject_len,
                                           .reply = (const uint8_t *)o->text + o->subject_len, .reply_len = o->reply_len},
                   stamp);
}

void modes_topic(struct connmgr *cm, const struct order_topic *o, uint32_t stamp)
{
    struct deliver_texts texts = {.subject = (const uint8_t *)order_topic_subject(o), .subject_len = o->subject_len};

    for (uint32_t i = 0; i < o->recipients; i++)
        deliver_as(cm, o->subs[i], o->handle, &texts, stamp);
}

static const struct {
    uint32_t code;
    const char *text;
} statuses[STATUSES] = {
    [STATUS_NONE] = {0, ""},
    [STATUS_EXPECT] = {202, "Accepted"},
    [STATUS_END] = {204, "End"},
    [STATUS_BAD] = {400, "Bad Mode"},
    [STATUS_EXPIRED] = {408, "Expired"},
    [STATUS_SESSION_EXISTS] = {409, "Session Exists"},
    [STATUS_NO_SESSION] = {410, "No Session"},
    [STATUS_RESPONDER_GONE] = {410, "Responder Gone"},
    [STATUS_REQUESTER_GONE] = {410, "Requester Gone"},
    [STATUS_REPLY_TOO_LONG] = {413, "Reply Subject Too Long"},
    [STATUS_TOO_MANY_REQUESTS] = {429, "Too Many Requests"},
    [STATUS_TOO_MANY_LISTENERS] = {429, "Too Many Listeners"},
    [STATUS_NO_RESPONDERS] = {MODES_NO_RESPONDERS, ""},
};

static const char *const field_names[STATUS_FIELDS] = {
    [STATUS_FIELD_CLIENT] = "Midair-Client",
    [STATUS_FIELD_NAME] = "Midair-Name",
    [STATUS_FIELD_EXPECT] = "Midair-Expect",
};

static uint32_t read_fields(const uint8_t *at, const uint8_t *end, struct field *to)
{
    uint32_t count = 0;

    while (at + 2 <= end && at[0] && at[0] < STATUS_FIELDS && count < STATUS_FIELDS) {
        const char *name = field_names[at[0]];

        to[count++] = (struct field){.name = (const uint8_t *)name, .name_len = (uint32_t)strlen(name),
                                     .value = at + 2, .value_len = at[1]};
        at += 2 + at[1];
    }
    return count;
}

static void own_to_all(struct connmgr *cm, const struct order_text *o, const struct own *own, uint32_t stamp)
{
    for (uint32_t i = 0; i < o->recipients; i++)
        deliver_own(cm, o->subs[i], own, stamp);
}

void modes_status(struct connmgr *cm, const struct order_text *o, uint32_t stamp)
{
    const struct order_said *t = order_said(o);
    const uint8_t *subject = (const uint8_t *)t->text, *reply = subject + t->subject_len;
    const uint8_t *fields = reply + t->reply_len, *body = fields + t->fields_len;
    uint32_t status = t->status < STATUSES ? t->status : STATUS_NONE;
    struct field found[STATUS_FIELDS];

    own_to_all(cm, o, &(struct own){.head = {.subject = subject, .subject_len = t->subject_len, .reply = reply,
                                             .reply_len = t->reply_len},
                                    .body = body, .body_len = t->body_len, .code = statuses[status].code,
                                    .text = statuses[status].text, .fields = found,
                                    .field_count = read_fields(fields, body, found)}, stamp);
}

/* An order of a router of the release before: it wrote the headers itself. */
void modes_text(struct connmgr *cm, const struct order_text *o, uint32_t stamp)
{
    const struct order_written *t = order_written(o);
    const uint8_t *subject = (const uint8_t *)t->text, *reply = subject + t->subject_len;
    const uint8_t *raw = reply + t->reply_len;

    own_to_all(cm, o, &(struct own){.head = {.subject = subject, .subject_len = t->subject_len, .reply = reply,
                                             .reply_len = t->reply_len},
                                    .body = raw + t->header_len, .body_len = t->body_len, .raw = raw,
                                    .raw_len = t->header_len < OWN_HEADERS_MAX ? t->header_len : OWN_HEADERS_MAX},
               stamp);
}
