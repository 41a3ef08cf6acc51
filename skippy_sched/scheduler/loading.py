"""Opens the library and the model that a configuration names, and says why when it cannot.

Blocking: runs in a thread. Knows configuration and the native layer, nothing of requests. Also
sizes a scheduler for an opened model, so that every driver of one gets the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from skippy_sched.config import Config, EngineSection
from skippy_sched.errors import SplitError, StartupError
from skippy_sched.native import Library, Model, ModelOptions, SkippyNativeError, find_library
from skippy_sched.native.facts import ModelFacts
from skippy_sched.scheduler.core import Scheduler
from skippy_sched.scheduler.policy import FairShare
from skippy_sched.scheduler.prefix_cache import PrefixCache
from skippy_sched.scheduler.speculation import Speculation
from skippy_sched.scheduler.state import Limits
from skippy_sched.split.manifest import read_manifest

#: With 64 query rows of one sequence llama.cpp's flash attention takes another kernel.
DETERMINISTIC_CHUNK_TOKENS = 63
#: Cells of a model that is only opened for its vocabulary.
TEXT_CELLS = 32
#: llama.cpp's bound on sequence ids.
LLAMA_SEQUENCES_MAX = 256
#: Saved prefixes; finding a victim looks at all of them.
PREFIX_ENTRIES_MAX = 64
#: What drafts are verified with.
VERIFY_FEATURES = ("BATCH_VERIFY_FRAME", "SESSION_TRIM")


def open_models(config: Config) -> list[Model]:
    """The model, or the stages that a manifest names, in order.

    Raises StartupError with one line that says what is wrong and what to do.
    """
    files = _files(config)
    models: list[Model] = []
    try:
        for number, (path, layers) in enumerate(files):
            models.append(_open(config, path, _options(config, number, len(files), layers)))
    except BaseException:
        for model in models:
            model.close()
        raise
    return models


def open_model(config: Config) -> Model:
    """As open_models, for those who run only whole models."""
    models = open_models(config)
    if len(models) > 1:
        for model in models:
            model.close()
        raise StartupError(f"{config.model.path} is a split model: give the whole one here")
    return models[0]


def open_for_text(config: Config) -> Model:
    """Only to tokenize and detokenize, so with as small a KV cache as there is; as open_models."""
    path, layers = _files(config)[-1]
    options = _options(config, 0, 1, layers)
    options = replace(options, ctx_size=TEXT_CELLS, lanes=1, mtp_source="disabled")
    return _open(config, path, options)


def _files(config: Config) -> list[tuple[Path, tuple[int, int]]]:
    """Each stage's file and layers; a whole model's are (0, 0)."""
    if config.model.path is None:
        raise StartupError("no model: set model.path to a GGUF file")
    path = Path(config.model.path).expanduser()
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise StartupError(f"model.path: {path} {what}; give a GGUF file or a split's manifest")
    if path.suffix != ".json":
        return [(path, (0, 0))]
    try:
        manifest, files = read_manifest(path)
    except SplitError as error:
        raise StartupError(str(error)) from error
    return [
        (file, (stage.layer_start, stage.layer_end))
        for file, stage in zip(files, manifest.stages, strict=True)
    ]


def _options(config: Config, number: int, stages: int, layers: tuple[int, int]) -> ModelOptions:
    engine = config.engine
    microbatch = min(engine.microbatch_tokens, engine.batch_tokens)
    is_last = number == stages - 1
    threads = 1 if engine.deterministic else engine.threads or 0
    if stages > 1 and threads != 1:  # they compute side by side
        threads = max(1, (threads or len(os.sched_getaffinity(0))) // stages)
    return ModelOptions(
        ctx_size=_lane_cells(engine),
        lanes=engine.lanes,
        # An exporting stage takes no more than one microbatch at a time.
        n_batch=engine.batch_tokens if stages == 1 else microbatch,
        n_ubatch=microbatch,
        n_threads=threads,
        n_gpu_layers=engine.gpu_layers,
        kv_unified=engine.kv == "shared",
        cache_type_k=engine.kv_type,
        cache_type_v=engine.kv_type,
        stage_index=number,
        layer_start=layers[0],
        layer_end=layers[1],
        mtp_source="integrated" if config.speculation.method == "mtp" and is_last else "disabled",
    )


def _open(config: Config, path: Path, options: ModelOptions) -> Model:
    engine = config.engine
    try:
        library = Library.load(find_library(engine.library), expected_abi(engine))
        _check_speculation(config, library)
        model = Model.open(library, path, options)
    except SkippyNativeError as error:
        raise StartupError(f"cannot open {path} with library {engine.library}: {error}") from error
    if not model.facts.known:
        model.close()
        raise StartupError(
            f"library {engine.library} does not tell what it has opened, neither by "
            "skippyx_model_facts nor by llama.cpp's own symbols: requests cannot be scheduled "
            "without the vocabulary and the lanes; use a library that tells"
        )
    is_whole = model.input_boundary is None and model.output_boundary is None
    if not options.layer_end and not is_whole:
        model.close()
        raise StartupError(
            f"{path} holds some layers of a model only: give the manifest that `skippy-sched "
            "split` wrote beside it"
        )
    if engine.deterministic and (reason := model.batch_invariant()) is not None:
        model.close()
        raise StartupError(
            f"engine.deterministic = true cannot hold for {path}: {reason}; "
            "use another model format or set it to false"
        )
    return model


def expected_abi(engine: EngineSection) -> tuple[int, int, int] | None:
    """The version that the library must have; None: any."""
    if engine.expected_abi is None:
        return None
    major, minor, patch = (int(part) for part in engine.expected_abi.split("."))
    return major, minor, patch


def _check_speculation(config: Config, library: Library) -> None:
    method = config.speculation.method
    wanted = {"off": (), "ngram": VERIFY_FEATURES, "mtp": (*VERIFY_FEATURES, "NATIVE_MTP_N1")}
    missing = [feature for feature in wanted[method] if not library.has(feature)]
    if missing and library.features:  # a library that tells no features may have all
        others = 'use another library, or set it to "off"'
        if method == "mtp" and missing == ["NATIVE_MTP_N1"]:
            others = 'use a library with native drafts, or set it to "ngram" or "off"'
        raise StartupError(
            f'speculation.method = "{method}" cannot be used: {library.path} does not offer '
            f"{', '.join(missing)}; {others}"
        )


def _lane_cells(engine: EngineSection) -> int:
    """The ABI sizes a pool by the lane."""
    if engine.pool_tokens is None:
        return engine.context_tokens
    return -(-engine.pool_tokens // engine.lanes)


def end_tokens(model: Model) -> frozenset[int]:
    """All tokens that end a generation."""
    return frozenset(token for token in range(model.facts.n_vocab) if model.is_eog(token))


def context_tokens(config: Config, facts: ModelFacts) -> int:
    """Prompt and completion tokens that one request may hold."""
    context = min(config.engine.context_tokens, facts.ctx_size)
    return min(context, facts.n_ctx_train) if facts.n_ctx_train else context


def make_scheduler(
    config: Config, facts: ModelFacts, kind: Callable[..., Scheduler] = Scheduler
) -> Scheduler:
    """``kind`` is called as Scheduler is."""
    settings = config.scheduler
    chunk = DETERMINISTIC_CHUNK_TOKENS if config.engine.deterministic else facts.n_batch
    target_ms = settings.inter_token_target_ms
    return kind(
        Limits(
            lanes=facts.lane_count,
            batch_tokens=facts.n_batch,
            context_tokens=context_tokens(config, facts),
            chunk_tokens=min(chunk, facts.n_batch),
            waiting_requests=settings.waiting_requests_max,
            waiting_tokens=settings.waiting_tokens_max,
            isolate_tenants=settings.prefix_cache_per_tenant,
            pool_cells=facts.pool_cells if facts.kv_unified else None,
            aging_s=settings.aging_s,
            groups=facts.stages,
        ),
        share=FairShare(settings.tenant_weights),
        cache=_prefix_cache(config, facts),
        inter_token_s=None if target_ms is None else target_ms / 1000,
        preemption=settings.preemption,
        speculation=None if config.speculation.method == "off" else Speculation(config.speculation),
    )


def _prefix_cache(config: Config, facts: ModelFacts) -> PrefixCache:
    """The ABI keeps the ids below 2 * lanes for lanes; llama.cpp knows 256 sequences in all."""
    first_id = 2 * facts.lane_count
    cacheable = not (facts.is_recurrent or facts.is_hybrid)
    return PrefixCache(
        config.scheduler.prefix_cache_tokens if cacheable else 0,
        first_id=first_id,
        entries_max=max(0, min(PREFIX_ENTRIES_MAX, LLAMA_SEQUENCES_MAX - first_id)),
        copies=not facts.kv_unified,
    )
