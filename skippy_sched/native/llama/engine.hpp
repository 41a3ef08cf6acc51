// What the files of the llama engine share: its objects, and the calls between the files.
//
// One llama_context per model. A session is a lane, that is a sequence id of this context. Every call
// that computes ends in execute() (execute.cpp); everything that can be refused is refused before it,
// because llama.cpp answers some bad input with an abort of the process.
#pragma once

#include "llama.h"
#include "skippy.h"

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

// ---- errors (error.cpp) -----------------------------------------------------------------------

struct Failure {
    skippy_status status;
    std::string message;
};

[[noreturn]] void fail(skippy_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));
void store_error(skippy_error **out_error, skippy_status status, const char *message);
skippy_status store_current_exception(skippy_error **out_error);

// The only way out of the library: no C++ exception crosses the ABI.
template <class Body> skippy_status guarded(skippy_error **out_error, Body &&body) {
    if (out_error) *out_error = nullptr;
    try {
        body();
        return SKIPPY_STATUS_OK;
    } catch (...) {
        return store_current_exception(out_error);
    }
}

#define refuse(...) fail(SKIPPY_STATUS_INVALID_ARGUMENT, __VA_ARGS__)

// What llama.cpp itself complained about on this thread since take_llama_log was last called.
void capture_llama_log();
std::string take_llama_log();

// While one lives, a failed assertion of llama.cpp on this thread throws instead of ending the process.
// For opening a model only: all that was half made is thrown away with it.
struct AssertionsThrow {
    AssertionsThrow();
    ~AssertionsThrow();
};

// ---- small owners -----------------------------------------------------------------------------

struct LlamaFree {
    void operator()(llama_model *model) const { llama_model_free(model); }
    void operator()(llama_context *context) const { llama_free(context); }
    void operator()(llama_sampler *sampler) const { llama_sampler_free(sampler); }
};
using SamplerPtr = std::unique_ptr<llama_sampler, LlamaFree>;
using Identity = std::array<uint8_t, SKIPPY_ACTIVATION_IDENTITY_BYTES>;

Identity sha256(const void *data, size_t size);

// ---- the file (gguf.cpp) ----------------------------------------------------------------------

// What the header of a model file says, read before llama.cpp gets the file.
struct FileFacts {
    bool is_slice = false; // written by the splitter: skippy.stage.* keys are present
    int32_t layer_start = 0, layer_end = 0, n_layer = 0;
    bool idle_layer = false;
    std::string model_digest;
    std::string architecture;
    std::string unproven_tensor; // why batches may vary by the kernel of a weight; empty: they do not
};

// Throws MODEL_ERROR for a file that is not a whole GGUF.
FileFacts inspect_file(const char *path);

// ---- cells of a shared pool (cells.cpp) ---------------------------------------------------------

// Which cells of a shared pool a sequence holds. Sequences that share a prefix share its runs; a run is
// always used from its beginning, so the cells in use of a run are the longest use of it.
struct CellRuns {
    std::vector<std::pair<std::shared_ptr<int>, int32_t>> runs;

    int32_t length() const;
    void resize(int32_t cells); // grows by own cells, or gives back from the end
};

uint64_t count_cells(const std::vector<const CellRuns *> &sequences);

// ---- sampling (sampling.cpp, chat.cpp) -------------------------------------------------------

struct Sampler; // the prepared form of one skippy_sampling_config
struct ChatSampling; // a config and a grammar, in force until cleared

struct SamplerFree {
    void operator()(Sampler *sampler) const;
    void operator()(ChatSampling *grammar) const;
};

struct SignalAt {
    int32_t position; // of the token that was chosen
    int32_t token;
    skippy_token_signal signal;
};

// ---- stages (frame.cpp, stage.cpp) --------------------------------------------------------------

// A stage runs layers [layer_start, layer_end) of a model of n_layer layers. The whole model is both
// source and terminal and has no boundaries.
struct Stage {
    int32_t index = 0, layer_start = 0, layer_end = 0, n_layer = 0;
    bool planned = false;
    bool source = true, terminal = true;
    skippy_activation_boundary_desc input{}, output{}; // valid unless source / terminal
    std::string capture_name;                          // the tensor that leaves the stage
};

