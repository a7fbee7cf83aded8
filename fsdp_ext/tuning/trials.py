"""The search: each trial builds the model, runs a few of the user's own steps, and drops it.

1. Measure the default, and the link with it. The result of an earlier run for the same job ends the search.
2. A Gaussian process proposes the next settings, as in :mod:`ddp_hooks.tuning`, until nothing promises more.
3. With a budget, keep modules whole after forward for which backwards wait, if that is faster.
4. Measure the best in turns with stock FSDP2; it stays only if it is faster.

The first rank decides, and all ranks hear its decisions, so they never part.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_hooks.comm import Patience, broadcast_object, gather_objects, report_error
from ddp_hooks.tuning.profile import Job, Profile
from ddp_hooks.tuning.tuning import StepClock
from fsdp_ext import checks, compat
from fsdp_ext.config import ExtConfig
from fsdp_ext.extension import Extension, extend, extension_of, restore
from fsdp_ext.tuning.config import TuneConfig
from fsdp_ext.tuning.tuned import Tuned, TunedEntry, keep, wrapped

logger = logging.getLogger("fsdp_ext")

_FIXED_TRIALS = 2  # before a process knows anything
_FEWEST_TRIALS = 8  # before its expectations of two or three dimensions are reason enough to end
_REPORT_S = 10.0  # how long a rank that failed waits for others to hear of it
_NUM_CHECKS = 2  # of each of two settings that are compared in turns
_UNITS = 4096  # of a budget for modules that are kept whole
_CALL = "fsdp_ext.tune()"


def tune(
    build: Callable[[float], nn.Module],
    step: Callable[[nn.Module], object],
    config: ExtConfig | None = None,
    tuner: TuneConfig | None = None,
) -> Tuned:
    """Find a granularity of wrapping and settings of the extension for a model, before training.

        tuned = tune(build, step)
        model = build(tuned.block_mb)
        tuned.apply(model)

    Collective: all ranks do it. Takes ``max_trials`` times a few steps, or one trial where a profile has the result.
    Trials need memory for one model at a time.

    Args:
        build: makes the model anew, sharded by ``fully_shard`` in parts of about so many MiB; the same on every rank.
            :func:`~fsdp_ext.shard_by_size` groups a model's blocks.
        step: one step of training of this model, forward and backward at least, on a batch as in training.
        config: settings of the extension that are not searched for.
        tuner: range and length of the search.

    Raises:
        ValueError: on every rank, if the model cannot be extended.
        LaneError: ``build`` or ``step`` failed on another rank, where its own error is raised.
    """
    is_leader, group = dist.get_rank() == 0, dist.group.WORLD
    assert group is not None
    return _Search(build, step, config or ExtConfig(), tuner or TuneConfig(), group, is_leader).run()


class ReshardedModule(NamedTuple):
    """Module that is resharded after forward."""

    name: str
    nbytes: int  # of its whole parameters
    wait_s: float  # that a backward waits for them


class _Setting(NamedTuple):
    block_mb: float
    config: ExtConfig | None  # None: stock
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.config is None:
            return f"blocks of {self.block_mb:g} MB, stock FSDP2"
        extended = f"prefetch={self.config.prefetch}, lanes={self.config.lanes}"
        return f"blocks of {self.block_mb:g} MB, {extended}, {len(self.kept)} modules kept"


@dataclass
class _Search:
    build: Callable[[float], nn.Module]
    step: Callable[[nn.Module], object]
    config: ExtConfig
    tuner: TuneConfig
    group: dist.ProcessGroup
    is_leader: bool
    num_trials: int = 0
    job: Job | None = None  # from the first trial on
    resharded: list[ReshardedModule] = field(default_factory=list)  # in the last trial

    def run(self) -> Tuned:
        """See :func:`tune`."""
        space = _space_of(self.tuner, self.config)
        times_s = {0: self.measure(space[0])}  # (1)
        profile = Profile(self.tuner.profile, TunedEntry) if self.tuner.profile is not None else None
        job = self.job
        assert job is not None, "the first trial is extended"
        entry = self._leaders(lambda: profile.find(job) if profile is not None else None)
        if entry is not None:
            logger.info("settings of an earlier run: %s", entry.tuned)
            found: Tuned = entry.tuned
            return found
        for _ in range(1, self.tuner.max_trials):  # (2)
            proposed = self._leaders(lambda: _propose(space, times_s, self.tuner))
            if proposed is None:
                break
            times_s[proposed] = self.measure(space[proposed])
        best = self._with_kept(space[min(times_s, key=lambda index: times_s[index])])  # (3)
        tuned = self._against_stock(best)  # (4)
        if profile is not None and self.is_leader:
            profile.store(TunedEntry(job, (), None, tuned))
        return tuned

    def measure(self, setting: _Setting) -> float:
        """Return the seconds per step of the slowest rank; an error on one rank raises on all."""
        model = None
        try:
            model = self.build(setting.block_mb)
            seconds, resharded = self._time(model, setting)
        except Exception as error:
            logger.error("a trial failed on this rank, which tells the others: %s: %s", type(error).__name__, error)
            extension = extension_of(model)
            if extension is not None:
                extension.abandon(error)  # others may wait for its parts
            # Ranks that are in one of FSDP2's own collectives hear of it when this process has ended.
            patience = Patience(min(_REPORT_S, self.config.timeout_s), self.config.stall_warning_s)
            report_error(error, self.group, patience)
            raise
        else:
            trials = gather_objects((seconds, resharded), self.group, _CALL, self.config)
        finally:
            if model is not None:
                restore(model)
            del model
            gc.collect()  # FSDP2's states refer to each other
        by_module = zip(*(resharded for _, resharded in trials), strict=True)
        self.resharded = [max(modules, key=lambda each: each.wait_s) for modules in by_module]
        slowest_s: float = max(seconds for seconds, _ in trials)
        self.num_trials += 1
        if self.is_leader:
            logger.info("trial %d: %s: %.4g s per step", self.num_trials, setting, slowest_s)
        return slowest_s

    def _time(self, model: nn.Module, setting: _Setting) -> tuple[float, list[ReshardedModule]]:
        """Run the steps of one trial on this rank; return its seconds per step, and modules that could be kept."""
        keep(wrapped(model, setting.kept))
        extension = extend(model, setting.config) if setting.config is not None else None
        clock = StepClock(_device_of(model))
        for _ in range(self.tuner.dropped_steps):
            self.step(model)
        if extension is not None:
            extension.context.backward_waits.clear()
        clock.restart()
        for _ in range(self.tuner.steps_per_trial):
            self.step(model)
            clock.tick()
        seconds = statistics.median(clock.seconds())
        if extension is None:
            return seconds, []
        self.job = self.job or self._job_of(model, extension)
        resharded = []
        for name, module in checks.fsdp_modules(model):
            columns = compat.columns_of(module)
            if columns and not compat.keeps_parameters(module):
                nbytes = sum((column.stop - column.start) * column.parameter.element_size() for column in columns)
                resharded.append(ReshardedModule(name, nbytes, extension.context.backward_waits[name]))
        return seconds, resharded

    def _with_kept(self, best: _Setting) -> _Setting:
        """Return ``best`` with modules kept whole, if that is faster."""
        if not self.tuner.keep_bytes:
            return best
        self.measure(best)
        kept = choose_kept(self.resharded, self.tuner.keep_bytes)  # of the same numbers on every rank
        if not kept:
            return best
        other = best._replace(kept=kept)
        best_s, other_s = self._in_turns(best, other)
        return other if other_s < best_s else best

    def _against_stock(self, best: _Setting) -> Tuned:
        stock = _Setting(self.tuner.default_block_mb, None)
        best_s, stock_s = self._in_turns(best, stock)
        if best_s < stock_s:
            return Tuned(*best, best_s, stock_s, self.num_trials)
        if self.is_leader:
            logger.info("stock FSDP2 is as fast, so nothing is extended")
        return Tuned(*stock, stock_s, stock_s, self.num_trials)

    def _in_turns(self, first: _Setting, second: _Setting) -> tuple[float, float]:
        """Return the medians of both."""
        pairs = [(self.measure(first), self.measure(second)) for _ in range(_NUM_CHECKS)]
        first_s, second_s = (statistics.median(times_s) for times_s in zip(*pairs, strict=True))
        return first_s, second_s

    def _leaders(self, decide: Callable[[], Any]) -> Any:
        """Return the first rank's decision, on all ranks."""
        return broadcast_object(decide() if self.is_leader else None, self.group, _CALL, self.config)

    def _job_of(self, model: nn.Module, extension: Extension) -> Job:
        """The job that the result is good for."""
        shapes = sorted((name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters())
        meshes = sorted({tuple(p.device_mesh.shape) for p in model.parameters() if isinstance(p, DTensor)})
        # ``build`` decides which modules share a group, and kept modules have names of groups.
        groups = [
            (name, [column.stop for column in compat.columns_of(module)]) for name, module in checks.fsdp_modules(model)
        ]
        digest = hashlib.sha256(repr((shapes, groups)).encode()).hexdigest()[:24]
        settings = repr((torch.__version__, meshes, self.config, replace(self.tuner, profile=None)))
        goodputs = [transport.goodput_bytes_s for transport in extension.context.transports.values()]
        link_mb_s = min((goodput / 1e6 for goodput in goodputs if goodput is not None), default=None)
        return Job("fsdp_ext", digest, dist.get_world_size(), _device_of(model).type, settings, link_mb_s)


def _device_of(model: nn.Module) -> torch.device:
    sharded = (parameter for parameter in model.parameters() if isinstance(parameter, DTensor))
    return next((parameter.to_local().device for parameter in sharded), torch.device("cpu"))


# -- the space of settings --------------------------------------------------------------------------------------------


def _space_of(tuner: TuneConfig, config: ExtConfig) -> list[_Setting]:
    """All settings that may be tried, the default first."""
    default = _Setting(tuner.default_block_mb, config)
    settings = [default]
    for block_mb, prefetch, lanes in itertools.product(tuner.block_mb, tuner.prefetch, tuner.lanes):
        searched: dict[str, Any] = {"prefetch": prefetch, "lanes": lanes}
        given = {name: value for name, value in searched.items() if value is not None}
        setting = _Setting(block_mb, replace(config, **given))
        if _coordinates(setting) != _coordinates(default):
            settings.append(setting)
    return settings


def _propose(space: Sequence[_Setting], times_s: dict[int, float], tuner: TuneConfig) -> int | None:
    """The most promising untried setting; None if none is worth a trial."""
    from ddp_hooks.tuning.surrogate import Observation, fit_posterior  # seconds

    untried = [index for index in range(len(space)) if index not in times_s]
    if not untried:
        return None
    positions = _positions(space)
    if len(times_s) < _FIXED_TRIALS:  # the farthest from the first
        return max(untried, key=lambda index: math.dist(positions[index], positions[0]))
    observed = [Observation(index, 1 / seconds) for index, seconds in times_s.items()]
    posterior = fit_posterior(positions, observed, tuner.xi, tuner.seed)
    promised = max(posterior.gain[index] for index in untried)
    if len(times_s) >= _FEWEST_TRIALS and promised < tuner.min_gain:
        return None
    return max(untried, key=lambda index: posterior.improvement[index])


def _positions(space: Sequence[_Setting]) -> list[list[float]]:
    """Positions in the unit cube: coordinates as far as they differ."""
    axes = list(zip(*map(_coordinates, space), strict=True))
    varying = [(axis, min(axis), max(axis)) for axis in axes if max(axis) > min(axis)]
    return [[(axis[index] - low) / (high - low) for axis, low, high in varying] or [0.0] for index in range(len(space))]


def _coordinates(setting: _Setting) -> tuple[float, float, float, float]:
    """Logarithms of sizes, depths and lanes."""
    assert setting.config is not None
    prefetch = setting.config.prefetch
    is_given, depth = (0.0, 2) if prefetch is None else (1.0, prefetch)
    return math.log(setting.block_mb), is_given, math.log1p(depth), math.log(setting.config.lanes or 2)


# -- modules to keep whole after forward -------------------------------------------------------------------------------


def choose_kept(modules: Sequence[ReshardedModule], budget_bytes: int) -> tuple[str, ...]:
    """Return the modules that save most time within a budget: the optimum of the 0/1 knapsack, but for rounding.

    Sizes are rounded up to 1/4096 of the budget, so that it is never exceeded. Modules without waits are not kept. Of
    equal modules the first ones are.
    """
    candidates = [module for module in modules if module.wait_s > 0 and module.nbytes <= budget_bytes]
    if not candidates:
        return ()
    units = [-(-module.nbytes * _UNITS // budget_bytes) for module in candidates]
    saved_s = np.zeros(_UNITS + 1)  # by capacity
    takes = np.zeros((len(candidates), _UNITS + 1), dtype=bool)
    for index in reversed(range(len(candidates))):
        size, with_it = units[index], np.full(_UNITS + 1, -np.inf)
        with_it[size:] = saved_s[: _UNITS + 1 - size] + candidates[index].wait_s
        takes[index] = with_it >= saved_s
        saved_s = np.maximum(saved_s, with_it)
    chosen, capacity = [], _UNITS
    for index, module in enumerate(candidates):
        if takes[index, capacity]:
            chosen.append(module.name)
            capacity -= units[index]
    return tuple(chosen)
