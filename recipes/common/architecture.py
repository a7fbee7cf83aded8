"""Draw docs/architecture.md: four lives, step by step, and the folders that they pass.

    python -m recipes.common.architecture --output docs/images/architecture.png
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
_STEP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`: (.*)$", re.MULTILINE)
_LAYER = re.compile(r"^\| (\d) \| (.*?) \|", re.MULTILINE)


class Step(NamedTuple):
    """Step of a life: the file, the function or class in it, and the event."""

    file: str
    symbol: str
    event: str


def lives(page: str) -> dict[str, list[Step]]:
    """Return the steps of every life on the page, by its heading."""
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    found = {section.splitlines()[0]: [Step(*match) for match in _STEP.findall(section)] for section in sections}
    return {heading: steps for heading, steps in found.items() if steps}


def layers(page: str) -> dict[str, int]:
    """Return the layer of every package; packages import from lower layers."""
    return {name: int(layer) for layer, names in _LAYER.findall(page) for name in re.findall(r"`([\w.]+)`", names)}


def package_of(file: str) -> str:
    """Return the package of a file.

    >>> package_of("ddp_hooks/dear/layout/memory.py"), package_of("fsdp_ext/early.py")
    ('ddp_hooks.dear', 'fsdp_ext')
    """
    parts = Path(file).parts
    return parts[0] if parts[0] == "fsdp_ext" else ".".join(parts[:2])


def draw(page: str, path: Path) -> None:
    """Draw every life as a line through its folders, one column per step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found, layer_of = lives(page), layers(page)
    rows = {
        heading: sorted(
            {str(Path(step.file).parent) for step in steps}, key=lambda room: (layer_of[package_of(room)], room)
        )
        for heading, steps in found.items()
    }
    heights = [len(rooms) + 1.5 for rooms in rows.values()]
    figure, all_axes = plt.subplots(
        len(found), 1, figsize=(13, 0.6 * sum(heights)), gridspec_kw={"height_ratios": heights}
    )
    for axes, (heading, steps) in zip(all_axes, found.items(), strict=True):
        rooms = rows[heading]
        levels = [rooms.index(str(Path(step.file).parent)) for step in steps]
        axes.plot(range(1, len(steps) + 1), levels, color="tab:blue", linewidth=1.5, marker="o")
        for number, (step, level) in enumerate(zip(steps, levels, strict=True), 1):
            axes.annotate(
                f"{number} {step.symbol}",
                (number, level),
                xytext=(3, 6),
                textcoords="offset points",
                rotation=20,
                fontsize=7,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.2, "alpha": 0.8},
            )
        axes.set_yticks(range(len(rooms)), rooms)
        axes.set_ylim(-0.4, len(rooms) + 0.4)
        axes.set_xlim(0.6, len(steps) + 2)
        axes.set_xticks([])
        axes.set_title(heading, loc="left")
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PAGE.parent / "images" / "architecture.png")
    draw(PAGE.read_text(), parser.parse_args().output)


if __name__ == "__main__":
    main()
