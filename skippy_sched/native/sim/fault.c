/*
 * Fault rules: reads them, counts calls against them, says which one fires.
 * What an effect does to a call's outputs is with the call; hang and abort are served here.
 */
#include "sim.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char *const CALLS[SIM_CALL_COUNT] = {
    "any", "iteration", "prefill", "decode", "verify", "sample", "copy_frame", "session_create",
    "session_free", "reset", "trim", "set_position", "save_prefix", "restore_prefix",
    "export_state", "import_state", "export_kv", "import_kv", "retire", "tokenize", "detokenize"};

#define BIT(call) (1u << (call))
enum {
    ON_ALL = ~0u >> 1,
    ON_SAMPLES = BIT(SIM_CALL_ITERATION) | BIT(SIM_CALL_DECODE) | BIT(SIM_CALL_PREFILL) |
                 BIT(SIM_CALL_VERIFY) | BIT(SIM_CALL_SAMPLE),
    ON_COUNTS = BIT(SIM_CALL_ITERATION) | BIT(SIM_CALL_VERIFY),
    ON_INDEXES = BIT(SIM_CALL_ITERATION),
    ON_EXECUTION = BIT(SIM_CALL_ITERATION) | BIT(SIM_CALL_DECODE) | BIT(SIM_CALL_PREFILL) |
                   BIT(SIM_CALL_VERIFY),
    ON_BUFFERS = ON_EXECUTION | BIT(SIM_CALL_COPY_FRAME) | BIT(SIM_CALL_EXPORT_STATE) |
                 BIT(SIM_CALL_EXPORT_KV) | BIT(SIM_CALL_TOKENIZE) | BIT(SIM_CALL_DETOKENIZE)
};

static const struct {
    const char *name;
    unsigned calls; /* those that the effect has a meaning for */
} EFFECTS[SIM_EFFECT_COUNT] = {
    [SIM_EFFECT_NONE] = {"", 0},
    [SIM_EFFECT_STATUS] = {"", ON_ALL},
    [SIM_EFFECT_WRONG_COUNT] = {"wrong_count", ON_COUNTS},
    [SIM_EFFECT_DUPLICATE_INDEX] = {"duplicate_index", ON_INDEXES},
    [SIM_EFFECT_INDEX_OUT_OF_RANGE] = {"index_out_of_range", ON_INDEXES},
    [SIM_EFFECT_TOKEN_OUT_OF_RANGE] = {"token_out_of_range", ON_SAMPLES},
    [SIM_EFFECT_FEWER_SAMPLES] = {"fewer_samples", ON_COUNTS},
    [SIM_EFFECT_GROW_BUFFER] = {"grow_buffer", ON_BUFFERS},
    [SIM_EFFECT_GROW_BUFFER_WITHOUT_GROWTH] = {"grow_buffer_without_growth", ON_BUFFERS},
    [SIM_EFFECT_POSITION_OFF_BY_ONE] = {"position_off_by_one", ON_EXECUTION},
    [SIM_EFFECT_HANG_MS] = {"hang_ms", ON_ALL},
    [SIM_EFFECT_HANG] = {"hang", ON_ALL},
    [SIM_EFFECT_ABORT] = {"abort", ON_ALL},
    [SIM_EFFECT_NO_ERROR_OBJECT] = {"no_error_object", ON_ALL},
    [SIM_EFFECT_SILENT_DROP] = {"silent_drop", ON_EXECUTION},
};

static sim_status bad_word(sim_error out, const char *word, const char *expected) {
    return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "fault rule: word `%.60s`: %s", word, expected);
}

static bool take_number(const char *value, int64_t minimum, int64_t maximum, int64_t *number) {
    char *end = NULL;
    errno = 0;
    *number = strtoll(value, &end, 10);
    return end != value && !*end && !errno && *number >= minimum && *number <= maximum;
}

static int name_index(const char *value, const char *const *names, int count) {
    for (int i = 0; i < count; i++)
        if (!strcmp(value, names[i])) return i;
    return -1;
}

static bool take_effect(struct sim_fault *fault, const char *value) {
    int64_t number = 0;
    if (!strncmp(value, "hang_ms:", 8)) {
        fault->effect = SIM_EFFECT_HANG_MS;
        if (!take_number(value + 8, 0, 3600000, &number)) return false;
        fault->hang_ms = (uint64_t)number;
        return true;
    }
    for (int i = SIM_EFFECT_WRONG_COUNT; i < SIM_EFFECT_COUNT; i++)
        if (i != SIM_EFFECT_HANG_MS && !strcmp(value, EFFECTS[i].name)) {
            fault->effect = (enum sim_effect)i;
            return true;
        }
    return false;
}

