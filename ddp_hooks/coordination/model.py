"""Data parallelism for models whose used parameters differ by rank and by step: multi-task, mixtures, early exits.

DDP with ``find_unused_parameters=True`` reduces every bucket in every step, also zeros of unused parameters. Here a
group of parameters is reduced as soon as all ranks have its gradients, in any order. At the end of the backward ranks
exchange a bit per parameter: was it used? A parameter that only some ranks have used gets zeros from the other ranks; a
parameter that no rank has used stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddp_hooks.comm import agree, mebibytes, see
from ddp_hooks.comm.torch_compat import is_inside
from ddp_hooks.comm.torch_compat.autograd import current_backward, in_backward, queue_engine_callback
from ddp_hooks.comm.torch_compat.ddp import expects_sparse_gradient
from ddp_hooks.coordination.config import CoordinatorConfig
from ddp_hooks.coordination.control.request_queue import Handle
from ddp_hooks.coordination.coordinator import Coordinator
from ddp_hooks.coordination.grouping import at_most_bytes, groups_of
from ddp_hooks.coordination.stats import CoordinationStats

_USED = "used parameters"
_BROADCAST_MB = 32  # largest message with values of rank 0
_ATTRIBUTE = "_ddp_hooks_coordinated"


def coordinate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    num_groups: int | None = None,
    group_mb: float | None = None,
    groups: Sequence[Sequence[str]] | None = None,
    broadcast_buffers: bool = True,
    group: dist.ProcessGroup | None = None,
    config: CoordinatorConfig | None = None,
    coordinator: Coordinator | None = None,
) -> CoordinatedModel:
    """Reduce the gradients of ``model``, in place, whichever parts of it each rank uses in each step; collective::

        coordinated = coordinate(model, optimizer)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model(batch)).backward()  # .grad is the mean over all ranks when it returns
            optimizer.step()

    The result is the same as of DDP with ``find_unused_parameters=True``: a parameter that no rank has used keeps its
    ``.grad``, None after ``zero_grad()``. Clipping, loss scaling and checkpoints need no change; accumulate with
    :meth:`CoordinatedModel.no_sync`.

    Args:
        model: gets the parameters and buffers of rank 0; its forward begins a step.
        optimizer: checked: it must not update parameters that are not the model's.
        num_groups: split parameters into so many groups of equal numbers of parameters (Horovod, section 3.2).
        group_mb: without ``num_groups`` and ``groups``, neighbours within one branch travel together up to this size in
            MiB; a branch is a child of a list of modules, or of the model. None: 5.
        groups: names of parameters that travel together; other parameters travel alone.
        broadcast_buffers: copy rank 0's buffers to all ranks in every forward in training mode, as DDP does.
        group: the ranks; None: all of them.
        config: of the model's own :class:`Coordinator`.
        coordinator: shared with tables or collectives of your own, and of the same ranks; None: the model's own.

    Raises:
        ValueError: on every rank, if this cannot work or ranks differ.
        LaneError: ranks cannot connect.
        LaneTimeout: a rank did not come.
    """
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError(f"torch.distributed is not initialised{see('set-up-is-refused')}")
    problem, parameters, members = None, dict[str, nn.Parameter](), list[list[str]]()
    try:
        parameters = _trained_parameters(model, optimizer)
        _check_coordinator(coordinator, config, group)
        members = groups_of(model, parameters, num_groups, group_mb, groups)
    except (TypeError, ValueError) as error:
        problem = str(error)
    entries: dict[str, object] = {
        "broadcast_buffers": broadcast_buffers, "groups": members, "coordinator": coordinator is not None
    }  # fmt: skip
    if isinstance(model, nn.Module):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            trained = "trained" if tensor.requires_grad else "not trained"
            entries[name] = f"{tuple(tensor.shape)} {tensor.dtype} strides {tensor.stride()}, {trained}"
    agree(entries, problem, group, "the set-up of coordinate", config)
    _copy_from_rank_0(model, group)
    used = coordinator if coordinator is not None else Coordinator(group, config)
    return CoordinatedModel(model, parameters, members, broadcast_buffers, used, coordinator is None)


class _Group:
    """Parameters of one type whose gradients travel as one all-reduce."""

    def __init__(self, name: str, parameters: Mapping[str, nn.Parameter], coordinator: Coordinator) -> None:
        self.name = name
        self.parameters = parameters
        self.coordinator = coordinator
        self.reset()

    def reset(self) -> None:
        self.handle: Handle | None = None  # of the all-reduce
        self.missing = set(self.parameters)  # gradients that are not in ``flat``
        self.flat: Tensor | None = None  # (numel,)
        self._slots: dict[str, Tensor] = {}  # views of ``flat``, in the shapes of parameters

    def pack(self, name: str, gradient: Tensor | None) -> None:
        """Copy a gradient, whose memory autograd may still use, or zeros; the last one requests the all-reduce."""
        if self.flat is None:
            shapes = [parameter.shape for parameter in self.parameters.values()]
            numels = [shape.numel() for shape in shapes]
            self.flat = torch.empty(sum(numels), dtype=self.parameters[name].dtype)
            parts = zip(self.parameters, self.flat.split(numels), shapes, strict=True)
            self._slots = {each: part.view(shape) for each, part, shape in parts}
        self._slots[name].zero_() if gradient is None else self._slots[name].copy_(gradient)
        self.missing.discard(name)
        if not self.missing:
            self.handle = self.coordinator.all_reduce(self.flat, self.name, mean=True)

    def hand_out(self, used: Collection[str]) -> None:
        """Wait for means, and copy them to ``.grad`` of used parameters."""
        assert self.handle is not None
        self.handle.wait()
        for name, parameter in self.parameters.items():
            if name in used:
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(self._slots[name])
        self.reset()


class CoordinatedModel:
    """Hooks of a model, made by :func:`coordinate`.

    A backward raises RuntimeError where it cannot be coordinated, and LaneError or LaneTimeout if communication fails.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        members: Sequence[Sequence[str]],
        broadcast_buffers: bool,
        coordinator: Coordinator,
        owns_coordinator: bool,
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._groups = [
            _Group(f"group {index}", {name: parameters[name] for name in names}, coordinator)
            for index, names in enumerate(members)
        ]
        self._group_of = {name: each for each in self._groups for name in each.parameters}
        self._broadcasts_buffers = broadcast_buffers
        self._used: set[str] = set()  # on this rank, since gradients were reduced
        self._backward: int | None = None  # the engine's number of the one that runs, or failed
        self._has_asked = False  # gradients of it are on their way
        self._syncs = True
        self.coordinator = coordinator
        self._owns_coordinator = owns_coordinator
        setattr(model, _ATTRIBUTE, self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._note_gradient, name))
            for name, parameter in parameters.items()
        ]
        before_forward = torch.compiler.disable(self._begin_forward)
        self._handles.append(model.register_forward_pre_hook(before_forward, prepend=True))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of backwards inside on each rank; the next backward outside reduces them."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def stats(self) -> CoordinationStats:
        """Return totals of this rank so far."""
        return self.coordinator.stats()

    def close(self) -> None:
        """Remove all hooks, and close the coordinator if it is the model's own; collective."""
        while self._handles:
            self._handles.pop().remove()
        vars(self._model).pop(_ATTRIBUTE, None)
        if self._owns_coordinator:
            self.coordinator.close()

    def _begin_forward(self, *ignored: object) -> None:
        if in_backward():  # recomputation of an activation checkpoint
            return
        if self._backward is not None:
            self._end_failed()
        trains = self._model.training and torch.is_grad_enabled() and self._syncs
        if self._broadcasts_buffers and trains and (buffers := list(self._model.buffers())):
            _copy_bytes(buffers, self.coordinator.broadcast(_bytes_of(buffers), "buffers").wait())

    def _end_failed(self) -> None:
        self._backward = None
        if self._has_asked:
            raise RuntimeError(
                "the last backward failed, and gradients of it are still on their way, perhaps on this rank only: "
                "start anew from a checkpoint, or find out before the backward that a batch is to be skipped"
                f"{see('coordinated-models')}"
            )

    @torch.no_grad()
    def _note_gradient(self, name: str, parameter: Tensor) -> None:
        """Request the group of a parameter whose gradient is ready, if it is complete."""
        if is_inside("torch.utils.checkpoint", "backward"):  # of a checkpoint with use_reentrant=True
            raise RuntimeError(
                f"the gradient of {name} comes from a backward inside of another one, of which ranks may make "
                f"different numbers: checkpoint activations with use_reentrant=False{see('coordinated-models')}"
            )
        task = current_backward()
        if self._backward is not None and self._backward != task:
            self._end_failed()
        if self._backward is None:
            self._backward, self._has_asked = task, False
            for group in self._groups:
                group.reset()
            queue_engine_callback(self._end_backward)
        self._used.add(name)
        if not self._syncs:
            return
        group = self._group_of[name]
        if name not in group.missing:
            raise RuntimeError(
                f"the gradient of {name} was complete, and was added to again, in one backward: checkpoint activations "
                f"with use_reentrant=False, or reduce once, after backwards under no_sync(){see('coordinated-models')}"
            )
        self._has_asked = self._has_asked or group.missing == {name}
        group.pack(name, parameter.grad)

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Exchange used parameters, request groups that are not complete, and set ``.grad`` to means."""
        if not self._syncs:
            self._backward = None
            return
        self._has_asked = True
        used_here = torch.tensor([name in self._used for name in self._parameters])
        used = self.coordinator.any(used_here, _USED).wait()
        used_anywhere = {name for name, is_used in zip(self._parameters, used.tolist(), strict=True) if is_used}
        travelling = [group for group in self._groups if not used_anywhere.isdisjoint(group.parameters)]
        for group in travelling:
            for name in list(group.missing):
                # Gradients of earlier backwards count, too, but a parameter that no rank has used keeps its own.
                group.pack(name, self._parameters[name].grad if name in used_anywhere else None)
        for group in travelling:
            group.hand_out(used_anywhere)
        self._used.clear()
        self._backward = None


def _trained_parameters(model: object, optimizer: object) -> dict[str, nn.Parameter]:
    """Return the parameters by name; raises if the model or the optimizer cannot be coordinated."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"coordinate(...) takes a module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("coordinate(...) replaces DistributedDataParallel: pass the model itself, ddp.module")
    kind = type(model).__name__
    if hasattr(model, _ATTRIBUTE):
        raise ValueError(f"{kind} is coordinated already: call close() of what coordinate(...) returned first")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) or parameter.device.type != "cpu":
            place = "a DTensor" if isinstance(parameter, DTensor) else f"on {parameter.device}"
            raise ValueError(
                f"{name} is {place}: whole parameters on CPUs are coordinated so far; use FSDP2 itself, or "
                f"DistributedDataParallel(find_unused_parameters=True)"
            )
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ValueError(f"{kind} has no parameters that are trained")
    for name, module in model.named_modules():
        if expects_sparse_gradient(module):
            raise ValueError(
                f"{name} makes sparse gradients: take sparse=False, or shard_embeddings(model, ...) of ddp_hooks, "
                f"which reduces them by rows"
            )
    if not isinstance(optimizer, torch.optim.Optimizer | None):
        raise TypeError(f"optimizer must be None or a torch.optim.Optimizer, got {type(optimizer).__name__}")
    settings = optimizer.param_groups if optimizer is not None else []
    updated = {parameter for each in settings for parameter in each["params"] if parameter.requires_grad}
    if foreign := updated - set(trained.values()):
        raise ValueError(
            f"the optimizer updates {len(foreign)} parameters that are not the model's, and would not be reduced: make "
            f"it over model.parameters()"
        )
    return trained


