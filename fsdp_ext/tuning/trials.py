"""The search: each trial builds the model, runs a few of the user's own steps, and drops it.

1. The default is measured, which also measures the link. What an earlier run has found for the same ends the search.
2. A Gaussian process proposes the next settings, as in :mod:`ddp_hooks.tuning`, until nothing promises more.
3. With a budget, modules for which backwards wait are kept whole after forward, if that is faster.
4. The best is measured in turns with stock FSDP2, and stays only if it is faster.

All ranks hear the first one's decisions, so they never part.
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
from fsdp_ext import checks, compat
from fsdp_ext.config import ExtConfig
from fsdp_ext.extension import abandon, extend, restore
from fsdp_ext.tuning.config import TuneConfig
from fsdp_ext.tuning.found import Profile, Tuned, keep, wrapped
from fsdp_ext.tuning.keeping import Keepable, choose_kept

logger = logging.getLogger("fsdp_ext")

T = TypeVar("T")
_FIXED_TRIALS = 2  # before a process knows anything
_FEWEST_TRIALS = 8  # before what it expects of two or three dimensions is reason enough to end
_FAREWELL_S = 10.0  # how long a rank that failed waits for others to hear of it
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

    Collective: all ranks do it. Takes ``max_trials`` times a few steps, or one trial where a profile knows the result.
    Models of trials are dropped one after the other, so memory is needed for one at a time.

    Args:
        build: makes the model anew, sharded by ``fully_shard`` in parts of about so many MiB; the same on every rank.
            :func:`~fsdp_ext.shard_by_size` groups a model's blocks.
        step: one step of training of this model, forward and backward at least, on a batch as in training.
        config: settings of the extension that are not searched for.
        tuner: what is searched for, and how long.
        progress: wraps the numbers of the trials, as ``tqdm`` does.

    Raises:
        ValueError: on every rank, if the model cannot be extended.
        LaneError: ``build`` or ``step`` failed on another rank, where its own error is raised.
    """
    return _Search(build, step, config or ExtConfig(), tuner or TuneConfig()).run(progress)


class _Setting(NamedTuple):
    """What a trial tries."""

    block_mb: float
    config: ExtConfig | None  # None: stock
    kept: tuple[str, ...] = ()


