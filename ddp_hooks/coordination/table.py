"""What the first rank knows of requests that are not cached: who has asked for what (Horovod, section 2.2.2)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ddp_hooks.comm import see
from ddp_hooks.comm.agreement import first_difference
from ddp_hooks.coordination.request import Request

_WITHOUT_DATA = ("all_reduce", "any")
"""What a rank that has run out of data takes part in, with zeros."""


def takes_part_without_data(request: Request) -> bool:
    """Whether ranks that have joined stand in with zeros."""
    return request.operation in _WITHOUT_DATA


class Table:
    """Requests by name, and the ranks that have them.

    Args:
        ranks: as messages call them.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._waiting: dict[str, dict[int, Request]] = {}  # in the order in which names were heard of first

    def add(self, rank: int, request: Request) -> None:
        """``rank`` asks for it."""
        self._waiting.setdefault(request.name, {})[rank] = request

    def take_ready(self, joined: Collection[int]) -> tuple[list[Request], dict[str, str]]:
        """What all ranks have asked for, in the order in which it was heard of; and of other such why it is refused."""
        ready: list[Request] = []
        refused: dict[str, str] = {}
        for name, asked in list(self._waiting.items()):
            request = next(iter(asked.values()))
            # Any of them: ranks that disagree are to hear of it.
            standing_in = set(joined) if any(map(takes_part_without_data, asked.values())) else set()
            if len(asked.keys() | standing_in) < len(self._ranks):
                continue
            del self._waiting[name]
            if all(other == request for other in asked.values()):
                ready.append(request)
            else:
                refused[name] = self._difference(name, asked)
        return ready, refused

    def _difference(self, name: str, asked: dict[int, Request]) -> str:
        ranks = sorted(asked)  # they were heard of in any order
        lines = [{key: str(value) for key, value in asked[rank].entries().items()} for rank in ranks]
        found = first_difference(lines, [self._ranks[rank] for rank in ranks])
        return f"ranks ask for different collectives under the name {name!r}: {found}{see('ranks-differ')}"
