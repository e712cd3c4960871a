/* limits: bounds that several modules share, once. */
#ifndef MIDAIR_LIMITS_H
#define MIDAIR_LIMITS_H

/* Ports of an instance: what takes part in the traffic. A ledger word has a bit for each, the router a
 * lane, a trace control a tail. */
#define PORTS_MAX 32u

#endif
