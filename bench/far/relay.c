/* A far object store in front of a near one: relay LISTEN_PORT TARGET_PORT DELAY_MS MB_PER_S
 *
 * Relays TCP connections on 127.0.0.1. It forwards the server's data DELAY_MS later, at most
 * MB_PER_S per connection (10^6 bytes per second; 0 means no limit). It forwards the client's data
 * at once, so DELAY_MS is the round trip. It uses one thread, prints its port and serves until its
 * standard input ends.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PIECE_BYTES = 64 << 10, MOST_QUEUED_BYTES = 8 << 20, MOST_PAIRS = 1024 };

/* Data from the server that is not sent to the client yet; a list in the order of `due_ns`. */
struct piece {
    struct piece *next;
    int64_t due_ns;
    size_t start, end;
    char bytes[PIECE_BYTES];
};

struct pair {
    int client, server;             /* -1: closed */
    int server_ended;               /* end of file from the server; close when the queue is empty */
    int64_t free_ns;                /* when the line has carried all data so far */
    size_t queued_bytes;
    struct piece *first, *last;     /* to the client */
    char up[PIECE_BYTES];           /* to the server */
    size_t up_start, up_end;
};

static struct pair *pairs[MOST_PAIRS];
static int pair_count;
static int64_t delay_ns;
static double ns_per_byte;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void prepare(int fd)
{
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd, F_SETFL, O_NONBLOCK);
}

static void close_pair(struct pair *pair)
{
    close(pair->client);
    close(pair->server);
    pair->client = pair->server = -1;
    while (pair->first != NULL) {
        struct piece *piece = pair->first;
        pair->first = piece->next;
        free(piece);
    }
}

static void accept_one(int listener, int target_port)
{
    int client = accept(listener, NULL, NULL);
    if (client < 0)
        return;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(target_port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct pair *pair = calloc(1, sizeof *pair);
    if (pair == NULL || server < 0 || pair_count == MOST_PAIRS
        || connect(server, (struct sockaddr *)&address, sizeof address) != 0) {
        close(client);
        close(server);
        free(pair);
        return;
    }
    prepare(client);
    prepare(server);
    pair->client = client;
    pair->server = server;
    pairs[pair_count++] = pair;
}

/* Read the server's data and record when it is due. */
static void take(struct pair *pair)
{
    while (pair->queued_bytes < MOST_QUEUED_BYTES) {
        struct piece *piece = malloc(sizeof *piece);
        if (piece == NULL)
            abort();
        ssize_t count = recv(pair->server, piece->bytes, PIECE_BYTES, 0);
        if (count <= 0) {
            free(piece);
            if (count == 0 || (errno != EAGAIN && errno != EINTR))
                pair->server_ended = 1;
            return;
        }
        int64_t arrives_ns = now_ns() + delay_ns;
        int64_t begins_ns = pair->free_ns > arrives_ns ? pair->free_ns : arrives_ns;
        pair->free_ns = begins_ns + (int64_t)(count * ns_per_byte);
        piece->due_ns = pair->free_ns;
        piece->start = 0;
        piece->end = count;
        piece->next = NULL;
        if (pair->first == NULL)
            pair->first = piece;
        else
            pair->last->next = piece;
        pair->last = piece;
        pair->queued_bytes += count;
    }
}

/* Send the client the due data. Returns -1 if it has closed, 1 if it can't take more now. */
static int give(struct pair *pair, int64_t now)
{
    while (pair->first != NULL && pair->first->due_ns <= now) {
        struct piece *piece = pair->first;
        ssize_t count = send(pair->client, piece->bytes + piece->start,
                             piece->end - piece->start, MSG_NOSIGNAL);
        if (count < 0)
            return errno == EAGAIN || errno == EINTR ? 1 : -1;
        piece->start += count;
        pair->queued_bytes -= count;
        if (piece->start == piece->end) {
            pair->first = piece->next;
            free(piece);
        }
    }
    return pair->first == NULL && pair->server_ended ? -1 : 0;
}

/* Forward the client's data. Returns -1 if either side has closed. */
static int hand_up(struct pair *pair)
{
    if (pair->up_start == pair->up_end) {
        ssize_t count = recv(pair->client, pair->up, sizeof pair->up, 0);
        if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR))
            return -1;
        pair->up_start = 0;
        pair->up_end = count < 0 ? 0 : count;
    }
    while (pair->up_start < pair->up_end) {
        ssize_t count = send(pair->server, pair->up + pair->up_start,
                             pair->up_end - pair->up_start, MSG_NOSIGNAL);
        if (count < 0)
            return errno == EAGAIN || errno == EINTR ? 0 : -1;
        pair->up_start += count;
    }
    return 0;
}

