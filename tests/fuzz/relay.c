/* Kernel requests and hostile tables for the relay: its sources as they are, without its threads.
 * `relay_sources` in engine.py says what to link. An input is a list of steps; see `run`. With
 * libFuzzer (python -m tests.fuzz relay) or, with REPLAY defined, a program that replays files and a
 * few mutations of each. */
#include "../../src/cachefs/fuse/relay/forwarding.c"
#include "../../src/cachefs/fuse/relay/relay.c"
#include "../../src/cachefs/fuse/relay/reads.h"
#include "../../src/cachefs/fuse/relay/sums.h"

#include <stdio.h>
#include <sys/mman.h>

#define ENTRIES 64
#define SLAB_BYTES (3u << 20)
#define STEPS 16
#define FILES 16 /* numbers of files that inputs use; all others are out of range */

struct input {
    const uint8_t *bytes;
    size_t left;
};

static uint64_t number(struct input *in, unsigned size) {
    uint64_t value = 0;
    for (unsigned i = 0; i < size && in->left > 0; i++, in->left--)
        value |= (uint64_t)*in->bytes++ << (8 * i);
    return value;
}

static void drain(int fd) {
    static char buffer[REQUEST_BYTES];
    while (recv(fd, buffer, sizeof buffer, MSG_DONTWAIT) > 0) {}
}

static struct relay *relay;
static struct rt_table writer; /* the daemon's mapping of the same table */
static char zeros[BLOCK_BYTES];  /* what the slab holds */
static int device[2], requests[2], table_fd, slab_fd;
static uint64_t latest = 2; /* number of a READ that came to the daemon */

static void set_up(void) {
    int error;
    if (relay != NULL) return;
    table_fd = rt_create(ENTRIES);
    slab_fd = memfd_create("slab", 0);
    if (table_fd < 0 || slab_fd < 0 || ftruncate(slab_fd, SLAB_BYTES) < 0 ||
        rt_open(&writer, table_fd) != 0 || socketpair(AF_UNIX, SOCK_SEQPACKET, 0, device) < 0)
        abort();
    relay = relay_new(device[0], table_fd, 4, false, true, &error);
    if (relay == NULL || reads_init() < 0) abort();
    reads_begin(device[0]);
}

/* One request as the kernel sends it: a header whose fields are those of the input, then a body. */
static void request(struct input *in, struct worker *worker) {
    struct fuse_in_header *header = (struct fuse_in_header *)worker->request;
    static const uint32_t opcodes[] = {FUSE_READ,    FUSE_READDIR,      FUSE_INIT,  FUSE_OPEN,
                                       FUSE_FORGET,  FUSE_BATCH_FORGET, FUSE_IOCTL, FUSE_INTERRUPT,
                                       FUSE_LOOKUP,  FUSE_READDIRPLUS,  FUSE_FLUSH, FUSE_DESTROY,
                                       FUSE_RELEASE};
    uint8_t opcode = (uint8_t)number(in, 1);
    size_t body = number(in, 1);
    memset(worker->request, 0xa5, sizeof *header + 4096); /* what an earlier request left */
    header->pid = 0;
    header->opcode = opcode < sizeof opcodes / sizeof *opcodes ? opcodes[opcode] : opcode;
    header->unique = number(in, 2);
    header->nodeid = number(in, 2);
    header->uid = (uint32_t)number(in, 4);
    header->len = (uint32_t)(sizeof *header + body);
    for (size_t i = 0; i < body; i++) worker->request[sizeof *header + i] = (char)number(in, 1);
    worker->leads = true;
    handle(worker, sizeof *header + body);
}

/* A READ of a block that may be cached. */
static void read_block(struct input *in, struct worker *worker) {
    struct fuse_in_header *header = (struct fuse_in_header *)worker->request;
    struct fuse_read_in *body = (struct fuse_read_in *)(header + 1);
    memset(worker->request, 0, sizeof *header + sizeof *body);
    header->len = sizeof *header + sizeof *body;
    header->opcode = FUSE_READ;
    header->unique = 2;
    header->nodeid = number(in, 1);
    header->uid = (uint32_t)number(in, 4);
    body->offset = number(in, 8);
    body->size = (uint32_t)number(in, 4);
    worker->leads = true;
    handle(worker, header->len);
}

static void attach(void) {
    if (requests[0] > 0) close(requests[0]);
    if (requests[1] > 0) close(requests[1]);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, requests) < 0) abort();
    relay_attach(relay, requests[0]);
}

static void start_anew(void) {
    memset(writer.map, 0, sizeof(struct rt_header));
    struct rt_header header = {.format = RT_FORMAT, .ways = RT_WAYS, .entry_count = ENTRIES};
    memcpy(header.magic, RT_MAGIC, sizeof header.magic);
    header.total_bytes = writer.total_bytes;
    *writer.header = header;
    rt_begin_epoch(&writer);
    /* OPENs are answered, but the registration of a file fails: the device is a socket. */
    PUT(writer.header->opens_state, RT_OPENS_ON);
    PUT(writer.header->passes_through, 1);
    memset((void *)writer.users, 0, RT_USERS * sizeof *writer.users);
    for (uint32_t file = 0; file < 4; file++) {
        relay_set_file(relay, file, dup(slab_fd), file & 1);
        rt_revive(&writer, file);
        rt_mark_whole(&writer, file, true);
    }
    relay_detach(relay);
    pthread_mutex_lock(&relay->lock);
    while (relay->queue.first != NULL) free(pop(&relay->queue));
    free(relay->init);
    relay->init = NULL;
    relay->can_resend = relay->pretends_not = false;
    relay->unique_count = 0;
    pthread_mutex_unlock(&relay->lock);
}

