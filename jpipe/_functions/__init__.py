"""What a stage computes on a micro-batch: traced, differentiated and cut as jaxprs."""
