"""The C declarations of skippy.h, parsed once, and the numbers and layouts taken from them.

Knows the text of the header and what cffi makes of it. Does not know any library: see library.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from cffi import FFI  # type: ignore[import-untyped,unused-ignore]

_HEADER = Path(__file__).with_name("skippy.h")

# Of llama.cpp's own API, what a library that exports it can tell about a model. Only used when the
# library lacks skippyx_model_facts.
_LLAMA_CDEF = """
struct llama_vocab;
const struct llama_vocab *llama_model_get_vocab(const struct llama_model *model);
int32_t llama_vocab_n_tokens(const struct llama_vocab *vocab);
int32_t llama_vocab_bos(const struct llama_vocab *vocab);
int32_t llama_vocab_eos(const struct llama_vocab *vocab);
bool llama_vocab_get_add_bos(const struct llama_vocab *vocab);
int32_t llama_model_n_embd(const struct llama_model *model);
int32_t llama_model_n_layer(const struct llama_model *model);
int32_t llama_model_n_ctx_train(const struct llama_model *model);
bool llama_model_is_recurrent(const struct llama_model *model);
bool llama_model_is_hybrid(const struct llama_model *model);
bool llama_model_is_diffusion(const struct llama_model *model);
uint64_t llama_model_size(const struct llama_model *model);
uint64_t llama_model_n_params(const struct llama_model *model);
int32_t llama_model_desc(const struct llama_model *model, char *buf, size_t buf_size);
const char *llama_model_chat_template(const struct llama_model *model, const char *name);
"""


def _declarations() -> str:
    text = _HEADER.read_text(encoding="utf-8")
    text = re.sub(r"CFFI-SKIP-BEGIN.*?CFFI-SKIP-END", "", text, flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


ffi: Any = FFI()
ffi.cdef(_declarations())
ffi.cdef(_LLAMA_CDEF)

_constants: Any = ffi.dlopen(None)

ABI: tuple[int, int, int] = (
    _constants.SKIPPY_ABI_MAJOR,
    _constants.SKIPPY_ABI_MINOR,
    _constants.SKIPPY_ABI_PATCH,
)
ACTIVATION_FRAME_VERSION: int = _constants.SKIPPY_ACTIVATION_FRAME_VERSION
ACTIVATION_BOUNDARY_DESC_VERSION: int = _constants.SKIPPY_ACTIVATION_BOUNDARY_DESC_VERSION
ACTIVATION_IDENTITY_BYTES: int = _constants.SKIPPY_ACTIVATION_IDENTITY_BYTES
ACTIVATION_MAX_DIMS: int = _constants.SKIPPY_ACTIVATION_MAX_DIMS
ACTIVATION_MAX_PARTS: int = _constants.SKIPPY_ACTIVATION_MAX_PARTS
ACTIVATION_PART_OPTIONAL: int = _constants.SKIPPY_ACTIVATION_PART_OPTIONAL
NATIVE_MTP_VERSION: int = _constants.SKIPPY_NATIVE_MTP_VERSION
NATIVE_MTP_MAX_DRAFT_TOKENS: int = _constants.SKIPPY_NATIVE_MTP_MAX_DRAFT_TOKENS
SAMPLING_VERSION: int = _constants.SKIPPY_SAMPLING_VERSION
SAMPLING_FLAG_ENABLED: int = _constants.SKIPPY_SAMPLING_FLAG_ENABLED
SAMPLING_FLAG_IGNORE_EOS: int = _constants.SKIPPY_SAMPLING_FLAG_IGNORE_EOS
MAX_LOGIT_BIAS: int = _constants.SKIPPY_MAX_LOGIT_BIAS
MAX_SAMPLERS: int = _constants.SKIPPY_MAX_SAMPLERS
MAX_DRY_BREAKERS: int = _constants.SKIPPY_MAX_DRY_BREAKERS
DRY_BREAKER_BYTES: int = _constants.SKIPPY_DRY_BREAKER_BYTES
MAX_VERIFY_CHECKPOINTS: int = _constants.SKIPPY_MAX_VERIFY_CHECKPOINTS
GGML_TYPE_F32: int = _constants.SKIPPY_GGML_TYPE_F32
GGML_TYPE_F16: int = _constants.SKIPPY_GGML_TYPE_F16
GGML_TYPE_I32: int = _constants.SKIPPY_GGML_TYPE_I32
GGML_TYPE_BF16: int = _constants.SKIPPY_GGML_TYPE_BF16

_SYMBOLS: tuple[str, ...] = tuple(n for n in dir(_constants) if re.match(r"skippyx?_", n))

# What a libskippy may lack: our own extensions, and calls whose absence takes away one ability.
OPTIONAL_SYMBOLS: frozenset[str] = frozenset(
    name for name in _SYMBOLS if name.startswith("skippyx_") or name.endswith("_mtp")
) | {
    "skippy_abi_features",
    "skippy_model_llama_model",
    "skippy_runtime_config_default",
    "skippy_session_llama_context",
}
REQUIRED_SYMBOLS: tuple[str, ...] = tuple(n for n in _SYMBOLS if n not in OPTIONAL_SYMBOLS)

# Feature names by bit, as in SKIPPY_FEATURE_<NAME>.
FEATURES: dict[int, str] = {
    getattr(_constants, name): name.removeprefix("SKIPPY_FEATURE_")
    for name in dir(_constants)
    if name.startswith("SKIPPY_FEATURE_")
}

DESC_BYTES: int = ffi.sizeof("struct skippy_activation_desc")
# The descriptor without its parts: everything that an empty frame's descriptor says.
DESC_HEAD_BYTES: int = ffi.offsetof("struct skippy_activation_desc", "parts")

# The request array of an iteration as numpy sees it, so that columns are written at once.
REQUEST_DTYPE = np.dtype(
    {
        "names": [
            "session",
            "token_ids",
            "token_count",
            "positions",
            "position_count",
            "sampling",
            "input_desc",
            "input_payload",
            "sample_last",
        ],
        "formats": ["<u8"] * 8 + ["?"],
        "offsets": [
            ffi.offsetof("struct skippy_iteration_request", name)
            for name in (
                "session",
                "token_ids",
                "token_count",
                "positions",
                "position_count",
                "sampling",
                "input_desc",
                "input_payload",
                "sample_last",
            )
        ],
        "itemsize": ffi.sizeof("struct skippy_iteration_request"),
    }
)


def address_of(pointer: Any) -> int:
    """The address that a cffi pointer holds; 0 for NULL."""
    return int(ffi.cast("uintptr_t", pointer))
