"""Process groups, their backends and the rendezvous store."""

from __future__ import annotations

import datetime
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

# Its functions have the default group of the moment of import as default arguments. DDP imports it, usually after
# init_process_group(), and the group then outlives destroy_process_group() with its threads; one that is busy when
# the interpreter ends may abort the process. Imported here, before there is a group, it keeps nothing alive.
import torch.distributed.nn.functional

NOTICE_TAG = (1 << 31) - 2
"""Tag of messages about failures; tags of lanes are lower."""
_NOBODYS_TAG = (1 << 31) - 1
# Their names since torch 2.13, and before.
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_num_groups: Counter[tuple[int, ...]] = Counter()  # groups made of these ranks


def new_group_like(group: dist.ProcessGroup, backend: str, timeout_s: float, name: str) -> dist.ProcessGroup:
    """Make another group of the same ranks, in their order; collective over them alone."""
    ranks = dist.get_process_group_ranks(group)
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}  # not in every torch
    is_local = len(ranks) != dist.get_world_size()  # no other rank knows of it
    with _made_unseen() if is_local else nullcontext():
        created = dist.new_group(
            ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
            backend=backend,
            use_local_synchronization=is_local,
            group_desc=name,
            **order,
        )
    assert isinstance(created, dist.ProcessGroup)
    return created


@contextmanager
def _made_unseen() -> Iterator[None]:
    """Make groups that only their ranks know of by names that none has had, and do not count them.

    torch names groups by how many a rank has made. Where others have made fewer, they would look for the next group
    under another name, and wait for ever. Before torch 2.14 a group gets the name of one that is gone, and meets what
    that has left in the store.
    """
    module: Any = dist.distributed_c10d
    name_of, count = module._hash_ranks_to_str, module._world.group_count

    def name_once(ranks: Sequence[int]) -> str:
        _num_groups[tuple(ranks)] += 1  # the same on all of them, as they make each together
        text = f"ddp_hooks {list(ranks)} {_num_groups[tuple(ranks)]}"
        return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    module._hash_ranks_to_str = name_once
    try:
        yield
    finally:
        module._hash_ranks_to_str, module._world.group_count = name_of, count


def destroy_group(group: dist.ProcessGroup, abort: bool = False) -> None:
    """Give a group's connections back; with ``abort`` wait for no rank, and cut short what is under way."""
    if not dist.is_initialized():  # the whole of torch.distributed has gone before
        return
    if abort:
        dist.distributed_c10d._abort_process_group(group)
    else:
        dist.destroy_process_group(group)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend that ``group`` uses for tensors on ``device``; a group may have one per kind of device."""
    for entry in dist.get_backend_config(group).split(","):
        kind, _, backend = entry.rpartition(":")
        if kind in ("", device.type):
            return backend
    return dist.get_backend(group)


def default_store() -> Any:
    """Return the rendezvous store of the default group."""
    return dist.distributed_c10d._get_default_store()


def serves(store: Any) -> bool:
    """Return True if the store ends with this process; torchrun's agent serves it where there is one."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return isinstance(store, dist.TCPStore) and dist.get_rank() == 0 and not agents


def connection_is_broken(group: dist.ProcessGroup, peer: int) -> bool:
    """Return True if gloo has lost the connection to the group's rank ``peer``; False where gloo does not carry it.

    gloo says so to whoever posts a receive. The receive that is posted here meets no message, as nobody sends with such
    a tag, and gloo forgets it with its memory.
    """
    if backend_of(group, torch.device("cpu")) != "gloo":
        return False
    try:
        group.recv([torch.empty(1, dtype=torch.uint8)], peer, _NOBODYS_TAG)
    except RuntimeError:
        return True
    return False
