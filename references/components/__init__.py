"""The components of the models as pure functions on named tensors."""
