"""Exported files as functions, and how much their answers differ from those of the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.export.metadata import Metadata
from visualtokens.export.runtime import OnnxModel
from visualtokens.files import one_line

Answer = Callable[[Tensor], Tensor]
BATCHES = (1, 2, 5)
SEED = 0
Statistics = tuple[Sequence[float], Sequence[float]]


def largest_difference(
    file: Path,
    metadata: Metadata,
    model: nn.Module,
    *,
    images: Tensor | None,
    statistics: Statistics | None,
) -> tuple[float, int]:
    """Return the largest difference between the answers of a file and of the model, and the images compared.

    NaN in either is an infinite difference.
    """
    answer = _open(file, metadata)
    largest, compared = 0.0, 0
    for batch in _batches(metadata, images, statistics):
        expected = model(_normalised(batch, statistics)).float()
        try:
            found = answer(batch)
        except (UserError, RuntimeError, ValueError, AssertionError) as error:
            hint = f"choose format {'pt2' if metadata.format == 'onnx' else 'onnx'}"
            if "size" in metadata.dynamic:
                hint = f"leave size out of dynamic or {hint}"
            reason = one_line(error).removeprefix(f"{file} ")  # a temporary name
            raise UserError(
                f"the file would fail on images of {tuple(batch.shape)}: {reason}; {hint}"
            ) from error
        if found.shape != expected.shape:
            raise UserError(
                f"the file returns {tuple(found.shape)} instead of {tuple(expected.shape)}; it is not written"
            )
        difference = float((found - expected).abs().max()) if expected.numel() else 0.0
        largest = max(largest, difference if difference == difference else float("inf"))
        compared += len(batch)
    return largest, compared


def check_deterministic(model: nn.Module, size: tuple[int, int]) -> None:
    """Raise :class:`UserError` if the model answers differently when it sees the same images again."""
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(SEED))
    first, second = model(images), model(images)
    if isinstance(first, Tensor) and not torch.equal(first, second):
        reduction = vars(model).get("reduction")
        method = f" (method {reduction.method!r})" if reduction is not None else ""
        raise UserError(
            f"the answers of this model are random{method}, so a file cannot be compared with it; "
            "choose another method, such as weighted_merge"
        )


def _batches(metadata: Metadata, images: Tensor | None, statistics: Statistics | None) -> Iterator[Tensor]:
    """Yield random images, and the given ones, in several batches and sizes, as the file takes them."""
    generator = torch.Generator().manual_seed(SEED)
    counts = BATCHES if "batch" in metadata.dynamic else (1,)
    for size in _sizes(metadata):
        for count in counts:
            if statistics is None:
                yield torch.randn(count, 3, *size, generator=generator)
            else:
                yield torch.randint(0, 256, (count, *size, 3), generator=generator, dtype=torch.uint8)
    if images is None:
        return
    if images.ndim != 4 or images.shape[1] != 3:
        raise UserError(f"images have the shape {tuple(images.shape)}; give (n, 3, H, W)")
    step = max(counts)
    for start in range(0, len(images), step):
        part = images[start : start + step]
        if len(part) == step or "batch" in metadata.dynamic:
            yield _as_pixels(part, statistics)


def _sizes(metadata: Metadata) -> list[tuple[int, int]]:
    """Return the model's own size, and with a dynamic size others that are not square."""
    height, width = metadata.size
    if "size" not in metadata.dynamic:
        return [(height, width)]
    multiple = metadata.multiple
    own = (-(-height // multiple) * multiple, -(-width // multiple) * multiple)
    step = multiple if multiple > 1 else 32
    return [own, (own[0] + step, own[1]), (own[0], own[1] + 2 * step)]


def _normalised(batch: Tensor, statistics: Statistics | None) -> Tensor:
    if statistics is None:
        return batch
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in statistics)
    return (batch.permute(0, 3, 1, 2).float() / 255 - mean) / std


def _as_pixels(images: Tensor, statistics: Statistics | None) -> Tensor:
    """Return normalised images ``(n, 3, H, W)`` as the file takes them."""
    if statistics is None:
        return images
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in statistics)
    values = ((images * std + mean) * 255).round().clamp(0, 255)
    return values.permute(0, 2, 3, 1).to(torch.uint8).contiguous()


# Opening a file that was just written. torch runs Python code that a .pt2 file holds, so no other is opened.


def _open(file: Path, metadata: Metadata) -> Answer:
    if metadata.format == "onnx":
        return _from_onnx(file)
    if metadata.format == "pt2":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(file).module()
    from torch._inductor import aoti_load_package

    return aoti_load_package(str(file))


def _from_onnx(file: Path) -> Answer:
    model = OnnxModel(file, threads=max(2, torch.get_num_threads()))  # errors of threads need several

    def answer(images: Tensor) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(model(images.numpy())))

    return answer
