"""Training state that waits in host memory while engines generate: the same steps bit by bit, and the account of the GPU shows it go."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from rollout.engines import account
from rollout.engines.account import Cuda, OverCapacity, Shared
from scavenger.config import AlgorithmSection, LoraSection, OptimizerSection, TrainerSection
from tests.gpu_account import other_process
from tests.trainer import published
from tests.trainer.rows import make_group
from trainer.algorithms.rows import resolve
from trainer.checkpoint import checkpoint
from trainer.checkpoint.saving import Saver
from trainer.data.batching import pack
from trainer.launch import environment
from trainer.model import offload
from trainer.model.learner import Learner
from trainer.model.memory import RankGpu, RankMemory
from trainer.model.offload import Offload, choose

ROOT = Path(__file__).resolve().parents[2]
LORA = LoraSection(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))
GB = 10**9
ROOMY = 10**9
PLENTY = dict.fromkeys(("weights", "optimizer", "gradients", "step"), 0)


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[Shared]:
    found = Shared(account.create(tmp_path / "gpu", ROOMY), 0, "rank 0")
    yield found
    found.close()


def make_learner(
    folder: Path,
    mesh: DeviceMesh,
    mode: str,
    *,
    gpu: Shared | None = None,
    shared: bool = True,
    lora: bool = False,
    reference: bool = False,
    deterministic: bool = False,
    **how: Any,
) -> Learner:
    return Learner(
        folder,
        mesh,
        recipe=resolve(AlgorithmSection(kl_coef=0.1 if reference else 0.0), 8),
        optimizer=OptimizerSection(lr=1e-3, weight_decay=0.1),
        temperature=0.7,
        deterministic=deterministic,
        trainer=TrainerSection(offload=mode, **how),  # type: ignore[arg-type]
        lora=LORA if lora else LoraSection(),
        gpu=RankGpu(gpu, shared=shared) if gpu is not None else None,
    )


def steps(learner: Learner, count: int = 3) -> list[object]:
    """Steps with engines woken before each, and in the middle of each, as in a run without harvested engines."""
    found: list[object] = []
    for step in range(count):
        learner.release()
        learner.take_back()
        for number, micro in enumerate(pack([make_group(4 * step + n) for n in range(4)], budget=60)):
            if number == 1:
                learner.release()
                learner.take_back()
            found.append(learner.train(micro))
        found.append(learner.update(8.0, 1e-3))
    return found


def all_of(learner: Learner) -> dict[str, torch.Tensor]:
    learner.state_to_load()
    return {name: value.full_tensor().clone() for name, value in learner.state().items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "how",
    [{}, {"lora": True}, {"activation_checkpointing": True}, {"deterministic": True}, {"reference": True}],
    ids=str,
)
def test_steps_are_the_same_bit_by_bit_whether_state_went_away_or_stayed(
    model_folder: Path, mesh: DeviceMesh, how: dict[str, Any]
) -> None:
    stayed, went = (make_learner(model_folder, mesh, mode, **how) for mode in ("never", "always"))
    assert steps(went) == steps(stayed)
    mine, theirs = all_of(went), all_of(stayed)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("reference", [False, True])
def test_the_account_shows_every_byte_of_training_state_leave_and_return(
    model_folder: Path, mesh: DeviceMesh, gpu: Shared, reference: bool
) -> None:
    def held() -> dict[str, int]:
        return PLENTY | {row.purpose: row.nbytes for row in gpu.table()}

    learner = make_learner(model_folder, mesh, "always", gpu=gpu, reference=reference)
    parameters = sum(parameter.numel() for parameter in learner.trained().values())
    at_first = held()
    assert at_first["weights"] == 4 * parameters * (2 if reference else 1)
    assert at_first["optimizer"] == 8 * parameters
    learner.train(pack([make_group(0)], budget=200)[0])
    trained = held()
    assert trained["gradients"] >= 4 * parameters
    assert trained["step"] > 0
    assert learner.release() == gpu.own() == 0, "nothing of it stays beside an engine"
    storages = offload.storages([*learner.trained().values()])
    assert {storage.nbytes() for storage in storages.values()} == {0}, "freed, and not merely said to be"
    learner.take_back()
    assert held() == trained | {"step": held()["step"]}
    assert {storage.nbytes() for storage in storages.values()} != {0}
    learner.update(1.0, 1e-3)
    assert held()["gradients"] == 0
    learner.release()
    assert gpu.own() == 0


def test_what_stays_is_told_too_and_what_is_unused_is_given_back(
    model_folder: Path, mesh: DeviceMesh, gpu: Shared
) -> None:
    learner = make_learner(model_folder, mesh, "never", gpu=gpu)
    state = gpu.own()
    learner.train(pack([make_group(0)], budget=200)[0])
    learner.update(1.0, 1e-3)
    assert gpu.own() > state
    assert state <= learner.release() < state + 2**17


def test_training_beside_an_engine_that_has_the_gpu_is_an_error_with_both_tables(
    model_folder: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    probe = Shared(account.create(tmp_path / "probe", ROOMY), 0, "rank 0")
    learner = make_learner(model_folder, mesh, "never", gpu=probe)
    resident = probe.own()
    small = account.create(tmp_path / "small", resident + 100_000)
    engine, rank = Shared(small, 0, "engine 0"), Shared(small, 0, "rank 0")
    learner = make_learner(model_folder, mesh, "always", gpu=rank)
    learner.release()
    engine.take("weights", resident)
    with pytest.raises(OverCapacity, match=rf"engine 0 .*= weights {resident:,}"):
        learner.train(pack([make_group(0)], budget=200)[0])
    for one in (probe, engine, rank):
        one.close()


def test_a_step_s_activations_count(model_folder: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    def peak(samples: int, **how: Any) -> int:
        path = account.create(tmp_path / f"gpu-{samples}-{len(how)}", ROOMY)
        rank = Shared(path, 0, "rank 0")
        learner = make_learner(model_folder, mesh, "never", gpu=rank, **how)
        for micro in pack([make_group(n) for n in range(samples)], budget=10**6):
            learner.train(micro)
        (found,) = (row.most for row in rank.table() if row.purpose == "step")
        rank.close()
        return found

    assert peak(32) > 3 * peak(4), "they grow with the tokens of a micro-batch"


def test_a_checkpoint_and_a_version_made_while_engines_have_the_gpu_are_the_same(
    model_folder: Path, mesh: DeviceMesh, tmp_path: Path, gpu: Shared
) -> None:
    files, roots = [], []
    for mode in ("never", "always"):
        learner = make_learner(model_folder, mesh, mode, gpu=gpu)
        steps(learner, 1)
        learner.release()
        away = gpu.own()
        path = checkpoint.prepare(tmp_path / mode, 1, 1)
        saver = Saver()
        saver.begin(learner.state(), path)
        saver.wait()
        files.append({file.name: load_file(file) for file in sorted(path.glob("*.safetensors"))})
        roots.append(published.build_version(1, learner, "bfloat16")[0].root)
        assert gpu.own() == away, "and engines keep it"
        loaded = make_learner(model_folder, mesh, mode, gpu=gpu)
        loaded.release()
        checkpoint.load_shards(loaded, path, learner.updates_taken)
        assert steps(loaded, 1) == steps(learner, 1)
    assert roots[0] == roots[1]
    assert files[0].keys() == files[1].keys() != set()
    for name, tensors in files[0].items():
        assert all(torch.equal(value, files[1][name][key]) for key, value in tensors.items())


def test_gradients_that_are_dropped_while_they_are_away_do_not_return(
    model_folder: Path, mesh: DeviceMesh
) -> None:
    stayed, went = (make_learner(model_folder, mesh, mode) for mode in ("never", "always"))
    for learner in (stayed, went):
        learner.train(pack([make_group(9)], budget=200)[0])
        learner.release()
        learner.discard_gradients()
    assert steps(went, 1) == steps(stayed, 1)


@dataclass(eq=False)
class Event:
    """Of CUDA's stream that copies, played on a CPU: the copies of one unit. Who waits for it finds them made."""

    unit: Any

    def make_copies(self) -> None:
        for copy in self.unit.copies:
            offload._bytes_of(copy.storage, torch.device("cpu")).copy_(copy.host)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What the stream that computes has waited for, in order."""
    waited: list[Event] = []

    class Stream:
        def wait_event(self, event: Event) -> None:
            waited.append(event)
            event.make_copies()

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return waited


def state_of(learner: Learner) -> Offload:
    return learner._memory._state


def under_way(learner: Learner) -> Offload:
    """The state has been away, and as on CUDA all its copies back are under way."""
    learner.release()
    learner.take_back()
    state = state_of(learner)
    state._cuda = True
    for unit in (*state._units, state._moments):
        unit.event = Event(unit)
    return state


@pytest.mark.parametrize("how", [{}, {"reference": True}], ids=str)
def test_fsdp_gathers_no_layer_before_its_copy_has_arrived(
    model_folder: Path,
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    streams: list[Event],
    how: dict[str, Any],
) -> None:
    told: list[tuple[Any, Any]] = []

    def tell(group: Any, event: Any) -> None:
        if isinstance(event, Event):
            assert not group.is_unsharded
            told.append((group, event))

    learner = make_learner(model_folder, mesh, "always", **how)
    state = under_way(learner)
    events = {unit.module: unit.event for unit in state._units}
    monkeypatch.setattr(FSDPParamGroup, "_wait_all_gather_streams_on_event", tell)
    learner.train(pack([make_group(0)], budget=200)[0])
    found = [(module, event) for group, event in told for module in group.modules]
    assert found == [*events.items()], "in the order in which copies are made"
    assert set(streams) == set(events.values()), "and the stream that computes has waited as well"


def test_gradients_are_dropped_once_their_copies_back_have_arrived(
    model_folder: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, streams: list[Event]
) -> None:
    """Else a copy under way would write over what computing puts there next."""
    learner = make_learner(model_folder, mesh, "always")
    learner.train(pack([make_group(9)], budget=200)[0])
    state = under_way(learner)
    events, plain = {unit.event for unit in state._units}, learner.optimizer.zero_grad
    waited: list[set[Event]] = []

    def zero_grad(set_to_none: bool = True) -> None:
        waited.append(set(streams))
        plain(set_to_none)

    monkeypatch.setattr(learner.optimizer, "zero_grad", zero_grad)
    learner.discard_gradients()
    assert waited == [events]
    assert state.gradients() == []
    learner.train(pack([make_group(0)], budget=200)[0])


@pytest.mark.parametrize(
    ("how", "offloads", "reason"),
    [
        (("always", 1, 1, 100), True, 'trainer.offload = "always"'),
        (("never", 100, 100, 100), False, 'trainer.offload = "never"'),
        (("auto", 5, None, 0), False, "there is no GPU that engines could share"),
        (("auto", 5, 0, 100), False, "no reserved engine lies on this GPU"),
        (
            ("auto", 16 * 10**9, None, 80 * 10**9),
            True,
            "what an engine takes of 80 GB beside 16 GB of training state is not known yet",
        ),
        (
            ("auto", 16 * 10**9, 59 * 10**9, 80 * 10**9),
            False,
            "16 GB of training state and 59 GB of engines fit a GPU of 80 GB",
        ),
        (
            ("auto", 16 * 10**9, 60 * 10**9, 80 * 10**9),
            True,
            "16 GB of training state and 60 GB of engines do not fit a GPU of 80 GB, of which 75.2 GB are usable",
        ),
        (
            ("auto", 16 * 10**9, 72 * 10**9, 80 * 10**9),
            True,
            "16 GB of training state and 72 GB of engines do not fit a GPU of 80 GB, of which 75.2 GB are usable",
        ),
    ],
)
def test_the_rule_says_why(how: tuple[Any, ...], offloads: bool, reason: str) -> None:
    mode, resident, engine, capacity = how
    chosen = choose(mode, resident=resident, engine=engine, capacity=capacity)
    assert (chosen.offload, chosen.reason) == (offloads, reason)


def test_auto_decides_by_what_engines_were_seen_to_take(
    model_folder: Path, mesh: DeviceMesh, tmp_path: Path
) -> None:
    for nbytes, offloads in ((1000, False), (1_900_000, True)):
        path = account.create(tmp_path / f"gpu-{nbytes}", 2_000_000)
        rank = Shared(path, 0, "rank 0")
        learner = make_learner(model_folder, mesh, "auto", gpu=rank)
        with capture_logs() as said:
            learner.release()
            with other_process(path, f"one.take('cache', {nbytes}); one.give('cache', {nbytes})"):
                learner.note_engines()
            learner.take_back()
            learner.release()
        chosen = [(line["offload"], line["reason"]) for line in said if line["event"] == "trainer.offload"]
        assert chosen[0][0]
        assert "is not known yet" in chosen[0][1]
        assert [one for one, _ in chosen[1:]] == ([] if offloads else [False]), "told again where it changes"
        assert (rank.own() == 0) is offloads
        if not offloads:
            assert "of engines fit a GPU of 2 MB" in chosen[1][1]
        rank.close()


@dataclass
class Device:
    """CUDA's figures of one GPU of 80 GB: what torch's allocator here has of it, and what all have."""

    own: int = 0
    held: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Device:
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: self.own)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * GB - self.held, 80 * GB))
        return self


def test_on_cuda_only_what_came_since_the_first_release_is_taken_for_engines(
    model_folder: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(16 * GB, 16 * GB + GB // 2).install(monkeypatch)  # half a GB: the trainer's own context
    state = state_of(make_learner(model_folder, mesh, "never"))
    memory = RankMemory(RankGpu(Cuda(0, "rank 0")), state, "auto")

    def reason() -> str:
        memory.take_back()
        memory.release()
        assert memory.choice is not None
        return memory.choice.reason

    assert "is not known yet" in reason()
    device.held += GB  # NCCL's buffers
    memory.note_engines()
    assert "is not known yet" in reason(), "no engine was seen"
    device.held += 50 * GB
    memory.note_engines()
    device.held -= 50 * GB
    assert reason() == "16 GB of training state and 51 GB of engines fit a GPU of 80 GB"


def test_a_gpu_without_engines_keeps_its_state(model_folder: Path, mesh: DeviceMesh, gpu: Shared) -> None:
    learner = make_learner(model_folder, mesh, "auto", gpu=gpu, shared=False)
    assert learner.release() > 0


@pytest.mark.mpi
def test_two_ranks_whose_state_went_away_train_the_same_bit_by_bit(
    model_folder: Path, tmp_path: Path
) -> None:
    environ = environment(os.environ, root=os.geteuid() == 0) | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    program = [sys.executable, str(Path(__file__).with_name("offload_program.py"))]
    argv = ["mpirun", "-n", "2", *program, str(model_folder), str(tmp_path)]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
