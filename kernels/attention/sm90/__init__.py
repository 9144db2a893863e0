"""The parts of sparse attention on Hopper."""
