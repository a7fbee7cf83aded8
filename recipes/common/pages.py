"""Tables, pictures and pages of results: on the terminal, and as Markdown."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PACKAGES = ("torch", "torchvision", "transformers")


@dataclass(frozen=True)
class Table:
    """Cells below a title.

    Args:
        title, columns, rows: texts.
        remarks: sentences below the table.
        text_columns: number of columns, from the left, that hold words; the others hold numbers.
        has_heading: on a page, the title stands above the table.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: Sequence[str] = ()
    text_columns: int = 1
    has_heading: bool = True

    def show(self, console: Console | None = None) -> None:
        """Print the table."""
        console = console or Console()
        table = RichTable(title=self.title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
        for index, column in enumerate(self.columns):
            is_text = index < self.text_columns
            # Narrow enough for most terminals: words are folded, numbers never, and their headings at spaces.
            heading = column if is_text else column.replace(" ", "\n")
            table.add_column(heading, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for remark in self.remarks:
            console.print(remark, highlight=False)

    def markdown(self) -> str:
        """Return the title, if it is a heading, the table and its remarks."""
        heading = [f"## {self.title}"] if self.has_heading else []
        sides = [":--" if index < self.text_columns else "--:" for index in range(len(self.columns))]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.columns, sides, *self.rows)]
        return "\n\n".join([*heading, "\n".join(lines), *self.remarks])


@dataclass(frozen=True)
class Picture:
    """Plot that is drawn when a page is written.

    Args:
        title: says what it shows.
        draw: draws into an empty figure.
        size: of the figure, in inches.
    """

    title: str
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (6.4, 4.8)

    def save(self, path: Path) -> None:
        """Write a PNG file, and the folder around it."""
        from matplotlib.figure import Figure  # takes a second

        path.parent.mkdir(parents=True, exist_ok=True)
        figure = Figure(figsize=self.size, layout="constrained")
        self.draw(figure)
        figure.savefig(path, dpi=100)


@dataclass(frozen=True)
class Origin:
    """Command, time and machine of a measurement."""

    command: str
    created: str
    environment: dict[str, str]

    @classmethod
    def of_command(cls, module: str, arguments: Sequence[str] | None) -> Origin:
        """Describe this process, which runs ``python -m module``; None: with the arguments of the command line."""
        given = sys.argv[1:] if arguments is None else arguments
        return cls(shlex.join(["python", "-m", module, *given]), now(), environment())

    def markdown(self) -> str:
        """Return a code block with the command, and a line with the rest."""
        versions = ", ".join(f"{name} {value}" for name, value in self.environment.items())
        return f"```\n{self.command}\n```\n\n{self.created}; {versions}."


Part: TypeAlias = "str | Table | Picture"


@dataclass(frozen=True)
class Page:
    """Page of results.

    Args:
        title: its heading.
        parts: Markdown texts, tables (their titles become headings) and pictures, in order.
        origins: of all measurements on the page.
    """

    title: str
    parts: Sequence[Part]
    origins: Sequence[Origin] = field(default=())

    def show(self, console: Console | None = None) -> None:
        """Print all tables."""
        for part in self.parts:
            if isinstance(part, Table):
                part.show(console)

    def save_pictures(self, path: Path) -> list[Path]:
        """Write pictures beside a page at ``path``; return their paths, in order."""
        pictures = [part for part in self.parts if isinstance(part, Picture)]
        paths = [path.with_suffix(".png")]
        if len(pictures) > 1:
            paths = [path.with_name(f"{path.stem}_{slug(picture.title)}.png") for picture in pictures]
        for picture, each in zip(pictures, paths, strict=False):
            picture.save(each)
        return paths[: len(pictures)]

    def write(self, path: Path) -> None:
        """Write the page as Markdown, its pictures beside it."""
        images = iter(self.save_pictures(path))
        sections = [f"# {self.title}"]
        for part in self.parts:
            if isinstance(part, Table):
                sections.append(part.markdown())
            elif isinstance(part, Picture):
                sections.append(f"![{part.title}]({next(images).name})")
            else:
                sections.append(part.strip())
        if self.origins:
            sections += ["## Repeating it", *(origin.markdown() for origin in self.origins)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def environment() -> dict[str, str]:
    """Return versions and hardware, as a performance claim needs them."""
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    cpu = f"{_cpu_model()} ({os.cpu_count()} cores)"
    return {"Python": platform.python_version(), **packages, "Linux": platform.release(), "CPU": cpu}


def now() -> str:
    """Return date and time in UTC."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def slug(title: str) -> str:
    """Return the part of a picture's file name that stands for its title."""
    return re.sub(r"[^a-z0-9]+", "_", title.partition(":")[0].lower()).strip("_")
