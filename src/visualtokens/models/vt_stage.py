"""The stage of Visual Transformer modules, and the classifier that reads its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from timm.models import checkpoint
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
