"""The skippy C ABI as Python: libraries, models, sessions, batches, frames.

Knows nothing of requests. See docs/native.md for what each name stands for.
"""

from __future__ import annotations

from .activation import (
    ActivationBoundary,
    ActivationDesc,
    ActivationFrame,
    ActivationPartDesc,
)
from .batch import (
    DecodeRows,
    IterationBatch,
    iteration_batch_sampled,
)
from .cdef import ABI
from .decode_batch import decode_step_frame_batch_sampled
from .errors import (
    BufferTooSmall,
    ClosedError,
    CountOverflow,
    HostCheckError,
    InvalidArgument,
    IoError,
    LibraryError,
    ModelError,
    NativeAnswerError,
    NativeError,
    NativeRuntimeError,
    PartialBatchExecution,
    SkippyNativeError,
    Status,
    UnspecifiedError,
    Unsupported,
)
from .facts import ModelFacts
from .iteration import (
    DecodeFrameBatchEntry,
    DecodeFrameBatchOutput,
    IterationBatchOutput,
    IterationEntry,
    IterationSample,
    Phase,
    collect_iteration_samples,
)
from .library import Device, DeviceType, Library, find_library
from .model import Model
from .ngram import NgramCache
from .options import ModelOptions
from .results import (
    GenerationSignalWindow,
    KvPage,
    KvPageComponent,
    KvPageDesc,
    NativeMtpDraft,
    TokenSignal,
    VerifyOutput,
)
from .sampling import Sampler, SamplingConfig
from .session import StageSession

__all__ = [
    "ABI",
    "ActivationBoundary",
    "ActivationDesc",
    "ActivationFrame",
    "ActivationPartDesc",
    "BufferTooSmall",
    "ClosedError",
    "CountOverflow",
    "DecodeFrameBatchEntry",
    "DecodeFrameBatchOutput",
    "DecodeRows",
    "Device",
    "DeviceType",
    "GenerationSignalWindow",
    "HostCheckError",
    "InvalidArgument",
    "IoError",
    "IterationBatch",
    "IterationBatchOutput",
    "IterationEntry",
    "IterationSample",
    "KvPage",
    "KvPageComponent",
    "KvPageDesc",
    "Library",
    "LibraryError",
    "Model",
    "ModelError",
    "ModelFacts",
    "ModelOptions",
    "NativeAnswerError",
    "NativeError",
    "NativeMtpDraft",
    "NativeRuntimeError",
    "NgramCache",
    "PartialBatchExecution",
    "Phase",
    "Sampler",
    "SamplingConfig",
    "SkippyNativeError",
    "StageSession",
    "Status",
    "TokenSignal",
    "UnspecifiedError",
    "Unsupported",
    "VerifyOutput",
    "collect_iteration_samples",
    "decode_step_frame_batch_sampled",
    "find_library",
    "iteration_batch_sampled",
]
