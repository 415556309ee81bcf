"""The examples of the README, in order; training a detector is left to its own journey."""

from pathlib import Path

from guide import ROOT, follow

from visualtokens.data import open_dataset

open_dataset("digits", "val")[0][0].save("digit.png")
open_dataset("digits", "val")[1][0].save("photo.jpg")
detector = "--model mask_rcnn --model_args.backbone resnet18"
small = f"{detector} --model_args.width 32 --model_args.hidden 64 --model_args.regions 50"
quick = "--data_args.length 64 --size 64 --epochs 1 --batch 16"
follow(
    ROOT / "README.md",
    replace={
        "make demo    #": "#",
        detector: small,
        "--data digit_scenes --size 128": f"--data digit_scenes:64x64 {quick}",
    },
)
assert Path("why.html").stat().st_size > 10_000
