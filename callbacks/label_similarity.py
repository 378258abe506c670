"""Whether clients that a strategy considers similar have similar labels: a metric in every round, for studies."""

import numpy as np
import torch

from fl_lightning.data.partition.heterogeneity import label_histograms
from fl_lightning.relations.similarity import cosine_similarity
from fl_lightning.run.callback import Callback, Trainer

from .similarity import Matrix, correlation


class LabelSimilarity(Callback):
    """Correlates the strategy's matrices over the clients with the similarity of the clients' labels.

    ``similarity/<name>_labels`` is the Pearson correlation, over pairs of different clients, of a matrix of the
    strategy (``Strategy.matrices``: similarity of signatures, mixing weights) with the cosine of the clients' label
    counts. No server knows these, so it is for studies only. It needs no work of the clients, and is measured in every
    round.

    Raises:
        ValueError: The data have no classes.
    """

    needs_data = True

    def on_fit_start(self, trainer: Trainer) -> None:
        """Count the clients' labels."""
        datamodule = trainer.run.datamodule
        if any(client.y_N.is_floating_point() for client in datamodule.clients):
            raise ValueError(
                "LabelSimilarity compares labels, and these data have numbers as targets: leave it out of "
                "trainer.callbacks"
            )
        counted = label_histograms(datamodule.clients, datamodule.num_outputs)
        histogram_CK = torch.from_numpy(counted[list(trainer.run.training_clients)]).double()
        self.label_similarity_CC: Matrix = cosine_similarity(histogram_CK).numpy()

    def on_round_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Log the correlations."""
        for name, matrix_CC in trainer.run.strategy.matrices().items():
            result = correlation(matrix_CC.double().cpu().numpy(), self.label_similarity_CC)
            if np.isfinite(result):
                metrics[f"similarity/{name.replace(' ', '_')}_labels"] = result
