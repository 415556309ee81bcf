"""The tables of architectures in the papers, printed from the running models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from visualtokens.bench.comparison import align
from visualtokens.papers.entries import timm_model

DEPTHS = (18, 34, 50, 101)
BLOCKS = {"BasicBlock": "BB", "Bottleneck": "BN"}


def architecture(paper: str | None, table: str | None) -> str | None:
    """The table of architectures with this number, as text; None if the table is not one of those."""
    write = TABLES.get((paper, table))
    return None if write is None else write()


def sides(model: Any, image: int) -> list[int]:
    """Height of the map after each stage, for one square image on the meta device."""
    images = torch.empty(1, 3, image, image, device="meta")
    return [maps.shape[2] for maps in model.forward_intermediates(images, intermediates_only=True)]


# Visual Transformers, Table 11


def vt_table() -> str:
    """Table 11 of Visual Transformers: the stages of the VT-ResNets."""
    models: list[Any] = [timm_model(f"vt_resnet{depth}")() for depth in DEPTHS]
    _, *maps, _ = sides(models[0], 224)  # without the stem's convolution and the VT stage
    rows = [("stage", "resolution", *(f"VT-R{depth}" for depth in DEPTHS))]
    rows.append(("1", _square(maps[0]), *_merged(_vt_stem(model) for model in models)))
    for stage, height in enumerate(maps, start=1):
        blocks = [_resnet_stage(getattr(model, f"layer{stage}")) for model in models]
        rows.append((str(stage + 1), _square(height), *blocks))
    tokens = str(models[0].vt.blocks[0].tokenizer.filter.conv.out_channels)
    upper, lower = zip(*(_vt_stage(model.vt) for model in models), strict=True)
    rows += [("5", tokens, *upper), ("", "", *lower)]
    rows.append(("head", "1", *_merged(f"avgpool-fc{model.head.out_features}" for model in models)))
    lines = ["".join(cell.ljust(15) for cell in row).rstrip() for row in rows]
    return "\n".join(["visual-transformers, table 11", *lines])


def _merged(cells: Iterable[str]) -> tuple[str, ...]:
    """One cell if all are equal, as the paper prints them."""
    return tuple(dict.fromkeys(cells))


def _square(height: int) -> str:
    return f"{height}×{height}"


def _vt_stem(model: Any) -> str:
    conv, pool = model.conv1, model.maxpool
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    first = f"conv{kernel}×{kernel}-C{conv.out_channels}-S{stride}"
    return f"{first} → maxpool{pool.kernel_size}×{pool.kernel_size}-S{pool.stride}"


def _resnet_stage(stage: Any) -> str:
    last = stage[-1]
    convolution = last.conv3 if hasattr(last, "conv3") else last.conv2
    return f"{BLOCKS[type(last).__name__]}-C{convolution.out_channels} × {len(stage)}"


def _vt_stage(stage: Any) -> tuple[str, str]:
    """The cell of a VT stage, in two lines."""
    tokenizer = stage.blocks[0].tokenizer
    tokens, channels = tokenizer.filter.conv.out_channels, tokenizer.embed.norm.num_features
    return f"VT-C{stage.dim}-L{tokens}", f"-CT{channels} × {len(stage.blocks)}"


# PaCa-ViT, Table 1


def paca_table() -> str:
    """Table 1 of PaCa-ViT: the stages of B0, B1 and B2; "a/b" is for 224×224 and 32×32 images."""
    described = []
    for n in range(3):
        large = _paca_stages(timm_model(f"paca_vit_b{n}")(), 224)
        small = _paca_stages(timm_model(f"paca_vit_b{n}_32", num_classes=100)(), 32)
        described.append({name: _merge(large[name], small[name]) for name in large})
    rows: list[tuple[str, ...]] = [("", "B0", "B1", "B2", "")]
    rows += [(name, *(model[name] for model in described), "") for name in described[0]]
    return "\n".join(["paca-vit, table 1 (224×224 / 32×32)", *align(rows)])


def _paca_stages(model: Any, image: int) -> dict[str, str]:
    return {
        f"stage {number}: {name}": value
        for number, (stage, height) in enumerate(zip(model.stages, sides(model, image), strict=True), start=1)
        for name, value in _paca_stage(stage, height).items()
    }


def _paca_stage(stage: Any, height: int) -> dict[str, str]:
    conv, block = stage.embed.conv, stage.blocks[0]
    channels, clustering = conv.out_channels, block.attn.clustering
    return {
        "output size": _square(height),
        "(k, s, p)": f"({conv.kernel_size[0]}, {conv.stride[0]}, {conv.padding[0]})",
        "channels": str(channels),
        "clusters": "0" if clustering is None else str(clustering.clusters),
        "reduction ratio": "" if clustering is None else str(channels // clustering.conv.out_channels),
        "heads": str(block.attn.heads),
        "expansion": str(block.ffn.fc1.out_features // channels),
        "depth": str(len(stage.blocks)),
    }


def _merge(large: str, small: str) -> str:
    """One cell for both image sizes: ``a``, or ``a/b`` if both have a value and these differ."""
    return "/".join(dict.fromkeys(value for value in (large, small) if value)) or "–"


TABLES: Mapping[tuple[str | None, str | None], Callable[[], str]] = {
    ("visual-transformers", "11"): vt_table,
    ("paca-vit", "1"): paca_table,
}
