"""Reduce-scatters that begin before FSDP2 asks for them: for those whose result must be ready when the call returns.

Such a call stops the backward until all of a module's gradients have travelled. But most of them have been there for a
while, as FSDP2 calls when the last of them is. So they go in parts, each as soon as its gradients have come.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ddp_hooks.comm import Partition, Work
from ddp_hooks.comm.compat import inside_another_backward
from fsdp_ext import compat
from fsdp_ext.memory import Pool
from fsdp_ext.transport import Transport, equal_bounds

logger = logging.getLogger("fsdp_ext")

_NUM_SAMPLES = 16  # of every rank's range of a part
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of as many bytes, in which NaN equals itself


@dataclass(frozen=True)
class _Part:
    """Parameters that follow each other in what FSDP2 reduces, of which every rank's range has the same columns."""

    start: int
    stop: int
    places: range  # of the parameters, among those that are trained


@dataclass
class _Sent:
    """A part that is under way."""

    memory: Tensor  # (world_size, columns), reduced in place
    work: Work
    gradients: tuple[tuple[Tensor, int], ...] = ()  # that were sent, and their versions
    sample: Tensor | None = None  # of what was sent

    def differs_from(self, rows: Tensor) -> bool:
        """Whether gradients were changed after they were sent: by what PyTorch counts, or as far as samples show.

        They are let go of.
        """
        gradients, self.gradients = self.gradients, ()
        if any(gradient._version != version for gradient, version in gradients):
            return True
        return self.sample is not None and not torch.equal(self.sample, _sample(rows))


@dataclass
class _Plan:
    """What one reduce-scatter has told about all later ones."""

    parts: tuple[_Part, ...]  # in the order in which they are sent
    parameters: tuple[Tensor, ...]  # whole
    transport: Transport
    world_size: int
    dtype: torch.dtype  # that gradients are added in
    handles: list[Any] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """Of one rank's range."""
        return self.parts[0].stop  # the last parameters come first


