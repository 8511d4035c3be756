"""The output head, which never makes a whole [tokens, vocabulary] matrix: logprobs and entropies of answer tokens, some tokens at a time.

Owns what stands in the head's place, its gradients, and which models it refuses. Knows no loss, no optimizer and no rank.

The model's own forward runs up to the head, so whatever comes before it stays the model's. The head's weight is taken inside that forward:
FSDP's root has gathered it exactly then. Of each chunk of tokens come the logits, from them the logprob of the target and the entropy, and
the logits are dropped. The backward pass makes them again, chunk by chunk, and adds up the gradient of the weight. So memory grows with
`trainer.head_chunk_tokens`, never with the context. Per chunk the logits are those of the plain head, in the same type.

Liger's fused linear cross entropy is no substitute: it makes gradients in the forward pass from one factor for all tokens, where a policy
loss has one for each token that is known only after all logprobs are; and it has no entropy.

What a model does to its logits afterwards (scale: Cohere, Granite; soft cap: Gemma) is measured once, exactly, by `check`; what is neither
is refused. Deterministic runs, and `head_chunk_tokens = 0`, take the whole matrix.
Boundary: a model's last layer, without the rest of the learner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from scavenger.errors import ConfigError
from trainer.algorithms.loss import picked_logprobs, token_logprobs
from trainer.data.collate import Batch
from trainer.model.attention import borders_of, branches_of
from trainer.model.crossing import entering, gathered
from trainer.model.sharding import reshard

_REMEDY = "set trainer.head_chunk_tokens = 0, which takes memory for all logits of a micro-batch"
#: Values of the weight's gradient that are added at once where they are added in a wider type.
_ADDED = 1 << 24
#: Probes reach from minus this to this: soft caps are about 30.
_PROBED = 60.0
#: Where a soft cap does nothing yet.
_SMALL = 1e-3
_CLOSE = 1e-5


@dataclass(frozen=True, slots=True)
class Slice:
    """Where ranks have cut the head (`tensor_parallel`): the first of this rank's entries. Others are with the group's other ranks."""

    group: Any
    first: int

    def summed(self, values: Tensor) -> Tensor:
        """In place."""
        dist.all_reduce(values, group=self.group)
        return values

    def places(self, targets: Tensor, entries: int) -> tuple[Tensor, Tensor]:
        """Where targets lie among this rank's entries (0 where they do not), and which do."""
        here = (targets >= self.first) & (targets < self.first + entries)
        return torch.where(here, targets - self.first, 0), here


@dataclass(frozen=True, slots=True)
class Tail:
    """What a model does to logits x: cap * tanh(scale * x / cap), or scale * x where `cap` is 0."""

    scale: float = 1.0
    cap: float = 0.0

    def of(self, logits: Tensor) -> Tensor:
        if not self.cap:
            return logits if self.scale == 1.0 else logits * self.scale
        return (logits * (self.scale / self.cap)).tanh() * self.cap


class Logprobs(NamedTuple):
    """Of answer tokens, under the sampling temperature, flat: [N]. `entropy`: of the whole distribution, in nats; None = not computed."""

    values: Tensor
    entropy: Tensor | None


