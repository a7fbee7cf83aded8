"""The architecture is as docs/architecture.md says, and its parts are small."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from recipes.common.architecture import PAGE, layers, lives, package_of

ROOT = Path(__file__).parents[1]
PATHS = [path for package in ("ddp_hooks", "fsdp_ext") for path in ROOT.glob(f"{package}/**/*.py")]
FILES = {path.relative_to(ROOT).as_posix(): path for path in PATHS}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
MODULES = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in FILES}
COMPAT = ("ddp_hooks/comm/torch_compat/", "fsdp_ext/compat.py")
VAGUE = ("What", "Whether", "Who", "Of", "Those", "That", "Which", "Whose")


def imports(body: list[ast.stmt], inside_functions: bool) -> Iterator[str]:
    """Yield the modules of ours that are imported; also under ``TYPE_CHECKING``."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                yield from imports(getattr(node, field, []), inside_functions)


def test_packages_import_from_lower_layers() -> None:
    layer_of = layers(PAGE.read_text())
    upwards = set()
    for name, tree in TREES.items():
        importer = package_of(name)
        for module in imports(tree.body, inside_functions=True):
            imported = package_of(module.replace(".", "/") + ".py") if module in MODULES else ""
            both = importer in layer_of and imported in layer_of and imported != importer
            if both and layer_of[imported] >= layer_of[importer]:
                upwards.add((name, imported))
    assert not upwards
    assert {package_of(name) for name in FILES if name.count("/") > 1} <= layer_of.keys(), "every package has a layer"


def test_no_imports_in_circles() -> None:
    graph = defaultdict(set)
    for module, name in MODULES.items():
        graph[module] = {each for each in imports(TREES[name].body, False) if each in MODULES and each != module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_every_step_of_a_life_is_there() -> None:
    found = lives(PAGE.read_text())
    assert len(found) == 4
    for steps in found.values():
        assert len(steps) > 10
        for file, symbol, _ in steps:
            names = symbol.split(".")
            body = TREES[file].body
            for name in names:
                defined = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name]
                assert defined, f"{file} has no {symbol}"
                body = defined[0].body
    for file in re.findall(r"`((?:ddp_hooks|fsdp_ext)/[\w/.]+)`", PAGE.read_text()):
        assert (ROOT / file).exists(), file


def test_parts_are_small() -> None:
    lines = {name: path.read_text().count("\n") for name, path in FILES.items()}
    assert not {name: number for name, number in lines.items() if number > 500}
    functions = [
        f"{name}: {node.name}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None and node.end_lineno - node.lineno >= 70
    ]
    assert not functions
    modules = Counter(str(Path(name).parent) for name in FILES if not name.endswith("__init__.py"))
    assert not {folder: number for folder, number in modules.items() if number > 15}


def test_private_names_of_torch_have_one_place() -> None:
    private = re.compile(r"\b(?:torch(?:\.\w+)*|dist)\._(?!_)\w+|from torch[\w.]*(?:\._(?!_)\w+| import \(?_(?!_)\w+)")
    found = {
        f"{name}: {match.group(0)}"
        for name, tree in TREES.items()
        if not name.startswith(COMPAT)
        for match in private.finditer(_code_of(tree))
    }
    assert not found


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    texts = [ast.get_docstring(node) for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, kinds)]
    docstrings = [text for text in texts if text]
    vague = [text.splitlines()[0] for text in docstrings if text.split(maxsplit=1)[0] in VAGUE]
    assert len(docstrings) > 1000
    assert len(vague) <= 0.02 * len(docstrings), vague


def _code_of(tree: ast.Module) -> str:
    """Return the code without comments, docstrings and other texts."""

    class WithoutTexts(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.Constant:
            return ast.Constant("") if isinstance(node.value, str) else node

        def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
            return ast.Constant("")

    return ast.unparse(ast.fix_missing_locations(WithoutTexts().visit(ast.parse(ast.unparse(tree)))))
