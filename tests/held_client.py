"""A client that stands still in the middle of a run, to be killed there."""

import os
import time
from pathlib import Path
from typing import Any

from fl_lightning import ClientModule

#: The environment variable that names the file; without it nobody stands still.
HELD_FILE = "FL_TEST_HELD_FILE"


class HeldClient(ClientModule):
    """Waits in its second step to be killed, where no process has done so before, and writes its process id down."""

    num_steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_steps += 1
        if self.num_steps == 2 and (name := os.environ.get(HELD_FILE)):
            self._wait(Path(name))
        return super().training_step(batch, batch_idx)

    def _wait(self, file: Path) -> None:
        own = file.with_suffix(f".{os.getpid()}")
        own.write_text(str(os.getpid()))
        try:
            os.link(own, file)  # whole, and by one process alone
        except FileExistsError:
            return
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            time.sleep(0.1)
        raise TimeoutError("nobody has killed this process")