class _Chunked(torch.autograd.Function):
    """Linear, tail, temperature, softmax: values [N] and entropy [N] of hidden [N, H], weight [V, H], bias [V] or None, targets [N].

    With a slice, weight and bias are this rank's entries, and what they say is added up with what the others' say.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        tail: Tail,
        temperature: float,
        chunk: int,
        part: Slice | None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        totals, values, entropy = (
            torch.empty(len(hidden), dtype=wide, device=hidden.device) for _ in range(3)
        )
        for piece in _pieces(len(hidden), chunk):
            scaled = _scaled(hidden[piece], weight, bias, tail, temperature)
            top = scaled.amax(-1, keepdim=True)
            if part is not None:
                dist.all_reduce(top, op=dist.ReduceOp.MAX, group=part.group)
            scaled -= top
            at, here = (targets[piece], None) if part is None else part.places(targets[piece], len(weight))
            picked = scaled.gather(-1, at[:, None])[:, 0]
            shares = scaled.exp()
            total = shares.sum(-1)
            moment = shares.mul_(scaled).sum(-1)
            if part is not None and here is not None:
                picked, total, moment = part.summed(
                    torch.stack([picked.masked_fill(~here, 0.0), total, moment])
                )
            entropy[piece] = total.log() - moment / total
            totals[piece] = total.log() + top[:, 0]
            values[piece] = picked - total.log()
            del scaled, shares  # not beside the next chunk's
        ctx.save_for_backward(hidden, weight, bias, targets, totals, entropy)
        ctx.rest = (tail, temperature, chunk, part)
        ctx.set_materialize_grads(False)
        return values, entropy

    @staticmethod
    def backward(ctx: Any, of_values: Tensor | None, of_entropy: Tensor | None) -> Any:
        """With z the logits after tail and temperature and p their softmax: d value / dz = onehot(target) - p,
        d entropy / dz = -p (log p + entropy)."""
        hidden, weight, bias, targets, totals, entropy = ctx.saved_tensors
        tail, temperature, chunk, part = ctx.rest
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.zeros_like(hidden) if wants_hidden else None
        to_weight = torch.zeros_like(weight, dtype=totals.dtype) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=totals.dtype) if wants_bias else None
        for piece in _pieces(len(hidden), chunk):
            scaled = _scaled(hidden[piece], weight, bias, tail, temperature)
            factor = _factor(scaled, tail, temperature)
            scaled -= totals[piece, None]  # log p
            slope = scaled.exp()
            if of_entropy is not None:
                slope *= (
                    scaled.add_(entropy[piece, None])
                    .mul_(-of_entropy[piece, None])
                    .sub_(0.0 if of_values is None else of_values[piece, None])
                )
            elif of_values is not None:
                slope *= -of_values[piece, None]
            del scaled
            if of_values is not None:
                at, mine = targets[piece], of_values[piece]
                if part is not None:
                    at, here = part.places(at, len(weight))
                    mine = mine.masked_fill(~here, 0.0)
                slope.scatter_add_(-1, at[:, None], mine[:, None])
            slope = slope.mul_(factor).to(hidden.dtype)
            if to_hidden is not None:
                to_hidden[piece] = slope @ weight
            if to_weight is not None:
                _add_product(to_weight, slope, hidden[piece])
            if to_bias is not None:
                to_bias += slope.sum(0)
            del slope, factor
        if part is not None and to_hidden is not None:
            part.summed(to_hidden)
        return (
            to_hidden,
            None if to_weight is None else to_weight.to(weight.dtype),
            None if to_bias is None else to_bias.to(bias.dtype),
            *[None] * 5,
        )


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    tail: Tail,
    temperature: float,
    chunk: int,
    part: Slice | None = None,
) -> Logprobs:
    """hidden [N, H], weight [V, H], bias [V], targets [N] int64. In float32, or in float64 where `hidden` is; gradients in the types of
    what they belong to, the weight's added up in float32 at least. `part`: `weight` and `bias` are a slice of the entries."""
    found = _Chunked.apply(hidden, weight, bias, targets, tail, temperature, chunk, part)  # type: ignore[no-untyped-call]
    return Logprobs(*found)


def _pieces(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, tokens, chunk)]


def _scaled(hidden: Tensor, weight: Tensor, bias: Tensor | None, tail: Tail, temperature: float) -> Tensor:
    logits = functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if tail.cap:
        return logits.mul_(tail.scale / tail.cap).tanh_().mul_(tail.cap / temperature)
    return logits.mul_(tail.scale / temperature)


def _factor(scaled: Tensor, tail: Tail, temperature: float) -> Tensor | float:
    """d scaled / d logits."""
    if not tail.cap:
        return tail.scale / temperature
    return (scaled * (temperature / tail.cap)).square_().neg_().add_(1.0).mul_(tail.scale / temperature)


