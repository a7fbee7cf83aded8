"""What a search has found, and the file that keeps it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp_ext.config import ExtConfig
from fsdp_ext.extension import Extension, extend

logger = logging.getLogger("fsdp_ext")

_VERSION = 1
_LOCK_S = 10.0  # other jobs need milliseconds
_SAME_LINK = 2.0  # a few messages may find the same link faster or slower by this factor


@dataclass(frozen=True)
class Tuned:
    """Settings that a search has found.

    Args:
        block_mb: granularity of wrapping, in MiB, for ``build``.
        config: of the extension; None: stock FSDP2 was faster than anything.
        kept: names of modules to keep whole after forward.
        step_s: seconds per step with these settings.
        stock_s: of stock FSDP2, measured in turns with them.
        num_trials: that were measured; 0: all of this was known from an earlier run.
    """

    block_mb: float
    config: ExtConfig | None
    kept: tuple[str, ...]
    step_s: float
    stock_s: float
    num_trials: int

    def apply(self, model: nn.Module) -> Extension | None:
        """Extend a model that was built with :attr:`block_mb`, unless stock FSDP2 was faster. Collective.

        Args:
            model: changed in place.

        Raises:
            ValueError: too few modules are wrapped.
        """
        kept = wrapped(model, self.kept)
        extension = extend(model, self.config) if self.config is not None else None
        keep(kept)
        return extension


def wrapped(model: nn.Module, names: tuple[str, ...]) -> list[FSDPModule]:
    """The modules of these names, which must be wrapped by FSDP2."""
    modules: list[FSDPModule] = []
    everything = dict(model.named_modules())
    for name in names:
        module = everything.get(name)
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"{name or 'the root module'} is not wrapped by FSDP2 here: build the model with the block_mb that was "
                f"found, as the search did"
            )
        modules.append(module)
    return modules


def keep(modules: Sequence[FSDPModule]) -> None:
    """Let these modules keep their parameters whole after forward."""
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)


class Profile:
    """A file of what was found; what cannot be read or written is reported, and does no harm.

    Args:
        path: of the file.
        key: of everything that must be the same, as text.
        link_bytes_s: what the link carries; None: not measured.
    """

    def __init__(self, path: str | os.PathLike[str], key: str, link_bytes_s: float | None) -> None:
        self._path = Path(os.path.expanduser(path))
        self._key = key
        self._link_bytes_s = link_bytes_s

    def find(self) -> Tuned | None:
        """What an earlier run has found for the same."""
        for entry in self._read():
            if self._is_ours(entry):
                try:
                    return _unpacked(entry["found"])
                except (KeyError, TypeError, ValueError) as error:
                    logger.warning("%s is of no use, so the search begins anew: %s", self._path, error)
        return None

    def store(self, found: Tuned) -> None:
        """Write it in the place of what was known of the same."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with _turn(self._path):
                others = [entry for entry in self._read() if not self._is_ours(entry)]
                mine = {"key": self._key, "link_bytes_s": self._link_bytes_s, "found": asdict(found)}
                packed = {"version": _VERSION, "entries": [*others, mine]}
                with tempfile.NamedTemporaryFile("w", dir=self._path.parent, suffix=".tmp", delete=False) as file:
                    json.dump(packed, file, indent=1)
                os.replace(file.name, self._path)
        except OSError as error:
            logger.warning("%s was not written, so the next run begins anew: %s", self._path, error)

    def _is_ours(self, entry: Mapping[str, Any]) -> bool:
        mine, theirs = self._link_bytes_s, entry.get("link_bytes_s")
        same_link = mine is theirs is None or bool(mine and theirs and 1 / _SAME_LINK <= mine / theirs <= _SAME_LINK)
        return entry.get("key") == self._key and same_link

    def _read(self) -> list[dict[str, Any]]:
        try:
            packed = json.loads(self._path.read_text())
            if packed["version"] != _VERSION or not all(isinstance(entry, dict) for entry in packed["entries"]):
                raise ValueError(f"not of version {_VERSION}")
            return list(packed["entries"])
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is of no use, so it is ignored, and replaced: %s", self._path, error)
            return []


def _unpacked(packed: Mapping[str, Any]) -> Tuned:
    config = packed["config"]
    return Tuned(
        float(packed["block_mb"]),
        ExtConfig(**config) if config is not None else None,
        tuple(packed["kept"]),
        float(packed["step_s"]),
        float(packed["stock_s"]),
        0,
    )


@contextlib.contextmanager
def _turn(path: Path) -> Any:
    """Alone among those that write; where there are no locks, or one is held for long, all the same."""
    lock = filelock.FileLock(f"{path}.lock", timeout=_LOCK_S)
    try:
        lock.acquire()
    except (OSError, NotImplementedError, filelock.Timeout) as error:
        logger.info("%s is written without a lock: %s", path, error)
    try:
        yield
    finally:
        lock.release()
