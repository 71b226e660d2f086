/* Whole answers of a server for the HTTP engine, through libcurl and a real connection. The first
 * byte of an input chooses the request and the decision about an answer that is held; all others
 * are what the server sends before it closes. With libFuzzer (python -m tests.fuzz http_engine) or,
 * with REPLAY defined, a program that replays files and a few mutations of each. */
#include "../../src/cachefs/origin/http/engine.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define ROOM_BYTES 100
#define AT_A_TIME 3
#define SERVERS 12
#define MOST_WAIT_MS 20000

enum { HEAD = 1, PUT = 2, SINK = 4, EXPECTS = 8, REFUSES = 16, SKIPS = 32, STOPS = 64, CANCELS = 128 };

static struct engine *engine;
static char url[64];
static int listener;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint8_t *answer; /* protected by the lock, as its size */
static size_t answer_bytes;
static struct transfer *numbers[AT_A_TIME];
static pthread_t feeders[AT_A_TIME];

static void serve_one(int peer) {
    char request[4096];
    if (recv(peer, request, sizeof request, 0) > 0) {
        pthread_mutex_lock(&lock);
        char *copy = malloc(answer_bytes + 1);
        size_t count = answer_bytes, sent = 0;
        memcpy(copy, answer, count);
        pthread_mutex_unlock(&lock);
        while (sent < count) {
            ssize_t done = send(peer, copy + sent, count - sent, MSG_NOSIGNAL);
            if (done <= 0) break;
            sent += done;
        }
        free(copy);
        shutdown(peer, SHUT_WR);
        /* The engine may keep the connection. */
        struct timeval limit = {.tv_usec = 1000};
        setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        while (recv(peer, request, sizeof request, 0) > 0) {}
    }
    close(peer);
}

static void *serve(void *none) {
    (void)none;
    for (;;) {
        int peer = accept(listener, NULL, NULL);
        if (peer >= 0) serve_one(peer);
    }
    return NULL;
}

static void set_up(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    pthread_t thread;
    int error;
    if (engine != NULL) return;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&address, size) < 0 || listen(listener, 64) < 0 ||
        getsockname(listener, (struct sockaddr *)&address, &size) < 0)
        abort();
    snprintf(url, sizeof url, "http://127.0.0.1:%d/b/key", ntohs(address.sin_port));
    for (int at = 0; at < SERVERS; at++)
        if (pthread_create(&thread, NULL, serve, NULL) != 0) abort();
    engine = engine_new(2, &error);
    if (engine == NULL) abort();
}

static void expect(struct transfer *transfer, const char *name, const char *value) {
    transfer->expected[transfer->expected_count].name = strdup(name);
    transfer->expected[transfer->expected_count++].value = strdup(value);
}

/* Give a body byte by byte, until its transfer has ended. */
static void *feed(void *data) {
    struct transfer *transfer = data;
    int64_t offset = 0;
    while ((offset = transfer_wait_for_turn(transfer, offset)) >= 0)
        if (transfer_give(transfer, offset, transfer->body + offset, 1)) {
            engine_feed(transfer);
            offset++;
        }
    return NULL;
}

static void begin(uint8_t options, int number) {
    struct transfer *transfer = transfer_new();
    numbers[number] = transfer;
    transfer->method = strdup(options & HEAD ? "HEAD" : options & PUT ? "PUT" : "GET");
    transfer->url = strdup(url);
    transfer->headers = curl_slist_append(NULL, "authorization: secret");
    transfer->most_bytes = 1000;
    transfer->connect_ms = transfer->idle_ms = transfer->total_ms = MOST_WAIT_MS / 2;
    if (options & PUT) {
        transfer->has_body = true;
        transfer->is_fed = options & STOPS;
        transfer->body = (const uint8_t *)"body";
        transfer->body_bytes = 4;
    }
    if (options & SINK) {
        transfer->has_sink = transfer->wants_md5 = true;
        transfer->room = malloc(ROOM_BYTES);
        transfer->room_bytes = ROOM_BYTES;
    }
    if (options & EXPECTS) {
        transfer->expected_status = 200;
        expect(transfer, "etag:", "\"v\"");
        expect(transfer, "content-length:", "100");
    }
    engine_start(engine, transfer);
    if (transfer->is_fed && pthread_create(&feeders[number], NULL, feed, transfer) != 0) abort();
    if (options & CANCELS && options & REFUSES) engine_cancel(transfer);
}

static void check(struct transfer *transfer) {
    size_t filled = atomic_load(&transfer->filled);
    if (filled > ROOM_BYTES || transfer->answer.size_bytes > MOST_ERROR_BYTES) abort();
    if (transfer->status < 300 && transfer->answer.size_bytes > 1000) abort();
    if (transfer->head.size_bytes > MOST_HEAD_BYTES) abort();
    if (transfer->end == END_DONE && (transfer->status < 200 || transfer->status > 999)) abort();
    if (transfer->end > END_FAILED) abort();
    /* The server sends all at once and closes, so there is nothing to wait for. */
    if (transfer->end == END_TIMED_OUT) abort();
    transfer_take_no_more(transfer);
    for (int at = 0; at < AT_A_TIME && transfer->is_fed; at++)
        if (numbers[at] == transfer) pthread_join(feeders[at], NULL);
    free(transfer->room);
    transfer_free(transfer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 1) return 0;
    set_up();
    pthread_mutex_lock(&lock);
    free(answer);
    answer_bytes = size - 1;
    answer = malloc(size);
    memcpy(answer, data + 1, answer_bytes);
    pthread_mutex_unlock(&lock);
    uint8_t options = data[0];
    for (int at = 0; at < AT_A_TIME; at++)
        begin(options, at);
    for (int left = AT_A_TIME; left;) {
        struct pollfd readable = {.fd = engine_fd(engine), .events = POLLIN};
        struct transfer *transfer;
        bool is_ended;
        int count;
        while ((count = poll(&readable, 1, MOST_WAIT_MS)) < 0 && errno == EINTR) {}
        if (count != 1) abort();
        while ((transfer = engine_collect(engine, &is_ended)) != NULL) {
            if (is_ended) {
                check(transfer);
                left--;
            } else if (options & REFUSES)
                engine_cancel(transfer);
            else
                engine_go_on(transfer, options & SKIPS ? 3 : 0, options & STOPS);
            if (!is_ended && options & CANCELS) engine_cancel(transfer);
        }
    }
    return 0;
}

#ifdef REPLAY
static uint8_t input[1 << 17];

static void mutated(size_t size, unsigned seed) {
    srand(seed);
    for (int at = 0; at < 4 && size; at++)
        input[rand() % size] = (uint8_t)rand();
    LLVMFuzzerTestOneInput(input, size);
}

int main(int count, char **files) {
    for (int at = 1; at < count; at++) {
        FILE *file = fopen(files[at], "rb");
        if (file == NULL) return 1;
        size_t size = fread(input, 1, sizeof input, file);
        for (int options = 0; options < 256; options += 4) {
            input[0] = (uint8_t)options;
            LLVMFuzzerTestOneInput(input, size);
        }
        for (unsigned seed = 0; seed < 30; seed++) {
            rewind(file);
            size = fread(input, 1, sizeof input, file);
            mutated(size, seed);
        }
        fclose(file);
    }
    engine_free(engine, NULL, NULL);
    return 0;
}
#endif
