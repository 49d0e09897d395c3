/* Sample a token per row of logits: the argmax, or a random token of those that min_p, top_k and top_p leave.
 *
 * Each of the three drops all tokens below some value, so a row has one floor, and no sort is needed. The row is read once to
 * find the maxima of its groups of 64 tokens. A group whose maximum is below the floor is never read again. The k-th largest
 * maximum is a lower bound of the k-th largest value, which is then selected among the values that remain. For top_p, bisection
 * narrows the range of the least weight to few values. Only tokens with at least (1 - p) / V of the total weight matter, because all
 * lighter tokens together weigh less than the part that may be dropped.
 */
#include "common.h"

#define GROUP 64
#define FEW_WEIGHTS 64 /* so few are selected from one by one */
#define SUMMED (64 * LANES) /* weights that are added in float32 */

typedef struct {
    const float *logits; /* [rows][vocabulary] */
    int64_t stride, rows, vocabulary;
    const float *temperature; /* [rows], 0 = argmax; NULL = argmax for all */
    const float *min_p, *top_p; /* [rows], 0 and 1 = off; NULL = off for all */
    const int64_t *top_k; /* [rows], the size of the vocabulary = off */
    const double *uniforms; /* [rows] in [0, 1) */
    int64_t *ids; /* [rows] */
    float *scratch; /* [threads][scratch_stride], at least 2 * vocabulary + vocabulary / 64 + 64 floats each */
    int64_t scratch_stride;
} SampleTokens;

/* The state of a row while it is sampled. A weight is exp((logit - peak) / temperature). */
typedef struct {
    const float *x;
    int64_t size, num_groups;
    float *maxima; /* [num_groups] */
    float *values; /* [2][size and up to 15 more]: the values to select from, and weights */
    float peak, rate, floor; /* rate: log2(e) / temperature */
} Row;

INLINE float weight_of(const Row *row, float x) { return exp2f((x - row->peak) * row->rate); }
INLINE int64_t group_end(const Row *row, int64_t group) {
    return (group + 1) * GROUP < row->size ? (group + 1) * GROUP : row->size;
}

/* Find the maxima of the groups and of the row. Return the index of the first NaN, or -1. */
static int64_t read_row(Row *row) {
    vint unordered = {0};
    int rest_is_unordered = 0;
    row->peak = -INFINITY;
    for (int64_t group = 0; group < row->num_groups; group++) {
        int64_t i = group * GROUP, stop = group_end(row, group);
        vfloat best = splat(-INFINITY);
        for (; i + LANES <= stop; i += LANES) {
            vfloat x = load(row->x + i);
            unordered |= x != x;
            best = vmax(best, x);
        }
        float top = max_of(best);
        for (; i < stop; i++) {
            rest_is_unordered |= row->x[i] != row->x[i];
            top = row->x[i] > top ? row->x[i] : top;
        }
        row->maxima[group] = top;
        row->peak = top > row->peak ? top : row->peak;
    }
    for (int l = 0; l < LANES; l++) rest_is_unordered |= unordered[l];
    if (rest_is_unordered)
        for (int64_t i = 0; i < row->size; i++)
            if (row->x[i] != row->x[i]) return i;
    return -1;
}

static int64_t first_peak(const Row *row) {
    for (int64_t group = 0; group < row->num_groups; group++)
        if (row->maxima[group] == row->peak)
            for (int64_t i = group * GROUP; i < group_end(row, group); i++)
                if (row->x[i] == row->peak) return i;
    return 0;
}

/* Gather the values that are at least `least`, and return their number. */
static int64_t gather(const Row *row, float least) {
    int64_t n = 0;
    for (int64_t group = 0; group < row->num_groups; group++) {
        if (row->maxima[group] < least) continue;
        for (int64_t i = group * GROUP; i < group_end(row, group); i++) {
            row->values[n] = row->x[i];
            n += row->x[i] >= least;
        }
    }
    return n;
}

