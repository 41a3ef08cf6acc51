/*
 * The skippy C ABI, version 0.1.63, as far as this project uses it.
 *
 * One file for both sides: the engines (sim/, llama/) include it, and library.py hands it to cffi.
 * For cffi, every line that starts with '#' is dropped, and so is everything between the words
 * CFFI-SKIP-BEGIN and CFFI-SKIP-END; the rest has to stay plain C declarations without macros.
 *
 * Every call that returns skippy_status stores an error object through its last parameter when it
 * fails (if that pointer is not NULL); the caller frees it with skippy_error_free, exactly once.
 */
#ifndef SKIPPY_H
#define SKIPPY_H
/* CFFI-SKIP-BEGIN */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)
/* CFFI-SKIP-END */

/* ---- constants ---------------------------------------------------------------------------- */

enum {
    SKIPPY_ABI_MAJOR = 0,
    SKIPPY_ABI_MINOR = 1,
    SKIPPY_ABI_PATCH = 63,
    SKIPPY_ACTIVATION_FRAME_VERSION = 2,
    SKIPPY_ACTIVATION_BOUNDARY_DESC_VERSION = 2,
    SKIPPY_ACTIVATION_IDENTITY_BYTES = 32,
    SKIPPY_ACTIVATION_MAX_DIMS = 4,
    SKIPPY_ACTIVATION_MAX_PARTS = 16,
    SKIPPY_ACTIVATION_PART_OPTIONAL = 1,
    SKIPPY_NATIVE_MTP_VERSION = 1,
    SKIPPY_NATIVE_MTP_MAX_DRAFT_TOKENS = 8,
    SKIPPY_SAMPLING_VERSION = 3,
    SKIPPY_SAMPLING_FLAG_ENABLED = 1,
    SKIPPY_SAMPLING_FLAG_IGNORE_EOS = 2,
    SKIPPY_MAX_LOGIT_BIAS = 256,
    SKIPPY_MAX_SAMPLERS = 16,
    SKIPPY_MAX_DRY_BREAKERS = 8,
    SKIPPY_DRY_BREAKER_BYTES = 16,
    SKIPPY_KV_PAGE_VERSION = 1,
    SKIPPY_KV_PAGE_FLAG_V_TRANSPOSED = 1,
    SKIPPY_KV_PAGE_FLAG_HAS_K_IDX = 2,
    SKIPPY_MAX_VERIFY_CHECKPOINTS = 64
};

enum {
    SKIPPY_GGML_TYPE_F32 = 0,
    SKIPPY_GGML_TYPE_F16 = 1,
    SKIPPY_GGML_TYPE_I32 = 26,
    SKIPPY_GGML_TYPE_BF16 = 30
};

/* Feature bits of skippy_abi_features, by number. */
enum {
    SKIPPY_FEATURE_RUNTIME_SLICE = 0,
    SKIPPY_FEATURE_MODEL_INTROSPECTION = 3,
    SKIPPY_FEATURE_STATE_IMPORT_EXPORT = 5,
    SKIPPY_FEATURE_TOKENIZE_DETOKENIZE = 6,
    SKIPPY_FEATURE_ACTIVATION_FRAME = 7,
    SKIPPY_FEATURE_NATIVE_KV_PAGE = 8,
    SKIPPY_FEATURE_SESSION_RESET = 9,
    SKIPPY_FEATURE_BATCH_VERIFY = 10,
    SKIPPY_FEATURE_SAMPLING_CONFIG = 12,
    SKIPPY_FEATURE_BATCH_VERIFY_FRAME = 13,
    SKIPPY_FEATURE_RECURRENT_STATE = 14,
    SKIPPY_FEATURE_LOGIT_BIAS = 15,
    SKIPPY_FEATURE_SESSION_TRIM = 16,
    SKIPPY_FEATURE_GENERATION_SIGNALS = 19,
    SKIPPY_FEATURE_CHAT_SAMPLING_GRAMMAR = 22,
    SKIPPY_FEATURE_BACKEND_DEVICES = 23,
    SKIPPY_FEATURE_NATIVE_MTP_N1 = 25,
    SKIPPY_FEATURE_NGRAM_CACHE_DRAFT = 26,
    SKIPPY_FEATURE_ITERATION_BATCH = 28,
    SKIPPY_FEATURE_ACTIVATION_BOUNDARY = 29
};