// Rows that the evaluation callback took out of the graphs of one llama_decode, in graph order.
struct Capture {
    std::string name;
    int64_t row_floats = 0;
    std::vector<float> rows;
    std::vector<int32_t> graph_rows; // rows per graph
    bool broken = false;
};

// ---- objects ------------------------------------------------------------------------------------

struct Checkpoint { // recurrent memory before a verify window
    int32_t start, count;
    std::vector<uint8_t> state;
};

struct skippy_session {
    skippy_model *model = nullptr;
    int32_t lane = -1;
    bool live = false;
    bool reset_required = false; // restoring a checkpoint failed half-way
    int32_t n_past = 0;
    std::vector<int32_t> history; // committed input tokens; shorter than n_past after a bare state import
    CellRuns cells;
    uint64_t random_base = 0;                         // what "seed 0" means until the next reset
    uint64_t batch_serial = 0;                        // of the last batch that this session was checked for
    uint64_t logits_serial = 0;                       // of the decode that computed logits_row
    int32_t logits_row = -1;
    uint64_t export_serial = 0;           // of the decode that exported these rows
    std::vector<const float *> exported; // into the model's capture
    std::unique_ptr<Sampler, SamplerFree> sampler;
    std::unique_ptr<ChatSampling, SamplerFree> chat;
    std::vector<uint32_t> mask; // a bit per token that may be sampled; empty: any
    bool records_signals = false; // set by the first question for one: entropy costs a vocabulary pass
    std::vector<SignalAt> signals;
    std::vector<Checkpoint> checkpoints;
};

struct Prefix { // a resident prefix: host memory with KV per lane, shared cells in a shared pool
    int32_t token_count = 0;
    std::vector<uint8_t> state;
    CellRuns cells;
};

struct skippy_model {
    std::unique_ptr<llama_model, LlamaFree> llama;
    std::unique_ptr<llama_context, LlamaFree> context;
    const llama_vocab *vocab = nullptr;
    llama_memory_t memory = nullptr;

    int32_t lane_count = 1, lane_cells = 0, pool_cells = 0, n_batch = 0, n_ubatch = 0, n_threads = 1;
    int32_t n_vocab = 0, n_embd = 0, sliding_window = 0;
    size_t position_width = 1;
    bool unified = false, recurrent = false, hybrid = false, flash_attention = true;
    FileFacts file;
    Stage stage;
    std::string description, architecture;
    std::vector<int32_t> end_tokens, suppressed_tokens;

    std::mutex lanes_mutex; // claiming and releasing a lane, nothing else
    std::vector<skippy_session> sessions;
    std::map<int32_t, Prefix> prefixes;

    uint64_t batch_serial = 0, decode_serial = 0;
    Capture capture;
    std::vector<llama_token_data> candidates; // one buffer for every sampled row

    bool has_recurrent_memory() const { return recurrent || hybrid; }
};

// ---- execution (execute.cpp) ----------------------------------------------------------------------

enum class Logits { none, last, all };

struct Row { // one session's part of a decode
    skippy_session *session = nullptr;
    const int32_t *tokens = nullptr;
    size_t count = 0;
    const void *residual = nullptr; // count rows of n_embd floats, at any address; NULL on a source stage
    Logits logits = Logits::none;
    int32_t start = 0;                  // out: position of the first token
    int32_t batch_row = 0;              // out: llama_batch row of the first token
};

// One llama_decode over all rows, then every session advances. Throws RUNTIME_ERROR with all positions
// as they were, unless the message says that a lane had to be cleared.
void execute(skippy_model &model, std::vector<Row> &rows);

// Cuts a lane to `length` cells. Where that cannot be done (recurrent state, sliding window) the lane is
// cleared, the session stands at 0 and the answer is false.
bool cut_lane(skippy_session &session, int32_t length);
// Forgets what depends on tokens from position `length` on.
void forget_after(skippy_session &session, int32_t length);
void reset_session(skippy_session &session);

// ---- checks that all executing calls share (request.cpp) --------------------------------------------

