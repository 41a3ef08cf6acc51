/*
 * Log-probabilities that agree with what the engine chooses: the greedy choice has half of all, the
 * candidates after it half of what is left each, and the tokens that are no candidates come last.
 */
#include "sim.h"

#include <math.h>
#include <stdlib.h>

static const float LOG_HALF = -0.69314718f;

/* Every token of the vocabulary once, the likeliest first. */
static void rank_tokens(const struct skippy_model *model, const struct sim_logits *logits, int32_t *order) {
    const struct sim_vocabulary *v = &model->vocabulary;
    int32_t first = sim_choose(model, logits, NULL), count = 0;
    bool *placed = calloc((size_t)v->size, sizeof *placed);
    if (first >= 0) order[count++] = first;
    if (placed && first >= 0) placed[first] = true;
    size_t next = (size_t)sim_below(sim_mix(logits->hash + 1), v->candidate_count);
    for (size_t i = 0; placed && i < v->candidate_count; i++) {
        int32_t token = v->candidates[next];
        if (++next == v->candidate_count) next = 0;
        if (placed[token]) continue;
        placed[token] = true;
        order[count++] = token;
    }
    for (int32_t token = 0; placed && token < v->size; token++)
        if (!placed[token]) order[count++] = token;
    for (; count < v->size; count++) order[count] = 0; /* memory ran out */
    free(placed);
}

static struct skippyx_logprob ranked(const int32_t *order, int32_t rank) {
    return (struct skippyx_logprob){order[rank], LOG_HALF * (float)(rank + 1)};
}

sim_status skippyx_session_logprobs(struct skippy_session *session, int32_t token, struct skippyx_logprob *out_token,
                                    struct skippyx_logprob *out_top, size_t top_count, sim_error out) {
    if (!out_token || (top_count && !out_top))
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "session_logprobs: out_token or out_top is NULL");
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    int32_t size = session->model->vocabulary.size;
    int32_t *order = malloc((size_t)size * sizeof *order);
    if (!order)
        status = sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "memory for log-probabilities ran out");
    else if (token < 0 || token >= size)
        status = sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                          "session_logprobs: token %d is outside the vocabulary of %d", token, size);
    else if (top_count > (size_t)size)
        status = sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                          "session_logprobs: top_count is %zu, the vocabulary has %d tokens", top_count, size);
    else if (session->n_past <= 0 || !session->points[session->n_past].has_logits)
        status = sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                          "session_logprobs: the last row of lane %d put out no logits", session->lane);
    if (status == SKIPPY_STATUS_OK) {
        struct sim_logits logits = sim_logits_at(session, session->n_past);
        rank_tokens(session->model, &logits, order);
        for (int32_t rank = 0; rank < size; rank++)
            if (order[rank] == token) *out_token = ranked(order, rank);
        for (size_t i = 0; i < top_count; i++) out_top[i] = ranked(order, (int32_t)i);
    }
    free(order);
    sim_leave(session->model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}

sim_status skippyx_token_is_control(struct skippy_model *model, int32_t token, bool *out_is_control, sim_error out) {
    if (!sim_model_live(model) || !out_is_control)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "token_is_control: model or out_is_control is NULL");
    if (token < 0 || token >= model->vocabulary.size)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                        "token_is_control: token %d is outside the vocabulary of %d", token, model->vocabulary.size);
    *out_is_control = token >= SIM_TOKEN_BOS && token <= SIM_TOKEN_END;
    return sim_ok(out);
}
