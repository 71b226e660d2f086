/* See table.h. `struct rt_table` owns the mapping. The table has no locks: one thread of one
 * process writes it, and each function says how its accesses are ordered. */
#define _GNU_SOURCE
#include "table.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE 4096u

struct layout {
    size_t users, limited, user_bytes, ring, alive, file_hits, file_bytes, touched, generations,
        sums, entries, whole, total;
};

/* Reserves whole pages at `*end`, and returns their offset. */
static size_t place(size_t *end, size_t bytes) {
    size_t at = *end;
    *end += (bytes + PAGE - 1) / PAGE * PAGE;
    return at;
}

static uint64_t sums_count(uint64_t entry_count) {
    return entry_count / RT_ENTRIES_PER_SUMS; /* a power of two, because `entry_count` is one */
}

static struct layout layout_of(uint64_t entry_count, uint32_t format) {
    struct layout l;
    size_t end = PAGE;
    l.users = place(&end, RT_USERS * sizeof(uint32_t));
    l.limited = place(&end, RT_USERS);
    l.user_bytes = place(&end, RT_USERS * sizeof(uint64_t));
    l.ring = place(&end, RT_RING * sizeof(uint64_t));
    l.alive = place(&end, RT_FILES);
    l.file_hits = place(&end, RT_FILES * sizeof(uint32_t));
    l.file_bytes = place(&end, RT_FILES * sizeof(uint64_t));
    l.touched = place(&end, RT_GENERATIONS);
    l.generations = place(&end, RT_GENERATIONS * sizeof(uint32_t));
    l.sums = place(&end, sums_count(entry_count) * sizeof(struct rt_sums));
    l.entries = place(&end, entry_count * sizeof(struct rt_entry));
    l.whole = place(&end, format == RT_FORMAT ? RT_FILES : 0);
    l.total = end;
    return l;
}

static bool is_sane(uint64_t entry_count) {
    return entry_count >= RT_WAYS && entry_count <= (1ull << 28) &&
           (entry_count & (entry_count - 1)) == 0;
}

int rt_create(uint64_t entry_count) {
    if (!is_sane(entry_count)) return -EINVAL;
    int fd = memfd_create("cachefs-relay", MFD_CLOEXEC);
    if (fd < 0) return -errno;
    struct rt_header header = {.format = RT_FORMAT, .ways = RT_WAYS, .entry_count = entry_count};
    memcpy(header.magic, RT_MAGIC, sizeof header.magic);
    header.total_bytes = layout_of(entry_count, RT_FORMAT).total;
    if (ftruncate(fd, (off_t)header.total_bytes) < 0 ||
        pwrite(fd, &header, sizeof header, 0) != (ssize_t)sizeof header) {
        int error = errno ? errno : EIO;
        close(fd);
        return -error;
    }
    return fd;
}

