"""Try to reduce every model of timm, and those of other libraries: writes docs/reduce_support.md.

    python docs/reduce_support.py

Models are built with random weights on the meta device, reduced, and run on one image without arithmetic. Of
a module of timm that does not know its vision transformers, one model stands for all. It takes some minutes.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import open_clip
import timm
import torch
import torchvision
import transformers
from timm.models import Eva, VisionTransformer
from torch import nn
from tqdm import tqdm

import visualtokens
from visualtokens.errors import UserError
from visualtokens.reduce.families import encoder_of

PAGE = Path(__file__).with_name("reduce_support.md")
METHOD = "weighted_merge"
SHOWN = 3  # examples of a row
FAMILY_MODULES = ("beit", "vision_transformer_relpos", "vision_transformer_sam")  # whose blocks are replaced

# Names and the architectures that belong to them; the first match counts.
NAMES = {
    "DINOv3": "*dinov3*",
    "DINOv2": "*dinov2*",
    "SigLIP": "*siglip*",
    "Perception Encoder": "vit_pe_*",
    "CLIP": "*clip*",
    "EVA, EVA-02": "eva*",
    "DeiT III": "deit3_*",
    "DeiT": "deit_*",
    "AIMv2": "aimv2_*",
    "BEiT-3": "beit3_*",
    "BEiT": "beit*",
    "ViT with relative positions": "vit_*relpos_*",
    "SAM's encoder": "samvit_*",
    "FlexiViT": "flexivit_*",
    "Sapiens2": "*sapiens*",
    "ViT with registers": "vit_*_reg[0-9]*",
    "ViT with rotary positions": "vit_*_rope_*",
    "ViT on a ResNet": "vit_*_r*_s*",
    "ViT": "*",
}

# Classes of other libraries, each built from its default configuration.
HF: dict[str, tuple[str, str]] = {
    "ViT": ("ViTForImageClassification", "ViTConfig"),
    "DeiT": ("DeiTForImageClassificationWithTeacher", "DeiTConfig"),
    "CLIP, vision tower": ("CLIPVisionModelWithProjection", "CLIPVisionConfig"),
    "SigLIP, vision tower": ("SiglipVisionModel", "SiglipVisionConfig"),
    "SigLIP 2, images of several sizes": ("Siglip2VisionModel", "Siglip2VisionConfig"),
    "DINOv2": ("Dinov2Model", "Dinov2Config"),
    "DINOv2 as a backbone": ("Dinov2Backbone", "Dinov2Config"),
    "DINOv2 with registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig"),
    "DINOv3": ("DINOv3ViTModel", "DINOv3ViTConfig"),
    "Swin": ("SwinModel", "SwinConfig"),
    "PVTv2": ("PvtV2Model", "PvtV2Config"),
    "ConvNeXt": ("ConvNextModel", "ConvNextConfig"),
}
OPEN_CLIP = ("ViT-B-32", "ViT-B-16-SigLIP", "ViT-B-16-quickgelu", "coca_ViT-B-32", "EVA02-B-16", "RN50")
TORCHVISION = ("vit_b_16", "vit_h_14", "swin_t", "maxvit_t")

HEAD = f"""# Models that can be reduced

<!-- Written by `python docs/reduce_support.py`; do not edit. -->

`visualtokens.reduce` works with vision transformers that keep one sequence of tokens through all blocks, from
timm, transformers, open_clip and torchvision, and with models of these libraries that contain one: a
classifier of transformers, its timm wrapper, a CLIP model. The tables list what happened to models with
random weights that were reduced with `{METHOD}` and run on one image.

