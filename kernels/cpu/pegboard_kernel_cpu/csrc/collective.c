/* Ranks on one host exchange rows through memory that their processes share.
 *
 *     failed | written[rank] … | slots [rank][2]
 *
 * An exchange has a number n. Each rank copies its rows into its slot n % 2 (`share`) and then sets written[rank] = n. It waits until
 * all ranks have done so, and reads their slots (`sum_shares`, `gather_shares`). All ranks add in the same order, so they get the
 * same bits. Two slots are enough: a rank that sets written = n has finished reading n - 1, so no one still reads the slot of n - 1
 * when n + 1 is written.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <time.h>

#include "common.h"

#define FIRST_SLOT 65536 /* bytes before the slots */
#define SPINS 2000       /* before a waiting thread lets others run */

/* A rank's view of its group. All threads of a kernel write the same values. */
typedef struct {
    uint8_t *memory;
    int64_t rank, size;
    int64_t slot_bytes;
    int64_t timeout; /* nanoseconds */
    uint64_t number; /* of the exchange that goes on */
    uint64_t done;   /* of the last one that has ended */
} Member;

typedef struct {
    const float *x; /* [tokens][columns] */
    int64_t x_stride;
    int64_t columns;
    Member *member;
} Share;

typedef struct {
    float *out; /* [tokens][columns], or [tokens][size · columns] */
    int64_t out_stride;
    int64_t columns;
    Member *member;
} TakeShares;

INLINE int64_t *failed(const Member *m) { return (int64_t *)m->memory; }
INLINE uint64_t *written(const Member *m, int64_t rank) { return (uint64_t *)(m->memory + LINE * (rank + 1)); }
INLINE float *slot(const Member *m, int64_t rank) {
    return (float *)(m->memory + FIRST_SLOT + (2 * rank + (int64_t)(m->number & 1)) * m->slot_bytes);
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* Tell the others that this rank's rows are there, and wait for theirs. Returns 0 if a rank does not come in time, and for all ranks
 * after that. */
static int meet(Member *m) {
    __atomic_store_n(written(m, m->rank), m->number, __ATOMIC_RELEASE);
    int64_t started = 0;
    for (int64_t rank = 0; rank < m->size; rank++)
        for (int64_t spins = 0; __atomic_load_n(written(m, rank), __ATOMIC_ACQUIRE) < m->number; spins++) {
            if (__atomic_load_n(failed(m), __ATOMIC_RELAXED)) return 0;
            if (spins < SPINS) continue;
            sched_yield();
            if (!started) started = now();
            else if (now() - started > m->timeout) __atomic_store_n(failed(m), 1, __ATOMIC_RELAXED);
        }
    return !__atomic_load_n(failed(m), __ATOMIC_RELAXED);
}

/* A thread may call a kernel after all of its tasks are done, when the others are further on. So `Member` is used only within tasks. */

EXPORT void share(const Step *step, Worker *worker, const void *arguments) {
    const Share *a = arguments;
    Member *m = a->member;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        m->number = m->done + 1;
        memcpy(slot(m, m->rank) + t * a->columns, a->x + t * a->x_stride, a->columns * sizeof(float));
    }
}

EXPORT void sum_shares(const Step *step, Worker *worker, const void *arguments) {
    const TakeShares *a = arguments;
    Member *m = a->member;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        float *out = a->out + t * a->out_stride;
        if (meet(m)) {
            memcpy(out, slot(m, 0) + t * a->columns, a->columns * sizeof(float));
            for (int64_t rank = 1; rank < m->size; rank++) {
                const float *other = slot(m, rank) + t * a->columns;
                for (int64_t c = 0; c < a->columns; c++) out[c] += other[c];
            }
        }
        m->done = m->number;
    }
}

EXPORT void gather_shares(const Step *step, Worker *worker, const void *arguments) {
    const TakeShares *a = arguments;
    Member *m = a->member;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        if (meet(m))
            for (int64_t rank = 0; rank < m->size; rank++)
                memcpy(a->out + t * a->out_stride + rank * a->columns, slot(m, rank) + t * a->columns, a->columns * sizeof(float));
        m->done = m->number;
    }
}
