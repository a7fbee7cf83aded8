"""All-gathers of parameters for FSDP2: on lanes, or encoded in the backend's own collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ddp_hooks.comm import LaneError, Partition, RoundedWire, Work, see
from fsdp_ext import compat
from fsdp_ext.checks import ROOT
from fsdp_ext.compressed import even_partition, gather_codec
from fsdp_ext.config import ExtConfig
from fsdp_ext.context import ExtContext, Transport
from fsdp_ext.prefetch import Prefetcher


class LaneAllGather(compat.AllGather):
    """All-gather of one module's parameters; FSDP2 waits for it where it copies them (foreach_all_gather_copy_out).

    On CPUs FSDP2's own all-gather blocks, as there are no streams, even where the gather is only prefetched.
    """

    def __init__(self, context: ExtContext, prefetcher: Prefetcher, module: FSDPModule, name: str) -> None:
        self._context = context
        self._prefetcher = prefetcher
        self._module = module
        self._name = name

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (numel,) = map(int, size)
        with torch.inference_mode(False):  # in which lanes, being other threads, could not write to it
            return self._context.pool.empty(numel, dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._prefetcher.on_gather(self._module)
        transport = self._context.transport_of(group)
        partition = even_partition(output_tensor, transport.gathers.world_size)
        own = partition.ranges[transport.gathers.rank]
        if own.data_ptr() != input_tensor.data_ptr():  # FSDP2 makes it a part of the output
            own.copy_(input_tensor)
        work = self._submit(transport, partition)
        self._context.counts.gathers += 1
        version = compat.shard_version(self._module) if self._prefetcher.in_forward else None
        return _GatherWork(partial(self._wait, work, version))

    def _submit(self, transport: Transport, partition: Partition) -> Work:
        gathers, label = transport.gathers, self._name or ROOT
        codec = gather_codec(self._context.config, self._module, partition.flat.dtype, len(partition.ranges))
        if codec is not None:
            partition = partition._replace(wire=RoundedWire(codec))
        return gathers.all_gather([partition], label)

    def _wait(self, work: Work, version: tuple[object, ...] | None) -> None:
        """Wait until the parameters are whole, whose shards had this ``version`` when the gather began."""
        context, stall = self._context, self._context.gather_stall
        self._prefetcher.on_wait(self._module)
        # When all ends, gathers are waited for only to be dropped.
        ignored = contextlib.suppress(LaneError) if context.is_closing else contextlib.nullcontext()
        with stall.measure(context.recorder, work.label), ignored:
            work.wait()
        # A hook of the model's forward may write to parameters when the first gathers are under way.
        checked = self._prefetcher.in_forward and version is not None and compat.runs_forward(self._module)
        if checked and version != compat.shard_version(self._module):
            raise RuntimeError(
                f"parameters of {self._name or ROOT} were changed inside of the model's forward, while their earlier "
                f"values were being gathered for it: change them before the forward, not in it or in a hook of it, or "
                f"set ExtConfig(prefetch=0){see('parameters-change-in-forward')}"
            )


class _GatherWork(dist.Work):
    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: Any = None) -> bool:
        self._wait()
        return True


class NativeAllGather(compat.AllGather):
    """The backend's all-gather of encoded shards, decoded on every rank.

    For accelerators. Everything is issued on the current stream, which FSDP2 has chosen and waits for.
    """

    def __init__(self, config: ExtConfig, module: FSDPModule) -> None:
        self._config = config
        self._module = module
        # Not its subclass: FSDP2 would let ``set_symm_mem_for_comm()`` put another object in the place of this one.
        self._exact = compat.DefaultAllGather()

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._exact.allocate(*args, **kwargs)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        world_size = dist.get_world_size(group)
        codec = gather_codec(self._config, self._module, output_tensor.dtype, world_size)
        if codec is None:
            return self._exact(output_tensor, input_tensor, group, async_op)
        nbytes = codec.nbytes(input_tensor.numel())
        own, payloads = (input_tensor.new_empty(n * nbytes, dtype=torch.uint8) for n in (1, world_size))
        codec.encode(input_tensor, own)
        dist.all_gather_into_tensor(payloads, own, group=group)
        for payload, shard in zip(payloads.chunk(world_size), output_tensor.chunk(world_size), strict=True):
            codec.decode(payload, shard)
        return None
