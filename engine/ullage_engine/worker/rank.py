"""The startup of one rank, phase by phase. Every memory allocation is recorded in a ledger.

All ranks of a group finish a phase before any of them begins the next. On rank 0, `worker.startup`
sends a command per phase, and `worker.rank_process` executes it on the other ranks. In two of the
phases, `warm_up` and `finalize`, the ranks compute together.
"""

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

import ullage_engine
from ullage_common.config.engine import PREFILL_CHUNK_TOKENS, EngineConfig, kv_limit
from ullage_common.process.memory import free_bytes
from ullage_common.wire.fingerprint import Fingerprint, fingerprint_of
from ullage_engine.kernels.arena import GATHER_TOKENS, StepLimits
from ullage_engine.kernels.kv_pool import LAYOUT_VERSION, kv_block_bytes
from ullage_engine.kernels.ranges import ranges
from ullage_engine.layers.native_decoder import auto_kv_type, library_refusal
from ullage_engine.memory.ledger import Ledger, mib, wrong_price
from ullage_engine.model_config.dtypes import dtype_name, is_emulated, kv_itemsize, resolve_dtype
from ullage_engine.model_config.model_config import ModelConfig
from ullage_engine.model_loader.loader import (
    LoadedModel,
    check_loaded,
    held_bytes,
    load_weights,
)
from ullage_engine.model_loader.proof import Proof, ProofFile, code_digest, tolerance
from ullage_engine.native.library import instruction_set
from ullage_engine.parallel.layout import (
    LayoutError,
    RankLayout,
    check_model,
    check_world,
    group_kv_bytes,
    rank_model_config,
    transfer_bytes,
)
from ullage_engine.parallel.pipeline import PipelineRank, RankGroup
from ullage_engine.parallel.slices import Slicer, check_groups
from ullage_engine.pinned_memory import PinnedMemory, whole_pages
from ullage_engine.protocol.errors import WorkerStartError
from ullage_engine.protocol.messages import Loading
from ullage_engine.quantization.formats import Encoding
from ullage_engine.quantize.calibration import Int4Calibration
from ullage_engine.runner.model_runner import ModelRunner
from ullage_engine.runner.proof import take_proof
from ullage_engine.runner.step_graphs import CudaCapture, NewCapture
from ullage_engine.scheduler.batch_plan import PromptCost, SchedulerLimits
from ullage_engine.worker.device import (
    HostTier,
    MemoryMeter,
    Workspace,
    check_pinned,
    enforce_ledger,
    give_back_freed,
    open_driver,
    open_ledger,
    prepare_device,
    reserve_for_others,
    touch_pages,
)
from ullage_engine.worker.fingerprint import (
    build_digest,
    canonical_order,
    digest_of,
    processor_of,
    yes_or_no,
)
from ullage_engine.worker.rank_group import Report
from ullage_engine.worker.step_costs import StepCosts, costs_key, leave_costs, read_costs
from ullage_kv import Arena, namespace

log = logging.getLogger("ullage.engine.worker")

_STAGING_BYTES = 16 << 20
"""Bytes to reserve for messages, token lists and queues, whose sizes depend on the requests."""

# How many prompt tokens a step computes.
_LEAST_CHUNK_TOKENS = 128
"""Lower bound of the measured prompt token limit, because matmuls with fewer rows are
inefficient."""
_CHUNK_UNIT = 64
"""The measured prompt token limit is rounded down to a multiple of this number."""
_PREFILL_S = 0.5
"""Maximum seconds that a step at the beginning of a prompt may take, because decodes wait for it.

This limit does not apply if the chunk size is configured, or if changing it would change answers.
"""
_DEADLINE_SHARE = 0.25
"""Maximum fraction of limits.step_deadline that the prompt tokens of one step may take."""

# How the cost of context is measured.
_DEEP_TOKENS = 64
"""Number of prompt tokens per timed step, which is run with and without a long context."""
_DEEP_CONTEXT = 4096
"""Length in tokens of the long context, unless the maximum sequence length is too short."""
_SHALLOW_CONTEXT = 256
"""Minimum length in tokens of a context whose reading time is long enough to measure."""

# How much context the decodes of a step read.
_DECODE_READ_S = 0.1
"""Maximum seconds that one step's decodes may spend reading KV, because prompts have to wait."""
_ANY_CONTEXT = 1 << 40
"""Number of context tokens that stands for "no limit", because no step reaches it."""

