/* N-gram cache: the continuation that followed the latest earlier occurrence of the last tokens. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

static const uint16_t NGRAM_MAX = 16; /* longer matches than this choose nothing new */

struct skippy_ngram_cache {
    uint16_t minimum, maximum;
    int32_t *tokens;
    size_t count, capacity;
};

#define REFUSE(...) return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, __VA_ARGS__)

sim_status skippy_ngram_cache_create(uint16_t ngram_min, uint16_t ngram_max, struct skippy_ngram_cache **out_cache,
                                     sim_error out) {
    if (out_cache) *out_cache = NULL;
    if (!out_cache) REFUSE("ngram_cache_create: out_cache is NULL");
    if (ngram_min < 1 || ngram_min > ngram_max || ngram_max > NGRAM_MAX)
        REFUSE("ngram_cache_create: sizes %u to %u must be 1 <= min <= max <= %u", ngram_min, ngram_max, NGRAM_MAX);
    struct skippy_ngram_cache *cache = calloc(1, sizeof *cache);
    if (!cache) return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "memory for an n-gram cache ran out");
    cache->minimum = ngram_min;
    cache->maximum = ngram_max;
    *out_cache = cache;
    return sim_ok(out);
}

void skippy_ngram_cache_free(struct skippy_ngram_cache *cache) {
    if (!cache) return;
    free(cache->tokens);
    free(cache);
}

sim_status skippy_ngram_cache_append(struct skippy_ngram_cache *cache, const int32_t *token_ids, size_t token_count,
                                     sim_error out) {
    if (!cache || (token_count && !token_ids)) REFUSE("ngram_cache: cache or token_ids is NULL");
    size_t needed = cache->count + token_count;
    if (needed > cache->capacity) {
        size_t capacity = needed + needed / 2 + 64;
        int32_t *grown = realloc(cache->tokens, capacity * sizeof *grown);
        if (!grown) return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "memory for %zu tokens ran out", needed);
        cache->tokens = grown;
        cache->capacity = capacity;
    }
    if (token_count) memcpy(cache->tokens + cache->count, token_ids, token_count * sizeof *token_ids);
    cache->count = needed;
    return sim_ok(out);
}

sim_status skippy_ngram_cache_reset(struct skippy_ngram_cache *cache, const int32_t *token_ids, size_t token_count,
                                    sim_error out) {
    if (!cache || (token_count && !token_ids)) REFUSE("ngram_cache: cache or token_ids is NULL");
    cache->count = 0;
    return skippy_ngram_cache_append(cache, token_ids, token_count, out);
}

/* Token i of the committed ones followed by the prefix. */
static int32_t at(const struct skippy_ngram_cache *cache, const int32_t *prefix, size_t i) {
    return i < cache->count ? cache->tokens[i] : prefix[i - cache->count];
}

/* One pass from the end: the longest match wins, of equal ones the latest; 0: none. */
static size_t find_continuation(const struct skippy_ngram_cache *cache, const int32_t *prefix, size_t total) {
    size_t best = 0, start = 0;
    for (size_t end = total - 1; end >= cache->minimum && best < cache->maximum; end--) {
        size_t length = 0;
        while (length < cache->maximum && length < end &&
               at(cache, prefix, end - 1 - length) == at(cache, prefix, total - 1 - length))
            length++;
        if (length < cache->minimum || length <= best) continue;
        best = length;
        start = end;
    }
    return start;
}

sim_status skippy_ngram_cache_draft(struct skippy_ngram_cache *cache, const int32_t *continuation_prefix,
                                    size_t prefix_count, uint16_t max_draft, int32_t *output, size_t capacity,
                                    size_t *out_count, sim_error out) {
    if (out_count) *out_count = 0;
    if (!cache || !out_count || (prefix_count && !continuation_prefix) || (capacity && !output))
        REFUSE("ngram_cache_draft: cache and out_count must be given, and arrays when their counts are not 0");
    size_t total = cache->count + prefix_count, limit = max_draft < capacity ? max_draft : capacity;
    if (total <= cache->minimum || !limit) return sim_ok(out);
    size_t start = find_continuation(cache, continuation_prefix, total);
    for (size_t i = start; start && i < total && *out_count < limit; i++)
        output[(*out_count)++] = at(cache, continuation_prefix, i);
    return sim_ok(out);
}
