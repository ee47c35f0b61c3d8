"""Measures LFM2-8B-A1B with seeded random weights in samples/s to logits, and checks the logits.

`python -m benchmarks.gpu.lfm2` runs only this benchmark, also with other sizes and several stages.
"""

import torch

from benchmarks.gpu.figures import Fact, Job, Report
from benchmarks.gpu.float32 import describe
from benchmarks.gpu.lfm2.measure import figures


def run(job: Job, report: Report) -> None:
    device = torch.device(job.device)
    for figure in figures(device, job.tiny):
        report(figure)
    report(Fact("float32", describe(device)))
