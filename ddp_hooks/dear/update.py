"""The way of updating parameters: shards of gradients, and the interface that the step driver calls.

Sharded updates step on this rank's shards (:mod:`~ddp_hooks.dear.sharded`). Replicated updates step on whole parameters
with gathered gradients (:mod:`~ddp_hooks.dear.replicated`). In both a rank's reduced gradients lie in its shards.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ddp_hooks.comm import Lanes, see
from ddp_hooks.dear.arrangement import Arrangement
from ddp_hooks.dear.layout import Interval, Layout
from ddp_hooks.dear.moves import Placement, State, is_elementwise
from ddp_hooks.dear.pending import PendingGradient
from ddp_hooks.intercept import GradientGuard, clipping_of_frameworks

GRADIENT_KEY = "ddp_hooks.gradient"  # a gradient kept from an earlier backward travels like optimizer state
MASTER_KEY = "ddp_hooks.master"  # in a saved state: the parameter as the optimizer has it, before rounding


@dataclass
class Shard:
    """One piece of one parameter, owned by this rank."""

    interval: Interval
    atom: int
    offset: int  # where the piece starts in its atom
    memory: Tensor  # (interval length,), the view of the parameter's memory
    tensor: torch.nn.Parameter  # for the optimizer: the same memory, or a more precise master of it
    guard: GradientGuard  # stands for its reduced gradient where nobody may read it
    reduced: Tensor | None = None  # its gradient, while the guard stands for it
    base: Tensor | None = None  # gradient of earlier backward passes, while a newer one is being reduced

    @property
    def is_master(self) -> bool:
        """Whether the optimizer steps on a more precise copy."""
        return self.tensor.dtype != self.memory.dtype


@dataclass
class OptimizerSlots:
    """Which parameters each of the optimizer's groups held, so that groups can be filled again."""

    groups: list[list[int | Tensor]] = field(default_factory=list)  # our parameters by index, others as they are


class Arrival(Protocol):
    """Reduced gradients that may still travel to their shards."""

    in_place: bool  # all lie where they were reduced, in DDP's buckets, unchanged

    def settle(self) -> None:
        """Wait for all of them."""

    def defer(self) -> None:
        """Let each of them wait for itself when it is read."""


