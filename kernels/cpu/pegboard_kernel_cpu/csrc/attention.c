/* Causal attention over the paged cache, prefill and decode alike: a tile of query rows (tokens times the heads of a group) goes
 * through its keys in chunks with a running softmax (Milakov & Gimelshein 2018; Dao et al. 2022). If few rows have long
 * histories, the keys are split into ranges. The thread that finishes last merges their results in a fixed order (Dao et al. 2023,
 * "Flash-Decoding").
 */
#include "attention_products.h"

/* A tile while it is computed. Scores are logarithms to base 2, so weights are powers of 2. Rows are ordered by token, then by
 * head, so the rows of a block see nearly the same keys. */
typedef struct {
    const AttendArguments *a;
    int kv_head, group, dim;
    float unit; /* what the products read of the values is multiplied by it */
    int padded, type; /* padded: dim rounded up to whole vectors; type: of the elements that the products read */
    const int32_t *members; /* the row of each token; NULL = all tokens belong to one row */
    int num_rows, num_blocks; /* blocks of at most ROWS rows, rows [start[i], start[i + 1]) */
    int k_is_staged, v_is_staged, is_shaped; /* staged: copied as floats before use */
    int start[TILE + 1];
    int position[TILE], last[TILE]; /* of a row's token, and of the last key that it attends to */
    int first_key[TILE], stop_key[TILE]; /* the keys [first_key, stop_key) of the chunk that a row attends to */
    int from[TILE], stop[TILE]; /* the same for a block of rows; if from >= stop, there is nothing to do */
    float top[TILE], total[TILE], factor[TILE];
    const char *k[CHUNK / RUN + RUNS], *v[CHUNK / RUN + RUNS]; /* of the chunk, and of the panel after it */
    ALIGNED float k_scale[CHUNK + PANEL], v_scale[CHUNK + PANEL];
    ALIGNED float q[TILE * MAX_DIM]; /* per block [dim][rows], scaled, or words [dim / 2][rows]; at the end the results [rows][dim] */
    ALIGNED float out[TILE * MAX_DIM]; /* [rows][padded] */
    ALIGNED float scores[TILE * CHUNK];
    ALIGNED float staged_k[PANEL * MAX_DIM]; /* [dim][PANEL] */
    ALIGNED float staged_v[CHUNK * MAX_DIM]; /* [CHUNK][padded] */
    ALIGNED uint16_t weights[TILE * CHUNK]; /* the rounded scores, for WORDS */
} Tile;

/* Return the index within the step of the item's (or the tile's) `index`-th token. */
INLINE int64_t token_of(const Tile *t, const Item *item, int index) {
    const int32_t *starts = t->a->plan->query_start_loc;
    return t->members ? starts[t->members[index]] : starts[item->row] + item->first + index;
}

#if defined(__AVX512BF16__)
/* Put a query into the block of rows that begins with row `start`, as row `r`. */
INLINE void round_query(Tile *t, const float *from, float scale, int start, int rows, int r) {
    uint32_t *to = (uint32_t *)t->q + start * (t->dim / 2) + r, words[LANES / 2] ALIGNED;
    for (int d = 0; d < t->dim; d += LANES) {
        float scaled[LANES] ALIGNED;
        store(scaled, load(from + d) * scale);
        round_row(scaled, LANES, (uint16_t *)words);
        for (int i = 0; i < LANES / 2; i++) to[(d / 2 + i) * rows] = words[i];
    }
}
#endif

static void load_queries(Tile *t, const Item *item, int base) {
    const AttendArguments *a = t->a;
    float scale = a->scale * LOG2E * (is_float8(t->type) ? a->cache.k_scale[t->kv_head] : 1.0f);
    t->num_blocks = (t->num_rows + ROWS - 1) / ROWS;
    for (int i = 0; i <= t->num_blocks; i++) t->start[i] = i * t->num_rows / t->num_blocks;
    for (int i = 0; i < t->num_blocks; i++) {
        int start = t->start[i], rows = t->start[i + 1] - start;
        for (int r = 0; r < rows; r++) {
            int index = (base + start + r) / t->group, head = t->kv_head * t->group + (base + start + r) % t->group;
            int64_t token = token_of(t, item, index);
            const float *from = a->q + token * a->q_stride + (int64_t)head * t->dim;
            float *to = t->q + start * t->dim + r;
#if defined(__AVX512BF16__)
            if (t->type == WORDS) round_query(t, from, scale, start, rows, r);
            else
#endif
            for (int d = 0; d < t->dim; d++) to[d * rows] = from[d] * scale;
            int row = t->members ? t->members[index] : item->row;
            t->position[start + r] = position_in(a->plan, row, token), t->last[start + r] = last_key_in(a->plan, row, token);
            int has_sink = a->sinks && item->split == 0; /* a sink is a key of the first split */
            t->top[start + r] = has_sink ? a->sinks[head] * LOG2E : -INFINITY;
            t->total[start + r] = has_sink;
        }
    }
    memset(t->out, 0, (size_t)t->num_rows * t->padded * sizeof(float));
}

