"""Find the component in which a run goes wrong."""
