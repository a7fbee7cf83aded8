"""Settings of FSDP2 and its extension, found by short trials before training.

Each trial builds the model, runs a few of the user's own steps, and drops it.

1. Measure the default, and the link with it. The result of an earlier run for the same job ends the search.
2. A Gaussian process proposes the next settings, as in :mod:`ddp_hooks.tuning`, until nothing promises more.
3. Measure the best in turns with stock FSDP2; it stays only if it is faster.

The first rank decides, and all ranks hear its decisions, so they never part.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import logging
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_hooks.comm import (
    Patience,
    at_least,
    broadcast_object,
    check_whole,
    gather_objects,
    positive,
    report_error,
    whole,
)
from ddp_hooks.tuning.profile import Entry, Job, Profile
from ddp_hooks.tuning.tuning import StepClock
from fsdp_ext import checks, compat
from fsdp_ext.config import ExtConfig
from fsdp_ext.extension import Extension, extend, extension_of, restore

logger = logging.getLogger("fsdp_ext")

_FIXED_TRIALS = 2  # before a process knows anything
_FEWEST_TRIALS = 8  # before its expectations of two or three dimensions are reason enough to end
_REPORT_S = 10.0  # how long a rank that failed waits for others to hear of it
_NUM_CHECKS = 2  # of each of two settings that are compared in turns
_CALL = "fsdp_ext.tune()"


@dataclass(frozen=True)
class TuneConfig:
    """Range and length of the search of :func:`~fsdp_ext.tune`.

    Args:
        block_mb: granularities of wrapping, in MiB, for ``build``.
        default_block_mb: granularity without a search; stock FSDP2 is measured with it.
        prefetch: numbers of modules to gather ahead (``ExtConfig.prefetch``), on CPUs; None: the extension's default.
        max_trials: most trials of the search, the default included.
        dropped_steps: first steps of each trial, which are not measured: in them the order of modules is learned.
        steps_per_trial: measured steps; the median of the slowest rank counts.
        xi: improvement over the best that a trial should promise, in standard deviations of the measurements.
        min_gain: the search ends when every trial promises an improvement by less than this share.
        profile: a JSON file of results, per model, number of ranks, link and settings, so that the next run needs a
            single trial. None: no file.
        seed: of the search.
    """

    block_mb: tuple[float, ...] = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
    default_block_mb: float = 25.0
    prefetch: tuple[int | None, ...] = (None, 1, 4, 8)
    max_trials: int = 10
    dropped_steps: int = 3
    steps_per_trial: int = 3
    xi: float = 0.1
    min_gain: float = 0.005
    profile: str | os.PathLike[str] | None = "~/.cache/ddp_hooks/fsdp.json"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("block_mb", "prefetch"):
            if not isinstance(getattr(self, name), tuple) or not getattr(self, name):
                raise ValueError(f"{name} must be a tuple of at least one value, got {getattr(self, name)!r}")
        if not all(positive(size) for size in (*self.block_mb, self.default_block_mb)):
            sizes = f"{self.block_mb!r}, {self.default_block_mb!r}"
            raise ValueError(f"block_mb and default_block_mb must be > 0 and finite, got {sizes}")
        if not all(depth is None or whole(depth, 0) for depth in self.prefetch):
            raise ValueError(f"prefetch must have whole numbers >= 0, or None, got {self.prefetch}")
        # The first forward learns the order of modules, and lists of what to prefetch are set in the second.
        check_whole(self, max_trials=1, dropped_steps=2, steps_per_trial=1, seed=0)
        for name in ("xi", "min_gain"):
            if not at_least(getattr(self, name), 0):
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)!r}")
        if self.profile is not None and not isinstance(self.profile, str | os.PathLike):
            raise TypeError(f"profile must be None or a path, got {self.profile!r}")


@dataclass(frozen=True)
class Tuned:
    """Settings that a search has found.

    Args:
        block_mb: granularity of wrapping, in MiB, for ``build``.
        config: of the extension; None: stock FSDP2 was faster than anything.
        step_s: seconds per step with these settings.
        stock_s: seconds per step of stock FSDP2, measured in turns with them.
        num_trials: trials that were measured; 0: the result of an earlier run.
    """

    block_mb: float
    config: ExtConfig | None
    step_s: float
    stock_s: float
    num_trials: int

    def apply(self, model: nn.Module) -> Extension | None:
        """Extend, in place, a model that was built with :attr:`block_mb`, unless stock FSDP2 was faster. Collective.

        Raises:
            ValueError: the model cannot be extended.
        """
        return extend(model, self.config) if self.config is not None else None


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
    group = dist.group.WORLD
    assert group is not None
    return _Search(build, step, config or ExtConfig(), tuner or TuneConfig(), group).run()


class _Setting(NamedTuple):
    block_mb: float
    config: ExtConfig | None  # None: stock

    def __str__(self) -> str:
        extended = "stock FSDP2" if self.config is None else f"prefetch={self.config.prefetch}"
        return f"blocks of {self.block_mb:g} MB, {extended}"


@dataclass
class _Search:
    build: Callable[[float], nn.Module]
    step: Callable[[nn.Module], object]
    config: ExtConfig
    tuner: TuneConfig
    group: dist.ProcessGroup
    num_trials: int = 0
    job: Job | None = None  # from the first trial on

    def run(self) -> Tuned:
        space = _space_of(self.tuner, self.config)
        times_s = {0: self.measure(space[0])}  # (1)
        profile = Profile(self.tuner.profile, _TunedEntry) if self.tuner.profile is not None else None
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
        tuned = self._against_stock(space[min(times_s, key=lambda index: times_s[index])])  # (3)
        if profile is not None and self.is_leader:
            profile.store(_TunedEntry(job, (), None, tuned))
        return tuned

    @property
    def is_leader(self) -> bool:
        return dist.get_rank() == 0

    def measure(self, setting: _Setting) -> float:
        """Return the seconds per step of the slowest rank; an error on one rank raises on all."""
        model = None
        try:
            model = self.build(setting.block_mb)
            seconds = self._time(model, setting)
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
            slowest_s: float = max(gather_objects(seconds, self.group, _CALL, self.config))
        finally:
            if model is not None:
                restore(model)
            del model
            gc.collect()  # FSDP2's states refer to each other
        self.num_trials += 1
        if self.is_leader:
            logger.info("trial %d: %s: %.4g s per step", self.num_trials, setting, slowest_s)
        return slowest_s

    def _time(self, model: nn.Module, setting: _Setting) -> float:
        extension = extend(model, setting.config) if setting.config is not None else None
        clock = StepClock(_device_of(model))
        for _ in range(self.tuner.dropped_steps):
            self.step(model)
        clock.restart()
        for _ in range(self.tuner.steps_per_trial):
            self.step(model)
            clock.tick()
        if extension is not None:
            self.job = self.job or self._job_of(model, extension)
        return statistics.median(clock.seconds())

    def _against_stock(self, best: _Setting) -> Tuned:
        stock = _Setting(self.tuner.default_block_mb, None)
        pairs = [(self.measure(best), self.measure(stock)) for _ in range(_NUM_CHECKS)]
        best_s, stock_s = (statistics.median(times_s) for times_s in zip(*pairs, strict=True))
        if best_s < stock_s:
            return Tuned(*best, best_s, stock_s, self.num_trials)
        if self.is_leader:
            logger.info("stock FSDP2 is as fast, so nothing is extended")
        return Tuned(*stock, stock_s, stock_s, self.num_trials)

    def _leaders(self, decide: Callable[[], Any]) -> Any:
        """Return the first rank's decision, on all ranks."""
        return broadcast_object(decide() if self.is_leader else None, self.group, _CALL, self.config)

    def _job_of(self, model: nn.Module, extension: Extension) -> Job:
        shapes = sorted((name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters())
        meshes = sorted({tuple(p.device_mesh.shape) for p in model.parameters() if isinstance(p, DTensor)})
        # ``build`` decides which modules share a group.
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


@dataclass(frozen=True)
class _TunedEntry(Entry):
    tuned: Tuned

    def packed(self) -> dict[str, Any]:
        return super().packed() | {"tuned": asdict(self.tuned)}

    @staticmethod
    def unpacked(packed: dict[str, Any]) -> _TunedEntry:
        entry, tuned = Entry.unpacked(packed), packed["tuned"]
        config = None if tuned["config"] is None else ExtConfig(**tuned["config"])
        return _TunedEntry(entry.job, entry.trials, entry.chosen, Tuned(**{**tuned, "config": config, "num_trials": 0}))


# -- the space of settings --------------------------------------------------------------------------------------------


def _space_of(tuner: TuneConfig, config: ExtConfig) -> list[_Setting]:
    """Return all settings that may be tried, the default first."""
    default = _Setting(tuner.default_block_mb, config)
    settings = [default]
    for block_mb, prefetch in itertools.product(tuner.block_mb, tuner.prefetch):
        setting = _Setting(block_mb, config if prefetch is None else replace(config, prefetch=prefetch))
        if _coordinates(setting) != _coordinates(default):
            settings.append(setting)
    return settings


def _propose(space: Sequence[_Setting], times_s: dict[int, float], tuner: TuneConfig) -> int | None:
    """Return the most promising untried setting; None if none is worth a trial."""
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
    """Return positions in the unit cube: coordinates as far as they differ."""
    axes = list(zip(*map(_coordinates, space), strict=True))
    varying = [(axis, min(axis), max(axis)) for axis in axes if max(axis) > min(axis)]
    return [[(axis[index] - low) / (high - low) for axis, low, high in varying] or [0.0] for index in range(len(space))]


def _coordinates(setting: _Setting) -> tuple[float, float, float]:
    """Return logarithms of the size and the depth, and 1 if the depth is given."""
    assert setting.config is not None
    prefetch = setting.config.prefetch
    is_given, depth = (0.0, 2) if prefetch is None else (1.0, prefetch)
    return math.log(setting.block_mb), is_given, math.log1p(depth)
