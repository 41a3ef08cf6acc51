/*
 * State and KV pages: one payload format, a header and a range of the token history.
 * A checksum over all of it tells a damaged payload; the engine's seed tells another model's.
 */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

enum payload_kind { KIND_STATE = 1, KIND_FULL_STATE, KIND_RECURRENT, KIND_PAGE, KIND_WINDOW };
static const char *const KIND_NAMES[] = {"nothing", "state", "full state", "recurrent state", "KV page", "KV window"};
static const uint32_t PAYLOAD_MAGIC = 0x5353696d, PAYLOAD_VERSION = 1;

struct payload_header {
    uint32_t magic, version, kind, layer_start, layer_end, reserved;
    uint64_t seed, start, count;
    uint64_t final_hash; /* of the whole history at the end of the range */
    uint64_t checksum;   /* over the header with 0 here, then the tokens */
};

#define REFUSE(...) return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, __VA_ARGS__)

static size_t payload_bytes(uint64_t count) { return sizeof(struct payload_header) + 4 * (size_t)count; }

static uint64_t payload_checksum(struct payload_header header, const uint8_t *tokens) {
    header.checksum = 0;
    const uint8_t *bytes = (const uint8_t *)&header;
    uint64_t sum = 1;
    for (size_t i = 0; i < sizeof header; i++) sum = sim_roll(sum, bytes[i]);
    for (uint64_t i = 0; i < header.count; i++) {
        int32_t token;
        memcpy(&token, tokens + 4 * i, 4);
        sum = sim_roll(sum, token);
    }
    return sum;
}

static void payload_write(const struct skippy_session *session, enum payload_kind kind, int32_t start,
                          int32_t count, uint8_t *output) {
    const struct skippy_model *model = session->model;
    struct payload_header header = {
        .magic = PAYLOAD_MAGIC, .version = PAYLOAD_VERSION, .kind = kind,
        .layer_start = (uint32_t)model->layer_start, .layer_end = (uint32_t)model->layer_end,
        .seed = (uint64_t)model->spec.seed, .start = (uint64_t)start, .count = (uint64_t)count,
        .final_hash = session->points[start + count].hash};
    memcpy(output + sizeof header, session->tokens + start, 4 * (size_t)count);
    header.checksum = payload_checksum(header, output + sizeof header);
    memcpy(output, &header, sizeof header);
}

static sim_status payload_read(const struct skippy_model *model, enum payload_kind kind, const uint8_t *input,
                               size_t bytes, struct payload_header *header, sim_error out) {
#define DAMAGED(...) return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, __VA_ARGS__)
    if (!input || bytes < sizeof *header)
        DAMAGED("import: %zu bytes cannot hold a %s", input ? bytes : 0, KIND_NAMES[kind]);
    memcpy(header, input, sizeof *header);
    if (header->magic != PAYLOAD_MAGIC || header->version != PAYLOAD_VERSION)
        DAMAGED("import: not a payload of this engine and version");
    if (header->kind != (uint32_t)kind)
        DAMAGED("import: holds a %s, not a %s", KIND_NAMES[header->kind <= KIND_WINDOW ? header->kind : 0],
                KIND_NAMES[kind]);
    if (header->count > (bytes - sizeof *header) / 4 || payload_bytes(header->count) != bytes)
        DAMAGED("import: %zu bytes for %llu tokens: the payload is cut or too long", bytes,
                (unsigned long long)header->count);
    if (header->checksum != payload_checksum(*header, input + sizeof *header))
        DAMAGED("import: the checksum is wrong: the payload is damaged");
    if (header->seed != (uint64_t)model->spec.seed || header->layer_start != (uint32_t)model->layer_start ||
        header->layer_end != (uint32_t)model->layer_end)
        DAMAGED("import: made by layers [%u, %u) of seed %llu, this is [%d, %d) of seed %lld", header->layer_start,
                header->layer_end, (unsigned long long)header->seed, model->layer_start, model->layer_end,
                (long long)model->spec.seed);
    for (uint64_t i = 0; i < header->count; i++) { /* a checksum is no proof of good faith */
        int32_t token;
        memcpy(&token, input + sizeof *header + 4 * i, 4);
        if (token < SIM_TOKEN_UNKNOWN || token >= model->vocabulary.size)
            DAMAGED("import: token %llu is %d, outside the vocabulary", (unsigned long long)i, token);
    }
    if (header->start + header->count > (uint64_t)model->ctx_size || header->start > (uint64_t)model->ctx_size)
        DAMAGED("import: positions up to %llu exceed the context of %d",
                (unsigned long long)(header->start + header->count), model->ctx_size);
    return SKIPPY_STATUS_OK;
}

