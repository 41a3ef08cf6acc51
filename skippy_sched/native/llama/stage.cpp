// Running a slice of layers on unmodified llama.cpp.
//
// A slice is a GGUF of its own whose layers are numbered from 0. Rows come in through batch.embd. When the
// slice exports, it carries one idle layer behind its own: the evaluation callback copies the residual that
// enters it and stops the graph, so the idle layer is never computed and no output row is gathered.
#include "engine.hpp"

#include <algorithm>
#include <cstring>

namespace {

// The last 64 lowercase hex digits of a planner's name are the identity; without a planner both sides of
// a cut hash the same description of it.
Identity part_identity(const skippy_model &model, int32_t layer, const char *const *names, size_t count) {
    const char *name = count ? names[0] : nullptr;
    size_t length = name ? strlen(name) : 0;
    const std::string tail = length >= 64 ? std::string(name + length - 64) : std::string();
    if (!tail.empty() && tail.find_first_not_of("0123456789abcdef") == std::string::npos) {
        Identity identity;
        for (size_t i = 0; i < identity.size(); i++) identity[i] = static_cast<uint8_t>(std::stoul(tail.substr(2 * i, 2), nullptr, 16));
        return identity;
    }
    if (name) refuse("model_open: the identity %.80s does not end in 64 lowercase hex digits", name);
    std::string text = "skippy-residual;model=" + model.file.model_digest + ";layer=" + std::to_string(layer) +
                       ";part=residual;type=0;rank=2;axis=1;embd=" + std::to_string(model.n_embd);
    return sha256(text.data(), text.size());
}

skippy_activation_boundary_desc boundary(const skippy_model &model, const Identity &identity) {
    skippy_activation_boundary_desc desc{};
    desc.version = SKIPPY_ACTIVATION_BOUNDARY_DESC_VERSION;
    desc.part_count = 1;
    skippy_activation_part_desc &part = desc.parts[0];
    std::copy(identity.begin(), identity.end(), part.identity);
    part.ggml_type = SKIPPY_GGML_TYPE_F32;
    part.rank = 2;
    part.token_axis = 1;
    part.dimensions[0] = model.n_embd;
    part.dimensions[2] = part.dimensions[3] = 1;
    part.byte_strides[0] = sizeof(float);
    part.byte_strides[1] = sizeof(float) * static_cast<uint64_t>(model.n_embd);
    Identity frontier = sha256(identity.data(), identity.size());
    std::copy(frontier.begin(), frontier.end(), desc.frontier_identity);
    return desc;
}

void check_names(const char *which, const char *const *names, size_t count) {
    if (count > 1) fail(SKIPPY_STATUS_UNSUPPORTED, "model_open: %zu %s identities: a stage here passes one value, the residual", count, which);
    if (count && (!names || !names[0])) refuse("model_open: the %s identities are NULL, their count is %zu", which, count);
}

// Which layers this model runs, as the slice's own keys say and the configuration confirms.
void read_range(skippy_model &model, const skippy_runtime_config &config) {
    Stage &stage = model.stage;
    const FileFacts &file = model.file;
    int32_t in_file = llama_model_n_layer(model.llama.get());
    stage.n_layer = file.is_slice ? file.n_layer : in_file;
    stage.layer_start = file.is_slice ? file.layer_start : 0;
    stage.layer_end = file.is_slice ? file.layer_end : in_file;
    bool unset = config.layer_start == 0 && config.layer_end == 0;
    if (unset) return;
    if (config.layer_start < 0 || config.layer_end <= config.layer_start)
        refuse("model_open: layers [%d, %d) are no range", config.layer_start, config.layer_end);
    if (config.layer_end > stage.n_layer)
        refuse("model_open: layers [%d, %d) of a model of %d", config.layer_start, config.layer_end, stage.n_layer);
    if (config.layer_start == stage.layer_start && config.layer_end == stage.layer_end) return;
    if (!file.is_slice)
        fail(SKIPPY_STATUS_UNSUPPORTED,
             "model_open: layers [%d, %d) of a whole model of %d: split the model into slices and open one of them",
             config.layer_start, config.layer_end, stage.n_layer);
    refuse("model_open: layers [%d, %d) asked for, the slice holds [%d, %d)", config.layer_start, config.layer_end,
           stage.layer_start, stage.layer_end);
}

// llama.cpp cuts a batch into graphs. With a shared pool: in batch order. With KV per lane: repeatedly the
// longest run of lanes with consecutive ids, an equal number of tokens of each. `order` gets, for each
// graph, its batch rows; the sizes are held against what the callback saw.
std::vector<std::vector<int32_t>> graphs_of(const skippy_model &model, const std::vector<Row *> &rows) {
    std::vector<std::vector<int32_t>> graphs;
    size_t limit = static_cast<size_t>(model.n_ubatch);
    if (model.unified || model.lane_count == 1) {
        int32_t total = 0;
        for (const Row *row : rows) total += static_cast<int32_t>(row->count);
        for (int32_t i = 0; i < total; i++) {
            if (graphs.empty() || graphs.back().size() == limit) graphs.emplace_back();
            graphs.back().push_back(i);
        }
        return graphs;
    }
    std::vector<size_t> used(rows.size(), 0);
    for (;;) {
        std::vector<size_t> run;
        for (size_t r = 0; r < rows.size() && run.size() <= limit; r++)
            if (used[r] < rows[r]->count && (run.empty() || rows[r]->session->lane == rows[run.back()]->session->lane + 1)) run.push_back(r);
        if (run.empty()) return graphs;
        size_t length = 0;
        auto all_have_more = [&] {
            return std::all_of(run.begin(), run.end(), [&](size_t r) { return used[r] + length < rows[r]->count; });
        };
        do length++;
        while (all_have_more() && (length + 1) * run.size() <= limit);
        graphs.emplace_back();
        for (size_t r : run) {
            for (size_t i = 0; i < length; i++) graphs.back().push_back(rows[r]->batch_row + static_cast<int32_t>(used[r] + i));
            used[r] += length;
        }
    }
}

} // namespace

