"""What is installed is what is there."""

from __future__ import annotations

import configparser
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_package_is_installed() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    listed = settings["options"]["packages"].split()
    there = [".".join(init.parent.relative_to(ROOT).parts) for init in ROOT.glob("ddp_hooks/**/__init__.py")]
    assert sorted(listed) == sorted(there)
