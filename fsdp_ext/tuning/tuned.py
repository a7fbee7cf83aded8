"""Result of a search, and the file that keeps it for the next run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ddp_hooks.tuning.profile import Entry
from fsdp_ext.checks import ROOT
from fsdp_ext.config import ExtConfig
from fsdp_ext.extension import Extension, extend


@dataclass(frozen=True)
class Tuned:
    """Settings that a search has found.

    Args:
        block_mb: granularity of wrapping, in MiB, for ``build``.
        config: of the extension; None: stock FSDP2 was faster than anything.
        kept: names of modules to keep whole after forward.
        step_s: seconds per step with these settings.
        stock_s: seconds per step of stock FSDP2, measured in turns with them.
        num_trials: trials that were measured; 0: the result of an earlier run.
    """

    block_mb: float
    config: ExtConfig | None
    kept: tuple[str, ...]
    step_s: float
    stock_s: float
    num_trials: int

    def apply(self, model: nn.Module) -> Extension | None:
        """Extend, in place, a model that was built with :attr:`block_mb`, unless stock FSDP2 was faster. Collective.

        Raises:
            ValueError: too few modules are wrapped, or the model cannot be extended.
        """
        modules = wrapped(model, self.kept)
        extension = extend(model, self.config) if self.config is not None else None
        keep(modules)
        return extension


def wrapped(model: nn.Module, names: tuple[str, ...]) -> list[FSDPModule]:
    """Return the modules of these names; raise a ValueError if one is not wrapped by FSDP2."""
    modules: list[FSDPModule] = []
    by_name = dict(model.named_modules())
    for name in names:
        module = by_name.get(name)
        if not isinstance(module, FSDPModule):
            raise ValueError(
                f"{name or ROOT} is not wrapped by FSDP2 here: build the model with the block_mb that was "
                f"found, as the search did"
            )
        modules.append(module)
    return modules


def keep(modules: Sequence[FSDPModule]) -> None:
    """Let these modules keep their parameters whole after forward."""
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)


@dataclass(frozen=True)
class TunedEntry(Entry):
    """Entry of a profile with the result of a search."""

    tuned: Tuned

    def packed(self) -> dict[str, Any]:
        return super().packed() | {"tuned": asdict(self.tuned)}

    @staticmethod
    def unpacked(packed: dict[str, Any]) -> TunedEntry:
        entry, tuned = Entry.unpacked(packed), packed["tuned"]
        config = None if tuned["config"] is None else ExtConfig(**tuned["config"])
        known = Tuned(**{**tuned, "config": config, "kept": tuple(tuned["kept"]), "num_trials": 0})
        return TunedEntry(entry.job, entry.trials, entry.chosen, known)
