/* routing: layout of the router's primary state. See routing.h. */
#include "router/routing.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/random.h>
#include "base/crash.h"

uint64_t routing_hot_bytes(uint32_t ports)
{
    return page_up(sizeof(struct routing)) + page_up(ports * sizeof(struct routing_lane));
}

static uint64_t subs_at(uint32_t clients)
{
    return routing_hot_bytes(PORTS_MAX) + page_up((uint64_t)clients * sizeof(struct routing_client));
}

static uint64_t cells_at(uint32_t clients, uint32_t subs_each)
{
    return subs_at(clients) + page_up((uint64_t)PORTS_MAX * subs_each * sizeof(struct routing_sub));
}

static uint64_t requests_at(uint32_t clients, uint32_t subs_each)
{
    return cells_at(clients, subs_each) + ROUTING_CELLS * sizeof(struct routing_cell);
}

static uint64_t asides_at(uint32_t clients, uint32_t subs_each)
{
    return requests_at(clients, subs_each) + MODE_REQUESTS_MAX * sizeof(struct mode_request) +
           MODE_LEGS_MAX * sizeof(struct mode_leg) + page_up((uint64_t)clients * sizeof(struct mode_name));
}

uint64_t routing_bytes(uint32_t clients, uint32_t subs_each)
{
    return asides_at(clients, subs_each) + page_up(PORTS_MAX * sizeof(struct routing_aside));
}

/* With the format of batches, as in journal.c. */
uint64_t routing_fingerprint(void)
{
    return SEGMENT_FINGERPRINT(sizeof(struct routing), sizeof(struct routing_sub), sizeof(struct routing_client),
                               sizeof(struct routing_lane), sizeof(struct mode_request), sizeof(struct mode_leg),
                               sizeof(struct mode_name), sizeof(struct routing_aside), BATCH_VERSION);
}

static void make_key(void *key, size_t bytes)
{
    while (getrandom(key, bytes, 0) != (ssize_t)bytes)
        if (errno != EINTR)
            abort();
}

void routing_begin_lane(struct routing *r, uint32_t port, uint8_t life)
{
    struct routing_lane *lane = routing_lane(r, port);

    if (r->ports_high <= port)
        r->ports_high = port + 1;
    if (lane->orders.tail && r->lives[port] == life)
        return;
    for (uint32_t slot = 0; slot < r->subs_high[port]; slot++)
        routing_sub(r, port, slot)->word = 0;
    r->subs_high[port] = 0;
    memset(&r->in[port], 0, sizeof r->in[port]);
    lane->inbox.batch.seq = 0;
    atomic_store(&lane->orders.sent, 0);
    batch_ring_format(&lane->orders);
    CRASH(LANE_MADE);
    r->lives[port] = life; /* "lane.begun" */
    CRASH(LANE_BEGUN);
}

void routing_format(struct routing *r, uint32_t connmgrs, uint32_t others, uint32_t clients, uint32_t subs_each)
{
    make_key(r->reply_key, sizeof r->reply_key);
    r->ports = PORTS_MAX;
    r->clients = clients;
    r->subs_each = subs_each;
    r->cells = ROUTING_CELLS;
    r->lanes_at = page_up(sizeof(struct routing));
    r->clients_at = routing_hot_bytes(PORTS_MAX);
    r->subs_at = subs_at(clients);
    r->cells_at = cells_at(clients, subs_each);
    r->requests_at = requests_at(clients, subs_each);
    r->legs_at = r->requests_at + MODE_REQUESTS_MAX * sizeof(struct mode_request);
    r->names_at = r->legs_at + MODE_LEGS_MAX * sizeof(struct mode_leg);
    r->asides_at = asides_at(clients, subs_each);
    for (uint32_t i = 0; i < PORTS_MAX; i++) /* one that is added later is a connmgr */
        r->kinds[i] = i >= connmgrs && i < connmgrs + others ? PORT_ALONE : PORT_CONNMGR;
    r->ports_high = connmgrs + others;
    for (uint32_t i = 0; i < connmgrs + others; i++)
        batch_ring_format(&routing_lane(r, i)->orders);
    segment_format(r, SEGMENT_ROUTING, ROUTING_LAYOUT, routing_fingerprint(), routing_bytes(clients, subs_each));
}
