from __future__ import annotations

import json
from pathlib import Path

import pytest

from scavenger.config import RunConfig
from scavenger.errors import ConfigError
from tests.trainer.step_prompts import of_step
from trainer.data.prompts import PromptSource, PromptTask, open_tokenizer, stop_tokens, unknown_note
from trainer.prepare import smallest
from trainer.tasks import sort


def make_config(model: Path, **data: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 3, "state_dir": "s", "out_dir": "o"},
            "model": {"path": model, "context_length": 24},
            "sampling": {"max_tokens": 8},
            "data": {"prompts_per_step": 4} | data,
            "eval": {"prompts": 3},
        }
    )


def test_a_step_s_problems_depend_on_seed_and_step_alone(model_folder: Path) -> None:
    tokenizer = open_tokenizer(model_folder)
    one, other = (
        PromptSource(make_config(model_folder), tokenizer),
        PromptSource(make_config(model_folder), tokenizer),
    )
    expected = [of_step(one, step) for step in (1, 2, 3)]
    assert [of_step(other, step) for step in (3, 2, 1)] == expected[::-1]
    assert [prompt_task.index for step in expected for prompt_task in step] == list(range(12))
    assert of_step(PromptSource(make_config(model_folder, seed=1), tokenizer), 1) != expected[0]


def test_held_out_problems_are_never_trained_on() -> None:
    trained = {sort.prompt_task(0, index)[0] for index in range(2000)}
    assert not trained & {
        sort.prompt_task(seed, index, held_out=True)[0] for seed in (0, 1) for index in range(200)
    }


def test_the_tokenizer_gives_one_token_a_character_and_back(model_folder: Path) -> None:
    tokenizer = open_tokenizer(model_folder)
    text, meta = sort.prompt_task(0, 0)
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text) == 7
    eos = sort.ALPHABET.index(sort.EOS)
    assert (
        tokenizer.decode([*tokenizer.encode(meta["answer"]).ids, eos], skip_special_tokens=True)
        == meta["answer"]
    )
    assert sort.reward(text, meta["answer"], meta) == 1.0
    assert sort.reward(text, meta["answer"][:-1], meta) == 0.0
    assert stop_tokens(model_folder, ()) == (eos,)
    assert stop_tokens(model_folder, (5,)) == (5,)


def test_a_jsonl_file_is_shuffled_each_epoch_and_its_held_out_rows_kept_apart(
    model_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{n:06d}>", "answer": n, "level": 2}) + "\n" for n in range(11))
    )
    problems = PromptSource(
        make_config(model_folder, task="jsonl", path=str(path)), open_tokenizer(model_folder)
    )
    held_out = {prompt_task.meta["row"] for prompt_task in problems.held_out()}
    epochs = [
        [prompt_task.meta["row"] for step in steps for prompt_task in of_step(problems, step)]
        for steps in ((1, 2), (3, 4))
    ]
    for rows in epochs:
        assert sorted({*rows, *held_out}) == list(range(11))
        assert len(rows) == 8
    assert epochs[0] != epochs[1]
    assert of_step(problems, 1)[0].meta.keys() == {"answer", "level", "row"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"answer": "1"}\n', "data.jsonl:1: .*prompt"),
        ("\n", "holds no prompt"),
        ("\nnonsense\n", "data.jsonl:2"),
    ],
)
def test_a_bad_file_is_refused_with_the_line(model_folder: Path, tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        PromptSource(make_config(model_folder, task="jsonl", path=str(path)), open_tokenizer(model_folder))


def test_a_prompt_longer_than_the_context_is_refused_by_name(model_folder: Path) -> None:
    config = make_config(model_folder)
    tight = config.model_copy(update={"model": config.model.model_copy(update={"context_length": 12})})
    with pytest.raises(ConfigError, match=r"prompt 0 has 7 prompt tokens, .* room for 1 to 4"):
        of_step(PromptSource(tight, open_tokenizer(model_folder)), 1)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        open_tokenizer(tmp_path)


def test_prompts_that_the_tokenizer_does_not_know_are_told() -> None:
    tokenizer = sort.tokenizer()
    read = [
        PromptTask(at, text, tuple(tokenizer.encode(text).ids), {}) for at, text in enumerate(("12>", "3+4="))
    ]
    said = unknown_note(tokenizer, read)
    assert "1 of 2 prompts" in said
    assert "3<pad>4<pad>" in said
    assert unknown_note(tokenizer, read[:1]) == ""
    assert unknown_note(smallest.byte_tokenizer(), read) == "", "it has no token for what it does not know"
