"""Messages to the first rank and from it, on the fabric: straight, and along trees of any width.

Prevents: messages that end under another rank's name; ranks that hear from more others than they should.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from ddp_hooks.comm import Algorithm, Recv, Round, run_on_fabric
from ddp_hooks.coordination.negotiation.messages import broadcast, children_of, gather


def message_of(rank: int) -> list[int]:
    """Another length for every rank, also none at all."""
    return [rank] * (rank * 7 % 5)


@pytest.mark.parametrize("world_size", range(1, 21))
@pytest.mark.parametrize("fan_out", [None, 2, 3, 8])
def test_gather(world_size: int, fan_out: int | None) -> None:
    found: dict[int, list[list[int]]] = {}
    senders: dict[int, set[int]] = {rank: set() for rank in range(world_size)}
    sizes: dict[int, list[int]] = {rank: [] for rank in range(world_size)}

    def noting(rank: int) -> Algorithm:
        def keep() -> Generator[Round, None, None]:
            found[rank] = yield from gather(message_of(rank), rank, world_size, fan_out)

        for next_round in keep():
            for each in next_round:
                if isinstance(each, Recv):
                    senders[rank].add(each.peer)
                else:
                    sizes[rank].append(each.tensor.nbytes)
            yield next_round

    run_on_fabric([noting(rank) for rank in range(world_size)])
    assert found[0] == [message_of(rank) for rank in range(world_size)]
    assert not any(found[rank] for rank in range(1, world_size))
    assert max(map(len, senders.values())) <= (fan_out or world_size)
    assert sum(map(len, senders.values())) == world_size - 1, "everybody is heard once"
    assert not sizes[0] and all(len(sizes[rank]) == 2 for rank in range(1, world_size)), "a length and a message"


@pytest.mark.parametrize("width", [1, 2, 8])
def test_trees_have_every_rank_once(width: int) -> None:
    heard = [child for rank in range(50) for child in children_of(rank, 50, width)]
    assert heard == list(range(1, 50))


@pytest.mark.parametrize("world_size", range(1, 21))
def test_broadcast(world_size: int) -> None:
    found: dict[int, Any] = {}

    def keep(rank: int) -> Algorithm:
        found[rank] = yield from broadcast({"of": [0]} if rank == 0 else None, rank, world_size)

    run_on_fabric([keep(rank) for rank in range(world_size)])
    assert found == {rank: {"of": [0]} for rank in range(world_size)}
