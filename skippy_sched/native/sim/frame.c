/*
 * Activation frames: boundaries, validation of what comes in, layout and rows of what goes out.
 * A row is a pure function of token, position, history hash and the layers it has passed, so
 * that the next stage can tell a wrong, permuted or damaged row from a right one.
 */
#include "sim.h"

#include <stdio.h>
#include <string.h>

/* ---- boundaries ---- */

/* The last 64 lowercase hex digits of a planner's name are the identity; other names are hashed. */
static void identity_of(const struct skippy_model *model, int32_t layer, const char *name, uint8_t identity[32]) {
    static const char digits[] = "0123456789abcdef";
    size_t length = strlen(name);
    const char *tail = length >= 64 ? name + length - 64 : NULL;
    if (tail && strspn(tail, digits) == 64) {
        for (int i = 0; i < 32; i++)
            identity[i] = (uint8_t)((strchr(digits, tail[2 * i]) - digits) << 4 |
                                    (strchr(digits, tail[2 * i + 1]) - digits));
        return;
    }
    char text[512];
    int written = snprintf(text, sizeof text,
                           "skippy-sim;seed=%lld;layers=%lld;layer=%d;part=%.200s;type=0;rank=2;axis=1;embd=%lld",
                           (long long)model->spec.seed, (long long)model->spec.n_layer, layer, name,
                           (long long)model->spec.n_embd);
    sim_sha256(text, (size_t)written, identity);
}

void sim_boundary_make(const struct skippy_model *model, int32_t layer, const char *identity,
                       struct skippy_activation_boundary_desc *out) {
    uint64_t row_bytes = sizeof(float) * (uint64_t)model->spec.n_embd;
    *out = (struct skippy_activation_boundary_desc){
        .version = SKIPPY_ACTIVATION_BOUNDARY_DESC_VERSION, .part_count = 1};
    out->parts[0] = (struct skippy_activation_part_desc){
        .ggml_type = SKIPPY_GGML_TYPE_F32, .rank = 2, .token_axis = 1,
        .dimensions = {model->spec.n_embd, 0, 1, 1}, .byte_strides = {sizeof(float), row_bytes}};
    identity_of(model, layer, identity, out->parts[0].identity);
    sim_sha256(out->parts[0].identity, 32, out->frontier_identity);
}

/* ---- input: the order of abi.md 6.2 ---- */

static uint64_t type_bytes(uint32_t type) {
    switch (type) {
    case SKIPPY_GGML_TYPE_F32:
    case SKIPPY_GGML_TYPE_I32: return 4;
    case SKIPPY_GGML_TYPE_F16:
    case SKIPPY_GGML_TYPE_BF16: return 2;
    default: return 0;
    }
}

const struct skippy_activation_part_desc *sim_frame_part(const struct skippy_activation_desc *desc,
                                                         const uint8_t identity[32]) {
    for (uint32_t i = 0; i < desc->part_count; i++)
        if (!memcmp(desc->parts[i].identity, identity, 32)) return &desc->parts[i];
    return NULL;
}

#define REFUSE(...) return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, __VA_ARGS__)

static sim_status check_shape(size_t r, uint32_t p, const struct skippy_activation_part_desc *part,
                              size_t tokens, sim_error out) {
    if (part->flags & ~(uint32_t)SKIPPY_ACTIVATION_PART_OPTIONAL)
        REFUSE("request %zu: part %u has unknown flags 0x%x", r, p, part->flags);
    if (part->rank < 1 || part->rank > SKIPPY_ACTIVATION_MAX_DIMS)
        REFUSE("request %zu: part %u has rank %u, not 1 to 4", r, p, part->rank);
    if (part->token_axis < 0 || (uint32_t)part->token_axis >= part->rank)
        REFUSE("request %zu: part %u has token axis %d, not below its rank %u", r, p, part->token_axis, part->rank);
    uint64_t bytes = type_bytes(part->ggml_type);
    if (!bytes) REFUSE("request %zu: part %u has unknown ggml type %u", r, p, part->ggml_type);
    for (uint32_t d = 0; d < part->rank; d++) {
        if (part->dimensions[d] <= 0)
            REFUSE("request %zu: part %u has dimension %u of %lld", r, p, d, (long long)part->dimensions[d]);
        if (d == (uint32_t)part->token_axis && (uint64_t)part->dimensions[d] != tokens)
            REFUSE("request %zu: part %u holds %lld tokens, the request %zu", r, p,
                   (long long)part->dimensions[d], tokens);
        if (part->byte_strides[d] != bytes)
            REFUSE("request %zu: part %u has stride %u of %llu, contiguous is %llu", r, p, d,
                   (unsigned long long)part->byte_strides[d], (unsigned long long)bytes);
        if (__builtin_mul_overflow(bytes, (uint64_t)part->dimensions[d], &bytes))
            REFUSE("request %zu: part %u is larger than 2^64 bytes", r, p);
    }
    if (part->payload_bytes != bytes)
        REFUSE("request %zu: part %u has payload_bytes %llu, its shape %llu", r, p,
               (unsigned long long)part->payload_bytes, (unsigned long long)bytes);
    return SKIPPY_STATUS_OK;
}

