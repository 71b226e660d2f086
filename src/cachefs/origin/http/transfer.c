/* One transfer in its thread: the options of libcurl, its callbacks, and the bounds of an answer. */
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#if LIBCURL_VERSION_NUM < LEAST_LIBCURL
#error "libcurl 7.87 or newer is needed; the headers are those of an older one"
#endif

#define RECEIVE_BYTES (64L << 10)
#define LARGE_BYTES (1 << 20) /* from this size on, more bytes are received at a time */
#define LARGE_RECEIVE_BYTES (512L << 10)
#define MOST_LENGTH_DIGITS 18 /* of a length that fits into 64 bits */
#define PROXY_REFUSES 407 /* without a login */
#define UPLOAD_BYTES (256L << 10)
#define MOST_NAME_AGE_S 1L /* a new connection looks up the host anew, as a store may have moved */
#define EARLY_BYTES (16 << 10)

uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Make `text` large enough for `capacity` bytes. */
static bool reserve(struct text *text, size_t capacity) {
    if (capacity <= text->capacity) return true;
    char *larger = realloc(text->bytes, capacity);
    if (larger == NULL) return false;
    text->bytes = larger;
    text->capacity = capacity;
    return true;
}

static bool append(struct text *text, const char *bytes, size_t count) {
    if (text->capacity - text->size_bytes < count) {
        size_t capacity = text->capacity ? text->capacity : 1024;
        while (capacity - text->size_bytes < count)
            capacity *= 2;
        if (!reserve(text, capacity)) return false;
    }
    memcpy(text->bytes + text->size_bytes, bytes, count);
    text->size_bytes += count;
    return true;
}

/* The transfer ends with this, whatever libcurl says of it. */
static size_t fail(struct transfer *transfer, enum end end, long detail) {
    transfer->is_decided = true;
    transfer->end = end;
    transfer->detail = detail;
    return 0;
}

static bool is_object(const struct transfer *transfer) {
    return transfer->has_sink && (transfer->status == 200 || transfer->status == 206);
}

/* Whether a header has this name, which ends with a colon. If so, set its value without spaces. */
static bool has_name(const char *line, size_t count, const char *name, const char **value,
                     size_t *length) {
    size_t size = strlen(name);
    if (count < size || strncasecmp(line, name, size)) return false;
    const char *first = line + size, *last = line + count;
    while (first < last && strchr(" \t", *first))
        first++;
    while (last > first && strchr(" \t\r\n", last[-1]))
        last--;
    *value = first;
    *length = last - first;
    return true;
}

static bool is_word(const char *value, size_t length, const char *word) {
    return length == strlen(word) && !strncasecmp(value, word, length);
}

/* Whether the head has each header that is expected, with this value each time. */
static bool has_expected(const struct transfer *transfer) {
    const char *line = transfer->head.bytes, *end = line + transfer->head.size_bytes;
    unsigned seen = 0;
    for (const char *next; line < end && (next = memchr(line, '\n', end - line)); line = next + 1) {
        const char *value;
        size_t count = next - line, length;
        if (has_name(line, count, "x-goog-stored-content-encoding:", &value, &length))
            return false; /* it may have been unpacked on the way */
        for (int at = 0; at < transfer->expected_count; at++) {
            const struct expected *each = &transfer->expected[at];
            if (!has_name(line, count, each->name, &value, &length)) continue;
            if (strlen(each->value) != length || memcmp(each->value, value, length)) return false;
            seen |= 1u << at;
        }
    }
    return seen == (1u << transfer->expected_count) - 1;
}

/* Count the bytes and lines of a head or of the trailers. Return whether they are within bounds. */
static bool is_bounded(struct transfer *transfer, size_t count) {
    transfer->line_bytes += count;
    return ++transfer->lines <= MOST_HEAD_LINES && transfer->line_bytes <= MOST_HEAD_BYTES;
}

