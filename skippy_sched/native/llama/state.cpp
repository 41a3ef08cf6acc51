// Export and import of a session's state and of pages of its KV cache.
//
// A payload is a sealed header, the tokens of the range, and llama.cpp's own bytes. The seal is checked before
// llama.cpp sees anything; it tells a damaged payload and another model's, it is no protection against forgery.
#include "engine.hpp"

#include <algorithm>
#include <cstring>

namespace {

enum class Kind : uint32_t { partial = 1, full, recurrent, page };

const uint32_t payload_magic = 0x536b7053, payload_version = 1;

struct Header {
    uint32_t magic, version;
    Kind kind;
    int32_t layer_start, layer_end;
    int32_t first, end; // positions
    uint32_t token_count;
    uint64_t state_bytes, model, seal;
};

struct Payload {
    Header header;
    std::vector<int32_t> tokens;
    std::vector<uint8_t> state;
};

// Four independent lanes of multiply and rotate: gigabytes a second, enough to notice damage.
uint64_t digest(const uint8_t *data, size_t size, uint64_t start) {
    uint64_t lanes[4] = {start, start ^ 0x9e3779b97f4a7c15u, ~start, size};
    for (; size >= 32; size -= 32, data += 32)
        for (size_t i = 0; i < 4; i++) {
            uint64_t word;
            memcpy(&word, data + 8 * i, 8);
            lanes[i] = (lanes[i] ^ word) * 0x9fb21c651e98df25u;
            lanes[i] = lanes[i] << 29 | lanes[i] >> 35;
        }
    uint64_t result = lanes[0] ^ lanes[1] * 3 ^ lanes[2] * 5 ^ lanes[3] * 7;
    for (size_t i = 0; i < size; i++) result = (result ^ data[i]) * 0x100000001b3u;
    return (result ^ result >> 32) * 0x9fb21c651e98df25u;
}

uint64_t model_tag(const skippy_model &model) {
    const llama_model *llama = model.llama.get();
    std::string text = model.description + ";" + model.file.model_digest + ";" + std::to_string(llama_model_size(llama)) + ";" +
                       std::to_string(llama_model_n_params(llama)) + ";" + std::to_string(model.n_vocab) + ";" + llama_version();
    return digest(reinterpret_cast<const uint8_t *>(text.data()), text.size(), 1);
}

size_t payload_bytes(const Header &header) { return sizeof header + 4 * size_t{header.token_count} + header.state_bytes; }

uint64_t seal_of(Header header, const uint8_t *body) {
    header.seal = 0;
    uint64_t start = digest(reinterpret_cast<const uint8_t *>(&header), sizeof header, 2);
    return digest(body, payload_bytes(header) - sizeof header, start);
}

Header header_for(const skippy_session &session, Kind kind, int32_t first, int32_t end, size_t state_bytes) {
    const skippy_model &model = *session.model;
    int32_t known = std::min<int32_t>(end, static_cast<int32_t>(session.history.size()));
    uint32_t tokens = static_cast<uint32_t>(std::max(0, known - first));
    return {payload_magic, payload_version, kind, model.stage.layer_start, model.stage.layer_end, first, end, tokens, state_bytes, model_tag(model), 0};
}

uint8_t *state_of(const Header &header, void *output) { return static_cast<uint8_t *>(output) + sizeof header + 4 * size_t{header.token_count}; }

// The state is in its place already; the tokens, the seal and the header follow.
void finish_payload(const skippy_session &session, Header header, void *output) {
    uint8_t *body = static_cast<uint8_t *>(output) + sizeof header;
    if (header.token_count) memcpy(body, session.history.data() + header.first, 4 * size_t{header.token_count});
    header.seal = seal_of(header, body);
    memcpy(output, &header, sizeof header);
}

Payload read_payload(const skippy_model &model, Kind kind, const void *input, size_t bytes, const char *call) {
#define damaged(...) fail(SKIPPY_STATUS_RUNTIME_ERROR, __VA_ARGS__)
    Payload payload;
    Header &header = payload.header;
    if (!input || bytes < sizeof header) damaged("%s: %zu bytes cannot hold a payload", call, input ? bytes : 0);
    memcpy(&header, input, sizeof header);
    const uint8_t *body = static_cast<const uint8_t *>(input) + sizeof header;
    if (header.magic != payload_magic || header.version != payload_version) damaged("%s: not a payload of this engine and version", call);
    if (header.kind != kind) damaged("%s: the payload is of kind %u, expected %u", call, static_cast<uint32_t>(header.kind), static_cast<uint32_t>(kind));
    if (header.state_bytes > bytes || payload_bytes(header) != bytes) damaged("%s: %zu bytes: the payload is cut or too long", call, bytes);
    if (header.seal != seal_of(header, body)) damaged("%s: the seal is wrong: the payload is damaged", call);
    if (header.model != model_tag(model) || header.layer_start != model.stage.layer_start || header.layer_end != model.stage.layer_end)
        damaged("%s: the payload is of another model, or of layers [%d, %d)", call, header.layer_start, header.layer_end);
    if (header.first < 0 || header.end < header.first || header.end > model.lane_cells || header.token_count > static_cast<uint32_t>(header.end - header.first))
        damaged("%s: positions [%d, %d) do not fit a context of %d", call, header.first, header.end, model.lane_cells);
    size_t token_bytes = 4 * size_t{header.token_count};
    payload.tokens.resize(header.token_count);
    if (token_bytes) memcpy(payload.tokens.data(), body, token_bytes);
    for (int32_t token : payload.tokens)
        if (token < 0 || token >= model.n_vocab) damaged("%s: token %d is outside the vocabulary of %d", call, token, model.n_vocab);
    payload.state.assign(body + token_bytes, body + token_bytes + header.state_bytes);
    return payload;
}

void check_range(const skippy_model &model, const char *call, int32_t start, int32_t end) {
    if (start != model.stage.layer_start || end != model.stage.layer_end)
        refuse("%s: layers [%d, %d) were asked for, this stage has exactly [%d, %d)", call, start, end, model.stage.layer_start, model.stage.layer_end);
}

void give_size(const char *call, size_t needed, const void *output, size_t capacity, size_t *out_bytes) {
    *out_bytes = needed;
    if (needed && (!output || capacity < needed))
        fail(SKIPPY_STATUS_BUFFER_TOO_SMALL, "%s: %zu bytes are needed, the buffer holds %zu", call, needed, output ? capacity : 0);
}

llama_state_seq_flags flags_of(Kind kind) { return kind == Kind::full ? LLAMA_STATE_SEQ_FLAGS_NONE : LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY; }

void export_any(skippy_session &session, Kind kind, void *output, size_t capacity, size_t *out_bytes, const char *call) {
    llama_context *context = session.model->context.get();
    size_t state_bytes = llama_state_seq_get_size_ext(context, session.lane, flags_of(kind));
    Header header = header_for(session, kind, 0, session.n_past, state_bytes);
    give_size(call, payload_bytes(header), output, capacity, out_bytes);
    if (llama_state_seq_get_data_ext(context, state_of(header, output), state_bytes, session.lane, flags_of(kind)) != state_bytes)
        fail(SKIPPY_STATUS_RUNTIME_ERROR, "%s: the state of lane %d cannot be read", call, session.lane);
    finish_payload(session, header, output);
}

// The lane holds what the payload says; so do position and history.
void adopt(skippy_session &session, std::vector<int32_t> history) {
    session.n_past = llama_memory_seq_pos_max(session.model->memory, session.lane) + 1;
    forget_after(session, 0);
    session.history = std::move(history);
    session.cells = {};
    session.cells.resize(session.n_past);
    session.reset_required = false;
}

void import_any(skippy_session &session, Kind kind, const void *input, size_t bytes, const char *call) {
    Payload payload = read_payload(*session.model, kind, input, bytes, call);
    load_state(session, payload.state, flags_of(kind), call);
    adopt(session, std::move(payload.tokens));
}

// ---- pages ------------------------------------------------------------------------------------------------------

skippy_kv_page_component_desc component(const skippy_kv_page_desc &page, uint32_t role, uint64_t offset, uint64_t bytes) {
    return {SKIPPY_KV_PAGE_VERSION, role, page.token_start, page.token_count, page.layer_count, page.k_type, page.v_type, page.k_row_bytes,
            page.v_row_bytes, page.v_element_bytes, 0, offset, bytes, page.flags};
}

skippy_kv_page_desc describe(const skippy_model &model, const Header &header, const StateShape &shape) {
    skippy_kv_page_desc page{};
    page.version = SKIPPY_KV_PAGE_VERSION;
    page.layer_start = header.layer_start;
    page.layer_end = header.layer_end;
    page.token_start = static_cast<uint64_t>(header.first);
    page.token_count = static_cast<uint64_t>(header.end - header.first);
    page.layer_count = shape.layer_count;
    page.k_type = shape.k_type;
    page.v_type = shape.v_type;
    page.k_row_bytes = shape.k_row_bytes;
    page.v_row_bytes = shape.v_row_bytes;
    page.v_element_bytes = shape.v_element_bytes;
    page.flags = shape.v_transposed ? SKIPPY_KV_PAGE_FLAG_V_TRANSPOSED : 0;
    page.payload_bytes = payload_bytes(header);
    page.codec = SKIPPY_KV_PAGE_CODEC_SINGLE_V1;
    if (model.sliding_window <= 0 || shape.block_ends.size() != 2) return page;
    page.codec = SKIPPY_KV_PAGE_CODEC_ISWA_COMPOSITE_V1;
    page.component_count = 2;
    uint64_t base = page.payload_bytes - (shape.block_ends[1] - shape.block_ends[0]);
    page.components[0] = component(page, SKIPPY_KV_PAGE_ROLE_BASE, 0, base);
    page.components[1] = component(page, SKIPPY_KV_PAGE_ROLE_SWA, base, page.payload_bytes - base);
    return page;
}

void check_page(const skippy_session &session, const skippy_kv_page_desc &desc, const void *input, size_t bytes) {
    const skippy_model &model = *session.model;
    if (desc.version != SKIPPY_KV_PAGE_VERSION) refuse("import_kv_page: descriptor version %u, expected %d", desc.version, SKIPPY_KV_PAGE_VERSION);
    check_range(model, "import_kv_page", desc.layer_start, desc.layer_end);
    if (!input || desc.payload_bytes != bytes)
        refuse("import_kv_page: %zu bytes, the descriptor says %llu", input ? bytes : 0, static_cast<unsigned long long>(desc.payload_bytes));
    bool composite = desc.codec == SKIPPY_KV_PAGE_CODEC_ISWA_COMPOSITE_V1;
    if (desc.codec > SKIPPY_KV_PAGE_CODEC_ISWA_COMPOSITE_V1 || composite != (model.sliding_window > 0))
        refuse("import_kv_page: codec %u does not fit a model with a sliding window of %d", desc.codec, model.sliding_window);
    if (composite && session.n_past) refuse("import_kv_page: a composite page needs a fresh session, this one is at %d", session.n_past);
    if (desc.token_start > static_cast<uint64_t>(session.n_past))
        refuse("import_kv_page: the page starts at %llu, the session ends at %d: pages come in order",
               static_cast<unsigned long long>(desc.token_start), session.n_past);
}

void import_page(skippy_session &session, const skippy_kv_page_desc &desc, const void *input, size_t bytes) {
    skippy_model &model = *session.model;
    Payload page = read_payload(model, Kind::page, input, bytes, "import_kv_page");
    int32_t first = page.header.first, end = page.header.end, n_past = session.n_past;
    if (static_cast<uint64_t>(first) != desc.token_start || static_cast<uint64_t>(end - first) != desc.token_count)
        fail(SKIPPY_STATUS_RUNTIME_ERROR, "import_kv_page: the payload has positions [%d, %d), the descriptor says otherwise", first, end);
    std::vector<StateRange> ranges = {{page.state.data(), page.state.size(), first, end}};
    std::vector<uint8_t> own;
    if (n_past > 0) {
        own = lane_state(session, LLAMA_STATE_SEQ_FLAGS_NONE);
        ranges.push_back({own.data(), own.size(), 0, first});
        ranges.push_back({own.data(), own.size(), end, n_past});
    }
    std::vector<uint8_t> merged = compose_state(model, ranges, stream_count(model), nullptr);
    std::vector<int32_t> history = session.history;
    size_t start = static_cast<size_t>(first);
    if (history.size() >= start) { // what the page tells of its tokens replaces what was there
        history.resize(std::max(history.size(), start + page.tokens.size()));
        std::copy(page.tokens.begin(), page.tokens.end(), history.begin() + first);
    }
    load_state(session, merged, LLAMA_STATE_SEQ_FLAGS_NONE, "import_kv_page");
    adopt(session, std::move(history));
}

} // namespace

