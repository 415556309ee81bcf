"""``python -m visualtokens.train`` runs ``vtok train``, for torchrun."""

import sys

from visualtokens.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
