"""A page per reproduction: what a paper says, what we found, and how they differ; as tables, pictures and Markdown."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from recipes.common import pages
from recipes.common.pages import Origin, Picture, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind: TypeAlias = Literal["simulated", "measured", "counted"]
"""Where our numbers come from: the simulator; a clock or a training run; bytes and messages of real collectives."""

_NOTHING = 1e-9  # a rounding error
CLAIM_COLUMNS = ("what", "ours", "paper", "difference")


@dataclass(frozen=True)
class Claim:
    """A number that the paper gives in words or in a table, beside ours.

    Args:
        what: which number.
        ours: what we found.
        low, high: what the paper says; the same for a single number, infinite where it gives one end only.
        unit: ``"×"``, ``"%"`` or a unit; behind both numbers.
    """

    what: str
    ours: float
    low: float
    high: float
    unit: str = "×"

    @staticmethod
    def number(what: str, ours: float, paper: float, unit: str = "×") -> Claim:
        """The paper gives one number."""
        return Claim(what, ours, paper, paper, unit)

    @staticmethod
    def at_least(what: str, ours: float, paper: float, unit: str = "×") -> Claim:
        """The paper gives a lower end."""
        return Claim(what, ours, paper, float("inf"), unit)

    @staticmethod
    def at_most(what: str, ours: float, paper: float, unit: str = "×") -> Claim:
        """The paper gives an upper end."""
        return Claim(what, ours, float("-inf"), paper, unit)

    @property
    def distance(self) -> float:
        """How far ours is from what the paper says, in the claim's unit; 0 within its range."""
        return min(0.0, self.ours - self.low) + max(0.0, self.ours - self.high)

    def cells(self) -> tuple[str, ...]:
        """A line of the table."""
        if self.low == self.high:
            paper = self._text(self.low)
        elif self.high == float("inf"):
            paper = f"≥ {self._text(self.low)}"
        elif self.low == float("-inf"):
            paper = f"≤ {self._text(self.high)}"
        else:
            paper = f"{self.low:.3g} to {self._text(self.high)}"
        difference = "none" if not self.distance else self._difference()
        return self.what, self._text(self.ours), paper, difference

    def _difference(self) -> str:
        if self.unit == "%":
            return f"{self.distance:+.1f} points"
        nearest = self.low if self.distance < 0 else self.high
        return f"{100 * self.distance / nearest:+.1f} %"

    def _text(self, value: float) -> str:
        shown = 0.0 if abs(value) < _NOTHING else value
        return f"{shown:.3g}{self.unit if self.unit == '×' else f' {self.unit}'}".rstrip()


@dataclass(frozen=True)
class Section:
    """One figure or table of a paper.

    Args:
        title: which, and what it shows.
        origin: where our numbers come from.
        text: how they were made, and why they differ, in Markdown.
        claims: the paper's numbers, beside ours.
        columns, rows: all of ours; may be empty.
        draw: the picture, into an empty figure of matplotlib's; None: there is none.
    """

    title: str
    origin: Kind
    text: str
    claims: Sequence[Claim] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    draw: Callable[[Figure], None] | None = None

    def parts(self) -> list[pages.Part]:
        """Return its heading, text, picture and tables."""
        parts: list[pages.Part] = [f"## {self.title}", f"*{self.origin.capitalize()}.* {self.text.strip()}"]
        if self.draw is not None:
            parts.append(Picture(self.title, self.draw))
        title = f"{self.title} ({self.origin})"
        if self.claims:
            columns = (CLAIM_COLUMNS[0], f"ours, {self.origin}", *CLAIM_COLUMNS[2:])
            parts.append(Table(title, columns, [claim.cells() for claim in self.claims], has_heading=False))
        if self.rows:
            parts.append(Table(title, self.columns, self.rows, has_heading=False))
        return parts


@dataclass(frozen=True)
class Page:
    """All sections of one command.

    Args:
        title: of the page.
        introduction: in Markdown.
        sections: figures and tables of the paper.
        module: ``python -m`` of it makes the page.
    """

    title: str
    introduction: str
    sections: Sequence[Section]
    module: str

    def made(self, path: Path | None = None) -> pages.Page:
        """Return the page that is shown, or written to ``path``."""
        parts: list[pages.Part] = [self.introduction]
        for section in self.sections:
            parts += section.parts()
        command = f"python -m {self.module}" + (f" --markdown docs/results/{path.name}" if path else "")
        return pages.Page(self.title, parts, [Origin(command, pages.now(), pages.environment())])


def prose(path: Path) -> dict[str, str]:
    """Read the texts of a page from a Markdown file, by heading; text before the first heading is under ``""``."""
    before, *parts = re.split(r"^## (.+)$", path.read_text(), flags=re.MULTILINE)
    texts = {title.strip(): text.strip() for title, text in zip(parts[::2], parts[1::2], strict=True)}
    return {"": before.strip(), **texts} if before.strip() else texts


def run(
    module: str,
    description: str,
    make: Callable[[argparse.Namespace], Page],
    arguments: Sequence[str] | None = None,
    add: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """The command: make a page, show it, and write it where that is asked for; ``add`` adds options of its own."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="also write a Markdown page, pictures beside it")
    parser.add_argument("--quick", action="store_true", help="a smoke test: fewer models and points")
    add(parser)
    options = parser.parse_args(arguments)
    page = make(options)
    page.made().show()
    if options.markdown:
        page.made(options.markdown).write(options.markdown)
