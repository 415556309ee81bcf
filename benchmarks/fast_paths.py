"""Ablation of the fast paths: the speed with each of them, relative to the speed without it.

    python benchmarks/fast_paths.py --save results/fast_paths.json

At 224², batch 1 and 8, where maps are large also in larger batches and images; eager, and compiled by
inductor where the fast path applies to compiled graphs. Both variants of a setting run in a process of
their own and are timed in turns. A fast path is turned off by replacing a function or constant of the
library; a target that does not exist is an error. The outputs of both variants must agree. With ``--only``,
the other settings of the saved file are kept.
"""

from __future__ import annotations

import argparse
import functools
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import visualtokens
from own_process import OwnProcess, in_turns
from visualtokens.bench import machine
from visualtokens.reduce.attention import attention

ON, OFF = "on", "off"
TOLERANCE = 1e-3  # of the outputs of both variants, relative to the largest


def model(name: str, *, fused: bool = False) -> nn.Module:
    built = timm.create_model(name).eval()
    return visualtokens.fuse(built) if fused else built


def reduced(method: str) -> nn.Module:
    base = timm.create_model("deit_small_patch16_224").eval()
    return visualtokens.reduce(base, method=method, keep="deit_small/3").eval()


def attention_with_weights(attn: nn.Module, x: Tensor, **options: Any) -> Any:
    """``reduce.attention.attention`` that always computes the attention weights explicitly."""
    return attention(attn, x, **(options | {"needs": options["needs"] | {"significance"}}))


@dataclass(frozen=True)
class FastPath:
    """A fast path of a model. Off, the ``replacements`` are in place, and the model is ``plain`` if given."""

    description: str
    build: Callable[[], nn.Module]
    replacements: Mapping[str, object] = field(default_factory=dict)  # by "module:attribute"
    plain: Callable[[], nn.Module] | None = None
    cases: tuple[tuple[int, int], ...] = ((1, 224), (8, 224))  # batch and image size
    compiled: bool = False  # whether it also applies to compiled graphs


def folding(name: str) -> FastPath:
    return FastPath(
        f"fuse({name}): BatchNorm, layer scale and residual convolutions folded into weights",
        functools.partial(model, name, fused=True),
        plain=functools.partial(model, name),
        compiled=True,
    )


FAST_PATHS: dict[str, FastPath] = {
    "ffn_strips": FastPath(
        "ConvFFN of paca_vit_b0 in strips that fit into the cache",
        functools.partial(model, "paca_vit_b0"),
        {"visualtokens.layers.convolutions:_strips_are_cheaper": lambda *_: False},
        cases=((1, 224), (8, 224), (32, 224), (1, 800)),
        compiled=True,
    ),
    "stage_chunks": FastPath(
        "stages of stvit_small on a few images at a time",
        functools.partial(model, "stvit_small"),
        {"visualtokens.models.stvit:Stage.images_per_chunk": lambda _, x: x.shape[0]},
        cases=((1, 224), (8, 224), (32, 224)),
    ),
    "open_attention": FastPath(
        "explicit attention weights only in blocks where the pool needs them; kmedoids needs none",
        functools.partial(reduced, "kmedoids"),
        {"visualtokens.reduce.blocks:attention": attention_with_weights},
        compiled=True,
    ),
    "folding_stvit": folding("stvit_small"),
    "folding_vt": folding("vt_resnet18"),
}


@contextmanager
def replaced(replacements: Mapping[str, object]) -> Iterator[None]:
    """Replace attributes of modules or classes, given as "module:attribute", inside the block."""
    originals = []
    for target, value in replacements.items():
        module, _, path = target.partition(":")
        owner, _, name = path.rpartition(".")
        try:
            holder = pkgutil.resolve_name(f"{module}:{owner}")
            originals.append((holder, name, getattr(holder, name)))
        except (ImportError, AttributeError) as error:
            raise SystemExit(f"{target} does not exist ({error}); update FAST_PATHS in {__file__}") from error
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, name, original in originals:
            setattr(holder, name, original)