/* Find where the keys [chunk, chunk + count) of a row are stored. count: at most CHUNK + PANEL. */
static void locate(Tile *t, int row, int chunk, int count) {
    const Cache *cache = &t->a->cache;
    const int size = cache->block_size, bytes = bytes_of(cache->type);
    const int32_t *table = t->a->plan->block_table + row * t->a->plan->table_stride;
    int64_t k_head = (int64_t)t->kv_head * t->dim * size, v_head = (int64_t)t->kv_head * size;
    int num_runs = (count + RUN - 1) / RUN;
    for (int run = 0; run < num_runs; run++) {
        int64_t block = table[(chunk + run * RUN) / size];
        int offset = (chunk + run * RUN) % size;
        t->k[run] = cache->k + block * cache->k_stride + (k_head + offset) * bytes;
        t->v[run] = cache->v + block * cache->v_stride + (v_head + offset) * t->dim * bytes;
        if (cache->type == INT8) {
            const float *k_scale = (const float *)((const char *)cache->k_scale + block * cache->k_scale_stride);
            const float *v_scale = (const float *)((const char *)cache->v_scale + block * cache->v_scale_stride);
            memcpy(t->k_scale + run * RUN, k_scale + v_head + offset, RUN * sizeof(float));
            memcpy(t->v_scale + run * RUN, v_scale + v_head + offset, RUN * sizeof(float));
        }
    }
    /* The rest of the panel is read, but not used. The next one is fetched, but may not exist. */
    for (int run = num_runs; run < CHUNK / RUN + RUNS; run++) t->k[run] = t->k[num_runs - 1], t->v[run] = t->v[num_runs - 1];
}

/* Fetch the values of a panel and the keys of the next one. Blocks are spread over memory in pieces of some KB. */
static void fetch_panel(const Tile *t, int panel) {
    const int64_t bytes = bytes_of(t->type), stride = t->a->cache.block_size * bytes, step = stride < LINE ? LINE : stride;
    const char *const *k = t->k + (panel + 1) * RUNS, *const *v = t->v + panel * RUNS;
    for (int run = 0; run < RUNS; run++) {
        for (int64_t at = 0; at < RUN * t->dim * bytes; at += LINE) __builtin_prefetch(v[run] + at);
        if (run && k[run] - k[run - 1] == RUN * bytes && (uintptr_t)k[run] % LINE) continue; /* in the same lines */
        for (int64_t at = 0; at < t->dim * stride; at += step) __builtin_prefetch(k[run] + at);
    }
}

/* Find the keys of the chunk that each row attends to, and those that each block of rows attends to. */
static void see(Tile *t, int chunk, int count) {
    for (int i = 0; i < t->num_blocks; i++) {
        int from = CHUNK, stop = 0;
        for (int row = t->start[i]; row < t->start[i + 1]; row++) {
            int oldest = first_key(t->position[row], t->a->window, t->a->chunk);
            t->first_key[row] = maximum(oldest - chunk, 0);
            t->stop_key[row] = minimum(stop_key(t->last[row], t->a->window, t->a->chunk, chunk + count) - chunk, count);
            if (t->first_key[row] >= t->stop_key[row]) continue;
            from = minimum(from, t->first_key[row]);
            stop = maximum(stop, t->stop_key[row]);
        }
        t->from[i] = from, t->stop[i] = stop;
    }
}

