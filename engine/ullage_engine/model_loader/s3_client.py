"""Client for a bucket in S3 or a compatible store. Lists objects, and reads headers and ranges.

Endpoint, region, credentials and certificates come from the environment, as for the AWS SDKs. The
AWS Common Runtime finds credentials, signs requests, and retries requests that the store
temporarily rejects. It is not imported until the first bucket is used.
"""

import os
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from ullage_engine.protocol.errors import WeightsError

UNSIGNED = "AWS_NO_SIGN_REQUEST"
"""Environment variable that enables access to public buckets without credentials."""

_PART_BYTES = 8 << 20
_CONNECTIONS = 8
_MEMORY_BYTES = 1 << 30
"""Memory limit of the AWS runtime in bytes, set to the smallest value that the runtime accepts."""
_LONGEST_ANSWER = 8 << 20
_MOST_OBJECTS = 10_000
_MOST_PAGES = 100
"""Maximum number of pages in a listing, including pages that list only folders."""
_TRY_LATER = (408, 412, 429)
"""Status codes below 500 that may be retried: timeout, changed object, too many requests."""
_REDIRECTS = (301, 307)
_WRONG_REGION = "AuthorizationHeaderMalformed"
"""Error code returned if a request was signed for a region other than the bucket's."""
_BUCKET = re.compile(r"[a-z0-9][-a-z0-9.]{1,61}[a-z0-9]")
_TRUE = ("1", "true", "yes")

_BUSY = "the store takes fewer requests than come; start again later, or raise its limits"
_REMEDIES = {
    "NoSuchBucket": "there is no such bucket; check the name, s3.endpoint and s3.region",
    "NoSuchKey": "the object is gone; name one that is there",
    "AccessDenied": "access is denied; allow s3:ListBucket and s3:GetObject to these credentials",
    "InvalidAccessKeyId": (
        "the access key is not known; correct the Secret of s3.secretName, and restart the engines"
    ),
    "SignatureDoesNotMatch": (
        "the secret key is wrong; correct the Secret of s3.secretName, and restart the engines"
    ),
    "ExpiredToken": (
        "the credentials have expired; renew those of s3.secretName, and restart the engines"
    ),
    "SlowDown": _BUSY,
    "TooManyRequests": _BUSY,
    "InternalError": "the store has failed; look at its log, and start again",
    "RequestTimeTooSkewed": "this machine's clock is wrong; set it",
}


_CODES = {403: "AccessDenied", 404: "NoSuchKey", 429: "SlowDown", 503: "SlowDown"}
"""Error codes to assume for responses without one, by HTTP status."""
_GAVE_UP = {
    "AWS_ERROR_S3_SLOW_DOWN": f"SlowDown: {_BUSY}",
    "AWS_ERROR_S3_INTERNAL_ERROR": f"InternalError: {_REMEDIES['InternalError']}",
}
"""Explanations of AWS runtime errors that do not include the store's response, by error name."""


