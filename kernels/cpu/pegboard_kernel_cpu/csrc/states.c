/* Layers with one state per request: short convolutions, state-space scans, and the norm after them.
 *
 * A task has one row of the step (one request) and some of its channels or heads. It computes the row's tokens one after another and
 * leaves the state after them in the row's block. The states of different tasks do not overlap.
 */
#include "quantize.h"

typedef struct {
    const int32_t *table; /* [rows][table_stride]: the first column has the blocks */
    int64_t table_stride;
    const int32_t *seq_lens; /* [rows]: tokens of each row with those of this step */
    const int32_t *starts; /* [rows + 1]: first token of each row */
} Rows;

typedef struct {
    int64_t first, end, block;
    int is_new; /* the state is zero, whatever its memory contains */
} Row;

/* Every row has a token at least, so the last row ends where the step ends. */
INLINE int64_t num_rows_of(const Rows *rows, const Step *step) {
    int64_t count = 0;
    while (rows->starts[count] < step->num_tokens) count++;
    return count;
}

INLINE Row row_of(const Rows *rows, int64_t row) {
    int64_t first = rows->starts[row], end = rows->starts[row + 1];
    return (Row){first, end, rows->table[row * rows->table_stride], rows->seq_lens[row] == end - first};
}

/* Return into how many parts to cut each of `count` items, so that there are enough tasks for all threads. */
INLINE int64_t parts_of(int64_t count, int64_t most, const Worker *worker) {
    int64_t parts = (8 * worker->num_threads + count - 1) / count;
    return worker->num_threads == 1 ? 1 : parts < most ? parts : most;
}

INLINE vfloat sigmoid(vfloat x) { return 1.0f / (1.0f + exp_of(vmin(-x, splat(87.0f)))); }
INLINE float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

typedef struct {
    const float *x; /* [tokens][channels] */
    int64_t x_stride;
    float *out; /* [tokens][channels] */
    int64_t out_stride;
    Rows rows;
    const float *weight; /* [channels][width] */
    const float *bias; /* [channels] or NULL */
    float *state; /* [blocks][channels][width - 1]: the last inputs */
    int64_t state_stride, channels, width, activates;
} CausalConv;

#define CHANNELS 64 /* of a task */

/* The channels [start, start + count) of a row. */
static void convolve(const CausalConv *a, Row row, int64_t start, int64_t count) {
    int64_t width = a->width, past = width - 1;
    float weight[width][CHANNELS] ALIGNED, window[width][CHANNELS] ALIGNED, sum[CHANNELS] ALIGNED; /* by input, then by channel */
    float *state = a->state + row.block * a->state_stride + start * past;
    memset(weight, 0, sizeof weight);
    memset(window, 0, sizeof window);
    for (int64_t c = 0; c < count; c++) {
        for (int64_t k = 0; k < width; k++) weight[k][c] = a->weight[(start + c) * width + k];
        if (!row.is_new)
            for (int64_t k = 0; k < past; k++) window[k][c] = state[c * past + k];
    }
    for (int64_t t = row.first; t < row.end; t++) {
        memcpy(window[past], a->x + t * a->x_stride + start, count * sizeof(float));
        memset(sum, 0, sizeof sum);
        if (a->bias) memcpy(sum, a->bias + start, count * sizeof(float));
        for (int64_t c = 0; c < CHANNELS; c += LANES) {
            vfloat total = load(sum + c);
            for (int64_t k = 0; k < width; k++) total += load(window[k] + c) * load(weight[k] + c);
            if (a->activates) total *= sigmoid(total);
            store(sum + c, total);
        }
        memcpy(a->out + t * a->out_stride + start, sum, count * sizeof(float));
        memmove(window[0], window[1], past * sizeof window[0]);
    }
    for (int64_t c = 0; c < count; c++)
        for (int64_t k = 0; k < past; k++) state[c * past + k] = window[k][c];
}

EXPORT void causal_conv(const Step *step, Worker *worker, const void *arguments) {
    const CausalConv *a = arguments;
    int64_t parts = (a->channels + CHANNELS - 1) / CHANNELS, total = num_rows_of(&a->rows, step) * parts;
    for (int64_t task; (task = next_task(worker, total)) < total;) {
        int64_t start = task % parts * CHANNELS, rest = a->channels - start;
        convolve(a, row_of(&a->rows, task / parts), start, rest < CHANNELS ? rest : CHANNELS);
    }
}

