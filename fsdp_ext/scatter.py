"""Reduce-scatters of gradients for FSDP2, on lanes, under the rest of the backward where that is right."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

from ddp_hooks.comm import Algorithm, Partition, Work, aligned_bounds, without_messages
from ddp_hooks.comm import torch_compat as comm_compat
from fsdp_ext import compat
from fsdp_ext.checks import ROOT
from fsdp_ext.codecs import codec_of
from fsdp_ext.compressed import compressed_reduce_scatter, sliced
from fsdp_ext.early import EarlyReduceScatter
from fsdp_ext.output import Output, are_asked, memory_of, output_of
from fsdp_ext.pending import Delivery, Earlier
from fsdp_ext.residuals import Residuals
from fsdp_ext.sparse import sparse_reduce_scatter
from fsdp_ext.transport import Transport, equal_bounds

if TYPE_CHECKING:
    from fsdp_ext.extension import Extension

logger = logging.getLogger("fsdp_ext")


class RingReduceScatter(ReduceScatter):
    """A reduce-scatter in the memory that FSDP2 has copied the gradients to.

    gloo's own reduce-scatter moves an all-reduce. FSDP2 drops what a reduce-scatter returns, as on accelerators its
    result is read in stream order; see :meth:`_reason_to_wait` for when it can be ready later on CPUs, too.
    """

    def __init__(self, extension: Extension, module: FSDPModule, name: str, residuals: Residuals | None) -> None:
        self._extension = extension
        self._module = module
        self._name = name or ROOT
        self._density = extension.config.density_of(name)
        self._residuals = residuals
        self._last: Work | None = None  # that has changed residuals by selecting
        self._told: set[str] = set()
        self._runs_first_time = True
        self._early: EarlyReduceScatter | None = None
        self._input_numel = 0  # of the input that an output is to be allocated for
        self._is_all_reduce_due = False  # by FSDP2, of what was reduced last
        self._opened: Delivery | None = None  # of what FSDP2 has still to do something to

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the whole gradients, then for this rank's part of their mean, or sum.

        FSDP2 converts that to the parameters' type, inside of the backward. Where it may come later, its memory is of
        that type from the start: then there is nothing to convert.
        """
        (numel,) = map(int, size)
        num_shards = compat.num_shards(self._module) or 1
        is_output = num_shards > 1 and 0 < numel * num_shards == self._input_numel
        self._input_numel = 0 if is_output else numel
        if not is_output:
            return self._extension.pool.empty(numel, dtype)
        facts = compat.facts_of(self._module)
        if facts is None or (facts.hooked and not facts.replicated):
            return torch.empty(numel, dtype=dtype, device=device)
        if self._extension.config.defer and not facts.offloads and self._reason_to_finish(facts) is None:
            dtype = facts.original_dtype or dtype
        return output_of(torch.empty(numel, dtype=dtype, device=device), self)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor``, (P * numel,), over all ranks; this rank's part goes to ``output_tensor``, (numel,).

        That may be later, and the input may be overwritten.
        """
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        self._extension.counts.reduce_scatters += 1
        self._extension.pending.make_way(self)
        self._is_all_reduce_due, self._opened = True, None
        transport, output = self._extension.transport_of(group), memory_of(output_tensor)
        early = self._early_on(transport)
        if early is not None:
            with self._measure(f"reduce-scatter of {self._name}"):
                if early.reduce(input_tensor, output, rank, op):
                    self._extension.counts.early += early.has_begun_early
                    return None
            early.prepare(input_tensor, world_size, op)
        divisor = divisor_of(op, input_tensor, world_size)
        partition = Partition(input_tensor, equal_bounds(input_tensor.numel(), world_size))
        work = self._submit(transport, partition, rank, op, divisor)
        opened = Delivery(work, partition.ranges[rank], output, partition.nbytes, self)
        reason = self._reason_to_finish(compat.facts_of(self._module))
        if reason is None and isinstance(output_tensor, Output):
            self._opened = opened
            output.fill_(torch.nan)
        else:
            self._tell(reason or "its memory is none that functions ask")
            self._complete(opened)
        return None

    # What FSDP2 does next, in this order (foreach_reduce); see fsdp_ext.output.

    def all_reduce(self, output: Tensor, group: dist.ProcessGroup | None, op: Any) -> bool:
        """Of what was reduced over the shards, ``output``, (numel,): over replicas, in the place of FSDP2 (HSDP).

        A reduce-scatter and an all-gather, on a lane that waits for the reduce-scatter over the shards. What is
        submitted does not depend on how that came about, which replicas do not agree upon: their shards are others.

        Returns:
            False, if it is not FSDP2 that asks.
        """
        if group is None or group is not compat.replicas_of(self._module) or not self._is_all_reduce_due:
            return False
        self._is_all_reduce_due, self._extension.averages_replicas = False, True
        opened = self._opened
        own, after = (output, ()) if opened is None else (opened.source, (opened.work,))
        world_size = dist.get_world_size(group)
        partition = Partition(own, aligned_bounds(own.numel(), world_size, own.element_size()))
        lane = self._extension.transport_of(group).scatters.next_lane()
        lane.run(without_messages(lambda: None), self._name, after)
        lane.reduce_scatter([partition], self._name, divisor_of(op, own, world_size))
        work = lane.all_gather([partition], self._name)
        if opened is not None:
            self._opened = opened._replace(work=work)
        else:
            with self._measure(work.label):
                work.wait()
        return True

    def divide(self, divisor: float) -> bool:
        """What has been summed, when it comes."""
        if self._opened is None or self._opened.divisor is not None:
            return False
        self._opened = self._opened._replace(divisor=divisor)
        return True

    def view(self) -> None:
        """Deliver with the backward's end, if that is right, or now."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        facts = compat.facts_of(self._module)
        assert facts is not None, "nothing is opened without"
        added_to = any(parameter.grad is not None for parameter in facts.parameters)
        columns = compat.columns_in(self._module, opened.output.numel()) if added_to else ()
        reason = self._reason_to_wait(facts, opened.output.dtype, is_complete=columns is not None)
        if reason is None:
            self._extension.pending.make_room(opened.nbytes)  # which may fail, when nothing is taken away yet
            self._extension.counts.deferred += 1
            earlier = _take_away(columns or ())
            self._extension.pending.defer(opened._replace(earlier=earlier, parameters=facts.parameters))
        else:
            self._tell(reason)
            self._complete(opened)

    def finish(self) -> None:
        """Fill what is used otherwise."""
        if self._opened is not None:
            opened, self._opened = self._opened, None
            self._complete(opened)

    def _complete(self, delivery: Delivery) -> None:
        with self._measure(delivery.work.label):
            delivery.complete()

    def remove(self) -> None:
        """Leave the module's parameters as they were before."""
        if self._early is not None:
            self._early.remove()

    def _early_on(self, transport: Transport) -> EarlyReduceScatter | None:
        """For a module whose every result must be ready at once, by what all ranks of the shards have in common."""
        if self._runs_first_time:  # only now FSDP2 knows what it does
            self._runs_first_time = False
            extension, facts = self._extension, compat.facts_of(self._module)
            waits = facts is not None and (facts.offloads or not extension.config.defer)
            exact = self._density == 1 and extension.config.scatter_codec == "exact"
            alone = not compat.holds_other_modules(self._module)
            if extension.config.early and waits and exact and alone and transport.world_size > 1:
                self._early = EarlyReduceScatter(
                    self._module,
                    self._name,
                    transport.early,
                    transport.message_bytes,
                    extension.pool,
                    extension.turns,
                )
        return self._early

    def _measure(self, label: str) -> contextlib.AbstractContextManager[None]:
        return self._extension.scatter_stall.measure(self._extension.recorder, label)

    def _submit(self, transport: Transport, partition: Partition, rank: int, op: Any, divisor: int) -> Work:
        config = self._extension.config
        if self._density < 1:
            return self._submit_sparse(transport, partition, rank, op, divisor)
        codec = codec_of(config.scatter_codec, config.block_numel, partition.flat.dtype)
        if codec is None:
            return transport.scatters.spread_reduce_scatter(partition, self._name, divisor)
        residual = None
        if self._residuals is not None:
            residual = self._residuals.open(partition.flat, transport.group, op)
        kept = None if residual is None else Partition(residual, partition.bounds).ranges

        def start(chunks: list[Tensor], where: slice) -> Algorithm:
            residuals = None if kept is None else [each[where] for each in kept]
            return compressed_reduce_scatter(chunks, rank, codec, divisor, residuals)

        return transport.scatters.spread_several(sliced(partition.ranges, transport.slice_numel, start), self._name)

    def _submit_sparse(self, transport: Transport, partition: Partition, rank: int, op: Any, divisor: int) -> Work:
        if partition.flat.dtype == torch.float16:
            raise ValueError(
                f"{self._name}: reduce_scatter='sparse' adds what was left out of earlier gradients, whose scale in "
                f"float16 was another: take MixedPrecisionPolicy(reduce_dtype=torch.float32), or bfloat16"
            )
        assert self._residuals is not None
        residual = self._residuals.open(partition.flat, transport.group, op)
        if residual is None:
            return transport.scatters.spread_reduce_scatter(partition, self._name, divisor)
        wire = self._extension.config.entries
        algorithm = sparse_reduce_scatter(partition, residual, rank, self._density, wire, divisor)
        # A module that ran twice is reduced twice in one backward, perhaps by two lanes.
        self._last = transport.scatters.run(algorithm, self._name, () if self._last is None else (self._last,))
        return self._last

    def _reason_to_finish(self, facts: compat.GroupFacts | None) -> str | None:
        """Why the result must be ready when the call returns, or None: what FSDP2 does to it next comes here."""
        if facts is None:
            return f"torch {torch.__version__} does not tell what follows it"
        if facts.hooked:
            return "a hook of set_all_reduce_hook follows"
        if not are_asked():
            return "the backward was begun by a tensor of another class, inside of which functions ask no tensor"
        if facts.replicated and not facts.sums_replicas_at_once:
            return "FSDP2 adds up several results before it all-reduces them over replicas"
        if facts.replicated and not self._extension.averages_replicas:
            return "FSDP2 was not seen yet to leave its all-reduce over replicas to the extension"
        return None

    def _reason_to_wait(self, facts: compat.GroupFacts, dtype: torch.dtype, is_complete: bool) -> str | None:
        """Why the result must be ready when gradients are made of it, or None: it is read after the backward only.

        FSDP2 may copy it inside of the backward (foreach_reduce). It also adds it to a gradient that is there already,
        unless we do so later; for that it must be known to which parameters it belongs: to all that are trained, if it
        ``is_complete``.
        """
        if not self._extension.config.defer:
            return "defer=False"
        if not comm_compat.in_backward():
            return "it runs outside of a backward"
        if facts.offloads:
            return "gradients are offloaded"
        if dtype != facts.original_dtype:
            return f"gradients are of {dtype}, parameters of {facts.original_dtype or 'a type that is not told'}"
        gradients = [parameter.grad for parameter in facts.parameters if parameter.grad is not None]
        if gradients and not is_complete:
            return "some parameters have no gradient, and others have one already, to be added to"
        if not all(isinstance(gradient, DTensor) for gradient in gradients):
            return "there is a gradient that is no DTensor"  # FSDP2 refuses it
        if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in facts.parameters):
            return "parameters have hooks of register_post_accumulate_grad_hook"
        return None

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            logger.debug("%s: reduce-scatters are waited for where %s", self._name, reason)


def _take_away(columns: Sequence[compat.Column]) -> tuple[Earlier, ...]:
    """Gradients that are there already: FSDP2 then makes new ones."""
    earlier = []
    for column in columns:
        if isinstance(column.parameter.grad, DTensor):
            earlier.append(Earlier(column.parameter, column.parameter.grad))
            column.parameter.grad = None
    return tuple(earlier)


def divisor_of(op: Any, gradients: Tensor, world_size: int) -> int:
    """What the sum is to be divided by; if it is another factor, gradients are multiplied by it, in place."""
    if op == dist.ReduceOp.AVG:
        return world_size
    if op == dist.ReduceOp.SUM:
        return 1
    if op == dist.ReduceOp.PREMUL_SUM:  # set_gradient_divide_factor
        gradients.mul_(compat.factor_of(op))
        return 1
    raise NotImplementedError(f"gradients are reduced by sums and means, got {op}")