struct Request { // one entry of any executing call
    skippy_session *session = nullptr;
    const int32_t *tokens = nullptr;
    size_t count = 0;
    const int32_t *positions = nullptr;
    size_t position_count = 0;
    const skippy_sampling_config *sampling = nullptr;
    const skippy_activation_desc *input_desc = nullptr;
    const void *input_payload = nullptr;
    Logits logits = Logits::none;
    skippy_activation_desc *out_desc = nullptr;
    void *out_payload = nullptr;
    size_t out_capacity = 0;
    size_t *out_bytes = nullptr;

    bool frameless = false; // a call without frames: what an exporting stage computes is dropped

    size_t required = 0; // bytes of the output frame
};

skippy_session &live_session(skippy_session *session, const char *call);
// Steps 6.2, 6.3 and our own limits, for all requests, before anything moves.
void check_requests(skippy_model &model, std::vector<Request> &requests, bool batched);
// check_requests has passed: decode, advance, copy exports.
std::vector<Row> run_requests(skippy_model &model, std::vector<Request> &requests);

// ---- frames (frame.cpp) -------------------------------------------------------------------------------

void check_input_frame(const skippy_model &model, size_t index, const Request &request);
const void *frame_rows(const skippy_model &model, const Request &request);
// False when the frame would need more than 16 parts.
bool make_output_desc(const skippy_model &model, const Request &request, skippy_activation_desc &desc);
void write_output_payload(const skippy_model &model, const Request &request, const std::vector<const float *> &rows);
// 6.3. True when the payload is too small; other trouble is thrown.
bool prepare_output(const skippy_model &model, size_t index, Request &request);

// ---- stages (stage.cpp) ----------------------------------------------------------------------------------

void plan_stage(skippy_model &model, const skippy_runtime_config &config);
void start_capture(skippy_model &model);
bool on_tensor(ggml_tensor *tensor, bool ask, void *model);
// Gives every session of the decode its exported rows.
void distribute_capture(skippy_model &model, std::vector<Row *> &rows_by_lane);

// ---- sampling --------------------------------------------------------------------------------------------

// The token that follows the first `history_length` tokens, chosen from a row of logits; `position` is
// where it will stand. The same history, seed and position give the same choice. Throws RUNTIME_ERROR
// when nothing is allowed.
int32_t sample(skippy_session &session, const skippy_sampling_config *config, float *logits,
               size_t history_length, int32_t position);
bool needs_chain(const skippy_session &session, const skippy_sampling_config *config);
skippy_token_signal compute_signal(const float *logits, int32_t n_vocab);
float *logits_of(skippy_session &session); // NULL: another decode has run since, or none was asked for

// ---- chat sampling (chat.cpp) ------------------------------------------------------------------------------

const skippy_sampling_config *chat_config(const ChatSampling &chat);
// Whether the grammar accepts `token` after the history; and what it forbids, put into `candidates`.
bool chat_allows(ChatSampling &chat, const skippy_session &session, size_t history_length, int32_t token);
void chat_restrict(ChatSampling &chat, llama_token_data_array &candidates);
void rewind_chat(skippy_session &session); // after the history was cut

// ---- state (kv_state.cpp) -------------------------------------------------------------------------------------

// What llama.cpp writes for one sequence of an attention memory, taken apart into rows by position.
std::vector<uint8_t> lane_state(const skippy_session &session, llama_state_seq_flags flags);
struct StateRange { // the rows at positions [from, to) of a state
    const uint8_t *data;
    size_t size;
    int32_t from, to;
};
struct StateShape { // of the first layer; block offsets are within the composed state
    uint32_t layer_count, k_type, v_type, k_row_bytes, v_row_bytes, v_element_bytes;
    bool v_transposed;
    std::vector<size_t> block_ends;
};
// A state of `streams` streams with the rows of all ranges in order of position. Throws UNSUPPORTED for a memory
// that is not laid out in the way this was written for.
std::vector<uint8_t> compose_state(const skippy_model &model, const std::vector<StateRange> &ranges, uint32_t streams, StateShape *shape);
uint32_t stream_count(const skippy_model &model);
// Replaces what the lane holds; on failure the lane is empty, the session stands at 0, RUNTIME_ERROR.
void load_state(skippy_session &session, const std::vector<uint8_t> &state, llama_state_seq_flags flags, const char *call);

// ---- lanes (session.cpp) -----------------------------------------------------------------------------------

skippy_session &claim_lane(skippy_model &model);
void release_lane(skippy_session &session);
