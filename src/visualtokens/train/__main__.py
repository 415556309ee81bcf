"""``python -m visualtokens.train`` is ``vtok train``."""

import sys

from visualtokens.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
