"""This rank's shards of all parameters: who owns which piece, and the gradient that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_hooks.comm import Lanes, see
from ddp_hooks.dear.layout import Interval, Layout
from ddp_hooks.dear.moves import State, is_elementwise
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


class ShardSet:
    """The shards of one optimizer's parameters, under the layout in force; none before the first step.

    Args:
        optimizer: the user's.
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

    def enter(self) -> None:
        """The optimizer is about to step."""

    def leave(self) -> None:
        """The optimizer has stepped, or has failed to."""

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