/* Return the largest v for which the sizes of all values >= v add up to at least `wanted`. If the sum of all sizes is less,
 * return the smallest value. The size of a value is 1, or its weight. (Hoare's selection, with the median of three as the
 * pivot.) */
static float select_value(const Row *row, float *values, int64_t n, double wanted, int by_weight) {
    double above = 0;
    for (;;) {
        if (n == 1) return values[0];
        float a = values[0], b = values[n / 2], c = values[n - 1];
        float pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
        int64_t higher = 0, equal = 0; /* values [0, higher) > pivot, [higher, higher + equal) == pivot, the rest < pivot */
        double high = 0;
        for (int64_t i = 0; i < n; i++) {
            float value = values[i];
            if (value < pivot) continue;
            values[i] = values[higher + equal];
            if (value > pivot) {
                values[higher + equal] = values[higher];
                values[higher++] = value;
                high += by_weight ? weight_of(row, value) : 1;
            } else {
                values[higher + equal++] = value;
            }
        }
        double same = (double)equal * (by_weight ? weight_of(row, pivot) : 1);
        if (above + high >= wanted && higher) {
            n = higher;
        } else if (above + high + same >= wanted || higher + equal == n) {
            return pivot;
        } else {
            above += high + same;
            values += higher + equal, n -= higher + equal;
        }
    }
}

static float kth_largest(const Row *row, int64_t k) {
    float bound = -INFINITY;
    if (k <= row->num_groups) {
        memcpy(row->values, row->maxima, row->num_groups * sizeof(float));
        bound = select_value(row, row->values, row->num_groups, (double)k, 0);
    }
    return select_value(row, row->values, gather(row, bound), (double)k, 0);
}

/* Return the sum of a group's weights at or above the floor. */
static double group_weight(const Row *row, int64_t group) {
    int64_t i = group * GROUP, stop = group_end(row, group);
    vfloat sum = splat(0);
    float rest = 0;
    for (; i + LANES <= stop; i += LANES) {
        vfloat x = load(row->x + i);
        sum += choose(x >= row->floor, power_of_two((x - row->peak) * row->rate), splat(0));
    }
    for (; i < stop; i++) rest += row->x[i] >= row->floor ? weight_of(row, row->x[i]) : 0;
    return (double)sum_of(sum) + rest;
}

static double total_weight(const Row *row) {
    double total = 0;
    for (int64_t group = 0; group < row->num_groups; group++)
        if (row->maxima[group] >= row->floor) total += group_weight(row, group);
    return total;
}

/* Return the sum of those of n weights that are at least `least`, and their number. n: a multiple of LANES. */
static double weight_above(const float *weights, int64_t n, float least, int64_t *count) {
    double total = 0;
    vint number = {0};
    for (int64_t start = 0; start < n; start += SUMMED) {
        vfloat sum = splat(0);
        for (int64_t i = start; i < n && i < start + SUMMED; i += LANES) {
            vfloat weight = load(weights + i);
            vint is_counted = weight >= least;
            sum += (vfloat)(is_counted & (vint)weight);
            number -= is_counted;
        }
        total += (double)sum_of(sum);
    }
    *count = 0;
    for (int lane = 0; lane < LANES; lane++) *count += number[lane];
    return total;
}

typedef union {
    float weight;
    int32_t bits; /* in the order of the weights, which are positive */
} Threshold;

/* Return the value of the least likely token that top_p keeps. Lighter tokens than `low` together weigh less than the part that may be
 * dropped. Bisection in the bits of the weights then finds a range that has few of them. */
