"""Plans: predictions for all strategies from measurements of model and network, and a recommendation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import LaneSettings, agree, broadcast_object
from ddp_hooks.planning import timeline
from ddp_hooks.planning.measurement.measure import LinkFit, measure, measure_alone
from ddp_hooks.planning.measurement.processor import Progress
from ddp_hooks.planning.measurement.profiling import profile_step, slowest_of
from ddp_hooks.planning.network import Costs, Network
from ddp_hooks.planning.simulation import Prediction, Strategy, simulate
from ddp_hooks.planning.step import StepProfile
from ddp_hooks.planning.strategies.dear import Dear, Update, predicted_start
from ddp_hooks.planning.strategies.in_backward import Ddp, Quantized, SparDL
from ddp_hooks.tuning import BucketTuner

_MIN_SPEEDUP = 1.03  # less is within the error of the simulator
_MIN_LOSSY_SPEEDUP = 1.2  # of a strategy that rounds gradients or leaves some out
_HIDDEN = 0.05  # part of a step; less communication counts as hidden
_MAX_FIT_ERROR = 0.3  # a worse fit says too little about which strategy is faster
_SMALL_BUCKET_MB = 5.0  # of DDP; costs nothing to try beside 25 MB
_DEAR = (Dear(), Dear(gather_dtype=torch.bfloat16), Dear("replicated"))
_LOSSY_DEAR = Dear(wire="int8")


@dataclass(frozen=True)
class Plan:
    """Predicted steps of several strategies."""

    profile: StepProfile  #: step of one worker
    network: Network
    costs: Costs
    fit: LinkFit | None  #: measurement of the network, None if it was described
    #: First the present strategy, then simple ones before others, then lossy ones, accurate ones before others.
    predictions: tuple[Prediction, ...]

    @property
    def present(self) -> Prediction:
        """Prediction for plain DDP."""
        return self.predictions[0]

    @property
    def recommended(self) -> Prediction:
        """The simplest exact strategy about as fast as the fastest exact one, or a lossy one that gains a lot more.

        Every lossy one has to gain as much over a more accurate one. Plain DDP where computing limits it, and where the
        measurement is too noisy to tell.
        """
        if self.doubt is not None or self._hides(self.present):
            return self.present
        exact = [each for each in self.predictions if each.is_exact]
        least_s = min(each.step_s for each in exact)
        best = next(each for each in exact if each.step_s < least_s * _MIN_SPEEDUP)
        for each in self.predictions:
            if not each.is_exact and each.step_s * _MIN_LOSSY_SPEEDUP < best.step_s:
                best = each
        return best

    @property
    def recommended_line(self) -> str:
        """Lines that a user writes for the recommended strategy."""
        return self.recommended.line

    @property
    def recommended_dear(self) -> Dear:
        """DeAR as it is recommended; with its defaults if something else is."""
        return next((each for each in (*_DEAR, _LOSSY_DEAR) if each.name == self.recommended.strategy), Dear())

    @property
    def recommended_update(self) -> Update:
        """DeAR's update if DeAR is recommended; else sharded."""
        return self.recommended_dear.update

    @property
    def doubt(self) -> str | None:
        """Reason why the measurement is too noisy for a recommendation; None if it is not."""
        if self.fit is None or self.fit.error <= _MAX_FIT_ERROR:
            return None
        return (
            f"the measurement of the network is too noisy: it is off by {self.fit.error:.0%}, more than the "
            f"{_MAX_FIT_ERROR:.0%} of a recommendation. Measure again while nothing else runs on these machines and "
            f"links, or describe the network (--workers and --rate)"
        )

    @property
    def limit(self) -> str:
        """Limit of the recommended strategy's speed."""
        return self.limit_of(self.recommended)

    def limit_of(self, prediction: Prediction) -> str:
        """Limit of a strategy's speed."""
        if self._hides(prediction):
            return "computing: communication is hidden behind it, or there is none"
        busy = prediction.sent_bytes * self.network.link.beta_s_per_byte / prediction.step_s
        if busy > 1 - 2 * _HIDDEN:
            return f"the link, which is busy for {busy:.0%} of a step"
        return (
            f"dependencies, latency or the processor: computing takes {self.profile.compute_s / prediction.step_s:.0%} "
            f"of a step, the link is busy for {busy:.0%} of it, the processor with communication for "
            f"{prediction.processor_s / prediction.step_s:.0%}"
        )

    def _hides(self, prediction: Prediction) -> bool:
        return prediction.exposed_s - self.profile.optimizer_s <= _HIDDEN * prediction.step_s

    def tuner(self, update: Update | None = None, **settings: Any) -> BucketTuner:
        """Return a tuner for ``DearConfig`` that begins with a fusion size of the fastest predicted step.

        Args:
            update: of the configuration, else with its defaults; None: the recommended configuration.
            settings: of :class:`~ddp_hooks.BucketTuner`, without ``start_mb``.

        Raises:
            TypeError: ``start_mb`` is among the settings.
        """
        if "start_mb" in settings:
            raise TypeError("tuner() finds start_mb itself; for one of your own write BucketTuner(start_mb=...)")
        lowest = BucketTuner(**settings, start_mb=settings.get("low_mb", BucketTuner.low_mb))
        dear = self.recommended_dear if update is None else Dear(update)
        return predicted_start(lowest, self.profile, self.network, self.costs, dear)

    def save(self, path: str | Path) -> None:
        """Write everything but the spans as JSON."""
        data = asdict(self) | {
            "recommended": self.recommended.strategy,
            "recommended_line": self.recommended_line,
            "doubt": self.doubt,
            "limit": self.limit,
        }
        for prediction in data["predictions"]:
            del prediction["spans"]
        Path(path).write_text(json.dumps(data, indent=1))

    def draw(self, path: str | Path) -> None:
        """Draw the last simulated step of every strategy; needs matplotlib."""
        timeline.draw(self._timelines(), Path(path))

    def write_trace(self, path: str | Path) -> None:
        """Write the last simulated step of every strategy for Perfetto (https://ui.perfetto.dev)."""
        timeline.write_trace(self._timelines(), Path(path))

    def _timelines(self) -> list[timeline.Timeline]:
        titles = [f"{each.strategy}: {each.step_s * 1e3:.0f} ms (simulated)" for each in self.predictions]
        last = zip(titles, self.predictions, strict=True)
        return [timeline.Timeline(title, each.step_ends_s[-2:], each.spans) for title, each in last]


