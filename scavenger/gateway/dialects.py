"""Three dialects in, and out: what a body asks for, and what an agent is answered. Pure: no HTTP, no tokenizer, no clock.

    generate   vLLM's token-in/token-out endpoint, `/inference/v1/generate` (0.32: entrypoints/scale_out/token_in_token_out/protocol.py)
    chat       OpenAI's `/v1/chat/completions` with vLLM's token fields (`return_token_ids`, `token_ids`, `prompt_token_ids`)
    complete   OpenAI's older `/v1/completions` with vLLM's token fields, a prompt of token ids, and no streams: what TRL's asynchronous
               trainer asks for

A field that asks for what engines here cannot do is refused by its name, unless its value says "off": nothing is ignored that would
change the tokens. Of logprobs the ledger has those of sampled tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

from scavenger.protocol.messages import MAX_TURN_SAMPLES, Sampling

#: Settings of other servers, and the values of them that ask for nothing.
_OFF: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "best_of": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "echo": (False,),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "modalities": (["text"],),
    "output_mode": ("tokens",),
    "output_kind": (0, 1, 2),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "prompt_logprobs": (0, False),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True, False),
}
#: Fields that change no token: how a server shows, stores or schedules what it generates.
_HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "safety_identifier",
        "prompt_cache_key",
        "cache_salt",
        "request_id",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "token_offsets",
        "routed_experts_prompt_start",
        "return_token_ids",
        "stream",
        "stream_options",
        "model",
        "seed",
    }
)


#: Of one conversation.
MAX_MESSAGES = 4096
#: Of a request's name, and of a model's, which may be a path. Both are in each event of a stream.
MAX_NAME_CHARS, MAX_MODEL_CHARS = 256, 1024


class BadRequest(Exception):
    """The request cannot be served: an HTTP status, OpenAI's error type, and what to do."""

    def __init__(self, message: str, status: int = 400, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.message, self.status, self.kind = message, status, kind


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What a body asks for. `max_tokens` 0: as many as the context has room for."""

    n: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    skip_special_tokens: bool
    model: str
    name: str  # the caller's own for this request

    def sampling(self, prompt_tokens: int, context_length: int, ends: Sequence[int]) -> Sampling:
        """How it is sampled. `ends`: tokens that end a completion of this model. Raises `BadRequest` where the prompt fills the context."""
        room = context_length - prompt_tokens
        if room < 1:
            raise BadRequest(
                f"the prompt has {prompt_tokens} tokens, and the context of {context_length} has no room for more"
            )
        stops = dict.fromkeys((*self.stop_token_ids, *(() if self.ignore_eos else ends)))
        return Sampling(
            self.max_tokens or room,
            self.temperature,
            self.top_p,
            self.top_k,
            tuple(stops),
            self.min_tokens,
            self.stop,
        )


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation and how to continue it. `tools`: as the chat template takes them; () where none may be called."""

    turn: TurnRequest
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    template_options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one choice. `finish`: "stop" or "length" with its last ones. `begin`: tokens that came before."""

    index: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    begin: int
    version: int
    finish: str = ""


# ---------------------------------------------------------------- bodies in


class _Fields:
    """A JSON object whose fields are taken one by one; what is left must ask for nothing."""

    def __init__(self, body: Any, where: str = "") -> None:
        if not isinstance(body, dict):
            raise BadRequest(f"{where or 'the body'} is no JSON object")
        self._left = dict(body)
        self._where = f"{where}." if where else ""

    def take(self, name: str, kinds: type | tuple[type, ...], default: Any) -> Any:
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds not in (bool, (bool, int))):
            raise BadRequest(f"{self._where}{name} has the wrong type: {type(value).__name__}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise BadRequest(f"{self._where}{name} is no number of 64 bits")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = float(self.take(name, (int, float), default))
        if not (math.isfinite(value) and low <= value <= high):
            raise BadRequest(f"{self._where}{name} = {value:g} is not between {low:g} and {high:g}")
        return value

    def integer(self, name: str, low: int, high: int, default: int) -> int:
        value: int = self.take(name, int, default)
        if not low <= value <= high:
            raise BadRequest(f"{self._where}{name} = {value} is not between {low} and {high}")
        return value

    def finish(self) -> None:
        for name, value in self._left.items():
            if value is None or name in _HARMLESS or value in _OFF.get(name, ()):
                continue
            raise BadRequest(f"{self._where}{name} is not supported here: leave it out")


def _tokens(value: list[Any], where: str, vocabulary: int) -> tuple[int, ...]:
    if not all(type(token) is int and 0 <= token < vocabulary for token in value):
        raise BadRequest(f"{where}: token ids are integers from 0 to {vocabulary - 1}")
    return tuple(value)


def _sampling(
    fields: _Fields, outer: _Fields, vocabulary: int, *, max_tokens: int, logprobs: bool, name: str
) -> TurnRequest:
    stop = fields.take("stop", (str, list), [])
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > 64 or not all(isinstance(text, str) and 0 < len(text) <= 256 for text in stops):
        raise BadRequest("stop: at most 64 texts of 1 to 256 characters")
    options = _Fields(outer.take("stream_options", dict, {}), "stream_options")
    model = outer.take("model", str, "")
    if len(model) > MAX_MODEL_CHARS or len(name) > MAX_NAME_CHARS:
        raise BadRequest(
            f"model has at most {MAX_MODEL_CHARS:,} characters, and a request's name {MAX_NAME_CHARS}"
        )
    stop_ids = fields.take("stop_token_ids", list, [])
    if len(stop_ids) > 512:
        raise BadRequest("stop_token_ids: at most 512")
    fields.take("seed", int, 0)  # another seed is another request, whose tokens are drawn by another key
    return TurnRequest(
        n=fields.integer("n", 1, MAX_TURN_SAMPLES, 1),
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 0.0, 2.0, 1.0),  # both as vLLM and OpenAI take them
        top_p=fields.number("top_p", 1e-6, 1.0, 1.0),
        top_k=max(0, fields.integer("top_k", -1, 2**31 - 1, 0)),
        min_tokens=fields.integer("min_tokens", 0, 2**31 - 1, 0),
        stop=tuple(stops),
        stop_token_ids=_tokens(stop_ids, "stop_token_ids", vocabulary),
        ignore_eos=fields.take("ignore_eos", bool, False),
        logprobs=logprobs,
        stream=outer.take("stream", bool, False),
        include_usage=options.take("include_usage", bool, False),
        return_token_ids=outer.take("return_token_ids", bool, False),
        skip_special_tokens=fields.take("skip_special_tokens", bool, True),
        model=model,
        name=name,
    )


_ONE_LOGPROB = "logprobs: the logprob of each sampled token is recorded, and no other: ask for none or one"


def parse_generate(body: Any, vocabulary: int, name: str = "") -> tuple[TurnRequest, tuple[int, ...]]:
    """A body of `/inference/v1/generate`: the request and the prompt's tokens. Raises `BadRequest`."""
    outer = _Fields(body)
    prompt = _tokens(outer.take("token_ids", list, []), "token_ids", vocabulary)
    if not prompt:
        raise BadRequest("token_ids: at least one token")
    fields = _Fields(outer.take("sampling_params", dict, {}), "sampling_params")
    wanted = fields.take("logprobs", int, -1)
    if wanted not in (-1, 0, 1):
        raise BadRequest(_ONE_LOGPROB)
    most = fields.integer("max_tokens", 1, 2**31 - 1, 2**31 - 1) % (2**31 - 1)
    request_id = outer.take("request_id", str, "")
    turn = _sampling(
        fields, outer, vocabulary, max_tokens=most, logprobs=wanted >= 0, name=name or request_id
    )
    fields.finish()
    outer.finish()
    return turn, prompt


#: Of `/v1/completions`, where a body names none: OpenAI's and vLLM's.
COMPLETION_TOKENS = 16


def parse_completion(body: Any, vocabulary: int, name: str = "") -> tuple[TurnRequest, tuple[int, ...]]:
    """A body of `/v1/completions`: the request and the prompt's tokens. Raises `BadRequest`."""
    fields = _Fields(body)
    given = fields.take("prompt", (str, list), [])
    if isinstance(given, str) or not given:
        raise BadRequest("prompt: a list of token ids, at least one; for texts there is /v1/chat/completions")
    prompt = _tokens(given, "prompt", vocabulary)
    wanted = fields.take("logprobs", int, -1)
    if wanted not in (-1, 0, 1):
        raise BadRequest(_ONE_LOGPROB)
    most = fields.integer("max_tokens", 1, 2**31 - 1, COMPLETION_TOKENS)
    turn = _sampling(fields, fields, vocabulary, max_tokens=most, logprobs=wanted >= 0, name=name)
    if turn.stream:
        raise BadRequest("stream: not here; /inference/v1/generate and /v1/chat/completions stream")
    fields.finish()
    return turn, prompt


def parse_chat(body: Any, vocabulary: int, name: str = "") -> ChatRequest:
    """A body of `/v1/chat/completions`. Raises `BadRequest`."""
    fields = _Fields(body)
    said = fields.take("messages", list, [])
    if not 0 < len(said) <= MAX_MESSAGES:
        raise BadRequest(f"messages: 1 to {MAX_MESSAGES:,}")
    tools = fields.take("tools", list, [])
    choice = fields.take("tool_choice", (str, dict), "auto" if tools else "none")
    if choice not in ("auto", "none"):
        raise BadRequest('tool_choice: "auto" or "none"; a call cannot be forced')
    for number, tool in enumerate(tools):
        if not (isinstance(tool, dict) and isinstance(tool.get("function"), dict)):
            raise BadRequest(f"tools[{number}] is no function")
    wanted = fields.take("logprobs", bool, False)
    if fields.integer("top_logprobs", 0, 20, 0) > 1:
        raise BadRequest(_ONE_LOGPROB)
    off = 2**31 - 1
    most = fields.integer("max_completion_tokens", 1, off, off)
    most = min(most, fields.integer("max_tokens", 1, off, off)) % off
    options = fields.take("chat_template_kwargs", dict, {})
    turn = _sampling(fields, fields, vocabulary, max_tokens=most, logprobs=wanted, name=name)
    fields.finish()
    messages = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(said))
    return ChatRequest(turn, messages, tuple(tools) if choice == "auto" else (), options)