static bool in_boundary(const struct skippy_activation_boundary_desc *boundary, const uint8_t identity[32]) {
    for (uint32_t i = 0; i < boundary->part_count; i++)
        if (!memcmp(boundary->parts[i].identity, identity, 32)) return true;
    return false;
}

static sim_status check_parts(const struct skippy_model *model, size_t r, size_t tokens,
                              const struct skippy_activation_desc *desc, sim_error out) {
    for (uint32_t p = 0; p < desc->part_count; p++) {
        const struct skippy_activation_part_desc *part = &desc->parts[p];
        for (uint32_t q = 0; q < p; q++)
            if (!memcmp(part->identity, desc->parts[q].identity, 32))
                REFUSE("request %zu: parts %u and %u have one identity", r, q, p);
        sim_status status = check_shape(r, p, part, tokens, out);
        if (status != SKIPPY_STATUS_OK) return status;
        if (!in_boundary(&model->input, part->identity) && !(part->flags & SKIPPY_ACTIVATION_PART_OPTIONAL))
            REFUSE("request %zu: part %u is not in this stage's boundary and not optional", r, p);
        if (part->payload_offset > desc->payload_bytes ||
            part->payload_bytes > desc->payload_bytes - part->payload_offset)
            REFUSE("request %zu: part %u ends beyond the payload of %llu bytes", r, p,
                   (unsigned long long)desc->payload_bytes);
    }
    return SKIPPY_STATUS_OK;
}

static sim_status check_boundary(const struct skippy_model *model, size_t r,
                                 const struct skippy_activation_desc *desc, sim_error out) {
    for (uint32_t b = 0; b < model->input.part_count; b++) {
        const struct skippy_activation_part_desc *wanted = &model->input.parts[b];
        const struct skippy_activation_part_desc *part = sim_frame_part(desc, wanted->identity);
        if (!part) REFUSE("request %zu: boundary part %u is missing from the frame", r, b);
        if (part->ggml_type != wanted->ggml_type || part->rank != wanted->rank ||
            part->token_axis != wanted->token_axis)
            REFUSE("request %zu: part for boundary part %u has type %u, rank %u, token axis %d; the boundary "
                   "%u, %u, %d", r, b, part->ggml_type, part->rank, part->token_axis, wanted->ggml_type, wanted->rank,
                   wanted->token_axis);
        for (uint32_t d = 0; d < wanted->rank; d++)
            if (wanted->dimensions[d] > 0 && part->dimensions[d] != wanted->dimensions[d])
                REFUSE("request %zu: part for boundary part %u has dimension %u of %lld, the boundary %lld", r, b, d,
                       (long long)part->dimensions[d], (long long)wanted->dimensions[d]);
    }
    return SKIPPY_STATUS_OK;
}

