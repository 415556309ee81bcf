"""``python -m visualtokens`` is the command ``vtok``."""

import sys

from vtok import main

sys.exit(main())
