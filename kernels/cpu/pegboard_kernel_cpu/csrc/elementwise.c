/* Kernels that treat each token separately: norms, gated activations, transforms, table rows.
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
        if (is_wanted(&a->to)) quantize_row(out, &a->to, a->columns * a->parts, t);
    }
}

typedef struct {
    const float *x; /* [tokens][columns] */
    int64_t x_stride;
    float *residual; /* as in RMSNorm */
    int64_t residual_stride;
    const float *weight, *bias; /* [columns]; bias NULL = none */
    float *out; /* [tokens][columns]; NULL = only the quantized result is wanted */
    int64_t out_stride;
    Quantized to;
    int64_t columns, parts; /* as in RMSNorm */
    float epsilon;
} LayerNorm;

/* out = (x - mean(x)) / sqrt(var(x) + epsilon) · weight + bias (Ba et al. 2016). The variance is the mean of (x - mean)², which
 * stays exact if the mean is large. */
static void centre(const LayerNorm *a, const float *x, float *residual, float *out) {
    int64_t columns = a->columns, whole = columns / LANES * LANES;
    vfloat sums = splat(0), squares = splat(0);
    float rest = 0;
    if (residual) {
        for (int64_t c = 0; c < whole; c += LANES) store(residual + c, load(x + c) + load(residual + c));
        for (int64_t c = whole; c < columns; c++) residual[c] += x[c];
        x = residual;
    }
    for (int64_t c = 0; c < whole; c += LANES) sums += load(x + c);
    for (int64_t c = whole; c < columns; c++) rest += x[c];
    float mean = (sum_of(sums) + rest) / (float)columns;
    rest = 0;
    for (int64_t c = 0; c < whole; c += LANES) {
        vfloat distance = load(x + c) - splat(mean);
        squares += distance * distance;
    }
    for (int64_t c = whole; c < columns; c++) rest += (x[c] - mean) * (x[c] - mean);
    float scale = 1.0f / sqrtf((sum_of(squares) + rest) / (float)columns + a->epsilon);
    for (int64_t c = 0; c < whole; c += LANES) {
        vfloat made = (load(x + c) - splat(mean)) * splat(scale) * load(a->weight + c);
        if (a->bias) made += load(a->bias + c);
        store(out + c, made);
    }
    for (int64_t c = whole; c < columns; c++) out[c] = (x[c] - mean) * scale * a->weight[c] + (a->bias ? a->bias[c] : 0);
}

EXPORT void layer_norm(const Step *step, Worker *worker, const void *arguments) {
    const LayerNorm *a = arguments;
    float row[a->out ? 1 : a->columns * a->parts];
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        float *out = a->out ? a->out + t * a->out_stride : row;
        for (int64_t part = 0; part < a->parts; part++)
            centre(a, a->x + t * a->x_stride + part * a->columns, a->residual ? a->residual + t * a->residual_stride : NULL,
                   out + part * a->columns);
        if (is_wanted(&a->to)) quantize_row(out, &a->to, a->columns * a->parts, t);
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

/* x · (1 + erf(x / √2)) / 2, where erf is an odd rational function on [-4, 4] (Eigen's, which is off by at most 4e-7), and ±1 outside. */
INLINE vfloat gelu(vfloat x) {
    vfloat scaled = 0.70710678118654752f * x, u = vmin(vmax(scaled, splat(-4.0f)), splat(4.0f)), s = u * u;
    vfloat p = splat(-2.72614225801306e-10f) * s + 2.77068142495902e-08f;
    p = p * s - 2.10102402082508e-06f;
    p = p * s - 5.69250639462346e-05f;
    p = p * s - 7.34990630326855e-04f;
    p = p * s - 2.95459980854025e-03f;
    p = p * s - 1.60960333262415e-02f;
    vfloat q = splat(-1.45660718464996e-05f) * s - 2.13374055278905e-04f;
    q = q * s - 1.68282697438203e-03f;
    q = q * s - 7.37332916720468e-03f;
    q = q * s - 1.42647390514189e-02f;
    vfloat result = 0.5f * x * (1.0f + u * p / q);
    return choose(scaled < -4.0f, splat(-0.0f), result);
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
        if (is_wanted(&a->to)) quantize_row(out, &a->to, columns, t);
    }
}

