"""Which hook would help on this model and this network, and by how much: measurements and simulations, put together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import LaneSettings, agree, broadcast_object
from ddp_hooks.planning import (
    Costs,
    Ddp,
    Dear,
    LinkFit,
    Network,
    Prediction,
    SparDL,
    StepProfile,
    Strategy,
    measure,
    measure_alone,
    predicted_start,
    profile_step,
    simulate,
    slowest_of,
)
from ddp_hooks.topk.rehearsal import compute_s
from ddp_hooks.tuning import BucketTuner

T = TypeVar("T")
Update: TypeAlias = Literal["sharded", "replicated"]
Progress = Callable[[Iterable[T]], Iterable[T]]

DENSITY = 0.01
_WORTH_WHILE = 1.03  # less is within what the simulator is wrong by
_WORTH_LOSING = 1.2  # what leaves something out has to be faster by this
_HIDDEN = 0.05  # part of a step
_NOISY = 0.3  # a network that fits worse says too little about which strategy is faster
_SMALL_BUCKET_MB = 5.0  # of DDP: beside its 25 MB, what costs nothing to try
_REHEARSED = 16  # workers whose selections are rehearsed, at most


@dataclass(frozen=True)
class Plan:
    """What steps would take.

    Args:
        profile: the step of one worker.
        network: between workers.
        costs: of a worker's processor.
        fit: how the network was measured; None: it was described.
        predictions: of all strategies, the present one first, then the simpler ones first.
        lines: what to write for each.
    """

    profile: StepProfile
    network: Network
    costs: Costs
    fit: LinkFit | None
    predictions: tuple[Prediction, ...]
    lines: tuple[str, ...]

    @property
    def present(self) -> Prediction:
        """Plain DDP."""
        return self.predictions[0]

    @property
    def recommended(self) -> Prediction:
        """The simplest one that is about as fast as the fastest exact one, or SparDL where it gains a lot more.

        DDP as it is where computing limits it, and where the measurement is too noisy to tell.
        """
        if self.doubt is not None or self._hides(self.present):
            return self.present
        exact = [each for each in self.predictions if not each.strategy.startswith("SparDL")]
        least_s = min(each.step_s for each in exact)
        best = next(each for each in exact if each.step_s < least_s * _WORTH_WHILE)
        fastest = min(self.predictions, key=lambda each: each.step_s)
        return fastest if fastest.step_s * _WORTH_LOSING < best.step_s else best

    @property
    def recommended_line(self) -> str:
        """What to write for it."""
        return self.lines[self.predictions.index(self.recommended)]

    @property
    def doubt(self) -> str | None:
        """Why the measurement is too noisy for a recommendation; None if it is not."""
        if self.fit is None or self.fit.error <= _NOISY:
            return None
        return (
            f"the measurement of the network is too noisy: it fits to {self.fit.error:.0%}, and a recommendation needs "
            f"{_NOISY:.0%}. Measure again while nothing else runs on these machines and links, or describe the network "
            f"(--workers and --rate)"
        )

    @property
    def limit(self) -> str:
        """What keeps the recommended strategy from being faster."""
        return self.limit_of(self.recommended)

    def _hides(self, prediction: Prediction) -> bool:
        """Whether communication takes next to nothing of the step."""
        return prediction.exposed_s - self.profile.optimizer_s <= _HIDDEN * prediction.step_s

    def limit_of(self, best: Prediction) -> str:
        """What keeps one of the strategies from being faster."""
        if self._hides(best):
            return "computing: communication is hidden behind it, or there is none"
        busy = best.sent_bytes * self.network.link.beta_s_per_byte / best.step_s
        if busy > 1 - 2 * _HIDDEN:
            return f"the link, which is busy for {busy:.0%} of a step"
        working_s = self.costs.byte_s * best.sent_bytes
        if best.strategy.startswith("SparDL"):
            working_s += self.costs.select_s_per_byte * self.profile.num_bytes
        return (
            f"dependencies, latency or the processor: computing takes {self.profile.compute_s / best.step_s:.0%} of a "
            f"step, the link is busy for {busy:.0%} of it, the processor with communication for at least "
            f"{working_s / best.step_s:.0%}"
        )

    def tuner(self, update: Update | None = None, **settings: Any) -> BucketTuner:
        """A tuner for ``DearConfig`` that begins with a fusion size whose steps are predicted to be fastest.

        Args:
            update: that of the configuration, sharded or replicated; None: that of the recommended strategy.
            settings: of :class:`~ddp_hooks.BucketTuner`, but for ``start_mb``.
        """
        if "start_mb" in settings:
            raise TypeError("tuner() finds start_mb itself; for one of your own write BucketTuner(start_mb=...)")
        low_mb, high_mb = (float(settings.get(name, getattr(BucketTuner, name))) for name in ("low_mb", "high_mb"))
        default = BucketTuner(**settings, start_mb=min(max(BucketTuner.start_mb, low_mb), high_mb))
        return predicted_start(default, self.profile, self.network, self.costs, Dear(update or self.recommended_update))

    @property
    def recommended_update(self) -> Update:
        """Of DeAR, if that is recommended; else sharded."""
        return "replicated" if self.recommended.strategy == Dear("replicated").name else "sharded"

    def save(self, path: str | Path) -> None:
        """Write everything but the spans as JSON."""
        predictions = [{k: v for k, v in asdict(each).items() if k != "spans"} for each in self.predictions]
        data: dict[str, Any] = {
            "profile": self.profile.to_json(),
            "network": asdict(self.network),
            "costs": asdict(self.costs),
            "fit": None if self.fit is None else asdict(self.fit),
            "predictions": [each | {"line": line} for each, line in zip(predictions, self.lines, strict=True)],
            "recommended": self.recommended.strategy,
            "recommended_line": self.recommended_line,
            "doubt": self.doubt,
            "limit": self.limit,
        }
        Path(path).write_text(json.dumps(data, indent=1))

    def draw(self, path: str | Path) -> None:
        """Draw the last simulated step of every strategy; needs matplotlib."""
        from ddp_hooks.planning.timeline import draw

        draw(self._timelines(), Path(path))

    def write_trace(self, path: str | Path) -> None:
        """Write the last simulated step of every strategy for Perfetto (https://ui.perfetto.dev)."""
        from ddp_hooks.planning.timeline import write_trace

        write_trace(self._timelines(), Path(path))

    def _timelines(self) -> list[Any]:
        from ddp_hooks.planning.timeline import Timeline

        return [
            Timeline(f"{each.strategy}: {each.step_s * 1e3:.0f} ms (simulated)", each.step_ends_s[-2:], each.spans)
            for each in self.predictions
        ]


def strategies(bucket_mb: float = 25.0, node_size: int = 1) -> tuple[Strategy, ...]:
    """What a plan compares; plain DDP first, with this bucket size. SparDL is simulated on one level only."""
    small = () if bucket_mb == _SMALL_BUCKET_MB else (Ddp(_SMALL_BUCKET_MB),)
    exact: tuple[Strategy, ...] = (Ddp(bucket_mb), *small, Dear(), Dear("replicated"))
    return (*exact, SparDL(DENSITY)) if node_size == 1 else exact


def predict(
    profile: StepProfile,
    network: Network,
    costs: Costs,
    fit: LinkFit | None = None,
    compared: Sequence[Strategy] | None = None,
) -> Plan:
    """Simulate strategies on a network; nothing runs.

    Args:
        profile: the step of one worker.
        network: between workers.
        costs: of a worker's processor.
        fit: how the network was measured, if it was.
        compared: the present strategy first, then the simpler ones first; None: :func:`strategies`.
    """
    chosen = tuple(compared or strategies(node_size=network.node_size))
    predictions = tuple(simulate(strategy, profile, network, costs) for strategy in chosen)
    return Plan(profile, network, costs, fit, predictions, tuple(strategy.line for strategy in chosen))


def plan(
    model: nn.Module,
    step: Callable[[], object],
    network: Network | None = None,
    steps: int = 3,
    progress: Progress[Any] = iter,
) -> Plan:
    """Predict a training step with plain DDP, DeAR and SparDL; collective where there are several ranks.

    Model and optimizers end as they began; see :func:`~ddp_hooks.planning.profile_step`.

    Args:
        model: what is trained, in DistributedDataParallel or not.
        step: does one whole step: forward, backward, ``optimizer.step()``.
        network: to predict for; None: that between the ranks of the model's process group, which is measured.
        steps: that are timed.
        progress: wraps what takes long, as ``tqdm`` does.

    Raises:
        ValueError: ``step`` does not train the model, or there is no network to measure; with several ranks, on all of
            them, also if it fails on one.
    """
    group = _group_of(model)
    _require_network(network, group)
    profile, failure = None, None
    try:
        profile = profile_step(model, step, steps, progress=progress)
    except Exception as error:
        if group is None:
            raise
        failure = error
    if group is not None:
        problem = None if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            agree({}, problem, group, "the profile", LaneSettings())
        except ValueError as error:
            raise error from failure
    assert profile is not None
    return plan_profiled(profile, model, network, progress)


def plan_profiled(
    profile: StepProfile, model: nn.Module, network: Network | None = None, progress: Progress[Any] = iter
) -> Plan:
    """The same from a profile; collective where there are several ranks."""
    group, device = _group_of(model), next(model.parameters()).device
    _require_network(network, group)
    bucket_mb = model.bucket_bytes_cap / (1 << 20) if isinstance(model, DistributedDataParallel) else 25.0
    if group is not None:
        profile = slowest_of(profile, group)
    if network is not None:
        network = replace(network, native=device.type == "cuda")
        select_s = partial(compute_s, density=DENSITY, workers=min(network.workers, _REHEARSED))
        costs = [measure_alone(device, select_s)]
        if group is not None:
            costs = broadcast_object(costs, group, "plan()", LaneSettings())
        return predict(profile, network, costs[0], None, strategies(bucket_mb, network.node_size))
    assert group is not None
    workers = dist.get_world_size(group)
    select_s = partial(compute_s, density=DENSITY, workers=min(workers, _REHEARSED))
    found = measure(group, device, select_s, progress)
    measured = found.fit.network(workers, native=device.type == "cuda")
    return predict(profile, measured, found.costs, found.fit, strategies(bucket_mb))


def _group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Where the model's ranks meet; None if there is only this one."""
    group = model.process_group if isinstance(model, DistributedDataParallel) else None
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return group if group is not None and dist.get_world_size(group) > 1 else None


def _require_network(network: Network | None, group: dist.ProcessGroup | None) -> None:
    if network is None and group is None:
        raise ValueError(
            "there is one process, and so no network to measure: start several (torchrun), or describe the network, "
            "as network=Network(workers=8, link=link_of(gbit_s=10, latency_s=50e-6)) (--workers 8 --rate 10gbit "
            "--latency 50us on the command line)"
        )
