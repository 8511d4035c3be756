"""What a manifest refuses, and that a version comes out as a checkpoint that the usual tools read."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from scavenger.cli.main import app
from scavenger.errors import ConfigError, WeightsError, WireError
from scavenger.protocol.keys import generate
from scavenger.weights import export, files, spool
from scavenger.weights import manifest as manifests
from scavenger.weights.channel import FileChannel
from scavenger.weights.files import TOKENIZER
from scavenger.weights.manifest import Manifest, Shard
from scavenger.weights.memory import Buffer
from scavenger.weights.pull import pull


def version(number: int = 1, chunk_nbytes: int = 16, **changes: bytes) -> tuple[Manifest, memoryview]:
    tensors = {
        "model.norm": ("bfloat16", (5,), memoryview(changes.get("norm", b"0123456789"))),
        "model.embed": ("float32", (3, 4), memoryview(changes.get("embed", bytes(range(48))))),
        "empty": ("bfloat16", (0, 4), memoryview(b"")),
    }
    return manifests.build(number, tensors, chunk_nbytes=chunk_nbytes)


def test_equal_weights_have_equal_roots_whatever_else_differs() -> None:
    one, other = version(1)[0], version(2)[0]
    sharded = msgspec.structs.replace(other, shards=(Shard(0, 0, 16), Shard(1, 16, 58)), parents=(b"p",))
    assert (
        one.root == other.root == manifests.decode(manifests.encode(sharded), one.root, any_chunk=True).root
    )
    assert version(1, norm=b"0123456788")[0].root != one.root


def test_wide_items_come_first_so_that_a_safetensors_file_is_aligned() -> None:
    manifest, blob = version()
    assert [tensor.name for tensor in manifest.tensors] == ["model.embed", "empty", "model.norm"]
    assert [bytes(view.data) for view in manifests.views(manifest, blob)] == [
        bytes(range(48)),
        b"",
        b"0123456789",
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"root": b"x" * 32}, "root hash"),
        ({"chunk_hashes": (b"x",)}, "add up"),
        ({"total_nbytes": 57}, "add up"),
        ({"chunk_nbytes": 1 << 40}, "sizes"),
        ({"chunk_nbytes": 0}, "sizes"),
        ({"shards": (Shard(0, 0, 16), Shard(1, 32, 58))}, "rank 1"),
        ({"shards": (Shard(0, 0, 17), Shard(1, 17, 58))}, "rank 0"),
        ({"shards": (Shard(0, 0, 16),)}, "shards end"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change: dict[str, object], told: str) -> None:
    manifest = msgspec.structs.replace(version()[0], **change)
    with pytest.raises(WeightsError, match=told):
        manifests.decode(manifests.encode(manifest), any_chunk=True)


def test_a_tensor_of_very_many_sides_is_refused_before_they_are_multiplied() -> None:
    """The last one is 0, so that the size fits. Their product takes time by the square of their number, in the loop of the process that
    lends slots to the run which published it."""
    wide = manifests.Tensor("w", "uint8", (2**62,) * 20_000 + (0,), 0, 0)
    crafted = manifests.seal(1, (wide,), (), chunk_nbytes=manifests.chunk_nbytes_of(0))
    with pytest.raises(WeightsError, match="'w' of the manifest has an impossible place, dtype or size"):
        manifests.decode(manifests.encode(crafted))


def test_a_manifest_that_cuts_its_blob_otherwise_than_all_do_is_refused() -> None:
    with pytest.raises(WeightsError, match="chunks of 16 bytes, 58 are cut into 1048576"):
        manifests.decode(manifests.encode(version()[0]))
    manifest = version(chunk_nbytes=0)[0]
    assert manifests.decode(manifests.encode(manifest)) == manifest


def test_another_manifest_than_the_one_expected_is_refused() -> None:
    stale, expected = version(1)[0], version(2, norm=b"9876543210")[0]
    with pytest.raises(WeightsError, match="root hash"):
        manifests.decode(manifests.encode(stale), expected.root, any_chunk=True)


@pytest.mark.parametrize("shard_nbytes", [1 << 30, 20])
def test_an_exported_version_is_a_hugging_face_checkpoint(tmp_path: Path, shard_nbytes: int) -> None:
    safe = pytest.importorskip("safetensors.numpy", reason="reading it back needs the [trainer] extra")
    manifest, blob = manifests.build(
        7, {f"layer.{i}": ("float32", (4,), memoryview(os.urandom(16))) for i in range(3)}, chunk_nbytes=16
    )
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "modeling_evil.py").write_text("raise SystemExit")
    export.write(manifest, blob, tmp_path / "out", model, shard_nbytes=shard_nbytes)
    written = sorted(path.name for path in (tmp_path / "out").iterdir())
    tensors = {}
    for name in written:
        if name.endswith(".safetensors"):
            tensors |= safe.load_file(tmp_path / "out" / name)
    assert {name: array.tobytes() for name, array in tensors.items()} == {
        v.name: bytes(v.data) for v in manifests.views(manifest, blob)
    }
    assert "config.json" in written
    assert "modeling_evil.py" not in written
    if shard_nbytes == 20:
        index = msgspec.json.decode((tmp_path / "out/model.safetensors.index.json").read_bytes())
        assert sorted(index["weight_map"].values()) == [
            f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
        ]


@pytest.mark.parametrize("shard_nbytes", [1 << 30, 20])
def test_a_tokenizer_that_travels_with_the_weights_comes_out_as_its_file_and_is_no_tensor(
    tmp_path: Path, shard_nbytes: int
) -> None:
    safe = pytest.importorskip("safetensors.numpy", reason="reading it back needs the [trainer] extra")
    weights = {
        "a": ("float32", (4,), memoryview(os.urandom(16))),
        "b": ("int8", (5,), memoryview(os.urandom(5))),  # before the file in the blob
        "z": ("int8", (7,), memoryview(os.urandom(7))),  # and after it
    }
    beside = {TOKENIZER: ("uint8", (9,), memoryview(b'{"a": "b"'))}
    manifest, blob = manifests.build(7, weights | beside)
    assert manifest.root != manifests.build(7, weights)[0].root, "the root covers it"
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "tokenizer.json").write_text("another one")
    out = export.write(manifest, blob, tmp_path / "out", model, shard_nbytes=shard_nbytes)
    assert (out / "tokenizer.json").read_bytes() == b'{"a": "b"'
    tensors = {}
    for path in out.glob("*.safetensors"):
        tensors |= safe.load_file(path)
    assert {name: array.tobytes() for name, array in tensors.items()} == {
        name: bytes(data) for name, (_, _, data) in weights.items()
    }
    index = msgspec.json.decode((out / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == 16 + 5 + 7
    assert index["weight_map"].keys() == weights.keys()
    spool.Spool(tmp_path / "spool").write(manifest, blob)
    argv = ["weights", "export", str(tmp_path / "spool/version-7"), str(tmp_path / "again")]
    told = CliRunner().invoke(app, argv)
    assert "3 tensors, 28 bytes" in told.output
    assert (tmp_path / "again/tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("nbytes", "told"), [(0, "has 0 bytes"), (101, "has 101 bytes"), (None, "cannot be read")]
)
def test_a_tokenizer_that_is_not_there_or_too_large_is_not_published(
    nbytes: int | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_TOKENIZER_NBYTES", 100)
    if nbytes is not None:
        (tmp_path / "tokenizer.json").write_bytes(bytes(nbytes))
    with pytest.raises(ConfigError, match=rf"tokenizer\.json.* {told}(.|\n)*remedy"):
        files.read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(bytes(100))
    assert files.read_tokenizer(tmp_path) == bytes(100)


def test_damaged_bytes_are_not_exported(tmp_path: Path) -> None:
    manifest, blob = version()
    blob[3] ^= 1
    with pytest.raises(WeightsError, match="not its manifest's"):
        export.write(manifest, blob, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def filled(blob: memoryview) -> Buffer:
    buffer = Buffer(len(blob))
    buffer.view[:] = blob
    return buffer


def test_a_spooled_version_outlives_its_process_and_the_command_exports_it(tmp_path: Path) -> None:
    store = spool.Spool(tmp_path / "spool", keep=2)
    for number in (1, 2, 3):
        manifest, blob = version(number, chunk_nbytes=0)
        address = store.put(manifest, filled(blob), spool.alone(manifest))
        store.wait()
    assert store.versions() == [2, 3]
    assert asyncio.run(pull(manifest, [address], generate(), 5.0)).view == blob
    result = CliRunner().invoke(
        app, ["weights", "export", str(tmp_path / "spool/version-3"), str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    assert manifest.root.hex() in result.output.replace("\n", "")
    assert (tmp_path / "out/model.safetensors").is_file()


def shares(manifest: Manifest, mark: str) -> list[spool.SpoolShare]:
    """Three ranks'; the version is 58 bytes long."""
    return [
        spool.SpoolShare(mark, rank, 3, cut)
        for rank, cut in enumerate(([(0, 10), (40, 58)], [(10, 30)], [(30, 40)]))
    ]


