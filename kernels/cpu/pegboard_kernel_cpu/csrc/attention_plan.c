/* Plan the work of a step: which tokens attend to which keys. The work is cut into pieces, which the threads of the team take one
 * by one. */
#include "attention.h"

#include <stdlib.h>

#define PIECES_PER_THREAD 4 /* with fewer pieces, the other threads wait longer for the last one */
#define MIN_SPLIT 128 /* in keys; for shorter pieces, merging costs more than splitting saves */
#define MIN_SHARED 256 /* number of keys that rows must share before they read them together */
#define MOST_FAMILIES 16

/* Rows that decode one token each and begin with the same blocks of the cache. */
typedef struct {
    int32_t leader, blocks, count;
} Family;

typedef struct {
    Plan *plan;
    int tile, window, chunk; /* tile: in tokens */
    int start_step; /* the keys of an item start at a multiple of it */
    int most_shared, num_shared; /* tiles of members: allowed, and used so far */
    int num_families;
    Family families[MOST_FAMILIES];
    int64_t num_items;
    float total;
} Work;

static int longer(const void *a, const void *b) {
    float x = ((const Item *)a)->work, y = ((const Item *)b)->work;
    return (x < y) - (x > y);
}

static Item *add_item(Work *w, int row, int first, int count, int key_first, int key_stop) {
    float work = (float)(key_stop - key_first) * count;
    Item *item = &w->plan->items[w->num_items++];
    *item = (Item){.row = row, .first = first, .count = count, .key_first = key_first, .key_stop = key_stop,
                   .num_splits = 1, .pieces = 1, .member = -1, .work = work};
    w->total += work;
    return item;
}

/* Return the number of first blocks that the row and the family have in common. A row's last block is never shared, even if it is
 * full. */
static int common_blocks(const Plan *plan, const Family *family, int row) {
    const int32_t *a = plan->block_table + family->leader * plan->table_stride, *b = plan->block_table + row * plan->table_stride;
    int most = minimum(family->blocks, (plan->seq_lens[row] - 1) / (int)plan->block_size), n = 0;
    while (n < most && a[n] == b[n]) n++;
    return n;
}

/* Add the row to a family and return the family's index, or -1. A family does not take the row if its members would then share
 * far fewer blocks. */
static int find_family(Work *w, int row) {
    const Plan *plan = w->plan;
    int num_tokens = plan->query_start_loc[row + 1] - plan->query_start_loc[row];
    if (w->window || w->chunk || num_tokens != 1 || plan->seq_lens[row] <= MIN_SHARED) return -1;
    for (int f = 0; f < w->num_families; f++) {
        Family *family = &w->families[f];
        int blocks = common_blocks(plan, family, row);
        if (blocks * plan->block_size < MIN_SHARED || blocks * 4 < family->blocks * 3) continue;
        family->blocks = blocks;
        family->count++;
        return f;
    }
    if (w->num_families == MOST_FAMILIES) return -1;
    w->families[w->num_families] = (Family){row, (plan->seq_lens[row] - 1) / (int)plan->block_size, 1};
    return w->num_families++;
}

/* Add the items of a row that shares no blocks: tiles of tokens. The keys of a tile start with the window or chunk of its first token
 * and end with its last token. */
static void add_row(Work *w, int row) {
    const Plan *plan = w->plan;
    int start = plan->query_start_loc[row], num_tokens = plan->query_start_loc[row + 1] - start;
    for (int first = 0; first < num_tokens; first += w->tile) {
        int count = minimum(w->tile, num_tokens - first), last = last_key_in(plan, row, start + first + count - 1);
        int from = first_key(position_in(plan, row, start + first), w->window, w->chunk) / w->start_step * w->start_step;
        add_item(w, row, first, count, from, stop_key(last, w->window, w->chunk, plan->seq_lens[row]));
    }
}

/* Turn all rows into items without splits. A tile of members gets one item for the keys that they share, and one item per member
 * for its other keys. */
