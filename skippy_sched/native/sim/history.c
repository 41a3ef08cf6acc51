/*
 * A session's token history with its rolling hashes, and the cells it holds in a shared pool.
 * Everything that changes a position goes through here.
 */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

static void pool_take(struct sim_pool *pool, int32_t *cell) {
    *cell = pool->free_count ? pool->free_cells[--pool->free_count] : pool->fresh++;
    pool->references[*cell] = 1;
    pool->used++;
}

void sim_pool_share(struct sim_pool *pool, int32_t cell) {
    if (cell != SIM_NO_CELL) pool->references[cell]++;
}

void sim_pool_release(struct sim_pool *pool, int32_t cell) {
    if (cell == SIM_NO_CELL || --pool->references[cell]) return;
    pool->free_cells[pool->free_count++] = cell;
    pool->used--;
}

static bool history_grow(struct skippy_session *session, int64_t capacity) {
    if (capacity <= session->capacity) return true;
    int64_t grown = session->capacity < 64 ? 64 : session->capacity;
    while (grown < capacity) grown *= 2;
    int32_t *tokens = realloc(session->tokens, (size_t)grown * sizeof *tokens);
    if (tokens) session->tokens = tokens;
    struct sim_point *points = realloc(session->points, ((size_t)grown + 1) * sizeof *points);
    if (points) session->points = points;
    int32_t *cells = session->model->unified ? realloc(session->cells, (size_t)grown * sizeof *cells) : NULL;
    if (cells) session->cells = cells;
    if (!tokens || !points || (session->model->unified && !cells)) return false;
    session->capacity = (int32_t)grown;
    return true;
}

void sim_history_start(struct skippy_session *session) {
    /* A row of layer 0 must not be mistaken for one of another seed, so the seed starts the hash. */
    session->points[0] = (struct sim_point){
        .hash = sim_mix(0x5349u + ((uint64_t)session->model->spec.seed << 16)),
        .script_start = -1, .script_end = -1, .last_end = -1};
    session->n_past = 0;
    session->window_min = 0;
    session->checkpoint_count = 0;
}

sim_status sim_history_reserve(struct skippy_session *session, int64_t tokens, int64_t cells,
                               sim_error out) {
    struct skippy_model *model = session->model;
    if (session->n_past + tokens > model->ctx_size)
        return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                        "rc 1: %lld tokens at position %d of lane %d exceed its context of %d",
                        (long long)tokens, session->n_past, session->lane, model->ctx_size);
    if (model->unified && model->pool.used + cells > model->pool.size)
        return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                        "rc 1: the shared KV cache has %d of %d cells free, lane %d needs %lld",
                        model->pool.size - model->pool.used, model->pool.size, session->lane,
                        (long long)cells);
    if (!history_grow(session, session->n_past + tokens))
        return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "memory for %lld tokens ran out",
                        (long long)(session->n_past + tokens));
    return SKIPPY_STATUS_OK;
}

static void point_advance(struct skippy_session *session, int32_t position) {
    const struct sim_point *from = &session->points[position];
    struct sim_point *to = &session->points[position + 1];
    int32_t token = session->tokens[position];
    *to = *from;
    to->has_logits = false;
    to->hash = sim_roll(from->hash, token);
    if (token == SIM_TOKEN_SCRIPT) {
        to->script_start = position;
        to->script_end = -1;
    } else if (token == SIM_TOKEN_END) {
        to->last_end = position;
        if (to->script_start >= 0 && to->script_end < 0) to->script_end = position;
    }
}

static void window_move(struct skippy_session *session) {
    const struct skippy_model *model = session->model;
    if (!model->spec.sliding_window || model->swa_full) return;
    int64_t kept = session->n_past - model->spec.sliding_window - model->n_ubatch;
    if (kept > session->window_min) session->window_min = (int32_t)kept;
}

void sim_history_push(struct skippy_session *session, int32_t token, bool has_logits) {
    int32_t position = session->n_past++;
    session->tokens[position] = token;
    if (session->model->unified) {
        if (token == SIM_TOKEN_UNKNOWN) session->cells[position] = SIM_NO_CELL;
        else pool_take(&session->model->pool, &session->cells[position]);
    }
    point_advance(session, position);
    session->points[position + 1].has_logits = has_logits;
    window_move(session);
}

void sim_history_cut(struct skippy_session *session, int32_t n_past) {
    if (session->model->unified)
        for (int32_t i = n_past; i < session->n_past; i++)
            sim_pool_release(&session->model->pool, session->cells[i]);
    session->n_past = n_past;
}

sim_status sim_history_write(struct skippy_session *session, int32_t start, const int32_t *tokens,
                             int32_t count, sim_error out) {
    int64_t end = (int64_t)start + count, cells = 0;
    for (int64_t i = start; session->model->unified && i < end; i++)
        if (i >= session->n_past || session->cells[i] == SIM_NO_CELL) cells++;
    sim_status status = sim_history_reserve(session, end - session->n_past, cells, out);
    if (status != SKIPPY_STATUS_OK) return status;
    while (session->n_past < start) sim_history_push(session, SIM_TOKEN_UNKNOWN, false);
    int32_t overwritten = end < session->n_past ? count : session->n_past - start;
    for (int32_t i = 0; i < overwritten; i++) {
        if (session->model->unified && session->cells[start + i] == SIM_NO_CELL)
            pool_take(&session->model->pool, &session->cells[start + i]);
        session->tokens[start + i] = tokens[i];
    }
    for (int32_t i = start; i < session->n_past; i++) {
        bool has_logits = session->points[i + 1].has_logits;
        point_advance(session, i);
        session->points[i + 1].has_logits = has_logits;
    }
    for (int32_t i = overwritten; i < count; i++) sim_history_push(session, tokens[i], false);
    return SKIPPY_STATUS_OK;
}
