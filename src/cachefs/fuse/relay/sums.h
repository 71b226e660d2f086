/* Checksums of cached blocks, and of the parts of large ones.
 *
 * A block has one checksum (docs/formats/slab.md). Where a READ wants a small part of a large block,
 * reading the whole of it from a disk would take ten times as long, so the table also keeps the
 * checksums of parts. They are found by the checksum of the whole: they follow from the block's bytes
 * alone, so nothing makes them invalid. They may be overwritten by those of another block, by two
 * threads at once, too. Whoever finds none, or wrong ones, compares the whole block.
 */
#ifndef CACHEFS_RELAY_SUMS_H
#define CACHEFS_RELAY_SUMS_H

#include "table.h"

/* xxh3_64, with 0 replaced by 1, as `checksum_of` in format/slab.py. */
uint64_t sum_of(const void *bytes, size_t length);

/* Keeps the checksums of a block's parts. The block is right. */
void sums_note(const struct rt_table *table, uint64_t checksum, const void *bytes, uint32_t length);
bool sums_are_known(const struct rt_table *table, uint64_t checksum);
/* Whether these bytes of a block are right. They begin with a part, and end with one or with the
 * block. False also if nothing is known. */
bool sums_agree(const struct rt_table *table, uint64_t checksum, uint32_t from, const void *bytes,
                uint32_t length);

/* Reads `length` bytes of a block, from `within` on, and compares everything that it takes with
 * checksums. `scratch` has room for a block; `flags` are preadv2's. False if the file didn't give
 * the bytes, or if they are wrong. */
bool sums_read(const struct rt_table *table, int fd, const struct rt_found *found, uint32_t within,
               uint32_t length, int flags, char *into, char *scratch);

#endif
