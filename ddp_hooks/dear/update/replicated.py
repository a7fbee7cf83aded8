"""Replicated updates: every rank steps on whole parameters, as in the paper.

Reduced gradients are gathered, not parameters, and each parameter is updated when its gradient has arrived, in the next
forward, just before it is read (zhang2023dear, section III-B, Algorithm 1: FeedPipe). For optimizers that look at whole
tensors; state and work are as in plain DDP.

Every gather is submitted in the backward or at ``optimizer.step()``, on all ranks, and is only awaited later, so
nothing communicates from one rank alone. Updates use the settings (learning rates and so on) of the step, whatever
schedulers do meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ddp_hooks.comm import Lanes, see
from ddp_hooks.dear.checkpoint.reshard import State, move_states, shaped_state
from ddp_hooks.dear.layout.memory import ManagedParameters
from ddp_hooks.dear.layout.placement import (
    GRADIENT_KEY,
    MASTER_KEY,
    SHOWN_KEY,
    Layout,
    ParameterRange,
    Placement,
    Replicated,
)
from ddp_hooks.dear.reduction.shard_gradients import ShardGradients
from ddp_hooks.dear.update.base import Update
from ddp_hooks.intercept import GradientGuard, SuspendedGuards
from ddp_hooks.overlap import DeferredUpdates


class ReplicatedUpdate(Update):
    """Reduces gradients in shards and gathers them for an optimizer that keeps its parameters and their state."""

    gathers_gradients = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: ManagedParameters,
        lanes: Lanes,
        parameterwise: bool,  # update parameters one by one as their gradients arrive; no update looks at another's
        finish: Callable[[], None],  # waits for gathers in flight, and so runs the updates that are still to come
    ) -> None:
        super().__init__(optimizer, parameters, lanes)
        self.placement = Replicated(tuple(range(lanes.world_size)), parameters.numels)
        self.shows_gradients = not parameterwise
        deferred = parameterwise and lanes.world_size > 1  # one rank has nothing to wait for
        self._deferred = self.waits_one_by_one = self.gathers_under_forward = deferred
        self._bucket_views: list[Tensor] = []  # per atom, (numel,): gradients, in DDP's buckets
        # By parameter, the place of its gradient: atom in which it begins, offset there, shape, strides.
        self._places: dict[int, tuple[int, int, torch.Size, tuple[int, ...]]] = {}
        self._views: dict[int, Tensor] = {}  # gradients by parameter, kept from step to step
        self._addresses: list[int] = []  # of the atoms in the latest backward's buckets
        self._keeps_views = False  # buckets are where they were: views of others would keep these alive
        self._guards_aside = SuspendedGuards(parameters.tensors)  # while the optimizer's own code runs
        self._wanted: set[int] = set()  # parameters that still await their update
        self._shown: set[int] = set()  # those whose gradients the optimizer's code finds in their place
        self._updates = DeferredUpdates(optimizer, parameters.tensors, self._gradient_of, finish if deferred else None)

    # -- layouts ----------------------------------------------------------------------------------------------------

    def take_states(self, new_layout: Layout) -> dict[ParameterRange, State]:
        self._refuse_new_groups()
        kept = {s.range: {} if s.tensor.grad is None else {GRADIENT_KEY: s.tensor.grad} for s in self.shards}
        self.shards.of_atom = []
        layout, self._layout, self._bucket_views = self._layout, None, []
        self._views.clear()
        self._updates.forget_memory()
        if layout is None:
            return {}
        return move_states(kept, layout, new_layout, self._lanes, self._parameters.device)

    def install(self, layout: Layout, states: dict[ParameterRange, State]) -> None:
        super().install(layout, states)
        self._places = {
            member.parameter: (index, member.offset, parameter.shape, parameter.stride())
            for index, atom in enumerate(layout.atoms)
            for member in atom.members
            for parameter in [self._parameters.tensors[member.parameter]]
            if member.start == 0
        }

    # -- one step ---------------------------------------------------------------------------------------------------

    def take_gradients(self, gradients: ShardGradients, bucket_views: Sequence[Tensor], may_wait: bool) -> None:
        self._bucket_views = list(bucket_views)
        addresses = [view.data_ptr() for view in bucket_views]
        self._keeps_views, self._addresses = addresses == self._addresses, addresses
        if not (may_wait and gradients.in_place):  # else gathers follow the reduce-scatters by themselves
            gradients.wait()

    def begin_step(self, gradients: ShardGradients, from_last_backward: bool) -> Sequence[Tensor] | None:
        """Bring the shards' gradients into the buckets, and remove guards: deferred updates see no gradients now."""
        if self._layout is None:
            return None
        in_place = gradients.is_under_way or (from_last_backward and gradients.in_place)
        self._refuse_new_groups()
        if not self._bucket_views:
            self._bucket_views, self._keeps_views = _blank_buckets(self._layout, self._parameters.tensors), False
        for shard in [] if in_place else self.shards:
            gradient, flat = shard.tensor.grad, self._bucket_views[shard.atom]
            if gradient is not None and gradient.data_ptr() == flat.data_ptr() + shard.offset * flat.element_size():
                continue
            own = flat.narrow(0, shard.offset, shard.tensor.numel())
            if gradient is None:  # taken away by the user, on this rank as far as we know
                own.zero_()
            else:  # kept from an earlier backward, or set by the user
                own.copy_(gradient)
        self._wanted = {i for i, p in enumerate(self._parameters.tensors) if isinstance(p.grad, GradientGuard)}
        self._updates.note_settings()
        self._shown = set()
        self._guards_aside.take(self._wanted)
        return None if self._deferred else self._bucket_views

    def gathered(self, indices: Iterable[int]) -> None:
        """Update parameters whose whole gradients have arrived, or show these to the optimizer."""
        indices = [index for index in indices if index in self._wanted]
        self._wanted.difference_update(indices)
        if not self._deferred:
            for index in indices:
                self._parameters.tensors[index].grad = self._gradient_of(index)
            self._shown.update(indices)
        elif indices:
            self._updates.run(indices)
        if not self._wanted:
            self._bucket_views = []  # DDP may rebuild its buckets: keep no second set of them alive

    def leave(self) -> None:
        self._guards_aside.put_back(consumed=self._shown)

    def end_step(self, gradients: ShardGradients) -> Sequence[Tensor] | None:
        self.take_back_memory()
        return self._bucket_views if self._deferred else None

    def take_back_memory(self) -> None:
        if not self._deferred:
            self._parameters.take_back(self._optimizer.state)

    @property
    def is_updating(self) -> bool:  # type: ignore[override]
        return self._updates.running

    def refuse_reading(self) -> None:
        if self._guards_aside:  # inside of a step
            raise RuntimeError(
                "gradients were asked for inside of optimizer.step(), when they are already on their way: clip or "
                f"change them before step(), or use DearConfig(max_grad_norm=...){see('gradients-are-guarded')}"
            )

    def zero_grad(self, set_to_none: bool) -> None:
        self._guards_aside.zero(set_to_none)

    def before_forward(self) -> None:
        self._bucket_views = []

    def _gradient_of(self, index: int) -> Tensor:
        """Return the gradient of a parameter, in its shape, where it lies in the buckets."""
        parameter = self._parameters.tensors[index]
        if parameter.numel() == 0:
            return torch.zeros_like(parameter)
        atom, offset, shape, strides = self._places[index]
        flat, view = self._bucket_views[atom], self._views.get(index)
        # The optimizer may have given it other memory.
        if view is None or view.data_ptr() != flat.data_ptr() + offset * flat.element_size():
            view = flat.as_strided(shape, strides, flat.storage_offset() + offset)
            if self._keeps_views:
                self._views[index] = view
        return view

    def begin_blank_step(self) -> None:
        if self._optimizer.state:  # by an update that was under way
            for parameter in self._parameters.tensors:
                parameter.grad = None

    # -- state, for whoever saves and loads it ----------------------------------------------------------------------

    def adopt_loaded_masters(self) -> None:
        """Drop the masters of a run that had some."""
        for parameter in self._parameters.tensors:
            if parameter in self._optimizer.state:
                for key in (MASTER_KEY, SHOWN_KEY):
                    self._optimizer.state[parameter].pop(key, None)

    def set_states(self, placement: Placement, states: dict[ParameterRange, State]) -> None:
        for index, parameter in enumerate(self._parameters.tensors):
            elements = ParameterRange(index, 0, parameter.numel())
            self._optimizer.state.pop(parameter, None)
            state = self._on_device(elements, states.get(elements, {}))
            if state:
                self._optimizer.state[parameter] = shaped_state(index, parameter, state)
        self.adopt_loaded_masters()


def _blank_buckets(layout: Layout, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Memory like that of DDP's buckets, per atom; parts of one bucket are neighbours."""
    buckets = []
    for members in layout.buckets:
        first = parameters[members[0]]
        numel = sum(parameters[index].numel() for index in members)
        buckets.append(torch.zeros(numel, dtype=first.dtype, device=first.device))
    return [buckets[atom.bucket][atom.start : atom.start + atom.numel] for atom in layout.atoms]

