/* Checksums of cached blocks, and of the parts of large blocks.
 *
 * A block has one checksum (docs/formats/slab.md). If a READ needs a small part of a large block,
 * reading the whole block from a disk would take ten times as long. So the table also stores
 * checksums of parts. The key is the checksum of the whole block. Part checksums depend on the
 * block's bytes alone, so they never become invalid. Another block may overwrite them at any time,
 * and two threads may do so at once, because there is no lock. A caller that finds no part
 * checksums, or different ones, must compare the whole block.
 *
 * All functions may run in any thread. They keep no pointer to the caller's memory.
 */
#ifndef CACHEFS_RELAY_SUMS_H
#define CACHEFS_RELAY_SUMS_H

#include "table.h"

/* Returns xxh3_64 of the bytes, with 0 replaced by 1, as `checksum_of` in format/slab.py does. */
uint64_t sum_of(const void *bytes, size_t length);

/* Stores the checksums of the parts of a block of `length` bytes. The caller has verified the block
 * against `checksum`. */
void sums_note(const struct rt_table *table, uint64_t checksum, const void *bytes, uint32_t length);

/* True if part checksums of the block with this checksum are stored. */
bool sums_are_known(const struct rt_table *table, uint64_t checksum);

/* True if `length` bytes of a block, from offset `from` on, match the stored part checksums. `from`
 * must be at the start of a part. The bytes must end with a part or with the block. False also if
 * no checksums are stored. */
bool sums_agree(const struct rt_table *table, uint64_t checksum, uint32_t from, const void *bytes,
                uint32_t length);

/* Reads `length` bytes of a block, from offset `within` on, into `into`, and compares all bytes
 * that it reads with checksums. `scratch` is the caller's memory for a whole block (1 MiB). `flags`
 * are those of preadv2(2). False if the file does not deliver the bytes, or if they are wrong. */
bool sums_read(const struct rt_table *table, int fd, const struct rt_found *found, uint32_t within,
               uint32_t length, int flags, char *into, char *scratch);

#endif
