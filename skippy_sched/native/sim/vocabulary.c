/* The tokens' byte strings, a byte trie for the greedy longest match, and the tokenizer calls. */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- trie: edges in one open-addressing table, so that large vocabularies stay small ---- */

static size_t edge_slot(const struct sim_vocabulary *v, uint32_t node, uint8_t byte) {
    size_t mask = v->edge_slots - 1;
    size_t slot = (size_t)sim_mix((uint64_t)node << 8 | byte) & mask;
    while (v->edges[slot].child && (v->edges[slot].node != node || v->edges[slot].byte != byte))
        slot = (slot + 1) & mask;
    return slot;
}

static void trie_add(struct sim_vocabulary *v, int32_t token) {
    const struct sim_bytes *piece = &v->pieces[token];
    uint32_t node = 0;
    for (size_t i = 0; i < piece->length; i++) {
        size_t slot = edge_slot(v, node, piece->data[i]);
        if (!v->edges[slot].child) {
            v->node_token[v->node_count] = -1;
            v->edges[slot] = (struct sim_edge){node, piece->data[i], (uint32_t)v->node_count++};
        }
        node = v->edges[slot].child;
    }
    if (v->node_token[node] < 0) v->node_token[node] = token; /* of equal strings the lowest id */
}

static bool trie_build(struct sim_vocabulary *v) {
    size_t bytes = 1;
    for (int32_t i = 0; i < v->size; i++) bytes += v->pieces[i].length;
    v->edge_slots = 1024;
    while (v->edge_slots < 2 * bytes) v->edge_slots *= 2;
    v->edges = calloc(v->edge_slots, sizeof *v->edges);
    v->node_token = malloc((bytes + 1) * sizeof *v->node_token);
    if (!v->edges || !v->node_token) return false;
    v->node_token[0] = -1;
    v->node_count = 1;
    for (int32_t i = 0; i < v->size; i++) trie_add(v, i);
    return true;
}

/* ---- pieces ---- */

static bool piece_set(struct sim_vocabulary *v, int32_t token, const void *data, size_t length) {
    struct sim_bytes *piece = &v->pieces[token];
    piece->data = malloc(length);
    if (!piece->data) return false;
    memcpy(piece->data, data, length);
    piece->length = length;
    return true;
}

/* " sol", " nar", ...: a space, a syllable, a final, then more syllables; unique per index. */
static size_t pseudo_word(uint32_t index, char *word) {
    static const char starts[] = "sbdfgklmnprtvz", vowels[] = "oaeiu", finals[] = "lnrstmkd";
    size_t length = 0;
    word[length++] = ' ';
    word[length++] = starts[index % 14];
    word[length++] = vowels[index / 14 % 5];
    word[length++] = finals[index / 70 % 8];
    for (uint32_t rest = index / 560; rest; rest /= 70) {
        word[length++] = starts[rest % 14];
        word[length++] = vowels[rest / 14 % 5];
    }
    return length;
}

static bool is_plain(const struct sim_bytes *piece) {
    for (size_t i = 0; i < piece->length; i++)
        if (piece->data[i] < 0x20 || piece->data[i] > 0x7e) return false;
    return true;
}

/* What free generation draws from: no specials, no NUL; with words_only printable words alone. */
static void candidates_build(struct sim_vocabulary *v, bool words_only) {
    for (int32_t i = words_only ? SIM_FIRST_WORD : 1; i < v->size; i++)
        if ((i < SIM_TOKEN_BOS || i >= SIM_FIRST_WORD) && (!words_only || is_plain(&v->pieces[i])))
            v->candidates[v->candidate_count++] = i;
    if (v->candidate_count) return;
    for (int32_t i = 'a'; i <= 'z'; i++) v->candidates[v->candidate_count++] = i; /* no words: letters */
}

bool sim_vocabulary_build(struct sim_vocabulary *v, const struct sim_spec *spec) {
    static const char *const specials[] = {"<|bos|>", "<|eos|>", "<|script|>", "<|end|>"};
    v->size = (int32_t)spec->vocab;
    v->pieces = calloc((size_t)v->size, sizeof *v->pieces);
    v->candidates = malloc((size_t)v->size * sizeof *v->candidates);
    bool built = v->pieces && v->candidates;
    for (int32_t i = 0; built && i < v->size; i++) {
        char word[32];
        if (i < SIM_TOKEN_BOS) {
            word[0] = (char)i;
            built = piece_set(v, i, word, 1);
        } else if (i < SIM_FIRST_WORD) {
            const char *text = specials[i - SIM_TOKEN_BOS];
            built = piece_set(v, i, text, strlen(text));
        } else if ((size_t)(i - SIM_FIRST_WORD) < spec->token_count) {
            const struct sim_bytes *token = &spec->tokens[i - SIM_FIRST_WORD];
            built = piece_set(v, i, token->data, token->length);
        } else {
            uint32_t index = (uint32_t)((size_t)(i - SIM_FIRST_WORD) - spec->token_count);
            built = piece_set(v, i, word, pseudo_word(index, word));
        }
    }
    if (built) candidates_build(v, spec->words_only);
    built = built && trie_build(v);
    if (!built) sim_vocabulary_free(v);
    return built;
}

