/*
 * Reads a spec file: `key = value` lines after the first line `skippy-sim 1`.
 * Knows names, ranges and defaults of the keys; what they mean is in README.md.
 */
#include "sim.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const long FILE_BYTES_MAX = 16 << 20; /* a spec is text by hand: more is a wrong file */

/* The generation prompt ends with <|end|>, so that a script in a message starts its replay there. */
static const char DEFAULT_TEMPLATE[] =
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<|end|>{% endif %}";

enum value_kind { INTEGER, NUMBER, BOOLEAN, TEXT, CLOCK, TOKEN, FAULT };

struct key {
    const char *name;
    enum value_kind kind;
    size_t offset;
    double minimum, maximum;
};

#define FIELD(kind, name, minimum, maximum) {#name, kind, offsetof(struct sim_spec, name), minimum, maximum}

static const struct key KEYS[] = {
    FIELD(INTEGER, vocab, SIM_FIRST_WORD, 1 << 22),
    FIELD(INTEGER, n_layer, 1, 4096),
    FIELD(INTEGER, n_embd, SIM_ROW_FLOATS, 65536),
    FIELD(INTEGER, n_ctx_train, 1, 1 << 24), /* positions stay exact in the floats of a row */
    FIELD(INTEGER, seed, 0, 4294967295.0),
    FIELD(INTEGER, eos_per_mille, 0, 1000),
    FIELD(INTEGER, sliding_window, 0, 1 << 24),
    FIELD(INTEGER, load_ms, 0, 3600000),
    FIELD(INTEGER, pool_cells, 0, 1 << 30),
    FIELD(INTEGER, mtp_heads, 0, SKIPPY_NATIVE_MTP_MAX_DRAFT_TOKENS),
    FIELD(INTEGER, mtp_wrong_every, 0, 1 << 30),
    FIELD(BOOLEAN, add_bos, 0, 0),
    FIELD(BOOLEAN, words_only, 0, 0),
    FIELD(BOOLEAN, recurrent, 0, 0),
    FIELD(BOOLEAN, optional_part, 0, 0),
    FIELD(NUMBER, cost_fixed_us, 0, 1e9),
    FIELD(NUMBER, cost_token_us, 0, 1e9),
    FIELD(NUMBER, cost_sequence_us, 0, 1e9),
    FIELD(NUMBER, cost_attended_token_us, 0, 1e9),
    FIELD(TEXT, architecture, 0, 0),
    FIELD(TEXT, chat_template, 0, 0),
    {"clock", CLOCK, offsetof(struct sim_spec, real_clock), 0, 0},
    {"token", TOKEN, 0, 0, 0},
    {"fault", FAULT, 0, 0, 0},
};

static char *trimmed(char *text) {
    while (*text == ' ' || *text == '\t') text++;
    size_t length = strlen(text);
    while (length && strchr(" \t\r\n", text[length - 1])) text[--length] = '\0';
    return text;
}

