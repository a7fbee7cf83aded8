"""Data parallelism for models whose used parameters differ by rank and by step: multi-task, mixtures, early exits.

DDP with ``find_unused_parameters=True`` reduces every bucket in every step, zeros for what nobody used among them. Here
a group of parameters is reduced as soon as all ranks have its gradients, in whatever order, and at the end of the
backward ranks tell each other what they have used: what no rank has used is left alone, and where only some have, the
others give zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddp_hooks.comm import agree, mebibytes, positive, see, whole
from ddp_hooks.comm import torch_compat as comm_compat
from ddp_hooks.coordination import groups as grouping
from ddp_hooks.coordination.config import CoordinatorConfig
from ddp_hooks.coordination.coordinator import Coordinator
from ddp_hooks.coordination.handle import Handle
from ddp_hooks.coordination.stats import CoordinationStats

_USED = "used parameters"
_GROUP_MB = 5.0
_BROADCAST_MB = 32  # of a message in which the first rank's values travel
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
    """Let ranks train one model together, whichever parts of it each of them uses in each step; in place::

        coordinated = coordinate(model, optimizer)
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model(batch)).backward()  # .grad is the mean over all ranks when it returns
            optimizer.step()

    The result is that of DDP with ``find_unused_parameters=True``: what no rank has used keeps ``.grad`` as it was,
    None after ``zero_grad()``. Clipping, loss scaling and checkpoints are as without it; accumulation with
    :meth:`CoordinatedModel.no_sync`.

    Args:
        model: whose parameters and buffers become those of rank 0; its forward begins a step.
        optimizer: compared with the model, so that it updates nothing that is not reduced.
        num_groups: tensors are split into so many groups of equal numbers (Horovod, section 3.2).
        group_mb: without ``num_groups`` and ``groups``, neighbours of one branch travel together up to this size in
            MiB: those within one child of a list of modules, or of the model. None: 5.
        groups: names of parameters that travel together; those that are in none travel alone.
        broadcast_buffers: whether rank 0's buffers are those of all ranks in every forward in training mode, as in DDP.
        group: the ranks; None: all of them.
        config: of the :class:`Coordinator`.
        coordinator: one that moves other things, too, such as tables; without it the model has one of its own. Its
            ranks are the model's, and so are its settings.

    Raises:
        ValueError: on every rank, if this cannot work or ranks differ.

    Collective.
    """
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError(f"torch.distributed is not initialised{see('set-up-is-refused')}")
    problem, members = _problem_of(model, optimizer), list[list[str]]()
    problem = problem or _problem_of_coordinator(coordinator, config, group)
    parameters = _trained(model) if problem is None else {}
    if problem is None:
        try:
            members = _groups_of(model, parameters, num_groups, group_mb, groups)
        except (TypeError, ValueError) as error:
            problem = str(error)
    entries: dict[str, object] = {"broadcast_buffers": broadcast_buffers, "groups": members}
    entries["coordinator"] = coordinator is not None
    if isinstance(model, nn.Module):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            entries[name] = f"{tuple(tensor.shape)} {tensor.dtype} strides {tensor.stride()}, {_trained_or_not(tensor)}"
    agree(entries, problem, group, "the set-up of coordinate", config)
    return CoordinatedModel(model, parameters, members, broadcast_buffers, group, config, coordinator)


@dataclass
class _Group:
    """Parameters that travel together.

    Args:
        name: of the request.
        members: names of the parameters, with their places in the group's memory, in elements.
        flat: the memory that gradients travel in, of this backward; (numel,).
        present: members whose gradients are in it.
        handle: of the collective, once it was asked for.
    """

    name: str
    members: dict[str, slice]
    flat: Tensor | None = None
    present: set[str] = field(default_factory=set)
    handle: Handle | None = None


@dataclass
class _Backward:
    """The backward that runs.

    Args:
        task: the engine's number of it.
        has_asked: whether gradients of it are on their way.
    """

    task: int
    has_asked: bool = False


class CoordinatedModel:
    """What serves one model: made by :func:`coordinate`."""

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, nn.Parameter],
        members: Sequence[Sequence[str]],
        broadcast_buffers: bool,
        group: dist.ProcessGroup,
        config: CoordinatorConfig | None,
        coordinator: Coordinator | None,
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._groups = [_Group(f"group {index}", _places(names, parameters)) for index, names in enumerate(members)]
        self._group_of = {name: each for each in self._groups for name in each.members}
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._broadcasts_buffers = broadcast_buffers
        self._used: set[str] = set()  # here, since gradients were reduced
        self._backward: _Backward | None = None
        self._syncs = True
        _begin_alike(model, group)
        self._owns_coordinator = coordinator is None
        self.coordinator = coordinator if coordinator is not None else Coordinator(group, config)
        setattr(model, _ATTRIBUTE, self)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note_gradient) for parameter in parameters.values()
        ]
        before_forward = torch.compiler.disable(self._begin_forward)
        self._handles.append(model.register_forward_pre_hook(before_forward, prepend=True))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add up gradients on each rank; the next one outside of it reduces them."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def stats(self) -> CoordinationStats:
        """Totals so far, on this rank."""
        return self.coordinator.stats()

    def close(self) -> None:
        """Leave the model as it was; collective."""
        while self._handles:
            self._handles.pop().remove()
        vars(self._model).pop(_ATTRIBUTE, None)
        if self._owns_coordinator:
            self.coordinator.close()

    # -- forward -------------------------------------------------------------------------------------------------------

    def _begin_forward(self, *ignored: object) -> None:
        if comm_compat.in_backward():  # of an activation checkpoint
            return
        if self._backward is not None:
            self._refuse_to_go_on(self._backward)
        if self._broadcasts_buffers and self._model.training and torch.is_grad_enabled() and self._syncs:
            self._broadcast_buffers()

    def _refuse_to_go_on(self, failed: _Backward) -> None:
        """A backward did not come to its end."""
        self._backward = None
        if failed.has_asked:
            raise RuntimeError(
                "the last backward failed, and gradients of it are still on their way, perhaps on this rank only: "
                "start anew from a checkpoint, or find out before the backward that a batch is to be skipped"
                f"{see('coordinated-models')}"
            )

    @torch.no_grad()
    def _broadcast_buffers(self) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self._model.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        joined = {dtype: torch.cat([each.reshape(-1) for each in buffers]) for dtype, buffers in by_dtype.items()}
        handles = [self.coordinator.broadcast(flat, f"buffers of {dtype}") for dtype, flat in joined.items()]
        for handle, buffers in zip(handles, by_dtype.values(), strict=True):
            parts = handle.wait().split([each.numel() for each in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))

    # -- backward ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _note_gradient(self, parameter: Tensor) -> None:
        """The gradient of a parameter is complete."""
        name = self._names[parameter]  # type: ignore[index]
        backward = self._running_backward(name)
        self._used.add(name)
        if not self._syncs:
            return
        group = self._group_of[name]
        if name in group.present:
            raise RuntimeError(
                f"the gradient of {name} was complete, and was added to again, in one backward: checkpoint activations "
                f"with use_reentrant=False, or reduce once, after backwards under no_sync(){see('coordinated-models')}"
            )
        self._pack(group, name, parameter.grad)
        if len(group.present) == len(group.members):
            backward.has_asked = True
            self._ask_for(group)

    def _running_backward(self, name: str) -> _Backward:
        if comm_compat.inside_reentrant_checkpoint():
            raise RuntimeError(
                f"the gradient of {name} comes from a backward inside of another one, of which ranks may make "
                f"different numbers: checkpoint activations with use_reentrant=False{see('coordinated-models')}"
            )
        task = torch._C._current_graph_task_id()
        if self._backward is not None and self._backward.task != task:
            self._refuse_to_go_on(self._backward)
        if self._backward is None:
            self._backward = _Backward(task)
            for group in self._groups:
                group.flat, group.handle = None, None
                group.present.clear()
            comm_compat.queue_engine_callback(self._end_backward)
        return self._backward

    def _pack(self, group: _Group, name: str, gradient: Tensor | None) -> None:
        """Copy it to where it travels; None: zeros.

        Not in place: autograd may still be handing on the memory that it has made the gradient of.
        """
        if group.flat is None:
            numel = max(place.stop for place in group.members.values())
            group.flat = torch.empty(numel, dtype=self._parameters[name].dtype)
        place = group.flat[group.members[name]].view(self._parameters[name].shape)
        place.zero_() if gradient is None else place.copy_(gradient)
        group.present.add(name)

    def _ask_for(self, group: _Group) -> None:
        assert group.flat is not None
        group.handle = self.coordinator.all_reduce(group.flat, group.name, mean=True)

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Hear what was used anywhere, send what is missing, and give every parameter the mean of its gradients."""
        if not self._syncs:
            self._backward = None
            return
        assert self._backward is not None
        self._backward.has_asked = True
        used_here = torch.tensor([name in self._used for name in self._parameters])
        used = self.coordinator.any(used_here, _USED).wait()
        used_anywhere = {name for name, is_used in zip(self._parameters, used.tolist(), strict=True) if is_used}
        travelling = [group for group in self._groups if not used_anywhere.isdisjoint(group.members)]
        for group in travelling:
            if group.handle is None:
                for name in group.members.keys() - group.present:
                    # What came of earlier backwards counts, too, but not of what nobody has used: that stays.
                    self._pack(group, name, self._parameters[name].grad if name in used_anywhere else None)
                self._ask_for(group)
        for group in travelling:
            self._hand_out(group, used_anywhere)
        self._used.clear()
        self._backward = None

    def _hand_out(self, group: _Group, used_anywhere: Collection[str]) -> None:
        assert group.handle is not None
        means = group.handle.wait()
        for name, place in group.members.items():
            parameter = self._parameters[name]
            if name in used_anywhere:
                mean = means[place].view(parameter.shape)
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(mean)
        group.flat, group.handle = None, None


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _places(names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> dict[str, slice]:
    """One after the other."""
    places: dict[str, slice] = {}
    start = 0
    for name in names:
        places[name] = slice(start, start + parameters[name].numel())
        start = places[name].stop
    return places


def _problem_of(model: object, optimizer: object) -> str | None:
    if not isinstance(model, nn.Module):
        return f"coordinate(...) takes a module, got {type(model).__name__}"
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return "coordinate(...) takes the place of DistributedDataParallel: pass the model itself, ddp.module"
    if hasattr(model, _ATTRIBUTE):
        return f"{type(model).__name__} is coordinated already: call close() of what coordinate(...) returned first"
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) or parameter.device.type != "cpu":
            kind = "a DTensor" if isinstance(parameter, DTensor) else f"on {parameter.device}"
            return (
                f"{name} is {kind}: whole parameters on CPUs are coordinated so far; use FSDP2 itself, or "
                f"DistributedDataParallel(find_unused_parameters=True)"
            )
    trained = set(_trained(model).values())
    if not trained:
        return f"{type(model).__name__} has no parameters that are trained"
    for name, module in model.named_modules():
        if comm_compat.expects_sparse_gradient(module):
            return (
                f"{name} makes sparse gradients: take sparse=False, or shard_embeddings(model, ...) of ddp_hooks, "
                f"which reduces them by rows"
            )
    if optimizer is None:
        return None
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"optimizer must be None or a torch.optim.Optimizer, got {type(optimizer).__name__}"
    updated = {p for settings in optimizer.param_groups for p in settings["params"] if p.requires_grad}
    if not updated <= trained:
        return (
            f"the optimizer updates {len(updated - trained)} parameters that are not the model's, and would not be "
            f"reduced: make it over model.parameters()"
        )
    return None


