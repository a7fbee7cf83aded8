"""Table of rank 0: the ranks that have made each request that is not cached (Horovod, section 2.2.2)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ddp_hooks.comm import see
from ddp_hooks.comm.agreement import first_difference
from ddp_hooks.coordination.request import Request, pack, unpack


class RequestTable:
    """Answers the questions of all ranks (Horovod, Algorithm 1, line 20), which messages call ``ranks``."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._waiting: dict[str, dict[int, Request]] = {}  # by name, in the order of the first request; by rank

    def answer(self, questions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return ready requests, in the order of the table, refused ones, and ranks that waiting ones wait for."""
        for rank, question in enumerate(questions):
            for request in unpack(question["new"]):
                self._waiting.setdefault(request.name, {})[rank] = request
        joined = {rank for rank, question in enumerate(questions) if question["joined"]}
        ready: list[Request] = []
        refused: dict[str, str] = {}
        for name, asked in list(self._waiting.items()):
            request = next(iter(asked.values()))
            # Any of them, so that ranks that disagree hear of it.
            standing_in = joined if any(each.works_without_data for each in asked.values()) else set()
            if len(asked.keys() | standing_in) < len(self._ranks):
                continue
            del self._waiting[name]
            if all(other == request for other in asked.values()):
                ready.append(request)
            else:
                found = first_difference([asked[rank].entries() for rank in sorted(asked)], self._names_of(asked))
                refused[name] = (
                    f"ranks ask for different collectives under the name {name!r}: {found}{see('ranks-differ')}"
                )
        answer: dict[str, Any] = {"ready": pack(ready), "refused": refused}
        if not any(question["waiting"] for question in questions):
            return answer
        done = refused.keys() | {request.name for request in ready}
        having: dict[str, set[int]] = {}
        for rank, question in enumerate(questions):
            for name, works_without_data in question["waiting"]:
                if name not in done:
                    having.setdefault(name, set(joined if works_without_data else ())).add(rank)
        missing = {name: set(range(len(self._ranks))) - ranks for name, ranks in having.items()}
        overdue = {name for question in questions for name in question["overdue"] if name in missing}
        expired = {name for question in questions for name in question["expired"]}
        closing = {rank for rank, question in enumerate(questions) if question["closing"]}
        failures = []  # reasons why requests end everything
        for name, ranks in missing.items():
            if gone := self._names_of(ranks & closing):
                failures.append(f"{name} waits for ranks {gone}, which have closed their coordinator")
            elif name in expired:
                asking, lacking = self._names_of(having[name]), self._names_of(ranks)
                sides = f"ranks {asking} have asked for it, ranks {lacking} have not"
                failures.append(f"{name} was waited for too long: {sides}")
        late = {name: self._names_of(ranks) for name, ranks in missing.items() if name in overdue}
        return {**answer, "missing": late, "failure": next(iter(failures), None)}

    def _names_of(self, ranks: Collection[int]) -> list[int]:
        return [self._ranks[rank] for rank in sorted(ranks)]