static void cut_into_tiles(Work *w) {
    Plan *plan = w->plan;
    int32_t family_of[plan->num_rows + 1], num_members = 0;
    for (int row = 0; row < plan->num_rows; row++) family_of[row] = find_family(w, row);
    for (int row = 0; row < plan->num_rows; row++)
        if (family_of[row] < 0 || w->families[family_of[row]].count < 2) add_row(w, row);
    for (int f = 0; f < w->num_families; f++) {
        const Family *family = &w->families[f];
        if (family->count < 2) continue;
        int shared = family->blocks * (int)plan->block_size / KEY_STEP * KEY_STEP, start = num_members;
        for (int row = family->leader; row < plan->num_rows; row++) {
            if (family_of[row] != f) continue;
            if (num_members - start == w->tile) start = num_members;
            if (num_members == start && w->num_shared == w->most_shared) {
                add_row(w, row);
                continue;
            }
            if (num_members == start) {
                w->num_shared++;
                Item *item = add_item(w, family->leader, 0, 0, 0, shared);
                item->members = start;
            }
            Item *item = &w->plan->items[w->num_items - 1];
            plan->members[num_members++] = row;
            item->num_members = ++item->count;
            item->work += (float)shared;
            w->total += (float)shared;
        }
    }
}

/* Return piece number `split` of an item whose keys are cut into pieces of `step` keys. */
static Item piece_of(const Item *whole, int split, int step) {
    Item piece = *whole;
    piece.key_first = whole->key_first + split * step;
    piece.key_stop = minimum(whole->key_stop, piece.key_first + step);
    piece.work = (float)(piece.key_stop - piece.key_first) * whole->count;
    piece.split = split;
    return piece;
}

/* Fill plan->items. `most_splits`: number of pieces that a step may have in addition to its tiles, because the arrays have room
 * for no more. With 0, a token gets the same bits in every step: its keys are not cut, and always taken in the same chunks. */
EXPORT void attention_plan(Plan *plan, int32_t num_threads, int32_t num_kv_heads, int32_t group, int32_t window,
                           int32_t chunk, int32_t most_splits) {
    Work w = {.plan = plan, .tile = maximum(1, TILE / group), .window = window, .chunk = chunk,
              .start_step = most_splits ? KEY_STEP : CHUNK, .most_shared = most_splits / 2};
    cut_into_tiles(&w);
    int kept = 2 * w.num_shared; /* a part of that room is taken, because each of these tiles needs at least two pieces */
    int64_t num_tiles = w.num_items;
    int partial = 0, merge = 0;
    float fair = w.total * num_kv_heads / (PIECES_PER_THREAD * num_threads);
    for (int64_t i = 0; i < num_tiles; i++) {
        Item whole = plan->items[i];
        int keys = whole.key_stop - whole.key_first, is_shared = whole.num_members > 0;
        int splits = num_threads > 1 && keys ? minimum((int)ceilf(whole.work / fair), keys / MIN_SPLIT) : 1;
        kept -= 2 * is_shared;
        int room = most_splits - partial - kept - is_shared;
        if (splits > room) splits = is_shared ? room : 1;
        if (splits < 1) splits = 1;
        if (splits < 2 && !is_shared) continue;
        int step = ((keys + splits - 1) / splits + KEY_STEP - 1) / KEY_STEP * KEY_STEP;
        splits = (keys + step - 1) / step;
        if (splits < 2 && !is_shared) continue;
        whole.partial = partial, whole.merge = merge++, whole.num_splits = splits + is_shared;
        whole.pieces = splits + whole.num_members;
        for (int split = 0; split < splits; split++) plan->items[split ? w.num_items++ : i] = piece_of(&whole, split, step);
        for (int member = 0; member < whole.num_members; member++) {
            int row = plan->members[whole.members + member];
            Item own = whole;
            own.row = row, own.count = 1, own.key_first = whole.key_stop, own.key_stop = plan->seq_lens[row];
            own.split = splits, own.member = member, own.work = (float)(own.key_stop - own.key_first);
            plan->items[w.num_items++] = own;
        }
        partial += whole.num_splits;
    }
    qsort(plan->items, w.num_items, sizeof(Item), longer);
    plan->num_items = w.num_items;
}
