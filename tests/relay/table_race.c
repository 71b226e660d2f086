/* Readers beside a writer that moves blocks about as fast as it can: nobody may ever be given
 * another block's bytes. Built with and without ThreadSanitizer by test_table_race.py.
 *
 * A "slab file" is memory here; its words are written and read one by one, as atomics without any
 * order of their own, so that a reader who copies while the writer writes gets a mixture.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "table.h"

#define READERS 3
#define FILES 4
#define SLOTS 32
#define WORDS 64
#define INODES 96 /* more than slots, so that some are always absent */

static struct rt_table table;
static _Atomic uint64_t slab[FILES][SLOTS][WORDS];
static _Atomic uint32_t shift; /* every daemon has other files by the same numbers */
static _Atomic bool stop;
static _Atomic uint64_t served, refused, wrong, absent;

static uint64_t random_of(uint64_t *state) { /* xorshift64 */
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static _Atomic uint64_t *words_of(uint32_t file, uint32_t slot) {
    return slab[(file + atomic_load(&shift)) % FILES][slot];
}

static void *read_blocks(void *argument) {
    uint64_t state = 1 + (uint64_t)(uintptr_t)argument;
    while (!atomic_load(&stop)) {
        uint64_t ino = 1 + random_of(&state) % INODES, copy[WORDS];
        struct rt_found found;
        if (!rt_find(&table, ino, 7, &found)) {
            atomic_fetch_add(&absent, 1);
            continue;
        }
        for (int i = 0; i < WORDS; i++)
            copy[i] = atomic_load_explicit(&words_of(found.file, found.slot)[i],
                                           memory_order_relaxed);
        if (!rt_still(&table, &found)) {
            atomic_fetch_add(&refused, 1);
            continue;
        }
        rt_note_hit(&table, &found, WORDS * 8);
        atomic_fetch_add(&served, 1);
        for (int i = 0; i < WORDS; i++)
            if (copy[i] != ino) atomic_fetch_add(&wrong, 1);
        if (found.length != 1000 + ino || !found.is_last) atomic_fetch_add(&wrong, 1);
    }
    return NULL;
}

static void fill(uint32_t file, uint32_t slot, uint64_t ino) {
    for (int i = 0; i < WORDS; i++)
        atomic_store_explicit(&words_of(file, slot)[i], ino, memory_order_relaxed);
}

static void check_one_by_one(void) {
    struct rt_found found;
    rt_revive(&table, 2);
    rt_publish(&table, 5, 7, 2, 3, 1005, true, 0);
    if (!rt_find(&table, 5, 7, &found) || found.file != 2 || found.slot != 3) abort();
    if (rt_find(&table, 5, 8, &found) || rt_find(&table, 6, 7, &found)) abort();
    rt_find(&table, 5, 7, &found);
    rt_withdraw(&table, 2, 3);
    if (rt_still(&table, &found) || rt_find(&table, 5, 7, &found)) abort();
    rt_publish(&table, 5, 7, 2, 3, 1005, true, 0);
    rt_find(&table, 5, 7, &found);
    rt_withdraw_file(&table, 2);
    if (rt_still(&table, &found) || rt_find(&table, 5, 7, &found)) abort();
    rt_revive(&table, 2);
    if (!rt_find(&table, 5, 7, &found)) abort();
    rt_begin_epoch(&table);
    if (rt_still(&table, &found) || rt_find(&table, 5, 7, &found)) abort();
}

int main(int argc, char **argv) {
    double seconds = argc > 1 ? atof(argv[1]) : 1;
    uint64_t state = 42, epochs = 0, drained = 0, turns = 0;
    pthread_t readers[READERS];
    uint32_t base = 0; /* numbers of files are never used again, their memory is */
    int fd = rt_create(64);
    if (fd < 0 || rt_open(&table, fd) < 0) return 2;
    rt_begin_epoch(&table);
    check_one_by_one();
    for (uint32_t file = 0; file < FILES; file++) rt_revive(&table, base + file);
    for (int i = 0; i < READERS; i++)
        pthread_create(&readers[i], NULL, read_blocks, (void *)(uintptr_t)(i + 1));
    time_t end = time(NULL) + (time_t)(seconds + 1);
    for (; time(NULL) < end; turns++) {
        uint64_t what = random_of(&state);
        uint32_t file = base + (uint32_t)(what >> 8) % FILES;
        uint32_t slot = (uint32_t)(what >> 16) % SLOTS;
        uint64_t ino = 1 + (what >> 32) % INODES;
        if (what % 1024 == 0) { /* a daemon is started anew */
            rt_begin_epoch(&table);
            atomic_fetch_add(&shift, 1);
            for (uint32_t f = 0; f < FILES; f++) rt_revive(&table, base + f);
            epochs++;
        } else if (what % 512 == 1) { /* a slab becomes another file */
            rt_withdraw_file(&table, file);
            for (uint32_t s = 0; s < SLOTS; s++) fill(file, s, 0);
            for (uint32_t f = 0; f < FILES; f++)
                if (base + f != file) rt_withdraw_file(&table, base + f);
            base = (base + FILES) % (RT_FILES - FILES);
            for (uint32_t f = 0; f < FILES; f++) rt_revive(&table, base + f);
            continue;
        }
        rt_withdraw(&table, file, slot);
        fill(file, slot, ino);
        rt_publish(&table, ino, 7, file, slot, (uint32_t)(1000 + ino), true, 0);
        while (rt_drain(&table) != NULL) drained++;
    }
    atomic_store(&stop, true);
    for (int i = 0; i < READERS; i++) pthread_join(readers[i], NULL);
    while (rt_drain(&table) != NULL) drained++;
    printf("turns %llu epochs %llu served %llu refused %llu absent %llu drained %llu wrong %llu\n",
           (unsigned long long)turns, (unsigned long long)epochs, (unsigned long long)served,
           (unsigned long long)refused, (unsigned long long)absent, (unsigned long long)drained,
           (unsigned long long)wrong);
    rt_close(&table);
    close(fd);
    return wrong ? 1 : served && refused && drained ? 0 : 3;
}
