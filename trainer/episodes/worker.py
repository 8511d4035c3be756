"""An environment worker: the process that plays episodes with the package `verifiers`, or those of an environment that is built in
(`builtin.py`). Started by `trainer.episodes.pool` only.

    frames in (Setup, Play) --> Env.run_episode: the task's harness, tools and rewards, as the package runs them
                                    model calls --> TrainClient --> relay.py --> gateway
    frames out (Ready, Played) <-- rows, reward, metrics of the episode's graph

Episodes run side by side on one event loop. Frames come on standard input and go to standard output, by descriptors of this process's
own: what an environment prints goes to standard error. It ends with its trainer. Whatever an environment raises is an answer to rank 0,
never this process's end; one that forks or hangs ends with its episode's time.

Needs no torch: its interpreter may be another one than the trainer's (`data.environment_python`).

Boundary: the package `verifiers`, imported nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast
from urllib.parse import urlsplit

import msgspec
from blake3 import blake3

from scavenger.errors import ConfigError
from trainer.algorithms.rewards import framed, read_frame
from trainer.episodes import branches, builtin, wire
from trainer.episodes.boxed import Boxed, checked, installed, limits_of, plan_of
from trainer.episodes.naming import Setting
from trainer.episodes.relay import Playing, Relay
from trainer.episodes.tools import OnDoubt
from trainer.reserved import die_with_parent
from trainer.sandbox.box import BoxEnded

#: From the first release with this API to the one after.
OLDEST, BEFORE = (0, 4, 0), (0, 5, 0)
REQUIREMENT = "verifiers>=0.4,<0.5"
#: Beyond an agent's own time: its set-up, its rewards.
GRACE_S = 300.0
#: Names of parts, and how many: they become names of metrics.
PART, MOST_PARTS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]{0,63}", re.ASCII), 32
#: Where an environment says what each turn earned: a key of `Trace.info`, which is the environment's own. The package has no field for it.
TURN_REWARDS = "turn_rewards"
#: `TrainClient` wants a variable's name; the relay knows the keys.
NO_KEY = "SCAVENGER_EPISODES_HAVE_NO_KEY"


def check_version(version: str | None) -> None:
    """Raises `ConfigError` for a release of `verifiers` that this module does not know; None: there is none."""
    remedy = (
        f"pip install '{REQUIREMENT}' there, or name an interpreter that has it in data.environment_python"
    )
    if version is None:
        raise ConfigError(f"{sys.executable} has no verifiers package", remedy)
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not OLDEST <= found < BEFORE:
        raise ConfigError(f"verifiers {version} of {sys.executable} has another API than 0.4", remedy)


def _installed() -> str | None:
    try:
        return importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        return None


def settings_of(name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """The environment's settings, in which `name` is the task set."""
    taskset = args.get("taskset", {})
    if not isinstance(taskset, dict) or taskset.get("id", name) != name:
        raise ConfigError(
            f"data.environment_args: taskset = {taskset!r} is not that of data.environment = {name!r}",
            "leave taskset.id out",
        )
    return {**args, "taskset": {**taskset, "id": name}}


class Tasks:
    """The task set by number. Read once, and no further than is asked for where it has no end."""

    def __init__(self, taskset: Any) -> None:
        self._left: Iterator[Any] = iter(taskset)
        self._read: list[Any] = []
        self.count = 0
        if taskset.bounded:
            self._read = list(self._left)
            self.count = len(self._read)

    def __getitem__(self, number: int) -> Any:
        while len(self._read) <= number:
            self._read.append(next(self._left))
        return self._read[number]

    @property
    def digest(self) -> str:
        hasher = blake3()
        for task in self._read:
            hasher.update(task.hash.encode())
        return hasher.hexdigest(16)


class Player(Protocol):
    """What plays episodes: `Environment`, or a test's own."""

    def ready(self) -> wire.Ready: ...
    def serving(self) -> AbstractAsyncContextManager[Any]: ...
    async def play(self, ask: wire.Play, playing: Playing) -> wire.Played: ...


