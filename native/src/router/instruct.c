/* instruct: orders, one function for each kind. See instruct.h. */
#include "router/instruct.h"

struct order *instruct_deliver(struct router *rt, uint32_t port, uint32_t recipients, uint64_t handle)
{
    struct order_deliver *o = instruct_append(rt, port, order_deliver_bytes(recipients), 0);

    *o = (struct order_deliver){.type = ORDER_DELIVER, .recipients = (uint16_t)recipients, .handle = handle};
    return (struct order *)o;
}

struct order *instruct_run(struct router *rt, uint32_t port, uint32_t recipients, uint64_t first, uint32_t messages,
                           uint32_t load)
{
    struct order_run *o = instruct_append(rt, port, order_run_bytes(recipients), load);

    *o = (struct order_run){.type = ORDER_RUN, .recipients = (uint16_t)recipients, .messages = messages, .first = first};
    return (struct order *)o;
}

void instruct_delete(struct router *rt, uint32_t port, uint64_t first, uint32_t messages)
{
    *(struct order_delete *)instruct_append(rt, port, sizeof(struct order_delete), 0) =
        (struct order_delete){.type = ORDER_DELETE, .limit = 1, .messages = (uint16_t)messages, .first = first};
}

void instruct_no_responders(struct router *rt, uint32_t port, uint32_t sub, uint64_t handle)
{
    *(struct order_no_responders *)instruct_append(rt, port, sizeof(struct order_no_responders), 0) =
        (struct order_no_responders){.type = ORDER_NO_RESPONDERS, .limit = 1, .one = 1, .sub = sub, .handle = handle};
}

struct order *instruct_mode(struct router *rt, uint32_t port, uint32_t sub, uint64_t handle, const struct instruct_as *as)
{
    uint32_t rest = ORDER_MODE_REST + as->subject_len + as->reply_len;
    struct order_mode *o = instruct_append(rt, port, ORDER_BYTES_MIN + batch_pad(rest), 0);

    *o = (struct order_mode){.type = ORDER_MODE, .limit = 1, .rest = (uint16_t)rest, .sub = sub, .handle = handle,
                             .deadline_ns = as->deadline_ns, .subject_len = (uint16_t)as->subject_len,
                             .reply_len = (uint16_t)as->reply_len};
    memcpy(mempcpy(o->text, as->subject, as->subject_len), as->reply, as->reply_len);
    return (struct order *)o;
}

struct order *instruct_topic(struct router *rt, uint32_t port, uint32_t recipients, uint64_t handle, const char *subject,
                             uint32_t subject_len)
{
    struct order_topic *o = instruct_append(rt, port, order_topic_bytes(recipients, subject_len), 0);

    *o = (struct order_topic){.type = ORDER_TOPIC, .recipients = (uint16_t)recipients, .subject_len = subject_len,
                              .handle = handle};
    memcpy((char *)order_topic_subject(o), subject, subject_len);
    return (struct order *)o;
}

void instruct_conn(struct router *rt, uint32_t port, enum order_type type, uint32_t conn, uint64_t uid)
{
    *(struct order_conn *)instruct_append(rt, port, sizeof(struct order_conn), 0) =
        (struct order_conn){.type = (uint8_t)type, .conn = conn, .uid = uid};
}

void instruct_passed(struct router *rt, uint32_t port, const struct ref_ping *r)
{
    *(struct order_conn *)instruct_append(rt, port, sizeof(struct order_conn), 0) =
        (struct order_conn){.type = ORDER_PASSED, .settle = r->settle, .conn = r->conn, .uid = r->uid};
}

void instruct_sub(struct router *rt, uint32_t port, enum order_type type, uint32_t conn, uint64_t sub)
{
    *(struct order_sub *)instruct_append(rt, port, sizeof(struct order_sub), 0) =
        (struct order_sub){.type = (uint8_t)type, .conn = conn, .sub = sub};
}

void instruct_name_asked(struct router *rt, uint32_t port, uint32_t holder, uint64_t holder_uid, uint32_t from,
                         const struct ref_ready *r)
{
    *(struct order_name *)instruct_append(rt, port, sizeof(struct order_name), 0) =
        (struct order_name){.type = ORDER_NAME_ASKED, .asker_port = (uint16_t)from, .conn = holder, .uid = holder_uid,
                            .asker_uid = r->uid, .asker = r->conn};
}

void instruct_hold(struct router *rt, uint32_t port, const struct ref_hold *r)
{
    *(struct order_hold *)instruct_append(rt, port, sizeof(struct order_hold), 0) =
        (struct order_hold){.type = ORDER_HOLD, .publisher = r->publisher, .consumer_uid = r->uid, .consumer = r->conn};
}

void instruct_wait(struct router *rt, uint32_t port, enum order_type type, uint32_t conn, uint32_t ports)
{
    *(struct order_wait *)instruct_append(rt, port, sizeof(struct order_wait), 0) =
        (struct order_wait){.type = (uint8_t)type, .conn = conn, .ports = ports};
}

void instruct_status(struct router *rt, uint32_t port, const uint32_t *slots, uint32_t count,
                     const struct order_said *head, const char *subject, const char *reply,
                     const char *fields, const char *body)
{
    uint32_t written = (uint32_t)sizeof(*head) + head->subject_len + head->reply_len + head->fields_len + head->body_len;
    struct order_text *o = instruct_append(rt, port, ORDER_BYTES_MIN + batch_pad(count * 4) + batch_pad(written), 0);

    *o = (struct order_text){.type = ORDER_STATUS, .recipients = (uint16_t)count, .written = written};
    memcpy(o->subs, slots, (size_t)count * 4);
    struct order_said *t = (struct order_said *)order_said(o);
    char *to = t->text;

    *t = *head;
    to = mempcpy(to, subject, head->subject_len);
    to = mempcpy(to, reply, head->reply_len);
    to = mempcpy(to, fields, head->fields_len);
    memcpy(to, body, head->body_len);
}

void instruct_trace(struct router *rt, struct batch_out *o)
{
    *(struct order_trace *)batch_out_append(o, sizeof(struct order_trace), rt->now_ns) = rt->mark;
}
