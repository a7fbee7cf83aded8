"""FeedPipe: gathers under the next forward, each awaited just before its parameters are read (DeAR, section III-B).

Every module has a forward pre-hook that waits for the parameters it is about to read: its own, and those that a first,
traced forward saw being read after that hook and before the next (``MultiheadAttention.out_proj``, whose own forward
never runs; tied and functional uses). Waiting never communicates. A forward whose modules run in another order than
the traced one waits for everything at once, and is traced again; so does any forward without gradients, where torch
may take fused paths that read whole subtrees. In compiled code one module waits for many
(:mod:`~ddp_hooks.feed.regions`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from ddp_hooks.comm import Recorder, Stall, Work, compat, see
from ddp_hooks.feed.inert import InertOnCopy
from ddp_hooks.feed.regions import START, Clearance, Passable, nearest_above, order_below, stand_ins
from ddp_hooks.feed.trace import ForwardTrace

logger = logging.getLogger("ddp_hooks")

_MAX_COMPILED_TRACES = 8  # each one runs, or even compiles, what is compiled in another way


class FeedPipe:
    """Makes modules wait for gathers.

    Args:
        root: the module inside DDP; pre-hooks are installed on it and on every module below it.
        parameters: the parameters that are gathered, in a fixed order.
        names: their names, for messages.
        recorder: for the timeline.
        graph_bytes: what one module of a compiled graph may wait for, in bytes of parameters.
        remedy: the setting with which nothing is under way between a step and the next forward, for messages.
        arrived: called with the parameters of which everything has been gathered, before anybody reads them.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        recorder: Recorder,
        graph_bytes: int,
        remedy: str,
        arrived: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.stall = Stall()
        self.in_flight = False
        self._root = root
        self._parameters = parameters
        self._names = names
        self._recorder = recorder
        self._arrived = arrived
        self._graph_bytes = graph_bytes
        self._remedy = remedy
        modules = self._modules = list(root.named_modules())
        self._paths = [path for path, _ in modules]
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._own = [
            [index_of[id(p)] for p in module.parameters(recurse=False) if id(p) in index_of] for _, module in modules
        ]
        self._sequence: list[int] | None = None  # modules in the order of the traced forward
        self._needs: list[list[int]] = [list(own) for own in self._own]  # module -> parameters it waits for
        self._position = 0
        self._trace: ForwardTrace | None = None
        self._num_traces = 0  # of compiled modules
        self._ddp_is_compiled = False
        self._first_reader: dict[int, int] = {}  # parameter -> module, as far as any trace has seen
        self._stand_ins: dict[int, int] = {}  # modules that compiled code passes by -> who waits in their place
        self._clearances: dict[int, Clearance] = {}  # of those who do
        self._moves: dict[int, dict[str, str]] = {}  # of those whom they stand in for
        self._latest: int | None = None  # of those who stand in, the one that was entered last
        self._groups: list[tuple[int, ...]] = []  # group -> parameters in it
        self._groups_of_parameter: list[list[int]] = [[] for _ in parameters]
        self._groups_of_module: list[tuple[int, ...]] = [() for _ in modules]  # which nobody before it waits for
        self._works: list[Work | None] = []
        self._num_in_flight = 0
        self._missing: list[int] = []  # per parameter, groups in flight that have a part of it
        self._versions: list[int] = []  # per parameter, when its gather was launched
        self._addresses: list[int] = []  # likewise
        compat.let_graphs_know_of_hooks()
        self._handles = [
            module.register_forward_pre_hook(InertOnCopy(_entering(self, index)), prepend=True)
            for index, (_, module) in enumerate(modules)
        ]

    def close(self) -> None:
        """Remove the pre-hooks."""
        self.end_trace(succeeded=False)
        for handle in self._handles:
            handle.remove()

    # -- the order in which parameters are needed -------------------------------------------------------------------

    def begin_trace(self) -> None:
        """Watch the coming forward, unless one was traced before."""
        self.end_trace(succeeded=False)  # of a forward that was interrupted
        if not self._ddp_is_compiled and compat.inside_compiled_region():
            self._ddp_is_compiled = True
            self._sequence = None  # that DDP is compiled may be news
        if self._sequence is not None or self._num_traces > _MAX_COMPILED_TRACES:
            return
        if self._num_traces == _MAX_COMPILED_TRACES:
            logger.warning("compiled modules run in changing orders, so every forward waits for all parameters")
            self._num_traces += 1
            return
        self.finish()  # what happens on arrival is not the forward's
        has_graphs = self._ddp_is_compiled or any(compat.is_compiled(module) for _, module in self._modules)
        self._num_traces += has_graphs
        self._trace = ForwardTrace(self._parameters, has_graphs)
        self._trace.start()

    @property
    def traces_without_graphs(self) -> bool:
        """Whether a forward is being watched for which compiled graphs are switched off."""
        return self._trace is not None and self._trace.has_graphs

    def end_trace(self, succeeded: bool) -> None:
        """Stop watching; a forward that succeeded defines from now on which module waits for what."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        trace.stop()
        if not (succeeded and trace.sequence):
            return
        self._first_reader.update(trace.first_reader)
        self._needs = self._needs_from(trace.sequence)
        if trace.compiled and not self._stand_ins:  # who stands in for whom stays as it is: graphs know it
            self._appoint_stand_ins(trace)
        moves, ends = order_below(trace.sequence, self._stand_ins)
        for module in self._stand_ins:
            self._moves[module].update(moves[module])
        for module, clearance in self._clearances.items():
            clearance.ends |= ends[module]
        for module, other in self._stand_ins.items():
            self._needs[other] = list(dict.fromkeys(self._needs[other] + self._needs[module]))
        self._sequence = [module for module in trace.sequence if module not in self._stand_ins]
        self._assign_groups_to_modules()

    def order_of_need(self) -> list[int]:
        """For every parameter, when the traced forward first needs it: a position in the order of modules."""
        last = len(self._paths)
        position = [last] * len(self._parameters)
        for place, module in enumerate(self._sequence or []):
            for parameter in self._needs[module]:
                position[parameter] = min(position[parameter], place)
        return position

    def _needs_from(self, sequence: Sequence[int]) -> list[list[int]]:
        needs = [list(own) for own in self._own]
        executed = set(sequence)
        reachable = {parameter for module in executed for parameter in self._own[module]}
        for parameter, module in self._first_reader.items():
            if parameter not in needs[module]:
                needs[module].append(parameter)
            reachable.add(parameter)
        index_of = {path: index for index, path in enumerate(self._paths)}
        for module, own in enumerate(self._own):
            for parameter in own:
                if parameter not in reachable:
                    needs[nearest_above(self._paths[module], index_of, executed) or 0].append(parameter)
        return needs

    def _appoint_stand_ins(self, trace: ForwardTrace) -> None:
        nbytes_of = {id(parameter): parameter.nbytes for parameter in self._parameters}
        self._stand_ins = stand_ins(
            self._modules,
            trace.sequence,
            trace.compiled,
            lambda module: sum(nbytes_of.get(id(p), 0) for p in self._modules[module][1].parameters()),
            self._graph_bytes,
        )
        self._clearances = {module: Clearance() for module in set(self._stand_ins.values())}
        self._moves = {module: {} for module in self._stand_ins}
        for module, other in self._stand_ins.items():
            hook = Passable(_entering(self, module), self._clearances[other], self._moves[module])
            self._handles[module].remove()
            self._handles[module] = self._modules[module][1].register_forward_pre_hook(hook, prepend=True)

    # -- gathers ----------------------------------------------------------------------------------------------------

    def plan(self, parameters_of_group: Sequence[tuple[int, ...]]) -> None:
        """Set the groups that travel together; nothing may be in flight."""
        assert not self.in_flight
        self._groups = list(parameters_of_group)
        self._works = [None] * len(self._groups)
        self._assign_groups_to_modules()

    @property
    def under_way(self) -> list[Work]:
        """The gathers that have not been awaited yet."""
        return [work for work in self._works if work is not None] if self.in_flight else []

    def launched(self, works: Sequence[Work]) -> None:
        """Gathers were submitted, one per group: modules wait for them from now on."""
        self._versions = [parameter._version for parameter in self._parameters]
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        self._works = list(works)
        self._num_in_flight = len(self._works)
        self._missing = [len(groups) for groups in self._groups_of_parameter]
        self.in_flight = bool(self._works)
        self._position = 0
        self._latest = None
        for clearance in self._clearances.values():
            clearance.given = not self.in_flight

    def finish(self) -> None:
        """Wait for every gather that is in flight."""
        if self.in_flight:
            self._wait(range(len(self._works)))

    def enter(self, module: int) -> None:
        """A module's forward begins; return when the parameters it reads are there."""
        if self._trace is not None:
            self._trace.enter(module)
        if not self.in_flight:
            return
        if self._sequence is None or not torch.is_grad_enabled() or not self._root.training:
            self.finish()
            return
        if module == 0:
            self._position = 0
        if not self._comes_in_order(module):
            self.finish()
            if not compat.in_backward():  # recomputed activations are no new order
                self._sequence = None  # the next forward is traced
            return
        groups = self._groups_of_module[module]
        if groups:
            self._wait(groups)
        if module in self._clearances:
            self._clearances[module].given = True

    def _comes_in_order(self, module: int) -> bool:
        """Whether a module begins where the traced forward had it; takes note that it has begun."""
        assert self._sequence is not None
        if module in self._stand_ins:  # it runs outside of its graph
            clearance = self._clearances[self._stand_ins[module]]
            following = self._moves[module].get(clearance.place)
            clearance.place = following or clearance.place
            return following is not None
        if self._position >= len(self._sequence) or self._sequence[self._position] != module:
            return False
        self._position += 1
        left, self._latest = self._latest, module if module in self._clearances else None
        if left is None or not self._paths[left] or self._paths[module].startswith(self._paths[left] + "."):
            return True
        return self._clearances[left].place in self._clearances[left].ends

    def start_below(self, module: int) -> None:
        """A module begins, so nothing below it has."""
        if module in self._clearances:
            self._clearances[module].place = START

    def _wait(self, groups: Sequence[int]) -> None:
        complete, changed = [], None
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
                if parameter._version != self._versions[index]:
                    changed = index, "written"
                elif parameter.data_ptr() != self._addresses[index]:
                    changed = index, "given other memory"
                self._missing[index] -= 1
                if self._missing[index] == 0:
                    complete.append(index)
        self.in_flight = self._num_in_flight > 0
        if complete and self._arrived is not None:
            self._arrived(complete)
        if not self.in_flight:
            self._give_clearances()
        if changed is not None:
            self._refuse_write(*changed)

    def _give_clearances(self) -> None:
        for clearance in self._clearances.values():
            clearance.given = True

    def _refuse_write(self, parameter: int, what: str) -> None:
        self._versions = [p._version for p in self._parameters]  # one complaint is enough
        self._addresses = [p.data_ptr() for p in self._parameters]
        self.finish()
        raise RuntimeError(
            f"{self._names[parameter]} was {what} while its gather was under way, so its value is undefined: call "
            f"state.synchronize() before writing or converting parameters after optimizer.step(), or use "
            f"{self._remedy}{see('a-parameter-was-written')}"
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
        awaited: set[int] = set()  # by those that come before, which are in order
        for module in dict.fromkeys(self._sequence or []):
            groups = self._groups_of_module[module]
            self._groups_of_module[module] = tuple(group for group in groups if group not in awaited)
            awaited.update(groups)


def _entering(pipe: FeedPipe, module: int) -> Callable[..., None]:
    def await_parameters(*_: object) -> None:
        pipe.start_below(module)
        if pipe.in_flight or pipe._trace is not None:
            pipe.enter(module)

    return await_parameters
