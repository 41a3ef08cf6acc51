/* Sessions and their lanes: create, free, reset, trim, positions, checkpoints, cells in use. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

sim_status sim_enter(struct skippy_model *model, sim_error out) {
    if (atomic_flag_test_and_set(&model->executing))
        return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                        "concurrent execution: another thread is inside a call on this model; "
                        "calls that touch its context must be serialised");
    return SKIPPY_STATUS_OK;
}

sim_status sim_enter_session(struct skippy_session *session, sim_error out) {
    if (!session || !session->live)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "session is NULL or freed");
    return sim_enter(session->model, out);
}

static struct sim_hit take(struct skippy_session *session, enum sim_call call) {
    struct sim_fault_row row = {session->lane, NULL, 0};
    return sim_fault_take_rows(session->model, call, &row, 1);
}

/* ---- lanes ---- */

sim_status sim_lane_claim(struct skippy_model *model, struct skippy_session **out_session, sim_error out) {
    struct skippy_session *session = NULL;
    pthread_mutex_lock(&model->lock);
    for (int lane = 0; lane < model->lane_count && !session; lane++)
        if (!model->sessions[lane].live) session = &model->sessions[lane];
    if (session) {
        session->live = true;
        model->live_sessions++;
    }
    pthread_mutex_unlock(&model->lock);
    if (!session)
        return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                        "no skippy execution lane is available: all %d are taken", model->lane_count);
    session->model = model;
    session->lane = (int)(session - model->sessions);
    session->n_past = 0;
    session->reset_required = false;
    session->chat_sampling_set = false;
    session->batch_serial = 0;
    atomic_fetch_add(&sim_live_sessions, 1);
    if (sim_history_reserve(session, 1, 0, out) != SKIPPY_STATUS_OK) {
        sim_lane_release(session);
        return SKIPPY_STATUS_RUNTIME_ERROR;
    }
    sim_history_start(session);
    *out_session = session;
    return SKIPPY_STATUS_OK;
}

void sim_lane_release(struct skippy_session *session) {
    struct skippy_model *model = session->model;
    sim_history_cut(session, 0);
    free(session->chat_sampling);
    session->chat_sampling = NULL;
    free(session->mask);
    session->mask = NULL;
    pthread_mutex_lock(&model->lock);
    session->live = false;
    model->live_sessions--;
    pthread_mutex_unlock(&model->lock);
    atomic_fetch_sub(&sim_live_sessions, 1);
}

sim_status skippy_session_create(struct skippy_model *model, struct skippy_session **out_session,
                                 sim_error out) {
    if (out_session) *out_session = NULL;
    if (!sim_model_live(model) || !out_session)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "session_create: model or out_session is NULL");
    struct sim_hit hit = sim_fault_take_rows(model, SIM_CALL_SESSION_CREATE, NULL, 0);
    if (hit.status) return sim_hit_fail(&hit, "session_create", out);
    sim_status status = sim_lane_claim(model, out_session, out);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}

sim_status skippy_session_free(struct skippy_session *session, sim_error out) {
    if (!session) return sim_ok(out);
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct skippy_model *model = session->model;
    struct sim_hit hit = take(session, SIM_CALL_SESSION_FREE);
    if (!sim_hit_fails(&hit, SIM_BEFORE)) sim_lane_release(session);
    sim_leave(model);
    return hit.status ? sim_hit_fail(&hit, "session_free", out) : sim_ok(out);
}

/* ---- positions ---- */

sim_status skippy_session_reset(struct skippy_session *session, sim_error out) {
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct sim_hit hit = take(session, SIM_CALL_RESET);
    if (!sim_hit_fails(&hit, SIM_BEFORE)) {
        sim_history_cut(session, 0);
        sim_history_start(session);
        session->reset_required = false;
    }
    sim_leave(session->model);
    return hit.status ? sim_hit_fail(&hit, "session_reset", out) : sim_ok(out);
}

struct llama_context *skippy_session_llama_context(struct skippy_session *session) { return NULL; }

int32_t skippy_session_position(const struct skippy_session *session) {
    return session && session->live ? session->n_past : -1;
}

int32_t skippy_session_batch_size(const struct skippy_session *session) {
    return session && session->live ? session->model->n_batch : 0;
}

int32_t skippy_session_sequence_id(const struct skippy_session *session) {
    return session && session->live ? session->lane : -1;
}

static sim_status set_position(struct skippy_session *session, int32_t n_past, sim_error out) {
    if (n_past < 0 || n_past > session->model->ctx_size)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                        "set_position: %d must lie between 0 and the context of %d", n_past,
                        session->model->ctx_size);
    if (n_past < session->n_past) sim_history_cut(session, n_past);
    session->checkpoint_count = 0;
    return sim_history_write(session, n_past, NULL, 0, out);
}

