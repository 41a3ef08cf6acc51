// Sessions and their lanes: create, free, reset, positions, trim, signals, cells in use.
#include "engine.hpp"

#include <algorithm>
#include <climits>
#include <random>

static uint64_t fresh_random() {
    static thread_local std::random_device device;
    return (uint64_t{device()} << 32) | device();
}

skippy_session &claim_lane(skippy_model &model) {
    std::lock_guard<std::mutex> lock(model.lanes_mutex);
    for (size_t lane = 0; lane < model.sessions.size(); lane++) {
        skippy_session &session = model.sessions[lane];
        if (session.live) continue;
        session = skippy_session{};
        session.model = &model;
        session.lane = static_cast<int32_t>(lane);
        session.live = true;
        session.random_base = fresh_random();
        return session;
    }
    fail(SKIPPY_STATUS_RUNTIME_ERROR, "no skippy execution lane is available: all %d are taken", model.lane_count);
}

void release_lane(skippy_session &session) {
    std::lock_guard<std::mutex> lock(session.model->lanes_mutex);
    session.live = false;
}

void forget_after(skippy_session &session, int32_t length) {
    size_t kept = static_cast<size_t>(length);
    bool cut = session.history.size() > kept;
    if (cut) session.history.resize(kept);
    while (!session.signals.empty() && session.signals.back().position > length) session.signals.pop_back();
    session.checkpoints.clear();
    session.logits_row = -1;
    if (!cut) return;
    session.sampler.reset();
    rewind_chat(session);
}

void reset_session(skippy_session &session) {
    llama_memory_seq_rm(session.model->memory, session.lane, -1, -1); // a whole sequence always goes
    session.n_past = 0;
    session.cells = {};
    session.history.clear();
    session.sampler.reset();
    session.signals.clear();
    session.checkpoints.clear();
    session.logits_row = -1;
    session.reset_required = false;
    session.random_base = fresh_random();
    rewind_chat(session);
}

skippy_status skippy_session_create(skippy_model *model, skippy_session **out_session, skippy_error **out_error) {
    if (out_session) *out_session = nullptr;
    return guarded(out_error, [&] {
        if (!model || !out_session) refuse("session_create: model or out_session is NULL");
        skippy_session &session = claim_lane(*model);
        reset_session(session);
        *out_session = &session;
    });
}

skippy_status skippy_session_free(skippy_session *session, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!session) return;
        live_session(session, "session_free");
        reset_session(*session);
        session->chat.reset();
        session->mask.clear();
        release_lane(*session);
    });
}

skippy_status skippy_session_reset(skippy_session *session, skippy_error **out_error) {
    return guarded(out_error, [&] { reset_session(live_session(session, "session_reset")); });
}

llama_context *skippy_session_llama_context(skippy_session *session) {
    return session && session->live ? session->model->context.get() : nullptr;
}

int32_t skippy_session_position(const skippy_session *session) { return session && session->live ? session->n_past : -1; }

int32_t skippy_session_batch_size(const skippy_session *session) {
    return session && session->live ? session->model->n_batch : 0;
}

int32_t skippy_session_sequence_id(const skippy_session *session) { return session && session->live ? session->lane : -1; }

skippy_status skippy_session_set_position(skippy_session *session, int32_t n_past, skippy_error **out_error) {
    return guarded(out_error, [&] {
        skippy_session &target = live_session(session, "set_position");
        if (n_past < 0 || n_past > target.model->lane_cells)
            refuse("set_position: %d must lie between 0 and the context of %d", n_past, target.model->lane_cells);
        target.checkpoints.clear();
        if (n_past == target.n_past) return;
        target.n_past = n_past;
        forget_after(target, n_past);
    });
}

// ---- trim and checkpoints -----------------------------------------------------------------------------

static const Checkpoint *covering(const skippy_session &session, int32_t target) {
    for (auto held = session.checkpoints.rbegin(); held != session.checkpoints.rend(); ++held)
        if (held->start <= target && target < held->start + held->count) return &*held;
    return nullptr;
}

// Recurrent memory cannot be cut: put back the state before the window and compute the kept tokens again.
static void restore_checkpoint(skippy_session &session, const Checkpoint &held, int32_t target) {
    skippy_model &model = *session.model;
    Checkpoint saved = held;
    std::vector<int32_t> kept(session.history.begin() + saved.start, session.history.begin() + target);
    session.reset_required = true; // until the lane is whole again
    if (!llama_state_seq_set_data_ext(model.context.get(), saved.state.data(), saved.state.size(), session.lane,
                                      LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) ||
        !llama_memory_seq_rm(model.memory, session.lane, saved.start, -1))
        fail(SKIPPY_STATUS_RUNTIME_ERROR, "trim: the checkpoint at %d cannot be restored; lane %d needs a reset", saved.start,
             session.lane);
    session.n_past = saved.start;
    forget_after(session, saved.start);
    if (!kept.empty()) {
        std::vector<Row> rows(1);
        rows[0].session = &session;
        rows[0].tokens = kept.data();
        rows[0].count = kept.size();
        execute(model, rows);
    }
    session.reset_required = false;
}

