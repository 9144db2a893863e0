"""The models as compositions of their components."""
