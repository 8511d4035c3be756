"""Conversations to token ids and back: the model folder's chat template and tokenizer, and the token ids that each conversation had.

What a prompt rendered to, and what was generated from it, is kept by token ids: a conversation that goes on from an answer begins with
exactly the tokens of that answer, and only what is new is tokenised. Text that was tokenised again may come out as other tokens, which
the model never said. Where the agent wrote its history anew (or this gateway began anew) no kept tokens fit, and the whole is rendered.

The template is code of the run's own model, rendered in jinja's sandbox as transformers does. Knows no HTTP and no daemon.

Boundary: the model's folder is read here.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec
from tokenizers import Tokenizer

from scavenger.errors import ConfigError
from scavenger.gateway.dialects import BadRequest, ChatRequest, ToolCall, loads

#: Of kept conversations, 4 bytes a token; and the share of them that one episode may have.
MOST_KEPT_BYTES = 256 * 1024 * 1024
EPISODE_SHARE = 8
#: So few are decoded within a millisecond.
FEW_TOKENS = 1024


class ModelFolder:
    """What a gateway needs of the run's model: tokenizer, chat template, size of the vocabulary, tokens that end a completion."""

    def __init__(self, folder: Path, stop_token_ids: tuple[int, ...]) -> None:
        """`stop_token_ids`: of the run's configuration; empty: the model's own. Raises `ConfigError`."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"model.path: {folder} holds no tokenizer.json", "save the model's fast tokenizer there"
            )
        self.tokenizer = Tokenizer.from_file(str(path))
        settings = _json(folder / "tokenizer_config.json")
        model = _json(folder / "config.json")
        text_model = model.get("text_config") if isinstance(model.get("text_config"), dict) else model
        vocabulary = text_model.get("vocab_size") if isinstance(text_model, dict) else None
        self.vocabulary = vocabulary if isinstance(vocabulary, int) else self.tokenizer.get_vocab_size()
        self.ends = stop_token_ids or _ends(folder)
        self._special = {
            name: token.get("content", "") if isinstance(token, dict) else token
            for name, token in settings.items()
            if name.endswith("_token") and isinstance(token, (str, dict))
        }
        self._template = _compiled(_template(folder, settings))

    def render(self, chat: ChatRequest) -> str:
        """The prompt's text. Raises `BadRequest`."""
        if self._template is None:
            raise BadRequest("the model has no chat template: call /inference/v1/generate with token ids")
        try:
            return self._template.render(
                messages=list(chat.messages),
                tools=list(chat.tools) or None,
                documents=None,
                add_generation_prompt=True,
                **{**self._special, **chat.template_options},
            )
        except Exception as error:  # a template is code that came with the model
            raise BadRequest(f"the model's chat template raised {type(error).__name__}: {error}") from error

    # Of the tokenizer's calls those for one text stop all threads of this process meanwhile, a second and more for a long one.

    def tokens(self, text: str) -> list[int]:
        [found] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return list(found.ids)

    def text(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(tokens) <= FEW_TOKENS:
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))
        [found] = self.tokenizer.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)
        return str(found)

    def token(self, token: int) -> str:
        """One token's text; of a special one its name."""
        return self.text((token,), skip_special_tokens=False)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}", "copy it from the model again") from error
    return found if isinstance(found, dict) else {}


