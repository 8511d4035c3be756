"""What a vLLM engine needs before it starts: arguments from the run's engine spec, environment, private folder, and weights in memory.

Owns which of vLLM's settings we set, and why. Starts nothing: `engine` does, and imports vLLM after `prepare_environment`. The arguments
are pure. `MemoryFiles` hands weights to vLLM's processes.

Boundary: vLLM's settings; pure but for its private folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollout.engines.base import EngineHost, Weight
from rollout.engines.merging import FileMerge, Merged
from rollout.engines.published import PublishedLayout, layout, parse_config
from rollout.engines.vllm.names import KNOWN_EXPERTS
from rollout.engines.vllm.proposer import MAX_DRAFT, PATH
from rollout.engines.vllm.worker import FOLDER, NODE, PARENT
from scavenger.errors import EngineError
from scavenger.protocol import engine_options
from scavenger.protocol.messages import EngineSpec
from scavenger.weights.manifest import TensorView

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
START_S = 300  # compiling a large model for the first time takes minutes
CPU_BLOCK = 32  # tokens; the smallest that vLLM's CPU kernels take
CPU_CACHE_NBYTES = 1 << 30
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which it has room to give
EXTENSION = "rollout.engines.vllm.worker.Extension"
#: Our own connector. Blocks that it says it could not load, vLLM computes; by default it would end their request with an error.
KV_TRANSFER = {
    "kv_connector": "KvMover",
    "kv_connector_module_path": "rollout.engines.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
MAX_SOCKET_PATH = 60  # vLLM appends a name to it, and a Unix socket's whole path has 107 characters

#: Set before vLLM is imported, unless the site's environment has them.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENGINE_READY_TIMEOUT_S": str(START_S),
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # The second logprob column is written into this runner's sampler.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
#: On a machine without a GPU: no compiler at the first token, no thread pinned to a core that other processes are pinned to as well.
CPU_ENVIRONMENT = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The core stays a process of its own; this only lets it compute itself, without another one below it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def prepare_environment(gpu: bool, host: EngineHost | None = None) -> Path:
    """Set what vLLM reads when it is imported, in this process and hence in its children; returns the engine's private folder."""
    nodes = host.nodes if host is not None else None
    if nodes is not None:
        os.environ[NODE] = str(nodes.place)
        os.environ.setdefault("VLLM_HOST_IP", own_address(nodes.address, nodes.port))
    for name, value in (ENVIRONMENT | ({} if gpu else CPU_ENVIRONMENT)).items():
        os.environ.setdefault(name, value)
    base = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix=FOLDER, dir=base if len(base) < MAX_SOCKET_PATH else "/tmp"))
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    os.environ[PARENT] = str(os.getpid())
    return folder


def own_address(first: str, port: int) -> str:
    """This node's address on the way to the engine's first node: vLLM's own guess is the way to the internet."""
    family = socket.AF_INET6 if ":" in first else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((first, port))  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def checked_config(spec: EngineSpec) -> tuple[dict[str, Any], PublishedLayout, Any]:
    """The config.json for vLLM, the weights that it needs, and the config. Raises `EngineError`."""
    if spec.dtype not in ITEMSIZE:
        raise EngineError(
            f"dtype {spec.dtype!r} is none of {sorted(ITEMSIZE)}, which vLLM computes in",
            "set another one for the engine",
        )
    config = parse_config(spec.model_config)
    refuse_unknown_experts(config)
    of = layout(config)
    values = json.loads(spec.model_config)
    # vLLM chooses its model by the class's name, which a config that was made by hand may lack; ours is transformers' choice.
    values["architectures"] = values.get("architectures") or [
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    ]
    return values, of, config


def refuse_unknown_experts(config: Any) -> None:
    """Raises `EngineError` for a mixture of experts whose tensors are not known to be found again in vLLM."""
    experts = any(
        getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )
    if experts and config.model_type not in KNOWN_EXPERTS:
        raise EngineError(
            f"experts of model_type {config.model_type!r}: which of vLLM's weights they are is not known",
            f'use a model of {" or ".join(KNOWN_EXPERTS)}, or engine.name = "reference"',
        )