static sim_status take_word(struct sim_fault *fault, char *word, sim_error out) {
    static const char *const MOMENTS[] = {"before", "middle", "after"};
    char whole[80];
    snprintf(whole, sizeof whole, "%s", word);
    char *equals = strchr(word, '=');
    if (!equals) return bad_word(out, whole, "must be key=value");
    *equals = '\0';
    const char *value = equals + 1;
    int64_t number = 0;
    int found = 0;
    if (!strcmp(word, "call")) {
        if ((found = name_index(value, CALLS, SIM_CALL_COUNT)) < 0)
            return bad_word(out, whole, "no such call; sim/README.md lists them");
        fault->call = (enum sim_call)found;
    } else if (!strcmp(word, "status")) {
        for (found = SKIPPY_STATUS_ERROR; found <= SKIPPY_STATUS_RUNTIME_ERROR; found++)
            if (!strcmp(value, sim_status_name((sim_status)found))) break;
        if (found > SKIPPY_STATUS_RUNTIME_ERROR)
            return bad_word(out, whole, "no such failing status, such as RUNTIME_ERROR");
        fault->status = (sim_status)found;
    } else if (!strcmp(word, "when")) {
        if ((found = name_index(value, MOMENTS, 3)) < 0)
            return bad_word(out, whole, "must be before, middle or after");
        fault->when = (enum sim_when)found;
    } else if (!strcmp(word, "effect")) {
        if (!take_effect(fault, value))
            return bad_word(out, whole, "no such effect; sim/README.md lists them");
    } else {
        static const struct { const char *name; int64_t minimum, maximum; } NUMBERS[] = {
            {"nth", 1, INT64_MAX}, {"every", 1, INT64_MAX}, {"count", 0, INT64_MAX},
            {"index", 0, INT32_MAX}, {"lane", 0, INT32_MAX}, {"token", 0, INT32_MAX},
            {"probability_per_mille", 0, 1000}};
        int64_t *const fields[] = {(int64_t *)&fault->nth, (int64_t *)&fault->every,
                                   (int64_t *)&fault->times, &fault->index, &fault->lane,
                                   &fault->token, &fault->per_mille};
        size_t i = 0, count = sizeof NUMBERS / sizeof *NUMBERS;
        while (i < count && strcmp(word, NUMBERS[i].name)) i++;
        if (i == count) return bad_word(out, whole, "no such key; sim/README.md lists them");
        if (!take_number(value, NUMBERS[i].minimum, NUMBERS[i].maximum, &number)) {
            char expected[80];
            snprintf(expected, sizeof expected, "must be an integer of at least %lld%s",
                     (long long)NUMBERS[i].minimum, NUMBERS[i].maximum == 1000 ? " and at most 1000" : "");
            return bad_word(out, whole, expected);
        }
        *fields[i] = number;
    }
    return SKIPPY_STATUS_OK;
}

sim_status sim_fault_parse(const char *rule, struct sim_fault *fault, sim_error out) {
    *fault = (struct sim_fault){.nth = 1, .times = 1, .index = -1, .lane = -1, .token = -1, .per_mille = -1};
    char *copy = strdup(rule ? rule : ""), *rest = copy, *word;
    sim_status status = copy ? SKIPPY_STATUS_OK : SKIPPY_STATUS_RUNTIME_ERROR;
    while (status == SKIPPY_STATUS_OK && (word = strtok_r(rest, " \t\r\n", &rest)))
        status = take_word(fault, word, out);
    free(copy);
    if (status != SKIPPY_STATUS_OK) return status;
    if (fault->effect == SIM_EFFECT_NONE && fault->status == SKIPPY_STATUS_OK)
        return bad_word(out, rule ? rule : "", "needs status=... or effect=...");
    if (fault->effect == SIM_EFFECT_NONE) fault->effect = SIM_EFFECT_STATUS;
    if (fault->effect == SIM_EFFECT_NO_ERROR_OBJECT && fault->status == SKIPPY_STATUS_OK)
        fault->status = SKIPPY_STATUS_RUNTIME_ERROR;
    if (fault->call != SIM_CALL_ANY && !(EFFECTS[fault->effect].calls & BIT(fault->call)))
        return bad_word(out, EFFECTS[fault->effect].name, "this effect means nothing for that call");
    return SKIPPY_STATUS_OK;
}

