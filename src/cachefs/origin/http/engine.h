/* HTTP/1.1 requests in threads of their own, on libcurl's multi interface.
 *
 * Who uses the engine decides: where a request goes, through which proxy, which CAs it trusts, how
 * it is signed, whether it is sent again, whether a redirect is followed. The engine moves bytes.
 * It sends no request twice, except one on a kept connection that the server had closed before it
 * answered: libcurl does that, or `transfer_goes_again`.
 *
 * Each thread has connections of its own. What has ended, or waits for a decision, is collected in
 * one list, and one eventfd tells that the list is not empty. The engine knows nothing of Python
 * and never logs, because requests have secrets in them.
 *
 * libcurl must be 7.87 or newer (CURLOPT_QUICK_EXIT: a cancelled look-up of a name is not waited
 * for).
 */
#ifndef CACHEFS_HTTP_ENGINE_H
#define CACHEFS_HTTP_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#if !__has_include(<curl/curl.h>)
#error "libcurl 7.87 or newer is needed, with its headers (Debian: libcurl4-openssl-dev)"
#endif
#include <curl/curl.h>

#include "md5.h"

#define LEAST_LIBCURL 0x075700 /* 7.87 */

enum {
    MOST_HEAD_BYTES = 64 << 10, /* of one head, and of all trailers */
    MOST_HEAD_LINES = 100,
    MOST_INTERIM_HEADS = 10, /* with a status of 1xx, before the answer */
    MOST_ERROR_BYTES = 64 << 10, /* of an answer with a status from 300 on; the rest is not read */
    MOST_EXPECTED = 8,
    PORTS = 1 << 16,
};

/* How a transfer has ended. The numbers are those of `End` in wire.py. */
enum end {
    END_DONE, /* there is an answer, whatever its status */
    END_CANCELLED,
    END_TIMED_OUT,
    END_NO_ADDRESS, /* the name of the host or the proxy has none */
    END_NO_CONNECTION,
    END_CLOSED, /* the connection ended before a byte of the answer came */
    END_BROKEN, /* the answer can't be understood, or it is incomplete */
    END_TOO_LONG,
    END_UNTRUSTED, /* `detail` is the error of X509_verify_cert; 0 if the name is another one */
    END_NO_TLS,    /* the server does not speak TLS */
    END_OLD_TLS,   /* it speaks only versions before 1.2 */
    END_NO_CAS,    /* the file with the CAs can't be read, or has none */
    END_FAILED,    /* anything else; `detail` is libcurl's code */
};

struct text {
    char *bytes;
    size_t size_bytes, capacity;
};

struct expected {
    char *name, *value; /* the name with its colon */
};

struct transfer {
    /* The request; nobody changes it after `engine_start`. The transfer owns the texts. */
    char *method, *url, *proxy, *ca_file, *ca_path;
    struct curl_slist *headers;
    long most_idle_s; /* the longest time that a connection was idle before it is used again */
    /* The body: bytes, or else what a thread gives piece by piece, or else there is none. */
    bool has_body, is_fed;
    const uint8_t *body;
    size_t body_bytes;
    /* Where the body of an object goes. With no sink, it is collected as that of any other answer. */
    bool has_sink;
    uint8_t *room;
    size_t room_bytes;
    bool is_patient; /* the reader of the list may be woken for it PATIENT_MS later */
    bool wants_md5; /* of the body, in the sink or collected */
    /* An answer of this status with these headers goes to the sink without a question. */
    int expected_status;
    struct expected expected[MOST_EXPECTED];
    int expected_count;
    /* A part of the sink's bytes that also answers a request of the kernel, if the answer is the
     * expected one, complete, and has this MD5 if one is wanted. */
    bool has_reply;
    uint64_t reply_unique;
    size_t reply_offset, reply_bytes;
    const uint8_t *more; /* bytes that follow those in the reply */
    size_t more_bytes;
    bool has_told_md5;
    uint8_t told_md5[MD5_BYTES];
    size_t most_bytes; /* of a body that is collected */
    long connect_ms, idle_ms, total_ms; /* 0: no limit */
    long patience_ms; /* how much longer the first byte may take; then `total_ms` begins anew */
    void *owner;

    /* The answer. Others read it when `engine_collect` has returned the transfer. */
    int status;
    struct text head, answer;
    uint8_t md5[MD5_BYTES];
    enum end end;
    long detail;
    long first_byte_us; /* from when the connection was there to the first byte of the answer */
    bool is_replied;    /* the kernel has its answer */
    bool was_kept;      /* the connection had served another request before */
    _Atomic size_t filled; /* what the sink has; may be read at any time */
    _Atomic size_t sent;   /* what the kernel has of the body; the same */