class Environment:
    """The run's environment, and how one episode of it is played."""

    def __init__(self, setup: wire.Setup, relay: Relay, boxed: Boxed | None = None) -> None:
        """Raises `ConfigError` where it cannot be loaded."""
        check_version(_installed())
        if boxed is not None or setup.effects == "external":
            tools_by(relay, boxed=boxed is not None)
        self._setup, self._relay, self._boxed = setup, relay, boxed
        self.env, self.tasks, self._roles = _loaded(setup)

    def ready(self) -> wire.Ready:
        version = f"{self._setup.environment}@{_source(self._setup.environment)}"
        return wire.Ready(self.tasks.count, self.tasks.digest, version, self._roles)

    def serving(self) -> AbstractAsyncContextManager[Any]:
        """What all its episodes share, for as long as they are played."""
        return cast(AbstractAsyncContextManager[Any], self.env.serving())

    async def play(self, ask: wire.Play, playing: Playing) -> wire.Played:
        """Play it, from its set-up to its reward. Raises what the environment's own code raises."""
        import verifiers.v1 as vf

        def begun(trace: Any) -> None:
            policy = self._setup.policies.get(trace.agent.name, "")
            self._relay.agent(playing, trace.id, policy, stop=trace.stop)
            trace.info["seed"] = ask.seed

        client = vf.TrainClientConfig(
            base_url=f"{self._relay.base_url}/v1",
            api_key_var=NO_KEY,
            renderer=json.loads(self._setup.renderer) or None,
            renderer_model_name=self._setup.model,
        )
        context = vf.ModelContext(self._setup.name, client, vf.SamplingConfig(**ask.sampling))
        episode = await self.env.run_episode(self.tasks[ask.task], context, on_trace=begun)
        over = self._boxed.of([trace.id for trace in episode.traces]) if self._boxed is not None else None
        if not episode.ok and over is not None:
            # What the agent did, no failure of its environment: to be trained, not tried again.
            return result_of(ask.episode, episode, playing, over, self._setup.policies)
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            last = errors[-1] if errors else None
            what = last.type if last is not None else "no error was noted"
            said = said_of(last.message, last.traceback or "") if last is not None else ""
            return wire.Played(ask.episode, error=what, output=said[-4000:])
        return result_of(ask.episode, episode, playing, policies=self._setup.policies)


def said_of(message: str, trace: str) -> str:
    """An error's text: its traceback, which ends with the message, or both where it does not."""
    return trace if message.strip() in trace else f"{trace}\n{message}"


def result_of(
    name: str,
    episode: Any,
    playing: Playing,
    over: BoxEnded | None = None,
    policies: Mapping[str, str] | None = None,
) -> wire.Played:
    """What rank 0 is told of an episode that ended well. Several agents that train: the mean of their rewards.

    `over`: the limit of its sandbox that an agent reached: nobody can reward such an episode, and its reward is 0. `policies`: agent ->
    the other run that answers for it. Raises `ValueError` for rewards of turns that are not one number for each turn.
    """
    by_policy: dict[str, list[Any]] = {"": []}
    for trace in episode.traces:
        if trace.agent.trainable:
            by_policy.setdefault((policies or {}).get(trace.agent.name, ""), []).append(trace)
    rewards = {policy: _reward_of(traces, over) for policy, traces in by_policy.items()}
    if playing.stopped_by and not by_policy[""]:
        rewards[""] = 0.0  # the budget was used up before it was its agents' turn: they have no rows
    for policy, value in rewards.items():
        if not math.isfinite(value):
            whose = f" of run {policy!r}" if policy else ""
            none = "no agent of it trains"
            return wire.Played(name, error=f"its reward{whose} is {value}" if by_policy[policy] else none)
    traces, reward = by_policy.pop(""), rewards.pop("")
    taken = playing.taken()
    stopped = (
        [f"sandbox:{over.limit}"] if over is not None else [trace.stop_condition or "" for trace in traces]
    )
    return wire.Played(
        name,
        reward,
        parts_of(traces),
        _rows_of(traces, over),
        tuple(call for call, _ in taken),
        tuple(version for _, version in taken),
        "length"
        if playing.stopped_by or any(one.is_truncated or one.is_timeout for one in traces)
        else "stop",
        next((one for one in stopped if one), playing.stopped_by),
        others=tuple(
            wire.PolicyPart(
                policy,
                rewards[policy],
                _rows_of(mine, over),
                tuple(call for call, _ in playing.taken(policy)),
            )
            for policy, mine in sorted(by_policy.items())
        ),
        agents=len(traces),
    )


