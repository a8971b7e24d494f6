"""Functions of trees whose leaves are spread over places."""