    /* Used by the thread alone. */
    struct worker *worker;
    CURL *easy;
    int *kept_fds; /* of connections that were kept, by their local ports */
    size_t skip_bytes; /* of the body, before what the sink receives */
    bool stops_when_full;
    size_t body_position; /* of what libcurl takes next, if a thread gives it */
    uint64_t began_ms; /* when `total_ms` began */
    uint64_t moved_ms; /* when bytes moved last */
    bool is_sent, is_repeated; /* see `transfer_goes_again` */
    int heads, lines;
    long proxy_status; /* of the answer to CONNECT */
    size_t line_bytes;
    bool is_head_complete, fits;
    bool is_decided; /* `end` says how it ends, whatever libcurl says of it */
    int lengths; /* headers Content-Length */
    size_t told_bytes; /* what it says; 0 without one */
    int opened_fd; /* the socket that was made last; libcurl owns it */
    int early_fd;  /* a duplicate of the connection on which a body is sent, or -1 */
    bool is_starved; /* it waits for the next piece of its body */
    char error[CURL_ERROR_SIZE];
    struct transfer *previous_running, *next_running;

    /* Protected by the lock of the worker. */
    struct transfer *next_command;
    bool has_command, starts, is_cancelled, goes_on, has_more;
    size_t command_skip_bytes;
    bool command_stops_when_full;

    /* Protected by the lock of the engine. */
    struct transfer *next_told;
    bool is_told, is_held, is_ended;

    /* The part of the body that is to be sent next, and the offset of what follows it. */
    pthread_mutex_t piece_lock; /* protects all of it; nobody takes another lock with it */
    pthread_cond_t piece_taken;
    const uint8_t *piece;
    size_t piece_bytes, next_piece;
    bool takes_none; /* the transfer has ended */
};

struct engine;

/* Returns NULL and sets *error to an errno. */
struct engine *engine_new(unsigned threads, int *error);
/* Answers requests of the kernel on a duplicate of this descriptor of /dev/fuse from now on. Before
 * the first transfer with a reply. Returns 0 or an errno. */
int engine_reply_to(struct engine *engine, int device_fd);
/* Readable while the list may have transfers. */
int engine_fd(const struct engine *engine);
struct transfer *transfer_new(void);
/* Without a URL, nothing is requested: the sink is full, and its bytes, then `more`, are the reply.
 * The transfer belongs to the engine until `engine_collect` returns it with `is_ended`. */
void engine_start(struct engine *engine, struct transfer *transfer);
/* The first three may be called at any time, also when the transfer has ended. */
void engine_cancel(struct transfer *transfer);
/* For a transfer that is held: receive the body into the sink, after its first `skip_bytes`. If
 * `stops_when_full`, what follows is not received; otherwise it is an error. */
void engine_go_on(struct transfer *transfer, size_t skip_bytes, bool stops_when_full);
/* A piece of the body has been given. */
void engine_feed(struct transfer *transfer);
/* Take one transfer out of the list: it has ended, or it is held; see *is_ended. */
struct transfer *engine_collect(struct engine *engine, bool *is_ended);
void transfer_free(struct transfer *transfer);
/* Ends the threads, cancels all transfers, and calls `drop` with `data` for each that nobody has
 * collected. */
void engine_free(struct engine *engine, void (*drop)(struct transfer *transfer, void *data),
                 void *data);

/* transfer.c: for threads that give bodies. Wait while there is a piece at hand, or none is left, and
 * the next one is that of `offset`. Return the offset of the next piece; -1 if the transfer has
 * ended. The body begins anew when libcurl sends it once more. */
int64_t transfer_wait_for_turn(struct transfer *transfer, size_t offset);
/* Give the piece at `offset`, which must stay as it is until the next turn, or until the transfer
 * has ended. Return whether it was the right one. */
bool transfer_give(struct transfer *transfer, size_t offset, const void *piece, size_t count);
/* The transfer has ended, and its last piece is not used any more. */
void transfer_take_no_more(struct transfer *transfer);

/* transfer.c: what happens in the thread. */
bool transfer_prepare(struct transfer *transfer, CURL *easy, CURLSH *share);
bool transfer_goes_again(struct transfer *transfer, CURLcode code);
void transfer_conclude(struct transfer *transfer, CURLcode code);
CURLcode transfer_send_on(struct transfer *transfer); /* its next piece is there */
bool transfer_is_late(const struct transfer *transfer, uint64_t now);
uint64_t now_ms(void);
/* engine.c */
void engine_hold(struct transfer *transfer);

#endif
