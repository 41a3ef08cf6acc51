"""Which architectures can be cut between layers with exact results, and where.

A slice numbers its layers from 0 and is loaded as a smaller model of the same architecture. That
is exact only where nothing depends on a layer's number or on how many there are; this file knows
the architectures for which that was looked up, and their exceptions. The self-check has the last
word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from skippy_sched.errors import SplitError
from skippy_sched.split.gguf import GgufFile, Key, bool_entry, number_entry, text_entry

#: Array keys with an item per layer: a slice gets the items of its layers.
_PER_LAYER = frozenset({"attention.head_count", "attention.head_count_kv", "feed_forward_length"})
#: Array keys that say the same of every layer.
_PER_MODEL = frozenset({"rope.dimension_sections"})
#: Keys whose presence (with a value above 0) ties layers to their number or to each other.
_TYING = (
    "attention.shared_kv_layers",
    "embedding_length_per_layer_input",
    "leading_dense_block_count",
    "n_deepstack_layers",
    "nextn_predict_layers",
)


@dataclass(frozen=True, slots=True)
class Rules:
    """``period``: layers repeat a pattern of that length, which starts anew in each slice.

    ``period_key``: where the file may say otherwise. ``whole_only``: layer counts from which the
    loader guesses a size and with it a value that no key states.
    """

    period: int = 1
    period_key: str | None = None
    whole_only: frozenset[int] = frozenset()


ARCHITECTURES = {
    "llama": Rules(),
    "qwen2": Rules(),
    "qwen3": Rules(),
    "qwen3moe": Rules(),
    # Every sixth layer attends to everything, the others to a window. 62 layers mean the 27B
    # model, whose attention is scaled by another rule.
    "gemma3": Rules(6, "attention.sliding_window_pattern", frozenset({62})),
}


@dataclass(frozen=True, slots=True)
class Layers:
    """What of a model matters for cutting it."""

    architecture: str
    count: int
    period: int


def layers_of(model: GgufFile) -> Layers:
    """Raises SplitError for a model that can't be cut, and says why."""
    architecture = model.text("general.architecture")
    rules = ARCHITECTURES.get(architecture or "")
    if architecture is None or rules is None:
        raise SplitError(
            f"{model.path}: the architecture {architecture!r} is not known to be exact when it is "
            f"cut; known are {', '.join(ARCHITECTURES)}"
        )
    if "skippy.stage.layer_start" in model.keys:
        raise SplitError(f"{model.path} is a slice already: split the model that it came from")
    if (model.number("split.count") or 1) > 1:
        raise SplitError(f"{model.path} is one of several files of a model: merge them first")
    count = model.number(f"{architecture}.block_count")
    if not isinstance(count, int) or count < 1:
        raise SplitError(f"{model.path} does not say how many layers it has")
    if count > len(model.tensors):
        raise SplitError(
            f"{model.path} is damaged: it names {count} layers, "
            f"but has {len(model.tensors)} tensors"
        )
    if count in rules.whole_only:
        raise SplitError(
            f"{model.path}: {architecture} with {count} layers can't be cut: a value of its "
            "attention follows from the number of layers"
        )
    for key in _TYING:
        if model.number(f"{architecture}.{key}"):
            raise SplitError(f"{model.path} can't be cut: {architecture}.{key} ties its layers")
    period = rules.period
    if rules.period_key is not None and f"{architecture}.{rules.period_key}" in model.keys:
        stated = model.number(f"{architecture}.{rules.period_key}")
        if not isinstance(stated, int) or stated < 1:
            raise SplitError(
                f"{model.path} can't be cut: {architecture}.{rules.period_key} is a list, which "
                "the engine does not read"
            )
        period = stated
    for entry in model.keys.values():
        _check_array(model, entry, architecture, count)
    return Layers(architecture, count, period)


def _check_array(model: GgufFile, key: Key, architecture: str, layer_count: int) -> None:
    prefix, _, name = key.name.partition(".")
    if prefix != architecture or key.count is None or name in _PER_MODEL:
        return
    if name not in _PER_LAYER:
        raise SplitError(f"{model.path} can't be cut: {key.name} is a list of unknown meaning")
    if key.count != layer_count:
        raise SplitError(f"{model.path}: {key.name} has {key.count} items for {layer_count} layers")


def even_cuts(layers: Layers, stages: int) -> list[int]:
    """Cuts that make ``stages`` stages as even as the pattern of the layers allows."""
    places = [*range(layers.period, layers.count, layers.period)]
    if not 2 <= stages <= len(places) + 1:
        raise SplitError(
            f"{stages} stages: {layers.architecture} with {layers.count} layers can be cut into 2 "
            f"to {len(places) + 1} stages (at multiples of {layers.period})"
        )
    cuts: list[int] = []
    for stage in range(1, stages):
        left = stages - 1 - stage  # cuts that must still find a place behind this one
        free = [place for place in places if not cuts or place > cuts[-1]]
        free = free[: len(free) - left]
        ideal = stage * layers.count / stages
        cuts.append(min(free, key=lambda place: abs(place - ideal)))
    return cuts


def check_cuts(layers: Layers, cuts: Sequence[int]) -> None:
    """Raises SplitError for cuts that are out of order, or that would change the model."""
    if not cuts:
        raise SplitError("no cut: give at least one layer to cut at")
    for before, after in pairwise((0, *cuts, layers.count)):
        if before >= after:
            raise SplitError(
                f"cuts at {', '.join(map(str, cuts))}: they must ascend, from 1 to "
                f"{layers.count - 1}"
            )
    wrong = [cut for cut in cuts if cut % layers.period]
    if wrong:
        raise SplitError(
            f"a cut at {wrong[0]} is not exact: the layers of {layers.architecture} repeat a "
            f"pattern of {layers.period}, which starts anew in each slice; cut at multiples of "
            f"{layers.period}"
        )


def slice_entries(
    model: GgufFile, layers: Layers, start: int, end: int, digest: str
) -> tuple[list[bytes], int]:
    """The key entries of the slice of layers [start, end), and where its tensors end.

    A slice that exports holds one layer more, whose input is what it exports.
    """
    idle = end < layers.count
    held = end + idle
    prefix = f"{layers.architecture}."
    entries = []
    for key in model.keys.values():
        name = key.name.removeprefix(prefix)
        if key.name == f"{prefix}block_count":
            entries.append(number_entry(key.name, held - start))
        elif key.name.startswith(prefix) and name in _PER_LAYER and key.count is not None:
            entries.append(model.array_slice(key, start, held))
        else:
            entries.append(model.raw(key))
    entries += [
        number_entry("skippy.stage.layer_start", start),
        number_entry("skippy.stage.layer_end", end),
        number_entry("skippy.stage.n_layer", layers.count),
        text_entry("skippy.stage.model_digest", digest),
        bool_entry("skippy.stage.idle_layer", idle),
    ]
    return entries, held
