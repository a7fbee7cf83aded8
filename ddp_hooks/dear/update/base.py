# ruff: noqa: B027  (most updates need only some calls of a step)
"""Interface of updates: what :class:`~ddp_hooks.dear.step.StepDriver` calls, whichever way the optimizer updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ddp_hooks.comm import DifferenceWire, Lanes, see
from ddp_hooks.dear.checkpoint.reshard import State
from ddp_hooks.dear.layout.memory import ManagedParameters
from ddp_hooks.dear.layout.placement import (
    GRADIENT_KEY,
    MASTER_KEY,
    SHOWN_KEY,
    Layout,
    ParameterRange,
    Placement,
    Shard,
    Shards,
    held_in_shards,
    is_elementwise,
)
from ddp_hooks.dear.reduction.shard_gradients import ShardGradients
from ddp_hooks.intercept import GradientGuard


class Update(ABC):
    """Way in which the user's optimizer updates parameters; owns the shards that get the reduced gradients.

    In a step the driver calls :meth:`take_gradients`, :meth:`begin_step`, :meth:`leave` and :meth:`end_step`. Memory
    that :meth:`begin_step` and :meth:`end_step` return is gathered by the driver: before the optimizer's code runs, and
    after it.
    """

    gathers_gradients: ClassVar[bool]  # in DDP's buckets, so that gathers end before the next backward
    shows_gradients = False  # whole reduced gradients stand at the parameters when the optimizer steps
    is_updating = False  # this thread runs the optimizer's code for some parameters, outside of the user's step()
    has_masters = False  # the optimizer steps on more precise copies
    is_whole = True  # optimizer.state has every parameter's whole state
    wires: Sequence[DifferenceWire | None] | None = None  # of gathers, per atom; None: numbers travel as they are
    waits_one_by_one: bool  # the optimizer may step while gradients travel
    gathers_under_forward: bool
    placement: Placement  # ranges whose state every rank holds, or takes when it is loaded

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: ManagedParameters, lanes: Lanes) -> None:
        self.shards = Shards()
        # Per group of the optimizer: our parameters by index, other ones as they are.
        self.slots: list[list[int | Tensor]] = [
            [p if (index := parameters.index_of(p)) is None else index for p in group["params"]]
            for group in optimizer.param_groups
        ]
        self._optimizer = optimizer
        self._parameters = parameters
        self._lanes = lanes
        self._layout: Layout | None = None  # of the shards; None before there are some

    # -- layouts ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def take_states(self, new_layout: Layout) -> dict[ParameterRange, State]:
        """Remove the shards; return their state and gradients for the ranges of this rank under ``new_layout``.

        Collective, if there were shards or a loaded state. :meth:`install` follows, when parameters have moved.
        """

    def install(self, layout: Layout, states: dict[ParameterRange, State]) -> None:
        """Make the shards of ``layout``, with what :meth:`take_states` has returned."""
        self.shards.of_atom = [[] for _ in layout.atoms]
        for atom, (parameter, start, end, offset) in layout.owned(self._lanes.rank):
            elements = ParameterRange(parameter, start, end)
            view = self._parameters.flats[atom][offset : offset + end - start]
            state = states.get(elements, {})
            own, shown = self._tensor_for(atom, offset, view, state)
            tensor = torch.nn.Parameter(own)
            tensor.grad = state.pop(GRADIENT_KEY, None)
            guard = GradientGuard.standing_for(tensor, self._parameters.names[parameter], held_in_shards)
            self.shards.of_atom[atom].append(Shard(elements, atom, offset, view, tensor, shown, guard))
        self._layout = layout

    def _tensor_for(self, atom: int, offset: int, view: Tensor, state: State) -> tuple[Tensor, Tensor | None]:
        """Return the tensor that stands for a range of a parameter in the optimizer, and its memory as it is shown."""
        return view, None

    # -- one step ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def take_gradients(self, gradients: ShardGradients, bucket_views: Sequence[Tensor], may_wait: bool) -> None:
        """Use gradients that were just attached to shards, and may still travel.

        ``bucket_views``: per atom, (numel,): the memory of the reduction in DDP's buckets. ``may_wait``: the optimizer
        steps next, and waits for gradients one by one.
        """

    @abstractmethod
    def begin_step(self, gradients: ShardGradients, from_last_backward: bool) -> Sequence[Tensor] | None:
        """Prepare the optimizer for its step; return memory to gather before its code runs, or None.

        ``from_last_backward``: gradients were attached for this step, and not shown to the user in between.
        """

    def begin_skipped_step(self) -> None:
        """Prepare the optimizer for a step without gradients."""

    @abstractmethod
    def begin_blank_step(self) -> None:
        """Prepare the optimizer for a step that makes its state and changes nothing; existing state stays."""

    def gathered(self, indices: Iterable[int]) -> None:
        """Use the memory of parameters that was gathered."""

    @abstractmethod
    def leave(self) -> None:
        """Give the optimizer its own groups and gradients back after any step, also one that did not end."""

    @abstractmethod
    def end_step(self, gradients: ShardGradients) -> Sequence[Tensor] | None:
        """Finish a step after :meth:`leave`; return memory to gather under the next forward, or None."""

    def take_back_memory(self) -> None:
        """Copy into parameters the values that the optimizer has put into other memory (``.data = ...``)."""

    def before_forward(self) -> None:
        """Expect that the coming backward writes DDP's buckets."""

    def zero_grad(self, set_to_none: bool) -> None:
        """Apply ``zero_grad()`` to gradients that are hidden inside of a step."""

    def refuse_reading(self) -> None:
        """Raise RuntimeError where gradients may not be read now."""

    def drop_gradients(self) -> None:
        """Leave the optimizer without any gradient, also of parameters that are not ours: it updates nothing then."""
        others = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for parameter in [*(shard.tensor for shard in self.shards), *others]:
            parameter.grad = None

    def _refuse_new_groups(self) -> None:
        if len(self._optimizer.param_groups) != len(self.slots):
            raise RuntimeError(
                f"the optimizer had {len(self.slots)} param_groups when DearState was created and has "
                f"{len(self._optimizer.param_groups)} now: add them before{see('set-up-changed-later')}"
            )

    # -- the optimizer's state, for checkpoints ---------------------------------------------------------------------

    @abstractmethod
    def set_states(self, placement: Placement, states: dict[ParameterRange, State]) -> None:
        """Take this rank's states under ``placement``; collective, if that is another than the one in force."""

    @abstractmethod
    def adopt_loaded_masters(self) -> None:
        """Take masters out of the optimizer's loaded state."""

    def drop_pending_states(self) -> None:
        """Forget states that were loaded before there were shards."""

    def _on_device(self, elements: ParameterRange, state: State) -> State:
        """Return a loaded state where the optimizer expects it, as ``torch.optim.Optimizer.load_state_dict`` does."""
        slots = zip(self._optimizer.param_groups, self.slots, strict=True)
        group = next(group for group, slot in slots if elements.parameter in [s for s in slot if isinstance(s, int)])
        counts_on_device = bool(group.get("capturable") or group.get("fused"))
        device, dtype = self._parameters.device, self._dtype_of(self._parameters.tensors[elements.parameter])
        placed = {}
        for key, value in state.items():
            if is_elementwise(value, elements):
                rounds = value.is_floating_point() and key not in ("step", MASTER_KEY, SHOWN_KEY)
                value = value.to(device=device, dtype=dtype if rounds else value.dtype)
            elif isinstance(value, Tensor) and counts_on_device:
                value = value.to(device)
            placed[key] = value
        return placed

    def _dtype_of(self, parameter: Tensor) -> torch.dtype:
        return parameter.dtype  # in which the optimizer has it
