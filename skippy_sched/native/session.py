"""Run tokens through one session: prefill, decode, verify, with and without frames.

Knows the single-request calls. Batches are batch.py's. `token_count` moves once a call has
succeeded, by the tokens it was given, whatever it answered.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from .activation import ActivationDesc, ActivationFrame, input_pointers, optional_bytes
from .cdef import NATIVE_MTP_MAX_DRAFT_TOKENS, ffi
from .errors import HostCheckError, NativeAnswerError
from .growth import BUFFER_BYTES_MAX, must_grow
from .results import NativeMtpDraft, VerifyOutput
from .sampling import SamplingConfig, raw_sampling
from .state import (
    Integers,
    SessionState,
    added,
    int32,
    int32_array,
    int32_pointer,
    uint64,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from .model import Model


class StageSession(SessionState):
    """A session that executes. Frames: `input` is the frame of the previous stage (None for a
    source stage or a full model); the returned frame is what this stage exports, empty for a
    terminal one. `output_capacity` in bytes; None predicts it from the boundary.

    Every execution raises HostCheckError (nothing moved) or NativeError (compare `position`).
    """

    def __init__(
        self,
        model: Model,
        raw: Any,
        token_count: int = 0,
        *,
        terminal_stage: bool | None = None,
        batched_activation_exports: bool | None = None,
    ) -> None:
        super().__init__(model, raw, token_count)
        if terminal_stage is None:
            terminal_stage = model.terminal_stage
        if batched_activation_exports is None:
            batched_activation_exports = model.batched_activation_exports
        self.terminal_stage: bool = terminal_stage
        self.batched_activation_exports: bool = batched_activation_exports
        # Whether the stage exports and cannot export for several sequences at once. A terminal
        # stage never runs alone: it samples.
        self.runs_alone: bool = not (terminal_stage or batched_activation_exports)
        if self.address:
            model.adopt(self)

    def __enter__(self) -> StageSession:
        return self

    def output_capacity(self, token_count: int, input: ActivationFrame | None = None) -> int:
        """Predicted payload bytes of this stage's output frame for so many tokens."""
        boundary = self.model.output_boundary
        if boundary is None:
            return 0
        most = self.model.options.n_batch or token_count  # a library refuses more than that
        return boundary.bytes_per_token * min(token_count, most) + optional_bytes(input)

    # ---- prefill ----------------------------------------------------------------------------

    def prefill_chunk(self, token_ids: Integers) -> None:
        """Run prompt tokens on a full model, without frames or logits."""
        tokens = int32_array(token_ids, "token_ids")
        updated = added(self.token_count, len(tokens))
        written = ffi.new("size_t *")
        nothing = (ffi.NULL, 0, ffi.NULL, 0, written)
        self._call("skippy_prefill_chunk", int32_pointer(tokens), len(tokens), *nothing)
        self.token_count = updated

    def prefill_chunk_frame(
        self,
        token_ids: Integers,
        input: ActivationFrame | None = None,
        output_capacity: int | None = None,
    ) -> ActivationFrame:
        """Run prompt tokens from the session's position on; no logits are computed."""
        return self.prefill_chunk_frame_with_positions(token_ids, (), input, output_capacity)

    def prefill_chunk_frame_with_positions(
        self,
        token_ids: Integers,
        positions: Integers,
        input: ActivationFrame | None = None,
        output_capacity: int | None = None,
    ) -> ActivationFrame:
        """As `prefill_chunk_frame`, at explicit positions; none given: from the position on.
        A source stage or full model may ignore them."""
        tokens = int32_array(token_ids, "token_ids")
        arguments: list[Any] = [int32_pointer(tokens), len(tokens)]
        name = "skippy_prefill_chunk_frame"
        if len(positions):
            name += "_with_positions"
            arguments += [int32_pointer(int32_array(positions, "positions")), len(positions)]
        return self._framed(name, len(tokens), input, output_capacity, arguments)

    def prefill_chunk_frame_sampled(
        self,
        token_ids: Integers,
        sampling: SamplingConfig | None = None,
        input: ActivationFrame | None = None,
        output_capacity: int | None = None,
    ) -> tuple[int, ActivationFrame]:
        """Run the last prompt tokens and sample what follows; -1 on an exporting stage."""
        return self.prefill_chunk_frame_sampled_with_positions(
            token_ids, (), sampling, input, output_capacity
        )

    def prefill_chunk_frame_sampled_with_positions(
        self,
        token_ids: Integers,
        positions: Integers,
        sampling: SamplingConfig | None = None,
        input: ActivationFrame | None = None,
        output_capacity: int | None = None,
    ) -> tuple[int, ActivationFrame]:
        """As `prefill_chunk_frame_sampled`, at explicit positions."""
        tokens = int32_array(token_ids, "token_ids")
        arguments: list[Any] = [int32_pointer(tokens), len(tokens)]
        name = "skippy_prefill_chunk_frame_sampled"
        if len(positions):
            name += "_with_positions"
            arguments += [int32_pointer(int32_array(positions, "positions")), len(positions)]
        arguments.append(raw_sampling(sampling))
        predicted = ffi.new("int32_t *")
        frame = self._framed(
            name, len(tokens), input, output_capacity, arguments, after=(predicted,)
        )
        return int(predicted[0]), frame

    # ---- decode -----------------------------------------------------------------------------

    def decode_step_sampled(self, token_id: int, sampling: SamplingConfig | None = None) -> int:
        """Run one token on a full model and sample what follows, without frames."""
        updated = added(self.token_count, 1)
        written, predicted = ffi.new("size_t *"), ffi.new("int32_t *")
        nothing = (ffi.NULL, 0, ffi.NULL, 0, written)
        self._call(
            "skippy_decode_step_sampled",
            int32(token_id, "token_id"),
            raw_sampling(sampling),
            *nothing,
            predicted,
        )
        self.token_count = updated
        return int(predicted[0])

    def decode_step_sampled_mtp(
        self, token_id: int, sampling: SamplingConfig | None = None, max_draft_tokens: int = 0
    ) -> tuple[int, NativeMtpDraft | None]:
        """As `decode_step_sampled`, and the model's own draft of the tokens after it."""
        self._require("skippy_decode_step_sampled_mtp")
        updated = added(self.token_count, 1)
        predicted = ffi.new("int32_t *")
        draft = ffi.new("struct skippy_native_mtp_draft *")
        self._call(
            "skippy_decode_step_sampled_mtp",
            int32(token_id, "token_id"),
            raw_sampling(sampling),
            predicted,
            _clamped(max_draft_tokens),
            draft,
        )
        self.token_count = updated
        return int(predicted[0]), NativeMtpDraft.of(draft)

    def decode_step_frame(
        self,
        token_id: int,
        input: ActivationFrame | None = None,
        output_capacity: int | None = None,
    ) -> tuple[int, ActivationFrame]:
        """Run one token and take the most likely next one; -1 on an exporting stage."""
        return self.decode_step_frame_sampled(token_id, None, input, output_capacity)

    def decode_step_frame_sampled(
        self,
        token_id: int,
        sampling: SamplingConfig | None = None,
        input: ActivationFrame | None = None,
        output_capacity: int | None = None,
    ) -> tuple[int, ActivationFrame]:
        """Run one token and sample the next one; -1 on an exporting stage."""
        predicted = ffi.new("int32_t *")
        frame = self._framed(
            "skippy_decode_step_frame_sampled",
            1,
            input,
            output_capacity,
            [int32(token_id, "token_id"), raw_sampling(sampling)],
            after=(predicted,),
        )
        return int(predicted[0]), frame

    def decode_step_frame_sampled_mtp(
        self,
        token_id: int,
        sampling: SamplingConfig | None = None,
        input: ActivationFrame | None = None,
        output_capacity: int | None = None,
        max_draft_tokens: int = 0,
    ) -> tuple[int, NativeMtpDraft | None, ActivationFrame]:
        """As `decode_step_frame_sampled`, and the model's own draft of the tokens after it."""
        self._require("skippy_decode_step_frame_sampled_mtp")
        predicted = ffi.new("int32_t *")
        draft = ffi.new("struct skippy_native_mtp_draft *")
        frame = self._framed(
            "skippy_decode_step_frame_sampled_mtp",
            1,
            input,
            output_capacity,
            [int32(token_id, "token_id"), raw_sampling(sampling)],
            after=(predicted, _clamped(max_draft_tokens), draft),
        )
        return int(predicted[0]), NativeMtpDraft.of(draft), frame

    # ---- verify -----------------------------------------------------------------------------

    def verify_tokens(self, token_ids: Integers) -> list[int]:
        """The most likely token after each input, on a full model, greedy and without frames."""
        tokens = int32_array(token_ids, "token_ids")
        if len(tokens) == 0:
            return []
        updated = added(self.token_count, len(tokens))
        out: np.ndarray[Any, Any] = np.zeros(len(tokens), dtype=np.int32)
        count = ffi.new("size_t *")
        self._call(
            "skippy_verify_tokens",
            int32_pointer(tokens),
            len(tokens),
            int32_pointer(out),
            len(out),
            count,
        )
        self.token_count = updated
        predicted: list[int] = out[: count[0]].tolist()
        return predicted

    def verify_tokens_frame(
        self,
        token_ids: Integers,
        input: ActivationFrame | None = None,
        output_capacity: int | None = None,
    ) -> VerifyOutput:
        """As `verify_tokens_frame_sampled`, greedy and without a draft."""
        return self.verify_tokens_frame_sampled(token_ids, None, input, output_capacity, 0)

    def verify_tokens_frame_sampled(
        self,
        token_ids: Integers,
        sampling: SamplingConfig | None = None,
        input: ActivationFrame | None = None,
        output_capacity: int | None = None,
        max_draft_tokens: int = 0,
    ) -> VerifyOutput:
        """Run proposed tokens (at least one) in one forward pass and sample after each.

        The position moves over all of them. Then either accept all and call
        `retire_verify_checkpoint(start, count)`, or `trim` to the accepted length and discard
        the draft.
        """
        if len(token_ids) == 0:
            raise HostCheckError("verify_tokens_frame needs at least one token, but got none")
        return self._verify(token_ids, sampling, input, output_capacity, max_draft_tokens)

    def verify_tokens_sampled_mtp(
        self,
        token_ids: Integers,
        sampling: SamplingConfig | None = None,
        max_draft_tokens: int = 0,
    ) -> tuple[list[int], NativeMtpDraft | None]:
        """Verify without frames, and the model's own draft after the last row. No tokens: no
        native call."""
        if len(token_ids) == 0:
            return [], None
        output = self._verify(token_ids, sampling, None, 0, max_draft_tokens)
        return output.predicted_tokens, output.draft

    def verify_tokens_sampled_without_mtp(
        self, token_ids: Integers, sampling: SamplingConfig | None = None
    ) -> list[int]:
        """Verify without frames and without a draft. No tokens: no native call."""
        if len(token_ids) == 0:
            return []
        return self._verify(token_ids, sampling, None, 0, 0).predicted_tokens

    def _verify(
        self,
        token_ids: Integers,
        sampling: SamplingConfig | None,
        input: ActivationFrame | None,
        output_capacity: int | None,
        max_draft_tokens: int,
    ) -> VerifyOutput:
        tokens = int32_array(token_ids, "token_ids")
        predicted: np.ndarray[Any, Any] = np.zeros(len(tokens), dtype=np.int32)
        count = ffi.new("size_t *")
        draft = ffi.new("struct skippy_native_mtp_draft *")
        frame = self._framed(
            "skippy_verify_tokens_frame_sampled",
            len(tokens),
            input,
            output_capacity,
            [int32_pointer(tokens), len(tokens), raw_sampling(sampling)],
            after=(
                int32_pointer(predicted),
                len(predicted),
                count,
                _clamped(max_draft_tokens),
                draft,
            ),
        )
        if count[0] > len(tokens):
            raise NativeAnswerError(f"verify answered {count[0]} tokens to {len(tokens)}")
        return VerifyOutput(predicted[: count[0]].tolist(), NativeMtpDraft.of(draft), frame)

    # ---- after an execution -----------------------------------------------------------------

    def copy_output_activation_frame(
        self, token_count: int, output_capacity: int | None = None
    ) -> ActivationFrame:
        """The exports of the model's last execution, whichever session ran it; `token_count` (at
        least 1) must be that execution's. Moves nothing."""
        if token_count < 1:
            raise HostCheckError(
                f"copy_output_activation_frame needs at least one token, but got {token_count}"
            )
        if output_capacity is None:
            output_capacity = self.output_capacity(token_count)
        count = uint64(token_count, "token_count")
        return self._filled("skippy_session_copy_output_activation_frame", [count], output_capacity)

    def sample_current(self, sampling: SamplingConfig | None = None) -> int:
        """Sample from the last row of the model's last execution. Moves nothing; each call draws
        anew."""
        predicted = ffi.new("int32_t *")
        self._call("skippy_session_sample_current", raw_sampling(sampling), predicted)
        return int(predicted[0])

    # ---- the call itself --------------------------------------------------------------------

    def _framed(
        self,
        name: str,
        token_count: int,
        input: ActivationFrame | None,
        output_capacity: int | None,
        arguments: list[Any],
        after: tuple[Any, ...] = (),
    ) -> ActivationFrame:
        """Execute `name` with an input and an output frame and advance the count.

        Its C parameters are: the session, `arguments`, the input frame, the output frame,
        `after`, the error slot.
        """
        pointers = input_pointers(input)
        if output_capacity is None:
            output_capacity = self.output_capacity(token_count, input)
        updated = added(self.token_count, token_count)
        frame = self._filled(name, [*arguments, *pointers], output_capacity, after)
        self.token_count = updated
        return frame

    def _filled(
        self, name: str, arguments: list[Any], capacity: int, after: tuple[Any, ...] = ()
    ) -> ActivationFrame:
        """Call with an output frame of `capacity` bytes, again with more if it asks for more: a
        library that finds the buffer too small has not executed anything."""
        if not 0 <= capacity <= BUFFER_BYTES_MAX:
            raise HostCheckError(f"output_capacity is {capacity}, but must be 0 to 2**36 bytes")
        call: Callable[..., int] = getattr(self.lib, name)
        raw = self.raw
        needed = ffi.new("size_t *")
        slot = self.model.library.error_slot()
        for growths in itertools.count():
            desc = ActivationDesc.for_output()
            payload: np.ndarray[Any, Any] = np.empty(capacity, dtype=np.uint8)
            # Not NULL even when empty: NULL would be an invalid argument, not a question of size.
            buffer = ffi.from_buffer(payload)
            status = call(raw, *arguments, desc.raw, buffer, capacity, needed, *after, slot.out)
            if not must_grow(status, needed[0], capacity, growths):
                break
            slot.discard()
            capacity = needed[0]
        slot.check(name, status)
        return ActivationFrame(desc, payload[: needed[0]])


def _clamped(max_draft_tokens: int) -> int:
    return max(0, min(max_draft_tokens, NATIVE_MTP_MAX_DRAFT_TOKENS))
