"""Replies become samples only if tokens, logprobs, routes and versions prove each other."""

import base64
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from moerl.errors import RolloutError
from moerl.rollout.check import extend, row_runs, to_sample, to_trace
from moerl.rollout.sample import Prompt, Sample
from moerl.routing.codec import Codec
from moerl.routing.group import codec_of
from moerl.routing.trace import Layout, VersionRun
from tests.unit.rollout.fakes import LAYERS, LAYOUT, encode, make_reply, make_routes

RESPONSE = [10, 4, 2]
ROWS = 4 + len(RESPONSE) - 1


def convert(reply: dict, prompt: Prompt, layout: Layout = LAYOUT, **options: object) -> Sample:
    return to_sample(reply, prompt, 1, layout, **({"layers": LAYERS, "routes": True} | options))


def broken(prompt: Prompt, **meta: object) -> dict:
    reply = make_reply(prompt.tokens, RESPONSE)
    reply["meta_info"] |= meta
    return reply


def test_a_good_reply_keeps_every_value(prompt):
    sample = convert(make_reply(prompt.tokens, RESPONSE), prompt, version=3, engine=2)
    trace = sample.load_trace()
    assert sample.tokens.tolist() == prompt.tokens + RESPONSE
    assert sample.logprob_array.tolist() == [-0.5, -0.75, -1.0]
    assert np.array_equal(trace.ids, make_routes(ROWS)[:, 1:])
    assert trace.ids.dtype == np.uint8
    assert trace.layout == LAYOUT
    assert trace.versions == (VersionRun(3, 0, ROWS),)
    assert (sample.versions, sample.finish_reason, sample.text, sample.index, sample.engine) == ([(3, 0, 3)], "stop", "7", 1, 2)


def test_models_with_more_than_256_experts_get_wide_ids(prompt):
    layout = Layout((1, 2), 300, 2)
    ids = make_routes(ROWS)
    ids[2, 1] = [299, 0]
    sample = convert(broken(prompt, routed_experts=encode(ids)), prompt, layout)
    assert sample.load_trace().ids.dtype == np.uint16
    assert sample.load_trace().ids[2, 0].tolist() == [299, 0]


def test_without_routes_the_trace_is_empty(prompt):
    reply = make_reply(prompt.tokens, RESPONSE)
    del reply["meta_info"]["routed_experts"]
    assert convert(reply, prompt, routes=False).trace == b""


def test_version_runs_move_from_tokens_to_the_rows_they_were_sampled_from(prompt):
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    sample = convert(broken(prompt, weight_versions=spans), prompt)
    assert sample.versions == [(3, 0, 1), (4, 1, 3)]
    # Four prompt tokens: row 3 gave the first response token, row 4 the second.
    assert sample.load_trace().versions == (VersionRun(3, 0, 4), VersionRun(4, 4, 6))


def test_equal_neighbouring_versions_are_one_run(prompt):
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 3}]
    assert convert(broken(prompt, weight_versions=spans), prompt).versions == [(3, 0, 3)]


def test_row_runs_of_a_one_token_prompt():
    assert row_runs([(5, 0, 2), (6, 2, 3)], 1) == (VersionRun(5, 0, 2), VersionRun(6, 2, 3))


def test_engine_started_without_the_routes_flag(prompt):
    reply = make_reply(prompt.tokens, RESPONSE)
    del reply["meta_info"]["routed_experts"]
    with pytest.raises(RolloutError, match="enable_return_routed_experts"):
        convert(reply, prompt)


def test_aborted_while_queued_does_not_blame_the_flag(prompt):
    reply = broken(prompt, finish_reason={"type": "abort"}, routed_experts=None)
    with pytest.raises(RolloutError, match="aborted while it waited"):
        convert(reply, prompt)


@pytest.mark.parametrize(("rows", "got"), [(ROWS - 1, "got 5 rows"), (ROWS + 1, "got 7 rows"), (0, "got 0 rows")])
def test_missing_and_surplus_rows(prompt, rows, got):
    with pytest.raises(RolloutError, match=f"expected {ROWS} rows.*{got}"):
        convert(broken(prompt, routed_experts=encode(make_routes(rows))), prompt)


