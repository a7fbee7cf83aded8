"""Reshard: move an optimizer's state between ranks, exactly, when the layout changes, and to ranks that save it.

Ranks first agree on the entries of every parameter's state (its *schema*), because a rank may own nothing of a
parameter so far. Then every overlap of an old and a new range travels, in batches, all entries of one overlap together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ddp_hooks.comm import Lanes, pairwise_exchange, shaped_like
from ddp_hooks.dear.layout.placement import ParameterRange, Placement, is_elementwise

State: TypeAlias = dict[str, Any]
# parameter -> entries; a dtype if element-wise
_Schema: TypeAlias = dict[int, dict[str, "torch.dtype | _WholeEntry"]]
_BATCH_BYTES = 4 << 20  # how much state is under way at a time


def move_states(
    states: dict[ParameterRange, State],
    old: Placement,
    new: Placement,
    lanes: Lanes,
    device: torch.device,  # of tensors that travel
    to: torch.device | None = None,  # of the result; None: the same
) -> dict[ParameterRange, State]:
    """Return the states of this rank's ranges under ``new``, given those of its ranges under ``old``; collective."""
    schema, to = _agree_on_schema(states, lanes), to or device
    moved: dict[ParameterRange, State] = {}
    for elements in new.ranges(lanes.rank):
        moved[elements] = {
            key: entry.on(to) if isinstance(entry, _WholeEntry) else torch.zeros(elements.numel, dtype=entry, device=to)
            for key, entry in schema.get(elements.parameter, {}).items()
        }
    for batch in _batches(_plan_moves(old, new, lanes.world_size), schema):
        _exchange(batch, schema, states, moved, lanes, device)
    return moved


def agree_on_entries(states: dict[ParameterRange, State], lanes: Lanes) -> dict[int, State]:
    """Return every parameter's entries, on all ranks: a ``torch.dtype`` for an element-wise one; collective."""
    schema = _agree_on_schema(states, lanes)
    return {
        parameter: {key: e.value if isinstance(e, _WholeEntry) else e for key, e in entries.items()}
        for parameter, entries in schema.items()
    }


class _WholeEntry(NamedTuple):
    """Entry that is not element-wise, such as a count of steps: it travels by way of the host."""

    value: Any
    on_device: bool

    def on(self, device: torch.device) -> Any:
        """Return a copy of the value: on ``device`` if it was on an accelerator, else on the host."""
        if isinstance(self.value, Tensor):
            return self.value.to(device if self.on_device else "cpu", copy=True)
        return self.value


class _Move(NamedTuple):
    """Elements ``[start, end)`` of a parameter that change hands (or stay)."""

    start: int
    end: int
    sender: int
    receiver: int
    old: ParameterRange
    new: ParameterRange

    def values_of(self, states: dict[ParameterRange, State], elements: ParameterRange, key: str) -> Tensor:
        values: Tensor = states[elements][key][self.start - elements.start : self.end - elements.start]
        return values.contiguous().view(torch.uint8)


def _agree_on_schema(states: dict[ParameterRange, State], lanes: Lanes) -> _Schema:
    """Return the entries of every parameter's state, also on ranks that own none of it so far."""
    mine: _Schema = {}
    for elements, state in states.items():
        entries = mine.setdefault(elements.parameter, {})
        for key, value in state.items():
            if is_elementwise(value, elements):
                entries[key] = value.dtype
            elif isinstance(value, Tensor):
                entries[key] = _WholeEntry(value.cpu(), value.device.type != "cpu")
            else:
                entries[key] = _WholeEntry(value, False)
    schema: _Schema = {}
    for part in lanes.gather_objects(mine, "an exchange of the optimizer's state"):
        for parameter, entries in part.items():
            schema.setdefault(parameter, {}).update(entries)
    return dict(sorted(schema.items()))


def _plan_moves(old: Placement, new: Placement, world_size: int) -> list[_Move]:
    """Return every overlap of an old and a new range, in the same order on every rank."""
    holders: dict[int, list[tuple[int, ParameterRange]]] = {}
    for rank in range(world_size):
        for elements in old.ranges(rank):
            holders.setdefault(elements.parameter, []).append((rank, elements))
    moves = []
    for receiver in range(world_size):
        for target in new.ranges(receiver):
            for sender, source in holders.get(target.parameter, []):
                start, end = max(source.start, target.start), min(source.end, target.end)
                if start < end:
                    moves.append(_Move(start, end, sender, receiver, source, target))
    return sorted(moves, key=lambda move: (move.new.parameter, move.start))


def _elementwise(schema: _Schema, parameter: int) -> dict[str, torch.dtype]:
    return {key: entry for key, entry in schema.get(parameter, {}).items() if isinstance(entry, torch.dtype)}


def _batches(moves: Iterable[_Move], schema: _Schema) -> Iterator[list[_Move]]:
    batch: list[_Move] = []
    nbytes = 0
    for move in moves:
        if move.new.parameter not in schema:
            continue
        batch.append(move)
        element_bytes = sum(dtype.itemsize for dtype in _elementwise(schema, move.new.parameter).values())
        nbytes += (move.end - move.start) * element_bytes
        if nbytes >= _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _exchange(
    batch: list[_Move],
    schema: _Schema,
    old: dict[ParameterRange, State],
    new: dict[ParameterRange, State],
    lanes: Lanes,
    device: torch.device,
) -> None:
    """Send and receive the elements of one batch of moves, all keys of a move together, as bytes."""
    rank, world_size = lanes.rank, lanes.world_size
    outgoing: list[list[Tensor]] = [[] for _ in range(world_size)]
    targets: list[list[Tensor]] = [[] for _ in range(world_size)]
    for move in batch:
        for key in _elementwise(schema, move.new.parameter):
            if move.sender == rank:
                outgoing[move.receiver].append(move.values_of(old, move.old, key))
            if move.receiver == rank:
                targets[move.sender].append(move.values_of(new, move.new, key))
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    sends = [torch.cat([p.to(device) for p in tensors]) if tensors else empty for tensors in outgoing]
    sizes = [sum(target.numel() for target in tensors) for tensors in targets]
    receives = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    receives[rank] = sends[rank]
    lanes.run(pairwise_exchange(sends, receives, rank), "optimizer state").wait()
    for received, tensors in zip(receives, targets, strict=True):
        for target, values in zip(tensors, received.split([t.numel() for t in tensors]), strict=True):
            target.copy_(values)


def shaped_state(index: int, parameter: Tensor, state: State) -> State:
    """Return the state of a whole parameter with every element-wise entry in its shape."""
    whole = ParameterRange(index, 0, parameter.numel())
    return {k: shaped_like(parameter, v) if is_elementwise(v, whole) else v for k, v in state.items()}