def strategies(
    bucket_mb: float = 25.0, node_size: int = 1, profile: StepProfile | None = None
) -> tuple[Strategy, ...]:
    """Return the strategies of a plan, plain DDP with this bucket size first; SparDL only on one level.

    Gathers in 16 bits are among them if autocast reads some of the ``profile`` in 16 bits.
    """
    small = () if bucket_mb == _SMALL_BUCKET_MB else (Ddp(_SMALL_BUCKET_MB),)
    casts = profile is not None and any(tensor.is_cast for tensor in profile.tensors)
    dear = [each for each in _DEAR if casts or each.gather_dtype is None]
    sparse = (SparDL(),) if node_size == 1 else ()
    return (Ddp(bucket_mb), *small, *dear, _LOSSY_DEAR, Quantized(), *sparse)


def predict(
    profile: StepProfile,
    network: Network,
    costs: Costs,
    fit: LinkFit | None = None,
    compared: Sequence[Strategy] | None = None,
) -> Plan:
    """Simulate strategies on a network; nothing runs.

    ``compared`` has the present strategy first, then simple ones before others, then lossy ones, accurate ones before
    others; None: :func:`strategies`.
    """
    chosen = tuple(compared or strategies(node_size=network.node_size, profile=profile))
    return Plan(profile, network, costs, fit, tuple(simulate(each, profile, network, costs) for each in chosen))


def plan(
    model: nn.Module,
    step: Callable[[], object],
    network: Network | None = None,
    steps: int = 3,
    progress: Progress = iter,
) -> Plan:
    """Predict a training step with plain DDP and with our hooks; collective where there are several ranks.

    Args:
        model, step, steps: see :func:`~ddp_hooks.planning.profile_step`, which restores model and optimizers.
        network: to predict for; None: the network between the ranks of the model's process group is measured.
        progress: wraps long loops, as ``tqdm`` does.

    Raises:
        ValueError: ``step`` does not train the model, or there is no network to measure; with several ranks, on all of
            them, also if it fails on one.
    """
    group = _group_of(model)
    _require_network(network, group)
    try:
        profile = profile_step(model, step, steps, progress=progress)
    except Exception as error:
        if group is not None:
            agree({}, f"{type(error).__name__}: {error}", group, "the profile", LaneSettings())  # raises on all ranks
        raise
    if group is not None:
        agree({}, None, group, "the profile", LaneSettings())
    return plan_profiled(profile, model, network, progress)


def plan_profiled(
    profile: StepProfile, model: nn.Module, network: Network | None = None, progress: Progress = iter
) -> Plan:
    """Predict the step of a profile; collective, and raises ValueError, as :func:`plan` does."""
    group, device = _group_of(model), next(model.parameters()).device
    _require_network(network, group)
    bucket_mb = model.bucket_bytes_cap / (1 << 20) if isinstance(model, DistributedDataParallel) else 25.0
    native = device.type == "cuda"
    if group is not None:
        profile = slowest_of(profile, group)
    if network is not None:
        costs = measure_alone(device, network.workers)
        if group is not None:
            costs = broadcast_object(costs, group, "plan()", LaneSettings())
        compared = strategies(bucket_mb, network.node_size, profile)
        return predict(profile, replace(network, native=native), costs, None, compared)
    assert group is not None
    found = measure(group, device, progress)
    described = found.fit.network(dist.get_world_size(group), native)
    return predict(profile, described, found.costs, found.fit, strategies(bucket_mb, profile=profile))


def _group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the process group of the model's ranks; None if there is only this rank."""
    group = model.process_group if isinstance(model, DistributedDataParallel) else dist.group.WORLD
    return group if group is not None and dist.get_world_size(group) > 1 else None


def _require_network(network: Network | None, group: dist.ProcessGroup | None) -> None:
    if network is None and group is None:
        raise ValueError(
            "there is one process, and so no network to measure: start several (torchrun), or describe the network, "
            "as network=Network(workers=8, link=link_of(gbit_s=10, latency_s=50e-6)) (--workers 8 --rate 10gbit "
            "--latency 50us on the command line)"
        )