enum skippy_status {
    SKIPPY_STATUS_OK = 0,
    SKIPPY_STATUS_ERROR = 1,
    SKIPPY_STATUS_INVALID_ARGUMENT = 2,
    SKIPPY_STATUS_UNSUPPORTED = 3,
    SKIPPY_STATUS_BUFFER_TOO_SMALL = 4,
    SKIPPY_STATUS_IO_ERROR = 5,
    SKIPPY_STATUS_MODEL_ERROR = 6,
    SKIPPY_STATUS_RUNTIME_ERROR = 7
};

enum skippy_load_mode {
    SKIPPY_LOAD_MODE_RUNTIME_SLICE = 0,
    SKIPPY_LOAD_MODE_LAYER_PACKAGE = 1,
    SKIPPY_LOAD_MODE_ARTIFACT_SLICE = 2
};

enum skippy_mtp_source {
    SKIPPY_MTP_SOURCE_DISABLED = 0,
    SKIPPY_MTP_SOURCE_INTEGRATED = 1,
    SKIPPY_MTP_SOURCE_EXTERNAL = 2
};

enum skippy_backend_device_type {
    SKIPPY_BACKEND_DEVICE_CPU = 0,
    SKIPPY_BACKEND_DEVICE_GPU = 1,
    SKIPPY_BACKEND_DEVICE_IGPU = 2,
    SKIPPY_BACKEND_DEVICE_ACCEL = 3,
    SKIPPY_BACKEND_DEVICE_META = 4
};

enum skippy_sampler_type {
    SKIPPY_SAMPLER_PENALTIES = 1,
    SKIPPY_SAMPLER_DRY = 2,
    SKIPPY_SAMPLER_TOP_N_SIGMA = 3,
    SKIPPY_SAMPLER_TOP_K = 4,
    SKIPPY_SAMPLER_TYPICAL_P = 5,
    SKIPPY_SAMPLER_TOP_P = 6,
    SKIPPY_SAMPLER_MIN_P = 7,
    SKIPPY_SAMPLER_XTC = 8,
    SKIPPY_SAMPLER_TEMPERATURE = 9
};

enum skippy_kv_page_codec { SKIPPY_KV_PAGE_CODEC_SINGLE_V1 = 1, SKIPPY_KV_PAGE_CODEC_ISWA_COMPOSITE_V1 = 2 };
enum skippy_kv_page_component_role { SKIPPY_KV_PAGE_ROLE_BASE = 1, SKIPPY_KV_PAGE_ROLE_SWA = 2 };

/* ---- structures --------------------------------------------------------------------------- */

struct skippy_model;
struct skippy_session;
struct skippy_ngram_cache;
struct llama_model;
struct llama_context;

struct skippy_abi_version {
    uint32_t major, minor, patch;
};

struct skippy_error {
    enum skippy_status status;
    const char *message;
};

struct skippy_activation_part_desc {
    uint8_t identity[32];
    uint32_t ggml_type;
    uint32_t rank;
    int32_t token_axis;
    uint32_t flags;
    int64_t dimensions[4];
    uint64_t byte_strides[4];
    uint64_t payload_offset;
    uint64_t payload_bytes;
};

struct skippy_activation_boundary_desc {
    uint32_t version;
    uint32_t part_count;
    uint8_t frontier_identity[32];
    struct skippy_activation_part_desc parts[16];
};

struct skippy_activation_desc {
    uint32_t version;
    int32_t producer_stage_index;
    int32_t layer_start;
    int32_t layer_end;
    uint32_t token_count;
    uint32_t sequence_count;
    uint32_t part_count;
    uint32_t reserved;
    uint64_t payload_bytes;
    uint8_t frontier_identity[32];
    struct skippy_activation_part_desc parts[16];
};

struct skippy_logit_bias {
    int32_t token;
    float bias;
};

/* The last field is newer than 0.1.63. It is always allocated: an older library never reads it, a
 * newer one would otherwise read past the end. */
