/* The threads of the engine, their commands, and the list of what has ended. */
#define _GNU_SOURCE /* pthread_setname_np */
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_KEPT 64L /* connections of a thread that are kept while they are idle */
#define LOOK_MS 100   /* how often a thread looks for transfers in which nothing moves */
#define ASLEEP_MS 60000
#define HASHED_AT_A_TIME 64
/* The reader of the list sleeps until so many patient transfers have ended, or one so long ago. It
 * costs some 50 us to wake it. */
#define PATIENT_MOST 8
#define PATIENT_MS 2

struct worker {
    struct engine *engine;
    pthread_t thread;
    CURLM *multi;
    CURLSH *share; /* TLS sessions, for the next handshakes */
    struct transfer *running;
    int *kept_fds; /* see `struct transfer` */
    struct transfer *ended[HASHED_AT_A_TIME]; /* since the last turn */
    int ended_count;
    uint64_t patient_since_ms; /* when it told of one for which it did not wake the reader; 0: none */
    _Atomic unsigned load; /* transfers that have not ended */

    pthread_mutex_t lock;
    struct transfer *commands, **last_command;
    bool stops, sleeps; /* it sleeps: it must be woken for a command */
};

struct engine {
    int fd, device_fd; /* the second is -1 if no request of the kernel is answered */
    unsigned threads;
    struct worker *workers;
    pthread_mutex_t lock;
    struct transfer *told, **last_told;
    unsigned patient; /* in the list */
    bool is_woken;    /* the reader of the list is, or will be, awake */
};

/* Add a transfer to the list. The lock of the engine is held. */
static void tell(struct engine *engine, struct transfer *transfer) {
    if (transfer->is_told) return;
    transfer->is_told = true;
    transfer->next_told = NULL;
    *engine->last_told = transfer;
    engine->last_told = &transfer->next_told;
}