def test_routes_without_the_dense_layer(prompt):
    with pytest.raises(RolloutError, match=f"{ROWS} rows of 2 layers: the dense layers were left out"):
        convert(broken(prompt, routed_experts=encode(make_routes(ROWS)[:, 1:])), prompt)


def test_routes_cut_within_an_id(prompt):
    text = base64.b64encode(make_routes(ROWS).tobytes()[:-3]).decode()
    with pytest.raises(RolloutError, match="no whole number of int32"):
        convert(broken(prompt, routed_experts=text), prompt)


@pytest.mark.parametrize("codec", [Codec("packed"), Codec("set"), Codec("set", False, 4, 1)])
def test_the_trace_is_stored_as_asked(prompt, codec):
    sample = convert(make_reply(prompt.tokens, RESPONSE), prompt, codec=codec)
    assert codec_of(sample.trace).name == codec.name
    assert np.array_equal(np.sort(sample.load_trace().ids), np.sort(make_routes(ROWS)[:, 1:]))


def test_routes_cut_within_a_row(prompt):
    with pytest.raises(RolloutError, match="no whole number of rows"):
        convert(broken(prompt, routed_experts=encode(make_routes(ROWS).reshape(-1)[:-1])), prompt)


def test_routes_that_are_not_base64(prompt):
    with pytest.raises(RolloutError, match="not base64"):
        convert(broken(prompt, routed_experts="@@@@"), prompt)


def test_a_zero_row(prompt):
    ids = make_routes(ROWS)
    ids[3, 1:] = 0
    with pytest.raises(RolloutError, match="1 rows are all zero .first: row 3"):
        convert(broken(prompt, routed_experts=encode(ids)), prompt)


def test_a_layer_without_any_routes(prompt):
    ids = make_routes(ROWS)
    ids[:, 2] = 0
    with pytest.raises(RolloutError, match="layers 2 are zero"):
        convert(broken(prompt, routed_experts=encode(ids)), prompt)


def test_a_duplicated_expert(prompt):
    ids = make_routes(ROWS)
    ids[4, 2] = [5, 5]
    with pytest.raises(RolloutError, match=r"must be distinct, got \[5, 5\] at row 4, layer 2"):
        convert(broken(prompt, routed_experts=encode(ids)), prompt)


@pytest.mark.parametrize("bad", [8, -1, 2**31 - 1])
def test_an_expert_out_of_range(prompt, bad):
    ids = make_routes(ROWS)
    ids[1, 1, 0] = bad
    with pytest.raises(RolloutError, match=r"0\.\.7.*row 1, layer 1"):
        convert(broken(prompt, routed_experts=encode(ids)), prompt)


def test_routes_in_a_dense_layer(prompt):
    ids = make_routes(ROWS)
    ids[2, 0, 1] = 3
    with pytest.raises(RolloutError, match="layer 0 is dense"):
        convert(broken(prompt, routed_experts=encode(ids)), prompt)


def test_another_version_than_promised(prompt):
    with pytest.raises(RolloutError, match=r"serve weight version 4, but sampled with \[3\]"):
        convert(make_reply(prompt.tokens, RESPONSE), prompt, version=4)


@pytest.mark.parametrize("spans", [[], [(0, 2)], [(1, 3)], [(0, 2), (1, 3)], [(0, 2), (2, 4)], [(0, 0), (0, 3)]])
def test_version_spans_that_do_not_cover_the_response_once(prompt, spans):
    broken_spans = [{"version": "3", "start": start, "end": end} for start, end in spans]
    with pytest.raises(RolloutError, match="do not cover the 3 response tokens once"):
        convert(broken(prompt, weight_versions=broken_spans), prompt)


def test_a_version_that_is_no_number(prompt):
    with pytest.raises(RolloutError, match="names its weights 'default'"):
        convert(make_reply(prompt.tokens, RESPONSE, version="default"), prompt)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), None, 0.5])
