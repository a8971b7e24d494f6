"""Several processes that run one program: who they are, what passes between them."""
