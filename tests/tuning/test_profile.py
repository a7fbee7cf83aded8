"""A profile that is torn, foreign or stale is reported and ignored; one that fits is used."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import filelock
import pytest

from ddp_hooks.tuning import profile as profile_module
from ddp_hooks.tuning.profile import Entry, Job, Profile, Trial

JOB = Job("dear", "0123456789abcdef", 4, "gloo", "DearConfig(...)", 118.0)
ENTRY = Entry(JOB, (Trial(25.0, 3, 0.25), Trial(8.0, 12, 0.2, "check", 2.5)), 8.0)


def test_what_was_stored_is_found(tmp_path: Path) -> None:
    profile = Profile(tmp_path / "somewhere" / "tuning.json")
    assert profile.find(JOB) is None
    profile.store(ENTRY)
    assert profile.find(JOB) == ENTRY
    assert profile.find(replace(JOB, link_mb_s=200.0)) == ENTRY, "a link is never measured twice the same"
    assert {path.suffix for path in profile.path.parent.iterdir()} <= {".json", ".lock"}, "nothing half written is left"


def test_jobs_do_not_overwrite_each_other(tmp_path: Path) -> None:
    profile = Profile(tmp_path / "tuning.json")
    other = Entry(replace(JOB, model="fedcba"), (), None)
    profile.store(ENTRY)
    profile.store(other)
    newer = replace(ENTRY, chosen=4.0)
    profile.store(newer)
    assert profile.find(JOB) == newer and profile.find(other.job) == other


def store_one(path: Path, number: int) -> None:
    Profile(path).store(Entry(replace(JOB, model=f"model {number}"), (), None))


def test_jobs_that_write_at_the_same_moment_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    with ThreadPoolExecutor(8) as writers:  # every lock is one of its own, as between processes
        list(writers.map(partial(store_one, path), range(40)))
    assert len(json.loads(path.read_text())["entries"]) == 40


@pytest.mark.parametrize("failure", [None, OSError("no locks here"), NotImplementedError("none at all")])
def test_without_a_lock_the_profile_is_written_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, failure: Exception | None
) -> None:
    monkeypatch.setattr(profile_module, "_LOCK_S", 0.1)
    caplog.set_level(logging.INFO, logger="ddp_hooks")
    profile = Profile(tmp_path / "tuning.json")
    with filelock.FileLock(f"{profile.path}.lock"):
        if failure is not None:
            monkeypatch.setattr(filelock.FileLock, "acquire", mock.Mock(side_effect=failure))
        profile.store(ENTRY)
    assert "is written without a lock" in caplog.text and profile.find(JOB) == ENTRY


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 8}, "world_size was 4, is 8"),
        ({"backend": "nccl"}, "backend was gloo, is nccl"),
        ({"settings": "DearConfig(lanes=1)"}, "settings was"),
        ({"link_mb_s": 1180.0}, "the link carried 118 MB/s, carries 1180 MB/s"),
        ({"link_mb_s": None}, "the link was 118 MB/s, is not measured"),
    ],
)
def test_a_stale_profile_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, object], message: str
) -> None:
    profile = Profile(tmp_path / "tuning.json")
    profile.store(ENTRY)
    with caplog.at_level(logging.INFO, "ddp_hooks"):
        assert profile.find(replace(JOB, **change)) is None  # type: ignore[arg-type]
    assert message in caplog.text and str(profile.path) in caplog.text


def packed(**changes: object) -> str:
    return json.dumps({"version": 2, "entries": [ENTRY.packed() | changes]})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 1, "entries": []}',
        '{"version": 2, "entries": [{}]}',
        '{"version": 2, "entries": 7}',
        packed(chosen=[-1, 1]),
        packed(chosen=["much", 1]),
        packed(chosen=[]),
        packed(trials=[{"mb": 1}]),
        packed(trials=[{"mb": 1.0, "num_groups": 1, "step_s": -1.0}]),
        packed(trials=[{"mb": "1", "num_groups": 1, "step_s": 1.0}]),
        packed(job={}),
        packed(job={**ENTRY.packed()["job"], "link_mb_s": 0}),
        packed()[:-20],
    ],
)
def test_a_corrupt_profile_is_ignored_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    profile = Profile(tmp_path / "tuning.json")
    profile.path.write_text(text)
    assert profile.find(JOB) is None
    assert "is of no use" in caplog.text and str(profile.path) in caplog.text
    profile.store(ENTRY)
    assert profile.find(JOB) == ENTRY


def test_a_profile_that_cannot_be_written_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    Profile(tmp_path / "file" / "tuning.json").store(ENTRY)
    assert "was not written" in caplog.text
