"""Runs vLLM's engine in this process."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
import vllm
from llguidance import LLTokenizer
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from ullage_common.config.engine import EngineConfig
from ullage_engine.memory.out_of_memory import is_out_of_memory
from ullage_engine.model_config.dtypes import cpu_computes_bfloat16
from ullage_engine.protocol.errors import GroupLostError, WorkerStartError
from ullage_engine.protocol.requests import EngineRequest
from ullage_engine.protocol.worker_state import RankPlace
from ullage_engine.vllm_worker.bindings.blocks import (
    GroupKind,
    VllmBlocks,
    group_kind,
    pool_block_bytes,
)
from ullage_engine.vllm_worker.bindings.connector import (
    TierConnector,
    content_of,
    cut_slots,
    part_format,
    refusal,
    transfer_config,
)
from ullage_engine.vllm_worker.bindings.requests import (
    GRAMMAR,
    Grammar,
    GrammarMasks,
    converted_embedding,
    converted_output,
    sampling_arguments,
    unmatched,
)
from ullage_engine.vllm_worker.interface import AdapterError, CoreOutput, InvalidRequestError
from ullage_engine.vllm_worker.proof import Probe
from ullage_engine.vllm_worker.ranks import RESUMED
from ullage_engine.vllm_worker.step_bound import longest_step_s
from ullage_engine.vllm_worker.tiers import ConnectorTransfers, TiersRefusedError
from ullage_engine.worker.device import HostTier, open_ledger
from ullage_engine.worker.fingerprint import cpu_kind
from ullage_engine.worker.grammar import Grammars

log = logging.getLogger("ullage.engine.vllm")

VERSION = "0.32.0"
"""The version of vLLM that this module supports and was tested with."""

_PROBE_STEPS = 100
_NOT_CHOSEN = {
    *("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_CI_ENV"),
    *("VLLM_CONFIGURE_LOGGING", "VLLM_DISABLE_SHARED_EXPERTS_STREAM"),
}
"""vLLM's environment variables that `environment` omits.

Ullage or vLLM sets them, or they only control where threads run.
"""
_NOTICED_WITHIN_S = 2.0
"""Seconds to wait after a failed step for vLLM to notice that a rank has exited."""


def check_version() -> None:
    """Check that the tested version of vLLM is installed.

    Raises:
        WorkerStartError: the installed version is not the tested version.
    """
    installed = vllm.__version__.partition("+")[0]
    if installed != VERSION:
        raise WorkerStartError(
            f"engine: vllm {installed} is installed, and this release of Ullage works with "
            f"{VERSION}; install vllm=={VERSION}"
        )


def make_config(
    arguments: Mapping[str, Any], host_tier: HostTier | None = None, *, headless: bool = False
) -> VllmConfig:
    """Create vLLM's configuration.

    Args:
        arguments: arguments of `EngineArgs`.
        host_tier: memory for KV outside the device. Embedding models use no host tier.
        headless: whether this node is a follower.

    Raises:
        WorkerStartError: an argument is unknown or invalid.
    """
    try:
        # Use the defaults of vLLM's own server, with which users would compare.
        config = EngineArgs(**arguments).create_engine_config(
            UsageContext.OPENAI_API_SERVER, headless=headless
        )
    except (VLLMValidationError, ValueError, TypeError, NotImplementedError, OSError) as error:
        raise WorkerStartError(f"vllm: {_one_line(error)}") from error
    # The pool may hold less than the longest sequence. Admission refuses longer requests.
    config.model_config.original_max_model_len = -1
    if host_tier is not None and config.model_config.runner_type != "pooling":
        config.kv_transfer_config = transfer_config(host_tier)
    return config


def is_cpu() -> bool:
    """Return whether the installed vLLM runs on CPUs."""
    return bool(current_platform.is_cpu())


def check_device(asked: str) -> None:
    """Check that the installed vLLM runs on the configured kind of device.

    Raises:
        WorkerStartError: the installed vLLM is built for another kind of device.
    """
    own = "cpu" if is_cpu() else "cuda"
    if asked not in ("auto", own):
        raise WorkerStartError(
            f"device: {asked} is asked for, but this vLLM computes on {own}; install the other one "
            f"(make install-vllm{' CUDA=1' if is_cpu() else ''}), or set device: {own}"
        )


def processor() -> str:
    """Return the kind of processor that vLLM uses, without creating a GPU context."""
    return cpu_kind() if is_cpu() else str(current_platform.get_device_name())


def environment() -> dict[str, str]:
    """Return the vLLM environment variables that are set and may affect the choice of kernels."""
    names = {each for each in envs.compile_factors() if each.startswith("VLLM_")} - _NOT_CHOSEN
    return {name: os.environ[name] for name in sorted(names & os.environ.keys())}


def item_bytes(dtype: str) -> int:
    """Return the bytes per element of a dtype."""
    return int(getattr(torch, dtype).itemsize)


def resolve_dtype(name: str) -> str:
    """Return the dtype of the weights. "auto" means bfloat16, or float32 on CPUs without it."""
    if name != "auto":
        return name
    fast = not is_cpu() or cpu_computes_bfloat16()
    return "bfloat16" if fast else "float32"


def cpu_budget(config: EngineConfig, host_tier: int) -> int:
    """Return the total memory budget of all CPU ranks in bytes, excluding the host tier."""
    return open_ledger(config, torch.device("cpu"), host_tier).total_bytes * config.gpus


SizePool = Callable[[list[int], int, list[int]], list[int]]
"""Function that decides how many bytes of KV each rank gets.

