"""Reduce-scatters that begin before FSDP2 asks for them, where the result must be ready when the call returns.

FSDP2 calls when a module's last gradient is ready; most have been ready for a while. So gradients go in parts, each as
soon as it is ready. Parts have lanes of their own, as other reduce-scatters may come between them differently on every
rank. Messages meet by label: ranks that send parts of modules in different orders wait for each other until a time-out,
which names the parts.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ddp_hooks.comm import LaneError, Work, see
from ddp_hooks.comm.torch_compat.autograd import current_backward, inside_another_backward
from fsdp_ext import compat
from fsdp_ext.compressed import even_partition
from fsdp_ext.context import ExtContext, Transport

logger = logging.getLogger("fsdp_ext")

_INTEGERS = {2: torch.int16, 4: torch.int32}  # of as many bytes
_CHANGED, _OTHERS_TRAINED = 0, 1  # columns of flags that tell all ranks why the whole is to be reduced again
_NUM_FLAGS = 2
_MOST_PLANS = 4  # each costs a reduce-scatter in vain: a loop that trains others in every step does not pay for ever


class Phase(Enum):
    LEARNING = auto()  # the next reduce-scatter goes as a whole, and gives the plan
    TRIAL = auto()  # it goes in parts, none of them before FSDP2 asks
    ACTIVE = auto()  # parts go when their gradients are ready
    OFF = auto()  # all go as a whole


class _Part(NamedTuple):
    """Parameters that follow each other in FSDP2's memory."""

    start: int  # columns of every rank's range
    stop: int
    indices: range  # of the parameters, among the trained ones

    @property
    def width(self) -> int:
        return self.stop - self.start


class _Sent(NamedTuple):
    memory: Tensor  # (world_size, columns), reduced in place
    work: Work
    gradients: Tensor | None = None  # a copy of the values that were sent early


@dataclass
class _Plan:
    """Layout of reduce-scatters; the same on all ranks of the shards."""

    parts: tuple[_Part, ...]  # in the order in which they are sent
    parameters: tuple[Tensor, ...]  # trained, whole
    dtype: torch.dtype  # of sums
    op: Any  # the sum or the mean
    handles: list[Any] = field(default_factory=list)

    def fits(self, module: FSDPModule) -> bool:
        trained = compat.whole_parameters_of(module)
        return trained is not None and list(map(id, trained)) == list(map(id, self.parameters))


@dataclass
class _Backward:
    number: int | None = None
    is_reduced: bool = False
    first_turn: int | None = None  # of the module, in the order of gradients
    ready: set[int] = field(default_factory=set)  # indices of parameters
    sent: list[_Sent] = field(default_factory=list)