skippy_status skippy_export_state(skippy_session *session, int32_t layer_start, int32_t layer_end, void *output, size_t capacity,
                                  size_t *out_bytes, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!out_bytes) refuse("export_state: out_bytes is NULL");
        skippy_session &source = live_session(session, "export_state");
        check_range(*source.model, "export_state", layer_start, layer_end);
        export_any(source, Kind::partial, output, capacity, out_bytes, "export_state");
    });
}

skippy_status skippy_export_full_state(skippy_session *session, int32_t layer_start, int32_t layer_end, void *output, size_t capacity,
                                       size_t *out_bytes, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!out_bytes) refuse("export_full_state: out_bytes is NULL");
        skippy_session &source = live_session(session, "export_full_state");
        check_range(*source.model, "export_full_state", layer_start, layer_end);
        export_any(source, Kind::full, output, capacity, out_bytes, "export_full_state");
    });
}

skippy_status skippy_export_recurrent_state(skippy_session *session, void *output, size_t capacity, size_t *out_bytes,
                                            skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!out_bytes) refuse("export_recurrent_state: out_bytes is NULL");
        skippy_session &source = live_session(session, "export_recurrent_state");
        *out_bytes = 0;
        if (source.model->has_recurrent_memory()) export_any(source, Kind::recurrent, output, capacity, out_bytes, "export_recurrent_state");
    });
}

