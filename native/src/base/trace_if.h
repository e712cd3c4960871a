/* trace_if: the condition around every hook on the path of a message. A build without them shows what
 * they cost (python -m bench.trace; trace.h says what they are for). */
#ifndef MIDAIR_TRACE_IF_H
#define MIDAIR_TRACE_IF_H

#ifdef MIDAIR_NO_TRACE
#define TRACE_IF(condition) 0
#else
#define TRACE_IF(condition) __builtin_expect((condition) != 0, 0)
#endif

#endif
