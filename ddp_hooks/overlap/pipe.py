"""FeedPipe: gathers under the next forward, each awaited when its parameters are first used (DeAR, section III-B).

Parameters in flight wait by themselves (:mod:`~ddp_hooks.overlap.waiting`). Modules that own some wait for them in a
forward pre-hook as well, for code that switches ``__torch_function__`` off; compiled and scripted modules wait for
everything below them (:class:`Entrances`). Waiting never communicates: one rank alone may read. Only parameters that
were gathered rounded communicate when they are read with all their bits (:mod:`~ddp_hooks.overlap.rounded`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_hooks.comm import Recorder, Stall, Work, see
from ddp_hooks.comm.torch_compat.compiler import (
    before_call,
    inside_compiled_region,
    is_compiled,
    let_graphs_know_of_hooks,
)
from ddp_hooks.comm.torch_compat.overrides import is_observed, unobserved, without_overrides
from ddp_hooks.intercept.module_hooks import InertInCopies
from ddp_hooks.overlap.rounded import Rounded
from ddp_hooks.overlap.waiting import Waiting, waiting_class

logger = logging.getLogger("ddp_hooks")


class FeedPipe:
    """Makes readers of parameters wait for their gathers.

    ``arrived`` is called with the numbers of parameters that are gathered completely, before anybody reads them.
    """

    def __init__(
        self,
        root: nn.Module,
        parameters: Sequence[nn.Parameter],
        recorder: Recorder,
        arrived: Callable[[Sequence[int]], None] | None = None,
        under_forward: bool = True,  # gathers may be in flight in a forward; False: modules need no pre-hooks
        rounded: Rounded | None = None,  # None: no gather rounds
    ) -> None:
        self.stall = Stall()
        self.in_flight = False  # True while some gather has not been awaited
        self._parameters = parameters
        self._recorder = recorder
        self._arrived = arrived
        self._rounded = rounded
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        for parameter in parameters:
            if isinstance(parameter, Waiting):  # of another pipe
                parameter.wait_for(parameter, True, False)
        self._own_classes = [type(parameter) for parameter in parameters]
        casts = rounded.function_casts if rounded is not None else None
        kinds = {kind: waiting_class(kind, self._wait_for_parameter, casts) for kind in set(self._own_classes)}
        self._waiting_classes = [kinds[kind] for kind in self._own_classes]
        self._on_streams = any(parameter.is_cuda for parameter in parameters)
        self._lock = threading.RLock()  # several threads may read
        self._launcher = threading.get_ident()  # the thread that trains
        self._groups: Sequence[tuple[int, ...]] = ()  # group -> parameters in it
        self._groups_of_parameter: list[list[int]] = [[] for _ in parameters]
        self._works: list[Work | None] = []  # None: awaited
        self._num_in_flight = 0
        self._num_hidden = 0  # parameters that have their waiting class
        self._missing = [0] * len(parameters)  # per parameter, groups in flight that hold a part of it
        self._visible: dict[int, _Visible] = {}  # on accelerators, parameters that some streams still wait for
        self._met_compiled_code = False  # since the last launch, compiled code has read a parameter in flight
        self._has_warned = False
        self._read: dict[int, None] = {}  # parameters in the order in which they were awaited since the last launch
        self._order: list[int] = []  # the same, of the latest forward that awaited as many as any before
        let_graphs_know_of_hooks()
        self._entrances = Entrances(root, self._index_of, self._wait_before_module) if under_forward else None

    def close(self) -> None:
        """Remove the hooks. Parameters that arrived whole have their own class; the others go on raising."""
        if self._entrances is not None:
            self._entrances.close()
        for index in range(len(self._parameters)):
            self._show(index, on_host=True)

    # -- the order in which parameters are needed -------------------------------------------------------------------

    def begin_forward(self, training: bool) -> None:
        """Begin a forward through DDP; the first one in training notes the order in which it reads parameters."""
        if self._entrances is None:
            return
        if self._num_hidden and inside_compiled_region():
            self.finish(on_host=True)
        elif training and not self._order and not self._num_hidden and not inside_compiled_region():
            self._entrances.find()
            with self._lock:
                self._read.clear()
                for index in range(len(self._parameters)):
                    self._hide(index)
                if self._rounded is not None:
                    self._rounded.is_tracing = True

    def end_forward(self) -> None:
        if len(self._read) >= len(self._order):
            self._order = list(self._read)
        if self._rounded is not None:
            self._rounded.is_tracing = False
        if self._num_hidden and not self.in_flight:
            with self._lock:
                for index in range(len(self._parameters)):
                    self._show(index)

    def order_of_need(self) -> list[int]:
        """Return every parameter's position in the order in which the last forward has awaited them."""
        position = {index: place for place, index in enumerate(self._order)}
        return [position.get(index, len(self._order)) for index in range(len(self._parameters))]

    # -- gathers ----------------------------------------------------------------------------------------------------

    def plan(self, parameters_of_group: Sequence[tuple[int, ...]]) -> None:
        assert not self.in_flight
        self._groups = list(parameters_of_group)
        self._groups_of_parameter = [[] for _ in self._parameters]
        for group, parameters in enumerate(self._groups):
            for parameter in parameters:
                self._groups_of_parameter[parameter].append(group)

    @property
    def under_way(self) -> list[Work]:
        return [work for work in self._works if work is not None]

    def launched(self, works: Sequence[Work], rounded: Collection[int] = ()) -> None:
        """Let readers of parameters wait for these gathers, one per group, which leave some parameters ``rounded``."""
        with self._lock:
            if self._met_compiled_code:
                self._met_compiled_code = False
                self._find_entrances()
            self._launcher = threading.get_ident()
            self._visible.clear()
            self._read.clear()
            self._works = list(works)
            self._num_in_flight = len(works)
            self._missing = [len(groups) for groups in self._groups_of_parameter]
            if self._rounded is not None:
                self._rounded.launched(rounded)
            self.in_flight = bool(works)
            for index, missing in enumerate(self._missing):
                if missing:
                    self._hide(index)

    def finish(self, on_host: bool = False) -> None:
        """Wait for every gather that is in flight; with ``on_host`` until all parameters have their own classes.

        Then it is collective, if some are rounded.
        """
        if self.in_flight:
            with self._lock:
                self._await(range(len(self._works)))
        if on_host:
            self.make_whole()
        if on_host and self._visible:
            with self._lock:
                for index in list(self._visible):
                    self._show(index, on_host=True)

    def make_whole(self, reader: int | None = None) -> None:
        """Replace all rounded values by their owners', for a read of parameter ``reader``; collective, if some are.

        If this fails they stay rounded, and the next reader tries again.
        """
        rounded = self._rounded
        if rounded is None or not rounded.now:
            return
        with self._lock:
            if not rounded.now:  # another thread was faster
                return
            self._await(range(len(self._works)))
            with unobserved() if is_observed() else nullcontext():
                for work in rounded.gather_whole(reader):
                    with self.stall.measure(self._recorder, work.label):
                        work.wait()
                self._complete(rounded.became_whole())

    def _wait_for_parameter(self, parameter: Tensor, on_host: bool, casts: bool) -> bool:
        """Wait for the current stream, or with ``on_host`` for all; return True if the own class is back.

        ``casts``: it is read through casts only, and may stay rounded.
        """
        index = self._index_of.get(id(parameter))
        if index is None:  # made of a waiting class, or its class and memory swapped: it may share what is in flight
            self.finish(on_host=self._rounded is not None)
            made: Any = parameter
            made.__class__ = made.own_class
            return True
        if (self._missing[index] or self._rounded is not None) and inside_compiled_region():
            self._met_compiled_code = self._met_compiled_code or self._missing[index] > 0
            self.finish(on_host=True)  # its other graphs then see every parameter with its own class
            on_host, casts = True, False
        if self._rounded is not None:
            self._rounded.note((index,), casts)
        self.wait_for((index,), on_host, casts)
        return not isinstance(parameter, Waiting)

    def _wait_before_module(self, indices: Sequence[int], on_host: bool = False) -> None:
        """Wait for the parameters of a module that begins, which may switch ``__torch_function__`` off."""
        casts = self._rounded is not None and not on_host and self._rounded.module_may_cast()
        if self._rounded is not None and not casts:
            self._rounded.note(indices, casts=False)
        self.wait_for(indices, on_host, casts)

    def wait_for(self, indices: Sequence[int], on_host: bool = False, casts: bool = False) -> None:
        """Wait for parameters, given by number; with ``on_host`` they have their own classes afterwards.

        ``casts``: they are read through casts only, and may stay rounded.
        """
        if not self._num_hidden:
            return
        with self._lock:
            self._read.update(dict.fromkeys(indices))
            if self.in_flight:
                self._await(group for i in indices if self._missing[i] for group in self._groups_of_parameter[i])
            if self._rounded is not None and not casts:
                reader = next((index for index in indices if index in self._rounded.now), None)
                if reader is not None:
                    self.make_whole(reader)
            for index in indices:
                self._show(index, on_host)

    def _await(self, groups: Iterable[int]) -> None:
        """Wait for groups; the reader's modes, function transforms and tracers do not see how."""
        with unobserved() if is_observed() else nullcontext():
            complete = []
            try:
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
                        self._missing[index] -= 1
                        if not self._missing[index]:
                            complete.append(index)
            finally:  # also where a gather has failed: its parameters go on raising, those before it are there
                try:
                    if complete:
                        self._complete(complete)
                finally:  # not before: a thread that finishes has to wait for the updates of another one
                    self.in_flight = self._num_in_flight > 0

    def _complete(self, indices: Sequence[int]) -> None:
        # Nobody must read a parameter in the middle of its update, so it goes on waiting. On accelerators torch looks
        # at classes to choose kernels: there the thread that trains, whose reads follow in its stream, shows it before.
        shown = self._on_streams and threading.get_ident() == self._launcher
        if self._arrived is not None and not shown:
            with without_overrides():
                self._arrived(indices)
        for index in indices:
            self._show(index)
        if self._arrived is not None and shown:
            self._arrived(indices)
        if self._on_streams:
            visible = _Visible(self._parameters[indices[0]].device)
            for index in indices:
                self._visible[index] = visible
                self._hide(index)

    def _find_entrances(self) -> None:
        """Let modules wait whose compiled code has read a parameter in flight, which breaks its graph."""
        if self._entrances is not None and not self._entrances.find() and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "compiled code that is not a module of the model read a parameter in flight, which breaks its graph: "
                "call state.synchronize() before it%s",
                see("compiled-code-reads-parameters"),
            )

    def _hide(self, index: int) -> None:
        parameter = self._parameters[index]
        if not isinstance(parameter, Waiting):
            parameter.__class__ = self._waiting_classes[index]
            self._num_hidden += 1

    def _show(self, index: int, on_host: bool = False) -> None:
        """Put the class of a parameter back, once nobody has to wait for it."""
        if self._missing[index]:
            return
        visible = self._visible.get(index)
        if visible is not None and not visible.everywhere(on_host):
            return
        self._visible.pop(index, None)
        rounded = self._rounded
        if rounded is not None and (index in rounded.now or (rounded.is_tracing and not on_host)):
            return
        parameter: Any = self._parameters[index]
        if isinstance(parameter, Waiting):
            parameter.__class__ = self._own_classes[index]  # type: ignore[assignment]
            self._num_hidden -= 1


