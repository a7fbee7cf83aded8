"""The vocabulary of communication algorithms: rounds of sends and receives.

An algorithm is a generator. It yields one round after another and is resumed when everything that the round receives
is there. What it sends may travel until the algorithm ends, which spares a wait per round.
It knows ranks and tensors, never process groups, so that one piece of code is tested in one process
(:mod:`~ddp_hooks.comm.fabric`), predicted (the same module, with a clock) and run (:mod:`~ddp_hooks.comm.lanes`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple, TypeAlias

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


def round_of(*exchanges: Send | Recv) -> Round:
    """A round of these exchanges, but for messages of no length, which neither side waits for."""
    return [exchange for exchange in exchanges if exchange.tensor.numel()]


def without_messages(function: Callable[[], None]) -> Algorithm:
    """An algorithm that only calls ``function``, when its turn comes."""
    function()
    yield from ()
