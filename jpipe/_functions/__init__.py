"""The functions of a stage on a micro-batch: traced, differentiated, cut as jaxprs."""