/* Copy a panel of keys as floats. All blocks of rows use the copy. */
static const char *stage_keys(Tile *t, const char *const *k) {
    int64_t stride = (int64_t)t->a->cache.block_size * bytes_of(t->a->cache.type);
    for (int64_t d = 0; d < t->dim; d++)
        for (int j = 0; j < VECTORS; j++) {
            const char *from = k[j * LANES / RUN] + d * stride + j * LANES % RUN * bytes_of(t->a->cache.type);
            store(t->staged_k + d * PANEL + j * LANES, load_as(t->a->cache.type, from));
        }
    return (const char *)t->staged_k;
}

INLINE void widen(int type, const char *from, int n, float *to) {
    int d = 0;
    for (; d + LANES <= n; d += LANES) store(to + d, load_as(type, from + d * bytes_of(type)));
    for (; d < n; d++) {
        if (type == FLOAT32) to[d] = ((const float *)from)[d];
        else if (type == INT8) to[d] = (float)((const int8_t *)from)[d];
        else if (type == FLOAT16) to[d] = half_to_float(((const uint16_t *)from)[d]);
        else if (type == E4M3) to[d] = half_to_float(e4m3_to_half(((const uint8_t *)from)[d]));
        else if (type == E5M2) to[d] = half_to_float((uint16_t)(((const uint8_t *)from)[d] << 8));
        else {
            union { uint32_t bits; float value; } wide = {(uint32_t)((const uint16_t *)from)[d] << 16};
            to[d] = wide.value;
        }
    }
}

/* Copy the values of the chunk as floats, each padded to whole vectors. */
static void stage_values(Tile *t, int count) {
    int type = t->a->cache.type;
    for (int key = 0; key < count; key++) {
        const char *from = t->v[key / RUN] + (int64_t)(key % RUN) * t->dim * bytes_of(type);
        float *to = t->staged_v + key * t->padded;
        if (type == FLOAT32) widen(FLOAT32, from, t->dim, to);
        else if (type == BFLOAT16) widen(BFLOAT16, from, t->dim, to);
        else if (type == FLOAT16) widen(FLOAT16, from, t->dim, to);
        else if (type == E4M3) widen(E4M3, from, t->dim, to);
        else if (type == E5M2) widen(E5M2, from, t->dim, to);
        else widen(INT8, from, t->dim, to);
        for (int d = t->dim; d < t->padded; d++) to[d] = 0;
    }
    for (int run = 0; run * RUN < count; run++) t->v[run] = (const char *)(t->staged_v + run * RUN * t->padded);
}

static void score(Tile *t, int count) {
    int64_t stride = (int64_t)t->a->cache.block_size * bytes_of(t->a->cache.type);
    for (int panel = 0; panel * PANEL < count; panel++) {
        const char *const *k = t->k + panel * RUNS;
        const char *staged[RUNS];
        if (!t->k_is_staged) {
            fetch_panel(t, panel);
        } else {
            const char *keys = stage_keys(t, k);
            for (int run = 0; run < RUNS; run++) staged[run] = keys + run * RUN * sizeof(float);
            k = staged, stride = PANEL * sizeof(float);
        }
        for (int i = 0; i < t->num_blocks; i++) {
            if (t->from[i] >= (panel + 1) * PANEL || t->stop[i] <= panel * PANEL) continue;
            int start = t->start[i], rows = t->start[i + 1] - start;
            const float *q = t->q + start * t->dim / (t->type == WORDS ? 2 : 1);
            score_products[t->k_is_staged ? FLOAT32 : t->type][rows - 1](
                q, k, stride, t->dim, t->scores + start * CHUNK + panel * PANEL);
        }
    }
}

/* tanh(x) = (1 - e) / (1 + e) with e = exp(-2 |x|). */
INLINE vfloat tanh_of(vfloat x) {
    vfloat e = exp_of(vmax(x, -x) * -2.0f), y = (1.0f - e) / (1.0f + e);
    return choose(x < 0, -y, y);
}

/* Turn plain products into scores: apply the key scales and the cap. */
static void shape(const Tile *t, float *scores, int from, int stop) {
    const AttendArguments *a = t->a;
    float cap = a->soft_cap * LOG2E;
    for (int j = from; j < stop; j += LANES) {
        vfloat x = load(scores + j);
        if (a->cache.type == INT8) x *= load(t->k_scale + j);
        if (cap > 0) x = tanh_of(x / cap) * cap;
        store(scores + j, x);
    }
}

