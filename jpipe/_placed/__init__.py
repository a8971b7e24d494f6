"""Functions of trees whose leaves are on several devices."""
