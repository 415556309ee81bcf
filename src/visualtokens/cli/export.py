"""``vtok export``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

from visualtokens.cli.output import checkpoint_files, refuse_overwriting, unreadable_as_json, warn_unreadable
from visualtokens.cli.verb import Result, Verb
from visualtokens.errors import UserError
from visualtokens.tables import printable

if TYPE_CHECKING:
    from torch import Tensor

    from visualtokens.data import BadImage
    from visualtokens.export import Exported

PHOTOS = 16  # of --images


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a model as a file for onnxruntime or torch, and compare its answers with those of the model."""

    checkpoint: str | None = None
    """Checkpoint folder that `vtok train --out` wrote."""

    model: str | None = None
    """Instead of a checkpoint: the name of a timm classifier."""

    weights: str | None = None
    """Weights of a named model: a .safetensors or .pth file, or pretrained to fetch timm's; else random."""

    out: str
    """Output file: model.onnx or model.pt2."""

    format: Literal["onnx", "pt2", "aoti"] | None = None
    """Format: onnx, pt2 (an exported program of torch) or aoti (compiled for this machine); by default that
    of the ending of --out."""

    dynamic: str = "batch"
    """Axes of the input that may vary: batch, 'batch,size', size or none."""

    multiple: int | None = None
    """Heights and widths that vary are multiples of this number: by default 32 for aoti, which makes its
    code faster, else 1, as far as torch captures the model."""

    half: bool = False
    """Compute in float16; inputs and outputs stay float32."""

    with_preprocess: bool = False
    """Let the file take pixels from 0 to 255 (uint8, height × width × 3) and normalise them itself."""

    images: str | None = None
    """Folder of photos on which the file is compared with the model, besides random images."""

    tolerance: float | None = None
    """Largest difference between the answers of the file and of the model; by default 1e-4, with --half
    0.05."""

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.model is None):
            raise UserError("give --checkpoint FOLDER or --model NAME, one of them")
        if self.weights is not None and self.model is None:
            raise UserError(f"{self.checkpoint!r} has weights of its own; leave --weights out")


def run(config: ExportConfig) -> Result:
    """Export a checkpoint or a named model."""
    from visualtokens.export import export

    out = Path(config.out)
    refuse_overwriting([out], _inputs(config))
    source: Any
    if config.checkpoint is not None:
        from visualtokens.checkpoint import load

        source = load(config.checkpoint)
        preprocess = source.preprocess
    else:
        from visualtokens.tasks.timm_models import preprocess_for
        from visualtokens.tune.inputs import named_model

        source = named_model(str(config.model), config.weights).eval()
        preprocess = preprocess_for(source)
    images, bad = _photos(config.images, preprocess)
    warn_unreadable(bad)
    axes = [] if config.dynamic == "none" else [axis.strip() for axis in config.dynamic.split(",")]
    made = export(
        source,
        out,
        format=config.format,
        dynamic=axes,
        multiple=config.multiple,
        half=config.half,
        with_preprocess=config.with_preprocess,
        tolerance=config.tolerance,
        images=images,
    )
    document = {
        "out": str(out),
        "difference": made.difference,
        "compared": made.compared,
        "bytes": made.bytes,
        "metadata": asdict(made.metadata),
        "unreadable": unreadable_as_json(bad),
    }
    return Result(_text(config, made), document)


def _inputs(config: ExportConfig) -> list[Path]:
    inputs = [] if config.weights is None else [Path(config.weights)]
    return inputs + ([] if config.checkpoint is None else checkpoint_files(config.checkpoint))


def _photos(folder: str | None, preprocess: Any) -> tuple[Tensor | None, list[BadImage]]:
    """Return some photos of a folder as the model takes them, ``(n, 3, H, W)``, and the unreadable ones."""
    if folder is None:
        return None, []
    import torch

    from visualtokens.data import BadImage
    from visualtokens.predict import find_images

    found = find_images([folder])
    wanted = min(PHOTOS, len(found))
    inputs: list[Tensor] = []
    bad: list[BadImage] = []
    for i in range(wanted):
        try:
            inputs.append(preprocess(found.read(i * len(found) // wanted)))
        except BadImage as error:
            bad.append(error)
    same = [x for x in inputs if x.shape == inputs[0].shape]
    if not same:
        raise UserError(f"{folder!r} holds no photo that can be read" + (f": {bad[0]}" if bad else ""))
    return torch.stack(same), bad


def _text(config: ExportConfig, made: Exported) -> str:
    name = printable(config.out)
    lines = [
        f"{name}: {made.bytes / 1e6:,.1f} MB, format {made.metadata.format}",
        f"largest difference from the model: {made.difference:.2g} on {made.compared} images",
    ]
    if made.metadata.multiple > 1:
        lines.append(f"height and width: multiples of {made.metadata.multiple}")
    if config.model is not None and config.weights is None:
        lines.append("The weights are random; see --weights.")
    if made.metadata.format == "onnx" and made.metadata.task is not None:
        lines.append(f"try: vtok predict photo.jpg --onnx {quote(config.out)}")
    return "\n".join(lines)


VERB = Verb(
    config=ExportConfig,
    run=run,
    example="vtok export --checkpoint run/ --out model.onnx",
    groups={
        "model": ("checkpoint", "model", "weights"),
        "file": ("out", "format", "dynamic", "multiple", "half", "with_preprocess"),
        "comparison": ("images", "tolerance"),
    },
)