def _problem_of_coordinator(
    coordinator: Coordinator | None, config: CoordinatorConfig | None, group: dist.ProcessGroup
) -> str | None:
    if coordinator is None:
        return None
    if config is not None:
        return "a coordinator has its own config: pass one of the two"
    ranks = getattr(coordinator, "ranks", None)
    if ranks != dist.get_process_group_ranks(group):
        return f"the coordinator has ranks {ranks}: pass the group that it was made of"
    return None


def _groups_of(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    num_groups: int | None,
    group_mb: float | None,
    groups: Sequence[Sequence[str]] | None,
) -> list[list[str]]:
    """In the order in which gradients usually come, the last parameters first; each of one type."""
    names = list(parameters)[::-1]
    if num_groups is not None and not whole(num_groups, 1):
        raise ValueError(f"num_groups must be None, or a whole number >= 1, got {num_groups!r}")
    if group_mb is not None and not positive(group_mb):
        raise ValueError(f"group_mb must be None, or > 0 and finite, got {group_mb!r}")
    if group_mb is not None and (groups is not None or num_groups is not None):
        given = "groups" if groups is not None else "num_groups"
        raise ValueError(f"group_mb={group_mb!r} has no effect with {given}: leave it out")
    if groups is not None and num_groups is not None:
        raise ValueError("pass num_groups or groups, not both")
    if groups is not None:
        chosen = grouping.checked(groups, names)
        for names_of_one in chosen:
            dtypes = {parameters[name].dtype for name in names_of_one}
            if len(dtypes) > 1:
                raise ValueError(
                    f"the group of {names_of_one[0]} has parameters of {dtypes}: one type travels together"
                )
        return chosen
    if num_groups is not None:
        return [part for run in grouping.equal_counts(names, num_groups) for part in _of_one_dtype(run, parameters)]
    limit_mb = group_mb if group_mb is not None else _GROUP_MB
    kinds = {name: (branch_of(model, name), parameters[name].dtype) for name in names}
    return grouping.at_most_bytes({name: parameters[name].nbytes for name in names}, mebibytes(limit_mb), kinds)