class S3Error(Exception):
    """Raised if a request fails. The message states the cause and suggests a fix."""

    def __init__(self, text: str, *, is_outage: bool = False, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_outage = is_outage
        """Whether the store did not answer or was unable to serve the request."""
        self.is_final = is_final
        """Whether retrying is pointless until the user fixes the cause."""


class BucketError(WeightsError):
    """An `S3Error` that names the source, the bucket and the key."""

    def __init__(self, what: str, bucket: str, key: str, error: S3Error) -> None:
        super().__init__(f"{what}: bucket {bucket}, key {key!r}: {error}")
        self.is_outage = error.is_outage
        self.is_final = error.is_final


@dataclass(frozen=True, slots=True)
class Listed:
    """An object's entry in a bucket listing."""

    key: str
    size: int
    etag: str

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address and region of a bucket."""

    is_secure: bool
    host: str
    """Host and port, as in the Host header."""
    path: str
    """Path prefix of every key."""
    region: str

    @property
    def address(self) -> str:
        return f"{'https' if self.is_secure else 'http'}://{self.host}"


def endpoint_of(bucket: str, environ: Mapping[str, str]) -> Endpoint:
    """Return a bucket's endpoint, as configured by environment variables.

    Raises:
        S3Error: the bucket's name or the endpoint is invalid.
    """
    if not _BUCKET.fullmatch(bucket):
        raise S3Error(
            f"{bucket!r} is not a bucket's name; write 3 to 63 lower-case letters, digits, - and .",
            is_final=True,
        )
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    given = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if given:
        # The value may be a password, and errors are logged.
        if "@" in given:
            raise S3Error(
                "s3.endpoint has a user or a password before @, which requests would not use; "
                "write https://host or http://host, and put keys into the Secret of s3.secretName",
                is_final=True,
            )
        parts = _split(given)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/"):
            raise _no_address(given)
        return Endpoint(parts.scheme == "https", parts.netloc, f"/{bucket}/", region)
    suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    host = f"s3.{region}.{suffix}"
    if "." in bucket:  # a wildcard certificate does not cover a host with more dots
        return Endpoint(True, host, f"/{bucket}/", region)
    return Endpoint(True, f"{bucket}.{host}", "/", region)


def _split(endpoint: str) -> urllib.parse.SplitResult:
    try:
        return urllib.parse.urlsplit(endpoint)
    except ValueError as error:
        raise _no_address(endpoint) from error


def _no_address(endpoint: str) -> S3Error:
    return S3Error(
        f"s3.endpoint {endpoint!r} is no URL; write https://host or http://host", is_final=True
    )


class Bucket:
    """A bucket, accessed with credentials from the environment."""

    def __init__(self, bucket: str, environ: Mapping[str, str] = os.environ) -> None:
        """Set up the client without sending a request.

        Raises:
            S3Error: the environment variables are invalid, or the runtime is not installed.
        """
        self.name = bucket
        self.endpoint = endpoint_of(bucket, environ)
        try:
            from awscrt import auth, http, io, s3
        except ImportError as error:
            raise S3Error(
                "s3:// needs the awscrt package; pip install 'ullage[s3]', or use file://",
                is_final=True,
            ) from error
        self._http = http
        self._types = s3.S3RequestType
        bootstrap = io.ClientBootstrap(group := io.EventLoopGroup(1), io.DefaultHostResolver(group))
        signing = None
        if environ.get(UNSIGNED, "").lower() not in _TRUE:
            signing = s3.create_default_s3_signing_config(
                region=self.endpoint.region,
                credential_provider=_credentials(auth, bootstrap, environ),
            )
        tls_mode = s3.S3RequestTlsMode.DISABLED
        tls = None
        if self.endpoint.is_secure:
            tls_mode = s3.S3RequestTlsMode.ENABLED
            tls = _tls(io, environ)
        self._client = s3.S3Client(
            bootstrap=bootstrap,
            region=self.endpoint.region,
            tls_mode=tls_mode,
            tls_connection_options=tls,
            signing_config=signing,
            part_size=_PART_BYTES,
            max_active_connections_override=_CONNECTIONS,
            memory_limit=_MEMORY_BYTES,
            connect_timeout_ms=10_000,
        )

    def objects(self, prefix: str) -> Iterator[Listed]:
        """Yield the objects whose keys begin with a prefix, skipping objects in subfolders.

        Raises:
            S3Error: the objects cannot be listed, or there are too many for a model's folder.
        """
        query = {"list-type": "2", "delimiter": "/", "encoding-type": "url", "prefix": prefix}
        num_objects = 0
        for _ in range(_MOST_PAGES):
            encoded = urllib.parse.urlencode(query, quote_via=urllib.parse.quote)
            path = f"{self.endpoint.path}?{encoded}"
            page = _xml(self._answer("GET", path, "ListObjectsV2")[1])
            for item in _listed(page, prefix):
                yield item
                num_objects += 1
            if page.findtext("IsTruncated") != "true":
                return
            if num_objects > _MOST_OBJECTS:
                break
            query["continuation-token"] = page.findtext("NextContinuationToken", "")
        raise S3Error(
            f"more than {_MOST_OBJECTS} objects or folders are there; name a model's folder",
            is_final=True,
        )

    def head(self, item: Listed) -> dict[str, str]:
        """Return the headers of a listed object, including its checksums.

        Raises:
            S3Error: the object has changed since the listing, or cannot be read.
        """
        asked = {"If-Match": item.etag, "x-amz-checksum-mode": "ENABLED"}
        return self._answer("HEAD", self._path(item.key), "HeadObject", asked)[0]

    def read(self, item: Listed, start: int, take: Callable[[memoryview], None]) -> None:
        """Pass the bytes of a listed object to `take`, chunk by chunk, beginning at offset `start`.

        All calls are made by one thread.

        Raises:
            S3Error: the object has changed, or the store ended the response early and retries
                failed.
            OSError: `take` raised this error.
        """
        asked = {"If-Match": item.etag, "Range": f"bytes={start}-"}
        position = start
        failed: Future[None] = Future()

        def on_body(chunk: Any, offset: int, **_: Any) -> None:
            nonlocal position
            if failed.done():
                return
            try:
                if offset != position:
                    raise S3Error(f"the store sent byte {offset} instead of byte {position}")
                if position + len(chunk) > item.size:
                    raise S3Error(f"the store sent more than the {item.size} bytes that it listed")
                take(memoryview(chunk))
                position += len(chunk)
            except Exception as error:
                failed.set_exception(error)

        request, done = self._send("GET", self._path(item.key), "", asked, on_body=on_body)
        wait([request.finished_future, failed], return_when=FIRST_COMPLETED)
        if failed.done():
            request.cancel()
        try:
            request.finished_future.result()
        except (Exception, CancelledError) as error:
            if not failed.done():
                cause = _error_of(error, done, self.endpoint)
                raise _ended_early(cause, position, item.size) from error
        if failed.done():
            failed.result()
        if position != item.size:
            raise S3Error(f"the store sent {position} of {item.size} bytes; start again")

    def _path(self, key: str) -> str:
        return self.endpoint.path + urllib.parse.quote(key, "/")

    def _answer(
        self, method: str, path: str, operation: str, asked: Mapping[str, str] | None = None
    ) -> tuple[dict[str, str], bytes]:
        body = bytearray()

        def on_body(chunk: Any, **_: Any) -> None:
            if len(body) <= _LONGEST_ANSWER:
                body.extend(chunk)

        request, done = self._send(method, path, operation, asked or {}, on_body=on_body)
        try:
            request.finished_future.result()
        except Exception as error:
            raise _error_of(error, done, self.endpoint) from error
        return done["headers"], bytes(body)

    def _send(
        self,
        method: str,
        path: str,
        operation: str,
        asked: Mapping[str, str],
        on_body: Callable[..., None],
    ) -> tuple[Any, dict[str, Any]]:
        """Start a request, and return the request and a dictionary for its results.

        The response's headers and the outcome are added to the dictionary as they become known.
        """
        done: dict[str, Any] = {"headers": {}}

        def on_headers(headers: list[tuple[str, str]], **_: Any) -> None:
            done["headers"] = {name.lower(): value for name, value in headers}

        def on_done(**outcome: Any) -> None:
            done.update(outcome)

        headers = self._http.HttpHeaders([("Host", self.endpoint.host), *asked.items()])
        request = self._client.make_request(
            type=self._types.DEFAULT if operation else self._types.GET_OBJECT,
            request=self._http.HttpRequest(method, path, headers),
            operation_name=operation or None,
            on_headers=on_headers,
            on_body=on_body,
            on_done=on_done,
        )
        return request, done


def _credentials(auth: Any, bootstrap: Any, environ: Mapping[str, str]) -> Any:
    """Return a provider of credentials from the environment or the SDKs' default chain.

    Only the default chain needs the system's CA certificates, which a container image may lack.
    """
    if environ.get("AWS_ACCESS_KEY_ID"):
        return auth.AwsCredentialsProvider.new_environment()
    try:
        return auth.AwsCredentialsProvider.new_default_chain(bootstrap)
    except RuntimeError as error:
        raise S3Error(
            f"the pod's identity cannot be used: {error}; install ca-certificates in the image, or "
            "name a Secret in s3.secretName",
            is_final=True,
        ) from error


def _tls(io: Any, environ: Mapping[str, str]) -> Any:
    """Return TLS options with the CA certificates from AWS_CA_BUNDLE or from certifi.

    The container image itself may have no CA certificates.
    """
    path = environ.get("AWS_CA_BUNDLE")
    if not path:
        import certifi

        path = certifi.where()
    try:
        with open(path, "rb") as file:
            certificates = file.read()
    except OSError as error:
        raise S3Error(
            f"AWS_CA_BUNDLE {path}: {error.strerror}; name a file of certificates", is_final=True
        ) from error
    options = io.TlsContextOptions()
    options.override_default_trust_store(certificates)
    try:
        return io.ClientTlsContext(options).new_connection_options()
    except Exception as error:  # the runtime raises several kinds
        raise S3Error(
            f"AWS_CA_BUNDLE {path} cannot be used: {error}; name a file of certificates in PEM",
            is_final=True,
        ) from error


def _listed(page: ElementTree.Element, prefix: str) -> Iterator[Listed]:
    """Yield the objects on a listing page that are directly in the folder, skipping subfolders."""
    is_encoded = page.findtext("EncodingType") == "url"
    for item in page.iter("Contents"):
        key = item.findtext("Key", "")
        size = item.findtext("Size", "")
        key = urllib.parse.unquote_plus(key) if is_encoded else key
        if not key.startswith(prefix):
            raise S3Error(
                f"the store lists {key!r}, which does not begin with {prefix!r}; check s3.endpoint",
                is_final=True,
            )
        if not size.isascii() or not size.isdecimal():
            raise S3Error(f"the store lists {key!r} with size {size!r}; check s3.endpoint")
        # Some stores list objects in subfolders, too. A file's name cannot contain NUL.
        if "/" not in key[len(prefix) :] and "\0" not in key:
            yield Listed(key, int(size), item.findtext("ETag", ""))


def _xml(body: bytes) -> ElementTree.Element:
    """Return the root element of an XML response, with the namespace removed."""
    try:
        root = ElementTree.fromstring(re.sub(rb'\sxmlns="[^"]*"', b"", body, count=1))
    except ElementTree.ParseError as error:
        raise S3Error(f"the answer is not S3's ({error}); check s3.endpoint") from error
    return root


def _error_of(error: BaseException, done: Mapping[str, Any], endpoint: Endpoint) -> S3Error:
    status = done.get("status_code")
    name = getattr(error, "name", type(error).__name__)
    # An answer that began with success and broke off is no refusal.
    if status is None or 200 <= status < 300:
        return _outage(name, getattr(error, "message", str(error)), endpoint)
    fault = _Fault.of(done.get("error_body") or b"")
    region = fault.region or endpoint.region
    # Some stores name their region in every answer, so other answers do not show the cause.
    if status in _REDIRECTS or fault.code == _WRONG_REGION:
        headers = {key.lower(): value for key, value in done.get("error_headers") or ()}
        region = headers.get("x-amz-bucket-region") or region
    if region != endpoint.region:
        return S3Error(f"the bucket is in {region}; set s3.region to it", is_final=True)
    if status == 412:
        return S3Error("it has changed since it was listed; start again")
    # An answer to HEAD has only a status.
    code = fault.code or _CODES.get(status, "")
    remedy = _REMEDIES.get(code, "check s3.endpoint, s3.region and the credentials")
    said = " ".join(f"{status} {code} {fault.message}".split())
    return S3Error(
        f"{said}: {remedy}",
        is_outage=status >= 500 or status == 429,
        is_final=status < 500 and status not in _TRY_LATER,
    )


def _outage(name: str, reason: str, endpoint: Endpoint) -> S3Error:
    """Return the error for a request that could not be sent or that received no response."""
    if name in _GAVE_UP:
        return S3Error(_GAVE_UP[name], is_outage=True)
    # The service that issues credentials may be unavailable, just like the store.
    if "CREDENTIALS" in name:
        return S3Error(
            "there are no credentials; name a Secret in s3.secretName, give the pod a cloud "
            "identity by serviceAccount, or set s3.anonymous for a public bucket",
            is_outage=True,
        )
    return S3Error(
        f"{endpoint.address} cannot be reached ({name}: {reason}); check s3.endpoint and the "
        "network",
        is_outage=True,
    )


def _ended_early(error: S3Error, position: int, size: int) -> S3Error:
    """Return the error for an incomplete response, with the number of bytes received."""
    if not error.is_outage or not position:
        return error
    return S3Error(f"the download ended after {position} of {size} bytes: {error}", is_outage=True)


@dataclass(frozen=True, slots=True)
class _Fault:
    """The error code and message from the XML body of a store's error response.

    All fields are empty if the body cannot be parsed.
    """

    code: str = ""
    message: str = ""
    region: str = ""
    """Region that the store expects, or "" if the region did not cause the error."""

    @classmethod
    def of(cls, body: bytes) -> "_Fault":
        try:
            root = _xml(body)
        except S3Error:
            return cls()
        code = root.findtext("Code", "")[:100]
        # Some stores write their region into every error.
        is_of_region = code == _WRONG_REGION
        region = root.findtext("Region", "")[:100] if is_of_region else ""
        return cls(code, root.findtext("Message", "")[:300], region)
