#!/usr/bin/env bash
# Runs the native tests on both engines built with AddressSanitizer and UndefinedBehaviorSanitizer.
#
#   scripts/sanitize.sh [PYTEST ARGUMENTS]
#
# Needs the environment that the tests run in (.venv, or PYTHON) and gcc. Works in build/sanitize;
# llama.cpp itself comes from the cache as it is, without sanitizers.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
scratch=$PWD/build/sanitize
site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("platlib"))'; }

# An environment of its own whose package is the sanitized one; all else is the tests' environment.
# Paths from a .pth file bring no .pth files of their own along, so an editable install stays out.
"$python" -m venv --clear "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --no-deps . --config-settings build-dir="$scratch/cmake" \
    --config-settings cmake.define.SKIPPY_SANITIZE=address,undefined
for engine in "$(site "$scratch/venv/bin/python")"/skippy_sched/native/libskippy-*.so; do
    grep -q __ubsan_handle "$engine" && grep -q __asan_init "$engine" ||
        { echo "sanitize.sh: $engine was built without sanitizers" >&2; exit 1; }
done
site "$python" > "$(site "$scratch/venv/bin/python")/tests.pth"

# What Python and its extension modules allocate lives until the process ends. A suppression fits
# any frame of a stack, so these name allocators of theirs, which are never below one of ours.
cat > "$scratch/leaks.txt" <<'EOF'
leak:_PyMem_Raw
leak:_PyObject_Malloc
leak:_PyObject_GC_
leak:_PyObject_New
leak:PyFloat_FromDouble
leak:PyThread_allocate_lock
leak:_dl_new_object
leak:numpy
leak:pydantic_core
EOF
# All but those that compile libraries of their own, measure memory, or test no library at all.
tests=(tests/native --ignore-glob='*/test_foreign.py' --ignore-glob='*/test_library.py'
    --ignore-glob='*/test_leaks.py' --ignore-glob='*/test_table.py')
export PYTHONMALLOC=malloc
export ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:allocator_may_return_null=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export LSAN_OPTIONS=suppressions=$scratch/leaks.txt:print_suppressions=0
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
    "$scratch/venv/bin/python" -m pytest -q -p no:cacheprovider -p no:schemathesis -m "not llama" \
    "${@:-${tests[@]}}"
