/* The copy loop: many regions per call, without the GIL, and without filling the cache. And the loops that move regions
 * through a socket. `_copy_python.py` documents the functions.
 *
 * A transfer's destination is not read again soon. Non-temporal stores do not fetch its cache lines before
 * overwriting them, which saves a third of the memory traffic.
 *
 * The copies do not check addresses: `locate_regions` found them in registered pools.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#ifndef IOV_MAX
#define IOV_MAX 1024
#endif

/* Shorter regions are copied through the cache: setting up the loop would cost more than it saves. */
#define STREAM_MIN_BYTES 2048

typedef void (*copy_function)(char *, const char *, size_t);

static void copy_plain(char *to, const char *from, size_t length) { memcpy(to, from, length); }

static void fence_stores(void) {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

#if defined(__x86_64__)
#include <immintrin.h>

#define PREFETCH_AHEAD 512

/* Whether to fetch the source past the second-level cache (NTA), as was measured to be best on Zen 4. Intel's processors
 * take 1.3 times as long with that hint (Emerald Rapids), because it replaces what their own prefetchers do. */
static int fetches_past_l2;

static inline void prefetch(const char *from) {
    if (fetches_past_l2)
        _mm_prefetch(from, _MM_HINT_NTA);
    else
        _mm_prefetch(from, _MM_HINT_T0);
}

/* The processor cannot predict where the next region begins, and would stall on its first cache lines. */
static void prefetch_head(const char *from, size_t length) {
    for (size_t at = 0; at < 1024 && at < length; at += 64) prefetch(from + at);
}

/* Copies the bytes before the first 64-byte boundary of the destination; returns how many. */
static size_t copy_head(char *to, const char *from) {
    size_t head = -(uintptr_t)to & 63;
    memcpy(to, from, head);
    return head;
}

static void stream_sse2(char *to, const char *from, size_t length) {
    size_t at = copy_head(to, from);
    for (; at + 64 <= length; at += 64) {
        prefetch(from + at + PREFETCH_AHEAD);
        for (size_t lane = 0; lane < 64; lane += 16)
            _mm_stream_si128((__m128i *)(to + at + lane), _mm_loadu_si128((const __m128i *)(from + at + lane)));
    }
    memcpy(to + at, from + at, length - at);
}

__attribute__((target("avx2"))) static void stream_avx2(char *to, const char *from, size_t length) {
    size_t at = copy_head(to, from);
    for (; at + 128 <= length; at += 128) {
        prefetch(from + at + PREFETCH_AHEAD);
        prefetch(from + at + PREFETCH_AHEAD + 64);
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + at));
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + at + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + at + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + at + 96));
        _mm256_stream_si256((__m256i *)(to + at), a);
        _mm256_stream_si256((__m256i *)(to + at + 32), b);
        _mm256_stream_si256((__m256i *)(to + at + 64), c);
        _mm256_stream_si256((__m256i *)(to + at + 96), d);
    }
    memcpy(to + at, from + at, length - at);
}

__attribute__((target("avx512f"))) static void stream_avx512(char *to, const char *from, size_t length) {
    size_t at = copy_head(to, from);
    for (; at + 256 <= length; at += 256) {
        for (size_t lane = 0; lane < 256; lane += 64) prefetch(from + at + PREFETCH_AHEAD + lane);
        __m512i a = _mm512_loadu_si512(from + at);
        __m512i b = _mm512_loadu_si512(from + at + 64);
        __m512i c = _mm512_loadu_si512(from + at + 128);
        __m512i d = _mm512_loadu_si512(from + at + 192);
        _mm512_stream_si512((__m512i *)(to + at), a);
        _mm512_stream_si512((__m512i *)(to + at + 64), b);
        _mm512_stream_si512((__m512i *)(to + at + 128), c);
        _mm512_stream_si512((__m512i *)(to + at + 192), d);
    }
    memcpy(to + at, from + at, length - at);
}

static copy_function best_stream(void) {
    __builtin_cpu_init();
    fetches_past_l2 = !__builtin_cpu_is("intel");
    if (__builtin_cpu_supports("avx512f")) return stream_avx512;
    if (__builtin_cpu_supports("avx2")) return stream_avx2;
    return stream_sse2;
}
#else
static void prefetch_head(const char *from, size_t length) { (void)from, (void)length; }

