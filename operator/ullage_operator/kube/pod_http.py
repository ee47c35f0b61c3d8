"""Asks pods over HTTP, with bounds on time and size.

The pods' metrics port is plaintext and needs no key, whatever TLS and keys a service asks of its
clients.
"""

import aiohttp

from ullage_operator.api.errors import Temporary


class PodUnavailable(Temporary):
    """A pod did not answer in time, or with anything that could be used."""


class PodHttp:
    """One pool of connections to the pods of all services."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    async def get(
        self, url: str, *, timeout_s: float, max_bytes: int, connect_s: float | None = None
    ) -> bytes:
        """The body of the answer.

        Raises:
            PodUnavailable: there is none.
        """
        if self._session is None:
            # Unlimited: every service that sleeps holds a question at each of its routers, and a
            # connection that is waited for would count as one that fails.
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
