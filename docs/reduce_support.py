"""Try to reduce every model of timm: ``python docs/reduce_support.py`` writes docs/reduce_support.md.

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

import timm
import torch
from timm.models import Eva, VisionTransformer
from tqdm import tqdm

import visualtokens
from visualtokens.errors import UserError
from visualtokens.reduce.methods import DEFAULT_METHOD

PAGE = Path(__file__).with_name("reduce_support.md")
SHOWN = 3  # examples of a row

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
    "FlexiViT": "flexivit_*",
    "Sapiens2": "*sapiens*",
    "ViT with registers": "vit_*_reg[0-9]*",
    "ViT with rotary positions": "vit_*_rope_*",
    "ViT on a ResNet": "vit_*_r*_s*",
    "ViT": "*",
}

HEAD = f"""# Models that can be reduced

<!-- Written by `python docs/reduce_support.py`; do not edit. -->

`visualtokens.reduce` works with timm's vision transformers that keep one sequence of tokens through all
blocks (`VisionTransformer` and `Eva`). The tables list what happened to every architecture of timm
{timm.__version__}: built with random weights, reduced with `{DEFAULT_METHOD}` and run on one image.

## Supported
"""
REFUSED = """
## Refused
`reduce` refuses a model before it changes anything. The reason is that of the error message.
"""
OTHERS = """
## Not vision transformers of this kind
All models of these modules of timm are refused with *it is not a timm VisionTransformer or Eva model*:
convolutional networks, and transformers with windows, stages or their own blocks.
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
        visualtokens.reduce(model, keep=0.5)
    except UserError as error:
        is_vit = isinstance(model, (VisionTransformer, Eva))
        return Outcome(name, family, module, str(error).partition(": ")[2], is_vit)
    channels, height, width = model.pretrained_cfg["input_size"]
    with torch.no_grad():
        full = torch.empty(1, channels, height, width, device="meta")
        model(full)
    return Outcome(name, family, module, "", True)


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
        if name not in ours and (VisionTransformer in known or Eva in known or module not in seen):
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


def page(found: Sequence[Outcome]) -> str:
    """The page about these outcomes."""
    works = groups(each for each in found if not each.reason)
    lines = [HEAD, "| family | models | such as |", "|---|--:|---|"]
    lines += [f"{_start(group)} |" for group in works]
    lines += [REFUSED, "| family | models | such as | reason |", "|---|--:|---|---|"]
    vits = {each.module for each in found if each.is_vit}
    refused = groups(each for each in found if each.reason and each.module in vits)
    lines += [f"{_start(group)} | {group[0].reason} |" for group in refused]
    others = sorted({each.module for each in found} - vits)
    lines += [OTHERS, ", ".join(f"`{module}`" for module in others) + "."]
    return "\n".join(lines) + "\n"


def _start(group: Sequence[Outcome]) -> str:
    """The first columns of a row."""
    return f"| {group[0].family} | {len(group)} | {examples(group)}"


def main() -> None:
    """Write the page."""
    found = [attempt(name) for name in tqdm(names_to_try(), file=sys.stderr)]
    PAGE.write_text(page(found), "utf-8")


if __name__ == "__main__":
    main()