static copy_function best_stream(void) { return copy_plain; }
#endif

static copy_function stream;

/* Arrays of 8-byte integers, all of the same length, borrowed from the caller. */
typedef struct {
    Py_buffer buffers[3];
    int num_arrays;
    Py_ssize_t count;
} words_t;

static void release_words(words_t *words) {
    for (int i = 0; i < words->num_arrays; i++) PyBuffer_Release(&words->buffers[i]);
}

/* Adds an array. On failure, releases all of them. */
static int acquire_words(words_t *words, PyObject *array, int flags) {
    Py_buffer *buffer = &words->buffers[words->num_arrays];
    if (PyObject_GetBuffer(array, buffer, PyBUF_STRIDES | PyBUF_FORMAT | flags) < 0) {
        release_words(words);
        return -1;
    }
    words->num_arrays++;
    if (buffer->ndim != 1 || buffer->itemsize != 8 || buffer->format == NULL ||
        strchr("lqLQ", buffer->format[0]) == NULL || buffer->shape[0] != words->buffers[0].shape[0]) {
        release_words(words);
        PyErr_SetString(PyExc_ValueError, "addresses and lengths must be arrays of 64-bit integers, all of the same length");
        return -1;
    }
    words->count = buffer->shape[0];
    return 0;
}

static char *word_address(const words_t *words, int array, Py_ssize_t index) {
    return (char *)words->buffers[array].buf + index * words->buffers[array].strides[0];
}

static uint64_t word_at(const words_t *words, int array, Py_ssize_t index) {
    uint64_t word;
    memcpy(&word, word_address(words, array, index), sizeof word);
    return word;
}

/* Where regions lie: at the addresses in an array, or end to end from `next`. */
typedef struct {
    int array;
    uint64_t next;
} places_t;

#define END_TO_END -1

static char *place_at(const words_t *words, const places_t *places, Py_ssize_t index) {
    return (char *)(uintptr_t)(places->array == END_TO_END ? places->next : word_at(words, places->array, index));
}

/* Copies regions, whose lengths are the last array, and releases the arrays. */
static PyObject *copy_all(words_t *words, places_t to, places_t from) {
    int lengths = words->num_arrays - 1;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < words->count; i++) {
        uint64_t length = word_at(words, lengths, i);
        char *target = place_at(words, &to, i);
        const char *source = place_at(words, &from, i);
        to.next += length;
        from.next += length;
        if (i + 1 < words->count) prefetch_head(place_at(words, &from, i + 1), word_at(words, lengths, i + 1));
        (length >= STREAM_MIN_BYTES ? stream : copy_plain)(target, source, length);
    }
    fence_stores();
    Py_END_ALLOW_THREADS
    release_words(words);
    Py_RETURN_NONE;
}

static PyObject *copy_regions(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *to, *from, *lengths;
    words_t words = {0};
    if (!PyArg_ParseTuple(args, "OOO", &to, &from, &lengths)) return NULL;
    if (acquire_words(&words, to, 0) < 0 || acquire_words(&words, from, 0) < 0 || acquire_words(&words, lengths, 0) < 0)
        return NULL;
    return copy_all(&words, (places_t){.array = 0}, (places_t){.array = 1});
}

static PyObject *gather_regions(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long to;
    PyObject *from, *lengths;
    words_t words = {0};
    if (!PyArg_ParseTuple(args, "KOO", &to, &from, &lengths)) return NULL;
    if (acquire_words(&words, from, 0) < 0 || acquire_words(&words, lengths, 0) < 0) return NULL;
    return copy_all(&words, (places_t){END_TO_END, to}, (places_t){.array = 0});
}

static PyObject *scatter_regions(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long from;
    PyObject *to, *lengths;
    words_t words = {0};
    if (!PyArg_ParseTuple(args, "OKO", &to, &from, &lengths)) return NULL;
    if (acquire_words(&words, to, 0) < 0 || acquire_words(&words, lengths, 0) < 0) return NULL;
    return copy_all(&words, (places_t){.array = 0}, (places_t){END_TO_END, from});
}

