"""Optimizer state as plain tensors, one per range, for ``torch.distributed.checkpoint``.

Every rank saves its ranges; an entry's name says which elements of which parameter it has. A rank that loads reads the
entries that overlap its own ranges, so that any number of ranks, and any layout, can load the checkpoint of any other.
Plain tensors under names of their own need no private protocol of the library, and survive ``async_save``.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_hooks.dear.checkpoint.reshard import State
from ddp_hooks.dear.layout.placement import ParameterRange, is_elementwise

SETTINGS = "settings"
_NAME = re.compile(r"(?P<parameter>.+)/(?P<key>[^/]+)/(?P<start>\d+)-(?P<end>\d+)")


class CheckpointKey(NamedTuple):
    """Name of an entry, with elements ``[start, end)``, or (0, 0) for an entry that is not element-wise."""

    parameter: str
    key: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.parameter}/{self.key}/{self.start}-{self.end}"

    @staticmethod
    def of(name: str) -> CheckpointKey | None:
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return CheckpointKey(match["parameter"], match["key"], int(match["start"]), int(match["end"]))


@dataclass(frozen=True)
class Settings:
    """Settings in a checkpoint beside the states, saved as one tensor of bytes."""

    param_groups: list[dict[str, Any]]
    layouts: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]  # shapes and strides: ranges are in storage order

    def packed(self) -> Tensor:
        buffer = io.BytesIO()
        torch.save(vars(self), buffer)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    @staticmethod
    def unpacked(content: Tensor) -> Settings:
        saved = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
        return Settings(**saved)

    def difference(self, present: Settings) -> str | None:
        """Return why these settings of a checkpoint do not fit the ``present`` ones; None if they do."""
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
    bounds: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for key in itertools.chain.from_iterable(_keys_of(saved).values()):
        if key.parameter not in numels:
            return f"the checkpoint has state of {key.parameter}, which is no parameter of this model"
        if key.end > 0:
            bounds.setdefault((key.parameter, key.key), []).append((key.start, key.end))
    for (parameter, entry), ranges in bounds.items():
        end = 0
        for start, stop in sorted(ranges):
            if start != end:
                break
            end = stop
        if end != numels[parameter]:
            return (
                f"{entry} of {parameter} is saved for {max(stop for _, stop in ranges)} elements, of which the first "
                f"{end} are complete, and the parameter has {numels[parameter]}"
            )
    return None


def named_entries(states: Mapping[ParameterRange, State], names: Sequence[str]) -> dict[str, Any]:
    """Return states as a flat dictionary from names to tensors (and other values that optimizers keep)."""
    entries: dict[str, Any] = {}
    for elements, state in states.items():
        for key, value in state.items():
            bounds = (elements.start, elements.end) if is_elementwise(value, elements) else (0, 0)
            entries[str(CheckpointKey(names[elements.parameter], key, *bounds))] = value
    return entries


def overlapping_entries(
    saved: Mapping[str, Any], ranges: Iterable[ParameterRange], names: Sequence[str]
) -> dict[str, Any]:
    """Return empty tensors for every saved entry that overlaps ``ranges``; ``saved`` maps names to metadata."""
    by_parameter = _keys_of(saved)
    wanted: dict[str, Any] = {}
    for elements in ranges:
        for key in by_parameter.get(names[elements.parameter], []):
            whole = key.end == 0
            if whole or max(key.start, elements.start) < min(key.end, elements.end):
                wanted[str(key)] = _blank(saved[str(key)])
    return wanted


def assemble(
    entries: Mapping[str, Any], ranges: Iterable[ParameterRange], names: Sequence[str]
) -> dict[ParameterRange, State]:
    by_parameter = _keys_of(entries)
    states: dict[ParameterRange, State] = {}
    for elements in ranges:
        state: State = {}
        for key in by_parameter.get(names[elements.parameter], []):
            value = entries[str(key)]
            if key.end == 0:
                state[key.key] = value.clone() if isinstance(value, Tensor) else value
                continue
            start, end = max(key.start, elements.start), min(key.end, elements.end)
            if start < end:
                target = state.setdefault(key.key, torch.empty(elements.numel, dtype=value.dtype))
                target[start - elements.start : end - elements.start] = value[start - key.start : end - key.start]
        if state:
            states[elements] = state
    return states


def _keys_of(names: Iterable[str]) -> dict[str, list[CheckpointKey]]:
    by_parameter: dict[str, list[CheckpointKey]] = {}
    for key in map(CheckpointKey.of, names):
        if key is not None:
            by_parameter.setdefault(key.parameter, []).append(key)
    return by_parameter


def _blank(metadata: Any) -> Any:
    size = getattr(metadata, "size", None)
    return torch.empty(size, dtype=metadata.properties.dtype) if size is not None else None
