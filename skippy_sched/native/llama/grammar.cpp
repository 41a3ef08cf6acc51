#include "engine.hpp"
struct Grammar { skippy_sampling_config config; };
void SamplerFree::operator()(Grammar *g) const { delete g; }
void rewind_grammar(skippy_session &) {}
const skippy_sampling_config *grammar_config(const Grammar &g) { return &g.config; }
bool grammar_allows(Grammar &, const skippy_session &, size_t, int32_t) { return true; }
void grammar_restrict(Grammar &, llama_token_data_array &) {}
