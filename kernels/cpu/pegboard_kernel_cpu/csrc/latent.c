/* Latent attention (MLA, DeepSeek-AI 2024) over the paged cache. A token's key consists of its latent and of a rotated part, and its
 * value is the latent. All heads share them, because the up-projections are applied to the queries before, and to the results after
 * ("absorbed"). For the structure see attention.c. Here a key is a row of the cache, so a score is a dot product along its channels.
 */
#include "latent.h"

/* A tile while it is computed. Scores are logarithms to base 2. */
typedef struct {
    const LatentArguments *a;
    int dim, rank, num_heads, type; /* dim: channels of a key; type: of the elements that the products read */
    const int32_t *members; /* the row of each token; NULL = all tokens belong to one row */
    int num_rows;
    int stop[TILE]; /* the number of keys of the chunk that a row attends to */
    int position[TILE];
    float top[TILE], total[TILE], factor[TILE];
    const char *keys[CHUNK + KEYS];
    ALIGNED float scores[TILE * CHUNK_STRIDE];
    ALIGNED float q[TILE * MAX_LATENT]; /* [rows][dim], scaled */
    ALIGNED float out[TILE * MAX_LATENT]; /* [rows][rank] */
    ALIGNED float staged[CHUNK * MAX_LATENT]; /* keys that have no other form that the products read */
    int rounds; /* whether queries and weights are rounded to bfloat16, for products of such numbers */
#if defined(__AVX512BF16__)
    ALIGNED uint16_t rounded_q[TILE * MAX_LATENT], rounded_weights[ROWS * CHUNK_STRIDE];
#endif
} Tile;

INLINE int64_t token_of(const Tile *t, const Item *item, int index) {
    const int32_t *starts = t->a->plan->query_start_loc;
    return t->members ? starts[t->members[index]] : starts[item->row] + item->first + index;
}

static void load_queries(Tile *t, const Item *item, int base) {
    const LatentArguments *a = t->a;
    const vfloat scale = splat(a->scale * LOG2E);
    for (int row = 0; row < t->num_rows; row++) {
        int index = (base + row) / t->num_heads, of = t->members ? t->members[index] : item->row;
        int64_t token = token_of(t, item, index), d = 0;
        const float *from = a->q + token * a->q_stride + (int64_t)((base + row) % t->num_heads) * t->dim;
        float *to = t->q + row * t->dim;
        for (; d + LANES <= t->dim; d += LANES) store(to + d, load(from + d) * scale);
        for (; d < t->dim; d++) to[d] = from[d] * scale[0];
        t->position[row] = last_key_in(a->plan, of, token);
        t->top[row] = -INFINITY, t->total[row] = 0;
    }
    memset(t->out, 0, (size_t)t->num_rows * t->rank * sizeof(float));
#if defined(__AVX512BF16__)
    if (t->rounds) round_row(t->q, (int64_t)t->num_rows * t->dim, t->rounded_q);
#endif
}

/* Find `count` keys of a row, and copy them as floats if the products cannot read them as they are stored. chosen: their positions;
 * NULL = from `chunk` on. */
static void locate(Tile *t, int row, const int32_t *chosen, int chunk, int count) {
    const LatentCache *cache = &t->a->cache;
    const int32_t *table = t->a->plan->block_table + row * t->a->plan->table_stride;
    const int64_t width = latent_bytes(cache);
    for (int key = 0; key < count; key++) {
        int at = chosen ? chosen[key] : chunk + key, size = cache->block_size;
        t->keys[key] = cache->latents + table[at / size] * cache->stride + at % size * width;
        if (cache->type != FP8_DS_MLA) continue;
        float *to = t->staged + key * t->dim;
        unpack_latent(cache, t->keys[key], to);
        t->keys[key] = (const char *)to;
    }
    for (int key = count; key < count + KEYS; key++) t->keys[key] = t->keys[count - 1];
}

