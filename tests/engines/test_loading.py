"""Loading: folders and GGUF files, the converted copy, and what goes wrong."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpack.engines import transformers as engine
from kvpack.engines.transformers import loading
from kvpack.errors import EngineError, ResourceError, UsageError
from tests.engines.tiny import tiny_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model saved in bf16, without a tokenizer."""
    monkeypatch.setenv("KVPACK_CACHE_DIR", str(tmp_path / "cache"))
    tiny_model("llama", "bf16").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_gives_its_own_dtype_silently(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = engine.load_model(folder)
    assert engine.identify(loaded.model).compatibility["scalar"] == "bf16"
    assert loaded.tokenizer is None
    assert not loaded.model.training
    assert loaded.source.path == folder
    assert engine.identify(engine.load_model(folder, dtype="f32").model).compatibility["scalar"] == "f32"
    assert capfd.readouterr() == ("", "")


def test_a_sharded_copy_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    loaded = engine.load_model(folder)
    loaded.model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    sharded = engine.load_model(tmp_path / "sharded")
    assert engine.identify(sharded.model) == engine.identify(loaded.model)


def test_what_is_no_model_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").write_bytes(b"")
    for path in (tmp_path / "absent", tmp_path / "absent.gguf", tmp_path / "empty", tmp_path / "model.bin"):
        with pytest.raises(UsageError) as caught:
            engine.load_model(path)
        assert caught.value.code == "no-such-model"
    with pytest.raises(UsageError) as caught:
        engine.load_model(tmp_path, dtype="float32")
    assert caught.value.code == "unknown-dtype"


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all"])
def test_a_broken_gguf_is_one_line(folder: Path, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(EngineError) as caught:
        engine.load_model(path)
    assert caught.value.code == "model-load-failed"
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_broken_files_of_a_folder_are_one_line(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(EngineError) as caught:
        engine.load_model(folder)
    assert (caught.value.code, caught.value.field) == ("model-load-failed", "model")
    (folder / "config.json").write_text('{"model_type": "no_such_type"}', "utf-8")
    with pytest.raises(EngineError) as caught:
        engine.load_model(folder)
    assert caught.value.code == "model-load-failed"
    assert "\n" not in str(caught.value)


class _Conversion:
    """Stands in for the slow part of a conversion: writes a tiny model, or fails halfway."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.calls, self.error = 0, error

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.calls += 1
        tiny_model("llama").save_pretrained(folder)
        if self.error is not None:
            raise self.error


def test_a_gguf_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACK_CACHE_DIR", str(tmp_path / "cache"))
    conversion = _Conversion()
    monkeypatch.setattr(loading, "_convert", conversion)
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    first, second = engine.load_model(gguf), engine.load_model(gguf, dtype="bf16")
    assert conversion.calls == 1
    assert engine.identify(first.model).compatibility["scalar"] == "f32"
    assert engine.identify(second.model).compatibility["scalar"] == "bf16"
    gguf.write_bytes(b"GGUF, changed")
    engine.load_model(gguf)
    assert conversion.calls == 2
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 2


@pytest.mark.parametrize(
    ("error", "family"),
    [(OSError(28, "No space left on device"), ResourceError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, family: type[BaseException]
) -> None:
    monkeypatch.setenv("KVPACK_CACHE_DIR", str(tmp_path / "cache"))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setattr(loading, "_convert", _Conversion(error))
    with pytest.raises(family):
        engine.load_model(gguf)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_copy_that_another_process_finished_first_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACK_CACHE_DIR", str(tmp_path / "cache"))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")

    def overtaken(gguf: Path, folder: Path) -> None:
        tiny_model("llama").save_pretrained(folder)
        tiny_model("llama").save_pretrained(folder.with_name(folder.name.split(".")[1]))

    monkeypatch.setattr(loading, "_convert", overtaken)
    assert not engine.load_model(gguf).model.training
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 1


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_a_missing_library_names_the_extra(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == library:
            raise ImportError(f"No module named {library!r}")
        return real(name, *rest)

    (tmp_path / "config.json").write_text("{}", "utf-8")
    monkeypatch.delitem(sys.modules, library, raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EngineError) as caught:
        engine.load_model(tmp_path)
    assert (caught.value.code, caught.value.found) == ("missing-extra", library)
    assert caught.value.hint == "pip install 'kvpack[transformers]'"


def test_the_verbs_import_without_torch() -> None:
    import subprocess

    code = "import sys, kvpack.engines.transformers; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert outcome.stdout == "[]\n"


def test_smollm2_from_its_gguf(smollm2_gguf: Path, models_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACK_CACHE_DIR", str(models_folder))
    loaded = engine.load_model(smollm2_gguf)
    identity = engine.identify(loaded.model, loaded.tokenizer, source=loaded.source)
    assert identity.compatibility["scalar"] == "f32"
    assert isinstance(identity.compatibility["tokenizer"], bytes)
    assert isinstance(identity.compatibility["template"], bytes)
    geometry = engine.describe(loaded.model)
    assert [layer.kind for layer in geometry.layers] == ["full"] * 30
    assert {plane.row_shape for _, _, plane in geometry.planes()} == {(3, 64)}