def _of_one_dtype(names: Sequence[str], parameters: dict[str, nn.Parameter]) -> list[list[str]]:
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name in names:
        by_dtype.setdefault(parameters[name].dtype, []).append(name)
    return list(by_dtype.values())


def branch_of(model: nn.Module, name: str) -> str:
    """The part of the model that a parameter is used with: a child of the model, or of the innermost list in it."""
    path = name.split(".")[:-1]
    branch = ".".join(path[:1])
    for depth in range(1, len(path)):
        container = model.get_submodule(".".join(path[:depth]))
        if isinstance(container, nn.ModuleList | nn.ModuleDict):
            branch = ".".join(path[: depth + 1])
    return branch


def _trained_or_not(tensor: Tensor) -> str:
    return "trained" if tensor.requires_grad else "not trained"


@torch.no_grad()
def _begin_alike(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks the parameters and buffers of rank 0, in few messages."""
    source = dist.get_global_rank(group, 0)
    tensors = {str(index): each for index, each in enumerate((*model.parameters(), *model.buffers()))}
    nbytes = {name: each.numel() * each.element_size() for name, each in tensors.items()}
    for names in grouping.at_most_bytes(nbytes, mebibytes(_BROADCAST_MB)):
        message = torch.cat([_bytes_of(tensors[name]) for name in names])
        dist.broadcast(message, source, group=group)
        for name, part in zip(names, message.split([nbytes[name] for name in names]), strict=True):
            tensor = tensors[name]
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # aligned as its type needs it


def _bytes_of(tensor: Tensor) -> Tensor:
    """The elements, row by row whatever the strides, as bytes; (n * element size,)."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
