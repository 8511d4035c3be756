"""Bounded staleness in a whole run: real engines, ranks, daemon and cluster. Samples of later steps are generated while a step trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from tests.system import play

pytestmark = pytest.mark.mpi

#: Of each token that was trained: its step, and the step after which its weights were published.
TRAINED = """
SELECT g.step, v.step, count(*) FROM chunks c
JOIN samples s ON s.sample_id = c.sample_id
JOIN groups g ON g.group_id = s.group_id
JOIN weight_versions v ON v.run_id = g.run_id AND v.version = c.version
WHERE g.purpose = 'train' AND s.state IN ('consumed', 'filtered')
GROUP BY g.step, v.step ORDER BY g.step, v.step
"""


def site_options(folder: Path, *, max_engines: int) -> SiteOptions:
    layout = demo_layout(grace_s=0.5, requeue_delay_s=0.2)
    return SiteOptions("local", folder, layout, poll_interval_s=0.2, max_engines=max_engines)


def ages_within(site: DemoSite, *, steps: int, k: int) -> set[tuple[int, int]]:
    """(step, age in optimizer steps) of all tokens that were trained: of every step, none beyond k, and no sample was thrown away."""
    ages = {(step, step - 1 - of_step) for step, of_step, _ in play.ask(site, TRAINED)}
    assert {step for step, _ in ages} == set(range(1, steps + 1))
    assert {age for _, age in ages} <= set(range(k + 1)), "a token was trained beyond k"
    ends = dict(play.ask(site, "SELECT state, count(*) FROM samples GROUP BY state"))
    assert not ends.keys() & {"superseded", "surplus", "poisoned"}, ends
    return ages


@pytest.mark.parametrize(
    ("k", "on_new_version", "on_late", "kv"),
    [
        pytest.param(1, "switch", "wait", "recompute", marks=pytest.mark.long),
        (3, "finish", "wait", "recompute"),
        (2, "switch", "later", "keep"),
    ],
)
def test_a_run_trains_samples_of_older_weights_within_k_and_throws_none_away(
    k: int, on_new_version: str, on_late: str, kv: str, tmp_path: Path, small_model: Path
) -> None:
    with DemoSite(site_options(tmp_path, max_engines=2)) as site:
        run = play.write_run(
            site,
            small_model,
            run={"steps": 6, "deterministic": False},
            engine={"max_batch": 8, "pace": 3.0},
            algorithm={
                "max_off_policy_steps": k,
                "on_new_version": on_new_version,
                "on_late": on_late,
                "kv": kv,
            },
        )
        play.finish(site, play.submit(site, run))
        ages = ages_within(site, steps=6, k=k)
        assert max(age for _, age in ages) > 0, "no token was generated in advance"
        rows = play.ask(site, "SELECT step, metrics FROM steps WHERE purpose = 'train' ORDER BY step")
        metrics = {step: json.loads(text) for step, text in rows}
        for step, found in metrics.items():
            mine = [age for of, age in ages if of == step]
            assert found["staleness_max"] == max(mine)
            assert 0 <= found["staleness_mean"] <= max(mine)
            assert 0 < found["effective_fraction"] <= 1
        trained = [found["groups_asked"] for _, found in sorted(metrics.items())]
        later = [found["groups_later"] for _, found in sorted(metrics.items())]
        moved = [0.0, *later[:-1]]
        each = {one - came + left for one, came, left in zip(trained, moved, later, strict=True)}
        assert len(each) == 1, (
            f"each step was asked for as many groups: {trained}, of which {later} were late"
        )
        assert on_late == "later" or not any(later)


def test_steps_are_trained_one_after_the_other_where_reserved_engines_are_most_of_a_run(
    tmp_path: Path, small_model: Path
) -> None:
    """Two reserved engines and one harvested one: they generate on for the next step, and the run ends as any other."""
    with DemoSite(site_options(tmp_path, max_engines=1)) as site:
        run = play.write_run(
            site,
            small_model,
            run={"steps": 10, "deterministic": False},
            engine={"max_batch": 4, "pace": 3.0},
            reserved={"workers": 2},
            algorithm={"max_off_policy_steps": 4, "kv": "keep"},
        )
        play.finish(site, play.submit(site, run))
        codes = dict(
            play.ask(site, "SELECT code, count(*) FROM decisions WHERE policy = 'window' GROUP BY code")
        )
        assert codes.get("kept_open", 0) > 0, codes
        ages_within(site, steps=10, k=4)
