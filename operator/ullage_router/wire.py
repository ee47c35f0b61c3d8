"""What admission and an engine are told of a request, and what its acceptance is told as."""

from ullage.inference.v1 import inference_pb2
from ullage_router.admission import Grant, Wish
from ullage_router.answer import Call
from ullage_router.canary import Side
from ullage_router.prompts import Prompt


def make_wish(call: Call, prompt: Prompt, side: Side = Side.STABLE, is_trial: bool = False) -> Wish:
    """What admission has to know of a request."""
    return Wish(
        prompt=prompt,
        asked_tokens=asked_tokens(call.request),
        samples=num_samples(call.request.samples),
        max_tokens=call.visit.rules.max_tokens,
        priority=call.request.priority,
        session=call.request.session_id,
        deadline=call.deadline,
        tenant=call.visit.tenant,
        weight=call.visit.rules.weight,
        side=side,
        is_trial=is_trial,
    )


def asked_tokens(request: inference_pb2.GenerateRequest) -> int | None:
    """max_tokens of a request; None when it names none."""
    return request.stop.max_tokens if request.stop.HasField("max_tokens") else None


def num_samples(samples: inference_pb2.Samples) -> int:
    """Answers that the engine generates, of which fewer may be returned."""
    return max(1, samples.n, samples.best_of, samples.beam.width)


def engine_request(call: Call, grant: Grant) -> inference_pb2.GenerateRequest:
    """The request as the engine gets it: token ids, and the limits granted."""
    request = inference_pb2.GenerateRequest(
        request_id=call.record.request_id,
        model=call.request.model,
        token_ids=inference_pb2.TokenIds(ids=grant.prompt.token_ids),
        sampling=call.request.sampling,
        stop=call.request.stop,
        session_id=call.visit.session(call.request.session_id),
        priority=call.request.priority,
        output=call.request.output,
        samples=call.request.samples,
        grammar=call.request.grammar if call.request.HasField("grammar") else None,
    )
    request.stop.max_tokens = grant.max_tokens
    request.stop.min_tokens = min(request.stop.min_tokens, grant.max_tokens)
    request.output.echo = False  # the router has the prompt's text and prepends it itself
    grant.prompt.tool_use.ask(request)
    return request


def fill_accepted(
    accepted: inference_pb2.Accepted, told: inference_pb2.Accepted, call: Call, grant: Grant
) -> None:
    """Completes what the engine told by what the router decided."""
    record = call.record
    accepted.CopyFrom(told)
    accepted.request_id = record.request_id
    accepted.engine = record.engine
    accepted.prompt_tokens = len(grant.prompt.token_ids)
    accepted.predicted_bytes = record.predicted_bytes or 0
    accepted.max_tokens = min(grant.max_tokens, told.max_tokens or grant.max_tokens)
    accepted.action = record.action
    accepted.route = record.route
    del accepted.degraded[:], accepted.prompt_token_ids[:], accepted.trail[:]
    accepted.model, accepted.revision = record.model, record.revision
    accepted.degraded.extend(record.degraded)
    accepted.trail.extend(record.trail)
    if call.request.output.return_token_ids:
        accepted.prompt_token_ids.extend(grant.prompt.token_ids)
