"""A run: its folder, checkpoints, loggers and processes."""
