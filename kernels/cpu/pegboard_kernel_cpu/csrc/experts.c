/* A mixture of experts: routing, the order of rows, and their sums. The products are in linear_*.c. */
#include "quantize.h"

typedef struct {
    const float *logits; /* [tokens][experts] */
    int64_t logits_stride;
    const float *correction; /* [experts], added to the scores for the choice only; NULL = none */
    float *weights; /* [tokens][top_k] */
    int32_t *ids; /* [tokens][top_k], the best first */
    int64_t num_experts, top_k, num_groups, top_groups, group_best;
    int64_t score, renormalize;
    float scale;
    float spread; /* SPARSEMIXER: largest distance of two logits that are near, as a part of the larger one */
} Route;

enum { SOFTMAX, SIGMOID, SPARSEMIXER };

INLINE int64_t best_of(const float *values, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (values[i] > values[best]) best = i;
    return best;
}

/* Set the scores of all experts that are not in the best groups to -infinity. */
static void close_groups(const Route *a, float *choice) {
    int64_t size = a->num_experts / a->num_groups;
    float worth[a->num_groups], held[size];
    for (int64_t g = 0; g < a->num_groups; g++) {
        memcpy(held, choice + g * size, size * sizeof(float));
        worth[g] = 0;
        for (int64_t i = 0; i < a->group_best; i++) {
            int64_t best = best_of(held, size);
            worth[g] += held[best];
            held[best] = -INFINITY;
        }
    }
    for (int64_t i = 0; i < a->top_groups; i++) worth[best_of(worth, a->num_groups)] = -INFINITY; /* these stay open */
    for (int64_t g = 0; g < a->num_groups; g++)
        if (worth[g] != -INFINITY)
            for (int64_t i = 0; i < size; i++) choice[g * size + i] = -INFINITY;
}

/* Choose one expert after the other. The weight of each is its softmax among those that are left and near it. */
static void mix_sparsely(const Route *a, const float *logits, float *weights, int32_t *ids) {
    int64_t count = a->num_experts;
    float left[count];
    memcpy(left, logits, count * sizeof(float));
    for (int64_t k = 0; k < a->top_k; k++) {
        int64_t chosen = best_of(left, count);
        float best = left[chosen], sum = 0;
        for (int64_t e = 0; e < count; e++) {
            float size = fabsf(logits[e]), largest = size > best ? size : best;
            int is_far = (best - logits[e]) / largest > a->spread;
            if (left[e] != -INFINITY && !is_far) sum += expf(left[e] - best);
        }
        ids[k] = (int32_t)chosen;
        weights[k] = a->scale / sum;
        left[chosen] = -INFINITY;
    }
}

EXPORT void route(const Step *step, Worker *worker, const void *arguments) {
    const Route *a = arguments;
    int64_t count = a->num_experts;
    float scores[count], choice[count];
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        const float *logits = a->logits + t * a->logits_stride;
        float *weights = a->weights + t * a->top_k, largest = logits[best_of(logits, count)], sum = 0;
        int32_t *ids = a->ids + t * a->top_k;
        if (a->score == SPARSEMIXER) {
            mix_sparsely(a, logits, weights, ids);
            continue;
        }
        for (int64_t e = 0; e < count; e++) {
            scores[e] = a->score == SIGMOID ? 1.0f / (1.0f + expf(-logits[e])) : expf(logits[e] - largest);
            sum += scores[e];
        }
        for (int64_t e = 0; e < count; e++) {
            if (a->score == SOFTMAX) scores[e] /= sum;
            choice[e] = scores[e] + (a->correction ? a->correction[e] : 0);
        }
        if (a->num_groups > 1) close_groups(a, choice);
        sum = 0;
        for (int64_t k = 0; k < a->top_k; k++) {
            int64_t best = best_of(choice, count);
            ids[k] = (int32_t)best;
            weights[k] = scores[best];
            sum += scores[best];
            choice[best] = -INFINITY;
        }
        float factor = a->renormalize ? a->scale / (sum + 1e-20f) : a->scale;
        for (int64_t k = 0; k < a->top_k; k++) weights[k] *= factor;
    }
}

typedef struct {
    const float *weights; /* [tokens][top_k] */
    const int32_t *ids; /* [tokens][top_k]; from num_experts on: experts that return their input */
    float *real_weights; /* [tokens][top_k], 0 for these */
    int32_t *real_ids; /* [tokens][top_k], for these the best other one */
    float *kept; /* [tokens], the weights of these together */
    int64_t num_experts, top_k;
} ZeroExperts;