/* Turn the scores of a row into weights. */
static void soften(Tile *t, int row, int stop) {
    float *s = t->scores + row * CHUNK_STRIDE;
    t->factor[row] = 1;
    const int end = (stop + LANES - 1) / LANES * LANES, seen = maximum(t->stop[row], 0);
    for (int j = seen; j < end; j++) s[j] = -INFINITY;
    if (!seen) {
        memset(s, 0, end * sizeof(float));
        return;
    }
    vfloat best = load(s), sum = {};
    for (int j = LANES; j < end; j += LANES) best = vmax(best, load(s + j));
    float top = fmaxf(t->top[row], max_of(best));
    for (int j = 0; j < end; j += LANES) {
        vfloat weight = power_of_two(load(s + j) - top);
        sum += weight;
        store(s + j, weight);
    }
    t->factor[row] = t->top[row] == top ? 1 : exp2f(t->top[row] - top);
    t->total[row] = t->total[row] * t->factor[row] + sum_of(sum);
    t->top[row] = top;
}

/* Go through the keys of a chunk with some neighboring rows. */
INLINE void attend_rows(Tile *t, int type, int row, int rows) {
    float *scores = t->scores + row * CHUNK_STRIDE, *out = t->out + row * t->rank;
    int stop = 0;
    for (int i = 0; i < rows; i++) stop = maximum(stop, t->stop[row + i]);
    if (stop <= 0) return;
#if defined(__AVX512BF16__)
    if (type == BFLOAT16 && t->rounds) {
        for (int key = 0; key < stop; key += KEYS) dot_pairs(rows, t->rounded_q + row * t->dim, t->dim, t->keys + key, scores + key);
        for (int i = 0; i < rows; i++) soften(t, row + i, stop);
        round_row(scores, rows * CHUNK_STRIDE, t->rounded_weights);
        combine_pairs(rows, t->rounded_weights, t->keys, stop, t->factor + row, out, t->rank);
        return;
    }
#endif
    for (int key = 0; key < stop; key += KEYS) dot_products(type, rows, t->q + row * t->dim, t->dim, t->keys + key, scores + key);
    for (int i = 0; i < rows; i++) soften(t, row + i, stop);
    const Combination values = {scores, CHUNK_STRIDE, t->keys, stop, t->factor + row, out, t->rank, t->rank};
    combine_rows(type, rows, &values);
}

INLINE void attend_chunk(Tile *t, int type) {
    int row = 0;
    for (; row + ROWS <= t->num_rows; row += ROWS) attend_rows(t, type, row, ROWS);
    for (; row < t->num_rows; row++) attend_rows(t, type, row, 1);
}

