// The calls that run one session: prefill chunks, decode steps, verify windows, and what follows them.
#include "engine.hpp"

namespace {

void write_count(size_t *out, size_t value) {
    if (out) *out = value;
}

// Checks, runs and advances one request.
std::vector<Row> run_single(const char *call, Request request) {
    skippy_session &session = live_session(request.session, call);
    if (!request.count || request.count > UINT32_MAX) refuse("%s: %zu tokens", call, request.count);
    std::vector<Request> requests{request};
    check_requests(*session.model, requests, false);
    return run_requests(*session.model, requests);
}

// A prefill chunk or a decode step: the prediction follows the last row.
void run_and_sample(const char *call, const Request &request, int32_t *out_predicted) {
    if (out_predicted) *out_predicted = -1;
    std::vector<Row> rows = run_single(call, request);
    skippy_session &session = *request.session;
    if (!out_predicted || !session.model->stage.terminal || request.logits == Logits::none) return;
    *out_predicted = sample(session, request.sampling, logits_of(session), session.history.size(), session.n_past);
}

Request frame_request(skippy_session *session, const int32_t *tokens, size_t count, const skippy_activation_desc *input_desc,
                      const void *input_payload, skippy_activation_desc *out_desc, void *out_payload, size_t capacity, size_t *out_bytes) {
    Request request;
    request.session = session;
    request.tokens = tokens;
    request.count = count;
    request.input_desc = input_desc;
    request.input_payload = input_payload;
    request.out_desc = out_desc;
    request.out_payload = out_payload;
    request.out_capacity = capacity;
    request.out_bytes = out_bytes;
    return request;
}

Request plain_request(skippy_session *session, const int32_t *tokens, size_t count) {
    Request request;
    request.session = session;
    request.tokens = tokens;
    request.count = count;
    request.frameless = true;
    return request;
}

void clear_draft(skippy_native_mtp_draft *draft) {
    if (draft) *draft = {SKIPPY_NATIVE_MTP_VERSION, false, 0, {}, 0};
}

// Recurrent memory cannot be cut back after a mismatch, so its state before the window is kept.
void keep_checkpoint(skippy_session &session, size_t count) {
    skippy_model &model = *session.model;
    if (!model.has_recurrent_memory()) return;
    if (session.checkpoints.size() >= SKIPPY_MAX_VERIFY_CHECKPOINTS)
        fail(SKIPPY_STATUS_UNSUPPORTED, "verify: %d checkpoints are held already: retire or trim", SKIPPY_MAX_VERIFY_CHECKPOINTS);
    Checkpoint checkpoint{session.n_past, static_cast<int32_t>(count), {}};
    llama_context *context = model.context.get();
    checkpoint.state.resize(llama_state_seq_get_size_ext(context, session.lane, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
    size_t written = llama_state_seq_get_data_ext(context, checkpoint.state.data(), checkpoint.state.size(), session.lane,
                                                  LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
    if (written != checkpoint.state.size()) fail(SKIPPY_STATUS_RUNTIME_ERROR, "verify: the state of lane %d cannot be saved", session.lane);
    session.checkpoints.push_back(std::move(checkpoint));
}

// Row by row, each after its input: with a chain the first mismatch ends the window, greedy returns all.
size_t sample_window(skippy_session &session, const Request &request, const Row &row, int32_t *out_tokens) {
    bool stops_at_mismatch = needs_chain(session, request.sampling);
    size_t before = session.history.size() - request.count;
    for (size_t i = 0; i < request.count; i++) {
        float *logits = llama_get_logits_ith(session.model->context.get(), row.batch_row + static_cast<int32_t>(i));
        out_tokens[i] = sample(session, request.sampling, logits, before + i + 1, row.start + static_cast<int32_t>(i) + 1);
        if (stops_at_mismatch && i + 1 < request.count && out_tokens[i] != request.tokens[i + 1]) return i + 1;
    }
    return request.count;
}

void verify(Request request, int32_t *out_tokens, size_t capacity, size_t *out_count) {
    write_count(out_count, 0);
    skippy_session &session = live_session(request.session, "verify");
    skippy_model &model = *session.model;
    if (!request.count || request.count > UINT32_MAX) refuse("verify: %zu tokens", request.count);
    std::vector<Request> requests{request};
    check_requests(model, requests, false);
    if (model.stage.terminal) {
        if (!out_count) refuse("verify: out_token_count is NULL");
        *out_count = request.count;
        if (!out_tokens || capacity < request.count)
            fail(SKIPPY_STATUS_BUFFER_TOO_SMALL, "verify: %zu tokens, the output holds %zu", request.count, out_tokens ? capacity : 0);
    }
    keep_checkpoint(session, request.count);
    std::vector<Row> rows;
    write_count(out_count, 0);
    rows = run_requests(model, requests);
    if (model.stage.terminal) *out_count = sample_window(session, request, rows[0], out_tokens);
}

} // namespace

// ---- without frames ---------------------------------------------------------------------------------------

skippy_status skippy_prefill_chunk(skippy_session *session, const int32_t *token_ids, size_t token_count, const void *, size_t, void *,
                                   size_t, size_t *out_bytes, skippy_error **out_error) {
    return guarded(out_error, [&] {
        write_count(out_bytes, 0);
        run_and_sample("prefill_chunk", plain_request(session, token_ids, token_count), nullptr);
    });
}

skippy_status skippy_decode_step_sampled(skippy_session *session, int32_t token_id, const skippy_sampling_config *sampling, const void *,
                                         size_t, void *, size_t, size_t *out_bytes, int32_t *out_predicted, skippy_error **out_error) {
    return guarded(out_error, [&] {
        write_count(out_bytes, 0);
        Request request = plain_request(session, &token_id, 1);
        request.sampling = sampling;
        request.logits = Logits::last;
        run_and_sample("decode_step", request, out_predicted);
    });
}

skippy_status skippy_decode_step_sampled_mtp(skippy_session *session, int32_t token_id, const skippy_sampling_config *sampling,
                                             int32_t *out_predicted, size_t, skippy_native_mtp_draft *out_draft, skippy_error **out_error) {
    clear_draft(out_draft);
    return skippy_decode_step_sampled(session, token_id, sampling, nullptr, 0, nullptr, 0, nullptr, out_predicted, out_error);
}

skippy_status skippy_verify_tokens(skippy_session *session, const int32_t *token_ids, size_t token_count, int32_t *out_tokens,
                                   size_t capacity, size_t *out_count, skippy_error **out_error) {
    return guarded(out_error, [&] {
        Request request = plain_request(session, token_ids, token_count);
        request.logits = Logits::all;
        verify(request, out_tokens, capacity, out_count);
    });
}

// ---- with frames -------------------------------------------------------------------------------------------

skippy_status skippy_prefill_chunk_frame_sampled_with_positions(
    skippy_session *session, const int32_t *token_ids, size_t token_count, const int32_t *positions, size_t position_count,
    const skippy_sampling_config *sampling, const skippy_activation_desc *input_desc, const void *input_payload,
    skippy_activation_desc *out_desc, void *output_payload, size_t output_capacity, size_t *out_bytes, int32_t *out_predicted,
    skippy_error **out_error) {
    return guarded(out_error, [&] {
        Request request = frame_request(session, token_ids, token_count, input_desc, input_payload, out_desc, output_payload, output_capacity, out_bytes);
        request.positions = positions;
        request.position_count = position_count;
        request.sampling = sampling;
        request.logits = Logits::last;
        run_and_sample("prefill_chunk_frame_sampled", request, out_predicted);
    });
}

skippy_status skippy_prefill_chunk_frame_sampled(skippy_session *session, const int32_t *token_ids, size_t token_count,
                                                 const skippy_sampling_config *sampling, const skippy_activation_desc *input_desc,
                                                 const void *input_payload, skippy_activation_desc *out_desc, void *output_payload,
                                                 size_t output_capacity, size_t *out_bytes, int32_t *out_predicted,
                                                 skippy_error **out_error) {
    return skippy_prefill_chunk_frame_sampled_with_positions(session, token_ids, token_count, nullptr, 0, sampling, input_desc,
                                                             input_payload, out_desc, output_payload, output_capacity, out_bytes,
                                                             out_predicted, out_error);
}

skippy_status skippy_prefill_chunk_frame_with_positions(skippy_session *session, const int32_t *token_ids, size_t token_count,
                                                        const int32_t *positions, size_t position_count,
                                                        const skippy_activation_desc *input_desc, const void *input_payload,
                                                        skippy_activation_desc *out_desc, void *output_payload, size_t output_capacity,
                                                        size_t *out_bytes, skippy_error **out_error) {
    return guarded(out_error, [&] {
        Request request = frame_request(session, token_ids, token_count, input_desc, input_payload, out_desc, output_payload, output_capacity, out_bytes);
        request.positions = positions;
        request.position_count = position_count;
        run_and_sample("prefill_chunk_frame", request, nullptr);
    });
}

skippy_status skippy_prefill_chunk_frame(skippy_session *session, const int32_t *token_ids, size_t token_count,
                                         const skippy_activation_desc *input_desc, const void *input_payload,
                                         skippy_activation_desc *out_desc, void *output_payload, size_t output_capacity,
                                         size_t *out_bytes, skippy_error **out_error) {
    return skippy_prefill_chunk_frame_with_positions(session, token_ids, token_count, nullptr, 0, input_desc, input_payload, out_desc,
                                                     output_payload, output_capacity, out_bytes, out_error);
}

skippy_status skippy_decode_step_frame_sampled(skippy_session *session, int32_t token_id, const skippy_sampling_config *sampling,
                                               const skippy_activation_desc *input_desc, const void *input_payload,
                                               skippy_activation_desc *out_desc, void *output_payload, size_t output_capacity,
                                               size_t *out_bytes, int32_t *out_predicted, skippy_error **out_error) {
    return guarded(out_error, [&] {
        Request request = frame_request(session, &token_id, 1, input_desc, input_payload, out_desc, output_payload, output_capacity, out_bytes);
        request.sampling = sampling;
        request.logits = Logits::last;
        run_and_sample("decode_step_frame", request, out_predicted);
    });
}

skippy_status skippy_decode_step_frame_sampled_mtp(skippy_session *session, int32_t token_id, const skippy_sampling_config *sampling,
                                                   const skippy_activation_desc *input_desc, const void *input_payload,
                                                   skippy_activation_desc *out_desc, void *output_payload, size_t output_capacity,
                                                   size_t *out_bytes, int32_t *out_predicted, size_t, skippy_native_mtp_draft *out_draft,
                                                   skippy_error **out_error) {
    clear_draft(out_draft);
    return skippy_decode_step_frame_sampled(session, token_id, sampling, input_desc, input_payload, out_desc, output_payload,
                                            output_capacity, out_bytes, out_predicted, out_error);
}

skippy_status skippy_verify_tokens_frame_sampled(skippy_session *session, const int32_t *token_ids, size_t token_count,
                                                 const skippy_sampling_config *sampling, const skippy_activation_desc *input_desc,
                                                 const void *input_payload, skippy_activation_desc *out_desc, void *output_payload,
                                                 size_t output_capacity, size_t *out_bytes, int32_t *out_tokens,
                                                 size_t out_token_capacity, size_t *out_token_count, size_t,
                                                 skippy_native_mtp_draft *out_draft, skippy_error **out_error) {
    clear_draft(out_draft);
    return guarded(out_error, [&] {
        Request request = frame_request(session, token_ids, token_count, input_desc, input_payload, out_desc, output_payload, output_capacity, out_bytes);
        request.sampling = sampling;
        request.logits = Logits::all;
        verify(request, out_tokens, out_token_capacity, out_token_count);
    });
}

// ---- after an execution ---------------------------------------------------------------------------------------

skippy_status skippy_session_sample_current(skippy_session *session, const skippy_sampling_config *sampling, int32_t *out_token,
                                            skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!out_token) refuse("sample_current: out_token is NULL");
        skippy_session &target = live_session(session, "sample_current");
        *out_token = sample(target, sampling, logits_of(target), target.history.size(), target.n_past);
    });
}

