"""KV blocks of moved samples and of finished turns inside vLLM: its connector interface loads what the worker verified, and copies out
what it is asked for.

Runs in vLLM's own processes: the scheduler's half says how many of a request's first tokens come along, the worker's half copies their
entries between a memory file of the worker process and vLLM's blocks. A request brings `kv_transfer_params = {"path", "tokens"}`, which our
engine alone sets. Bytes are layers by name, and of each the tokens' entries, in order.

A request that leaves its blocks has `{"leave_path", "leave_inode"}` there. When it is finished the scheduler's half tells vLLM to hold its
blocks; the worker's half copies them out within the next pass, and vLLM frees them then. It waits for that before it sleeps, pauses or
empties its cache.

Loads are asynchronous to vLLM, though each is done within the pass that it goes with. Only for those does its scheduler wait: it is a pass
ahead otherwise, and a token that was computed from blocks whose load failed would be out before it heard of the failure.

Boundary: code that runs inside vLLM's own processes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.logger import init_logger

from rollout.engines.vllm.leaving import seal
from rollout.engines.vllm.worker import mapped
from scavenger.protocol.kv import MOST_NBYTES

_log = init_logger(__name__)


@dataclass
class KvToLoad:
    """A request's blocks, and the file with the entries of its first tokens. `request`: vLLM's name of it."""

    request: str
    path: str
    tokens: int
    first: int  # tokens before this one are in the blocks already
    blocks: list[int]


@dataclass
class KvToLeave:
    """A finished request's whole blocks, and the file for them. `inode`: of that file; its path names another one once it is let go of."""

    request: str
    path: str
    inode: int
    blocks: list[int]


