"""What one forward did: which modules ran, in which order, what each of them read, and which are compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ddp_hooks.comm import compat


class ForwardTrace(TorchFunctionMode):
    """Notes which module's pre-hook ran last when a parameter was first read.

    What was compiled runs without its graphs meanwhile, so that all of it is seen.

    Args:
        parameters: what may be read.
        has_graphs: whether anything was compiled.
    """

    def __init__(self, parameters: Sequence[Tensor], has_graphs: bool) -> None:
        super().__init__()
        self.sequence: list[int] = []  # modules, in the order in which they were entered
        self.compiled: set[int] = set()  # modules that are part of somebody's graph
        self.first_reader: dict[int, int] = {}  # parameter -> the module that was entered last
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self.has_graphs = has_graphs
        self._scope = ExitStack()

    def start(self) -> None:
        """Begin to watch."""
        if self.has_graphs:
            self._scope.enter_context(compat.without_compiled_graphs())
        self._scope.enter_context(self)

    def stop(self) -> None:
        """Watch no longer."""
        self._scope.close()

    def enter(self, module: int) -> None:
        """A module's pre-hook runs."""
        self.sequence.append(module)
        if self.has_graphs and compat.inside_compiled_region():
            self.compiled.add(module)

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