static void trim(skippy_session &session, int32_t target) {
    skippy_model &model = *session.model;
    if (target == session.n_past) return session.checkpoints.clear();
    if (model.has_recurrent_memory() && target > 0) {
        const Checkpoint *held = covering(session, target);
        bool replayable = held && session.history.size() >= static_cast<size_t>(session.n_past) && model.stage.source;
        if (replayable) return restore_checkpoint(session, *held, target);
    }
    int32_t window = model.sliding_window;
    if (!cut_lane(session, target))
        fail(SKIPPY_STATUS_RUNTIME_ERROR,
             "trim to %d: %s; lane %d was cleared and stands at position 0", target,
             model.has_recurrent_memory() ? "a recurrent state cannot go back without a checkpoint"
                                          : ("the sliding window of " + std::to_string(window) + " is no longer whole there").c_str(),
             session.lane);
}

skippy_status skippy_trim_session(skippy_session *session, uint64_t token_count, skippy_error **out_error) {
    return guarded(out_error, [&] {
        skippy_session &target = live_session(session, "trim");
        if (target.reset_required) fail(SKIPPY_STATUS_RUNTIME_ERROR, "trim: lane %d needs a reset first", target.lane);
        if (token_count > static_cast<uint64_t>(target.n_past))
            refuse("cannot trim beyond the session: asked for %llu, position is %d",
                   static_cast<unsigned long long>(token_count), target.n_past);
        trim(target, static_cast<int32_t>(token_count));
    });
}

skippy_status skippy_retire_verify_checkpoint(skippy_session *session, uint64_t token_start, uint64_t token_count,
                                              skippy_error **out_error) {
    return guarded(out_error, [&] {
        skippy_session &target = live_session(session, "retire_verify_checkpoint");
        if (!target.model->has_recurrent_memory()) return;
        auto &held = target.checkpoints;
        auto match = std::find_if(held.begin(), held.end(), [&](const Checkpoint &c) {
            return static_cast<uint64_t>(c.start) == token_start && static_cast<uint64_t>(c.count) == token_count;
        });
        if (match == held.end())
            refuse("retire: no checkpoint of %llu tokens at %llu is held; %zu are", static_cast<unsigned long long>(token_count),
                   static_cast<unsigned long long>(token_start), held.size());
        held.erase(match);
    });
}

// ---- cells ------------------------------------------------------------------------------------------------

skippy_status skippy_session_memory_used_cells(skippy_session *session, uint64_t *out_cells, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!out_cells) refuse("memory_used_cells: out_cells is NULL");
        skippy_model &model = *live_session(session, "memory_used_cells").model;
        if (model.has_recurrent_memory())
            fail(SKIPPY_STATUS_UNSUPPORTED, "memory_used_cells: a recurrent memory has no cells to count");
        std::vector<const CellRuns *> sequences;
        for (const skippy_session &each : model.sessions)
            if (each.live) sequences.push_back(&each.cells);
        for (const auto &prefix : model.prefixes) sequences.push_back(&prefix.second.cells);
        *out_cells = count_cells(sequences);
    });
}

// ---- signals ------------------------------------------------------------------------------------------------

float *logits_of(skippy_session &session) {
    skippy_model &model = *session.model;
    if (session.logits_row < 0 || session.logits_serial != model.decode_serial) return nullptr;
    return llama_get_logits_ith(model.context.get(), session.logits_row);
}

// From the first question on, sampling records a signal for each token; until then the last row is asked.
static void catch_up_signals(skippy_session &session) {
    session.records_signals = true;
    if (!session.signals.empty() && session.signals.back().position == session.n_past) return;
    const float *logits = logits_of(session);
    if (!logits) return;
    skippy_token_signal signal = compute_signal(logits, session.model->n_vocab);
    session.signals.push_back({session.n_past, signal.top_token, signal});
}

skippy_status skippy_session_last_token_signal(skippy_session *session, skippy_token_signal *out_signal,
                                               skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!out_signal) refuse("last_token_signal: out_signal is NULL");
        skippy_session &target = live_session(session, "last_token_signal");
        catch_up_signals(target);
        if (target.signals.empty()) refuse("last_token_signal: lane %d has no logits yet", target.lane);
        *out_signal = target.signals.back().signal;
    });
}

skippy_status skippy_session_signal_window(skippy_session *session, uint32_t window_tokens,
                                           skippy_generation_signal_window *out_window, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!out_window || !window_tokens) refuse("signal_window: out_window is NULL or window_tokens is 0");
        skippy_session &target = live_session(session, "signal_window");
        catch_up_signals(target);
        size_t count = std::min<size_t>(window_tokens, target.signals.size());
        if (!count) refuse("signal_window: lane %d has no logits yet", target.lane);
        const float high_entropy = 4.0f; // nats; the ABI's bound
        *out_window = {};
        out_window->token_count = static_cast<uint32_t>(count);
        const SignalAt *window = target.signals.data() + (target.signals.size() - count);
        out_window->min_margin = window[0].signal.margin;
        for (size_t i = 0; i < count; i++) {
            const skippy_token_signal &signal = window[i].signal;
            out_window->mean_entropy += signal.entropy / static_cast<float>(count);
            out_window->mean_margin += signal.margin / static_cast<float>(count);
            out_window->max_entropy = std::max(out_window->max_entropy, signal.entropy);
            out_window->min_margin = std::min(out_window->min_margin, signal.margin);
            out_window->high_entropy_count += signal.entropy > high_entropy;
            out_window->repetition_count += i > 0 && window[i].token == window[i - 1].token;
        }
    });
}
