"""Sources of data: public data sets, files and generators."""
