"""What `benchmarks/gpu.py` measures: one function a part, each run in a process of its own. Reads no command line; decides no deadline.

Every part does on a CPU with tiny sizes what it does on a GPU with full ones. There the peak of a step is what the account of the GPU
counts (`rollout.engines.account`), as in the tests; on a GPU it is the allocator's. What does not fit is noted, and the next case follows.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.gpu import Bench

#: What `gpu.preload` imports once where parts are copies of its process.
PRELOAD = ("trainer.model.learner", "rollout.engines.decoder", "scavenger.weights.delta")
MIB = 1 << 20
GB = 1e9


@dataclass(frozen=True, slots=True)
class Dense:
    """A Qwen3 of these sizes, embeddings tied."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int = 151_936

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        norms = 2 * self.hidden + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.inner + norms
        return self.layers * layer + self.vocabulary * self.hidden + self.hidden

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 40_960,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "use_cache": True,
            "eos_token_id": 0,
            "torch_dtype": "bfloat16",
        }


# huggingface.co/Qwen/Qwen3-0.6B, -1.7B and -4B, config.json
B06 = Dense("0.6B", 28, 1024, 16, 8, 128, 3072)
B17 = Dense("1.7B", 28, 2048, 16, 8, 128, 6144)
B4 = Dense("4B", 36, 2560, 32, 8, 128, 9728)
TINY = Dense("tiny", 2, 64, 4, 2, 16, 128, 256)


# ---------------------------------------------------------------- what parts share


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(function: Callable[[], object]) -> float:
    """Seconds until the device has done it."""
    synchronize()
    began = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - began


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def case(bench: Bench, name: str) -> Iterator[None]:
    """What does not fit is noted; whatever else goes wrong ends the part.

    Its memory comes back only once the error is gone: so it is freed as the next case begins.
    """
    free()
    try:
        yield
    except torch.OutOfMemoryError as error:
        bench.note(name, f"does not fit: {str(error).splitlines()[0]}")


def made(bench: Bench, model: Dense) -> Path:
    """The model's folder: random weights, drawn on the device tensor by tensor, in bfloat16. Made once for all parts.

    The last norm is 2, so that the distributions of tokens are not quite flat; a trained model's are sharper still.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(bench.settings.scratch) / model.name
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "draft.json").write_text(json.dumps(model.config()))
    config = AutoConfig.for_model(
        **{key: value for key, value in model.config().items() if key != "architectures"}
    )
    with torch.device("meta"):
        shapes = {
            name: tuple(p.shape) for name, p in AutoModelForCausalLM.from_config(config).named_parameters()
        }
    generator = torch.Generator(bench.device).manual_seed(0)
    weights: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        value = torch.ones(shape, dtype=torch.bfloat16, device=bench.device)
        if len(shape) > 1:
            value.normal_(0.0, 0.02, generator=generator)
        elif name == "model.norm.weight":
            value.fill_(2.0)
        weights[name] = value.cpu()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "draft.json").rename(folder / "config.json")  # last: a folder with it is whole
    free()
    return folder


def mesh() -> Any:
    """Of this process alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from trainer.loop import comm

    if dist.is_initialized():
        return init_device_mesh(
            "cuda" if torch.cuda.is_available() else "cpu", (1,), mesh_dim_names=("data",)
        )
    return comm.join(comm.Solo())


def has_chunked_head() -> bool:
    from scavenger.config import TrainerSection

    return "head_chunk_tokens" in TrainerSection.model_fields


def learner(bench: Bench, model: Dense, *, account: Any = None, **trainer: Any) -> Any:
    """The product's learner on one rank, as a run makes it. `trainer`: keys of [trainer]."""
    from scavenger.config import AlgorithmSection, OptimizerSection, TrainerSection
    from trainer.algorithms.rows import resolve
    from trainer.model.learner import Learner
    from trainer.model.memory import RankGpu

    recipe = resolve(AlgorithmSection(name="dapo", dynamic_sampling=False, importance="off"), 8192)
    return Learner(
        made(bench, model),
        mesh(),
        recipe=recipe,
        optimizer=OptimizerSection(lr=1e-6),
        temperature=1.0,
        deterministic=False,
        trainer=TrainerSection(**({"offload": "never"} | trainer)),
        gpu=RankGpu(account) if account is not None else None,
    )


