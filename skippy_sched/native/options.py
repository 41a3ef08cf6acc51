"""How to open a model: ModelOptions and its C form.

Knows the runtime configuration of the ABI. Does not know which options a model allows: the
library says so when it opens the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .cdef import ffi
from .errors import HostCheckError

# Names of KV cache types and their ggml numbers.
CACHE_TYPES: dict[str, int] = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "bf16": 30,
}
_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
_SPLIT_MODES = {"auto": -1, "none": 0, "layer": 1, "row": 2, "tensor": 3}
_MTP_SOURCES = {"disabled": 0, "integrated": 1, "external": 2}


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to open a model.

    Token and thread counts; `ctx_size` is per lane. 0 (or, for tristates, None) leaves a choice
    to the library. A stage of a split model gives its layer range and the identities of what it
    imports and exports; no import identities make a source stage, no export identities a terminal
    one. `batched_exports` True vouches that an exporting stage of this library puts the rows of
    several sequences back in request order although its KV is not unified.
    """

    ctx_size: int = 4096
    lanes: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = 0
    n_threads_batch: int = 0
    n_gpu_layers: int = 0
    kv_unified: bool | None = None
    kv_offload: bool | None = None
    swa_full: bool | None = None
    op_offload: bool | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "auto"
    split_mode: str = "auto"
    mmap: bool | None = None
    mlock: bool = False
    disable_repack: bool = False
    check_tensors: bool = False
    device: str | None = None
    main_gpu: int | None = None
    mtp_source: str = "disabled"
    stage_index: int = 0
    layer_start: int = 0
    layer_end: int = 0
    resident_tensor_names: tuple[str, ...] = ()
    import_identities: tuple[str, ...] = ()
    import_bindings: tuple[str, ...] = ()
    export_identities: tuple[str, ...] = ()
    export_bindings: tuple[str, ...] = ()
    execution_contract: str | None = None
    batched_exports: bool | None = None


def _choice(field: str, name: str, choices: dict[str, int]) -> int:
    try:
        return choices[name.lower()]
    except KeyError:
        known = ", ".join(choices)
        raise HostCheckError(f"{field} is {name!r}, but must be one of {known}") from None


def _tristate(value: bool | None) -> int:
    return -1 if value is None else int(value)


def runtime_config(options: ModelOptions) -> tuple[Any, list[Any]]:
    """The C form of the options, and what has to stay alive while it is used."""
    keep: list[Any] = []

    def text(value: str | None) -> Any:
        if value is None:
            return ffi.NULL
        keep.append(ffi.new("char[]", value.encode()))
        return keep[-1]

    def texts(values: tuple[str, ...]) -> Any:
        if not values:
            return ffi.NULL
        keep.append(ffi.new("char *[]", [text(value) for value in values]))
        return keep[-1]

    raw = ffi.new("struct skippy_runtime_config *")
    for name in ("stage_index", "layer_start", "layer_end", "ctx_size", "n_batch", "n_ubatch"):
        setattr(raw, name, getattr(options, name))
    for name in ("n_threads", "n_threads_batch", "n_gpu_layers", "disable_repack"):
        setattr(raw, name, getattr(options, name))
    raw.lane_count = options.lanes
    raw.has_mmap_override, raw.use_mmap = options.mmap is not None, bool(options.mmap)
    raw.use_mlock, raw.check_tensors = options.mlock, options.check_tensors
    raw.cache_type_k = _choice("cache_type_k", options.cache_type_k, CACHE_TYPES)
    raw.cache_type_v = _choice("cache_type_v", options.cache_type_v, CACHE_TYPES)
    raw.flash_attn_type = _choice("flash_attn", options.flash_attn, _FLASH_ATTN)
    raw.split_mode = _choice("split_mode", options.split_mode, _SPLIT_MODES)
    raw.mtp_source = _choice("mtp_source", options.mtp_source, _MTP_SOURCES)
    for name in ("kv_offload", "kv_unified", "swa_full", "op_offload"):
        setattr(raw, name, _tristate(getattr(options, name)))
    raw.has_main_gpu_override = options.main_gpu is not None
    raw.main_gpu = options.main_gpu or 0
    raw.selected_backend_device = text(options.device)
    raw.execution_contract = text(options.execution_contract)
    raw.resident_tensor_names = texts(options.resident_tensor_names)
    raw.resident_tensor_name_count = len(options.resident_tensor_names)
    for way in ("import", "export"):
        identities = getattr(options, f"{way}_identities")
        bindings = getattr(options, f"{way}_bindings") or identities
        if len(bindings) != len(identities):
            raise HostCheckError(
                f"{way}_bindings has {len(bindings)} names for {len(identities)} identities: "
                "give one each, or none"
            )
        setattr(raw, f"activation_{way}_identities", texts(identities))
        setattr(raw, f"activation_{way}_identity_count", len(identities))
        setattr(raw, f"activation_{way}_bindings", texts(bindings))
    return raw, keep