/* Read the line with the status, which each head begins with. */
static bool begin_head(struct transfer *transfer, const char *line, size_t count) {
    if (++transfer->heads > 1 + MOST_INTERIM_HEADS || count < 12) return false;
    transfer->head.size_bytes = transfer->line_bytes = 0;
    transfer->lengths = 0;
    transfer->told_bytes = 0;
    transfer->status = 0;
    const char *space = memchr(line, ' ', count);
    if (strncmp(line, "HTTP/1.", 7) || space == NULL || line + count - space < 4) return false;
    for (int at = 1; at <= 3; at++) {
        if (space[at] < '0' || space[at] > '9') return false;
        transfer->status = transfer->status * 10 + space[at] - '0';
    }
    return true;
}

/* Look at the headers that say how long the body is. libcurl obeys the last of several lengths, and
 * takes the digits at the beginning of a value that is no number. What follows the body of one
 * length would be the next answer of another. */
static bool check_line(struct transfer *transfer, const char *line, size_t count) {
    const char *value;
    size_t length;
    if (count >= 5 && !strncmp(line, "HTTP/", 5)) return false; /* libcurl obeys the first status */
    if (has_name(line, count, "transfer-encoding:", &value, &length))
        return is_word(value, length, "chunked") || is_word(value, length, "identity");
    if (!has_name(line, count, "content-length:", &value, &length)) return true;
    for (size_t at = 0; at < length; at++)
        if (value[at] < '0' || value[at] > '9') return false;
    if (length < 1 || length > MOST_LENGTH_DIGITS || ++transfer->lengths > 1) return false;
    transfer->told_bytes = strtoull(value, NULL, 10);
    return true;
}

CURLcode transfer_send_on(struct transfer *transfer) {
    transfer->is_starved = false;
    transfer->moved_ms = now_ms();
    return curl_easy_pause(transfer->easy, CURLPAUSE_CONT);
}

/* An empty line ends a head. libcurl ends it also with a line that only begins with a carriage
 * return, and after 101 it waits for bytes of another protocol. */
static bool end_head(struct transfer *transfer, size_t count) {
    if (count > 2 || transfer->status == 101) return false;
    transfer->lines = 0;
    transfer->line_bytes = 0;
    if (transfer->status < 200) return true; /* another head follows */
    transfer->is_head_complete = true;
    transfer->fits = is_object(transfer) && transfer->status == transfer->expected_status &&
                     has_expected(transfer);
    /* At once: a body without a length may never begin. */
    if (is_object(transfer) && !transfer->fits) engine_hold(transfer);
    /* The rest of the body is not wanted. */
    if (transfer->status >= 300 && transfer->is_starved) transfer_send_on(transfer);
    return true;
}

/* A line of a proxy's answer to CONNECT. libcurl would read the body of a refusal byte by byte, and
 * nothing else meanwhile. */
static size_t take_proxy_line(struct transfer *transfer, const char *line, size_t count) {
    if (!is_bounded(transfer, count)) return fail(transfer, END_CLOSED, 0);
    if (transfer->lines == 1) {
        const char *space = memchr(line, ' ', count);
        transfer->proxy_status = space != NULL ? strtol(space, NULL, 10) : 0;
    }
    if (line[0] != '\r' && line[0] != '\n') return count;
    transfer->lines = 0;
    transfer->line_bytes = 0;
    if (transfer->proxy_status == PROXY_REFUSES) { /* as it answers requests without CONNECT */
        transfer->status = PROXY_REFUSES;
        transfer->is_head_complete = true;
        return fail(transfer, END_DONE, 0);
    }
    return transfer->proxy_status < 300 ? count : fail(transfer, END_CLOSED, transfer->proxy_status);
}