def _message(message: Any, where: str) -> dict[str, Any]:
    """A message as templates take it: its parts of text as one text, the arguments of tool calls as objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where}: a message has a role")
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"
        ]
        if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
            raise BadRequest(f"{where}.content: parts of text only")
        content = "\n".join(str(text) for text in texts)
    if content is not None and not isinstance(content, str):
        raise BadRequest(f"{where}.content: a text")
    made = {key: value for key, value in message.items() if value is not None}
    made["content"] = content or ""
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise BadRequest(f"{where}.tool_calls: a list")
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return made


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}: a function with a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments)
        except ValueError:
            raise BadRequest(f"{where}.function.arguments is no JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}


def loads(text: str) -> Any:
    """A JSON value that a model or an agent wrote, halves of surrogate pairs as "?". Raises `ValueError`, also for what JSON has no form
    for: infinities, integers beyond 64 bits, nesting without end."""
    try:
        found = json.loads(text, parse_constant=_refuse_number, parse_int=_integer, parse_float=_finite)
        again = json.dumps(found, ensure_ascii=False)
    except RecursionError:
        raise ValueError("nested too deep") from None
    plain = passable(again)
    return found if plain == again else json.loads(plain)


def passable(text: str) -> str:
    """The text without halves of surrogate pairs, which no encoding has."""
    return text.encode("utf-8", "replace").decode()


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    found = float(text)
    return found if math.isfinite(found) else _refuse_number(text)


def _integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise ValueError("an integer beyond 64 bits")
    return int(text)


# ---------------------------------------------------------------- what was generated


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON


_CALL, _END_CALL = "<tool_call>", "</tool_call>"


def split_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """A completion's text and its calls, in the form that Qwen's and Hermes' templates ask of their models:
    `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. A call that is no such JSON stays text.
    """
    found: list[ToolCall] = []
    kept: list[str] = []
    rest = text
    while True:
        before, mark, after = rest.partition(_CALL)
        inside, closed, behind = after.partition(_END_CALL)
        call = _tool_call(inside) if mark and closed else None
        if not mark or not closed:
            kept.append(rest)
            break
        kept.append(before if call is not None else f"{before}{_CALL}{inside}{_END_CALL}")
        found += [call] if call is not None else []
        rest = behind
    return "".join(kept).rstrip("\n") if found else text, found


def _tool_call(inside: str) -> ToolCall | None:
    try:
        call = loads(inside)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return ToolCall(call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments))


def shown(text: str, stops: Sequence[str], *, whole: bool) -> str:
    """What of a completion's text is shown: nothing from its first stop text on. Until it is `whole`, nothing that may be the beginning
    of one."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        return text[: min(found)]
    if whole:
        return text
    for length in range(min(max((len(stop) for stop in stops), default=1) - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return text[:-length]
    return text


# ---------------------------------------------------------------- replies out


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return (
        b"data: "
        + json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
        + b"\n\n"
    )


DONE = b"data: [DONE]\n\n"


def error_body(message: str, kind: str, status: int) -> dict[str, Any]:
    """OpenAI's and vLLM's shape of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _generate_choice(piece: Piece, request: TurnRequest, *, whole: bool) -> dict[str, Any]:
    content = [
        {
            "token": f"token_id:{token}",  # as `renderers` reads it, beside what vLLM 0.32 sends
            "token_id": token,
            "logprob": logprob,
            "rank": None,
            "top_logprobs": [{"token_id": token, "logprob": logprob, "rank": None}],
        }
        for token, logprob in zip(piece.tokens, piece.logprobs, strict=True)
    ]
    end = piece.begin + len(piece.tokens)
    return {
        "index": piece.index,
        "finish_reason": piece.finish or ("stop" if whole else None),
        "stop_reason": _stop_reason(piece, request),
        "token_ids": list(piece.tokens),
        "logprobs": {"content": content} if request.logprobs else None,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": str(piece.version), "start": 0, "end": end}]
        if piece.finish
        else None,
    }


def _stop_reason(piece: Piece, request: TurnRequest) -> int | None:
    last = piece.tokens[-1] if piece.tokens and piece.finish == "stop" else None
    return last if last in request.stop_token_ids else None


def generate_reply(
    request_id: str,
    request: TurnRequest,
    pieces: Sequence[Piece],
    prompt: Sequence[int] | None,
    prompt_tokens: int,
    created: int,
) -> dict[str, Any]:
    """The answer of `/inference/v1/generate`: each choice whole. `prompt` None: it is not known any more."""
    return {
        "request_id": request_id,
        "model": request.model or None,
        "created": created,
        "output_mode": "tokens",
        "choices": [_generate_choice(piece, request, whole=True) for piece in pieces],
        "usage": usage(prompt_tokens, sum(len(piece.tokens) for piece in pieces)),
        "prompt_logprobs": None,
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": list(prompt) if request.return_token_ids and prompt is not None else None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def generate_event(
    request_id: str, request: TurnRequest, piece: Piece, prompt: Sequence[int] | None, *, first: bool
) -> bytes:
    """One event of a streamed answer."""
    return event(
        {
            "request_id": request_id,
            "output_mode": "tokens",
            "choices": [_generate_choice(piece, request, whole=False)],
            "usage": None,
            "prompt_token_ids": list(prompt)
            if first and request.return_token_ids and prompt is not None
            else None,
            "mm_placeholders": None,
            "metrics": None,
        }
    )


Decode = Callable[[int], str]


def chat_logprobs(piece: Piece, decode: Decode) -> dict[str, Any]:
    """OpenAI's logprobs of a piece's tokens."""
    content = []
    for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
        text = decode(token)
        content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": content}


def call_ids(request_id: str, index: int, calls: Sequence[ToolCall]) -> Iterator[dict[str, Any]]:
    """Tool calls as OpenAI shows them. Their ids are the same when the request is answered again."""
    for number, call in enumerate(calls):
        yield {
            "id": f"call_{request_id[-24:]}_{index}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }


def chat_reply(
    request_id: str,
    request: ChatRequest,
    pieces: Sequence[Piece],
    texts: Sequence[str],
    prompt: Sequence[int] | None,
    prompt_tokens: int,
    created: int,
    decode: Decode,
) -> dict[str, Any]:
    """The answer of `/v1/chat/completions`. `texts`: what is shown of each choice."""
    turn, choices = request.turn, []
    for piece, text in zip(pieces, texts, strict=True):
        content, calls = split_tool_calls(text) if request.tools else (text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        if calls:
            message["tool_calls"] = list(call_ids(request_id, piece.index, calls))
        choices.append(
            {
                "index": piece.index,
                "message": message,
                "logprobs": chat_logprobs(piece, decode) if turn.logprobs else None,
                "finish_reason": "tool_calls" if calls and piece.finish == "stop" else piece.finish,
                "stop_reason": _stop_reason(piece, turn),
                **({"token_ids": list(piece.tokens)} if turn.return_token_ids else {}),
            }
        )
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": created,
        "model": turn.model,
        "choices": choices,
        "usage": usage(prompt_tokens, sum(len(piece.tokens) for piece in pieces)),
        **({"prompt_token_ids": None if prompt is None else list(prompt)} if turn.return_token_ids else {}),
    }


def completion_reply(
    request_id: str,
    request: TurnRequest,
    pieces: Sequence[Piece],
    texts: Sequence[str],
    prompt: Sequence[int] | None,
    prompt_tokens: int,
    created: int,
    decode: Decode,
) -> dict[str, Any]:
    """The answer of `/v1/completions`. `texts`: what is shown of each choice."""
    choices = [
        {
            "index": piece.index,
            "text": text,
            "logprobs": completion_logprobs(piece, decode) if request.logprobs else None,
            "finish_reason": piece.finish,
            "stop_reason": _stop_reason(piece, request),
            "prompt_logprobs": None,
            "token_ids": list(piece.tokens) if request.return_token_ids else None,
            "prompt_token_ids": list(prompt) if request.return_token_ids and prompt is not None else None,
        }
        for piece, text in zip(pieces, texts, strict=True)
    ]
    return {
        "id": request_id,
        "object": "text_completion",
        "created": created,
        "model": request.model,
        "choices": choices,
        "usage": usage(prompt_tokens, sum(len(piece.tokens) for piece in pieces)),
    }


def completion_logprobs(piece: Piece, decode: Decode) -> dict[str, list[Any]]:
    """The older API's logprobs of a piece's tokens: four lists of one length. Offsets are in characters of these texts."""
    texts = [decode(token) for token in piece.tokens]
    offsets = list(accumulate((len(text) for text in texts), initial=0))[:-1]
    return {
        "tokens": texts,
        "token_logprobs": list(piece.logprobs),
        "top_logprobs": [{text: one} for text, one in zip(texts, piece.logprobs, strict=True)],
        "text_offset": offsets,
    }


class TextSoFar:
    """A completion's text as its tokens come. Each token is decoded a few times, however long the completion is.

    Tokens are decoded with those before them, because some tokenizers join words by what comes before; what had ended in half a character
    is decoded again with the next ones. `whole` decodes all of it at once: the last word.
    """

    #: Tokens that may end in half a character, and are decoded again with each new one.
    MOST_OPEN = 64

    def __init__(self, text_of: Callable[[Sequence[int]], str]) -> None:
        self.tokens: list[int] = []
        self._text_of = text_of
        self._text, self._begin, self._read = "", 0, 0

    def add(self, tokens: Sequence[int]) -> str:
        """The text with these tokens, perhaps with half a character at its end."""
        self.tokens += tokens
        before = self._text_of(self.tokens[self._begin : self._read])
        text = self._text + self._text_of(self.tokens[self._begin :])[len(before) :]
        if not text.endswith("\ufffd") or len(self.tokens) - self._read > self.MOST_OPEN:
            self._text, self._begin, self._read = text, self._read, len(self.tokens)
        return text

    def whole(self) -> str:
        return self._text_of(self.tokens)


class ChatStream:
    """The events of one streamed chat answer. `text_of(tokens)`: the text of tokens of a choice."""

    def __init__(
        self,
        request_id: str,
        request: ChatRequest,
        prompt: Sequence[int] | None,
        created: int,
        text_of: Callable[[Sequence[int]], str],
        decode: Decode,
    ) -> None:
        self._id, self._request, self._prompt, self._created = request_id, request, prompt, created
        self._decode = decode
        self._said = [TextSoFar(text_of) for _ in range(request.turn.n)]
        self._sent = [0] * request.turn.n  # characters
        self._begun = False

    def texts(self) -> list[str]:
        """What is shown of each choice, all of which are whole."""
        return [shown(said.whole(), self._request.turn.stop, whole=True) for said in self._said]

    def events(self, piece: Piece) -> Iterator[bytes]:
        turn = self._request.turn
        if not self._begun:
            self._begun = True
            for index in range(turn.n):
                first: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
                yield self._event(index, first, prompt=index == 0)
        said = self._said[piece.index]
        so_far = said.add(piece.tokens)
        text = shown(said.whole() if piece.finish else so_far, turn.stop, whole=bool(piece.finish))
        calls: list[ToolCall] = []
        if self._request.tools:
            if piece.finish:
                text, calls = split_tool_calls(text)
            else:  # what may become a call is held back until it is whole
                text = shown(text, (_CALL,), whole=False).rstrip("\n")  # newlines before a call go with it
        if not piece.finish and text.endswith("\ufffd"):
            text = text.rstrip("\ufffd")  # half a character: the next token completes it
        delta: dict[str, Any] = {}
        if len(text) > self._sent[piece.index]:
            delta["content"] = text[self._sent[piece.index] :]
            self._sent[piece.index] = len(text)
        if calls:
            shown_calls = call_ids(self._id, piece.index, calls)
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(shown_calls)]
        choice: dict[str, Any] = {"delta": delta}
        if turn.logprobs:
            choice["logprobs"] = chat_logprobs(piece, self._decode)
        if turn.return_token_ids:
            choice["token_ids"] = list(piece.tokens)
        if piece.finish:
            choice["finish_reason"] = "tool_calls" if calls and piece.finish == "stop" else piece.finish
            choice["stop_reason"] = _stop_reason(piece, turn)
        if delta or piece.finish or turn.logprobs or turn.return_token_ids:
            yield self._event(piece.index, choice)

    def _event(self, index: int, choice: dict[str, Any], *, prompt: bool = False) -> bytes:
        turn = self._request.turn
        shown_prompt = (
            {}
            if not (prompt and turn.return_token_ids)
            else {"prompt_token_ids": None if self._prompt is None else list(self._prompt)}
        )
        return event(
            {
                **self._envelope(),
                "choices": [{"index": index, "logprobs": None, "finish_reason": None, **choice}],
                **({"usage": None} if turn.include_usage else {}),
                **shown_prompt,
            }
        )

    def usage(self, prompt_tokens: int) -> bytes:
        counted = usage(prompt_tokens, sum(len(said.tokens) for said in self._said))
        return event({**self._envelope(), "choices": [], "usage": counted})

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._request.turn.model,
        }