typedef struct {
    const float *x; /* [tokens][columns] */
    int64_t x_stride;
    float *out; /* [tokens][columns]; NULL = only the quantized result is wanted */
    int64_t out_stride;
    Quantized to;
    int64_t columns; /* a multiple of size */
    int64_t size; /* a power of two */
} Hadamard;

/* Return the entry of Sylvester's matrix, which is ± 1, or 0 between columns of different groups. */
INLINE float sign_of(int64_t row, int64_t column, int64_t size) {
    return (row ^ column) & -size ? 0.0f : __builtin_parityll(row & column & (size - 1)) ? -1.0f : 1.0f;
}

/* out = x · H / sqrt(size) for every `size` columns (the fast Walsh-Hadamard transform). H of `size` is the Kronecker product of those
 * of size / LANES and of LANES. Each vector of columns is multiplied with the small one. Then whole vectors are added and
 * subtracted. */
static void transform(const Hadamard *a, const float *x, float *restrict out, const vfloat small[LANES]) {
    int64_t whole = a->columns / LANES * LANES;
    for (int64_t c = 0; c < whole; c += LANES) {
        vfloat sum = splat(0);
        for (int i = 0; i < LANES; i++) sum += splat(x[c + i]) * small[i];
        store(out + c, sum);
    }
    for (int64_t c = whole; c < a->columns; c++) {
        float sum = 0;
        for (int64_t i = whole; i < a->columns; i++) sum += x[i] * small[i - whole][c - whole];
        out[c] = sum;
    }
    for (int64_t width = LANES; width < a->size; width *= 2)
        for (int64_t first = 0; first < whole; first += 2 * width)
            for (int64_t c = first; c < first + width; c += LANES) {
                vfloat low = load(out + c), high = load(out + c + width);
                store(out + c, low + high);
                store(out + c + width, low - high);
            }
}

EXPORT void hadamard(const Step *step, Worker *worker, const void *arguments) {
    const Hadamard *a = arguments;
    float row[a->out ? 1 : a->columns];
    const float scale = 1.0f / sqrtf((float)a->size);
    vfloat small[LANES];
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) small[i][j] = sign_of(i, j, a->size) * scale;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        float *out = a->out ? a->out + t * a->out_stride : row;
        transform(a, a->x + t * a->x_stride, out, small);
        if (is_wanted(&a->to)) quantize_row(out, &a->to, a->columns, t);
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

/* Operands are [tokens][outer][columns]. `stride`, `outer` and `step` are the numbers of elements from one token, outer index and
 * column to the next; 0 = all have the same. */
typedef struct {
    const float *x;
    int64_t x_stride, x_outer, x_step;
    const float *y; /* NULL = use `factor` */
    int64_t y_stride, y_outer, y_step;
    float *out;
    int64_t out_stride, out_outer, out_step; /* out_step is 1 for activations */
    int64_t outer, columns;
    int64_t kind; /* a Kind */
    float factor; /* CLAMP: results are limited to ± this */
} Pointwise;

typedef enum { PRODUCT, SUM, DIFFERENCE, QUOTIENT, CLAMP, RELU, SIGMOID, TANH, SILU, GELU, GELU_TANH, ELU, RSQRT } Kind;

enum { CHUNK = 4096 }; /* columns of one task: rows of logits are divided among the threads */

INLINE float activated(Kind kind, float x) {
    switch (kind) {
    case RELU: return x > 0 ? x : 0;
    case SIGMOID: return 1.0f / (1.0f + expf(-x));
    case TANH: return tanhf(x);
    case GELU: return gelu(splat(x))[0];
    case SILU: return silu(splat(x))[0];
    case ELU: return x > 0 ? x : expm1f(x);
    case RSQRT: return 1.0f / sqrtf(x);
    default: return gelu_tanh(splat(x))[0];
    }
}

