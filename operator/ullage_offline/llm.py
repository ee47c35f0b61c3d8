"""`LLM`: answers prompts by a service of its own, which lives as long as the object."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from ullage.inference.v1 import inference_pb2, inference_pb2_grpc
from ullage_cli.background import BackgroundService, StatusLine
from ullage_common.wire.channels import open_blocking_channel
from ullage_offline.arguments import manifest_of, refuse_others, service_of
from ullage_offline.client import Asked, RequestError, ServiceLost, ask_all
from ullage_offline.outputs import RequestOutput
from ullage_offline.sampling import (
    Message,
    Request,
    SamplingParams,
    chat_request,
    completion_request,
)
from ullage_operator.api.errors import LocalFailure
from ullage_operator.api.spec import Service

WAITING_SHARE = 2
"""Requests sent at a time for each that the engines run at once, so that none of them is idle."""
MAX_CONCURRENCY = 512
"""Most requests sent at a time, each by a thread of its own."""
MAX_SEED = 1 << 64

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text}, or {"prompt_token_ids": ids}."""
Conversation = Sequence[Message]
Progress = bool | Callable[..., Any]


class LLM:
    """A language model for offline inference, with the interface of vLLM's `LLM`.

    The model is served by router and engines in processes of their own, under the same memory
    ledger as a service. `close`, the end of a `with` block, and the end of the program stop them.

        with LLM("org/name") as llm:
            outputs = llm.generate(["Hello"], SamplingParams(max_tokens=32))

    Args:
        model: an address as in a manifest (hf://, s3://, file://, pkg://), a folder, a GGUF file,
            or the hub's org/name.
        revision: branch, tag or commit of a model of the hub.
        tensor_parallel_size: GPUs that share each layer.
        pipeline_parallel_size: stages of consecutive layers.
        data_parallel_size: number of engines.
        dtype: type of weights and activations: auto, float16, bfloat16 or float32.
        quantization: format to which weights are converted: int8, int4, fp8 or w8a8. Checkpoints
            that are quantised themselves need none.
        kv_cache_dtype: type of stored keys and values: auto or fp8.
        max_model_len: most tokens of a prompt and its answer. By default the model's own limit.
        max_num_seqs: most sequences that an engine runs at once.
        gpu_memory_utilization: share of each device's memory that may be used, 0.85 by default.
        kv_cache_memory_bytes: most bytes of KV cache on each device.
        enable_prefix_caching: whether prompts that begin alike share KV. True by default.
        enable_chunked_prefill: False computes each prompt in one step.
        speculative_config: {"method": "ngram", "num_speculative_tokens": N}.
        generation_config: "vllm" leaves out the sampling defaults of the model's files.
        served_model_name: name of the model, for its OpenAI API at `url`.
        seed: makes answers of requests without a seed of their own reproducible.
        device: auto, cuda or cpu.
        engine: auto, native or vllm.
        spec: any other fields of an LLMService's spec.
        secrets: folder with one folder per Secret that spec names, with one file per key.
        show_progress: whether to show the progress of the start on standard error.
        others: further arguments of vLLM. They are refused by name, with the remedy, if they would
            change something.

    Raises:
        ValueError: an argument is invalid or not supported.
        RuntimeError: the model cannot be served on this machine.
    """

    def __init__(
        self,
        model: str,
        *,
        seed: int | None = None,
        secrets: str | Path | None = None,
        show_progress: bool = True,
        **others: Any,
    ) -> None:
        if others.get("tokenizer") == model:
            del others["tokenizer"]
        manifest = manifest_of(model, **others)
        service = service_of(manifest)

        self._seed = seed
        self._concurrency = _concurrency(service)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._is_closed = False
        with StatusLine() as status:
            on_progress = status.show if show_progress else None
            self._background = BackgroundService(
                manifest, on_progress=on_progress, secrets=Path(secrets) if secrets else None
            )
            try:
                self._background.start()
            except LocalFailure as error:
                raise RuntimeError(str(error)) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Base URL of the service's OpenAI API, on this machine only."""
        return f"{self._background.state['http_url']}/v1"

    def close(self) -> None:
        """Stop the service. Closing it again does nothing."""
        self._is_closed = True
        self._background.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        lora_request: None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer prompts, and return the answers in the order of the prompts.

        Args:
            prompts: one prompt or several: text, token ids, {"prompt": text}, or
                {"prompt_token_ids": ids}.
            sampling_params: parameters of all prompts, or of each one. None takes the model's own.
            use_tqdm: whether to show a progress bar, or the function that makes one.
            lora_request: must be None, since adapters are not supported here.
            others: further arguments of vLLM, which are refused by name with the remedy.

        Raises:
            ValueError: a prompt or parameter is invalid, or a prompt exceeds the context.
            RuntimeError: the service has ended, or an engine fails on a request.
        """
        refuse_others({"lora_request": lora_request, **others})
        given = _prompts(prompts)
        # Most prompts share one object of parameters, which is converted once.
        templates: dict[int, Request] = {}
        asked: list[Asked] = []
        for index, (prompt, params) in enumerate(_with_params(given, sampling_params)):
            template = templates.get(id(params))
            if template is None:
                template = templates[id(params)] = completion_request(params)
            asked.append(_asked(f"prompt {index}", prompt, template))
        return self._ask("prompt", asked, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        lora_request: None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, and return the answers in the order of the conversations.

        Args:
            messages: one conversation or several, each a list of messages as in OpenAI's API.
            sampling_params: as for `generate`.
            use_tqdm: as for `generate`.
            lora_request: as for `generate`.
            add_generation_prompt: whether the assistant's turn begins after the last message.
            continue_final_message: whether the answer continues the last message.
            tools: functions that the model may call. Calls are in `tool_calls` of the outputs.
            chat_template_kwargs: variables of the chat template.
            others: as for `generate`.

        Raises:
            ValueError: a message or parameter is invalid, or a prompt exceeds the context.
            RuntimeError: the service has ended, or an engine fails on a request.
        """
        refuse_others({"lora_request": lora_request, **others})
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message or None,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        given = _conversations(messages)
        asked: list[Asked] = []
        for index, (conversation, params) in enumerate(_with_params(given, sampling_params)):
            try:
                asked.append((chat_request(params, conversation, options), None))
            except ValueError as error:
                raise ValueError(f"conversation {index}: {error}") from None

        outputs = self._ask("conversation", asked, use_tqdm)
        tokenizer = self.get_tokenizer()
        for output in outputs:
            output.prompt = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
        return outputs

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, a `tokenizers.Tokenizer`."""
        from tokenizers import Tokenizer  # takes longer to import than all the rest

        with self._lock:
            if self._tokenizer is None:
                with open_blocking_channel(self._target) as channel:
                    stub = inference_pb2_grpc.InferenceServiceStub(channel)
                    model = stub.GetModel(inference_pb2.GetModelRequest())
                self._tokenizer = Tokenizer.from_buffer(model.tokenizer_json)
            return self._tokenizer

    @property
    def _target(self) -> str:
        if self._is_closed:
            raise RuntimeError("the LLM is closed; make another one")
        if reason := self._background.failure:
            raise RuntimeError(f"the service has ended: {reason}")
        return str(self._background.state["grpc_target"])

    def _ask(self, noun: str, asked: Sequence[Asked], use_tqdm: Progress) -> list[RequestOutput]:
        """Send requests, and return the answers in their order.

        Args:
            noun: the word for a prompt in errors.
            asked: the requests.
            use_tqdm: whether to show a progress bar, or the function that makes one.
        """
        for request, _ in asked:
            self._number(request)

        answers: dict[int, RequestOutput] = {}
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        bar = make_bar(
            total=len(asked),
            desc="Processed prompts",
            dynamic_ncols=True,
            disable=not use_tqdm,
        )
        background = self._background
        answered = ask_all(self._target, asked, self._concurrency, lambda: background.failure)
        try:
            with bar, contextlib.closing(answered):
                for index, answer in answered:
                    answers[index] = answer
                    bar.update(1)
        except RequestError as error:
            kind = ValueError if error.is_invalid else RuntimeError
            raise kind(f"{noun} {error.index}: {error}") from None
        except ServiceLost as error:
            raise RuntimeError(f"the service has ended: {error}") from None
        return [answers[index] for index in range(len(asked))]

    def _number(self, request: Request) -> None:
        """Give a request an id, and a seed if the LLM has one and the request has none."""
        with self._lock:
            number = next(self._numbers)
        request.request_id = str(number)
        if self._seed is not None and not request.sampling.HasField("seed"):
            request.sampling.seed = (self._seed + number) % MAX_SEED


def _concurrency(service: Service) -> int:
    """Return how many requests to send at a time."""
    spec = service.spec
    num_engines = max(1, sum(pool.replicas for pool in spec.pools.values()))
    return min(WAITING_SHARE * spec.batching.max_sequences * num_engines, MAX_CONCURRENCY)


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, also if one prompt was given."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    given: list[Any] = list(prompts)
    if given and all(isinstance(item, int) for item in given):
        return [given]
    return given


def _conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Return a list of conversations, also if one conversation was given."""
    given: list[Any] = list(messages)
    if given and isinstance(given[0], Mapping):
        return [given]
    return given


