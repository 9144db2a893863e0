"""What every kernel needs: targets, settings, compilation with a cache, facts of machine code."""
