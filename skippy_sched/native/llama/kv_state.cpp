// The sequence state that llama.cpp writes, taken apart and put together again by position.
//
// llama.cpp gives no access to single cells, but it writes and reads a whole sequence in a plain layout, one block
// for each cache (two when a model has sliding-window layers): cells, then K rows, then V rows of every layer. The
// layout belongs to the pinned version; anything that does not parse to the last byte is UNSUPPORTED.
#include "engine.hpp"

#include <algorithm>
#include <cstring>

namespace {

const uint32_t sequence_magic = 0xaf143cd8; // opens every sequence state of llama.cpp

struct Cursor {
    const uint8_t *at;
    size_t left;

    const uint8_t *take(size_t size) {
        if (size > left) fail(SKIPPY_STATUS_UNSUPPORTED, "this memory's state is not laid out in rows: it ends early");
        const uint8_t *start = at;
        at += size;
        left -= size;
        return start;
    }
    template <class T> T number() {
        T value;
        memcpy(&value, take(sizeof value), sizeof value);
        return value;
    }
};

struct Rows { // K or V of one layer; transposed: `elements` strips with one element of every cell
    int32_t type = 0;
    size_t row_bytes = 0, element_bytes = 0, elements = 0;
    const uint8_t *data = nullptr;
};

struct Block { // one cache
    std::vector<int32_t> positions;
    std::vector<const uint8_t *> axes; // 2-D positions of a multi-axis model
    bool transposed = false;
    std::vector<Rows> k, v;
};

size_t product(size_t a, size_t b) {
    size_t result;
    if (__builtin_mul_overflow(a, b, &result)) fail(SKIPPY_STATUS_UNSUPPORTED, "this memory's state names an impossible size");
    return result;
}

Rows read_rows(Cursor &in, size_t cells, bool transposed) {
    Rows rows;
    rows.type = in.number<int32_t>();
    if (transposed) {
        rows.element_bytes = in.number<uint32_t>();
        rows.elements = in.number<uint32_t>();
        rows.row_bytes = product(rows.element_bytes, rows.elements);
    } else {
        rows.row_bytes = static_cast<size_t>(in.number<uint64_t>());
    }
    rows.data = in.take(product(rows.row_bytes, cells));
    return rows;
}

const size_t axes_bytes = 8; // two int32 beside the position

Block read_block(Cursor &in, const skippy_model &model) {
    Block block;
    uint32_t streams = in.number<uint32_t>();
    for (uint32_t stream = 0; stream < streams; stream++) {
        size_t cells = in.number<uint32_t>();
        if (!cells) continue;
        if (!block.positions.empty()) fail(SKIPPY_STATUS_UNSUPPORTED, "this memory keeps one sequence in several streams");
        for (size_t cell = 0; cell < cells; cell++) {
            block.positions.push_back(in.number<int32_t>());
            if (in.number<uint32_t>() != 1) fail(SKIPPY_STATUS_UNSUPPORTED, "this memory's state names no single sequence");
            if (model.position_width > 1) block.axes.push_back(in.take(axes_bytes));
            in.number<int32_t>();
        }
        block.transposed = in.number<uint32_t>() != 0;
        uint32_t layers = in.number<uint32_t>();
        for (uint32_t layer = 0; layer < layers; layer++) block.k.push_back(read_rows(in, cells, false));
        for (uint32_t layer = 0; layer < layers; layer++) block.v.push_back(read_rows(in, cells, block.transposed));
    }
    return block;
}

std::vector<Block> read_state(const skippy_model &model, const uint8_t *data, size_t size) {
    Cursor in{data, size};
    if (in.number<uint32_t>() != sequence_magic) fail(SKIPPY_STATUS_UNSUPPORTED, "this is no sequence state of llama.cpp");
    in.number<int32_t>();
    std::vector<Block> blocks;
    size_t expected = model.sliding_window > 0 ? 2 : 1;
    while (in.left && blocks.size() < expected) blocks.push_back(read_block(in, model));
    if (in.left) fail(SKIPPY_STATUS_UNSUPPORTED, "this memory's state is not laid out in rows: %zu bytes are left over", in.left);
    return blocks;
}

struct Cell {
    const Block *block;
    size_t index;
};

struct Writer {
    std::vector<uint8_t> bytes;

