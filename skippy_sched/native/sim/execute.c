/*
 * The one core behind every executing call: check, then run.
 * Check knows the rules of abi.md 6.2, 6.3, 6.5, 6.18; run knows faults, counts, exports and samples.
 */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

#define REFUSE(...) return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, __VA_ARGS__)

/* ---- check ---- */

static sim_status check_positions(const struct sim_request *request, size_t r, sim_error out) {
    if (!request->positions) {
        if (request->position_count)
            REFUSE("request %zu: positions are NULL, their count is %zu", r, request->position_count);
        return SKIPPY_STATUS_OK;
    }
    if (request->position_count != request->token_count)
        REFUSE("request %zu: %zu positions for %zu tokens", r, request->position_count, request->token_count);
    for (size_t i = 0; i < request->position_count; i++)
        if ((int64_t)request->positions[i] != request->start + (int64_t)i)
            REFUSE("request %zu: position %zu is %d, the session continues at %lld", r, i, request->positions[i],
                   (long long)(request->start + (int64_t)i));
    return SKIPPY_STATUS_OK;
}

static sim_status check_request(struct sim_batch *batch, size_t r, sim_error out) {
    struct skippy_model *model = batch->model;
    struct sim_request *request = &batch->requests[r];
    struct skippy_session *session = request->session;
    if (!session || !session->live) REFUSE("request %zu: session is NULL or freed", r);
    if (session->model != model) REFUSE("request %zu: its session belongs to another model", r);
    if (!request->token_ids || !request->token_count)
        REFUSE("request %zu: token_ids is %s, token_count is %zu", r, request->token_ids ? "given" : "NULL",
               request->token_count);
    if (session->batch_serial == model->batch_serial)
        REFUSE("request %zu: the session of lane %d is already in this batch", r, session->lane);
    session->batch_serial = model->batch_serial;
    request->start = session->n_past;
    if (request->token_count > INT32_MAX || batch->tokens + request->token_count > INT32_MAX)
        REFUSE("request %zu: the batch exceeds %d tokens", r, INT32_MAX);
    batch->tokens += request->token_count;
    sim_status status = check_positions(request, r, out);
    if (status != SKIPPY_STATUS_OK) return status;
    status = sim_frame_check_input(model, r, request->token_count, request->input_desc, request->input_payload, out);
    if (status != SKIPPY_STATUS_OK) return status;
    if (batch->batched && !model->source && request->input_desc->part_count != model->input.part_count)
        REFUSE("request %zu: its frame has %u parts, the boundary %u: optional parts cannot be batched", r,
               request->input_desc->part_count, model->input.part_count);
    return sim_frame_prepare(model, request, r, batch->batched, out);
}

static sim_status check_exports(const struct sim_batch *batch, sim_error out) {
    const struct skippy_model *model = batch->model;
    if (!batch->batched || !sim_exports(model)) return SKIPPY_STATUS_OK;
    if (batch->count > 1 && !model->unified)
        REFUSE("%zu requests on an exporting stage with KV per lane: run them one at a time, or open it with "
               "kv_unified", batch->count);
    if (batch->count > 1 && model->spec.recurrent)
        REFUSE("%zu requests on an exporting stage of a recurrent model: run them one at a time", batch->count);
    if (batch->tokens > (size_t)model->n_ubatch)
        REFUSE("%zu tokens on an exporting stage exceed its n_ubatch of %d", batch->tokens, model->n_ubatch);
    return SKIPPY_STATUS_OK;
}

