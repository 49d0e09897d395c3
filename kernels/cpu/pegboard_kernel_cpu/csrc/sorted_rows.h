/* The tasks of a product of experts: rows of activations are sorted by expert, and each expert multiplies its own. A task is some
 * groups of an expert's matrix times at most `block` of its rows. Experts without rows have no tasks, so their weights are not read.
 */
#ifndef PEGBOARD_SORTED_ROWS_H
#define PEGBOARD_SORTED_ROWS_H

#include "common.h"

typedef struct {
    const int32_t *starts; /* [experts + 1]: expert e has the rows starts[e] to starts[e + 1] */
    int64_t num_experts, block;
    int64_t groups, per_task, pieces; /* groups of rows of an expert's matrix, of a task, and the number of tasks that they are */
    int64_t total; /* number of tasks */
    int64_t passed; /* number of tasks of earlier experts */
    int64_t expert, start, end, group, stop; /* the task: its rows [start, end) and groups [group, stop) */
} SortedRows;

INLINE int64_t blocks_of(const SortedRows *s, int64_t expert) {
    return (s->starts[expert + 1] - s->starts[expert] + s->block - 1) / s->block;
}

INLINE SortedRows sorted_rows(const int32_t *starts, int64_t num_experts, int64_t groups, int64_t most, int64_t block, int num_threads) {
    SortedRows s = {.starts = starts, .num_experts = num_experts, .block = block, .groups = groups};
    int64_t blocks = 0;
    for (int64_t expert = 0; expert < num_experts; expert++) blocks += blocks_of(&s, expert);
    int64_t share = groups * blocks / (num_threads * 8);
    s.per_task = share < 1 ? 1 : share > most ? most : share;
    s.pieces = (groups + s.per_task - 1) / s.per_task;
    s.total = blocks * s.pieces;
    return s;
}

/* Take the next task. Returns 0 if none is left. The tasks of a thread are in ascending order. */
INLINE int next_rows(SortedRows *s, Worker *worker) {
    int64_t task = next_task(worker, s->total);
    if (task >= s->total) return 0;
    for (int64_t own; task - s->passed >= (own = blocks_of(s, s->expert) * s->pieces); s->expert++) s->passed += own;
    task -= s->passed;
    int64_t last = s->starts[s->expert + 1];
    s->start = s->starts[s->expert] + task / s->pieces * s->block;
    s->end = s->start + s->block < last ? s->start + s->block : last;
    s->group = task % s->pieces * s->per_task;
    s->stop = s->group + s->per_task < s->groups ? s->group + s->per_task : s->groups;
    return 1;
}

#endif
