// Runs a fuzz target without a fuzzer: over the files of folders, then over seeded mutations of them.
//
//   replay SEED MUTATIONS FILE...
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

using Bytes = std::vector<uint8_t>;

static void run(const Bytes &bytes, const std::string &last) {
    if (!last.empty()) std::ofstream(last, std::ios::binary).write(reinterpret_cast<const char *>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
}

static Bytes mutated(Bytes bytes, std::mt19937 &random) {
    for (size_t edits = 1 + random() % 4; edits; edits--) {
        size_t at = random() % (bytes.size() + 1);
        size_t here = bytes.empty() ? 0 : at % bytes.size();
        switch (random() % 5) {
        case 0: // a run of a few bytes more
            for (size_t run = 1 + random() % 8; run; run--) {
                bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), static_cast<uint8_t>(random() % 3 ? random() : 0));
            }
            break;
        case 1:
            if (!bytes.empty()) bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(here));
            break;
        case 2:
            if (!bytes.empty()) bytes[here] ^= static_cast<uint8_t>(1u << random() % 8);
            break;
        case 3:
            if (!bytes.empty()) bytes[here] = random() % 2 ? 0xff : 0;
            break;
        default:
            if (!bytes.empty()) bytes[here] = static_cast<uint8_t>(random());
        }
    }
    return bytes;
}

int main(int count, char **arguments) {
    if (count < 4) return fprintf(stderr, "usage: replay SEED MUTATIONS FILE...\n"), 2;
    const char *keep = getenv("SKIPPY_FUZZ_LAST"); // where the input that is running is written
    std::string last = keep ? keep : "";
    std::vector<Bytes> seeds;
    for (int i = 3; i < count; i++) {
        std::ifstream file(arguments[i], std::ios::binary);
        if (!file) return fprintf(stderr, "cannot read %s\n", arguments[i]), 2;
        seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
        run(seeds.back(), last);
    }
    std::mt19937 random(static_cast<uint32_t>(strtoul(arguments[1], nullptr, 10)));
    unsigned long mutations = strtoul(arguments[2], nullptr, 10);
    for (unsigned long i = 0; i < mutations; i++) run(mutated(seeds[random() % seeds.size()], random), last);
    printf("%zu inputs, %lu mutations\n", seeds.size(), mutations);
}
