/* The table that tells the relay where cached blocks lie: shared memory with one writer, the
 * daemon, and any number of reading threads in the relay, without locks.
 *
 * The layout is docs/formats/relay_table.md; the protocol, and why it is right, is in
 * docs/CONCURRENCY.md ("The relay's table"). In short:
 *
 *  - An entry says: block B of inode I lies in slot S of file F, and S had generation G then.
 *  - The writer bumps a slot's generation before the slot can be given to another block, marks a
 *    file dead before it is changed in any other way, and leaves an epoch before it starts anew.
 *  - A reader looks an entry up, copies the bytes to memory of its own, and then looks whether
 *    generation, file and epoch are what they were. If not, the bytes are thrown away.
 *
 * Generations are kept by a hash of file and slot: two slots that share a counter make each other
 * look changed, which costs a request to the daemon and nothing else.
 */
#ifndef CACHEFS_RELAY_TABLE_H
#define CACHEFS_RELAY_TABLE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RT_MAGIC "cachefsR"
#define RT_FORMAT 2

#define RT_WAYS 8
#define RT_SLOT_UNIT 512       /* slots begin at multiples of it */
#define RT_SLOTS (1u << 22)    /* generation counters */
#define RT_FILES (1u << 20)
#define RT_USERS (1u << 15)    /* numbers that fit above an inode number of 48 bits */
#define RT_USER_TRIES 64       /* places where a user may stand */
#define RT_RING (1u << 16)
#define RT_BUCKETS 64          /* by bit length of (ns >> 13), as in cachefs.metrics */
#define RT_LAST 0x80000000u    /* in `length`: no block follows */
#define RT_BLOCK_SHIFT 20
#define RT_PART_BYTES 8192u    /* of large blocks, with a checksum each (sums.h) */
#define RT_PARTS ((1u << RT_BLOCK_SHIFT) / RT_PART_BYTES)
#define RT_PARTS_ABOVE (128u << 10) /* blocks up to that length are always compared as a whole */
#define RT_ENTRIES_PER_SUMS 4

struct rt_entry {
    _Atomic uint32_t seq;      /* odd: being written; 0: never used */
    _Atomic uint32_t block;
    _Atomic uint64_t ino;
    _Atomic uint32_t file;
    _Atomic uint32_t slot;     /* offset in the file / RT_SLOT_UNIT */
    _Atomic uint32_t length;   /* bytes, with RT_LAST */
    _Atomic uint32_t generation;
    _Atomic uint64_t checksum; /* of the whole block, as in the slab's table */
};

_Static_assert(sizeof(struct rt_entry) == 40, "part of the format");

struct rt_sums {
    _Atomic uint64_t checksum; /* of the block; 0: none */
    _Atomic uint32_t parts[RT_PARTS];
};

_Static_assert(sizeof(struct rt_sums) == 520, "part of the format");

struct rt_header {
    char magic[8];
    uint32_t format;
    uint32_t ways;
    uint64_t entry_count;            /* a power of two, RT_WAYS or more */
    uint64_t total_bytes;
    _Atomic uint64_t epoch;          /* odd: the writer is clearing the table */
    _Atomic uint32_t paused;         /* all READs go to the daemon */
    _Atomic uint32_t victim;         /* writer's: which way to overwrite next */
    /* Counters, by the relay */
    _Atomic uint64_t hits;
    _Atomic uint64_t hit_bytes;
    _Atomic uint64_t forwarded;      /* requests of all kinds */
    _Atomic uint64_t missed;         /* READs that went to the daemon */
    _Atomic uint64_t waited;         /* hits that waited for a disk */
    _Atomic uint64_t late;           /* READs that waited too long and went to the daemon */
    _Atomic uint64_t changed;        /* blocks that were dropped while they were read */
    _Atomic uint64_t unnoted;        /* hits that the ring had no room for */
    _Atomic uint64_t ring_head;      /* next place to fill, by the relay */
    _Atomic uint64_t ring_tail;      /* next place to empty, by the writer */
    _Atomic uint64_t hit_ns;         /* time that hits took, in all */
    _Atomic uint64_t hit_times[RT_BUCKETS];
    _Atomic uint32_t verify_all;     /* what lies in memory, too, is compared with its checksum */
};

_Static_assert(sizeof(struct rt_header) <= 4096, "one page");

struct rt_table {
    void *map;
    size_t total_bytes;
    uint64_t entry_count;            /* as it was checked: nothing in the map is trusted for bounds */
    struct rt_header *header;
    _Atomic uint32_t *users;         /* [RT_USERS] uid + 1; 0: free. 0 has no user. */
    _Atomic uint8_t *limited;        /* [RT_USERS] READs of this user go to the daemon */
    _Atomic uint64_t *user_bytes;    /* [RT_USERS] */
    _Atomic uint64_t *ring;          /* [RT_RING] index of an entry, plus 1; 0: empty */
    _Atomic uint8_t *alive;          /* [RT_FILES] */
    _Atomic uint32_t *file_hits;     /* [RT_FILES] since the writer took them */
    _Atomic uint64_t *file_bytes;    /* [RT_FILES] the same in bytes */
    _Atomic uint8_t *touched;        /* [RT_SLOTS] hit since the ring told so last */
    _Atomic uint32_t *generations;   /* [RT_SLOTS] */
    struct rt_sums *sums;            /* [sums_count], by the block's checksum */
    uint64_t sums_count;
    struct rt_entry *entries;
};

struct rt_found {
    uint64_t epoch;
    uint64_t entry;
    uint32_t file;
    uint32_t slot;
    uint32_t length;
    uint32_t generation;
    uint64_t checksum;
    bool is_last;
};

/* 0, or -errno. */
int rt_create(uint64_t entry_count);                 /* a memfd */
int rt_open(struct rt_table *table, int fd);
void rt_close(struct rt_table *table);

/* The writer's: one thread of one process. */
void rt_begin_epoch(struct rt_table *table);
void rt_publish(struct rt_table *table, uint64_t ino, uint32_t block, uint32_t file, uint32_t slot,
                uint32_t length, bool is_last, uint64_t checksum);
void rt_invalidate(struct rt_table *table, uint32_t file, uint32_t slot);
void rt_revive(struct rt_table *table, uint32_t file);
void rt_kill(struct rt_table *table, uint32_t file);
const struct rt_entry *rt_drain(struct rt_table *table); /* one that was hit, or NULL */

/* Everybody's. */
bool rt_find(const struct rt_table *table, uint64_t ino, uint32_t block, struct rt_found *found);
bool rt_still(const struct rt_table *table, const struct rt_found *found);
void rt_note_hit(struct rt_table *table, const struct rt_found *found, uint32_t bytes);
uint32_t rt_user(struct rt_table *table, uint32_t uid);

#endif
