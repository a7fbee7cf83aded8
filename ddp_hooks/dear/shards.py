"""The user's optimizer, stepping on this rank's shard of every parameter.

The optimizer's parameter groups keep their order and settings; each parameter in them is replaced by views of the
pieces that this rank owns. What the optimizer knows of a parameter moves with it: from whole tensors to shards when
sharding begins, and between ranks when DDP rebuilds its buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import Lanes
from ddp_hooks.dear.guard import GradientGuard
from ddp_hooks.dear.layout import Interval, Layout
from ddp_hooks.dear.moves import Placement, State, WholeOn, copied, is_elementwise, move_states
from ddp_hooks.dear.pending import PendingGradient
from ddp_hooks.dear.storage import in_order_of

GRADIENT_KEY = "ddp_hooks.gradient"  # a gradient kept from an earlier backward travels like optimizer state


@dataclass
class Shard:
    """One piece of one parameter, owned by this rank."""

    interval: Interval
    atom: int
    offset: int  # where the piece starts in its atom
    tensor: torch.nn.Parameter  # (interval length,), a view of the parameter's memory
    guard: GradientGuard  # stands for its gradient between backward and step
    reduced: Tensor | None = None  # its gradient, while a guard stands for it although it is reduced
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
        self._device = parameters[0].device
        self.numels = tuple(parameter.numel() for parameter in parameters)
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._early: tuple[Placement, dict[Interval, State]] | None = None  # loaded before there were shards
        self.slots = OptimizerSlots()
        for group in optimizer.param_groups:
            self.slots.groups.append([index_of.get(id(p), p) for p in group["params"]])
            self.slots.names.append(group.get("param_names"))

    def take_states(self, layout: Layout | None, new_layout: Layout) -> dict[Interval, State]:
        """Remove all state from the optimizer; returns it for this rank's intervals under ``new_layout``.

        Collective if ``layout``, the one in force so far, is not None. Afterwards the optimizer's groups hold no
        parameter of ours until :meth:`install`.
        """
        if len(self._optimizer.param_groups) != len(self.slots.groups):
            raise RuntimeError(
                f"the optimizer had {len(self.slots.groups)} param_groups when DearState was created and has "
                f"{len(self._optimizer.param_groups)} now: add them before"
            )
        wanted = new_layout.intervals(self._lanes.rank)
        if layout is not None or self._early is not None:
            placement, held = self.held_states(layout)
            for shard in self.shards:
                self._optimizer.state.pop(shard.tensor, None)
                if shard.tensor.grad is not None:
                    held[shard.interval] = {**held[shard.interval], GRADIENT_KEY: shard.tensor.grad}
            states = move_states(held, placement, new_layout, self._lanes, self._device, to=self._device)
            self._early = None
        else:
            states = dict(self._cut_whole_states(wanted))
        for group, slots in zip(self._optimizer.param_groups, self.slots.groups, strict=True):
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

    def drop_gradients(self) -> None:
        """Leave the optimizer without any gradient, also of parameters that are not ours: it updates nothing then."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _fill_groups(self, of_parameter: dict[int, list[Shard]]) -> None:
        for group, slots, names in zip(
            self._optimizer.param_groups, self.slots.groups, self.slots.names, strict=True
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
                yield interval, {key: cut_entry(key, value, parameter, interval) for key, value in whole.items()}

    def gather_states(self, layout: Layout | None, ranks: Sequence[int]) -> dict[int, State]:
        """The whole state of every parameter, on the CPU of the ranks in ``ranks``; collective.

        Returns:
            By parameter; entries with one value per element are 1-D, in the parameter's storage order.
        """
        placement, states = self.held_states(layout)
        everything = WholeOn(tuple(ranks), self.numels)
        whole = move_states(states, placement, everything, self._lanes, self._device, to=torch.device("cpu"))
        return {interval.parameter: state for interval, state in whole.items() if state}

    def held_states(self, layout: Layout | None) -> tuple[Placement, dict[Interval, State]]:
        """What this rank holds, and how state is spread over the ranks."""
        if self._early is not None:
            placement, states = self._early
            return placement, dict(states)
        assert layout is not None
        return layout, {shard.interval: self._optimizer.state.get(shard.tensor, {}) for shard in self.shards}

    def set_states(self, placement: Placement, states: dict[Interval, State]) -> None:
        """Take this rank's states under ``placement``, to which shards will be moved as soon as there are any."""
        for parameter in self._parameters:
            self._optimizer.state.pop(parameter, None)
        states = {interval: self._on_device(interval, state) for interval, state in states.items()}
        if not self.shards_of_atom:
            self._early = placement, states
            return
        for shard in self.shards:
            state = states.get(shard.interval)
            self._optimizer.state.pop(shard.tensor, None)
            if state:
                self._optimizer.state[shard.tensor] = state

    def _on_device(self, interval: Interval, state: State) -> State:
        """A loaded state where the optimizer expects it, as ``torch.optim.Optimizer.load_state_dict`` has it."""
        slots = zip(self._optimizer.param_groups, self.slots.groups, strict=True)
        group = next(group for group, slot in slots if interval.parameter in [s for s in slot if isinstance(s, int)])
        counts_on_device = bool(group.get("capturable") or group.get("fused"))
        return {
            key: value.to(self._device)
            if is_elementwise(value, interval) or (isinstance(value, Tensor) and counts_on_device)
            else value
            for key, value in state.items()
        }

    def drop_early_states(self) -> None:
        """Something else was loaded."""
        self._early = None

    @property
    def has_early_states(self) -> bool:
        """Whether state was loaded for which there are no shards yet."""
        return self._early is not None


def cut_entry(key: str, value: Any, parameter: Tensor, interval: Interval) -> Any:
    """One entry of a parameter's whole state, for the piece of the parameter that is ``interval``."""
    # Adam's step count of a scalar parameter has the parameter's own shape, but counts steps.
    is_count = key == "step" and parameter.dim() == 0
    if isinstance(value, Tensor) and value.shape == parameter.shape and not is_count:
        return in_order_of(value, parameter)[interval.start : interval.end].clone()
    return copied(value)