def test_a_version_that_three_ranks_write_is_there_when_all_have_written(tmp_path: Path) -> None:
    manifest, blob = version()
    one, *others = shares(manifest, "m")
    (tmp_path / ".part-1-killed").mkdir()
    ranks = [spool.Spool(tmp_path) for _ in range(3)]
    address = ranks[0].put(manifest, filled(blob), one)
    ranks[1].put(manifest, filled(blob), others[0])
    ranks[1].wait()
    assert ranks[0].versions() == []
    assert not ranks[0].ready()
    ranks[2].put(manifest, filled(blob), others[1])
    for rank in ranks:
        rank.wait()
    assert ranks[0].ready()
    assert [path.name for path in tmp_path.iterdir()] == ["version-1"], (
        "and nothing is left of a trainer that was killed"
    )
    assert sorted(path.name for path in (tmp_path / "version-1").iterdir()) == [
        "manifest.msgpack",
        "weights.bin",
    ]
    assert asyncio.run(pull(manifest, [address], generate(), 5.0)).view == blob


@pytest.mark.parametrize("how", ["silent", "failed"])
def test_a_version_that_one_rank_did_not_write_is_left_out_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    manifest, blob = version()
    one, two, _ = shares(manifest, "m")
    monkeypatch.setattr(spool, "OTHER_RANKS_S", 0.3 if how == "silent" else 20.0)
    store = spool.Spool(tmp_path)
    store.write(manifest, blob, two)
    if how == "failed":
        full = spool.SpoolShare("m", 2, 3, [(-1, 1)])  # as a full disk does, a write is refused
        with pytest.raises(WeightsError, match="Invalid argument"):
            store.write(manifest, blob, full)
    with pytest.raises(
        WeightsError, match="no share of rank-2 within" if how == "silent" else "rank 2: .*Invalid argument"
    ):
        store.write(manifest, blob, one)
    assert list(tmp_path.iterdir()) == []
    for rank, share in enumerate(shares(manifest, "again")[::-1]):
        assert store.versions() == [], rank
        store.write(manifest, blob, share)
    assert store.versions() == [1]