## Other libraries
With transformers {transformers.__version__}, open_clip {open_clip.__version__} and torchvision
{torchvision.__version__.partition("+")[0]}. Hidden states, feature maps and pooled outputs keep their shapes,
because each patch gets the feature of its token. Methods that drop tokens are refused where patches are
read afterwards.
"""
SUPPORTED = f"""
## timm
The architectures of timm {timm.__version__}.
"""
REFUSED = """
### Refused
`reduce` refuses a model before it changes anything. The reason is that of the error message.
"""
OTHERS = """
### Not vision transformers of this kind
All models of these modules of timm are refused: convolutional networks, and transformers with windows, stages
or their own blocks.
"""


@dataclass(frozen=True)
class Outcome:
    """What happened to one model; ``reason`` is empty if it can be reduced."""

    name: str
    family: str  # one of NAMES
    module: str  # of timm
    reason: str
    is_vit: bool


def attempt(name: str) -> Outcome:
    """Reduce the model ``name`` and run it."""
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    family = next(title for title, pattern in NAMES.items() if fnmatch(name, pattern))
    module = module_of(name)
    try:
        visualtokens.reduce(model, METHOD, keep=0.5)
    except UserError as error:
        is_vit = isinstance(model, (VisionTransformer, Eva)) or module in FAMILY_MODULES
        return Outcome(name, family, module, str(error).partition(": ")[2], is_vit)
    channels, height, width = model.pretrained_cfg["input_size"]
    with torch.no_grad():
        full = torch.empty(1, channels, height, width, device="meta")
        model(full)
    return Outcome(name, family, module, "", True)


def other_libraries() -> list[tuple[str, str, str, nn.Module]]:
    """Library, family, name and model, on the meta device, of models outside timm."""
    with torch.device("meta"):
        return [
            *(
                ("transformers", family, model, getattr(transformers, model)(getattr(transformers, config)()))
                for family, (model, config) in HF.items()
            ),
            *(
                ("open_clip", "vision tower", name, open_clip.create_model(name, device="meta").visual)
                for name in OPEN_CLIP
            ),
            *(
                ("torchvision", "ViT" if name.startswith("vit") else "others", name, build(name))
                for name in TORCHVISION
            ),
        ]


def build(name: str) -> nn.Module:
    return torchvision.models.get_model(name)


def attempt_other(model: nn.Module) -> str:
    """The reason why a model is refused; empty if it can be reduced and runs."""
    try:
        visualtokens.reduce(model.eval(), METHOD, keep=0.5)
    except UserError as error:
        return str(error).partition(": ")[2]
    height, width = encoder_of(model).image_size
    with torch.no_grad():
        model(torch.empty(1, 3, height, width, device="meta"))
    return ""


def other_rows() -> list[str]:
    """The rows of the table about other libraries."""
    return [
        f"| {library} | {family} | `{name}` | {'yes' if not reason else 'no: ' + reason} |"
        for library, family, name, model in other_libraries()
        for reason in [attempt_other(model)]
    ]


def module_of(name: str) -> str:
    """The module of timm that builds a model."""
    return timm.model_entrypoint(name).__module__.rpartition(".")[2]


def names_to_try() -> list[str]:
    """All models of the modules that know timm's vision transformers, and one of each other module."""
    ours = {*visualtokens.list_models(), "reduced_vit"}
    chosen: list[str] = []
    seen: set[str] = set()
    for name in timm.list_models():
        module = timm.model_entrypoint(name).__module__
        known = vars(sys.modules[module]).values()
        vits = VisionTransformer in known or Eva in known or module.rpartition(".")[2] in FAMILY_MODULES
        if name not in ours and (vits or module not in seen):
            chosen.append(name)
        seen.add(module)
    return chosen


def groups(found: Iterable[Outcome]) -> list[list[Outcome]]:
    """Outcomes of the same family and reason, the largest groups first."""
    by_kind: dict[tuple[str, ...], list[Outcome]] = defaultdict(list)
    for each in found:
        by_kind[each.family, each.reason].append(each)
    return sorted(by_kind.values(), key=lambda group: (-len(group), group[0].name))


def examples(group: Sequence[Outcome]) -> str:
    """Some names of a group, evenly spaced."""
    names = sorted(each.name for each in group)
    chosen = names if len(names) <= SHOWN else [names[i * len(names) // SHOWN] for i in range(SHOWN)]
    return ", ".join(f"`{name}`" for name in chosen) + (", …" if len(names) > SHOWN else "")


def page(found: Sequence[Outcome], others: Sequence[str]) -> str:
    """The page about these outcomes, and the rows about other libraries."""
    works = groups(each for each in found if not each.reason)
    lines = [HEAD, "| library | family | such as | can be reduced |", "|---|---|---|---|", *others]
    lines += [SUPPORTED, "| family | models | such as |", "|---|--:|---|"]
    lines += [f"{_start(group)} |" for group in works]
    lines += [REFUSED, "| family | models | such as | reason |", "|---|--:|---|---|"]
    vits = {each.module for each in found if each.is_vit}
    refused = groups(each for each in found if each.reason and each.module in vits)
    lines += [f"{_start(group)} | {group[0].reason} |" for group in refused]
    modules = sorted({each.module for each in found} - vits)
    lines += [OTHERS, ", ".join(f"`{module}`" for module in modules) + "."]
    return "\n".join(lines) + "\n"


def _start(group: Sequence[Outcome]) -> str:
    """The first columns of a row."""
    return f"| {group[0].family} | {len(group)} | {examples(group)}"


def main() -> None:
    """Write the page."""
    found = [attempt(name) for name in tqdm(names_to_try(), file=sys.stderr)]
    PAGE.write_text(page(found, other_rows()), "utf-8")


if __name__ == "__main__":
    main()
