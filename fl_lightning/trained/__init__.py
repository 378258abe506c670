"""Trained models for use outside a run: read from its folder, as plain modules of torch."""

from fl_lightning.trained.loading import LoadedRun, load_run
from fl_lightning.trained.models import BatchModel, ExampleModel, GraphModel

__all__ = ["BatchModel", "ExampleModel", "GraphModel", "LoadedRun", "load_run"]
