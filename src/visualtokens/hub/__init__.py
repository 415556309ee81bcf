"""Sharing trained models: a repository with its model card, as a folder or on the Hugging Face Hub."""

from visualtokens.hub.card import LICENSES, model_card
from visualtokens.hub.repository import push_to_hub, write_repository

__all__ = ["LICENSES", "model_card", "push_to_hub", "write_repository"]
