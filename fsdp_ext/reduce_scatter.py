"""Reduce-scatters of gradients for FSDP2: on lanes, or encoded in the backend's own collectives."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ddp_hooks.comm import Partition, RoundedWire, Work, aligned_bounds, codec_of, without_messages
from ddp_hooks.comm.algorithms.encoded import add_encoded, encode_for_peers, sum_bytes
from ddp_hooks.comm.algorithms.scratch import Scratch
from ddp_hooks.comm.torch_compat.autograd import current_backward, in_backward
from fsdp_ext import compat, compressed
from fsdp_ext.checks import ROOT
from fsdp_ext.config import ExtConfig
from fsdp_ext.context import ExtContext, Transport
from fsdp_ext.deferred import DeferredOutput, Delivery, deferred_output, memory_of
from fsdp_ext.early import EarlyReduceScatter, Phase
from fsdp_ext.residuals import Residuals

logger = logging.getLogger("fsdp_ext")

_OUTSIDE = "it runs outside of a backward"
_FEW = 1024  # numbers of a gradient that tell whether it has values


class LaneReduceScatter(compat.ReduceScatter):
    """Reduce-scatter of one module's gradients, in the memory that FSDP2 has copied them to, beside the backward.

    Every range goes straight to its owner, who adds in the order of ranks. (gloo's own reduce-scatter moves an
    all-reduce.) FSDP2 drops the work that a reduce-scatter returns, as on accelerators its result is read in stream
    order; see :func:`_reason_before_views` for when the result can be ready later on CPUs, too.
    """

    def __init__(self, context: ExtContext, module: FSDPModule, name: str, residuals: Residuals | None) -> None:
        self._context = context
        self._module = module
        self._name = name or ROOT
        self._density = context.config.density_of(name)
        self._residuals = residuals
        self._last_sparse: Work | None = None  # it selects, and so changes residuals
        self._logged: set[str] = set()
        self._is_first = True
        self._early: EarlyReduceScatter | None = None
        self._input_numel = 0  # of the input that an output is to be allocated for
        self._is_all_reduce_due = False  # by FSDP2, of the last result
        self._open: Delivery | None = None  # the last result, until gradients are made of it
        self._last_all_reduce: int | None = None  # the number of its backward

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for the whole gradients, then for this rank's part of their mean, or sum."""
        (numel,) = map(int, size)
        num_shards = compat.num_shards(self._module)
        is_output = num_shards > 1 and 0 < numel * num_shards == self._input_numel
        self._input_numel = 0 if is_output else numel
        if not is_output:
            return self._context.pool.empty(numel, dtype)
        facts = compat.facts_of(self._module)
        if facts.hooked and not facts.replicated:
            return torch.empty(numel, dtype=dtype, device=device)
        waits = facts.offloads or facts.is_partial or self._reason_at_return(facts) is not None
        if self._context.config.defer and not waits:
            # FSDP2 converts it inside of the backward; here, where it may arrive later, there is nothing to convert.
            dtype = facts.original_dtype or dtype
        return deferred_output(torch.empty(numel, dtype=dtype, device=device), self)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Reduce ``input_tensor``, (P * numel,), to ``output_tensor``, (numel,), now or later; the input may change."""
        context = self._context
        context.counts.reduce_scatters += 1
        context.pending.flush_owner(self)
        self._is_all_reduce_due, self._open = True, None
        transport, output = context.transport_of(group), memory_of(output_tensor)
        early = self._early_on(transport)
        if early is not None:
            with self._measure(f"reduce-scatter of {self._name}"):
                if early.reduce(input_tensor, output, op):
                    return None
            early.prepare(input_tensor, op)
        partition = compressed.even_partition(input_tensor, transport.scatters.world_size)
        work = self._submit(transport, partition, op)
        delivery = Delivery(work, partition.ranges[transport.scatters.rank], output, partition.nbytes, self)
        facts = compat.facts_of(self._module)
        reason = self._reason_at_return(facts)
        if reason is None and isinstance(output_tensor, DeferredOutput):
            output.fill_(torch.nan)
            if facts.is_partial and facts.partial_sum is None:
                self._defer_partial(delivery)  # FSDP2 keeps the output, and does nothing with it in this backward
            else:
                self._open = delivery
        else:
            self._log(reason or "the output buffer was not allocated by this extension")
            self._complete(delivery)
        return None

    def _submit(self, transport: Transport, partition: Partition, op: Any) -> Work:
        """Return the work that ends with this rank's mean in its range."""
        config, density = self._context.config, self._density
        scatters, rank = transport.scatters, transport.scatters.rank
        divisor = compat.divisor_of(op, partition.flat, len(partition.ranges))
        codec = codec_of(config.scatter_codec, config.block, partition.flat.dtype)
        if density < 1 and partition.flat.dtype == torch.float16:
            raise ValueError(
                f"{self._name}: reduce_scatter='sparse' adds what was left out of earlier gradients, whose scale in "
                f"float16 was another: take MixedPrecisionPolicy(reduce_dtype=torch.float32), or bfloat16"
            )
        residual = None
        if self._residuals is not None and (density < 1 or codec is not None):
            residual = self._residuals.prepare(partition.flat, scatters.group, op)
        if density < 1 and residual is not None:
            algorithm = compressed.sparse_reduce_scatter(partition, residual, rank, density, config.entries, divisor)
            # A module that ran twice is reduced twice in one backward, perhaps by two lanes.
            after = () if self._last_sparse is None else (self._last_sparse,)
            self._last_sparse = scatters.run(algorithm, self._name, after)
            return self._last_sparse
        if codec is not None:
            partition = partition._replace(wire=RoundedWire(codec, residual))
        return scatters.spread_reduce_scatter(partition, self._name, divisor)

    # Calls of DeferredOutput, for what FSDP2 does next, in this order (foreach_reduce)

    def all_reduce(self, output: Tensor, group: dist.ProcessGroup | None, op: Any) -> bool:
        """Reduce the result, ``output``, (numel,), over replicas (HSDP); return False if another than FSDP2 asks.

        A reduce-scatter and an all-gather, on a lane that waits for the reduce-scatter over the shards. All replicas
        submit the same: the path by which the result came, on which they may differ, does not matter.
        """
        if group is None or group is not compat.replicas_of(self._module) or not self._is_all_reduce_due:
            return False
        self._is_all_reduce_due, self._context.averages_replicas = False, True
        self._context.counts.all_reduces += 1
        self._advise()
        own, after = (output, ()) if self._open is None else (self._open.source, (self._open.work,))
        partial_sum = None if self._open is None else self._open.partial_sum

        def add_earlier() -> None:
            if partial_sum is not None:
                own.add_(partial_sum)

        world_size = dist.get_world_size(group)
        partition = Partition(own, aligned_bounds(own.numel(), world_size, own.element_size()))
        lane = self._context.transport_of(group).scatters.next_lane()
        lane.run(without_messages(add_earlier), self._name, after)
        lane.reduce_scatter([partition], self._name, compat.divisor_of(op, own, world_size))
        work = lane.all_gather([partition], self._name)
        if self._open is not None:
            self._open = self._open._replace(work=work, partial_sum=None)
        else:
            with self._measure(work.label):
                work.wait()
        return True

    def add(self, target: Tensor, value: Any) -> bool:
        """Add a result to FSDP2's sum of earlier ones, or that sum to the last result, when it arrives.

        Return False if the result has arrived, or for other tensors.
        """
        delivery = self._open
        if delivery is None or not isinstance(value, Tensor) or target.shape != value.shape:
            return False
        if value is delivery.output:
            self._open = None
            self._defer_partial(delivery._replace(output=target, adds=True))
        elif target is delivery.output:
            self._open = delivery._replace(partial_sum=value)
        return self._open is not delivery

    def divide(self, divisor: float) -> bool:
        """Return False if the sum, which is divided when it arrives, has arrived."""
        if self._open is None or self._open.divisor is not None:
            return False
        self._open = self._open._replace(divisor=divisor)
        return True

    def view(self) -> None:
        """Deliver when the backward ends, or now if something reads gradients before."""
        delivery, self._open = self._open, None
        if delivery is None:
            return
        facts = compat.facts_of(self._module)
        accumulates = any(parameter.grad is not None for parameter in facts.parameters)
        columns = compat.columns_in(self._module, delivery.output.numel()) if accumulates else ()
        defer = self._context.config.defer
        reason = _reason_before_views(facts, delivery.output.dtype, defer, is_complete=columns is not None)
        if reason is None:
            self._context.pending.make_room(delivery.nbytes)  # this may fail, when no gradient is taken away yet
            self._context.counts.deferred += 1
            present = {column.parameter: column.parameter.grad for column in columns or ()}
            saved = {parameter: grad for parameter, grad in present.items() if isinstance(grad, DTensor)}
            for parameter in saved:
                parameter.grad = None  # so that FSDP2 makes a new one
            self._context.pending.defer(delivery._replace(saved=saved, parameters=facts.parameters))
        else:
            self._log(reason)
            self._complete(delivery)

    def _defer_partial(self, delivery: Delivery) -> None:
        """Deliver a result that FSDP2 all-reduces in a later backward when this one ends."""
        reason = "defer=False" if not self._context.config.defer else None if in_backward() else _OUTSIDE
        if reason is None:
            self._context.pending.make_room(delivery.nbytes)
            self._context.counts.deferred += 1
            self._context.pending.defer(delivery)
        else:
            self._log(reason)
            self._complete(delivery)

    def finish(self) -> None:
        if self._open is not None:
            delivery, self._open = self._open, None
            self._complete(delivery)

    def remove(self) -> None:
        if self._early is not None:
            self._early.discard_plan(Phase.OFF)

    def _complete(self, delivery: Delivery) -> None:
        with self._measure(delivery.work.label):
            delivery.complete()

    def _early_on(self, transport: Transport) -> EarlyReduceScatter | None:
        """Made for a module whose every result must be ready at once, by facts that all ranks of the shards share."""
        if self._is_first:  # only now FSDP2 knows what it does
            self._is_first = False
            config = self._context.config
            waits = not config.defer or compat.facts_of(self._module).offloads
            exact = self._density == 1 and config.scatter_codec == "exact"
            several = transport.scatters.world_size > 1 and not compat.holds_other_modules(self._module)
            if config.early and waits and exact and several:
                self._early = EarlyReduceScatter(self._context, transport, self._module, self._name)
        return self._early

    def _measure(self, label: str) -> contextlib.AbstractContextManager[None]:
        return self._context.scatter_stall.measure(self._context.recorder, label)

    def _reason_at_return(self, facts: compat.GroupFacts) -> str | None:
        """Why the result must be ready when the call returns; None: FSDP2's next operations come here."""
        if facts.hooked:
            return "a hook of set_all_reduce_hook follows"
        if not compat.overrides_are_enabled():
            return "__torch_function__ is disabled (the backward was started from a tensor subclass)"
        if facts.replicated and not self._context.averages_replicas:
            return "FSDP2 was not seen yet to leave its all-reduce over replicas to the extension"
        return None

    def _advise(self) -> None:
        """Tell, once, how to leave out all-reduces whose results are only added to those of earlier backwards."""
        context, facts = self._context, compat.facts_of(self._module)
        last, self._last_all_reduce = self._last_all_reduce, current_backward()
        is_first = last in (None, self._last_all_reduce)  # or the module has run twice
        if context.is_advised or is_first or facts.partial_sum is not None or dist.get_rank() > 0:
            return
        gradients = (parameter.grad for parameter in facts.parameters if isinstance(parameter.grad, DTensor))
        # Zeros are left by zero_grad(set_to_none=False).
        context.is_advised = any(bool(each.to_local().flatten()[:_FEW].any()) for each in gradients)
        if context.is_advised:
            logger.warning(
                "several backwards accumulate gradients, and each all-reduces them over replicas. One all-reduce is "
                "enough: call model.set_requires_all_reduce(False) before all micro-batches but the last, and "
                "model.set_requires_all_reduce(True) before the last. FSDP2 then adds micro-batches before replicas, "
                "in the reduce_dtype: the result may differ in its last bits"
            )

    def _log(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            logger.debug("%s waits for each reduce-scatter: %s", self._name, reason)


def _reason_before_views(facts: compat.GroupFacts, dtype: torch.dtype, defer: bool, is_complete: bool) -> str | None:
    """Why the result must be ready before gradients are made of it; None: it is read after the backward only.

    FSDP2 may copy it inside of the backward (foreach_reduce). It also adds it to an existing gradient, unless we do so
    later; for that the result must be ``is_complete``: it has gradients of all trained parameters.
    """
    if not defer:
        return "defer=False"
    if not in_backward():
        return _OUTSIDE
    if facts.offloads:
        return "gradients are offloaded"
    if dtype != facts.original_dtype:
        return f"gradients are {dtype}, parameters {facts.original_dtype}"
    gradients = [parameter.grad for parameter in facts.parameters if parameter.grad is not None]
    if gradients and not is_complete:
        return "some parameters have no gradient, and others accumulate"
    if not all(isinstance(gradient, DTensor) for gradient in gradients):
        return "a gradient is no DTensor"  # FSDP2 refuses it
    if any(map(compat.has_grad_ready_hooks, facts.parameters)):
        return "parameters have hooks of register_post_accumulate_grad_hook"
    return None


class NativeReduceScatter(compat.ReduceScatter):
    """The backend's all-to-all of encoded gradients: each travels straight to the rank that needs it.

    For accelerators; see :class:`~fsdp_ext.all_gather.NativeAllGather` for its stream and its exact collective.
    """

    def __init__(self, config: ExtConfig, residuals: Residuals | None) -> None:
        self._config = config
        self._residuals = residuals
        self._exact = compat.DefaultReduceScatter()

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._exact.allocate(*args, **kwargs)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        codec = codec_of(self._config.scatter_codec, self._config.block, input_tensor.dtype)
        if codec is None:
            return self._exact(output_tensor, input_tensor, group, op, async_op)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        divisor = compat.divisor_of(op, input_tensor, world_size)
        chunks = input_tensor.chunk(world_size)
        flat = self._residuals.prepare(input_tensor, group, op) if self._residuals is not None else None
        residuals = None if flat is None else flat.chunk(world_size)
        nbytes = world_size * codec.nbytes(output_tensor.numel())
        outgoing, incoming = (torch.empty(nbytes, dtype=torch.uint8, device=input_tensor.device) for _ in range(2))
        encode_for_peers(chunks, rank, codec, outgoing.chunk(world_size), residuals)
        dist.all_to_all_single(incoming, outgoing, group=group)
        residual = None if residuals is None else residuals[rank]
        space = Scratch(torch.empty(sum_bytes(chunks[rank]), dtype=torch.uint8, device=input_tensor.device))
        add_encoded(chunks[rank], rank, incoming.chunk(world_size), codec, residual, space, divisor)
        output_tensor.copy_(chunks[rank])
        return None
