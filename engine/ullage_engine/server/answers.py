"""The messages of an answer, built from what the engine knows; nothing here decides anything."""

from collections.abc import Iterator

import msgspec

from ullage.inference.v1 import inference_pb2 as pb
from ullage_engine.detokenizer import TokenBytes
from ullage_engine.messages import Profile, TokenLogprobs
from ullage_engine.server.board import Board
from ullage_engine.server.job import Job
from ullage_engine.server.journal import Update
from ullage_engine.server.samples import SampleGroup
from ullage_engine.tokenizer import ModelTokenizer

_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "timeout": pb.FINISH_REASON_TIMEOUT,
    "cancelled": pb.FINISH_REASON_CANCELLED,
}


def accepted(job: Job, engine: str, predicted_bytes: int) -> pb.GenerateResponse:
    request = job.request
    message = pb.Accepted(
        request_id=job.client_id,
        engine=engine,
        prompt_tokens=request.num_prompt_tokens,
        predicted_bytes=predicted_bytes,
        max_tokens=request.max_tokens,
        degraded=job.degraded,
        seed=request.sampling.seed,
        prompt_token_ids=request.token_ids if job.return_token_ids else (),
    )
    return pb.GenerateResponse(accepted=message)


def delta(update: Update, job: Job, token_bytes: TokenBytes) -> pb.GenerateResponse:
    message = pb.Delta(
        text=update.text,
        num_tokens=len(update.token_ids),
        token_ids=update.token_ids if job.return_token_ids else (),
        logprobs=_logprobs(update, token_bytes),
        sample=update.sample,
    )
    return pb.GenerateResponse(delta=message)


def sample_finished(update: Update) -> pb.GenerateResponse:
    """The end of one of several samples."""
    assert update.finish is not None, "a sample that goes on"
    message = pb.SampleFinished(
        sample=update.sample,
        reason=_REASONS[update.finish.reason],
        stop_string=update.finish.stop_string,
    )
    return pb.GenerateResponse(sample_finished=message)


def finished(group: SampleGroup, board: Board) -> pb.GenerateResponse:
    finish = group.finish
    message = pb.Finished(
        reason=_REASONS[finish.reason],
        usage=pb.Usage(
            prompt_tokens=group.job.request.num_prompt_tokens,
            completion_tokens=group.num_output_tokens,
            cached_tokens=group.num_cached_tokens,
        ),
        stop_string=finish.stop_string,
        resumes=group.resumes,
        preemptions=group.preemptions,
        headroom_bytes=board.headroom_bytes,
    )
    return pb.GenerateResponse(finished=message)


def model_response(name: str, tokenizer: ModelTokenizer, board: Board) -> pb.GetModelResponse:
    """The description of a loaded model."""
    ready = board.ready
    assert ready is not None
    return pb.GetModelResponse(
        model=name,
        tokenizer_json=tokenizer.json_bytes,
        chat_template=tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        eos_token_ids=tokenizer.eos_token_ids,
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        profile=memory_profile(board.profile),
        dtype=ready.dtype,
        add_bos=tokenizer.add_bos,
        created=board.created,
        ranks=[pb.RankPlacement(**msgspec.structs.asdict(place)) for place in ready.ranks],
    )


def memory_profile(profile: Profile) -> pb.MemoryProfile:
    """The profile as routers get it."""
    groups = [
        pb.CacheGroup(bytes_per_token=group.bytes_per_token, window_tokens=group.window_tokens)
        for group in profile.groups
    ]
    return pb.MemoryProfile(
        block_tokens=profile.block_tokens,
        groups=groups,
        state_bytes_per_sequence=profile.state_bytes_per_sequence,
        activation_bytes_per_token=profile.activation_bytes_per_token,
        sampler_bytes_per_sequence=profile.sampler_bytes_per_sequence,
        prefill_chunk_tokens=profile.prefill_chunk_tokens,
        kv_pool_bytes=profile.kv_pool_bytes,
    )


def _logprobs(update: Update, token_bytes: TokenBytes) -> Iterator[pb.TokenLogprob]:
    # Log-probabilities are all there or, when not asked for, all missing.
    for token_id, found in zip(update.token_ids, update.logprobs, strict=False):
        yield _logprob(token_id, found, token_bytes)


def _logprob(token_id: int, found: TokenLogprobs, token_bytes: TokenBytes) -> pb.TokenLogprob:
    spelling = token_bytes.spelling(token_id)
    return pb.TokenLogprob(
        token_id=token_id,
        token=spelling.decode("utf-8", "replace"),
        token_bytes=spelling,
        logprob=found.logprob,
        top=[
            _alternative(other, logprob, token_bytes.spelling(other))
            for other, logprob in zip(found.top_ids, found.top_logprobs, strict=True)
        ],
    )


def _alternative(token_id: int, logprob: float, spelling: bytes) -> pb.Alternative:
    return pb.Alternative(
        token_id=token_id,
        token=spelling.decode("utf-8", "replace"),
        token_bytes=spelling,
        logprob=logprob,
    )