class EarlyReduceScatter:
    """One module's reduce-scatters in parts: the same parts, in the same order, on all ranks, whenever they begin.

    The first one goes as a whole, and tells what it consists of. Of later ones every part but the last is sent when its
    gradients have come, or else when FSDP2 asks for the whole. The last one is sent then, and carries a mark of ranks
    on which a gradient was changed after it was sent: all ranks then reduce the whole, and send nothing early any more.

    Args:
        module: without other FSDP modules inside of it, so that nothing else is reduced while its gradients come.
        name: for messages.
        pool: memory for what is sent.
    """

    def __init__(self, module: FSDPModule, name: str, pool: Pool) -> None:
        self._module = module
        self._name = name
        self._pool = pool
        self._plan: _Plan | None = None
        self._has_given_up = False
        self._backward: int | None = None  # that gradients have come in
        self._come: set[int] = set()
        self._sent: list[_Sent] = []
        self.has_begun_early = False
        """Whether parts of the last one were sent before FSDP2 asked for it."""

    @torch.no_grad()
    def reduce(self, packed: Tensor, output: Tensor, rank: int, op: Any) -> bool:
        """Make ``output``, (numel,), the mean of this rank's range of ``packed``, (P * numel,), which stays as it is.

        Returns:
            Whether it is; else the whole is to be reduced, which is the same on all ranks.
        """
        plan = self._plan
        if plan is None:
            return False
        if (op, packed.dtype, output.numel()) != (dist.ReduceOp.AVG, plan.dtype, plan.numel):
            self._give_up("not all of its gradients came, or not for a mean")
            return False
        rows = packed.view(plan.world_size, -1)
        early = zip(plan.parts, self._sent, strict=False)
        self.has_begun_early = bool(self._sent)
        differing = [sent.differs_from(rows[:, part.start : part.stop]) for part, sent in early]
        changed = any(differing)
        for part in plan.parts[len(self._sent) :]:
            self._send_late(rows[:, part.start : part.stop], plan, changed if part is plan.parts[-1] else None)
        for part, sent in zip(plan.parts, self._sent, strict=True):
            sent.work.wait()
            output[part.start : part.stop] = sent.memory[rank, : part.stop - part.start]
        changed = bool(self._sent[-1].memory[rank, -1])
        self._forget()
        if changed:
            self._give_up("a hook has changed gradients that had come")
        return not changed

    def prepare(self, packed: Tensor, transport: Transport, world_size: int, op: Any) -> None:
        """Let the next one begin early, if it can, from what FSDP2 reduces now, as a whole."""
        if self._has_given_up or self._plan is not None or op != dist.ReduceOp.AVG:
            return
        columns = compat.columns_in(self._module, world_size, packed.numel())
        parameters = compat.whole_parameters_of(self._module)
        if columns is None or parameters is None:
            return
        parts = _parts_of(columns, transport.message_bytes // packed.element_size())
        if len(parts) == 1:
            self._has_given_up = True  # all of it comes at once
            return
        self._plan = _Plan(parts, parameters, transport, world_size, packed.dtype)
        for place, parameter in enumerate(parameters):
            handle = parameter.register_post_accumulate_grad_hook(partial(self._note, place))
            self._plan.handles.append(handle)

    def remove(self) -> None:
        """Leave the module's parameters as they were before."""
        self._forget()
        for handle in self._plan.handles if self._plan is not None else ():
            handle.remove()
        self._plan = None

    def _give_up(self, reason: str) -> None:
        logger.info("%s: reduce-scatters do not begin early any more: %s", self._name, reason)
        self._has_given_up = True
        self.remove()

    @torch.no_grad()
    def _note(self, place: int, parameter: Tensor) -> None:
        """A gradient has come, of this or an earlier backward as well."""
        backward = torch._C._current_graph_task_id()
        if self._backward != backward:
            if inside_another_backward():
                return
            self._forget()  # one that has failed may have left something
            self._backward = backward
        self._come.add(place)
        plan = self._plan
        while plan is not None and len(self._sent) < len(plan.parts) - 1:
            part = plan.parts[len(self._sent)]
            if not self._come.issuperset(part.places) or not compat.reduces_in_this_backward(self._module):
                return
            self._send_early(part, plan)

    def _send_early(self, part: _Part, plan: _Plan) -> None:
        found = [plan.parameters[place].grad for place in part.places]
        gradients = [gradient for gradient in found if gradient is not None]  # all have come
        memory = self._memory(plan, part.stop - part.start)
        torch._chunk_cat(gradients, dim=0, num_chunks=plan.world_size, out=memory)  # as FSDP2 does
        versions = tuple((gradient, gradient._version) for gradient in gradients)
        sample = _sample(memory)
        self._sent.append(_Sent(memory, self._begin(memory, plan), versions, sample))

    def _send_late(self, rows: Tensor, plan: _Plan, mark: bool | None) -> None:
        """``mark``: for one more column; None: there is none."""
        width = rows.shape[1]
        memory = self._memory(plan, width if mark is None else width + 1)
        memory[:, :width] = rows
        if mark is not None:
            memory[:, width] = float(mark)
        self._sent.append(_Sent(memory, self._begin(memory, plan)))

    def _memory(self, plan: _Plan, width: int) -> Tensor:
        return self._pool.empty(plan.world_size * width, plan.dtype).view(plan.world_size, width)

    def _begin(self, memory: Tensor, plan: _Plan) -> Work:
        partition = Partition(memory.view(-1), equal_bounds(memory.numel(), plan.world_size))
        return plan.transport.scatters.spread_reduce_scatter(partition, self._name, plan.world_size)

    def _forget(self) -> None:
        """What has come and was sent."""
        self._backward = None
        self._come.clear()
        self._sent.clear()


def _parts_of(columns: Sequence[compat.Column], least_numel: int) -> tuple[_Part, ...]:
    """From the last column to the first, as backwards come; each of at least so many elements of one rank, if it can.

    The last part is small: it is what nothing hides.
    """
    parts = []
    last = len(columns)
    for place in reversed(range(len(columns))):
        if place == 0 or columns[last - 1].stop - columns[place].start >= least_numel:
            parts.append(_Part(columns[place].start, columns[last - 1].stop, range(place, last)))
            last = place
    return tuple(parts)


def _sample(rows: Tensor) -> Tensor:
    """Some numbers of every row, as integers."""
    step = max(1, rows.shape[1] // _NUM_SAMPLES)
    return rows[:, ::step].contiguous().view(_INTEGERS[rows.element_size()])
