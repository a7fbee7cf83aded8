"""The user's optimizer, stepping on this rank's shard of every parameter.

The optimizer's parameter groups keep their order and settings; each parameter in them is replaced by views of the
pieces that this rank owns. What the optimizer knows of a parameter moves with it: from whole tensors to shards when
sharding begins, and between ranks when DDP rebuilds its buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import Lanes, in_order_of
from ddp_hooks.dear.layout import Interval, Layout
from ddp_hooks.dear.moves import Placement, State, WholeOn, is_elementwise, move_states
from ddp_hooks.dear.pieces import Even
from ddp_hooks.dear.shards import GRADIENT_KEY, MASTER_KEY, Shard, ShardSet
from ddp_hooks.feed import copied


class ShardedOptimizer(ShardSet):
    """Replaces an optimizer's parameters by shards and moves its state; changes the optimizer in place.

    Args:
        optimizer, parameters, names, lanes: as for :class:`~ddp_hooks.dear.shards.ShardSet`; the optimizer is
            element-wise.
        master_dtype: let the optimizer step on copies of the shards in this type, and round them to the parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        lanes: Lanes,
        master_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(optimizer, parameters, names, lanes)
        self._master_dtype = master_dtype
        self._early: tuple[Placement, dict[Interval, State]] | None = None  # loaded before there were shards

    def take_states(self, layout: Layout | None, new_layout: Layout) -> dict[Interval, State]:
        """Remove all state from the optimizer; returns it for this rank's intervals under ``new_layout``.

        Collective if ``layout``, the one in force so far, is not None. Afterwards the optimizer's groups hold no
        parameter of ours until :meth:`install`.
        """
        self.refuse_new_groups()
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
        """Make the shards of ``layout`` on the atoms' memory ``flats``; hand them to the optimizer with their state."""
        super().install(layout, flats, states)
        of_parameter: dict[int, list[Shard]] = {}
        for shard in self.shards:
            of_parameter.setdefault(shard.interval.parameter, []).append(shard)
            state = states.get(shard.interval)
            if state and shard.rounded is not None:  # it may come from a run without masters
                state = {key: _as_precise_as(shard, value) for key, value in state.items()}
            if state:
                self._optimizer.state[shard.tensor] = state
        self._fill_groups(of_parameter)

    # -- masters ----------------------------------------------------------------------------------------------------

    def _tensor_for(self, view: Tensor, state: State) -> Tensor:
        kept: Tensor | None = state.pop(MASTER_KEY, None)  # also where it came from a run with masters, to one without
        precise = self._dtype_of(view)
        if precise == view.dtype:
            return view
        master = view.to(precise)
        if kept is not None:
            _keep_where_it_rounds_to(view, kept.to(master), master)
        return master

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        if self._master_dtype is None:
            return parameter.dtype
        return torch.promote_types(parameter.dtype, self._master_dtype)

    @torch.no_grad()
    def read_masters(self) -> None:
        """Where somebody has written into the parameters, or loaded them, the masters follow."""
        for shard in self.shards:
            if shard.rounded is not None:
                written = shard.rounded.to(shard.tensor.dtype)
                _keep_where_it_rounds_to(shard.rounded, shard.tensor.data, written)
                shard.tensor.copy_(written)

    @torch.no_grad()
    def write_masters(self) -> None:
        """Round the masters into the parameters."""
        for shard in self.shards:
            if shard.rounded is not None:
                shard.rounded.copy_(shard.tensor)

    @torch.no_grad()
    def adopt_loaded_masters(self) -> None:
        """Masters that came with the optimizer's state go where they belong."""
        for shard in self.shards:
            master = self._optimizer.state.get(shard.tensor, {}).pop(MASTER_KEY, None)
            if master is not None and shard.rounded is not None:
                shard.tensor.copy_(master)

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer steps on copies."""
        return self._master_dtype is not None

    # -- the optimizer's groups and state ---------------------------------------------------------------------------

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
        self.read_masters()
        states = {shard.interval: dict(self._optimizer.state.get(shard.tensor, {})) for shard in self.shards}
        for shard in self.shards:
            if shard.rounded is not None:
                states[shard.interval][MASTER_KEY] = shard.tensor.detach()
        return layout, states

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
        self.adopt_loaded_masters()

    def drop_early_states(self) -> None:
        """Something else was loaded."""
        self._early = None

    @property
    def is_whole(self) -> bool:
        """Until the first step, unless state came in pieces."""
        return not self.shards_of_atom and self._early is None

    def placement(self, layout: Layout | None) -> Placement:
        """Spread evenly until there are shards."""
        return layout or Even(self.numels, self._lanes.world_size)


def _as_precise_as(shard: Shard, value: Any) -> Any:
    convert = is_elementwise(value, shard.interval) and value.is_floating_point()
    return value.to(shard.tensor.dtype) if convert else value


def _keep_where_it_rounds_to(rounded: Tensor, master: Tensor, values: Tensor) -> None:
    """Copy ``master`` into ``values`` wherever it rounds to ``rounded``, that is, still means the same."""
    torch.where(master.to(rounded.dtype) == rounded, master, values, out=values)


def cut_entry(key: str, value: Any, parameter: Tensor, interval: Interval) -> Any:
    """One entry of a parameter's whole state, for the piece of the parameter that is ``interval``."""
    # Adam's step count of a scalar parameter has the parameter's own shape, but counts steps.
    is_count = key == "step" and parameter.dim() == 0
    if isinstance(value, Tensor) and value.shape == parameter.shape and not is_count:
        return in_order_of(value, parameter)[interval.start : interval.end].clone()
    return copied(value)
