"""Everything a training run depends on, as one dataclass: the options of ``vtok train``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from visualtokens.train.config_checks import check, default_of


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a model and save it as a folder that timm, ``vtok eval`` and others can load."""

    model: str
    """Name of the model: one of `vtok models`, or any other model of timm. To segment: fpn, vt_fpn, upernet;
    to detect: mask_rcnn, cascade_mask_rcnn, retinanet; both with such a model as --model_args.backbone."""

    data: str
    """Images to learn from: digits, digit_scenes, folder:PATH, npz:FILE, wds:PATH or hfds:NAME. To segment:
    digit_scenes, masks:, pets:, ade20k:, cocostuff: or lip:PATH; to detect: digit_scenes or coco:PATH."""

    out: str
    """Folder for the result: the model, its settings, the log, and what is needed to resume."""

    task: str = "classify"
    """What to learn: classify (a label per image), segment (a class per pixel), detect (boxes, masks)."""

    init: str | None = None
    """Checkpoint folder whose weights to start from; a head for other classes starts anew."""

    epochs: int = 10
    """How many times to go through the training images."""

    seed: int = 0
    """Start of every random choice; the same seed gives the same model on the same machine."""

    batch: int = 64
    """Images per step, of all processes together."""

    accumulate: int = 1
    """Pieces in which each process works through its images of a step; more need less memory."""

    size: int | None = None
    """Side of the square images the model sees, in pixels; by default the model's own input size.
    To detect, the short side of images in their own shape; by default 800."""

    augment: str | None = None
    """How training images are varied: none, digits, photo, imagenet or cifar.
    By default digits for digits, else photo. To segment: none, digits, photo, coco, ade20k; to detect:
    none, photo, multiscale."""

    auto_augment: str | None = None
    """Policy of timm on top of that, such as rand-m9-mstd0.5-inc1, original or augmix-m3."""

    random_erasing: float = 0.0
    """Share of the training images of which a rectangle becomes noise."""

    mixup: float = 0.0
    """Blend pairs of images by Mixup with this parameter; 0 does not."""

    cutmix: float = 0.0
    """Paste a part of one image into another by CutMix with this parameter; 0 does not."""

    label_smoothing: float = 0.1
    """How much of each label is spread over the other classes."""

    loss_args: dict[str, Any] = field(default_factory=dict)
    """To segment: auxiliary, the weight of the auxiliary head (0.4), and class_weights, such as
    --loss_args.class_weights.border 2."""

    teacher: str | None = None
    """Model to learn from besides the labels: a checkpoint folder, or a model of timm with its weights."""

    distill: float | None = None
    """Weight of the teacher's answers in the loss; the labels have the rest. By default 0.5."""

    distill_temperature: float | None = None
    """How much to soften both answers before they are compared; by default 1, which does not."""

    optimizer: str = "adamw"
    """Optimizer, by its name in timm: adamw, nesterov (SGD), rmsproptf, lamb and others."""

    optimizer_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer, such as --optimizer_args.momentum 0.9."""

    lr: float = 1e-3
    """Highest learning rate."""

    schedule: Literal["cosine", "step"] = "cosine"
    """How the learning rate falls after the warm-up: along half a cosine, or in steps."""

    min_lr: float | None = None
    """Learning rate at the very end of the cosine; by default 1e-6, or a tenth of lr if that is less."""

    decay_epochs: float | list[float] | None = None
    """Epochs between two steps of the learning rate, for --schedule step; by default 30.
    A list tells after which epochs they come, such as [8, 11]."""

    decay_rate: float | None = None
    """Factor of each such step; by default 0.1."""

    warmup_epochs: float | None = None
    """Epochs in which the learning rate rises; by default a tenth of all, at most 5."""

    warmup_lr: float | None = None
    """Learning rate at the start of the warm-up; by default 1e-6, or a tenth of lr if that is less."""

    weight_decay: float = 0.05
    """Decay of the weights; biases, norms and what the model exempts are left alone."""

    layer_decay: float | None = None
    """Factor of the learning rate from each layer to the one before it, to fine-tune."""

    clip: float = 1.0
    """Largest norm of the gradient, larger ones are scaled down; 0 clips nothing."""

    ema: float | None = None
    """Decay of a running average of the weights, such as 0.9999; it is what is judged and saved."""

    drop_path: float | dict[str, float] | None = None
    """Stochastic depth: a rate, or rates by patterns of model names, of which the first that fits counts."""

    model_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model, such as --model_args.drop_rate 0.2."""

    workers: int = 0
    """Processes that prepare images, for each process that trains; 0 prepares them there."""

    device: str = "auto"
    """Where to compute: auto (a GPU if there is one), cpu, cuda, cuda:1, mps."""

    bf16: bool = False
    """Compute in bfloat16 where it is safe (automatic mixed precision)."""

    channels_last: bool = False
    """Keep images and convolutions in channels-last memory order, which is often faster."""

    compile: bool = False
    """Compile the model with torch.compile; the first steps then take minutes."""

    sync_bn: bool = False
    """Let BatchNorm see the images of all processes; needs GPUs if there are several."""

    save_every: int | None = None
    """Steps between two snapshots to resume from; by default one after every epoch."""

    keep: int = 1
    """How many snapshots to keep, the newest ones."""

    max_bad_steps: int = 10
    """How many steps in a row may be skipped because loss or gradient is not finite."""

    max_bad_images: float = 0.05
    """Share of the images that may turn out unreadable before the run stops."""

    log: list[str] = field(default_factory=list)
    """Where to log besides log.jsonl and steps.jsonl: tensorboard, trackio, wandb."""

    log_every: int = 50
    """Steps between two records in steps.jsonl and in those."""

    overwrite: bool = False
    """Replace a run that the folder already holds."""

    resume: bool | Literal["auto"] = False
    """Go on with the run in the folder, from its last snapshot; give the other options again.
    With auto, start if there is none yet."""

    def __post_init__(self) -> None:
        check(self)

    @property
    def warmup(self) -> float:
        """Epochs of warm-up, with the default filled in."""
        return min(5.0, self.epochs / 10) if self.warmup_epochs is None else self.warmup_epochs

    def given(self, name: str) -> bool:
        """Whether the option differs from its default."""
        return bool(getattr(self, name) != default_of(self, name))

    @classmethod
    def names(cls) -> list[str]:
        """Of all options."""
        return [each.name for each in fields(cls)]