def test_logprobs_that_are_no_logprobs(prompt, value):
    with pytest.raises(RolloutError, match="response token 1 is not a finite number"):
        convert(broken(prompt, output_token_logprobs=[[-1.0, 10, None], [value, 4, None], [-1.0, 2, None]]), prompt)


@pytest.mark.parametrize("pairs", [[[-1.0, 10, None]], [[-1.0, 10, None], [-1.0, 5, None], [-1.0, 2, None]]])
def test_logprobs_of_other_tokens(prompt, pairs):
    with pytest.raises(RolloutError, match="logprobs are of other tokens"):
        convert(broken(prompt, output_token_logprobs=pairs), prompt)


def test_an_empty_response(prompt):
    reply = make_reply(prompt.tokens, [])
    with pytest.raises(RolloutError, match="returned no tokens"):
        convert(reply, prompt)


def test_another_prompt_length_than_sent(prompt):
    with pytest.raises(RolloutError, match="saw 5 prompt tokens, 4 were sent"):
        convert(broken(prompt, prompt_tokens=5), prompt)


def test_a_reply_without_the_expected_fields(prompt):
    with pytest.raises(RolloutError, match="lacks 'meta_info'"):
        convert({"text": ""}, prompt)


ADDED = [4, 11, 2]


def second(sent: list[int], rows: slice, **meta: object) -> dict:
    """The reply to a request with all tokens so far, of whose routes only some rows come back."""
    reply = make_reply(sent, ADDED, version="4")
    reply["meta_info"] |= {"routed_experts": encode(make_routes(len(sent) + len(ADDED) - 1)[rows]), **meta}
    return reply


@pytest.mark.parametrize("user", [[], [9, 3]], ids=["resumed", "new turn"])
def test_a_delta_appended_to_earlier_rows_is_the_whole_trace(prompt, user):
    sent = prompt.tokens + RESPONSE + user
    first = to_trace(make_reply(prompt.tokens, RESPONSE), prompt.tokens, LAYOUT, layers=LAYERS)
    delta = to_trace(second(sent, slice(ROWS, None)), sent, LAYOUT, layers=LAYERS, start=ROWS, version=4)
    assert (first.start, first.rows, delta.start) == (0, ROWS, ROWS)
    whole = first.append(delta).check_tokens(np.array(sent + ADDED))
    assert np.array_equal(delta.ids, make_routes(whole.rows)[ROWS:, 1:])
    assert np.array_equal(whole.ids[:ROWS], first.ids)
    assert whole.versions == (VersionRun(3, 0, ROWS), VersionRun(4, ROWS, whole.rows))


def test_a_delta_keeps_the_versions_of_its_own_rows(prompt):
    sent = prompt.tokens + RESPONSE + [9, 3]
    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}]
    delta = to_trace(second(sent, slice(ROWS, None), weight_versions=spans), sent, LAYOUT, layers=LAYERS, start=ROWS)
    # rows 6, 7 and 8 were prefilled, row 8 gave the first added token, row 9 the second, row 10 the third
    assert delta.versions == (VersionRun(4, 0, 4), VersionRun(5, 4, 5))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (slice(0, None), "rows from 6 on: expected 5 rows .*got 11 rows: 6 too many; is routed_experts_start_len ignored"),
        (slice(ROWS + 1, None), "expected 5 rows .*got 4 rows: 1 missing"),
    ],
)
def test_a_delta_of_other_rows_than_asked_for(prompt, rows, words):
    sent = prompt.tokens + RESPONSE + [9, 3]
    with pytest.raises(RolloutError, match=words):
        to_trace(second(sent, rows), sent, LAYOUT, layers=LAYERS, start=ROWS)


