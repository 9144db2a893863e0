"""The backend of our kernels, component by component."""
