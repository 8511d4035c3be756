"""A whole run on four ranks: two replicas of the model, in each two ranks for every sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from tests.system import play
from trainer.checkpoint import checkpoint

STEPS = 3

pytestmark = [pytest.mark.mpi, pytest.mark.long]


def steps_of(site: DemoSite) -> list[dict[str, Any]]:
    lines = (site.dir / "out" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "grad_norm" in row]


def test_divided_ranks_train_what_engines_generated_from_their_weights(
    tmp_path: Path, small_model: Path
) -> None:
    """The engine, which pulled each version from the first replica, has the logprobs that the ranks compute together."""
    with DemoSite(SiteOptions("local", tmp_path, demo_layout(grace_s=1.0), poll_interval_s=0.2)) as site:
        run = play.write_run(
            site,
            small_model,
            run={"steps": STEPS, "harvest": False, "deterministic": False},
            engine={"max_batch": 16},
            algorithm={"updates_per_step": 2},
            trainer={"replicas": 2, "context_parallel": 2, "offload": "always"},
        )
        play.finish(site, play.submit(site, run, ranks=4))
        steps = steps_of(site)
        assert [row["step"] for row in steps] == [1, 2, 3]
        for row in steps:
            assert row["grad_norm"] > 0
            assert row["mismatch_k3"] < 1e-8, "float32 on both sides"
        assert not play.over_capacity(site)
        assert checkpoint.steps(site.dir / "out") == [2, STEPS]