/* What upstream leaves to an assertion or to the decode, found before anything moves. */
static sim_status check_limits(const struct sim_batch *batch, sim_error out) {
    const struct skippy_model *model = batch->model;
    if (batch->tokens > (size_t)model->n_batch)
        REFUSE("%zu tokens exceed n_batch, which is %d: send smaller chunks", batch->tokens, model->n_batch);
    for (size_t r = 0; r < batch->count; r++) {
        const struct sim_request *request = &batch->requests[r];
        if (request->session->reset_required)
            return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "request %zu: lane %d needs a reset first", r,
                            request->session->lane);
        for (size_t t = 0; t < request->token_count; t++)
            if ((uint32_t)request->token_ids[t] >= (uint32_t)model->vocabulary.size)
                REFUSE("request %zu: token %zu is %d, outside the vocabulary of %d", r, t, request->token_ids[t],
                       model->vocabulary.size);
        if (request->start + (int64_t)request->token_count > model->ctx_size)
            return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                            "rc 1: request %zu: %zu tokens at position %d exceed the context of %d", r,
                            request->token_count, request->start, model->ctx_size);
    }
    if (model->unified && (int64_t)model->pool.used + (int64_t)batch->tokens > model->pool.size)
        return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                        "rc 1: %zu tokens need cells, the shared KV cache has %d of %d free", batch->tokens,
                        model->pool.size - model->pool.used, model->pool.size);
    return SKIPPY_STATUS_OK;
}

static sim_status too_small(const struct sim_batch *batch, size_t r, sim_error out) {
    return sim_fail(out, SKIPPY_STATUS_BUFFER_TOO_SMALL,
                    "%s: request %zu: the output frame has %zu bytes, the buffer %zu", batch->name, r,
                    batch->requests[r].required, batch->requests[r].out_capacity);
}

sim_status sim_batch_check(struct sim_batch *batch, size_t sampled_capacity, sim_error out) {
    size_t sampled = 0, small = SIZE_MAX;
    batch->tokens = 0;
    batch->model->batch_serial++;
    for (size_t r = 0; r < batch->count; r++) {
        sim_status status = check_request(batch, r, out);
        /* Every out_bytes is filled before the answer: one retry is enough for all of them. */
        if (status == SKIPPY_STATUS_BUFFER_TOO_SMALL) small = small == SIZE_MAX ? r : small;
        else if (status != SKIPPY_STATUS_OK) return status;
        if (batch->requests[r].sample_last && batch->model->terminal) sampled++;
    }
    if (small != SIZE_MAX) return too_small(batch, small, out);
    sim_status status = check_exports(batch, out);
    if (status != SKIPPY_STATUS_OK) return status;
    if (sampled > sampled_capacity)
        return sim_fail(out, SKIPPY_STATUS_BUFFER_TOO_SMALL, "%s: %zu requests are sampled, the outputs hold %zu",
                        batch->name, sampled, sampled_capacity);
    return check_limits(batch, out);
}

/* ---- run ---- */

static struct sim_hit take_hit(struct sim_batch *batch) {
    struct sim_hit none = {.index = -1};
    if (!atomic_load_explicit(&batch->model->fault_rules, memory_order_relaxed)) return none;
    struct sim_fault_row *rows = malloc(batch->count * sizeof *rows);
    if (!rows) return none;
    for (size_t r = 0; r < batch->count; r++)
        rows[r] = (struct sim_fault_row){batch->requests[r].session->lane, batch->requests[r].token_ids,
                                         batch->requests[r].token_count};
    struct sim_hit hit = sim_fault_take_rows(batch->model, batch->call, rows, batch->count);
    free(rows);
    return hit;
}

static bool is_target(const struct sim_hit *hit, size_t r) { return hit->index < 0 || hit->index == (int64_t)r; }

static sim_status ask_for_more(struct sim_batch *batch, sim_error out) {
    bool grows = batch->hit.effect == SIM_EFFECT_GROW_BUFFER;
    for (size_t r = 0; r < batch->count; r++) {
        struct sim_request *request = &batch->requests[r];
        if (!is_target(&batch->hit, r) || !request->out_bytes) continue;
        *request->out_bytes = request->out_capacity + (grows ? 64 : 0);
    }
    return sim_fail(out, SKIPPY_STATUS_BUFFER_TOO_SMALL, "injected fault: %s asks for %s buffer", batch->name,
                    grows ? "a larger" : "no larger a");
}

