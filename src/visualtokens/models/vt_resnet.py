"""VT-ResNet: a ResNet whose last stage is Visual Transformer modules (VT Sec. 4, Table 11)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
from safetensors import SafetensorError
from timm.layers import calculate_drop_path_rates, make_divisible
from timm.models import checkpoint_seq, load_state_dict
from timm.models._features import feature_take_indices
from timm.models.resnet import BasicBlock, Bottleneck, make_blocks
from torch import Tensor, nn

from visualtokens.errors import UserError, unknown
from visualtokens.models.pyramid import channels_last
from visualtokens.models.registry import register_family
from visualtokens.models.vt_stage import TokenClassifier, VTOptions, VTStage

BLOCKS = {"basic": BasicBlock, "bottleneck": Bottleneck}
# Kernel and stride of the stem, and whether a max-pool follows.
STEMS = {"imagenet": (7, 2, True), "small": (3, 1, False)}
LEVELS = 5  # the maps of forward_intermediates: stem, layer1, layer2, layer3, vt

# depths: blocks in layer1, layer2, layer3, then VT modules. dim: channels of the VT modules' map.
# PAPER: Sec. 4 says 256 channels for VT-R18 and VT-R34, Table 11 says 512.
BASIC = dict(block="basic", dim=512, groups=2, hidden=1024, value=False)
BOTTLENECK = dict(block="bottleneck", dim=1024, groups=4, hidden=512, value=True)
CONFIGS = {
    "vt_resnet18": BASIC | dict(depths=(2, 2, 2, 2)),
    "vt_resnet34": BASIC | dict(depths=(3, 4, 6, 3)),
    "vt_resnet50": BOTTLENECK | dict(depths=(3, 4, 6, 3)),
    "vt_resnet101": BOTTLENECK | dict(depths=(3, 4, 23, 3)),
}


class VTResNet(TokenClassifier):
    """The stem and layers 1 to 3 of timm's ResNet, by the same names, then a VT stage at stride 16.

    ``forward_features`` gives the tokens ``(B, L, CT)``, of which the head reads the mean. The maps of
    ``forward_intermediates`` and ``features_only`` are those of timm's ResNets, except for the last one:
    it is the map that the VT modules refined, at the stride of layer3 (with ``projector=False``, the map of
    layer3 itself).

    ``stem="small"`` is for 32×32 images: a 3×3 convolution without stride, no max-pool. ``width`` scales
    all channels. ``init_from`` names a ResNet of timm, or a checkpoint of one, to start stages 1 to 4 from.
    """

    def __init__(
        self,
        *,
        block: str,
        depths: Sequence[int],
        dim: int,
        tokenizer: str = "filter",
        recurrent: bool = True,
        mixer: str = "transformer",
        tokens: int = 16,
        projector: bool = True,
        token_dim: int = 1024,
        attn_dim: int = 512,
        groups: int = 2,
        hidden: int = 1024,
        value: bool = False,
        stem: str = "imagenet",
        width: float = 1.0,
        init_from: str | Path | None = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        if width <= 0:
            raise UserError(f"width={width}; give a factor above 0, such as 0.25")

        def scaled(channels: int) -> int:
            return make_divisible(channels * width, 8)

        options = VTOptions(
            tokenizer=tokenizer,
            recurrent=recurrent,
            mixer=mixer,
            tokens=tokens,
            projector=projector,
            token_dim=scaled(token_dim),
            attn_dim=scaled(attn_dim),
            groups=groups,
            hidden=scaled(hidden),
            value=value,
        )
        super().__init__()
        self.in_chans = in_chans
        self.grad_checkpointing = False
        self.layers: tuple[str, ...] = ("layer1", "layer2", "layer3")
        *blocks, modules = depths
        rates = calculate_drop_path_rates(drop_path_rate, sum(depths))
        self._add_stem(stem, scaled(64))
        self._add_layers(block, blocks, [scaled(c) for c in (64, 128, 256)], rates[sum(blocks) - 1])
        before = self.feature_info[-1]
        self.vt: VTStage | None = VTStage(
            before["num_chs"], scaled(dim), depth=modules, options=options, drop_paths=rates[sum(blocks) :]
        )
        self.feature_info.append(dict(before, num_chs=self.vt.dim, module="vt"))
        self.add_head(options.token_dim, num_classes, global_pool=global_pool, drop_rate=drop_rate)
        if init_from is not None:
            load_stages(self, init_from, in_chans=in_chans)

    def _add_stem(self, stem: str, dim: int) -> None:
        if stem not in STEMS:
            raise unknown("stem", stem, STEMS)
        kernel, stride, pool = STEMS[stem]
        self.conv1 = nn.Conv2d(self.in_chans, dim, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(dim)
        self.act1 = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if pool else nn.Identity()
        self.feature_info: list[dict[str, Any]] = [dict(num_chs=dim, reduction=stride, module="act1")]
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")

    def _add_layers(self, block: str, depths: Sequence[int], dims: Sequence[int], drop_path: float) -> None:
        """layer1, layer2 and layer3, made by timm and initialised like its ResNets."""
        if block not in BLOCKS:
            raise unknown("block", block, BLOCKS)
        stem = self.feature_info[0]
        layers, infos = make_blocks(
            (BLOCKS[block],) * len(depths), dims, depths, stem["num_chs"], drop_path_rate=drop_path
        )
        first = stem["reduction"] * (2 if isinstance(self.maxpool, nn.MaxPool2d) else 1)
        for (name, layer), info in zip(layers, infos, strict=True):
            self.add_module(name, layer)
            self.feature_info.append(dict(info, reduction=info["reduction"] // 4 * first))  # timm starts at 4
            for module in layer.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            for part in layer:
                part.zero_init_last()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for layer-wise learning rates: a stage, or (fine) each block and VT module."""
        return dict(
            stem=r"^(?:conv1|bn1)",
            blocks=r"^layer(\d+)" if coarse else r"^layer(\d+)\.(\d+)",
            vt=r"^vt" if coarse else r"^vt\.blocks\.(\d+)",
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable
        if self.vt is not None:
            self.vt.grad_checkpointing = enable

    def forward_features(self, x: Tensor) -> Tensor:
        """The tokens ``(B, L, CT)``; after pruning, the last map that is left."""
        x = self.maxpool(self._stem(x))
        for name in self.layers:
            x = self._layer(name, x)
        if self.vt is None:
            return x
        x, tokens = self.vt(x)
        return x if tokens is None else tokens

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The chosen maps of stem, layer1, layer2, layer3 and VT stage; and what forward_features gives."""
        if output_fmt != "NCHW":
            raise UserError(f"output_fmt={output_fmt!r}: the intermediates are maps, so only 'NCHW'")
        take, last = feature_take_indices(LEVELS, indices)
        end = last if stop_early or intermediates_only else LEVELS - 1
        x = self._stem(x)
        maps = [x] if 0 in take else []
        x = self.maxpool(x)
        for level, name in enumerate(self.layers[:end], start=1):
            x = self._layer(name, x)
            if level in take:
                maps.append(x)
        if self.vt is not None and end == LEVELS - 1:
            refined, tokens = (self.vt.refine(x), None) if intermediates_only else self.vt(x)
            if end in take:
                maps.append(refined)
            x = refined if tokens is None else tokens
        return maps if intermediates_only else (x, maps)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what comes after the last map asked for; with the head, also the modules only it reads."""
        take, last = feature_take_indices(LEVELS, indices)
        for name in self.layers[last:]:
            delattr(self, name)
        self.layers = self.layers[:last]
        if last < LEVELS - 1:
            self.vt = None
        if prune_head:
            self.reset_classifier(0, "")
            if self.vt is not None:
                self.vt.prune_tokens()
        return list(take)

    def _stem(self, x: Tensor) -> Tensor:
        # Channels-last from the first convolution on: its kernels are the faster ones on a CPU and the
        # VT modules need that layout anyway.
        return self.act1(self.bn1(self.conv1(channels_last(x))))

    def _layer(self, name: str, x: Tensor) -> Tensor:
        layer = getattr(self, name)
        return checkpoint_seq(layer, x) if self.grad_checkpointing else layer(x)


register_family(
    __name__,
    VTResNet,
    CONFIGS,
    levels=LEVELS,
    default_cfg=dict(
        pool_size=None,  # the head reads tokens, however large the map
        crop_pct=0.875,
        interpolation="bilinear",
        first_conv="conv1",
    ),
)


# Start a model from the stages 1 to 4 of a trained ResNet, timm's or torchvision's.

STAGES = ("conv1", "bn1", "layer1", "layer2", "layer3")
REPLACED = ("layer4", "fc")


def load_stages(model: nn.Module, source: str | Path, *, in_chans: int) -> None:
    """Copy the stages of ``source`` into those of the same names in ``model``.

    ``source`` is a model of timm, whose pretrained weights timm fetches, or a checkpoint file. What the
    model has instead of layer4 and fc is left as it is; every other difference is an error.
    """
    found = _read(source, in_chans)
    counters = [k for k in model.state_dict() if k.endswith(".num_batches_tracked")]  # old files have none
    wanted = {k: v for k, v in model.state_dict().items() if k.partition(".")[0] in STAGES}
    given = {k: v for k, v in found.items() if k.partition(".")[0] not in REPLACED}
    shapes = [
        f"{k} {tuple(given[k].shape)} instead of {tuple(wanted[k].shape)}"
        for k in sorted(wanted.keys() & given.keys())
        if given[k].shape != wanted[k].shape
    ]
    problems = [
        _listed("missing", sorted(wanted.keys() - given.keys() - set(counters))),
        _listed("unexpected", sorted(given.keys() - wanted.keys())),
        _listed("of another shape", shapes),
    ]
    if any(problems):
        what = "; ".join(filter(None, problems))
        raise UserError(f"init_from={str(source)!r} does not fit: {what}; give the ResNet of this depth")
    model.load_state_dict(given, strict=False)


def _read(source: str | Path, in_chans: int) -> dict[str, Tensor]:
    name = str(source)
    if Path(source).is_file():
        return _read_file(name)
    if not timm.is_model(name):
        raise UserError(
            f"init_from={name!r} is neither a file nor a model of timm; give one, like 'resnet18'"
        )
    try:
        return timm.create_model(name, pretrained=True, in_chans=in_chans).state_dict()
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"the pretrained weights of {name!r} cannot be fetched: {_first_line(error)}; "
            f"give init_from the path of a checkpoint instead"
        ) from error


def _read_file(path: str) -> dict[str, Tensor]:
    why = "it holds no tensors by name"
    try:
        found = load_state_dict(path, weights_only=True)
        if all(isinstance(value, Tensor) for value in found.values()):
            return found
    except (OSError, RuntimeError, EOFError, AttributeError, SafetensorError) as error:
        why = _first_line(error)
    raise UserError(f"init_from={path!r} is not a checkpoint: {why}; give a .safetensors or .pth of weights")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _listed(what: str, keys: list[str], *, limit: int = 4) -> str:
    if not keys:
        return ""
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return f"{what}: {', '.join(keys[:limit])}{more}"
