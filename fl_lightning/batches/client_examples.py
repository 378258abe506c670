"""The independent examples that one client holds."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ClientExamples:
    """A client's private rows of a table, sequences or images, with their targets and roles.

    Shape legend: N examples of this client, X the shape of one example, H numbers of a target.

    Attributes:
        name: Natural where the data has names (a state, a sensor), else zero-padded, so that names sort as clients do.
        x_NX: Inputs, float32, (N, *X); images lie in [0, 1].
        y_N: Class of each example, int64 (N,), negative where it is unknown; or a regression's targets, float32 (N, H).
        train_mask_N: Boolean; the three masks never overlap.
        val_mask_N: Boolean.
        test_mask_N: Boolean.
    """

    name: str
    x_NX: Tensor
    y_N: Tensor
    train_mask_N: Tensor
    val_mask_N: Tensor
    test_mask_N: Tensor

    @property
    def size(self) -> int:
        """Examples of the client, whatever their roles."""
        return len(self.x_NX)

    @property
    def work(self) -> int:
        """What the client costs, relative to others of its federation: its examples, which all have one shape."""
        return self.size

    @property
    def num_examples(self) -> int:
        """Labelled training examples: what strategies weight clients by."""
        return int(self.train_mask_N.sum())
