"""Adapters and their base: what comes out to the last bit, and what is not put together."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from scavenger.errors import EngineError, WeightsError
from scavenger.weights import files
from scavenger.weights import manifest as manifests
from scavenger.weights.manifest import Manifest

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
merging = pytest.importorskip("rollout.engines.merging")
lora = pytest.importorskip("rollout.engines.lora")
checksum = pytest.importorskip("rollout.engines.checksum")
setup = pytest.importorskip("rollout.engines.vllm.setup")
from rollout.engines import slices  # noqa: E402  needs torch, as all that follows
from rollout.engines.vllm.worker import mapped  # noqa: E402
from scavenger.weights.memory import Buffer  # noqa: E402

Made = tuple[Manifest, memoryview]


def version(number: int, tensors: dict[str, Any], adapter: manifests.Adapter | None = None) -> Made:
    entries = {}
    for name, value in tensors.items():
        raw = bytearray(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        entries[name] = (str(value.dtype).removeprefix("torch."), tuple(value.shape), memoryview(raw))
    return manifests.build(number, entries, adapter=adapter)


def drawn(*shape: int, seed: int, dtype: Any = None) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype or torch.float32)


def base(dtype: Any = None) -> Made:
    return version(
        1, {"a.q.weight": drawn(6, 10, seed=1, dtype=dtype), "norm.weight": drawn(6, seed=2, dtype=dtype)}
    )


def adapters(
    of: Made, number: int = 2, scale: float = 2.0, dtype: str = "float32", layer: str = "a.q", width: int = 10
) -> Made:
    tensors = {
        f"{layer}.lora_A.weight": drawn(3, width, seed=number),
        f"{layer}.lora_B.weight": drawn(6, 3, seed=10 + number),
    }
    return version(number, tensors, manifests.Adapter(of[0].root, scale, dtype))


def loaded(of: Made, under: Made) -> dict[str, Any]:
    own = manifests.views(*of)
    return {view.name: merging.tensor(view) for view in merging.views(of[0], own, *under)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_the_base_and_the_scaled_product_each_rounded_once(dtype: str) -> None:
    under = base()
    of = adapters(under, dtype=dtype)
    found = loaded(of, under)
    weight, down, up = drawn(6, 10, seed=1), drawn(3, 10, seed=2), drawn(6, 3, seed=12)
    exact = [
        [sum(float(up[i, k]) * float(down[k, j]) for k in range(3)) * 2.0 for j in range(10)]
        for i in range(6)
    ]
    expected = weight + torch.tensor(exact, dtype=torch.float64).float()
    assert torch.equal(found["a.q.weight"], expected.to(getattr(torch, dtype)))
    assert torch.equal(found["norm.weight"], drawn(6, seed=2).to(getattr(torch, dtype)))


def test_a_file_beside_the_base_goes_on_as_it_is() -> None:
    data = b"{}"
    views = {view.name: (view.dtype, view.shape, view.data) for view in manifests.views(*base())}
    under = manifests.build(1, views | {files.TOKENIZER: (files.DTYPE, (2,), memoryview(data))})
    of = adapters(under, dtype="bfloat16")
    found = {view.name: view for view in merging.views(of[0], manifests.views(*of), *under)}
    assert found.keys() == {"a.q.weight", "norm.weight", files.TOKENIZER}
    assert bytes(found[files.TOKENIZER].data) == data


def test_a_base_stored_narrow_is_widened_exactly_before_anything_is_added() -> None:
    under = base(torch.bfloat16)
    found = loaded(adapters(under, dtype="float32"), under)
    change = lora.merged(torch.zeros(6, 10), drawn(3, 10, seed=2), drawn(6, 3, seed=12), 2.0)
    assert torch.equal(found["a.q.weight"], drawn(6, 10, seed=1, dtype=torch.bfloat16).float() + change)


def test_each_version_is_made_of_the_pristine_base_whatever_was_loaded_before() -> None:
    under = base()
    before = bytes(under[1])
    direct = loaded(adapters(under, 4), under)
    for number in (2, 3, 4):
        last = loaded(adapters(under, number), under)
    assert torch.equal(last["a.q.weight"], direct["a.q.weight"])
    assert bytes(under[1]) == before


def test_the_number_of_threads_and_a_slice_of_rows_change_no_bit() -> None:
    weight, down, up = drawn(257, 384, seed=1), drawn(16, 384, seed=2), drawn(257, 16, seed=3)
    whole = lora.merged(weight, down, up, 0.5)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(lora.merged(weight, down, up, 0.5), whole)
    finally:
        torch.set_num_threads(threads)
    for first in range(0, 257, 5):
        assert torch.equal(
            lora.merged(weight[first : first + 5], down, up[first : first + 5], 0.5), whole[first : first + 5]
        )


@pytest.mark.parametrize(
    ("dtype", "rank", "size"), [("float32", 16, 1.0), ("float32", 129, 1e-20), ("float64", 16, 1e-3)]
)
def test_the_order_in_which_a_machine_sums_changes_no_bit(dtype: str, rank: int, size: float) -> None:
    """Where plain float64 does change: its sums, and one weight in some 2^29 of what is rounded to float32."""
    kind = getattr(torch, dtype)
    weight, down, up = (
        drawn(*shape, seed=seed).to(kind) for seed, shape in enumerate(((64, 96), (rank, 96), (64, rank)))
    )
    up *= size * torch.logspace(-6, 6, 64, dtype=kind)[:, None]  # rows of very different sizes
    plain = up.double() @ down.double()
    whole, seen = lora.merged(weight, down, up, 0.5), 0
    zeros = torch.zeros_like(weight)
    bare = lora.merged(zeros, down, up, 0.5)
    for seed in range(5):
        order = torch.randperm(rank, generator=torch.Generator().manual_seed(seed))
        seen += int((plain != up[:, order].double() @ down[order].double()).sum())
        assert torch.equal(lora.merged(weight, down[order], up[:, order], 0.5), whole)
        assert torch.equal(lora.merged(zeros, down[order], up[:, order], 0.5), bare)
    assert seen > 1000, "the plain sum shows every order"
    scale = up.double().abs() @ down.double().abs()
    assert float(((bare.double() - 0.5 * plain) / scale).abs().max()) < (
        1e-7 if dtype == "float32" else 1e-15
    )


def test_what_is_no_number_stays_none() -> None:
    weight, down, up = drawn(4, 6, seed=1), drawn(2, 6, seed=2), drawn(4, 2, seed=3)
    up[0, 0], up[1, 0], up[2] = float("nan"), float("inf"), 0.0
    found = lora.merged(weight, down, up, 1.0)
    assert torch.isfinite(found).all(1).tolist() == [False, False, True, True]
    assert torch.equal(found[2], weight[2])


def test_the_trainer_s_digest_is_compared_and_one_wrong_bit_is_told_with_both() -> None:
    under = base()
    of = adapters(under)
    views = merging.views(of[0], manifests.views(*of), *under)
    right = merging.digest(views, {view.name: view.name for view in views})
    stated = msgspec.structs.replace(of[0], merged=right)
    assert manifests.decode(manifests.encode(stated)) == stated
    assert manifests.merged_of(manifests.encode(stated)) == right
    merging.refuse_other(stated, right)
    merging.refuse_other(of[0], b"")  # of a trainer that states nothing
    whole = {view.name: merging.tensor(view).clone() for view in views}
    whole["a.q.weight"].view(torch.int32)[3, 4] ^= 1
    wrong = checksum.digest({name: checksum.checksum(value) for name, value in whole.items()})
    for found in (wrong, b""):
        said = rf"other weights \({found.hex()[:16]}\) than by its trainer \({right.hex()[:16]}\)"
        with pytest.raises(EngineError, match=said) as caught:
            merging.refuse_other(stated, found)
        assert "release" in caught.value.remedy


@pytest.mark.parametrize("change", [{"merged": b"x"}, {"merged": bytes(32), "adapter": None}])
def test_a_manifest_that_states_no_possible_digest_is_refused(change: dict[str, Any]) -> None:
    made = msgspec.structs.replace(adapters(base())[0] if "adapter" not in change else base()[0], **change)
    with pytest.raises(WeightsError, match="states what was merged"):
        manifests.decode(manifests.encode(made))


def test_adapters_of_another_base_are_refused_with_both_hashes() -> None:
    under, other = base(), version(1, {"a.q.weight": drawn(6, 10, seed=5)})
    of = adapters(under)
    with pytest.raises(
        EngineError, match=rf"version 2 is of base {under[0].root.hex()}, not of {other[0].root.hex()}"
    ):
        loaded(of, other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"layer": "a.k"},
            r"2 adapters belong to no weight of the base, the first is 'a\.k\.lora_A\.weight'",
        ),
        ({"layer": "norm"}, r"weight 'norm\.weight' \(6,\) has an adapter that does not fit"),
        (
            {"width": 9},
            r"weight 'a\.q\.weight' \(6, 10\) has an adapter that does not fit: A is float32\(3, 9\)",
        ),
        ({"dtype": "int8"}, r"version 2 is to be merged in int8"),
    ],
)
def test_what_does_not_fit_is_refused_and_named(change: dict[str, Any], said: str) -> None:
    under = base()
    with pytest.raises(EngineError, match=said):
        loaded(adapters(under, **change), under)


def test_the_root_covers_the_base_the_scale_and_the_type() -> None:
    under = base()
    others = (adapters(under, scale=1.0), adapters(under, dtype="bfloat16"), adapters(base(torch.bfloat16)))
    assert len({made[0].root for made in (adapters(under), *others)}) == 4
    manifest = adapters(under)[0]
    assert manifests.decode(manifests.encode(manifest)) == manifest
    assert manifests.base_of(manifests.encode(manifest)) == under[0].root
    assert manifests.base_of(manifests.encode(under[0])) == b""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_who_has_the_gpu_is_handed_base_and_adapters_and_makes_the_same_bits(stored: str, dtype: str) -> None:
    """Where the base is stored wider than what it becomes, the result is the smaller thing to hand over."""
    under = base(getattr(torch, stored))
    of = adapters(under, dtype=dtype)
    found = merging.views(of[0], manifests.views(*of), *under)
    with setup.MemoryFiles(found) as file:
        memory = [mapped(path) for path in file.paths]
        made = {
            name: merging.from_files(
                memory, tuple(row), file.merges.get(name), [slices.whole(row[1])], "cpu"
            ).clone()
            for name, *row in file.table
        }
    merged_here = stored == "float32" and dtype == "bfloat16"
    assert ("a.q.weight" in file.merges) == (not merged_here)
    direct = loaded(of, under)
    assert made.keys() == direct.keys()
    for name, value in direct.items():
        assert value.dtype == made[name].dtype == getattr(torch, dtype)
        assert torch.equal(made[name], value)
    for view in found:
        assert torch.equal(merging.on(view, "cpu"), direct[view.name])


def placed(of: Made) -> tuple[Manifest, Any]:
    """As a pull leaves it."""
    buffer = Buffer(of[0].total_nbytes)
    buffer.view[:] = of[1]
    return of[0], buffer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_what_was_pulled_is_handed_over_where_it_lies_and_a_rank_merges_its_part_to_the_same_bits(
    stored: str, dtype: str
) -> None:
    under = base(getattr(torch, stored))
    of = adapters(under, dtype=dtype)
    direct = loaded(of, under)
    manifest, lies = placed(under)
    found = merging.views(of[0], manifests.views_in(*placed(of)), manifest, lies.view, lies)
    with setup.MemoryFiles(found) as memory:
        assert memory.copied_nbytes == 0
        files = [mapped(path) for path in memory.paths]
        assert len(files) == 3, "its own, which is empty, the adapters' and the base's"
        rows = {name: tuple(row) for name, *row in memory.table}
        assert set(memory.merges) == (set(rows) if stored != dtype else {"a.q.weight"})
        for boxes in (
            [((0, 3), (0, 10))],
            [((0, 6), (5, 10))],
            [((2, 4), (1, 8)), ((5, 6), (0, 1))],
            [((0, 6), (0, 10))],
        ):
            merge = memory.merges["a.q.weight"]
            made = merging.from_files(files, rows["a.q.weight"], merge, boxes, "cpu")
            assert made.dtype == direct["a.q.weight"].dtype
            for box in boxes:
                assert torch.equal(slices.cut(made, box), slices.cut(direct["a.q.weight"], box))
        size = {"float32": 4, "bfloat16": 2}[stored]
        assert merging.read_nbytes(rows["a.q.weight"], merge, ((0, 3), (0, 10))) == 3 * 10 * size + 4 * (3 * 10 + 3 * 3)  # fmt: skip
        assert merging.read_nbytes(rows["a.q.weight"], merge, ((0, 6), (5, 10))) == 6 * 5 * size + 4 * (3 * 5 + 6 * 3)  # fmt: skip
        norm = merging.from_files(files, rows["norm.weight"], memory.merges.get("norm.weight"), [((2, 4),)], "cpu")  # fmt: skip
        assert torch.equal(norm[2:4], direct["norm.weight"][2:4])


def test_memory_that_a_load_reads_is_not_used_again_meanwhile() -> None:
    of = placed(base())
    views = manifests.views_in(*of)
    memory = setup.MemoryFiles(views)
    del views
    assert not of[1].idle()
    with memory:
        pass
    del memory
    assert of[1].idle()


@pytest.mark.gpu
def test_a_gpu_merges_to_the_bits_of_a_cpu() -> None:
    under = base(torch.bfloat16)
    of = adapters(under, dtype="bfloat16")
    for view in merging.views(of[0], manifests.views(*of), *under):
        there = merging.on(view, "cuda")
        assert there.is_cuda
        assert torch.equal(there.cpu(), merging.on(view, "cpu"))
