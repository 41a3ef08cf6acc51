/* Opens and closes a model: the runtime config against the spec, stage ranges, boundaries, facts. */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const uint64_t SIM_MODEL_MAGIC = 0x736b697070792121ULL;

struct skippy_runtime_config skippy_runtime_config_default(void) {
    return (struct skippy_runtime_config){
        .cache_type_k = SKIPPY_GGML_TYPE_F16, .cache_type_v = SKIPPY_GGML_TYPE_F16,
        .flash_attn_type = -1, .kv_offload = -1, .kv_unified = -1, .swa_full = -1,
        .op_offload = -1, .split_mode = -1};
}

/* ---- checks that need no model: the order is that of abi.md 6.19 ---- */

static sim_status check_names(const char *what, const char *const *names, size_t count, bool sorted,
                              sim_error out) {
    if (count && !names)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "%s: %zu of them, but the list is NULL", what, count);
    for (size_t i = 0; i < count; i++) {
        if (!names[i] || !*names[i])
            return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "%s: entry %zu is empty", what, i);
        if (sorted && i && strcmp(names[i - 1], names[i]) >= 0)
            return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                            "%s: entry %zu, `%.60s`, is not after entry %zu: sort them, each once", what, i,
                            names[i], i - 1);
    }
    return SKIPPY_STATUS_OK;
}

static sim_status check_plan(const struct skippy_runtime_config *config, sim_error out) {
    bool planned = config->resident_tensor_name_count > 0;
    sim_status status = check_names("resident_tensor_names", config->resident_tensor_names,
                                    config->resident_tensor_name_count, true, out);
    if (status == SKIPPY_STATUS_OK)
        status = check_names("activation_import_identities", config->activation_import_identities,
                             config->activation_import_identity_count, false, out);
    if (status == SKIPPY_STATUS_OK)
        status = check_names("activation_export_identities", config->activation_export_identities,
                             config->activation_export_identity_count, false, out);
    if (status != SKIPPY_STATUS_OK) return status;
    if (!planned && (config->activation_import_identity_count || config->activation_export_identity_count))
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                        "import or export identities are given, but no resident tensor names: "
                        "only a planned stage has boundaries");
    if (planned && (config->layer_start < 0 || config->layer_start >= config->layer_end))
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                        "planned stage: layers [%d, %d) must be 0 <= start < end", config->layer_start,
                        config->layer_end);
    return SKIPPY_STATUS_OK;
}

static sim_status check_range(const struct skippy_runtime_config *config, int64_t n_layer, sim_error out) {
    bool whole = config->layer_start == 0 && (config->layer_end == 0 || config->layer_end == n_layer);
    if (!config->resident_tensor_name_count) {
        if (whole) return SKIPPY_STATUS_OK;
        return sim_fail(out, SKIPPY_STATUS_UNSUPPORTED,
                        "layers [%d, %d) of %lld without resident tensor names: a stage must be planned",
                        config->layer_start, config->layer_end, (long long)n_layer);
    }
    if (config->layer_end > n_layer)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "layer_end %d exceeds the model's %lld layers",
                        config->layer_end, (long long)n_layer);
    if ((config->layer_start == 0) != (config->activation_import_identity_count == 0))
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                        "layer_start %d with %zu import identities: exactly the stages after layer 0 import",
                        config->layer_start, config->activation_import_identity_count);
    if ((config->layer_end == n_layer) != (config->activation_export_identity_count == 0))
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                        "layer_end %d of %lld with %zu export identities: exactly the stages before the end export",
                        config->layer_end, (long long)n_layer, config->activation_export_identity_count);
    return SKIPPY_STATUS_OK;
}

static sim_status check_sizes(const struct skippy_runtime_config *config, const struct sim_spec *spec,
                              sim_error out) {
    int64_t lanes = config->lane_count > 0 ? config->lane_count : 1;
    int64_t ctx = config->ctx_size > 0 ? config->ctx_size : spec->n_ctx_train;
    if (lanes > SIM_MAX_LANES)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "lane_count %lld exceeds %d", (long long)lanes,
                        SIM_MAX_LANES);
    if (ctx * lanes > INT32_MAX || ctx > 1 << 24)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                        "ctx_size %lld times lane_count %lld is too large: at most %d, and 2^24 a lane",
                        (long long)ctx, (long long)lanes, INT32_MAX);
    /* One value crosses a cut of this model: the residual stream. */
    if (config->activation_import_identity_count > 1 || config->activation_export_identity_count > 1)
        return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                        "the observed boundary has 1 part, the plan names %zu imports and %zu exports",
                        config->activation_import_identity_count, config->activation_export_identity_count);
    return SKIPPY_STATUS_OK;
}