def test_a_spooled_file_with_a_flipped_byte_is_never_used(tmp_path: Path) -> None:
    manifest, blob = version()
    address = spool.Spool(tmp_path).write(manifest, blob)
    path = Path(address.endpoint.removeprefix("file://"))
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match="does not have the manifest's hash"):
        asyncio.run(pull(manifest, [address], generate(), 5.0))
    path.write_bytes(data[:20])
    with pytest.raises(WeightsError, match="a file of 20 bytes is given for a version of 58"):
        asyncio.run(pull(manifest, [address], generate(), 1.0))


@pytest.mark.parametrize("kind", ["fifo", "another name", "a link", "a folder", "longer"])
def test_only_a_spools_own_regular_file_of_the_right_size_is_opened(tmp_path: Path, kind: str) -> None:
    manifest, blob = version()
    path = Path(spool.Spool(tmp_path).write(manifest, blob).endpoint.removeprefix("file://"))
    if kind == "another name":
        path = path.rename(path.with_name("shadow"))
    elif kind == "a link":
        path.symlink_to(path.rename(path.with_name("elsewhere")))
    elif kind == "longer":
        path.write_bytes(bytes(blob) + b"x")
    else:
        path.unlink()
        os.mkfifo(path) if kind == "fifo" else path.mkdir()
    told: list[Exception] = []

    def look() -> None:
        try:
            FileChannel.open(str(path), manifest).close()
        except (OSError, WireError) as error:
            told.append(error)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(5.0)
    assert not looking.is_alive(), "it waits for whoever writes to the FIFO"
    assert len(told) == 1


def test_a_reader_that_is_before_the_spool_finds_it_when_it_is_there(tmp_path: Path) -> None:
    manifest, blob = version()
    store = spool.Spool(tmp_path)
    address = store._address(1)

    async def early() -> memoryview:
        waiting = asyncio.create_task(pull(manifest, [address], generate(), 10.0))
        await asyncio.sleep(0.1)
        store.write(manifest, blob)
        return (await waiting).view

    assert asyncio.run(early()) == blob


