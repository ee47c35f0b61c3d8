"""Offline inference in Python: `LLM(model).generate(prompts, sampling_params)`, as in vLLM.

    from ullage import LLM, SamplingParams

An `LLM` is a service of its own, which `ullage up` runs in a child process. So prompts are admitted
and healed as those of any service. The package knows the router's reading of OpenAI's bodies, and
neither torch nor the engine.
"""

from ullage_offline.llm import LLM
from ullage_offline.outputs import CompletionOutput, Logprob, RequestOutput
from ullage_offline.sampling import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]
