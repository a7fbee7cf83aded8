"""State of an optimizer whose shards are spread over the ranks, as the user sees it outside of a step.

Keys are the model's parameters, as in plain DDP. An entry with one value per element is a
:class:`~ddp_hooks.dear.update.spread_tensor.SpreadTensor`, which raises where it is taken for a whole tensor.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import in_order_of, see
from ddp_hooks.comm.torch_compat.state_dict import unflattens_state
from ddp_hooks.dear.checkpoint.reshard import State
from ddp_hooks.dear.layout.memory import ManagedParameters
from ddp_hooks.dear.layout.placement import ParameterRange, Placement, Shards, is_elementwise
from ddp_hooks.dear.update.spread_tensor import SpreadTensor
from ddp_hooks.overlap import copied


class SpreadState(MutableMapping[Any, MutableMapping[str, Any]]):
    """This rank's part of an optimizer's state; a mapping from parameters, whose entries all ranks change alike."""

    def __init__(self, parameters: ManagedParameters, shards: Shards, placement: Placement) -> None:
        self.own: defaultdict[Any, State] = defaultdict(dict)  # the optimizer's, in a step: by shard, other ones too
        self.pending: tuple[Placement, dict[ParameterRange, State]] | None = None  # before there are shards
        self.placement = placement  # of the shards
        self._parameters = parameters
        self._shards = shards
        self._shown: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # entries of one value, and what they were

    def by_range(self) -> dict[ParameterRange, State]:
        if self.pending is not None:
            return self.pending[1]
        return {shard.range: self.own.get(shard.tensor, {}) for shard in self._shards}

    def others(self) -> list[Any]:
        shards = {id(shard.tensor) for shard in self._shards}
        return [key for key in self.own if id(key) not in shards]

    def spread(self, index: int, own: Mapping[ParameterRange, State], entries: State) -> State:
        """Return the state of a parameter, with a :class:`SpreadTensor` where ``entries`` has a type."""
        placement = self.pending[0] if self.pending is not None else self.placement
        spread: State = {}
        for key, kind in entries.items():
            if isinstance(kind, torch.dtype):
                parts = {elements: state[key] for elements, state in own.items() if key in state}
                like, label = self._parameters.tensors[index], f"{key} of {self._parameters.names[index]}"
                spread[key] = SpreadTensor(like, kind, self._parameters.device, parts, placement, label)
            else:
                spread[key] = copied(kind)
        return spread

    def show(self, index: int) -> State:
        """Return the state of a parameter; entries of one value are copies that may be written."""
        held = {elements: state for elements, state in self.by_range().items() if state}
        own = {elements: state for elements, state in held.items() if elements.parameter == index}
        if not own and held and unflattens_state():  # asks for the names of entries only: a neighbour's
            return {**next(iter(held.values()))}
        if not own:
            raise RuntimeError(
                f"this rank holds no part of the optimizer's state of {self._parameters.names[index]}: call "
                f"state.full_optimizer_state_dict() on all ranks for the whole state"
                f"{see('optimizer-state-is-sharded')}"
            )
        first, entries = next(iter(own.items()))
        spread = self.spread(index, own, {k: v.dtype for k, v in entries.items() if is_elementwise(v, first)})
        return {k: spread[k] if k in spread else self._show_small(index, k, v) for k, v in entries.items()}

    def _show_small(self, index: int, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if (index, key) not in self._shown:
            self._shown[index, key] = value.clone(), value.clone()
        return self._shown[index, key][0]

    def forget_shown(self, index: int | None = None) -> None:
        """Show new copies from now on, of a parameter or of all: the optimizer's own are about to change."""
        self._shown = {at: shown for at, shown in self._shown.items() if index not in (None, at[0])}

    def take_written(self) -> None:
        """Copy values that users wrote into entries of one value to every shard's entry."""
        for (index, key), (value, before) in self._shown.items():
            if torch.equal(value, before):  # its version would not tell of .data and .numpy()
                continue
            before.copy_(value)
            for elements, state in self.by_range().items():
                if elements.parameter == index and isinstance(state.get(key), Tensor):
                    state[key].copy_(value)

    def set(self, index: int, state: Mapping[str, Any]) -> None:
        """Take this rank's part of a parameter's state, which is spread as :meth:`show` returns it, or whole."""
        refuse_other_shapes(state, self._parameters.tensors[index], self._parameters.names[index])
        self.forget_shown(index)
        held: dict[Any, State] = self.own if self.pending is None else self.pending[1]
        keys = {s.range: s.tensor for s in self._shards} if self.pending is None else {i: i for i in held}
        for elements, key in keys.items():
            if elements.parameter == index:
                held[key] = {name: self._part_of(name, value, elements) for name, value in state.items()}

    def _part_of(self, name: str, value: Any, elements: ParameterRange) -> Any:
        if not isinstance(value, SpreadTensor):
            return cut_entry(name, value, self._parameters.tensors[elements.parameter], elements)
        if elements not in value.parts:
            raise ValueError(
                f"{value.label} was read before DDP has rebuilt its buckets, and is spread otherwise now: load a whole "
                f"state with optimizer.load_state_dict(){see('optimizer-state-is-sharded')}"
            )
        return value.parts[elements]

    # -- the mapping --------------------------------------------------------------------------------------------------

    def __getitem__(self, parameter: Any) -> MutableMapping[str, Any]:
        index = self._parameters.index_of(parameter)
        return self.own[parameter] if index is None else _Entries(self, index)

    def get(self, parameter: Any, default: Any = None) -> Any:
        """As a dictionary's: an entry that is not there is not made."""
        return self[parameter] if parameter in self else default  # noqa: SIM401

    def __setitem__(self, parameter: Any, state: Mapping[str, Any]) -> None:
        index = self._parameters.index_of(parameter)
        if index is None:
            self.own[parameter] = dict(state)
        else:  # by a loop that moves states to another device, for instance
            self.set(index, state)

    def __delitem__(self, parameter: Any) -> None:
        index = self._parameters.index_of(parameter)
        if index is None:
            del self.own[parameter]
            return
        self.forget_shown(index)
        for shard in self._shards:
            if shard.range.parameter == index:
                self.own.pop(shard.tensor, None)
        if self.pending is not None:
            for elements in [elements for elements in self.pending[1] if elements.parameter == index]:
                del self.pending[1][elements]

    def __iter__(self) -> Iterator[Any]:
        held = {elements.parameter for elements, state in self.by_range().items() if state}
        yield from [self._parameters.tensors[index] for index in sorted(held)]
        yield from self.others()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter is held for held in self)

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Any, State]:
        # The entries of a copy's own parameters: a copy of the optimizer is not under this state.
        return defaultdict(dict, {copy.deepcopy(key, memo): copy.deepcopy(dict(self[key]), memo) for key in self})

    def __reduce__(self) -> Any:
        raise TypeError(
            "this optimizer's state is spread over the ranks, and this one alone would save its part of it: save "
            f"state.full_optimizer_state_dict(), made on all ranks, instead{see('optimizer-state-is-sharded')}"
        )