typedef struct {
    const float *x, *steps; /* [tokens][channels] */
    int64_t x_stride, steps_stride;
    const float *b, *c; /* [tokens][size] */
    int64_t b_stride, c_stride;
    float *out; /* [tokens][channels] */
    int64_t out_stride;
    Rows rows;
    const float *a_log; /* [channels][size] */
    const float *skip; /* [channels] */
    float *state; /* [blocks][channels][size] */
    int64_t state_stride, channels, size;
} SelectiveScan;

#define SCANNED 32 /* channels of a task */

/* h = exp(dt a) h + dt b x, y = h c + skip x, where dt = softplus(steps) and a = -exp(a_log) (Gu & Dao 2023, algorithm 2). */
static void scan_channels(const SelectiveScan *s, Row row, int64_t start, int64_t count) {
    int64_t size = s->size, padded = (size + LANES - 1) / LANES * LANES;
    float a[SCANNED][padded], h[SCANNED][padded], b[padded], c[padded];
    float *state = s->state + row.block * s->state_stride + start * size;
    memset(a, 0, sizeof a);
    memset(h, 0, sizeof h);
    memset(b, 0, sizeof b);
    memset(c, 0, sizeof c);
    for (int64_t d = 0; d < count; d++) {
        memcpy(a[d], s->a_log + (start + d) * size, size * sizeof(float));
        for (int64_t n = 0; n < padded; n += LANES) store(a[d] + n, -exp_of(vmin(load(a[d] + n), splat(87.0f))));
        if (!row.is_new) memcpy(h[d], state + d * size, size * sizeof(float));
    }
    for (int64_t t = row.first; t < row.end; t++) {
        const float *x = s->x + t * s->x_stride + start, *steps = s->steps + t * s->steps_stride + start;
        float *out = s->out + t * s->out_stride + start;
        memcpy(b, s->b + t * s->b_stride, size * sizeof(float));
        memcpy(c, s->c + t * s->c_stride, size * sizeof(float));
        for (int64_t d = 0; d < count; d++) {
            float dt = softplus(steps[d]);
            vfloat sum = splat(0);
            for (int64_t n = 0; n < padded; n += LANES) {
                vfloat own = load(h[d] + n) * exp_of(dt * load(a[d] + n)) + dt * x[d] * load(b + n);
                store(h[d] + n, own);
                sum += own * load(c + n);
            }
            out[d] = sum_of(sum) + s->skip[start + d] * x[d];
        }
    }
    for (int64_t d = 0; d < count; d++) memcpy(state + d * size, h[d], size * sizeof(float));
}

EXPORT void selective_scan(const Step *step, Worker *worker, const void *arguments) {
    const SelectiveScan *a = arguments;
    int64_t parts = (a->channels + SCANNED - 1) / SCANNED, total = num_rows_of(&a->rows, step) * parts;
    for (int64_t task; (task = next_task(worker, total)) < total;) {
        int64_t start = task % parts * SCANNED, rest = a->channels - start;
        scan_channels(a, row_of(&a->rows, task / parts), start, rest < SCANNED ? rest : SCANNED);
    }
}

typedef struct {
    const float *x; /* [tokens][heads][head_dim] */
    int64_t x_stride;
    const float *steps; /* [tokens][heads] */
    int64_t steps_stride;
    const float *b, *c; /* [tokens][groups][size] */
    int64_t b_stride, c_stride;
    float *out; /* [tokens][heads][head_dim] */
    int64_t out_stride;
    Rows rows;
    const float *bias, *a_log, *skip; /* [heads] */
    float *state; /* [blocks][heads][head_dim][size] */
    int64_t state_stride, heads, head_dim, groups, size;
    float least, most; /* limits of the step sizes */
} ChunkedScan;

/* h = decay h + x b; return h c. */
INLINE float scan_row(float *h, const float *b, const float *c, float decay, float x, int64_t size) {
    int64_t whole = size / LANES * LANES;
    vfloat sum = splat(0);
    float rest = 0;
    for (int64_t n = 0; n < whole; n += LANES) {
        vfloat own = load(h + n) * decay + x * load(b + n);
        store(h + n, own);
        sum += own * load(c + n);
    }
    for (int64_t n = whole; n < size; n++) {
        h[n] = h[n] * decay + x * b[n];
        rest += h[n] * c[n];
    }
    return sum_of(sum) + rest;
}

