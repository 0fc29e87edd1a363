"""Which slots are free, from what groups hold and from what engines say."""

from hypothesis import given, settings
from hypothesis import strategies as st

from moerl.cluster.slots import SETTLE_S, Slots


def test_groups_go_to_the_engine_with_the_least_to_do_while_they_fit() -> None:
    slots, chosen = Slots(6), []
    for group in range(7):
        engine = slots.room(2, 2)
        chosen.append(engine)
        if engine is not None:
            slots.occupy(group, engine, 2, 0.0)
    assert chosen == [0, 1, 0, 1, 0, 1, None]
    assert slots.load() == {0: 6, 1: 6}
    slots.release(3)
    slots.release(3)
    assert slots.room(2, 2) == 1
    assert (3 in slots, 4 in slots, len(slots)) == (False, True, 5)


def test_an_engine_smaller_than_a_group_runs_one_at_a_time() -> None:
    slots = Slots(4)
    assert slots.room(1, 8) == 0
    slots.occupy(0, 0, 8, 0.0)
    assert slots.room(1, 8) is None


def test_completions_that_ended_free_their_slots_once_an_engine_says_so() -> None:
    slots = Slots(8)
    slots.occupy(0, 0, 8, 0.0)
    assert slots.room(1, 4) is None
    slots.looked(0, slots.settled(SETTLE_S)[0], 3)
    assert slots.load() == {0: 3}
    assert slots.room(1, 4) == 0


def test_what_may_not_have_reached_an_engine_yet_counts_in_full() -> None:
    slots = Slots(16)
    slots.occupy(0, 0, 8, 0.0)
    slots.occupy(1, 0, 8, 5.0)
    slots.looked(0, slots.settled(5.0 + SETTLE_S / 2)[0], 2)  # of group 0; nothing of group 1 is there
    assert slots.load() == {0: 8 + 2}


events = st.lists(st.tuples(st.sampled_from(["occupy", "release", "look"]), st.integers(0, 3), st.integers(0, 8)), max_size=40)


@given(events)
@settings(deadline=None)
def test_the_load_is_never_below_what_looks_leave_and_never_above_what_was_given(moves) -> None:
    slots, held = Slots(16), {}
    for now_s, (move, engine, number) in enumerate(moves):
        if move == "occupy" and number not in held:
            held[number] = engine
            slots.occupy(number, engine, 4, float(now_s))
        elif move == "release":
            held.pop(number, None)
            slots.release(number)
        elif move == "look":
            slots.looked(engine, slots.settled(float(now_s))[engine], number)
            # a group that was given to it within the last second may not be among those
            assert slots.load()[engine] >= min(number, 4 * list(held.values()).count(engine))
        given = {one: 4 * list(held.values()).count(one) for one in range(4)}
        assert all(0 <= slots.load()[one] <= given[one] for one in range(4))