def _reward_of(traces: list[Any], over: BoxEnded | None) -> float:
    """The mean; NaN where there is none."""
    rewards = [0.0 if over is not None else float(trace.reward) for trace in traces]
    return math.fsum(rewards) / len(rewards) if rewards else math.nan


def _rows_of(traces: list[Any], over: BoxEnded | None) -> tuple[wire.Branch, ...]:
    paths = [branch.nodes for trace in traces for branch in trace.branches if branch.trainable]
    turns = [node for trace in traces for node in trace.nodes if node.sampled]
    return branches.rows_of(paths, turns, None if over is not None else turn_rewards_of(traces))


def turn_rewards_of(traces: list[Any]) -> list[float] | None:
    """What each turn of these agents earned, where their environment says so; None: it does not.

    Raises `ValueError` for anything but numbers, and where several agents share a reward: whose turns came before whose is not known.
    """
    if not any(TURN_REWARDS in trace.info for trace in traces):
        return None
    if len(traces) > 1:
        raise ValueError(
            f"trace.info[{TURN_REWARDS!r}] where {len(traces)} agents share one reward: give each a policy of its own (data.policies)"
        )
    found = traces[0].info[TURN_REWARDS]
    if not isinstance(found, list | tuple) or not all(
        isinstance(one, int | float) and not isinstance(one, bool) for one in found
    ):
        raise ValueError(f"trace.info[{TURN_REWARDS!r}] is no list of numbers: give one for each turn")
    try:
        return [float(one) for one in found]
    except OverflowError as error:
        raise ValueError(f"trace.info[{TURN_REWARDS!r}] has a number that no float holds") from error


def parts_of(traces: list[Any]) -> dict[str, float]:
    """Rewards without their weights, and metrics, by name; the mean over agents that have it."""
    found: dict[str, list[float]] = {}
    for trace in traces:
        scored = {name: one.score for name, one in trace.rewards.items() if one is not None}
        for part, value in {**trace.metrics, **scored}.items():
            if value is not None and math.isfinite(value) and PART.fullmatch(part):
                found.setdefault(part, []).append(float(value))
    return {name: math.fsum(values) / len(values) for name, values in sorted(found.items())[:MOST_PARTS]}


def _loaded(setup: wire.Setup) -> tuple[Any, Tasks, dict[str, str]]:
    """The environment, its tasks, and its roles with their runtimes."""
    try:
        import verifiers.v1 as vf

        config = limited(
            vf.resolve_env_config(settings_of(setup.environment, json.loads(setup.arguments))), setup
        )
        env = vf.load_environment(config)
        tasks = Tasks(env.taskset)
        if env.taskset.bounded and not tasks.count:
            raise ValueError("it has no task")
    except ConfigError:
        raise
    except Exception as error:  # whatever the environment's own code and its data set raise
        raise ConfigError(
            f"the environment {setup.environment!r} cannot be loaded",
            f"install its package for {sys.executable}, give data.environment_args that it takes{_its_agents(setup)}, and load its data "
            "set once where the network is: training jobs read the Hugging Face cache only",
            quoted=f"{type(error).__name__}: {error}",
        ) from error
    return env, tasks, roles_of(config)