void plan_stage(skippy_model &model, const skippy_runtime_config &config) {
    check_names("import", config.activation_import_identities, config.activation_import_identity_count);
    check_names("export", config.activation_export_identities, config.activation_export_identity_count);
    read_range(model, config);
    Stage &stage = model.stage;
    stage.index = config.stage_index;
    stage.planned = config.resident_tensor_name_count > 0 || model.file.is_slice;
    bool imports = config.activation_import_identity_count, exports = config.activation_export_identity_count;
    bool first = stage.layer_start == 0, last = stage.layer_end == stage.n_layer;
    if (!stage.planned && (imports || exports)) refuse("model_open: activation identities without resident tensor names");
    if ((imports && first) || (!imports && !first && config.resident_tensor_name_count))
        refuse("model_open: layers start at %d with %zu import identities", stage.layer_start, config.activation_import_identity_count);
    if ((exports && last) || (!exports && !last && config.resident_tensor_name_count))
        refuse("model_open: layers end at %d of %d with %zu export identities", stage.layer_end, stage.n_layer,
               config.activation_export_identity_count);
    stage.source = first;
    stage.terminal = last;
    int32_t own = stage.layer_end - stage.layer_start, in_file = llama_model_n_layer(model.llama.get());
    if (model.file.is_slice && in_file != own + (last ? 0 : 1))
        fail(SKIPPY_STATUS_MODEL_ERROR, "the slice of layers [%d, %d) holds %d layers, expected %d", stage.layer_start, stage.layer_end,
             in_file, own + (last ? 0 : 1));
    if (!stage.source)
        stage.input = boundary(model, part_identity(model, stage.layer_start, config.activation_import_identities, config.activation_import_identity_count));
    if (stage.terminal) return;
    stage.output = boundary(model, part_identity(model, stage.layer_end, config.activation_export_identities, config.activation_export_identity_count));
    model.capture.name = "l_out-" + std::to_string(own - 1);
}

void start_capture(skippy_model &model) {
    model.capture.rows.clear();
    model.capture.graph_rows.clear();
    model.capture.broken = false;
}

bool on_tensor(ggml_tensor *tensor, bool ask, void *user) {
    auto &model = *static_cast<skippy_model *>(user);
    Capture &capture = model.capture;
    bool wanted = capture.name == tensor->name;
    if (ask || !wanted) return wanted || !ask;
    if (tensor->type != GGML_TYPE_F32 || tensor->ne[0] != model.n_embd || ggml_nbytes(tensor) != ggml_nelements(tensor) * sizeof(float)) {
        capture.broken = true;
        return false;
    }
    size_t before = capture.rows.size();
    try {
        capture.rows.resize(before + static_cast<size_t>(ggml_nelements(tensor)));
        ggml_backend_tensor_get(tensor, capture.rows.data() + before, 0, ggml_nbytes(tensor));
        capture.graph_rows.push_back(static_cast<int32_t>(ggml_nrows(tensor)));
    } catch (...) {
        capture.broken = true;
    }
    return false; // the graph stops here
}

void distribute_capture(skippy_model &model, std::vector<Row *> &rows_by_lane) {
    const Capture &capture = model.capture;
    auto graphs = graphs_of(model, rows_by_lane);
    bool matches = !capture.broken && graphs.size() == capture.graph_rows.size();
    for (size_t g = 0; matches && g < graphs.size(); g++) matches = static_cast<int32_t>(graphs[g].size()) == capture.graph_rows[g];
    if (!matches)
        fail(SKIPPY_STATUS_RUNTIME_ERROR,
             "the exported rows of %s cannot be put back in order: %zu graphs expected, %zu seen; the sessions have advanced",
             capture.name.c_str(), graphs.size(), capture.graph_rows.size());
    size_t n_embd = static_cast<size_t>(model.n_embd), total = 0;
    for (const auto &graph : graphs) total += graph.size();
    std::vector<const float *> by_batch_row(total);
    const float *next = capture.rows.data();
    for (const auto &graph : graphs)
        for (int32_t batch_row : graph) {
            by_batch_row[static_cast<size_t>(batch_row)] = next;
            next += n_embd;
        }
    for (Row *row : rows_by_lane) {
        auto first = by_batch_row.begin() + row->batch_row;
        row->session->exported.assign(first, first + static_cast<int32_t>(row->count));
        row->session->export_serial = model.decode_serial;
    }
}

// Rows are put back in order by distribute_capture, whatever the KV; only recurrent memory is another matter.
bool skippyx_model_batches_exports(const skippy_model *model) { return model && !model->has_recurrent_memory(); }

bool skippy_model_output_activation_boundary(const skippy_model *model, skippy_activation_boundary_desc *out_boundary) {
    if (!model || !out_boundary || model->stage.terminal) return false;
    *out_boundary = model->stage.output;
    return true;
}

bool skippy_model_input_activation_boundary(const skippy_model *model, skippy_activation_boundary_desc *out_boundary) {
    if (!model || !out_boundary || model->stage.source) return false;
    *out_boundary = model->stage.input;
    return true;
}
