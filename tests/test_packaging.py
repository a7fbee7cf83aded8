"""What is installed is what is there."""

from __future__ import annotations

import configparser
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_installed() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    listed = settings["options"]["packages"].split()
    inits = [init for package in ("ddp_hooks", "fsdp_ext") for init in ROOT.glob(f"{package}/**/__init__.py")]
    there = [".".join(init.parent.relative_to(ROOT).parts) for init in inits]
    assert sorted(listed) == sorted(there)
