"""The one call: run a model on an image and say which of its clusters mattered."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from PIL import Image
from torch import Tensor, nn

from visualtokens.data import Preprocess
from visualtokens.errors import UserError
from visualtokens.explain import importance as paca
from visualtokens.explain.explanation import Explanation
from visualtokens.explain.inputs import prepare
from visualtokens.grouping import Tap, record_groupings


def explain(
    model: nn.Module,
    image: Image.Image | Tensor,
    *,
    preprocess: Preprocess | None = None,
    target: int | None = None,
    layer: int = -1,
    top: int = 6,
    batch: int = 16,
    classes: Sequence[str] | None = None,
) -> Explanation:
    """PaCa Sec. 3.5: rank the clusters of one layer by what hiding each does to a class's probability.

    ``image`` is a PIL image, prepared by ``preprocess`` (by default as the model's ``pretrained_cfg``
    says), or a tensor ``(3, H, W)`` that is already normalised so. ``target`` is the class to explain,
    by default the predicted one. ``layer`` counts the model's groupings from the first, or back from
    the last if negative. ``top`` clusters are drawn; all are measured, ``batch`` at a time. ``classes``
    names the classes.

    The model is left as it was: its mode, its device and its gradients are not touched.
    """
    _check_positive(top=top, batch=batch)
    given = prepare(model, image, preprocess)
    like = _like(model)
    x, black = given.x.to(like.device), given.black.to(like.device)
    with evaluating(model), torch.no_grad():
        probabilities, name, maps = _look(model, x.to(like.dtype), layer)
        chosen = _choose(probabilities, target, classes)
        heat = paca.normalise(maps)  # (K, h, w)

        def probability(pictures: Tensor) -> Tensor:
            return _probabilities(model, pictures.to(like.dtype))[:, chosen]

        after = paca.masked_probabilities(probability, x, black, heat, batch=batch)  # (K,)
    drop, spread = probabilities[chosen] - after, paca.entropy(maps)
    return Explanation(
        image=given.image,
        crop_box=given.crop_box,
        input_size=(x.shape[1], x.shape[2]),
        probabilities=probabilities.cpu().numpy(),
        target=chosen,
        classes=None if classes is None else tuple(classes),
        maps=heat.cpu().numpy(),
        importance=drop.cpu().numpy(),
        entropy=spread.cpu().numpy(),
        order=tuple(paca.rank(drop.tolist(), spread.tolist())),
        layer=name,
        shown=top,
    )


def _check_positive(*, top: int, batch: int) -> None:
    for name, value in (("top", top), ("batch", batch)):
        if value < 1:
            raise UserError(f"{name}={value}; give at least 1")


def _look(model: nn.Module, x: Tensor, layer: int) -> tuple[Tensor, str, Tensor]:
    """The probabilities ``(classes,)`` of the untouched image, the layer's name and maps ``(K, h, w)``."""
    kind = type(model).__name__
    if not any(isinstance(module, Tap) for module in model.modules()):
        raise UserError(f"{kind} does not group its patches; explain one of visualtokens.list_models()")
    with record_groupings(model) as groupings:
        probabilities = _probabilities(model, x.unsqueeze(0))[0]
    count = len(groupings)
    if not -count <= layer < count:
        raise UserError(f"layer={layer}, but {kind} made {count} groupings; give {-count} to {count - 1}")
    name = list(groupings)[layer]
    maps = groupings[name].maps()[0].float()  # (K, h, w)
    if not maps.isfinite().all():
        raise UserError(f"the clusters of {name} are not finite; check the model's weights and the image")
    return probabilities, name, maps


def _probabilities(model: nn.Module, x: Tensor) -> Tensor:
    """``(B, classes)``."""
    logits, kind = model(x), type(model).__name__
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(
            f"{kind} gives {got}; explain a classifier that gives (B, classes), 2 or more classes"
        )
    if not logits.isfinite().all():
        raise UserError(f"{kind} gives values that are not finite; check its weights and the image")
    return logits.float().softmax(1)


def _choose(probabilities: Tensor, target: int | None, classes: Sequence[str] | None) -> int:
    count = len(probabilities)
    if classes is not None and len(classes) != count:
        raise UserError(f"{len(classes)} class names for a model of {count} classes; give one for each")
    if target is None:
        return int(probabilities.argmax())
    if not 0 <= target < count:
        raise UserError(f"target={target}, but the model has {count} classes; give 0 to {count - 1}")
    return target


def _like(model: nn.Module) -> Tensor:
    """A tensor of the device and floating type that the model's input must have."""
    tensors = chain(model.parameters(), model.buffers())
    return next((t for t in tensors if t.is_floating_point()), torch.empty(0))


_modes: dict[nn.Module, tuple[int, list[tuple[nn.Module, bool]]]] = {}  # users now, flags before
_modes_lock = threading.Lock()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; afterwards every submodule has its own flag back.

    Threads that explain one model side by side share the switch: the first sets it, the last restores it.
    """
    with _modes_lock:
        users, flags = _modes.get(model) or (0, [(m, m.training) for m in model.modules()])
        _modes[model] = users + 1, flags
        model.eval()
    try:
        yield
    finally:
        with _modes_lock:
            users, flags = _modes.pop(model)
            if users > 1:
                _modes[model] = users - 1, flags
            else:
                for module, training in flags:
                    module.training = training
