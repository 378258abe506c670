"""Relations between clients: topologies of decentralized training, and measures of similarity."""

from fl_lightning.relations.topology import (
    BarabasiAlbert,
    Complete,
    EdgeListFile,
    ErdosRenyi,
    Ring,
    Star,
    Topology,
    WattsStrogatz,
)

__all__ = ["BarabasiAlbert", "Complete", "EdgeListFile", "ErdosRenyi", "Ring", "Star", "Topology", "WattsStrogatz"]
