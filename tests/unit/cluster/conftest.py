"""One small local Ray for all tests here, with a module of reward functions that its workers can import."""

import textwrap

import pytest

from moerl.cluster.runtime import ray_running
from moerl.rollout.sample import Group, Sample

REWARDS = textwrap.dedent(
    """
    import os, time

    def length(completion, answer, finish_reason):
        return float(len(completion))

    def raising(completion, answer, finish_reason):
        if completion == "3":
            raise ArithmeticError("cannot score three")
        return 1.0

    def hanging(completion, answer, finish_reason):
        if completion == "3":
            time.sleep(600)
        return 1.0

    def dying(completion, answer, finish_reason):
        os._exit(7)

    def broken(completion, answer, finish_reason):
        raise ArithmeticError("cannot score anything")

    def once(completion, answer, finish_reason):
        # `answer` names a file that says whether this is the first time.
        if not os.path.exists(answer):
            open(answer, "w").close()
            raise ArithmeticError("not yet")
        return 1.0

    def process(completion, answer, finish_reason):
        return float(os.getpid())
    """
)


@pytest.fixture(scope="session")
def local_ray(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "cluster_test_rewards.py").write_text(REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with ray_running(None) as runtime:
            yield runtime


@pytest.fixture
def make_groups():
    def make(texts, *, size=2):
        return [
            Group(
                prompt_id=10 + i,
                answer=text,
                samples=[Sample(10 + i, k, [1], [2, 3], b"\0" * 8, b"trace", [(0, 0, 2)], text, "stop") for k in range(size)],
            )
            for i, text in enumerate(texts)
        ]

    return make
