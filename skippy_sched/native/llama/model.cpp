// Opening a model and its context; what is known of it.
#include "engine.hpp"

#include <algorithm>
#include <climits>
#include <cstring>
#include <sched.h>

namespace {

const int32_t lane_count_max = 256; // llama.cpp's LLAMA_MAX_SEQ

// Threads follow the processors that this process may use: a thread without one of its own makes all
// others wait for it at every barrier of a graph.
int32_t free_processors() {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
    return std::max(1, CPU_COUNT(&allowed));
}

ggml_type cache_type(int32_t number, const char *field) {
    if (number < 0) return GGML_TYPE_F16;
    static const ggml_type usable[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16, GGML_TYPE_Q8_0,  GGML_TYPE_Q4_0,
                                       GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL};
    for (ggml_type type : usable)
        if (type == number) return type;
    refuse("model_open: %s is %d: use 0 (f32), 1 (f16), 30 (bf16), 8 (q8_0), 2, 3, 6, 7 or 20", field, number);
}

void check_config(const skippy_runtime_config &config) {
    if (config.load_mode != SKIPPY_LOAD_MODE_RUNTIME_SLICE)
        fail(SKIPPY_STATUS_UNSUPPORTED, "model_open: load mode %d: only runtime slices (0) can be opened", config.load_mode);
    if (config.mtp_source != SKIPPY_MTP_SOURCE_DISABLED)
        fail(SKIPPY_STATUS_UNSUPPORTED, "model_open: native multi-token prediction is not offered by this engine");
    if (config.lane_count > lane_count_max)
        refuse("model_open: lane_count is %d, the most is %d", config.lane_count, lane_count_max);
    if (config.flash_attn_type < -1 || config.flash_attn_type > 1)
        refuse("model_open: flash_attn_type is %d: use -1 (auto), 0 or 1", config.flash_attn_type);
    if (config.split_mode < -1 || config.split_mode > 3)
        refuse("model_open: split_mode is %d: use -1 (auto) to 3", config.split_mode);
    if (config.resident_tensor_name_count && !config.resident_tensor_names)
        refuse("model_open: resident_tensor_names is NULL, its count is %zu", config.resident_tensor_name_count);
}

void load(skippy_model &model, const char *path, const skippy_runtime_config &config) {
    llama_model_params params = llama_model_default_params();
    ggml_backend_dev_t devices[2] = {nullptr, nullptr};
    params.n_gpu_layers = config.n_gpu_layers;
    if (config.selected_backend_device) {
        ggml_backend_dev_t device = ggml_backend_dev_by_name(config.selected_backend_device);
        if (!device) refuse("model_open: there is no device named %s", config.selected_backend_device);
        if (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) params.n_gpu_layers = 0;
        else devices[0] = device;
        params.devices = devices; // an empty list keeps everything on the CPU
    }
    if (config.split_mode >= 0) params.split_mode = static_cast<llama_split_mode>(config.split_mode);
    if (config.has_main_gpu_override) params.main_gpu = config.main_gpu;
    if (config.has_mmap_override || config.use_mlock) {
        bool map = !config.has_mmap_override || config.use_mmap;
        if (map) params.load_mode = config.use_mlock ? LLAMA_LOAD_MODE_MMAP_MLOCK : LLAMA_LOAD_MODE_MMAP;
        else params.load_mode = config.use_mlock ? LLAMA_LOAD_MODE_MLOCK : LLAMA_LOAD_MODE_NONE;
    }
    if (config.use_direct_io) params.load_mode = LLAMA_LOAD_MODE_DIRECT_IO;
    params.check_tensors = config.check_tensors;
    params.use_extra_bufts = !config.disable_repack;
    params.no_host = config.no_host_buffer;
    take_llama_log();
    model.llama.reset(llama_model_load_from_file(path, params));
    if (!model.llama) fail(SKIPPY_STATUS_MODEL_ERROR, "%s: llama.cpp cannot load it: %s", path, take_llama_log().c_str());
    if (!llama_model_has_decoder(model.llama.get()) || llama_model_has_encoder(model.llama.get()) ||
        llama_model_is_diffusion(model.llama.get()))
        fail(SKIPPY_STATUS_UNSUPPORTED, "%s: not a causal text generation model (architecture %s)", path,
             model.file.architecture.c_str());
}

void read_vocabulary(skippy_model &model) {
    model.vocab = llama_model_get_vocab(model.llama.get());
    model.n_vocab = llama_vocab_n_tokens(model.vocab);
    if (model.n_vocab <= 0) fail(SKIPPY_STATUS_MODEL_ERROR, "the model has no vocabulary");
    for (int32_t token = 0; token < model.n_vocab; token++)
        if (llama_vocab_is_eog(model.vocab, token)) model.end_tokens.push_back(token);
    int32_t count = 0;
    const llama_token *suppressed = llama_vocab_get_suppress_tokens(model.vocab, &count);
    for (int32_t i = 0; i < count; i++)
        if (suppressed[i] >= 0 && suppressed[i] < model.n_vocab) model.suppressed_tokens.push_back(suppressed[i]);
}

void read_model(skippy_model &model) {
    const llama_model *llama = model.llama.get();
    read_vocabulary(model);
    model.n_embd = llama_model_n_embd(llama);
    model.sliding_window = llama_model_n_swa(llama);
    model.recurrent = llama_model_is_recurrent(llama);
    model.hybrid = llama_model_is_hybrid(llama);
    llama_rope_type rope = llama_model_rope_type(llama);
    model.position_width = rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE ? 4 : 1;
    char text[256] = "";
    llama_model_desc(llama, text, sizeof text);
    model.description = text;
    model.architecture = model.file.architecture;
}

llama_context_params context_params(skippy_model &model, const skippy_runtime_config &config) {
    llama_context_params params = llama_context_default_params();
    int64_t lane_cells = config.ctx_size > 0 ? config.ctx_size : llama_model_n_ctx_train(model.llama.get());
    int64_t cells = lane_cells * model.lane_count;
    if (cells <= 0 || cells > INT32_MAX - 256 * lane_count_max)
        refuse("model_open: ctx_size %lld times %d lanes is out of range", static_cast<long long>(lane_cells), model.lane_count);
    model.unified = config.kv_unified == 1;
    model.lane_cells = static_cast<int32_t>(lane_cells);
    params.n_ctx = static_cast<uint32_t>(cells);
    model.n_batch = config.n_batch > 0 ? config.n_batch : model.lane_cells;
    // llama.cpp reserves an output row per sequence and aborts when n_batch has no room for them.
    params.n_batch = static_cast<uint32_t>(std::max(model.n_batch, model.lane_count));
    if (config.n_ubatch > 0) params.n_ubatch = static_cast<uint32_t>(config.n_ubatch);
    params.n_ubatch = std::min(params.n_ubatch, params.n_batch);
    params.n_seq_max = static_cast<uint32_t>(model.lane_count);
    params.n_threads = config.n_threads > 0 ? config.n_threads : free_processors();
    params.n_threads_batch = config.n_threads_batch > 0 ? config.n_threads_batch : params.n_threads;
    params.type_k = cache_type(config.cache_type_k, "cache_type_k");
    params.type_v = cache_type(config.cache_type_v, "cache_type_v");
    params.flash_attn_type = static_cast<llama_flash_attn_type>(config.flash_attn_type);
    if (config.kv_offload >= 0) params.offload_kqv = config.kv_offload == 1;
    if (config.op_offload >= 0) params.op_offload = config.op_offload == 1;
    // A window-sized cache saves memory (a model with 15 of 18 layers in windows: about a quarter of the
    // cells), but then a lane can only be cut back inside the window. Exact cuts are the default.
    params.swa_full = config.swa_full != 0;
    params.kv_unified = model.unified;
    if (!model.stage.terminal) {
        params.cb_eval = [](ggml_tensor *tensor, bool ask, void *user) { return on_tensor(tensor, ask, user); };
        params.cb_eval_user_data = &model;
    }
    return params;
}

void make_context(skippy_model &model, const skippy_runtime_config &config) {
    llama_context_params params = context_params(model, config);
    take_llama_log();
    model.context.reset(llama_init_from_model(model.llama.get(), params));
    if (!model.context)
        fail(SKIPPY_STATUS_RUNTIME_ERROR, "model_open: no context of %u cells: %s", params.n_ctx, take_llama_log().c_str());
    llama_context *context = model.context.get();
    model.memory = llama_get_memory(context);
    if (!model.memory) fail(SKIPPY_STATUS_UNSUPPORTED, "model_open: the architecture %s has no memory to decode with",
                            model.architecture.c_str());
    model.pool_cells = static_cast<int32_t>(llama_n_ctx(context));
    // A lane of its own is padded by llama.cpp and may be used to the end; a lane in a pool may grow
    // until the pool is full.
    model.lane_cells = static_cast<int32_t>(model.unified ? llama_n_ctx(context) : llama_n_ctx_seq(context));
    model.n_batch = std::min(model.n_batch, static_cast<int32_t>(llama_n_batch(context)));
    model.n_ubatch = static_cast<int32_t>(llama_n_ubatch(context));
    model.n_threads = std::max(params.n_threads, params.n_threads_batch);
    model.flash_attention = config.flash_attn_type != 0;
}

bool fits_a_lane(const skippy_model &model) { return model.lane_count <= model.n_ubatch || model.unified; }

} // namespace

