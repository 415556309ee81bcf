"""PaCa-ViT against PVTv2 and against a transcription of its equations: speed and memory.

    python benchmarks/bench_paca.py [--save results/bench_paca.json]

Speed is eager, in inference mode, with all candidates of a setting interleaved in one run. Memory is the peak
above weights and input. The transcription is a direct implementation of the paper: every block converts to a
contiguous map and back for each convolution, and attention is ``nn.MultiheadAttention`` with its weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from timm.layers import set_fused_attn, use_fused_attn
from torch import Tensor, nn
from torch.nn import functional as F

import visualtokens
from visualtokens.bench import Candidate, Spread, compare, machine, peak_memory
from visualtokens.models.paca_vit import Block, PaCaViT, Stage

BASELINE, OURS = "pvt_v2_b2", "paca_vit_b2"
SPEED = [  # height, width, batch, least speed-up over the baseline
    (224, 224, 8, 1.0),
    (224, 224, 1, 1.25),
    (640, 640, 2, 1.15),
    (1280, 800, 1, 2.0),
]
INFERENCE_MEMORY = 0.8  # × the baseline's at most, at the two large sizes
TRAINING_MEMORY = {"fused": 1.0, "unfused": 0.6}  # × the baseline's at most, by its attention
LARGE = [(640, 640), (1280, 800)]
TRANSCRIBED = {"paca_vit_tiny": 1.5, "paca_vit_small": 1.5}

Row = dict[str, Any]


def speed(rounds: int) -> Iterator[Row]:
    """Measures images per second and the peak memory of inference."""
    for height, width, batch, target in SPEED:
        result = compare([BASELINE], against=[OURS], size=(height, width), batch=batch, rounds=rounds)
        ours = result.rows[1]
        about = {"height": height, "width": width, "batch": batch, "quiet": result.noisy == 0}
        rates = {row.name: row.images_per_second.median for row in result.rows}
        yield at_least("speed", about | {"images_per_second": rates}, ours.ratio, target)
        if (height, width) in LARGE:
            peaks = {row.name: row.peak_bytes for row in result.rows}
            yield at_most("inference memory", about | {"peak_bytes": peaks}, peaks, INFERENCE_MEMORY)


def smaller(rounds: int) -> Iterator[Row]:
    """Measures the smaller sizes of both families, without a target."""
    for size in ("b0", "b1"):
        for height, width, batch, _ in SPEED:
            baseline, ours = f"pvt_v2_{size}", f"paca_vit_{size}"
            result = compare([baseline], against=[ours], size=(height, width), batch=batch, rounds=rounds)
            about = {"model": ours, "height": height, "width": width, "batch": batch}
            about["quiet"] = result.noisy == 0
            about["images_per_second"] = {row.name: row.images_per_second.median for row in result.rows}
            about["peak_bytes"] = {row.name: row.peak_bytes for row in result.rows}
            yield at_least("speed", about, result.rows[1].ratio, None)


def training_memory() -> Iterator[Row]:
    """Measures forward and backward of one image; the baseline with and without fused attention."""
    for height, width in LARGE:
        ours = training_peak(visualtokens.create_model(OURS), height, width)
        for attention, target in TRAINING_MEMORY.items():
            with fused_attention(attention == "fused"):
                baseline = training_peak(visualtokens.create_model(BASELINE), height, width)
            peaks = {BASELINE: baseline, OURS: ours}
            about = {"height": height, "width": width, "batch": 1, "baseline": f"{attention} attention"}
            yield at_most("training memory", about | {"peak_bytes": peaks}, peaks, target)


def training_peak(model: nn.Module, height: int, width: int) -> int:
    images = torch.randn(1, 3, height, width)
    model.train()
    return peak_memory(lambda: model(images).sum().backward())


@contextmanager
def fused_attention(enable: bool) -> Iterator[None]:
    """Sets timm's switch, which models read when they are created."""
    before = use_fused_attn()
    set_fused_attn(enable)
    try:
        yield
    finally:
        set_fused_attn(before)


def transcriptions(rounds: int) -> Iterator[Row]:
    """Measures the released models against their transcription, with the same weights."""
    for name, target in TRANSCRIBED.items():
        model = visualtokens.create_model(name).eval()
        transcription = Transcription(model).eval()
        images = torch.randn(8, 3, 224, 224)
        with torch.inference_mode():
            difference = (model(images) - transcription(images)).abs().max().item()
        if difference > 1e-4:
            raise SystemExit(f"{name} and its transcription differ by {difference:.1e}")
        result = compare(
            [Candidate("transcription", transcription)], against=[Candidate(name, model)], rounds=rounds
        )
        rates = {row.name: row.images_per_second.median for row in result.rows}
        about = {"model": name, "height": 224, "width": 224, "batch": 8, "quiet": result.noisy == 0}
        about |= {"difference": difference, "images_per_second": rates}
        yield at_least("speed against transcription", about, result.rows[1].ratio, target)