skippy_status skippy_import_state(skippy_session *session, int32_t layer_start, int32_t layer_end, const void *input, size_t input_bytes,
                                  skippy_error **out_error) {
    return guarded(out_error, [&] {
        skippy_session &target = live_session(session, "import_state");
        check_range(*target.model, "import_state", layer_start, layer_end);
        import_any(target, Kind::partial, input, input_bytes, "import_state");
    });
}

skippy_status skippy_import_full_state(skippy_session *session, int32_t layer_start, int32_t layer_end, const void *input,
                                       size_t input_bytes, skippy_error **out_error) {
    return guarded(out_error, [&] {
        skippy_session &target = live_session(session, "import_full_state");
        check_range(*target.model, "import_full_state", layer_start, layer_end);
        import_any(target, Kind::full, input, input_bytes, "import_full_state");
    });
}

skippy_status skippy_import_recurrent_state(skippy_session *session, const void *input, size_t input_bytes, skippy_error **out_error) {
    return guarded(out_error, [&] {
        skippy_session &target = live_session(session, "import_recurrent_state");
        if (!target.model->has_recurrent_memory())
            fail(SKIPPY_STATUS_UNSUPPORTED, "import_recurrent_state: this model has no recurrent state");
        import_any(target, Kind::recurrent, input, input_bytes, "import_recurrent_state");
    });
}

