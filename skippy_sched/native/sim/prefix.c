/*
 * Resident prefixes: copies of a session's first tokens under sequence ids from 2 x lanes up.
 * In a shared pool they share the session's cells; with KV per lane they are copies beside it.
 */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

#define REFUSE(...) return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, __VA_ARGS__)

static struct sim_prefix *find(struct skippy_model *model, int32_t id) {
    for (size_t i = 0; i < model->prefix_count; i++)
        if (model->prefixes[i].id == id) return &model->prefixes[i];
    return NULL;
}

static void prefix_free(struct skippy_model *model, struct sim_prefix *prefix) {
    for (int32_t i = 0; prefix->cells && i < prefix->count; i++) sim_pool_release(&model->pool, prefix->cells[i]);
    free(prefix->tokens);
    free(prefix->points);
    free(prefix->cells);
}

void sim_prefix_drop(struct skippy_model *model, int32_t id) {
    struct sim_prefix *prefix = find(model, id);
    if (!prefix) return;
    prefix_free(model, prefix);
    *prefix = model->prefixes[--model->prefix_count];
}

static sim_status check_id(const struct skippy_model *model, int32_t id, sim_error out) {
    if (id < 2 * model->lane_count)
        REFUSE("sequence id %d is reserved: prefixes are at %d and above", id, 2 * model->lane_count);
    return SKIPPY_STATUS_OK;
}

static sim_status check_save(const struct skippy_session *session, int32_t id, uint64_t count, sim_error out) {
    const struct skippy_model *model = session->model;
    if (count > (uint64_t)session->n_past)
        REFUSE("save_prefix: %llu tokens, the session has %d", (unsigned long long)count, session->n_past);
    sim_status status = check_id(model, id, out);
    if (status != SKIPPY_STATUS_OK) return status;
    if (model->spec.recurrent)
        return sim_fail(out, SKIPPY_STATUS_UNSUPPORTED, "save_prefix: a recurrent state has no prefixes");
    return SKIPPY_STATUS_OK;
}

static sim_status save(struct skippy_session *session, int32_t id, int32_t count, sim_error out) {
    struct skippy_model *model = session->model;
    struct sim_prefix prefix = {.id = id, .count = count};
    prefix.tokens = malloc(((size_t)count + 1) * sizeof *prefix.tokens);
    prefix.points = malloc(((size_t)count + 1) * sizeof *prefix.points);
    if (model->unified) prefix.cells = malloc(((size_t)count + 1) * sizeof *prefix.cells);
    struct sim_prefix *grown = realloc(model->prefixes, (model->prefix_count + 1) * sizeof prefix);
    if (grown) model->prefixes = grown;
    if (!grown || !prefix.tokens || !prefix.points || (model->unified && !prefix.cells)) {
        free(prefix.tokens);
        free(prefix.points);
        free(prefix.cells);
        return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "memory for a prefix of %d tokens ran out", count);
    }
    memcpy(prefix.tokens, session->tokens, (size_t)count * sizeof *prefix.tokens);
    memcpy(prefix.points, session->points, ((size_t)count + 1) * sizeof *prefix.points);
    for (int32_t i = 0; model->unified && i < count; i++) {
        prefix.cells[i] = session->cells[i];
        sim_pool_share(&model->pool, prefix.cells[i]);
    }
    sim_prefix_drop(model, id);
    model->prefixes[model->prefix_count++] = prefix;
    return SKIPPY_STATUS_OK;
}

sim_status skippy_session_save_prefix(struct skippy_session *session, int32_t cache_seq_id, uint64_t token_count,
                                      sim_error out) {
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct sim_hit hit = {0};
    status = check_save(session, cache_seq_id, token_count, out);
    if (status == SKIPPY_STATUS_OK) {
        struct sim_fault_row row = {session->lane, NULL, 0};
        hit = sim_fault_take_rows(session->model, SIM_CALL_SAVE_PREFIX, &row, 1);
        if (!sim_hit_fails(&hit, SIM_BEFORE)) status = save(session, cache_seq_id, (int32_t)token_count, out);
    }
    sim_leave(session->model);
    if (status != SKIPPY_STATUS_OK) return status;
    return hit.status ? sim_hit_fail(&hit, "save_prefix", out) : sim_ok(out);
}

