"""Errors name the section of the documentation that explains them, and the section is there.

Prevents: errors without advice, places that nobody has written, sections that nobody is sent to.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddp_hooks
import fsdp_ext
from ddp_hooks.comm import see

PACKAGE = Path(ddp_hooks.__file__).parent
EXTENSION = Path(fsdp_ext.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
TREES |= {f"fsdp_ext/{path.relative_to(EXTENSION)}": ast.parse(path.read_text()) for path in EXTENSION.rglob("*.py")}
WITH_PLACES = ("RuntimeError", "LaneError", "LaneTimeout")

# Errors whose text was made somewhere else: where they are raised, and the function that adds the place.
MADE_BY = {
    ("embedding/step/lookups.py", "RuntimeError(batch.sync_error)"): ("embedding/exchange/lookup.py", "_sync_error"),
    ("embedding/step/scheduler.py", "RuntimeError(self.lookups.sync_error)"): (
        "embedding/exchange/lookup.py",
        "_sync_error",
    ),
}


def name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call) and name_of(node) in names)


def ends_with_place(text: ast.expr) -> bool:
    """Whether the last part of an f-string is a call of ``see``."""
    last = text.values[-1] if isinstance(text, ast.JoinedStr) else None
    return isinstance(last, ast.FormattedValue) and any(calls(last.value, "see"))


def errors() -> list[tuple[str, ast.Call]]:
    """Everything that becomes an error of the kinds above, raised at once or kept for later."""
    return [(path, call) for path, tree in TREES.items() for call in calls(tree, *WITH_PLACES)]


def function(path: str, name: str) -> ast.FunctionDef:
    return next(node for node in ast.walk(TREES[path]) if isinstance(node, ast.FunctionDef) and node.name == name)


def used() -> set[str]:
    """The places that are named."""
    anchors = set()
    for path, tree in TREES.items():
        for call in calls(tree, "see"):
            anchor = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
            assert isinstance(anchor, str), f"{path}:{call.lineno}: write the place out, to be found"
            anchors.add(anchor)
    return anchors


def explained() -> list[str]:
    """The targets on the page, each in front of a heading."""
    return re.findall(r"^\(([a-z-]+)\)=\n\n## ", PAGE.read_text(), flags=re.MULTILINE)


def test_every_error_ends_with_its_place() -> None:
    found = errors()
    without = [
        f"{path}:{call.lineno}: {ast.unparse(call)}"
        for path, call in found
        if not ends_with_place(call.args[0]) and (path, ast.unparse(call)) not in MADE_BY
    ]
    assert not without, without
    assert {name_of(call) for _, call in found} == set(WITH_PLACES)


@pytest.mark.parametrize(("where", "made"), MADE_BY.items(), ids=str)
def test_texts_that_are_made_elsewhere_end_with_their_place(where: tuple[str, str], made: tuple[str, str]) -> None:
    assert where in {(path, ast.unparse(call)) for path, call in errors()}, "this is not raised any more: drop it"
    returned = [
        node.value
        for node in ast.walk(function(*made))
        if isinstance(node, ast.Return) and not (isinstance(node.value, ast.Constant) and node.value.value is None)
    ]
    assert returned
    for text in returned:
        assert text is not None and ends_with_place(text), ast.unparse(text) if text is not None else made


def test_the_one_place_where_ranks_compare_notes_names_two() -> None:
    raised = list(calls(function("comm/agreement.py", "agree"), "ValueError"))
    assert len(raised) == 2 and all(ends_with_place(call.args[0]) for call in raised)


def test_every_place_is_explained_and_every_explanation_is_asked_for() -> None:
    sections = explained()
    assert sections == list(dict.fromkeys(sections)), "a place is explained twice"
    assert used() == set(sections)
    targets = re.findall(r"^\((.+)\)=$", PAGE.read_text(), flags=re.MULTILINE)
    assert targets == sections, "a target without a heading of the second level behind it"


def test_every_section_says_what_it_means_and_what_to_do() -> None:
    text = PAGE.read_text()
    for anchor in explained():
        section = text.split(f"({anchor})=\n\n## ")[1].split("\n## ")[0]
        _, meaning, *advice = section.split("\n\n")
        assert meaning[0] not in "*|" and any(each.startswith("**Do**") for each in advice), anchor


def test_links_within_the_page_lead_somewhere() -> None:
    text = PAGE.read_text()
    headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(#([a-z-]+)\)", text)
    assert links and set(links) <= slugs.union(explained())


def test_an_error_that_quotes_another_names_one_place() -> None:
    first = f"id 7 is no row{see('ranks-differ')}"
    assert first == "id 7 is no row (see docs/troubleshooting.md#ranks-differ)"
    assert see("a-rank-died", quoted=RuntimeError(first)) == ""
    assert see("a-rank-died", quoted="broken pipe") == " (see docs/troubleshooting.md#a-rank-died)"
