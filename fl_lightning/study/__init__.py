"""Studies: methods × cases × seeds, tuned alike, run in parallel, tested for significance (``fl-train study``)."""