/* A stage that takes frames believes none of their rows. */
static sim_status check_rows(const struct sim_batch *batch, sim_error out) {
    const struct skippy_model *model = batch->model;
    if (model->source) return SKIPPY_STATUS_OK;
    size_t row_bytes = sizeof(float) * (size_t)model->spec.n_embd;
    float *expected = malloc(row_bytes);
    if (!expected) return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "memory for a row ran out");
    sim_status status = SKIPPY_STATUS_OK;
    for (size_t r = 0; r < batch->count && status == SKIPPY_STATUS_OK; r++) {
        const struct sim_request *request = &batch->requests[r];
        const struct skippy_activation_part_desc *part =
            sim_frame_part(request->input_desc, model->input.parts[0].identity);
        const uint8_t *rows = (const uint8_t *)request->input_payload + part->payload_offset;
        uint64_t hash = request->session->points[request->start].hash;
        for (size_t t = 0; t < request->token_count && status == SKIPPY_STATUS_OK; t++) {
            int32_t position = request->start + (int32_t)t;
            float found[2];
            memcpy(found, rows + t * row_bytes, sizeof found);
            hash = sim_roll(hash, request->token_ids[t]);
            sim_row_make(model, model->layer_start, request->token_ids[t], position, hash, expected);
            if (!memcmp(expected, rows + t * row_bytes, row_bytes)) continue;
            status = sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                              "request %zu: activation row %zu is not what layers [0, %d) make of token %d at position "
                              "%d after this history; it says token %.0f at position %.0f", r, t, model->layer_start,
                              request->token_ids[t], position, (double)found[0], (double)found[1]);
        }
    }
    free(expected);
    return status;
}

static void advance(struct sim_batch *batch) {
    const struct sim_hit *hit = &batch->hit;
    bool middle = sim_hit_fails(hit, SIM_MIDDLE);
    int64_t stop = hit->index >= 0 ? hit->index : (int64_t)batch->count / 2;
    for (size_t r = 0; r < batch->count; r++) {
        struct sim_request *request = &batch->requests[r];
        size_t tokens = request->token_count;
        if (middle && batch->count == 1) tokens /= 2;
        else if (middle && (int64_t)r >= stop) break;
        request->dropped = hit->effect == SIM_EFFECT_SILENT_DROP && is_target(hit, r);
        if (request->dropped) continue;
        bool wants = batch->model->terminal && request->sample_last;
        for (size_t t = 0; t < tokens; t++)
            sim_history_push(request->session, request->token_ids[t],
                             wants && (request->all_logits || t + 1 == request->token_count));
        if (hit->effect == SIM_EFFECT_POSITION_OFF_BY_ONE && is_target(hit, r) &&
            sim_history_reserve(request->session, 1, 1, NULL) == SKIPPY_STATUS_OK)
            sim_history_push(request->session, request->token_ids[0], false);
    }
}

static void spend(const struct sim_batch *batch, uint64_t since_ns) {
    const struct sim_spec *spec = &batch->model->spec;
    double attended = 0;
    for (size_t r = 0; r < batch->count; r++) {
        double tokens = (double)batch->requests[r].token_count;
        attended += tokens * batch->requests[r].start + tokens * (tokens - 1) / 2;
    }
    double us = spec->cost_fixed_us + spec->cost_token_us * (double)batch->tokens +
                spec->cost_sequence_us * (double)batch->count + spec->cost_attended_token_us * attended;
    double layers = batch->model->layer_end - batch->model->layer_start;
    sim_spend_us(batch->model, since_ns, us * layers / (double)spec->n_layer);
}

