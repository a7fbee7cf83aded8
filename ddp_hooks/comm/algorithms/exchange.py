"""Rounds of sends and receives, of which communication algorithms consist.

An algorithm is a generator. It yields one round after another and continues when everything that the round receives
has arrived. Sent data may travel until the algorithm ends, which spares a wait per round. Algorithms know ranks and
tensors, never process groups: the same code is tested and timed in one process, and run by lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

from torch import Tensor


class Send(NamedTuple):
    """Send the contiguous ``tensor`` to ``peer``; it must not change before the algorithm has ended."""

    peer: int
    tensor: Tensor


class Recv(NamedTuple):
    """Receive into the contiguous ``tensor`` from ``peer``; its content is undefined until the round is complete."""

    peer: int
    tensor: Tensor


Round: TypeAlias = list[Send | Recv]
Algorithm: TypeAlias = Generator[Round, None, None]
_Result = TypeVar("_Result")


def round_of(*exchanges: Send | Recv) -> Round:
    """Return a round of these exchanges without empty messages, for which neither side waits."""
    return [exchange for exchange in exchanges if exchange.tensor.numel()]


def without_messages(function: Callable[[], None]) -> Algorithm:
    """Return an algorithm that only calls ``function``, when its turn comes."""
    function()
    yield from ()


def among(members: Sequence[int], algorithm: Generator[Round, None, _Result]) -> Generator[Round, None, _Result]:
    """Run an algorithm of ``len(members)`` ranks among some ranks of more; its rank i is ``members[i]``."""
    while True:
        try:
            exchanges = next(algorithm)
        except StopIteration as end:
            result: _Result = end.value
            return result
        yield [exchange._replace(peer=members[exchange.peer]) for exchange in exchanges]
