"""What a library tells about an opened model.

Knows our own extension calls and, where they are missing, llama.cpp's API in the same library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .cdef import ffi

if TYPE_CHECKING:
    from .library import Library
    from .options import ModelOptions

_NUMBERS = (
    "n_vocab",
    "n_embd",
    "n_layer",
    "n_ctx_train",
    "lane_count",
    "ctx_size",
    "pool_cells",
    "n_batch",
    "n_ubatch",
    "n_threads",
    "sliding_window",
    "token_bos",
    "token_eos",
    "size_bytes",
    "parameter_count",
)
_FLAGS = ("add_bos", "kv_unified", "is_recurrent", "is_hybrid", "is_diffusion")
_REASON_BYTES = 512  # one sentence


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of an opened model; `known` False: the library tells nothing, all is 0.

    Counts are tokens, cells, layers or threads, sizes bytes; -1 is "no such token".
    `ctx_size` is what one lane can hold, `pool_cells` what all lanes together can.
    """

    known: bool = False
    n_vocab: int = 0
    n_embd: int = 0
    n_layer: int = 0
    n_ctx_train: int = 0
    lane_count: int = 0
    ctx_size: int = 0
    pool_cells: int = 0
    n_batch: int = 0
    n_ubatch: int = 0
    n_threads: int = 0
    sliding_window: int = 0
    token_bos: int = -1
    token_eos: int = -1
    add_bos: bool = False
    kv_unified: bool = False
    is_recurrent: bool = False
    is_hybrid: bool = False
    is_diffusion: bool = False
    size_bytes: int = 0
    parameter_count: int = 0
    architecture: str = ""
    description: str = ""
    chat_template: str | None = None
    stages: int = 1  # of a pipeline whose facts these are

    @property
    def is_dense(self) -> bool:
        """Whether the model's memory is known to be plain attention."""
        return self.known and not (self.is_recurrent or self.is_hybrid or self.is_diffusion)


def _text(pointer: Any) -> str:
    return ffi.string(pointer).decode("utf-8", "replace") if pointer else ""


def read_facts(library: Library, model: Any, options: ModelOptions) -> ModelFacts:
    """The facts of an opened model, from the best source that the library has."""
    if library.offers("skippyx_model_facts"):
        raw = ffi.new("struct skippyx_model_facts *")
        if library.lib.skippyx_model_facts(model, raw):
            return ModelFacts(
                known=True,
                **{name: getattr(raw, name) for name in _NUMBERS + _FLAGS},
                architecture=_text(raw.architecture),
                description=_text(raw.description),
                chat_template=_text(raw.chat_template) if raw.chat_template else None,
            )
    if library.offers("skippy_model_llama_model"):
        llama = library.lib.skippy_model_llama_model(model)
        try:
            return _facts_of_llama(library.lib, llama, options) if llama else ModelFacts()
        except AttributeError:  # llama.cpp's own symbols are not exported
            return ModelFacts()
    return ModelFacts()


def _facts_of_llama(lib: Any, llama: Any, options: ModelOptions) -> ModelFacts:
    vocab = lib.llama_model_get_vocab(llama)
    description = ffi.new("char[256]")
    lib.llama_model_desc(llama, description, 256)
    template = lib.llama_model_chat_template(llama, ffi.NULL)
    return ModelFacts(
        known=True,
        n_vocab=lib.llama_vocab_n_tokens(vocab),
        n_embd=lib.llama_model_n_embd(llama),
        n_layer=lib.llama_model_n_layer(llama),
        n_ctx_train=lib.llama_model_n_ctx_train(llama),
        lane_count=options.lanes,
        ctx_size=options.ctx_size,
        pool_cells=options.ctx_size * options.lanes,
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        token_bos=lib.llama_vocab_bos(vocab),
        token_eos=lib.llama_vocab_eos(vocab),
        add_bos=lib.llama_vocab_get_add_bos(vocab),
        kv_unified=options.kv_unified is not False,
        is_recurrent=lib.llama_model_is_recurrent(llama),
        is_hybrid=lib.llama_model_is_hybrid(llama),
        is_diffusion=lib.llama_model_is_diffusion(llama),
        size_bytes=lib.llama_model_size(llama),
        parameter_count=lib.llama_model_n_params(llama),
        description=_text(description),
        chat_template=_text(template) if template else None,
    )


def batch_invariance(library: Library, model: Any) -> str | None:
    """None when rows do not depend on their company in a batch; else the library's reason."""
    if not library.offers("skippyx_model_is_batch_invariant"):
        return "the library does not say whether its batches are invariant"
    reason = ffi.new("char[]", _REASON_BYTES)
    if library.lib.skippyx_model_is_batch_invariant(model, reason, _REASON_BYTES):
        return None
    return _text(reason) or "the library gives no reason"
