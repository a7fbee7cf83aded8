"""What is installed is what is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ddp_hooks

ROOT = Path(__file__).parents[1]


def test_every_folder_of_code_is_a_package() -> None:
    """``find:`` in setup.cfg leaves folders without ``__init__.py`` out."""
    folders = {path.parent for package in ("ddp_hooks", "fsdp_ext") for path in ROOT.glob(f"{package}/**/*.py")}
    assert len(folders) > 10
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_changelog_begins_with_this_version() -> None:
    headings = [line for line in (ROOT / "docs/changelog.md").read_text().splitlines() if line.startswith("## [")]
    released = [line for line in headings if line != "## [Unreleased]"]
    assert ddp_hooks.__version__ in released[0] and headings[1:] in (released, released[1:])


def test_imports_nothing_of_extras() -> None:
    """Nor scikit-optimize, which takes seconds and which only the tuner needs."""
    names = ("accelerate", "lightning", "matplotlib", "rich", "skopt", "sklearn", "transformers")
    code = f"import sys, ddp_hooks, fsdp_ext; print([name for name in {names} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
