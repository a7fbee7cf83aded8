"""The autograd engine and the backward that runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from ddp_hooks.comm.torch_compat import frames_of


def queue_engine_callback(function: Callable[[], None]) -> None:
    """Run ``function`` when the running backward ends; only valid inside of one."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def queue_after_hooks(function: Callable[[], None], depth: int = 6) -> None:
    """Run ``function`` after DDP's own callback at the end of the backward, and after those of communication hooks.

    Communication hooks queue callbacks from callbacks, up to four deep. A callback queued from a callback runs after
    all callbacks queued before it.
    """
    queue_engine_callback(function if depth == 1 else lambda: queue_after_hooks(function, depth - 1))


def backward_reaches_leaves() -> bool:
    """Return True if the tensor hook that asks runs in a backward, False in ``torch.autograd.grad()``.

    A backward is about to add to the gradient of some leaf that the hook's tensor depends on: mostly the first found.
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
                pass  # autograd.grad() raises for a leaf whose gradient it returns
        waiting += following
    return False


def current_backward() -> int:
    """Return a number of the backward that this thread runs, -1 for none."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return True if this thread runs a backward."""
    return current_backward() != -1


def inside_another_backward() -> bool:
    """Return True if the backward that runs was called from inside of another one, on this thread."""
    runs = frames_of("torch.autograd.graph", "_engine_run_backward")
    return len(list(itertools.islice(runs, 2))) > 1
