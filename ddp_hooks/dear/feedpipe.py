"""FeedPipe: gathers under the next forward, each awaited just before its parameters are read (DeAR, section III-B).

Every module has a forward pre-hook that waits for the parameters it is about to read: its own, and those that a first,
traced forward saw being read after that hook and before the next (``MultiheadAttention.out_proj``, whose own forward
never runs; tied and functional uses). Waiting never communicates. A forward whose modules run in another order than
the traced one waits for everything at once, and is traced again; so does any forward without gradients, where torch
may take fused paths that read whole subtrees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ddp_hooks.comm import Lanes, Partition, Recorder, Stall, Work, compat
from ddp_hooks.dear.inert import InertOnCopy


class FeedPipe:
    """Launches gathers, and makes modules wait for them.

    Args:
        root: the module inside DDP; pre-hooks are installed on it and on every module below it.
        parameters: the parameters that are gathered, in a fixed order.
        names: their names, for messages.
        recorder: for the timeline.
        arrived: called with the parameters of which everything has been gathered, before anybody reads them.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        recorder: Recorder,
        arrived: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.stall = Stall()
        self.in_flight = False
        self._root = root
        self._parameters = parameters
        self._names = names
        self._recorder = recorder
        self._arrived = arrived
        modules = list(root.named_modules())
        self._paths = [path for path, _ in modules]
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._own = [
            [index_of[id(p)] for p in module.parameters(recurse=False) if id(p) in index_of] for _, module in modules
        ]
        self._sequence: list[int] | None = None  # modules in the order of the traced forward
        self._needs: list[list[int]] = [list(own) for own in self._own]  # module -> parameters it waits for
        self._position = 0
        self._trace: _ReadTrace | None = None
        self._groups: list[tuple[int, ...]] = []  # group -> parameters in it
        self._groups_of_parameter: list[list[int]] = [[] for _ in parameters]
        self._groups_of_module: list[tuple[int, ...]] = [() for _ in modules]
        self._works: list[Work | None] = []
        self._num_in_flight = 0
        self._missing: list[int] = []  # per parameter, groups in flight that have a part of it
        self._versions: list[int] = []  # per parameter, when its gather was launched
        self._addresses: list[int] = []  # likewise
        self._handles = [
            module.register_forward_pre_hook(InertOnCopy(_entering(self, index)), prepend=True)
            for index, (_, module) in enumerate(modules)
        ]

    def close(self) -> None:
        """Remove the pre-hooks."""
        for handle in self._handles:
            handle.remove()

    # -- the order in which parameters are needed -------------------------------------------------------------------

    def begin_trace(self) -> None:
        """Watch the coming forward, unless one was traced before."""
        if self._sequence is None and self._trace is None:
            self.finish()  # what happens on arrival is not the forward's
            self._trace = _ReadTrace({id(parameter): i for i, parameter in enumerate(self._parameters)})
            self._trace.__enter__()

    def end_trace(self, succeeded: bool) -> None:
        """Stop watching; a forward that succeeded defines from now on which module waits for what."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        trace.__exit__(None, None, None)
        if succeeded and trace.sequence:
            self._needs = self._needs_from(trace)
            self._sequence = trace.sequence
            self._assign_groups_to_modules()

    def order_of_need(self) -> list[int]:
        """For every parameter, when the traced forward first needs it: a position in the order of modules."""
        last = len(self._paths)
        position = [last] * len(self._parameters)
        for place, module in enumerate(self._sequence or []):
            for parameter in self._needs[module]:
                position[parameter] = min(position[parameter], place)
        return position

    def _needs_from(self, trace: _ReadTrace) -> list[list[int]]:
        needs = [list(own) for own in self._own]
        executed = set(trace.sequence)
        reachable = {parameter for module in executed for parameter in self._own[module]}
        for parameter, module in trace.first_reader.items():
            if parameter not in needs[module]:
                needs[module].append(parameter)
            reachable.add(parameter)
        for module, own in enumerate(self._own):
            for parameter in own:
                if parameter not in reachable:
                    needs[self._executed_ancestor(module, executed)].append(parameter)
        return needs

    def _executed_ancestor(self, module: int, executed: set[int]) -> int:
        path = self._paths[module]
        while path:
            path = path.rpartition(".")[0]
            ancestor = self._paths.index(path)
            if ancestor in executed:
                return ancestor
        return 0

    # -- gathers ----------------------------------------------------------------------------------------------------

    def plan(self, parameters_of_group: Sequence[tuple[int, ...]]) -> None:
        """Set the groups that travel together; nothing may be in flight."""
        assert not self.in_flight
        self._groups = list(parameters_of_group)
        self._works = [None] * len(self._groups)
        self._assign_groups_to_modules()

    def launch(self, lanes: Lanes, partitions: Sequence[list[Partition]], labels: Sequence[str]) -> None:
        """Start all gathers, one per group, in order."""
        self._versions = [parameter._version for parameter in self._parameters]
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        self._works = [lanes.all_gather(p, label) for p, label in zip(partitions, labels, strict=True)]
        self._num_in_flight = len(self._works)
        self._missing = [len(groups) for groups in self._groups_of_parameter]
        self.in_flight = bool(self._works)
        self._position = 0

    def finish(self) -> None:
        """Wait for every gather that is in flight."""
        if self.in_flight:
            self._wait(range(len(self._works)))

    def enter(self, module: int) -> None:
        """A module's forward begins; return when the parameters it reads are there."""
        if self._trace is not None:
            self._trace.sequence.append(module)
        if not self.in_flight:
            return
        if self._sequence is None or not torch.is_grad_enabled() or not self._root.training:
            self.finish()
            return
        if module == 0:
            self._position = 0
        if self._position >= len(self._sequence) or self._sequence[self._position] != module:
            self.finish()
            if not compat.in_backward():  # recomputed activations are no new order
                self._sequence = None  # the next forward is traced
            return
        self._position += 1
        groups = self._groups_of_module[module]
        if groups:
            self._wait(groups)

    def _wait(self, groups: Sequence[int]) -> None:
        complete = []
        for group in groups:
            work = self._works[group]
            if work is None:
                continue
            if not work.done:
                with self.stall.measure(self._recorder, work.label):
                    work.wait()
            self._works[group] = None
            self._num_in_flight -= 1
            for index in self._groups[group]:
                parameter = self._parameters[index]
                written = parameter._version != self._versions[index]
                if written or parameter.data_ptr() != self._addresses[index]:
                    self._refuse_write(index, "written" if written else "given other memory")
                self._missing[index] -= 1
                if self._missing[index] == 0:
                    complete.append(index)
        self.in_flight = self._num_in_flight > 0
        if complete and self._arrived is not None:
            self._arrived(complete)

    def _refuse_write(self, parameter: int, what: str) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        self.in_flight = False
        raise RuntimeError(
            f"{self._names[parameter]} was {what} while its gather was under way, so its value is undefined: call "
            f"state.synchronize() before writing or converting parameters after optimizer.step(), or use "
            f"DearConfig(overlap_forward=False)"
        )

    def _assign_groups_to_modules(self) -> None:
        self._groups_of_parameter = [[] for _ in self._parameters]
        for group, parameters in enumerate(self._groups):
            for parameter in parameters:
                self._groups_of_parameter[parameter].append(group)
        self._groups_of_module = [
            tuple(sorted({group for parameter in needs for group in self._groups_of_parameter[parameter]}))
            for needs in self._needs
        ]


def _entering(pipe: FeedPipe, module: int) -> Callable[..., None]:
    def await_parameters(*_: Any) -> None:
        if pipe.in_flight or pipe._trace is not None:
            pipe.enter(module)

    return await_parameters


class _ReadTrace(TorchFunctionMode):
    """Notes which module's pre-hook ran last when a parameter was first read."""

    def __init__(self, index_of: dict[int, int]) -> None:
        super().__init__()
        self.sequence: list[int] = []
        self.first_reader: dict[int, int] = {}
        self._index_of = index_of

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.sequence:
            self._note(args)
            self._note(tuple(kwargs.values()))
        return func(*args, **kwargs)

    def _note(self, values: Sequence[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                parameter = self._index_of.get(id(value))
                if parameter is not None:
                    self.first_reader.setdefault(parameter, self.sequence[-1])
            elif isinstance(value, list | tuple):
                self._note(value)
