"""What we add to vLLM's own worker (`worker_extension_cls`): weights from memory, their checksum, and the raw logprobs.

Runs in vLLM's processes, one object a tensor-parallel rank, called by name through `collective_rpc`. Owns nothing that outlives a call but
the hooks. Must not know the daemon, the network or a file: weights come in a memory file of the worker process, verified by it.

Boundary: code that runs inside vLLM's own processes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import multiprocessing
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from rollout.engines import merging, slices
from rollout.engines.checksum import NOTHING, Sum, checksum, sources
from rollout.engines.merging import FileMerge, FileRow
from rollout.engines.routing import pack
from rollout.engines.slices import Boxes
from rollout.engines.vllm import names as engine_names
from rollout.engines.vllm.proposer import Heard, put_right_without_triton
from scavenger.errors import describe

_log = structlog.get_logger(__name__)
PARENT = "SCAVENGER_ENGINE_PARENT"  # process id of the worker that started the engine
FOLDER = "scv-"  # how the engine's private folder is called
NODE = "SCAVENGER_ENGINE_NODE"  # of an engine over several nodes: which one this is, the first is 0
BESIDE = "weights.json"  # in the private folder of a further node: where a version lies in that node's memory
PROBE_ROWS = 512
_SINKS = ".sinks"

TensorRow = tuple[str, str, Sequence[int], int, int, int]  # name, dtype, shape, file, offset, nbytes
AdapterRow = tuple[str, FileRow, FileRow]  # a layer's name, where its A lies, where its B
EncodedSum = tuple[str, int, bool]  # a checksum's value in hexadecimal, its elements, whether all are numbers
Sums = dict[str, EncodedSum]  # by name
Routed = dict[str, dict[int, bytes]]  # request -> position -> which experts the token at it went to


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
    scavenger_routed: Routed = {}  # replaced, never changed, where it is empty
    scavenger_names: Mapping[str, str] = MappingProxyType(
        {}
    )  # by vLLM's parameter, the published name under which it is told

    def scavenger_probe(self, shapes: Mapping[str, Sequence[int]]) -> Boxes:
        """Which parts of tensors of these shapes this rank keeps, by its model's own loaders. Of those for which it has no parameter,
        nothing is said.

        Experts it reads whole, and sums some of: their loaders are given each for itself, or none at all (`_copy_past`).
        """
        with unwrapped(self.model_runner.get_model()) as model:
            dtypes, experts = self._targets(model, list(shapes), _packed(model))
            sinks = _sinks_kept(model, self.scavenger_names)
            asked = {name: shapes[name] for name in dtypes if name not in experts and name not in sinks}
            whole = {name: [slices.whole(shapes[name])] for name in experts}
            self._read = read_by_loaders(model, asked) | whole | sinks
        return self._read

    def _targets(
        self, model: nn.Module, published: Sequence[str], packed: dict[str, list[str]]
    ) -> tuple[dict[str, torch.dtype], set[str]]:
        self.scavenger_names = _names(model, published, packed)
        return _targets(model, published, packed, self.scavenger_names, self.model_runner.model_config.dtype)

    def scavenger_share(self, shares: Sequence[Boxes]) -> None:
        """`shares`: by rank, the parts whose checksum it says with each load. After `scavenger_probe`, before the first load."""
        self._share = shares[self.rank]
        for name, boxes in self._share.items():
            kept = self._read.get(name, [])
            if not all(any(slices.contains(box, share) for box in kept) for share in boxes):
                self._read[name] = list(boxes)  # the whole: no share is anything else that is not kept

    def scavenger_load(
        self,
        paths: Sequence[str],
        table: Sequence[TensorRow],
        merges: Mapping[str, FileMerge] | None = None,
        version: int = 0,
    ) -> tuple[Sums, Sums, dict[str, list[str]], Sums, Sums, int]:
        """Replace all weights in place by those of memory files, tensor by tensor: at most one layer lies twice on the device.

        `merges`: what is made, on the device, of those that are a base. Of each tensor only what this rank keeps is read, and made.

        Returns the checksums of its share of what was published, in the engine's types, of experts one an expert; of what this rank holds
        now; which modules are fused of which; the checksums of its share as it was published; those by which it is found again later
        (`scavenger_held`); and how many bytes it read. Of layers that vLLM quantises, "now" is before it does: what was published must have
        come whole. On a further node of its engine the files are that node's own, where the same version was pulled and verified.
        """
        if os.environ.get(NODE, "0") != "0":
            paths, table, merges = placed_beside(version, table)
        with unwrapped(self.model_runner.get_model()) as model:
            return self._load(model, paths, table, merges or {})

    def _load(
        self,
        model: nn.Module,
        paths: Sequence[str],
        table: Sequence[TensorRow],
        merges: Mapping[str, FileMerge],
    ) -> tuple[Sums, Sums, dict[str, list[str]], Sums, Sums, int]:
        packed = _packed(model)
        dtypes, experts = self._targets(model, [row[0] for row in table], packed)
        streams = hasattr(getattr(model, "model", model), "_get_streamed_expert_info")
        past: dict[str, Tensor] = {}
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
                    mine = part.to(dtypes[name])
                    if name in experts:
                        cast.update(_of_each(name, range(*box[0]), mine))
                    else:
                        same = mine.dtype == part.dtype
                        cast[name] = cast.get(name, NOTHING) + (found if same else checksum(mine))
                if name.endswith(_SINKS):
                    past[name] = source
                elif name in experts and streams:
                    for index, rows in enumerate(source.to(dtypes[name])):
                        yield engine_names.streamed(name, index), rows
                else:
                    yield name, source.to(dtypes[name]) if name in experts else source

        with _before_quantising(model) as whole_layers:
            self._replace(model, tensors(), past)
        now = held(model, self.scavenger_names, whole_layers)
        kept = self._kept(model)
        return _all_encoded(cast), now, packed, _all_encoded(published), kept, read_nbytes

    def _replace(
        self, model: nn.Module, tensors: Iterator[tuple[str, Tensor]], past: Mapping[str, Tensor]
    ) -> None:
        """Every weight, by vLLM's own loaders and past them. `past` is filled while `tensors` are read."""
        self.model_runner.reload_weights(weights_iterator=tensors)
        _copy_past(model, past, self.scavenger_names)
        _repack_embeddings(model)
        _repack_experts(model)

    def scavenger_forget(self, shapes: Mapping[str, Sequence[int]], speculates: bool) -> None:
        """Drop what came of a run: weights of these shapes become zeros by the way on which weights come, so that what is packed or
        quantised is overwritten too; then adapters, the cache, the batch's tokens, drafts and routes."""
        self._zero_weights(shapes)
        lora = getattr(self.model_runner, "lora_manager", None)
        if lora is not None:
            manager = lora._adapter_manager
            manager.remove_all_adapters()
            for module in manager.modules.values():
                for slot in range(manager.lora_slots):
                    module.reset_lora(slot)
        self.scavenger_wipe()
        batch = self.model_runner.input_batch
        if batch.req_id_to_index:
            raise ValueError(f"{len(batch.req_id_to_index)} requests of the run are still in the batch")
        batch.token_ids_cpu_tensor.zero_()
        self.scavenger_routed = {}
        if speculates:
            self.model_runner.drafter.forget()

    def _zero_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        with unwrapped(self.model_runner.get_model()) as model:
            dtypes, experts = self._targets(model, list(shapes), _packed(model))
            streams = hasattr(getattr(model, "model", model), "_get_streamed_expert_info")
            past: dict[str, Tensor] = {}

            def zeros() -> Iterator[tuple[str, Tensor]]:
                for name, shape in shapes.items():
                    dtype = dtypes.get(name, self.model_runner.model_config.dtype)
                    zero = torch.zeros(tuple(shape), dtype=dtype, device=self.model_runner.device)
                    if name.endswith(_SINKS):
                        past[name] = zero
                    elif name in experts and streams:
                        yield from (
                            (engine_names.streamed(name, index), rows) for index, rows in enumerate(zero)
                        )
                    else:
                        yield name, zero

            self._replace(model, zeros(), past)

    def scavenger_adapt(
        self,
        paths: Sequence[str],
        adapters: Sequence[AdapterRow],
        scale: float,
        number: int,
        keep: Sequence[int] = (),
    ) -> int:
        """Put adapters from memory files in place of those that there are, but for the numbers in `keep`, under the number by which
        requests name them. The base is not touched. Returns how many layers got one."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        manager = self.model_runner.lora_manager._adapter_manager
        _remove_others(manager, keep)
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

    def scavenger_drop_adapters(self, keep: Sequence[int]) -> None:
        """Forget all adapters but those, and overwrite their places with zeros."""
        manager = self.model_runner.lora_manager._adapter_manager
        _remove_others(manager, keep)
        for slot, number in enumerate(manager.lora_index_to_id):
            if number is None:
                for module in manager.modules.values():
                    module.reset_lora(slot)

    def scavenger_held(self) -> Sums:
        """The checksums of what this rank holds now."""
        with unwrapped(self.model_runner.get_model()) as model:
            return self._kept(model)

    def _kept(self, model: nn.Module) -> Sums:
        quantised = {
            name: _encoded(checksum(value.view(torch.uint8)))
            for name, value in model.named_parameters()
            if value.numel() and is_quantised(value)
        }
        return held(model, self.scavenger_names) | quantised

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

    def scavenger_routing(self) -> Routed:
        """Which experts the tokens went to whose passes were made since the last call: by request and position."""
        found, self.scavenger_routed = self.scavenger_routed, {}
        return found

    def scavenger_hook(
        self, raw_logprobs: bool, pace: float, routing: int = 0, speculates: bool = False
    ) -> None:
        """Once, after the start: let requests that ask for one more logprob have the raw one; make at most `pace` steps a second; note
        which experts tokens go to, in `routing` bytes each; tell the proposer of drafts whose each row is."""
        if routing:
            record_routing(self.model_runner, self.scavenger_routed_rows, routing)
        if raw_logprobs:
            sampler = self.model_runner.sampler
            sampler.forward = _with_raw_logprobs(sampler.forward)
        if speculates:
            verifier = self.model_runner.rejection_sampler
            verifier.forward = _with_raw_logprobs_of_drafts(verifier.forward)
            self.model_runner.drafter.attach(self.model_runner)
            if self.model_runner.device.type == "cpu":
                put_right_without_triton()
        if self.model_runner.device.type == "cpu":
            keep_draws_of_parts(self.model_runner)
        if pace > 0:
            self.execute_model = _paced(self.execute_model, 1.0 / pace)

    def scavenger_kv_shape(self) -> tuple[str, int, int]:
        """Of the KV blocks that move: layout, bytes a token, tokens a block; "" where they cannot."""
        groups = itertools.chain.from_iterable(self.model_runner.attn_groups)
        found: tuple[str, int, int] = _mover().shape(
            [".".join(group.backend.full_cls_name()) for group in groups]
        )
        return found

    def scavenger_take_kv(self, name: str, tokens: int, path: str) -> bool:
        """Copy the entries of a running request's first tokens to a file. False: it is not there, or has not so many."""
        # vLLM appends letters of its own to a request's name. One that it preempted is in no batch, and what is known of its blocks is
        # of before: others have them by now.
        runner = self.model_runner
        full = next((n for n in runner.input_batch.req_id_to_index if n.rpartition("-")[0] == name), "")
        found = runner.requests.get(full)
        if found is None or found.num_computed_tokens < tokens or len(found.block_ids) != 1:
            return False
        _mover().copy_out(list(found.block_ids[0]), tokens, path)
        return True

    def scavenger_speculated(self) -> tuple[int, int, int]:
        """What speculation did so far: drafted, accepted, verifications."""
        total = self.model_runner.drafter.total
        return total.drafted, total.accepted, total.verifications

    def scavenger_hear(self, said: Sequence[Heard], over: Sequence[str]) -> None:
        """What siblings said on other engines, for drafts."""
        self.model_runner.drafter.hear(said, over)

    def scavenger_routed_rows(self, request: str, first: int, rows: Sequence[bytes]) -> None:
        if not self.scavenger_routed:
            self.scavenger_routed = {}
        self.scavenger_routed.setdefault(request, {}).update(enumerate(rows, first))


