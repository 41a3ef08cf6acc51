// The header of a model file, read before llama.cpp maps the file.
//
// llama.cpp trusts offsets of a damaged file in places, so the data range of every tensor is held
// against the size of the file here.
#include "engine.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sys/stat.h>

namespace {

struct GgufFree {
    void operator()(gguf_context *gguf) const { gguf_free(gguf); }
    void operator()(ggml_context *context) const { ggml_free(context); }
};
using Gguf = std::unique_ptr<gguf_context, GgufFree>;

void damaged(const char *path, const std::string &what) {
    std::string log = take_llama_log();
    fail(SKIPPY_STATUS_MODEL_ERROR, "%s: not a usable GGUF file: %s%s%s", path, what.c_str(), log.empty() ? "" : ": ",
         log.c_str());
}

int64_t file_size(const char *path) {
    struct stat facts;
    if (stat(path, &facts) != 0) fail(SKIPPY_STATUS_MODEL_ERROR, "%s: cannot be opened: %s", path, strerror(errno));
    if (!S_ISREG(facts.st_mode)) fail(SKIPPY_STATUS_MODEL_ERROR, "%s: not a file", path);
    return facts.st_size;
}

void check_data_ranges(const char *path, const gguf_context *gguf, int64_t size) {
    uint64_t data_start = gguf_get_data_offset(gguf), bytes = static_cast<uint64_t>(size);
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf); i++) {
        uint64_t offset = gguf_get_tensor_offset(gguf, i), length = gguf_get_tensor_size(gguf, i);
        if (data_start > bytes || offset > bytes - data_start || length > bytes - data_start - offset)
            damaged(path, "it is cut short: tensor " + std::string(gguf_get_tensor_name(gguf, i)) + " ends at byte " +
                              std::to_string(data_start + offset + length) + ", the file has " + std::to_string(size));
    }
}

// llama.cpp's own check of this overflows on the way and lets some through.
void check_shapes(const char *path, ggml_context *tensors) {
    for (ggml_tensor *t = ggml_get_first_tensor(tensors); t; t = ggml_get_next_tensor(tensors, t)) {
        int64_t elements = 1;
        for (int64_t dimension : t->ne)
            if (dimension < 0 || __builtin_mul_overflow(elements, std::max<int64_t>(dimension, 1), &elements))
                damaged(path, std::string("tensor ") + t->name + " has more elements than can be counted");
    }
}

std::string text_key(const gguf_context *gguf, const char *key) {
    int64_t id = gguf_find_key(gguf, key);
    return id >= 0 && gguf_get_kv_type(gguf, id) == GGUF_TYPE_STRING ? gguf_get_val_str(gguf, id) : "";
}

int32_t number_key(const char *path, const gguf_context *gguf, const char *key) {
    int64_t id = gguf_find_key(gguf, key);
    if (id < 0 || gguf_get_kv_type(gguf, id) != GGUF_TYPE_UINT32)
        damaged(path, std::string("the stage slice lacks the u32 key ") + key);
    return static_cast<int32_t>(gguf_get_val_u32(gguf, id));
}

void read_stage_keys(const char *path, const gguf_context *gguf, FileFacts &facts) {
    if (gguf_find_key(gguf, "skippy.stage.layer_start") < 0) return;
    facts.is_slice = true;
    facts.layer_start = number_key(path, gguf, "skippy.stage.layer_start");
    facts.layer_end = number_key(path, gguf, "skippy.stage.layer_end");
    facts.n_layer = number_key(path, gguf, "skippy.stage.n_layer");
    facts.model_digest = text_key(gguf, "skippy.stage.model_digest");
    int64_t idle = gguf_find_key(gguf, "skippy.stage.idle_layer");
    facts.idle_layer = idle >= 0 && gguf_get_kv_type(gguf, idle) == GGUF_TYPE_BOOL && gguf_get_val_bool(gguf, idle);
    if (facts.layer_start < 0 || facts.layer_end <= facts.layer_start || facts.n_layer < facts.layer_end)
        damaged(path, "the stage slice names layers [" + std::to_string(facts.layer_start) + ", " +
                          std::to_string(facts.layer_end) + ") of " + std::to_string(facts.n_layer));
}

// Weights whose products were measured to be bit-equal for any number of rows.
bool has_one_kernel(const ggml_tensor &tensor) {
    if (tensor.ne[1] <= 1 || tensor.type == GGML_TYPE_Q4_1) return true;
    bool output = !strcmp(tensor.name, "token_embd.weight") || !strcmp(tensor.name, "output.weight");
    return output && tensor.type == GGML_TYPE_Q8_0;
}

} // namespace

FileFacts inspect_file(const char *path) {
    int64_t size = file_size(path);
    take_llama_log();
    ggml_context *tensors = nullptr;
    Gguf gguf(gguf_init_from_file(path, {true, &tensors}));
    std::unique_ptr<ggml_context, GgufFree> owner(tensors);
    if (!gguf) damaged(path, "its header cannot be read");
    check_shapes(path, tensors);
    check_data_ranges(path, gguf.get(), size);
    FileFacts facts;
    facts.architecture = text_key(gguf.get(), "general.architecture");
    if (facts.architecture.empty()) damaged(path, "it names no general.architecture");
    read_stage_keys(path, gguf.get(), facts);
    for (ggml_tensor *t = ggml_get_first_tensor(tensors); t; t = ggml_get_next_tensor(tensors, t))
        if (facts.unproven_tensor.empty() && !has_one_kernel(*t))
            facts.unproven_tensor = std::string("the kernel for ") + t->name + " (" + ggml_type_name(t->type) +
                                    ") is not shown to be independent of the number of rows; Q4_1 is, and Q8_0 as output matrix";
    return facts;
}
