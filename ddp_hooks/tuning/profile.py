"""What was found is kept in a JSON file, for the next run of the same model on the same link."""

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
from ddp_hooks.tuning.candidates import Setting

logger = logging.getLogger("ddp_hooks")

Role: TypeAlias = Literal["search", "check"]

_VERSION = 1
_LOCK_S = 10.0  # other jobs need milliseconds
_SAME_LINK = 2.0  # a few messages may find the same link faster or slower by this factor


@dataclass(frozen=True)
class Trial:
    """One setting that was measured.

    Args:
        mb, lanes: the setting.
        num_groups: groups that it made.
        step_s: median seconds per step, of the slowest rank.
        role: whether the search asked for it, or the check of what it found.
        trial_s: seconds that the whole trial took, with the choice before it.
    """

    mb: float
    lanes: int
    num_groups: int
    step_s: float
    role: Role = "search"
    trial_s: float = 0.0

    @property
    def setting(self) -> Setting:
        return Setting(self.mb, self.lanes)


@dataclass(frozen=True)
class Job:
    """What a profile is good for.

    Args:
        hook: whose groups were tuned.
        model: a digest of the parameters' names, shapes and types.
        world_size: ranks.
        backend: of their group.
        settings: what else the time of a step depends on, as text.
        link_mb_s: what the link carries, in MB per second, measured; None if it was not.
    """

    hook: str
    model: str
    world_size: int
    backend: str
    settings: str
    link_mb_s: float | None

    def difference(self, other: Job) -> str | None:
        """What makes a profile of ``other`` useless here, in words; None if nothing does."""
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
    """What is known of one job: the trials, and the setting that was chosen in the end, if it came to that."""

    job: Job
    trials: tuple[Trial, ...]
    chosen: Setting | None

    def packed(self) -> dict[str, Any]:
        """As plain data."""
        chosen = list(self.chosen) if self.chosen is not None else None
        return {"job": asdict(self.job), "trials": [asdict(trial) for trial in self.trials], "chosen": chosen}

    @staticmethod
    def unpacked(packed: dict[str, Any]) -> Entry:
        """The reverse of :meth:`packed`; raises ValueError, KeyError or TypeError if it is not that."""
        trials = tuple(Trial(**trial) for trial in packed["trials"])
        for trial in trials:
            if not (trial.mb > 0 and trial.step_s > 0 and trial.lanes >= 1 and trial.role in ("search", "check")):
                raise ValueError(f"not a trial: {trial}")
        chosen = packed["chosen"]
        setting = Setting(float(chosen[0]), int(chosen[1])) if chosen is not None else None
        if setting is not None and not (setting.mb > 0 and setting.lanes >= 1):
            raise ValueError(f"not a setting: {setting}")
        job = Job(**packed["job"])
        if job.link_mb_s is not None and not job.link_mb_s > 0:
            raise ValueError(f"not a link: {job.link_mb_s}")
        return Entry(job, trials, setting)


class Profile:
    """A file of entries; what cannot be read or written is reported, and does no harm."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.expanduser(path))  # Path's own raises where there is no home

    def find(self, job: Job) -> Entry | None:
        """The entry of ``job``, if there is one that is good for it."""
        entries = self._read()
        for entry in entries:
            if entry.job.difference(job) is None:
                return entry
        related = [entry for entry in entries if (entry.job.hook, entry.job.model) == (job.hook, job.model)]
        if related:
            logger.info(
                "%s knows this model, but %s: searching anew", self.path, job.difference(related[-1].job)
            )
        return None

    def store(self, entry: Entry) -> None:
        """Write the entry in the place of what was known of its job.

        Other runs see the old file or the new one, and wait for their turn to write theirs.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._turn():
                self._replace(entry)
        except OSError as error:
            logger.warning("the tuner's profile %s was not written, so the next run begins anew: %s", self.path, error)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Alone among those that write; where there are no locks, or one is held for long, all the same."""
        lock = filelock.FileLock(f"{self.path}.lock", timeout=_LOCK_S)
        try:
            lock.acquire()
        except (OSError, NotImplementedError, filelock.Timeout) as error:
            logger.info("%s is written without a lock: %s", self.path, error)
        try:
            yield
        finally:
            lock.release()

    def _replace(self, entry: Entry) -> None:
        others = [other for other in self._read(quietly=True) if other.job.difference(entry.job) is not None]
        packed = {"version": _VERSION, "entries": [other.packed() for other in [*others, entry]]}
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".tmp", delete=False) as file:
            json.dump(packed, file, indent=1)
        os.replace(file.name, self.path)

    def _read(self, quietly: bool = False) -> Sequence[Entry]:
        try:
            packed = json.loads(self.path.read_text())
            if packed["version"] != _VERSION:
                raise ValueError(f"version {packed['version']}, not {_VERSION}")
            return [Entry.unpacked(entry) for entry in packed["entries"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            if not quietly:
                logger.warning(
                    "the tuner's profile %s is of no use, so it is ignored, and replaced after the first trial: %s: %s",
                    self.path,
                    type(error).__name__,
                    error,
                )
            return []


def job_of(
    hook: str,
    parameters: Sequence[Tensor],
    names: Sequence[str],
    lanes: Lanes,
    settings: str,
    goodput_bytes_s: float | None,
) -> Job:
    """What a profile must be of to be good for these parameters on these lanes."""
    lines = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in zip(names, parameters, strict=True)]
    return Job(
        hook,
        hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
        lanes.world_size,
        lanes.backend,
        settings,
        goodput_bytes_s / 1e6 if goodput_bytes_s is not None else None,
    )


def _rate(mb_s: float | None) -> str:
    return f"{mb_s:.0f} MB/s" if mb_s is not None else "not measured"
