"""From a data set's prompt to the text that the model sees: the model's own chat template, or the text as it is. Knows no order, no token.

The template comes with the model's folder; transformers renders it in its sandbox. No other code of the folder is run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from scavenger.config import DataSection
from scavenger.errors import ConfigError
from trainer.dataset import Prompt


class Template:
    """`text` of prompts. Raises `ConfigError` at once where chat is wanted and the folder has no template."""

    def __init__(self, folder: Path, data: DataSection) -> None:
        self._system = data.system
        self._options: dict[str, Any] = dict(data.chat_options)
        self._tokenizer: Any = None
        if not data.chat:
            return
        from transformers import AutoTokenizer  # a second of imports that most runs do without

        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not self._tokenizer.chat_template:
            raise ConfigError(f"data.chat: {folder} has no chat template", "set data.chat = false, or take the model's instruct version")
        self.text("?")

    def text(self, prompt: Prompt) -> str:
        """Ends where the assistant's turn begins. Raises `ConfigError` for a conversation without a template."""
        if self._tokenizer is None:
            if not isinstance(prompt, str):
                raise ConfigError("a prompt is a conversation, and data.chat is false", "set data.chat = true")
            return self._system + prompt
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._system and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": self._system}, *turns]
        try:
            text: str = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False, **self._options)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template: {error}", "look at data.chat_options and data.system") from error
        return text