_TRANSFER_TIMEOUT_S = 60.0
"""Minimum timeout in seconds for transfers between ranks. The server detects failures sooner."""

_COMPUTING_ROOMS = (
    "kernels",
    "layers",
    "model_config",
    "native",
    "parallel",
    "quantization",
    "runner",
)
"""Folders of the engine whose code affects the exact bits of answers."""


def chunk_tokens(token_s: float, most: int) -> int:
    """Return how many prompt tokens a step may compute without delaying decodes for too long.

    The result is never too small for efficient matmuls, unless `most` itself is.

    Args:
        token_s: seconds per token at the beginning of a prompt. Later tokens take longer.
        most: upper bound of the result.
    """
    fitting = int(_PREFILL_S / token_s) // _CHUNK_UNIT * _CHUNK_UNIT if token_s > 0 else most
    return min(max(fitting, _LEAST_CHUNK_TOKENS), most)


def measured_cost(
    token_s: float, context_s: float, tokens: int, deadline_s: float, *, is_free: bool
) -> PromptCost:
    """Derive the cost of prompt tokens by position, and a step's cost budget, from timings.

    Args:
        token_s: seconds per token at the beginning of a prompt.
        context_s: additional seconds for each context token that a token attends to.
        tokens: number of prompt tokens in a step at the beginning of a prompt.
        deadline_s: seconds after which a worker with an unfinished step is considered hung.
        is_free: whether the chunk size may be chosen freely. If true, the budget makes steps late
            in a prompt compute fewer tokens, so that they delay decodes no longer than the prompt's
            first steps do. If false, only the deadline limits the budget.
    """
    if token_s <= 0.0:
        return PromptCost()

    cost = PromptCost(token_s / context_s if context_s > 0.0 else math.inf)
    budget = _DEADLINE_SHARE * deadline_s / token_s
    if is_free:
        budget = min(budget, max(cost.of(0, tokens), _PREFILL_S / token_s))
    return replace(cost, step_budget=budget)


