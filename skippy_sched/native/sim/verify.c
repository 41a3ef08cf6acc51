/* Speculation and what reads the last execution: verify, native drafts, sample_current, copied frames. */
#include "sim.h"

#include <string.h>

/* ---- native drafts ---- */

void sim_draft_clear(struct skippy_native_mtp_draft *draft) {
    if (draft) *draft = (struct skippy_native_mtp_draft){.version = SKIPPY_NATIVE_MTP_VERSION};
}

void sim_draft(struct skippy_session *session, int32_t next, const struct skippy_sampling_config *sampling,
               size_t max_draft, struct skippy_native_mtp_draft *draft) {
    struct skippy_model *model = session->model;
    const struct sim_spec *spec = &model->spec;
    size_t count = (size_t)spec->mtp_heads < max_draft ? (size_t)spec->mtp_heads : max_draft;
    if (!model->terminal || !count || next < 0 || next >= model->vocabulary.size) return;
    sampling = sim_session_sampling(session, sampling);
    struct sim_logits logits = sim_logits_at(session, session->n_past);
    for (size_t i = 0; i < count; i++) {
        logits = sim_logits_after(session, logits, next);
        next = sim_choose(model, &logits, sampling);
        if (next < 0) break;
        /* Wrong by position, so that a draft does not depend on how often one was asked for. */
        if (spec->mtp_wrong_every && logits.position % spec->mtp_wrong_every == 0)
            next = (next + 1) % SIM_TOKEN_BOS;
        draft->token_ids[draft->token_count++] = next;
    }
    draft->available = draft->token_count > 0;
}

/* ---- verify ---- */

struct verify {
    struct sim_request request;
    int32_t *out_tokens;
    size_t capacity;
    size_t *out_count;
    size_t max_draft;
    struct skippy_native_mtp_draft *out_draft;
};

static sim_status check_verify(const struct verify *v, const struct skippy_model *model, sim_error out) {
    const struct sim_request *request = &v->request;
    if (!model->terminal) return SKIPPY_STATUS_OK;
    if (!v->out_count)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "verify: out_token_count is NULL");
    *v->out_count = request->token_count;
    if (!v->out_tokens || v->capacity < request->token_count)
        return sim_fail(out, SKIPPY_STATUS_BUFFER_TOO_SMALL, "verify: %zu tokens, out_tokens holds %zu",
                        request->token_count, v->out_tokens ? v->capacity : 0);
    return SKIPPY_STATUS_OK;
}

/* Each row is drawn after its own input; a sampler chain stops where the input left its choice. */
static sim_status verify_rows(struct verify *v, const struct sim_hit *hit, sim_error out) {
    struct sim_request *request = &v->request;
    struct skippy_session *session = request->session;
    struct skippy_model *model = session->model;
    const struct skippy_sampling_config *sampling = sim_session_sampling(session, request->sampling);
    *v->out_count = 0;
    if (request->dropped) return SKIPPY_STATUS_OK;
    bool stops = sim_sampling_enabled(sampling) || session->chat_sampling_set || session->mask, matches = true;
    size_t count = 0;
    for (size_t i = 0; i < request->token_count && (matches || !stops); i++) {
        struct sim_logits logits = sim_logits_at(session, request->start + (int32_t)i + 1);
        logits.mask = session->mask;
        int32_t token = sim_choose(model, &logits, sampling);
        if (token < 0)
            return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                            "verify: row %zu: sampling produced no allowed token; the session has advanced", i);
        if (i + 1 < request->token_count && token != request->token_ids[i + 1]) matches = false;
        if (hit->effect == SIM_EFFECT_TOKEN_OUT_OF_RANGE && !i) token = model->vocabulary.size + 7;
        v->out_tokens[count++] = token;
    }
    *v->out_count = count;
    if (hit->effect == SIM_EFFECT_WRONG_COUNT) *v->out_count = request->token_count + 1;
    if (hit->effect == SIM_EFFECT_FEWER_SAMPLES) --*v->out_count;
    if (matches && v->out_draft)
        sim_draft(session, v->out_tokens[count - 1], request->sampling, v->max_draft, v->out_draft);
    return SKIPPY_STATUS_OK;
}

static sim_status verify(struct verify *v, sim_error out) {
    struct sim_request *request = &v->request;
    struct skippy_session *session = request->session;
    struct skippy_model *model = session->model;
    struct sim_batch batch = {.model = model, .call = SIM_CALL_VERIFY, .name = "verify", .requests = request,
                              .count = 1};
    request->sample_last = request->all_logits = true;
    sim_status status = sim_batch_check(&batch, SIZE_MAX, out);
    if (status == SKIPPY_STATUS_OK) status = check_verify(v, model, out);
    if (status != SKIPPY_STATUS_OK) return status;
    bool holds = model->spec.recurrent;
    if (holds && session->checkpoint_count == SKIPPY_MAX_VERIFY_CHECKPOINTS)
        return sim_fail(out, SKIPPY_STATUS_UNSUPPORTED,
                        "verify: %d checkpoints are held already; retire or trim first", session->checkpoint_count);
    status = sim_batch_run(&batch, out);
    if (holds && session->n_past > request->start) /* also when the call fails after the decode */
        session->checkpoints[session->checkpoint_count++] =
            (struct sim_checkpoint){request->start, (int32_t)request->token_count};
    if (v->out_count) *v->out_count = 0;
    if (status != SKIPPY_STATUS_OK || !model->terminal) return status;
    return verify_rows(v, &batch.hit, out);
}