/* The recurrence of Mamba-2 (Dao & Gu 2024), token by token. The reference computes it in chunks with matrix products, which take
 * more operations; here the state of a task stays in the cache. */
EXPORT void chunked_scan(const Step *step, Worker *worker, const void *arguments) {
    const ChunkedScan *a = arguments;
    int64_t items = num_rows_of(&a->rows, step) * a->heads, parts = parts_of(items, a->head_dim, worker);
    int64_t share = (a->head_dim + parts - 1) / parts, total = items * parts;
    for (int64_t task; (task = next_task(worker, total)) < total;) {
        Row row = row_of(&a->rows, task / parts / a->heads);
        int64_t head = task / parts % a->heads, start = task % parts * share;
        int64_t end = start + share < a->head_dim ? start + share : a->head_dim, group = head / (a->heads / a->groups);
        float *state = a->state + row.block * a->state_stride + head * a->head_dim * a->size;
        if (row.is_new && start < end) memset(state + start * a->size, 0, (end - start) * a->size * sizeof(float));
        for (int64_t t = row.first; t < row.end; t++) {
            float dt = softplus(a->steps[t * a->steps_stride + head] + a->bias[head]);
            dt = dt < a->least ? a->least : dt > a->most ? a->most : dt;
            float decay = expf(-dt * expf(a->a_log[head]));
            const float *b = a->b + t * a->b_stride + group * a->size, *c = a->c + t * a->c_stride + group * a->size;
            const float *x = a->x + t * a->x_stride + head * a->head_dim;
            float *out = a->out + t * a->out_stride + head * a->head_dim;
            for (int64_t p = start; p < end; p++)
                out[p] = scan_row(state + p * a->size, b, c, decay, dt * x[p], a->size) + a->skip[head] * x[p];
        }
    }
}

typedef struct {
    const float *q, *k; /* [tokens][groups][size] */
    int64_t q_stride, k_stride;
    const float *v; /* [tokens][heads][head_dim] */
    int64_t v_stride;
    const float *steps; /* [tokens][heads], or [tokens][heads][size] if each channel has its own decay */
    int64_t steps_stride;
    const float *beta; /* [tokens][heads] */
    int64_t beta_stride;
    float *out; /* [tokens][heads][head_dim] */
    int64_t out_stride;
    Rows rows;
    const float *bias; /* [heads] or [heads][size] */
    const float *a_log; /* [heads] */
    float *state; /* [blocks][heads][head_dim][size] */
    int64_t state_stride, heads, head_dim, groups, size;
    int64_t decays; /* of a head: 1 or size */
} DeltaRule;

/* to = factor x / |x| */
INLINE void unit(const float *x, float *to, int64_t size, float factor) {
    float squares = 1e-6f;
    for (int64_t i = 0; i < size; i++) squares += x[i] * x[i];
    factor /= sqrtf(squares);
    for (int64_t i = 0; i < size; i++) to[i] = x[i] * factor;
}

/* h = decay h; h += beta (v - h k) k; return h q. */
INLINE float delta_row(float *h, const float *q, const float *k, const float *decay, float v, float beta, int64_t size) {
    int64_t whole = size / LANES * LANES;
    vfloat sum = splat(0);
    float rest = 0;
    for (int64_t n = 0; n < whole; n += LANES) sum += load(h + n) * load(decay + n) * load(k + n);
    for (int64_t n = whole; n < size; n++) rest += h[n] * decay[n] * k[n];
    float change = beta * (v - sum_of(sum) - rest);
    sum = splat(0);
    rest = 0;
    for (int64_t n = 0; n < whole; n += LANES) {
        vfloat own = load(h + n) * load(decay + n) + change * load(k + n);
        store(h + n, own);
        sum += own * load(q + n);
    }
    for (int64_t n = whole; n < size; n++) {
        h[n] = h[n] * decay[n] + change * k[n];
        rest += h[n] * q[n];
    }
    return sum_of(sum) + rest;
}

