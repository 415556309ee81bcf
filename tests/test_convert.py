"""Released names become ours, and the converted models compute what the released ones do."""

from __future__ import annotations

import csv
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from visualtokens.convert import convert
from visualtokens.models import create_model

GOLDEN = Path(__file__).parents[1] / "../shared/golden"
needs_golden = pytest.mark.skipif(
    not GOLDEN.exists(), reason="the reference outputs are not beside the checkout"
)

MODELS = {
    "pacavit_tiny_p2cconv_100_0": "paca_vit_tiny",
    "pacavit_small_p2cconv_100_0": "paca_vit_small",
    "pacavit_small_p2cmlp_100_0": "paca_vit_small_mlp",
    "pacavit_base_p2cconv_100_0": "paca_vit_base",
}


def golden_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """The rule of the reference: every tensor follows from its name."""
    n = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if len(shape) >= 2:
        scale = 8 if "clustering" in name else 0.5
        n = n * np.float32(scale / np.sqrt(np.prod(shape[1:])))
    elif name.endswith("weight"):
        n = 1 + np.float32(0.1) * n
    else:
        n = np.float32(0.1) * n
    return torch.from_numpy(n)


def golden_checkpoint(released: str) -> dict[str, Tensor]:
    with (GOLDEN / f"{released}.keys.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {r["name"]: golden_tensor(r["name"], tuple(map(int, r["shape"].split("x")))) for r in rows}


@needs_golden
@pytest.mark.parametrize("released", MODELS)
def test_outputs_of_the_released_models(released: str) -> None:
    found = convert(golden_checkpoint(released), "paca")
    assert found.complete
    assert (found.model, found.classes) == (MODELS[released], 1000)
    model = create_model(found.model, num_classes=found.classes).eval()
    model.load_state_dict(found.state_dict)
    expected = json.loads((GOLDEN / "paca.json").read_text())
    for height, width in [(224, 224), (256, 192)]:
        noise = np.random.default_rng(height * 10000 + width).standard_normal((1, 3, height, width))
        with torch.inference_mode():
            logits = model(torch.from_numpy(noise.astype(np.float32)))[0]
        golden = expected[f"{released}/{height}x{width}"]
        assert torch.allclose(logits[:32], torch.tensor(golden["logits"]), atol=1e-4, rtol=0)
        assert logits.std().item() == pytest.approx(golden["logits_std"], abs=1e-4)
