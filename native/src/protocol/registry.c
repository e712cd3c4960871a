/* registry: the protocols of this build, by number.
 *
 * A protocol is added by its folder and one line here. Numbers are in segments (arena_entry), so a
 * line keeps its place. A build for tests may have one more (native/meson_options.txt).
 */
#include "protocol/protocol.h"
#include "protocol/nats/nats.h"

#include <string.h>

#ifdef MIDAIR_TEST_PROTOCOL
extern const struct protocol MIDAIR_TEST_PROTOCOL;
#endif

const struct protocol *const protocols[] = {
    &protocol_nats,
#ifdef MIDAIR_TEST_PROTOCOL
    &MIDAIR_TEST_PROTOCOL,
#endif
};

uint32_t protocol_count(void) { return sizeof protocols / sizeof *protocols; }

const char *protocol_name(uint32_t protocol) { return protocols[protocol]->name; }

const char *protocol_text(uint32_t protocol, int refusal) { return protocols[protocol]->text(refusal); }

uint32_t protocol_error(uint32_t protocol, const char *text, uint32_t len, uint8_t *to, uint32_t room)
{
    if (room < len + PROTOCOL_REPLY_MORE)
        return 0;
    return (uint32_t)(protocols[protocol]->put_reply(to, REPLY_ERROR, text, len) - to);
}

int protocol_parse(uint32_t protocol, const uint8_t *buf, uint64_t len, const struct frame_limits *limits,
                   struct frame *ret_frame)
{
    struct frame frames[2] = {{0}};
    int status;
    uint32_t count = protocols[protocol]->parse(buf, len, limits, frames, 1, &status);

    *ret_frame = frames[0];
    return count ? 1 : status == 1 ? 0 : status; /* without a byte nothing is looked at */
}
