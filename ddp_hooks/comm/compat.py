"""The names that torch changed between 2.11 and 2.14, and every private seam that this package touches.

Anything here may move with a torch release; nothing outside this module imports a private name.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Its functions have the default group of the moment of import as default arguments. DDP imports it, usually after
# init_process_group(), and the group then outlives destroy_process_group() with its threads; one that is busy when
# the interpreter ends may abort the process. Imported here, before there is a group, it keeps nothing alive.
import torch.distributed.nn.functional
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from ddp_hooks.comm.advice import see
from ddp_hooks.comm.ending import Undo

_num_groups: Counter[tuple[int, ...]] = Counter()  # that were made of these ranks
_NOBODYS_TAG = (1 << 31) - 1
LETTER_TAG = (1 << 31) - 2
"""Of messages about failures; tags of lanes are lower."""
NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl
"""As ``__torch_function__`` of a subclass of Tensor: functions see it as a tensor."""
_COMPILED_CALLS = ("compile_wrapper", "_fn")

# torch asks this before it sets a converted gradient's .data.
DATA_MAY_BE_SET: tuple[Any, ...] = (torch._has_compatible_shallow_copy_type,)
NETWORK_ERRORS: tuple[type[Exception], ...] = (dist.DistNetworkError, dist.DistBackendError)


def reduce_scatter_single(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
    """``dist.reduce_scatter_single`` (torch 2.13), ``reduce_scatter_tensor`` before; sums, blocking in stream order."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(output, input, group=group)


def all_gather_single(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> None:
    """``dist.all_gather_single`` (torch 2.13), ``all_gather_into_tensor`` before; blocking in stream order."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    function(output, input, group=group)


def new_group_like(group: dist.ProcessGroup, backend: str, timeout_s: float, name: str) -> dist.ProcessGroup:
    """A further group of the same ranks; collective over them alone."""
    ranks = dist.get_process_group_ranks(group)
    with _names_that_are_used_once():
        created = dist.new_group(
            ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
            backend=backend,
            use_local_synchronization=len(ranks) != dist.get_world_size(),
            group_desc=name,
        )
    assert isinstance(created, dist.ProcessGroup)
    return created


@contextmanager
def _names_that_are_used_once() -> Iterator[None]:
    """Before torch 2.14, groups that only their ranks know of are named by how many groups there are at the time.

    So one that is made when another is gone meets what that has left in the store, and waits for it for ever.
    """
    module: Any = dist.distributed_c10d
    name_of = getattr(module, "_hash_ranks_to_str", None)
    if name_of is None or torch.torch_version.TorchVersion(torch.__version__) >= "2.14":
        yield
        return

    def name_once(ranks: Sequence[int]) -> str:
        _num_groups[tuple(ranks)] += 1  # the same on all of them, as they make each together
        text = f"ddp_hooks {list(ranks)} {_num_groups[tuple(ranks)]}"
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    module._hash_ranks_to_str = name_once
    try:
        yield
    finally:
        module._hash_ranks_to_str = name_of


def destroy_group(group: dist.ProcessGroup) -> None:
    """Give a group's connections back, unless the whole of torch.distributed has gone before."""
    if dist.is_initialized():
        dist.destroy_process_group(group)


def abort_group(group: dist.ProcessGroup) -> None:
    """Give a group's connections back without waiting for other ranks, and cut short what is under way."""
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group(group)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that ``group`` uses for tensors on ``device``, also where it has one per kind of device."""
    for entry in dist.get_backend_config(group).split(","):
        kind, _, backend = entry.rpartition(":")
        if kind in ("", device.type):
            return backend
    return dist.get_backend(group)


def default_store() -> Any:
    """The rendezvous store of the default group."""
    return dist.distributed_c10d._get_default_store()


def serves(store: Any) -> bool:
    """Whether this process, if it ends, may take the store along: torchrun's agent keeps it, where there is one."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return isinstance(store, dist.TCPStore) and dist.get_rank() == 0 and not agents


def get_all(store: Any, keys: Sequence[str]) -> list[bytes]:
    """The values of keys that are there; in one request, where the store has it."""
    found: list[bytes] = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    return found


def connection_is_broken(group: dist.ProcessGroup, peer: int) -> bool:
    """Whether gloo has lost the connection to the group's rank ``peer``; False where gloo does not carry the group.

    It says so to whoever posts a receive. What is posted here meets no message, as nobody sends with such a tag, and
    gloo forgets it with its memory.
    """
    if backend_of(group, torch.device("cpu")) != "gloo":
        return False
    try:
        group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NOBODYS_TAG)
    except RuntimeError:
        return True
    return False


