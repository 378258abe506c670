"""``python -m fl_lightning`` is ``fl-train``, for ``torchrun -m`` and where no folder of scripts is on the path."""

import sys

from fl_lightning.command_line import main

if __name__ == "__main__":
    sys.exit(main())