EXPORT void zero_experts(const Step *step, Worker *worker, const void *arguments) {
    const ZeroExperts *a = arguments;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        const float *weights = a->weights + t * a->top_k;
        const int32_t *ids = a->ids + t * a->top_k;
        int32_t best = (int32_t)a->num_experts - 1;
        for (int64_t k = a->top_k - 1; k >= 0; k--)
            if (ids[k] < a->num_experts) best = ids[k];
        a->kept[t] = 0;
        for (int64_t k = 0; k < a->top_k; k++) {
            int is_real = ids[k] < a->num_experts;
            if (!is_real) a->kept[t] += weights[k];
            a->real_weights[t * a->top_k + k] = is_real ? weights[k] : 0;
            a->real_ids[t * a->top_k + k] = is_real ? ids[k] : best;
        }
    }
}

typedef struct {
    const int32_t *ids; /* [tokens][top_k] */
    const int32_t *held; /* [turns][num_ids]: the number of each expert here, -1 = another rank has it; NULL = all are here */
    int32_t *counts; /* [num_ids]: how many tokens chose each expert are added; NULL = they are not counted */
    int32_t *places; /* [tokens][top_k]: the place of each choice among the sorted rows, -1 = it is not here */
    int32_t *starts; /* [experts + 1] */
    int64_t num_ids, turns, num_experts, top_k;
} SortByExpert;

/* The number here of the expert that choice i is, -1 = another rank has it. */
INLINE int32_t number_here(const SortByExpert *a, int64_t i) {
    if (!a->held) return a->ids[i];
    int64_t turn = a->turns > 1 ? i / a->top_k % a->turns : 0;
    return a->held[turn * a->num_ids + a->ids[i]];
}

EXPORT void sort_by_expert(const Step *step, Worker *worker, const void *arguments) {
    const SortByExpert *a = arguments;
    for (int64_t task; (task = next_task(worker, 1)) < 1;) {
        int64_t count = step->num_tokens * a->top_k;
        int32_t next[a->num_experts];
        memset(next, 0, sizeof next);
        for (int64_t i = 0; a->counts && i < count; i++) a->counts[a->ids[i]]++;
        for (int64_t i = 0; i < count; i++) {
            int32_t expert = number_here(a, i);
            if (expert >= 0) next[expert]++;
        }
        a->starts[0] = 0;
        for (int64_t e = 0; e < a->num_experts; e++) {
            a->starts[e + 1] = a->starts[e] + next[e];
            next[e] = a->starts[e];
        }
        for (int64_t i = 0; i < count; i++) {
            int32_t expert = number_here(a, i);
            a->places[i] = expert < 0 ? -1 : next[expert]++;
        }
    }
}

typedef struct {
    const float *x; /* [tokens][columns] */
    int64_t x_stride;
    const int32_t *places; /* [tokens][top_k] */
    const float *factors; /* [tokens][top_k]; NULL = 1 */
    float *out; /* [tokens · top_k][columns]; NULL = only the quantized result is wanted */
    int64_t out_stride;
    Quantized to;
    int64_t columns, top_k;
} SpreadRows;

EXPORT void spread_rows(const Step *step, Worker *worker, const void *arguments) {
    const SpreadRows *a = arguments;
    float row[a->out ? 1 : a->columns];
    int64_t total = step->num_tokens * a->top_k;
    for (int64_t i; (i = next_task(worker, total)) < total;) {
        const float *x = a->x + i / a->top_k * a->x_stride;
        int64_t place = a->places[i];
        if (place < 0) continue;
        float *out = a->out ? a->out + place * a->out_stride : row, factor = a->factors ? a->factors[i] : 1.0f;
        for (int64_t c = 0; c < a->columns; c++) out[c] = x[c] * factor;
        if (is_wanted(&a->to)) quantize_row(out, &a->to, a->columns, place);
    }
}

typedef struct {
    const float *rows; /* [tokens · top_k][columns] */
    int64_t rows_stride;
    const int32_t *places; /* [tokens][top_k]; -1 = no row */
    const float *weights; /* [tokens][top_k]; NULL = 1 */
    const float *shared; /* [tokens][columns] or NULL */
    int64_t shared_stride;
    const float *gate; /* [tokens]: logits of the factor of `shared`; NULL = 1 */
    int64_t gate_stride;
    float *out; /* [tokens][columns] */
    int64_t out_stride;
    int64_t columns, top_k;
} SumExperts;

