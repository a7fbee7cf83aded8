"""The user's optimizer, stepping on this rank's shard of every parameter.

Inside of ``optimizer.step()`` the parameter groups hold shards, views of the ranges that this rank owns, in the place
of parameters, with unchanged order and settings, and ``optimizer.state`` is that of shards. Outside the groups hold the
model's parameters, as in plain DDP, so that averages, norms and copies are those of whole parameters, and
``optimizer.state`` shows what is spread over the ranks (:mod:`~ddp_hooks.dear.outside`).

What the optimizer knows of a parameter moves with it: from whole tensors to shards when sharding begins, and between
ranks when DDP rebuilds its buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import Lanes, in_order_of, see, torch_compat
from ddp_hooks.dear.arrangement import Arrangement
from ddp_hooks.dear.layout import Interval, Layout
from ddp_hooks.dear.moves import Placement, State, WholeOn, agree_on_entries, is_elementwise, move_states
from ddp_hooks.dear.outside import SmallEntries, StateOutside
from ddp_hooks.dear.pieces import Even
from ddp_hooks.dear.spread import SpreadTensor
from ddp_hooks.dear.update import GRADIENT_KEY, MASTER_KEY, Arrival, Shard, Update
from ddp_hooks.intercept import ELEMENTWISE
from ddp_hooks.overlap import copied, take_back


class ShardedUpdate(Update):
    """Replaces an optimizer's parameters by shards and moves its state; changes the optimizer in place.

    Args:
        optimizer, parameters, names, lanes: see :class:`~ddp_hooks.dear.update.Update`; the optimizer is element-wise.
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
        self.states: defaultdict[Any, State] = defaultdict(dict)  # the optimizer's, inside of a step
        self._layout: Layout | None = None  # of the shards, once there are some
        self._outside: Any = StateOutside(self)
        self._small = SmallEntries()
        self._groups_outside: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        self._groups_inside: list[list[Tensor]] = []
        self._blank: dict[Interval, Tensor] = {}  # what the optimizer makes a state for without a step
        self._is_inside = False
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}

    # -- inside and outside of a step -------------------------------------------------------------------------------

    @property
    def gathers_under_forward(self) -> bool:
        """See :class:`~ddp_hooks.dear.update.Update`; one rank has everything."""
        return self._lanes.world_size > 1

    @property
    def reads_one_by_one(self) -> bool:
        """See :class:`~ddp_hooks.dear.update.Update`."""
        return type(self._optimizer) in ELEMENTWISE

    def step_before_arrival(self, arrival: Arrival) -> None:
        """Let each gradient wait for itself when the optimizer reads it."""
        arrival.defer()

    def close_step(self, arrival: Arrival, layout: Arrangement) -> Sequence[Tensor] | None:
        """Bring new values into the parameters' memory, to be gathered."""
        arrival.settle()
        self.take_back_memory()
        self.write_masters()
        return layout.flats if self._lanes.world_size > 1 else None

    def step_failed(self, layout: Arrangement) -> None:
        """See :class:`~ddp_hooks.dear.update.Update`."""
        self.take_back_memory()

    def enter(self) -> None:
        """The optimizer is about to step: give it the shards and their state.

        Raises:
            RuntimeError: parameters were added or removed since the state was made.
        """
        if self._is_inside or not self.shards_of_atom:
            return
        self.refuse_new_groups()
        for group, params in zip(self._optimizer.param_groups, self._groups_outside, strict=True):
            if [id(parameter) for parameter in group["params"]] != [id(parameter) for parameter in params]:
                raise RuntimeError(
                    "the optimizer's param_groups do not hold the parameters that they held when DearState was "
                    f"created: change them before, or wrap the model again{see('set-up-changed-later')}"
                )
        if self._optimizer.state is not self._outside:
            self._reset(self._optimizer.state)
        self._take_written()
        self._small.forget()
        self._exchange(self._groups_inside, self.states)
        self._is_inside = True

    def leave(self) -> None:
        """The step is over: the groups hold the model's parameters again."""
        if self._is_inside:
            self.states = self._optimizer.state
            self._keep_blank()
            self._exchange(self._groups_outside, self.states if self.is_whole else self._outside)
            self._is_inside = False

    def _exchange(self, groups: list[list[Tensor]], state: Any) -> None:
        for group, params in zip(self._optimizer.param_groups, groups, strict=True):
            group["params"] = list(params)
        self._optimizer.state = state

    def _reset(self, given: Any) -> None:
        """Somebody has assigned another ``optimizer.state``: an empty one means to begin anew."""
        if given:
            self._optimizer.state = self._outside
            raise RuntimeError(
                "optimizer.state was replaced, and every rank holds its own shards of it: load a whole state with "
                f"optimizer.load_state_dict() on all ranks{see('optimizer-state-is-sharded')}"
            )
        self._small.forget()
        self.states = defaultdict(dict)

    # -- what optimizer.state shows outside -------------------------------------------------------------------------

    def index_of(self, parameter: Any) -> int | None:
        """See :class:`~ddp_hooks.dear.outside.SpreadState`."""
        return self._index_of.get(id(parameter))

    def held_parameters(self) -> list[torch.nn.Parameter]:
        """See :class:`~ddp_hooks.dear.outside.SpreadState`."""
        held = {interval.parameter for interval, state in self._held().items() if state}
        return [self._parameters[index] for index in sorted(held)]

    def other_states(self) -> list[Any]:
        """See :class:`~ddp_hooks.dear.outside.SpreadState`."""
        shards = {id(shard.tensor) for shard in self.shards}
        return [key for key in self.states if id(key) not in shards]

    def spread_state(self, index: int) -> State:
        """See :class:`~ddp_hooks.dear.outside.SpreadState`.

        Raises:
            RuntimeError: this rank holds nothing of it.
        """
        held = {interval: state for interval, state in self._held().items() if state}
        own = {i: state for i, state in held.items() if i.parameter == index}
        if not own and held and torch_compat.unflattens_state():  # asks for the names of entries only: a neighbour's
            return {**next(iter(held.values()))}
        if not own:
            raise RuntimeError(
                f"this rank holds no part of the optimizer's state of {self._names[index]}: call "
                f"state.full_optimizer_state_dict() on all ranks for the whole state"
                f"{see('optimizer-state-is-sharded')}"
            )
        first, entries = next(iter(own.items()))
        spread = self._spread(index, own, {k: v.dtype for k, v in entries.items() if is_elementwise(v, first)})
        return {k: spread[k] if k in spread else self._small.show(index, k, v) for k, v in entries.items()}

    def _take_written(self) -> None:
        """Put what users wrote into entries of one value where each shard has it."""
        for index, key, value in self._small.written():
            for interval, state in self._held().items():
                if interval.parameter == index and isinstance(state.get(key), Tensor):
                    state[key].copy_(value)

    def set_state(self, index: int, state: Mapping[str, Any]) -> None:
        """See :class:`~ddp_hooks.dear.outside.SpreadState`.

        Raises:
            ValueError: it is spread otherwise than at present, or has another shape.
        """
        self._small.forget(index)
        held: dict[Any, State] = self._early[1] if self._early is not None else self.states
        keys = {shard.interval: shard.tensor for shard in self.shards} if self._early is None else {i: i for i in held}
        for interval, key in keys.items():
            if interval.parameter == index:
                held[key] = {name: self._part_of(name, value, interval) for name, value in state.items()}

    def _part_of(self, name: str, value: Any, interval: Interval) -> Any:
        if not isinstance(value, SpreadTensor):
            parameter = self._parameters[interval.parameter]
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape != parameter.shape:
                raise ValueError(
                    f"{name} of {self._names[interval.parameter]} was given with shape {tuple(value.shape)}, but the "
                    f"parameter has {tuple(parameter.shape)}{see('optimizer-state-is-sharded')}"
                )
            return cut_entry(name, value, parameter, interval)
        if interval not in value.parts:
            raise ValueError(
                f"{value.label} was read before DDP has rebuilt its buckets, and is spread otherwise now: load a whole "
                f"state with optimizer.load_state_dict(){see('optimizer-state-is-sharded')}"
            )
        return value.parts[interval]

    def drop_state(self, index: int) -> None:
        """See :class:`~ddp_hooks.dear.outside.SpreadState`."""
        self._small.forget(index)
        for shard in self.shards:
            if shard.interval.parameter == index:
                self.states.pop(shard.tensor, None)
        if self._early is not None:
            for interval in [interval for interval in self._early[1] if interval.parameter == index]:
                del self._early[1][interval]

    def _held(self) -> dict[Interval, State]:
        """This rank's part of the optimizer's own state."""
        if self._early is not None:
            return self._early[1]
        return {shard.interval: self.states.get(shard.tensor, {}) for shard in self.shards}

    def spread_states(self) -> dict[int, State]:
        """Every parameter's state, with a :class:`SpreadTensor` for each element-wise entry; collective."""
        _, held = self.held_states(self._layout)
        by_parameter: dict[int, dict[Interval, State]] = {}
        for interval, state in held.items():
            by_parameter.setdefault(interval.parameter, {})[interval] = state
        entries = agree_on_entries(held, self._lanes)
        return {index: self._spread(index, by_parameter.get(index, {}), kinds) for index, kinds in entries.items()}

    def _spread(self, index: int, own: dict[Interval, State], entries: State) -> State:
        placement = self._early[0] if self._early is not None else self.placement(self._layout)
        spread: State = {}
        for key, kind in entries.items():
            if not isinstance(kind, torch.dtype):
                spread[key] = copied(kind)
                continue
            parts = {interval: state[key] for interval, state in own.items() if key in state}
            spread[key] = SpreadTensor(
                self._parameters[index], kind, self._device, parts, placement, f"{key} of {self._names[index]}"
            )
        return spread

    # -- layouts ----------------------------------------------------------------------------------------------------

    def take_states(self, layout: Layout | None, new_layout: Layout) -> dict[Interval, State]:
        """Remove all state from the optimizer; returns it for this rank's intervals under ``new_layout``.

        Collective if ``layout``, the one in force so far, is not None. Afterwards there are no shards until
        :meth:`install`.
        """
        self.leave()
        self.refuse_new_groups()
        if layout is not None or self._early is not None:
            placement, held = self.held_states(layout)
            for shard in self.shards:
                self.states.pop(shard.tensor, None)
                if shard.tensor.grad is not None:
                    held[shard.interval] = {**held[shard.interval], GRADIENT_KEY: shard.tensor.grad}
            states = move_states(held, placement, new_layout, self._lanes, self._device, to=self._device)
            self._early = None
        else:
            self.states = self._optimizer.state
            states = dict(self._cut_whole_states(new_layout.intervals(self._lanes.rank)))
        self.shards, self.shards_of_atom = [], []
        return states

    def install(self, layout: Layout, flats: Sequence[Tensor], states: dict[Interval, State]) -> None:
        """Make the shards of ``layout`` on the atoms' memory ``flats``, with their state, for :meth:`enter`."""
        super().install(layout, flats, states)
        self._layout = layout
        of_parameter: dict[int, list[Shard]] = {}
        for shard in self.shards:
            of_parameter.setdefault(shard.interval.parameter, []).append(shard)
            state = states.get(shard.interval)
            if state and shard.is_master:  # it may come from a run without masters
                state = {key: _as_precise_as(shard, value) for key, value in state.items()}
            if state:
                self.states[shard.tensor] = state
        # In the order in which gradients arrive, so that the optimizer can begin before the last has.
        self._groups_inside = self._groups_of(
            {i: [s.tensor for s in shards] for i, shards in of_parameter.items()},
            {id(shard.tensor): shard.atom for shard in self.shards},
        )
        self._optimizer.state = self._outside

    def _groups_of(self, of_parameter: dict[int, list[Tensor]], order: dict[int, int]) -> list[list[Tensor]]:
        """The optimizer's groups with these tensors in the place of our parameters; others come first."""
        groups = []
        for slots in self.slots.groups:
            held = [of_parameter.get(slot, []) if isinstance(slot, int) else [slot] for slot in slots]
            groups.append(sorted((t for tensors in held for t in tensors), key=lambda t: order.get(id(t), -1)))
        return groups

    # -- a state without a step -------------------------------------------------------------------------------------

    def enter_blank(self) -> None:
        """The optimizer is about to make its state by a step that changes nothing; what has a state keeps it."""
        self.leave()
        if self.shards_of_atom:
            has_state = any(self._held().values())
            for shard in self.shards:
                shard.tensor.grad = None if has_state else torch.zeros_like(shard.tensor)
            self.enter()
            return
        intervals = [] if self._early is not None else self.placement(None).intervals(self._lanes.rank)
        of_parameter: dict[int, list[Tensor]] = {}
        for interval in intervals:  # every rank makes its part, in copies that may be written
            parameter = self._parameters[interval.parameter]
            part = in_order_of(parameter.detach(), parameter)[interval.start : interval.end]
            tensor = torch.nn.Parameter(part.to(self._dtype_of(parameter), copy=True))
            tensor.grad = torch.zeros_like(tensor)
            self._blank[interval] = tensor
            of_parameter.setdefault(interval.parameter, []).append(tensor)
        if self._early is None:
            self.states = self._optimizer.state
        self._exchange(self._groups_of(of_parameter, {}), self.states)
        self._is_inside = True

    def _keep_blank(self) -> None:
        """What the optimizer has made without a step is spread evenly until there is a layout."""
        made = {interval: self.states.pop(tensor, {}) for interval, tensor in self._blank.items()}
        if any(made.values()):
            for interval, state in made.items():
                if self.has_masters:
                    state[MASTER_KEY] = self._blank[interval].detach()
            self._early = self.placement(None), made
        self._blank = {}

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
        for shard in self.shards if self.has_masters else []:
            if shard.is_master:
                written = shard.memory.to(shard.tensor.dtype)
                _keep_where_it_rounds_to(shard.memory, shard.tensor.data, written)
                shard.tensor.copy_(written)

    @torch.no_grad()
    def write_masters(self) -> None:
        """Round the masters into the parameters."""
        for shard in self.shards if self.has_masters else []:
            if shard.is_master:
                shard.memory.copy_(shard.tensor)

    def take_back_memory(self) -> None:
        """Bring into the parameters what the optimizer has put into other memory."""
        for shard in self.shards:
            if not shard.is_master and shard.tensor.data_ptr() != shard.memory.data_ptr():
                take_back(shard.tensor, shard.memory, self.states.get(shard.tensor))
                shard.tensor.data = shard.memory

    @torch.no_grad()
    def adopt_loaded_masters(self) -> None:
        """Masters that came with the optimizer's state go where they belong."""
        for shard in self.shards:
            master = self.states.get(shard.tensor, {}).pop(MASTER_KEY, None)
            if master is not None and shard.is_master:
                shard.tensor.copy_(master)

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer steps on copies."""
        return self._master_dtype is not None

    # -- the optimizer's state --------------------------------------------------------------------------------------

    def _cut_whole_states(self, wanted: Iterable[Interval]) -> Iterator[tuple[Interval, State]]:
        by_parameter: dict[int, list[Interval]] = {}
        for interval in wanted:
            by_parameter.setdefault(interval.parameter, []).append(interval)
        for index, parameter in enumerate(self._parameters):
            whole = self.states.pop(parameter, {})
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
        self._take_written()
        if self._early is not None:
            placement, states = self._early
            return placement, dict(states)
        assert layout is not None
        if not self._is_inside and self._optimizer.state is not self._outside:
            self._reset(self._optimizer.state)
        self.read_masters()
        states = {shard.interval: dict(self.states.get(shard.tensor, {})) for shard in self.shards}
        for shard in self.shards:
            if shard.is_master:
                states[shard.interval][MASTER_KEY] = shard.tensor.detach()
        return layout, states

    def set_states(self, placement: Placement, states: dict[Interval, State]) -> None:
        """Take this rank's states under ``placement``; collective, if that is another than the one in force.

        Before there are shards, states are kept until there are some.
        """
        self._small.forget()
        states = {interval: self._on_device(interval, state) for interval, state in states.items()}
        if self._optimizer.state is not self._outside:  # torch has loaded what is not ours
            self.states = self._optimizer.state
        others = defaultdict(dict, {key: self.states[key] for key in self.other_states() if self.index_of(key) is None})
        if not self.shards_of_atom:
            self._early, self.states = (placement, states), others
            self._optimizer.state = self._outside
            return
        assert self._layout is not None
        if placement != self._layout:
            states = move_states(states, placement, self._layout, self._lanes, self._device, to=self._device)
        for shard in self.shards:
            if states.get(shard.interval):
                others[shard.tensor] = states[shard.interval]
        self.states, self._optimizer.state = others, self._outside
        self.enter()
        try:  # as torch does when it loads: an optimizer may bring a state of earlier versions up to date
            self._optimizer.__setstate__({"state": self.states, "param_groups": self._optimizer.param_groups})
        finally:
            self.leave()
        self.adopt_loaded_masters()

    def drop_early_states(self) -> None:
        """Something else was loaded."""
        if self._early is not None:
            self._early = None
            self._optimizer.state = self.states

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
