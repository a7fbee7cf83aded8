"""What a step computes, and when, from a few real ones: a forward that reads, a backward that makes gradients."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from ddp_hooks.comm import compat
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
        ValueError: ``step`` trains nothing of the model, or the model has a communication hook.
    """
    refuse_hooks(model)
    silent = model.no_sync if isinstance(model, DistributedDataParallel) else contextlib.nullcontext
    with _restored(unwrapped(model)), StepWatch(model) as watch:
        for number in progress(range(warmup + steps)):
            watch.begin()
            with silent():
                step()
            watch.end(counts=number >= warmup)
        return watch.profile()


def refuse_hooks(model: nn.Module) -> None:
    """Raise ValueError if DDP has a communication hook: its communication cannot be left out."""
    if isinstance(model, DistributedDataParallel) and compat.comm_hook_registered(model):
        raise ValueError(
            "this model has a communication hook, and steps are profiled without communication: plan with plain "
            "DistributedDataParallel, before register_comm_hook()"
        )


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
    """Moments of one step; of several forwards and backwards, those of the last."""

    start: Any
    forward: Any = None  # begins
    backward: Any = None  # begins
    optimizer: Any = None  # begins
    optimized: Any = None
    end: Any = None
    cpu_s: float = 0.0
    read: dict[str, Any] = field(default_factory=dict)  # for the first time
    ready: dict[str, Any] = field(default_factory=dict)


class StepWatch:
    """Notes when steps of a model read its parameters, and when they have their gradients.

    Args:
        model: what is trained, wrapped or not.

    Use it as a context around steps, each between :meth:`begin` and :meth:`end`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inner = unwrapped(model)
        self._stopwatch = _Stopwatch(next(self._inner.parameters()).device)
        self._seen = _Seen(None)
        self._steps: list[_Seen] = []
        self._handles: list[Any] = []

    def begin(self) -> None:
        """A step begins."""
        self._seen = _Seen(self._stopwatch.now(), cpu_s=-time.thread_time())

    def end(self, counts: bool = True) -> None:
        """It has ended, and counts or does not."""
        self._seen.end = self._stopwatch.now()
        self._seen.cpu_s += time.thread_time()
        if counts:
            self._steps.append(self._seen)

    def __len__(self) -> int:
        """Steps that count."""
        return len(self._steps)

    def __enter__(self) -> StepWatch:
        name_of = {parameter: name for name, parameter in self._inner.named_parameters() if parameter.requires_grad}
        keep = self._handles.append
        keep(self._model.register_forward_pre_hook(lambda *_: self._forward_begins()))
        for module in self._inner.modules():
            names = [name_of[p] for p in module.parameters(recurse=False) if p in name_of]
            if names:
                keep(module.register_forward_pre_hook(lambda *_, names=names: self._reads(names)))
        for parameter, name in name_of.items():
            keep(parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._completes(name)))
        keep(self._model.register_forward_hook(lambda module, args, output: self._watch_outputs(output)))
        keep(register_optimizer_step_pre_hook(lambda *_: self._optimizer_begins()))
        keep(register_optimizer_step_post_hook(lambda *_: self._optimizer_ends()))
        return self

    def __exit__(self, *exception: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _forward_begins(self) -> None:
        if torch.is_grad_enabled() and (self._seen.forward is None or self._seen.backward is not None):
            self._seen.forward, self._seen.backward = self._stopwatch.now(), None
            self._seen.read.clear()
            self._seen.ready.clear()

    def _watch_outputs(self, output: Any) -> None:
        """The backward begins when the first gradient of an output is there."""
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._backward_begins())

    def _backward_begins(self) -> None:
        self._seen.backward = self._seen.backward or self._stopwatch.now()

    def _reads(self, names: Sequence[str]) -> None:
        moment = self._stopwatch.now()
        for name in names:
            self._seen.read.setdefault(name, moment)

    def _completes(self, name: str) -> None:
        self._seen.ready[name] = self._stopwatch.now()

    def _optimizer_begins(self) -> None:
        self._seen.optimizer = self._seen.optimizer or self._stopwatch.now()

    def _optimizer_ends(self) -> None:
        self._seen.optimized = self._stopwatch.now()

    def profile(self) -> StepProfile:
        """What the steps had in common, medians.

        Raises:
            ValueError: they have not trained this model.
        """
        seen, seconds = self._steps, self._stopwatch.seconds
        names = [name for name in seen[0].ready if all(name in each.ready for each in seen)] if seen else []
        if not names or any(each.backward is None or each.forward is None for each in seen):
            raise ValueError(
                "the steps train nothing of this model: they must call the model that was given, backward() of what "
                "it returns, and optimizer.step()"
            )

        def median(moments: Callable[[_Seen], tuple[Any, Any]]) -> float:
            return statistics.median(max(0.0, seconds(*moments(each))) for each in seen)

        def last_ready(each: _Seen) -> Any:
            return max(each.ready.values(), key=lambda moment: seconds(each.backward, moment))

        forward_s = median(lambda each: (each.forward, each.backward))
        backward_s = median(lambda each: (each.backward, last_ready(each)))
        optimizer_s = 0.0
        if all(each.optimizer is not None and each.optimized is not None for each in seen):
            optimizer_s = median(lambda each: (each.optimizer, each.optimized))
        whole_s = median(lambda each: (each.start, each.end))
        parameters = dict(self._inner.named_parameters())
        tensors = []
        for name in names:
            needed_s = median(lambda each: (each.forward, each.read.get(name, each.forward)))  # noqa: B023
            ready_s = median(lambda each: (each.backward, each.ready[name]))  # noqa: B023
            tensors.append(
                TensorUse(name, parameters[name].nbytes, min(forward_s, needed_s), min(backward_s, ready_s))
            )
        other_s = max(0.0, whole_s - forward_s - backward_s - optimizer_s)
        first = parameters[names[0]]
        cpu_s = statistics.median(each.cpu_s for each in seen) if first.device.type == "cpu" else 0.0
        return StepProfile(
            tuple(tensors), forward_s, backward_s, optimizer_s, other_s, cpu_s, element_bytes=first.element_size()
        )


def unwrapped(model: nn.Module) -> nn.Module:
    """What DistributedDataParallel holds."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    return inner


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


def slowest_of(profile: StepProfile, group: dist.ProcessGroup | None) -> StepProfile:
    """The profile of the rank that computes longest, on all of them; collective."""
    gathered: list[dict[str, Any]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(gathered, profile.to_json(), group=group)
    return max(map(StepProfile.from_json, gathered), key=lambda each: each.compute_s + each.optimizer_s)