/* Return how many of the chosen positions come before one. */
static int chosen_before(const int32_t *chosen, int count, int position) {
    int low = 0, high = count;
    while (low < high) {
        int middle = (low + high) / 2;
        if (chosen[middle] < position) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void attend_tile(Tile *t, const Item *item, int base) {
    const LatentArguments *a = t->a;
    load_queries(t, item, base);
    /* With an index, a tile has one token, so its rows have the same keys. */
    const int32_t *chosen = a->chosen && t->position[0] >= a->top_k ? a->chosen + token_of(t, item, 0) * a->chosen_stride : NULL;
    int first = item->key_first, end = item->key_stop;
    if (chosen) first = chosen_before(chosen, a->top_k, first), end = chosen_before(chosen, a->top_k, end);
    for (int chunk = first; chunk < end; chunk += CHUNK) {
        int count = minimum(CHUNK, end - chunk);
        locate(t, item->row, chosen ? chosen + chunk : NULL, chunk, count);
        for (int row = 0; row < t->num_rows; row++) t->stop[row] = chosen ? count : minimum(t->position[row] + 1 - chunk, count);
        if (t->type == FLOAT32) attend_chunk(t, FLOAT32);
        else if (t->type == BFLOAT16) attend_chunk(t, BFLOAT16);
        else attend_chunk(t, FLOAT16);
    }
}

INLINE float *partial_of(const LatentArguments *a, int partial, int index) {
    return a->plan->partials + partial * a->plan->partial_stride + (int64_t)index * (a->cache.rank + 2);
}

/* Store the logarithm of the total of a row. log2: to base 2. */
INLINE void note_total(const Tile *t, const Item *item, int index, float log2) {
    if (t->a->lse) t->a->lse[token_of(t, item, index / t->num_heads) * t->num_heads + index % t->num_heads] = log2 / LOG2E;
}

INLINE float *result_of(const Tile *t, const Item *item, int index) {
    return t->a->out + token_of(t, item, index / t->num_heads) * t->a->out_stride + (int64_t)(index % t->num_heads) * t->rank;
}

/* Store the tile's rows, divided by their totals. If the item is a split, store them undivided, with what the merge needs. */
static void finish(Tile *t, const Item *item, int base) {
    const int before = item->num_members && item->member >= 0 ? item->member * t->num_heads : 0;
    for (int row = 0; row < t->num_rows; row++) {
        const float *from = t->out + row * t->rank;
#if defined(__AVX512BF16__)
        if (t->rounds) order_channels(from, t->rank, t->q), from = t->q;
#endif
        if (item->num_splits == 1) {
            float *to = result_of(t, item, base + row), inverse = t->total[row] > 0 ? 1.0f / t->total[row] : 0;
            for (int d = 0; d < t->rank; d++) to[d] = from[d] * inverse;
            note_total(t, item, base + row, t->top[row] + log2f(t->total[row]));
        } else {
            float *to = partial_of(t->a, item->partial + item->split, before + base + row);
            memcpy(to, from, t->rank * sizeof(float));
            to[t->rank] = t->top[row], to[t->rank + 1] = t->total[row];
        }
    }
}

EXPORT void attend_latent(const Step *step, Worker *worker, const void *arguments) {
    (void)step;
    const LatentArguments *a = arguments;
    const Plan *plan = a->plan;
    Tile t;
    t.a = a, t.num_heads = a->num_heads, t.rank = a->cache.rank, t.dim = a->cache.rank + a->cache.rope;
    t.type = a->cache.type == FP8_DS_MLA ? FLOAT32 : a->cache.type;
    t.rounds = 0;
#if defined(__AVX512BF16__)
    t.rounds = t.type == BFLOAT16 && t.dim % WORD == 0 && t.rank % WORD == 0;
#endif
    for (int64_t task; (task = next_task(worker, plan->num_items)) < plan->num_items;) {
        const Item *item = plan->items + task;
        const int32_t *members = item->num_members ? plan->members + item->members : NULL;
        t.members = item->member < 0 ? members : NULL;
        for (int base = 0, rows = item->count * t.num_heads; base < rows; base += TILE) {
            t.num_rows = minimum(TILE, rows - base);
            attend_tile(&t, item, base);
            finish(&t, item, base);
        }
        if (item->num_splits == 1) continue;
        atomic_int *finished = plan->finished + item->merge;
        if (atomic_fetch_add_explicit(finished, 1, memory_order_acq_rel) != item->pieces - 1) continue;
        t.members = members;
        for (int row = 0, rows = (members ? item->num_members : item->count) * t.num_heads; row < rows; row++)
            note_total(&t, item, row, merge_splits(partial_of(a, item->partial, row), plan->partial_stride, item->num_splits,
                                                   t.rank, 1, result_of(&t, item, row)));
        atomic_store_explicit(finished, 0, memory_order_relaxed);
    }
}

/* The products of heads with matrices of their own: out [T][heads][columns] = x [T][heads][rows] W [heads][rows][columns]. */
static void multiply_head(const HeadProducts *p, int64_t head, int64_t start, int64_t end) {
    const char *rows[p->rows];
    const int64_t bytes = bytes_of(p->type);
    for (int64_t row = 0; row < p->rows; row++) rows[row] = (const char *)p->weight + (head * p->rows + row) * p->columns * bytes;
    for (int64_t token = start; token < end;) {
        int count = end - token >= ROWS ? ROWS : 1;
        const Combination c = {p->x + token * p->x_stride + head * p->x_head, p->x_stride, rows, p->rows, NULL,
                               p->out + token * p->out_stride + head * p->out_head, p->out_stride, p->columns};
        if (p->type == FLOAT32) count == 1 ? combine_rows(FLOAT32, 1, &c) : combine_rows(FLOAT32, ROWS, &c);
        else if (p->type == BFLOAT16) count == 1 ? combine_rows(BFLOAT16, 1, &c) : combine_rows(BFLOAT16, ROWS, &c);
        else count == 1 ? combine_rows(FLOAT16, 1, &c) : combine_rows(FLOAT16, ROWS, &c);
        token += count;
    }
}

INLINE int64_t token_blocks(const Step *step) { return (step->num_tokens + TOKENS - 1) / TOKENS; }

INLINE void multiply_task(const HeadProducts *p, const Step *step, int64_t task) {
    int64_t start = task % token_blocks(step) * TOKENS;
    multiply_head(p, task / token_blocks(step), start, start + TOKENS < step->num_tokens ? start + TOKENS : step->num_tokens);
}

EXPORT void head_products(const Step *step, Worker *worker, const void *arguments) {
    const HeadProducts *p = arguments;
    const int64_t total = p->num_heads * token_blocks(step);
    for (int64_t task; (task = next_task(worker, total)) < total;) multiply_task(p, step, task);
}

/* Copy n channels and rotate them. */
INLINE void copy_turned(const LatentStore *a, int64_t token, const float *from, float *to) {
    memcpy(to, from, a->cache.rope * sizeof(float));
    if (a->cos) turn(to, a->cos + token * a->cos_stride, a->sin + token * a->sin_stride, a->cache.rope / 2, a->pairs);
}

/* Complete the queries of a token, and store its latent and the rotated part of its key. */
static void store_latent(const LatentStore *a, int64_t token) {
    const LatentCache *cache = &a->cache;
    for (int64_t head = 0; head < a->absorbed.num_heads; head++)
        copy_turned(a, token, a->q_rope + token * a->q_rope_stride + head * a->q_rope_head,
                    a->absorbed.out + token * a->absorbed.out_stride + head * a->absorbed.out_head + cache->rank);
    const int64_t slot = a->plan->slot_mapping[token];
    if (slot < 0) return;
    float key[MAX_LATENT] ALIGNED;
    memcpy(key, a->latent + token * a->latent_stride, cache->rank * sizeof(float));
    copy_turned(a, token, a->k_rope + token * a->k_rope_stride, key + cache->rank);
    if (a->index) {
        const IndexCache *to = &a->index_cache;
        store_floats(to->type, a->index + token * a->index_stride, to->size,
                     to->keys + slot / to->block_size * to->stride + slot % to->block_size * to->size * bytes_of(to->type));
    }
    pack_latent(cache, key, cache->latents + slot / cache->block_size * cache->stride + slot % cache->block_size * latent_bytes(cache));
}

/* Multiply the queries with the up-projections of keys, and store the latents of the step. */
EXPORT void latent_store(const Step *step, Worker *worker, const void *arguments) {
    const LatentStore *a = arguments;
    const int64_t products = a->absorbed.num_heads * token_blocks(step), total = products + token_blocks(step);
    for (int64_t task; (task = next_task(worker, total)) < total;) {
        if (task < products) {
            multiply_task(&a->absorbed, step, task);
            continue;
        }
        const int64_t start = (task - products) * TOKENS;
        for (int64_t token = start; token < start + TOKENS && token < step->num_tokens; token++) store_latent(a, token);
    }
}