    void raw(const uint8_t *data, size_t size) { bytes.insert(bytes.end(), data, data + size); }
    template <class T> void number(T value) { raw(reinterpret_cast<const uint8_t *>(&value), sizeof value); }
};

void write_rows(Writer &out, const std::vector<Cell> &cells, size_t layer, bool values) {
    auto rows_of = [&](const Cell &cell) -> const Rows & { return (values ? cell.block->v : cell.block->k)[layer]; };
    const Rows &shape = rows_of(cells.front());
    out.number<int32_t>(shape.type);
    bool transposed = values && cells.front().block->transposed;
    if (!transposed) {
        out.number<uint64_t>(shape.row_bytes);
        for (const Cell &cell : cells) out.raw(rows_of(cell).data + cell.index * shape.row_bytes, shape.row_bytes);
        return;
    }
    out.number<uint32_t>(static_cast<uint32_t>(shape.element_bytes));
    out.number<uint32_t>(static_cast<uint32_t>(shape.elements));
    for (size_t element = 0; element < shape.elements; element++)
        for (const Cell &cell : cells) {
            size_t strip = cell.block->positions.size();
            out.raw(rows_of(cell).data + (element * strip + cell.index) * shape.element_bytes, shape.element_bytes);
        }
}

void check_alike(const std::vector<Cell> &cells) {
    const Block &first = *cells.front().block;
    auto differ = [](const std::vector<Rows> &a, const std::vector<Rows> &b) {
        return a.size() != b.size() || !std::equal(a.begin(), a.end(), b.begin(), [](const Rows &x, const Rows &y) {
            return x.type == y.type && x.row_bytes == y.row_bytes && x.element_bytes == y.element_bytes;
        });
    };
    for (const Cell &cell : cells)
        if (cell.block != &first && (cell.block->transposed != first.transposed || differ(cell.block->k, first.k) || differ(cell.block->v, first.v)))
            refuse("the rows of the page and of the lane have different types or sizes");
}

// llama.cpp leaves out of a state what the session's own next token does not look at. An earlier token may need it.
void check_window(const skippy_model &model, const std::vector<Cell> &cells, int32_t from, int32_t to) {
    int32_t needed = std::max(from, to - model.sliding_window + 1);
    if (to <= from || (!cells.empty() && cells.front().block->positions[cells.front().index] <= needed)) return;
    fail(SKIPPY_STATUS_UNSUPPORTED,
         "positions [%d, %d) alone cannot be kept: the state of a session that has gone on lacks the sliding window of %d before them; "
         "take all its tokens, or fewer before it goes on",
         from, to, model.sliding_window);
}

void write_block(Writer &out, const std::vector<Cell> &cells, uint32_t streams) {
    out.number<uint32_t>(streams);
    out.number<uint32_t>(static_cast<uint32_t>(cells.size())); // the stream of a single sequence is chosen by the reader
    if (!cells.empty()) {
        for (const Cell &cell : cells) {
            out.number<int32_t>(cell.block->positions[cell.index]);
            out.number<uint32_t>(1);
            if (!cell.block->axes.empty()) out.raw(cell.block->axes[cell.index], axes_bytes);
            out.number<int32_t>(0);
        }
        const Block &first = *cells.front().block;
        out.number<uint32_t>(first.transposed);
        out.number<uint32_t>(static_cast<uint32_t>(first.k.size()));
        for (size_t layer = 0; layer < first.k.size(); layer++) write_rows(out, cells, layer, false);
        for (size_t layer = 0; layer < first.v.size(); layer++) write_rows(out, cells, layer, true);
    }
    for (uint32_t stream = 1; stream < streams; stream++) out.number<uint32_t>(0);
}

StateShape shape_of(const Block &block) {
    StateShape shape{};
    shape.layer_count = static_cast<uint32_t>(block.k.size());
    shape.v_transposed = block.transposed;
    if (block.k.empty() || block.v.empty()) return shape;
    shape.k_type = static_cast<uint32_t>(block.k[0].type);
    shape.v_type = static_cast<uint32_t>(block.v[0].type);
    shape.k_row_bytes = static_cast<uint32_t>(block.k[0].row_bytes);
    shape.v_row_bytes = static_cast<uint32_t>(block.v[0].row_bytes);
    shape.v_element_bytes = static_cast<uint32_t>(ggml_type_size(static_cast<ggml_type>(block.v[0].type)));
    return shape;
}

} // namespace

