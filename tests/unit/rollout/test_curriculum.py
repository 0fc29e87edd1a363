from moerl.rollout.curriculum import take
from moerl.rollout.sample import Prompt

PROMPTS = [Prompt(i, str(i), [i], "0") for i in range(7)]


def ids(**where: int) -> list[int]:
    return [prompt.id for prompt in take(PROMPTS, **where)]


def test_an_epoch_visits_every_prompt_once_and_the_next_in_another_order() -> None:
    stream = ids(position=0, count=21, seed=3)
    epochs = [stream[i : i + 7] for i in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_position_continues_the_stream() -> None:
    whole = ids(position=0, count=20, seed=3)
    assert ids(position=0, count=5, seed=3) + ids(position=5, count=15, seed=3) == whole
    assert ids(position=0, count=20, seed=4) != whole
