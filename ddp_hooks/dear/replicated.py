"""The user's optimizer, stepping on whole parameters on every rank: DeAR as the paper has it.

Reduced gradients are gathered, not parameters, and each parameter is updated when its gradient has arrived, in the next
forward, just before it is read (zhang2023dear, section III-B, Algorithm 1: FeedPipe). For optimizers that look at whole
tensors; state and work are as in plain DDP.

Every gather is submitted in the backward or at ``optimizer.step()``, on all ranks, and is only awaited later, so
nothing communicates from one rank alone. Updates use the settings (learning rates and so on) of the step, whatever
schedulers do meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_hooks.comm import Lanes, shaped_like
from ddp_hooks.dear.arrangement import Arrangement
from ddp_hooks.dear.layout import Interval, Layout
from ddp_hooks.dear.moves import Placement, State, WholeOn, is_elementwise, move_states
from ddp_hooks.dear.update import GRADIENT_KEY, MASTER_KEY, Arrival, Update
from ddp_hooks.intercept import GradientGuard, SuspendedGuards
from ddp_hooks.overlap import DeferredUpdates


class ReplicatedUpdate(Update):
    """Reduces gradients in shards and gathers them for an optimizer that keeps its parameters and their state.

    Args:
        optimizer, parameters, names, lanes: see :class:`~ddp_hooks.dear.update.Update`.
        parameterwise: no update looks at another parameter, so each parameter is updated when its gradient arrives.
            False: gather everything inside ``optimizer.step()``, which then updates everything at once.
        finish: waits for every gather in flight, and so runs the pending updates.
    """

    gathers_into_buckets = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        lanes: Lanes,
        parameterwise: bool,
        finish: Callable[[], None],
    ) -> None:
        super().__init__(optimizer, parameters, names, lanes)
        self.on_arrival = self.arrived
        self.shows_gradients = not parameterwise
        self.deferred = parameterwise and lanes.world_size > 1  # one rank has nothing to wait for
        self.memory: list[Tensor] = []  # per atom, (numel,): gradients, in DDP's buckets
        self._layout: Layout | None = None
        self._places: dict[int, _Place] = {}  # by parameter
        self._views: dict[int, Tensor] = {}  # gradients by parameter, kept from step to step
        self._addresses: list[int] = []  # of the atoms in the latest backward's buckets
        self._keeps_views = False  # whether buckets are where they were: views of others would keep these alive
        self._marks = SuspendedGuards(parameters)  # while the optimizer's own code runs
        self._wanted: set[int] = set()  # parameters that still await their update
        self._shown: set[int] = set()  # those whose gradients the optimizer's code finds in their place
        self._updates = DeferredUpdates(optimizer, parameters, self._gradient_of, finish if self.deferred else None)

    # -- layouts ----------------------------------------------------------------------------------------------------

    def take_states(self, layout: Layout | None, new_layout: Layout) -> dict[Interval, State]:
        """What shards have kept, for this rank's intervals under ``new_layout``; collective if there was one."""
        self.refuse_new_groups()
        kept = {s.interval: {} if s.tensor.grad is None else {GRADIENT_KEY: s.tensor.grad} for s in self.shards}
        self.shards, self.shards_of_atom, self.memory = [], [], []
        self._views.clear()
        self._updates.forget_memory()
        if layout is None:
            return {}
        return move_states(kept, layout, new_layout, self._lanes, self._device, to=self._device)

    def install(self, layout: Layout, flats: Sequence[Tensor], states: dict[Interval, State]) -> None:
        """Make the shards of ``layout``; the optimizer's parameters stay as they are."""
        super().install(layout, flats, states)
        self._layout = layout
        self._places = {
            member.parameter: self._place(member.parameter, index, member.offset)
            for index, atom in enumerate(layout.atoms)
            for member in atom.members
            if member.start == 0
        }

    def _place(self, index: int, atom: int, offset: int) -> _Place:
        parameter = self._parameters[index]
        return _Place(atom, offset, parameter.shape, parameter.stride())

    # -- one step ---------------------------------------------------------------------------------------------------

    @property
    def gathers_under_forward(self) -> bool:
        """See :class:`~ddp_hooks.dear.update.Update`."""
        return self.deferred

    @property
    def reads_one_by_one(self) -> bool:
        """See :class:`~ddp_hooks.dear.update.Update`; gathers follow the reduce-scatters by themselves."""
        return self.deferred

    def step_before_arrival(self, arrival: Arrival) -> None:
        """Wait only for gradients that are to be written into the buckets before they are gathered."""
        if not arrival.in_place:
            arrival.settle()

    def use_memory(self, gradients: Sequence[Tensor]) -> None:
        """DDP's buckets hold the atoms' ``gradients``, of which this rank has reduced its ranges."""
        self.memory = list(gradients)
        addresses = [gradient.data_ptr() for gradient in gradients]
        self._keeps_views = addresses == self._addresses
        self._addresses = addresses

    def open_step(self, in_place: bool) -> Sequence[Tensor] | None:
        """Bring shards' gradients into :attr:`memory`, to be gathered now or under the next forward.

        Guards are suspended: a deferred optimizer sees no gradients now.

        Args:
            in_place: see :class:`~ddp_hooks.dear.update.Update`.
        """
        assert self._layout is not None
        self.refuse_new_groups()
        if not self.memory:
            self.memory, self._keeps_views = _blank_buckets(self._layout, self._parameters), False
        for shard in [] if in_place else self.shards:
            gradient, flat = shard.tensor.grad, self.memory[shard.atom]
            if gradient is not None and gradient.data_ptr() == flat.data_ptr() + shard.offset * flat.element_size():
                continue
            own = flat.narrow(0, shard.offset, shard.tensor.numel())
            if gradient is None:  # taken away by the user, on this rank as far as we know
                own.zero_()
            else:  # kept from an earlier backward, or set by the user
                own.copy_(gradient)
        self._wanted = {i for i, p in enumerate(self._parameters) if isinstance(p.grad, GradientGuard)}
        self._updates.note_settings()
        self._shown = set()
        self._marks.take(self._wanted)
        return None if self.deferred else self.memory

    def arrived(self, ready: Iterable[int]) -> None:
        """The whole gradients of some parameters are there: update them, or show them to the optimizer."""
        indices = [index for index in ready if index in self._wanted]
        self._wanted.difference_update(indices)
        if not self.deferred:
            for index in indices:
                self._parameters[index].grad = self._gradient_of(index)
            self._shown.update(indices)
        elif indices:
            self._updates.run(indices)
        if not self._wanted:
            self.memory = []  # DDP may rebuild its buckets: keep no second set of them alive

    def end_interrupted_step(self) -> None:
        """Restore the guards, except where the optimizer's code has removed the gradient."""
        self._marks.put_back(consumed=self._shown)

    def close_step(self, arrival: Arrival, layout: Arrangement) -> Sequence[Tensor] | None:
        """Restore the guards; deferred updates gather :attr:`memory` under the next forward."""
        self.end_interrupted_step()
        if self.deferred:
            return self.memory
        layout.take_back_memory(self._optimizer.state)
        return None

    def step_failed(self, layout: Arrangement) -> None:
        """See :class:`~ddp_hooks.dear.update.Update`."""
        self.end_interrupted_step()
        if not self.deferred:
            layout.take_back_memory(self._optimizer.state)

    @property
    def is_updating(self) -> bool:
        """See :class:`~ddp_hooks.dear.update.Update`."""
        return self._updates.running

    @property
    def is_stepping(self) -> bool:
        """See :class:`~ddp_hooks.dear.update.Update`."""
        return bool(self._marks)

    def zero_marks(self, set_to_none: bool) -> None:
        """``zero_grad()`` inside of a step, from another hook of the optimizer, means what guards stand for."""
        self._marks.zero(set_to_none)

    def leave_buckets(self) -> None:
        """A forward begins with nothing on its way: its backward will write the buckets, so gather elsewhere."""
        self.memory = []

    def _gradient_of(self, index: int) -> Tensor:
        """The gradient of a parameter, in its shape, where it lies in the buckets."""
        parameter = self._parameters[index]
        if parameter.numel() == 0:
            return torch.zeros_like(parameter)
        place = self._places[index]
        flat, view = self.memory[place.atom], self._views.get(index)
        # The optimizer may have given it other memory.
        if view is None or view.data_ptr() != flat.data_ptr() + place.offset * flat.element_size():
            view = flat.as_strided(place.shape, place.strides, flat.storage_offset() + place.offset)
            if self._keeps_views:
                self._views[index] = view
        return view

    def enter_blank(self) -> None:
        """The optimizer is about to make its state by a step that changes nothing; what has a state keeps it."""
        if self._optimizer.state:  # by an update that was under way
            for parameter in self._parameters:
                parameter.grad = None

    # -- state, for whoever saves and loads it ----------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Always."""
        return True

    @property
    def has_masters(self) -> bool:
        """Never."""
        return False

    def adopt_loaded_masters(self) -> None:
        """There are none here; drop those of a run that had some."""
        for parameter in self._parameters:
            if parameter in self._optimizer.state:
                self._optimizer.state[parameter].pop(MASTER_KEY, None)

    def placement(self, layout: Layout | None) -> Placement:
        """Everything, on every rank."""
        return WholeOn(tuple(range(self._lanes.world_size)), self.numels)

    def set_states(self, placement: Placement, states: Mapping[Interval, State]) -> None:
        """Give every parameter its state, in its own shape."""
        for index, parameter in enumerate(self._parameters):
            interval = Interval(index, 0, parameter.numel())
            self._optimizer.state.pop(parameter, None)
            state = self._on_device(interval, states.get(interval, {}))
            if state:
                self._optimizer.state[parameter] = {
                    key: shaped_like(parameter, value) if is_elementwise(value, interval) else value
                    for key, value in state.items()
                }
        self.adopt_loaded_masters()


class _Place(NamedTuple):
    """Where a parameter's whole gradient lies, as a view."""

    atom: int  # in which it begins
    offset: int  # there
    shape: torch.Size
    strides: tuple[int, ...]


def _blank_buckets(layout: Layout, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Memory like that of DDP's buckets, per atom; parts of one bucket are neighbours."""
    buckets = []
    for members in layout.buckets:
        first = parameters[members[0]]
        numel = sum(parameters[index].numel() for index in members)
        buckets.append(torch.zeros(numel, dtype=first.dtype, device=first.device))
    return [buckets[atom.bucket][atom.start : atom.start + atom.numel] for atom in layout.atoms]

