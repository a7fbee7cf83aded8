"""Profile of a training step, from a few real steps: when the forward reads parameters, when gradients are ready."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ddp_hooks.comm.torch_compat.autocast import casts_to
from ddp_hooks.comm.torch_compat.ddp import comm_hook_registered
from ddp_hooks.comm.wire.exact import fitting_part
from ddp_hooks.planning.measurement.processor import Progress, gather
from ddp_hooks.planning.step import StepProfile, TensorUse

_WARMUP = 2  # steps before those that count
_TOO_LONG = 1.2  # parts of a step whose sum exceeds the step by this factor overlap


def profile_step(
    model: nn.Module, step: Callable[[], object], steps: int = 3, progress: Progress = iter
) -> StepProfile:
    """Time the layers of real training steps without communication.

    Parameters, buffers, gradients, optimizers and torch's random numbers are restored; schedulers, gradient scalers
    and data of ``step`` are not.

    Args:
        model: the model that is trained; DistributedDataParallel does not communicate meanwhile.
        step: does one whole step: forward, backward, and ``optimizer.step()``.
        steps: number of timed steps.
        progress: wraps the numbers of the steps, as ``tqdm`` does.

    Raises:
        ValueError: ``step`` trains nothing of the model, or in a way that cannot be profiled without communication.
    """
    if steps < 1:
        raise ValueError(f"steps must be >= 1, got {steps}")
    refuse(model)
    with _restored(unwrapped(model)), StepWatch(model) as watch:
        for number in progress(range(_WARMUP + steps)):
            watch.begin()
            step()
            watch.end(counts=number >= _WARMUP)
        return watch.profile()


def refuse(model: nn.Module) -> None:
    """Raise ValueError if the communication of a model cannot be left out."""
    if not isinstance(model, DistributedDataParallel):
        for name, module in model.named_modules():
            if isinstance(module, DistributedDataParallel):
                raise ValueError(f"DistributedDataParallel is inside of the model, as {name}: give that module itself")
        return
    if comm_hook_registered(model):
        raise ValueError(
            "this model has a communication hook, and steps are profiled without communication: plan with plain "
            "DistributedDataParallel, before register_comm_hook()"
        )
    if model.static_graph:
        raise ValueError(
            "DistributedDataParallel(static_graph=True) communicates also where it is told not to: plan with "
            "static_graph=False"
        )


def _seconds(start: Any, end: Any) -> float:
    """Return the seconds between two moments; below 0 if ``end`` is the earlier one."""
    if isinstance(start, float):
        return float(end - start)
    start.synchronize()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def _between(start: Any, end: Any) -> float:
    return max(0.0, _seconds(start, end))


@dataclass
class _Moments:
    """Moments of one step; of several forwards and backwards, the last ones."""

    start: Any
    forward: Any = None  # begins
    backward: Any = None  # begins
    end: Any = None
    cpu_s: float = 0.0
    optimizer_cpu_s: float = 0.0
    updates: list[tuple[Any, Any]] = field(default_factory=list)  # start and end of each optimizer's step()
    read: dict[str, Any] = field(default_factory=dict)  # for the first time
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def last_ready(self) -> Any:
        return max(self.ready.values(), key=lambda moment: _seconds(self.backward, moment))

    def update_s(self, start: Any, end: Any) -> float:
        """Return the seconds of an update; of ``step(closure)``, the part after its backward."""
        last = self.last_ready
        has_backward = _seconds(start, last) > 0 and _seconds(last, end) > 0
        return _between(last if has_backward else start, end)


class _Bits(NamedTuple):
    """Parts of a gradient that are 16-bit numbers."""

    bfloat16: float = 0.0
    float16: float = 0.0

    @property
    def exact_width(self) -> float:
        part = max(self)
        return 1 - part / 2 if part >= 0.5 else 1.0  # where most do not fit, none is tried


class StepWatch:
    """Record when steps of a model read its parameters, and when gradients are ready.

    In the first one, which should not count, also record which gradients are 16-bit numbers.

    A context in which DistributedDataParallel does not communicate; :meth:`begin` and :meth:`end` are around each step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inner = unwrapped(model)
        self._device = next(self._inner.parameters()).device
        self._trained = {name: p for name, p in self._inner.named_parameters() if p.requires_grad}
        self._current = _Moments(None)
        self._steps: list[_Moments] = []
        self._sparse: set[str] = set()
        self._is_first = True  # step
        self._cast: set[str] = set()  # read in autocast to bfloat16, as far as modules tell
        self._bits: dict[str, _Bits] = {}
        self._update_start: tuple[Any, float] | None = None  # and of the thread's processor time
        self._undo = contextlib.ExitStack()

    def begin(self) -> None:
        self._current = _Moments(self._now(), cpu_s=-time.thread_time())

    def end(self, counts: bool = True) -> None:
        """End the step; it enters the profile if it ``counts``."""
        self._current.end = self._now()
        self._current.cpu_s += time.thread_time()
        if counts:
            self._steps.append(self._current)
        self._is_first = False

    def __len__(self) -> int:
        return len(self._steps)

    def __enter__(self) -> StepWatch:
        name_of = {parameter: name for name, parameter in self._trained.items()}
        handles = [
            self._model.register_forward_pre_hook(self._on_forward),
            self._model.register_forward_hook(self._hook_outputs),
            register_optimizer_step_pre_hook(self._on_update_start),
            register_optimizer_step_post_hook(self._on_update_end),
        ]
        for module in self._inner.modules():
            names = [name_of[p] for p in module.parameters(recurse=False) if p in name_of]
            if names:
                handles.append(module.register_forward_pre_hook(partial(self._on_read, names)))
        for name, parameter in self._trained.items():
            handles.append(parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, name)))
        for handle in handles:
            self._undo.callback(handle.remove)
        if isinstance(self._model, DistributedDataParallel):
            before = self._model.require_backward_grad_sync
            self._undo.callback(setattr, self._model, "require_backward_grad_sync", before)
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def _on_forward(self, *_: Any) -> None:
        if isinstance(self._model, DistributedDataParallel):
            # At every forward, and not once by no_sync(): a loop that accumulates sets it back.
            self._model.require_backward_grad_sync = False
        moments = self._current
        if torch.is_grad_enabled() and (moments.forward is None or moments.backward is not None):
            moments.forward, moments.backward = self._now(), None
            moments.read.clear()
            moments.ready.clear()

    def _hook_outputs(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Let the first gradient of an output note the begin of the backward."""
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._on_backward)

    def _on_backward(self, _: Tensor) -> None:
        self._current.backward = self._current.backward or self._now()

    def _on_read(self, names: Sequence[str], module: nn.Module, _args: Any) -> None:
        moment = self._now()
        for name in names:
            self._current.read.setdefault(name, moment)
        if self._is_first and casts_to(self._device.type, torch.bfloat16) and not isinstance(module, nn.Embedding):
            self._cast.update(names)

    def _on_gradient(self, name: str, parameter: Tensor) -> None:
        self._current.ready[name] = self._now()
        if parameter.grad is not None and parameter.grad.is_sparse:
            self._sparse.add(name)
        elif self._is_first and parameter.grad is not None and parameter.grad.dtype == torch.float32:
            parts = (fitting_part(parameter.grad, narrow) for narrow in (torch.bfloat16, torch.float16))
            self._bits[name] = _Bits(*parts)

    def _on_update_start(self, *_: Any) -> None:
        self._update_start = self._now(), time.thread_time()

    def _on_update_end(self, *_: Any) -> None:
        if self._update_start is not None:
            start, start_cpu_s = self._update_start
            self._current.updates.append((start, self._now()))
            self._current.optimizer_cpu_s += time.thread_time() - start_cpu_s
            self._update_start = None

    def profile(self) -> StepProfile:
        """Return the medians of the steps that count; raises ValueError if they say nothing of this model."""
        steps = self._steps
        if not steps or any(each.backward is None or each.forward is None or not each.ready for each in steps):
            raise ValueError(
                "the steps train nothing of this model: they must call the model that was given, backward() of what "
                "it returns, and optimizer.step()"
            )
        if self._sparse:
            raise ValueError(
                f"gradients of {', '.join(sorted(self._sparse))} are sparse, which no prediction here knows: see "
                f"docs/tables.md"
            )
        forward_s = median(_between(each.forward, each.backward) for each in steps)
        backward_s = median(_between(each.backward, each.last_ready) for each in steps)
        optimizer_s = median(sum(each.update_s(*update) for update in each.updates) for each in steps)
        whole_s = median(_between(each.start, each.end) for each in steps)
        if forward_s + backward_s + optimizer_s > whole_s * _TOO_LONG:
            raise ValueError(
                f"a step of {whole_s:.3f} s has a forward of {forward_s:.3f} s, a backward of {backward_s:.3f} s and "
                f"updates of {optimizer_s:.3f} s: they overlap, so nothing can be said about it"
            )
        # A step with a closure contains its backward, and the update takes less of the processor.
        optimizer_cpu_s = min(optimizer_s, median(each.optimizer_cpu_s for each in steps))
        cpu_s = max(0.0, median(each.cpu_s for each in steps) - optimizer_cpu_s)
        on_cpu = self._device.type == "cpu"
        return StepProfile(
            self._uses(forward_s, backward_s),
            forward_s,
            backward_s,
            optimizer_s,
            other_s=max(0.0, whole_s - forward_s - backward_s - optimizer_s),
            cpu_s=cpu_s if on_cpu else 0.0,
            optimizer_cpu_s=optimizer_cpu_s if on_cpu else 0.0,
            element_bytes=next(iter(self._trained.values())).element_size(),
        )

    def _uses(self, forward_s: float, backward_s: float) -> tuple[TensorUse, ...]:
        """Return all trained parameters; DDP sends a parameter without a gradient at the end of the backward."""
        uses = []
        for name, parameter in self._trained.items():
            needed_s = median(_between(each.forward, each.read.get(name, each.forward)) for each in self._steps)
            ready = [_between(each.backward, each.ready[name]) for each in self._steps if name in each.ready]
            ready_s = median(ready) if len(ready) == len(self._steps) else backward_s
            bits = self._bits.get(name, _Bits())
            is_cast = name in self._cast and bits.bfloat16 == 1
            times_s = min(forward_s, needed_s), min(backward_s, ready_s)
            uses.append(TensorUse(name, parameter.nbytes, *times_s, bits.exact_width, is_cast))
        return tuple(uses)

    def _now(self) -> Any:
        """Return a moment, on CUDA by the device's own clock: the host runs ahead."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def unwrapped(model: nn.Module) -> nn.Module:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    return inner


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore a model and the optimizers that step in the context: without communication ranks would diverge."""
    before: dict[Tensor, tuple[Tensor, Tensor | None]] = {}  # values and gradients
    optimizers: dict[Optimizer, tuple[list[dict[str, Any]], dict[Any, Any]]] = {}

    def save(tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor not in before:
                before[tensor] = tensor.detach().clone(), tensor.grad

    def save_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in optimizers:
            save(parameter for group in optimizer.param_groups for parameter in group["params"])
            groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            optimizers[optimizer] = copy.deepcopy(groups), {p: copy.deepcopy(s) for p, s in optimizer.state.items()}

    handle = register_optimizer_step_pre_hook(save_optimizer)
    save((*model.parameters(), *model.buffers()))
    for parameter in model.parameters():
        parameter.grad = None
    devices = sorted({tensor.device.index for tensor in before if tensor.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        handle.remove()
        for tensor, (value, gradient) in before.items():
            with torch.no_grad():
                tensor.copy_(value)
            if tensor.is_leaf and tensor.requires_grad:
                tensor.grad = gradient
        for optimizer, (groups, state) in optimizers.items():
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update(saved)
            optimizer.state.clear()
            optimizer.state.update(state)


def slowest_of(profile: StepProfile, group: dist.ProcessGroup | None) -> StepProfile:
    """Return the profile of the rank that computes longest, with gradients of all ranks; collective."""
    profiles = gather(profile, group or dist.group.WORLD)
    slowest = max(profiles, key=lambda each: each.compute_s + each.optimizer_s)
    uses = zip(slowest.tensors, *(each.tensors for each in profiles), strict=True)
    tensors = tuple(
        replace(own, exact_width=max(use.exact_width for use in all_), is_cast=all(use.is_cast for use in all_))
        for own, *all_ in uses
    )
    return replace(slowest, tensors=tensors)
