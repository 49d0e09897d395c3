/* Ranks on one host exchange tensors through memory that they share.
 *
 * The bytes of a tensor are cut into chunks. Each rank copies its chunks into cells of its own and marks them as written. Then it
 * reads the cells of all ranks, in their order, so all ranks get the same bits. In a broadcast, only one rank writes, and the others
 * read its cells. The chunks of all calls are numbered, and chunk n is in cell n % CELLS. A rank writes a cell again when all ranks have marked it as read. Chunks are copied in batches of half the cells,
 * so a rank seldom waits for others that still read.
 *
 * All ranks have the same tasks in the same order, and a task waits only for tasks before it. So the ranks may have different
 * numbers of threads.
 */
#include "common.h"

#include <sched.h>
#include <time.h>

enum { CELL_BYTES = 8192, CELLS = 128, BATCH = CELLS / 2, MAX_RANKS = 56 };

#define PATIENCE 200
#define YIELDS 64 /* between two looks at the clock */

/* What a call does. In `failure`, the call is in the bits from CALL on. */
typedef enum { ALL_REDUCE, ALL_GATHER, BROADCAST } Kind;
enum { CALL = 62 };

/* What a rank says about one of its cells: the number of the last chunk, counted from 1, that it has written to it, and that it has
 * read from this cell of all ranks. */
typedef struct {
    ALIGNED uint64_t written;
    uint64_t read;
} Mark;

/* The memory that the ranks share, after its first page, which is Python's. `failure` is followed by Mark[ranks][CELLS] and by
 * uint8_t[ranks][CELLS][CELL_BYTES]. */
typedef struct {
    ALIGNED uint64_t failure; /* 0, or one bit for each rank that did not come in time, and the call */
} Shared;

/* A member of a group. */
typedef struct {
    Shared *shared;
    int64_t rank, ranks;
    int64_t timeout; /* nanoseconds */
    uint64_t issued; /* chunks of all earlier calls */
    int64_t done; /* tasks of the current call */
} Member;

typedef enum { FLOAT32, BFLOAT16, FLOAT16 } Type;

typedef struct {
    Member *member;
    const uint8_t *x; /* [tokens][columns] */
    int64_t x_stride;
    uint8_t *out; /* all_reduce: [tokens][columns], may be x; all_gather: [tokens][ranks][columns]; broadcast: x */
    int64_t out_stride;
    int64_t columns;
    int64_t item; /* bytes of a number */
    int64_t type; /* of all_reduce: a Type */
    int64_t source; /* of broadcast: the rank that writes */
} Exchange;

EXPORT const int64_t collective_max_ranks = MAX_RANKS;

EXPORT int64_t collective_bytes(int64_t ranks) { return sizeof(Shared) + ranks * CELLS * (sizeof(Mark) + CELL_BYTES); }

static Mark *mark_of(const Member *m, int64_t rank, uint64_t number) {
    return (Mark *)(m->shared + 1) + rank * CELLS + number % CELLS;
}

static uint8_t *cell_of(const Member *m, int64_t rank, uint64_t number) {
    uint8_t *cells = (uint8_t *)((Mark *)(m->shared + 1) + m->ranks * CELLS);
    return cells + (rank * CELLS + (int64_t)(number % CELLS)) * CELL_BYTES;
}

static int has_failed(const Member *m) { return __atomic_load_n(&m->shared->failure, __ATOMIC_RELAXED) != 0; }

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Of the ranks from `rank` to `last`, return those, as bits, whose mark of what they have read (or written) in the cell of chunk
 * `number` is below `least`. */
static uint64_t missing(const Member *m, int64_t rank, int64_t last, uint64_t number, uint64_t least, int is_read) {
    uint64_t ranks = 0;
    for (; rank <= last; rank++) {
        const Mark *mark = mark_of(m, rank, number);
        uint64_t reached = __atomic_load_n(is_read ? &mark->read : &mark->written, __ATOMIC_ACQUIRE);
        if (reached < least) ranks |= 1ull << rank;
    }
    return ranks;
}

/* Wait until no rank is missing. Return 0 if that takes too long or if another rank has given up. */
static int await(const Exchange *a, Kind kind, uint64_t number, uint64_t least, int is_read) {
    const Member *m = a->member;
    int is_one = kind == BROADCAST && !is_read;
    int64_t deadline = 0, first = is_one ? a->source : 0, last = is_one ? a->source : m->ranks - 1;
    for (int64_t spins = 0;; spins++) {
        uint64_t ranks = missing(m, first, last, number, least, is_read);
        if (!ranks) return 1;
        if (spins < PATIENCE) {
            relax();
            continue;
        }
        if (has_failed(m)) return 0;
        if (spins % YIELDS == 0) {
            int64_t time = now();
            if (!deadline) deadline = time + m->timeout;
            if (time > deadline) {
                uint64_t none = 0, failure = ranks | (uint64_t)kind << CALL;
                __atomic_compare_exchange_n(&m->shared->failure, &none, failure, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
                return 0;
            }
        }
        sched_yield();
    }
}

/* Sum `count` numbers that are at the same place of all ranks' cells. */
INLINE void sum_cells(const Member *m, uint64_t number, int64_t first, int64_t count, uint8_t *out, Type type) {
    const uint8_t *cells[MAX_RANKS];
    const int64_t item = type == FLOAT32 ? 4 : 2;
    for (int64_t rank = 0; rank < m->ranks; rank++) cells[rank] = cell_of(m, rank, number) + first;
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t lanes = count - i < LANES ? count - i : LANES;
        uint8_t part[LANES * 4] ALIGNED = {0};
        vfloat sum = splat(0);
        for (int64_t rank = 0; rank < m->ranks; rank++) {
            const uint8_t *from = cells[rank] + i * item;
            if (lanes < LANES) from = memcpy(part, from, lanes * item);
            vfloat x = type == FLOAT32    ? load((const float *)from)
                       : type == BFLOAT16 ? load_bfloat16((const uint16_t *)from)
                                          : load_half((const uint16_t *)from);
            if (rank) sum += x;
            else sum = x;
        }
        uint8_t *to = lanes < LANES ? part : out + i * item;
        if (type == FLOAT32) store((float *)to, sum);
        for (int lane = 0; type != FLOAT32 && lane < LANES; lane++)
            ((uint16_t *)to)[lane] = type == BFLOAT16 ? to_bfloat16(sum[lane]) : to_half(sum[lane]);
        if (lanes < LANES) memcpy(out + i * item, part, lanes * item);
    }
}