struct skippy_sampling_config {
    uint32_t version;
    uint32_t flags;
    uint32_t seed;
    int32_t top_k;
    int32_t penalty_last_n;
    float temperature;
    float top_p;
    float presence_penalty;
    float frequency_penalty;
    float repeat_penalty;
    uint32_t logit_bias_count;
    float min_p;
    float typical_p;
    float top_nsigma;
    float dynatemp_range;
    float dynatemp_exponent;
    float dry_multiplier;
    float dry_base;
    int32_t dry_allowed_length;
    int32_t dry_penalty_last_n;
    float xtc_probability;
    float xtc_threshold;
    int32_t mirostat_mode;
    float mirostat_entropy;
    float mirostat_learning_rate;
    uint32_t sampler_count;
    uint32_t samplers[16];
    uint32_t ignore_eos;
    uint32_t dry_sequence_breaker_count;
    char dry_sequence_breakers[8][16];
    struct skippy_logit_bias logit_bias[256];
    int32_t reasoning_budget_tokens;
};

struct skippy_iteration_request {
    struct skippy_session *session;
    const int32_t *token_ids;
    size_t token_count;
    const int32_t *positions;
    size_t position_count;
    const struct skippy_sampling_config *sampling;
    const struct skippy_activation_desc *input_desc;
    const void *input_payload;
    bool sample_last;
};

struct skippy_native_mtp_draft {
    uint32_t version;
    bool available;
    int32_t token_count;
    int32_t token_ids[8];
    int64_t proposal_compute_us;
};

struct skippy_token_signal {
    float entropy, top_logprob, second_logprob, margin;
    int32_t top_token, second_token;
};

struct skippy_generation_signal_window {
    uint32_t token_count;
    float mean_entropy, max_entropy, mean_margin, min_margin;
    uint32_t high_entropy_count, repetition_count;
};

struct skippy_kv_page_component_desc {
    uint32_t version, role;
    uint64_t token_start, token_count;
    uint32_t layer_count, k_type, v_type, k_row_bytes, v_row_bytes, v_element_bytes, k_idx_row_bytes;
    uint64_t payload_offset, payload_bytes, flags;
};

struct skippy_kv_page_desc {
    uint32_t version;
    int32_t layer_start, layer_end;
    uint64_t token_start, token_count;
    uint32_t layer_count, k_type, v_type, k_row_bytes, v_row_bytes, v_element_bytes, k_idx_row_bytes;
    uint64_t payload_bytes, flags;
    uint32_t codec, component_count;
    struct skippy_kv_page_component_desc components[2];
};

struct skippy_runtime_config {
    int32_t stage_index, layer_start, layer_end;
    int32_t ctx_size; /* per lane */
    int32_t lane_count;
    int32_t n_batch, n_ubatch;
    int32_t n_threads, n_threads_batch;
    int32_t n_gpu_layers;
    bool has_mmap_override, use_mmap, use_mlock;
    int32_t cache_type_k, cache_type_v;
    int32_t flash_attn_type;
    enum skippy_load_mode load_mode;
    bool disable_repack, use_mmap_prefetch, use_mmap_buffer;
    const char *const *resident_tensor_names; /* a count above 0 makes the stage "planned" */
    size_t resident_tensor_name_count;
    const char *execution_contract;
    const char *const *activation_import_identities;
    size_t activation_import_identity_count;
    const char *const *activation_import_bindings;
    const char *const *activation_export_identities;
    size_t activation_export_identity_count;
    const char *const *activation_export_bindings;
    enum skippy_mtp_source mtp_source;
    const char *selected_backend_device;
    int32_t glm_dsa_policy_profile;
    uint32_t glm_dsa_policy_flags;
    int32_t glm_dsa_short_prefill_max_tokens;
    int32_t glm_dsa_direct_sparse_decode_max_top_k;
    uint64_t glm_dsa_dense_sparse_mask_max_bytes;
    int32_t glm_dsa_compact_flash_min_kv;
    int32_t kv_offload, kv_unified, swa_full, op_offload; /* -1 auto, 0 no, 1 yes */
    bool no_host_buffer, check_tensors, use_direct_io, has_main_gpu_override;
    int32_t main_gpu;
    int32_t split_mode;
};

