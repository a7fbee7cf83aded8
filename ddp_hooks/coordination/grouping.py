"""Groups of parameters that travel together: equal numbers (Horovod, section 3.2), a limit of bytes, or chosen."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
    """Split the parameters into groups of one type, the last parameters first, as gradients usually become ready."""
    dtypes = {name: parameters[name].dtype for name in reversed(list(parameters))}
    names = list(dtypes)
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
            if len(found := {dtypes[name] for name in group}) > 1:
                raise ValueError(f"the group of {group[0]} has parameters of {found}: one type travels together")
        return chosen
    if num_groups is not None:
        runs = [(run, dict.fromkeys(dtypes[name] for name in run)) for run in equal_counts(names, num_groups)]
        return [[name for name in run if dtypes[name] == dtype] for run, found in runs for dtype in found]
    kinds = {name: (branch_of(model, name), dtype) for name, dtype in dtypes.items()}
    nbytes = {name: parameters[name].nbytes for name in names}
    return at_most_bytes(nbytes, mebibytes(_GROUP_MB if group_mb is None else group_mb), kinds)


def equal_counts(names: Sequence[str], num_groups: int) -> list[list[str]]:
    """Split names into runs whose lengths differ by one at most; not more runs than names."""
    num_groups = min(num_groups, len(names))
    smallest, num_larger = divmod(len(names), num_groups)
    bounds = [index * smallest + min(index, num_larger) for index in range(num_groups + 1)]
    return [list(names[begin:end]) for begin, end in itertools.pairwise(bounds)]


def at_most_bytes(nbytes: Mapping[str, int], limit_bytes: int, kinds: Mapping[str, object]) -> list[list[str]]:
    """Split names into runs of one kind and at most ``limit_bytes``; a larger tensor stands alone."""
    groups: list[list[str]] = []
    total, kind = 0, None
    for name, size in nbytes.items():
        if not groups or total + size > limit_bytes or kinds.get(name) != kind:
            groups.append([])
            total, kind = 0, kinds.get(name)
        groups[-1].append(name)
        total += size
    return groups


def complete(groups: Iterable[Sequence[str]], names: Iterable[str]) -> list[list[str]]:
    """Return ``groups``, and a group for each other name, in order."""
    known = list(names)
    found = {index: list(group) for index, group in enumerate(groups)}
    seen = group_by_name(found)
    for name, index in seen.items():
        if name not in known:
            raise ValueError(f"group {index} has {name!r}, which is no trained parameter; these are: {known}")
    return [*found.values(), *([name] for name in known if name not in seen)]


def group_by_name(groups: Mapping[Any, Sequence[str]]) -> dict[str, Any]:
    """Return the group of each name; raises ValueError if a group is empty, or a name in two of them."""
    seen: dict[str, Any] = {}
    for key, names in groups.items():
        if not names:
            raise ValueError(f"group {key} is empty: leave it out")
        for name in names:
            if name in seen:
                raise ValueError(f"{name!r} is in groups {seen[name]} and {key}: name it once")
            seen[name] = key
    return seen


def branch_of(model: nn.Module, name: str) -> str:
    """Return the branch of a parameter: a child of the model, or of the innermost list of modules that has it."""
    path = name.split(".")[:-1]
    branch = ".".join(path[:1])
    for depth in range(1, len(path)):
        container = model.get_submodule(".".join(path[:depth]))
        if isinstance(container, nn.ModuleList | nn.ModuleDict):
            branch = ".".join(path[: depth + 1])
    return branch
