// The batched calls: one llama_decode over the rows of several sessions.
#include "engine.hpp"

namespace {

struct SampleOutputs {
    size_t *indexes; // NULL: not wanted
    int32_t *tokens;
    size_t capacity;
    size_t *count;
};

size_t samples_wanted(const skippy_model &model, const skippy_iteration_request *requests, size_t count) {
    size_t wanted = 0;
    for (size_t i = 0; i < count; i++) wanted += model.stage.terminal && requests[i].sample_last;
    return wanted;
}

Request request_of(const skippy_iteration_request &given) {
    Request request;
    request.session = given.session;
    request.tokens = given.token_ids;
    request.count = given.token_count;
    request.positions = given.positions;
    request.position_count = given.position_count;
    request.sampling = given.sampling;
    request.input_desc = given.input_desc;
    request.input_payload = given.input_payload;
    request.logits = given.sample_last ? Logits::last : Logits::none;
    return request;
}

// All sessions have advanced when the first token is drawn; a failure here leaves them so.
void draw_samples(skippy_model &model, const std::vector<Request> &requests, const std::vector<Row> &rows, const SampleOutputs &out) {
    size_t count = 0;
    for (size_t index = 0; index < requests.size(); index++) {
        if (!model.stage.terminal || requests[index].logits == Logits::none) continue;
        skippy_session &session = *requests[index].session;
        int32_t row = rows[index].batch_row + static_cast<int32_t>(rows[index].count) - 1;
        float *logits = llama_get_logits_ith(model.context.get(), row);
        out.tokens[count] = sample(session, requests[index].sampling, logits, session.history.size(), session.n_past);
        if (out.indexes) out.indexes[count] = index;
        count++;
    }
    *out.count = count;
}

void run_batch(std::vector<Request> &requests, const SampleOutputs &out, size_t wanted) {
    skippy_session *first = requests.front().session;
    if (!first || !first->live) refuse("request 0: session is NULL or freed");
    skippy_model &model = *first->model;
    check_requests(model, requests, true);
    bool no_room = wanted > out.capacity || (wanted && !out.tokens);
    if (no_room) fail(SKIPPY_STATUS_BUFFER_TOO_SMALL, "%zu requests are sampled, the outputs hold %zu", wanted, out.tokens ? out.capacity : 0);
    *out.count = wanted;
    std::vector<Row> rows = run_requests(model, requests);
    draw_samples(model, requests, rows, out);
}

} // namespace

skippy_status skippy_iteration_batch_sampled(const skippy_iteration_request *requests, size_t request_count,
                                             skippy_activation_desc *out_descs, void *const *output_payloads,
                                             const size_t *output_capacities, size_t *out_bytes,
                                             size_t *out_sampled_request_indexes, int32_t *out_predicted,
                                             size_t sampled_capacity, size_t *out_sampled_count, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!requests || !request_count || !out_sampled_count)
            refuse("iteration_batch: requests or out_sampled_count is NULL, or the batch is empty");
        std::vector<Request> batch;
        batch.reserve(request_count);
        for (size_t i = 0; i < request_count; i++) {
            Request request = request_of(requests[i]);
            request.out_desc = out_descs ? &out_descs[i] : nullptr;
            request.out_payload = output_payloads ? output_payloads[i] : nullptr;
            request.out_capacity = output_capacities ? output_capacities[i] : 0;
            request.out_bytes = out_bytes ? &out_bytes[i] : nullptr;
            batch.push_back(request);
        }
        skippy_session *first = requests[0].session;
        size_t wanted = first && first->live ? samples_wanted(*first->model, requests, request_count) : 0;
        bool outputs_given = out_sampled_request_indexes && out_predicted;
        run_batch(batch, {out_sampled_request_indexes, outputs_given ? out_predicted : nullptr, sampled_capacity, out_sampled_count}, wanted);
    });
}

skippy_status skippy_decode_step_frame_batch_sampled(
    skippy_session *const *sessions, const int32_t *token_ids, const skippy_sampling_config *const *sampling,
    const skippy_activation_desc *const *input_descs, const void *const *input_payloads, skippy_activation_desc *out_descs,
    void *const *output_payloads, const size_t *output_capacities, size_t *out_bytes, int32_t *out_predicted,
    size_t predicted_capacity, size_t request_count, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!sessions || !token_ids || !out_predicted || !request_count)
            refuse("decode_batch: sessions, token_ids or out_predicted is NULL, or the batch is empty");
        if (predicted_capacity < request_count)
            fail(SKIPPY_STATUS_BUFFER_TOO_SMALL, "decode_batch: %zu requests, out_predicted holds %zu", request_count, predicted_capacity);
        std::vector<Request> batch(request_count);
        for (size_t i = 0; i < request_count; i++) {
            Request &request = batch[i];
            request.session = sessions[i];
            request.tokens = &token_ids[i];
            request.count = 1;
            request.sampling = sampling ? sampling[i] : nullptr;
            request.input_desc = input_descs ? input_descs[i] : nullptr;
            request.input_payload = input_payloads ? input_payloads[i] : nullptr;
            request.logits = Logits::last;
            request.out_desc = out_descs ? &out_descs[i] : nullptr;
            request.out_payload = output_payloads ? output_payloads[i] : nullptr;
            request.out_capacity = output_capacities ? output_capacities[i] : 0;
            request.out_bytes = out_bytes ? &out_bytes[i] : nullptr;
        }
        bool terminal = sessions[0] && sessions[0]->live && sessions[0]->model->stage.terminal;
        size_t count = 0;
        run_batch(batch, {nullptr, out_predicted, predicted_capacity, &count}, terminal ? request_count : 0);
        if (!terminal) std::fill(out_predicted, out_predicted + request_count, -1); // such a stage predicts nothing
    });
}
