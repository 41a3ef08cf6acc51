// Choosing the next token from a row of logits.
//
// Randomness is counted by position: a draw depends on (seed, position) and the logits alone, so a session
// that is computed again from its tokens, in other chunks or after a trim, draws the same tokens. Mirostat is
// the exception: it carries a state from draw to draw.
#include "engine.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>

namespace {

enum class StepKind { penalties, dry, llama, xtc };

struct Step {
    StepKind kind;
    SamplerPtr sampler; // dry and llama
};

uint64_t mixed(uint64_t x) { // splitmix64
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

} // namespace

struct Sampler {
    skippy_sampling_config config;
    std::vector<Step> steps;
    SamplerPtr mirostat;
    size_t dry_fed = 0; // tokens of the history that the DRY step has seen
};

void SamplerFree::operator()(Sampler *sampler) const { delete sampler; }

namespace {

bool is_enabled(const skippy_sampling_config *config) {
    return config && config->version && (config->flags & SKIPPY_SAMPLING_FLAG_ENABLED);
}

bool ignores_end(const skippy_sampling_config &config) {
    return (config.flags & SKIPPY_SAMPLING_FLAG_IGNORE_EOS) || config.ignore_eos;
}

float repeat_penalty(const skippy_sampling_config &config) { return config.repeat_penalty == 0.0f ? 1.0f : config.repeat_penalty; }

bool has_penalties(const skippy_sampling_config &config) {
    return config.presence_penalty != 0.0f || config.frequency_penalty != 0.0f || repeat_penalty(config) != 1.0f;
}

bool is_plain_greedy(const skippy_sampling_config &config) {
    return config.temperature <= 0.0f && !has_penalties(config) && config.dry_multiplier == 0.0f && config.xtc_probability <= 0.0f;
}

size_t bias_count(const skippy_sampling_config &config) {
    return std::min<size_t>(config.logit_bias_count, SKIPPY_MAX_LOGIT_BIAS);
}

bool same_config(const skippy_sampling_config &a, const skippy_sampling_config &b) {
    size_t head = offsetof(skippy_sampling_config, logit_bias);
    return !memcmp(&a, &b, head) && !memcmp(a.logit_bias, b.logit_bias, bias_count(a) * sizeof a.logit_bias[0]);
}

// ---- building --------------------------------------------------------------------------------------------

llama_sampler *make_dry(const skippy_session &session, const skippy_sampling_config &config) {
    const char *breakers[SKIPPY_MAX_DRY_BREAKERS];
    std::array<std::string, SKIPPY_MAX_DRY_BREAKERS> texts;
    size_t count = std::min<size_t>(config.dry_sequence_breaker_count, SKIPPY_MAX_DRY_BREAKERS);
    for (size_t i = 0; i < count; i++) {
        texts[i].assign(config.dry_sequence_breakers[i], strnlen(config.dry_sequence_breakers[i], SKIPPY_DRY_BREAKER_BYTES));
        breakers[i] = texts[i].c_str();
    }
    const skippy_model &model = *session.model;
    int32_t window = config.dry_penalty_last_n < 0 ? model.lane_cells : std::min(config.dry_penalty_last_n, model.lane_cells);
    return llama_sampler_init_dry(model.vocab, config.dry_multiplier, config.dry_base, config.dry_allowed_length, window, breakers, count);
}

void add_llama(Sampler &sampler, llama_sampler *made) { sampler.steps.push_back({StepKind::llama, SamplerPtr(made)}); }

void add_step(Sampler &sampler, const skippy_session &session, uint32_t type) {
    const skippy_sampling_config &config = sampler.config;
    auto strictly_inside = [](float p) { return p > 0.0f && p < 1.0f; };
    switch (type) {
    case SKIPPY_SAMPLER_PENALTIES:
        if (has_penalties(config)) sampler.steps.push_back({StepKind::penalties, nullptr});
        break;
    case SKIPPY_SAMPLER_DRY:
        if (config.dry_multiplier != 0.0f) sampler.steps.push_back({StepKind::dry, SamplerPtr(make_dry(session, config))});
        break;
    case SKIPPY_SAMPLER_TOP_N_SIGMA:
        if (config.top_nsigma > 0.0f) add_llama(sampler, llama_sampler_init_top_n_sigma(config.top_nsigma));
        break;
    case SKIPPY_SAMPLER_TOP_K:
        if (config.top_k > 0) add_llama(sampler, llama_sampler_init_top_k(config.top_k));
        break;
    case SKIPPY_SAMPLER_TYPICAL_P:
        if (strictly_inside(config.typical_p)) add_llama(sampler, llama_sampler_init_typical(config.typical_p, 1));
        break;
    case SKIPPY_SAMPLER_TOP_P:
        if (strictly_inside(config.top_p)) add_llama(sampler, llama_sampler_init_top_p(config.top_p, 1));
        break;
    case SKIPPY_SAMPLER_MIN_P:
        if (config.min_p > 0.0f) add_llama(sampler, llama_sampler_init_min_p(config.min_p, 1));
        break;
    case SKIPPY_SAMPLER_XTC:
        if (config.xtc_probability > 0.0f && config.xtc_threshold <= 0.5f) sampler.steps.push_back({StepKind::xtc, nullptr});
        break;
    case SKIPPY_SAMPLER_TEMPERATURE: // at 0 and below the last step takes the maximum
        if (config.temperature > 0.0f && (config.temperature != 1.0f || config.dynatemp_range > 0.0f))
            add_llama(sampler, llama_sampler_init_temp_ext(config.temperature, config.dynatemp_range, config.dynatemp_exponent));
        break;
    default: break; // an unknown sampler is skipped
    }
}

std::unique_ptr<Sampler, SamplerFree> build(const skippy_session &session, const skippy_sampling_config &config) {
    std::unique_ptr<Sampler, SamplerFree> sampler(new Sampler{});
    sampler->config = config;
    bool mirostat = (config.mirostat_mode == 1 || config.mirostat_mode == 2) && config.temperature > 0.0f;
    if (mirostat) {
        add_step(*sampler, session, SKIPPY_SAMPLER_TEMPERATURE);
        uint32_t seed = config.seed ? config.seed : static_cast<uint32_t>(session.random_base);
        const int32_t estimated_over = 100; // the paper's m, as llama.cpp uses it
        sampler->mirostat.reset(config.mirostat_mode == 1
                                    ? llama_sampler_init_mirostat(session.model->n_vocab, seed, config.mirostat_entropy,
                                                                  config.mirostat_learning_rate, estimated_over)
                                    : llama_sampler_init_mirostat_v2(seed, config.mirostat_entropy, config.mirostat_learning_rate));
        return sampler;
    }
    static const uint32_t default_order[] = {
        SKIPPY_SAMPLER_PENALTIES, SKIPPY_SAMPLER_DRY,   SKIPPY_SAMPLER_TOP_N_SIGMA, SKIPPY_SAMPLER_TOP_K,      SKIPPY_SAMPLER_TYPICAL_P,
        SKIPPY_SAMPLER_TOP_P,     SKIPPY_SAMPLER_MIN_P, SKIPPY_SAMPLER_XTC,         SKIPPY_SAMPLER_TEMPERATURE};
    size_t given = std::min<size_t>(config.sampler_count, SKIPPY_MAX_SAMPLERS);
    if (given)
        for (size_t i = 0; i < given; i++) add_step(*sampler, session, config.samplers[i]);
    else
        for (uint32_t type : default_order) add_step(*sampler, session, type);
    return sampler;
}

// ---- logit bias: sparse, so the row itself is changed and put back ------------------------------------------

struct BiasedRow {
    float *logits;
    std::vector<std::pair<int32_t, float>> before;