static size_t take_line(char *line, size_t size, size_t count, void *data) {
    struct transfer *transfer = data;
    count *= size;
    transfer->moved_ms = now_ms();
    if (!transfer->is_sent) return take_proxy_line(transfer, line, count);
    if (transfer->heads == 0 && transfer->patience_ms) transfer->began_ms = transfer->moved_ms;
    if (transfer->is_head_complete) /* a trailer */
        return is_bounded(transfer, count) ? count : fail(transfer, END_BROKEN, 0);
    bool is_right = transfer->lines ? check_line(transfer, line, count)
                                    : begin_head(transfer, line, count);
    if (!is_right || !is_bounded(transfer, count)) return fail(transfer, END_BROKEN, 0);
    if (!append(&transfer->head, line, count)) return fail(transfer, END_FAILED, CURLE_OUT_OF_MEMORY);
    if ((line[0] == '\r' || line[0] == '\n') && !end_head(transfer, count))
        return fail(transfer, END_BROKEN, 0);
    return count;
}

static size_t collect(struct transfer *transfer, const char *bytes, size_t count) {
    size_t most = transfer->most_bytes;
    if (transfer->status >= 300 && most > MOST_ERROR_BYTES) most = MOST_ERROR_BYTES;
    if (transfer->answer.size_bytes + count > most) {
        /* The status of an error says enough. */
        return fail(transfer, transfer->status < 300 ? END_TOO_LONG : END_DONE, 0);
    }
    bool has_room = transfer->told_bytes > most || reserve(&transfer->answer, transfer->told_bytes);
    if (!has_room || !append(&transfer->answer, bytes, count))
        return fail(transfer, END_FAILED, CURLE_OUT_OF_MEMORY);
    return count;
}

static size_t take_body(char *bytes, size_t size, size_t count, void *data) {
    struct transfer *transfer = data;
    size_t all = size * count, left = all;
    transfer->moved_ms = now_ms();
    if (!transfer->is_head_complete) return fail(transfer, END_BROKEN, 0); /* nobody is asked */
    if (!is_object(transfer)) return collect(transfer, bytes, all);
    if (!transfer->fits) return CURL_WRITEFUNC_PAUSE; /* until `go_on` */
    if (transfer->skip_bytes) {
        size_t skipped = left < transfer->skip_bytes ? left : transfer->skip_bytes;
        transfer->skip_bytes -= skipped;
        bytes += skipped;
        left -= skipped;
    }
    size_t filled = atomic_load_explicit(&transfer->filled, memory_order_relaxed);
    size_t room = transfer->room_bytes - filled, stored = left < room ? left : room;
    if (stored) memcpy(transfer->room + filled, bytes, stored);
    atomic_store_explicit(&transfer->filled, filled + stored, memory_order_release);
    if (stored == left) return all;
    return fail(transfer, transfer->stops_when_full ? END_DONE : END_TOO_LONG, 0);
}

static size_t take_piece(char *room, size_t size, size_t count, void *data) {
    struct transfer *transfer = data;
    bool is_complete = transfer->body_position == transfer->body_bytes;
    count *= size;
    if (transfer->is_head_complete && transfer->status >= 300) return 0;
    transfer->moved_ms = now_ms();
    pthread_mutex_lock(&transfer->piece_lock);
    if (count > transfer->piece_bytes) count = transfer->piece_bytes;
    if (count) memcpy(room, transfer->piece, count);
    transfer->piece += count;
    transfer->piece_bytes -= count;
    if (!transfer->piece_bytes) pthread_cond_signal(&transfer->piece_taken);
    pthread_mutex_unlock(&transfer->piece_lock);
    transfer->body_position += count;
    transfer->is_starved = !count && !is_complete;
    return transfer->is_starved ? CURL_READFUNC_PAUSE : count;
}

/* Let the body go on at an offset. */
static void move_to(struct transfer *transfer, size_t offset) {
    pthread_mutex_lock(&transfer->piece_lock);
    transfer->body_position = transfer->next_piece = offset;
    transfer->piece_bytes = 0;
    pthread_cond_signal(&transfer->piece_taken);
    pthread_mutex_unlock(&transfer->piece_lock);
}

static int seek_body(void *data, curl_off_t offset, int origin) {
    struct transfer *transfer = data;
    if (origin != SEEK_SET || offset < 0 || (size_t)offset > transfer->body_bytes)
        return CURL_SEEKFUNC_FAIL;
    move_to(transfer, offset);
    return CURL_SEEKFUNC_OK;
}

