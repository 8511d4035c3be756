"""The worker as a process: what its arguments and environment mean, what it refuses, signals, and exit codes."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from scavenger import __version__
from scavenger.protocol import keys, messages
from scavenger.protocol.messages import Lease, SampleKey, Sampling, pack_tokens
from scavenger.protocol.worker.events import EXIT_CANNOT_START, EXIT_PREEMPTED, EXIT_REFUSED
from scavenger.weights import files
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest
from scavenger.weights.source import WeightServer
from tests.rollout.daemon import FakeDaemon
from tests.rollout.stage import ME, SERVER


@pytest.fixture
def program() -> Iterator[ModuleType]:
    """`rollout.__main__`, whose import sets a handler for SIGTERM that is not for this process."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield importlib.import_module("rollout.__main__")
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("kind", "argv", "environment", "slot"),
    [
        ("reserved", [], {}, ""),
        ("reserved", [], {"SCAVENGER_SLOT": "e1"}, "e1"),
        ("reserved", ["--slot", "e2"], {"SCAVENGER_SLOT": "e1"}, "e2"),
        ("harvested", [], {"SCAVENGER_SLOT": "e1"}, ""),
    ],
)
def test_only_a_reserved_engine_has_a_slot(
    program: ModuleType, kind: str, argv: list[str], environment: dict[str, str], slot: str
) -> None:
    arguments = program._arguments(
        ["--state-dir", "/s", "--key", "/k", "--kind", kind, "--run", "run", *argv]
    )
    assert program.identity(arguments, environment).slot == slot


