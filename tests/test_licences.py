"""The page of licences has what constraints.txt has, and is what its script writes."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def licences() -> ModuleType:
    spec = importlib.util.spec_from_file_location("licences", ROOT / "scripts/licences.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(licences: ModuleType) -> dict[str, tuple[str, str]]:
    found = licences.ROW.findall((ROOT / "docs/licences.md").read_text())
    return {name: (version, licence) for name, version, licence in found if name not in ("package", "---")}


def test_the_page_lists_the_pinned_packages_in_their_versions(licences: ModuleType) -> None:
    assert {name: version for name, (version, _) in rows(licences).items()} == licences.pinned()


def test_each_licence_is_the_one_that_the_installed_package_declares(licences: ModuleType) -> None:
    listed, versions = rows(licences), licences.pinned()
    other = {}
    for name, (_, licence) in listed.items():
        said = licences.declared(name)
        if said is not None and metadata.version(name) == versions[name] and said != licence:
            other[name] = said
    assert not other, "run scripts/licences.py"


def test_a_package_without_a_licence_is_named_as_such(
    licences: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(licences.metadata, "metadata", lambda name: _Bare())
    assert licences.declared("bare") == licences.UNKNOWN


class _Bare:
    def get(self, name: str) -> str | None:
        return "UNKNOWN" if name == "License" else None

    def get_all(self, name: str) -> list[str]:
        return []
