"""Deferred updates: an optimizer's own code runs for some parameters at a time, with the settings of the step.

Each parameter is updated when its gradient has arrived, in the next forward, just before it is read (zhang2023dear,
section III-B, Algorithm 1: FeedPipe). Valid for optimizers whose update of a parameter looks at no other parameter.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import see
from ddp_hooks.comm.torch_compat.optimizer import unhooked_step
from ddp_hooks.comm.torch_compat.overrides import without_overrides


class DeferredUpdates:
    """Updates some parameters as ``optimizer.step()`` would have, whatever schedulers have done since.

    ``finish`` runs all updates that are left, for readers of ``optimizer.state``; None: readers do not wait.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        gradient_of: Callable[[int], Tensor],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._stand_ins: dict[int, torch.nn.Parameter] = {}  # updates step on these, kept from step to step
        self._runner: int | None = None  # the thread that runs the optimizer's code for some parameters
        self._optimizer = optimizer
        self._parameters = parameters
        self._gradient_of = gradient_of
        self._finish = finish
        self._settings: list[dict[str, Any]] = []  # of the optimizer's groups, at the step
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._slot_of = {
            index_of[id(parameter)]: (group, position)
            for group, entries in enumerate(optimizer.param_groups)
            for position, parameter in enumerate(entries["params"])
            if id(parameter) in index_of
        }

    def note_settings(self) -> None:
        """Note learning rates and other settings of the step that begins, for its updates."""
        groups = self._optimizer.param_groups
        for index, (group, position) in self._slot_of.items():
            params = groups[group]["params"] if group < len(groups) else []
            if position >= len(params) or params[position] is not self._parameters[index]:
                raise RuntimeError(
                    "the optimizer's param_groups are not those that it had when the hook's state was created: change "
                    f"them before, or wrap the model again{see('set-up-changed-later')}"
                )
        if self._finish is not None and not isinstance(self._optimizer.state, PendingState):
            self._optimizer.state = PendingState(self._optimizer.state, self._finish_unless_running)
        self._settings = [
            {key: copied(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    def forget_memory(self) -> None:
        self._stand_ins.clear()

    def _finish_unless_running(self) -> None:
        if self._finish is not None and not self.running:
            self._finish()

    @property
    def running(self) -> bool:
        return self._runner == threading.get_ident()

    def run(self, indices: Sequence[int]) -> None:
        """Run the optimizer's own code over these parameters, with the settings of the step.

        A thread that reads a parameter may run this while another thread trains. So a copy of the optimizer steps on
        parameters with the same memory: gradients and groups that others see stay as they are.
        """
        indices = sorted(indices, key=self._slot_of.__getitem__)  # as the optimizer has them
        with without_overrides():
            inside = {index: self._stand_in(index) for index in indices}
        partial: list[tuple[int, dict[str, Any]]] = []
        for position, members in itertools.groupby(indices, lambda index: self._slot_of[index][0]):
            own = {key: copied(value) for key, value in self._settings[position].items()}
            partial.append((position, {**own, "params": [inside[index] for index in members]}))
        self._runner = threading.get_ident()
        try:
            self._step([group for _, group in partial], inside)
        finally:
            self._runner = None
        for position, group in partial:  # an optimizer may count steps in its groups
            for key, value in group.items():
                before = self._settings[position].get(key)
                if key != "params" and not isinstance(value, Tensor) and value != before:
                    self._optimizer.param_groups[position][key] = value

    def _stand_in(self, index: int) -> torch.nn.Parameter:
        parameter = self._parameters[index]
        made = self._stand_ins.get(index)
        if made is None or made.data_ptr() != parameter.data_ptr():
            made = self._stand_ins[index] = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
        if vars(made) or vars(parameter):
            vars(made).clear()
            vars(made).update(vars(parameter))
        made.grad = self._gradient_of(index)
        return made

    def _step(self, groups: list[dict[str, Any]], inside: dict[int, torch.nn.Parameter]) -> None:
        """Let a copy of the optimizer step on these groups; keep what it does to its state and attributes."""
        optimizer = self._optimizer
        state, names = optimizer.state, {"param_groups", "state"}
        acting: torch.optim.Optimizer = object.__new__(type(optimizer))
        vars(acting).update(vars(optimizer))
        acting.param_groups = groups
        acting.state = defaultdict(dict)
        for index, parameter in inside.items():
            entries = dict.get(state, self._parameters[index])  # a PendingState's own would ask who waits
            if entries is not None:
                acting.state[parameter] = entries
        try:
            # An update may run in the middle of a forward, whose modes are not its own.
            autocast = torch.autocast(self._parameters[0].device.type, enabled=False)
            with torch.inference_mode(False), torch.no_grad(), autocast:
                unhooked_step(optimizer)(acting)
                with without_overrides():
                    for index, parameter in inside.items():
                        take_back(parameter, self._parameters[index].detach(), acting.state.get(parameter))
        finally:
            for index, parameter in inside.items():
                parameter.grad = None
                if parameter in acting.state:
                    dict.__setitem__(state, self._parameters[index], acting.state[parameter])
            vars(optimizer).update({name: value for name, value in vars(acting).items() if name not in names})


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@torch.no_grad()
def take_back(assigned: Tensor, memory: Tensor, state: MutableMapping[str, Any] | None) -> None:
    """Copy a tensor's values into the memory that it had before, if the optimizer has assigned ``.data``.

    An entry of its ``state`` in ``memory`` moves to memory of its own; one in the new memory shares ``memory`` then.
    """
    if assigned.data_ptr() == memory.data_ptr():
        return
    entries = state if state is not None else {}
    for key, value in entries.items():
        if isinstance(value, Tensor) and value.data_ptr() == memory.data_ptr():
            entries[key] = value.clone()
    memory.copy_(assigned)
    for key, value in entries.items():
        if isinstance(value, Tensor) and value.shape == memory.shape and value.data_ptr() == assigned.data_ptr():
            entries[key] = memory.detach()


class PendingState(defaultdict[Any, Any]):
    """State of an optimizer that calls ``wait`` before every use; copies and pickles as a plain one."""

    def __init__(self, state: dict[Any, Any], wait: Callable[[], None]) -> None:
        super().__init__(dict, state)
        self._wait = wait

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


def _waiting(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    def wait_and_call(self: PendingState, *args: Any, **kwargs: Any) -> Any:
        wait = self.__dict__.get("_wait")
        if wait is not None:
            wait()
        return method(self, *args, **kwargs)

    return wait_and_call


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__eq__", "__repr__"),
    *("get", "items", "keys", "values", "pop", "popitem", "clear", "setdefault", "update", "copy"),
):
    setattr(PendingState, _name, _waiting(_name))
