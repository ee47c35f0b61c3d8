"""Finds the tenant of a request, which may come from a client or from a batch."""

from collections.abc import Iterable

from ullage.inference.v1 import inference_pb2
from ullage_common.wire.limits import MAX_PRIORITY
from ullage_router.http.messages import Request
from ullage_router.tenants.registry import Tenants
from ullage_router.tenants.session import TenantSession


def open_session(tenants: Tenants, request: Request, authorization: str | None) -> TenantSession:
    """Open a session for the tenant of a request.

    Args:
        tenants: The tenants.
        request: The request.
        authorization: The client's credentials.

    Raises:
        ServiceError: The key is missing or unknown, or the tenant may send no requests.
    """
    if request.batch_tenant is not None:
        return tenants.open_session_of(request.batch_tenant)
    return tenants.open_session(authorization)


def set_priority(request: Request, asked: Iterable[inference_pb2.GenerateRequest]) -> None:
    """Give the requests of batches the lowest priority."""
    if request.batch_tenant is None:
        return
    for one in asked:
        one.priority = -MAX_PRIORITY
