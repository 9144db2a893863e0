"""The small models in trainable form."""
