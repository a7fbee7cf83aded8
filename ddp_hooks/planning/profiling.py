"""What a step computes, and when, from a few real ones: a forward that reads, a backward that makes gradients."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ddp_hooks.planning.step import StepProfile, TensorUse


def profile_step(
    model: nn.Module,
    step: Callable[[], object],
    steps: int = 3,
    warmup: int = 2,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> StepProfile:
    """Time the layers of real training steps without communication; the model and its optimizers end as they began.

    Args:
        model: what is trained; of :class:`~torch.nn.parallel.DistributedDataParallel` its communication is left out.
        step: does one whole step: forward, backward, and ``optimizer.step()``.
        steps: timed, after ``warmup`` that are not.
        progress: wraps the numbers of the steps, as ``tqdm`` does.

    Raises:
        ValueError: ``step`` trains nothing of the model, or nothing twice in the same way.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    silent = model.no_sync if isinstance(model, DistributedDataParallel) else contextlib.nullcontext
    stopwatch = _Stopwatch(next(inner.parameters()).device)
    seen: list[_Seen] = []
    with _restored(inner), _watched(model, inner, stopwatch) as watch:
        for number in progress(range(warmup + steps)):
            watch.begin()
            with silent():
                step()
            found = watch.end()
            if number >= warmup:
                seen.append(found)
    return _summary(inner, seen)


class _Stopwatch:
    """Moments of the device: of its own clock on CUDA, where the host runs ahead."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        """A moment; :meth:`seconds` makes numbers of it."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """From one moment to another."""
        if not self._cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


@dataclass
class _Seen:
    """Moments of one step."""

    start: Any
    forward: Any = None  # begins
    backward: Any = None  # begins
    optimizer: Any = None  # begins, the first of several
    optimized: Any = None
    end: Any = None
    read: dict[str, Any] = field(default_factory=dict)  # for the first time
    ready: dict[str, Any] = field(default_factory=dict)  # for the last time
    seconds: Callable[[Any, Any], float] = lambda start, end: 0.0


class _Watch:
    def __init__(self, stopwatch: _Stopwatch) -> None:
        self.stopwatch = stopwatch
        self.seen = _Seen(None)

    def begin(self) -> None:
        self.seen = _Seen(self.stopwatch.now(), seconds=self.stopwatch.seconds)

    def end(self) -> _Seen:
        self.seen.end = self.stopwatch.now()
        return self.seen

    def forward_begins(self, *_: Any) -> None:
        self.seen.forward = self.seen.forward or self.stopwatch.now()

    def backward_begins(self) -> None:
        self.seen.backward = self.seen.backward or self.stopwatch.now()

    def reads(self, names: list[str]) -> None:
        moment = self.stopwatch.now()
        for name in names:
            self.seen.read.setdefault(name, moment)

    def completes(self, name: str) -> None:
        self.seen.ready[name] = self.stopwatch.now()


@contextlib.contextmanager
def _watched(model: nn.Module, inner: nn.Module, stopwatch: _Stopwatch) -> Iterator[_Watch]:
    """Note when parameters are read, and when their gradients are there."""
    watch = _Watch(stopwatch)
    name_of = {parameter: name for name, parameter in inner.named_parameters() if parameter.requires_grad}
    handles: list[Any] = [model.register_forward_pre_hook(lambda *_: watch.forward_begins())]
    for module in inner.modules():
        names = [name_of[p] for p in module.parameters(recurse=False) if p in name_of]
        if names:
            handles.append(module.register_forward_pre_hook(lambda *_, names=names: watch.reads(names)))
    for parameter, name in name_of.items():
        handles.append(parameter.register_post_accumulate_grad_hook(lambda _, name=name: watch.completes(name)))
    handles.append(model.register_forward_hook(lambda module, args, output: _watch_outputs(output, watch)))

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watch.seen.optimizer = watch.seen.optimizer or stopwatch.now()

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        watch.seen.optimized = stopwatch.now()

    handles += [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()


def _watch_outputs(output: Any, watch: _Watch) -> None:
    """The backward begins when the first gradient of an output is there."""
    for tensor in _tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(lambda _: watch.backward_begins())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Give model and optimizers back what they have now; without communication ranks would part."""
    saved = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    optimizers: dict[Optimizer, Any] = {}

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in optimizers:
            optimizers[optimizer] = copy.deepcopy(optimizer.state_dict())

    handle = register_optimizer_step_pre_hook(note)
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        handle.remove()
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for optimizer, state in optimizers.items():
            optimizer.load_state_dict(state)


def _summary(model: nn.Module, seen: list[_Seen]) -> StepProfile:
    names = [name for name in seen[0].ready if all(name in each.ready for each in seen)]
    if not names or any(each.backward is None or each.forward is None for each in seen):
        raise ValueError(
            "step() trains nothing of this model: it must call the model that was given, backward() of what it "
            "returns, and optimizer.step()"
        )

    def median(moments: Callable[[_Seen], tuple[Any, Any]]) -> float:
        return statistics.median(max(0.0, each.seconds(*moments(each))) for each in seen)

    def last_ready(each: _Seen) -> Any:
        return max(each.ready.values(), key=lambda moment: each.seconds(each.backward, moment))

    forward_s = median(lambda each: (each.forward, each.backward))
    backward_s = median(lambda each: (each.backward, last_ready(each)))
    optimizer_s = 0.0
    if all(each.optimizer is not None for each in seen):
        optimizer_s = median(lambda each: (each.optimizer, each.optimized))
    whole_s = median(lambda each: (each.start, each.end))
    size_of = {name: parameter.numel() * parameter.element_size() for name, parameter in model.named_parameters()}
    tensors = []
    for name in names:
        needed_s = median(lambda each: (each.forward, each.read.get(name, each.forward)))  # noqa: B023
        ready_s = median(lambda each: (each.backward, each.ready[name]))  # noqa: B023
        tensors.append(TensorUse(name, size_of[name], min(forward_s, needed_s), min(backward_s, ready_s)))
    element_bytes = next(parameter.element_size() for parameter in model.parameters() if parameter.requires_grad)
    other_s = max(0.0, whole_s - forward_s - backward_s - optimizer_s)
    return StepProfile(tuple(tensors), forward_s, backward_s, optimizer_s, other_s, element_bytes)


def slowest_of(profile: StepProfile, group: dist.ProcessGroup | None) -> StepProfile:
    """The profile of the rank that computes longest, on all of them; collective."""
    gathered: list[dict[str, Any]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(gathered, profile.to_json(), group=group)
    return max(map(StepProfile.from_json, gathered), key=lambda each: each.compute_s + each.optimizer_s)
