"""How a mini-batch runs: compiled programs, transfers, the loop that drives them."""
