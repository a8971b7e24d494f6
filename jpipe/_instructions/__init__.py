"""One list of instructions over slots, and the loop that runs it."""
