"""The digest of a model's named tensors (spec/registry.md, field ``weights``), and the memory of digests made before.

A digest is remembered on disk by the weight files' paths, sizes and times, so that the weights of a large model are
not hashed at every start. It is used only for a model that ``load_model`` read from those files in this process and
that still looks as it did right after loading. "Looks" is three things a tensor: its address, torch's version counter,
and the hash of its bytes, or of a sample of them where it is larger than ``LOOKED_AT_WHOLE_BYTES``, since an edit
through ``.data`` moves neither of the first two. A sample can miss an edit of a few elements, so models below
``REMEMBER_FROM_BYTES``, which hash in no time, are always hashed.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from blake3 import blake3

from kvpack.engines.transformers.library import encoding_name, host_words, require_transformers
from kvpack.errors import EngineError

if TYPE_CHECKING:
    import torch

__all__ = ["REMEMBER_FROM_BYTES", "FileStamp", "ModelSource", "cache_folder", "source_of", "weights_digest"]

REMEMBER_FROM_BYTES: Final = 64 << 20
LOOKED_AT_WHOLE_BYTES: Final = 8 << 20
_DIGEST_SCHEME: Final = b"kvpack-weights-v1\0"
_SAMPLE_BYTES: Final = 256
_SAMPLES: Final = 64


def cache_folder() -> Path:
    """Where converted models and digests are kept: ``KVPACK_CACHE_DIR``, or ``~/.cache/kvpack``."""
    chosen = os.environ.get("KVPACK_CACHE_DIR")
    return Path(chosen) if chosen else Path.home() / ".cache" / "kvpack"


@dataclass(frozen=True)
class FileStamp:
    """A file as it was when it was read: absolute path, bytes, modification time in ns."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """The stamp of a file now."""
        status = path.stat()
        return cls(str(path.resolve()), status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class ModelSource:
    """Where a model in this process came from: the files it was read from and how its tensors looked right after.

    ``path`` is what the caller named (a folder or a GGUF file).
    """

    path: Path
    files: tuple[FileStamp, ...]
    dtype: str
    model: ref[Any]
    looks: Mapping[str, tuple[int, int, bytes]]


def source_of(model: Any, path: Path, files: tuple[FileStamp, ...]) -> ModelSource:
    """Record a model that was read from ``files`` a moment ago."""
    tensors = model.state_dict()
    looks = {name: _looks(tensor) for name, tensor in tensors.items()} if _is_large(tensors) else {}
    return ModelSource(path, files, str(model.dtype), ref(model), looks)


def weights_digest(model: Any, source: ModelSource | None = None) -> bytes:
    """BLAKE3 over the model's named tensors (32 bytes). A tied tensor counts under each name and is hashed once.

    Raises EngineError ``unsupported-weights`` for a tensor without memory of its own, ``unsupported-dtype`` for an
    element type that the registry does not name.
    """
    tensors: dict[str, torch.Tensor] = model.state_dict()
    memo = _memo(model, source, tensors)
    if memo is not None and (known := _remembered(memo)) is not None:
        return known
    digest = _hash(tensors)
    if memo is not None:
        _remember(memo, digest)
    return digest


def _hash(tensors: Mapping[str, torch.Tensor]) -> bytes:
    keys = {name: _identity_of(name, tensor) for name, tensor in tensors.items()}
    once = {keys[name]: tensor for name, tensor in tensors.items()}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        hashes = dict(zip(once, pool.map(_elements_hash, once.values()), strict=True))
    whole = blake3(_DIGEST_SCHEME)
    for name in sorted(tensors):
        tensor = tensors[name]
        for text in (name, encoding_name(tensor.dtype)):
            whole.update(struct.pack("<I", len(text.encode())) + text.encode())
        whole.update(struct.pack(f"<I{tensor.dim()}Q", tensor.dim(), *tensor.shape))
        whole.update(hashes[keys[name]])
    return whole.digest()


def _identity_of(name: str, tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two names of one tensor."""
    if tensor.is_meta or tensor.is_sparse:
        raise EngineError(
            "unsupported-weights",
            f"the tensor {name} has no dense memory of its own (meta or sparse), so it cannot be hashed",
            field="weights",
            found=name,
        )
    return str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _elements_hash(tensor: torch.Tensor) -> bytes:
    words = host_words(tensor.cpu().contiguous().reshape(-1))
    return blake3(words.data.cast("B") if words.size else b"").digest()


def _is_large(tensors: Mapping[str, torch.Tensor]) -> bool:
    return bool(sum(tensor.nbytes for tensor in tensors.values()) >= REMEMBER_FROM_BYTES)


def _looks(tensor: torch.Tensor) -> tuple[int, int, bytes]:
    if tensor.nbytes <= LOOKED_AT_WHOLE_BYTES:
        return tensor.data_ptr(), tensor._version, _elements_hash(tensor.detach())
    elements = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().reshape(-1)
    step = max(1, elements.numel() // _SAMPLES)
    count = max(1, _SAMPLE_BYTES // max(1, elements.element_size()))
    sample = blake3()
    for at in range(0, elements.numel(), step):
        sample.update(host_words(elements[at : at + count].cpu()).data.cast("B"))
    return tensor.data_ptr(), tensor._version, sample.digest()


def _memo(model: Any, source: ModelSource | None, tensors: Mapping[str, torch.Tensor]) -> Path | None:
    """The file that remembers this model's digest; None where the model must be hashed."""
    if source is None or source.model() is not model or not source.looks:
        return None
    if {name: _looks(tensor) for name, tensor in tensors.items()} != source.looks:
        return None
    key = blake3(_DIGEST_SCHEME)
    for part in _key_parts(source):
        key.update(struct.pack("<I", len(part)) + part)
    return cache_folder() / "digests" / key.hexdigest()


def _key_parts(source: ModelSource) -> Iterator[bytes]:
    yield source.dtype.encode()
    yield require_transformers().__version__.encode()
    for stamp in source.files:
        yield os.fsencode(stamp.path)
        yield struct.pack("<QQ", stamp.size, stamp.mtime_ns)


def _remembered(memo: Path) -> bytes | None:
    try:
        digest = memo.read_bytes()
    except OSError:
        return None
    return digest if len(digest) == 32 else None


def _remember(memo: Path, digest: bytes) -> None:
    unfinished = memo.with_suffix(f".{os.getpid()}.unfinished")
    # A folder that cannot be written costs the next start a hash, and nothing else.
    with contextlib.suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.write_bytes(digest)
            unfinished.replace(memo)
        finally:
            unfinished.unlink(missing_ok=True)
