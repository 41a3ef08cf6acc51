"""Someone else's libskippy: without our extensions, with other habits, with wrong answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from skippy_sched.native import (
    BufferTooSmall,
    DecodeFrameBatchEntry,
    IterationEntry,
    Library,
    Model,
    NativeAnswerError,
    StageSession,
    UnspecifiedError,
    Unsupported,
    decode_step_frame_batch_sampled,
    iteration_batch_sampled,
)

from .conftest import a_foreign_library

# Handles, positions, and an iteration whose habits a test chooses by the first token of row 0:
# 1: asks for 16 bytes a row, but names only the first row that lacks them; 2: asks for a size
# that no machine has; 3: answers a status that does not exist; 4: samples for a row beyond 2**63.
CODE = r"""
struct skippy_model { int open; };
struct skippy_session { int n_past; };
int calls, errors;
void skippy_error_free(struct skippy_error *error) { errors -= error != NULL; free(error); }
static enum skippy_status fail(struct skippy_error **out, int status) {
    *out = calloc(1, sizeof **out);
    (*out)->status = status;
    errors++;
    return status;
}
enum skippy_status skippy_model_open(const char *path, const struct skippy_runtime_config *config,
                                     struct skippy_model **out, struct skippy_error **error) {
    *out = calloc(1, sizeof **out);
    return 0;
}
enum skippy_status skippy_model_free(struct skippy_model *model, struct skippy_error **error) {
    free(model);
    return 0;
}
bool skippy_model_output_activation_boundary(const struct skippy_model *model,
                                             struct skippy_activation_boundary_desc *out) {
    return false;
}
bool skippy_model_input_activation_boundary(const struct skippy_model *model,
                                            struct skippy_activation_boundary_desc *out) {
    return false;
}
enum skippy_status skippy_session_create(struct skippy_model *model, struct skippy_session **out,
                                         struct skippy_error **error) {
    *out = calloc(1, sizeof **out);
    return 0;
}
enum skippy_status skippy_session_free(struct skippy_session *session,
                                       struct skippy_error **error) {
    free(session);
    return 0;
}
int32_t skippy_session_position(const struct skippy_session *session) { return session->n_past; }
enum skippy_status skippy_iteration_batch_sampled(
    const struct skippy_iteration_request *requests, size_t count,
    struct skippy_activation_desc *descs, void *const *payloads, const size_t *capacities,
    size_t *bytes, size_t *indexes, int32_t *predicted, size_t capacity, size_t *sampled,
    struct skippy_error **error) {
    int habit = requests[0].token_ids[0];
    calls++;
    for (size_t r = 0; r < count; r++)
        if (descs[r].version != 0 || descs[r].producer_stage_index != -1) abort();
    for (size_t r = 0; habit == 1 && r < count; r++) {
        bytes[r] = 16;
        if (capacities[r] < 16) return fail(error, SKIPPY_STATUS_BUFFER_TOO_SMALL);
        for (int i = 0; i < 16; i++) ((char *)payloads[r])[i] = (char)(r + 1);
        descs[r].payload_bytes = 16;
    }
    if (habit == 2) {
        bytes[0] = (size_t)1 << 63;
        return fail(error, SKIPPY_STATUS_BUFFER_TOO_SMALL);
    }
    if (habit == 3) return fail(error, 99);
    for (size_t r = 0; r < count; r++) {
        requests[r].session->n_past += requests[r].token_count;
        indexes[r] = habit == 4 ? (size_t)-1 : r;
        predicted[r] = requests[r].token_ids[0];
        descs[r].version = 2;
        descs[r].producer_stage_index = 0;
    }
    *sampled = count;
    return 0;
}
enum skippy_status skippy_export_full_state(struct skippy_session *session, int32_t start,
                                            int32_t end, void *out, size_t capacity, size_t *bytes,
                                            struct skippy_error **error) {
    *bytes = (size_t)1 << 63;
    return fail(error, SKIPPY_STATUS_BUFFER_TOO_SMALL);
}
enum skippy_status skippy_prefill_chunk_frame_sampled(
    struct skippy_session *session, const int32_t *tokens, size_t count,
    const struct skippy_sampling_config *sampling, const struct skippy_activation_desc *in,
    const void *payload, struct skippy_activation_desc *desc, void *out, size_t capacity,
    size_t *bytes, int32_t *predicted, struct skippy_error **error) {
    calls++;
    *bytes = capacity + 1;
    return fail(error, SKIPPY_STATUS_BUFFER_TOO_SMALL);
}
enum skippy_status skippy_prefill_chunk_frame(
    struct skippy_session *session, const int32_t *tokens, size_t count,
    const struct skippy_activation_desc *in, const void *payload,
    struct skippy_activation_desc *desc, void *out, size_t capacity, size_t *bytes,
    struct skippy_error **error) {
    *bytes = (size_t)1 << 63;
    return fail(error, SKIPPY_STATUS_BUFFER_TOO_SMALL);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    path = tmp_path_factory.mktemp("foreign") / "libskippy-foreign.so"
    return Library.load(a_foreign_library(path, code=CODE))


@pytest.fixture
def sessions(library: Library, tmp_path: Path):  # type: ignore[no-untyped-def]
    with Model.open(library, tmp_path) as model:
        yield [model.create_session() for _ in range(3)]
    assert counter(library, "errors") == 0


def counter(library: Library, name: str) -> int:
    """A counter of the foreign library's own."""
    import ctypes

    return ctypes.c_int.in_dll(ctypes.CDLL(str(library.path)), name).value


def rows(sessions: list[StageSession], habit: int) -> list[IterationEntry]:
    return [IterationEntry(session, [habit]) for session in sessions]


def test_without_extensions_the_facts_are_unknown(sessions: list[StageSession]) -> None:
    model = sessions[0].model
    assert not model.facts.known
    assert not model.facts.is_dense
    assert not model.batched_activation_exports
    assert "does not say" in (model.batch_invariant() or "")


def test_calls_of_absent_symbols_are_unsupported(sessions: list[StageSession]) -> None:
    for call in (
        lambda: sessions[0].decode_step_sampled_mtp(1),
        lambda: sessions[0].decode_step_frame_sampled_mtp(1),
    ):
        with pytest.raises(Unsupported, match=r"libskippy-foreign\.so has no such symbol"):
            call()


def test_sizes_named_one_row_at_a_time_are_followed_to_the_last(
    sessions: list[StageSession], library: Library
) -> None:
    before = counter(library, "calls")
    output = iteration_batch_sampled(rows(sessions, 1))
    assert counter(library, "calls") - before == len(sessions) + 1
    assert [bytes(f.payload) for f in output.request_outputs] == [
        b"\1" * 16,
        b"\2" * 16,
        b"\3" * 16,
    ]
    assert [session.token_count for session in sessions] == [1, 1, 1]


def test_a_size_beyond_all_memory_is_an_error_of_the_call(sessions: list[StageSession]) -> None:
    for call in (
        lambda: iteration_batch_sampled(rows(sessions, 2)),
        lambda: sessions[0].prefill_chunk_frame([1]),
        lambda: sessions[0].export_full_state(0, 1),
    ):
        with pytest.raises(BufferTooSmall):
            call()
    assert [session.token_count for session in sessions] == [0, 0, 0]


def test_a_size_that_always_grows_is_followed_four_times(
    sessions: list[StageSession], library: Library
) -> None:
    before = counter(library, "calls")
    with pytest.raises(BufferTooSmall):
        sessions[0].prefill_chunk_frame_sampled([1])
    assert counter(library, "calls") - before == 5


def test_every_batch_is_given_clean_descriptors(sessions: list[StageSession]) -> None:
    """The library aborts on a descriptor that still says what the last call wrote."""
    for _ in range(2):
        iteration_batch_sampled(rows(sessions, 5))
    assert [session.token_count for session in sessions] == [2, 2, 2]


def test_a_status_that_does_not_exist_is_shown_by_number(sessions: list[StageSession]) -> None:
    with pytest.raises(UnspecifiedError, match="status 99") as caught:
        iteration_batch_sampled(rows(sessions, 3))
    assert caught.value.status == 99


def test_an_index_beyond_all_bounds_is_refused(sessions: list[StageSession]) -> None:
    with pytest.raises(NativeAnswerError, match="only 3 requests"):
        iteration_batch_sampled(rows(sessions, 4))
    assert [(s.token_count, s.position) for s in sessions] == [(0, 1)] * 3


def test_a_missing_ability_is_never_replaced_by_another_call(
    sessions: list[StageSession], library: Library
) -> None:
    """The foreign decode batch is UNSUPPORTED, its iteration batch would work."""
    before = counter(library, "calls")
    with pytest.raises(Unsupported):
        decode_step_frame_batch_sampled([DecodeFrameBatchEntry(s, 5) for s in sessions])
    assert counter(library, "calls") == before
    assert [session.position for session in sessions] == [0, 0, 0]
