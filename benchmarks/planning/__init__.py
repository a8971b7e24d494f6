"""How good plans are: against every cut and schedule there is, measured."""
