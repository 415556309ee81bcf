"""The command ``vtok``: a thin shell over the library, one module per verb."""

from visualtokens.cli.app import main

__all__ = ["main"]