def _its_agents(setup: wire.Setup) -> str:
    """For a remedy: which agents it has without any settings. "" where that cannot be told either."""
    try:
        import verifiers.v1 as vf

        roles = roles_of(vf.resolve_env_config(settings_of(setup.environment, {})))
    except Exception:  # noqa: BLE001  whatever the environment's own code raises
        return ""
    return f" (its agents: {', '.join(roles)})"


def roles_of(config: Any) -> dict[str, str]:
    """Names of the environment's agents, with the type of runtime that each one's configuration has."""
    from verifiers.v1.configs.agent import agent_config_fields

    found = {name: str(role.runtime.type) for name, role in agent_config_fields(config).items()}
    return dict(list(found.items())[: wire.MOST_ROLES])


def limited(config: Any, setup: wire.Setup) -> Any:
    """The environment's configuration with the run's limits, and processes of this host where a role names no runtime."""
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields

    roles = {}
    builtin.refuse_unknown_agents(setup, list(agent_config_fields(config)))
    for name, role in agent_config_fields(config).items():
        changes: dict[str, Any] = {}
        if "runtime" not in role.model_fields_set:
            changes["runtime"] = vf.SubprocessConfig()
        if setup.turns and role.max_turns is None:
            changes["max_turns"] = setup.turns
        if setup.tokens and role.max_output_tokens is None:
            changes["max_output_tokens"] = setup.tokens
        if role.timeout.rollout is None:
            changes["timeout"] = role.timeout.model_copy(update={"rollout": setup.seconds})
        roles[name] = role.model_copy(update=changes)
    if config.timeout.episode is None:
        whole = setup.seconds * len(roles) + GRACE_S
        roles["timeout"] = config.timeout.model_copy(update={"episode": whole})
    return config.model_copy(update=roles)


def _source(name: str) -> str:
    """Hash of the text of the environment's module, or of its folder: what its rewards follow from."""
    module = sys.modules.get(name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower())
    file = getattr(module, "__file__", None)
    if file is None:
        return "unknown"
    path = Path(file)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    hasher = blake3()
    for each in files:
        hasher.update(each.read_bytes())
    return hasher.hexdigest(8)


# ---------------------------------------------------------------- one episode


async def one_episode(player: Player, relay: Relay, setup: wire.Setup, ask: wire.Play) -> wire.Played:
    """From its set-up to its reward. Raises nothing but what ends this process."""
    started = time.monotonic()
    external = cast(OnDoubt, setup.on_doubt) if setup.effects == "external" else None
    playing = relay.begin(ask.episode, ask.key, cast(Setting, setup.on_divergence), external, setup.seconds)
    try:
        played = await player.play(ask, playing)
    except Exception as error:  # noqa: BLE001  the environment's own code
        said = traceback.format_exc(limit=-3)
        played = wire.Played(ask.episode, error=type(error).__name__, output=said)
    finally:
        relay.end(playing)
    if playing.ended is not None:
        reason = playing.ended.reason
        played = wire.Played(
            ask.episode,
            error="" if playing.ended.again else reason,
            again=reason if playing.ended.again else "",
            gone=playing.ended.gone,
            final=playing.ended.final,
        )
    if played.error and playing.recorder is not None and playing.recorder.any_asked:
        played = msgspec.structs.replace(played, final=True)  # another try would ask its tools again
    seconds = time.monotonic() - started
    return msgspec.structs.replace(
        played,
        seconds=seconds,
        seconds_model=playing.seconds,
        seconds_rest=max(0.0, seconds - playing.seconds_waited),
        note="; ".join(playing.notes),
    )


# ---------------------------------------------------------------- the process


