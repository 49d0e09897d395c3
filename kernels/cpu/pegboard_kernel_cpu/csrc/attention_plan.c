/* The work of a step: which tokens attend to which keys, in pieces that the team takes one after another. */
#include "attention.h"

#include <stdlib.h>

#define PIECES_PER_THREAD 4 /* with fewer, the last one running keeps the others waiting */
#define MIN_SPLIT 128 /* keys; merging shorter pieces costs more than it wins */

static int longer(const void *a, const void *b) {
    float x = ((const Item *)a)->work, y = ((const Item *)b)->work;
    return (x < y) - (x > y);
}

/* Items before any is split: tiles of `tile` tokens, and the keys that a tile's last token sees behind its first one's window. */
static int64_t cut_into_tiles(const Plan *plan, int tile, int window, float *total) {
    int64_t n = 0;
    for (int row = 0; row < plan->num_rows; row++) {
        int num_tokens = plan->query_start_loc[row + 1] - plan->query_start_loc[row];
        int known = plan->seq_lens[row] - num_tokens;
        for (int first = 0; first < num_tokens; first += tile) {
            int count = minimum(tile, num_tokens - first);
            int from = window ? maximum(0, known + first + 1 - window) / KEY_STEP * KEY_STEP : 0;
            int stop = known + first + count;
            float work = (float)(stop - from) * count;
            plan->items[n++] = (Item){row, first, count, from, stop, 0, 1, 0, 0, work};
            *total += work;
        }
    }
    return n;
}

/* Fill plan->items. `most_splits`: pieces that any step may have on top of its tiles' number (room in items and partials). */
EXPORT void attention_plan(Plan *plan, int32_t num_threads, int32_t num_kv_heads, int32_t group, int32_t window,
                           int32_t most_splits) {
    float total = 0;
    int64_t n = cut_into_tiles(plan, maximum(1, TILE / group), window, &total);
    int64_t num_tiles = n, partial = 0, merge = 0;
    float fair = total * num_kv_heads / (PIECES_PER_THREAD * num_threads);
    for (int64_t i = 0; i < num_tiles && num_threads > 1; i++) {
        Item whole = plan->items[i];
        int keys = whole.key_stop - whole.key_first;
        int splits = minimum((int)ceilf(whole.work / fair), keys / MIN_SPLIT);
        if (splits < 2 || partial + splits > most_splits) continue;
        int step = ((keys + splits - 1) / splits + KEY_STEP - 1) / KEY_STEP * KEY_STEP;
        splits = (keys + step - 1) / step;
        if (splits < 2) continue;
        for (int split = 0; split < splits; split++) {
            Item piece = whole;
            piece.key_first = whole.key_first + split * step;
            piece.key_stop = minimum(whole.key_stop, piece.key_first + step);
            piece.work = (float)(piece.key_stop - piece.key_first) * whole.count;
            piece.split = split, piece.num_splits = splits, piece.partial = partial, piece.merge = merge;
            plan->items[split ? n++ : i] = piece;
        }
        partial += splits;
        merge++;
    }
    qsort(plan->items, n, sizeof(Item), longer);
    plan->num_items = n;
}
