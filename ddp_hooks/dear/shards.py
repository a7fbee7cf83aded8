"""The user's optimizer, stepping on this rank's shard of every parameter.

The optimizer's parameter groups keep their order and settings; each parameter in them is replaced by views of the
pieces that this rank owns. What the optimizer knows of a parameter moves with it: from whole tensors to shards when
sharding begins, and between ranks when DDP rebuilds its buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import Lanes, pairwise_exchange
from ddp_hooks.dear.guard import GradientGuard
from ddp_hooks.dear.layout import Interval, Layout
from ddp_hooks.dear.pending import PendingGradient
from ddp_hooks.dear.storage import in_order_of

State: TypeAlias = dict[str, Any]
GRADIENT_KEY = "ddp_hooks.gradient"  # a gradient kept from an earlier backward travels like optimizer state
_BATCH_BYTES = 4 << 20  # how much state is under way at a time when it moves between ranks


@dataclass
class Shard:
    """One piece of one parameter, owned by this rank."""

    interval: Interval
    atom: int
    offset: int  # where the piece starts in its atom
    tensor: torch.nn.Parameter  # (interval length,), a view of the parameter's memory
    guard: GradientGuard  # stands for its gradient between backward and step
    base: Tensor | None = None  # gradient of earlier backward passes, while a newer one is being reduced


@dataclass
class OptimizerSlots:
    """Which parameters each of the optimizer's groups held, so that groups can be filled again."""

    groups: list[list[int | Tensor]] = field(default_factory=list)  # our parameters by index, others as they are
    names: list[list[str] | None] = field(default_factory=list)