static sim_status check_restore(struct skippy_model *model, int32_t id, const int32_t *tokens, size_t count,
                                sim_error out) {
    if (!tokens || !count)
        REFUSE("restore_prefix: token_ids is %s, token_count is %zu", tokens ? "given" : "NULL", count);
    sim_status status = check_id(model, id, out);
    if (status != SKIPPY_STATUS_OK) return status;
    const struct sim_prefix *prefix = find(model, id);
    if (!prefix || (size_t)prefix->count < count)
        REFUSE("restore_prefix: sequence %d holds %d tokens, %zu are asked for", id, prefix ? prefix->count : 0, count);
    for (size_t i = 0; i < count; i++)
        if (tokens[i] != prefix->tokens[i])
            REFUSE("restore_prefix: token %zu is %d, sequence %d was computed from %d", i, tokens[i], id,
                   prefix->tokens[i]);
    return SKIPPY_STATUS_OK;
}

static sim_status restore(struct skippy_session *session, int32_t id, int32_t count, sim_error out) {
    struct skippy_model *model = session->model;
    const struct sim_prefix *prefix = find(model, id);
    sim_status status = sim_history_reserve(session, (int64_t)count - session->n_past, 0, out);
    if (status != SKIPPY_STATUS_OK) return status;
    for (int32_t i = 0; model->unified && i < count; i++) sim_pool_share(&model->pool, prefix->cells[i]);
    sim_history_cut(session, 0);
    sim_history_start(session);
    memcpy(session->tokens, prefix->tokens, (size_t)count * sizeof *session->tokens);
    memcpy(session->points, prefix->points, ((size_t)count + 1) * sizeof *session->points);
    if (model->unified) memcpy(session->cells, prefix->cells, (size_t)count * sizeof *session->cells);
    session->n_past = count;
    session->reset_required = false;
    return SKIPPY_STATUS_OK;
}

sim_status skippy_session_restore_prefix(struct skippy_session *session, int32_t cache_seq_id,
                                         const int32_t *token_ids, size_t token_count, sim_error out) {
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct sim_hit hit = {0};
    status = check_restore(session->model, cache_seq_id, token_ids, token_count, out);
    if (status == SKIPPY_STATUS_OK) {
        struct sim_fault_row row = {session->lane, token_ids, token_count};
        hit = sim_fault_take_rows(session->model, SIM_CALL_RESTORE_PREFIX, &row, 1);
        if (!sim_hit_fails(&hit, SIM_BEFORE)) status = restore(session, cache_seq_id, (int32_t)token_count, out);
    }
    sim_leave(session->model);
    if (status != SKIPPY_STATUS_OK) return status;
    return hit.status ? sim_hit_fail(&hit, "restore_prefix", out) : sim_ok(out);
}

sim_status skippy_session_create_from_resident_prefix(struct skippy_model *model, int32_t cache_seq_id,
                                                      const int32_t *token_ids, size_t token_count,
                                                      struct skippy_session **out_session, sim_error out) {
    if (out_session) *out_session = NULL;
    if (!sim_model_live(model) || !out_session)
        REFUSE("session_create_from_resident_prefix: model or out_session is NULL");
    sim_status status = sim_enter(model, out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct sim_hit hit = {0};
    struct skippy_session *session = NULL;
    status = check_restore(model, cache_seq_id, token_ids, token_count, out);
    if (status == SKIPPY_STATUS_OK) {
        hit = sim_fault_take_rows(model, SIM_CALL_SESSION_CREATE, NULL, 0);
        if (hit.status) status = sim_hit_fail(&hit, "session_create", out);
    }
    if (status == SKIPPY_STATUS_OK) status = sim_lane_claim(model, &session, out);
    if (status == SKIPPY_STATUS_OK) {
        status = restore(session, cache_seq_id, (int32_t)token_count, out);
        if (status == SKIPPY_STATUS_OK) *out_session = session;
        else sim_lane_release(session);
    }
    sim_leave(model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}

sim_status skippy_session_drop_sequence(struct skippy_session *session, int32_t seq_id, sim_error out) {
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    status = check_id(session->model, seq_id, out);
    if (status == SKIPPY_STATUS_OK) sim_prefix_drop(session->model, seq_id);
    sim_leave(session->model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}
