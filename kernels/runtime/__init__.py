"""What every kernel needs: targets, settings, compilation with a cache, machine code."""
