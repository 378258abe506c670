"""The parts of a round: its stages, what a client does in them, and what crosses between client and server."""
