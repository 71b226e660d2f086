/* Forwarding: requests to the daemon over the SEQPACKET socket, and the daemon's notices to the
 * kernel. relay.h describes what happens while there is no daemon.
 *
 * `lock` of the relay protects everything here: the socket, which this file owns, the queue of
 * requests, the notices, the copy of INIT and the ring of numbers. A message
 * belongs to its list; the code that unlinks it frees it.
 */
#define _GNU_SOURCE
#include "forwarding.h"

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* From linux/fuse.h of Linux 6.9; older headers lack them. */
#define NOTIFY_RESEND 7
#define INIT_EXT (1u << 30)
#define HAS_RESEND_HIGH (1u << (39 - 32))

#define NOTICE_BYTES 2048      /* a name has at most 1,024 */
/* The longest packet: the kernel needs contiguous memory for most of it. A request with 128 KiB of
 * data is one packet. */
#define PACKET_BYTES (132u << 10)

/* A request or notice in a list. Allocated by `message_of`. The daemon has got the first `sent`
 * bytes of it. */
struct message {
    struct message *next;
    size_t length, sent;
    char bytes[];
};

void init_forwarding(struct relay *relay) {
    relay->requests_fd = -1;
    relay->queue.last = &relay->queue.first;
    relay->notices.last = &relay->notices.first;
    pthread_mutex_init(&relay->lock, NULL);
    pthread_cond_init(&relay->has_queue, NULL);
    pthread_cond_init(&relay->has_daemon, NULL);
}

void end_forwarding(struct relay *relay) {
    pthread_mutex_lock(&relay->lock);
    if (relay->requests_fd >= 0) shutdown(relay->requests_fd, SHUT_RDWR);
    pthread_cond_signal(&relay->has_queue);
    pthread_cond_signal(&relay->has_daemon);
    pthread_mutex_unlock(&relay->lock);
}

/* Returns a copy of the bytes, which the caller owns. */
static struct message *message_of(const void *bytes, size_t length) {
    struct message *message = malloc(sizeof *message + length);
    if (message == NULL) abort(); /* a lost request would block its process for ever */
    message->next = NULL;
    message->length = length;
    message->sent = 0;
    memcpy(message->bytes, bytes, length);
    return message;
}

/* Appends a message to a list, which then owns it. The caller must hold `lock`. */
static void append(struct message_list *list, struct message *message) {
    *list->last = message;
    list->last = &message->next;
}

/* Unlinks the first message of a list, which the caller then owns; NULL if there is none. The
 * caller must hold `lock`. */
static struct message *pop(struct message_list *list) {
    struct message *message = list->first;
    if (message == NULL) return NULL;
    list->first = message->next;
    if (list->first == NULL) list->last = &list->first;
    return message;
}

/* Appends a copy of a request to the queue. The daemon has got the first `sent` bytes of it. The
 * caller must hold `lock`. */
static void enqueue(struct relay *relay, const void *bytes, size_t length, size_t sent) {
    struct message *message = message_of(bytes, length);
    message->sent = sent;
    append(&relay->queue, message);
    pthread_cond_signal(&relay->has_queue);
}

/* Returns how long the packets of a socket may be. A packet must fit into its buffer, which only
 * root can enlarge beyond a limit. */
static size_t packet_bytes_of(int fd) {
    int buffer_bytes = 0;
    socklen_t size = sizeof buffer_bytes;
    if (getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, &size) < 0) return PACKET_BYTES;
    size_t half = (size_t)buffer_bytes / 2;
    return half < PACKET_BYTES ? half : PACKET_BYTES; /* Linux gives a buffer at least 4,608 bytes */
}

/* Sends a request from `*sent` on, in packets, without waiting, and advances `*sent`. Returns 0, or
 * the errno of the packet that could not be sent. The caller must hold `lock`, so the packets of
 * one request follow one another. */
static int send_packets(struct relay *relay, const char *bytes, size_t length, size_t *sent) {
    while (*sent < length) {
        size_t left = length - *sent;
        ssize_t done = send(relay->requests_fd, bytes + *sent,
                            left < relay->packet_bytes ? left : relay->packet_bytes,
                            MSG_DONTWAIT | MSG_NOSIGNAL);
        if (done >= 0)
            *sent += (size_t)done;
        else if (errno != EINTR)
            return errno;
    }
    return 0;
}

