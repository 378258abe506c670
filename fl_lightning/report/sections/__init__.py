"""The sections of a run's page, each a file with a function ``section``."""
