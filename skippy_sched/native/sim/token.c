/*
 * The "model": the next token as a pure function of token history, sampling seed and spec seed.
 * A history is a rolling hash plus where its output script stands, if it holds one.
 */
#include "sim.h"

#include <math.h>

static int32_t scripted_at(const int32_t *tokens, const struct sim_point *point, int32_t position) {
    if (point->last_end < 0 || point->script_start < 0 || point->script_end < 0) return -1;
    int32_t length = point->script_end - point->script_start - 1;
    int32_t index = position - 1 - point->last_end;
    return index < length ? tokens[point->script_start + 1 + index] : SIM_TOKEN_EOS;
}

struct sim_logits sim_logits_at(const struct skippy_session *session, int32_t position) {
    const struct sim_point *point = &session->points[position];
    return (struct sim_logits){true, point->hash, position, scripted_at(session->tokens, point, position), NULL};
}

/* One step ahead of what is committed, for drafts: scripts are followed, new ones are not opened. */
struct sim_logits sim_logits_after(const struct skippy_session *session, struct sim_logits from,
                                   int32_t token) {
    const struct sim_point *point = &session->points[session->n_past];
    struct sim_logits next = {true, sim_roll(from.hash, token), from.position + 1, -1, NULL};
    if (from.scripted >= 0) next.scripted = scripted_at(session->tokens, point, next.position);
    return next;
}

bool sim_sampling_enabled(const struct skippy_sampling_config *sampling) {
    return sampling && sampling->version != 0 && (sampling->flags & SKIPPY_SAMPLING_FLAG_ENABLED);
}

/* A bias of 50 and more is a command, of -50 and less a ban; what lies between has no effect. */
static const float BIAS_DECIDES = 50.0f;
static const int64_t MASKED_EOS_PER_MILLE = 300;

static bool masked(const struct sim_logits *logits, int32_t token) {
    return logits->mask && !(logits->mask[token / 32] >> (token % 32) & 1);
}

static int32_t commanded(const struct skippy_sampling_config *sampling, const struct sim_logits *logits,
                         int32_t vocabulary) {
    int32_t token = -1;
    float best = 0;
    for (uint32_t i = 0; i < sampling->logit_bias_count && i < SKIPPY_MAX_LOGIT_BIAS; i++) {
        const struct skippy_logit_bias *bias = &sampling->logit_bias[i];
        if (bias->bias < BIAS_DECIDES || bias->token < 0 || bias->token >= vocabulary) continue;
        if (masked(logits, bias->token)) continue;
        if (token < 0 || bias->bias > best || (bias->bias == best && bias->token < token)) {
            token = bias->token;
            best = bias->bias;
        }
    }
    return token;
}

static bool banned(const struct skippy_sampling_config *sampling, const struct sim_logits *logits, int32_t token) {
    if (masked(logits, token)) return true;
    if (!sim_sampling_enabled(sampling)) return false;
    if (token == SIM_TOKEN_EOS &&
        (sampling->ignore_eos || (sampling->flags & SKIPPY_SAMPLING_FLAG_IGNORE_EOS)))
        return true;
    for (uint32_t i = 0; i < sampling->logit_bias_count && i < SKIPPY_MAX_LOGIT_BIAS; i++)
        if (sampling->logit_bias[i].token == token && sampling->logit_bias[i].bias <= -BIAS_DECIDES)
            return true;
    return false;
}

/* Any of what is left alike; what is no candidate, such as the end, only if nothing else is. */
static int32_t choose_masked(const struct sim_vocabulary *v, const struct sim_logits *logits,
                             const struct skippy_sampling_config *sampling, uint64_t hash) {
    size_t left = 0;
    for (size_t i = 0; i < v->candidate_count; i++) left += !banned(sampling, logits, v->candidates[i]);
    size_t skip = left ? (size_t)sim_below(hash, left) : 0;
    for (size_t i = 0; left && i < v->candidate_count; i++)
        if (!banned(sampling, logits, v->candidates[i]) && !skip--) return v->candidates[i];
    for (int32_t token = 0; token < v->size; token++)
        if (!banned(sampling, logits, token)) return token;
    return -1;
}

int32_t sim_choose(const struct skippy_model *model, const struct sim_logits *logits,
                   const struct skippy_sampling_config *sampling) {
    uint64_t hash = logits->hash;
    if (sim_sampling_enabled(sampling)) {
        int32_t token = commanded(sampling, logits, model->vocabulary.size);
        if (token >= 0) return token;
        /* Position-counted: the same draw after a recompute, whatever the chunks were. */
        if (sampling->temperature > 0 && sampling->top_k != 1)
            hash = sim_mix(hash ^ sim_mix(((uint64_t)sampling->seed << 32) + (uint32_t)logits->position));
    }
    if (logits->scripted >= 0 && !banned(sampling, logits, logits->scripted)) return logits->scripted;
    /* Where a mask lets an answer end it often does: what fits a grammar is soon complete. */
    int64_t eos_per_mille = logits->mask ? MASKED_EOS_PER_MILLE : model->spec.eos_per_mille;
    if (logits->scripted < 0 && sim_below(hash, 1000) < (uint64_t)eos_per_mille &&
        !banned(sampling, logits, SIM_TOKEN_EOS))
        return SIM_TOKEN_EOS;
    const struct sim_vocabulary *v = &model->vocabulary;
    if (logits->mask) return choose_masked(v, logits, sampling, sim_mix(hash + 1));
    size_t next = (size_t)sim_below(sim_mix(hash + 1), v->candidate_count);
    for (size_t i = 0; i < v->candidate_count; i++) {
        int32_t token = v->candidates[next];
        if (!banned(sampling, logits, token)) return token;
        if (++next == v->candidate_count) next = 0;
    }
    return -1;
}

/* Plausible and deterministic: entropy in [0, 6) nats, the top two from the two greedy candidates. */
void sim_signal(const struct skippy_model *model, const struct sim_logits *logits,
                struct skippy_token_signal *out) {
    uint64_t draw = sim_mix(logits->hash + 2);
    float top = (float)((draw & 0xffff) + 1) / 65536.0f;
    float second = top * (float)((draw >> 16 & 0xffff) + 1) / 65537.0f;
    out->entropy = (float)(draw >> 32 & 0xffff) * 6.0f / 65536.0f;
    out->top_logprob = logf(top);
    out->second_logprob = logf(second);
    out->margin = out->top_logprob - out->second_logprob;
    out->top_token = sim_choose(model, logits, NULL);
    struct sim_logits other = {true, logits->hash + 1, logits->position, -1, NULL};
    out->second_token = sim_choose(model, &other, NULL);
}