/* Copied first: the caller's bytes need no alignment. */
static sim_status payload_apply(struct skippy_session *session, const struct payload_header *header,
                                const uint8_t *input, sim_error out) {
    int32_t start = (int32_t)header->start, count = (int32_t)header->count;
    int32_t *tokens = malloc(4 * ((size_t)count + 1));
    if (!tokens) return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "memory for %d tokens ran out", count);
    memcpy(tokens, input + sizeof *header, 4 * (size_t)count);
    sim_status status = sim_history_write(session, start, tokens, count, out);
    free(tokens);
    /* A recurrent state that was not rewound keeps its own hash. */
    if (status == SKIPPY_STATUS_OK && session->model->spec.recurrent && session->n_past == start + count)
        session->points[session->n_past].hash = header->final_hash;
    return status;
}

static sim_status check_range(const struct skippy_model *model, int32_t start, int32_t end, sim_error out) {
    if (start != model->layer_start || end != model->layer_end)
        REFUSE("layers [%d, %d) were asked for, this stage has exactly [%d, %d)", start, end, model->layer_start,
               model->layer_end);
    return SKIPPY_STATUS_OK;
}

static sim_status give_size(const char *call, size_t needed, const void *output, size_t capacity, size_t *out_bytes,
                            sim_error out) {
    *out_bytes = needed;
    if (output && capacity >= needed) return SKIPPY_STATUS_OK;
    return sim_fail(out, SKIPPY_STATUS_BUFFER_TOO_SMALL, "%s: %zu bytes are needed, the buffer holds %zu", call, needed,
                    output ? capacity : 0);
}

/* A fault before the work, or one that asks for another buffer; OK: go on. */
static sim_status take_fault(struct skippy_session *session, enum sim_call call, const char *name, size_t capacity,
                             size_t *out_bytes, struct sim_hit *hit, sim_error out) {
    struct sim_fault_row row = {session->lane, NULL, 0};
    *hit = sim_fault_take_rows(session->model, call, &row, 1);
    if (hit->effect == SIM_EFFECT_GROW_BUFFER || hit->effect == SIM_EFFECT_GROW_BUFFER_WITHOUT_GROWTH) {
        *out_bytes = capacity + (hit->effect == SIM_EFFECT_GROW_BUFFER ? 64 : 0);
        return sim_fail(out, SKIPPY_STATUS_BUFFER_TOO_SMALL, "injected fault: %s asks for another buffer", name);
    }
    return sim_hit_fails(hit, SIM_BEFORE) ? sim_hit_fail(hit, name, out) : SKIPPY_STATUS_OK;
}

/* ---- states ---- */

static sim_status export_locked(struct skippy_session *session, enum payload_kind kind, void *output, size_t capacity,
                                size_t *out_bytes, sim_error out) {
    if (kind == KIND_RECURRENT && !session->model->spec.recurrent) {
        *out_bytes = 0;
        return SKIPPY_STATUS_OK;
    }
    sim_status status = give_size("export_state", payload_bytes((uint64_t)session->n_past), output, capacity,
                                  out_bytes, out);
    if (status != SKIPPY_STATUS_OK) return status;
    struct sim_hit hit;
    status = take_fault(session, SIM_CALL_EXPORT_STATE, "export_state", capacity, out_bytes, &hit, out);
    if (status != SKIPPY_STATUS_OK) return status;
    payload_write(session, kind, 0, session->n_past, output);
    return hit.status ? sim_hit_fail(&hit, "export_state", out) : SKIPPY_STATUS_OK;
}

