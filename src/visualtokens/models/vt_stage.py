"""The VT stage (Visual Transformers, Sec. 4): its options, its modules, and how to add it to a timm CNN."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from timm.models import checkpoint
from timm.models._features import FeatureInfo, feature_take_indices
from torch import Tensor, nn

from visualtokens.errors import UserError, unknown
from visualtokens.layers import Projector, RecurrentTokenizer, TokenGraphConv, TokenLinear, TokenTransformer
from visualtokens.layers.convolutions import channels_last
from visualtokens.layers.tokenizers import make_tokenizer
from visualtokens.models.pyramid import Classifier, require_nchw


@dataclass(frozen=True, kw_only=True)
class VTOptions:
    """Keyword arguments of VT-ResNets and of :func:`add_vt_stage`; VT Tables 3 to 7 vary the first five."""

    tokenizer: str = "filter"  # of the first module: "filter", "cluster", "pool" or a registered one
    recurrent: bool = True  # later modules use the recurrent tokenizer instead of the first module's
    mixer: str = "transformer"  # or "graphconv" or "none"
    tokens: int = 16
    projector: bool = True  # False: tokenize once, then apply the mixers only
    token_dim: int = 1024
    attn_dim: int = 512  # channels of keys and queries in the transformer
    groups: int = 2  # of the key and query convolutions
    hidden: int = 1024  # channels of the feed-forward layers
    value: bool = False  # a value convolution in the tokenizers that are not recurrent

    def __post_init__(self) -> None:
        if self.mixer not in MIXERS:
            raise unknown("mixer", self.mixer, MIXERS)

    def make_module(self, dim_in: int, dim: int, *, first: bool, last: bool, drop_path: float) -> VTModule:
        """Creates a VT module that maps ``dim_in`` channels to ``dim``.

        The last module of a stage has no projector, because no layer reads the map after it.
        """
        tokenizer = projector = None
        if first or (self.projector and not self.recurrent):
            tokenizer = make_tokenizer(
                self.tokenizer, dim_in, tokens=self.tokens, token_dim=self.token_dim, value=self.value
            )
        elif self.projector:
            tokenizer = RecurrentTokenizer(dim_in, token_dim=self.token_dim)
        if self.projector and not last:
            projector = Projector(dim_in, dim, token_dim=self.token_dim, drop_path=drop_path)
        return VTModule(tokenizer, MIXERS[self.mixer](self, drop_path), projector)


def _transformer(options: VTOptions, drop_path: float) -> nn.Module:
    return TokenTransformer(
        options.token_dim,
        hidden=options.hidden,
        attn_dim=options.attn_dim,
        groups=options.groups,
        drop_path=drop_path,
    )


MIXERS: Mapping[str, Callable[[VTOptions, float], nn.Module]] = {
    "transformer": _transformer,
    "graphconv": lambda o, drop_path: TokenGraphConv(o.token_dim, tokens=o.tokens, drop_path=drop_path),
    "none": lambda o, drop_path: TokenLinear(o.token_dim, drop_path=drop_path),
}


class VTModule(nn.Module):
    """VT Sec. 3: tokenize the map, mix the tokens, project them back.

    Without a tokenizer the previous tokens are mixed; without a projector the map is returned unchanged.
    """

    def __init__(self, tokenizer: nn.Module | None, mixer: nn.Module, projector: nn.Module | None) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.mixer = mixer
        self.projector = projector

    def forward(self, x: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the next map and tokens for ``x (B, C, H, W)`` and the previous ``tokens (B, K, CT)``."""
        if isinstance(self.tokenizer, RecurrentTokenizer):
            tokens = self.tokenizer(x, tokens)
        elif self.tokenizer is not None:
            tokens = self.tokenizer(x)
        tokens = self.mixer(tokens)
        if self.projector is not None:
            x = self.projector(x, tokens)
        return x, tokens


