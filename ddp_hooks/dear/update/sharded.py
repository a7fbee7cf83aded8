"""Sharded updates: the user's optimizer steps on this rank's shard of every parameter.

Inside of ``optimizer.step()`` the parameter groups hold shards, views of the ranges that this rank owns, in the place
of parameters, with unchanged order and settings, and ``optimizer.state`` is that of shards. Outside the groups hold the
model's parameters, as in plain DDP, so that averages, norms and copies are those of whole parameters, and
``optimizer.state`` is a :class:`~ddp_hooks.dear.update.spread_state.SpreadState`.

The optimizer's state of a parameter moves with it: from whole tensors to shards when sharding begins, and between
ranks when DDP rebuilds its buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import CodecName, Lanes, in_order_of, see
from ddp_hooks.dear.checkpoint.reshard import State, agree_on_entries, move_states, shaped_state
from ddp_hooks.dear.layout.memory import ManagedParameters
from ddp_hooks.dear.layout.placement import (
    GRADIENT_KEY,
    MASTER_KEY,
    SHOWN_KEY,
    EvenSplit,
    Layout,
    ParameterRange,
    Placement,
    Replicated,
    Shard,
    is_elementwise,
)
from ddp_hooks.dear.reduction.shard_gradients import ShardGradients
from ddp_hooks.dear.update.base import Update
from ddp_hooks.dear.update.differences import ParameterDifferences
from ddp_hooks.dear.update.spread_state import SpreadState, cut_state
from ddp_hooks.intercept import ELEMENTWISE
from ddp_hooks.overlap import take_back


class ShardedUpdate(Update):
    """Replaces an optimizer's parameters by shards and moves its state; changes the optimizer in place."""

    gathers_gradients = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: ManagedParameters,
        lanes: Lanes,
        master_dtype: torch.dtype | None,  # let the optimizer step on copies of this type; None: on the parameters
        rounds_to: CodecName | None = None,  # gathers move differences in this code
    ) -> None:
        super().__init__(optimizer, parameters, lanes)
        self.waits_one_by_one = type(optimizer) in ELEMENTWISE  # they read one gradient after the other
        self.gathers_under_forward = lanes.world_size > 1  # one rank has everything
        self._differences: ParameterDifferences | None = None
        if rounds_to is not None and lanes.world_size > 1:
            self._differences = ParameterDifferences(rounds_to, master_dtype, lanes.rank)
        self.has_masters = master_dtype is not None or self._differences is not None
        self._master_dtype = master_dtype
        self._even_split = EvenSplit(parameters.numels, lanes.world_size)
        self._state = SpreadState(parameters, self.shards, self._even_split)
        self._groups_outside: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        self._groups_inside: list[list[Tensor]] = []
        self._blank: dict[ParameterRange, Tensor] = {}  # for which a blank step makes a state
        self._is_inside = False  # the groups hold shards

    # -- inside and outside of a step -------------------------------------------------------------------------------

    def take_gradients(self, gradients: ShardGradients, bucket_views: Sequence[Tensor], may_wait: bool) -> None:
        if may_wait:
            gradients.defer()
        else:
            gradients.wait()

    def begin_step(self, gradients: ShardGradients, from_last_backward: bool) -> None:
        self.begin_skipped_step()

    def begin_skipped_step(self) -> None:
        self._read_masters()
        self._enter()

    @torch.no_grad()
    def end_step(self, gradients: ShardGradients) -> Sequence[Tensor] | None:
        gradients.wait()
        self.take_back_memory()
        for shard in self._masters:
            if shard.shown is None:
                shard.memory.copy_(shard.tensor)
        return self._parameters.flats if self.gathers_under_forward else None

    def take_back_memory(self) -> None:
        for shard in self.shards:
            if not shard.is_master and shard.tensor.data_ptr() != shard.memory.data_ptr():
                take_back(shard.tensor, shard.memory, self._state.own.get(shard.tensor))
                shard.tensor.data = shard.memory

    def _enter(self) -> None:
        """Give the optimizer the shards and their state."""
        if self._is_inside or self._layout is None:
            return
        self._refuse_new_groups()
        for group, params in zip(self._optimizer.param_groups, self._groups_outside, strict=True):
            if [id(parameter) for parameter in group["params"]] != [id(parameter) for parameter in params]:
                raise RuntimeError(
                    "the optimizer's param_groups do not hold the parameters that they held when DearState was "
                    f"created: change them before, or wrap the model again{see('set-up-changed-later')}"
                )
        self._begin_anew_if_assigned()
        self._state.take_written()
        self._state.forget_shown()
        self._put_into_groups(self._groups_inside, self._state.own)
        self._is_inside = True

    def leave(self) -> None:
        if self._is_inside:
            self._state.own = self._optimizer.state
            self._keep_blank()
            self._put_into_groups(self._groups_outside, self._state.own if self.is_whole else self._state)
            self._is_inside = False

    def _put_into_groups(self, groups: list[list[Tensor]], state: Any) -> None:
        for group, params in zip(self._optimizer.param_groups, groups, strict=True):
            group["params"] = list(params)
        self._optimizer.state = state

    def _show_state(self) -> None:
        self._optimizer.state = self._state  # type: ignore[assignment]

    def _begin_anew_if_assigned(self) -> None:
        """Take an empty ``optimizer.state`` that the user has assigned; refuse any other."""
        if self._optimizer.state is self._state:
            return
        if self._optimizer.state:
            self._show_state()
            raise RuntimeError(
                "optimizer.state was replaced, and every rank holds its own shards of it: load a whole state with "
                f"optimizer.load_state_dict() on all ranks{see('optimizer-state-is-sharded')}"
            )
        self._state.forget_shown()
        self._state.own = defaultdict(dict)

    # -- layouts ----------------------------------------------------------------------------------------------------

    def spread_states(self) -> dict[int, State]:
        """Return every parameter's state, with a :class:`SpreadTensor` for each element-wise entry; collective."""
        _, held = self.held_states()
        by_parameter: dict[int, dict[ParameterRange, State]] = {}
        for elements, state in held.items():
            by_parameter.setdefault(elements.parameter, {})[elements] = state
        entries = agree_on_entries(held, self._lanes)
        return {i: self._state.spread(i, by_parameter.get(i, {}), kinds) for i, kinds in entries.items()}

    def take_states(self, new_layout: Layout) -> dict[ParameterRange, State]:
        self.leave()
        self._refuse_new_groups()
        if self._layout is not None or self._state.pending is not None:
            placement, held = self.held_states()
            for shard in self.shards:
                self._state.own.pop(shard.tensor, None)
                if shard.tensor.grad is not None:
                    held[shard.range] = {**held[shard.range], GRADIENT_KEY: shard.tensor.grad}
            states = move_states(held, placement, new_layout, self._lanes, self._parameters.device)
            self._state.pending = None
        else:
            self._state.own, states = self._optimizer.state, {}
            ranges = new_layout.ranges(self._lanes.rank)
            for index, parameter in enumerate(self._parameters.tensors):
                whole = self._state.own.pop(parameter, None)
                if whole:
                    states.update({e: cut_state(whole, parameter, e) for e in ranges if e.parameter == index})
        self.shards.of_atom = []
        self._layout = None
        return states

    def install(self, layout: Layout, states: dict[ParameterRange, State]) -> None:
        if self._differences is not None:
            self._differences.install(layout, self._parameters.flats)
            self.wires = self._differences.wires
        super().install(layout, states)
        self._state.placement = layout
        for shard in self.shards:
            state = states.get(shard.range)
            if state and shard.is_master:  # it may come from a run without masters
                dtype = shard.tensor.dtype
                rounded = {k: v for k, v in state.items() if is_elementwise(v, shard.range) and v.is_floating_point()}
                state = {**state, **{key: value.to(dtype) for key, value in rounded.items()}}
            if state:
                self._state.own[shard.tensor] = state
        # In the order in which gradients arrive, so that the optimizer can begin before the last has.
        self._groups_inside = self._groups_of({shard.range: shard.tensor for shard in self.shards})
        self._show_state()

    def _groups_of(self, parts: Mapping[ParameterRange, Tensor]) -> list[list[Tensor]]:
        """Return the optimizer's groups with these parts in the place of our parameters; other ones come first."""
        groups = []
        for slots in self.slots:
            others, ours = [s for s in slots if isinstance(s, Tensor)], {s for s in slots if isinstance(s, int)}
            groups.append(others + [part for elements, part in parts.items() if elements.parameter in ours])
        return groups

    # -- a state without a step -------------------------------------------------------------------------------------

    def begin_blank_step(self) -> None:
        if self._layout is not None:
            has_state = any(self._state.by_range().values())
            for shard in self.shards:
                shard.tensor.grad = None if has_state else torch.zeros_like(shard.tensor)
            self._enter()
            return
        ranges = [] if self._state.pending is not None else self._even_split.ranges(self._lanes.rank)
        for elements in ranges:  # every rank makes its part, in copies that may be written
            parameter = self._parameters.tensors[elements.parameter]
            part = in_order_of(parameter.detach(), parameter)[elements.start : elements.end]
            tensor = torch.nn.Parameter(part.to(self._dtype_of(parameter), copy=True))
            tensor.grad = torch.zeros_like(tensor)
            self._blank[elements] = tensor
        if self._state.pending is None:
            self._state.own = self._optimizer.state
        self._put_into_groups(self._groups_of(self._blank), self._state.own)
        self._is_inside = True

    def _keep_blank(self) -> None:
        """Keep the state that a blank step has made, spread evenly, until there is a layout."""
        made = {elements: self._state.own.pop(tensor, {}) for elements, tensor in self._blank.items()}
        if any(made.values()) or (made and self.has_masters):
            for elements, state in made.items():
                if self.has_masters:
                    state[MASTER_KEY] = self._blank[elements].detach()
            self._state.pending = self._even_split, made
        self._blank = {}

    # -- masters ----------------------------------------------------------------------------------------------------

    def _tensor_for(self, atom: int, offset: int, view: Tensor, state: State) -> tuple[Tensor, Tensor | None]:
        kept: Tensor | None = state.pop(MASTER_KEY, None)  # also where it came from a run with masters, to one without
        belongs_to: Tensor | None = state.pop(SHOWN_KEY, None)
        found = self._differences.of_range(atom, offset, view.numel()) if self._differences is not None else None
        if found is None and self._dtype_of(view) == view.dtype:
            return view, None
        master, shown = found or (view.to(self._dtype_of(view)), None)
        if kept is not None:
            kept = kept.to(master)
            _keep_where(kept.to(view.dtype) if belongs_to is None else belongs_to, view, kept, master)
        return master, shown

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        if self._master_dtype is None:
            return parameter.dtype
        return torch.promote_types(parameter.dtype, self._master_dtype)

    @property
    def _masters(self) -> list[Shard]:
        return [shard for shard in self.shards if shard.is_master] if self.has_masters else []

    @torch.no_grad()
    def _read_masters(self) -> None:
        """Let masters follow where code has written into the parameters, or loaded them."""
        for shard in self._masters:
            if shard.shown is None:
                shard.tensor.copy_(_followed(shard, _belongs_to(shard)))
            elif not torch.equal(shard.shown, shard.memory):
                shard.tensor.copy_(_followed(shard, shard.shown))
                shard.shown.copy_(shard.memory)

    @torch.no_grad()
    def _state_of_master(self, shard: Shard) -> State:
        """Return what :meth:`_read_masters` would leave: in copies, for parameters may be written back after a save."""
        master, belongs_to = shard.tensor.detach(), _belongs_to(shard)
        if not torch.equal(belongs_to, shard.memory):
            master, belongs_to = _followed(shard, belongs_to), shard.memory.clone()
        return {MASTER_KEY: master} | ({SHOWN_KEY: belongs_to} if shard.shown is not None else {})

    @torch.no_grad()
    def adopt_loaded_masters(self) -> None:
        for shard in self.shards:
            state = self._state.own.get(shard.tensor, {})
            master, shown = state.pop(MASTER_KEY, None), state.pop(SHOWN_KEY, None)
            if master is not None and shard.is_master:
                shard.tensor.copy_(master)
                if shard.shown is not None:
                    shard.shown.copy_(master if shown is None else shown)

    # -- the optimizer's state --------------------------------------------------------------------------------------

    def gather_states(self, ranks: Sequence[int]) -> dict[int, State]:
        """Return every parameter's whole state, in its shape, on the CPU of the ranks in ``ranks``; collective."""
        placement, states = self.held_states()
        everything = Replicated(tuple(ranks), self._parameters.numels)
        whole = move_states(states, placement, everything, self._lanes, self._parameters.device, torch.device("cpu"))
        tensors = self._parameters.tensors
        return {i: shaped_state(i, tensors[i], state) for (i, _, _), state in whole.items() if state}

    def held_states(self) -> tuple[Placement, dict[ParameterRange, State]]:
        """Return how state is spread over the ranks, and the state that this rank holds."""
        self._state.take_written()
        if self._state.pending is not None:
            placement, states = self._state.pending
            return placement, dict(states)
        assert self._layout is not None
        if not self._is_inside:
            self._begin_anew_if_assigned()
        states = {shard.range: dict(self._state.own.get(shard.tensor, {})) for shard in self.shards}
        for shard in self._masters:
            states[shard.range] |= self._state_of_master(shard)
        return self._layout, states

    def set_states(self, placement: Placement, states: dict[ParameterRange, State]) -> None:
        self._state.forget_shown()
        states = {elements: self._on_device(elements, state) for elements, state in states.items()}
        if self._optimizer.state is not self._state:  # torch has loaded what is not ours
            self._state.own = self._optimizer.state
        keys = [key for key in self._state.others() if self._parameters.index_of(key) is None]
        others = defaultdict(dict, {key: self._state.own[key] for key in keys})
        if self._layout is None:
            self._state.pending, self._state.own = (placement, states), others  # until there are shards
            self._show_state()
            return
        if placement != self._layout:
            states = move_states(states, placement, self._layout, self._lanes, self._parameters.device)
        for shard in self.shards:
            if states.get(shard.range):
                others[shard.tensor] = states[shard.range]
        self._state.own = others
        self._show_state()
        self._enter()
        try:  # as torch does when it loads: an optimizer may bring a state of earlier versions up to date
            self._optimizer.__setstate__({"state": self._state.own, "param_groups": self._optimizer.param_groups})
        finally:
            self.leave()
        self.adopt_loaded_masters()

    def drop_pending_states(self) -> None:
        if self._state.pending is not None:
            self._state.pending = None
            self._optimizer.state = self._state.own

    @property
    def is_whole(self) -> bool:  # type: ignore[override]
        """True until the first step, unless a sharded state was loaded."""
        return self._layout is None and self._state.pending is None

    @property
    def placement(self) -> Placement:  # type: ignore[override]
        return self._state.placement


def _belongs_to(shard: Shard) -> Tensor:
    """Return the parameter whose master a shard has, (numel,), as it was before code wrote into it."""
    return shard.tensor.detach().to(shard.memory.dtype) if shard.shown is None else shard.shown


def _followed(shard: Shard, belongs_to: Tensor) -> Tensor:
    """Return a copy of a shard's master that follows the parameter, where this is not ``belongs_to``, (numel,)."""
    values = shard.memory.to(shard.tensor.dtype, copy=True)
    _keep_where(belongs_to, shard.memory, shard.tensor.detach(), values)
    return values


def _keep_where(belongs_to: Tensor, parameter: Tensor, master: Tensor, values: Tensor) -> None:
    """Copy ``master`` into ``values`` wherever ``parameter`` is the one that it belongs to: nobody has written it."""
    torch.where(belongs_to == parameter, master, values, out=values)