static sim_status export_any(struct skippy_session *session, enum payload_kind kind, const int32_t layers[2],
                             void *output, size_t capacity, size_t *out_bytes, sim_error out) {
    if (!out_bytes) REFUSE("export_state: out_bytes is NULL");
    *out_bytes = 0;
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    if (layers) status = check_range(session->model, layers[0], layers[1], out);
    if (status == SKIPPY_STATUS_OK) status = export_locked(session, kind, output, capacity, out_bytes, out);
    sim_leave(session->model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}

static sim_status import_locked(struct skippy_session *session, enum payload_kind kind, const void *input,
                                size_t bytes, sim_error out) {
    if (kind == KIND_RECURRENT && !session->model->spec.recurrent)
        return sim_fail(out, SKIPPY_STATUS_UNSUPPORTED, "import: this model has no recurrent state");
    struct payload_header header;
    struct sim_hit hit;
    size_t ignored = 0;
    sim_status status = payload_read(session->model, kind, input, bytes, &header, out);
    if (status == SKIPPY_STATUS_OK)
        status = take_fault(session, SIM_CALL_IMPORT_STATE, "import_state", 0, &ignored, &hit, out);
    if (status == SKIPPY_STATUS_OK) status = payload_apply(session, &header, input, out);
    if (status != SKIPPY_STATUS_OK) return status;
    session->checkpoint_count = 0;
    return hit.status ? sim_hit_fail(&hit, "import_state", out) : SKIPPY_STATUS_OK;
}

static sim_status import_any(struct skippy_session *session, enum payload_kind kind, const int32_t layers[2],
                             const void *input, size_t bytes, sim_error out) {
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    if (layers) status = check_range(session->model, layers[0], layers[1], out);
    if (status == SKIPPY_STATUS_OK) status = import_locked(session, kind, input, bytes, out);
    sim_leave(session->model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}

sim_status skippy_export_state(struct skippy_session *session, int32_t layer_start, int32_t layer_end, void *output,
                               size_t capacity, size_t *out_bytes, sim_error out) {
    return export_any(session, KIND_STATE, (int32_t[]){layer_start, layer_end}, output, capacity, out_bytes, out);
}

sim_status skippy_export_full_state(struct skippy_session *session, int32_t layer_start, int32_t layer_end,
                                    void *output, size_t capacity, size_t *out_bytes, sim_error out) {
    return export_any(session, KIND_FULL_STATE, (int32_t[]){layer_start, layer_end}, output, capacity, out_bytes, out);
}

sim_status skippy_export_recurrent_state(struct skippy_session *session, void *output, size_t capacity,
                                         size_t *out_bytes, sim_error out) {
    return export_any(session, KIND_RECURRENT, NULL, output, capacity, out_bytes, out);
}

sim_status skippy_import_state(struct skippy_session *session, int32_t layer_start, int32_t layer_end,
                               const void *input, size_t input_bytes, sim_error out) {
    return import_any(session, KIND_STATE, (int32_t[]){layer_start, layer_end}, input, input_bytes, out);
}

sim_status skippy_import_full_state(struct skippy_session *session, int32_t layer_start, int32_t layer_end,
                                    const void *input, size_t input_bytes, sim_error out) {
    return import_any(session, KIND_FULL_STATE, (int32_t[]){layer_start, layer_end}, input, input_bytes, out);
}

sim_status skippy_import_recurrent_state(struct skippy_session *session, const void *input, size_t input_bytes,
                                         sim_error out) {
    return import_any(session, KIND_RECURRENT, NULL, input, input_bytes, out);
}

/* ---- KV pages ---- */

static struct skippy_kv_page_component_desc component(const struct skippy_model *model, uint32_t role,
                                                      uint64_t start, uint64_t count, uint64_t offset) {
    return (struct skippy_kv_page_component_desc){
        .version = SKIPPY_KV_PAGE_VERSION, .role = role, .token_start = start, .token_count = count,
        .layer_count = (uint32_t)(model->layer_end - model->layer_start), .k_type = SKIPPY_GGML_TYPE_F16,
        .v_type = SKIPPY_GGML_TYPE_F16, .k_row_bytes = 2, .v_row_bytes = 2, .v_element_bytes = 2,
        .payload_offset = offset, .payload_bytes = payload_bytes(count)};
}

/* One token takes 4 bytes of payload: as if K and V of a token were 2 bytes each, over all layers. */
static struct skippy_kv_page_desc page_desc(const struct skippy_model *model, uint64_t start, uint64_t count) {
    struct skippy_kv_page_desc desc = {
        .version = SKIPPY_KV_PAGE_VERSION, .layer_start = model->layer_start, .layer_end = model->layer_end,
        .token_start = start, .token_count = count,
        .layer_count = (uint32_t)(model->layer_end - model->layer_start), .k_type = SKIPPY_GGML_TYPE_F16,
        .v_type = SKIPPY_GGML_TYPE_F16, .k_row_bytes = 2, .v_row_bytes = 2, .v_element_bytes = 2,
        .payload_bytes = payload_bytes(count), .codec = SKIPPY_KV_PAGE_CODEC_SINGLE_V1};
    if (!model->spec.sliding_window) return desc;
    uint64_t window = count < (uint64_t)model->spec.sliding_window ? count : (uint64_t)model->spec.sliding_window;
    desc.codec = SKIPPY_KV_PAGE_CODEC_ISWA_COMPOSITE_V1;
    desc.component_count = 2;
    desc.components[0] = component(model, SKIPPY_KV_PAGE_ROLE_BASE, start, count, 0);
    desc.components[1] = component(model, SKIPPY_KV_PAGE_ROLE_SWA, start + count - window, window, desc.payload_bytes);
    desc.payload_bytes += desc.components[1].payload_bytes;
    return desc;
}

static sim_status export_page(struct skippy_session *session, uint64_t start, uint64_t count,
                              struct skippy_kv_page_desc *out_desc, uint8_t *output, size_t capacity,
                              size_t *out_bytes, sim_error out) {
    const struct skippy_model *model = session->model;
    if (model->spec.recurrent)
        return sim_fail(out, SKIPPY_STATUS_UNSUPPORTED, "export_kv_page: a recurrent state has no pages");
    if (!count || start > (uint64_t)session->n_past || count > (uint64_t)session->n_past - start)
        REFUSE("export_kv_page: %llu tokens from %llu, the session has %d", (unsigned long long)count,
               (unsigned long long)start, session->n_past);
    *out_desc = page_desc(model, start, count);
    sim_status status = give_size("export_kv_page", out_desc->payload_bytes, output, capacity, out_bytes, out);
    struct sim_hit hit;
    if (status == SKIPPY_STATUS_OK)
        status = take_fault(session, SIM_CALL_EXPORT_KV, "export_kv_page", capacity, out_bytes, &hit, out);
    if (status != SKIPPY_STATUS_OK) return status;
    payload_write(session, KIND_PAGE, (int32_t)start, (int32_t)count, output);
    if (out_desc->component_count) {
        const struct skippy_kv_page_component_desc *window = &out_desc->components[1];
        payload_write(session, KIND_WINDOW, (int32_t)window->token_start, (int32_t)window->token_count,
                      output + window->payload_offset);
    }
    return hit.status ? sim_hit_fail(&hit, "export_kv_page", out) : SKIPPY_STATUS_OK;
}

sim_status skippy_export_kv_page(struct skippy_session *session, int32_t layer_start, int32_t layer_end,
                                 uint64_t token_start, uint64_t token_count, struct skippy_kv_page_desc *out_desc,
                                 void *output, size_t capacity, size_t *out_bytes, sim_error out) {
    if (out_bytes) *out_bytes = 0;
    if (!out_desc || !out_bytes) REFUSE("export_kv_page: out_desc or out_bytes is NULL");
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    status = check_range(session->model, layer_start, layer_end, out);
    if (status == SKIPPY_STATUS_OK)
        status = export_page(session, token_start, token_count, out_desc, output, capacity, out_bytes, out);
    sim_leave(session->model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}

static sim_status check_page(const struct skippy_session *session, const struct skippy_kv_page_desc *desc,
                             const void *input, size_t bytes, sim_error out) {
    const struct skippy_model *model = session->model;
    if (model->spec.recurrent)
        return sim_fail(out, SKIPPY_STATUS_UNSUPPORTED, "import_kv_page: a recurrent state has no pages");
    if (desc->version != SKIPPY_KV_PAGE_VERSION)
        REFUSE("import_kv_page: descriptor version %u, expected %d", desc->version, SKIPPY_KV_PAGE_VERSION);
    sim_status status = check_range(model, desc->layer_start, desc->layer_end, out);
    if (status != SKIPPY_STATUS_OK) return status;
    if (!input || desc->payload_bytes != bytes)
        REFUSE("import_kv_page: %zu bytes, the descriptor says %llu", input ? bytes : 0,
               (unsigned long long)desc->payload_bytes);
    bool composite = desc->codec == SKIPPY_KV_PAGE_CODEC_ISWA_COMPOSITE_V1;
    if (desc->codec > SKIPPY_KV_PAGE_CODEC_ISWA_COMPOSITE_V1 || composite != (model->spec.sliding_window > 0))
        REFUSE("import_kv_page: codec %u does not fit a model with a sliding window of %lld", desc->codec,
               (long long)model->spec.sliding_window);
    if (composite && (desc->component_count != 2 || desc->components[0].payload_offset ||
                      desc->components[0].payload_bytes > bytes ||
                      desc->components[1].payload_offset != desc->components[0].payload_bytes ||
                      desc->components[1].payload_bytes != bytes - desc->components[0].payload_bytes))
        REFUSE("import_kv_page: the two components do not tile %zu bytes", bytes);
    if (composite && session->n_past)
        REFUSE("import_kv_page: a composite page needs a fresh session, this one is at %d", session->n_past);
    return SKIPPY_STATUS_OK;
}

static sim_status import_page(struct skippy_session *session, const struct skippy_kv_page_desc *desc,
                              const uint8_t *input, size_t bytes, sim_error out) {
    const struct skippy_model *model = session->model;
    struct payload_header header, window;
    bool composite = desc->codec == SKIPPY_KV_PAGE_CODEC_ISWA_COMPOSITE_V1;
    size_t base = composite ? (size_t)desc->components[0].payload_bytes : bytes, ignored = 0;
    sim_status status = payload_read(model, KIND_PAGE, input, base, &header, out);
    if (status == SKIPPY_STATUS_OK && composite)
        status = payload_read(model, KIND_WINDOW, input + base, bytes - base, &window, out);
    if (status != SKIPPY_STATUS_OK) return status;
    if (header.start != desc->token_start || header.count != desc->token_count)
        return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                        "import_kv_page: the payload has %llu tokens from %llu, the descriptor %llu from %llu",
                        (unsigned long long)header.count, (unsigned long long)header.start,
                        (unsigned long long)desc->token_count, (unsigned long long)desc->token_start);
    struct sim_hit hit;
    status = take_fault(session, SIM_CALL_IMPORT_KV, "import_kv_page", 0, &ignored, &hit, out);
    if (status == SKIPPY_STATUS_OK) status = payload_apply(session, &header, input, out);
    if (status != SKIPPY_STATUS_OK) return status;
    session->checkpoint_count = 0;
    return hit.status ? sim_hit_fail(&hit, "import_kv_page", out) : SKIPPY_STATUS_OK;
}

sim_status skippy_import_kv_page(struct skippy_session *session, const struct skippy_kv_page_desc *desc,
                                 const void *input, size_t input_bytes, sim_error out) {
    if (!desc) REFUSE("import_kv_page: desc is NULL");
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    status = check_page(session, desc, input, input_bytes, out);
    if (status == SKIPPY_STATUS_OK) status = import_page(session, desc, input, input_bytes, out);
    sim_leave(session->model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}
