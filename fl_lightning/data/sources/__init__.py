"""Where data come from: public data sets, files, generators."""
