"""The user's function as one jaxpr, and what each of its equations follows from."""