skippy_runtime_config skippy_runtime_config_default(void) {
    skippy_runtime_config config{};
    config.cache_type_k = config.cache_type_v = GGML_TYPE_F16;
    config.flash_attn_type = config.split_mode = -1;
    config.kv_offload = config.kv_unified = config.swa_full = config.op_offload = -1;
    return config;
}

skippy_status skippy_model_open(const char *path, const skippy_runtime_config *config, skippy_model **out_model,
                                skippy_error **out_error) {
    if (out_model) *out_model = nullptr;
    return guarded(out_error, [&] {
        if (!path || !out_model) refuse("model_open: %s is NULL", path ? "out_model" : "path");
        const skippy_runtime_config given = config ? *config : skippy_runtime_config_default();
        check_config(given);
        capture_llama_log();
        auto model = std::make_unique<skippy_model>();
        model->lane_count = std::max(1, given.lane_count);
        AssertionsThrow scope;
        try {
            model->file = inspect_file(path);
            load(*model, path, given);
            read_model(*model);
        } catch (const std::exception &error) {
            fail(SKIPPY_STATUS_MODEL_ERROR, "%s: llama.cpp cannot load it: %s", path, error.what());
        }
        plan_stage(*model, given);
        make_context(*model, given);
        model->sessions.resize(static_cast<size_t>(model->lane_count));
        model->candidates.resize(static_cast<size_t>(model->n_vocab));
        *out_model = model.release();
    });
}