/* As libcurl does it, but no other program inherits the connection: it would stay open there. */
static curl_socket_t open_socket(void *data, curlsocktype purpose, struct curl_sockaddr *address) {
    struct transfer *transfer = data;
    (void)purpose;
    transfer->is_sent = false; /* nor was it on a kept connection that had ended */
    transfer->opened_fd = socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
    return transfer->opened_fd;
}

/* Note a connection that may be used again. */
static void note_kept(struct transfer *transfer) {
    curl_socket_t fd = CURL_SOCKET_BAD;
    long port = 0;
    curl_easy_getinfo(transfer->easy, CURLINFO_ACTIVESOCKET, &fd);
    curl_easy_getinfo(transfer->easy, CURLINFO_LOCAL_PORT, &port);
    if (fd != CURL_SOCKET_BAD && port > 0 && port < PORTS) transfer->kept_fds[port] = fd;
}

/* Whether a descriptor is a connection with this port: another connection may have had it meanwhile,
 * and the descriptor another file. */
static bool has_port(int fd, int port) {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } own;
    socklen_t size = sizeof own;
    if (getsockname(fd, &own.any, &size) < 0) return false;
    if (own.any.sa_family == AF_INET6) return own.v6.sin6_port == htons(port);
    return own.any.sa_family == AF_INET && own.v4.sin_port == htons(port);
}

/* Return the connection that is used now, or -1. */
static int socket_in_use(const struct transfer *transfer, int port, bool is_new) {
    if (port <= 0 || port >= PORTS) return -1;
    int fd = is_new ? transfer->opened_fd : transfer->kept_fds[port];
    return has_port(fd, port) ? fd : -1;
}

/* Bytes that came on a kept connection after an answer would be taken for the next one: libcurl 7.88
 * looks only whether the connection has ended. So end it: libcurl then can't send the request, and
 * uses another connection. */
static void end_if_unread(int fd) {
    char byte;
    if (recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0) shutdown(fd, SHUT_RDWR);
}

/* A server may refuse a request and close the connection before it has read the body. Then to send
 * fails although the answer is there, and libcurl does not read it any more. */
static void read_early_answer(struct transfer *transfer) {
    char bytes[EARLY_BYTES];
    ssize_t got = recv(transfer->early_fd, bytes, sizeof bytes, MSG_DONTWAIT);
    char *line = bytes, *end = bytes + (got > 0 ? got : 0), *next;
    transfer->is_starved = false;
    while (!transfer->is_head_complete && (next = memchr(line, '\n', end - line)) != NULL) {
        if (!take_line(line, 1, next + 1 - line, transfer)) return;
        line = next + 1;
    }
    if (!transfer->is_head_complete || transfer->status < 300) return;
    collect(transfer, line, end - line);
    fail(transfer, END_DONE, 0);
}

static void close_early(struct transfer *transfer) {
    if (transfer->early_fd >= 0) close(transfer->early_fd);
    transfer->early_fd = -1;
}

int64_t transfer_wait_for_turn(struct transfer *transfer, size_t offset) {
    pthread_mutex_lock(&transfer->piece_lock);
    while (!transfer->takes_none && transfer->next_piece == offset &&
           (transfer->piece_bytes || offset == transfer->body_bytes))
        pthread_cond_wait(&transfer->piece_taken, &transfer->piece_lock);
    int64_t next = transfer->takes_none ? -1 : (int64_t)transfer->next_piece;
    pthread_mutex_unlock(&transfer->piece_lock);
    return next;
}

bool transfer_give(struct transfer *transfer, size_t offset, const void *piece, size_t count) {
    pthread_mutex_lock(&transfer->piece_lock);
    bool is_right = !transfer->takes_none && !transfer->piece_bytes &&
                    transfer->next_piece == offset && count <= transfer->body_bytes - offset;
    if (is_right) {
        transfer->piece = piece;
        transfer->piece_bytes = count;
        transfer->next_piece += count;
    }
    pthread_mutex_unlock(&transfer->piece_lock);
    return is_right;
}