skippy_status skippy_session_copy_output_activation_frame(skippy_session *session, size_t token_count, skippy_activation_desc *out_desc,
                                                          void *output_payload, size_t output_capacity, size_t *out_bytes,
                                                          skippy_error **out_error) {
    return guarded(out_error, [&] {
        write_count(out_bytes, 0);
        skippy_session &target = live_session(session, "copy_output_activation_frame");
        if (!token_count || token_count > UINT32_MAX) refuse("copy_output_activation_frame: %zu tokens", token_count);
        skippy_model &model = *target.model;
        Request request = frame_request(&target, nullptr, token_count, nullptr, nullptr, out_desc, output_payload, output_capacity, out_bytes);
        if (prepare_output(model, 0, request))
            fail(SKIPPY_STATUS_BUFFER_TOO_SMALL, "copy_output_activation_frame: the frame has %zu bytes, the buffer %zu", request.required, output_capacity);
        if (model.stage.terminal) return;
        if (target.export_serial != model.decode_serial || target.exported.size() != token_count)
            fail(SKIPPY_STATUS_RUNTIME_ERROR, "copy_output_activation_frame: %zu tokens asked for, the last decode exported %zu of lane %d",
                 token_count, target.export_serial == model.decode_serial ? target.exported.size() : 0, target.lane);
        write_output_payload(model, request, target.exported);
    });
}
