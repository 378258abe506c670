"""The heterophilous graphs of Platonov et al., with the two Wikipedia networks that PyG's class leaves out.

Source: Platonov, Kuznedelev, Diskin, Babenko, Prokhorenkova, "A Critical Look at the Evaluation of GNNs under
Heterophily: Are We Really Making Progress?", ICLR 2023. Chameleon and squirrel are those of Pei et al., "Geom-GCN",
ICLR 2020, without directions of edges; filtered, without the pages that stand there twice and give test labels away.
"""

import os

from torch_geometric.data import InMemoryDataset
from torch_geometric.datasets import HeterophilousGraphDataset


class HeterophilousGraphs(HeterophilousGraphDataset):  # type: ignore[misc]
    """PyG's class, which also reads ``root/heterophilous_npz/chameleon.npz`` and the like.

    Not in ``root/chameleon``: there PyG's ``WikipediaNetwork`` keeps a file of the same name and another layout.

    Args:
        root: Folder of the data sets.
        name: The file is called after it, in lower case and with ``_`` in place of ``-``.
    """

    def __init__(self, root: str, name: str) -> None:
        self.name = name.lower().replace("-", "_")
        self.from_wikipedia = self.name.startswith(("chameleon", "squirrel"))
        InMemoryDataset.__init__(self, root)  # PyG's class refuses other names than its own
        self.load(self.processed_paths[0])

    @property
    def raw_dir(self) -> str:
        """Where the file is, or goes."""
        return os.path.join(self.root, "heterophilous_npz" if self.from_wikipedia else f"{self.name}/raw")

    @property
    def processed_dir(self) -> str:
        """Where it goes when it is converted."""
        folder = f"heterophilous_npz/processed/{self.name}" if self.from_wikipedia else f"{self.name}/processed"
        return os.path.join(self.root, folder)
