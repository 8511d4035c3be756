"""How each rank of an engine loaded a version until its loaders were asked what they keep: it read, merged and summed all of it.

For `benchmarks/ranks.py`. In vLLM's own processes, beside the loader in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from rollout.engines import merging, slices
from rollout.engines.checksum import checksum
from rollout.engines.vllm import worker


class Extension(worker.Extension):
    def scavenger_load_whole(
        self,
        paths: Sequence[str],
        table: Sequence[worker.TensorRow],
        merges: Mapping[str, merging.FileMerge] | None = None,
    ) -> tuple[Any, ...]:
        model = self.model_runner.get_model()
        packed = worker._packed(model)
        dtypes, _ = self._targets(model, [row[0] for row in table], packed)
        cast: worker.Sums = {}
        published: worker.Sums = {}
        files = [worker.mapped(path) for path in paths]
        read_nbytes = 0

        def tensors() -> Iterator[tuple[str, Tensor]]:
            nonlocal read_nbytes
            for name, dtype, shape, file, offset, nbytes in table:
                row = dtype, shape, file, offset, nbytes
                merge, box = (merges or {}).get(name), slices.whole(shape)
                whole = merging.from_files(files, row, merge, [box], self.model_runner.device)
                read_nbytes += merging.read_nbytes(row, merge, box)
                tensor = whole.to(dtypes[name])
                published[name] = worker._encoded(checksum(whole))
                cast[name] = (
                    published[name] if tensor.dtype == whole.dtype else worker._encoded(checksum(tensor))
                )
                yield name, tensor

        self.model_runner.reload_weights(weights_iterator=tensors())
        worker._repack_embeddings(model)
        now = worker.held(model, self.scavenger_names)
        return cast, now, packed, published, now, read_nbytes
