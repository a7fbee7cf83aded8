"""How strategies put tensors together: DDP's buckets, and groups up to a size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ddp_hooks.comm import mebibytes
from ddp_hooks.planning.simulation import Run

_FIRST_BUCKET_BYTES = 1 << 20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES


def ddp_buckets(run: Run, bucket_mb: float, order: Iterable[int] | None = None) -> list[list[int]]:
    """Tensors in the order of the backward, as DDP has them after its first step: a full bucket is closed."""
    limit = min(_FIRST_BUCKET_BYTES, mebibytes(bucket_mb))
    buckets: list[list[int]] = [[]]
    total = 0
    for tensor in run.step.backward_order if order is None else order:
        if total >= limit:
            buckets.append([])
            total, limit = 0, mebibytes(bucket_mb)
        buckets[-1].append(tensor)
        total += run.step.tensors[tensor].num_bytes
    return buckets


def fuse(run: Run, order: Iterable[int], limit: int) -> list[list[int]]:
    """Neighbours together while their total does not exceed ``limit`` bytes; a larger tensor alone (section IV-B)."""
    groups: list[list[int]] = []
    total = 0
    for tensor in order:
        num_bytes = run.step.tensors[tensor].num_bytes
        if groups and total + num_bytes <= limit:
            groups[-1].append(tensor)
            total += num_bytes
        else:
            groups.append([tensor])
            total = num_bytes
    return groups


def part_of(run: Run, tensor: int) -> float:
    """What part of all gradients a tensor is."""
    return run.step.tensors[tensor].num_bytes / run.step.num_bytes


class Launcher:
    """Hears of gradients, and launches a group when it has all of its own; others are not its concern."""

    def __init__(self, groups: Sequence[Sequence[int]], launch: Callable[[int], None]) -> None:
        self._group_of = {tensor: number for number, group in enumerate(groups) for tensor in group}
        self._missing = [len(group) for group in groups]
        self._launch = launch

    def ready(self, tensor: int) -> None:
        """A gradient lies in its bucket."""
        number = self._group_of.get(tensor)
        if number is None:
            return
        self._missing[number] -= 1
        if not self._missing[number]:
            self._launch(number)
