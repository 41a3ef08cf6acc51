"""One native call for many requests: the iteration batch.

Knows how entries become C arrays and answers become samples and frames. Counts move for all
sessions of a call or for none. Does not choose entries: that is the planner's. The decode batch,
which has frames and one token of each session, is decode_batch.py's.
"""

from __future__ import annotations

import operator
from array import array
from operator import add
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from .cdef import REQUEST_DTYPE, address_of, ffi
from .errors import ClosedError, HostCheckError
from .iteration import IterationBatchOutput, IterationEntry, collect_iteration_samples
from .outputs import Outputs, array_address
from .serial import frame_has_optional_parts, iteration_one_at_a_time
from .state import added, int32_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .iteration import DecodeFrameBatchEntry
    from .library import Library
    from .sampling import SamplingConfig
    from .session import StageSession

_ROWS = 64  # rows to start with; the arrays grow to the largest batch seen


class DecodeRows:
    """Rows that stay the same from one iteration to the next but for their tokens: one token of
    each session at its position, sampled. Make another one when a session comes or goes.

    `addresses` and `counts` are the sessions' handles and token counts after the last run.
    """

    def __init__(
        self, sessions: Sequence[StageSession], sampling: Sequence[SamplingConfig | None]
    ) -> None:
        self.sessions = sessions
        self.sampling = sampling
        self.addresses: list[int] = []
        self.counts: list[int] = []

    def __len__(self) -> int:
        return len(self.sessions)


