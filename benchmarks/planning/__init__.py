"""How good plans are: measured against their rivals, and beside published cuts."""