def test_an_error_in_a_delta_names_the_row_of_the_sequence(prompt):
    sent = prompt.tokens + RESPONSE
    ids = make_routes(len(sent) + len(ADDED) - 1)
    ids[ROWS + 1, 2] = [5, 5]
    with pytest.raises(RolloutError, match=r"talk 3: .*got \[5, 5\] at row 7, layer 2"):
        reply = second(sent, slice(0), routed_experts=encode(ids[ROWS:]))
        to_trace(reply, sent, LAYOUT, layers=LAYERS, start=ROWS, name="talk 3")


@pytest.mark.parametrize("start", [-1, 7])
def test_a_start_that_loses_the_row_of_a_sampled_token(prompt, start):
    sent = prompt.tokens + RESPONSE
    with pytest.raises(RolloutError, match=r"rows from -?\d on leave out .* ask for rows from 0\.\.6 on"):
        to_trace(second(sent, slice(start, None)), sent, LAYOUT, layers=LAYERS, start=start)


def interrupted(prompt: Prompt, **options: object) -> Sample:
    return convert(broken(prompt, finish_reason={"type": "abort"}), prompt, **options)


@pytest.mark.parametrize("codec", [Codec("narrow"), Codec("packed")])
def test_an_interrupted_sample_is_extended_by_what_came_later(prompt, codec):
    before = interrupted(prompt, codec=codec, engine=2)
    whole = extend(before, second(before.tokens.tolist(), slice(ROWS, None)), LAYOUT, layers=LAYERS, version=4)
    assert whole.response_tokens == RESPONSE + ADDED
    assert whole.logprob_array.tolist() == [-0.5, -0.75, -1.0] * 2
    assert (whole.versions, whole.finish_reason, whole.text) == ([(3, 0, 3), (4, 3, 6)], "stop", "77")
    assert (whole.prompt_id, whole.index, whole.engine, codec_of(whole.trace)) == (prompt.id, 1, 2, codec)
    trace = whole.load_trace()
    assert np.array_equal(trace.ids[:ROWS], before.load_trace().ids)
    assert np.array_equal(trace.ids[ROWS:], make_routes(trace.rows)[ROWS:, 1:])
    assert trace.versions == (VersionRun(3, 0, ROWS), VersionRun(4, ROWS, ROWS + 3))
    assert (before.response_tokens, before.load_trace().rows) == (RESPONSE, ROWS)


def test_one_version_over_an_interruption_is_one_run(prompt):
    before = interrupted(prompt)
    spans = [{"version": "3", "start": 0, "end": 3}]
    whole = extend(before, second(before.tokens.tolist(), slice(ROWS, None), weight_versions=spans), LAYOUT, layers=LAYERS)
    assert whole.versions == [(3, 0, 6)]
    assert whole.load_trace().versions == (VersionRun(3, 0, ROWS + 3),)


def test_a_sample_without_routes_gets_none(prompt):
    before = interrupted(prompt, routes=False)
    whole = extend(before, second(before.tokens.tolist(), slice(ROWS, None), routed_experts=None), LAYOUT, layers=LAYERS)
    assert (whole.trace, whole.response_tokens) == (b"", RESPONSE + ADDED)


def test_a_resumed_request_that_returns_all_rows_again(prompt):
    before = interrupted(prompt)
    with pytest.raises(RolloutError, match=r"sample 1 of prompt 7, rows from 6 on: .*6 too many"):
        extend(before, second(before.tokens.tolist(), slice(None)), LAYOUT, layers=LAYERS)


def test_a_resumed_request_that_began_elsewhere(prompt):
    with pytest.raises(RolloutError, match="saw 4 prompt tokens, 7 were sent"):
        extend(interrupted(prompt), make_reply(prompt.tokens, ADDED), LAYOUT, layers=LAYERS)


def test_nothing_follows_a_stop_token(prompt):
    whole = convert(make_reply(prompt.tokens, RESPONSE), prompt)
    with pytest.raises(RolloutError, match="ended with its stop token"):
        extend(whole, second(whole.tokens.tolist(), slice(ROWS, None)), LAYOUT, layers=LAYERS)


def masked(reply: dict, rows: list[list[int]], values: list[float]) -> dict:
    """The reply of an engine that cut its distribution to these tokens."""
    reply["meta_info"] |= {"output_token_sampling_mask": rows, "output_token_sampling_logprobs": values}
    return reply


