from __future__ import annotations

import pytest
from torch import nn

from visualtokens.modes import eval_mode


def test_every_flag_is_restored_after_nested_blocks_and_errors() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2))).train()
    model[1].eval()
    flags = [module.training for module in model.modules()]

    def fail() -> None:
        with eval_mode(model):
            with eval_mode(model):
                assert not any(module.training for module in model.modules())
            assert not any(module.training for module in model.modules())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [module.training for module in model.modules()] == flags
