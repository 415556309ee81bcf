"""The options of a training run that its task interprets: data, model, augmentation and loss."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from visualtokens.errors import UserError

CLASSIFICATION_ONLY = (
    "auto_augment",
    "random_erasing",
    "mixup",
    "cutmix",
    "repeats",
    "teacher",
    "distill",
    "distill_temperature",
)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How ``data`` is opened."""

    val_share: float | None = None
    """Share of the training images held out for validation, where the data have no validation split, such as
    0.2. They are always the same images."""

    data_args: dict[str, Any] = field(default_factory=dict)
    """Further options of the dataset, such as --data_args.label breed for the column of the labels in
    csv:FILE."""

    def __post_init__(self) -> None:
        share = self.val_share
        if share is not None and not 0 < share <= 1:
            raise UserError(f"val_share={share} must be more than 0 and at most 1")
        if share is not None and "val_share" in self.data_args:
            raise UserError("val_share and data_args.val_share are the same option; give one of them")
        if "seed" in self.data_args:
            raise UserError("data_args may not hold 'seed'; leave it out")

    @property
    def data_options(self) -> dict[str, Any]:
        """The options with which the dataset is opened: ``data_args`` and ``val_share``."""
        return self.data_args if self.val_share is None else {**self.data_args, "val_share": self.val_share}


