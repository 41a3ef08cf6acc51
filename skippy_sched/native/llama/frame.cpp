// Activation frames: what comes in is checked part by part, what goes out is laid out.
//
// A frame here has one part, the residual stream: F32, [n_embd, tokens]. OPTIONAL parts of other makers
// are checked and forwarded, never looked into.
#include "engine.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>

using Part = skippy_activation_part_desc;

namespace {

uint64_t element_bytes(uint32_t type) {
    switch (type) {
    case SKIPPY_GGML_TYPE_F32:
    case SKIPPY_GGML_TYPE_I32: return 4;
    case SKIPPY_GGML_TYPE_F16:
    case SKIPPY_GGML_TYPE_BF16: return 2;
    default: return 0;
    }
}

const Part *find(const Part *parts, uint32_t count, const uint8_t *identity) {
    for (uint32_t i = 0; i < count; i++)
        if (!memcmp(parts[i].identity, identity, SKIPPY_ACTIVATION_IDENTITY_BYTES)) return &parts[i];
    return nullptr;
}

void check_shape(size_t index, uint32_t number, const Part &part, size_t tokens) {
    if (part.flags & ~static_cast<uint32_t>(SKIPPY_ACTIVATION_PART_OPTIONAL))
        refuse("request %zu: part %u has unknown flags 0x%x", index, number, part.flags);
    if (part.rank < 1 || part.rank > SKIPPY_ACTIVATION_MAX_DIMS)
        refuse("request %zu: part %u has rank %u, not 1 to 4", index, number, part.rank);
    if (part.token_axis < 0 || static_cast<uint32_t>(part.token_axis) >= part.rank)
        refuse("request %zu: part %u has token axis %d, not below its rank %u", index, number, part.token_axis, part.rank);
    uint64_t bytes = element_bytes(part.ggml_type);
    if (!bytes) refuse("request %zu: part %u has unknown ggml type %u", index, number, part.ggml_type);
    for (uint32_t axis = 0; axis < part.rank; axis++) {
        int64_t dimension = part.dimensions[axis];
        if (dimension <= 0)
            refuse("request %zu: part %u has dimension %u of %lld", index, number, axis, static_cast<long long>(dimension));
        if (axis == static_cast<uint32_t>(part.token_axis) && static_cast<uint64_t>(dimension) != tokens)
            refuse("request %zu: part %u holds %lld tokens, the request %zu", index, number, static_cast<long long>(dimension), tokens);
        if (part.byte_strides[axis] != bytes)
            refuse("request %zu: part %u has stride %u of %llu, contiguous is %llu", index, number, axis,
                   static_cast<unsigned long long>(part.byte_strides[axis]), static_cast<unsigned long long>(bytes));
        if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(dimension), &bytes))
            refuse("request %zu: part %u is larger than 2^64 bytes", index, number);
    }
    if (part.payload_bytes != bytes)
        refuse("request %zu: part %u has payload_bytes %llu, its shape %llu", index, number,
               static_cast<unsigned long long>(part.payload_bytes), static_cast<unsigned long long>(bytes));
}

void check_parts(const skippy_activation_boundary_desc &boundary, size_t index, size_t tokens, const skippy_activation_desc &desc) {
    for (uint32_t number = 0; number < desc.part_count; number++) {
        const Part &part = desc.parts[number];
        if (find(desc.parts, number, part.identity)) refuse("request %zu: part %u repeats an identity", index, number);
        check_shape(index, number, part, tokens);
        if (!find(boundary.parts, boundary.part_count, part.identity) && !(part.flags & SKIPPY_ACTIVATION_PART_OPTIONAL))
            refuse("request %zu: part %u is not in this stage's boundary and not optional", index, number);
        if (part.payload_offset > desc.payload_bytes || part.payload_bytes > desc.payload_bytes - part.payload_offset)
            refuse("request %zu: part %u ends beyond the payload of %llu bytes", index, number,
                   static_cast<unsigned long long>(desc.payload_bytes));
    }
}