def _check_coordinator(coordinator: Coordinator | None, config: object, group: dist.ProcessGroup) -> None:
    if coordinator is None:
        return
    if config is not None:
        raise ValueError("a coordinator has its own config: pass one of the two")
    ranks = getattr(coordinator, "ranks", None)
    if ranks != dist.get_process_group_ranks(group):
        raise ValueError(f"the coordinator has ranks {ranks}: pass the group that it was made of")


def _copy_from_rank_0(model: nn.Module, group: dist.ProcessGroup) -> None:
    tensors = {str(index): each for index, each in enumerate((*model.parameters(), *model.buffers()))}
    nbytes = {name: each.nbytes for name, each in tensors.items()}
    for names in at_most_bytes(nbytes, mebibytes(_BROADCAST_MB), {}):
        chosen = [tensors[name] for name in names]
        message = _bytes_of(chosen)
        dist.broadcast(message, group=group, group_src=0)
        _copy_bytes(chosen, message)


def _bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements in row order, whatever the strides, as bytes."""
    return torch.cat([each.detach().contiguous().view(-1).view(torch.uint8) for each in tensors])


@torch.no_grad()
def _copy_bytes(tensors: Sequence[Tensor], message: Tensor) -> None:
    for tensor, part in zip(tensors, message.split([each.nbytes for each in tensors]), strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # aligned as its type needs it
