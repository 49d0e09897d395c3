/* A token with several vectors ("streams") between layers, see pegboard_models/streams.py. */
#include "common.h"

typedef struct {
    const float *x; /* [tokens][streams · columns] */
    int64_t x_stride;
    float *out; /* [tokens][streams · columns] */
    int64_t out_stride;
    const float *routed; /* [tokens][columns] */
    int64_t routed_stride;
    const float *computed; /* [tokens][columns]; NULL = predict */
    int64_t computed_stride;
    const float *router; /* [streams][columns] */
    const float *mixing; /* [streams · streams][streams] to predict, [streams][streams] to correct */
    int64_t streams, columns, active;
} Streams;

/* tanh(router routed / columns) */
static void gates_of(const Streams *a, const float *routed, float *gates) {
    const int64_t columns = a->columns;
    for (int64_t n = 0; n < a->streams; n++) {
        const float *weights = a->router + n * columns;
        vfloat sums = splat(0);
        int64_t c = 0;
        for (; c + LANES <= columns; c += LANES) sums += load(routed + c) * load(weights + c);
        float sum = sum_of(sums);
        for (; c < columns; c++) sum += routed[c] * weights[c];
        gates[n] = tanhf(sum / (float)columns);
    }
}

INLINE float mixed(const Streams *a, int64_t row, const float *gates) {
    float sum = 0;
    for (int64_t n = 0; n < a->streams; n++) sum += a->mixing[row * a->streams + n] * gates[n];
    return sum;
}

/* out = x + factor · y */
INLINE void add_scaled(const float *x, const float *y, float factor, float *out, int64_t columns) {
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES) store(out + c, load(x + c) + load(y + c) * factor);
    for (; c < columns; c++) out[c] = x[c] + y[c] * factor;
}

EXPORT void update_streams(const Step *step, Worker *worker, const void *arguments) {
    const Streams *a = arguments;
    const int64_t count = a->streams, columns = a->columns;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        const float *x = a->x + t * a->x_stride;
        float *out = a->out + t * a->out_stride, gates[count];
        gates_of(a, a->routed + t * a->routed_stride, gates);
        for (int64_t n = 0; n < count; n++) {
            float *to = out + n * columns;
            if (a->computed) {
                const float part = mixed(a, n, gates) + 1.0f, *from = x + n * columns, *guess = x + a->active * columns;
                const float *found = a->computed + t * a->computed_stride;
                for (int64_t c = 0; c < columns; c++) to[c] = from[c] + (found[c] - guess[c]) * part;
                continue;
            }
            for (int64_t from = 0; from < count; from++)
                add_scaled(from ? to : x + n * columns, x + from * columns, mixed(a, n * count + from, gates), to, columns);
        }
    }
}

typedef struct {
    const float *x; /* [tokens][streams · columns] */
    int64_t x_stride;
    const float *y; /* [tokens][columns] */
    int64_t y_stride;
    float *out; /* [tokens][streams · columns] */
    int64_t out_stride;
    int64_t streams, columns;
} AddToStreams;

EXPORT void add_to_streams(const Step *step, Worker *worker, const void *arguments) {
    const AddToStreams *a = arguments;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        const float *x = a->x + t * a->x_stride;
        float *out = a->out + t * a->out_stride;
        memcpy(out, x, a->columns * sizeof(float));
        for (int64_t n = 1; n < a->streams; n++)
            add_scaled(x + n * a->columns, a->y + t * a->y_stride, 1.0f, out + n * a->columns, a->columns);
    }
}

typedef struct {
    const float *x, *like; /* [tokens][columns] */
    int64_t x_stride, like_stride;
    float *out; /* [tokens][columns] */
    int64_t out_stride;
    int64_t columns;
    float least; /* of the mean square of x */
} MatchMagnitude;

static float mean_square(const float *x, int64_t columns) {
    vfloat sums = splat(0);
    int64_t c = 0;
    for (; c + LANES <= columns; c += LANES) sums += load(x + c) * load(x + c);
    float sum = sum_of(sums);
    for (; c < columns; c++) sum += x[c] * x[c];
    return sum / (float)columns;
}

EXPORT void match_magnitude(const Step *step, Worker *worker, const void *arguments) {
    const MatchMagnitude *a = arguments;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        const float *x = a->x + t * a->x_stride;
        float square = fmaxf(mean_square(x, a->columns), a->least);
        float factor = sqrtf(mean_square(a->like + t * a->like_stride, a->columns)) / sqrtf(square), *out = a->out + t * a->out_stride;
        for (int64_t c = 0; c < a->columns; c++) out[c] = x[c] * factor;
    }
}

typedef struct {
    const float *x; /* [tokens][2 · columns]: gates, and what they are multiplied with */
    int64_t x_stride;
    float *out; /* [tokens][2 · columns] */
    int64_t out_stride;
    int64_t columns;
    float cutoff; /* in standard deviations */
} CutGates;

EXPORT void cut_gates(const Step *step, Worker *worker, const void *arguments) {
    const CutGates *a = arguments;
    const int64_t columns = a->columns, whole = columns / LANES * LANES;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        const float *x = a->x + t * a->x_stride;
        float *out = a->out + t * a->out_stride, sum = 0, squares = 0;
        vfloat sums = splat(0);
        for (int64_t c = 0; c < whole; c += LANES) sums += load(x + c);
        for (int64_t c = whole; c < columns; c++) sum += x[c];
        const float mean = (sum + sum_of(sums)) / (float)columns;
        sums = splat(0);
        for (int64_t c = 0; c < whole; c += LANES) {
            vfloat off = load(x + c) - mean;
            sums += off * off;
        }
        for (int64_t c = whole; c < columns; c++) squares += (x[c] - mean) * (x[c] - mean);
        const float least = mean + sqrtf((squares + sum_of(sums)) / (float)columns) * a->cutoff;
        for (int64_t c = 0; c < whole; c += LANES) store(out + c, vmax(load(x + c) - least, splat(0)));
        for (int64_t c = whole; c < columns; c++) out[c] = fmaxf(x[c] - least, 0);
        memcpy(out + columns, x + columns, columns * sizeof(float));
    }
}
