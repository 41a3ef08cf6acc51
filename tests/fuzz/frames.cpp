// Fuzz target: a stage is given frames whose descriptor is damaged, by any call that takes one.
//
// The input begins with how to call and goes on with patches of a valid frame's descriptor. What must
// hold: a call that is refused moves nothing, an error comes with its object, and a valid frame passes
// afterwards. Reads stay inside the payload: it is allocated exactly as long as the descriptor says.
//
// SKIPPY_FUZZ_MODELS names a folder with the stages 0-2, 2-3 and 2-4, see models.py.
#include "skippy.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

const int32_t prompt[] = {301, 302, 303, 304};
const size_t tokens_max = 4, payload_max = 1 << 20;
const std::string cut_a(64, 'a'), cut_b(64, 'b');

#define must(condition)                                                                     \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                                        \
        }                                                                                   \
    } while (0)

struct Stage {
    skippy_model *model = nullptr;
    skippy_session *session = nullptr, *second = nullptr;
};

Stage open_stage(int start, int end) {
    const char *folder = getenv("SKIPPY_FUZZ_MODELS");
    must(folder);
    std::string path = std::string(folder) + "/" + std::to_string(start) + "-" + std::to_string(end);
    const char *resident = "blk", *in = cut_a.c_str(), *out = cut_b.c_str();
    if (!start) out = cut_a.c_str();
    skippy_runtime_config config = skippy_runtime_config_default();
    config.layer_start = start, config.layer_end = end, config.stage_index = start;
    config.ctx_size = 64, config.lane_count = 2, config.n_batch = 64, config.n_ubatch = 64;
    config.n_threads = 1;
    config.resident_tensor_names = &resident, config.resident_tensor_name_count = 1;
    config.activation_import_identities = config.activation_import_bindings = &in;
    config.activation_import_identity_count = start > 0;
    config.activation_export_identities = config.activation_export_bindings = &out;
    config.activation_export_identity_count = end < 4;
    Stage stage;
    skippy_error *error = nullptr;
    skippy_status status = skippy_model_open(path.c_str(), &config, &stage.model, &error);
    if (error) fprintf(stderr, "%s\n", error->message);
    must(status == SKIPPY_STATUS_OK);
    must(skippy_session_create(stage.model, &stage.session, nullptr) == SKIPPY_STATUS_OK);
    must(skippy_session_create(stage.model, &stage.second, nullptr) == SKIPPY_STATUS_OK);
    return stage;
}

struct Frame {
    skippy_activation_desc desc;
    std::vector<uint8_t> payload;
};

struct World {
    Stage first = open_stage(0, 2), middle = open_stage(2, 3), last = open_stage(2, 4);
    std::vector<Frame> frames; // of 1 to tokens_max tokens

    World() {
        for (size_t count = 1; count <= tokens_max; count++) {
            Frame frame{};
            frame.payload.resize(1 << 16);
            size_t bytes = 0;
            must(skippy_prefill_chunk_frame(first.session, prompt, count, nullptr, nullptr, &frame.desc, frame.payload.data(),
                                            frame.payload.size(), &bytes, nullptr) == SKIPPY_STATUS_OK);
            frame.payload.resize(bytes);
            must(skippy_session_reset(first.session, nullptr) == SKIPPY_STATUS_OK);
            frames.push_back(std::move(frame));
        }
    }
};

struct Input {
    const uint8_t *data;
    size_t size;

    uint64_t take(size_t bytes) {
        uint64_t value = 0;
        for (; bytes && size; bytes--, size--) value = value << 8 | *data++;
        return value;
    }
};

// Makes sizes, strides and offsets follow from the shapes, so that what a frame is can be wrong alone.
void agree(skippy_activation_desc &desc) {
    desc.payload_bytes = 0;
    for (uint32_t p = 0; p < desc.part_count && p < SKIPPY_ACTIVATION_MAX_PARTS; p++) {
        skippy_activation_part_desc &part = desc.parts[p];
        uint64_t bytes = part.ggml_type == SKIPPY_GGML_TYPE_F16 || part.ggml_type == SKIPPY_GGML_TYPE_BF16 ? 2 : 4;
        for (uint32_t axis = 0; axis < part.rank && axis < SKIPPY_ACTIVATION_MAX_DIMS; axis++) {
            part.byte_strides[axis] = bytes;
            bytes *= static_cast<uint64_t>(part.dimensions[axis]);
        }
        part.payload_offset = desc.payload_bytes;
        part.payload_bytes = bytes;
        desc.payload_bytes += bytes;
    }
}

// A patch: where (the head and three parts get most of them), how wide, what.
void patch(skippy_activation_desc &desc, Input &input) {
    auto *bytes = reinterpret_cast<uint8_t *>(&desc);
    size_t near = offsetof(skippy_activation_desc, parts) + 3 * sizeof desc.parts[0];
    while (input.size) {
        size_t kind = input.take(1);
        if (kind & 0x08) {
            agree(desc);
            continue;
        }
        size_t at = input.take(2) % (kind & 0x80 ? sizeof desc : near);
        if (kind & 0x40) { // one part copied over another
            memcpy(&desc.parts[at % 16], &desc.parts[at / 16 % 16], sizeof desc.parts[0]);
            continue;
        }
        size_t width = size_t{1} << (kind & 3);
        at -= at % width;
        uint64_t value = input.take(kind & 0x20 ? 1 : width);
        if (kind & 0x10) value = ~value;
        memcpy(bytes + at, &value, width);
    }
}

