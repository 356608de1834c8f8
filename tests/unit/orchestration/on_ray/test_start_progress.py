"""What a start says of its processes."""

from gtpo_megatron.orchestration.on_ray.start_progress import counted

NAMES = ["rank 0", "rank 1", "rollout engine", "reward process"]


def test_each_answer_is_counted_with_its_kind():
    told = []
    answered = counted("loading", NAMES, lambda *words: told.append(words))
    for name in ("rank 1", "reward process", "rank 0", "rollout engine"):
        answered(name)
    assert {doing for doing, _ in told} == {"loading"}
    assert [how_far for _, how_far in told] == [
        "ranks 0 of 2 · engines 0 of 1 · graders 0 of 1",
        "ranks 1 of 2 · engines 0 of 1 · graders 0 of 1",
        "ranks 1 of 2 · engines 0 of 1 · graders 1 of 1",
        "ranks 2 of 2 · engines 0 of 1 · graders 1 of 1",
        "ranks 2 of 2 · engines 1 of 1 · graders 1 of 1",
    ]
    assert counted("loading", NAMES, None) is None
