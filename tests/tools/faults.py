"""Apply one-line faults to a copy of the tree, one after the other, and see whether tests catch them.

``python -m tests.tools.faults [--only PATTERN ...] [--list] [--slow] [--baseline]``; not a part of ``make test``. The
faults are in :mod:`tests.tools.fault_list`. A fault that slips wants a test, or another place if the code has moved.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from tests.tools.fault_list import FAULTS, Fault

_ROOT = Path(__file__).parents[2]
_COPIED = ("ddp_hooks", "fsdp_ext", "recipes", "tests", "docs", "setup.cfg", "pyproject.toml", "README.md")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "_build", ".*_cache")
_CAUGHT, _SLIPPED, _ERROR = "caught", "slipped", "error"


@dataclass(frozen=True)
class Result:
    """What tests said of a fault: the verdict, and by what, or why there is none."""

    verdict: str
    reason: str = ""


def misplaced(faults: Iterable[Fault], root: Path) -> list[str]:
    """Return a sentence on each fault whose text does not occur exactly once in its file, or changes nothing."""
    problems = []
    for fault in faults:
        path = root / fault.file
        count = path.read_text().count(fault.text) if path.exists() else 0
        if count != 1 or fault.text == fault.fault:
            problems.append(f"{fault.name}: {fault.text!r} occurs {count} times in {fault.file}")
        problems += [f"{fault.name}: there is no {test}" for test in fault.tests if not (root / test).exists()]
    return problems


def run_tests(fault: Fault, root: Path, timeout_s: float) -> tuple[int | None, str]:
    """Run the tests of a fault in ``root``; returns pytest's exit status, None for a timeout, and what it printed."""
    marks = "slow and not long" if fault.slow else "not slow"
    chosen = ["-k", fault.choose] if fault.choose else []
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *chosen, *fault.tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as output:  # a pipe would stay open as long as a worker lives
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        output.seek(0)
        return status, output.read()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End pytest and its workers, which are in a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judge(status: int | None, printed: str) -> Result:
    """Say what an exit status of pytest means for a fault; only a failed test has caught it."""
    if status == 0:
        return Result(_SLIPPED)
    lines = printed.strip().splitlines()
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.MULTILINE)
    if status == 1 and failed:
        return Result(_CAUGHT, failed[0])
    reason = "the tests took too long" if status is None else f"status {status}: {lines[-1] if lines else 'no output'}"
    return Result(_ERROR, reason)


def try_fault(fault: Fault, root: Path, timeout_s: float) -> Result:
    """Apply a fault in ``root``, run its tests, and restore the file."""
    path = root / fault.file
    before = path.read_text()
    path.write_text(before.replace(fault.text, fault.fault))
    try:
        return judge(*run_tests(fault, root, timeout_s))
    finally:
        path.write_text(before)


def try_without(faults: Sequence[Fault], root: Path, timeout_s: float) -> list[str]:
    """Run each selection of tests without a fault; returns a sentence on each one that does not pass."""
    selections = {(fault.tests, fault.choose, fault.slow): fault for fault in faults}
    problems = []
    for fault in tqdm(selections.values(), desc="without faults", unit="selection"):
        status, printed = run_tests(fault, root, timeout_s)
        if status != 0:
            problems.append(f"the tests of {fault.name} do not pass without it: {judge(status, printed).reason}")
    return problems


def table_of(results: Sequence[tuple[Fault, Result]]) -> Table:
    """Return a table of faults, their places, and what tests said."""
    table = Table("fault", "place", "verdict", "by", title="One-line faults")
    for fault, result in results:
        table.add_row(fault.name, fault.file, result.verdict, result.reason)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="Apply one-line faults, and see whether tests catch them.")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of faults, with * and ?")
    parser.add_argument("--list", action="store_true", help="check places, print the list, and run nothing")
    parser.add_argument("--slow", action="store_true", help="also the faults that only slow tests catch")
    parser.add_argument("--baseline", action="store_true", help="run the tests without faults first")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="for the tests of one fault")
    arguments = parser.parse_args()
    chosen = [f for f in FAULTS if any(fnmatch.fnmatchcase(f.name, pattern) for pattern in arguments.only)]
    chosen = [fault for fault in chosen if arguments.slow or arguments.list or not fault.slow]
    problems = misplaced(chosen, _ROOT)
    if arguments.list:
        for fault in chosen:
            print(f"{fault.name}: {fault.file}: {fault.text.strip()} -> {fault.fault.strip()}")
        print(f"{len(chosen)} faults")
    if problems or arguments.list:
        print(*problems, sep="\n", file=sys.stderr)
        return 2 if problems else 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        root = Path(folder)
        for name in _COPIED:
            source = _ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=_LEFT_OUT)
            else:
                shutil.copy(source, root / name)
        if arguments.baseline and (problems := try_without(chosen, root, arguments.timeout)):
            print(*problems, sep="\n", file=sys.stderr)
            return 2
        results = []
        for fault in (progress := tqdm(chosen, unit="fault")):
            progress.set_postfix_str(fault.name)
            results.append((fault, try_fault(fault, root, arguments.timeout)))
            progress.write(f"{fault.name}: {results[-1][1].verdict} {results[-1][1].reason}")
    Console().print(table_of(results))
    verdicts = [result.verdict for _, result in results]
    print(", ".join(f"{verdicts.count(each)} {each}" for each in (_CAUGHT, _SLIPPED, _ERROR)))
    return 1 if _SLIPPED in verdicts else 2 if _ERROR in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
