"""The life of a round: what is asked for, what a client does, what crosses between client and server."""
