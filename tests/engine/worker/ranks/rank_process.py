"""One rank of several groups, one after the other: computes recorded plans, writes its tokens.

usage: rank_process.py RANK CASES, a JSON list of {config, plans, store, out}. Exits when its
standard input closes before it is done.
"""

import json
import sys
from pathlib import Path

import msgspec

from ullage_common.config.engine import EngineConfig
from ullage_common.process.config_file import read_file
from ullage_engine.protocol.step_plan import StepPlan
from ullage_engine.worker.rank import RankStartup


def compute(case: dict[str, str], rank: int) -> None:
    config = read_file(Path(case["config"]), EngineConfig)
    own = RankStartup(config, rank, lambda loading: None)
    if rank >= own.layout.world:
        return
    own.load()
    own.allocate_arenas(Path(case["store"]))
    own.warm_up()
    own.allocate_kv(128)
    own.finalize()
    plans = msgspec.msgpack.decode(Path(case["plans"]).read_bytes(), type=list[StepPlan])
    tokens = [[token.token_id for token in own.runner.execute(plan)] for plan in plans]
    scored = own.runner.take_prompt_logprobs()
    own.close()
    if rank == own.layout.sampling_rank:
        scores = [(part.request_id, part.start, part.logprobs.hex()) for part in scored]
        Path(case["out"]).write_text(json.dumps({"tokens": tokens, "scores": scores}))
    else:
        assert not any(tokens), "only one rank samples"
        assert not scored, "only one rank scores"


if __name__ == "__main__":
    for each in json.loads(sys.argv[2]):
        compute(each, int(sys.argv[1]))
