"""Optimizer state for ``torch.distributed.checkpoint``: every rank saves and loads its part, under flat names.

An element-wise entry is one :class:`SpreadTensor`, so that any number of ranks, and any layout, can load the checkpoint
of any other. Every other entry, such as a count of steps, is saved whole.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.dear.checkpoint.reshard import State
from ddp_hooks.dear.layout.memory import ManagedParameters
from ddp_hooks.dear.layout.placement import ParameterRange, Placement, is_elementwise
from ddp_hooks.dear.update.spread_tensor import SpreadTensor
from ddp_hooks.overlap import copied

SETTINGS = "settings"


def _parsed(name: str) -> tuple[str, str, str]:
    """Return "spread" or "whole", parameter and key; something else for the name of something else."""
    kind, _, rest = name.partition("/")
    parameter, _, key = rest.rpartition("/")
    return kind, parameter, key


def packed(param_groups: list[dict[str, Any]]) -> Tensor:
    buffer = io.BytesIO()
    torch.save(param_groups, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpacked(content: Tensor) -> list[dict[str, Any]]:
    param_groups: list[dict[str, Any]] = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
    return param_groups


def find_misfit(saved: Mapping[str, Any], parameters: ManagedParameters) -> str | None:
    """Return why saved entries, of which ``saved`` has the metadata, are not of these parameters; None if they are."""
    shapes = {name: tensor.shape for name, tensor in zip(parameters.names, parameters.tensors, strict=True)}
    for name, metadata in saved.items():
        kind, parameter, key = _parsed(name)
        if kind not in ("spread", "whole"):
            continue
        if parameter not in shapes:
            return f"the checkpoint has state of {parameter}, which is no parameter of this model"
        if kind == "spread" and metadata.size != shapes[parameter]:
            return (
                f"{key} of {parameter} is saved with shape {tuple(metadata.size)}, but the parameter has "
                f"{tuple(shapes[parameter])}: load a state that was saved for this model"
            )
    return None


def named_entries(
    states: Mapping[ParameterRange, State], placement: Placement, parameters: ManagedParameters
) -> dict[str, Any]:
    """Return states as a flat dictionary from names to tensors (and other values that optimizers keep)."""
    entries: dict[str, Any] = {}
    for elements, state in states.items():
        parameter = parameters.names[elements.parameter]
        for key, value in state.items():
            if not is_elementwise(value, elements) or not elements.numel:
                entries[f"whole/{parameter}/{key}"] = value
                continue
            name = f"spread/{parameter}/{key}"
            if name not in entries:
                like, label = parameters.tensors[elements.parameter], f"{key} of {parameter}"
                entries[name] = SpreadTensor(like, value.dtype, value.device, {}, placement, label)
            entries[name].parts[elements] = value
    return entries


def blank_states(
    saved: Mapping[str, Any], ranges: Iterable[ParameterRange], parameters: ManagedParameters
) -> dict[ParameterRange, State]:
    """Return the states of ``ranges`` with empty tensors to load into, None for what is not a tensor."""
    entries: dict[str, list[tuple[str, str, Any]]] = {}
    for name, metadata in saved.items():
        kind, parameter, key = _parsed(name)
        entries.setdefault(parameter, []).append((kind, key, metadata))
    states: dict[ParameterRange, State] = {}
    for elements in ranges:
        states[elements] = {}
        for kind, key, metadata in entries.get(parameters.names[elements.parameter], []):
            size = (elements.numel,) if kind == "spread" else getattr(metadata, "size", None)
            blank = torch.empty(size, dtype=metadata.properties.dtype) if size is not None else None
            states[elements][key] = blank
    return states


def take_whole_entries(
    states: Mapping[ParameterRange, State], loaded: Mapping[str, Any], parameters: ManagedParameters
) -> None:
    """Put the entries that are loaded whole into states; those that are spread were loaded into their memory."""
    for elements, state in states.items():
        for key in state:
            name = f"whole/{parameters.names[elements.parameter]}/{key}"
            if name in loaded:
                state[key] = copied(loaded[name])
