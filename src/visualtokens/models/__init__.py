"""The model families. Importing this registers them with timm."""

from visualtokens.models import paca_vit as paca_vit
from visualtokens.models.registry import create_model, list_models

__all__ = ["create_model", "list_models"]
