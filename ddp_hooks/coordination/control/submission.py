"""Requests of this rank with their tensors, and the two ways in which they wait before other ranks are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, LaneTimeout, Work, see
from ddp_hooks.coordination.handle import Agreement, Handle, error_of
from ddp_hooks.coordination.request import Request


@dataclass
class Submission:
    """A request with its tensors; times are those of ``time.perf_counter()``."""

    request: Request
    tensors: list[Tensor]  # changed in place by all-reduces and broadcasts
    agreement: Agreement
    splits: list[int] = field(default_factory=list)  # of an all-to-all: numbers of rows by rank
    flags: int = 0  # bits of a request for "any"
    algorithm: Algorithm | None = None  # of an exchange
    result: Tensor | None = None  # if it is not a tensor of the caller
    began_s: float = 0.0
    asked_s: float = 0.0
    agreed_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0
    warned_s: float = 0.0  # last warning about missing ranks

    @property
    def output(self) -> Tensor:
        """Result for the caller; empty after an exchange."""
        if self.result is not None:
            return self.result
        return self.tensors[0] if self.tensors else torch.empty(0)


@dataclass
class PartialGroup:
    """A group of which some members are there; the first member decides how the group is reduced."""

    names: Sequence[str]  # of all members
    agreement: Agreement
    mean: bool
    priority: int
    dtype: torch.dtype
    began_s: float
    warned_s: float = 0.0
    members: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True if all members are there."""
        return len(self.members) == len(self.names)

    @property
    def lacking(self) -> list[str]:
        """Names of the members that are missing."""
        return [name for name in self.names if name not in self.members]

    def add(self, name: str, tensor: Tensor, mean: bool, priority: int) -> None:
        """Add a member; raises ValueError for a member that is there, or differs from the first one."""
        group = self.agreement.name
        if name in self.members:
            raise ValueError(f"{name} was asked for already, and {group} is not complete: wait for it first")
        if (mean, priority, tensor.dtype) != (self.mean, self.priority, self.dtype):
            raise ValueError(
                f"{name} was asked for with mean={mean}, priority={priority}, {tensor.dtype}, and others of "
                f"{group} with mean={self.mean}, priority={self.priority}, {self.dtype}: a group has one of each"
            )
        self.members[name] = tensor


@dataclass
class Blocked:
    """A submission that follows other work: other ranks are told of it when that work is done."""

    submission: Submission
    after: Sequence[Work | Handle]

    @property
    def done(self) -> bool:
        """True if the other work is done."""
        return all(work.done for work in self.after)

    def failure(self, now_s: float, timeout_s: float) -> Exception | None:
        """Return the reason why the submission can never leave."""
        for work in self.after:
            if (error := error_of(work)) is not None:
                return error
        name, began_s = self.submission.request.name, self.submission.began_s
        if now_s < began_s + timeout_s:
            return None
        lacking, waited_s = [work.label for work in self.after if not work.done], now_s - began_s
        return LaneTimeout(f"{name} was to follow {lacking}, not done after {waited_s:.0f} s{see('a-wait-timed-out')}")