static float nucleus(const Row *row, float top_p) {
    const double total = total_weight(row), wanted = top_p * total, spare = (1.0 - top_p) * total / (double)row->size;
    const float least = row->peak + (float)(log(spare) - 0.01) * LOG2E / row->rate; /* slightly lower, because weights are rounded */
    const int64_t n = gather(row, fmaxf(row->floor, least)), filled = (n + LANES - 1) / LANES * LANES;
    float *weights = row->values + (row->size + 15) / 16 * 16;
    Threshold low = {0x1p-126f}, high = {1.5f};
    int64_t below = n, above = 0, left = 0; /* numbers of weights of at least `low` and `high` */
    double heavier = 0;
    for (int64_t i = n; i < filled; i++) row->values[i] = -INFINITY;
    for (int64_t i = 0; i < filled; i += LANES) store(weights + i, power_of_two((load(row->values + i) - row->peak) * row->rate));
    while (below - above > FEW_WEIGHTS && high.bits - low.bits > 1) {
        Threshold middle = {.bits = low.bits + (high.bits - low.bits) / 2};
        int64_t count;
        double weight = weight_above(weights, filled, middle.weight, &count);
        if (weight >= wanted) low = middle, below = count;
        else high = middle, above = count, heavier = weight;
    }
    for (int64_t i = 0; i < n; i++) {
        Threshold weight = {weights[i]};
        row->values[left] = row->values[i];
        left += (uint32_t)(weight.bits - low.bits) < (uint32_t)(high.bits - low.bits); /* without a branch */
    }
    return left ? select_value(row, row->values, left, wanted - heavier, 1) : row->floor;
}

/* Return the token whose share of the cumulative weight contains `uniform`. */
static int64_t draw(const Row *row, double uniform) {
    double *sums = (double *)row->values, total = 0;
    for (int64_t group = 0; group < row->num_groups; group++)
        total += sums[group] = row->maxima[group] >= row->floor ? group_weight(row, group) : 0;
    double left = uniform * total;
    int64_t group = 0, last = 0;
    /* Because of rounding, a remainder may be left after the last group with weight. */
    for (int64_t g = 0; g < row->num_groups; g++) {
        if (sums[g] <= 0) continue;
        group = g;
        if (left < sums[g]) break;
        left -= sums[g];
    }
    last = -1;
    for (int64_t i = group * GROUP; i < group_end(row, group); i++) {
        if (!(row->x[i] >= row->floor)) continue;
        double weight = weight_of(row, row->x[i]);
        if (weight <= 0) continue;
        last = i;
        if (left < weight) break;
        left -= weight;
    }
    return last < 0 ? first_peak(row) : last;
}

static int64_t sample_row(const SampleTokens *a, int64_t index, float *scratch) {
    Row row = {.x = a->logits + index * a->stride, .size = a->vocabulary, .floor = -INFINITY};
    row.num_groups = (row.size + GROUP - 1) / GROUP;
    row.values = scratch; /* also holds doubles, so it is aligned */
    row.maxima = scratch + 2 * ((row.size + 15) / 16 * 16);
    int64_t strange = read_row(&row);
    float temperature = a->temperature ? a->temperature[index] : 0;
    if (strange >= 0) return strange;
    if (!(temperature > 0) || isinf(row.peak)) return first_peak(&row);
    row.rate = LOG2E / temperature;
    if (a->min_p && a->min_p[index] > 0) row.floor = row.peak + temperature * logf(a->min_p[index]);
    if (a->top_k && a->top_k[index] < row.size) row.floor = fmaxf(row.floor, kth_largest(&row, a->top_k[index]));
    if (a->top_p && a->top_p[index] < 1) row.floor = fmaxf(row.floor, nucleus(&row, a->top_p[index]));
    return draw(&row, a->uniforms[index]);
}

EXPORT void sample_tokens(const Step *step, Worker *worker, const void *arguments) {
    (void)step;
    const SampleTokens *a = arguments;
    float *scratch = a->scratch + worker->thread * a->scratch_stride;
    for (int64_t row; (row = next_task(worker, a->rows)) < a->rows;) a->ids[row] = sample_row(a, row, scratch);
}
