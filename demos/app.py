"""The demo from a checkout: `python demos/app.py` is `vidgen demo`, with the same options."""

from __future__ import annotations

import sys

from vidgen.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))
