"""Another number of clusters for a trained PaCa-ViT, for instance for larger images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visualtokens.errors import UserError
from visualtokens.layers.clustering import Clustering
from visualtokens.ops import kmedoids


@torch.no_grad()
def set_clusters(model: nn.Module, clusters: int, *, split: float = 0.1, seed: int = 0) -> str:
    """Give every clustering in ``model`` (a model, a stage, a block) this many clusters; says what it did.

    What a cluster looks for is one row of a linear layer; nothing else in the model depends on how many
    there are. **More** clusters: the rows are repeated in turn, and the copies moved away from their
    originals by ``split`` times the scale of the weights, so that training can tell them apart. With
    ``split=0`` and a multiple of the old number the model computes what it did. **Fewer**: the k-medoids
    of the rows stay, those that stand best for the rest. The same number changes nothing.

    The parameters are new, so make the optimizer afterwards. To load such weights into a new model, create
    it with that number: ``create_model("paca_vit_b0", clusters=(98, 98, 98, 0))``.
    """
    if clusters < 1:
        raise UserError(f"clusters={clusters}; give at least 1")
    if split < 0:
        raise UserError(f"split={split}; give 0 for equal copies, or a small positive number")
    layers = [module for module in model.modules() if isinstance(module, Clustering)]
    if not layers:
        raise UserError(f"{type(model).__name__} learns no clusters; give a PaCa-ViT or one of its parts")
    generator = torch.Generator().manual_seed(seed)
    before = sorted({layer.clusters for layer in layers})
    for layer in layers:
        if layer.clusters != clusters:
            _resize(layer, clusters, split, generator)
    return "; ".join(_sentence(old, clusters, split) for old in before)


def _resize(layer: Clustering, clusters: int, split: float, generator: torch.Generator) -> None:
    old = layer.assign
    rows = _rows(old.weight, clusters)  # (clusters,): which old row each new one comes from
    weight = old.weight[rows]  # (clusters, width)
    copies = weight[layer.clusters :]
    noise = torch.randn(copies.shape, generator=generator).to(copies)
    copies += split * old.weight.square().mean().sqrt() * noise
    layer.assign = nn.Linear(
        old.in_features, clusters, bias=old.bias is not None, device=weight.device, dtype=weight.dtype
    )
    layer.assign.weight.copy_(weight)
    if old.bias is not None:
        layer.assign.bias.copy_(old.bias[rows])
    layer.assign.requires_grad_(old.weight.requires_grad)


def _rows(weight: Tensor, clusters: int) -> Tensor:
    count = weight.shape[0]
    if clusters < count:
        return kmedoids(weight.unsqueeze(0), clusters).indices[0].sort().values
    return torch.arange(clusters, device=weight.device) % count


def _sentence(old: int, new: int, split: float) -> str:
    if new == old:
        return f"{old} clusters stay: nothing changed"
    if new < old:
        return f"{old} clusters become {new}, those that stand best for the rest; train before use"
    if split:
        return f"{old} clusters become {new}: repeated, and the copies moved apart; train before use"
    if new % old == 0:
        return f"{old} clusters become {new}: each {new // old} times; the outputs stay the same"
    return f"{old} clusters become {new}: {new % old} count once more than the others; train before use"