static void run(struct input *in) {
    struct worker *worker = &relay->workers[0];
    for (unsigned steps = 0; in->left > 0 && steps < 256; steps++) {
        switch (number(in, 1) % STEPS) {
        case 0: /* bytes anywhere in the header */
        case 1: { /* or in the entries, whatever they say then */
            bool is_entry = in->bytes[-1] % STEPS == 1;
            char *base = is_entry ? (char *)writer.entries : (char *)writer.map;
            size_t limit = is_entry ? ENTRIES * sizeof(struct rt_entry) : sizeof(struct rt_header);
            size_t at = number(in, 2) % limit, count = number(in, 1);
            for (; count > 0 && at < limit; count--, at++) base[at] = (char)number(in, 1);
            break;
        }
        case 2: { /* an entry that is right but for what the input says */
            uint32_t block = (uint32_t)number(in, 1), file = (uint32_t)number(in, 1) % 8;
            uint64_t ino = number(in, 1);
            uint32_t slot = (uint32_t)number(in, 4), length = (uint32_t)number(in, 4);
            uint8_t flags = (uint8_t)number(in, 1); /* 2: a checksum of the input's own */
            uint64_t checksum = flags & 2 || length > BLOCK_BYTES ? number(in, 8) : sum_of(zeros, length);
            rt_publish(&writer, ino, block, file, slot, length, flags & 1, checksum);
            break;
        }
        case 3: request(in, worker); break;
        case 4: read_block(in, worker); break;
        case 5: {
            uint32_t file = (uint32_t)number(in, 1) % 8;
            if (number(in, 1) & 1)
                rt_withdraw_file(&writer, file);
            else
                rt_withdraw(&writer, file, (uint32_t)number(in, 4));
            break;
        }
        case 6: /* the daemon takes what was hit */
            for (unsigned i = 0; i < 64 && rt_drain(&writer) != NULL; i++) {}
            break;
        case 7: attach(); break;
        case 8: relay_detach(relay); break;
        case 9: relay_resend(relay); break;
        case 10: { /* another process opens the table, as it is now */
            struct rt_table other;
            if (rt_open(&other, table_fd) == 0) rt_close(&other);
            break;
        }
        case 11: { /* files of the relay */
            uint32_t file = (uint32_t)number(in, 4);
            if (file < RT_FILES) file %= FILES;
            if (number(in, 1) & 1)
                relay_set_file(relay, file, dup(slab_fd), number(in, 1) & 1);
            else
                relay_close_file(relay, file);
            break;
        }
        case 12: { /* the daemon's share of READs: some at a time, so that many are deferred */
            struct fuse_in_header *header = (struct fuse_in_header *)worker->request;
            struct fuse_read_in *body = (struct fuse_read_in *)(header + 1);
            memset(worker->request, 0, 4096);
            header->opcode = FUSE_READ;
            header->pid = (uint32_t)number(in, 1) ? 0x7ffffff0u : 0;
            body->fh = number(in, 2) << RT_INO_BITS;
            size_t length = number(in, 1) & 1 ? 80 : number(in, 1);
            if (length < sizeof *header) length = sizeof *header;
            for (uint64_t count = number(in, 1); count > 0; count--) {
                header->unique = ++latest;
                reads_admit(worker->request, length);
            }
            break;
        }
        case 13: { /* answers, and whose turn it is then */
            uint64_t unique = latest - number(in, 2);
            for (uint64_t count = number(in, 1); count > 0; count--) reads_answered(unique--);
            while (reads_take(worker->request) > 0) {}
            break;
        }
        case 14: {
            uint32_t user = (uint32_t)number(in, 4), most = (uint32_t)number(in, 2);
            reads_share(user, most, number(in, 1) & 1);
            break;
        }
        case 15: { /* checksums of parts */
            char *base = (char *)writer.sums;
            size_t limit = writer.sums_count * sizeof *writer.sums;
            size_t at = number(in, 4) % limit, count = number(in, 1);
            for (; count > 0 && at < limit; count--, at++) base[at] = (char)number(in, 1);
            break;
        }
        }
        drain(device[1]);
        if (requests[1] > 0) drain(requests[1]);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    struct input in = {bytes, size};
    uint64_t before = latest;
    set_up();
    start_anew();
    run(&in);
    for (uint32_t file = 0; file < FILES; file++) relay_close_file(relay, file);
    while (reads_take(relay->workers[0].request) > 0) {}
    for (unsigned tries = 0; tries < 16 && latest > before; tries++) { /* nothing stays deferred */
        for (uint64_t unique = before + 1; unique <= latest; unique++) reads_answered(unique);
        while (reads_take(relay->workers[0].request) > 0) {}
    }
    return 0;
}

#ifdef REPLAY
#define MUTATIONS 40

int main(int count, char **names) {
    static uint8_t bytes[1 << 16];
    uint64_t state = 1;
    for (int i = 1; i < count; i++) {
        FILE *file = fopen(names[i], "rb");
        if (file == NULL) return 2;
        size_t size = fread(bytes, 1, sizeof bytes, file);
        fclose(file);
        LLVMFuzzerTestOneInput(bytes, size);
        for (int j = 0; j < MUTATIONS && size > 0; j++) {
            for (uint64_t k = (state >> 60) % 4 + 1; k > 0; k--) {
                state = state * 6364136223846793005ull + 1442695040888963407ull;
                bytes[(state >> 33) % size] = (uint8_t)(state >> 20);
            }
            LLVMFuzzerTestOneInput(bytes, size);
        }
    }
    return 0;
}
#endif
