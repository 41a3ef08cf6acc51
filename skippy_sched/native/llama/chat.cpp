// Chat sampling: a sampling config and a grammar that stay in force for a session until they are cleared.
#include "engine.hpp"

#include <algorithm>
#include <cmath>

#include "nlohmann/json.hpp"

struct ChatSampling {
    skippy_sampling_config config;
    SamplerPtr grammar; // NULL: only a config
    size_t first = 0;   // index of the first token of the answer
    size_t fed = 0;     // tokens of the history that the grammar knows
    bool broken = false; // it met a token that it forbids, and holds nothing back from then on
};

void SamplerFree::operator()(ChatSampling *chat) const { delete chat; }

const skippy_sampling_config *chat_config(const ChatSampling &chat) { return &chat.config; }

static bool permits(llama_sampler *grammar, int32_t token) {
    llama_token_data one{token, 0.0f, 0.0f};
    llama_token_data_array candidates{&one, 1, -1, false};
    llama_sampler_apply(grammar, &candidates);
    return one.logit > -INFINITY;
}

// llama.cpp aborts or throws on a token that its grammar forbids, so each is asked for first.
static void feed(ChatSampling &chat, const skippy_session &session, size_t history_length) {
    size_t known = std::min(history_length, session.history.size());
    for (chat.fed = std::max(chat.fed, chat.first); chat.fed < known && !chat.broken; chat.fed++) {
        int32_t token = session.history[chat.fed];
        try {
            chat.broken = !permits(chat.grammar.get(), token);
            if (!chat.broken) llama_sampler_accept(chat.grammar.get(), token);
        } catch (const std::exception &) {
            chat.broken = true;
        }
    }
}

bool chat_allows(ChatSampling &chat, const skippy_session &session, size_t history_length, int32_t token) {
    if (!chat.grammar) return true;
    feed(chat, session, history_length);
    return chat.broken || permits(chat.grammar.get(), token);
}

void chat_restrict(ChatSampling &chat, llama_token_data_array &candidates) {
    if (chat.grammar && !chat.broken) llama_sampler_apply(chat.grammar.get(), &candidates);
}

void rewind_chat(skippy_session &session) {
    ChatSampling *chat = session.chat.get();
    if (!chat || !chat->grammar || chat->fed <= session.history.size()) return;
    llama_sampler_reset(chat->grammar.get());
    chat->fed = 0;
    chat->broken = false;
}

// ---- metadata -------------------------------------------------------------------------------------------------

enum class Trigger { token = 0, word = 1, pattern = 2, full_pattern = 3 };

static std::string escaped(const std::string &word) {
    std::string pattern;
    for (char c : word) {
        if (std::string(".^$|()*+?[]{}\\").find(c) != std::string::npos) pattern += '\\';
        pattern += c;
    }
    return pattern;
}

static std::string anchored(const std::string &pattern) {
    if (pattern.empty()) return "^$";
    return (pattern.front() == '^' ? "" : "^") + pattern + (pattern.back() == '$' ? "" : "$");
}

static llama_sampler *make_grammar(const llama_vocab *vocab, const nlohmann::json &metadata, const std::string &grammar) {
    if (!metadata.value("grammar_lazy", false)) return llama_sampler_init_grammar(vocab, grammar.c_str(), "root");
    std::vector<std::string> patterns;
    std::vector<llama_token> tokens;
    for (const nlohmann::json &trigger : metadata.value("grammar_triggers", nlohmann::json::array())) {
        std::string value = trigger.value("value", "");
        switch (static_cast<Trigger>(trigger.value("type", -1))) {
        case Trigger::token: tokens.push_back(trigger.value("token", -1)); break;
        case Trigger::word: patterns.push_back(escaped(value)); break;
        case Trigger::pattern: patterns.push_back(value); break;
        case Trigger::full_pattern: patterns.push_back(anchored(value)); break;
        default: fail(SKIPPY_STATUS_RUNTIME_ERROR, "configure_chat_sampling: a grammar trigger has a type other than 0 to 3");
        }
    }
    std::vector<const char *> raw;
    for (const std::string &pattern : patterns) raw.push_back(pattern.c_str());
    return llama_sampler_init_grammar_lazy_patterns(vocab, grammar.c_str(), "root", raw.data(), raw.size(), tokens.data(), tokens.size());
}

static llama_sampler *read_grammar(const llama_vocab *vocab, const nlohmann::json &metadata) {
    take_llama_log();
    try {
        std::string grammar = metadata.value("grammar", "");
        if (grammar.empty()) return nullptr;
        if (llama_sampler *made = make_grammar(vocab, metadata, grammar)) return made;
    } catch (const std::exception &error) { // a field of another type, a pattern that is no regular expression
        fail(SKIPPY_STATUS_RUNTIME_ERROR, "configure_chat_sampling: the grammar metadata cannot be used: %s", error.what());
    }
    fail(SKIPPY_STATUS_RUNTIME_ERROR, "configure_chat_sampling: the grammar cannot be used: %s", take_llama_log().c_str());
}

skippy_status skippy_session_configure_chat_sampling(skippy_session *session, const skippy_sampling_config *sampling,
                                                     const char *metadata_json, uint64_t prompt_token_count,
                                                     skippy_error **out_error) {
    return guarded(out_error, [&] {
        skippy_session &target = live_session(session, "configure_chat_sampling");
        target.chat.reset();
        if (!metadata_json || !*metadata_json) return;
        nlohmann::json metadata = nlohmann::json::parse(metadata_json, nullptr, false);
        if (!metadata.is_object()) return; // not JSON: cleared, as the ABI has it
        std::unique_ptr<ChatSampling, SamplerFree> chat(new ChatSampling{});
        if (sampling) chat->config = *sampling;
        chat->first = static_cast<size_t>(prompt_token_count);
        chat->grammar.reset(read_grammar(target.model->vocab, metadata));
        target.chat = std::move(chat);
    });
}