static sim_status export_rows(struct sim_batch *batch, sim_error out) {
    struct skippy_model *model = batch->model;
    if (!sim_exports(model)) return SKIPPY_STATUS_OK;
    size_t embd = (size_t)model->spec.n_embd, needed = batch->tokens * embd;
    if (needed > model->last_row_capacity) {
        float *grown = realloc(model->last_rows, needed * sizeof *grown);
        if (!grown) return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "memory for exports ran out; sessions advanced");
        model->last_rows = grown;
        model->last_row_capacity = needed;
    }
    for (size_t r = 0; r < batch->count; r++) {
        struct sim_request *request = &batch->requests[r];
        float *rows = model->last_rows + model->last_row_count * embd;
        uint64_t hash = request->session->points[request->start].hash;
        for (size_t t = 0; t < request->token_count; t++) {
            hash = sim_roll(hash, request->token_ids[t]);
            sim_row_make(model, model->layer_end, request->token_ids[t], request->start + (int32_t)t, hash,
                         rows + t * embd);
        }
        model->last_row_count += request->token_count;
        if (!request->frameless) sim_frame_write(model, request, rows);
    }
    if (!batch->batched && batch->tokens > (size_t)model->n_ubatch)
        return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                        "%s: the exports hold the last microbatch of %d tokens, the frame %zu; "
                        "the session has advanced",
                        batch->name, model->n_ubatch, batch->tokens);
    return SKIPPY_STATUS_OK;
}

const struct skippy_sampling_config *sim_session_sampling(const struct skippy_session *session,
                                                          const struct skippy_sampling_config *sampling) {
    return session->chat_sampling_set ? session->chat_sampling : sampling;
}

static sim_status sample_rows(struct sim_batch *batch, sim_error out) {
    struct skippy_model *model = batch->model;
    size_t stuck = SIZE_MAX;
    for (size_t r = 0; r < batch->count; r++) {
        struct sim_request *request = &batch->requests[r];
        if (!request->sample_last || !model->terminal || request->dropped) continue;
        struct sim_logits logits = sim_logits_at(request->session, request->start + (int32_t)request->token_count);
        logits.mask = request->session->mask;
        model->last_logits = logits;
        if (request->all_logits) continue; /* verify draws row by row itself */
        request->predicted = sim_choose(model, &logits, sim_session_sampling(request->session, request->sampling));
        if (request->predicted < 0 && stuck == SIZE_MAX) stuck = r;
        if (batch->hit.effect == SIM_EFFECT_TOKEN_OUT_OF_RANGE && is_target(&batch->hit, r))
            request->predicted = model->vocabulary.size + 7;
    }
    if (stuck == SIZE_MAX) return SKIPPY_STATUS_OK;
    return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                    "request %zu: sampling produced no allowed token; all %zu sessions have advanced", stuck,
                    batch->count);
}

sim_status sim_batch_run(struct sim_batch *batch, sim_error out) {
    struct skippy_model *model = batch->model;
    uint64_t since_ns = sim_now_ns(model);
    batch->hit = take_hit(batch);
    if (batch->hit.effect == SIM_EFFECT_GROW_BUFFER || batch->hit.effect == SIM_EFFECT_GROW_BUFFER_WITHOUT_GROWTH)
        return ask_for_more(batch, out);
    if (sim_hit_fails(&batch->hit, SIM_BEFORE)) return sim_hit_fail(&batch->hit, batch->name, out);
    sim_status status = check_rows(batch, out);
    for (size_t r = 0; r < batch->count && status == SKIPPY_STATUS_OK; r++) {
        batch->requests[r].predicted = -1;
        batch->requests[r].dropped = false;
        status = sim_history_reserve(batch->requests[r].session, (int64_t)batch->requests[r].token_count, 0, out);
    }
    if (status != SKIPPY_STATUS_OK) return status;
    model->last_logits.valid = false;
    model->last_row_count = 0;
    advance(batch);
    if (!sim_hit_fails(&batch->hit, SIM_MIDDLE)) status = export_rows(batch, out);
    spend(batch, since_ns);
    if (batch->hit.status) { /* a fault in the middle or after: what was computed is lost */
        if (status != SKIPPY_STATUS_OK && out) skippy_error_free(*out);
        return sim_hit_fail(&batch->hit, batch->name, out);
    }
    return status == SKIPPY_STATUS_OK ? sample_rows(batch, out) : status;
}

sim_status sim_single(struct sim_batch *batch, sim_error out) {
    batch->batched = false;
    batch->count = 1;
    sim_status status = sim_batch_check(batch, SIZE_MAX, out);
    return status == SKIPPY_STATUS_OK ? sim_batch_run(batch, out) : status;
}
