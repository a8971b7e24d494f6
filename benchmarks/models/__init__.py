"""The models of the published tables, as sequences of Flax layers."""