class ShardedOptimizer:
    """Replaces an optimizer's parameters by shards and moves its state; changes the optimizer in place.

    Args:
        optimizer: any element-wise optimizer.
        parameters: the parameters that are reduced, in a fixed order.
        names: their names, for messages.
        lanes: for moving state between ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        lanes: Lanes,
    ) -> None:
        self.shards: list[Shard] = []
        self.shards_of_atom: list[list[Shard]] = []
        self._optimizer = optimizer
        self._parameters = parameters
        self._names = names
        self._lanes = lanes
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._slots = OptimizerSlots()
        for group in optimizer.param_groups:
            self._slots.groups.append([index_of.get(id(p), p) for p in group["params"]])
            self._slots.names.append(group.get("param_names"))

    def take_states(self, layout: Layout | None, new_layout: Layout) -> dict[Interval, State]:
        """Remove all state from the optimizer; returns it for this rank's intervals under ``new_layout``.

        Collective if ``layout``, the one in force so far, is not None. Afterwards the optimizer's groups hold no
        parameter of ours until :meth:`install`.
        """
        if len(self._optimizer.param_groups) != len(self._slots.groups):
            raise RuntimeError(
                f"the optimizer had {len(self._slots.groups)} param_groups when DearState was created and has "
                f"{len(self._optimizer.param_groups)} now: add them before"
            )
        wanted = new_layout.intervals(self._lanes.rank)
        states = dict(self._cut_whole_states(wanted)) if layout is None else self._move_states(layout, new_layout)
        for group, slots in zip(self._optimizer.param_groups, self._slots.groups, strict=True):
            group["params"] = [slot for slot in slots if isinstance(slot, Tensor)]
        self.shards, self.shards_of_atom = [], []
        return states

    def install(self, layout: Layout, flats: Sequence[Tensor], states: dict[Interval, State]) -> None:
        """Make the shards of ``layout`` on the atoms' memory ``flats`` and give them their state."""
        self.shards_of_atom = [[] for _ in layout.atoms]
        of_parameter: dict[int, list[Shard]] = {}
        for atom_index, (parameter, start, end, offset) in layout.owned(self._lanes.rank):
            interval = Interval(parameter, start, end)
            tensor = torch.nn.Parameter(flats[atom_index][offset : offset + end - start])
            guard = GradientGuard.standing_for(tensor, self._names[parameter])
            shard = Shard(interval, atom_index, offset, tensor, guard)
            state = states.get(interval, {})
            shard.tensor.grad = state.pop(GRADIENT_KEY, None)
            if state:
                self._optimizer.state[shard.tensor] = state
            self.shards.append(shard)
            self.shards_of_atom[atom_index].append(shard)
            of_parameter.setdefault(parameter, []).append(shard)
        self._fill_groups(of_parameter)

    def defer_gradients(self, atom: int, settle: Callable[[], None]) -> None:
        """Let whoever uses a gradient of the atom's shards call ``settle`` first."""
        for shard in self.shards_of_atom[atom]:
            if shard.tensor.grad is not None:
                shard.tensor.grad = PendingGradient.of(shard.tensor.grad, settle)

    def resolve_gradients(self) -> None:
        """Put plain gradients in the place of deferred ones, which must be settled."""
        for shard in self.shards:
            if isinstance(shard.tensor.grad, PendingGradient):
                shard.tensor.grad = shard.tensor.grad.plain

    def _fill_groups(self, of_parameter: dict[int, list[Shard]]) -> None:
        for group, slots, names in zip(
            self._optimizer.param_groups, self._slots.groups, self._slots.names, strict=True
        ):
            others = [(-1, slot, position) for position, slot in enumerate(slots) if isinstance(slot, Tensor)]
            ours = [
                (shard.atom, shard.tensor, position)
                for position, slot in enumerate(slots)
                if isinstance(slot, int)
                for shard in of_parameter.get(slot, [])
            ]
            # In the order in which gradients arrive, so that the optimizer can begin before the last has.
            entries = others + sorted(ours, key=lambda entry: entry[0])
            group["params"] = [tensor for _, tensor, _ in entries]
            if names is not None:
                group["param_names"] = [f"{names[position]}.{i}" for i, (_, _, position) in enumerate(entries)]

    def _cut_whole_states(self, wanted: Iterable[Interval]) -> Iterator[tuple[Interval, State]]:
        by_parameter: dict[int, list[Interval]] = {}
        for interval in wanted:
            by_parameter.setdefault(interval.parameter, []).append(interval)
        for index, parameter in enumerate(self._parameters):
            whole = self._optimizer.state.pop(parameter, {})
            for interval in by_parameter.get(index, []):
                yield interval, {key: _cut(key, value, parameter, interval) for key, value in whole.items()}

    def _move_states(self, layout: Layout, new_layout: Layout) -> dict[Interval, State]:
        rank, world_size = self._lanes.rank, self._lanes.world_size
        old: dict[Interval, State] = {}
        for shard in self.shards:
            old[shard.interval] = self._optimizer.state.pop(shard.tensor, {})
            if shard.tensor.grad is not None:
                old[shard.interval][GRADIENT_KEY] = shard.tensor.grad
        schema = _agree_on_schema(old, self._lanes.group)
        moves = _plan_moves(layout, new_layout, world_size)
        new: dict[Interval, State] = {}
        for interval in new_layout.intervals(rank):
            keys, others = schema.get(interval.parameter, ({}, {}))
            length = interval.end - interval.start
            device = self._parameters[interval.parameter].device
            new[interval] = {key: torch.zeros(length, dtype=dtype, device=device) for key, dtype in keys.items()}
            new[interval].update({key: _copied(value) for key, value in others.items()})
        for batch in _batches(moves, schema):
            self._exchange(batch, schema, old, new)
        return new

    def _exchange(
        self,
        batch: list[_Move],
        schema: _Schema,
        old: dict[Interval, State],
        new: dict[Interval, State],
    ) -> None:
        """Send and receive the elements of one batch of moves, all keys of a move together, as bytes."""
        rank, world_size = self._lanes.rank, self._lanes.world_size
        device = self._parameters[0].device
        outgoing: list[list[Tensor]] = [[] for _ in range(world_size)]
        targets: list[list[Tensor]] = [[] for _ in range(world_size)]
        for move in batch:
            for key in schema[move.parameter][0]:
                if move.sender == rank:
                    outgoing[move.receiver].append(_bytes_of(_piece(old, move, move.old, key)))
                if move.receiver == rank:
                    targets[move.sender].append(_bytes_of(_piece(new, move, move.new, key)))
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        sends = [torch.cat(pieces) if pieces else empty for pieces in outgoing]
        sizes = [sum(target.numel() for target in pieces) for pieces in targets]
        receives = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        receives[rank] = sends[rank]
        self._lanes.run(pairwise_exchange(sends, receives, rank), "optimizer state").wait()
        for received, pieces in zip(receives, targets, strict=True):
            for target, values in zip(pieces, received.split([t.numel() for t in pieces]), strict=True):
                target.copy_(values)


