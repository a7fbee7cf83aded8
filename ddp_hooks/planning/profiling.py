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

from ddp_hooks.comm import torch_compat
from ddp_hooks.planning.step import StepProfile, TensorUse

_TOO_LONG = 1.2  # parts of a step that make up more than this of it overlap, and were taken apart wrongly


def profile_step(
    model: nn.Module,
    step: Callable[[], object],
    steps: int = 3,
    warmup: int = 2,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> StepProfile:
    """Time the layers of real training steps without communication.

    Parameters, buffers, gradients, optimizers and torch's random numbers end as they began; schedulers and gradient
    scalers that ``step`` uses do not, nor does the data that it takes.

    Args:
        model: what is trained; of :class:`~torch.nn.parallel.DistributedDataParallel` its communication is left out.
        step: does one whole step: forward, backward, and ``optimizer.step()``.
        steps: timed, after ``warmup`` that are not.
        progress: wraps the numbers of the steps, as ``tqdm`` does.

    Raises:
        ValueError: ``step`` trains nothing of the model, or in a way that cannot be profiled without communication.
    """
    if steps < 1:
        raise ValueError(f"steps must be >= 1, got {steps}")
    refuse(model)
    with _restored(unwrapped(model)), StepWatch(model) as watch:
        for number in progress(range(warmup + steps)):
            watch.begin()
            step()
            watch.end(counts=number >= warmup)
        return watch.profile()


def refuse(model: nn.Module) -> None:
    """Raise ValueError if the communication of a model cannot be left out."""
    if not isinstance(model, DistributedDataParallel):
        inner = [name for name, module in model.named_modules() if isinstance(module, DistributedDataParallel)]
        if inner:
            raise ValueError(
                f"DistributedDataParallel is inside of the model, as {inner[0] or 'its root'}: give that module itself"
            )
        return
    if torch_compat.comm_hook_registered(model):
        raise ValueError(
            "this model has a communication hook, and steps are profiled without communication: plan with plain "
            "DistributedDataParallel, before register_comm_hook()"
        )
    if getattr(model, "static_graph", False):
        raise ValueError(
            "DistributedDataParallel(static_graph=True) communicates also where it is told not to: plan with "
            "static_graph=False"
        )


class _Stopwatch:
    """Moments of the device: of its own clock on CUDA, where the host runs ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        """A moment; :meth:`seconds` makes numbers of it."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """From one moment to another; less than 0 if the other one was before."""
        if self._device.type != "cuda":
            return float(end - start)
        start.synchronize()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


@dataclass
class _Seen:
    """Moments of one step; of several forwards and backwards, those of the last."""

    start: Any
    forward: Any = None  # begins
    backward: Any = None  # begins
    end: Any = None
    cpu_s: float = 0.0
    optimizer_cpu_s: float = 0.0
    updates: list[tuple[Any, Any]] = field(default_factory=list)  # of optimizers, from where to where
    read: dict[str, Any] = field(default_factory=dict)  # for the first time
    ready: dict[str, Any] = field(default_factory=dict)


class StepWatch:
    """Notes when steps of a model read its parameters, and when they have their gradients.

    Args:
        model: what is trained. DistributedDataParallel does not communicate meanwhile, whatever the loop says.

    Use it as a context around steps, each between :meth:`begin` and :meth:`end`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inner = unwrapped(model)
        self._stopwatch = _Stopwatch(next(self._inner.parameters()).device)
        self._seen = _Seen(None)
        self._steps: list[_Seen] = []
        self._sparse: set[str] = set()
        self._updating: Any = None  # since when
        self._updating_cpu_s = 0.0
        self._undo = contextlib.ExitStack()

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
        handles = [self._model.register_forward_pre_hook(lambda *_: self._forward_begins())]
        for module in self._inner.modules():
            names = [name_of[p] for p in module.parameters(recurse=False) if p in name_of]
            if names:
                handles.append(module.register_forward_pre_hook(lambda *_, names=names: self._reads(names)))
        for parameter, name in name_of.items():
            handles.append(
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._completes(name, p))
            )
        handles.append(self._model.register_forward_hook(lambda module, args, output: self._watch_outputs(output)))
        handles.append(register_optimizer_step_pre_hook(lambda *_: self._update_begins()))
        handles.append(register_optimizer_step_post_hook(lambda *_: self._update_ends()))
        for handle in handles:
            self._undo.callback(handle.remove)
        if isinstance(self._model, DistributedDataParallel):
            before = self._model.require_backward_grad_sync
            self._undo.callback(setattr, self._model, "require_backward_grad_sync", before)
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def _forward_begins(self) -> None:
        if isinstance(self._model, DistributedDataParallel):
            # At every forward, and not once by no_sync(): a loop that accumulates sets it back.
            self._model.require_backward_grad_sync = False
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

    def _completes(self, name: str, parameter: Tensor) -> None:
        self._seen.ready[name] = self._stopwatch.now()
        if parameter.grad is not None and parameter.grad.is_sparse:
            self._sparse.add(name)

    def _update_begins(self) -> None:
        self._updating = self._stopwatch.now()
        self._updating_cpu_s = time.thread_time()

    def _update_ends(self) -> None:
        if self._updating is not None:
            self._seen.updates.append((self._updating, self._stopwatch.now()))
            self._seen.optimizer_cpu_s += time.thread_time() - self._updating_cpu_s
            self._updating = None

    def profile(self) -> StepProfile:
        """What the steps had in common, medians.

        Raises:
            ValueError: they have not trained this model, or with sparse gradients.
        """
        seen = self._steps
        if not seen or any(each.backward is None or each.forward is None or not each.ready for each in seen):
            raise ValueError(
                "the steps train nothing of this model: they must call the model that was given, backward() of what "
                "it returns, and optimizer.step()"
            )
        if self._sparse:
            raise ValueError(
                f"gradients of {', '.join(sorted(self._sparse))} are sparse, which no prediction here knows: see "
                f"docs/tables.md, or ddp_hooks.planning.EmbRace and SparseDdp"
            )
        forward_s = self._median(lambda each: self._between(each.forward, each.backward))
        backward_s = self._median(lambda each: self._between(each.backward, self._last_ready(each)))
        optimizer_s = self._median(lambda each: sum(self._update_s(each, *update) for update in each.updates))
        whole_s = self._median(lambda each: self._between(each.start, each.end))
        if forward_s + backward_s + optimizer_s > whole_s * _TOO_LONG:
            raise ValueError(
                f"a step of {whole_s:.3f} s has a forward of {forward_s:.3f} s, a backward of {backward_s:.3f} s and "
                f"updates of {optimizer_s:.3f} s: they overlap, so nothing can be said about it"
            )
        # A step with a closure has its backward inside, and less of the processor is the update's.
        optimizer_cpu_s = min(optimizer_s, self._median(lambda each: each.optimizer_cpu_s))
        cpu_s = max(0.0, self._median(lambda each: each.cpu_s) - optimizer_cpu_s)
        tensors = self._uses(forward_s, backward_s)
        first = next(parameter for parameter in self._inner.parameters() if parameter.requires_grad)
        on_cpu = first.device.type == "cpu"
        return StepProfile(
            tensors,
            forward_s,
            backward_s,
            optimizer_s,
            other_s=max(0.0, whole_s - forward_s - backward_s - optimizer_s),
            cpu_s=cpu_s if on_cpu else 0.0,
            optimizer_cpu_s=optimizer_cpu_s if on_cpu else 0.0,
            element_bytes=first.element_size(),
        )

    def _uses(self, forward_s: float, backward_s: float) -> tuple[TensorUse, ...]:
        """Every parameter that is trained; without a gradient in some step, DDP sends it at the end."""
        uses = []
        for name, parameter in self._inner.named_parameters():
            if not parameter.requires_grad:
                continue
            needed_s = self._median(lambda each: self._between(each.forward, each.read.get(name, each.forward)))  # noqa: B023
            ready_s = backward_s
            if all(name in each.ready for each in self._steps):
                ready_s = self._median(lambda each: self._between(each.backward, each.ready[name]))  # noqa: B023
            uses.append(TensorUse(name, parameter.nbytes, min(forward_s, needed_s), min(backward_s, ready_s)))
        return tuple(uses)

    def _median(self, seconds: Callable[[_Seen], float]) -> float:
        return statistics.median(seconds(each) for each in self._steps)

    def _between(self, start: Any, end: Any) -> float:
        return max(0.0, self._stopwatch.seconds(start, end))

    def _last_ready(self, each: _Seen) -> Any:
        return max(each.ready.values(), key=lambda moment: self._stopwatch.seconds(each.backward, moment))

    def _update_s(self, each: _Seen, start: Any, end: Any) -> float:
        """An update; of ``step(closure)`` what comes behind its backward."""
        last = self._last_ready(each)
        seconds = self._stopwatch.seconds
        behind = seconds(start, last) > 0 and seconds(last, end) > 0
        return self._between(last if behind else start, end)


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
    """Give back what a model and the optimizers that step have now: without communication ranks would part."""
    values: dict[Tensor, Tensor] = {}
    gradients: dict[Tensor, Tensor | None] = {}
    optimizers: dict[Optimizer, tuple[list[dict[str, Any]], dict[Any, Any]]] = {}

    def save(tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor not in values:
                values[tensor] = tensor.detach().clone()
                gradients[tensor] = tensor.grad

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in optimizers:
            save(parameter for group in optimizer.param_groups for parameter in group["params"])
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            optimizers[optimizer] = copy.deepcopy(groups), {p: copy.deepcopy(s) for p, s in optimizer.state.items()}

    handle = register_optimizer_step_pre_hook(note)
    save((*model.parameters(), *model.buffers()))
    for parameter in model.parameters():
        parameter.grad = None
    devices = sorted({tensor.device.index for tensor in values if tensor.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        handle.remove()
        with torch.no_grad():
            for tensor, value in values.items():
                tensor.copy_(value)
        for tensor, gradient in gradients.items():
            if tensor.is_leaf and tensor.requires_grad:
                tensor.grad = gradient
        for optimizer, (groups, state) in optimizers.items():
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update(saved)
            optimizer.state.clear()
            optimizer.state.update(state)


def slowest_of(profile: StepProfile, group: dist.ProcessGroup | None) -> StepProfile:
    """The profile of the rank that computes longest, on all of them; collective."""
    gathered: list[dict[str, Any]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(gathered, profile.to_json(), group=group)
    return max(map(StepProfile.from_json, gathered), key=lambda each: each.compute_s + each.optimizer_s)
