"""Requests of this rank with their tensors, and the decisions of all ranks about them."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_hooks.comm import Round, ThreadWork
from ddp_hooks.coordination.request import Request

_events = threading.Lock()  # of all agreements: few threads wait at a time


class Agreement:
    """Decision of all ranks about one request: work that moves it, or an error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = False  # the result is there, so that a wait returns at once
        self.is_decided = False
        self._event: threading.Event | None = None  # of the threads that wait; most agreements have none
        self.work: ThreadWork | None = None
        self._error: Exception | None = None

    @property
    def error(self) -> Exception | None:
        """Error that a wait would raise at once."""
        return self._error if self._error is not None or self.work is None else self.work.error_within(0)

    def decide(self, work: ThreadWork | None = None, error: Exception | None = None) -> None:
        """Wake threads that wait; without work and error the result is there."""
        self.work, self._error = work, error
        if work is None and error is None:
            self.done = True
        with _events:
            self.is_decided = True
        if self._event is not None:
            self._event.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the decision; return False if there is none after ``seconds``."""
        with _events:
            if self.is_decided:
                return True
            self._event = self._event or threading.Event()
        return self._event.wait(seconds)


@dataclass
class Submission:
    """A request with its tensors; times are those of ``time.perf_counter()``."""

    request: Request
    tensors: list[Tensor]  # changed in place by all-reduces and broadcasts
    agreement: Agreement
    began_s: float  # of a group: its first member
    asked_s: float
    flags: int = 0  # bits of a request for "any"
    algorithm: Generator[Round, None, Tensor | None] | None = None  # moves the tensors, and may return a result
    after: Sequence[Agreement] = ()  # other ranks are told of the request when these are done
    result: Tensor | None = None  # if it is not a tensor of the caller
    agreed_s: float = 0.0
    started_s: float = 0.0
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
    kind: str  # settings that all members have
    began_s: float
    warned_s: float = 0.0
    members: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor, kind: str) -> None:
        """Add a member; raises ValueError for a member that is there, or differs from the first one."""
        group = self.agreement.name
        if name in self.members:
            raise ValueError(f"{name} was asked for already, and {group} is not complete: wait for it first")
        if kind != self.kind:
            raise ValueError(
                f"{name} was asked for with {kind}, and others of {group} with {self.kind}: a group has one of each"
            )
        self.members[name] = tensor
