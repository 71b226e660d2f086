/* The table in which the relay finds cached blocks. It is shared memory without locks.
 * Only the daemon enters and withdraws blocks; any number of threads of the relay read, and count.
 *
 * docs/formats/relay_table.md describes the layout. docs/CONCURRENCY.md ("The relay's table")
 * describes the protocol and why it is correct. In short:
 *
 *  - An entry says: block B of inode I lies in slot S of file F, and S had generation G then.
 *  - The writer bumps a slot's generation before another block can get the slot. It marks a file
 *    dead before it changes the file in any other way. It ends the epoch before it starts anew.
 *  - A reader finds an entry, copies the bytes to its own memory, and then checks that generation,
 *    file and epoch are unchanged. If not, it discards the bytes.
 *
 * Generation counters are selected by a hash of file and slot. If two slots share a counter, a
 * change of one makes the other look changed. This only costs a request to the daemon.
 */
#ifndef CACHEFS_RELAY_TABLE_H
#define CACHEFS_RELAY_TABLE_H

#include "atomics.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RT_MAGIC "cachefsR"
#define RT_FORMAT 3
#define RT_FORMAT_BEFORE 2    /* of supervisors that began before an upgrade; it has no `whole` */

#define RT_WAYS 8
#define RT_SLOT_UNIT 512       /* bytes; slots begin at multiples of it */
#define RT_GENERATIONS (1u << 22) /* number of generation counters; slots share them */
#define RT_FILES (1u << 20)
#define RT_INO_BITS 48         /* of a handle; the user number is above (uid_limits.py) */
#define RT_USERS (1u << 15)    /* numbers that fit above an inode number */
#define RT_USER_TRIES 64       /* possible places of a user */
#define RT_RING (1u << 16)
#define RT_BUCKETS 64          /* by bit length of (ns >> 13), as in cachefs.metrics */
#define RT_LAST 0x80000000u    /* flag in `length`: the file's last block */
#define RT_BLOCK_SHIFT 20
#define RT_PART_BYTES 8192u    /* each part of a large block has a checksum (sums.h) */
#define RT_PARTS ((1u << RT_BLOCK_SHIFT) / RT_PART_BYTES)
#define RT_PARTS_ABOVE (128u << 10) /* up to this length, blocks have no part checksums */
#define RT_ENTRIES_PER_SUMS 4
#define RT_UNSENT 1024         /* counters of files with unsent changes; files share them */

/* What the relay does with OPEN (opens.h). */
enum { RT_OPENS_UNDECIDED, RT_OPENS_ON, RT_OPENS_OFF };

struct rt_entry {
    _Atomic uint32_t seq;      /* sequence number; odd: being written; 0: never used */
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
    _Atomic uint64_t epoch;          /* odd: the writer clears the table */
    _Atomic uint32_t paused;         /* all READs go to the daemon */
    _Atomic uint32_t victim;         /* for the writer: the way to overwrite next */
    /* Counters, written by the relay */
    _Atomic uint64_t hits;
    _Atomic uint64_t hit_bytes;
    _Atomic uint64_t forwarded;      /* requests of all kinds */
    _Atomic uint64_t missed;         /* READs that went to the daemon */
    _Atomic uint64_t waited;         /* hits that waited for a disk */
    _Atomic uint64_t late;           /* READs that waited too long, then went to the daemon */
    _Atomic uint64_t changed;        /* blocks that changed while they were read */
    _Atomic uint64_t unnoted;        /* hits that did not fit into the ring */
    _Atomic uint64_t ring_head;      /* next place that the relay fills */
    _Atomic uint64_t ring_tail;      /* next place that the writer empties */
    _Atomic uint64_t hit_ns;         /* total duration of all hits */
    _Atomic uint64_t hit_times[RT_BUCKETS];
    _Atomic uint32_t verify_all;     /* 1: compare checksums of files in memory, too */
    _Atomic uint32_t writable;       /* 1: the mount accepts writes; set before the relay starts */
    _Atomic uint16_t unsent[RT_UNSENT]; /* by hash of the inode: files with unsent changes */
    /* The rest is 0 in format 2. */
    _Atomic uint32_t passes_through; /* 1: whole files may be passed through at OPEN */
    _Atomic uint32_t opens_state;    /* RT_OPENS_...; written by the relay, as are those below */
    _Atomic uint32_t through_error;  /* errno of the last registration with the kernel; 0: it worked */
    _Atomic uint32_t unused;
    _Atomic uint64_t opens;          /* OPENs that were answered */
    _Atomic uint64_t opens_through;  /* those of them that were passed through */
};

_Static_assert(sizeof(struct rt_header) <= 4096, "one page");

