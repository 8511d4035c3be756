"""docs/config.md and the examples say what `scavenger.config` does: every key with its default, and no key that does not exist."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from scavenger.config import DaemonConfig, RunConfig, read_daemon, read_run

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/config.md"
MODELS: dict[str, type[BaseModel]] = {"scavenger.toml": DaemonConfig, "run.toml": RunConfig}
ROW = re.compile(r"^\| `(?P<key>\w+)` \| (?P<default>[^|]+?) \| (?P<allowed>[^|]+?) \| (?P<what>[^|]+?) \|$")


def documented() -> dict[str, str]:
    """`file section.key` -> the text of its default."""
    found: dict[str, str] = {}
    file = section = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            file = line.removeprefix("## ")
        elif line.startswith("### "):
            section = line.removeprefix("### ").strip("[]")
        elif row := ROW.match(line):
            name = f"{file} {section}.{row['key']}"
            assert name not in found, f"{name} is told twice"
            found[name] = row["default"]
    return found


def default_text(field: FieldInfo) -> str:
    """A default as the page writes it: TOML in backquotes, or a word."""
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "none"
    return f"`{json.dumps(field.default)}`"


def existing() -> dict[str, str]:
    found = {}
    for file, model in MODELS.items():
        for section, holder in model.model_fields.items():
            assert isinstance(holder.annotation, type)
            assert issubclass(holder.annotation, BaseModel)
            for key, field in holder.annotation.model_fields.items():
                found[f"{file} {section}.{key}"] = default_text(field)
    return found


def test_every_key_stands_on_the_page_with_its_default_and_no_other_does() -> None:
    assert documented() == existing()


def test_every_row_of_the_page_is_a_key() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    strange = [line for line in rows if not ROW.match(line) and not line.startswith(("| key |", "| --- |"))]
    assert not strange


def test_keys_named_in_prose_exist() -> None:
    """`section.key` in any page of docs, or in the README, must be one of ours where the section is."""
    known = {name.split(" ")[1] for name in existing()}
    sections = {name.split(".")[0] for name in known}
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        if not page.exists():
            continue
        spans = re.findall(r"`([a-z]+)\.(\w+)(?: *[=<>][^`]*)?`", page.read_text(encoding="utf-8"))
        wrong = [f"{section}.{key}" for section, key in spans if section in sections and f"{section}.{key}" not in known]
        wrong = [name for name in wrong if not name.endswith((".py", ".toml", ".md", ".sh", ".sqlite3"))]
        assert not wrong, f"{page.name} names {wrong}"


def commented_keys(path: Path) -> dict[str, Any]:
    """The example with every key that is commented out put in: `#key = value` without a blank after the mark."""
    return tomllib.loads(re.sub(r"^#(?=\w+ = )", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE))


@pytest.mark.parametrize("example", ["examples/site/scavenger.toml"])
def test_the_daemon_s_example_is_valid(example: str) -> None:
    config = read_daemon(ROOT / example)
    assert config.cluster.backend == "slurm"
    assert config.daemon.ledger, "a shared state_dir must not hold an SQLite ledger"
    assert config.daemon.advertise
    DaemonConfig.model_validate(commented_keys(ROOT / example))


@pytest.mark.parametrize("example", ["examples/site/run.toml", "examples/demo/run.toml", "examples/gsm8k/run.toml"])
def test_a_run_s_example_is_valid(example: str) -> None:
    config = read_run(ROOT / example)
    assert config.model.path.is_absolute()
    RunConfig.model_validate(commented_keys(ROOT / example))


def test_the_demo_s_example_has_the_keys_that_the_demo_writes() -> None:
    from scavenger.demo import settings

    here = Path("x")
    document = settings.run_document(settings.DemoSettings(), name="demo", state_dir=here, out_dir=here, model=here, max_engines=1)
    example = tomllib.loads((ROOT / "examples/demo/run.toml").read_text(encoding="utf-8"))
    assert {name: set(keys) for name, keys in example.items()} == {name: set(keys) for name, keys in document.items()}
