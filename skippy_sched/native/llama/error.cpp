// Error objects, the exception guard, and llama.cpp's log, kept for the next error message.
#include "engine.hpp"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

void fail(skippy_status status, const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    throw Failure{status, text};
}

void store_error(skippy_error **out_error, skippy_status status, const char *message) {
    if (!out_error) return;
    auto *error = new (std::nothrow) skippy_error{status, nullptr};
    if (error) error->message = strdup(message);
    *out_error = error;
}

skippy_status store_current_exception(skippy_error **out_error) {
    try {
        throw;
    } catch (const Failure &failure) {
        store_error(out_error, failure.status, failure.message.c_str());
        return failure.status;
    } catch (const std::bad_alloc &) {
        store_error(out_error, SKIPPY_STATUS_RUNTIME_ERROR, "memory ran out");
    } catch (const std::exception &error) {
        store_error(out_error, SKIPPY_STATUS_RUNTIME_ERROR, error.what());
    } catch (...) {
        store_error(out_error, SKIPPY_STATUS_RUNTIME_ERROR, "an unknown C++ exception");
    }
    return SKIPPY_STATUS_RUNTIME_ERROR;
}

void skippy_error_free(skippy_error *error) {
    if (!error) return;
    free(const_cast<char *>(error->message));
    delete error;
}

// ---- llama.cpp's log ------------------------------------------------------------------------------

static thread_local std::string llama_log;
static const size_t llama_log_max = 600; // enough for llama.cpp's reason, short enough for one message

static void on_llama_log(ggml_log_level level, const char *text, void *to_stderr) {
    static thread_local ggml_log_level last = GGML_LOG_LEVEL_NONE;
    if (level == GGML_LOG_LEVEL_CONT) level = last;
    last = level;
    if (to_stderr) fputs(text, stderr);
    if (level == GGML_LOG_LEVEL_ERROR && llama_log.size() < llama_log_max) llama_log += text;
}

// ---- llama.cpp's assertions -----------------------------------------------------------------------

static thread_local int assertions_throw = 0;

AssertionsThrow::AssertionsThrow() { assertions_throw++; }
AssertionsThrow::~AssertionsThrow() { assertions_throw--; }

// The frames between an assertion and here unwind cleanly, those in C included.
static void on_assertion(const char *message) {
    if (assertions_throw) throw std::runtime_error(message);
    fprintf(stderr, "%s\n", message); // ggml aborts when this returns
}

void capture_llama_log() {
    static std::once_flag once;
    std::call_once(once, [] {
        const char *wanted = getenv("SKIPPY_LLAMA_LOG");
        static char mark;
        llama_log_set(on_llama_log, wanted && !strcmp(wanted, "1") ? &mark : nullptr);
        ggml_set_abort_callback(on_assertion);
        llama_backend_init();
    });
}

std::string take_llama_log() {
    std::string text;
    text.swap(llama_log);
    for (char &c : text)
        if (c == '\n') c = ' ';
    while (!text.empty() && text.back() == ' ') text.pop_back();
    return text;
}