void transfer_take_no_more(struct transfer *transfer) {
    pthread_mutex_lock(&transfer->piece_lock);
    transfer->takes_none = true;
    transfer->piece_bytes = 0;
    pthread_cond_signal(&transfer->piece_taken);
    pthread_mutex_unlock(&transfer->piece_lock);
}

/* The connection is there, and the request is sent now. */
static int begin_request(void *data, char *to, char *from, int to_port, int from_port) {
    struct transfer *transfer = data;
    (void)to, (void)from, (void)to_port;
    long connects = 0;
    curl_easy_getinfo(transfer->easy, CURLINFO_NUM_CONNECTS, &connects);
    int fd = socket_in_use(transfer, from_port, connects);
    if (!connects && fd >= 0) end_if_unread(fd);
    close_early(transfer);
    if (transfer->is_fed && fd >= 0 && !strncmp(transfer->url, "http://", 7))
        transfer->early_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    transfer->is_sent = true;
    /* It may be sent once more, after bytes that libcurl has read but not sent. */
    if (transfer->body_position) move_to(transfer, 0);
    transfer->moved_ms = now_ms();
    return CURL_PREREQFUNC_OK;
}

/* Note that bytes of the body were sent. */
static int note_progress(void *data, curl_off_t down, curl_off_t down_now, curl_off_t up,
                         curl_off_t up_now) {
    struct transfer *transfer = data;
    (void)down, (void)down_now, (void)up;
    if (atomic_exchange(&transfer->sent, (size_t)up_now) != (size_t)up_now)
        transfer->moved_ms = now_ms();
    return 0;
}

static void set_route(const struct transfer *transfer, CURL *easy) {
    /* An empty proxy: libcurl would read http_proxy and others itself. */
    curl_easy_setopt(easy, CURLOPT_PROXY, transfer->proxy ? transfer->proxy : "");
    curl_easy_setopt(easy, CURLOPT_NOPROXY, "");
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
    if (transfer->ca_file || transfer->ca_path) {
        curl_easy_setopt(easy, CURLOPT_CAINFO, transfer->ca_file);
        curl_easy_setopt(easy, CURLOPT_CAPATH, transfer->ca_path);
        curl_easy_setopt(easy, CURLOPT_PROXY_CAINFO, transfer->ca_file);
        curl_easy_setopt(easy, CURLOPT_PROXY_CAPATH, transfer->ca_path);
    }
    curl_easy_setopt(easy, CURLOPT_MAXAGE_CONN, transfer->most_idle_s);
    curl_easy_setopt(easy, CURLOPT_DNS_CACHE_TIMEOUT, MOST_NAME_AGE_S);
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, transfer->connect_ms);
}

static void set_body(struct transfer *transfer, CURL *easy) {
    if (!strcmp(transfer->method, "HEAD")) {
        curl_easy_setopt(easy, CURLOPT_NOBODY, 1L);
        return;
    }
    if (transfer->has_body && !transfer->is_fed) {
        /* Up to 64 KiB of it go out together with the head. */
        curl_easy_setopt(easy, CURLOPT_POSTFIELDS, transfer->body ? (const char *)transfer->body : "");
        curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)transfer->body_bytes);
    } else if (transfer->has_body) {
        curl_easy_setopt(easy, CURLOPT_UPLOAD, 1L);
        curl_easy_setopt(easy, CURLOPT_INFILESIZE_LARGE, (curl_off_t)transfer->body_bytes);
        curl_easy_setopt(easy, CURLOPT_READFUNCTION, take_piece);
        curl_easy_setopt(easy, CURLOPT_READDATA, transfer);
        curl_easy_setopt(easy, CURLOPT_SEEKFUNCTION, seek_body);
        curl_easy_setopt(easy, CURLOPT_SEEKDATA, transfer);
    }
    if (transfer->body_bytes > (size_t)RECEIVE_BYTES)
        curl_easy_setopt(easy, CURLOPT_UPLOAD_BUFFERSIZE, UPLOAD_BYTES);
    if (transfer->has_body) {
        curl_easy_setopt(easy, CURLOPT_XFERINFOFUNCTION, note_progress);
        curl_easy_setopt(easy, CURLOPT_XFERINFODATA, transfer);
        curl_easy_setopt(easy, CURLOPT_NOPROGRESS, 0L);
    }
    curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, transfer->method);
}

