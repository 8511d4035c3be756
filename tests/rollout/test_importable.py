"""Whether a Python has what an engine needs."""

from __future__ import annotations

import sys

import pytest

from rollout.engines import importable, registry


def test_every_engine_says_what_it_needs() -> None:
    assert importable.NEEDS.keys() == registry.MODULES.keys()


def test_this_python_runs_the_reference_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert importable.main(["reference"]) == 0
    assert capsys.readouterr().out == "ok\n"


@pytest.mark.parametrize("module", importable.NEEDS["reference"])
def test_a_module_that_is_missing_is_named(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert importable.main(["reference"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert f"{sys.executable} cannot import {module}: ModuleNotFoundError" in line


def test_an_engine_that_does_not_exist_is_refused() -> None:
    assert "one of reference, vllm" in importable.lacking("sglang")