/* Turn the scores [from, stop) into weights 2^(score - highest score so far). The weight of a key that the row does not
 * attend to is 0. */
static void soften(Tile *t, int row, int from, int stop) {
    float *s = t->scores + row * CHUNK;
    int first = t->first_key[row], last = t->stop_key[row];
    t->factor[row] = 1;
    if (first >= last) {
        memset(s + from, 0, (stop - from) * sizeof(float));
        return;
    }
    if (t->is_shaped) shape(t, s, from, stop);
    for (int j = from; j < first; j++) s[j] = -INFINITY;
    for (int j = last; j < stop; j++) s[j] = -INFINITY;
    vfloat best = splat(-INFINITY);
    for (int j = from; j < stop; j += LANES) best = vmax(best, load(s + j));
    float top = fmaxf(t->top[row], max_of(best));
    if (top == -INFINITY) top = 0; /* all scores are -infinity, so their weights are 0 */
    vfloat sum = {};
    for (int j = from; j < stop; j += LANES) {
        vfloat weight = power_of_two(load(s + j) - top);
        sum += weight;
        store(s + j, weight);
    }
    if (t->a->cache.type == INT8)
        for (int j = from; j < stop; j += LANES) store(s + j, load(s + j) * load(t->v_scale + j));
    t->factor[row] = t->top[row] == top ? 1 : exp2f(t->top[row] - top);
    t->total[row] = t->total[row] * t->factor[row] + sum_of(sum);
    t->top[row] = top;
}

static void add_values(Tile *t) {
    int type = t->v_is_staged ? FLOAT32 : t->type;
    int64_t channel = bytes_of(type), stride = t->padded * channel;
    /* Runs of `span` keys are always stored together. */
    int span = t->v_is_staged ? CHUNK : t->a->cache.block_size % KEY_STEP ? RUN : KEY_STEP;
    for (int d = 0, log2 = VECTORS / 2; d < t->padded; d += LANES << log2) {
        while (d + (LANES << log2) > t->padded) log2--;
        for (int i = 0; i < t->num_blocks; i++) {
            int start = t->start[i], rows = t->start[i + 1] - start;
            if (t->from[i] >= t->stop[i]) continue;
            const void *weights = type == WORDS ? (void *)(t->weights + start * CHUNK) : t->scores + start * CHUNK;
            value_products[type][rows - 1][log2](weights, t->v, stride, d * channel, span, t->from[i],
                                                 t->stop[i], t->factor + start, t->out + start * t->padded + d, t->padded);
        }
    }
}

static void attend_tile(Tile *t, const Item *item, int base) {
    load_queries(t, item, base);
    for (int chunk = item->key_first; chunk < item->key_stop; chunk += CHUNK) {
        int count = minimum(CHUNK, item->key_stop - chunk);
        locate(t, item->row, chunk, minimum(CHUNK + PANEL, item->key_stop - chunk));
        see(t, chunk, count);
        score(t, count);
        for (int i = 0; i < t->num_blocks; i++) {
            if (t->from[i] >= t->stop[i]) continue;
            int from = t->from[i] / LANES * LANES, stop = (t->stop[i] + LANES - 1) / LANES * LANES;
            for (int row = t->start[i]; row < t->start[i + 1]; row++) {
                soften(t, row, from, stop);
#if defined(__AVX512BF16__)
                if (t->type == WORDS) round_row(t->scores + row * CHUNK + from, stop - from, t->weights + row * CHUNK + from);
#endif
            }
        }
        if (t->v_is_staged) stage_values(t, count);
        add_values(t);
    }
}

INLINE float *partial_of(const AttendArguments *a, int partial, int kv_head, int index) {
    int64_t place = (int64_t)partial * a->cache.num_kv_heads + kv_head;
    return a->plan->partials + place * a->plan->partial_stride + (int64_t)index * (a->cache.head_dim + 2);
}

/* Copy the results of the item's rows [base, base + num_rows) to the output. They are in the memory of the queries, and the
 * logarithms of their totals are in `top`. */
