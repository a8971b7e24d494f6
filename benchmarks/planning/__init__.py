"""How good plans are: measured against every other way, and beside published cuts."""
