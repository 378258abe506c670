"""Relations between clients: who talks to whom without a server, and who is alike."""

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
