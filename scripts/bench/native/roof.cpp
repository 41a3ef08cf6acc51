// The bare engine loop: prompts in full batches, then one token of each stream per decode, greedy.
// No scheduling, no text, no HTTP: what a server on this engine can reach and not pass.
//
//   roof MODEL THREADS LANES CELLS BATCH
//
// Each line of standard input, "STREAMS PROMPT OUTPUT", runs so many requests at once; the answer is a
// line of JSON with seconds of the prompts and of the rest.
#include "llama.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstdint>
#include <vector>

namespace {

struct Roof {
    llama_model *model;
    llama_context *context;
    int32_t n_vocab;
    int32_t batch_tokens;
    llama_batch batch;
};

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

[[noreturn]] void die(const char *what) {
    std::fprintf(stderr, "roof: %s\n", what);
    std::exit(1);
}

llama_token arg_max(const float *logits, int32_t n_vocab) {
    llama_token best = 0;
    for (llama_token token = 1; token < n_vocab; token++)
        if (logits[token] > logits[best]) best = token;
    return best;
}

void add(llama_batch &batch, llama_token token, llama_pos position, llama_seq_id lane, bool output) {
    int32_t row = batch.n_tokens++;
    batch.token[row] = token;
    batch.pos[row] = position;
    batch.n_seq_id[row] = 1;
    batch.seq_id[row][0] = lane;
    batch.logits[row] = output;
}

// Computes the batch, stores the choice of each row with an output under its lane, and empties it.
void decode(Roof &roof, std::vector<llama_token> &chosen) {
    if (roof.batch.n_tokens == 0) return;
    if (llama_decode(roof.context, roof.batch) != 0) die("llama_decode failed: give more CELLS");
    for (int32_t row = 0; row < roof.batch.n_tokens; row++)
        if (roof.batch.logits[row])
            chosen[roof.batch.seq_id[row][0]] = arg_max(llama_get_logits_ith(roof.context, row), roof.n_vocab);
    roof.batch.n_tokens = 0;
}

void run(Roof &roof, int32_t streams, int32_t prompt, int32_t output) {
    std::vector<llama_token> chosen(streams);
    llama_memory_clear(llama_get_memory(roof.context), false);
    double began = now_s();
    for (int32_t lane = 0; lane < streams; lane++)
        for (int32_t position = 0; position < prompt; position++) {
            llama_token token = 261 + std::rand() % 250; // word pieces in any vocabulary, as the load test's
            add(roof.batch, token, position, lane, position + 1 == prompt);
            if (roof.batch.n_tokens == roof.batch_tokens) decode(roof, chosen);
        }
    decode(roof, chosen);
    double prompts_done = now_s();
    for (int32_t step = 0; step + 1 < output; step++) {
        for (int32_t lane = 0; lane < streams; lane++) add(roof.batch, chosen[lane], prompt + step, lane, true);
        decode(roof, chosen);
    }
    double ended = now_s();
    std::printf("{\"prefill_s\": %.6f, \"decode_s\": %.6f}\n", prompts_done - began, ended - prompts_done);
    std::fflush(stdout);
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 6) die("usage: roof MODEL THREADS LANES CELLS BATCH");
    int32_t threads = std::atoi(argv[2]), lanes = std::atoi(argv[3]), cells = std::atoi(argv[4]);
    Roof roof{};
    roof.batch_tokens = std::atoi(argv[5]);
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    roof.model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!roof.model) die("the model cannot be loaded");
    roof.n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(roof.model));
    llama_context_params params = llama_context_default_params();
    params.n_ctx = static_cast<uint32_t>(lanes * cells);
    params.n_batch = params.n_ubatch = static_cast<uint32_t>(roof.batch_tokens);
    params.n_seq_max = static_cast<uint32_t>(lanes);
    params.n_threads = params.n_threads_batch = threads;
    params.kv_unified = false;
    roof.context = llama_init_from_model(roof.model, params);
    if (!roof.context) die("no context");
    roof.batch = llama_batch_init(roof.batch_tokens, 0, 1);
    int streams, prompt, output;
    while (std::scanf("%d %d %d", &streams, &prompt, &output) == 3) {
        if (streams < 1 || streams > lanes || prompt < 1 || output < 1 || prompt + output > cells)
            die("STREAMS, PROMPT or OUTPUT is out of range");
        run(roof, streams, prompt, output);
    }
    llama_batch_free(roof.batch);
    llama_free(roof.context);
    llama_model_free(roof.model);
}
