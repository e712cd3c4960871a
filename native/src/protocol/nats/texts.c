/* texts: what a client is told between the quotes of -ERR '...', and the protocol as a whole. */
#include "protocol/nats/nats.h"

static const char *const texts[] = {
    [REFUSED_UNKNOWN_OP] = "Unknown Protocol Operation",
    [REFUSED_PARSER] = "Parser Error",
    [REFUSED_CONTROL_LINE] = "maximum control line exceeded",
    [REFUSED_PAYLOAD] = "Maximum Payload Violation",
    [REFUSED_SUBJECT] = "Invalid Subject",
    [REFUSED_SID] = "Invalid Subscription Identifier",
    [REFUSED_HEADERS] = "message headers not supported",
    [REFUSED_PUB_SUBJECT] = "Invalid Publish Subject",
    [REFUSED_STALE] = "Stale Connection",
    [REFUSED_SUBSCRIPTIONS] = "maximum subscriptions exceeded",
    [REFUSED_RATE] = "maximum rate exceeded",
    [REFUSED_SLOW] = "Slow Consumer",
    [REFUSED_NAME] = "Client Name Taken",
    [REFUSED_CONNECTIONS] = "maximum connections exceeded",
    [REFUSED_REPLACED] = "Connection Replaced",
};

const char *nats_text(int refusal)
{
    return refusal > 0 && (size_t)refusal < sizeof texts / sizeof *texts && texts[refusal] ? texts[refusal]
                                                                                         : texts[REFUSED_PARSER];
}

const struct protocol protocol_nats = {
    .name = "nats",
    .options = CONN_VERBOSE | CONN_PEDANTIC,
    .sid_max = PROTOCOL_SID_MAX,
    .usual_more = {5, 6}, /* "MSG " or "HMSG ", and the blank before the sid */
    .end = "\r\n",
    .end_len = 2,
    .parse = nats_parse,
    .next_field = nats_next_field,
    .put_run = nats_put_run,
    .put_message = nats_put_message,
    .put_status = nats_put_status,
    .put_field = nats_put_field,
    .put_reply = nats_put_reply,
    .text = nats_text,
};
