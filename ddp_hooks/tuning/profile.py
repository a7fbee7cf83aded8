"""JSON file with the results of searches, for the next run of the same model on the same link."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import filelock
from torch import Tensor

from ddp_hooks.comm import Lanes

logger = logging.getLogger("ddp_hooks")

Role: TypeAlias = Literal["search", "check"]

_VERSION = 2
_LOCK_S = 10.0  # other jobs need milliseconds
_SAME_LINK = 2.0  # two measurements of one link may differ by this factor


@dataclass(frozen=True)
class Trial:
    mb: float
    num_groups: int
    step_s: float  # median seconds per step, of the slowest rank
    role: Role = "search"  # "check": compared with the default after the search
    trial_s: float = 0.0  # duration of the whole trial, including the decision before it


@dataclass(frozen=True)
class Job:
    """Conditions under which a result is valid."""

    hook: str
    model: str  # digest of the parameters' names, shapes and dtypes
    world_size: int
    backend: str
    settings: str  # all other settings that change the duration of a step
    link_mb_s: float | None  # measured goodput, in MB per second; None: not measured

    def difference(self, other: Job) -> str | None:
        """Return the reason why a profile of ``other`` is not valid here; None if it is valid."""
        for name in ("hook", "model", "world_size", "backend", "settings"):
            if getattr(self, name) != getattr(other, name):
                return f"{name} was {getattr(other, name)}, is {getattr(self, name)}"
        mine, theirs = self.link_mb_s, other.link_mb_s
        if (mine is None) != (theirs is None):
            return f"the link was {_rate(theirs)}, is {_rate(mine)}"
        if mine is not None and theirs is not None and not 1 / _SAME_LINK <= mine / theirs <= _SAME_LINK:
            return f"the link carried {_rate(theirs)}, carries {_rate(mine)}"
        return None


@dataclass(frozen=True)
class Entry:
    job: Job
    trials: tuple[Trial, ...]
    chosen: float | None  # size; None: the search has not ended

    def packed(self) -> dict[str, Any]:
        return {"job": asdict(self.job), "trials": [asdict(trial) for trial in self.trials], "chosen": self.chosen}

    @staticmethod
    def unpacked(packed: dict[str, Any]) -> Entry:
        """Invert :meth:`packed`; raise ValueError, KeyError or TypeError if this is not the data of an entry."""
        trials = tuple(Trial(**trial) for trial in packed["trials"])
        for trial in trials:
            if not (trial.mb > 0 and trial.step_s > 0 and trial.role in ("search", "check")):
                raise ValueError(f"not a trial: {trial}")
        chosen = packed["chosen"]
        if chosen is not None and not chosen > 0:
            raise ValueError(f"not a size: {chosen}")
        job = Job(**packed["job"])
        if job.link_mb_s is not None and not job.link_mb_s > 0:
            raise ValueError(f"not a link: {job.link_mb_s}")
        return Entry(job, trials, chosen)


class Profile:
    """File of entries. A file that cannot be read or written is logged and otherwise ignored."""

    def __init__(self, path: str | os.PathLike[str], entry_type: type[Entry] = Entry) -> None:
        self._entry_type = entry_type
        self.path = Path(os.path.expanduser(path))  # Path.expanduser() raises where there is no home

    def find(self, job: Job) -> Entry | None:
        entries = self._read()
        for entry in entries:
            if entry.job.difference(job) is None:
                return entry
        related = [entry for entry in entries if (entry.job.hook, entry.job.model) == (job.hook, job.model)]
        if related:
            logger.info(f"{self.path} knows this model, but {job.difference(related[-1].job)}: searching anew")
        return None

    def store(self, entry: Entry) -> None:
        """Replace the entry of its job; other runs see the old file or the new one."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                others = [other for other in self._read(quietly=True) if other.job.difference(entry.job) is not None]
                packed = {"version": _VERSION, "entries": [other.packed() for other in [*others, entry]]}
                with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".tmp", delete=False) as file:
                    json.dump(packed, file, indent=1)
                os.replace(file.name, self.path)
        except OSError as error:
            logger.warning("the tuner's profile %s was not written, so the next run begins anew: %s", self.path, error)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock if there are locks and nobody keeps it for long."""
        lock = filelock.FileLock(f"{self.path}.lock", timeout=_LOCK_S)
        try:
            lock.acquire()
        except (OSError, NotImplementedError, filelock.Timeout) as error:
            logger.info("%s is written without a lock: %s", self.path, error)
        try:
            yield
        finally:
            lock.release()

    def _read(self, quietly: bool = False) -> Sequence[Entry]:
        try:
            packed = json.loads(self.path.read_text())
            if packed["version"] != _VERSION:
                raise ValueError(f"version {packed['version']}, not {_VERSION}")
            return [self._entry_type.unpacked(entry) for entry in packed["entries"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            if not quietly:
                logger.warning("%s is of no use, so it is ignored, and replaced: %r", self.path, error)
            return []


def job_of(
    hook: str,
    parameters: Sequence[Tensor],
    names: Sequence[str],
    lanes: Lanes,
    settings: str,
    goodput_bytes_s: float | None,
) -> Job:
    lines = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in zip(names, parameters, strict=True)]
    model = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    link_mb_s = goodput_bytes_s / 1e6 if goodput_bytes_s is not None else None
    return Job(hook, model, lanes.world_size, lanes.backend, settings, link_mb_s)


def _rate(mb_s: float | None) -> str:
    return f"{mb_s:.0f} MB/s" if mb_s is not None else "not measured"
