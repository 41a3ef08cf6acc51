/* Generation signals and chat sampling: what a session tells, and is told, about its sampling. */
#include "sim.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

static const float HIGH_ENTROPY = 4.0f; /* nats; abi.md 3.9 */

sim_status skippy_session_last_token_signal(struct skippy_session *session, struct skippy_token_signal *out_signal,
                                            sim_error out) {
    if (!out_signal) return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "last_token_signal: out_signal is NULL");
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    if (session->n_past > 0 && session->points[session->n_past].has_logits) {
        struct sim_logits logits = sim_logits_at(session, session->n_past);
        sim_signal(session->model, &logits, out_signal);
    } else {
        status = sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                          "last_token_signal: the last row of lane %d put out no logits", session->lane);
    }
    sim_leave(session->model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}

/* Over the newest rows that put out logits; a repetition is two equal top tokens next to each other. */
static void measure(const struct skippy_session *session, uint32_t wanted, struct skippy_generation_signal_window *w) {
    double entropy = 0, margin = 0;
    int32_t newer = -1;
    for (int32_t n = session->n_past; n > 0 && w->token_count < wanted; n--) {
        if (!session->points[n].has_logits) continue;
        struct sim_logits logits = sim_logits_at(session, n);
        struct skippy_token_signal signal;
        sim_signal(session->model, &logits, &signal);
        entropy += signal.entropy;
        margin += signal.margin;
        if (!w->token_count || signal.entropy > w->max_entropy) w->max_entropy = signal.entropy;
        if (!w->token_count || signal.margin < w->min_margin) w->min_margin = signal.margin;
        w->high_entropy_count += signal.entropy > HIGH_ENTROPY;
        w->repetition_count += w->token_count && signal.top_token == newer;
        newer = signal.top_token;
        w->token_count++;
    }
    if (!w->token_count) return;
    w->mean_entropy = (float)(entropy / w->token_count);
    w->mean_margin = (float)(margin / w->token_count);
}

sim_status skippy_session_signal_window(struct skippy_session *session, uint32_t window_tokens,
                                        struct skippy_generation_signal_window *out_window, sim_error out) {
    if (!out_window || !window_tokens)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "signal_window: out_window is %s, window_tokens is %u",
                        out_window ? "given" : "NULL", window_tokens);
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    *out_window = (struct skippy_generation_signal_window){0};
    measure(session, window_tokens, out_window);
    sim_leave(session->model);
    return sim_ok(out);
}

/* ---- chat sampling: enough of JSON to tell valid metadata from broken and to see a grammar ---- */

static const int DEPTH_MAX = 64; /* real metadata nests three deep */

static const char *skip_blank(const char *c) {
    while (*c == ' ' || *c == '\t' || *c == '\n' || *c == '\r') c++;
    return c;
}

static const char *skip_string(const char *c) {
    if (*c++ != '"') return NULL;
    for (; *c != '"'; c++) {
        if ((unsigned char)*c < 0x20) return NULL;
        if (*c == '\\' && !*++c) return NULL;
    }
    return c + 1;
}

static const char *skip_scalar(const char *c) {
    static const char *const words[] = {"true", "false", "null"};
    for (int i = 0; i < 3; i++)
        if (!strncmp(c, words[i], strlen(words[i]))) return c + strlen(words[i]);
    if (*c != '-' && !isdigit((unsigned char)*c)) return NULL;
    char *end = NULL;
    strtod(c, &end);
    return end == c ? NULL : end;
}

/* The end of the value at c, or NULL. A "grammar" member of the outermost object is reported. */
static const char *skip_value(const char *c, int depth, const char **grammar) {
    c = skip_blank(c);
    if (*c == '"') return skip_string(c);
    if (*c != '{' && *c != '[') return skip_scalar(c);
    if (depth == DEPTH_MAX) return NULL;
    char close = *c == '{' ? '}' : ']';
    c = skip_blank(c + 1);
    if (*c == close) return c + 1;
    for (;;) {
        bool is_grammar = close == '}' && !depth && !strncmp(c, "\"grammar\"", 9);
        if (close == '}') {
            c = skip_string(c);
            if (!c) return NULL;
            c = skip_blank(c);
            if (*c++ != ':') return NULL;
            c = skip_blank(c);
        }
        if (is_grammar && *c == '"') *grammar = c + 1;
        c = skip_value(c, depth + 1, grammar);
        if (!c) return NULL;
        c = skip_blank(c);
        if (*c == close) return c + 1;
        if (*c++ != ',') return NULL;
        c = skip_blank(c);
    }
}

static sim_status configure(struct skippy_session *session, const struct skippy_sampling_config *sampling,
                            const char *metadata, sim_error out) {
    free(session->chat_sampling);
    session->chat_sampling = NULL;
    session->chat_sampling_set = false;
    if (!metadata || !*metadata) return SKIPPY_STATUS_OK;
    const char *grammar = NULL, *end = skip_value(metadata, 0, &grammar);
    if (!end || *skip_blank(end)) return SKIPPY_STATUS_OK; /* invalid JSON clears, as upstream does */
    if (grammar && *grammar != '"') {
        const char *rule = strstr(grammar, "::="), *grammar_end = skip_string(grammar - 1);
        if (!rule || rule > grammar_end)
            return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR,
                            "chat sampling: the grammar has no rule (`name ::= ...`)");
    }
    if (sampling) {
        session->chat_sampling = malloc(sizeof *sampling);
        if (!session->chat_sampling) return sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "memory for sampling ran out");
        *session->chat_sampling = *sampling;
    }
    session->chat_sampling_set = true;
    return SKIPPY_STATUS_OK;
}

sim_status skippy_session_configure_chat_sampling(struct skippy_session *session,
                                                  const struct skippy_sampling_config *sampling,
                                                  const char *metadata_json, uint64_t prompt_token_count,
                                                  sim_error out) {
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    status = configure(session, sampling, metadata_json, out);
    sim_leave(session->model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}

sim_status skippyx_session_set_mask(struct skippy_session *session, const uint32_t *words, size_t word_count,
                                    sim_error out) {
    sim_status status = sim_enter_session(session, out);
    if (status != SKIPPY_STATUS_OK) return status;
    size_t needed = ((size_t)session->model->vocabulary.size + 31) / 32;
    uint32_t *mask = word_count ? malloc(needed * sizeof *mask) : NULL;
    if (word_count && (!words || word_count != needed)) {
        status = sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "session_set_mask: %zu words%s, a mask of %d tokens has %zu",
                          word_count, words ? "" : " at NULL", session->model->vocabulary.size, needed);
        free(mask);
    } else if (word_count && !mask) {
        status = sim_fail(out, SKIPPY_STATUS_RUNTIME_ERROR, "memory for a mask ran out");
    } else {
        if (mask) memcpy(mask, words, needed * sizeof *mask);
        free(session->mask);
        session->mask = mask;
    }
    sim_leave(session->model);
    return status == SKIPPY_STATUS_OK ? sim_ok(out) : status;
}