skippy_status skippy_export_kv_page(skippy_session *session, int32_t layer_start, int32_t layer_end, uint64_t token_start,
                                    uint64_t token_count, skippy_kv_page_desc *out_desc, void *output, size_t capacity, size_t *out_bytes,
                                    skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!out_desc || !out_bytes) refuse("export_kv_page: out_desc or out_bytes is NULL");
        *out_bytes = 0;
        skippy_session &source = live_session(session, "export_kv_page");
        skippy_model &model = *source.model;
        check_range(model, "export_kv_page", layer_start, layer_end);
        uint64_t n_past = static_cast<uint64_t>(source.n_past);
        if (!token_count || token_start > n_past || token_count > n_past - token_start)
            refuse("export_kv_page: %llu tokens from %llu, the session has %d", static_cast<unsigned long long>(token_count),
                   static_cast<unsigned long long>(token_start), source.n_past);
        int32_t first = static_cast<int32_t>(token_start), end = static_cast<int32_t>(token_start + token_count);
        StateShape shape;
        std::vector<uint8_t> whole = lane_state(source, LLAMA_STATE_SEQ_FLAGS_NONE);
        std::vector<uint8_t> rows = compose_state(model, {{whole.data(), whole.size(), first, end}}, 1, &shape);
        Header header = header_for(source, Kind::page, first, end, rows.size());
        *out_desc = describe(model, header, shape);
        give_size("export_kv_page", out_desc->payload_bytes, output, capacity, out_bytes);
        std::copy(rows.begin(), rows.end(), state_of(header, output));
        finish_payload(source, header, output);
    });
}

skippy_status skippy_import_kv_page(skippy_session *session, const skippy_kv_page_desc *desc, const void *input, size_t input_bytes,
                                    skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!desc) refuse("import_kv_page: desc is NULL");
        skippy_session &target = live_session(session, "import_kv_page");
        if (target.model->has_recurrent_memory()) fail(SKIPPY_STATUS_UNSUPPORTED, "import_kv_page: a recurrent state has no pages");
        check_page(target, *desc, input, input_bytes);
        import_page(target, *desc, input, input_bytes);
    });
}