struct skippy_backend_device {
    uint32_t version;
    const char *name;
    const char *description;
    const char *device_id;
    uint64_t memory_free, memory_total;
    enum skippy_backend_device_type type;
    uint64_t caps;
};

/* ---- ABI, errors, devices ------------------------------------------------------------------ */

struct skippy_abi_version skippy_abi_version(void);
uint64_t skippy_abi_features(void);
void skippy_error_free(struct skippy_error *error);
enum skippy_status skippy_backend_device_count(size_t *out_count, struct skippy_error **out_error);
enum skippy_status skippy_backend_device_at(size_t index, struct skippy_backend_device *out_device,
                                            struct skippy_error **out_error);

/* ---- model --------------------------------------------------------------------------------- */

struct skippy_runtime_config skippy_runtime_config_default(void);
enum skippy_status skippy_model_open(const char *path, const struct skippy_runtime_config *config,
                                     struct skippy_model **out_model, struct skippy_error **out_error);
enum skippy_status skippy_model_free(struct skippy_model *model, struct skippy_error **out_error);
const struct llama_model *skippy_model_llama_model(const struct skippy_model *model);
bool skippy_model_output_activation_boundary(const struct skippy_model *model,
                                             struct skippy_activation_boundary_desc *out_boundary);
bool skippy_model_input_activation_boundary(const struct skippy_model *model,
                                            struct skippy_activation_boundary_desc *out_boundary);

/* ---- tokenizer ----------------------------------------------------------------------------- */

enum skippy_status skippy_tokenize(struct skippy_model *model, const char *text, bool add_special,
                                   int32_t *output, size_t capacity, size_t *out_count,
                                   struct skippy_error **out_error);
enum skippy_status skippy_detokenize(struct skippy_model *model, const int32_t *tokens, size_t count,
                                     char *output, size_t capacity, size_t *out_bytes,
                                     struct skippy_error **out_error);
enum skippy_status skippy_token_is_eog(struct skippy_model *model, int32_t token, bool *out_is_eog,
                                       struct skippy_error **out_error);

/* ---- session ------------------------------------------------------------------------------- */

enum skippy_status skippy_session_create(struct skippy_model *model, struct skippy_session **out_session,
                                         struct skippy_error **out_error);
enum skippy_status skippy_session_create_from_resident_prefix(
    struct skippy_model *model, int32_t cache_seq_id, const int32_t *token_ids, size_t token_count,
    struct skippy_session **out_session, struct skippy_error **out_error);
enum skippy_status skippy_session_free(struct skippy_session *session, struct skippy_error **out_error);
enum skippy_status skippy_session_reset(struct skippy_session *session, struct skippy_error **out_error);
struct llama_context *skippy_session_llama_context(struct skippy_session *session);
int32_t skippy_session_position(const struct skippy_session *session);
int32_t skippy_session_batch_size(const struct skippy_session *session);
int32_t skippy_session_sequence_id(const struct skippy_session *session);
enum skippy_status skippy_session_set_position(struct skippy_session *session, int32_t n_past,
                                               struct skippy_error **out_error);
enum skippy_status skippy_session_configure_chat_sampling(
    struct skippy_session *session, const struct skippy_sampling_config *sampling,
    const char *metadata_json, uint64_t prompt_token_count, struct skippy_error **out_error);
enum skippy_status skippy_session_sample_current(struct skippy_session *session,
                                                 const struct skippy_sampling_config *sampling,
                                                 int32_t *out_token, struct skippy_error **out_error);
enum skippy_status skippy_session_last_token_signal(struct skippy_session *session,
                                                    struct skippy_token_signal *out_signal,
                                                    struct skippy_error **out_error);
enum skippy_status skippy_session_signal_window(struct skippy_session *session, uint32_t window_tokens,
                                                struct skippy_generation_signal_window *out_window,
                                                struct skippy_error **out_error);

/* ---- execution without frames --------------------------------------------------------------- */

enum skippy_status skippy_prefill_chunk(struct skippy_session *session, const int32_t *token_ids,
                                        size_t token_count, const void *input, size_t input_bytes,
                                        void *output, size_t output_capacity, size_t *out_bytes,
                                        struct skippy_error **out_error);