class Update:
    """Shards of one optimizer's parameters and the way in which it updates; no shards before the first step.

    Methods about a step do nothing here; subclasses say what their update needs.

    Args:
        optimizer: the user's.
        parameters: parameters that are reduced, in a fixed order.
        names: their names, for messages.
        lanes: carry state between ranks.
    """

    gathers_into_buckets = False
    """Gathers write DDP's buckets, so the next backward waits for them."""
    shows_gradients = False
    """The optimizer steps on whole, reduced gradients, which other step hooks may see."""
    on_arrival: Callable[[Sequence[int]], None] | None = None
    """Called with the numbers of parameters whose gather is complete, before anybody reads them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        lanes: Lanes,
    ) -> None:
        self.shards: list[Shard] = []
        self.shards_of_atom: list[list[Shard]] = []
        self.numels = tuple(parameter.numel() for parameter in parameters)
        self.slots = OptimizerSlots()
        self._optimizer = optimizer
        self._parameters = parameters
        self._names = names
        self._lanes = lanes
        self._device = parameters[0].device
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        for group in optimizer.param_groups:
            self.slots.groups.append([index_of.get(id(p), p) for p in group["params"]])

    def install(self, layout: Layout, flats: Sequence[Tensor], states: dict[Interval, State]) -> None:
        """Make the shards of ``layout`` on the atoms' memory ``flats`` and give them what they kept."""
        self.shards, self.shards_of_atom = [], [[] for _ in layout.atoms]
        for atom_index, (parameter, start, end, offset) in layout.owned(self._lanes.rank):
            interval = Interval(parameter, start, end)
            view = flats[atom_index][offset : offset + end - start]
            state = states.get(interval, {})
            tensor = torch.nn.Parameter(self._tensor_for(view, state))
            guard = GradientGuard.standing_for(tensor, self._names[parameter], held_in_shards)
            shard = Shard(interval, atom_index, offset, view, tensor, guard)
            shard.tensor.grad = state.pop(GRADIENT_KEY, None)
            self.shards.append(shard)
            self.shards_of_atom[atom_index].append(shard)

    def _tensor_for(self, view: Tensor, state: State) -> Tensor:
        """What stands for a piece of a parameter in the optimizer."""
        return view

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
        for shard in self.shards:
            shard.tensor.grad = None
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @property
    def is_updating(self) -> bool:
        """True if this thread runs the optimizer's code for some parameters, outside of ``optimizer.step()``."""
        return False

    @property
    def is_stepping(self) -> bool:
        """True if the optimizer's code runs, or was interrupted, and no longer reads shards."""
        return False

    # -- a step, in the order of calls ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def gathers_under_forward(self) -> bool:
        """True if gathers may be in flight during a forward."""

    @property
    @abstractmethod
    def reads_one_by_one(self) -> bool:
        """True if the update reads one gradient after the other, or none before the next forward."""

    def end_interrupted_step(self) -> None:
        """Restore what a step has changed that raised, or never ended."""

    def use_memory(self, gradients: Sequence[Tensor]) -> None:
        """Note the atoms' ``gradients`` in DDP's buckets, of which this rank has reduced its ranges."""

    @abstractmethod
    def step_before_arrival(self, arrival: Arrival) -> None:
        """Prepare a step that begins while gradients travel."""

    def read_masters(self) -> None:
        """Bring what was written into parameters into more precise copies of them."""

    def enter(self) -> None:
        """Give the optimizer what it steps on."""

    def open_step(self, in_place: bool) -> Sequence[Tensor] | None:
        """Prepare gradients; return memory to gather before the step, per atom, or None.

        Args:
            in_place: shards' gradients lie in DDP's buckets, or will before any gather.
        """
        return None

    @abstractmethod
    def enter_blank(self) -> None:
        """Prepare a step that makes the optimizer's state and changes nothing; existing state stays."""

    def leave(self) -> None:
        """Give the optimizer the model's parameters again."""

    @abstractmethod
    def close_step(self, arrival: Arrival, layout: Arrangement) -> Sequence[Tensor] | None:
        """End a step; return memory to gather under the next forward, per atom, or None."""

    @abstractmethod
    def step_failed(self, layout: Arrangement) -> None:
        """Restore gradients and memory when an exception is about to leave the step."""

    def leave_buckets(self) -> None:
        """Use other memory than DDP's buckets, which the coming backward writes."""

    def zero_marks(self, set_to_none: bool) -> None:
        """Apply a ``zero_grad()`` that another hook of the optimizer has called inside of the step."""

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """True if every rank has the optimizer's whole state."""

    @property
    @abstractmethod
    def has_masters(self) -> bool:
        """True if the optimizer steps on more precise copies."""

    @abstractmethod
    def take_states(self, layout: Layout | None, new_layout: Layout) -> dict[Interval, State]:
        """Remove state from the shards; return it for this rank's intervals under ``new_layout``.

        Collective if ``layout``, the one in force, is not None. There are no shards until :meth:`install`.
        """

    @abstractmethod
    def placement(self, layout: Layout | None) -> Placement:
        """Return which rank holds which state."""

    @abstractmethod
    def set_states(self, placement: Placement, states: dict[Interval, State]) -> None:
        """Take this rank's states under ``placement``; collective if another placement is in force."""

    @abstractmethod
    def adopt_loaded_masters(self) -> None:
        """Move masters that came with loaded state to where they belong."""

    def drop_early_states(self) -> None:
        """Forget states that were loaded before there were shards."""

    def refuse_new_groups(self) -> None:
        """Raise RuntimeError if the optimizer was given further groups."""
        if len(self._optimizer.param_groups) != len(self.slots.groups):
            raise RuntimeError(
                f"the optimizer had {len(self.slots.groups)} param_groups when DearState was created and has "
                f"{len(self._optimizer.param_groups)} now: add them before{see('set-up-changed-later')}"
            )

    def _on_device(self, interval: Interval, state: State) -> State:
        """A loaded state where the optimizer expects it, as ``torch.optim.Optimizer.load_state_dict`` has it."""
        slots = zip(self._optimizer.param_groups, self.slots.groups, strict=True)
        group = next(group for group, slot in slots if interval.parameter in [s for s in slot if isinstance(s, int)])
        counts_on_device = bool(group.get("capturable") or group.get("fused"))
        dtype = self._dtype_of(self._parameters[interval.parameter])
        placed = {}
        for key, value in state.items():
            if is_elementwise(value, interval):
                rounds = value.is_floating_point() and key not in ("step", MASTER_KEY)
                value = value.to(device=self._device, dtype=dtype if rounds else value.dtype)
            elif isinstance(value, Tensor) and counts_on_device:
                value = value.to(self._device)
            placed[key] = value
        return placed

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        """The type in which the optimizer has a parameter."""
        return parameter.dtype


def held_in_shards(what: str) -> str:
    """What to do instead of calling the function of that name for a gradient, and why."""
    if "non_finite_check" in what:
        return (
            "Use ddp_hooks.GradScaler in the place of torch.amp.GradScaler, or bfloat16 autocast, which needs none: "
            "DearState holds gradients in shards, and torch's scaler looks for overflows on one rank alone"
        )
    frameworks = "".join(f"; {name} clips by {how}" for name, how in clipping_of_frameworks.items())
    return (
        f"To clip: state.clip_grad_norm_(max_norm), state.clip_grad_value_(clip_value), or "
        f"DearConfig(max_grad_norm=...){frameworks}. To read or change: `with state.reduced_gradients() as shards:` "
        f"before the step. DearState holds gradients in shards: from backward until they are None again, what is here "
        f"is neither local nor reduced"
    )