void sim_vocabulary_free(struct sim_vocabulary *v) {
    if (v->pieces)
        for (int32_t i = 0; i < v->size; i++) free(v->pieces[i].data);
    free(v->pieces);
    free(v->candidates);
    free(v->edges);
    free(v->node_token);
    *v = (struct sim_vocabulary){0};
}

/* ---- the calls ---- */

static int32_t longest_match(const struct sim_vocabulary *v, const uint8_t *text, size_t *length) {
    uint32_t node = 0;
    int32_t token = -1;
    for (size_t i = 0; text[i]; i++) {
        node = v->edges[edge_slot(v, node, text[i])].child;
        if (!node) break;
        if (v->node_token[node] < 0) continue;
        token = v->node_token[node];
        *length = i + 1;
    }
    return token; /* every single byte is a token, so there is one */
}

static sim_status too_small(const char *call, size_t needed, const char *unit, size_t capacity,
                            sim_error out) {
    return sim_fail(out, SKIPPY_STATUS_BUFFER_TOO_SMALL, "%s: the result has %zu %s, the buffer holds %zu",
                    call, needed, unit, capacity);
}

/* The buffer effects of a fault: asks for more than there is, or for no more than was given. */
static bool grow_asked(const struct sim_hit *hit, size_t needed, size_t capacity, size_t *count) {
    if (hit->effect == SIM_EFFECT_GROW_BUFFER)
        *count = (needed > capacity ? needed : capacity) + 16;
    else if (hit->effect == SIM_EFFECT_GROW_BUFFER_WITHOUT_GROWTH)
        *count = capacity;
    else
        return false;
    return true;
}

sim_status skippy_tokenize(struct skippy_model *model, const char *text, bool add_special,
                           int32_t *output, size_t capacity, size_t *out_count, sim_error out) {
    if (out_count) *out_count = 0;
    if (!sim_model_live(model) || !text || !out_count || (capacity && !output))
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                        "tokenize: model, text and out_count must be given, and output when capacity > 0");
    struct sim_hit hit = sim_fault_take_rows(model, SIM_CALL_TOKENIZE, NULL, 0);
    if (hit.effect != SIM_EFFECT_NONE && hit.status) return sim_hit_fail(&hit, "tokenize", out);
    size_t count = 0;
    if (add_special && model->spec.add_bos) {
        if (count < capacity) output[count] = SIM_TOKEN_BOS;
        count++;
    }
    for (const uint8_t *rest = (const uint8_t *)text; *rest;) {
        size_t length = 1;
        int32_t token = longest_match(&model->vocabulary, rest, &length);
        if (count < capacity) output[count] = token;
        count++;
        rest += length;
    }
    *out_count = count;
    if (grow_asked(&hit, count, capacity, out_count) || count > capacity)
        return too_small("tokenize", *out_count, "tokens", capacity, out);
    return sim_ok(out);
}

sim_status skippy_detokenize(struct skippy_model *model, const int32_t *tokens, size_t count,
                             char *output, size_t capacity, size_t *out_bytes, sim_error out) {
    if (out_bytes) *out_bytes = 0;
    if (!sim_model_live(model) || (count && !tokens) || !out_bytes || (capacity && !output))
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                        "detokenize: model, tokens and out_bytes must be given, and output when capacity > 0");
    struct sim_hit hit = sim_fault_take_rows(model, SIM_CALL_DETOKENIZE, NULL, 0);
    if (hit.effect != SIM_EFFECT_NONE && hit.status) return sim_hit_fail(&hit, "detokenize", out);
    size_t bytes = 0;
    for (size_t i = 0; i < count; i++) {
        if (tokens[i] < 0 || tokens[i] >= model->vocabulary.size)
            return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                            "detokenize: token %zu is %d, outside the vocabulary of %d", i, tokens[i],
                            model->vocabulary.size);
        const struct sim_bytes *piece = &model->vocabulary.pieces[tokens[i]];
        if (bytes + piece->length <= capacity) memcpy(output + bytes, piece->data, piece->length);
        bytes += piece->length;
    }
    *out_bytes = bytes;
    if (grow_asked(&hit, bytes, capacity, out_bytes) || bytes > capacity)
        return too_small("detokenize", *out_bytes, "bytes", capacity, out);
    return sim_ok(out);
}

sim_status skippy_token_is_eog(struct skippy_model *model, int32_t token, bool *out_is_eog, sim_error out) {
    if (!sim_model_live(model) || !out_is_eog)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "token_is_eog: model or out_is_eog is NULL");
    if (token < 0 || token >= model->vocabulary.size)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                        "token_is_eog: token %d is outside the vocabulary of %d", token, model->vocabulary.size);
    *out_is_eog = token == SIM_TOKEN_EOS;
    return sim_ok(out);
}
