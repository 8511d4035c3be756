"""What we add to vLLM's own worker (`worker_extension_cls`): weights from memory, their checksum, and the raw logprobs.

Runs in vLLM's processes, one object a tensor-parallel rank, called by name through `collective_rpc`. Owns nothing that outlives a call but
the hooks. Must not know the daemon, the network or a file: weights come in a memory file of the worker process, verified by it.

Boundary: code that runs inside vLLM's own processes.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from rollout.engines import merging, slices
from rollout.engines.checksum import NOTHING, Sum, checksum, sources
from rollout.engines.merging import FileMerge, FileRow
from rollout.engines.slices import Boxes
from scavenger.errors import describe

_log = structlog.get_logger(__name__)
PARENT = "SCAVENGER_ENGINE_PARENT"  # process id of the worker that started the engine
FOLDER = "scv-"  # how the engine's private folder is called
PROBE_ROWS = 512

TensorRow = tuple[str, str, Sequence[int], int, int, int]  # name, dtype, shape, file, offset, nbytes
AdapterRow = tuple[str, FileRow, FileRow]  # a layer's name, where its A lies, where its B
EncodedSum = tuple[str, int, bool]  # a checksum's value in hexadecimal, its elements, whether all are numbers
Sums = dict[str, EncodedSum]  # by name


def live_and_die_with(parent: int) -> None:
    """End this process, and vLLM's core above it, when the worker `parent` is gone; leave signals to the worker.

    A worker that is killed cannot end its engine, which would hold the GPU. Slurm sends SIGTERM to every process of a step, and the engine
    goes on until the worker has flushed.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    core = os.getppid()
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        poller = select.poll()
        poller.register(watched, select.POLLIN)
        poller.poll()
        folder = os.environ.get("VLLM_RPC_BASE_PATH", "")
        if os.path.basename(folder).startswith(
            FOLDER
        ):  # the worker's own for this engine: no other process removes it now
            shutil.rmtree(folder, ignore_errors=True)
        if core not in (1, parent) and os.getppid() == core:
            os.kill(core, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


# On import, because that is the first thing of ours that happens in the process: before devices and memory are taken. Not in the worker
# itself, which imports this module too.
if PARENT in os.environ and multiprocessing.parent_process() is not None:
    live_and_die_with(int(os.environ[PARENT]))


class Extension:
    """Mixed into vLLM's worker; the names must not be any of its own. `self.model_runner` is vLLM's."""

    model_runner: Any
    rank: int
    execute_model: Callable[..., Any]
    _read: Boxes  # of each published tensor, what this rank reads
    _share: Boxes  # and what it sums

    def scavenger_probe(self, shapes: Mapping[str, Sequence[int]]) -> Boxes:
        """Which parts of tensors of these shapes this rank keeps, by its model's own loaders. Of those for which it has no parameter,
        nothing is said."""
        with unwrapped(self.model_runner.get_model()) as model:
            known = _dtypes(model, list(shapes), getattr(model, "packed_modules_mapping", {}))
            self._read = read_by_loaders(model, {name: shapes[name] for name in shapes if name in known})
        return self._read

    def scavenger_share(self, shares: Sequence[Boxes]) -> None:
        """`shares`: by rank, the parts whose checksum it says with each load. After `scavenger_probe`, before the first load."""
        self._share = shares[self.rank]
        for name, boxes in self._share.items():
            kept = self._read.get(name, [])
            if not all(any(slices.contains(box, share) for box in kept) for share in boxes):
                self._read[name] = list(boxes)  # the whole: no share is anything else that is not kept

    def scavenger_load(
        self, paths: Sequence[str], table: Sequence[TensorRow], merges: Mapping[str, FileMerge] | None = None
    ) -> tuple[Sums, Sums, dict[str, list[str]], Sums, int]:
        """Replace all weights in place by those of memory files, tensor by tensor: at most one layer lies twice on the device.

        `merges`: what is made, on the device, of those that are a base. Of each tensor only what this rank keeps is read, and made.

        Returns the checksums of its share of what was published, in the engine's types; of what this rank holds now; which modules are
        fused of which; the checksums of its share as it was published; and how many bytes it read.
        """
        with unwrapped(self.model_runner.get_model()) as model:
            return self._load(model, paths, table, merges or {})

    def _load(
        self,
        model: nn.Module,
        paths: Sequence[str],
        table: Sequence[TensorRow],
        merges: Mapping[str, FileMerge],
    ) -> tuple[Sums, Sums, dict[str, list[str]], Sums, int]:
        packed = {name: list(parts) for name, parts in getattr(model, "packed_modules_mapping", {}).items()}
        dtypes = _dtypes(model, [row[0] for row in table], packed)
        cast: dict[str, Sum] = {}
        published: dict[str, Sum] = {}
        files = [mapped(path) for path in paths]
        read_nbytes = 0

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal read_nbytes
            for name, dtype, shape, file, offset, nbytes in table:
                row = dtype, shape, file, offset, nbytes
                merge, kept = merges.get(name), self._read.get(name, [])
                source = merging.from_files(files, row, merge, kept, self.model_runner.device)
                read_nbytes += sum(merging.read_nbytes(row, merge, box) for box in kept)
                for box in self._share.get(name, []):
                    part = slices.cut(source, box)
                    found = checksum(part)
                    published[name] = published.get(name, NOTHING) + found
                    same = part.dtype == dtypes[name]
                    cast[name] = cast.get(name, NOTHING) + (
                        found if same else checksum(part.to(dtypes[name]))
                    )
                yield name, source

        self.model_runner.reload_weights(weights_iterator=tensors())
        _repack_embeddings(model)
        return _all_encoded(cast), held(model), packed, _all_encoded(published), read_nbytes

    def scavenger_adapt(
        self, paths: Sequence[str], adapters: Sequence[AdapterRow], scale: float, number: int
    ) -> int:
        """Put adapters from memory files in place of those that there are, under the number by which requests name them. The base is not
        touched. Returns how many layers got one."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        manager = self.model_runner.lora_manager._adapter_manager
        manager.remove_all_adapters()
        files = [mapped(path) for path in paths]
        dtype = manager.lora_config.lora_dtype
        loras = {}
        for layer, down, up in adapters:
            a, b = (
                merging.from_files(files, row, None, (), "cpu").to(dtype, copy=True) for row in (down, up)
            )
            loras[layer] = LoRALayerWeights(layer, a.shape[0], a.shape[0], a, b, scale)
        manager.add_adapter(LoRAModel(number, max(lora.rank for lora in loras.values()), loras))
        manager.activate_adapter(number)
        return _adapted(manager, [layer for layer, _, _ in adapters])

    def scavenger_held(self) -> Sums:
        """The checksums of what this rank holds now."""
        with unwrapped(self.model_runner.get_model()) as model:
            return held(model)

    def scavenger_bytes_held(self) -> int:
        """Of this rank's GPU, what torch keeps for reuse counted in, less what is unmapped while the engine sleeps; 0 on a CPU."""
        if not torch.cuda.is_available():
            return 0
        from vllm.device_allocator.cumem import CuMemAllocator

        pool = CuMemAllocator.instance
        unmapped = (
            sum(data.handle[1] for data in pool.pointer_to_data.values() if data.is_asleep)
            if pool is not None
            else 0
        )
        return max(0, torch.cuda.memory_reserved() - unmapped)

    def scavenger_bytes_taken(self) -> dict[str, int]:
        """What of this rank lies on its GPU while the engine is awake, or would: weights and cache."""
        weights = weight_nbytes(self.model_runner.get_model())
        caches = sum(tensor.nbytes for cache in self.model_runner.kv_caches for tensor in _tensors(cache))
        return {"weights": weights, "cache": caches}

    def scavenger_wipe(self) -> None:
        """Zero the cache. Entries beyond a sample's end are masked, and a masked NaN still poisons attention (0 * NaN)."""
        for cache in self.model_runner.kv_caches:
            for tensor in _tensors(cache):
                tensor.zero_()

    def scavenger_hook(self, raw_logprobs: bool, pace: float) -> None:
        """Once, after the start: let requests that ask for one more logprob have the raw one; make at most `pace` steps a second."""
        if raw_logprobs:
            sampler = self.model_runner.sampler
            sampler.forward = _with_raw_logprobs(sampler.forward)
        if pace > 0:
            self.execute_model = _paced(self.execute_model, 1.0 / pace)


def _tensors(cache: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Of one layer's cache."""
    return [cache] if isinstance(cache, Tensor) else cache


def _dtypes(
    model: nn.Module, published: Sequence[str], packed: Mapping[str, Sequence[str]]
) -> dict[str, torch.dtype]:
    """What dtype each published tensor has in the engine, of those that this rank has anything of."""
    return {
        name: value.dtype
        for parameter, value in model.named_parameters()
        for name in sources(parameter, published, packed)
    }


def read_by_loaders(model: Any, shapes: Mapping[str, Sequence[int]]) -> Boxes:
    """What the model's loaders read of tensors of these shapes. Its own parameters stand aside meanwhile, as they do while vLLM reloads.

    A loader that wants numbers gets none here: then the rank reads all of everything.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    layers = list(model.modules())
    for layer in layers:
        info = layerwise.get_layerwise_info(layer)
        info.kernel_tensors = layerwise.get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        layerwise.restore_layer_on_meta(layer, info)
    given = slices.meta(shapes, torch.float32)
    try:
        with slices.Reads(given) as reads:
            model.load_weights(iter(given.items()))
    except (RuntimeError, NotImplementedError) as error:
        _log.warning("engine.slices_unknown", reason=describe(error))
        return {name: [slices.whole(shape)] for name, shape in shapes.items()}
    finally:
        for layer in layers:
            info = layerwise.get_layerwise_info(layer)
            layerwise._place_kernel_tensors(layer, info)
            info.reset()
    return dict(reads.boxes)


@contextlib.contextmanager
def unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """The model as it is without adapters: its loaders know no layer that is wrapped for them."""
    wrapped: list[tuple[nn.Module, str, nn.Module]] = []
    if any(hasattr(module, "base_layer") for module in model.modules()):
        from vllm.lora.layers import BaseLayerWithLoRA

        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, BaseLayerWithLoRA) and not isinstance(parent, BaseLayerWithLoRA):
                    wrapped.append((parent, name, child))
                    parent._modules[name] = child.base_layer
    try:
        yield model
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


def _adapted(manager: Any, layers: Sequence[str]) -> int:
    """How many of the layers have a place in this rank's model, by themselves or fused."""
    fused = {part: module for module, parts in manager.packed_modules.items() for part in parts}
    return sum(layer in manager.modules or fused.get(layer) in manager.modules for layer in layers)


def mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        # A private mapping is writable, which torch wants of a buffer; it is not written to.
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _repack_embeddings(model: nn.Module) -> None:
    """vLLM's CPU kernels compute logits from a packed copy of the embeddings; of a tied one, reloading leaves that of the old weights."""
    modules: list[Any] = [
        module for module in model.modules() if getattr(module, "cpu_linear", None) is not None
    ]
    for module in modules:
        if module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def held(model: nn.Module) -> Sums:
    """The checksum of every parameter, read back from where the forward pass reads it."""
    found = {name: checksum(value) for name, value in model.named_parameters() if value.numel()}
    for name, module in model.named_modules():
        packed = getattr(module, "cpu_linear", None)
        if packed is None:
            continue
        read, kept = _read_back(packed, module), found.get(f"{name}.weight")
        if kept is not None and not kept.agrees(read):
            read = Sum(0, 0)  # the copy that computes is not the one that was loaded
        found[f"{name}.weight"] = read
    return {name: _encoded(value) for name, value in found.items()}


def weight_nbytes(model: nn.Module) -> int:
    """Of a rank's weights, as a GPU would hold them: vLLM's CPU kernels empty those that they keep in a layout of their own."""
    packed = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if getattr(module, "cpu_linear", None) is not None and weight is not None and not weight.numel():
            sides = [_size(module, "input_size"), _size(module, "output_size")]
            packed += sides[0] * sides[1] * int(weight.element_size())
    return packed + sum(value.nbytes for value in model.parameters())


def _size(module: Any, side: str) -> int:
    """Of this rank's part of a linear layer."""
    return int(getattr(module, f"{side}_per_partition", 0) or getattr(module, side))


def _read_back(linear: Callable[..., Tensor], module: Any) -> Sum:
    """vLLM's CPU kernels keep a weight in a layout of their own: its rows are what a linear layer answers to unit vectors, exactly."""
    width = int(getattr(module, "input_size_per_partition", 0) or module.weight.shape[1])
    whole = Sum(0, 0)
    for start in range(0, width, PROBE_ROWS):
        rows = min(PROBE_ROWS, width - start)
        units = torch.zeros(rows, width, dtype=module.weight.dtype)
        units[torch.arange(rows), torch.arange(start, start + rows)] = 1.0
        whole += checksum(linear(units, module.weight, None))
    return whole


def _all_encoded(found: Mapping[str, Sum]) -> Sums:
    return {name: _encoded(of) for name, of in found.items()}


def _encoded(found: Sum) -> EncodedSum:
    return f"{found.value:x}", found.numel, found.finite


def _with_raw_logprobs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM computes logprobs before or after temperature and truncation, never both. Where a request asks for a second column, it gets
    the sampled token's raw logprob there instead of the likeliest token's."""

    def both(logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = (sampling_metadata.max_num_logprobs or 0) > 0
        raw = (
            logits.log_softmax(-1, dtype=torch.float32) if wanted else None
        )  # before the sampler changes them in place
        output = forward(logits, sampling_metadata, *args, **kwargs)
        if raw is not None and output.logprobs_tensors is not None:
            sampled = output.sampled_token_ids.long()
            output.logprobs_tensors.logprobs[:, 1:2] = raw.gather(-1, sampled)
            # Under an id of its own: where vLLM joins outputs that were not fetched in time, one id keeps one logprob.
            other = torch.where(sampled > 0, sampled - 1, sampled + 1)
            output.logprobs_tensors.logprob_token_ids[:, 1:2] = other.to(output.sampled_token_ids.dtype)
        return output

    return both


def _paced(execute: Callable[..., Any], beat_s: float) -> Callable[..., Any]:
    """A step begins `beat_s` after the last one at the earliest: a toy model that can be preempted like a large one."""
    due = 0.0

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal due
        time.sleep(max(0.0, due - time.monotonic()))
        due = time.monotonic() + beat_s
        return execute(*args, **kwargs)

    return step