enum skippy_status skippy_decode_step_sampled(struct skippy_session *session, int32_t token_id,
                                              const struct skippy_sampling_config *sampling,
                                              const void *input, size_t input_bytes, void *output,
                                              size_t output_capacity, size_t *out_bytes,
                                              int32_t *out_predicted, struct skippy_error **out_error);
enum skippy_status skippy_decode_step_sampled_mtp(struct skippy_session *session, int32_t token_id,
                                                  const struct skippy_sampling_config *sampling,
                                                  int32_t *out_predicted, size_t max_draft,
                                                  struct skippy_native_mtp_draft *out_draft,
                                                  struct skippy_error **out_error);
enum skippy_status skippy_verify_tokens(struct skippy_session *session, const int32_t *token_ids,
                                        size_t token_count, int32_t *out_tokens, size_t capacity,
                                        size_t *out_count, struct skippy_error **out_error);

/* ---- execution with frames ------------------------------------------------------------------ */

enum skippy_status skippy_prefill_chunk_frame(
    struct skippy_session *session, const int32_t *token_ids, size_t token_count,
    const struct skippy_activation_desc *input_desc, const void *input_payload,
    struct skippy_activation_desc *out_desc, void *output_payload, size_t output_capacity,
    size_t *out_bytes, struct skippy_error **out_error);
enum skippy_status skippy_prefill_chunk_frame_with_positions(
    struct skippy_session *session, const int32_t *token_ids, size_t token_count,
    const int32_t *positions, size_t position_count, const struct skippy_activation_desc *input_desc,
    const void *input_payload, struct skippy_activation_desc *out_desc, void *output_payload,
    size_t output_capacity, size_t *out_bytes, struct skippy_error **out_error);
enum skippy_status skippy_prefill_chunk_frame_sampled(
    struct skippy_session *session, const int32_t *token_ids, size_t token_count,
    const struct skippy_sampling_config *sampling, const struct skippy_activation_desc *input_desc,
    const void *input_payload, struct skippy_activation_desc *out_desc, void *output_payload,
    size_t output_capacity, size_t *out_bytes, int32_t *out_predicted, struct skippy_error **out_error);
enum skippy_status skippy_prefill_chunk_frame_sampled_with_positions(
    struct skippy_session *session, const int32_t *token_ids, size_t token_count,
    const int32_t *positions, size_t position_count, const struct skippy_sampling_config *sampling,
    const struct skippy_activation_desc *input_desc, const void *input_payload,
    struct skippy_activation_desc *out_desc, void *output_payload, size_t output_capacity,
    size_t *out_bytes, int32_t *out_predicted, struct skippy_error **out_error);
enum skippy_status skippy_decode_step_frame_sampled(
    struct skippy_session *session, int32_t token_id, const struct skippy_sampling_config *sampling,
    const struct skippy_activation_desc *input_desc, const void *input_payload,
    struct skippy_activation_desc *out_desc, void *output_payload, size_t output_capacity,
    size_t *out_bytes, int32_t *out_predicted, struct skippy_error **out_error);
enum skippy_status skippy_decode_step_frame_sampled_mtp(
    struct skippy_session *session, int32_t token_id, const struct skippy_sampling_config *sampling,
    const struct skippy_activation_desc *input_desc, const void *input_payload,
    struct skippy_activation_desc *out_desc, void *output_payload, size_t output_capacity,
    size_t *out_bytes, int32_t *out_predicted, size_t max_draft,
    struct skippy_native_mtp_draft *out_draft, struct skippy_error **out_error);
enum skippy_status skippy_decode_step_frame_batch_sampled(
    struct skippy_session *const *sessions, const int32_t *token_ids,
    const struct skippy_sampling_config *const *sampling,
    const struct skippy_activation_desc *const *input_descs, const void *const *input_payloads,
    struct skippy_activation_desc *out_descs, void *const *output_payloads,
    const size_t *output_capacities, size_t *out_bytes, int32_t *out_predicted,
    size_t predicted_capacity, size_t request_count, struct skippy_error **out_error);
