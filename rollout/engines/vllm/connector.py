"""KV blocks of moved samples inside vLLM: its connector interface loads what the worker verified, and copies out what it is asked for.

Runs in vLLM's own processes: the scheduler's half says how many of a request's first tokens come along, the worker's half copies their
entries between a memory file of the worker process and vLLM's blocks. A request brings `kv_transfer_params = {"path", "tokens"}`, which our
engine alone sets. Bytes are layers by name, and of each the tokens' entries, in order.

Boundary: code that runs inside vLLM's own processes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

from rollout.engines.vllm.worker import mapped


@dataclass
class KvToLoad:
    """A request's blocks, and the file with the entries of its first tokens."""

    path: str
    tokens: int
    first: int  # tokens before this one are in the blocks already
    blocks: list[int]


@dataclass
class KvLoads(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not looked into
    """What the next pass loads first."""

    requests: list[KvToLoad] = field(default_factory=list)


class KvMover(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not looked into
    """Both halves, as vLLM wants it: it makes one in its scheduler and one in its worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block = int(vllm_config.cache_config.block_size)
        self._caches: list[Tensor] = []
        self._loads: list[KvToLoad] = []
        self._loaded: set[str] = set()  # requests whose entries were loaded once: resumed, they are computed

    # ------------------------------------------------------------ in the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        brought = request.kv_transfer_params
        if not brought or request.request_id in self._loaded:
            return 0, False
        return max(0, int(brought["tokens"]) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens <= 0:
            return
        brought, tokens = request.kv_transfer_params, int(request.kv_transfer_params["tokens"])
        self._loaded.add(request.request_id)
        (ids,) = blocks.get_block_ids()
        self._loads.append(
            KvToLoad(
                str(brought["path"]), tokens, tokens - num_external_tokens, list(ids[: tokens // self._block])
            )
        )

    def build_connector_meta(self, scheduler_output: Any) -> KvLoads:
        loads, self._loads = self._loads, []
        self._loaded -= set(scheduler_output.finished_req_ids)
        return KvLoads(loads)

    # ------------------------------------------------------------ in the worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._caches = [kv_caches[name] for name in sorted(kv_caches)]

    def shape(self) -> tuple[str, int, int]:
        """The layout of a token's entries, its bytes, and tokens a block; "" where blocks are not `[head, token, entry]`."""
        caches = self._caches
        if not caches or any(cache.dim() != 4 or cache.shape[2] != self._block for cache in caches):
            return "", 0, 0
        parts = [f"{cache.shape[1]}x{cache.shape[3]}" for cache in caches]
        nbytes = sum(cache.shape[1] * cache.shape[3] * cache.element_size() for cache in caches)
        return f"vllm {caches[0].dtype} {self._block} {' '.join(parts)}", nbytes, self._block

    def copy_out(self, blocks: list[int], tokens: int, path: str) -> None:
        """Write the entries of the first `tokens` tokens in these blocks, whole ones, to a file of that size."""
        ids = torch.tensor(blocks[: tokens // self._block])
        with open(path, "r+b", buffering=0) as file:
            for cache in self._caches:
                found = cache[ids.to(cache.device)].cpu().contiguous()
                _write(file.fileno(), memoryview(found.view(torch.uint8).flatten().numpy().tobytes()))

    def start_load_kv(self, forward_context: Any, **_kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvLoads)
        for one in metadata.requests:
            self._copy_in(one)

    def _copy_in(self, one: KvToLoad) -> None:
        data, at = mapped(one.path), 0
        first, count = one.first // self._block, one.tokens // self._block
        ids = torch.tensor(one.blocks[first:count])
        for cache in self._caches:
            shape = (count, *cache.shape[1:])
            nbytes = cache[0].numel() * count * cache.element_size()
            found = torch.frombuffer(data, dtype=torch.uint8, count=nbytes, offset=at)
            at += nbytes
            cache[ids.to(cache.device)] = found.view(cache.dtype).reshape(shape)[first:].to(cache.device)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # all is loaded before the pass begins

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **_kwargs: Any) -> None:
        pass  # what leaves is asked for, once, when its sample moves

    def wait_for_save(self) -> None:
        pass


def _write(fd: int, data: memoryview) -> None:
    while data.nbytes:
        data = data[os.write(fd, data) :]