/* Walks the parts by offset: each must start where the one before it ended. */
static sim_status check_tiling(size_t r, const struct skippy_activation_desc *desc, sim_error out) {
    bool taken[SKIPPY_ACTIVATION_MAX_PARTS] = {false};
    uint64_t end = 0;
    for (uint32_t n = 0; n < desc->part_count; n++) {
        uint32_t next = desc->part_count;
        for (uint32_t p = 0; p < desc->part_count; p++)
            if (!taken[p] && (next == desc->part_count ||
                              desc->parts[p].payload_offset < desc->parts[next].payload_offset))
                next = p;
        taken[next] = true;
        if (desc->parts[next].payload_offset != end)
            REFUSE("request %zu: part %u starts at byte %llu, the part before it ends at %llu", r, next,
                   (unsigned long long)desc->parts[next].payload_offset, (unsigned long long)end);
        end += desc->parts[next].payload_bytes;
    }
    if (end != desc->payload_bytes)
        REFUSE("request %zu: the parts end at byte %llu of a payload of %llu", r, (unsigned long long)end,
               (unsigned long long)desc->payload_bytes);
    return SKIPPY_STATUS_OK;
}

sim_status sim_frame_check_input(const struct skippy_model *model, size_t r, size_t tokens,
                                 const struct skippy_activation_desc *desc, const void *payload,
                                 sim_error out) {
    bool empty = !desc || !payload || !desc->payload_bytes;
    if (model->source) {
        if (!empty) REFUSE("request %zu: a source stage takes no activation frame", r);
        return SKIPPY_STATUS_OK;
    }
    if (empty) REFUSE("request %zu: the stage at layer %d needs an activation frame", r, model->layer_start);
    if (desc->version != SKIPPY_ACTIVATION_FRAME_VERSION || desc->reserved || desc->part_count < 1 ||
        desc->part_count > SKIPPY_ACTIVATION_MAX_PARTS)
        REFUSE("request %zu: frame has version %u, reserved %u, %u parts; expected 2, 0, 1 to 16", r, desc->version,
               desc->reserved, desc->part_count);
    if (desc->sequence_count != 1 || desc->token_count != tokens)
        REFUSE("request %zu: frame has %u sequences of %u tokens, the request 1 of %zu", r, desc->sequence_count,
               desc->token_count, tokens);
    if (desc->layer_end != model->layer_start)
        REFUSE("request %zu: frame ends at layer %d, this stage starts at %d", r, desc->layer_end, model->layer_start);
    if (memcmp(desc->frontier_identity, model->input.frontier_identity, 32))
        REFUSE("request %zu: the frame's frontier identity is not this stage's", r);
    sim_status status = check_parts(model, r, tokens, desc, out);
    if (status == SKIPPY_STATUS_OK) status = check_boundary(model, r, desc, out);
    if (status == SKIPPY_STATUS_OK) status = check_tiling(r, desc, out);
    return status;
}

/* ---- output ---- */

static const uint8_t *optional_identity(void) { return (const uint8_t *)"skippy-sim: an optional part...."; }

static bool desc_append(struct skippy_activation_desc *desc, const struct skippy_activation_part_desc *part) {
    if (desc->part_count == SKIPPY_ACTIVATION_MAX_PARTS) return false;
    struct skippy_activation_part_desc *added = &desc->parts[desc->part_count++];
    *added = *part;
    added->payload_offset = desc->payload_bytes;
    desc->payload_bytes += part->payload_bytes;
    return true;
}

/* The descriptor of an exporting stage; false when it would need more than 16 parts. */
static bool desc_make(const struct skippy_model *model, const struct sim_request *request,
                      struct skippy_activation_desc *desc) {
    uint64_t tokens = request->token_count;
    memset(desc, 0, sizeof *desc);
    memcpy(desc->frontier_identity, model->output.frontier_identity, 32);
    struct skippy_activation_part_desc part = model->output.parts[0];
    part.dimensions[1] = (int64_t)tokens;
    part.payload_bytes = part.byte_strides[1] * tokens;
    part.byte_strides[2] = part.byte_strides[3] = part.payload_bytes;
    desc_append(desc, &part);
    const struct skippy_activation_desc *input = model->source ? NULL : request->input_desc;
    for (uint32_t p = 0; input && p < input->part_count; p++)
        if (!in_boundary(&model->input, input->parts[p].identity) && !desc_append(desc, &input->parts[p]))
            return false;
    if (!model->spec.optional_part || request->boundary_only || sim_frame_part(desc, optional_identity())) return true;
    part = (struct skippy_activation_part_desc){
        .ggml_type = SKIPPY_GGML_TYPE_I32, .rank = 1, .flags = SKIPPY_ACTIVATION_PART_OPTIONAL,
        .dimensions = {(int64_t)tokens, 1, 1, 1}, .byte_strides = {4, 4 * tokens, 4 * tokens, 4 * tokens},
        .payload_bytes = 4 * tokens};
    memcpy(part.identity, optional_identity(), 32);
    return desc_append(desc, &part);
}

