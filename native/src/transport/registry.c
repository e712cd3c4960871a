/* registry: the transports of this build, by number; and plain, which has no envelopes.
 *
 * Numbers are in the records of connections, so a line keeps its place. A build for tests may have one
 * more (native/meson_options.txt).
 */
#include "transport/transport.h"

#ifdef MIDAIR_TEST_TRANSPORT
extern const struct transport MIDAIR_TEST_TRANSPORT;
#endif

const struct transport transport_plain = {.name = "plain"};

const struct transport *const transports[] = {
    &transport_plain,
#ifdef MIDAIR_TEST_TRANSPORT
    &MIDAIR_TEST_TRANSPORT,
#endif
};

uint32_t transport_count(void) { return sizeof transports / sizeof *transports; }

const char *transport_name(uint32_t transport) { return transports[transport]->name; }
