from __future__ import annotations

import pytest
import torch

from visualtokens.errors import UserError
from visualtokens.train import pick_device


def test_auto_is_the_accelerator_or_the_cpu() -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert pick_device("auto") == (accelerator or torch.device("cpu"))
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", ""])
def test_a_name_that_is_no_device(name: str) -> None:
    with pytest.raises(UserError, match="unknown device"):
        pick_device(name)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_device_this_machine_lacks() -> None:
    with pytest.raises(UserError, match=r"'cuda' is not available.*use auto or cpu"):
        pick_device("cuda")


def test_a_number_beyond_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UserError, match="the last one is cuda:1"):
        pick_device("cuda:2")
