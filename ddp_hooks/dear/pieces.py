"""Optimizer state as plain tensors, one per piece, for ``torch.distributed.checkpoint``.

Every rank saves what it holds; an entry's name says which elements of which parameter it has. Whoever loads asks for
the pieces that overlap its own, so that any number of ranks, and any layout, can load what any other has saved. Plain
tensors under names of their own need no private protocol of the checkpoint library, and survive ``async_save``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_hooks.dear.layout import Interval
from ddp_hooks.dear.moves import State, is_elementwise

SETTINGS = "settings"
_NAME = re.compile(r"(?P<parameter>.+)/(?P<key>[^/]+)/(?P<start>\d+)-(?P<end>\d+)")


class Piece(NamedTuple):
    """An entry's name, taken apart; elements ``[start, end)``, or (0, 0) for an entry that is not element-wise."""

    parameter: str
    key: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.parameter}/{self.key}/{self.start}-{self.end}"

    @staticmethod
    def of(name: str) -> Piece | None:
        """The piece of that name, or None if the name is of something else."""
        match = _NAME.fullmatch(name)
        return Piece(match["parameter"], match["key"], int(match["start"]), int(match["end"])) if match else None


@dataclass(frozen=True)
class Even:
    """Every parameter cut into equal ranges, for state that is loaded before there is a layout."""

    numels: tuple[int, ...]
    world_size: int

    def intervals(self, rank: int) -> list[Interval]:
        """See :class:`~ddp_hooks.dear.moves.Placement`."""
        cuts = [(n * rank // self.world_size, n * (rank + 1) // self.world_size) for n in self.numels]
        return [Interval(i, start, end) for i, (start, end) in enumerate(cuts) if start < end]


@dataclass(frozen=True)
class Settings:
    """What belongs to a checkpoint beside the pieces: travels as one tensor of bytes.

    Args:
        param_groups: per group, its settings.
        layouts: shape and strides of every parameter. Pieces are in storage order, so strides matter.
    """

    param_groups: list[dict[str, Any]]
    layouts: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def packed(self) -> Tensor:
        """As bytes."""
        buffer = io.BytesIO()
        torch.save(vars(self), buffer)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    @staticmethod
    def unpacked(content: Tensor) -> Settings:
        """The reverse of :meth:`packed`."""
        saved = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
        return Settings(saved["param_groups"], saved["layouts"])  # earlier versions have saved more

    def difference(self, present: Settings) -> str | None:
        """Why these settings of a checkpoint do not fit the ``present`` ones, or None if they do."""
        if len(self.param_groups) != len(present.param_groups):
            return (
                f"the optimizer has {len(present.param_groups)} param_groups, the checkpoint {len(self.param_groups)}: "
                f"make the optimizer as it was when it was saved"
            )
        for name, layout in self.layouts.items():
            if present.layouts.get(name) != layout:
                expected = present.layouts.get(name, "no such parameter")
                return (
                    f"{name} was saved with shape and strides {layout}, the model has {expected}: bring the model to "
                    f"the same memory format before DearState, or load state.full_optimizer_state_dict()"
                )
        return None


def find_misfit(saved: Iterable[str], numels: Mapping[str, int]) -> str | None:
    """Why saved pieces are not those of parameters with these names and sizes, or None if they are."""
    bounds: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for name in saved:
        piece = Piece.of(name)
        if piece is None:
            continue
        if piece.parameter not in numels:
            return f"the checkpoint has state of {piece.parameter}, which is no parameter of this model"
        if piece.end > 0:
            bounds.setdefault((piece.parameter, piece.key), []).append((piece.start, piece.end))
    for (parameter, key), ranges in bounds.items():
        end = 0
        for start, stop in sorted(ranges):
            if start != end:
                break
            end = stop
        if end != numels[parameter]:
            return (
                f"{key} of {parameter} is saved for {max(stop for _, stop in ranges)} elements, of which the first "
                f"{end} are complete, and the parameter has {numels[parameter]}"
            )
    return None


def named_pieces(states: Mapping[Interval, State], names: Sequence[str]) -> dict[str, Any]:
    """This rank's states as a flat dictionary from names to tensors (and what else optimizers keep)."""
    entries: dict[str, Any] = {}
    for interval, state in states.items():
        for key, value in state.items():
            bounds = (interval.start, interval.end) if is_elementwise(value, interval) else (0, 0)
            entries[str(Piece(names[interval.parameter], key, *bounds))] = value
    return entries


def overlapping_pieces(
    saved: Mapping[str, Any], intervals: Iterable[Interval], names: Sequence[str]
) -> dict[str, Any]:
    """Empty tensors for every saved piece of which ``intervals`` need a part; ``saved`` maps names to metadata."""
    by_parameter: dict[str, list[Piece]] = {}
    for name in saved:
        piece = Piece.of(name)
        if piece is not None:
            by_parameter.setdefault(piece.parameter, []).append(piece)
    wanted: dict[str, Any] = {}
    for interval in intervals:
        for piece in by_parameter.get(names[interval.parameter], []):
            whole = piece.end == 0
            if whole or max(piece.start, interval.start) < min(piece.end, interval.end):
                wanted[str(piece)] = _blank(saved[str(piece)])
    return wanted


def assemble(entries: Mapping[str, Any], intervals: Iterable[Interval], names: Sequence[str]) -> dict[Interval, State]:
    """The states of ``intervals`` out of loaded entries."""
    by_parameter: dict[str, list[tuple[Piece, Any]]] = {}
    for name, value in entries.items():
        piece = Piece.of(name)
        if piece is not None:
            by_parameter.setdefault(piece.parameter, []).append((piece, value))
    states: dict[Interval, State] = {}
    for interval in intervals:
        state: State = {}
        for piece, value in by_parameter.get(names[interval.parameter], []):
            if piece.end == 0:
                state[piece.key] = value.clone() if isinstance(value, Tensor) else value
                continue
            start, end = max(piece.start, interval.start), min(piece.end, interval.end)
            if start < end:
                target = state.setdefault(piece.key, torch.empty(interval.end - interval.start, dtype=value.dtype))
                target[start - interval.start : end - interval.start] = value[start - piece.start : end - piece.start]
        if state:
            states[interval] = state
    return states


def _blank(metadata: Any) -> Any:
    size = getattr(metadata, "size", None)
    return torch.empty(size, dtype=metadata.properties.dtype) if size is not None else None
