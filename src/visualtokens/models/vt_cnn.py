"""A Visual Transformer stage on any convolutional network of timm."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from timm.models._features import FeatureInfo, feature_take_indices
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.models.vt_stage import TokenClassifier, VTOptions, VTStage


def add_vt_stage(
    model: nn.Module,
    modules: int = 3,
    *,
    channels: int | None = None,
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
) -> VTNet:
    """A copy of ``model`` whose last stage is ``modules`` VT modules instead (VT Sec. 4).

    ``model`` is a pyramid of timm, such as ``timm.create_model("regnety_002", pretrained=True)``: the
    stages that stay keep their weights. The VT modules work on the map before the last stage, with
    ``channels`` channels (by default as many as that map has); the other options are those of VT-ResNet.
    The classifier is new, for as many classes, and reads the mean of the tokens. ``model`` is left as it was.
    """
    infos = _levels(model)
    options = VTOptions(
        tokenizer=tokenizer,
        recurrent=recurrent,
        mixer=mixer,
        tokens=tokens,
        projector=projector,
        token_dim=token_dim,
        attn_dim=attn_dim,
        groups=groups,
        hidden=hidden,
        value=value,
    )
    before = infos[-2]["num_chs"]
    stage = VTStage(before, before if channels is None else channels, depth=modules, options=options)
    source: Any = model  # whose attributes nn.Module does not declare
    new = VTNet(_without_last_stage(source, infos), infos[:-1], stage)
    drop_rate = getattr(source, "drop_rate", 0.0)
    new.add_head(token_dim, source.num_classes, global_pool="avg", drop_rate=drop_rate)
    new.pretrained_cfg = new.default_cfg = _config(source)
    like = next(model.parameters())
    return new.to(like.device, like.dtype).train(model.training)


class VTNet(TokenClassifier):
    """The maps of a pyramid of timm without its last stage, then a VT stage on the last of them.

    ``forward_features`` gives the tokens ``(B, L, CT)``, of which the head reads the mean.
    """

    pretrained_cfg: dict[str, Any]
    default_cfg: dict[str, Any]

    def __init__(self, backbone: Any, infos: Sequence[dict[str, Any]], stage: VTStage) -> None:
        super().__init__()
        self.backbone = backbone
        self.vt = stage
        self.feature_info = [dict(info, module=f"backbone.{info['module']}") for info in infos]
        self.feature_info.append(dict(self.feature_info[-1], num_chs=stage.dim, module="vt"))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.backbone.set_grad_checkpointing(enable)
        self.vt.grad_checkpointing = enable

    def forward_features(self, x: Tensor) -> Tensor:
        return self.vt(self._maps(x, [len(self.feature_info) - 2])[0])[1]

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The chosen maps, the last of which the VT stage refined; and what forward_features gives."""
        if output_fmt != "NCHW":
            raise UserError(f"output_fmt={output_fmt!r}: the intermediates are maps, so only 'NCHW'")
        take, last = feature_take_indices(len(self.feature_info), indices)
        vt = len(self.feature_info) - 1
        if last < vt and (stop_early or intermediates_only):
            maps = self._maps(x, take)
            return maps if intermediates_only else (maps[-1], maps)
        maps = self._maps(x, list(range(vt)))
        refined, tokens = self.vt(maps[-1])
        chosen = [(*maps, refined)[i] for i in take]
        return chosen if intermediates_only else (tokens, chosen)

    def _maps(self, x: Tensor, levels: Sequence[int]) -> list[Tensor]:
        return self.backbone.forward_intermediates(
            x, indices=list(levels), stop_early=True, intermediates_only=True
        )


def _levels(model: Any) -> list[dict[str, Any]]:
    """timm's description of the maps of each stage, if they are what a VT stage can stand on."""
    kind = type(model).__name__
    info = getattr(model, "feature_info", None)
    methods = ("forward_intermediates", "prune_intermediate_layers")
    if info is None or not all(hasattr(model, method) for method in methods):
        raise UserError(
            f"{kind} does not say what its stages are (feature_info, {' and '.join(methods)}); "
            f"give a pyramid made by timm.create_model, without features_only"
        )
    infos = info.get_dicts() if isinstance(info, FeatureInfo) else list(info)
    if len(infos) < 2:
        raise UserError(f"{kind} has {len(infos)} stage; a VT stage replaces the last of at least two")
    before, last = ((i["reduction"], i["num_chs"]) for i in infos[-2:])
    if before == last:
        raise UserError(
            f"{kind} has no last stage to replace: its last two maps have the same stride {last[0]} and "
            f"the same {last[1]} channels; give a pyramid"
        )
    return infos


def _without_last_stage(model: Any, infos: Sequence[dict[str, Any]]) -> Any:
    """A copy that ends at the last map but one; also the layers between last stage and classifier go."""
    pruned = copy.deepcopy(model)
    pruned.prune_intermediate_layers([len(infos) - 2], prune_norm=True, prune_head=True)
    names = [name for name, _ in model.named_children()]
    last = names.index(infos[-1]["module"].partition(".")[0])
    for name in names[last + 1 :]:
        setattr(pruned, name, nn.Identity())
    return pruned


def _config(model: Any) -> dict[str, Any]:
    """How to prepare images is as before; the classifier is another, and the stem has a longer name."""
    cfg = dict(getattr(model, "pretrained_cfg", {}))
    first = cfg.get("first_conv")
    names = [first] if isinstance(first, str) else list(first or ())
    return cfg | dict(
        first_conv=tuple(f"backbone.{name}" for name in names), classifier="head", pool_size=None
    )