def _mover() -> Any:
    """The worker's half of our KV connector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()


def placed_beside(
    version: int, first: Sequence[TensorRow]
) -> tuple[list[str], list[TensorRow], dict[str, FileMerge]]:
    """Where this node has the version that the first node loads: files, table, merges. Raises `ValueError` where it is another one."""
    with open(os.path.join(os.environ["VLLM_RPC_BASE_PATH"], BESIDE), encoding="utf-8") as file:
        found = json.load(file)
    table: list[TensorRow] = [(row[0], *_file_row(row[1:])) for row in found["table"]]
    if found["version"] != version or [row[0] for row in table] != [row[0] for row in first]:
        raise ValueError(f"the engine loads version {version}, and this node has version {found['version']}")
    merges: dict[str, FileMerge] = {
        name: (dtype, scale, [_file_row(row) for row in rows])
        for name, (dtype, scale, rows) in found["merges"].items()
    }
    return found["paths"], table, merges


def _file_row(row: Sequence[Any]) -> FileRow:
    dtype, shape, file, offset, nbytes = row
    return dtype, shape, file, offset, nbytes


def record_routing(runner: Any, note: Callable[[str, int, Sequence[bytes]], None], width: int) -> None:
    """Let vLLM's routers say what they choose, and `note` it for each position from a request's last given token on.

    `note`: request, first position, a row a position. `width`: bytes that a row must have. Raises `ValueError` where it has others, or
    where this vLLM's experts do not say.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    layers = [module for module in runner.get_model().modules() if isinstance(module, MoERunner)]
    passes: list[list[Tensor]] = [[] for _ in layers]
    for seen, layer in zip(passes, layers, strict=True):
        if not hasattr(layer.router, "set_capture_fn"):
            raise ValueError(f"vLLM's {type(layer.router).__name__} does not tell which experts it chooses")
        layer.router.set_capture_fn(seen.append)
    if not layers:
        raise ValueError("vLLM's model has no experts")
    experts = int(layers[0].routed_experts.global_num_experts)
    plain = runner.execute_model

    def execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for seen in passes:
            seen.clear()
        result = plain(scheduler_output, *args, **kwargs)
        counts, batch = scheduler_output.num_scheduled_tokens, runner.input_batch
        if not counts:
            return result
        chosen = torch.stack([torch.cat(seen) for seen in passes], dim=1)
        start = 0
        for index, request in enumerate(batch.req_ids):
            count = counts.get(request, 0)
            first = int(batch.num_computed_tokens_cpu[index])
            skip = max(0, int(batch.num_prompt_tokens[index]) - 1 - first)
            if skip < count:
                rows = pack(chosen[start + skip : start + count], experts)
                if len(rows[0]) != width:
                    raise ValueError(f"{len(rows[0])} bytes say a token's experts, the run expects {width}")
                note(request, first + skip, rows)
            start += count
        return result

    runner.execute_model = execute


