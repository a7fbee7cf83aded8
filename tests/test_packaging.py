"""What is installed is what is there."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_folder_of_code_is_a_package() -> None:
    """``find:`` in setup.cfg leaves folders without ``__init__.py`` out."""
    folders = {path.parent for package in ("ddp_hooks", "fsdp_ext") for path in ROOT.glob(f"{package}/**/*.py")}
    assert len(folders) > 10
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]
