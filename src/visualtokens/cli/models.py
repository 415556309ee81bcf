"""``vtok models``.

The sizes are in models.csv, so that the list needs no model; ``python -m visualtokens.cli.models`` writes it.
"""

from __future__ import annotations

import csv
import difflib
import fnmatch
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from visualtokens.cli.verb import Result, Verb
from visualtokens.errors import UserError
from visualtokens.tables import table

SIZES = Path(__file__).with_name("models.csv")
# The files in models/: family, and its paper as `vtok papers` names it.
FAMILIES = {
    "deit": ("DeiT", "token-pooling"),
    "paca_vit": ("PaCa-ViT", "paca-vit"),
    "pvt_v2": ("PVTv2", "paca-vit"),
    "resnet": ("ResNet", "visual-transformers"),
    "stvit": ("STViT", "stvit"),
    "swin_iso": ("Swin", "stvit"),
    "vt_resnet": ("VT-ResNet", "visual-transformers"),
}
# Models whose weights the authors released: patterns, and the family that `visualtokens.convert` takes.
RELEASED = {
    **dict.fromkeys(("paca_vit_tiny", "paca_vit_small*", "paca_vit_base"), "paca"),
    **dict.fromkeys(("stvit_small", "stvit_base", "stvit_large"), "stvit"),
}
WEIGHTS = "weights: files of the authors, for visualtokens.convert(file, {families}); — there are none"


@dataclass(frozen=True, kw_only=True)
class ModelsConfig:
    """List the models of this library with their sizes."""

    filter: str = ""
    """Part of a model name, or a pattern such as 'paca_*_32'; by default all models."""


@dataclass(frozen=True)
class Size:
    """What the list says about a model."""

    name: str
    parameters: int
    macs: int  # of one image
    height: int  # of the default input
    width: int
    family: str
    paper: str  # empty for models of other libraries

    @property
    def weights(self) -> str | None:
        """The family of released files that ``visualtokens.convert`` reads; None if there are none."""
        return next((to for pattern, to in RELEASED.items() if fnmatch.fnmatch(self.name, pattern)), None)


def run(config: ModelsConfig) -> Result:
    """List the models."""
    sizes = _all_sizes()
    pattern = config.filter if any(c in config.filter for c in "*?[") else f"*{config.filter}*"
    found = [sizes[name] for name in sorted(sizes) if fnmatch.fnmatch(name, pattern)]
    if not found:
        raise _no_match(config.filter, sizes)
    rows = [
        (
            size.name,
            f"{size.parameters / 1e6:.2f} M",
            f"{size.macs / 1e9:.2f}",
            f"{size.height}×{size.width}",
            size.weights or "—",
            size.family,
            size.paper,
        )
        for size in found
    ]
    header = ("model", "parameters", "GMACs", "input", "weights", "family", "paper")
    text = table(rows, header=header, right=(1, 2, 3))
    if families := sorted({size.weights for size in found if size.weights}):
        text += "\n\n" + WEIGHTS.format(families=" or ".join(map(repr, families)))
    return Result(text, {"models": [_to_dict(size) for size in found]})


def _no_match(given: str, sizes: Mapping[str, Size]) -> UserError:
    nearest = difflib.get_close_matches(given.strip("*"), sizes, n=3, cutoff=0.3)
    closest = f"the closest are {', '.join(nearest)}; " if nearest else ""
    return UserError(f"no match for {given!r}; {closest}`vtok models` lists all {len(sizes)}")


def _to_dict(size: Size) -> dict[str, object]:
    values = asdict(size)
    height, width = values.pop("height"), values.pop("width")
    return {**values, "size": [height, width], "weights": size.weights}


def read_sizes() -> dict[str, Size]:
    """Return the sizes of the models of this library by their names."""
    types = {"int": int, "str": str}
    with SIZES.open(encoding="utf-8", newline="") as file:
        rows = [
            Size(**{field.name: types[str(field.type)](row[field.name]) for field in fields(Size)})
            for row in csv.DictReader(file)
        ]
    return {size.name: size for size in rows}


def _all_sizes() -> dict[str, Size]:
    """Return the sizes of all models, also of those that other code registered in this process."""
    sizes = read_sizes()
    registry = sys.modules.get("visualtokens.models.registry")
    for name in registry.list_models() if registry is not None else ():
        if name not in sizes:
            sizes[name] = measure(name)
    return sizes


def measure(name: str) -> Size:
    """Build a model, without its weights, and count."""
    import timm
    import torch

    from visualtokens.bench import count_macs, count_parameters

    with torch.device("meta"):
        model = timm.create_model(name)
    height, width = model.pretrained_cfg["input_size"][1:]
    file = timm.model_entrypoint(name).__module__.rpartition(".")[2]
    family, paper = FAMILIES.get(file, (file, ""))
    macs = count_macs(model, (height, width))
    return Size(name, count_parameters(model), macs, height, width, family, paper)


def write_sizes() -> None:
    """Write models.csv."""
    from visualtokens.files import write_atomically
    from visualtokens.models import list_models

    lines = [[field.name for field in fields(Size)]]
    lines += [[str(value) for value in asdict(measure(name)).values()] for name in list_models()]
    text = "".join(",".join(line) + "\n" for line in lines)
    write_atomically(SIZES, lambda path: path.write_text(text, encoding="utf-8"))


VERB = Verb(config=ModelsConfig, run=run, example="vtok models 'paca_*'", positional="filter", light=True)

if __name__ == "__main__":
    write_sizes()
