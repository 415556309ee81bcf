"""The stage of Visual Transformer modules, and the classifier that reads its tokens."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from timm.models import checkpoint
from timm.models._features import FeatureInfo, feature_take_indices
from torch import Tensor, nn

from visualtokens.errors import UserError, unknown
from visualtokens.layers import (
    ClusterTokenizer,
    FilterTokenizer,
    PoolTokenizer,
    Projector,
    RecurrentTokenizer,
    TokenGraphConv,
    TokenLinear,
    TokenTransformer,
)
from visualtokens.models.pyramid import channels_last

TOKENIZERS = {"filter": FilterTokenizer, "cluster": ClusterTokenizer, "pool": PoolTokenizer}
MIXERS = ("transformer", "graphconv", "none")


@dataclass(frozen=True, kw_only=True)
class VTOptions:
    """What the modules of a VT stage are made of; VT Tables 3 to 7 vary the first five."""

    tokenizer: str = "filter"  # of the first module: "filter", "cluster" or "pool"
    recurrent: bool = True  # later modules tokenise by the previous tokens, not like the first
    mixer: str = "transformer"  # or "graphconv" or "none"
    tokens: int = 16
    projector: bool = True  # off: tokenise once, then stack the mixers
    token_dim: int = 1024
    attn_dim: int = 512  # of K and Q
    groups: int = 2  # in K and Q
    hidden: int = 1024  # of the feed-forward layers
    value: bool = False  # a value convolution in the tokenizers that are not recurrent

    def __post_init__(self) -> None:
        if self.tokenizer not in TOKENIZERS:
            raise unknown("tokenizer", self.tokenizer, TOKENIZERS)
        if self.mixer not in MIXERS:
            raise unknown("mixer", self.mixer, MIXERS)

    def make_tokenizer(self, dim: int, *, first: bool) -> nn.Module | None:
        if not first and not self.projector:
            return None
        if not first and self.recurrent:
            return RecurrentTokenizer(dim, token_dim=self.token_dim)
        kind = TOKENIZERS[self.tokenizer]
        return kind(dim, tokens=self.tokens, token_dim=self.token_dim, value=self.value)

    def make_mixer(self, drop_path: float) -> nn.Module:
        if self.mixer == "graphconv":
            return TokenGraphConv(self.token_dim, tokens=self.tokens, drop_path=drop_path)
        if self.mixer == "none":
            return TokenLinear(self.token_dim, drop_path=drop_path)
        return TokenTransformer(
            self.token_dim,
            hidden=self.hidden,
            attn_dim=self.attn_dim,
            groups=self.groups,
            drop_path=drop_path,
        )


class VTModule(nn.Module):
    """VT Sec. 3: tokenise the map, let the tokens talk, project them back.

    Without a tokenizer the previous tokens go on; without a projector the map stays as it is.
    """

    def __init__(self, tokenizer: nn.Module | None, mixer: nn.Module, projector: nn.Module | None) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.mixer = mixer
        self.projector = projector

    def forward(self, x: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """The map ``(B, C, H, W)`` and the previous tokens ``(B, L, CT)``, if any, give the next of both."""
        if isinstance(self.tokenizer, RecurrentTokenizer):
            tokens = self.tokenizer(x, tokens)
        elif self.tokenizer is not None:
            tokens = self.tokenizer(x)
        tokens = self.mixer(tokens)
        if self.projector is not None:
            x = self.projector(x, tokens)
        return x, tokens


class VTStage(nn.Module):
    """VT Sec. 4: ``depth`` VT modules at one resolution; ``(B, C_in, H, W)`` gives a map and tokens.

    The last module has no projector, because nobody reads the map after it. So the map that comes out,
    of ``self.dim`` channels, is that of the last projector, or the input where there is none.
    """

    def __init__(
        self, dim_in: int, dim: int, *, depth: int, options: VTOptions, drop_paths: Sequence[float] = ()
    ) -> None:
        super().__init__()
        if depth < 1:
            raise UserError(f"a stage of {depth} VT modules; give at least 1")
        self.grad_checkpointing = False
        self.blocks = nn.ModuleList()
        rates = drop_paths or [0.0] * depth
        for i in range(depth):
            before = dim_in if i == 0 else dim
            tokenizer = options.make_tokenizer(before, first=i == 0)
            projector = None
            if options.projector and i < depth - 1:
                projector = Projector(before, dim, token_dim=options.token_dim, drop_path=rates[i])
            self.blocks.append(VTModule(tokenizer, options.make_mixer(rates[i]), projector))
        self.dim = dim if options.projector and depth > 1 else dim_in

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The refined map ``(B, C, H, W)`` and the tokens ``(B, L, CT)``, None if no module is left."""
        return self._run(self.blocks, x)

    def refine(self, x: Tensor) -> Tensor:
        """The refined map alone, without the modules that add nothing to it."""
        return self._run(self._refining(), x)[0]

    def prune_tokens(self) -> None:
        """Drop the modules that add nothing to the map, for those who do not read the tokens."""
        self.blocks = nn.ModuleList(self._refining())

    def _refining(self) -> list[nn.Module]:
        return [block for block in self.blocks if block.projector is not None]

    def _run(self, blocks: Iterable[nn.Module], x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = channels_last(x)  # where a map and the sequence of its pixels are the same memory
        tokens = None
        for block in blocks:
            x, tokens = checkpoint(block, x, tokens) if self.grad_checkpointing else block(x, tokens)
        return x, tokens


class TokenClassifier(nn.Module):
    """A model whose ``forward_features`` gives tokens ``(B, L, C)``, and the head that reads them.

    ``global_pool="avg"`` is the mean over tokens, ``""`` classifies every token by itself.
    """

    def add_head(self, num_features: int, num_classes: int, *, global_pool: str, drop_rate: float) -> None:
        """To be called when all the rest is there."""
        self.num_features = self.head_hidden_size = num_features
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, global_pool)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        if global_pool is not None:
            if global_pool not in ("avg", ""):
                raise UserError(f"global_pool={global_pool!r} is neither 'avg' nor '' (no pooling)")
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head: nn.Module = nn.Identity()
        if num_classes > 0:
            like = next(self.parameters())
            self.head = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)

    def get_classifier(self) -> nn.Module:
        return self.head

    def no_weight_decay(self) -> set[str]:
        return set()

    def forward_features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward_tokens(self, x: Tensor) -> Tensor:
        """The tokens ``(B, L, C)`` that the head reads."""
        return self.forward_features(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool:
            x = self.head_drop(x.mean(1))  # (B, C)
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


# A Visual Transformer stage on any convolutional network of timm.


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
