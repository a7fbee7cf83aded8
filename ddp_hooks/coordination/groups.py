"""Which tensors travel together: equal numbers (Horovod, section 3.2), about equal bytes, or as the user says."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence


def equal_counts(names: Sequence[str], num_groups: int) -> list[list[str]]:
    """Runs of neighbours of equal numbers, or one more in the first ones; not more groups than names."""
    if num_groups < 1:
        raise ValueError(f"num_groups must be >= 1, got {num_groups}")
    num_groups = min(num_groups, len(names))
    bounds = [0]
    for index in range(num_groups):
        bounds.append(bounds[-1] + (len(names) + num_groups - 1 - index) // num_groups)
    return [list(names[begin:end]) for begin, end in itertools.pairwise(bounds)]


def at_most_bytes(
    nbytes: Mapping[str, int], limit_bytes: int, kinds: Mapping[str, object] | None = None
) -> list[list[str]]:
    """Runs of neighbours of at most so many bytes together, and of one kind; what is larger stands alone."""
    groups: list[list[str]] = []
    total, kind = 0, None
    for name, size in nbytes.items():
        own_kind = None if kinds is None else kinds[name]
        if not groups or total + size > limit_bytes or own_kind != kind:
            groups.append([])
            total, kind = 0, own_kind
        groups[-1].append(name)
        total += size
    return groups


def checked(groups: Iterable[Sequence[str]], names: Iterable[str]) -> list[list[str]]:
    """``groups`` as the user wrote them, and every name that is in none of them alone, in order.

    Raises:
        ValueError: a group is empty, a name is in two of them, or is none of ``names``.
    """
    known, seen = list(names), dict[str, int]()
    found = [list(group) for group in groups]
    for index, group in enumerate(found):
        if not group:
            raise ValueError(f"group {index} is empty: leave it out")
        for name in group:
            if name not in known:
                raise ValueError(f"group {index} has {name!r}, which is no trained parameter; these are: {known}")
            if name in seen:
                raise ValueError(f"{name!r} is in groups {seen[name]} and {index}: name it once")
            seen[name] = index
    return [*found, *([name] for name in known if name not in seen)]
