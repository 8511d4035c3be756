"""Agents' turns through the gateway against `vllm serve` of the same version: turns a second, and the time to the first token.

    python benchmarks/agents.py [--rounds 3] [--sessions 64] [--turns 8] [--tool-s 0.5] [--tokens 32] [--hidden 128] [--layers 4]

Both serve the same model on this machine with the same vLLM, through the same endpoint (`/inference/v1/generate`, streamed) to the same
clients: `--sessions` agents, each of `--turns` turns that wait `--tool-s` for a tool in between; a turn's prompt is all before it and 16
tokens more, and `--tokens` are generated. `vllm serve` is one process (and its core). Ours is a whole site: the daemon with its ledger in
SQLite, the harvested worker with vLLM, the gateway; each turn is durable before its last byte is sent. One after the other in each
round, in turns; the other server is stopped meanwhile (SIGSTOP), so that both have the whole machine.

Prints each round's ratio of completed turns a second (goal: a median of at least 0.95) and the difference of the median times to the
first token (goal: at most 5 ms). Needs vLLM, with or without a GPU, and the extra `gateway`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx2

from scavenger import toml
from scavenger.cluster.layout import demo_layout
from scavenger.demo.site import DemoSite, SiteOptions
from scavenger.weights.source import WeightServer
from tests.system import play, scripted

ROOT = Path(__file__).resolve().parents[1]
GOAL_RATIO, GOAL_FIRST_MS = 0.95, 5.0
OBSERVATION = 16
START_S = 600.0


@dataclass(frozen=True, slots=True)
class Served:
    """`key`: bearer of a session; `pids`: every process that serves."""

    name: str
    url: str
    pids: tuple[int, ...]
    admin_key: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """`first_ms`: of each turn, milliseconds from the call to the first tokens."""

    turns_per_s: float
    first_ms: Sequence[float]


def write_model(folder: Path, options: argparse.Namespace) -> None:
    write_random_model(folder, options.hidden, options.layers, context(options))


def write_random_model(folder: Path, hidden: int, layers: int, most_tokens: int) -> None:
    """A random Qwen3 of the given sizes, with the sorting task's tokenizer, which nothing here uses but both servers' starts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.tasks import sort
    from trainer.tiny import model_config

    torch.manual_seed(0)
    values = model_config(hidden=hidden, layers=layers)
    kind = AutoConfig.for_model(
        values.pop("model_type"), **{**values, "max_position_embeddings": most_tokens}
    )
    AutoModelForCausalLM.from_config(kind, dtype=torch.float32).save_pretrained(folder)
    sort.write_tokenizer(folder)


def processes(named: Path) -> tuple[int, ...]:
    """Every other process that names this path in its arguments or environment, and what such a process started."""
    text, found = os.fsencode(named), []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name)
            if (
                pid != os.getpid()
                and text in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            ):
                found.append(pid)
    return tuple(found)


