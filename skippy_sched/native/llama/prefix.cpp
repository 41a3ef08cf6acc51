// Resident prefixes: the first tokens of a session, kept under a sequence id from 2 * lanes on.
//
// In a shared pool a prefix shares the cells of the session. With KV per lane a sequence of its own would cost
// the memory of a whole lane, so there a prefix is a copy of its rows in host memory.
#include "engine.hpp"

static const int32_t sequence_ids = 256; // llama.cpp's LLAMA_MAX_SEQ

static void check_id(const skippy_model &model, const char *call, int32_t id) {
    if (id < 2 * model.lane_count) refuse("%s: sequence id %d is reserved: prefixes are at %d and above", call, id, 2 * model.lane_count);
    if (model.unified && id >= sequence_ids) refuse("%s: sequence id %d: a shared pool has ids below %d", call, id, sequence_ids);
}

static void drop(skippy_model &model, int32_t id) {
    if (!model.prefixes.erase(id)) return;
    if (model.unified) llama_memory_seq_rm(model.memory, id, -1, -1);
}

static void save(skippy_session &session, int32_t id, int32_t count) {
    skippy_model &model = *session.model;
    int32_t first = llama_memory_seq_pos_min(model.memory, session.lane);
    if (count > 0 && model.sliding_window > 0 && first > std::max(0, count - model.sliding_window + 1))
        fail(SKIPPY_STATUS_UNSUPPORTED, "save_prefix: the sliding window before token %d is no longer held; the oldest is %d", count, first);
    Prefix prefix;
    prefix.token_count = count;
    if (model.unified) {
        drop(model, id);
        if (count > 0) llama_memory_seq_cp(model.memory, session.lane, id, 0, count);
        prefix.cells = session.cells;
        prefix.cells.resize(count);
    } else if (count > 0) {
        std::vector<uint8_t> state = lane_state(session, LLAMA_STATE_SEQ_FLAGS_NONE);
        prefix.state = compose_state(model, {{state.data(), state.size(), 0, count}}, stream_count(model), nullptr);
    }
    model.prefixes[id] = std::move(prefix);
}

static const Prefix &find(const skippy_model &model, const char *call, int32_t id, const int32_t *token_ids, size_t token_count) {
    check_id(model, call, id);
    if (!token_ids || !token_count) refuse("%s: token_ids is NULL or empty", call);
    for (size_t i = 0; i < token_count; i++)
        if (token_ids[i] < 0 || token_ids[i] >= model.n_vocab)
            refuse("%s: token %zu is %d, outside the vocabulary of %d", call, i, token_ids[i], model.n_vocab);
    auto found = model.prefixes.find(id);
    if (found == model.prefixes.end()) refuse("%s: no prefix is saved under sequence id %d", call, id);
    if (token_count > static_cast<size_t>(found->second.token_count))
        refuse("%s: %zu tokens, the prefix under %d has %d", call, token_count, id, found->second.token_count);
    return found->second;
}

static void restore(skippy_session &session, const Prefix &prefix, int32_t id, const int32_t *token_ids, int32_t count) {
    skippy_model &model = *session.model;
    reset_session(session);
    if (model.unified) {
        llama_memory_seq_cp(model.memory, id, session.lane, 0, count);
        session.cells = prefix.cells;
    } else {
        load_state(session, prefix.state, LLAMA_STATE_SEQ_FLAGS_NONE, "restore_prefix");
        session.cells.resize(prefix.token_count);
    }
    session.n_past = prefix.token_count;
    if (!cut_lane(session, count))
        fail(SKIPPY_STATUS_RUNTIME_ERROR, "restore_prefix: %d tokens of the prefix cannot be kept alone; lane %d is empty and stands at 0",
             count, session.lane);
    session.history.assign(token_ids, token_ids + count);
}

skippy_status skippy_session_save_prefix(skippy_session *session, int32_t cache_seq_id, uint64_t token_count, skippy_error **out_error) {
    return guarded(out_error, [&] {
        skippy_session &target = live_session(session, "save_prefix");
        check_id(*target.model, "save_prefix", cache_seq_id);
        if (token_count > static_cast<uint64_t>(target.n_past))
            refuse("save_prefix: %llu tokens, the session has %d", static_cast<unsigned long long>(token_count), target.n_past);
        if (target.model->has_recurrent_memory())
            fail(SKIPPY_STATUS_UNSUPPORTED, "save_prefix: a recurrent state has no prefixes");
        save(target, cache_seq_id, static_cast<int32_t>(token_count));
    });
}

skippy_status skippy_session_restore_prefix(skippy_session *session, int32_t cache_seq_id, const int32_t *token_ids, size_t token_count,
                                            skippy_error **out_error) {
    return guarded(out_error, [&] {
        skippy_session &target = live_session(session, "restore_prefix");
        const Prefix &prefix = find(*target.model, "restore_prefix", cache_seq_id, token_ids, token_count);
        restore(target, prefix, cache_seq_id, token_ids, static_cast<int32_t>(token_count));
    });
}

skippy_status skippy_session_create_from_resident_prefix(skippy_model *model, int32_t cache_seq_id, const int32_t *token_ids,
                                                         size_t token_count, skippy_session **out_session, skippy_error **out_error) {
    if (out_session) *out_session = nullptr;
    return guarded(out_error, [&] {
        if (!model || !out_session) refuse("create_from_resident_prefix: model or out_session is NULL");
        const Prefix &prefix = find(*model, "create_from_resident_prefix", cache_seq_id, token_ids, token_count);
        skippy_session &session = claim_lane(*model);
        try {
            restore(session, prefix, cache_seq_id, token_ids, static_cast<int32_t>(token_count));
        } catch (...) {
            release_lane(session);
            throw;
        }
        *out_session = &session;
    });
}

skippy_status skippy_session_drop_sequence(skippy_session *session, int32_t seq_id, skippy_error **out_error) {
    return guarded(out_error, [&] {
        skippy_model &model = *live_session(session, "drop_sequence").model;
        check_id(model, "drop_sequence", seq_id);
        drop(model, seq_id);
    });
}
