"""Studies: methods × cases × seeds with equal tuning, run in parallel, tested for significance (``fl-train study``)."""