def _with_params(
    given: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
) -> Iterable[tuple[Any, SamplingParams | None]]:
    """Pair prompts with their parameters."""
    if params is None or isinstance(params, SamplingParams):
        return ((each, params) for each in given)
    if len(params) != len(given):
        raise ValueError(
            f"sampling_params has {len(params)} items for {len(given)} prompts; give one for each, "
            "or one for all"
        )
    return zip(given, params, strict=True)


def _asked(place: str, prompt: Prompt, template: Request) -> Asked:
    """Return the request for a prompt, and the prompt's text.

    Args:
        place: the prompt's place, for errors.
        prompt: the prompt.
        template: the request without its prompt.

    Raises:
        ValueError: the prompt is invalid.
    """
    match prompt:
        case str():
            fields: Mapping[str, Any] = {"prompt": prompt}
        case Mapping():
            fields = prompt
        case _:
            fields = {"prompt_token_ids": prompt}

    for name, value in fields.items():
        if name not in ("prompt", "prompt_token_ids") and value is not None:
            raise ValueError(
                f"{place} has {name}, which is not supported; give prompt or prompt_token_ids"
            )

    text = fields.get("prompt")
    ids = fields.get("prompt_token_ids")
    if not (text or ids):
        raise ValueError(f"{place} is empty; give text or token ids")
    request = Request()
    request.CopyFrom(template)
    try:
        if ids:
            request.token_ids.ids.extend(ids)
        else:
            request.text = text or ""
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place} is neither text nor token ids: {error}") from None
    return request, text
