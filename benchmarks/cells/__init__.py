"""Three ways to fill a cell of a table: measured, compiled, predicted."""
