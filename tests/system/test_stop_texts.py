"""Stop texts on engines that find no model folder, and over preemptions: the undisturbed run's samples, each ended at its text."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree

import pytest
from tokenizers import Tokenizer

from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.protocol.messages import unpack_tokens
from tests.system import play

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(400)]  # two runs

STOPS = ["12", "34", "56", "78", "90", "13", "57", "79"]
STEPS = 3


def _site(folder: Path, engines: int) -> DemoSite:
    layout = demo_layout(grace_s=1.0, requeue_delay_s=0.5)
    return DemoSite(SiteOptions("local", folder, layout, poll_interval_s=0.2, max_engines=engines))


def _undisturbed(folder: Path, model: Path, steps: int) -> play.Result:
    with _site(folder, 0) as site:
        run = {"harvest": False, "steps": steps}
        path = play.write_run(site, model, run=run, sampling={"stop": STOPS}, engine={"max_batch": 16})
        play.finish(site, play.submit(site, path))
        return play.result(site)


def test_samples_end_at_their_texts_on_engines_that_find_no_model_folder_and_after_moves(
    tmp_path: Path, small_model: Path
) -> None:
    model = copytree(small_model, tmp_path / "model")
    with _site(tmp_path / "site", 4) as site:
        # longer than any machine takes until what is to be seen has been seen, then cut short
        path = play.write_run(
            site, model, run={"steps": 80}, sampling={"stop": STOPS}, engine={"max_batch": 4, "pace": 6.0}
        )
        training = play.submit(site, path)
        play.wait_for("the first step", lambda: play.steps_done(site) >= 1)
        model.rename(tmp_path / "moved-away")
        known = {worker for (worker,) in play.ask(site, "SELECT worker_id FROM workers")}
        for worker, _job, node in play.wait_for("engines at work", lambda: play.busy(site)):
            known.add(worker)
            site.submit_other(0.3, 4, node)
        consumed = (
            "SELECT DISTINCT c.worker_id FROM chunks c JOIN workers w ON w.worker_id = c.worker_id JOIN samples s"
            " ON s.sample_id = c.sample_id WHERE w.kind = 'harvested' AND s.state IN ('consumed', 'filtered')"
        )
        play.wait_for(
            "tokens of an engine that came when the folder was gone",
            lambda: {worker for (worker,) in play.ask(site, consumed)} - known,
        )
        moved = "SELECT count(*) FROM samples WHERE moves > 0 AND state IN ('consumed', 'filtered')"
        play.wait_for("a sample that moved", lambda: play.ask(site, moved)[0][0] > 0)
        play.wait_for("some steps", lambda: play.steps_done(site) >= STEPS)
        done = play.cut_short(site, training)
        found = play.result(site).until(done)
    undisturbed = _undisturbed(tmp_path / "free", small_model, done)
    assert found == undisturbed
    tokenizer = Tokenizer.from_file(str(small_model / "tokenizer.json"))
    texts = [tokenizer.decode(list(unpack_tokens(tokens))) for tokens in found.tokens.values()]
    ends = [min((text.find(stop) for stop in STOPS if stop in text), default=-1) for text in texts]
    assert all(end in (-1, len(text) - 2) for text, end in zip(texts, ends, strict=True))
    assert sum(end >= 0 for end in ends) > len(texts) / 10
