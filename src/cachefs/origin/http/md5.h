/* The MD5 of several buffers at a time; see md5.c. */
#ifndef CACHEFS_MD5_H
#define CACHEFS_MD5_H

#include <stddef.h>
#include <stdint.h>

#define MD5_BYTES 16

struct md5_message {
    const uint8_t *bytes;
    size_t size_bytes;
    ptrdiff_t number; /* its place among the caller's buffers */
    uint8_t md5[MD5_BYTES];
};

/* Hash `messages`, and change their order. */
void md5_hash(struct md5_message *messages, size_t count);

#endif
