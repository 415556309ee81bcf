"""Modules that change nothing are left out, and those that do, or that somebody watches, are not."""

import pytest
import torch
from timm.layers import DropPath
from torch import Tensor, nn

from visualtokens.reduce.attention import run

X = torch.arange(1.0, 513.0).reshape(64, 8)
PASSIVE = {"identity": nn.Identity, "dropout": lambda: nn.Dropout(0.5), "drop_path": lambda: DropPath(0.5)}


@pytest.mark.parametrize("name", PASSIVE)
def test_what_changes_nothing_gives_its_input(name: str) -> None:
    assert run(PASSIVE[name]().eval(), X) is X


@pytest.mark.parametrize("name", ["dropout", "drop_path"])
def test_dropout_drops_in_training(name: str) -> None:
    torch.manual_seed(0)
    out = run(PASSIVE[name](), X)
    assert 0 < (out == 0).sum() < out.numel()


@pytest.mark.parametrize("name", PASSIVE)
def test_hooks_are_called(name: str) -> None:
    module, seen = PASSIVE[name]().eval(), []

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append("before")

    def after(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        seen.append("after")
        return out + 1

    module.register_forward_pre_hook(before)
    assert torch.equal(run(module, X), X)
    module.register_forward_hook(after)
    assert torch.equal(run(module, X), X + 1)
    assert seen == ["before", "before", "after"]


def test_a_subclass_is_called() -> None:
    class Louder(nn.Identity):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    assert torch.equal(run(Louder(), X), 2 * X)