bool transfer_is_late(const struct transfer *transfer, uint64_t now) {
    uint64_t patience_ms = transfer->heads ? 0 : transfer->patience_ms;
    if (transfer->total_ms && now >= transfer->began_ms + transfer->total_ms + patience_ms)
        return true;
    /* libcurl limits the time until the connection is there. */
    return transfer->is_sent && transfer->idle_ms && !transfer->is_starved &&
           now >= transfer->moved_ms + transfer->idle_ms + patience_ms;
}

/* Return whether the request can be sent. */
bool transfer_prepare(struct transfer *transfer, CURL *easy, CURLSH *share) {
    transfer->easy = easy;
    transfer->began_ms = now_ms();
    bool is_right = !curl_easy_setopt(easy, CURLOPT_URL, transfer->url);
    curl_easy_setopt(easy, CURLOPT_PATH_AS_IS, 1L);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, transfer->headers);
    curl_easy_setopt(easy, CURLOPT_HEADEROPT, (long)CURLHEADER_SEPARATE);
    set_route(transfer, easy);
    set_body(transfer, easy);
    long receive_bytes = transfer->room_bytes > LARGE_BYTES ? LARGE_RECEIVE_BYTES : RECEIVE_BYTES;
    curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, receive_bytes);
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, take_line);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, transfer);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, take_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, transfer);
    curl_easy_setopt(easy, CURLOPT_OPENSOCKETFUNCTION, open_socket);
    curl_easy_setopt(easy, CURLOPT_OPENSOCKETDATA, transfer);
    curl_easy_setopt(easy, CURLOPT_PREREQFUNCTION, begin_request);
    curl_easy_setopt(easy, CURLOPT_PREREQDATA, transfer);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, transfer->error);
    curl_easy_setopt(easy, CURLOPT_PRIVATE, transfer);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L);
    curl_easy_setopt(easy, CURLOPT_SHARE, share);
    return is_right;
}

/* Why there is no TLS, by the texts of OpenSSL's errors (ERR_reason_error_string(3)). */
static enum end end_of_handshake(const char *error) {
    static const struct {
        const char *text;
        enum end end;
    } known[] = {
        {"wrong version number", END_NO_TLS},  {"http request", END_NO_TLS},
        {"unknown protocol", END_NO_TLS},      {"unsupported protocol", END_OLD_TLS},
        {"alert protocol version", END_OLD_TLS},
    };
    for (size_t at = 0; at < sizeof known / sizeof *known; at++)
        if (strstr(error, known[at].text)) return known[at].end;
    return END_NO_CONNECTION;
}

static enum end end_of(struct transfer *transfer, CURLcode code) {
    switch (code) {
    case CURLE_OK:
        return END_DONE;
    case CURLE_OPERATION_TIMEDOUT:
        return END_TIMED_OUT;
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_RESOLVE_PROXY:
        return END_NO_ADDRESS;
    case CURLE_COULDNT_CONNECT:
        curl_easy_getinfo(transfer->easy, CURLINFO_OS_ERRNO, &transfer->detail);
        return END_NO_CONNECTION;
    case CURLE_PEER_FAILED_VERIFICATION:
        curl_easy_getinfo(transfer->easy, CURLINFO_SSL_VERIFYRESULT, &transfer->detail);
        if (!transfer->detail)
            curl_easy_getinfo(transfer->easy, CURLINFO_PROXY_SSL_VERIFYRESULT, &transfer->detail);
        return END_UNTRUSTED;
    case CURLE_SSL_CONNECT_ERROR:
        return end_of_handshake(transfer->error);
    case CURLE_SSL_CACERT_BADFILE:
        return END_NO_CAS;
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
        return transfer->heads ? END_BROKEN : END_CLOSED;
    case CURLE_PARTIAL_FILE:
    case CURLE_WEIRD_SERVER_REPLY:
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_BAD_CONTENT_ENCODING:
    case CURLE_WRITE_ERROR:
        return END_BROKEN;
    default:
        transfer->detail = code;
        return END_FAILED;
    }
}