def cache_nbytes(config: Any, spec: EngineSpec) -> int:
    """KV cache for a full batch of full contexts on a machine without a GPU, within bounds."""
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    token = 2 * int(config.num_hidden_layers) * heads * width * ITEMSIZE[spec.dtype]
    one = -(-spec.context_length // CPU_BLOCK) * CPU_BLOCK * token
    # One block is vLLM's own, and it wants room for one whole context.
    return 2 * CPU_BLOCK * token + max(one, min(spec.max_batch * one, CPU_CACHE_NBYTES))


def arguments(spec: EngineSpec, host: EngineHost, folder: Path, config: Any, gpu: bool) -> dict[str, Any]:
    """Pure: vLLM's engine arguments. `folder` holds the config.json and nothing else: weights come from the trainer.

    Raises `EngineError` for options of the run that an engine must not take.
    """
    options = options_of(spec)
    _refuse_unseen_experts(spec, options, gpu)
    stages = int(options.get("pipeline_parallel_size", 1))
    if stages < 1 or host.gpus % stages:
        raise EngineError(
            f"engine.vllm.pipeline_parallel_size = {stages}, and the engine has {host.gpus} GPUs",
            "set it to a divisor of the engine's GPUs",
        )
    _refuse_speculation(spec, host, options)
    chosen: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the folder's: sampling is the run's
        "trust_remote_code": False,
        "dtype": spec.dtype,
        "max_model_len": spec.context_length,
        "max_num_seqs": spec.max_batch,
        "tensor_parallel_size": host.gpus // stages,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        "worker_extension_cls": EXTENSION,
        "enable_log_requests": False,
        "disable_log_stats": True,
        "enable_sleep_mode": host.sleeps and gpu,
    }
    if spec.speculation == "group":
        chosen["speculative_config"] = {
            "method": "custom_class",
            "model": PATH,
            "num_speculative_tokens": MAX_DRAFT,
        }
    if moves_kv(spec, host):
        chosen["kv_transfer_config"] = KV_TRANSFER
    if spec.adapter_rank:
        rank = next((rank for rank in ADAPTER_RANKS if rank >= spec.adapter_rank), 0)
        if not rank:
            raise EngineError(
                f"vLLM keeps no adapters of rank {spec.adapter_rank} beside their base",
                'set lora.serve = "merged"',
            )
        runs = 2 if spec.shareable and host.may_lend else 1  # that have adapters beside the base
        chosen |= {"enable_lora": True, "max_loras": runs, "max_cpu_loras": runs, "max_lora_rank": rank}
    spread = host.nodes.arguments() if host.nodes is not None else {}
    if spread and host.gpus % spread["nnodes"]:
        raise EngineError(f"{host.gpus} GPUs do not lie equally on the engine's {spread['nnodes']} nodes")
    if gpu:
        chosen |= spread
        return chosen | {"gpu_memory_utilization": spec.memory_share, "enforce_eager": spec.eager} | options
    chosen["distributed_executor_backend"] = (
        "uni" if host.gpus == 1 else "mp"
    )  # "uni": one process less than vLLM's choice
    own = {"block_size": CPU_BLOCK, "kv_cache_memory_bytes": cache_nbytes(config, spec)}
    return chosen | own | options | spread | {"enforce_eager": True}


def moves_kv(spec: EngineSpec, host: EngineHost) -> bool:
    """Whether its samples' KV blocks may leave it: those of an engine of several GPUs are spread over them, and such samples prefill."""
    return spec.move_kv and host.gpus == 1


def _refuse_speculation(spec: EngineSpec, host: EngineHost, options: dict[str, Any]) -> None:
    """Raises `EngineError` where siblings' drafts do not go together with what else the run asks of vLLM."""
    if spec.speculation == "none":
        return
    off = 'set engine.speculation = "none"'
    if "speculative_config" in options:
        raise EngineError(
            "engine.speculation and engine.vllm.speculative_config are both set", "set one of them"
        )
    if options.get("async_scheduling"):
        raise EngineError("engine.vllm.async_scheduling and engine.speculation: vLLM does not do both", off)
    if spec.routing:
        raise EngineError("vLLM does not tell which experts a token goes to with engine.speculation", off)
    if host.gpus > 1:
        raise EngineError(
            f"engine.speculation with vLLM is for engines of one GPU, and this one has {host.gpus}", off
        )