/* Receives a notice from the daemon without waiting; NULL if there is none. The caller must hold
 * `lock`, and owns the result. */
static struct message *receive_notice(struct relay *relay) {
    char bytes[NOTICE_BYTES];
    if (relay->requests_fd < 0 || relay->says_nothing) return NULL;
    ssize_t length = recv(relay->requests_fd, bytes, sizeof bytes, MSG_DONTWAIT);
    if (length >= (ssize_t)sizeof(struct fuse_out_header)) return message_of(bytes, (size_t)length);
    if (length == 0 || (length < 0 && errno != EAGAIN && errno != EINTR)) relay->says_nothing = true;
    return NULL;
}

/* Closes the socket, after its notices have been saved. The caller must hold `lock`. */
static void lose_daemon(struct relay *relay) {
    if (relay->requests_fd < 0) return;
    struct message *notice;
    while ((notice = receive_notice(relay)) != NULL) append(&relay->notices, notice);
    shutdown(relay->requests_fd, SHUT_RDWR); /* wakes `pass_notices_on` from its poll */
    close(relay->requests_fd);
    relay->requests_fd = -1;
    /* No daemon has received the queued requests. The kernel sends them again if it can. */
    while (relay->can_resend && relay->queue.first != NULL) free(pop(&relay->queue));
    if (relay->queue.first != NULL) relay->queue.first->sent = 0; /* the next daemon gets all of it */
}

void forward(struct relay *relay, const void *bytes, size_t length) {
    const struct fuse_in_header *in = bytes;
    ADD(relay->table.header->forwarded, 1);
    waiting_note(&relay->waiting, in);
    pthread_mutex_lock(&relay->lock);
    if (!relay->can_resend) relay->uniques[relay->unique_count++ % UNIQUES] = in->unique;
    if (relay->requests_fd >= 0 && relay->queue.first == NULL) {
        size_t sent = 0;
        int error = send_packets(relay, bytes, length, &sent);
        if (error == EAGAIN || error == ENOBUFS)
            enqueue(relay, bytes, length, sent);
        else if (error != 0)
            lose_daemon(relay);
    } else if (relay->requests_fd >= 0 || !relay->can_resend) {
        enqueue(relay, bytes, length, 0);
    }
    if (relay->requests_fd < 0 && !relay->can_resend && relay->queue.first == NULL)
        enqueue(relay, bytes, length, 0); /* the send above found the daemon gone */
    pthread_mutex_unlock(&relay->lock);
}

void *send_queue(void *argument) {
    struct relay *relay = argument;
    pthread_mutex_lock(&relay->lock);
    while (!GET(relay->stopping)) {
        if (relay->queue.first == NULL || relay->requests_fd < 0) {
            pthread_cond_wait(&relay->has_queue, &relay->lock);
            continue;
        }
        struct message *message = relay->queue.first;
        int error = send_packets(relay, message->bytes, message->length, &message->sent);
        if (error == 0) {
            free(pop(&relay->queue));
        } else if (error == EAGAIN || error == ENOBUFS) {
            /* Short wait without the lock, because the socket may be replaced meanwhile. */
            struct pollfd room = {relay->requests_fd, POLLOUT, 0};
            pthread_mutex_unlock(&relay->lock);
            poll(&room, 1, 10);
            pthread_mutex_lock(&relay->lock);
        } else {
            lose_daemon(relay);
        }
    }
    pthread_mutex_unlock(&relay->lock);
    return NULL;
}

/* Returns the next notice, first those of a dead daemon. The caller must hold `lock`, and owns
 * it. */
static struct message *next_notice(struct relay *relay) {
    struct message *notice = pop(&relay->notices);
    return notice != NULL ? notice : receive_notice(relay);
}

/* The kernel drops a name only when no look-up is under way in its directory. Until then it blocks
 * the writer, in a sleep that not even SIGKILL ends. So the daemon must not be the writer: a
 * blocked daemon could not die, so no new daemon could start and answer that look-up. */
void *pass_notices_on(void *argument) {
    struct relay *relay = argument;
    pthread_mutex_lock(&relay->lock);
    while (!GET(relay->stopping)) {
        struct message *notice = next_notice(relay);
        struct pollfd said = {relay->requests_fd, POLLIN, 0};
        if (notice == NULL && (relay->requests_fd < 0 || relay->says_nothing)) {
            pthread_cond_wait(&relay->has_daemon, &relay->lock);
            continue;
        }
        pthread_mutex_unlock(&relay->lock);
        if (notice == NULL)
            poll(&said, 1, -1);
        else if (write(relay->device_fd, notice->bytes, notice->length) < 0) {
            /* ENOENT: the kernel has not cached the name */
        }
        free(notice);
        pthread_mutex_lock(&relay->lock);
    }
    pthread_mutex_unlock(&relay->lock);
    return NULL;
}