def queue_engine_callback(function: Any) -> None:
    """Run ``function`` when the running backward pass ends; only valid inside one."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def queue_after_hooks(function: Callable[[], None], depth: int = 6) -> None:
    """Likewise, after DDP's own end of the backward and what communication hooks do at theirs.

    They queue that from callbacks, up to four deep, and what is queued from a callback runs after all before it.
    """
    queue_engine_callback(function if depth == 1 else lambda: queue_after_hooks(function, depth - 1))


def backward_reaches_leaves() -> bool:
    """In a hook of a tensor: whether this is a backward, and not ``torch.autograd.grad()``, which fills no ``.grad``.

    A backward is about to add to the gradient of some leaf that the tensor depends on; mostly the first that is found.
    """
    waiting: list[torch.autograd.graph.Node | None] = [torch._C._current_autograd_node()]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = [function for function, _ in node.next_functions]
        if not following:
            try:
                if torch._C._will_engine_execute_node(node):
                    return True
            except RuntimeError:
                pass  # of autograd.grad(), about a leaf whose gradient it returns
        waiting += following
    return False


def in_backward() -> bool:
    """Whether this thread is inside of a backward pass."""
    return torch._C._current_graph_task_id() != -1


def increment_versions(tensors: Iterable[Tensor]) -> None:
    """Tell autograd that the tensors' values changed, so that graphs built before raise in their backward."""
    torch.autograd.graph.increment_version(list(tensors))


def expects_sparse_gradient(module: torch.nn.Module) -> bool:
    """Whether DDP will make a sparse bucket for the module's weight (it decides by type and attribute)."""
    return isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse


def ignored_parameter_names(ddp: DistributedDataParallel) -> set[str]:
    """The parameters that DDP was told to leave alone."""
    return set(getattr(ddp, "parameters_to_ignore", ()))


def problem_of_reduced_set(ddp: DistributedDataParallel, state: str) -> str | None:
    """Why the parameters that DDP reduces are not those that the model trains now; None if they are.

    DDP's reducer keeps the list that it was given when the model was wrapped.

    Args:
        ddp: the model.
        state: that is being made, for the message.
    """
    ignored = ignored_parameter_names(ddp)
    names = {id(p): name for name, p in ddp.module.named_parameters() if name not in ignored}
    trained = {id(p) for p in ddp.module.parameters() if p.requires_grad and id(p) in names}
    if ddp._get_ddp_logging_data()["num_parameter_tensors"] == len(trained):  # costs nothing, and is nearly always so
        return None
    reduced = {id(p) for bucket in ddp.reducer._get_zeros_like_grad_buckets() for p in bucket.parameters()}
    frozen = [name for key, name in names.items() if key in reduced and key not in trained]
    added = [name for key, name in names.items() if key in trained and key not in reduced]
    if frozen:
        return (
            f"{shortened(frozen)} was frozen after the model was wrapped in DistributedDataParallel, which goes on to "
            f"reduce it: freeze it before wrapping, or after creating {state}, with find_unused_parameters=True"
        )
    if added:
        return (
            f"{shortened(added)} was added, thawed or parametrised after the model was wrapped in "
            f"DistributedDataParallel, which does not reduce it: do so before wrapping"
        )
    return None


def shortened(names: Sequence[str], limit: int = 5) -> str:
    """The first names of a list, for a message."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


_left_to_another: weakref.WeakKeyDictionary[DistributedDataParallel, set[str]] = weakref.WeakKeyDictionary()


def leave_to_another(ddp: DistributedDataParallel, names: set[str]) -> None:
    """A hook that hands buckets on keeps those of these parameters to itself."""
    _left_to_another[ddp] = names


def sparse_parameters(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The parameters for which DDP makes sparse buckets, by name."""
    sparse = {id(module.weight) for module in ddp.module.modules() if expects_sparse_gradient(module)}
    return {name: p for name, p in ddp.module.named_parameters() if id(p) in sparse and p.requires_grad}


