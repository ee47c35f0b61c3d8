"""Runs services with weights in int4, calibrated on the device, and in float8."""

import asyncio

from benchmarks.gpu.figures import Job, Report
from benchmarks.gpu.worker import serve_all

SERVICES = (("fp8", "auto"), ("int4", "auto"))


def run(job: Job, report: Report) -> None:
    services = SERVICES if not job.tiny else SERVICES[-1:]
    asyncio.run(serve_all(job, services, report))