class IterationBatch:
    """The reusable arrays of iteration batches; keep one per model, used by one thread.

    Nothing is allocated per call for rows that export nothing, and columns are written at once:
    at 256 decode rows the cost beside the native call is below a microsecond a row.
    """

    def __init__(self, library: Library) -> None:
        self._call: Any = library.lib.skippy_iteration_batch_sampled
        self._slot = library.error_slot()
        self._count = ffi.new("size_t *")
        self._tokens: np.ndarray[Any, Any] = np.zeros(0, dtype=np.int32)
        self._reserve_rows(_ROWS)
        self._reserve_tokens(_ROWS)

    def _reserve_rows(self, rows: int) -> None:
        self._rows = rows
        self._requests = np.zeros(rows, dtype=REQUEST_DTYPE)
        self._column = {name: self._requests[name] for name in REQUEST_DTYPE.names or ()}
        self._raw_requests = ffi.from_buffer("struct skippy_iteration_request[]", self._requests)
        self._outputs = Outputs(rows)
        self._raw_pointers = ffi.from_buffer("void *[]", self._outputs.pointers)
        self._raw_capacities = ffi.from_buffer("size_t[]", self._outputs.capacities)
        self._raw_needed = ffi.from_buffer("size_t[]", self._outputs.needed)
        self._indexes = np.zeros(rows, dtype=np.uint64)
        self._predicted = np.zeros(rows, dtype=np.int32)
        self._raw_indexes = ffi.from_buffer("size_t[]", self._indexes)
        self._raw_predicted = ffi.from_buffer("int32_t[]", self._predicted)
        self._offsets_of_one = np.arange(rows, dtype=np.int64)
        self._has_positions = False
        self._written: DecodeRows | None = None

    def _reserve_tokens(self, tokens: int) -> None:
        self._tokens = np.zeros(tokens, dtype=np.int32)
        self._tokens_address = array_address(self._tokens)
        self._written = None

    def run(self, entries: Sequence[IterationEntry]) -> IterationBatchOutput:
        """Run an iteration: one native call, or one per entry where a batch is not possible.

        No entries: no call. Raises HostCheckError (nothing moved), NativeError (no count moved;
        compare positions), NativeAnswerError, or PartialBatchExecution from the serial path.
        """
        if not entries:
            return IterationBatchOutput([], [])
        rows = len(entries)
        sessions = [entry.session for entry in entries]
        inputs = [entry.input for entry in entries]
        alone = [session.runs_alone for session in sessions]
        has_inputs = inputs.count(None) != rows
        if True in alone or (has_inputs and any(map(frame_has_optional_parts, inputs))):
            return iteration_one_at_a_time(entries)
        addresses = [session.address for session in sessions]
        if 0 in addresses:
            refuse_closed(sessions)
        self._begin(rows)
        column = self._column
        column["session"][:rows] = addresses
        column["sampling"][:rows] = sampling_addresses(entries)
        column["sample_last"][:rows] = [entry.sample_last for entry in entries]
        lengths = self._write_tokens([entry.token_ids for entry in entries])
        positions = self._write_positions([entry.positions for entry in entries])
        frames = self._write_inputs(inputs, has_inputs)
        counts = [session.token_count for session in sessions]
        added(max(counts), max(lengths))  # no sum can be larger
        updated = list(map(add, counts, lengths))
        boundary = sessions[0].model.output_boundary
        per_token = 0 if boundary is None else boundary.bytes_per_token
        self._execute(rows, np.array(lengths) * per_token if per_token else None)
        del positions, frames  # the native call read them through bare addresses
        samples = self._samples(rows)
        for session, count in zip(sessions, updated, strict=True):
            session.token_count = count
        return IterationBatchOutput(self._outputs.frames(rows), samples)

    def run_with_decodes(
        self, decodes: DecodeRows, tokens: Sequence[int], entries: Sequence[IterationEntry]
    ) -> list[int]:
        """Run kept rows with these tokens, and more entries behind them, as one native call on a
        stage that samples; the sampled token of every row, -1 where there is none.

        As long as the same rows come again only their tokens are written. The entries have no
        positions and no frames. Raises as `run`.
        """
        kept, rows = len(decodes), len(decodes) + len(entries)
        if not rows:
            return []
        addresses = [session.address for session in decodes.sessions]
        if 0 in addresses:
            refuse_closed(decodes.sessions)
        counts = [session.token_count + 1 for session in decodes.sessions]
        added(max(counts, default=0), 0)
        lengths = [len(entry.token_ids) for entry in entries]
        updated = [
            added(entry.session.token_count, length)
            for entry, length in zip(entries, lengths, strict=True)
        ]
        total = kept + sum(lengths)
        if total > len(self._tokens):
            self._reserve_tokens(max(total, 2 * len(self._tokens)))
        if rows > self._rows or self._written is not decodes:
            self._write_decodes(decodes, addresses, rows)
        try:
            self._tokens[:kept] = tokens
            end = kept
            for row, (entry, length) in enumerate(zip(entries, lengths, strict=True), kept):
                self._tokens[end : end + length] = entry.token_ids
                self._write_entry(row, entry, end, length)
                end += length
        except (OverflowError, TypeError, ValueError) as error:
            raise HostCheckError(f"token_ids must be 32-bit integers: {error}") from None
        self._execute(rows, None)
        samples = self._aligned_samples(rows)
        decodes.addresses, decodes.counts = addresses, counts
        for session, count in zip(decodes.sessions, counts, strict=True):
            session.token_count = count
        for entry, count in zip(entries, updated, strict=True):
            entry.session.token_count = count
        return samples

    def _write_decodes(self, decodes: DecodeRows, addresses: list[int], rows: int) -> None:
        self._begin(rows)
        kept, column = len(decodes), self._column
        column["session"][:kept] = addresses
        column["sampling"][:kept] = [0 if s is None else s.address for s in decodes.sampling]
        column["sample_last"][:kept] = True
        column["token_count"][:kept] = 1
        offsets = self._offsets_of_one[:kept] * self._tokens.itemsize
        column["token_ids"][:kept] = offsets + self._tokens_address
        for name in ("positions", "position_count", "input_desc", "input_payload"):
            column[name][:] = 0
        self._has_positions = False
        self._written = decodes

    def _write_entry(self, row: int, entry: IterationEntry, start: int, length: int) -> None:
        assert entry.input is None
        assert not len(entry.positions)
        if not entry.session.address:
            raise ClosedError(f"request {row}: its session is closed")
        column = self._column
        column["session"][row] = entry.session.address
        column["sampling"][row] = 0 if entry.sampling is None else entry.sampling.address
        column["sample_last"][row] = entry.sample_last
        column["token_count"][row] = length
        column["token_ids"][row] = start * self._tokens.itemsize + self._tokens_address

    def _begin(self, rows: int) -> None:
        """Room for so many rows, all to be written anew."""
        if rows > self._rows:
            self._reserve_rows(max(rows, 2 * self._rows))
        self._written = None

    def _write_tokens(self, token_ids: list[Any]) -> list[int]:
        """Put all token ids into one array and point the rows at it; their lengths."""
        if not set(map(type, token_ids)) <= {list, tuple}:
            token_ids = [int32_array(row, "token_ids") for row in token_ids]
        lengths = list(map(len, token_ids))
        rows, total = len(lengths), sum(lengths)
        if total > len(self._tokens):
            self._reserve_tokens(max(total, 2 * len(self._tokens)))
        tokens = self._tokens
        offsets = self._offsets_of_one[:rows]
        try:
            if total == rows and min(lengths) == 1:
                tokens[:rows] = array("i", [row[0] for row in token_ids])
                self._column["token_count"][:rows] = 1
            else:
                ends = np.cumsum(np.array(lengths, dtype=np.int64))
                offsets = ends - np.array(lengths, dtype=np.int64)
                for row, end, length in zip(token_ids, ends.tolist(), lengths, strict=True):
                    if length == 1:
                        tokens[end - 1] = operator.index(row[0])
                    elif isinstance(row, np.ndarray):
                        tokens[end - length : end] = row
                    else:
                        tokens[end - length : end] = array("i", row)
                self._column["token_count"][:rows] = lengths
        except (OverflowError, TypeError, ValueError) as error:
            raise HostCheckError(f"token_ids must be 32-bit integers: {error}") from None
        self._column["token_ids"][:rows] = offsets * tokens.itemsize + self._tokens_address
        return lengths

    def _write_positions(self, positions: list[Any]) -> Any:
        """Point the rows at their explicit positions; what has to stay alive for the call."""
        rows = len(positions)
        if not any(map(len, positions)):
            if self._has_positions:
                self._column["positions"][:] = 0
                self._column["position_count"][:] = 0
                self._has_positions = False
            return None
        arrays = [int32_array(row, "positions") for row in positions]
        lengths = np.array(list(map(len, arrays)))
        block = np.ascontiguousarray(np.concatenate(arrays), dtype=np.int32)
        offsets = np.cumsum(lengths) - lengths
        addresses = np.where(lengths > 0, offsets * block.itemsize + array_address(block), 0)
        self._column["positions"][:rows] = addresses
        self._column["position_count"][:rows] = lengths
        self._has_positions = True
        return block

    def _write_inputs(self, inputs: list[Any], any_input: bool) -> Any:
        """Point the rows at their input frames; what has to stay alive for the call."""
        rows = len(inputs)
        if not any_input:
            self._column["input_desc"][:rows] = 0
            self._column["input_payload"][:rows] = 0
            return None
        descs, payloads, kept = [], [], []
        for index, frame in enumerate(inputs):
            if frame is None:
                descs.append(0)
                payloads.append(0)
                continue
            try:
                desc, payload = frame.pointers()
            except HostCheckError as error:
                raise HostCheckError(f"request {index}: {error}") from None
            kept.append((desc, payload))
            descs.append(address_of(desc))
            payloads.append(address_of(payload))
        self._column["input_desc"][:rows] = descs
        self._column["input_payload"][:rows] = payloads
        return kept

    def _execute(self, rows: int, capacities: np.ndarray[Any, Any] | None) -> None:
        self._count[0] = 0
        self._outputs.execute(
            "skippy_iteration_batch_sampled",
            rows,
            capacities,
            self._slot,
            lambda descs: self._call(
                self._raw_requests,
                rows,
                descs,
                self._raw_pointers,
                self._raw_capacities,
                self._raw_needed,
                self._raw_indexes,
                self._raw_predicted,
                rows,
                self._count,
                self._slot.out,
            ),
        )

    def _samples(self, rows: int) -> Any:
        count = self._count[0]
        return collect_iteration_samples(
            rows, count, self._indexes[: min(count, rows)].tolist(), self._predicted[:rows].tolist()
        )

    def _aligned_samples(self, rows: int) -> list[int]:
        """A token per row. Raises NativeAnswerError for samples that fit no row."""
        if self._count[0] == rows and (self._indexes[:rows] == self._offsets_of_one[:rows]).all():
            return cast("list[int]", self._predicted[:rows].tolist())
        aligned = [-1] * rows
        for index, token in self._samples(rows):
            aligned[index] = token
        return aligned


def sampling_addresses(
    entries: Sequence[IterationEntry | DecodeFrameBatchEntry],
) -> list[int]:
    """Addresses of the C forms, 0 for greedy; a refused one is named with its request."""
    try:
        return [0 if entry.sampling is None else entry.sampling.address for entry in entries]
    except HostCheckError:
        for index, entry in enumerate(entries):
            try:
                if entry.sampling is not None:
                    entry.sampling.validate()
            except HostCheckError as error:
                raise HostCheckError(f"request {index}: {error}") from None
        raise


def refuse_closed(sessions: Sequence[StageSession]) -> None:
    for index, session in enumerate(sessions):
        if session.closed:
            raise ClosedError(f"request {index}: its session is closed")


def iteration_batch_sampled(entries: Sequence[IterationEntry]) -> IterationBatchOutput:
    """Run one scheduler iteration on the entries' model; see `IterationBatch.run`."""
    if not entries:
        return IterationBatchOutput([], [])
    return entries[0].session.model.batch.run(entries)
