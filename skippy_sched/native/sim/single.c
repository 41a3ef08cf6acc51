/* The entries for one session: prefill and decode, with frames and without. */
#include "sim.h"

#include <stdint.h>

/* Everything that an entry may bring; what it does not have stays zero. */
struct single {
    enum sim_call call;
    const char *name;
    struct sim_request request;
    int32_t *out_predicted;
    size_t max_draft;
    struct skippy_native_mtp_draft *out_draft;
};

static sim_status run_single(struct single *entry, sim_error out) {
    struct sim_request *request = &entry->request;
    if (request->out_bytes) *request->out_bytes = 0;
    if (entry->out_predicted) *entry->out_predicted = -1;
    sim_draft_clear(entry->out_draft);
    if (request->token_count > UINT32_MAX)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "%s: %zu tokens exceed 2^32 - 1", entry->name,
                        request->token_count);
    sim_status status = sim_enter_session(request->session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct skippy_model *model = request->session->model;
    struct sim_batch batch = {.model = model, .call = entry->call, .name = entry->name, .requests = request};
    request->sample_last = entry->out_predicted != NULL;
    status = sim_single(&batch, out);
    if (status == SKIPPY_STATUS_OK && entry->out_predicted) {
        *entry->out_predicted = request->predicted;
        if (entry->out_draft && request->predicted >= 0)
            sim_draft(request->session, request->predicted, request->sampling, entry->max_draft, entry->out_draft);
    }
    sim_leave(model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}

/* ---- prefill ---- */

sim_status skippy_prefill_chunk(struct skippy_session *session, const int32_t *token_ids, size_t token_count,
                                const void *input, size_t input_bytes, void *output, size_t output_capacity,
                                size_t *out_bytes, sim_error out) {
    struct single entry = {SIM_CALL_PREFILL, "prefill", {.session = session, .token_ids = token_ids,
                           .token_count = token_count, .frameless = true, .out_bytes = out_bytes}, NULL, 0, NULL};
    return run_single(&entry, out);
}

sim_status skippy_prefill_chunk_frame_with_positions(
    struct skippy_session *session, const int32_t *token_ids, size_t token_count, const int32_t *positions,
    size_t position_count, const struct skippy_activation_desc *input_desc, const void *input_payload,
    struct skippy_activation_desc *out_desc, void *output_payload, size_t output_capacity, size_t *out_bytes,
    sim_error out) {
    return skippy_prefill_chunk_frame_sampled_with_positions(session, token_ids, token_count, positions,
        position_count, NULL, input_desc, input_payload, out_desc, output_payload, output_capacity, out_bytes, NULL,
        out);
}

sim_status skippy_prefill_chunk_frame(
    struct skippy_session *session, const int32_t *token_ids, size_t token_count,
    const struct skippy_activation_desc *input_desc, const void *input_payload,
    struct skippy_activation_desc *out_desc, void *output_payload, size_t output_capacity, size_t *out_bytes,
    sim_error out) {
    return skippy_prefill_chunk_frame_sampled_with_positions(session, token_ids, token_count, NULL, 0, NULL,
        input_desc, input_payload, out_desc, output_payload, output_capacity, out_bytes, NULL, out);
}

sim_status skippy_prefill_chunk_frame_sampled(
    struct skippy_session *session, const int32_t *token_ids, size_t token_count,
    const struct skippy_sampling_config *sampling, const struct skippy_activation_desc *input_desc,
    const void *input_payload, struct skippy_activation_desc *out_desc, void *output_payload,
    size_t output_capacity, size_t *out_bytes, int32_t *out_predicted, sim_error out) {
    return skippy_prefill_chunk_frame_sampled_with_positions(session, token_ids, token_count, NULL, 0, sampling,
        input_desc, input_payload, out_desc, output_payload, output_capacity, out_bytes, out_predicted, out);
}

sim_status skippy_prefill_chunk_frame_sampled_with_positions(
    struct skippy_session *session, const int32_t *token_ids, size_t token_count, const int32_t *positions,
    size_t position_count, const struct skippy_sampling_config *sampling,
    const struct skippy_activation_desc *input_desc, const void *input_payload,
    struct skippy_activation_desc *out_desc, void *output_payload, size_t output_capacity, size_t *out_bytes,
    int32_t *out_predicted, sim_error out) {
    struct single entry = {SIM_CALL_PREFILL, "prefill",
        {.session = session, .token_ids = token_ids, .token_count = token_count, .positions = positions,
         .position_count = position_count, .sampling = sampling, .input_desc = input_desc,
         .input_payload = input_payload, .out_desc = out_desc, .out_payload = output_payload,
         .out_capacity = output_capacity, .out_bytes = out_bytes}, out_predicted, 0, NULL};
    return run_single(&entry, out);
}

/* ---- decode ---- */

sim_status skippy_decode_step_sampled(struct skippy_session *session, int32_t token_id,
                                      const struct skippy_sampling_config *sampling, const void *input,
                                      size_t input_bytes, void *output, size_t output_capacity,
                                      size_t *out_bytes, int32_t *out_predicted, sim_error out) {
    struct single entry = {SIM_CALL_DECODE, "decode", {.session = session, .token_ids = &token_id, .token_count = 1,
                           .sampling = sampling, .frameless = true, .out_bytes = out_bytes}, out_predicted, 0, NULL};
    return run_single(&entry, out);
}

sim_status skippy_decode_step_sampled_mtp(struct skippy_session *session, int32_t token_id,
                                          const struct skippy_sampling_config *sampling, int32_t *out_predicted,
                                          size_t max_draft, struct skippy_native_mtp_draft *out_draft,
                                          sim_error out) {
    struct single entry = {SIM_CALL_DECODE, "decode", {.session = session, .token_ids = &token_id, .token_count = 1,
                           .sampling = sampling, .frameless = true}, out_predicted, max_draft, out_draft};
    return run_single(&entry, out);
}

sim_status skippy_decode_step_frame_sampled(
    struct skippy_session *session, int32_t token_id, const struct skippy_sampling_config *sampling,
    const struct skippy_activation_desc *input_desc, const void *input_payload,
    struct skippy_activation_desc *out_desc, void *output_payload, size_t output_capacity, size_t *out_bytes,
    int32_t *out_predicted, sim_error out) {
    return skippy_decode_step_frame_sampled_mtp(session, token_id, sampling, input_desc, input_payload, out_desc,
        output_payload, output_capacity, out_bytes, out_predicted, 0, NULL, out);
}

sim_status skippy_decode_step_frame_sampled_mtp(
    struct skippy_session *session, int32_t token_id, const struct skippy_sampling_config *sampling,
    const struct skippy_activation_desc *input_desc, const void *input_payload,
    struct skippy_activation_desc *out_desc, void *output_payload, size_t output_capacity, size_t *out_bytes,
    int32_t *out_predicted, size_t max_draft, struct skippy_native_mtp_draft *out_draft, sim_error out) {
    struct single entry = {SIM_CALL_DECODE, "decode",
        {.session = session, .token_ids = &token_id, .token_count = 1, .sampling = sampling,
         .input_desc = input_desc, .input_payload = input_payload, .out_desc = out_desc,
         .out_payload = output_payload, .out_capacity = output_capacity, .out_bytes = out_bytes},
        out_predicted, max_draft, out_draft};
    return run_single(&entry, out);
}