void check_boundary(const skippy_activation_boundary_desc &boundary, size_t index, const skippy_activation_desc &desc) {
    for (uint32_t number = 0; number < boundary.part_count; number++) {
        const Part &wanted = boundary.parts[number];
        const Part *part = find(desc.parts, desc.part_count, wanted.identity);
        if (!part) refuse("request %zu: boundary part %u is missing from the frame", index, number);
        if (part->ggml_type != wanted.ggml_type || part->rank != wanted.rank || part->token_axis != wanted.token_axis)
            refuse("request %zu: the part for boundary part %u has type %u, rank %u, token axis %d; the boundary %u, %u, %d", index,
                   number, part->ggml_type, part->rank, part->token_axis, wanted.ggml_type, wanted.rank, wanted.token_axis);
        for (uint32_t axis = 0; axis < wanted.rank; axis++)
            if (wanted.dimensions[axis] > 0 && part->dimensions[axis] != wanted.dimensions[axis])
                refuse("request %zu: the part for boundary part %u has dimension %u of %lld, the boundary %lld", index, number, axis,
                       static_cast<long long>(part->dimensions[axis]), static_cast<long long>(wanted.dimensions[axis]));
    }
}

void check_tiling(size_t index, const skippy_activation_desc &desc) {
    std::vector<std::pair<uint64_t, uint64_t>> ranges;
    for (uint32_t i = 0; i < desc.part_count; i++) ranges.emplace_back(desc.parts[i].payload_offset, desc.parts[i].payload_bytes);
    std::sort(ranges.begin(), ranges.end());
    uint64_t end = 0;
    for (const auto &range : ranges) {
        if (range.first != end)
            refuse("request %zu: a part starts at byte %llu, the part before it ends at %llu", index,
                   static_cast<unsigned long long>(range.first), static_cast<unsigned long long>(end));
        end += range.second;
    }
    if (end != desc.payload_bytes)
        refuse("request %zu: the parts end at byte %llu of a payload of %llu", index, static_cast<unsigned long long>(end),
               static_cast<unsigned long long>(desc.payload_bytes));
}

bool append(skippy_activation_desc &desc, const Part &part) {
    if (desc.part_count == SKIPPY_ACTIVATION_MAX_PARTS) return false;
    Part &added = desc.parts[desc.part_count++];
    added = part;
    added.payload_offset = desc.payload_bytes;
    desc.payload_bytes += part.payload_bytes;
    return true;
}

// OPTIONAL parts of the input that this stage's boundary does not know travel on behind the residual.
std::vector<const Part *> forwarded_parts(const skippy_model &model, const Request &request) {
    std::vector<const Part *> parts;
    const skippy_activation_desc *input = model.stage.source || model.stage.terminal ? nullptr : request.input_desc;
    for (uint32_t i = 0; input && i < input->part_count; i++)
        if (!find(model.stage.input.parts, model.stage.input.part_count, input->parts[i].identity)) parts.push_back(&input->parts[i]);
    return parts;
}

} // namespace

