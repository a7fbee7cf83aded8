"""Agreement of ranks: the same settings everywhere, or the same error everywhere.

An error on one rank is a hang on the others, so a check that fails anywhere must raise everywhere, before any group
is made or gradient touched. In steady state ranks compare nothing. With ``DDP_HOOKS_VERIFY=1`` in the environment of
every process each lane sends a line of text before each piece of work, in P - 1 short messages.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import socket
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from ddp_hooks.comm.meeting import gather_objects
from ddp_hooks.comm.nodes import ranks_per_node
from ddp_hooks.comm.validation import see

VERIFY = "DDP_HOOKS_VERIFY"


def agree(
    entries: Mapping[str, object], problem: str | None, group: dist.ProcessGroup, subject: str, patience: object
) -> None:
    """Compare as :func:`compare` does; raise ValueError on every rank if any has a problem or entries differ."""
    found, difference = compare(entries, problem, group, subject, patience)
    if found is not None:
        raise ValueError(f"{found}{see('set-up-is-refused', quoted=found)}")
    if difference is not None:
        raise ValueError(f"{difference}{see('ranks-differ')}")


def agree_on_node_size(node_size: int | str | None, group: dist.ProcessGroup, subject: str, patience: object) -> int:
    """Return the ranks per node, 1 for one level, as given, or for ``"auto"`` as hosts' names tell; collective."""
    if isinstance(node_size, int) or node_size is None:
        return node_size or 1
    size = ranks_per_node(gather_objects(socket.gethostname(), group, subject, patience))
    return size if size is not None and size < dist.get_world_size(group) else 1


def compare(
    entries: Mapping[str, object], problem: str | None, group: dist.ProcessGroup, subject: str, patience: object
) -> tuple[str | None, str | None]:
    """Compare ``entries`` (name -> anything with a stable ``str``) and this rank's ``problem`` over all ranks.

    Sends a digest of 32 bytes per rank; the entries themselves travel only when digests differ. Messages say that ranks
    wait in ``subject``. ``patience`` has ``timeout_s`` and ``stall_warning_s``, as settings do.

    Returns the problem of some ranks or of all, or the first entry that differs, with its values and the ranks that
    hold each, in the same words on all ranks. Raises as :func:`~ddp_hooks.comm.gather_objects` does.
    """
    lines: dict[str, str] = {}
    for name, value in entries.items():
        if dataclasses.is_dataclass(value):  # so that a message names the field
            lines |= {f"{name}.{each.name}": str(getattr(value, each.name)) for each in dataclasses.fields(value)}
        else:
            lines[name] = str(value)
    lines[VERIFY] = os.environ.get(VERIFY) or "0"  # or some ranks would wait for others' lines
    digest = hashlib.sha256("\n".join(f"{k}={v}" for k, v in lines.items()).encode()).hexdigest()
    verdicts = gather_objects((problem, digest), group, subject, patience)
    ranks = dist.get_process_group_ranks(group)
    problems: dict[str, list[int]] = {}
    for rank, (found, _) in zip(ranks, verdicts, strict=True):
        if found is not None:
            problems.setdefault(found, []).append(rank)
    if problems:
        texts = [
            text if len(where) == len(verdicts) else f"on ranks {where}: {text}"
            for text, where in problems.items()
        ]
        return "; ".join(texts), None
    if len({digest for _, digest in verdicts}) > 1:
        found = first_difference(gather_objects(lines, group, subject, patience), ranks)
        return None, f"{subject} differs between ranks: {found}"
    return None, None


def first_difference(lines_by_rank: list[dict[str, str]], ranks: Sequence[int]) -> str:
    """Return a sentence on the first entry whose value differs, with the ranks that hold each value."""
    for name in dict.fromkeys(name for lines in lines_by_rank for name in lines):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, lines in zip(ranks, lines_by_rank, strict=True):
            ranks_by_value.setdefault(lines.get(name, "(absent)"), []).append(rank)
        if len(ranks_by_value) > 1:
            sides = ", ".join(f"{value} on ranks {ranks}" for value, ranks in ranks_by_value.items())
            return f"{name} is {sides}; make them equal"
    return "the same entries come in another order"


def is_checking() -> bool:
    """Return True if the environment asks for a comparison of every collective."""
    return os.environ.get(VERIFY, "0") not in ("", "0")
