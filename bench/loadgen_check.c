/*
 * Loss, duplication and reordering, for each pair of publisher and subscriber.
 *
 * A pair knows one past the highest sequence it has seen and a list of gaps: sequences that were
 * passed over. In a correct run the list stays empty and a message costs one comparison. A sequence
 * below `next` is late (it fills a gap: reordered) or it was seen before (duplicated). What is still in
 * a gap at the end, or was never reached, is lost.
 *
 * Created by check_init(), written by the mode that receives. Invariants: gaps are ascending,
 * disjoint, not empty and below `next`. A crash leaves nothing.
 *
 * Bodies below 16 bytes carry no sequence: then only the number of messages is checked.
 */
#include <stdlib.h>
#include <string.h>

#include "loadgen.h"

void check_init(struct check *k, uint32_t publishers, uint32_t subscribers, uint32_t size,
                uint64_t limit)
{
    memset(k, 0, sizeof *k);
    k->publishers = publishers;
    k->subscribers = subscribers;
    k->size = size;
    k->sequenced = size >= sizeof(struct body_head);
    k->limit = limit;
    k->pairs = allocate((size_t)publishers * subscribers, sizeof *k->pairs);
}

/* Makes room for one more gap at `at`; only a misbehaving server makes this list grow. */
static struct gap *gap_insert(struct pair *pair, size_t at)
{
    if (pair->gap_count == pair->gap_cap) {
        size_t cap = pair->gap_cap ? pair->gap_cap * 2 : 16;
        struct gap *gaps = realloc(pair->gaps, cap * sizeof *gaps);
        if (!gaps)
            fail(EXIT_CHECKS, "too many gaps to remember (%zu)", pair->gap_count);
        pair->gaps = gaps;
        pair->gap_cap = cap;
    }
    memmove(pair->gaps + at + 1, pair->gaps + at, (pair->gap_count - at) * sizeof *pair->gaps);
    pair->gap_count++;
    return &pair->gaps[at];
}

/* Takes a sequence out of its gap; returns false if it is in none, so it was seen before. */
static bool gap_fill(struct pair *pair, uint64_t sequence)
{
    size_t low = 0, high = pair->gap_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (pair->gaps[middle].end <= sequence)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == pair->gap_count || pair->gaps[low].first > sequence)
        return false;
    struct gap old = pair->gaps[low];
    if (old.first == sequence && old.end == sequence + 1) {
        pair->gap_count--;
        memmove(pair->gaps + low, pair->gaps + low + 1, (pair->gap_count - low) * sizeof old);
    } else if (old.first == sequence) {
        pair->gaps[low].first++;
    } else if (old.end == sequence + 1) {
        pair->gaps[low].end--;
    } else {
        *gap_insert(pair, low) = (struct gap){old.first, sequence};
        pair->gaps[low + 1].first = sequence + 1;
    }
    return true;
}

/* A sequence that is not the next one. Returns true if it is seen for the first time. */
bool check_unexpected(struct check *k, struct pair *pair, uint64_t sequence)
{
    uint64_t next = pair->next;
    if (sequence >= k->limit) {
        k->corrupt++;
        return false;
    }
    if (sequence > next) {
        *gap_insert(pair, pair->gap_count) = (struct gap){next, sequence};
        pair->next = sequence + 1;
        return true;
    }
    if (gap_fill(pair, sequence)) {
        k->reordered++;
        return true;
    }
    k->duplicated++;
    return false;
}

/* A message with that number; returns true if it is seen for the first time. */
bool check_sequence(struct check *k, struct pair *pair, uint64_t sequence)
{
    if (sequence == pair->next)
        pair->next++;
    else if (!check_unexpected(k, pair, sequence))
        return false;
    k->fresh++;
    return true;
}

/* At the end: how many of `sent` messages are lost. */
uint64_t pair_lost(const struct pair *pair, uint64_t sent)
{
    uint64_t lost = sent > pair->next ? sent - pair->next : 0;
    for (size_t i = 0; i < pair->gap_count; i++)
        lost += pair->gaps[i].end - pair->gaps[i].first;
    return lost;
}

/* At the end, once for each pair: returns how many of `sent` messages are lost. Without sequences a
 * number above `sent` is all that is seen of duplicates. */
uint64_t check_settle(struct check *k, uint32_t subscriber, uint32_t publisher, uint64_t sent)
{
    const struct pair *pair = &k->pairs[(size_t)subscriber * k->publishers + publisher];
    if (!k->sequenced && pair->next > sent)
        k->duplicated += pair->next - sent;
    return pair_lost(pair, sent);
}

/* Writes the verdict; returns true if nothing is wrong. */
bool check_report(struct check *k, uint64_t lost)
{
    bool good = lost + k->duplicated + k->reordered + k->misrouted + k->corrupt == 0;
    report_text("checks", k->sequenced ? (k->fill ? "order and content" : "order") : "count only");
    report_count("lost", lost);
    report_count("duplicated", k->duplicated);
    report_count("reordered", k->reordered);
    report_count("misrouted", k->misrouted);
    report_count("corrupt", k->corrupt);
    report_text("verdict", good ? "ok" : "failed");
    return good;
}