def test_a_slot_for_a_harvested_engine_is_refused(
    program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        program._arguments(
            ["--state-dir", "/s", "--key", "/k", "--kind", "harvested", "--run", "run", "--slot", "e1"]
        )
    assert "reserved engines" in capsys.readouterr().err


def test_a_job_that_was_submitted_for_another_release_is_refused(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before it reads its key or asks the daemon anything."""
    argv = [
        "--state-dir",
        str(tmp_path),
        "--key",
        "/none",
        "--kind",
        "harvested",
        "--run",
        "run",
        "--code",
        "0.0.1",
    ]
    assert program.main(argv, {}) == EXIT_REFUSED
    said = capsys.readouterr().err
    assert f"submitted for release 0.0.1, and {sys.executable} has release {__version__}" in said
    assert "\n  remedy: restart the daemon after an upgrade" in said
    program.check_code(__version__)
    program.check_code("")


@pytest.mark.parametrize(
    ("key", "environment", "said"),
    [("/not-mounted/worker.key", {}, "does not exist"), ("", {"SCAVENGER_GPUS": "two"}, "is not a number")],
)
def test_a_worker_that_lacks_something_where_it_runs_was_not_refused(
    program: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    key: str,
    environment: dict[str, str],
    said: str,
) -> None:
    """That may be so on this node alone, which is to be seen by the exit code."""
    path = key or str(_key_file(tmp_path, ME))
    argv = [
        "--state-dir",
        str(tmp_path),
        "--key",
        path,
        "--kind",
        "harvested",
        "--run",
        "run",
        "--code",
        __version__,
    ]
    assert program.main(argv, environment) == EXIT_CANNOT_START
    assert said in capsys.readouterr().err


def test_arguments_of_a_later_release_are_refused_as_its_jobs_are(
    program: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 would be held against the node."""
    with pytest.raises(SystemExit) as left:
        program.main(
            ["--state-dir", "/s", "--key", "/k", "--kind", "harvested", "--run", "run", "--of-tomorrow", "1"],
            {},
        )
    assert left.value.code == EXIT_REFUSED
    said = capsys.readouterr().err
    assert "--of-tomorrow" in said
    assert f"{sys.executable} has {__version__}" in said


@asynccontextmanager
async def process(state_dir: Path, key: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    argv = [
        "-m",
        "rollout",
        "--state-dir",
        str(state_dir),
        "--key",
        str(key),
        "--kind",
        "harvested",
        "--run",
        "run",
    ]
    facts = {
        "SCAVENGER_JOB_ID": "17",
        "SCAVENGER_RESTART_COUNT": "2",
        "SCAVENGER_NODE": "node3",
        "SCAVENGER_GPUS": "1",
    }
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        *argv,
        env={**os.environ, **facts, "OMP_NUM_THREADS": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


def _key_file(tmp_path: Path, pair: keys.KeyPair) -> Path:
    path = tmp_path / "worker.key"
    keys.write_keypair(path, pair)
    return path


def test_the_process_survives_sigstop_and_leaves_on_sigterm_in_time(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the reference engine needs the [trainer] extra")
    from tests.rollout import models

    model = models.plain_model(models.config_text())
    manifest, blob = models.weights(model)
    spec = models.spec(context=500)

    async def main() -> None:
        with FakeDaemon(tmp_path, SERVER, {ME.public}) as daemon, WeightServer() as source:
            async with process(tmp_path, _key_file(tmp_path, ME)) as worker:
                hello = await daemon.expect(messages.WorkerHello)
                assert (hello.job_id, hello.incarnation, hello.node, hello.gpus, hello.pid) == (
                    17,
                    2,
                    "node3",
                    1,
                    worker.pid,
                )
                daemon.send(messages.Welcome(1, 1, "run", spec, 0.2, 20.0, 8))
                daemon.send(
                    messages.UseWeights(1, manifests.encode(manifest), (source.publish(manifest, blob),))
                )
                await daemon.expect(messages.WeightsLoaded, 60.0)
                leases = [
                    Lease(i, 1, 1, pack_tokens((1, 2)), b"", Sampling(400), 3, SampleKey("train", 0, i, 0))
                    for i in range(16)
                ]
                daemon.send(messages.Assign(tuple(leases)))
                await daemon.tokens(0, 20)
                worker.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.8)
                daemon.inbox.clear()
                worker.send_signal(signal.SIGCONT)
                await daemon.expect(messages.Chunks)  # goes on, on the same connection
                assert not any(isinstance(m, messages.WorkerHello) for m in daemon.inbox)
                worker.send_signal(signal.SIGTERM)
                goodbye = await daemon.expect(messages.Goodbye)
                assert (goodbye.reason, goodbye.notice) == ("SIGTERM", True)
                # The daemon never acks: a worker that waited for it would not end.
                assert await asyncio.wait_for(worker.wait(), 60.0) == EXIT_PREEMPTED
                assert worker.stderr is not None
                log = (await worker.stderr.read()).decode()
                assert ME.secret not in log
                assert "worker.left" in log

    asyncio.run(main())


LETTERS = "abcdefghijklmnopqrstuvwxyzABC"


def letters() -> bytes:
    """The tokenizer.json of a model of 29 tokens, a letter each."""
    made = Tokenizer(WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="a"))
    made.decoder = Fuse()
    return made.to_str().encode()


def test_a_worker_without_any_file_of_the_model_ends_samples_at_stop_texts_also_moved_ones_and_with_adapters(
    tmp_path: Path,
) -> None:
    """All that it knows of the model came over the socket, the tokenizer with the weights: it is in no folder."""
    pytest.importorskip("torch", reason="the reference engine needs the [trainer] extra")
    from tests.rollout import models

    model = models.plain_model(models.config_text())
    weights = {view.name: (view.dtype, view.shape, view.data) for view in models.views(model)}
    tokenizer = letters()
    beside = {files.TOKENIZER: (files.DTYPE, (len(tokenizer),), memoryview(tokenizer))}
    layer = "model.layers.0.self_attn.q_proj"
    pair = {
        f"{layer}.lora_A.weight": ("float32", (2, 32), memoryview(bytes(256))),
        f"{layer}.lora_B.weight": ("float32", (32, 2), memoryview(bytes(256))),  # they change nothing
    }

    async def ended(daemon: FakeDaemon, sample: int, version: int, how: Sampling, accepted: list[int]) -> str:
        """The text of a sample's tokens after the accepted ones, with how it ended."""
        key = SampleKey("train", 0, 0, 0)  # one sample, moved about
        lease = Lease(sample, 1, version, pack_tokens((1, 2)), pack_tokens(accepted), how, 3, key)
        daemon.send(messages.Assign((lease,)))
        found, finish = list(accepted), None
        while finish is None:
            for chunk in (await daemon.expect(messages.Chunks)).chunks:
                if chunk.sample_id == sample:
                    found[chunk.offset :] = messages.unpack_tokens(chunk.tokens)
                    finish = chunk.finish
        return "".join(LETTERS[token] for token in found[len(accepted) :]) + f" {finish}"

    async def main() -> None:
        base = manifests.build(1, weights | beside)
        plain = manifests.build(3, weights)
        adapter = manifests.Adapter(base[0].root, 1.0, "float32")
        adapted = manifests.build(2, pair, adapter=adapter)
        with FakeDaemon(tmp_path, SERVER, {ME.public}) as daemon, WeightServer(keep=4) as source:

            def order(
                of: tuple[Manifest, memoryview], base: messages.BaseWeights | None = None
            ) -> messages.UseWeights:
                held = (source.publish(*of),)
                return messages.UseWeights(of[0].version, manifests.encode(of[0]), held, base=base)

            async with process(tmp_path, _key_file(tmp_path, ME)):
                await daemon.expect(messages.WorkerHello)
                daemon.send(messages.Welcome(1, 1, "run", models.spec(), 0.2, 20.0, 8))
                daemon.send(order(base))
                await daemon.expect(messages.WeightsLoaded)
                whole, how = (await ended(daemon, 1, 1, Sampling(40), [])).split()
                assert (len(whole), how) == (40, "length")
                at = next(n for n in range(12, 38) if whole[n : n + 3] not in whole[: n + 2])
                stops = Sampling(40, stop=(whole[at : at + 3],))
                tokens = [LETTERS.index(letter) for letter in whole]
                samples = itertools.count(2)
                under = messages.BaseWeights(1, manifests.encode(base[0]), (source.publish(*base),))
                for version in (1, 2):
                    if version == 2:
                        daemon.send(order(adapted, base=under))
                        await daemon.expect(messages.WeightsLoaded)
                    for moved in (0, 5, at, at + 1, at + 2):
                        said = await ended(daemon, next(samples), version, stops, tokens[:moved])
                        assert said == f"{whole[moved : at + 3]} stop"
                daemon.send(order(plain))  # by a trainer that forgot it
                await daemon.expect(messages.WeightsLoaded)
                lease = Lease(99, 1, 3, pack_tokens((1, 2)), b"", stops, 3, SampleKey("train", 0, 1, 0))
                daemon.send(messages.Assign((lease,)))
                refused = await daemon.expect(messages.SampleFailed)
                assert "the weights came without the tokenizer.json" in refused.reason

    asyncio.run(main())


def test_a_wrong_key_ends_the_process_with_78(tmp_path: Path) -> None:
    async def main() -> None:
        with FakeDaemon(tmp_path, SERVER, {ME.public}):
            async with process(tmp_path, _key_file(tmp_path, keys.generate())) as worker:
                assert await asyncio.wait_for(worker.wait(), 90.0) == EXIT_REFUSED
                assert worker.stderr is not None
                assert b"does not accept this worker's key" in await worker.stderr.read()

    asyncio.run(main())


def test_a_key_that_others_can_read_ends_the_process_with_72_and_its_remedy(tmp_path: Path) -> None:
    async def main() -> None:
        key = _key_file(tmp_path, ME)
        key.chmod(0o644)
        async with process(tmp_path, key) as worker:
            assert await asyncio.wait_for(worker.wait(), 90.0) == EXIT_CANNOT_START
            assert worker.stderr is not None
            assert b"chmod 600" in await worker.stderr.read()

    asyncio.run(main())
