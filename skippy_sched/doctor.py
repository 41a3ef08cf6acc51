"""The doctor command: the library and the model that serve would use, and what they cannot do.

Knows which function of the product needs which symbol, feature or fact. Opens everything as serve
does, so that it fails as serve would, but says first what it has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from skippy_sched.config import Config
from skippy_sched.default_model import Progress, with_model_path
from skippy_sched.errors import StartupError
from skippy_sched.native import Library, Model, SkippyNativeError, find_library
from skippy_sched.native.cdef import REQUIRED_SYMBOLS
from skippy_sched.native.library import Device
from skippy_sched.scheduler.loading import expected_abi, open_models
from skippy_sched.server.chat_template import ChatTemplate

Say = Callable[[str], None]
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Function:
    """What the product does with some symbols, and the feature bit that stands for them."""

    name: str
    symbols: tuple[str, ...]
    feature: str | None = None


FUNCTIONS = (
    Function("continuous batching", ("skippy_iteration_batch_sampled",), "ITERATION_BATCH"),
    Function(
        "recovery of the other requests when one fails",
        ("skippy_session_position", "skippy_trim_session", "skippy_session_reset"),
        "SESSION_TRIM",
    ),
    Function(
        "the prefix cache",
        (
            "skippy_session_save_prefix",
            "skippy_session_restore_prefix",
            "skippy_session_drop_sequence",
        ),
    ),
    Function(
        "preemption that keeps what was computed",
        ("skippy_export_full_state", "skippy_import_full_state"),
        "STATE_IMPORT_EXPORT",
    ),
    Function(
        "split models",
        ("skippy_model_input_activation_boundary", "skippy_model_output_activation_boundary"),
        "ACTIVATION_BOUNDARY",
    ),
    Function(
        "batches on split models with a fixed KV share per lane", ("skippyx_model_batches_exports",)
    ),
    Function("engine.deterministic", ("skippyx_model_is_batch_invariant",)),
    Function("hiding special tokens in answers", ("skippyx_token_is_control",)),
    Function("log-probabilities", ("skippyx_session_logprobs",)),
    Function("answers held to a schema or grammar", ("skippyx_session_set_mask",)),
    Function(
        'speculation.method = "ngram"',
        ("skippy_verify_tokens_frame_sampled",),
        "BATCH_VERIFY_FRAME",
    ),
    Function(
        'speculation.method = "mtp"',
        ("skippy_decode_step_frame_sampled_mtp",),
        "NATIVE_MTP_N1",
    ),
)


def doctor(config: Config, say: Say, progress: Progress | None) -> int:
    """Say all there is to say, line by line; raises StartupError where serve would."""
    try:
        library = Library.open(find_library(config.engine.library))
    except SkippyNativeError as error:
        raise StartupError(str(error)) from error
    expected = config.engine.expected_abi
    wanted = f" ({expected} is expected)" if expected else ""
    say(f"library         {library.path.absolute()}")
    say(f"ABI             {_version(library)}{wanted}")
    say(f"features        {', '.join(library.feature_names()) or 'it tells none'}")
    lacks = [
        line for function in FUNCTIONS if (line := _lack(library, function)) is not None
    ] + _other_symbols(library)
    try:
        library.check(expected_abi(config.engine))
    except SkippyNativeError as error:
        _say_unavailable(say, lacks)
        raise StartupError(str(error)) from error
    for line in _devices(library):
        say(f"device          {line}")
    try:
        models = open_models(with_model_path(config, progress))
    except StartupError:
        _say_unavailable(say, lacks)
        raise
    try:
        for line in _model_lines(models):
            say(line)
        _check_chat_template(models[-1])
        _say_unavailable(say, [*lacks, *_lacks_of_model(models[-1])])
    finally:
        for model in models:
            model.close()
    return 0


def _version(library: Library) -> str:
    return ".".join(map(str, library.version))


def _lack(library: Library, function: Function) -> str | None:
    missing = [symbol for symbol in function.symbols if not library.offers(symbol)]
    if missing:
        return f"{function.name}: the library lacks {', '.join(missing)}"
    says_features = library.features != 0
    if says_features and function.feature is not None and not library.has(function.feature):
        return f"{function.name}: the library does not have the feature {function.feature}"
    return None


def _other_symbols(library: Library) -> list[str]:
    """Required, but of no function of their own: without them serve takes no library at all."""
    named = {symbol for function in FUNCTIONS for symbol in function.symbols}
    missing = [name for name in REQUIRED_SYMBOLS if name not in named and not library.offers(name)]
    return [f"everything: the library lacks {', '.join(missing)}"] if missing else []


def _devices(library: Library) -> Iterator[str]:
    try:
        devices: Sequence[Device] = library.devices()
    except SkippyNativeError as error:
        yield f"cannot be listed: {error}"
        return
    for device in devices:
        free, total = device.memory_free / GIB, device.memory_total / GIB
        memory = f", {free:.1f} GiB free of {total:.1f}" if total else ""
        yield f"{device.name} ({device.description or 'no description'}){memory}"


def _model_lines(models: Sequence[Model]) -> Iterator[str]:
    facts = models[-1].facts
    for number, model in enumerate(models):
        yield f"model           {model.path}" + (f" (stage {number})" if len(models) > 1 else "")
    yield f"architecture    {facts.architecture or facts.description or 'not told'}"
    parameters = sum(model.facts.parameter_count for model in models)
    size = sum(model.facts.size_bytes for model in models)
    layers = sum(model.facts.n_layer for model in models)
    yield f"size            {parameters:,} parameters, {size:,} bytes"
    yield f"layers          {layers}, of width {facts.n_embd}"
    yield f"vocabulary      {facts.n_vocab:,} tokens"
    trained = f"{facts.n_ctx_train:,} tokens trained" if facts.n_ctx_train else "no limit told"
    yield f"context         {trained}, {facts.ctx_size:,} in each of {facts.lane_count} lanes"
    window = f", sliding window of {facts.sliding_window:,}" if facts.sliding_window else ""
    yield f"KV cache        {_memory(models[-1])}, {facts.pool_cells:,} cells{window}"
    yield f"chat template   {'yes' if facts.chat_template else 'no'}"


def _check_chat_template(model: Model) -> None:
    try:
        ChatTemplate(model.facts.chat_template, bos="", eos="")
    except ValueError as error:
        raise StartupError(f"{model.path}: {error}") from error


def _memory(model: Model) -> str:
    facts = model.facts
    kind = "one pool for all lanes" if facts.kv_unified else "a fixed share per lane"
    if facts.is_recurrent or facts.is_hybrid:
        return f"{kind}, {'recurrent' if facts.is_recurrent else 'in part recurrent'}"
    return kind


def _lacks_of_model(model: Model) -> Iterator[str]:
    facts = model.facts
    if facts.chat_template is None:
        yield "the model's own chat format: it has no chat template; chats use a plain one"
    if facts.is_recurrent or facts.is_hybrid:
        yield "the prefix cache: a recurrent memory has no prefixes"
    if model.library.offers("skippyx_model_is_batch_invariant"):
        reason = model.batch_invariant()
        if reason is not None:
            yield f"engine.deterministic: {reason}"


def _say_unavailable(say: Say, lacks: Sequence[str]) -> None:
    for line in lacks:
        say(f"unavailable     {line}")
    if not lacks:
        say("unavailable     nothing")
