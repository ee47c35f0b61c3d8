"""Tokenises eight texts of 8 MB at once and prints by how many bytes the process grew at its peak.

python long_texts.py KIND
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from test_text_bounds import KINDS
from tokenizers import AddedToken

from ullage.inference.v1 import inference_pb2
from ullage_common.config.router import CleanseSection
from ullage_common.process.memory import return_large_blocks
from ullage_common.wire.errors import ServiceError
from ullage_router.intake import IntakeThread
from ullage_router.prompts.prompts import PromptBuilder
from ullage_router.prompts.threads import TokenizerThreads
from ullage_router.tokenizer.model import Model, load_model

SIZE = 8 << 20
TEXTS = (
    "a",
    " ",
    "a b ",
    "-",
    "line 12\n",
    "\u4f60\u597d\u3002\n",
    "e\u0301",
    "Some <words> of code_and | more 3x5, as usual. ",
)


@dataclass
class LongContext:
    """What of `Engines` a prompt is measured by."""

    max_model_len: int = 1 << 17


def requests() -> list[inference_pb2.GenerateRequest]:
    made = []
    for part in TEXTS:
        text = part * (SIZE // len(part.encode()))
        made.append(inference_pb2.GenerateRequest(text=text))
    return made


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


async def build(model: Model, asked: Sequence[inference_pb2.GenerateRequest]) -> list[object]:
    threads = TokenizerThreads()
    intake = IntakeThread()
    builder = PromptBuilder(CleanseSection(), None, LongContext(), threads, intake)  # type: ignore[arg-type]
    tasks = [builder.build(model, request, f"tenant {i}") for i, request in enumerate(asked)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    threads.close()
    intake.close()
    return results


def main(kind: str) -> None:
    return_large_blocks()
    tokenizer = KINDS[kind]()
    # With a token of this length none of the texts is too long by its characters alone.
    tokenizer.add_tokens([AddedToken("x" + "_" * 90, normalized=False)])
    response = inference_pb2.GetModelResponse(tokenizer_json=tokenizer.to_str().encode())
    model = load_model(response)
    asyncio.run(build(model, [inference_pb2.GenerateRequest(text="a b " * 5000)]))
    asked = requests()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = peak()
    results = asyncio.run(build(model, asked))
    for result in results:
        assert isinstance(result, ServiceError), result
        assert result.metadata["field"] == "prompt", result
    print(peak() - before)


if __name__ == "__main__":
    main(sys.argv[1])
