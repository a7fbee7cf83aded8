"""Ways of sending gradients, of all workers in one process: from the gradients of a step to the mean that is applied.

Ours are the algorithms of the packages, run on the fabric. bfloat16 and PowerSGD are twins of torch's hooks: the same
arithmetic, without processes; a test compares them with the hooks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, Partition, Round, aligned_bounds, run_on_fabric
from ddp_hooks.comm.algorithms.encoded import encoded_reduce_scatter, encoded_scatter_bytes
from ddp_hooks.comm.algorithms.exact import exact_reduce_scatter, exact_scratch_bytes
from ddp_hooks.comm.wire.codecs import Codec, CodecName, codec_of
from ddp_hooks.comm.wire.exact import ExactWire
from ddp_hooks.sparse import EntryCodec, SparseSum, Sparsity

Mean: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""Takes a gradient per worker, (numel,) float32, and returns the mean that all workers get; may change all of them."""
ResultT = TypeVar("ResultT")

GRAIN_NUMEL = 256  # ranges begin at multiples of it, as those of QuantizedState
SPARSE_WIRE = EntryCodec("compact", torch.float32)  # TopKConfig's default
_GLOO_SEGMENT_BYTES = 1 << 20


@dataclass(frozen=True)
class Setup:
    """What a format is told before the first step.

    Args:
        shapes: of the parameters, in the order of the gradients' elements: that of DDP's only bucket.
        workers: how many.
        steps: of the whole training.
    """

    shapes: Sequence[torch.Size]
    workers: int
    steps: int

    @property
    def numels(self) -> list[int]:
        return [shape.numel() for shape in self.shapes]

    @property
    def numel(self) -> int:
        return sum(self.numels)


def in_rank_order(setup: Setup) -> Mean:
    """Plain DDP's mean, but for the order: ``((g0 + g1) + g2) + g3``, as our exact sums have it."""

    def mean(gradients: Sequence[Tensor]) -> Tensor:
        total, *others = gradients
        for gradient in others:
            total += gradient
        return total.div_(setup.workers)

    return mean


def in_ring_order(setup: Setup, dtype: torch.dtype = torch.float32) -> Mean:
    """Plain DDP's mean, bit for bit, and in bfloat16 that of torch's hook: divided before gloo's ring adds."""

    def mean(gradients: Sequence[Tensor]) -> Tensor:
        return ring_sum([gradient.to(dtype).div_(setup.workers) for gradient in gradients]).to(gradients[0].dtype)

    return mean


