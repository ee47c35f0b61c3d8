"""Ullage's extension of vLLM's rank processes.

The extension lets the CPU model runner resume requests. A resumed request continues where a
previous worker's output ended. vLLM's scheduler treats that output like the output of a preempted
request, but passes only the prompt of a new request to the CPU model runner. The extension
therefore adds the output there. Penalties then account for it, and sampling continues the sequence
of random numbers instead of restarting it. The GPU model runner receives all tokens, and its random
numbers are a function of seed and position.

Each rank exits when the process that started it exits.
"""

import multiprocessing
import time
from typing import Any, Self

from ullage_engine.worker.forks import die_with_parent

RESUMED = "ullage_resumed"
"""Key in `extra_args` under which a request's output so far is passed, as a list of token ids."""

EXTENSION = f"{__name__}.WorkerExtension"
"""Name of the extension class, for vLLM's argument `worker_extension_cls`."""

_LARGEST_DRAW = 1 << 31
"""Upper bound on the random number that the CPU sampler draws per token of a seeded request."""


class WorkerExtension:
    """Methods that vLLM adds to its worker class, so that Ullage can call them on every rank."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make this rank's process exit when the process that started it exits.

        Without this, vLLM's ranks would check only between steps whether the parent has exited.
        """
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            die_with_parent(parent.pid)
        # Slow to import. A follower's first process manages vLLM's processes and does not compute.
        from ullage_engine.kernels.first_calls import make_first_calls

        # Make the first calls before vLLM computes its rotary tables with the libraries.
        make_first_calls()
        return super().__new__(cls)

    def ullage_digests(self, with_weights: bool) -> dict[str, str]:
        """Return digests of this rank's rotary tables, and of its weights if `with_weights`."""
        from ullage_engine.vllm_worker.proof import digest_model

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        return digest_model(runner.get_model(), with_weights=with_weights)

    def ullage_changed_table(self) -> str:
        """Recompute this rank's rotary tables, and compare them with the tables in memory.

        Returns:
            The name of a table that differs, or "" if none differs.
        """
        from ullage_engine.vllm_worker.proof import changed_table

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        return changed_table(runner.get_model(), runner.model_config.dtype)

    def ullage_warm_up(self) -> float:
        """Run the largest possible step, so that libraries and activations allocate their memory.

        On CPUs, vLLM skips this warm-up if the size of the KV pool is specified.

        Returns:
            CPU time of the step in seconds.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        runner.warming_up_model()
        # Take this thread's processor time, which is as much as that of any other compute thread.
        # Unlike wall time, it leaves out other processes on the same cores.
        began = time.thread_time()
        runner.profile_run()
        return time.thread_time() - began

    def ullage_free_first(self) -> int:
        """Return how many bytes were free on this rank's GPU before the weights were loaded.

        By then, the rank had already created its device context and transfer buffers. vLLM counts
        only memory that is allocated afterwards.
        """
        return int(self.init_snapshot.free_memory)  # type: ignore[attr-defined]

    def ullage_blank_slots(self) -> int:
        """Zero this rank's empty adapter slots to make them resident.

        Returns:
            The total size of these slots in bytes.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        num_bytes = {}  # by address, since tensors may share storage
        for module in runner.get_model().modules():
            for name, value in vars(module).items():
                if name.endswith("_stacked"):
                    for each in [value] if hasattr(value, "zero_") else value:
                        each.zero_()
                        storage = each.untyped_storage()
                        num_bytes[storage.data_ptr()] = storage.nbytes()
        return sum(num_bytes.values())

    def ullage_load_adapter(self, adapter: Any) -> str:
        """Load an adapter. Return an error message, or "" on success.

        vLLM's own RPC raises an error at the first rank that fails, and then mistakes the other
        ranks' replies for replies to the next RPC.
        """
        try:
            is_loaded = self.add_lora(adapter)  # type: ignore[attr-defined]
        except Exception as error:
            return _reason(error)
        return "" if is_loaded else "vLLM does not take it"

    def ullage_check_adapter(self, adapter: Any) -> str:
        """Read an adapter's files into host memory, as loading it would.

        Returns:
            An error message, or an empty string on success.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        try:
            runner.lora_manager._load_adapter(adapter)
        except Exception as error:
            return _reason(error)
        return ""

    def ullage_follow_resumed(self) -> None:
        """Make the CPU model runner include a resumed request's earlier output in its state."""
        # Slow to import. A follower's first process manages vLLM's processes and does not compute.
        import torch

        runner: Any = self.model_runner  # type: ignore[attr-defined]
        batch = getattr(runner, "input_batch", None)
        if batch is None or hasattr(runner, "req_states"):
            return  # the runner for GPUs
        add_request = batch.add_request

        def add(request: Any) -> Any:
            params = request.sampling_params
            sent = ((params.extra_args or {}) if params else {}).get(RESUMED)
            if sent and not request.output_token_ids:
                request.output_token_ids.extend(sent)
                if request.generator is not None:
                    for _ in sent:
                        torch.randint(0, _LARGEST_DRAW, (1,), generator=request.generator)
            return add_request(request)

        batch.add_request = add

    def ullage_receive_stages(self) -> None:
        """Allocate the CPU model runner's buffers for the previous pipeline stage's output.

        The runner itself allocates them only when it warms up compiled models.
        """
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        has_stages = runner.parallel_config.pipeline_parallel_size > 1
        if not has_stages or getattr(runner, "intermediate_tensors", ...) is not None:
            return
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