class VTStage(nn.Module):
    """``depth`` VT modules at one resolution: ``(B, C_in, H, W)`` to a map ``(B, C, H, W)`` and tokens.

    The map is that of the last projector, or the input if there is none; ``self.dim`` is its channels.
    """

    def __init__(
        self, dim_in: int, dim: int, *, depth: int, options: VTOptions, drop_paths: Sequence[float] = ()
    ) -> None:
        super().__init__()
        if depth < 1:
            raise UserError(f"a stage of {depth} VT modules; give at least 1")
        self.grad_checkpointing = False
        self.dim = dim if options.projector and depth > 1 else dim_in
        self.blocks = nn.ModuleList(
            options.make_module(
                self.dim if i > 0 else dim_in, dim, first=i == 0, last=i == depth - 1, drop_path=drop_path
            )
            for i, drop_path in enumerate(drop_paths or [0.0] * depth)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the map ``(B, C, H, W)`` and the tokens ``(B, K, CT)``, None if all modules are pruned."""
        return self._run(self.blocks, x)

    def forward_map(self, x: Tensor) -> Tensor:
        """Returns the map of :meth:`forward`, skipping the modules that do not change it."""
        return self._run(self._projecting(), x)[0]

    def prune_tokens(self) -> None:
        """Removes the modules that do not change the map; the final tokens are no longer available."""
        self.blocks = nn.ModuleList(self._projecting())

    def _projecting(self) -> list[nn.Module]:
        return [block for block in self.blocks if block.projector is not None]

    def _run(self, blocks: Iterable[nn.Module], x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = channels_last(x)  # to view maps as sequences without a copy
        tokens = None
        for block in blocks:
            x, tokens = checkpoint(block, x, tokens) if self.grad_checkpointing else block(x, tokens)
        return x, tokens


class TokenClassifier(Classifier):
    """A classifier of tokens: ``forward_features`` returns ``(B, K, CT)``.

    ``global_pool="avg"`` classifies the mean over tokens, ``""`` each token.
    """

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool:
            x = self.head_drop(x.mean(1))  # (B, CT)
        return x if pre_logits else self.head(x)


def add_vt_stage(model: nn.Module, modules: int = 3, *, channels: int | None = None, **options: Any) -> VTNet:
    """Returns a copy of a timm CNN whose last stage is replaced by ``modules`` VT modules (VT Sec. 4).

    >>> model = add_vt_stage(timm.create_model("regnety_002", pretrained=True), tokens=32)

    The remaining stages keep their weights. The VT modules read the map before the last stage; their own
    map has ``channels`` channels, by default as many. ``options`` are the fields of :class:`VTOptions`:
    ``tokenizer``, ``recurrent``, ``mixer``, ``tokens``, ``projector``, ``token_dim``, ``attn_dim``,
    ``groups``, ``hidden`` and ``value``. The classifier is new, with the same number of classes, and reads
    the mean of the tokens. ``model`` itself is not changed.
    """
    infos = _stage_infos(model)
    vt = VTOptions(**options)
    dim_in = infos[-2]["num_chs"]
    stage = VTStage(dim_in, dim_in if channels is None else channels, depth=modules, options=vt)
    source: Any = model  # nn.Module does not declare timm's attributes
    new = VTNet(_without_last_stage(source, infos), infos[:-1], stage)
    drop_rate = getattr(source, "drop_rate", 0.0)
    new.add_head(vt.token_dim, source.num_classes, global_pool="avg", drop_rate=drop_rate)
    new.pretrained_cfg = new.default_cfg = _pretrained_cfg(source)
    like = next(model.parameters())
    return new.to(like.device, like.dtype).train(model.training)


class VTNet(TokenClassifier):
    """A timm CNN without its last stage, then a VT stage; ``forward_features`` returns ``(B, K, CT)``."""

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
        """Returns the output of ``forward_features`` and the selected maps; the VT stage's is the last."""
        require_nchw(output_fmt)
        take, last = feature_take_indices(len(self.feature_info), indices)
        vt = len(self.feature_info) - 1
        if last < vt and (stop_early or intermediates_only):
            maps = self._maps(x, take)
            return maps if intermediates_only else (maps[-1], maps)
        maps = self._maps(x, list(range(vt)))
        refined, tokens = self.vt(maps[-1])
        selected = [(*maps, refined)[i] for i in take]
        return selected if intermediates_only else (tokens, selected)

    def _maps(self, x: Tensor, levels: Sequence[int]) -> list[Tensor]:
        return self.backbone.forward_intermediates(
            x, indices=list(levels), stop_early=True, intermediates_only=True
        )


def _stage_infos(model: Any) -> list[dict[str, Any]]:
    """Returns timm's description of the map of each stage; raises if no VT stage can replace the last."""
    kind = type(model).__name__
    info = getattr(model, "feature_info", None)
    methods = ("forward_intermediates", "prune_intermediate_layers")
    if info is None or not all(hasattr(model, method) for method in methods):
        raise UserError(
            f"{kind} does not describe its stages (feature_info, {' and '.join(methods)}); "
            f"give a CNN made by timm.create_model, without features_only"
        )
    infos = info.get_dicts() if isinstance(info, FeatureInfo) else list(info)
    if len(infos) < 2:
        raise UserError(f"{kind} has {len(infos)} stage; a VT stage replaces the last of at least two")
    before, last = ((i["reduction"], i["num_chs"]) for i in infos[-2:])
    if before == last:
        raise UserError(
            f"{kind} has no last stage to replace: its last two maps have the same stride {last[0]} and "
            f"the same {last[1]} channels; give a CNN with stages of decreasing resolution"
        )
    return infos


def _without_last_stage(model: Any, infos: Sequence[dict[str, Any]]) -> Any:
    """Returns a copy without the last stage and without the layers between it and the classifier."""
    pruned = copy.deepcopy(model)
    pruned.prune_intermediate_layers([len(infos) - 2], prune_norm=True, prune_head=True)
    names = [name for name, _ in model.named_children()]
    last = names.index(infos[-1]["module"].partition(".")[0])
    for name in names[last + 1 :]:
        setattr(pruned, name, nn.Identity())
    return pruned


def _pretrained_cfg(model: Any) -> dict[str, Any]:
    """Returns timm's configuration of ``model`` with the names of the new model's first and last layers."""
    cfg = dict(getattr(model, "pretrained_cfg", {}))
    first = cfg.get("first_conv")
    names = [first] if isinstance(first, str) else list(first or ())
    return cfg | dict(
        first_conv=tuple(f"backbone.{name}" for name in names), classifier="head", pool_size=None
    )