class EarlyReduceScatter:
    """Reduce-scatters of one module, in the same parts and order on all ranks, whenever they begin.

    1. The first one goes as a whole, and gives the plan.
    2. In each later one every rank sends every part once: all but the last when their gradients are ready, or else when
       FSDP2 asks for the whole. (In the second one, a trial, nothing goes earlier.)
    3. The last part is sent when FSDP2 asks. It carries flags of ranks on which the parts are useless: a hook has
       changed a gradient after it was sent, gradients are missing, gradients of other modules come in between (modules
       wrapped together could begin in another order on every rank), or other parameters are trained now.
    4. With any flag, all ranks reduce the whole.
    """

    def __init__(self, context: ExtContext, transport: Transport, module: FSDPModule, name: str) -> None:
        self._context = context
        self._lanes = transport.tagged_scatters
        self._least_bytes = transport.message_bytes  # of one rank's range of a part
        self._module = module
        self._name = name
        self._phase = Phase.LEARNING
        self._plan: _Plan | None = None
        self.num_reduced = self._num_plans = 0  # the same on all ranks of the shards
        self._backward = _Backward()

    @torch.no_grad()
    def reduce(self, packed: Tensor, output: Tensor, op: Any) -> bool:
        """Reduce ``packed``, (P * numel,), which stays as it is; this rank's range goes to ``output``, (numel,).

        Return False, on all ranks of the shards, if the whole is to be reduced.
        """
        plan = self._plan
        if plan is None:
            return False
        self._enter(current_backward())
        backward = self._backward
        has_begun = bool(backward.sent)
        try:
            flags = self._finish(packed, output, op, plan)
        except LaneError as error:
            raise type(error)(
                f"{error} (of {self._name}, a reduce-scatter that began when gradients were ready: if no rank has "
                f"died, but they run modules in different orders, or went on after a backward that has failed, set "
                f"ExtConfig(early=False)){see('a-wait-timed-out', quoted=error)}"
            ) from error
        finally:
            self._backward = _Backward(backward.number, is_reduced=True)
            self.num_reduced += 1
        if flags[_CHANGED]:
            logger.info("%s: its reduce-scatters begin early no more: gradients are not ready as planned", self._name)
        if flags.any():
            self.discard_plan(Phase.OFF if flags[_CHANGED] or self._num_plans == _MOST_PLANS else Phase.LEARNING)
            return False
        if self._phase is Phase.TRIAL and backward.first_turn is not None:
            self._phase = Phase.ACTIVE
        self._context.counts.early += has_begun
        return True

    def prepare(self, packed: Tensor, op: Any) -> None:
        """Make the plan from a reduce-scatter that goes as a whole, unless none can begin early."""
        if self._phase is not Phase.LEARNING or op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            return
        if packed.dtype not in (torch.float32, torch.bfloat16):
            return  # FSDP2 divides other types before it sums them
        columns = compat.columns_in(self._module, packed.numel() // self._lanes.world_size)
        parameters = compat.whole_parameters_of(self._module)
        if columns is None or parameters is None:
            return
        parts = _parts_of(columns, self._least_bytes // packed.element_size())
        if len(parts) == 1:
            return  # all gradients are ready at once
        self._phase = Phase.TRIAL
        self._plan = _Plan(parts, parameters, packed.dtype, op)
        self._num_plans += 1
        this = weakref.ref(self)  # the collector does not see a strong one from a tensor's hook
        for index, parameter in enumerate(parameters):
            handle = parameter.register_post_accumulate_grad_hook(partial(_on_grad_ready, this, index))
            self._plan.handles.append(handle)

    @torch.no_grad()
    def on_grad_ready(self, index: int) -> None:
        """Send parts whose gradients are ready; those may be the sums of several backwards."""
        number = current_backward()
        self._enter(number)
        if number != self._backward.number:
            return  # a checkpoint's backward; the whole may be asked for in the one around it
        plan, backward = self._plan, self._backward
        backward.ready.add(index)
        turn = self._context.turn_of(self)
        backward.first_turn = turn if backward.first_turn is None else backward.first_turn
        if plan is None or self._phase is not Phase.ACTIVE or backward.is_reduced:
            return
        while len(backward.sent) < len(plan.parts) - 1:
            part = plan.parts[len(backward.sent)]
            ready = backward.ready.issuperset(part.indices) and plan.fits(self._module)
            if not ready or not compat.reduces_in_this_backward(self._module):
                return
            memory = self._memory(plan, part.width)
            if not _pack([plan.parameters[each].grad for each in part.indices], memory):
                return
            self._send(plan, memory, self._memory(plan, part.width).copy_(memory))

    def _enter(self, number: int) -> None:
        """Begin a new backward, unless it is inside of another; one that has failed may have left something."""
        if number != self._backward.number and not inside_another_backward():
            self._backward = _Backward(number)

    def _finish(self, packed: Tensor, output: Tensor, op: Any, plan: _Plan) -> Tensor:
        """Send the remaining parts, wait, and return the flags of all ranks."""
        sent, first_turn = self._backward.sent, self._backward.first_turn
        flags = torch.zeros(_NUM_FLAGS, dtype=plan.dtype)
        rows = None
        numel = plan.parts[0].stop  # the last parameters come first
        as_planned = (op, packed.dtype, output.numel()) == (plan.op, plan.dtype, numel)
        if not plan.fits(self._module):
            flags[_OTHERS_TRAINED] = 1
        elif not as_planned or first_turn not in (None, self._context.turn_of(self)):
            flags[_CHANGED] = 1
        else:
            rows = packed.view(self._lanes.world_size, -1)
            for part, each in zip(plan.parts, sent, strict=False):
                if each.gradients is not None and not _have_same_bits(each.gradients, rows[:, part.start : part.stop]):
                    flags[_CHANGED] = 1
        for part in plan.parts[len(sent) :]:
            is_last = part is plan.parts[-1]
            memory = self._memory(plan, part.width + _NUM_FLAGS * is_last)
            memory[:, : part.width] = 0 if rows is None else rows[:, part.start : part.stop]
            if is_last:
                memory[:, part.width :] = flags
            self._send(plan, memory)
        for part, each in zip(plan.parts, sent, strict=True):
            each.work.wait()
            if rows is not None:
                output[part.start : part.stop] = each.memory[self._lanes.rank, : part.width]
        return sent[-1].memory[self._lanes.rank, -_NUM_FLAGS:]

    def _memory(self, plan: _Plan, width: int) -> Tensor:
        world_size = self._lanes.world_size
        return self._context.pool.empty(world_size * width, plan.dtype).view(world_size, width)

    def _send(self, plan: _Plan, memory: Tensor, gradients: Tensor | None = None) -> None:
        sent = self._backward.sent
        label = f"{self._name}, part {len(sent)} of reduce-scatter {self.num_reduced}"
        divisor = len(memory) if plan.op == dist.ReduceOp.AVG else 1
        partition = even_partition(memory.view(-1), len(memory))
        sent.append(_Sent(memory, self._lanes.spread_reduce_scatter(partition, label, divisor), gradients))

    def discard_plan(self, phase: Phase) -> None:
        self._phase = phase
        self._backward.sent.clear()
        for handle in self._plan.handles if self._plan is not None else ():
            handle.remove()
        self._plan = None


def _on_grad_ready(this: weakref.ref[EarlyReduceScatter], index: int, parameter: Tensor) -> None:
    early = this()
    if early is not None:
        early.on_grad_ready(index)


def _parts_of(columns: Sequence[compat.Column], least_numel: int) -> tuple[_Part, ...]:
    """Cut from the last column to the first, as backwards come, into parts of at least ``least_numel`` elements.

    The last part, which nothing hides, has the first parameter and a remainder of fewer elements.
    """
    parts = []
    last = len(columns)
    for index in reversed(range(len(columns))):
        if index == 0 or columns[last - 1].stop - columns[index].start >= least_numel:
            parts.append(_Part(columns[index].start, columns[last - 1].stop, range(index, last)))
            last = index
    return tuple(parts)


def _pack(gradients: Sequence[Tensor | None], memory: Tensor) -> bool:
    """Write every rank's rows of all gradients to its row of ``memory``; return False if they are not as planned."""
    found = [gradient for gradient in gradients if gradient is not None and gradient.layout == torch.strided]
    world_size = len(memory)
    numel = sum(-(-gradient.shape[0] // world_size) * math.prod(gradient.shape[1:]) for gradient in found)
    if len(found) < len(gradients) or numel != memory.shape[1]:
        return False
    compat.chunk_cat(found, memory)
    return True


def _have_same_bits(first: Tensor, second: Tensor) -> bool:
    """Compare bits, of NaN, too. NumPy takes a third of torch.equal's time."""
    integers = _INTEGERS[first.element_size()]
    return np.array_equal(first.view(integers).numpy(), second.view(integers).numpy())
