/* See sums.h. The part checksums lie in the relay table, and have no lock. All other memory belongs
 * to the caller. */
#define _GNU_SOURCE
#include "sums.h"

#include <string.h>
#include <sys/uio.h>

#if !__has_include(<xxhash.h>)
#error "the relay needs xxhash.h; install libxxhash-dev (Debian) or xxhash-devel (Fedora)"
#endif
#define XXH_INLINE_ALL
#include <xxhash.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
uint64_t xxh3_with_avx2(const void *bytes, size_t length); /* sums_avx2.c; three times as fast */

static uint64_t xxh3(const void *bytes, size_t length) {
    return __builtin_cpu_supports("avx2") ? xxh3_with_avx2(bytes, length)
                                          : XXH3_64bits(bytes, length);
}
#else
#define xxh3 XXH3_64bits
#endif

uint64_t sum_of(const void *bytes, size_t length) {
    uint64_t sum = xxh3(bytes, length);
    return sum ? sum : 1;
}

/* -- of parts ---------------------------------------------------------------------------------- */

static struct rt_sums *place_of(const struct rt_table *table, uint64_t checksum) {
    return table->sums + (checksum & (table->sums_count - 1)); /* the checksum is a hash already */
}

static uint32_t parts_of(uint32_t length) {
    return (length + RT_PART_BYTES - 1) / RT_PART_BYTES;
}

static uint32_t part_sum(const char *bytes, uint32_t length, uint32_t part) {
    uint32_t at = part * RT_PART_BYTES, rest = length - at;
    return (uint32_t)xxh3(bytes + at, rest < RT_PART_BYTES ? rest : RT_PART_BYTES);
}

/* The checksum is 0 while the parts are written, so no reader takes a mixture for complete. Two
 * writers at once may still mix; then the parts do not match, and the whole block decides. */
void sums_note(const struct rt_table *table, uint64_t checksum, const void *bytes, uint32_t length) {
    struct rt_sums *sums = place_of(table, checksum);
    PUT(sums->checksum, 0);
    atomic_thread_fence(memory_order_release);
    for (uint32_t part = 0; part < parts_of(length); part++)
        PUT(sums->parts[part], part_sum(bytes, length, part));
    atomic_store_explicit(&sums->checksum, checksum, memory_order_release);
}

bool sums_are_known(const struct rt_table *table, uint64_t checksum) {
    return atomic_load_explicit(&place_of(table, checksum)->checksum, memory_order_acquire) == checksum;
}

bool sums_agree(const struct rt_table *table, uint64_t checksum, uint32_t from, const void *bytes,
                uint32_t length) {
    const struct rt_sums *sums = place_of(table, checksum);
    if (!sums_are_known(table, checksum)) return false;
    for (uint32_t part = 0; part < parts_of(length); part++)
        if (GET(sums->parts[from / RT_PART_BYTES + part]) != part_sum(bytes, length, part))
            return false;
    return true;
}

/* -- reading ----------------------------------------------------------------------------------- */

static bool read_range(int fd, const struct rt_found *found, uint32_t from, uint32_t length, int flags,
                       char *into) {
    struct iovec part = {into, length};
    off_t position = (off_t)found->slot * RT_SLOT_UNIT + from;
    return preadv2(fd, &part, 1, position, flags) == (ssize_t)length;
}

bool sums_read(const struct rt_table *table, int fd, const struct rt_found *found, uint32_t within,
               uint32_t length, int flags, char *into, char *scratch) {
    uint32_t whole = found->length;
    if (whole > 1u << RT_BLOCK_SHIFT) return false;
    if (length == whole)
        return read_range(fd, found, 0, whole, flags, into) && sum_of(into, whole) == found->checksum;
    bool has_parts = whole > RT_PARTS_ABOVE;
    if (has_parts && sums_are_known(table, found->checksum)) {
        uint32_t from = within / RT_PART_BYTES * RT_PART_BYTES;
        uint32_t end = parts_of(within + length) * RT_PART_BYTES;
        if (end > whole) end = whole;
        char *bytes = from == within && end - from == length ? into : scratch;
        if (!read_range(fd, found, from, end - from, flags, bytes)) return false;
        if (sums_agree(table, found->checksum, from, bytes, end - from)) {
            if (bytes != into) memcpy(into, bytes + (within - from), length);
            return true;
        } /* else the bytes or the part checksums are wrong; the whole block decides */
    }
    if (!read_range(fd, found, 0, whole, flags, scratch)) return false;
    if (sum_of(scratch, whole) != found->checksum) return false;
    if (has_parts) sums_note(table, found->checksum, scratch, whole);
    memcpy(into, scratch + within, length);
    return true;
}