/* Wake the reader of the list, if it sleeps and the list is not empty. Takes the lock. */
static void wake_reader(struct engine *engine) {
    uint64_t one = 1;
    pthread_mutex_lock(&engine->lock);
    bool sleeps = !engine->is_woken && engine->told != NULL;
    if (sleeps) engine->is_woken = true;
    pthread_mutex_unlock(&engine->lock);
    if (!sleeps) return;
    while (write(engine->fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

void engine_hold(struct transfer *transfer) {
    struct engine *engine = transfer->worker->engine;
    pthread_mutex_lock(&engine->lock);
    if (!transfer->is_held) {
        transfer->is_held = true;
        tell(engine, transfer);
    }
    pthread_mutex_unlock(&engine->lock);
    wake_reader(engine);
}

struct transfer *engine_collect(struct engine *engine, bool *is_ended) {
    pthread_mutex_lock(&engine->lock);
    struct transfer *first = engine->told;
    if (first == NULL) {
        uint64_t count; /* nobody adds to the list meanwhile */
        ssize_t got = read(engine->fd, &count, sizeof count);
        (void)got;
        engine->is_woken = false;
        engine->patient = 0;
    } else {
        engine->told = first->next_told;
        if (engine->told == NULL) engine->last_told = &engine->told;
        first->is_told = false;
        *is_ended = first->is_ended;
    }
    pthread_mutex_unlock(&engine->lock);
    return first;
}

static void command(struct transfer *transfer) {
    struct worker *worker = transfer->worker;
    bool wakes = worker->sleeps;
    worker->sleeps = false;
    if (!transfer->has_command) {
        transfer->has_command = true;
        transfer->next_command = NULL;
        *worker->last_command = transfer;
        worker->last_command = &transfer->next_command;
    }
    pthread_mutex_unlock(&worker->lock);
    if (wakes) curl_multi_wakeup(worker->multi);
}

void engine_start(struct engine *engine, struct transfer *transfer) {
    struct worker *least = &engine->workers[0];
    for (unsigned at = 1; at < engine->threads; at++)
        if (atomic_load(&engine->workers[at].load) < atomic_load(&least->load))
            least = &engine->workers[at];
    transfer->worker = least;
    atomic_fetch_add(&least->load, 1);
    pthread_mutex_lock(&least->lock);
    transfer->starts = true;
    command(transfer);
}

void engine_cancel(struct transfer *transfer) {
    pthread_mutex_lock(&transfer->worker->lock);
    transfer->is_cancelled = true;
    command(transfer);
}

void engine_go_on(struct transfer *transfer, size_t skip_bytes, bool stops_when_full) {
    pthread_mutex_lock(&transfer->worker->lock);
    transfer->goes_on = true;
    transfer->command_skip_bytes = skip_bytes;
    transfer->command_stops_when_full = stops_when_full;
    command(transfer);
}

/* Whether all bytes have come as they were expected. The MD5 is there. */
static bool is_as_told(const struct transfer *transfer) {
    bool is_whole = atomic_load(&transfer->filled) == transfer->room_bytes;
    bool is_right = transfer->end == END_DONE && transfer->fits && is_whole;
    if (!transfer->has_told_md5) return is_right;
    return is_right && !memcmp(transfer->md5, transfer->told_md5, MD5_BYTES);
}

/* Answer a READ of the kernel. ENOENT: its process was killed, and it was answered already. */
static void reply(struct engine *engine, struct transfer *transfer) {
    size_t size_bytes = sizeof(struct fuse_out_header) + transfer->reply_bytes + transfer->more_bytes;
    struct fuse_out_header out = {size_bytes, 0, transfer->reply_unique};
    struct iovec parts[] = {{&out, sizeof out},
                            {transfer->room + transfer->reply_offset, transfer->reply_bytes},
                            {(void *)transfer->more, transfer->more_bytes}};
    ssize_t written;
    do
        written = writev(engine->device_fd, parts, 3);
    while (written < 0 && errno == EINTR);
    transfer->is_replied = written >= 0 || errno == ENOENT;
}

void engine_feed(struct transfer *transfer) {
    pthread_mutex_lock(&transfer->worker->lock);
    transfer->has_more = true;
    command(transfer);
}

/* Compute the MD5s of what has ended, several at a time, and tell of all of it. */
static void publish(struct worker *worker) {
    struct engine *engine = worker->engine;
    struct md5_message messages[HASHED_AT_A_TIME];
    size_t count = 0;
    for (int at = 0; at < worker->ended_count; at++) {
        struct transfer *each = worker->ended[at];
        struct md5_message message = {.number = at};
        if (!each->wants_md5 || each->end != END_DONE) continue;
        message.bytes = each->has_sink ? each->room : (const uint8_t *)each->answer.bytes;
        message.size_bytes = each->has_sink ? atomic_load(&each->filled) : each->answer.size_bytes;
        messages[count++] = message;
    }
    md5_hash(messages, count);
    for (size_t at = 0; at < count; at++)
        memcpy(worker->ended[messages[at].number]->md5, messages[at].md5, MD5_BYTES);
    for (int at = 0; at < worker->ended_count; at++)
        if (worker->ended[at]->has_reply && is_as_told(worker->ended[at]))
            reply(engine, worker->ended[at]);
    pthread_mutex_lock(&engine->lock);
    bool wakes = false;
    for (int at = 0; at < worker->ended_count; at++) {
        worker->ended[at]->is_ended = true;
        tell(engine, worker->ended[at]);
        if (!worker->ended[at]->is_patient || ++engine->patient >= PATIENT_MOST) wakes = true;
    }
    pthread_mutex_unlock(&engine->lock);
    worker->ended_count = 0;
    if (wakes)
        wake_reader(engine);
    else if (!worker->patient_since_ms)
        worker->patient_since_ms = now_ms();
}

/* Return how long the thread may sleep. Wake the reader if it was patient for long enough. */
static int sleep_ms(struct worker *worker) {
    if (!worker->patient_since_ms) return worker->running ? LOOK_MS : ASLEEP_MS;
    if (now_ms() < worker->patient_since_ms + PATIENT_MS) return PATIENT_MS;
    worker->patient_since_ms = 0;
    wake_reader(worker->engine);
    return worker->running ? LOOK_MS : ASLEEP_MS;
}

/* The transfer has ended. Its commands are of no effect any more. */
static void end(struct worker *worker, struct transfer *transfer) {
    pthread_mutex_lock(&worker->lock);
    if (transfer->has_command) {
        struct transfer **at = &worker->commands;
        while (*at != transfer)
            at = &(*at)->next_command;
        *at = transfer->next_command;
        if (*at == NULL) worker->last_command = at;
    }
    transfer->has_command = true; /* it is never added again */
    pthread_mutex_unlock(&worker->lock);
    atomic_fetch_sub(&worker->load, 1);
    worker->ended[worker->ended_count++] = transfer;
    if (worker->ended_count == HASHED_AT_A_TIME) publish(worker);
}

/* End a transfer that is in the hands of libcurl. */
static void conclude(struct worker *worker, struct transfer *transfer, CURLcode code) {
    transfer_conclude(transfer, code);
    curl_multi_remove_handle(worker->multi, transfer->easy); /* closes the connection if it is in use */
    if (transfer->previous_running)
        transfer->previous_running->next_running = transfer->next_running;
    else
        worker->running = transfer->next_running;
    if (transfer->next_running)
        transfer->next_running->previous_running = transfer->previous_running;
    curl_easy_cleanup(transfer->easy);
    transfer->easy = NULL;
    end(worker, transfer);
}

/* libcurl is done with a transfer: let it begin again, or end it. */
static void take_done(struct worker *worker, struct transfer *transfer, CURLcode code) {
    if (transfer_goes_again(transfer, code)) {
        curl_multi_remove_handle(worker->multi, transfer->easy);
        if (curl_multi_add_handle(worker->multi, transfer->easy) == CURLM_OK) return;
    }
    conclude(worker, transfer, code);
}

static void stop(struct worker *worker, struct transfer *transfer, enum end how) {
    transfer->is_decided = true;
    transfer->end = how;
    conclude(worker, transfer, CURLE_ABORTED_BY_CALLBACK);
}

static void start(struct worker *worker, struct transfer *transfer) {
    if (transfer->url == NULL) { /* the bytes are there: only the reply is to be sent */
        transfer->fits = true;
        transfer->end = END_DONE;
        end(worker, transfer);
        return;
    }
    /* Never a used handle: libcurl 7.88 keeps a pointer to the last header of its last answer, and
     * uses it if the next answer begins with a line that continues a header. */
    CURL *easy = curl_easy_init();
    transfer->kept_fds = worker->kept_fds;
    bool is_ready = easy != NULL && transfer_prepare(transfer, easy, worker->share);
    if (!is_ready || curl_multi_add_handle(worker->multi, easy) != CURLM_OK) {
        if (easy != NULL) curl_easy_cleanup(easy);
        transfer->easy = NULL;
        transfer->end = END_FAILED;
        transfer->detail = CURLE_FAILED_INIT;
        end(worker, transfer);
        return;
    }
    transfer->previous_running = NULL;
    transfer->next_running = worker->running;
    if (worker->running) worker->running->previous_running = transfer;
    worker->running = transfer;
}

static void go_on(struct transfer *transfer, size_t skip_bytes, bool stops_when_full) {
    struct engine *engine = transfer->worker->engine;
    pthread_mutex_lock(&engine->lock);
    bool was_held = transfer->is_held;
    pthread_mutex_unlock(&engine->lock);
    if (!was_held || transfer->fits) return;
    transfer->fits = true;
    transfer->skip_bytes = skip_bytes;
    transfer->stops_when_full = stops_when_full;
    transfer->moved_ms = now_ms();
    CURLcode code = curl_easy_pause(transfer->easy, CURLPAUSE_CONT); /* may call `take_body` */
    if (code != CURLE_OK) conclude(transfer->worker, transfer, code);
}

static void send_on(struct transfer *transfer) {
    if (!transfer->is_starved) return;
    CURLcode code = transfer_send_on(transfer);
    if (code != CURLE_OK) conclude(transfer->worker, transfer, code);
}

/* Obey one command. Return whether there was one. */
static bool obey(struct worker *worker) {
    pthread_mutex_lock(&worker->lock);
    struct transfer *first = worker->commands;
    if (first == NULL || worker->stops) {
        pthread_mutex_unlock(&worker->lock);
        return false;
    }
    worker->commands = first->next_command;
    if (worker->commands == NULL) worker->last_command = &worker->commands;
    bool starts = first->starts, is_cancelled = first->is_cancelled, goes_on = first->goes_on;
    bool has_more = first->has_more;
    size_t skip_bytes = first->command_skip_bytes;
    bool stops_when_full = first->command_stops_when_full;
    first->has_command = first->starts = first->goes_on = first->has_more = false;
    pthread_mutex_unlock(&worker->lock);
    if (is_cancelled && starts) { /* it was never sent */
        first->end = END_CANCELLED;
        end(worker, first);
    } else if (is_cancelled)
        stop(worker, first, END_CANCELLED);
    else if (starts)
        start(worker, first);
    else if (goes_on)
        go_on(first, skip_bytes, stops_when_full);
    else if (has_more)
        send_on(first);
    return true;
}

/* End the transfers that take too long. */
static void look(struct worker *worker) {
    uint64_t now = now_ms();
    struct transfer *next;
    for (struct transfer *each = worker->running; each != NULL; each = next) {
        next = each->next_running;
        if (transfer_is_late(each, now)) stop(worker, each, END_TIMED_OUT);
    }
}

static void conclude_done(struct worker *worker) {
    CURLMsg *message;
    int left;
    while ((message = curl_multi_info_read(worker->multi, &left)) != NULL) {
        struct transfer *transfer;
        CURLcode code = message->data.result;
        if (message->msg != CURLMSG_DONE) continue;
        curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &transfer);
        take_done(worker, transfer, code);
    }
}

static bool must_stop(struct worker *worker) {
    pthread_mutex_lock(&worker->lock);
    bool stops = worker->stops;
    pthread_mutex_unlock(&worker->lock);
    return stops;
}

/* Whether there is no command. From then on the next command wakes the thread. */
static bool falls_asleep(struct worker *worker) {
    pthread_mutex_lock(&worker->lock);
    bool is_idle = worker->commands == NULL && !worker->stops;
    worker->sleeps = is_idle;
    pthread_mutex_unlock(&worker->lock);
    return is_idle;
}

static void note_awake(struct worker *worker) {
    pthread_mutex_lock(&worker->lock);
    worker->sleeps = false;
    pthread_mutex_unlock(&worker->lock);
}

static void *work(void *argument) {
    struct worker *worker = argument;
    uint64_t look_at = 0;
    while (!must_stop(worker)) {
        int running;
        while (obey(worker)) {
        }
        curl_multi_perform(worker->multi, &running);
        conclude_done(worker);
        uint64_t now = now_ms();
        if (now >= look_at) {
            look(worker);
            look_at = now + LOOK_MS;
        }
        if (worker->ended_count) publish(worker);
        int most_ms = sleep_ms(worker);
        if (falls_asleep(worker)) curl_multi_poll(worker->multi, NULL, 0, most_ms, NULL);
        note_awake(worker);
    }
    while (worker->running)
        stop(worker, worker->running, END_CANCELLED);
    publish(worker);
    return NULL;
}

static void free_worker(struct worker *worker) {
    if (worker->multi) curl_multi_cleanup(worker->multi);
    if (worker->share) curl_share_cleanup(worker->share);
    free(worker->kept_fds);
    pthread_mutex_destroy(&worker->lock);
}

/* Returns 0 or an errno. */
static int make_worker(struct engine *engine, struct worker *worker) {
    sigset_t all, before;
    int error = 0;
    worker->engine = engine;
    worker->last_command = &worker->commands;
    pthread_mutex_init(&worker->lock, NULL);
    errno = 0;
    worker->multi = curl_multi_init();
    worker->share = curl_share_init();
    worker->kept_fds = calloc(PORTS, sizeof *worker->kept_fds);
    /* Without descriptors, libcurl makes a handle that can't be woken. */
    if (worker->multi == NULL || worker->share == NULL || worker->kept_fds == NULL ||
        curl_multi_wakeup(worker->multi) != CURLM_OK)
        error = errno ? errno : ENOMEM;
    if (!error) {
        curl_multi_setopt(worker->multi, CURLMOPT_MAXCONNECTS, MOST_KEPT);
        curl_multi_setopt(worker->multi, CURLMOPT_PIPELINING, (long)CURLPIPE_NOTHING);
        curl_share_setopt(worker->share, CURLSHOPT_SHARE, CURL_LOCK_DATA_SSL_SESSION);
        sigfillset(&all); /* Python's thread handles the signals */
        pthread_sigmask(SIG_SETMASK, &all, &before);
        error = pthread_create(&worker->thread, NULL, work, worker);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    if (error)
        free_worker(worker);
    else
        pthread_setname_np(worker->thread, "http");
    return error;
}

static void init_libcurl(void) {
    curl_global_init(CURL_GLOBAL_DEFAULT);
}

struct engine *engine_new(unsigned threads, int *error) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct engine *engine = calloc(1, sizeof *engine);
    *error = ENOMEM;
    if (engine == NULL) return NULL;
    pthread_once(&once, init_libcurl);
    engine->last_told = &engine->told;
    pthread_mutex_init(&engine->lock, NULL);
    engine->device_fd = -1;
    engine->workers = calloc(threads, sizeof *engine->workers);
    engine->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    *error = engine->fd < 0 ? errno : threads == 0 ? EINVAL : engine->workers == NULL ? ENOMEM : 0;
    while (!*error && engine->threads < threads) {
        *error = make_worker(engine, &engine->workers[engine->threads]);
        if (!*error) engine->threads++;
    }
    if (!*error) return engine;
    engine_free(engine, NULL, NULL);
    return NULL;
}

int engine_reply_to(struct engine *engine, int device_fd) {
    if (engine->device_fd >= 0) return 0;
    engine->device_fd = fcntl(device_fd, F_DUPFD_CLOEXEC, 0);
    return engine->device_fd < 0 ? errno : 0;
}

int engine_fd(const struct engine *engine) {
    return engine->fd;
}

void engine_free(struct engine *engine, void (*drop)(struct transfer *transfer, void *data),
                 void *data) {
    for (unsigned at = 0; at < engine->threads; at++) {
        struct worker *worker = &engine->workers[at];
        pthread_mutex_lock(&worker->lock);
        worker->stops = true;
        pthread_mutex_unlock(&worker->lock);
        curl_multi_wakeup(worker->multi);
    }
    for (unsigned at = 0; at < engine->threads; at++) {
        struct worker *worker = &engine->workers[at];
        pthread_join(worker->thread, NULL);
        while (worker->commands != NULL) { /* only those that were never started are left here */
            struct transfer *first = worker->commands;
            worker->commands = first->next_command;
            if (!first->is_ended) drop(first, data);
        }
        free_worker(worker);
    }
    while (engine->told != NULL) {
        struct transfer *first = engine->told;
        engine->told = first->next_told;
        if (first->is_ended) drop(first, data);
    }
    pthread_mutex_destroy(&engine->lock);
    if (engine->fd >= 0) close(engine->fd);
    if (engine->device_fd >= 0) close(engine->device_fd);
    free(engine->workers);
    free(engine);
}
