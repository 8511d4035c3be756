"""From a run's configuration to what plays its episodes: gateway, environment workers, and the run that puts them in samples' place.

Boundary: the trainer's set-up, and `init --check`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scavenger.client import Run
from scavenger.config import RunConfig
from scavenger.errors import ConfigError, RewardError
from scavenger.protocol import keys
from scavenger.weights.source import serving_interface
from trainer.data.prompts import TaskSet
from trainer.episodes import remote, wire
from trainer.episodes.gateway import RunGateway
from trainer.episodes.pool import EnvironmentPool
from trainer.episodes.run import EpisodeRun, PlaySettings
from trainer.episodes.stub import stub_model

#: Beyond an episode's own time, for a check.
GRACE_S = 300.0
#: What a name of a reward's version may have.
MOST_VERSION_CHARS = 256


class EpisodeScorer:
    """Episodes come with their rewards: nobody is to be asked for one."""

    def __init__(self, version: str) -> None:
        self.version = version

    def score(self, prompt: str, completion: str, meta: dict[str, Any]) -> float:
        raise RewardError("an episode came without its reward")


@dataclass(frozen=True, slots=True)
class Opened:
    """`tasks`: of the environment; `scorer`: in place of a reward function; `attach`: the run, once it is open."""

    config: RunConfig
    pool: EnvironmentPool
    gateway: RunGateway
    tasks: TaskSet
    scorer: EpisodeScorer
    say: Callable[[str], None]

    def attach(self, run: Any) -> EpisodeRun:
        """Raises `ConfigError`, `DaemonUnavailable` where the gateway does not answer."""
        assert isinstance(run, Run)
        self.gateway.wait()
        settings = PlaySettings.of(self.config, self.scorer.version)
        return EpisodeRun(run, self.pool, self.gateway, settings, self.say)


def setup_of(config: RunConfig, endpoint: str) -> wire.Setup:
    """What each environment worker is told."""
    data = config.data
    return wire.Setup(
        data.environment,
        json.dumps(data.environment_args),
        json.dumps(data.renderer),
        str(config.model.path.resolve()),
        config.run.name,
        config.model.context_length,
        endpoint,
        data.on_divergence,
        data.episode_turns,
        data.episode_tokens,
        data.episode_s,
        sandbox_of(config),
        data.effects,
        data.on_doubt,
        {agent: one.run for agent, one in data.policies.items() if one.run != config.run.name},
    )


def sandbox_of(config: RunConfig) -> wire.Sandbox | None:
    """The run's boxes, which see neither its own folders nor the daemon's, nor keys. None: it has none."""
    data = config.data
    if data.sandbox == "none":
        return None
    hidden = [config.run.out_dir, config.run.state_dir, Path.home() / ".config" / "scavenger"]
    hidden += [config.run.key.parent] if config.run.key is not None else []
    return wire.Sandbox(
        data.sandbox_memory_mb,
        data.sandbox_processes,
        data.sandbox_disk_mb,
        data.sandbox_output_mb,
        data.sandbox_cpu_s or data.episode_s,
        tuple(str(path.absolute()) for path in data.sandbox_readable),
        tuple(str(path.absolute()) for path in hidden),
    )


def jobs_of(config: RunConfig, arguments: Sequence[str]) -> remote.PortSettings | None:
    """Where environment workers in jobs join. None: none may. Raises `DaemonUnavailable` where `weights.listen` is empty and no daemon says
    where it listens.
    """
    data, weights = config.data, config.weights
    if not data.environment_jobs:
        return None
    endpoint = "" if weights.listen else keys.read_rendezvous(config.run.state_dir).endpoint
    return remote.PortSettings(
        (config.run.out_dir / remote.FILE).absolute(),
        data.environment_jobs,
        config.run.name,
        tuple(arguments),
        str(Path.cwd()),
        str(data.environment_python or sys.executable),
        serving_interface(weights.listen, endpoint),
        data.environment_port,
        weights.advertise,
    )


def version_of(config: RunConfig, ready: wire.Ready) -> str:
    """Of what gives the rewards: rewards that an earlier attempt recorded are taken only of the same."""
    return (config.reward.version or ready.version)[:MOST_VERSION_CHARS]


@contextmanager
def opened(
    config: RunConfig,
    arguments: Sequence[str],
    *,
    local: bool = False,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> Iterator[Opened]:
    """`arguments`: run.toml and what is laid over it. Raises `ConfigError` where the environment cannot be loaded."""
    if local:
        raise ConfigError(
            "data.environment: episodes call a gateway, and --local has no daemon for one",
            "start a daemon beside it: docs/environments.md, on one machine; `scavenger init RUN --check` plays one episode alone",
        )
    data = config.data
    with (
        RunGateway(config.run.out_dir, arguments, say) as gateway,
        EnvironmentPool(
            setup_of(config, gateway.endpoint),
            count=data.environment_workers,
            concurrency=data.environment_concurrency,
            python=data.environment_python,
            say=say,
            jobs=jobs_of(config, arguments),
        ) as pool,
    ):
        ready = pool.ready
        yield Opened(
            config,
            pool,
            gateway,
            TaskSet(ready.tasks, ready.digest),
            EpisodeScorer(version_of(config, ready)),
            say,
        )


#: What an episode that fails says where verifiers, the model or its renderer lacks something: (words, what helps).
REMEDIES = (
    (
        "failed to prepare uv script",
        "the harness installs its program with uv: pip install uv beside data.environment_python's packages; the first time with a network",
    ),
    (
        "tokenizer.chat_template is not set",
        "agents need a model with a chat template in its tokenizer_config.json; or a data.renderer that knows its conversations",
    ),
    (
        "DefaultRenderer does not support tools",
        'the harness has tools: name the model\'s data.renderer, or play without, by agent.harness.id = "null" in data.environment_args',
    ),
    (
        "not found in tokenizer vocabulary",
        "data.renderer is another model family's: choose this model's, or another model",
    ),
)


def remedy_of(words: str) -> str:
    """What helps against an episode that failed with these words. Pure."""
    return next(
        (remedy for said, remedy in REMEDIES if said in words),
        "look at data.environment_args and data.renderer; the environment's words are beside",
    )


def cause_first(output: str) -> str:
    """A traceback with its last line, which says what was wrong, at its head."""
    *before, last = output.strip().splitlines() or [""]
    return "\n".join([last, *before])


def rehearsed(
    config: RunConfig, words: Sequence[int], say: Callable[[str], None]
) -> tuple[TaskSet, wire.Played, dict[str, str]]:
    """The environment's tasks, its first one played with a model that says `words` to everything, and its roles with their runtimes.

    Raises `ConfigError` where the environment cannot be loaded or played, and `RewardError` where its worker ends.
    """
    data, how = config.data, config.sampling
    with (
        stub_model(words) as endpoint,
        EnvironmentPool(setup_of(config, endpoint), python=data.environment_python, say=say) as pool,
    ):
        sampling: dict[str, float | int | list[str]] = {
            "temperature": how.temperature,
            "max_tokens": how.max_tokens,
        }
        pool.play(wire.Play("check", "none", 0, config.run.seed, sampling))
        found = pool.poll(data.episode_s + GRACE_S)
        if not found:
            raise ConfigError(
                f"data.environment: an episode took over {data.episode_s + GRACE_S:g} s",
                "look at what the environment waits for, or raise data.episode_s",
            )
        [played] = found
        if played.error or not played.branches:
            raise ConfigError(
                f"data.environment: an episode failed: {played.error or 'it asked the model for nothing'}",
                remedy_of(f"{played.error} {played.output}"),
                quoted=cause_first(played.output),
            )
        return TaskSet(pool.ready.tasks, pool.ready.digest), played, pool.ready.roles
