"""The process of a run: what it records of every task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from visualtokens.files import read_json, write_config
from visualtokens.studies.jobs import JOB, RECORD
from visualtokens.studies.worker import run_job, use_explicit_attention

BACKBONE = {"backbone": "resnet18", "backbone_args": {"channels": [8, 8, 16, 16]}}
RUNS: dict[str, tuple[str, dict[str, Any], str]] = {
    "segment": ("fpn", {"head_args": {"dim": 16, "width": 16}}, "miou"),
    "detect": ("mask_rcnn", {"width": 16, "hidden": 16, "regions": 4}, "box_ap"),
}


@pytest.mark.parametrize("task", RUNS)
def test_dense_tasks_are_recorded(task: str, tmp_path: Path) -> None:
    model, model_args, score = RUNS[task]
    options = {"task": task, "model": model, "model_args": BACKBONE | model_args}
    options |= {"size": 64, "epochs": 1, "batch": 4, "data_args": {"length": 4}}
    write_config(tmp_path / JOB, {"options": options, "data": "digit_scenes", "seed": 0})
    assert run_job(tmp_path) == 0
    record = read_json(tmp_path / RECORD)
    assert record["score"] == score
    assert 0 <= record["metrics"][score] <= 1
    assert record["parameters"] > 10_000
    assert record["train"] is None
    assert (record["macs"] is None) == (task == "detect")  # whose cost depends on the image


@pytest.fixture
def explicit() -> Iterator[None]:
    """Attention as in a run in bfloat16, in this test only."""
    cuda = torch.backends.cuda
    fused, reduced = cuda.flash_sdp_enabled(), cuda.fp16_bf16_reduction_math_sdp_allowed()
    use_explicit_attention()
    yield
    cuda.enable_flash_sdp(fused)
    cuda.allow_fp16_bf16_reduction_math_sdp(reduced)


@pytest.mark.usefixtures("explicit")
def test_explicit_attention_is_that_of_the_equation() -> None:
    q, k, v = (torch.randn(3, 2, 4, 65, 32).bfloat16().requires_grad_()).unbind()
    out = F.scaled_dot_product_attention(q, k, v)
    weights = (q.double() @ k.double().mT / 32**0.5).softmax(3)
    torch.testing.assert_close(out.double(), weights @ v.double(), rtol=0.02, atol=0.02)
    assert "Flash" not in out.grad_fn.name()  # type: ignore[union-attr]
