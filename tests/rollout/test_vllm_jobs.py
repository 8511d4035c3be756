"""A run that says `engine.name = "vllm"` gets vLLM engines, whoever starts them: the daemon's jobs, or the training job itself."""

from __future__ import annotations

from typing import Any

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from tests.system import play
from tests.system.model import write_small_model

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.mpi,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

WHO: dict[str, dict[str, Any]] = {
    # At this pace the reserved engine alone takes a minute a step: the harvested one comes in one of four, and then it sleeps.
    "harvested": {"run": {"name": "harvested", "steps": 4}, "engine": {"pace": 0.3}},
    "reserved": {"run": {"name": "reserved", "harvest": False}, "engine": {}},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("site")
    write_small_model(folder / "model")
    slow = {"suspect_s": 30.0, "dead_s": 60.0}
    options = SiteOptions(
        "local", folder, demo_layout(grace_s=5.0), poll_interval_s=0.5, max_engines=1, daemon=slow
    )
    with DemoSite(options) as running:
        yield running


@pytest.mark.parametrize("kind", WHO)
def test_each_kind_of_engine_is_vllm(site: DemoSite, kind: str) -> None:
    changes = WHO[kind]
    more = {
        "steps": 1,
        "max_engines": 1,
        "deterministic": False,
        "out_dir": site.dir / kind,
        **changes["run"],
    }
    engine = {"name": "vllm", "max_batch": 16, **changes["engine"]}
    run = play.write_run(site, site.dir / "model", run=more, engine=engine, reserved={"window": 0.0})
    play.finish(site, play.submit(site, run, ranks=1), deadline_s=600.0)
    workers = _rows(
        site, kind, "SELECT DISTINCT w.kind, w.engine FROM workers w JOIN runs r ON r.run_id = w.run_id"
    )
    assert sorted(workers) == [(one, "vllm") for one in sorted({kind, "reserved"})]
    generated = _rows(
        site,
        kind,
        "SELECT DISTINCT w.kind, l.sample_id FROM leases l JOIN workers w ON w.worker_id = l.worker_id JOIN runs r ON r.run_id = w.run_id",
    )
    assert len({sample for _, sample in generated}) == 16 * more["steps"]
    assert kind in {who for who, _ in generated}, "no sample came to it"
    if (
        kind == "harvested"
    ):  # what the job itself was told; the daemon's answer would have corrected it only later
        (script,) = [line for line in play.logs(site).splitlines() if "engine.built" in line][-1:]
        assert "name=vllm" in script
        assert "reference" not in script


def _rows(site: DemoSite, run: str, query: str) -> list[tuple[Any, ...]]:
    return play.ask(site, f"{query} WHERE r.name = '{run}'")
