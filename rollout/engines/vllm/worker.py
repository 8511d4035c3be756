"""What we add to vLLM's own worker (`worker_extension_cls`): weights from memory, their checksum, and the raw logprobs.

Runs in vLLM's processes, one object a tensor-parallel rank, called by name through `collective_rpc`. Owns nothing that outlives a call but
the hooks. Must not know the daemon, the network or a file: weights come in a memory file of the worker process, verified by it.

Boundary: code that runs inside vLLM's own processes.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rollout.engines import merging
from rollout.engines.checksum import Sum, checksum, sources
from rollout.engines.merging import FileMerge
from rollout.engines.routing import pack
from rollout.engines.vllm import names as engine_names

PARENT = "SCAVENGER_ENGINE_PARENT"  # process id of the worker that started the engine
FOLDER = "scv-"  # how the engine's private folder is called
PROBE_ROWS = 512
_SINKS = ".sinks"

TensorRow = tuple[str, str, Sequence[int], int, int]  # name, dtype, shape, offset, nbytes
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
    execute_model: Callable[..., Any]
    scavenger_routed: Routed = {}  # replaced, never changed, where it is empty
    scavenger_names: Mapping[str, str] = MappingProxyType(
        {}
    )  # by vLLM's parameter, the published name under which it is told

    def scavenger_load(
        self, path: str, table: Sequence[TensorRow], merges: Mapping[str, FileMerge] | None = None
    ) -> tuple[Sums, Sums, dict[str, list[str]], Sums, Sums]:
        """Replace all weights in place by those of a memory file, tensor by tensor: at most one layer lies twice on the device.

        `merges`: what is made, on the device, of those that are a base.

        Returns the checksums of what was published, in the engine's types, of what this rank holds now, which modules are fused of which,
        the checksums of what was published as it was, and those by which it is found again later (`scavenger_held`). Of layers that vLLM
        quantises, "now" is before it does: what was published must have come whole.
        """
        model: nn.Module = self.model_runner.get_model()
        packed = {name: list(parts) for name, parts in getattr(model, "packed_modules_mapping", {}).items()}
        self.scavenger_names = _names(model, [row[0] for row in table], packed)
        whole_model = not _is_a_stage()
        dtypes, experts = _targets(
            model,
            [row[0] for row in table],
            packed,
            self.scavenger_names,
            whole_model,
            self.model_runner.model_config.dtype,
        )
        streams = hasattr(getattr(model, "model", model), "_get_streamed_expert_info")
        past: dict[str, Tensor] = {}
        cast: Sums = {}
        published: Sums = {}
        with open(path, "rb") as file:
            # A private mapping is writable, which torch wants of a buffer; it is not written to.
            memory = mmap.mmap(
                file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, dtype, shape, offset, nbytes in table:
                row, merge = (dtype, shape, offset, nbytes), (merges or {}).get(name)
                whole = merging.from_file(memory, row, merge, self.model_runner.device)
                tensor = whole.to(dtypes.get(name, whole.dtype))
                published[name] = _encoded(checksum(whole))
                if name in experts:
                    cast.update(_of_each(name, range(len(tensor)), tensor))
                elif name in dtypes:
                    same = tensor.dtype == whole.dtype
                    cast[name] = published[name] if same else _encoded(checksum(tensor))
                if name.endswith(_SINKS):
                    past[name] = tensor
                elif name in experts and streams:
                    for index, rows in enumerate(tensor):
                        yield engine_names.streamed(name, index), rows
                else:
                    yield name, tensor

        with _before_quantising(model) as whole_layers:
            self.model_runner.reload_weights(weights_iterator=tensors())
        _copy_past(model, past, self.scavenger_names)
        _repack_embeddings(model)
        _repack_experts(model)
        now = held(model, self.scavenger_names, whole_layers)
        return cast, now, packed, published, self.scavenger_held()

    def scavenger_held(self) -> Sums:
        """The checksums of what this rank holds now."""
        model: nn.Module = self.model_runner.get_model()
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

    def scavenger_hook(self, raw_logprobs: bool, pace: float, routing: int = 0) -> None:
        """Once, after the start: let requests that ask for one more logprob have the raw one; make at most `pace` steps a second; note
        which experts tokens go to, in `routing` bytes each."""
        if routing:
            record_routing(self.model_runner, self.scavenger_routed_rows, routing)
        if raw_logprobs:
            sampler = self.model_runner.sampler
            sampler.forward = _with_raw_logprobs(sampler.forward)
        if pace > 0:
            self.execute_model = _paced(self.execute_model, 1.0 / pace)

    def scavenger_routed_rows(self, request: str, first: int, rows: Sequence[bytes]) -> None:
        if not self.scavenger_routed:
            self.scavenger_routed = {}
        self.scavenger_routed.setdefault(request, {}).update(enumerate(rows, first))


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
    whole_model: bool,
    model_dtype: torch.dtype,
) -> tuple[dict[str, torch.dtype], set[str]]:
    """What dtype each published tensor has in the engine, and which are of experts. Of a stage of the model: those that it has."""
    found, experts = {}, set()
    for parameter, value in model.named_parameters():
        for name in sources(names.get(parameter, parameter), published, packed):
            found[name] = model_dtype if is_quantised(value) else value.dtype
            if engine_names.INNER in parameter:
                experts.add(name)
    lacking = sorted(set(published) - found.keys())
    if lacking and whole_model:
        raise ValueError(
            f"vLLM's model has no parameter for {len(lacking)} weights, the first is {lacking[0]!r}"
        )
    return found, experts


def is_quantised(value: Tensor) -> bool:
    """Whether vLLM made it of weights that were published."""
    return not value.is_floating_point() or value.element_size() == 1


@contextmanager
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
            from vllm.distributed import get_tensor_model_parallel_rank

            heads = len(value)
            value.data.copy_(whole.narrow(0, heads * get_tensor_model_parallel_rank(), heads))


def _is_a_stage() -> bool:
    from vllm.distributed.parallel_state import get_pp_group

    return bool(get_pp_group().world_size > 1)


def _of_each(name: str, experts: Sequence[int], rows: Tensor) -> Sums:
    return {
        engine_names.expert(name, index): _encoded(checksum(row))
        for index, row in zip(experts, rows, strict=True)
    }


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
