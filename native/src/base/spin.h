/* spin: looking again for a moment before sleeping.
 *
 * At low load a message spends its time in wake-ups: on virtual machines waking a process on
 * another core costs more than all the work. So a component that has just done a little looks
 * again for a while, giving its core away between two looks.
 *
 * How long is learned from how long it took lately until something came (`usual_ns`, a moving
 * average): twice that, if that is not more than `most_ns`, and otherwise not at all. After much
 * work (more than SPIN_SPARSE_MAX of spin_work() in a round) there is no looking again: sleeping then
 * lets batches fill. An idle component is woken by nothing but its timers, and sleeps.
 *
 * Private to the process; a crash leaves nothing.
 */
#ifndef MIDAIR_SPIN_H
#define MIDAIR_SPIN_H

#include <sched.h>
#include <stdint.h>

#define SPIN_SPARSE_MAX 16u
#define SPIN_MARGIN_NS 10000u

struct spin {
    uint64_t most_ns;  /* 0: never */
    uint64_t usual_ns; /* at most 4 * most_ns, so that good times are noticed soon */
    int adaptive;      /* if not, it is always most_ns */
};

static inline struct spin spin_make(uint64_t most_ns, int adaptive)
{
    return (struct spin){.most_ns = most_ns, .usual_ns = adaptive ? 4 * most_ns : 0, .adaptive = adaptive};
}

/* The work that these messages are: large ones count for more. */
static inline uint64_t spin_work(uint64_t messages, uint64_t bytes) { return messages + bytes / 1024; }

/* How long to look again, after a round with so much work. */
static inline uint64_t spin_time(const struct spin *s, uint64_t work)
{
    if (work > SPIN_SPARSE_MAX || (s->adaptive && s->usual_ns > s->most_ns))
        return 0;
    uint64_t ns = 2 * s->usual_ns + SPIN_MARGIN_NS;

    return s->adaptive && ns < s->most_ns ? ns : s->most_ns;
}

/* Something came, so long after there was nothing left to do. */
static inline void spin_learn(struct spin *s, uint64_t waited_ns)
{
    if (waited_ns > 4 * s->most_ns)
        waited_ns = 4 * s->most_ns;
    s->usual_ns += waited_ns / 8;
    s->usual_ns -= s->usual_ns / 8;
}

#endif
