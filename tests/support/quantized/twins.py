"""A model whose gradients are known beforehand, and the all-reduce in fewer bits for all ranks in one process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import QuantizedConfig, QuantizedState, quantized_hook
from ddp_hooks.comm import aligned_bounds
from tests.support.devices import rank_device

CONFIG = QuantizedConfig(bits=8, block_numel=64, timeout_s=20, stall_warning_s=10)
OPTIONS: dict[str, Any] = {"bucket_cap_mb": 0.03, "gradient_as_bucket_view": True}


def noise(seed: int, index: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + index)
    return torch.randn(like.numel(), generator=generator).view(like.shape).to(like.dtype)


class Noise(nn.Module):
    """Parameters of odd sizes; the gradient of each is noise that depends on a seed, and on nothing else."""

    SHAPES = ((3,), (130, 67), (0,), (5, 7), (), (40, 33), (9001,), (64,))

    def __init__(self, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> None:
        super().__init__()
        pairs = zip(self.SHAPES, itertools.cycle(dtypes))
        self.values = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape, dtype in pairs)

    def forward(self, seed: int, unused: tuple[int, ...] = ()) -> Tensor:
        used = [(i, p) for i, p in enumerate(self.values) if i not in unused]
        return torch.stack([(p * noise(seed, i, p).to(p.device)).sum().double() for i, p in used]).sum()


class Side:
    """A model under the hook, with its state."""

    def __init__(
        self, config: QuantizedConfig = CONFIG, model: nn.Module | None = None, scaler: Any = None, **options: Any
    ) -> None:
        self.model = (model if model is not None else Noise()).to(rank_device())
        self.ddp = DistributedDataParallel(self.model, **{**OPTIONS, **options})
        self.state = QuantizedState(self.ddp, config, scaler=scaler)
        self.ddp.register_comm_hook(self.state, quantized_hook)

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in self.model.parameters()]


class Twin:
    """The same for all ranks, with plain tensors: residuals by rank and parameter."""

    def __init__(self, config: QuantizedConfig, parameters: Sequence[Tensor], world_size: int) -> None:
        self.config, self.world_size = config, world_size
        self._former: list[tuple[int, ...]] = []  # runs of the last step
        self.residuals = [[torch.zeros(p.numel()) for p in parameters] for _ in range(world_size)]

    def reduce(self, gradients: list[list[Tensor]], runs: list[tuple[int, ...]]) -> list[Tensor]:
        """Return the mean of every parameter, (numel,); ``gradients`` are by rank."""
        means: dict[int, Tensor] = {}
        for run in runs:
            sizes = [self.residuals[0][i].numel() for i in run]
            flats = [torch.cat([own[i].flatten() for i in run]) for own in gradients]
            kept = [torch.cat([own[i] for i in run]) for own in self.residuals]
            is_new = run not in self._former
            bounds = itertools.pairwise(aligned_bounds(sum(sizes), self.world_size, 1, 256))
            mean = torch.cat([
                self._reduce_range(owner, [f[begin:end] for f in flats], [k[begin:end] for k in kept], is_new)
                for owner, (begin, end) in enumerate(bounds)
            ])  # fmt: skip
            means |= zip(run, mean.split(sizes), strict=True)
            for own, each in zip(self.residuals, kept, strict=True):
                for i, part in zip(run, each.split(sizes), strict=True):
                    own[i] = part.clone()
        self._former = runs
        return [means[i] for i in range(len(means))]

    def _reduce_range(self, owner: int, values: list[Tensor], kept: list[Tensor], is_new: bool) -> Tensor:
        size = self.config.node_size or 1
        assert isinstance(size, int)
        if is_new:  # the ranks that encoded these elements until now leave their residuals to the node's sum
            for rank in range(self.world_size):
                if rank % size != owner % size:
                    values[rank] = values[rank] + kept[rank]
                    kept[rank].zero_()
        sums = []
        for first in range(0, self.world_size, size):
            total = values[first].float().clone()
            for each in values[first + 1 : first + size]:
                total += each.float()
            sums.append(total)
        local, own_node = owner % size, owner // size
        total = torch.zeros_like(sums[0])
        for node, each in enumerate(sums):
            total += each if node == own_node else self._sent(each, kept[node * size + local])
        mean, residual = total / self.world_size, kept[owner] * (1 / self.world_size)
        result = self._sent(mean, residual)
        kept[owner].copy_(residual / (1 / self.world_size))
        return result

    def _sent(self, values: Tensor, residual: Tensor) -> Tensor:
        """Return what receivers read; change the residual."""
        codec = self.config.codec_for(torch.float32)
        assert codec is not None
        payload = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
        codec.encode_with_residual(values, residual, payload)
        codec.decode(payload, decoded := torch.empty_like(values))
        return decoded


def agree(tensors: list[Tensor]) -> bool:
    """Return True if all ranks have the same bits; collective."""
    flat = torch.cat([each.detach().flatten().double() for each in tensors])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(flat, other) for other in everyone)