/* ---- building ---- */

static bool pool_build(struct sim_pool *pool, int64_t size) {
    pool->size = (int32_t)size;
    pool->free_cells = malloc((size_t)size * sizeof *pool->free_cells); /* pages come with use */
    pool->references = malloc((size_t)size * sizeof *pool->references);
    return pool->free_cells && pool->references;
}

static void model_configure(struct skippy_model *model, const struct skippy_runtime_config *config) {
    const struct sim_spec *spec = &model->spec;
    model->planned = config->resident_tensor_name_count > 0;
    model->source = !model->planned || !config->activation_import_identity_count;
    model->terminal = !model->planned || !config->activation_export_identity_count;
    model->stage_index = config->stage_index;
    model->layer_start = model->planned ? config->layer_start : 0;
    model->layer_end = model->planned ? config->layer_end : (int32_t)spec->n_layer;
    model->lane_count = config->lane_count > 0 ? config->lane_count : 1;
    model->ctx_size = config->ctx_size > 0 ? config->ctx_size : (int32_t)spec->n_ctx_train;
    model->n_batch = config->n_batch > 0 ? config->n_batch : model->ctx_size;
    model->n_ubatch = config->n_ubatch > 0 ? config->n_ubatch : 512;
    if (model->n_ubatch > model->n_batch) model->n_ubatch = model->n_batch;
    model->n_threads = config->n_threads > 0 ? config->n_threads : 1;
    /* AUTO: KV per lane, except for stages, whose exports can only be batched from one pool. */
    model->unified = config->kv_unified < 0 ? model->planned : config->kv_unified != 0;
    model->swa_full = config->swa_full != 0;
    snprintf(model->description, sizeof model->description, "simulated model, seed %lld",
             (long long)spec->seed);
    if (!model->source)
        sim_boundary_make(model, model->layer_start, config->activation_import_identities[0], &model->input);
    if (!model->terminal)
        sim_boundary_make(model, model->layer_end, config->activation_export_identities[0], &model->output);
}

static void model_destroy(struct skippy_model *model) {
    model->magic = 0;
    while (model->prefix_count) sim_prefix_drop(model, model->prefixes[0].id);
    free(model->prefixes);
    for (int lane = 0; model->sessions && lane < model->lane_count; lane++) {
        struct skippy_session *session = &model->sessions[lane];
        free(session->tokens);
        free(session->points);
        free(session->cells);
        free(session->chat_sampling);
        free(session->mask);
    }
    free(model->sessions);
    free(model->pool.free_cells);
    free(model->pool.references);
    free(model->faults);
    free(model->last_rows);
    free(model->scratch);
    sim_vocabulary_free(&model->vocabulary);
    sim_spec_free(&model->spec);
    pthread_mutex_destroy(&model->lock);
    free(model);
}

static bool model_allocate(struct skippy_model *model) {
    const struct sim_spec *spec = &model->spec;
    model->sessions = calloc((size_t)model->lane_count, sizeof *model->sessions);
    if (!model->sessions || !sim_vocabulary_build(&model->vocabulary, spec)) return false;
    int64_t cells = spec->pool_cells ? spec->pool_cells : (int64_t)model->ctx_size * model->lane_count;
    if (model->unified && !pool_build(&model->pool, cells)) return false;
    if (model->unified) model->ctx_size = model->pool.size; /* a lane may grow until the pool is full */
    for (size_t i = 0; i < spec->fault_count; i++) sim_fault_add(model, &spec->faults[i]);
    return model->fault_count == spec->fault_count;
}

