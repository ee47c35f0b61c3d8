"""Several answers to one prompt from the real model, through a worker's death as well."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ullage.inference.v1 import inference_pb2 as pb
from ullage.inference.v1 import inference_pb2_grpc
from ullage_common.wire.channels import open_channel

if TYPE_CHECKING:
    Engine = Any

PROMPT = [504, 1296, 3995, 4199, 282, 7158, 359]  # "The three largest cities of Italy are"
OUTPUT_TOKENS = 12
WIDTH = 4
STOPS = [30, 28]
"""The full stop and the comma: hypotheses end at different lengths."""


def ask(samples: pb.Samples, **stop: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT),
        sampling=pb.SamplingParams(temperature=0.9, seed=11),
        stop=pb.StopConditions(max_tokens=OUTPUT_TOKENS, ignore_eos=True, **stop),
        output=pb.OutputOptions(return_token_ids=True, top_logprobs=0),
        samples=samples,
    )


MANY = ask(pb.Samples(n=4))
RANKED = ask(pb.Samples(n=2, best_of=4))
SEARCH = ask(pb.Samples(n=WIDTH, beam=pb.BeamSearch(width=WIDTH)), stop_token_ids=STOPS)


class Answers:
    """Tokens and log-probabilities by sample, and the last message."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.finished = pb.Finished()

    def take(self, response: pb.GenerateResponse) -> None:
        delta = response.delta
        if response.HasField("delta"):
            self.tokens.setdefault(delta.sample, []).extend(delta.token_ids)
            found = [entry.logprob for entry in delta.logprobs]
            self.logprobs.setdefault(delta.sample, []).extend(found)
        self.finished = response.finished

    @property
    def count(self) -> int:
        return sum(len(tokens) for tokens in self.tokens.values())

    def mean(self, sample: int) -> float:
        return sum(self.logprobs[sample]) / len(self.logprobs[sample])


async def generate(
    engine: "Engine",
    request: pb.GenerateRequest,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Answers:
    answers = Answers()
    async with open_channel(engine.target) as channel:
        async for response in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
            answers.take(response)
            on_tokens(answers.count)
    return answers


def check(many: Answers, ranked: Answers, search: Answers) -> None:
    assert len({tuple(tokens) for tokens in many.tokens.values()}) == 4
    assert many.finished.usage.completion_tokens == 4 * OUTPUT_TOKENS
    best = sorted(range(4), key=many.mean, reverse=True)
    assert [ranked.tokens[rank] for rank in (0, 1)] == [many.tokens[i] for i in best[:2]]
    means = [search.mean(rank) for rank in range(WIDTH)]
    assert means == sorted(means, reverse=True)
    assert len({len(tokens) for tokens in search.tokens.values()}) > 1
    for tokens in search.tokens.values():
        assert tokens[-1] in STOPS or len(tokens) == OUTPUT_TOKENS
        assert not set(tokens[:-1]) & set(STOPS)


def test_samples_ranks_and_searches_agree_and_survive_a_killed_worker(engine: "Engine") -> None:
    killed: list[int] = []

    def strike(count: int) -> None:
        if count >= 16 and not killed:
            killed.append(engine.kill_worker())

    async def scenario() -> None:
        wanted = await asyncio.gather(
            *(generate(engine, request) for request in (MANY, RANKED, SEARCH))
        )
        check(*wanted)
        got = await asyncio.gather(
            generate(engine, MANY, strike), generate(engine, RANKED), generate(engine, SEARCH)
        )
        assert [each.tokens for each in got] == [each.tokens for each in wanted]
        assert got[0].finished.resumes == 1

    asyncio.run(scenario())
    assert killed
