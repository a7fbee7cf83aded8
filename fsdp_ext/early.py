"""Reduce-scatters that begin before FSDP2 asks for them: for those whose result must be ready when the call returns.

Such a call stops the backward until all of a module's gradients have travelled. But most of them have been there for a
while, as FSDP2 calls when the last of them is. So they go in parts, each as soon as its gradients have come.

Parts have lanes of their own, so that what else is reduced meanwhile may come between them differently on every rank.
Their messages are told from each other by what they belong to: ranks that send parts of modules in different orders
wait for each other until a time-out, which names them.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ddp_hooks.comm import LaneError, Lanes, Partition, Work, see
from ddp_hooks.comm.torch_compat import inside_another_backward
from fsdp_ext import compat
from fsdp_ext.memory import Pool
from fsdp_ext.transport import equal_bounds

logger = logging.getLogger("fsdp_ext")

_INTEGERS = {2: torch.int16, 4: torch.int32}  # of as many bytes
_CHANGED, _OTHERS_TRAINED = 0, 1  # columns that tell all ranks why the whole is to be reduced again
_NUM_MARKS = 2
_MOST_PLANS = 4  # each costs a reduce-scatter in vain: whoever trains others in every step is not to pay for ever


class Turns:
    """In which order modules' gradients come; one for all modules of a model."""

    def __init__(self) -> None:
        self._last: object = None
        self._count = 0

    def take(self, module: object) -> int:
        """Number of the turn that ``module`` has now: another one than before if others had one since."""
        if self._last is not module:
            self._last = module
            self._count += 1
        return self._count


@dataclass(frozen=True)
class _Part:
    """Parameters that follow each other in what FSDP2 reduces, of which every rank's range has the same columns."""

    start: int
    stop: int
    places: range  # of the parameters, among those that are trained

    @property
    def columns(self) -> slice:
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class _Sent:
    """A part that is under way."""

    memory: Tensor  # (world_size, columns), reduced in place
    work: Work
    gradients: Tensor | None = None  # the same, as they were when they were sent early


@dataclass
class _Plan:
    """What one reduce-scatter has told about all later ones; the same on all ranks of the shards."""

    parts: tuple[_Part, ...]  # in the order in which they are sent
    parameters: tuple[Tensor, ...]  # that are trained, whole
    world_size: int
    dtype: torch.dtype  # that gradients are added in
    op: Any  # the sum or the mean
    is_tried: bool = False  # whether a backward has shown here that no other module's gradients come in between
    handles: list[Any] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Of one rank's range."""
        return self.parts[0].stop  # the last parameters come first

    def is_of(self, module: FSDPModule) -> bool:
        """Whether it still trains these parameters."""
        trained = compat.whole_parameters_of(module)
        return trained is not None and list(map(id, trained)) == list(map(id, self.parameters))