struct Call {
    int32_t kind;
    Stage *stage;
    size_t tokens;
    const skippy_activation_desc *desc;
    const void *payload;
    const Frame *valid;
    std::vector<uint8_t> out;
    size_t capacity;
    std::vector<int32_t> positions;
};

skippy_status run(Call &call, skippy_error **error) {
    skippy_session *session = call.stage->session;
    skippy_activation_desc outs[2]{};
    size_t bytes[2]{}, count = 0, indexes[2];
    int32_t predicted[tokens_max + 1];
    switch (call.kind) {
    case 0:
        return skippy_prefill_chunk_frame_sampled(session, prompt, call.tokens, nullptr, call.desc, call.payload, outs, call.out.data(),
                                                  call.capacity, bytes, predicted, error);
    case 1:
        return skippy_decode_step_frame_sampled(session, prompt[0], nullptr, call.desc, call.payload, outs, call.out.data(), call.capacity,
                                                bytes, predicted, error);
    case 2:
        return skippy_verify_tokens_frame_sampled(session, prompt, call.tokens, nullptr, call.desc, call.payload, outs, call.out.data(),
                                                  call.capacity, bytes, predicted, tokens_max, &count, 0, nullptr, error);
    case 3:
        return skippy_prefill_chunk_frame_with_positions(session, prompt, call.tokens, call.positions.data(), call.positions.size(),
                                                         call.desc, call.payload, outs, call.out.data(), call.capacity, bytes, error);
    default: break;
    }
    std::vector<uint8_t> second(call.valid->payload.size());
    skippy_iteration_request requests[2]{};
    requests[0] = {session, prompt, call.tokens, nullptr, 0, nullptr, call.desc, call.payload, true};
    requests[1] = {call.stage->second, prompt, call.valid->desc.token_count, nullptr, 0, nullptr,
                   &call.valid->desc, call.valid->payload.data(), true};
    void *payloads[] = {call.out.data(), second.data()};
    size_t capacities[] = {call.capacity, second.size()};
    return skippy_iteration_batch_sampled(requests, call.kind == 4 ? 1 : 2, outs, payloads, capacities, bytes, indexes, predicted, 2, &count,
                                          error);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static World world;
    Input input{data, size};
    Call call;
    call.kind = static_cast<int32_t>(input.take(1) % 6);
    uint64_t choices = input.take(1);
    call.stage = choices & 1 ? &world.middle : &world.last;
    const Frame &frame = world.frames[choices >> 1 & 3];
    call.valid = &frame;
    call.tokens = choices & 8 ? input.take(1) % (tokens_max + 1) : frame.desc.token_count;
    if (call.kind == 1) call.tokens = 1;
    call.capacity = choices & 16 ? input.take(2) : 1 << 13;
    for (size_t i = 0; i < call.tokens; i++) call.positions.push_back(static_cast<int32_t>(choices & 32 ? input.take(1) : i));
    skippy_activation_desc desc = frame.desc;
    patch(desc, input);
    if (desc.payload_bytes > payload_max) return 0;
    // Not a vector: its storage may be longer than the payload.
    auto *payload = static_cast<uint8_t *>(malloc(desc.payload_bytes + 1)) + 1; // and at an odd address
    for (size_t i = 0; i < desc.payload_bytes; i++) payload[i] = i < frame.payload.size() ? frame.payload[i] : static_cast<uint8_t>(i);
    call.desc = choices & 64 ? nullptr : &desc;
    call.payload = choices & 128 ? nullptr : payload;
    call.out.resize(call.capacity);

    skippy_session *sessions[] = {call.stage->session, call.stage->second};
    skippy_error *error = nullptr;
    skippy_status status = run(call, &error);
    must((status == SKIPPY_STATUS_OK) == (error == nullptr));
    must(!error || (error->status == status && error->message && *error->message));
    bool refused = status == SKIPPY_STATUS_INVALID_ARGUMENT || status == SKIPPY_STATUS_BUFFER_TOO_SMALL;
    must(refused || status == SKIPPY_STATUS_OK || status == SKIPPY_STATUS_RUNTIME_ERROR);
    int32_t moved = skippy_session_position(sessions[0]), beside = skippy_session_position(sessions[1]);
    must(!refused || (moved == 0 && beside == 0));
    must(status != SKIPPY_STATUS_OK || moved == static_cast<int32_t>(call.tokens));
    skippy_error_free(error);
    free(payload - 1);
    for (skippy_session *session : sessions) must(skippy_session_reset(session, nullptr) == SKIPPY_STATUS_OK);
    return 0;
}