/* Reads all bytes of the regions [first, first + count). Returns 0 or an errno. */
static int read_batch(pid_t pid, const words_t *words, Py_ssize_t first, Py_ssize_t count) {
    struct iovec local[IOV_MAX], remote[IOV_MAX];
    for (Py_ssize_t i = 0; i < count; i++) {
        local[i].iov_base = (void *)(uintptr_t)word_at(words, 0, first + i);
        remote[i].iov_base = (void *)(uintptr_t)word_at(words, 1, first + i);
        local[i].iov_len = remote[i].iov_len = word_at(words, 2, first + i);
    }
    Py_ssize_t at = 0;
    while (at < count) {
        ssize_t done = process_vm_readv(pid, local + at, count - at, remote + at, count - at, 0);
        if (done < 0) return errno;
        if (done == 0) return EFAULT;
        /* A call stops after 2 GiB, and before the first page that it cannot read. Continue: the next call gives the errno. */
        for (; at < count && (size_t)done >= local[at].iov_len; at++) done -= local[at].iov_len;
        if (at < count) {
            local[at].iov_base = (char *)local[at].iov_base + done;
            remote[at].iov_base = (char *)remote[at].iov_base + done;
            local[at].iov_len = remote[at].iov_len -= done;
        }
    }
    return 0;
}

