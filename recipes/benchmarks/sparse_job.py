"""What the workers of the sparse all-reduce benchmark are asked to do."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DENSE = ("all-reduce", "bf16", "powersgd-4", "dense")
SPARSE = ("spardl", "topka", "topkdsa", "gtopk", "oktopk")
_TEAMS = re.compile(r"spardl-([rb])([1-9]\d*)")


def is_variant(name: str) -> bool:
    """Whether there is a variant called so; `spardl-b4` is SparDL with four teams and B-SAG between them."""
    return name in (*DENSE, *SPARSE) or _TEAMS.fullmatch(name) is not None


def is_sparse(name: str) -> bool:
    return name not in DENSE


def settings_of(name: str) -> dict[str, Any]:
    """What makes a sparse variant what it is, as arguments of `Sparsity`."""
    match = _TEAMS.fullmatch(name)
    return {"algorithm": "spardl", "num_teams": int(match[2]), "sag": match[1]} if match else {"algorithm": name}


@dataclass(frozen=True)
class SparseJob:
    """All variants on one network.

    Args:
        variants: see :func:`is_variant`.
        numels: lengths of the gradient, float32.
        densities: for the sparse variants.
        wire: format of their entries.
        rounds: timed runs of each variant; one more comes before.
    """

    variants: tuple[str, ...]
    numels: tuple[int, ...]
    densities: tuple[float, ...]
    wire: str = "compact"
    rounds: int = 3
    result_path: str = ""  # set by the launcher
    rendezvous: str = "env://"

    @property
    def name(self) -> str:
        return "sparse all-reduce"

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> SparseJob:
        data = json.loads(path.read_text())
        lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
        return cls(**{**data, **lists})
