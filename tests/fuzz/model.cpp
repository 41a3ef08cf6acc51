// Fuzz target: opening a model file, and a few steps with what could be opened.
//
// The input is the file, or the beginning of a GGUF: zeros follow, so that tensors have their data. Whatever
// the file says, opening it answers with a status.
#include "skippy.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unistd.h>
#include <vector>

namespace {

const size_t data_bytes = 64 << 10; // enough for the tensors of the seeds

// A file of this process alone, in memory.
const std::string &path() {
    static const std::string name = "/dev/shm/skippy-fuzz-" + std::to_string(getpid());
    static const int registered = atexit([] { unlink(path().c_str()); });
    (void)registered;
    return name;
}

void write_file(const uint8_t *data, size_t size) {
    size_t zeros = size >= 4 && !memcmp(data, "GGUF", 4) ? data_bytes : 0;
    FILE *file = fopen(path().c_str(), "wb");
    if (!file || fwrite(data, 1, size, file) != size || fflush(file) || ftruncate(fileno(file), static_cast<off_t>(size + zeros))) {
        perror(path().c_str());
        abort();
    }
    fclose(file);
}

void use(skippy_model *model) {
    skippy_activation_boundary_desc boundary;
    skippy_model_input_activation_boundary(model, &boundary);
    skippy_model_output_activation_boundary(model, &boundary);
    int32_t tokens[32];
    char text[256];
    size_t count = 0, bytes = 0;
    if (skippy_tokenize(model, "a model <s> ab", true, tokens, 32, &count, nullptr) != SKIPPY_STATUS_OK) count = 0;
    skippy_detokenize(model, tokens, count, text, sizeof text, &bytes, nullptr);
    for (int32_t token : {-1, 0, 1, 2, 258, 1 << 20}) {
        bool end = false;
        skippy_token_is_eog(model, token, &end, nullptr);
        skippy_detokenize(model, &token, 1, text, sizeof text, &bytes, nullptr);
    }
    skippy_session *session = nullptr;
    if (skippy_session_create(model, &session, nullptr) != SKIPPY_STATUS_OK) return;
    std::vector<uint8_t> out(1 << 16);
    skippy_activation_desc desc;
    int32_t predicted = 0, first = count ? tokens[0] : 0;
    skippy_prefill_chunk_frame_sampled(session, &first, 1, nullptr, nullptr, nullptr, &desc, out.data(), out.size(), &bytes, &predicted,
                                       nullptr);
    if (skippy_session_free(session, nullptr) != SKIPPY_STATUS_OK) abort();
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    write_file(data, size);
    skippy_runtime_config config = skippy_runtime_config_default();
    config.ctx_size = 32, config.lane_count = 1, config.n_batch = 32, config.n_ubatch = 32, config.n_threads = 1;
    skippy_model *model = nullptr;
    skippy_error *error = nullptr;
    skippy_status status = skippy_model_open(path().c_str(), &config, &model, &error);
    if ((status == SKIPPY_STATUS_OK) != (model != nullptr) || (status == SKIPPY_STATUS_OK) != (error == nullptr)) abort();
    skippy_error_free(error);
    if (!model) return 0;
    use(model);
    if (skippy_model_free(model, nullptr) != SKIPPY_STATUS_OK) abort();
    return 0;
}
