"""The command ``vtok``: one module per verb."""

from visualtokens.cli.app import main

__all__ = ["main"]
