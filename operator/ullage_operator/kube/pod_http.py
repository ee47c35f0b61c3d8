"""HTTP requests to pods, with limits on response time and size.

The metrics port of a pod uses plaintext without API keys, even if the service uses TLS and keys.
"""

import aiohttp

from ullage_operator.api.errors import Temporary


class PodUnavailable(Temporary):
    """A pod did not respond in time, or its response is unusable."""


class PodHttp:
    """A pool of connections to the pods of all services."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    async def get(
        self, url: str, *, timeout_s: float, max_bytes: int, connect_s: float | None = None
    ) -> bytes:
        """Return the body of the response to a GET request.

        Raises:
            PodUnavailable: the pod did not respond in time, or responded with an error or too much
                data.
        """
        if self._session is None:
            # Every sleeping service holds a long poll at each of its routers. With a limit, waiting
            # for a connection would count as a failure.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=connect_s)
        try:
            async with self._session.get(url, timeout=timeout) as response:
                response.raise_for_status()
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > max_bytes:
                        raise ValueError(f"more than {max_bytes} bytes")
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            raise PodUnavailable(str(error) or type(error).__name__) from error
        return bytes(body)
