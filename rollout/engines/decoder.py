"""Continuous batching over one transformers model: admit, prefill, decode, release.

Owns the model, its weights and the running batch. Blocking and single-threaded: `reference` calls it from one executor thread.
Knows no event loop; its clock is given, and decides nothing but how much is drafted.

A decode pass makes one token a request. With speculation it also computes the positions behind drafted tokens, draws at each of them, and
keeps what was drawn up to and with the first that differs from the draft: exactly the tokens that as many passes would have drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from rollout.engines import lanes, merging
from rollout.engines.account import Account, Uncounted
from rollout.engines.base import Kv, Weight
from rollout.engines.checksum import Sum, checksum, same
from rollout.engines.norms import wide_norms
from rollout.engines.published import STORED, parse_config
from rollout.engines.routing import KNOWN, Recorder
from rollout.engines.sampling import Draws, SampledTokens, draw
from rollout.engines.slots import SlotCache
from rollout.engines.speculation.groups import NO_DRAFT, DraftTokens, group_of
from rollout.engines.speculation.speculator import Speculator
from scavenger.errors import SUSPECT_MEMORY, EngineError, WeightsDiffer
from scavenger.protocol.messages import EngineSpec
from scavenger.protocol.worker.events import Delta, HearSiblings, Request, Speculated
from scavenger.sizing.shape import of_config

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
WEIGHTS, CACHE = "weights", "cache"  # in the account of the GPU's memory
MAX_PREFILL_TOKENS = (
    8192  # padded tokens of one prefill pass: bounds its memory and how long it delays running requests
)


@dataclass(slots=True)
class _Row:
    """One running request. `cached` entries are in its slot; `last` is the newest token, not yet in it."""

    request: Request
    draws: Draws
    stops: frozenset[int]
    lane: int = lanes.OWN
    cached: int = 0
    last: int = -1
    made: list[int] = field(default_factory=list)
    undrafted: bool = False  # its next pass verifies no draft

    @property
    def position(self) -> int:
        return len(self.request.accepted) + len(self.made)

    @property
    def left(self) -> int:
        """Tokens that may still be made."""
        return self.request.max_new_tokens - len(self.made)

    @property
    def text(self) -> tuple[int, ...]:
        """All tokens of the request so far."""
        return (*self.request.prompt, *self.request.accepted, *self.made)


def accepts(draft: DraftTokens, place: int, token: int) -> bool:
    """Whether the token that was drawn at a place of a draft is the drafted one, so that what was drawn behind it counts too."""
    return place < len(draft.tokens) and draft.tokens[place] == token


def read_config(text: str) -> Any:
    """The config, if this engine can compute its model. Raises `EngineError`."""
    config = parse_config(text)
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        raise EngineError(
            f"the reference engine computes full attention only; this model has {sorted(kinds)}",
            "use another engine",
        )
    return config


def build_model(config: Any, dtype: torch.dtype, device: str) -> Any:
    """The model of a config, uninitialised as far as the caller is concerned: weights come by `Decoder.load`."""
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    except (ValueError, TypeError) as error:
        raise EngineError(
            f"transformers cannot build this model: {error}", "use a causal LM that it knows"
        ) from error
    model.eval().requires_grad_(False)
    if dtype == torch.float64:
        wide_norms(model)
    return model.to(device)


class Decoder:
    """The running batch. All methods are called from one thread."""

    def __init__(
        self,
        spec: EngineSpec,
        device: str = "cpu",
        *,
        sleeps: bool = False,
        gpu: Account | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        if spec.dtype not in DTYPES:
            raise EngineError(
                f"dtype {spec.dtype!r} is none of {sorted(DTYPES)}", "set another dtype for the engine"
            )
        self._device = device
        self._max_batch = spec.max_batch
        self._context_length = spec.context_length
        self.config = read_config(spec.model_config)
        self._gpu = gpu or Uncounted()
        self._model = build_model(self.config, DTYPES[spec.dtype], device)
        self._recorder = self._new_recorder(spec.routing)
        self._lanes = lanes.Lanes(self._model) if spec.adapter_rank else None
        self._hold_weights()
        self._base: list[Weight] | None = None  # that is in place, where adapters are kept beside it
        self._lane_of: dict[int, int] = {}  # of requests that wait, by handle; none: the run's own
        self._others: dict[
            int, list[Weight]
        ] = {}  # lanes of other runs that hold weights, and their base, equal to the one in place
        self._cache = self._new_cache()
        self._rows: list[_Row] = []
        self._waiting: list[Request] = []
        self._with_kv: dict[int, Kv] = {}  # of requests that wait, by handle
        self._left: dict[
            int, Kv
        ] = {}  # of requests that are finished and leave them, by handle, until they are taken
        self._clock = clock
        self._spec = spec
        self._speculator = self._new_speculator()
        self._sleeps = sleeps
        self._offloaded = False
        self._held: dict[str, Sum] = {}  # what an engine that sleeps held when it was loaded
        self.loaded = False

    def _new_speculator(self) -> Speculator | None:
        if self._spec.speculation != "group":
            return None
        return Speculator(floor_s=1 / self._spec.pace if self._spec.pace > 0 else 0.0)

    def _new_recorder(self, width: int) -> Recorder | None:
        """Of which experts each token goes to, where the run asks for `width` bytes of that."""
        if not width:
            return None
        shape = of_config(self.config.to_dict())
        if width != shape.routing_nbytes or self.config.model_type not in KNOWN:
            raise EngineError(
                f"{width} bytes of expert routing a token are asked for, this model has {shape.routing_nbytes}",
                "set algorithm.router_replay = false",
            )
        return Recorder(self._model, shape.experts)

    @property
    def own_device(self) -> str:
        """The GPU that it keeps; "" where it computes on CPUs, or leaves the GPU to a trainer when it sleeps."""
        return "" if self._device == "cpu" or self._sleeps else self._device

    @property
    def gpu_nbytes(self) -> int:
        """Memory of its GPU, or of what stands for one; 0 = there is none."""
        return torch.cuda.mem_get_info()[1] if self._device == "cuda" else self._gpu.capacity

    @property
    def vocab_size(self) -> int:
        return int(self._model.get_output_embeddings().weight.shape[0])

    @torch.inference_mode()
    def load(self, tensors: Iterable[Weight], *, summed: bool = False) -> dict[str, Sum]:
        """Replace every weight; raises `EngineError` when names, shapes or dtypes do not fit, and holds none then. Adapters that are kept
        beside their base (`EngineSpec.adapter_rank`) are put in their lane, and the base is written where another one is there.

        `summed`: returns the checksum of each as it was given, once the model was read back and holds just that; else nothing.
        """
        self.loaded, self._held = False, {}
        if self._lanes is None:
            self.clear()
            return self._load_whole(tensors, summed=summed)
        base, adapters = merging.apart(list(tensors))
        given: dict[str, Sum] = {}
        self._clear_lane(lanes.OWN)
        if not (self._base is not None and merging.same_memory(self._base, base)):
            if summed or not (self._others and self._holds(base)):
                self._drop_others()  # they are computed with the base that is about to go
                self._base = None  # until it is there whole
                given = self._load_whole(base, summed=summed)
            self._base = base
        self._lanes.put(lanes.OWN, adapters)
        if not self._offloaded:
            self._hold_weights()
        self.loaded, self._held = True, self._sums() if self._sleeps else {}
        return {} if adapters else given

    @torch.inference_mode()
    def load_beside(self, lane: int, tensors: Iterable[Weight]) -> None:
        """Put another run's adapters in a lane. Raises `EngineError` where they are of another base than the one in place, or do not fit:
        then the lane has none. Nothing of other lanes changes."""
        known = self._others.get(lane, [])
        self.drop_lane(lane)
        base, adapters = merging.apart(list(tensors))
        merging.refuse_larger(adapters, self._spec.adapter_rank)
        # It was compared before: all requests would wait for it.
        found = bool(known) and merging.same_memory(known, base)
        if self._lanes is None or self._base is None or not (found or self._holds(base)):
            raise EngineError(
                "the run that borrows slots has another base than the run whose engine this is",
                "only runs of one base model share an engine",
            )
        self._lanes.put(lane, adapters)
        self._others[lane] = base

    @torch.inference_mode()
    def drop_lane(self, lane: int) -> None:
        """Forget a lane's requests and adapters; what they left is overwritten."""
        self._clear_lane(lane)
        self._others.pop(lane, None)
        if self._lanes is not None:
            self._lanes.drop(lane)

    @property
    def borrowers(self) -> frozenset[int]:
        """Lanes of other runs that hold weights."""
        return frozenset(self._others)

    def _drop_others(self) -> None:
        for lane in sorted(self._others):
            self.drop_lane(lane)

    def _clear_lane(self, lane: int) -> None:
        self._waiting = [one for one in self._waiting if self._lane(one) != lane]
        self._lane_of = {handle: of for handle, of in self._lane_of.items() if of != lane}
        self._release([i for i, row in enumerate(self._rows) if row.lane == lane])
        if lane == lanes.OWN:  # KV blocks come and go with the run's own samples alone
            self._with_kv.clear()
            self._left.clear()

    def _lane(self, request: Request) -> int:
        return self._lane_of.get(request.handle, lanes.OWN)

    def _holds(self, base: Iterable[Weight]) -> bool:
        """Whether just these weights are in place."""
        state: dict[str, Tensor] = self._model.state_dict()
        seen = set()
        for view in base:
            target = state.get(view.name)
            if target is None or tuple(target.shape) != view.shape or view.dtype not in STORED:
                return False
            if not torch.equal(target, merging.on(view, self._device).to(target)):
                return False
            seen.add(target.data_ptr())
        return seen == {tensor.data_ptr() for tensor in state.values()}

    def _load_whole(self, tensors: Iterable[Weight], *, summed: bool) -> dict[str, Sum]:
        given: dict[str, Sum] = {}
        due: dict[str, Sum] = {}  # of the model's own tensors
        state: dict[str, Tensor] = self._model.state_dict()
        aliases: dict[int, list[str]] = defaultdict(list)
        for name, tensor in state.items():
            aliases[tensor.data_ptr()].append(name)
        seen = set()
        for view in tensors:
            target = state.get(view.name)
            if target is None or tuple(target.shape) != view.shape or view.dtype not in STORED:
                fits = (
                    "is unknown to the model"
                    if target is None
                    else f"is {view.dtype}{view.shape}, not {tuple(target.shape)}"
                )
                raise EngineError(f"weight {view.name!r} {fits}", "publish weights of the run's own model")
            source = merging.on(view, self._device)
            if target.data_ptr() in seen and not torch.equal(target, source.to(target)):
                raise EngineError(
                    f"weight {view.name!r} is tied to another one and differs from it", "publish it once"
                )
            target.copy_(source)
            seen.add(target.data_ptr())
            if summed:
                given[view.name] = checksum(source)
                due[view.name] = (
                    given[view.name] if source.dtype == target.dtype else checksum(source.to(target.dtype))
                )
        missing = sorted(names[0] for pointer, names in aliases.items() if pointer not in seen)
        if missing:
            raise EngineError(
                f"{len(missing)} weights are missing, the first is {missing[0]!r}", "publish all weights"
            )
        if wrong := sorted(name for name, value in due.items() if not checksum(state[name]).agrees(value)):
            cause = (
                f"{len(wrong)} weights do not sit in the engine as they were given, the first is {wrong[0]!r}"
            )
            raise WeightsDiffer(cause, f"the version is loaded again; {SUSPECT_MEMORY}")
        self.loaded, self._held = True, self._sums() if self._sleeps else {}
        return given

    def _sums(self) -> dict[str, Sum]:
        """Of what it computes with, adapters that are kept beside their base among it."""
        beside = self._lanes.tensors() if self._lanes is not None else {}
        return {name: checksum(tensor) for name, tensor in (self._model.state_dict() | beside).items()}

    @property
    def speculated(self) -> Speculated:
        """What speculation did so far."""
        return self._speculator.total if self._speculator is not None else Speculated()

    def clear(self) -> None:
        """Forget all requests and cache entries; gives the cache's memory back. What samples said stays for their siblings."""
        if self._speculator is not None:
            for row in self._rows:
                self._speculator.leave(row.request.handle)
        self._rows, self._waiting, self._with_kv, self._lane_of, self._left = [], [], {}, {}, {}
        self._cache = self._new_cache()

    @torch.inference_mode()
    def forget(self) -> None:
        """Drop all that came of a run: its weights and cache are overwritten with zeros, not merely given back."""
        self._cache.wipe_all()
        self.clear()
        self.loaded, self._held = False, {}
        self._speculator = self._new_speculator()
        if self._recorder is not None:
            self._recorder.forget()
        self._base = None
        self._others.clear()
        if self._lanes is not None:
            self._lanes.drop_all()
        for tensor in self._model.state_dict().values():
            tensor.zero_()

    def _new_cache(self) -> SlotCache:
        self._gpu.hold(CACHE, 0)
        return SlotCache(self._max_batch, self._context_length, partial(self._gpu.hold, CACHE))

    def _hold_weights(self) -> None:
        beside = self._lanes.tensors().values() if self._lanes is not None else ()
        self._gpu.hold(WEIGHTS, sum(tensor.nbytes for tensor in (*self._model.parameters(), *beside)))

    def offload(self) -> None:
        """Give the device's memory back; the weights wait in host memory."""
        self.clear()
        self._offloaded = True
        self._move_to("cpu")
        self._gpu.hold(WEIGHTS, 0)
        if self._device == "cuda":
            torch.cuda.empty_cache()  # torch keeps what it frees, and no other process could have it

    def _move_to(self, device: str) -> None:
        self._model.to(device)
        if self._lanes is not None:
            self._lanes.move_to(device)

    def bytes_held(self) -> int:
        """Of the GPU's memory, what torch keeps for reuse counted in; on a CPU what the account says, else 0."""
        return torch.cuda.memory_reserved() if self._device == "cuda" else self._gpu.own()

    def restore(self) -> None:
        """Take the memory again. Raises `WeightsDiffer` unless the weights are what they were when they were loaded."""
        self._hold_weights()
        self._offloaded = False
        self._move_to(self._device)
        if self._held and not same(self._sums(), self._held):
            cause = "the weights did not come out of sleep as they went into it"
            raise WeightsDiffer(cause, f"the engine is started anew; {SUSPECT_MEMORY}")

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Of the KV cache: layers, heads, entries of a head."""
        config = self.config
        heads = int(config.num_attention_heads)
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return int(config.num_hidden_layers), int(getattr(config, "num_key_value_heads", heads)), int(width)

    @torch.inference_mode()
    def take_kv(self, handle: int, tokens: int) -> Kv | None:
        """The entries of a running request's first tokens, as bytes, or those that a finished one left; None where it has not so many."""
        left = self._left.pop(handle, None)
        if left is not None:
            return left if len(left.tokens) == tokens else None
        for slot, row in enumerate(self._rows):
            if row.request.handle == handle and row.cached >= tokens:
                return self._copied_out(slot, tokens)
        return None

    def _copied_out(self, slot: int, tokens: int) -> Kv:
        entries = self._cache.entries(slot, tokens)
        data = torch.cat([one.contiguous().view(torch.uint8).flatten() for one in entries])
        return Kv(self._rows[slot].text[:tokens], memoryview(data.cpu().numpy().tobytes()))

    def _leave_kv(self, finished: Sequence[Delta]) -> None:
        """Before the rows of these are freed: what turns behind them go on from."""
        over = {delta.handle for delta in finished if delta.finish is not None}
        for slot, row in enumerate(self._rows):
            if row.request.leaves_kv and row.request.handle in over:
                self._left[row.request.handle] = self._copied_out(slot, row.cached)

    def drop_left(self, handles: Iterable[int]) -> None:
        """No worker takes what these left."""
        for handle in handles:
            self._left.pop(handle, None)

    def _entries_of(self, kv: Kv) -> list[Tensor] | None:
        """The inverse; None where its bytes are not of this cache's shape."""
        layers, heads, width = self.kv_shape
        dtype = next(self._model.parameters()).dtype
        if kv.data.nbytes != 2 * layers * heads * len(kv.tokens) * width * dtype.itemsize:
            return None
        whole = torch.frombuffer(bytearray(kv.data), dtype=dtype)
        return list(whole.reshape(2 * layers, heads, len(kv.tokens), width).to(self._device))

    def _admit_with_kv(self) -> None:
        """Waiting requests whose first entries came along take free slots and decode in this pass, those between computed before. What does
        not fit is prefilled."""
        for request in list(self._waiting):
            kv = self._with_kv.get(request.handle)
            if kv is None or len(self._rows) >= self._max_batch:
                continue
            del self._with_kv[request.handle]
            text = request.prompt + request.accepted
            fits = 0 < len(kv.tokens) < len(text) and kv.tokens == text[: len(kv.tokens)]
            entries = self._entries_of(kv) if fits else None
            if entries is None:
                continue
            self._cache.put(len(self._rows), entries)
            self._waiting.remove(request)
            row = _Row(
                request,
                Draws(request.seed, request.key),
                frozenset(request.sampling.stop_token_ids),
                self._lane_of.pop(request.handle, lanes.OWN),
                len(text) - 1,
                text[-1],
            )
            self._compute_behind(row, len(self._rows), text[:-1], len(kv.tokens))
            self._rows.append(row)
            self._enter(row)

    def _compute_behind(self, row: _Row, slot: int, text: tuple[int, ...], cached: int) -> None:
        """The entries of a row's slot that has the first `cached` ones of its text."""
        while cached < len(text):
            # As many as keep the pass no larger than a prefill's: each attends to all before it.
            width = min(len(text) - cached, max(1, MAX_PREFILL_TOKENS**2 // len(text)), MAX_PREFILL_TOKENS)
            places = torch.arange(cached, cached + width, device=self._device)[None]
            span = cached + width
            self._cache.decode(places, span, slot)
            mask = (torch.arange(span, device=self._device)[None, None, :] <= places[:, :, None])[:, None]
            self._forward([row], torch.tensor([text[cached:span]], device=self._device), places, mask)
            cached = span

    @torch.inference_mode()
    def step(
        self,
        joining: Sequence[Request],
        cancelled: Sequence[int],
        heard: Sequence[HearSiblings] = (),
        with_kv: Mapping[int, Kv] = MappingProxyType({}),
        lane_of: Mapping[int, int] = MappingProxyType({}),
    ) -> list[Delta]:
        """One iteration: release `cancelled`, give free slots to waiting requests, one new token for every running one. `heard`: what
        siblings said elsewhere, for drafts. `with_kv`: by handle, verified entries of requests that join. `lane_of`: by handle, the lane of
        those that join and are another run's; they wait behind the run's own."""
        self._hear(heard)
        gone = set(cancelled)
        self._lane_of.update(lane_of)
        self._waiting = [r for r in (*self._waiting, *joining) if r.handle not in gone]
        if self._lane_of:
            self._waiting.sort(key=lambda one: self._lane(one) != lanes.OWN)
        self._with_kv.update(with_kv)
        for handle in gone:
            self._with_kv.pop(handle, None)
            self._lane_of.pop(handle, None)
            self._left.pop(handle, None)  # it was finished in the pass during which it was cancelled
        self._release([i for i, row in enumerate(self._rows) if row.request.handle in gone])
        self._admit_with_kv()
        running = len(self._rows)
        deltas, ended = self._decode() if running else ([], [])
        fresh, over = self._prefill(running)
        self._leave_kv([*deltas, *fresh])
        self._release([*ended, *over])
        return [*deltas, *fresh]

    def _hear(self, heard: Sequence[HearSiblings]) -> None:
        speculator, vocab = self._speculator, self.vocab_size
        if speculator is None:
            return
        for news in heard:
            for said in news.said:
                # A draft goes through the model before it is verified: it must be of this vocabulary.
                if said.token_ids and min(said.token_ids) >= 0 and max(said.token_ids) < vocab:
                    prompt = said.group.prompt
                    name = group_of(said.group.key, prompt)
                    speculator.hear(name, prompt, said.index, said.offset, said.token_ids)
            for group in news.over:
                speculator.drop(group_of(group.key, group.prompt))

    def _decode(self) -> tuple[list[Delta], list[int]]:
        rows, speculator = self._rows, self._speculator
        drafts = [NO_DRAFT] * len(rows)
        began = self._clock()
        if speculator is not None:
            # The last token allowed needs no draft behind it; a context of nothing but drafts' positions is thus never exceeded.
            room: dict[Hashable, int] = {
                row.request.handle: 0 if row.undrafted else row.left - 1 for row in rows
            }
            proposed = speculator.propose(room).drafts
            drafts = [proposed.get(row.request.handle, NO_DRAFT) for row in rows]
        width = 1 + max(len(draft.tokens) for draft in drafts)
        ids = [[row.last, *draft.tokens] for row, draft in zip(rows, drafts, strict=True)]
        padded = torch.tensor([line + line[:1] * (width - len(line)) for line in ids], device=self._device)
        cached = torch.tensor([row.cached for row in rows], device=self._device)
        # Padding beyond the context goes to its last entry, which no token ever needs: the last one made is not cached.
        places = cached[:, None] + torch.arange(width, device=self._device)
        places = places.clamp(max=self._context_length - 1)
        span = min(max(row.cached for row in rows) + width, self._context_length)
        self._cache.decode(places, span)
        mask = (torch.arange(span, device=self._device)[None, None, :] <= places[:, :, None])[:, None]
        logits = self._forward(rows, padded, places, mask, width)
        found = self._sample(logits, 0, drafts)
        if speculator is not None:
            speculator.passed(len(rows) * width, self._clock() - began)
        return found

    def _prefill(self, first: int) -> tuple[list[Delta], list[int]]:
        """Start as many waiting requests as there is room for; `first` is the first free slot."""
        batch: list[_Row] = []
        width = 0
        while self._waiting and first + len(batch) < self._max_batch:
            request = self._waiting[0]
            length = len(request.prompt) + len(request.accepted)
            if batch and max(width, length) * (len(batch) + 1) > MAX_PREFILL_TOKENS:
                break
            batch.append(
                _Row(
                    self._waiting.pop(0),
                    Draws(request.seed, request.key),
                    frozenset(request.sampling.stop_token_ids),
                    self._lane_of.pop(request.handle, lanes.OWN),
                )
            )
            width = max(width, length)
        if not batch:
            return [], []
        texts = [row.request.prompt + row.request.accepted for row in batch]
        pads = torch.tensor([width - len(text) for text in texts], device=self._device)
        ids = torch.tensor([(0,) * (width - len(text)) + text for text in texts], device=self._device)
        steps = torch.arange(width, device=self._device)
        # A padding entry attends to itself only: a row of the mask with nothing in it would be NaN.
        seen = (steps[None, None, :] >= pads[:, None, None]) & (steps[None, :, None] >= steps[None, None, :])
        mask = (seen | (steps[None, :, None] == steps[None, None, :]))[:, None]
        self._cache.prefill(first, [len(text) for text in texts])
        logits = self._forward(batch, ids, (steps[None, :] - pads[:, None]).clamp(min=0), mask)
        for row, text in zip(batch, texts, strict=True):
            row.cached = len(text) - 1  # the token that is drawn counts the other one
        self._rows += batch
        for row in batch:
            self._enter(row)
        return self._sample(logits, first, [NO_DRAFT] * len(batch))

    def _enter(self, row: _Row) -> None:
        """What it says is a draft for its siblings from now on."""
        if self._speculator is not None:
            asked = row.request
            name = group_of(asked.key, asked.prompt)
            self._speculator.enter(asked.handle, name, asked.key.index, asked.prompt, asked.accepted)

    def _forward(
        self, rows: Sequence[_Row], ids: Tensor, positions: Tensor, mask: Tensor, last: int = 1
    ) -> Tensor:
        """Logits `[n, last, vocab]` of so many last positions of these rows."""
        if self._lanes is not None:
            self._lanes.announce([row.lane for row in rows])
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=last,
        )
        logits: Tensor = output.logits[:, -last:]
        return logits

    def _routed(self, lines: int, last: int) -> list[list[bytes]]:
        """What the pass that was just made says of the experts of each line's last tokens."""
        return self._recorder.last(lines, last) if self._recorder is not None else [[b""] * last] * lines

    def _sample(
        self, logits: Tensor, first: int, drafts: Sequence[DraftTokens]
    ) -> tuple[list[Delta], list[int]]:
        """Draw for the rows from `first` on, at each position of their drafts and the one behind; returns their deltas and the rows that
        ended. `logits` `[n, longest draft + 1, vocab]`."""
        rows = self._rows[first:]
        routed = self._routed(len(rows), logits.shape[1])
        counts = [1 + len(draft.tokens) for draft in drafts]
        positions = [row.position + i for row, n in zip(rows, counts, strict=True) for i in range(n)]
        uniforms = [
            row.draws.uniform(row.position + i) for row, n in zip(rows, counts, strict=True) for i in range(n)
        ]
        sampling = [row.request.sampling for row, n in zip(rows, counts, strict=True) for _ in range(n)]
        if min(counts) == logits.shape[1]:
            lines = logits.flatten(0, 1)
        else:
            lines = torch.cat([line[:n] for line, n in zip(logits, counts, strict=True)])
        drawn = draw(lines, sampling, uniforms, positions)
        deltas, ended = [], []
        start = 0
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            stop = start + counts[i]
            row.undrafted = bool(draft.tokens) and any(drawn.bad[start:stop])
            if row.undrafted:
                # The draft may be to blame: a masked NaN poisons the positions before it too. So the row made nothing in this pass.
                self._cache.wipe(first + i, row.cached)
                if self._speculator is not None:
                    self._speculator.verified(draft, 0)
            else:
                made, over = self._keep(first + i, draft, drawn, start, routed[i])
                deltas.append(made)
                if over:
                    ended.append(first + i)
            start = stop
        return deltas, ended

    def _keep(
        self, slot: int, draft: DraftTokens, drawn: SampledTokens, at: int, routed: Sequence[bytes]
    ) -> tuple[Delta, bool]:
        """What was drawn for the row of a slot, from `at` on, up to and with the first token that is not its draft's; whether it ended."""
        row = self._rows[slot]
        handle = row.request.handle
        if drawn.bad[at]:
            reason = f"the logits at completion position {row.position} are not finite"
            self._cache.wipe(slot)
            return Delta(handle, (), (), (), error=reason), True
        kept, finish = 0, None
        for place in range(len(draft.tokens) + 1):
            row.last = token = drawn.tokens[at + place]
            row.made.append(token)
            kept += 1
            finish = "stop" if token in row.stops else "length" if row.left <= 0 else None
            if finish or not accepts(draft, place, token):
                break
        row.cached += kept
        stop = at + kept
        tokens = tuple(drawn.tokens[at:stop])
        if self._speculator is not None:
            self._speculator.extend(handle, tokens)
            if draft.tokens:
                self._speculator.verified(draft, kept - 1)
        logprobs, raw_logprobs = tuple(drawn.logprobs[at:stop]), tuple(drawn.raw_logprobs[at:stop])
        routing = b"".join(routed[:kept])
        return Delta(handle, tokens, logprobs, raw_logprobs, finish, routing=routing), finish is not None

    def _release(self, indices: Sequence[int]) -> None:
        """Free rows and close the gaps with rows from the end."""
        for index in sorted(indices, reverse=True):
            last = len(self._rows) - 1
            if self._speculator is not None:
                self._speculator.leave(self._rows[index].request.handle)
            # Nothing of another run stays for the next request in the slot.
            foreign = {self._rows[index].lane, self._rows[last].lane} != {lanes.OWN}
            if foreign:
                self._cache.wipe(index)
            if index < last:
                self._cache.move(last, index, self._rows[last].cached)
                if foreign:
                    self._cache.wipe(last)
                self._rows[index] = self._rows[last]
            self._rows.pop()
