"""KV blocks of an agent's turns on a real site: their engine leaves during a tool call, and the next turn goes on from them elsewhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agent_turns_live import PATIENT
from benchmarks.agents import START_S, write_random_model
from scavenger import toml
from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.ledger.read import reports
from scavenger.weights.source import WeightServer
from tests.system import play, scripted
from tests.system.test_gateway import EPISODE, Agent, agent_of, gateway

#: Tokens of the first prompt: enough that their prefill takes longer than their blocks.
FIRST, MOST_TURNS = 400, 12


def write_run(
    site: DemoSite, model: Path, run: str, *, move_kv: bool, engine: str = "reference", pace: float = 12.0
) -> Path:
    document = play.run_document(
        site.state_dir,
        site.dir / "out" / run,
        model,
        run={"name": run, "deterministic": engine == "reference"},
        engine={"name": engine, "max_batch": 1, "pace": pace, "move_kv": move_kv},
    )
    document["model"]["context_length"] = 1024
    path = site.dir / f"{run}.toml"
    path.write_text(toml.dumps(document))
    return path


def of_run(name: str) -> str:
    return f"run_id = (SELECT run_id FROM runs WHERE name = '{name}')"


def engines_with_weights(site: DemoSite, name: str) -> list[tuple[int, int]]:
    """(worker, job) of those that serve."""
    return play.ask(
        site,
        "SELECT worker_id, job_id FROM workers w WHERE left_at IS NULL AND w."
        + of_run(name)
        + " AND EXISTS (SELECT 1 FROM events e WHERE e.kind = 'weights_loaded' AND e.subject = 'worker ' || w.worker_id)",
    )


def decided(site: DemoSite, action: str) -> int:
    said = f"SELECT count(*) FROM decisions WHERE policy = 'kv' AND action = '{action}' AND code = 'blocks'"
    return int(play.ask(site, said)[0][0])


def handed_over(site: DemoSite) -> bool:
    """Whether a turn went on from blocks that an engine which left had handed over."""
    refused = play.ask(site, "SELECT count(*) FROM events WHERE kind = 'kv_refused'")[0][0]
    behind = (
        "SELECT count(*) FROM decisions WHERE policy = 'kv' AND action = 'transfer' AND at > "
        "(SELECT min(at) FROM decisions WHERE policy = 'kv' AND action = 'hand-over' AND code = 'blocks')"
    )
    return int(play.ask(site, behind)[0][0]) > refused


def keeper(site: DemoSite) -> int:
    """Who generated the last turn's end."""
    last = "SELECT worker_id FROM leases ORDER BY ended_at DESC LIMIT 1"
    return int(play.ask(site, last)[0][0])


def two_engines(site: DemoSite, name: str, deadline_s: float) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = play.wait_for(
        "two engines with weights",
        lambda: found if len(found := engines_with_weights(site, name)) > 1 else None,
        deadline_s,
    )
    return found


def leave(site: DemoSite, name: str, deadline_s: float = play.DEADLINE_S) -> None:
    """During the tool call: the engine that made the last turn is told to go, and another one is there."""
    engines = two_engines(site, name, deadline_s)
    worker = keeper(site)
    job = dict(engines).get(worker)
    if job is None:
        return
    os.kill(play.engine_pid(site, job), signal.SIGTERM)
    gone = f"SELECT 1 FROM workers WHERE worker_id = {worker} AND left_at IS NOT NULL"
    play.wait_for("the engine to leave", lambda: play.ask(site, gone))


def turn(agent: Agent, prompt: list[int], **how: float) -> list[tuple[list[int], str]]:
    """Both choices: tokens and how they ended."""
    body = {"prompt": prompt, "n": 2, "max_tokens": 16, "return_token_ids": True, **how}
    answer = agent.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return [(choice["token_ids"], choice["finish_reason"]) for choice in answer.json()["choices"]]


def conversation(
    agent: Agent, until: Callable[[int], bool], tool: Callable[[], None], **how: float
) -> list[Any]:
    """Turn after turn, each behind the first choice of the one before and what a tool said, until all is seen."""
    prompt = [2 + (7 * i) % 13 for i in range(FIRST)]
    answers: list[Any] = []
    while not answers or not until(len(answers)):
        assert len(answers) < MOST_TURNS, "no turn went on from blocks that were handed over"
        choices = turn(agent, prompt, **how)
        answers.append((list(prompt), choices))
        prompt += [*choices[0][0], *(2 + (len(answers) + i) % 13 for i in range(9))]
        tool()
    return answers


@pytest.mark.timeout(480)
def test_turns_go_on_from_blocks_whose_engine_left_during_a_tool_call_and_say_the_same(
    tmp_path: Path, small_model: Path
) -> None:
    layout = demo_layout(grace_s=1.0, requeue_delay_s=0.5)
    options = SiteOptions("local", tmp_path, layout, poll_interval_s=0.2, max_engines=2)
    found: dict[str, list[Any]] = {}
    with DemoSite(options) as site, WeightServer() as source:
        for name, moves in (("moved", True), ("prefilled", False)):
            run_toml = write_run(site, small_model, name, move_kv=moves)
            with (
                scripted.opened(run_toml) as run,
                gateway(run_toml) as announced,
                agent_of(announced, EPISODE) as agent,
            ):
                scripted.publish(run, source, small_model, 0)
                if moves:
                    found[name] = conversation(
                        agent, lambda _turns: handed_over(site), lambda: leave(site, "moved")
                    )
                else:
                    found[name] = conversation(
                        agent, lambda turns: turns == len(found["moved"]), lambda: None
                    )
                run.close_run("finished")
        assert found["moved"] == found["prefilled"]
        assert decided(site, "keep") >= 1
        assert reports.check(site.ledger_url) == []


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.filterwarnings("ignore")
def test_turns_of_vllm_go_on_from_blocks_whose_engine_left_and_say_the_same(tmp_path: Path) -> None:
    """Greedy ones, beside an episode that asks for the same while all engines stay."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    (tmp_path / "site").mkdir(mode=0o700)
    write_random_model(tmp_path / "model", 64, 2, 1024)
    layout = demo_layout(grace_s=1.0, requeue_delay_s=0.5)
    options = SiteOptions(
        "local", tmp_path / "site", layout, poll_interval_s=0.2, max_engines=2, daemon=PATIENT
    )
    with DemoSite(options) as site, WeightServer() as source:
        run_toml = write_run(site, tmp_path / "model", "vllm", move_kv=True, engine="vllm", pace=0.0)
        with scripted.opened(run_toml) as run, gateway(run_toml) as announced:
            scripted.publish(run, source, tmp_path / "model", 0)
            with agent_of(announced, EPISODE) as agent:
                agent.http.timeout = START_S
                moved = conversation(
                    agent,
                    lambda _turns: handed_over(site),
                    lambda: leave(site, "vllm", START_S),
                    temperature=0.0,
                )
            with agent_of(announced, "sorting-2") as agent:
                agent.http.timeout = START_S
                stayed = conversation(agent, lambda turns: turns == len(moved), lambda: None, temperature=0.0)
            run.close_run("finished")
        assert moved == stayed
        assert decided(site, "keep") >= 1
        assert reports.check(site.ledger_url) == []