static sim_status run_verify(struct verify *v, sim_error out) {
    struct sim_request *request = &v->request;
    sim_draft_clear(v->out_draft);
    if (v->out_count) *v->out_count = 0;
    if (request->out_bytes) *request->out_bytes = 0;
    if (!request->token_count || request->token_count > UINT32_MAX)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "verify: %zu tokens, not 1 to 2^32 - 1",
                        request->token_count);
    sim_status status = sim_enter_session(request->session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct skippy_model *model = request->session->model;
    status = verify(v, out);
    sim_leave(model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}

sim_status skippy_verify_tokens(struct skippy_session *session, const int32_t *token_ids, size_t token_count,
                                int32_t *out_tokens, size_t capacity, size_t *out_count, sim_error out) {
    struct verify v = {{.session = session, .token_ids = token_ids, .token_count = token_count, .frameless = true},
                       out_tokens, capacity, out_count, 0, NULL};
    return run_verify(&v, out);
}

sim_status skippy_verify_tokens_frame_sampled(
    struct skippy_session *session, const int32_t *token_ids, size_t token_count,
    const struct skippy_sampling_config *sampling, const struct skippy_activation_desc *input_desc,
    const void *input_payload, struct skippy_activation_desc *out_desc, void *output_payload,
    size_t output_capacity, size_t *out_bytes, int32_t *out_tokens, size_t out_token_capacity,
    size_t *out_token_count, size_t max_draft, struct skippy_native_mtp_draft *out_draft, sim_error out) {
    struct verify v = {{.session = session, .token_ids = token_ids, .token_count = token_count, .sampling = sampling,
                        .input_desc = input_desc, .input_payload = input_payload, .out_desc = out_desc,
                        .out_payload = output_payload, .out_capacity = output_capacity, .out_bytes = out_bytes},
                       out_tokens, out_token_capacity, out_token_count, max_draft, out_draft};
    return run_verify(&v, out);
}

/* ---- what the last execution left ---- */

static sim_status copy_frame(struct skippy_session *session, struct sim_request *request, sim_error out) {
    struct skippy_model *model = session->model;
    sim_status status = sim_frame_prepare(model, request, 0, false, out);
    if (status == SKIPPY_STATUS_BUFFER_TOO_SMALL)
        return sim_fail(out, status, "copy frame: the frame has %zu bytes, the buffer %zu", request->required,
                        request->out_capacity);
    if (status != SKIPPY_STATUS_OK || !sim_exports(model)) return status;
    struct sim_fault_row row = {session->lane, NULL, 0};
    struct sim_hit hit = sim_fault_take_rows(model, SIM_CALL_COPY_FRAME, &row, 1);
    if (hit.effect == SIM_EFFECT_GROW_BUFFER || hit.effect == SIM_EFFECT_GROW_BUFFER_WITHOUT_GROWTH) {
        if (request->out_bytes)
            *request->out_bytes = request->out_capacity + (hit.effect == SIM_EFFECT_GROW_BUFFER ? 64 : 0);
        return sim_fail(out, SKIPPY_STATUS_BUFFER_TOO_SMALL, "injected fault: copy frame asks for another buffer");
    }
    if (hit.status) return sim_hit_fail(&hit, "copy frame", out);
    if (request->token_count != model->last_row_count)
        return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                        "copy frame: %zu tokens asked for, the last execution exported %zu",
                        request->token_count, model->last_row_count);
    memcpy(request->out_payload, model->last_rows, request->required);
    return SKIPPY_STATUS_OK;
}

sim_status skippy_session_copy_output_activation_frame(
    struct skippy_session *session, size_t token_count, struct skippy_activation_desc *out_desc,
    void *output_payload, size_t output_capacity, size_t *out_bytes, sim_error out) {
    if (out_bytes) *out_bytes = 0;
    if (!token_count || token_count > INT32_MAX)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "copy frame: token_count is %zu", token_count);
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct skippy_model *model = session->model;
    struct sim_request request = {.session = session, .token_count = token_count, .out_desc = out_desc,
                                  .out_payload = output_payload, .out_capacity = output_capacity,
                                  .out_bytes = out_bytes, .boundary_only = true};
    status = copy_frame(session, &request, out);
    sim_leave(model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}

sim_status skippy_session_sample_current(struct skippy_session *session, const struct skippy_sampling_config *sampling,
                                         int32_t *out_token, sim_error out) {
    if (!out_token) return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "sample_current: out_token is NULL");
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct skippy_model *model = session->model;
    struct sim_fault_row row = {session->lane, NULL, 0};
    struct sim_hit hit = sim_fault_take_rows(model, SIM_CALL_SAMPLE, &row, 1);
    *out_token = -1;
    if (hit.status) {
        status = sim_hit_fail(&hit, "sample_current", out);
    } else {
        if (model->last_logits.valid)
            *out_token = sim_choose(model, &model->last_logits, sim_session_sampling(session, sampling));
        if (*out_token < 0)
            status = sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "sampling produced no allowed token: %s",
                              model->last_logits.valid ? "every one is banned" : "the last execution put out no row");
        else if (hit.effect == SIM_EFFECT_TOKEN_OUT_OF_RANGE)
            *out_token = model->vocabulary.size + 7;
    }
    sim_leave(model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}