static int serve_pair(struct pair *pair, short client_events, short server_events, int *is_full)
{
    if (server_events)
        take(pair);
    if (client_events & (POLLIN | POLLHUP | POLLERR) || pair->up_start < pair->up_end)
        if (hand_up(pair) < 0)
            return -1;
    int result = give(pair, now_ns());
    *is_full = result == 1;
    return result < 0 ? -1 : 0;
}

static void serve(int listener, int target_port)
{
    static struct pollfd fds[2 + 2 * MOST_PAIRS];
    static int is_full[MOST_PAIRS];
    for (;;) {
        int64_t next_ns = INT64_MAX;
        fds[0] = (struct pollfd){.fd = listener, .events = POLLIN};
        fds[1] = (struct pollfd){.fd = 0, .events = POLLIN};
        for (int i = 0; i < pair_count; i++) {
            struct pair *pair = pairs[i];
            int waits_up = pair->up_start < pair->up_end;
            short client = (waits_up ? 0 : POLLIN) | (is_full[i] ? POLLOUT : 0);
            short server = (waits_up ? POLLOUT : 0);
            if (!pair->server_ended && pair->queued_bytes < MOST_QUEUED_BYTES)
                server |= POLLIN;
            fds[2 + 2 * i] = (struct pollfd){.fd = pair->client, .events = client};
            fds[3 + 2 * i] = (struct pollfd){.fd = server ? pair->server : -1, .events = server};
            if (pair->first != NULL && !is_full[i] && pair->first->due_ns < next_ns)
                next_ns = pair->first->due_ns;
        }
        struct timespec wait = {0, 0};
        int64_t left_ns = next_ns == INT64_MAX ? INT64_MAX : next_ns - now_ns();
        if (left_ns > 0 && left_ns != INT64_MAX)
            wait = (struct timespec){left_ns / 1000000000LL, left_ns % 1000000000LL};
        int count = pair_count;
        if (ppoll(fds, 2 + 2 * count, left_ns == INT64_MAX ? NULL : &wait, NULL) < 0)
            continue;
        if (fds[1].revents)
            return;
        for (int i = count - 1; i >= 0; i--) {
            if (serve_pair(pairs[i], fds[2 + 2 * i].revents, fds[3 + 2 * i].revents,
                           &is_full[i]) < 0) {
                close_pair(pairs[i]);
                free(pairs[i]);
                pairs[i] = pairs[--pair_count];
                is_full[i] = is_full[pair_count];
                is_full[pair_count] = 0;
            }
        }
        if (fds[0].revents)
            accept_one(listener, target_port);
    }
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "relay LISTEN_PORT TARGET_PORT DELAY_MS MB_PER_S\n");
        return 2;
    }
    delay_ns = (int64_t)(atof(argv[3]) * 1e6);
    ns_per_byte = atof(argv[4]) > 0 ? 1e3 / atof(argv[4]) : 0;
    signal(SIGPIPE, SIG_IGN);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0
        || listen(listener, 512) != 0
        || getsockname(listener, (struct sockaddr *)&address, &length) != 0) {
        perror("relay");
        return 1;
    }
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    serve(listener, atoi(argv[2]));
    return 0;
}
