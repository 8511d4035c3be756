"""From a data set's prompt to the text that the model sees: the model's own chat template, or the text as it is. Knows no order, no token.

The template comes with the model's folder; transformers renders it in its sandbox. No other code of the folder is run.
Boundary: the model's own chat template, which is foreign code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scavenger.config import DataSection
from scavenger.errors import ConfigError
from trainer.data.dataset import Prompt


class Template:
    """`text` of prompts. Raises `ConfigError` at once where chat is wanted and the folder has no template."""

    def __init__(self, folder: Path, data: DataSection) -> None:
        self._system = data.system
        self._options: dict[str, Any] = dict(data.chat_options)
        self._tokenizer: Any = None
        if not data.chat:
            return
        from transformers import AutoTokenizer  # a second of imports that most runs do without

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever a class of transformers raises for files it cannot read
            raise ConfigError(
                f"data.chat: transformers cannot open the tokenizer in {folder}: {error}",
                "copy tokenizer_config.json and tokenizer.json from the model again, or set data.chat = false",
            ) from error
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"data.chat: {folder} has no chat template",
                "set data.chat = false, or take the model's instruct version",
            )
        self.text("?", "a prompt of one user's turn")

    @property
    def source(self) -> str:
        """What is rendered, as it stands: what it renders may hold the day's date."""
        chat = self._tokenizer.chat_template if self._tokenizer is not None else ""
        return json.dumps([chat, self._system, self._options], sort_keys=True, default=str)

    def text(self, prompt: Prompt, where: str) -> str:
        """Ends where the assistant's turn begins. Raises `ConfigError`, naming `where`, for a conversation without a template or one
        that the template cannot render.
        """
        if self._tokenizer is None:
            if not isinstance(prompt, str):
                raise ConfigError(
                    f"{where}: the prompt is a conversation, and data.chat is false", "set data.chat = true"
                )
            return self._system + prompt
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._system and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": self._system}, *turns]
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False, **self._options
            )
        except Exception as error:  # a template is code that came with the model
            raise ConfigError(
                f"{where}: the model's chat template raised {type(error).__name__}: {error}",
                "look at this row's turns (each with a role and text as its content), at data.chat_options and data.system",
            ) from error
        return text
