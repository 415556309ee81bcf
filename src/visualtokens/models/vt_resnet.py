"""VT-ResNet: a ResNet whose last stage is Visual Transformer modules (VT Sec. 4, Table 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from visualtokens.layers.convolutions import channels_last
from visualtokens.models.pyramid import require_nchw
from visualtokens.models.registry import register_family
from visualtokens.models.vt_stage import TokenClassifier, VTOptions, VTStage

# depths: blocks of layer1, layer2 and layer3, then VT modules. dim: channels of the VT modules' map.
# PAPER: Sec. 4 says 256 channels for VT-R18 and VT-R34, Table 11 says 512.
BASIC: dict[str, Any] = dict(block="basic", dim=512, groups=2, hidden=1024, value=False)
BOTTLENECK: dict[str, Any] = dict(block="bottleneck", dim=1024, groups=4, hidden=512, value=True)
CONFIGS: dict[str, dict[str, Any]] = {
    "vt_resnet18": BASIC | dict(depths=(2, 2, 2, 2)),
    "vt_resnet34": BASIC | dict(depths=(3, 4, 6, 3)),
    "vt_resnet50": BOTTLENECK | dict(depths=(3, 4, 6, 3)),
    "vt_resnet101": BOTTLENECK | dict(depths=(3, 4, 23, 3)),
}

BLOCKS = {"basic": BasicBlock, "bottleneck": Bottleneck}
STEMS = {"imagenet": (7, 2, True), "small": (3, 1, False)}  # kernel, stride, whether a max-pool follows
LEVELS = 5  # maps of forward_intermediates: stem, layer1, layer2, layer3, VT stage


class VTResNet(TokenClassifier):
    """The stem and layers 1 to 3 of timm's ResNet, with the same names, then a VT stage at stride 16.

    ``forward_features`` returns the tokens ``(B, K, CT)``; the head reads their mean. The maps of
    ``forward_intermediates`` and ``features_only`` are those of timm's ResNets except for the last: the
    map of the VT stage, at the stride of layer3 (with ``projector=False``, the map of layer3 itself).

    ``options`` are the fields of :class:`~visualtokens.models.vt_stage.VTOptions`. ``stem="small"`` is for
    32×32 images: a 3×3 convolution of stride 1 without max-pool. ``width`` scales all channels.
    ``init_from`` is a timm ResNet or a checkpoint of one, from which stem and layers 1 to 3 are initialised.
    ``output_stride`` is the stride of the last map: that of layer3 (16, or 4 with the small stem), or twice
    as much for decoders in which every map halves the one before. The VT stage's map is then averaged over
    2×2 pixels; the tokens and the classifier do not change.
    """

    def __init__(
        self,
        *,
        block: str,
        depths: Sequence[int],
        dim: int,
        stem: str = "imagenet",
        width: float = 1.0,
        init_from: str | Path | None = None,
        output_stride: int | None = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        **options: Any,
    ) -> None:
        if width <= 0:
            raise UserError(f"width={width}; give a factor above 0, such as 0.25")

        def scaled(channels: int) -> int:
            return make_divisible(channels * width, 8)

        vt = VTOptions(**options)
        vt = replace(
            vt, token_dim=scaled(vt.token_dim), attn_dim=scaled(vt.attn_dim), hidden=scaled(vt.hidden)
        )
        super().__init__()
        self.in_chans = in_chans
        self.grad_checkpointing = False
        self.layers: tuple[str, ...] = ("layer1", "layer2", "layer3")
        *blocks, modules = depths
        rates = calculate_drop_path_rates(drop_path_rate, sum(depths))
        self._add_stem(stem, scaled(64))
        self._add_layers(block, blocks, [scaled(c) for c in (64, 128, 256)], rates[sum(blocks) - 1])
        layer3 = self.feature_info[-1]
        self.vt: VTStage | None = VTStage(
            layer3["num_chs"], scaled(dim), depth=modules, options=vt, drop_paths=rates[sum(blocks) :]
        )
        self.shrink = self._shrinking(output_stride, layer3["reduction"])
        stride = output_stride or layer3["reduction"]
        self.feature_info.append(dict(layer3, num_chs=self.vt.dim, reduction=stride, module="vt"))
        self.add_head(vt.token_dim, num_classes, global_pool=global_pool, drop_rate=drop_rate)
        if init_from is not None:
            load_resnet(self, init_from, in_chans=in_chans)

    def _shrinking(self, output_stride: int | None, stride: int) -> nn.Module:
        """Returns the layer from the VT stage's map of this stride to the last map."""
        if output_stride in (None, stride):
            return nn.Identity()
        if output_stride != 2 * stride:
            raise UserError(
                f"output_stride={output_stride}; the last map has stride {stride} or {2 * stride}"
            )
        return nn.AvgPool2d(2, ceil_mode=True, count_include_pad=False)

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
        """Adds layer1, layer2 and layer3, built by timm and initialised like its ResNets."""
        if block not in BLOCKS:
            raise unknown("block", block, BLOCKS)
        stem = self.feature_info[0]
        layers, infos = make_blocks(
            (BLOCKS[block],) * len(depths), dims, depths, stem["num_chs"], drop_path_rate=drop_path
        )
        first = stem["reduction"] * (2 if isinstance(self.maxpool, nn.MaxPool2d) else 1)
        for (name, layer), info in zip(layers, infos, strict=True):
            self.add_module(name, layer)
            self.feature_info.append(dict(info, reduction=info["reduction"] // 4 * first))  # timm assumes 4
            for module in layer.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            for part in layer:
                part.zero_init_last()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Returns layer groups for layer-wise learning rates: stages, or (fine) blocks and VT modules."""
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
        """Returns the tokens ``(B, K, CT)``; after pruning, the last remaining map."""
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
        """Returns the output of ``forward_features`` and the selected maps of stem, layers and VT stage."""
        require_nchw(output_fmt)
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
            refined, tokens = (self.vt.forward_map(x), None) if intermediates_only else self.vt(x)
            if end in take:
                maps.append(self.shrink(refined))
            x = refined if tokens is None else tokens
        return maps if intermediates_only else (x, maps)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Removes the layers after the last selected map; with the head, also the modules only it needs."""
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
        # Channels-last kernels are faster on a CPU, and the VT modules need that layout anyway.
        return self.act1(self.bn1(self.conv1(channels_last(x))))

    def _layer(self, name: str, x: Tensor) -> Tensor:
        layer = getattr(self, name)
        return checkpoint_seq(layer, x) if self.grad_checkpointing else layer(x)


# The parts of a ResNet, timm's or torchvision's, that initialise a VT-ResNet, and those it has no use for.
RESNET_LAYERS = ("conv1", "bn1", "layer1", "layer2", "layer3")
REPLACED_LAYERS = ("layer4", "fc")


def load_resnet(model: nn.Module, source: str | Path, *, in_chans: int) -> None:
    """Loads stem and layers 1 to 3 of a ResNet into ``model``.

    ``source`` is the name of a timm model, whose pretrained weights timm downloads, or a checkpoint file.
    Any difference in names or shapes other than layer4 and fc is an error.
    """
    state = _read_resnet(source, in_chans)
    counters = [k for k in model.state_dict() if k.endswith(".num_batches_tracked")]  # old files have none
    wanted = {k: v for k, v in model.state_dict().items() if k.partition(".")[0] in RESNET_LAYERS}
    given = {k: v for k, v in state.items() if k.partition(".")[0] not in REPLACED_LAYERS}
    shapes = [
        f"{k} {tuple(given[k].shape)} instead of {tuple(wanted[k].shape)}"
        for k in sorted(wanted.keys() & given.keys())
        if given[k].shape != wanted[k].shape
    ]
    problems = [
        _listing("missing", sorted(wanted.keys() - given.keys() - set(counters))),
        _listing("unexpected", sorted(given.keys() - wanted.keys())),
        _listing("different shape", shapes),
    ]
    if any(problems):
        what = "; ".join(filter(None, problems))
        raise UserError(f"init_from={str(source)!r} does not fit: {what}; give the ResNet of this depth")
    model.load_state_dict(given, strict=False)


def _read_resnet(source: str | Path, in_chans: int) -> dict[str, Tensor]:
    name = str(source)
    if Path(source).is_file():
        return _read_checkpoint(name)
    if not timm.is_model(name):
        raise UserError(
            f"init_from={name!r} is neither a file nor a timm model; give one, such as 'resnet18'"
        )
    try:
        return timm.create_model(name, pretrained=True, in_chans=in_chans).state_dict()
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"the pretrained weights of {name!r} cannot be downloaded: {_first_line(error)}; "
            f"give init_from the path of a checkpoint instead"
        ) from error


def _read_checkpoint(path: str) -> dict[str, Tensor]:
    reason = "it does not map names to tensors"
    try:
        state = load_state_dict(path, weights_only=True)
        if all(isinstance(value, Tensor) for value in state.values()):
            return state
    except (OSError, RuntimeError, EOFError, AttributeError, SafetensorError) as error:
        reason = _first_line(error)
    raise UserError(
        f"init_from={path!r} is not a checkpoint: {reason}; give a .safetensors or .pth file of weights"
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def _listing(what: str, keys: list[str], *, limit: int = 4) -> str:
    if not keys:
        return ""
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return f"{what}: {', '.join(keys[:limit])}{more}"


register_family(
    __name__,
    VTResNet,
    CONFIGS,
    levels=LEVELS,
    default_cfg=dict(
        pool_size=None,  # the head reads tokens, so it has no spatial pooling
        crop_pct=0.875,
        interpolation="bilinear",
        first_conv="conv1",
    ),
)
