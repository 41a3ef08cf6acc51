"""The structures as cffi lays them out are those of the ABI."""

from __future__ import annotations

from typing import Any

import pytest

from skippy_sched.native.cdef import ABI, REQUEST_DTYPE, ffi

SIZES = {
    "skippy_abi_version": 12,
    "skippy_error": 16,
    "skippy_activation_part_desc": 128,
    "skippy_activation_boundary_desc": 2088,
    "skippy_activation_desc": 2120,
    "skippy_iteration_request": 72,
    "skippy_sampling_config": 2356,
    "skippy_logit_bias": 8,
    "skippy_native_mtp_draft": 56,
    "skippy_token_signal": 24,
    "skippy_generation_signal_window": 28,
    "skippy_kv_page_component_desc": 80,
    "skippy_kv_page_desc": 248,
    "skippy_runtime_config": 208,
    "skippy_backend_device": 64,
}

OFFSETS = {
    "skippy_error": {"status": 0, "message": 8},
    "skippy_activation_part_desc": {
        "identity": 0, "ggml_type": 32, "rank": 36, "token_axis": 40, "flags": 44,
        "dimensions": 48, "byte_strides": 80, "payload_offset": 112, "payload_bytes": 120,
    },
    "skippy_activation_boundary_desc": {
        "version": 0, "part_count": 4, "frontier_identity": 8, "parts": 40,
    },
    "skippy_activation_desc": {
        "version": 0, "producer_stage_index": 4, "layer_start": 8, "layer_end": 12,
        "token_count": 16, "sequence_count": 20, "part_count": 24, "reserved": 28,
        "payload_bytes": 32, "frontier_identity": 40, "parts": 72,
    },
    "skippy_iteration_request": {
        "session": 0, "token_ids": 8, "token_count": 16, "positions": 24, "position_count": 32,
        "sampling": 40, "input_desc": 48, "input_payload": 56, "sample_last": 64,
    },
    "skippy_sampling_config": {
        "version": 0, "flags": 4, "seed": 8, "top_k": 12, "penalty_last_n": 16, "temperature": 20,
        "top_p": 24, "presence_penalty": 28, "frequency_penalty": 32, "repeat_penalty": 36,
        "logit_bias_count": 40, "min_p": 44, "typical_p": 48, "top_nsigma": 52,
        "dynatemp_range": 56, "dynatemp_exponent": 60, "dry_multiplier": 64, "dry_base": 68,
        "dry_allowed_length": 72, "dry_penalty_last_n": 76, "xtc_probability": 80,
        "xtc_threshold": 84, "mirostat_mode": 88, "mirostat_entropy": 92,
        "mirostat_learning_rate": 96, "sampler_count": 100, "samplers": 104, "ignore_eos": 168,
        "dry_sequence_breaker_count": 172, "dry_sequence_breakers": 176, "logit_bias": 304,
        "reasoning_budget_tokens": 2352,
    },
    "skippy_logit_bias": {"token": 0, "bias": 4},
    "skippy_native_mtp_draft": {
        "version": 0, "available": 4, "token_count": 8, "token_ids": 12, "proposal_compute_us": 48,
    },
    "skippy_kv_page_component_desc": {
        "version": 0, "role": 4, "token_start": 8, "token_count": 16, "layer_count": 24,
        "k_type": 28, "v_type": 32, "k_row_bytes": 36, "v_row_bytes": 40, "v_element_bytes": 44,
        "k_idx_row_bytes": 48, "payload_offset": 56, "payload_bytes": 64, "flags": 72,
    },
    "skippy_kv_page_desc": {
        "version": 0, "layer_start": 4, "layer_end": 8, "token_start": 16, "token_count": 24,
        "layer_count": 32, "k_type": 36, "v_type": 40, "k_row_bytes": 44, "v_row_bytes": 48,
        "v_element_bytes": 52, "k_idx_row_bytes": 56, "payload_bytes": 64, "flags": 72,
        "codec": 80, "component_count": 84, "components": 88,
    },
    "skippy_runtime_config": {
        "stage_index": 0, "layer_start": 4, "layer_end": 8, "ctx_size": 12, "lane_count": 16,
        "n_batch": 20, "n_ubatch": 24, "n_threads": 28, "n_threads_batch": 32, "n_gpu_layers": 36,
        "has_mmap_override": 40, "use_mmap": 41, "use_mlock": 42, "cache_type_k": 44,
        "cache_type_v": 48, "flash_attn_type": 52, "load_mode": 56, "disable_repack": 60,
        "resident_tensor_names": 64, "resident_tensor_name_count": 72, "execution_contract": 80,
        "activation_import_identities": 88, "activation_import_identity_count": 96,
        "activation_import_bindings": 104, "activation_export_identities": 112,
        "activation_export_identity_count": 120, "activation_export_bindings": 128,
        "mtp_source": 136, "selected_backend_device": 144, "glm_dsa_policy_profile": 152,
        "glm_dsa_dense_sparse_mask_max_bytes": 168, "glm_dsa_compact_flash_min_kv": 176,
        "kv_offload": 180, "kv_unified": 184, "swa_full": 188, "op_offload": 192,
        "no_host_buffer": 196, "check_tensors": 197, "use_direct_io": 198,
        "has_main_gpu_override": 199, "main_gpu": 200, "split_mode": 204,
    },
    "skippy_backend_device": {
        "version": 0, "name": 8, "description": 16, "device_id": 24, "memory_free": 32,
        "memory_total": 40, "type": 48, "caps": 56,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_sizes_are_those_of_the_abi(name: str, size: int) -> None:
    assert ffi.sizeof(f"struct {name}") == size


@pytest.mark.parametrize(("name", "fields"), OFFSETS.items())
def test_offsets_are_those_of_the_abi(name: str, fields: dict[str, int]) -> None:
    found = {field: ffi.offsetof(f"struct {name}", field) for field in fields}
    assert found == fields


def test_the_request_array_of_numpy_has_the_layout_of_the_c_structure() -> None:
    assert REQUEST_DTYPE.itemsize == 72
    fields: Any = REQUEST_DTYPE.fields
    found = {name: field[1] for name, field in fields.items()}
    assert found == OFFSETS["skippy_iteration_request"]


def test_the_expected_version_is_the_one_of_the_header() -> None:
    assert ABI == (0, 1, 63)