def _add_product(total: Tensor, slope: Tensor, hidden: Tensor) -> None:
    """total [V, H] += slope [C, V]^T hidden [C, H]. In a wider type than theirs by rows, so that no second [V, H] is made."""
    if total.dtype == slope.dtype:
        total.addmm_(slope.T, hidden)
        return
    together = max(1, _ADDED // max(1, total.shape[1]))
    for start in range(0, len(total), together):
        rows = slice(start, start + together)
        total[rows] += slope[:, rows].T @ hidden


class _Stand:
    """In the place of a model's head and of its forward. Asked for answers, the head keeps the logits to itself."""

    def __init__(self, model: Any, temperature: float, chunk: int) -> None:
        head: Any = model.get_output_embeddings()
        kind: type = type(head)
        if kind is not nn.Linear:
            raise ConfigError(
                f"{type(model).__name__}: its output head is {kind.__name__}, no plain linear layer", _REMEDY
            )
        self.tail = Tail()
        self.part: Slice | None = None
        self.head, self._plain_head = head, head.forward
        self._plain: Callable[..., Any] = model.forward
        self._temperature, self._chunk = temperature, chunk
        self._asked: tuple[Tensor, Tensor] | None = None
        self._found: Logprobs | None = None
        self._probed = False
        head.forward, model.forward = self._head_forward, self._forward

    def _forward(
        self, *arguments: Any, answers: tuple[Tensor, Tensor] | None = None, probed: bool = False, **more: Any
    ) -> Any:
        if answers is None and not probed:
            return self._plain(*arguments, **more)
        self._asked, self._probed = answers, probed
        try:
            made = self._plain(*arguments, **more)
            found, self._found = self._found, None
        finally:
            self._asked, self._probed = None, False
        return made.logits if probed else found

    def probe(self, device: torch.device) -> Tensor:
        """Logits of one token, in float32 whatever the layers compute in: [V]."""
        found = torch.linspace(-_PROBED, _PROBED, self.head.out_features, device=device)
        found[0] = _SMALL
        return found

    def _head_forward(self, hidden: Tensor) -> Tensor:
        if self._probed:
            return self.probe(hidden.device).expand(*hidden.shape[:-1], -1)
        if self._asked is None:
            if self.part is not None:
                return gathered(self._plain_head(entering(hidden, self.part.group)), self.part.group)
            plain: Tensor = self._plain_head(hidden)
            return plain
        at, targets = self._asked
        self._found = chunked_logprobs(
            hidden.flatten(0, -2)[at],
            self.head.weight,
            self.head.bias,
            targets,
            tail=self.tail,
            temperature=self._temperature,
            chunk=self._chunk,
            part=self.part,
        )
        return hidden.new_empty(1, len(at), 0)  # no logits: what the model does to them costs nothing


_STAND = "scavenger_head"


def install(model: Any, *, temperature: float, chunk: int) -> None:
    """Let this model compute logprobs by chunks of `chunk` tokens; before it is sharded. Raises `ConfigError` for another kind of head."""
    setattr(model, _STAND, _Stand(model, temperature, chunk))


def take_slice(model: Any, part: Slice) -> bool:
    """The head of this model has a slice of the entries alone. Returns whether it is one that `install` was called for."""
    stand: _Stand | None = getattr(model, _STAND, None)
    if stand is not None:
        stand.part = part
    return stand is not None


@torch.no_grad()
def check(model: Any, batch: Batch) -> None:
    """Measure what the model does to its logits, by probes in the place of the head's own. A collective, like every forward.

    Raises `ConfigError` where that is no scale and no soft cap: then logprobs would not be those of the plain head.
    """
    stand: _Stand = getattr(model, _STAND)
    probe = stand.probe(batch.inputs.device)
    found = model(input_ids=batch.inputs, use_cache=False, probed=True, **_layout(batch))
    reshard(model)
    expected = (*batch.inputs.shape, len(probe))
    cap = float(getattr(model.config.get_text_config(), "final_logit_softcapping", None) or 0.0)
    tail = Tail(float(found.flatten()[0]) / _SMALL, cap) if found.numel() else Tail()
    tail = Tail(1.0, cap) if abs(tail.scale - 1.0) < _CLOSE else tail
    known = tuple(found.shape) == expected and torch.allclose(
        found.float(), tail.of(probe).expand(expected), rtol=_CLOSE, atol=_CLOSE
    )
    if not known:
        raise ConfigError(
            f"{type(model).__name__} does more to its logits than a scale and final_logit_softcapping: head_chunk_tokens cannot",
            _REMEDY,
        )
    stand.tail = tail


def _layout(batch: Batch) -> dict[str, Any]:
    if batch.borders is None:
        return {}
    at = {"position_ids": batch.positions}
    if batch.seen is None or batch.seen_borders is None:
        return at | borders_of(batch.borders, batch.longest)
    return at | branches_of(batch.borders, batch.longest, batch.seen, batch.seen_borders, batch.longest_seen)


def logprobs(model: Any, batch: Batch, temperature: float, *, deterministic: bool) -> Logprobs:
    """Of the batch's answer tokens."""
    if hasattr(model, _STAND):
        found: Logprobs | None = model(
            input_ids=batch.inputs, use_cache=False, answers=(batch.at, batch.targets), **_layout(batch)
        )
        if found is None:
            raise ConfigError(f"{type(model).__name__} does not call its output head", _REMEDY)
        return found
    if batch.borders is not None:  # the head's logits of answer tokens alone
        more = _layout(batch) | {"logits_to_keep": batch.at}
        logits = model(input_ids=batch.inputs, use_cache=False, **more).logits[0]
    else:
        logits = model(input_ids=batch.inputs, use_cache=False).logits.flatten(0, 1)[batch.at]
    take = token_logprobs if deterministic else picked_logprobs
    return Logprobs(take(logits, batch.targets, temperature), None)
