/* The two batched entries: the iteration batch and the older decode batch. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

static bool scratch_reserve(struct skippy_model *model, size_t count) {
    if (count <= model->scratch_capacity) return true;
    struct sim_request *grown = realloc(model->scratch, count * sizeof *grown);
    if (!grown) return false;
    model->scratch = grown;
    model->scratch_capacity = count;
    return true;
}

/* What a wrong library would answer: the host must notice each of these. */
static void corrupt_samples(const struct sim_hit *hit, size_t request_count, size_t capacity,
                            size_t *indexes, int32_t *predicted, size_t *count) {
    size_t target = 0;
    while (hit->index >= 0 && target < *count && indexes[target] != (size_t)hit->index) target++;
    if (target >= *count) target = 0;
    switch (hit->effect) {
    case SIM_EFFECT_WRONG_COUNT: *count = request_count + 1; break;
    case SIM_EFFECT_FEWER_SAMPLES:
        if (!*count) break;
        memmove(indexes + target, indexes + target + 1, (*count - target - 1) * sizeof *indexes);
        memmove(predicted + target, predicted + target + 1, (*count - target - 1) * sizeof *predicted);
        --*count;
        break;
    case SIM_EFFECT_DUPLICATE_INDEX:
        if (*count == 1 && capacity > 1) predicted[(*count)++] = predicted[0];
        if (*count > 1) indexes[target ? target : 1] = indexes[target ? target - 1 : 0];
        break;
    case SIM_EFFECT_INDEX_OUT_OF_RANGE:
        if (*count) indexes[target] = request_count;
        break;
    default: break;
    }
}

static size_t expected_samples(const struct sim_batch *batch) {
    size_t count = 0;
    for (size_t r = 0; batch->model->terminal && r < batch->count; r++) count += batch->requests[r].sample_last;
    return count;
}

static sim_status iterate(struct sim_batch *batch, size_t *indexes, int32_t *predicted, size_t capacity,
                          size_t *out_count, sim_error out) {
    sim_status status = sim_batch_check(batch, indexes && predicted ? capacity : 0, out);
    if (status != SKIPPY_STATUS_OK) return status;
    *out_count = expected_samples(batch);
    status = sim_batch_run(batch, out);
    if (status != SKIPPY_STATUS_OK) return status;
    size_t count = 0;
    for (size_t r = 0; batch->model->terminal && r < batch->count; r++) {
        const struct sim_request *request = &batch->requests[r];
        if (!request->sample_last || request->dropped) continue;
        indexes[count] = r;
        predicted[count++] = request->predicted;
    }
    *out_count = count;
    corrupt_samples(&batch->hit, batch->count, capacity, indexes, predicted, out_count);
    return SKIPPY_STATUS_OK;
}

sim_status skippy_iteration_batch_sampled(
    const struct skippy_iteration_request *requests, size_t request_count,
    struct skippy_activation_desc *out_descs, void *const *output_payloads,
    const size_t *output_capacities, size_t *out_bytes, size_t *out_sampled_request_indexes,
    int32_t *out_predicted, size_t sampled_capacity, size_t *out_sampled_count, sim_error out) {
    if (out_sampled_count) *out_sampled_count = 0;
    if (!requests || !request_count || !out_sampled_count)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                        "iteration: requests is %s, request_count is %zu, out_sampled_count is %s",
                        requests ? "given" : "NULL", request_count, out_sampled_count ? "given" : "NULL");
    sim_status status = sim_enter_session(requests[0].session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct skippy_model *model = requests[0].session->model;
    struct sim_batch batch = {.model = model, .call = SIM_CALL_ITERATION, .name = "iteration",
                              .count = request_count, .batched = true};
    if (scratch_reserve(model, request_count)) {
        batch.requests = model->scratch;
        for (size_t r = 0; r < request_count; r++) {
            const struct skippy_iteration_request *from = &requests[r];
            batch.requests[r] = (struct sim_request){
                .session = from->session, .token_ids = from->token_ids, .token_count = from->token_count,
                .positions = from->positions, .position_count = from->position_count,
                .sampling = from->sampling, .input_desc = from->input_desc,
                .input_payload = from->input_payload, .sample_last = from->sample_last,
                .out_desc = out_descs ? &out_descs[r] : NULL,
                .out_payload = output_payloads ? output_payloads[r] : NULL,
                .out_capacity = output_capacities ? output_capacities[r] : 0,
                .out_bytes = out_bytes ? &out_bytes[r] : NULL};
            if (out_bytes) out_bytes[r] = 0;
        }
        status = iterate(&batch, out_sampled_request_indexes, out_predicted, sampled_capacity, out_sampled_count, out);
    } else {
        status = sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "memory for %zu requests ran out", request_count);
    }
    sim_leave(model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}

sim_status skippy_decode_step_frame_batch_sampled(
    struct skippy_session *const *sessions, const int32_t *token_ids,
    const struct skippy_sampling_config *const *sampling,
    const struct skippy_activation_desc *const *input_descs, const void *const *input_payloads,
    struct skippy_activation_desc *out_descs, void *const *output_payloads, const size_t *output_capacities,
    size_t *out_bytes, int32_t *out_predicted, size_t predicted_capacity, size_t request_count, sim_error out) {
    if (!sessions || !token_ids || !out_predicted || !request_count)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                        "decode batch: sessions, token_ids and out_predicted must be given, request_count is %zu",
                        request_count);
    for (size_t r = 0; r < request_count && r < predicted_capacity; r++) out_predicted[r] = -1;
    if (predicted_capacity < request_count)
        return sim_fail(out, SKIPPY_STATUS_BUFFER_TOO_SMALL, "decode batch: %zu requests, out_predicted holds %zu",
                        request_count, predicted_capacity);
    sim_status status = sim_enter_session(sessions[0], out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct skippy_model *model = sessions[0]->model;
    struct sim_batch batch = {.model = model, .call = SIM_CALL_DECODE, .name = "decode batch",
                              .count = request_count, .batched = true};
    if (scratch_reserve(model, request_count)) {
        batch.requests = model->scratch;
        for (size_t r = 0; r < request_count; r++) {
            batch.requests[r] = (struct sim_request){
                .session = sessions[r], .token_ids = &token_ids[r], .token_count = 1,
                .sampling = sampling ? sampling[r] : NULL, .input_desc = input_descs ? input_descs[r] : NULL,
                .input_payload = input_payloads ? input_payloads[r] : NULL, .sample_last = true,
                .out_desc = out_descs ? &out_descs[r] : NULL,
                .out_payload = output_payloads ? output_payloads[r] : NULL,
                .out_capacity = output_capacities ? output_capacities[r] : 0,
                .out_bytes = out_bytes ? &out_bytes[r] : NULL};
            if (out_bytes) out_bytes[r] = 0;
        }
        status = sim_batch_check(&batch, request_count, out);
        if (status == SKIPPY_STATUS_OK) status = sim_batch_run(&batch, out);
        /* A stage that does not sample answers -1 for each; upstream fails here after moving everybody. */
        for (size_t r = 0; r < request_count && status == SKIPPY_STATUS_OK; r++)
            out_predicted[r] = batch.requests[r].predicted;
    } else {
        status = sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "memory for %zu requests ran out", request_count);
    }
    sim_leave(model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}
