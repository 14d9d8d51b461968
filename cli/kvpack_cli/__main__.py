"""``python -m kvpack_cli`` is the command ``kvpack``."""

from __future__ import annotations

import sys

from kvpack_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
