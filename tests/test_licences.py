"""docs/licences.md lists what constraints.txt pins, with the licences that the installed packages declare."""

from __future__ import annotations

import importlib.util
from email.message import Message
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/licences.md"


@pytest.fixture(scope="module")
def licences() -> ModuleType:
    spec = importlib.util.spec_from_file_location("licences", ROOT / "scripts/licences.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(licences: ModuleType) -> dict[str, tuple[str, str]]:
    found = licences.ROW.findall(PAGE.read_text())
    return {name: (version, licence) for name, version, licence in found if name not in ("package", "---")}


def test_the_page_is_what_its_script_makes(licences: ModuleType) -> None:
    before = PAGE.read_text()
    assert licences.page(before) == before, "python scripts/licences.py > docs/licences.md"


def test_it_lists_the_pinned_packages_in_their_versions(licences: ModuleType) -> None:
    assert {name: version for name, (version, _) in rows(licences).items()} == licences.pinned()


def test_what_is_compared_is_installed(licences: ModuleType) -> None:
    """Else the page would be compared with itself."""
    here = [
        name for name, version in licences.pinned().items() if licences.declared(name) and _is(name, version)
    ]
    assert len(here) > 0.9 * len(licences.pinned())


def _is(name: str, version: str) -> bool:
    return metadata.version(name).partition("+")[0] == version


def test_a_package_without_a_licence_is_named_as_such(
    licences: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = Message()
    bare["License"] = "UNKNOWN"
    monkeypatch.setattr(licences.metadata, "metadata", lambda name: bare)
    assert licences.declared("bare") == licences.UNKNOWN
    bare["License-Expression"] = "MIT"
    assert licences.declared("bare") == "MIT"
