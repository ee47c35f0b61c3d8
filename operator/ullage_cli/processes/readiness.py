"""Waits until pods are ready, with the same probes that the kubelet would use."""

import asyncio
import contextlib

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ullage_cli.local.pods import Pod
from ullage_cli.local.ports import LOOPBACK
from ullage_common.wire.channels import open_channel

POLL_S = 0.1
PROBE_TIMEOUT_S = 2.0


async def wait_ready(pod: Pod) -> None:
    """Wait until the pod passes its readiness probe, however long that takes.

    As in Kubernetes, a pod without a probe is ready when it starts. Pods without ports have no
    probe.
    """
    if not pod.ports:
        return
    if "probe" in pod.ports:
        await _wait_grpc(f"{LOOPBACK}:{pod.ports['probe']}")
    elif "http" in pod.ports:
        await _wait_http(f"http://{LOOPBACK}:{pod.ports['http']}/readyz")
    else:
        await _wait_grpc(f"{LOOPBACK}:{pod.ports['grpc']}")


async def _wait_http(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=PROBE_TIMEOUT_S) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(url)).is_success:
                    return
            await asyncio.sleep(POLL_S)


async def _wait_grpc(target: str) -> None:
    request = health_pb2.HealthCheckRequest(service="readiness")
    async with open_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await stub.Check(request, timeout=PROBE_TIMEOUT_S)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(POLL_S)