def managed_parameters(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The parameters that DDP reduces, by name; shared ones once; without those left to another hook."""
    ignored = ignored_parameter_names(ddp) | _left_to_another.get(ddp, set())
    return {
        name: parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


def first_managed_sparse_parameter(ddp: DistributedDataParallel) -> str | None:
    """A parameter with a sparse bucket that is left to no other hook, by name; None if there is none."""
    managed = managed_parameters(ddp)
    return next((name for name in sparse_parameters(ddp) if name in managed), None)


def ddp_in_forward() -> DistributedDataParallel | None:
    """The DDP module whose forward runs, or None."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    return ddp if isinstance(ddp, DistributedDataParallel) else None


def ddp_prepares_forward() -> bool:
    """Whether DDP, on this thread, is about to call its module; it may make new buckets then, and copy gradients."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == DistributedDataParallel.__module__ and (
            frame.f_code.co_name == "_pre_forward"
        ):
            return True
        frame = frame.f_back
    return False


def uses_mixed_precision(ddp: DistributedDataParallel) -> bool:
    """Whether DDP casts parameters and gradients by itself, which takes the one slot for communication hooks."""
    return getattr(ddp, "mixed_precision", None) is not None


def unhooked_step(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer's own ``step``, without hooks; an unbound function."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks before and after an optimizer's step, by the ids of their handles, in the order in which they run."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def with_closure(
    args: Any, kwargs: Any, wrap: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> tuple[Any, Any] | None:
    """What a step pre-hook returns to have the closure of ``step()`` wrapped; None if there is no closure."""
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": wrap(kwargs["closure"])}
    if len(args) > 1 and args[1] is not None:
        return (args[0], wrap(args[1]), *args[2:]), kwargs
    return None


def evaluated_once(closure: Callable[[], Any], then: Callable[[], None], who: str) -> Callable[[], Any]:
    """The user's closure, followed by ``then``; the second evaluation in one step raises.

    Args:
        who: cannot take more than one, for the message.
    """
    evaluations = 0

    def evaluate() -> Any:
        nonlocal evaluations
        evaluations += 1
        if evaluations > 1:
            raise RuntimeError(
                f"the optimizer evaluated its closure more than once in one step; {who} one evaluation: use an "
                f"optimizer that needs one, such as SGD or AdamW{see('how-step-is-called')}"
            )
        loss = closure()
        then()
        return loss

    return evaluate


def is_inner_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step hook of ``optimizer`` runs for a ``super().step()`` inside of its ``step()``.

    torch wraps the ``step`` of every class of which there was an instance, so hooks may run for each level.
    """
    calls = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        args = frame.f_locals.get("args") if frame.f_globals.get("__name__") == "torch.optim.optimizer" else None
        if args and args[0] is optimizer and frame.f_code.co_name == "wrapper":
            calls += 1
        frame = frame.f_back
    return calls > 1


def inside_grad_scaler() -> bool:
    """Whether what runs was called by a gradient scaler's ``step``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler" and frame.f_code.co_name == "_maybe_opt_step":
            return True
        frame = frame.f_back
    return False


class StateDictCall(NamedTuple):
    """Call of ``torch.distributed.checkpoint.state_dict`` that asks a model or an optimizer for its ``state_dict``."""

    name: str  # of the function that the user has called
    loads: bool  # to load another, so that it looks for shapes and devices only
    gathers: bool  # it wants whole tensors
    on_first_rank: bool  # and those on the first rank only

    @staticmethod
    def current() -> StateDictCall | None:
        """The call that is under way, or None."""
        frame = _frame_of_state_dict_api("_get_optim_state_dict", "_get_model_state_dict")
        info = frame.f_locals.get("info") if frame is not None else None
        if frame is None or info is None:
            return None
        loads = _frame_of_state_dict_api("_load_optim_state_dict") is not None
        return StateDictCall(_public_name(frame), loads, info.full_state_dict and not loads, info.cpu_offload)


def optimizers_beside_model() -> tuple[str, tuple[torch.optim.Optimizer, ...]]:
    """Return ``get_state_dict`` or ``set_state_dict`` if one of them begins, and the optimizers that it was given."""
    frame = _frame_of_state_dict_api("_verify_options")
    if frame is None or frame.f_locals.get("optim_only", True):
        return "", ()
    return _public_name(frame), tuple(frame.f_locals.get("optims", ()))


def _public_name(frame: FrameType) -> str:
    """Return the name of the function of ``torch.distributed.checkpoint.state_dict`` that the user has called."""
    return (_frame_of_state_dict_api(*frame.f_globals["__all__"]) or frame).f_code.co_name


def unflattens_state() -> bool:
    """Whether ``torch.distributed.checkpoint.state_dict`` asks for the names of an optimizer's entries."""
    return _frame_of_state_dict_api("_unflatten_optim_state_dict") is not None


def makes_state(kwargs: Mapping[str, Any]) -> bool:
    """Whether a step is one that ``torch.distributed.checkpoint.state_dict`` makes for an optimizer without state.

    Gradients are zeros in it, and learning rates 0.
    """
    return "closure" in kwargs and _frame_of_state_dict_api("_init_optim_state") is not None


def inside_making_state() -> bool:
    """Whether such a step runs, or what torch does around it: it also zeroes gradients."""
    return _frame_of_state_dict_api("_init_optim_state") is not None


def undo_making_state(optimizer: torch.optim.Optimizer) -> None:
    """Such a step is about to raise: restore gradients and learning rates, which torch would leave at 0."""
    frame = _frame_of_state_dict_api("_init_optim_state")
    if frame is None or frame.f_locals.get("optim") is not optimizer:
        return
    rates = list(frame.f_locals.get("lrs", ()))
    for group in optimizer.param_groups:
        if rates and "lr" in group:
            group["lr"] = rates.pop(0)
        for parameter in group["params"]:
            parameter.grad = None


def inside_state_dict_api() -> bool:
    """Whether ``torch.distributed.checkpoint.state_dict`` asks, which all ranks call together."""
    return _frame_of_state_dict_api() is not None


def _frame_of_state_dict_api(*functions: str) -> FrameType | None:
    """The innermost frame of one of these functions of the module, or of any function if none is named."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (
            (not functions or frame.f_code.co_name in functions)
            and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        ):
            return frame
        frame = frame.f_back
    return None


def inside_another_backward() -> bool:
    """Whether the backward that runs was called from inside of another one, on this thread."""
    calls, frame = 0, sys._getframe(1)
    while frame is not None and calls < 2:
        if frame.f_globals.get("__name__") == "torch.autograd.graph" and frame.f_code.co_name == "_engine_run_backward":
            calls += 1
        frame = frame.f_back  # type: ignore[assignment]
    return calls > 1


def inside_reentrant_checkpoint() -> bool:
    """Whether what runs was called by the backward inside of a backward that ``use_reentrant=True`` makes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint" and frame.f_code.co_name == "backward":
            return True
        frame = frame.f_back
    return False


def places_gradients_one_by_one(ddp: DistributedDataParallel) -> bool:
    """Whether a gradient lies in its bucket as soon as DDP's hook for it has run."""
    return not (ddp.static_graph or getattr(ddp, "batched_grad_copy", False))


def inside_compiled_region() -> bool:
    """Whether what runs was called, at any depth, through something that ``torch.compile`` returned."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._dynamo.eval_frame" and frame.f_code.co_name in _COMPILED_CALLS:
            owner = frame.f_locals.get("self")
            if type(owner).__name__ != "DisableContext":
                return True
        frame = frame.f_back
    return False


def let_graphs_know_of_hooks() -> None:
    """Keep graphs that were made of modules without hooks from being used for modules that have some.

    By default they are, also where the hooks came later or the other module is of the same class only. What has been
    compiled so far does not check, so it will be compiled again.
    """
    config = torch._dynamo.config
    if config.skip_nnmodule_hook_guards:
        config.skip_nnmodule_hook_guards = False
        torch._dynamo.reset()


def compiler_looks() -> bool:
    """Whether it is the compiler that asks, which describes everything that it meets, also gradients."""
    return torch._guards.TracingContext.try_get() is not None


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note(note)`` from Python 3.11 on."""
    if sys.version_info >= (3, 11):
        error.add_note(note)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calling the module runs graphs, as far as the module itself shows it."""
    if module.__dict__.get("_compiled_call_impl") is not None:
        return True
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None and isinstance(module, compiler.OptimizedModule):
        return True
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


def is_scripted(module: torch.nn.Module) -> bool:
    """Whether the module's code runs in TorchScript's interpreter."""
    return isinstance(module, torch.jit.ScriptModule)


def before_call(module: torch.nn.Module, hook: Callable[..., None]) -> Undo:
    """Call ``hook(module, args)`` before the module's code begins, outside of any graph; returns what removes it."""
    # The method of nn.Module: scripted modules refuse hooks, but Python calls them through nn.Module's __call__.
    handle = torch.nn.Module.register_forward_pre_hook(module, hook, prepend=True)
    compiled = module.__dict__.get("_compiled_call_impl")
    if compiled is None:
        return Undo(handle.remove)

    def wait_and_call(*args: Any, **kwargs: Any) -> Any:  # a compiled __call__ contains the hooks
        hook(module, args)
        return compiled(*args, **kwargs)

    module._compiled_call_impl = wait_and_call

    def undo() -> None:
        handle.remove()
        if module.__dict__.get("_compiled_call_impl") is wait_and_call:
            module._compiled_call_impl = compiled

    return Undo(undo)


def before_transforms(wait: Callable[[Tensor], None]) -> None:
    """Call ``wait(tensor)`` before ``torch.func``'s transforms wrap a tensor: they ask no ``__torch_function__``."""
    from torch._functorch import eager_transforms, vmap

    for module, name in ((eager_transforms, "_wrap_for_grad"), (vmap, "_add_batch_dim")):
        wrap = getattr(module, name)
        if not hasattr(wrap, "_waits"):

            def wait_and_wrap(tensor: Tensor, *args: Any, wrap: Callable[..., Tensor] = wrap) -> Tensor:
                wait(tensor)
                return wrap(tensor, *args)

            wait_and_wrap._waits = True  # type: ignore[attr-defined]
            setattr(module, name, wait_and_wrap)


def without_overrides() -> AbstractContextManager[Any]:
    """Let functions run on tensors of all classes as on plain ones: no ``__torch_function__`` is asked."""
    return torch._C.DisableTorchFunctionSubclass()


def is_observed() -> bool:
    """Return True if modes, transforms of functions or a tracer see the operations that this thread runs."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or _len_torch_dispatch_stack_pre_dispatch() > 0
    )


def makes_parameter(frame: FrameType | None) -> bool:
    """Return True if ``frame`` runs ``nn.Parameter(tensor)``, which compares classes before and after ``detach()``."""
    return frame is not None and frame.f_code is torch.nn.Parameter.__new__.__code__


@contextmanager
def unobserved() -> Iterator[None]:
    """Run operations that no mode, no transform of functions and no tracer of the caller sees or changes."""
    tracing = torch._C._get_tracing_state()
    modes = []
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        while torch._C._len_torch_function_stack():
            modes.append(torch._C._pop_torch_function_stack())
        with temporarily_clear_interpreter_stack(), _disable_current_modes():
            yield
    finally:
        while modes:
            torch._C._push_on_torch_function_stack(modes.pop())
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def optimizes_in_backward(parameter: Tensor) -> bool:
    """Whether ``_apply_optimizer_in_backward`` was applied to the parameter."""
    return bool(getattr(parameter, "_in_backward_optimizers", None))


def comm_hook_registered(ddp: DistributedDataParallel) -> bool:
    """Whether the module already has its one communication hook."""
    return bool(getattr(ddp, "_comm_hooks", []))


def delays_all_reduce(ddp: DistributedDataParallel) -> bool:
    """Whether some parameters were set to bypass communication hooks."""
    return bool(getattr(ddp, "_delay_all_reduce_params", None))


def calls_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step()`` calls hooks, for which ``Optimizer.__init__`` must have run."""
    return hasattr(optimizer, "_optimizer_state_dict_pre_hooks") and getattr(type(optimizer).step, "hooked", False)
