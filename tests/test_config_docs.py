"""docs/config.md is the generated page, and pages and examples name no key that does not exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, JsonValue, create_model

from scavenger.config import DaemonConfig, RunConfig, read_daemon, read_run, reference
from scavenger.config.section import Allowed, Section
from scavenger.config.site import LIVE

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/config.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| `(?P<key>\w+)`(?P<live> \*live\*)? \| (?P<default>[^|]+?) \| (?P<allowed>[^|]+?) \| (?P<what>[^|]+?) \|$"
)


def documented() -> dict[str, re.Match[str]]:
    """`file section.key` -> its row on the page."""
    found: dict[str, re.Match[str]] = {}
    file = section = ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            file = line.removeprefix("## ")
        elif line.startswith("### "):
            section = line.removeprefix("### ")[1:-1]
        elif file in reference.FILES and (row := ROW.match(line)):
            name = f"{file} {section}.{row['key']}"
            assert name not in found, f"{name} is on the page twice"
            found[name] = row
    return found


def existing() -> set[str]:
    return {
        f"{file} {name}.{key}"
        for file, model in reference.FILES.items()
        for name, section in reference.sections(model)
        for key in section.model_fields
    }


def test_the_page_is_the_generated_one() -> None:
    assert reference.page() == PAGE, "run: python -m scavenger.config.reference > docs/config.md"


def test_every_key_is_on_the_page_once_and_no_other() -> None:
    assert set(documented()) == existing()


def test_a_row_has_the_key_s_default_its_bounds_and_whether_it_changes_live() -> None:
    rows = documented()
    seen = {name: (rows[name]["default"], rows[name]["allowed"]) for name in rows}
    assert seen["run.toml run.name"][0] == "required"
    assert seen["run.toml engine.gpu_memory_share"] == ("`0.9`", "number > 0 to 1")
    assert seen["run.toml eval.path"] == ("none", "path")
    assert seen["scavenger.toml harvest.placement"] == ('`"node"`', '`"node"`, `"slurm"`')
    assert seen["scavenger.toml [harvest.schedule].max_gpus"] == ("none", "integer >= 0")
    live = {name.removeprefix("scavenger.toml ") for name, row in rows.items() if row["live"]}
    assert live == LIVE


def test_ten_keys_open_the_page() -> None:
    opening = PAGE.split("## The ten keys that matter", 1)[1].split("\n## ", 1)[0]
    named = re.findall(r"^\| \[`([\w.]+)`\]\(#\w+\) \| `([\w.]+)` \|", opening, re.MULTILINE)
    assert len(named) == 10
    assert {f"{file} {key}" for key, file in named} <= existing()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Annotated[int, Field(ge=0, le=8)], "integer 0 to 8"),
        (Annotated[float, Field(gt=0)] | None, "number > 0"),
        (Annotated[float, Field(ge=0, lt=1)], "number 0 to below 1"),
        (Annotated[str, Field(max_length=256)], "text of up to 256 characters"),
        (Annotated[str, Field(min_length=1, max_length=128)], "text of 1 to 128 characters"),
        (Annotated[str, Field(pattern="^a$"), Allowed("the letter a")] | None, "the letter a"),
        (Literal["a", "b"], '`"a"`, `"b"`'),
        (dict[str, Annotated[int, Field(ge=0)]], "table, each integer >= 0"),
        (dict[str, JsonValue], "table"),
        (bool | None, "boolean"),
        (Path, "path"),
    ],
)
def test_what_is_allowed_follows_from_the_type(kind: Any, text: str) -> None:
    assert reference.allowed_text(create_model("Some", key=(kind, ...)).model_fields["key"]) == text


def test_a_type_whose_values_no_rule_names_needs_an_allowed() -> None:
    with pytest.raises(TypeError, match="Allowed"):
        reference.allowed_text(create_model("Some", key=(tuple[int, ...], ...)).model_fields["key"])


class Undescribed(Section):
    """A section with a key that nothing is written below."""

    first: int = 0
    """The first."""
    second: int = 0


def test_a_key_without_a_description_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Undescribed\.second"):
        reference.descriptions(Undescribed)


def test_keys_named_in_prose_exist() -> None:
    """`section.key` in any page of docs, or in the README, must be one of ours where the section is."""
    known = {name.split(" ")[1] for name in existing()}
    sections = {name.split(".")[0] for name in known if not name.startswith("[")}
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(one for one in ROOT.glob("docs/*.md") if "archive" not in one.name),
    ]:
        if not page.exists():
            continue
        spans = re.findall(r"`([a-z]+)\.(\w+)(?: *[=<>][^`]*)?`", page.read_text(encoding="utf-8"))
        wrong = [
            f"{section}.{key}"
            for section, key in spans
            if section in sections and f"{section}.{key}" not in known
        ]
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


@pytest.mark.parametrize(
    "example",
    [
        "examples/site/run.toml",
        "examples/demo/run.toml",
        "examples/gsm8k/run.toml",
        "examples/proposer_solver/proposer.toml",
        "examples/proposer_solver/solver.toml",
    ],
)
def test_a_run_s_example_is_valid(example: str) -> None:
    config = read_run(ROOT / example)
    assert config.model.path.is_absolute()
    RunConfig.model_validate(commented_keys(ROOT / example))


def test_the_demo_s_example_has_the_keys_that_the_demo_writes() -> None:
    from scavenger.demo import session

    here = Path("x")
    document = session.run_document(
        session.DemoSettings(), name="demo", state_dir=here, out_dir=here, model=here, max_engines=1
    )
    example = tomllib.loads((ROOT / "examples/demo/run.toml").read_text(encoding="utf-8"))
    assert {name: set(keys) for name, keys in example.items()} == {
        name: set(keys) for name, keys in document.items()
    }