def _refuse_unseen_experts(spec: EngineSpec, options: dict[str, Any], gpu: bool) -> None:
    """Raises `EngineError` where the run asks which experts tokens go to, and vLLM would not say. `init --check` says it before."""
    forbidden = [
        name for name in engine_options.ROUTING_FORBIDS if options.get(name, 1) not in (1, None, False)
    ]
    if spec.routing and gpu and not spec.eager:
        forbidden.append("enforce_eager = False")
    if spec.routing and forbidden:
        raise EngineError(
            f"vLLM does not tell which experts a token goes to with {', '.join(forbidden)}",
            "set engine.eager = true, remove these options, or set algorithm.router_replay = false",
        )


def options_of(spec: EngineSpec) -> dict[str, Any]:
    try:
        options = engine_options.decode(spec.options)
    except ValueError as error:
        raise EngineError(f"engine.vllm: {error}", "run trainer and engines of one release") from error
    # What harvested engines may take besides was decided by the daemon.
    if found := engine_options.fault(options, harvested=False):
        raise EngineError(*found)
    return options


ALIGN = 64
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryFiles:
    """Where vLLM's processes find tensors: in the memory to which they were pulled, the rest in a sealed copy. On no disk.

    `paths` open the files in any process of the same user while this object lives. `table`: name, dtype, shape, file, offset, nbytes of
    each tensor. `merges`: by name, what is made of a tensor that is a base; its adapter lies there too, and who has the GPU merges it.
    The copy is gone with its last user. A pull's memory is sealed against all writers but the process that pulled, which writes no
    complete version and does not use its memory again as long as these views of it exist.
    """

    def __init__(self, views: Sequence[Weight]) -> None:
        self.table: list[tuple[str, str, list[int], int, int, int]] = []
        self.merges: dict[str, FileMerge] = {}
        self._views = views  # and with them the memory
        self._copied: list[tuple[Weight, int]] = []
        self._fd = os.memfd_create("scavenger-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.paths = [_path(self._fd)]
        self._files: dict[int, int] = {}  # descriptor of a pull's memory -> its place in `paths`
        self.copied_nbytes = 0
        for view in views:
            parts: Sequence[Weight] = (
                view.parts if isinstance(view, Merged) and view.is_made_elsewhere else (view,)
            )
            rows = [(part.dtype, list(part.shape), *self._place(part), part.nbytes) for part in parts]
            self.table.append((view.name, *rows[0]))
            if isinstance(view, Merged) and view.is_made_elsewhere:
                self.merges[view.name] = view.dtype, view.scale, rows[1:]
        try:
            os.ftruncate(self._fd, max(self.copied_nbytes, 1))
            for part, start in self._copied:
                write_at(self._fd, part.data, start)
            fcntl.fcntl(
                self._fd, fcntl.F_ADD_SEALS, _SEALS
            )  # what was verified stays so, whatever opens the path to write
        except OSError as error:
            os.close(self._fd)
            raise EngineError(
                f"no memory for a version of {self.copied_nbytes} bytes: {error.strerror}",
                "ask for more memory a job",
            ) from error

    def _place(self, part: Weight) -> tuple[int, int]:
        """The file and the offset."""
        if isinstance(part, TensorView) and part.memory is not None:
            fd = part.memory.fd
            if fd not in self._files:
                self._files[fd] = len(self.paths)
                self.paths.append(_path(fd))
            return self._files[fd], part.offset
        start = self.copied_nbytes
        self._copied.append((part, start))
        self.copied_nbytes += -(-part.nbytes // ALIGN) * ALIGN
        return 0, start

    def __enter__(self) -> MemoryFiles:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def _path(fd: int) -> str:
    return f"/proc/{os.getpid()}/fd/{fd}"


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """All of it, from an offset of a file on."""
    raw = data.cast("B") if data.nbytes else data
    done = 0
    while done < raw.nbytes:
        done += os.pwrite(fd, raw[done:], offset + done)
