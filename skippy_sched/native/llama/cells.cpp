// Counting the cells in use of a shared pool, which llama.cpp's public API does not tell.
#include "engine.hpp"

#include <algorithm>
#include <unordered_map>

int32_t CellRuns::length() const {
    int32_t total = 0;
    for (const auto &run : runs) total += run.second;
    return total;
}

void CellRuns::resize(int32_t cells) {
    int32_t excess = length() - cells;
    while (excess > 0 && !runs.empty()) {
        int32_t cut = std::min(excess, runs.back().second);
        runs.back().second -= cut;
        excess -= cut;
        if (runs.back().second == 0) runs.pop_back();
    }
    if (excess >= 0) return;
    // New cells are this sequence's own: a run that others hold too cannot grow.
    if (runs.empty() || runs.back().first.use_count() > 1) runs.emplace_back(std::make_shared<int>(0), 0);
    runs.back().second -= excess;
}

uint64_t count_cells(const std::vector<const CellRuns *> &sequences) {
    std::unordered_map<const int *, int32_t> longest;
    for (const CellRuns *sequence : sequences)
        for (const auto &run : sequence->runs) {
            int32_t &length = longest[run.first.get()];
            length = std::max(length, run.second);
        }
    uint64_t total = 0;
    for (const auto &entry : longest) total += static_cast<uint64_t>(entry.second);
    return total;
}
