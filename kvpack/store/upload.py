"""Uploading a pack so that a dead writer's upload goes on: S3's multipart verbs, which obstore does not show.

The parts of an upload that was never completed stay on the server, under the name that they are for. A writer of the
same pack finds them there, holds the hash that the server names for each against its own bytes, and sends the rest.
Nothing is kept on this machine. Where there are no long-lived keys to sign with, or the storage is not S3, the upload
is obstore's own and begins anew.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree

from kvpack.errors import StoreError
from kvpack.store.bucket import Bucket, S3Access

__all__ = ["PART_BYTES", "abort_uploads", "upload"]

PART_BYTES: Final = 16 << 20
_PARALLEL: Final = 8
_MAX_PARTS: Final = 10_000
_ATTEMPTS: Final = 3
_TIMEOUT: Final = 60.0


def upload(
    bucket: Bucket,
    name: str,
    path: Path,
    *,
    before_complete: Callable[[], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> bool:
    """Send the file ``path`` as the new object ``name``; False if that is there already, and nothing was changed.

    ``before_complete`` runs before the object becomes visible; what it raises leaves the parts for another try.
    ``on_bytes`` is told how many bytes are there. Raises StoreError.
    """
    size = path.stat().st_size
    access = bucket.s3_access
    if size > PART_BYTES and access is not None:
        return _Multipart(access, name, path, size, on_bytes or (lambda count: None)).send(before_complete)
    if before_complete is not None:
        before_complete()
    made = bucket.create(name, path if size > PART_BYTES else path.read_bytes())
    if on_bytes is not None:
        on_bytes(size)
    return made


@dataclass(frozen=True)
class _Part:
    number: int
    offset: int
    length: int


class _Multipart:
    def __init__(self, access: S3Access, name: str, path: Path, size: int, on_bytes: Callable[[int], None]) -> None:
        self._s3 = _S3(access)
        self._key = f"{access.prefix}/{name}".strip("/")
        self._path = path
        self._on_bytes = on_bytes
        # The same file gives the same parts each time.
        length = max(PART_BYTES, -(-size // _MAX_PARTS // PART_BYTES) * PART_BYTES)
        self._parts = [
            _Part(number, at, min(length, size - at)) for number, at in enumerate(range(0, size, length), start=1)
        ]

    def send(self, before_complete: Callable[[], None] | None) -> bool:
        if self._s3.call("HEAD", self._key, allowed=(404,)).status == 200:
            return False
        upload_id, present = self._begun()
        tags = self._send_parts(upload_id, present)
        if before_complete is not None:
            before_complete()
        return self._complete(upload_id, tags)

    def _begun(self) -> tuple[str, dict[int, tuple[int, str]]]:
        """The upload that went furthest, with the (size, hash) of its parts, or a new one."""
        best: tuple[str, dict[int, tuple[int, str]]] | None = None
        for upload_id in _upload_ids(self._s3, self._key):
            parts = self._present(upload_id)
            if parts is not None and (best is None or len(parts) > len(best[1])):
                best = upload_id, parts
        if best is not None:
            return best
        answer = self._s3.call("POST", self._key, {"uploads": ""})
        return _text(answer.tree(), "UploadId"), {}

    def _present(self, upload_id: str) -> dict[int, tuple[int, str]] | None:
        found: dict[int, tuple[int, str]] = {}
        marker = "0"
        while True:
            query = {"uploadId": upload_id, "part-number-marker": marker, "max-parts": "1000"}
            answer = self._s3.call("GET", self._key, query, allowed=(404,))
            if answer.status == 404:
                return None  # another writer has completed it
            tree = answer.tree()
            for part in _all(tree, "Part"):
                found[int(_text(part, "PartNumber"))] = int(_text(part, "Size")), _text(part, "ETag").strip('"')
            if _text(tree, "IsTruncated") != "true":
                return found
            marker = _text(tree, "NextPartNumberMarker")

    def _send_parts(self, upload_id: str, present: Mapping[int, tuple[int, str]]) -> dict[int, str]:
        tags: dict[int, str] = {}

        def one(part: _Part) -> None:
            with open(self._path, "rb") as file:
                content = os.pread(file.fileno(), part.length, part.offset)
            if len(content) != part.length:
                raise StoreError("file-changed", f"{self._path.name} became shorter while it was sent")
            known = present.get(part.number)
            if known is not None and known == (part.length, hashlib.md5(content, usedforsecurity=False).hexdigest()):
                tags[part.number] = known[1]
            else:
                query = {"partNumber": str(part.number), "uploadId": upload_id}
                tags[part.number] = self._s3.call("PUT", self._key, query, body=content).tag
            self._on_bytes(part.length)

        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="kvpack-upload") as pool:
            running = [pool.submit(one, part) for part in self._parts]
            wait(running, return_when=FIRST_EXCEPTION)
            for future in running:
                future.cancel()
            for future in running:
                if not future.cancelled():
                    future.result()
        return tags

    def _complete(self, upload_id: str, tags: Mapping[int, str]) -> bool:
        body = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>&quot;{tags[number]}&quot;</ETag></Part>"
            for number in sorted(tags)
        )
        answer = self._s3.call(
            "POST",
            self._key,
            {"uploadId": upload_id},
            body=f"<CompleteMultipartUpload>{body}</CompleteMultipartUpload>".encode(),
            headers={"if-none-match": "*"},
            allowed=(404, 409, 412),
        )
        if answer.status == 200 and b"<Error>" not in answer.body:
            return True
        # Another writer of the same pack was faster: its object is this one.
        if self._s3.call("HEAD", self._key, allowed=(404,)).status == 200:
            _abort(self._s3, self._key, upload_id)
            return False
        raise StoreError("upload-failed", f"{self._key}: the upload could not be completed", hint="try again")


def _upload_ids(s3: _S3, prefix: str) -> list[str]:
    tree = s3.call("GET", "", {"uploads": "", "prefix": prefix}).tree()
    return [_text(entry, "UploadId") for entry in _all(tree, "Upload") if _text(entry, "Key") == prefix]


def abort_uploads(bucket: Bucket, *, before: str) -> list[str]:
    """Remove the parts of uploads that began before an ISO time and were never completed; the objects' names."""
    access = bucket.s3_access
    if access is None:
        return []
    s3, found = _S3(access), []
    lead = f"{access.prefix}/objects/".lstrip("/")
    for entry in _all(s3.call("GET", "", {"uploads": "", "prefix": lead}).tree(), "Upload"):
        key = _text(entry, "Key")
        if key.startswith(lead) and _text(entry, "Initiated")[:19] < before[:19]:
            _abort(s3, key, _text(entry, "UploadId"))
            found.append(key.removeprefix(lead.removesuffix("objects/")))
    return found