def micro(model: Dense, lengths: Sequence[int], prompt: int = 16) -> Any:
    """One packed micro-batch of samples of these lengths, tokens at random."""
    from trainer.data.batching import Micro, TrainRow

    rng = np.random.default_rng(0)
    rows = []
    for number, length in enumerate(lengths):
        tokens = rng.integers(1, model.vocabulary, length, dtype=np.int32)
        completion = tokens[prompt:]
        behaviour = np.full(len(completion), -math.log(model.vocabulary), dtype=np.float32)
        advantage = 1.0 if number % 2 else -1.0
        rows.append(
            TrainRow(number, tokens[:prompt].tobytes(), completion.tobytes(), behaviour.tobytes(), advantage)
        )
    return Micro(tuple(rows), 0)


class Peak:
    """The most memory that a learner takes of its GPU, in bytes: the allocator's, or the account's where that stands for a GPU."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.account: Any = None
        if bench.device == "cpu":
            from rollout.engines import account

            path = account.create(Path(bench.settings.scratch) / f"gpu-{bench.name}-{name}", 1 << 40)
            self.account = account.Shared(path, 0, name)

    def reset(self) -> None:
        if self.account is None:
            synchronize()
            torch.cuda.reset_peak_memory_stats()

    def now(self) -> int:
        """What torch keeps for reuse counted in."""
        return torch.cuda.memory_reserved() if self.account is None else self.account.own()

    def most(self) -> int:
        return (
            torch.cuda.max_memory_allocated()
            if self.account is None
            else sum(row.most for row in self.account.table())
        )

    def most_reserved(self) -> int:
        return torch.cuda.max_memory_reserved() if self.account is None else self.most()

    def close(self) -> None:
        if self.account is not None:
            self.account.close()


def predicted(model: Dense, tokens: int, *, recompute: bool, head_chunk: int, device: str) -> Any:
    """What `scavenger init --check` adds up for one rank without an engine."""
    from scavenger.sizing import fit
    from scavenger.sizing.shape import of_config
    from scavenger.sizing.training import TrainJob

    shape = of_config(model.config())
    job = TrainJob(
        ranks=1,
        gpu_gb=80.0,
        micro_tokens=tokens,
        checkpointing=recompute,
        trained=shape.parameters,
        reference=False,
        reserved=False,
        engine_share=0.9,
        engine_gpus=1,
        head_chunk=head_chunk,
        compute=2 if device == "cuda" else 4,
        flash=device == "cuda",
    )
    return fit.need(shape, job)


def head_chunk() -> int:
    """`trainer.head_chunk_tokens` as a run has it where nothing is set; 0 in a release without it."""
    from scavenger.config import TrainerSection

    return int(getattr(TrainerSection(), "head_chunk_tokens", 0))


# ---------------------------------------------------------------- mfu


def mfu(bench: Bench) -> None:
    """Model FLOPs of forward and backward (recomputing is no model's work) over time and peak; on a CPU over what a product of matrices
    reaches there."""
    from scavenger.simulate import presets
    from trainer.model import attention

    flash = bench.device == "cuda" and attention._varlen() is not None
    bench.note(
        "attention",
        "torch's variable-length flash" if flash else "scaled_dot_product_attention, a call a sample",
    )
    reached = matmul_flops(bench)
    bench.figure("matrix product", "rate", reached / 1e12, "TFLOP/s")
    kind = bench.settings.gpu.get("name", "")
    sheet = next((gpu for gpu in (presets.H200, presets.H100, presets.A100) if gpu.name in kind), None)
    peak = sheet.dense_flops if sheet is not None else reached
    of = f"of {peak / 1e12:,.4g} TFLOP/s, {'the data sheet' if sheet is not None else 'the matrix product'}"
    cases = (
        [(TINY, False, [256]), (TINY, True, [64] * 4)]
        if bench.tiny
        else [
            (B06, False, [8192]),
            (B17, False, [8192]),
            (B4, True, [8192]),
            (B17, True, [8192]),
            (B06, False, [1024] * 8),
        ]
    )
    for model, recompute, lengths in cases:
        name = f"{model.name}, {len(lengths)} x {lengths[0]:,} tokens{', recomputed' * recompute}"
        if bench.left_s < 25 and not bench.tiny:
            bench.note(name, "no time is left")
            continue
        with case(bench, name):
            _utilisation(bench, name, model, recompute, lengths, peak, of)


def _utilisation(
    bench: Bench, name: str, model: Dense, recompute: bool, lengths: list[int], peak: float, of: str
) -> None:
    from scavenger.simulate import trainer_model
    from scavenger.simulate.decode import Model

    began = time.perf_counter()
    rank = learner(bench, model, activation_checkpointing=recompute)
    bench.figure(name, "load", time.perf_counter() - began, "s")
    work, tokens = micro(model, lengths), sum(lengths)
    dense = Model(
        model.name,
        model.layers,
        model.hidden,
        model.heads,
        model.kv_heads,
        model.head_dim,
        model.inner,
        model.vocabulary,
        tied=True,
    )
    flops = 3 * trainer_model.forward_flops(dense, lengths)
    for _ in range(2):
        rank.train(work)
    rank.update(float(tokens), 1e-6)
    one = [timed(lambda: rank.train(work)) for _ in range(3 if bench.tiny else 5)]
    bench.figure(name, "forward and backward", [flops / (s * peak) for s in one], note=of)
    rank.discard_gradients()
    whole = [timed(lambda: _step(rank, work, 4, tokens)) for _ in range(2 if bench.tiny else 3)]
    share = [4 * flops / (s * peak) for s in whole]
    bench.figure(name, "step of 4 micro-batches and update", share, least=0.4, note=of)
    bench.figure(name, "tokens", [4 * tokens / s for s in whole], "tokens/s")


def _step(rank: Any, work: Any, count: int, tokens: int) -> None:
    for _ in range(count):
        rank.train(work)
    rank.update(float(count * tokens), 1e-6)


def matmul_flops(bench: Bench) -> float:
    """What a plain product of matrices reaches, the best of some."""
    size, dtype = (8192, torch.bfloat16) if bench.device == "cuda" else (384, torch.float32)
    left, right = (torch.randn(size, size, device=bench.device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        left @ right
    return 2 * size**3 / min(timed(lambda: left @ right) for _ in range(10))


# ---------------------------------------------------------------- memory: step and head


def step(bench: Bench) -> None:
    cases: list[tuple[Dense, bool, list[int]]] = (
        [(TINY, False, [256])]
        if bench.tiny
        else [
            (B06, False, [4096, 8192, 16384]),
            (B06, True, [8192, 16384]),
            (B17, True, [8192, 16384]),
            (B17, False, [8192]),
        ]
    )
    for model, recompute, sizes in cases:
        what = f"{model.name}{', recomputed' * recompute}"
        if bench.left_s < 15 and not bench.tiny:
            bench.note(what, "no time is left")
            continue
        with case(bench, what):
            _peaks(bench, what, model, recompute, sizes)


def _peaks(bench: Bench, what: str, model: Dense, recompute: bool, sizes: list[int]) -> None:
    peak = Peak(bench, f"{model.name}-{recompute}")
    rank = learner(bench, model, account=peak.account, activation_checkpointing=recompute)
    for tokens in sizes:
        name = f"{what}, {tokens:,} tokens"
        with case(bench, name):
            rank.release()
            peak.reset()
            _step(rank, micro(model, [tokens]), 2, tokens)
            asks = predicted(model, tokens, recompute=recompute, head_chunk=head_chunk(), device=bench.device)
            said = (asks.states + asks.step) * GB
            note = f"{peak.most() / GB:.4g} GB, {said / GB:.4g} predicted"
            bench.figure(name, "peak over predicted", peak.most() / said, least=0.9, most=1.1, note=note)
            bench.figure(name, "reserved over peak", peak.most_reserved() / peak.most())
        rank.discard_gradients()
    peak.close()


def head(bench: Bench) -> None:
    wide = dataclasses.replace(TINY, name="tiny-wide", vocabulary=8192)
    model, tokens = (wide, 256) if bench.tiny else (B06, 16384)
    chunked = (64 if bench.tiny else head_chunk() or 1024) if has_chunked_head() else 0
    if not chunked:
        bench.note(model.name, "this release has no trainer.head_chunk_tokens: the plain head alone")
    found: dict[str, tuple[int, list[float]]] = {}
    for name, setting in {"plain": 0, "by chunks": chunked}.items():
        if name != "plain" and not chunked:
            continue
        with case(bench, f"{model.name}, {name}"):
            found[name] = _headed(
                bench, name, model, tokens, {"head_chunk_tokens": setting} if chunked else {}
            )
    if len(found) == 2:
        (before, slow), (after, quick) = found["plain"], found["by chunks"]
        name = f"{model.name}, {tokens:,} tokens, chunks of {chunked:,}"
        bench.figure(name, "memory, plain over chunks", before / after)
        bench.figure(name, "time, chunks over plain", [b / a for a, b in zip(slow, quick, strict=True)])


def _headed(
    bench: Bench, name: str, model: Dense, tokens: int, setting: dict[str, int]
) -> tuple[int, list[float]]:
    """Bytes that a micro-batch takes beside masters and moments, gradients included, and seconds."""
    peak = Peak(bench, name.replace(" ", "-"))
    rank = learner(bench, model, account=peak.account, activation_checkpointing=True, **setting)
    work = micro(model, [tokens])
    rank.train(work)
    rank.discard_gradients()
    peak.reset()
    seconds = [timed(lambda: rank.train(work)) for _ in range(3)]
    most = peak.most() - 12 * model.parameters
    where = f"{model.name}, {tokens:,} tokens, {name}"
    bench.figure(where, "memory beside states", most / GB, "GB")
    bench.figure(where, "forward and backward", seconds, "s")
    peak.close()
    return most, seconds


# ---------------------------------------------------------------- offload and toggle


def offload(bench: Bench) -> None:
    model, tokens = (TINY, 256) if bench.tiny else (B17, 8192)
    out, back = copy_rates(bench)
    bench.figure("plain copy", "GPU to pinned host", out, "GB/s")
    bench.figure("plain copy", "pinned host to GPU", back, "GB/s")
    peak = Peak(bench, "offload")
    rank = learner(
        bench, model, account=peak.account, activation_checkpointing=not bench.tiny, offload="always"
    )
    work = micro(model, [tokens])
    for _ in range(2):
        _step(rank, work, 1, tokens)
    usual = min(timed(lambda: rank.train(work)) for _ in range(2))
    rank.discard_gradients()
    held, state = peak.now(), 12 * model.parameters  # masters and two moments; no gradients between steps
    first = timed(rank.release)
    bench.figure(model.name, "first release, which pins", first, "s")
    bench.figure(
        model.name,
        "freed of what was held",
        1 - peak.now() / held,
        least=0.95,
        note=f"{held / GB:.3g} GB held",
    )
    away, returned, exposed = [], [], []
    for _ in range(3):
        returned.append(timed(lambda: (rank.take_back(), rank.state_to_load())))
        away.append(timed(rank.release))
        exposed.append(max(0.0, timed(lambda: (rank.take_back(), rank.train(work))) - usual))
        rank.discard_gradients()
        rank.state_to_load()
        rank.release()
    bench.figure(model.name, "release", away, "s")
    bench.figure(model.name, "take back, all of it", returned, "s")
    bench.figure(model.name, "take back under a step: added", exposed, "s")
    bench.figure(model.name, "release over plain copy", [state / s / GB / out for s in away])
    bench.figure(model.name, "take back over plain copy", [state / s / GB / back for s in returned])
    peak.close()


def copy_rates(bench: Bench) -> tuple[float, float]:
    """GB/s of one large copy each way, the best of three."""
    nbytes = MIB if bench.tiny else 2 << 30
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=bench.device == "cuda")
    there = torch.empty(nbytes, dtype=torch.uint8, device=bench.device)
    out, back = (
        min(timed(partial(a.copy_, b, non_blocking=True)) for _ in range(3))
        for a, b in ((host, there), (there, host))
    )
    return nbytes / out / GB, nbytes / back / GB


class EngineProcess:
    """The reference engine in a process of its own on the same GPU, as a reserved engine is."""

    def __init__(self, bench: Bench, folder: Path, account: str) -> None:
        context: Any = multiprocessing.get_context("spawn" if bench.device == "cuda" else "fork")
        self._pipe, there = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(there, self._pipe, str(folder), bench.device, bench.tiny, account)
        )
        self._process.start()
        there.close()

    def ask(self, command: str) -> int:
        """Returns the bytes that it holds afterwards."""
        self._pipe.send_bytes(command.encode())
        return int(self._pipe.recv_bytes())

    def end(self) -> None:
        self._pipe.close()
        self._process.join(5.0)
        self._process.kill()


def _serve(pipe: Any, other: Any, folder: str, device: str, tiny: bool, account: str) -> None:
    other.close()  # so that the end of this process's parent is seen
    if account:
        os.environ["SCAVENGER_GPU_ACCOUNT"] = account
    from rollout.engines import account as accounts

    decoder = decoder_of(
        Path(folder),
        "bfloat16",
        device,
        batch=8,
        context=64 if tiny else 1024,
        sleeps=True,
        gpu=accounts.opened(os.environ, 0, "engine"),
    )
    decoder.load(weights(Path(folder)))
    try:
        while True:
            match pipe.recv_bytes().decode():
                case "sleep":
                    decoder.offload()
                case "wake":
                    decoder.restore()
                case "token":
                    decoder.step(requests(8, 16, 1, decoder.vocab_size), ())
            synchronize()
            pipe.send_bytes(str(decoder.bytes_held()).encode())
    except EOFError:
        pass


def toggle(bench: Bench) -> None:
    model, tokens = (TINY, 256) if bench.tiny else (B17, 8192)
    folder = made(bench, model)
    peak = Peak(bench, "toggle")
    path = str(Path(bench.settings.scratch) / "gpu-toggle-toggle") if peak.account is not None else ""
    engine = EngineProcess(bench, folder, path)  # before this process computes
    engine.ask("token")
    asleep = engine.ask("sleep")
    bench.figure("engine asleep", "holds", asleep / GB, "GB", most=0.1)
    for mode in ("never", "always"):
        with case(bench, f"{model.name}, offload {mode}"):
            _toggled(bench, engine, model, tokens, mode, peak)
        engine.ask("sleep")
    engine.end()
    peak.close()


def _toggled(bench: Bench, engine: EngineProcess, model: Dense, tokens: int, mode: str, peak: Peak) -> None:
    """To training: the engine sleeps, and what the first micro-batch then takes beyond its usual time. To generating: the trainer gives
    its memory back, and the engine wakes."""
    name, work = f"{model.name}, offload {mode}", micro(model, [tokens])
    rank = learner(bench, model, account=peak.account, activation_checkpointing=not bench.tiny, offload=mode)
    for _ in range(2):
        _step(rank, work, 1, tokens)
    usual = min(timed(lambda: rank.train(work)) for _ in range(2))
    rank.discard_gradients()
    rank.release()  # the first one pins
    engine.ask("wake")
    generating, training, token = [], [], []
    for _ in range(3):
        sleeping = timed(lambda: engine.ask("sleep"))
        first = timed(lambda: (rank.take_back(), rank.train(work)))
        training.append(sleeping + max(0.0, first - usual))
        rank.discard_gradients()
        released = timed(rank.release)
        generating.append(released + timed(lambda: engine.ask("wake")))
        token.append(timed(lambda: engine.ask("token")))
    bench.figure(name, "to training", training, "s")
    bench.figure(name, "to generating", generating, "s")
    bench.figure(name, "first tokens of 8 samples", token, "s")
    bench.figure(name, "trainer holds while engines generate", peak.now() / GB, "GB")


# ---------------------------------------------------------------- delta and merge


def delta(bench: Bench) -> None:
    """Of chunks as versions have them, between the bfloat16 casts of float32 masters before and after an update of Adam's size."""
    count, rng = 2 if bench.tiny else 128, np.random.default_rng(0)
    masters = torch.from_numpy(rng.standard_normal(count * MIB // 2, dtype=np.float32)).mul_(0.02)
    moved = torch.from_numpy(rng.standard_normal(len(masters), dtype=np.float32)).clamp_(-1, 1)
    for lr in (1e-6, 1e-5):
        old, new = (_bytes(value.bfloat16()) for value in (masters, masters + lr * moved))
        _changed(bench, f"{count} MiB, lr {lr:g}", old, new)


def _changed(bench: Bench, name: str, old: memoryview, new: memoryview) -> None:
    from rollout.engines.device_delta import DeviceApply
    from scavenger.weights import delta as deltas

    pieces = [slice(start, start + MIB) for start in range(0, len(old), MIB)]
    few = range(max(1, len(pieces) // 8))  # of one core
    encoded, into = [b""] * len(pieces), memoryview(bytearray(len(old)))
    cores = len(os.sched_getaffinity(0))

    def encode(index: int) -> None:
        encoded[index] = deltas.chain([deltas.encode(old[pieces[index]], new[pieces[index]], 2)])

    def apply(index: int) -> None:
        deltas.apply_chain(old[pieces[index]], memoryview(encoded[index]), into[pieces[index]])

    with ThreadPoolExecutor(cores) as pool:
        for what, function in {"encode": encode, "apply": apply}.items():

            def alone(function: Callable[[int], None] = function) -> None:
                for index in few:
                    function(index)

            def together(function: Callable[[int], None] = function) -> None:
                list(pool.map(function, range(len(pieces))))

            one, many = ([timed(turn) for _ in range(2)] for turn in (alone, together))
            bench.figure(name, f"{what}, one core", [len(few) * MIB / s / GB for s in one], "GB/s")
            bench.figure(name, f"{what}, {cores} cores", [len(old) / s / GB for s in many], "GB/s")
        if into != new:
            raise ValueError("applying the delta did not give the new version")
        into[:] = bytes(len(into))
        there = DeviceApply(bench.device)

        def apply_there(index: int) -> None:
            there(old[pieces[index]], memoryview(encoded[index]), into[pieces[index]])

        list(pool.map(apply_there, range(len(pieces))))  # the first ones make streams and compile kernels
        device = [timed(lambda: list(pool.map(apply_there, range(len(pieces))))) for _ in range(3)]
    bench.figure(
        name, f"apply, on {bench.device}, {cores} threads", [len(old) / s / GB for s in device], "GB/s"
    )
    bench.figure(name, "apply, all cores over the device, time", ratios(many, device))
    if into != new:
        raise ValueError("applying the delta on the device did not give the new version")
    bench.figure(name, "delta over whole", sum(map(len, encoded)) / len(old))
    copied = min(timed(lambda: into.__setitem__(slice(None), old)) for _ in range(3))
    bench.figure(name, "apply, all cores, over a plain copy", [copied / s for s in many])


def _bytes(value: Tensor) -> memoryview:
    raw: Any = value.contiguous().view(-1).view(torch.uint8)
    return memoryview(raw.numpy())


def merge(bench: Bench) -> None:
    """W0 + scale B A of an 8B model's layer at rank 16. GB are of the base as it is stored, in bfloat16."""
    from rollout.engines import lora, merging
    from scavenger.weights.manifest import TensorView

    shapes = [(96, 64), (64, 96)] if bench.tiny else [(4096, 4096), (12288, 4096), (4096, 12288)]
    generator = torch.Generator().manual_seed(0)
    for rows, width in shapes:
        base = torch.randn(rows, width, generator=generator).mul_(0.02).bfloat16()
        down, up = (torch.randn(*size, generator=generator) for size in ((16, width), (rows, 16)))
        nbytes, name = base.nbytes, f"{rows} x {width}, rank 16"

        def merged(
            parts: tuple[Tensor, ...] = tuple(value.to(bench.device) for value in (base, down, up)),
        ) -> Tensor:
            return lora.merged(parts[0], parts[1], parts[2], 2.0).bfloat16()

        merged()
        seconds = [timed(merged) for _ in range(5)]
        bench.figure(name, f"on {bench.device}", [nbytes / s / GB for s in seconds], "GB/s")
        views = [
            TensorView("w", "bfloat16", (rows, width), _bytes(base)),
            TensorView("a", "float32", (16, width), _bytes(down)),
            TensorView("b", "float32", (rows, 16), _bytes(up)),
        ]
        whole = merging.Merged(views[0], "bfloat16", (views[1], views[2], 2.0))
        host = [timed(partial(getattr, whole, "data")) for _ in range(2)]
        bench.figure(name, "as an engine reads it, on the host", [nbytes / s / GB for s in host], "GB/s")
        bench.figure(name, "host over device, time", ratios(host, seconds))
        moved = [timed(partial(whole.on, bench.device)) for _ in range(3)]
        bench.figure(
            name, f"as an engine has it, on {bench.device}", [nbytes / s / GB for s in moved], "GB/s"
        )
        equal = bytes(whole.data) == bytes(_bytes(merged().cpu()))
        bench.figure(name, "device's bits are the host's", float(equal), least=1.0)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Of pairs, as far as they go."""
    return [one / other for one, other in zip(above, below, strict=False)]


# ---------------------------------------------------------------- the reference engine


def weights(folder: Path) -> Iterator[Any]:
    """Of a model made in place, as an engine is given them."""
    from safetensors.torch import load_file

    from scavenger.weights.manifest import TensorView

    for name, value in load_file(folder / "model.safetensors").items():
        yield TensorView(name, "bfloat16", tuple(value.shape), _bytes(value))


def decoder_of(
    folder: Path, dtype: str, device: str, *, batch: int, context: int, sleeps: bool = False, gpu: Any = None
) -> Any:
    from rollout.engines.decoder import Decoder
    from scavenger.protocol.messages import EngineSpec

    text = (folder / "config.json").read_text()
    spec = EngineSpec(name="gpu", model_config=text, dtype=dtype, max_batch=batch, context_length=context)
    return Decoder(spec, device, sleeps=sleeps, gpu=gpu)


def requests(count: int, prompt: int, new: int, vocabulary: int, temperature: float = 0.0) -> list[Any]:
    from scavenger.protocol.messages import SampleKey, Sampling
    from scavenger.protocol.worker.events import Request

    rng = np.random.default_rng(1)
    sampling = Sampling(max_tokens=new, temperature=temperature)
    prompts = [tuple(rng.integers(1, vocabulary, prompt).tolist()) for _ in range(count)]
    return [
        Request(n, tokens, (), new, sampling, 0, SampleKey("gpu", 0, n, 0))
        for n, tokens in enumerate(prompts)
    ]


@dataclass(slots=True)
class Drawn:
    tokens: list[int]
    logprobs: list[float]
    raw: list[float]


def generated(decoder: Any, asked: list[Any]) -> tuple[list[Drawn], float]:
    """Of each request in order, and seconds. Raises `ValueError` where logits were not finite."""
    found = [Drawn([], [], []) for _ in asked]
    left, joining, began = len(asked), asked, time.perf_counter()
    while left:
        for one in decoder.step(joining, ()):
            if one.error:
                raise ValueError(one.error)
            drawn = found[one.handle]
            drawn.tokens += one.token_ids
            drawn.logprobs += one.logprobs
            drawn.raw += one.raw_logprobs
            left -= one.finish is not None
        joining = []
    synchronize()
    return found, time.perf_counter() - began


def reference(bench: Bench) -> None:
    """Greedy in float32, all samples at once, against the CPU's; where that is the device, one sample at a time."""
    model, count, new = (TINY, 4, 8) if bench.tiny else (B06, 8, 32)
    folder, context = made(bench, model), 128
    rates: list[float] = []
    results: list[list[Drawn]] = []
    for device, batch in ((bench.device, count), ("cpu", 1 if bench.device == "cpu" else count)):
        decoder = decoder_of(folder, "float32", device, batch=batch, context=context)
        decoder.load(weights(folder))
        generated(decoder, requests(1, 8, 2, model.vocabulary))  # warm-up
        drawn, seconds = generated(decoder, requests(count, 32, new, model.vocabulary))
        results.append(drawn)
        rates.append(count * new / seconds)
        del decoder
        free()
    same, gaps = 0, [0.0]
    for ours, theirs in zip(*results, strict=True):
        until = next(
            (n for n, pair in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if pair[0] != pair[1]),
            new,
        )
        same += until
        gaps += [abs(a - b) for a, b in zip(ours.raw[:until], theirs.raw[:until], strict=True)]
    name = f"{model.name}, {count} samples of {new} tokens"
    bench.figure(name, "equal tokens, until one differs", same / (count * new), least=0.95)
    bench.figure(name, "largest |logprob - CPU's|", max(gaps), "nats", most=1e-3)
    bench.figure(name, "tokens, float32", rates[0], "tokens/s")
    bench.figure(name, "over the CPU's", rates[0] / rates[1])


def mismatch(bench: Bench) -> None:
    """|trainer's logprob - engine's| of drawn tokens, the same weights in both; float32 is the floor that rounding of sums leaves."""
    model, count, new = (TINY, 4, 16) if bench.tiny else (B06, 16, 128)
    folder = made(bench, model)
    medians: dict[str, float] = {}
    for dtype in ("bfloat16", "float32"):
        with case(bench, f"{model.name}, {dtype}"):
            medians[dtype] = _disagreement(bench, model, folder, dtype, count, new)
    if len(medians) == 2:
        bench.figure(
            model.name, "median, bfloat16 over float32", medians["bfloat16"] / max(medians["float32"], 1e-12)
        )


def _disagreement(bench: Bench, model: Dense, folder: Path, dtype: str, count: int, new: int) -> float:
    """Returns the median."""
    from trainer.data.batching import Micro, TrainRow

    name = f"{model.name}, {dtype}"
    asked = requests(count, 32, new, model.vocabulary, temperature=1.0)
    decoder = decoder_of(folder, dtype, bench.device, batch=count, context=32 + new)
    decoder.load(weights(folder))
    drawn, _ = generated(decoder, asked)
    del decoder
    free()
    rank = learner(bench, model, compute_dtype=dtype)
    rows = [
        TrainRow(
            n, _int32(request.prompt), _int32(one.tokens), np.asarray(one.logprobs, "<f4").tobytes(), 0.0
        )
        for n, (request, one) in enumerate(zip(asked, drawn, strict=True))
    ]
    proximal = rank.proximal(Micro(tuple(rows), 0))
    ratio = np.concatenate(
        [np.frombuffer(proximal[n], np.float64) - np.asarray(one.logprobs) for n, one in enumerate(drawn)]
    )
    gap = np.abs(ratio)
    median = float(np.median(gap))
    bench.figure(name, "median", median, "nats")
    bench.figure(name, "p99", float(np.quantile(gap, 0.99)), "nats")
    bench.figure(name, "most", float(gap.max()), "nats")
    k3 = float(np.mean(np.expm1(ratio) - ratio))
    bench.figure(name, "k3", k3, "nats", note="estimates KL(engine, trainer) a token")
    return median


def _int32(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<i4").tobytes()
