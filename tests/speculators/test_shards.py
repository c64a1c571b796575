"""Hidden states on disk: the same in bf16, within a known bound in FP8, of a size known before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from onboard.errors import EnvironmentFault
from onboard.speculators import disk
from onboard.speculators.features import zero_rows
from onboard.speculators.shards import Document, compress, decompress, places_of, write_shard

WIDTH = 64


def documents(seed: int = 0) -> list[Document]:
    """Two documents whose states have a few values a thousand times the others, as models have."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length in (5, 9):
        states = torch.randn(length, 4, WIDTH, generator=generator)
        states[:, :, 3] *= 1000
        states = states.to(torch.bfloat16)
        ids = torch.arange(length)
        made.append(Document(ids, states[:, :-1], states[:, -1], ids >= 2))
    return made


def read(path: Path) -> list[Document]:
    return [place.read() for place in places_of(path, ["a", "b"])]


def test_bf16_comes_back_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "shard.safetensors"
    write_shard(file, documents())
    for one, other in zip(read(file), documents(), strict=True):
        for name in ("ids", "aux", "last", "mask"):
            assert torch.equal(getattr(one, name), getattr(other, name))


def test_fp8_comes_back_within_a_sixteenth(tmp_path: Path) -> None:
    file = tmp_path / "shard.safetensors"
    write_shard(file, documents(), "fp8")
    for one, other in zip(read(file), documents(), strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.mask, other.mask)
        for name in ("aux", "last"):
            got, wanted = getattr(one, name), getattr(other, name)
            assert got.dtype == torch.bfloat16
            wanted = wanted.float()
            scale = wanted.abs().amax(-1, keepdim=True) / 448
            bound = torch.maximum(wanted.abs() / 16, scale / 1024)
            assert ((got.float() - wanted).abs() <= bound + wanted.abs() / 200).all()
            assert not torch.equal(got.float(), wanted)


def test_fp8_shards_hold_what_their_docstring_says(tmp_path: Path) -> None:
    file = tmp_path / "shard.safetensors"
    write_shard(file, documents(), "fp8")
    with safe_open(file, "pt") as f:
        held = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    assert {name: (t.dtype, tuple(t.shape)) for name, t in held.items()} == {
        "ids": (torch.int64, (14,)),
        "aux": (torch.float8_e4m3fn, (14, 3, WIDTH)),
        "aux_scale": (torch.float32, (14, 3)),
        "last": (torch.float8_e4m3fn, (14, WIDTH)),
        "last_scale": (torch.float32, (14,)),
        "mask": (torch.bool, (14,)),
        "offsets": (torch.int64, (3,)),
    }
    states = sum(held[n].nbytes for n in ("aux", "aux_scale", "last", "last_scale"))
    assert states == 14 * disk.bytes_per_token(WIDTH, "fp8")


def test_a_written_out_state() -> None:
    codes, scale = compress(torch.tensor([[448.0, -1.0, 0.0, 17.0], [0.0] * 4]).to(torch.bfloat16))
    assert torch.equal(scale, torch.tensor([1.0, 1 / 448]))
    # Between 16 and 32 E4M3 has steps of 2: 17 is half way, and goes to the even one.
    assert torch.equal(codes[0].float(), torch.tensor([448.0, -1.0, 0.0, 16.0]))
    assert torch.equal(decompress(codes, scale)[1], torch.zeros(4, dtype=torch.bfloat16))


def test_only_a_state_of_zeros_is_one_in_fp8(tmp_path: Path) -> None:
    held = documents()
    held[0].aux[1, 2] = 0
    held[1].last[0] = 0
    held[1].last[1] = 1e-30  # tiny, and no zero
    file = tmp_path / "shard.safetensors"
    write_shard(file, held, "fp8")
    assert [zero_rows(document) for document in read(file)] == [1, 1]


def test_shards_written_before_there_was_a_storage_read_the_same(tmp_path: Path) -> None:
    [document, _] = documents()
    file = tmp_path / "old.safetensors"
    tensors = {name: getattr(document, name).clone() for name in ("ids", "aux", "last", "mask")}
    save_file({**tensors, "offsets": torch.tensor([0, 5])}, file)
    [place] = places_of(file, ["a"])
    for name, tensor in tensors.items():
        assert torch.equal(getattr(place.read(), name), tensor)


def test_bytes_of_a_token() -> None:
    assert disk.bytes_per_token(6144, "bf16") == 49_152  # GLM-5.2
    assert disk.bytes_per_token(6144, "fp8") == 24_592


def test_a_disk_that_is_too_small_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: usage)
    disk.check(tmp_path, 6144, "fp8", 40_000)
    with pytest.raises(
        EnvironmentFault, match=r"up to 1.5 GB \(49,152 bytes for each of 30,000"
    ) as e:
        disk.check(tmp_path, 6144, "bf16", 30_000)
    assert "1.0 GB are free" in e.value.message
    assert "features.storage=fp8" in str(e.value.hint)