class _Visible:
    """Moment in a stream from which on parameters hold their new values."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        stream = torch.cuda.current_stream(device)
        self._event = stream.record_event()
        self._streams = {stream.cuda_stream}  # that have waited

    def everywhere(self, on_host: bool) -> bool:
        """Let the current stream wait, and with ``on_host`` the host; return True if no stream has to wait any more."""
        if on_host:
            self._event.synchronize()
        if self._event.query():
            return True
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream not in self._streams:
            stream.wait_event(self._event)
            self._streams.add(stream.cuda_stream)
        return False


class WaitBefore(InertInCopies):
    """Forward pre-hook that calls ``wait`` with the numbers of parameters."""

    __slots__ = ("_parameters", "_wait")

    def __init__(self, wait: Callable[[Sequence[int]], None], parameters: Sequence[int]) -> None:
        self._wait = wait
        self._parameters = parameters

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # whoever entered the compiled code has waited
            self._wait(self._parameters)


class Entrances:
    """Forward pre-hooks on the modules that own parameters, and on those that are compiled or scripted.

    A compiled or scripted module reads parameters where Python does not see it. It waits for all parameters below it
    before its code begins, and so before the compiler's guards look at their classes. On accelerators the host waits,
    because classes stay changed while any stream has to wait. Graphs contain no wait and see parameters of one class.
    """

    def __init__(self, root: nn.Module, index_of: dict[int, int], wait: Callable[..., None]) -> None:
        self._root = root
        self._index_of = index_of  # id of a parameter -> its number
        self._wait = wait  # with on_host=True until parameters have their own classes
        self._handles: dict[nn.Module, Any] = {}  # modules that wait for their own parameters
        self._entrances: dict[nn.Module, Any] = {}  # modules that wait for all parameters below them
        for module in root.modules():
            own = self._numbers(module, recurse=False)
            if own and not isinstance(module, torch.jit.ScriptModule):
                self._handles[module] = module.register_forward_pre_hook(WaitBefore(wait, own), prepend=True)
        self.find()

    def find(self) -> bool:
        """Find modules that were compiled since the last call; return True if there are some."""
        known, wait = len(self._entrances), partial(self._wait, on_host=True)
        for module in self._root.modules():
            if module not in self._entrances and (is_compiled(module) or isinstance(module, torch.jit.ScriptModule)):
                self._entrances[module] = before_call(module, WaitBefore(wait, self._numbers(module, recurse=True)))
        return len(self._entrances) > known

    def close(self) -> None:
        for handle in (*self._handles.values(), *self._entrances.values()):
            handle.remove()

    def _numbers(self, module: nn.Module, recurse: bool) -> tuple[int, ...]:
        parameters = module.parameters(recurse=recurse)
        return tuple(self._index_of[id(p)] for p in parameters if id(p) in self._index_of)