/* Bytes [first, end) of a tensor with rows of `width` bytes. */
typedef struct {
    int64_t first, end, width;
} Span;

/* Take what is in one row from the span. Return its number of bytes, and set row and column. */
static int64_t take_row(Span *span, int64_t *row, int64_t *column) {
    int64_t left = span->end - span->first;
    if (left <= 0) return 0;
    *row = span->first / span->width;
    *column = span->first % span->width;
    if (left > span->width - *column) left = span->width - *column;
    span->first += left;
    return left;
}

static void write_cell(const Exchange *a, Span span, uint64_t number) {
    uint8_t *cell = cell_of(a->member, a->member->rank, number);
    for (int64_t row, column, size; (size = take_row(&span, &row, &column)); cell += size)
        memcpy(cell, a->x + row * a->x_stride * a->item + column, size);
}

static void read_cells(const Exchange *a, Span span, uint64_t number, Kind kind) {
    const Member *m = a->member;
    int64_t start = span.first;
    for (int64_t row, column, size; (size = take_row(&span, &row, &column));) {
        uint8_t *out = a->out + row * a->out_stride * a->item + column;
        int64_t place = span.first - size - start, count = size / a->item;
        if (kind == BROADCAST) memcpy(out, cell_of(m, a->source, number) + place, size);
        else if (kind == ALL_GATHER)
            for (int64_t rank = 0; rank < m->ranks; rank++) memcpy(out + rank * span.width, cell_of(m, rank, number) + place, size);
        else if (a->type == FLOAT32) sum_cells(m, number, place, count, out, FLOAT32);
        else if (a->type == BFLOAT16) sum_cells(m, number, place, count, out, BFLOAT16);
        else sum_cells(m, number, place, count, out, FLOAT16);
    }
}

static void exchange(const Step *step, Worker *worker, const Exchange *a, Kind kind) {
    Member *m = a->member;
    int64_t rows = step->num_tokens, width = a->columns * a->item, total = rows * width;
    if (kind != ALL_GATHER && a->x_stride == a->columns && a->out_stride == a->columns) width = total; /* one row */
    int64_t chunks = (total + CELL_BYTES - 1) / CELL_BYTES, num_tasks = 2 * chunks;
    int writes = kind != BROADCAST || a->source == m->rank, reads = kind != BROADCAST || !writes;
    for (int64_t task; (task = next_task(worker, num_tasks)) < num_tasks;) {
        int64_t first = task / (2 * BATCH) * BATCH, in_batch = chunks - first < BATCH ? chunks - first : BATCH;
        int64_t place = task % (2 * BATCH);
        int is_write = place < in_batch;
        int64_t chunk = first + place % in_batch;
        uint64_t number = __atomic_load_n(&m->issued, __ATOMIC_RELAXED) + (uint64_t)chunk;
        Span span = {chunk * CELL_BYTES, chunk * CELL_BYTES + CELL_BYTES < total ? chunk * CELL_BYTES + CELL_BYTES : total, width};
        Mark *mark = mark_of(m, m->rank, number);
        if (has_failed(m)) {
        } else if (is_write && writes && await(a, kind, number, number < CELLS ? 0 : number + 1 - CELLS, 1)) {
            write_cell(a, span, number);
            __atomic_store_n(&mark->written, number + 1, __ATOMIC_RELEASE);
        } else if (!is_write && (!reads || await(a, kind, number, number + 1, 0))) {
            if (reads) read_cells(a, span, number, kind);
            __atomic_store_n(&mark->read, number + 1, __ATOMIC_RELEASE);
        }
        if (__atomic_add_fetch(&m->done, 1, __ATOMIC_ACQ_REL) == num_tasks) { /* this kernel cannot end before the next next_task */
            __atomic_store_n(&m->done, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&m->issued, m->issued + (uint64_t)chunks, __ATOMIC_RELAXED);
        }
    }
}

EXPORT void all_reduce(const Step *step, Worker *worker, const void *arguments) { exchange(step, worker, arguments, ALL_REDUCE); }

EXPORT void all_gather(const Step *step, Worker *worker, const void *arguments) { exchange(step, worker, arguments, ALL_GATHER); }

EXPORT void broadcast(const Step *step, Worker *worker, const void *arguments) { exchange(step, worker, arguments, BROADCAST); }
