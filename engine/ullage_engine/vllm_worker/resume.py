"""How a request goes on in vLLM's model runner where a former worker's output ended.

vLLM's scheduler is told which tokens of a request are output, as of one that it has preempted. The
model runner for CPUs gets only the prompt of what is new to it, so it is told, too: penalties then
count that output, and the noise of sampling goes on instead of beginning again. The runner for GPUs
needs no telling: it gets all tokens, and its noise is a function of seed and position.
"""

from typing import Any

import torch

RESUMED = "ullage_resumed"
"""Name under `extra_args` of a request's output so far, a list of token ids."""

EXTENSION = f"{__name__}.WorkerExtension"
"""What `worker_extension_cls` names."""

_LARGEST_DRAW = 1 << 31
"""Bound of the number that the sampler for CPUs draws for each token of a seeded request."""


class WorkerExtension:
    """Methods that every vLLM worker has, in whatever process it is."""

    def ullage_warm_up(self) -> None:
        """Computes the largest step, which takes what libraries and activations need. On CPUs vLLM
        leaves it out where it is told how large the KV pool is."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        runner.warming_up_model()
        runner.profile_run()

    def ullage_follow_resumed(self) -> None:
        """Makes the model runner count a request's former output as its own."""
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