uint32_t stream_count(const skippy_model &model) { return model.unified ? 1 : static_cast<uint32_t>(model.lane_count); }

std::vector<uint8_t> lane_state(const skippy_session &session, llama_state_seq_flags flags) {
    llama_context *context = session.model->context.get();
    std::vector<uint8_t> state(llama_state_seq_get_size_ext(context, session.lane, flags));
    if (!state.empty() && llama_state_seq_get_data_ext(context, state.data(), state.size(), session.lane, flags) != state.size())
        fail(SKIPPY_STATUS_RUNTIME_ERROR, "the state of lane %d cannot be read: %s", session.lane, take_llama_log().c_str());
    return state;
}

std::vector<uint8_t> compose_state(const skippy_model &model, const std::vector<StateRange> &ranges, uint32_t streams, StateShape *shape) {
    if (model.has_recurrent_memory()) fail(SKIPPY_STATUS_UNSUPPORTED, "a recurrent memory has no rows by position");
    std::vector<std::vector<Block>> sources;
    size_t bytes = 0;
    int32_t from = ranges[0].from, to = ranges[0].to;
    for (const StateRange &range : ranges) {
        if (range.from < range.to) {
            from = std::min(from, range.from);
            to = std::max(to, range.to);
        }
        sources.push_back(read_state(model, range.data, range.size));
        bytes += range.size;
    }
    Writer out;
    out.bytes.reserve(bytes);
    out.number<uint32_t>(sequence_magic);
    out.number<int32_t>(0);
    if (shape) *shape = sources[0].empty() ? StateShape{} : shape_of(sources[0][0]);
    for (size_t number = 0; number < sources[0].size(); number++) {
        std::vector<Cell> cells;
        for (size_t source = 0; source < sources.size(); source++) {
            if (sources[source].size() != sources[0].size()) refuse("the page and the lane have different caches");
            const Block &block = sources[source][number];
            for (size_t i = 0; i < block.positions.size(); i++)
                if (block.positions[i] >= ranges[source].from && block.positions[i] < ranges[source].to) cells.push_back({&block, i});
        }
        std::sort(cells.begin(), cells.end(), [](const Cell &a, const Cell &b) { return a.block->positions[a.index] < b.block->positions[b.index]; });
        if (!cells.empty()) check_alike(cells);
        bool window_block = number == 1;
        if (window_block) check_window(model, cells, from, to);
        write_block(out, cells, streams);
        if (shape) shape->block_ends.push_back(out.bytes.size());
    }
    return out.bytes;
}

void load_state(skippy_session &session, const std::vector<uint8_t> &state, llama_state_seq_flags flags, const char *call) {
    skippy_model &model = *session.model;
    take_llama_log();
    session.logits_row = -1;
    // An empty state would leave the old rows; a partial one belongs beside them.
    if (flags == LLAMA_STATE_SEQ_FLAGS_NONE) llama_memory_seq_rm(model.memory, session.lane, -1, -1);
    if (llama_state_seq_set_data_ext(model.context.get(), state.data(), state.size(), session.lane, flags)) return;
    std::string log = take_llama_log();
    reset_session(session);
    fail(SKIPPY_STATUS_RUNTIME_ERROR, "%s: lane %d was cleared and stands at 0, the state cannot be loaded: %s", call, session.lane, log.c_str());
}
