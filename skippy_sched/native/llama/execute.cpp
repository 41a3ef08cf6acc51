// One llama_decode over the rows of any number of sessions, and positions that stay true whatever happens.
#include "engine.hpp"

#include <algorithm>
#include <cstring>

namespace {

struct Batch { // the arrays of a llama_batch
    std::vector<llama_token> tokens;
    std::vector<float> residual;
    std::vector<llama_pos> positions;
    std::vector<int32_t> sequence_counts;
    std::vector<llama_seq_id> lanes;
    std::vector<llama_seq_id *> lane_pointers;
    std::vector<int8_t> outputs;
};

// KV per lane puts only runs of consecutive, ascending sequence ids into one graph.
std::vector<Row *> by_lane(std::vector<Row> &rows) {
    std::vector<Row *> order;
    for (Row &row : rows) order.push_back(&row);
    std::sort(order.begin(), order.end(), [](const Row *a, const Row *b) { return a->session->lane < b->session->lane; });
    return order;
}

void append_row(const skippy_model &model, Row &row, Batch &batch) {
    row.start = row.session->n_past;
    row.batch_row = static_cast<int32_t>(batch.positions.size());
    bool all = row.logits == Logits::all;
    for (size_t i = 0; i < row.count; i++) {
        batch.positions.push_back(row.start + static_cast<llama_pos>(i));
        batch.lanes.push_back(row.session->lane);
        batch.outputs.push_back(all || (row.logits == Logits::last && i + 1 == row.count));
    }
    if (!row.residual) {
        batch.tokens.insert(batch.tokens.end(), row.tokens, row.tokens + row.count);
        return;
    }
    size_t before = batch.residual.size(), floats = row.count * static_cast<size_t>(model.n_embd);
    batch.residual.resize(before + floats);
    memcpy(batch.residual.data() + before, row.residual, floats * sizeof(float));
}

llama_batch view(const skippy_model &model, Batch &batch) {
    size_t count = batch.positions.size();
    batch.sequence_counts.assign(count, 1);
    batch.lane_pointers.resize(count);
    for (size_t i = 0; i < count; i++) batch.lane_pointers[i] = &batch.lanes[i];
    bool embedded = !batch.residual.empty();
    if (embedded && model.position_width > 1) { // planar; the last axis of a text position is 0
        std::vector<llama_pos> plane = batch.positions;
        for (size_t axis = 1; axis + 1 < model.position_width; axis++)
            batch.positions.insert(batch.positions.end(), plane.begin(), plane.end());
        batch.positions.resize(count * model.position_width, 0);
    }
    llama_batch raw{};
    raw.n_tokens = static_cast<int32_t>(count);
    raw.token = embedded ? nullptr : batch.tokens.data();
    raw.embd = embedded ? batch.residual.data() : nullptr;
    raw.pos = batch.positions.data();
    raw.n_seq_id = batch.sequence_counts.data();
    raw.seq_id = batch.lane_pointers.data();
    raw.logits = batch.outputs.data();
    return raw;
}

// set_position only moves a counter; the cells follow here, when they are needed.
void align_lane(const Row &row) {
    skippy_session &session = *row.session;
    int32_t cells = llama_memory_seq_pos_max(session.model->memory, session.lane) + 1;
    if (cells == session.n_past) return;
    if (cells < session.n_past)
        fail(SKIPPY_STATUS_RUNTIME_ERROR, "lane %d stands at position %d, its memory ends at %d: reset the session",
             session.lane, session.n_past, cells);
    int32_t wanted = session.n_past;
    if (!cut_lane(session, wanted))
        fail(SKIPPY_STATUS_RUNTIME_ERROR, "lane %d cannot go back to position %d: it was cleared and stands at 0",
             session.lane, wanted);
}

// After a failed decode earlier graphs of it may have left cells behind.
std::string settle(const std::vector<Row *> &rows) {
    std::string cleared;
    for (const Row *row : rows) {
        skippy_session &session = *row->session;
        if (llama_memory_seq_pos_max(session.model->memory, session.lane) + 1 <= session.n_past) continue;
        if (!cut_lane(session, session.n_past)) cleared += " " + std::to_string(session.lane);
    }
    return cleared.empty() ? cleared : "; these lanes had to be cleared and stand at 0:" + cleared;
}

[[noreturn]] void decode_failed(skippy_model &model, const std::vector<Row *> &rows, int32_t token_count, const char *what) {
    const skippy_session &first = *rows.front()->session;
    int32_t start = rows.front()->start, n_past = first.n_past;
    int32_t top = llama_memory_seq_pos_max(model.memory, first.lane);
    std::string after = settle(rows), log = take_llama_log();
    fail(SKIPPY_STATUS_RUNTIME_ERROR,
         "decode failed: %s, n_tokens %d, %zu sessions, first position %d, n_past %d, sequence %d, highest position in "
         "memory %d%s%s%s",
         what, token_count, rows.size(), start, n_past, first.lane, top, after.c_str(), log.empty() ? "" : ": ", log.c_str());
}

void decode(skippy_model &model, const std::vector<Row *> &rows, Batch &batch) {
    llama_batch raw = view(model, batch);
    take_llama_log();
    char what[64];
    try {
        int32_t result = llama_decode(model.context.get(), raw);
        if (result == 0) return;
        snprintf(what, sizeof what, "rc %d%s", result, result == 1 ? " (no free cells)" : "");
    } catch (const std::exception &error) {
        snprintf(what, sizeof what, "%s", error.what());
    }
    decode_failed(model, rows, raw.n_tokens, what);
}

} // namespace

bool cut_lane(skippy_session &session, int32_t length) {
    skippy_model &model = *session.model;
    int32_t first = llama_memory_seq_pos_min(model.memory, session.lane);
    // Sliding-window layers forget silently: a cache of the window's size overwrites, and a loaded state holds only
    // the last window. The token at `length` looks at the `sliding_window` positions that end with its own.
    bool window_lost = length > 0 && model.sliding_window > 0 && first > std::max(0, length - model.sliding_window + 1);
    bool cut = !window_lost && llama_memory_seq_rm(model.memory, session.lane, length, -1);
    if (!cut) {
        llama_memory_seq_rm(model.memory, session.lane, -1, -1);
        length = 0;
    }
    session.n_past = std::min(session.n_past, length);
    session.cells.resize(std::min(session.cells.length(), length));
    forget_after(session, session.n_past);
    return cut;
}

void execute(skippy_model &model, std::vector<Row> &rows) {
    std::vector<Row *> order = by_lane(rows);
    Batch batch;
    for (Row *row : order) {
        align_lane(*row);
        append_row(model, *row, batch);
    }
    if (!model.stage.terminal) start_capture(model);
    model.decode_serial++;
    decode(model, order, batch);
    for (Row *row : order) {
        skippy_session &session = *row->session;
        session.n_past += static_cast<int32_t>(row->count);
        session.history.insert(session.history.end(), row->tokens, row->tokens + row->count);
        session.cells.resize(session.n_past);
        if (row->logits == Logits::none) continue;
        session.logits_serial = model.decode_serial;
        session.logits_row = row->batch_row + static_cast<int32_t>(row->count) - 1;
    }
    if (!model.stage.terminal) distribute_capture(model, order);
}
