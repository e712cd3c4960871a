/* load: how much output a batch of orders may make its receiver write.
 *
 * A batch may make its receiver write no more than one can that is full of recipients: four bytes
 * each, and each counts for two blocks of output (output.c). Of a run of small messages a recipient
 * gets frames that are gathered, in half of BATCH_GATHERED each block at least; the bodies of larger
 * ones (BATCH_COPY_MAX) are not copied, and each is written as a piece of its own.
 */
#ifndef MIDAIR_LOAD_H
#define MIDAIR_LOAD_H

#include "base/api.h"

#include <stdint.h>

#define BATCH_COPY_MAX 4096u
#define BATCH_GATHERED 16384u
#define BATCH_FRAME_MORE 64u /* bytes of a frame beside subject and body, at most */

API static inline uint32_t batch_run_load(uint32_t recipients, uint32_t messages, uint32_t size_each, uint32_t subject_len)
{
    uint64_t bytes = (uint64_t)messages * (size_each + subject_len + BATCH_FRAME_MORE);

    return 4 * recipients * (size_each > BATCH_COPY_MAX ? messages : (uint32_t)(bytes / BATCH_GATHERED) + 1);
}
/* How many messages make no more than `load`; at least one. */
API static inline uint32_t batch_run_most(uint32_t load, uint32_t recipients, uint32_t size_each, uint32_t subject_len)
{
    uint32_t each = load / (4 * recipients);

    uint32_t frame = size_each + subject_len + BATCH_FRAME_MORE;

    if (each && size_each <= BATCH_COPY_MAX && frame < BATCH_GATHERED)
        return (each * BATCH_GATHERED - 1) / frame;
    return each ? each : 1;
}

#endif
