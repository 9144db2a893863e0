"""The backend `cutedsl`: our CuTe DSL kernels, component by component."""