/* One process's mapping of the table, open until `rt_close`. All pointers point into `map`. */
struct rt_table {
    void *map;
    size_t total_bytes;
    uint64_t entry_count;            /* checked copy: the map's own value is not used for bounds */
    struct rt_header *header;
    _Atomic uint32_t *users;         /* [RT_USERS] uid + 1; 0: free. Number 0 has no uid. */
    _Atomic uint8_t *limited;        /* [RT_USERS] 1: READs of this user go to the daemon */
    _Atomic uint64_t *user_bytes;    /* [RT_USERS] bytes served, see Table.add_user_bytes */
    _Atomic uint64_t *ring;          /* [RT_RING] index of an entry, plus 1; 0: empty */
    _Atomic uint8_t *alive;          /* [RT_FILES] 1: blocks of this file may be served */
    _Atomic uint32_t *file_hits;     /* [RT_FILES] hits since the writer last took them */
    _Atomic uint64_t *file_bytes;    /* [RT_FILES] the same in bytes */
    _Atomic uint8_t *touched;        /* [RT_GENERATIONS] 1: the ring holds a hit of this slot */
    _Atomic uint32_t *generations;   /* [RT_GENERATIONS] counters of changes, see above */
    struct rt_sums *sums;            /* [sums_count] indexed by the block's checksum */
    uint64_t sums_count;
    struct rt_entry *entries;
    _Atomic uint8_t *whole;          /* [RT_FILES] 1: see rt_mark_whole; NULL in RT_FORMAT_BEFORE */
};

/* The result of `rt_find`: a copy of an entry, valid for as long as `rt_still` says so. */
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

/* Returns a new memfd with an empty table, which the caller owns; -errno on failure. `entry_count`
 * must be a power of two from 8 to 2**28. */
int rt_create(uint64_t entry_count);

/* Maps the table, also one of RT_FORMAT_BEFORE. The caller may close `fd` afterwards. 0; -EINVAL for
 * a table of any other format;
 * another -errno if the map fails. */
int rt_open(struct rt_table *table, int fd);

/* Unmaps the table. A second call does nothing. */
void rt_close(struct rt_table *table);

/* -- For the writer: one thread of one process ------------------------------------------------- */

/* Clears entries, file states, ring, limits and flags, and begins a new epoch. Counters, users,
 * generations and sums stay. */
void rt_begin_epoch(struct rt_table *table);

/* Writes the entry of a block, and overwrites another one if the set is full. `slot` is in units of
 * RT_SLOT_UNIT, `length` in bytes. The slot must already hold the block. */
void rt_publish(struct rt_table *table, uint64_t ino, uint32_t block, uint32_t file, uint32_t slot,
                uint32_t length, bool is_last, uint64_t checksum);

/* Marks a slot as free. Must come before any byte of the slot's next block is written. */
void rt_withdraw(struct rt_table *table, uint32_t file, uint32_t slot);

/* Removes the entry of a block, because its file changes in this mount. A READ that has found the
 * entry before may still return the old bytes; it began before the change was acknowledged. */
void rt_remove(struct rt_table *table, uint64_t ino, uint32_t block);

/* Counts a file with unsent changes, or counts it no longer. Its mark must be set before the first
 * change is acknowledged. */
void rt_mark_unsent(struct rt_table *table, uint64_t ino);
void rt_unmark_unsent(struct rt_table *table, uint64_t ino);

/* Counts exactly these files, for a new daemon. The mark of a file that stays marked is never
 * missing meanwhile. */
void rt_set_unsent(struct rt_table *table, const uint64_t *inos, size_t count);

/* Allows, or forbids, that blocks of a file are served. `rt_withdraw_file` must come before the
 * file is changed, deleted or closed. */
void rt_revive(struct rt_table *table, uint32_t file);
void rt_withdraw_file(struct rt_table *table, uint32_t file);

/* Says that the bytes of a file are exactly the content of the inode whose block 0 is published at
 * its start: complete and verified. Such a file may be passed through, and then it may be
 * read at any later time, even after rt_withdraw_file. So its bytes must never change again: it may
 * only be unlinked. A withdrawn file is not whole. Does nothing in RT_FORMAT_BEFORE. */
void rt_mark_whole(struct rt_table *table, uint32_t file, bool whole);

/* Takes an entry that was hit from the ring; NULL if there is none. It stays in the map. */
const struct rt_entry *rt_drain(struct rt_table *table);

/* -- For any thread of any process ------------------------------------------------------------- */

/* Finds the entry of a block that may be served, and copies it to `found`. */
bool rt_find(const struct rt_table *table, uint64_t ino, uint32_t block, struct rt_found *found);

/* True if the slot still holds the block. Must be called after the bytes were copied to private
 * memory, and before they are used. */
bool rt_still(const struct rt_table *table, const struct rt_found *found);

/* False if the file has no unsent changes. May be true for a file without. */
bool rt_may_be_unsent(const struct rt_table *table, uint64_t ino);

/* Counts a hit for the file, and puts the entry into the ring unless its slot is there already. */
void rt_note_hit(struct rt_table *table, const struct rt_found *found, uint32_t bytes);

/* Returns the number of a user, and assigns one if necessary; 0 if none is left. */
uint32_t rt_user(struct rt_table *table, uint32_t uid);

#endif
