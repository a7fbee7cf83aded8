"""What ``optimizer.state`` is outside of a step, while shards stand for parameters inside of it.

Keys are the model's parameters, as in plain DDP. What has one value per element is a
:class:`~ddp_hooks.dear.spread.SpreadTensor`, which raises where it is taken for a whole one.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Protocol

import torch

from ddp_hooks.comm import see
from ddp_hooks.dear.moves import State


class SpreadState(Protocol):
    """Who holds this rank's part of an optimizer's state."""

    states: defaultdict[Any, State]  # as the optimizer has it inside of a step: by shard, and by parameters of others

    def index_of(self, parameter: Any) -> int | None:
        """The number of a parameter that ranks hold shards of; None for anything else."""

    def held_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of whose state this rank holds a part."""

    def other_states(self) -> list[Any]:
        """Whatever else has a state."""

    def spread_state(self, index: int) -> State:
        """The state of a parameter, of whose elements this rank holds some or none."""

    def set_state(self, index: int, state: Mapping[str, Any]) -> None:
        """Take this rank's part of a parameter's state, given as it was returned, or of whole tensors."""

    def drop_state(self, index: int) -> None:
        """Forget this rank's part of a parameter's state."""


class StateOutside(MutableMapping[Any, Mapping[str, Any]]):
    """The optimizer's state by parameter; entries are replaced as a whole, or deleted, on all ranks alike.

    Args:
        spread: where the state is.
    """

    def __init__(self, spread: SpreadState) -> None:
        self._spread = spread

    def __getitem__(self, parameter: Any) -> Mapping[str, Any]:
        index = self._spread.index_of(parameter)
        if index is None:
            return self._spread.states[parameter]
        return MappingProxyType(self._spread.spread_state(index))

    def get(self, parameter: Any, default: Any = None) -> Any:
        """As a dictionary's: an entry that is not there is not made."""
        if parameter not in self:
            return default
        return self[parameter]

    def __setitem__(self, parameter: Any, state: Mapping[str, Any]) -> None:
        index = self._spread.index_of(parameter)
        if index is None:
            self._spread.states[parameter] = dict(state)
        else:  # by a loop that moves states to another device, for instance
            self._spread.set_state(index, state)

    def __delitem__(self, parameter: Any) -> None:
        index = self._spread.index_of(parameter)
        if index is None:
            del self._spread.states[parameter]
        else:
            self._spread.drop_state(index)

    def __iter__(self) -> Iterator[Any]:
        yield from self._spread.held_parameters()
        yield from self._spread.other_states()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is held for held in self)

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Any, State]:
        # Of what a copy of the optimizer has, its own entries: a copy of the optimizer is not under this state.
        return defaultdict(dict, {copy.deepcopy(key, memo): copy.deepcopy(dict(self[key]), memo) for key in self})

    def __reduce__(self) -> Any:
        raise TypeError(
            "this optimizer's state is spread over the ranks, and this one alone would save its part of it: save "
            f"state.full_optimizer_state_dict(), made on all ranks, instead{see('optimizer-state-is-sharded')}"
        )
