"""timm models, which include ours: as classifiers, as backbones that return feature maps, and their input."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import timm
import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.layers import Format
from timm.models import group_parameters
from torch import Tensor, nn

import visualtokens.models as _registers_our_models  # noqa: F401
from visualtokens.data import Preprocess
from visualtokens.data.base import brief
from visualtokens.errors import UserError, unknown
from visualtokens.files import one_line
from visualtokens.tasks.schema import BUILD_ERRORS, BUILDER_ARGS

PREPROCESSING = ("input_size", "mean", "std", "crop_pct", "interpolation")  # in timm's pretrained_cfg


def build_model(
    name: str, *, classes: int, model_args: Mapping[str, Any], cfg: Mapping[str, Any] | None = None
) -> nn.Module:
    """Return a new, untrained classifier from timm's registry.

    ``cfg`` overrides the preprocessing in the model's ``pretrained_cfg``; its other entries are ignored.
    """
    if not timm.is_model(name):
        raise unknown("model", name, timm.list_models())
    for reserved in model_args:
        if reserved in BUILDER_ARGS:
            raise UserError(f"model_args may not hold {reserved!r}; leave it out")
    if "num_classes" in model_args:
        raise UserError("model_args may not hold 'num_classes'; the data decides it")
    try:
        overlay = _preprocessing(cfg)
        return timm.create_model(name, num_classes=classes, pretrained_cfg_overlay=overlay, **model_args)
    except UserError:
        raise
    except BUILD_ERRORS as error:  # an argument that the model does not have, or with another type
        raise UserError(
            f"model {name!r} refuses model_args={brief(dict(model_args))}: {one_line(error)}"
        ) from error


def adapted_model(
    name: str,
    *,
    weights: Mapping[str, Tensor],
    classes: int,
    model_args: Mapping[str, Any],
    cfg: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return a classifier with these weights, which timm adapts to its input size.

    Raises one of :data:`BUILD_ERRORS` unless every weight fits. ``cfg`` is that of :func:`build_model`.
    """
    given = {"state_dict": dict(weights), "num_classes": classes, "label_offset": 0, "source": None}
    return timm.create_model(
        name,
        pretrained=True,
        num_classes=classes,
        pretrained_cfg_overlay=_preprocessing(cfg) | given,
        **model_args,
    )


def _preprocessing(cfg: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (cfg or {}).items() if key in PREPROCESSING}


def timm_cfg(model: nn.Module) -> dict[str, Any]:
    """Return timm's ``pretrained_cfg`` of a model."""
    return cast(dict[str, Any], model.pretrained_cfg)


def preprocess_for(model: nn.Module, *, size: int | None = None) -> Preprocess:
    """Return the preprocessing of a model by its timm configuration; ``size`` overrides the input size."""
    cfg = timm_cfg(model)
    height, width = (size, size) if size else cfg["input_size"][-2:]
    return Preprocess(
        (height, width),
        tuple(cfg["mean"]),
        tuple(cfg["std"]),
        crop=cfg["crop_pct"] or 1.0,
        interpolation=cfg["interpolation"],
    )


def head_prefixes(model: nn.Module) -> tuple[str, ...]:
    """Return what the names of the classifier's weights start with; empty if timm does not know it."""
    names = timm_cfg(model).get("classifier") or ()
    return tuple(f"{name}." for name in ([names] if isinstance(names, str) else names))


def class_names(model: Any) -> list[str]:
    """Return the names of the classes of a timm model: those of ImageNet where known, else numbers."""
    if not model.num_classes:
        raise UserError("this model has no classes; create it with num_classes=1000, for example")
    subset = infer_imagenet_subset(model)
    if subset is None:
        return [str(i) for i in range(model.num_classes)]
    names = [name.partition(",")[0] for name in ImageNetInfo(subset).label_descriptions()]  # "tench, Tinca…"
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names)]


def other_class_names(model: Any) -> list[list[str]]:
    """Return other names of these classes, in the same order: those of ImageNet's folders, and numbers."""
    subset = infer_imagenet_subset(model)
    if subset is None:
        return []
    return [ImageNetInfo(subset).label_names(), [str(i) for i in range(model.num_classes)]]


def has_fixed_size(name: str) -> bool:
    """Return whether a timm model is built for one input size."""
    cfg = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    return cfg is not None and bool(cfg.fixed_input_size)


def sized_args(name: str, model_args: Mapping[str, Any], *, size: int | None) -> dict[str, Any]:
    """Return ``model_args``, with the image size for timm models that are built for one size."""
    return {**model_args, "img_size": size} if size and has_fixed_size(name) else dict(model_args)


def check_model_args(
    model_args: Mapping[str, Any], create: Callable[..., nn.Module], *, given: Sequence[str], what: str
) -> None:
    """Raise :class:`UserError` for a ``model_args`` entry that is no argument of ``create``.

    The arguments in ``given`` are set otherwise and may not be among them.
    """
    options = [name for name in inspect.signature(create).parameters if name not in given]
    for name in model_args:
        if name not in options:
            raise unknown(f"model_args of {what}", name, options)


# Layers, for layer-wise learning rates and freezing.

V = TypeVar("V")
Matcher = Callable[[str], tuple[float, ...]]  # from the name of a parameter to the position of its layer


def require_layers(model: nn.Module, what: str) -> None:
    """Raise :class:`UserError` for a model without timm's ``group_matcher``."""
    if not hasattr(model, "group_matcher"):
        raise UserError(
            f"{what} does not name its layers (it has no group_matcher), which layer_decay and a number of "
            "frozen stages need; leave layer_decay out, give --freeze backbone, or choose another model"
        )


