/* subject: the grammar of subjects, the same for every protocol, the index and the census.
 *
 * A subject is tokens separated by SUBJECT_DOT, none of them empty. In a pattern a token may be
 * SUBJECT_ANY, which stands for one token, and the last one SUBJECT_REST, which stands for one or
 * more. Inside a longer token both are ordinary characters.
 */
#ifndef MIDAIR_SUBJECT_H
#define MIDAIR_SUBJECT_H

#include "base/api.h"

#include <stdint.h>

#define SUBJECT_DOT '.'
#define SUBJECT_ANY '*'
#define SUBJECT_REST '>'

/* 1 or 0. No token contains a blank, CR or LF. Without `wildcards` no token may be one. */
API static inline int subject_valid(const uint8_t *s, uint32_t len, int wildcards)
{
    uint32_t start = 0;

    for (uint32_t i = 0;; i++) {
        uint8_t c = i < len ? s[i] : SUBJECT_DOT;

        if (c == SUBJECT_DOT) {
            if (i == start)
                return 0;
            if (i - start == 1) {
                if (s[start] == SUBJECT_ANY && !wildcards)
                    return 0;
                if (s[start] == SUBJECT_REST && (!wildcards || i != len))
                    return 0;
            }
            if (i == len)
                return 1;
            start = i + 1;
        } else if (c == ' ' || c == '\t' || c == '\r' || c == '\n') {
            return 0;
        }
    }
}

#endif
