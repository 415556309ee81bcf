"""Fused models compute what they did, refuse to learn, and can be taken back exactly."""

from __future__ import annotations

import copy
import pickle

import pytest
import timm
import torch
from torch import Tensor, nn

import visualtokens
from visualtokens.errors import UserError

NAMES = ["stvit_small", "stvit_base", "stvit_iso_64", "vt_resnet18", "vt_resnet50", "paca_vit_tiny"]


def settled(name: str, **options: object) -> nn.Module:
    """A model whose BatchNorms and layer scales are as if it had been trained."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **options).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.normal_(module.weight, 1, 0.1)
            nn.init.normal_(module.bias, std=0.1)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("gamma"):
            nn.init.uniform_(parameter, 0.1, 0.5)
    return model


def images() -> Tensor:
    return torch.randn(2, 3, 64, 96, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_stay_and_come_back_exactly(name: str) -> None:
    model = settled(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        plain = model(images())
        assert visualtokens.surgery(model) is model
        fused = model(images())
        assert torch.allclose(fused, plain, atol=1e-5 * plain.abs().max().item())
        after = model.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], before[key]) for key in before)
        assert visualtokens.unfuse(model) is model
        assert torch.equal(model(images()), plain)
    model.train()(images()).sum().backward()


def test_nothing_is_left_to_normalise_in_stvit() -> None:
    model = visualtokens.surgery(settled("stvit_small"))
    left = [name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    # A BatchNorm behind a GELU cannot go into the convolution before it.
    assert all(name.startswith("stages.0.embed") for name in left)


def test_fused_models_can_be_copied_and_compiled() -> None:
    model = visualtokens.surgery(settled("stvit_small", depths=(1, 1, 1, 1)))
    with torch.no_grad():
        expected = model(images())
        assert torch.equal(copy.deepcopy(model)(images()), expected)
        assert torch.equal(pickle.loads(pickle.dumps(model))(images()), expected)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(images()), expected, atol=1e-5)


def test_what_a_fused_model_refuses() -> None:
    model = settled("stvit_small")
    weights = model.state_dict()
    with pytest.raises(UserError, match="evaluation mode"):
        visualtokens.surgery(copy.deepcopy(model).train())
    visualtokens.surgery(model)
    with pytest.raises(UserError, match="fused already"):
        visualtokens.surgery(model)
    with pytest.raises(UserError, match="cannot train"):
        model.train()
    with pytest.raises(UserError, match="cannot load weights"):
        model.load_state_dict(weights)
    visualtokens.unfuse(model).load_state_dict(weights)
    with pytest.raises(UserError, match="not fused"):
        visualtokens.unfuse(model)
    with pytest.raises(UserError, match="nothing that can be fused"):
        visualtokens.surgery(nn.Linear(2, 2).eval())
