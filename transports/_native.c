/* The copy loop: many regions in one call, without the GIL, past the cache.
 *
 * A transfer's destination is not read again soon, so its cache lines need not be fetched before they
 * are overwritten: non-temporal stores save that third of the memory traffic.
 *
 * Addresses come from region tables that were checked against registered pools; nothing is checked here.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#ifndef IOV_MAX
#define IOV_MAX 1024
#endif

/* Shorter regions stay in the cache: the loop's set-up would cost more than it saves. */
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

/* The processor cannot guess where the next region begins, and would wait for its first lines. */
static void prefetch_head(const char *from, size_t length) {
    for (size_t at = 0; at < 1024 && at < length; at += 64) _mm_prefetch(from + at, _MM_HINT_NTA);
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
        _mm_prefetch(from + at + PREFETCH_AHEAD, _MM_HINT_NTA);
        for (size_t lane = 0; lane < 64; lane += 16)
            _mm_stream_si128((__m128i *)(to + at + lane), _mm_loadu_si128((const __m128i *)(from + at + lane)));
    }
    memcpy(to + at, from + at, length - at);
}

__attribute__((target("avx2"))) static void stream_avx2(char *to, const char *from, size_t length) {
    size_t at = copy_head(to, from);
    for (; at + 128 <= length; at += 128) {
        _mm_prefetch(from + at + PREFETCH_AHEAD, _MM_HINT_NTA);
        _mm_prefetch(from + at + PREFETCH_AHEAD + 64, _MM_HINT_NTA);
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
        for (size_t lane = 0; lane < 256; lane += 64) _mm_prefetch(from + at + PREFETCH_AHEAD + lane, _MM_HINT_NTA);
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
    if (__builtin_cpu_supports("avx512f")) return stream_avx512;
    if (__builtin_cpu_supports("avx2")) return stream_avx2;
    return stream_sse2;
}
#else
static void prefetch_head(const char *from, size_t length) { (void)from, (void)length; }

static copy_function best_stream(void) { return copy_plain; }
#endif

static copy_function stream;

/* Three equally long arrays of 8-byte integers, borrowed from the caller. */
typedef struct {
    Py_buffer buffers[3];
    const uint64_t *to, *from, *lengths;
    Py_ssize_t count;
} regions_t;

static void release_regions(regions_t *regions, int acquired) {
    for (int i = 0; i < acquired; i++) PyBuffer_Release(&regions->buffers[i]);
}

static int acquire_regions(regions_t *regions, PyObject *to, PyObject *from, PyObject *lengths) {
    PyObject *objects[3] = {to, from, lengths};
    for (int i = 0; i < 3; i++) {
        if (PyObject_GetBuffer(objects[i], &regions->buffers[i], PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
            release_regions(regions, i);
            return -1;
        }
        const char *format = regions->buffers[i].format;
        if (regions->buffers[i].itemsize != 8 || format == NULL || strchr("lqLQ", format[0]) == NULL ||
            regions->buffers[i].len != regions->buffers[0].len) {
            release_regions(regions, i + 1);
            PyErr_SetString(PyExc_ValueError, "addresses and lengths are equally long buffers of 64-bit integers");
            return -1;
        }
    }
    regions->to = regions->buffers[0].buf;
    regions->from = regions->buffers[1].buf;
    regions->lengths = regions->buffers[2].buf;
    regions->count = regions->buffers[0].len / 8;
    return 0;
}

static PyObject *copy_regions(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *to, *from, *lengths;
    regions_t regions;
    if (!PyArg_ParseTuple(args, "OOO", &to, &from, &lengths)) return NULL;
    if (acquire_regions(&regions, to, from, lengths) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < regions.count; i++) {
        if (i + 1 < regions.count) prefetch_head((const char *)(uintptr_t)regions.from[i + 1], regions.lengths[i + 1]);
        copy_function copy = regions.lengths[i] >= STREAM_MIN_BYTES ? stream : copy_plain;
        copy((char *)(uintptr_t)regions.to[i], (const char *)(uintptr_t)regions.from[i], regions.lengths[i]);
    }
    fence_stores();
    Py_END_ALLOW_THREADS
    release_regions(&regions, 3);
    Py_RETURN_NONE;
}

/* Reads regions [first, first + count) whole. Returns 0, or an errno. */
static int read_batch(pid_t pid, const regions_t *regions, Py_ssize_t first, Py_ssize_t count) {
    struct iovec local[IOV_MAX], remote[IOV_MAX];
    for (Py_ssize_t i = 0; i < count; i++) {
        local[i].iov_base = (void *)(uintptr_t)regions->to[first + i];
        remote[i].iov_base = (void *)(uintptr_t)regions->from[first + i];
        local[i].iov_len = remote[i].iov_len = regions->lengths[first + i];
    }
    Py_ssize_t at = 0;
    while (at < count) {
        ssize_t done = process_vm_readv(pid, local + at, count - at, remote + at, count - at, 0);
        if (done < 0) return errno;
        if (done == 0) return EFAULT;
        /* A call is cut at 2 GiB, and at the first page that it cannot read: go on, to get the errno. */
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
    regions_t regions;
    if (!PyArg_ParseTuple(args, "iOOO", &pid, &to, &from, &lengths)) return NULL;
    if (acquire_regions(&regions, to, from, lengths) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < regions.count && !error; at += IOV_MAX) {
        Py_ssize_t rest = regions.count - at;
        error = read_batch(pid, &regions, at, rest < IOV_MAX ? rest : IOV_MAX);
    }
    Py_END_ALLOW_THREADS
    release_regions(&regions, 3);
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyObject *load_word(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "K", &address)) return NULL;
    /* The copy's loads come before the word's. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return PyLong_FromLongLong(__atomic_load_n((int64_t *)(uintptr_t)address, __ATOMIC_ACQUIRE));
}

static PyObject *store_word(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long address;
    long long value;
    if (!PyArg_ParseTuple(args, "KL", &address, &value)) return NULL;
    __atomic_store_n((int64_t *)(uintptr_t)address, value, __ATOMIC_SEQ_CST);
    /* A store alone does not hold back the plain stores that follow it, on machines weaker than x86. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy_regions", copy_regions, METH_VARARGS, "Copy regions of this process, without the GIL."},
    {"read_regions_of", read_regions_of, METH_VARARGS, "Read regions of another process, without the GIL."},
    {"load_word", load_word, METH_VARARGS, "Load the 64-bit word at an address, after all loads before it."},
    {"store_word", store_word, METH_VARARGS, "Store a 64-bit word at an address, before all stores after it."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "The copy loop.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    stream = best_stream();
    return PyModule_Create(&module);
}
