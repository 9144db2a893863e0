"""Model structure without arithmetic: configs, components, sites, tensors, recipes, sharding."""
