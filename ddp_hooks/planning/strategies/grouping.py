"""Groups of tensors that travel together: DDP's buckets, and groups up to a size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ddp_hooks.comm import mebibytes
from ddp_hooks.planning.simulation import Run

_FIRST_BUCKET_BYTES = 1 << 20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES


def ddp_buckets(run: Run, bucket_mb: float, order: Iterable[int] | None = None) -> list[list[int]]:
    """Return DDP's buckets after its first step: tensors in the order of the backward; a full bucket is closed."""
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


def group_by_size(items: Iterable[int], size_of: Callable[[int], int], limit: int) -> list[list[int]]:
    """Group neighbours whose total is at most ``limit`` bytes; a larger item is alone (DeAR, section IV-B)."""
    groups: list[list[int]] = []
    total = 0
    for item in items:
        total += size_of(item)
        if not groups or total > limit:
            groups.append([])
            total = size_of(item)
        groups[-1].append(item)
    return groups


def launcher(groups: Sequence[Sequence[int]], launch: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function that takes ready gradients and launches each group when all of its gradients are ready."""
    groups_of: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        for tensor in group:
            groups_of.setdefault(tensor, []).append(number)
    missing = [len(group) for group in groups]

    def ready(tensor: int) -> None:
        for number in groups_of.get(tensor, ()):
            missing[number] -= 1
            if not missing[number]:
                launch(number)

    return ready
