"""Fewer bits on accelerators: encoded shards and gradients in the backend's own collectives, on FSDP2's streams.

Everything is issued on the current stream, which FSDP2 has chosen and waits for, so nothing is left to be waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fsdp_ext import compat
from fsdp_ext.codecs import codec_of
from fsdp_ext.compressed import add_payloads, encode_for_peers, gather_codec
from fsdp_ext.config import ExtConfig
from fsdp_ext.residuals import Residuals


class _Allocates:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory as FSDP2's own communication does."""
        return torch.empty(*size, dtype=dtype, device=device)


class NativeAllGather(_Allocates, compat.AllGather):
    """The backend's all-gather of encoded shards, decoded on every rank."""

    def __init__(self, config: ExtConfig, module: FSDPModule) -> None:
        self._config = config
        self._module = module

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather ``input_tensor``, (numel,), of all ranks into ``output_tensor``, (P * numel,)."""
        world_size = dist.get_world_size(group)
        codec = gather_codec(self._config, self._module, output_tensor.dtype, world_size)
        if codec is None:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        nbytes = codec.nbytes(input_tensor.numel())
        own, payloads = (input_tensor.new_empty(n * nbytes, dtype=torch.uint8) for n in (1, world_size))
        codec.encode(input_tensor, own)
        dist.all_gather_into_tensor(payloads, own, group=group)
        for payload, shard in zip(payloads.chunk(world_size), output_tensor.chunk(world_size), strict=True):
            codec.decode(payload, shard)
        return None


class NativeReduceScatter(_Allocates, compat.ReduceScatter):
    """The backend's all-to-all of encoded gradients: each travels straight to the rank that needs it."""

    def __init__(self, config: ExtConfig, residuals: Residuals | None) -> None:
        self._config = config
        self._residuals = residuals

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor``, (P * numel,), over all ranks into ``output_tensor``, (numel,), this rank's part."""
        codec = codec_of(self._config.scatter_codec, self._config.block_numel, input_tensor.dtype)
        if codec is None:
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        divisor = compat.divisor_of(op, input_tensor, world_size)
        chunks = input_tensor.chunk(world_size)
        flat = self._residuals.prepare(input_tensor, group, op) if self._residuals is not None else None
        residuals = None if flat is None else flat.chunk(world_size)
        outgoing = torch.cat(encode_for_peers(chunks, rank, codec, residuals))
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=group)
        residual = None if residuals is None else residuals[rank]
        add_payloads(chunks[rank], rank, incoming.chunk(world_size), codec, divisor, residual)
        output_tensor.copy_(chunks[rank])
        return None
