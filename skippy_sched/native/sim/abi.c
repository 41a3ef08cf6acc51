/* Version, features, error objects, devices and the live-object counters: nothing of a model. */
#include "sim.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

atomic_llong sim_live_errors, sim_live_sessions, sim_live_models;

struct skippy_abi_version skippy_abi_version(void) {
    return (struct skippy_abi_version){SKIPPY_ABI_MAJOR, SKIPPY_ABI_MINOR, SKIPPY_ABI_PATCH};
}

uint64_t skippy_abi_features(void) {
    /* CHAT_SAMPLING_GRAMMAR stays clear: a grammar is accepted here, but does not bind the text. */
    static const int bits[] = {
        SKIPPY_FEATURE_RUNTIME_SLICE, SKIPPY_FEATURE_STATE_IMPORT_EXPORT,
        SKIPPY_FEATURE_TOKENIZE_DETOKENIZE, SKIPPY_FEATURE_ACTIVATION_FRAME,
        SKIPPY_FEATURE_NATIVE_KV_PAGE, SKIPPY_FEATURE_SESSION_RESET, SKIPPY_FEATURE_BATCH_VERIFY,
        SKIPPY_FEATURE_SAMPLING_CONFIG, SKIPPY_FEATURE_BATCH_VERIFY_FRAME,
        SKIPPY_FEATURE_RECURRENT_STATE, SKIPPY_FEATURE_LOGIT_BIAS, SKIPPY_FEATURE_SESSION_TRIM,
        SKIPPY_FEATURE_GENERATION_SIGNALS, SKIPPY_FEATURE_BACKEND_DEVICES,
        SKIPPY_FEATURE_NATIVE_MTP_N1, SKIPPY_FEATURE_NGRAM_CACHE_DRAFT,
        SKIPPY_FEATURE_ITERATION_BATCH, SKIPPY_FEATURE_ACTIVATION_BOUNDARY};
    uint64_t features = 0;
    for (size_t i = 0; i < sizeof bits / sizeof *bits; i++) features |= UINT64_C(1) << bits[i];
    return features;
}

const char *sim_status_name(sim_status status) {
    static const char *const names[] = {"OK", "ERROR", "INVALID_ARGUMENT", "UNSUPPORTED",
                                        "BUFFER_TOO_SMALL", "IO_ERROR", "MODEL_ERROR",
                                        "RUNTIME_ERROR"};
    return (unsigned)status < sizeof names / sizeof *names ? names[status] : "UNKNOWN";
}

/* Messages quote files and rules: what is no text in them becomes '?', so that hosts can decode. */
static void make_printable(char *text) {
    for (unsigned char *c = (unsigned char *)text; *c;) {
        int length = *c < 0x20 || *c == 0x7f ? 0 : *c < 0x80 ? 1 : *c >= 0xc2 && *c < 0xe0 ? 2
                   : *c >= 0xe1 && *c < 0xf0 && *c != 0xed ? 3 : 0; /* the few others are not needed */
        for (int i = 1; i < length; i++)
            if ((c[i] & 0xc0) != 0x80) length = 0;
        if (!length) *c = '?';
        c += length ? length : 1;
    }
}

sim_status sim_fail(sim_error out, sim_status status, const char *format, ...) {
    if (!out) return status;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    make_printable(text);
    struct skippy_error *error = malloc(sizeof *error);
    *out = error;
    if (!error) return status;
    error->status = status;
    error->message = strdup(text);
    atomic_fetch_add(&sim_live_errors, 1);
    return status;
}

void skippy_error_free(struct skippy_error *error) {
    if (!error) return;
    free((char *)error->message);
    free(error);
    atomic_fetch_sub(&sim_live_errors, 1);
}

sim_status skippy_backend_device_count(size_t *out_count, sim_error out) {
    if (!out_count) return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "out_count is NULL");
    *out_count = 1;
    return sim_ok(out);
}

sim_status skippy_backend_device_at(size_t index, struct skippy_backend_device *out_device,
                                    sim_error out) {
    if (!out_device) return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT, "out_device is NULL");
    if (index >= 1)
        return sim_fail(out, SKIPPY_STATUS_INVALID_ARGUMENT,
                        "there is no device %zu: the simulated engine has 1", index);
    *out_device = (struct skippy_backend_device){
        .version = 1, .name = "CPU", .description = "simulated device",
        .memory_free = UINT64_C(1) << 34, .memory_total = UINT64_C(1) << 34,
        .type = SKIPPY_BACKEND_DEVICE_CPU};
    return sim_ok(out);
}

void skippyx_sim_live_objects(uint64_t *out_errors, uint64_t *out_sessions, uint64_t *out_models) {
    if (out_errors) *out_errors = (uint64_t)atomic_load(&sim_live_errors);
    if (out_sessions) *out_sessions = (uint64_t)atomic_load(&sim_live_sessions);
    if (out_models) *out_models = (uint64_t)atomic_load(&sim_live_models);
}