class EarlyReduceScatter:
    """One module's reduce-scatters in parts: the same parts, in the same order, on all ranks, whenever they begin.

    The first one goes as a whole, and tells what it consists of. In each later one every rank sends every part once:
    all but the last when their gradients have come, or else when FSDP2 asks for the whole. (The second one is a trial,
    in which nothing goes earlier.) The last part is sent then, and carries marks of ranks where this was in vain: where
    a hook has changed a gradient after it was sent, gradients are missing, other modules' come in between (of what was
    wrapped together, say, which ranks could begin in different orders), or other parameters are trained now. All ranks
    then reduce the whole.

    Args:
        module: without other FSDP modules inside of it.
        name: for messages.
        lanes: that tag messages by labels.
        least_bytes: of one rank's range of a part.
        pool: memory for what is sent.
        turns: of all modules.
    """

    def __init__(
        self,
        module: FSDPModule,
        name: str,
        lanes: Lanes,
        least_bytes: int,
        pool: Pool,
        turns: Turns,
    ) -> None:
        self._module = module
        self._name = name
        self._lanes = lanes
        self._least_bytes = least_bytes
        self._pool = pool
        self._turns = turns
        self._plan: _Plan | None = None
        self._has_given_up = False
        self._num_reduced = self._num_plans = 0  # the same on all ranks of the shards
        self._backward: int | None = None  # that gradients have come in
        self._is_reduced = False  # in this backward
        self._first_turn: int | None = None  # in it
        self._come: set[int] = set()
        self._sent: list[_Sent] = []
        self.has_begun_early = False
        """Whether parts of the last one were sent before FSDP2 asked for it."""

    @torch.no_grad()
    def reduce(self, packed: Tensor, output: Tensor, rank: int, op: Any) -> bool:
        """Make ``output``, (numel,), what ``op`` makes of this rank's range of ``packed``, (P * numel,), which stays.

        Returns:
            Whether it is; else the whole is to be reduced, which is the same on all ranks of the shards.
        """
        plan = self._plan
        if plan is None:
            return False
        backward = torch._C._current_graph_task_id()
        if backward != self._backward and not inside_another_backward():
            self._enter(backward)
        self.has_begun_early = bool(self._sent)
        first_turn = self._first_turn
        try:
            reasons = self._finish(packed, output, rank, op, plan)
        except LaneError as error:
            raise type(error)(
                f"{error} (of {self._name}, a reduce-scatter that began as gradients came: if no rank has died, but "
                f"they run modules in different orders, or went on after a backward that has failed, set "
                f"ExtConfig(early=False)){see('a-wait-timed-out', quoted=error)}"
            ) from error
        finally:
            self._sent.clear()
            self._come.clear()
            self._is_reduced, self._first_turn = True, None
            self._num_reduced += 1
        if reasons[_CHANGED]:
            self._has_given_up = True
            logger.info(
                "%s: its reduce-scatters do not begin early any more: gradients are missing, those of other modules "
                "come in between, or a hook has changed some that had come",
                self._name,
            )
        if reasons.any():
            self._has_given_up = self._has_given_up or self._num_plans == _MOST_PLANS
            self.remove()
            return False
        plan.is_tried = plan.is_tried or first_turn is not None
        return True

    def prepare(self, packed: Tensor, world_size: int, op: Any) -> None:
        """Let the next one begin early, if it can, from what FSDP2 reduces now, as a whole."""
        if self._has_given_up or self._plan is not None or op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            return
        if packed.dtype not in (torch.float32, torch.bfloat16):
            return  # FSDP2 divides these before it sums them
        columns = compat.columns_in(self._module, packed.numel() // world_size)
        parameters = compat.whole_parameters_of(self._module)
        if columns is None or parameters is None:
            return
        parts = _parts_of(columns, self._least_bytes // packed.element_size())
        if len(parts) == 1:
            return  # all of it comes at once
        self._plan = _Plan(parts, parameters, world_size, packed.dtype, op)
        self._num_plans += 1
        this = weakref.ref(self)  # which the collector does not see from a tensor's hook
        for place, parameter in enumerate(parameters):
            handle = parameter.register_post_accumulate_grad_hook(partial(_note, this, place))
            self._plan.handles.append(handle)

    def remove(self) -> None:
        """Leave the module's parameters as they were before."""
        self._sent.clear()
        for handle in self._plan.handles if self._plan is not None else ():
            handle.remove()
        self._plan = None

    @torch.no_grad()
    def note(self, place: int) -> None:
        """A gradient has come, of this backward or of earlier ones as well."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            if inside_another_backward():
                return  # a checkpoint's; the whole may be asked for in the one around it
            self._enter(backward)
        self._come.add(place)
        turn = self._turns.take(self)
        self._first_turn = turn if self._first_turn is None else self._first_turn
        plan = self._plan
        if plan is None or not plan.is_tried or self._is_reduced:
            return
        while len(self._sent) < len(plan.parts) - 1:
            part = plan.parts[len(self._sent)]
            ready = self._come.issuperset(part.places) and plan.is_of(self._module)
            if not ready or not compat.reduces_in_this_backward(self._module):
                return
            memory = self._memory(plan, part.stop - part.start)
            if not _pack([plan.parameters[place].grad for place in part.places], memory):
                return
            gradients = self._memory(plan, part.stop - part.start)
            self._send(plan, memory, gradients.copy_(memory))

    def _enter(self, backward: int) -> None:
        """Begin anew: a backward that has failed may have left something."""
        self._backward, self._is_reduced, self._first_turn = backward, False, None
        self._come.clear()
        self._sent.clear()

    def _finish(self, packed: Tensor, output: Tensor, rank: int, op: Any, plan: _Plan) -> Tensor:
        """Send what is left, wait, and return the marks of all ranks."""
        marks = torch.zeros(_NUM_MARKS, dtype=plan.dtype)
        rows = None
        as_planned = (op, packed.dtype, output.numel()) == (plan.op, plan.dtype, plan.numel)
        if not plan.is_of(self._module):
            marks[_OTHERS_TRAINED] = 1
        elif not as_planned or self._first_turn not in (None, self._turns.take(self)):
            marks[_CHANGED] = 1
        else:
            rows = packed.view(plan.world_size, -1)
            for part, sent in zip(plan.parts, self._sent, strict=False):
                if sent.gradients is not None and not _have_same_bits(sent.gradients, rows[:, part.columns]):
                    marks[_CHANGED] = 1
        for part in plan.parts[len(self._sent) :]:
            width, is_last = part.stop - part.start, part is plan.parts[-1]
            memory = self._memory(plan, width + _NUM_MARKS * is_last)
            memory[:, :width] = 0 if rows is None else rows[:, part.columns]
            if is_last:
                memory[:, width:] = marks
            self._send(plan, memory)
        for part, sent in zip(plan.parts, self._sent, strict=True):
            sent.work.wait()
            if rows is not None:
                output[part.columns] = sent.memory[rank, : part.stop - part.start]
        return self._sent[-1].memory[rank, -_NUM_MARKS:]

    def _memory(self, plan: _Plan, width: int) -> Tensor:
        return self._pool.empty(plan.world_size * width, plan.dtype).view(plan.world_size, width)

    def _send(self, plan: _Plan, memory: Tensor, gradients: Tensor | None = None) -> None:
        partition = Partition(memory.view(-1), equal_bounds(memory.numel(), plan.world_size))
        label = f"{self._name}, part {len(self._sent)} of reduce-scatter {self._num_reduced}"
        divisor = plan.world_size if plan.op == dist.ReduceOp.AVG else 1
        work = self._lanes.spread_reduce_scatter(partition, label, divisor)
        self._sent.append(_Sent(memory, work, gradients))


def _note(this: weakref.ref[EarlyReduceScatter], place: int, parameter: Tensor) -> None:
    early = this()
    if early is not None:
        early.note(place)


def _parts_of(columns: Sequence[compat.Column], least_numel: int) -> tuple[_Part, ...]:
    """From the last column to the first, as backwards come; each of at least so many elements, but for the last one.

    That one is what nothing hides; it has the first parameter, and what little else is left.
    """
    parts = []
    last = len(columns)
    for place in reversed(range(len(columns))):
        if place == 0 or columns[last - 1].stop - columns[place].start >= least_numel:
            parts.append(_Part(columns[place].start, columns[last - 1].stop, range(place, last)))
            last = place
    return tuple(parts)


def _pack(gradients: Sequence[Tensor | None], memory: Tensor) -> bool:
    """Every rank's rows of all gradients to its row of ``memory``, as FSDP2 does; False if they are not as planned."""
    found = [gradient for gradient in gradients if gradient is not None and gradient.layout == torch.strided]
    world_size = len(memory)
    numel = sum(-(-gradient.shape[0] // world_size) * math.prod(gradient.shape[1:]) for gradient in found)
    if len(found) < len(gradients) or numel != memory.shape[1]:
        return False
    torch._chunk_cat(found, dim=0, num_chunks=world_size, out=memory)
    return True


def _have_same_bits(these: Tensor, those: Tensor) -> bool:
    """Also of NaN. NumPy takes a third of the time that torch.equal does."""
    integers = _INTEGERS[these.element_size()]
    return np.array_equal(these.view(integers).numpy(), those.view(integers).numpy())