void keep_init(struct relay *relay, const char *request, size_t length) {
    const struct fuse_in_header *in = (const struct fuse_in_header *)request;
    const uint32_t *fields = (const uint32_t *)(in + 1); /* major, minor, readahead, flags, flags2 */
    pthread_mutex_lock(&relay->lock);
    free(relay->init);
    relay->init = message_of(request, length);
    if (length >= sizeof *in + 5 * sizeof *fields && (fields[3] & INIT_EXT))
        relay->can_resend = (fields[4] & HAS_RESEND_HIGH) != 0 && !relay->pretends_not;
    pthread_mutex_unlock(&relay->lock);
}

size_t relay_kept_init(struct relay *relay, char **bytes) {
    size_t length = 0;
    pthread_mutex_lock(&relay->lock);
    if (relay->init != NULL) {
        length = relay->init->length;
        *bytes = malloc(length);
        if (*bytes == NULL) abort();
        memcpy(*bytes, relay->init->bytes, length);
    }
    pthread_mutex_unlock(&relay->lock);
    return length;
}

int relay_adopt(struct relay *relay, const char *init, size_t length) {
    const struct fuse_in_header *in = (const struct fuse_in_header *)init;
    if (length < sizeof *in || in->opcode != FUSE_INIT || in->len != length) return -EINVAL;
    keep_init(relay, init, length);
    return 0;
}

bool relay_can_resend(struct relay *relay) {
    pthread_mutex_lock(&relay->lock);
    bool can_resend = relay->can_resend;
    pthread_mutex_unlock(&relay->lock);
    return can_resend;
}

int relay_attach(struct relay *relay, int requests_fd) {
    int error = 0, fd = dup(requests_fd);
    if (fd < 0) return -errno;
    pthread_mutex_lock(&relay->lock);
    lose_daemon(relay);
    if (relay->init != NULL) {
        struct message *init = message_of(relay->init->bytes, relay->init->length);
        ((struct fuse_in_header *)init->bytes)->unique = RELAY_INIT_UNIQUE;
        if (send(fd, init->bytes, init->length, MSG_NOSIGNAL) < 0) error = -errno;
        free(init);
    }
    if (error == 0) relay->requests_fd = fd;
    relay->packet_bytes = packet_bytes_of(fd);
    relay->says_nothing = false;
    pthread_cond_signal(&relay->has_queue);
    pthread_cond_signal(&relay->has_daemon);
    pthread_mutex_unlock(&relay->lock);
    if (error != 0) close(fd);
    return error;
}

void relay_detach(struct relay *relay) {
    pthread_mutex_lock(&relay->lock);
    lose_daemon(relay);
    pthread_mutex_unlock(&relay->lock);
}

bool relay_resend(struct relay *relay) {
    pthread_mutex_lock(&relay->lock);
    bool can_resend = relay->can_resend;
    uint64_t count = relay->unique_count < UNIQUES ? relay->unique_count : UNIQUES;
    /* No daemon has received the queued requests yet. The next one will answer them. */
    if (!can_resend) {
        for (uint64_t i = 0; i < count; i++) {
            bool is_queued = false;
            for (struct message *m = relay->queue.first; m != NULL && !is_queued; m = m->next)
                is_queued = ((struct fuse_in_header *)m->bytes)->unique == relay->uniques[i];
            if (!is_queued) reply(relay, relay->uniques[i], -EIO, NULL, 0);
        }
        relay->unique_count = 0;
    }
    pthread_mutex_unlock(&relay->lock);
    if (can_resend) {
        struct fuse_out_header out = {sizeof out, NOTIFY_RESEND, 0};
        if (write(relay->device_fd, &out, sizeof out) < 0) return false;
    }
    return can_resend;
}

void relay_pretend_no_resend(struct relay *relay) {
    pthread_mutex_lock(&relay->lock);
    relay->pretends_not = true;
    relay->can_resend = false;
    pthread_mutex_unlock(&relay->lock);
}