static char *unescaped(const char *text) {
    char *copy = malloc(strlen(text) + 1), *to = copy;
    if (!copy) return NULL;
    for (; *text; text++) {
        if (*text == '\\' && (text[1] == 'n' || text[1] == 't' || text[1] == '\\')) {
            text++;
            *to++ = *text == 'n' ? '\n' : *text == 't' ? '\t' : '\\';
        } else {
            *to++ = *text;
        }
    }
    *to = '\0';
    return copy;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

static const char *add_token(struct sim_spec *spec, const char *value) {
    struct sim_bytes bytes = {malloc(strlen(value) / 2 + 1), 0};
    struct sim_bytes *grown = realloc(spec->tokens, (spec->token_count + 1) * sizeof bytes);
    if (grown) spec->tokens = grown;
    if (!bytes.data || !grown) {
        free(bytes.data);
        return "memory ran out";
    }
    spec->tokens[spec->token_count++] = bytes;
    struct sim_bytes *token = &spec->tokens[spec->token_count - 1];
    for (const char *c = value; *c; c += 2) {
        while (*c == ' ') c++;
        if (hex_digit(c[0]) < 0 || hex_digit(c[1]) < 0) return "must be pairs of hex digits, such as 20736f6c";
        token->data[token->length++] = (uint8_t)(hex_digit(c[0]) << 4 | hex_digit(c[1]));
    }
    return token->length ? NULL : "must hold at least one byte";
}

static const char *add_fault(struct sim_spec *spec, const char *value, char *text, size_t capacity) {
    struct skippy_error *error = NULL;
    struct sim_fault fault;
    if (sim_fault_parse(value, &fault, &error) != SKIPPY_STATUS_OK) {
        snprintf(text, capacity, "%s", error && error->message ? error->message : "is no rule");
        skippy_error_free(error);
        return text;
    }
    struct sim_fault *grown = realloc(spec->faults, (spec->fault_count + 1) * sizeof fault);
    if (!grown) return "memory ran out";
    spec->faults = grown;
    spec->faults[spec->fault_count++] = fault;
    return NULL;
}

/* NULL when the value was taken, else what it should have been. */
static const char *take_value(struct sim_spec *spec, const struct key *key, const char *value,
                              char *text, size_t capacity) {
    void *field = (char *)spec + key->offset;
    char *end = NULL;
    switch (key->kind) {
    case INTEGER:
    case NUMBER: {
        errno = 0;
        double number = key->kind == INTEGER ? (double)strtoll(value, &end, 10) : strtod(value, &end);
        if (end == value || *end || errno || !isfinite(number) || number < key->minimum ||
            number > key->maximum) {
            snprintf(text, capacity, "must be %s from %.0f to %.0f",
                     key->kind == INTEGER ? "an integer" : "a number", key->minimum, key->maximum);
            return text;
        }
        if (key->kind == INTEGER) *(int64_t *)field = (int64_t)number;
        else *(double *)field = number;
        return NULL;
    }
    case BOOLEAN:
        if (strcmp(value, "true") && strcmp(value, "false")) return "must be true or false";
        *(bool *)field = !strcmp(value, "true");
        return NULL;
    case CLOCK:
        if (strcmp(value, "virtual") && strcmp(value, "real")) return "must be virtual or real";
        *(bool *)field = !strcmp(value, "real");
        return NULL;
    case TEXT:
        free(*(char **)field);
        *(char **)field = unescaped(value);
        return *(char **)field ? NULL : "memory ran out";
    case TOKEN: return add_token(spec, value);
    case FAULT: return add_fault(spec, value, text, capacity);
    }
    return "is of no known kind";
}

static sim_status take_line(struct sim_spec *spec, const char *path, int number, char *line,
                            sim_error out) {
    char *text = trimmed(line);
    if (!*text || *text == '#') return SKIPPY_STATUS_OK;
    char *equals = strchr(text, '=');
    if (!equals)
        return sim_fail(out, SKIPPY_STATUS_MODEL_ERROR, "%s:%d: expected `key = value`, found `%.60s`",
                        path, number, text);
    *equals = '\0';
    const char *name = trimmed(text);
    const struct key *key = NULL;
    for (size_t i = 0; i < sizeof KEYS / sizeof *KEYS; i++)
        if (!strcmp(KEYS[i].name, name)) key = &KEYS[i];
    if (!key)
        return sim_fail(out, SKIPPY_STATUS_MODEL_ERROR,
                        "%s:%d: unknown key `%.60s`; sim/README.md lists the keys", path, number, name);
    char *value = equals + 1;
    if (key->kind != TEXT) { /* a template may well contain " #" */
        char *comment = strstr(value, " #");
        if (comment) *comment = '\0';
    }
    value = trimmed(value);
    char text_buffer[320];
    const char *wrong = take_value(spec, key, value, text_buffer, sizeof text_buffer);
    if (wrong)
        return sim_fail(out, SKIPPY_STATUS_MODEL_ERROR, "%s:%d: %s: %s, found `%.60s`", path, number,
                        name, wrong, value);
    return SKIPPY_STATUS_OK;
}

static sim_status read_file(const char *path, char **content, size_t *length, sim_error out) {
    FILE *file = fopen(path, "rb");
    if (!file)
        return sim_fail(out, SKIPPY_STATUS_MODEL_ERROR, "cannot open model %s: %s", path, strerror(errno));
    *content = malloc((size_t)FILE_BYTES_MAX + 1);
    *length = *content ? fread(*content, 1, (size_t)FILE_BYTES_MAX + 1, file) : 0;
    bool failed = !*content || ferror(file);
    fclose(file);
    if (failed || *length > (size_t)FILE_BYTES_MAX) {
        free(*content);
        return sim_fail(out, SKIPPY_STATUS_MODEL_ERROR,
                        failed ? "cannot read model %s" : "%s is larger than 16 MiB: no skippy-sim spec", path);
    }
    char *fitted = realloc(*content, *length + 1);
    if (fitted) *content = fitted;
    (*content)[*length] = '\0';
    return SKIPPY_STATUS_OK;
}

static sim_status take_lines(struct sim_spec *spec, const char *path, char *content, size_t length,
                             sim_error out) {
    static const char HEADER[] = "skippy-sim 1";
    if (memchr(content, 0, length)) length = 0; /* text has no NUL: noise is refused as a whole */
    char *next = strchr(content, '\n');
    if (next) *next++ = '\0';
    bool is_spec = length && !strcmp(trimmed(content), HEADER);
    if (!is_spec)
        return sim_fail(out, SKIPPY_STATUS_MODEL_ERROR,
                        "%s:1: not a model of the simulated engine: its first line must be `%s`", path, HEADER);
    for (int number = 2; next; number++) {
        char *line = next;
        next = strchr(line, '\n');
        if (next) *next++ = '\0';
        sim_status status = take_line(spec, path, number, line, out);
        if (status != SKIPPY_STATUS_OK) return status;
    }
    return SKIPPY_STATUS_OK;
}

sim_status sim_spec_read(const char *path, struct sim_spec *spec, sim_error out) {
    *spec = (struct sim_spec){.vocab = 512, .n_layer = 4, .n_embd = SIM_ROW_FLOATS,
                              .n_ctx_train = 131072, .seed = 1};
    char *content = NULL;
    size_t length = 0;
    sim_status status = read_file(path, &content, &length, out);
    if (status != SKIPPY_STATUS_OK) return status;
    spec->file_bytes = length;
    spec->architecture = strdup("skippy-sim");
    spec->chat_template = strdup(DEFAULT_TEMPLATE);
    status = take_lines(spec, path, content, length, out);
    free(content);
    if (status == SKIPPY_STATUS_OK && spec->vocab < SIM_FIRST_WORD + (int64_t)spec->token_count)
        status = sim_fail(out, SKIPPY_STATUS_MODEL_ERROR,
                          "%s: vocab: %lld has no room for %d bytes and special tokens and %zu `token` lines",
                          path, (long long)spec->vocab, SIM_FIRST_WORD, spec->token_count);
    if (status != SKIPPY_STATUS_OK) sim_spec_free(spec);
    return status;
}

void sim_spec_free(struct sim_spec *spec) {
    for (size_t i = 0; i < spec->token_count; i++) free(spec->tokens[i].data);
    free(spec->tokens);
    free(spec->faults);
    free(spec->architecture);
    free(spec->chat_template);
    *spec = (struct sim_spec){0};
}
