"""``extend(model)`` after ``fully_shard``, and back."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ddp_hooks.comm import LaneError, Recorder, Span, Stall, Traffic, agree, at_exit, gather_objects, mebibytes, see
from fsdp_ext import checks, compat
from fsdp_ext.config import ExtConfig
from fsdp_ext.early import Turns
from fsdp_ext.gather import RingAllGather
from fsdp_ext.memory import Pool
from fsdp_ext.native import NativeAllGather, NativeReduceScatter
from fsdp_ext.pending import PendingReductions
from fsdp_ext.prefetch import Prefetcher
from fsdp_ext.residuals import Residuals
from fsdp_ext.scatter import RingReduceScatter
from fsdp_ext.stats import ExtStats
from fsdp_ext.transport import Transport

logger = logging.getLogger("fsdp_ext")

_ATTRIBUTE = "_fsdp_ext_extension"


def extend(model: nn.Module, config: ExtConfig | None = None) -> Extension:
    """Let FSDP2 communicate through lanes: after ``fully_shard``, before or after the optimizer is made.

    On CPUs parameters are gathered and gradients reduced over point-to-point messages, beside the computation. (gloo's
    own reduce-scatter moves an all-reduce, and FSDP2 waits for each collective there.) What is computed stays the same,
    up to the order in which gradients are added, which is that of ranks. On accelerators FSDP2's own collectives are as
    good, and stay.

    A reduce-scatter, with replicas (HSDP) the all-reduce that follows it, and what divides or converts its result, end
    with the backward, where nothing reads it earlier: without ``set_all_reduce_hook``,
    ``set_requires_all_reduce(False)``, offloading or ``register_post_accumulate_grad_hook``, and where gradients were
    None before or all parameters of the module get one. Elsewhere the backward waits for each; with offloading or
    ``defer=False`` only for what is left of it when the module's last gradient has come (``ExtConfig.early``). A
    gradient that another hook reads before its reduce-scatter has ended is NaN. Over replicas gradients are averaged in
    the type that they are summed in, and exactly, whatever ``reduce_scatter`` says.

    Args:
        model: a module with FSDP2's inside of it. Its FSDP modules get communication objects of ours
            (``set_custom_all_gather``, ``set_custom_reduce_scatter``) and lists of modules to prefetch; parameters,
            gradients and checkpoints are as before.
        config: the settings.

    Returns:
        What counts bytes and waits; the same again if the model is extended with these settings already. With others
        these replace them, and what gradients have lost so far is still added, of those of which something is kept.

    Raises:
        ValueError: on every rank, before anything is changed, when this cannot work, or when ranks differ. A model that
            was extended before stays so.

    Collective: all ranks of the model's meshes do it. :func:`restore` undoes it.
    """
    config = config if config is not None else ExtConfig()
    earlier = _extension_of(model)
    same = earlier is not None and earlier.config == config
    _agree(model, config, "no" if earlier is None else "with these settings" if same else "with others")
    if earlier is None:
        return Extension(model, config)
    if same:
        return earlier
    left_over = earlier.state_dict()
    earlier.close()
    extension = Extension(model, config)
    extension.carry_over(left_over)
    return extension


def restore(model: nn.Module) -> None:
    """Undo :func:`extend`, between steps; nothing if the model is not extended. Collective."""
    extension = _extension_of(model)
    if extension is not None:
        extension.close()


def abandon(model: nn.Module, error: BaseException) -> None:
    """Tell ranks that wait for this one's parts of the model that ``error`` ends its step; nothing if not extended."""
    extension = _extension_of(model)
    if extension is not None:
        extension._abandon(error)


@dataclass
class Counts:
    """Collectives so far."""

    gathers: int = 0
    reduce_scatters: int = 0
    deferred: int = 0
    early: int = 0