KEPT, WITHIN = [[10, 3], [9, 4, 5], [2]], [-0.5, -0.25, 0.0]


def rows_of(sample: Sample) -> list[list[int]]:
    mask = sample.load_mask()
    return [mask.ids[start:stop].tolist() for start, stop in pairwise(mask.offsets)]


def test_under_truncation_a_sample_holds_what_was_kept_and_logprobs_within_it(prompt):
    sample = convert(masked(make_reply(prompt.tokens, RESPONSE), KEPT, WITHIN), prompt, vocab=16)
    assert rows_of(sample) == [[3, 10], [4, 5, 9], [2]]
    assert sample.logprob_array.tolist() == WITHIN
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=Sample) == sample


def test_without_truncation_a_sample_carries_no_mask(prompt):
    sample = convert(make_reply(prompt.tokens, RESPONSE), prompt)
    assert sample.mask == b""
    assert rows_of(sample) == [[], [], []]


@pytest.mark.parametrize(
    ("rows", "values", "words"),
    [
        ([[10, 3], [9, 5], [2]], WITHIN, "row 1 does not hold token 4, which was sampled there"),
        ([[10, 16], [4], [2]], WITHIN, "row 0 names token 16 of a vocabulary of 16"),
        ([[10, 3, 3], [4], [2]], WITHIN, "row 0 is not ascending, or names a token twice"),
        ([[10], [4]], WITHIN, "each of 3 response tokens, got 3 logprobs and 2 rows"),
        (KEPT, WITHIN[:2], "each of 3 response tokens, got 2 logprobs and 3 rows"),
        ([[10], [], [2]], WITHIN, "kept no token at all where it sampled response token 1"),
        (KEPT, [-0.5, float("nan"), 0.0], "logprob nan of response token 1"),
    ],
)
def test_a_mask_that_is_not_that_of_its_tokens(prompt, rows, values, words):
    with pytest.raises(RolloutError, match=words):
        convert(masked(make_reply(prompt.tokens, RESPONSE), rows, values), prompt, vocab=16)


def test_a_truncated_reply_without_its_mask(prompt):
    with pytest.raises(RolloutError, match=r"by top-p or top-k, but its reply lacks 'output_token_sampling_logprobs'"):
        convert(make_reply(prompt.tokens, RESPONSE), prompt, vocab=16)


@pytest.mark.parametrize(("before", "after"), [(True, True), (False, True), (True, False), (False, False)])
def test_extending_appends_rows_and_those_of_uncut_parts_are_unrestricted(prompt, before, after):
    first = make_reply(prompt.tokens, RESPONSE)
    first["meta_info"]["finish_reason"] = {"type": "abort"}
    sent = prompt.tokens + RESPONSE
    more = second(sent, slice(ROWS, None))
    one = convert(masked(first, KEPT, WITHIN) if before else first, prompt, vocab=16 if before else None)
    added = masked(more, [[4], [1, 11], [2, 7]], [0.0, -0.5, -0.75]) if after else more
    whole = extend(one, added, LAYOUT, layers=LAYERS, vocab=16 if after else None)
    assert rows_of(whole) == (rows_of(one) if before else [[]] * 3) + ([[4], [1, 11], [2, 7]] if after else [[]] * 3)
    assert bool(whole.mask) == (before or after)
    assert whole.logprob_array[3:].tolist() == ([0.0, -0.5, -0.75] if after else [-0.5, -0.75, -1.0])


def test_a_mask_of_other_tokens_is_refused_when_it_is_loaded(prompt):
    sample = convert(masked(make_reply(prompt.tokens, RESPONSE), KEPT, WITHIN), prompt, vocab=16)
    for tokens in ([10, 4], [10, 6, 2]):
        with pytest.raises(RolloutError, match="sample 1 of prompt 7: the sampling mask"):
            msgspec.structs.replace(sample, response_tokens=tokens).load_mask()