static void deliver(const Tile *t, const Item *item, int base) {
    const AttendArguments *a = t->a;
    const int64_t dim = t->dim, columns = a->num_heads * dim;
    for (int row = 0, count; row < t->num_rows; row += count) {
        int in_group = (base + row) % t->group;
        count = minimum(t->group - in_group, t->num_rows - row); /* the heads of one token are adjacent */
        int64_t token = token_of(t, item, (base + row) / t->group);
        int64_t first = (t->kv_head * t->group + in_group) * dim;
        if (a->out) memcpy(a->out + token * a->out_stride + first, t->q + row * dim, count * dim * sizeof(float));
        float *lse = a->lse ? a->lse + token * a->num_heads + t->kv_head * t->group + in_group : NULL;
        for (int i = 0; lse && i < count; i++) lse[i] = t->top[row + i] / LOG2E;
        if (is_wanted(&a->to)) quantize_part(t->q + row * dim, &a->to, columns, token, first, count * dim);
    }
}

/* Store the tile's rows, divided by their totals. If the item is a split, store them undivided, with the totals and maxima that
 * the merge needs. */
static void finish(Tile *t, const Item *item, int base) {
    for (int row = 0; row < t->num_rows; row++) {
        const float *from = t->out + row * t->padded;
        if (item->num_splits == 1) {
            float *to = t->q + row * t->dim, inverse = t->total[row] > 0 ? t->unit / t->total[row] : 0;
            for (int d = 0; d < t->dim; d++) to[d] = from[d] * inverse;
            t->top[row] += log2f(t->total[row]);
        } else {
            int before = item->num_members && item->member >= 0 ? item->member * t->group : 0;
            float *to = partial_of(t->a, item->partial + item->split, t->kv_head, before + base + row);
            memcpy(to, from, t->dim * sizeof(float));
            to[t->dim] = t->top[row], to[t->dim + 1] = t->total[row];
        }
    }
    if (item->num_splits == 1) deliver(t, item, base);
}

/* Merge the rows of all splits of an item. The result is the same as if they had been computed together. */
static void merge(Tile *t, const Item *item, int base) {
    for (int row = 0; row < t->num_rows; row++) {
        const float *first = partial_of(t->a, item->partial, t->kv_head, base + row);
        const int64_t step = t->a->plan->partial_stride * t->a->cache.num_kv_heads;
        t->top[row] = merge_splits(first, step, item->num_splits, t->dim, t->unit, t->q + row * t->dim);
    }
    deliver(t, item, base);
}

EXPORT void attend(const Step *step, Worker *worker, const void *arguments) {
    (void)step;
    const AttendArguments *a = arguments;
    const int num_kv_heads = a->cache.num_kv_heads, group = a->num_heads / num_kv_heads, dim = a->cache.head_dim;
    Tile t;
    t.a = a, t.group = group, t.dim = dim, t.padded = (dim + LANES - 1) / LANES * LANES, t.type = a->cache.type;
#if defined(__AVX512BF16__)
    if (t.type == BFLOAT16 && t.padded == dim) t.type = WORDS;
#endif
    t.is_shaped = a->cache.type == INT8 || a->soft_cap > 0;
    const int64_t total = a->plan->num_items * num_kv_heads;
    for (int64_t task; (task = next_task(worker, total)) < total;) {
        const Item *item = a->plan->items + task / num_kv_heads;
        const int32_t *members = item->num_members ? a->plan->members + item->members : NULL;
        int rows = item->count * group;
        t.members = item->member < 0 ? members : NULL;
        t.kv_head = (int)(task % num_kv_heads);
        t.unit = a->value_unit * (is_float8(t.type) ? a->cache.v_scale[t.kv_head] : 1.0f);
        for (int base = 0; base < rows; base += TILE) {
            t.num_rows = minimum(TILE, rows - base);
            t.k_is_staged = t.type != FLOAT32 && t.type != WORDS && t.num_rows > ROWS;
            t.v_is_staged = t.k_is_staged || t.padded != dim;
            attend_tile(&t, item, base);
            finish(&t, item, base);
        }
        if (item->num_splits == 1) continue;
        atomic_int *finished = a->plan->finished + (int64_t)item->merge * num_kv_heads + t.kv_head;
        if (atomic_fetch_add_explicit(finished, 1, memory_order_acq_rel) == item->pieces - 1) {
            if (members) t.members = members, rows = item->num_members * group;
            for (int base = 0; base < rows; base += TILE) {
                t.num_rows = minimum(TILE, rows - base);
                merge(&t, item, base);
            }
            atomic_store_explicit(finished, 0, memory_order_relaxed);
        }
    }
}
