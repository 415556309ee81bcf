"""STViT against a transcription of its algorithm, DeiT and Swin: speed and memory.

    python benchmarks/bench_stvit.py [--save results/bench_stvit.json]

The transcription is a direct implementation of the paper's Algorithm 1: contiguous maps ``(B, C, H, W)``,
``F.unfold`` and ``F.fold`` for the neighbours, attention as two matrix products around a softmax. It has the
weights and the outputs of our model. All candidates of a setting are interleaved in one run, each in its own
process, in inference mode; "compiled" is the fused model under ``torch.compile``. Memory is the peak above
weights and input.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import visualtokens
from own_process import OwnProcess, in_turns
from visualtokens.bench import machine, peak_memory
from visualtokens.models.stvit import Block, Stage, STViT

TRANSCRIPTION, PLAIN, FUSED, COMPILED = "transcription", "stvit_small", "fused", "fused and compiled"
DEIT, SWIN = "deit_small_patch16_224", "swin_tiny_patch4_window7_224"
NAMES = (TRANSCRIPTION, PLAIN, FUSED, COMPILED, DEIT, SWIN)
AT_LEAST = {PLAIN: 1.4, FUSED: 1.7, COMPILED: 2.1}  # × the transcription's images/s, at batch 8
AGAINST_DEIT = 0.85  # × DeiT-S's images/s at 224², batch 8, compiled
MEMORY = 0.6  # × the transcription's peak
LARGE, LARGE_BYTES = 1024, 500e6

Row = dict[str, Any]


def speed(size: int, batch: int, rounds: int) -> Iterator[Row]:
    """Measures speed and peak memory of all candidates."""
    runs = {name: OwnProcess(functools.partial(make, name, size, batch)) for name in NAMES}
    timings = in_turns(runs, rounds=rounds)
    peaks = {
        name: run.peak_memory() for name, run in runs.items()
    }  # last, because the profiler slows later runs
    rates = {name: timings.rate(name, batch).median for name in NAMES}
    for name in NAMES:
        ratio = timings.ratio(name)
        row: Row = {"what": name, "size": size, "batch": batch, "quiet": timings.quiet}
        row |= {"images_per_second": rates[name], "peak_bytes": peaks[name]}
        row |= {"ratio": ratio.median, "interval": [ratio.low, ratio.high]}
        row["memory_ratio"] = peaks[name] / peaks[TRANSCRIPTION]
        row["of_deit"] = rates[name] / rates[DEIT]
        if name in AT_LEAST:
            row["memory_met"] = row["memory_ratio"] <= MEMORY
            if batch == 8:
                row |= {"at_least": AT_LEAST[name], "met": ratio.median >= AT_LEAST[name]}
        if name == COMPILED and (size, batch) == (224, 8):
            row["of_deit_met"] = row["of_deit"] >= AGAINST_DEIT
        yield row


def make(name: str, size: int, batch: int) -> Callable[[], object]:
    """Returns the forward pass of one candidate; all candidates get the same images."""
    torch.manual_seed(0)
    images = torch.randn(batch, 3, size, size)
    if name in (DEIT, SWIN):
        model = timm.create_model(name, img_size=size).eval()
        return lambda: model(images)
    ours = visualtokens.create_model("stvit_small", border="released").eval()
    if name == PLAIN:
        return lambda: ours(images)
    transcription = Transcription(ours).eval()
    if name == TRANSCRIPTION:
        return lambda: transcription(images)
    fused = visualtokens.fuse(copy.deepcopy(ours))
    if name == FUSED:
        return lambda: fused(images)
    compiled = torch.compile(fused, dynamic=False)
    return lambda: compiled(images)


def check_same(size: int) -> None:
    """Exits if the outputs of the STViT candidates differ."""
    with torch.inference_mode():
        reference, *others = (make(name, size, 1)() for name in (TRANSCRIPTION, PLAIN, FUSED, COMPILED))
    for other in others:
        difference = (other - reference).abs().max().item()
        if difference > 1e-4:
            raise SystemExit(
                f"the outputs of a candidate and of the transcription differ by {difference:.1e}"
            )


def large() -> Row:
    """Measures the peak memory for one image of 1024×1024."""
    model = visualtokens.create_model("stvit_small").eval()
    images = torch.randn(1, 3, LARGE, LARGE)
    with torch.inference_mode():
        model(images)
        peak = peak_memory(lambda: model(images))
    return {"what": PLAIN, "size": LARGE, "batch": 1, "peak_bytes": peak, "memory_met": peak < LARGE_BYTES}


class Transcription(nn.Module):
    """STViT as its equations are written, on contiguous maps."""

    def __init__(self, model: STViT) -> None:
        super().__init__()
        self.stages = nn.ModuleList(TranscribedStage(stage) for stage in model.stages)
        self.final, self.head = model.final, model.head

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(self.final(x).mean((2, 3)))


class TranscribedStage(nn.Module):
    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.embed = stage.embed
        self.blocks = nn.ModuleList(TranscribedBlock(block) for block in stage.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class TranscribedBlock(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        dim = block.cpe.in_channels
        self.pos = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.pos.load_state_dict(block.cpe.state_dict())
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.norm1.load_state_dict(block.norm1.state_dict())
        self.norm2, self.scale1, self.scale2 = block.norm2, block.scale1, block.scale2
        self.cell, self.heads = block.attn.cell[0], block.attn.mix.heads
        self.qkv, self.proj = as_convolution(block.attn.mix.qkv), as_convolution(block.attn.mix.proj)
        self.fc1, self.fc2 = as_convolution(block.ffn.fc1), as_convolution(block.ffn.fc2)
        self.dwconv = nn.Conv2d(4 * dim, 4 * dim, 3, padding=1, groups=4 * dim)
        self.dwconv.load_state_dict(block.ffn.dwconv.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.pos(x)
        y = self.norm1(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).contiguous()
        x = x + self.scale1(self.attend(y) if self.cell == 1 else self.sample_and_attend(y))
        hidden = F.gelu(self.fc1(self.norm2(x)))
        return x + self.scale2(self.fc2(hidden + self.dwconv(hidden)))

    def attend(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = self.qkv(x).reshape(b, self.heads, -1, h * w).chunk(3, dim=2)  # (B, heads, D, N)
        weights = (k.mT @ q * (c // self.heads) ** -0.5).softmax(2)  # over the keys
        return self.proj((v @ weights).reshape(b, c, h, w))

    def sample_and_attend(self, x: Tensor) -> Tensor:
        """Algorithm 1 with one iteration."""
        side, (b, c, height, width) = self.cell, x.shape
        x = F.pad(x, (0, -width % side, 0, -height % side))
        p, q = x.shape[2] // side, x.shape[3] // side
        tokens = x.reshape(b, c, p, side, q, side).permute(0, 2, 4, 3, 5, 1).reshape(b, p * q, side**2, c)
        with torch.no_grad():
            means = F.adaptive_avg_pool2d(x, (p, q))
            association = (tokens @ around(means) * c**-0.5).softmax(3)  # (B, K, T, 9)
            total = F.fold(association.sum(2).mT.reshape(b, 9, p * q), (p, q), 3, padding=1)
        parts = (tokens.mT @ association).permute(0, 2, 3, 1).reshape(b, 9 * c, p * q)
        supers = F.fold(parts, (p, q), 3, padding=1) / (total + 1e-12)  # (B, C, p, q)
        out = around(self.attend(supers)) @ association.mT  # (B, K, C, T)
        out = out.reshape(b, p, q, c, side, side).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)
        return out[:, :, :height, :width]


def around(supers: Tensor) -> Tensor:
    """Returns the nine neighbours of each super token: ``(B, C, p, q)`` to ``(B, K, C, 9)``."""
    b, c, p, q = supers.shape
    return F.unfold(supers, 3, padding=1).mT.reshape(b, p * q, c, 9)


def as_convolution(linear: nn.Linear) -> nn.Conv2d:
    conv = nn.Conv2d(linear.in_features, linear.out_features, 1)
    conv.load_state_dict({"weight": linear.weight[:, :, None, None], "bias": linear.bias})
    return conv


def line(row: Row) -> str:
    text = f"{row['size']}², batch {row['batch']}  {row['what']:30s}"
    if "images_per_second" in row:
        text += f" {row['images_per_second']:7.2f} images/s"
    text += f" {row['peak_bytes'] / 1e6:7.1f} MB"
    if "ratio" in row:
        text += "  {:.2f}× ({:.2f}–{:.2f})".format(row["ratio"], *row["interval"])
        text += f", memory {row['memory_ratio']:.2f}×"
    if "of_deit" in row and row["what"] != DEIT:
        text += f", {row['of_deit']:.2f}× DeiT-S"
    missed = [key for key in ("met", "memory_met", "of_deit_met") if row.get(key) is False]
    noise = "" if row.get("quiet", True) else "  (the machine was busy)"
    return text + (f"  MISSED: {', '.join(missed)}" if missed else "") + noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, help="write the result here as JSON")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 384])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 1])
    options = parser.parse_args()
    rows: list[Row] = []
    for size in options.sizes:
        check_same(size)
        for batch in options.batches:
            for row in speed(size, batch, options.rounds):
                rows.append(row)
                print(line(row), flush=True)
    rows.append(large())
    print(line(rows[-1]))
    result = {
        "command": "python benchmarks/bench_stvit.py --save results/bench_stvit.json",
        "machine": machine(),
        "rows": rows,
    }
    if options.save:
        options.save.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
