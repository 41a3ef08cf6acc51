// The tokenizer calls; they touch only the vocabulary, so they may run beside an execution.
#include "engine.hpp"

#include <climits>
#include <cstring>

skippy_status skippy_tokenize(skippy_model *model, const char *text, bool add_special, int32_t *output,
                              size_t capacity, size_t *out_count, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!model || !text || !out_count) refuse("tokenize: model, text or out_count is NULL");
        if (!output && capacity) refuse("tokenize: output is NULL, its capacity is %zu", capacity);
        size_t length = strlen(text);
        if (length > INT32_MAX / 2) refuse("tokenize: the text has %zu bytes, the most is %d", length, INT32_MAX / 2);
        int32_t room = static_cast<int32_t>(std::min<size_t>(capacity, INT32_MAX));
        int32_t count = llama_tokenize(model->vocab, text, static_cast<int32_t>(length), output, room, add_special, true);
        if (count == INT32_MIN) refuse("tokenize: the text has more tokens than can be counted");
        *out_count = static_cast<size_t>(count < 0 ? -count : count);
        if (count < 0)
            fail(SKIPPY_STATUS_BUFFER_TOO_SMALL, "tokenize: the text has %zu tokens, the buffer holds %zu", *out_count, capacity);
    });
}

skippy_status skippy_detokenize(skippy_model *model, const int32_t *tokens, size_t count, char *output,
                                size_t capacity, size_t *out_bytes, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!model || !out_bytes || (!tokens && count)) refuse("detokenize: model, tokens or out_bytes is NULL");
        if (!output && capacity) refuse("detokenize: output is NULL, its capacity is %zu", capacity);
        for (size_t i = 0; i < count; i++)
            if (tokens[i] < 0 || tokens[i] >= model->n_vocab)
                refuse("detokenize: token %zu is %d, outside the vocabulary of %d", i, tokens[i], model->n_vocab);
        std::string text, piece(64, '\0');
        for (size_t i = 0; i < count; i++) {
            int32_t length = llama_token_to_piece(model->vocab, tokens[i], &piece[0], static_cast<int32_t>(piece.size()), 0, true);
            if (length < 0) {
                piece.resize(static_cast<size_t>(-length));
                length = llama_token_to_piece(model->vocab, tokens[i], &piece[0], -length, 0, true);
            }
            if (length > 0) text.append(piece, 0, static_cast<size_t>(length));
        }
        *out_bytes = text.size();
        if (text.size() > capacity)
            fail(SKIPPY_STATUS_BUFFER_TOO_SMALL, "detokenize: the text has %zu bytes, the buffer holds %zu", text.size(), capacity);
        if (!text.empty()) memcpy(output, text.data(), text.size());
    });
}

skippy_status skippy_token_is_eog(skippy_model *model, int32_t token, bool *out_is_eog, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!model || !out_is_eog) refuse("token_is_eog: model or out_is_eog is NULL");
        if (token < 0 || token >= model->n_vocab)
            refuse("token_is_eog: token %d is outside the vocabulary of %d", token, model->n_vocab);
        *out_is_eog = llama_vocab_is_eog(model->vocab, token);
    });
}