def at_least(what: str, about: Row, ratio: Spread, target: float | None) -> Row:
    row = {"what": what, **about, "ratio": ratio.median, "interval": [ratio.low, ratio.high]}
    return row if target is None else row | {"at_least": target, "met": ratio.median >= target}


def at_most(what: str, about: Row, peaks: dict[str, int], target: float) -> Row:
    ratio = peaks[OURS] / peaks[BASELINE]
    return {"what": what, **about, "ratio": ratio, "at_most": target, "met": ratio <= target}


class Transcription(nn.Module):
    """The released PaCa-ViT, module by module, on contiguous maps ``(B, C, H, W)``."""

    def __init__(self, model: PaCaViT) -> None:
        super().__init__()
        self.stages = nn.ModuleList(TranscribedStage(stage) for stage in model.stages)
        self.head = model.head

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


class TranscribedStage(nn.Module):
    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.embed = nn.Sequential(stage.embed.first, stage.embed.conv)
        self.embed_norm = stage.embed.norm
        self.blocks = nn.ModuleList(TranscribedBlock(block) for block in stage.blocks)
        self.norm = stage.norm

    def forward(self, x: Tensor) -> Tensor:
        x = channel_norm(self.embed_norm, self.embed(x))
        clusters = None
        for block in self.blocks:
            x, clusters = block(x, clusters)
        return channel_norm(self.norm, x)


class TranscribedBlock(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm1, self.norm2, self.ffn = block.norm1, block.norm2, block.ffn
        self.clustering, self.cluster_norm = block.attn.clustering, block.attn.norm
        self.attention = nn.MultiheadAttention(
            block.norm1.normalized_shape[0], block.attn.heads, batch_first=True
        )
        self.attention.load_state_dict(
            {
                "in_proj_weight": torch.cat([block.attn.q.weight, block.attn.kv.weight]),
                "in_proj_bias": torch.cat([block.attn.q.bias, block.attn.kv.bias]),
                "out_proj.weight": block.attn.proj.weight,
                "out_proj.bias": block.attn.proj.bias,
            }
        )

    def forward(self, x: Tensor, clusters: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y = channel_norm(self.norm1, x)
        if clusters is None and self.clustering is not None:
            clusters = self.cluster(y)
        tokens = z = to_tokens(y)  # (B, N, C)
        if clusters is not None:
            z = self.cluster_norm(torch.einsum("bnk,bnc->bkc", clusters, tokens))
        attended, _ = self.attention(tokens, z, z, need_weights=True)
        x = x + to_map(attended, x)
        y = to_tokens(channel_norm(self.norm2, x))
        hidden = to_map(self.ffn.fc1(y), x)
        hidden = to_tokens(self.ffn.dwconv(hidden) + hidden)
        return x + to_map(self.ffn.fc2(F.gelu(hidden)), x), clusters

    def cluster(self, y: Tensor) -> Tensor:
        """Depth-wise 7×7, GELU, 1×1, GELU, 1×1, softmax over positions: ``(B, N, K)``."""
        u = F.gelu(self.clustering.conv(y))
        u = F.gelu(F.conv2d(u, self.clustering.mix.weight[:, :, None, None], self.clustering.mix.bias))
        return to_tokens(F.conv2d(u, self.clustering.assign.weight[:, :, None, None])).softmax(1)


def channel_norm(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """LayerNorm over the channels of a map."""
    return norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()


def to_tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2).contiguous()


def to_map(tokens: Tensor, like: Tensor) -> Tensor:
    return tokens.transpose(1, 2).reshape(len(tokens), -1, *like.shape[2:]).contiguous()


def line(row: Row) -> str:
    where = f"{row['height']}×{row['width']}, batch {row['batch']}"
    about = ", ".join(filter(None, [row.get("model"), where, row.get("baseline")]))
    target = next(
        (f"{key.replace('_', ' ')} {row[key]:g}" for key in ("at_least", "at_most") if key in row), ""
    )
    spread = "({:.2f}–{:.2f})".format(*row["interval"]) if "interval" in row else ""
    noise = "" if row.get("quiet", True) else "  (the machine was busy)"
    met = {True: "met", False: "MISSED", None: ""}[row.get("met")]
    return f"{row['what']:28s} {about:46s} {row['ratio']:5.2f}× {spread:12s} {target:14s} {met}{noise}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, help="write the result here as JSON")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    parts = (
        speed(options.rounds),
        training_memory(),
        transcriptions(options.rounds),
        smaller(options.rounds),
    )
    for part in parts:
        for row in part:
            print(line(row), flush=True)
            rows.append(row)
    result = {
        "command": "python benchmarks/bench_paca.py --save results/bench_paca.json",
        "machine": machine(),
        "models": {"baseline": BASELINE, "ours": OURS},
        "rows": rows,
    }
    if options.save:
        options.save.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