enum skippy_status skippy_iteration_batch_sampled(
    const struct skippy_iteration_request *requests, size_t request_count,
    struct skippy_activation_desc *out_descs, void *const *output_payloads,
    const size_t *output_capacities, size_t *out_bytes, size_t *out_sampled_request_indexes,
    int32_t *out_predicted, size_t sampled_capacity, size_t *out_sampled_count,
    struct skippy_error **out_error);
enum skippy_status skippy_verify_tokens_frame_sampled(
    struct skippy_session *session, const int32_t *token_ids, size_t token_count,
    const struct skippy_sampling_config *sampling, const struct skippy_activation_desc *input_desc,
    const void *input_payload, struct skippy_activation_desc *out_desc, void *output_payload,
    size_t output_capacity, size_t *out_bytes, int32_t *out_tokens, size_t out_token_capacity,
    size_t *out_token_count, size_t max_draft, struct skippy_native_mtp_draft *out_draft,
    struct skippy_error **out_error);
enum skippy_status skippy_session_copy_output_activation_frame(
    struct skippy_session *session, size_t token_count, struct skippy_activation_desc *out_desc,
    void *output_payload, size_t output_capacity, size_t *out_bytes, struct skippy_error **out_error);

/* ---- state ---------------------------------------------------------------------------------- */

enum skippy_status skippy_trim_session(struct skippy_session *session, uint64_t token_count,
                                       struct skippy_error **out_error);
enum skippy_status skippy_retire_verify_checkpoint(struct skippy_session *session, uint64_t token_start,
                                                   uint64_t token_count, struct skippy_error **out_error);
enum skippy_status skippy_session_save_prefix(struct skippy_session *session, int32_t cache_seq_id,
                                              uint64_t token_count, struct skippy_error **out_error);
enum skippy_status skippy_session_restore_prefix(struct skippy_session *session, int32_t cache_seq_id,
                                                 const int32_t *token_ids, size_t token_count,
                                                 struct skippy_error **out_error);
enum skippy_status skippy_session_drop_sequence(struct skippy_session *session, int32_t seq_id,
                                                struct skippy_error **out_error);
enum skippy_status skippy_session_memory_used_cells(struct skippy_session *session, uint64_t *out_cells,
                                                    struct skippy_error **out_error);
enum skippy_status skippy_export_state(struct skippy_session *session, int32_t layer_start,
                                       int32_t layer_end, void *output, size_t capacity,
                                       size_t *out_bytes, struct skippy_error **out_error);
enum skippy_status skippy_export_full_state(struct skippy_session *session, int32_t layer_start,
                                            int32_t layer_end, void *output, size_t capacity,
                                            size_t *out_bytes, struct skippy_error **out_error);
enum skippy_status skippy_import_state(struct skippy_session *session, int32_t layer_start,
                                       int32_t layer_end, const void *input, size_t input_bytes,
                                       struct skippy_error **out_error);
enum skippy_status skippy_import_full_state(struct skippy_session *session, int32_t layer_start,
                                            int32_t layer_end, const void *input, size_t input_bytes,
                                            struct skippy_error **out_error);
enum skippy_status skippy_export_recurrent_state(struct skippy_session *session, void *output,
                                                 size_t capacity, size_t *out_bytes,
                                                 struct skippy_error **out_error);
enum skippy_status skippy_import_recurrent_state(struct skippy_session *session, const void *input,
                                                 size_t input_bytes, struct skippy_error **out_error);
enum skippy_status skippy_export_kv_page(struct skippy_session *session, int32_t layer_start,
                                         int32_t layer_end, uint64_t token_start, uint64_t token_count,
                                         struct skippy_kv_page_desc *out_desc, void *output,
                                         size_t capacity, size_t *out_bytes,
                                         struct skippy_error **out_error);
enum skippy_status skippy_import_kv_page(struct skippy_session *session,
                                         const struct skippy_kv_page_desc *desc, const void *input,
                                         size_t input_bytes, struct skippy_error **out_error);

/* ---- n-gram cache --------------------------------------------------------------------------- */

enum skippy_status skippy_ngram_cache_create(uint16_t ngram_min, uint16_t ngram_max,
                                             struct skippy_ngram_cache **out_cache,
                                             struct skippy_error **out_error);