def test_a_spool_keeps_the_base_of_the_adapters_that_it_keeps(tmp_path: Path) -> None:
    store = spool.Spool(tmp_path, keep=2)
    base, blob = version(1)

    def adapters(number: int) -> tuple[Manifest, memoryview]:
        return manifests.build(
            number,
            {"a": ("int8", (1,), memoryview(bytes([number])))},
            adapter=manifests.Adapter(base.root, 1.0, "bfloat16"),
        )

    store.write(base, blob)
    for number in range(2, 6):
        store.write(*adapters(number))
    assert store.versions() == [1, 4, 5]
    store.write(*version(6))  # a restarted trainer's
    assert store.versions() == [5, 6], "of two equal bases one is enough"
    store.write(*adapters(7))
    store.write(*adapters(8))
    assert store.versions() == [6, 7, 8]


def test_a_folder_without_its_manifest_is_cleaned_away_and_stops_no_later_version(tmp_path: Path) -> None:
    """What a trainer leaves that is killed while it deletes an old version."""
    store = spool.Spool(tmp_path, keep=2)
    for number in (1, 2, 3):
        store.write(*version(number))
    (tmp_path / "version-3" / spool.MANIFEST).unlink()
    assert store.versions() == [2]
    store.write(*version(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-2", "version-4"]


def test_a_version_that_cannot_be_deleted_stops_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = spool.Spool(tmp_path, keep=1)
    store.write(*version(1))
    with monkeypatch.context() as patch, capture_logs() as logs:
        # its other file is open on another host
        patch.setattr(
            "scavenger.weights.spool.shutil.rmtree", lambda path, **_: (path / spool.MANIFEST).unlink()
        )
        store.write(*version(2))
    assert [(entry["event"], entry["was"]) for entry in logs] == [("weights.not_removed", "version-1")]
    assert store.versions() == [2], "complete, or not there under its name"
    store.write(*version(3))
    assert [path.name for path in tmp_path.iterdir()] == ["version-3"], "tried again"


def renamed_but(rename: Callable[[Path, Path], Path], name: str) -> Callable[[Path, Path], Path]:
    def refuse(path: Path, to: Path) -> Path:
        if path.name == name:
            raise OSError(f"{name} stays")
        return rename(path, to)

    return refuse


def test_cleaning_that_fails_is_told_and_the_version_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = spool.Spool(tmp_path, keep=1)
    store.write(*version(1))
    (tmp_path / "version-1" / spool.MANIFEST).unlink()
    (
        tmp_path / "version-1" / spool.MANIFEST
    ).mkdir()  # cannot be read, for another reason than that it is missing
    with monkeypatch.context() as patch, capture_logs() as logs:
        store.write(*version(2))
        patch.setattr(Path, "rename", renamed_but(Path.rename, "version-2"))
        store.write(*version(3))
    assert [entry["event"] for entry in logs] == [
        "weights.unreadable",
        "weights.unreadable",
        "weights.not_cleaned",
    ]
    assert (tmp_path / "version-3" / spool.MANIFEST).is_file()


def test_adapters_alone_are_not_exported_and_the_command_that_merges_them_is_named(tmp_path: Path) -> None:
    base, _ = version(1)
    of = manifests.Adapter(base.root, 1.0, "bfloat16")
    folder = spool.Spool(tmp_path).write(
        *manifests.build(2, {"a": ("int8", (1,), memoryview(b"x"))}, adapter=of)
    )
    done = CliRunner().invoke(
        app,
        [
            "weights",
            "export",
            str(Path(folder.endpoint.removeprefix("file://")).parent),
            str(tmp_path / "out"),
        ],
    )
    assert isinstance(done.exception, WeightsError)
    assert "scavenger checkpoint export" in str(done.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes", [{"base": b"short"}, {"scale": float("nan")}, {"dtype": "int3"}])
def test_adapters_that_name_no_possible_base_scale_or_type_are_refused(changes: dict[str, object]) -> None:
    fields: dict[str, object] = {"base": bytes(32), "scale": 1.0, "dtype": "bfloat16"} | changes
    of = msgspec.convert(fields, manifests.Adapter)
    manifest, _ = manifests.build(2, {"a": ("int8", (1,), memoryview(b"x"))}, adapter=of)
    with pytest.raises(WeightsError, match="names no base, scale or dtype"):
        manifests.decode(manifests.encode(manifest))