Its arguments are the KV bytes that vLLM leaves for each rank, the total size of all ranks' adapter
slots, and the bytes that were free on each rank's GPU before the weights were loaded.
"""


def _sized_executor(
    base: type[Executor], size_pool: SizePool, on_stage: Callable[[str], None]
) -> type[Executor]:
    """Return a subclass of a vLLM executor that lets `size_pool` choose the size of the KV pool.

    The executor calls `on_stage` when a startup stage begins. On shutdown, it kills its ranks,
    which have nothing to save.
    """

    class SizedExecutor(base):  # type: ignore[misc]
        kv_configs: list[KVCacheConfig]
        warm_up_s: float

        def determine_available_memory(self) -> list[int]:
            on_stage("warm_up")
            if is_cpu():
                self.warm_up_s = max(self.collective_rpc("ullage_warm_up"))
            num_bytes = super().determine_available_memory()
            free_first = [] if is_cpu() else self.collective_rpc("ullage_free_first")
            return size_pool(num_bytes, _blank_slots(self), free_first)

        def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
            self.kv_configs = kv_cache_configs
            on_stage("kv_pool")
            super().initialize_from_config(kv_cache_configs)

        @staticmethod
        def _ensure_worker_termination(worker_procs: Sequence[BaseProcess]) -> None:
            # Ranks have nothing to save, and would take 10 s to close their queues.
            for process in worker_procs:
                process.kill()
            for process in worker_procs:
                process.join()

    return SizedExecutor


def _blank_slots(executor: Executor) -> int:
    """Zero all ranks' adapter slots to make them resident, and return their size in bytes."""
    return sum(executor.collective_rpc("ullage_blank_slots")) if executor.lora_config else 0


def compute(config: VllmConfig, on_loaded: Callable[[], None]) -> None:
    """Run a follower's ranks until one of them exits.

    Args:
        config: vLLM's configuration.
        on_loaded: called once the ranks have loaded the model.
    """
    executor = MultiprocExecutor(config, monitor_workers=False)
    on_loaded()
    executor.start_worker_monitor(inline=True)