@dataclass(frozen=True, kw_only=True)
class TaskOptions(DataOptions):
    """What a run learns, from which data, with which model. ``TrainConfig`` adds how it is trained."""

    model: str
    """Model: one of `vtok models` or any timm model. For segmentation fpn, vt_fpn or upernet, for detection
    mask_rcnn, cascade_mask_rcnn, faster_rcnn or retinanet; each has such a model as --model_args.backbone."""

    data: str
    """Training and validation images: digits, digit_scenes, folder:PATH, csv:FILE, parquet:FILE, npz:FILE,
    wds:PATH or hfds:NAME. For segmentation digit_scenes, masks:PATH, camvid:PATH, cityscapes:PATH, voc:PATH,
    pets:PATH, ade20k:PATH, cocostuff:PATH or lip:PATH; for detection digit_scenes, coco:PATH, yolo:PATH,
    voc:PATH, instances:PATH or pennfudan:PATH."""

    task: str = "classify"
    """What to learn: classify (one label per image), segment (one class per pixel) or detect (boxes and
    masks of objects)."""

    init: str | None = None
    """Initial weights: a checkpoint folder of this library or of timm, a .safetensors or .pth file, also a
    released PaCa-ViT, STViT, PVTv2 or Swin checkpoint, or hf-hub:ORGANIZATION/NAME. A head for different
    classes is reinitialized."""

    pretrained: bool = False
    """Start from timm's pretrained weights of the model, for segmentation and detection of the backbone."""

    freeze: int | Literal["backbone"] | None = None
    """Layers that are not trained: backbone (all but the head), or the stem and this number of stages, of a
    plain vision transformer blocks."""

    freeze_norms: bool = False
    """Do not train BatchNorm of the backbone: weights and statistics stay those of the initial weights."""

    probe: bool = False
    """Linear probe: train only the classifier on the features of the initial weights."""

    size: int | None = None
    """Side of the square input images in pixels; by default the model's own input size. For detection, the
    short side of images that keep their aspect ratio; by default 800."""

    augment: str | None = None
    """Augmentation preset: none, digits, photo, imagenet or cifar; by default digits for digits, else photo.
    For segmentation none, digits, photo, coco or ade20k; for detection none, photo or multiscale."""

    auto_augment: str | None = None
    """timm augmentation policy on top of the preset, such as rand-m9-mstd0.5-inc1, original or augmix-m3."""

    random_erasing: float = 0.0
    """Probability that a rectangle of a training image is replaced by noise."""

    mixup: float = 0.0
    """Mixup alpha; 0 disables it."""

    cutmix: float = 0.0
    """CutMix alpha; 0 disables it."""

    repeats: int = 1
    """Repeated augmentation: differently augmented copies of each image in an epoch, which has as many fewer
    images; 1 disables it. DeiT has 3."""

    label_smoothing: float = 0.1
    """Share of each label that is spread over the other classes."""

    loss_args: dict[str, Any] = field(default_factory=dict)
    """Segmentation loss: auxiliary, the weight of the auxiliary head (0.4), and class_weights, for example
    --loss_args.class_weights.border 2."""

    teacher: str | None = None
    """Teacher to distill from: a checkpoint folder, or a timm model with pretrained weights."""

    distill: float | None = None
    """Weight of the distillation loss; the labels weigh the rest. By default 0.5."""

    distill_temperature: float | None = None
    """Temperature of both softmaxes in the distillation loss; by default 1."""

    drop_path: float | dict[str, float] | None = None
    """Stochastic depth: one rate, or rates by model name pattern, of which the first match applies."""

    model_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model, such as --model_args.drop_rate 0.2."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("size", self.size is None or self.size >= 1, "at least 1")
        for name in ("mixup", "cutmix"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "at least 0")
        self._require("repeats", self.repeats >= 1, "at least 1")
        self._require("random_erasing", 0 <= self.random_erasing <= 1, "from 0 to 1")
        self._require("label_smoothing", 0 <= self.label_smoothing < 1, "at least 0 and less than 1")
        rates = self.drop_path.values() if isinstance(self.drop_path, dict) else [self.drop_path or 0.0]
        self._require("drop_path", all(0 <= rate < 1 for rate in rates), "at least 0 and less than 1")
        if self.drop_path is not None and "drop_path_rate" in self.model_args:
            raise UserError("drop_path and model_args.drop_path_rate are the same option; give one of them")
        for name in ("distill", "distill_temperature"):
            self._needs(name, "teacher", self.teacher is not None, "a --teacher")
        self._require("distill", self.distill is None or 0 < self.distill <= 1, "more than 0 and at most 1")
        heat = self.distill_temperature
        self._require("distill_temperature", heat is None or 0 < heat < math.inf, "more than 0")
        self._check_initial_weights()

    def _check_initial_weights(self) -> None:
        if "pretrained" in self.model_args:
            raise UserError("model_args may not hold 'pretrained'; give --pretrained")
        sources = {"pretrained": self.pretrained, "init": self.init, "model_args.init_from": self.init_from}
        if len(given := [name for name, value in sources.items() if value]) > 1:
            raise UserError(f"{' and '.join(given)} exclude each other; give one of them")
        allowed = self.freeze in (None, "backbone") or _is_count(self.freeze)
        self._require("freeze", allowed, "backbone or a number, at least 0")
        if self.probe:
            self._check_probe()
        if self.frozen is not None and not given:
            what = "probe" if self.probe else f"freeze={self.freeze}"
            raise UserError(f"{what} would keep random weights; give --pretrained or --init as well")
        if self.freeze_norms and not given:
            raise UserError(
                "freeze_norms would keep untrained statistics; give --pretrained or --init as well"
            )
        if self.freeze_norms and self.frozen == "backbone":
            raise UserError("freeze_norms has no effect on a frozen backbone; leave it out")
        if self.frozen == "backbone" and self.drop_path is not None:
            raise UserError(f"drop_path={self.drop_path} has no effect on a frozen backbone; leave it out")

    def _check_probe(self) -> None:
        if self.task in ("segment", "detect"):
            raise UserError(f"probe is for classification; with task={self.task} give --freeze backbone")
        if self.freeze is not None:
            raise UserError(f"probe freezes the backbone; leave freeze={self.freeze} out")

    @property
    def init_from(self) -> Any:
        """The initial weights of a part of the model or of its backbone, in ``model_args``."""
        body = self.model_args.get("backbone_args") or {}
        return self.model_args.get("init_from") or body.get("init_from")

    @property
    def frozen(self) -> int | Literal["backbone"] | None:
        """The layers that are not trained, as in ``freeze``."""
        return "backbone" if self.probe else self.freeze

    def _require(self, name: str, holds: bool, bounds: str) -> None:
        if not holds:
            raise UserError(f"{name}={getattr(self, name)} must be {bounds}")

    def _needs(self, name: str, other: str, holds: bool, wanted: str) -> None:
        """Refuse an option that would have no effect."""
        if getattr(self, name) is not None and not holds:
            raise UserError(
                f"{name}={getattr(self, name)} has no effect with {other}={getattr(self, other)}; "
                f"leave it out or give {wanted}"
            )

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all options."""
        return [each.name for each in dataclasses.fields(cls)]

    @classmethod
    def default(cls, name: str) -> Any:
        """Return the default of an option; None if it is required."""
        return default_of(next(each for each in dataclasses.fields(cls) if each.name == name))

    def refuse(self, names: Sequence[str]) -> None:
        """Raise :class:`UserError` for the first of these options that is given: the task ignores them."""
        for name in names:
            if getattr(self, name) != self.default(name):
                raise UserError(
                    f"{name}={getattr(self, name)} has no effect with task={self.task}; leave it out"
                )

    def drop_path_rate(self, model: str) -> float | None:
        """Return the stochastic depth rate of a model: that of the first pattern its name matches."""
        if not isinstance(self.drop_path, dict):
            return self.drop_path
        for pattern, rate in self.drop_path.items():
            if fnmatch.fnmatch(model, pattern):
                return rate
        known = ", ".join(self.drop_path)
        raise UserError(f"drop_path has no rate for {model!r}, only for {known}; add one, or '*'")

    @property
    def backbone(self) -> str:
        """The timm model that a segmentation model or a detector is built on; empty if none is given."""
        return str(self.model_args.get("backbone") or "")

    def backbone_model_args(self) -> dict[str, Any]:
        """Return ``model_args`` of a model with a backbone, with ``drop_path`` among the backbone's."""
        model_args = dict(self.model_args)
        if self.drop_path is None:
            return model_args
        body = dict(model_args.get("backbone_args") or {})
        if "drop_path_rate" in body:
            raise UserError(
                "drop_path and model_args.backbone_args.drop_path_rate are the same option; give one of them"
            )
        rate = self.drop_path_rate(self.backbone)
        return model_args | {"backbone_args": body | {"drop_path_rate": rate}}

    @property
    def shows_digits(self) -> bool:
        """Whether the images must not be mirrored; unknown data are treated as photographs."""
        return self.data.partition(":")[0] in ("digits", "digit_scenes")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a dataclass field; None if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default