def _ends(folder: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        named = _json(folder / name).get("eos_token_id")
        tokens = named if isinstance(named, list) else [] if named is None else [named]
        if tokens and all(type(token) is int and token >= 0 for token in tokens):
            return tuple(tokens)
    raise ConfigError(f"{folder} names no eos_token_id", "set sampling.stop_token_ids")


def _template(folder: Path, settings: dict[str, Any]) -> str:
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    found = settings.get("chat_template") or ""
    if isinstance(found, list):  # several, by name
        found = next((one.get("template", "") for one in found if one.get("name") == "default"), "")
    return str(found)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said: here it is only shown."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compiled(source: str) -> jinja2.Template | None:
    """As `transformers` compiles it (utils/chat_template_utils.py)."""
    if not source:
        return None

    def to_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return made.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the model's chat template: {error}", "copy it from the model again") from error


# ---------------------------------------------------------------- conversations by their tokens


class Conversations:
    """The tokens of conversations that ended with an answer, by episode and messages. Where they are too many the longest unused
    go first: those of the episode that has most, if that is more than its share.
    """

    def __init__(self, model: ModelFolder, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._model = model
        self._most = most_bytes
        self._lock = threading.Lock()  # prompts are worked out beside the event loop
        self._kept: OrderedDict[bytes, tuple[str, array[int]]] = OrderedDict()
        self._of: dict[
            str, OrderedDict[bytes, int]
        ] = {}  # episode -> its keys and their bytes, in the same order
        self._held: dict[str, int] = {}  # bytes of each episode's
        self.nbytes = 0
        self.continued = self.rendered = 0  # prompts that began with kept tokens, and all others

    def prompt(self, episode: str, chat: ChatRequest) -> list[int]:
        """The token ids of a conversation's prompt. Raises `BadRequest`."""
        text = self._model.render(chat)
        for message, key in reversed(list(zip(chat.messages, _keys(episode, chat), strict=True))[:-1]):
            if message.get("role") != "assistant":
                continue
            with self._lock:
                if key not in self._kept:
                    continue
                _, known = self._kept[key]
                self._kept.move_to_end(key)
                self._of[episode].move_to_end(key)
            said = self._model.text(known, skip_special_tokens=False)
            if text.startswith(said):
                self.continued += 1
                return [*known, *self._model.tokens(text[len(said) :])]
        self.rendered += 1
        return self._model.tokens(text)

    def answered(
        self,
        episode: str,
        chat: ChatRequest,
        prompt: Sequence[int],
        content: str,
        calls: Sequence[ToolCall],
        tokens: Sequence[int],
    ) -> None:
        """The prompt was answered by these tokens, which the agent saw as `content` and `calls`."""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": _loaded(call.arguments)}} for call in calls
            ]
        *_, last = _keys(episode, chat)
        key, kept = _next(last, message), array("i", [*prompt, *tokens])
        with self._lock:
            self._drop(key)
            self._kept[key] = episode, kept
            mine = self._of.setdefault(episode, OrderedDict())
            mine[key] = 4 * len(kept)
            self.nbytes += 4 * len(kept)
            self._held[episode] = self._held.get(episode, 0) + 4 * len(kept)
            while self.nbytes > self._most:
                largest = max(self._held, key=self._held.__getitem__)
                over = self._held[largest] > self._most // EPISODE_SHARE
                self._drop(next(iter(self._of[largest] if over else self._kept)))

    def forget(self, episode: str) -> None:
        """It is over."""
        with self._lock:
            for key in list(self._of.get(episode, ())):
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        if key in self._kept:
            episode, _ = self._kept.pop(key)
            mine = self._of[episode]
            nbytes = mine.pop(key)
            self.nbytes -= nbytes
            self._held[episode] -= nbytes
            if not mine:
                del self._of[episode], self._held[episode]


def _loaded(arguments: str) -> Any:
    try:
        return loads(arguments)
    except ValueError:
        return arguments


def _keys(episode: str, chat: ChatRequest) -> Iterator[bytes]:
    """The key of the conversation up to each message: each hashed once, on from the one before."""
    key = sha256(_encoded((episode, chat.tools, chat.template_options))).digest()
    for message in chat.messages:
        key = _next(key, message)
        yield key


def _next(key: bytes, message: dict[str, Any]) -> bytes:
    """By what a template sees: an agent may drop or add ids, names and empty fields of a message."""
    functions = (call["function"] for call in message.get("tool_calls", ()))
    seen = (message["role"], message["content"], [(one["name"], one["arguments"]) for one in functions])
    return sha256(key + _encoded(seen)).digest()


def _encoded(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")
