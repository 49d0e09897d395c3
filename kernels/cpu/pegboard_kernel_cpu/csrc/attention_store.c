/* Rotate the queries and keys of a step, and store its keys and values in the cache; or only rotate. */
#include "attention.h"

#define TOKENS 16 /* maximum per task; neighboring tokens share cache lines of the transposed keys */

/* The scale of an int8 code, and its inverse. */
INLINE float scale_of(const float *x, int n, float *inverse) {
    float largest = 0;
    for (int i = 0; i < n; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    *inverse = largest > 0 ? 127.0f / largest : 0;
    return largest / 127.0f;
}

INLINE int8_t to_int8(float x) { return (int8_t)lrintf(x); }

static void store_head(const Cache *cache, const float *k, const float *v, int64_t block, int offset, int head) {
    const int dim = cache->head_dim, size = cache->block_size;
    int64_t k_first = (int64_t)head * dim * size + offset, v_first = ((int64_t)head * size + offset) * dim;
    char *k_block = cache->k + block * cache->k_stride, *v_block = cache->v + block * cache->v_stride;
    if (cache->type == FLOAT32) {
        float *to = (float *)k_block + k_first;
        for (int d = 0; d < dim; d++) to[(int64_t)d * size] = k[d];
        memcpy((float *)v_block + v_first, v, dim * sizeof(float));
    } else if (cache->type == BFLOAT16) {
        uint16_t *to = (uint16_t *)k_block + k_first, *v_to = (uint16_t *)v_block + v_first;
        for (int d = 0; d < dim; d++) to[(int64_t)d * size] = to_bfloat16(k[d]);
        for (int d = 0; d < dim; d++) v_to[d] = to_bfloat16(v[d]);
    } else if (cache->type == FLOAT16) {
        uint16_t *to = (uint16_t *)k_block + k_first, *v_to = (uint16_t *)v_block + v_first;
        for (int d = 0; d < dim; d++) to[(int64_t)d * size] = to_half(k[d]);
        for (int d = 0; d < dim; d++) v_to[d] = to_half(v[d]);
    } else if (cache->type == E4M3) {
        uint8_t *to = (uint8_t *)k_block + k_first, *v_to = (uint8_t *)v_block + v_first;
        const float k_scale = cache->k_scale[head], v_scale = cache->v_scale[head];
        for (int d = 0; d < dim; d++) to[(int64_t)d * size] = to_e4m3(k[d] / k_scale);
        for (int d = 0; d < dim; d++) v_to[d] = to_e4m3(v[d] / v_scale);
    } else if (cache->type == E5M2) {
        uint8_t *to = (uint8_t *)k_block + k_first, *v_to = (uint8_t *)v_block + v_first;
        const float k_scale = cache->k_scale[head], v_scale = cache->v_scale[head];
        for (int d = 0; d < dim; d++) to[(int64_t)d * size] = to_e5m2(k[d] / k_scale);
        for (int d = 0; d < dim; d++) v_to[d] = to_e5m2(v[d] / v_scale);
    } else {
        int8_t *to = (int8_t *)k_block + k_first, *v_to = (int8_t *)v_block + v_first;
        float *k_scale = (float *)((char *)cache->k_scale + block * cache->k_scale_stride) + (int64_t)head * size + offset;
        float *v_scale = (float *)((char *)cache->v_scale + block * cache->v_scale_stride) + (int64_t)head * size + offset;
        float inverse;
        *k_scale = scale_of(k, dim, &inverse);
        for (int d = 0; d < dim; d++) to[(int64_t)d * size] = to_int8(k[d] * inverse);
        *v_scale = scale_of(v, dim, &inverse);
        for (int d = 0; d < dim; d++) v_to[d] = to_int8(v[d] * inverse);
    }
}

static void store_token(const StoreArguments *a, int64_t token) {
    const Cache *cache = &a->cache;
    const int dim = cache->head_dim;
    const float *cos = a->cos ? a->cos + token * a->cos_stride : NULL, *sin = a->cos ? a->sin + token * a->sin_stride : NULL;
    if (cos)
        for (int head = 0; head < a->num_heads; head++)
            turn(a->q + token * a->q_stride + (int64_t)head * dim, cos, sin, a->rotary_pairs, a->pairs);
    if (!a->stores) return;
    int64_t slot = a->plan->slot_mapping[token];
    if (slot < 0) return;
    int64_t block = slot / cache->block_size;
    int offset = (int)(slot % cache->block_size);
    for (int head = 0; head < cache->num_kv_heads; head++) {
        ALIGNED float key[MAX_DIM];
        memcpy(key, a->k + token * a->k_stride + (int64_t)head * dim, dim * sizeof(float));
        if (cos) turn(key, cos, sin, a->rotary_pairs, a->pairs);
        store_head(cache, key, a->v + token * a->v_stride + (int64_t)head * dim, block, offset, head);
    }
}

EXPORT void rope_store(const Step *step, Worker *worker, const void *arguments) {
    const StoreArguments *a = arguments;
    int64_t share = step->num_tokens / (4 * worker->num_threads);
    int64_t per_task = share < 1 ? 1 : share > TOKENS ? TOKENS : share;
    int64_t total = (step->num_tokens + per_task - 1) / per_task;
    for (int64_t task; (task = next_task(worker, total)) < total;) {
        int64_t first = task * per_task;
        for (int64_t token = first; token < first + per_task && token < step->num_tokens; token++) store_token(a, token);
    }
}

typedef struct {
    const float *x; /* [tokens][heads][width] */
    int64_t x_stride;
    float *out; /* [tokens][heads][width] */
    int64_t out_stride;
    const float *cos;
    int64_t cos_stride;
    const float *sin;
    int64_t sin_stride;
    int64_t heads, head_stride, width; /* head_stride: floats from head to head of x */
    int64_t rotary_pairs, pairs; /* see StoreArguments */
} Rotate;

EXPORT void rotate(const Step *step, Worker *worker, const void *arguments) {
    const Rotate *a = arguments;
    for (int64_t t; (t = next_task(worker, step->num_tokens)) < step->num_tokens;)
        for (int64_t head = 0; head < a->heads; head++) {
            float *to = a->out + t * a->out_stride + head * a->width;
            memcpy(to, a->x + t * a->x_stride + head * a->head_stride, a->width * sizeof(float));
            turn(to, a->cos + t * a->cos_stride, a->sin + t * a->sin_stride, (int)a->rotary_pairs, (int)a->pairs);
        }
}
