"""timm's AutoAugment, RandAugment, AugMix and random erasing, drawn from the generator of each item."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

from PIL import Image
from timm.data.auto_augment import (
    augment_and_mix_transform,
    auto_augment_transform,
    rand_augment_transform,
)
from timm.data.random_erasing import RandomErasing

from visualtokens.errors import UserError, unknown

AUTO_AUGMENT = ("original", "originalr", "v0", "v0r", "3a")
KINDS = ("rand", "augmix", *AUTO_AUGMENT)
_NUMBER = r"\d+(\.\d+)?"
# What may follow the kind. timm passes over a section that it does not know; here it is an error.
_SECTIONS = {
    "rand": rf"(m\d+|n\d+|p{_NUMBER}|mstd{_NUMBER}|mmax\d+|inc[01]|t(weights|3a|3aw))",
    "augmix": rf"(m\d+|w\d+|d\d+|a{_NUMBER}|b[01]|mstd{_NUMBER})",
}
Mean = tuple[float, float, float]


def check_policy(policy: str) -> None:
    """:class:`UserError` unless timm understands every part of ``policy``."""
    kind, *sections = policy.split("-")
    if kind not in KINDS:
        raise unknown("augmentation policy", kind, KINDS)
    allowed = _SECTIONS.get(kind, rf"mstd{_NUMBER}")
    for section in sections:
        if not re.fullmatch(allowed, section):
            raise UserError(
                f"augmentation policy {policy!r}: {section!r} is not understood; "
                "write for example 'rand-m9-mstd0.5-inc1', 'original-mstd0.5' or 'augmix-m5-w4-d2'"
            )


@functools.cache
def policy_transform(policy: str, size: int, mean: Mean) -> Callable[[Image.Image], Image.Image]:
    """timm's transform for images whose shorter side is ``size``; what it uncovers gets the colour ``mean``.

    It draws from the global generators.
    """
    hints = {
        "translate_const": int(size * 0.45),
        "img_mean": tuple(min(255, round(255 * channel)) for channel in mean),
        "interpolation": Image.Resampling.BICUBIC,
    }
    kind = policy.split("-")[0]
    if kind == "rand":
        return rand_augment_transform(policy, hints)
    if kind == "augmix":
        return augment_and_mix_transform(policy, hints | {"translate_pct": 0.3})
    return auto_augment_transform(policy, hints)


@functools.cache
def eraser(probability: float) -> RandomErasing:
    """timm's random erasing with noise, one rectangle per image; it draws from the global generators."""
    return RandomErasing(probability, mode="pixel", max_count=1, device="cpu")