sim_status skippy_session_set_position(struct skippy_session *session, int32_t n_past, sim_error out) {
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct sim_hit hit = take(session, SIM_CALL_SET_POSITION);
    if (!sim_hit_fails(&hit, SIM_BEFORE)) status = set_position(session, n_past, out);
    sim_leave(session->model);
    if (status != SKIPPY_STATUS_OK) return status;
    return hit.status ? sim_hit_fail(&hit, "set_position", out) : sim_ok(out);
}

/* ---- trim ---- */

static bool checkpoint_covers(const struct skippy_session *session, int64_t target) {
    for (int i = 0; i < session->checkpoint_count; i++) {
        const struct sim_checkpoint *held = &session->checkpoints[i];
        if (held->start <= target && target < held->start + held->count) return true;
    }
    return false;
}

static sim_status trim(struct skippy_session *session, uint64_t token_count, const struct sim_hit *hit,
                       sim_error out) {
    const struct skippy_model *model = session->model;
    int32_t window = (int32_t)model->spec.sliding_window, target = (int32_t)token_count;
    if (hit->status && hit->when == SIM_MIDDLE) {
        session->reset_required = true; /* as when restoring a checkpoint fails half-way */
        return SKIPPY_STATUS_OK;
    }
    if (session->window_min > (target > window ? target - window : 0)) {
        int32_t first = session->window_min;
        sim_history_cut(session, 0);
        sim_history_start(session);
        return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                        "trim to %d: the sliding window of %d holds nothing before %d; lane %d was cleared "
                        "and stands at position 0", target, window, first, session->lane);
    }
    /* A recurrent state cannot go back without a checkpoint: only the counter moves. */
    bool stays = model->spec.recurrent && target > 0 && target < session->n_past &&
                 !checkpoint_covers(session, target);
    uint64_t state = session->points[session->n_past].hash;
    sim_history_cut(session, target);
    if (stays) session->points[target].hash = state;
    session->checkpoint_count = 0;
    return SKIPPY_STATUS_OK;
}

sim_status skippy_trim_session(struct skippy_session *session, uint64_t token_count, sim_error out) {
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct sim_hit hit = {0};
    if (session->reset_required)
        status = sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "trim: lane %d needs a reset first", session->lane);
    else if (token_count > (uint64_t)session->n_past)
        status = sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                          "cannot trim beyond the session: asked for %llu, position is %d",
                          (unsigned long long)token_count, session->n_past);
    else {
        hit = take(session, SIM_CALL_TRIM);
        if (!sim_hit_fails(&hit, SIM_BEFORE)) status = trim(session, token_count, &hit, out);
    }
    sim_leave(session->model);
    if (status != SKIPPY_STATUS_OK) return status;
    return hit.status ? sim_hit_fail(&hit, "trim", out) : sim_ok(out);
}

static sim_status retire(struct skippy_session *session, uint64_t start, uint64_t count, sim_error out) {
    if (!session->model->spec.recurrent) return SKIPPY_STATUS_OK;
    for (int i = session->checkpoint_count - 1; i >= 0; i--) {
        const struct sim_checkpoint *held = &session->checkpoints[i];
        if ((uint64_t)held->start != start || (uint64_t)held->count != count) continue;
        memmove(&session->checkpoints[i], &session->checkpoints[i + 1],
                (size_t)(--session->checkpoint_count - i) * sizeof *held);
        return SKIPPY_STATUS_OK;
    }
    return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                    "retire: no checkpoint of %llu tokens at %llu is held; %d are",
                    (unsigned long long)count, (unsigned long long)start, session->checkpoint_count);
}

sim_status skippy_retire_verify_checkpoint(struct skippy_session *session, uint64_t token_start,
                                           uint64_t token_count, sim_error out) {
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct sim_hit hit = take(session, SIM_CALL_RETIRE);
    if (!sim_hit_fails(&hit, SIM_BEFORE)) status = retire(session, token_start, token_count, out);
    sim_leave(session->model);
    if (status != SKIPPY_STATUS_OK) return status;
    return hit.status ? sim_hit_fail(&hit, "retire", out) : sim_ok(out);
}

sim_status skippy_session_memory_used_cells(struct skippy_session *session, uint64_t *out_cells,
                                            sim_error out) {
    if (!out_cells) return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "memory_used_cells: out_cells is NULL");
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct skippy_model *model = session->model;
    if (model->spec.recurrent) {
        status = sim_fail(out, SKIPPY_STATUS_UNSUPPORTED, "a recurrent memory has no cells to count");
    } else if (model->unified) {
        *out_cells = (uint64_t)model->pool.used;
    } else {
        *out_cells = 0;
        for (int lane = 0; lane < model->lane_count; lane++)
            if (model->sessions[lane].live) *out_cells += (uint64_t)model->sessions[lane].n_past;
    }
    sim_leave(model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}