def ring_sum(values: Sequence[Tensor]) -> Tensor:
    """Return the sum in the order of gloo's ring: part r of P begins with rank r - 1, and goes downwards to rank r."""
    size, numel = len(values), values[0].numel()
    segments_of_rank = max(2, -(-values[0].nbytes // (size * _GLOO_SEGMENT_BYTES)))
    length = segments_of_rank * -(-numel // (segments_of_rank * size))
    bounds = [min(rank * length, numel) for rank in range(size)]
    parts = [value.tensor_split(bounds[1:]) for value in values]
    sums = []
    for rank in range(size):
        total = parts[(rank - 1) % size][rank].clone()
        for step in range(2, size + 1):
            total += parts[(rank - step) % size][rank]
        sums.append(total)
    return torch.cat(sums)


def exact(setup: Setup) -> Mean:
    """``DearConfig(wire="exact")``: in 16 bits where numbers fit."""
    bounds = _dear_bounds(setup)
    wires = [ExactWire() for _ in range(setup.workers)]

    def mean(gradients: Sequence[Tensor]) -> Tensor:
        partitions = [Partition(gradient, bounds) for gradient in gradients]
        algorithms = []
        for rank, partition in enumerate(partitions):
            chunks = partition.ranges
            scratch = torch.empty(exact_scratch_bytes(chunks, rank), dtype=torch.uint8)
            algorithms.append(exact_reduce_scatter(chunks, rank, wires[rank], 0, scratch, setup.workers))
        run(algorithms)
        return owned(partitions)

    return mean


def rounded(name: str, setup: Setup, rounds_mean: bool = False) -> Mean:
    """``DearConfig(wire=name)``: rounded once, on the way to the owner, with error feedback; summed in float32.

    Gathers are those of :class:`Differences`. ``rounds_mean``: as ``QuantizedConfig``, which has none, and rounds means
    once more, on their way to all workers; the owner has the residual.
    """
    codec = codec_called(name)
    bounds = aligned_bounds(setup.numel, setup.workers, 1, GRAIN_NUMEL) if rounds_mean else _dear_bounds(setup)
    residuals = [Partition(torch.zeros(setup.numel), bounds).ranges for _ in range(setup.workers)]

    def reduce(chunks: Sequence[Tensor], rank: int) -> Algorithm:
        # The own residual, in the unit of means, does not belong to the sum.
        kept = [torch.zeros_like(each) if peer == rank else each for peer, each in enumerate(residuals[rank])]
        scratch = torch.empty(encoded_scatter_bytes(chunks, rank, codec), dtype=torch.uint8)
        return encoded_reduce_scatter(range(setup.workers), rank, chunks, codec, kept, scratch, setup.workers)

    def mean(gradients: Sequence[Tensor]) -> Tensor:
        partitions = [Partition(gradient, bounds) for gradient in gradients]
        run([reduce(partition.ranges, rank) for rank, partition in enumerate(partitions)])
        found = Partition(owned(partitions), bounds)
        for owner, values in enumerate(found.ranges if rounds_mean else []):
            payload = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
            codec.encode_with_residual(values, residuals[owner][owner], payload)
            codec.decode(payload, values)
        return found.flat

    return mean


class Differences:
    """Gathers of ``DearConfig(wire=name)``: all workers add the rounded difference to the owners' precise numbers."""

    def __init__(self, name: str, setup: Setup) -> None:
        self._codec = codec_called(name)
        self._bounds = _dear_bounds(setup)

    def gather(self, shown: Tensor, precise: Tensor) -> None:
        """Change ``shown``, (numel,), in place."""
        for own, wanted in zip(*(Partition(flat, self._bounds).ranges for flat in (shown, precise)), strict=True):
            payload = torch.empty(self._codec.nbytes(own.numel()), dtype=torch.uint8)
            self._codec.encode(wanted - own, payload)
            self._codec.add(payload, own)


def _dear_bounds(setup: Setup) -> tuple[int, ...]:
    return aligned_bounds(setup.numel, setup.workers, torch.float32.itemsize)


def codec_called(name: str) -> Codec:
    """Return the codec of float32 with this name.

    Raises:
        ValueError: there is none.
    """
    for known in get_args(CodecName):
        if known == name and (codec := codec_of(known, None, torch.float32)) is not None:
            return codec
    raise ValueError(f"expected a codec of {', '.join(get_args(CodecName))}, got {name!r}")


def spardl(density: float, setup: Setup) -> Mean:
    """``TopKConfig(density=density)``, all parameters in one group."""
    sparsity = Sparsity("spardl", max(1, round(density * setup.numel)), SPARSE_WIRE)
    sums = [SparseSum(sparsity, setup.numel, rank, setup.workers) for rank in range(setup.workers)]
    residuals = [torch.zeros(setup.numel) for _ in sums]

    def mean(gradients: Sequence[Tensor]) -> Tensor:
        parts = zip(sums, residuals, gradients, strict=True)
        result = run([part.run(residual, gradient) for part, residual, gradient in parts])[0]
        return gradients[0].zero_().index_copy_(0, result.indices, result.values / setup.workers)

    return mean


class PowerSgd:
    """Twin of torch's ``powerSGD_hook`` with its defaults, error feedback and warm start among them.

    It begins after a tenth of the steps, as torch's documentation advises; until then the sum is dense.
    """

    def __init__(self, rank: int, setup: Setup) -> None:
        self._setup = setup
        self._step, self._start = 0, max(2, setup.steps // 10)
        self._dense = in_ring_order(setup)
        self._errors = [torch.zeros(setup.numel) for _ in range(setup.workers)]
        self._ranks = [self._rank_of(shape, rank) for shape in setup.shapes]  # 0: not compressed
        self._qs: list[Tensor] = []  # of compressed parameters, (columns, rank) each

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        self._step += 1
        if self._step <= self._start:
            return self._dense(gradients)
        for gradient, error in zip(gradients, self._errors, strict=True):
            error.add_(gradient)  # what this step is to send
        workers, setup = self._setup.workers, self._setup
        pieces = [error.split(setup.numels) for error in self._errors]
        places = [index for index, rank in enumerate(self._ranks) if rank]
        matrices = [[piece[i].view(setup.shapes[i][0], -1) for i in places] for piece in pieces]
        starts = self._starts()
        ps = self._reduced([[m @ q for m, q in zip(each, starts, strict=True)] for each in matrices])
        ps = [_orthogonal(p) for p in ps]
        qs = self._reduced([[m.T @ p for m, p in zip(each, ps, strict=True)] for each in matrices])
        self._qs = [q.div_(workers) for q in qs]
        low_rank = iter([p @ q.T for p, q in zip(ps, self._qs, strict=True)])
        others = [index for index, rank in enumerate(self._ranks) if not rank]
        whole = iter(self._reduced([[piece[i] for i in others] for piece in pieces]))
        mean = torch.cat([next(low_rank).flatten() if rank else next(whole).div_(workers) for rank in self._ranks])
        for error in self._errors:
            error.sub_(mean)
        return mean

    @staticmethod
    def _rank_of(shape: torch.Size, most: int) -> int:
        """Return the rank of a parameter's approximation; 0: too small to save at least half."""
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(rows, columns, most)
        return rank if 2 * (rows + columns) * rank < rows * columns else 0

    def _starts(self) -> list[Tensor]:
        """Return orthogonal matrices to begin a step with, (columns, rank) each; the same on all workers."""
        if not self._qs:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
                shapes = zip(self._setup.shapes, self._ranks, strict=True)
                self._qs = [torch.randn(math.prod(shape[1:]), rank) for shape, rank in shapes if rank]
        return [_orthogonal(q) for q in self._qs]

    def _reduced(self, tensors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Return the sums of all workers' tensors, which travel in one message."""
        if not tensors[0]:
            return []
        total = ring_sum([torch.cat([tensor.flatten() for tensor in each]) for each in tensors])
        parts = total.split([tensor.numel() for tensor in tensors[0]])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors[0], strict=True)]


def _orthogonal(matrix: Tensor) -> Tensor:
    return torch.linalg.qr(matrix).Q.contiguous()


def run(algorithms: Sequence[Generator[Round, None, ResultT]]) -> list[ResultT]:
    """Run ``algorithms[r]`` as rank r on the fabric; return their results."""
    results: dict[int, ResultT] = {}

    def noted(rank: int, algorithm: Generator[Round, None, ResultT]) -> Algorithm:
        results[rank] = yield from algorithm

    run_on_fabric([noted(rank, algorithm) for rank, algorithm in enumerate(algorithms)])
    return [results[rank] for rank in range(len(algorithms))]


def owned(partitions: Sequence[Partition]) -> Tensor:
    """Return every rank's own range, one after the other."""
    return torch.cat([partition.ranges[rank] for rank, partition in enumerate(partitions)])


DENSE, EXACT = "plain DDP", "exact"
GATHERS_DIFFERENCES = ("bf16", "int8", "int4")
FORMATS: dict[str, Callable[[Setup], Mean]] = {
    DENSE: in_rank_order,
    "plain DDP, other order": in_ring_order,
    EXACT: exact,
    "bf16": partial(rounded, "bf16"),
    "int8": partial(rounded, "int8"),
    "int4": partial(rounded, "int4"),
    "quantized int8": partial(rounded, "int8", rounds_mean=True),
    "quantized int4": partial(rounded, "int4", rounds_mean=True),
    "torch's bf16 hook": partial(in_ring_order, dtype=torch.bfloat16),
    "PowerSGD, rank 4": partial(PowerSgd, 4),
    "SparDL, 1 %": partial(spardl, 0.01),
    "SparDL, 0.1 %": partial(spardl, 0.001),
}