@dataclass(frozen=True)
class Setting:
    path: str
    batch: int
    size: int
    compiled: bool

    def images(self) -> Tensor:
        return torch.randn(
            self.batch, 3, self.size, self.size, generator=torch.Generator().manual_seed(0)
        )  # (B, 3, H, W)


def build(setting: Setting, variant: str) -> nn.Module:
    """The model of one variant; both have the same weights."""
    path = FAST_PATHS[setting.path]
    torch.manual_seed(0)
    return (path.plain or path.build)() if variant == OFF else path.build()


def make(setting: Setting, variant: str) -> Callable[[], Tensor]:
    """A forward pass of one variant, in a process of its own: replacements are not undone."""
    if variant == OFF:
        replaced(FAST_PATHS[setting.path].replacements).__enter__()
    model, images = build(setting, variant), setting.images()
    forward = torch.compile(model, dynamic=False) if setting.compiled else model

    def run() -> Tensor:
        with torch.inference_mode():
            return forward(images)

    return run


def difference(setting: Setting) -> float:
    """Largest difference of the outputs of both variants, relative to the largest output."""
    images = setting.images()
    with torch.inference_mode():
        on = build(setting, ON)(images)
        with replaced(FAST_PATHS[setting.path].replacements):
            off = build(setting, OFF)(images)
    return ((on - off).abs().max() / off.abs().max()).item()


def measure(setting: Setting, rounds: int) -> dict[str, Any]:
    """Speed with the fast path relative to the speed without it: median and 95 % interval."""
    error = difference(setting)
    if error > TOLERANCE:
        raise SystemExit(f"{setting.path}: the outputs with and without it differ by {error:.1e}")
    runs = {variant: OwnProcess(functools.partial(make, setting, variant)) for variant in (OFF, ON)}
    timings = in_turns(runs, rounds=rounds)
    ratio = timings.ratio(ON)
    return {
        "fast_path": setting.path,
        "batch": setting.batch,
        "size": setting.size,
        "mode": "compile" if setting.compiled else "eager",
        "images_per_second": {name: timings.rate(name, setting.batch).median for name in runs},
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "verdict": timings.verdict(ON),
        "noisy_turns": timings.noisy,
        "output_difference": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FAST_PATHS, default=list(FAST_PATHS), metavar="NAME",
                        help=f"fast paths to measure: {', '.join(FAST_PATHS)} (default: all)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, help="turns of each variant (default: %(default)s)")
    parser.add_argument("--save", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    for name in options.only:
        with replaced(FAST_PATHS[name].replacements):
            pass  # fails now rather than after an hour if a target does not exist
    settings = [
        Setting(name, batch, size, compiled)
        for name in options.only
        for batch, size in FAST_PATHS[name].cases
        for compiled in ((False, True) if FAST_PATHS[name].compiled else (False,))
    ]
    result: dict[str, Any] = {
        "command": "python benchmarks/fast_paths.py --save results/fast_paths.json",
        "machine": machine(),
        "rounds": options.rounds,
        "fast_paths": {name: path.description for name, path in FAST_PATHS.items()},
        "settings": [],
    }
    if options.save and options.save.exists():
        saved = json.loads(options.save.read_text())
        kept = set(FAST_PATHS) - set(options.only)
        result["settings"] = [row for row in saved["settings"] if row["fast_path"] in kept]
        result["deleted"] = saved["deleted"]  # fast paths that brought too little, with their figures
    for number, setting in enumerate(settings, 1):
        mode = "compiled" if setting.compiled else "eager"
        label = f"{setting.path}, {setting.batch}×{setting.size}², {mode}"
        print(f"[{number}/{len(settings)}] {label:44s} ", end="", flush=True)
        row = measure(setting, options.rounds)
        result["settings"].append(row)
        print(
            f"{row['images_per_second'][ON]:7.1f} images/s, {row['ratio']:.2f}× "
            f"({row['ratio_low']:.2f}–{row['ratio_high']:.2f}) {row['verdict']}"
            + (f", {row['noisy_turns']} noisy turns" if row["noisy_turns"] else ""),
            flush=True,
        )
        if options.save:  # after each setting, so that an interrupted run keeps its results
            options.save.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
