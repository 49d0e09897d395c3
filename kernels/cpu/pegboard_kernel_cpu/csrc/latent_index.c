/* The choice of keys by an index (DeepSeek-AI 2025, "DeepSeek-V3.2"): a key's score is the sum over index heads of the head's weight
 * times its dot product with the index key, where that is positive. A query attends to the keys with the best scores.
 */
#include "latent.h"

typedef struct {
    const float *vectors, *weights; /* [T][heads][size] and [T][heads] */
    int64_t vectors_stride, weights_stride;
    int32_t *chosen; /* [T][top_k]: the positions of the keys, in order; not written for queries that see no more keys than these */
    int64_t chosen_stride;
    const Plan *plan;
    IndexCache cache;
    float *scores; /* [threads][2][most_keys] */
    int64_t most_keys;
    int32_t heads, top_k;
} ChooseKeys;

static void score_keys(const ChooseKeys *a, int64_t token, int row, int count, float *scores) {
    const IndexCache *cache = &a->cache;
    const int32_t *table = a->plan->block_table + row * a->plan->table_stride;
    const float *vectors = a->vectors + token * a->vectors_stride, *weights = a->weights + token * a->weights_stride;
    const int64_t width = cache->size * bytes_of(cache->type);
    const char *keys[CHUNK + KEYS];
    float products[ROWS * CHUNK_STRIDE] ALIGNED;
    for (int first = 0; first < count; first += CHUNK) {
        const int some = minimum(CHUNK, count - first);
        for (int key = 0; key < some; key++) {
            const int at = first + key;
            keys[key] = cache->keys + table[at / cache->block_size] * cache->stride + at % cache->block_size * width;
            scores[at] = 0;
        }
        for (int key = some; key < some + KEYS; key++) keys[key] = keys[some - 1];
        for (int head = 0; head < a->heads;) {
            const int rows = a->heads - head >= ROWS ? ROWS : 1;
            const float *q = vectors + (int64_t)head * cache->size;
            for (int key = 0; key < some; key += KEYS) dot_products_of(cache->type, rows, q, cache->size, keys + key, products + key);
            for (int r = 0; r < rows; r++)
                for (int key = 0; key < some; key++) scores[first + key] += weights[head + r] * fmaxf(products[r * CHUNK_STRIDE + key], 0);
            head += rows;
        }
    }
}

/* Return the k-th largest value; the values change places (Hoare 1961, "quickselect"). */
static float largest_but(float *values, int64_t count, int64_t k) {
    int64_t low = 0, high = count - 1, place = k - 1;
    while (low < high) {
        const float pivot = values[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot) i++;
            while (values[j] < pivot) j--;
            if (i > j) break;
            float held = values[i];
            values[i++] = values[j], values[j--] = held;
        }
        if (place <= j) high = j;
        else if (place >= i) low = i;
        else break;
    }
    return values[place];
}

EXPORT void choose_keys(const Step *step, Worker *worker, const void *arguments) {
    const ChooseKeys *a = arguments;
    const Plan *plan = a->plan;
    float *scores = a->scores + worker->thread * 2 * a->most_keys, *copy = scores + a->most_keys;
    for (int64_t token; (token = next_task(worker, step->num_tokens)) < step->num_tokens;) {
        int low = 0, high = (int)plan->num_rows; /* the row of the token is the last one that starts before it */
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (plan->query_start_loc[middle] <= token) low = middle;
            else high = middle;
        }
        const int count = plan->seq_lens[low] - (int)(plan->query_start_loc[low + 1] - token) + 1;
        if (count <= a->top_k) continue;
        score_keys(a, token, low, count, scores);
        memcpy(copy, scores, count * sizeof(float));
        const float least = largest_but(copy, count, a->top_k);
        int32_t *chosen = a->chosen + token * a->chosen_stride;
        int better = 0, number = 0;
        for (int key = 0; key < count; key++) better += scores[key] > least;
        for (int key = 0, ties = a->top_k - better; key < count && number < a->top_k; key++)
            if (scores[key] > least || (scores[key] == least && ties-- > 0)) chosen[number++] = key;
        while (number < a->top_k) chosen[number++] = count - 1; /* scores are not numbers */
    }
}