def _tensors(cache: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    """Of one layer's cache."""
    return [cache] if isinstance(cache, Tensor) else cache


def _packed(model: nn.Module) -> dict[str, list[str]]:
    """Fused module -> its parts."""
    return {name: list(parts) for name, parts in getattr(model, "packed_modules_mapping", {}).items()}


def _names(model: nn.Module, published: Sequence[str], packed: dict[str, list[str]]) -> dict[str, str]:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    rename = mapper.get_rename_mapper().map_name if mapper is not None else lambda name: name
    parameters = {name for name, _ in model.named_parameters()}
    return engine_names.published_names(parameters, published, rename, packed)


def _targets(
    model: nn.Module,
    published: Sequence[str],
    packed: dict[str, list[str]],
    names: Mapping[str, str],
    model_dtype: torch.dtype,
) -> tuple[dict[str, torch.dtype], set[str]]:
    """What dtype each published tensor has in the engine, and which are of experts: of those of which this rank has anything."""
    found, experts = {}, set()
    for parameter, value in model.named_parameters():
        for name in sources(names.get(parameter, parameter), published, packed):
            found[name] = model_dtype if is_quantised(value) else value.dtype
            if engine_names.INNER in parameter:
                experts.add(name)
    return found, experts


def is_quantised(value: Tensor) -> bool:
    """Whether vLLM made it of weights that were published."""
    return not value.is_floating_point() or value.element_size() == 1


@contextlib.contextmanager
def _before_quantising(model: nn.Module) -> Iterator[dict[str, list[Sum]]]:
    """Inside, layers that vLLM quantises after they were loaded leave the checksums of what they were loaded with, by parameter; of
    experts one an expert.

    vLLM quantises online: it loads a layer as it was published, and then calls its method, once a load.
    """
    found: dict[str, list[Sum]] = {}
    methods: list[tuple[Any, Any]] = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or not any(is_quantised(value) for value in module.parameters(recurse=False)):
            continue
        methods.append((method, method.process_weights_after_loading))
        method.process_weights_after_loading = partial(
            _note_whole, name, found, method.process_weights_after_loading
        )
    try:
        yield found
    finally:
        for method, plain in methods:
            method.process_weights_after_loading = plain


def _note_whole(name: str, found: dict[str, list[Sum]], process: Callable[[Any], None], layer: Any) -> None:
    for parameter, value in layer.named_parameters(recurse=False):
        if not is_quantised(value):
            full = f"{name}.{parameter}"
            found[full] = [checksum(rows) for rows in (value if engine_names.INNER in full else (value,))]
    process(layer)


def _copy_past(model: nn.Module, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """Attention sinks: vLLM 0.32 copies them, as it does GPT-OSS's whole experts, past its parameters' loaders, and a reload drops what
    does not go through those. Experts go in one by one, by which way vLLM does use the loaders."""
    for parameter, value in model.named_parameters():
        if (whole := tensors.get(names.get(parameter, parameter))) is not None:
            value.data.copy_(whole[slice(*_heads_kept(value))])


def _heads_kept(sinks: Tensor) -> tuple[int, int]:
    from vllm.distributed import get_tensor_model_parallel_rank

    start = len(sinks) * get_tensor_model_parallel_rank()
    return start, start + len(sinks)


def _sinks_kept(model: nn.Module, names: Mapping[str, str]) -> Boxes:
    """By published name, of those sinks that this rank has anything of."""
    return {
        names.get(parameter, parameter): [(_heads_kept(value),)]
        for parameter, value in model.named_parameters()
        if parameter.endswith(_SINKS)
    }


def _of_each(name: str, experts: Sequence[int], rows: Tensor) -> dict[str, Sum]:
    return {engine_names.expert(name, index): checksum(row) for index, row in zip(experts, rows, strict=True)}


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
        _stand_in(layer)
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


def _stand_in(layer: nn.Module) -> None:
    """What vLLM leaves where it is while it reloads (biases) has no bytes either, and what quantises once all came does not wait for it."""
    from vllm.model_executor.model_loader.reload import layerwise, meta

    for name, value in list(layer.named_parameters(recurse=False)):
        stand_in: Any = value if value.is_meta else meta.to_meta_tensor(value)
        stand_in.weight_loader = layerwise._get_original_loader(stand_in)
        layer.register_parameter(name, stand_in)


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


def _remove_others(manager: Any, keep: Sequence[int]) -> None:
    """Adapters that no request names any more."""
    for number in set(manager.list_adapters()) - set(keep):
        manager.remove_adapter(number)


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


def _repack_experts(model: nn.Module) -> None:
    """vLLM's CPU kernels want experts packed; they are when the engine starts, and reloading leaves them as they were published."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and _is_whole_on_cpu(getattr(module, "w13_weight", None)):
            kernel.fused_experts.process_weights_after_loading(module)


def _is_whole_on_cpu(weight: Tensor | None) -> bool:
    """Experts that vLLM quantises it packs each time."""
    return weight is not None and weight.device.type == "cpu" and not is_quantised(weight)


def held(
    model: nn.Module,
    names: Mapping[str, str] | None = None,
    before: Mapping[str, Sequence[Sum]] = MappingProxyType({}),
) -> Sums:
    """The checksum of every parameter by the name under which it is told, read back from where the forward pass reads it.

    `before`: of layers that are quantised, what they were loaded with; nothing else is told of those.
    """
    sums = _held(model)
    found: Sums = {}
    layers = {name.rpartition(".")[0] for name, value in model.named_parameters() if is_quantised(value)}
    whole = {name: value for name, value in model.named_parameters() if name.rpartition(".")[0] not in layers}
    for name in (*whole, *before):
        told = (names or {}).get(name, name)
        if engine_names.INNER in name:
            module = model.get_submodule(name.rpartition(".")[0])
            rows = before[name] if name in before else [checksum(rows) for rows in whole[name]]
            for index, row in zip(_experts_of(module, len(rows)), rows, strict=True):
                found[engine_names.expert(told, index)] = _encoded(row)
        elif name in before:
            found[told] = _encoded(before[name][0])
        elif name in sums:
            found[told] = _encoded(sums[name])
    return found


def _experts_of(module: Any, count: int) -> Sequence[int]:
    """Which of a layer's experts this rank has, in the order in which they lie."""
    placed = getattr(module, "_expert_map", None)
    if placed is None:
        return range(count)
    by_place = {int(place): index for index, place in enumerate(placed.tolist()) if place >= 0}
    return [by_place[place] for place in range(count)]


def _held(model: nn.Module) -> dict[str, Sum]:
    found = {
        name: checksum(value)
        for name, value in model.named_parameters()
        if value.numel() and not is_quantised(value)
    }
    for name, module in model.named_modules():
        packed = getattr(module, "cpu_linear", None)
        if packed is None:
            continue
        read, kept = _read_back(packed, module), found.get(f"{name}.weight")
        if kept is not None and not kept.agrees(read):
            read = Sum(0, 0)  # the copy that computes is not the one that was loaded
        found[f"{name}.weight"] = read
    return found


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
    width = module.weight.shape[1] if module.weight.dim() == 2 else _size(module, "input_size")
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


def _with_raw_logprobs_of_drafts(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same where vLLM verifies drafts: a row of logits for each drafted token and one behind, request by request."""

    def both(metadata: Any, draft_probs: Any, logits: Tensor, sampling_metadata: Any) -> Any:
        wanted = (sampling_metadata.max_num_logprobs or 0) > 0
        raw = logits.log_softmax(-1, dtype=torch.float32) if wanted else None
        output = forward(metadata, draft_probs, logits, sampling_metadata)
        if raw is not None and output.logprobs_tensors is not None:
            sampled = output.sampled_token_ids.long()
            ends = metadata.cu_num_sampled_tokens.to(sampled.device)
            starts = torch.cat([ends.new_zeros(1), ends[:-1]])
            places = starts[:, None] + torch.arange(sampled.shape[1], device=sampled.device)
            places = places.clamp(max=len(raw) - 1).flatten()  # behind a refused token nothing is read
            ids = sampled.clamp(min=0).flatten()
            output.logprobs_tensors.logprobs[:, 1] = raw[places, ids]
            other = torch.where(ids > 0, ids - 1, ids + 1)
            output.logprobs_tensors.logprob_token_ids[:, 1] = other.to(
                output.logprobs_tensors.logprob_token_ids.dtype
            )
        return output

    return both


def keep_draws_of_parts(runner: Any) -> None:
    """Where a pass ends within a prompt, vLLM takes the draw that it made there back from the request's generator. torch's generator of a
    CPU refuses that, and the engine ended: where prompts together were longer than a pass. Here the draw stays: the request goes on with
    the next number, which is as random."""
    keep_books = runner._bookkeeping_sync

    def without_generators(*given: Any, **named: Any) -> Any:
        generators = runner.input_batch.generators
        runner.input_batch.generators = {}
        try:
            return keep_books(*given, **named)
        finally:
            runner.input_batch.generators = generators

    runner._bookkeeping_sync = without_generators


def _paced(execute: Callable[..., Any], beat_s: float) -> Callable[..., Any]:
    """A step begins `beat_s` after the last one at the earliest: a toy model that can be preempted like a large one."""
    due = 0.0

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal due
        time.sleep(max(0.0, due - time.monotonic()))
        due = time.monotonic() + beat_s
        return execute(*args, **kwargs)

    return step