class RankStartup:
    """Starts one rank in several phases, until its runner is ready to compute steps.

    Call each phase once, in this order: `load`, `allocate_arenas`, `warm_up`, `allocate_kv`,
    `finalize`.

    Raises, in any phase:
        WorkerStartError, LedgerError, WeightsError: the rank cannot serve. The message is one line
            that says how to fix this.
    """

    def __init__(
        self, config: EngineConfig, rank: int, report: Report, host_tier: HostTier | None = None
    ) -> None:
        self._host_tier = host_tier
        self.layout = read_layout(config)
        self.rank = rank
        self.config = config

        # The driver is opened before CUDA's context, which takes memory of this process, too.
        driver = open_driver(config, rank)
        self.device = prepare_device(config, rank)
        if config.profiling.nvtx and self.device.type == "cuda":
            ranges.to_nvtx()
        self.dtype = resolve_dtype(config.model.dtype, self.device)
        self.meter = MemoryMeter(self.device, driver)
        self.ledger = open_ledger(config, self.device, host_tier.num_bytes if host_tier else 0)

        self._report = report
        self._group: RankGroup | None = None
        self._loaded: LoadedModel | None = None
        self._pinned_tier: PinnedMemory | None = None
        self._whole: ModelConfig | None = None
        self._runner: ModelRunner | None = None
        self._workspace: Workspace | None = None

        self.swap_bytes_per_second = 0.0
        """Combined bandwidth of all ranks to host memory in bytes per second, as measured by this
        rank, or 0 without host memory for KV."""
        self.decode_tokens = _ANY_CONTEXT
        """Maximum number of context tokens that one step's decodes may read, as measured by
        `finalize`."""
        self.prompt_tokens = 0
        """Maximum number of prompt tokens per step, as measured by `finalize` or as configured."""
        self.prompt_cost = PromptCost()
        """Cost of prompt tokens depending on their position, as measured by `finalize`."""
        self.longest_step_s = 0.0
        """Duration of the longest step in seconds, as measured by `finalize`."""
        self.proof: Proof | None = None
        """Digests of this rank's tensors and logits, as computed by `finalize`."""

    @property
    def model_config(self) -> ModelConfig:
        """The configuration of the whole model."""
        assert self._whole is not None, "load comes first"
        return self._whole

    @property
    def weights_key(self) -> str:
        """The key of the prepared weights, which is the same for all ranks of a group."""
        assert self._loaded is not None, "load comes first"
        return self._loaded.key

    @property
    def loaded(self) -> LoadedModel:
        """This rank's weights."""
        assert self._loaded is not None, "load comes first"
        return self._loaded

    @property
    def runner(self) -> ModelRunner:
        """The runner that executes the model on this rank's device."""
        assert self._runner is not None, "allocate_arenas comes first"
        return self._runner

    @property
    def workspace(self) -> Workspace:
        """The memory for the temporary tensors of steps."""
        assert self._workspace is not None, "finalize comes first"
        return self._workspace

    @cached_property
    def max_model_len(self) -> int:
        """Maximum length of a sequence, in tokens."""
        longest = self.model_config.max_position
        max_model_len = self.config.model.max_model_len
        if max_model_len is None:
            return longest

        if not 1 < max_model_len <= longest:
            raise WorkerStartError(
                f"spec.model.maxModelLen: {max_model_len} is not between 2 and the {longest} "
                f"tokens the model was made for; set {longest} or less"
            )
        return max_model_len

    @cached_property
    def limits(self) -> SchedulerLimits:
        """Limits that the scheduler's plans must observe."""
        batching = self.config.batching
        chunk = batching.prefill_chunk_tokens
        chunk = PREFILL_CHUNK_TOKENS if chunk is None else chunk

        return SchedulerLimits(
            max_model_len=self.max_model_len,
            max_sequences=batching.max_sequences,
            # Without chunking, one step computes a whole prompt.
            prompt_tokens=min(chunk or self.max_model_len, self.max_model_len),
            is_chunked=chunk > 0,
            decode_tokens=self.decode_tokens,
            max_decodes=batching.decode_max_batch_tokens,
            max_in_flight=self._decode_batches(),
            replay_tokens=self.model_config.replay_tokens,
            # Pipeline stages split chunks, and draft tokens are verified in one chunk.
            num_speculative_tokens=(
                batching.num_speculative_tokens if self.layout.pipeline == 1 else 0
            ),
        )

    def _decode_batches(self) -> int:
        """Return how many batches of decodes may be in flight, at most one per pipeline stage."""
        own = 1 if self.device.type == "cpu" else self.layout.pipeline
        return min(self.config.parallelism.decode_batches or own, self.layout.pipeline)

    @cached_property
    def step_limits(self) -> StepLimits:
        """A step's limits, which determine the sizes of all the runner's buffers."""
        limits = self.limits
        model = self.config.model
        return StepLimits(
            max_tokens=limits.prompt_tokens + limits.max_sequences,
            max_rows=limits.max_sequences,
            max_model_len=limits.max_model_len,
            gather_tokens=GATHER_TOKENS,
            itemsize=self.dtype.itemsize,
            deterministic=model.deterministic,
            fp8_kv=model.kv_dtype == "fp8",
            windowed=self.window_tokens > 0,
        )

    @cached_property
    def window_tokens(self) -> int:
        """Length of the sliding window in tokens, or 0 if its layers need no separate KV blocks.

        Separate blocks are needed only if a sequence can be longer than the window plus one prompt
        chunk.
        """
        window = self.model_config.window
        return window if window + self.limits.prompt_tokens < self.max_model_len else 0

    @property
    def kv_itemsize(self) -> int:
        """Bytes per stored KV element, from which all KV sizes are computed."""
        return kv_itemsize(self.config.model.kv_dtype, self.kv_type)

    @cached_property
    def library_refusal(self) -> str:
        """Reason why the C++ library cannot compute whole steps, or an empty string if it can."""
        assert self._loaded is not None, "load comes first"
        if self.layout.world > 1:
            return "several ranks compute together"
        return library_refusal(self._loaded, self.step_limits, self.device, self.dtype)

    @cached_property
    def kv_type(self) -> torch.dtype:
        """Data type in which keys and values are stored if `model.kv_dtype` is not float8.

        If `model.dtype` is `auto`, the type depends on whether the C++ library computes steps.
        """
        if self.config.model.dtype != "auto":
            return self.dtype
        return auto_kv_type(self.library_refusal, self.dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes per KV block, summed over all ranks."""
        per_token = group_kv_bytes(
            self.model_config, self.layout, self.kv_itemsize, windowed=self.window_tokens > 0
        )
        return self.step_limits.block_tokens * per_token

    @property
    def num_host_slots(self) -> int:
        """Number of KV blocks that fit in the configured host memory."""
        return self.config.memory.host_kv // self.block_bytes

    def load(self) -> None:
        """Memory-map or copy this rank's weights."""
        context = self.meter.used_bytes()
        self.ledger.record("context", context)

        self._loaded = self._load()
        self.ledger.record("weights", self._loaded.nbytes)
        give_back_freed()
        touch_pages(self._loaded.tensors.values(), self.device)

    def allocate_arenas(self, store: Path | None = None) -> None:
        """Join the other ranks, and allocate the buffers for steps.

        From the next phase on, ranks compute together, so a rank with too little memory must fail
        now.

        Args:
            store: file through which the ranks find each other, or None for a single rank.
        """
        assert self._loaded is not None, "load comes first"
        pipeline_rank = self._join_group(store)
        self._log_decoder()
        self._runner = ModelRunner(
            self._loaded,
            self.device,
            self.dtype,
            self.step_limits,
            pipeline_rank,
            kv_type=self.kv_type,
            new_capture=self._new_capture(),
        )

        sizes = {
            "step_arena": self.runner.step_arena_bytes,
            "sampler_arena": self.runner.sampler_arena_bytes,
        }
        progress = self._progress("arena")
        progress(0, sum(sizes.values()))
        for name, size in sizes.items():
            self.ledger.reserve(name, size)
        self.runner.allocate_arena()
        for name, size in sizes.items():
            self.ledger.allocated(name, size)

        error = self.runner.verify_row_invariance()
        if error is not None:
            raise WorkerStartError(f"spec.model.deterministic: {error}; set false on this machine")

        # The convolution states are allocated with the first KV pool.
        if self.runner.state_pool_bytes:
            self.ledger.record("state_pool", self.runner.state_pool_bytes)
        self.runner.allocate_kv(1)
        progress(sum(sizes.values()), sum(sizes.values()))

    def _new_capture(self) -> NewCapture | None:
        """Return the class that captures decode steps as CUDA graphs, or None if graphs are off."""
        if not self.config.cuda_graphs:
            return None
        if self.device.type != "cuda":
            log.warning("cuda_graphs has no effect on a CPU; set false")
            return None
        return CudaCapture

    def warm_up(self) -> int:
        """Run the largest batches on a one-block pool, so that libraries allocate workspaces now.

        Returns:
            The number of KV blocks that fit in the memory that is left. It is the maximum size of
            the KV pool.
        """
        self._progress("warm_up")(0, 0)
        give_back_freed()
        self.runner.warm_up()

        accounted = self.ledger.allocated_bytes + self.runner.kv_block_bytes
        self.ledger.record("workspace", max(0, self.meter.used_bytes() - accounted))
        self.ledger.reserve("staging", _STAGING_BYTES)
        self.ledger.reserve("safety_reserve", self.config.memory.safety_reserve)
        self._reserve_host_kv()

        longest = -(-self.max_model_len // self.step_limits.block_tokens)
        reserve_for_others(
            self.ledger,
            self.device,
            self.meter,
            safety_reserve=self.config.memory.safety_reserve,
            longest_kv=longest * self.runner.kv_block_bytes,
        )
        return self._fitting_blocks()

    def allocate_kv(self, num_blocks: int) -> None:
        """Allocate the KV pool, with the same number of blocks on every rank."""
        size = num_blocks * self.runner.kv_block_bytes
        self.ledger.reserve("kv_pool", size)
        progress = self._progress("kv_pool")
        progress(0, size)
        self.runner.allocate_kv(num_blocks, self.num_host_slots, self._shared_slots())
        self.ledger.allocated("kv_pool", size)

        if self._host_kv_bytes():
            self.ledger.allocated("host_kv", self._host_kv_bytes())
        if self.num_host_slots:
            self.swap_bytes_per_second = self.block_bytes / self.runner.measure_swap()
            log.info("KV is swapped at %s a second", mib(int(self.swap_bytes_per_second)))

        progress(size, size)
        self._check_prices(size)

    def finalize(self, *, verifies: bool = False) -> None:
        """Run the largest steps on the KV pool, compute the proof, and finalize the ledger.

        The pool may occupy memory that `warm_up` used for temporary tensors. Running the steps
        again allocates new memory for them now rather than during the first requests. The proof
        consists of results that later starts compare with their own.

        Args:
            verifies: whether to compute the proof twice and compare the two. This is necessary if
                no start has been verified yet.

        Raises:
            ProofError: the second computation differs from the first.
        """
        self.runner.run_largest()
        if self.config.cuda_graphs:
            log.info("%d steps of decodes are CUDA graphs", self.runner.num_graphs)

        self._apply_costs(self._step_costs())
        self.proof = take_proof(
            self.runner, self.loaded.tensors, self.proof_tolerance, verifies=verifies
        )
        if verifies:
            self._check_weights()

        # The ledger is closed last, when no step allocates any more.
        self._settle_workspace()
        enforce_ledger(self.ledger, self.device, self.meter)
        self._workspace = Workspace(self.device, self.meter)

    def _check_weights(self) -> None:
        """Compare the weights in memory with the checksums of the prepared file.

        Without this check, if the first start computed with damaged weights, no later start would
        notice.
        """
        began = time.monotonic()
        folder = Path(self.config.server.weights_dir)
        layout = self.layout
        shard = None if layout.world == 1 else self._shard
        progress = self._progress("verify")
        check_loaded(self.loaded, folder, progress, shard, rank=self.rank, num_ranks=layout.world)
        seconds = time.monotonic() - began
        log.info("weights in memory have the checksums of their file, %.1f s", seconds)

    def _step_costs(self) -> StepCosts:
        """Return the costs of steps, as measured by an earlier worker of this fork server or now.

        Only an engine without a group reuses them, because ranks must measure together. Without the
        C++ library, the measured steps also allocate memory that belongs into the ledger.
        """
        is_reusable = self.layout.world == 1 and not self.library_refusal
        run_dir = Path(self.config.server.run_dir)
        key = costs_key(self.loaded.key, os.getppid()) if is_reusable else ""
        if costs := read_costs(run_dir, key):
            log.info("the costs of steps are those that the last worker measured")
            return costs

        measured = min(_LEAST_CHUNK_TOKENS, self.limits.prompt_tokens)
        costs = StepCosts(
            decode_context_s=self.runner.measure_context_seconds(),
            prompt_token_s=self.runner.measure_prompt_seconds(measured) / measured,
            prompt_context_s=self._measure_context(),
        )
        if key:
            leave_costs(run_dir, key, costs)
        return costs

    def _apply_costs(self, costs: StepCosts) -> None:
        """Derive from costs how many tokens a step may read and compute."""
        if costs.decode_context_s > 0:
            tokens = round(_DECODE_READ_S / costs.decode_context_s)
            self.decode_tokens = max(GATHER_TOKENS, tokens)
        if self.rank == 0:
            log.info("a step's decodes read at most %d tokens of context", self.decode_tokens)

        most = self.limits.prompt_tokens
        token_s = costs.prompt_token_s
        context_s = costs.prompt_context_s

        # The size of chunks is free if it changes no answer and is not configured.
        is_free = self.config.batching.prefill_chunk_tokens is None and not self.library_refusal
        self.prompt_tokens = chunk_tokens(token_s, most) if is_free else most
        deadline_s = self.config.limits.step_deadline
        cost = measured_cost(token_s, context_s, self.prompt_tokens, deadline_s, is_free=is_free)
        self.prompt_cost = cost

        deepest = cost.of(self.max_model_len - self.prompt_tokens, self.prompt_tokens)
        rows = min(deepest, cost.step_budget) + self.limits.max_sequences
        self.longest_step_s = rows * token_s + _DECODE_READ_S
        if self.rank:
            return

        log.info("a step computes at most %d prompt tokens", self.prompt_tokens)
        if cost.even_context < self.max_model_len:
            tokens = round(cost.even_context)
            log.info("a prompt token behind %d others costs twice as much as the first", tokens)

    def _measure_context(self) -> float:
        """Measure how many seconds each context token adds to the cost of a prompt token."""
        tokens = min(_DEEP_TOKENS, self.limits.prompt_tokens)
        context = min(_DEEP_CONTEXT, self.max_model_len - tokens)
        if context < _SHALLOW_CONTEXT:
            return 0.0

        first = self.runner.measure_prompt_seconds(tokens)
        deep = self.runner.measure_prompt_seconds(tokens, context)
        return max(0.0, deep - first) / (tokens * context)

    def close(self) -> None:
        """Close the transfer connections to the other ranks."""
        if self._group is not None:
            self._group.close()

    def _load(self) -> LoadedModel:
        config = self.config
        shard = None if self.layout.world == 1 else self._shard
        folder = Path(config.server.weights_dir)
        progress = self._progress("weights")
        calibration = Int4Calibration(is_at_load=True)

        loaded = load_weights(
            config.model, self.device, self.dtype, folder, progress, shard, calibration
        )
        self._whole = loaded.model_config
        if shard is None:
            return loaded

        return replace(
            loaded,
            model_config=rank_model_config(loaded.model_config, self.layout, self.rank),
            nbytes=held_bytes(loaded.tensors.values()),
        )

    def _shard(self, model_config: ModelConfig, encodings: dict[str, Encoding]) -> Slicer:
        """Return a slicer that cuts this rank's shard out of the model's tensors.

        Raises:
            WorkerStartError: the model cannot be sharded across the configured ranks.
        """
        pool = self.config.server.pool
        layout = self.layout
        try:
            check_model(pool, model_config, layout)
            check_groups(pool, model_config, encodings, layout)
        except LayoutError as error:
            raise WorkerStartError(str(error)) from error
        return Slicer(model_config, layout, self.rank, encodings)

    def _join_group(self, store: Path | None) -> PipelineRank:
        layout = self.layout
        if store is None:
            return PipelineRank()

        timeout_s = max(_TRANSFER_TIMEOUT_S, self.config.limits.step_deadline)
        self._group = RankGroup(layout, self.rank, store, self.device, timeout_s)

        limits = self.step_limits
        hidden = self.model_config.hidden
        rows = limits.product_rows(limits.max_tokens)
        size = transfer_bytes(layout, self.rank, rows, hidden, self.dtype.itemsize)
        self.ledger.reserve("transfers", size)

        max_batches = self.config.parallelism.micro_batches
        pipeline_rank = PipelineRank(
            self._group,
            rows,
            hidden,
            self.dtype,
            max_batches,
            splits_chunks=self.model_config.num_conv_layers == 0,
        )
        self.ledger.allocated("transfers", pipeline_rank.nbytes)
        return pipeline_rank

    def _log_decoder(self) -> None:
        """On a CPU, log whether the C++ library computes steps, or why torch does instead."""
        if self.rank or self.device.type != "cpu":
            return

        if not self.library_refusal:
            stored = "float8" if self.step_limits.fp8_kv else dtype_name(self.kv_type)
            log.info("the C++ library computes steps, with KV in %s", stored)
            return

        reason = self.library_refusal
        log.info("torch computes steps, slower than the C++ library, since %s", reason)
        if is_emulated(self.dtype, self.device):
            log.warning("this processor emulates bfloat16, slowly; model.dtype auto is faster here")

    def _fitting_blocks(self) -> int:
        """Return how many KV blocks fit in the memory of this rank's device.

        If none of this rank's layers store KV, the result is so high that it does not limit the
        other ranks.
        """
        chunk_blocks = -(-self.limits.prompt_tokens // self.step_limits.block_tokens)
        limit = kv_limit(self.config.memory, on_cpu=self.device.type == "cpu")
        return fitting_blocks(self.ledger, limit, self.runner.kv_block_bytes, chunk_blocks)

    def _reserve_host_kv(self) -> None:
        host_kv = self.config.memory.host_kv
        block = self.block_bytes
        if self._host_tier is not None and self.rank == 0:
            self.ledger.record_on_host("kv_host_tier", self._host_tier.num_bytes)

        if not host_kv:
            if self._host_kv_bytes():
                self.ledger.reserve("host_kv", self._host_kv_bytes())
            return

        if not self.num_host_slots:
            raise WorkerStartError(
                f"memory.hostKV: {host_kv} bytes hold no KV block of {block} bytes; "
                f"set {mib(block + (1 << 20))} or more, or 0 to recompute preempted sequences"
            )

        self.ledger.reserve("host_kv", self._host_kv_bytes())
        slots = self.num_host_slots
        if self.device.type != "cpu":
            pinned = whole_pages(slots * self.runner.kv_block_bytes)
            check_pinned(pinned, free_bytes() // self.layout.world, self.layout.world)
            self.ledger.record_on_host("pinned_host_kv", pinned)
        log.info("%s of host memory are %d slots for swapped KV", mib(slots * block), slots)

    def _host_kv_bytes(self) -> int:
        """Return how many bytes of device memory the host KV slots take up.

        On a CPU, the device is the host, so this is the size of this rank's part of all slots. On a
        GPU, it is the size of the two staging blocks through which slots are copied.
        """
        if self.device.type == "cpu":
            return self.runner.kv_block_bytes * self.num_host_slots
        is_staged = self.num_host_slots or self._host_tier is not None
        return self.runner.kv_block_bytes * 2 * bool(is_staged)

    def _shared_slots(self) -> torch.Tensor | None:
        """Return this rank's slice of the host tier as [slots, bytes], or None without a tier.

        Each slot contains the parts of all ranks in rank order.
        """
        if self._host_tier is None:
            return None

        arena = Arena.attach(*self._host_tier)
        arena.make_resident()
        self.meter.shared_bytes = arena.num_bytes if self.device.type == "cpu" else 0
        arena.cut(self.block_bytes)

        memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
        # Pinned until the process ends: the arena is the server's, and KV pools come and go.
        self._pinned_tier = PinnedMemory(memory, self.device, "memory.tiers.host")

        start = sum(self._part_bytes(rank) for rank in range(self.rank))
        slots = memory[: arena.num_slots * arena.slot_bytes].view(-1, arena.slot_bytes)
        return slots[:, start : start + self._part_bytes(self.rank)]

    def _part_bytes(self, rank: int) -> int:
        """Return the size of one rank's part of a KV block, in bytes."""
        limits = self.step_limits
        own = rank_model_config(self.model_config, self.layout, rank)
        return kv_block_bytes(own, limits.block_tokens, self.kv_itemsize, windowed=limits.windowed)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of everything that can affect the exact bits of answers.

        It stays the same across restarts.
        """
        assert self._loaded is not None, "load comes first"
        layout = self.layout
        encodings = self._loaded.encodings.values()
        is_fp8 = self.config.model.kv_dtype == "fp8"

        facts = {
            "engine": "ullage",
            "weights": self._loaded.content[:32],
            "model_config": digest_of(self.model_config),
            "dtype": dtype_name(self.dtype),
            "kv_dtype": "float8" if is_fp8 else dtype_name(self.kv_type),
            "quantization": "+".join(sorted({each.format for each in encodings})) or "none",
            "deterministic": yes_or_no(self.config.model.deterministic),
            "ranks": f"tensor {layout.tensor}, pipeline {layout.pipeline}",
            "device": self.device.type,
        }
        # On a CPU the library samples, even if torch computes the steps.
        order = canonical_order() if self.device.type == "cpu" else ""
        facts["build"] = build_digest(with_library=bool(order))
        if order:
            facts["order"] = order

        if not self.library_refusal:
            facts["computed_by"] = "library"
            return fingerprint_of(facts)

        # torch rounds differently on other processors and with other numbers of threads.
        facts["computed_by"] = "torch"
        facts["torch"] = str(torch.__version__)
        facts["processor"] = processor_of(self.device)
        if self.device.type == "cpu":
            facts["threads"] = str(torch.get_num_threads())
        return fingerprint_of(facts)

    @property
    def kv_space(self) -> bytes:
        """Namespace for the keys of KV blocks that this group stores outside the device.

        The namespace is empty if no blocks are stored there. This is the case if there is no host
        tier or no prefix cache, or if not even one block fits in the host tier.
        """
        if self._host_tier is None or self._host_tier.num_bytes < self.block_bytes:
            return b""
        if not self.config.memory.prefix_cache:
            return b""

        return namespace(
            {
                "layout": LAYOUT_VERSION,
                "fingerprint": self.fingerprint.digest,
                "block_tokens": self.step_limits.block_tokens,
                "block_bytes": self.block_bytes,
                "window_tokens": self.window_tokens,
            }
        )

    @property
    def proof_tolerance(self) -> float:
        """Maximum accepted difference between two starts' logits, as a fraction of their range.

        It is 0 if the logits must be bit-identical.
        """
        is_deterministic = not self.library_refusal or self.step_limits.deterministic
        is_exact = is_deterministic and self.device.type == "cpu"
        return tolerance(self.dtype, is_exact=is_exact)

    @cached_property
    def proof_file(self) -> ProofFile:
        """File that holds all ranks' proofs, against which later starts check their results.

        The property is available once the KV pool is allocated. The file's name depends on
        everything that may affect the bits of a proof, so that proofs are only compared under equal
        conditions.
        """
        layout = self.layout
        # The library adds in the same order with every instruction set. A proof still holds only
        # for the instruction set that computed it.
        processor = instruction_set() if not self.library_refusal else processor_of(self.device)
        steps = self.runner.probe_plans()

        facts = {
            "weights": self.loaded.content,
            "ranks": f"{layout.tensor} tensor, {layout.pipeline} pipeline",
            "micro_batches": str(self.config.parallelism.micro_batches),
            "limits": str(self.step_limits),
            "dtype": dtype_name(self.dtype),
            "kv_dtype": dtype_name(self.kv_type),
            "library": str(not self.library_refusal),
            "device": self.device.type,
            "processor": str(processor),
            "code": code_digest(Path(ullage_engine.__file__).parent / e for e in _COMPUTING_ROOMS),
            "torch": str(torch.__version__),
            "threads": str(torch.get_num_threads()) if self.library_refusal else "any",
            "cuda_graphs": str(self.config.cuda_graphs),
            "probe": str([[len(chunk.token_ids) for chunk in step.chunks] for step in steps]),
        }
        return ProofFile(Path(self.config.server.weights_dir), self.weights_key, facts)

    def _check_prices(self, kv_pool_bytes: int) -> None:
        """Check that the allocated buffers are as large as the cost formulas predict.

        Admission and the router use the same formulas to calculate how much requests cost.

        Raises:
            WorkerStartError: an allocation does not match its formula.
        """
        allocated = self.runner.allocated_bytes()
        if self.layout.world > 1:
            # Parts of a mapped file count with their own bytes, not with those of the whole file.
            assert self._loaded is not None, "load comes first"
            allocated["weights"] = held_bytes(self._loaded.tensors.values())

        priced = {
            "weights": self.runner.weights_bytes,
            "step_arena": self.runner.step_arena_bytes,
            "sampler_arena": self.runner.sampler_arena_bytes,
            "state_pool": self.runner.state_pool_bytes,
            "kv_pool": kv_pool_bytes,
        }

        error = wrong_price(priced, allocated)
        if error is not None:
            raise WorkerStartError(error)

    def _settle_workspace(self) -> None:
        """Record in the ledger how many bytes the workspace takes up at the end of startup.

        The workspace consists of the bytes that this process uses and that no other ledger entry
        accounts for. It may have shrunk, because the KV pool may have taken over freed parts of it.
        If more bytes are in use than were reserved for the workspace, for example by the pool's
        bookkeeping, the excess is recorded under the ledger entry `staging`.
        """
        entries = {entry.name: entry for entry in self.ledger.states()}
        workspace = entries["workspace"]
        staging = entries["staging"]
        accounted = self.ledger.allocated_bytes - workspace.allocated_bytes
        rest = max(0, self.meter.used_bytes() - accounted)
        self.ledger.allocated("workspace", min(rest, workspace.reserved_bytes))

        excess = rest - workspace.reserved_bytes
        self.ledger.allocated("staging", min(max(0, excess), staging.reserved_bytes))

    def _progress(self, stage: str) -> Callable[[int, int], None]:
        def report(done: int, total: int) -> None:
            self._report(Loading(stage=stage, done_bytes=done, total_bytes=total))

        return report


def fitting_blocks(ledger: Ledger, limit: int | None, block_bytes: int, chunk_blocks: int) -> int:
    """Return how many KV blocks fit on a device.

    Together, the blocks must be able to hold the largest prompt chunk.

    Args:
        ledger: the ledger of the device.
        limit: maximum total size of the blocks in bytes, or None for all remaining bytes of the
            ledger.
        block_bytes: bytes per block on this device.
        chunk_blocks: number of blocks that the largest prompt chunk needs.

    Raises:
        WorkerStartError: the limit is too small for a prompt chunk.
        LedgerError: the device is too small for a prompt chunk.
    """
    needed = chunk_blocks * block_bytes
    if limit is not None and limit < needed:
        raise WorkerStartError(
            f"memory.maxKV: {mib(limit)} is less than the {mib(needed)} of KV that one "
            f"prompt chunk needs; set {mib(needed + block_bytes)} or more"
        )

    available = ledger.available_bytes
    if available < needed:
        raise ledger.shortage("kv_pool", needed)

    return (available if limit is None else min(limit, available)) // max(1, block_bytes)


def read_layout(config: EngineConfig) -> RankLayout:
    """Read the tensor and pipeline parallel sizes from the configuration.

    Raises:
        WorkerStartError: the configuration is inconsistent, or incompatible with deterministic
            answers.
    """
    ranks = config.parallelism
    pool = config.server.pool
    try:
        layout = check_world(pool, config.gpus, ranks.tensor, ranks.pipeline)
    except LayoutError as error:
        raise WorkerStartError(str(error)) from error

    if config.model.deterministic and layout.tensor > 2:
        raise WorkerStartError(
            f"pools.{pool}.parallelism.tensor: sums over {layout.tensor} ranks have no fixed "
            "order, which spec.model.deterministic needs; set 2 or 1, or deterministic false"
        )
    return layout