def matcher_under(prefix: str, matcher: Matcher) -> Matcher:
    """Return the layers of a module for names with its prefix; all other parameters are the last layer."""
    return lambda name: matcher(name.removeprefix(prefix)) if name.startswith(prefix) else (math.inf,)


def flat(name: str) -> str:
    """Return the name of a weight with underscores instead of dots."""
    return name.replace(".", "_")


FINEST_STRIDE = 4  # finer maps, such as those of a stem, are not used
MAX_LEVELS = 4
_SET_OTHERWISE = ("out_indices", "num_classes", "in_chans")


class Backbone(nn.Module):
    """Images ``(B, 3, H, W)`` to maps ``(B, channels[i], H / strides[i], W / strides[i])``, finest first.

    By default the maps are the last four of stride 4 and coarser. ``out_indices`` selects levels instead,
    such as blocks 3, 5, 7 and 11 of a plain vision transformer.
    """

    def __init__(
        self,
        name: str,
        *,
        pretrained: bool = False,
        out_indices: Sequence[int] | None = None,
        stride_first: bool = False,
        in_chans: int = 3,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.name, self.options = name, dict(options or {})
        for reserved in self.options:
            if reserved in BUILDER_ARGS or reserved in _SET_OTHERWISE:
                raise UserError(f"backbone_args may not hold {reserved!r}; leave it out")
        given = dict(self.options)
        if out_indices is not None:
            given["out_indices"] = tuple(out_indices)
        self.body = _create_features(name, pretrained=pretrained, in_chans=in_chans, options=given)
        if stride_first:
            stride_in_first_convolution(self.body, name)
        channels, strides = self.body.feature_info.channels(), self.body.feature_info.reduction()
        self._levels = list(range(len(strides)))
        if out_indices is None:
            self._levels = [i for i, stride in enumerate(strides) if stride >= FINEST_STRIDE][-MAX_LEVELS:]
        if not self._levels:
            raise UserError(
                f"backbone {name!r} has no map of stride {FINEST_STRIDE} or more; give out_indices"
            )
        self.channels = tuple(channels[i] for i in self._levels)
        self.strides = tuple(strides[i] for i in self._levels)
        if list(self.strides) != sorted(self.strides):
            raise UserError(f"backbone {name!r} gives maps of strides {self.strides}; order them fine first")
        self._nhwc = getattr(self.body, "output_fmt", Format.NCHW) == Format.NHWC

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """timm's configuration of the backbone, including the mean and standard deviation of its input."""
        return self.body.pretrained_cfg

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.body.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Return the names here of the parameters that the backbone exempts from weight decay."""
        return {
            f"{prefix}.{parameter}".removeprefix(".")
            for prefix, module in self.named_modules()
            if module is not self and hasattr(module, "no_weight_decay")
            for parameter in module.no_weight_decay()
        }

    def group_matcher(self, coarse: bool = False) -> Matcher:
        """Return the layer groups of the backbone by the names of its parameters here.

        They are those of the classifier: timm's feature extractors have none.
        """
        with torch.device("meta"):  # only names are needed
            whole: Any = timm.create_model(self.name, **self.options)
        require_layers(whole, f"backbone {self.name!r}")
        groups = group_parameters(whole, whole.group_matcher(coarse=coarse), reverse=True)
        known = {flat(name): float(group) for name, group in groups.items()}
        return lambda name: (self.find(known, name.removeprefix("body."), math.inf),)

    def find(self, values: Mapping[str, V], name: str, default: V) -> V:
        """Return the value of a weight in ``body`` by its flat name in the classifier.

        timm's feature extractors prefix the classifier's names by ``model.`` or ``body.``, or replace the
        first dots by underscores (``stages_0.blocks``). Flat names have underscores only.
        """
        for prefix in ("", "model.", "body."):
            if name.startswith(prefix) and (found := flat(name.removeprefix(prefix))) in values:
                return values[found]
        return default

    def forward(self, images: Tensor) -> list[Tensor]:
        maps = self.body(images)
        if self._nhwc:
            maps = [x.permute(0, 3, 1, 2) for x in maps]
        return [maps[i] for i in self._levels]


def _create_features(name: str, *, pretrained: bool, in_chans: int, options: Mapping[str, Any]) -> Any:
    if not timm.is_model(name):
        raise unknown("backbone", name, timm.list_models())
    try:
        return timm.create_model(
            name, features_only=True, pretrained=pretrained, in_chans=in_chans, **options
        )
    except UserError:
        raise
    except BUILD_ERRORS as error:
        # an option or a level that the model does not have, or a model without feature maps
        raise UserError(
            f"backbone {name!r} with {brief(dict(options))} gives no feature maps: {one_line(error)}"
        ) from error


def stride_in_first_convolution(body: nn.Module, name: str) -> None:
    """Move the stride of every bottleneck from its 3×3 convolution to the 1×1 convolution before it.

    The original ResNet has it there. timm, like torchvision, spends 6 % more for higher accuracy.
    """
    blocks = [m for m in body.modules() if isinstance(m, timm.models.resnet.Bottleneck)]
    if not blocks:
        raise UserError(f"backbone {name!r} has no ResNet bottlenecks; leave stride_first out")
    for block in blocks:
        block.conv1.stride, block.conv2.stride = block.conv2.stride, block.conv1.stride