class VllmCore:
    """vLLM's engine in this process. See `interface.Core`."""

    def __init__(
        self,
        config: VllmConfig,
        size_pool: SizePool,
        load_vocabulary: Callable[[int], LLTokenizer],
        on_stage: Callable[[str], None],
    ) -> None:
        """Load the model and allocate all memory.

        Args:
            config: vLLM's configuration.
            size_pool: decides how many bytes of KV each rank gets.
            load_vocabulary: returns the tokenizer for grammars, given the size of the vocabulary.
                It is called when the first grammar arrives.
            on_stage: called when the stages warm_up and kv_pool start.

        Raises:
            WorkerStartError: the model cannot be served as configured, or does not fit in memory.
        """
        executor = _sized_executor(Executor.get_class(config), size_pool, on_stage)
        try:
            self._engine = LLMEngine(
                vllm_config=config,
                executor_class=executor,
                log_stats=False,
                usage_context=UsageContext.OPENAI_API_SERVER,
            )
        except (VLLMValidationError, ValueError, TypeError, NotImplementedError) as error:
            raise WorkerStartError(f"vllm: {_one_line(error)}") from error
        core = self._engine.engine_core.engine_core
        self._config = config
        self._scheduler: Scheduler = core.scheduler
        self._kv_configs: list[KVCacheConfig] = getattr(core.model_executor, "kv_configs", [])
        self._requests: dict[str, Request] = {}
        """vLLM's request objects by Ullage's request ids."""
        self._num_probes = 0
        self._warm_up_s: float = getattr(core.model_executor, "warm_up_s", 0.0)
        self._broken: dict[str, str] = {}
        """Errors of requests whose grammar failed in the current step, by vLLM's request ids."""
        self._adapters: dict[str, LoRARequest] = {}
        self._num_adapters = 0
        """Number of adapters added so far, from which the next adapter's id in vLLM is derived."""
        self.blocks = VllmBlocks(self._scheduler, self._requests)
        self._tiers: ConnectorTransfers | None = None
        self._grammars = Grammars(lambda: load_vocabulary(self.vocab_size))
        # Every rank copies KV in the order of its steps, so the blocks of an aborted request can be
        # reused at once. With a connector, vLLM would keep them until the steps in flight end.
        self._scheduler.defer_block_free = False
        grammars = self._scheduler.structured_output_manager
        grammars.backend = GrammarMasks(self.vocab_size)
        grammars._create_grammar = self._make_grammar
        # `Grammars` is not thread-safe, and a compiled grammar is copied in no time.
        grammars._use_async_grammar_compilation = False
        self._executor: Any = core.model_executor
        core.model_executor.collective_rpc("ullage_follow_resumed")
        core.model_executor.collective_rpc("ullage_receive_stages")

    # facts ---------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        return int(self._config.model_config.get_vocab_size())

    @property
    def dtype(self) -> str:
        return str(self._config.model_config.dtype).removeprefix("torch.")

    @property
    def task(self) -> Literal["generate", "embed"]:
        """The model's task: "generate" or "embed"."""
        return "embed" if self._config.model_config.runner_type == "pooling" else "generate"

    @property
    def max_model_len(self) -> int:
        """Maximum sequence length in tokens.

        Without chunked prefill, this is at most the number of tokens that a single step can
        compute.
        """
        longest = int(self._config.model_config.max_model_len)
        limits = self._config.scheduler_config
        if limits.enable_chunked_prefill:
            return longest
        return min(longest, int(limits.max_num_batched_tokens))

    @property
    def has_prefix_cache(self) -> bool:
        return bool(self._scheduler.kv_cache_manager.enable_caching)

    @property
    def lookahead_tokens(self) -> int:
        """Number of speculative tokens that vLLM may store beyond a sequence's last token."""
        return int(self._scheduler.num_spec_tokens + self._scheduler.num_lookahead_tokens)

    @property
    def longest_step_s(self) -> float:
        """Upper bound on a step's duration in seconds, or 0 if not measured, as on GPUs."""
        model = self._config.model_config
        return longest_step_s(
            self._warm_up_s,
            num_stages=self._config.parallel_config.pipeline_parallel_size,
            max_model_len=self.max_model_len,
            hidden_size=model.get_hidden_size(),
            pool_bytes=self.pool_bytes,
        )

    @property
    def max_in_flight_tokens(self) -> int:
        """Maximum number of tokens that all steps in flight can occupy in the KV pool."""
        return int(self._config.max_in_flight_tokens) + self.lookahead_tokens

    @property
    def max_decode_tokens(self) -> int:
        """Maximum number of tokens that can be in flight for one decoding sequence."""
        return int(self._config.max_concurrent_batches) * (1 + self.lookahead_tokens)

    @property
    def chunk_tokens(self) -> int:
        """Maximum prompt tokens per step, or 0 if prompts are not chunked."""
        limits = self._config.scheduler_config
        if not limits.enable_chunked_prefill:
            return 0
        return max(0, int(self._scheduler.max_num_scheduled_tokens) - int(limits.max_num_seqs))

    def limit_chunk(self, num_tokens: int) -> None:
        """Lower the maximum number of prompt tokens per step to `num_tokens`.

        The sizes of buffers and of the warm-up step do not change.
        """
        most = num_tokens + int(self._config.scheduler_config.max_num_seqs)
        if self.chunk_tokens:
            self._scheduler.max_num_scheduled_tokens = min(
                int(self._scheduler.max_num_scheduled_tokens), most
            )

    def blank_slots(self) -> int:
        """Zero all ranks' adapter slots to make them resident, and return their size in bytes.

        Call this only while no adapter is loaded.
        """
        return _blank_slots(self._engine.engine_core.engine_core.model_executor)

    @property
    def pool_bytes(self) -> int:
        """Size of the KV pool in bytes, summed over all ranks and including vLLM's null block."""
        return self.block_bytes * (self.blocks.num_blocks + 1) if self._kv_configs else 0

    @property
    def block_bytes(self) -> int:
        """Size of one KV block in bytes, summed over all ranks."""
        return sum(
            pool_block_bytes(rank, self._config)
            for rank in self._kv_configs
            if rank.kv_cache_groups
        )

    @property
    def groups(self) -> list[GroupKind]:
        """Kind of KV that each cache group keeps."""
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        return [group_kind(group, self._config) for group in groups]

    @property
    def ranks(self) -> list[RankPlace]:
        """Device map: each rank's device and layers."""
        model = self._config.model_config
        parallel = self._config.parallel_config
        layers = model.get_total_num_hidden_layers()
        tensor = parallel.tensor_parallel_size
        pipeline = parallel.pipeline_parallel_size
        places = []
        for rank in range(tensor * pipeline):
            stage = rank // tensor
            first, end = get_pp_indices(layers, stage, pipeline)
            places.append(
                RankPlace(
                    rank=rank,
                    stage=stage,
                    tensor_rank=rank % tensor,
                    device="cpu" if is_cpu() else f"cuda:{rank}",
                    first_layer=first,
                    num_layers=end - first,
                    num_attention_layers=end - first,
                    num_heads=model.get_num_attention_heads(parallel),
                    num_kv_heads=model.get_num_kv_heads(parallel),
                )
            )
        return places

    # tiers ---------------------------------------------------------------------------------------

    def tier_format(self) -> tuple[int, list[str]]:
        """Return the bytes per block that all ranks together copy to tiers, and the KV layout.

        Raises:
            TiersRefusedError: blocks cannot be copied to tiers.
        """
        if not isinstance(self._scheduler.connector, TierConnector):
            raise TiersRefusedError("it makes embeddings")
        if not self.has_prefix_cache:
            raise TiersRefusedError("vLLM keeps no prefixes of it")
        if reason := refusal(self._scheduler.kv_cache_config, self._config):
            raise TiersRefusedError(reason)
        executor = self._engine.engine_core.engine_core.model_executor
        parts = executor.collective_rpc(part_format)
        if not all(num_bytes for num_bytes, _ in parts):
            raise TiersRefusedError("the KV of a block does not lie together in its layers")
        facts = [str(fact) for _, own in parts for fact in own]
        return sum(num_bytes for num_bytes, _ in parts), facts

    def use_tiers(self, space: bytes, block_tokens: int, block_bytes: int) -> ConnectorTransfers:
        """Start copying KV blocks to and from tiers outside the device.

        Args:
            space: namespace of the blocks' keys.
            block_tokens: tokens per block.
            block_bytes: bytes per slot.
        """
        self._engine.engine_core.engine_core.model_executor.collective_rpc(
            cut_slots, args=(block_bytes,)
        )
        pool = self._scheduler.kv_cache_manager.block_pool
        self._tiers = ConnectorTransfers(space, block_tokens, partial(content_of, pool))
        self._scheduler.connector.use(self._tiers)
        return self._tiers

    # requests ------------------------------------------------------------------------------------

    def is_compiled(self, grammar: str) -> bool:
        return self._grammars.compile(grammar).done()

    def add_adapter(self, name: str, folder: str) -> None:
        self._num_adapters += 1
        self._adapters[name] = LoRARequest(name, self._num_adapters, folder)

    def remove_adapter(self, name: str) -> None:
        self._adapters.pop(name, None)

    def check_adapter(self, name: str) -> None:
        self._on_all_ranks("ullage_check_adapter", name)

    def load_adapter(self, name: str) -> None:
        try:
            self._on_all_ranks("ullage_load_adapter", name)
        except AdapterError:
            self.unload_adapter(name)  # some ranks have loaded it completely or partly
            raise

    def _on_all_ranks(self, method: str, name: str) -> None:
        """Call a worker method on every rank, passing the named adapter as its argument.

        Raises:
            AdapterError: the call failed on a rank.
        """
        executor = self._engine.engine_core.engine_core.model_executor
        reasons = executor.collective_rpc(method, args=(self._adapters[name],))
        if reason := next(filter(None, reasons), ""):
            raise AdapterError(name, reason)

    def unload_adapter(self, name: str) -> None:
        self._engine.remove_lora(self._adapters[name].lora_int_id)

    def add(self, request: EngineRequest, max_tokens: int) -> None:
        num_prompt = request.num_prompt_tokens
        prompt = request.token_ids[:num_prompt]
        sent = request.token_ids[num_prompt:]
        self._check(request)
        try:
            params: SamplingParams | PoolingParams = PoolingParams(task="embed")
            if not request.embed:
                params = SamplingParams(**sampling_arguments(request, max_tokens + len(sent)))
            internal = self._engine.add_request(
                request.request_id,
                tokens_input(prompt, cache_salt=request.cache_salt or None),
                params,
                lora_request=self._adapters.get(request.adapter),
                # vLLM prefers smaller numbers.
                priority=-request.priority,
            )
        except (VLLMValidationError, ValueError, TypeError) as error:
            raise InvalidRequestError(_one_line(error), _field_of(error)) from error
        added = self._requests[request.request_id] = self._scheduler.requests[internal]
        if sent:
            added.append_output_token_ids(sent)
            # vLLM asserts that the cache holds no tokens beyond a request's prompt. It makes an
            # exception for preempted requests, but does not count their cached tokens.
            added.num_preemptions = 1
            assert added.prefill_stats is not None
            added.prefill_stats.num_cached_tokens = self.blocks.num_cached(added)
        # The server's keys do not include adapters.
        if self._tiers is not None and not request.adapter:
            self._tiers.add(internal, request)

    def _check(self, request: EngineRequest) -> None:
        """Reject a request if its adapter, its token ids or its grammar is invalid.

        Such a request would otherwise break vLLM in a later step.

        Raises:
            InvalidRequestError: the request cannot be served.
        """
        if request.adapter and request.adapter not in self._adapters:
            raise InvalidRequestError(f"adapter {request.adapter!r} is not served", "model")
        if request.token_ids and not 0 <= min(request.token_ids) <= max(request.token_ids) < (
            self.vocab_size
        ):
            raise InvalidRequestError("a token is not of the vocabulary", "prompt")
        if request.grammar and (error := self._grammars.compile(request.grammar).exception()):
            if isinstance(error, MemoryError):
                raise error
            raise InvalidRequestError(unmatched(str(error)), "grammar")

    def abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            self._engine.abort_request([request.request_id], internal=True)
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None and self._tiers is not None:
            self._tiers.forget(request.request_id)

    def set_max_running(self, num_requests: int) -> None:
        # Not `max_num_running_reqs`: vLLM asserts that no more requests are running than that.
        self._scheduler.max_num_active_reqs = num_requests

    def step(self) -> list[CoreOutput]:
        outputs = []
        for each in self._step():
            request = self._requests.get(each.request_id)
            if request is None:
                continue
            if isinstance(each, RequestOutput):
                name = request.request_id
                num_loaded = self._tiers.num_loaded_tokens(name) if self._tiers else 0
                outputs.append(converted_output(each, request.sampling_params, num_loaded))
            elif each.finished:
                outputs.append(converted_embedding(each))
        return self._without_broken(outputs) if self._broken else outputs

    def _step(self) -> list[Any]:
        try:
            outputs: list[Any] = self._engine.step()
            return outputs
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            deadline = time.monotonic() + _NOTICED_WITHIN_S
            has_ranks = self._engine.vllm_config.parallel_config.world_size > 1
            while has_ranks and not self._has_lost_rank and time.monotonic() < deadline:
                time.sleep(0.01)
            if self._has_lost_rank:
                raise GroupLostError("the process of a rank has ended") from error
            raise

    def _without_broken(self, outputs: list[CoreOutput]) -> list[CoreOutput]:
        """Abort requests whose grammar failed in this step, and turn their outputs into errors."""
        broken = self._broken
        self._broken = {}
        failed = [
            CoreOutput(request_id, [], "error", error=unmatched(reason), field="grammar")
            for request_id, request in self._requests.items()
            if (reason := broken.get(request.request_id)) is not None
        ]
        ids = {each.request_id for each in failed}
        for request_id in ids:
            self.abort(request_id)
        return [each for each in outputs if each.request_id not in ids] + failed

    # proof ---------------------------------------------------------------------------------------

    @property
    def probe_size(self) -> Probe:
        """Size of the startup probe, which must fit into this engine's KV pool and context length.

        The probe is a small computation that every startup runs to verify its results.
        """
        groups = self.groups
        kinds = [each for each in groups if not each.state_blocks]
        num_blocks = self.blocks.num_blocks - sum(each.state_blocks for each in groups)
        # Each cache group takes its own blocks. The groups with the fewest tokens per block limit
        # the sequence.
        in_pool = num_blocks // max(1, len(kinds)) * min((k.block_tokens for k in kinds), default=0)
        longest = self.max_model_len
        return Probe(
            vocab_size=self.vocab_size,
            room_tokens=max(2, min(longest, in_pool) if kinds else longest),
            is_embedding=self.task == "embed",
            may_draft=self.lookahead_tokens > 0,
        )

    @property
    def has_plain_weights(self) -> bool:
        """Whether the checkpoint is unquantised.

        vLLM verifies that every weight of an unquantised checkpoint was loaded.
        """
        return self._config.model_config.quantization is None

    def run_probe(self, probe: Probe) -> list[CoreOutput]:
        """Run the probe, so that a fault that affects every step is detected at startup.

        The state and KV of the probe's requests are discarded afterwards.

        Returns:
            The outputs, ordered by request and token.

        Raises:
            WorkerStartError: a step failed for a reason other than lack of memory. Out-of-memory
                errors are raised unchanged, because a restart may succeed.
            RuntimeError: a rank's process has exited.
        """
        self._num_probes += 1
        requests = probe.requests(self._num_probes)
        try:
            with self._logprobs_allowed(probe.num_logprobs):
                outputs = self._run_in_turns(requests)
            self._drop_prefixes()
        except Exception as error:
            if isinstance(error, GroupLostError) or is_out_of_memory(error):
                raise  # another start may succeed then
            self.check_ranks()
            log.exception("the first step failed")
            raise WorkerStartError(
                f"vllm: the first step fails ({_one_line(error)}); vLLM cannot serve this model on "
                "this device, see the log above"
            ) from error
        return [each for request in requests for each in outputs[request.request_id]]

    @contextmanager
    def _logprobs_allowed(self, num_logprobs: int) -> Iterator[None]:
        """Allow requests inside the `with` block to ask for `num_logprobs` log-probabilities.

        vLLM's `max_logprobs` argument might otherwise allow fewer.
        """
        model = self._config.model_config
        most = model.max_logprobs
        if most >= 0:  # otherwise all of the vocabulary
            model.max_logprobs = max(most, num_logprobs)
        try:
            yield
        finally:
            model.max_logprobs = most

    def _run_in_turns(self, requests: Sequence[EngineRequest]) -> dict[str, list[CoreOutput]]:
        """Run requests to completion, and return each request's outputs, keyed by request id.

        Each request starts after the previous request's first token.
        """
        outputs: dict[str, list[CoreOutput]] = {}
        for request in requests:
            self.add(request, request.max_tokens)
            outputs[request.request_id] = []
            self._step_until(outputs, partial(_has_tokens, outputs, request, 1))

        for request in requests:
            self._step_until(outputs, partial(_has_tokens, outputs, request, request.max_tokens))
            self.forget(request.request_id)
        return outputs

    def _step_until(
        self, outputs: dict[str, list[CoreOutput]], is_done: Callable[[], bool]
    ) -> None:
        """Compute steps until `is_done` returns true, and append their outputs to `outputs`."""
        for _ in range(_PROBE_STEPS):
            if is_done():
                return
            for each in self.step():
                if each.finish == "error":
                    raise RuntimeError(each.error or "vLLM gave the probe up; see the log above")
                outputs[each.request_id].append(each)
        raise RuntimeError(f"nothing came of {_PROBE_STEPS} steps")

    def _drop_prefixes(self) -> None:
        """Compute steps until no request holds any blocks, and then clear the prefix cache.

        The cache contains the probe's KV.
        """
        if not self.has_prefix_cache:
            return
        for _ in range(_PROBE_STEPS):
            if self.blocks.num_free == self.blocks.num_blocks:
                break
            self._step()  # a request in flight still holds blocks
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the probe's blocks are not given back")

    def digests(self) -> list[dict[str, str]]:
        """Return each rank's digests of its rotary tables and weights in memory, by tensor name."""
        args = (self.has_plain_weights,)
        by_rank: list[dict[str, str]] = self._executor.collective_rpc("ullage_digests", args=args)
        return by_rank

    def changed_table(self) -> str:
        """Recompute all ranks' rotary tables, and compare them with the tables in memory.

        Returns:
            The name of a table that differs, or "" if none differs.
        """
        return next(filter(None, self._executor.collective_rpc("ullage_changed_table")), "")

    def check_ranks(self) -> None:
        """Check that all rank processes on this node are alive.

        Raises:
            GroupLostError: a rank's process has exited.
        """
        if self._has_lost_rank:
            raise GroupLostError("the process of a rank has ended")

    @property
    def _has_lost_rank(self) -> bool:
        # vLLM's own callback comes seconds later, after it has ended the other ranks.
        return getattr(self._executor, "is_failed", False)

    def close(self) -> None:
        """Stop the other ranks' processes."""
        self._engine.engine_core.shutdown()

    def _make_grammar(self, request: Request) -> Grammar:
        """Return a matcher for a request's grammar. vLLM calls this instead of its own method."""
        params = request.sampling_params
        assert params is not None
        assert params.extra_args is not None
        matcher = self._grammars.compile(params.extra_args[GRAMMAR]).result().deep_copy()
        internal = request.request_id
        sent = params.extra_args.get(RESUMED)
        if sent:
            matcher.consume_tokens(sent)
        return Grammar(matcher, lambda reason: self._broken.setdefault(internal, reason))


def _has_tokens(
    outputs: Mapping[str, Sequence[CoreOutput]], request: EngineRequest, num_tokens: int
) -> bool:
    """Return whether a request has produced at least `num_tokens` tokens, or its embedding."""
    own = outputs[request.request_id]
    num_found = sum(len(each.token_ids) for each in own)
    return bool(own) and (request.embed or num_found >= num_tokens)


def _field_of(error: Exception) -> str:
    """Return the request field that vLLM's error names, or "request" if it names none."""
    return str(getattr(error, "parameter", None) or "request")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
