"""Where compiled code waits for parameters: as seldom as DDP cuts its graphs, not before every module.

A pre-hook that waits cannot be part of a graph, so it ends one. A module that is compiled, and small, therefore waits
for everything below it, and the pre-hooks below are left out of the graph (:class:`Passable`). They are left out only
while that wait is known to have happened: whoever calls such a module past the one that waits gets other code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ddp_hooks.dear.inert import InertOnCopy


class Clearance:
    """Whether everything that a module waits for is there."""

    def __init__(self) -> None:
        self.given = True


class Passable(InertOnCopy):
    """A pre-hook that compiled code passes by where somebody above has waited for its module.

    A graph is used only while the clearance is as it was when the graph was made.

    Args:
        function: the hook.
        clearance: of the module that waits in its place.
    """

    def __init__(self, function: Callable[..., Any], clearance: Clearance) -> None:
        super().__init__(function)
        self._clearance = clearance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and self._clearance.given:
            return None
        return super().__call__(*args, **kwargs)


def stand_ins(
    modules: Sequence[tuple[str, torch.nn.Module]],
    sequence: Sequence[int],
    compiled: Collection[int],
    bytes_below: Callable[[int], int],
    max_bytes: int,
) -> dict[int, int]:
    """Which modules need not wait themselves, and who waits in their place: always one that runs around them.

    Args:
        modules: paths and modules, as ``named_modules()`` of the root has them.
        sequence: the modules that ran, in order; by index, as all that follows.
        compiled: those that are part of a graph.
        bytes_below: bytes of the parameters of a module and of all below it.
        max_bytes: what one wait may be for.
    """
    index_of = {path: index for index, (path, _) in enumerate(modules)}
    entered = {module: place for place, module in reversed(list(enumerate(sequence)))}
    shared = _shared(modules)
    stands_in: dict[int, int] = {}
    closed: set[int] = set()  # compiled modules below which nobody waits

    for module, (path, _) in enumerate(modules):
        if module not in compiled:
            continue
        parent = _nearest(path, index_of, entered)
        if parent is None or module in shared or entered[module] < entered[parent]:
            passes = False
        else:
            # What torch.compile(module) returns waits outside of the graph, so the module itself need not.
            wrapped = isinstance(modules[parent][1], torch._dynamo.OptimizedModule)
            inside = parent in compiled
            passes = wrapped or parent in closed or (inside and bytes_below(module) == 0)
        if passes:
            assert parent is not None
            stands_in[module] = stands_in.get(parent, parent)
        if (passes and parent in closed) or bytes_below(module) <= max_bytes:
            closed.add(module)
    return stands_in


def _nearest(path: str, index_of: dict[str, int], entered: dict[int, int]) -> int | None:
    """The nearest module above that ran."""
    while path:
        path = path.rpartition(".")[0]
        index = index_of.get(path)
        if index is not None and index in entered:
            return index
    return None


def _shared(modules: Sequence[tuple[str, torch.nn.Module]]) -> set[int]:
    """Modules that have several places in the tree: they may run without the one above that we know of."""
    if not modules:
        return set()
    index_of = {id(module): index for index, (_, module) in enumerate(modules)}
    seen: set[int] = set()
    shared = set()
    for _, module in modules[0][1].named_modules(remove_duplicate=False):
        if id(module) in seen:
            shared.add(index_of[id(module)])
        seen.add(id(module))
    return shared
