"""Prompts are distinct, disjoint, bounded and tokenized; everything else is an error that says what to change."""

import json
import logging

import pytest

from moerl.config.schema import Task
from moerl.errors import TaskError
from moerl.rollout.tasks import TaskData, load_task

COMPACT = {"strip_question": r"^.*: |\s", "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def load(task: Task, folder, limit: int = 16, seed: int = 1) -> TaskData:
    return load_task(task, folder, max_prompt_tokens=limit, seed=seed)


def jsonl(tmp_path, rows) -> str:
    path = tmp_path / "task.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def test_chain_sum_in_one_character_tokens(tiny_folder):
    data = load(Task(**COMPACT, prompts=50, heldout_prompts=20), tiny_folder)
    assert (len(data.train), len(data.heldout), data.stop_token_ids) == (50, 20, (2,))
    for prompt in data.train + data.heldout:
        left, operator, right = prompt.text[0], prompt.text[1], prompt.text[2]
        assert int(prompt.answer) == (int(left) + int(right) if operator == "+" else int(left) - int(right))
        assert prompt.tokens == [{"+": 13, "-": 14, "=": 15}[c] if c in "+-=" else 3 + int(c) for c in prompt.text]


def test_prompts_are_distinct_and_heldout_is_disjoint(tiny_folder):
    data = load(Task(**COMPACT, prompts=150, heldout_prompts=40), tiny_folder)
    texts = [prompt.text for prompt in data.train + data.heldout]
    ids = [prompt.id for prompt in data.train + data.heldout]
    assert len(set(texts)) == len(set(ids)) == 190


def test_the_seed_decides(tiny_folder):
    task = Task(**COMPACT, prompts=30, heldout_prompts=5)
    assert load(task, tiny_folder) == load(task, tiny_folder) != load(task, tiny_folder, seed=2)


def test_a_small_task_trains_on_what_there_is_and_says_so(tiny_folder, caplog):
    with caplog.at_level(logging.WARNING):
        data = load(Task(**COMPACT, prompts=4096, heldout_prompts=20), tiny_folder)
    assert (len(data.train), len(data.heldout)) == (180, 20)
    assert "training on 180 instead of task.prompts = 4096" in caplog.text


def test_bos_and_template(tiny_folder):
    data = load(Task(**COMPACT, prompts=5, heldout_prompts=0, add_bos=True, prompt_template="0+{prompt}"), tiny_folder)
    assert all(prompt.tokens[:3] == [1, 3, 13] and prompt.text.startswith("0+") for prompt in data.train)


def test_jsonl(tiny_folder, tmp_path):
    rows = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(3) for b in range(3)] + ["", {"prompt": "0+0=", "answer": 0}]
    data = load(Task(kind="jsonl", path=jsonl(tmp_path, rows), heldout_prompts=2, prompts=100), tiny_folder)
    assert (len(data.train), len(data.heldout)) == (7, 2)
    assert all(eval(prompt.text[:-1]) == int(prompt.answer) for prompt in data.train)


@pytest.mark.parametrize(
    "row", ["not json", '{"prompt": "1+1="}', '{"prompt": 3, "answer": 1}', '["1+1=", 2]', '{"prompt": "1=", "answer": null}']
)
def test_a_bad_jsonl_line_is_named(tiny_folder, tmp_path, row):
    path = jsonl(tmp_path, [{"prompt": "1+1=", "answer": "2"}, row])
    with pytest.raises(TaskError, match="task.jsonl:2: "):
        load(Task(kind="jsonl", path=path, heldout_prompts=0), tiny_folder)


def test_an_empty_prompt_set(tiny_folder, tmp_path):
    with pytest.raises(TaskError, match="has no prompts"):
        load(Task(kind="jsonl", path=jsonl(tmp_path, []), heldout_prompts=0), tiny_folder)


def test_heldout_leaves_nothing_to_train_on(tiny_folder, tmp_path):
    path = jsonl(tmp_path, [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}])
    with pytest.raises(TaskError, match="2 distinct prompts.*heldout_prompts = 2.*none are left"):
        load(Task(kind="jsonl", path=path, heldout_prompts=2), tiny_folder)


def test_a_missing_file(tiny_folder):
    with pytest.raises(TaskError, match="'/nowhere.jsonl' is not a file"):
        load(Task(kind="jsonl", path="/nowhere.jsonl"), tiny_folder)


def test_too_long_prompts_are_counted_and_shown(tiny_folder, tmp_path):
    path = jsonl(tmp_path, [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1+1+1=", "answer": "4"}])
    with pytest.raises(
        TaskError, match=r"1 of 2 prompts are longer than rollout.max_prompt_tokens = 6; the first has 8 tokens: '1\+1\+1\+1='"
    ):
        load(Task(kind="jsonl", path=path, heldout_prompts=0), tiny_folder, limit=6)


def test_a_character_without_a_token_is_named(tiny_folder, tmp_path):
    with pytest.raises(TaskError, match="no token for '\\*' in prompt '2\\*3='"):
        load(Task(kind="jsonl", path=jsonl(tmp_path, [{"prompt": "2*3=", "answer": "6"}]), heldout_prompts=0), tiny_folder)


def test_a_question_that_is_stripped_to_nothing(tiny_folder, tmp_path):
    path = jsonl(tmp_path, [{"prompt": "1+1=", "answer": "2"}])
    with pytest.raises(TaskError, match="a prompt of the task is empty"):
        load(Task(kind="jsonl", path=path, heldout_prompts=0, strip_question=".*"), tiny_folder)


def test_a_tokenizer_with_more_tokens_than_the_embedding(tiny_folder, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_text((tiny_folder / name).read_text())
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 15}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TaskError, match="has token 15, but the model's embedding has 15 rows"):
        load(Task(kind="jsonl", path=jsonl(tmp_path, [{"prompt": "1=", "answer": "1"}]), heldout_prompts=0), folder)


def test_an_unknown_dataset_suggests_the_nearest(tiny_folder):
    with pytest.raises(TaskError, match="no dataset 'chain_sun'; did you mean 'chain_sum'"):
        load(Task(name="chain_sun"), tiny_folder)


@pytest.mark.parametrize(
    ("options", "message"), [({"min_term": 2}, "min_term"), ({"min_terms": 9}, "max_terms"), ({"seed": 4}, "run.seed")]
)
def test_dataset_options_are_checked(tiny_folder, options, message):
    with pytest.raises(TaskError, match=message):
        load(Task(options=options), tiny_folder)


def test_a_template_without_a_place_for_the_question(tiny_folder):
    with pytest.raises(TaskError, match="does not contain"):
        load(Task(prompt_template="answer:"), tiny_folder)


def test_a_folder_without_tokenizer(tiny_folder, tmp_path):
    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())
    with pytest.raises(TaskError, match="no tokenizer.json"):
        load(Task(**COMPACT, prompts=3, heldout_prompts=0), tmp_path)