sim_status sim_frame_prepare(const struct skippy_model *model, struct sim_request *request, size_t r,
                             bool batched, sim_error out) {
    request->required = 0;
    if (request->frameless) return SKIPPY_STATUS_OK;
    struct skippy_activation_desc desc;
    if (sim_exports(model)) {
        if (!desc_make(model, request, &desc))
            return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                            "request %zu: the output frame would need more than 16 parts", r);
        request->required = desc.payload_bytes;
    } else {
        memset(&desc, 0, offsetof(struct skippy_activation_desc, parts));
    }
    if (request->out_bytes) *request->out_bytes = request->required;
    if (!request->out_payload && (request->required || request->out_capacity))
        REFUSE("request %zu: the output payload is NULL; %zu bytes are needed, capacity is %zu", r,
               request->required, request->out_capacity);
    if (batched && sim_exports(model) && desc.part_count != model->output.part_count)
        REFUSE("request %zu: its output carries optional parts, which a batch cannot; run it on its own", r);
    if (request->out_capacity < request->required) return SKIPPY_STATUS_BUFFER_TOO_SMALL;
    if (!request->out_desc) return SKIPPY_STATUS_OK;
    desc.version = SKIPPY_ACTIVATION_FRAME_VERSION;
    desc.producer_stage_index = model->stage_index;
    desc.layer_start = model->layer_start;
    desc.layer_end = model->layer_end;
    desc.token_count = (uint32_t)request->token_count;
    desc.sequence_count = 1;
    /* Without parts the 2 KiB of part slots are left alone: at 256 rows they would cost more than the rows. */
    size_t bytes = sim_exports(model) ? sizeof desc : offsetof(struct skippy_activation_desc, parts);
    memcpy(request->out_desc, &desc, bytes);
    return SKIPPY_STATUS_OK;
}

void sim_row_make(const struct skippy_model *model, int32_t layer, int32_t token, int32_t position,
                  uint64_t hash, float *row) {
    uint64_t chain = sim_mix(hash ^ (uint64_t)model->spec.seed);
    for (int32_t l = 0; l < layer; l++) chain = sim_mix(chain + (uint64_t)l);
    row[0] = (float)token;
    row[1] = (float)position;
    row[2] = (float)(hash & 0x3fffff);
    row[3] = (float)(hash >> 22 & 0x1fffff);
    row[4] = (float)(hash >> 43);
    row[5] = (float)layer;
    row[6] = (float)(chain & 0xffffff);
    row[7] = (float)(chain >> 24 & 0xffffff);
    for (int64_t i = SIM_ROW_FLOATS; i < model->spec.n_embd; i++) {
        chain = sim_mix(chain + (uint64_t)i);
        row[i] = (float)(chain & 0xffff) / 65536.0f - 0.5f;
    }
}

void sim_frame_write(const struct skippy_model *model, const struct sim_request *request, const float *rows) {
    struct skippy_activation_desc desc;
    desc_make(model, request, &desc);
    uint8_t *payload = request->out_payload;
    memcpy(payload, rows, desc.parts[0].payload_bytes);
    for (uint32_t p = 1; p < desc.part_count; p++) {
        const struct skippy_activation_part_desc *part = &desc.parts[p], *input = NULL;
        if (!model->source) input = sim_frame_part(request->input_desc, part->identity);
        if (input) {
            memcpy(payload + part->payload_offset, (const uint8_t *)request->input_payload + input->payload_offset,
                   part->payload_bytes);
            continue;
        }
        for (size_t t = 0; t < request->token_count; t++) {
            int32_t position = request->start + (int32_t)t;
            memcpy(payload + part->payload_offset + 4 * t, &position, 4);
        }
    }
}
