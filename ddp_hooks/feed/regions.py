"""Where compiled code waits for parameters: as seldom as DDP cuts its graphs, not before every module.

A pre-hook that waits cannot be part of a graph, so it ends one. A module that is compiled, and small, therefore waits
for everything below it, and the pre-hooks below are left out of the graph (:class:`Passable`). They are left out only
while that wait is known to have happened, and where modules come in the order of the traced forward: graphs depend on
both, and other paths get graphs of their own, in which the hooks do run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any

import torch

from ddp_hooks.feed.inert import InertOnCopy

START = "0"


class Clearance:
    """Whether everything that a module waits for is there, and how far those for which it waits have come."""

    def __init__(self) -> None:
        self.given = True
        # How many of them have begun. A string, because the compiler may take a number that changes for a size.
        self.place = START
        self.ends: set[str] = set()  # places at which a traced forward has left the module


class Passable(InertOnCopy):
    """A pre-hook that compiled code passes by where somebody above has waited for its module.

    The compiler follows this code once per graph, and has the graph used only while the clearance is as it was then.

    Args:
        function: the hook.
        clearance: of the module that waits in its place.
        moves: the places at which its module comes in the order of the traced forward -> the next place.
    """

    def __init__(self, function: Callable[..., Any], clearance: Clearance, moves: dict[str, str]) -> None:
        super().__init__(function)
        self._clearance = clearance
        self._moves = moves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and self._clearance.given and self._clearance.place in self._moves:
            self._clearance.place = self._moves[self._clearance.place]
            return None
        return super().__call__(*args, **kwargs)


def order_below(
    sequence: Sequence[int], stands_in: dict[int, int]
) -> tuple[dict[int, dict[str, str]], dict[int, set[str]]]:
    """How a traced forward went through the modules that others stand in for.

    Args:
        sequence: the modules that ran, in order.
        stands_in: see :func:`stand_ins`.

    Returns:
        For every module that has a stand-in its moves (see :class:`Passable`), and for every stand-in the places at
        which the forward left it.
    """
    moves: dict[int, dict[str, str]] = {module: {} for module in stands_in}
    ends: dict[int, set[str]] = {module: set() for module in stands_in.values()}
    place: dict[int, str] = {}
    for module in sequence:
        if module in ends:
            if module in place:
                ends[module].add(place[module])
            place[module] = START
        if module in stands_in:
            other = stands_in[module]
            here = place.get(other, START)
            place[other] = moves[module][here] = str(int(here) + 1)
    for module, last in place.items():
        ends[module].add(last)
    return moves, ends


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
        parent = nearest_above(path, index_of, entered)
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


def nearest_above(path: str, index_of: Mapping[str, int], ran: Container[int]) -> int | None:
    """The nearest module above ``path`` that ran, by its index; None if none did."""
    while path:
        path = path.rpartition(".")[0]
        index = index_of.get(path)
        if index is not None and index in ran:
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
