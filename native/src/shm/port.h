/* port: what takes part in the traffic under an index (0 to 31): the bit of a ledger word, a ring of
 * references, a ring of orders. Today every port is a connmgr.
 *
 * Written by:   the creator of a journal (`journal.kind`) and of the routing segment
 *               (`routing.ports`), once.
 */
#ifndef MIDAIR_PORT_H
#define MIDAIR_PORT_H

enum port_kind {
    PORT_CONNMGR = 0, /* clients on sockets */
};

#endif