def tools_by(relay: Relay, *, boxed: bool) -> None:
    """From now on, agents reach their tools' servers through the relay, which records what is to be recorded.

    Raises `ConfigError` for a release of the package that serves tools otherwise.
    """
    from verifiers.v1 import rollout

    served = vars(rollout).get("serve_tools")
    if served is None:
        raise ConfigError(
            "data.effects: this release of verifiers serves tools otherwise",
            'pip install "verifiers==0.4.0" for data.environment_python',
        )

    @contextlib.asynccontextmanager
    async def through(toolsets: Any, runtime: Any, *args: Any, **more: Any) -> AsyncIterator[dict[str, str]]:
        colocated = {one.server_name for one in toolsets if one.config.colocated and not one.config.url}
        async with served(toolsets, runtime, *args, **more) as urls:
            found = {}
            for name, url in urls.items():
                if name in colocated and boxed:  # its port is one of the box
                    inner = urlsplit(url)
                    url = f"{await runtime.expose(inner.port)}{inner.path}"
                found[name] = runtime.host_url(relay.tool(more["state_route"], name, url))
            yield found

    vars(rollout)["serve_tools"] = through


#: Makes a process's player, from what rank 0 says, its relay and its sandboxes.
Load = Callable[[wire.Setup, Relay, Boxed | None], Player]


async def _boxes(setup: wire.Setup) -> Boxed | None:
    """Sandboxes for plain processes, where the run has them. Raises `ConfigError` where there can be none."""
    told = setup.sandbox
    if told is None:
        return None
    check_version(_installed())
    limits = limits_of(told, setup.seconds + GRACE_S)
    plan = plan_of(limits, told.readable, told.hidden, Path.home())
    return installed(plan, await checked(plan))


def _frames(source: BinaryIO, came: Callable[[wire.Setup | wire.Play | None], None]) -> None:
    """Read frames until the end, which is None."""
    while (frame := read_frame(source.read)) is not None:
        came(wire.to_worker.decode(frame))
    came(None)


def _player(setup: wire.Setup, relay: Relay, boxed: Boxed | None) -> Player:
    """Raises `ConfigError`."""
    if builtin.is_built_in(setup.environment):
        return builtin.BuiltIn(setup, relay)
    return Environment(setup, relay, boxed)


async def serve(source: BinaryIO, out: BinaryIO, load: Load) -> int:
    """Until the trainer closes its end. The exit code."""
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[wire.Setup | wire.Play | None] = asyncio.Queue()

    def came(message: wire.Setup | wire.Play | None) -> None:
        loop.call_soon_threadsafe(inbox.put_nowait, message)

    def told(message: wire.Ready | wire.Played) -> None:
        out.write(framed(msgspec.msgpack.encode(message)))
        out.flush()

    threading.Thread(target=_frames, args=(source, came), name="frames", daemon=True).start()
    setup = await inbox.get()
    if not isinstance(setup, wire.Setup):
        return 0
    relay = Relay(setup.endpoint, setup.name, setup.context_length)
    try:
        builtin.check(setup)
        boxed = await _boxes(setup)
        player = await asyncio.to_thread(load, setup, relay, boxed)
    except ConfigError as error:
        told(wire.Ready(error=error.cause, remedy=error.remedy, output=error.quoted))
        return 2
    playing: set[asyncio.Task[None]] = set()

    async def play(ask: wire.Play) -> None:
        told(await one_episode(player, relay, setup, ask))

    async with relay.serving(), player.serving():
        told(player.ready())
        while (message := await inbox.get()) is not None:
            if isinstance(message, wire.Play):
                task = asyncio.create_task(play(message))
                playing.add(task)
                task.add_done_callback(playing.discard)
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
    return 0


def main(load: Load = _player) -> int:
    """`load`: what makes the player of this process, which may raise `ConfigError`."""
    die_with_parent()
    source = os.fdopen(os.dup(0), "rb")
    out = os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)  # what an environment prints
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        return asyncio.run(serve(source, out, load))
    return 0


if __name__ == "__main__":
    sys.exit(main())