int rt_open(struct rt_table *table, int fd) {
    struct rt_header header;
    struct stat st;
    if (pread(fd, &header, sizeof header, 0) != (ssize_t)sizeof header || fstat(fd, &st) < 0)
        return -EINVAL;
    bool is_known = header.format == RT_FORMAT || header.format == RT_FORMAT_BEFORE;
    if (memcmp(header.magic, RT_MAGIC, sizeof header.magic) != 0 || !is_known ||
        header.ways != RT_WAYS || !is_sane(header.entry_count))
        return -EINVAL;
    struct layout l = layout_of(header.entry_count, header.format);
    if (header.total_bytes != l.total || (uint64_t)st.st_size != l.total) return -EINVAL;
    char *map = mmap(NULL, l.total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (map == MAP_FAILED) return -errno;
    table->map = map;
    table->total_bytes = l.total;
    table->entry_count = header.entry_count;
    table->header = (struct rt_header *)map;
    table->users = (_Atomic uint32_t *)(map + l.users);
    table->limited = (_Atomic uint8_t *)(map + l.limited);
    table->user_bytes = (_Atomic uint64_t *)(map + l.user_bytes);
    table->ring = (_Atomic uint64_t *)(map + l.ring);
    table->alive = (_Atomic uint8_t *)(map + l.alive);
    table->file_hits = (_Atomic uint32_t *)(map + l.file_hits);
    table->file_bytes = (_Atomic uint64_t *)(map + l.file_bytes);
    table->touched = (_Atomic uint8_t *)(map + l.touched);
    table->generations = (_Atomic uint32_t *)(map + l.generations);
    table->sums = (struct rt_sums *)(map + l.sums);
    table->sums_count = sums_count(header.entry_count);
    table->entries = (struct rt_entry *)(map + l.entries);
    table->whole = header.format == RT_FORMAT ? (_Atomic uint8_t *)(map + l.whole) : NULL;
    return 0;
}

void rt_close(struct rt_table *table) {
    if (table->map != NULL) munmap(table->map, table->total_bytes);
    table->map = NULL;
}

/* The finaliser of splitmix64: a part of the format. */
static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static struct rt_entry *set_of(const struct rt_table *table, uint64_t ino, uint32_t block) {
    uint64_t sets = table->entry_count / RT_WAYS;
    return table->entries + (mixed(ino * 0x9e3779b97f4a7c15ull + block) & (sets - 1)) * RT_WAYS;
}

static uint32_t counter_of(uint32_t file, uint32_t slot) {
    return (uint32_t)(mixed((uint64_t)file << 32 | slot) & (RT_GENERATIONS - 1));
}

/* -- for the writer ---------------------------------------------------------------------------- */

void rt_begin_epoch(struct rt_table *table) {
    struct rt_header *h = table->header;
    uint64_t epoch = GET(h->epoch) | 1;
    /* seq_cst: readers that see the odd number read nothing else. Readers that came before see it
     * in `rt_still`, before they use the bytes. */
    atomic_store(&h->epoch, epoch);
    atomic_thread_fence(memory_order_seq_cst);
    madvise(table->entries, table->entry_count * sizeof(struct rt_entry), MADV_REMOVE);
    madvise((void *)table->alive, RT_FILES, MADV_REMOVE);
    if (table->whole != NULL) madvise((void *)table->whole, RT_FILES, MADV_REMOVE);
    madvise((void *)table->file_hits, RT_FILES * sizeof(uint32_t), MADV_REMOVE);
    madvise((void *)table->file_bytes, RT_FILES * sizeof(uint64_t), MADV_REMOVE);
    madvise((void *)table->touched, RT_GENERATIONS, MADV_REMOVE);
    madvise((void *)table->ring, RT_RING * sizeof(uint64_t), MADV_REMOVE);
    PUT(h->ring_tail, GET(h->ring_head));
    PUT(h->paused, 0);
    PUT(h->passes_through, 0);
    PUT(h->verify_all, 0);
    for (uint32_t user = 0; user < RT_USERS; user++)
        if (GET(table->limited[user])) PUT(table->limited[user], 0);
    atomic_store(&h->epoch, epoch + 1);
}

static bool is_dead(const struct rt_table *table, const struct rt_entry *entry) {
    uint32_t file = GET(entry->file);
    return file >= RT_FILES || !GET(table->alive[file]) ||
           GET(table->generations[counter_of(file, GET(entry->slot))]) != GET(entry->generation);
}

/* Returns the entry to write: the block's own one, else an unused or dead one, else a victim. */
static struct rt_entry *place_for(struct rt_table *table, uint64_t ino, uint32_t block) {
    struct rt_entry *set = set_of(table, ino, block), *free_one = NULL;
    for (int way = 0; way < RT_WAYS; way++) {
        struct rt_entry *entry = set + way;
        bool is_used = GET(entry->seq) != 0;
        if (is_used && GET(entry->ino) == ino && GET(entry->block) == block) return entry;
        if (free_one == NULL && (!is_used || is_dead(table, entry))) free_one = entry;
    }
    if (free_one != NULL) return free_one;
    uint32_t victim = GET(table->header->victim);
    PUT(table->header->victim, victim + 1);
    return set + victim % RT_WAYS;
}

void rt_publish(struct rt_table *table, uint64_t ino, uint32_t block, uint32_t file, uint32_t slot,
                uint32_t length, bool is_last, uint64_t checksum) {
    struct rt_entry *entry = place_for(table, ino, block);
    uint32_t seq = GET(entry->seq) & ~1u;
    PUT(entry->seq, seq + 1);
    atomic_thread_fence(memory_order_release); /* orders the odd number before the fields */
    PUT(entry->ino, ino);
    PUT(entry->block, block);
    PUT(entry->file, file);
    PUT(entry->slot, slot);
    PUT(entry->length, length | (is_last ? RT_LAST : 0));
    PUT(entry->checksum, checksum);
    PUT(entry->generation, GET(table->generations[counter_of(file, slot)]));
    seq += 2;
    atomic_store_explicit(&entry->seq, seq ? seq : 2, memory_order_release);
}

void rt_remove(struct rt_table *table, uint64_t ino, uint32_t block) {
    struct rt_entry *set = set_of(table, ino, block);
    for (int way = 0; way < RT_WAYS; way++) {
        struct rt_entry *entry = set + way;
        uint32_t seq = GET(entry->seq);
        if (seq == 0 || GET(entry->ino) != ino || GET(entry->block) != block) continue;
        PUT(entry->seq, seq + 1);
        atomic_thread_fence(memory_order_release); /* orders the odd number before the field */
        PUT(entry->ino, 0);
        PUT(entry->file, RT_FILES); /* no file, so the place is free for another block */
        atomic_store_explicit(&entry->seq, seq + 2 ? seq + 2 : 2, memory_order_release);
    }
}

static _Atomic uint16_t *unsent_counter(const struct rt_table *table, uint64_t ino) {
    return &table->header->unsent[mixed(ino) % RT_UNSENT];
}

void rt_mark_unsent(struct rt_table *table, uint64_t ino) {
    atomic_fetch_add(unsent_counter(table, ino), 1);
}

void rt_unmark_unsent(struct rt_table *table, uint64_t ino) {
    atomic_fetch_sub(unsent_counter(table, ino), 1);
}

void rt_set_unsent(struct rt_table *table, const uint64_t *inos, size_t count) {
    uint16_t counters[RT_UNSENT] = {0};
    for (size_t i = 0; i < count; i++) counters[mixed(inos[i]) % RT_UNSENT]++;
    for (size_t i = 0; i < RT_UNSENT; i++) atomic_store(&table->header->unsent[i], counters[i]);
}

void rt_withdraw(struct rt_table *table, uint32_t file, uint32_t slot) {
    atomic_fetch_add(&table->generations[counter_of(file, slot)], 1);
    /* Orders the bump before all later writes to the slot (see rt_still). */
    atomic_thread_fence(memory_order_seq_cst);
}

void rt_revive(struct rt_table *table, uint32_t file) {
    atomic_store(&table->alive[file], 1);
}

void rt_mark_whole(struct rt_table *table, uint32_t file, bool whole) {
    if (table->whole != NULL) atomic_store(&table->whole[file], whole);
}

void rt_withdraw_file(struct rt_table *table, uint32_t file) {
    rt_mark_whole(table, file, false);
    atomic_store(&table->alive[file], 0);
    atomic_thread_fence(memory_order_seq_cst);
}

const struct rt_entry *rt_drain(struct rt_table *table) {
    struct rt_header *h = table->header;
    uint64_t tail = GET(h->ring_tail);
    uint64_t noted = atomic_load_explicit(&table->ring[tail % RT_RING], memory_order_acquire);
    if (noted == 0) return NULL;
    const struct rt_entry *entry = &table->entries[(noted - 1) & (table->entry_count - 1)];
    PUT(table->touched[counter_of(GET(entry->file), GET(entry->slot))], 0);
    atomic_store_explicit(&table->ring[tail % RT_RING], 0, memory_order_release);
    PUT(h->ring_tail, tail + 1);
    return entry;
}

/* -- for any thread ---------------------------------------------------------------------------- */

bool rt_find(const struct rt_table *table, uint64_t ino, uint32_t block, struct rt_found *found) {
    found->epoch = atomic_load(&table->header->epoch);
    if (found->epoch & 1) return false;
    const struct rt_entry *set = set_of(table, ino, block);
    for (int way = 0; way < RT_WAYS; way++) {
        const struct rt_entry *entry = set + way;
        uint32_t seq = atomic_load_explicit(&entry->seq, memory_order_acquire);
        if (seq == 0 || (seq & 1)) continue;
        uint64_t found_ino = GET(entry->ino);
        uint32_t found_block = GET(entry->block), length = GET(entry->length);
        found->file = GET(entry->file);
        found->slot = GET(entry->slot);
        found->generation = GET(entry->generation);
        found->checksum = GET(entry->checksum);
        atomic_thread_fence(memory_order_acquire); /* orders the fields before the second look */
        if (GET(entry->seq) != seq || found_ino != ino || found_block != block) continue;
        found->entry = (uint64_t)(entry - table->entries);
        found->length = length & ~RT_LAST;
        found->is_last = (length & RT_LAST) != 0;
        if (found->file < RT_FILES && rt_still(table, found)) return true;
    }
    return false;
}

bool rt_still(const struct rt_table *table, const struct rt_found *found) {
    /* The bytes were copied before this fence, which pairs with the writer's fences. The writer
     * bumps the counter before it writes the slot's next block. So if a copied byte came from the
     * next block, the loads below see the bump. */
    atomic_thread_fence(memory_order_seq_cst);
    return GET(table->generations[counter_of(found->file, found->slot)]) == found->generation &&
           GET(table->alive[found->file]) && GET(table->header->epoch) == found->epoch;
}

bool rt_may_be_unsent(const struct rt_table *table, uint64_t ino) {
    return atomic_load(unsent_counter(table, ino)) != 0;
}

void rt_note_hit(struct rt_table *table, const struct rt_found *found, uint32_t bytes) {
    struct rt_header *h = table->header;
    atomic_fetch_add_explicit(&table->file_hits[found->file], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&table->file_bytes[found->file], bytes, memory_order_relaxed);
    _Atomic uint8_t *touched = &table->touched[counter_of(found->file, found->slot)];
    if (GET(*touched)) return;
    PUT(*touched, 1);
    uint64_t head = atomic_load_explicit(&h->ring_head, memory_order_relaxed);
    do {
        if (head - GET(h->ring_tail) >= RT_RING - 64) {
            PUT(*touched, 0);
            atomic_fetch_add_explicit(&h->unnoted, 1, memory_order_relaxed);
            return;
        }
    } while (!atomic_compare_exchange_weak_explicit(&h->ring_head, &head, head + 1,
                                                    memory_order_relaxed, memory_order_relaxed));
    atomic_store_explicit(&table->ring[head % RT_RING], found->entry + 1, memory_order_release);
}

/* Gives a number to another user. The bytes of its former user go to number 0. A number with a
 * limit keeps its user. */
static bool replace_user(struct rt_table *table, uint32_t number, uint32_t wanted) {
    uint32_t found = GET(table->users[number]);
    if (number == 0 || GET(table->limited[number])) return false;
    if (!atomic_compare_exchange_strong(&table->users[number], &found, wanted)) return false;
    atomic_fetch_add(&table->user_bytes[0], atomic_exchange(&table->user_bytes[number], 0));
    return true;
}

uint32_t rt_user(struct rt_table *table, uint32_t uid) {
    uint32_t home = uid % RT_USERS, wanted = uid + 1;
    if (wanted == 0) return 0;
    for (uint32_t tries = 0; tries < RT_USER_TRIES; tries++) {
        uint32_t number = (home + tries) % RT_USERS;
        if (number == 0) continue;
        uint32_t found = GET(table->users[number]);
        if (found == 0 &&
            atomic_compare_exchange_strong(&table->users[number], &found, wanted))
            return number;
        if (found == wanted) return number; /* a failed exchange stores the found value in `found` */
    }
    for (uint32_t tries = 0; tries < RT_USER_TRIES; tries++) {
        uint32_t number = (home + (uid / RT_USERS + tries) % RT_USER_TRIES) % RT_USERS;
        if (replace_user(table, number, wanted)) return number;
    }
    return 0;
}
