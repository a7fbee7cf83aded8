"""Groups of parameters that travel together: equal numbers (Horovod, section 3.2), a limit of bytes, or chosen."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ddp_hooks.comm import mebibytes, positive, whole

_GROUP_MB = 5.0


def groups_of(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    num_groups: int | None,
    group_mb: float | None,
    groups: Sequence[Sequence[str]] | None,
) -> list[list[str]]:
    """Split the parameters into groups of one type, the last parameters first, as gradients usually become ready.

    Args:
        model, parameters: with names.
        num_groups, group_mb, groups: see ``coordinate``.

    Raises:
        ValueError: wrong settings, or a group of several types.
    """
    names = list(parameters)[::-1]
    if num_groups is not None and not whole(num_groups, 1):
        raise ValueError(f"num_groups must be None, or a whole number >= 1, got {num_groups!r}")
    if group_mb is not None and not positive(group_mb):
        raise ValueError(f"group_mb must be None, or > 0 and finite, got {group_mb!r}")
    if group_mb is not None and (groups is not None or num_groups is not None):
        given = "groups" if groups is not None else "num_groups"
        raise ValueError(f"group_mb={group_mb!r} has no effect with {given}: leave it out")
    if groups is not None and num_groups is not None:
        raise ValueError("pass num_groups or groups, not both")
    if groups is not None:
        chosen = complete(groups, names)
        for group in chosen:
            dtypes = {parameters[name].dtype for name in group}
            if len(dtypes) > 1:
                raise ValueError(f"the group of {group[0]} has parameters of {dtypes}: one type travels together")
        return chosen
    if num_groups is not None:
        return [part for run in equal_counts(names, num_groups) for part in _by_dtype(run, parameters)]
    kinds = {name: (branch_of(model, name), parameters[name].dtype) for name in names}
    nbytes = {name: parameters[name].nbytes for name in names}
    return at_most_bytes(nbytes, mebibytes(_GROUP_MB if group_mb is None else group_mb), kinds)


def equal_counts(names: Sequence[str], num_groups: int) -> list[list[str]]:
    """Split names into runs whose lengths differ by one at most; not more runs than names."""
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
    """Split names into runs of one kind and at most ``limit_bytes``; a larger tensor stands alone."""
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


def complete(groups: Iterable[Sequence[str]], names: Iterable[str]) -> list[list[str]]:
    """Return ``groups``, and a group for each other name, in order.

    Raises:
        ValueError: a group is empty, or has a name of another group, or a name that is not in ``names``.
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


def branch_of(model: nn.Module, name: str) -> str:
    """Return the branch of a parameter: a child of the model, or of the innermost list of modules that has it."""
    path = name.split(".")[:-1]
    branch = ".".join(path[:1])
    for depth in range(1, len(path)):
        container = model.get_submodule(".".join(path[:depth]))
        if isinstance(container, nn.ModuleList | nn.ModuleDict):
            branch = ".".join(path[: depth + 1])
    return branch


def _by_dtype(names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    groups: dict[torch.dtype, list[str]] = {}
    for name in names:
        groups.setdefault(parameters[name].dtype, []).append(name)
    return list(groups.values())