@dataclass(frozen=True)
class _Move:
    """Elements ``[start, end)`` of a parameter change hands (or stay)."""

    parameter: int
    start: int
    end: int
    sender: int
    receiver: int
    old: Interval
    new: Interval


_Schema: TypeAlias = dict[int, tuple[dict[str, torch.dtype], dict[str, Any]]]  # parameter -> element-wise, others


def _cut(key: str, value: Any, parameter: Tensor, interval: Interval) -> Any:
    # Adam's step count of a scalar parameter has the parameter's own shape, but counts steps.
    is_count = key == "step" and parameter.dim() == 0
    if isinstance(value, Tensor) and value.shape == parameter.shape and not is_count:
        return in_order_of(value, parameter)[interval.start : interval.end].clone()
    return _copied(value)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _is_elementwise(value: Any, interval: Interval) -> bool:
    return isinstance(value, Tensor) and value.shape == (interval.end - interval.start,)


def _agree_on_schema(states: dict[Interval, State], group: dist.ProcessGroup) -> _Schema:
    """What every parameter's state consists of, also for ranks that own none of it so far."""
    mine: _Schema = {}
    for interval, state in states.items():
        keys = {key: value.dtype for key, value in state.items() if _is_elementwise(value, interval)}
        others = {key: value for key, value in state.items() if key not in keys}
        known_keys, known_others = mine.setdefault(interval.parameter, ({}, {}))
        known_keys.update(keys)
        known_others.update(others)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    schema: _Schema = {}
    for part in gathered:
        for parameter, (keys, others) in part.items():
            known_keys, known_others = schema.setdefault(parameter, ({}, {}))
            known_keys.update(keys)
            known_others.update(others)
    return {parameter: schema[parameter] for parameter in sorted(schema)}


def _plan_moves(layout: Layout, new_layout: Layout, world_size: int) -> list[_Move]:
    """Every overlap of an old and a new interval, in the same order on every rank."""
    holders: dict[int, list[tuple[int, Interval]]] = {}
    for rank in range(world_size):
        for interval in layout.intervals(rank):
            holders.setdefault(interval.parameter, []).append((rank, interval))
    moves = []
    for receiver in range(world_size):
        for new in new_layout.intervals(receiver):
            for sender, old in holders.get(new.parameter, []):
                start, end = max(old.start, new.start), min(old.end, new.end)
                if start < end:
                    moves.append(_Move(new.parameter, start, end, sender, receiver, old, new))
    return sorted(moves, key=lambda move: (move.parameter, move.start))


def _batches(moves: Iterable[_Move], schema: _Schema) -> Iterator[list[_Move]]:
    batch: list[_Move] = []
    nbytes = 0
    for move in moves:
        if move.parameter not in schema:
            continue
        batch.append(move)
        nbytes += (move.end - move.start) * sum(dtype.itemsize for dtype in schema[move.parameter][0].values())
        if nbytes >= _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _piece(states: dict[Interval, State], move: _Move, interval: Interval, key: str) -> Tensor:
    values: Tensor = states[interval][key]
    return values[move.start - interval.start : move.end - interval.start]


def _bytes_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)
