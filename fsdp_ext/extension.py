"""``extend(model)`` after ``fully_shard``, and back."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ddp_hooks.comm import Recorder, Span, Stall, Traffic, agree, at_exit, see
from fsdp_ext import checks, compat
from fsdp_ext.config import ExtConfig
from fsdp_ext.gather import RingAllGather
from fsdp_ext.pending import PendingReductions
from fsdp_ext.prefetch import Prefetcher
from fsdp_ext.scatter import RingReduceScatter
from fsdp_ext.stats import ExtStats
from fsdp_ext.transport import Transport

logger = logging.getLogger("fsdp_ext")


def extend(model: nn.Module, config: ExtConfig | None = None) -> Extension:
    """Let FSDP2 communicate through lanes: after ``fully_shard``, before or after the optimizer is made.

    On CPUs parameters are gathered and gradients reduced by rings over point-to-point messages, beside the
    computation. (gloo's own reduce-scatter moves an all-reduce, and FSDP2 waits for each collective there.) What is
    computed stays the same, up to the order in which a ring adds. On accelerators FSDP2's own collectives are as good,
    and stay.

    A reduce-scatter ends with the backward, where nothing reads its result earlier: where gradients were None before
    (as ``zero_grad()`` leaves them, and accumulation under ``set_requires_gradient_sync(False)``), without replicas
    (HSDP), ``set_all_reduce_hook``, ``set_force_sum_reduction_for_comms``, sums in float16, offloading or
    ``register_post_accumulate_grad_hook``. Elsewhere the backward waits for each. A gradient that another hook reads
    before then is NaN.

    Args:
        model: a module with FSDP2's inside of it. Its FSDP modules get communication objects of ours
            (``set_custom_all_gather``, ``set_custom_reduce_scatter``) and lists of modules to prefetch; parameters,
            gradients and checkpoints are as before.
        config: the settings.

    Returns:
        What counts bytes and waits; the same again if the model is extended with these settings already. With others
        these replace them.

    Raises:
        ValueError: on every rank, before anything is changed, when this cannot work, or when ranks differ.

    Collective: all ranks of the model's meshes do it. :func:`restore` undoes it.
    """
    config = config if config is not None else ExtConfig()
    earlier = _extensions.get(model) if isinstance(model, nn.Module) else None
    if earlier is not None and earlier.config == config:
        return earlier
    if earlier is not None:
        restore(model)
    _agree(model, config)
    extension = Extension(model, config)
    _extensions[model] = extension
    return extension


def restore(model: nn.Module) -> None:
    """Undo :func:`extend`, between steps; nothing if the model is not extended. Collective."""
    extension = _extensions.pop(model, None)
    if extension is not None:
        extension.close()


@dataclass
class Counts:
    """Collectives so far."""

    gathers: int = 0
    reduce_scatters: int = 0
    deferred: int = 0


class Extension:
    """What serves one model: made by :func:`extend`."""

    def __init__(self, model: nn.Module, config: ExtConfig) -> None:
        self.config = config
        self.counts = Counts()
        self.recorder = Recorder(config.trace)
        self.gather_stall, self.scatter_stall = Stall(), Stall()
        limit_bytes = None if config.pending_mb is None else int(config.pending_mb * (1 << 20))
        self.pending = PendingReductions(limit_bytes, self.scatter_stall, self.recorder)
        self._transports: dict[tuple[int, ...], Transport] = {}
        self._replaced: list[tuple[FSDPModule, tuple[Any, Any]]] = []
        self._handle = at_exit(self.close, self._abandon, self._is_stuck)
        modules = [(name, module) for name, module in checks.fsdp_modules(model) if _is_on_cpu(module)]
        self.prefetcher = Prefetcher(model, config.prefetch if modules else 0)
        for name, module in modules:
            self._take_over(name, module)
        if not modules:
            logger.info("parameters are on an accelerator: FSDP2's own collectives stay")

    def stats(self) -> ExtStats:
        """What was moved and waited for so far, on this rank."""
        traffic = sum((transport.traffic for transport in self._transports.values()), Traffic())
        return ExtStats(
            self.counts.gathers,
            self.counts.reduce_scatters,
            self.counts.deferred,
            traffic.sent_bytes,
            traffic.received_bytes,
            traffic.busy_s,
            self.gather_stall.seconds,
            self.scatter_stall.seconds,
        )

    def timeline(self) -> list[Span]:
        """What lanes did and what training waited for, in order of start; needs ``ExtConfig(trace=True)``."""
        return self.recorder.snapshot()

    def transport_of(self, group: dist.ProcessGroup) -> Transport:
        """The lanes of these ranks; made, collectively, at their first collective."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._transports:
            self._transports[ranks] = Transport(group, self.config, torch.device("cpu"), self.recorder)
        return self._transports[ranks]

    def close(self) -> None:
        """Finish what is under way, give modules their own communication back, and end the lanes; collective."""
        self._handle.remove()
        self.pending.deliver()
        self.prefetcher.remove()
        while self._replaced:
            module, (gather, scatter) = self._replaced.pop()
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
        for transport in self._transports.values():
            transport.close()

    def _take_over(self, name: str, module: FSDPModule) -> None:
        before = compat.communication_of(module)
        if before is None:
            return  # it has no parameters of its own
        module.set_custom_all_gather(RingAllGather(self, module, name))
        module.set_custom_reduce_scatter(RingReduceScatter(self, module, name))
        self._replaced.append((module, before))

    def _abandon(self, error: BaseException) -> None:
        for transport in self._transports.values():
            transport.abandon(error)

    def _is_stuck(self) -> bool:
        return any(transport.is_stuck for transport in self._transports.values())


_extensions: weakref.WeakKeyDictionary[nn.Module, Extension] = weakref.WeakKeyDictionary()


def _is_on_cpu(module: FSDPModule) -> bool:
    assert isinstance(module, nn.Module)
    sharded = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
    return all(parameter.device_mesh.device_type == "cpu" for parameter in sharded)


def _agree(model: nn.Module, config: ExtConfig) -> None:
    """All ranks with these parameters compare what they are about to do, or raise the same error."""
    problem = checks.find_problem(model, config)
    if not dist.is_initialized():
        raise ValueError(problem or "torch.distributed is not initialised" + see("set-up-is-refused"))
    entries = checks.fingerprint(model, config) if problem is None else {}
    failure = None
    for group in _groups_of(model):
        try:
            agree(entries, problem, group, "the set-up of fsdp_ext.extend")
        except ValueError as error:  # ranks of the mesh's other dimensions are to hear of it, too
            failure = failure or error
            problem = problem or str(error)
    if failure is not None:
        raise failure


def _groups_of(model: object) -> Iterator[dist.ProcessGroup]:
    """Of the model's meshes every dimension."""
    meshes = []
    for parameter in model.parameters() if isinstance(model, nn.Module) else ():
        if isinstance(parameter, DTensor) and parameter.device_mesh not in meshes:
            meshes.append(parameter.device_mesh)
    for mesh in meshes:
        for dimension in range(mesh.ndim):
            yield mesh.get_group(dimension)
    if not meshes:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
