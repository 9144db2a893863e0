"""The fault museum (plant every known fault, score the diagnosis), and the demo."""
