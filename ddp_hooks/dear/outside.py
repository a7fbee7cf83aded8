"""What ``optimizer.state`` is outside of a step, while shards stand for parameters inside of it.

Keys are the model's parameters, as in plain DDP. What has one value per element is a
:class:`~ddp_hooks.dear.spread.SpreadTensor`, which raises where it is taken for a whole one.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor

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


class SmallEntries:
    """Entries of one value, such as counts of steps, as users see them: a rank holds one for each of its shards."""

    def __init__(self) -> None:
        self._shown: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # a copy, and what it was

    def show(self, index: int, key: str, value: Any) -> Any:
        """Return what stands for ``value`` of parameter ``index`` until :meth:`forget`; it may be written."""
        if not isinstance(value, Tensor):
            return value
        if (index, key) not in self._shown:
            self._shown[index, key] = value.clone(), value.clone()
        return self._shown[index, key][0]

    def written(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield what was written since it was shown, or since this was asked."""
        for (index, key), (value, before) in self._shown.items():
            if not torch.equal(value, before):  # its version would not tell of .data and .numpy()
                before.copy_(value)
                yield index, key, value

    def forget(self, index: int | None = None) -> None:
        """Show new copies from now on, of parameter ``index`` or of all: the optimizer's own are about to change."""
        self._shown = {at: shown for at, shown in self._shown.items() if index not in (None, at[0])}


class EntriesOutside(MutableMapping[str, Any]):
    """The state of one parameter; assigning or deleting an entry changes this rank's part of it.

    Args:
        spread: where the state is.
        index: the number of the parameter.
    """

    def __init__(self, spread: SpreadState, index: int) -> None:
        self._spread = spread
        self._index = index
        self._entries = spread.spread_state(index)

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._take({**self._entries, key: value})

    def __delitem__(self, key: str) -> None:
        self._take({name: value for name, value in self._entries.items() if name != key})

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return repr(self._entries)

    def _take(self, entries: State) -> None:
        self._spread.set_state(self._index, entries)
        self._entries = self._spread.spread_state(self._index) if entries else {}


class StateOutside(MutableMapping[Any, MutableMapping[str, Any]]):
    """The optimizer's state by parameter; all ranks assign and delete entries alike.

    Args:
        spread: where the state is.
    """

    def __init__(self, spread: SpreadState) -> None:
        self._spread = spread

    def __getitem__(self, parameter: Any) -> MutableMapping[str, Any]:
        index = self._spread.index_of(parameter)
        if index is None:
            return self._spread.states[parameter]
        return EntriesOutside(self._spread, index)

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
