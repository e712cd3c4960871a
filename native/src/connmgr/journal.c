/* journal: layout of a connmgr's primary state. See journal.h. */
#include "connmgr/journal.h"

static uint64_t subs_at(uint32_t conns)
{
    return page_up(sizeof(struct journal)) + page_up((uint64_t)conns * sizeof(struct conn_rec));
}
static uint64_t segs_at(uint32_t conns, uint32_t subs)
{
    return subs_at(conns) + page_up((uint64_t)subs * sizeof(struct sub_rec));
}
static uint64_t blocks_at(uint32_t conns, uint32_t subs, uint32_t blocks)
{
    return segs_at(conns, subs) +
           page_up((uint64_t)blocks * JOURNAL_SEGS_PER_BLOCK * sizeof(struct out_seg));
}

uint64_t journal_bytes(uint32_t conns, uint32_t subs, uint32_t blocks)
{
    return blocks_at(conns, subs, blocks) + (uint64_t)blocks * JOURNAL_BLOCK_BYTES;
}

uint64_t journal_hot_bytes(void) { return page_up(sizeof(struct journal)); }

/* With the format of batches: some may lie in the ring, or in the queue between two of them. */
uint64_t journal_fingerprint(void)
{
    return SEGMENT_FINGERPRINT(sizeof(struct journal), sizeof(struct conn_rec), sizeof(struct sub_rec), sizeof(struct out_seg),
                               JOURNAL_BLOCK_BYTES, BATCH_VERSION);
}

void journal_format(struct journal *j, uint32_t index, uint32_t conns, uint32_t subs, uint32_t blocks)
{
    j->conns = conns;
    j->subs = subs;
    j->blocks = blocks;
    j->conns_at = page_up(sizeof(struct journal));
    j->subs_at = subs_at(conns);
    j->segs_at = segs_at(conns, subs);
    j->blocks_at = blocks_at(conns, subs, blocks);
    port_format(&j->port, index, PORT_CONNMGR);
    segment_format(j, SEGMENT_JOURNAL, JOURNAL_LAYOUT, journal_fingerprint(),
                   journal_bytes(conns, subs, blocks));
}
