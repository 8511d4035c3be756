"""What a release says of itself agrees: its version, its changelog, and the gate wherever it is called."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

import scavenger
from scavenger.cli.main import app
from scavenger.config import DaemonConfig
from tests.conftest import SERVICES

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
MAX_WORDS = 600


def entries() -> list[tuple[str, str]]:
    """Heading and text of each version in the changelog, newest first."""
    parts = re.split(r"^## (.+)$", CHANGELOG, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def read_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def version_in_setup() -> str:
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "version":
            return str(ast.literal_eval(node.value))
    raise AssertionError("setup.py names no version")


def test_the_version_is_the_same_wherever_it_stands() -> None:
    (unreleased, _), (newest, _), *_ = entries()
    assert unreleased == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(scavenger.__version__)}\] - \d{{4}}-\d\d-\d\d", newest)
    assert version_in_setup() == scavenger.__version__
    for asked in ("version", "--version"):
        assert CliRunner().invoke(app, [asked]).output == f"{scavenger.__version__}\n"


def test_a_changelog_entry_can_be_read_in_one_go() -> None:
    long = {heading: len(text.split()) for heading, text in entries() if len(text.split()) > MAX_WORDS}
    assert not long, f"move the details of {long} to docs/changelog-archive.md"


def test_the_changelog_names_the_new_key_of_each_renamed_one() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \|$", CHANGELOG, re.MULTILINE)
    assert rows
    for section, old, new in rows:
        kind = DaemonConfig.model_fields[section].annotation
        keys = getattr(kind, "model_fields", {})
        assert new in keys, f"{section}.{new} is no key"
        assert old not in keys, f"{section}.{old} is still a key"


def test_public_ci_runs_the_gate_and_nothing_beside_it() -> None:
    workflow = read_yaml(".github/workflows/ci.yml")
    (job,) = workflow["jobs"].values()
    assert job["container"]["image"] == "debian:12"
    assert job["steps"][-1]["run"] == ".ci/run"
    assert not [step for step in job["steps"] if step.get("continue-on-error")]


def test_pre_commit_fetches_nothing_and_runs_the_checks_of_the_gate() -> None:
    (repo,) = read_yaml(".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    assert {hook["language"] for hook in repo["hooks"]} == {"system"}
    check = (ROOT / "scripts/check").read_text(encoding="utf-8")
    for hook in repo["hooks"]:
        tool = hook["entry"].removeprefix(".venv/bin/python -m ").split(" --")[0]
        assert tool in check, f"the hook {hook['id']} runs {tool}, scripts/check does not"


def test_the_fast_tests_leave_out_every_service_and_name_only_what_exists() -> None:
    script = (ROOT / "scripts/test").read_text(encoding="utf-8")
    (markers,) = re.findall(r'^fast_markers="(.*)"$', script, re.MULTILINE)
    assert set(markers.split(" and ")) == {f"not {marker}" for marker in (*SERVICES, "long")}
    (listed,) = re.findall(r"^slow_tests=\((.*?)^\)", script, re.MULTILINE | re.DOTALL)
    slow = re.sub(r"#.*", "", listed).split()
    assert slow
    assert [name for name in slow if not (ROOT / name).exists()] == []
    assert "tests/system" in slow, "whole runs are not fast"
