/*
 * What the files of the simulated engine share: its objects and the few calls between them.
 * Knows the ABI and nothing of a real model: a "logit row" here is a hash of the token history.
 */
#ifndef SKIPPY_SIM_H
#define SKIPPY_SIM_H

#include "../skippy.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    SIM_TOKEN_BOS = 256,
    SIM_TOKEN_EOS = 257,
    SIM_TOKEN_SCRIPT = 258, /* the output script stands between these two, in the prompt */
    SIM_TOKEN_END = 259,
    SIM_FIRST_WORD = 260,
    SIM_TOKEN_UNKNOWN = -1, /* a position that was skipped over, never decoded */
    SIM_ROW_FLOATS = 8,     /* the floats of an activation row that carry its identity */
    SIM_NO_CELL = -1,
    SIM_MAX_LANES = 4096
};

typedef enum skippy_status sim_status;
typedef struct skippy_error **sim_error;

/* ---- errors ------------------------------------------------------------------------------- */

sim_status sim_fail(sim_error out, sim_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static inline sim_status sim_ok(sim_error out) {
    if (out) *out = NULL;
    return SKIPPY_STATUS_OK;
}
const char *sim_status_name(sim_status status);
extern atomic_llong sim_live_errors, sim_live_sessions, sim_live_models;

/* ---- spec --------------------------------------------------------------------------------- */

struct sim_bytes {
    uint8_t *data;
    size_t length;
};

struct sim_spec {
    int64_t vocab, n_layer, n_embd, n_ctx_train, seed, eos_per_mille, sliding_window, load_ms;
    int64_t pool_cells, mtp_heads, mtp_wrong_every;
    bool add_bos, words_only, recurrent, optional_part, real_clock;
    double cost_fixed_us, cost_token_us, cost_sequence_us, cost_attended_token_us;
    char *architecture, *chat_template;
    struct sim_bytes *tokens; /* the `token =` lines */
    size_t token_count;
    struct sim_fault *faults;
    size_t fault_count;
    uint64_t file_bytes;
};

sim_status sim_spec_read(const char *path, struct sim_spec *spec, sim_error out);
void sim_spec_free(struct sim_spec *spec);

/* ---- faults ------------------------------------------------------------------------------- */

enum sim_call {
    SIM_CALL_ANY, SIM_CALL_ITERATION, SIM_CALL_PREFILL, SIM_CALL_DECODE, SIM_CALL_VERIFY,
    SIM_CALL_SAMPLE, SIM_CALL_COPY_FRAME, SIM_CALL_SESSION_CREATE, SIM_CALL_SESSION_FREE,
    SIM_CALL_RESET, SIM_CALL_TRIM, SIM_CALL_SET_POSITION, SIM_CALL_SAVE_PREFIX,
    SIM_CALL_RESTORE_PREFIX, SIM_CALL_EXPORT_STATE, SIM_CALL_IMPORT_STATE, SIM_CALL_EXPORT_KV,
    SIM_CALL_IMPORT_KV, SIM_CALL_RETIRE, SIM_CALL_TOKENIZE, SIM_CALL_DETOKENIZE, SIM_CALL_COUNT
};

enum sim_effect {
    SIM_EFFECT_NONE, SIM_EFFECT_STATUS, SIM_EFFECT_WRONG_COUNT, SIM_EFFECT_DUPLICATE_INDEX,
    SIM_EFFECT_INDEX_OUT_OF_RANGE, SIM_EFFECT_TOKEN_OUT_OF_RANGE, SIM_EFFECT_FEWER_SAMPLES,
    SIM_EFFECT_GROW_BUFFER, SIM_EFFECT_GROW_BUFFER_WITHOUT_GROWTH, SIM_EFFECT_POSITION_OFF_BY_ONE,
    SIM_EFFECT_HANG_MS, SIM_EFFECT_HANG, SIM_EFFECT_ABORT, SIM_EFFECT_NO_ERROR_OBJECT,
    SIM_EFFECT_SILENT_DROP, SIM_EFFECT_COUNT
};

enum sim_when { SIM_BEFORE, SIM_MIDDLE, SIM_AFTER };

struct sim_fault {
    enum sim_call call;
    uint64_t nth, every, times; /* times 0: for ever */
    int64_t index, lane, token; /* -1: any row */
    int64_t per_mille;          /* -1: always */
    sim_status status;          /* OK: the effect alone */
    enum sim_when when;
    enum sim_effect effect;
    uint64_t hang_ms;
    uint64_t matched, fired;
};

/* One row group of a call, as far as a rule may look at it. */
struct sim_fault_row {
    int lane;
    const int32_t *tokens;
    size_t count;
};

struct sim_hit {
    enum sim_effect effect; /* NONE: no rule fired */
    sim_status status;
    enum sim_when when;
    int64_t index; /* the guilty row, -1 when the rule names none */
};

struct skippy_model;
sim_status sim_fault_parse(const char *rule, struct sim_fault *fault, sim_error out);
void sim_fault_add(struct skippy_model *model, const struct sim_fault *fault);
/* Counts the call against every rule and serves a hang or an abort on the spot. */
struct sim_hit sim_fault_take_rows(struct skippy_model *model, enum sim_call call,
                                   const struct sim_fault_row *rows, size_t count);
static inline bool sim_hit_fails(const struct sim_hit *hit, enum sim_when when) {
    return hit->effect != SIM_EFFECT_NONE && hit->status != SKIPPY_STATUS_OK && hit->when == when;
}
sim_status sim_hit_fail(const struct sim_hit *hit, const char *call, sim_error out);

/* ---- model -------------------------------------------------------------------------------- */

/* What a position's history [0, n) leads to: kept for every n, so that a trim looks back. */
struct sim_point {
    uint64_t hash;
    int32_t script_start, script_end; /* positions of the last 258 and the first 259 after it */
    int32_t last_end;                 /* position of the last 259 */
    bool has_logits;                  /* the row before this point asked for its output */
};

struct sim_checkpoint {
    int32_t start, count;
};

struct skippy_session {
    bool live;
    struct skippy_model *model;
    int lane;
    int32_t n_past;
    int32_t *tokens;          /* [capacity] */
    struct sim_point *points; /* [capacity + 1]; points[n] stands for the first n tokens */
    int32_t *cells;           /* [capacity], shared pool only */
    int32_t capacity;
    int32_t window_min; /* sliding window: the first position that the cache still holds */
    bool reset_required;
    bool chat_sampling_set;
    struct skippy_sampling_config *chat_sampling; /* NULL: greedy */
    uint32_t *mask;                               /* a bit per token that may be sampled; NULL: any */
    uint64_t batch_serial;                        /* the last batch that this session was in */
    int checkpoint_count;
    struct sim_checkpoint checkpoints[SKIPPY_MAX_VERIFY_CHECKPOINTS]; /* last: the rest shares a line or two */
};

struct sim_prefix {
    int32_t id, count;
    int32_t *tokens;
    struct sim_point *points;
    int32_t *cells;
};

/* The output of one row: everything a token is drawn from. */
struct sim_logits {
    bool valid;
    uint64_t hash;
    int32_t position; /* of the token to draw */
    int32_t scripted; /* -1: none */
    const uint32_t *mask; /* of what may be drawn; NULL: everything */
};

struct sim_pool { /* cells of a shared KV cache; unused when KV is per lane */
    int32_t size, used, fresh;
    int32_t *free_cells;
    int32_t free_count;
    uint32_t *references;
};

struct sim_edge {
    uint32_t node, byte, child;
};

struct sim_vocabulary {
    int32_t size;
    struct sim_bytes *pieces;
    struct sim_edge *edges; /* hash table of a byte trie; child 0: empty slot */
    size_t edge_slots;      /* a power of two */
    int32_t *node_token;
    size_t node_count, node_capacity;
    int32_t *candidates; /* the ids that free generation may choose */
    size_t candidate_count;
};

struct skippy_model {
    uint64_t magic;
    struct sim_spec spec;
    struct sim_vocabulary vocabulary;
    int32_t stage_index, layer_start, layer_end;
    int32_t lane_count, ctx_size, n_batch, n_ubatch, n_threads;
    bool planned, unified, swa_full, source, terminal;
    struct skippy_activation_boundary_desc input, output;
    char description[64];

    pthread_mutex_t lock; /* lanes and fault rules */
    atomic_flag executing;
    struct skippy_session *sessions; /* one slot per lane: a freed handle stays readable */
    int live_sessions;
    struct sim_pool pool;
    struct sim_prefix *prefixes;
    size_t prefix_count;
    struct sim_fault *faults;
    size_t fault_count;
    atomic_size_t fault_rules;
    uint64_t batch_serial;
    struct sim_logits last_logits; /* of the last row that the last execution put out */
    float *last_rows;              /* exports of the last execution */
    size_t last_row_count, last_row_capacity;
    struct sim_request *scratch;
    size_t scratch_capacity;

    atomic_ullong clock_ns; /* virtual time, or what was added to real time */
    uint64_t opened_ns;
};

extern const uint64_t SIM_MODEL_MAGIC;
static inline bool sim_model_live(const struct skippy_model *model) {
    return model && model->magic == SIM_MODEL_MAGIC;
}
static inline bool sim_exports(const struct skippy_model *model) { return !model->terminal; }
/* One thread at a time may touch the context; a second one is a bug of the host and is told so. */
sim_status sim_enter(struct skippy_model *model, sim_error out);
static inline void sim_leave(struct skippy_model *model) { atomic_flag_clear(&model->executing); }
/* The lowest free lane, with an empty history. */
sim_status sim_lane_claim(struct skippy_model *model, struct skippy_session **out_session, sim_error out);
void sim_lane_release(struct skippy_session *session);
/* Checks the handle, then enters. */
sim_status sim_enter_session(struct skippy_session *session, sim_error out);

/* ---- vocabulary and tokens ---------------------------------------------------------------- */

bool sim_vocabulary_build(struct sim_vocabulary *vocabulary, const struct sim_spec *spec);
void sim_vocabulary_free(struct sim_vocabulary *vocabulary);
/* Identities, draws and checksums all come from this one mixer. */
static inline uint64_t sim_mix(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ULL;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}
/* A draw from [0, n) without a division. */
static inline uint64_t sim_below(uint64_t hash, uint64_t n) {
    return (uint64_t)((unsigned __int128)hash * n >> 64);
}
static inline uint64_t sim_roll(uint64_t hash, int32_t token) {
    return sim_mix(hash + 0x9e3779b97f4a7c15ULL * ((uint64_t)(uint32_t)token + 1));
}
/* Without the session's mask: what the model thinks. */
struct sim_logits sim_logits_at(const struct skippy_session *session, int32_t position);
struct sim_logits sim_logits_after(const struct skippy_session *session, struct sim_logits from,
                                   int32_t token);
/* -1: the biases leave no token. */
int32_t sim_choose(const struct skippy_model *model, const struct sim_logits *logits,
                   const struct skippy_sampling_config *sampling);
bool sim_sampling_enabled(const struct skippy_sampling_config *sampling);
void sim_signal(const struct skippy_model *model, const struct sim_logits *logits,
                struct skippy_token_signal *out);

/* ---- history ------------------------------------------------------------------------------ */

void sim_history_start(struct skippy_session *session);
/* Room for `tokens` and, in a shared pool, `cells` more; changes nothing when it fails. */
sim_status sim_history_reserve(struct skippy_session *session, int64_t tokens, int64_t cells,
                               sim_error out);
void sim_history_push(struct skippy_session *session, int32_t token, bool has_logits);
void sim_history_cut(struct skippy_session *session, int32_t n_past);
/* Puts tokens at [start, start + count), filling a gap before it; later tokens stay. */
sim_status sim_history_write(struct skippy_session *session, int32_t start, const int32_t *tokens,
                             int32_t count, sim_error out);
void sim_pool_share(struct sim_pool *pool, int32_t cell);
void sim_pool_release(struct sim_pool *pool, int32_t cell);
void sim_prefix_drop(struct skippy_model *model, int32_t id);

/* ---- activation frames -------------------------------------------------------------------- */

void sim_sha256(const void *data, size_t length, uint8_t digest[32]);
void sim_boundary_make(const struct skippy_model *model, int32_t layer, const char *identity,
                       struct skippy_activation_boundary_desc *out);
struct sim_request;
sim_status sim_frame_check_input(const struct skippy_model *model, size_t request, size_t tokens,
                                 const struct skippy_activation_desc *desc, const void *payload,
                                 sim_error out);
/* The required size goes to out_bytes. BUFFER_TOO_SMALL makes no error object: the caller, who knows
 * of the other requests, does. */
sim_status sim_frame_prepare(const struct skippy_model *model, struct sim_request *request,
                             size_t index, bool batched, sim_error out);
void sim_row_make(const struct skippy_model *model, int32_t layer, int32_t token, int32_t position,
                  uint64_t hash, float *row);
const struct skippy_activation_part_desc *sim_frame_part(const struct skippy_activation_desc *desc,
                                                         const uint8_t identity[32]);
void sim_frame_write(const struct skippy_model *model, const struct sim_request *request,
                     const float *rows);

/* ---- execution ---------------------------------------------------------------------------- */

struct sim_request {
    struct skippy_session *session;
    const int32_t *token_ids;
    size_t token_count;
    const int32_t *positions;
    size_t position_count;
    const struct skippy_sampling_config *sampling;
    const struct skippy_activation_desc *input_desc;
    const void *input_payload;
    bool sample_last, all_logits;
    bool frameless; /* an entry without frame arguments: nothing is prepared or written */
    bool boundary_only; /* a copied frame: optional parts went out with the first one */
    struct skippy_activation_desc *out_desc;
    void *out_payload;
    size_t out_capacity;
    size_t *out_bytes;

    size_t required; /* bytes of the output frame */
    bool dropped;    /* by a fault: reported as run, but was not */
    int32_t start;   /* position before the call */
    int32_t predicted;
};

struct sim_batch {
    struct skippy_model *model;
    enum sim_call call;
    const char *name;
    struct sim_request *requests;
    size_t count;
    size_t tokens;
    bool batched; /* iteration and decode batch: their rules differ from those of single calls */
    struct sim_hit hit;
};

/* Every check before anything moves; sampled_capacity is what the outputs for samples hold. */
sim_status sim_batch_check(struct sim_batch *batch, size_t sampled_capacity, sim_error out);
/* Faults, decode, counts, exports, samples. The batch must have been checked. */
sim_status sim_batch_run(struct sim_batch *batch, sim_error out);
/* Check, then run, a single request. */
sim_status sim_single(struct sim_batch *batch, sim_error out);
void sim_draft(struct skippy_session *session, int32_t next, const struct skippy_sampling_config *sampling,
               size_t max_draft, struct skippy_native_mtp_draft *draft);
/* configure_chat_sampling overrides what a call brings. */
const struct skippy_sampling_config *sim_session_sampling(const struct skippy_session *session,
                                                          const struct skippy_sampling_config *sampling);
void sim_draft_clear(struct skippy_native_mtp_draft *draft);

/* ---- clock -------------------------------------------------------------------------------- */

void sim_clock_start(struct skippy_model *model);
uint64_t sim_now_ns(const struct skippy_model *model);
/* Lets `us` pass since `since_ns`: sleeps in real time, counts in virtual time. */
void sim_spend_us(struct skippy_model *model, uint64_t since_ns, double us);

#endif