def wait_for_reply(url: str, alive: Any, log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        if not alive():
            raise SystemExit(f"the server ended at its start:\n{log.read_text()[-3000:]}")
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(url, timeout=5.0).status_code == 200:
                return
        if time.monotonic() > end:
            raise SystemExit(f"no reply of {url} within {START_S:g} s:\n{log.read_text()[-3000:]}")
        time.sleep(0.5)  # between two looks at a condition


@contextlib.contextmanager
def vllm_alone(model: Path, folder: Path, options: argparse.Namespace) -> Iterator[Served]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "vllm.log"
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--enable-scale-out", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", str(context(options)), "--max-num-seqs", str(options.sessions)),
        *("--block-size", "32", "--enforce-eager", "--disable-uvicorn-access-log"),
    ]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }
    # vLLM's sockets are in it, whose paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as temporary:
        with log.open("wb") as file:
            environment["TMPDIR"] = temporary
            process = subprocess.Popen(argv, stdout=file, stderr=file, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for_reply(f"{url}/health", lambda: process.poll() is None, log)
            yield Served("vllm serve", url, processes(Path(temporary)))
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def ours(model: Path, folder: Path, options: argparse.Namespace, engine: str = "vllm") -> Iterator[Served]:
    """A whole site of ours and its gateway; one turn has been served."""
    patient = {"suspect_s": 60.0, "dead_s": 120.0}  # an engine that is stopped for a round is not dead
    site_options = SiteOptions(
        "local", folder / "site", demo_layout(grace_s=5.0), max_engines=1, daemon=patient
    )
    with DemoSite(site_options) as site, WeightServer() as source:
        document = play.run_document(
            site.state_dir,
            site.dir / "out",
            model,
            run={"name": "agents", "deterministic": False, "max_engines": 1},
            engine={"name": engine, "max_batch": options.sessions},
        )
        document["model"]["context_length"] = context(options)
        run_toml = site.dir / "run.toml"
        run_toml.write_text(toml.dumps(document))
        with scripted.opened(run_toml) as run:
            scripted.publish(run, source, model, 0)
            with gateway_of(site, run_toml) as served:
                asyncio.run(
                    round_of(served, argparse.Namespace(**{**vars(options), "sessions": 1, "turns": 1}), 0)
                )
                yield replace(served, pids=processes(site.dir))
                run.close_run("finished")


@contextlib.contextmanager
def gateway_of(site: DemoSite, run_toml: Path) -> Iterator[Served]:
    """A gateway of the run, which replies. `pids` are not looked for."""
    log = site.dir / "gateway.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "scavenger", "gateway", str(run_toml)],
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    try:
        announced = site.dir / "out" / f"gateway.{socket.gethostname()}.json"
        play.wait_for("the gateway", lambda: process.poll() is not None or announced.exists(), START_S)
        if process.poll() is not None:
            raise SystemExit(f"the gateway ended at its start:\n{log.read_text()[-3000:]}")
        said = json.loads(announced.read_text())
        wait_for_reply(f"{said['endpoint']}/health", lambda: process.poll() is None, log)
        yield Served("gateway", said["endpoint"], (), said["admin_key"])
    finally:
        process.terminate()
        process.wait(30)


def context(options: argparse.Namespace) -> int:
    return int(options.turns * (OBSERVATION + options.tokens) + 32)


async def session(
    http: httpx2.AsyncClient, served: Served, options: argparse.Namespace, number: int
) -> list[float]:
    """One agent's turns. Gives milliseconds to the first tokens of each."""
    headers = {}
    if served.admin_key:
        asked = await http.post(
            "/episodes",
            json={"episode": f"episode-{number}"},
            headers={"Authorization": f"Bearer {served.admin_key}"},
        )
        asked.raise_for_status()
        headers = {"Authorization": f"Bearer {asked.json()['api_key']}"}
    said: list[int] = []
    first_ms = []
    for turn in range(options.turns):
        said += [(number * 31 + turn * 7 + i) % 16 for i in range(OBSERVATION)]
        body = {
            "token_ids": said,
            "stream": True,
            "sampling_params": {
                "max_tokens": options.tokens,
                "temperature": 1.0,
                "ignore_eos": True,
                "logprobs": 1,
            },
        }
        if not served.admin_key:
            body["model"] = ""
        began = time.monotonic()
        made: list[int] = []
        async with http.stream("POST", "/inference/v1/generate", json=body, headers=headers) as reply:
            if reply.status_code != 200:
                raise SystemExit(f"{served.name}: {reply.status_code} {(await reply.aread())[:500]!r}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                part = json.loads(line[6:])
                if "error" in part:
                    raise SystemExit(f"{served.name}: {part}")
                for choice in part["choices"]:
                    if choice.get("token_ids") and not made:
                        first_ms.append(1000 * (time.monotonic() - began))
                    made += choice.get("token_ids") or []
        if len(made) != options.tokens:
            raise SystemExit(f"{served.name}: {len(made)} tokens came where {options.tokens} were asked for")
        said += made
        if turn + 1 < options.turns:
            await asyncio.sleep(options.tool_s)  # the tool
    return first_ms


async def round_of(served: Served, options: argparse.Namespace, number: int) -> Round:
    limits = httpx2.Limits(max_connections=options.sessions, max_keepalive_connections=options.sessions)
    async with httpx2.AsyncClient(base_url=served.url, timeout=START_S, limits=limits) as http:
        began = time.monotonic()
        found = await asyncio.gather(
            *(session(http, served, options, 1000 * number + i) for i in range(options.sessions))
        )
        took = time.monotonic() - began
    return Round(options.sessions * options.turns / took, [one for each in found for one in each])


@contextlib.contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """These processes take no CPU meanwhile."""
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: Sequence[int], what: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, what)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tool-s", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="scv-") as name:
        folder, model = Path(name), Path(name) / "model"
        write_model(model, options)
        with vllm_alone(model, folder, options) as theirs:
            with stopped(theirs.pids), contextlib.ExitStack() as entered:
                gateway = entered.enter_context(ours(model, folder, options))
                entered_late = entered.pop_all()
            with entered_late:
                return compare(theirs, gateway, options)


def compare(theirs: Served, gateway: Served, options: argparse.Namespace) -> int:
    ratios, differences = [], []
    with stopped(gateway.pids):
        asyncio.run(round_of(theirs, argparse.Namespace(**{**vars(options), "turns": 1}), 0))  # warm
    for number in range(1, options.rounds + 1):
        with stopped(gateway.pids):
            bare = asyncio.run(round_of(theirs, options, number))
        with stopped(theirs.pids):
            found = asyncio.run(round_of(gateway, options, number))
        ratios.append(found.turns_per_s / bare.turns_per_s)
        first, bare_first = statistics.median(found.first_ms), statistics.median(bare.first_ms)
        differences.append(first - bare_first)
        print(
            f"round {number}: turns a second {bare.turns_per_s:.1f} vllm serve, {found.turns_per_s:.1f} gateway, ratio {ratios[-1]:.3f}; "
            f"median to the first token {bare_first:.1f} ms, {first:.1f} ms, {differences[-1]:+.1f} ms",
            flush=True,
        )
    ratio, late = statistics.median(ratios), statistics.median(differences)
    print(
        f"turns a second, gateway / vllm serve: median {ratio:.3f}, spread {min(ratios):.3f} to {max(ratios):.3f} (goal {GOAL_RATIO}: "
        f"{'met' if ratio >= GOAL_RATIO else 'missed'})\n"
        f"median to the first token, added: median {late:+.1f} ms, spread {min(differences):+.1f} to {max(differences):+.1f} "
        f"(goal {GOAL_FIRST_MS:g}: {'met' if late <= GOAL_FIRST_MS else 'missed'})"
    )
    return 0 if ratio >= GOAL_RATIO and late <= GOAL_FIRST_MS else 1


if __name__ == "__main__":
    sys.exit(main())