EXPORT void sum_experts(const Step *step, Worker *worker, const void *arguments) {
    const SumExperts *a = arguments;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        float *restrict out = a->out + t * a->out_stride;
        memset(out, 0, a->columns * sizeof(float));
        for (int64_t k = 0; k < a->top_k; k++) {
            int64_t place = a->places[t * a->top_k + k];
            if (place < 0) continue;
            const float *row = a->rows + place * a->rows_stride;
            float weight = a->weights ? a->weights[t * a->top_k + k] : 1.0f;
            for (int64_t c = 0; c < a->columns; c++) out[c] += row[c] * weight;
        }
        if (!a->shared) continue;
        const float *shared = a->shared + t * a->shared_stride;
        float factor = a->gate ? 1.0f / (1.0f + expf(-a->gate[t * a->gate_stride])) : 1.0f;
        for (int64_t c = 0; c < a->columns; c++) out[c] += shared[c] * factor;
    }
}

typedef struct {
    const float *x; /* [tokens][2 · columns]: gate, then up, or both in turn */
    int64_t x_stride;
    float *out; /* [tokens][columns]; NULL = only the quantized result is wanted */
    int64_t out_stride;
    Quantized to;
    int64_t columns, interleaved;
    float alpha, limit;
} ClampedSwiglu;

EXPORT void clamped_swiglu(const Step *step, Worker *worker, const void *arguments) {
    const ClampedSwiglu *a = arguments;
    int64_t every = a->interleaved ? 2 : 1, columns = a->columns;
    float row[a->out ? 1 : columns];
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        const float *gates = a->x + t * a->x_stride, *ups = gates + (a->interleaved ? 1 : columns);
        float *out = a->out ? a->out + t * a->out_stride : row;
        for (int64_t first = 0; first < columns; first += LANES) {
            int64_t count = columns - first < LANES ? columns - first : LANES;
            vfloat gate = splat(0), up = splat(0);
            for (int64_t i = 0; i < count; i++) {
                gate[i] = gates[(first + i) * every];
                up[i] = ups[(first + i) * every];
            }
            gate = vmin(gate, splat(a->limit));
            up = vmax(vmin(up, splat(a->limit)), splat(-a->limit));
            vfloat found = gate / (1.0f + exp_of(vmin(gate * -a->alpha, splat(87.0f)))) * (up + 1.0f);
            for (int64_t i = 0; i < count; i++) out[first + i] = found[i];
        }
        if (is_wanted(&a->to)) quantize_row(out, &a->to, columns, t);
    }
}

/* Which of the rows sorted by expert use which adapter. Each adapter has a slot for each expert; slot 0 is the base model. */
typedef struct {
    const int32_t *places;      /* [tokens][top_k] */
    const int32_t *experts;     /* [num_experts + 1], the rows of each expert */
    const int32_t *order;       /* [tokens], by adapter */
    const int32_t *starts;      /* [slots + 2], the tokens of each adapter in `order` */
    int32_t *to_order;          /* [tokens · top_k] */
    int32_t *to_starts;         /* [slots · num_experts + 3], of which the last is not a result */
    int64_t slots, num_experts, top_k;
} ExpertAdapterRows;

/* The slot of a row that belongs to a token of adapter s. */
INLINE int64_t slot_of_row(const ExpertAdapterRows *a, int64_t s, int32_t row) {
    int64_t low = 0, high = a->num_experts; /* experts[low] <= row < experts[high] */
    if (!s) return 0;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (a->experts[middle] <= row) low = middle;
        else high = middle;
    }
    return 1 + (s - 1) * a->num_experts + low;
}

EXPORT void expert_adapter_rows(const Step *step, Worker *worker, const void *arguments) {
    (void)step;
    const ExpertAdapterRows *a = arguments;
    int64_t count = a->slots * a->num_experts + 1;
    for (int64_t task; (task = next_task(worker, 1)) < 1;) {
        memset(a->to_starts, 0, (count + 2) * sizeof *a->to_starts);
        for (int pass = 0; pass < 2; pass++) { /* first count, two places on; then fill, which moves the starts to their places */
            for (int64_t s = 0; s <= a->slots; s++)
                for (int64_t i = a->starts[s]; i < a->starts[s + 1]; i++)
                    for (int64_t k = 0; k < a->top_k; k++) {
                        int32_t row = a->places[a->order[i] * a->top_k + k];
                        if (row < 0) continue;
                        int64_t slot = slot_of_row(a, s, row);
                        if (pass) a->to_order[a->to_starts[slot + 1]++] = row;
                        else a->to_starts[slot + 2]++;
                    }
            for (int64_t slot = 0; !pass && slot < count; slot++) a->to_starts[slot + 2] += a->to_starts[slot + 1];
        }
    }
}

/* A kernel whose rows are `copies` times the tokens of the step. */
typedef struct {
    Kernel kernel;
    const void *arguments;
    int64_t copies;
} Repeated;

EXPORT void repeated(const Step *step, Worker *worker, const void *arguments) {
    const Repeated *a = arguments;
    Step longer = {step->num_tokens * a->copies};
    a->kernel(&longer, worker, a->arguments);
}
