// N-gram cache: drafts what followed the longest, then latest, earlier occurrence of the last tokens.
#include "engine.hpp"

#include <algorithm>

static const uint16_t ngram_size_max = 16; // longer matches than this choose nothing new

struct skippy_ngram_cache {
    size_t minimum, maximum;
    std::vector<int32_t> tokens;
};

namespace {

struct Text { // the committed tokens and the prefix that continues them
    const std::vector<int32_t> &committed;
    const int32_t *prefix;
    size_t size;

    int32_t operator[](size_t i) const { return i < committed.size() ? committed[i] : prefix[i - committed.size()]; }
};

// How many tokens before `end` equal the last ones of the text.
size_t match_length(const Text &text, size_t end, size_t maximum) {
    size_t length = 0;
    while (length < maximum && length < end && text[end - 1 - length] == text[text.size - 1 - length]) length++;
    return length;
}

// Where the best match ends; 0: there is none.
size_t find_continuation(const Text &text, size_t minimum, size_t maximum) {
    size_t best = 0, start = 0;
    for (size_t end = text.size - 1; end >= minimum && best < maximum; end--) {
        size_t length = match_length(text, end, maximum);
        if (length < minimum || length <= best) continue;
        best = length;
        start = end;
    }
    return start;
}

void append(skippy_ngram_cache *cache, const int32_t *token_ids, size_t token_count) {
    if (!cache || (token_count && !token_ids)) refuse("ngram_cache: cache or token_ids is NULL");
    if (token_count) cache->tokens.insert(cache->tokens.end(), token_ids, token_ids + token_count);
}

} // namespace

skippy_status skippy_ngram_cache_create(uint16_t ngram_min, uint16_t ngram_max, skippy_ngram_cache **out_cache, skippy_error **out_error) {
    if (out_cache) *out_cache = nullptr;
    return guarded(out_error, [&] {
        if (!out_cache) refuse("ngram_cache_create: out_cache is NULL");
        if (ngram_min < 1 || ngram_min > ngram_max || ngram_max > ngram_size_max)
            refuse("ngram_cache_create: sizes %u to %u must be 1 <= min <= max <= %u", ngram_min, ngram_max, ngram_size_max);
        *out_cache = new skippy_ngram_cache{ngram_min, ngram_max, {}};
    });
}

void skippy_ngram_cache_free(skippy_ngram_cache *cache) { delete cache; }

skippy_status skippy_ngram_cache_append(skippy_ngram_cache *cache, const int32_t *token_ids, size_t token_count, skippy_error **out_error) {
    return guarded(out_error, [&] { append(cache, token_ids, token_count); });
}

skippy_status skippy_ngram_cache_reset(skippy_ngram_cache *cache, const int32_t *token_ids, size_t token_count, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (cache && (token_ids || !token_count)) cache->tokens.clear();
        append(cache, token_ids, token_count);
    });
}

skippy_status skippy_ngram_cache_draft(skippy_ngram_cache *cache, const int32_t *continuation_prefix, size_t prefix_count,
                                       uint16_t max_draft, int32_t *output, size_t capacity, size_t *out_count, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!cache || !out_count || (prefix_count && !continuation_prefix) || (capacity && !output))
            refuse("ngram_cache_draft: cache and out_count must be given, and arrays when their counts are not 0");
        *out_count = 0;
        Text text{cache->tokens, continuation_prefix, cache->tokens.size() + prefix_count};
        size_t limit = std::min<size_t>(max_draft, capacity);
        if (text.size <= cache->minimum || !limit) return;
        size_t start = find_continuation(text, cache->minimum, cache->maximum);
        for (size_t i = start; start && i < text.size && *out_count < limit; i++) output[(*out_count)++] = text[i];
    });
}