sim_status skippy_model_open(const char *path, const struct skippy_runtime_config *config,
                             struct skippy_model **out_model, sim_error out) {
    if (out_model) *out_model = NULL;
    if (!path || !out_model)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "model_open: path or out_model is NULL");
    struct skippy_runtime_config plain = skippy_runtime_config_default();
    if (!config) config = &plain;
    sim_status status = check_plan(config, out);
    if (status != SKIPPY_STATUS_OK) return status;
    if (config->selected_backend_device && strcmp(config->selected_backend_device, "CPU"))
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "unknown device `%.60s`: there is only CPU",
                        config->selected_backend_device);
    struct skippy_model *model = calloc(1, sizeof *model);
    if (!model) return sim_fail(out, SKIPPY_STATUS_MODEL_ERROR, "memory for the model ran out");
    pthread_mutex_init(&model->lock, NULL);
    atomic_flag_clear(&model->executing);
    status = sim_spec_read(path, &model->spec, out);
    if (status == SKIPPY_STATUS_OK) status = check_range(config, model->spec.n_layer, out);
    if (status == SKIPPY_STATUS_OK) status = check_sizes(config, &model->spec, out);
    if (status == SKIPPY_STATUS_OK) {
        model_configure(model, config);
        if (!model_allocate(model))
            status = sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "memory for the context ran out");
    }
    if (status != SKIPPY_STATUS_OK) {
        model_destroy(model);
        return status;
    }
    model->magic = SIM_MODEL_MAGIC;
    sim_clock_start(model);
    sim_spend_us(model, sim_now_ns(model), (double)model->spec.load_ms * 1000.0);
    atomic_fetch_add(&sim_live_models, 1);
    *out_model = model;
    return sim_ok(out);
}

sim_status skippy_model_free(struct skippy_model *model, sim_error out) {
    if (!model) return sim_ok(out);
    if (!sim_model_live(model)) return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "model_free: no live model");
    pthread_mutex_lock(&model->lock);
    int sessions = model->live_sessions;
    pthread_mutex_unlock(&model->lock);
    if (sessions)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                        "model_free: %d sessions are still open; free them first", sessions);
    sim_status status = sim_enter(model, out);
    if (status != SKIPPY_STATUS_OK) return status;
    model_destroy(model);
    atomic_fetch_sub(&sim_live_models, 1);
    return sim_ok(out);
}

/* ---- facts ---- */

const struct llama_model *skippy_model_llama_model(const struct skippy_model *model) { return NULL; }

bool skippy_model_output_activation_boundary(const struct skippy_model *model,
                                             struct skippy_activation_boundary_desc *out_boundary) {
    if (!sim_model_live(model) || model->terminal || !out_boundary) return false;
    *out_boundary = model->output;
    return true;
}

bool skippy_model_input_activation_boundary(const struct skippy_model *model,
                                            struct skippy_activation_boundary_desc *out_boundary) {
    if (!sim_model_live(model) || model->source || !out_boundary) return false;
    *out_boundary = model->input;
    return true;
}

bool skippyx_model_facts(const struct skippy_model *model, struct skippyx_model_facts *out_facts) {
    if (!sim_model_live(model) || !out_facts) return false;
    const struct sim_spec *spec = &model->spec;
    *out_facts = (struct skippyx_model_facts){
        .n_vocab = model->vocabulary.size, .n_embd = (int32_t)spec->n_embd,
        .n_layer = model->layer_end - model->layer_start, .n_ctx_train = (int32_t)spec->n_ctx_train,
        .lane_count = model->lane_count, .ctx_size = model->ctx_size,
        .pool_cells = model->unified ? model->pool.size : model->ctx_size * model->lane_count,
        .n_batch = model->n_batch, .n_ubatch = model->n_ubatch, .n_threads = model->n_threads,
        .sliding_window = (int32_t)spec->sliding_window, .token_bos = SIM_TOKEN_BOS,
        .token_eos = SIM_TOKEN_EOS, .add_bos = spec->add_bos, .kv_unified = model->unified,
        .is_recurrent = spec->recurrent, .size_bytes = spec->file_bytes,
        .parameter_count = (uint64_t)(spec->n_embd * (spec->vocab + 12 * spec->n_embd * spec->n_layer)),
        .architecture = spec->architecture, .description = model->description,
        .chat_template = *spec->chat_template ? spec->chat_template : NULL};
    return true;
}

bool skippyx_model_is_batch_invariant(const struct skippy_model *model, char *reason, size_t capacity) {
    if (reason && capacity) *reason = '\0';
    return true;
}
