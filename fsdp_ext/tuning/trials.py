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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_hooks.comm import Patience, gather_objects, report_error
from ddp_hooks.tuning.clock import StepClock
from ddp_hooks.tuning.profile import Job
from fsdp_ext import checks, compat
from fsdp_ext.config import ExtConfig
from fsdp_ext.extension import Extension, abandon, extend, restore
from fsdp_ext.tuning.config import TuneConfig
from fsdp_ext.tuning.profile_cache import Tuned, TunedEntry, TunedProfile, keep, wrapped
from fsdp_ext.tuning.reshard_knapsack import ReshardedModule, choose_kept

logger = logging.getLogger("fsdp_ext")

T = TypeVar("T")
_FIXED_TRIALS = 2  # before a process knows anything
_FEWEST_TRIALS = 8  # before its expectations of two or three dimensions are reason enough to end
_REPORT_S = 10.0  # how long a rank that failed waits for others to hear of it
_NUM_CHECKS = 2  # of each of two settings that are compared in turns


def tune(
    build: Callable[[float], nn.Module],
    step: Callable[[nn.Module], object],
    config: ExtConfig | None = None,
    tuner: TuneConfig | None = None,
    *,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
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
        progress: wraps the numbers of the trials, as ``tqdm`` does.

    Raises:
        ValueError: on every rank, if the model cannot be extended.
        LaneError: ``build`` or ``step`` failed on another rank, where its own error is raised.
    """
    return _Search(build, step, config or ExtConfig(), tuner or TuneConfig()).run(progress)


class _Setting(NamedTuple):
    block_mb: float
    config: ExtConfig | None  # None: stock
    kept: tuple[str, ...] = ()


class _Trial(NamedTuple):
    """Measurements of one rank."""

    seconds: float  # per step
    resharded: list[ReshardedModule]


class _Search:
    def __init__(
        self,
        build: Callable[[float], nn.Module],
        step: Callable[[nn.Module], object],
        config: ExtConfig,
        tuner: TuneConfig,
    ) -> None:
        self._build = build
        self._step = step
        self._config = config
        self._tuner = tuner
        self._num_trials = 0
        self._is_leader = dist.get_rank() == 0
        self._job: Job | None = None
        self._resharded: list[ReshardedModule] = []  # of the last trial

    def run(self, progress: Callable[[Iterable[int]], Iterable[int]]) -> Tuned:
        """See :func:`tune`."""
        space = _space_of(self._tuner, self._config)
        times_s = {0: self._measure(space[0])}  # (1)
        profile = TunedProfile(self._tuner.profile) if self._tuner.profile is not None else None
        assert self._job is not None, "the first trial is extended"
        job = self._job
        entry = self._leaders(lambda: profile.find(job) if profile is not None else None)
        if isinstance(entry, TunedEntry):
            logger.info("settings of an earlier run: %s", entry.tuned)
            return entry.tuned
        for _ in progress(range(1, self._tuner.max_trials)):  # (2)
            proposed = self._leaders(lambda: _propose(space, times_s, self._tuner))
            if proposed is None:
                break
            times_s[proposed] = self._measure(space[proposed])
        best = self._with_kept(space[min(times_s, key=lambda index: times_s[index])])  # (3)
        tuned = self._against_stock(best)  # (4)
        if profile is not None and self._is_leader:
            profile.store(TunedEntry(job, (), None, tuned))
        return tuned

    # -- trials -------------------------------------------------------------------------------------------------------

    def _measure(self, setting: _Setting) -> float:
        """Return the seconds per step of the slowest rank; an error on one rank raises on all."""
        model = None
        try:
            model = self._build(setting.block_mb)
            mine = self._time(model, setting)
        except Exception as error:
            logger.error("a trial failed on this rank, which tells the others: %s: %s", type(error).__name__, error)
            if model is not None:
                abandon(model, error)  # others may wait for its parts
            assert dist.group.WORLD is not None
            # Ranks that are in one of FSDP2's own collectives hear of it when this process has ended.
            patience = Patience(min(_REPORT_S, self._config.timeout_s), self._config.stall_warning_s)
            report_error(error, dist.group.WORLD, patience)
            raise
        else:
            trials = self._everyones(mine)
        finally:
            if model is not None:
                restore(model)
            del model
            gc.collect()  # FSDP2's states refer to each other
        by_module = zip(*(trial.resharded for trial in trials), strict=True)
        self._resharded = [max(modules, key=lambda each: each.wait_s) for modules in by_module]
        slowest_s = max(trial.seconds for trial in trials)
        self._num_trials += 1
        if self._is_leader:
            logger.info("trial %d: %s: %.4g s per step", self._num_trials, _described(setting), slowest_s)
        return slowest_s

    def _time(self, model: nn.Module, setting: _Setting) -> _Trial:
        """Run the steps of one trial on this rank."""
        keep(wrapped(model, setting.kept))
        extension = extend(model, setting.config) if setting.config is not None else None
        clock = StepClock(_device_of(model))
        for _ in range(self._tuner.dropped_steps):
            self._step(model)
        before_s = dict(extension.context.backward_waits) if extension is not None else {}
        clock.restart()
        for _ in range(self._tuner.steps_per_trial):
            self._step(model)
            clock.tick()
        seconds = statistics.median(clock.seconds())
        if extension is None:
            return _Trial(seconds, [])
        self._job = self._job or self._job_of(model, extension.link_bytes_s)
        return _Trial(seconds, _resharded_modules(model, extension, before_s))

    def _in_turns(self, first: _Setting, second: _Setting) -> tuple[float, float]:
        """Return the medians of both."""
        times_s: tuple[list[float], list[float]] = ([], [])
        for _ in range(_NUM_CHECKS):
            for setting, found in zip((first, second), times_s, strict=True):
                found.append(self._measure(setting))
        return statistics.median(times_s[0]), statistics.median(times_s[1])

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _with_kept(self, best: _Setting) -> _Setting:
        """Return ``best`` with modules kept whole, if that is faster."""
        if not self._tuner.keep_bytes:
            return best
        self._measure(best)
        kept = choose_kept(self._resharded, self._tuner.keep_bytes)  # of the same numbers on every rank
        if not kept:
            return best
        other = best._replace(kept=kept)
        best_s, other_s = self._in_turns(best, other)
        return other if other_s < best_s else best

    def _against_stock(self, best: _Setting) -> Tuned:
        stock = _Setting(self._tuner.default_block_mb, None)
        best_s, stock_s = self._in_turns(best, stock)
        if best_s < stock_s:
            return Tuned(best.block_mb, best.config, best.kept, best_s, stock_s, self._num_trials)
        if self._is_leader:
            logger.info("stock FSDP2 is as fast, so nothing is extended")
        return Tuned(stock.block_mb, None, (), stock_s, stock_s, self._num_trials)

    def _leaders(self, decide: Callable[[], T]) -> T:
        """Return the first rank's decision, on all ranks."""
        decided: Any = self._everyones(decide() if self._is_leader else None)[0]
        return cast("T", decided)

    def _everyones(self, item: T) -> list[T]:
        assert dist.group.WORLD is not None
        return gather_objects(item, dist.group.WORLD, "fsdp_ext.tune()", self._config)

    def _job_of(self, model: nn.Module, link_bytes_s: float | None) -> Job:
        """The job that the result is good for."""
        shapes = sorted((name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters())
        meshes = sorted({tuple(p.device_mesh.shape) for p in model.parameters() if isinstance(p, DTensor)})
        # ``build`` decides which modules share a group, and kept modules have names of groups.
        groups = [
            (name, [column.stop for column in compat.columns_of(module) or ()])
            for name, module in checks.fsdp_modules(model)
        ]
        digest = hashlib.sha256(repr((shapes, groups)).encode()).hexdigest()[:24]
        settings = repr((torch.__version__, meshes, self._config, replace(self._tuner, profile=None)))
        link_mb_s = None if link_bytes_s is None else link_bytes_s / 1e6
        return Job("fsdp_ext", digest, dist.get_world_size(), _device_of(model).type, settings, link_mb_s)


# -- the space of settings --------------------------------------------------------------------------------------------


def _space_of(tuner: TuneConfig, config: ExtConfig) -> list[_Setting]:
    """All settings that may be tried, the default first."""
    default = _Setting(tuner.default_block_mb, config)
    settings = [
        _Setting(
            block_mb,
            replace(
                config,
                prefetch=config.prefetch if prefetch is None else prefetch,
                lanes=config.lanes if lanes is None else lanes,
            ),
        )
        for block_mb, prefetch, lanes in itertools.product(tuner.block_mb, tuner.prefetch, tuner.lanes)
    ]
    return [default, *(setting for setting in settings if _coordinates(setting) != _coordinates(default))]


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
    """Positions in the unit cube: logarithms of sizes, depths and lanes, as far as they differ."""
    axes = list(zip(*(_coordinates(setting) for setting in space), strict=True))
    spans = [(min(axis), max(axis)) for axis in axes]
    varying = [(axis, low, high) for axis, (low, high) in zip(axes, spans, strict=True) if high > low]
    return [[(axis[index] - low) / (high - low) for axis, low, high in varying] or [0.0] for index in range(len(space))]


def _coordinates(setting: _Setting) -> tuple[float, float, float, float]:
    assert setting.config is not None
    prefetch = setting.config.prefetch
    is_given, depth = (0.0, 2) if prefetch is None else (1.0, prefetch)
    return math.log(setting.block_mb), is_given, math.log1p(depth), math.log(setting.config.lanes or 2)


def _described(setting: _Setting) -> str:
    config = setting.config
    if config is None:
        return f"blocks of {setting.block_mb:g} MB, stock FSDP2"
    kept = f", {len(setting.kept)} modules kept" if setting.kept else ""
    return f"blocks of {setting.block_mb:g} MB, prefetch={config.prefetch}, lanes={config.lanes}{kept}"


# -- facts about a model ----------------------------------------------------------------------------------------------


def _resharded_modules(model: nn.Module, extension: Extension, before_s: dict[str, float]) -> list[ReshardedModule]:
    """Modules that are resharded after forward, with the seconds that backwards waited for each since ``before_s``."""
    found = []
    for name, module in checks.fsdp_modules(model):
        columns = compat.columns_of(module)
        if columns and not compat.keeps_parameters(module):
            nbytes = sum((column.stop - column.start) * column.parameter.element_size() for column in columns)
            wait_s = extension.context.backward_waits.get(name, 0.0) - before_s.get(name, 0.0)
            found.append(ReshardedModule(name, nbytes, wait_s))
    return found


def _device_of(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return parameter.to_local().device
    return torch.device("cpu")
