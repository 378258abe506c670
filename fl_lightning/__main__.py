"""``python -m fl_lightning`` is ``fl-train``, for ``torchrun -m`` and where no folder of scripts is on the path."""

import os
import sys

if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[0] == os.getcwd():
        del sys.path[0]  # Python searches the current folder first, fl-train last, and only for some verbs
    from fl_lightning.command_line import main

    sys.exit(main())