void skippy_ngram_cache_free(struct skippy_ngram_cache *cache);
enum skippy_status skippy_ngram_cache_reset(struct skippy_ngram_cache *cache, const int32_t *token_ids,
                                            size_t token_count, struct skippy_error **out_error);
enum skippy_status skippy_ngram_cache_append(struct skippy_ngram_cache *cache, const int32_t *token_ids,
                                             size_t token_count, struct skippy_error **out_error);
enum skippy_status skippy_ngram_cache_draft(struct skippy_ngram_cache *cache,
                                            const int32_t *continuation_prefix, size_t prefix_count,
                                            uint16_t max_draft, int32_t *output, size_t capacity,
                                            size_t *out_count, struct skippy_error **out_error);

/* ---- our extensions (optional: another libskippy need not have them) -------------------------- */

/* What a host wants to know of an opened model; strings are borrowed from the model. */
struct skippyx_model_facts {
    int32_t n_vocab, n_embd, n_layer, n_ctx_train;
    int32_t lane_count;
    int32_t ctx_size; /* cells that one lane can hold; with a shared pool, the most one lane may use */
    int32_t pool_cells; /* cells of all lanes together */
    int32_t n_batch, n_ubatch, n_threads;
    int32_t sliding_window; /* tokens; 0 without one */
    int32_t token_bos, token_eos; /* -1: none */
    bool add_bos, kv_unified, is_recurrent, is_hybrid, is_diffusion;
    uint64_t size_bytes, parameter_count;
    const char *architecture;
    const char *description;
    const char *chat_template; /* NULL: none */
};

bool skippyx_model_facts(const struct skippy_model *model, struct skippyx_model_facts *out_facts);

/* Whether rows of one batch may be computed by other kernels than a row alone, so that logits can
 * differ in their last bits with the company a row keeps: fills reason (NUL-terminated) when so. */
bool skippyx_model_is_batch_invariant(const struct skippy_model *model, char *reason, size_t capacity);

/* Whether an exporting stage gives the rows of several sequences in request order although each lane
 * has its own KV. Without this call only a shared pool is trusted with that. */
bool skippyx_model_batches_exports(const struct skippy_model *model);

/* Only in the simulated engine. A rule is one line of key=value words; see sim/README.md. */
enum skippy_status skippyx_sim_add_fault(struct skippy_model *model, const char *rule,
                                         struct skippy_error **out_error);
void skippyx_sim_clear_faults(struct skippy_model *model);
uint64_t skippyx_sim_clock_ns(const struct skippy_model *model);
void skippyx_sim_advance(struct skippy_model *model, uint64_t ns);
/* Error objects and sessions handed out and not yet freed, over the whole library. */
void skippyx_sim_live_objects(uint64_t *out_errors, uint64_t *out_sessions, uint64_t *out_models);

struct skippyx_logprob {
    int32_t token;
    float logprob;
};

/* At the last row of the session, if it put out logits and no other execution has run since: the
 * log-probability of `token` and of the top_count likeliest, highest first. They are the model's own,
 * before biases, samplers and grammar. */
enum skippy_status skippyx_session_logprobs(struct skippy_session *session, int32_t token,
                                            struct skippyx_logprob *out_token,
                                            struct skippyx_logprob *out_top, size_t top_count,
                                            struct skippy_error **out_error);

/* What the session may sample from now on: bit t % 32 of words[t / 32] set lets token t through. Holds
 * until the next call or the session's end; word_count 0 lifts it. What the model thinks of the tokens
 * stays as it is. A sample for which nothing is left fails, as one does whose biases leave nothing. */
enum skippy_status skippyx_session_set_mask(struct skippy_session *session, const uint32_t *words,
                                            size_t word_count, struct skippy_error **out_error);

/* Whether a token is for the model's own use (a turn's beginning, say) and no text for a reader. */
enum skippy_status skippyx_token_is_control(struct skippy_model *model, int32_t token,
                                            bool *out_is_control, struct skippy_error **out_error);

/* CFFI-SKIP-BEGIN */
#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
/* CFFI-SKIP-END */
#endif
