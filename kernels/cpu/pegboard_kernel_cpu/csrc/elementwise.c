/* Kernels that treat each token separately: norms, gated activations, table rows.
 *
 * Norms and activations can also quantize their result for the next linear layer, while it is still in the cache.
 */
#include "quantize.h"

typedef struct {
    const float *x; /* [tokens][columns] */
    int64_t x_stride;
    float *residual; /* [tokens][columns], set to x + residual before this sum is normalized; NULL = normalize x */
    int64_t residual_stride;
    const float *weight; /* [columns] */
    float *out; /* [tokens][columns]; NULL = only the quantized result is wanted */
    int64_t out_stride;
    Quantized to;
    int64_t columns; /* a multiple of 8 */
    int64_t parts; /* number of adjacent norms of a token (one per head), each over `columns` values */
    float epsilon;
} RMSNorm;

/* out = x / sqrt(mean(x²) + epsilon) · weight (Zhang & Sennrich 2019). */
static void normalise(const RMSNorm *a, const float *x, float *residual, float *out) {
    int64_t columns = a->columns, whole = columns / LANES * LANES;
    vfloat squares = splat(0);
    float rest = 0;
    if (residual) {
        for (int64_t c = 0; c < whole; c += LANES) {
            vfloat sum = load(x + c) + load(residual + c);
            store(residual + c, sum);
            squares += sum * sum;
        }
        for (int64_t c = whole; c < columns; c++) {
            residual[c] += x[c];
            rest += residual[c] * residual[c];
        }
        x = residual;
    } else {
        for (int64_t c = 0; c < whole; c += LANES) squares += load(x + c) * load(x + c);
        for (int64_t c = whole; c < columns; c++) rest += x[c] * x[c];
    }
    float scale = 1.0f / sqrtf((sum_of(squares) + rest) / (float)columns + a->epsilon);
    for (int64_t c = 0; c < whole; c += LANES) store(out + c, load(x + c) * splat(scale) * load(a->weight + c));
    for (int64_t c = whole; c < columns; c++) out[c] = x[c] * scale * a->weight[c];
}

EXPORT void rms_norm(const Step *step, Worker *worker, const void *arguments) {
    const RMSNorm *a = arguments;
    float row[a->out ? 1 : a->columns * a->parts];
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        float *out = a->out ? a->out + t * a->out_stride : row;
        for (int64_t part = 0; part < a->parts; part++)
            normalise(a, a->x + t * a->x_stride + part * a->columns,
                      a->residual ? a->residual + t * a->residual_stride : NULL, out + part * a->columns);
        if (a->to.codes) quantize_row(out, &a->to, a->columns * a->parts, t);
    }
}

typedef struct {
    const float *x; /* [tokens][2 · columns]: gate, then up */
    int64_t x_stride;
    float *out; /* [tokens][columns]; NULL = only the quantized result is wanted */
    int64_t out_stride;
    Quantized to;
    int64_t columns;
    int64_t is_gelu; /* 1: the tanh approximation of gelu; 0: silu */
} GatedActivation;

INLINE vfloat silu(vfloat x) { return x / (1.0f + exp_of(vmin(-x, splat(87.0f)))); }

INLINE vfloat gelu_tanh(vfloat x) { /* x · (1 + tanh(u)) / 2 = x · sigmoid(2u), u = sqrt(2/π) (x + 0.044715 x³) */
    vfloat twice = 1.5957691216057308f * (x + 0.044715f * x * x * x);
    return x / (1.0f + exp_of(vmin(-twice, splat(87.0f))));
}

EXPORT void gated_activation(const Step *step, Worker *worker, const void *arguments) {
    const GatedActivation *a = arguments;
    int64_t columns = a->columns, whole = columns / LANES * LANES;
    float row[a->out ? 1 : columns];
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        const float *gate = a->x + t * a->x_stride, *up = gate + columns;
        float *out = a->out ? a->out + t * a->out_stride : row;
        for (int64_t c = 0; c < whole; c += LANES) {
            vfloat g = load(gate + c);
            store(out + c, (a->is_gelu ? gelu_tanh(g) : silu(g)) * load(up + c));
        }
        for (int64_t c = whole; c < columns; c++) {
            vfloat g = splat(gate[c]);
            out[c] = (a->is_gelu ? gelu_tanh(g) : silu(g))[0] * up[c];
        }
        if (a->to.codes) quantize_row(out, &a->to, columns, t);
    }
}

typedef struct {
    const int64_t *ids; /* [tokens] */
    float *out; /* [tokens][columns] */
    int64_t out_stride;
    const float *table; /* [rows][columns] */
    int64_t columns;
} LookupFloat;

EXPORT void lookup_float(const Step *step, Worker *worker, const void *arguments) {
    const LookupFloat *a = arguments;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;)
        memcpy(a->out + t * a->out_stride, a->table + a->ids[t] * a->columns, a->columns * sizeof(float));
}

typedef struct {
    const float *x; /* [tokens][columns] */
    int64_t x_stride;
    const float *y; /* [tokens][columns]; NULL = use `factors` */
    int64_t y_stride;
    float *out; /* [tokens][columns] */
    int64_t out_stride;
    const float *factors; /* [columns]; NULL = use `factor` */
    int64_t columns;
    int64_t kind; /* 0: x · y; 1: x + y; 2: max(x, 0); 3: sigmoid(x) */
    float factor;
} Pointwise;

EXPORT void pointwise(const Step *step, Worker *worker, const void *arguments) {
    const Pointwise *a = arguments;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        const float *x = a->x + t * a->x_stride, *y = a->y ? a->y + t * a->y_stride : a->factors;
        float *restrict out = a->out + t * a->out_stride;
        if (a->kind == 2) for (int64_t c = 0; c < a->columns; c++) out[c] = x[c] > 0 ? x[c] : 0;
        else if (a->kind == 3) for (int64_t c = 0; c < a->columns; c++) out[c] = 1.0f / (1.0f + expf(-x[c]));
        else if (!y) for (int64_t c = 0; c < a->columns; c++) out[c] = x[c] * a->factor;
        else if (a->kind) for (int64_t c = 0; c < a->columns; c++) out[c] = x[c] + y[c];
        else for (int64_t c = 0; c < a->columns; c++) out[c] = x[c] * y[c];
    }
}

typedef struct {
    const float *x; /* [tokens][…] */
    int64_t x_stride;
    float *out; /* [tokens][columns] */
    int64_t out_stride;
    const int64_t *order; /* [columns]: columns of x */
    int64_t columns;
} TakeColumns;

EXPORT void take_columns(const Step *step, Worker *worker, const void *arguments) {
    const TakeColumns *a = arguments;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;)
        for (int64_t c = 0; c < a->columns; c++) a->out[t * a->out_stride + c] = a->x[t * a->x_stride + a->order[c]];
}