void check_input_frame(const skippy_model &model, size_t index, const Request &request) {
    const skippy_activation_desc *desc = request.input_desc;
    const Stage &stage = model.stage;
    bool empty = !desc || !request.input_payload || !desc->payload_bytes;
    if (stage.source) {
        if (!empty) refuse("request %zu: a source stage takes no activation frame", index);
        return;
    }
    if (empty) refuse("request %zu: the stage at layer %d needs an activation frame", index, stage.layer_start);
    if (desc->version != SKIPPY_ACTIVATION_FRAME_VERSION || desc->reserved || desc->part_count < 1 ||
        desc->part_count > SKIPPY_ACTIVATION_MAX_PARTS)
        refuse("request %zu: the frame has version %u, reserved %u, %u parts; expected 2, 0, 1 to 16", index, desc->version,
               desc->reserved, desc->part_count);
    if (desc->sequence_count != 1 || desc->token_count != request.count)
        refuse("request %zu: the frame has %u sequences of %u tokens, the request 1 of %zu", index, desc->sequence_count,
               desc->token_count, request.count);
    if (desc->layer_end != stage.layer_start)
        refuse("request %zu: the frame ends at layer %d, this stage starts at %d", index, desc->layer_end, stage.layer_start);
    if (memcmp(desc->frontier_identity, stage.input.frontier_identity, SKIPPY_ACTIVATION_IDENTITY_BYTES))
        refuse("request %zu: the frame's frontier identity is not this stage's", index);
    check_parts(stage.input, index, request.count, *desc);
    check_boundary(stage.input, index, *desc);
    check_tiling(index, *desc);
}

const void *frame_rows(const skippy_model &model, const Request &request) {
    if (model.stage.source) return nullptr;
    const Part *part = find(request.input_desc->parts, request.input_desc->part_count, model.stage.input.parts[0].identity);
    return static_cast<const uint8_t *>(request.input_payload) + part->payload_offset;
}

bool make_output_desc(const skippy_model &model, const Request &request, skippy_activation_desc &desc) {
    memset(&desc, 0, model.stage.terminal ? offsetof(skippy_activation_desc, parts) : sizeof desc);
    desc.version = SKIPPY_ACTIVATION_FRAME_VERSION;
    desc.producer_stage_index = model.stage.index;
    desc.layer_start = model.stage.layer_start;
    desc.layer_end = model.stage.layer_end;
    desc.token_count = static_cast<uint32_t>(request.count);
    desc.sequence_count = 1;
    if (model.stage.terminal) return true;
    memcpy(desc.frontier_identity, model.stage.output.frontier_identity, SKIPPY_ACTIVATION_IDENTITY_BYTES);
    Part part = model.stage.output.parts[0];
    part.dimensions[1] = static_cast<int64_t>(request.count);
    part.payload_bytes = part.byte_strides[1] * request.count;
    part.byte_strides[2] = part.byte_strides[3] = part.payload_bytes;
    bool fits = append(desc, part);
    for (const Part *forwarded : forwarded_parts(model, request)) fits = fits && append(desc, *forwarded);
    return fits;
}

bool prepare_output(const skippy_model &model, size_t index, Request &request) {
    if (request.frameless) return false;
    skippy_activation_desc desc;
    if (!make_output_desc(model, request, desc))
        fail(SKIPPY_STATUS_RUNTIME_ERROR, "request %zu: the output frame would need more than 16 parts", index);
    request.required = desc.payload_bytes;
    if (request.out_bytes) *request.out_bytes = request.required;
    if (!request.out_payload && (request.required || request.out_capacity))
        refuse("request %zu: the output payload is NULL; %zu bytes are needed, the capacity is %zu", index, request.required,
               request.out_capacity);
    if (request.out_capacity < request.required) return true;
    // The part slots of an empty frame stay untouched: 2 KiB a row would cost more than the row itself.
    if (request.out_desc)
        memcpy(request.out_desc, &desc, model.stage.terminal ? offsetof(skippy_activation_desc, parts) : sizeof desc);
    return false;
}

void write_output_payload(const skippy_model &model, const Request &request, const std::vector<const float *> &rows) {
    if (model.stage.terminal || request.frameless) return;
    size_t row_bytes = sizeof(float) * static_cast<size_t>(model.n_embd);
    auto *out = static_cast<uint8_t *>(request.out_payload);
    for (const float *row : rows) {
        memcpy(out, row, row_bytes);
        out += row_bytes;
    }
    for (const Part *part : forwarded_parts(model, request)) {
        memcpy(out, static_cast<const uint8_t *>(request.input_payload) + part->payload_offset, part->payload_bytes);
        out += part->payload_bytes;
    }
}