    void set(int32_t token, float value) {
        before.emplace_back(token, logits[token]);
        logits[token] = value;
    }
    BiasedRow(float *row, const skippy_model &model, const skippy_sampling_config *config) : logits(row) {
        if (config)
            for (size_t i = 0; i < bias_count(*config); i++) {
                const skippy_logit_bias &bias = config->logit_bias[i];
                if (bias.token >= 0 && bias.token < model.n_vocab) set(bias.token, logits[bias.token] + bias.bias);
            }
        if (config && ignores_end(*config))
            for (int32_t token : model.end_tokens) set(token, -INFINITY);
        for (int32_t token : model.suppressed_tokens) set(token, -INFINITY);
    }
    ~BiasedRow() {
        for (auto entry = before.rbegin(); entry != before.rend(); ++entry) logits[entry->first] = entry->second;
    }
    BiasedRow(const BiasedRow &) = delete;
    BiasedRow &operator=(const BiasedRow &) = delete;
};

// ---- drawing ---------------------------------------------------------------------------------------------------

int32_t arg_max(const float *logits, int32_t n_vocab) {
    int32_t best = -1;
    float highest = -INFINITY;
    for (int32_t token = 0; token < n_vocab; token++)
        if (logits[token] > highest) {
            highest = logits[token];
            best = token;
        }
    return best;
}

// Calls `visit` for every token that a mask lets through; most masks let through few.
template <class Visit> void for_each_allowed(const std::vector<uint32_t> &mask, int32_t n_vocab, Visit &&visit) {
    for (size_t word = 0; word < mask.size(); word++)
        for (uint32_t bits = mask[word]; bits; bits &= bits - 1) {
            int32_t token = static_cast<int32_t>(word * 32) + __builtin_ctz(bits);
            if (token < n_vocab) visit(token);
        }
}

int32_t allowed_arg_max(const std::vector<uint32_t> &mask, const float *logits, int32_t n_vocab) {
    int32_t best = -1;
    for_each_allowed(mask, n_vocab, [&](int32_t token) {
        if (logits[token] > (best < 0 ? -INFINITY : logits[best])) best = token;
    });
    return best;
}

// Over the tokens of the window only: llama.cpp's sampler looks every candidate up in a map.
void penalize(const skippy_session &session, const skippy_sampling_config &config, size_t history_length,
              llama_token_data_array &candidates) {
    size_t window = config.penalty_last_n > 0 ? static_cast<size_t>(config.penalty_last_n) : history_length;
    size_t known = std::min(history_length, session.history.size());
    std::unordered_map<int32_t, int32_t> counts;
    for (size_t i = known - std::min(window, known); i < known; i++) counts[session.history[i]]++;
    float repeat = repeat_penalty(config);
    auto apply = [&](llama_token_data &candidate, int32_t count) {
        candidate.logit = candidate.logit <= 0.0f ? candidate.logit * repeat : candidate.logit / repeat;
        candidate.logit -= static_cast<float>(count) * config.frequency_penalty + config.presence_penalty;
    };
    bool complete = candidates.size == static_cast<size_t>(session.model->n_vocab) && !candidates.sorted;
    if (complete) {
        for (const auto &entry : counts) apply(candidates.data[entry.first], entry.second);
        return;
    }
    for (size_t i = 0; i < candidates.size; i++) {
        auto entry = counts.find(candidates.data[i].id);
        if (entry != counts.end()) apply(candidates.data[i], entry->second);
    }
    candidates.sorted = false;
}

void feed_dry(Sampler &sampler, llama_sampler *dry, const skippy_session &session, size_t history_length) {
    size_t known = std::min(history_length, session.history.size());
    if (known < sampler.dry_fed) {
        llama_sampler_reset(dry);
        sampler.dry_fed = 0;
    }
    for (; sampler.dry_fed < known; sampler.dry_fed++) llama_sampler_accept(dry, session.history[sampler.dry_fed]);
}

void apply_xtc(const skippy_sampling_config &config, uint64_t random, llama_token_data_array &candidates) {
    uint32_t seed = static_cast<uint32_t>(mixed(random)) & 0x7fffffff; // never llama.cpp's "random" seed
    SamplerPtr xtc(llama_sampler_init_xtc(config.xtc_probability, config.xtc_threshold, 1, seed));
    llama_sampler_apply(xtc.get(), &candidates);
}

int32_t draw(const llama_token_data_array &candidates, uint64_t random) {
    float highest = -INFINITY;
    for (size_t i = 0; i < candidates.size; i++) highest = std::max(highest, candidates.data[i].logit);
    if (highest == -INFINITY) return -1;
    double total = 0.0;
    for (size_t i = 0; i < candidates.size; i++) {
        candidates.data[i].p = std::exp(candidates.data[i].logit - highest);
        total += candidates.data[i].p;
    }
    double left = total * (static_cast<double>(random >> 11) * 0x1p-53);
    int32_t last = -1;
    for (size_t i = 0; i < candidates.size; i++) {
        if (candidates.data[i].p <= 0.0f) continue;
        last = candidates.data[i].id;
        left -= candidates.data[i].p;
        if (left < 0.0) break;
    }
    return last;
}

int32_t highest(const llama_token_data_array &candidates) {
    int32_t best = -1;
    float logit = -INFINITY;
    for (size_t i = 0; i < candidates.size; i++) {
        const llama_token_data &candidate = candidates.data[i];
        if (candidate.logit > logit || (candidate.logit == logit && best >= 0 && candidate.id < best)) {
            logit = candidate.logit;
            best = candidate.id;
        }
    }
    return best;
}

llama_token_data_array fill_candidates(skippy_model &model, const skippy_session &session, const float *logits) {
    llama_token_data *data = model.candidates.data();
    if (!session.mask.empty()) {
        size_t count = 0;
        for_each_allowed(session.mask, model.n_vocab, [&](int32_t token) {
            if (logits[token] > -INFINITY) data[count++] = {token, logits[token], 0.0f};
        });
        return {data, count, -1, false};
    }
    for (int32_t token = 0; token < model.n_vocab; token++) {
        float logit = logits[token];
        data[token] = {token, logit == logit ? logit : -INFINITY, 0.0f}; // a NaN would break llama.cpp's sorts
    }
    return {data, model.candidates.size(), -1, false};
}

struct Draw {
    skippy_session &session;
    Sampler &sampler;
    size_t history_length;
    uint64_t random;
};

int32_t run_chain(const Draw &how, llama_token_data_array candidates) {
    const skippy_sampling_config &config = how.sampler.config;
    for (Step &step : how.sampler.steps) {
        if (candidates.size == 0) return -1;
        switch (step.kind) {
        case StepKind::penalties: penalize(how.session, config, how.history_length, candidates); break;
        case StepKind::xtc: apply_xtc(config, how.random, candidates); break;
        case StepKind::dry: feed_dry(how.sampler, step.sampler.get(), how.session, how.history_length); [[fallthrough]];
        case StepKind::llama: llama_sampler_apply(step.sampler.get(), &candidates); break;
        }
    }
    if (how.sampler.mirostat && candidates.size) {
        llama_sampler_apply(how.sampler.mirostat.get(), &candidates);
        return candidates.selected >= 0 ? candidates.data[candidates.selected].id : -1;
    }
    return config.temperature <= 0.0f ? highest(candidates) : draw(candidates, how.random);
}

const skippy_sampling_config greedy_config = {};

int32_t choose(skippy_session &session, const skippy_sampling_config *config, float *logits, size_t history_length, int32_t position) {
    skippy_model &model = *session.model;
    BiasedRow row(logits, model, config);
    bool greedy = !config || is_plain_greedy(*config);
    int32_t token = -1;
    if (!greedy || session.chat) {
        const skippy_sampling_config &wanted = config ? *config : greedy_config;
        if (!session.sampler || !same_config(session.sampler->config, wanted)) session.sampler = build(session, wanted);
    }
    uint64_t seed = config && config->seed ? config->seed : session.random_base;
    uint64_t random = mixed(mixed(seed) ^ static_cast<uint64_t>(position));
    if (!greedy) token = run_chain({session, *session.sampler, history_length, random}, fill_candidates(model, session, logits));
    else if (session.mask.empty()) token = arg_max(logits, model.n_vocab);
    else token = allowed_arg_max(session.mask, logits, model.n_vocab);
    // The grammar is asked about one token first: a vocabulary pass through it is slow and mostly not needed.
    if (!session.chat || (token >= 0 && chat_allows(*session.chat, session, history_length, token))) return token;
    llama_token_data_array candidates = fill_candidates(model, session, logits);
    chat_restrict(*session.chat, candidates);
    return run_chain({session, *session.sampler, history_length, random}, candidates);
}

} // namespace

bool needs_chain(const skippy_session &session, const skippy_sampling_config *config) {
    if (session.chat || !session.mask.empty()) return true;
    return is_enabled(config) && !(is_plain_greedy(*config) && !ignores_end(*config) && !bias_count(*config));
}

int32_t sample(skippy_session &session, const skippy_sampling_config *config, float *logits, size_t history_length, int32_t position) {
    if (!logits) fail(SKIPPY_STATUS_RUNTIME_ERROR, "sampling produced no allowed token: lane %d has no logits", session.lane);
    if (session.chat) config = chat_config(*session.chat);
    if (!is_enabled(config)) config = nullptr;
    if (session.records_signals) { // before the choice: the row is still what the model computed
        skippy_token_signal signal = compute_signal(logits, session.model->n_vocab);
        session.signals.push_back({position, -1, signal});
    }
    int32_t token = choose(session, config, logits, history_length, position);
    if (token < 0)
        fail(SKIPPY_STATUS_RUNTIME_ERROR, "sampling produced no allowed token for lane %d at position %d; the session has advanced",
             session.lane, position);
    if (session.records_signals) session.signals.back().token = token;
    return token;
}

skippy_token_signal compute_signal(const float *logits, int32_t n_vocab) {
    skippy_token_signal signal{};
    signal.top_token = signal.second_token = -1;
    float top = -INFINITY, second = -INFINITY;
    for (int32_t token = 0; token < n_vocab; token++) {
        if (logits[token] > top) {
            second = top;
            signal.second_token = signal.top_token;
            top = logits[token];
            signal.top_token = token;
        } else if (logits[token] > second) {
            second = logits[token];
            signal.second_token = token;
        }
    }
    double total = 0.0, weighted = 0.0;
    for (int32_t token = 0; token < n_vocab; token++) {
        double below = logits[token] - top, weight = std::exp(below);
        total += weight;
        if (weight > 0.0) weighted += weight * below;
    }
    float log_total = static_cast<float>(std::log(total));
    signal.entropy = static_cast<float>(std::log(total) - weighted / total);
    signal.top_logprob = -log_total;
    signal.second_logprob = second - top - log_total;
    signal.margin = signal.top_logprob - signal.second_logprob;
    return signal;
}

skippy_status skippyx_session_set_mask(skippy_session *session, const uint32_t *words, size_t word_count, skippy_error **out_error) {
    return guarded(out_error, [&] {
        skippy_session &target = live_session(session, "session_set_mask");
        size_t needed = (static_cast<size_t>(target.model->n_vocab) + 31) / 32;
        if (word_count && (!words || word_count != needed))
            refuse("session_set_mask: %zu words%s, a mask of %d tokens has %zu", word_count, words ? "" : " at NULL",
                   target.model->n_vocab, needed);
        target.mask.assign(words, words + word_count);
    });
}
