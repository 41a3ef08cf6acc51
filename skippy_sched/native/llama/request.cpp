// What every executing call checks before anything moves, and the run after it.
#include "engine.hpp"

#include <climits>

skippy_session &live_session(skippy_session *session, const char *call) {
    if (!session || !session->live) refuse("%s: session is NULL or freed", call);
    return *session;
}

static void check_positions(const skippy_model &model, size_t index, const Request &request) {
    size_t width = model.position_width;
    if (!request.positions) {
        if (request.position_count) refuse("request %zu: positions are NULL, their count is %zu", index, request.position_count);
        return;
    }
    if (request.position_count != request.count * width)
        refuse("request %zu: %zu positions for %zu tokens of %zu axes", index, request.position_count, request.count, width);
    for (size_t axis = 0; axis < width; axis++)
        for (size_t i = 0; i < request.count; i++) {
            bool unused_axis = width > 1 && axis + 1 == width;
            int64_t expected = unused_axis ? 0 : request.session->n_past + static_cast<int64_t>(i);
            int32_t found = request.positions[axis * request.count + i];
            if (found != expected)
                refuse("request %zu: position %zu is %d, the session continues at %lld", index, i, found,
                       static_cast<long long>(expected));
        }
}

static void check_request(skippy_model &model, size_t index, Request &request, int64_t &total) {
    skippy_session *session = request.session;
    if (!session || !session->live) refuse("request %zu: session is NULL or freed", index);
    if (session->model != &model) refuse("request %zu: its session belongs to another model", index);
    if (!request.tokens || !request.count)
        refuse("request %zu: token_ids is %s, token_count is %zu", index, request.tokens ? "given" : "NULL", request.count);
    if (session->batch_serial == model.batch_serial)
        refuse("request %zu: the session of lane %d is already in this batch", index, session->lane);
    session->batch_serial = model.batch_serial;
    if (request.count > INT32_MAX || total + static_cast<int64_t>(request.count) > INT32_MAX)
        refuse("request %zu: the batch exceeds %d tokens", index, INT32_MAX);
    total += static_cast<int64_t>(request.count);
    check_positions(model, index, request);
    check_input_frame(model, index, request);
}

// What upstream leaves to an assertion or to the decode itself.
static void check_limits(const skippy_model &model, const std::vector<Request> &requests, int64_t total) {
    if (total > model.n_batch)
        refuse("%lld tokens exceed n_batch, which is %d: send smaller chunks", static_cast<long long>(total), model.n_batch);
    for (size_t index = 0; index < requests.size(); index++) {
        const Request &request = requests[index];
        if (request.session->reset_required)
            fail(SKIPPY_STATUS_RUNTIME_ERROR, "request %zu: lane %d needs a reset first", index, request.session->lane);
        for (size_t i = 0; i < request.count; i++)
            if (request.tokens[i] < 0 || request.tokens[i] >= model.n_vocab)
                refuse("request %zu: token %zu is %d, outside the vocabulary of %d", index, i, request.tokens[i], model.n_vocab);
        if (request.session->n_past + static_cast<int64_t>(request.count) > model.lane_cells)
            fail(SKIPPY_STATUS_RUNTIME_ERROR, "rc 1: request %zu: %zu tokens at position %d exceed the context of %d", index,
                 request.count, request.session->n_past, model.lane_cells);
    }
}

void check_requests(skippy_model &model, std::vector<Request> &requests, bool batched) {
    int64_t total = 0;
    size_t too_small = SIZE_MAX;
    model.batch_serial++;
    for (Request &request : requests)
        if (request.out_bytes) *request.out_bytes = 0;
    for (size_t index = 0; index < requests.size(); index++) {
        Request &request = requests[index];
        check_request(model, index, request, total);
        if (batched && !model.stage.source && request.input_desc->part_count != model.stage.input.part_count)
            refuse("request %zu: its frame has %u parts, the boundary %u: optional parts cannot be batched", index,
                   request.input_desc->part_count, model.stage.input.part_count);
        // Every out_bytes is filled before the answer: one retry is enough for all requests.
        if (prepare_output(model, index, request) && too_small == SIZE_MAX) too_small = index;
    }
    if (too_small != SIZE_MAX)
        fail(SKIPPY_STATUS_BUFFER_TOO_SMALL, "request %zu: the output frame has %zu bytes, the buffer %zu", too_small,
             requests[too_small].required, requests[too_small].out_capacity);
    if (batched && requests.size() > 1 && !model.stage.terminal && model.has_recurrent_memory())
        refuse("%zu requests on an exporting stage of a recurrent model: run them one at a time", requests.size());
    check_limits(model, requests, total);
}

std::vector<Row> run_requests(skippy_model &model, std::vector<Request> &requests) {
    std::vector<Row> rows(requests.size());
    for (size_t index = 0; index < requests.size(); index++) {
        const Request &request = requests[index];
        rows[index].session = request.session;
        rows[index].tokens = request.tokens;
        rows[index].count = request.count;
        rows[index].residual = frame_rows(model, request);
        rows[index].logits = model.stage.terminal ? request.logits : Logits::none;
    }
    execute(model, rows);
    for (size_t index = 0; index < requests.size(); index++) write_output_payload(model, requests[index], requests[index].session->exported);
    return rows;
}
