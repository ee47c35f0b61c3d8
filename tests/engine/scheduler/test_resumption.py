"""What becomes of those who have to go, and of those who come back."""

from typing import Any

import msgspec

from ullage_engine.protocol.messages import Rejected
from ullage_engine.protocol.requests import TokenOutput


def test_an_estimate_too_short_preempts_the_newest_and_all_finish(bench: Any) -> None:
    scheduler = bench.make_scheduler(blocks=12, expected=4)
    for name in "abc":
        assert scheduler.submit(bench.make_request(name, 40, max_tokens=90)) is None
    lengths = {name: len(tokens) for name, tokens in bench.run(scheduler).items()}
    assert lengths == {"a": 90, "b": 90, "c": 90}
    assert scheduler.stats().num_preemptions > 0


def test_the_oldest_is_never_preempted(bench: Any) -> None:
    scheduler = bench.make_scheduler(blocks=12, expected=4)
    for name in "abc":
        scheduler.submit(bench.make_request(name, 40, max_tokens=90))
    preemptions = {}
    while scheduler.has_work:
        for output in bench.step(scheduler):
            preemptions[output.request_id] = output.num_preemptions
    assert preemptions["a"] == 0
    assert sum(preemptions.values()) == scheduler.stats().num_preemptions


def test_a_preempted_sequence_is_recomputed_with_its_output(bench: Any) -> None:
    scheduler = bench.make_scheduler()
    scheduler.submit(bench.make_request("a", 8))
    for token in (3, 4, 5):
        bench.step(scheduler, token)
    assert scheduler.preempt_newest()
    scheduler.check_integrity()
    (chunk,) = scheduler.schedule().chunks
    assert (chunk.start, chunk.token_ids) == (0, [1000 + ord("a")] * 8 + [3, 4, 5])
    assert (chunk.num_prompt_tokens, chunk.sampling is None) == (8, False)


def test_nothing_new_is_admitted_before_what_a_preempted_sequence_is_owed(bench: Any) -> None:
    scheduler = bench.make_scheduler(blocks=12, expected=4)
    for name in "abc":
        scheduler.submit(bench.make_request(name, 40, max_tokens=90))
    while not scheduler.stats().num_preemptions:
        bench.step(scheduler)
    answer = scheduler.submit(bench.make_request("d", 40, max_tokens=90))
    assert isinstance(answer, Rejected)
    assert not answer.never


def test_a_resumed_request_goes_on_where_it_was(bench: Any) -> None:
    scheduler = bench.make_scheduler()
    request = bench.make_request("a", 20, max_tokens=6, output=[3, 4])
    assert scheduler.submit(request) is None
    plan = scheduler.schedule()
    (chunk,) = plan.chunks
    assert (len(chunk.token_ids), chunk.num_prompt_tokens) == (22, 20)
    assert len(scheduler.commit(bench.sample(plan))) == 1
    assert len(bench.run(scheduler)["a"]) == 3


def test_a_resumed_request_with_nothing_left_is_answered_at_once(bench: Any) -> None:
    scheduler = bench.make_scheduler()
    answer = scheduler.submit(bench.make_request("a", 8, max_tokens=2, output=[3, 4]))
    assert answer == TokenOutput(request_id="a", token_ids=[], finish="length")
    assert not scheduler.has_work


def test_resumed_requests_are_never_refused_and_wait_for_memory(bench: Any) -> None:
    scheduler = bench.make_scheduler(blocks=10)
    for number in range(12):
        request = bench.make_request(str(number), 60, max_tokens=20)
        assert scheduler.submit(request, resumed=True) is None
        scheduler.check_integrity()
    assert {len(tokens) for tokens in bench.run(scheduler).values()} == {20}


def test_the_rest_of_an_answer_from_elsewhere_is_refused_where_there_is_no_memory(
    bench: Any,
) -> None:
    scheduler = bench.make_scheduler(blocks=10)
    assert scheduler.submit(bench.make_request("a", 100, max_tokens=32)) is None
    rest = bench.make_request("b", 60, max_tokens=20, output=[3, 4])
    answer = scheduler.submit(rest)
    assert isinstance(answer, Rejected)
    assert not answer.never
    scheduler.check_integrity()
    assert len(bench.run(scheduler)["a"]) == 32
    assert scheduler.submit(rest) is None
    assert len(bench.run(scheduler)["b"]) == 18


def test_answers_that_a_stop_string_ended_teach_the_estimate(bench: Any) -> None:
    scheduler = bench.make_scheduler(expected=256)
    before = scheduler.stats().expected_output_tokens
    for number in range(200):
        assert scheduler.submit(bench.make_request(f"r{number}", 4, max_tokens=100)) is None
        scheduler.commit(bench.sample(scheduler.schedule()))
        scheduler.cancel(f"r{number}", is_answered=number >= 100)
        if number == 99:
            assert scheduler.stats().expected_output_tokens == before
    assert scheduler.stats().expected_output_tokens < before


def test_long_answers_do_not_teach_an_engine_to_refuse_short_prompts_for_good(bench: Any) -> None:
    scheduler = bench.make_scheduler(blocks=16, max_model_len=4096, expected=32)
    for number in range(20):
        request = bench.make_request(f"r{number}", 30, max_tokens=2000)
        assert scheduler.submit(request) is None, number
        while scheduler.has_work:
            scheduler.commit(bench.sample(scheduler.schedule()))
    assert scheduler.stats().expected_output_tokens > 200
    assert (
        scheduler.submit_group([bench.make_request("a", 30, 900), bench.make_request("b", 30, 900)])
        == []
    )
    while scheduler.has_work:
        scheduler.commit(bench.sample(scheduler.schedule()))
    scheduler.check_integrity()


def test_more_samples_than_the_waiting_room_has_places_are_served_alone(bench: Any) -> None:
    scheduler = bench.make_scheduler(max_sequences=1)
    requests = [
        msgspec.structs.replace(bench.make_request("a", 20, 4), request_id=f"a{i}")
        for i in range(9)
    ]
    assert scheduler.submit_group(requests) == []
    late = scheduler.submit_group([bench.make_request("b", 20, 4)])
    assert isinstance(late, Rejected)
    assert not late.never
    while scheduler.has_work:
        scheduler.commit(bench.sample(scheduler.schedule()))
