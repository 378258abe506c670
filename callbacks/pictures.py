"""Writes a picture to a file of the run and to every logger that accepts pictures."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fl_lightning.files import whole_file
from fl_lightning.run.callback import Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def publish(trainer: Trainer, figure: "Figure", path: Path, name: str, round_idx: int) -> None:
    """Write a picture to a file, and send it to W&B and TensorBoard loggers; other loggers accept none.

    Args:
        trainer: The trainer with the loggers.
        figure: The picture.
        path: File to write; its folder is created.
        name: Name of the picture in the loggers.
        round_idx: Step of the loggers.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    with whole_file(path) as temporary:
        figure.savefig(temporary)
    picture = np.asarray(canvas.buffer_rgba())[..., :3]  # type: ignore[no-untyped-call]
    for logger in trainer.run.loggers:
        if hasattr(logger, "log_image"):
            logger.log_image(name, [picture], step=round_idx)
        elif hasattr(logger, "experiment") and hasattr(logger.experiment, "add_image"):
            logger.experiment.add_image(name, picture, round_idx, dataformats="HWC")
