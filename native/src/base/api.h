/* api: marks what Python uses. native/declarations.py reads the marked declarations out of the
 * headers and tells cffi; to the compiler the mark is nothing. */
#ifndef MIDAIR_API_H
#define MIDAIR_API_H

#define API

#endif