class _Trial(NamedTuple):
    """What a trial has found on one rank."""

    seconds: float  # per step
    link_bytes_s: float | None
    nbytes: dict[str, int]  # of modules that may be kept whole, by name
    waits_s: dict[str, float]  # for them, in backwards


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
        self._link_bytes_s: float | None = None
        self._key = ""
        self._keepable: list[Keepable] = []  # of the last trial

    def run(self, progress: Callable[[Iterable[int]], Iterable[int]]) -> Tuned:
        """See :func:`tune`."""
        space = self._space()
        times_s = {0: self._measure(space[0])}
        profile = self._profile()
        known = self._leaders(lambda: profile.find() if profile is not None else None)
        if known is not None:
            logger.info("settings of an earlier run: %s", known)
            return known
        for _ in progress(range(1, self._tuner.max_trials)):
            following = self._leaders(lambda: self._next(space, times_s))
            if following is None:
                break
            times_s[following] = self._measure(space[following])
        best = space[min(times_s, key=lambda index: times_s[index])]
        found = self._against_stock(self._with_kept(best))
        if profile is not None:
            profile.store(found)
        return found

    # -- trials -----------------------------------------------------------------------------------------------------

    def _measure(self, setting: _Setting) -> float:
        """Seconds per step, of the slowest rank; what fails on one rank raises on all."""
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
            patience = Patience(min(_FAREWELL_S, self._config.timeout_s), self._config.stall_warning_s)
            report_error(error, dist.group.WORLD, patience)
            raise
        else:
            trials = self._everyones(mine)
        finally:
            if model is not None:
                restore(model)
            del model
            gc.collect()  # FSDP2's states refer to each other
        self._keepable = [
            Keepable(name, nbytes, max(each.waits_s[name] for each in trials)) for name, nbytes in mine.nbytes.items()
        ]
        self._link_bytes_s = self._link_bytes_s or mine.link_bytes_s
        slowest_s = max(each.seconds for each in trials)
        self._num_trials += 1
        if self._is_leader:
            logger.info("trial %d: %s: %.4g s per step", self._num_trials, _described(setting), slowest_s)
        return slowest_s

    def _time(self, model: nn.Module, setting: _Setting) -> _Trial:
        tuner = self._tuner
        keep(wrapped(model, setting.kept))
        extension = extend(model, setting.config) if setting.config is not None else None
        clock = StepClock(_device_of(model))
        for _ in range(tuner.dropped_steps):
            self._step(model)
        waited = dict(extension.backward_waits) if extension is not None else {}
        clock.restart()
        for _ in range(tuner.steps_per_trial):
            self._step(model)
            clock.tick()
        return self._look_at(statistics.median(clock.seconds()), model, extension, waited)

    def _look_at(self, seconds: float, model: nn.Module, extension: Any, waited: dict[str, float]) -> _Trial:
        """What the link carries, what the model is, and for which modules backwards have waited."""
        if extension is None:
            return _Trial(seconds, None, {}, {})
        if not self._key:
            self._key = self._key_of(model)
        nbytes, waits_s = {}, {}
        for name, module in checks.fsdp_modules(model):
            columns = compat.columns_of(module)
            if columns and not compat.keeps_parameters(module):
                nbytes[name] = sum((column.stop - column.start) * column.parameter.element_size() for column in columns)
                waits_s[name] = extension.backward_waits.get(name, 0.0) - waited.get(name, 0.0)
        return _Trial(seconds, extension.link_bytes_s, nbytes, waits_s)

    def _in_turns(self, first: _Setting, second: _Setting) -> tuple[float, float]:
        """Medians of both."""
        times_s: tuple[list[float], list[float]] = ([], [])
        for _ in range(_NUM_CHECKS):
            for setting, found in zip((first, second), times_s, strict=True):
                found.append(self._measure(setting))
        return statistics.median(times_s[0]), statistics.median(times_s[1])

    # -- decisions --------------------------------------------------------------------------------------------------

    def _space(self) -> list[_Setting]:
        """All that may be tried, the default first."""
        tuner, config = self._tuner, self._config
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

    def _next(self, space: Sequence[_Setting], times_s: dict[int, float]) -> int | None:
        """The most promising one that was not tried; None if none is worth a trial."""
        from ddp_hooks.tuning.surrogate import Observation, believe  # seconds

        untried = [index for index in range(len(space)) if index not in times_s]
        if not untried:
            return None
        positions = _positions(space)
        if len(times_s) < _FIXED_TRIALS:  # what is farthest from the first
            return max(untried, key=lambda index: math.dist(positions[index], positions[0]))
        observed = [Observation(index, 1 / seconds) for index, seconds in times_s.items()]
        belief = believe(positions, observed, self._tuner.xi, self._tuner.seed)
        promised = max(belief.gain[index] for index in untried)
        if len(times_s) >= _FEWEST_TRIALS and promised < self._tuner.min_gain:
            return None
        return max(untried, key=lambda index: belief.improvement[index])

    def _with_kept(self, best: _Setting) -> _Setting:
        """The same with modules kept whole, if that is faster."""
        if not self._tuner.keep_bytes:
            return best
        self._measure(best)
        kept = choose_kept(self._keepable, self._tuner.keep_bytes)  # of the same numbers on every rank
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
        """The first rank's decision, on all of them."""
        decided: Any = self._everyones(decide() if self._is_leader else None)[0]
        return cast("T", decided)

    def _everyones(self, item: T) -> list[T]:
        assert dist.group.WORLD is not None
        return gather_objects(item, dist.group.WORLD, "fsdp_ext.tune()", self._config)

    # -- what is remembered -----------------------------------------------------------------------------------------

    def _profile(self) -> Profile | None:
        if self._tuner.profile is None or not self._is_leader:
            return None
        return Profile(self._tuner.profile, self._key, self._link_bytes_s)

    def _key_of(self, model: nn.Module) -> str:
        shapes = sorted((name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters())
        meshes = sorted({tuple(p.device_mesh.shape) for p in model.parameters() if isinstance(p, DTensor)})
        # What is found goes by modules that share a group, which is for ``build`` to decide.
        groups = [
            (name, [column.stop for column in compat.columns_of(module) or ()])
            for name, module in checks.fsdp_modules(model)
        ]
        searched = replace(self._tuner, profile=None)
        device = _device_of(model).type
        ranks = (dist.get_world_size(), meshes)
        everything = (shapes, groups, ranks, device, torch.__version__, self._config, searched)
        return hashlib.sha256(repr(everything).encode()).hexdigest()[:24]


def _positions(space: Sequence[_Setting]) -> list[list[float]]:
    """In the unit cube: logarithms of sizes, depths and lanes, as far as they differ."""
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


def _device_of(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            return parameter.to_local().device
    return torch.device("cpu")