/* Whether to send the request once more: the server had closed a kept connection, and libcurl, which
 * looks for that when it receives, has found it out only when it sent the body. Then prepare that. */
bool transfer_goes_again(struct transfer *transfer, CURLcode code) {
    long connects = 0;
    if (transfer->is_decided || code != CURLE_SEND_ERROR || transfer->heads) return false;
    if (transfer->early_fd >= 0) read_early_answer(transfer);
    curl_easy_getinfo(transfer->easy, CURLINFO_NUM_CONNECTS, &connects);
    bool is_kept = transfer->is_sent && !connects;
    if (transfer->is_decided || transfer->heads || !is_kept || transfer->is_repeated) return false;
    transfer->is_repeated = true;
    transfer->is_sent = transfer->is_starved = false;
    close_early(transfer);
    return !curl_easy_setopt(transfer->easy, CURLOPT_FRESH_CONNECT, 1L);
}

/* Note how the transfer has ended, and what libcurl knows of it. */
void transfer_conclude(struct transfer *transfer, CURLcode code) {
    curl_off_t first = 0, sent = 0;
    long connects = 0;
    close_early(transfer);
    if (!transfer->is_decided) transfer->end = end_of(transfer, code);
    if (transfer->end == END_DONE && !transfer->is_head_complete) transfer->end = END_BROKEN;
    /* The status of an error says enough, even if its body is broken or never ends. */
    bool is_broken = transfer->end == END_BROKEN || transfer->end == END_TIMED_OUT;
    if (is_broken && transfer->is_head_complete && transfer->status >= 300) transfer->end = END_DONE;
    curl_easy_getinfo(transfer->easy, CURLINFO_STARTTRANSFER_TIME_T, &first);
    curl_easy_getinfo(transfer->easy, CURLINFO_NUM_CONNECTS, &connects);
    curl_easy_getinfo(transfer->easy, CURLINFO_PRETRANSFER_TIME_T, &sent);
    transfer->first_byte_us = first > sent ? first - sent : 0;
    if (transfer->end == END_DONE) note_kept(transfer);
    transfer->was_kept = transfer->is_sent && connects == 0;
}

struct transfer *transfer_new(void) {
    struct transfer *transfer = calloc(1, sizeof *transfer);
    if (transfer == NULL) return NULL;
    transfer->early_fd = transfer->opened_fd = -1;
    pthread_mutex_init(&transfer->piece_lock, NULL);
    pthread_cond_init(&transfer->piece_taken, NULL);
    return transfer;
}

/* Wipe what may be a secret: headers are signed, and have tokens. */
static void free_headers(struct curl_slist *headers) {
    for (struct curl_slist *each = headers; each != NULL; each = each->next)
        explicit_bzero(each->data, strlen(each->data));
    curl_slist_free_all(headers);
}

void transfer_free(struct transfer *transfer) {
    free(transfer->method);
    free(transfer->url);
    if (transfer->proxy) explicit_bzero(transfer->proxy, strlen(transfer->proxy));
    free(transfer->proxy);
    free(transfer->ca_file);
    free(transfer->ca_path);
    free_headers(transfer->headers);
    for (int at = 0; at < transfer->expected_count; at++) {
        free(transfer->expected[at].name);
        free(transfer->expected[at].value);
    }
    pthread_cond_destroy(&transfer->piece_taken);
    pthread_mutex_destroy(&transfer->piece_lock);
    free(transfer->head.bytes);
    free(transfer->answer.bytes);
    free(transfer);
}
