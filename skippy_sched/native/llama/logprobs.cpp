// What the model thought of the tokens at a row: log-probabilities of its plain logits.
#include "engine.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

// Over the row as the model computed it: neither biases nor samplers nor a grammar have a part in it.
static double log_total(const float *logits, int32_t n_vocab) {
    float highest = -INFINITY;
    for (int32_t token = 0; token < n_vocab; token++) highest = std::max(highest, logits[token]);
    double total = 0.0;
    for (int32_t token = 0; token < n_vocab; token++) total += std::exp(static_cast<double>(logits[token]) - highest);
    return highest + std::log(total);
}

skippy_status skippyx_session_logprobs(skippy_session *session, int32_t token, skippyx_logprob *out_token,
                                       skippyx_logprob *out_top, size_t top_count, skippy_error **out_error) {
    return guarded(out_error, [&] {
        skippy_session &target = live_session(session, "session_logprobs");
        int32_t n_vocab = target.model->n_vocab;
        if (!out_token || (top_count && !out_top)) refuse("session_logprobs: out_token or out_top is NULL");
        if (token < 0 || token >= n_vocab)
            refuse("session_logprobs: token %d is outside the vocabulary of %d", token, n_vocab);
        if (top_count > static_cast<size_t>(n_vocab))
            refuse("session_logprobs: top_count is %zu, the vocabulary has %d tokens", top_count, n_vocab);
        const float *logits = logits_of(target);
        if (!logits) refuse("session_logprobs: the last row of lane %d put out no logits", target.lane);
        double total = log_total(logits, n_vocab);
        auto at = [&](int32_t id) { return skippyx_logprob{id, static_cast<float>(logits[id] - total)}; };
        *out_token = at(token);
        std::vector<int32_t> order(top_count ? static_cast<size_t>(n_vocab) : 0);
        std::iota(order.begin(), order.end(), 0);
        auto higher = [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
        std::partial_sort(order.begin(), order.begin() + static_cast<ptrdiff_t>(top_count), order.end(), higher);
        for (size_t i = 0; i < top_count; i++) out_top[i] = at(order[i]);
    });
}

skippy_status skippyx_token_is_control(skippy_model *model, int32_t token, bool *out_is_control, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!model || !out_is_control) refuse("token_is_control: model or out_is_control is NULL");
        if (token < 0 || token >= model->n_vocab)
            refuse("token_is_control: token %d is outside the vocabulary of %d", token, model->n_vocab);
        *out_is_control = llama_vocab_is_control(model->vocab, token);
    });
}
