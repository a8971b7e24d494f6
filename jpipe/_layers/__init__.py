"""Layers of any origin as pure functions of variables, traced on abstract values."""