class Extension:
    """What serves one model: made by :func:`extend`."""

    def __init__(self, model: nn.Module, config: ExtConfig) -> None:
        self._model = model
        self.config = config
        self.counts = Counts()
        self.recorder = Recorder(config.trace)
        self.backward_waits: dict[str, float] = defaultdict(float)
        """Seconds that backwards have waited for whole parameters, by module."""
        self.gather_stall, self.scatter_stall = Stall(), Stall()
        limit_bytes = None if config.pending_mb is None else mebibytes(config.pending_mb)
        self.pending = PendingReductions(limit_bytes, self.scatter_stall, self.recorder)
        self.pool = Pool()
        """Memory on CPUs for whole parameters and gradients."""
        self.turns = Turns()
        """In which order gradients come of modules whose reduce-scatters begin early."""
        self.averages_replicas = False
        """Whether FSDP2 was seen to leave its all-reduce to us; the same on all ranks."""
        self._transports: dict[tuple[int, ...], Transport] = {}
        self._residuals: list[Residuals] = []
        self._replaced: list[tuple[FSDPModule, tuple[Any, Any]]] = []
        self._scatters: list[RingReduceScatter] = []
        self._is_closing = False
        self.names = {module: name for name, module in model.named_modules()}
        self._handle = at_exit(self.close, self._abandon, self._is_stuck)
        modules = list(checks.fsdp_modules(model))
        on_cpu = all(checks.is_on_cpu(module) for _, module in modules)
        self.prefetcher = Prefetcher(model, config.prefetch if on_cpu else 0)
        for name, module in modules:
            self._take_over(name, module)
        setattr(model, _ATTRIBUTE, self)
        if not self._replaced:
            logger.info("parameters are on an accelerator: FSDP2's own exact collectives stay")
        unused = checks.unused_settings(config)
        if unused and not any(checks.is_on_cpu(module) for _, module in modules):
            logger.warning("parameters are on an accelerator, where %s have no effect: leave them out", unused)

    def stats(self) -> ExtStats:
        """What was moved and waited for so far, on this rank."""
        traffic = sum((transport.traffic for transport in self._transports.values()), Traffic())
        return ExtStats(
            self.counts.gathers,
            self.counts.reduce_scatters,
            self.counts.deferred,
            self.counts.early,
            traffic.sent_bytes,
            traffic.received_bytes,
            traffic.busy_s,
            self.gather_stall.seconds,
            self.scatter_stall.seconds,
        )

    def timeline(self) -> list[Span]:
        """What lanes did and what training waited for, in order of start; needs ``ExtConfig(trace=True)``."""
        return self.recorder.snapshot()

    def state_dict(self) -> dict[str, DTensor]:
        """What gradients have lost so far and is still to be added, by name of parameter: for checkpoints.

        Sharded as the parameters are, so that ``torch.distributed.checkpoint`` saves it, and loads it for any number of
        ranks. Empty unless ``reduce_scatter`` is ``"sparse"``, or ``"int8"`` with error feedback. Collective, between
        steps: what ranks have kept of each other's shards moves to these, so that a run that goes on is the same, bit
        for bit, as one that resumes.
        """
        self.pending.abandon()  # there is something only after a backward that failed
        state: dict[str, DTensor] = {}
        for group in dict.fromkeys(group for residuals in self._residuals for group in residuals.groups):
            gather_objects(None, group, "Extension.state_dict()", self.config)  # or some would wait without a name
        for residuals in self._residuals:
            residuals.settle()
            state |= residuals.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, DTensor]) -> None:
        """The reverse of :meth:`state_dict`, between steps; what was kept before is forgotten.

        Raises:
            ValueError: it is of other parameters, settings or ranks; nothing is changed then.
        """
        kept = {name: value for residuals in self._residuals for name, value in residuals.state_dict().items()}
        problem = checks.find_problem_of_state(state, kept)
        if problem is not None:
            raise ValueError(problem)
        self.carry_over(state)

    def carry_over(self, state: Mapping[str, DTensor]) -> None:
        """What :meth:`load_state_dict` does, from a model that was extended with other settings.

        What these settings keep nothing of is dropped, with a warning.
        """
        wanted = [(residuals, residuals.state_dict().keys()) for residuals in self._residuals]
        for residuals, names in wanted:
            residuals.load_state_dict({name: state[name] for name in names if name in state})
        dropped = state.keys() - {name for _, names in wanted for name in names}
        if dropped:
            logger.warning(
                "what was left of the gradients of %s is dropped: with these settings nothing is kept of them",
                min(dropped) if len(dropped) == 1 else f"{min(dropped)} and {len(dropped) - 1} more parameters",
            )

    def scale_leftovers(self, factor: float) -> None:
        """Multiply what gradients have lost so far and is still to be added; 0 forgets it. On all ranks, between steps.

        For a loss scale that changes: what was lost has the scale of its own step. And for a batch whose gradients are
        not to be used, also not what was left out of them.
        """
        for residuals in self._residuals:
            residuals.scale(factor)

    @property
    def link_bytes_s(self) -> float | None:
        """What the slowest link carries, as far as it was measured."""
        found = [transport.link.goodput_bytes_s for transport in self._transports.values()]
        return min((goodput for goodput in found if goodput is not None), default=None)

    def transport_of(self, group: dist.ProcessGroup) -> Transport:
        """The lanes of these ranks; made, collectively, at their first collective."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._transports:
            self._transports[ranks] = Transport(group, self.config, torch.device("cpu"), self.recorder)
        return self._transports[ranks]

    def failures_to_ignore(self) -> contextlib.AbstractContextManager[None]:
        """Of gathers that end only to be forgotten."""
        return contextlib.suppress(LaneError) if self._is_closing else contextlib.nullcontext()

    def close(self) -> None:
        """Finish what is under way, give modules their own communication back, and end the lanes; collective."""
        self._is_closing = True
        self._handle.remove()
        vars(self._model).pop(_ATTRIBUTE, None)
        with contextlib.ExitStack() as rest:  # all of it, also if lanes have failed
            for transport in self._transports.values():
                rest.callback(transport.close)
            rest.callback(self._give_back)
            rest.callback(self.prefetcher.remove)
            self.pending.abandon()  # there is something only after a backward that failed

    def _take_over(self, name: str, module: FSDPModule) -> None:
        before = compat.communication_of(module)
        if before is None:
            return  # it has no parameters of its own
        config = self.config
        replicas = compat.replicas_of(module)
        residuals = Residuals(module, self.names, replicas) if config.keeps_residuals_of(name) else None
        if checks.is_on_cpu(module):
            module.set_custom_all_gather(RingAllGather(self, module, name))
            self._scatters.append(RingReduceScatter(self, module, name, residuals))
            module.set_custom_reduce_scatter(self._scatters[-1])
        elif config.is_exact:
            return
        else:
            module.set_custom_all_gather(NativeAllGather(config, module))
            module.set_custom_reduce_scatter(NativeReduceScatter(config, residuals))
        self._replaced.append((module, before))
        if residuals is not None:
            self._residuals.append(residuals)

    def _give_back(self) -> None:
        while self._scatters:
            self._scatters.pop().remove()
        while self._replaced:
            module, (gather, scatter) = self._replaced.pop()
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)

    def _abandon(self, error: BaseException) -> None:
        for transport in self._transports.values():
            transport.abandon(error)

    def _is_stuck(self) -> bool:
        return any(transport.is_stuck for transport in self._transports.values())


def _extension_of(model: object) -> Extension | None:
    """The model keeps it, so that both can be let go of together."""
    found = getattr(model, _ATTRIBUTE, None) if isinstance(model, nn.Module) else None
    return found if isinstance(found, Extension) else None


def _agree(model: nn.Module, config: ExtConfig, extended: str) -> None:
    """All ranks with these parameters compare what they are about to do, or raise the same error.

    ``extended``: whether the model, as a whole, is already: "no", "with these settings", or "with others".
    """
    problem = checks.find_problem(model, config, extended != "no")
    if not dist.is_initialized():
        raise ValueError(problem or "torch.distributed is not initialised" + see("set-up-is-refused"))
    entries = checks.fingerprint(model, config) if problem is None else {}
    entries["extended already"] = extended
    failure = None
    for group in _groups_of(_meshes_of(model)):
        try:
            agree(entries, problem, group, "the set-up of fsdp_ext.extend", config)
        except ValueError as error:  # ranks of the mesh's other dimensions are to hear of it, too
            if group is dist.group.WORLD:
                raise  # everybody has
            failure = failure or error
            problem = problem or str(error)
    if failure is not None:
        raise failure


def _meshes_of(model: object) -> list[DeviceMesh]:
    meshes: list[DeviceMesh] = []
    for parameter in model.parameters() if isinstance(model, nn.Module) else ():
        if isinstance(parameter, DTensor) and parameter.device_mesh not in meshes:
            meshes.append(parameter.device_mesh)
    return meshes


def _groups_of(meshes: Sequence[DeviceMesh]) -> Iterator[dist.ProcessGroup]:
    """Of all ranks, if a mesh has them all, or is a part of one that has; else of every dimension of the meshes."""
    if not meshes or any(compat.num_ranks_around(mesh) == dist.get_world_size() for mesh in meshes):
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
        return
    for mesh in meshes:
        for dimension in range(mesh.ndim):
            yield mesh.get_group(dimension)