static PyObject *read_regions_of(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *to, *from, *lengths;
    int pid, error = 0;
    words_t words = {0};
    if (!PyArg_ParseTuple(args, "iOOO", &pid, &to, &from, &lengths)) return NULL;
    if (acquire_words(&words, to, 0) < 0 || acquire_words(&words, from, 0) < 0 || acquire_words(&words, lengths, 0) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < words.count && !error; at += IOV_MAX) {
        Py_ssize_t rest = words.count - at;
        error = read_batch(pid, &words, at, rest < IOV_MAX ? rest : IOV_MAX);
    }
    Py_END_ALLOW_THREADS
    release_words(&words);
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

/* -- sockets ------------------------------------------------------------------------------------------------------- */

static double clock_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* The rows that are left of a table of `struct iovec`, borrowed from the caller. */
typedef struct {
    Py_buffer buffer;
    struct iovec *rows;
    Py_ssize_t count, at;
} pieces_t;

static int acquire_pieces(pieces_t *pieces, PyObject *table, Py_ssize_t at) {
    if (PyObject_GetBuffer(table, &pieces->buffer, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) return -1;
    pieces->rows = pieces->buffer.buf;
    pieces->count = pieces->buffer.len / (Py_ssize_t)sizeof *pieces->rows;
    pieces->at = at;
    if (pieces->buffer.len % (Py_ssize_t)sizeof *pieces->rows || at < 0 || at > pieces->count) {
        PyBuffer_Release(&pieces->buffer);
        PyErr_SetString(PyExc_ValueError, "a table of pieces has rows of 16 bytes, and begins at one of them");
        return -1;
    }
    return 0;
}

/* Makes the table begin where the first `num_bytes` bytes of it end. */
static void advance_pieces(pieces_t *pieces, size_t num_bytes) {
    struct iovec *row = pieces->rows + pieces->at;
    for (; pieces->at < pieces->count && num_bytes >= row->iov_len; row++, pieces->at++) num_bytes -= row->iov_len;
    if (num_bytes) {
        row->iov_base = (char *)row->iov_base + num_bytes;
        row->iov_len -= num_bytes;
    }
}

/* Bytes are hashed while they are in the second-level cache. */
#define HASHED_BYTES (256 << 10)

/* Rows [first, end) of a table are hashed as they are moved, by calling `update`; none of them if it is None. */
typedef struct {
    PyObject *update;
    Py_ssize_t first, end;
} hashing_t;

/* Hashes the first `num_bytes` bytes of a table. Returns -1 with an exception if that fails. */
static int hash_pieces(const hashing_t *hashing, const pieces_t *pieces, size_t num_bytes) {
    const struct iovec *row = pieces->rows + pieces->at;
    for (Py_ssize_t at = pieces->at; num_bytes; row++, at++) {
        size_t length = row->iov_len < num_bytes ? row->iov_len : num_bytes;
        num_bytes -= length;
        if (at < hashing->first || at >= hashing->end || !length) continue;
        PyObject *view = PyMemoryView_FromMemory(row->iov_base, (Py_ssize_t)length, PyBUF_READ);
        PyObject *result = view ? PyObject_CallFunctionObjArgs(hashing->update, view, NULL) : NULL;
        Py_XDECREF(view);
        if (result == NULL) return -1;
        Py_DECREF(result);
    }
    return 0;
}

/* Releases the table; returns how far it came, or raises why it did not come further than before. */
static PyObject *moved(pieces_t *pieces, size_t num_bytes, int error) {
    Py_ssize_t at = pieces->at;
    PyBuffer_Release(&pieces->buffer);
    if (PyErr_Occurred()) return NULL;
    if (!num_bytes && error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return Py_BuildValue("nn", (Py_ssize_t)num_bytes, at);
}

/* Calls `sendmsg` or `recvmsg` once, hashes what was moved, and advances the table. Returns what the call returned, or -1
 * with errno 0 if hashing failed, and sets `is_full` if the call moved all that it was asked to. */
static ssize_t move_pieces(pieces_t *pieces, const hashing_t *hashing, int *is_full, int fd, int flags, int is_sending) {
    size_t most = hashing->update == Py_None ? SIZE_MAX : HASHED_BYTES;
    struct msghdr message = {.msg_iov = pieces->rows + pieces->at};
    size_t num_bytes = 0;
    Py_ssize_t rest = pieces->count - pieces->at;
    while ((Py_ssize_t)message.msg_iovlen < rest && message.msg_iovlen < IOV_MAX && num_bytes < most)
        num_bytes += message.msg_iov[message.msg_iovlen++].iov_len;
    /* The last row is shorter during the call. */
    struct iovec *last = message.msg_iov + message.msg_iovlen - 1;
    size_t surplus = num_bytes > most ? num_bytes - most : 0;
    last->iov_len -= surplus;
    ssize_t moved;
    do moved = is_sending ? sendmsg(fd, &message, flags) : recvmsg(fd, &message, flags);
    while (moved < 0 && errno == EINTR);
    last->iov_len += surplus;
    *is_full = moved > 0 && (size_t)moved == num_bytes - surplus;
    if (moved > 0 && hashing->update != Py_None) {
        PyGILState_STATE state = PyGILState_Ensure();
        if (hash_pieces(hashing, pieces, moved) < 0) moved = -1;
        PyGILState_Release(state);
        errno = 0;
    }
    if (moved > 0) advance_pieces(pieces, moved);
    return moved;
}

static PyObject *send_pieces(PyObject *self, PyObject *args) {
    (void)self;
    int fd, flags, is_full, error = 0;
    PyObject *table;
    Py_ssize_t at;
    hashing_t hashing;
    size_t total = 0;
    pieces_t pieces;
    if (!PyArg_ParseTuple(args, "iOnOnni", &fd, &table, &at, &hashing.update, &hashing.first, &hashing.end, &flags) ||
        acquire_pieces(&pieces, table, at) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    while (pieces.at < pieces.count) {
        ssize_t sent = move_pieces(&pieces, &hashing, &is_full, fd, flags | MSG_NOSIGNAL | MSG_DONTWAIT, 1);
        if (sent < 0) {
            error = errno;
            break;
        }
        total += sent;
    }
    Py_END_ALLOW_THREADS
    return moved(&pieces, total, error);
}

/* Waits until a socket of an epoll set is ready; returns whether only this one is, and only to receive. */
static int only_has_more(int epoll, int fd, double until_s, double spin_until_s) {
    for (;;) {
        double now_s = clock_s();
        int is_spinning = now_s < spin_until_s;
        if (now_s >= until_s) return 0;
        struct epoll_event events[2];
        /* Rounded up to ms. If it is too long, another read or a timer is late by less than one. */
        int ready = epoll_wait(epoll, events, 2, is_spinning ? 0 : (int)((until_s - now_s) * 1e3) + 1);
        if (ready) return ready == 1 && events[0].data.fd == fd && !(events[0].events & EPOLLOUT);
        if (is_spinning) sched_yield();
    }
}

static PyObject *receive_pieces(PyObject *self, PyObject *args) {
    (void)self;
    int fd, epoll, is_full, error = 0;
    PyObject *table;
    Py_ssize_t at;
    hashing_t hashing;
    double wait_s, spin_s;
    size_t total = 0;
    pieces_t pieces;
    if (!PyArg_ParseTuple(args, "iOnOnnidd", &fd, &table, &at, &hashing.update, &hashing.first, &hashing.end, &epoll,
                          &wait_s, &spin_s) ||
        acquire_pieces(&pieces, table, at) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    double until_s = wait_s > 0 ? clock_s() + wait_s : 0;
    while (pieces.at < pieces.count) {
        ssize_t received = move_pieces(&pieces, &hashing, &is_full, fd, MSG_DONTWAIT, 0);
        error = received < 0 ? errno : 0;
        if (received == 0 || (received < 0 && error != EAGAIN)) break;
        if (received > 0) total += received;
        if (is_full) continue;
        /* The socket is empty now. Python takes longer to come back here than the next bytes take to come. */
        if (until_s == 0 || !only_has_more(epoll, fd, until_s, clock_s() + spin_s)) break;
    }
    Py_END_ALLOW_THREADS
    return moved(&pieces, total, error);
}

static PyObject *busy_poll(PyObject *self, PyObject *args) {
    (void)self;
    int epoll, is_ready = 0;
    double seconds, longest_s, now_s;
    if (!PyArg_ParseTuple(args, "idd", &epoll, &seconds, &longest_s)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    double until_s = clock_s() + seconds, began_s;
    struct epoll_event event;
    do {
        is_ready = epoll_wait(epoll, &event, 1, 0) > 0;
        if (is_ready) break;
        began_s = clock_s();
        sched_yield();
        now_s = clock_s();
        if (now_s - began_s > longest_s) is_ready = -1;
    } while (!is_ready && now_s < until_s);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(is_ready);
}

/* -- pools --------------------------------------------------------------------------------------------------------- */

/* Finds the first segment that ends after an offset. */
static Py_ssize_t segment_of(const words_t *segments, int64_t offset) {
    Py_ssize_t low = 0, high = segments->count;
    while (low < high) {
        Py_ssize_t middle = low + (high - low) / 2;
        if ((int64_t)word_at(segments, 0, middle) > offset)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static PyObject *locate_regions(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *addresses, *offsets, *lengths, *ends, *shifts;
    words_t regions = {0}, segments = {0};
    if (!PyArg_ParseTuple(args, "OOOOO", &addresses, &offsets, &lengths, &ends, &shifts)) return NULL;
    if (acquire_words(&regions, addresses, PyBUF_WRITABLE) < 0 || acquire_words(&regions, offsets, 0) < 0 ||
        acquire_words(&regions, lengths, 0) < 0)
        return NULL;
    if (acquire_words(&segments, ends, 0) < 0 || acquire_words(&segments, shifts, 0) < 0) {
        release_words(&regions);
        return NULL;
    }
    Py_ssize_t i = 0;
    for (; i < regions.count; i++) {
        int64_t offset = (int64_t)word_at(&regions, 1, i), length = (int64_t)word_at(&regions, 2, i);
        Py_ssize_t segment = segment_of(&segments, offset);
        /* Never compute offset + length: a sum of hostile numbers can wrap. */
        if (offset < 0 || length <= 0 || segment == segments.count ||
            length > (int64_t)word_at(&segments, 0, segment) - offset)
            break;
        uint64_t address = word_at(&segments, 1, segment) + (uint64_t)offset;
        memcpy(word_address(&regions, 0, i), &address, sizeof address);
    }
    release_words(&segments);
    release_words(&regions);
    return PyLong_FromSsize_t(i);
}

/* The sum, modulo 2**64, as a signed number: what numpy's would be. */
static PyObject *sum_words(PyObject *self, PyObject *array) {
    (void)self;
    words_t words = {0};
    if (acquire_words(&words, array, 0) < 0) return NULL;
    uint64_t sum = 0;
    for (Py_ssize_t i = 0; i < words.count; i++) sum += word_at(&words, 0, i);
    release_words(&words);
    return PyLong_FromLongLong((int64_t)sum);
}

static PyObject *sum_lengths(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *array;
    long long most, sum = 0;
    words_t words = {0};
    if (!PyArg_ParseTuple(args, "OL", &array, &most) || acquire_words(&words, array, 0) < 0) return NULL;
    for (Py_ssize_t i = 0; i < words.count && sum >= 0; i++) {
        int64_t length = (int64_t)word_at(&words, 0, i);
        /* Compared with what is left, because a sum of hostile numbers can wrap. */
        sum = length <= 0 || length > most - sum ? -1 : sum + length;
    }
    release_words(&words);
    return PyLong_FromLongLong(sum);
}

static PyObject *load_word(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "K", &address)) return NULL;
    /* The loads of the copy come before the load of the word. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return PyLong_FromLongLong(__atomic_load_n((int64_t *)(uintptr_t)address, __ATOMIC_ACQUIRE));
}

static PyObject *store_word(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address;
    long long value;
    if (!PyArg_ParseTuple(args, "KL", &address, &value)) return NULL;
    __atomic_store_n((int64_t *)(uintptr_t)address, value, __ATOMIC_SEQ_CST);
    /* On machines with a weaker order than x86, plain stores could overtake the store without this fence. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

/* CUDA's `cuMemcpyAsync`: target, source, number of bytes, stream. */
typedef int (*copy_on_stream_function)(uint64_t, uint64_t, size_t, void *);

static PyObject *copy_on_stream(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long function, on;
    PyObject *to, *from, *lengths;
    int status = 0;
    words_t words = {0};
    if (!PyArg_ParseTuple(args, "KKOOO", &function, &on, &to, &from, &lengths)) return NULL;
    if (acquire_words(&words, to, 0) < 0 || acquire_words(&words, from, 0) < 0 || acquire_words(&words, lengths, 0) < 0)
        return NULL;
    copy_on_stream_function copy = (copy_on_stream_function)(uintptr_t)function;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < words.count && status == 0; i++)
        status = copy(word_at(&words, 0, i), word_at(&words, 1, i), word_at(&words, 2, i), (void *)(uintptr_t)on);
    Py_END_ALLOW_THREADS
    release_words(&words);
    return PyLong_FromLong(status);
}

/* A host function for a CUDA stream: writes to the eventfd that its argument is. The driver's thread calls it, without
 * Python's lock, so a signal never waits for the engine's thread. */
static void signal_eventfd(void *descriptor) {
    uint64_t one = 1;
    ssize_t written = write((int)(intptr_t)descriptor, &one, sizeof one);
    (void)written; /* it fails only if the counter is full, and then the descriptor is readable already */
}

static PyObject *signal_function(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return PyLong_FromVoidPtr((void *)signal_eventfd);
}

static PyMethodDef methods[] = {
    {"copy_regions", copy_regions, METH_VARARGS, "Copy regions within this process, without the GIL."},
    {"gather_regions", gather_regions, METH_VARARGS, "Copy regions to where they lie end to end."},
    {"scatter_regions", scatter_regions, METH_VARARGS, "Copy regions from where they lie end to end."},
    {"read_regions_of", read_regions_of, METH_VARARGS, "Read regions of another process, without the GIL."},
    {"locate_regions", locate_regions, METH_VARARGS, "Find the addresses of regions, up to the first that is not in the pool."},
    {"sum_words", sum_words, METH_O, "Add up an array of 64-bit integers."},
    {"sum_lengths", sum_lengths, METH_VARARGS, "Add up lengths that are positive, up to a limit."},
    {"load_word", load_word, METH_VARARGS, "Load the 64-bit word at an address, after all loads before it."},
    {"store_word", store_word, METH_VARARGS, "Store a 64-bit word at an address, before all stores after it."},
    {"send_pieces", send_pieces, METH_VARARGS, "Send pieces of memory, as many as a socket takes, without the GIL."},
    {"receive_pieces", receive_pieces, METH_VARARGS, "Fill pieces of memory from a socket, without the GIL."},
    {"busy_poll", busy_poll, METH_VARARGS, "Poll an epoll set without blocking, again and again, without the GIL."},
    {"copy_on_stream", copy_on_stream, METH_VARARGS, "Launch copies of regions on a CUDA stream, without the GIL."},
    {"signal_function", signal_function, METH_NOARGS, "The address of a C function that writes to an eventfd."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "The copy loop.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    stream = best_stream();
    return PyModule_Create(&module);
}
