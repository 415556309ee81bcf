"""``python -m visualtokens.train`` runs ``vtok train``, for torchrun."""

import sys

from vtok import main

sys.exit(main(["train", *sys.argv[1:]]))
