"""The picture at the top of the README: a photo, its tokens after some blocks, and the regions that matter.

    python docs/first_picture.py PHOTO --checkpoint FOLDER

The checkpoint is that of a ViT with 12 blocks and 14×14 patches, such as ViT-B/16; it is reduced without
training.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image

import visualtokens
from visualtokens.data import read_image
from visualtokens.explain.render import cut_to_box, draw_layer, draw_numbered, resize_for_display, signed

OUT = Path(__file__).with_name("tokens.jpg")
KEEP = [196, 150, 110, 80, 60, 45, 34, 26, 20, 16, 12, 12]  # tokens after each block
BLOCKS = (3, 6, 10)  # that are drawn
SIDE = 420  # pixels of a panel


def panels(explanation: visualtokens.explain.Explanation) -> list[tuple[str, Image.Image]]:
    """Return the captions and pictures."""
    photo, box = cut_to_box(explanation.image, explanation.crop_box)
    photo, box = resize_for_display(photo, box, side=SIDE)
    drawn = [("a photo: 196 patches", photo)]
    for block in BLOCKS:
        layer = explanation.layers[block]
        drawn.append((f"{layer.tokens} tokens after block {block + 1}", draw_layer(layer, photo, box)))
    shares = ", ".join(
        f"{i}: {signed(float(explanation.values[k]))}" for i, k in enumerate(explanation.top, 1)
    )
    name, probability = explanation.class_name(explanation.target), explanation.full
    drawn.append((f"{name}, probability {probability:.2f}\n{shares}", draw_numbered(explanation, photo, box)))
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photo", type=Path)
    parser.add_argument("--checkpoint", type=Path, required=True)
    options = parser.parse_args()
    run = visualtokens.load(options.checkpoint)
    visualtokens.reduce(run.model, keep=KEEP)
    explanation = run.explain(read_image(options.photo), top=3, budget=256)
    drawn = panels(explanation)
    figure, axes = plt.subplots(1, len(drawn), figsize=(3 * len(drawn), 3.5), layout="constrained")
    for axis, (caption, picture) in zip(axes, drawn, strict=True):
        axis.imshow(picture)
        axis.set_title(caption, fontsize=11, y=-0.04, va="top")
        axis.set_axis_off()
    figure.savefig(OUT, dpi=110, pil_kwargs={"quality": 88})


if __name__ == "__main__":
    main()