void sim_fault_add(struct skippy_model *model, const struct sim_fault *fault) {
    pthread_mutex_lock(&model->lock);
    struct sim_fault *grown = realloc(model->faults, (model->fault_count + 1) * sizeof *fault);
    if (grown) {
        model->faults = grown;
        model->faults[model->fault_count++] = *fault;
        atomic_store(&model->fault_rules, model->fault_count);
    }
    pthread_mutex_unlock(&model->lock);
}

/* Whether the call holds a row that the rule is about; its index, or -1 when the rule names none. */
static bool row_matches(const struct sim_fault *fault, const struct sim_fault_row *rows, size_t count,
                        int64_t *index) {
    *index = -1;
    if (fault->index < 0 && fault->lane < 0 && fault->token < 0) return true;
    for (size_t i = 0; i < count; i++) {
        if (fault->index >= 0 && fault->index != (int64_t)i) continue;
        if (fault->lane >= 0 && fault->lane != rows[i].lane) continue;
        bool holds = fault->token < 0;
        for (size_t t = 0; !holds && t < rows[i].count; t++) holds = rows[i].tokens[t] == fault->token;
        if (!holds) continue;
        *index = (int64_t)i;
        return true;
    }
    return false;
}

static bool fires(struct sim_fault *fault, const struct skippy_model *model, size_t rule) {
    if (fault->times && fault->fired >= fault->times) return false;
    fault->matched++;
    if (fault->every ? fault->matched % fault->every != 0 : fault->matched < fault->nth) return false;
    if (fault->per_mille >= 0) {
        uint64_t draw = sim_mix(sim_mix((uint64_t)model->spec.seed + 77) + rule * 1000003 + fault->matched);
        if (draw % 1000 >= (uint64_t)fault->per_mille) return false;
    }
    fault->fired++;
    return true;
}

static void serve_hang(struct skippy_model *model, const struct sim_fault *fault) {
    if (fault->effect == SIM_EFFECT_ABORT) abort();
    while (fault->effect == SIM_EFFECT_HANG) nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
    if (fault->effect == SIM_EFFECT_HANG_MS)
        sim_spend_us(model, sim_now_ns(model), (double)fault->hang_ms * 1000.0);
}

struct sim_hit sim_fault_take_rows(struct skippy_model *model, enum sim_call call,
                                   const struct sim_fault_row *rows, size_t count) {
    struct sim_hit hit = {.index = -1};
    if (!atomic_load_explicit(&model->fault_rules, memory_order_relaxed)) return hit;
    struct sim_fault fired = {0};
    pthread_mutex_lock(&model->lock);
    for (size_t i = 0; i < model->fault_count && hit.effect == SIM_EFFECT_NONE; i++) {
        struct sim_fault *fault = &model->faults[i];
        int64_t index = -1;
        if (fault->call != SIM_CALL_ANY && fault->call != call) continue;
        if (!(EFFECTS[fault->effect].calls & BIT(call))) continue;
        if (!row_matches(fault, rows, count, &index) || !fires(fault, model, i)) continue;
        fired = *fault;
        hit = (struct sim_hit){fault->effect, fault->status, fault->when, index};
    }
    pthread_mutex_unlock(&model->lock);
    serve_hang(model, &fired);
    return hit;
}

sim_status sim_hit_fail(const struct sim_hit *hit, const char *call, sim_error out) {
    static const char *const MOMENTS[] = {"before anything moved", "in the middle", "after its work was done"};
    if (hit->effect == SIM_EFFECT_NO_ERROR_OBJECT) {
        if (out) *out = NULL;
        return hit->status;
    }
    if (hit->index >= 0)
        return sim_fail(out, hit->status, "injected fault: %s failed %s, at request %lld", call,
                        MOMENTS[hit->when], (long long)hit->index);
    return sim_fail(out, hit->status, "injected fault: %s failed %s", call, MOMENTS[hit->when]);
}

sim_status skippyx_sim_add_fault(struct skippy_model *model, const char *rule, sim_error out) {
    if (!sim_model_live(model)) return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "model is NULL or freed");
    struct sim_fault fault;
    sim_status status = sim_fault_parse(rule, &fault, out);
    if (status != SKIPPY_STATUS_OK) return status;
    sim_fault_add(model, &fault);
    return sim_ok(out);
}

void skippyx_sim_clear_faults(struct skippy_model *model) {
    if (!sim_model_live(model)) return;
    pthread_mutex_lock(&model->lock);
    model->fault_count = 0;
    atomic_store(&model->fault_rules, 0);
    pthread_mutex_unlock(&model->lock);
}