/* The gated delta rule (Yang et al. 2024), token by token. */
EXPORT void gated_delta_rule(const Step *step, Worker *worker, const void *arguments) {
    const DeltaRule *a = arguments;
    int64_t items = num_rows_of(&a->rows, step) * a->heads, parts = parts_of(items, a->head_dim, worker), size = a->size;
    int64_t share = (a->head_dim + parts - 1) / parts, total = items * parts;
    float q[size], k[size], decay[size];
    for (int64_t task; (task = next_task(worker, total)) < total;) {
        Row row = row_of(&a->rows, task / parts / a->heads);
        int64_t head = task / parts % a->heads, start = task % parts * share;
        int64_t end = start + share < a->head_dim ? start + share : a->head_dim, group = head / (a->heads / a->groups);
        float *state = a->state + row.block * a->state_stride + head * a->head_dim * size, rate = -expf(a->a_log[head]);
        if (row.is_new && start < end) memset(state + start * size, 0, (end - start) * size * sizeof(float));
        for (int64_t t = row.first; t < row.end; t++) {
            unit(a->q + t * a->q_stride + group * size, q, size, 1.0f / sqrtf((float)size));
            unit(a->k + t * a->k_stride + group * size, k, size, 1.0f);
            const float *steps = a->steps + t * a->steps_stride + head * a->decays, *bias = a->bias + head * a->decays;
            for (int64_t n = 0; n < size; n++)
                decay[n] = n < a->decays ? expf(rate * softplus(steps[n] + bias[n])) : decay[0];
            float beta = 1.0f / (1.0f + expf(-a->beta[t * a->beta_stride + head]));
            const float *v = a->v + t * a->v_stride + head * a->head_dim;
            float *out = a->out + t * a->out_stride + head * a->head_dim;
            for (int64_t p = start; p < end; p++) out[p] = delta_row(state + p * size, q, k, decay, v[p], beta, size);
        }
    }
}

typedef struct {
    const float *x, *gate; /* [tokens][columns] */
    int64_t x_stride, gate_stride;
    float *out; /* [tokens][columns]; NULL = only the quantized result is wanted */
    int64_t out_stride;
    Quantized to;
    const float *weight; /* [weights]; NULL = do not normalize */
    int64_t columns, size, weights; /* parts of `size` columns are normalized; weights: `columns`, or `size` if all parts share them */
    int64_t gates_first; /* 1: normalize x silu(gate); 0: normalize x, then multiply by silu(gate) */
    float epsilon;
} GatedNorm;

/* out = x · silu(gate). x and out may be the same memory. */
INLINE void gate_part(const float *x, const float *gate, float *out, int64_t size) {
    int64_t whole = size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) store(out + i, load(x + i) * load(gate + i) * sigmoid(load(gate + i)));
    for (int64_t i = whole; i < size; i++) out[i] = x[i] * gate[i] * sigmoid(splat(gate[i]))[0];
}

/* out = x / sqrt(mean(x²) + epsilon) · weight. x and out may be the same memory. */
INLINE void norm_part(const float *x, const float *weight, float *out, int64_t size, float epsilon) {
    int64_t whole = size / LANES * LANES;
    vfloat squares = splat(0);
    float rest = 0;
    for (int64_t i = 0; i < whole; i += LANES) squares += load(x + i) * load(x + i);
    for (int64_t i = whole; i < size; i++) rest += x[i] * x[i];
    float scale = 1.0f / sqrtf((sum_of(squares) + rest) / (float)size + epsilon);
    for (int64_t i = 0; i < whole; i += LANES) store(out + i, load(x + i) * splat(scale) * load(weight + i));
    for (int64_t i = whole; i < size; i++) out[i] = x[i] * scale * weight[i];
}

EXPORT void gated_norm(const Step *step, Worker *worker, const void *arguments) {
    const GatedNorm *a = arguments;
    float row[a->out ? 1 : a->columns];
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        float *out = a->out ? a->out + t * a->out_stride : row;
        for (int64_t first = 0; first < a->columns; first += a->size) {
            const float *x = a->x + t * a->x_stride + first, *gate = a->gate + t * a->gate_stride + first;
            if (!a->weight) {
                gate_part(x, gate, out + first, a->size);
                continue;
            }
            const float *weight = a->weight + first % a->weights;
            if (a->gates_first) gate_part(x, gate, out + first, a->size);
            norm_part(a->gates_first ? out + first : x, weight, out + first, a->size, a->epsilon);
            if (!a->gates_first) gate_part(out + first, gate, out + first, a->size);
        }
        if (is_wanted(&a->to)) quantize_row(out, &a->to, a->columns, t);
    }
}
