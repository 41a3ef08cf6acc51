// Version, features, devices.
#include "engine.hpp"

struct skippy_abi_version skippy_abi_version(void) {
    return {SKIPPY_ABI_MAJOR, SKIPPY_ABI_MINOR, SKIPPY_ABI_PATCH};
}

uint64_t skippy_abi_features(void) {
    static const int offered[] = {
        SKIPPY_FEATURE_RUNTIME_SLICE,      SKIPPY_FEATURE_MODEL_INTROSPECTION,
        SKIPPY_FEATURE_STATE_IMPORT_EXPORT, SKIPPY_FEATURE_TOKENIZE_DETOKENIZE,
        SKIPPY_FEATURE_ACTIVATION_FRAME,   SKIPPY_FEATURE_NATIVE_KV_PAGE,
        SKIPPY_FEATURE_SESSION_RESET,      SKIPPY_FEATURE_BATCH_VERIFY,
        SKIPPY_FEATURE_SAMPLING_CONFIG,    SKIPPY_FEATURE_BATCH_VERIFY_FRAME,
        SKIPPY_FEATURE_RECURRENT_STATE,    SKIPPY_FEATURE_LOGIT_BIAS,
        SKIPPY_FEATURE_SESSION_TRIM,       SKIPPY_FEATURE_GENERATION_SIGNALS,
        SKIPPY_FEATURE_CHAT_SAMPLING_GRAMMAR, SKIPPY_FEATURE_BACKEND_DEVICES,
        SKIPPY_FEATURE_NGRAM_CACHE_DRAFT,  SKIPPY_FEATURE_ITERATION_BATCH,
        SKIPPY_FEATURE_ACTIVATION_BOUNDARY};
    uint64_t bits = 0;
    for (int feature : offered) bits |= uint64_t{1} << feature;
    return bits;
}

skippy_status skippy_backend_device_count(size_t *out_count, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!out_count) refuse("backend_device_count: out_count is NULL");
        capture_llama_log();
        *out_count = ggml_backend_dev_count();
    });
}

static skippy_backend_device_type device_type(enum ggml_backend_dev_type type) {
    switch (type) {
    case GGML_BACKEND_DEVICE_TYPE_GPU: return SKIPPY_BACKEND_DEVICE_GPU;
    case GGML_BACKEND_DEVICE_TYPE_IGPU: return SKIPPY_BACKEND_DEVICE_IGPU;
    case GGML_BACKEND_DEVICE_TYPE_ACCEL: return SKIPPY_BACKEND_DEVICE_ACCEL;
    case GGML_BACKEND_DEVICE_TYPE_META: return SKIPPY_BACKEND_DEVICE_META;
    default: return SKIPPY_BACKEND_DEVICE_CPU;
    }
}

skippy_status skippy_backend_device_at(size_t index, skippy_backend_device *out_device, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!out_device) refuse("backend_device_at: out_device is NULL");
        capture_llama_log();
        if (index >= ggml_backend_dev_count())
            refuse("backend_device_at: index %zu of %zu devices", index, ggml_backend_dev_count());
        ggml_backend_dev_t device = ggml_backend_dev_get(index);
        ggml_backend_dev_props props{};
        ggml_backend_dev_get_props(device, &props);
        *out_device = {};
        out_device->version = 1;
        out_device->name = props.name;
        out_device->description = props.description;
        out_device->device_id = props.device_id;
        out_device->memory_free = props.memory_free;
        out_device->memory_total = props.memory_total;
        out_device->type = device_type(props.type);
        out_device->caps = (props.caps.async ? 1u : 0u) | (props.caps.host_buffer ? 2u : 0u) |
                           (props.caps.buffer_from_host_ptr ? 4u : 0u) | (props.caps.events ? 8u : 0u);
    });
}