def _abort(s3: _S3, key: str, upload_id: str) -> None:
    s3.call("DELETE", key, {"uploadId": upload_id}, allowed=(404,))


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _all(tree: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [entry for entry in tree.iter() if _local(entry.tag) == name]


def _text(tree: ElementTree.Element, name: str) -> str:
    return next((entry.text or "" for entry in tree.iter() if _local(entry.tag) == name), "")


@dataclass(frozen=True)
class _Answer:
    status: int
    tag: str
    body: bytes

    def tree(self) -> ElementTree.Element:
        # The parser loads no external entity; what a hostile server may make it expand is bounded by the body's size.
        if len(self.body) > 8 << 20 or b"<!" in self.body:
            raise StoreError("bad-answer", "the server's answer is not the XML of S3")
        try:
            return ElementTree.fromstring(self.body)
        except ElementTree.ParseError:
            raise StoreError("bad-answer", "the server's answer is not XML") from None


class _S3:
    """The few requests that a multipart upload needs, signed as AWS Signature Version 4 says."""

    def __init__(self, access: S3Access) -> None:
        self._access = access
        parts = urlsplit(access.endpoint)
        self._secure = parts.scheme == "https"
        self._host = parts.netloc
        self._lead = parts.path.rstrip("/")

    def call(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        allowed: tuple[int, ...] = (),
    ) -> _Answer:
        """One request, repeated where the connection or the server failed; raises StoreError."""
        path = quote(f"{self._lead}/{self._access.bucket}/{key}".rstrip("/"), safe="/-_.~")
        failure = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(0.2 * attempt)
            try:
                answer = self._once(method, path, query or {}, body, headers or {})
            except (OSError, http.client.HTTPException) as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if answer.status < 300 or answer.status in allowed:
                return answer
            if answer.status in (401, 403):
                raise StoreError("access-denied", f"{key}: the server refuses these credentials")
            if b"NoSuchBucket" in answer.body:
                raise StoreError("no-such-bucket", f"there is no bucket {self._access.bucket}")
            failure = f"the server answers {answer.status}"
            if answer.status < 500:
                break
        raise StoreError("unreachable", f"{key or self._access.bucket}: {failure}", hint="try again: it goes on")

    def _once(self, method: str, path: str, query: Mapping[str, str], body: bytes, extra: Mapping[str, str]) -> _Answer:
        encoded = urlencode(sorted(query.items()), quote_via=quote, safe="-_.~")
        headers = self._signed(method, path, encoded, dict(extra))
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        with closing(kind(self._host, timeout=_TIMEOUT)) as connection:
            connection.request(method, f"{path}?{encoded}" if encoded else path, body=body, headers=headers)
            response = connection.getresponse()
            tag = (response.headers.get("ETag") or "").strip('"')
            return _Answer(response.status, tag, response.read())

    def _signed(self, method: str, path: str, query: str, headers: dict[str, str]) -> dict[str, str]:
        access = self._access
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        # Each tile is held to its own hash by whoever reads the pack, so the body's hash is not signed.
        headers |= {"host": self._host, "x-amz-content-sha256": "UNSIGNED-PAYLOAD", "x-amz-date": stamp}
        if access.token is not None:
            headers["x-amz-security-token"] = access.token
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        request = "\n".join((method, path, query, lines, names, "UNSIGNED-PAYLOAD"))
        scope = f"{stamp[:8]}/{access.region}/s3/aws4_request"
        digest = hashlib.sha256(request.encode()).hexdigest()
        key: Any = f"AWS4{access.secret}".encode()
        for part in scope.split("/"):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
        signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
        headers["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={access.key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return headers