@dataclass
class KvLoads(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not looked into
    """What the next pass loads, and what it copies out of requests that are finished."""

    requests: list[KvToLoad] = field(default_factory=list)
    leaving: list[KvToLeave] = field(default_factory=list)


class KvMover(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM is not looked into
    """Both halves, as vLLM wants it: it makes one in its scheduler and one in its worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block = int(vllm_config.cache_config.block_size)
        self._caches: list[Tensor] = []
        self._loads: list[KvToLoad] = []
        self._asked: set[str] = set()  # requests that had their turn to load: resumed, they are computed
        self._done: set[str] = set()  # requests whose load is over, well or not, of which vLLM was not told
        self._unloaded: set[int] = set()  # blocks that could not be loaded, of which vLLM was not told
        self._leaving: list[KvToLeave] = []
        self._left: set[str] = set()  # requests whose blocks vLLM may free, of which it was not told
        self._untaken: dict[tuple[str, int], int] = {}  # path and inode of what was left -> bytes

    # ------------------------------------------------------------ in the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        brought = request.kv_transfer_params
        if not brought or "path" not in brought or request.request_id in self._asked:
            return 0, False
        tokens = max(0, int(brought["tokens"]) - num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        brought = request.kv_transfer_params
        if not brought or "path" not in brought:
            return
        # One whose tokens were all cached, too: preempted and resumed, it would read memory that is given back by then.
        self._asked.add(request.request_id)
        if num_external_tokens <= 0:
            return
        tokens = int(brought["tokens"])
        (ids,) = blocks.get_block_ids()
        first, mine = tokens - num_external_tokens, list(ids[: tokens // self._block])
        self._loads.append(KvToLoad(request.request_id, str(brought["path"]), tokens, first, mine))

    def build_connector_meta(self, scheduler_output: Any) -> KvLoads:
        loads, self._loads = self._loads, []
        leaving, self._leaving = self._leaving, []
        self._asked -= set(scheduler_output.finished_req_ids)
        return KvLoads(loads, leaving)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM holds the blocks until `get_finished` names the request: of one that leaves them, and that was not aborted."""
        asked = request.kv_transfer_params or {}
        if "leave_path" not in asked or str(request.get_finished_reason()) not in ("stop", "length"):
            return False, None
        # The last token's entries were not computed, or, in a pass ahead, are of no use.
        whole = (int(request.num_tokens) - 1) // self._block
        if request.num_computed_tokens < whole * self._block or len(block_ids) < whole:
            whole = 0  # vLLM preempted it, and some of its blocks are others' by now
        blocks = list(block_ids[:whole])
        path, inode = str(asked["leave_path"]), int(asked["leave_inode"])
        self._leaving.append(KvToLeave(request.request_id, path, inode, blocks))
        return True, None

    # ------------------------------------------------------------ in the worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._caches = [kv_caches[name] for name in sorted(kv_caches)]

    def shape(self, backends: Sequence[str]) -> tuple[str, int, int]:
        """The layout of a token's entries, its bytes, and tokens a block; "" where blocks are not `[head, token, entry]`.

        `backends`: the attention that fills them, by class. Other releases of vLLM and other backends may put other things at the same
        places of a tensor of the same shape.
        """
        caches = self._caches
        if not caches or any(cache.dim() != 4 or cache.shape[2] != self._block for cache in caches):
            return "", 0, 0
        nbytes = sum(cache.shape[1] * cache.shape[3] * cache.element_size() for cache in caches)
        config = self._vllm_config.cache_config
        parts = [
            f"vllm {vllm.__version__}",
            ",".join(sorted(set(backends))),
            f"{config.cache_dtype} {config.kv_cache_layout} {self._block}",
            *(f"{len(list(same))} of {what}" for what, same in itertools.groupby(map(_layer, caches))),
        ]
        return "; ".join(parts), nbytes, self._block

    def copy_out(self, blocks: list[int], tokens: int, path: str) -> None:
        """Write the entries of the first `tokens` tokens in these blocks, whole ones, to a file of that size."""
        with open(path, "r+b", buffering=0) as file:
            self._write_entries(file.fileno(), blocks[: tokens // self._block])

    def _write_entries(self, fd: int, blocks: list[int]) -> None:
        ids = torch.tensor(blocks)
        for cache in self._caches:
            found = cache[ids.to(cache.device)].cpu().contiguous()
            _write(fd, memoryview(found.view(torch.uint8).flatten().numpy().tobytes()))

    def _leave(self, one: KvToLeave) -> None:
        """Raises `OSError` or `RuntimeError` where not all is there; the file may be sealed with a part of it."""
        with open(one.path, "r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_ino != one.inode:
                raise FileNotFoundError("its engine wants them no more")
            try:
                if one.blocks and self._has_room(one):
                    self._write_entries(file.fileno(), one.blocks)
            finally:
                seal(file.fileno())

    def _has_room(self, one: KvToLeave) -> bool:
        """Whether this beside what was not taken is within the bound of what an engine keeps; it counts from then on."""
        self._untaken = {at: nbytes for at, nbytes in self._untaken.items() if _inode(at[0]) == at[1]}
        nbytes = len(one.blocks) * self._block_nbytes()
        if nbytes + sum(self._untaken.values()) > MOST_NBYTES:
            _log.warning(
                "the KV blocks of request %s are not left: there is no room for %d bytes", one.request, nbytes
            )
            return False
        self._untaken[one.path, one.inode] = nbytes
        return True

    def _block_nbytes(self) -> int:
        return sum(cache[0].numel() * cache.element_size() for cache in self._caches)

    def start_load_kv(self, forward_context: Any, **_kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvLoads)
        for left in metadata.leaving:
            try:
                self._leave(left)
            except (OSError, RuntimeError) as error:
                _log.info("the KV blocks of request %s are not left: %s", left.request, error)
            self._left.add(left.request)
        for one in metadata.requests:
            try:
                self._copy_in(one)
            except (OSError, ValueError, RuntimeError) as error:
                _log.warning("the KV blocks of request %s are computed: %s", one.request, error)
                self._unloaded.update(one.blocks[one.first // self._block :])
            self._done.add(one.request)

    def _copy_in(self, one: KvToLoad) -> None:
        """Raises `OSError`, `ValueError` or `RuntimeError` where not all is there; some of its blocks may be written then."""
        data, at = mapped(one.path), 0
        first, count = one.first // self._block, one.tokens // self._block
        due = count * self._block_nbytes()
        if len(data) != due or len(one.blocks) != count:
            raise ValueError(f"{len(data)} bytes for {len(one.blocks)} blocks; {due} for {count} are due")
        ids = torch.tensor(one.blocks[first:count])
        for cache in self._caches:
            shape = (count, *cache.shape[1:])
            nbytes = cache[0].numel() * count * cache.element_size()
            found = torch.frombuffer(data, dtype=torch.uint8, count=nbytes, offset=at)
            at += nbytes
            cache[ids.to(cache.device)] = found.view(cache.dtype).reshape(shape)[first:].to(cache.device)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done, self._done = self._done, set()
        left, self._left = self._left, set()
        return left or None, done or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """vLLM computes their tokens (`setup.KV_TRANSFER`)."""
        unloaded, self._unloaded = self._unloaded, set()
        return unloaded

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # all is loaded before the pass begins

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **_kwargs: Any) -> None:
        pass  # what leaves is copied once, when its sample moves or is finished

    def wait_for_save(self) -> None:
        pass


def _layer(cache: Tensor) -> str:
    return f"{cache.shape[1]}x{cache.shape[3]} {cache.dtype}"


def _inode(path: str) -> int:
    """Of the file that a path names now; 0: none."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def _write(fd: int, data: memoryview) -> None:
    while data.nbytes:
        data = data[os.write(fd, data) :]
