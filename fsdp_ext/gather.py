"""All-gathers of parameters for FSDP2, on lanes; they end when their parameters are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from ddp_hooks.comm import Algorithm, Partition, Work, see
from ddp_hooks.comm.torch_compat import in_backward
from fsdp_ext import compat
from fsdp_ext.checks import ROOT
from fsdp_ext.codecs import codec_of
from fsdp_ext.compressed import compressed_all_gather, sliced
from fsdp_ext.transport import Transport, equal_bounds

if TYPE_CHECKING:
    from fsdp_ext.extension import Extension


class RingAllGather(AllGather):
    """Starts an all-gather; FSDP2 waits for it where it copies parameters out (foreach_all_gather_copy_out).

    On CPUs FSDP2's own all-gather blocks, as there are no streams, even where the gather is only prefetched.
    """

    def __init__(self, extension: Extension, module: FSDPModule, name: str) -> None:
        self._extension = extension
        self._module = module
        self._name = name

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the whole parameters, of which this rank's shards fill its part."""
        (numel,) = map(int, size)
        with torch.inference_mode(False):  # in which lanes, being other threads, could not write to it
            return self._extension.pool.empty(numel, dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather ``input_tensor``, (numel,), of all ranks into ``output_tensor``, (P * numel,)."""
        self._extension.prefetcher.note(self._module)
        world_size, rank = dist.get_world_size(group), dist.get_rank(group)
        partition = Partition(output_tensor, equal_bounds(output_tensor.numel(), world_size))
        own = partition.ranges[rank]
        if own.data_ptr() != input_tensor.data_ptr():  # FSDP2 makes it a part of the output
            own.copy_(input_tensor)
        work = self._submit(self._extension.transport_of(group), partition, rank, self._name or ROOT)
        self._extension.counts.gathers += 1
        return _Gathering(self._extension, work, self._module, self._name)

    def _submit(self, transport: Transport, partition: Partition, rank: int, label: str) -> Work:
        config = self._extension.config
        codec = codec_of(config.all_gather, config.block_numel, partition.flat.dtype)
        # With reshard_after_forward=n the backward gathers what the forward has rounded, among fewer ranks.
        if codec is None or len(partition.ranges) != compat.num_shards(self._module):
            return transport.gathers.spread_all_gather(partition, label)

        def start(chunks: list[Tensor], where: slice) -> Algorithm:
            return compressed_all_gather(chunks, rank, codec)

        return transport.gathers.spread_several(sliced(partition.ranges, transport.slice_numel, start), label)


class _Gathering(dist.Work):
    """What FSDP2 waits for."""

    def __init__(self, extension: Extension, work: Work, module: FSDPModule, name: str) -> None:
        super().__init__()
        self._extension = extension
        self._work = work
        self._module = module
        self._name = name
        self._mark = compat.mark_of(module) if extension.prefetcher.in_forward else None  # of what is gathered

    def wait(self, timeout: Any = None) -> bool:
        extension, stall = self._extension, self._extension.gather_stall
        extension.prefetcher.note_arrival(self._module)
        before_s = stall.seconds
        with stall.measure(extension.recorder, self._work.label), extension.failures_to_ignore():
            self._work.wait()
        if extension.prefetcher.in_forward and self._mark is not None and compat.runs_forward(self._module):
            self._refuse_what_is_old()
        if in_backward():
            extension.backward_waits[self._name] += stall.seconds - before_s
        return True

    def is_completed(self) -> bool:
        return self._work.done

    def _refuse_what_is_old(self) -> None:
        """By hooks of the model's forward, say, which run when the first parameters are on their way."""
        if self._mark != compat.mark_of(self._module):
            raise RuntimeError(
                f"parameters of {self._name or ROOT} were changed inside of the model's forward, when their values of "
                f"before were being gathered for it: change them before the forward, not in it or in a hook of it, or "
                f"set ExtConfig(prefetch=0){see('parameters-change-in-forward')}"
            )