/* out = activation(x). The kinds that have vectors use them. */
static void activate(Kind kind, const float *x, int64_t step, float *restrict out, int64_t columns) {
    int64_t c = 0;
    if (kind == SILU && step == 1) for (; c + LANES <= columns; c += LANES) store(out + c, silu(load(x + c)));
    if (kind == GELU && step == 1) for (; c + LANES <= columns; c += LANES) store(out + c, gelu(load(x + c)));
    if (kind == GELU_TANH && step == 1) for (; c + LANES <= columns; c += LANES) store(out + c, gelu_tanh(load(x + c)));
    for (; c < columns; c++) out[c] = activated(kind, x[c * step]);
}

/* out = `result` of p from x and q from y. Compilers make vectors of the first two loops. */
#define COMBINE(result)                                                                                                          \
    do {                                                                                                                         \
        if (is_plain && y_step == 1) for (int64_t c = 0; c < columns; c++) { float p = x[c], q = y[c]; out[c] = result; }        \
        else if (is_plain && !y_step) for (int64_t c = 0; c < columns; c++) { float p = x[c], q = one; out[c] = result; }        \
        else for (int64_t c = 0; c < columns; c++) { float p = x[c * x_step], q = y[c * y_step]; out[c * out_step] = result; }   \
    } while (0)

static void combine(const Pointwise *a, const float *x, const float *y, int64_t y_step, float *restrict out, int64_t columns) {
    const int64_t x_step = a->x_step, out_step = a->out_step;
    const int is_plain = x_step == 1 && out_step == 1;
    const Kind kind = (Kind)a->kind;
    const float one = *y;
    switch (kind) {
    case PRODUCT: COMBINE(p * q); break;
    case SUM: COMBINE(p + q); break;
    case DIFFERENCE: COMBINE(p - q); break;
    case QUOTIENT: COMBINE(p / q); break;
    case CLAMP: COMBINE(p < -q ? -q : p > q ? q : p); break;
    default: activate(kind, x, x_step, out, columns);
    }
}

EXPORT void pointwise(const Step *step, Worker *worker, const void *arguments) {
    const Pointwise *a = arguments;
    int64_t chunks = (a->columns + CHUNK - 1) / CHUNK, num_tasks = step->num_tokens * chunks;
    for (int64_t task; (task = next_task(worker, num_tasks)) < num_tasks;) {
        int64_t t = task / chunks, first = task % chunks * CHUNK;
        int64_t columns = a->columns - first < CHUNK ? a->columns - first : CHUNK;
        for (int64_t i = 0; i < a->outer; i++) {
            const float *x = a->x + t * a->x_stride + i * a->x_outer + first * a->x_step;
            const float *y = a->y ? a->y + t * a->y_stride + i * a->y_outer + first * a->y_step : &a->factor;
            float *out = a->out + t * a->out_stride + i * a->out_outer + first * a->out_step;
            combine(a, x, y, a->y ? a->y_step : 0, out, columns);
        }
    }
}

typedef struct {
    const float *x; /* [tokens][outer][columns] */
    int64_t x_stride, x_outer; /* as in Pointwise */
    float *out; /* [tokens][outer] */
    int64_t out_stride;
    int64_t outer, columns;
} RowMeans;

EXPORT void row_means(const Step *step, Worker *worker, const void *arguments) {
    const RowMeans *a = arguments;
    int64_t whole = a->columns / LANES * LANES;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;)
        for (int64_t i = 0; i < a->outer; i++) {
            const float *x = a->x + t * a->x_stride + i * a->x_outer;
            vfloat sums = splat(0);
            float rest = 0;
            for (int64_t c = 0; c < whole; c += LANES) sums += load(x + c);
            for (int64_t c = whole; c < a->columns; c++) rest += x[c];
            a->out[t * a->out_stride + i] = (sum_of(sums) + rest) / (float)a->columns;
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
