"""What a model is: layers of any origin as pure functions, met on abstract values."""
