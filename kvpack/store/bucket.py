"""Object storage through obstore: names, conditional writes and ranges; every failure is a StoreError.

An object that is not there is an answer (None), not an error. ``round_trips`` counts requests as a caller waits for
them: those that run at once count as one.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import parse_qs, urlsplit

from kvpack.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SCHEMES", "Bucket", "Found", "S3Access"]

SCHEMES: Final = ("s3", "gs", "az", "http", "https")
PARALLEL: Final = 16
_LIST_PAGE: Final = 1000
_TIMEOUT: Final = "60s"
_CONNECT_TIMEOUT: Final = "5s"
_RETRIES: Final = 2
_RETRY_SECONDS: Final = 10

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Found:
    """One object: its name under the store's prefix, bytes, entity tag, and when it was written (since 1970)."""

    name: str
    size: int
    e_tag: str | None
    modified: float


@dataclass(frozen=True)
class S3Access:
    """What a request to S3 is signed with, and where it goes; the secrets stay out of every text."""

    endpoint: str
    bucket: str
    prefix: str
    region: str
    key_id: str
    secret: str
    token: str | None

    def __repr__(self) -> str:
        return f"S3Access({self.endpoint}/{self.bucket})"


class Bucket:
    """The objects under one URL: ``s3://bucket/prefix``, ``gs:``, ``az:``, or ``http(s):`` to read only.

    Of S3 the endpoint and the region may stand in the URL (``?endpoint=http://host:port&region=…``); credentials come
    from ``config`` or the environment, as obstore reads them, and never from the URL.
    """

    def __init__(self, url: str, *, config: dict[str, str] | None = None) -> None:
        """Nothing is asked yet. Raises StoreError ``missing-extra``, ``bad-url``."""
        try:
            import obstore
            from obstore import store as stores
        except ImportError:
            raise StoreError(
                "missing-extra", "object storage needs obstore", found="obstore", hint="pip install 'kvpack[s3]'"
            ) from None
        self._obstore: Any = obstore
        open_url: Any = stores.from_url
        self.round_trips = 0
        parts = urlsplit(url)
        self.scheme = parts.scheme
        self.read_only = parts.scheme in ("http", "https")
        self.url = url.partition("?")[0].rstrip("/")
        if parts.scheme not in SCHEMES or not parts.netloc or parts.username or parts.password:
            raise StoreError(
                "bad-url", "the URL of a bucket is s3://bucket/prefix, without a password", found=parts.scheme
            )
        given = dict(config or {})
        if not self.read_only and parts.query:
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            unknown = sorted(set(query) - {"endpoint", "region"})
            if unknown:
                raise StoreError("bad-url", f"a bucket's URL takes endpoint and region, not {unknown[0]}", found=url)
            given = query | given
        self._access = _s3_access(parts.netloc, parts.path.strip("/"), given) if self.scheme == "s3" else None
        plain = (self._access.endpoint if self._access else url).startswith("http://")
        try:
            self._store: Any = open_url(
                self.url,
                client_options={"timeout": _TIMEOUT, "connect_timeout": _CONNECT_TIMEOUT, "allow_http": plain},
                retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)},
                **({"config": given} if given else {}),
            )
        except obstore.exceptions.BaseError as error:
            raise StoreError("bad-url", f"{self.url}: {_brief(error)}", found=self.url) from None

    @property
    def s3_access(self) -> S3Access | None:
        """What signs requests that obstore has no verb for; None where there are no long-lived keys."""
        return self._access if self._access is not None and self._access.key_id else None

    @contextmanager
    def _asking(self, name: str) -> Iterator[None]:
        self.round_trips += 1
        errors = self._obstore.exceptions
        try:
            yield
        except (errors.AlreadyExistsError, errors.PreconditionError):
            raise
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise StoreError("no-such-bucket", f"there is no bucket {self.url}", found=self.url) from None
            raise
        except (errors.BaseError, OSError) as error:
            raise _store_error(errors, error, f"{self.url}: {name}", self.url) from None

    def many(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """``work`` of every item at once, in their order; one round trip. The first error is raised."""
        items = list(items)
        if len(items) < 2:
            return [work(item) for item in items]
        before = self.round_trips
        with ThreadPoolExecutor(min(PARALLEL, len(items)), thread_name_prefix="kvpack-bucket") as pool:
            found = list(pool.map(work, items))
        self.round_trips = before + 1
        return found

    def get(self, name: str) -> tuple[bytes, str | None] | None:
        """A small object and its entity tag, or None."""
        try:
            with self._asking(name):
                answer = self._obstore.get(self._store, name)
                return bytes(answer.bytes()), answer.meta["e_tag"]
        except FileNotFoundError:
            return None

    def read(self, name: str, offset: int, length: int) -> tuple[Any, int] | None:
        """A buffer with at most ``length`` bytes from ``offset`` on, and the size of the object; None without one."""
        try:
            with self._asking(name):
                try:
                    answer = self._obstore.get(self._store, name, options={"range": (offset, offset + length)})
                    return answer.bytes(), int(answer.meta["size"])
                except self._obstore.exceptions.BaseError as error:
                    if "416" not in str(error):  # the range begins behind the end
                        raise
            found = self.head(name)
            return None if found is None else (b"", found.size)
        except FileNotFoundError:
            return None

    def head(self, name: str) -> Found | None:
        """What is known of an object without reading it, or None."""
        try:
            with self._asking(name):
                return _found(self._obstore.head(self._store, name))
        except FileNotFoundError:
            # A bucket that vanished answers HEAD as one that lacks the object.
            return None

    def create(self, name: str, content: Any) -> bool:
        """Write an object that is not there yet; False if it is."""
        try:
            with self._asking(name):
                self._obstore.put(self._store, name, content, mode="create")
        except self._obstore.exceptions.AlreadyExistsError:
            return False
        except FileNotFoundError:
            raise StoreError("no-such-bucket", f"there is no bucket {self.url}", found=self.url) from None
        return True

    def replace(self, name: str, content: Any, e_tag: str | None) -> bool:
        """Write over the version that ``e_tag`` names; False if it is another one by now."""
        try:
            with self._asking(name):
                self._obstore.put(self._store, name, content, mode={"e_tag": e_tag})
        except (self._obstore.exceptions.PreconditionError, FileNotFoundError):
            return False
        return True

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are no error."""

        def one(name: str) -> None:
            try:
                with self._asking(name):
                    self._obstore.delete(self._store, name)
            except FileNotFoundError:
                return

        self.many(one, names)

    def move(self, source: str, target: str) -> bool:
        """Copy an object to another name, on the server, and remove it; False if it is not there."""
        try:
            with self._asking(source):
                self._obstore.copy(self._store, source, target)
        except FileNotFoundError:
            return False
        self.delete([source])
        return True

    def list(self, prefix: str, after: str | None = None) -> list[Found]:
        """Every object under ``prefix/`` (by whole path segments), in the order of names, behind ``after``."""
        with self._asking(prefix or "its list"):
            pages = self._obstore.list(self._store, prefix or None, offset=after, chunk_size=_LIST_PAGE)
            found = [_found(meta) for page in pages for meta in page]
        return sorted(found, key=lambda entry: entry.name)

    def require_conditional_writes(self) -> None:
        """Try both kinds of conditional write; raises StoreError ``no-conditional-writes`` if one is not honoured."""
        name = f"probe/{secrets.token_hex(16)}"
        try:
            honoured = self.create(name, b"1") and not self.create(name, b"2")
            present = self.get(name)
            honoured = honoured and present is not None and self.replace(name, b"3", present[1])
            honoured = honoured and present is not None and not self.replace(name, b"4", present[1])
        except StoreError as error:
            # A server may also refuse what it does not know.
            if error.code != "not-supported":
                raise
            honoured = False
        with suppress(StoreError):  # a probe that stays does no harm
            self.delete([name])
        if not honoured:
            raise StoreError(
                "no-conditional-writes",
                f"{self.url} does not honour conditional writes, so writers would overwrite each other",
                found=self.url,
                hint="use a server with If-None-Match and If-Match, or open it read_only",
            )


def _s3_access(bucket: str, prefix: str, given: dict[str, str]) -> S3Access:
    def value(*names: str) -> str:
        known = {name.lower().removeprefix("aws_"): text for name, text in given.items()}
        own = (known.get(name) for name in names)
        around = (os.environ.get(f"AWS_{name.upper()}") for name in names)
        return next((text for text in (*own, *around) if text), "")

    region = value("region", "default_region") or "us-east-1"
    endpoint = value("endpoint", "endpoint_url") or f"https://s3.{region}.amazonaws.com"
    return S3Access(
        endpoint=endpoint.rstrip("/"),
        bucket=bucket,
        prefix=prefix,
        region=region,
        key_id=value("access_key_id"),
        secret=value("secret_access_key"),
        token=value("session_token", "token") or None,
    )


def _found(meta: Any) -> Found:
    return Found(meta["path"], int(meta["size"]), meta["e_tag"], meta["last_modified"].timestamp())


def _brief(error: BaseException) -> str:
    return str(error).split("\n", 1)[0].split(": <?xml", 1)[0][:300]


def _store_error(errors: Any, error: BaseException, what: str, url: str) -> StoreError:
    if isinstance(error, (errors.PermissionDeniedError, errors.UnauthenticatedError, PermissionError)):
        return StoreError(
            "access-denied", f"{what}: the server refuses these credentials", found=url, hint="check the credentials"
        )
    if isinstance(error, errors.NotSupportedError):
        return StoreError("not-supported", f"{what}: {_brief(error)}", found=url)
    if "NoSuchBucket" in str(error):
        return StoreError("no-such-bucket", f"there is no bucket {url}", found=url)
    return StoreError("unreachable", f"{what}: {_brief(error)}", found=url, hint="check the server and try again")