class _Entries(MutableMapping[str, Any]):
    """State of one parameter; assigning or deleting an entry changes this rank's part of it."""

    def __init__(self, spread: SpreadState, index: int) -> None:
        self._spread = spread
        self._index = index
        self._entries = spread.show(index)

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
        self._spread.set(self._index, entries)
        self._entries = self._spread.show(self._index) if entries else {}


def cut_entry(key: str, value: Any, parameter: Tensor, elements: ParameterRange) -> Any:
    """Return a copy of the part of one entry of a parameter's state that belongs to the range ``elements``."""
    if isinstance(value, SpreadTensor):
        return value.parts[elements].clone()
    # Adam's step count of a scalar parameter has the parameter's own shape, but counts steps.
    is_count = key == "step" and parameter.dim() == 0
    if isinstance(value, Tensor) and value.shape == parameter.shape and not is_count:
        return in_order_of(value, parameter)[elements.start : elements.end].clone()
    return copied(value)


def cut_state(state: State, parameter: Tensor, elements: ParameterRange) -> State:
    return {key: cut_entry(key, value, parameter, elements) for key, value in state.items()}


def refuse_other_shapes(state: Mapping[str, Any], parameter: Tensor, name: str) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape != parameter.shape:
            raise ValueError(
                f"{key} of {name} has shape {tuple(value.shape)}, but the parameter has {tuple(parameter.shape)}: give "
                f"one of that shape, or a state that was saved for this model{see('optimizer-state-is-sharded')}"
            )