skippy_status skippy_model_free(skippy_model *model, skippy_error **out_error) {
    return guarded(out_error, [&] {
        if (!model) return;
        int live = 0;
        for (const skippy_session &session : model->sessions) live += session.live;
        if (live) refuse("model_free: %d sessions are still open: free them first", live);
        delete model;
    });
}

const llama_model *skippy_model_llama_model(const skippy_model *model) { return model ? model->llama.get() : nullptr; }

bool skippyx_model_facts(const skippy_model *model, struct skippyx_model_facts *out) {
    if (!model || !out) return false;
    const llama_model *llama = model->llama.get();
    *out = {};
    out->n_vocab = model->n_vocab;
    out->n_embd = model->n_embd;
    out->n_layer = model->stage.layer_end - model->stage.layer_start;
    out->n_ctx_train = llama_model_n_ctx_train(llama);
    out->lane_count = model->lane_count;
    out->ctx_size = model->lane_cells;
    out->pool_cells = model->pool_cells;
    out->n_batch = model->n_batch;
    out->n_ubatch = model->n_ubatch;
    out->n_threads = model->n_threads;
    out->sliding_window = model->sliding_window;
    out->token_bos = llama_vocab_bos(model->vocab);
    out->token_eos = llama_vocab_eos(model->vocab);
    out->add_bos = llama_vocab_get_add_bos(model->vocab);
    out->kv_unified = model->unified;
    out->is_recurrent = model->recurrent;
    out->is_hybrid = model->hybrid;
    out->is_diffusion = llama_model_is_diffusion(llama);
    out->size_bytes = llama_model_size(llama);
    out->parameter_count = llama_model_n_params(llama);
    out->architecture = model->architecture.c_str();
    out->description = model->description.c_str();
    out->chat_template = llama_model_chat_template(llama, nullptr);
    return true;
}

// Shown by experiment: with these settings and at most 63 rows of a lane in one decode, logits are bit-equal
// in any company and any chunking, also over 512 cells. From 64 rows on attention uses another kernel.
static const char *variance(const skippy_model &model) {
    if (model.unified) return "a shared KV pool computes all sequences in one attention call: set kv_unified to false";
    if (!model.flash_attention) return "without flash attention one row and several rows use other kernels: turn it on";
    if (model.n_threads != 1) return "with several threads attention over 512 cells or more is split by thread: use 1 thread";
    if (model.has_recurrent_memory()) return "recurrent layers are not shown to be invariant";
    if (!fits_a_lane(model)) return "n_ubatch is below the number of lanes: a batch is cut in other places than a row alone";
    return model.file.unproven_tensor.empty() ? nullptr : model.file.unproven_tensor.c_str();
}

bool skippyx_model_is_batch_invariant(const skippy_model *model, char *reason, size_t capacity) {
    const char *why = model ? variance(*model) : "model is NULL";
    if (why && reason && capacity) {
        strncpy(reason, why, capacity - 1);
        reason[capacity - 1] = '\0';
    }
    return !why;
}
